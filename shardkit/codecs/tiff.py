"""The pages of a TIFF file and the kind of their pixels, from its directories.

Layout: TIFF 6.0, and BigTIFF, whose offsets have 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAX_PAGES = 1 << 15
_SHORT = {1: "B", 3: "H", 4: "I", 16: "Q"}  # the types of whole numbers in directories
_LISTED = 1 << 10  # numbers of a tag that are read
_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COLOUR, _ORIENTATION = 254, 256, 257, 258, 262, 274
_SAMPLES, _EXTRA, _SAMPLE_FORMAT = 277, 338, 339
_GEO_KEYS = 34735
_OFFSETS = (273, 324)  # of strips, of tiles
_REDUCED = 1  # a bit of _SUBFILE: a smaller version of another page
_PALETTE, _CMYK = 3, 5
_KINDS = {2: "int", 3: "float", 5: "complex", 6: "complex"}  # by sample format


class Page(NamedTuple):
    """A page: its size as stored, and the type and number of its channels when decoded.

    Palettes and CMYK are decoded to RGB. `bands` is whether there are more channels than those of
    its colours and an alpha channel.
    """

    number: int  # in the file
    width: int
    height: int
    dtype: str
    channels: int
    bands: bool
    orientation: int

    @property
    def kind(self) -> tuple[int, int, str, int]:
        return self.width, self.height, self.dtype, self.channels


def pages(data: bytes, most: int = MAX_PAGES) -> list[Page]:
    """Return the first pages, without the smaller versions of others.

    Raises struct.error if the first one is truncated or missing.
    """
    found: list[Page] = []
    for number, tags in enumerate(_directories(data)):
        reduced = tags.get(_SUBFILE, (0,))[0] & _REDUCED
        if not found or not reduced:
            if not {_WIDTH, _HEIGHT} <= tags.keys() or not tags.keys() & set(_OFFSETS):
                break
            found.append(_page(number, tags))
        if len(found) == most:
            break
    if not found:
        raise struct.error
    return found


def is_georeferenced(data: bytes) -> bool:
    """Return whether a TIFF has the coordinates of its pixels on the earth, as GeoTIFF does."""
    return _GEO_KEYS in next(_directories(data), {})


def _page(number: int, tags: dict[int, tuple[int, ...]]) -> Page:
    def first(tag: int, default: int) -> int:
        return (tags.get(tag) or (default,))[0]

    bits, colour = max(tags.get(_BITS) or (1,)), first(_COLOUR, 1)
    channels, kind = first(_SAMPLES, 1), _KINDS.get(first(_SAMPLE_FORMAT, 1), "uint")
    width = next((width for width in (8, 16, 32, 64) if bits <= width), bits)
    extra = tags.get(_EXTRA, ())
    colours = {_PALETTE: 1, _CMYK: 4, 0: 1, 1: 1, 4: 1}.get(colour, 3)
    bands = channels > colours + (len(extra) == 1 and extra[0] in (1, 2))
    if colour in (_PALETTE, _CMYK) and not bands:
        channels = 3
    orientation = first(_ORIENTATION, 1)
    size = first(_WIDTH, 0), first(_HEIGHT, 0)
    upright = orientation if 1 <= orientation <= 8 else 1
    return Page(number, *size, f"{kind}{width}", channels, bands, upright)


def _directories(data: bytes) -> Iterator[dict[int, tuple[int, ...]]]:
    """Yield the tags with whole numbers of each directory; ends at one that is damaged."""
    order = {b"II": "<", b"MM": ">"}[data[:2]]
    big = data[2:4] in (b"+\0", b"\0+")
    offset, count, inline = ("Q", "Q", 8) if big else ("I", "H", 4)
    entry = struct.Struct(f"{order}HH{offset}")
    (at,) = struct.unpack_from(order + offset, data, 8 if big else 4)
    seen: set[int] = set()
    while at and at not in seen and len(seen) < MAX_PAGES:
        seen.add(at)
        try:
            (entries,) = struct.unpack_from(order + count, data, at)
            at += struct.calcsize(order + count)
            tags = {}
            for start in range(at, at + min(entries, 1 << 16) * (4 + 2 * inline), 4 + 2 * inline):
                tag, kind, numbers = entry.unpack_from(data, start)
                if kind in _SHORT and numbers:
                    form, place = (
                        f"{order}{min(numbers, _LISTED)}{_SHORT[kind]}",
                        start + 4 + inline,
                    )
                    if struct.calcsize(f"{order}{_SHORT[kind]}") * numbers > inline:
                        (place,) = struct.unpack_from(order + offset, data, place)
                    tags[tag] = struct.unpack_from(form, data, place)
            (after,) = struct.unpack_from(order + offset, data, at + entries * (4 + 2 * inline))
        except struct.error:
            return
        yield tags
        at = after
