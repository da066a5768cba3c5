"""Base classes of formats: a reader and a writer for one shard. The contract is in `api`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shardkit.codecs.array import load_column
from shardkit.codecs.media import check
from shardkit.errors import DamagedError, SampleError, ShardkitError, UsageError, drop_option
from shardkit.helpers import os_errors
from shardkit.sample import Sample, UnsupportedError
from shardkit.schema import Array, Bytes, Encoded, FieldType, Images, Json, Schema
from shardkit.storage import fs

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.metadata.manifest import Manifest
    from shardkit.storage.blobs import Blobs
    from shardkit.storage.byte_source import ByteSource

KEY = "__key__"  # the entry of every sample that holds its key


# Values of one field: an array with a row per sample, bytes of different lengths, or a list, in
# which None stands for a value that a sample does not have. Arrays without dimensions are a list.
Column: TypeAlias = "npt.NDArray[Any] | Blobs | list[Any]"
Columns: TypeAlias = "dict[str, Column]"  # by field; that of KEY is a list of str


class Ranges(NamedTuple):
    """Where some columns of samples are in the file of a shard, and how they are decoded.

    offsets, sizes: int64, (ranges per sample, samples): byte ranges of `source`; a size of
        `blobs.ABSENT` for a value that does not exist.
    decode: turns what was read, a `Blobs` for each row of `offsets`, into columns. It is equal for
        shards that are decoded alike, whose samples are then decoded together. It may raise any
        exception if the data are damaged, or not suitable.
    known: the columns that need not be read, such as keys made of positions.
    """

    source: ByteSource
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    decode: Callable[[list[Blobs]], Columns]
    known: Mapping[str, Column] = MappingProxyType({})


def decoded_column(kind: FieldType, values: Blobs) -> Column:
    """Decode values that are bytes, `.npy` files, JSON or other text, as their type says.

    Raises ValueError for a damaged one.
    """
    if isinstance(kind, Bytes):
        return values
    if isinstance(kind, Array):
        return load_column(values, kind.optional)
    return values.decoded(_json, kind.optional) if isinstance(kind, Json) else values.texts()


def _json(data: bytes) -> Any:
    return json.loads(data.decode())  # of bytes, it would guess the encoding


class ShardReader(ABC):
    """One shard, open for reading."""

    temporary_bytes: int = 0  # size of temporary files that exist while the shard is open
    in_memory: int = 0  # bytes of memory that the open shard uses
    key_hashes: npt.NDArray[np.int64] | None = None  # of all keys, if opening computed them
    closed = False

    def __init__(
        self, path: Path, layout: dict[str, Any], source: ByteSource | None = None
    ) -> None:
        """`layout` lets `Format.open` open the shard again without scanning it."""
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
        """Return the sample: its key, and those of `fields` that it has; all fields if None.

        With `json_text`, JSON values may be returned as `JsonText`, so that they can be written
        unchanged. 0 <= position < len(self). May raise any exception if the data are damaged.
        """

    def offset(self, position: int, field: str) -> int | None:
        """Return the byte offset of a value in the file, for errors; None if it is unknown."""
        return None

    def __getitem__(self, position: int) -> Sample:
        return self.sample(position)

    def sample(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        """Like `read`, but checks the position and raises errors of shardkit.

        Raises IndexError for an invalid position, ValueError if the reader is closed, and otherwise
        SampleError, DamagedError or another ShardkitError that names path, position, key and field.
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
                del found  # its traceback refers to this frame: a cycle that keeps the shard open

    def _named(
        self, error: Exception, position: int, fields: Collection[str] | None, json_text: bool
    ) -> Exception:
        """Return the error to raise for an exception from `read`, with the field that causes it."""
        if self.closed:
            return ValueError(f"{self.path} is closed")
        if isinstance(error, MemoryError | Warning) or os_errors.shortage(error):
            return fs.unreadable(error, self.path, position)
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
            return fs.unreadable(error, self.path, position)
        finally:
            del error  # as in `sample`

    def _damaged(self, cause: Exception, position: int, field: str | None) -> SampleError:
        """Return the error for a value that cannot be decoded."""
        kind, offset = None, None
        if field is not None:
            kind = self.schema.get(field)
            with contextlib.suppress(Exception):
                offset = self.offset(position, field)
        expected = "a key" if kind is None else kind.python
        what = "cannot be kept" if isinstance(cause, UnsupportedError) else "is damaged"
        error = SampleError(
            f"a value {what}: {cause}",
            offset=offset,
            expected=expected,
            found=_text_around(cause),
            fix=None if field is None else _without(field),
        )
        error.__cause__ = cause
        return error

    def keys(self) -> list[str]:
        """Return the key of every sample, in order."""
        return [self.sample(position, ())[KEY] for position in range(len(self))]

    def plan(
        self, positions: npt.NDArray[np.int64], fields: Collection[str]
    ) -> Ranges | Columns | None:
        """Return how to read the keys and these fields of several samples at once.

        Returns the columns themselves if they are in memory. None if the shard does not support
        this, or a value needs a closer look: the samples are then read one by one, as also after
        an exception, which finds the error.
        """
        return None

    def sizes(self, field: str) -> npt.NDArray[np.int64] | None:
        """Stored bytes of the field in each sample that has it, in order, without reading values.

        None if the shard does not contain these sizes.
        """
        return None

    def _inside(self, field: str, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sizes of values as they are in the file, which must contain them."""
        most = self.source.size
        bad = (sizes < 0) | (sizes > most)
        if bad.any():
            size = int(sizes[bad][0])
            raise DamagedError(
                "the stored size of a value is wrong or missing",
                path=self.path,
                field=field,
                expected=f"at most the {most:,} bytes of the file",
                found="none" if size < 0 else f"{size:,} bytes",
                fix="`shardkit verify` names the damaged samples; copy or create the file again",
            )
        return sizes

    def spans(self) -> npt.NDArray[np.int64] | None:
        """Return the byte range of each sample's values in the shard's file: int64 (samples, 2).

        Ranges may overlap if samples share bytes; (0, 0) for a sample without bytes. None if the
        format does not know the ranges.
        """
        return None

    def close(self) -> None:
        """Release the shard; may be called twice. Values that were returned stay valid."""
        self.closed = True
        self._bytes = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.layout)


def _text_around(error: Exception) -> str | None:
    """Return the text or bytes in which an error was found, if it knows them."""
    if isinstance(error, UnicodeDecodeError):
        return repr(error.object[max(0, error.start - 20) : error.start + 20])
    if isinstance(error, json.JSONDecodeError):
        return repr(error.doc[max(0, error.pos - 20) : error.pos + 20])
    return None


def key_bytes(key: str) -> bytes:
    """Return the key in UTF-8; raises SampleError if it cannot be encoded."""
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise not_unicode(key) from None


def not_unicode(key: str) -> SampleError:
    """The error for a key with bytes that are not UTF-8, such as those of an old file name."""
    fix = "give --safe-keys, which percent-encodes such bytes"
    return SampleError("the key is not valid Unicode", key=ascii(key), fix=fix)


def not_stored(error: Exception, value: Any, key: str, field: str) -> SampleError:
    """Return the error for a value that cannot be encoded, such as text with a lone surrogate."""
    size = f" of length {len(value):,}" if isinstance(value, bytes | str | list) else ""
    found = type(value).__name__ + size if size else f"{value!r:.60}"
    return SampleError(
        f"the value cannot be stored: {error}",
        key=key,
        field=field,
        found=found,
        fix=_without(field),
    )


def too_large(what: str, size: int, most: int, key: str | None, **where: Any) -> SampleError:
    """The error for a sample or value of `size` bytes, of which the format can store `most`."""
    expected, found = f"at most {most:,} bytes", f"{size:,}"
    return SampleError(what, key=key, expected=expected, found=found, **where)


def _without(field: str) -> str:
    if field == KEY:
        return "drop such samples with --on-error skip"
    option = drop_option(field)
    return f"convert without the field ({option}), or drop such samples with --on-error skip"


_FILES = (Encoded, Images)


def encoded(
    sample: Sample, fields: Iterable[tuple[str, FieldType, Callable[[Any], Any]]]
) -> dict[str, Any]:
    """Encode the values of those of `fields` that the sample has.

    Raises SampleError for an invalid image, audio or video, and for a value that the field's
    function cannot encode.
    """
    key, found = sample[KEY], {}
    for name, kind, encode in fields:
        if name in sample:
            value = sample[name]
            if isinstance(kind, _FILES):
                check(kind, value, key, name)
            try:
                found[name] = encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise not_stored(error, value, key, name) from error
    return found


def numbered_key(prefix: str, position: int) -> str:
    """Return the key of a sample for which the shard has none."""
    return f"{prefix}/{position:09d}"


def unforeseen(name: str, what: str = "field") -> SampleError:
    """The error for a field of a third-party sample that the guessed schema does not have."""
    return SampleError(
        f"the sample has a {what} {name!r}, which none of the samples examined on opening has",
        field=name,
        fix="drop such samples with --on-error skip, or write all with shardkit.create and a schema"
        " that has it",
    )


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """What to write into a shard.

    max_bytes: the limit of its size; None for no limit.
    classes: the class names of fields, for formats that store them.
    beside: the other loaders, of those in `Format.beside`, for which to write files beside it.
    """

    schema: Schema
    max_bytes: int | None = None
    classes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    beside: Sequence[str] = ()

    def is_full(self, samples: int, size: int) -> bool:
        """Whether a shard may not become `size` bytes large: it has `samples`, without the new."""
        return bool(self.max_bytes and samples and size > self.max_bytes)


class ShardWriter(ABC):
    """One shard that is being written.

    `encoded` counts the images that had to be re-encoded, by reason; it is empty for formats that
    can hold any image. `keys` counts the keys that cause problems in other readers of the format,
    by what they contain ("blanks").
    """

    encoded: Mapping[str, int] = MappingProxyType({})
    keys: Mapping[str, int] = MappingProxyType({})
    closed = False

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self.path = path
        self.spec = spec

    @abstractmethod
    def write(self, sample: Sample) -> bool:
        """Add a sample that fits the schema; False if the shard is full."""

    @abstractmethod
    def finish(self) -> None:
        """Complete and close the files; called once, even after an error."""

    def close(self) -> None:
        """Complete the shard; may be called twice."""
        if not self.closed:
            self.closed = True
            self.finish()


class Format:
    """The interface between a format and the engines.

    reader: the class of its readers, or a function that returns one: see `open`.
    writer: the same for writers.

    With a method `join`, as in `Joins`, a format can also write single files.
    """

    name: str
    abilities: tuple[str, ...] = ()  # for users: what it reads and writes
    reader: Callable[[Path, dict[str, Any] | None], ShardReader]
    writer: Callable[[Path, ShardSpec], ShardWriter]
    raw_images: str = "array"  # how decoded pixels are stored: "array" fields, or "ppm" images
    encodes_images: bool = False  # some images must be re-encoded, which is slow
    layout_types: Mapping[str, Any] = MappingProxyType({})  # name -> type, for `checked`
    largest: int | None = None  # maximum bytes of a shard, regardless of --shard-size
    join_may_grow: bool = False  # a joined shard may be larger than the sum of its parts
    grouped: bool = False  # reading a sample also reads its neighbours: row groups
    optional_changes_encoding: bool = False  # optional fields are stored differently from others
    # A field whose type differs between files can be read as bytes.
    mixed_types_as_bytes: bool = False
    # Loaders that need files beside shards (`--beside`) -> whether this works for a single file.
    beside: Mapping[str, bool] = MappingProxyType({})

    def open(self, path: Path, layout: dict[str, Any] | None = None) -> ShardReader:
        """Open a shard. `layout` is what `layout()` returned on writing; None for third-party ones.

        The reader of a third-party shard puts its `schema` into its own `layout`, and optionally:
        `classes`: field -> class names.
        `ignored`: what it skips -> how often.
        `unread`: how many bytes follow its last sample.
        `unusable`: a field that it cannot read -> the error that explains why.
        `ours`: set if the shard says that shardkit wrote it.
        `guessed`: fields that a few samples suggest are not optional, which `read` does not rely on
        with `json_text`.
        `convention`: a description of the convention by which samples are stored.
        """
        return self.reader(path, layout)

    def create(self, path: Path, spec: ShardSpec) -> ShardWriter:
        """Start writing one shard at `path`."""
        return self.writer(path, spec)

    def layout(self, schema: Schema) -> dict[str, Any]:
        """What a reader needs besides the bytes, for the manifest: at least the schema, as JSON.

        `layout_types` declares all other entries, so that they can be checked when a manifest is
        read. Raises FormatError for a schema that the format cannot store.
        """
        return {"schema": schema.to_json()}

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        """Upper bounds, in bytes, of samples with `payload` bytes in up to `fields` fields each.

        Used for planning only: if a rare sample (one with a very long key) is larger, shards still
        keep their limit.
        """
        return payload + 64 * (fields + 1)

    def listed(self, folder: Path) -> list[str] | None:
        """The shards named by the `Declaration.listing` file of a folder, relative to the folder.

        None if the folder is not a dataset of the format.
        """
        return None

    def check_listed(self, folder: Path, names: Sequence[str]) -> Iterator[ShardkitError]:
        """Differences between third-party shards and the sizes and hashes in `Declaration.listing`.

        Used by `verify`, for the shards with these names in the folder.
        """
        yield from ()

    def spec(
        self, schema: Schema, max_bytes: int | None, classes: Mapping[str, Sequence[str]]
    ) -> ShardSpec:
        """The spec for a shard of a conversion; raises UsageError for a limit above `largest`."""
        if self.largest and max_bytes and max_bytes > self.largest:
            raise UsageError(
                f"a shard of {self.name} cannot be that large",
                expected=f"at most {self.largest:,} bytes",
                found=f"{max_bytes:,}",
                fix="give a smaller --shard-size",
            )
        return ShardSpec(schema, max_bytes, classes)

    def notes(self, schema: Schema) -> list[str]:
        """Surprising facts about how this schema is stored; shown before the work starts."""
        return []

    def carried(self, kind: FieldType, value: Any) -> Any:
        """The value that this format returns for a stored value: only re-encoded images differ."""
        return value

    def shard_stem(self, number: int, shards: int) -> str:
        """Return the name, without suffix, of a shard in a dataset of `shards` shards."""
        return f"shard-{number:06d}"

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        """Write the other files of a finished dataset's folder; returns their paths."""
        return []

    def complete_splits(self, folder: Path, splits: Mapping[str, Manifest]) -> list[Path]:
        """Write the other files of a folder with these splits, by name; returns their paths."""
        return []


@runtime_checkable
class Joins(Protocol):
    """A format that can join several shards into one, and so write single files."""

    def join(self, path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
        """Write a shard to `path` that contains the samples of the shards `parts`, in order."""
