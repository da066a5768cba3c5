"""Tokenizing a corpus, whole command, beside the ways that others do it.

    python tests/benchmarks/corpus.py TEXTS corpus --megabytes 250
    python tests/benchmarks/tokens.py --data corpus --work work --peers peers --rounds 5

Every contender runs once a round, in another order each round. All must make as many tokens. Prints
tokens a second of each and how many times as fast shardkit is; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

PEERS = ("datasets", "encode_batch", "encode_batch_fast", "megatron")
HERE = Path(__file__).parent


def shardkit(data: Path, work: Path) -> tuple[float, int]:
    """Seconds and tokens of the whole command."""
    words = [
        "--to", "arrow", "--tokenizer", data / "tokenizer.json", "--seq-len", "1024",
        "--workers", "2", "-o", work / "shardkit", "--json", "--quiet",
    ]  # fmt: skip
    command = [sys.executable, "-m", "shardkit", "convert", data / "corpus.jsonl", *words]
    seconds, printed = timed(command)
    return seconds, json.loads(printed)["splits"][""]["text"]["tokens"]


def peer(name: str, python: str, data: Path, work: Path) -> tuple[float, int]:
    """The same of one of the others."""
    script = HERE / "tokens_peer.py"
    command = [python, script, name, data / "corpus.jsonl", data / "tokenizer.json", work / name]
    seconds, printed = timed(command)
    return seconds, json.loads(printed.splitlines()[-1])["tokens"]


def timed(command: list[Any]) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    return time.perf_counter() - began, done.stdout


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="environments of the others, of make_peers.sh")
    parser.add_argument("--only", default=",".join(PEERS), help="which of the others")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    python = str(options.peers / "main/bin/python") if options.peers else sys.executable
    runs = {"shardkit": lambda: shardkit(options.data, options.work)}
    for name in filter(None, options.only.split(",")):
        runs[name] = lambda name=name: peer(name, python, options.data, options.work)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    tokens: dict[str, int] = {}
    names = list(runs)
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            shutil.rmtree(options.work, ignore_errors=True)
            options.work.mkdir(parents=True)
            took, tokens[name] = runs[name]()
            seconds[name].append(round(took, 3))
    shutil.rmtree(options.work)
    if len(set(tokens.values())) > 1:
        raise SystemExit(f"they do not make the same tokens: {tokens}")
    medians = {name: median(times) for name, times in seconds.items()}
    for name, took in medians.items():
        ratio = took / medians["shardkit"]
        print(f"{name:<18} {took:8.2f} s {tokens[name] / took:12,.0f} tokens/s {ratio:6.2f}")
    size = (options.data / "corpus.jsonl").stat().st_size
    report = {"bytes": size, "tokens": tokens["shardkit"], "seconds": seconds}
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
