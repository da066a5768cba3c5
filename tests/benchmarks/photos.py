"""Make the photos that the benchmarks share: real ones, 256 px on the short side, about 28 kB each.

    python tests/benchmarks/photos.py PHOTOS OUT --samples 50000
    python tests/benchmarks/photos.py PHOTOS OUT --samples 20000 --as-they-are

PHOTOS is any folder of images. Each repeat of a photo is cut at another pixel, so that no store
can fold repeats into one. Classes are folders, one per original photo. With `--as-they-are` the
files are copied whole, for benchmarks that resize them.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

SHORT_SIDE = 256
QUALITY = 90
STEP = 13  # cuts per axis: 13 x 13 = 169 different repeats


def make_photos(photos, out, samples, *, as_they_are=False):
    """Write `samples` files to `out/<class>/<repeat>.jpg`; returns their bytes."""
    paths = [path for path in sorted(photos.rglob("*")) if path.is_file()]
    repeats = -(-samples // len(paths))
    if repeats > STEP * STEP and not as_they_are:
        raise SystemExit(f"{samples} samples need {repeats} repeats; at most {STEP * STEP} differ")
    originals = [partial(_whole, path) if as_they_are else _cuts(path) for path in paths]
    written = 0
    for number in range(samples):
        repeat, photo = divmod(number, len(paths))
        file = out / f"{photo:04d}/{repeat:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        written += file.write_bytes(originals[photo](repeat))
    return written


def _whole(path, repeat):
    return path.read_bytes()


def _cuts(path):
    with Image.open(path) as image:
        scale = min(SHORT_SIDE / min(image.size), 1)
        size = (round(image.width * scale), round(image.height * scale))
        pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BOX))

    def cut(repeat):
        part = np.ascontiguousarray(pixels[repeat % STEP :, repeat // STEP :])
        return simplejpeg.encode_jpeg(part, QUALITY, "RGB", "420")

    return cut


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--as-they-are", action="store_true")
    given = parser.parse_args()
    total = make_photos(given.photos, given.out, given.samples, as_they_are=given.as_they_are)
    print(f"{given.samples} photos, {total / given.samples:.0f} bytes each, in {given.out}")
