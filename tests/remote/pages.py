"""Pages for the tests of the cache, and a process that reads and adds them at random.

`python -m tests.remote.pages FOLDER SEED TURNS` says that it has begun, and then how many pages it
has added. It compares all that it reads.
"""

from __future__ import annotations

import math
import random
import sys

from shardkit.page_cache import PAGE, FolderCache, NextUse

FULL_PAGE = PAGE + 4096  # bytes that a page takes of the disk
LIMIT = 8 * FULL_PAGE  # of the process: a third of what it reads


def never(file: str, number: int) -> float:
    return math.inf


def page(file: str, number: int, size: int = PAGE) -> bytes:
    pattern = random.Random(f"{file}-{number}").randbytes(97)
    return (pattern * (size // 97 + 1))[:size]


def rotated(turn: int) -> NextUse:
    return lambda file, number: (number - turn) % 10


def main(folder: str, seed: int, turns: int) -> None:
    cache, draw, added = FolderCache(folder, LIMIT), random.Random(seed), 0
    print("started", flush=True)

    for turn in range(turns):
        file, number = draw.choice("abc"), draw.randrange(10)
        size = PAGE if number else 123_456
        start = draw.randrange(size)
        stop = draw.choice([start + 1000, None])
        data = cache.get(file, number, start, stop)
        expected = page(file, number, size)
        if data is None:
            added += cache.put(file, number, expected, rotated(turn), draw.choice([None, 0.0]))
        else:
            assert data == expected[start:stop]
    print(added)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
