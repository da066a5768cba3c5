"""Our speed against others', side by side: interleaved runs, medians, ratios.

    python tests/benchmarks/bench.py write   --data PHOTOS --work FOLDER [--peers ENVS] [--rounds 5]
    python tests/benchmarks/bench.py convert --data PHOTOS --work FOLDER
    python tests/benchmarks/bench.py verify  --data PHOTOS --work FOLDER
    python tests/benchmarks/bench.py images  --data ORIGINALS --work FOLDER [--peers ENVS]
    python tests/benchmarks/bench.py start   --data PHOTOS --work FOLDER

PHOTOS is what photos.py made, ORIGINALS what it made with --as-they-are; ENVS is what make_peers.sh
made, and without it the libraries that we do not depend on are left out. `--formats wds,lmdb` looks
at these alone. Each round runs every contender once, in another order.
Prints one JSON object. How fast datasets are read is `shardkit bench`'s to say.
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

from shardkit.formats import FORMATS

CONTENDER = Path(__file__).with_name("contender.py")
SHARDKIT = [sys.executable, "-m", "shardkit"]

Run = Callable[[], float]
Pairs = tuple[dict[str, Run], dict[str, list[str]]]  # contenders; peer -> ours it is compared with

# Format -> the library that has it, and is no dependency of ours.
OTHERS = {"arrow": "datasets", "beton": "ffcv"}


class Bench:
    """The places and interpreters of one benchmark."""

    def __init__(self, data: Path, work: Path, peers: Path | None, formats: list[str]) -> None:
        self.data = data
        self.work = work
        self.peers = peers
        self.formats = formats
        self.python = os.fspath(peers / "main/bin/python") if peers else sys.executable
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
        python = sys.executable if name.startswith("shardkit") else self.python
        command = [python, str(CONTENDER), action, name, *map(str, paths)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(json.loads(found.stdout.splitlines()[-1])["seconds"])

    # --- writing ---------------------------------------------------------------------------------

    def convert(self, source: Path, format: str, *options: str) -> Path:
        """The whole command, with two workers; returns what it made."""
        out = self.fresh(f"shardkit-{format}")
        command = [*SHARDKIT, "convert", source, "--to", format, "-o", out, "--workers", "2"]
        subprocess.run([*command, "--quiet", *options], check=True)
        return out

    def write_tar(self) -> float:
        out = self.fresh("photos.tar")
        return timed(["tar", "cf", out, "-C", self.data, "."], ["sync", out])

    def write_peer(self, name: str) -> float:
        out = self.fresh(name)
        out.mkdir()
        return self.contender("write", name, self.data, out)

    def writers(self) -> Pairs:
        """Libraries against `shardkit.convert` in a process; tar against the whole command."""
        runs = {f"shardkit {f}": lambda f=f: self.write_shardkit(f) for f in self.formats}
        pairs = {}
        for format, peer in (("wds", "webdataset"), ("lmdb", "lmdb"), *OTHERS.items()):
            if format in self.formats and (self.peers or format not in OTHERS):
                runs[peer] = lambda p=peer: self.write_peer(p)
                pairs[peer] = [f"shardkit {format}"]
        if "wds" in self.formats:
            runs["tar + sync"] = self.write_tar
            runs["shardkit wds, command"] = lambda: seconds_of(
                lambda: self.convert(self.data, "wds")
            )
            pairs["tar + sync"] = ["shardkit wds, command"]
        return runs, pairs

    def write_shardkit(self, format: str) -> float:
        out = self.fresh(f"shardkit-{format}")
        return self.contender("write", f"shardkit_{format}", self.data, out)

    # --- from format to format -------------------------------------------------------------------

    def converters(self) -> Pairs:
        """From each format to the next, against copying the source's shards and a sync."""
        runs: dict[str, Run] = {}
        pairs = {}
        for number, one in enumerate(self.formats):
            other = self.formats[(number + 1) % len(self.formats)]
            source = self.work / f"source-{one}"
            self.convert(self.data, one).rename(source)
            name, copy = f"shardkit {one} to {other}", f"copy {one} + sync"
            runs[name] = lambda s=source, o=other: seconds_of(lambda: self.convert(s, o))
            runs[copy] = lambda s=source: self.copy(s)
            pairs[copy] = [name]
        return runs, pairs

    def copy(self, source: Path) -> float:
        out = self.fresh("copy")
        out.mkdir()
        files = sorted(path for path in source.rglob("*") if path.is_file())
        return timed(["cp", *files, out], ["sync", *(out / path.name for path in files)])

    # --- verifying -------------------------------------------------------------------------------

    def verifiers(self) -> Pairs:
        """`shardkit.verify` against reading the same bytes with xxh3, with as many threads."""
        runs: dict[str, Run] = {}
        pairs = {}
        for format in self.formats:
            out = self.convert(self.data, format)
            name, bare = f"shardkit verify {format}", f"xxh3 of {format}"
            runs[name] = lambda p=out: self.contender("verify", "shardkit", p)
            runs[bare] = lambda p=out: self.contender("verify", "xxh3", p)
            pairs[bare] = [name]
        return runs, pairs

    # --- images --------------------------------------------------------------------------------

    def resizers(self) -> Pairs:
        """Shorter side 256, quality 90: the whole command against the codecs alone, and peers."""
        ours = "shardkit convert --resize 256"
        resize = ("--resize", "256", "--quality", "90")
        runs: dict[str, Run] = {
            ours: lambda: seconds_of(lambda: self.convert(self.data, "wds", *resize)),
            # The same libraries and functions on files in memory: nothing is read or written.
            "codecs alone": lambda: self.contender(
                "resize", "shardkit_codecs", self.data, self.work
            ),
        }
        for peer in [
            "pillow_bilinear",
            "pillow_lanczos",
            *(["ffcv", "litdata"] if self.peers else []),
        ]:
            runs[peer] = lambda p=peer: self.resize_peer(p)
        return runs, {peer: [ours] for peer in runs if peer != ours}

    def resize_peer(self, name: str) -> float:
        out = self.fresh(name)
        out.mkdir()
        return self.contender("resize", name, self.data, out)

    # --- starting --------------------------------------------------------------------------------

    def starters(self) -> Pairs:
        def help_() -> float:
            return timed([*SHARDKIT, "--help"])

        runs = {"shardkit --help": help_, "shardkit convert, first shard begun": self.first_file}
        return runs, {}

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


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def timed(*commands: list[Any]) -> float:
    def run() -> None:
        for command in commands:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    return seconds_of(run)


def measure(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Every contender once a round, in an order of its own each round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            seconds[name].append(round(runs[name](), 6))
    return seconds


def summary(
    seconds: dict[str, list[float]], pairs: dict[str, list[str]], samples: int
) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": seconds,
        "median": medians,
        "samples_per_second": {name: round(samples / m) for name, m in medians.items()},
        "faster_by": {
            f"{ours} than {peer}": round(medians[peer] / medians[ours], 2)
            for peer, names in pairs.items()
            for ours in names
        },
        "samples": samples,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("shardkit", "webdataset", "numpy", "xxhash")},
        },
        "cores": os.cpu_count(),
    }


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    kinds = ["write", "convert", "verify", "images", "start"]
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    images = [name for name in FORMATS if name != "megatron"]  # which holds tokens alone
    parser.add_argument("--formats", default=",".join(images))
    options = parser.parse_args(arguments)
    formats = options.formats.split(",")
    bench = Bench(options.data, options.work, options.peers, formats)
    makers = [*(bench.writers, bench.converters, bench.verifiers, bench.resizers, bench.starters)]
    runs, pairs = makers[kinds.index(options.what)]()
    samples = sum(1 for _ in options.data.rglob("*.jpg"))
    return {"benchmark": options.what, **summary(measure(runs, options.rounds), pairs, samples)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
