"""Prove that tiktoken's engine gives the same ids as a byte-level BPE of `tokenizers`.

Both split a text into pieces and merge neighbouring tokens inside a piece, the best pair first and
the leftmost of equal pairs. `tokenizers` takes the pair listed first in its merges; tiktoken takes
the pair whose joined bytes are the token with the lowest id, whether or not that pair is listed.
Both give the same result if, for every token that a merge makes, merging its bytes by lower ids
alone ends in two parts that are listed as a merge, and if these merges are in the order of the ids.
Proof: as nothing has been merged yet across the outer ends of two neighbours, the merges inside
are those of their bytes alone. So, by induction, a pair that joins to a token is the pair in which
those bytes alone end: the one that was checked, the same and equally ordered in both engines.

In tokenizer.json a character stands for each byte, so that tokens are strings; they remain strings
here until they are passed to tiktoken.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardkit.codecs.tokenizers.patterns import GPT2, KNOWN

Json = dict[str, Any]

_OF_OTHER_MODELS = (
    *("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"),
)


class UnprovenError(Exception):
    """Why tiktoken's engine might give different ids: a clause that could follow "because"."""


@dataclass(frozen=True)
class Settings:
    """The steps before merging."""

    pattern: str
    nfc: bool
    added: dict[str, int]  # tokens that are searched for before the text is split


def settings(document: Json, special_tokens: str) -> Settings:
    """Read a tokenizer.json as written by the installed `tokenizers`, with all options explicit."""
    model, normalizer, tokens = (document[k] for k in ("model", "normalizer", "added_tokens"))
    if model["type"] != "BPE" or any(map(model.get, _OF_OTHER_MODELS)):
        raise UnprovenError(f"its model is {model['type']}, or has options of another one")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise UnprovenError(f"the normalizer is {normalizer['type']}")
    nfc = normalizer is not None
    _check_added(tokens, nfc)
    text = special_tokens == "text"
    added = {t["content"]: t["id"] for t in tokens if not (text and t["special"])}
    return Settings(_pattern(document["pre_tokenizer"]), nfc, added)


def ranks(model: Json, pattern: str) -> dict[str, int]:
    """Return the tokens to give to tiktoken: all that can result from a piece of text."""
    vocab = {token: i for token, i in model["vocab"].items() if _CHARACTERS.issuperset(token)}
    if not vocab.keys() >= _CHARACTERS:
        raise UnprovenError("a single byte is not in the vocabulary")
    if len(set(vocab.values())) < len(vocab):
        raise UnprovenError("two tokens have the same id")
    made = {left + right for left, right in _merges(model)} | _CHARACTERS
    unmade = vocab.keys() - made
    keep = _whole_pieces(unmade, made, pattern) if model.get("ignore_merges") else set()
    return {token: rank for token, rank in vocab.items() if token in made or token in keep}


def prove(model: Json, vocab: dict[str, int]) -> None:
    """Raise UnprovenError unless merging by ids equals merging by the list, as explained above."""
    orders: dict[tuple[str, ...], int] = {}
    orders.update((pair, order) for order, pair in enumerate(_merges(model)))
    listed = {left + right: (left, right) for left, right in orders}
    if not vocab.keys() >= listed.keys():
        raise UnprovenError("a merge has characters that do not stand for bytes")
    proven = dict.fromkeys(_CHARACTERS, (-1, "", ""))
    before = -1
    for token in sorted(listed, key=vocab.__getitem__):
        rank = vocab[token]
        left, right = listed[token]
        apart = _stay_apart(left, right, vocab, proven)
        pair = (left, right) if apart else _last_parts(token, rank, vocab)
        order = orders.get(pair, -1)
        if order < 0:
            raise UnprovenError(f"the bytes of token {rank}, {token!r}, merge differently by ids")
        if order < before:
            raise UnprovenError(f"its merges are not in the order of ids, at {rank}, {token!r}")
        proven[token] = (rank, pair[0], pair[1])
        before = order


def _stay_apart(
    left: str, right: str, vocab: dict[str, int], proven: dict[str, tuple[int, str, str]]
) -> bool:
    """Whether the bytes of two tokens merge to just these two; False if that cannot be shown.

    Each token in `proven`, which has its id, first part and last part, results from its own bytes
    by merges with rising ids. So at any time, the token at its end is its last part, or the last
    part of that, and so on. The bytes of the two merge differently only if at some time the tokens
    that meet at their boundary join to a token with an id not higher than that of the merge that
    makes a longer one on either side. These pairs are checked from the last to the first.
    """
    if left not in proven or right not in proven:
        return False
    left_rank, _, left_last = proven[left]
    right_rank, right_first, _ = proven[right]
    while left_rank >= 0 or right_rank >= 0:
        if left_rank > right_rank:
            before, left = left_rank, left_last
            left_rank, _, left_last = proven[left]
        else:
            before, right = right_rank, right_first
            right_rank, right_first, _ = proven[right]
        if vocab.get(left + right, before + 1) <= before:
            return False
    return True


def _last_parts(token: str, rank: int, vocab: dict[str, int]) -> tuple[str, ...]:
    """Return the parts to which a token's bytes merge by ids below its own, stopping at two."""
    parts = list(token)
    joined = [vocab.get(left + right, rank) for left, right in pairwise(parts)]
    while len(parts) > 2:
        best = min(joined)
        if best >= rank:
            break
        at = joined.index(best)
        parts[at] += parts.pop(at + 1)
        del joined[at]
        if at > 0:
            joined[at - 1] = vocab.get(parts[at - 1] + parts[at], rank)
        if at < len(joined):
            joined[at] = vocab.get(parts[at] + parts[at + 1], rank)
    return tuple(parts)


def in_bytes(vocab: dict[str, int]) -> dict[bytes, int]:
    return {token.translate(_ALPHABET).encode("latin-1"): rank for token, rank in vocab.items()}


def _merges(model: Json) -> Iterable[tuple[str, str]]:
    """Yield the pairs; in older files they are strings with a space in between."""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _pattern(step: Json | None) -> str:
    """Return the pattern by which a pre-tokenizer splits text, and does nothing else."""
    *before, last = (step or {}).get("pretokenizers") or [step or {"type": None}]
    if last["type"] == "ByteLevel" and not last["add_prefix_space"]:
        if not before and last["use_regex"]:
            return GPT2
        if [one["type"] for one in before] == ["Split"] and not last["use_regex"]:
            pattern = before[0]["pattern"].get("Regex")
            # The known patterns match all characters, so inverted and isolated pieces are the same.
            how = before[0]["behavior"], before[0]["invert"]
            if pattern in KNOWN and how in (("Isolated", False), ("Removed", True)):
                return str(pattern)
    raise UnprovenError("it splits text in another way than GPT-2, GPT-4, GPT-4o or Qwen2")


def _check_added(tokens: list[Json], nfc: bool) -> None:
    """Raise UnprovenError unless the order in which added tokens are searched for is irrelevant.

    None may begin inside another: so none overlaps another, or is a part of it.
    """
    first = {token["content"][:1] for token in tokens}
    for token in tokens:
        content = token["content"]
        odd = any(token[option] for option in ("lstrip", "rstrip", "single_word"))
        inside = not content or not first.isdisjoint(content[1:])
        if odd or inside or (nfc and not content.isascii()):
            raise UnprovenError(f"the added token {content!r} may be found in another way")


def _whole_pieces(unmade: Iterable[str], made: Container[str], pattern: str) -> set[str]:
    """Return tokens that no merge makes, but that are used if they equal a whole piece.

    tiktoken does the same, but must not be able to reach them by merging. A token that the pattern
    would split is never a piece: what a pattern matches in a longer text, it also matches alone.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    split = Split(Regex(pattern), "isolated")
    keep = set()
    for token in unmade:
        if not any(token[:i] in made and token[i:] in made for i in range(1, len(token))):
            keep.add(token)
        elif len(split.pre_tokenize_str(_text(token))) == 1:
            raise UnprovenError(f"no merge makes {token!r}, which can be a piece of text")
    return keep


def _text(token: str) -> str:
    """Return the text of a token; "" for a partial character, which is never a piece of text."""
    try:
        return token.translate(_ALPHABET).encode("latin-1").decode()
    except UnicodeDecodeError:
        return ""


def _alphabet() -> dict[int, int]:
    """Map the code of each character to the byte for which it stands.

    Bytes with a visible character in Latin-1 are that character, the others U+0100 and up.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(visible))
    return {byte: byte for byte in visible} | {0x100 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()
_CHARACTERS = frozenset(map(chr, _ALPHABET))
