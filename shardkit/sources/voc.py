"""Pascal VOC object annotations: one XML file per image.

VOC counts pixels from 1 and includes the last one: xmin 1 and xmax 500 cover an image that is 500
pixels wide, which is 0 to 500 here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np

from shardkit.errors import SampleError
from shardkit.sources.annotations import Read, read_files

_MAX_BYTES = 1 << 20  # maximum size of one file
FLAGS = ("difficult", "truncated")
_KNOWN = {"folder", "filename", "path", "size", "object"}  # elements of an image
_KNOWN_OF_OBJECT = {"name", "bndbox", *FLAGS}
_EDGES = ("xmin", "ymin", "xmax", "ymax")


class _Object(NamedTuple):
    name: str
    box: tuple[float, ...]
    flags: tuple[bool, ...]


class _Image(NamedTuple):
    size: tuple[int, int]
    objects: list[_Object]
    ignored: Counter[str]


def read_voc(folder: Path, images: Sequence[str]) -> Read:
    """Read the annotations of `images`, from the XML files of the same names in `folder`.

    A missing or damaged file is an error of its image.
    """
    paths = [folder / f"{name.rpartition('.')[0]}.xml" for name in images]
    found: list[_Image] = []
    bad, ignored = {}, Counter[str]()
    expected = "XML in the format of Pascal VOC"
    for number, image in enumerate(read_files(paths, _image, _MAX_BYTES, "annotations", expected)):
        if isinstance(image, SampleError):
            bad[number] = image
            found.append(_Image((0, 0), [], Counter()))
        else:
            found.append(image)
            ignored.update(image.ignored)
    objects = [one for image in found for one in image.objects]
    of = np.repeat(np.arange(len(found)), [len(image.objects) for image in found])
    kinds = sorted({one.name for one in objects})
    number_of = {name: number for number, name in enumerate(kinds)}
    flags = np.array([one.flags for one in objects], np.bool_).reshape(-1, len(FLAGS))
    return Read(
        folder,
        list(images),
        np.array([image.size for image in found], np.int32).reshape(-1, 2),
        np.array([one.box for one in objects], np.float64).reshape(-1, 4),
        of.astype(np.int64),
        np.array([number_of[one.name] for one in objects], np.int64),
        kinds,
        {name: flags[:, n] for n, name in enumerate(FLAGS)},
        lambda number: {"path": paths[of[number]]},
        bad=bad,
        ignored=ignored,
    )


def _image(data: bytes) -> _Image:
    """Parse one file. Raises ValueError and ParseError; also for entity definitions, which could
    expand without bound, and for encodings in which these could hide."""
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise ValueError("it has a DOCTYPE, which is refused because it could define entities")
    if b"\0" in data:
        raise ValueError("it is not UTF-8")
    data.decode()
    root = ElementTree.fromstring(data, ElementTree.XMLParser(encoding="utf-8"))
    if root.tag != "annotation":
        raise ValueError(f"its root element is <{root.tag:.40}> instead of <annotation>")
    size = root.find("size")
    sides = (0, 0) if size is None else (_whole(size, "width"), _whole(size, "height"))
    objects = root.findall("object")
    ignored = _unread(root, _KNOWN)
    for one in objects:
        ignored += _unread(one, _KNOWN_OF_OBJECT)
    return _Image(sides, [_object(one) for one in objects], ignored)


def _object(element: Element) -> _Object:
    name, box = (element.findtext("name") or "").strip(), element.find("bndbox")
    if not name or box is None:
        raise ValueError("an object has no name" if not name else f"a {name!r:.40} has no bndbox")
    x0, y0, x1, y1 = (float(_text(box, edge)) for edge in _EDGES)
    flags = tuple((element.findtext(flag) or "0").strip() == "1" for flag in FLAGS)
    return _Object(name, (x0 - 1, y0 - 1, x1, y1), flags)


def _whole(element: Element, name: str) -> int:
    value = float(_text(element, name))
    if not 0 <= value < 2**31 or value != int(value):
        raise ValueError(f"{value:g} is not a number of pixels")
    return int(value)


def _text(element: Element, name: str) -> str:
    text = element.findtext(name)
    if text is None:
        raise ValueError(f"a <{element.tag}> has no <{name}>")
    return text


def _unread(element: Element, known: Iterable[str]) -> Counter[str]:
    return Counter(f"values of {child.tag!r:.60}" for child in element if child.tag not in known)
