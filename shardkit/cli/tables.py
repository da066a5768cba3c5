"""Prints tables and text."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shardkit.errors import printable
from shardkit.helpers.words import counted, pixel_rows, size, tally, text_rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardkit.metadata.manifest import FieldStats

__all__ = ["console", "counted", "measure_rows", "pixel_rows", "print_classes", "print_numbers"]
__all__ += ["print_table", "print_text", "size", "spread", "tally", "text_rows"]

_CLASSES = 20  # maximum number to print; --json has all
_MEASURES = (
    *("width", "height", "bytes", "milliseconds", "sampling_rate", "channels", "frames"),
    *("characters", "length"),
)


def console(*, stderr: bool = False) -> Console:
    """Return the console to print to; without a terminal, it prints wide plain text."""
    from rich.console import Console

    plain = Console(stderr=stderr, highlight=False)
    return plain if plain.is_terminal else Console(stderr=stderr, highlight=False, width=200)


def print_table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns under a title."""
    cells = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*cells, fillvalue="")]
    if _is_simple(cells, widths):
        click.secho(printable(title), bold=True)
        for row in cells:
            first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            click.echo(" " + "  ".join([click.style(first, fg="cyan"), *others]).rstrip())
        return
    from rich.table import Table  # importing rich takes an eighth of a short command's time

    _print(title, Table(box=None, show_header=False), rows)


def _is_simple(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> bool:
    """Return whether it takes no rich to print a table: all letters are ASCII, and they fit."""
    plain = sys.stdout is None or not sys.stdout.isatty()
    width = 200 if plain else shutil.get_terminal_size().columns
    asks = {"NO_COLOR", "FORCE_COLOR"} & os.environ.keys() or os.environ.get("TERM") == "dumb"
    fits = sum(widths) + 2 * len(widths) <= width
    return fits and not asks and all(cell.isascii() for row in cells for cell in row)


def print_classes(classes: Sequence[Mapping[str, Any]]) -> None:
    """Print the first classes with their numbers of samples, and weights if there are any."""
    rows = []
    for entry in classes[:_CLASSES]:
        weight = "" if entry.get("weight") is None else f"weight {entry['weight']:.4g}"
        rows.append((str(entry["label"]), entry["name"] or "", f"{entry['samples']:,}", weight))
    if left := len(classes) - len(rows):
        rows.append(("", f"and {left:,} more (--json lists all)", "", ""))
    print_table(f"Classes: {len(classes):,}", rows)


def print_numbers(title: str, header: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of two names and right-aligned numbers, under a header and a title."""
    from rich.table import Table

    table = Table(box=None)
    for number, name in enumerate(header):
        counts = number >= 2
        table.add_column(name, justify="right" if counts else "left", no_wrap=counts)
    _print(title, table, rows)


def _print(title: str, table: Table, rows: Sequence[tuple[str, ...]]) -> None:
    """Print cells as plain text, not as markup, with control characters escaped."""
    from rich.text import Text

    for row in rows:
        cells = map(printable, row)
        table.add_row(*(Text(cell, style="cyan" if n == 0 else "") for n, cell in enumerate(cells)))
    out = console()
    out.print(Text(printable(title), style="bold"), soft_wrap=True)
    out.print(table)


def print_text(text: str) -> None:
    """Print lines of data, with all control characters except tabs escaped."""
    for line in text.split("\n"):
        click.echo("\t".join(map(printable, line.split("\t"))))


def spread(stats: FieldStats) -> str:
    """Smallest, median and largest size."""
    return f"{size(stats.min)} / {size(stats.median)} / {size(stats.max)} (min / median / max)"


def measure_rows(field: str, about: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a table for the statistics of a field, as `Dataset.stats` reports them."""
    rows: list[tuple[str, ...]] = []
    for format, count in about.get("formats", {}).items():
        rows.append((field, format, f"{count:,}"))
    for measure in _MEASURES:
        if measure in about:
            found = about[measure]
            words = (
                f"{found['min']:,} / {found['median']:,} / {found['mean']:,.1f} / {found['max']:,}"
            )
            rows.append((field, measure, f"{words} (min / median / mean / max)"))
    if found := about.get("true"):
        share = found["mean"] / max(about["length"]["mean"], 1e-9)
        rows.append((field, "true", f"{share:.2%} of all values"))
    if found := about.get("milliseconds"):
        rows.append((field, "total", f"{found['mean'] * found['count'] / 3_600_000:,.2f} hours"))
        if unknown := about["values"] - found["count"]:
            rows.append((field, "unknown duration", f"{unknown:,}"))
    if about.get("damaged"):
        rows.append((field, "damaged", f"{about['damaged']:,}"))
    if "std" in about:
        words = " / ".join(f"{about[name]:.6g}" for name in ("min", "mean", "max", "std"))
        rows.append((field, "", f"{words} (min / mean / max / deviation)"))
    return rows
