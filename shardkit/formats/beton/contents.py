"""A .beton file, mapped or read, and checked: what both reading and joining begin with.

All that opening looks at is the header, the descriptors and our section's text. No number of the
file is trusted before it is compared with the file's length.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkit import storage
from shardkit.errors import DamagedError, FormatError
from shardkit.formats.beton import section as sections
from shardkit.formats.beton.layout import (
    ALLOCATION,
    ALLOCATION_STRUCT,
    DESCRIPTOR,
    HEADER,
    VERSION,
    Field,
    Row,
    fields_of,
    front_size,
    unpack_field,
    unpack_mark,
)
from shardkit.formats.beton.section import Section
from shardkit.storage import Data

if TYPE_CHECKING:
    import numpy.typing as npt


class Contents(NamedTuple):
    """The parts of a file."""

    path: Path
    data: Data
    page_size: int
    samples: int
    fields: list[Field]
    row: Row
    section: Section | None
    rows: memoryview  # the table: a row for each sample
    allocations: Allocations

    @property
    def data_at(self) -> int:
        """The end of the table: no value stands before it."""
        return front_size(len(self.fields), self.row.dtype.itemsize, self.samples)

    def table(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self.rows, self.row.dtype)


def open_contents(path: Path, mapped: bool = True) -> Contents:
    """Open a file and check its parts; raises DamagedError and FormatError that name them.

    Of one that is not mapped all is read but the values and the keys.
    """
    data = _opened(path, mapped)
    header = np.frombuffer(data[: HEADER.itemsize], HEADER)[0]
    version, count, samples = (int(header[n]) for n in ("version", "num_fields", "num_samples"))
    if version != VERSION:
        raise FormatError(
            "the file is no .beton that shardkit reads",
            path=path,
            expected=f"version {VERSION}",
            found=f"version {version}",
            fix="write it again with FFCV 1.0",
        )
    if not count:
        raise FormatError("the .beton has no fields", path=path)
    table_at = front_size(count, 0, 0)
    _check_within(data, table_at, "inside the descriptors of its fields", path)
    descriptors = np.frombuffer(data[HEADER.itemsize : table_at], DESCRIPTOR)
    fields = _fields(descriptors, path)
    row = Row(fields)
    table_end = front_size(count, row.dtype.itemsize, samples)
    _check_within(data, table_end, f"inside the table of its {samples:,} samples", path)
    allocations_at = int(header["alloc_table_ptr"])
    if not table_end <= allocations_at <= len(data):
        raise DamagedError(
            "the .beton is not complete, or cut: its table of allocations is not in it",
            path=path,
            offset=HEADER.fields["alloc_table_ptr"][1],  # type: ignore[index] # it has fields
            expected=f"{table_end:,} to {len(data):,}",
            found=f"{allocations_at:,}",
            fix="copy or make the file again",
        )
    mark = unpack_mark(descriptors[0])
    section = None if mark is None else sections.unpack(data, *mark, samples, path)
    if section is not None and _known_fields(section) != fields:
        raise DamagedError(
            "the .beton has other fields than its section says",
            path=path,
            expected=", ".join(section.schema),
            found=", ".join(field.name for field in fields),
        )
    allocations = Allocations(data, allocations_at, sum(field.has_data for field in fields))
    page_size = int(header["page_size"])
    rows = storage.piece(data, table_at, table_end)
    return Contents(path, data, page_size, samples, fields, row, section, rows, allocations)


def _opened(path: Path, mapped: bool) -> Data:
    data = storage.open_data(path, mapped)
    if len(data) < HEADER.itemsize:
        raise DamagedError(
            "the .beton is truncated inside its header",
            path=path,
            expected=f"at least {HEADER.itemsize} bytes",
            found=f"{len(data)} bytes",
            fix="copy or make the file again",
        )
    return data


def _check_within(data: Data, end: int, where: str, path: Path) -> None:
    if end > len(data):
        raise DamagedError(
            f"the .beton is truncated {where}",
            path=path,
            offset=len(data),
            expected=f"at least {end:,} bytes",
            found=f"{len(data):,} bytes",
            fix="copy or make the file again",
        )


def _fields(descriptors: npt.NDArray[np.void], path: Path) -> list[Field]:
    fields: dict[str, Field] = {}
    for number, descriptor in enumerate(descriptors):
        offset = HEADER.itemsize + number * DESCRIPTOR.itemsize
        field = unpack_field(descriptor, path, offset)
        if field.name in fields:
            raise DamagedError(
                f"the .beton has two fields named {field.name!r}", path=path, offset=offset
            )
        fields[field.name] = field
    return list(fields.values())


def _known_fields(section: Section) -> list[Field] | None:
    """The fields of the schema in a section; None where that is one we would not store."""
    try:
        return fields_of(section.schema)
    except FormatError:
        return None


class Allocations:
    """The rows that say how long each value in the data is, up to the end of the file.

    Rows may stand in any order. Most files, and all of ours, have them in the order of samples and
    fields: the row that this order promises is looked at first. Only where it is another one are
    the pointers sorted, once.
    """

    def __init__(self, data: Data, at: int, fields: int) -> None:
        """`fields` is the number of those that have data; a last row that is cut is not read."""
        count = (len(data) - at) // ALLOCATION.itemsize
        self._data = storage.piece(data, at, at + count * ALLOCATION.itemsize)
        self._fields = fields
        self.rows = np.frombuffer(self._data, ALLOCATION)
        self._sorted: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None

    def size(self, position: int, field: int, ptr: int) -> int:
        """Bytes of the value at `ptr`, of the `field`-th with data; raises ValueError if untold."""
        row = position * self._fields + field
        if row < len(self.rows):
            _, found, size = ALLOCATION_STRUCT.unpack_from(self._data, row * ALLOCATION_STRUCT.size)
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
            order = np.lexsort((self.rows["size"], self.rows["ptr"]))
            self._sorted = (self.rows["ptr"][order], self.rows["size"][order])
        known, sizes = self._sorted
        found = np.searchsorted(known, pointers, "right") - 1
        return np.where(
            (found >= 0) & (known[found] == pointers), sizes[found].astype(np.int64), -1
        )
