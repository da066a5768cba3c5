"""Tokenizing a corpus, whole command, beside the ways that others do it.

    python tests/benchmarks/corpus.py TEXTS corpus --megabytes 250
    python tests/benchmarks/tokens.py --data corpus --work work --peers peers --rounds 5

All must make as many tokens. `--workers 1,2` measures shardkit with each of these numbers of
processes. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `tests` is: this may run as a file

from tests.benchmarks.harness import (
    SHARDKIT,
    arguments,
    called,
    fresh,
    measure,
    seconds_of,
    summary,
)

PEERS = ("datasets", "encode_batch")


def main(words: list[str]) -> dict[str, Any]:
    parser = arguments(__doc__, "data", "work", "peers", "rounds")
    parser.add_argument("--only", default=",".join(PEERS), help="which of the others")
    parser.add_argument("--workers", default="2", help="of shardkit; several with commas")
    given = parser.parse_args(words)
    python = given.peers / "main/bin/python" if given.peers else sys.executable
    corpus, tokenizer = given.data / "corpus.jsonl", given.data / "tokenizer.json"
    peer = Path(__file__).with_name("tokens_peer.py")
    tokens: dict[str, int] = {}

    def run(name: str, count: Callable[[str], int], *command: Any) -> float:
        out = fresh(given.work / name)

        def work() -> None:
            tokens[name] = count(called(*command, out))

        return seconds_of(work)

    def shardkit(name: str, workers: str) -> float:
        words = ["--to", "arrow", "--tokenizer", tokenizer, "--seq-len", 1024, "--json", "--quiet"]
        command = [*SHARDKIT, "convert", corpus, *words, "--workers", workers, "-o"]
        return run(name, lambda said: json.loads(said)["splits"][""]["text"]["tokens"], *command)

    def by_peer(name: str) -> float:
        command = [python, peer, name, corpus, tokenizer]
        return run(name, lambda said: json.loads(said.splitlines()[-1])["tokens"], *command)

    first, *more = given.workers.split(",")
    runs = {"shardkit": partial(shardkit, "shardkit", first)}
    runs |= {f"shardkit, workers {n}": partial(shardkit, f"shardkit-{n}", n) for n in more}
    for name in filter(None, given.only.split(",")):
        runs[name] = partial(by_peer, name)
    seconds = measure(runs, given.rounds)
    if len({*tokens.values()}) > 1:
        raise SystemExit(f"they do not make the same tokens: {tokens}")
    pairs = {name: "shardkit" for name in runs if name != "shardkit"}
    found = summary(seconds, pairs, tokens["shardkit"])
    return {"bytes": corpus.stat().st_size, "tokens": tokens["shardkit"], **found}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
