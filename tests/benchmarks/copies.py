"""How many copies of photos `--dedup near` finds, and how many photos it takes for copies.

    python -m tests.benchmarks.copies --data PHOTOS

PHOTOS is a folder of different images. Each gets copies in other sizes, qualities and formats. For
each distance between hashes: the share of copies that are this near to their photo, and how many
pairs of different photos are. Prints one JSON object.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
from typing import Any

import numpy as np
from PIL import Image

from shardkit.codecs.perceptual import distances, perceptual_hash
from shardkit.codecs.pixels import to_rgb
from shardkit.sources.duplicates import NEAR
from tests.benchmarks.harness import arguments

# Size, format and quality.
COPIES = (
    (1.0, "JPEG", 50), (1.0, "JPEG", 20), (0.5, "JPEG", 90), (0.5, "WEBP", 40),
    (0.25, "JPEG", 80), (0.25, "JPEG", 30), (0.13, "JPEG", 70), (2.0, "JPEG", 90),
    (0.33, "PNG", 0),
)  # fmt: skip


def copy_of(image: bytes, size: float, format: str, quality: int) -> bytes:
    photo = Image.fromarray(to_rgb(image))
    width, height = (max(round(side * size), 8) for side in photo.size)
    options = {"quality": quality} if quality else {}
    with io.BytesIO() as file:
        photo.resize((width, height), Image.Resampling.BICUBIC).save(file, format, **options)
        return file.getvalue()


def main(words: list[str]) -> dict[str, Any]:
    given = arguments(__doc__, "data").parse_args(words)
    photos = [path.read_bytes() for path in sorted(given.data.rglob("*")) if path.is_file()]
    hashes = [perceptual_hash(photo) for photo in photos]
    between = []
    for photo, one in zip(photos, hashes, strict=True):
        copies = [perceptual_hash(copy_of(photo, *how)) for how in COPIES]
        if one is not None:
            known = np.array([copy for copy in copies if copy is not None], "u8")
            between += distances(np.full_like(known, one), known).tolist()
    known = np.array([number for number in hashes if number is not None], "u8")
    pairs = np.array([*itertools.combinations(range(len(known)), 2)])
    apart = distances(known[pairs[:, 0]], known[pairs[:, 1]])
    return {
        "photos": len(photos),
        "copies": len(photos) * len(COPIES),
        "distance": NEAR,
        "copies_within": {n: sum(d <= n for d in between) / len(between) for n in range(0, 21, 2)},
        "pairs": len(pairs),
        "pairs_within": {n: int((apart <= n).sum()) for n in range(0, 21, 2)},
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
