"""One .beton of several: their values packed anew into pages, copied in runs as long as those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkit import storage
from shardkit.errors import DamagedError
from shardkit.formats.beton import section as sections
from shardkit.formats.beton.contents import Contents, open_contents
from shardkit.formats.beton.layout import (
    PAGE,
    Field,
    Row,
    fields_of,
    front_size,
    pack_front,
    pack_values,
)
from shardkit.formats.beton.section import Section
from shardkit.formats.beton.writer import zeros
from shardkit.schema import Schema

if TYPE_CHECKING:
    import numpy.typing as npt


class _Part(NamedTuple):
    """A part, and where it goes. It is opened anew for each step: a process has few open files."""

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
    fields = fields_of(schema)
    samples = sum(open_contents(part).samples for part in parts)
    front = front_size(len(fields), Row(fields).dtype.itemsize, samples)
    placed, end = _placed(parts, schema, fields, front)
    page = max([PAGE, *(part.page_size for part in placed)])
    text = sections.pack_text(schema, classes)
    keys_size = sum(part.keys_size for part in placed)
    size = sections.size(text, samples, len(sections.optional_fields(schema)), keys_size)
    with storage.create(path) as file:
        storage.write(file, [pack_front(fields, page, samples, end + size, (end, size))])
        for part, contents in _opened(placed):
            storage.write(file, [_moved_table(contents, part.pointers).tobytes()])
        at = front
        for part, contents in _opened(placed):
            at = _copy_values(file, contents, part.pointers, at)
        _write_section(file, placed, text, keys_size)
        for part, contents in _opened(placed):
            rows = contents.allocations.rows.copy()
            rows["ptr"] = part.pointers
            rows["sample_id"] += np.uint64(part.samples_before)
            storage.write(file, [rows.tobytes()])


def _placed(
    paths: Sequence[Path], schema: Schema, fields: list[Field], at: int
) -> tuple[list[_Part], int]:
    """The parts with the places of their values, the first at `at` or later; and the end of all."""
    parts: list[_Part] = []
    samples, keys_size = 0, 0
    values = sum(field.has_data for field in fields)
    for path in paths:
        contents = open_contents(path)
        own = _section_of(contents)
        if dict(own.schema) != dict(schema):
            raise DamagedError("a part has other fields than the whole", path=path)
        rows = contents.allocations.rows
        if len(rows) != contents.samples * values:
            raise DamagedError(
                "a part has another number of values than its samples",
                path=path,
                expected=f"{contents.samples * values:,}",
                found=f"{len(rows):,}",
            )
        pointers, at = pack_values(_room(rows), at)
        part = (path, contents.page_size, contents.samples, own.keys_size)
        parts.append(_Part(*part, samples, keys_size, pointers))
        samples += contents.samples
        keys_size += own.keys_size
    return parts, at


def _room(allocations: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Bytes that each value takes: an empty one has a byte too."""
    return np.maximum(allocations["size"].astype(np.int64), 1)


def _opened(parts: list[_Part]) -> Iterator[tuple[_Part, Contents]]:
    for part in parts:
        yield part, open_contents(part.path)


def _section_of(contents: Contents) -> Section:
    if contents.section is None:
        raise DamagedError("a part has no section with its keys and types", path=contents.path)
    return contents.section


def _moved_table(contents: Contents, pointers: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """The table with other pointers: allocations, too, go by sample and field."""
    # By way of bytes: numpy's own copy of rows leaves whatever was in memory between their fields.
    table = np.frombuffer(bytearray(contents.table().tobytes()), contents.row.dtype)
    with_data = [number for number, field in enumerate(contents.fields) if field.has_data]
    for place, number in enumerate(with_data):
        contents.row.pointers(table, number)[:] = pointers[place :: len(with_data)]
    return table


def _copy_values(
    file: storage.NewFile, contents: Contents, pointers: npt.NDArray[np.int64], at: int
) -> int:
    """Append the values of a part to a file of `at` bytes; returns how many it has then.

    Values that stand side by side in both files are one run: a page has two or three.
    """
    rows = contents.allocations.rows
    if not len(rows):
        return at
    sources, ends = rows["ptr"].astype(np.int64), pointers + _room(rows)
    # A run ends where the way from here to there changes, or something stands between two values.
    breaks = np.diff(pointers - sources).astype(bool) | (pointers[1:] != ends[:-1])
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1, [len(rows)]]).tolist()
    for first, stop in pairwise(firsts):
        start, size = int(sources[first]), int(ends[stop - 1] - pointers[first])
        storage.write(file, zeros(int(pointers[first]) - at))
        storage.append(file, contents.path, size, start)
        at = int(ends[stop - 1])
    return at


def _write_section(file: storage.NewFile, parts: list[_Part], text: bytes, keys_size: int) -> None:
    storage.write(file, [sections.pack_head(text, keys_size)])
    presence: dict[str, list[bytes]] = {}
    for part, contents in _opened(parts):
        own = _section_of(contents)
        offsets = own.key_offsets()[:-1]
        storage.write(file, [(offsets + np.uint64(part.keys_before)).tobytes()])
        for name, column in own.presence.items():
            presence.setdefault(name, []).append(column.tobytes())
    storage.write(file, [np.array(keys_size, "<u8").tobytes()])
    for columns in presence.values():
        storage.write(file, [b"".join(columns)])
    for _, contents in _opened(parts):
        own = _section_of(contents)
        storage.write(file, [own.keys[own.keys_at : own.keys_at + own.keys_size]])
