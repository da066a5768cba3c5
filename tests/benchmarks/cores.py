"""How much faster conversions are with more processes: tokenizing 60 MB, resizing one large shard.

    python tests/benchmarks/cores.py --data DATA --work work --rounds 5

DATA has `text/` (any text files) and `photos/` (any folder of images). Whole commands, with 0, 1
and 2 workers, and beside tokenizing `encode_batch` with its own threads
(tests/benchmarks/tokens_peer.py); each once a round, in another order each round. All must make the
same bytes. Prints medians, the processor time of each, and how many times as fast as without
workers it is; the last line is JSON.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from corpus import make_corpus, make_tokenizer, paragraphs_of

import shardkit

WORKERS = (0, 1, 2)
COPIES = 4  # of each photo
Run = Callable[[], None]


def prepare(data: Path, work: Path, megabytes: int) -> None:
    """A corpus with its tokenizer, and a shard of photos, where they are not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "corpus.jsonl").exists():
        paragraphs = paragraphs_of(data / "text")
        make_tokenizer(paragraphs, work / "tokenizer.json")
        make_corpus(paragraphs, work / "corpus.jsonl", megabytes * 10**6)
    if not (work / "photos").exists():
        for number in range(COPIES):
            shutil.copytree(data / "photos", work / f"loose/{number}")
        shardkit.convert(work / "loose", "wds", work / "photos", shard_size="2GB")
        shutil.rmtree(work / "loose")


def convert(source: Path, out: Path, workers: int, *words: Any) -> Run:
    def run() -> None:
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "shardkit", "convert", source, "-o", out, "--quiet"]
        called([*command, "--workers", workers, *words])

    return run


def encode_batch(work: Path) -> Run:
    script = Path(__file__).with_name("tokens_peer.py")
    files = [work / "corpus.jsonl", work / "tokenizer.json", work / "encode_batch.bin"]
    return lambda: called([sys.executable, script, "encode_batch", *files])


def called(command: list[Any]) -> None:
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def measured(run: Run) -> tuple[float, float]:
    """Seconds on the clock, and of processors."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run()
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(took, 3), round(used, 3)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=60, help="of text")
    options = parser.parse_args(arguments)
    work = options.work
    # As installed packages are: where nobody may write bytecode, each start compiles all of it.
    compileall.compile_dir(Path(shardkit.__file__).parent, quiet=2)
    prepare(options.data, work, options.megabytes)
    text = ["--to", "arrow", "--tokenizer", work / "tokenizer.json", "--seq-len", "1024"]
    images = ["--to", "wds", "--resize", "256"]
    runs = {"encode_batch": encode_batch(work)}
    for n in WORKERS:
        runs[f"tokenize {n}"] = convert(work / "corpus.jsonl", work / f"tokens{n}", n, *text)
        runs[f"resize {n}"] = convert(work / "photos", work / f"resized{n}", n, *images)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(measured(runs[name]))
    for kind in ("tokens", "resized"):
        if any(bytes_of(work / f"{kind}{n}") != bytes_of(work / f"{kind}0") for n in WORKERS[1:]):
            raise SystemExit(f"{kind}: not the same bytes for any number of workers")
    seconds = {name: [took for took, _ in times] for name, times in found.items()}
    medians = {name: median(took) for name, took in seconds.items()}
    for name in sorted(names):
        alone = medians["resize 0" if name.startswith("resize") else "tokenize 0"]
        used = median(used for _, used in found[name])
        print(f"{name:<14} {medians[name]:8.2f} s {used:8.2f} s CPU {alone / medians[name]:6.2f}")
    report = {"cores": os.cpu_count(), "seconds": seconds}
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
