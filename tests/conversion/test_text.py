"""Text corpora end to end: documents, tokens and blocks in every format, whatever is asked for."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import shardkit
from shardkit.conversion import run as engine
from shardkit.conversion.stats import Stats
from shardkit.errors import (
    OutputError,
    SampleError,
    ShardkitError,
    SourceError,
    UsageError,
)
from shardkit.formats import FORMATS
from shardkit.inspection import inspect
from shardkit.manifest import load
from shardkit.options import PACKINGS, REMAINDERS, ConvertOptions, TextOptions
from shardkit.sources.text import scan
from shardkit.testing import make_image
from tests.codecs import tokenizer_zoo
from tests.conftest import few, files_of
from tests.conversion.text_corpora import (
    BLOCK_FORMATS,
    EOS,
    TEXT_FORMATS,
    blocks_of,
    few_words,
    ids_of,
    joined,
    line_keys,
    make,
    packed,
    prose,
    run_of,
    samples_of,
    tokens_of,
    write_corpus,
    write_lines,
)
from tests.sources.test_text import put
from tests.test_cli import run

# Every way to fill blocks that makes sense.
PACKS = [
    (p, r) for p, r in itertools.product(PACKINGS, REMAINDERS) if (p == "concat") >= (r == "drop")
]
TEXTS = prose(80)
SINGLE = sorted(name for name in FORMATS if FORMATS[name].single)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that ends documents by token 0, and has no padding."""
    return tokenizer_zoo.write_json(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with [EOS] and [PAD], which no fast engine does."""
    return tokenizer_zoo.write_json(tmp_path_factory.mktemp("wordpiece"), "wordpiece")


@pytest.fixture(scope="session")
def no_end(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 200 words that does not end documents."""
    return tokenizer_zoo.write_json(tmp_path_factory.mktemp("words"), few_words(200))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a name in several scripts, which keys hold."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "übung 日本 語.v2.jsonl", TEXTS)


@pytest.fixture(scope="session")
def expected(gpt2: Path) -> list[list[int]]:
    return ids_of(gpt2, TEXTS)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in parts of 4 kB, and an only shard in pieces: both are decided in planning alone."""
    monkeypatch.setattr(scan, "RANGE", 4096)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 8_000)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_BLOCKS", 8)


# --- documents, tokens, blocks --------------------------------------------------------------------


@pytest.mark.parametrize("format", few(sorted(FORMATS)))
def test_every_format_holds_the_tokens_of_every_document_and_their_lengths(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    make(corpus, format, tmp_path / "out", {"tokenizer": gpt2}, shard_samples=30)
    lengths = [len(ids) for ids in expected]
    wanted = list(zip(line_keys(corpus), expected, strict=True))
    assert list(tokens_of(tmp_path / "out").items()) == wanted
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset[0]["tokens"].dtype == "<u2"
        assert dataset.lengths("tokens").tolist() == lengths
        for field in ("__key__", "text"):
            with pytest.raises(UsageError, match="one-dimensional arrays"):
                dataset.lengths(field)
    assert shardkit.verify(tmp_path / "out", against=corpus).problems == []
    first, second = (tmp_path / "out" / s.file.name for s in load(tmp_path / "out").shards[:2])
    with shardkit.open(second) as shard:
        assert shard.lengths("tokens").tolist() == lengths[30:60]
    assert shardkit.verify(second).problems == []
    if format == "lance":  # whose shards are no datasets without it
        return
    (tmp_path / "out/__shardkit__/manifest.json").unlink()  # as if others had made it
    with shardkit.open(first) as shard:
        assert shard.manifest is None
        (name,) = shard.schema
        assert shard.lengths(name).tolist() == lengths[:30]


@pytest.mark.parametrize("format", few(BLOCK_FORMATS, "wds"))
def test_every_format_holds_the_blocks_of_packings(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    packs = PACKS if format == "wds" else [("concat", "pad"), ("nosplit", "keep")]
    for pack, remainder in packs:
        out = tmp_path / f"{pack}-{remainder}"
        options = {"tokenizer": gpt2, "seq_len": 96, "pack": pack, "remainder": remainder}
        text = make(corpus, format, out, options).splits[""].text
        wanted = packed(expected, 96, pack, remainder)
        assert blocks_of(out) == wanted.blocks
        assert [s["__key__"] for s in samples_of(out)] == [
            f"000000/{n:08d}" for n in range(len(wanted.blocks))
        ]
        assert (text["padding"], text["dropped"], text["cut"]) == (
            wanted.padding,
            wanted.dropped,
            wanted.cut,
        )
        with shardkit.open(out) as dataset:
            for name, at in (("tokens", 0), ("doc_ends", 1)):
                lengths = [len(block[at]) for block in wanted.blocks]
                assert dataset.lengths(name).tolist() == lengths
            assert dataset.schema["tokens"].shape == (None if remainder == "keep" else 96,)
    assert shardkit.verify(out, against=corpus).problems == []


@pytest.mark.parametrize("format", few(TEXT_FORMATS, "wds"))
def test_every_format_holds_the_text_and_it_becomes_tokens(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    keys, text = line_keys(corpus), tmp_path / "text"
    result = make(corpus, format, text, {"keep_fields": True}, shard_samples=40)
    assert samples_of(text) == [
        {"__key__": key, "text": TEXTS[n], "n": n} for n, key in enumerate(keys)
    ]
    assert result.splits[""].text == {}
    assert load(text).tokenizer == {}
    assert shardkit.verify(text, against=corpus).problems == []
    make(text, "arrow", tmp_path / "kept", {"tokenizer": gpt2, "keep_fields": True})
    for n, sample in enumerate(samples_of(tmp_path / "kept")):
        assert sample.pop("tokens").tolist() == expected[n]
        assert sample == {"__key__": keys[n], "n": n}
    options = {"tokenizer": gpt2, "seq_len": 64, "pack": "nosplit"}
    make(text, "arrow", tmp_path / "blocks", options)
    assert blocks_of(tmp_path / "blocks") == packed(expected, 64, "nosplit", "pad").blocks
    for name in ("kept", "blocks"):
        assert shardkit.verify(tmp_path / name, against=text).problems == []


def test_tokens_that_begin_and_end_documents(gpt2: Path, wordpiece: Path, tmp_path: Path) -> None:
    texts = TEXTS[:5]
    source = write_corpus(tmp_path / "a.jsonl", texts)
    llama = tokenizer_zoo.write_json(tmp_path / "llama", "llama3")
    vocab = json.loads(wordpiece.read_text("utf-8"))["model"]["vocab"]
    vocab |= {
        token["content"]: token["id"]
        for token in tokenizer_zoo.tokenizer_json("llama3")["added_tokens"]
    }
    for tokenizer, options, before, after in (
        (gpt2, {}, [], [EOS]),
        (gpt2, {"append_eos": True}, [], [EOS]),
        (gpt2, {"append_eos": False}, [], []),
        (wordpiece, {}, [], [vocab["[EOS]"]]),
        (wordpiece, {"eos_token": "[SEP]"}, [], [vocab["[SEP]"]]),
        (llama, {"bos": True}, [vocab["<|begin_of_text|>"]], [vocab["<|end_of_text|>"]]),
    ):
        text = {"tokenizer": tokenizer, **options}
        make(source, "arrow", tmp_path / "out", text, overwrite=True)
        found = list(tokens_of(tmp_path / "out").values())
        assert found == ids_of(tokenizer, texts, before, after), options


def test_special_tokens_in_documents_are_tokens_or_text(gpt2: Path, tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl", ["one<|endoftext|>two"])
    for how, specials in (("special", 1), ("text", 0)):
        options = {"tokenizer": gpt2, "special_tokens": how, "append_eos": False}
        make(source, "arrow", tmp_path / how, options)
        (found,) = tokens_of(tmp_path / how).values()
        assert found.count(EOS) == specials
        assert shardkit.verify(tmp_path / how, against=source).problems == []


def test_ids_take_the_smallest_type_that_holds_the_vocabulary(tmp_path: Path) -> None:
    """More vocabularies are in tests/codecs/test_tokenizers.py."""
    source = write_corpus(tmp_path / "a.jsonl", ["w1 w255"])
    for words, dtype in ((256, "|u1"), (257, "<u2")):
        tokenizer = tokenizer_zoo.write_json(tmp_path / "tok", few_words(words))
        make(source, "arrow", tmp_path / "out", {"tokenizer": tokenizer}, overwrite=True)
        (sample,) = samples_of(tmp_path / "out")
        assert sample["tokens"].dtype.str == dtype
        assert sample["tokens"].tolist() == [1, 255]
        assert load(tmp_path / "out").tokenizer["vocab_size"] == words


def test_the_tokenizer_is_in_the_manifest_and_beside_it(
    corpus: Path, gpt2: Path, wordpiece: Path, tmp_path: Path
) -> None:
    import xxhash

    make(corpus, "arrow", tmp_path / "out", {"tokenizer": gpt2})
    manifest = load(tmp_path / "out")
    digest = xxhash.xxh3_128_hexdigest(gpt2.read_bytes())
    facts = {"file": "tokenizer.json", "digest": digest, "vocab_size": 2000, "eos_id": EOS}
    assert facts.items() <= manifest.tokenizer.items()
    assert (tmp_path / "out/__shardkit__/tokenizer.json").read_bytes() == gpt2.read_bytes()
    assert str(gpt2.parent) not in (tmp_path / "out/__shardkit__/manifest.json").read_text("utf-8")
    options = {"tokenizer": wordpiece, "seq_len": 64, "pack": "pad"}
    make(corpus, "arrow", tmp_path / "padded", options)
    pad = json.loads(wordpiece.read_text("utf-8"))["model"]["vocab"]["[PAD]"]
    padded = [tokens[ends[-1] :] for tokens, ends in blocks_of(tmp_path / "padded")]
    assert {token for tokens in padded for token in tokens} == {pad}


# --- the same for everybody (C1) ------------------------------------------------------------------


@pytest.mark.usefixtures("small_parts")
def test_c1_the_same_bytes_for_any_number_of_workers(
    corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    options = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        result = make(corpus, "arrow", out, options, shard_size="8kB", workers=workers)
        text = result.splits[""].text  # of all tasks
        assert text["documents"] == len(TEXTS)
        assert text["tokens"] == sum(map(len, expected))
        powers = Counter(1 << (len(ids).bit_length() - 1) for ids in expected)
        assert {int(start): count for start, count in text["histogram"].items()} == powers
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out2")
    with shardkit.open(tmp_path / "out0") as dataset:
        assert dataset.shards > 4
        tasks = {sample["__key__"].split("/")[0] for sample in dataset}
    assert len(tasks) > 2
    blocks = blocks_of(tmp_path / "out0")
    assert run_of(blocks) == joined(expected)
    assert sum(len(tokens) < 64 for tokens, _ in blocks) <= len(tasks)
    assert shardkit.verify(tmp_path / "out2", against=corpus).problems == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("format", few(SINGLE, "megatron"))
def test_c1_one_shard_of_pieces_made_by_any_number_of_workers(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """How pieces become one shard differs by format, and not by who made them."""
    suffix = FORMATS[format].suffixes[0]
    plan = engine.prepare(
        corpus, format, tmp_path / "x", ConvertOptions(text=TextOptions(tokenizer=gpt2))
    )
    assert len(plan.tasks) > 2
    found = []
    for workers in (0, 2) if format == "megatron" else (0,):
        out = tmp_path / str(workers) / f"train{suffix}"
        out.parent.mkdir()
        make(corpus, format, out, {"tokenizer": gpt2}, workers=workers)
        found.append(files_of(out.parent))
    assert found[0] == found[-1]
    assert list(tokens_of(out).values()) == expected
    assert shardkit.verify(out, against=corpus).problems == []
    assert f"__shardkit__/train{suffix}.tokenizer.json" in found[0]


def test_blocks_of_a_version_that_cut_tasks_otherwise_are_not_called_damaged(
    corpus: Path, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.conversion.plan.Plan.versions", {"shardkit": "0.1.0"})
        make(corpus, "arrow", tmp_path / "blocks", {"tokenizer": gpt2, "seq_len": 32})
        make(corpus, "arrow", tmp_path / "documents", {"tokenizer": gpt2})
    assert shardkit.verify(tmp_path / "blocks").sound
    assert shardkit.verify(tmp_path / "documents", against=corpus).sound
    with pytest.raises(UsageError, match="an earlier shardkit"):
        shardkit.verify(tmp_path / "blocks", against=corpus)


def test_threads_inside_a_task_change_nothing(
    corpus: Path, gpt2: Path, wordpiece: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.preprocess.text._BATCH_DOCUMENTS", 7)
    for tokenizer in (gpt2, wordpiece):
        text = TextOptions(tokenizer=tokenizer, seq_len=32, pack="nosplit")
        plan = engine.prepare(corpus, "arrow", tmp_path / "out", ConvertOptions(text=text))
        one, nine = (
            [pickle.dumps(item.read) for item in plan.tasks[0].reading().items(threads, Stats())]
            for threads in (1, 9)
        )
        assert one == nine


def test_c1_the_same_bytes_wherever_source_and_tokenizer_lie(
    corpus: Path, gpt2: Path, tmp_path: Path
) -> None:
    other = tokenizer_zoo.write_json(tmp_path / "elsewhere", "gpt2")
    moved = shutil.copy(corpus, tmp_path / corpus.name)
    make(corpus, "arrow", tmp_path / "one", {"tokenizer": gpt2, "seq_len": 32})
    blocks = {"tokenizer": other.parent, "seq_len": 32}
    first = make(moved, "arrow", tmp_path / "two", blocks)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    again = make(moved, "arrow", tmp_path / "two", {**blocks, "tokenizer": gpt2})
    assert (again.already_complete, again.splits) == (True, first.splits)


# --- limits, splits, shuffles ---------------------------------------------------------------------


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("limit", [1, 60, 1000])
def test_a_limit_takes_the_first_documents(
    limit: int, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    more = {"limit": limit, "shard_size": "8kB"}
    make(corpus, "arrow", tmp_path / "docs", {"tokenizer": gpt2}, **more)
    assert list(tokens_of(tmp_path / "docs").values()) == expected[:limit]
    with shardkit.open(tmp_path / "docs") as dataset:
        assert dataset.lengths("tokens").tolist() == [len(ids) for ids in expected[:limit]]
    blocks = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    make(corpus, "arrow", tmp_path / "blocks", blocks, **more)
    assert run_of(blocks_of(tmp_path / "blocks")) == joined(expected[:limit])
    for name in ("docs", "blocks") if limit == 60 else ():
        assert shardkit.verify(tmp_path / name, against=corpus).problems == []


@pytest.mark.usefixtures("small_parts")
def test_shares_are_every_document_once(
    corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    whole = dict(zip(line_keys(corpus), expected, strict=True))
    shares = {"split": "train=0.6,val=0.3,test=0.1", "shard_size": "16kB"}
    make(corpus, "arrow", tmp_path / "docs", {"tokenizer": gpt2}, **shares)
    found = {name: tokens_of(tmp_path / "docs" / name) for name in ("train", "val", "test")}
    assert Counter(itertools.chain(*found.values())) == Counter(whole.keys())
    options = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    make(corpus, "arrow", tmp_path / "blocks", options, **shares)
    few = make(corpus, "arrow", tmp_path / "few", {"tokenizer": gpt2}, limit=3, **shares)
    assert {name: split.samples for name, split in few.splits.items()} == dict.fromkeys(found, 3)
    for name, documents in found.items():
        in_order = [(key, ids) for key, ids in whole.items() if key in documents]
        assert list(documents.items()) == in_order
        assert run_of(blocks_of(tmp_path / "blocks" / name)) == joined(documents.values())
        assert list(tokens_of(tmp_path / "few" / name)) == list(documents)[:3]
    for name in ("docs", "blocks", "few"):
        assert shardkit.verify(tmp_path / name, against=corpus).problems == []


def test_files_named_after_splits_are_tokenized_each(gpt2: Path, tmp_path: Path) -> None:
    for name, texts in (("train", TEXTS[:9]), ("val", TEXTS[9:12])):
        write_corpus(tmp_path / "in" / f"{name}.jsonl", texts)
    make(tmp_path / "in", "wds", tmp_path / "out", {"tokenizer": gpt2})
    assert list(tokens_of(tmp_path / "out/train").values()) == ids_of(gpt2, TEXTS[:9])
    assert list(tokens_of(tmp_path / "out/val").values()) == ids_of(gpt2, TEXTS[9:12])
    assert (tmp_path / "out/val/__shardkit__/tokenizer.json").is_file()
    assert shardkit.verify(tmp_path / "out", against=tmp_path / "in").problems == []


def test_long_files_are_not_shuffled_and_what_has_samples_is(
    corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="they cannot be shuffled") as error:
        make(corpus, "arrow", tmp_path / "out", {"tokenizer": gpt2}, shuffle=True)
    assert "without --shuffle first" in str(error.value)
    make(corpus, "arrow", tmp_path / "text")
    make(tmp_path / "text", "arrow", tmp_path / "out", {"tokenizer": gpt2}, shuffle=True)
    found = list(tokens_of(tmp_path / "out").values())
    assert found != expected
    assert sorted(found) == sorted(expected)
    texts = {f"{n:02d}": text for n, text in enumerate(TEXTS[:20])}
    for name, text in texts.items():
        put(tmp_path / f"in/{name}.txt", text.encode())
    orders = []
    for seed in (1, 2):
        out = tmp_path / f"out{seed}"
        make(tmp_path / "in", "arrow", out, {"tokenizer": gpt2}, shuffle=True, seed=seed)
        documents = tokens_of(out)
        assert documents == dict(zip(texts, ids_of(gpt2, texts.values()), strict=True))
        orders.append(list(documents))
    assert orders[0] != orders[1] != sorted(orders[1])
    blocks = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    make(tmp_path / "in", "arrow", tmp_path / "blocks", blocks, shuffle=True, seed=2)
    assert run_of(blocks_of(tmp_path / "blocks")) == joined(documents.values())
    for name in ("out2", "blocks"):
        assert shardkit.verify(tmp_path / name, against=tmp_path / "in").problems == []


# --- datasets as sources --------------------------------------------------------------------------


def by_pyarrow(folder: Path, to: str, columns: dict[str, Any], name: str = "theirs") -> Path:
    folder.mkdir(exist_ok=True)
    table, path = pa.table(columns), folder / f"{name}.{to}"
    if to == "parquet":
        pq.write_table(table, path, row_group_size=30)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    return path


@pytest.mark.parametrize("to", ["arrow", "parquet"])
def test_columns_that_others_wrote_become_tokens(
    to: str, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    kind = pa.string() if to == "arrow" else pa.large_string()
    columns = {"body": pa.array(TEXTS, kind), "n": pa.array(range(len(TEXTS)))}
    source = by_pyarrow(tmp_path, to, columns)
    make(source, "wds", tmp_path / "out", {"tokenizer": gpt2, "keep_fields": True})
    samples = samples_of(tmp_path / "out")
    assert [sample["tokens"].tolist() for sample in samples] == expected
    assert [sample["n"] for sample in samples] == list(range(len(TEXTS)))
    make(source, "megatron", tmp_path / "mega", {"tokenizer": gpt2})
    assert list(tokens_of(tmp_path / "mega").values()) == expected
    for name in ("out", "mega"):
        assert shardkit.verify(tmp_path / name, against=source).problems == []


def test_samples_without_text_are_left_out_unless_other_fields_are_kept(
    gpt2: Path, tmp_path: Path
) -> None:
    texts = ["one two", None, "three", None, None]
    documents = ids_of(gpt2, [text for text in texts if text])
    source = by_pyarrow(tmp_path, "parquet", {"text": texts, "n": list(range(5))})
    result = make(source, "arrow", tmp_path / "kept", {"tokenizer": gpt2, "keep_fields": True})
    samples = samples_of(tmp_path / "kept")
    assert [("tokens" in sample, sample["n"]) for sample in samples] == [
        (text is not None, n) for n, text in enumerate(texts)
    ]
    assert result.splits[""].text["documents"] == 2
    assert result.splits[""].filtered == {}
    with shardkit.open(tmp_path / "kept") as dataset:
        wanted = [len(sample.get("tokens", ())) for sample in samples]
        assert dataset.lengths("tokens").tolist() == wanted
    for format in ("arrow", "megatron"):
        result = make(source, format, tmp_path / format, {"tokenizer": gpt2})
        assert list(tokens_of(tmp_path / format).values()) == documents
        assert result.splits[""].filtered == {"without text": 3}
    options = {"tokenizer": gpt2, "seq_len": 4, "remainder": "keep"}
    result = make(source, "arrow", tmp_path / "blocks", options)
    assert result.splits[""].filtered == {"without text": 3}
    assert blocks_of(tmp_path / "blocks") == packed(documents, 4, "concat", "keep").blocks
    for name in ("kept", "arrow", "megatron", "blocks"):
        assert shardkit.verify(tmp_path / name, against=source).problems == []


def test_a_tar_that_others_wrote_becomes_tokens(gpt2: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "theirs.tar", "w") as tar:
        for n, text in enumerate(TEXTS[:20]):
            for suffix, data in (("txt", text.encode()), ("cls", str(n).encode())):
                member = tarfile.TarInfo(f"{n:04d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    make(tmp_path / "theirs.tar", "arrow", tmp_path / "out", {"tokenizer": gpt2})
    found = tokens_of(tmp_path / "out")
    names = [f"{n:04d}" for n in range(20)]
    assert found == dict(zip(names, ids_of(gpt2, TEXTS[:20]), strict=True))


def test_which_column_is_the_text_is_asked_for_where_there_are_several(
    gpt2: Path, tmp_path: Path
) -> None:
    source = by_pyarrow(tmp_path, "parquet", {"a": ["x y"], "b": ["z"]})
    with pytest.raises(UsageError, match="no text field named 'text'") as error:
        make(source, "arrow", tmp_path / "out", {"tokenizer": gpt2})
    assert "a: Text, b: Text" in str(error.value)
    make(source, "arrow", tmp_path / "out", {"tokenizer": gpt2, "field": "b", "keep_fields": True})
    (sample,) = samples_of(tmp_path / "out")
    assert sample["a"] == "x y"
    assert [sample["tokens"].tolist()] == ids_of(gpt2, ["z"])


def test_captions_beside_images_become_tokens(gpt2: Path, tmp_path: Path) -> None:
    for n in range(4):
        put(tmp_path / f"in/a/{n}.jpg", make_image(n))
        if n != 2:
            put(tmp_path / f"in/a/{n}.txt", TEXTS[n].encode())
    options = {"tokenizer": gpt2, "keep_fields": True}
    image = shardkit.ImageOptions(resize=4)
    make(tmp_path / "in", "arrow", tmp_path / "out", options, image=image)
    ids = ids_of(gpt2, TEXTS[:4])
    for n, sample in enumerate(samples_of(tmp_path / "out")):
        assert sample["label"] == 0
        assert sample["image"] != make_image(n)
        assert sample["tokens"].tolist() == ids[n] if n != 2 else "tokens" not in sample
    assert load(tmp_path / "out").images["resized"] == 4


# --- names ----------------------------------------------------------------------------------------


def test_fields_get_new_names(corpus: Path, gpt2: Path, tmp_path: Path) -> None:
    make(corpus, "arrow", tmp_path / "text", rename={"text": "body"})
    assert [sample["body"] for sample in samples_of(tmp_path / "text")] == TEXTS
    options = {"tokenizer": gpt2, "seq_len": 32, "remainder": "keep"}
    names = {"tokens": "input_ids", "doc_ends": "ends"}
    make(corpus, "arrow", tmp_path / "blocks", options, rename=names)
    with shardkit.open(tmp_path / "blocks") as dataset:
        assert list(dataset.schema) == ["input_ids", "ends"]
        for name in dataset.schema:
            wanted = [len(sample[name]) for sample in dataset]
            assert dataset.lengths(name).tolist() == wanted
    make(corpus, "megatron", tmp_path / "mega", {"tokenizer": gpt2}, rename={"tokens": "ids"})
    assert list(samples_of(tmp_path / "mega")[0]) == ["__key__", "ids"]
    for name in ("text", "blocks", "mega"):
        assert shardkit.verify(tmp_path / name, against=corpus).problems == []
    with pytest.raises(UsageError, match="no field 'text' to rename"):
        make(corpus, "arrow", tmp_path / "x", {"tokenizer": gpt2}, rename={"text": "body"})


# --- bad documents (C3, X1) -----------------------------------------------------------------------

BAD_LINES = {
    '{"text": "a", ': "a line is not JSON",
    '{"body": "b"}': "the document has no text",
    '{"text": 3}': "the document has no text",
    '{"text": null}': "the document has no text",
    '["text"]': "a line is not a JSON object",
    '{"text": "\\ud800"}': "the text contains a lone surrogate",
    '{"text": "a\0b"}': "a line is not JSON",
}


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, list[str], list[str]]:
    """A corpus with bad lines among the good, its good texts, and the places of the bad."""
    rows: list[dict[str, Any] | str] = [{"text": text} for text in TEXTS[:30]]
    for n, line in enumerate(BAD_LINES):
        rows.insert(15 + 2 * n, line)
    source = write_lines(tmp_path / "in/bad.jsonl", rows)
    places = [
        key.replace("/", ": byte ")
        for key, row in zip(line_keys(source), rows, strict=True)
        if isinstance(row, str)
    ]
    return source, TEXTS[:30], places


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("options", [{}, {"seq_len": 32, "remainder": "keep"}])
def test_bad_documents_are_skipped_listed_in_order_and_the_others_packed(
    options: dict[str, Any], damaged: tuple[Path, list[str], list[str]], gpt2: Path, tmp_path: Path
) -> None:
    (source, texts, places), out = damaged, tmp_path / "out"
    options = {"tokenizer": gpt2, **options}
    result = make(source, "arrow", out, options, on_error="skip", shard_size="8kB")
    assert result.errors == len(BAD_LINES)
    found = (out / "__shardkit__/errors.jsonl").read_text("utf-8").splitlines()
    lines = [json.loads(line) for line in found]
    assert [line["source"] for line in lines] == places
    for line, what in zip(lines, BAD_LINES.values(), strict=True):
        assert line["what"].startswith(what)
        assert line["offset"] >= int(line["source"].split()[-1])
    run = joined(sample["tokens"].tolist() for sample in samples_of(out))
    assert run == joined(ids_of(gpt2, texts))
    report = shardkit.verify(out, against=source)
    assert report.problems == []
    assert any(f"{len(BAD_LINES)} samples of the source dropped" in note for note in report.notes)


def test_a_corpus_of_nothing_but_bad_documents(gpt2: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ['{"text": 1}'] * 3)
    with pytest.raises(ShardkitError, match="the document has no text") as error:
        make(source, "arrow", tmp_path / "out", {"tokenizer": gpt2})
    assert "a.jsonl" in str(error.value)
    assert "found: int 1" in str(error.value)
    (tmp_path / "in").mkdir()
    for n in range(3):
        (tmp_path / f"in/{n}.txt").write_bytes(b"\xff\xfe\xfd")
    for options in ({}, {"tokenizer": gpt2}, {"tokenizer": gpt2, "seq_len": 8}):
        out = tmp_path / f"skipped{len(options)}"
        with pytest.raises(SampleError, match=r"not valid UTF-8|byte order mark"):
            make(tmp_path / "in", "arrow", out, options)
        with pytest.raises(SourceError, match="no sample of the source is left") as none:
            make(tmp_path / "in", "arrow", out, options, on_error="skip", overwrite=True)
        assert "3 bad ones, the first: " in str(none.value.found)


GOOD = b'{"text": "good"}\n'
# What is wrong, files by name, exit code, what is said.
BAD_INPUT: dict[str, tuple[dict[str, bytes], int, list[str]]] = {
    "broken JSON": (
        {"in.jsonl": GOOD + b'{"text": "b'},
        1, ["a line is not JSON", "byte 26", "--on-error skip"],
    ),
    "missing field": (
        {"in.jsonl": GOOD + b'{"body": "b"}'},
        1, ["the document has no text", "byte 17", "no such field, but body"],
    ),
    "no such field anywhere": (
        {"in.jsonl": b'{"a": "good", "b": "more"}'},
        1, ["no field 'text'", "a (Text), b (Text)", "--text-field NAME"],
    ),
    "NUL bytes": ({"in.txt": b"good\na\0b\n"}, 1, ["a NUL character", "byte 6"]),
    "Latin-1 among UTF-8": (
        {"in/a.txt": b"plain", "in/b.txt": "voilà".encode("latin-1")},
        1, ["b.txt", "byte 4", "--encoding latin-1"],
    ),
    "a .gz cut short": (
        {"in.jsonl.gz": gzip.compress(GOOD * 99)[:-9]},
        1, ["the compressed file is damaged", "it is truncated"],
    ),
    "an empty file": ({"in.jsonl": b""}, 1, ["no documents", "empty file"]),
    "blank lines": ({"in.jsonl": b"\n \n"}, 1, ["no documents"]),
    "nothing that is an image or text": ({"in/x": b""}, 1, ["there are no images"]),
    "a missing file": ({}, 2, ["there is no such file", "in.jsonl"]),
    "a table of JSON": (
        {"in.json": b'[\n{"text": "a"}\n]\n'}, 1, ["a single JSON array, not JSON Lines", "jq -c"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_one_clear_message(
    what: str, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files, code, says = BAD_INPUT[what]
    for name, data in files.items():
        put(tmp_path / name, data)
    source = next(iter(files), "in.jsonl").split("/")[0]
    words = ["convert", source, "--to", "arrow", "-o", "out", "--workers", 0, "--quiet"]
    found = run(*words, check=code)
    assert found.stdout == ""
    assert all(part in found.stderr for part in says), found.stderr
    assert found.stderr.count("shardkit: ") == 1
    assert not (tmp_path / "out").exists()
    found = run(*words, "--tokenizer", gpt2, "--seq-len", 8, "--json", check=code)
    assert says[0] in json.dumps(json.loads(found.stdout))


T = ["--tokenizer", "TOKENIZER"]
# More of the command, exit code, what is said.
BAD_OPTIONS: list[tuple[list[object], int, str]] = [
    (["--seq-len", 8], 2, "seq_len requires a tokenizer"),
    (["--bos"], 2, "bos requires a tokenizer"),
    (["--append-eos"], 2, "append_eos requires a tokenizer"),
    (["--no-append-eos"], 2, "append_eos requires a tokenizer"),
    (["--eos-token", "</s>"], 2, "eos_token requires a tokenizer"),
    (["--special-tokens", "text"], 2, "special_tokens requires a tokenizer"),
    (["--pack", "nosplit"], 2, "give seq_len=N"),
    ([*T, "--pack", "nosplit"], 2, "give seq_len=N"),
    ([*T, "--remainder", "keep"], 2, "give seq_len=N"),
    ([*T, "--seq-len", 8, "--pack", "pad", "--remainder", "drop"], 2, "would lose most documents"),
    ([*T, "--seq-len", 8, "--pack", "nosplit", "--remainder", "drop"], 2, "would lose most"),
    ([*T, "--seq-len", 0], 2, "seq_len must be a whole number from 1 up"),
    ([*T, "--seq-len", "many"], 2, "not a valid integer"),
    ([*T, "--pack", "tight"], 2, "'tight' is not one of"),
    ([*T, "--seq-len", 8, "--keep-fields"], 2, "cannot store their other fields"),
    ([*T, "--bos"], 2, "no token with which documents begin"),
    ([*T, "--eos-token", "<nope>"], 2, "not in the vocabulary"),
    (["--tokenizer", "NO_END", "--append-eos"], 2, "no token with which documents end"),
    (["--tokenizer", "corpus.jsonl"], 2, "not a tokenizer"),
    (["--tokenizer", "nothing.json"], 2, "there is no such tokenizer"),
    (["--tokenizer", "empty.json"], 2, "an empty file"),
    (["--tokenizer", "."], 2, "the folder has no tokenizer"),
    (["--encoding", "latin-99"], 2, "there is no such encoding"),
    (["--encoding", "base64"], 2, "there is no such encoding"),
    (["--encoding", "unicode_escape"], 2, "not supported for text files"),
    (["--text-field", "body"], 1, "no field 'body'"),
    (["--shuffle"], 2, "they cannot be shuffled"),
    (["--resize", 8], 2, "options for images"),
    (["--split", "train=0.5"], 2, "invalid split"),
    (["--classes", "corpus.jsonl"], 2, "a list of classes needs a folder per class"),
    (["--to", "megatron"], 1, "one field, a one-dimensional array"),
    ([*T, "--to", "megatron", "--seq-len", 8], 1, "without --seq-len"),
    ([*T, "--to", "megatron", "--keep-fields"], 1, "one field"),
    ([*T, "-o", "out.beton", "--to", "beton", "--shard-size", "1MB"], 2, "cannot be limited"),
]


@pytest.mark.parametrize(
    ("more", "code", "says"), BAD_OPTIONS, ids=[" ".join(map(str, o)) for o, *_ in BAD_OPTIONS]
)
def test_options_that_contradict_each_other_or_the_source_are_refused(
    more: list[object],
    code: int,
    says: str,
    gpt2: Path,
    no_end: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.jsonl", TEXTS[:3])
    (tmp_path / "empty.json").touch()
    paths = {"TOKENIZER": gpt2, "NO_END": no_end}
    more = [paths.get(str(word), word) for word in more]
    before = files_of(tmp_path)
    words = ["convert", "corpus.jsonl", "--to", "arrow", "--workers", 0, "--quiet", *more]
    for plan in ([], ["--plan"]):
        found = run(*words, *plan, check=code)
        assert found.stdout == ""
        assert says in found.stderr
    assert files_of(tmp_path) == before


# --- what a run says ------------------------------------------------------------------------------


@pytest.mark.parametrize(("pack", "remainder"), [("concat", "drop"), ("nosplit", "pad")])
def test_the_summary_has_the_true_numbers(
    pack: str,
    remainder: str,
    corpus: Path,
    gpt2: Path,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    words = ["--tokenizer", gpt2, "--seq-len", 64, "--pack", pack, "--remainder", remainder]
    words = ["convert", corpus, "--to", "arrow", "-o", tmp_path / "out", "--workers", 0, *words]
    out = run(*words).stdout
    wanted = packed(expected, 64, pack, remainder)
    tokens = sum(map(len, expected))
    size = sum(len(text.encode()) for text in TEXTS)
    lengths = sorted(map(len, expected))
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line}
    assert rows["documents"].startswith(f"{len(TEXTS):,}; {lengths[0]:,} / ")
    assert rows["documents"].endswith(f"/ {lengths[-1]:,} tokens (min / median / max)")
    assert rows["all"].startswith(f"tokens {tokens:,}; {size / tokens:.2f} bytes of text in each; ")
    assert rows["all"].endswith("/s")
    if remainder == "drop":
        assert rows["dropped"] == f"{wanted.dropped:,} tokens, {wanted.dropped / tokens:.2%} of all"
        assert "padding" not in rows
    else:
        stored = sum(len(block) for block, _ in wanted.blocks)
        share = f"{wanted.padding:,} tokens, {wanted.padding / stored:.2%} of all"
        assert rows["padding"] == share
        assert "dropped" not in rows
    assert rows["cut"].startswith(f"{wanted.cut:,} documents in more")
    report = json.loads(run(*words, "--json").stdout)
    assert report["already_complete"]
    assert report["samples"] == len(wanted.blocks)
    text = report["splits"][""]["text"]
    assert (text["documents"], text["tokens"], text["bytes"]) == (len(TEXTS), tokens, size)
    assert (text["padding"], text["dropped"]) == (wanted.padding, wanted.dropped)
    powers = Counter(1 << (n.bit_length() - 1) for n in lengths)
    assert {int(start): count for start, count in text["histogram"].items()} == powers


def test_inspect_has_tokenizer_documents_and_a_histogram(
    corpus: Path,
    gpt2: Path,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    options = {"tokenizer": gpt2, "seq_len": 64, "pack": "nosplit", "remainder": "keep"}
    make(corpus, "arrow", tmp_path / "out", options, shard_size="16kB")
    blocks = blocks_of(tmp_path / "out")
    report = json.loads(run("inspect", tmp_path / "out", "--json", "--full").stdout)
    assert report["tokenizer"] == load(tmp_path / "out").tokenizer
    assert report["text"]["documents"] == len(TEXTS)
    assert report["text"]["longest"] == max(map(len, expected))
    for name, at in (("tokens", 0), ("doc_ends", 1)):
        lengths = sorted(len(block[at]) for block in blocks)
        about = report["lengths"][name]
        assert [about[n] for n in ("shortest", "median", "longest")] == [
            lengths[0], lengths[(len(lengths) - 1) // 2], lengths[-1],
        ]  # fmt: skip
        powers = Counter(1 << (n.bit_length() - 1) for n in lengths)
        assert {int(n): count for n, count in about["histogram"].items()} == powers
    out = run("inspect", tmp_path / "out").stdout
    for words in ("vocab_size", "Documents", "Histogram: tokens of a document", "#"):
        assert words in out
    shard = load(tmp_path / "out").shards[1]
    one = inspect(tmp_path / "out" / shard.file.name)
    assert one["samples"] == shard.samples
    assert one["text"] == {}
    assert sum(one["lengths"]["tokens"]["histogram"].values()) == shard.samples


@pytest.mark.usefixtures("small_parts")
def test_a_plan_says_what_would_be_done_and_touches_nothing(
    corpus: Path, gpt2: Path, tmp_path: Path
) -> None:
    words = ["convert", corpus, "--to", "arrow", "-o", tmp_path / "out", "--plan", "--workers", 0]
    words += ["--tokenizer", gpt2, "--seq-len", 64, "--shard-size", "16kB"]
    out = run(*words).stdout
    for part in ("of documents: tokens, doc_ends", "tokenizer=tokenizer.json", "seq_len=64"):
        assert part in out
    about = json.loads(run(*words, "--json").stdout)
    assert about["samples"] is None
    assert about["bytes"] == corpus.stat().st_size
    assert about["tasks"] > 1
    assert list(about["parts"][0]["schema"]) == ["tokens", "doc_ends"]
    assert json.loads(run(*words, "--json", "--limit", 9).stdout)["samples"] == 9
    assert os.listdir(tmp_path) == []


# --- runs that go on ------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_parts")
def test_an_unfinished_run_goes_on_only_with_the_same_options(
    damaged: tuple[Path, list[str], list[str]], gpt2: Path, wordpiece: Path, tmp_path: Path
) -> None:
    source, out = damaged[0], tmp_path / "out"
    options = {"tokenizer": gpt2, "seq_len": 64}
    with pytest.raises(SampleError):  # in a later task than the first
        make(source, "arrow", out, options, shard_size="8kB")
    assert list((tmp_path / "out.partial/tasks").glob("*/result.json"))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seq_len": 65}, "seq_len was 64, is 65"),
        ({"seq_len": None}, "seq_len was 64, is None"),
        ({"pack": "nosplit"}, "pack was concat, is nosplit"),
        ({"remainder": "keep"}, "remainder was pad, is keep"),
        ({"append_eos": False}, "append_eos was None, is False"),
        ({"special_tokens": "text"}, "special_tokens was special, is text"),
        ({"tokenizer": None, "seq_len": None}, "tokenizer was"),
        ({"tokenizer": wordpiece}, "the tokenizer's file tokenizer.json has changed"),
    ]
    for change, words in changes:
        with pytest.raises(OutputError, match="unfinished conversion") as error:
            make(source, "arrow", out, {**options, **change}, shard_size="8kB")
        assert words in str(error.value)
        assert "its own options and unchanged files" in str(error.value.fix)
    again = {"shard_size": "8kB", "on_error": "skip"}
    make(source, "arrow", tmp_path / "whole", options, **again)
    make(source, "arrow", out, options, **again)
    assert files_of(out) == files_of(tmp_path / "whole")
    for change, words in changes[-2:]:
        with pytest.raises(OutputError, match="holds another dataset") as error:
            make(source, "arrow", out, {**options, **change}, **again)
        assert words in str(error.value)


def test_a_source_that_changes_during_the_run_is_named(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_corpus(tmp_path / "a.jsonl", TEXTS)
    plan = engine.prepare(
        source, "arrow", tmp_path / "out", ConvertOptions(text=TextOptions(tokenizer=gpt2))
    )
    with source.open("ab") as file:
        file.write(b'{"text": "more"}\n')
    with pytest.raises(SampleError, match="changed while the conversion ran"):
        engine.run(plan, ConvertOptions(), None, None)
    assert not (tmp_path / "out").exists()


# --- verify and what comes after ------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [None, 64])
def test_verify_finds_a_document_that_is_not_that_of_the_source(
    seq_len: int | None, gpt2: Path, tmp_path: Path
) -> None:
    texts = [f"document {n} says so" for n in range(30)]
    source = write_corpus(tmp_path / "a.jsonl", texts)
    make(source, "wds", tmp_path / "out", {"tokenizer": gpt2, "seq_len": seq_len})
    assert shardkit.verify(tmp_path / "out", against=source).sound
    write_corpus(source, [*texts[:20], texts[20].replace("says", "asks"), *texts[21:]])
    report = shardkit.verify(tmp_path / "out", against=source)
    assert {problem.what for problem in report.problems} <= {
        "a value differs from the source",
        "a value is missing in the source",
    }
    named = [problem for problem in report.problems if problem.where["field"] == "tokens"]
    assert named
    if seq_len is None:
        assert [problem.where["key"] for problem in named] == [line_keys(source)[20]]
    write_corpus(source, texts[:-1])
    assert not shardkit.verify(tmp_path / "out", against=source).sound


def test_tokens_go_on_from_format_to_format_with_their_tokenizer(
    corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    make(corpus, "arrow", tmp_path / "arrow", {"tokenizer": gpt2}, shard_samples=30)
    identity = load(tmp_path / "arrow").tokenizer
    before = "arrow"
    for format in ("wds", "lmdb", "parquet", "beton", "hf", "megatron", "arrow"):
        out = tmp_path / f"{before}-{format}"
        shardkit.convert(tmp_path / before, format, out, workers=0)
        assert load(out).tokenizer == identity
        assert (out / "__shardkit__/tokenizer.json").read_bytes() == gpt2.read_bytes()
        assert tokens_of(out) == dict(zip(line_keys(corpus), expected, strict=True))
        with shardkit.open(out) as dataset:
            assert dataset.lengths("tokens").tolist() == [len(ids) for ids in expected]
        assert shardkit.verify(out, against=tmp_path / before).problems == []
        before = out.name


# --- odd corpora ----------------------------------------------------------------------------------


def test_blocks_of_one_token_and_of_more_than_there_are(gpt2: Path, tmp_path: Path) -> None:
    texts = ["one two", "", "three"]
    source, ids = write_corpus(tmp_path / "a.jsonl", texts), ids_of(gpt2, texts)
    for seq_len, pack, remainder in (
        (1, "concat", "pad"),
        (1, "nosplit", "keep"),
        (70_000, "concat", "keep"),
        (70_000, "pad", "pad"),
    ):
        out = tmp_path / f"{seq_len}-{pack}"
        options = {"tokenizer": gpt2, "seq_len": seq_len, "pack": pack, "remainder": remainder}
        make(source, "arrow", out, options)
        assert blocks_of(out) == packed(ids, seq_len, pack, remainder).blocks
        assert shardkit.verify(out, against=source).problems == []
    assert samples_of(tmp_path / "70000-pad")[0]["doc_ends"].dtype == "<u4"


@pytest.mark.parametrize("format", few(sorted(FORMATS), "megatron", "wds"))
@pytest.mark.parametrize("texts", [[""], ["", "a", "", ""]], ids=len)
def test_documents_without_tokens(
    texts: list[str], format: str, gpt2: Path, tmp_path: Path
) -> None:
    source, ids = write_corpus(tmp_path / "a.jsonl", texts), ids_of(gpt2, texts, after=())
    options = {"tokenizer": gpt2, "append_eos": False}
    make(source, format, tmp_path / "out", options)
    assert list(tokens_of(tmp_path / "out").values()) == ids
    assert shardkit.verify(tmp_path / "out", against=source).problems == []
    for pack, remainder in PACKS[2::4] if format == "wds" else []:
        blocks = tmp_path / f"{pack}-{remainder}"
        fill = {"seq_len": 4, "pack": pack, "remainder": remainder}
        result = make(source, format, blocks, {**options, **fill})
        assert blocks_of(blocks) == packed(ids, 4, pack, remainder).blocks
        assert result.splits[""].text["documents"] == len(texts)
        inspect(blocks)


def test_every_kind_of_file_gives_the_same_tokens(gpt2: Path, tmp_path: Path) -> None:
    texts = TEXTS[:20]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    table = io.StringIO()
    csv.writer(table).writerows([["n", "text"], *enumerate(texts)])
    sources = {
        "plain.jsonl": lines,
        "windows.jsonl": b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"),
        "wide.jsonl": lines.decode().encode("utf-16"),
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": zstandard.compress(lines),
        "a.jsonl.bz2": bz2.compress(lines),
        "a.jsonl.xz": lzma.compress(lines),
        "a.csv": table.getvalue().encode(),
    }
    for name, data in sources.items():
        (tmp_path / name).write_bytes(data)
        encoding = "utf-16" if name == "wide.jsonl" else "utf-8"
        options = {"tokenizer": gpt2, "encoding": encoding}
        make(tmp_path / name, "arrow", tmp_path / f"{name}-out", options)
        assert list(tokens_of(tmp_path / f"{name}-out").values()) == ids_of(gpt2, texts), name


def test_inspect_shows_tokens_as_text(gpt2: Path, tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl", ["one two three"])
    make(source, "arrow", tmp_path / "out", {"tokenizer": gpt2})
    (first,) = inspect(tmp_path / "out")["first"]
    assert "'one two three" in first["tokens"]
    (tmp_path / "out/__shardkit__/tokenizer.json").write_text("{}")
    (first,) = inspect(tmp_path / "out")["first"]
    ids = shardkit.open(tmp_path / "out")[0]["tokens"]
    assert first["tokens"] == f"uint16 {ids.shape}: {ids[:12].tolist()}"


# --- large ----------------------------------------------------------------------------------------


def peaks_of(*words: object, addresses: int | None = None) -> list[int]:
    """The most memory in bytes that a conversion and each of its two workers had.

    `addresses` is a limit: what is far too much must not end the machine.
    """
    command = [sys.executable, "-m", "shardkit", "convert", *words, "--to", "arrow", "--quiet"]
    process = subprocess.Popen([*map(str, command), "--workers", "2"])
    if addresses:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (addresses, addresses))
    peaks: dict[int, int] = {}
    while process.poll() is None:
        pids = [process.pid]
        for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has just ended
                pids += map(int, task.read_text().split())
        for pid in pids:
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                for size in re.findall(r"VmHWM:\s+(\d+) kB", status):
                    peaks[pid] = max(peaks.get(pid, 0), int(size) * 1024)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    print(f"\npeaks: {[f'{peak / 1e6:.0f} MB' for peak in peaks.values()]}")
    assert process.returncode == 0
    return sorted(peaks.values())


MEASURES = (
    pytest.mark.large,
    pytest.mark.xdist_group("memory"),  # one after the other
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc"),
)


def measures(test: Callable[..., None]) -> Callable[..., None]:
    for mark in MEASURES:
        test = mark(test)
    return test


@measures
@pytest.mark.parametrize(
    ("more", "size", "limit"),  # tokens take four times as long
    [([], 200_000_000, 150_000_000), (["--seq-len", 1024], 100_000_000, 200_000_000)],
    ids=["text", "tokens"],
)
def test_gigabytes_take_little_memory(
    more: list[object], size: int, limit: int, gpt2: Path, disk: Path
) -> None:
    folder = Path(tempfile.mkdtemp(dir=disk))  # memory is what is measured
    texts = tokenizer_zoo.documents(20_000, seed=3)
    with (folder / "a.jsonl").open("wb") as file:
        round = 0
        while file.tell() < size:
            lines = (json.dumps({"text": f"{round} {text}"}, ensure_ascii=False) for text in texts)
            file.write("".join(line + "\n" for line in lines).encode())
            round += 1
    more = ["--tokenizer", gpt2, *more] if more else []
    peaks = peaks_of(folder / "a.jsonl", "-o", folder / "out", *more)
    assert len(peaks) == 3
    assert peaks[-1] < limit
    with shardkit.open(folder / "out") as dataset:
        documents = dataset.manifest.text["documents"] if more else len(dataset)
    assert documents == round * len(texts)
    shutil.rmtree(folder)


@measures
@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
def test_a_line_of_64_megabytes_is_a_document(tokens: bool, gpt2: Path, tmp_path: Path) -> None:
    text = " ".join(tokenizer_zoo.documents(3000, seed=4))
    text *= 64_000_000 // len(text.encode()) + 1
    size = len(text.encode())
    source = write_corpus(tmp_path / "a.jsonl", [text, "short"])
    more = ["--tokenizer", gpt2, "--seq-len", 1024, "--remainder", "keep"] if tokens else []
    peaks = peaks_of(source, "-o", tmp_path / "out", *more, addresses=12_000_000_000)
    assert peaks[-1] < 16 * size  # about 7 as text, 13 with tokens
    if tokens:
        about = load(tmp_path / "out").text
        assert (about["documents"], about["bytes"]) == (2, size + 5)
    else:
        assert [sample["text"] for sample in samples_of(tmp_path / "out")] == [text, "short"]
