"""The optional extension `_crop.c`, for fast loading of JPEGs; None if it was not built."""

from __future__ import annotations

from types import ModuleType

from shardkit.helpers.extras import not_built

SLOWER = 3  # times slower without it: 2.9 for random crops of photos, 3.2 for center crops

_crop: ModuleType | None
MISSING: str | None  # why it is missing
try:
    from shardkit.codecs import _crop

    MISSING = None
except ImportError as error:
    _crop, MISSING = None, not_built(error)

FIX = (
    "install a C compiler and libjpeg-turbo's jpeglib.h (Debian: gcc libjpeg-dev python3-dev; "
    "conda: c-compiler libjpeg-turbo), then shardkit again, in its folder: "
    "pip install --force-reinstall --no-deps ."
)
