"""Make the photos that the benchmarks share: real ones, 256 px on the short side, about 28 kB each.

    python tests/benchmarks/photos.py PHOTOS OUT --samples 50000
    python tests/benchmarks/photos.py PHOTOS OUT --samples 20000 --as-they-are

PHOTOS is any folder of images. Each repeat of a photo is cut at another pixel, so that no store
can fold repeats into one. Classes are folders, one per original photo. With `--as-they-are` the
files are copied whole, for benchmarks that resize them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

SHORT_SIDE = 256
QUALITY = 90
STEP = 13  # cuts per axis: 13 x 13 = 169 different repeats


def make_photos(photos: Path, out: Path, samples: int) -> int:
    """Write `samples` JPEG files to `out/<class>/<repeat>.jpg`; returns their bytes."""
    images = [_load(path) for path in sorted(photos.rglob("*")) if path.is_file()]
    repeats = -(-samples // len(images))
    if repeats > STEP * STEP:
        raise SystemExit(f"{samples} samples need {repeats} repeats; at most {STEP * STEP} differ")
    written = 0
    for number in range(samples):
        repeat, photo = divmod(number, len(images))
        folder = out / f"{photo:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        cut = images[photo][repeat % STEP :, repeat // STEP :]
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(cut), QUALITY, "RGB", "420")
        (folder / f"{repeat:03d}.jpg").write_bytes(data)
        written += len(data)
    return written


def copy_photos(photos: Path, out: Path, samples: int) -> int:
    """Write `samples` copies of the files to `out/<class>/<repeat>.jpg`; returns their bytes."""
    images = [path.read_bytes() for path in sorted(photos.rglob("*")) if path.is_file()]
    for number in range(samples):
        repeat, photo = divmod(number, len(images))
        folder = out / f"{photo:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{repeat:03d}.jpg").write_bytes(images[photo])
    return sum(len(images[n % len(images)]) for n in range(samples))


def _load(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as image:
        scale = min(SHORT_SIDE / min(image.size), 1)
        size = (round(image.width * scale), round(image.height * scale))
        return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BOX))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--as-they-are", action="store_true")
    options = parser.parse_args()
    make = copy_photos if options.as_they_are else make_photos
    total = make(options.photos, options.out, options.samples)
    print(f"{options.samples} photos, {total / options.samples:.0f} bytes each, in {options.out}")
