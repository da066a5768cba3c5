"""The whole contract of a format: a reader of one shard, a writer of one shard.

To add a format, write one module with these three classes, export `FORMAT`, add a row to the table
in `shardkit.formats`, and run `shardkit.testing.FormatContract` on it (docs/adding-a-format.md).

Reader. `len(reader)` samples; `reader[i]` for 0 <= i < len gives a dict with `__key__` and the
fields of `reader.schema`. The caller owns the values; their Python types are those that
`shardkit.schema` names, the same in every format. A field that a sample does not have is absent,
not None. Readers are thread-safe and deterministic, may be pickled (a pickle carries the path,
never an open file) and used after a fork. `close()` may be called twice and drops our references
only: a value that was given out stays good. Reading a closed reader raises ValueError.

Writer. It is given a path that does not exist, in a folder that does (a shard that is a folder
makes its own), and creates that file and, if it likes, others whose names begin with the path's
stem, beside it or, for what no other reader looks for, in the folder `manifest.FOLDER` beside it.
`write(sample)` takes samples that `Schema.check` has passed. It raises SampleError for an image
that is none (`codecs.image.checked`) and for a key that it cannot store, and is then as it was
before. It returns False, having written nothing, if the sample would take the shard over
`max_bytes`; a shard without a sample takes any. `close()` completes the files. A writer knows
nothing of final names, syncing, retries, checksums or progress: the engine does all that, and
removes what a failed writer leaves. The same calls give the same bytes.

A format that has `join` lets parallel tasks make one shard together, for those who expect one file.

Errors are ours (`shardkit.errors`) and name the key; the engine adds path and shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from shardkit.sample import Sample
from shardkit.schema import FieldType, Schema

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.manifest import Manifest


class ShardReader(ABC):
    """One shard, open for reading.

    `layout` is what `Format.open` takes to open the shard again without searching it.
    """

    schema: Schema
    layout: dict[str, Any]
    temporary_bytes: int = 0  # of files that are there as long as the shard is open
    key_hashes: npt.NDArray[np.int64] | None = None  # `hash` of all keys, if they were searched for

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, position: int) -> Sample: ...

    @abstractmethod
    def close(self) -> None: ...


class ShardWriter(ABC):
    """One shard, being written.

    `encoded` counts, by reason, the images that could not be stored as they were: it is empty for
    all formats that hold any image. `keys` counts, by what they have ("blanks"), the keys that
    other readers of the format stumble over.
    """

    encoded: Mapping[str, int] = MappingProxyType({})
    keys: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def write(self, sample: Sample) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...


@runtime_checkable
class KnowsSizes(Protocol):
    """A reader that knows how long its values are without reading them."""

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        """Stored bytes of the field in each sample that has it, in order."""


@runtime_checkable
class ReadsFields(Protocol):
    """A reader that can leave fields out, and the bytes of those unread."""

    def read_fields(self, position: int, fields: Collection[str]) -> Sample:
        """The sample with its key and, of those it has, these fields alone."""


@runtime_checkable
class KeepsJsonText(Protocol):
    """A reader that can give JSON as the text that is stored, to pass through unchanged."""

    def stored(self, position: int) -> Sample:
        """The sample as `reader[position]` gives it, with JSON values as `JsonText`."""


@runtime_checkable
class KnowsKeys(Protocol):
    """A reader that has all its keys at hand."""

    def keys(self) -> list[str]:
        """The key of every sample, in order."""


@runtime_checkable
class ReadsRows(Protocol):
    """A reader that gives arrays and keys of many samples in one call."""

    def read_rows(
        self, field: str, positions: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> bool:
        """Write the field's array in each of the samples into `out`, number n into `out[n]`.

        Values are cast to the type of `out`. False, with nothing written, where the shard or one of
        these samples cannot be read so: one by one they then tell what is wrong, if anything is.
        """

    def read_keys(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """The keys of the samples."""


class Format(ABC):
    """What the engines ask of a format."""

    name: str
    abilities: tuple[str, ...]  # for people: what it reads, writes and carries
    raw_images: str = "array"  # what stores decoded pixels: arrays, or "ppm": image fields
    encodes_images: bool = False  # it cannot hold all kinds, so that storing some takes long
    layout_types: Mapping[str, Any] = MappingProxyType({})  # name -> type, as `checked` takes them
    join_pads: bool = False  # a joined shard may be larger than its parts together

    @abstractmethod
    def open(self, path: Path, layout: dict[str, Any] | None = None) -> ShardReader:
        """Open one shard. `layout` is what `layout()` gave when it was made; None if foreign.

        A foreign shard's reader has its `schema` in its own `layout`. It may have there `classes`,
        field -> names of its values; `ignored`, what it passes over -> how often; and `unusable`,
        a field that it cannot read -> the error that says why; `ours`, where the shard says that
        shardkit wrote it; and `guessed`, fields that are not optional as far as a few samples tell,
        which `KeepsJsonText.stored` does not rely on.
        """

    @abstractmethod
    def create(
        self,
        path: Path,
        schema: Schema,
        max_bytes: int | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> ShardWriter:
        """Begin one shard at `path`; `max_bytes` bounds its size, None leaves it open.

        `classes` names the values of fields, for formats that store such names.
        """

    @abstractmethod
    def layout(self, schema: Schema) -> dict[str, Any]:
        """What a reader needs beside the bytes, for the manifest: at least the schema, as JSON.

        What it has beside that is named in `layout_types`: a manifest may be damaged.
        Raises FormatError for a schema that the format cannot carry.
        """

    @abstractmethod
    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        """Bounds in bytes of samples with `payload` bytes in up to `fields` fields each.

        For planning alone: where a rare sample (a very long key) is larger, shards still keep
        their limit.
        """

    def notes(self, schema: Schema) -> list[str]:
        """What a user may not expect of how this schema is stored; said before the work starts."""
        return []

    def carried(self, kind: FieldType, value: Any) -> Any:
        """What a value of a field becomes in this format: itself, but for images encoded anew."""
        return value

    def shard_stem(self, number: int, shards: int) -> str:
        """The name, without suffix, of one of so many shards."""
        return f"shard-{number:06d}"

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        """Write what else belongs into a finished dataset's folder; returns those files."""
        return []

    def complete_splits(self, folder: Path, names: list[str]) -> list[Path]:
        """Write what else belongs into a folder of splits with these names; returns those files."""
        return []


@runtime_checkable
class Joins(Protocol):
    """A format that can make one shard of several."""

    def join(
        self,
        path: Path,
        parts: Sequence[Path],
        schema: Schema,
        classes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Write a shard at `path` with the samples of the shards `parts`, one after the other."""


@runtime_checkable
class ReadsUnmapped(Protocol):
    """A format whose shards can be read without mapping them, as streaming does."""

    def open_unmapped(self, path: Path, layout: dict[str, Any] | None = None) -> ShardReader:
        """As `open`, but no file of the shard is mapped: values are read when they are asked for.

        A shard that is cut while it is open gives one of our errors, where a mapped page would end
        the process; one that is removed or replaced is read on as it was. What is small (tables,
        offsets, keys) may be read once and kept; payloads are not.
        """
