"""`bench`: compares how fast datasets load, by the medians of many short interleaved runs."""

from __future__ import annotations

import importlib.util
import io
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from shardkit.dataset.dataset import Dataset
from shardkit.errors import OutputError, UsageError, near
from shardkit.helpers import os_errors
from shardkit.helpers.keywords import takes
from shardkit.helpers.progress import Monitor, watched
from shardkit.helpers.progress import Progress as Step
from shardkit.options import check_numbers
from shardkit.performance.contender import MEASURES, PEER, Contender, Process, Setting, command
from shardkit.performance.defaults import image_field, open_any, usual_options
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


class Progress(Monitor, Protocol):
    """Shows how many runs are done."""

    def note(self, words: str) -> None:
        """Show what is done before the runs."""


@dataclass(frozen=True)
class Sweep:
    """The options of `bench`: every combination of settings is measured for each dataset.

    measures: what to measure: "read" (read and hash every value, in shuffled order), "decode" (read
        and decode whole images), "load" (batches, as in training).
    threads: numbers of loading threads to try. None: 1, 2, 4, ... up to the number of processors.
    workers: numbers of worker processes to try, of torch's DataLoader.
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

    contender: Contender
    setting: Setting
    cold: bool
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    stayed: float | None = None  # cold runs only: the largest share of bytes left in the page cache
    error: str | None = None

    def ask(self, process: Process, *, counts: bool = True) -> None:
        """Do one run in a process."""
        given = {name: value for name, value in vars(self.setting).items() if value is not None}
        answer = process.ask(given)
        self.error = answer.get("error")
        if counts and self.error is None:
            self.seconds.append(answer["seconds"])
            self.samples.append(answer["samples"])

    def to_dict(self) -> dict[str, Any]:
        """Return the runs as JSON values. Rates are in samples per second."""
        rates = [n / max(s, 1e-9) for n, s in zip(self.samples, self.seconds, strict=True)]
        rate = statistics.median(rates) if rates and self.error is None else None
        size = self.contender.sample_bytes
        return {
            "contender": self.contender.name,
            "format": self.contender.format,
            **asdict(self.setting),
            "cold": self.cold,
            "seconds": self.seconds,
            "samples": self.samples,
            "rate": rate,
            "min": min(rates) if rate else None,
            "max": max(rates) if rate else None,
            "bytes_per_second": rate * size if rate and size else None,
            "stayed": self.stayed,
            "error": self.error,
        }


@takes(Sweep)
def bench(
    paths: Sequence[str | os.PathLike[str]],
    *,
    cold: bool = False,
    peers: bool = False,
    peers_in: Sequence[str | os.PathLike[str]] = (),
    work: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[Step], object] | Progress = False,
    **sweep: Unpack[SweepKeywords],
) -> dict[str, Any]:
    """Measure how fast `paths` load: datasets of any formats, or folders of images.

    Each round runs every setting once, in another order. A first run of each is not counted. The
    result consists of JSON values.

    cold: also measure with files that are not in the page cache.
    peers: also measure other libraries that are installed here, with the samples of the first path.
    peers_in: also measure other libraries that are installed in these virtual environments. A
        folder that contains several environments works, too.
    work: folder for the data that other libraries read; it is kept. None: a temporary folder.
    progress: as in `shardkit.convert`.

    Cold runs of other libraries include what they do only once: starting workers, compiling.

    Raises UsageError for invalid options, such as a batch that is larger than a dataset. A setting
    that fails while it is measured has an `error` in the report, and the others continue.
    """
    asked = Sweep(**sweep)
    datasets = _opened(paths)
    skipped: dict[str, str] = {}
    contenders = [_ours(name, *each, asked, skipped) for name, each in datasets.items()]
    if asked.workers and not _has_torch():
        skipped["workers"] = 'torch is not installed: pip install "shardkit[torch]"'
    with tempfile.TemporaryDirectory() as temporary, watched(progress) as monitor:
        if peers or peers_in:
            if monitor:
                monitor.note("writing the data that other libraries read")
            first = next(iter(datasets.values()))[1]
            contenders += _peers(first, asked, peers_in, Path(work or temporary), skipped)
        warm = [Measured(c, s, cold=False) for c in contenders for s in c.settings]
        if not warm:
            raise UsageError(
                "there is nothing to measure", found="; ".join(skipped.values()) or None
            )
        for _, dataset in datasets.values():
            dataset.close()  # no file may stay open
        dropped = [c for c in contenders if _can_be_cold(c, skipped)] if cold else []
        cold_runs = [Measured(c, s, cold=True) for c in dropped for s in c.settings]
        if monitor:
            runs = len(warm) * (asked.rounds + 1) + len(cold_runs) * asked.rounds
            monitor.start("measuring", runs, "runs")
        _run_warm(warm, asked.rounds, monitor)
        _run_cold(cold_runs, asked.rounds, monitor)
    return {
        "versions": versions(),
        "machine": about_machine(),
        "settings": {**asdict(asked), "threads": asked.powers(), "cold": cold},
        "contenders": [{"name": c.name, "format": c.format, **c.about} for c in contenders],
        "runs": [measured.to_dict() for measured in (*warm, *cold_runs)],
        "skipped": skipped,
    }


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _opened(paths: Sequence[str | os.PathLike[str]]) -> dict[str, tuple[Path, Dataset]]:
    """The datasets by their folder's name, or by their path if the name is not unique."""
    every = list(dict.fromkeys(map(fs.source, paths)))
    if not every:
        raise UsageError("there is no dataset to measure", fix="name one or several")
    names = [path.resolve().name for path in every]
    opened = {}
    for path, name in zip(every, names, strict=True):
        dataset = open_any(path)
        if not len(dataset):
            raise UsageError("the dataset has no samples", path=path, fix="convert some first")
        opened[name if names.count(name) == 1 else str(path)] = path, dataset
    return opened


def _ours(
    name: str, path: Path, dataset: Dataset, asked: Sweep, skipped: dict[str, str]
) -> Contender:
    settings = list(_settings(dataset, asked))
    for measure in asked.measures:
        if not any(setting.measure == measure for setting in settings):
            skipped[f"{name}, {measure}"] = "the dataset has no encoded images"
    stored = sum(dataset.extent(shard)[1] for shard in range(dataset.shards))
    about = {
        "path": str(path),
        "samples": len(dataset),
        "shards": dataset.shards,
        "bytes": stored,
        "file_system": None if isinstance(path, RemotePath) else file_system(path),
    }
    start, mean = command(path, asked.limit), stored / len(dataset)
    if isinstance(path, RemotePath):
        about["downloads"] = round(mean * min(asked.limit, len(dataset)))
        about["cache_limit"] = cache_from().limit
    return Contender(name, dataset.format, start, path, about, settings=settings, sample_bytes=mean)


def _settings(dataset: Dataset, asked: Sweep) -> Iterator[Setting]:
    """The settings to measure a dataset with."""
    images, threads = image_field(dataset), asked.powers()
    encoded = images is not None and isinstance(dataset.schema[images], Image)
    for measure in ("read", "decode") if encoded else ("read",):
        if measure in asked.measures:
            yield from (Setting(measure, number) for number in threads)
    if "load" not in asked.measures:
        return
    transforms = asked.transforms
    if images is None:  # the built-in transforms are for images
        transforms = [name for name in asked.transforms if ":" in name] or ["none"]
        if asked.threads is None:
            threads = [0, *threads]  # loading without threads may be as fast
    for batch_size in asked.batch_sizes:
        for transform in transforms:
            recipe: dict[str, Any] = {
                "batch_size": batch_size, "transform": transform, "size": asked.size,
            }  # fmt: skip
            usual_options(dataset, **recipe)  # raises for options that do not fit
            yield from (Setting("load", number, **recipe) for number in threads)
            for number in asked.workers if _has_torch() else ():
                yield Setting("load", workers=number, **recipe)


def _peers(
    dataset: Dataset,
    asked: Sweep,
    folders: Sequence[str | os.PathLike[str]],
    work: Path,
    skipped: dict[str, str],
) -> list[Contender]:
    from shardkit.performance.peers import contenders, interpreters_in

    ready, missing = contenders(dataset, interpreters_in(folders), work, limit=asked.limit)
    skipped.update(missing)
    transform = "none" if image_field(dataset) is None else "crop"
    loaded = "load" in asked.measures and transform in (*asked.transforms, "none")
    if "load" in asked.measures and not loaded and ready:
        skipped["load of others"] = "other libraries are measured only with the transform crop"
    loads = [
        Setting("load", None, number, batch_size, transform, asked.size)
        for batch_size in (asked.batch_sizes if loaded else ())
        for number in asked.powers()
    ]
    reads = [Setting("read", workers=number) for number in asked.powers()]
    found = []
    for peer in ready:
        reading = "read" in asked.measures and "read" in peer.measures
        found.append(replace(peer, settings=(reads if reading else []) + loads))
    return found


def _can_be_cold(contender: Contender, skipped: dict[str, str]) -> bool:
    if isinstance(contender.path, RemotePath):
        skipped[f"{contender.name}, cold"] = "data at a URL are not in the page cache"
        return False
    stayed = drop_from_cache([contender.path])
    if stayed > _STAYED:
        skipped[f"{contender.name}, cold"] = (
            f"not possible here ({stayed:.0%} of the bytes stayed in memory)"
        )
    return stayed <= _STAYED


def _process(contender: Contender) -> Process:
    path = contender.path
    return Process(contender.command, path.store.options if isinstance(path, RemotePath) else None)


def _in_turn(
    measured: Sequence[Measured], rounds: int, progress: Progress | None
) -> Iterator[tuple[int, Measured]]:
    """Yield the round number and what to run: all that has not failed, in random order."""
    for number in range(rounds):
        for each in random.Random(number).sample(measured, len(measured)):
            if each.error is None:
                yield number, each
            if progress:
                progress.advance(1)


def _run_warm(measured: Sequence[Measured], rounds: int, progress: Progress | None) -> None:
    """Measure warm runs: one process per contender; the first round is not counted."""
    processes: dict[int, Process] = {}
    try:
        for number, each in _in_turn(measured, rounds + 1, progress):
            contender = each.contender
            process = processes.setdefault(id(contender), _process(contender))
            each.ask(process, counts=number > 0)
    finally:
        for process in processes.values():
            process.close()


def _run_cold(measured: Sequence[Measured], rounds: int, progress: Progress | None) -> None:
    """Measure cold runs: one process per run, which opens its dataset before files are evicted."""
    for _, each in _in_turn(measured, rounds, progress):
        process = _process(each.contender)
        try:
            if each.contender.format != PEER:
                process.ask({"measure": "open"})
            stayed = drop_from_cache([each.contender.path])
            if stayed > _STAYED:  # another process reads the files
                each.error = f"not cold: {stayed:.0%} of the bytes are in memory"
            else:
                each.stayed = max(stayed, each.stayed or 0.0)
                each.ask(process)
        finally:
            process.close()


# --- the plot ------------------------------------------------------------------------------------


def check_plot(path: Path) -> None:
    """Raise UsageError or OutputError if `draw` could not write the plot."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "a plot needs matplotlib, which is not installed",
            fix='pip install "shardkit[bench]"',
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UsageError(
            "the suffix of the plot is not a supported image format",
            path=path,
            expected=", ".join(f".{suffix}" for suffix in sorted(known)),
        )
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OutputError(
            f"cannot write the plot: {os.strerror(error.errno or 0)}",
            path=path,
            fix="choose a file in a writable folder",
        ) from error


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
