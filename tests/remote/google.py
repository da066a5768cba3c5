"""A small Google Cloud Storage, in memory: what obstore asks of its XML interface, and no more.

gcp-storage-emulator knows the JSON interface only, which obstore does not use. Credentials are not
looked at. The root accepts a PUT of a bucket, as S3 does; with `copy=OTHER`, it becomes another.
"""

import hashlib
import itertools
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

_PAGE = 1000  # keys of a listing
_buckets = {}  # of each the objects by key: their bytes and headers
_numbers = itertools.count(1)
_lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_request(self):
        url = urlsplit(self.path)
        _, self.bucket, *rest = map(unquote, url.path.split("/", 2))
        self.key, self.query = "".join(rest), dict(parse_qsl(url.query, keep_blank_values=True))
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with _lock:
            status, headers, body = self.answer(data)
        self.send_response(status)
        for header in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request  # noqa: N815

    def log_message(self, format, *args):
        pass

    def answer(self, data):
        if not self.key and self.command == "PUT":
            _buckets[self.bucket] = {**_buckets.get(self.query.get("copy"), {})}
            return 200, {}, b""
        bucket = _buckets.get(self.bucket)
        if bucket is None:
            return _error(404, "NoSuchBucket")
        if not self.key:
            return self.listing(bucket)
        if self.command == "PUT":
            return self.put(bucket, data)
        return self.get(bucket) if self.key in bucket else _error(404, "NoSuchKey")

    def get(self, bucket):
        data, headers = bucket[self.key]
        if self.command == "DELETE":
            del bucket[self.key]
            return 204, {}, b""
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return _error(412, "PreconditionFailed")
        generation = headers["x-goog-generation"]
        if self.query.get("generation", generation) != generation:
            return _error(404, "NoSuchKey")
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return 200, headers, data
        size = len(data)
        first = int(span[1]) if span[1] else max(0, size - int(span[2]))
        last = min(size - 1, int(span[2])) if span[1] and span[2] else size - 1
        if first >= size:
            return _error(416, "InvalidRange")
        headers = headers | {"Content-Range": f"bytes {first}-{last}/{size}"}
        return 206, headers, data[first : last + 1]

    def put(self, bucket, data):
        found = bucket[self.key][1]["x-goog-generation"] if self.key in bucket else "0"
        if self.headers.get("x-goog-if-generation-match", found) != found:
            return _error(412, "PreconditionFailed")
        source = self.headers.get("x-goog-copy-source")
        if source is not None:
            other, _, key = unquote(source).lstrip("/").partition("/")
            if key not in _buckets.get(other, {}):
                return _error(404, "NoSuchKey")
            data = _buckets[other][key][0]
        headers = {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "x-goog-generation": str(next(_numbers)),
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
        }
        bucket[self.key] = data, headers
        return 200, headers, b""

    def listing(self, bucket):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        lines, folders = [], set()
        keys = sorted(key for key in bucket if key.startswith(prefix) and key > after)
        for key in keys[:_PAGE]:
            name, below, _ = key[len(prefix) :].partition(delimiter or "\0")
            if below:
                folders.add(prefix + name + delimiter)
                continue
            data, headers = bucket[key]
            lines.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><LastModified>"
                f"2026-01-01T00:00:00.000Z</LastModified><ETag>{headers['ETag']}</ETag></Contents>"
            )
        lines += [f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders]
        if len(keys) > _PAGE:
            last = escape(keys[_PAGE - 1])
            lines.append(f"<NextContinuationToken>{last}</NextContinuationToken>")
        text = f"<ListBucketResult>{''.join(lines)}</ListBucketResult>"
        return 200, {"Content-Type": "application/xml"}, text.encode()


def _error(status, code):
    return status, {}, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


if __name__ == "__main__":
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 256  # connections that begin at once
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
