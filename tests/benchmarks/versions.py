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


def convert(python: str, data: Path, format: str, out: Path) -> float:
    """The whole command, with two workers."""
    shutil.rmtree(out, ignore_errors=True)
    words = ["convert", data, "--to", format, "-o", out, "--workers", "2", "--quiet"]
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
    runs: dict[str, Run] = {}
    pairs: dict[str, list[str]] = {}
    for which, python in (("now", sys.executable), ("before", options.before)):
        for format in FORMATS:
            store = work / f"{format}-{which}"  # each version reads what it has written
            if not store.exists():
                convert(python, data, format, store)
            runs[f"read {format}, {which}"] = lambda p=python, s=store: script(p, READ, s)
            if format in ("wds", "beton"):
                runs[f"load {format}, {which}"] = lambda p=python, s=store: script(p, LOAD, s)
        out = work / f"out-{which}"
        runs[f"convert, {which}"] = lambda p=python, o=out: convert(p, data, "wds", o)
    for name in [name for name in runs if name.endswith("now")]:
        pairs[name.replace("now", "before")] = [name]
    found = summary(measure(runs, options.rounds), pairs, len(shardkit.open(work / "wds-now")))
    return {"section": "remote", "benchmark": "versions", **found}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
