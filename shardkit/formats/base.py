"""The whole contract of a format: a reader of one shard, a writer of one shard.

To add a format, write one module with these three classes and `FORMAT`, declare it in
`shardkit.formats` or by an entry point, and run `shardkit.testing.FormatContract` on it
(docs/adding-a-format.md).

Reader. To write: `__len__`, and `read(position, fields, json_text)`, which gives a dict with
`__key__` and those fields of `reader.schema` that are asked for and that the sample has: a field
that it does not have is absent, not None. The caller owns the values; their Python types are those
that `shardkit.schema` names, the same in every format. Bytes are read through a `ByteSource`.
Readers are thread-safe and deterministic, and may be used after a fork. The base class does the
rest: `reader[i]` and `reader.sample(...)` check the position, and turn whatever `read` raises into
an error of ours that names path, position, key and field; `close()` drops our references only, as
another thread may be reading; a pickle carries path and layout, never an open file.

Writer. To write: `write(sample)` and `finish()`. It is given a path that does not exist, in a
folder that does (a shard that is a folder makes its own), and creates that file and, if it likes,
others whose names begin with the path's stem, beside it or, for what no other reader looks for, in
the folder `manifest.FOLDER` beside it. `write` takes samples that `Schema.check` has passed. It
raises SampleError for an image that is none (`codecs.image.checked`) and for a key that it cannot
store, and is then as it was before. It returns False, having written nothing, if the sample would
take the shard over `spec.max_bytes`; a shard without a sample takes any. `finish` completes the
files. A writer knows nothing of final names, syncing, retries, checksums or progress: the engine
does all that, and removes what a failed writer leaves. The same calls give the same bytes.

A format that has `join` lets parallel tasks make one shard together, for those who expect one file.

Errors are ours (`shardkit.errors`) and name the key; the engine adds path and shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from shardkit import storage
from shardkit.errors import SampleError, ShardkitError, UsageError
from shardkit.sample import Sample
from shardkit.schema import FieldType, Schema

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.byte_source import ByteSource
    from shardkit.manifest import Manifest

KEY = "__key__"  # of every sample


class ShardReader(ABC):
    """One shard, open for reading."""

    temporary_bytes: int = 0  # of files that are there as long as the shard is open
    in_memory: int = 0  # bytes that the open shard takes in memory
    key_hashes: npt.NDArray[np.int64] | None = None  # `key_hash` of all, if they were searched for
    closed = False

    def __init__(
        self, path: Path, layout: dict[str, Any], source: ByteSource | None = None
    ) -> None:
        """`layout` is what `Format.open` takes to open the shard again without searching it."""
        self._bytes = source
        self.path = path
        self.layout = layout
        self.schema = Schema.from_json(layout["schema"])

    @property
    def source(self) -> ByteSource:
        """The bytes of the shard; raises ValueError once it is closed."""
        if self._bytes is None:
            raise ValueError(f"{self.path} is closed")
        return self._bytes

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        """The sample with its key and, of those it has, these fields: all if None.

        With `json_text` JSON values may come as `JsonText`, to be written on unchanged. 0 <=
        position < len(self). May raise anything where the data are damaged.
        """

    def offset(self, position: int, field: str) -> int | None:
        """The byte of the file at which a value begins, for errors; None where that is unknown."""
        return None

    def __getitem__(self, position: int) -> Sample:
        return self.sample(position)

    def sample(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        """As `read`, for any position, with errors of ours.

        Raises IndexError, ValueError if the reader is closed, and else SampleError, DamagedError or
        another ShardkitError that names path, position, key and field.
        """
        if not 0 <= position < len(self):
            raise IndexError(f"{self.path} has {len(self)} samples, not a position {position}")
        try:
            return self.read(position, fields, json_text)
        except Exception as error:
            found = self._named(error, position, fields, json_text)
            try:
                raise found from found.__cause__
            finally:
                del found  # its traceback would hold this frame, and so the open shard, in a cycle

    def _named(
        self, error: Exception, position: int, fields: Collection[str] | None, json_text: bool
    ) -> Exception:
        """The error to raise for what `read` raised: fields are read one by one to find which."""
        if self.closed:
            return ValueError(f"{self.path} is closed")
        if isinstance(error, MemoryError | Warning) or storage.shortage(error):
            return storage.unreadable(error, self.path, position)
        key, culprit = None, None
        for field in (KEY, *(name for name in self.schema if fields is None or name in fields)):
            try:
                key = self.read(position, () if field == KEY else (field,), json_text)[KEY]
            except Exception as again:
                error, culprit = again, field
                break
        try:
            if not isinstance(error, ShardkitError | OSError):
                error = self._damaged(error, position, culprit)
            if isinstance(error, ShardkitError):
                error = error.located(path=self.path, position=position, key=key, field=culprit)
            return storage.unreadable(error, self.path, position)
        finally:
            del error  # as in `sample`

    def _damaged(self, cause: Exception, position: int, field: str | None) -> SampleError:
        """The error for a value that could not be decoded."""
        kind, offset = None, None
        if field is not None:
            kind = self.schema.get(field)
            with contextlib.suppress(Exception):
                offset = self.offset(position, field)
        expected = "a key" if kind is None else kind.python
        error = SampleError(f"a value is damaged: {cause}", offset=offset, expected=expected)
        error.__cause__ = cause
        return error

    def keys(self) -> list[str]:
        """The key of every sample, in order."""
        return self.read_keys(np.arange(len(self)))

    def read_keys(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """The keys of the samples at these positions."""
        return [self.sample(position, ())[KEY] for position in positions.tolist()]

    def read_values(self, field: str, positions: npt.NDArray[np.int64]) -> list[Any]:
        """The field's value in each of the samples at these positions; None where it is absent."""
        return [self.sample(position, (field,)).get(field) for position in positions.tolist()]

    def read_rows(
        self, field: str, positions: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> bool:
        """Write the field's array in each of the samples into `out`, number n into `out[n]`.

        Values are cast to the type of `out`. False, with nothing written, where the shard or one of
        these samples cannot be read so; reading them one by one then names the error, if any.
        """
        return False

    def sizes(self, field: str) -> npt.NDArray[np.int64] | None:
        """Stored bytes of the field in each sample that has it, in order, without reading these.

        None where the shard does not have them.
        """
        return None

    def spans(self) -> npt.NDArray[np.int64] | None:
        """Where the values of each sample begin and end in the shard's file: int64 (samples, 2).

        Of a sample whose values share bytes with others' these are theirs too; (0, 0) where it has
        none. None where the format cannot tell.
        """
        return None

    def close(self) -> None:
        """Drop what is open; may be called twice. What was given out stays good."""
        self.closed = True
        self._bytes = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.layout)


def key_bytes(key: str) -> bytes:
    """The key in UTF-8; raises SampleError where that is impossible."""
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise SampleError("the key is not valid Unicode", key=ascii(key)) from None


def not_stored(error: Exception, value: Any, key: str, field: str) -> SampleError:
    """The error for a value that could not be encoded: a lone surrogate in text, say."""
    size = f" of length {len(value):,}" if isinstance(value, bytes | str | list) else ""
    found = type(value).__name__ + size if size else f"{value!r:.60}"
    return SampleError(f"the value cannot be stored: {error}", key=key, field=field, found=found)


def unforeseen(name: str, what: str = "field") -> SampleError:
    """The error for a field of a foreign sample that none has of those that told the schema."""
    return SampleError(
        f"the sample has a {what} {name!r}, in none of those that were looked at on opening",
        field=name,
        fix="leave such samples out with --on-error skip; or write all with shardkit.create, and a"
        " schema that has it",
    )


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """What a shard is to hold.

    max_bytes: bound of its size; None for no bound.
    classes: the names of the values of fields, for formats that store them.
    beside: for which other loaders files are to lie beside it, of those in `Format.beside`.
    """

    schema: Schema
    max_bytes: int | None = None
    classes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    beside: Sequence[str] = ()


class ShardWriter(ABC):
    """One shard, being written.

    `encoded` counts, by reason, the images that could not be stored as they were: it is empty for
    all formats that hold any image. `keys` counts, by what they have ("blanks"), the keys that
    other readers of the format have trouble with.
    """

    encoded: Mapping[str, int] = MappingProxyType({})
    keys: Mapping[str, int] = MappingProxyType({})
    closed = False

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self.path = path
        self.spec = spec

    @abstractmethod
    def write(self, sample: Sample) -> bool:
        """Add a sample; False if the shard is full."""

    @abstractmethod
    def finish(self) -> None:
        """Complete and close the files; called once, also after an error."""

    def close(self) -> None:
        """Complete the shard; may be called twice."""
        if not self.closed:
            self.closed = True
            self.finish()


class Format:
    """What the engines ask of a format.

    reader: the class of its readers, or a function that makes one: see `open`.
    writer: the same for writers.
    """

    name: str
    abilities: tuple[str, ...]  # for people: what it reads, writes and carries
    reader: Callable[[Path, dict[str, Any] | None], ShardReader]
    writer: Callable[[Path, ShardSpec], ShardWriter]
    raw_images: str = "array"  # what stores decoded pixels: arrays, or "ppm": image fields
    encodes_images: bool = False  # it cannot hold all kinds, so that storing some takes long
    layout_types: Mapping[str, Any] = MappingProxyType({})  # name -> type, as `checked` takes them
    largest: int | None = None  # bytes of a shard at most, whatever a user allows
    join_pads: bool = False  # a joined shard may be larger than its parts together
    grouped: bool = False  # to read a sample is to read those around it: row groups
    optional_matters: bool = False  # optional fields are stored otherwise than others
    any_as_bytes: bool = False  # a field of one type here and another there can be read as bytes
    # Loaders that want files beside shards (`--beside`) -> whether a single file can have them.
    beside: Mapping[str, bool] = MappingProxyType({})

    def open(self, path: Path, layout: dict[str, Any] | None = None) -> ShardReader:
        """Open one shard. `layout` is what `layout()` gave when it was made; None if foreign.

        A foreign shard's reader has its `schema` in its own `layout`. It may have there `classes`,
        field -> names of its values; `ignored`, what it passes over -> how often; and `unusable`,
        a field that it cannot read -> the error that says why; `ours`, where the shard says that
        shardkit wrote it; and `guessed`, fields that are not optional as far as a few samples tell,
        which `read` does not rely on with `json_text`; and `convention`, in words, whose way of
        storing samples it found.
        """
        return self.reader(path, layout)

    def create(self, path: Path, spec: ShardSpec) -> ShardWriter:
        """Begin one shard at `path`."""
        return self.writer(path, spec)

    def layout(self, schema: Schema) -> dict[str, Any]:
        """What a reader needs beside the bytes, for the manifest: at least the schema, as JSON.

        What it has beside that is named in `layout_types`: a manifest may be damaged.
        Raises FormatError for a schema that the format cannot hold.
        """
        return {"schema": schema.to_json()}

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        """Bounds in bytes of samples with `payload` bytes in up to `fields` fields each.

        For planning alone: where a rare sample (a very long key) is larger, shards still keep
        their limit.
        """
        return payload + 64 * (fields + 1)

    def listed(self, folder: Path) -> list[str] | None:
        """The shards that the file `Declaration.listing` of a folder names, relative to it.

        None for a folder that is no dataset of the format.
        """
        return None

    def check_listed(self, folder: Path, names: Sequence[str]) -> Iterator[ShardkitError]:
        """What is wrong with foreign shards, as `Declaration.listing` describes them, if it does.

        For `verify`: sizes and hashes of the folder's shards with these names.
        """
        yield from ()

    def spec(
        self, schema: Schema, max_bytes: int | None, classes: Mapping[str, Sequence[str]]
    ) -> ShardSpec:
        """What a shard of a conversion is to hold; UsageError for a bound over `largest`."""
        if self.largest and max_bytes and max_bytes > self.largest:
            raise UsageError(
                f"a shard of {self.name} cannot be that large",
                expected=f"at most {self.largest:,} bytes",
                found=f"{max_bytes:,}",
                fix="give a smaller --shard-size",
            )
        return ShardSpec(schema, max_bytes, classes)

    def notes(self, schema: Schema) -> list[str]:
        """What may surprise a user in how this schema is stored; shown before the work starts."""
        return []

    def carried(self, kind: FieldType, value: Any) -> Any:
        """What a value of a field becomes in this format: itself, but for images re-encoded."""
        return value

    def shard_stem(self, number: int, shards: int) -> str:
        """The name, without suffix, of one of so many shards."""
        return f"shard-{number:06d}"

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        """Write what else belongs into a finished dataset's folder; returns those files."""
        return []

    def complete_splits(self, folder: Path, splits: Mapping[str, Manifest]) -> list[Path]:
        """Write what else belongs into a folder of these splits, by name; returns those files."""
        return []


@runtime_checkable
class Joins(Protocol):
    """A format that can make one shard of several."""

    def join(self, path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
        """Write a shard at `path` with the samples of the shards `parts`, one after the other."""
