"""Makes the sample data in this folder, the same every time: python sample_data/make.py [FOLDER]

images/ has three classes of drawn shapes, with one of each oddity that real folders have; text/ has
a few short documents of our own and a .jsonl, and text/essays/ some that are long enough to pack.
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
ESSAYS = {
    "bread.txt": """\
Bread needs flour, water, salt and time. Of the four, time is the one that people leave out.

Stir the flour into the water until no dry spots are left, then leave it alone for half an hour.
The flour drinks the water by itself, and the dough that was sticky becomes smooth. Only then comes
the salt. Fold the dough four times in two hours, each time from the edge to the middle, and put it
into the cold until the next morning. What happens in the night is the taste.

A hot oven and a closed pot do the rest. The steam keeps the crust soft for a while, so that the
loaf can rise before it sets. Take the lid off when it has risen, and wait for the colour of wood.
""",
    "bicycle.txt": """\
A bicycle stays up because it falls. When it leans to the left, the front wheel turns to the left,
and the wheels roll back under the weight. A rider does this many times a minute, and nobody who
can do it can say how.

Learning it backwards is hard for the same reason. Someone who thinks about the handlebars will
pull them the wrong way; someone who looks at the end of the street will get there. So take the
pedals off, lower the saddle, and let a child push along with both feet. The balance comes first,
in a week or in an afternoon. The pedals are easy then.
""",
    "library.txt": """\
The old library kept its books by size. Tall books stood with tall books, and a reader who asked
for one had to wait until somebody remembered where it was. It saved a good deal of wood.

The new librarian gave every book a number and wrote the numbers on cards. It took her two winters.
On the last evening she carried the cards down to the hall and pulled one out, and the boy who
swept the floor found the book before she had put on her coat. "It was always here," he said.
"Yes," she said, "but now it can be found."
""",
    "map.txt": """\
A map that showed everything would be as large as the country, and as hard to read.

Whoever draws one decides what to leave out. The sailor wants depths and lights, and does not care
where the fields end. The walker wants paths, springs and the steepness of hills. The driver wants
roads alone, as straight as they can be drawn. None of these maps is false, and none of them can
take the place of another. To choose a map is to say what you mean to do.
""",
    "rain.txt": """\
It rained for nine days, and on the tenth the river came up to the garden wall.

We carried the chairs inside, then the bicycles, then the bread and the books from the lower
shelves. My grandmother sat at the window and watched a wooden box float past, and after it a
bucket, a ladder and somebody's hat. "In my day," she said, "it was a piano." Nobody believed her.

In the night the water went away again. It had left a line on the wall, two fingers above the one
from her day, and in the roses, lying on its side, a very small piano.
""",
    "sleep.txt": """\
Everything with a brain sleeps, even where it is dangerous to do so. Ducks at the edge of a flock
keep one eye open and rest one half of the head at a time. Dolphins do the same, as they have to
come up for air.

What sleep is for, we know in part. What was learned by day is repeated at night, and becomes
firmer by it; what was not needed becomes fainter. A student who sleeps after reading keeps more of
it than one who reads for two hours longer. It is the cheapest advice there is, and the least
popular.
""",
    "tea.txt": """\
Water for green tea should not boil. Let it stand for five minutes, or pour it from cup to cup: it
loses some ten degrees each time. Black tea takes it as hot as it can be had.

Three minutes make it lively, five make it strong, and ten make it a dye for wool.
""",
    "walk.txt": """\
Go out of the door and turn left at every corner until you are home again. Then do the same to the
right. It is not far, and yet hardly anyone has seen both sides of the streets that they live in.

On the second day, walk the same way and look up. Above the shops there are faces of stone, dates,
a clock that stopped, a line of washing, a cat. On the third day, walk it with somebody who is six
years old. You will need the whole afternoon.
""",
}


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
    essays = folder / "essays"
    essays.mkdir(parents=True, exist_ok=True)
    for place, texts in ((folder, TEXTS), (essays, ESSAYS)):
        for name, text in texts.items():
            (place / name).write_text(text, "utf-8", newline="\n")
    lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES)
    (folder / "notes.jsonl").write_text(lines, "utf-8", newline="\n")


def make(folder: Path) -> None:
    """Write images/ and text/ into `folder`."""
    make_images(folder / "images")
    make_text(folder / "text")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
