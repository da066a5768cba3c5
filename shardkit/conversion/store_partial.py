"""OUT.partial in a store: the work of a conversion, from which an interrupted one resumes.

job.json                     the identity of the run, as in a folder
run.json                     the claim of a whole run, while it is running
parts/2-of-4.json            the claim of a part; it stays, and records whether the part has ended
<job>/plan/                  for a run in parts: what publishing needs
<job>/000012/                the shards of a task; then its result.zip, with its other files
<job>/dataset/               joined shards

A part writes its claim and then looks for the claim of a whole run; a whole run writes its claim
and then looks for those of parts. So at least one of the two finds the other. The part withdraws
its claim, and waits to see whether the whole run is still alive.

<job> is a digest of job.json, so that a stalled run cannot write into the tasks of another job; for
a job that cannot be resumed, it is the ID of the run. Listings are only hints, as they may be out
of date: a result that a listing shows is read, and a task whose result it does not show is
repeated, with the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from shardkit.conversion.claim import Claim, Found, another_run, ended, is_over, said
from shardkit.conversion.commit import DATASET
from shardkit.conversion.part_lock import OTHER_JOB, at_work, at_work_already
from shardkit.conversion.partial import (
    JOB,
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
from shardkit.errors import DamagedError, OutputError
from shardkit.helpers.checked import checked, parse
from shardkit.helpers.part_of import PartOf
from shardkit.metadata import manifest as manifests
from shardkit.metadata.manifest import File, Shard
from shardkit.storage import fs
from shardkit.storage.remote import store as stores
from shardkit.storage.remote.client import Info
from shardkit.storage.remote.path import RemotePath

_RUN = "run.json"
_PARTS = "parts"
_JOB_FOLDER = re.compile(r"[0-9a-f]{32}")


class _TakenError(OutputError):
    """Another part is replacing the job at this moment."""


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
        self._outlined = False
        self._placed: dict[Path, Placed] = {}  # files of `dataset` that are in the store already

    def job(self) -> dict[str, Any] | None:
        found = self._store.read_tagged((self._remote / JOB).key)
        try:
            return None if found is None else checked(dict[str, Any], parse(found[0]))
        except ValueError:
            return {}

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

    def begin(self, job: dict[str, Any], *, resume: bool, part: PartOf | None = None) -> None:
        """Claim the output, and make the temporary folder."""
        self._refuse_strangers()
        manifest = self._target.list_path(self._target.folder, manifests.NAME)
        assert isinstance(manifest, RemotePath)
        seen = self._store.find(manifest.key)
        try:
            if part is None:
                self._claim = Claim.take(self._remote / _RUN)
                self._refuse_parts("a run without --part cannot work at the same time")
            else:
                self._share(part, _digest(job))
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
        except BaseException:
            self.release()
            raise

    def _share(self, part: PartOf, job: str) -> None:
        """Claim a part, unless a whole run is active."""
        self.part = part
        run, busy = self._remote / _RUN, at_work_already(part, self.path)
        while True:
            self._claim = Claim.take(self._claim_of(part), {"job": job}, busy=busy)
            found = self._store.read_tagged(run.key)
            if found is None or is_over(found[0]):
                return
            self._claim.release()
            if not ended(run, found):
                raise another_run(run)

    def _claim_of(self, part: PartOf) -> RemotePath:
        return self._remote / _PARTS / f"{part.name}.json"

    def _parts(self) -> dict[PartOf, Found]:
        """The claims of all parts."""
        found: dict[PartOf, Found] = {}

        def read(key: str) -> None:
            part = PartOf.named(self._path(key).name.removesuffix(".json"))
            claim = self._store.read_tagged(key)
            if part is not None and claim is not None:
                found[part] = claim

        stores.together(read, self._store.keys((self._remote / _PARTS).key))
        return found

    def refuse_busy(self) -> None:
        self._refuse_parts(OTHER_JOB)
        run = self._remote / _RUN
        if not ended(run, self._store.read_tagged(run.key)):
            raise another_run(run)

    def _refuse_parts(self, why: str, job: str | None = None) -> None:
        """Raise OutputError if other parts (of one `job`) are running; dead ones lose claims."""
        claims, live = self._parts(), []

        def look(part: PartOf) -> None:
            other = part != self.part and job in (None, said(claims[part][0]).get("job"))
            if other and not ended(self._claim_of(part), claims[part]):
                live.append(part)

        stores.together(look, claims)
        if live:
            raise at_work(sorted(live), self.path, why)

    def _agree(self, job: dict[str, Any]) -> None:
        """Make the unfinished work that of this part's job. Raises OutputError if parts of another
        job are running."""
        self._job, path = self._remote / _digest(job), self._remote / JOB
        while (old := self.job()) is None or comparable(old) != comparable(job):
            found = self._store.read_tagged(path.key)
            if found is None:
                fs.put_if(_job_text(job), path, None)
                continue
            with contextlib.suppress(_TakenError):  # another part may have stored this job already
                run = Claim.take(self._remote / _RUN, busy=_TakenError("taken"))
                try:  # the claim keeps new parts from beginning meanwhile
                    self._refuse_parts(OTHER_JOB, "" if old is None else _digest(old))
                    self._refuse_other_work(job)
                    fs.put_if(_job_text(job), path, found[1])
                finally:
                    run.release()

    def begun(self) -> list[tuple[PartOf, bool]]:
        job = self.job()
        found = {part: said(data) for part, (data, _) in self._parts().items()}
        ours = [p for p in found if job is not None and found[p].get("job") == _digest(job)]
        return [(part, bool(found[part].get("ended"))) for part in sorted(ours)]

    def end_part(self) -> None:
        assert self._claim is not None
        self._claim.say(ended=True)

    def _prepare(self, job: dict[str, Any], resume: bool) -> None:
        assert self._claim is not None
        self._job = self._remote / (_digest(job) if resume else self._claim.run)
        old = self.job() if resume else None
        if old is None or comparable(old) != comparable(job):
            stores.together(self._delete, self._others())
            self._resumed = False
            fs.put(_job_text(job), self._remote / JOB)

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

    def has_outline(self) -> bool:
        return any(key.endswith(f"/{PLAN}/{OUTLINE}") for key in self._keys())

    def outline(self) -> tuple[Path, bytes] | None:
        path = self._job / PLAN / OUTLINE
        found = self._store.read_tagged(path.key)
        self._outlined = found is not None
        return None if found is None else (path, found[0])

    def keep_outline(self, packed: bytes, *, replace: bool = False) -> None:
        self._outlined = True
        path = self._job / PLAN / OUTLINE
        if replace:
            fs.put(packed, path)
        else:
            fs.put_if(packed, path, None)

    def finished(self, numbers: Iterable[int]) -> list[int]:
        numbers = [*numbers]
        listed = self._store.keys(self._job.key) if self._resumed else []
        made_here = {*super().finished(numbers)}
        names = {f"{n:06d}" for n in numbers if n not in made_here}
        found = [path for key in listed if (path := self._path(key)).name == PACKED]
        stores.together(self._fetch, [path for path in found if path.parent.name in names])
        done, keys = super().finished(numbers), {*listed}
        # Shards can be missing, for example if a run was killed while it removed everything.
        lost = [n for n in done if n not in made_here and not self._has_shards(n, keys)]
        for number in lost:
            ours = self.part is None or self.part.has(number)
            (self.undo if ours else super().undo)(number)
        return [number for number in done if number not in lost]

    def missing(self, tasks: int) -> set[int]:
        """As shown by the listing."""
        folders = (self._path(key).parent.name for key in self._store.keys(self._job.key)
                   if key.endswith(f"/{PACKED}"))  # fmt: skip
        return {*range(tasks)} - {int(name) for name in folders if name.isdigit()}

    def _has_shards(self, number: int, keys: Collection[str]) -> bool:
        folder = self.task_folder(number)
        files = [file for shard in read_result(folder).shards for file in shard.files]
        return all(self.stored(folder / file.name).key in keys for file in files)

    def _fetch(self, packed: RemotePath) -> None:
        """Read the result of a task, if there is one."""
        found = self._store.read_tagged(packed.key)
        if found is not None:
            unpack(found[0], self.tasks / packed.parent.name, packed)

    def undo(self, number: int) -> None:
        """Remove the result first, as its shards are about to change."""
        self._delete(self._job / self.task_folder(number).name / PACKED)
        super().undo(number)

    def publish(self, copied: Copied = unseen, *, overwrite: bool) -> None:
        commit = StoreCommit(self._target, self.check)
        self._remove(commit.publish(self.dataset, self._placed, copied, overwrite))

    def discard(self) -> None:
        try:
            self.check()
            done = manifests.has_manifest(self._target.path)
            self._remove(StoreCommit(self._target, self.check).marks() if done else [])
        finally:
            self.release()

    def _remove(self, marks: list[RemotePath]) -> None:
        """Remove everything, and the claim last, so that no other run begins meanwhile."""
        self._listed = None
        stores.together(self._delete, {*marks, *self._others(), *self._known()})
        assert self._claim is not None
        self._claim.remove()

    def _delete(self, path: RemotePath) -> None:
        self.check()
        fs.delete(path)

    def _others(self) -> list[RemotePath]:
        """All objects in the listing except the claim."""
        found = [self._path(key) for key in self._keys()]
        return [path for path in found if path != self._remote / _RUN]

    def _known(self) -> Iterator[RemotePath]:
        """The objects that this run has written, or knows that another run had written."""
        yield self._remote / JOB
        if self._outlined:
            yield self._job / PLAN / OUTLINE
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
        strangers = sorted(t for t in tops - {JOB, _RUN, _PARTS} if not _JOB_FOLDER.fullmatch(t))
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
                fs.remove(folder / file.name)

    def _download(self, folder: Path, file: File) -> None:
        path = folder / file.name
        self.check()
        fs.make_folder(path.parent)
        fs.download(self.stored(path), path, file.bytes)
        if fs.checksum(path) != file.checksum:
            raise DamagedError(
                "a shard to be joined differs from what was uploaded",
                path=self.stored(path),
                fix="start over with --overwrite",
            )

    def keep(self, folder: Path, shard: Shard) -> None:
        for file in shard.files:
            path = folder / file.name
            to = self._job / DATASET / path.relative_to(self.dataset)
            fs.put(path, to)
            fs.remove(path)
            self._placed[path] = Placed(to, file.bytes)

    def unsynced(self, earlier: Collection[int]) -> Collection[int]:
        return ()  # uploads are atomic: an object is complete, or does not exist


def _version(found: Info | None) -> str | None:
    return None if found is None else found.version


def _digest(job: dict[str, Any]) -> str:
    text = json.dumps(comparable(job), sort_keys=True, allow_nan=False).encode()
    return xxhash.xxh3_128_hexdigest(text)


def _job_text(job: dict[str, Any]) -> bytes:
    return json.dumps(job, indent=1, allow_nan=False).encode() + b"\n"
