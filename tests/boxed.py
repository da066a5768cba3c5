"""Images with painted objects, and annotations that say where they are: of COCO, VOC and YOLO.

Object n of an image is a rectangle in a colour of its own, so that any box can be compared with the
pixels that are painted.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.sources.real import put

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255), (255, 0, 255)]
# By COCO's id: its ids are sparse, and the order of the file is another one.
CATEGORIES = {44: "bottle", 1: "person", 90: "toothbrush"}


class Painted(NamedTuple):
    """An image: its size, upright, and a box of whole pixels and a category for each object."""

    name: str
    size: tuple[int, int]
    boxes: list[tuple[int, int, int, int]]
    names: list[str]
    orientation: int = 1

    def file(self, format: str = "PNG") -> bytes:
        """The image as it is stored: turned, where it has an orientation."""
        pixels = np.zeros((self.size[1], self.size[0], 3), np.uint8)
        for (x0, y0, x1, y1), colour in zip(self.boxes, COLOURS, strict=False):
            pixels[y0:y1, x0:x1] = colour
        exif = Image.Exif()
        exif[0x0112] = self.orientation
        file = io.BytesIO()
        stored = Image.fromarray(turned_back(pixels, self.orientation))
        more = {} if format == "PNG" else {"quality": 95, "subsampling": 0}
        stored.save(file, format, **({"exif": exif} if self.orientation != 1 else {}), **more)
        return file.getvalue()


def turned_back(pixels: Any, orientation: int) -> Any:
    """Upright pixels as they are stored in an orientation (TIFF 6.0, tag 274)."""
    back = {
        1: lambda p: p,
        2: lambda p: p[:, ::-1],
        3: lambda p: p[::-1, ::-1],
        4: lambda p: p[::-1],
        5: lambda p: p.swapaxes(0, 1),
        6: lambda p: p.swapaxes(0, 1)[::-1],
        7: lambda p: p.swapaxes(0, 1)[::-1, ::-1],
        8: lambda p: p.swapaxes(0, 1)[:, ::-1],
    }
    return np.ascontiguousarray(back[orientation](pixels))


def painted_box(pixels: Any, colour: Sequence[int]) -> tuple[int, int, int, int] | None:
    """The box of all pixels that are about of a colour; None if there are none."""
    near = (np.abs(pixels.astype(int) - colour) < 100).all(axis=2)
    if not near.any():
        return None
    rows, columns = np.flatnonzero(near.any(axis=1)), np.flatnonzero(near.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def some_painted(
    count: int = 6, seed: int = 0, orientations: Sequence[int] = (1,)
) -> list[Painted]:
    """Images of any size with 0 to 3 objects that do not touch each other."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        width, height = (int(n) for n in rng.integers(60, 160, 2))
        columns = np.sort(rng.choice(np.arange(1, width // 4), 6, replace=False)) * 4
        boxes, names = [], []
        for n in range(number % 4):
            y0 = int(rng.integers(0, height - 20))
            y1 = int(rng.integers(y0 + 12, height))
            boxes.append((int(columns[2 * n]), y0, int(columns[2 * n + 1]), y1))
            names.append(str(rng.choice(list(CATEGORIES.values()))))
        turn = orientations[number % len(orientations)]
        made.append(Painted(f"{number:06d}", (width, height), boxes, names, turn))
    return made


def outline(box: Sequence[int], size: tuple[int, int], kind: int) -> Any:
    """The segmentation of a box: RLE for a crowd (4), compressed RLE (3), or a polygon."""
    (x0, y0, x1, y1), (width, height) = box, size
    if kind < 3:
        return [[x0, y0, x1, y0, x1, y1, x0, y1]]
    runs = [x0 * height + y0, *(x1 - x0) * [y1 - y0, height - y1 + y0]]
    counts = [*runs[:-1], runs[-1] + height * (width - x1) - y0]
    rle = {"size": [height, width], "counts": counts if counts[-1] else counts[:-1]}
    return {**rle, "counts": compressed(rle["counts"])} if kind == 3 else rle


def compressed(counts: Sequence[int]) -> str:
    """Counts of RLE as text, as in COCO's maskApi.c."""
    text = ""
    for number, count in enumerate(counts):
        left, more = count - (counts[number - 2] if number > 2 else 0), True
        while more:
            code, left = left & 31, left >> 5
            more = left != (-1 if code & 16 else 0)
            text += chr(code + 32 * more + 48)
    return text


NAMES_OF_POINTS = ["first", "middle", "hidden", "none"]


def points_of(box: Sequence[int]) -> list[int]:
    """Keypoints as COCO has them: the first pixel, the middle one, the last one, and none."""
    x0, y0, x1, y1 = box
    return [x0, y0, 2, (x0 + x1) // 2, (y0 + y1) // 2, 2, x1 - 1, y1 - 1, 1, 0, 0, 0]


def beside(painted: Sequence[Painted]) -> dict[str, str]:
    """The files of keypoints, of each second object, and of captions, two per second image."""
    whole = json.loads(coco_json(painted))
    boxes = [box for image in painted for box in image.boxes]
    for one, box in zip(whole["annotations"], boxes, strict=True):
        one |= {"keypoints": points_of(box), "num_keypoints": 3}
    for kind in whole["categories"]:
        kind["keypoints"] = NAMES_OF_POINTS
    captions = [
        {"image_id": 100 + number, "id": number + n, "caption": f"äöü {number} {n}"}
        for number in range(0, len(painted), 2)
        for n in range(2)
    ]
    keypoints = {**whole, "annotations": whole["annotations"][::2]}
    return {
        "person_keypoints": json.dumps(keypoints),
        "captions": json.dumps({"images": whole["images"], "annotations": captions}),
    }


def coco_json(painted: Sequence[Painted], suffix: str = "png", **more: Any) -> str:
    """The file of instances; `more` replaces its lists."""
    ids = {name: id for id, name in CATEGORIES.items()}
    annotations: list[dict[str, Any]] = []
    for number, image in enumerate(painted):
        for (x0, y0, x1, y1), name in zip(image.boxes, image.names, strict=True):
            count, width, height = len(annotations), x1 - x0, y1 - y0
            annotations.append({
                "segmentation": outline((x0, y0, x1, y1), image.size, count % 5),
                "area": width * height,
                "iscrowd": int(count % 5 == 4), "image_id": 100 + number,
                "bbox": [x0, y0, width, height], "category_id": ids[name], "id": 900 - count,
            })  # fmt: skip
    images = [
        {
            "license": 1, "file_name": f"{image.name}.{suffix}", "height": image.size[1],
            "width": image.size[0], "id": 100 + number,
        }
        for number, image in enumerate(painted)
    ]  # fmt: skip
    whole = {
        "info": {"year": 2017},
        "licenses": [{"id": 1, "name": "CC"}],
        "images": images,
        "annotations": annotations,
        "categories": [{"supercategory": "x", "id": id, "name": n} for id, n in CATEGORIES.items()],
    }
    return json.dumps({**whole, **more})


def coco(
    root: Path, train: Sequence[Painted], val: Sequence[Painted] = (), *, shapes: bool = False
) -> Path:
    """As cocodataset.org has it, unpacked into one folder; `shapes`: with files of `beside`."""
    for split, images in {"train2017": train, "val2017": val}.items():
        if images:
            put(root, {f"{split}/{image.name}.png": image.file() for image in images})
            put(root, {f"annotations/instances_{split}.json": coco_json(images)})
            put(root, {f"annotations/captions_{split}.json": '{"images": [], "annotations": []}'})
            if shapes:
                names = beside(images).items()
                put(root, {f"annotations/{name}_{split}.json": text for name, text in names})
    return root


def voc_xml(image: Painted, *, size: str | None = None, objects: str | None = None) -> str:
    parts = [
        f"<object><name>{name}</name><pose>Left</pose><truncated>{int(x0 == 0)}</truncated>"
        f"<difficult>{n % 2}</difficult><bndbox><xmax>{x1}</xmax><xmin>{x0 + 1}</xmin>"
        f"<ymax>{y1}</ymax><ymin>{y0 + 1}</ymin></bndbox></object>"
        for n, ((x0, y0, x1, y1), name) in enumerate(zip(image.boxes, image.names, strict=True))
    ]
    width, height = image.size
    sides = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return (
        f"<annotation><folder>VOC2012</folder><filename>{image.name}.jpg</filename>"
        f"<source><database>x</database></source>{sides if size is None else size}"
        f"<segmented>0</segmented>{''.join(parts) if objects is None else objects}</annotation>\n"
    )


def voc(root: Path, splits: dict[str, Sequence[Painted]]) -> Path:
    """As the devkit is unpacked; images are PNG, to compare their pixels."""
    for split, images in splits.items():
        for image in images:
            put(root, {f"JPEGImages/{image.name}.png": image.file()})
            put(root, {f"Annotations/{image.name}.xml": voc_xml(image)})
        lines = "".join(f"{image.name}\n" for image in images)
        put(root, {f"ImageSets/Main/{split}.txt": lines})
        put(root, {f"ImageSets/Main/bottle_{split}.txt": lines.replace("\n", "  1\n")})
    put(root, {"SegmentationClass/000000.png": None})
    return root


YOLO_NAMES = ("person", "bottle", "toothbrush")
YAML = "path: ../datasets/x\ntrain: images/train\nval: images/val\ntest:\nnames:\n"
YAML += "".join(f"  {number}: {name}\n" for number, name in enumerate(YOLO_NAMES))


def yolo_lines(image: Painted) -> str:
    """The label file: class, centre and size, as shares of the image's."""
    width, height = image.size
    boxes = zip(image.boxes, image.names, strict=True)
    return "".join(
        f"{YOLO_NAMES.index(name)} {(x0 + x1) / 2 / width:.6f} {(y0 + y1) / 2 / height:.6f}"
        f" {(x1 - x0) / width:.6f} {(y1 - y0) / height:.6f}\n"
        for (x0, y0, x1, y1), name in boxes
    )


def yolo(
    root: Path, splits: dict[str, Sequence[Painted]], where: str = "{}/{}", config: str = YAML
) -> Path:
    """As Ultralytics has it; `where` has the places of `images` or `labels`, and of the split."""
    for split, images in splits.items():
        for image in images:
            put(root, {f"{where.format('images', split)}/{image.name}.png": image.file()})
            if image.boxes:
                label = f"{where.format('labels', split)}/{image.name}.txt"
                put(root, {label: yolo_lines(image)})
    return put(root, {"data.yaml": config} if config else {})
