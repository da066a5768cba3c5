"""Which array fields are boxes on an image, and which others have a row for each box.

The field `boxes`, floats of shape (n, 4), is taken as boxes: x0, y0, x1, y1 in pixels. For other
fields named like boxes the user is asked, as they may be x, y, width, height, or relative.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from shardkit.codecs.boxes import WITH_BOXES, is_boxes
from shardkit.codecs.image import is_mask_name
from shardkit.errors import SampleError, UsageError, near
from shardkit.preprocess.mask_fields import image_of
from shardkit.sample import Sample
from shardkit.schema import Array, Json, Schema
from shardkit.sources.base import Source, Stream, some_of

BOXES = "boxes"
_NAMES = {"box", "boxes", "bbox", "bboxes", "bndbox"}
_FLOATS = {"<f4", "<f8"}


class OnImage(NamedTuple):
    """The image that boxes are on, and the fields that have a row for each box."""

    image: str
    others: tuple[str, ...]

    def note(self, field: str) -> str:
        """Describe to the user how the boxes are treated."""
        others = f"; along with {', '.join(map(repr, self.others))}" if self.others else ""
        words = "x0, y0, x1, y1 in pixels, transformed with it and clipped"
        return f"{field!r} is taken as boxes on {self.image!r}: {words}{others}"

    def check(self, sample: Sample, field: str) -> None:
        """Raise SampleError if the value is not boxes, or other fields have more or fewer rows."""
        boxes = sample[field]
        if not is_boxes(boxes):
            raise _no_boxes(sample, field)
        for name in self.others:
            if name in sample and len(sample[name]) != len(boxes):
                raise SampleError(
                    f"the sample has {len(boxes):,} boxes, but the field has more or fewer rows",
                    key=sample["__key__"],
                    field=name,
                    expected=f"{len(boxes):,} rows",
                    found=f"{len(sample[name]):,}",
                    fix="repair it; or, if these are not boxes, use --boxes none",
                )


def box_fields(
    schema: Schema,
    images: Sequence[str],
    said: tuple[str, ...] | None,
    source: Source | Stream | None,
    ask: bool,
) -> dict[str, OnImage]:
    """Return the fields of boxes, each with its image and the fields that go with it.

    `said` are the fields named by the user, or None. Raises UsageError for fields that cannot be
    boxes, and, if `ask` is true, for fields of which it is not clear whether they are.
    """
    arrays = {name: kind for name, kind in schema.items() if isinstance(kind, Array)}
    if said is None:
        boxes = tuple(n for n, k in arrays.items() if n == BOXES and _is_sure(k))
        unclear = [n for n, k in arrays.items() if n not in boxes and is_box_name(n) and _may_be(k)]
        if ask and unclear and images:
            raise _unclear(unclear[0], arrays[unclear[0]])
    else:
        boxes = said
        wrong = [n for n in said if n not in arrays or not _may_be(arrays[n])]
        if wrong:
            known = [n for n, k in arrays.items() if _may_be(k)]
            raise UsageError(
                f"{wrong[0]!r} is not a field of boxes",
                expected=near(wrong[0], known) if known else "a dataset with boxes",
                found=str(schema.get(wrong[0], "no such field")),
                fix="boxes are arrays of floats, (n, 4): x0, y0, x1, y1 in pixels",
            )
    if not (boxes and images):
        return {}
    others = _rows_of(boxes, arrays, source)
    return {name: OnImage(image_of(name, images), others[name]) for name in boxes}


def json_boxes(schema: Schema) -> list[str]:
    """Return the JSON fields that are named like boxes, or `objects` as on Hugging Face."""
    names = [name for name, kind in schema.items() if isinstance(kind, Json)]
    return [name for name in names if name == "objects" or is_box_name(name)]


def is_box_name(field: str) -> bool:
    return not _NAMES.isdisjoint(re.split("[^a-z]+", field.lower()))


def _is_sure(kind: Array) -> bool:
    shape = kind.shape or ()
    return kind.dtype in _FLOATS and len(shape) == 2 and shape[1] == 4


def _may_be(kind: Array) -> bool:
    number = kind.dtype is None or np.dtype(kind.dtype).kind in "iuf"
    return number and (kind.shape is None or kind.shape[-1:] in ((4,), (None,)))


def _rows_of(
    boxes: Sequence[str], arrays: Collection[str], source: Source | Stream | None
) -> dict[str, tuple[str, ...]]:
    """Return, for each field of boxes, the arrays that have as many rows, in their order.

    Those of WITH_BOXES belong to the first; for others, a few samples decide.
    """
    found = {
        name: [] if n else [o for o in arrays if o in WITH_BOXES] for n, name in enumerate(boxes)
    }
    left = [n for n in arrays if n not in (*boxes, *WITH_BOXES) and not is_mask_name(n)]
    if not left or source is None:
        return {name: tuple(others) for name, others in found.items()}
    samples = [d.sample for d in some_of(source) if not isinstance(d.sample, SampleError)]
    for other in left:
        for name in boxes:
            pairs = [(s[name], s[other]) for s in samples if name in s and other in s]
            if pairs and any(len(a) for a, _ in pairs) and all(_as_long(*pair) for pair in pairs):
                found[name].append(other)
                break
    return {name: tuple(n for n in arrays if n in others) for name, others in found.items()}


def _as_long(boxes: np.ndarray, other: np.ndarray) -> bool:
    return other.ndim > 0 and len(other) == len(boxes)


def _no_boxes(sample: Sample, field: str) -> SampleError:
    value = sample[field]
    return SampleError(
        "the value is not boxes",
        key=sample["__key__"],
        field=field,
        expected="an array of floats, (n, 4)",
        found=f"{value.dtype} {value.shape}",
        fix="repair it; or, if the field is not boxes, use --boxes none",
    )


def _unclear(name: str, kind: Array) -> UsageError:
    return UsageError(
        f"the field {name!r} may be boxes, which would no longer fit the changed images",
        expected=f"floats of shape (n, 4) with the name {BOXES!r}, or the option --boxes",
        found=repr(kind),
        fix=f"--boxes {name} transforms it as x0, y0, x1, y1 in pixels; --boxes none leaves it"
        " unchanged",
    )
