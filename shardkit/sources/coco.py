"""COCO object annotations: one JSON file per split, parsed entry by entry.

The file itself is never in memory as a whole. Planning takes about 250 bytes for each object.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.errors import SourceError
from shardkit.sources.annotations import Read
from shardkit.storage.byte_source import open_source

_BLOCK = 1 << 20
_LONGEST = 1 << 24  # maximum characters of one entry
_SPACE = re.compile(r"[ \t\r\n]*")
_KNOWN = {
    "images": {"id", "file_name", "width", "height"},
    "annotations": {"id", "image_id", "category_id", "bbox", "iscrowd"},
    "categories": {"id", "name"},
}


def read_coco(path: Path) -> Read:
    """Read an annotation file. Raises SourceError if it is damaged or not COCO instances."""
    found = _Instances(path)
    try:
        for list_name, number, entry in entries(path):
            found.add(list_name, number, entry)
    except (ValueError, RecursionError) as error:  # from the JSON parser and the UTF-8 decoder
        raise found.damaged(f"it is not valid JSON: {error}") from error
    return found.read()


class _Instances:
    """The entries of one file, collected in columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._images: dict[Any, int] = {}  # image number by id
        self._kinds: dict[Any, int] = {}
        self._files: dict[int, tuple[str, int, int]] = {}  # image number -> name, width, height
        self._names: dict[int, str] = {}  # category names
        self._of, self._kind_of, self._ids = array("q"), array("q"), array("q")
        self._boxes, self._crowd = array("d"), bytearray()
        self._ignored: Counter[str] = Counter()
        self._keys: Counter[tuple[str, ...]] = Counter()  # counts of entries by list name and keys

    def add(self, list_name: str, number: int, entry: Any) -> None:
        if list_name not in _KNOWN:
            self._ignored[f"values of {list_name!r}"] += 1
            return
        try:
            if list_name == "annotations":
                self._add_object(entry)
            elif list_name == "images":
                width, height = (_whole(entry.get(name, 0)) for name in ("width", "height"))
                image = self._numbered(self._images, self._files, entry["id"])
                self._files[image] = (_text(entry["file_name"]), width, height)
            else:
                kind = self._numbered(self._kinds, self._names, entry["id"])
                self._names[kind] = _text(entry["name"])
        except KeyError as error:
            raise self.damaged(f"{list_name}[{number}] has no {error}") from error
        except (TypeError, AttributeError, OverflowError, ValueError) as error:
            raise self.damaged(f"{list_name}[{number}] is invalid: {error}") from error
        self._keys[(list_name, *entry)] += 1

    def _add_object(self, entry: Any) -> None:
        x, y, width, height = map(_number, entry["bbox"])
        image, kind = entry["image_id"], entry["category_id"]
        self._of.append(self._images.setdefault(image, len(self._images)))
        self._kind_of.append(self._kinds.setdefault(kind, len(self._kinds)))
        self._crowd.append(entry.get("iscrowd", 0) in (1, True))
        self._boxes.extend((x, y, x + width, y + height))
        if type(id := entry.get("id")) is int and abs(id) < 2**63:
            self._ids.append(id)

    def _numbered(self, numbers: dict[Any, int], known: dict[int, Any], id: Any) -> int:
        number = numbers.setdefault(id, len(numbers))
        if number in known:
            raise ValueError(f"its id is already in use: {id!r:.60}")
        return number

    def read(self) -> Read:
        if not self._files or not self._names:
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
            self._path,
            [name for name, *_ in self._files.values()],
            np.array([size for _, *size in self._files.values()], np.int32),
            np.array(self._boxes, np.float64).reshape(-1, 4)[there],
            of[there],
            kind_rows[np.array(self._kind_of, np.int64)][there],
            [*kinds],
            {"iscrowd": np.frombuffer(bytes(self._crowd), np.bool_)[there]},
            lambda number: {"path": self._path, "position": int(there[number])},
            ignored=self._ignored,
        )
        ids = list(self._images)
        if all(type(ids[number]) is int and abs(ids[number]) < 2**63 for number in self._files):
            read.numbers["image_id"] = np.array([ids[n] for n in self._files], np.int64)
        if len(kinds) < len(named):
            name = next(name for name, count in Counter(named).items() if count > 1)
            read.notes.append(f"categories of one name were merged: {name!r} in {self._path.name}")
        if twice := len(self._ids) - len(np.unique(np.array(self._ids, np.int64))):
            read.notes.append(f"{twice:,} objects in {self._path.name} have a duplicate id")
        return read

    def damaged(self, what: str) -> SourceError:
        return SourceError(
            f"the file is not a valid COCO annotation file: {what}",
            path=self._path,
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
