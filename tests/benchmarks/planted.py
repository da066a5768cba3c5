"""Five planted bottlenecks: does the doctor name each first, and does its advice give what it says?

    python tests/benchmarks/planted.py --work FOLDER [--data PHOTOS] [--seconds 3]

PHOTOS are originals, some hundred pixels larger than a crop; without them images are made.
Prints one JSON object: for each plant the cause that is named first, the rate before, the rate that
was predicted, the rate with the advice followed, and what that is of the prediction.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

import shardkit
from shardkit.byte_source import LocalFile
from shardkit.performance.doctor import Diagnosis, doctor
from shardkit.performance.findings import Finding
from shardkit.performance.runs import dataloader_like, run
from shardkit.stream import Loader
from shardkit.torch import Loader as TorchLoader

BATCH = 32
LATE = 0.004  # seconds until the throttled storage answers
STEP = 2e-6  # seconds that a model takes for a token, padding included


@contextmanager
def throttled() -> Iterator[None]:
    """Every value that is read comes late, as from a network."""
    whole = LocalFile._read

    def late(self: LocalFile, offset: int, length: int) -> bytes:
        time.sleep(LATE)
        return whole(self, offset, length)

    LocalFile._read = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalFile._read = whole  # type: ignore[method-assign]


def slow(pixels: Any) -> Any:
    """A transform in plain Python."""
    total = 0
    for value in range(60_000):
        total += value
    return pixels


@dataclass
class Plants:
    """The data of all plants, in a folder."""

    work: Path
    data: Path | None
    seconds: float

    def originals(self) -> Path:
        out = self.work / "originals"
        if not out.exists():
            source = self.data or self._made(self.work / "made")
            shardkit.convert(source, "wds", out, workers=0)
        return out

    def small(self) -> Path:
        out = self.work / "small"
        if not out.exists():
            image = shardkit.ImageOptions(resize=256, quality=90)
            shardkit.convert(self.originals(), "wds", out, workers=0, image=image)
        return out

    def documents(self) -> Path:
        out = self.work / "documents"
        if not out.exists():
            lengths = np.random.default_rng(0).lognormal(5, 1, 2_000).astype(int) + 1
            schema = {"tokens": shardkit.Array("uint16", (None,))}
            with shardkit.create(out, to="arrow", schema=schema) as writer:
                for number, length in enumerate(lengths):
                    tokens = np.arange(length, dtype=np.uint16)
                    writer.write({"__key__": f"{number:06d}", "tokens": tokens})
        return out

    @staticmethod
    def _made(folder: Path) -> Path:
        for number in range(48):
            seed = np.random.default_rng(number)
            pixels = seed.integers(0, 255, (75, 100, 3), np.uint8).repeat(12, 0).repeat(12, 1)
            file = folder / f"{number % 2}/{number:02d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=90))
        return folder

    def crops(self, path: Path, *steps: Any, size: int = 224, **options: Any) -> Loader:
        transforms = {"image": [shardkit.RandomResizedCrop(size), *steps]}
        return TorchLoader(
            path, batch_size=BATCH, shuffle=True, transforms=transforms, profile=True, **options
        )

    def rate(self, loader: Loader) -> float:
        return sorted(run(loader, self.seconds / 3).rate for _ in range(3))[1]

    def settings(self, loader: Loader, found: Finding) -> Loader:
        return loader.with_options(**found.settings)


@dataclass(frozen=True)
class Result:
    """What the doctor said of a plant, and what came of it; rates are samples/s."""

    expected: str
    named: str
    before: float
    predicted: float
    after: float

    def to_dict(self) -> dict[str, Any]:
        reached = self.after / self.predicted
        return {**self.__dict__, "of the prediction": round(reached, 3)}


def first_of(found: Diagnosis) -> Finding:
    return (*found.findings, Finding("nothing", "", "", rate=found.rate))[0]


def storage_plant(plants: Plants) -> Result:
    """Values come late: keep them, or wait with more threads."""
    with throttled():
        loader = plants.crops(plants.small())
        found = doctor(loader, seconds=plants.seconds)
        first = first_of(found)
        better = plants.settings(loader, first)
        for _ in better:  # the first epoch fills a cache
            pass
        return Result("storage", first.cause, found.rate, first.rate or 0, plants.rate(better))


def decode_plant(plants: Plants) -> Result:
    """Huge originals for a small crop: store smaller ones, by the command that is said."""
    loader = plants.crops(plants.originals(), size=96)
    found = doctor(loader, seconds=plants.seconds)
    first = first_of(found)
    out = plants.work / "resized"
    words = (first.command or "").split()
    if "--resize" in words and not out.exists():
        size = int(words[words.index("--resize") + 1])
        image = shardkit.ImageOptions(resize=size, format="jpeg", quality=90)
        shardkit.convert(plants.originals(), "wds", out, workers=0, image=image)
    after = plants.rate(plants.crops(out, size=96)) if out.exists() else 0.0
    return Result("decode", first.cause, found.rate, first.rate or 0, after)


def transform_plant(plants: Plants) -> Result:
    """A transform that keeps the interpreter: processes."""
    loader = plants.crops(plants.small(), slow)
    found = doctor(loader, seconds=plants.seconds)
    first = first_of(found)
    workers = first.settings.get("workers", 1)
    batches = dataloader_like(loader, workers)
    return Result(
        "transform", first.cause, found.rate, first.rate or 0, epochs(batches, plants.seconds)
    )


def epochs(batches: Iterable[Any], seconds: float) -> float:
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


def threads_plant(plants: Plants) -> Result:
    """One thread, with processors idle."""
    loader = plants.crops(plants.small(), threads=1)
    found = doctor(loader, seconds=plants.seconds)
    first = first_of(found)
    after = plants.rate(plants.settings(loader, first))
    return Result("threads", first.cause, found.rate, first.rate or 0, after)


def padding_plant(plants: Plants) -> Result:
    """Much padding: real tokens a second of a model whose step takes as long as all of them."""
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
    collate = shardkit.pad_collate()
    loader = TorchLoader(plants.documents(), collate=collate, profile=True, **options)
    found = doctor(loader, seconds=plants.seconds)
    first = first_of(found)
    before = trained(loader)
    after = trained(plants.settings(loader, first))
    return Result("padding", first.cause, before, before * first.gain, after)


def trained(loader: Loader) -> float:
    """Real tokens a second of an epoch."""
    began, tokens = time.perf_counter(), 0
    for batch in loader:
        time.sleep(STEP * batch["tokens"].numel())
        tokens += int(batch["lengths"].sum())
    return tokens / (time.perf_counter() - began)


PLANTS: dict[str, Callable[[Plants], Result]] = {
    "throttled storage": storage_plant,
    "huge originals": decode_plant,
    "slow transform": transform_plant,
    "too few threads": threads_plant,
    "padding": padding_plant,
}


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default=",".join(PLANTS))
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    plants = Plants(options.work, options.data, options.seconds)
    return {name: PLANTS[name](plants).to_dict() for name in options.only.split(",")}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
