"""Makes the sample data in this folder, the same every time: python sample_data/make.py [FOLDER]

images/ has three classes of drawn shapes, with one of each oddity that real folders have; text/ has
a few short documents of our own and a .jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = (64, 48)
EXIF_ORIENTATION = 0x0112
ROTATE_90 = 6  # the camera was held upright: show the picture turned clockwise

TEXTS = {
    "shards.txt": "A shard is one file that holds many samples.\n"
    "A loader that opens one shard reads a thousand pictures in one go.\n",
    "shuffle.txt": "Shuffle the addresses, not the payloads.\n"
    "An address is two small numbers; a payload is a picture.\n",
    "grüße.txt": "Grüße aus einer Datei, deren Name nicht nur ASCII ist.\n",
}
LINES = [
    {"id": 1, "text": "Convert once, train many times."},
    {"id": 2, "text": "A checksum costs less than a doubt."},
    {"id": 3, "text": "Lesen ist schneller, wenn man nicht sucht. 読む。"},
]


def shape(kind: str, step: int, mode: str = "RGB") -> Image.Image:
    """A circle, a square or stripes on a ground whose colour depends on `step`."""
    width, height = SIZE
    picture = Image.new("RGB", SIZE, (40 + 25 * step, 120, 220 - 25 * step))
    draw = ImageDraw.Draw(picture)
    ink = (250, 200 - 20 * step, 30 + 20 * step)
    inset = 6 + 2 * step
    if kind == "circle":
        draw.ellipse((inset, inset, width - inset, height - inset), fill=ink)
    elif kind == "square":
        draw.rectangle((inset, inset, width - inset, height - inset), fill=ink)
    else:
        for x in range(0, width, inset):
            draw.line((x, 0, x, height), fill=ink, width=3)
    return picture.convert(mode)


def palette_with_alpha() -> Image.Image:
    """A palette picture whose first colour is transparent."""
    picture = shape("square", 2).convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
    picture.info["transparency"] = 0
    return picture


def make_images(folder: Path) -> None:
    for kind in ("circle", "square", "stripes"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for step in range(3):
            shape(kind, step).save(folder / kind / f"{step:02d}.jpg", quality=90)
    shape("circle", 3, "L").save(folder / "circle" / "grey.jpg", quality=90)
    shape("circle", 4, "CMYK").save(folder / "circle" / "cmyk.jpg", quality=90)
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = ROTATE_90
    shape("circle", 5).save(folder / "circle" / "upright.jpg", quality=90, exif=exif)
    shape("square", 3).save(folder / "square" / "00.png")  # the stem of square/00.jpg
    palette_with_alpha().save(folder / "square" / "palette.png", transparency=0)
    shape("square", 4).save(folder / "square" / "v1.0.final.png")
    shape("stripes", 3).save(folder / "stripes" / "web.webp", quality=90)
    shape("stripes", 4).save(folder / "stripes" / "größe.jpg", quality=90)
    (folder / "circle" / "00.txt").write_text("a yellow circle on blue\n", "utf-8")


def make_text(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in TEXTS.items():
        (folder / name).write_text(text, "utf-8", newline="\n")
    lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES)
    (folder / "notes.jsonl").write_text(lines, "utf-8", newline="\n")


def make(folder: Path) -> None:
    """Write images/ and text/ into `folder`."""
    make_images(folder / "images")
    make_text(folder / "text")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
