"""Numbers and tables as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardkit.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardkit.manifest import FieldStats


def console(*, stderr: bool = False) -> Console:
    """The console to print to; without a terminal, wide plain text."""
    from rich.console import Console

    plain = Console(stderr=stderr, highlight=False)
    return plain if plain.is_terminal else Console(stderr=stderr, highlight=False, width=200)


def print_table(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    """Rows in columns under a title."""
    from rich.table import Table

    _print(title, Table(box=None, show_header=False), rows)


def print_numbers(title: str, header: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Rows of two names and right-aligned numbers, under a header and a title."""
    from rich.table import Table

    table = Table(box=None)
    for number, name in enumerate(header):
        counts = number >= 2
        table.add_column(name, justify="right" if counts else "left", no_wrap=counts)
    _print(title, table, rows)


def _print(title: str, table: Table, rows: Sequence[tuple[str, ...]]) -> None:
    """Print cells as they are, not as markup, with control characters escaped."""
    from rich.text import Text

    for row in rows:
        cells = map(printable, row)
        table.add_row(*(Text(cell, style="cyan" if n == 0 else "") for n, cell in enumerate(cells)))
    out = console()
    out.print(Text(printable(title), style="bold"), soft_wrap=True)
    out.print(table)


def size(count: int) -> str:
    """Bytes as text.

    >>> size(999), size(27_490), size(999_600)
    ('999 B', '27.5 kB', '1 MB')
    """
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}" if unit != "B" else f"{count} B"
        number /= 1000
    return f"{number:,.3g} TB"


def spread(stats: FieldStats) -> str:
    """Smallest, median and largest size."""
    return f"{size(stats.min)} / {size(stats.median)} / {size(stats.max)} (min / median / max)"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(2, "class")
    '2 classes'
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def tally(counts: dict[str, int]) -> str:
    """Counts as text: "3 rotated, 1 cmyk"."""
    words = (f"{count:,} {what}" for what, count in counts.items())
    return ", ".join(re.sub("^1 (value|sample|field)s ", r"1 \1 ", text) for text in words)


def text_rows(about: dict[str, Any], seconds: float = 0) -> list[tuple[str, str]]:
    """Rows on documents and their tokens; with the speed, if it took `seconds`."""
    tokens = about["tokens"]
    lengths = " / ".join(f"{about[name]:,}" for name in ("shortest", "median", "longest"))
    made = f"{tokens:,}; {about['bytes'] / max(tokens, 1):.2f} bytes of text in each"
    if seconds:
        made += f"; {tokens / seconds:,.0f}/s"
    stored = tokens - about["dropped"] + about["padding"]
    rest = {
        "padding": f"{about['padding']:,} tokens, {about['padding'] / max(stored, 1):.2%} of all",
        "dropped": f"{about['dropped']:,} tokens, {about['dropped'] / max(tokens, 1):.2%} of all",
        "cut": f"{counted(about['cut'], 'document')} in more than one block",
    }
    return [
        ("documents", f"{about['documents']:,}; {lengths} tokens (min / median / max)"),
        ("all tokens", made),
        *((name, words) for name, words in rest.items() if about[name]),
    ]


def pixel_rows(about: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows on the pixels of each field of images."""
    return [
        (field, name, ", ".join(f"{value:.4f}" for value in pixels[name]) + " (red, green, blue)")
        for field, pixels in about.items()
        for name in ("mean", "std")
    ]
