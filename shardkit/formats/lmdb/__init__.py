"""LMDB environments: a folder with `data.mdb`, keys of 12 digits, values in msgpack.

layout.py        the byte layout of an LMDB file, and a tree that checks every pointer
reader.py        random access by number
writer.py        writes an environment in one pass
third_party.py   finds the samples of an LMDB of another program; third_party_values.py decodes them
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.formats.base import Format
from shardkit.formats.lmdb.layout import HEADER, NODE_MAX, PAGE
from shardkit.formats.lmdb.reader import LmdbReader
from shardkit.formats.lmdb.writer import LmdbWriter, join

_FIELD_BYTES = 32  # estimated bytes of a field's name and msgpack header
_SAMPLE_BYTES = 96  # estimated bytes of a key and of the numbers in leaf and branch pages


class Lmdb(Format):
    name = "lmdb"
    abilities = (
        "write: one environment by default, in one pass, all field types",
        "read at random: without the LMDB library, every pointer checked",
        "read foreign LMDBs: images, msgpack, JSON, Caffe's Datum, bytes; pickles are refused",
        "convert to other formats without decoding: values and JSON text pass through unchanged",
    )
    reader = LmdbReader
    writer = LmdbWriter
    join = staticmethod(join)

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        stored = payload + fields * _FIELD_BYTES + _SAMPLE_BYTES
        pages = -(-(stored + HEADER) // PAGE) * PAGE + _SAMPLE_BYTES
        return np.where(stored <= NODE_MAX, stored * 2, pages)


FORMAT = Lmdb()
