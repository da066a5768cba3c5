"""LMDB environments: a folder with `data.mdb`, keys of 12 digits, values in msgpack.

layout.py        the byte layout of an LMDB file, and a tree that checks every pointer
maps.py          parses the values of many samples at once
reader.py        random access by number
writer.py        writes an environment in one pass
third_party.py   finds and reads the samples of an LMDB of another program
values.py        decodes their values
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.formats.base import Format, ShardReader
from shardkit.formats.lmdb.layout import HEADER, NODE_MAX, PAGE, Tree
from shardkit.formats.lmdb.reader import ABOUT, LmdbReader
from shardkit.formats.lmdb.third_party import ThirdPartyReader
from shardkit.formats.lmdb.writer import LmdbWriter, join

_FIELD_BYTES = 32  # estimated bytes of a field's name and msgpack header
_SAMPLE_BYTES = 96  # estimated bytes of a key and of the numbers in leaf and branch pages


def _open(path: Path, layout: dict[str, Any] | None = None) -> ShardReader:
    tree = Tree(path)
    return (ThirdPartyReader if tree.get(ABOUT) is None else LmdbReader)(path, layout, tree)


class Lmdb(Format):
    name = "lmdb"
    abilities = (
        "write: one environment by default, in one pass, all field types",
        "read at random: without the LMDB library, every pointer checked",
        "read third-party LMDBs: images, msgpack, JSON, Caffe's Datum, bytes; pickles are refused",
        "convert to other formats without decoding: values and JSON text pass through unchanged",
    )
    reader = staticmethod(_open)
    writer = LmdbWriter
    join = staticmethod(join)

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        stored = payload + fields * _FIELD_BYTES + _SAMPLE_BYTES
        pages = -(-(stored + HEADER) // PAGE) * PAGE + _SAMPLE_BYTES
        return np.where(stored <= NODE_MAX, stored * 2, pages)


FORMAT = Lmdb()
