"""YOLO's labels: a text file per image with a line per object, and `data.yaml` with the classes.

Coordinates are shares of the image's width and height. As in Ultralytics, an image without a label
file has no objects, a line that repeats is one object, and the image is upright. A line has the
class, and then x, y, width, height; or the corners of a polygon, which four of an oriented box are,
too; or, if `data.yaml` has `kpt_shape`, x, y, width, height and keypoints.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardkit.codecs.shapes import KEYPOINTS, SEGMENTATION
from shardkit.errors import SampleError, SourceError
from shardkit.helpers import os_errors
from shardkit.helpers.yaml import parse_yaml
from shardkit.sources.annotations import Read, read_files
from shardkit.storage import fs
from shardkit.storage.walk import Walk, kind_of_file

CONFIGS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
_SPLITS = ("train", "val", "test")
_MAX_BYTES = 1 << 22  # maximum size of one file
_MAX_CLASSES = 100_000  # maximum number without names
_MAX_POINTS = 1000  # keypoints of an object
_BEYOND = 0.01  # how far coordinates may be outside of 0 to 1, as in Ultralytics
_VISIBLE = 2.0  # COCO's visibility of keypoints whose lines have none


class Config(NamedTuple):
    """What a dataset says about its labels."""

    names: tuple[str, ...]  # of the classes; empty: only their numbers are known
    paths: Mapping[str, str] = MappingProxyType({})  # of the images, a folder or list, by split
    points: tuple[int, int] | None = None  # keypoints of an object, and numbers of each: 2 or 3
    point_names: tuple[str, ...] | None = ()  # None: not the same for all classes


def read_config(path: Path) -> Config | None:
    """Read `data.yaml`; None if it is of another kind. Raises SourceError if it is damaged."""
    try:
        with os_errors.explained("read", path):
            data = fs.read(path, _MAX_BYTES)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        found = parse_yaml(data.decode("utf-8-sig"), "yolo", f"{path.name} of a YOLO dataset")
        if not isinstance(found, dict) or "names" not in found:
            return None
        names = _names(found["names"])
        if "nc" in found and found["nc"] != len(names):
            raise ValueError(f"nc is {found['nc']!r:.20}, but there are {len(names)} names")
        paths = {s: _path(s, found[s]) for s in _SPLITS if found.get(s)}
        return Config(names, paths, *_points(found))
    except ValueError as error:
        raise SourceError(
            f"the description of a YOLO dataset is damaged: {error}",
            path=path,
            expected="YAML with the names of the classes, and the images of train, val and test",
            fix="repair it",
        ) from error


def _names(given: Any) -> tuple[str, ...]:
    """Return the class names, from a list or from a mapping of their numbers."""
    numbered = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(numbered, dict) or sorted(map(str, numbered)) != sorted(
        map(str, range(len(numbered)))
    ):
        raise ValueError("names is not a list, or a mapping of the numbers from 0 to names")
    names = [name for _, name in sorted((int(number), name) for number, name in numbered.items())]
    wrong = [name for name in names if type(name) not in (str, int, float)]
    if wrong:
        raise ValueError(f"{wrong[0]!r:.40} is not a class name; put it in quotes")
    names = [str(name) for name in names]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"two classes are called {twice[0]!r:.40}")
    return tuple(names)


def _points(found: Mapping[str, Any]) -> tuple[tuple[int, int] | None, tuple[str, ...] | None]:
    """Return the shape of keypoints, and the names of `Config.point_names`."""
    shape = found.get("kpt_shape")
    if shape is None:
        return None, ()
    whole = isinstance(shape, list) and [*map(type, shape)] == [int, int]
    if not whole or not 0 < shape[0] <= _MAX_POINTS or shape[1] not in (2, 3):
        raise ValueError(f"kpt_shape is {shape!r:.40} instead of [number of keypoints, 2 or 3]")
    given = found.get("kpt_names")
    every = {
        tuple(map(str, names))
        for names in (given.values() if isinstance(given, dict) else [])
        if isinstance(names, list) and len(names) == shape[0]
    }
    names = every.pop() if len(every) == 1 else () if given is None else None
    return (shape[0], shape[1]), names


def _path(split: str, given: Any) -> str:
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if not isinstance(given, str):
        raise ValueError(f"{split} is {given!r:.60}; only one folder, or one list, can be read")
    return given


def labels_of(images: str) -> str | None:
    """Return the folder of the labels, given that of the images, whose path has `images` in it.

    >>> labels_of("images/train")
    'labels/train'
    """
    before, found, after = f"/{images}/".rpartition("/images/")
    return f"{before}/labels/{after}".strip("/") if found else None


class _Object(NamedTuple):
    kind: int
    box: tuple[float, ...]  # x0, y0, x1, y1
    polygon: tuple[float, ...] = ()  # x, y, ...
    points: tuple[float, ...] = ()  # x, y, visibility, ...


def read_yolo(folder: Path, images: Sequence[str], config: Config, *, stray: bool) -> Read:
    """Read the labels of `images`, from the files of the same names in `folder`.

    A damaged file is an error of its image. `stray`: count files of no image in the folder.
    """
    labels = [f"{name.rpartition('.')[0]}.txt" for name in images]
    files = [
        f"{listing.folder.relative}/{file.name}".lstrip("/")
        for listing in (Walk(folder) if folder.is_dir() else ())
        for file in listing.files
    ]
    there, wanted = {*files}, {*labels}
    paths = {n: folder / label for n, label in enumerate(labels) if label in there}
    expected = "lines of a class and x, y, width, height as shares of the image's size"
    expected += ", or of a class and a polygon"
    if config.points:
        expected = f"lines of {_length(config.points)} numbers: a class, a box and keypoints"
    parse = partial(_objects, points=config.points)
    parsed = read_files([*paths.values()], parse, _MAX_BYTES, "labels", expected)
    found, bad, ignored = dict[int, list[_Object]](), dict[int, SampleError](), Counter[str]()
    for number, objects in zip(paths, parsed, strict=True):
        if isinstance(objects, SampleError):
            bad[number] = objects
        else:
            found[number] = list(dict.fromkeys(objects))
            ignored["repeated lines of labels"] += len(objects) - len(found[number])
    objects = [one for objects in found.values() for one in objects]
    of = np.repeat(np.array([*found], np.int64), [len(objects) for objects in found.values()])
    kinds = np.array([one.kind for one in objects], np.int64)
    count = min(int(kinds.max(initial=-1)) + 1, _MAX_CLASSES)
    names = [*config.names] or [str(number) for number in range(count)]
    kinds[(kinds < 0) | (kinds >= len(names))] = -1
    if stray:
        ignored.update(
            "label file without an image" if name.endswith(".txt") else kind_of_file(name)
            for name in files
            if name not in wanted
        )
    read = Read(
        folder,
        list(images),
        np.zeros((len(images), 2), np.int32),
        np.array([one.box for one in objects], np.float64).reshape(-1, 4),
        of,
        kinds,
        names,
        _shapes(objects, config.points),
        lambda number: {"path": paths[int(of[number])]},
        bad=bad,
        ignored=+ignored,
        relative=True,
    )
    if config.points:
        read.keypoints = config.point_names or tuple(map(str, range(config.points[0])))
        if config.point_names is None:
            what = f"kpt_names is not {config.points[0]} names that all classes share"
            read.notes.append(f"{what}: keypoints get numbers")
    if corners := sum(bool(one.polygon) for one in objects):
        some = f"{corners:,} of {len(objects):,}"
        what = f"lines in {folder} of corners, as of polygons and oriented boxes: {some}"
        poses = "poses need kpt_shape in data.yaml"
        read.notes.append(f"{what}; 'boxes' has the upright box around each; {poses}")
    if absent := len(images) - len(paths):
        some = f"{absent:,} of {len(images):,}"
        read.notes.append(f"images without a label file in {folder}, thus without objects: {some}")
    return read


def _shapes(objects: Sequence[_Object], points: tuple[int, int] | None) -> dict[str, Any]:
    """Return the columns of polygons and keypoints, if there are any."""
    made: dict[str, Any] = {}
    if any(one.polygon for one in objects):
        texts = [json.dumps([one.polygon]) if one.polygon else "null" for one in objects]
        made[SEGMENTATION] = np.array(texts, object)
    if points:
        every = [one.points for one in objects]
        made[KEYPOINTS] = np.array(every, np.float32).reshape(len(objects), points[0], 3)
    return made


def _length(points: tuple[int, int]) -> int:
    return 5 + points[0] * points[1]


def _objects(data: bytes, points: tuple[int, int] | None) -> list[_Object]:
    """Parse a file. Raises ValueError."""
    lines = enumerate(data.decode("utf-8-sig").splitlines(), 1)
    return [_object(number, line, points) for number, line in lines if line.strip()]


def _object(line: int, text: str, points: tuple[int, int] | None) -> _Object:
    """Parse a line. Raises ValueError."""
    try:
        kind, *values = map(float, text.split())
    except ValueError as error:
        raise ValueError(f"line {line} is not a list of numbers") from error
    corners = len(values) >= 6 and len(values) % 2 == 0
    if 1 + len(values) != _length(points) if points else not (len(values) == 4 or corners):
        poses = "" if points or len(values) < 6 else ": poses need kpt_shape in data.yaml"
        raise ValueError(f"line {line} has {1 + len(values)} numbers{poses}")
    if not kind.is_integer() or abs(kind) >= 2**31:
        raise ValueError(f"line {line} begins with {kind:g} instead of the number of a class")
    if points:
        found = _keypoints(line, values[4:], points[1])
        return _Object(int(kind), _box(line, values[:4]), points=found)
    if len(values) == 4:
        return _Object(int(kind), _box(line, values))
    _check_shares(line, values)
    x, y = values[::2], values[1::2]
    return _Object(int(kind), (min(x), min(y), max(x), max(y)), tuple(values))


def _box(line: int, values: Sequence[float]) -> tuple[float, ...]:
    _check_shares(line, values)
    x, y, width, height = values
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _check_shares(line: int, values: Sequence[float]) -> None:
    if wrong := [v for v in values if not -_BEYOND <= v <= 1 + _BEYOND]:
        raise ValueError(f"line {line} has {wrong[0]:g}, which is not a share of the image's size")


def _keypoints(line: int, values: Sequence[float], each: int) -> tuple[float, ...]:
    """Return x, y and visibility of each point. Negative coordinates mean that it is not labelled,
    as in Ultralytics; then all three are 0."""
    made: list[float] = []
    for at in range(0, len(values), each):
        x, y, *seen = values[at : at + each]
        negative = -math.inf < min(x, y) < 0
        visibility = 0.0 if negative else seen[0] if seen else _VISIBLE
        if visibility not in (0, 1, 2):
            raise ValueError(f"line {line} has the visibility {visibility:g} instead of 0, 1 or 2")
        if visibility or not math.isfinite(x + y):
            _check_shares(line, (x, y))
        made += (x, y, visibility) if visibility else (0.0, 0.0, 0.0)
    return tuple(made)
