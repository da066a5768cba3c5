"""Files of tiktoken's ranks, with lines of base64 and a number, and the facts that they lack."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from shardkit.codecs.tokenizers.patterns import CL100K, GPT2, O200K
from shardkit.errors import UsageError

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
    """Whether the first line of a file is a line of ranks."""
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
