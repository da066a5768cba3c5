"""Writes a TAR shard: the members of each sample in a row, and the index beside the shard."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import dump_array
from shardkit.codecs.media import SUFFIXES_OF, checked
from shardkit.errors import SampleError
from shardkit.formats.base import KEY, ShardSpec, ShardWriter, key_bytes, not_stored
from shardkit.formats.wds import names
from shardkit.formats.wds.extra_indexes import Beside
from shardkit.formats.wds.layout import (
    BLOCK,
    END,
    header,
    index_dtype,
    index_path,
    index_struct,
    padding,
)
from shardkit.formats.wds.values import ENCODERS, Encoder
from shardkit.sample import Sample
from shardkit.schema import FieldType, Image, Schema
from shardkit.storage import fs

# Characters that DALI's wds2idx cannot handle in keys: it writes ASCII names separated by blanks.
ODD = re.compile(r"[\s\x80-\U0010ffff]")
_BLANK = re.compile(r"\s")


class WdsWriter(ShardWriter):
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        super().__init__(path, spec)
        self._pack = index_struct(spec.schema).pack
        self._fields = _fields(spec.schema)
        self._rows = bytearray()
        endings = {e for field in self._fields for e in field.extensions.values()}
        self._beside = Beside(path, spec.beside, endings) if spec.beside else None
        self.keys: Counter[str] = Counter()
        self._file = fs.BufferedFile(path)

    def write(self, sample: Sample) -> bool:
        key = sample[KEY]
        name = _member_name(key)
        start = at = self._file.size
        chunks: list[bytes] = []
        row: list[int] = []
        members: list[tuple[bytes, bytes, int, int]] = []
        for field in self._fields:
            if field.name not in sample:
                row += (0, 0, 0, 0) if field.is_image else (0, 0)
                continue
            payload, format, pixels = sample[field.name], "", [0, 0]
            if field.encode is None:
                format, *pixels = checked(field.kind, payload, key, field.name)
            else:
                try:
                    payload = field.encode(payload)
                except (TypeError, ValueError, RecursionError) as error:
                    raise not_stored(error, payload, key, field.name) from error
            size, extension = len(payload), field.extensions[format]
            head = header(name + extension, size)
            at += len(head)
            row += (at, size, *pixels) if field.is_image else (at, size)
            members.append((name, extension, at, size))
            chunks += (head, payload, padding(size))
            at += size + -size % BLOCK
        if not chunks:
            raise SampleError("a TAR cannot hold a sample without fields", key=key)
        if self.spec.is_full(len(self._rows), at + len(END)):
            return False
        if self._beside is not None:
            self._beside.add(key, members)
        if ODD.search(key):
            blank = _BLANK.search(key)
            self.keys["blanks" if blank else "characters outside of ASCII"] += 1
        # The full name of over 100 bytes is in GNU's long-name member, after its header block.
        name_at = start if len(chunks[0]) == BLOCK else start + BLOCK
        self._rows += self._pack(name_at, len(name), *row)
        self._file.write(*chunks)
        return True

    def finish(self) -> None:
        with self._file:
            self._file.write(END)
        index = np.frombuffer(self._rows, index_dtype(self.spec.schema))
        _write_index(self.path, index)
        if self._beside is not None:
            self._beside.write(index)


def join(path: Path, parts: Sequence[Path], spec: ShardSpec) -> None:
    """Join several TARs: concatenates their members, and their indexes with shifted offsets."""
    beside = Beside(path, spec.beside, ())
    indexes, start = [np.zeros(0, index_dtype(spec.schema))], 0
    with fs.create(path) as file:
        for part in parts:
            index = np.load(index_path(part))
            for column in index.dtype.names:
                offsets = index[column]["offset"]
                offsets[offsets != 0] += start  # 0: the sample has no such field
            # For a key, offset 0 does not mean absent: the first key of a TAR is at byte 0.
            index["__key__"]["offset"][index["__key__"]["offset"] == 0] = start
            indexes.append(index)
            beside.append(part, start)
            start += fs.append(file, part, part.stat().st_size - len(END))
        fs.write(file, [END])
    index = np.concatenate(indexes)
    _write_index(path, index)
    beside.write(index)


def _write_index(path: Path, index: npt.NDArray[np.void]) -> None:
    fs.make_folder(index_path(path).parent)
    with fs.create(index_path(path)) as file:
        fs.write(file, [dump_array(index)])


class _Field(NamedTuple):
    """The properties of a field that the inner loop needs."""

    name: str
    kind: FieldType
    is_image: bool
    encode: Encoder | None  # None for an encoded file, which is stored unchanged
    extensions: dict[str, bytes]  # by the format of the file; under "" for other values


def _fields(schema: Schema) -> list[_Field]:
    fields = []
    for name, endings in names.extensions(schema).items():
        kind = schema[name]
        first, *_ = dotted = [b"." + ending.encode() for ending in endings]
        encode, extensions = None, {"": first}
        if type(kind) in SUFFIXES_OF:  # a field with a single extension uses it for all formats
            by_suffix = {e.rpartition(".")[2]: d for e, d in zip(endings, dotted, strict=True)}
            # Reversed, so that the first suffix of a format takes precedence.
            suffixes = reversed([*SUFFIXES_OF[type(kind)].items()])
            extensions = {format: by_suffix.get(suffix, first) for suffix, format in suffixes}
        else:
            encode = kind.entry(ENCODERS)
        fields.append(_Field(name, kind, isinstance(kind, Image), encode, extensions))
    return fields


def _member_name(key: str) -> bytes:
    """Return the key as the prefix of a member name.

    Raises SampleError if WebDataset would read another key, or none, from that name.
    """
    base = key[key.rfind("/") + 1 :]
    plain = base and "." not in base and key[:2] != "__" and "\0" not in key and "\n" not in key
    if not plain and ("\0" in key or names.split(key + ".x") != (key, "x")):
        raise SampleError(
            "a TAR member cannot be named after this key",
            key=key,
            expected="a base name without dots, not of the form __name__, and no zero bytes",
            fix="use --safe-keys, which encodes such characters, or replace the dots by '_'",
        )
    return key_bytes(key)
