"""COCO annotations: JSON files of objects, keypoints and captions, parsed entry by entry.

A file itself is never in memory as a whole. Planning takes about 350 bytes for each object, and the
text of its segmentation.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.codecs.shapes import KEYPOINTS, SEGMENTATION, check_segmentation
from shardkit.errors import SampleError, SourceError
from shardkit.sample import JsonText
from shardkit.sources.annotations import CAPTIONS, Numbers, Read
from shardkit.storage.byte_source import open_source

_BLOCK = 1 << 20
_LONGEST = 1 << 24  # maximum characters of one entry
_NO_ID = -(2**63)  # of an object without an integer as its id
_SPACE = re.compile(r"[ \t\r\n]*")
_KNOWN = {
    "images": {"id", "file_name", "width", "height"},
    "annotations": {
        *("id", "image_id", "category_id", "bbox", "iscrowd"),
        *("segmentation", "keypoints", "caption"),
    },
    "categories": {"id", "name", "keypoints"},
}
_MOST_POINTS = 1 << 28  # keypoints of all objects, labelled or not


def read_coco(path: Path, beside: Sequence[Path] = ()) -> Read:
    """Read an annotation file, and files `beside` it with keypoints and captions of its images.

    Raises SourceError if one is damaged or not COCO's.
    """
    found = _Instances(path)
    for one in (path, *beside):
        found.path = one
        try:
            for list_name, number, entry in entries(one):
                if one is path:
                    found.add(list_name, number, entry)
                else:
                    found.add_beside(list_name, number, entry)
        except (ValueError, RecursionError) as error:  # from the JSON parser and the UTF-8 decoder
            raise found.damaged(f"it is not valid JSON: {error}") from error
    found.path = path
    return found.read()


class _Instances:
    """The entries of one file, and of those beside it, collected in columns."""

    def __init__(self, path: Path) -> None:
        self.path = path  # of the file that is being read
        self._images: dict[Any, int] = {}  # image number by id
        self._kinds: dict[Any, int] = {}
        self._files: dict[int, tuple[str, int, int]] = {}  # image number -> name, width, height
        self._names: dict[int, str] = {}  # category names
        self._of, self._kind_of, self._ids = array("q"), array("q"), array("q")
        self._boxes, self._crowd = array("d"), bytearray()
        self._segmentation: list[str] = []  # JSON of each object
        self._keypoints: dict[int, array[float]] = {}  # by object
        self._point_names: set[tuple[str, ...]] = set()
        self._captions: dict[int, list[str]] = {}  # by image
        self._rle: dict[int, list[int]] = {}  # height and width of segmentation as RLE, by object
        self._wrong: dict[int, str] = {}  # what is wrong with an object
        self._objects: dict[int, int] = {}  # object by id, for files beside
        self._ignored: Counter[str] = Counter()
        self._keys: Counter[tuple[str, ...]] = Counter()  # counts of entries by list name and keys

    def add(self, list_name: str, number: int, entry: Any) -> None:
        if list_name not in _KNOWN:
            self._ignored[f"values of {list_name!r}"] += 1
            return
        with self._explained(list_name, number):
            if list_name == "annotations":
                self._add_annotation(entry)
            elif list_name == "images":
                width, height = (_whole(entry.get(name, 0)) for name in ("width", "height"))
                image = self._numbered(self._images, self._files, entry["id"])
                self._files[image] = (_text(entry["file_name"]), width, height)
            else:
                kind = self._numbered(self._kinds, self._names, entry["id"])
                self._names[kind] = _text(entry["name"])
                self._name_points(entry)
        self._keys[(list_name, *entry)] += 1

    def add_beside(self, list_name: str, number: int, entry: Any) -> None:
        """Add the keypoints or the caption of another file, whose images are known."""
        with self._explained(list_name, number):
            if list_name == "categories":
                self._name_points(entry)
                self._ignored["values of 'skeleton'"] += "skeleton" in entry
            elif list_name == "annotations" and "caption" in entry:
                self._add_caption(entry)
            elif list_name == "annotations" and entry.get("keypoints") is not None:
                self._join_keypoints(entry)

    @contextlib.contextmanager
    def _explained(self, list_name: str, number: int) -> Iterator[None]:
        """Turn errors of an entry into those of its file."""
        try:
            yield
        except KeyError as error:
            raise self.damaged(f"{list_name}[{number}] has no {error}") from error
        except (TypeError, AttributeError, OverflowError, ValueError) as error:
            raise self.damaged(f"{list_name}[{number}] is invalid: {error}") from error

    def _name_points(self, entry: Any) -> None:
        if names := entry.get("keypoints"):
            self._point_names.add(tuple(map(_text, names)))

    def _add_annotation(self, entry: Any) -> None:
        if "caption" in entry:
            self._add_caption(entry)
            if "bbox" not in entry:
                return
        x, y, width, height = map(_number, entry["bbox"])
        image, kind = entry["image_id"], entry["category_id"]
        one = len(self._of)
        self._of.append(self._images.setdefault(image, len(self._images)))
        self._kind_of.append(self._kinds.setdefault(kind, len(self._kinds)))
        self._crowd.append(entry.get("iscrowd", 0) in (1, True))
        self._boxes.extend((x, y, x + width, y + height))
        id = entry.get("id")
        self._ids.append(id if type(id) is int and abs(id) < 2**63 else _NO_ID)
        self._add_segmentation(one, entry.get("segmentation"))
        if entry.get("keypoints") is not None:
            self._add_keypoints(one, entry["keypoints"])

    def _add_segmentation(self, one: int, value: Any) -> None:
        text = "null"
        try:
            check_segmentation(value)
        except ValueError as error:
            self._wrong[one] = f"has no segmentation, but {error}"
        else:
            text = JsonText.of(value)
            if isinstance(value, dict):
                self._rle[one] = value["size"]
        self._segmentation.append(text)

    def _add_keypoints(self, one: int, values: Any) -> None:
        found = [*map(_number, values)]
        is_finite = all(map(math.isfinite, array("f", found)))
        if len(found) % 3 or not is_finite or {*found[2::3]} - {0, 1, 2}:
            self._wrong[one] = "has keypoints that are not x, y and visibility 0, 1 or 2"
            return
        for at in range(0, len(found), 3):
            if found[at + 2]:  # COCO counts pixels
                found[at] += 0.5
                found[at + 1] += 0.5
            elif found[at] or found[at + 1]:
                found[at] = found[at + 1] = 0.0
                self._ignored["positions of keypoints that are not labelled"] += 1
        self._keypoints[one] = array("f", found)

    def _add_caption(self, entry: Any) -> None:
        image = self._images.setdefault(entry["image_id"], len(self._images))
        self._captions.setdefault(image, []).append(_text(entry["caption"]))

    def _join_keypoints(self, entry: Any) -> None:
        """Add the keypoints of an object that the main file has, with the same id and box."""
        if not self._objects:
            self._objects = {id: one for one, id in enumerate(self._ids)}
        one = self._objects.get(entry["id"])
        if one is None:
            self._ignored["keypoints of objects that the main file does not list"] += 1
            return
        x, y, width, height = map(_number, entry["bbox"])
        box = (x, y, x + width, y + height)
        if self._images.get(entry["image_id"]) != self._of[one] or box != tuple(
            self._boxes[4 * one : 4 * one + 4]
        ):
            raise ValueError(f"the object {entry['id']} has another box, or image, elsewhere")
        self._add_keypoints(one, entry["keypoints"])

    def _numbered(self, numbers: dict[Any, int], known: dict[int, Any], id: Any) -> int:
        number = numbers.setdefault(id, len(numbers))
        if number in known:
            raise ValueError(f"its id is already in use: {id!r:.60}")
        return number

    def read(self) -> Read:
        boxed = bool(self._names or self._of)
        if not self._files or not (self._names or (self._captions and not boxed)):
            absent = "images" if not self._files else "categories"
            raise self.damaged(f"it lists no {absent!r}")
        for (list_name, *keys), count in self._keys.items():
            for key in set(keys) - _KNOWN[list_name]:
                self._ignored[f"values of {key!r}"] += count
        images = {number: row for row, number in enumerate(self._files)}
        # Integer ids come first, in the order of pycocotools; others as they are listed.
        whole = sorted(id for id in self._kinds if type(id) is int)
        by_id = [*whole, *(id for id in self._kinds if type(id) is not int)]
        numbers = [self._kinds[id] for id in by_id]
        named = [self._names[number] for number in numbers if number in self._names]
        kinds = {name: number for number, name in enumerate(dict.fromkeys(named))}
        kind_rows = np.full(len(self._kinds), -1, np.int64)
        for number, name in self._names.items():
            kind_rows[number] = kinds[name]
        rows = np.array([images.get(n, -1) for n in range(len(self._images))], np.int64)
        of = rows[np.array(self._of, np.int64)]
        there = np.flatnonzero(of >= 0)
        if len(there) < len(of):
            what = "objects of images that the annotations do not list"
            self._ignored[what] = len(of) - len(there)
        read = Read(
            self.path,
            [name for name, *_ in self._files.values()],
            np.array([size for _, *size in self._files.values()], np.int32),
            np.array(self._boxes, np.float64).reshape(-1, 4)[there],
            of[there],
            kind_rows[np.array(self._kind_of, np.int64)][there],
            [*kinds],
            {"iscrowd": np.frombuffer(bytes(self._crowd), np.bool_)[there]},
            lambda number: {"path": self.path, "position": int(there[number])},
            ignored=self._ignored,
            boxed=boxed,
        )
        self._add_shapes(read, there)
        self._give_captions(read, images)
        self._add_errors(read, of)
        ids = list(self._images)
        if all(type(ids[number]) is int and abs(ids[number]) < 2**63 for number in self._files):
            read.per_image["image_id"] = np.array([ids[n] for n in self._files], np.int64)
        self._note_doubles(read, named)
        return read

    def _note_doubles(self, read: Read, named: list[str]) -> None:
        """Say which categories have the same name, and how many objects have the same id."""
        if len(read.kinds) < len(named):
            name = next(name for name, count in Counter(named).items() if count > 1)
            read.notes.append(f"categories of one name were merged: {name!r} in {self.path.name}")
        known = np.array(self._ids, np.int64)
        known = known[known != _NO_ID]
        if twice := len(known) - len(np.unique(known)):
            read.notes.append(f"{twice:,} objects in {self.path.name} have a duplicate id")

    def _add_shapes(self, read: Read, there: Numbers) -> None:
        """Add the columns of segmentation and keypoints, if any object has them."""
        if any(text not in ("null", "[]") for text in self._segmentation):
            read.per_object[SEGMENTATION] = np.array(self._segmentation, object)[there]
        points = max((len(found) // 3 for found in self._keypoints.values()), default=0)
        if not points:
            return
        if points * len(self._of) > _MOST_POINTS:
            raise self.damaged(f"{len(self._of):,} objects with up to {points:,} keypoints")
        found = np.zeros((len(self._of), points, 3), np.float32)
        for one, values in self._keypoints.items():
            found[one, : len(values) // 3] = np.array(values, np.float32).reshape(-1, 3)
        read.per_object[KEYPOINTS] = found[there]
        if len(self._point_names) == 1 and len(names := next(iter(self._point_names))) == points:
            read.keypoints = names
        else:
            read.keypoints = tuple(map(str, range(points)))
            what = "the categories list other, or several, names of keypoints, which get numbers"
            read.notes.append(f"{self.path.name}: {what}")

    def _give_captions(self, read: Read, images: dict[int, int]) -> None:
        lists: list[list[str]] = [[] for _ in images]
        for number, captions in self._captions.items():
            if number in images:
                lists[images[number]] = captions
            else:
                what = "captions of images that the annotations do not list"
                self._ignored[what] += len(captions)
        if any(lists):
            read.per_image[CAPTIONS] = np.array([JsonText.of(one) for one in lists], object)

    def _add_errors(self, read: Read, of: Numbers) -> None:
        """Add what is wrong with an object as an error of its image, `of[object]`."""
        for one, (height, width) in self._rle.items():
            size = read.sizes[of[one]].tolist() if of[one] >= 0 else [0, 0]
            if any(size) and size != [width, height]:
                self._wrong[one] = f"has RLE of {width} x {height} pixels, not those of its image"
        for one, what in self._wrong.items():
            if of[one] >= 0:
                read.bad[int(of[one])] = SampleError(
                    f"an object {what}",
                    path=self.path,
                    position=one,
                    fix="repair the annotations, or exclude the image with --on-error skip",
                )

    def damaged(self, what: str) -> SourceError:
        return SourceError(
            f"the file is not a valid COCO annotation file: {what}",
            path=self.path,
            expected="a JSON object with the lists images, annotations (with bbox) and categories",
            fix="repair the file, or give the image folder to convert images without annotations",
        )


def _whole(value: Any) -> int:
    if not isinstance(value, int | float) or value != int(value) or not 0 <= value < 2**31:
        raise ValueError(f"{value!r:.60} is not a number of pixels")
    return int(value)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{value!r:.60} is not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is not a string")
    return value


def entries(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield all entries of the lists in a JSON object, as list name, number and value.

    A value that is not a list counts as its only entry. One entry is in memory at a time.
    Raises ValueError for invalid JSON, and for an entry of over 16 Mi characters.
    """
    text = _Text(path)
    text.take("{")
    while text.next() != "}":
        name = _text(text.value())
        text.take(":")
        if text.next() != "[":
            yield name, 0, text.value()
        else:
            text.take("[")
            number = 0
            while text.next() != "]":
                yield name, number, text.value()
                number += 1
                if text.next() != "]":
                    text.take(",")
            text.take("]")
        if text.next() != "}":
            text.take(",")
    text.take("}")
    if text.next():
        raise ValueError("there is extra data after its end")


class _Text:
    """The text of a file, of which only a part is in memory."""

    def __init__(self, path: Path) -> None:
        self._blocks = codecs.iterdecode(open_source(path).blocks(_BLOCK), "utf-8-sig")
        self._text, self._at, self._ended = "", 0, False
        self._json = json.JSONDecoder()

    def next(self) -> str:
        """Skip white space, and peek at the next character; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def take(self, expected: str) -> None:
        if self.next() != expected:
            raise ValueError(f"expected {expected!r}, found {self.next() or 'the end'!r}")
        self._at += 1

    def value(self) -> Any:
        """Read the JSON value that begins at the next character."""
        self.next()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except ValueError:
                if self._ended or len(self._text) - self._at > _LONGEST:
                    raise
            else:
                if end < len(self._text) or self._ended:  # else a number may continue
                    self._at = end
                    return value
            self._more()

    def _more(self) -> None:
        """Read on: about as much as is left in memory, at least one block."""
        left = self._text[self._at :]
        parts = [left, *islice(self._blocks, len(left) // _BLOCK + 1)]
        self._ended = len(parts) == 1
        self._text, self._at = "".join(parts), 0
