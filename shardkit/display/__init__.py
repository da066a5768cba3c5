"""How a dataset shows itself: a few lines of text, cards of samples, and a page of HTML.

Names and values come from data: all that is shown goes through `markup.tag`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import printable

if TYPE_CHECKING:
    from shardkit.views import Views

_FIELDS, _CLASSES, _WORDS = 20, 6, 60  # that are shown


def text(dataset: Views) -> str:
    """What a dataset is, a line for each field."""
    lines = [f"<Dataset {about(dataset)}>"]
    lines += [f"  {name}: {kind}" for name, kind in fields(dataset)]
    return "\n".join(map(printable, lines))


def as_html(dataset: Views) -> str:
    """The same, and a few samples, as they are stored, evenly over the dataset."""
    from shardkit.display import sheet  # imports what decodes images

    return sheet.small(dataset, about(dataset), fields(dataset))


def about(dataset: Views) -> str:
    count, whole, shards = len(dataset), len(dataset.whole), dataset.shards
    stored = f"in {shards:,} shard{'s' * (shards != 1)}"
    if dataset.indices is not None:
        stored = f"of {whole:,} {stored}"
    return f"{dataset.place}: {dataset.format}, {count:,} samples {stored}"


def fields(dataset: Views) -> list[tuple[str, str]]:
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


def _short(words: str) -> str:
    return words if len(words) <= _WORDS else words[: _WORDS - 3] + "..."
