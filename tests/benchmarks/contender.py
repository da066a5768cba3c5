"""One contender of a benchmark, run in a process and an environment of its own.

    python contender.py write webdataset PHOTOS STORE
    python contender.py read  shardkit   STORE

`read` goes through every sample in random order and hashes every value with xxh3, so that nobody
can skip the bytes: one epoch to warm up, one that counts. Prints {"seconds": ..., "samples": ...}.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def photos_in(folder: Path) -> list[tuple[str, int]]:
    """Path and label of every photo; classes are folders."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [(os.fspath(p), n) for n, c in enumerate(classes) for p in sorted(c.glob("*.jpg"))]


def load(item: tuple[str, int]) -> dict[str, Any]:
    return {"jpg": Path(item[0]).read_bytes(), "cls": item[1]}


def write_webdataset(photos: Path, store: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(f"{store}/shard-%06d.tar", maxsize=256e6, verbose=0) as writer:
        for number, item in enumerate(photos_in(photos)):
            writer.write({"__key__": f"{number:08d}", **load(item)})


def write_litdata(photos: Path, store: Path) -> None:
    import litdata

    litdata.optimize(
        fn=load, inputs=photos_in(photos), output_dir=str(store), chunk_bytes="64MB", num_workers=2
    )


def read_shardkit(store: Path) -> Callable[[], Iterable[dict[str, Any]]]:
    import shardkit

    dataset = shardkit.open(store)
    order = list(range(len(dataset)))

    def epoch() -> Iterable[dict[str, Any]]:
        random.shuffle(order)
        return map(dataset.__getitem__, order)

    return epoch


def read_webdataset(store: Path) -> Callable[[], Iterable[dict[str, Any]]]:
    import webdataset

    shards = sorted(map(str, store.glob("*.tar")))
    dataset = webdataset.WebDataset(shards, shardshuffle=100).shuffle(1000)
    return lambda: dataset


def read_litdata(store: Path) -> Callable[[], Iterable[dict[str, Any]]]:
    import litdata

    dataset = litdata.StreamingDataset(str(store), shuffle=True)
    loader = litdata.StreamingDataLoader(dataset, batch_size=64, collate_fn=list)
    return lambda: (sample for batch in loader for sample in batch)


def hash_all(samples: Iterable[dict[str, Any]]) -> int:
    """Hash every value of bytes; returns how many samples there were."""
    import xxhash

    digest = xxhash.xxh3_64_intdigest
    count = 0
    for sample in samples:
        count += 1
        for value in sample.values():
            if isinstance(value, bytes | memoryview):
                digest(value)
    return count


def main(action: str, name: str, *paths: str) -> None:
    places = [Path(path) for path in paths]
    if action == "write":
        began = time.perf_counter()
        globals()[f"write_{name}"](*places)
        samples = len(photos_in(places[0]))
    else:
        epoch = globals()[f"read_{name}"](*places)
        hash_all(epoch())
        began = time.perf_counter()
        samples = hash_all(epoch())
    print(json.dumps({"seconds": time.perf_counter() - began, "samples": samples}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # litdata leaves threads behind that would keep the process
