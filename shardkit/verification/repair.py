"""`verify --repair`: copies a sound file with the right checksum, or runs a shard's tasks again.

Each file is written to OUT.partial, compared there with its checksum in the manifest, synced, and
renamed over the damaged file. A repair that is killed therefore leaves each file either unchanged
or repaired; the next repair cleans up OUT.partial.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from shardkit.conversion.existing import differences, partial_of
from shardkit.conversion.plan import Plan, Task, make_plan
from shardkit.conversion.publish import named_shard, write_lists
from shardkit.conversion.publish_plan import PublishPlan
from shardkit.conversion.run import work_of
from shardkit.conversion.splits import Split
from shardkit.conversion.target import Target
from shardkit.conversion.work import TaskShard, is_finished, read_result, run_task
from shardkit.dataset.dataset import Dataset
from shardkit.errors import DamagedError, OutputError, ShardkitError, UsageError
from shardkit.formats import file_name, get_format
from shardkit.helpers import os_errors
from shardkit.helpers.checked import plain
from shardkit.metadata import manifest as manifests
from shardkit.metadata.manifest import PIECES, File, Manifest, Shard, Splits
from shardkit.metadata.recipe import Recipe, identity
from shardkit.preprocess.transform import load_transform
from shardkit.sources import open_sources
from shardkit.sources.inputs import paths_of
from shardkit.storage import fs
from shardkit.storage.checksums import CHECKSUM, listed
from shardkit.storage.patterns import expanded
from shardkit.storage.remote.path import RemotePath
from shardkit.verification.files import find_damage
from shardkit.verification.groups import Against, key_lists, with_metadata
from shardkit.verification.shards import CheckedPart
from shardkit.verification.work import LAST, Meter

_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "repair it from the unchanged source or from a copy of the dataset, or convert again"
_UNMADE = DamagedError("neither the source nor the shards give this file as it was", fix=_AGAIN)


@dataclass(frozen=True)
class Repaired:
    """A file whose contents now match the manifest."""

    path: str
    bytes: int
    how: str  # "copied" from a copy, or "rebuilt"


@dataclass
class RepairReport:
    """The result of a repair. `left` holds an error, with the reason, per file not repaired."""

    source: str
    files: list[Repaired] = field(default_factory=list)
    left: list[ShardkitError] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        left = [problem.to_dict() for problem in self.left]
        return {**plain(replace(self, left=[])), "left": left, "bytes": self.bytes}


class Repair:
    """The repair of the dataset or folder of splits that is at a path or contains it.

    A context manager: other runs on the same dataset are locked out while it is entered.
    """

    def __init__(
        self,
        path: Path,
        datasets: Sequence[Dataset],
        source: Against,
        metadata: str | os.PathLike[str] | None,
        transform: str | Callable[..., Any] | None,
        meter: Meter,
    ) -> None:
        self._meter = meter
        self._source, self._metadata, self._transform = source, metadata, transform
        self._paths = paths_of(source)
        self._top, self._split = _top_of(path, datasets)
        single = not self._top.is_dir() or manifests.single_manifest(self._top) is not None
        self._target = Target(self._top, datasets[0].format if datasets else "", single)
        for given in expanded(self._paths):
            with os_errors.explained("open", given):
                given.stat()
            if fs.absolute(given) == self._top:
                raise UsageError("a dataset cannot be repaired from itself", path=given)
        self._partial = partial_of(self._target)
        self._plans: dict[str, Plan | ShardkitError] = {}  # by split
        self.report = RepairReport(", ".join(map(str, self._paths)) or type(source).__name__)

    def __enter__(self) -> Repair:
        job = self._partial.job()
        continues = job is not None and ("recipe" in job or not job)
        if continues and (self._partial.results() or self._partial.has_publish_plan()):
            self._partial.lock.refuse_busy()
            raise OutputError(
                "there is an unfinished conversion to this dataset",
                path=self._partial.path,
                fix=f"finish it by its own command, or remove {self._partial.path}",
            )
        self._partial.begin({"repair": True}, resume=False)
        self._stage, self._tasks = (self._partial.dataset / name for name in ("files", "tasks"))
        return self

    def __exit__(self, *error: object) -> None:
        self._partial.discard()

    def run(self, parts: Sequence[CheckedPart], common: Sequence[File], kind: str) -> bool:
        """Repair the files that were found to be damaged. Return whether any was repaired."""
        before = len(self.report.files)
        for part in parts:
            if part.damaged and part.manifest is not None:
                self._repair_part(part, part.manifest)
        made = {part.name: part.manifest for part in parts if part.manifest is not None}
        if common:
            complete = get_format(parts[0].dataset.format).complete_splits
            self._repair(self._top, common, kind, lambda: iter([complete(self._stage, made)]))
        return len(self.report.files) > before

    def _repair_part(self, part: CheckedPart, manifest: Manifest) -> None:
        fs.remove(self._tasks)
        folder, kind = part.dataset.path, manifest.checksum
        by_shard: dict[int, list[File]] = {}
        for number, file in part.damaged:
            by_shard.setdefault(number, []).append(file)
        lists = by_shard.pop(LAST, [])
        for number, files in sorted(by_shard.items()):
            self._repair(folder, files, kind, partial(self._rebuilt, part, part.shards[number]))
        self._repair(folder, lists, kind, partial(self._lists, part, manifest))

    # --- files

    def _repair(
        self, folder: Path, files: Sequence[File], kind: str, make: Callable[[], Iterator[object]]
    ) -> None:
        """Replace files by copies, or else by what `make` writes to the stage, until all match."""
        left = [file for file in files if not self._copy(folder, file, kind)]
        if not left:
            return
        reason: ShardkitError = _UNMADE
        self._clear(f"{manifests.FOLDER}/{manifests.NAME}")
        try:
            for _ in make():
                left = [file for file in left if not self._put(folder, file, kind, "rebuilt")]
                if not left:
                    return
        except ShardkitError as error:
            reason = error
        for file in left:
            self._not_repaired(folder / file.name, reason)

    def _copy(self, folder: Path, file: File, kind: str) -> bool:
        """Replace a file by one with the same checksum in a copy. Return whether it is done.

        A file whose copy is damaged as well is reported, and also done.
        """
        path = self._copies.get((file.bytes, file.checksum))
        if path is None:
            return False
        self._clear(file.name)
        try:
            if isinstance(path, RemotePath):
                fs.download(path, self._stage / file.name, file.bytes)
            else:
                with fs.create(self._stage / file.name) as made:
                    fs.append(made, path, file.bytes)
            if not self._put(folder, file, kind, "copied"):
                bad = DamagedError(f"{path} is damaged as well", fix=_AGAIN)
                self._not_repaired(folder / file.name, bad)
        except ShardkitError as why:
            self._not_repaired(folder / file.name, why)
        return True

    @cached_property
    def _copies(self) -> Mapping[tuple[int, str], Path]:
        """The files listed in the source's manifests, by size and checksum."""
        found = {}
        for path in self._paths:
            manifest = _manifest_at(path)
            every = [(path, manifest)]
            if isinstance(manifest, Splits):
                every += [(path / name, _manifest_at(path / name)) for name in manifest.splits]
            for dataset, one in every:
                shards = one.all_files() if isinstance(one, Manifest) else []
                for file in (*shards, *(one.files if one else ())):
                    folder = manifests.folder_of(manifests.manifest_path(dataset))
                    found[file.bytes, file.checksum] = folder / file.name
        return found

    def _lists(self, part: CheckedPart, manifest: Manifest) -> Iterator[None]:
        """Write files that belong to no shard: by the shards, then by running all tasks again."""
        folder = part.dataset.path
        get_format(manifest.format).complete(self._stage, manifest)
        pieces = manifest.list_named(PIECES)
        if pieces is not None and (LAST, pieces) in part.damaged:
            files = [file for file in manifest.all_files() if listed(file.bytes)]
            data = b"".join(fs.digests(self._here(folder / f.name, f.bytes)) for f in files)
            fs.write_file(self._stage / pieces.name, data)
        yield
        plan, split = self._plan(part)
        tasks = [task for task in plan.tasks if task.split is split]
        for made in (one for task in tasks for one in self._made(plan, task)):
            for file in made.shard.files:  # only what they tell of samples is needed
                fs.remove(made.folder / file.name)
        folders = [self._tasks / f"{task.number:06d}" for task in tasks]
        number = plan.splits.index(split)
        write_lists(PublishPlan.of(plan), number, self._target, self._stage, folders)
        yield

    def _here(self, path: Path, size: int) -> Path:
        """The path of a local file: `path` itself, or a downloaded copy of a remote object."""
        if not isinstance(path, RemotePath):
            return path
        fs.download(path, self._stage / "object", size)
        return self._stage / "object"

    def _clear(self, name: str) -> None:
        """Empty the stage, and create the folder for a file with this name."""
        fs.remove(self._stage)
        fs.make_folder((self._stage / name).parent)

    def _put(self, folder: Path, file: File, kind: str, how: str) -> bool:
        """Publish a staged file atomically, by a rename or an upload, unless it does not match."""
        for _, problem in find_damage(self._stage, [file], kind, Meter(None)):
            _raise_if_full(problem)
            return False
        new, old = self._stage / file.name, folder / file.name
        if isinstance(old, RemotePath):
            self._partial.lock.check()
            fs.put(new, old)
        else:
            at, top = old.parent, os.path.realpath(self._target.folder)
            above = takewhile(lambda one: os.path.realpath(one) != top, (at, *at.parents))
            if old.is_dir() or any(map(Path.is_symlink, above)):
                raise OutputError(
                    "the path of the file is a folder, or leads through a symbolic link",
                    path=old,
                    fix="move it away, or repair the dataset that the link points to",
                )
            fs.make_folder(at)
            fs.sync(new)
            fs.rename(new, old)
            fs.sync(at)
            fs.sync(at.parent)  # `at` may be a new folder
        self.report.files.append(Repaired(str(old), file.bytes, how))
        self._meter.add(file.bytes)
        return True

    def _not_repaired(self, path: Path, error: ShardkitError) -> None:
        _raise_if_full(error)
        at = error.where.get("path", path)
        what = error.what if at == path else f"{error.what} ({at})"
        left = DamagedError(
            "a damaged file was not repaired",
            path=path,
            expected=error.expected,
            found="; ".join(filter(None, [what, error.found])),
            fix=error.fix,
        )
        self.report.left.append(left)

    # --- tasks

    def _rebuilt(self, part: CheckedPart, shard: Shard) -> Iterator[None]:
        """Write a shard by running its tasks again: each run of their results that it may be."""
        numbers = range(shard.tasks[0], shard.tasks[1] + 1) if len(shard.tasks) == 2 else range(0)
        if shard.samples and not numbers:
            raise DamagedError(
                "the manifest does not record which tasks made the shard",
                fix="repair it from a copy of the dataset, or create it again",
            )
        assert part.manifest is not None
        plan, split = self._plan(part)
        other = _differences(part.manifest, plan)
        tasks = [one for one in plan.tasks if one.number in numbers and one.split is split]
        if len(tasks) < len(numbers):
            raise DamagedError(
                "the source now yields different tasks than those that made the shard",
                found=other or None,
                fix=_AGAIN,
            )
        for done in self._tasks.glob("*"):
            if int(done.name) not in numbers:
                fs.remove(done)
        made = [one for task in tasks for one in self._made(plan, task)]
        stem = shard.file.name.removesuffix(file_name("", plan.format.name))
        for group in _groups(made, shard, part.kind):
            self._clear(shard.file.name)
            named_shard(split.content, group, self._stage, stem)
            yield
        raise DamagedError(
            "the rebuilt shard differs from the original", found=other or None, fix=_AGAIN
        )

    def _plan(self, part: CheckedPart) -> tuple[Plan, Split]:
        """Return the plan of the conversion, and the part's split in it, made once.

        Raises ShardkitError if the source does not fit them.
        """
        if part.name not in self._plans:
            try:
                self._plans[part.name] = self._make_plan(part)
            except ShardkitError as error:
                self._plans[part.name] = error
        plan, name = self._plans[part.name], part.name or self._split
        if isinstance(plan, ShardkitError):
            raise plan
        for split in plan.splits:
            if split.name == name:
                return plan, split
        raise DamagedError(f"the source has no split {name!r}", fix=_AGAIN)

    def _make_plan(self, part: CheckedPart) -> Plan:
        assert part.manifest is not None
        recipe = Recipe.from_json(part.manifest.recipe, part.dataset.manifest_path)
        if (recipe.transform is None) != (self._transform is None):
            raise UsageError(
                "the dataset was made with a transform, which is needed to rebuild it"
                if self._transform is None
                else "the dataset was made without a transform",
                found=recipe.transform.name if recipe.transform else None,
                fix="give it with --transform MODULE:FUNCTION" if recipe.transform else None,
            )
        recipe = with_metadata(recipe, self._metadata)
        classes = part.dataset.classes if recipe.classes is None else recipe.classes
        asked, lists = replace(recipe, classes=classes), key_lists([part], recipe)
        sources = open_sources(self._source, asked, strict=False, lists=lists)
        tokenizer = transform = None
        if recipe.tokenizer is not None and part.dataset.tokenizer_path is not None:
            from shardkit.codecs.tokenizers import open_copy

            tokenizer = open_copy(part.dataset.tokenizer_path, {**recipe.tokenizer}, fast=True)
        if self._transform is not None:
            transform = load_transform(self._transform, 1).elsewhere()
        return make_plan(recipe, sources, self._target, tokenizer=tokenizer, transform=transform)

    def _made(self, plan: Plan, task: Task) -> list[TaskShard]:
        """Run a task, unless it has run, and return what it made."""
        folder = self._tasks / f"{task.number:06d}"
        if not is_finished(folder):
            fs.make_folder(self._tasks)
            work = work_of(task, plan.recipe, folder)
            run_task(work, lambda progress: self._partial.lock.check())
        return read_result(folder).made(folder, task.number, task.joined)


def _groups(made: Sequence[TaskShard], shard: Shard, kind: str) -> Iterator[list[TaskShard]]:
    """Candidates for a shard: consecutive outputs of its tasks with its number of samples."""
    if not made and not shard.samples:
        yield []
    for start in range(len(made)):
        for stop in range(start + 1, len(made) + 1):
            group = list(made[start:stop])
            checksum = group[0].shard.file.checksum
            other = len(group) == 1 and kind == CHECKSUM and checksum != shard.file.checksum
            if sum(one.shard.samples for one in group) == shard.samples and not other:
                yield group


def _differences(manifest: Manifest, plan: Plan) -> str:
    """Return how the recipe and versions differ from those that made a dataset, in words."""
    words = differences(identity(manifest.recipe), identity(plan.recipe.to_json()))
    old, new = manifest.versions, plan.versions
    changed = [name for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
    versions = [f"{name} was {old[name]}, is now {new[name]}" for name in changed]
    return "; ".join(filter(None, [words, *versions]))


def _top_of(path: Path, datasets: Sequence[Dataset]) -> tuple[Path, str]:
    """The complete output of the conversion that a path belongs to, and the split it selects.

    The output is the dataset at or around the path, or the folder of splits that contains it.
    """
    found = _real(fs.output(path))
    places = (_real(dataset.place) for dataset in datasets)
    found = next((place for place in places if place in found.parents), found)  # of one shard
    above = _manifest_at(found.parent)
    if isinstance(above, Splits) and found.name in above.splits:
        return found.parent, found.name
    return found, ""


def _real(path: Path) -> Path:
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def _manifest_at(path: Path) -> Manifest | Splits | None:
    """Return the manifest of a dataset; None if it is missing or damaged."""
    with suppress(DamagedError):
        return manifests.load_any(path) if manifests.has_manifest(path) else None
    return None


def _raise_if_full(error: ShardkitError) -> None:
    """Re-raise errors that are not caused by the file, such as a full disk."""
    cause = error.__cause__
    if isinstance(cause, OSError) and (cause.errno in _FULL or os_errors.shortage(error)):
        raise error
