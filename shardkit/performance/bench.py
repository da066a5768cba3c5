"""`bench`: compares how fast datasets load, by the medians of many short interleaved runs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from shardkit.dataset.dataset import Dataset
from shardkit.errors import ShardkitError, ShardkitWarning, UsageError, near
from shardkit.helpers import os_errors
from shardkit.helpers.extras import extra
from shardkit.helpers.keywords import takes
from shardkit.helpers.progress import Monitor, Progress, watched
from shardkit.options import check_numbers
from shardkit.performance.contender import MEASURES, Contender, Result, Setting
from shardkit.performance.defaults import FOLDER, image_field, stored_bytes, usual_options
from shardkit.performance.machine import about_machine, drop_from_cache, file_system, versions
from shardkit.schema import Image
from shardkit.storage import fs
from shardkit.storage.page_cache import cache_from
from shardkit.storage.remote.path import RemotePath
from shardkit.stream.world import default_threads

if TYPE_CHECKING:
    from typing_extensions import Unpack

_STAYED = 0.05  # maximum share of bytes in the page cache for a run that counts as cold
_ROW = 0.3  # height of a row of the plot, in inches


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
    rounds: number of counted runs of each setting.
    limit: maximum number of samples per run; a run is at most one epoch.
    """

    measures: Sequence[str] = MEASURES
    threads: Sequence[int] | None = None
    workers: Sequence[int] = ()
    batch_sizes: Sequence[int] = (64,)
    transforms: Sequence[str] = ("crop",)
    size: int = 224
    rounds: int = 5
    limit: int = 10_000

    def __post_init__(self) -> None:
        check_numbers(self, size=1, rounds=1, limit=1)
        unknown = [measure for measure in self.measures if measure not in MEASURES]
        if unknown or not self.measures:
            raise UsageError(
                "unknown measure",
                found=", ".join(map(repr, unknown)) or "no measure",
                expected=near(unknown[0] if unknown else "", MEASURES),
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
    rounds: int
    limit: int


@dataclass
class Measured:
    """The runs of a contender with one setting. After a failed run, it is not run again."""

    name: str
    contender: Contender
    setting: Setting
    cold: bool
    results: list[Result] = field(default_factory=list)
    stayed: float | None = None  # cold runs only: the largest share of bytes left in the page cache
    error: str | None = None

    def run(self, contender: Contender, *, counts: bool = True) -> None:
        """Do one run."""
        try:
            result = contender.run(self.setting)
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
            "cold": self.cold,
            "seconds": [result.seconds for result in self.results],
            "samples": [result.samples for result in self.results],
            "rate": rate,
            "min": min(rates) if rate else None,
            "max": max(rates) if rate else None,
            "bytes_per_second": rate * stored_bytes(dataset) / len(dataset) if rate else None,
            "stayed": self.stayed,
            "error": self.error,
        }


@takes(Sweep)
def bench(
    paths: Sequence[str | os.PathLike[str]],
    *,
    cold: bool = False,
    progress: bool | Callable[[Progress], object] | Monitor = False,
    **sweep: Unpack[SweepKeywords],
) -> dict[str, Any]:
    """Measure how fast `paths` load: datasets of any formats, or folders of images.

    Each round runs every setting once, in another order. A first run of each is not counted. The
    result consists of JSON values.

    cold: also measure with files that are not in the page cache.
    progress: as in `shardkit.convert`.

    Raises UsageError for invalid options, such as a batch that is larger than a dataset. A setting
    that fails while it is measured has an `error` in the report, and the others continue.
    """
    asked, skipped = Sweep(**sweep), dict[str, str]()
    contenders = _contenders(paths, asked.limit)
    warm = [
        Measured(name, contender, setting, cold=False)
        for name, contender in contenders.items()
        for setting in _settings(name, contender.dataset, asked, skipped)
    ]
    if not warm:
        raise UsageError("there is nothing to measure", found="; ".join(skipped.values()) or None)
    can_be_cold = {name: cold and _can_be_cold(name, c, skipped) for name, c in contenders.items()}
    cold_runs = [replace(one, cold=True, results=[]) for one in warm if can_be_cold[one.name]]
    with (
        watched(progress) as monitor,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(sys.stderr),  # of users' functions
    ):
        warnings.simplefilter("ignore", ShardkitWarning)
        if monitor:
            runs = len(warm) * (asked.rounds + 1) + len(cold_runs) * asked.rounds
            monitor.start("measuring", runs, "runs")
        for number, each in _in_turn(warm, asked.rounds + 1, monitor):
            each.run(each.contender, counts=number > 0)
        for contender in contenders.values():
            contender.close()
        for _, each in _in_turn(cold_runs, asked.rounds, monitor):
            _run_cold(each)
    return {
        "versions": versions(),
        "machine": about_machine(),
        "settings": {**asdict(asked), "threads": asked.powers(), "cold": cold},
        "contenders": [_about(name, contender) for name, contender in contenders.items()],
        "runs": [measured.to_dict() for measured in (*warm, *cold_runs)],
        "skipped": skipped,
    }


def _contenders(paths: Sequence[str | os.PathLike[str]], limit: int) -> dict[str, Contender]:
    """The datasets by their folder's name, or by their path if the name is not unique."""
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
    about = {
        "name": name,
        "format": dataset.format,
        "path": str(path),
        "samples": len(dataset),
        "shards": dataset.shards,
        "bytes": stored_bytes(dataset),
        "file_system": None if isinstance(path, RemotePath) else file_system(path),
    }
    if isinstance(path, RemotePath):
        share = min(contender.limit / len(dataset), 1)
        about["downloads"] = round(stored_bytes(dataset) * share)
        about["cache_limit"] = cache_from().limit
    return about


def _settings(
    name: str, dataset: Dataset, asked: Sweep, skipped: dict[str, str]
) -> Iterator[Setting]:
    """The settings to measure a dataset with."""
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
    workers = asked.workers
    if workers and importlib.util.find_spec("torch") is None:
        workers, skipped["workers"] = (), 'torch is not installed: pip install "shardkit[torch]"'
    for size in asked.batch_sizes:
        for transform in transforms:
            recipe: dict[str, Any] = {
                "batch_size": size, "transform": transform, "size": asked.size,
            }  # fmt: skip
            usual_options(dataset, **recipe)  # raises for options that do not fit
            yield from (Setting("load", number, **recipe) for number in threads)
            if dataset.format == FOLDER and transform != "crop" and workers:
                skipped[f"{name}, DataLoader"] = "measured only with the transform crop"
            else:
                yield from (Setting("load", workers=number, **recipe) for number in workers)


def _can_be_cold(name: str, contender: Contender, skipped: dict[str, str]) -> bool:
    if isinstance(contender.path, RemotePath):
        skipped[f"{name}, cold"] = "data at a URL are not in the page cache"
        return False
    stayed = drop_from_cache([contender.path])
    if stayed > _STAYED:
        skipped[f"{name}, cold"] = f"not possible here ({stayed:.0%} of the bytes stayed in memory)"
    return stayed <= _STAYED


def _in_turn(
    measured: Sequence[Measured], rounds: int, progress: Monitor | None
) -> Iterator[tuple[int, Measured]]:
    """Yield the round number and what to run: all that has not failed, in random order."""
    for number in range(rounds):
        for each in random.Random(number).sample(measured, len(measured)):
            if each.error is None:
                yield number, each
            if progress:
                progress.advance(1)


def _run_cold(each: Measured) -> None:
    """Measure a dataset that was just opened, and whose files were evicted."""
    contender = Contender(each.contender.path, each.contender.limit)
    contender.open()
    stayed = drop_from_cache([contender.path])
    if stayed > _STAYED:  # another process reads the files
        each.error = f"not cold: {stayed:.0%} of the bytes are in memory"
    else:
        each.stayed = max(stayed, each.stayed or 0.0)
        each.run(contender)
    contender.close()


def _message(error: Exception) -> str:
    """The text of an error, without a worker's traceback."""
    text = str(error)
    if text.startswith("Caught "):  # in a DataLoader's worker, with its traceback
        name = f"{type(error).__module__}.{type(error).__qualname__}: "
        return text.rpartition(name)[2].strip()
    return text if isinstance(error, ShardkitError) else f"{type(error).__name__}: {text}"


# --- the plot ------------------------------------------------------------------------------------


def check_plot(path: Path) -> None:
    """Raise UsageError or OutputError if `draw` could not write the plot."""
    with extra("bench", "a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UsageError(
            "the suffix of the plot is not a supported image format",
            path=path,
            expected=", ".join(f".{suffix}" for suffix in sorted(known)),
        )
    with os_errors.explained("write the plot", path):
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report of `bench`: one chart per measure, one bar per contender and setting.

    A bar shows the median, and its error bar the range from the slowest to the fastest run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts: dict[str, list[dict[str, Any]]] = {}
    for run in report["runs"]:
        if run["rate"] is not None:
            charts.setdefault(run["measure"], []).append(run)
    rows = [len(runs) + 3 for runs in charts.values()]
    figure = Figure(figsize=(10, _ROW * max(sum(rows), 5)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(charts) or 1, squeeze=False, height_ratios=rows or None)
    for axes, (measure, runs) in zip(grid[:, 0], charts.items(), strict=False):
        rates = [run["rate"] for run in runs]
        below = [run["rate"] - run["min"] for run in runs]
        above = [run["max"] - run["rate"] for run in runs]
        colours = ["tab:blue" if run["cold"] else "tab:orange" for run in runs]
        axes.barh(range(len(runs)), rates, xerr=[below, above], color=colours, capsize=2)
        axes.set_yticks(range(len(runs)), [f"{run['contender']}, {words_of(run)}" for run in runs])
        axes.invert_yaxis()
        axes.set_title(measure)
        axes.set_xlabel("samples/s")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower())
    with os_errors.explained("write the plot", path):
        path.write_bytes(drawn.getvalue())


def words_of(run: dict[str, Any]) -> str:
    """The setting of a run in a report, as text."""
    parts = []
    for name in ("threads", "workers"):
        if run[name] is not None:
            parts.append(f"{run[name]} {name if run[name] != 1 else name[:-1]}")
    if run["batch_size"] is not None:
        parts.append(f"batch {run['batch_size']}")
    if run["transform"] not in (None, "none"):
        sized = run["transform"] in ("crop", "resize", "center")
        parts.append(f"{run['transform']} {run['size']}" if sized else run["transform"])
    return ", ".join([*parts, "cold"] if run["cold"] else parts)
