"""FFCV's files, `.beton`: a table of rows, pages of values, and a section of our own.

layout.py   the byte layout of a file, and the placement of values in pages
reader.py   random access through the table
writer.py   writes a file in one pass, with images that FFCV can decode; joins several files
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.formats.base import Format
from shardkit.formats.beton.layout import PAGE, fields_of, is_native
from shardkit.formats.beton.reader import BetonReader
from shardkit.formats.beton.writer import BetonWriter, join, stored_image
from shardkit.schema import Array, Bool, FieldType, Float, Image, Int, Schema, Text

# Per field and sample: its part of a row, twice (values are moved to make room for the table), an
# allocation, and the header of a `.npy`.
_FIELD_OVERHEAD = 2 * 16 + 24 + 128
_KEY = 64  # estimated bytes of a key with its offset


class Beton(Format):
    name = "beton"
    abilities = (
        "write: FFCV's version 2, JPEGs unchanged, raw pixels from PPM, all field types",
        "write: other images as JPEG of quality 95, as FFCV decodes nothing else",
        "read at random: its own files and those of ffcv.DatasetWriter, except custom fields",
        "convert to other formats without decoding: raw pixels are returned as PPM",
    )
    reader = BetonReader
    writer = BetonWriter
    join = staticmethod(join)
    encodes_images = True
    raw_images = "ppm"  # FFCV's raw images
    join_may_grow = True  # a value that does not fit into the rest of a page starts a new page

    def layout(self, schema: Schema) -> dict[str, Any]:
        fields_of(schema)
        return {"schema": schema.to_json()}

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        # The rest of a page stays empty if the next value does not fit.
        in_page = np.maximum(PAGE // np.maximum(payload, 1), 1)
        paged = np.where(payload > PAGE, 2 * payload, PAGE // in_page)
        sizes = np.where(payload > PAGE // 64, np.maximum(payload, paged), payload * 65 // 64)
        bounds: npt.NDArray[np.int64] = sizes + fields * _FIELD_OVERHEAD + _KEY
        return bounds

    def notes(self, schema: Schema) -> list[str]:
        kinds = list(schema.values())
        images = any(isinstance(kind, Image) for kind in kinds)
        npy = any(isinstance(kind, Array) and not is_native(kind) for kind in kinds)
        notes = {
            "images other than plain JPEG and PPM are encoded as JPEG of quality 95": images,
            "FFCV sees text as JSON: ffcv.fields.JSONField.unpack gives it back": any(
                isinstance(kind, Text) for kind in kinds
            ),
            "FFCV sees true and false as 1 and 0": any(isinstance(kind, Bool) for kind in kinds),
            "FFCV sees arrays without a fixed shape, or of a dtype that it does not support, as the"
            " bytes of .npy files": npy,
            "FFCV sees absent values as 0, nan, null, nothing or one black pixel": any(
                kind.optional for kind in kinds
            ),
            "without a field of images, text, bytes or arrays, FFCV needs os_cache=True": all(
                isinstance(kind, Int | Float | Bool) for kind in kinds
            ),
        }
        return [note for note, applies in notes.items() if applies]

    def carried(self, kind: FieldType, value: Any) -> Any:
        return stored_image(value).file() if isinstance(kind, Image) else value


FORMAT = Beton()
