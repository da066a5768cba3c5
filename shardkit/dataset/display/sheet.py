"""Cards of evenly spaced samples of a dataset, for the HTML page and, smaller, for notebooks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from shardkit.dataset.display.markup import SHEET, Markup, join, tag
from shardkit.dataset.display.previews import Previews, describe, short
from shardkit.errors import ShardkitError
from shardkit.formats.base import KEY
from shardkit.helpers.prefetch import in_threads
from shardkit.helpers.words import counted
from shardkit.schema import Encoded, Images

if TYPE_CHECKING:
    from shardkit.dataset.views import Views

_MEDIA, _FIELDS = 3, 12  # fields shown of a sample: as images, and in total
_OPEN = 24  # cards shown at first (half as many, if they are wide); the others are folded
_NARROW = 4  # fields that fit into a narrow card
_KEY = 120  # characters
_SMALL = 5  # samples in a notebook
_BYTES = 3 << 20  # of all cards
_THREADS = 4  # each may decode an image of 200 MB


def evenly(total: int, count: int) -> list[int]:
    """Return the numbers of `count` evenly spaced samples, or of all if there are fewer."""
    count = min(total, count)
    return [number * total // count for number in range(count)]


def small(dataset: Views, about: str, fields: list[tuple[str, str]]) -> str:
    """For a notebook: a description of a dataset, and a few of its samples."""
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", kind)) for name, kind in fields]
    return tag(
        "div",
        tag("style", Markup(SHEET)),
        tag("p", tag("b", "Dataset"), " ", about),
        tag("table", *rows),
        sheet(dataset, _SMALL, pixels=128, words=120),
        class_="sk",
    )


def sheet(dataset: Views, count: int, *, pixels: int, words: int) -> Markup:
    """Cards of `count` samples. After 3 MiB the rest is omitted, with a note of how many."""
    dataset, threads = dataset.side_by_side()
    card = functools.partial(_card, Previews(dataset, pixels, words))
    numbers, made, size = evenly(len(dataset), count), [], 0
    for markup in in_threads(card, numbers, min(threads, _THREADS), 2):
        size += len(markup)
        if size > _BYTES:
            break
        made.append(markup)
    left = len(numbers) - len(made)
    note = f"{counted(left, 'sample')} not shown, to limit the size of the page" if left else ""
    media = any(isinstance(kind, Encoded | Images) for kind in dataset.schema.values())
    narrow = media and len(dataset.schema) <= _NARROW
    kind = "sk-sheet" if narrow else "sk-sheet sk-wide"
    first = _OPEN if narrow else _OPEN // 2
    shown = [tag("div", *made[:first], class_=kind)]
    if rest := made[first:]:
        what = tag("summary", counted(len(rest), "more sample"))
        shown.append(tag("details", what, tag("div", *rest, class_=kind)))
    return join([*shown, *([tag("p", note)] if left else [])])


def _card(previews: Previews, number: int) -> Markup:
    """Return the card of a sample: images, key, class, and the other fields."""
    dataset = previews.dataset
    names = list(dataset.schema)[:_FIELDS]
    try:
        sample = dataset.read(number, names)
    except ShardkitError as error:
        key = short(error.where.get("key", f"number {number:,}"), _KEY)
        return _figure([], key, [tag("p", error.what, class_="sk-bad")])
    key = short(sample[KEY], _KEY)
    named = {name: sample[name] for name in names if name in sample}
    media = [name for name in named if previews.is_media(name, named[name])]
    shown = [previews.show(name, named[name], key) for name in media[:_MEDIA]]
    title = next((n for n in dataset.class_names if isinstance(named.get(n), int)), None)
    head = [] if title is None else [tag("strong", previews.show(title, named[title], key))]
    rows: list[Markup] = []
    for name, value in named.items():
        if name not in (*media[:_MEDIA], title):
            about = describe(dataset, name, value) if name in media else None
            rows.append(_row(name, about or previews.show(name, value, key)))
    if (left := len(dataset.schema) - len(names)) > 0:
        rows.append(_row("...", counted(left, "more field")))
    return _figure(shown, key, [*head, *([tag("dl", *rows)] if rows else [])])


def _row(name: str, shown: object) -> Markup:
    return tag("div", tag("dt", short(name, 60)), " ", tag("dd", shown))


def _figure(shown: list[Markup], key: str, rest: list[Markup]) -> Markup:
    caption = tag("figcaption", tag("code", key, dir="auto"), *rest)
    return tag("figure", *shown, caption, class_="sk-sample")
