"""OUT.partial in a folder of this machine, and how its dataset is published, by renames."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from pathlib import Path
from typing import Any

from shardkit.conversion.locks import PartLock
from shardkit.conversion.partial import DATASET, PUBLISH_PLAN, TASKS, Copied, Partial, no_progress
from shardkit.conversion.target import Target, file_in_the_way, not_ours, refuse_others
from shardkit.conversion.work import UNFINISHED, is_finished, read_result
from shardkit.errors import NotFoundError, OutputError
from shardkit.helpers import os_errors
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.job import JOB, LOCK, PARTS, job_text
from shardkit.metadata.manifest import FOLDER, File
from shardkit.storage import fs

REPLACED = "replaced"
_COPY = "copy"
_PLAN = "plan"
_PRIVATE = 0o700  # mode of the folder itself: its contents have the usual permissions
_TEMPORARY = re.compile(rf"{re.escape(LOCK)}\..*|{re.escape(JOB)}\..*{re.escape(UNFINISHED)}")
_WORK = (PARTS, _PLAN, TASKS, DATASET)
_OURS = {JOB, LOCK, REPLACED, _COPY, *_WORK}


class FolderPartial(Partial):
    """The working folder next to an output on this machine.

    What is published are the files of `dataset` with names relative to `Target.folder`: "", which
    is the folder itself, or the single file and the files that belong next to it.
    """

    def __init__(self, target: Target) -> None:
        self.path = target.working_folder
        self.tasks = self.path / TASKS
        self.dataset = self.path / DATASET
        self.lock: PartLock = PartLock(self.path)
        self._target, self._out, self._folder = target, target.absolute, target.folder
        self._replaced = self.path / REPLACED
        self._last = target.path.name if target.single else ""  # this name makes it a dataset

    @property
    def publish_plan(self) -> Path:
        return self.path / PUBLISH_PLAN

    def exists(self) -> bool:
        return self.path.exists()

    def results(self) -> set[str]:
        done = filter(is_finished, self.tasks.glob("*"))
        return {path.name for path in done if not path.name.endswith(UNFINISHED)}

    def begun(self) -> list[PartOf]:
        return self.lock.begun()

    def has_publish_plan(self) -> bool:
        return self.publish_plan.is_file()

    def is_published(self) -> bool:
        """Shards that are missing from the folder of a finished task were moved to `dataset`."""
        if (self.dataset / self._last).exists():
            return False
        done = [self.tasks / name for name in self.results()]
        return any(not (at / file.name).exists() for at in done for file in read_result(at).files)

    def read(self, path: Path, most: int = -2) -> bytes | None:
        self._refuse_link(path)  # the target of a link says nothing about our work
        with contextlib.suppress(NotFoundError):
            return fs.read(path, most)
        return None

    def write(self, path: Path, data: bytes, *, replace: bool) -> None:
        fs.make_folder(path.parent)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
        fs.write_file(unfinished, data)
        fs.rename(unfinished, path)
        for folder in dict.fromkeys([path.parent, self.path]):
            fs.sync(folder)

    def stored(self, path: Path) -> Path:
        return path

    def move(self, old: Path, folder: Path, file: File) -> None:
        new = folder / file.name
        if not old.exists():  # an earlier run has already moved it
            if not new.exists():
                raise OutputError(
                    "a shard of a finished task is missing",
                    path=old,
                    found="an earlier run has published it, and its output was moved or removed"
                    " since; or a power failure destroyed it",
                    fix=f"remove {self.path}, and run the same command again",
                )
            return
        if new.parent != folder:
            fs.make_folder(new.parent)
        fs.rename(old, new)
        if new.parent not in (folder, folder / FOLDER):  # the manifest's folder is synced with it
            fs.sync(new.parent)

    # --- beginning

    def _begin(self, job: dict[str, Any], resume: bool, part: PartOf | None) -> None:
        """Make and lock the folder."""
        if part is None:
            self.lock.take()
            self._prepare(job, resume)
        else:
            self.lock.share(
                part,
                lambda alone: self._prepare_part(job) if alone else self._say_job(job),
                lambda: self.is_of(job),
            )
            self._check_folder()
        fs.make_folder(self.tasks)

    def _check_folder(self) -> None:
        refuse_others(self.path)
        with contextlib.suppress(OSError):  # some file systems do not support permissions
            self.path.chmod(_PRIVATE)
        for folder, folders, files in os.walk(self.path):
            if Path(folder) == self.path and REPLACED in folders:
                folders.remove(REPLACED)  # the old dataset may contain links
            for name in (*folders, *files):
                self._refuse_link(Path(folder, name))

    def _prepare(self, job: dict[str, Any], resume: bool) -> None:
        """Prepare the folder for a job; called only while no other process is working in it."""
        self._check_folder()
        self._restore()
        if not (resume and self.is_of(job)):
            for name in (JOB, *_WORK):  # without a job, what is left of the work is not resumed
                fs.remove(self.path / name)
            self.write(self.path / JOB, job_text(job), replace=True)
            fs.sync(self.path.parent)

    def _prepare_part(self, job: dict[str, Any]) -> None:
        self._check_folder()
        self._refuse_other_work(job)
        self._prepare(job, True)

    def _say_job(self, job: dict[str, Any]) -> None:
        """Like `_prepare`, for a part that cannot tell whether other processes are running."""
        self._check_folder()
        if self.job() is None:
            self.write(self.path / JOB, job_text(job), replace=True)
        elif not self.is_of(job):
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

    def _refuse_link(self, path: Path) -> None:
        """Raise OutputError for a link or a special file: shardkit creates none."""
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

    # --- publishing: every step can be repeated, or the old dataset can be restored

    def publish(self, copied: Copied = no_progress, *, overwrite: bool) -> None:
        """Move the old dataset aside, and the new one into its place, each by one rename.

        The files that belong next to a single file are copied before, so that the originals remain
        if a run dies meanwhile.
        """
        fs.sync(self.dataset)
        self._target.refuse_newcomer(overwrite)
        *others, last = self._names(self.dataset)
        self._refuse_in_the_way(others)
        if self._out.exists():
            fs.remove(self._replaced)
            self._rename(self._names_of_old(), self._folder, self._replaced)
        self._make_folders(others, self._folder)
        for name in others:
            original, copy = self.dataset / name, self.path / _COPY
            with fs.create(copy) as file:
                fs.append(file, original, original.stat().st_size)
            fs.sync(copy)
            fs.rename(copy, self._folder / name)
        for folder in {(self._folder / name).parent for name in others} - {self._out.parent}:
            fs.sync(folder)
        fs.rename(self.dataset / last, self._out)
        fs.sync(self._out.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the whole folder, and the lock last, so that no other run begins meanwhile."""
        try:
            self._restore()
            for name in (*_WORK, REPLACED, _COPY, JOB):
                fs.remove(self.path / name)
            fs.remove(self.path)
        finally:
            self.release()

    def _names(self, folder: Path) -> list[str]:
        """Return what is published of a folder, the name that makes it a dataset at the end."""
        if not self._target.single:
            return [""]
        tops = {path.name for path in folder.iterdir()} - {self._last, FOLDER}
        own = {f"{FOLDER}/{path.name}" for path in folder.glob(f"{FOLDER}/*")}
        return [*sorted(tops | own), self._last]

    def _names_of_old(self) -> list[str]:
        """What belongs to the dataset that is replaced, the name that makes it a dataset first."""
        if not self._target.single:
            return [""]
        if not self._out.exists():
            return []
        names = self._target.names_of_old(self._names(self.dataset))
        tops = {n if n.startswith(f"{FOLDER}/") else n.partition("/")[0] for n in names}
        return [self._last, *sorted(tops - {self._last})]

    def _refuse_in_the_way(self, names: list[str]) -> None:
        """Raise OutputError if an unrelated file has the name of a file to be published."""
        for name in sorted({*names} - {*self._names_of_old()}):
            path = self._folder / name
            same = path.is_file() and fs.checksum(path) == fs.checksum(self.dataset / name)
            if os.path.lexists(path) and not same:
                raise file_in_the_way(
                    path, "move it away and repeat the command: it continues where it stopped"
                )

    def _restore(self) -> None:
        """Restore the old dataset, if a run died after it was moved aside."""
        if self._replaced.exists() and not self._out.exists():
            self._rename(self._names(self._replaced), self._replaced, self._folder)

    def _rename(self, names: list[str], old: Path, new: Path) -> None:
        self._make_folders(names, new)
        for name in names:
            if (old / name).exists():
                fs.rename(old / name, new / name)
        if self._target.single:
            fs.sync(new)

    def _make_folders(self, names: list[str], new: Path) -> None:
        """Make the folders that files with these names need, such as that of a manifest."""
        above = {self.path, self._out.parent}
        for folder in sorted({(new / name).parent for name in names} - above):
            fs.make_folder(folder)
            refuse_others(folder)
