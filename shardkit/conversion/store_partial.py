"""OUT.partial in a store: the work of a conversion, from which an interrupted one resumes.

job.json                     the identity of the run, as in a folder
run.json, parts/             the claims of the running conversion or of its parts (`claim.py`)
<job>/plan/                  for a run in parts: what publishing needs
<job>/000012/                the shards of a task; then its result.zip, with its other files
<job>/joined-.../            the same of a task that has joined shards of other tasks

<job> is a digest of job.json, so that a stalled run cannot write into the tasks of another job; for
a job that cannot be resumed, it is the ID of the run. Listings are only hints, as they may be out
of date: a result that a listing shows is read, and a task whose result it does not show is
repeated, with the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from shardkit.conversion.claim import RUN, PartClaims, TakenError
from shardkit.conversion.commit import DATASET
from shardkit.conversion.partial import (
    OUTLINE,
    PLAN,
    TASKS,
    Copied,
    Partial,
    comparable,
    unseen,
)
from shardkit.conversion.scratch import Scratch
from shardkit.conversion.store_commit import Placed, StoreCommit
from shardkit.conversion.target import Target
from shardkit.conversion.work import PACKED, is_finished, read_result, unpack
from shardkit.errors import OutputError
from shardkit.helpers.part_of import PartOf
from shardkit.metadata import manifest as manifests
from shardkit.metadata.job import JOB, PARTS, job_text, parsed_job
from shardkit.metadata.manifest import File
from shardkit.storage import fs
from shardkit.storage.remote import store as stores
from shardkit.storage.remote.client import Info
from shardkit.storage.remote.path import RemotePath

_JOB_FOLDER = re.compile(r"[0-9a-f]{32}")


class StorePartial(Partial):
    """The work on an output in a store, with a temporary folder on this machine."""

    def __init__(self, target: Target, out: RemotePath) -> None:
        self._remote = out.with_name(f"{out.name}.partial")
        self.path = self._remote
        self._target = target
        self._store = out.store
        self.lock: PartClaims = PartClaims(self._remote)
        self._scratch: Scratch | None = None
        self._job: RemotePath
        self._listed: list[str] | None = None
        self._resumed = True
        self._placed: dict[Path, Placed] = {}  # files of `dataset` that are in the store already

    def exists(self) -> bool:
        return bool(self._keys())

    def has_work(self) -> bool:
        self._listed = None
        return any(key.endswith(f"/{PACKED}") for key in self._keys())

    def _keys(self) -> list[str]:
        """All objects in a listing, which is only a hint until they are to be removed."""
        if self._listed is None:
            self._listed = self._store.keys(self._remote.key)
        return self._listed

    def is_published(self) -> bool:
        """Whether the manifest is newer than the job; if equal, the dataset is published again."""
        path = self._target.list_path(self._target.folder, manifests.NAME)
        assert isinstance(path, RemotePath)
        manifest, job = (self._store.look(p.key) for p in (path, self._remote / JOB))
        return manifest is not None and job is not None and manifest.modified > job.modified

    def _begin(self, job: dict[str, Any], resume: bool, part: PartOf | None) -> None:
        """Claim the output, and make the temporary folder."""
        manifest = self._target.list_path(self._target.folder, manifests.NAME)
        assert isinstance(manifest, RemotePath)
        seen = self._store.find(manifest.key)
        if part is None:
            self.lock.take()
        else:
            self.lock.share(part, _digest(job))
        if _version(self._store.find_again(manifest.key)) != _version(seen):
            raise OutputError(
                "another run has just written to this output",
                path=self._target.path,
                fix="run the same command again to see what it has made",
            )
        self._scratch = Scratch()
        self.tasks, self.dataset = (self._scratch.path / name for name in (TASKS, DATASET))
        fs.make_folder(self.tasks)
        if part is None:
            self._prepare(job, resume)
        else:
            self._agree(job)

    def _agree(self, job: dict[str, Any]) -> None:
        """Make the unfinished work that of this part's job. Raises OutputError if parts of another
        job are running."""
        self._job, path = self._remote / _digest(job), self._remote / JOB
        while True:
            found = self._store.read_tagged(path.key)
            if found is None:
                fs.put_if(job_text(job), path, None)
                continue
            old = _digest(parsed_job(found[0]))
            if old == self._job.name:
                return
            # If the claim is taken, another part may have stored this job already.
            with contextlib.suppress(TakenError), self.lock.alone(old):
                self._refuse_other_work(job)
                fs.put_if(job_text(job), path, found[1])

    def _prepare(self, job: dict[str, Any], resume: bool) -> None:
        self._job = self._remote / (_digest(job) if resume else self.lock.claim.run)
        if not (resume and self._is_of(job)):
            stores.together(self._delete, self._others())
            self._resumed = False
            self._write(self._remote / JOB, job_text(job), replace=True)

    def release(self) -> None:
        scratch, self._scratch = self._scratch, None
        try:
            super().release()
        finally:
            if scratch is not None:
                scratch.close()

    def begun(self) -> list[PartOf]:
        return self.lock.begun(self._job.name)

    def has_outline(self) -> bool:
        return any(key.endswith(f"/{PLAN}/{OUTLINE}") for key in self._keys())

    @property
    def _outline(self) -> Path:
        return self._job / PLAN / OUTLINE

    def _read(self, path: Path, most: int = -2) -> bytes | None:
        assert isinstance(path, RemotePath)
        found = self._store.read_tagged(path.key)
        return None if found is None else found[0]

    def _write(self, path: Path, data: bytes, *, replace: bool) -> None:
        assert isinstance(path, RemotePath)
        if replace:
            fs.put(data, path)
        else:
            fs.put_if(data, path, None)

    def finished(self, folders: Iterable[Path]) -> set[Path]:
        folders = {*folders}
        listed = self._store.keys(self._job.key) if self._resumed else []
        made_here = super().finished(folders)
        names = {folder.name for folder in folders - made_here}
        found = [path for key in listed if (path := self._path(key)).name == PACKED]
        stores.together(self._fetch, [path for path in found if path.parent.name in names])
        done, keys = super().finished(folders), {*listed}
        # Shards can be missing, for example if a run was killed while it removed everything.
        lost = {folder for folder in done - made_here if not self._has_shards(folder, keys)}
        for folder in lost:
            ours = self.lock.part is None or self.lock.part.has(int(folder.name))
            (self.undo if ours else super().undo)(folder)
        return done - lost

    def missing(self, tasks: int) -> set[int]:
        """As shown by the listing."""
        folders = (self._path(key).parent.name for key in self._store.keys(self._job.key)
                   if key.endswith(f"/{PACKED}"))  # fmt: skip
        return {*range(tasks)} - {int(name) for name in folders if name.isdigit()}

    def _has_shards(self, folder: Path, keys: Collection[str]) -> bool:
        files = [file for shard in read_result(folder).shards for file in shard.files]
        return all(self.stored(folder / file.name).key in keys for file in files)

    def _fetch(self, packed: RemotePath) -> None:
        """Read the result of a task, if there is one."""
        found = self._store.read_tagged(packed.key)
        if found is not None:
            unpack(found[0], self.tasks / packed.parent.name, packed)

    def undo(self, folder: Path) -> None:
        """Remove the result first, as its shards are about to change."""
        self._delete(self._job / folder.name / PACKED)
        super().undo(folder)

    def publish(self, copied: Copied = unseen, *, overwrite: bool) -> None:
        commit = StoreCommit(self._target, self.lock.check)
        self._remove(commit.publish(self.dataset, self._placed, copied, overwrite))

    def discard(self) -> None:
        try:
            self.lock.check()
            done = manifests.has_manifest(self._target.path)
            self._remove(StoreCommit(self._target, self.lock.check).marks() if done else [])
        finally:
            self.release()

    def _remove(self, marks: list[RemotePath]) -> None:
        """Remove everything, and the claim last, so that no other run begins meanwhile."""
        self._listed = None
        stores.together(self._delete, {*marks, *self._others(), *self._known()})
        self.lock.claim.remove()

    def _delete(self, path: RemotePath) -> None:
        self.lock.check()
        fs.delete(path)

    def _others(self) -> list[RemotePath]:
        """All objects in the listing except the claim."""
        found = [self._path(key) for key in self._keys()]
        return [path for path in found if path != self._remote / RUN]

    def _known(self) -> Iterator[RemotePath]:
        """The objects that this run has written, or knows that another run had written."""
        yield from (self._remote / JOB, self._job / PLAN / OUTLINE)
        yield from (placed.path for placed in self._placed.values())
        for folder in filter(is_finished, self.tasks.glob("*")):
            yield self._job / folder.name / PACKED
            for shard in read_result(folder).shards:
                yield from (self.stored(folder / f.name) for f in shard.files)

    def _path(self, key: str) -> RemotePath:
        return RemotePath(self._store, key)

    def _strangers(self) -> set[str]:
        start = len(self._remote.key) + 1
        tops = {key[start:].partition("/")[0] for key in self._keys()}
        return {top for top in tops - {JOB, RUN, PARTS} if not _JOB_FOLDER.fullmatch(top)}

    # --- the files of shards

    def stored(self, path: Path) -> RemotePath:
        return self._job / path.relative_to(self.tasks)

    def move(self, old: Path, folder: Path, file: File) -> None:
        self._placed[folder / file.name] = Placed(self.stored(old), file.bytes)


def _version(found: Info | None) -> str | None:
    return None if found is None else found.version


def _digest(job: dict[str, Any]) -> str:
    text = json.dumps(comparable(job), sort_keys=True, allow_nan=False).encode()
    return xxhash.xxh3_128_hexdigest(text)
