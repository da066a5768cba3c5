"""Text steps by themselves: in order, counted, and as little in memory as they say."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.checked import checked, plain
from shardkit.codecs.tokenizers import load_tokenizer
from shardkit.errors import SampleError, UsageError
from shardkit.options import TextOptions
from shardkit.preprocess import text as text_module
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.items import Item
from shardkit.preprocess.packing import PACKERS
from shardkit.preprocess.text import TextSteps, TextTally, text_field, text_steps
from shardkit.schema import Array, Int, Schema, Text
from tests.codecs import tokenizer_zoo
from tests.conversion.text_corpora import few_words

SCHEMA = Schema({"text": Text(), "n": Int()})
END = 7


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight words, w0 to w7, which are their own numbers; documents end by the last."""
    return tokenizer_zoo.write_json(tmp_path_factory.mktemp("words"), few_words(8))


def steps(words: Path, **options: Any) -> TextSteps:
    asked = TextOptions(tokenizer=words, eos_token="w7", **options)
    return text_steps(load_tokenizer(words, eos_token="w7"), asked, SCHEMA)


def item(number: int, ids: list[int]) -> Item:
    text = " ".join(f"w{n}" for n in ids)
    return Item(f"line {number}", {"__key__": f"k{number}", "text": text, "n": number}, 10)


BAD = SampleError("bad")
LEFT_OUT = Filtered("small", "x", "k")

# Documents of words, samples that are bad, and samples that are left out.
_documents = st.lists(
    st.one_of(st.lists(st.integers(0, 6), max_size=9), st.sampled_from([BAD, LEFT_OUT])),
    max_size=40,
)


def items_of(documents: list[Any]) -> list[Item]:
    return [
        item(n, document) if isinstance(document, list) else Item(f"line {n}", document, 10)
        for n, document in enumerate(documents)
    ]


@pytest.mark.parametrize("threads", [1, 3])
@given(documents=_documents)
def test_documents_come_out_in_order_with_their_tokens(
    words: Path, threads: int, documents: list[Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_BATCH_DOCUMENTS", 3)
        tally = TextTally()
        made = list(steps(words, keep_fields=True)(items_of(documents), "t", threads, tally))
        tally.lengths.flush()
    assert [one.name for one in made] == [f"line {n}" for n in range(len(documents))]
    for n, (one, document) in enumerate(zip(made, documents, strict=True)):
        if isinstance(document, list):
            assert isinstance(one.read, dict)
            assert one.read["tokens"].tolist() == [*document, END]
            assert {name: one.read[name] for name in ("__key__", "n")} == {
                "__key__": f"k{n}",
                "n": n,
            }
            assert list(one.read) == ["__key__", "tokens", "n"]
        else:
            assert one.read is document
    texts = [document for document in documents if isinstance(document, list)]
    assert tally.lengths.count == len(texts)
    assert tally.lengths.bytes == sum(len(document) + 1 for document in texts)
    assert tally.counts["bytes"] == sum(max(3 * len(document) - 1, 0) for document in texts)


@pytest.mark.parametrize(("pack", "threads"), [("concat", 1), ("pad", 3), ("nosplit", 3)])
@given(documents=_documents, seq_len=st.integers(1, 12))
def test_blocks_are_those_of_the_packer_and_what_is_bad_passes(
    words: Path, pack: str, threads: int, documents: list[Any], seq_len: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_BATCH_DOCUMENTS", 3)
        tally = TextTally()
        asked = steps(words, seq_len=seq_len, pack=pack)
        made = list(asked(items_of(documents), "000003", threads, tally))
    blocks = [one for one in made if isinstance(one.read, dict)]
    others = [one.name for one in made if not isinstance(one.read, dict)]
    assert others == [f"line {n}" for n, d in enumerate(documents) if not isinstance(d, list)]
    packer = PACKERS[pack](seq_len, "pad", END)
    texts = [d for d in documents if isinstance(d, list)]
    wanted = [b for d in texts for b in packer.add(np.array([*d, END], np.uint8))]
    wanted += packer.finish()
    assert [one.name for one in blocks] == [f"000003/{n:08d}" for n in range(len(wanted))]
    for one, block in zip(blocks, wanted, strict=True):
        assert isinstance(one.read, dict)
        assert one.read["__key__"] == one.name
        assert one.read["tokens"].tolist() == block.tokens.tolist()
        assert one.read["tokens"].dtype == "u1"
        assert one.read["doc_ends"].tolist() == block.doc_ends.tolist()
    assert {name: tally.counts[name] for name in packer.counts} == packer.counts
    assert sum(one.size for one in blocks) <= 10 * len(texts)


def test_what_is_in_memory_at_once_is_bounded(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_BATCH_DOCUMENTS", 4)
    taken = 0

    def many() -> Iterator[Item]:
        nonlocal taken
        for n in itertools.count():
            taken += 1
            yield item(n, [1, 2])

    made = steps(words)(many(), "t", 2, TextTally())
    for _ in range(100):
        next(made)
    assert taken <= 100 + 4 * 6
    made.close()  # type: ignore[attr-defined]


def test_an_error_among_threads_ends_them(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_BATCH_DOCUMENTS", 2)
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)

    def broken() -> Iterator[Item]:
        for n in range(9):
            yield item(n, [1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(steps(words)(broken(), "t", 3, TextTally()))
    assert started
    assert not any(thread.is_alive() for thread in started)


def test_the_end_of_a_long_document_does_not_keep_it_in_memory() -> None:
    packer = PACKERS["nosplit"](10, "pad", 0)
    document = np.ones(100_005, np.uint16)
    assert sum(1 for _ in packer.add(document)) == 10_000
    (end,) = packer._window  # type: ignore[attr-defined]
    assert len(end) == 5
    assert end.base is None


@given(
    lengths=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=50),
    cut=st.integers(0, 50),
)
def test_counts_of_parts_merge_to_those_of_the_whole(
    lengths: list[tuple[int, int]], cut: int
) -> None:
    def counted(pairs: list[tuple[int, int]]) -> TextTally:
        tally = TextTally()
        for size, tokens in pairs:
            tally.add(size, tokens)
        tally.counts["padding"] += len(pairs)
        tally.lengths.flush()
        return checked(TextTally, json.loads(json.dumps(plain(tally))))

    whole, merged = counted(lengths), TextTally()
    for part in (lengths[cut:], lengths[:cut]):
        merged.merge(counted(part))
    assert merged.summary() == whole.summary()
    if not lengths:
        assert whole.summary() == {}
        return
    about = whole.summary()
    tokens = sorted(tokens for _, tokens in lengths)
    assert (about["documents"], about["tokens"]) == (len(tokens), sum(tokens))
    assert (about["shortest"], about["longest"]) == (tokens[0], tokens[-1])
    assert about["bytes"] == sum(size for size, _ in lengths)
    assert about["padding"] == len(lengths)
    powers = Counter(1 << (n.bit_length() - 1) if n else 0 for n in tokens)
    assert {int(start): count for start, count in about["histogram"].items()} == powers


def test_the_fields_that_come_out(words: Path) -> None:
    tokens = Array("|u1", (None,))
    assert steps(words).schema_after(SCHEMA) == Schema({"tokens": tokens})
    kept = steps(words, keep_fields=True).schema_after(SCHEMA)
    assert kept == Schema({"tokens": tokens, "n": Int()})
    optional = Schema({"text": Text(optional=True), "n": Int()})
    assert steps(words).schema_after(optional) == Schema({"tokens": tokens})
    kept = steps(words, keep_fields=True).schema_after(optional)
    assert kept["tokens"].optional
    only = Schema({"text": Text()})
    for seq_len, ends in ((8, "<u2"), (65_535, "<u2"), (65_536, "<u4")):
        for remainder, length in (("pad", seq_len), ("drop", seq_len), ("keep", None)):
            asked = steps(words, seq_len=seq_len, remainder=remainder)
            assert asked.schema_after(only) == Schema(
                {"tokens": Array("|u1", (length,)), "doc_ends": Array(ends, (None,))}
            )


def test_fields_that_would_be_lost_or_met_are_refused(words: Path) -> None:
    with pytest.raises(UsageError, match="cannot store their other fields"):
        steps(words, keep_fields=True, seq_len=8).schema_after(SCHEMA)
    with pytest.raises(UsageError, match="already a field 'tokens'"):
        steps(words, keep_fields=True).schema_after(Schema({**SCHEMA, "tokens": Int()}))


def test_which_field_is_the_text() -> None:
    two = Schema({"a": Text(), "b": Text(), "n": Int()})
    assert text_field(TextOptions(), SCHEMA) == "text"
    assert text_field(TextOptions(), Schema({"body": Text()})) == "body"
    assert text_field(TextOptions(), Schema({"a": Text(), "text": Text()})) == "text"
    assert text_field(TextOptions(field="b"), two) == "b"
    for field, schema in ((None, two), ("n", two), ("c", two), (None, Schema({"n": Int()}))):
        with pytest.raises(UsageError, match="no text field"):
            text_field(TextOptions(field=field), schema)
