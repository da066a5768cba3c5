"""`verify --repair`: restores the original contents of a dataset's damaged files.

Files are copied from another copy of the dataset, or rebuilt by rerunning the tasks that made them
on the source or on the samples of a copy. Each file is written to OUT.partial, compared there with
its checksum in the manifest, synced, and renamed over the damaged file. A repair that is killed
therefore leaves each file either unchanged or repaired; the next repair cleans up OUT.partial.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

from shardkit.conversion.existing import differences
from shardkit.conversion.outline import Outline
from shardkit.conversion.partials import partial_of
from shardkit.conversion.plan import Plan, Task, make_plan
from shardkit.conversion.publish import named_shard, write_lists
from shardkit.conversion.run import work_of
from shardkit.conversion.shards import Content
from shardkit.conversion.split import Split
from shardkit.conversion.target import Target
from shardkit.conversion.work import TaskShard, is_finished, read_result, run_task
from shardkit.dataset.dataset import Dataset
from shardkit.errors import DamagedError, NotFoundError, OutputError, ShardkitError, UsageError
from shardkit.formats import file_name, get_format
from shardkit.formats.base import KEY, ShardReader
from shardkit.helpers import os_errors
from shardkit.helpers.checked import MOST_BYTES, plain
from shardkit.metadata import manifest as manifests
from shardkit.metadata.manifest import PIECES, File, Manifest, Shard, Splits
from shardkit.metadata.recipe import Recipe, identity
from shardkit.preprocess.transform import load_transform, same
from shardkit.sources import WHOLE, open_sources
from shardkit.sources.dataset import DatasetSource
from shardkit.sources.inputs import paths_of
from shardkit.storage import fs
from shardkit.storage.checksums import CHECKSUM, listed
from shardkit.storage.patterns import expanded
from shardkit.storage.remote.path import RemotePath
from shardkit.verification.files import check_files, find_damage, strangers
from shardkit.verification.groups import Against, key_lists, with_metadata
from shardkit.verification.shards import CheckedPart
from shardkit.verification.work import LAST, Meter, in_words

_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "repair it from the unchanged source or from a copy of the dataset, or convert again"


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
        self._bad_copies: dict[Path, str] = {}  # file -> why its copy could not be used
        self._source, self._metadata, self._transform = source, metadata, transform
        self._paths = paths_of(source)
        self._top, self._split = _top_of(path, datasets)
        single = not self._top.is_dir() or manifests.single_manifest(self._top) is not None
        format = datasets[0].format if datasets else ""
        self._target = Target(self._top, format, single)
        for given in expanded(self._paths):
            with os_errors.explained("open", given):
                given.stat()
            if fs.absolute(given) == self._top:
                raise UsageError("a dataset cannot be repaired from itself", path=given)
        self._partial = partial_of(self._target)
        self.report = RepairReport(", ".join(map(str, self._paths)) or type(source).__name__)

    def __enter__(self) -> Repair:
        job = self._partial.job() if self._partial.exists() else None
        continues = job is not None and ("recipe" in job or not job)
        if continues and (self._partial.has_work() or self._partial.has_outline()):
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

    # --- manifests

    def restore_manifests(self) -> None:
        """Restore missing or damaged manifests from a copy that certainly is of this dataset."""
        copy = self._paths[0] if len(self._paths) == 1 else None
        found = _manifest_at(self._top) or (None if copy is None else _manifest_at(copy))
        names = [*found.splits, ""] if isinstance(found, Splits) else [""]
        for name in [self._split] if self._split else names:  # "" last: it needs the splits' own
            path = self._top / name
            if _manifest_at(path) is not None:
                if (text := manifests.as_written(path)) is not None:
                    self._put_manifest(path, text, "rebuilt")
                continue
            theirs = None if copy is None else _manifest_at(copy / name)
            error = DamagedError(
                "the manifest is damaged or missing, and nothing else records the expected files",
                fix="convert again, or give a copy in the same format that has more than half"
                " of these files",
            )
            try:
                if copy is None or theirs is None or not self._is_of(path, theirs):
                    raise error
            except (DamagedError, NotFoundError) as why:  # the copy may have folders we lack
                reason = why if isinstance(why, DamagedError) else error
                self._not_repaired(manifests.manifest_path(path), reason)
                continue
            self._put_manifest(path, fs.read(manifests.manifest_path(copy / name)), "copied")

    def _put_manifest(self, path: Path, text: bytes, how: str) -> None:
        self._clear(manifests.NAME)
        fs.write_file(self._stage / manifests.NAME, text)
        folder = self._target.folder if self._target.single else path
        self._replace(manifests.NAME, self._target.list_path(folder, manifests.NAME), how)

    def _is_of(self, path: Path, manifest: Manifest | Splits) -> bool:
        """Whether the manifest of a copy describes the files of the dataset at a path.

        Raises DamagedError for shards that may be intact but from another version of the dataset.
        """
        if isinstance(manifest, Splits):
            found = {name: _manifest_at(path / name) for name in manifest.splits}
            return all(
                isinstance(one, Manifest)
                and (one.format, one.samples) == (manifest.format, manifest.splits[name])
                for name, one in found.items()
            )
        folder = self._target.folder if self._target.single else path
        files = [shard.file for shard in manifest.shards]
        wrong = [file for file, _ in find_damage(folder, files, manifest.checksum, Meter(None))]
        known = {file.name for file in (*manifest.all_files(), *manifest.files)}
        other = [] if self._target.single else strangers(folder, manifest.format, known)
        text = b""
        with suppress(ShardkitError):  # the rest of the damaged manifest may have the checksums
            text = fs.read(manifests.manifest_path(path), MOST_BYTES)
        unknown = [file.name for file in wrong if file.checksum.encode() not in text]
        if other or 2 * len(unknown) >= len(files):
            return False
        there = [name for name in unknown if (folder / name).exists()]
        if there:
            raise DamagedError(
                "the manifest is damaged or missing, and the copy has different shards",
                found=f"{in_words(there)}, damaged or from another version of the dataset",
                fix="if it is the same version, move these shards away and repair again",
            )
        return True

    # --- files

    def run(self, parts: Sequence[CheckedPart], common: Sequence[File], kind: str) -> bool:
        """Repair the files that were found to be damaged. Return whether any was repaired."""
        before = len(self.report.files)
        for part in parts:
            if part.damaged and part.manifest is not None:
                self._repair_part(part, part.manifest)
        made = {part.name: part.manifest for part in parts if part.manifest is not None}
        for file in common:
            if not self._copy(self._top, file, kind):
                format = get_format(parts[0].dataset.format)
                complete = partial(format.complete_splits, self._stage, made)
                self._remake(self._top, [file], kind, complete)
        return len(self.report.files) > before

    def _repair_part(self, part: CheckedPart, manifest: Manifest) -> None:
        folder, kind = part.dataset.path, manifest.checksum
        by_shard: dict[int, list[File]] = {}
        for number, file in part.damaged:
            if not self._copy(folder, file, kind):
                by_shard.setdefault(number, []).append(file)
        lists = by_shard.pop(LAST, [])
        tasks, reason = None, None
        for number, files in sorted(by_shard.items()):
            shard = part.shards[number]
            try:
                if reason is not None:
                    raise reason
                tasks = tasks or self._tasks_of(part, manifest)
                self._rebuild(tasks, shard, files, folder, kind)
            except ShardkitError as error:
                reason = error if tasks is None else None
                unlike = "" if tasks is None else tasks.unlike(part.dataset, number)
                self._not_repaired(folder / shard.file.name, error, unlike)
        self._remake(
            folder,
            lists,
            kind,
            lambda: self._derived(manifest, folder),
            lambda: self._lists(tasks or self._tasks_of(part, manifest)),
        )

    def _copy(self, folder: Path, file: File, kind: str) -> bool:
        """Replace a file from a copy that has a file with the same checksum, if there is one."""
        path = self._copies.get((file.bytes, file.checksum))
        if path is None:
            return False
        try:
            self._clear(file.name)
            if isinstance(path, RemotePath):
                fs.download(path, self._stage / file.name, file.bytes)
            else:
                with fs.create(self._stage / file.name) as made:
                    fs.append(made, path, file.bytes)
            self._put(folder, [file], kind, "copied")
        except ShardkitError as error:
            _raise_if_full(error)
            self._bad_copies[folder / file.name] = f"{path} is damaged as well"
            return False
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

    def _rebuild(
        self, tasks: _Tasks, shard: Shard, files: Sequence[File], folder: Path, kind: str
    ) -> None:
        """Replace files of a shard by rerunning its tasks; raises ShardkitError on failure."""
        for group in tasks.groups(shard, kind):
            stem = shard.file.name.removesuffix(file_name("", tasks.plan.format.name))
            self._clear(shard.file.name)
            named_shard(tasks.split.content, group, self._stage, stem)
            with suppress(DamagedError):
                self._put(folder, files, kind, "rebuilt")
                return
        raise DamagedError(
            "the rebuilt shard differs from the original", found=tasks.other or None, fix=_AGAIN
        )

    def _derived(self, manifest: Manifest, folder: Path) -> None:
        """Rebuild the files that are derived from the manifest and its (undamaged) shards."""
        get_format(manifest.format).complete(self._stage, manifest)
        pieces = manifest.list_named(PIECES)
        if pieces is not None:
            files = [file for file in manifest.all_files() if listed(file.bytes)]
            data = b"".join(fs.digests(self._here(folder / f.name, f.bytes)) for f in files)
            fs.write_file(self._stage / pieces.name, data)

    def _here(self, path: Path, size: int) -> Path:
        """The path of a local file: `path` itself, or a downloaded copy of a remote object."""
        if not isinstance(path, RemotePath):
            return path
        fs.download(path, self._stage / "object", size)
        return self._stage / "object"

    def _lists(self, tasks: _Tasks) -> None:
        """Rebuild the lists of a dataset, to which every task contributes a part."""
        folders = []
        for task in tasks.tasks.values():
            for made in tasks.made(task):
                for file in made.shard.files:
                    fs.remove(made.folder / file.name)
            folders.append(self._tasks / f"{task.number:06d}")
        outline = Outline.of(tasks.plan)
        write_lists(outline, tasks.number, self._target, self._stage, folders)

    def _remake(
        self, folder: Path, files: Sequence[File], kind: str, *makers: Callable[[], object]
    ) -> None:
        """Replace each file by the first good version that the `makers` write to the stage."""
        reasons: dict[File, ShardkitError] = dict.fromkeys(files, DamagedError(""))
        for make in makers if files else ():
            self._clear(f"{manifests.FOLDER}/{manifests.NAME}")
            failed = None
            try:
                make()
            except ShardkitError as error:
                failed = error
            for file in [*reasons]:
                try:
                    self._put(folder, [file], kind, "rebuilt")
                    del reasons[file]
                except ShardkitError as error:
                    reasons[file] = failed or error
        for file, reason in reasons.items():
            self._not_repaired(folder / file.name, reason)

    def _clear(self, name: str) -> None:
        """Empty the stage, and create the folder for a file with this name."""
        fs.remove(self._stage)
        fs.make_folder((self._stage / name).parent)

    def _put(self, folder: Path, files: Sequence[File], kind: str, how: str) -> None:
        """Move files from the stage into the dataset. Raises DamagedError if any does not match."""
        for problem in check_files(self._stage, files, kind, Meter(None)):
            raise problem
        for file in files:
            self._replace(file.name, folder / file.name, how)
            self._meter.add(file.bytes)

    def _replace(self, name: str, old: Path, how: str) -> None:
        """Publish a staged file atomically: by a rename, or by uploading a whole object."""
        new = self._stage / name
        size = new.stat().st_size
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
        self.report.files.append(Repaired(str(old), size, how))

    def _not_repaired(self, path: Path, error: ShardkitError, unlike: str = "") -> None:
        _raise_if_full(error)
        at = error.where.get("path", path)
        said = [error.what if at == path else f"{error.what} ({at})", error.found, unlike]
        said.append(self._bad_copies.get(path))
        left = DamagedError(
            "a damaged file was not repaired",
            path=path,
            expected=error.expected,
            found="; ".join(filter(None, said)),
            fix=error.fix,
        )
        self.report.left.append(left)

    # --- tasks

    def _tasks_of(self, part: CheckedPart, manifest: Manifest) -> _Tasks:
        """The tasks that make a dataset, from the source or from the samples of a copy."""
        fs.remove(self._tasks)
        name = part.name or self._split
        recipe = Recipe(manifest.format)  # a dataset made by `shardkit.create` has none
        if manifest.recipe:
            recipe = Recipe.from_json(manifest.recipe, part.dataset.manifest_path)
        found: _Tasks | ShardkitError = DamagedError(f"the source has no split {name!r}")
        try:
            plan = self._plan(part, recipe)
            other, check = _differences(manifest, plan), self._partial.lock.check
            for number in [n for n, split in enumerate(plan.splits) if split.name == name]:
                found = _Tasks(plan, number, self._tasks, _numbers, other, check)
                if plan.recipe.sources == recipe.sources:
                    return found
        except ShardkitError as error:
            found = error
        copy = self._copy_of(name, manifest)
        if copy is not None:
            return self._tasks_of_copy(copy, manifest, recipe)
        if isinstance(found, ShardkitError):
            raise found
        return found

    def _plan(self, part: CheckedPart, recipe: Recipe) -> Plan:
        """The plan of the conversion; raises ShardkitError if the source does not fit it."""
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
        sources = open_sources(
            self._source,
            replace(recipe, classes=classes),
            strict=False,
            lists=key_lists([part], recipe),
        )
        tokenizer = transform = None
        if recipe.tokenizer is not None and part.dataset.tokenizer_path is not None:
            from shardkit.codecs.tokenizers import open_copy

            tokenizer = open_copy(part.dataset.tokenizer_path, {**recipe.tokenizer}, fast=True)
        if self._transform is not None:
            transform = load_transform(self._transform, 1).elsewhere()
        return make_plan(recipe, sources, self._target, tokenizer=tokenizer, transform=transform)

    def _copy_of(self, name: str, manifest: Manifest) -> DatasetSource | None:
        """The source, or its split with this name, if it is a dataset."""
        fields = tuple(sorted(manifest.schema))
        try:
            found = open_sources(self._source, Recipe("", fields=fields), strict=False)
        except ShardkitError:
            return None
        source = found.get(name, found.get(WHOLE))
        return source if isinstance(source, DatasetSource) else None

    def _tasks_of_copy(self, copy: DatasetSource, manifest: Manifest, made: Recipe) -> _Tasks:
        """One task per shard, each taking as many samples as its shard, in the copy's order."""
        lacking = [repr(name) for name in manifest.schema if name not in copy.schema]
        if len(copy) != manifest.samples or lacking:
            raise DamagedError(
                "the given data are neither the source nor a copy of the dataset",
                expected=f"{manifest.samples:,} samples with {', '.join(manifest.schema)}",
                found=f"{len(copy):,} samples"
                + (f" without {', '.join(lacking)}" if lacking else ""),
                fix=_AGAIN,
            )
        recipe = Recipe(manifest.format, shard_size=made.shard_size, beside=made.beside)
        plan = make_plan(recipe, {WHOLE: copy}, self._target)
        spec = plan.format.spec(manifest.schema, recipe.shard_size, manifest.class_names)
        content = Content(plan.format, replace(spec, beside=recipe.beside), manifest.label)
        split = replace(plan.splits[0], content=content)
        ends = [0, *accumulate(shard.samples for shard in manifest.shards)]
        tasks = [Task(n, split, start, stop, 0) for n, (start, stop) in enumerate(pairwise(ends))]
        numbers = {shard.file.name: range(n, n + 1) for n, shard in enumerate(manifest.shards)}
        other = "it was rebuilt from the samples of a copy, in the order of the copy"
        return _Tasks(
            replace(plan, splits=[split], tasks=tasks),
            0,
            self._tasks,
            lambda shard: numbers[shard.file.name],
            other,
            self._partial.lock.check,
        )


@dataclass
class _Tasks:
    """The tasks of a plan that make one dataset, run one by one in this process."""

    plan: Plan
    number: int  # of the split in the plan
    folder: Path
    numbers: Callable[[Shard], range]  # of the tasks that make a shard
    other: str  # how the plan differs from the one that made the dataset, in words
    check: Callable[[], None]  # raises if another run has taken over

    @property
    def split(self) -> Split:
        return self.plan.splits[self.number]

    @cached_property
    def tasks(self) -> dict[int, Task]:
        return {task.number: task for task in self.plan.tasks if task.split is self.split}

    def made(self, task: Task) -> list[TaskShard]:
        """Run a task, unless it has run, and return what it made; raises ShardkitError."""
        folder = self.folder / f"{task.number:06d}"
        if not is_finished(folder):
            fs.make_folder(self.folder)
            recipe = replace(self.plan.recipe, sources={}, classes=None)
            run_task(work_of(task, recipe, folder), lambda progress: self.check())
        result = read_result(folder)
        return [
            TaskShard(folder, shard, bytes.fromhex(pieces), task.number, task.joined)
            for shard, pieces in zip(result.shards, result.pieces, strict=True)
        ]

    def groups(self, shard: Shard, kind: str) -> Iterator[list[TaskShard]]:
        """Candidates for a shard: consecutive outputs of its tasks with its number of samples."""
        numbers = self.numbers(shard)
        if shard.samples and not numbers:
            raise DamagedError(
                "the manifest does not record which tasks made the shard",
                fix="repair it from a copy of the dataset, or create it again",
            )
        for done in self.folder.glob("*"):
            if int(done.name) not in numbers:
                fs.remove(done)
        if not all(number in self.tasks for number in numbers):
            raise DamagedError(
                "the source now yields different tasks than those that made the shard",
                found=self.other or None,
                fix=_AGAIN,
            )
        made = [one for number in numbers for one in self.made(self.tasks[number])]
        if not made and not shard.samples:
            yield []
        for start in range(len(made)):
            for stop in range(start + 1, len(made) + 1):
                group = made[start:stop]
                samples = sum(one.shard.samples for one in group)
                checksum = group[0].shard.file.checksum
                other = len(group) == 1 and kind == CHECKSUM and checksum != shard.file.checksum
                if samples == shard.samples and not other:
                    yield group

    def unlike(self, dataset: Dataset, number: int) -> str:
        """Which readable samples of a damaged shard differ from what the tasks make, in words."""
        made: dict[str, tuple[ShardReader, int]] = {}
        layout = self.plan.format.layout(self.split.content.schema)
        found: list[str] = []
        with suppress(ShardkitError), ExitStack() as ending:
            for folder in filter(is_finished, self.folder.glob("*")):
                for shard in read_result(folder).shards:
                    reader = self.plan.format.open(folder / shard.file.name, layout)
                    ending.callback(reader.close)
                    made |= {key: (reader, at) for at, key in enumerate(reader.keys())}
            old = dataset.reader(number)
            for position in range(len(old)):
                with suppress(ShardkitError):
                    key = old.sample(position, ())[KEY]
                    reader, at = made.get(key, (old, position))
                    if key not in made:
                        found.append(f"{key!r} (missing)")
                    elif not same(old[position], reader[at]):
                        found.append(repr(key))
        return f"different from the damaged shard: {in_words(found)}" if found else ""


def _numbers(shard: Shard) -> range:
    """The numbers of the tasks that made a shard, according to the manifest."""
    return range(shard.tasks[0], shard.tasks[1] + 1) if len(shard.tasks) == 2 else range(0)


def _differences(manifest: Manifest, plan: Plan) -> str:
    """How the recipe and versions differ from those that made a dataset, in words."""
    words = differences(identity(manifest.recipe), identity(plan.recipe.to_json()))
    old, new = manifest.versions, plan.versions
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    return "; ".join(
        filter(None, [words, *(f"{n} was {old[n]}, is now {new[n]}" for n in changed)])
    )


def _top_of(path: Path, datasets: Sequence[Dataset]) -> tuple[Path, str]:
    """The complete output of the conversion that a path belongs to, and the split it selects.

    The output is the dataset at or around the path, or the folder of splits that contains it.
    """
    found = fs.output(path)
    if not isinstance(found, RemotePath):
        found = Path(os.path.realpath(found))
    for dataset in datasets:
        place = dataset.place
        if not isinstance(place, RemotePath):
            place = Path(os.path.realpath(place))
        if place in found.parents:  # the path is one of the dataset's shards
            found = place
    above = _manifest_at(found.parent)
    if isinstance(above, Splits) and found.name in above.splits:
        return found.parent, found.name
    return found, ""


def _manifest_at(path: Path) -> Manifest | Splits | None:
    """The manifest of a dataset; None if it is missing or damaged."""
    with suppress(DamagedError):
        return manifests.load_any(path) if manifests.has_manifest(path) else None
    return None


def _raise_if_full(error: ShardkitError) -> None:
    """Re-raise errors that are not caused by the file, such as a full disk."""
    cause = error.__cause__
    if isinstance(cause, OSError) and (cause.errno in _FULL or os_errors.shortage(error)):
        raise error
