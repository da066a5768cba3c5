"""Reads a .beton at random: a row of its table says where a sample's values stand.

Opening looks at the header, the descriptors and the text of our section. No number of the file is
trusted before it is compared with the file's size.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Collection
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

import numpy as np

from shardkit.byte_source import LocalFile, Table
from shardkit.checked import checked, parse
from shardkit.codecs.array import load_array
from shardkit.codecs.pixels import ppm_start
from shardkit.errors import DamagedError, FormatError, ShardkitError
from shardkit.formats.base import KEY, ShardReader
from shardkit.formats.beton import layout as bytes_of
from shardkit.formats.beton.layout import JPEG, RAW, Field, Row, TypeId, front_size
from shardkit.sample import JsonText, Sample, key_of
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Int, Json, Schema, Text

if TYPE_CHECKING:
    import numpy.typing as npt

_NUMBER_BYTES = 8

# Of an unpacked row of the table, its position, and whether JSON is wanted as text: the value.
_Read: TypeAlias = Callable[[tuple[Any, ...], int, bool], Any]


class _Column(NamedTuple):
    """A field as it is read."""

    name: str
    read: _Read
    presence: int  # where its column of presence begins; -1 for a field that is never absent


class BetonReader(ShardReader):
    """One .beton file."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        self.source = LocalFile(path)
        head, fields, mark = _read_front(self.source)
        samples, self.page_size = int(head["num_samples"]), int(head["page_size"])
        self.fields, self.row = fields, Row(fields)
        self._numbers = {field.name: number for number, field in enumerate(fields)}
        table_at = front_size(len(fields), 0, 0)
        self._data_at = front_size(len(fields), self.row.dtype.itemsize, samples)
        _check_size(self.source, self._data_at, f"inside the table of its {samples:,} samples")
        allocations_at = _allocations_at(self.source, head, self._data_at)
        self.rows = Table(self.source, table_at, samples, self.row.dtype)
        with_data = sum(field.has_data for field in fields)
        self.allocations = Allocations(self.source, allocations_at, with_data)
        self.section = None if mark is None else Section(self.source, *mark, samples)
        if self.section is not None:
            _check_fields(self.section.schema, fields, path)
        super().__init__(path, self._found_layout() if layout is None else layout)
        own = () if self.section is None else self.section.tables
        self._tables: tuple[Table | Allocations, ...] = (self.rows, self.allocations, *own)
        self._length, self._unpack = samples, self.row.struct.unpack
        self._stem = key_of(path.stem)
        self._columns = [self._column(name, kind) for name, kind in self.schema.items()]

    def __len__(self) -> int:
        return self._length

    @property
    def in_memory(self) -> int:  # type: ignore[override] # it may grow
        return sum(table.in_memory for table in self._tables)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        section = self.section
        key = f"{self._stem}/{position:09d}" if section is None else section.key(position)
        sample: Sample = {KEY: key}
        if fields is not None and not fields:
            return sample
        row = self._unpack(self.rows.record(position))
        for name, read, presence in self._columns:
            if fields is not None and name not in fields:
                continue
            if presence < 0 or section.presence.record(presence + position) != b"\0":  # type: ignore[union-attr] # it has presence
                sample[name] = read(row, position, json_text)
        return sample

    def offset(self, position: int, field: str) -> int | None:
        number = self._numbers[field]
        if not self.fields[number].has_data:
            return None
        return int(self.row.pointers(self.rows.slice(position, position + 1), number)[0])

    def keys(self) -> list[str]:
        with contextlib.suppress(ValueError):  # a damaged one is then named
            if self.section is not None:
                return self.section.all_keys()
        return super().keys()

    def read_rows(
        self, field: str, positions: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> bool:
        """Arrays that FFCV has a type for, which are all of one shape."""
        if self.closed:
            raise ValueError(f"{self.path} is closed")
        number = self._numbers[field]
        dtype, shape = self.fields[number].dtype, self.fields[number].shape
        if dtype is None or shape != out.shape[1:]:
            return False
        try:
            if not self._present(field, positions).all():
                return False
            starts = self.rows.take(positions)[f"f{number}"].astype(np.int64)
            if (starts < self._data_at).any():
                return False
            found = self.source.read_rows(starts, self.fields[number].nbytes)
        except ShardkitError:
            return False
        out[...] = found.view(dtype).reshape(out.shape)
        return True

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        return self._sizes(self._numbers[field])[self._present(field, np.arange(len(self)))]

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._tables = ()
            del self.source, self.rows, self.allocations, self.section, self._columns

    def _found_layout(self) -> dict[str, Any]:
        """What the file says of itself: our section, or for a file of others its descriptors."""
        if self.section is None:
            schema = Schema({field.name: bytes_of.kind_of(field) for field in self.fields})
            return {"schema": schema.to_json()}
        classes = self.section.classes
        named = {} if classes is None else {"classes": classes}
        return {"schema": self.section.schema.to_json(), **named, "ours": True}

    def _presence_at(self, field: str) -> int:
        return -1 if self.section is None else self.section.presence_at.get(field, -1)

    def _present(self, field: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether the samples at these positions have the field."""
        at = self._presence_at(field)
        if at < 0 or self.section is None:
            return np.ones(len(positions), bool)
        present: npt.NDArray[np.bool_] = self.section.presence.take(positions + at) != 0
        return present

    def _sizes(self, number: int) -> npt.NDArray[np.int64]:
        """Stored bytes of a field's value in every sample, also of what stands for absent ones."""
        field, samples = self.fields[number], len(self)
        if not field.has_data or field.dtype is not None:
            return np.full(samples, field.nbytes if field.has_data else _NUMBER_BYTES, np.int64)
        column = self.rows.slice(0, samples)[f"f{number}"]
        if field.type_id != TypeId.IMAGE:
            sizes: npt.NDArray[np.int64] = column["size"].astype(np.int64)
            return sizes - 1 if field.type_id == TypeId.JSON else sizes
        raw = 3 * column["width"].astype(np.int64) * column["height"]
        return np.where(column["mode"] == RAW, raw, self.allocations.sizes(column["ptr"]))

    def _column(self, name: str, kind: FieldType) -> _Column:
        """How a field of the dataset's schema, which is common to its files, is read."""
        number = self._numbers.get(name)
        if number is None:
            raise DamagedError(
                f"the .beton has no field {name!r}, which its manifest names",
                path=self.path,
                expected=", ".join(self.schema),
                found=", ".join(self._numbers),
            )
        field, at = self.fields[number], self.row.places[number]
        value = partial(_value, self.source, self._data_at)
        if field.type_id == TypeId.IMAGE and isinstance(kind, Bytes):
            blob = sum(earlier.has_data for earlier in self.fields[:number])
            read: _Read | None = _image(at, value, partial(self.allocations.size, blob))
        else:
            read = _reads(field, at, kind, value)
        if read is None:
            raise DamagedError(
                "a field is of another type than its manifest says",
                path=self.path,
                field=name,
                expected=str(kind),
                found=f"FFCV's type {field.type_id.value} ({field.type_id.name.lower()})",
            )
        return _Column(name, read, self._presence_at(name))


# --- the parts of a file --------------------------------------------------------------------------


def _read_front(source: LocalFile) -> tuple[np.void, list[Field], tuple[int, int] | None]:
    """The header, the fields, and where our section is, with its size, if there is one."""
    header = bytes_of.HEADER
    _check_size(source, header.itemsize, "inside its header")
    head = np.frombuffer(source.read(0, header.itemsize), header)[0]
    if head["version"] != bytes_of.VERSION:
        raise FormatError(
            "the file is no .beton that shardkit reads",
            path=source.path,
            expected=f"version {bytes_of.VERSION}",
            found=f"version {head['version']}",
            fix="write it again with FFCV 1.0",
        )
    count = int(head["num_fields"])
    if not count:
        raise FormatError("the .beton has no fields", path=source.path)
    size = count * bytes_of.DESCRIPTOR.itemsize
    _check_size(source, header.itemsize + size, "inside the descriptors of its fields")
    descriptors = np.frombuffer(source.read(header.itemsize, size), bytes_of.DESCRIPTOR)
    fields: dict[str, Field] = {}
    for number, descriptor in enumerate(descriptors):
        offset = header.itemsize + number * bytes_of.DESCRIPTOR.itemsize
        field = bytes_of.unpack_field(descriptor, source.path, offset)
        if field.name in fields:
            raise DamagedError(
                f"the .beton has two fields named {field.name!r}", path=source.path, offset=offset
            )
        fields[field.name] = field
    return head, list(fields.values()), bytes_of.unpack_mark(descriptors[0])


def _check_size(source: LocalFile, end: int, where: str) -> None:
    if end > source.size:
        raise DamagedError(
            f"the .beton is truncated {where}",
            path=source.path,
            offset=source.size,
            expected=f"at least {end:,} bytes",
            found=f"{source.size:,} bytes",
            fix="copy or make the file again",
        )


def _allocations_at(source: LocalFile, head: np.void, table_end: int) -> int:
    at = int(head["alloc_table_ptr"])
    if not table_end <= at <= source.size:
        raise DamagedError(
            "the .beton is not complete, or cut: its table of allocations is not in it",
            path=source.path,
            offset=bytes_of.HEADER.fields["alloc_table_ptr"][1],  # type: ignore[index] # it has fields
            expected=f"{table_end:,} to {source.size:,}",
            found=f"{at:,}",
            fix="copy or make the file again",
        )
    return at


def _check_fields(schema: Schema, fields: list[Field], path: Path) -> None:
    """Compare the fields with those that a section's schema is stored as."""
    with contextlib.suppress(FormatError):  # one that is not stored at all
        if bytes_of.fields_of(schema) == fields:
            return
    raise DamagedError(
        "the .beton has other fields than its section says",
        path=path,
        expected=", ".join(schema),
        found=", ".join(field.name for field in fields),
    )


class Allocations:
    """The rows that say how many bytes each value in the data has, up to the end of the file.

    Rows may stand in any order. Most files, and all of ours, have them in the order of samples and
    fields: the row that this order promises is looked at first. Only where it is another one are
    the pointers sorted, once.
    """

    def __init__(self, source: LocalFile, at: int, fields: int) -> None:
        """`fields` is the number of those that have data; a last row that is cut is not read."""
        count = (source.size - at) // bytes_of.ALLOCATION.itemsize
        self.rows = Table(source, at, count, bytes_of.ALLOCATION)
        self._fields = fields
        self._sorted: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None

    @property
    def in_memory(self) -> int:
        return self.rows.in_memory + sum(column.nbytes for column in self._sorted or ())

    def size(self, field: int, position: int, ptr: int) -> int:
        """Bytes of the value at `ptr`, of the `field`-th with data; ValueError if unknown."""
        row = position * self._fields + field
        if row < len(self.rows):
            _, found, size = bytes_of.ALLOCATION_STRUCT.unpack(self.rows.record(row))
            if found == ptr and size:
                return int(size)
        size = self.sizes(np.array([ptr], np.uint64))[0]
        if size < 0:
            raise ValueError("the table of allocations does not say how long it is")
        return int(size)

    def sizes(self, pointers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Bytes of the values at `pointers`; -1 where no row says."""
        if not len(self.rows):
            return np.full(len(pointers), -1, np.int64)
        if self._sorted is None:
            # FFCV gives an empty value the pointer of the next: of equal ones the longest counts.
            rows = self.rows.slice(0, len(self.rows))
            order = np.lexsort((rows["size"], rows["ptr"]))
            self._sorted = (rows["ptr"][order], rows["size"][order])
        known, sizes = self._sorted
        found = np.searchsorted(known, pointers, "right") - 1
        return np.where(
            (found >= 0) & (known[found] == pointers), sizes[found].astype(np.int64), -1
        )


class _Version(TypedDict):
    """Of a section's text: others are not looked at."""

    version: Any


class _About(_Version):
    """The text of a section."""

    schema: dict[str, Any]
    classes: dict[str, list[str]] | None


class Section:
    """Our section: keys, types and absent values, which FFCV has no place for."""

    def __init__(self, source: LocalFile, at: int, size: int, samples: int) -> None:
        """Raises DamagedError where the section of `size` bytes at `at` contradicts itself."""
        path, head = source.path, bytes_of.SECTION_HEAD
        if size < head.itemsize or at + size > source.size:
            raise _damaged(path, at, f"{size:,} bytes in a file of {source.size:,}")
        text_size, keys_size = np.frombuffer(source.read(at, head.itemsize), head)[0].tolist()
        if text_size > size:
            raise _damaged(path, at, f"a text of {text_size:,} bytes in {size:,}")
        text_at = at + head.itemsize
        text = source.read(text_at, min(text_size, source.size - text_at))
        self.schema, self.classes = _unpack_text(text, path, text_at)
        optional = bytes_of.optional_fields(self.schema)
        offsets_at = text_at + text_size
        presence_at = offsets_at + bytes_of.KEY_OFFSET.itemsize * (samples + 1)
        keys_at = presence_at + len(optional) * samples
        if keys_at + keys_size != at + size:
            raise _damaged(path, at, f"parts of {keys_at + keys_size - at:,} bytes in {size:,}")
        self.offsets = Table(source, offsets_at, samples + 1, bytes_of.KEY_OFFSET)
        self.presence = Table(source, presence_at, len(optional) * samples, "u1")
        self.presence_at = {name: number * samples for number, name in enumerate(optional)}
        self.keys = Table(source, keys_at, keys_size, "u1")

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.offsets, self.presence, self.keys

    def key(self, position: int) -> str:
        start, stop = _KEY_SPAN.unpack(self.offsets.record(position, 2))
        if not start <= stop <= len(self.keys):
            raise ValueError("the key stands outside the keys")
        return self.keys.record(start, stop - start).decode()

    def all_keys(self) -> list[str]:
        """The keys of all samples; raises ValueError where one is damaged."""
        offsets = self.offsets.slice(0, len(self.offsets)).tolist()
        text = self.keys.record(0, len(self.keys))
        if offsets != sorted(offsets) or offsets[-1] > len(text):
            raise ValueError("a key stands outside the keys")
        return [text[start:stop].decode() for start, stop in pairwise(offsets)]


_KEY_SPAN = struct.Struct("<QQ")  # where a key begins, and where the next one does


def _unpack_text(text: bytes, path: Path, at: int) -> tuple[Schema, dict[str, list[str]] | None]:
    try:
        found = parse(text.rstrip(b"\0"))
        version = checked(_Version, found)["version"]
        if version == bytes_of.SECTION_VERSION:
            about = checked(_About, found)
            return Schema.from_json(about["schema"]), about["classes"]
    except FormatError as error:  # a type that this version does not know
        raise error.located(path=path, offset=at) from error.__cause__
    except ValueError as error:
        raise _damaged(path, at, f"a text that is no description: {error}") from error
    raise FormatError(
        "the file was made by a version of shardkit that this one does not know",
        path=path,
        offset=at,
        expected=f"version {bytes_of.SECTION_VERSION} of the section",
        found=f"{version!r:.60}",
        fix="install a newer shardkit",
    )


def _damaged(path: Path, at: int, found: str) -> DamagedError:
    return DamagedError(
        "the section with keys and types is damaged",
        path=path,
        offset=at,
        found=found,
        fix="copy the file again, or convert again",
    )


# --- values: the base class names what raises ValueError ------------------------------------------


def _value(source: LocalFile, first: int, ptr: int, size: int) -> bytes:
    """The bytes that a pointer leads to; `first` is where the data of the file begin."""
    if ptr < first or ptr + size > source.size:
        raise ValueError(f"the file has no {size:,} bytes of it")
    return source.read(ptr, size)


def _image(
    at: int, value: Callable[[int, int], bytes], size_of: Callable[[int, int], int]
) -> _Read:
    def read(row: tuple[Any, ...], position: int, json_text: bool) -> bytes:
        mode, width, height, ptr = row[at : at + 4]
        if mode == JPEG:
            return value(ptr, size_of(position, ptr))
        if mode == RAW:
            return ppm_start(width, height) + value(ptr, 3 * width * height)
        raise ValueError(f"an image of mode {mode}, which is neither JPEG nor raw")

    return read


def _reads(
    field: Field, at: int, kind: FieldType, value: Callable[[int, int], bytes]
) -> _Read | None:
    """What reads a field that is no image as `kind`; None if nothing does.

    Every field can be read as bytes: where files of a dataset differ, that is what they share.
    """
    if not field.has_data:
        convert = _NUMBERS.get((field.type_id, type(kind)))
        return None if convert is None else lambda row, position, json_text: convert(row[at])
    if field.dtype is not None:
        return _array(field, at, kind, value)
    decode = _DECODERS.get((field.type_id, type(kind)))
    if decode is None:
        return None
    return lambda row, position, json_text: decode(value(row[at], row[at + 1]), json_text)


def _array(
    field: Field, at: int, kind: FieldType, value: Callable[[int, int], bytes]
) -> _Read | None:
    size, dtype, shape = field.nbytes, field.dtype, field.shape
    if type(kind) is Bytes:
        return lambda row, position, json_text: value(row[at], size)
    if not isinstance(kind, Array) or (kind.dtype, kind.shape) != (dtype and dtype.str, shape):
        return None
    return lambda row, position, json_text: np.frombuffer(
        bytearray(value(row[at], size)), dtype
    ).reshape(shape)


def _json(data: bytes, json_text: bool) -> Any:
    text = data.partition(b"\0")[0].decode()
    value = json.loads(text)
    return JsonText(text) if json_text else value


def _text(data: bytes, json_text: bool) -> str:
    found = _json(data, False)
    if not isinstance(found, str):
        raise ValueError("JSON that is no text")
    return found


_NUMBERS: dict[tuple[TypeId, type[FieldType]], Callable[[Any], Any]] = {
    (TypeId.INT, Int): int,
    (TypeId.INT, Bool): bool,
    (TypeId.INT, Bytes): struct.Struct("<q").pack,
    (TypeId.FLOAT, Float): float,
    (TypeId.FLOAT, Bytes): struct.Struct("<d").pack,
}
_DECODERS: dict[tuple[TypeId, type[FieldType]], Callable[[bytes, bool], Any]] = {
    (TypeId.BYTES, Bytes): lambda data, json_text: data,
    (TypeId.BYTES, Array): lambda data, json_text: load_array(data),
    (TypeId.JSON, Json): _json,
    (TypeId.JSON, Text): _text,
    (TypeId.JSON, Bytes): lambda data, json_text: data.partition(b"\0")[0],
}
