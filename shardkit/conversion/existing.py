"""What is at the output already: the dataset that is asked for, another one, or unfinished work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkit import manifest as manifests
from shardkit.conversion.partial import Partial, comparable
from shardkit.conversion.plan import Plan
from shardkit.errors import NotFoundError, OutputError, ShardkitError
from shardkit.recipe import identity
from shardkit.remote.path import RemotePath


def is_done(plan: Plan, partial: Partial, *, overwrite: bool) -> bool:
    """Whether the dataset is there already; raises OutputError where it must not be replaced."""
    out = plan.target.path
    job = partial.job() if partial.exists() else None
    ours = job is not None and comparable(job) == comparable(plan.job)
    if _is_complete(plan) and (ours or not overwrite):
        if partial.exists() and (ours or job is None):
            partial.begin(plan.job, resume=True)  # the last run was killed while cleaning up
            partial.discard()
        return True
    if job is not None and not ours and not overwrite and partial.has_work():
        found = differences(comparable(job), comparable(plan.job)) if "recipe" in job else None
        if found is None or _is_of_another_version(job, plan):
            raise OutputError(
                "there is an unfinished conversion to this output, begun by another version of"
                " shardkit or of its libraries, which this version cannot continue",
                path=partial.path,
                found=found,
                fix="start again with --overwrite",
            )
        raise OutputError(
            "there is an unfinished conversion to this output, of other options or another source",
            path=partial.path,
            found=found,
            fix="repeat it with its own options to finish it, or start again with --overwrite",
        )
    if not plan.target.is_empty() and not overwrite:
        raise OutputError(
            "the output exists and holds another dataset",
            path=out,
            found=_difference(out, plan),
            fix="give another folder with -o, or replace this one with --overwrite",
        )
    return False


def _is_of_another_version(job: dict[str, Any], plan: Plan) -> bool:
    """Whether a run cannot be continued with its own options either.

    Of libraries, each run names those that its options need: only what both name is compared.
    """
    begun = job.get("versions")
    if not isinstance(begun, dict) or "tasks" not in begun:
        return True
    return any(plan.versions[n] != begun[n] for n in begun.keys() & plan.versions.keys())


def _is_complete(plan: Plan) -> bool:
    """Whether the target already holds, whole, the dataset that this plan makes."""
    out = plan.target.path
    if not (plan.resumable and manifests.has_manifest(out) and out.exists()):
        return False
    try:
        manifest = manifests.load_any(out)
        if manifest.errors and plan.recipe.on_error == "fail":
            return False
        folder = manifests.folder_of(manifests.manifest_path(out))
        same = identity(manifest.recipe) == identity(plan.job["recipe"])
        return same and _has_all_files(folder, manifest)
    except ShardkitError:  # whatever is there, it is not that
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


def _difference(out: Path, plan: Plan) -> str:
    """Why the dataset at `out` is not the one that is asked for."""
    try:
        manifest = manifests.load_any(out)
    except NotFoundError as error:  # it had no manifest when it was looked at first
        raise OutputError(
            "the output came, or was replaced, while this run looked at it: another run makes it",
            path=out,
            fix="wait for that run, then repeat the command, which says what is there",
        ) from error
    words = differences(identity(manifest.recipe), identity(plan.job["recipe"]))
    if not words:
        dropped = manifest.errors and plan.recipe.on_error == "fail"
        words = "bad samples were dropped from it" if dropped else "it is damaged, or may be older"
    return words


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What two runs do not have in common, in words."""
    words = []
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if name in ("sources", "times"):
            words.append("the source has changed")
        elif name == "transform" and isinstance(before, dict) and isinstance(now, dict):
            same = before.get("name") == now["name"]
            words.append(
                f"the code of the transform {now['name']} has changed"
                if same
                else f"the transform was {before.get('name')}, is {now['name']}"
            )
        elif isinstance(before, dict) and isinstance(now, dict):
            words.append(differences(before, now))
        else:
            words.append(f"{name} was {before}, is {now}")
    return "; ".join(dict.fromkeys(words))
