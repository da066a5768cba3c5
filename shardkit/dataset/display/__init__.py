"""Display of a dataset: a few lines of text, sample cards in a notebook, and an HTML page.

Names and values are untrusted data: everything in HTML is escaped by `markup.tag`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import printable
from shardkit.schema import holds_keypoints

if TYPE_CHECKING:
    from shardkit.dataset.views import Views

_FIELDS, _CLASSES, _WORDS = 20, 6, 60  # that are shown


def text(dataset: Views) -> str:
    """Return a description of a dataset, with one line per field."""
    lines = [f"<Dataset {about(dataset)}>"]
    lines += [f"  {name}: {kind}" for name, kind in fields(dataset)]
    return "\n".join(map(printable, lines))


def as_html(dataset: Views) -> str:
    """Return the same as HTML, with a few evenly spaced samples, as they are stored."""
    from shardkit.dataset.display import sheet  # imports the image decoders

    return sheet.small(dataset, about(dataset), fields(dataset))


def about(dataset: Views) -> str:
    count, whole, shards = len(dataset), len(dataset.whole), dataset.shards
    stored = f"in {shards:,} shard{'s' * (shards != 1)}"
    if dataset.indices is not None:
        stored = f"of {whole:,} {stored}"
    return f"{dataset.place}: {dataset.format}, {count:,} samples {stored}"


def fields(dataset: Views) -> list[tuple[str, str]]:
    """Return the name of each field, with its type and class names."""
    found = []
    for name, kind in list(dataset.schema.items())[:_FIELDS]:
        words, classes = str(kind), dataset.class_names.get(name)
        if classes is not None:
            some = ", ".join(map(_short, classes[:_CLASSES]))
            what = "keypoints" if holds_keypoints(kind) else "classes"
            words += f", {len(classes):,} {what}: {some}" + ", ..." * (len(classes) > _CLASSES)
        found.append((_short(name), words))
    more = len(dataset.schema) - _FIELDS
    return [*found, ("...", f"{more:,} more fields")] if more > 0 else found


def _short(words: str) -> str:
    return words if len(words) <= _WORDS else words[: _WORDS - 3] + "..."
