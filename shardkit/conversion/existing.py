"""What exists at the output: the requested dataset, another one, or an unfinished conversion."""

from __future__ import annotations

import contextlib
from enum import Enum
from pathlib import Path
from typing import Any

from shardkit.conversion.bucket import BucketPartial
from shardkit.conversion.folder import FolderPartial
from shardkit.conversion.partial import Partial, comparable
from shardkit.conversion.plan import Plan
from shardkit.conversion.target import Target
from shardkit.errors import NotFoundError, OutputError, ShardkitError
from shardkit.metadata import manifest as manifests
from shardkit.metadata.job import JOB
from shardkit.metadata.recipe import identity
from shardkit.storage.remote.path import RemotePath


class State(Enum):
    """What a run finds at its output; the values are shown by `--plan`."""

    FREE = ""
    COMPLETE = "already complete: there is nothing to do"
    UNFINISHED = "unfinished: the run continues where it stopped"
    OTHER_WORK = "unfinished, with other options or another source: the run is refused"
    DAMAGED_WORK = "unfinished, and its description is damaged: the run is refused"
    REPLACED = "a dataset, which is replaced"
    OTHER_DATASET = "another dataset, which is not replaced without --overwrite"


def partial_of(target: Target) -> Partial:
    """Return the unfinished work on a target on this machine or in a bucket."""
    if isinstance(target.path, RemotePath):
        return BucketPartial(target, target.path)
    return FolderPartial(target)


def begun_anew(
    target: Target, job: dict[str, Any], other: str, *, overwrite: bool = False
) -> Partial:
    """Begin work that is not resumed, of the kind that the only name in `job` tells.

    Without `overwrite`, raises OutputError, with `other` advice, for unfinished work of another
    kind.
    """
    partial = partial_of(target)
    old = partial.job()
    if old is not None and old.keys() != job.keys() and not overwrite:
        partial.lock.refuse_busy()
        raise OutputError(
            "there is an unfinished conversion to this output",
            path=partial.path,
            fix=f"finish it with its own command, or {other}",
        )
    partial.begin(job, resume=False)
    return partial


def state_of(plan: Plan, partial: Partial, *, overwrite: bool) -> State:
    """Determine what a run finds at its output.

    With `overwrite`, a complete dataset is written again, unless a run of the same job wrote it
    and died while cleaning up. A part never replaces the dataset that it would make: it may have
    just been merged.
    """
    part = plan.part is not None
    job = partial.job()
    ours = _is_ours(plan, job)
    complete = plan.resumable and is_complete(plan.job, plan.target)
    if complete and (part or not overwrite or (ours and partial.is_published())):
        return State.COMPLETE
    # A part never removes the work of another job: it may be the one with the wrong options.
    refuses = job is not None and not ours and (part or not overwrite)
    if refuses and (partial.results() or (part and partial.has_publish_plan())):
        return State.OTHER_WORK if job else State.DAMAGED_WORK
    empty = plan.target.is_empty()
    if not empty and not overwrite:
        return State.OTHER_DATASET
    if ours and plan.resumable and partial.results():
        return State.UNFINISHED
    return State.FREE if empty else State.REPLACED


def is_done(plan: Plan, partial: Partial, *, overwrite: bool) -> bool:
    """Return whether the dataset exists already; raises OutputError if it must not be replaced."""
    works = (State.OTHER_WORK, State.DAMAGED_WORK)
    while (state := state_of(plan, partial, overwrite=overwrite)) in works:
        partial.lock.refuse_busy()
        job = partial.job()
        if job is not None and not _is_ours(plan, job):
            raise _other_work(plan, partial, job)
        # The run that did this work has just ended: look again.
    if state is State.COMPLETE:
        clean_up(plan, partial)
        return True
    _refuse_other_dataset(plan, state)
    return False


def made_meanwhile(plan: Plan, partial: Partial, *, overwrite: bool) -> bool:
    """Return whether another run made the dataset after `is_done`, before this run had the lock.

    Raises OutputError if it made another dataset. In a store, only publishing finds this.
    """
    if (overwrite and plan.part is None) or isinstance(plan.target.path, RemotePath):
        return False
    state = state_of(plan, partial, overwrite=overwrite)
    _refuse_other_dataset(plan, state)
    return state is State.COMPLETE


def _refuse_other_dataset(plan: Plan, state: State) -> None:
    if state is State.OTHER_DATASET:
        fix = "give another folder with -o, or replace this one with convert --overwrite"
        raise another_dataset(plan.job, plan.target, fix)


def _is_ours(plan: Plan, job: dict[str, Any] | None) -> bool:
    return job is not None and comparable(job) == comparable(plan.job)


def clean_up(plan: Plan, partial: Partial) -> None:
    """Remove leftovers of a run killed while cleaning up, and of runs that cannot be continued."""
    if not partial.exists():
        return
    job = partial.job()
    if job is None or _is_ours(plan, job) or (job and "recipe" not in job):  # the last: a repair's
        # A merge may be cleaning up at this moment.
        with contextlib.suppress(*[OutputError] if plan.part is not None else []):
            partial.begin(plan.job, resume=True)
            partial.discard()


def _other_work(plan: Plan, partial: Partial, job: dict[str, Any]) -> OutputError:
    """Return the error for an unfinished conversion with other options or another source."""
    again = "start again with --overwrite"
    if plan.part is not None:
        again = f"remove {partial.path}"
    if not job:
        return damaged_job(partial, again)
    found = differences(comparable(job), comparable(plan.job)) if "recipe" in job else None
    if found is None or _is_of_another_version(job, plan):
        return OutputError(
            "an unfinished conversion to this output was started by another version of shardkit or"
            " of its libraries, and this version cannot continue it",
            path=partial.path,
            found=found,
            fix=again,
        )
    return OutputError(
        "an unfinished conversion to this output has other options or another source",
        path=partial.path,
        found=found,
        fix=f"to finish it, run it with its own options and unchanged files; otherwise {again}",
    )


def _is_of_another_version(job: dict[str, Any], plan: Plan) -> bool:
    """Whether a run was started by another version, so that its own options do not continue it.

    A job names only the libraries that its options need: those that both jobs name are compared.
    """
    begun = job.get("versions")
    if not isinstance(begun, dict) or "tasks" not in begun:
        return True
    return any(plan.versions[n] != begun[n] for n in begun.keys() & plan.versions.keys())


def damaged_job(partial: Partial, again: str) -> OutputError:
    """The error for an unfinished conversion whose job.json is damaged; `again` is the fix."""
    return OutputError(
        "the description of an unfinished conversion to this output is damaged",
        path=partial.path / JOB,
        fix=f"to discard its finished work, {again}",
    )


def is_complete(job: dict[str, Any], target: Target) -> bool:
    """Return whether the complete dataset of a job exists at the target already."""
    out = target.path
    if not (manifests.has_manifest(out) and out.exists()):
        return False
    try:
        manifest = manifests.load_any(out)
        if manifest.errors and job["recipe"]["on_error"] == "fail":
            return False
        folder = manifests.folder_of(manifests.manifest_path(out))
        same = identity(manifest.recipe) == identity(job["recipe"])
        return same and _has_all_files(folder, manifest)
    except ShardkitError:  # not a readable dataset
        return False


def _has_all_files(folder: Path, manifest: manifests.Manifest | manifests.Splits) -> bool:
    if isinstance(manifest, manifests.Splits):
        names = manifest.splits
        return all(_has_all_files(folder / name, manifests.load(folder / name)) for name in names)
    if isinstance(folder, RemotePath):  # two requests instead of one for each file
        folder.scandir(), (folder / manifests.FOLDER).scandir()
    try:
        return all(
            (folder / file.name).stat().st_size == file.bytes
            for file in (*manifest.all_files(), *manifest.files)
        )
    except OSError:
        return False


def another_dataset(job: dict[str, Any], target: Target, fix: str) -> OutputError:
    """Return the error for a dataset at the target that differs from the one of a job."""
    found = _difference(target.path, job["recipe"])
    what = "the output exists and holds another dataset"
    if None in job["recipe"]["sources"].values():
        what = "the output exists and may hold another dataset"
    return OutputError(what, path=target.path, found=found, fix=fix)


def _difference(out: Path, recipe: dict[str, Any]) -> str:
    """Return how the dataset at `out` differs from the requested one, in words."""
    try:
        manifest = manifests.load_any(out)
    except NotFoundError as error:  # the manifest has appeared or vanished since the first look
        raise OutputError(
            "another run created or replaced the output while this run looked at it",
            path=out,
            fix="wait for that run, then repeat the command",
        ) from error
    words = differences(identity(manifest.recipe), identity(recipe))
    if not words:
        dropped = manifest.errors and recipe["on_error"] == "fail"
        words = (
            "bad samples were dropped from it"
            if dropped
            else "the source has no fingerprint, so that it cannot be told whether it is the same"
            if None in recipe["sources"].values()
            else "it is damaged, or from an older version"
        )
    return words


# Options on which it depends what is read of a source.
_READING = {
    *("text", "fields", "drop", "split", "split_column", "documents"),
    *("label_column", "label_columns", "label_separator", "classes"),
    *("metadata", "file_column", "file_suffix", "annotations_frame"),
}


_DIGESTS = {
    "transform": "the code of the transform has changed",
    "tokenizer": "the tokenizer's file has changed",
}


def differences(old: dict[str, Any], new: dict[str, Any], option: str = "") -> str:
    """Return the options in which two recipes differ, or the entries of an option, in words."""
    words = []
    changed = [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
    for name in changed:
        before, now = old.get(name), new.get(name)
        if name == "sources" and not _READING.isdisjoint(changed):
            continue  # the fields and classes that are read are part of what identifies a source
        if name in ("sources", "times"):
            words.append("the source has changed")
        elif name == "digest":
            words.append(_DIGESTS.get(option, "the list of keys has changed"))
        elif name == "chat_template" and isinstance(before or now, dict):
            words.append("the chat template has changed")
        elif isinstance(before, dict) and isinstance(now, dict):
            words.append(differences(before, now, name))
        else:
            of = f"the {option}'s " if option in _DIGESTS else ""
            words.append(f"{of}{name} was {before}, is {now}")
    return "; ".join(filter(None, dict.fromkeys(words)))
