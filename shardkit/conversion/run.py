"""A whole conversion: make a plan, carry out its tasks, publish the dataset."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from shardkit.conversion import pool
from shardkit.conversion.estimate import refuse_full
from shardkit.conversion.existing import clean_up, is_done, made_meanwhile, partial_of
from shardkit.conversion.partial import Partial, no_progress
from shardkit.conversion.plan import Plan, Task, make_plan
from shardkit.conversion.publish import assemble, joins, shards_of
from shardkit.conversion.publish_plan import PublishPlan, agree, parts_of
from shardkit.conversion.target import Target, default_output
from shardkit.conversion.work import Report, TaskProgress, Work, read_result
from shardkit.errors import OutputError, ShardkitError, SourceError, UsageError, printable
from shardkit.formats import get_format
from shardkit.helpers.checked import plain
from shardkit.helpers.part_of import PartOf
from shardkit.helpers.words import size as in_bytes
from shardkit.metadata.manifest import (
    ERRORS,
    FILTERED,
    FieldStats,
    Manifest,
    Splits,
    folder_of,
    load,
    load_any,
    manifest_path,
)
from shardkit.metadata.recipe import Recipe
from shardkit.options import ConvertOptions
from shardkit.preprocess.transform import load_transform
from shardkit.sources import open_sources
from shardkit.sources.inputs import paths_of
from shardkit.sources.key_lists import key_lists
from shardkit.storage.patterns import expanded
from shardkit.storage.remote.client import LARGEST
from shardkit.storage.remote.path import RemotePath

_OTHER_OPTIONS = "to change any option but --on-error, add --overwrite, which starts over"


class Monitor(Protocol):
    """Receives the progress of a conversion; called in the caller's thread."""

    def start(self, plan: Plan, done: int) -> None:
        """Work begins; earlier runs have already `done` this amount, in units of the plan."""

    def advance(self, progress: TaskProgress) -> None:
        """Samples were written or dropped. Negative if a worker died and its task starts over."""

    def copied(self, more: int, total: int) -> None:
        """`more` bytes of `total` have been published in a store; 0 in the first call."""


class Engine(Protocol):
    """Runs the tasks: in local processes (`pool.py`) or on a Ray cluster (`ray_engine.py`)."""

    def run(self, works: Iterator[Work], tasks: int, report: Report) -> None:
        """Run all `tasks`; `report` is called in this thread. If one fails, all are stopped."""

    def kill(self) -> None:
        """Stop all running tasks immediately; a second call does nothing."""


@dataclass(frozen=True)
class SplitResult:
    """The result of one split, which is a dataset of its own."""

    path: str
    samples: int
    bytes: int  # of the shards
    shards: int
    errors: int  # samples that were dropped
    errors_list: str | None  # the file that lists them
    classes: int | None
    fields: dict[str, FieldStats]
    encoded: dict[str, int]  # images that the format could not store unchanged, by reason
    ignored: dict[str, int]  # files, fields, rows, ... that were ignored, with their counts
    keys: dict[str, int]  # keys that other readers may fail on, by what they contain: blanks
    filtered: dict[str, int]  # samples that were dropped because of options, by reason
    filtered_list: str | None  # the file that lists them
    text: dict[str, Any]  # statistics of documents and tokens; empty without a tokenizer
    images: dict[str, int]  # what the steps did: passed, resized, encoded, kept; bytes in and out
    reasons: dict[str, int]  # why images and audio were changed, apart from resizing


def notes_on_keys(splits: Iterable[SplitResult]) -> list[str]:
    """Warnings about keys that other readers may fail on; complete once all keys are written."""
    found = sum((Counter(split.keys) for split in splits), Counter())
    return [
        f"keys with {what}, which DALI's TAR index and other tools cannot handle: {count:,};"
        " --safe-keys percent-encodes them"
        for what, count in sorted(found.items())
    ]


@dataclass(frozen=True)
class PartResult:
    """The result of one part of a conversion, whose dataset `shardkit.merge` publishes."""

    part: str  # "2/8"
    tasks: int  # tasks of this part, all of which are done
    samples: int  # stored samples
    bytes: int  # of their shards, before any are joined
    errors: int  # samples that were dropped
    missing: int  # unfinished tasks of other parts, as this part ended
    missing_parts: tuple[str, ...]  # the parts that they belong to: "1/8"


@dataclass(frozen=True, repr=False)
class ConvertResult:
    """The result of a conversion.

    For a part of a conversion, `splits` is empty, and `part` describes what this part has done.
    `samples`, `bytes` and `errors` are then those of this part.

    out: path of the dataset.
    format: name of its format.
    splits: result by split. A dataset without splits has one entry, named "".
    source_bytes: bytes that were read from the source.
    ignored: what was ignored in all splits, and how often.
    notes: what may surprise you, such as images without labels.
    already_complete: whether an earlier run of the same command has made the dataset.
    seconds: duration of planning, working and publishing.
    part: what this part has done, until the dataset is published. None: it is published.
    """

    out: str
    format: str
    splits: dict[str, SplitResult]
    source_bytes: int
    ignored: dict[str, int]
    notes: list[str]
    already_complete: bool = False
    seconds: float = 0.0
    part: PartResult | None = None

    def __repr__(self) -> str:
        words = f"{self.samples:,} samples, {in_bytes(self.bytes)} in {self.seconds:,.1f} s"
        words += f", {self.errors:,} dropped" * bool(self.errors)
        words += ", already complete" * self.already_complete
        parts = [name for name in self.splits if name]
        if self.part is not None:
            parts = [f"part {self.part.part}"]
        of = f" ({', '.join(parts)})" if parts else ""
        return printable(f"<ConvertResult {self.out}{of}: {self.format}, {words}>")

    @property
    def _made(self) -> Collection[SplitResult | PartResult]:
        return self.splits.values() if self.part is None else [self.part]

    @property
    def samples(self) -> int:
        """Number of stored samples."""
        return sum(made.samples for made in self._made)

    @property
    def bytes(self) -> int:
        """Size of all shards in bytes."""
        return sum(made.bytes for made in self._made)

    @property
    def errors(self) -> int:
        """Number of samples that were dropped because they are bad."""
        return sum(made.errors for made in self._made)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, as for `--json`."""
        totals = {"samples": self.samples, "bytes": self.bytes, "errors": self.errors}
        return {**plain(self), **totals}


def prepare(
    source: str | os.PathLike[str] | Sequence[Any],
    to: str,
    out: str | os.PathLike[str] | None = None,
    options: ConvertOptions | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
    part: PartOf | None = None,
) -> Plan:
    """Make the plan of a conversion to `out`, or of a part of it, without writing any output."""
    get_format(to)  # report an unknown format before any other error
    options = options or ConvertOptions()
    recipe = Recipe.of(to, options)
    lists = key_lists(options)
    recipe = replace(recipe, keys={name: keys.entry() for name, keys in lists.items()})
    paths = paths_of(source)
    target = Target.of(default_output(paths, to) if out is None else out, to)
    sources = open_sources(source, recipe, schema=schema, lists=lists)
    if recipe.text.reading and not all(source.reads_text for source in sources.values()):
        option = "--" + recipe.text.reading[0].replace("_", "-")
        raise UsageError(
            f"{option} applies only to text files",
            found="a source without text files",
            fix=f"leave out {option}",
        )
    _check_beside(recipe, target)
    if target.one_shard(options.bounded):
        recipe = replace(recipe, shard_size=None)
    transform = None
    if options.transform is not None:
        workers = options.processes(source)
        transform = load_transform(options.transform, workers)
        transform = transform.elsewhere() if workers else transform
    plan = make_plan(recipe, sources, target, transform=transform)
    plan = replace(plan, part=part)
    if part is not None and not plan.resumable:
        raise UsageError(
            "it cannot be verified that all parts read the same samples: the source is a sequence"
            " of Python objects, or the transform cannot be identified",
            found=f"part {part}",
            fix="convert it without parts, or write it with shardkit.create first",
        )
    target.check(expanded(paths))
    _refuse_large(plan)
    return plan


def _check_beside(recipe: Recipe, target: Target) -> None:
    """Raise UsageError for loader files that the format, or a single shard, does not support."""
    loaders = get_format(recipe.format).beside
    for name in recipe.beside:
        if name not in loaders:
            raise UsageError(
                f"--to {recipe.format} cannot write files for {name!r} next to its shards",
                expected=", ".join(loaders) or "--to wds, whose TARs other libraries' loaders read",
            )
        if target.single and not loaders[name]:
            raise UsageError(
                f"{name} reads folders, but the output is one shard", fix="give a folder with -o"
            )


def _refuse_large(plan: Plan) -> None:
    """Raise UsageError if shards are known to be larger than a store accepts in one request."""
    if not isinstance(plan.target.path, RemotePath):
        return
    size = plan.recipe.shard_size or 0
    if plan.recipe.one_shard:
        copied = [split for split in plan.splits if not split.steps]
        sizes = [sum(t.size for t in plan.tasks if t.split is split) for split in copied]
        size = max(sizes, default=0)
    if size > LARGEST:
        raise UsageError(
            "a shard would be larger than one request to a store can write",
            path=plan.target.path,
            expected=f"at most {LARGEST:,} bytes",
            found=f"{size:,}",
            fix="make smaller shards, with --shard-size",
        )


def run(
    plan: Plan, options: ConvertOptions, monitor: Monitor | None, processes: Engine | None
) -> ConvertResult:
    """Carry out a plan in `processes`, or in this process if it is None."""
    partial = partial_of(plan.target)
    publish_plan = PublishPlan.of(plan, options.max_errors, options.overwrite)
    if is_done(plan, partial, overwrite=options.overwrite):
        return result_of(publish_plan, plan.target, already_complete=True)
    _refuse_problems(plan, options.max_errors)
    refuse_full(plan)
    try:
        partial.begin(plan.job, resume=plan.resumable, part=plan.part)
    except OutputError:  # also if another run has published the dataset, and ended
        if plan.part is None or not made_meanwhile(plan, partial, overwrite=options.overwrite):
            raise
        return result_of(publish_plan, plan.target, already_complete=True)
    try:
        if made_meanwhile(plan, partial, overwrite=options.overwrite):
            if plan.part is None:
                partial.discard()
            else:
                partial.release()
                clean_up(plan, partial)
            return result_of(publish_plan, plan.target, already_complete=True)
        if plan.part is not None:
            agree(publish_plan, partial)
        finished = _finished(plan, partial)
        _work(plan, partial, finished, options, monitor, processes)
        if plan.part is not None:
            return _of_part(plan, plan.part, partial)
        publish(publish_plan, plan.target, partial, finished, monitor, processes)
    except BaseException as error:
        with contextlib.suppress(ShardkitError):
            partial.sweep()  # the unfinished tasks of the other workers
            if (
                isinstance(error, ShardkitError)
                and "--" in (error.fix or "")
                and "--overwrite" not in (error.fix or "")
                and plan.part is None
                and partial.results()
            ):
                error.fix = f"{error.fix} ({_OTHER_OPTIONS})"
        raise
    finally:
        partial.release()
    return result_of(publish_plan, plan.target)


def publish(
    publish_plan: PublishPlan,
    target: Target,
    partial: Partial,
    earlier: Collection[int],
    monitor: Monitor | None,
    processes: Engine | None,
) -> None:
    """Join shards, and publish the results as the output; other runs have finished `earlier`."""
    made = [shards_of(publish_plan, number, partial) for number in range(len(publish_plan.splits))]
    left = joins(publish_plan, made, partial, earlier)

    def works() -> Iterator[Work]:
        for work in left:
            partial.lock.check()  # joining reports no progress
            yield work

    if len(left) > 1 and processes is not None:
        processes.run(works(), len(left), lambda progress: None)
    else:
        pool.run_here(works(), lambda progress: None)
    assemble(publish_plan, target, partial, made)
    copied = no_progress if monitor is None else monitor.copied
    partial.publish(copied, overwrite=publish_plan.overwrite)


def _of_part(plan: Plan, part: PartOf, partial: Partial) -> ConvertResult:
    """Return the result of a part that has done its tasks."""
    results = [read_result(partial.task_folder(task.number)) for task in plan.own]
    shards = [shard for result in results for shard in result.shards]
    done = partial.results()
    missing = {n for n in range(len(plan.tasks)) if partial.task_folder(n).name not in done}
    return ConvertResult(
        out=str(plan.target.path),
        format=plan.format.name,
        splits={},
        source_bytes=plan.own_bytes,
        ignored={},
        notes=plan.notes(),
        part=PartResult(
            part=str(part),
            tasks=len(results),
            samples=sum(shard.samples for shard in shards),
            bytes=sum(shard.file.bytes for shard in shards),
            errors=sum(result.errors for result in results),
            missing=len(missing),
            missing_parts=tuple(map(str, parts_of(missing, part.total))),
        ),
    )


def _refuse_problems(plan: Plan, allowed: int) -> None:
    if plan.problems and plan.recipe.on_error == "fail":
        raise plan.problems[0]
    if len(plan.problems) > allowed:
        raise _too_many(allowed, " ".join(str(plan.problems[0]).split()))


def check_errors(bad: int, allowed: int) -> None:
    if bad > allowed:
        raise _too_many(allowed)


def _too_many(allowed: int, last: str = "") -> SourceError:
    return SourceError(
        f"more than {allowed:,} samples are bad",
        found=last or None,
        fix="look at them one by one with --on-error fail, or allow more with --max-errors",
    )


def _work(
    plan: Plan,
    partial: Partial,
    finished: set[int],
    options: ConvertOptions,
    monitor: Monitor | None,
    processes: Engine | None,
) -> None:
    """Run the remaining tasks; stop if more bad samples are found than are allowed."""
    if monitor is not None:
        done = sum(plan.amount(task) for task in plan.own if task.number in finished)
        monitor.start(plan, done)
    bad = len(plan.problems) + errors_of(partial, finished)

    def report(progress: TaskProgress) -> None:
        nonlocal bad
        partial.lock.check()
        bad += progress.errors
        check_errors(bad, options.max_errors)
        if monitor is not None:
            monitor.advance(progress)

    left = [task for task in plan.own if task.number not in finished]
    works = _works(plan, partial, finished)
    # For little work, this process has loaded everything already. The user's own code, which is a
    # transform or a sequence (which cannot be resumed), runs where the user asked for it.
    alone = len(left) == 1 or (options.workers is None and _is_little(left))
    ours = plan.resumable and plan.recipe.transform is None and isinstance(processes, pool.Pool)
    if processes is None or (alone and ours):
        if processes is not None and not any(task.joined for task in plan.own):
            processes.kill()  # they are not needed
        pool.run_here(works, report)
    else:
        processes.run(works, len(left), report)


def _is_little(tasks: list[Task]) -> bool:
    """Return whether copying takes less time than starting workers."""
    copies = not any(task.joined or task.split.steps for task in tasks)
    return copies and sum(task.size for task in tasks) <= pool.LITTLE


def _works(plan: Plan, partial: Partial, finished: set[int]) -> Iterator[Work]:
    for task in plan.own:
        if task.number not in finished:
            folder = partial.task_folder(task.number)
            yield work_of(task, plan.recipe, folder, upload=partial.upload(folder), part=plan.part)


def work_of(task: Task, recipe: Recipe, folder: Path, **more: Any) -> Work:
    """Return the `Work` of a task, for a worker that leaves its result in `folder`."""
    content, durable = task.split.content, not task.joined
    return Work.of(task.number, folder, task.reading(), recipe, content, durable=durable, **more)


def _finished(plan: Plan, partial: Partial) -> set[int]:
    """Return the finished tasks, without those that dropped samples if this run must not drop any.

    A part looks at the tasks of other parts only if it counts their errors.
    """
    on_error = plan.recipe.on_error
    every = plan.own if on_error == "fail" else plan.tasks
    finished, dropped = finished_in(partial, (task.number for task in every), on_error)
    if dropped and partial.dataset.exists():  # shards were moved, and may be renumbered
        if plan.part is not None:
            raise OutputError(
                "another run has begun to publish tasks that this part would have to repeat",
                path=partial.path,
                fix="give --on-error skip, or run the whole conversion without --part",
            )
        partial.begin(plan.job, resume=False)
        return set()
    for number in sorted(dropped):
        partial.undo(partial.task_folder(number))
    return finished


def finished_in(
    partial: Partial, numbers: Iterable[int], on_error: str
) -> tuple[set[int], set[int]]:
    """The given tasks that are finished, and those that dropped samples against `on_error`."""
    folders = {partial.task_folder(number): number for number in numbers}
    done = {folders[folder] for folder in partial.finished(folders)}
    dropped = {n for n in done if on_error == "fail" and errors_of(partial, {n})}
    return done - dropped, dropped


def errors_of(partial: Partial, finished: set[int]) -> int:
    return sum(read_result(partial.task_folder(number)).errors for number in finished)


def result_of(
    publish_plan: PublishPlan | None, target: Target, *, already_complete: bool = False
) -> ConvertResult:
    """The result of the output, from its manifests and, if there is one, a publishing plan."""
    out = target.path
    made = load_any(out)
    if isinstance(made, Splits):
        splits = {name: _split_result(out / name, load(out / name)) for name in made.splits}
    else:
        splits = {"": _split_result(out, made)}
    ignored = sum((Counter(split.ignored) for split in splits.values()), Counter())
    notes = () if publish_plan is None else publish_plan.notes
    return ConvertResult(
        out=str(out),
        format=made.format,
        splits=splits,
        source_bytes=0 if publish_plan is None else publish_plan.source_bytes,
        ignored=dict(sorted(ignored.items())),
        notes=[*notes, *notes_on_keys(splits.values())],
        already_complete=already_complete,
    )


def _split_result(dataset: Path, manifest: Manifest) -> SplitResult:
    folder = folder_of(manifest_path(dataset))
    errors, filtered = (manifest.list_named(name) for name in (ERRORS, FILTERED))
    names = {f.name for f in fields(SplitResult)} & {*dir(manifest)}
    return SplitResult(
        **{name: getattr(manifest, name) for name in names - {"shards", "classes"}},
        path=str(dataset),
        shards=len(manifest.shards),
        errors_list=None if errors is None else str(folder / errors.name),
        classes=None if manifest.classes is None else len(manifest.classes),
        filtered_list=None if filtered is None else str(folder / filtered.name),
    )
