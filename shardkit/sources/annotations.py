"""Bounding boxes: object annotations, validated and joined with their images.

A box is x0, y0, x1, y1 in pixels of the stored image. Coordinates are continuous: pixel i of a row
covers i to i + 1, so the box of a whole image is 0, 0, width, height.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.codecs.boxes import TURNED_BACK, turned_boxes
from shardkit.codecs.header import Header, read_header
from shardkit.codecs.image import NotAnImageError, unusable
from shardkit.codecs.shapes import KEYPOINTS, SEGMENTATION, SHAPES, moved_shapes, scaled_shapes
from shardkit.errors import SampleError, ShardkitError, SourceError
from shardkit.helpers import os_errors
from shardkit.helpers.prefetch import in_threads
from shardkit.sample import JsonText
from shardkit.schema import Array, FieldType, Int, Json, Schema
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Columns = Mapping[str, npt.NDArray[Any]]  # by field

BOXES, CATEGORIES, CAPTIONS = "boxes", "categories", "captions"
ON_IMAGE = frozenset({BOXES, *SHAPES})  # fields in pixels
_ROUNDED = 1e-5  # how far rounding may move the edge of a box out of its image, as a share of it
_PROBES = 64  # images that are read to find out on which pixels the boxes of a file are
_REQUESTS = 64  # concurrent, to an object store
_Parsed = TypeVar("_Parsed")


class Annotations:
    """The objects of each image, as columns with one row per object; replaces `Metadata`.

    The rows of image n are `starts[n]` to `starts[n + 1]`. `sizes` are the width and height of the
    images as annotated, to which the boxes refer, or 0 if not given. `per_image` are columns with
    one value per image. A column of dtype object holds JSON. `frame` is "upright" or "stored" where
    the size of an image does not tell.
    `relative`: whether boxes are in shares of the image's width and height, not in pixels.
    """

    unusable: Mapping[str, SourceError] = MappingProxyType({})
    class_names: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # set on the source instead
    path: Path | None = None
    lacking = 0  # every image has annotations, though they may name no object

    def __init__(
        self,
        starts: Numbers,
        columns: Columns,
        sizes: npt.NDArray[np.int32],
        per_image: Columns,
        frame: str | None = None,
        relative: bool = False,
    ) -> None:
        self._starts, self._columns, self._sizes = starts, columns, sizes
        self._per_image = per_image
        self._frame, self.relative = frame, relative

    @property
    def schema(self) -> Schema:
        fields: dict[str, FieldType] = {
            name: Json() if values.dtype == object
            else Array(values.dtype.str, (None, *values.shape[1:]))
            for name, values in self._columns.items()
        }  # fmt: skip
        if self.relative:
            fields[BOXES] = Array("<f4", (None, 4))
        of_image = ((n, Json() if v.dtype == object else Int()) for n, v in self._per_image.items())
        return Schema({**fields, **dict(of_image)})

    def row(self, image: int) -> dict[str, Any]:
        """Return the fields of one image, with boxes as annotated."""
        start, stop = self._starts[image : image + 2].tolist()
        found: dict[str, Any] = {
            name: JsonText(f"[{','.join(values[start:stop])}]") if values.dtype == object
            else values[start:stop].copy()
            for name, values in self._columns.items()
        }  # fmt: skip
        for name, values in self._per_image.items():
            value = values[image]
            found[name] = JsonText(value) if values.dtype == object else int(value)
        return found

    def stored_row(self, image: int, data: bytes, key: str) -> dict[str, Any]:
        """The fields of one image, with boxes in pixels of the image as it is stored in `data`.

        Raises SampleError if the size of the image differs from that in its annotations, and if it
        is not known whether its boxes are on the image as it is stored or as EXIF turns it.
        """
        row, size = self.row(image), tuple(self._sizes[image].tolist())
        try:
            header = read_header(data)
        except NotAnImageError:
            return row  # storing the image reports the error
        if any(size) and size not in (header.upright, (header.width, header.height)):
            raise SampleError(
                "the size of the image differs from that in its annotations",
                key=key,
                field=BOXES,
                expected=f"{size[0]} x {size[1]} pixels, as stored or after applying its EXIF"
                " orientation",
                found=f"{header.width} x {header.height}",
                fix="restore the annotated image, convert without boxes (--drop"
                f" {','.join(n for n in row if n in ON_IMAGE)}), or use --on-error skip",
            )
        frame = _frame(size, header) or self._frame
        if self.relative:
            sides = header.upright if frame == "upright" else (header.width, header.height)
            row[BOXES] = (row[BOXES] * np.array(sides * 2)).astype(np.float32)
            row |= scaled_shapes(row, sides)
        if header.orientation != 1 and len(row[BOXES]):
            if frame is None:
                raise SampleError(
                    "it is not known whether the boxes are on the image as it is stored, or as EXIF"
                    " turns it",
                    key=key,
                    field=BOXES,
                    expected="an image that EXIF turns by 90 degrees, whose stated size tells",
                    found=f"orientation {header.orientation}, {header.width} x {header.height}"
                    " pixels",
                    fix="give --annotations-frame upright if the boxes were drawn on the image as"
                    " viewers show it, or --annotations-frame stored",
                )
            if frame == "upright":
                back = TURNED_BACK[header.orientation]
                row[BOXES] = turned_boxes(row[BOXES], back, header.upright)
                row |= self._turned(row, back, header.upright, key)
        return row

    def _turned(
        self, row: Mapping[str, Any], orientation: int, size: tuple[int, int], key: str
    ) -> dict[str, Any]:
        """Segmentation and keypoints of a row, turned like their image. Raises SampleError."""
        try:
            return moved_shapes(row, orientation, size)
        except NotAnImageError as error:
            raise unusable(error, key, SEGMENTATION) from error

    def select(self, images: Numbers) -> Annotations:
        counts = np.diff(self._starts)[images]
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = np.arange(starts[-1]) + np.repeat(self._starts[:-1][images] - starts[:-1], counts)
        columns = {name: values[rows] for name, values in self._columns.items()}
        per_image = {name: values[images] for name, values in self._per_image.items()}
        sizes = self._sizes[images]
        return Annotations(starts, columns, sizes, per_image, self._frame, self.relative)

    def fingerprint(self) -> bytes:
        digest = xxhash.xxh3_128(self._starts.data)
        for name, values in {"sizes": self._sizes, **self._columns, **self._per_image}.items():
            digest.update(name.encode() + b"\0")
            if values.dtype == object:
                for text in values:
                    digest.update(text.encode() + b"\0")
            else:
                digest.update(np.ascontiguousarray(values).tobytes())
        return digest.digest()


@dataclass
class Read:
    """Annotations as read, before they are joined with images. Numbers count from 0."""

    path: Path  # of the annotation file, or the folder of the annotation files
    images: list[str]  # paths, relative to the image folder
    sizes: npt.NDArray[np.int32]  # (images, 2): width and height, 0 if not given
    boxes: npt.NDArray[np.floating]  # (objects, 4); float32 after `check_boxes`
    image_of: Numbers  # (objects,)
    kind_of: Numbers  # (objects,): index into `kinds`; -1 if it is not there
    kinds: list[str]
    per_object: dict[str, npt.NDArray[Any]]  # (objects, ...): more columns, see `Annotations`
    place: Callable[[int], dict[str, Any]]  # location of an object, for errors
    per_image: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # (images,)
    bad: dict[int, SampleError] = field(default_factory=dict)  # errors by image
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    problems: list[ShardkitError] = field(default_factory=list)  # errors without an image file
    frame: str | None = None  # see `Annotations`
    relative: bool = False
    boxed: bool = True  # whether there are objects; else captions alone
    keypoints: tuple[str, ...] = ()  # names of the points in the column `keypoints`


def read_files(
    paths: Sequence[Path], parse: Callable[[bytes], _Parsed], most: int, what: str, expected: str
) -> Iterator[_Parsed | SampleError]:
    """Yield what `parse` makes of the annotation file of each image, or the error of that image.

    A file has at most `most` bytes. `parse` raises ValueError, or SyntaxError as XML parsers do,
    for damaged `what`, such as "labels".
    """

    def read(path: Path) -> _Parsed | SampleError:
        try:
            data = fs.read(path, most)
            if len(data) > most:
                raise ValueError(f"the file has more than {most:,} bytes")
            return parse(data)
        except (ValueError, SyntaxError) as error:
            return SampleError(
                f"the {what} of an image are damaged: {error}",
                path=path,
                expected=expected,
                fix="repair the file, or exclude the image with --on-error skip",
            )
        except FileNotFoundError:
            return SampleError(
                f"an image has no {what}",
                path=path,
                expected="a file with the name of the image",
                fix="restore it, or exclude the image with --on-error skip",
            )
        except ShardkitError as error:
            if os_errors.shortage(error):  # not the fault of one image
                raise
            return SampleError(error.what, path=path, found=error.found, fix=error.fix)

    remote = any(isinstance(path, RemotePath) for path in paths[:1])
    return in_threads(read, paths, _REQUESTS, 4) if remote else map(read, paths)


def frame_of(read: Read, files: Mapping[int, str], root: Path) -> str | None:
    """Return the pixels on which the boxes of an annotation file are: "upright" or "stored".

    Judged by the stated sizes of some of its images which EXIF turns by 90 degrees. None if there
    are none among them, or if they contradict each other.
    """
    sized = [image for image in files if 0 < read.sizes[image, 0] != read.sizes[image, 1] > 0]
    found = set()
    for image in sized[:: max(len(sized) // _PROBES, 1)]:
        with contextlib.suppress(NotAnImageError, ShardkitError):
            header = read_header(fs.read(root / files[image]))
            found.add(_frame(tuple(read.sizes[image].tolist()), header))
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def _frame(size: tuple[int, ...], header: Header) -> str | None:
    """On which pixels the boxes of an image of the stated `size` are, if that tells."""
    stored = (header.width, header.height)
    if header.upright == stored or not any(size):
        return None
    return "upright" if size == header.upright else "stored" if size == stored else None


def check_boxes(read: Read, files: Mapping[int, str], root: Path) -> None:
    """Clip boxes to their images, and remove boxes without area; both are counted.

    `files` are the paths of existing images, by image number, relative to `root`. An invalid box is
    an error of its image. An image is read if the annotations do not give its size.
    """
    read.sizes[(read.sizes <= 0).any(axis=1)] = 0
    sizes = np.ones_like(read.sizes) if read.relative else read.sizes.copy()
    for image in np.flatnonzero(sizes[:, 0] == 0).tolist():
        if image in files and image not in read.bad:
            sizes[image] = _size_of(root / files[image], read.frame)
    there = np.zeros(len(read.images), np.bool_)
    there[list(files)] = True
    _keep(read, there[read.image_of])
    boxes, of = read.boxes, read.image_of
    wide, high = sizes[of].T.astype(np.float64)
    least, most = boxes[:, :2], boxes[:, 2:]
    limits = np.stack([wide, high], axis=1)
    limits[limits == 0] = np.inf  # unreadable image: reported when it is converted
    with np.errstate(invalid="ignore"):
        wrong: Flags = np.any(~np.isfinite(boxes), axis=1) | np.any(most < least, axis=1)
        before, after = (most <= 0) & (least < 0), (least >= limits) & (most > limits)
        outside: Flags = np.any(before | after, axis=1)
    for number in np.flatnonzero(wrong | outside | (read.kind_of < 0)).tolist():
        if int(of[number]) in read.bad:
            continue
        what = "has a category that the annotations do not define"
        if wrong[number]:
            what = "has a box that ends before it begins, or with a coordinate that is not finite"
        elif outside[number]:
            what = "has a box outside its image"
        image = int(of[number])
        x0, y0, x1, y1 = boxes[number].tolist()
        size = "relative size" if read.relative else f"{int(wide[number])} x {int(high[number])}"
        error = SampleError(
            f"an object {what}",
            field=BOXES if wrong[number] or outside[number] else CATEGORIES,
            found=f"x {x0:g} to {x1:g}, y {y0:g} to {y1:g} in {read.images[image]!r} of {size}",
            fix="repair the annotations, or exclude the image with --on-error skip",
            **read.place(number),
        )
        read.bad[image] = error
    good = ~np.isin(of, list(read.bad))
    clipped = np.concatenate([least.clip(0, limits), most.clip(0, limits)], axis=1)
    if not read.relative:
        clipped = clipped.astype(np.float32)
    empty = good & (clipped[:, 2:] <= clipped[:, :2]).any(axis=1)
    off = _ROUNDED if read.relative else 0
    moved = (np.abs(clipped - boxes.astype(clipped.dtype)) > off).any(axis=1)
    if beyond := int(np.count_nonzero(moved & good & ~empty)):
        read.notes.append(f"{beyond:,} boxes extend beyond their image, and were clipped to it")
    read.ignored += Counter({"objects whose box has no area": int(np.count_nonzero(empty))})
    read.boxes = clipped
    _keep(read, good & ~empty)


def _keep(read: Read, objects: Flags) -> None:
    """Keep only the selected `objects`."""
    place, numbers = read.place, np.flatnonzero(objects)
    read.place = lambda number: place(int(numbers[number]))
    read.boxes, read.image_of = read.boxes[objects], read.image_of[objects]
    read.kind_of = read.kind_of[objects]
    read.per_object = {name: values[objects] for name, values in read.per_object.items()}


def share_columns(reads: Sequence[Read]) -> tuple[str, ...]:
    """Give all splits the same columns; return the names of the keypoints, if there are any.

    They are numbers if the splits differ, which is noted. An object without keypoints gets zeros,
    and one without segmentation null.
    """
    names = {read.keypoints for read in reads if KEYPOINTS in read.per_object}
    points = max((len(one) for one in names), default=0)
    for read in reads:
        count, images = len(read.boxes), len(read.images)
        if names:
            known = read.per_object.get(KEYPOINTS, np.zeros((count, 0, 3), np.float32))
            more = points - known.shape[1]
            read.per_object[KEYPOINTS] = np.pad(known, ((0, 0), (0, more), (0, 0)))
        if any(SEGMENTATION in other.per_object for other in reads):
            read.per_object.setdefault(SEGMENTATION, np.full(count, "null", object))
        if any(CAPTIONS in other.per_image for other in reads):
            read.per_image.setdefault(CAPTIONS, np.full(images, "[]", object))
    if len(names) > 1:
        reads[0].notes.append("the splits name keypoints differently, so they get numbers")
        return tuple(map(str, range(points)))
    return next(iter(names), ())


def annotations_of(read: Read, images: Sequence[int], table: Sequence[str]) -> Annotations:
    """The annotations of `images`, given by their numbers in `read`, with classes from `table`."""
    number_in = {name: number for number, name in enumerate(table)}
    class_of = np.array([number_in[name] for name in read.kinds], np.int64)
    order = np.argsort(read.image_of, kind="stable")
    starts = np.searchsorted(read.image_of[order], np.arange(len(read.images) + 1))
    columns = {
        BOXES: read.boxes[order],
        CATEGORIES: class_of[read.kind_of[order]],
        **{name: values[order] for name, values in read.per_object.items()},
    }
    starts = starts.astype(np.int64)
    whole = Annotations(
        starts,
        columns if read.boxed else {},
        read.sizes,
        read.per_image,
        read.frame,
        read.relative,
    )
    return whole.select(np.array(images, np.int64))


def _size_of(path: Path, frame: str | None) -> tuple[int, int]:
    """Width and height of an image in its frame; 0 if unreadable, which conversion reports."""
    try:
        header = read_header(fs.read(path))
    except (NotAnImageError, ShardkitError):
        return 0, 0
    return header.upright if frame == "upright" else (header.width, header.height)
