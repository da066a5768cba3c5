"""`shardkit inspect --html`: a report about a dataset as a single, self-contained HTML page.

It has no scripts and no external resources, and a content security policy that forbids both. All
text from data is escaped by `markup.tag`. The same dataset gives the same page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.display.markup import SHEET, Markup, join, tag
from shardkit.dataset.display.previews import short
from shardkit.dataset.display.sheet import evenly, sheet
from shardkit.dataset.statistics import stats
from shardkit.errors import OutputError, ShardkitError
from shardkit.helpers.words import counted, pixel_rows, size, text_rows
from shardkit.inspection.command import convert_command
from shardkit.inspection.inspect import opened, report_of
from shardkit.inspection.pieces import (
    PAGE,
    ROWS,
    bar,
    histogram,
    histogram_by_powers,
    links,
    soft,
    table,
    tiles,
    warning,
)
from shardkit.metadata.manifest import ERRORS, FILTERED
from shardkit.metadata.recipe import Recipe
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath
from shardkit.version import __version__

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
START = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
READ, READ_BYTES = 2000, 256 << 20  # samples of a dataset, and their bytes, read for counts
# Samples shown: in total, at least for each split, and the bytes read for them.
_CARDS, _FEW_CARDS, _CARD_BYTES = 48, 12, 1 << 30
_REMOTE = 8  # these limits are divided by it at a URL
_SPLITS = 8  # that are shown
_LINES, _LINE_BYTES = 10, 1 << 16  # of a list of samples that were ignored


def html_report(
    path: str | os.PathLike[str] | Dataset,
    *,
    full: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Return an HTML page about a dataset, a shard, a folder of splits, or an open dataset or view.

    path: a path, an open dataset, or a view of one.
    full: read all samples. By default, counts that are not in a manifest are those of 2,000 evenly
        spaced samples (at most 256 MiB; an eighth of both at a URL).
    storage_options: as in `shardkit.open`.

    The page shows some samples, up to 3 MiB for each split, and lists damaged samples. Raises the
    errors of `shardkit.open`.
    """
    source, datasets, warning = opened(path, storage_options)
    most = None if full else READ
    parts = [
        _Part(name, dataset, report_of(dataset, str(source), 0, False, most))
        for name, dataset in datasets.items()
    ]
    return _page(str(source), parts, warning, full=full)


def write_report(html: str, file: Path) -> None:
    """Write the page to a file. An existing file is replaced only if it is a shardkit report.

    Raises OutputError for any other existing file.
    """
    if os.path.lexists(file) and fs.read(file, len(START)).decode("latin-1")[:-1] != START:
        raise OutputError(
            "the file exists and is not a shardkit report",
            path=file,
            fix="give another file name, or remove the file",
        )
    fs.replace_file(file, html.encode())


@dataclass
class _Part:
    """A dataset, or one of its splits, and what `inspect` reports of it."""

    name: str
    dataset: Dataset
    report: dict[str, Any]


def _page(title: str, parts: Sequence[_Part], problem: str | None, *, full: bool = False) -> str:
    """Return the page. `full`: read all samples, not only 2,000 or 256 MiB of them."""
    shown = parts[:_SPLITS]
    body = [_part(part, number, len(shown), full) for number, part in enumerate(shown)]
    if left := parts[_SPLITS:]:
        names = ", ".join(short(part.name, 40) for part in left[:ROWS])
        body.append(soft(f"{counted(len(left), 'split')} not shown: {names}"))
    name = title.rstrip("/").rpartition("/")[2] or title
    head = (
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{name} - dataset"),
        tag("style", Markup(SHEET + PAGE)),
    )
    header = [tag("h1", short(name, 120)), tag("p", title, class_="soft path")]
    header += [warning(problem)] if problem else []
    header.append(tiles(_totals(parts)))
    if len(parts) > 1:
        header.append(links([(f"part{n}", part.name) for n, part in enumerate(shown)], "Splits"))
    footer = tag(
        "footer", f"Made by shardkit {__version__}. This page has no scripts and loads nothing."
    )
    content = join([tag("header", *header), tag("main", *body), footer])
    return f"{START}{join(head)}</head><body>{content}</body></html>\n"


def _totals(parts: Sequence[_Part]) -> dict[str, str]:
    reports = [part.report for part in parts]
    sizes = [report["bytes"] for report in reports]
    made = "shardkit" if all(report["manifest"] for report in reports) else "others"
    return {
        **({"Splits": f"{len(parts):,}"} if len(parts) > 1 else {}),
        "Samples": f"{sum(report['samples'] for report in reports):,}",
        "Shards": f"{sum(report['shards'] for report in reports):,}",
        "Size": "unknown" if None in sizes else size(sum(sizes)),
        "Format": reports[0]["format"],
        "Made by": made,
    }


def _part(part: _Part, number: int, parts: int, full: bool) -> Markup:
    dataset, report = part.dataset, part.report
    most, cards = _bounds(dataset, parts)
    read = range(len(dataset)) if full else evenly(len(dataset), most)
    found = stats(dataset.select(read), quick=True)
    chosen = soft(_chosen(len(read), len(dataset)))
    sections = {
        "Samples": _samples(dataset, cards),
        "Fields": _fields(report),
        "Counts": [chosen, *_damage(found["damaged"]), *_counts(report, found["fields"])],
        "Classes": _classes(report["classes"], found["classes"], chosen),
        "Duplicates": [chosen, *_duplicates(found["duplicates"])],
        "Left out": _left_out(dataset, report),
        "Shards": _shards(dataset),
        "Recipe": _recipe(dataset),
    }
    there = [(f"part{number}-{n}", *item) for n, item in enumerate(sections.items()) if item[1]]
    head: list[object] = []
    if parts > 1:
        facts = f"{counted(report['samples'], 'sample')} in {counted(report['shards'], 'shard')}"
        head = [tag("h2", short(part.name, 120)), soft(facts)]
    head += [soft(f"Stored as {'; '.join(report['conventions'])}")] if report["conventions"] else []
    body = [
        tag("section", tag("h3", name, id=f"{at}-h"), *body, id=at, aria_labelledby=f"{at}-h")
        for at, name, body in there
    ]
    menu = links([(anchor, name) for anchor, name, _ in there], f"Sections {part.name}".strip())
    return tag("article", *head, menu, *body, id=f"part{number}")


def _bounds(dataset: Dataset, parts: int) -> tuple[int, int]:
    """Return how many samples are read for counts, and how many are shown."""
    stored = sum(dataset.extent(shard)[1] for shard in range(dataset.shards))
    each = max(stored // max(len(dataset.whole), 1), 1)
    remote = any(isinstance(path, RemotePath) for path in dataset.paths)
    share = parts * (_REMOTE if remote else 1)
    cards = min(max(_CARDS // share, _FEW_CARDS), max(_CARD_BYTES // each // share, 1))
    return max(min(READ, READ_BYTES // each) // share, cards), cards


def _chosen(read: int, samples: int) -> str:
    if read == samples:
        return f"Counted in all {counted(samples, 'sample')}."
    return (
        f"Counted in {read:,} of {samples:,} samples, evenly spaced, and the same ones each time."
        " Use --full to read all samples."
    )


def _samples(dataset: Dataset, cards: int) -> list[Markup]:
    if not len(dataset):
        return [tag("p", "There are no samples.")]
    few = f"{min(cards, len(dataset)):,} of {counted(len(dataset), 'sample')}"
    evenly_so = ", evenly spaced" if cards < len(dataset) else ""
    return [soft(f"{few}{evenly_so}."), sheet(dataset, cards, pixels=240, words=320)]


def _fields(report: dict[str, Any]) -> list[Markup]:
    rows = []
    for name, about in report["fields"].items():
        options = (f"{n} {about[n]}" for n in ("dtype", "shape") if n in about)
        kind = ", ".join((about["type"], *options, *["optional"] * about["optional"]))
        classes = f"{len(about['class_names']):,}" if about["class_names"] else ""
        known = about["stats"]
        sizes = [size(known[n]) for n in ("bytes", "min", "median", "max")] if known else [""] * 4
        rows.append((name, kind, classes, f"{known['count']:,}" if known else "", *sizes))
    head = ("Field", "Type", "Classes", "Values", "Bytes", "Smallest", "Median", "Largest")
    return [table("Fields", head, rows, 2)]


def _damage(errors: Sequence[ShardkitError]) -> list[Markup]:
    if not errors:
        return []
    rows = [(error.where.get("key", ""), str(error)) for error in errors[:_LINES]]
    return [
        warning(f"{counted(len(errors), 'sample')} of these could not be read completely."),
        table("Damaged samples", ("Sample", "What is wrong"), rows, total=len(errors)),
    ]


def _counts(report: dict[str, Any], fields: dict[str, Any]) -> list[Markup]:
    """Histograms of sizes, shapes and lengths; formats; numbers; pixels; documents."""
    charts: list[Callable[[], Markup]] = []
    rows: list[tuple[str, str]] = []
    for name, about in report["lengths"].items():  # known for all samples
        unit = "milliseconds" if report["fields"][name]["type"] == "Audio" else "length"
        charts.append(partial(histogram_by_powers, f"{name}: {unit}, in all samples", about))
    if report["text"]:
        charts.append(partial(histogram_by_powers, "tokens of all documents", report["text"]))
        rows += text_rows(report["text"])
    for name, about in fields.items():
        told = ("length", "milliseconds") if name in report["lengths"] else ()
        for measure, value in about.items():
            if isinstance(value, dict) and "histogram" in value and measure not in told:
                charts.append(partial(histogram, name, measure, value))
            elif measure in ("formats", "shapes"):
                some = ", ".join(f"{what}: {n:,}" for what, n in list(value.items())[:_LINES])
                more = f" and {len(value) - _LINES:,} more" if len(value) > _LINES else ""
                rows.append((f"{name}: {measure}", some + more))
        if "std" in about:
            numbers = " / ".join(f"{about[n]:.6g}" for n in ("min", "mean", "max", "std"))
            rows.append((name, f"{numbers} (min / mean / max / deviation)"))
    rows += [(f"{field}: {what}", words) for field, what, words in pixel_rows(report["pixels"])]
    shown = (chart() for chart in charts[:ROWS])
    made = [tag("div", *shown, class_="charts")] if charts else []
    if len(charts) > ROWS:
        made.append(soft(f"and {len(charts) - ROWS:,} more histograms"))
    return [*made, *([table("Counts", ("What", "Found"), rows)] if rows else [])]


_Classes = list[dict[str, Any]]


def _classes(known: _Classes | None, found: _Classes | None, chosen: Markup) -> list[Markup]:
    """Return the classes with the most samples."""
    every = sorted((found if known is None else known) or [], key=lambda entry: -entry["samples"])
    if not every:
        return []
    counts = [entry["samples"] for entry in every]
    rows = [
        (
            entry["label"],
            entry["name"] or "",
            f"{entry['samples']:,}",
            bar(entry["samples"] / max(counts[0], 1)),
        )
        for entry in every[:ROWS]
    ]
    classes, median = counted(len(counts), "class"), counts[len(counts) // 2]
    facts = f"{classes}, of {counts[-1]:,} / {median:,} / {counts[0]:,} samples"
    return [
        chosen if known is None else soft("Counted in all samples."),
        tag("p", f"{facts} (min / median / max); {counts.count(0):,} without any."),
        table("Classes", ("Label", "Name", "Samples", "Of the largest"), rows, total=len(every)),
    ]


def _duplicates(found: dict[str, Any]) -> list[Markup]:
    what = ", ".join(short(name, 60) for name in found["compared"]) or "nothing"
    if not found["samples"]:
        return [tag("p", f"None. Compared: {what}.")]
    several = found["groups_of_several_labels"]
    words = (
        f"Copies of an earlier sample: {found['samples']:,}, in {counted(found['groups'], 'group')}"
    )
    words += f", {several:,} of which with several labels. Compared: {what}."
    groups = [", ".join(short(key, 60) for key in keys) for keys in found["first"]]
    rows = [(f"{number}", keys) for number, keys in enumerate(groups, 1)]
    return [tag("p", words), table("Duplicates", ("Group", "Keys"), rows, total=found["groups"])]


def _left_out(dataset: Dataset, report: dict[str, Any]) -> list[Markup]:
    """Return what a conversion dropped and ignored, by reason, and the first lines of each list."""
    counts = {"dropped: bad samples": report["errors"]} if report["errors"] else {}
    counts |= {f"dropped: {what}": count for what, count in report["filtered"].items()}
    counts |= {f"ignored: {what}": count for what, count in report["ignored"].items()}
    if not counts:
        return [tag("p", "None known.")]
    rows = [(what, f"{count:,}") for what, count in counts.items()]
    body = [table("Left out", ("What, and why", "Count"), rows, 1)]
    for name, total in ((ERRORS, report["errors"]), (FILTERED, sum(report["filtered"].values()))):
        if lines := _lines(dataset, name):
            head = ("Sample", "Why", "Found")
            body += [tag("p", f"From {name}:"), table(name, head, lines, total=total)]
    return body


def _lines(dataset: Dataset, name: str) -> list[tuple[object, ...]]:
    """Return the first lines of a list beside the manifest."""
    file = dataset.manifest.list_named(name) if dataset.manifest is not None else None
    if file is None:
        return []
    try:
        data = fs.read(dataset.path / file.name, _LINE_BYTES)
        lines = [json.loads(line) for line in data.split(b"\n")[:-1][:_LINES]]
        names = (("key", "source"), ("reason", "what"), ("found", "found"))
        return [tuple(line.get(a) or line.get(b, "") for a, b in names) for line in lines]
    except (ShardkitError, ValueError, AttributeError, RecursionError) as error:
        return [("", f"the list cannot be read: {error}", "")]


def _shards(dataset: Dataset) -> list[Markup]:
    rows = []
    for shard in range(min(dataset.shards, ROWS)):
        samples, stored = dataset.extent(shard)
        rows.append((dataset.shard_name(shard), f"{samples:,}", size(stored)))
    return [table("Shards", ("Shard", "Samples", "Bytes"), rows, 1, dataset.shards)]


def _recipe(dataset: Dataset) -> list[Markup]:
    manifest = dataset.manifest
    if manifest is None or not manifest.recipe:
        return [tag("p", "Unknown, as no manifest contains it.")]
    try:
        command = convert_command(Recipe.from_json(dict(manifest.recipe)))
    except ShardkitError as error:
        return [tag("p", str(error), class_="sk-bad")]
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return [
        soft("SOURCE, OUT and FILE stand for paths, which a manifest does not contain."),
        tag("pre", tag("code", join(command.split("\n"), "\n")), tabindex=0),
        soft(f"Made with {versions}") if versions else join(()),
    ]
