"""One task: it makes shards of samples, or joins shards of other tasks, and leaves a result.

A task works in a temporary folder, its final name with a suffix; when all files are synced to the
disk, one rename removes the suffix. The folders without a suffix are the journal of a run. For an
output in a store, the journal is the set of `result.zip` objects. These contain all files of such a
folder except the shards, and are written after them.
"""

from __future__ import annotations

import io
import json
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.conversion.read_ahead import Reading
from shardkit.conversion.shards import Content, ShardSequence, finished_shard, upload_shard
from shardkit.conversion.stats import Stats
from shardkit.errors import DamagedError, SampleError, ShardkitError, StorageError
from shardkit.formats import file_name, get_format
from shardkit.formats.base import Joins, ShardSpec
from shardkit.helpers.checked import (
    MAX_BYTES,
    Count,
    MismatchError,
    checked,
    damaged,
    parse,
    plain,
)
from shardkit.helpers.names import checked_name
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.manifest import ERRORS, FILTERED, KEYS, File, Shard
from shardkit.metadata.recipe import Recipe
from shardkit.preprocess.items import Filtered, sample_of
from shardkit.sample import renamed, safe_key
from shardkit.storage import fs
from shardkit.storage.checksums import DIGEST
from shardkit.storage.remote import store as stores
from shardkit.storage.remote.path import RemotePath

RESULT = "result.json"
PACKED = "result.zip"
UNFINISHED = ".tmp"

_REPORT_SECONDS = 0.1
_JOINED = "shard-000000"
_INPUTS = "inputs"  # a folder for downloaded shards, in that of the task


class TaskShard(NamedTuple):
    """A shard that a task has made."""

    folder: Path  # of the task
    shard: Shard
    pieces: bytes  # digests, as returned by `finished_shard`
    task: int | None = None
    joined: bool = False  # not synced, and to be joined with its neighbours


@dataclass(frozen=True)
class Joining:
    """The input of a task of the second wave, which makes one shard of several."""

    shards: tuple[TaskShard, ...]  # without any, the task makes an empty shard
    compare: bool  # whether an earlier run made one of them: a power failure may have damaged it

    def __str__(self) -> str:
        return f"{len(self.shards)} shards to be joined"


@dataclass(frozen=True)
class Work:
    """A task as sent to a worker. `folder` is where its result is finally stored; its shards stay
    there or, if the output is in a store, are uploaded one by one."""

    number: int
    folder: Path
    input: Reading | Joining
    recipe: Recipe  # without sources and classes
    spec: ShardSpec
    label: str  # the field with the class
    pixels: Collection[str]  # fields whose pixels are counted
    durable: bool = True  # whether the shards are final; if not, they are to be joined
    upload: RemotePath | None = None
    part: PartOf | None = None  # the part that runs the task, if any
    names_samples: bool = False  # whether each sample is named before it is read: see `read_ahead`

    @classmethod
    def of(
        cls,
        number: int,
        folder: Path,
        input: Reading | Joining,
        recipe: Recipe,
        content: Content,
        **more: Any,
    ) -> Work:
        """Return a task that leaves its result in `folder`."""
        recipe = replace(recipe, sources={}, classes=None)  # these may be large
        return cls(
            number, folder, input, recipe, content.spec, content.label, content.pixels, **more
        )


@dataclass(frozen=True)
class TaskProgress:
    """Progress since the last report: samples written or dropped, bytes of the source, and samples
    dropped because they are bad."""

    samples: int
    bytes: int
    errors: int

    def __neg__(self) -> TaskProgress:
        """The progress that undoes this one."""
        return TaskProgress(-self.samples, -self.bytes, -self.errors)

    def __add__(self, other: TaskProgress) -> TaskProgress:
        return TaskProgress(
            self.samples + other.samples, self.bytes + other.bytes, self.errors + other.errors
        )


Report = Callable[[TaskProgress], None]


def run_task(work: Work, report: Report) -> None:
    """Run the task and publish its folder. If it fails, raises ShardkitError and cleans up."""
    by = "" if work.part is None else f".{work.part.name}"
    end = f"{by}.{uuid.uuid4().hex[:8]}{UNFINISHED}"
    unfinished = work.folder.with_name(f"{work.folder.name}{end}")
    fs.make_folder(unfinished)
    fs.write_back = work.durable and work.upload is None
    try:
        _write(work, unfinished, report)
        fs.sync(unfinished)
        try:
            fs.rename(unfinished, work.folder)
        except ShardkitError:
            if not is_finished(work.folder):
                raise
            fs.remove(unfinished)  # another part has finished it too, with the same bytes
        fs.sync(work.folder.parent)
    except BaseException:
        # Best effort: leftovers are removed when the run is resumed.
        try:
            fs.remove(unfinished)
        except ShardkitError:
            pass
        raise
    finally:
        fs.write_back = True


def _write(work: Work, folder: Path, report: Report) -> None:
    content = Content(get_format(work.recipe.format), work.spec, work.label, pixels=work.pixels)
    if isinstance(work.input, Joining):
        result = _join(work.input, content, folder, work.upload)
    else:
        result = _write_shards(work, work.input, content, folder, report)
    fs.write_file(folder / RESULT, json.dumps(plain(result), allow_nan=False).encode())
    if work.upload is not None:
        fs.put(pack(folder), work.upload / PACKED)


def _write_shards(
    work: Work, reading: Reading, content: Content, folder: Path, report: Report
) -> TaskResult:
    shards = ShardSequence(
        folder,
        content,
        work.recipe.shard_samples,
        durable=work.durable,
        upload=work.upload,
        unique_keys=reading.unique_keys,
    )
    lists: dict[str, list[bytes]] = {ERRORS: [], FILTERED: [], KEYS: []}
    try:
        reporter = _Reporter(report)
        _write_samples(work, reading, shards, lists, reporter)
        shards.close()
    except BaseException:
        shards.abandon()
        raise
    for name, lines in lists.items():
        if lines:
            fs.write_file(folder / name, b"".join(lines))
    pieces = [digests.hex() for digests in shards.pieces]
    return TaskResult(shards.shards, len(lists[ERRORS]), shards.stats, pieces, reporter.reported)


def _join(
    joining: Joining, content: Content, folder: Path, upload: RemotePath | None
) -> TaskResult:
    """Make one shard of several, which are in the folders of their tasks, or were uploaded."""
    paths = [made.folder / made.shard.file.name for made in joining.shards]
    samples = sum(made.shard.samples for made in joining.shards)
    if upload is not None:
        store, inputs = upload.parent, folder / _INPUTS
        files = [(made.folder.name, f) for made in joining.shards for f in made.shard.files]
        stores.together(lambda one: _download(store / one[0], inputs / one[0], one[1]), files)
        paths = [inputs / made.folder.name / made.shard.file.name for made in joining.shards]
    elif joining.compare:
        for made in joining.shards:
            check_shard(made)
    shard, pieces = joined(folder, content, paths, samples, upload)
    fs.remove(folder / _INPUTS)
    return TaskResult([shard], 0, Stats(), [pieces.hex()])


def joined(
    folder: Path,
    content: Content,
    paths: list[Path],
    samples: int,
    upload: RemotePath | None = None,
) -> tuple[Shard, bytes]:
    """Write one shard with the samples of those at `paths`, or an empty one without any.

    Returns it, and the digests of its files.
    """
    format, spec = content.format, replace(content.spec, max_bytes=None)
    path = folder / file_name(_JOINED, format.name)
    if paths:
        assert isinstance(format, Joins)
        format.join(path, paths, spec)
    else:
        format.create(path, spec).close()
    shard, pieces = finished_shard(folder, _JOINED, format.name, durable=upload is None)
    if upload is not None:
        upload_shard(folder, shard, upload)
    return replace(shard, samples=samples), pieces


def _download(store: RemotePath, folder: Path, file: File) -> None:
    path = folder / file.name
    fs.make_folder(path.parent)
    fs.download(store / file.name, path, file.bytes)
    if fs.checksum(path) != file.checksum:
        raise DamagedError(
            "a shard to be joined differs from what was uploaded",
            path=store / file.name,
            fix="start over with --overwrite",
        )


def check_shard(made: TaskShard) -> None:
    """Raise StorageError, and remove the task, if a shard is not what the task has written."""
    for file in made.shard.files:
        path = made.folder / file.name
        size = path.stat().st_size if path.is_file() else -1
        if size == file.bytes and fs.checksum(path) == file.checksum:
            continue
        fs.remove(made.folder)
        raise StorageError(
            "a shard to be joined, written by an earlier run, is damaged or missing",
            path=path,
            expected=f"{file.bytes:,} bytes with checksum {file.checksum}",
            fix="run the same command again: it writes this shard again",
        )


def _write_samples(
    work: Work,
    reading: Reading,
    shards: ShardSequence,
    lists: dict[str, list[bytes]],
    reporter: _Reporter,
) -> None:
    """Read and write the samples; each dropped sample gets a line in one of the `lists`."""
    safe_keys = work.recipe.safe_keys and not reading.source.safe_keys
    for item in reading.items(1, shards.stats):
        try:
            sample = renamed(sample_of(item.read), work.recipe.rename)
            if safe_keys:
                sample = {**sample, "__key__": safe_key(sample["__key__"])}
            if work.recipe.transform is not None:  # the user's own code
                sample = work.spec.schema.check(sample)
            shards.write(sample)
        except Filtered as dropped:
            lists[FILTERED].append(json_line({"source": item.name, **dropped.to_json()}))
            shards.stats.filtered[dropped.reason] += 1
            reporter.add(item.size, 0)
            continue
        except SampleError as error:
            if work.recipe.on_error == "fail":
                raise error.located(path=item.name) from error.__cause__
            lists[ERRORS].append(error_line(item.name, error))
            reporter.add(item.size, 1)
            continue
        if not isinstance(item.read, dict | SampleError | Filtered):
            shards.stats.images.update(item.read.images)
            shards.stats.reasons.update(item.read.reasons)
        if item.original is not None:
            lists[KEYS].append(json_line({"key": sample["__key__"], "path": item.original}))
        reporter.add(item.size, 0)
    reporter.flush()


class _Reporter:
    """Accumulates progress and reports it a few times per second."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.reported = TaskProgress(0, 0, 0)
        self._samples = self._bytes = self._errors = 0
        self._next = time.monotonic() + _REPORT_SECONDS

    def add(self, size: int, errors: int) -> None:
        self._samples += 1
        self._bytes += size
        self._errors += errors
        if errors or time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        progress = TaskProgress(self._samples, self._bytes, self._errors)
        self._report(progress)
        self.reported += progress
        self._samples = self._bytes = self._errors = 0
        self._next = time.monotonic() + _REPORT_SECONDS


def error_line(source: str | None, error: ShardkitError) -> bytes:
    """A line of errors.jsonl, without absolute paths, so that it does not depend on the location
    of the source."""
    parts = error.to_dict()
    path = parts.pop("path", None)
    return json_line({"source": source or Path(str(path)).name, **parts})


def json_line(entry: Mapping[str, Any]) -> bytes:
    # Surrogates from file names that are not valid Unicode become \u escapes, which JSON can read.
    text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


@dataclass(frozen=True)
class TaskResult:
    """The result of a finished task."""

    shards: list[Shard]
    errors: Count  # samples that were dropped
    stats: Stats
    pieces: list[str]  # digests of each shard in hex, as returned by `finished_shard`
    progress: TaskProgress = TaskProgress(0, 0, 0)  # everything that the worker has reported

    @property
    def files(self) -> list[File]:
        return [file for shard in self.shards for file in shard.files]

    def made(self, folder: Path, task: int | None = None, joined: bool = False) -> list[TaskShard]:
        """Return the shards, for the folder of the task."""
        digests = map(bytes.fromhex, self.pieces)
        every = zip(self.shards, digests, strict=True)
        return [TaskShard(folder, shard, pieces, task, joined) for shard, pieces in every]


def read_result(folder: Path) -> TaskResult:
    """Read the result of the finished task in a folder; raises DamagedError."""
    path = folder / RESULT
    try:
        data = checked(dict[str, Any], parse(fs.read(path, MAX_BYTES)))
        found = checked(TaskResult, data)
        for count in fields(Stats):  # they have defaults, but a result always contains all of them
            if count.name not in data["stats"]:
                raise MismatchError("a count", None, "stats", count.name)
        sizes = [len(bytes.fromhex(digests)) for digests in found.pieces]
        if sizes != [DIGEST * shard.listed for shard in found.shards]:
            raise MismatchError("digests of all pieces of each shard", sizes, "pieces")
    except ValueError as error:
        fix = "remove the folder that the file is in, and run the same command again"
        raise damaged("the result of a task", error, path=path, fix=fix) from error
    for file in found.files:
        checked_name(file.name, path, "shards")
    return found


def is_finished(folder: Path) -> bool:
    return (folder / RESULT).is_file()


def pack(folder: Path) -> bytes:
    """Pack the folder of a task, whose shards were uploaded already, into one archive."""
    paths = filter(Path.is_file, folder.rglob("*"))
    return zipped({path.relative_to(folder).as_posix(): fs.read(path) for path in paths})


def unpack(packed: bytes, folder: Path, where: Path) -> None:
    """Unpack the folder of a finished task; raises DamagedError with the archive's path `where`."""
    fs.make_folder(folder)
    try:
        files = unzipped(packed)
    except ValueError as error:
        fix = "remove the object, and run the same command again"
        raise damaged("the result of a task", error, path=where, fix=fix) from error
    for name in sorted(files, key=lambda one: one == RESULT):  # RESULT last
        path = folder / checked_name(name, where, "entries")
        fs.make_folder(path.parent)
        fs.write_file(path, files[name])


def zipped(files: Mapping[str, bytes]) -> bytes:
    """Pack files into one archive, whose bytes depend only on their names and contents."""
    with io.BytesIO() as packed:
        with zipfile.ZipFile(packed, "w") as archive:
            for name in sorted(files):
                archive.writestr(zipfile.ZipInfo(name), files[name])
        return packed.getvalue()


def unzipped(packed: bytes) -> dict[str, bytes]:
    """Return the files in an archive made by `zipped`; raises ValueError for any other."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("the archive is compressed")
            if sum(entry.file_size for entry in entries) > len(packed):  # they overlap
                raise ValueError("its files are larger than the archive")
            return {entry.filename: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
        raise ValueError(str(error)) from error
