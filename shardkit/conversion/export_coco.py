"""An export to COCO: images, and JSON files of their objects and captions.

Layout: https://cocodataset.org/#format-data; `convert` reads it again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.codecs.header import read_header
from shardkit.codecs.image import NotAnImageError, unusable
from shardkit.codecs.media import SUFFIXES_OF
from shardkit.codecs.rle import counts_of
from shardkit.codecs.shapes import KEYPOINTS, SEGMENTATION, check_segmentation
from shardkit.errors import SampleError, UsageError
from shardkit.formats.base import KEY
from shardkit.helpers.names import file_stem, folded, why_renamed
from shardkit.helpers.prefetch import in_threads
from shardkit.sample import Sample, key_hash
from shardkit.schema import Array, FieldType, Image, Int, Json, holds_classes, holds_keypoints
from shardkit.sources.annotations import BOXES, CAPTIONS, CATEGORIES
from shardkit.sources.base import Source
from shardkit.storage import fs

_CROWD, _ID = "iscrowd", "image_id"
_ROWS = (CATEGORIES, _CROWD, SEGMENTATION, KEYPOINTS)  # fields with a value per box
_THREADS, _AHEAD = 4, 4
_MAX_CATEGORIES = 100_000  # without names


class _Written(NamedTuple):
    """What was written of a sample."""

    image: dict[str, Any]  # its entry
    objects: list[dict[str, Any]]  # entries without ids
    captions: list[str]
    size: int  # bytes of its file
    renamed: str  # why its file has another name than its key
    turned: bool  # whether it has an EXIF orientation


class CocoExport:
    """Writes the samples of one split."""

    def __init__(self, source: Source, split: str, folder: Path, main: str) -> None:
        """`main` is the field of images. Raises UsageError if there is nothing for COCO."""
        self._source, self._main = source, main
        self._images = folder / "images" / split
        self._name, self._annotations = split or "default", folder / "annotations"
        schema = source.schema
        fits = {name for name, kind in schema.items() if _fits(name, kind)}
        self._boxed = {BOXES, CATEGORIES} <= fits
        self._captioned, self._has_id = CAPTIONS in fits, _ID in fits
        self._rows = [name for name in _ROWS if name in fits]
        if not self._boxed and not self._captioned:
            raise UsageError(
                "the dataset has nothing for annotations of COCO",
                expected="the fields boxes and categories, or captions",
                found=", ".join(schema),
                fix="export it --to folder, or give its fields these names with --rename",
            )
        taken = fits if self._boxed else {CAPTIONS, _ID} & fits
        left_out = [name for name in schema if name not in {main, *taken}]
        self.notes = [f"fields that COCO has no place for: {', '.join(left_out)}"] * bool(left_out)
        self._names = source.class_names.get(CATEGORIES)
        self._largest = -1  # number of a category, if they have no names
        self._stems = self._all_stems()

    def _all_stems(self) -> list[tuple[str, str]]:
        """File names without suffix, and why they differ from the keys; those that some file
        systems do not tell apart get a hash."""
        stems, taken = list[tuple[str, str]](), set[int]()
        for key in self._source.all_keys():
            stem = file_stem(key, SUFFIXES_OF[Image])
            for added in ("", f"~{key_hash(key):016x}", f"~{len(stems)}"):
                if (name := folded(stem + added)) not in taken:
                    break
            taken.add(name)
            stems.append((stem + added, "alike" if added else why_renamed(stem, key)))
        return stems

    def run(self) -> Iterator[tuple[int, str]]:
        """Write all files; yields the bytes of each image and why it was renamed."""
        fs.make_folder(self._images)
        fs.make_folder(self._annotations)
        images: list[str] = []
        ids, turned = set[int](), 0
        files = (("instances", self._boxed), ("captions", self._captioned))
        with contextlib.ExitStack() as stack:
            tables = {
                name: stack.enter_context(_Table(self._annotations / f"{name}_{self._name}.json"))
                for name, wanted in files
                if wanted
            }
            written = in_threads(self._write, range(len(self._source)), _THREADS, _AHEAD)
            for one in stack.enter_context(contextlib.closing(written)):
                if type(one.image["id"]) is not int or one.image["id"] in ids:
                    raise _twice(one.image)
                ids.add(one.image["id"])
                images.append(_json(one.image))
                turned += one.turned
                for entry in one.objects:
                    tables["instances"].add(one.image["id"], entry)
                for caption in one.captions:
                    tables["captions"].add(one.image["id"], {"caption": caption})
                yield one.size, one.renamed
            for name, table in tables.items():
                # pycocotools looks up categories of captions, too, if the file lists any.
                table.end(images, self._categories() if name == "instances" else None)
        if turned:
            self.notes.append(
                f"images with an EXIF orientation: {turned:,}; boxes are on the image as stored"
            )

    def _categories(self) -> list[dict[str, Any]]:
        names = self._names or [str(number) for number in range(self._largest + 1)]
        points = self._source.class_names.get(KEYPOINTS, ())
        more = {"keypoints": [*points], "skeleton": []} if points else {}
        return [{"id": n, "name": name, **more} for n, name in enumerate(names, 1)]

    def _write(self, number: int) -> _Written:
        sample, (stem, renamed) = self._source[number], self._stems[number]
        key = sample[KEY]
        try:
            data: bytes = sample[self._main]
            header = read_header(data)
        except KeyError as error:
            what = "a sample has no image"
            raise SampleError(what, key=key, field=self._main) from error
        except NotAnImageError as error:
            raise unusable(error, key, self._main, "repair the dataset") from error
        suffixes = SUFFIXES_OF[Image]
        suffix = next(suffix for suffix, format in suffixes.items() if format == header.format)
        path = self._images / f"{stem}.{suffix}"
        fs.make_folder(path.parent)
        fs.write_loose(path, data)
        image = {
            "id": sample.get(_ID) if self._has_id else number + 1,
            "file_name": f"{stem}.{suffix}",
            "width": header.width,
            "height": header.height,
        }
        objects = self._objects(sample, [header.height, header.width]) if self._boxed else []
        captions = _values(sample, CAPTIONS) if self._captioned else []
        if not all(isinstance(caption, str) for caption in captions):
            raise _wrong(sample, CAPTIONS, "a list of texts", captions)
        return _Written(image, objects, captions, len(data), renamed, header.orientation != 1)

    def _objects(self, sample: Sample, size: list[int]) -> list[dict[str, Any]]:
        boxes = sample.get(BOXES, np.empty((0, 4)))
        if boxes.shape[1:] != (4,) or not np.isfinite(boxes).all():
            raise _wrong(sample, BOXES, "finite numbers (n, 4)", boxes.tolist())
        rows = {n: _values(sample, n) for n in self._rows if sample.get(n) is not None}
        for name, values in rows.items():
            if len(values) != len(boxes):
                raise SampleError(
                    "a field does not have a value for each box",
                    key=sample[KEY],
                    field=name,
                    expected=f"{len(boxes):,}",
                    found=f"{len(values):,}",
                )
        for value in rows.get(SEGMENTATION, ()):
            _check(sample, value, size)
        made = []
        for number, box in enumerate(boxes.astype(np.float64).tolist()):
            each = {name: values[number] for name, values in rows.items()}
            made.append(self._object(sample, box, each))
        return made

    def _object(self, sample: Sample, box: list[float], values: dict[str, Any]) -> dict[str, Any]:
        x, y, right, bottom = box
        kind, count = int(values.get(CATEGORIES, 0)), len(self._names or range(_MAX_CATEGORIES))
        if not 0 <= kind < count:
            what = "a category that has no name"
            known = f"0 to {count - 1:,}"
            raise SampleError(
                what, key=sample[KEY], field=CATEGORIES, expected=known, found=str(kind)
            )
        self._largest = max(self._largest, kind)
        segmentation = values.get(SEGMENTATION)
        made: dict[str, Any] = {
            "category_id": kind + 1,
            "bbox": [*map(_plain, (x, y, right - x, bottom - y))],
            "area": _plain(_area(segmentation, (right - x) * (bottom - y))),
            _CROWD: int(bool(values.get(_CROWD, 0))),
        }
        if segmentation is not None:
            made[SEGMENTATION] = segmentation
        if KEYPOINTS in values:
            points = np.array(values[KEYPOINTS], np.float64)
            if points.shape[1:] != (3,) or not np.isfinite(points).all():
                raise _wrong(sample, KEYPOINTS, "finite numbers (n, k, 3)", points.tolist())
            points[points[:, 2] > 0, :2] -= 0.5  # COCO's are indices of pixels
            made[KEYPOINTS] = [*map(_plain, points.ravel().tolist())]
            made["num_keypoints"] = int((points[:, 2] > 0).sum())
        return made


class _Table:
    """A JSON file, whose annotations are written as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._count = path, 0

    def __enter__(self) -> _Table:
        self._file = fs.BufferedFile(self._path)
        self._file.__enter__()
        self._file.write(b'{"annotations": [')
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def add(self, image: int, entry: dict[str, Any]) -> None:
        comma = ",\n" if self._count else "\n"
        self._count += 1
        self._file.write((comma + _json({"id": self._count, "image_id": image, **entry})).encode())

    def end(self, images: list[str], categories: list[dict[str, Any]] | None) -> None:
        self._file.write(b'\n],\n"images": [\n', ",\n".join(images).encode())
        if categories is not None:
            kinds = ",\n".join(map(_json, categories))
            self._file.write(f'\n],\n"categories": [\n{kinds}'.encode())
        self._file.write(b"\n]}\n")


def _twice(image: dict[str, Any]) -> SampleError:
    return SampleError(
        "image ids must be distinct numbers",
        key=image["file_name"],
        field=_ID,
        found=f"{image['id']} again, or none",
        fix=f"drop the field, so that images are numbered: shardkit convert ... --drop {_ID}",
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _fits(name: str, kind: FieldType) -> bool:
    """Return whether a field may have values for COCO, by its name and type."""
    if isinstance(kind, Array) and None in (kind.dtype, kind.shape):  # by another tool
        return name in (BOXES, CATEGORIES, _CROWD, KEYPOINTS)
    if name in (BOXES, _CROWD):
        return isinstance(kind, Array) and (kind.shape or ())[1:] == ((4,) if name == BOXES else ())
    fits = {CATEGORIES: holds_classes, KEYPOINTS: holds_keypoints}
    types = {SEGMENTATION: Json, CAPTIONS: Json, _ID: Int}
    return fits[name](kind) if name in fits else isinstance(kind, types.get(name, ()))


def _values(sample: Sample, field: str) -> list[Any]:
    """The values of a field with one per object, which may be JSON text."""
    value = sample.get(field)
    found = json.loads(value) if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list | np.ndarray):
        raise _wrong(sample, field, "a list", found)
    return [*found]


def _check(sample: Sample, value: Any, size: list[int]) -> None:
    """Raise SampleError for a value that is not the segmentation of an object on the image."""
    try:
        check_segmentation(value)
    except ValueError as error:
        raise _wrong(sample, SEGMENTATION, "polygons, RLE or null", value) from error
    if isinstance(value, dict) and value["size"] != size:
        raise _wrong(sample, SEGMENTATION, f"RLE of the image's size, {size}", value)


def _wrong(sample: Sample, field: str, expected: str, found: Any) -> SampleError:
    return SampleError(
        "a value is not one that COCO can have",
        key=sample[KEY],
        field=field,
        expected=expected,
        found=f"{found!r:.100}",
        fix=f"repair it, or leave the field out: shardkit convert ... --drop {field}",
    )


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _area(segmentation: Any, otherwise: float) -> float:
    """The pixels inside of polygons (by the shoelace formula) or of RLE."""
    if isinstance(segmentation, dict):
        return float(counts_of(segmentation)[1::2].sum())
    if not segmentation:
        return otherwise
    total = 0.0
    for polygon in segmentation:
        x, y = np.array(polygon, np.float64).reshape(-1, 2).T
        total += abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2
    return total
