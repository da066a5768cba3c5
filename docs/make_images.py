"""Makes the images of docs/index.md, images.md and shuffling.md: python docs/make_images.py

Every result that they show is shardkit's own: images are drawn on one of sample_data, converted
with the options that stand above them, and read back; the order is the one that a stream has.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import shardkit
from shardkit.stream.order import Order
from shardkit.stream.schedule import START, Fixed

ROOT = Path(__file__).parent.parent
OUT = Path(__file__).parent / "images"
GAP = 14
PAPER, INK, DIM = "#ffffff", "#202020", "#707070"
EXIF_ORIENTATION = 0x0112


def scene(width: int, height: int) -> Image.Image:
    """Stripes of sample_data with a red frame, a round disc and a letter: nothing is symmetric."""
    with Image.open(ROOT / "sample_data/images/stripes/00.jpg") as stripes:
        image = stripes.convert("RGB").resize((width, height), Image.Resampling.NEAREST)
    image = Image.blend(image, Image.new("RGB", image.size, "#dce8f4"), 0.72)
    draw = ImageDraw.Draw(image)
    unit = min(width, height)
    draw.rectangle((0, 0, width - 1, height - 1), outline="#c02020", width=max(unit // 24, 2))
    radius = unit * 0.34
    middle = (width * 0.5, height * 0.5)
    draw.circle(middle, radius, fill="#f0b429", outline="#30507a", width=max(unit // 40, 1))
    draw.text(middle, "R", fill="#30507a", anchor="mm", font=ImageFont.load_default(unit * 0.42))
    draw.circle((width * 0.12, height * 0.16), unit * 0.06, fill="#2a8c4a")
    return image


def converted(files: dict[str, bytes], **options: Any) -> dict[str, dict[str, Any]]:
    """What shardkit makes of files with these names: samples by their keys."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / "in").mkdir(exist_ok=True)
            (Path(folder) / "in" / name).write_bytes(data)
        out = Path(folder) / "out"
        image = shardkit.ImageOptions(**options)
        shardkit.convert(Path(folder) / "in", to="lmdb", out=out, image=image, workers=0)
        dataset = shardkit.open(out)
        return {sample["__key__"]: dict(sample) for sample in dataset}


def saved(image: Image.Image, format: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **how)
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    """The pixels as they are stored: nothing is turned."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image.copy()


def resized(image: Image.Image, **options: Any) -> Image.Image:
    return opened(converted({"a.png": saved(image)}, **options)["a"]["image"])


class Sheet:
    """Rows of images at their own size, with words beneath each."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, list[tuple[Image.Image, str]]]] = []

    def row(self, title: str, cells: list[tuple[Image.Image, str]]) -> None:
        self._rows.append((title, cells))

    def save(self, name: str) -> None:
        title, label = ImageFont.load_default(15), ImageFont.load_default(12)
        columns = max(len(cells) for _, cells in self._rows)
        widths = [
            max(
                max(cells[n][0].width, int(label.getlength(line)))
                for _, cells in self._rows
                if n < len(cells)
                for line in cells[n][1].split("\n")
            )
            for n in range(columns)
        ]
        lines = [max(c[1].count("\n") + 1 for c in cells) for _, cells in self._rows]
        tall = [max(c[0].height for c in cells) for _, cells in self._rows]
        height = sum(tall) + sum(16 * n for n in lines) + len(tall) * (26 + GAP) + GAP
        sheet = Image.new("RGB", (sum(widths) + GAP * (columns + 1), height), PAPER)
        draw = ImageDraw.Draw(sheet)
        top = GAP
        for (words, cells), high, count in zip(self._rows, tall, lines, strict=True):
            draw.text((GAP, top), words, fill=INK, font=title)
            top += 26
            left = GAP
            for (image, under), wide in zip(cells, widths, strict=False):
                at = (left, top + high - image.height)
                sheet.paste(image.convert("RGB"), at)
                draw.multiline_text((left, top + high + 3), under, fill=DIM, font=label, spacing=2)
                left += wide + GAP
            top += high + 16 * count + GAP
        sheet.quantize(128, dither=Image.Dither.NONE).save(OUT / name, optimize=True)


def size_of(image: Image.Image) -> str:
    return f"{image.width} x {image.height}"


# What happens to the data: a title, and the lines of its box.
FLOW = [
    (
        "Your files",
        ["photos/cat/1.jpg, photos/dog/7.jpg, ...", "or text, tables, audio, another format"],
    ),
    (
        "shardkit convert: once",
        ["resize, tokenize, filter, split", "in all processes; can be interrupted"],
    ),
    ("Shards", ["shard-000000.tar, shard-000001.tar, ...", "with an index, classes and checksums"]),
    (
        "Loader: in every epoch",
        ["shuffle, read, decode, crop", "in threads; continues at any step"],
    ),
    ("Batches", ["image (64, 3, 224, 224), label (64,)", "for PyTorch, TensorFlow, JAX"]),
]


def make_flow() -> None:
    """Boxes for data, and coloured ones for what is done to them, from top to bottom."""
    step, tall, wide = 100, 74, 350
    parts = []
    for number, (title, lines) in enumerate(FLOW):
        top = 5 + step * number
        fill, ink = (("#ffffff", "#1f2328"), ("#3f51b5", "#ffffff"))[number % 2]
        style = f'fill="{fill}" stroke="#3f51b5"'
        parts.append(f'<rect x="5" y="{top}" width="340" height="{tall}" rx="8" {style}/>')
        for line, words in enumerate((title, *lines)):
            look = ' font-weight="bold"' * (line == 0)
            at = f'x="20" y="{top + 22 + 20 * line}"'
            parts.append(f'<text {at} fill="{ink}"{look}>{words}</text>')
        if number:
            shape = f"M175 {top - 3}l-7 -10h14z M175 {top - 25}v14"
            parts.append(f'<path d="{shape}" fill="#3f51b5" stroke="#3f51b5"/>')
    about = "What happens to the data: " + ", ".join(title for title, _ in FLOW)
    high = step * len(FLOW) - step + tall + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
    head += f'viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="15" role="img">'
    svg = [head, f"<title>{about}</title>", *parts, "</svg>", ""]
    (OUT / "flow.svg").write_text("\n".join(svg), "utf-8")


def make_modes() -> None:
    """One image in all modes; a small one too, with `upscale` and without it."""
    sheet = Sheet()
    modes = ("shorter", "longer", "exact", "crop", "pad")
    rows = [
        ("An image larger than N:  --resize 96 --resize-mode ...", scene(240, 160), False),
        ("An image smaller than N is not made larger", scene(72, 48), False),
        ("... unless --upscale is given", scene(72, 48), True),
    ]
    for title, image, upscale in rows:
        cells = [(image, f"before\n{size_of(image)}")]
        for mode in modes:
            made = resized(
                image, resize=96, resize_mode=mode, upscale=upscale, background="#9a9a9a"
            )
            cells.append((made, f"{mode}\n{size_of(made)}"))
        sheet.row(title, cells)
    sheet.save("modes.png")


def make_orientation() -> None:
    """Images of cameras that were held in other ways, before and after."""
    seen = scene(132, 88)
    turns = {
        1: None,
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_90,
        8: Image.Transpose.ROTATE_270,
    }
    before, after = [], []
    for number, turn in turns.items():
        exif = Image.Exif()
        exif[EXIF_ORIENTATION] = number
        stored = seen if turn is None else seen.transpose(turn)
        data = saved(stored, "JPEG", quality=95, exif=exif)
        made = opened(converted({"a.jpg": data}, icc="srgb")["a"]["image"])
        before.append((opened(data), f"EXIF says {number}\n{size_of(opened(data))}"))
        after.append((made, size_of(made)))
    sheet = Sheet()
    sheet.row("The pixels in the file, as a loader shows them that overlooks EXIF", before)
    sheet.row("After converting", after)
    sheet.save("orientation.png")


def make_background() -> None:
    """A transparent image over some backgrounds."""
    image = scene(120, 80)
    far = np.hypot(*np.mgrid[-1:1:80j, -1.5:1.5:120j])
    image.putalpha(Image.fromarray((255 * np.clip(1.45 - 1.3 * far, 0, 1)).astype(np.uint8)))
    tiles = (np.indices((80, 120)) // 8).sum(0) % 2
    under = Image.fromarray(np.where(tiles, 255, 205).astype(np.uint8)).convert("RGBA")
    cells = [(Image.alpha_composite(under, image), "before\n(chequers: transparent)")]
    for colour in ("white", "black", "#808080", "gold"):
        made = resized(image, background=colour)
        note = "\n(the default)" if colour == "white" else ""
        cells.append((made, f"{colour}{note}"))
    sheet = Sheet()
    sheet.row("Transparent pixels show the --background", cells)
    sheet.save("background.png")


def make_masks() -> None:
    """An image with its mask: both go the same way."""
    image = scene(180, 120)
    mask = Image.new("P", image.size, 0)
    mask.putpalette([0, 0, 0, 240, 180, 41, 42, 140, 74, 48, 80, 122])
    draw = ImageDraw.Draw(mask)
    draw.circle((90, 60), 120 * 0.34, fill=1)
    draw.circle((180 * 0.12, 120 * 0.16), 120 * 0.06, fill=2)
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    turned = image.transpose(Image.Transpose.ROTATE_90)
    plain = {"a.jpg": saved(image, "JPEG", quality=95), "a_mask.png": saved(mask)}
    rotated = {
        "a.jpg": saved(turned, "JPEG", quality=95, exif=exif),
        "a_mask.png": saved(mask.transpose(Image.Transpose.ROTATE_90)),
    }
    images, masks = [(image, "before\n180 x 120")], [(mask, "before\n180 x 120")]
    for files, options, words in (
        (plain, {"resize": 80}, "shorter"),
        (plain, {"resize": 80, "resize_mode": "crop"}, "crop"),
        (plain, {"resize": 80, "resize_mode": "pad", "background": "#9a9a9a"}, "pad"),
        (rotated, {"resize": 80}, "shorter, EXIF 6"),
    ):
        sample = converted(files, **options)["a"]
        made, drawn = opened(sample["image"]), opened(sample["mask"])
        images.append((made, f"{words}\n{size_of(made)}"))
        values = ", ".join(map(str, np.unique(np.asarray(drawn))))
        masks.append((drawn, f"{size_of(drawn)}\nvalues {values}"))
    sheet = Sheet()
    sheet.row("1.jpg, with --resize 80", images)
    sheet.row("1_mask.png, in the colours of its palette", masks)
    sheet.save("masks.png")


def make_chroma() -> None:
    """Thin coloured lines in JPEGs of both kinds, enlarged."""
    image = Image.new("RGB", (64, 40), "#2040a0")
    draw = ImageDraw.Draw(image)
    draw.text((32, 12), "red text", fill="#ff2020", anchor="mm", font=ImageFont.load_default(13))
    for x in range(4, 60, 4):
        draw.line((x, 24, x, 36), fill="#20e020" if x % 8 else "#ff2020")
    cells = [(image, "before")]
    for chroma in ("420", "444"):
        sample = converted({"a.png": saved(image)}, format="jpeg", quality=90, chroma=chroma)["a"]
        data = sample["image"]
        cells.append((opened(data), f"chroma {chroma}\n{len(data):,} bytes"))
    size = (3 * image.width, 3 * image.height)
    large = [(made.resize(size, Image.Resampling.NEAREST), words) for made, words in cells]
    sheet = Sheet()
    sheet.row("JPEG of quality 90, three times enlarged", large)
    sheet.save("chroma.png")


class Strips:
    """Rows of samples, each a thin bar in the colour of its shard, darker towards its end."""

    _COLOURS = ("#c02020", "#f0b429", "#2a8c4a", "#30507a")
    _WIDE, _HIGH = 4, 26  # of a bar

    def __init__(self, sizes: list[int], rows: int) -> None:
        shades = []
        for size, colour in zip(sizes, self._COLOURS, strict=True):
            red, green, blue = Image.new("RGB", (1, 1), colour).getpixel((0, 0))
            for light in np.linspace(1.25, 0.62, size):
                shades.append(tuple(min(int(n * light), 255) for n in (red, green, blue)))
        self._shades = shades
        size = (len(shades) * self._WIDE + 13 * GAP, rows * (self._HIGH + 52) + GAP)
        self._sheet = Image.new("RGB", size, PAPER)
        self._draw = ImageDraw.Draw(self._sheet)
        self._top = GAP

    def row(self, title: str, runs: list[tuple[str, list[int]]], gap: int, cut: int = 0) -> None:
        """Runs of samples with words beneath; a white line behind every `cut` of them."""
        self._draw.text((GAP, self._top), title, fill=INK, font=ImageFont.load_default(15))
        top, left = self._top + 24, GAP
        for words, samples in runs:
            start = left
            for number, sample in enumerate(samples):
                if cut and number and number % cut == 0:
                    self._draw.rectangle((left - 1, top, left, top + self._HIGH), fill=PAPER)
                right = left + self._WIDE - 1
                self._draw.rectangle((left, top, right, top + self._HIGH), self._shades[sample])
                left += self._WIDE
            under = (start, top + self._HIGH + 3)
            self._draw.text(under, words, fill=DIM, font=ImageFont.load_default(12))
            left += gap
        self._top += self._HIGH + 52

    def save(self, name: str) -> None:
        self._sheet.quantize(128, dither=Image.Dither.NONE).save(OUT / name, optimize=True)


def make_order() -> None:
    """From shards to the batches of two ranks: two parts, windows of 48, global batches of 16."""
    sizes, parts, window, batch = [60, 36, 60, 36], 2, 48, 16
    order = Order(np.array(sizes), shuffle=True, seed=2, parts=parts, window=window)
    samples = np.arange(order.samples)
    part_of = [order.draw(0, samples[samples % parts == n]).number for n in range(parts)]
    # The list of blocks is what a window holds before it is shuffled.
    blocks = zip(order._order, np.diff(order._ends, prepend=0), strict=True)
    listed = np.concatenate([np.arange(start, start + size) for start, size in blocks])
    half = order.samples // parts
    strips = Strips(sizes, 4)
    stored = np.split(samples, np.cumsum(sizes)[:-1])
    strips.row(
        "1. Shards are cut into blocks, here of 3 samples",
        [(f"shard {n}", run.tolist()) for n, run in enumerate(stored)], GAP, 3,
    )  # fmt: skip
    strips.row(
        "2. The blocks are put in an order of (seed, epoch), and their list is cut into parts",
        [(f"part {n}", listed[n * half : (n + 1) * half].tolist()) for n in range(parts)], GAP, 3,
    )  # fmt: skip
    strips.row(
        "3. Each part is shuffled, a window at a time, sample by sample",
        [
            (f"part {n}, window {m}", run.tolist())
            for n, numbers in enumerate(part_of)
            for m, run in enumerate(np.split(numbers, half // window))
        ],
        GAP,
    )
    ranks = [Fixed(order, batch // 2, rank, 2, "pad") for rank in range(2)]
    runs, place = [], START
    while first := ranks[0].step(0, place):
        halves = [first, ranks[1].step(0, place)]
        runs.append((f"batch {len(runs)}", [n for step in halves for n in step.number.tolist()]))
        place = first.after
    strips.row(
        "4. A global batch has as many of each part: rank 0 makes its left half, rank 1 the right",
        runs, GAP, batch // 2,
    )  # fmt: skip
    strips.save("order.png")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for make in (
        make_flow,
        make_modes,
        make_orientation,
        make_background,
        make_masks,
        make_chroma,
        make_order,
    ):
        make()
    total = sum(path.stat().st_size for path in OUT.iterdir())
    print(f"{total:,} bytes in {OUT}", file=sys.stderr)
