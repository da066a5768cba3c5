"""OUT.partial: where a conversion works until it is whole, and from where it continues.

In a folder of this machine (`store_partial.py` has the same for a store):

job.json          what identifies the run: recipe, versions, times of the source's files
lock, parts/      held by the run that is at work, or its parts (`part_lock.py`)
plan/             what publishing needs, where the run is one of parts (`outline.py`), and what the
                  first part has listed (`part_listing.py`)
tasks/000012/     a finished task: its shards and result.json
tasks/000013.…    one in the making, removed when a run begins
dataset/          what becomes OUT, filled when all tasks are there
replaced/         the old OUT, between the two renames of --overwrite
copy              of a file that goes beside a single one
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from shardkit import storage
from shardkit.checked import MOST_BYTES, checked, parse
from shardkit.conversion.commit import COPY, DATASET, REPLACED, Commit
from shardkit.conversion.lock import LOCK
from shardkit.conversion.part_lock import PARTS, PartLock
from shardkit.conversion.target import Target, not_ours, refuse_others
from shardkit.conversion.work import UNFINISHED, is_finished, read_result
from shardkit.errors import NotFoundError, OutputError, ShardkitError
from shardkit.manifest import FOLDER, File, Shard
from shardkit.part_of import PartOf
from shardkit.recipe import identity
from shardkit.remote.path import RemotePath

JOB = "job.json"
PLAN = "plan"
OUTLINE, LISTING = "outline.zip", "listing"
TASKS = "tasks"
_PRIVATE = 0o700  # of the whole folder: what is in it has the usual permissions
_OURS = {JOB, JOB + UNFINISHED, LOCK, PARTS, PLAN, TASKS, DATASET, REPLACED, COPY}


Copied: TypeAlias = "Callable[[int, int], object]"


def unseen(more: int, total: int) -> None:
    """Nobody wants to know how much is copied."""


class Partial(ABC):
    """The work on one output.

    `path` is what others see of it. After `begin`, `tasks` and `dataset` are folders of this
    machine, with a folder for each finished task, and with the new dataset. The files of shards
    need not lie in them: whoever wants those asks here.
    """

    path: Path
    tasks: Path
    dataset: Path
    part: PartOf | None = None  # which one works here, beside others

    def task_folder(self, number: int) -> Path:
        return self.tasks / f"{number:06d}"

    def exists(self) -> bool:
        return self.path.exists()

    @abstractmethod
    def job(self) -> dict[str, Any] | None:
        """What identifies the unfinished run; None if it did not come so far as to say.

        It is empty where that is damaged: nobody can continue the run, or should remove its work.
        """

    @abstractmethod
    def has_work(self) -> bool:
        """Whether the unfinished run has done anything that would be lost."""

    @abstractmethod
    def is_published(self) -> bool:
        """Whether the dataset at the output is that of the unfinished run, which only has to clean
        up. If it is False, all that is finished can be published, maybe once more."""

    @abstractmethod
    def begin(self, job: dict[str, Any], *, resume: bool, part: PartOf | None = None) -> None:
        """Keep other runs out; if we `resume`, what the same job has finished counts.

        A `part` lets other parts of the same job in, and always resumes.
        """

    @abstractmethod
    def refuse_busy(self) -> None:
        """Raise OutputError where others are at work; it keeps nobody out."""

    def begin_anew(self, job: dict[str, Any]) -> None:
        """Remove what is done, of which a part has moved to `dataset`; at no moment does it count.

        In a store nothing has moved when a run begins.
        """
        raise NotImplementedError

    @abstractmethod
    def try_alone(self) -> bool:
        """A part that has done its tasks becomes a whole run, if no other part is at work.

        Of parts that end together one does. If it is False, nothing may be changed any more; where
        there are no locks it is False for all.
        """

    @abstractmethod
    def begun(self) -> list[tuple[PartOf, bool]]:
        """The parts that have ever begun, and whether they have ended."""

    @abstractmethod
    def end_part(self) -> None:
        """This part has done its tasks."""

    @abstractmethod
    def check(self) -> None:
        """Raise OutputError where another run is in now."""

    def sweep(self) -> None:
        """Remove what is there of tasks that are not finished; a part only what is its own."""
        for entry in sorted(self.tasks.glob("*")):
            if entry.name.endswith(UNFINISHED) or not is_finished(entry):
                storage.remove(entry)

    @abstractmethod
    def release(self) -> None:
        """Let others in again; what is done stays for a later run."""

    def finished(self, numbers: Iterable[int]) -> list[int]:
        """Those of some tasks that are done; their folders are there then."""
        return [n for n in numbers if is_finished(self.task_folder(n))]

    def count_missing(self, tasks: int) -> int:
        """How many of all tasks are not done, as far as it can be told at little cost."""
        return tasks - len(self.finished(range(tasks)))

    def undo(self, number: int) -> None:
        """A finished task is to be done again: at no moment does half of it look finished."""
        folder = self.task_folder(number)
        undone = folder.with_name(f"{folder.name}.undone{UNFINISHED}")
        storage.remove(undone)
        storage.rename(folder, undone)
        storage.remove(undone)

    @abstractmethod
    def has_outline(self) -> bool:
        """Whether the unfinished run is one of parts, and has come so far as to store its plan."""

    @abstractmethod
    def outline(self) -> tuple[Path, bytes] | None:
        """The archive that parts stored, and where it is."""

    @abstractmethod
    def keep_outline(self, packed: bytes, *, replace: bool = False) -> None:
        """Store an archive, unless there is one, or in its place."""

    @abstractmethod
    def listing(self) -> AbstractContextManager[tuple[Path, Path] | None]:
        """Where a part has stored what it listed of the source, and a file of this machine."""

    @abstractmethod
    def keep_listing(self, size: int, write: Callable[[Path], object]) -> None:
        """Store what `write` puts into a file, of so many bytes."""

    @abstractmethod
    def publish(self, copied: Copied = unseen, *, overwrite: bool) -> None:
        """`dataset` becomes the output; in a store, `copied` is told of bytes, and of how many.

        Raises OutputError for what came there meanwhile, unless it is a dataset to `overwrite`.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove everything."""

    def _something_else(self, strangers: Sequence[str]) -> OutputError:
        return OutputError(
            "the folder for unfinished work holds something else",
            path=self.path,
            found=", ".join(strangers[:3]),
            fix="move it away, or give another output with -o",
        )

    def _refuse_other_work(self, job: dict[str, Any]) -> None:
        """Raise OutputError for what parts of another job have done: no part removes it.

        It came since this part looked, as it waited for them.
        """
        old = self.job()
        other = old is not None and comparable(old) != comparable(job)
        if other and (self.has_work() or self.has_outline()):
            raise OutputError(
                "there is unfinished work of other options or another source",
                path=self.path,
                fix=f"repeat it with its own options to finish it, or remove {self.path}",
            )

    # --- the files of shards

    @abstractmethod
    def upload(self, folder: Path) -> RemotePath | None:
        """Where shards that are made in a folder of `tasks` go at once; None: they stay there."""

    @abstractmethod
    def stored(self, path: Path) -> Path:
        """Where a shard's file is that was made in `tasks`."""

    @abstractmethod
    def rename(self, old: Path, folder: Path, file: File, *, synced: bool) -> None:
        """Give a file that was made in `tasks` its name in a folder of `dataset`."""

    @abstractmethod
    def here(self, shards: Sequence[tuple[Path, Shard]]) -> AbstractContextManager[list[Path]]:
        """Paths of shards, each of a folder in `tasks`, that can be read on this machine."""

    @abstractmethod
    def keep(self, folder: Path, shard: Shard) -> None:
        """A shard was made in a folder of `dataset`."""

    @abstractmethod
    def unsynced(self, earlier: Collection[int]) -> Collection[int]:
        """Tasks of an earlier run, of which a power cut may have taken shards to be joined."""


def partial_of(target: Target) -> Partial:
    """For a folder of this machine, or for a store."""
    if isinstance(target.path, RemotePath):
        from shardkit.conversion.store_partial import StorePartial

        return StorePartial(target, target.path)
    return FolderPartial(target)


class FolderPartial(Partial):
    """The working folder beside an output on this machine."""

    def __init__(self, target: Target) -> None:
        self.path = target.working_folder
        self.tasks = self.path / TASKS
        self.dataset = self.path / DATASET
        self._only_shard = target.path.name if target.single else ""
        self._commit = Commit(target)
        self._lock = PartLock(self.path)

    def job(self) -> dict[str, Any] | None:
        self._refuse_link(self.path / JOB)  # whose contents say nothing of ours
        try:
            return checked(dict[str, Any], parse(storage.read(self.path / JOB, MOST_BYTES)))
        except NotFoundError:
            return None
        except (ShardkitError, ValueError):
            return {}

    def has_work(self) -> bool:
        return any(is_finished(entry) for entry in self.tasks.glob("*"))

    def is_published(self) -> bool:
        """A finished task without its shards has given them to `dataset`."""
        if (self.dataset / self._only_shard).exists():
            return False
        done = filter(is_finished, self.tasks.glob("*[0-9]"))
        files = ((at, file) for at in done for s in read_result(at).shards for file in s.files)
        return any(not (at / file.name).exists() for at, file in files)

    def begin(self, job: dict[str, Any], *, resume: bool, part: PartOf | None = None) -> None:
        """Make and lock the folder."""
        refuse_others(self.path)
        self._refuse_strangers()
        try:
            if part is None:
                self._lock.take()
                self._prepare(job, resume)
            else:
                self._lock.share(
                    part,
                    lambda alone: self._prepare_part(job) if alone else self._say_job(job),
                    lambda: self._is_of(job),
                )
                self._check_folder()
            self.part = part
            storage.make_folder(self.tasks)
            self.sweep()
        except BaseException:
            self.release()
            raise

    def refuse_busy(self) -> None:
        self._lock.refuse_busy()

    def begin_anew(self, job: dict[str, Any]) -> None:
        self._prepare(job, resume=False)
        storage.make_folder(self.tasks)

    def _is_of(self, job: dict[str, Any]) -> bool:
        old = self.job()
        return old is not None and comparable(old) == comparable(job)

    def _check_folder(self) -> None:
        refuse_others(self.path)
        with contextlib.suppress(OSError):  # some file systems have no permissions
            self.path.chmod(_PRIVATE)
        self._refuse_links()

    def _prepare(self, job: dict[str, Any], resume: bool) -> None:
        """Nobody else is at work."""
        self._check_folder()
        self._commit.restore()
        if not (resume and self._is_of(job)):
            for name in (JOB, JOB + UNFINISHED, PARTS, PLAN, TASKS, DATASET):
                storage.remove(self.path / name)
            self._write_job(job, self.path / (JOB + UNFINISHED))
            storage.sync(self.path.parent)

    def _prepare_part(self, job: dict[str, Any]) -> None:
        self._check_folder()
        self._refuse_other_work(job)
        self._prepare(job, True)

    def _write_job(self, job: dict[str, Any], unfinished: Path) -> None:
        text = json.dumps(job, indent=1, allow_nan=False).encode() + b"\n"
        storage.write_file(unfinished, text)
        storage.rename(unfinished, self.path / JOB)
        storage.sync(self.path)

    def _say_job(self, job: dict[str, Any]) -> None:
        """As `_prepare`, for a part that cannot know who else is at work."""
        self._check_folder()
        if self.job() is None:
            storage.make_folder(self.path / PARTS)
            self._write_job(job, self.path / PARTS / f"{uuid.uuid4().hex}{UNFINISHED}")
        elif not self._is_of(job):
            raise OutputError(
                "there is unfinished work of other options or another source, and without locks a"
                " part cannot tell whether that is at work still",
                path=self.path,
                fix="if it is not, remove the folder, or begin with a whole run",
            )

    def try_alone(self) -> bool:
        if not self._lock.alone():
            return False
        self.part = None
        return True

    def begun(self) -> list[tuple[PartOf, bool]]:
        return self._lock.begun()

    def end_part(self) -> None:
        self._lock.end()

    def sweep(self) -> None:
        if self.part is None:
            super().sweep()
        elif self._lock.owned:
            for entry in self.tasks.glob(f"*.{self.part.name}.*{UNFINISHED}"):
                storage.remove(entry)

    def check(self) -> None:
        pass  # the lock is held as long as this process lives

    def release(self) -> None:
        self._lock.release()

    def has_outline(self) -> bool:
        return (self.path / PLAN / OUTLINE).is_file()

    def outline(self) -> tuple[Path, bytes] | None:
        path = self.path / PLAN / OUTLINE
        return (path, storage.read(path)) if path.is_file() else None

    def keep_outline(self, packed: bytes, *, replace: bool = False) -> None:
        self._keep(OUTLINE, lambda path: storage.write_file(path, packed))

    def _keep(self, name: str, write: Callable[[Path], object]) -> None:
        """Of parts that do so at the same time the last one does: all have the same."""
        folder = self.path / PLAN
        storage.make_folder(folder)
        unfinished = folder / f"{name}.{uuid.uuid4().hex[:8]}{UNFINISHED}"
        write(unfinished)
        storage.rename(unfinished, folder / name)
        storage.sync(folder)
        storage.sync(self.path)

    @contextlib.contextmanager
    def listing(self) -> Iterator[tuple[Path, Path] | None]:
        path = self.path / PLAN / LISTING
        refuse_others(self.path)
        yield (path, path) if path.is_file() else None

    def keep_listing(self, size: int, write: Callable[[Path], object]) -> None:
        self._keep(LISTING, write)

    def publish(self, copied: Copied = unseen, *, overwrite: bool) -> None:
        self._commit.publish(overwrite)
        self.discard()

    def discard(self) -> None:
        """Remove the whole folder; the lock goes last, so that no other run is in it meanwhile."""
        try:
            self._commit.restore()
            for name in (PARTS, PLAN, TASKS, DATASET, REPLACED, COPY, JOB, JOB + UNFINISHED):
                storage.remove(self.path / name)
            storage.remove(self.path)
        finally:
            self.release()

    def upload(self, folder: Path) -> RemotePath | None:
        return None

    def stored(self, path: Path) -> Path:
        return path

    def rename(self, old: Path, folder: Path, file: File, *, synced: bool) -> None:
        if not old.exists():  # an earlier run has renamed it
            return
        new = folder / file.name
        if not synced:
            storage.sync(old)
        if new.parent != folder:
            storage.make_folder(new.parent)
        storage.rename(old, new)
        if new.parent not in (folder, folder / FOLDER):  # the manifest's folder is synced with it
            storage.sync(new.parent)

    @contextlib.contextmanager
    def here(self, shards: Sequence[tuple[Path, Shard]]) -> Iterator[list[Path]]:
        yield [folder / shard.file.name for folder, shard in shards]

    def keep(self, folder: Path, shard: Shard) -> None:
        pass  # it is there

    def unsynced(self, earlier: Collection[int]) -> Collection[int]:
        return earlier

    def _refuse_links(self) -> None:
        """Raise OutputError for a link, or what is no file, in the folder: we have made none.

        The old dataset in `replaced/` may have links of its own.
        """
        for folder, folders, files in os.walk(self.path):
            if Path(folder) == self.path and REPLACED in folders:
                folders.remove(REPLACED)
            for name in (*folders, *files):
                self._refuse_link(Path(folder, name))

    def _refuse_link(self, path: Path) -> None:
        with storage.explained("look at", path):
            try:
                kind = stat.S_IFMT(path.lstat().st_mode)
            except FileNotFoundError:  # not there yet, or of another part, which is done with it
                return
        if kind not in (stat.S_IFDIR, stat.S_IFREG):
            raise not_ours(path, "a link, a pipe or a device")

    def _refuse_strangers(self) -> None:
        with storage.explained("list", self.path):
            try:
                found = os.listdir(self.path)
            except FileNotFoundError:  # not there yet, or another process has just removed it
                return
        names = {name for name in found if not name.startswith(f"{LOCK}.")}
        strangers = sorted(names - _OURS)
        if names and not strangers and not names & {JOB, LOCK}:
            strangers = sorted(names)  # folders that happen to be called like ours
        if strangers:
            raise self._something_else(strangers)


def comparable(job: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common for one to continue the other."""
    recipe = job.get("recipe")
    return {**job, "recipe": identity(recipe)} if isinstance(recipe, dict) else job
