"""Reads and writes chunks: offsets, then for each sample the sizes of its values and the values.

LitData compresses the samples of a chunk one by one, in frames, or the chunk as a whole.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of, decompressed, unpacked
from shardkit.errors import DamagedError, FormatError, drop_option
from shardkit.formats.base import KEY, ShardSpec, encoded, key_bytes
from shardkit.formats.litdata.values import NUMBERS, absent, decoder, encoder, guessed, leaves_of
from shardkit.formats.offsets import OffsetsWriter
from shardkit.formats.packed import Packed, PackedField, PackedReader
from shardkit.sample import Sample, key_of
from shardkit.schema import RESERVED, Schema
from shardkit.storage.byte_source import ByteSource, Memory, Subrange, Table, open_source

_FRAMED = b"LDFZ01\0\0"
_PREFIX = struct.Struct("<8sHHIII")  # magic, version, flags, samples, samples per frame, frames
_FRAME = struct.Struct("<IIQII")  # first sample, samples, offset, size, decompressed size
_ROWS, _TAIL = b"LDARW01\0", struct.Struct("<I8s")
_PAIR = struct.Struct("<2I")


Item = tuple[ByteSource, int, int]  # start and end of the bytes of a sample


class Items:
    """An uncompressed chunk: the number of samples, their offsets and the end, the samples."""

    count: int

    def __init__(self, source: ByteSource, *, each: bool = False) -> None:
        """`each`: samples are compressed one by one (`compression_level="sample"`)."""
        (self.count,) = struct.unpack("<I", source.read(0, 4))
        self.each = each
        self.source, self.offsets = source, Table(source, 4, self.count + 1, "<u4")
        end = int(self.offsets.slice(self.count, self.count + 1)[0])
        if end > source.size:
            raise source.ends(source.size, end - source.size)

    def bounds(self, position: int) -> tuple[int, int]:
        start, stop = _PAIR.unpack(self.offsets.record(position, 2))
        if start > stop:
            raise ValueError(f"it starts at byte {start:,} and ends at byte {stop:,}")
        return start, stop

    def item(self, position: int) -> Item:
        start, stop = self.bounds(position)
        if not self.each:
            return self.source, start, stop
        data = _inflated(self.source.read(start, stop - start))
        return Memory(data, self.source.path), 0, len(data)


class Framed(Items):
    """A chunk of compressed frames of several samples each (`compression_level="batch"`)."""

    def __init__(self, source: ByteSource) -> None:
        head = _PREFIX.unpack(source.read(0, _PREFIX.size))
        _, version, _, self.count, self._per_frame, frames = head
        if version != 1:
            raise FormatError("unsupported version of the chunk", path=source.path, offset=8)
        if not self._per_frame or frames != -(-self.count // self._per_frame):
            raise DamagedError("the header of the chunk is damaged", path=source.path, offset=12)
        start = _PREFIX.size
        self.each = True
        self.source, self.offsets = source, Table(source, start, self.count + 1, "<u4")
        start += 4 * (self.count + 1)
        self._frames = Table(source, start, frames, np.dtype((np.void, _FRAME.size)))
        self._latest = (-1, b"")  # one tuple, so that threads replace both values at once

    def item(self, position: int) -> Item:
        number = position // self._per_frame
        latest, data = self._latest
        if latest != number:
            _, _, at, stored, size = _FRAME.unpack(self._frames.record(number))
            data = _inflated(self.source.read(at, stored), size)
            self._latest = (number, data)
        base, _ = self.bounds(number * self._per_frame)
        start, stop = self.bounds(position)
        return Memory(data, self.source.path), start - base, stop - base


def rows_of(source: ByteSource) -> ByteSource | None:
    """Return the Arrow file at the end of a chunk; None if there is none."""
    start = source.size - _TAIL.size
    size, magic = _TAIL.unpack(source.read(start, _TAIL.size)) if start > 0 else (0, b"")
    return Subrange(source, start - size, size) if magic == _ROWS else None


def items_of(source: ByteSource, each: bool) -> tuple[Items, int]:
    """The samples of a chunk, and the size of its temporary file. `each`: compressed one by one."""
    head = source.read(0, min(len(_FRAMED), source.size))
    if head == _FRAMED:
        return Framed(source), 0
    if compression_of(head) == "zst":  # the whole file (`compression_level="chunk"`)
        blocks = source.blocks(COMPRESSED_BLOCK)
        source = unpacked(source.path, blocks, "zst", "a compressed chunk")
        return Items(source), source.size
    return Items(source, each=each), 0


def _inflated(data: bytes, size: int | None = None) -> bytes:
    """Return a decompressed frame. Raises ValueError if it is damaged, or has not `size` bytes."""
    found = bytearray()
    starts = range(0, len(data), COMPRESSED_BLOCK)
    for piece in decompressed((data[at : at + COMPRESSED_BLOCK] for at in starts), "zst"):
        found += piece
        if size is not None and len(found) > size:
            break
    if size is not None and len(found) != size:
        raise ValueError(f"a frame does not decompress to {size:,} bytes")
    return bytes(found)


class LitDataReader(PackedReader):
    """A chunk of samples; each is stored as the sizes of its values, then the values."""

    _items: Items | None

    def __init__(self, path: Path, layout: dict[str, Any]) -> None:
        self.path, source = path, open_source(path)
        leaves = layout.get("leaves") or leaves_of(Schema.from_json(layout["schema"]))
        # Tokens have no sizes before them: they are all that follows no values.
        self.packed = Packed([] if layout.get("tokens") else [None] * len(leaves), rest=True)
        self._items, self.temporary_bytes = items_of(source, layout.get("each", False))
        self.offsets = self._items.offsets
        if len(self) != layout.get("samples", len(self)):
            raise DamagedError(
                "the chunk does not have as many samples as index.json says",
                path=path,
                expected=f"{layout['samples']:,}",
                found=f"{len(self):,}",
            )
        if "schema" not in layout:
            layout = self._guessed(layout)
        super().__init__(path, layout, source)
        self.fields = [
            PackedField(name, number, kind, stored, decoder(stored, kind), NUMBERS.get(stored))
            for number, (name, stored) in enumerate(leaves)
            if (kind := self.schema.get(name)) is not None
        ]
        self.key = leaves.index((KEY, "str")) if (KEY, "str") in leaves else None
        # Our writer stores the names of missing fields after the values.
        self.absent = len(leaves) if "leaves" not in layout else None
        self.prefix = key_of(path.name.partition(".")[0])
        self.in_memory = self.offsets.in_memory

    def _guessed(self, layout: dict[str, Any]) -> dict[str, Any]:
        """The layout with a schema, guessed from serializers and the first sample, and problems."""
        fields, unusable, ignored = {}, {}, {}
        try:
            first = self.packed.read(*self.located(0)) if len(self) else []
            for number, (name, stored) in enumerate(layout["leaves"]):
                if name in RESERVED:
                    if (name, stored) != (KEY, "str"):
                        ignored[f"field {name!r}"] = len(self)
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

    def close(self) -> None:
        super().close()
        self._items = None

    def located(self, position: int) -> Item:
        if self._items is None:
            raise ValueError(f"{self.path} is closed")
        return self._items.item(position)

    def stored(self) -> ByteSource | None:
        return None if self._items is None or self._items.each else self._items.source

    def offset(self, position: int, field: str) -> int | None:
        items = self._items
        return None if items is None or items.each else super().offset(position, field)

    def spans(self) -> npt.NDArray[np.int64] | None:
        items = self._items
        return None if items is None or items.each or self.temporary_bytes else super().spans()


class LitDataWriter(OffsetsWriter):
    called, room, fill = "LitData", 1 << 16, b"\0"

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        leaves = dict(leaves_of(spec.schema))
        self._sizes = struct.Struct(f"<{len(leaves)}I")
        kinds = spec.schema.items()
        self._fields = [(name, kind, encoder(leaves[name], kind)) for name, kind in kinds]
        self._absent = {name: absent(leaves[name], kind) for name, kind in kinds}

    def stored(self, sample: Sample) -> list[bytes]:
        """Return the sizes of the values, the values, and the names of missing fields."""
        key = key_bytes(sample[KEY])
        values = [key, *{**self._absent, **encoded(sample, self._fields)}.values()]
        # LitData ignores bytes after the last value.
        missing = [name for name in self._absent if name not in sample]
        sizes = self._sizes.pack(*map(len, values))
        return [sizes, *values, json.dumps(missing).encode() if missing else b""]
