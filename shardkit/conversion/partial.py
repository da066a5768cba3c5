"""OUT.partial: the unfinished work on an output, from which an interrupted conversion resumes.

Its contents in a folder; in a bucket, see `bucket.py`:

job.json          the identity of the run: recipe, versions, modification times of the source
lock, parts/      the locks of the running conversion or of its parts (`locks.py`)
plan/             for a run in parts: what publishing needs (`publish_plan.py`)
tasks/000012/     a finished task: its shards and result.json
tasks/joined-…    a finished task that has joined shards of other tasks
tasks/000013.…    an unfinished task, removed when a run begins
dataset/          the future OUT, filled when all tasks are finished
replaced/         the old OUT, between the two renames of --overwrite
copy              a temporary copy of a file that belongs next to a single-file output
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from shardkit.conversion.claim import PartClaims
from shardkit.conversion.locks import PartLock
from shardkit.conversion.work import UNFINISHED, is_finished
from shardkit.errors import DamagedError, OutputError
from shardkit.helpers.checked import MAX_BYTES
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.job import JOB, parsed_job
from shardkit.metadata.manifest import File
from shardkit.metadata.recipe import identity
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

PUBLISH_PLAN = "plan/publish-plan.zip"
TASKS = "tasks"
DATASET = "dataset"

Copied: TypeAlias = "Callable[[int, int], object]"


def no_progress(more: int, total: int) -> None:
    """Ignore the progress of copying."""


class Partial(ABC):
    """The unfinished work on one output, in a folder or in a bucket.

    `path` is its visible location. After `begin`, `tasks` and `dataset` are local folders, with a
    subfolder for each finished task, and with the new dataset. In a bucket, they hold all files but
    those of shards.
    """

    path: Path
    tasks: Path
    dataset: Path
    lock: PartLock | PartClaims

    # --- what a folder and a bucket do differently

    @abstractmethod
    def exists(self) -> bool:
        """Return whether there is any file or object of it."""

    @abstractmethod
    def results(self) -> set[str]:
        """Return the names of the tasks that look finished, without reading their results."""

    @abstractmethod
    def read(self, path: Path, most: int = -2) -> bytes | None:
        """Read a whole file, or `most + 1` bytes in a folder; None if it does not exist."""

    @abstractmethod
    def write(self, path: Path, data: bytes, *, replace: bool) -> None:
        """Write a whole file at once. Without `replace`, one that exists may be kept."""

    @abstractmethod
    def stored(self, path: Path) -> Path:
        """Return the location of a shard's file that was written to `path` in `tasks`."""

    @abstractmethod
    def move(self, old: Path, folder: Path, file: File) -> None:
        """Move a file that was written in `tasks` to its final name in a folder of `dataset`."""

    @abstractmethod
    def publish(self, copied: Copied = no_progress, *, overwrite: bool) -> None:
        """Publish `dataset` as the output; in a bucket, report progress to `copied`.

        Raises OutputError if something has appeared at the output meanwhile, unless it is a dataset
        and `overwrite` is set.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove everything."""

    @abstractmethod
    def is_published(self) -> bool:
        """Whether the output is already the dataset of the unfinished run, which only has to clean
        up. If False, the finished tasks can be published, possibly a second time."""

    @abstractmethod
    def begun(self) -> list[PartOf]:
        """Return the parts that have ever begun."""

    @abstractmethod
    def has_publish_plan(self) -> bool:
        """Return whether the unfinished run consists of parts, and has stored its plan."""

    @property
    @abstractmethod
    def publish_plan(self) -> Path:
        """Where parts store what publishing needs of the plan."""

    @abstractmethod
    def _begin(self, job: dict[str, Any], resume: bool, part: PartOf | None) -> None:
        """See `begin`."""

    @abstractmethod
    def _strangers(self) -> set[str]:
        """Return the names in OUT.partial that are not those of unfinished work."""

    # --- what they do alike

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

    def sweep(self) -> None:
        """Remove the files of unfinished tasks; a part removes only those of its own tasks."""
        for entry in sorted(self.tasks.glob("*")):
            if entry.name.endswith(UNFINISHED) or not is_finished(entry):
                fs.remove(entry)

    def release(self) -> None:
        """Release the locks; finished tasks are kept for a later run."""
        self.lock.release()

    def job(self) -> dict[str, Any] | None:
        """Return the identity of the unfinished run; None if the run ended before it was stored.

        It is empty if it is damaged: then the run cannot be resumed, and its work should be kept.
        """
        try:
            data = self.read(self.path / JOB, MAX_BYTES)
        except DamagedError:
            return {}
        return None if data is None else parsed_job(data)

    def is_of(self, job: dict[str, Any]) -> bool:
        """Return whether the unfinished work is that of a job."""
        old = self.job()
        return old is not None and comparable(old) == comparable(job)

    def _refuse_other_work(self, job: dict[str, Any]) -> None:
        """Raise OutputError if there is work of parts of another job, which no part may remove.

        It may have been done while this part waited for them.
        """
        other = self.job() is not None and not self.is_of(job)
        if other and (self.results() or self.has_publish_plan()):
            raise OutputError(
                "there is unfinished work with other options or another source",
                path=self.path,
                fix=f"repeat it with its own options to finish it, or remove {self.path}",
            )

    def task_folder(self, number: int) -> Path:
        return self.tasks / f"{number:06d}"

    def finished(self, folders: Iterable[Path]) -> set[Path]:
        """Return those of the given folders of tasks that are finished; they exist afterwards."""
        return {*filter(is_finished, folders)}

    def undo(self, folder: Path) -> None:
        """Remove a finished task, which has to be repeated; it never looks finished meanwhile."""
        undone = folder.with_name(f"{folder.name}.undone{UNFINISHED}")
        fs.remove(undone)
        fs.rename(folder, undone)
        fs.remove(undone)

    def upload(self, folder: Path) -> RemotePath | None:
        """Where the shards of a folder of `tasks` are uploaded when complete; None: they stay."""
        found = self.stored(folder)
        return found if isinstance(found, RemotePath) else None


def comparable(job: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a job that must be equal for one run to resume another."""
    recipe = job.get("recipe")
    return {**job, "recipe": identity(recipe)} if isinstance(recipe, dict) else job
