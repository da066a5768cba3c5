"""Random access to chunks."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError, FormatError, drop_option
from shardkit.formats.base import KEY, ShardReader, numbered_key
from shardkit.formats.litdata.chunk import Item, Items, items_of, rows_of
from shardkit.formats.litdata.index import NAME, leaves_of, load
from shardkit.formats.litdata.values import decoder, guessed
from shardkit.helpers.extras import extra
from shardkit.sample import JsonText, Sample, key_of
from shardkit.schema import RESERVED, Schema
from shardkit.storage.byte_source import Memory, open_source

_WHOLE = 1 << 16  # bytes of a sample up to which all its values are read at once


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
    """The layout of a chunk, from index.json."""
    index = load(path.parent)
    if index is None or path.name not in index.samples:
        raise FormatError(
            "a chunk can only be read with an index.json beside it that lists it",
            path=path,
            expected=str(path.with_name(NAME)),
            fix="copy the index.json too, and give the folder",
        )
    return {**index.layout, "samples": index.samples[path.name]}


class LitDataReader(ShardReader):
    """A chunk of samples; each is stored as the sizes of its values, then the values."""

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
        self._decoders = [
            (number, name, decoder(stored, self.schema[name]))
            for number, (name, stored) in enumerate(leaves)
            if name in self.schema
        ]
        self._key = self._names.index(KEY) if (KEY, "str") in leaves else None
        self._ours = "leaves" not in layout
        self._prefix = key_of(path.name.partition(".")[0])
        self.in_memory = self._items.offsets.in_memory

    def _check(self, samples: int) -> None:
        if self._count != samples:
            raise DamagedError(
                "the chunk does not have as many samples as index.json says",
                path=self.path,
                expected=f"{samples:,}",
                found=f"{self._count:,}",
            )

    def _guessed(self, layout: dict[str, Any]) -> dict[str, Any]:
        """The layout with a schema, guessed from serializers and the first sample, and problems."""
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

    def _item(self, position: int) -> Item:
        if self._items is None:
            raise ValueError(f"{self.path} is closed")
        return self._items.item(position)

    def _values(self, position: int) -> list[bytes]:
        """All values of a sample, and as the last item the bytes that follow them."""
        source, start, stop = self._item(position)
        data = source.read(start, stop - start)
        if self._sizes is None:
            return [data, b""]
        found, at = [], self._sizes.size
        for size in self._sizes.unpack_from(data):
            found.append(data[at : at + size])
            at += size
        if at > len(data):
            raise ValueError(f"its values have {at:,} bytes, but the sample has {len(data):,}")
        found.append(data[at:])
        return found

    def _some(self, position: int, numbers: Collection[int]) -> list[bytes] | dict[int, bytes]:
        """These values of a sample. Of a large sample, no other values are read."""
        source, start, stop = self._item(position)
        if stop - start <= _WHOLE or self._sizes is None:
            return self._values(position)
        sizes = self._sizes.unpack(source.read(start, self._sizes.size))
        starts = [*accumulate(sizes, initial=start + self._sizes.size)]
        ends = [*starts[1:], stop]
        found = source.read_ranges([(starts[n], ends[n] - starts[n]) for n in numbers])
        return dict(zip(numbers, found, strict=True))

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        decoders, key = self._decoders, self._key
        if fields is None:
            values: list[bytes] | dict[int, bytes] = self._values(position)
        else:
            decoders = [each for each in decoders if each[1] in fields]
            about = [len(self._names)] if key is None else [key, len(self._names)]
            values = self._some(position, [*about, *(number for number, _, _ in decoders)])
        name = numbered_key(self._prefix, position) if key is None else values[key].decode()
        absent = values[len(self._names)] if self._ours else b""
        missing = json.loads(absent) if absent else ()
        sample: Sample = {KEY: name}
        for number, name, decode in decoders:
            if name not in missing:
                value = decode(values[number])
                text = isinstance(value, JsonText) and not json_text
                sample[name] = json.loads(value) if text else value
        return sample

    def offset(self, position: int, field: str) -> int | None:
        source, start, _ = self._item(position)
        if isinstance(source, Memory) or self._sizes is None:
            return start if self._sizes is None else None
        sizes = self._sizes.unpack(source.read(start, self._sizes.size))
        return start + self._sizes.size + int(sum(sizes[: self._names.index(field)]))

    def spans(self) -> npt.NDArray[np.int64] | None:
        if type(self._items) is not Items or self.temporary_bytes:
            return None
        ends = self._items.offsets.slice(0, self._count + 1).astype(np.int64)
        return np.stack([ends[:-1], ends[1:]], axis=1)
