"""How many copies of photos `--dedup near` finds, and how many photos it takes for copies.

    python -m tests.benchmarks.copies --data PHOTOS

PHOTOS is a folder of different images. Each gets copies in other sizes, qualities and formats; all
are converted with `--dedup near`, as a user would. For each distance between hashes: recall, the
share of copies that are this near to their photo, and how many pairs of different photos are.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import shardkit
from shardkit.codecs.perceptual import distances, perceptual_hash
from shardkit.codecs.pixels import to_rgb
from shardkit.sources.duplicates import NEAR

# Size, format and quality.
COPIES = (
    *((1.0, "JPEG", 50), (1.0, "JPEG", 20), (0.5, "JPEG", 90), (0.5, "WEBP", 40)),
    *(
        (0.25, "JPEG", 80),
        (0.25, "JPEG", 30),
        (0.13, "JPEG", 70),
        (2.0, "JPEG", 90),
        (0.33, "PNG", 0),
    ),
)


def copy_of(image: bytes, size: float, format: str, quality: int) -> bytes:
    photo = Image.fromarray(to_rgb(image))
    width, height = (max(round(side * size), 8) for side in photo.size)
    options = {"quality": quality} if quality else {}
    with io.BytesIO() as file:
        photo.resize((width, height), Image.Resampling.BICUBIC).save(file, format, **options)
        return file.getvalue()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args(arguments)
    photos = [path.read_bytes() for path in sorted(options.data.rglob("*")) if path.is_file()]
    hashes, between, wrong, missed = [], [], 0, 0
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "photos")
        folder.mkdir()
        for number, photo in enumerate(photos):
            hashes.append(perceptual_hash(photo))
            (folder / f"{number:05d}-0.jpg").write_bytes(photo)
            for n, how in enumerate(COPIES, 1):
                made = copy_of(photo, *how)
                (folder / f"{number:05d}-{n}.{how[1].lower()}").write_bytes(made)
                one, other = hashes[-1], perceptual_hash(made)
                if one is not None and other is not None:
                    between.append(
                        int(distances(np.array([one], "u8"), np.array([other], "u8"))[0])
                    )
        result = shardkit.convert(folder, "wds", Path(work, "out"), dedup="near")
        listed = result.splits[""].filtered_list
        lines = [] if listed is None else Path(listed).read_text().splitlines()
        for line in map(json.loads, lines):
            stays = line["found"].rpartition(" ")[2]
            wrong += line["source"].partition("-")[0] != stays.partition("-")[0]
        missed = len(photos) * len(COPIES) - (len(lines) - wrong)
    known = np.array([number for number in hashes if number is not None], np.uint64)
    pairs = np.array([*itertools.combinations(range(len(known)), 2)])
    apart = distances(known[pairs[:, 0]], known[pairs[:, 1]])
    return {
        "photos": len(photos),
        "copies": len(photos) * len(COPIES),
        "left_out": len(lines),
        "recall": 1 - missed / (len(photos) * len(COPIES)),
        "precision": 1 - wrong / max(len(lines), 1),
        "distance": NEAR,
        "copies_within": {
            str(n): sum(d <= n for d in between) / len(between) for n in range(0, 17, 2)
        },
        "pairs": len(pairs),
        "pairs_within": {str(n): int((apart <= n).sum()) for n in range(0, 21, 2)},
    }


if __name__ == "__main__":
    print(json.dumps(main()))
