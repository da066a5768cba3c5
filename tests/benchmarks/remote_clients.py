"""Ranges read from a store by obstore and by fsspec (s3fs, http): throughput and processor time.

    python -m tests.benchmarks.remote_clients --store s3 [--rounds 5] [--latency 0.05] [--rate 1e8]

The store is `link.py`, as a bucket (s3) or as a web server (web): each request waits, and each
connection has a rate; `--latency 0 --rate 0` adds nothing. Each contender is a process, and reads
warm: `ranges` at once, of `bytes` each. Each round runs every contender once, in another order.
Prints one JSON object: by contender, ranges at once and size, the medians of MB a second and of
seconds of the processor, in this client alone, for each GB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.link import LATENCY, RATE, Link
from tests.remote.process import ROOT

GAP = 64 << 10  # between ranges: obstore merges those that touch or overlap, even at `coalesce=0`
SIZES = (64 << 10, 1 << 20)
PARALLEL = (1, 8, 32)
EACH = 8  # ranges for each of those at once
OBJECT = EACH * max(PARALLEL) * (max(SIZES) + GAP)  # bytes

Ranges = Callable[[list[int], int, int], list[Any]]  # starts, length, how many at once


def obstore_store(url: str) -> tuple[Any, str]:
    from obstore.store import from_url

    root, _, key = url.rpartition("/")
    return from_url(root, client_options={"allow_http": True}), key


def obstore_ranges(url: str) -> Ranges:
    """`get_ranges`, which has at most 10 requests under way."""
    import obstore

    store, key = obstore_store(url)

    def read(starts: list[int], length: int, at_once: int) -> list[Any]:
        found: list[Any] = []
        for n in range(0, len(starts), at_once):
            part = starts[n : n + at_once]
            lengths = [length] * len(part)
            found += obstore.get_ranges(store, key, starts=part, lengths=lengths, coalesce=0)
        return found

    return read


def obstore_threads(url: str) -> Ranges:
    """`get_range`, in threads of Python."""
    import obstore

    store, key = obstore_store(url)

    def read(starts: list[int], length: int, at_once: int) -> list[Any]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(
                pool.map(lambda at: obstore.get_range(store, key, start=at, length=length), starts)
            )

    return read


def obstore_async(url: str) -> Ranges:
    """`get_range_async`, with a semaphore."""
    import obstore

    store, key = obstore_store(url)

    async def all_of(starts: list[int], length: int, at_once: int) -> list[Any]:
        allowed = asyncio.Semaphore(at_once)

        async def one(start: int) -> Any:
            async with allowed:
                return await obstore.get_range_async(store, key, start=start, length=length)

        return await asyncio.gather(*map(one, starts))

    return lambda *words: asyncio.run(all_of(*words))


def fsspec_ranges(url: str) -> Ranges:
    """`cat_ranges`, of s3fs or fsspec's http."""
    import fsspec

    files, path = fsspec.url_to_fs(url)

    def read(starts: list[int], length: int, at_once: int) -> list[Any]:
        ends = [start + length for start in starts]
        found: list[Any] = files.cat_ranges(
            [path] * len(starts), starts, ends, batch_size=at_once, on_error="raise"
        )
        return found

    return read


CONTENDERS = {
    "obstore get_ranges": obstore_ranges,
    "obstore get_range, threads": obstore_threads,
    "obstore get_range_async": obstore_async,
    "fsspec cat_ranges": fsspec_ranges,
}


def contend(name: str, url: str) -> list[dict[str, Any]]:
    """In a process of its own: every size and number at once."""
    read, rows = CONTENDERS[name](url), []
    for size in SIZES:
        for at_once in PARALLEL:
            count = EACH * at_once
            starts = [number * (size + GAP) for number in range(count)]
            read(starts[:at_once], size, at_once)  # connects
            began, busy = time.perf_counter(), time.process_time()
            found = read(starts, size, at_once)
            seconds, busy = time.perf_counter() - began, time.process_time() - busy
            assert [len(data) for data in found] == [size] * count
            total = size * count
            rows.append(
                {
                    "at_once": at_once,
                    "bytes": size,
                    "MB/s": total / seconds / 1e6,
                    "cpu s/GB": busy / total * 1e9,
                }
            )
    return rows


def measure(link: Link, url: str, rounds: int) -> list[dict[str, Any]]:
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in CONTENDERS}
    order = list(CONTENDERS)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            command = [sys.executable, "-m", "tests.benchmarks.remote_clients", "--run", name, url]
            link.clear()
            environ = {**os.environ, **link.environ()}
            found = subprocess.run(
                command, env=environ, check=True, stdout=subprocess.PIPE, cwd=ROOT
            )
            runs[name].append(json.loads(found.stdout))
            total = {size: sum(n + EACH * n for n in PARALLEL) for size in SIZES}
            assert _sent(link) == total, f"{name} asked for other ranges: {_sent(link)}"
    rows = []
    for name, found in runs.items():
        for cells in zip(*found, strict=True):
            middle = {
                unit: round(statistics.median(cell[unit] for cell in cells), 2)
                for unit in ("MB/s", "cpu s/GB")
            }
            rows.append({"client": name, **cells[0], **middle})
    return rows


def _sent(link: Link) -> dict[int, int]:
    """How many ranges of each size were sent: all that were asked for, and no more."""
    return dict(Counter(e.sent for e in link.log() if e.method == "GET" and e.status == 206))


def main(arguments: list[str]) -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=["s3", "web"], default="web")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, default=LATENCY, help="seconds a request")
    parser.add_argument("--rate", type=float, default=RATE, help="bytes a second and connection")
    parser.add_argument("--run", nargs=2, metavar=("CONTENDER", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        return contend(*options.run)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "bucket/data"
        data.parent.mkdir()
        data.write_bytes(bytes(OBJECT))
        with Link(Path(folder), options.latency, options.rate) as link:
            url = "s3://bucket/data" if options.store == "s3" else link.url("bucket/data")
            rows = measure(link, url, options.rounds)
    what = {"section": "remote", "benchmark": "clients"}
    return {
        **what,
        "store": options.store,
        "latency": options.latency,
        "rate": options.rate,
        "rows": rows,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
