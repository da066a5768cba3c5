"""What planning a conversion costs, of sources with many shards, and listing a bucket.

    python -m tests.benchmarks.shards ours --shards 1000 10000 100000 --samples 1000
    python -m tests.benchmarks.shards listing --shards 10000 --latency 0.05

`ours` are manifests of shards that hold nothing but holes, `listing` keys of a store that can but
list them, with latency, in folders of 1,000. Each is measured in a process of its own. Prints a
line of JSON for each: seconds to open and to plan, seconds and pickled bytes of a task (the mean of
some), and the most anonymous memory meanwhile.
"""

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
from itertools import accumulate
from pathlib import Path

from shardkit.conversion.run import prepare
from shardkit.formats import get_format
from shardkit.metadata import manifest
from shardkit.metadata.manifest import File, Manifest, Shard
from shardkit.options import ConvertOptions
from shardkit.schema import Image, Int, Schema
from shardkit.storage.checksums import WHOLE
from shardkit.storage.fs import source, using
from shardkit.storage.walk import Walk
from tests.benchmarks.harness import Memory, answer, arguments, seconds_of
from tests.benchmarks.link import ENTRY, FOLDER, Server

_SAMPLE = 30_000  # bytes of a sample of ours
_TASKS = 8  # that are measured
_HERE = [sys.executable, "-m", "tests.benchmarks.shards"]


def make_ours(folder, shards, samples):
    """A dataset whose shards have their sizes, and no data."""
    folder.mkdir(parents=True)
    entries = []
    for number in range(shards):
        name = f"shard-{number:06d}.tar"
        with open(folder / name, "wb") as file:
            file.truncate(samples * _SAMPLE)
        entries.append(Shard(File(name, samples * _SAMPLE, "0" * 32), samples))
    layout = get_format("wds").layout(Schema({"image": Image(), "label": Int()}))
    made = Manifest("wds", layout, tuple(entries), checksum=WHOLE)
    made.write(folder / manifest.FOLDER / manifest.NAME)


def make_foreign(folder, shards, samples):
    """TARs of small samples, as others write them: for the tests of sources with many shards."""
    folder.mkdir(parents=True)
    for number in range(shards):
        with tarfile.open(folder / f"data-{number:06d}.tar", "w") as tar:
            for n in range(samples):
                for suffix, value in (("txt", b"text"), ("cls", b"%d" % (n % 10))):
                    entry = tarfile.TarInfo(f"{number:06d}-{n:04d}.{suffix}")
                    entry.size = len(value)
                    tar.addfile(entry, io.BytesIO(value))


def plan(folder):
    """What it costs to plan a conversion of a folder to TARs, and to make some of its tasks."""
    began, processor = time.perf_counter(), time.process_time()
    with Memory() as memory:
        made = prepare(folder, "wds", f"{os.path.dirname(folder)}/out", ConvertOptions())
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    some = made.tasks[:: max(len(made.tasks) // _TASKS, 1)]
    sizes = []
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


def walk(endpoint):
    """What it costs to list a folder in a store with all below."""
    folder, options = "s3://b/data", {"endpoint": endpoint, "skip_signature": "true"}
    began = time.perf_counter()
    with Memory() as memory, using(options, folder):
        found = sum(len(files) for _, files, _ in Walk(source(folder).listed()))
    seconds = round(time.perf_counter() - began, 3)
    return {"objects": found, "seconds": seconds, "mb": memory.anonymous}


class _Listing(Server):
    """Has so many keys in folders of 1,000, and nothing else."""

    def __init__(self, objects, latency):
        self.keys = [f"data/part-{n // 1000:05d}/{n:08d}.bin" for n in range(objects)]
        super().__init__(0, Path("/nowhere"), latency, 0)

    def listing(self, bucket, prefix="", delimiter="", **asked):
        """A page."""
        after = asked.get("continuation-token", asked.get("start-after", ""))
        at, entries = bisect_right(self.keys, max(after, prefix)), []
        while len(entries) < 1000 and at < len(self.keys) and self.keys[at].startswith(prefix):
            key = self.keys[at]
            folder, found, _ = key[len(prefix) :].partition("/")
            if delimiter and found:
                after = f"{prefix}{folder}/"
                entries.append(FOLDER.format(after))
                at = bisect_right(self.keys, after + "\x7f")
                after += "\x7f"
            else:
                entries.append(ENTRY.format(key, at, 1))
                at, after = at + 1, key
        more = at < len(self.keys) and self.keys[at].startswith(prefix)
        return entries, after if more else ""


def listing(objects, latency):
    with _Listing(objects, latency) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = answer(*_HERE, "walk", f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    moments = sorted(m for each in server.log for m in ((each.start, 1), (each.end, -1)))
    at_once = max(accumulate(step for _, step in moments))
    return {**found, "requests": len(server.log), "at_once": at_once}


def main(words):
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
