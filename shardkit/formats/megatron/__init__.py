"""Megatron-LM's indexed datasets: tokens in a `.bin` file, their offsets in a `.idx` beside it.

index.py     the `.idx`, and a `.keys`, our file with the keys of the samples; supported schemas
reader.py    random access by document
writer.py    writes the three files in one pass; joins several shards into one
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.formats.base import Format
from shardkit.formats.megatron.index import field_of, index_size, stored_dtype
from shardkit.formats.megatron.reader import MegatronReader
from shardkit.formats.megatron.writer import MegatronWriter, join
from shardkit.schema import Schema


class Megatron(Format):
    name = "megatron"
    abilities = (
        "write: one field of tokens, one document per sample, one pair of .bin and .idx by default",
        "write: uint16 or int32 like Megatron's tools, also other integers; never truncated",
        "read at random: any .bin with its .idx, the sequences of a document as one sample",
    )
    reader = MegatronReader
    writer = MegatronWriter
    join = staticmethod(join)
    layout_types = MappingProxyType({"keys": bool})

    def layout(self, schema: Schema) -> dict[str, Any]:
        _, kind = field_of(schema)
        stored_dtype(kind)
        return {"schema": schema.to_json(), "keys": True}

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + index_size(1) - index_size(0)

    def notes(self, schema: Schema) -> list[str]:
        _, kind = field_of(schema)
        wanted, stored = np.dtype(kind.dtype).name, stored_dtype(kind).name
        if wanted == stored:
            return []
        refused = "; larger values are refused" if wanted in ("uint32", "uint64") else ""
        return [f"tokens of {wanted} are stored as {stored}, as Megatron supports them{refused}"]


FORMAT = Megatron()
