"""How near our smaller images are to Pillow's BILINEAR: an acceptance test on real photos.

    python tests/benchmarks/quality.py --data PHOTOS

PHOTOS is any folder of JPEGs. Ours are decoded at the size that suits the scale and resized, as a
conversion does it; Pillow resizes the whole pixels of the same decoder, so that only resizing
differs. LANCZOS is a third opinion: ours should be as near to it as Pillow's BILINEAR is. Prints
one JSON object. Numbers are PSNR in dB over all photos: of ours to BILINEAR on average and of the
worst photo, then the averages of both to LANCZOS.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import simplejpeg

from shardkit.codecs.crop import resize
from shardkit.codecs.header import Header, read_header
from shardkit.codecs.pixels import decode

if TYPE_CHECKING:
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]

SCALES = (1.2, 1.46, 2, 3, 4, 5, 6, 8)


def psnr(one: Pixels, other: Pixels) -> float:
    """Peak signal-to-noise ratio in dB; of equal pixels, as if one differed by one level."""
    error = max(np.square(one.astype(float) - other).mean(), 1 / one.size)
    return 10 * math.log10(255**2 / error)


def compare(data: bytes, header: Header, scale: float) -> tuple[float, float, float]:
    """PSNR of ours to BILINEAR, of ours to LANCZOS, and of BILINEAR to LANCZOS."""
    size = max(round(header.width / scale), 1), max(round(header.height / scale), 1)
    whole = PIL.Image.fromarray(simplejpeg.decode_jpeg(data))
    pixels, reduced, _ = decode(data, header, least=size)
    ours = resize(pixels, *size, (header.width, header.height), reduced)
    bilinear, lanczos = (
        np.asarray(whole.resize(size, PIL.Image.Resampling[name]))
        for name in ("BILINEAR", "LANCZOS")
    )
    return psnr(ours, bilinear), psnr(ours, lanczos), psnr(bilinear, lanczos)


def main(words: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    given = parser.parse_args(words)
    photos = []
    for path in sorted(given.data.rglob("*")):
        if path.suffix.lower() in (".jpg", ".jpeg"):
            data = path.read_bytes()
            header = read_header(data)
            if not header.oddity:  # CMYK and the like are no matter of resizing
                photos.append((data, header))
    if not photos:
        raise SystemExit(f"{given.data} has no JPEGs")
    scales = {}
    for scale in SCALES:
        compared = [compare(*photo, scale) for photo in photos]
        ours, to_lanczos, bilinear = map(statistics.mean, zip(*compared, strict=True))
        scales[scale] = {
            "mean": ours,
            "minimum": min(compared)[0],
            "ours to LANCZOS": to_lanczos,
            "BILINEAR to LANCZOS": bilinear,
        }
    return {"photos": len(photos), "scales": scales}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
