"""A small Google Cloud Storage, in memory: what obstore asks of its XML interface, and no more.

gcp-storage-emulator knows the JSON interface only, which obstore does not use. Credentials are not
looked at. The root accepts a PUT of a bucket, as S3 does; with `copy=OTHER`, it becomes another.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import threading
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

_PAGE = 1000  # keys of a listing


@dataclass
class _Object:
    data: bytes
    generation: int

    @cached_property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


@dataclass
class _Store:
    buckets: dict[str, dict[str, _Object]] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: itertools.count(1))
    lock: Any = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: _Store

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        _, bucket, *rest = url.path.split("/", 2)
        self.bucket, self.key = unquote(bucket), unquote("".join(rest))
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.store.lock:
            status, headers, body = self.answer(data)
        self.send_response(status)
        for header in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        if not self.key and self.command == "PUT":
            copied = self.store.buckets.get(self.query.get("copy", ""), {})
            self.store.buckets[self.bucket] = {**copied}
            return 200, {}, b""
        if self.bucket not in self.store.buckets:
            return _error(404, "NoSuchBucket")
        if not self.key:
            return self.listing()
        return self.object(self.store.buckets[self.bucket], data)

    def object(self, bucket: dict[str, _Object], data: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.command == "PUT":
            return self.put(bucket, data)
        if self.command == "DELETE":
            return (204, {}, b"") if bucket.pop(self.key, None) else _error(404, "NoSuchKey")
        return self.get(bucket.get(self.key))

    def get(self, found: _Object | None) -> tuple[int, dict[str, str], bytes]:
        if found is None:
            return _error(404, "NoSuchKey")
        if self.headers.get("If-Match", found.tag) != found.tag:
            return _error(412, "PreconditionFailed")
        if self.query.get("generation", str(found.generation)) != str(found.generation):
            return _error(404, "NoSuchKey")
        headers = _headers(found)
        size, span = (
            len(found.data),
            re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")),
        )
        if span is None:
            return 200, headers | {"Content-Length": str(size)}, found.data
        first = int(span[1]) if span[1] else max(0, size - int(span[2]))
        last = min(size - 1, int(span[2])) if span[1] and span[2] else size - 1
        if first >= size:
            return _error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return 206, headers, found.data[first : last + 1]

    def put(self, bucket: dict[str, _Object], data: bytes) -> tuple[int, dict[str, str], bytes]:
        old = bucket.get(self.key)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (old.generation if old else 0):
            return _error(412, "PreconditionFailed")
        source = self.headers.get("x-goog-copy-source")
        if source is not None:
            other, _, key = unquote(source).lstrip("/").partition("/")
            if key not in self.store.buckets.get(other, {}):
                return _error(404, "NoSuchKey")
            data = self.store.buckets[other][key].data
        bucket[self.key] = _Object(data, next(self.store.numbers))
        return 200, _headers(bucket[self.key]), b""

    def listing(self) -> tuple[int, dict[str, str], bytes]:
        bucket = self.store.buckets[self.bucket]
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        lines, folders, last = [], set(), ""
        keys = sorted(key for key in bucket if key.startswith(prefix) and key > after)
        for key in keys[:_PAGE]:
            last, rest = key, key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            lines.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(bucket[key].data)}</Size>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(bucket[key].tag)}</ETag></Contents>"
            )
        lines += [f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders]
        if len(keys) > _PAGE:
            lines.append(f"<NextContinuationToken>{escape(last)}</NextContinuationToken>")
        return _xml(f"<ListBucketResult>{''.join(lines)}</ListBucketResult>")


def _headers(found: _Object) -> dict[str, str]:
    return {
        "ETag": found.tag,
        "x-goog-generation": str(found.generation),
        "Last-Modified": formatdate(1767225600, usegmt=True),
    }


def _xml(text: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/xml", **(headers or {})}, text.encode()


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


if __name__ == "__main__":
    _Handler.store = _Store()
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 256  # connections that begin at once
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
