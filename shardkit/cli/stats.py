"""`shardkit stats`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shardkit.cli import print_json, storage_option
from shardkit.cli.help import Command, Example
from shardkit.cli.tables import counted, measure_rows, pixel_rows, print_classes, print_table


@click.command(
    "stats",
    cls=Command,
    examples=[
        Example("shardkit stats shards", "All counts"),
        Example("shardkit stats shards --json > stats.json", "For a program"),
    ],
)
@click.argument("path", type=click.Path(path_type=Path))
@storage_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: Path, storage_options: dict[str, str], as_json: bool) -> None:
    """Compute the statistics of the dataset at PATH that training needs; reads every sample.

    Mean and standard deviation of all pixels, class counts and weights, distributions of sizes,
    lengths and numbers, and duplicates.
    """
    from shardkit.cli.progress import shown
    from shardkit.dataset.find import open_splits
    from shardkit.storage import fs

    with fs.using(storage_options, path):
        splits = open_splits(fs.source(path))
    with shown(not sys.stderr.isatty()) as progress:
        reports = {name: one.stats(progress=progress) for name, one in splits.items()}
    if as_json:
        print_json(reports[""] if list(reports) == [""] else {"splits": reports})
        return
    for name, report in reports.items():
        _show(f"{path}: {name}" if name else str(path), report)


def _show(title: str, report: dict[str, Any]) -> None:
    rows: list[tuple[str, ...]] = [("samples", "", f"{report['samples']:,}")]
    for field, about in report["fields"].items():
        rows += measure_rows(field, about)
    pixels = {n: f["pixels"] for n, f in report["fields"].items() if "pixels" in f}
    print_table(title, rows + pixel_rows(pixels))
    if report["classes"]:
        print_classes(report["classes"])
    print_table("Duplicates", _duplicate_rows(report["duplicates"]))


def _duplicate_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    compared = ", ".join(found["compared"])
    if not found["samples"]:
        return [("samples", f"none (compared: {compared})")]
    groups = counted(found["groups"], "group")
    rows: list[tuple[str, ...]] = [
        ("samples", f"{found['samples']:,} in {groups} (compared: {compared})")
    ]
    if found["groups_of_several_labels"]:
        rows.append(("labels", f"{found['groups_of_several_labels']:,} groups have several"))
    return rows + [("same", ", ".join(keys)) for keys in found["first"]]
