"""Joins several .beton files into one: assigns the values to new pages and copies them in runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError
from shardkit.formats.base import ShardSpec
from shardkit.formats.beton import layout
from shardkit.formats.beton.layout import Row, front_size
from shardkit.formats.beton.reader import BetonReader, Section
from shardkit.formats.beton.writer import zeros
from shardkit.schema import Schema
from shardkit.storage import fs


class _Part(NamedTuple):
    """An open part, and its position in the joined file."""

    reader: BetonReader
    section: Section
    allocations: npt.NDArray[np.void]
    pointers: npt.NDArray[np.int64]  # offsets of its values in the joined file
    end: int  # end of its values in the joined file
    samples: int  # number of samples in earlier parts
    keys: int  # bytes of keys in earlier parts


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
    with fs.create(path) as file:
        fs.write(file, [layout.pack_front(fields, page, count, end + size, (end, size))])
        for part in _opened(parts, schema, front):
            fs.write(file, [_moved_table(part)])
        at = front
        for part in _opened(parts, schema, front):
            at = _copy_values(file, part, at)
        fs.write(file, [layout.pack_head(text, keys)])
        presence: dict[str, list[bytes]] = {}
        for part in _opened(parts, schema, front):
            samples = len(part.reader)
            offsets = part.section.offsets.slice(0, samples) + np.uint64(part.keys)
            fs.write(file, [offsets.tobytes()])
            for name, start in part.section.presence_at.items():
                presence.setdefault(name, []).append(part.section.presence.record(start, samples))
        fs.write(file, [np.array(keys, layout.KEY_OFFSET).tobytes()])
        for columns in presence.values():
            fs.write(file, [b"".join(columns)])
        for part in _opened(parts, schema, front):
            fs.write(file, [part.section.keys.record(0, len(part.section.keys))])
        for part in _opened(parts, schema, front):
            rows = part.allocations.copy()
            rows["ptr"] = part.pointers
            rows["sample_id"] += np.uint64(part.samples)
            fs.write(file, [rows.tobytes()])


def _opened(paths: Sequence[Path], schema: Schema, at: int) -> Iterator[_Part]:
    """Open the parts one by one; the values of the first begin at `at` in the joined file.

    Parts are opened again for each pass, so that only one file is open and the pointers of only one
    part are in memory at a time.
    """
    samples, keys = 0, 0
    for path in paths:
        reader = BetonReader(path)
        section, rows = reader.section, reader.allocations.rows
        if section is None:
            raise DamagedError("a part has no section with its keys and types", path=path)
        if dict(section.schema) != dict(schema):
            raise DamagedError("the fields of a part differ from the schema", path=path)
        values = len(reader) * sum(field.has_data for field in reader.fields)
        if len(rows) != values:
            raise DamagedError(
                "the number of values in a part does not match its samples",
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
    """Bytes that each value occupies: an empty value occupies one byte."""
    return np.maximum(allocations["size"].astype(np.int64), 1)


def _moved_table(part: _Part) -> bytes:
    """The table of a part, with the pointers of the joined file."""
    # Copy the bytes, as a copy by numpy has undefined padding between the fields of a row.
    moved = bytearray(part.reader.rows.record(0, len(part.reader)))
    table = np.frombuffer(moved, part.reader.row.dtype)
    with_data = [number for number, field in enumerate(part.reader.fields) if field.has_data]
    for first, number in enumerate(with_data):
        part.reader.row.pointers(table, number)[:] = part.pointers[first :: len(with_data)]
    return bytes(moved)


def _copy_values(file: fs.NewFile, part: _Part, at: int) -> int:
    """Append the values of a part to a file of `at` bytes; returns its new size.

    Values that are contiguous in both files are copied as one run: two or three runs per page.
    """
    rows, pointers = part.allocations, part.pointers
    if not len(rows):
        return at
    sources, ends = rows["ptr"].astype(np.int64), pointers + _room(rows)
    # A run ends where the shift between the files changes, or at a gap between two values.
    breaks = np.diff(pointers - sources).astype(bool) | (pointers[1:] != ends[:-1])
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(rows)]]).tolist()
    for first, stop in pairwise(firsts):
        start, size = int(sources[first]), int(ends[stop - 1] - pointers[first])
        fs.write(file, zeros(int(pointers[first]) - at))
        fs.append(file, part.reader.path, size, start)
        at = int(ends[stop - 1])
    return at
