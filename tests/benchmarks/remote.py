"""Epochs over photos in a bucket far away: shardkit's Loader beside webdataset, LitData and MDS.

    python -m tests.benchmarks.remote prepare --data PHOTOS --work WORK [--peers ENVS]
    python -m tests.benchmarks.remote epoch   --work WORK [--peers ENVS] [--rounds 5] [--only NAMES]
    python -m tests.benchmarks.remote bytes   --work WORK [--peers ENVS]
    python -m tests.benchmarks.remote start   --work WORK

PHOTOS is what photos.py made; `prepare` puts it into the stores of all contenders. ENVS is what
make_peers.sh made; without it the libraries that are not installed are left out. The bucket is
behind `link.py`: 50 ms a request and 100 MB/s a connection.

`epoch`: seconds and bytes of a first epoch, nothing cached, in a process of its own; every
contender once a round, in another order each round. A contender is a library and its workers;
`link` is ranges of the same objects by obstore alone, its workers so many threads, with so many MiB
a request. `bytes`: what is downloaded in each of three epochs, with a limit of half the dataset,
and by each of two machines with two processes. `start`: round trips until the first batch.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import shardkit
from tests.benchmarks.link import Link

CONTENDER = Path(__file__).with_name("remote_contender.py")
PEER_LOOPS = Path(shardkit.__file__).parent / "performance/peer_loops.py"
STORES = {"shardkit": "wds", "webdataset": "wds", "link": "wds"}  # others have their own
ENVIRONMENTS = {"webdataset": "main", "litdata": "main", "streaming": "streaming"}
SHARD = "64MB"  # as LitData and MDS are given in peer_loops.py
_PATIENCE = 60.0  # seconds for an epoch
# Their best numbers of workers on two cores.
NAMES = (
    *("link 32x1", "link 64x1", "link 64x4", "shardkit", "shardkit folder", "shardkit crops"),
    *("webdataset 4", "webdataset 4 crops", "litdata 1", "litdata 2 crops", "streaming 2"),
)


class Bench:
    """The stores, behind a link, and the interpreters of the contenders."""

    def __init__(self, work: Path, peers: Path | None) -> None:
        self.root, self.peers = work / "root", peers
        self.scratch = work / "scratch"

    def python(self, name: str) -> str:
        if self.peers is None or name not in ENVIRONMENTS:
            return sys.executable
        return os.fspath(self.peers / ENVIRONMENTS[name] / "bin/python")

    def store(self, name: str) -> Path:
        return self.root / "photos" / STORES.get(name, name)

    def size(self, name: str) -> int:
        return sum(path.stat().st_size for path in self.store(name).rglob("*") if path.is_file())

    def prepare(self, data: Path) -> dict[str, Any]:
        shutil.rmtree(self.root, ignore_errors=True)
        (self.root / "photos").mkdir(parents=True)
        shardkit.convert(data, "wds", self.store("shardkit"), shard_size=SHARD, workers=2)
        for name in ("litdata", "streaming") if self.peers else ():
            words = ["write", name, os.fspath(data), os.fspath(self.store(name))]
            subprocess.run([self.python(name), os.fspath(PEER_LOOPS), *words], check=True)
        return {name: self.size(name) for name in ("shardkit", "litdata", "streaming")}

    def start(self, link: Link, name: str, **asked: Any) -> Contender:
        shards = sorted(path.name for path in self.store(name).glob("*.tar"))
        folder = f"photos/{self.store(name).name}"
        urls = [link.url(f"{folder}/{shard}") for shard in shards]
        environ = asked.pop("environ", {})
        asked = {"url": f"s3://{folder}", "urls": urls, "decode": False, "workers": 2, **asked}
        return Contender(self.python(name), name, asked, {**link.environ(), **environ})

    def cache(self) -> str:
        """A new folder."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(dir=self.scratch)


class Contender:
    """A process that does epochs when it is asked to."""

    def __init__(
        self, python: str, name: str, asked: dict[str, Any], environ: dict[str, str]
    ) -> None:
        self._process = subprocess.Popen(
            [python, "-W", "ignore", os.fspath(CONTENDER), name, json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environ}, start_new_session=True,
        )  # fmt: skip
        self._answer()

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        late = threading.Timer(_PATIENCE, self._kill)
        late.start()
        try:
            found: dict[str, Any] = json.loads(self._answer())
        finally:
            late.cancel()
        return found

    def epoch(self) -> dict[str, Any]:
        self.begin()
        return self.end()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            error = self._process.stderr.read()[-3000:].strip()
            raise RuntimeError(error or f"no end in {_PATIENCE:.0f} s")
        return line

    def _kill(self) -> None:
        """With its workers, and what would remove the next one's shared memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._kill()
        self._process.communicate()

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def epochs(bench: Bench, names: list[str], rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: list[str] = []  # epochs that did not come to an end
    samples = len(shardkit.open(bench.store("shardkit")))
    with Link(bench.root) as link:
        for number in range(rounds):
            order = list(names)
            random.Random(number).shuffle(order)
            for name in order:
                try:
                    run = first_epoch(bench, link, name)
                except RuntimeError as error:
                    failed.append(f"{name}: {str(error).splitlines()[-1]}")
                    continue
                assert name.startswith("link") or run["samples"] == samples, (name, run)
                runs[name].append(run)
                print(name, run, file=sys.stderr, flush=True)
    medians = {
        name: {
            "seconds": round(statistics.median(run["seconds"] for run in found), 3),
            "MB/s": round(statistics.median(run["sent"] / run["seconds"] for run in found) / 1e6),
            "first": round(statistics.median(run["first"] for run in found), 3),
            "cpu": round(statistics.median(run["cpu"] for run in found), 2),
            "of the dataset": round(statistics.median(run["share"] for run in found), 4),
            "requests": statistics.median(run["requests"] for run in found),
        }
        for name, found in runs.items()
        if found
    }
    return {"median": medians, "samples": samples, "runs": runs, "failed": failed}


def first_epoch(bench: Bench, link: Link, name: str) -> dict[str, Any]:
    library, *words = name.split()
    cache = None if library in ("link", "webdataset") or name in IN_MEMORY else bench.cache()
    asked: dict[str, Any] = {"decode": "crops" in words, "cache": cache}
    if library == "link":
        threads, size = words[0].split("x")
        asked |= {"workers": int(threads), "bytes": int(size) << 20}
    elif library != "shardkit":
        asked["workers"] = int(words[0])
    elif cache is None:
        asked["limit"] = "2GB"
    try:
        with bench.start(link, library, **asked) as contender:
            link.clear()
            found = contender.epoch()
        sent = link.count()
    finally:
        if cache is not None:
            shutil.rmtree(cache)
    share = sent.sent / bench.size(library)
    return {**found, "sent": sent.sent, "share": share, "requests": sent.requests}


IN_MEMORY = ("shardkit", "shardkit crops")


def downloads(bench: Bench) -> dict[str, Any]:
    """Shares of the dataset that are downloaded."""
    names = ["shardkit", *(("litdata", "streaming") if bench.peers else ())]
    found: dict[str, Any] = {}
    with Link(bench.root, 0.005, 0) as link:
        for name in names:
            for share in (None, 0.5):
                size, cache = bench.size(name), bench.cache()
                limit = None if share is None else max(int(share * size), 4 << 20)
                rows: list[Any] = []
                with bench.start(link, name, cache=cache, limit=limit) as contender:
                    for _ in range(3):
                        link.clear()
                        try:
                            contender.epoch()
                        except RuntimeError as error:  # others fail with a limit
                            share_sent = link.count().sent / size
                            rows += [str(error).splitlines()[-1], f"after {share_sent:.1f}"]
                            break
                        rows.append(round(link.count().sent / size, 4))
                found[f"{name}, limit {share}"] = rows
                shutil.rmtree(cache)
                print(name, share, rows, file=sys.stderr, flush=True)
    found["two machines"] = two_machines(bench)
    return found


def two_machines(bench: Bench) -> list[list[float]]:
    """Of each machine, the shares of the dataset in three epochs."""
    rows: list[list[float]] = [[], []]
    with ExitStack() as stack:
        links = [stack.enter_context(Link(bench.root, 0.005, 0)) for _ in range(2)]
        caches = [bench.cache(), bench.cache()]
        processes = [
            stack.enter_context(
                bench.start(
                    links[rank // 2], "shardkit", cache=caches[rank // 2], parts=2, rank=rank,
                    world=4, environ={"LOCAL_WORLD_SIZE": "2"},
                )
            )
            for rank in range(4)
        ]  # fmt: skip
        for _ in range(3):
            for link in links:
                link.clear()
            for process in processes:
                process.begin()
            for process in processes:
                process.end()
            for link, row in zip(links, rows, strict=True):
                row.append(round(link.count().sent / bench.size("shardkit"), 4))
        for cache in caches:
            shutil.rmtree(cache)
    return rows


def rounds_to_first(bench: Bench) -> dict[str, Any]:
    """A request takes a second, and all else next to nothing."""
    with Link(bench.root, 1, 0) as link, bench.start(link, "shardkit") as contender:
        return {"round trips": round(contender.epoch()["first"], 2)}


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["prepare", "epoch", "bytes", "start"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(NAMES), help="contenders, with commas")
    options = parser.parse_args(arguments)
    bench = Bench(options.work, options.peers)
    names = [n for n in options.only.split(",") if options.peers or n.split()[0] in STORES]
    match options.what:
        case "prepare":
            found = bench.prepare(options.data)
        case "epoch":
            found = epochs(bench, names, options.rounds)
        case "bytes":
            found = downloads(bench)
        case _:
            found = rounds_to_first(bench)
    packages = ("shardkit", "obstore", "numpy")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    return {
        "section": "remote", "benchmark": options.what, **found, "versions": versions,
        "cores": os.cpu_count(),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
