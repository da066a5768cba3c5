"""Our speed against others', side by side: interleaved runs, medians, ratios.

    python tests/benchmarks/bench.py write --data PHOTOS --work FOLDER [--peers ENV] [--rounds 5]
    python tests/benchmarks/bench.py read  --data PHOTOS --work FOLDER [--peers ENV] [--rounds 5]
    python tests/benchmarks/bench.py start --data PHOTOS --work FOLDER

PHOTOS is what photos.py made; ENV is what make_peers.sh made, and without it litdata is left out.
Each round runs every contender once, in another order. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

CONTENDER = Path(__file__).with_name("contender.py")
SHARDKIT = [sys.executable, "-m", "shardkit"]

Run = Callable[[], float]


class Bench:
    """The places and interpreters of one benchmark."""

    def __init__(self, data: Path, work: Path, peers: Path | None) -> None:
        self.data = data
        self.work = work
        self.peers = peers
        self.python = os.fspath(peers / "bin/python") if peers else sys.executable
        work.mkdir(parents=True, exist_ok=True)

    def fresh(self, name: str) -> Path:
        """A place for an output, with what stood there gone from the disk as well."""
        place = self.work / name
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        os.sync()
        return place

    def contender(self, action: str, name: str, *paths: Path) -> float:
        """Seconds that a contender says it took."""
        python = sys.executable if name == "shardkit" else self.python
        command = [python, str(CONTENDER), action, name, *map(str, paths)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(json.loads(found.stdout.splitlines()[-1])["seconds"])

    # --- writing ---------------------------------------------------------------------------------

    def write_shardkit(self) -> float:
        out = self.fresh("shardkit")
        command = [*SHARDKIT, "convert", self.data, "--to", "wds", "-o", out, "--workers", "2"]
        return timed([*command, "--quiet"])

    def write_tar(self) -> float:
        out = self.fresh("photos.tar")
        return timed(["tar", "cf", out, "-C", self.data, "."], ["sync", out])

    def write_webdataset(self) -> float:
        out = self.fresh("webdataset")
        out.mkdir()
        return self.contender("write", "webdataset", self.data, out)

    def writers(self) -> dict[str, Run]:
        return {
            "shardkit": self.write_shardkit,
            "tar + sync": self.write_tar,
            "webdataset": self.write_webdataset,
        }

    # --- reading ---------------------------------------------------------------------------------

    def readers(self) -> dict[str, Run]:
        """Stores are made once; each then is read from the page cache."""
        self.write_shardkit()
        self.write_webdataset()
        names = ["shardkit", "webdataset"]
        if self.peers:
            out = self.fresh("litdata")
            self.contender("write", "litdata", self.data, out)
            names.append("litdata")
        return {name: lambda n=name: self.contender("read", n, self.work / n) for name in names}

    # --- starting --------------------------------------------------------------------------------

    def starters(self) -> dict[str, Run]:
        def help_() -> float:
            return timed([*SHARDKIT, "--help"])

        return {"shardkit --help": help_, "shardkit convert, first shard begun": self.first_file}

    def first_file(self) -> float:
        """Seconds until the output's folder of tasks has its first entry: a worker has begun."""
        out = self.fresh("start")
        tasks = out.with_name(out.name + ".partial") / "tasks"
        command = [*SHARDKIT, "convert", self.data, "--to", "wds", "-o", out, "--quiet"]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (tasks.exists() and any(tasks.iterdir())):
            time.sleep(0.001)
        seconds = time.perf_counter() - began
        process.wait()
        return seconds


def timed(*commands: list[Any]) -> float:
    began = time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Every contender once a round, in an order of its own each round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            seconds[name].append(round(runs[name](), 6))
    return seconds


def summary(seconds: dict[str, list[float]], samples: int) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ours = next(iter(medians.values()))
    return {
        "seconds": seconds,
        "median": medians,
        "samples_per_second": {name: round(samples / m) for name, m in medians.items()},
        "shardkit_is_faster_by": {name: round(m / ours, 2) for name, m in medians.items()},
        "samples": samples,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("shardkit", "webdataset", "numpy", "xxhash")},
        },
        "cores": os.cpu_count(),
    }


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=["write", "read", "start"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    bench = Bench(options.data, options.work, options.peers)
    runs = {"write": bench.writers, "read": bench.readers, "start": bench.starters}[options.what]()
    samples = sum(1 for _ in options.data.rglob("*.jpg"))
    return {"benchmark": options.what, **summary(measure(runs, options.rounds), samples)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
