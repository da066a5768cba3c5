"""Text files and tables, by their names, and their records with offsets: lines, JSON, rows.

records.py     a file: its lines, JSON objects or rows, or its whole text
encodings.py   decoding, lines, and detection of encodings
blocks.py      the bytes, decompressed
"""

from __future__ import annotations

from typing import NamedTuple

FORMS = {
    "txt": "text",
    "text": "text",
    "md": "text",
    "jsonl": "json",
    "ndjson": "json",
    "json": "json",
    "csv": "csv",
    "tsv": "tsv",
}
TABLES = ("csv", "tsv")  # forms with rows of cells
COMPRESSIONS = ("gz", "zst", "bz2", "xz")


class Name(NamedTuple):
    """A file's name in parts: `corpus.jsonl.gz` is compressed JSON Lines."""

    stem: str  # without the suffixes
    suffix: str  # a key of FORMS
    compression: str  # one of COMPRESSIONS, or "" for none

    @property
    def form(self) -> str:
        """The kind of content: "text", or a table: "json", "csv", "tsv"."""
        return FORMS[self.suffix]


def parse_name(name: str) -> Name | None:
    """Return the parts of a text file's name; None for other files.

    >>> parse_name("part-0.jsonl.gz")
    Name(stem='part-0', suffix='jsonl', compression='gz')
    """
    stem, _, suffix = name.rpartition(".")
    compression = ""
    if suffix.lower() in COMPRESSIONS:
        compression = suffix.lower()
        stem, _, suffix = stem.rpartition(".")
    suffix = suffix.lower()
    return Name(stem, suffix, compression) if stem and suffix in FORMS else None
