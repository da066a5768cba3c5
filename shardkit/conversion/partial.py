"""OUT.partial: the working folder of a conversion, from which an interrupted one resumes.

Its contents on this machine (`store_partial.py` has the equivalent for a store):

job.json          the identity of the run: recipe, versions, modification times of the source
lock, parts/      the locks of the running conversion or of its parts (`part_lock.py`)
plan/             for a run in parts: what publishing needs (`outline.py`)
tasks/000012/     a finished task: its shards and result.json
tasks/joined-…    a finished task that has joined shards of other tasks
tasks/000013.…    an unfinished task, removed when a run begins
dataset/          the future OUT, filled when all tasks are finished
replaced/         the old OUT, between the two renames of --overwrite
copy              a temporary copy of a file that belongs next to a single-file output
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from shardkit.conversion.claim import PartClaims
from shardkit.conversion.commit import COPY, DATASET, REPLACED, Commit, SingleCommit
from shardkit.conversion.part_lock import PartLock
from shardkit.conversion.target import Target, not_ours, refuse_others
from shardkit.conversion.work import UNFINISHED, is_finished, read_result
from shardkit.errors import DamagedError, NotFoundError, OutputError
from shardkit.helpers import os_errors
from shardkit.helpers.checked import MOST_BYTES
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.job import JOB, LOCK, PARTS, job_text, parsed_job
from shardkit.metadata.manifest import FOLDER, File
from shardkit.metadata.recipe import identity
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

PLAN = "plan"
OUTLINE = "outline.zip"
TASKS = "tasks"
_PRIVATE = 0o700  # mode of the folder itself: its contents have the usual permissions
_TEMPORARY = re.compile(rf"{re.escape(LOCK)}\..*|{re.escape(JOB)}\..*{re.escape(UNFINISHED)}")
_OURS = {JOB, LOCK, PARTS, PLAN, TASKS, DATASET, REPLACED, COPY}


Copied: TypeAlias = "Callable[[int, int], object]"


def unseen(more: int, total: int) -> None:
    """Ignore the progress of copying."""


class Partial(ABC):
    """The unfinished work on one output.

    `path` is its visible location. After `begin`, `tasks` and `dataset` are local folders, with a
    subfolder for each finished task, and with the new dataset. The files of shards need not be in
    them: use the methods of this class to locate them.
    """

    path: Path
    tasks: Path
    dataset: Path
    lock: PartLock | PartClaims

    def task_folder(self, number: int) -> Path:
        return self.tasks / f"{number:06d}"

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is any file or object of it."""

    def job(self) -> dict[str, Any] | None:
        """The identity of the unfinished run; None if the run ended before it was stored.

        It is empty if it is damaged: then the run cannot be resumed, and its work should be kept.
        """
        try:
            data = self._read(self.path / JOB, MOST_BYTES)
        except DamagedError:
            return {}
        return None if data is None else parsed_job(data)

    @abstractmethod
    def has_work(self) -> bool:
        """Whether the unfinished run has finished any task, which would be lost."""

    @abstractmethod
    def is_published(self) -> bool:
        """Whether the output is already the dataset of the unfinished run, which only has to clean
        up. If False, the finished tasks can be published, possibly a second time."""

    def begin(self, job: dict[str, Any], *, resume: bool, part: PartOf | None = None) -> None:
        """Lock out other runs; with `resume`, keep the tasks that the same job has finished.

        A `part` shares the output with other parts of the same job, and always resumes.
        """
        if strangers := sorted(self._strangers()):
            raise OutputError(
                "the folder for unfinished work contains something else",
                path=self.path,
                found=", ".join(strangers[:3]),
                fix="move it away, or give another output with -o",
            )
        try:
            self._begin(job, resume, part)
            self.sweep()
        except BaseException:
            self.release()
            raise

    def begin_anew(self, job: dict[str, Any]) -> None:
        """Remove all finished work, of which some has moved to `dataset`, and start over.

        An interruption never leaves part of that work looking finished. Not needed in a store,
        where nothing has been moved when a run begins.
        """
        raise NotImplementedError

    def sweep(self) -> None:
        """Remove the files of unfinished tasks; a part removes only those of its own tasks."""
        for entry in sorted(self.tasks.glob("*")):
            if entry.name.endswith(UNFINISHED) or not is_finished(entry):
                fs.remove(entry)

    def release(self) -> None:
        """Release the locks; finished tasks are kept for a later run."""
        self.lock.release()

    def finished(self, folders: Iterable[Path]) -> set[Path]:
        """Those of the given folders of tasks that are finished; they exist afterwards."""
        return {*filter(is_finished, folders)}

    def missing(self, tasks: int) -> set[int]:
        """Those of all `tasks` that are not finished, as far as can be told at little cost."""
        return {n for n in range(tasks) if not is_finished(self.task_folder(n))}

    def undo(self, folder: Path) -> None:
        """Remove a finished task, which has to be repeated; it never looks finished meanwhile."""
        undone = folder.with_name(f"{folder.name}.undone{UNFINISHED}")
        fs.remove(undone)
        fs.rename(folder, undone)
        fs.remove(undone)

    @abstractmethod
    def begun(self) -> list[PartOf]:
        """The parts that have ever begun."""

    @abstractmethod
    def has_outline(self) -> bool:
        """Whether the unfinished run consists of parts, and has stored its plan."""

    def outline(self) -> tuple[Path, bytes] | None:
        """The path and the content of the outline archive, if a part has stored it."""
        data = self._read(self._outline)
        return None if data is None else (self._outline, data)

    def keep_outline(self, packed: bytes, *, replace: bool = False) -> None:
        """Store the outline archive, unless there is one already; with `replace`, in its place.

        Parts may do so concurrently: all write the same content.
        """
        self._write(self._outline, packed, replace=replace)

    @property
    def _outline(self) -> Path:
        return self.path / PLAN / OUTLINE

    @abstractmethod
    def publish(self, copied: Copied = unseen, *, overwrite: bool) -> None:
        """Publish `dataset` as the output; in a store, report progress to `copied`.

        Raises OutputError if something has appeared at the output meanwhile, unless it is a dataset
        and `overwrite` is set.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove everything."""

    # --- what a folder and a store do differently

    @abstractmethod
    def _begin(self, job: dict[str, Any], resume: bool, part: PartOf | None) -> None:
        """See `begin`."""

    @abstractmethod
    def _strangers(self) -> set[str]:
        """The names in OUT.partial that are not those of unfinished work."""

    @abstractmethod
    def _read(self, path: Path, most: int = -2) -> bytes | None:
        """Read a whole file, or `most + 1` bytes on this machine; None if it does not exist."""

    @abstractmethod
    def _write(self, path: Path, data: bytes, *, replace: bool) -> None:
        """Write a whole file at once. Without `replace`, one that exists may be kept."""

    def _is_of(self, job: dict[str, Any]) -> bool:
        """Whether the unfinished work is that of a job."""
        old = self.job()
        return old is not None and comparable(old) == comparable(job)

    def _refuse_other_work(self, job: dict[str, Any]) -> None:
        """Raise OutputError if there is work of parts of another job, which no part may remove.

        It may have been done while this part waited for them.
        """
        other = self.job() is not None and not self._is_of(job)
        if other and (self.has_work() or self.has_outline()):
            raise OutputError(
                "there is unfinished work with other options or another source",
                path=self.path,
                fix=f"repeat it with its own options to finish it, or remove {self.path}",
            )

    # --- the files of shards

    def upload(self, folder: Path) -> RemotePath | None:
        """Where the shards of a folder of `tasks` are uploaded when complete; None: they stay."""
        found = self.stored(folder)
        return found if isinstance(found, RemotePath) else None

    @abstractmethod
    def stored(self, path: Path) -> Path:
        """The location of a shard's file that was written to `path` in `tasks`."""

    @abstractmethod
    def move(self, old: Path, folder: Path, file: File) -> None:
        """Move a file that was written in `tasks` to its final name in a folder of `dataset`."""


class FolderPartial(Partial):
    """The working folder next to an output on this machine."""

    def __init__(self, target: Target) -> None:
        self.path = target.working_folder
        self.tasks = self.path / TASKS
        self.dataset = self.path / DATASET
        self._only_shard = target.path.name if target.single else ""
        self._commit = (SingleCommit if target.single else Commit)(target)
        self.lock: PartLock = PartLock(self.path)

    def exists(self) -> bool:
        return self.path.exists()

    def has_work(self) -> bool:
        return any(is_finished(entry) for entry in self.tasks.glob("*"))

    def begun(self) -> list[PartOf]:
        return self.lock.begun()

    def has_outline(self) -> bool:
        return self._outline.is_file()

    def is_published(self) -> bool:
        """Shards that are missing from the folder of a finished task were moved to `dataset`."""
        if (self.dataset / self._only_shard).exists():
            return False
        done = filter(is_finished, self.tasks.glob("*[!p]"))  # without unfinished ones, *.tmp
        files = ((at, file) for at in done for s in read_result(at).shards for file in s.files)
        return any(not (at / file.name).exists() for at, file in files)

    def _begin(self, job: dict[str, Any], resume: bool, part: PartOf | None) -> None:
        """Make and lock the folder."""
        if part is None:
            self.lock.take()
            self._prepare(job, resume)
        else:
            self.lock.share(
                part,
                lambda alone: self._prepare_part(job) if alone else self._say_job(job),
                lambda: self._is_of(job),
            )
            self._check_folder()
        fs.make_folder(self.tasks)

    def begin_anew(self, job: dict[str, Any]) -> None:
        self._prepare(job, resume=False)
        fs.make_folder(self.tasks)

    def _check_folder(self) -> None:
        refuse_others(self.path)
        with contextlib.suppress(OSError):  # some file systems do not support permissions
            self.path.chmod(_PRIVATE)
        self._refuse_links()

    def _prepare(self, job: dict[str, Any], resume: bool) -> None:
        """Prepare the folder for a job; called only while no other process is working in it."""
        self._check_folder()
        self._commit.restore()
        if not (resume and self._is_of(job)):
            for name in (JOB, PARTS, PLAN, TASKS, DATASET):
                fs.remove(self.path / name)
            self._write(self.path / JOB, job_text(job), replace=True)
            fs.sync(self.path.parent)

    def _prepare_part(self, job: dict[str, Any]) -> None:
        self._check_folder()
        self._refuse_other_work(job)
        self._prepare(job, True)

    def _say_job(self, job: dict[str, Any]) -> None:
        """Like `_prepare`, for a part that cannot tell whether other processes are running."""
        self._check_folder()
        if self.job() is None:
            self._write(self.path / JOB, job_text(job), replace=True)
        elif not self._is_of(job):
            raise OutputError(
                "there is unfinished work with other options or another source, and without locks a"
                " part cannot tell whether that run is still active",
                path=self.path,
                fix="if it is not, remove the folder, or begin with a run without --part",
            )

    def sweep(self) -> None:
        if self.lock.part is None:
            super().sweep()
        elif self.lock.owned:
            for entry in self.tasks.glob(f"*.{self.lock.part.name}.*{UNFINISHED}"):
                fs.remove(entry)

    def _read(self, path: Path, most: int = -2) -> bytes | None:
        self._refuse_link(path)  # the target of a link says nothing about our work
        with contextlib.suppress(NotFoundError):
            return fs.read(path, most)
        return None

    def _write(self, path: Path, data: bytes, *, replace: bool) -> None:
        fs.make_folder(path.parent)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
        fs.write_file(unfinished, data)
        fs.rename(unfinished, path)
        for folder in dict.fromkeys([path.parent, self.path]):
            fs.sync(folder)

    def publish(self, copied: Copied = unseen, *, overwrite: bool) -> None:
        self._commit.publish(overwrite)
        self.discard()

    def discard(self) -> None:
        """Remove the whole folder, and the lock last, so that no other run begins meanwhile."""
        try:
            self._commit.restore()
            for name in (PARTS, PLAN, TASKS, DATASET, REPLACED, COPY, JOB):
                fs.remove(self.path / name)
            fs.remove(self.path)
        finally:
            self.release()

    def stored(self, path: Path) -> Path:
        return path

    def move(self, old: Path, folder: Path, file: File) -> None:
        if not old.exists():  # an earlier run has already moved it
            return
        new = folder / file.name
        if new.parent != folder:
            fs.make_folder(new.parent)
        fs.rename(old, new)
        if new.parent not in (folder, folder / FOLDER):  # the manifest's folder is synced with it
            fs.sync(new.parent)

    def _refuse_links(self) -> None:
        """Raise OutputError for links and special files in the folder: shardkit creates none.

        The old dataset in `replaced/` may contain links.
        """
        for folder, folders, files in os.walk(self.path):
            if Path(folder) == self.path and REPLACED in folders:
                folders.remove(REPLACED)
            for name in (*folders, *files):
                self._refuse_link(Path(folder, name))

    def _refuse_link(self, path: Path) -> None:
        with os_errors.explained("look at", path):
            try:
                kind = stat.S_IFMT(path.lstat().st_mode)
            except FileNotFoundError:  # not created yet, or removed by another part
                return
        if kind not in (stat.S_IFDIR, stat.S_IFREG):
            raise not_ours(path, "a link, a pipe or a device")

    def _strangers(self) -> set[str]:
        refuse_others(self.path)
        with os_errors.explained("list", self.path):
            try:
                found = os.listdir(self.path)
            except FileNotFoundError:  # not created yet, or just removed by another process
                return set()
        names = {name for name in found if not _TEMPORARY.fullmatch(name)}
        if names & {JOB, LOCK}:
            return names - _OURS
        return names  # folders of the user that happen to have these names


def comparable(job: dict[str, Any]) -> dict[str, Any]:
    """The parts of a job that must be equal for one run to resume another."""
    recipe = job.get("recipe")
    return {**job, "recipe": identity(recipe)} if isinstance(recipe, dict) else job
