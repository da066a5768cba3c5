"""Pages for the tests of the cache, and processes that share a folder of them.

`python -m tests.remote.pages FOLDER SEED` reads and adds pages at random, and says after each turn
that it goes on. `python -m tests.remote.pages FOLDER SEED URL [full]` loads a dataset at a URL, and
says so after each batch, and "epoch" after each epoch; with `full` its disk is full in the middle
of every third page. Both compare all that they read, and go on until they are killed.
"""

import errno
import itertools
import math
import os
import random
import sys

from shardkit.helpers import os_errors
from shardkit.storage import fs
from shardkit.storage.page_cache import PAGE, FolderCache

FULL_PAGE = PAGE + 4096  # bytes that a page takes of the disk
LIMIT = 8 * FULL_PAGE  # of the processes: a third of what they read
SAMPLES, SIZE = 600, 40_000  # of the dataset


def never(file, number):
    return math.inf


def page(file, number, size=PAGE):
    pattern = random.Random(f"{file}-{number}").randbytes(97)
    return (pattern * (size // 97 + 1))[:size]


def _rotated(turn):
    return lambda file, number: (number - turn) % 10


def use_pages(folder, seed):
    cache, draw = FolderCache(folder, LIMIT), random.Random(seed)
    for turn in itertools.count():
        print("on", flush=True)
        file, number = draw.choice("abc"), draw.randrange(10)
        size = PAGE if number else 123_456
        start = draw.randrange(size)
        stop = draw.choice([start + 1000, None])
        data, expected = cache.get(file, number, start, stop), page(file, number, size)
        if data is None:
            cache.put(file, number, expected, _rotated(turn), draw.choice([None, 0.0]))
        else:
            assert data == expected[start:stop]


def fail_in_the_middle(code, every=1):
    """A `storage.write` that writes a half, and then finds the disk full, or another error."""
    write, calls = fs.write, itertools.count(1)

    def failing(file, chunks):
        if next(calls) % every:
            write(file, chunks)
            return
        joined = b"".join(chunks)
        write(file, [joined[: len(joined) // 2]])
        with os_errors.explained("write", file.path):
            raise OSError(code, os.strerror(code))

    return failing


def load(folder, seed, url, *full):
    from shardkit.stream.loader import Loader

    if full:
        fs.write = fail_in_the_middle(errno.ENOSPC, 3)
    loader = Loader(
        url, batch_size=10, shuffle=True, window=100, seed=seed, last="short",
        cache=folder, cache_limit=LIMIT,
    )  # fmt: skip
    while True:
        seen = set()
        for batch in loader:
            print("on", flush=True)
            for key, found in zip(batch["__key__"], batch["x"], strict=True):
                assert found == page("x", int(key), SIZE), key
                seen.add(key)
        assert len(seen) == SAMPLES
        print("epoch", flush=True)


if __name__ == "__main__":
    words = sys.argv[1], int(sys.argv[2])
    load(*words, *sys.argv[3:]) if sys.argv[3:] else use_pages(*words)
