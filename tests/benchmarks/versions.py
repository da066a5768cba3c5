"""This version of shardkit beside another one, on files of this machine: read, load and convert.

    python -m tests.benchmarks.versions --before PYTHON --data PHOTOS --work FOLDER [--rounds 7]

PYTHON is an interpreter that has the other version installed; PHOTOS is what photos.py made. Whole
processes, interleaved, each round in another order. `read` is every sample in random order, its
bytes hashed; `load` an epoch of crops in batches of 64; both without the start of the process.
`convert` is the whole command. Prints one JSON object, with ratios of medians: over 1, this version
is faster.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import shardkit
from tests.benchmarks.bench import Run, measure, summary

READ = """
import random, sys, time
import shardkit, xxhash
data = shardkit.open(sys.argv[1])
order = random.Random(1).sample(range(len(data)), len(data))
for repeat in range(2):  # the first opens the shards
    began = time.perf_counter()
    for number in order:
        xxhash.xxh3_64_intdigest(data[number]["image"])
print(time.perf_counter() - began)
"""
LOAD = """
import sys, time
import shardkit
from shardkit.stream.loader import Loader
crop = {"image": shardkit.RandomResizedCrop(224)}
loader = Loader(sys.argv[1], batch_size=64, shuffle=True, threads=2, transforms=crop)
for repeat in range(2):
    began = time.perf_counter()
    for batch in loader:
        pass
print(time.perf_counter() - began)
"""
FORMATS = ("wds", "lmdb", "arrow", "beton")


def script(python: str, code: str, store: Path) -> float:
    command = [python, "-W", "ignore", "-c", code, str(store)]
    return float(subprocess.run(command, check=True, capture_output=True, cwd=store.parent).stdout)


def convert(python: str, data: Path, out: Path) -> float:
    """The whole command, with two workers."""
    shutil.rmtree(out, ignore_errors=True)
    words = ["convert", data, "--to", "wds", "-o", out, "--workers", "2", "--quiet"]
    began = time.perf_counter()
    subprocess.run([python, "-m", "shardkit", *map(str, words)], check=True, cwd=out.parent)
    return time.perf_counter() - began


def main(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="an interpreter")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    data, work = options.data.resolve(), options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for format in FORMATS:
        if not (work / format).exists():
            shardkit.convert(data, format, work / format, workers=2)
    runs: dict[str, Run] = {}
    pairs: dict[str, list[str]] = {}
    for which, python in (("now", sys.executable), ("before", options.before)):
        for format in FORMATS:
            runs[f"read {format}, {which}"] = lambda p=python, f=format: script(p, READ, work / f)
        for format in ("wds", "beton"):
            runs[f"load {format}, {which}"] = lambda p=python, f=format: script(p, LOAD, work / f)
        runs[f"convert, {which}"] = lambda p=python, w=which: convert(p, data, work / f"out-{w}")
    for name in [name for name in runs if name.endswith("now")]:
        pairs[name.replace("now", "before")] = [name]
    found = summary(measure(runs, options.rounds), pairs, len(shardkit.open(work / "wds")))
    return {"benchmark": "versions", **found}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
