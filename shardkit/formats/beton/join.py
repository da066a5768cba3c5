"""Joins several .beton files into one: values are packed into pages again, and copied in runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit import storage
from shardkit.errors import DamagedError
from shardkit.formats.base import ShardSpec
from shardkit.formats.beton import layout
from shardkit.formats.beton.layout import Row, front_size
from shardkit.formats.beton.reader import BetonReader, Section
from shardkit.formats.beton.writer import zeros
from shardkit.schema import Schema


class _Part(NamedTuple):
    """An open part, and its position in the joined file."""

    reader: BetonReader
    section: Section
    allocations: npt.NDArray[np.void]
    pointers: npt.NDArray[np.int64]  # of its values in the joined file
    end: int  # of its values in the joined file
    samples: int  # number of samples before it
    keys: int  # bytes of keys before it


def join(path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
    schema = spec.schema
    fields = layout.fields_of(schema)
    count = sum(len(BetonReader(part)) for part in parts)
    front = front_size(len(fields), Row(fields).dtype.itemsize, count)
    end, page, keys = front, layout.PAGE, 0
    for part in _opened(parts, schema, front):
        end, page = part.end, max(page, part.reader.page_size)
        keys = part.keys + len(part.section.keys)
    text, optional = layout.pack_text(schema, spec.classes), len(layout.optional_fields(schema))
    size = layout.section_size(text, count, optional, keys)
    with storage.create(path) as file:
        storage.write(file, [layout.pack_front(fields, page, count, end + size, (end, size))])
        for part in _opened(parts, schema, front):
            storage.write(file, [_moved_table(part)])
        at = front
        for part in _opened(parts, schema, front):
            at = _copy_values(file, part, at)
        storage.write(file, [layout.pack_head(text, keys)])
        presence: dict[str, list[bytes]] = {}
        for part in _opened(parts, schema, front):
            samples = len(part.reader)
            offsets = part.section.offsets.slice(0, samples) + np.uint64(part.keys)
            storage.write(file, [offsets.tobytes()])
            for name, start in part.section.presence_at.items():
                presence.setdefault(name, []).append(part.section.presence.record(start, samples))
        storage.write(file, [np.array(keys, layout.KEY_OFFSET).tobytes()])
        for columns in presence.values():
            storage.write(file, [b"".join(columns)])
        for part in _opened(parts, schema, front):
            storage.write(file, [part.section.keys.record(0, len(part.section.keys))])
        for part in _opened(parts, schema, front):
            rows = part.allocations.copy()
            rows["ptr"] = part.pointers
            rows["sample_id"] += np.uint64(part.samples)
            storage.write(file, [rows.tobytes()])


def _opened(paths: Sequence[Path], schema: Schema, at: int) -> Iterator[_Part]:
    """Each part; values of the first begin at `at` in the joined file.

    Parts are opened again for each pass: so one file is open and the pointers of one part are in
    memory at a time.
    """
    samples, keys = 0, 0
    for path in paths:
        reader = BetonReader(path)
        section, rows = reader.section, reader.allocations.rows
        if section is None:
            raise DamagedError("a part has no section with its keys and types", path=path)
        if dict(section.schema) != dict(schema):
            raise DamagedError("a part has other fields than the whole", path=path)
        values = len(reader) * sum(field.has_data for field in reader.fields)
        if len(rows) != values:
            raise DamagedError(
                "a part has another number of values than its samples",
                path=path,
                expected=f"{values:,}",
                found=f"{len(rows):,}",
            )
        allocations = rows.slice(0, len(rows))
        pointers, at = layout.value_offsets(_room(allocations), at)
        yield _Part(reader, section, allocations, pointers, at, samples, keys)
        samples += len(reader)
        keys += len(section.keys)


def _room(allocations: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Bytes that each value takes: an empty one takes one byte."""
    return np.maximum(allocations["size"].astype(np.int64), 1)


def _moved_table(part: _Part) -> bytes:
    """The table of a part with the pointers of the joined file."""
    # The bytes are copied: a copy of rows by numpy has undefined padding between their fields.
    moved = bytearray(part.reader.rows.record(0, len(part.reader)))
    table = np.frombuffer(moved, part.reader.row.dtype)
    with_data = [number for number, field in enumerate(part.reader.fields) if field.has_data]
    for first, number in enumerate(with_data):
        part.reader.row.pointers(table, number)[:] = part.pointers[first :: len(with_data)]
    return bytes(moved)


def _copy_values(file: storage.NewFile, part: _Part, at: int) -> int:
    """Append the values of a part to a file of `at` bytes; returns its new size.

    Values that are neighbours in both files are copied as one run: a page has two or three.
    """
    rows, pointers = part.allocations, part.pointers
    if not len(rows):
        return at
    sources, ends = rows["ptr"].astype(np.int64), pointers + _room(rows)
    # A run ends where the distance between the files changes, or where two values have a gap.
    breaks = np.diff(pointers - sources).astype(bool) | (pointers[1:] != ends[:-1])
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(rows)]]).tolist()
    for first, stop in pairwise(firsts):
        start, size = int(sources[first]), int(ends[stop - 1] - pointers[first])
        storage.write(file, zeros(int(pointers[first]) - at))
        storage.append(file, part.reader.path, size, start)
        at = int(ends[stop - 1])
    return at
