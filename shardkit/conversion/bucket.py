"""OUT.partial in a bucket, and how its dataset is published, object by object.

job.json                     the identity of the run, as in a folder
run.json, parts/             the claims of the running conversion or of its parts (`claim.py`)
<job>/plan/                  for a run in parts: what publishing needs
<job>/000012/                the shards of a task; then its result.zip, with its other files
<job>/joined-.../            the same of a task that has joined shards of other tasks

<job> is a digest of job.json, so that a stalled run cannot write into the tasks of another job; for
a job that cannot be resumed, it is the ID of the run. Listings are only hints, as they may be out
of date: a result that a listing shows is read, and a task whose result it does not show is
repeated, with the same bytes.

To publish, shards are copied; the object that makes the dataset readable comes last. This is the
manifest or, for an output that is one shard, the shard. Before any object of the output changes, a
mark is written next to each manifest. A folder with a mark but without a manifest is not a dataset,
whatever it contains, and the next run knows that it may remove everything in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import xxhash

from shardkit.conversion.claim import RUN, PartClaims, TakenError
from shardkit.conversion.locks import HELD, UNLOCKED, try_lock, unlock
from shardkit.conversion.partial import (
    DATASET,
    PUBLISH_PLAN,
    TASKS,
    Copied,
    Partial,
    comparable,
    no_progress,
)
from shardkit.conversion.target import Target, file_in_the_way
from shardkit.conversion.work import PACKED, is_finished, read_result, unpack
from shardkit.errors import OutputError, ShardkitError
from shardkit.helpers import os_errors
from shardkit.helpers.checked import checked, parse
from shardkit.helpers.names import is_safe
from shardkit.helpers.part_of import PartOf
from shardkit.metadata import manifest as manifests
from shardkit.metadata.job import JOB, LOCK, PARTS, job_text, parsed_job
from shardkit.metadata.manifest import File, Splits
from shardkit.storage import fs
from shardkit.storage.remote import store as stores
from shardkit.storage.remote.path import RemotePath

_JOB_FOLDER = re.compile(r"[0-9a-f]{32}")
_MANIFEST = f"{manifests.FOLDER}/{manifests.NAME}"
_MARK = f"{manifests.FOLDER}/{manifests.UNFINISHED}"
_PREFIX = "shardkit-scratch-"


class Scratch:
    """A private folder in the system's temporary folder, until `close`.

    Creating one removes the folders of runs that were killed.
    """

    def __init__(self) -> None:
        _clean()
        self._lock: int | None = None
        while self._lock in (None, HELD):  # the cleanup of another run was faster
            folder = os_errors.temporary_folder()
            with os_errors.explained("make a temporary folder", folder / _PREFIX):
                self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
            self._lock = try_lock(self.path, LOCK)

    def close(self) -> None:
        handle, self._lock = self._lock, None
        if handle is not None:
            with contextlib.suppress(ShardkitError):  # the next run removes leftovers
                fs.remove(self.path)
            unlock(handle)


def _clean() -> None:
    """Remove the folders of this user whose runs have ended."""
    for path in os_errors.temporary_folder().glob(f"{_PREFIX}*"):
        with contextlib.suppress(ShardkitError, OSError):
            about = path.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            handle = try_lock(path, LOCK)
            if handle not in (None, HELD, UNLOCKED):
                try:
                    fs.remove(path)
                finally:
                    unlock(handle)


class _Placed(NamedTuple):
    """A file of the new dataset that is in the store already, under another name."""

    path: RemotePath
    bytes: int


class _Mark(TypedDict):
    """The contents of a mark."""

    names: list[str]  # of the objects that a run wrote to the output, or found there


class BucketPartial(Partial):
    """The work on an output in a bucket, with a temporary folder on this machine."""

    path: RemotePath

    def __init__(self, target: Target, out: RemotePath) -> None:
        self.path = out.with_name(f"{out.name}.partial")
        self.lock: PartClaims = PartClaims(self.path)
        self._target, self._store = target, out.store
        assert isinstance(target.folder, RemotePath)
        self._folder: RemotePath = target.folder
        self._scratch: Scratch | None = None
        self._job: RemotePath | None = None
        self._listed: list[str] | None = None
        self._resumed = True
        self._placed: dict[Path, _Placed] = {}  # files of `dataset` that are in the store already

    def exists(self) -> bool:
        return bool(self._keys())

    def results(self) -> set[str]:
        """As shown by a listing."""
        self._listed = None
        found = [path.parent for key in self._keys() if (path := self._path(key)).name == PACKED]
        return {folder.name for folder in found if self._job in (None, folder.parent)}

    def _keys(self) -> list[str]:
        """Return all objects in a listing, which is only a hint until they are to be removed."""
        if self._listed is None:
            self._listed = self._store.keys(self.path.key)
        return self._listed

    def _path(self, key: str) -> RemotePath:
        return RemotePath(self._store, key)

    def begun(self) -> list[PartOf]:
        assert self._job is not None
        return self.lock.begun(self._job.name)

    def has_publish_plan(self) -> bool:
        return any(key.endswith(f"/{PUBLISH_PLAN}") for key in self._keys())

    @property
    def publish_plan(self) -> RemotePath:
        assert self._job is not None
        return self._job / PUBLISH_PLAN

    def is_published(self) -> bool:
        """Whether the manifest is newer than the job; if equal, the dataset is published again."""
        manifest, job = (self._store.look(p.key) for p in (self._manifest, self.path / JOB))
        return manifest is not None and job is not None and manifest.modified > job.modified

    @property
    def _manifest(self) -> RemotePath:
        path = self._target.list_path(self._folder, manifests.NAME)
        assert isinstance(path, RemotePath)
        return path

    def read(self, path: Path, most: int = -2) -> bytes | None:
        assert isinstance(path, RemotePath)
        found = self._store.read_tagged(path.key)
        return None if found is None else found[0]

    def write(self, path: Path, data: bytes, *, replace: bool) -> None:
        assert isinstance(path, RemotePath)
        if replace:
            fs.put(data, path)
        else:
            fs.put_if(data, path, None)

    def stored(self, path: Path) -> RemotePath:
        assert self._job is not None
        return self._job / path.relative_to(self.tasks)

    def move(self, old: Path, folder: Path, file: File) -> None:
        self._placed[folder / file.name] = _Placed(self.stored(old), file.bytes)

    # --- beginning

    def _begin(self, job: dict[str, Any], resume: bool, part: PartOf | None) -> None:
        """Claim the output, and make the temporary folder."""
        seen = self._store.find(self._manifest.key)
        if part is None:
            self.lock.take()
        else:
            self.lock.share(part, _digest(job))
        now = self._store.find_again(self._manifest.key)
        if (now and now.version) != (seen and seen.version):
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

    def _prepare(self, job: dict[str, Any], resume: bool) -> None:
        self._job = self.path / (_digest(job) if resume else self.lock.claim.run)
        if not (resume and self.is_of(job)):
            stores.together(self._delete, self._others())
            self._resumed = False
            self.write(self.path / JOB, job_text(job), replace=True)

    def _agree(self, job: dict[str, Any]) -> None:
        """Make the unfinished work that of this part's job. Raises OutputError if parts of another
        job are running."""
        mine, path = self.path / _digest(job), self.path / JOB
        while True:
            found = self._store.read_tagged(path.key)
            if found is None:
                fs.put_if(job_text(job), path, None)
                continue
            old = _digest(parsed_job(found[0]))
            if old == mine.name:
                self._job = mine
                return
            # If the claim is taken, another part may have stored this job already.
            with contextlib.suppress(TakenError), self.lock.alone(old):
                self._refuse_other_work(job)
                fs.put_if(job_text(job), path, found[1])

    def release(self) -> None:
        scratch, self._scratch = self._scratch, None
        try:
            super().release()
        finally:
            if scratch is not None:
                scratch.close()

    # --- the results of tasks

    def finished(self, folders: Iterable[Path]) -> set[Path]:
        assert self._job is not None
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

    def _has_shards(self, folder: Path, keys: Collection[str]) -> bool:
        files = read_result(folder).files
        return all(self.stored(folder / file.name).key in keys for file in files)

    def _fetch(self, packed: RemotePath) -> None:
        """Read the result of a task, if there is one."""
        found = self._store.read_tagged(packed.key)
        if found is not None:
            unpack(found[0], self.tasks / packed.parent.name, packed)

    def undo(self, folder: Path) -> None:
        """Remove the result first, as its shards are about to change."""
        self._delete(self.stored(folder) / PACKED)
        super().undo(folder)

    # --- removing

    def discard(self) -> None:
        try:
            self.lock.check()
            marks = []
            if manifests.has_manifest(self._target.path):  # a run was killed while removing marks
                names = () if self._target.single else self._names()
                marks = [self._folder / n for n in names if n.endswith(_MARK)] + self._marks(())
            self._remove(marks)
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
        """Return all objects in the listing except the claim."""
        return [path for path in map(self._path, self._keys()) if path != self.path / RUN]

    def _known(self) -> Iterator[RemotePath]:
        """Yield the objects that this run has written, or knows that another run had written."""
        yield from (
            self.path / JOB,
            self.publish_plan,
            *(one.path for one in self._placed.values()),
        )
        for folder in filter(is_finished, self.tasks.glob("*")):
            yield self.stored(folder) / PACKED
            yield from (self.stored(folder / file.name) for file in read_result(folder).files)

    def _strangers(self) -> set[str]:
        start = len(self.path.key) + 1
        tops = {key[start:].partition("/")[0] for key in self._keys()}
        return {top for top in tops - {JOB, RUN, PARTS} if not _JOB_FOLDER.fullmatch(top)}

    # --- publishing: each step can be repeated, also by another run

    def publish(self, copied: Copied = no_progress, *, overwrite: bool) -> None:
        out = self._target.path
        assert isinstance(out, RemotePath)
        now = RemotePath(out.store.anew(), out.key)  # without what was cached when the run began
        replace(self._target, path=now).refuse_newcomer(overwrite)
        made = [*filter(Path.is_file, self.dataset.rglob("*")), *self._placed]
        new = {path.relative_to(self.dataset).as_posix(): path for path in made}
        self.lock.check()
        old = self._old_names(new)
        marks = self._marks({*old, *new})
        text = json.dumps({"names": sorted(filter(is_safe, {*old, *new}))}).encode()
        for mark in marks:
            self.lock.check()
            fs.put(text, mark)
        for names in reversed(self._by_rank(old)):
            stores.together(lambda name: self._delete(self._folder / name), names)
        sizes = {
            name: self._placed[path].bytes if path in self._placed else path.stat().st_size
            for name, path in new.items()
        }
        copied(0, total := sum(sizes.values()))
        for names in self._by_rank(new):
            stores.together(
                lambda name: self._put(new[name], self._folder / name),
                names,
                lambda name: copied(sizes[name], total),
            )
        self._remove(marks)

    def _put(self, path: Path, to: RemotePath) -> None:
        self.lock.check()
        if path in self._placed:
            fs.copy(self._placed[path].path, to, self._placed[path].bytes)
        else:
            fs.put(path, to)

    def _by_rank(self, names: Iterable[str]) -> list[list[str]]:
        """Names in the order of writing: first files, then manifests of splits, then the top one
        (or the only shard)."""
        ranks: list[list[str]] = [[], [], []]
        for name in sorted(names):
            folder = _dataset_of(name)
            last = name == self._target.path.name if self._target.single else folder == ""
            ranks[2 if last else 1 if folder else 0].append(name)
        return ranks

    def _marks(self, names: Iterable[str]) -> list[RemotePath]:
        """Return a mark for the output, and for each of its splits."""
        own = self._target.list_path(Path(), manifests.UNFINISHED).as_posix()
        folders = map(_dataset_of, () if self._target.single else names)
        found = {own, *(f"{folder}{_MARK}" for folder in folders if folder is not None)}
        return [self._folder / name for name in sorted(found)]

    # --- the dataset that is replaced

    def _old_names(self, new: Iterable[str]) -> set[str]:
        """Names of objects of the old dataset, and of a run that was killed while publishing."""
        names = self._marked()
        if not self._target.single:
            names |= self._names() | self._in_manifests()
            return {n for n in names if n.rpartition("/")[2] != manifests.UNFINISHED}
        names |= self._target.names_of_old()
        for name in new:
            if name not in names and self._store.find((self._folder / name).key):
                fix = "move it away, and run the same command again: it continues where it stopped"
                raise file_in_the_way(self._folder / name, fix)
        return names

    def _names(self) -> set[str]:
        """Return the names of all objects of the output, in a listing."""
        start = len(self._folder.key) + 1
        return {key[start:] for key in self._store.keys(self._folder.key)}

    def _marked(self) -> set[str]:
        """Return the names in the mark of a run that was killed while publishing."""
        found = self.read(self._target.list_path(self._folder, manifests.UNFINISHED))
        if found is None:
            return set()
        try:
            return {*filter(is_safe, checked(_Mark, parse(found))["names"])}
        except ValueError:  # not a mark of ours: the listing decides what to remove
            return set()

    def _in_manifests(self) -> set[str]:
        """The names in the manifests of the old dataset, which a listing may not show yet."""
        names: set[str] = set()
        with contextlib.suppress(ShardkitError):  # there is no manifest, or it is damaged
            top = manifests.load_any(self._target.path)
            splits = [*top.splits] if isinstance(top, Splits) else []
            names |= {_MANIFEST, *(file.name for file in top.files)}
            for part in splits or [""]:
                one = manifests.load(self._target.path / part)
                files = [_MANIFEST, *(f.name for f in (*one.all_files(), *one.files))]
                names |= {f"{part}/{name}".lstrip("/") for name in files}
        return names


def _dataset_of(name: str) -> str | None:
    """If an object is a manifest, the folder of its dataset: "", or with a trailing slash.

    Also recognizes the manifest's name in earlier versions.
    """
    for manifest in (_MANIFEST, manifests.OLD_NAME):
        if f"/{name}".endswith(f"/{manifest}"):
            return name.removesuffix(manifest)
    return None


def _digest(job: dict[str, Any]) -> str:
    text = json.dumps(comparable(job), sort_keys=True, allow_nan=False).encode()
    return xxhash.xxh3_128_hexdigest(text)
