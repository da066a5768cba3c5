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

import json
import os
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
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

    def __init__(self, root, latency=LATENCY, rate=RATE):
        words = [str(root.resolve()), str(latency), str(rate)]
        super().__init__(lambda port: [sys.executable, "-m", __name__, str(port), *words])

    def url(self, path):
        return f"{self.endpoint}/{path}"

    def environ(self):
        """What clients of S3 need to know, as environment variables."""
        # The last is as streaming names it.
        return {**s3_environ(self.endpoint), "S3_ENDPOINT_URL": self.endpoint}

    def log(self):
        """The requests since `clear`, in the order of their ends."""
        return [Entry(**entry) for entry in self._ask("log")]

    def count(self, match=""):
        """Of the requests whose path contains `match`."""
        found = [entry for entry in self.log() if match in entry.path]
        return Count(len(found), 0, sum(entry.sent for entry in found))

    def clear(self):
        self._ask("clear")

    def _ask(self, what):
        with urllib.request.urlopen(f"{self.endpoint}{_CONTROL}{what}", timeout=30) as answer:
            return json.load(answer)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port, root, latency, rate):
        self.root, self.latency, self.rate = root, latency, rate
        self.log, self.lock = [], threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def listing(self, bucket, prefix="", delimiter="", **_):
        """ListObjectsV2, all at once: entries and folders, and where the rest begins."""
        entries, folders = [], set()
        for path in sorted(path for path in bucket.rglob("*") if path.is_file()):
            key = path.relative_to(bucket).as_posix()
            name, slash, _ = key.removeprefix(prefix).partition(delimiter or "\0")
            if key.startswith(prefix) and slash:
                folders.add(prefix + name + delimiter)
            elif key.startswith(prefix):
                found = path.stat()
                entries.append(ENTRY.format(escape(key), found.st_mtime_ns, found.st_size))
        return [*entries, *map(FOLDER.format, map(escape, sorted(folders)))], ""


FOLDER = "<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>"
ENTRY = (  # of the key, when it was changed, and its size
    "<Contents><Key>{0}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;"
    "{1:x}-{2:x}&quot;</ETag><Size>{2}</Size><StorageClass>STANDARD</StorageClass></Contents>"
)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self):
        with suppress(OSError):  # the client went away
            super().handle()

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith(_CONTROL):
            self._control(self.path.removeprefix(_CONTROL))
            return
        entry = Entry(self.command, unquote(self.path), 0, 0, time.monotonic(), 0)
        with self.server.lock:
            self.server.log.append(entry)
        try:
            time.sleep(self.server.latency)
            self._object(entry)
        finally:
            entry.end = time.monotonic()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _object(self, entry):
        url = urlsplit(self.path)
        path = self.server.root / unquote(url.path).strip("/")
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        if entry.method not in ("GET", "HEAD"):
            self._text(entry, 405, "<Error><Code>MethodNotAllowed</Code></Error>")
        elif "list-type" in query:
            found, more = self.server.listing(path, **query)
            more = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
            listed = path.name, "true" if more else "false", more, "".join(found)
            self._text(entry, 200, _LISTING.format(*listed))
        elif path.is_file():
            self._file(entry, path)
        elif path.is_dir():  # a bucket
            self._text(entry, 200, "<LocationConstraint>us-east-1</LocationConstraint>")
        else:
            self._text(entry, 404, "<Error><Code>NoSuchKey</Code></Error>")

    def _control(self, what):
        with self.server.lock:
            body = json.dumps([asdict(entry) for entry in self.server.log if entry.end])
            if what == "clear":
                self.server.log.clear()
        self._head(200, {"Content-Length": len(body)})
        self.wfile.write(body.encode())

    def _head(self, status, headers):
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def _text(self, entry, status, text):
        entry.status, body = status, text.encode()
        self._head(status, {"Content-Type": "application/xml", "Content-Length": len(body)})
        if entry.method != "HEAD":
            self.wfile.write(body)
            entry.sent = len(body)

    def _file(self, entry, path):
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
            headers = {
                "ETag": tag, "Last-Modified": formatdate(found.st_mtime, usegmt=True),
                "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream",
            }  # fmt: skip
            if self.headers.get("If-Match", tag) != tag:
                self._text(entry, 412, "<Error><Code>PreconditionFailed</Code></Error>")
                return
            start, stop = 0, found.st_size
            entry.status = 200
            if (span := self.headers.get("Range", "")).startswith("bytes="):
                start, stop = _span(span, found.st_size)
                if start >= stop:
                    self._text(entry, 416, "<Error><Code>InvalidRange</Code></Error>")
                    return
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.st_size}"
                entry.status = 206
            self._head(entry.status, {**headers, "Content-Length": stop - start})
            if entry.method == "GET":
                self._send(entry, file.fileno(), start, stop)

    def _send(self, entry, file, start, stop):
        """The bytes at the connection's rate: the last arrives when all of them may have."""
        began, rate, at = time.monotonic(), self.server.rate, start
        while at < stop:
            end = min(at + _PIECE, stop)
            if rate:
                due = began + (end - start) / rate
                time.sleep(max(due - time.monotonic(), 0))
            while at < end:
                at += os.sendfile(self.connection.fileno(), file, at, end - at)
                entry.sent = at - start


_LISTING = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{}</Name>'
    "<MaxKeys>1000</MaxKeys><IsTruncated>{}</IsTruncated>{}{}</ListBucketResult>"
)


def _span(text, size):
    """The first byte and the one behind the last of `bytes=first-last`."""
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


if __name__ == "__main__":
    port, root, latency, rate = sys.argv[1:]
    Server(int(port), Path(root), float(latency), float(rate)).serve_forever()
