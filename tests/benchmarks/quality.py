"""How near our smaller images are to Pillow's BILINEAR: an acceptance test on real photos.

    python tests/benchmarks/quality.py --data PHOTOS [--json]

PHOTOS is any folder of JPEGs. Ours are decoded at the size that suits the scale and resized, as a
conversion does it; Pillow resizes the whole pixels of the same decoder, so that only resizing
differs. LANCZOS is a third opinion: ours should be as near to it as Pillow's BILINEAR is. Numbers
are PSNR in dB over all photos: of ours to BILINEAR on average and of the worst photo, then the
averages of both to LANCZOS.
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


def by_pillow(pixels: Pixels, width: int, height: int, filter: str = "BILINEAR") -> Pixels:
    image = PIL.Image.fromarray(pixels)
    return np.asarray(image.resize((width, height), PIL.Image.Resampling[filter]))


def by_us(data: bytes, header: Header, width: int, height: int) -> Pixels:
    pixels, reduced, _ = decode(data, header, least=(width, height))
    return resize(pixels, width, height, (header.width, header.height), reduced)


def compare(data: bytes, header: Header, scale: float) -> tuple[float, float, float]:
    """PSNR of ours to BILINEAR, of ours to LANCZOS, and of BILINEAR to LANCZOS."""
    size = max(round(header.width / scale), 1), max(round(header.height / scale), 1)
    whole = simplejpeg.decode_jpeg(data)
    ours = by_us(data, header, *size)
    bilinear, lanczos = by_pillow(whole, *size), by_pillow(whole, *size, "LANCZOS")
    return psnr(ours, bilinear), psnr(ours, lanczos), psnr(bilinear, lanczos)


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    options = parser.parse_args(arguments)
    rows: dict[float, list[tuple[float, float, float]]] = {scale: [] for scale in SCALES}
    for path in sorted(options.data.rglob("*")):
        if path.suffix.lower() in (".jpg", ".jpeg"):
            data = path.read_bytes()
            header = read_header(data)
            if not header.oddity:  # CMYK and the like are no matter of resizing
                for scale in SCALES:
                    rows[scale].append(compare(data, header, scale))
    if not rows[SCALES[0]]:
        raise SystemExit(f"{options.data} has no JPEGs")
    report = {"photos": len(rows[SCALES[0]]), "scales": {s: _summary(rows[s]) for s in SCALES}}
    print(json.dumps(report, indent=1) if options.json else _table(report))
    return report


def _summary(rows: list[tuple[float, float, float]]) -> dict[str, float]:
    ours, to_lanczos, bilinear = zip(*rows, strict=True)
    return {
        "mean": statistics.mean(ours),
        "minimum": min(ours),
        "ours to LANCZOS": statistics.mean(to_lanczos),
        "BILINEAR to LANCZOS": statistics.mean(bilinear),
    }


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['photos']} photos; PSNR in dB"]
    names = list(report["scales"][SCALES[0]])
    lines.append("  ".join(["scale", *names]))
    for scale, row in report["scales"].items():
        numbers = [f"{row[name]:{len(name)}.1f}" for name in names]
        lines.append("  ".join([f"{scale:5g}", *numbers]))
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
