"""How good images are after us, on real photos; each prints one JSON object.

    python -m tests.benchmarks.quality sizes  --data PHOTOS
    python -m tests.benchmarks.quality copies --data PHOTOS

PHOTOS is any folder of JPEGs. `sizes` tells how near our smaller images are to Pillow's BILINEAR.
Ours are decoded at the size that suits the scale and resized, as a conversion does it; Pillow
resizes the whole pixels of the same decoder, so that only resizing differs. LANCZOS is a third
opinion: ours should be as near to it as Pillow's BILINEAR is. Numbers are PSNR in dB over all
photos: of ours to BILINEAR on average and of the worst photo, then the averages of both to LANCZOS.

`copies` tells how many copies of photos `--dedup near` finds, and how many photos it takes for
copies. Each photo gets copies in other sizes, qualities and formats. For each distance between
hashes: the share of copies that are this near to their photo, and how many pairs of different
photos are.
"""

import io
import itertools
import json
import math
import statistics
import sys

import numpy as np
import PIL.Image
import simplejpeg

from shardkit.codecs.crop import resize
from shardkit.codecs.header import read_header
from shardkit.codecs.perceptual import perceptual_hash
from shardkit.codecs.pixels import decode, to_rgb
from shardkit.sources.duplicates import NEAR
from tests.benchmarks.harness import arguments

SCALES = (1.2, 1.46, 2, 3, 4, 5, 6, 8)


def psnr(one, other):
    """Peak signal-to-noise ratio in dB; of equal pixels, as if one differed by one level."""
    error = max(np.square(one.astype(float) - other).mean(), 1 / one.size)
    return 10 * math.log10(255**2 / error)


def compare(data, header, scale):
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


def sizes(data):
    photos = []
    for path in sorted(data.rglob("*")):
        if path.suffix.lower() in (".jpg", ".jpeg"):
            photo = path.read_bytes()
            header = read_header(photo)
            if not header.oddity:  # CMYK and the like are no matter of resizing
                photos.append((photo, header))
    if not photos:
        raise SystemExit(f"{data} has no JPEGs")
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


# Size, format and quality.
COPIES = (
    (1.0, "JPEG", 50), (1.0, "JPEG", 20), (0.5, "JPEG", 90), (0.5, "WEBP", 40),
    (0.25, "JPEG", 80), (0.25, "JPEG", 30), (0.13, "JPEG", 70), (2.0, "JPEG", 90),
    (0.33, "PNG", 0),
)  # fmt: skip


def copy_of(image, size, format, quality):
    photo = PIL.Image.fromarray(to_rgb(image))
    width, height = (max(round(side * size), 8) for side in photo.size)
    options = {"quality": quality} if quality else {}
    with io.BytesIO() as file:
        photo.resize((width, height), PIL.Image.Resampling.BICUBIC).save(file, format, **options)
        return file.getvalue()


def near(data):
    photos = [path.read_bytes() for path in sorted(data.rglob("*")) if path.is_file()]
    hashes = [perceptual_hash(photo) for photo in photos]
    between = []
    for photo, one in zip(photos, hashes, strict=True):
        copies = [perceptual_hash(copy_of(photo, *how)) for how in COPIES]
        if one is not None:
            between += [(one ^ copy).bit_count() for copy in copies if copy is not None]
    pairs = [*itertools.combinations([number for number in hashes if number is not None], 2)]
    apart = np.array([(one ^ other).bit_count() for one, other in pairs])
    return {
        "photos": len(photos),
        "copies": len(photos) * len(COPIES),
        "distance": NEAR,
        "copies_within": {n: sum(d <= n for d in between) / len(between) for n in range(0, 21, 2)},
        "pairs": len(pairs),
        "pairs_within": {n: int((apart <= n).sum()) for n in range(0, 21, 2)},
    }


def main(words):
    parser = arguments(__doc__, "data")
    parser.add_argument("what", choices=("sizes", "copies"))
    given = parser.parse_args(words)
    return {"sizes": sizes, "copies": near}[given.what](given.data)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
