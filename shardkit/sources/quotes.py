"""Quotation marks in tables: whether those of a TSV quote its cells, and rows that swallow others.

RFC 4180 defines quotes for CSV. In most TSV files, a quotation mark is a character like any other.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

DELIMITERS = {"csv": ",", "tsv": "\t"}
_MANY = 10  # lines of one CSV cell, each with as many commas as the header: they were rows
_LONGEST = 10_000  # lines of one TSV cell
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


class Quotes(NamedTuple):
    """What the lines of a TSV show: where a cell is quoted first, and where one cannot be."""

    quoted: int | None  # the header, a cell with doubled quotes, or with a tab or line ends
    plain: int | None  # a row of the header's width with a quote that is not closed in its cell
    unclear: int  # cells that begin and end with a quotation mark, which may belong to the text


def quotes_of(lines: Iterable[tuple[int, str]]) -> Quotes:
    """Find out whether the cells of a TSV are quoted; `lines` are all its lines with their places.

    The places, such as numbers or offsets, are those of the result.
    """
    quoted: int | None = None
    plain: int | None = None
    unclear = width = start = 0
    row: list[str] = []  # the lines of a row in which a quote is open
    for place, text in lines:
        line = text.rstrip("\r\n")
        if not width:
            cells = row_of([line]) if any(c[:1] == '"' for c in line.split("\t")) else None
            quoted = place if cells else None
            width = len(cells or line.split("\t")) if line else 0
            continue
        closes = line.count('"') % 2 == 1
        alone = width > 1 and line.count("\t") == width - 1  # with one column, nothing tells
        if row and not closes and (alone or len(row) == _LONGEST):
            row = []  # the line is a row by itself: the quote was none
        if not row:
            marked = [cell for cell in line.split("\t") if cell[:1] == '"'] if '"' in line else []
            if all(map(_QUOTED.fullmatch, marked)):
                if any('""' in cell[1:-1] for cell in marked):
                    quoted = place if quoted is None else quoted
                else:
                    unclear += len(marked)
                continue
            if alone:
                plain = place if plain is None else plain
                continue
            start = place
        row.append(line)
        if closes == (len(row) > 1):  # no quote is open at the end of this line
            if quoted is None and len(row_of(row) or ()) == width:
                quoted = start
            row = []
    return Quotes(quoted, plain, unclear)


def row_of(lines: Sequence[str]) -> list[str] | None:
    """Return the cells of lines that are one row with quoted cells; None if they are not."""
    try:
        rows = list(csv.reader([f"{line}\n" for line in lines], delimiter="\t", strict=True))
    except csv.Error:
        return None
    return rows[0] if len(rows) == 1 else None


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
