"""Split patterns that two regex engines match alike, and the encodings of tiktoken that use them.

`tokenizers` splits text with Oniguruma, tiktoken with Rust's regex crates. Both take the first
alternative that matches, and the patterns below use only character classes, greedy repetition and
one lookahead. So both split alike if they put each character in the same classes, which depends on
the Unicode version of each and is measured, not assumed.

A file of tiktoken's ranks has lines of base64 and a number. It lacks the pattern and the special
tokens, which its name tells.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from dataclasses import dataclass

import numpy as np

from shardkit.errors import UsageError

_SPACES = r"|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
CL100K = (  # Llama 3 too
    _ENDINGS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    + _SPACES
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + _SPACES
)

# The character classes of each pattern; every pattern matches every character somewhere.
_CLASSES = (r"\p{L}", r"\p{N}", r"\s")
_FOLDED = (*_CLASSES, "(?i:[sdmtlvre])")
KNOWN = {
    GPT2: _CLASSES,
    CL100K: _FOLDED,
    QWEN2: _FOLDED,
    O200K: (*_FOLDED, r"\p{Lu}", r"\p{Lt}", r"\p{Lm}", r"\p{Lo}", r"\p{Ll}", r"\p{M}"),
}


def for_tiktoken(pattern: str) -> str:
    """Return an equivalent pattern that takes 0.6 to 0.8 of the time: tiktoken's regex engine tries
    alternatives one by one if one of them has a lookahead, but all at once in a separate group.
    """
    if pattern not in KNOWN:
        return pattern
    return f"(?:{pattern.removesuffix(_SPACES)}){_SPACES}"


# Planes with characters of text. The others are empty or for private use.
_PLANES = (0, 1, 2, 3, 14)
CODES = 0x110000


@functools.lru_cache
def unsafe(pattern: str) -> tuple[tuple[int, int], ...]:
    """Return ranges of code points, ends exclusive, that the two engines may split differently.

    Measured with the installed versions, in about 0.1 s per class.
    """
    marks = np.ones(CODES, bool)
    for plane in _PLANES:
        marks[plane << 16 : (plane + 1) << 16] = False
    for members in KNOWN[pattern]:
        marks[_differing(members)] = True
    edges = np.flatnonzero(np.diff(marks, prepend=False, append=False))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))


def _differing(members: str) -> list[int]:
    text = _every_character()
    ours, theirs = _by_tokenizers(members, text), _by_tiktoken(members, text)
    return [] if ours == theirs else [ord(character) for character in set(ours) ^ set(theirs)]


@functools.lru_cache(maxsize=1)
def _every_character() -> str:
    planes = [np.arange(plane << 16, (plane + 1) << 16, dtype="<u4") for plane in _PLANES]
    codes = np.concatenate(planes)
    return codes[(codes < 0xD800) | (codes >= 0xE000)].tobytes().decode("utf-32-le")


def _by_tokenizers(members: str, text: str) -> str:
    from tokenizers import PreTokenizedString, Regex
    from tokenizers.pre_tokenizers import Split

    pieces = PreTokenizedString(text)
    Split(Regex(f"(?:{members})+"), "removed", invert=True).pre_tokenize(pieces)
    return "".join(piece for piece, _, _ in pieces.get_splits(offset_type="byte"))


def _by_tiktoken(members: str, text: str) -> str:
    from tiktoken import Encoding

    single = {bytes([byte]): byte for byte in range(256)}
    # tiktoken drops text that the pattern does not match.
    encoding = Encoding(
        "one class", pat_str=f"(?:{members})+", mergeable_ranks=single, special_tokens={}
    )
    tokens = encoding.encode_to_numpy(text, disallowed_special=())
    return tokens.astype(np.uint8).tobytes().decode()


# --- tiktoken's encodings ------------------------------------------------------------------------

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
END = "<|endoftext|>"


@dataclass(frozen=True)
class Facts:
    pattern: str
    special: dict[str, int]


def _fim(first: int, end: int) -> dict[str, int]:
    names = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    return {END: end} | {name: first + i for i, name in enumerate(names)}


def _harmony() -> dict[str, int]:
    named = {200002: "return", 200003: "constrain", 200005: "channel", 200006: "start"}
    named |= {200007: "end", 200008: "message", 200012: "call", 200018: "endofprompt"}
    special = {"<|startoftext|>": 199998, END: 199999}
    special |= {f"<|{named.get(i, f'reserved_{i}')}|>": i for i in range(200000, 201088)}
    # The library gives this number two names.
    return special | {"<|reserved_200018|>": 200018}


# As in tiktoken_ext.openai_public, whose patterns are written differently but split the same.
FACTS = {
    "gpt2": Facts(GPT2, {END: 50256}),
    "r50k_base": Facts(GPT2, {END: 50256}),
    "p50k_base": Facts(GPT2, {END: 50256}),
    "p50k_edit": Facts(GPT2, _fim(50281, 50256)),
    "cl100k_base": Facts(CL100K, _fim(100258, 100257) | {"<|endofprompt|>": 100276}),
    "o200k_base": Facts(O200K, {END: 199999, "<|endofprompt|>": 200018}),
    "o200k_harmony": Facts(O200K, _harmony()),
}


def are_ranks(data: bytes) -> bool:
    """Return whether the first line of a file is a line of ranks."""
    return _LINE.match(data) is not None


def read_ranks(data: bytes, path: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    offset = 0
    for line in data.splitlines(keepends=True):
        words = line.split()
        try:
            if words:
                token, number = words
                ranks[base64.b64decode(token, validate=True)] = int(number)
        except (ValueError, binascii.Error):
            raise UsageError(
                "invalid line in a file of tiktoken's ranks",
                path=path,
                offset=offset,
                expected="base64, a space and a number",
                found=repr(line[:60]),
            ) from None
        offset += len(line)
    return ranks


def write_ranks(ranks: dict[bytes, int]) -> bytes:
    lines = (
        base64.b64encode(token) + b" %d\n" % rank
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    return b"".join(lines)
