"""Numbers as text, for tables; sizes from text."""

from __future__ import annotations

import re
import signal
from typing import Any

from shardkit.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def size(count: int) -> str:
    """Format a number of bytes.

    >>> size(999), size(27_490), size(999_600)
    ('999 B', '27.5 kB', '1 MB')
    """
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.3g} {unit}" if unit != "B" else f"{count} B"
        number /= 1000
    return f"{number:,.3g} TB"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> counted(2, "class")
    '2 classes'
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def ended(code: int) -> str:
    """Say how a process ended, from its exit code, which is negative after a signal.

    >>> ended(3), ended(-9)
    ('ended with code 3', 'was killed by SIGKILL')
    """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def tally(counts: dict[str, int]) -> str:
    """Format counts: "3 rotated, 1 cmyk"."""
    words = (f"{count:,} {what}" for what, count in counts.items())
    return ", ".join(re.sub("^1 (value|sample|field)s ", r"1 \1 ", text) for text in words)


def text_rows(about: dict[str, Any], seconds: float = 0) -> list[tuple[str, str]]:
    """Return rows about documents and their tokens, with the speed if `seconds` is given."""
    tokens = about["tokens"]
    lengths = " / ".join(f"{about[name]:,}" for name in ("shortest", "median", "longest"))
    made = f"{tokens:,}; {about['bytes'] / max(tokens, 1):.2f} bytes of text in each"
    if seconds:
        made += f"; {tokens / seconds:,.0f}/s"
    stored, learned = tokens - about["dropped"] + about["padding"], about.get("learned", 0)
    rest = {
        "learned": f"{learned:,} tokens, {learned / max(tokens, 1):.2%} of all",
        "padding": f"{about['padding']:,} tokens, {about['padding'] / max(stored, 1):.2%} of all",
        "dropped": f"{about['dropped']:,} tokens, {about['dropped'] / max(tokens, 1):.2%} of all",
        "cut": f"{counted(about['cut'], 'document')} in more than one block",
        "too long": f"{counted(about.get('too long', 0), 'conversation')} for a block; the longest "
        f"has {about.get('longest too long', 0):,} tokens",
    }
    return [
        ("documents", f"{about['documents']:,}; {lengths} tokens (min / median / max)"),
        ("all tokens", made),
        *((name, words) for name, words in rest.items() if about.get(name)),
    ]


def pixel_rows(about: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return rows about the pixels of each image field."""
    return [
        (field, name, ", ".join(f"{value:.4f}" for value in pixels[name]) + " (red, green, blue)")
        for field, pixels in about.items()
        for name in ("mean", "std")
    ]


def parse_size(text: int | str) -> int:
    """Parse a size in bytes from a number or text: "256MB" is 256 * 10^6, "256MiB" 256 * 2^20.

    >>> parse_size("1.5kB")
    1500
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise UsageError("invalid size", found=repr(text), expected="such as 256MB or 1GiB")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)
