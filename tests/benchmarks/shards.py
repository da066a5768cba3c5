"""What planning a conversion costs, of sources with many shards, and listing a bucket.

    python -m tests.benchmarks.shards ours --shards 1000 10000 100000 --samples 1000
    python -m tests.benchmarks.shards listing --shards 10000 --latency 0.05

`ours` are manifests of shards that hold nothing but holes, `listing` keys of a store that can but
list them, with latency, in folders of 1,000. Each is measured in a process of its own. Prints a
line of JSON for each: seconds to open and to plan, seconds and pickled bytes of a task (the mean of
some), and the most anonymous memory meanwhile.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import tarfile
import tempfile
import threading
import time
from bisect import bisect_right
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from shardkit.conversion.run import prepare
from shardkit.formats import get_format
from shardkit.manifest import FOLDER, File, Manifest, Shard
from shardkit.manifest import NAME as MANIFEST_NAME
from shardkit.options import ConvertOptions
from shardkit.pieces import WHOLE
from shardkit.schema import Image, Int, Schema
from shardkit.storage import source, using
from shardkit.walk import Walk
from tests.benchmarks.harness import Memory, answer, arguments, seconds_of

_SAMPLE = 30_000  # bytes of a sample of ours
_TASKS = 8  # that are measured
_HERE = [sys.executable, "-m", "tests.benchmarks.shards"]


def make_ours(folder: Path, shards: int, samples: int) -> None:
    """A dataset whose shards have their sizes, and no data."""
    folder.mkdir(parents=True)
    entries = []
    for number in range(shards):
        name = f"shard-{number:06d}.tar"
        with open(folder / name, "wb") as file:
            file.truncate(samples * _SAMPLE)
        entries.append(Shard(File(name, samples * _SAMPLE, "0" * 32), samples))
    layout = get_format("wds").layout(Schema({"image": Image(), "label": Int()}))
    Manifest("wds", layout, tuple(entries), checksum=WHOLE).write(folder / FOLDER / MANIFEST_NAME)


def make_foreign(folder: Path, shards: int, samples: int) -> None:
    """TARs of small samples, as others write them: for the tests of sources with many shards."""
    folder.mkdir(parents=True)
    for number in range(shards):
        with tarfile.open(folder / f"data-{number:06d}.tar", "w") as tar:
            for n in range(samples):
                for suffix, value in (("txt", b"text"), ("cls", b"%d" % (n % 10))):
                    entry = tarfile.TarInfo(f"{number:06d}-{n:04d}.{suffix}")
                    entry.size = len(value)
                    tar.addfile(entry, io.BytesIO(value))


def plan(folder: str) -> dict[str, Any]:
    """What it costs to plan a conversion of a folder to TARs, and to make some of its tasks."""
    began, processor = time.perf_counter(), time.process_time()
    with Memory() as memory:
        made = prepare(folder, "wds", f"{os.path.dirname(folder)}/out", ConvertOptions())
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    some = made.tasks[:: max(len(made.tasks) // _TASKS, 1)]
    sizes: list[int] = []
    tasks = seconds_of(lambda: sizes.extend(len(pickle.dumps(t.reading())) for t in some))
    return {
        "samples": made.samples,
        "tasks": len(made.tasks),
        "plan_seconds": round(seconds, 3),
        "plan_cpu": round(processor, 3),
        "plan_mb": memory.anonymous,
        "task_seconds": round(tasks / len(some), 4),
        "task_bytes": sum(sizes) // len(sizes),
    }


def walk(endpoint: str) -> dict[str, Any]:
    """What it costs to list a folder in a store with all below."""
    folder, options = "s3://b/data", {"endpoint": endpoint, "skip_signature": "true"}
    began = time.perf_counter()
    with Memory() as memory, using(options, folder):
        found = sum(len(files) for _, files, _ in Walk(source(folder).listed()))  # type: ignore[attr-defined]
    seconds = round(time.perf_counter() - began, 3)
    return {"objects": found, "seconds": seconds, "mb": memory.anonymous}


class _Listing(ThreadingHTTPServer):
    """Answers what S3 clients ask of the bucket `b`, which has so many keys in folders of 1,000."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, objects: int, latency: float) -> None:
        self.keys = [f"data/part-{n // 1000:05d}/{n:08d}.bin" for n in range(objects)]
        self.latency, self.requests, self.now, self.most = latency, 0, 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Answers)

    def page(self, prefix: str, delimiter: str, after: str) -> str:
        at, entries, folder = bisect_right(self.keys, max(after, prefix)), [], ""
        while len(entries) < 1000 and at < len(self.keys) and self.keys[at].startswith(prefix):
            key = self.keys[at]
            folder, found, _ = key[len(prefix) :].partition("/")
            if delimiter and found:
                after = f"{prefix}{folder}/"
                entries.append(f"<CommonPrefixes><Prefix>{after}</Prefix></CommonPrefixes>")
                at = bisect_right(self.keys, after + "\x7f")
                after += "\x7f"
            else:
                entries.append(_ENTRY.format(key))
                at, after = at + 1, key
        more = at < len(self.keys) and self.keys[at].startswith(prefix)
        token = f"<NextContinuationToken>{after}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><Name>b</Name><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{''.join(entries)}</ListBucketResult>"
        )


_ENTRY = (
    "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    '<ETag>"0123456789abcdef0123456789abcdef"</ETag><Size>1</Size></Contents>'
)


class _Answers(BaseHTTPRequestHandler):
    server: _Listing
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        server = self.server
        with server.lock:
            server.requests, server.now = server.requests + 1, server.now + 1
            server.most = max(server.most, server.now)
        time.sleep(server.latency)
        asked = dict(parse_qsl(self.path.partition("?")[2]))
        after = asked.get("continuation-token", asked.get("start-after", ""))
        page = server.page(asked.get("prefix", ""), asked.get("delimiter", ""), after)
        with server.lock:
            server.now -= 1
        self._answer(200, page) if "list-type" in asked else self._answer(404)

    def do_HEAD(self) -> None:
        self._answer(404)

    def _answer(self, status: int, body: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def listing(objects: int, latency: float) -> dict[str, Any]:
    with _Listing(objects, latency) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = answer(*_HERE, "walk", f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        return {**found, "requests": server.requests, "at_once": server.most}


def main(words: list[str]) -> list[dict[str, Any]]:
    parser = arguments(__doc__)
    parser.add_argument("what", choices=("ours", "listing"))
    parser.add_argument("--shards", type=int, nargs="+", default=[1000])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--latency", type=float, default=0.05)
    given = parser.parse_args(words)
    reports = []
    for shards in given.shards:
        if given.what == "listing":
            found = listing(shards, given.latency)
        else:
            with tempfile.TemporaryDirectory() as work:
                make_ours(Path(work, "data"), shards, given.samples)
                found = answer(*_HERE, "plan", Path(work, "data"))
        reports.append({"what": given.what, "shards": shards, **found})
        print(json.dumps(reports[-1]), flush=True)
    return reports


if __name__ == "__main__":
    if sys.argv[1] in ("plan", "walk"):
        print(json.dumps({"plan": plan, "walk": walk}[sys.argv[1]](sys.argv[2])), flush=True)
        os._exit(0)
    main(sys.argv[1:])
