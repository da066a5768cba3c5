"""Five planted bottlenecks: does the doctor name each first, and does its advice give what it says?

    python -m tests.benchmarks.planted --data PHOTOS --work FOLDER [--seconds 3]

PHOTOS are originals, some hundred pixels larger than a crop. Prints one JSON object: for each plant
the cause that is named first, the rate before, the rate that was predicted, the rate with the
advice followed, and what that is of the prediction.
"""

import json
import sys
import time
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import shardkit
from shardkit.performance.doctor import doctor
from shardkit.performance.findings import Finding
from shardkit.performance.runs import run
from shardkit.storage.byte_source import LocalFile
from shardkit.torch import Loader as TorchLoader
from shardkit.torch import StreamingDataset
from tests.benchmarks.harness import arguments

BATCH = 32
LATE = 0.004  # seconds until the throttled storage answers
STEP = 2e-6  # seconds that a model takes for a token, padding included
Row = dict[str, Any]


@contextmanager
def throttled():
    """Every value that is read comes late, as from a network."""
    whole = LocalFile.read

    def late(self, offset, length):
        time.sleep(LATE)
        return whole(self, offset, length)

    LocalFile.read = late
    try:
        yield
    finally:
        LocalFile.read = whole


def slow(pixels):
    """A transform in plain Python."""
    total = 0
    for value in range(60_000):
        total += value
    return pixels


class Plants:
    """The plants, with their data in a folder."""

    def __init__(self, work, data, seconds):
        self.work, self.data, self.seconds = work, data, seconds

    def store(self, name, source, **image):
        out = self.work / name
        if not out.exists():
            options = shardkit.ImageOptions(**image)
            shardkit.convert(source, "wds", out, workers=0, image=options)
        return out

    def originals(self):
        return self.store("originals", self.data)

    def small(self):
        return self.store("small", self.originals(), resize=256, quality=90)

    def documents(self):
        out = self.work / "documents"
        if not out.exists():
            lengths = np.random.default_rng(0).lognormal(5, 1, 2_000).astype(int) + 1
            schema = {"tokens": shardkit.Array("uint16", (None,))}
            with shardkit.create(out, to="arrow", schema=schema) as writer:
                for length in lengths:
                    writer.write({"tokens": np.arange(length, dtype=np.uint16)})
        return out

    def crops(self, path, *steps, size=224, **options):
        transforms = {"image": [shardkit.RandomResizedCrop(size), *steps]}
        options |= {"batch_size": BATCH, "shuffle": True, "transforms": transforms}
        return TorchLoader(path, profile=True, **options)

    def rate(self, loader):
        return sorted(run(loader, self.seconds / 3).rate for _ in range(3))[1]

    def followed(self, loader, follow):
        """With what is named first, and the rate that it gives."""
        found = doctor(loader, seconds=self.seconds)
        first = (*found.findings, Finding("nothing", "", "", rate=found.rate))[0]
        return row(first, found.rate, first.rate, follow(first))

    def storage(self):
        """Values come late: keep them, or wait with more threads."""

        def follow(first):
            better = loader.with_options(**first.settings)
            for _ in better:  # the first epoch fills a cache
                pass
            return self.rate(better)

        with throttled():
            loader = self.crops(self.small())
            return self.followed(loader, follow)

    def decode(self):
        """Huge originals for a small crop: store smaller ones, by the command that is said."""

        def follow(first):
            words = (first.command or "").split()
            if "--resize" not in words:
                return 0
            size = int(words[words.index("--resize") + 1])
            out = self.store("resized", self.originals(), resize=size, format="jpeg", quality=90)
            return self.rate(self.crops(out, size=96))

        return self.followed(self.crops(self.originals(), size=96), follow)

    def transform(self):
        """A transform that keeps the interpreter: processes."""
        loader = self.crops(self.small(), slow)

        def follow(first):
            workers = first.settings.get("workers", 1)
            made = StreamingDataset(loader.dataset.source, **vars(loader.dataset.options))
            options = {"num_workers": workers, "persistent_workers": True}
            return epochs(DataLoader(made, batch_size=None, **options), self.seconds)

        return self.followed(loader, follow)

    def threads(self):
        """One thread, with processors idle."""
        loader = self.crops(self.small(), threads=1)
        return self.followed(loader, lambda it: self.rate(loader.with_options(**it.settings)))

    def padding(self):
        """Much padding: real tokens a second of a model whose step takes as long as all of them."""
        options = {"batch_size": BATCH, "shuffle": True, "profile": True}
        loader = TorchLoader(self.documents(), collate=shardkit.pad_collate(), **options)
        first = doctor(loader, seconds=self.seconds).findings[0]
        before = trained(loader)
        after = trained(loader.with_options(**first.settings))
        return row(first, before, before * first.gain, after)


def row(first, before, predicted, after):
    share = round(after / predicted, 3) if predicted else None
    rates = {"before": before, "predicted": predicted, "after": after}
    return {"named": first.cause, **rates, "of the prediction": share}


def epochs(batches, seconds):
    """Samples a second of several epochs without their beginnings."""
    samples, spent = 0, 0.0
    while spent < seconds:
        began = 0.0
        for batch in batches:
            if began:
                samples += len(batch["valid"])
            began = began or time.perf_counter()
        spent += time.perf_counter() - began
    return samples / spent


def trained(loader):
    """Real tokens a second of an epoch."""
    began, tokens = time.perf_counter(), 0
    for batch in loader:
        time.sleep(STEP * batch["tokens"].numel())
        tokens += int(batch["lengths"].sum())
    return tokens / (time.perf_counter() - began)


PLANTS = {
    "throttled storage": Plants.storage,
    "huge originals": Plants.decode,
    "slow transform": Plants.transform,
    "too few threads": Plants.threads,
    "padding": Plants.padding,
}


def main(words):
    parser = arguments(__doc__, "work", "data")
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args(words)
    given.work.mkdir(parents=True, exist_ok=True)
    plants = Plants(given.work, given.data, given.seconds)
    return {name: plant(plants) for name, plant in PLANTS.items()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
