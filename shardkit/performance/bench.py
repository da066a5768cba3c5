"""`bench`: compares how fast datasets load, by the medians of many short interleaved runs."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from shardkit.dataset.dataset import Dataset
from shardkit.errors import ShardkitError, ShardkitWarning, UsageError, near
from shardkit.helpers.keywords import takes
from shardkit.helpers.progress import Progress, watched
from shardkit.options import check_numbers
from shardkit.performance.contender import MEASURES, Contender, Result, Setting
from shardkit.performance.defaults import FOLDER, image_field, stored_bytes, usual_options
from shardkit.performance.machine import about_machine
from shardkit.performance.on_gpu import has_gpu
from shardkit.schema import Image
from shardkit.storage import fs
from shardkit.stream.ranks import default_threads
from shardkit.version import versions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PLACES = ("cpu", "gpu")  # to decode


@dataclass(frozen=True)
class Sweep:
    """The options of `bench`: every combination of settings is measured for each dataset.

    measures: what to measure: "read" (read and hash every value, in shuffled order), "decode" (read
        and decode whole images), "load" (batches, as in training).
    threads: numbers of loading threads to try. None: 1, 2, 4, ... up to the number of processors.
    workers: numbers of worker processes to try, of torch's DataLoader. For a folder of images, the
        DataLoader reads the files without shardkit, as torchvision's ImageFolder does.
    batch_sizes: batch sizes, in samples.
    transforms: "crop", "resize", "center", "decode" or "none", or a function as "module:function".
    size: width and height of the transformed images, in pixels.
    decode: where the images of batches for a GPU are decoded: "cpu", and then copied, or "gpu".
        Without it, batches are NumPy arrays, and no GPU is used.
    rounds: number of counted runs of each setting.
    limit: maximum number of samples per run; a run is at most one epoch.
    """

    measures: Sequence[str] = MEASURES
    threads: Sequence[int] | None = None
    workers: Sequence[int] = ()
    batch_sizes: Sequence[int] = (64,)
    transforms: Sequence[str] = ("crop",)
    size: int = 224
    decode: Sequence[str] = ()
    rounds: int = 5
    limit: int = 10_000

    def __post_init__(self) -> None:
        check_numbers(self, size=1, rounds=1, limit=1)
        for noun, given, known in (
            ("measure", self.measures, MEASURES),
            ("place to decode", self.decode, _PLACES),
        ):
            unknown = [name for name in given if name not in known]
            if unknown or not self.measures:
                raise UsageError(
                    f"unknown {noun}",
                    found=", ".join(map(repr, unknown)) or "no measure",
                    expected=near(unknown[0] if unknown else "", known),
                )
        for name, least in {"threads": 0, "workers": 1, "batch_sizes": 1}.items():
            if any(number < least for number in getattr(self, name) or ()):
                raise UsageError(f"{name.replace('_', ' ')} must be {least} or more")

    def powers(self) -> Sequence[int]:
        """The numbers of threads to try. Default: 1, 2, 4, ... up to the number of processors."""
        most = default_threads()
        return self.threads or sorted({*(1 << n for n in range(most.bit_length())), most})


class SweepKeywords(TypedDict, total=False):
    """The same as keyword arguments, for type checkers."""

    measures: Sequence[str]
    threads: Sequence[int] | None
    workers: Sequence[int]
    batch_sizes: Sequence[int]
    transforms: Sequence[str]
    size: int
    decode: Sequence[str]
    rounds: int
    limit: int


@dataclass
class Measured:
    """The runs of a contender with one setting. After a failed run, it is not run again."""

    name: str
    contender: Contender
    setting: Setting
    results: list[Result] = field(default_factory=list)
    error: str | None = None

    def run(self, *, counts: bool) -> None:
        """Do one run."""
        try:
            result = self.contender.run(self.setting)
        except Exception as error:  # bad data, or an error in a user's transform
            self.error = _message(error)
        else:
            self.results += [result] * counts

    def to_dict(self) -> dict[str, Any]:
        """Return the runs as JSON values. Rates are in samples per second."""
        rates = [samples / max(seconds, 1e-9) for seconds, samples in self.results]
        rate = statistics.median(rates) if rates and self.error is None else None
        dataset = self.contender.dataset
        return {
            "contender": self.name,
            "format": dataset.format,
            **asdict(self.setting),
            "seconds": [result.seconds for result in self.results],
            "samples": [result.samples for result in self.results],
            "rate": rate,
            "min": min(rates) if rate else None,
            "max": max(rates) if rate else None,
            "bytes_per_second": rate * stored_bytes(dataset) / len(dataset) if rate else None,
            "error": self.error,
        }


@takes(Sweep)
def bench(
    paths: Sequence[str | os.PathLike[str]],
    *,
    progress: bool | Callable[[Progress], object] = False,
    **sweep: Unpack[SweepKeywords],
) -> dict[str, Any]:
    """Measure how fast `paths` load: datasets of any formats, or folders of images.

    Each round runs every setting once, in another order. A first run of each is not counted. The
    result consists of JSON values.

    progress: as in `shardkit.convert`.

    Raises UsageError for invalid options, such as a batch that is larger than a dataset. A setting
    that fails while it is measured has an `error` in the report, and the others continue.
    """
    asked, skipped = Sweep(**sweep), dict[str, str]()
    contenders = _contenders(paths, asked.limit)
    measured = [
        Measured(name, contender, setting)
        for name, contender in contenders.items()
        for setting in dict.fromkeys(_settings(name, contender.dataset, asked, skipped))
    ]
    if not measured:
        raise UsageError("there is nothing to measure", found="; ".join(skipped.values()) or None)
    with (
        watched(progress) as monitor,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(sys.stderr),  # of users' functions
    ):
        warnings.simplefilter("ignore", ShardkitWarning)
        if monitor:
            monitor.start("measuring", len(measured) * (asked.rounds + 1), "runs")
        for number in range(asked.rounds + 1):
            for each in random.Random(number).sample(measured, len(measured)):
                if each.error is None:
                    each.run(counts=number > 0)
                if monitor:
                    monitor.advance(1)
        for contender in contenders.values():
            contender.close()
    return {
        "versions": versions(),
        "machine": about_machine(),
        "settings": {**asdict(asked), "threads": asked.powers()},
        "contenders": [_about(name, contender) for name, contender in contenders.items()],
        "runs": [each.to_dict() for each in measured],
        "skipped": skipped,
    }


def _contenders(paths: Sequence[str | os.PathLike[str]], limit: int) -> dict[str, Contender]:
    """Return the datasets by their folder's name, or by their path if the name is not unique."""
    every = list(dict.fromkeys(map(fs.source, paths)))
    if not every:
        raise UsageError("there is no dataset to measure", fix="name one or several")
    names = [path.resolve().name for path in every]
    found = {}
    for path, name in zip(every, names, strict=True):
        contender = Contender(path, limit)
        if not len(contender.dataset):
            raise UsageError("the dataset has no samples", path=path, fix="convert some first")
        found[name if names.count(name) == 1 else str(path)] = contender
    return found


def _about(name: str, contender: Contender) -> dict[str, Any]:
    path, dataset = contender.path, contender.dataset
    return {
        "name": name,
        "format": dataset.format,
        "path": str(path),
        "samples": len(dataset),
        "shards": dataset.shards,
        "bytes": stored_bytes(dataset),
    }


def _settings(
    name: str, dataset: Dataset, asked: Sweep, skipped: dict[str, str]
) -> Iterator[Setting]:
    """Yield the settings to measure a dataset with."""
    images, threads = image_field(dataset), asked.powers()
    encoded = images is not None and isinstance(dataset.schema[images], Image)
    if "read" in asked.measures:
        yield from (Setting("read", number) for number in threads)
    if "decode" in asked.measures and encoded:
        yield from (Setting("decode", number) for number in threads)
    elif "decode" in asked.measures:
        skipped[f"{name}, decode"] = "the dataset has no encoded images"
    if "load" not in asked.measures:
        return
    transforms = asked.transforms
    if images is None:  # the built-in transforms are for images
        transforms = [name for name in asked.transforms if ":" in name] or ["none"]
        if asked.threads is None:
            threads = [0, *threads]  # loading without threads may be as fast
    places = _places(name, encoded, asked.decode, skipped)
    workers = asked.workers
    if workers and importlib.util.find_spec("torch") is None:
        workers, skipped["workers"] = (), 'torch is not installed: pip install "shardkit[torch]"'
    for size in asked.batch_sizes:
        for transform in transforms:
            recipe: dict[str, Any] = {
                "batch_size": size, "transform": transform, "size": asked.size,
            }  # fmt: skip
            recipe["batch_size"] = usual_options(dataset, **recipe)["batch_size"]
            for number, place in itertools.product(threads, places):
                yield Setting("load", number, **recipe, decode=place)
            if dataset.format == FOLDER and transform != "crop" and workers:
                skipped[f"{name}, DataLoader"] = "measured only with the transform crop"
            else:
                yield from (Setting("load", workers=number, **recipe) for number in workers)


def _places(
    name: str, encoded: bool, asked: Sequence[str], skipped: dict[str, str]
) -> Sequence[str | None]:
    """Return where to decode the images of batches for a GPU; None: batches that are for none."""
    if asked and encoded and has_gpu():
        return asked
    if asked:
        reason = "torch finds no GPU" if encoded else "the dataset has no encoded images"
        skipped[f"{name}, batches on a GPU"] = reason
    return (None,)


def _message(error: Exception) -> str:
    """Return the text of an error, without a worker's traceback."""
    text = str(error)
    if text.startswith("Caught "):  # in a DataLoader's worker, with its traceback
        name = f"{type(error).__module__}.{type(error).__qualname__}: "
        return text.rpartition(name)[2].strip()
    return text if isinstance(error, ShardkitError) else f"{type(error).__name__}: {text}"
