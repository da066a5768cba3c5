"""OUT.partial in a store: there a conversion works until it is whole, and from there it continues.

job.json                     what identifies the run, as in a folder
run.json                     the claim of the run that is at work
<job>/000012/                the shards of a task, and last its result.zip, all else that it made
<job>/dataset/               shards that were joined

<job> is a digest of job.json, so that a run that stood still cannot write into another's tasks; of
a job that cannot be continued it is the run. Nothing is believed because a listing shows it or
does not: a result that it shows is read, and a task whose result it misses is done again, with
the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from shardkit import manifest as manifests
from shardkit import storage
from shardkit.checked import checked, parse
from shardkit.conversion.claim import Claim
from shardkit.conversion.commit import DATASET
from shardkit.conversion.partial import JOB, TASKS, Copied, Partial, comparable, unseen
from shardkit.conversion.scratch import Scratch
from shardkit.conversion.store_commit import Placed, StoreCommit
from shardkit.conversion.target import Target
from shardkit.conversion.work import PACKED, is_finished, read_result, unpack
from shardkit.errors import DamagedError, OutputError
from shardkit.manifest import File, Shard
from shardkit.remote import store as stores
from shardkit.remote.path import RemotePath

_RUN = "run.json"
_JOB_FOLDER = re.compile(r"[0-9a-f]{32}")


class StorePartial(Partial):
    """The work on an output in a store, with a temporary folder on this machine."""

    def __init__(self, target: Target, out: RemotePath) -> None:
        self._remote = out.with_name(f"{out.name}.partial")
        self.path = self._remote
        self._target = target
        self._store = out.store
        self._claim: Claim | None = None
        self._scratch: Scratch | None = None
        self._job: RemotePath
        self._listed: list[str] | None = None
        self._resumed = True
        self._placed: dict[Path, Placed] = {}  # files of `dataset` that are in the store

    def job(self) -> dict[str, Any] | None:
        found = self._store.read_tagged((self._remote / JOB).key)
        try:
            return None if found is None else checked(dict[str, Any], parse(found[0]))
        except ValueError:
            return None

    def exists(self) -> bool:
        return bool(self._keys())

    def has_work(self) -> bool:
        self._listed = None
        return any(key.endswith(f"/{PACKED}") for key in self._keys())

    def _keys(self) -> list[str]:
        """All objects, as a listing has shown them: until they are to be removed it is a hint."""
        if self._listed is None:
            self._listed = self._store.keys(self._remote.key)
        return self._listed

    def begin(self, job: dict[str, Any], *, resume: bool) -> None:
        """Claim the output, and make the temporary folder."""
        self._refuse_strangers()
        manifest = self._target.list_path(self._target.folder, manifests.NAME)
        assert isinstance(manifest, RemotePath)
        seen = self._store.find(manifest.key)
        self._claim = Claim.take(self._remote / _RUN)
        try:
            if _version(self._store.find_again(manifest.key)) != _version(seen):
                raise OutputError(
                    "another run has just written to this output",
                    path=self._target.path,
                    fix="run the same command again to see what it has made",
                )
            self._scratch = Scratch()
            self.tasks, self.dataset = (self._scratch.path / name for name in (TASKS, DATASET))
            storage.make_folder(self.tasks)
            self._prepare(job, resume)
        except BaseException:
            self.release()
            raise

    def _prepare(self, job: dict[str, Any], resume: bool) -> None:
        assert self._claim is not None
        text = json.dumps(comparable(job), sort_keys=True, allow_nan=False).encode()
        name = xxhash.xxh3_128_hexdigest(text) if resume else self._claim.run
        self._job = self._remote / name
        old = self.job() if resume else None
        if old is None or comparable(old) != comparable(job):
            stores.together(self._delete, self._others())
            self._resumed = False
            text = json.dumps(job, indent=1, allow_nan=False).encode() + b"\n"
            storage.put(text, self._remote / JOB)

    def check(self) -> None:
        assert self._claim is not None
        self._claim.check()

    def release(self) -> None:
        claim, self._claim = self._claim, None
        scratch, self._scratch = self._scratch, None
        try:
            if claim is not None:
                claim.release()
        finally:
            if scratch is not None:
                scratch.close()

    def finished(self, tasks: int) -> list[int]:
        listed = self._store.keys(self._job.key) if self._resumed else []
        names = {f"{n:06d}" for n in range(tasks)}
        found = [path for key in listed if (path := self._path(key)).name == PACKED]
        stores.together(self._fetch, [path for path in found if path.parent.name in names])
        done, keys = super().finished(tasks), {*listed}
        lost = [number for number in done if not self._has_shards(number, keys)]
        for number in lost:  # a run that was to remove all this was killed, say
            self.undo(number)
        return [number for number in done if number not in lost]

    def _has_shards(self, number: int, keys: Collection[str]) -> bool:
        folder = self.task_folder(number)
        files = [file for shard in read_result(folder).shards for file in shard.files]
        return all(self.stored(folder / file.name).key in keys for file in files)

    def _fetch(self, packed: RemotePath) -> None:
        """The result of a task, if it is there."""
        found = self._store.read_tagged(packed.key)
        if found is not None:
            unpack(found[0], self.tasks / packed.parent.name, packed)

    def undo(self, number: int) -> None:
        """The result goes first: its shards will be others."""
        self._delete(self._job / self.task_folder(number).name / PACKED)
        super().undo(number)

    def publish(self, copied: Copied = unseen) -> None:
        commit = StoreCommit(self._target, self.check)
        self._remove(commit.publish(self.dataset, self._placed, copied))

    def discard(self) -> None:
        try:
            self.check()
            done = manifests.has_manifest(self._target.path)
            self._remove(StoreCommit(self._target, self.check).marks() if done else [])
        finally:
            self.release()

    def _remove(self, marks: list[RemotePath]) -> None:
        """Everything; the claim goes last, so that no other run is there meanwhile."""
        self._listed = None
        stores.together(self._delete, {*marks, *self._others(), *self._known()})
        assert self._claim is not None
        self._claim.remove()

    def _delete(self, path: RemotePath) -> None:
        self.check()
        storage.delete(path)

    def _others(self) -> list[RemotePath]:
        """All objects but the claim, as a listing shows them."""
        found = [self._path(key) for key in self._keys()]
        return [path for path in found if path != self._remote / _RUN]

    def _known(self) -> Iterator[RemotePath]:
        """What this run has made, or has found that another one had made."""
        yield self._remote / JOB
        yield from (placed.path for placed in self._placed.values())
        for folder in filter(is_finished, self.tasks.glob("*")):
            yield self._job / folder.name / PACKED
            for shard in read_result(folder).shards:
                yield from (self.stored(folder / f.name) for f in shard.files)

    def _path(self, key: str) -> RemotePath:
        return RemotePath(self._store, key)

    def _refuse_strangers(self) -> None:
        start = len(self._remote.key) + 1
        tops = {key[start:].partition("/")[0] for key in self._keys()}
        strangers = sorted(t for t in tops - {JOB, _RUN} if not _JOB_FOLDER.fullmatch(t))
        if strangers:
            raise self._something_else(strangers)

    # --- the files of shards

    def upload(self, folder: Path) -> RemotePath:
        return self.stored(folder)

    def stored(self, path: Path) -> RemotePath:
        return self._job / path.relative_to(self.tasks)

    def rename(self, old: Path, folder: Path, file: File, *, synced: bool) -> None:
        self._placed[folder / file.name] = Placed(self.stored(old), file.bytes)

    @contextlib.contextmanager
    def here(self, shards: Sequence[tuple[Path, Shard]]) -> Iterator[list[Path]]:
        files = [(folder, f) for folder, shard in shards for f in shard.files]
        try:
            stores.together(lambda pair: self._download(*pair), files)
            yield [folder / shard.file.name for folder, shard in shards]
        finally:
            for folder, file in files:
                storage.remove(folder / file.name)

    def _download(self, folder: Path, file: File) -> None:
        path = folder / file.name
        self.check()
        storage.make_folder(path.parent)
        storage.download(self.stored(path), path, file.bytes)
        if storage.checksum(path) != file.checksum:
            raise DamagedError(
                "a shard to be joined is not as it was uploaded",
                path=self.stored(path),
                fix="start again with --overwrite",
            )

    def keep(self, folder: Path, shard: Shard) -> None:
        for file in shard.files:
            path = folder / file.name
            to = self._job / DATASET / path.relative_to(self.dataset)
            storage.put(path, to)
            storage.remove(path)
            self._placed[path] = Placed(to, file.bytes)

    def unsynced(self, earlier: Collection[int]) -> Collection[int]:
        return ()  # an object is there, or it is not


def _version(found: stores.Info | None) -> str | None:
    return None if found is None else found.version
