"""How a dataset shows itself: a few lines of text, or HTML with some samples for a notebook.

Names and values come from data, so all of them are escaped; images are decoded, made small and
encoded again.
"""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.codecs.image import NotAnImageError, probe
from shardkit.codecs.pixels import encode, to_rgb
from shardkit.errors import ShardkitError, printable
from shardkit.formats.base import KEY
from shardkit.schema import FieldType, Image, Images, images_in

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.views import Views

_FIELDS, _CLASSES, _SAMPLES = 20, 6, 5  # that are shown
_IMAGES = 2  # of a value, and fields whose images are decoded
_WORDS = 60  # characters of a value
_PIXELS = 96  # of the longer side of an image
_MOST = 1 << 26  # pixels of an image that is decoded for it
_ROW = '<tr style="text-align:left;vertical-align:top">'


def text(dataset: Views) -> str:
    """What a dataset is, a line for each field."""
    lines = [f"<Dataset {_about(dataset)}>"]
    lines += [f"  {name}: {kind}" for name, kind in _fields(dataset)]
    return "\n".join(map(printable, lines))


def as_html(dataset: Views) -> str:
    """The same, and a few samples, as they are stored, evenly over the dataset."""
    fields = "".join(
        f"{_ROW}{_cell(n)}<td>{_escaped(kind)}</td></tr>" for n, kind in _fields(dataset)
    )
    names = [KEY, *list(dataset.schema)[:_FIELDS]]
    head = "".join(_cell(name, "th") for name in names)
    count = min(len(dataset), _SAMPLES)
    rows = [_sample(dataset, number * len(dataset) // count, names) for number in range(count)]
    return (
        f"<p><b>Dataset</b> {_escaped(_about(dataset))}</p>"
        f"<table>{fields}</table><table>{_ROW}{head}</tr>{''.join(rows)}</table>"
    )


def _about(dataset: Views) -> str:
    count, whole, shards = len(dataset), len(dataset.whole), dataset.shards
    stored = f"in {shards:,} shard{'s' * (shards != 1)}"
    if dataset.indices is not None:
        stored = f"of {whole:,} {stored}"
    return f"{dataset.place}: {dataset.format}, {count:,} samples {stored}"


def _fields(dataset: Views) -> list[tuple[str, str]]:
    """Each field with its type and the names of its classes."""
    found = []
    for name, kind in list(dataset.schema.items())[:_FIELDS]:
        words, classes = str(kind), dataset.class_names.get(name)
        if classes is not None:
            some = ", ".join(map(_short, classes[:_CLASSES]))
            words += f", {len(classes):,} classes: {some}" + ", ..." * (len(classes) > _CLASSES)
        found.append((_short(name), words))
    more = len(dataset.schema) - _FIELDS
    return [*found, ("...", f"{more:,} more fields")] if more > 0 else found


def _sample(dataset: Views, number: int, names: list[str]) -> str:
    try:
        sample = dataset.read(number, names)
    except ShardkitError as error:
        return f"{_ROW}{_cell(error.where.get('key', number))}{_cell(error.what)}</tr>"
    cells = []
    images = [n for n in names if isinstance(dataset.schema.get(n), Image | Images)][:_IMAGES]
    for name in names:
        classes, value = dataset.class_names.get(name, ()), sample.get(name)
        if isinstance(value, int) and 0 <= value < len(classes):
            value = f"{value} ({classes[value]})"
        kind = dataset.schema.get(name) if name in images else None
        cells.append("<td></td>" if value is None else _value(kind, value))
    return f"{_ROW}{''.join(cells)}</tr>"


def _value(kind: FieldType | None, value: Any) -> str:
    if kind is not None and (images := images_in(kind, value)):
        return f"<td>{''.join(map(_thumbnail, images[:_IMAGES]))}</td>"
    if isinstance(value, bytes):
        return _cell(f"{len(value):,} bytes")
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return _cell(f"{len(value):,} images")
    if isinstance(value, np.ndarray):
        pixels = value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3 and value.size
        return f"<td>{_small(value)}</td>" if pixels else _cell(f"{value.dtype} {value.shape}")
    return _cell(value)


def _thumbnail(image: bytes) -> str:
    try:
        info = probe(image)
        if info.width * info.height > _MOST:
            return _escaped(f"{info.format} {info.width} x {info.height}")
        return _small(to_rgb(image))
    except NotAnImageError as error:
        return _escaped(f"no image: {error}")


def _small(pixels: npt.NDArray[np.uint8]) -> str:
    import PIL.Image

    image = PIL.Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((_PIXELS, _PIXELS))
    data = base64.b64encode(encode(np.array(image), "jpeg", quality=80)).decode()
    return f'<img src="data:image/jpeg;base64,{data}">'


def _cell(value: Any, tag: str = "td") -> str:
    return f"<{tag}>{_escaped(_short(value))}</{tag}>"


def _short(value: Any) -> str:
    words = str(value)
    return words if len(words) <= _WORDS else words[: _WORDS - 3] + "..."


def _escaped(words: str) -> str:
    return html.escape(printable(words))
