"""Reads Megatron's files at random: a sample is a document, its sequences one after the other."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit import storage
from shardkit.errors import DamagedError, SampleError, ShardkitError
from shardkit.formats.base import OldReader
from shardkit.formats.megatron.index import Index
from shardkit.formats.megatron.keys import Keys
from shardkit.formats.megatron.layout import (
    check_range,
    field_of,
    keys_path,
    stored_dtype,
)
from shardkit.sample import Sample, key_of
from shardkit.schema import Array, Schema
from shardkit.storage import Data

if TYPE_CHECKING:
    import numpy.typing as npt


class MegatronReader(OldReader):
    """A `.bin` with its `.idx`. Values are copies.

    All files are mapped; or else the `.bin` is read piece by piece, with the others in memory.
    """

    def __init__(
        self, path: Path, layout: dict[str, Any] | None = None, mapped: bool = True
    ) -> None:
        self._path = path
        self._mapped = mapped
        self._data: Data | None = storage.open_data(path, mapped)
        self._index = Index(path, len(self._data), mapped)
        stored = self._index.dtype
        if layout is None:
            schema = Schema({"tokens": Array(stored.str, (None,))})
            layout = {"schema": schema.to_json(), "keys": keys_path(path).exists()}
        self.layout = layout
        self.schema = Schema.from_json(layout["schema"])
        self._field, kind = field_of(self.schema)
        self._dtype = np.dtype(kind.dtype)
        self._tokens = kind.shape[0] if kind.shape else None
        if stored != self._dtype and stored != stored_dtype(kind):
            raise DamagedError(
                "the tokens are of another type than the manifest says",
                path=self._index.path,
                offset=17,
                expected=f"{stored_dtype(kind)} for {kind}",
                found=str(stored),
            )
        self._keys = Keys(path, len(self), mapped) if layout["keys"] else None
        self._prefix = key_of(path.stem)

    def __len__(self) -> int:
        return self._index.documents

    def __getitem__(self, position: int) -> Sample:
        return self.read_fields(position, (self._field,))

    def read_fields(self, position: int, fields: Collection[str]) -> Sample:
        """The sample, or its key alone: then its tokens are not touched."""
        data = self._open
        if not 0 <= position < len(self):
            raise IndexError(f"{self._path} has {len(self)} samples, not a position {position}")
        sample: Sample = {}
        path, field = self._path, "__key__"
        try:
            sample[field] = self._key(position)
            if self._field in fields:
                field = self._field
                sample[field] = self._value(data, position)
        except ShardkitError as error:  # the file was cut since
            raise error.located(
                position=position, key=sample["__key__"], field=field
            ) from error.__cause__
        except ValueError as error:
            if field == "__key__":
                path = keys_path(path)
            raise SampleError(
                f"a value is damaged: {error}",
                path=path,
                position=position,
                key=sample.get("__key__"),
                field=field,
            ) from error
        return sample

    def read_rows(
        self, field: str, positions: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> bool:
        """The tokens of documents that are equally long and of one sequence each."""
        data = self._open
        places = self._index.places(positions)
        if places is None or self._tokens not in (None, out.shape[1]):
            return False
        starts, lengths = places
        stored = self._index.dtype
        if (lengths != out.shape[1]).any():
            return False
        try:
            found = storage.rows(data, starts, out.shape[1] * stored.itemsize).view(stored)
            check_range(found, self._dtype)
        except (ValueError, ShardkitError):
            return False
        out[...] = found
        return True

    def read_keys(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """The keys of many samples."""
        return [self.read_fields(position, ())["__key__"] for position in positions.tolist()]

    @property
    def _open(self) -> Data:
        if self._data is None:
            raise ValueError(f"{self._path} is closed")
        return self._data

    def _key(self, position: int) -> str:
        return f"{self._prefix}/{position:09d}" if self._keys is None else self._keys[position]

    def _value(self, data: Data, position: int) -> npt.NDArray[Any]:
        stored = b"".join([data[start:stop] for start, stop in self._index.spans(position)])
        tokens = np.frombuffer(stored, self._index.dtype)
        if self._tokens not in (None, len(tokens)):
            raise ValueError(f"it has {len(tokens)} tokens, not {self._tokens}")
        check_range(tokens, self._dtype)
        return tokens.astype(self._dtype)

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        """Stored bytes of the tokens of every sample."""
        return self._index.sizes()

    def close(self) -> None:
        self._data = None

    def __reduce__(self) -> tuple[Any, ...]:
        return MegatronReader, (self._path, self.layout, self._mapped)
