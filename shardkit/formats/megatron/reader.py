"""Random access to Megatron's files: a sample is a document, with its sequences concatenated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError
from shardkit.formats.base import KEY, Column, Columns, Ranges, ShardReader, numbered_key
from shardkit.formats.megatron.index import (
    Index,
    Keys,
    check_range,
    field_of,
    keys_path,
    stored_dtype,
)
from shardkit.sample import Sample, key_of
from shardkit.schema import Array, Schema
from shardkit.storage.blobs import Blobs
from shardkit.storage.byte_source import open_source


class MegatronReader(ShardReader):
    """A `.bin` with its `.idx`, and with its `.keys` if there is one."""

    def __init__(self, path: Path, layout: dict[str, Any] | None = None) -> None:
        source = open_source(path)
        self._index = Index(path, source.size)
        stored = self._index.dtype
        if layout is None:
            schema = Schema({"tokens": Array(stored.str, (None,))})
            layout = {"schema": schema.to_json(), "keys": keys_path(path).exists()}
        super().__init__(path, layout, source)
        self._field, kind = field_of(self.schema)
        self._dtype = np.dtype(kind.dtype)
        self._tokens = kind.shape[0] if kind.shape else None
        if stored != self._dtype and stored != stored_dtype(kind):
            raise DamagedError(
                "the tokens have a different type than the manifest says",
                path=self._index.path,
                offset=17,
                expected=f"{stored_dtype(kind)} for {kind}",
                found=str(stored),
            )
        self._keys = Keys(path, len(self)) if layout["keys"] else None
        self._prefix = key_of(path.stem)
        self._decode = _Decode(self._field, stored, self._dtype, self._tokens)
        self.in_memory = self._index.in_memory + (self._keys.in_memory if self._keys else 0)

    def __len__(self) -> int:
        return self._index.documents

    def read(
        self, position: int, fields: Collection[str] | None = None, json_text: bool = False
    ) -> Sample:
        source = self.source
        key = numbered_key(self._prefix, position) if self._keys is None else self._keys[position]
        if fields is not None and self._field not in fields:
            return {KEY: key}
        stored = b"".join(source.read_ranges(self._index.spans(position)))
        tokens = np.frombuffer(stored, self._index.dtype)
        if self._tokens not in (None, len(tokens)):
            raise ValueError(f"it has {len(tokens)} tokens, not {self._tokens}")
        check_range(tokens, self._dtype)
        return {KEY: key, self._field: tokens.astype(self._dtype)}

    def plan(self, positions: npt.NDArray[np.int64], fields: Collection[str]) -> Ranges | None:
        if self._keys is None:
            keys = [numbered_key(self._prefix, position) for position in positions.tolist()]
        else:
            keys = self._keys.take(positions)
        located = self._index.single(positions)
        if located is None:
            return None
        offsets, sizes = (part[None] for part in located)
        if self._field not in fields:
            offsets, sizes = offsets[:0], sizes[:0]
        return Ranges(self.source, offsets, sizes, self._decode, {KEY: keys})

    def spans(self) -> npt.NDArray[np.int64]:
        found = np.zeros((len(self), 2), np.int64)
        for position in range(len(self)):
            if parts := self._index.spans(position):
                found[position] = min(parts)[0], max(at + size for at, size in parts)
        return found

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        return self._index.sizes()


@dataclass(frozen=True)
class _Decode:
    """Turns the bytes of documents into tokens."""

    field: str
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    tokens: int | None  # of each document; None if it varies

    def __call__(self, blobs: list[Blobs]) -> Columns:
        return {self.field: self._tokens(blobs[0])} if blobs else {}

    def _tokens(self, documents: Blobs) -> Column:
        size = None if self.tokens is None else self.tokens * self.stored.itemsize
        if np.count_nonzero(documents.sizes < 0 if size is None else documents.sizes != size):
            raise ValueError("a document has the wrong number of tokens")
        return documents.arrays(self.stored, convert=self._cast)

    def _cast(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        check_range(tokens, self.dtype)
        return tokens.astype(self.dtype, copy=False)
