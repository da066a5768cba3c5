"""One .beton of several: their values packed into pages again, copied in runs as long as those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkit import storage
from shardkit.errors import DamagedError
from shardkit.formats.beton import layout
from shardkit.formats.beton.layout import Row, front_size
from shardkit.formats.beton.reader import BetonReader, Section
from shardkit.formats.beton.writer import zeros
from shardkit.schema import Schema

if TYPE_CHECKING:
    import numpy.typing as npt


class _Part(NamedTuple):
    """A part, and where its values go."""

    path: Path
    page_size: int
    samples: int
    keys_size: int
    samples_before: int
    keys_before: int
    pointers: npt.NDArray[np.int64]  # of its values in the joined file


def join(
    path: Path,
    parts: Sequence[Path],
    schema: Schema,
    classes: Mapping[str, Sequence[str]] | None,
) -> None:
    fields = layout.fields_of(schema)
    samples = sum(len(BetonReader(part)) for part in parts)
    front = front_size(len(fields), Row(fields).dtype.itemsize, samples)
    placed, end = _placed(parts, schema, front)
    page = max([layout.PAGE, *(part.page_size for part in placed)])
    text = layout.pack_text(schema, classes)
    keys_size = sum(part.keys_size for part in placed)
    optional = len(layout.optional_fields(schema))
    size = layout.section_size(text, samples, optional, keys_size)
    with storage.create(path) as file:
        storage.write(file, [layout.pack_front(fields, page, samples, end + size, (end, size))])
        for part, reader in _opened(placed):
            storage.write(file, [bytes(_moved_table(reader, part.pointers))])
        at = front
        for part, reader in _opened(placed):
            at = _copy_values(file, reader, part.pointers, at)
        _write_section(file, placed, layout.pack_head(text, keys_size), keys_size)
        for part, reader in _opened(placed):
            rows = _allocations(reader).copy()
            rows["ptr"] = part.pointers
            rows["sample_id"] += np.uint64(part.samples_before)
            storage.write(file, [rows.tobytes()])


def _placed(paths: Sequence[Path], schema: Schema, at: int) -> tuple[list[_Part], int]:
    """The parts with the pointers of their values, the first `at` or later; and the end of all."""
    parts: list[_Part] = []
    samples, keys_size = 0, 0
    for path in paths:
        reader = BetonReader(path)
        section = _section_of(reader)
        if dict(section.schema) != dict(schema):
            raise DamagedError("a part has other fields than the whole", path=path)
        rows = _allocations(reader)
        values = len(reader) * sum(field.has_data for field in reader.fields)
        if len(rows) != values:
            raise DamagedError(
                "a part has another number of values than its samples",
                path=path,
                expected=f"{values:,}",
                found=f"{len(rows):,}",
            )
        pointers, at = layout.pack_values(_room(rows), at)
        part = (path, reader.page_size, len(reader), len(section.keys))
        parts.append(_Part(*part, samples, keys_size, pointers))
        samples += len(reader)
        keys_size += len(section.keys)
    return parts, at


def _opened(parts: list[_Part]) -> Iterator[tuple[_Part, BetonReader]]:
    """Each part, opened anew for each step: a process has few open files."""
    for part in parts:
        yield part, BetonReader(part.path)


def _section_of(reader: BetonReader) -> Section:
    if reader.section is None:
        raise DamagedError("a part has no section with its keys and types", path=reader.path)
    return reader.section


def _allocations(reader: BetonReader) -> npt.NDArray[np.void]:
    rows = reader.allocations.rows
    return rows.slice(0, len(rows))


def _room(allocations: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Bytes that each value takes: an empty one has a byte too."""
    return np.maximum(allocations["size"].astype(np.int64), 1)


def _moved_table(reader: BetonReader, pointers: npt.NDArray[np.int64]) -> bytearray:
    """The table with other pointers, which allocations have by sample and field, too."""
    # Bytes are copied: numpy's copy of rows leaves whatever was in memory between their fields.
    moved = bytearray(reader.rows.record(0, len(reader)))
    table = np.frombuffer(moved, reader.row.dtype)
    with_data = [number for number, field in enumerate(reader.fields) if field.has_data]
    for first, number in enumerate(with_data):
        reader.row.pointers(table, number)[:] = pointers[first :: len(with_data)]
    return moved


def _copy_values(
    file: storage.NewFile, reader: BetonReader, pointers: npt.NDArray[np.int64], at: int
) -> int:
    """Append the values of a part to a file of `at` bytes; returns how many it has then.

    Values that stand side by side in both files are one run: a page has two or three.
    """
    rows = _allocations(reader)
    if not len(rows):
        return at
    sources, ends = rows["ptr"].astype(np.int64), pointers + _room(rows)
    # A run ends where the way from here to there changes, or something stands between two values.
    breaks = np.diff(pointers - sources).astype(bool) | (pointers[1:] != ends[:-1])
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(rows)]]).tolist()
    for first, stop in pairwise(firsts):
        start, size = int(sources[first]), int(ends[stop - 1] - pointers[first])
        storage.write(file, zeros(int(pointers[first]) - at))
        storage.append(file, reader.path, size, start)
        at = int(ends[stop - 1])
    return at


def _write_section(file: storage.NewFile, parts: list[_Part], head: bytes, keys_size: int) -> None:
    storage.write(file, [head])
    presence: dict[str, list[bytes]] = {}
    for part, reader in _opened(parts):
        section = _section_of(reader)
        offsets = section.offsets.slice(0, part.samples)
        storage.write(file, [(offsets + np.uint64(part.keys_before)).tobytes()])
        for name, at in section.presence_at.items():
            presence.setdefault(name, []).append(section.presence.record(at, part.samples))
    storage.write(file, [np.array(keys_size, layout.KEY_OFFSET).tobytes()])
    for columns in presence.values():
        storage.write(file, [b"".join(columns)])
    for part, reader in _opened(parts):
        storage.write(file, [_section_of(reader).keys.record(0, part.keys_size)])
