"""A process that does epochs over a dataset at a URL, and compares all that it gets.

`python -m tests.remote.epochs URL SAMPLES CACHE LIMIT SEED [full]` prints 0 when it has opened the
dataset, and after each epoch when that began, by time.monotonic(). With `full` its disk is full in
the middle of every third page.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import sys
import time
from typing import Any

from shardkit import storage
from shardkit.stream.loader import Loader

SIZE = 40_000  # bytes of a sample


def value(number: int) -> bytes:
    return (random.Random(number).randbytes(101) * (SIZE // 101 + 1))[:SIZE]


def fill_the_disk() -> None:
    write, calls = storage.write, itertools.count(1)

    def failing(file: storage.NewFile, chunks: Any) -> None:
        if next(calls) % 3:
            write(file, chunks)
            return
        joined = b"".join(chunks)
        write(file, [joined[: len(joined) // 2]])
        with storage.explained("write", file.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage.write = failing


def main(url: str, samples: str, cache: str, limit: str, seed: str, *full: str) -> None:
    if full:
        fill_the_disk()
    loader = Loader(
        url, batch_size=10, shuffle=True, window=100, seed=int(seed), last="short",
        cache=cache, cache_limit=int(limit),
    )  # fmt: skip
    print(0, flush=True)
    while True:
        began, seen = time.monotonic(), set()
        for batch in loader:
            for key, found in zip(batch["__key__"], batch["x"], strict=True):
                assert found == value(int(key)), key
                seen.add(key)
        assert len(seen) == int(samples)
        print(began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
