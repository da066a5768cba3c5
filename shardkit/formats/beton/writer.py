"""Writes a .beton in one pass: values as they arrive, and at the end the table before them.

The size of the table is only known at the end. Some space is reserved for it; values that a larger
table would overwrite are moved behind the others, which writes about one table size more.

FFCV only decodes plain JPEGs and raw pixels. A JPEG that it decodes correctly is stored byte for
byte, a PPM as its pixels. Other images are re-encoded, because FFCV decodes them to garbage without
an error, and ignores EXIF's orientation.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs import pixels
from shardkit.codecs.array import dump_array
from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, TooDeepError, check_end, unusable
from shardkit.codecs.jpeg import with_huffman_tables
from shardkit.codecs.media import format_as
from shardkit.codecs.tiff import is_georeferenced
from shardkit.errors import DamagedError
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, key_bytes, not_stored, too_large
from shardkit.formats.beton import layout
from shardkit.formats.beton.layout import ALLOCATION, JPEG, RAW, Field, Row, TypeId, front_size
from shardkit.formats.beton.reader import BetonReader
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Audio, Bytes, FieldType, Image, Json, Text, Video
from shardkit.storage import fs

ROOM = 1 << 15  # bytes reserved for the table
_BLOCK = 1 << 20  # bytes copied at a time
_ZEROS = memoryview(bytes(_BLOCK))


class _Prepared(NamedTuple):
    """A sample that is ready to be written, unless the file would exceed its limit."""

    row: list[Any]
    chunks: list[bytes | memoryview]
    allocations: list[tuple[int, int]]  # pointer and size
    encoded: list[str]  # reasons why images were re-encoded
    end: int  # end of the data including this sample


class BetonWriter(ShardWriter):
    """Keeps the row, the key and the allocations of each sample in memory."""

    def __init__(self, path: Path, spec: ShardSpec, room: int = ROOM) -> None:
        """`room`: bytes to reserve for the table."""
        super().__init__(path, spec)
        schema = spec.schema
        self._fields = layout.fields_of(schema)
        self._row = Row(self._fields)
        self._columns = [_column(f, schema[f.name]) for f in self._fields]
        self._text = layout.pack_text(schema, spec.classes)
        self._presence = {name: bytearray() for name in layout.optional_fields(schema)}
        self._samples = 0
        self._rows = bytearray()
        self._allocations = bytearray()
        self._keys = bytearray()
        self._key_sizes = array("Q")
        self._largest = 0  # size of the largest value in the data
        self._covered = 0  # number of values that the table would overwrite
        self._start = front_size(len(self._fields), 0, 0) + room
        self._end = self._start  # end of the data, including the file's buffer
        self._encoded: Counter[str] = Counter()
        self.encoded = self._encoded
        self._file = fs.BufferedFile(path)
        self._file.write(*_zeros(self._start))

    def write(self, sample: Sample) -> bool:
        key = key_bytes(sample[KEY])
        prepared = self._prepared(sample)
        if self.spec.is_full(self._samples, self._size_with(prepared, len(key))):
            return False
        self._rows += self._row.struct.pack(*prepared.row)
        for ptr, size in prepared.allocations:
            self._allocations += layout.ALLOCATION_STRUCT.pack(self._samples, ptr, size)
            self._largest = max(self._largest, size)
        for name, presence in self._presence.items():
            presence.append(name in sample)
        self._keys += key
        self._key_sizes.append(len(key))
        self._samples += 1
        self._encoded.update(prepared.encoded)
        self._file.write(*prepared.chunks)
        self._end = prepared.end
        return True

    def finish(self) -> None:
        with self._file:
            self._file.flush()
            rows = np.frombuffer(self._rows, self._row.dtype)
            allocations = np.frombuffer(self._allocations, ALLOCATION)
            end = self._make_room(rows, allocations)
            section = self._section()
            size = sum(map(len, section))
            fs.write(self._file.file, [*section, bytes(self._allocations)])
            front = layout.pack_front(
                self._fields, layout.page_for(self._largest), self._samples, end + size, (end, size)
            )
            fs.rewrite(self._file.file, 0, front + self._rows)

    # --- samples ---------------------------------------------------------------------------------

    def _prepared(self, sample: Sample) -> _Prepared:
        end = self._end
        row: list[Any] = []
        chunks: list[bytes | memoryview] = []
        allocations: list[tuple[int, int]] = []
        encoded: list[str] = []
        for name, type_id, encode, absent in self._columns:
            value = sample.get(name, absent)
            if encode is not None and name in sample:
                try:
                    value = encode(value)
                except NotAnImageError as error:
                    raise unusable(error, sample[KEY], name) from error
                except (TypeError, ValueError, RecursionError) as error:  # e.g. a lone surrogate
                    raise not_stored(error, value, sample[KEY], name) from error
            if type_id in _NUMBERS:
                row.append(value)
                continue
            if type_id == TypeId.IMAGE:
                mode, width, height, value, reason = value
                row += (mode, width, height)
                if reason:
                    encoded.append(reason)
            size = len(value)
            if size > layout.MAX_VALUE:
                what = "a value is too large for a page of a .beton"
                raise too_large(what, size, layout.MAX_VALUE, sample[KEY], field=name)
            # FFCV looks up the size of a value by its pointer, so an empty value occupies a byte.
            ptr = layout.value_offset(end, size or 1)
            chunks += _zeros(ptr - end)
            chunks.append(value if size else b"\0")
            end = ptr + (size or 1)
            row.append(ptr)
            if type_id in (TypeId.BYTES, TypeId.JSON):
                row.append(size)
            allocations.append((ptr, size))
        return _Prepared(row, chunks, allocations, encoded, end)

    def _size_with(self, prepared: _Prepared, key_size: int) -> int:
        """Bytes of the file if this is its last sample; slightly more if values must be moved."""
        samples = self._samples + 1
        page = layout.page_for(max([self._largest, *(size for _, size in prepared.allocations)]))
        table_end = front_size(len(self._fields), self._row.dtype.itemsize, samples)
        stop = self._first_pointer_from(table_end)
        end = _end_of_data(self._start, stop or prepared.end, prepared.end, table_end, page)
        keys_size = len(self._keys) + key_size
        section = layout.section_size(self._text, samples, len(self._presence), keys_size)
        allocations = len(prepared.allocations) * ALLOCATION.itemsize + len(self._allocations)
        return end + section + allocations

    def _first_pointer_from(self, end: int) -> int:
        """Return the first pointer to data at `end` or later; 0 if there is none."""
        size = ALLOCATION.itemsize
        while self._covered * size < len(self._allocations):
            _, ptr, _ = layout.ALLOCATION_STRUCT.unpack_from(
                self._allocations, self._covered * size
            )
            if ptr >= end:
                return int(ptr)
            self._covered += 1
        return 0

    # --- the end ---------------------------------------------------------------------------------

    def _make_room(self, rows: npt.NDArray[np.void], allocations: npt.NDArray[np.void]) -> int:
        """Move the values that the table would overwrite; returns the end of the data."""
        table_end = front_size(len(self._fields), self._row.dtype.itemsize, self._samples)
        moving = int(np.searchsorted(allocations["ptr"], table_end))
        if not moving:
            return self._pad(max(self._end, table_end))
        stop = int(allocations["ptr"][moving]) if moving < len(allocations) else self._end
        page = layout.page_for(self._largest)
        end = _end_of_data(self._start, stop, self._end, table_end, page)
        shift = end - stop
        self._pad(self._start + shift)
        fs.append(self._file.file, self.path, stop - self._start, self._start)
        allocations["ptr"][:moving] += np.uint64(shift)
        for number, field in enumerate(self._fields):
            if field.has_data:
                pointers = self._row.pointers(rows, number)
                pointers[pointers < stop] += np.uint64(shift)
        return end

    def _pad(self, end: int) -> int:
        fs.write(self._file.file, _zeros(end - self._end))
        return end

    def _section(self) -> list[bytes]:
        offsets = np.zeros(self._samples + 1, layout.KEY_OFFSET)
        np.cumsum(self._key_sizes, out=offsets[1:])
        head = np.array((len(self._text), len(self._keys)), layout.SECTION_HEAD).tobytes()
        presence = map(bytes, self._presence.values())
        return [head, self._text, offsets.tobytes(), *presence, bytes(self._keys)]

    # --- joining ---------------------------------------------------------------------------------

    def add(self, part: BetonReader) -> None:
        """Add the samples of another file. Its values are moved to new pages in runs."""
        path, section, table = part.path, part.section, part.allocations.rows
        if section is None:
            raise DamagedError("a part has no section with its keys and types", path=path)
        if dict(section.schema) != dict(self.spec.schema):
            raise DamagedError("the fields of a part differ from the schema", path=path)
        with_data = [number for number, field in enumerate(self._fields) if field.has_data]
        count = len(part)
        if len(table) != count * len(with_data):
            what = "the number of values in a part does not match its samples"
            raise DamagedError(what, path=path, found=f"{len(table):,}")
        allocations = table.slice(0, len(table)).copy()
        sources = allocations["ptr"].astype(np.int64)
        room = np.maximum(allocations["size"].astype(np.int64), 1)  # an empty value takes a byte
        pointers, end = layout.value_offsets(room, self._end)
        self._copy(path, sources, pointers, room)
        self._end = end
        # Copy the bytes, as a copy by numpy has undefined padding between the fields of a row.
        rows = bytearray(part.rows.record(0, count))
        for first, number in enumerate(with_data):
            column = self._row.pointers(np.frombuffer(rows, self._row.dtype), number)
            column[:] = pointers[first :: len(with_data)]
        allocations["ptr"] = pointers
        allocations["sample_id"] += np.uint64(self._samples)
        self._rows += rows
        self._allocations += allocations.tobytes()
        self._largest = max(self._largest, int(allocations["size"].max(initial=0)))
        for name, start in section.presence_at.items():
            self._presence[name] += section.presence.record(start, count)
        self._keys += section.keys.record(0, len(section.keys))
        self._key_sizes.extend(np.diff(section.offsets.slice(0, count + 1)).tolist())
        self._samples += count

    def _copy(
        self,
        path: Path,
        sources: npt.NDArray[np.int64],
        pointers: npt.NDArray[np.int64],
        room: npt.NDArray[np.int64],
    ) -> None:
        """Append the values of a part, at `sources` in it, so that they are at `pointers`.

        Values that are contiguous in both files are copied as one run: two or three runs per page.
        """
        if not len(sources):
            return
        self._file.flush()
        at, ends = self._end, pointers + room
        # A run ends where the shift between the files changes, or at a gap between two values.
        breaks = np.diff(pointers - sources).astype(bool) | (pointers[1:] != ends[:-1])
        firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(sources)]]).tolist()
        for first, stop in pairwise(firsts):
            start, size = int(sources[first]), int(ends[stop - 1] - pointers[first])
            fs.write(self._file.file, _zeros(int(pointers[first]) - at))
            fs.append(self._file.file, path, size, start)
            at = int(ends[stop - 1])


def join(path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
    """Join several files into one: copies the values to new pages, in runs."""
    row = Row(layout.fields_of(spec.schema)).dtype.itemsize
    writer = BetonWriter(path, spec, row * sum(len(BetonReader(part)) for part in parts))
    try:
        for part in parts:
            writer.add(BetonReader(part))
    finally:
        writer.close()


def _end_of_data(start: int, stop: int, end: int, table_end: int, page: int) -> int:
    """The end of the data once those from `start` to `stop` have been moved behind the others."""
    if table_end <= start:
        return end
    return layout.moved_offset(start, stop, max(end, table_end), page) + stop - start


def _zeros(count: int) -> list[bytes | memoryview]:
    """Chunks of `count` zeros to write."""
    return [*[_ZEROS] * (count // _BLOCK), _ZEROS[: count % _BLOCK]] if count else []


# --- images --------------------------------------------------------------------------------------

_QUALITY = 95
_MAX_SIDE = 0xFFFF


class StoredImage(NamedTuple):
    """A stored image. `encoded` is the reason why it was re-encoded, or ""."""

    mode: int
    width: int
    height: int
    data: bytes | memoryview
    encoded: str

    def file(self) -> bytes:
        """Return the image file that a reader returns."""
        if self.mode == RAW:
            return pixels.ppm_start(self.width, self.height) + self.data
        return bytes(self.data)


_NO_IMAGE = StoredImage(RAW, 1, 1, bytes(3), "")  # the placeholder for samples without an image


def stored_image(value: bytes) -> StoredImage:
    """The image as it is stored; raises ValueError, mostly NotAnImageError, if it cannot be."""
    ppm = pixels.ppm_header(value)
    if ppm is None:
        header = read_header(value)
        check_end(value, header.format)
        if header.is_deep:
            raise TooDeepError(header.kind)
        reason = _reason(header, value)
        width, height = header.width, header.height
        if reason:
            rows = pixels.to_rgb(value)
            height, width, _ = rows.shape
            value = pixels.encode(rows, "jpeg", quality=_QUALITY, chroma="444")
        elif not header.huffman:  # FFCV would use the tables of the previous image
            value, reason = with_huffman_tables(value), "jpeg without Huffman tables"
        return StoredImage(JPEG, width, height, value, reason)
    if max(ppm.width, ppm.height) > _MAX_SIDE:
        raise ValueError(f"{ppm.width:,} x {ppm.height:,} pixels, more than {_MAX_SIDE:,} per side")
    start = pixels.ppm_start(ppm.width, ppm.height)
    same = ppm.stop == len(value) and value.startswith(start)
    data = memoryview(value)[ppm.start : ppm.stop]
    return StoredImage(RAW, ppm.width, ppm.height, data, "" if same else "ppm with another header")


# Properties of images that a JPEG cannot represent.
_LOST = {"animated": "{} (first frame)", "transparent": "{} (transparent)"}
_PORTABLE = {b"P4": "pbm", b"P5": "pgm"}


def _reason(header: Header, value: bytes) -> str:
    """Why an image cannot be stored unchanged; "" for a plain JPEG."""
    if header.format != "jpeg":
        kind = _PORTABLE.get(value[:2]) or header.format
        if kind == "tiff" and is_georeferenced(value):
            kind = "GeoTIFF without its tags"
        return _LOST.get(header.oddity, "{}").format(kind)
    oddity = "rotated" if header.orientation != 1 else ""
    return f"{header.oddity or oddity} jpeg" if header.oddity or oddity else ""


# --- values --------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """The properties of a field that the inner loop needs."""

    name: str
    type_id: TypeId
    encode: Callable[[Any], Any] | None  # None for a number
    absent: Any  # the placeholder for a sample without the field


def _column(field: Field, kind: FieldType) -> _Column:
    encode, absent = _ENCODERS.get(type(kind)), _ABSENT.get(field.type_id, b"")
    if field.dtype is not None:
        encode, absent = np.ndarray.tobytes, bytes(field.nbytes) if kind.optional else b""
    return _Column(field.name, field.type_id, encode, absent)


def _whole(kind: Audio | Video, value: bytes) -> bytes:
    format_as(kind, value)
    return value


def _json(value: Any) -> bytes:
    text = JsonText.of(value).encode()
    if b"\0" in text:
        raise ValueError("FFCV treats the first zero byte as the end of the JSON")
    return text + b"\0"


_NUMBERS = (TypeId.INT, TypeId.FLOAT)
_ABSENT = {
    TypeId.INT: 0,
    TypeId.FLOAT: float("nan"),
    TypeId.IMAGE: _NO_IMAGE,
    TypeId.JSON: b"null\0",
}
_ENCODERS: dict[type[FieldType], Callable[[Any], Any]] = {
    Image: stored_image,
    Bytes: bytes,
    Audio: partial(_whole, Audio()),
    Video: partial(_whole, Video()),
    Array: dump_array,
    Json: _json,
    Text: lambda value: JsonText.of(str(value)).encode() + b"\0",
}
