"""Plan, work, publish."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from shardkit import storage
from shardkit.checked import plain
from shardkit.conversion import pool
from shardkit.conversion.existing import is_done
from shardkit.conversion.partial import Partial, partial_of, unseen
from shardkit.conversion.plan import Plan, make_plan
from shardkit.conversion.publish import assemble
from shardkit.conversion.target import Target, default_output
from shardkit.conversion.work import Progress, Work, read_result
from shardkit.errors import ShardkitError, SourceError, UsageError
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
from shardkit.patterns import expanded
from shardkit.preprocess.transform import load_transform
from shardkit.recipe import Recipe
from shardkit.remote.path import RemotePath
from shardkit.remote.store import LARGEST
from shardkit.sources import open_sources
from shardkit.sources.given import paths_of
from shardkit.sources.key_lists import key_lists

_OTHER_OPTIONS = "any option but --on-error takes --overwrite too: it begins again"


class Monitor(Protocol):
    """Who wants to know how a conversion goes on; called in the caller's thread."""

    def start(self, plan: Plan, done: int) -> None:
        """Work begins; an earlier run has `done` so many samples."""

    def advance(self, progress: Progress) -> None:
        """Samples were written or dropped. Negative after a worker died: its task begins again."""

    def copied(self, more: int, total: int) -> None:
        """So many bytes more of `total` are at their names in a store; 0 of them at first."""


@dataclass(frozen=True)
class SplitResult:
    """One dataset that was made."""

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
class ConvertResult:
    """What a conversion made. `splits` has one entry, named "", where there are none."""

    out: str
    format: str
    splits: dict[str, SplitResult]
    source_bytes: int
    ignored: dict[str, int]  # what was passed over in all splits, and how often
    notes: list[str]  # what may surprise: images without labels, say
    already_complete: bool = False  # an earlier run of the same command had made it
    seconds: float = 0.0  # planning, working and publishing

    @property
    def samples(self) -> int:
        return sum(split.samples for split in self.splits.values())

    @property
    def bytes(self) -> int:
        return sum(split.bytes for split in self.splits.values())

    @property
    def errors(self) -> int:
        return sum(split.errors for split in self.splits.values())

    def to_dict(self) -> dict[str, Any]:
        totals = {"samples": self.samples, "bytes": self.bytes, "errors": self.errors}
        return {**plain(self), **totals}


def prepare(
    source: str | os.PathLike[str] | Sequence[Any],
    to: str,
    out: str | os.PathLike[str] | None = None,
    options: ConvertOptions | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a conversion to `out`: everything is looked at, nothing is done."""
    get_format(to)  # an unknown one is an error before all others
    options = options or ConvertOptions()
    recipe = Recipe.of(to, options)
    lists = key_lists(options)
    recipe = replace(recipe, keys={name: keys.entry() for name, keys in lists.items()})
    sources = open_sources(source, recipe, schema=schema, lists=lists)
    if any(recipe.text.reads and not source.reads_text for source in sources.values()):
        raise UsageError(
            "encoding, encoding_errors and documents are for files of text",
            found="a source that has no such files",
        )
    paths = paths_of(source)
    target = Target.of(default_output(paths, to) if out is None else out, to)
    _check_beside(recipe, target)
    if target.one_shard(options.bounded):
        recipe = replace(recipe, shard_size=None)
    transform = None
    if options.transform is not None:
        transform = load_transform(options.transform, options.processes(source))
    plan = make_plan(recipe, sources, target, transform=transform)
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
        copied = [part for part in plan.parts if not part.steps]
        sizes = [sum(t.size for t in plan.tasks if t.part is part) for part in copied]
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
    plan: Plan, options: ConvertOptions, monitor: Monitor | None, processes: pool.Pool | None
) -> ConvertResult:
    """Carry out a plan in `processes` or in this one."""
    partial = partial_of(plan.target)
    if is_done(plan, partial, overwrite=options.overwrite):
        return _result(plan, already_complete=True)
    _refuse_problems(plan, options.max_errors)
    partial.begin(plan.job, resume=plan.resumable)
    try:
        finished = _finished(plan, partial)
        _work(plan, partial, finished, options.max_errors, monitor, processes)
        assemble(plan, partial, finished)
        partial.publish(unseen if monitor is None else monitor.copied)
    except BaseException as error:
        with contextlib.suppress(ShardkitError):
            partial.sweep()  # what other workers were at when one failed
            if (
                isinstance(error, ShardkitError)
                and "--" in (error.fix or "")
                and partial.has_work()
            ):
                error.fix = f"{error.fix} ({_OTHER_OPTIONS})"
        raise
    finally:
        partial.release()
    return _result(plan)


def _refuse_problems(plan: Plan, allowed: int) -> None:
    if plan.problems and plan.recipe.on_error == "fail":
        raise plan.problems[0]
    if len(plan.problems) > allowed:
        raise _too_many(allowed, " ".join(str(plan.problems[0]).split()))


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
    processes: pool.Pool | None,
) -> None:
    """Do the tasks that are left; no more than so many samples are `allowed` to be bad."""
    if monitor is not None:
        done = sum(plan.amount(task) for task in plan.tasks if task.number in finished)
        monitor.start(plan, done)
    bad = len(plan.problems) + _errors_of(partial, finished)

    def report(progress: Progress) -> None:
        nonlocal bad
        partial.check()
        bad += progress.errors
        if bad > allowed:
            raise _too_many(allowed)
        if monitor is not None:
            monitor.advance(progress)

    left = len(plan.tasks) - len(finished)
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
    for task in plan.tasks:
        if task.number not in finished:
            folder = partial.task_folder(task.number)
            yield Work(
                number=task.number,
                folder=folder,
                reading=task.reading(),
                recipe=recipe,
                spec=task.part.content.spec,
                label=task.part.content.label,
                pixels=task.part.content.pixels,
                durable=not task.joined,
                upload=partial.upload(folder),
            )


def _finished(plan: Plan, partial: Partial) -> set[int]:
    """The tasks that an earlier run has done, less those that dropped samples if we must not."""
    finished = set(partial.finished(len(plan.tasks)))
    if plan.recipe.on_error == "fail":
        dropped = {number for number in finished if _errors_of(partial, {number})}
        if dropped and partial.dataset.exists():  # shards have moved, and their numbers may change
            storage.remove(partial.dataset)
            dropped = finished
        for number in sorted(dropped):
            partial.undo(number)
        finished -= dropped
    return finished


def _errors_of(partial: Partial, finished: set[int]) -> int:
    return sum(read_result(partial.task_folder(number)).errors for number in finished)


def _result(plan: Plan, *, already_complete: bool = False) -> ConvertResult:
    out = plan.target.path
    made = load_any(out)
    if isinstance(made, Splits):
        splits = {name: _split_result(out / name, load(out / name)) for name in made.splits}
    else:
        splits = {"": _split_result(out, made)}
    ignored = sum((Counter(split.ignored) for split in splits.values()), Counter())
    return ConvertResult(
        out=str(out),
        format=plan.format.name,
        splits=splits,
        source_bytes=plan.source_bytes,
        ignored=dict(sorted(ignored.items())),
        notes=[*plan.notes(), *notes_on_keys(splits.values())],
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
