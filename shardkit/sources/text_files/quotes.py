"""Quotation marks in tables: whether those of a TSV quote its cells, and rows that swallow others.

RFC 4180 defines quotes for CSV. In most TSV files, a quotation mark is a character like any other.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from typing import Any

DELIMITERS = {"csv": ",", "tsv": "\t"}
_MANY = 10  # lines of one CSV cell, each with as many commas as the header: they were rows
_LONGEST = 10_000  # lines of one TSV cell
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def cells_are_quoted(lines: Iterable[str]) -> bool:
    """Whether all lines of a TSV show that its cells are quoted.

    The header is, or a quoted cell has doubled quotes, a tab, or line ends.
    """
    width = 0
    row: list[str] = []  # the lines of a row in which a quote is open
    for text in lines:
        line = text.rstrip("\r\n")
        if not width:
            if any(cell[:1] == '"' for cell in line.split("\t")) and _row_of([line]):
                return True
            width = len(line.split("\t")) if line else 0
            continue
        closes = line.count('"') % 2 == 1
        alone = width > 1 and line.count("\t") == width - 1  # with one column, nothing tells
        if row and not closes and (alone or len(row) == _LONGEST):
            row = []  # the line is a row by itself: the quote was none
        if not row:
            marked = [cell for cell in line.split("\t") if cell[:1] == '"'] if '"' in line else []
            if all(map(_QUOTED.fullmatch, marked)):
                if any('""' in cell[1:-1] for cell in marked):
                    return True
                continue
            if alone:
                continue
        row.append(line)
        if closes == (len(row) > 1):  # no quote is open at the end of this line
            if len(_row_of(row)) == width:
                return True
            row = []
    return False


def _row_of(lines: Sequence[str]) -> list[str]:
    """Return the cells of lines that are one row with quoted cells; [] if they are not."""
    try:
        rows = list(csv.reader([f"{line}\n" for line in lines], delimiter="\t", strict=True))
    except csv.Error:
        return []
    return rows[0] if len(rows) == 1 else []


def dialect(form: str, *, quoted: bool) -> dict[str, Any]:
    """Return the arguments of `csv.reader` for a table."""
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    return {"delimiter": DELIMITERS[form], "quoting": quoting, "strict": True}


def swallowed(lines: Sequence[str], form: str, width: int) -> bool:
    """Whether a row of a table, over several lines, has a cell that holds what were rows.

    In a TSV, a line inside the cell with as many tabs as the header shows it. Commas are frequent
    in text: in a CSV, all of many lines must have as many as the header.
    """
    inside, separator = lines[1:-1], DELIMITERS[form]
    if width < 2 or (form == "csv" and len(lines) < _MANY):
        return False
    alike = (line.count(separator) == width - 1 for line in inside)
    return bool(inside) and (any(alike) if form == "tsv" else all(alike))
