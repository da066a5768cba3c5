"""Text steps by themselves: in order, counted, and as little in memory as they say."""

import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import Array, Int, SampleError, Schema, Text, TextOptions, UsageError
from shardkit.codecs.tokenizers import load_tokenizer
from shardkit.helpers.checked import checked, plain
from shardkit.preprocess import text as text_module
from shardkit.preprocess.items import Filtered, Item
from shardkit.preprocess.packing import PACKERS
from shardkit.preprocess.text import TextSteps, TextTally, text_field, text_steps
from tests.codecs import tokenizer_zoo
from tests.conversion.text_corpora import few_words
from tests.sources.real import refused

SCHEMA = Schema({"text": Text(), "n": Int()})
END = 7


@pytest.fixture(scope="session")
def words(tmp_path_factory):
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

_documents = st.lists(
    st.lists(st.integers(0, 6), max_size=9) | st.sampled_from([BAD, LEFT_OUT]), max_size=40
)


def items_of(documents: list[Any]) -> list[Item]:
    return [
        item(n, document) if isinstance(document, list) else Item(f"line {n}", document, 10)
        for n, document in enumerate(documents)
    ]


@pytest.mark.parametrize("threads", [1, 3])
@given(documents=_documents)
def test_documents_come_out_in_order_with_their_tokens(words, threads, documents):
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
            assert (one.read["__key__"], one.read["n"]) == (f"k{n}", n)
            assert list(one.read) == ["__key__", "tokens", "n"]
        else:
            assert one.read is document
    texts = [document for document in documents if isinstance(document, list)]
    assert tally.lengths.count == len(texts)
    assert tally.lengths.bytes == sum(len(document) + 1 for document in texts)
    assert tally.counts["bytes"] == sum(max(3 * len(document) - 1, 0) for document in texts)


@pytest.mark.parametrize(("pack", "threads"), [("concat", 1), ("pad", 3), ("nosplit", 3)])
@given(documents=_documents, seq_len=st.integers(1, 12))
def test_blocks_are_those_of_the_packer_and_bad_ones_pass(words, pack, threads, documents, seq_len):
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


def test_what_is_in_memory_at_once_is_bounded(words, monkeypatch):
    monkeypatch.setattr(text_module, "_BATCH_DOCUMENTS", 4)
    taken = 0

    def many():
        nonlocal taken
        for n in itertools.count():
            taken += 1
            yield item(n, [1, 2])

    made = steps(words)(many(), "t", 2, TextTally())
    for _ in range(100):
        next(made)
    assert taken <= 100 + 4 * 6
    made.close()  # type: ignore[attr-defined]


def test_an_error_among_threads_ends_them(words, monkeypatch):
    monkeypatch.setattr(text_module, "_BATCH_DOCUMENTS", 2)
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread):
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)

    def broken():
        for n in range(9):
            yield item(n, [1])
        raise KeyboardInterrupt

    refused(KeyboardInterrupt, None, list, steps(words)(broken(), "t", 3, TextTally()))
    assert started
    assert not any(thread.is_alive() for thread in started)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=50),
    cut=st.integers(0, 50),
)
def test_counts_of_parts_merge_to_those_of_the_whole(lengths, cut):
    def counted(pairs):
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


def test_the_fields_that_come_out_or_would_be_lost_or_met(words):
    tokens, only = Array("|u1", (None,)), Schema({"text": Text()})
    assert steps(words).schema_after(SCHEMA) == Schema({"tokens": tokens})
    keeping = steps(words, keep_fields=True)
    assert keeping.schema_after(SCHEMA) == Schema({"tokens": tokens, "n": Int()})
    optional = Schema({"text": Text(optional=True), "n": Int()})
    assert steps(words).schema_after(optional) == Schema({"tokens": tokens})
    assert keeping.schema_after(optional)["tokens"].optional
    for seq_len, ends in ((8, "<u2"), (65_535, "<u2"), (65_536, "<u4")):
        for remainder, length in (("pad", seq_len), ("drop", seq_len), ("keep", None)):
            asked = steps(words, seq_len=seq_len, remainder=remainder)
            kinds = {"tokens": Array("|u1", (length,)), "doc_ends": Array(ends, (None,))}
            assert asked.schema_after(only) == Schema(kinds)
    blocks = steps(words, keep_fields=True, seq_len=8)
    refused(UsageError, "cannot store their other fields", blocks.schema_after, SCHEMA)
    both = Schema({**SCHEMA, "tokens": Int()})
    refused(UsageError, "already a field 'tokens'", keeping.schema_after, both)


def test_which_field_is_the_text():
    two = Schema({"a": Text(), "b": Text(), "n": Int()})
    assert text_field(TextOptions(), SCHEMA) == "text"
    assert text_field(TextOptions(), Schema({"body": Text()})) == "body"
    assert text_field(TextOptions(), Schema({"a": Text(), "text": Text()})) == "text"
    assert text_field(TextOptions(field="b"), two) == "b"
    for field, schema in ((None, two), ("n", two), ("c", two), (None, Schema({"n": Int()}))):
        refused(UsageError, "no text field", text_field, TextOptions(field=field), schema)
