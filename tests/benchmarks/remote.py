"""Epochs over photos in a bucket far away: shardkit's Loader beside webdataset, LitData and MDS.

    python -m tests.benchmarks.remote prepare --data PHOTOS --work WORK [--peers ENVS]
    python -m tests.benchmarks.remote epoch   --work WORK [--peers ENVS] [--rounds 5] [--only NAMES]
    python -m tests.benchmarks.remote bytes   --work WORK [--peers ENVS]
    python -m tests.benchmarks.remote start   --work WORK
    python -m tests.benchmarks.remote convert --data PHOTOS --work WORK/convert [--rounds 5]

PHOTOS is what `data photos` made; `prepare` puts it into the stores of all contenders. ENVS is what
make_peers.sh made; without it the libraries that are not installed are left out. The bucket is
behind `link.py`: 50 ms a request and 100 MB/s a connection.

`epoch`: seconds and bytes of a first epoch, nothing cached, in a process of its own. A contender is
a library and its workers; `link` is ranges of the same objects by obstore alone, its workers so
many threads, with so many MiB a request. `bytes`: what is downloaded in each of three epochs, with
a limit of half the dataset, and by each of two machines with two processes. `start`: round trips
until the first batch. Prints one JSON object.

`convert` is a conversion beside the local one and the transfer alone: `from` reads the bucket and
writes here, `there` reads and writes S3 (moto). Whole commands with two workers. The transfer alone
is obstore's in a process of its own, with 64 threads: each photo is read and, for `there`, the
finished shards are uploaded. The last figures are conversion / (local conversion + transfer).
"""

import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import shardkit
from tests.benchmarks.harness import (
    LOOPS,
    SHARDKIT,
    Contender,
    arguments,
    called,
    fresh,
    machine,
    measure,
    script,
    summary,
    timed,
)
from tests.benchmarks.link import Link
from tests.remote.servers import S3

STORES = {"shardkit": "wds", "webdataset": "wds", "link": "wds"}  # others have their own
ENVIRONMENTS = {"webdataset": "main", "litdata": "main", "streaming": "streaming"}
SHARD = "64MB"  # as LitData and MDS are given in loops.py
# Their best numbers of workers on two cores.
NAMES = (
    *("link 32x1", "link 64x1", "link 64x4", "shardkit", "shardkit folder", "shardkit crops"),
    *("webdataset 4", "webdataset 4 crops", "litdata 1", "litdata 2 crops", "streaming 2"),
)


class Bench:
    """The stores, behind a link, and the interpreters of the contenders."""

    def __init__(self, work, peers):
        self.root, self.scratch, self.peers = work / "root", work / "scratch", peers

    def python(self, name):
        if self.peers is None or name not in ENVIRONMENTS:
            return sys.executable
        return os.fspath(self.peers / ENVIRONMENTS[name] / "bin/python")

    def store(self, name):
        return self.root / "photos" / STORES.get(name, name)

    def size(self, name):
        return sum(path.stat().st_size for path in self.store(name).rglob("*") if path.is_file())

    @contextmanager
    def cache(self):
        """A new folder."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.scratch, ignore_cleanup_errors=True) as folder:
            yield folder

    def contender(self, link, name, **asked):
        shards = sorted(path.name for path in self.store(name).glob("*.tar"))
        folder = f"photos/{self.store(name).name}"
        urls = [link.url(f"{folder}/{shard}") for shard in shards]
        environ = asked.pop("environ", {})
        asked = {"url": f"s3://{folder}", "urls": urls, "decode": False, "workers": 2, **asked}
        return Contender(self.python(name), name, asked, {**link.environ(), **environ})

    def prepare(self, data):
        (fresh(self.root) / "photos").mkdir(parents=True)
        shardkit.convert(data, "wds", self.store("shardkit"), shard_size=SHARD, workers=2)
        peers = ("litdata", "streaming") if self.peers else ()
        for name in peers:
            called(self.python(name), LOOPS, "write", name, data, self.store(name))
        return {name: self.size(name) for name in ("shardkit", *peers)}

    def epochs(self, names, rounds):
        with Link(self.root) as link:
            runs = {name: partial(self.first_epoch, link, name) for name in names}
            every = measure(runs, rounds)
        samples = len(shardkit.open(self.store("shardkit")))
        medians = {}
        for name, runs_of in every.items():
            found = [run for run in runs_of if "failed" not in run]
            assert name.startswith("link") or {run["samples"] for run in found} <= {samples}
            if found:
                middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
                rate = round(middle["sent"] / middle["seconds"] / 1e6)
                medians[name] = {**middle, "MB/s": rate}
        return {"median": medians, "samples": samples, "runs": every}

    def first_epoch(self, link, name):
        """What the contender says of it, and what the server has sent; or why it failed."""
        library, *words = name.split()
        asked = {"decode": "crops" in words}
        with ExitStack() as stack:
            if library not in ("link", "webdataset") and name not in IN_MEMORY:
                asked["cache"] = stack.enter_context(self.cache())
            if library == "link":
                threads, size = words[0].split("x")
                asked |= {"workers": int(threads), "bytes": int(size) << 20}
            elif library != "shardkit":
                asked["workers"] = int(words[0])
            elif "cache" not in asked:
                asked["limit"] = "2GB"
            try:
                contender = stack.enter_context(self.contender(link, library, **asked))
                link.clear()
                found = contender.epoch()
            except RuntimeError as error:
                return {"failed": str(error).splitlines()[-1]}
        sent = link.count()
        share = sent.sent / self.size(library)
        return {**found, "sent": sent.sent, "share": share, "requests": sent.requests}

    def downloads(self):
        """Shares of the dataset that are downloaded."""
        names = ["shardkit", *(("litdata", "streaming") if self.peers else ())]
        found = {}
        for name, share in itertools.product(names, (None, 0.5)):
            limit = None if share is None else max(int(share * self.size(name)), 4 << 20)
            found[f"{name}, limit {share}"] = self.shares(1, 1, name=name, limit=limit)
        ranks = {"parts": 2, "world": 4, "environ": {"LOCAL_WORLD_SIZE": "2"}}
        return {**found, "two machines": self.shares(2, 2, **ranks)}

    def shares(self, machines, ranks, **asked):
        """Of each machine, the shares of the dataset in three epochs, with a cache of its own."""
        rows = [[] for _ in range(machines)]
        name = asked.pop("name", "shardkit")
        with ExitStack() as stack:
            links = [stack.enter_context(Link(self.root, 0.005, 0)) for _ in rows]
            caches = [stack.enter_context(self.cache()) for _ in rows]
            processes = []
            for rank in range(machines * ranks):
                own = {"cache": caches[rank // ranks], **({"rank": rank} if ranks > 1 else {})}
                process = self.contender(links[rank // ranks], name, **own, **asked)
                processes.append(stack.enter_context(process))
            for _ in range(3):
                for link in links:
                    link.clear()
                try:
                    for process in processes:
                        process.begin()
                    for process in processes:
                        process.end()
                except RuntimeError as error:  # others fail with a limit
                    return [*rows, str(error).splitlines()[-1]]
                for link, row in zip(links, rows, strict=True):
                    row.append(round(link.count().sent / self.size(name), 4))
        return rows

    def round_trips(self):
        """Until the first batch: a request takes a second, and all else next to nothing."""
        with Link(self.root, 1, 0) as link, self.contender(link, "shardkit") as contender:
            return {"round trips": round(contender.epoch()["first"], 2)}


IN_MEMORY = ("shardkit", "shardkit crops")
TRANSFER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import obstore
from obstore.store import from_url
store = from_url(sys.argv[1], client_options={"allow_http": True})
began = time.perf_counter()
keys = [found["path"] for batch in obstore.list(store, "photos/") for found in batch]
assert keys
with ThreadPoolExecutor(64) as pool:
    assert all(pool.map(lambda key: len(obstore.get(store, key).bytes()), keys))
    shards = sorted(Path(sys.argv[2]).glob("*.tar")) if len(sys.argv) > 2 else []
    list(pool.map(lambda path: obstore.put(store, "alone/" + path.name, path.read_bytes()), shards))
print(time.perf_counter() - began)
"""


def upload(server, data):
    """All photos below `photos/` of a new bucket."""
    import obstore

    bucket = server.bucket()
    store = server.open(bucket)
    paths = [path for path in data.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(16) as pool:
        names = [f"photos/{path.relative_to(data).as_posix()}" for path in paths]
        list(pool.map(lambda name, path: obstore.put(store, name, path), names, paths))
    return bucket


def conversions(data, work, rounds):
    data, work = data.resolve(), work.resolve()
    if not (work / "root/bucket/photos").exists():
        shutil.copytree(data, work / "root/bucket/photos")
    local = work / "local"

    def convert(source, out, environ):
        if isinstance(out, Path):
            fresh(out)
        words = [source, "--to", "wds", "-o", out, "--workers", "2", "--quiet", "--overwrite"]
        return timed([*SHARDKIT, "convert", *words], **environ)

    convert(data, local, {})
    with Link(work / "root") as link, S3() as s3:
        bucket, near, far = f"s3://{upload(s3, data)}", s3.environ(), link.environ()
        runs = {
            "local": partial(convert, data, local, {}),
            "from": partial(convert, "s3://bucket/photos", work / "got", far),
            "from, transfer": partial(script, TRANSFER, "s3://bucket", **far),
            "there": partial(convert, f"{bucket}/photos", f"{bucket}/out", near),
            "there, transfer": partial(script, TRANSFER, bucket, local, **near),
        }
        seconds = measure(runs, rounds)
    found = summary(seconds, {}, sum(path.is_file() for path in data.rglob("*")))
    median = found["median"]
    found["of_local_and_transfer"] = {
        name: round(median[name] / (median["local"] + median[f"{name}, transfer"]), 2)
        for name in ("from", "there")
    }
    return found


def main(words):
    parser = arguments(__doc__, "work", "peers", "rounds")
    parser.add_argument("what", choices=["prepare", "epoch", "bytes", "start", "convert"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", default=",".join(NAMES), help="contenders, with commas")
    given = parser.parse_args(words)
    bench = Bench(given.work, given.peers)
    names = [n for n in given.only.split(",") if given.peers or n.split()[0] in STORES]
    found = {
        "prepare": lambda: bench.prepare(given.data),
        "epoch": lambda: bench.epochs(names, given.rounds),
        "bytes": bench.downloads,
        "start": bench.round_trips,
        "convert": lambda: conversions(given.data, given.work, given.rounds),
    }[given.what]()
    return {"section": "remote", "benchmark": given.what, **found, **machine()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
