"""OUT.partial: where a conversion works until it is whole, and from where it continues.

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
from pathlib import Path
from typing import Any

from shardkit import storage
from shardkit.checked import MOST_BYTES, checked, parse
from shardkit.conversion.commit import COPY, DATASET, REPLACED, Commit
from shardkit.conversion.lock import LOCK, lock, unlock
from shardkit.conversion.target import Target, not_ours, refuse_others
from shardkit.conversion.work import UNFINISHED, is_finished
from shardkit.errors import OutputError, ShardkitError
from shardkit.recipe import identity

JOB = "job.json"
_TASKS = "tasks"
_PRIVATE = 0o700  # of the whole folder: what is in it has the usual permissions
_OURS = {JOB, JOB + UNFINISHED, LOCK, _TASKS, DATASET, REPLACED, COPY}


class Partial:
    """The working folder of one output."""

    def __init__(self, target: Target) -> None:
        self.path = target.working_folder
        self.tasks = self.path / _TASKS
        self.dataset = self.path / DATASET
        self._commit = Commit(target)
        self._lock: int | None = None

    def task_folder(self, number: int) -> Path:
        return self.tasks / f"{number:06d}"

    def exists(self) -> bool:
        return self.path.exists()

    def job(self) -> dict[str, Any] | None:
        """What identifies the unfinished run; None if it did not come so far as to say."""
        try:
            return checked(dict[str, Any], parse(storage.read(self.path / JOB, MOST_BYTES)))
        except (ShardkitError, ValueError):
            return None

    def has_work(self) -> bool:
        """Whether the unfinished run has done anything that would be lost."""
        return any(is_finished(entry) for entry in self.tasks.glob("*"))

    def begin(self, job: dict[str, Any], *, resume: bool) -> None:
        """Make and lock the folder; if we `resume`, what the same job has finished in it counts."""
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
            for name in (JOB, JOB + UNFINISHED, _TASKS, DATASET):
                storage.remove(self.path / name)
            text = json.dumps(job, indent=1, allow_nan=False).encode() + b"\n"
            storage.write_file(self.path / (JOB + UNFINISHED), text)
            storage.rename(self.path / (JOB + UNFINISHED), self.path / JOB)
            storage.sync(self.path)
            storage.sync(self.path.parent)
        storage.make_folder(self.tasks)
        self.sweep()

    def sweep(self) -> None:
        """Remove what is there of tasks that are not finished."""
        for entry in sorted(self.tasks.glob("*")):
            if entry.name.endswith(UNFINISHED) or not is_finished(entry):
                storage.remove(entry)

    def release(self) -> None:
        """Let others in again; what is done stays for a later run."""
        handle, self._lock = self._lock, None
        unlock(handle)

    def finished(self, tasks: int) -> list[int]:
        """Numbers of the tasks that are done."""
        return [n for n in range(tasks) if is_finished(self.task_folder(n))]

    def publish(self) -> None:
        """`dataset/` becomes the output."""
        self._commit.publish()
        self.discard()

    def discard(self) -> None:
        """Remove the whole folder; the lock goes last, so that no other run is in it meanwhile."""
        try:
            self._commit.restore()
            for name in (_TASKS, DATASET, REPLACED, COPY, JOB, JOB + UNFINISHED):
                storage.remove(self.path / name)
            storage.remove(self.path)
        finally:
            self.release()

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
            raise OutputError(
                "the folder for unfinished work holds something else",
                path=self.path,
                found=", ".join(strangers[:3]),
                fix="move it away, or give another output with -o",
            )


def comparable(job: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common for one to continue the other."""
    recipe = job.get("recipe")
    return {**job, "recipe": identity(recipe)} if isinstance(recipe, dict) else job
