"""OUT.partial: where a conversion works until it is whole, and from where it continues.

In a folder of this machine (`store_partial.py` has the same for a store):

job.json          what identifies the run: recipe, versions, times of the source's files
lock              held by the run that is at work
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from shardkit import storage
from shardkit.checked import MOST_BYTES, checked, parse
from shardkit.conversion.commit import COPY, DATASET, REPLACED, Commit
from shardkit.conversion.lock import LOCK, lock, unlock
from shardkit.conversion.target import Target, not_ours, refuse_others
from shardkit.conversion.work import UNFINISHED, is_finished
from shardkit.errors import OutputError, ShardkitError
from shardkit.manifest import FOLDER, File, Shard
from shardkit.recipe import identity
from shardkit.remote.path import RemotePath

JOB = "job.json"
TASKS = "tasks"
_PRIVATE = 0o700  # of the whole folder: what is in it has the usual permissions
_OURS = {JOB, JOB + UNFINISHED, LOCK, TASKS, DATASET, REPLACED, COPY}


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

    def task_folder(self, number: int) -> Path:
        return self.tasks / f"{number:06d}"

    def exists(self) -> bool:
        return self.path.exists()

    @abstractmethod
    def job(self) -> dict[str, Any] | None:
        """What identifies the unfinished run; None if it did not come so far as to say."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether the unfinished run has done anything that would be lost."""

    @abstractmethod
    def begin(self, job: dict[str, Any], *, resume: bool) -> None:
        """Keep other runs out; if we `resume`, what the same job has finished counts."""

    @abstractmethod
    def check(self) -> None:
        """Raise OutputError where another run is in now."""

    def sweep(self) -> None:
        """Remove what is there of tasks that are not finished."""
        for entry in sorted(self.tasks.glob("*")):
            if entry.name.endswith(UNFINISHED) or not is_finished(entry):
                storage.remove(entry)

    @abstractmethod
    def release(self) -> None:
        """Let others in again; what is done stays for a later run."""

    def finished(self, tasks: int) -> list[int]:
        """Numbers of the tasks that are done; their folders are there then."""
        return [n for n in range(tasks) if is_finished(self.task_folder(n))]

    def undo(self, number: int) -> None:
        """A finished task is to be done again."""
        storage.remove(self.task_folder(number))

    @abstractmethod
    def publish(self, copied: Copied = unseen) -> None:
        """`dataset` becomes the output; in a store, `copied` is told of bytes, and of how many."""

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
        self._commit = Commit(target)
        self._lock: int | None = None

    def job(self) -> dict[str, Any] | None:
        try:
            return checked(dict[str, Any], parse(storage.read(self.path / JOB, MOST_BYTES)))
        except (ShardkitError, ValueError):
            return None

    def has_work(self) -> bool:
        return any(is_finished(entry) for entry in self.tasks.glob("*"))

    def begin(self, job: dict[str, Any], *, resume: bool) -> None:
        """Make and lock the folder."""
        if os.path.lexists(self.path):
            refuse_others(self.path)
            self._refuse_strangers()
        while self._lock is None:
            storage.make_folder(self.path)
            self._lock = lock(self.path)
        try:
            refuse_others(self.path)
            with contextlib.suppress(OSError):  # some file systems have no permissions
                self.path.chmod(_PRIVATE)
            self._refuse_links()
            self._prepare(job, resume)
        except BaseException:
            self.release()
            raise

    def _prepare(self, job: dict[str, Any], resume: bool) -> None:
        self._commit.restore()
        old = self.job() if resume else None
        if old is None or comparable(old) != comparable(job):
            for name in (JOB, JOB + UNFINISHED, TASKS, DATASET):
                storage.remove(self.path / name)
            text = json.dumps(job, indent=1, allow_nan=False).encode() + b"\n"
            storage.write_file(self.path / (JOB + UNFINISHED), text)
            storage.rename(self.path / (JOB + UNFINISHED), self.path / JOB)
            storage.sync(self.path)
            storage.sync(self.path.parent)
        storage.make_folder(self.tasks)
        self.sweep()

    def check(self) -> None:
        pass  # the lock is held as long as this process lives

    def release(self) -> None:
        handle, self._lock = self._lock, None
        unlock(handle)

    def publish(self, copied: Copied = unseen) -> None:
        self._commit.publish()
        self.discard()

    def discard(self) -> None:
        """Remove the whole folder; the lock goes last, so that no other run is in it meanwhile."""
        try:
            self._commit.restore()
            for name in (TASKS, DATASET, REPLACED, COPY, JOB, JOB + UNFINISHED):
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
            for path in (Path(folder, name) for name in (*folders, *files)):
                with storage.explained("look at", path):
                    kind = stat.S_IFMT(path.lstat().st_mode)
                if kind not in (stat.S_IFDIR, stat.S_IFREG):
                    raise not_ours(path, "a link, a pipe or a device")

    def _refuse_strangers(self) -> None:
        with storage.explained("list", self.path):
            names = {p.name for p in self.path.iterdir()}
        strangers = sorted(names - _OURS)
        if names and not strangers and not names & {JOB, LOCK}:
            strangers = sorted(names)  # folders that happen to be called like ours
        if strangers:
            raise self._something_else(strangers)


def comparable(job: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common for one to continue the other."""
    recipe = job.get("recipe")
    return {**job, "recipe": identity(recipe)} if isinstance(recipe, dict) else job
