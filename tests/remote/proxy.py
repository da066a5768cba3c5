"""A proxy between a client and a server, which counts what passes and disturbs it by rules.

It is a process of its own, so that it takes no time of the tests' and no fork copies it:

    with Proxy(server.endpoint) as proxy:
        proxy.add(Rule(match="/shard-3", skip=2, times=1, reset_after=1000))
        ...                                     # a client uses proxy.endpoint
        assert proxy.count("GET", "/shard-3").requests == 4
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import struct
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.remote.process import Process

_CONTROL = "/-proxy-"  # requests below it are for the proxy
_PIECE = 64 << 10  # bytes passed on at once


@dataclass(frozen=True)
class Rule:
    """What happens to requests; all rules that match apply, the later one where two disagree."""

    method: str = ""  # any
    match: str = ""  # a regular expression, searched in the path with its query, unquoted
    skip: int = 0  # so many that match pass before
    times: int | None = None  # and this rule applies to so many; None: to all that follow
    gather: int = 0  # held until so many are held at the same time, which then pass together
    hold: bool = False  # held until `clear`, and then not passed on
    status: int = 0  # answers with it, without asking the server
    body: str = ""  # of that answer
    refuse: bool = False  # resets the connection, without asking the server
    reset_after: int | None = None  # resets it after so many bytes of the body; 0: before the head
    close_after: int | None = None  # closes it after so many bytes, fewer than were announced
    shorten: int = 0  # so many bytes are missing at the end of the body; Content-Length agrees
    flip: int | None = None  # a bit of this byte of the body is flipped
    cached: bool = False  # as by a cache on the way: not of requests that are to go past it
    whole: bool = False  # the range is ignored: 200, and all of it


@dataclass
class Entry:
    """One request. Counted before it happens, so what a client has seen is in it."""

    method: str
    target: str  # the path with its query, unquoted
    range: str  # its header, or ""
    status: int  # 0: the connection was reset before
    received: int  # bytes of the request's body
    sent: int  # bytes of the response's body


@dataclass(frozen=True)
class Count:
    """So many requests, and the bytes of their bodies (received) and their responses' (sent)."""

    requests: int
    received: int
    sent: int


class Proxy(Process):
    """Starts the proxy; `endpoint` is its URL, without a slash at the end."""

    def __init__(self, upstream):
        super().__init__(lambda port: [sys.executable, "-m", __name__, str(port), upstream])

    def add(self, *rules):
        for rule in rules:
            changed = asdict(rule).items() - asdict(Rule()).items()
            self._ask("add", dict(changed))

    def clear(self):
        """Forgets all rules and requests, and ends those that are held."""
        self._ask("clear")

    def wait(self, method="", match="", requests=1):
        """Until there were so many requests; the time only ends what would never end."""
        for _ in range(6000):
            if self.count(method, match).requests >= requests:
                return
            time.sleep(0.01)
        raise AssertionError(f"{requests} requests did not come: {self.log()}")

    def log(self):
        """The requests, in the order of their starts."""
        return [Entry(**entry) for entry in self._ask("log")]

    def count(self, method="", match=""):
        """Of the requests that match as they do in a rule."""
        found = [
            entry
            for entry in self.log()
            if method in ("", entry.method) and re.search(match, entry.target)
        ]
        return Count(len(found), sum(e.received for e in found), sum(e.sent for e in found))

    def _ask(self, what, data=None):
        url = f"{self.endpoint}{_CONTROL}/{what}"
        with urllib.request.urlopen(url, json.dumps(data).encode(), timeout=30) as answer:
            return json.load(answer)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port, upstream):
        self.upstream = urlsplit(upstream)
        self.lock = threading.Lock()
        self.rules = []  # and how many requests each has matched
        self.log = []
        self.over = threading.Event()  # set for those that are held
        self.gathered = {}  # by how many they are to be
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):  # the client went away
            super().handle_error(request, client_address)

    def rule(self, method, target):
        """All rules for a request, as one."""
        merged = {}
        with self.lock:
            for given, seen in self.rules:
                rule = Rule(**given)
                if rule.method in ("", method) and re.search(rule.match, target):
                    seen[0] += 1
                    number = seen[0] - rule.skip
                    if number > 0 and (rule.times is None or number <= rule.times):
                        merged |= given
        return Rule(**merged)

    def control(self, what, data):
        with self.lock:
            if what == "add":
                self.rules.append((data, [0]))
            elif what == "clear":
                self.over.set()
                for barrier in self.gathered.values():
                    barrier.abort()
                self.over, self.gathered, self.rules, self.log = threading.Event(), {}, [], []
            else:
                return [asdict(entry) for entry in self.log]
        return None


class _BrokenError(Exception):
    """The connection to the client ends here."""


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, and one to the server."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: http.client.HTTPConnection | None = None

    def handle_request(self):
        data, target = self._read_body(), unquote(self.path)
        span = self.headers.get("Range", "")
        self.entry = Entry(self.command, target, span, 0, len(data), 0)
        if self.path.startswith(_CONTROL):
            done = self.server.control(self.path.rpartition("/")[2], json.loads(data))
            self._send_bytes(200, {}, json.dumps(done).encode())
            return
        with self.server.lock:
            self.server.log.append(self.entry)
            over = self.server.over
        try:
            rule = self.server.rule(self.command, target)
            if rule.cached and self.headers.get("Cache-Control") == "no-cache":
                rule = Rule()
            if rule.hold:
                over.wait()
                self._reset()
            if rule.gather:
                self._gather(rule.gather)
            self._answer(rule, data)
        except (_BrokenError, OSError, http.client.HTTPException):
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = handle_request  # noqa: N815

    def log_message(self, format, *args):
        pass

    def _read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _gather(self, count):
        with self.server.lock:
            barrier = self.server.gathered.setdefault(count, threading.Barrier(count))
        try:
            barrier.wait(60)
        except threading.BrokenBarrierError:  # they do not come at the same time
            self._reset()

    def _answer(self, rule, data):
        if rule.refuse:
            self._reset()
        if rule.status:
            self._send_bytes(rule.status, {}, rule.body.encode())
            return
        dropped = {"transfer-encoding", "range" if rule.whole else ""}
        asked = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        response = self._ask(self.command, asked, data)
        headers, length = _head(response), response.length
        if length is None:  # chunked
            body = response.read()
            self._send_bytes(response.status, headers, body)
            return
        if rule.shorten:
            length = max(0, length - rule.shorten)
            headers["Content-Length"] = str(length)
        self._send(response.status, headers, length, response.read, rule)
        response.read()  # what was cut off

    def _ask(self, method, headers, data):
        """Of the server; a connection that it has closed meanwhile is opened again."""
        fresh = self.upstream is None
        if self.upstream is None:
            server = self.server.upstream
            self.upstream = http.client.HTTPConnection(server.hostname or "", server.port)
            self.upstream.connect()
            self.upstream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.upstream.request(method, self.path, data or None, headers)
            return self.upstream.getresponse()
        except (OSError, http.client.HTTPException):
            self.upstream.close()
            self.upstream = None
            if fresh:
                raise
            return self._ask(method, headers, data)

    def _send_bytes(self, status, headers, body):
        length = 0 if self.command == "HEAD" or status in (204, 304) else len(body)
        headers = {"Content-Length": str(len(body)), **headers}
        self._send(status, headers, length, io.BytesIO(body).read, Rule())

    def _send(
        self, status, headers, left,
        read, rule,
    ):  # fmt: skip
        if rule.reset_after == 0:
            self._reset()
        self.entry.status = status
        self.send_response_only(status)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        stop = rule.close_after if rule.reset_after is None else rule.reset_after
        while left:
            if self.entry.sent == stop:
                if rule.reset_after is not None:
                    self._reset()
                raise _BrokenError
            piece = read(min(_PIECE, left, left if stop is None else stop - self.entry.sent))
            if not piece:
                raise _BrokenError
            at = -1 if rule.flip is None else rule.flip - self.entry.sent
            if 0 <= at < len(piece):
                piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
            self.entry.sent += len(piece)
            self.wfile.write(piece)
            left -= len(piece)

    def _reset(self):
        """Without a farewell: the client's next call of the connection fails."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.wfile = self.rfile = io.BytesIO()  # they hold it open
        self.connection.close()
        raise _BrokenError


def _head(response):
    """The headers that are of the answer, not of its connection, in one spelling."""
    dropped = ("connection", "keep-alive", "transfer-encoding")
    return {k.title(): v for k, v in response.getheaders() if k.lower() not in dropped}


if __name__ == "__main__":
    _Server(int(sys.argv[1]), sys.argv[2]).serve_forever()
