"""`shardkit diff`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardkit.cli import print_json, storage_option
from shardkit.cli.help import Command, Example
from shardkit.cli.tables import counted, print_table

if TYPE_CHECKING:
    from shardkit.verification.diff import DiffReport


@click.command(
    "diff",
    cls=Command,
    context_settings={"show_default": True},
    examples=[
        Example("shardkit diff photos shards", "Shards and the images they were made of"),
        Example("shardkit diff shards more --first 100 --json", "For a program"),
    ],
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--first", type=click.IntRange(0), default=10, metavar="N", help="List N of each kind."
)
@storage_option
@click.option("--quiet", is_flag=True, help="Print nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def command(
    a: Path, b: Path, first: int, storage_options: dict[str, str], quiet: bool, as_json: bool
) -> None:
    """Compare the samples of datasets A and B, of any formats, matched by their keys.

    A and B can also be sources of convert, such as a folder of images. Order does not matter.

    Exit codes: 0 equal, 1 different or damaged, 2 invalid command line.
    """
    from shardkit.verification.diff import diff

    report = diff(a, b, first=first, storage_options=storage_options)
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        _show(report, a, b)
    if not report.equal:
        sys.exit(1)


def _show(report: DiffReport, a: Path, b: Path) -> None:
    fields = ", ".join(f"{name} in {count:,}" for name, count in report.fields.most_common())
    rows = [
        ("equal:", counted(report.equal_samples, "sample")),
        ("removed:", f"{counted(report.removed, 'sample')} of A alone"),
        ("added:", f"{counted(report.added, 'sample')} of B alone"),
        ("changed:", counted(report.changed, "sample") + (f": {fields}" if fields else "")),
    ]
    rows += [("classes:", f"{name!r} has other class names") for name in report.classes]
    rows += [("-", key) for key in report.first_removed]
    rows += [("+", key) for key in report.first_added]
    for key, values in report.first_changed.items():
        words = (f"{name}: {before} -> {after}" for name, (before, after) in values.items())
        rows.append(("~", f"{key}: {'; '.join(words)}"))
    title = f"A: {a}, B: {b}: " + ("equal" if report.equal else "different")
    print_table(title, rows)
