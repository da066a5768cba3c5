"""A store behind a slow link, for benchmarks: a folder, read by S3 and by plain HTTP.

Each request waits before its first byte, and each connection has a rate, as with a bucket far away.
The tests' proxy does the same and more, but passes 170 MB/s in all. Here bodies go from the file to
the socket without a copy in Python (`os.sendfile`), and one core is enough for 2 GB/s.

    with Link(root, latency=0.05, rate=1e8) as link:
        ...                                     # clients read link.url("photos/a.tar")
        assert link.count("photos/").sent == 1_000

Objects are files: `GET /folder/a.tar` of HTTP is key `a.tar` in bucket `folder` of S3. No signature
is looked at, and nothing can be written.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.remote.process import Process
from tests.remote.proxy import Count
from tests.remote.servers import s3_environ

LATENCY, RATE = 0.05, 100e6  # seconds before the first byte; bytes a second of a connection
_CONTROL = "/-link-/"  # requests below it are for the link
_PIECE = 256 << 10  # bytes sent at once


@dataclass
class Entry:
    """One request."""

    method: str
    path: str  # unquoted, with its query
    status: int
    sent: int  # bytes of the body
    start: float  # time.monotonic()
    end: float


class Link(Process):
    """Starts the server; `endpoint` is its URL, without a slash at the end."""

    def __init__(self, root: Path, latency: float = LATENCY, rate: float = RATE) -> None:
        words = [str(root.resolve()), str(latency), str(rate)]
        super().__init__(lambda port: [sys.executable, "-m", __name__, str(port), *words])

    def url(self, path: str) -> str:
        return f"{self.endpoint}/{path}"

    def environ(self) -> dict[str, str]:
        """What clients of S3 need to know, as environment variables."""
        # The last is as streaming names it.
        return {**s3_environ(self.endpoint), "S3_ENDPOINT_URL": self.endpoint}

    def log(self) -> list[Entry]:
        """The requests since `clear`, in the order of their ends."""
        return [Entry(**entry) for entry in self._ask("log")]

    def count(self, match: str = "") -> Count:
        """Of the requests whose path contains `match`."""
        found = [entry for entry in self.log() if match in entry.path]
        return Count(len(found), 0, sum(entry.sent for entry in found))

    def clear(self) -> None:
        self._ask("clear")

    def _ask(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self.endpoint}{_CONTROL}{what}", timeout=30) as answer:
            return json.load(answer)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, port: int, root: Path, latency: float, rate: float) -> None:
        self.root, self.latency, self.rate = root, latency, rate
        self.log: list[Entry] = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(socketserver.StreamRequestHandler):
    """One connection."""

    server: _Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        try:
            while line := self.rfile.readline():
                method, target, _ = line.decode().split(" ", 2)
                headers: dict[str, str] = {}
                while (field := self.rfile.readline().strip()) != b"":
                    name, _, value = field.decode().partition(":")
                    headers[name.lower()] = value.strip()
                self.rfile.read(int(headers.get("content-length", 0)))
                self._answer(method, target, headers)
        except OSError:  # the client went away
            pass

    def _answer(self, method: str, target: str, headers: dict[str, str]) -> None:
        if target.startswith(_CONTROL):
            self._control(target.removeprefix(_CONTROL))
            return
        entry = Entry(method, unquote(target), 0, 0, time.monotonic(), 0)
        with self.server.lock:
            self.server.log.append(entry)
        try:
            time.sleep(self.server.latency)
            self._object(entry, target, headers)
        finally:
            entry.end = time.monotonic()

    def _object(self, entry: Entry, target: str, headers: dict[str, str]) -> None:
        url = urlsplit(target)
        path = self.server.root / unquote(url.path).strip("/")
        query = parse_qs(url.query, keep_blank_values=True)
        if entry.method not in ("GET", "HEAD"):
            self._text(entry, 405, "<Error><Code>MethodNotAllowed</Code></Error>")
        elif "list-type" in query:
            self._text(entry, 200, _listing(path, query))
        elif path.is_file():
            self._file(entry, path, headers)
        elif path.is_dir():  # a bucket
            self._text(entry, 200, "<LocationConstraint>us-east-1</LocationConstraint>")
        else:
            self._text(entry, 404, "<Error><Code>NoSuchKey</Code></Error>")

    def _control(self, what: str) -> None:
        with self.server.lock:
            body = json.dumps([asdict(entry) for entry in self.server.log if entry.end])
            if what == "clear":
                self.server.log.clear()
        self._head(200, {"Content-Length": str(len(body))})
        self.wfile.write(body.encode())

    def _head(self, status: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items())]
        self.wfile.write(("\r\n".join(lines) + "\r\n\r\n").encode())

    def _text(self, entry: Entry, status: int, text: str) -> None:
        entry.status, body = status, text.encode()
        self._head(status, {"Content-Type": "application/xml", "Content-Length": str(len(body))})
        if entry.method != "HEAD":
            self.wfile.write(body)
            entry.sent = len(body)

    def _file(self, entry: Entry, path: Path, asked: dict[str, str]) -> None:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
            headers = {
                "ETag": tag,
                "Last-Modified": formatdate(found.st_mtime, usegmt=True),
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
            }
            if asked.get("if-match", tag) != tag:
                self._text(entry, 412, "<Error><Code>PreconditionFailed</Code></Error>")
                return
            start, stop = 0, found.st_size
            entry.status = 200
            if (span := asked.get("range", "")).startswith("bytes="):
                start, stop = _span(span, found.st_size)
                if start >= stop:
                    self._text(entry, 416, "<Error><Code>InvalidRange</Code></Error>")
                    return
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.st_size}"
                entry.status = 206
            self._head(entry.status, {**headers, "Content-Length": str(stop - start)})
            if entry.method == "GET":
                self._send(entry, file.fileno(), start, stop)

    def _send(self, entry: Entry, file: int, start: int, stop: int) -> None:
        """The bytes at the connection's rate: the last arrives when all of them may have."""
        began, rate, at = time.monotonic(), self.server.rate, start
        while at < stop:
            piece = min(_PIECE, stop - at)
            if rate:
                due = began + (at + piece - start) / rate
                time.sleep(max(due - time.monotonic(), 0))
            end = at + piece
            while at < end:
                at += os.sendfile(self.connection.fileno(), file, at, end - at)
                entry.sent = at - start


def _span(text: str, size: int) -> tuple[int, int]:
    """The first byte and the one behind the last of `bytes=first-last`."""
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


def _listing(bucket: Path, query: dict[str, list[str]]) -> str:
    """ListObjectsV2, all at once."""
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    entries, folders = [], set()
    for path in sorted(path for path in bucket.rglob("*") if path.is_file()):
        key = path.relative_to(bucket).as_posix()
        if not key.startswith(prefix):
            continue
        name, slash, _ = key.removeprefix(prefix).partition(delimiter or "\0")
        if slash:
            folders.add(prefix + name + delimiter)
            continue
        found = path.stat()
        time_ = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.st_mtime))
        entries.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{time_}</LastModified>"
            f"<ETag>&quot;{found.st_mtime_ns:x}-{found.st_size:x}&quot;</ETag>"
            f"<Size>{found.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    common = "".join(
        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        for name in sorted(folders)
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket.name)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(entries) + len(folders)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{''.join(entries)}{common}</ListBucketResult>"
    )


def main(port: str, root: str, latency: str, rate: str) -> None:
    _Server(int(port), Path(root), float(latency), float(rate)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
