"""Batches for training, ours against others', side by side: interleaved runs, medians, ratios.

    python tests/benchmarks/loading.py photos --data PHOTOS --work FOLDER [--peers ENV] [--rounds 5]
    python tests/benchmarks/loading.py raw    --data PHOTOS --work FOLDER [--peers ENV]
    python tests/benchmarks/loading.py tokens --work FOLDER [--peers ENV] [--blocks 100000]
    python tests/benchmarks/loading.py start  --data PHOTOS --work FOLDER
    python tests/benchmarks/loading.py free   --data PHOTOS --work FOLDER

PHOTOS and ENV are those of bench.py; loading_peer.py says what each contender does. `start` is the
time from the start of a process to its first batch, without what `import torch` takes; `free`, how
much slower a loop in Python runs while the Loader's threads are busy. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardkit
from tests.benchmarks.bench import Pairs, Run, measure, summary

PEER = Path(__file__).with_name("loading_peer.py")
CONTENDER = Path(__file__).with_name("contender.py")
FORMATS = ("wds", "lmdb", "arrow", "beton")
BLOCK = 1024
SHARD_SIZE = "16MB"  # of TARs: so many that webdataset's two workers have about as much to do


class Bench:
    """The places and interpreters of one benchmark; `samples` is known once data are made."""

    def __init__(
        self, data: Path, work: Path, peers: Path | None, formats: list[str], count: int
    ) -> None:
        """`count` is how far the loop of `free` counts."""
        self.data, self.work, self.peers = data, work, peers
        self.formats, self.count = formats, count
        self.samples = 0
        self.busy: dict[str, list[float]] = {}  # processors that threads kept busy, by contender
        work.mkdir(parents=True, exist_ok=True)

    def run(self, what: str, name: str, store: Path) -> float:
        """Seconds of an epoch that a contender says it took."""
        python = sys.executable
        if name in ("ffcv", "litdata", "webdataset"):
            python = str(self.peers / "bin/python") if self.peers else python
        command = [python, str(PEER), what, name, str(store)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        made = json.loads(found.stdout.splitlines()[-1])
        # Peers may leave a last batch out; what counts is the time of a sample.
        return float(made["seconds"]) * self.samples / made["samples"]

    def runner(self, what: str, name: str, store: Path) -> Run:
        return lambda: self.run(what, name, store)

    def convert(self, format: str, **options: Any) -> Path:
        name = f"{'raw-' if options else ''}{format}"
        out = self.work / (f"{name}.beton" if format == "beton" else name)
        if not out.exists():
            size = SHARD_SIZE if format == "wds" else None
            shardkit.convert(self.data, format, out, workers=2, shard_size=size, **options)
        self.samples = len(shardkit.open(out))
        return out

    def photos(self) -> Pairs:
        stores = {format: self.convert(format) for format in self.formats}
        runs = {f"shardkit {f}": self.runner("photos", "shardkit", s) for f, s in stores.items()}
        ours = list(runs)
        if self.peers:
            runs["ffcv"] = self.runner("photos", "ffcv", self.convert("beton"))
            runs["litdata"] = self.runner("photos", "litdata", self.peer_store("litdata"))
        runs["webdataset"] = self.runner("photos", "webdataset", self.convert("wds"))
        return runs, {peer: ours for peer in runs if peer not in ours}

    def peer_store(self, name: str) -> Path:
        store = self.work / name
        if not store.exists():
            assert self.peers is not None
            store.mkdir()
            command = [self.peers / "bin/python", CONTENDER, "write", name, self.data, store]
            subprocess.run([*map(str, command)], check=True, capture_output=True)
        return store

    def raw(self) -> Pairs:
        raw = shardkit.ImageOptions(format="raw")
        formats = [format for format in ("beton", "arrow") if format in self.formats]
        stores = {format: self.convert(format, image=raw) for format in formats}
        runs = {f"shardkit {f}": self.runner("raw", "shardkit", s) for f, s in stores.items()}
        ours = list(runs)
        if self.peers:
            runs["ffcv"] = self.runner("raw", "ffcv", stores["beton"])
        return runs, {peer: ours for peer in runs if peer not in ours}

    def tokens(self, blocks: int) -> Pairs:
        store, bare = self.work / "tokens", self.work / "tokens.bin"
        if not store.exists():
            rows = np.random.default_rng(0).integers(0, 32_000, (blocks, BLOCK)).astype(np.uint16)
            rows.tofile(bare)
            schema = {"tokens": shardkit.Array("uint16", (BLOCK,))}
            with shardkit.create(store, to="arrow", schema=schema) as writer:
                for number, tokens in enumerate(rows):
                    writer.write({"__key__": f"{number:08d}", "tokens": tokens})
        self.samples = blocks
        runs = {
            "shardkit arrow": self.runner("tokens", "shardkit", store),
            "mmap": self.runner("tokens", "mmap", bare),
        }
        if self.peers:
            other = self.work / "tokens-litdata"
            if not other.exists():
                command = [self.peers / "bin/python", PEER, "write", bare, other]
                subprocess.run([*map(str, command)], check=True, capture_output=True)
            runs["litdata"] = self.runner("tokens", "litdata", other)
        return runs, {peer: ["shardkit arrow"] for peer in runs if peer != "shardkit arrow"}

    def start(self) -> Pairs:
        store = self.convert("wds")
        self.samples = 64
        return {"first batch": lambda: first_batch(store)}, {}

    def free(self) -> Pairs:
        """A loop beside threads of the Loader, beside one that has a process of its own, alone."""
        store = self.convert("wds")
        self.samples = 1
        runs = {f"beside {n} threads": lambda n=n: self.loop(store, n) for n in (1, 2)}
        runs["beside another process"] = lambda: self.loop_beside(store)
        runs["alone"] = lambda: self.loop(store, 0)
        return runs, {name: ["alone"] for name in runs if name != "alone"}

    def loop(self, store: Path, threads: int) -> float:
        command = [sys.executable, "-c", FREE, str(store), str(threads), str(self.count)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, busy = map(float, found.stdout.split())
        if threads:
            self.busy.setdefault(f"beside {threads} threads", []).append(round(busy, 2))
        return seconds

    def loop_beside(self, store: Path) -> float:
        command = [sys.executable, "-c", BUSY, str(store)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            seconds = self.loop(store, 0)
            other.kill()
        return seconds


FIRST = """
import time, torch
began = time.perf_counter()
import sys, shardkit
from shardkit.torch import Loader
crop = {"image": shardkit.RandomResizedCrop(224)}
next(iter(Loader(sys.argv[1], batch_size=64, shuffle=True, transforms=crop)))
print(time.perf_counter() - began)
"""


def first_batch(store: Path) -> float:
    """From the start of the interpreter on; `import torch` is taken out."""
    bare, inside = time.perf_counter(), 0.0
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    bare = time.perf_counter() - bare
    found = subprocess.run(
        [sys.executable, "-c", FIRST, str(store)], check=True, capture_output=True
    )
    inside = float(found.stdout)
    return bare + inside


LOADER = """
import sys, time, shardkit
from shardkit.stream import Loader
def made(threads):
    crop = {"image": shardkit.RandomResizedCrop(224)}
    return Loader(
        sys.argv[1], batch_size=64, shuffle=True, transforms=crop, threads=threads, prefetch=500,
        prefetch_bytes="8GiB",
    )
"""
# Seconds of a loop in Python, and the processors that the Loader's threads keep busy beside it.
FREE = (
    LOADER
    + """
threads = int(sys.argv[2])
if threads:
    iterator = iter(made(threads))
    next(iterator)
before, began, total = time.process_time(), time.perf_counter(), 0
for number in range(int(sys.argv[3])):
    total += number
seconds = time.perf_counter() - began
print(seconds, (time.process_time() - before) / seconds - 1)
"""
)
# One thread of the Loader in a process of its own.
BUSY = (
    LOADER
    + """
print(flush=True)
while True:
    for _ in made(1):
        pass
"""
)


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=["photos", "raw", "tokens", "start", "free"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--count", type=int, default=30_000_000)
    options = parser.parse_args(arguments)
    formats = options.formats.split(",")
    bench = Bench(options.data, options.work, options.peers, formats, options.count)
    if options.what == "tokens":
        runs, pairs = bench.tokens(options.blocks)
    else:
        runs, pairs = getattr(bench, options.what)()
    seconds = measure(runs, options.rounds)
    report = {"benchmark": options.what, **summary(seconds, pairs, bench.samples)}
    return report | ({"busy": bench.busy} if bench.busy else {})


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
