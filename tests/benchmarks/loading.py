"""What `shardkit bench` does not measure of loading: the start, and what runs beside it.

    python tests/benchmarks/loading.py start --data PHOTOS --work FOLDER [--rounds 5]
    python tests/benchmarks/loading.py free  --data PHOTOS --work FOLDER
    python tests/benchmarks/loading.py profile --data PHOTOS --work FOLDER

PHOTOS is what photos.py made. `start` is the time from the start of a process to its first batch,
without what `import torch` takes; `free`, how much slower a loop in Python runs while the Loader's
threads are busy; `profile`, what an epoch takes with the Loader's clocks and without. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import shardkit
from tests.benchmarks.bench import Pairs, measure, summary


class Bench:
    """The store of one benchmark, and how far the loop of `free` counts."""

    def __init__(self, data: Path, work: Path, count: int) -> None:
        self.store, self.count = work / "wds", count
        self.busy: dict[str, list[float]] = {}  # processors that threads kept busy, by contender
        work.mkdir(parents=True, exist_ok=True)
        if not self.store.exists():
            shardkit.convert(data, "wds", self.store, workers=2)

    def start(self) -> Pairs:
        return {"first batch": self.first_batch}, {}

    def first_batch(self) -> float:
        """From the start of the interpreter on; `import torch` is taken out."""
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare = time.perf_counter() - began
        command = [sys.executable, "-c", FIRST, str(self.store)]
        return bare + float(subprocess.run(command, check=True, capture_output=True).stdout)

    def free(self) -> Pairs:
        """A loop beside threads of the Loader, beside one that has a process of its own, alone."""
        runs = {f"beside {n} threads": lambda n=n: self.loop(n) for n in (1, 2)}
        runs["beside another process"] = self.loop_beside
        runs["alone"] = lambda: self.loop(0)
        return runs, {name: ["alone"] for name in runs if name != "alone"}

    def profile(self) -> Pairs:
        """The second epoch of a process, with clocks and without, while nothing else is done."""
        runs = {
            name: lambda name=name: self.epoch(name) for name in ("profile=False", "profile=True")
        }
        return runs, {"profile=True": ["profile=False"]}

    def epoch(self, options: str) -> float:
        command = [sys.executable, "-c", EPOCH.replace("OPTIONS", options), str(self.store)]
        return float(subprocess.run(command, check=True, capture_output=True).stdout)

    def loop(self, threads: int) -> float:
        command = [sys.executable, "-c", FREE, str(self.store), str(threads), str(self.count)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, busy = map(float, found.stdout.split())
        if threads:
            self.busy.setdefault(f"beside {threads} threads", []).append(round(busy, 2))
        return seconds

    def loop_beside(self) -> float:
        command = [sys.executable, "-c", BUSY, str(self.store)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            seconds = self.loop(0)
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

EPOCH = """
import sys, time, shardkit
from shardkit.stream import Loader
crop = {"image": shardkit.RandomResizedCrop(224)}
loader = Loader(sys.argv[1], batch_size=64, shuffle=True, transforms=crop, OPTIONS)
for _ in loader:
    pass
began = time.perf_counter()
for _ in loader:
    pass
print(time.perf_counter() - began)
"""

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
    parser.add_argument("what", choices=["start", "free", "profile"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=30_000_000)
    options = parser.parse_args(arguments)
    bench = Bench(options.data, options.work, options.count)
    runs, pairs = getattr(bench, options.what)()
    samples = 64 if options.what == "start" else 1
    report = {
        "benchmark": options.what,
        **summary(measure(runs, options.rounds), pairs, samples),
    }
    return report | ({"busy": bench.busy} if bench.busy else {})


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
