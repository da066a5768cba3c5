"""`shardkit inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardkit.cli import print_json, say, storage_option
from shardkit.cli.help import Command, Example
from shardkit.cli.tables import (
    counted,
    measure_rows,
    pixel_rows,
    print_classes,
    print_table,
    size,
    spread,
    tally,
    text_rows,
)
from shardkit.helpers.checked import checked
from shardkit.metadata.manifest import FieldStats

_BAR = 40  # characters of the longest bar


@click.command(
    "inspect",
    cls=Command,
    context_settings={"show_default": True},
    examples=[
        Example("shardkit inspect shards", "Counts, fields, classes, first samples"),
        Example("shardkit inspect shards --html report.html", "A page with images and histograms"),
    ],
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--samples", default=3, metavar="N", help="Number of samples to show.")
@click.option(
    "--full",
    is_flag=True,
    help="Read every sample, to include formats, sizes and lengths of images, audio and video.",
)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write an HTML page with samples, histograms and all details, instead of printing.",
)
@storage_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    path: Path,
    samples: int,
    full: bool,
    page: Path | None,
    storage_options: dict[str, str],
    as_json: bool,
) -> None:
    """Describe PATH: a dataset or a shard, made by shardkit or another tool."""
    if page is not None:
        from shardkit.inspection.report import html_report, write_report

        if as_json:
            raise click.UsageError("--html writes a page, and --json prints: choose one")
        write_report(html_report(path, full=full, storage_options=storage_options), page)
        print_table(str(page), [("size", size(page.stat().st_size))])
        return
    from shardkit.inspection.inspect import inspect

    report = inspect(path, samples=samples, full=full, storage_options=storage_options)
    if as_json:
        print_json(report)
    elif "splits" in report:
        for split in report["splits"].values():
            _show(split)
    else:
        _show(report)
    if report["incomplete"] and not as_json:
        say(f"warning: {report['incomplete']}")


def _show(report: dict[str, Any]) -> None:
    rows = [
        ("format", report["format"] + ("" if report["manifest"] else ", made by another tool")),
        ("samples", f"{report['samples']:,} in {counted(report['shards'], 'shard')}"),
        ("bytes", size(report["bytes"])),
    ]
    if report["conventions"]:
        rows.append(("stored as", "; ".join(report["conventions"])))
    if report["errors"]:
        rows.append(("dropped", f"{report['errors']:,} bad samples, listed in errors.jsonl"))
    if report["ignored"]:
        rows.append(("ignored", tally(report["ignored"])))
    if report["filtered"]:
        rows.append(("filtered", f"{tally(report['filtered'])}; listed in filtered.jsonl"))
    print_table(str(report["path"]), rows)
    if report["tokenizer"]:
        rows = list(report["tokenizer"].items())
        print_table("Tokenizer", [(name, str(value)) for name, value in rows if value is not None])
    print_table("Fields", [_field_row(*item) for item in report["fields"].items()])
    if report["text"]:
        print_table("Documents", text_rows(report["text"]))
        _show_lengths("tokens of a document", report["text"])
    for name, about in report["lengths"].items():
        audio = report["fields"][name]["type"] == "Audio"
        _show_lengths(f"{'milliseconds' if audio else 'length'} of {name!r}", about)
    if report["classes"]:
        print_classes(report["classes"])
    if report["pixels"]:
        print_table("Pixels", pixel_rows(report["pixels"]))
    if report["media"]:
        media = [row for item in report["media"].items() for row in measure_rows(*item)]
        print_table("Images, audio and video", media)
    if report["first"]:
        print_table("First samples", [_sample_row(sample) for sample in report["first"]])


def _show_lengths(what: str, about: dict[str, Any]) -> None:
    """Print a histogram with a row per power of two."""
    most = max([1, *about["histogram"].values()])
    rows = [
        (_span(int(start)), f"{count:,}", "#" * -(-_BAR * count // most))
        for start, count in about["histogram"].items()
    ]
    print_table(f"Histogram: {what}", rows)


def _span(start: int) -> str:
    return f"{start:,}" if start < 2 else f"{start:,} to {2 * start - 1:,}"


def _field_row(name: str, about: dict[str, Any]) -> tuple[str, ...]:
    kind = ", ".join(
        [about["type"], *(f"{k} {v}" for k, v in about.items() if k in ("dtype", "shape"))]
    )
    if about["class_names"] is not None:
        what = "keypoint" if "f" in about.get("dtype", "") else "class"
        kind += f", {counted(len(about['class_names']), what)}"
    if about["optional"]:
        kind += f", {counted(about['stats']['count'], 'value')}" if about["stats"] else ", optional"
    if not about["stats"]:
        return name, kind, ""
    stats = checked(FieldStats, about["stats"])
    if stats.min == stats.max:
        return name, kind, f"{size(stats.max)} each"
    return name, kind, f"{size(stats.bytes)}; {spread(stats)}"


def _sample_row(sample: dict[str, Any]) -> tuple[str, ...]:
    fields = ", ".join(f"{name}: {value}" for name, value in sample.items() if name != "__key__")
    return sample["__key__"], fields
