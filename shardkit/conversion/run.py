"""Plan, work, publish."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from shardkit.checked import plain
from shardkit.conversion import pool
from shardkit.conversion.estimate import refuse_full
from shardkit.conversion.existing import is_done
from shardkit.conversion.outline import Outline
from shardkit.conversion.part_listing import PartListing
from shardkit.conversion.partial import Partial, partial_of, unseen
from shardkit.conversion.parts import agreed
from shardkit.conversion.plan import Plan, Task, make_plan
from shardkit.conversion.publish import assemble
from shardkit.conversion.target import Target, default_output
from shardkit.conversion.work import Progress, Report, Work, read_result
from shardkit.errors import OutputError, ShardkitError, SourceError, UsageError, printable
from shardkit.formats import get_format
from shardkit.manifest import (
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
from shardkit.options import ConvertOptions
from shardkit.part_of import PartOf
from shardkit.patterns import expanded
from shardkit.preprocess.transform import load_transform
from shardkit.recipe import Recipe
from shardkit.remote.path import RemotePath
from shardkit.remote.store import LARGEST
from shardkit.sources import open_sources
from shardkit.sources.given import paths_of
from shardkit.sources.key_lists import key_lists
from shardkit.words import size as in_bytes

_OTHER_OPTIONS = "any option but --on-error takes --overwrite too: it begins again"


class Monitor(Protocol):
    """Who wants to know how a conversion goes on; called in the caller's thread."""

    def start(self, plan: Plan, done: int) -> None:
        """Work begins; an earlier run has `done` so many samples."""

    def advance(self, progress: Progress) -> None:
        """Samples were written or dropped. Negative after a worker died: its task begins again."""

    def copied(self, more: int, total: int) -> None:
        """So many bytes more of `total` are at their names in a store; 0 of them at first."""


class Engine(Protocol):
    """Who does the tasks: processes of this machine (`pool.py`), or of others (`ray_engine.py`)."""

    def run(self, works: Iterator[Work], tasks: int, report: Report) -> None:
        """Do all `tasks`; `report` is called in this thread. Ends them all if one fails."""

    def kill(self) -> None:
        """End what runs, at once; a second call does nothing."""


@dataclass(frozen=True)
class SplitResult:
    """The result of one split: one dataset."""

    path: str
    samples: int
    bytes: int  # of the shards
    shards: int
    errors: int  # samples that were dropped
    errors_list: str | None  # the file that lists them
    classes: int | None
    fields: dict[str, FieldStats]
    encoded: dict[str, int]  # images that the format could not hold as they were, by reason
    ignored: dict[str, int]  # what was passed over, and how often: files, fields, rows, ...
    keys: dict[str, int]  # that other readers stumble over, by what they have: blanks
    filtered: dict[str, int]  # samples that were dropped as options ask for it, by reason
    filtered_list: str | None  # the file that lists them
    text: dict[str, Any]  # documents, tokens and what became of them; empty without a tokenizer
    images: dict[str, int]  # what the steps did: passed, resized, encoded, kept; bytes in and out
    reasons: dict[str, int]  # why images and audio were changed, other than to be resized


def notes_on_keys(splits: Iterable[SplitResult]) -> list[str]:
    """What other readers stumble over: known only once all keys were written."""
    found = sum((Counter(split.keys) for split in splits), Counter())
    return [
        f"keys with {what}, which DALI's index of a TAR and other tools cannot take: {count:,};"
        " --safe-keys percent-encodes them"
        for what, count in sorted(found.items())
    ]


@dataclass(frozen=True)
class PartResult:
    """What one part of a conversion has done, if another part is to publish the dataset."""

    part: str  # "2/8"
    tasks: int  # its own: all are done
    samples: int  # that are stored
    bytes: int  # of their shards; of those to be joined, before they are
    errors: int  # samples that were dropped
    missing: int  # tasks of others; if there are none, a part that is at work still publishes


@dataclass(frozen=True, repr=False)
class ConvertResult:
    """The result of a conversion.

    If another part is to publish the dataset, `splits` is empty, and `part` describes what this
    part has done. `samples`, `bytes` and `errors` are then those of this part.

    out: path of the dataset.
    format: name of its format.
    splits: result by split. A dataset without splits has one entry, named "".
    source_bytes: bytes that were read from the source.
    ignored: what was ignored in all splits, and how often.
    notes: what may surprise you, such as images without labels.
    already_complete: whether an earlier run of the same command has made the dataset.
    seconds: duration of planning, working and publishing.
    part: what this part has done, if another part is to publish the dataset. None: it is published.
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
        words += ", complete already" * self.already_complete
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
    ending: contextlib.ExitStack | None = None,
) -> Plan:
    """The plan of a conversion to `out`, or of a part: everything is looked at, nothing is done.

    With `ending` a part that lists its source keeps others from that, until they can load what it
    listed, or until then.
    """
    get_format(to)  # an unknown one is an error before all others
    options = options or ConvertOptions()
    recipe = Recipe.of(to, options)
    lists = key_lists(options)
    recipe = replace(recipe, keys={name: keys.entry() for name, keys in lists.items()})
    paths = paths_of(source)
    target = Target.of(default_output(paths, to) if out is None else out, to)
    listing = None
    if part is not None and schema is None and not lists:
        target.check(expanded(paths))
        listing = PartListing.of(source, recipe, target)
    sources = None if listing is None else listing.find(ending)
    if sources is None:
        sources = open_sources(source, recipe, schema=schema, lists=lists)
        if listing is not None and ending is not None:
            listing.take(sources)
    if any(recipe.text.reads and not source.reads_text for source in sources.values()):
        raise UsageError(
            "encoding, encoding_errors and documents are for files of text",
            found="a source that has no such files",
        )
    _check_beside(recipe, target)
    if target.one_shard(options.bounded):
        recipe = replace(recipe, shard_size=None)
    transform = None
    if options.transform is not None:
        transform = load_transform(options.transform, options.processes(source))
    plan = make_plan(recipe, sources, target, transform=transform)
    plan = replace(plan, part=part, listing=listing)
    if part is not None and not plan.resumable:
        raise UsageError(
            "nothing tells whether two parts read the same samples: the source is a sequence of"
            " Python objects, or the transform cannot be identified",
            found=f"part {part}",
            fix="convert it without parts, or write it with shardkit.create first",
        )
    target.check(expanded(paths))
    _refuse_large(plan)
    return plan


def _check_beside(recipe: Recipe, target: Target) -> None:
    """Raise UsageError for files for loaders that the format, or one shard alone, cannot have."""
    loaders = get_format(recipe.format).beside
    for name in recipe.beside:
        if name not in loaders:
            raise UsageError(
                f"--to {recipe.format} has no files for {name!r} to put beside its shards",
                expected=", ".join(loaders) or "--to wds, whose TARs other libraries' loaders read",
            )
        if target.single and not loaders[name]:
            raise UsageError(
                f"{name} reads folders, and the output is one shard", fix="give a folder with -o"
            )


def _refuse_large(plan: Plan) -> None:
    """Raise UsageError for shards that no request to a store can make, where that is known."""
    if not isinstance(plan.target.path, RemotePath):
        return
    size = plan.recipe.shard_size or 0
    if plan.recipe.one_shard:
        copied = [split for split in plan.splits if not split.steps]
        sizes = [sum(t.size for t in plan.tasks if t.split is split) for split in copied]
        size = max(sizes, default=0)
    if size > LARGEST:
        raise UsageError(
            "a shard would be larger than one request to a store can make",
            path=plan.target.path,
            expected=f"at most {LARGEST:,} bytes",
            found=f"{size:,}",
            fix="make smaller shards, with --shard-size",
        )


def run(
    plan: Plan, options: ConvertOptions, monitor: Monitor | None, processes: Engine | None
) -> ConvertResult:
    """Carry out a plan in `processes` or in this one."""
    partial = partial_of(plan.target)
    outline = Outline.of(plan, options.max_errors, options.overwrite)
    if is_done(plan, partial, overwrite=options.overwrite):
        return result_of(outline, plan.target, already_complete=True)
    _refuse_problems(plan, options.max_errors)
    refuse_full(plan)
    partial.begin(plan.job, resume=plan.resumable, part=plan.part)
    try:
        if plan.part is not None:
            outline = agreed(outline, partial)
        if plan.listing is not None:
            plan.listing.keep(partial)
        finished = _finished(plan, partial)
        _work(plan, partial, finished, options.max_errors, monitor, processes)
        if plan.part is not None:
            done = _part_result(plan, partial)  # once it has ended others may publish
            missing = _missing_elsewhere(plan, partial, options.max_errors)
            if missing is not None:
                return _of_part(plan, replace(done, missing=missing))
        earlier = {*range(len(plan.tasks))} - ({task.number for task in plan.own} - finished)
        publish(outline, plan.target, partial, earlier, monitor, options.overwrite)
    except BaseException as error:
        with contextlib.suppress(ShardkitError):
            partial.sweep()  # what other workers were at when one failed
            if (
                isinstance(error, ShardkitError)
                and "--" in (error.fix or "")
                and "--overwrite" not in (error.fix or "")
                and plan.part is None
                and partial.has_work()
            ):
                error.fix = f"{error.fix} ({_OTHER_OPTIONS})"
        raise
    finally:
        partial.release()
    return result_of(outline, plan.target)


def publish(
    outline: Outline,
    target: Target,
    partial: Partial,
    earlier: Collection[int],
    monitor: Monitor | None,
    overwrite: bool,
) -> None:
    """Make the output of finished tasks; `earlier` are those of other processes."""
    assemble(outline, target, partial, earlier)
    partial.publish(unseen if monitor is None else monitor.copied, overwrite=overwrite)


def _missing_elsewhere(plan: Plan, partial: Partial, allowed: int) -> int | None:
    """How many tasks are left to others, now that all of a part are done.

    None where that is no other's business any more: this one is alone, and publishes.
    """
    tasks = range(len(plan.tasks))
    missing = partial.count_missing(len(tasks))
    # Also where tasks are missing: they may be done by now, by a part that saw this one at work.
    if partial.try_alone() and not (missing := partial.count_missing(len(tasks))):
        done = finished_in(partial, tasks, plan.recipe.on_error)
        missing = len(tasks) - len(done)
        if not missing:
            check_errors(len(plan.problems) + errors_of(partial, done), allowed)
            return None
    return missing


def _part_result(plan: Plan, partial: Partial) -> PartResult:
    results = [read_result(partial.task_folder(task.number)) for task in plan.own]
    shards = [shard for result in results for shard in result.shards]
    return PartResult(
        part=str(plan.part),
        tasks=len(results),
        samples=sum(shard.samples for shard in shards),
        bytes=sum(shard.file.bytes for shard in shards),
        errors=sum(result.errors for result in results),
        missing=0,
    )


def _of_part(plan: Plan, part: PartResult) -> ConvertResult:
    return ConvertResult(
        out=str(plan.target.path),
        format=plan.format.name,
        splits={},
        source_bytes=plan.own_bytes,
        ignored={},
        notes=plan.notes(),
        part=part,
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
    allowed: int,
    monitor: Monitor | None,
    processes: Engine | None,
) -> None:
    """Do the tasks that are left; no more than so many samples are `allowed` to be bad."""
    if monitor is not None:
        done = sum(plan.amount(task) for task in plan.own if task.number in finished)
        monitor.start(plan, done)
    bad = len(plan.problems) + errors_of(partial, finished)

    def report(progress: Progress) -> None:
        nonlocal bad
        partial.check()
        bad += progress.errors
        check_errors(bad, allowed)
        if monitor is not None:
            monitor.advance(progress)

    left = sum(task.number not in finished for task in plan.own)
    works = _works(plan, partial, finished)
    # This process has all loaded that a single task takes. A sequence, which cannot be resumed, is
    # the user's own code: that stays where it was asked to be.
    if processes is None or (left == 1 and plan.resumable):
        if processes is not None:
            processes.kill()  # they would only be in the way
        pool.run_here(works, report)
    else:
        processes.run(works, left, report)


def _works(plan: Plan, partial: Partial, finished: set[int]) -> Iterator[Work]:
    recipe = replace(plan.recipe, sources={}, classes=None)  # these may be long
    for task in plan.own:
        if task.number not in finished:
            folder = partial.task_folder(task.number)
            work = work_of(task, recipe, folder)
            yield replace(work, upload=partial.upload(folder), part=partial.part)


def work_of(task: Task, recipe: Recipe, folder: Path) -> Work:
    """A task as a worker gets it, to leave its result in `folder`."""
    content = task.split.content
    return Work(
        number=task.number,
        folder=folder,
        reading=task.reading(),
        recipe=recipe,
        spec=content.spec,
        label=content.label,
        pixels=content.pixels,
        durable=not task.joined,
    )


def _finished(plan: Plan, partial: Partial) -> set[int]:
    """The tasks that are done already, less those that dropped samples if we must not.

    A part looks at those of others only where it counts their errors.
    """
    fails = plan.recipe.on_error == "fail"
    every = [task.number for task in (plan.own if fails else plan.tasks)]
    finished = set(partial.finished(every))
    dropped = _unwanted(partial, finished, plan.recipe.on_error)
    if dropped and partial.dataset.exists():  # shards have moved, and their numbers may change
        if plan.part is not None:
            raise OutputError(
                "another run had begun to publish what this part would do again",
                path=partial.path,
                fix="give --on-error skip, or run the whole conversion without --part",
            )
        partial.begin_anew(plan.job)
        return set()
    for number in sorted(dropped):
        partial.undo(number)
    return finished - dropped


def finished_in(partial: Partial, numbers: Iterable[int], on_error: str) -> set[int]:
    """Those of some tasks that are done, as `on_error` asks for it."""
    done = {*partial.finished(numbers)}
    return done - _unwanted(partial, done, on_error)


def _unwanted(partial: Partial, done: set[int], on_error: str) -> set[int]:
    """Tasks that dropped samples where none may be."""
    return {n for n in done if errors_of(partial, {n})} if on_error == "fail" else set()


def errors_of(partial: Partial, finished: set[int]) -> int:
    return sum(read_result(partial.task_folder(number)).errors for number in finished)


def result_of(
    outline: Outline | None, target: Target, *, already_complete: bool = False
) -> ConvertResult:
    """What there is at the output; without an outline as far as the manifests tell it."""
    out = target.path
    made = load_any(out)
    if isinstance(made, Splits):
        splits = {name: _split_result(out / name, load(out / name)) for name in made.splits}
    else:
        splits = {"": _split_result(out, made)}
    ignored = sum((Counter(split.ignored) for split in splits.values()), Counter())
    notes = () if outline is None else outline.notes
    return ConvertResult(
        out=str(out),
        format=made.format,
        splits=splits,
        source_bytes=0 if outline is None else outline.source_bytes,
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
