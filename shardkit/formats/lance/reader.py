"""Random access to Lance data files written by shardkit, and to third-party Lance datasets.

pylance, in a separate process, finds where values are stored. Values that are stored uncompressed
(images, other bytes and long lists of numbers, as shardkit writes them) are read directly from the
file. Of all others, small ones are read for a page of rows at a time, and large ones individually.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import FormatError
from shardkit.formats.arrow.columns import Arrays, Known
from shardkit.formats.arrow.reader import BatchReader
from shardkit.formats.arrow.values import PAGE, Column, column, is_list, maker, plain
from shardkit.formats.base import KEY, Columns
from shardkit.formats.lance.process import About, FileRows, Page, ask
from shardkit.schema import Array, FieldType, Text
from shardkit.storage.byte_source import (
    ByteSource,
    LocalFile,
    Table,
    changed,
    open_source,
    version_of,
)
from shardkit.storage.remote.path import RemotePath

if TYPE_CHECKING:
    import pyarrow as pa

VERSIONS, DATA = "_versions", "data"  # folders of a dataset
_SMALL = 256  # bytes of a value, up to which a page of values is read at once
_SCAN = 16 << 20  # bytes that are scanned at a time
_COUNTED = 256 << 20  # bytes of a column up to which its nulls are counted


class LanceReader(BatchReader):
    """A data file, or a version of a dataset, given by the path of its Lance manifest."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        if isinstance(path, RemotePath):
            raise FormatError(
                "Lance can only be read from local disks",
                path=path,
                fix="copy the dataset to this machine first",
            )
        folder = self._folder = path.parent.parent
        if layout is None and path.parent.name == DATA and (folder / VERSIONS).is_dir():
            raise FormatError(
                "this is a single data file of a Lance dataset; only the dataset says which rows"
                " are valid",
                path=path,
                fix=f"give {folder}",
            )
        self._in_file: dict[str, list[_Stored]] = {}
        self._third_party = layout is None and path.parent.name == VERSIONS
        # Those of the first opening: they must still be the same when the dataset is opened again.
        self._parts: tuple[FileRows, ...] = (layout or {}).get("parts", ())
        super().__init__(path, layout)
        if self._third_party:
            older = sum(1 for _ in path.parent.glob("*.manifest")) - 1
            deleted = self._about.deleted
            passed = {"older version of the dataset": older, "deleted row": deleted}
            self.layout["ignored"] = {what: count for what, count in passed.items() if count}
            self.layout["parts"] = self._parts

    def plan(self, positions: npt.NDArray[np.int64], fields: Collection[str]) -> Columns:
        return self._others([*self._keyed, *fields], positions)

    def _open(self) -> tuple[pa.Schema, list[int]]:
        for part in self._folder.rglob("*") if self._third_party else ():
            if not (part.is_file() or part.is_dir()):  # pylance would block on a named pipe
                open_source(part)  # raises an error that says what it is
        self._compare(self._parts)
        about = self.path.stat()
        self._which = os.path.abspath(self.path), (about.st_ino, about.st_size, about.st_mtime_ns)
        self._about: About = ask(self.path, "about", self._which)
        self._parts = self._parts or self._about.parts
        full, rest = divmod(self._about.rows, PAGE)
        return self._about.columns, [PAGE] * full + [rest] * (rest > 0)

    def _load(self, number: int, names: Collection[str]) -> Arrays:
        return self._table(names, self._starts[number], self._starts[number + 1])

    def _table(self, names: Collection[str], first: int, stop: int) -> Arrays:
        _ = self._opened  # raises if the reader is closed
        try:
            table = ask(self.path, "rows", self._which, [*names], first, stop)
        finally:  # pylance may also fail because of a change
            begin = bisect_right(self._parts, first, key=lambda part: part.stop)
            end = bisect_left(self._parts, stop, key=lambda part: part.first)
            self._compare(self._parts[begin:end])
        if len(table) != stop - first:
            raise ValueError(f"{len(table)} rows instead of {stop - first}")
        table.validate()
        return {name: plain(table.column(name).chunk(0)) for name in names}

    def _compare(self, parts: Iterable[FileRows]) -> None:
        """Raise DamagedError if a file was changed since it was opened."""
        opened = self._opened
        assert isinstance(opened, LocalFile)
        opened.compare(self._where(0))
        for part in parts:
            with contextlib.suppress(FileNotFoundError):  # pylance says so if it needs the file
                now = os.stat(part.path)
                if version_of(now) != part.version:
                    raise changed(Path(part.path), part.version, now)

    def _page(self, number: int, row: int, names: Collection[str]) -> dict[str, Column]:
        small = [name for name in names if not self._is_large(name)]
        page = super()._page(number, row, small) if small else {}
        if len(small) == len(names):
            return page
        first = self._starts[number]
        return {**page, **{n: self._large(n, first) for n in names if n not in small}}

    def _is_large(self, name: str) -> bool:
        return self._about.average[name] > _SMALL or bool(self._stored(name))

    def _large(self, name: str, first: int) -> Column:
        """Return the values of a column from row `first` on, read one by one."""
        kind: FieldType = Text() if name == KEY else self.schema[name]
        pages = self._stored(name)

        def ask_for(row: int) -> Any:
            array = self._table([name], first + row, first + row + 1)[name]
            return column(kind, array, 0, 1).get(0)

        def read(row: int) -> Any:
            data = _at(pages, first + row).read(first + row, self._opened)
            return None if data is None else make(data)

        if not pages:
            return Column(ask_for, 0)
        make = maker(kind, self._about.columns.field(name).type)
        return Column(read, 0)

    def offset(self, position: int, field: str) -> int:
        pages = self._stored(field)
        return _at(pages, position).range(position)[0] if pages else self._where(0)

    def _stored(self, name: str) -> list[_Stored]:
        """The pages of a column whose values are stored uncompressed; empty for other columns."""
        found = self._in_file.get(name)
        if found is None:
            found = []
            stored = self._about.columns.field(name).type
            if not is_list(stored) or isinstance(self.schema.get(name), Array):
                found = [_Stored(page, self._opened) for page in self._about.pages.get(name, ())]
            self._in_file[name] = found
            self._note(sum(page.in_memory for page in found))
        return found

    def _forget(self) -> None:
        super()._forget()
        self._in_file = {}

    def _scan(self, names: Collection[str]) -> Iterator[Arrays]:
        widest = max(self._about.average[name] for name in names)
        step = max(min(int(_SCAN // max(widest, 1)), PAGE), 1)
        for first in range(0, len(self), step):
            with self._damage("rows are damaged"):
                yield self._table(names, first, min(first + step, len(self)))

    def _known_nulls(self) -> Known:
        """Very large columns may have nulls, unless their pages say that there are none."""
        about = self._about
        found = {n: 1 for n, a in about.average.items() if a * about.rows > _COUNTED}
        whole = {n for n, pages in about.pages.items() if not any(page.nulls for page in pages)}
        return Known(found, {name for name in whole if not is_list(about.columns.field(name).type)})

    def _where(self, number: int) -> int:
        return 0  # the whole file: only pylance knows the offset


def _at(pages: list[_Stored], row: int) -> _Stored:
    return pages[bisect_right(pages, row, key=lambda stored: stored.page.first) - 1]


class _Stored:
    """A `Page` in its file."""

    def __init__(self, page: Page, file: ByteSource) -> None:
        self.page = page
        self.ends: Table | None = None
        if page.ends:
            self.ends = Table(file, page.ends, page.rows + 1, f"<u{page.width}")
        self.in_memory = 200 + (self.ends.in_memory if self.ends else 0)

    def range(self, row: int) -> tuple[int, int]:
        """Offset and size of a value in the file, including the bytes before it."""
        page, row = self.page, row - self.page.first
        if self.ends is None:
            return page.start + row * page.width, page.width
        begin, end = np.frombuffer(self.ends.record(row, 2), self.ends.dtype).tolist()
        if end < begin:
            raise ValueError(f"a value of {end - begin:,} bytes")
        return page.start + begin, end - begin

    def read(self, row: int, file: ByteSource) -> bytes | None:
        """Return the bytes of a value; None if it is null."""
        data = file.read(*self.range(row))
        if self.ends is None:
            return data
        before, nulls = self.page.before, self.page.nulls
        if nulls and data == b"\1":
            return None
        size = int.from_bytes(data[nulls:before], "little")
        if size != len(data) - before or (nulls and data[0]):
            raise ValueError(f"a value of {size:,} bytes in a range of {len(data):,} bytes")
        return data[before:]
