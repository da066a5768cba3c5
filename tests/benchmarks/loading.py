"""What `shardkit bench` does not measure of loading: the start, and what runs beside it.

    python tests/benchmarks/loading.py start --data PHOTOS --work FOLDER [--rounds 5]
    python tests/benchmarks/loading.py free  --data PHOTOS --work FOLDER
    python tests/benchmarks/loading.py profile --data PHOTOS --work FOLDER

PHOTOS is what photos.py made. `start` is the time from the start of a process to its first batch,
without what `import torch` takes; `free`, how much slower a loop in Python runs while the Loader's
threads are busy; `profile`, what an epoch takes with the Loader's clocks and without. Prints one
JSON object.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `tests` is: this may run as a file

import shardkit
from tests.benchmarks.harness import Pairs, arguments, measure, script, summary, timed

FIRST = """
import time, torch
began = time.perf_counter()
import sys, shardkit
from shardkit.torch import Loader
crop = {"image": shardkit.RandomResizedCrop(224)}
next(iter(Loader(sys.argv[1], batch_size=64, shuffle=True, transforms=crop)))
print(time.perf_counter() - began)
"""
LOADER = """
import sys, time, shardkit
from shardkit.stream import Loader
crop = {"image": shardkit.RandomResizedCrop(224)}
options = dict(batch_size=64, shuffle=True, transforms=crop)
"""
# The second epoch of a process, while nothing else is done.
EPOCH = (
    LOADER
    + """
loader = Loader(sys.argv[1], **options, profile=sys.argv[2] == "True")
for epoch in range(2):
    began = time.perf_counter()
    for _ in loader:
        pass
print(time.perf_counter() - began)
"""
)
# Seconds of a loop in Python beside the Loader's threads.
FREE = (
    LOADER
    + """
if threads := int(sys.argv[2]):
    more = dict(threads=threads, prefetch=500, prefetch_bytes="8GiB")
    iterator = iter(Loader(sys.argv[1], **options, **more))
    next(iterator)
began, total = time.perf_counter(), 0
for number in range(int(sys.argv[3])):
    total += number
print(time.perf_counter() - began)
"""
)


def main(words: list[str]) -> dict[str, Any]:
    parser = arguments(__doc__, "data", "work", "rounds")
    parser.add_argument("what", choices=["start", "free", "profile"])
    parser.add_argument("--count", type=int, default=30_000_000, help="how far `free` counts")
    given = parser.parse_args(words)
    store = given.work / "wds"
    if not store.exists():
        given.work.mkdir(parents=True, exist_ok=True)
        shardkit.convert(given.data, "wds", store, workers=2)

    def first_batch() -> float:
        """From the start of the interpreter on; `import torch` is taken out."""
        return timed([sys.executable, "-c", "pass"]) + float(script(FIRST, store))

    made: dict[str, Pairs] = {
        "start": ({"first batch": first_batch}, {}),
        "free": (
            {
                name: partial(script, FREE, store, threads, given.count)
                for threads, name in enumerate(("alone", "beside 1 threads", "beside 2 threads"))
            },
            {"beside 1 threads": "alone", "beside 2 threads": "alone"},
        ),
        "profile": (
            {f"profile={each}": partial(script, EPOCH, store, each) for each in (False, True)},
            {"profile=True": "profile=False"},
        ),
    }
    runs, pairs = made[given.what]
    samples = 64 if given.what == "start" else 1
    return {"benchmark": given.what, **summary(measure(runs, given.rounds), pairs, samples)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
