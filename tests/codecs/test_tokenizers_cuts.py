"""Runs of spaces that are cut first: the same ids as with the look ahead, for every pattern."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.codecs.tokenizers import cuts, patterns
from shardkit.codecs.tokenizers.cuts import Cutter, encoded, make_encoding
from tests.conftest import examples

# What the patterns tell apart, and spaces of all kinds; \x1c is one for Python alone.
ALPHABET = " \t\n\r\x0b\x0c\x1c\x85\xa0\u2003\u2028\u3000aZé漢1٣.'/-🎉\u0301" + "s"
RANKS = {bytes([byte]): byte for byte in range(256)}
RANKS |= {
    token: 256 + n for n, token in enumerate((b"  ", b"\n\n", b" a", b"\r\n", b"    ", b"'s"))
}
NAMES = ("gpt2", "cl100k", "qwen2", "o200k")
EACH_PATTERN = pytest.mark.parametrize("pattern", patterns.KNOWN, ids=NAMES)

_cutters = {pattern: Cutter(pattern, RANKS) for pattern in patterns.KNOWN}
_plain = {pattern: make_encoding(pattern, RANKS, {}) for pattern in patterns.KNOWN}


def assert_alike(pattern: str, text: str) -> None:
    found, expected = _cutters[pattern].encode(text), encoded(_plain[pattern], text, set())
    assert found is not None
    assert expected is not None
    assert np.array_equal(found, expected), repr(text)


@EACH_PATTERN
@settings(max_examples=examples(100))
@given(text=st.text(ALPHABET, max_size=40))
def test_ids_are_those_of_the_whole_pattern(pattern: str, text: str) -> None:
    assert_alike(pattern, text)


@EACH_PATTERN
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=cuts._MARK)))
def test_so_they_are_for_any_text(pattern: str, text: str) -> None:
    assert_alike(pattern, text)


@pytest.mark.large
@EACH_PATTERN
def test_so_they_are_for_very_many_texts(pattern: str) -> None:
    draw = random.Random(pattern)
    for _ in range(300_000):
        assert_alike(pattern, "".join(draw.choices(ALPHABET, k=draw.randint(0, 24))))


@EACH_PATTERN
def test_runs_are_cut_and_the_cuts_leave_no_trace(pattern: str) -> None:
    cutter = _cutters[pattern]
    assert cutter._cuts("a  b   c d\n e") == [2, 6, 11]
    assert cutter._cuts("a\n\nb") == ([2] if pattern == patterns.GPT2 else [])
    assert cutter._cuts("  ") == cutter._cuts("") == cutter._cuts("a ") == cutter._cuts("a  ") == []
    ids = cutter.encode("a  b")
    assert ids is not None
    assert ids.max() < len(RANKS)


def test_a_text_with_the_mark_in_it_is_left_to_others() -> None:
    assert _cutters[patterns.GPT2].encode("a\0b") is None


@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
def test_long_texts_are_looked_at_in_parts(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a  b \n\n  c\té   d  " * 20
    whole = {pattern: cutter._cuts(text) for pattern, cutter in _cutters.items()}
    monkeypatch.setattr(cuts, "_AT_ONCE", at_once)
    assert {pattern: cutter._cuts(text) for pattern, cutter in _cutters.items()} == whole
