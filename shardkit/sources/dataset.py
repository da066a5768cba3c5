"""An existing dataset of any format as a source; stored values are passed on unchanged."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from time import time_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shardkit.dataset.dataset import Dataset, read_key_table
from shardkit.errors import SampleError, ShardkitError, SourceError
from shardkit.formats import FORMATS, get_format
from shardkit.formats.base import ShardReader
from shardkit.formats.columns import samples_of
from shardkit.helpers.indices import array, compact, digest, pick
from shardkit.helpers.mapped import MAX_IN_MEMORY, Runs, Sizes, computed, running_sum
from shardkit.helpers.prefetch import in_threads
from shardkit.options import ALL_FIELDS
from shardkit.sample import Sample, key_hash
from shardkit.schema import Bool, Float, Int, Text
from shardkit.sources.base import Document, Source
from shardkit.sources.files import Planned, refuse_changed
from shardkit.storage import byte_source, fs
from shardkit.storage.checksums import PIECE
from shardkit.storage.page_cache import MemoryCache
from shardkit.storage.pages import Pages
from shardkit.storage.remote.path import RemotePath

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from shardkit.sources.base import Indices


_REQUESTS = 64  # concurrent, if each sample is one request
_TABLES = 64 << 20  # bytes of pages in memory then
_LARGE = 1 << 15  # bytes of a sample; one request takes as long as reading about a megabyte
_CHUNK, _CHUNK_BYTES = 1 << 14, 64 << 20  # samples whose small fields are read at a time
_FILES = 8  # local shards whose keys are read concurrently
_RUN = 64  # shards whose status a thread queries in sequence


class DatasetSource(Source):
    """The samples of a dataset, or those at `indices`."""

    _by_columns = False  # whether `documents` may read numbers and text in columns

    def __init__(
        self,
        dataset: Dataset,
        indices: range | Indices | None = None,
        key_table: tuple[Path, str, str] | None = None,
        prefixes: Sequence[str] | None = None,
        planned: Sequence[Planned] = (),
    ) -> None:
        """`key_table` is that of the larger dataset that this one is a part of.

        It is read lazily, as pickling it with each task would send it to the workers repeatedly.
        `prefixes` are prepended to the keys of each shard; the default makes keys unique if needed.
        `planned`, the status of each shard, is set by `fingerprint`.
        """
        super().__init__()
        self._planned = planned
        self._view = ""  # digest that distinguishes views of the same dataset
        if dataset.indices is not None and indices is None:
            indices, self._view = dataset.indices, digest(dataset.indices)
        self._dataset = dataset = dataset.whole
        self._indices = indices
        self._prefixes = _prefixes(dataset, self) if prefixes is None else prefixes
        self.safe_keys = bool(dataset.manifest and dataset.manifest.recipe.get("safe_keys"))
        self.guessed = dataset.guessed
        self.schema = dataset.schema.with_optional(self.guessed)
        self.others, self.problems = dataset.unusable, dataset.problems
        self.ignored = dict(dataset.ignored)
        self.class_names = dataset.class_names
        self._key_table = key_table or dataset.key_table

    def __len__(self) -> int:
        return len(self._dataset if self._indices is None else self._indices)

    def __getitem__(self, index: int) -> Sample:
        shard, position = self._dataset.locate(self._global(index))
        reader = self._reader(shard)
        fields = None if self.selection == ALL_FIELDS or self.guessed else self.schema
        try:
            sample = reader.sample(position, fields, json_text=True)
        except SampleError:  # already names the sample
            raise
        except Exception as error:
            found = fs.unreadable(error, self._dataset.shard_path(shard), position)
            raise found from found.__cause__
        if self._prefixes:
            sample["__key__"] = self._prefixes[shard] + sample["__key__"]
        return sample if self.selection == ALL_FIELDS else self.selected(sample)

    def sizes(self) -> Sizes:
        every, chosen = self._means, self._indices
        if chosen is not None:
            return computed(len(chosen), np.int64, lambda piece: every[array(chosen[piece])])
        return np.asarray(every) if 8 * len(every) <= MAX_IN_MEMORY else every

    def select(self, indices: Indices) -> DatasetSource:
        if self._indices is not None:
            indices = array(pick(self._indices, indices))
        starts, ends = self._starts, self._means.ends
        shard_of = np.searchsorted(ends, indices, side="right")
        used, number = np.unique(shard_of, return_inverse=True)
        part = self._dataset.part(used.tolist())
        part_starts = np.concatenate([[0], (ends[used] - starts[used]).cumsum()])
        moved = indices - starts[shard_of] + part_starts[number]
        prefixes = [self._prefixes[shard] for shard in used.tolist()] if self._prefixes else ()
        planned = [self._planned[shard] for shard in used.tolist()] if self._planned else ()
        source = DatasetSource(part, compact(moved), self._key_table, prefixes, planned)
        source.requests = _REQUESTS if source._is_scattered_remotely() else 0
        if self.selection != ALL_FIELDS:
            source.narrow(self.selection)
        return source

    @cached_property
    def _means(self) -> Runs:
        """For each sample of the dataset, the mean sample size of its shard."""
        extents = [self._dataset.extent(shard) for shard in range(self._dataset.shards)]
        every = np.array(extents, np.int64).reshape(-1, 2)
        return Runs(every[:, 1] // np.maximum(every[:, 0], 1), every[:, 0].cumsum())

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """The index of the first sample of each shard."""
        return self._means.ends - self._means.counts

    @cached_property
    def is_scattered(self) -> bool:  # type: ignore[override]
        return self._indices is not None and bool((np.diff(array(self._indices)) < 0).any())

    def nearby(self, first: int, last: int) -> Sequence[int]:
        if self._indices is None:
            return range(first, last)
        found: list[int] = (first + np.argsort(array(self._indices[first:last]))).tolist()
        return found

    @property
    def _is_remote(self) -> bool:
        """Whether samples are in an object store, one by one."""
        remote = isinstance(self._dataset.path, RemotePath)
        return remote and not get_format(self._dataset.format).grouped

    def _is_scattered_remotely(self) -> bool:
        """Return whether consecutive samples are far apart in an object store.

        Then reading the 1 MiB pieces around each sample would read most pieces repeatedly.
        """
        if self._indices is None or not self._is_remote:
            return False
        ends = running_sum(self._means)[array(self._indices) + 1]
        read = PIECE * np.count_nonzero(np.diff(ends // PIECE))  # estimate
        size = sum(self._dataset.extent(shard)[1] for shard in range(self._dataset.shards))
        return bool(size > byte_source.LATEST * PIECE and read > 2 * self.sizes().sum())

    def _is_large(self) -> bool:
        """Whether samples are in a store, and so large that reading single values is faster."""
        return self._is_remote and int(self.sizes().sum()) > _LARGE * len(self)

    def _reader(self, shard: int) -> ShardReader:
        if not self.requests:
            return self._dataset.reader(shard)
        dataset, locks = self._apart
        with locks[shard]:  # only one of many threads opens it
            return dataset.reader(shard)

    @cached_property
    def _apart(self) -> tuple[Dataset, list[threading.Lock]]:
        """The dataset opened for reading single byte ranges, and a lock for each shard."""
        found = copy.copy(self._dataset)
        assert isinstance(found.path, RemotePath)
        found.path = found.path.through(Pages(MemoryCache(_TABLES), scattered=True))
        return found, [threading.Lock() for _ in range(found.shards)]

    def __getstate__(self) -> dict[str, Any]:
        made = ("_apart", "_means", "_starts", "is_scattered")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def skimmed(self) -> DatasetSource:
        found = copy.copy(self)
        if self._is_large():
            found.requests = _REQUESTS
        else:
            found._by_columns = not self.guessed
        return found

    def documents(self) -> Iterator[Document]:
        kinds = (Int, Float, Bool, Text)
        if not self._by_columns or not all(isinstance(k, kinds) for k in self.schema.values()):
            yield from super().documents()
            return
        every = range(len(self)) if self._indices is None else self._indices
        most = max(min(_CHUNK, _CHUNK_BYTES * len(self) // max(int(self.sizes().sum()), 1)), 1)
        for first in range(0, len(every), most):
            numbers = array(every[first : first + most])
            columns = self._dataset.read_many(numbers, self.schema)
            if columns is None:
                run = np.arange(first, first + len(numbers))
                yield from Source.documents(self.select(run))
                continue
            for index, sample in enumerate(samples_of(columns, self.schema), first):
                if self._prefixes:
                    shard, _ = self._dataset.locate(self._global(index))
                    sample["__key__"] = self._prefixes[shard] + sample["__key__"]
                yield Document(self.name(index), sample, 0)

    def all_keys(self) -> Sequence[str]:
        if self._is_large():
            return super().all_keys()
        keys: list[str] = []
        try:
            for shard in range(self._dataset.shards):
                prefix = self._prefixes[shard] if self._prefixes else ""
                keys += [prefix + key for key in self._dataset.keys_of(shard)]
        except ShardkitError:  # the conversion will meet and report the error
            return super().all_keys()
        return keys if self._indices is None else [keys[n] for n in array(self._indices).tolist()]

    def fingerprint(self) -> dict[str, str] | None:
        dataset = self._dataset
        if dataset.temporary:
            return None
        files, times = xxhash.xxh3_128(), xxhash.xxh3_128()
        began = time_ns()
        planned = []
        if dataset.manifest_path is not None:
            files.update(fs.read(dataset.manifest_path))
        runs = [range(dataset.shards)[n : n + _RUN] for n in range(0, dataset.shards, _RUN)]
        threads = min(len(runs), _REQUESTS)
        found = in_threads(lambda run: [*map(dataset.stat, run)], runs, threads, 1) if runs else ()
        for shard, about in enumerate(itertools.chain.from_iterable(found)):
            files.update(f"{dataset.shard_name(shard)}\0{about.st_size}\0".encode())
            times.update(f"{about.st_mtime_ns}\0".encode())
            planned.append(Planned(about.st_mtime_ns, about.st_ino, began))
        self._planned = planned
        files.update(self._view.encode())
        return {"files": files.hexdigest(), "times": times.hexdigest()}

    def check_unchanged(self) -> None:
        for shard, planned in enumerate(self._planned):
            path = str(self._dataset.shard_path(shard))
            refuse_changed(path, self._dataset.stat(shard), planned, SourceError)

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        return self._dataset.tokenizer()

    def name(self, index: int) -> str:
        shard, position = self._dataset.locate(self._global(index))
        return f"{self._dataset.shard_name(shard)}:{position}"

    def original(self, index: int, key: str) -> str | None:
        return read_key_table(*self._key_table).get(key) if self._key_table else None

    def _global(self, index: int) -> int:
        return index if self._indices is None else int(self._indices[index])


def _prefixes(dataset: Dataset, source: DatasetSource) -> Sequence[str]:
    """Key prefixes for shards without a manifest that share keys, such as numbers from zero.

    The prefix is the name of the shard; it is added to all keys of all shards, with a note.
    """
    if dataset.manifest is not None or dataset.shards < 2:
        return ()
    threads = _REQUESTS if isinstance(dataset.path, RemotePath) else _FILES
    found = in_threads(lambda n: _key_hashes(dataset, n), range(dataset.shards), threads, 1)
    hashes = np.concatenate([*found])
    hashes.sort()
    alike = np.concatenate([[False], hashes[1:] == hashes[:-1], [False]])
    repeated = int(np.count_nonzero(alike[1:] | alike[:-1]))
    if not repeated:
        return ()
    names = [dataset.shard_name(shard) for shard in range(dataset.shards)]
    stems = [_stem(name, FORMATS[dataset.format].suffixes) for name in names]
    prefixes = [f"{n}/" for n in (stems if len(set(stems)) == len(stems) else names)]
    source.notes = (
        f"{repeated:,} samples have the key of a sample in another shard: all keys are changed to"
        f" SHARD/KEY, and begin with the shard's name, such as {prefixes[0]}",
    )
    return prefixes


def _key_hashes(dataset: Dataset, shard: int) -> npt.NDArray[np.int64]:
    """Return the distinct key hashes of a shard; empty if its keys cannot be read separately."""
    found = dataset.key_hashes.get(shard)
    if found is not None:
        return np.unique(found)
    dataset.reader(shard)  # raises the error of a shard that cannot be opened
    try:
        keys = {*dataset.keys_of(shard)}
    except ShardkitError:  # the conversion will meet and report the error
        keys = set()
    return np.array([key_hash(key) for key in keys], np.uint64).view(np.int64)


def _stem(name: str, suffixes: Sequence[str]) -> str:
    found = [suffix for suffix in suffixes if name.lower().endswith(suffix)]
    return name[: -max(map(len, found), default=0) or None]
