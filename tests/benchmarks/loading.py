"""The Loader with small images, labels and many threads, beside bare loops and other libraries.

    python -m tests.benchmarks.loading tiny    --work FOLDER [--samples 60000]
    python -m tests.benchmarks.loading photos  --work FOLDER --data PHOTOS
    python -m tests.benchmarks.loading random  --work FOLDER --data PHOTOS
    python -m tests.benchmarks.loading lock    --work FOLDER --data PHOTOS
    python -m tests.benchmarks.loading threads --work FOLDER --data PHOTOS [--threads 1,2,4]
    python -m tests.benchmarks.loading dali    --work FOLDER --data PHOTOS

`tiny` are TARs of JPEGs of 32 x 32 pixels: crops of 16 pixels beside a loop that only decodes the
images from memory, and the labels alone. PHOTOS is what `data photos` made: `photos` loads encoded
images, and crops with flips beside FFCV; `random` reads single images, beside LitData; `threads`
loads crops with flips by more and more threads, beside DALI with as many and without a GPU. Batches
have 256 samples. `dali` is the pipeline of decode="gpu" on the processor, fed by the Loader, beside
DALI's own reader of the same TARs; and our own processor time for that, without DALI and reading.

`lock` is how long the interpreter lock is held: the processor time of a process whose Loader has
one thread, less that in calls of the extensions that release the lock. What others release it for,
such as NumPy, counts as held. The runs called `waited` find it in another way: how long a thread
with a loop in Python is blocked while another thread loads.

Each run is a process of its own, and repeats epochs for `--seconds` after one that does not count.
Prints one JSON object, with seconds for as many samples as the dataset has. Libraries that cannot
be imported are left out; those of tests/clients.txt are found.
"""

import json
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import count
from operator import itemgetter
from pathlib import Path

import numpy as np
from PIL import Image

import shardkit
from tests.benchmarks import ecosystems, harness, loops

# Images are files, of which LitData reads each by itself: it decodes plain bytes many at a time.
WRITE_LITDATA = """
import pathlib, sys
from tests.benchmarks.ecosystems import photos_in, write_litdata
write_litdata(photos_in(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))
"""
CLIENTS = ecosystems.environ("", "")
CROPS = {"batch": 256, "decode": True, "flip": True}
BYTES = {"batch": 256, "decode": False}
LABELS = {**BYTES, "fields": ["label"]}
# The calls that release the interpreter lock, nearly from beginning to end.
READS = {"shardkit.storage._reads": ("read_ranges",)}
RELEASING = {
    **READS,
    "shardkit.codecs._crop": ("crop_many", "crop_jpegs", "crop_pixels", "look_up"),
}


def jpeg(seed):
    noise = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), np.uint8)
    with BytesIO() as file:
        Image.fromarray(noise).save(file, "JPEG")
        return file.getvalue()


def can_import(*modules):
    """Whether all can be imported, in another process."""
    try:
        harness.called(sys.executable, "-c", f"import {', '.join(modules)}", **CLIENTS)
    except SystemExit:
        print(f"left out: {modules[0]}, which cannot be imported", file=sys.stderr)
        return False
    return True


def per_sample(epoch, seconds):
    """Seconds a sample. `epoch` returns seconds and samples, and is called for so long."""
    took, samples, end = 0.0, 0, time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        found = epoch()
        took, samples = took + found[0], samples + found[1]
    return took / samples


def own(load, seconds):
    """Processor time of a sample without what DALI does, and without reading."""
    from shardkit.stream import gpu_decoding

    def begin(self, decoding):
        for rows in decoding.rows.values():
            gpu_decoding._cuts(np.array([row.window for row in rows]))
        decoding.failure.set_result("")

    gpu_decoding._Pipeline.begin = begin
    return held(load, seconds, READS)


def held(load, seconds, releasing=RELEASING):
    """How long this process holds the lock for a sample. `load` loads an epoch."""
    released = []

    def timed(call, *given):
        began = time.thread_time()
        try:
            return call(*given)
        finally:
            released.append(time.thread_time() - began)

    def epoch():
        released.clear()
        began = time.process_time()
        samples = sum(load())
        return time.process_time() - began - sum(released), samples

    for name, calls in releasing.items():
        with suppress(ImportError):  # it was not built
            module = import_module(name)
            for call in calls:
                setattr(module, call, partial(timed, getattr(module, call)))
    epoch()
    return per_sample(epoch, seconds)


def blocked():
    """Seconds that this thread neither ran nor could have run, from some time on."""
    _, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.perf_counter() - time.thread_time() - int(queued) / 1e9


def waited(load, seconds):
    """How long a busy thread waits for the lock for a sample that another thread loads."""

    def epoch():
        samples = []
        other = threading.Thread(target=lambda: samples.append(sum(load())))
        began = blocked()
        other.start()
        while not samples:
            pass
        return blocked() - began, *samples

    epoch()
    return per_sample(epoch, seconds)


HOW = {
    "held": (held, loops.shardkit),
    "waited": (waited, loops.shardkit),
    "own": (own, loops.shardkit_through_dali),
}


class Loading:
    """The data of one benchmark. Its methods are the benchmarks: each returns contenders, and the
    names of those that are compared, peer -> ours."""

    def __init__(self, given):
        self.given, self.work, self.data = given, given.work, given.data
        self.samples = sum(1 for _ in self.data.rglob("*.jpg")) if self.data else given.samples
        self.work.mkdir(parents=True, exist_ok=True)

    def store(self, format="wds"):
        """The photos in a format, as shardkit writes them, unless a run before did."""
        store = self.work / f"{self.data.name}-{format}"
        if not store.exists():
            shardkit.convert(self.data, format, store)
        return store

    def epoch(self, library, store, **asked):
        """Seconds of a contender of loops.py."""
        asked |= {"url": str(store), "urls": sorted(map(str, store.glob("*.tar")))}
        environ = {} if library.startswith("shardkit") else CLIENTS
        with harness.Contender(sys.executable, library, asked, environ) as contender:
            epoch = (itemgetter("seconds", "samples")(contender.epoch()) for _ in count())
            next(epoch)
            return per_sample(partial(next, epoch), self.given.seconds) * self.samples

    def by_threads(self, what, store, asked, each=(1, 2), library="shardkit"):
        return {
            f"{what}, threads {n}": partial(self.epoch, library, store, threads=n, **asked)
            for n in each
        }

    def tiny(self):
        store = self.work / f"tiny-{self.samples}"
        if not store.exists():
            images = [jpeg(seed) for seed in range(500)]
            schema = {"image": shardkit.Image(), "label": shardkit.Int()}
            with shardkit.create(store, to="wds", schema=schema) as writer:
                for n in range(self.samples):
                    writer.write({"image": images[n % len(images)], "label": n % 100})
        runs = {
            "decode_jpeg": partial(self.epoch, "decode_jpeg", store),
            **self.by_threads("crops", store, {**BYTES, "decode": True, "crop": 16}),
            **self.by_threads("labels", store, LABELS),
        }
        pairs = {"decode_jpeg": "crops, threads 1", "crops, threads 1": "crops, threads 2"}
        return runs, {**pairs, "labels, threads 1": "labels, threads 2"}

    def photos(self):
        runs = self.by_threads("bytes", self.store(), BYTES)
        runs |= self.by_threads("crops", self.store(), CROPS)
        pairs = {"bytes, threads 1": "bytes, threads 2", "crops, threads 1": "crops, threads 2"}
        if can_import("ffcv"):
            runs["ffcv"] = partial(self.epoch, "ffcv", self.store("beton"), workers=2, **CROPS)
            pairs["ffcv"] = "crops, threads 2"
        return runs, pairs

    def random(self):
        runs = {"shardkit": partial(self.epoch, "shardkit at random", self.store())}
        if can_import("litdata"):
            store = self.work / f"{self.data.name}-litdata"
            if not store.exists():
                harness.called(sys.executable, "-c", WRITE_LITDATA, self.data, store, **CLIENTS)
            runs["litdata"] = partial(self.epoch, "litdata at random", store)
        return runs, dict.fromkeys([*runs][1:], "shardkit")

    def within(self, how, threads, asked):
        """Seconds that `how`, one of HOW, finds in a process of its own."""
        words = json.dumps({"url": str(self.store()), "threads": threads, **asked})
        command = [sys.executable, "-m", "tests.benchmarks.loading", "--run", how, words]
        return harness.answer(*command, self.given.seconds, **CLIENTS) * self.samples

    def dali(self):
        runs = {
            name: partial(self.epoch, name, self.store(), threads=2, **CROPS)
            for name in ("shardkit through dali", "dali")
        }
        runs["shardkit, own time"] = partial(self.within, "own", 1, CROPS)
        return runs, {"dali": "shardkit through dali"}

    def lock(self):
        return {
            f"{what}, {how}": partial(self.within, how, threads, asked)
            for what, asked in {"crops": CROPS, "bytes": BYTES, "labels": LABELS}.items()
            for how, threads in {"held": 1, "waited": 0}.items()
        }, {}

    def threads(self):
        each, dali = [int(number) for number in self.given.threads.split(",")], {}
        ours = self.by_threads("shardkit", self.store(), CROPS, each)
        if can_import("nvidia.dali"):
            dali = self.by_threads("dali", self.store(), CROPS, each, "dali")
        return {**ours, **dali}, dict(zip(dali, ours, strict=False))


def main(words):
    parser = harness.arguments(__doc__, "work", "rounds")
    parser.add_argument("what", choices=("tiny", "photos", "random", "lock", "threads", "dali"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--samples", type=int, default=60_000, help="of `tiny`")
    parser.add_argument("--threads", default="1,2,4,8,16,24,32", help="of `threads`")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    given = parser.parse_args(words)
    loading = Loading(given)
    runs, pairs = getattr(loading, given.what)()
    found = harness.summary(harness.measure(runs, given.rounds), pairs, loading.samples)
    each = {name: round(s / loading.samples * 1e6, 2) for name, s in found["median"].items()}
    return {"benchmark": given.what, **found, "microseconds_per_sample": each}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        how, asked, seconds = sys.argv[2:]
        measure, load = HOW[how]
        print(measure(load(json.loads(asked)), float(seconds)))
    else:
        print(json.dumps(main(sys.argv[1:]), indent=1))
