"""The optional extension `_crop.c`, for fast loading of JPEGs; None where it was not built."""

from __future__ import annotations

from types import ModuleType

SLOWER = 3  # times as long as with it: random crops of photos take 2.9, the middle of them 3.2

_crop: ModuleType | None
MISSING: str | None  # the reason why it is missing
try:
    from shardkit.codecs import _crop

    MISSING = None
except ImportError as error:
    absent = isinstance(error, ModuleNotFoundError)
    _crop, MISSING = None, "it was not built when shardkit was installed" if absent else str(error)

FIX = (
    "install a C compiler and libjpeg-turbo's jpeglib.h (Debian: gcc libjpeg-dev python3-dev; "
    "conda: c-compiler libjpeg-turbo), then shardkit again, in its folder: "
    "pip install --force-reinstall --no-deps ."
)
