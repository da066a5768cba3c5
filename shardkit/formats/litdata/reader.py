"""Reads chunks at random."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.byte_source import ByteSource, Memory, open_source
from shardkit.errors import DamagedError, FormatError, drop_option
from shardkit.extras import extra
from shardkit.formats.base import KEY, ShardReader
from shardkit.formats.litdata.chunk import Items, items_of, rows_of
from shardkit.formats.litdata.index import ABSENT, NAME, leaves_of, load
from shardkit.formats.litdata.values import decoder, guessed
from shardkit.sample import JsonText, Sample, key_of
from shardkit.schema import RESERVED, Schema

if TYPE_CHECKING:
    import numpy.typing as npt


def open_chunk(path: Path, layout: dict[str, Any] | None = None) -> ShardReader:
    """The reader of a chunk: of samples, or of rows that LitData stores as Arrow."""
    if layout is None:
        layout = _of_index(path)
    if "rows" not in layout and ("leaves" not in layout or rows_of(open_source(path)) is None):
        return LitDataReader(path, layout)
    with extra("arrow", "reading text rows of LitData"):
        from shardkit.formats.litdata.rows import RowsReader
    return RowsReader(path, layout if "rows" in layout else None)


def _of_index(path: Path) -> dict[str, Any]:
    """What index.json says of a chunk."""
    index = load(path.parent)
    if index is None or path.name not in index.samples:
        raise FormatError(
            "a chunk is read by the index.json beside it, which must list it",
            path=path,
            expected=str(path.with_name(NAME)),
            fix="copy the index.json too, and give the folder",
        )
    return {**index.layout, "samples": index.samples[path.name]}


class LitDataReader(ShardReader):
    """A chunk of samples, each the sizes of its values and the values."""

    _items: Items | None
    _count: int

    def __init__(self, path: Path, layout: dict[str, Any]) -> None:
        self.path, source = path, open_source(path)
        leaves = layout.get("leaves") or leaves_of(Schema.from_json(layout["schema"]))
        self._names = [name for name, _ in leaves]
        # Tokens have no sizes before them.
        self._sizes = None if layout.get("tokens") else struct.Struct(f"<{len(leaves)}I")
        self._items, self.temporary_bytes = items_of(source, layout.get("each", False))
        self._count = self._items.count
        self._check(layout.get("samples", self._count))
        if "schema" not in layout:
            layout = self._guessed(layout)
        super().__init__(path, layout, source)
        self._decoders = {
            number: (name, decoder(stored, self.schema[name]))
            for number, (name, stored) in enumerate(leaves)
            if name in self.schema
        }
        about = [n for n, leaf in enumerate(leaves) if leaf == (KEY, "str")]
        self._key = about[0] if about else None
        ours = "leaves" not in layout and self._names[-1] == ABSENT
        self._absent = len(leaves) - 1 if ours else None
        self._about = {n for n in (self._key, self._absent) if n is not None}
        self._prefix = key_of(path.name.partition(".")[0])
        self.in_memory = self._items.offsets.in_memory

    def _check(self, samples: int) -> None:
        if self._count != samples:
            raise DamagedError(
                "the chunk does not have the samples that index.json lists",
                path=self.path,
                expected=f"{samples:,}",
                found=f"{self._count:,}",
            )

    def _guessed(self, layout: dict[str, Any]) -> dict[str, Any]:
        """A layout with types by serializers and the first sample, and why values are not read."""
        fields, unusable, ignored = {}, {}, {}
        first: list[bytes] = []
        try:
            first = self._values(0) if self._count else []
            for number, (name, stored) in enumerate(layout["leaves"]):
                if name in RESERVED:
                    if (name, stored) != (KEY, "str"):
                        ignored[f"field {name!r}"] = self._count
                    continue
                try:
                    fields[name] = guessed(stored, first[number] if first else None)
                except FormatError as error:
                    error.fix = f"convert without it: {drop_option(name)}; or {error.fix}"
                    unusable[name] = error.located(path=self.path, field=name)
        except (ValueError, struct.error) as error:
            what = f"the first sample is damaged: {error}"
            raise DamagedError(what, path=self.path, position=0) from error
        more = {"unusable": unusable, "ignored": ignored}
        found = {**layout, "schema": Schema(fields).to_json()}
        return {**found, **{name: value for name, value in more.items() if value}}

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        super().close()
        self._items = None

    def _ranges(self, position: int, whole: bool) -> tuple[ByteSource, list[tuple[int, int]]]:
        """Where the values of a sample are: in the file, or in memory if the `whole` is read."""
        if self._items is None:
            raise ValueError(f"{self.path} is closed")
        source, start, stop = self._items.item(position)
        if whole:
            source = Memory(source.read(start, stop - start), self.path)
            start, stop = 0, source.size
        if self._sizes is None:
            return source, [(start, stop - start)]
        sizes = self._sizes.unpack(source.read(start, self._sizes.size))
        starts = [*accumulate(sizes, initial=start + self._sizes.size)]
        if starts[-1] > stop:
            raise ValueError(f"the sizes of its values are {sizes}, in {stop - start:,} bytes")
        return source, [*zip(starts, sizes, strict=False)]

    def _values(self, position: int) -> list[bytes]:
        source, ranges = self._ranges(position, whole=True)
        return source.read_ranges(ranges)

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        if fields is None:
            wanted = [*self._decoders]
            values = dict(enumerate(self._values(position)))
        else:
            wanted = [n for n, (name, _) in self._decoders.items() if name in fields]
            source, ranges = self._ranges(position, whole=False)
            numbers = sorted({*wanted, *self._about})
            found = source.read_ranges([ranges[n] for n in numbers])
            values = dict(zip(numbers, found, strict=True))
        key = None if self._key is None else values[self._key].decode()
        sample: Sample = {KEY: f"{self._prefix}/{position:09d}" if key is None else key}
        absent = values[self._absent] if self._absent is not None else b""
        missing = json.loads(absent) if absent else ()
        for number in wanted:
            name, decode = self._decoders[number]
            if name in missing:
                continue
            value = decode(values[number])
            is_text = isinstance(value, JsonText) and not json_text
            sample[name] = json.loads(value) if is_text else value
        return sample

    def offset(self, position: int, field: str) -> int | None:
        source, ranges = self._ranges(position, whole=False)
        at_rest = not isinstance(source, Memory)
        return ranges[self._names.index(field)][0] if at_rest else None

    def spans(self) -> npt.NDArray[np.int64] | None:
        if type(self._items) is not Items or self.temporary_bytes:
            return None
        ends = self._items.offsets.slice(0, self._count + 1).astype(np.int64)
        return np.stack([ends[:-1], ends[1:]], axis=1)
