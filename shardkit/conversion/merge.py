"""`shardkit.merge`: one dataset of several, or of the parts of a conversion."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.conversion.cuts import TASKS
from shardkit.conversion.existing import another_dataset, damaged_job, is_complete, partial_of
from shardkit.conversion.partial import Partial
from shardkit.conversion.pool import Pool
from shardkit.conversion.publish_plan import PublishPlan, who_is_missing
from shardkit.conversion.run import check_errors, errors_of, finished_in, publish, result_of
from shardkit.conversion.target import Target
from shardkit.dataset.find import open_splits
from shardkit.errors import OutputError, ShardkitError, UsageError
from shardkit.formats import get_format
from shardkit.helpers.keywords import takes
from shardkit.helpers.processors import processors
from shardkit.helpers.progress import OfConversion, Progress, watched
from shardkit.metadata import manifest as manifests
from shardkit.storage import fs
from shardkit.version import __version__

if TYPE_CHECKING:
    from shardkit.conversion.run import ConvertResult, Monitor


@takes()
def merge(
    *datasets: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[Progress], object] | Monitor = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertResult:
    """Combine several datasets into one, `out`, or publish the parts of a conversion.

    With `out`, it is the same as `convert([*datasets], to=FORMAT, out=out)` with the format of all
    the datasets, and decodes nothing. Raises UsageError if they do not have the same format, and
    all errors of `convert`.

    `merge(dataset)` without `out` publishes the dataset of a conversion in parts (`convert(...,
    part="2/8")`), once all parts have ended. It needs neither the source nor the options, because
    the parts have stored what is needed. If the dataset is published already, the result describes
    it. Raises OutputError if tasks are missing, and names the parts that should do them.

    `progress` and `storage_options` are the same as in `shardkit.convert`.
    """
    if out is not None:
        from shardkit.conversion.convert import convert

        with fs.using(storage_options, *datasets, out):
            to = _common_format(datasets)
        paths, options = list(datasets), storage_options
        return convert(paths, to, out, progress=progress, storage_options=options)
    if len(datasets) != 1:
        raise UsageError(
            "an output is needed to merge datasets",
            found=f"{len(datasets)} datasets and no output",
            fix="give -o OUT (out=); to publish a conversion in parts, give only its output",
        )
    with watched(progress, OfConversion) as monitor:
        return _publish(datasets[0], monitor, storage_options)


def _common_format(datasets: Sequence[str | os.PathLike[str]]) -> str:
    """Return the common format of all datasets; raises UsageError if there is none."""
    found = {
        os.fspath(path): dataset.format
        for path in datasets
        for dataset in open_splits(fs.source(path), partly=True).values()
    }
    formats = set(found.values())
    if len(formats) != 1:
        raise UsageError(
            "the datasets have different formats" if found else "no dataset is given",
            found=", ".join(f"{path} is {format}" for path, format in found.items()) or None,
            fix="choose the format of the output: shardkit convert A B --to FORMAT -o OUT",
        )
    return formats.pop()


def _publish(
    out: str | os.PathLike[str], monitor: Monitor | None, storage_options: Mapping[str, Any] | None
) -> ConvertResult:
    began = time.monotonic()
    with fs.using(storage_options, out):
        path = fs.output(out)
    partial = partial_of(Target(path, ""))
    job = partial.job()
    if job == {}:
        raise damaged_job(partial, f"remove {partial.path}")
    if job is None or "recipe" not in job:  # such as that of a repair, which cannot be continued
        result = _finished(Target(path, ""))
    else:
        target = _target_of(job, path)
        target.check([])
        result = _merge(job, target, monitor)
    return replace(result, seconds=round(time.monotonic() - began, 3))


def _finished(target: Target) -> ConvertResult:
    """Return the result for a dataset that is published already."""
    if not manifests.has_manifest(target.path):
        raise OutputError(
            "there is no conversion in parts to this output",
            path=target.path,
            fix="run its parts first: shardkit convert ... --part I/N",
        )
    partial = partial_of(target)
    if partial.exists():  # the run that made it was killed while cleaning up
        partial.begin({}, resume=False)
        partial.discard()
    return result_of(None, target, already_complete=True)


def _target_of(job: dict[str, Any], path: Path) -> Target:
    """The target of an unfinished run. Raises OutputError if this version cannot finish it."""
    recipe, versions = job.get("recipe"), job.get("versions")
    if not isinstance(recipe, dict) or not isinstance(versions, dict):
        raise _not_in_parts(path)
    found = (versions.get("shardkit"), versions.get("tasks"))
    if found != (__version__, TASKS):
        raise OutputError(
            "the unfinished conversion to this output was started by another version of shardkit",
            path=path,
            expected=f"shardkit {__version__}",
            found=f"shardkit {found[0]}",
            fix="merge it with that version",
        )
    return Target.of(path, get_format(str(recipe.get("format"))).name)


def _not_in_parts(path: Path) -> OutputError:
    return OutputError(
        "the unfinished conversion to this output was not started in parts",
        path=path,
        fix="finish it by running its own command again",
    )


def _merge(job: dict[str, Any], target: Target, monitor: Monitor | None) -> ConvertResult:
    partial = partial_of(target)
    partial.begin(job, resume=True)
    try:
        if is_complete(job, target):
            partial.discard()
            return result_of(None, target, already_complete=True)
        if (packed := partial.read(partial.publish_plan)) is None:
            raise _not_in_parts(target.path)
        publish_plan = PublishPlan.unpacked(packed, partial.publish_plan)
        if not target.is_empty() and not publish_plan.overwrite:
            fix = "repeat any part with --overwrite, then merge again, which replaces it"
            raise another_dataset(job, target, fix)
        _check(publish_plan, target, partial)
        every = range(len(publish_plan.tasks))
        with Pool(processors(), early=False) as processes:
            publish(publish_plan, target, partial, every, monitor, processes)
    finally:
        partial.release()
    return result_of(publish_plan, target)


def _check(publish_plan: PublishPlan, target: Target, partial: Partial) -> None:
    """Raise an error if a task is missing, or if more samples are bad than allowed."""
    tasks = range(len(publish_plan.tasks))
    done, _ = finished_in(partial, tasks, publish_plan.recipe.on_error)
    if missing := {*tasks} - done:
        words, parts = who_is_missing(partial.begun(), missing)
        which = f"--part {parts[0]}" if parts else "--part I/N"
        more = " and so on" if len(parts) > 1 else ""
        raise OutputError(
            "not all parts of this conversion are done",
            path=target.path,
            expected=f"{len(tasks):,} finished",
            found=words,
            fix=f"run the same command with {which}{more}, then merge again",
        )
    try:
        check_errors(publish_plan.problems + errors_of(partial, done), publish_plan.max_errors)
    except ShardkitError as error:
        error.fix = "repeat any part with a larger --max-errors, then merge again"
        raise
