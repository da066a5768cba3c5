"""Compares what the library of a dataset's format reads with what shardkit reads.

The library runs in its own process (client_reader.py), which sends a summary of each value, in
order. Each is compared with the summary of the value that shardkit reads, converted by `ours` of
the `Client` if the library returns a different type.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardkit.codecs.pixels import ppm_header
from shardkit.dataset.dataset import Dataset
from shardkit.errors import (
    DamagedError,
    SampleError,
    ShardkitError,
    StorageError,
    UsageError,
    WorkerError,
)
from shardkit.helpers.extras import missing
from shardkit.helpers.json_process import JsonProcess
from shardkit.schema import Bool, FieldType, Float, Image
from shardkit.storage import fs
from shardkit.storage.byte_source import open_source
from shardkit.storage.remote.path import RemotePath
from shardkit.verification.client_reader import summary
from shardkit.verification.matching import Location
from shardkit.verification.shards import CheckedPart
from shardkit.verification.work import Meter

SCRIPT = Path(__file__).with_name("client_reader.py")
_COPIED = 8 << 20  # bytes copied at a time
_SILENT = 600.0  # timeout in seconds: FFCV compiles for a minute before its first sample

_Ours: TypeAlias = Callable[[FieldType, Any], Any]
_Given: TypeAlias = tuple["str | None", dict[str, str]]  # key, summaries of its fields


def _same(kind: FieldType, value: Any) -> Any:
    return value


def _of_webdataset(kind: FieldType, value: Any) -> Any:
    """JSON has no NaN and no infinities: in a TAR, they are stored by name, as text."""
    infinite = isinstance(kind, Float) and not math.isfinite(value)
    return json.dumps(value) if infinite else value


def _of_ffcv(kind: FieldType, value: Any) -> Any:
    """FFCV has no booleans, and decodes raw images; JPEGs are compared as bytes."""
    if isinstance(kind, Bool):
        return int(value)
    header = ppm_header(value) if isinstance(kind, Image) else None
    if header is None:
        return value
    pixels = np.frombuffer(value, np.uint8, header.stop - header.start, header.start)
    return pixels.reshape(header.height, header.width, 3)


def _of_tensorflow(kind: FieldType, value: Any) -> Any:
    """Return an int64_list has no booleans."""
    return int(value) if isinstance(kind, Bool) else value


def _of_megatron(kind: FieldType, value: Any) -> Any:
    """Tokens may be stored in a wider type than the field's."""
    return value.astype(np.int64)


@dataclass(frozen=True)
class Client:
    """A library that reads a format; its reader in client_reader.py has the same name."""

    name: str
    modules: tuple[str, ...]
    extra: str
    ours: _Ours = _same
    whole: bool = False  # it opens the dataset's folder, not single shards
    absent: bool = True  # it distinguishes absent from empty values


_DATASETS = Client("datasets", ("datasets", "pyarrow"), "hf")
_PYARROW = Client("pyarrow", ("pyarrow",), "arrow")
CLIENTS: dict[str, tuple[Client, ...]] = {
    "wds": (Client("webdataset", ("webdataset",), "webdataset", _of_webdataset),),
    "lmdb": (Client("lmdb", ("lmdb", "msgpack"), "lmdb"),),
    "arrow": (_PYARROW, _DATASETS),
    "parquet": (_PYARROW, _DATASETS),
    "hf": (replace(_DATASETS, whole=True),),
    "beton": (Client("ffcv", ("ffcv",), "ffcv", _of_ffcv, absent=False),),
    "tfrecord": (Client("tensorflow", ("tensorflow",), "tensorflow", _of_tensorflow),),
    "megatron": (Client("megatron-core", ("megatron.core",), "megatron", _of_megatron),),
}


@dataclass
class ClientReport:
    """The result of reading a dataset with the format's own library."""

    versions: dict[str, str] = field(default_factory=dict)
    samples: int = 0  # that the library returned
    problems: int = 0
    not_compared: Counter[str] = field(default_factory=Counter)  # what was not -> how many

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "not_compared": dict(+self.not_compared)}


def installed_clients(parts: list[CheckedPart]) -> list[Client]:
    """Return the installed libraries for the datasets' common format.

    Raises UsageError if there are none, and for data that shardkit did not write.
    """
    for part in parts:
        if not part.dataset.ours:
            raise UsageError(
                "--client only checks data that shardkit wrote, and there is no manifest",
                path=part.dataset.path,
                fix="verify it without --client, or give the folder that has the manifest",
            )
    if not parts:
        return []
    format = parts[0].dataset.format
    clients = CLIENTS.get(format, ())
    if not clients:
        raise UsageError(
            f"verify --client does not support the format {format!r}",
            expected=", ".join(sorted(CLIENTS)),
            fix="verify it without --client",
        )
    found = [client for client in clients if all(map(_is_installed, client.modules))]
    if not found:
        first = clients[0]
        library = next(module for module in first.modules if not _is_installed(module))
        raise missing(first.extra, f"verify --client of the format {format!r}", library)
    return found


def _is_installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent package is not installed
        return False
    return spec is not None and spec.origin is not None  # not just a folder of that name


def importable(clients: list[Client]) -> tuple[dict[Client, dict[str, str]], list[str]]:
    """The libraries that can be imported, with their versions, and notes on those that cannot.

    Each is imported in a process of its own. Raises UsageError if all fail.
    """
    versions: dict[Client, dict[str, str]] = {}
    failed: list[UsageError] = []
    for client in clients:
        with _process({"client": client.name}) as process:
            try:
                versions[client] = process.receive()
            except WorkerError as error:
                words = f"{client.name} is installed but cannot be imported"
                fix = "install it again, or verify without --client"
                failed.append(UsageError(words, found=error.found or error.what, fix=fix))
    if failed and not versions:
        raise failed[0]
    return versions, [f"{error.what}, so it is not compared: {error.found}" for error in failed]


class _Unit(NamedTuple):
    """What the library opens in one call: one shard, or all of them, and the range of samples.

    `path` is for messages: for data at a URL, the library reads a copy. `shard` is the first one.
    """

    path: Path
    shard: int
    samples: range


def compare_client(part: CheckedPart, client: Client, report: ClientReport, meter: Meter) -> None:
    """Compare all samples of the undamaged shards.

    Problems go to the part's findings. If the data are at a URL, one shard at a time is copied to a
    temporary folder. Raises StorageError if there is not enough space for it.
    """
    dataset = part.dataset
    remote = isinstance(dataset.path, RemotePath)
    if client.whole and part.whole and part.all_readable and not remote:
        units = [_Unit(dataset.path, 0, range(len(dataset)))]
    else:
        starts = accumulate((dataset.extent(n)[0] for n in range(dataset.shards)), initial=0)
        every = [range(*ends) for ends in pairwise(starts)]
        units = [_Unit(dataset.shard_path(n), n, every[n]) for n in part.readable]
    report.not_compared["samples of damaged shards"] += part.samples - _count(units)
    extensions = (part.manifest.layout if part.manifest else {}).get("extensions", {})
    job = {
        "client": client.name,
        "format": dataset.format,
        "fields": dataset.schema.to_json(),
        "members": {name: field for field, names in extensions.items() for name in names},
    }
    comparison = _Comparison(part, client, report, meter)
    with _process(job) as process:
        for number, unit in enumerate(units):
            try:
                with _at_hand(part, unit) as comparison.dataset:
                    path = comparison.dataset.path / unit.path.relative_to(dataset.path)
                    process.send(os.path.abspath(path))
                    given = _samples(process, client.name, first=number == 0)
                    comparison.compare(unit, given)
            except WorkerError as error:
                comparison.add(error.located(path=unit.path), unit.shard)
                report.not_compared["samples"] += _count(units[number + 1 :])
                break


@contextmanager
def _at_hand(part: CheckedPart, unit: _Unit) -> Iterator[Dataset]:
    """A context with the dataset, in which the shard of the unit is a local file."""
    if not isinstance(part.dataset.path, RemotePath):
        yield part.dataset
        return
    with fs.temporary("shardkit-client-") as folder:
        yield _copied(part, unit.shard, folder)


def _copied(part: CheckedPart, shard: int, folder: Path) -> Dataset:
    """Return the dataset, moved to a local folder that has a copy of one of its shards."""
    files = (part.shards[shard].file, *part.shards[shard].beside)
    free, needed = shutil.disk_usage(folder).free, sum(file.bytes for file in files)
    if needed > free:
        raise StorageError(
            "there is not enough disk space to copy a shard for the library to read",
            path=part.dataset.shard_path(shard),
            expected=f"{needed:,} bytes",
            found=f"{free:,} bytes free in {folder.parent}",
            fix="free some space, or set the environment variable TMPDIR to another folder",
        )
    for file in files:
        path = folder / file.name
        fs.make_folder(path.parent)
        with fs.create(path) as copy:
            for block in open_source(part.dataset.path / file.name).blocks(_COPIED):
                fs.write(copy, [block])
    return part.dataset.at(lambda _: folder)


def _count(units: list[_Unit]) -> int:
    return sum(len(unit.samples) for unit in units)


class _Comparison:
    """Compares one dataset with what one library returns."""

    def __init__(
        self, part: CheckedPart, client: Client, report: ClientReport, meter: Meter
    ) -> None:
        self._part = part
        self.dataset = part.dataset  # what is read: the dataset, or a local copy
        self._client = client
        self._report = report
        self._meter = meter

    def add(self, problem: ShardkitError, shard: int, position: int | None = None) -> None:
        self._report.problems += 1
        self._part.add(problem, shard, position)

    def compare(self, unit: _Unit, given: Iterator[_Given]) -> None:
        """Compare samples in order, and after the first key that differs, by key.

        Raises WorkerError if the library's process has ended.
        """
        index, stop = unit.samples.start, unit.samples.stop
        by_key: dict[str | None, int] | None = None
        count = 0
        try:
            for key, fields in given:
                count += 1
                self._meter.add(1)
                self._meter.report()
                if by_key is None and index < stop and key in (None, self._key(index)):
                    self._compare_sample(index, fields)
                    self._report.not_compared["keys"] += key is None
                    index += 1
                    continue
                if by_key is None:
                    by_key = {self._key(number): number for number in range(index, stop)}
                number = by_key.pop(key, None)
                if number is not None:
                    self._compare_sample(number, fields)
                else:
                    words = f"{self._client.name} returns a sample that shardkit does not read"
                    self.add(SampleError(words, path=unit.path, key=key), unit.shard)
        except ShardkitError as error:
            self._report.not_compared["samples"] += max(len(unit.samples) - count, 0)
            if isinstance(error, WorkerError):
                raise
            self.add(error.located(path=unit.path), unit.shard)
        else:
            for number in range(index, stop) if by_key is None else by_key.values():
                self._add(number, "does not return a sample that shardkit reads")
        finally:
            self._report.samples += count

    def _key(self, index: int) -> str | None:
        return self._part.key_at(Location(0, *self._part.dataset.locate(index)))

    def _add(self, index: int, words: str, **about: Any) -> None:
        problem = SampleError(f"{self._client.name} {words}", key=self._key(index), **about)
        self.add(problem, *self._part.dataset.locate(index))

    def _compare_sample(self, index: int, given: dict[str, str]) -> None:
        schema = self._part.dataset.schema
        try:
            sample = self.dataset[index]
        except ShardkitError as error:
            return self.add(error, *self._part.dataset.locate(index))
        for name in dict.fromkeys((*schema, *given)):
            found = given.get(name)
            if name in sample:
                expected = summary(self._client.ours(schema[name], sample[name]))
                if found != expected:
                    about = {"expected": expected, "found": found or "no value"}
                    self._add(index, "returns a different value", field=name, **about)
            elif found is not None and (self._client.absent or name not in schema):
                words = "returns a value that the sample does not have"
                self._add(index, words, field=name, found=found)
            elif found is not None:
                self._report.not_compared[f"absent values of {name!r}"] += 1
        return None


@contextmanager
def _process(job: dict[str, Any]) -> Iterator[JsonProcess]:
    """A process with the library, with an empty folder for caches, and offline."""
    with fs.temporary("shardkit-client-") as folder:
        caches = dict.fromkeys(("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE"), str(folder))
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        command = [sys.executable, str(SCRIPT)]
        with JsonProcess(command, _SILENT, **caches, **offline) as process:
            process.send(job)
            yield process


def _samples(process: JsonProcess, name: str, *, first: bool) -> Iterator[_Given]:
    """Yield the key and the summaries of each sample in the next unit.

    Raises DamagedError if the library raised an error, WorkerError if its process ended.
    """
    try:
        if first:
            process.receive()  # the versions
        while isinstance(line := process.receive(), list):
            yield line[0], line[1]
    except WorkerError as error:
        raise WorkerError(
            f"the process of {name} ended while reading",
            found=": ".join(filter(None, (error.what, error.found))),
            fix="read it with the library yourself, to see whether the library or the shard fails",
        ) from error
    if "error" in line:
        raise DamagedError(f"{name} cannot read what shardkit wrote", found=line["error"])
