"""Writes a TAR shard: samples' members side by side, and the index beside the shard."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np

from shardkit import storage
from shardkit.codecs.image import SUFFIX_OF, NotAnImageError, probe
from shardkit.errors import SampleError
from shardkit.formats.base import ShardWriter
from shardkit.formats.wds import names
from shardkit.formats.wds.layout import BLOCK, END, header, index_dtype, index_path, padding
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bytes, FieldType, Image, Int, Schema, Text

_BUFFER = 4 << 20  # bytes gathered before a write
_PLACE = struct.Struct("<QQ")
_PIXELS = struct.Struct("<II")


class WdsWriter(ShardWriter):
    def __init__(self, path: Path, schema: Schema, max_bytes: int | None) -> None:
        self._path = path
        self._schema = schema
        self._extensions = names.extensions(schema)
        self._columns = index_dtype(schema)
        self._max_bytes = max_bytes
        self._rows = bytearray()
        self._size = 0  # of the file, with what is still in the buffer
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._file = storage.create(path)

    def write(self, sample: Sample) -> bool:
        key = _checked_key(sample["__key__"])
        start = at = self._size
        chunks: list[bytes] = []
        row = []
        for field, kind in self._schema.items():
            if field not in sample:
                row.append(bytes(self._columns[field].itemsize))
                continue
            payload, extension, size = self._encode(field, kind, sample)
            head = header(key + b"." + extension.encode(), len(payload))
            at += len(head)
            row.append(_PLACE.pack(at, len(payload)) + size)
            chunks += (head, payload, padding(len(payload)))
            at += len(payload) + -len(payload) % BLOCK
        if not chunks:
            raise SampleError("a TAR cannot hold a sample without fields", key=sample["__key__"])
        if self._max_bytes is not None and self._rows and at + len(END) > self._max_bytes:
            return False
        # A name over 100 bytes stands in one piece in the member before, one block in.
        in_header = len(chunks[0]) == BLOCK
        self._rows += _PLACE.pack(start if in_header else start + BLOCK, len(key)) + b"".join(row)
        self._buffer += chunks
        self._buffered += at - start
        self._size = at
        if self._buffered >= _BUFFER:
            self._flush()
        return True

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._buffer.append(END)
            self._flush()
        finally:
            self._file.close()
        index = io.BytesIO()
        np.save(index, np.frombuffer(self._rows, self._columns))
        with storage.create(index_path(self._path)) as file:
            storage.write(file, index.getbuffer())

    def _flush(self) -> None:
        data = b"".join(self._buffer)
        self._buffer, self._buffered = [], 0
        storage.write(self._file, data)

    def _encode(self, field: str, kind: FieldType, sample: Sample) -> tuple[bytes, str, bytes]:
        """Payload, extension, and for a picture its width and height as the index has them."""
        value = sample[field]
        extensions = self._extensions[field]
        if not isinstance(kind, Image):
            return encode(kind, value), extensions[0], b""
        try:
            info = probe(value)
        except NotAnImageError as error:
            raise SampleError(
                "the value is no picture",
                key=sample["__key__"],
                field=field,
                expected="an encoded picture: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM",
                found=str(error),
            ) from None
        extension = extensions[0]
        if len(extensions) > 1:
            suffix = SUFFIX_OF[info.format]
            extension = next(e for e in extensions if e.rpartition(".")[2] == suffix)
        return value, extension, _PIXELS.pack(info.width, info.height)


def encode(kind: FieldType, value: Any) -> bytes:
    """A value as the payload of a member."""
    if isinstance(kind, Bytes):
        return value  # type: ignore[no-any-return]
    if isinstance(kind, Int):
        return b"%d" % value
    if isinstance(kind, Text):
        return value.encode()  # type: ignore[no-any-return]
    if isinstance(kind, Array):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return file.getvalue()
    return JsonText.of(value).encode()


def _checked_key(key: str) -> bytes:
    """The key as a member's name; raises SampleError where WebDataset would read another key."""
    split = names.split(key + ".x")
    if split is None or split[0] != key or "\0" in key:
        raise SampleError(
            "a TAR member cannot be named after this key",
            key=key,
            expected="a base name without dots, not of the form __name__, and no zero bytes",
            fix="replace the dots in the key, for example with '_'",
        )
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise SampleError("the key is not valid Unicode", key=ascii(key)) from None
