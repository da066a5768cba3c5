"""Text corpora end to end: documents, tokens and blocks in every format, whatever is asked for."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import shardkit
from shardkit import cli
from shardkit.conversion import run as engine
from shardkit.conversion.stats import Stats
from shardkit.errors import (
    FormatError,
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
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", TEXTS)


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
def test_every_format_holds_the_tokens_of_every_document(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    make(corpus, format, tmp_path / "out", {"tokenizer": gpt2})
    found = tokens_of(tmp_path / "out")
    assert found == dict(zip(line_keys(corpus), expected, strict=True))
    assert list(found) == line_keys(corpus)
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset[0]["tokens"].dtype == "<u2"
        assert dataset.lengths("tokens").tolist() == [len(ids) for ids in expected]
    assert shardkit.verify(tmp_path / "out", against=corpus).problems == []


@pytest.mark.parametrize("format", few(BLOCK_FORMATS, "wds"))
def test_every_format_holds_the_blocks_of_every_packing(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    for pack, remainder in PACKS:
        out = tmp_path / f"{pack}-{remainder}"
        options = {"tokenizer": gpt2, "seq_len": 96, "pack": pack, "remainder": remainder}
        result = make(corpus, format, out, options).splits[""]
        wanted = packed(expected, 96, pack, remainder)
        assert blocks_of(out) == wanted.blocks
        assert [s["__key__"] for s in samples_of(out)] == [
            f"000000/{n:08d}" for n in range(len(wanted.blocks))
        ]
        assert {name: result.text[name] for name in ("padding", "dropped", "cut")} == {
            "padding": wanted.padding,
            "dropped": wanted.dropped,
            "cut": wanted.cut,
        }
        with shardkit.open(out) as dataset:
            for name, at in (("tokens", 0), ("doc_ends", 1)):
                lengths = [len(block[at]) for block in wanted.blocks]
                assert dataset.lengths(name).tolist() == lengths
            assert dataset.schema["tokens"].shape == (None if remainder == "keep" else 96,)
        if remainder == "keep":
            assert shardkit.verify(out, against=corpus).problems == []


@pytest.mark.parametrize("format", few(TEXT_FORMATS))
def test_without_a_tokenizer_every_format_holds_the_text(
    format: str, corpus: Path, tmp_path: Path
) -> None:
    result = make(corpus, format, tmp_path / "out", {"keep_fields": True})
    assert samples_of(tmp_path / "out") == [
        {"__key__": key, "text": text, "n": n}
        for n, (key, text) in enumerate(zip(line_keys(corpus), TEXTS, strict=True))
    ]
    assert result.splits[""].text == {}
    assert load(tmp_path / "out").tokenizer == {}
    assert shardkit.verify(tmp_path / "out", against=corpus).problems == []


def test_megatron_holds_neither_text_nor_blocks_and_says_so(
    corpus: Path, gpt2: Path, tmp_path: Path
) -> None:
    for options in (
        {},
        {"tokenizer": gpt2, "seq_len": 8},
        {"tokenizer": gpt2, "keep_fields": True},
    ):
        with pytest.raises(FormatError, match="one field"):
            make(corpus, "megatron", tmp_path / "out", options)
    assert os.listdir(tmp_path) == []


def test_tokens_that_begin_and_end_documents(
    corpus: Path, gpt2: Path, wordpiece: Path, tmp_path: Path
) -> None:
    def made(**options: Any) -> list[list[int]]:
        make(corpus, "arrow", tmp_path / "out", options, overwrite=True)
        return list(tokens_of(tmp_path / "out").values())

    assert made(tokenizer=gpt2, append_eos=True) == ids_of(gpt2, TEXTS)
    assert made(tokenizer=gpt2, append_eos=False) == ids_of(gpt2, TEXTS, after=())
    vocab = json.loads(wordpiece.read_text("utf-8"))["model"]["vocab"]
    end, begin, other = vocab["[EOS]"], vocab.get("[BOS]"), vocab["[SEP]"]
    assert begin is None
    assert made(tokenizer=wordpiece) == ids_of(wordpiece, TEXTS, after=[end])
    assert made(tokenizer=wordpiece, eos_token="[SEP]") == ids_of(wordpiece, TEXTS, after=[other])


def test_documents_begin_by_a_token_if_asked(corpus: Path, tmp_path: Path) -> None:
    llama = tokenizer_zoo.write_json(tmp_path / "llama", "llama3")
    identity = {
        t["content"]: t["id"] for t in tokenizer_zoo.tokenizer_json("llama3")["added_tokens"]
    }
    begin, end = identity["<|begin_of_text|>"], identity["<|end_of_text|>"]
    make(corpus, "arrow", tmp_path / "out", {"tokenizer": llama, "bos": True})
    found = list(tokens_of(tmp_path / "out").values())
    assert found == ids_of(llama, TEXTS, before=[begin], after=[end])


def test_special_tokens_in_documents_are_tokens_or_text(gpt2: Path, tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "a.jsonl", ["one<|endoftext|>two"])
    for how, specials in (("special", 1), ("text", 0)):
        options = {"tokenizer": gpt2, "special_tokens": how, "append_eos": False}
        make(source, "arrow", tmp_path / how, options)
        (found,) = tokens_of(tmp_path / how).values()
        assert found.count(EOS) == specials
        assert shardkit.verify(tmp_path / how, against=source).problems == []


@pytest.mark.parametrize(
    ("words", "dtype"), [(200, "|u1"), (256, "|u1"), (257, "<u2"), (65_536, "<u2"), (65_537, "<u4")]
)
def test_ids_take_the_smallest_type_that_holds_the_vocabulary(
    words: int, dtype: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_zoo.write_json(tmp_path / "tok", few_words(words))
    source = write_corpus(tmp_path / "a.jsonl", [f"w{words - 1} w1"])
    make(source, "arrow", tmp_path / "out", {"tokenizer": tokenizer})
    (sample,) = samples_of(tmp_path / "out")
    assert sample["tokens"].dtype.str == dtype
    assert sample["tokens"].tolist() == [words - 1, 1]
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
@pytest.mark.parametrize("format", few(["arrow", "wds"], "arrow"))
def test_c1_the_same_bytes_for_any_number_of_workers(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    options = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    found = {}
    for workers in (0, 1, 2) if format == "arrow" else (0, 2):
        out = tmp_path / f"out{workers}"
        result = make(corpus, format, out, options, shard_size="8kB", workers=workers)
        found[workers] = files_of(out)
        assert result.splits[""].text["documents"] == len(TEXTS)
    assert len({str(files) for files in found.values()}) == 1
    with shardkit.open(tmp_path / "out0") as dataset:
        assert dataset.shards > 4
        tasks = Counter(sample["__key__"].split("/")[0] for sample in dataset)
    assert len(tasks) > 2
    blocks = blocks_of(tmp_path / "out0")
    assert run_of(blocks) == joined(expected)
    short = [n for n, (tokens, _) in enumerate(blocks) if len(tokens) < 64]
    assert len(short) <= len(tasks)
    assert shardkit.verify(tmp_path / "out2", against=corpus).problems == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("format", few(SINGLE, "megatron"))
def test_c1_one_shard_of_pieces_made_by_any_number_of_workers(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    suffix = FORMATS[format].suffixes[0]
    found = []
    for workers in (0, 2):
        out = tmp_path / str(workers) / f"train{suffix}"
        out.parent.mkdir()
        plan = engine.prepare(corpus, format, out, ConvertOptions(text=TextOptions(tokenizer=gpt2)))
        assert len(plan.tasks) > 2
        make(corpus, format, out, {"tokenizer": gpt2}, workers=workers)
        assert list(tokens_of(out).values()) == expected
        assert shardkit.verify(out, against=corpus).problems == []
        found.append(files_of(out.parent))
    assert found[0] == found[1]
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
        options = {"tokenizer": tokenizer, "seq_len": 32, "pack": "nosplit"}
        plan = engine.prepare(
            corpus, "arrow", tmp_path / "out", ConvertOptions(text=TextOptions(**options))
        )
        found = []
        for threads in (1, 2, 9):
            items = plan.tasks[0].reading().items(threads, Stats())
            found.append([pickle.dumps(item.read) for item in items])
        assert found[0] == found[1] == found[2]


def test_c1_the_same_bytes_wherever_source_and_tokenizer_lie(
    corpus: Path, gpt2: Path, tmp_path: Path
) -> None:
    other = tokenizer_zoo.write_json(tmp_path / "elsewhere", "gpt2")
    moved = tmp_path / "moved" / corpus.name
    moved.parent.mkdir()
    moved.write_bytes(corpus.read_bytes())
    make(corpus, "arrow", tmp_path / "one", {"tokenizer": gpt2, "seq_len": 32})
    make(moved, "arrow", tmp_path / "two", {"tokenizer": other.parent, "seq_len": 32})
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


# --- limits, splits, shuffles ---------------------------------------------------------------------


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("limit", [1, 7, 60, 1000])
def test_a_limit_takes_the_first_documents(
    limit: int, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    make(corpus, "arrow", tmp_path / "docs", {"tokenizer": gpt2}, limit=limit, shard_size="8kB")
    assert list(tokens_of(tmp_path / "docs").values()) == expected[:limit]
    with shardkit.open(tmp_path / "docs") as dataset:
        lengths = dataset.lengths("tokens").tolist()
    assert lengths == [len(ids) for ids in expected[:limit]]
    options = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    make(corpus, "arrow", tmp_path / "blocks", options, limit=limit, shard_size="8kB")
    blocks = blocks_of(tmp_path / "blocks")
    assert run_of(blocks) == joined(expected[:limit])
    for name in ("docs", "blocks"):
        assert shardkit.verify(tmp_path / name, against=corpus).problems == []


@pytest.mark.usefixtures("small_parts")
def test_shares_are_every_document_once(
    corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    whole = dict(zip(line_keys(corpus), expected, strict=True))
    shares = {"split": "train=0.6,val=0.3,test=0.1", "shard_size": "8kB"}
    make(corpus, "arrow", tmp_path / "docs", {"tokenizer": gpt2}, **shares)
    found = {name: tokens_of(tmp_path / "docs" / name) for name in ("train", "val", "test")}
    assert Counter(itertools.chain(*found.values())) == Counter(whole.keys())
    for documents in found.values():
        assert documents == {key: ids for key, ids in whole.items() if key in documents}
        assert list(documents) == [key for key in whole if key in documents]
    options = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    make(corpus, "arrow", tmp_path / "blocks", options, **shares)
    for name, documents in found.items():
        blocks = blocks_of(tmp_path / "blocks" / name)
        assert run_of(blocks) == joined(documents.values())
    result = make(corpus, "arrow", tmp_path / "few", {"tokenizer": gpt2}, limit=4, **shares)
    assert {name: split.samples for name, split in result.splits.items()} == dict.fromkeys(found, 4)
    for name, documents in found.items():
        assert list(tokens_of(tmp_path / "few" / name)) == list(documents)[:4]
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


def test_long_files_are_not_shuffled_and_folders_of_documents_are(
    corpus: Path, gpt2: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="they cannot be shuffled") as error:
        make(corpus, "arrow", tmp_path / "out", {"tokenizer": gpt2}, shuffle=True)
    assert "without --shuffle first" in str(error.value)
    (tmp_path / "in").mkdir()
    for n, text in enumerate(TEXTS[:20]):
        (tmp_path / f"in/{n:02d}.txt").write_text(text, "utf-8", newline="")
    orders = []
    for seed in (1, 2):
        out = tmp_path / f"out{seed}"
        make(tmp_path / "in", "arrow", out, {"tokenizer": gpt2}, shuffle=True, seed=seed)
        found = tokens_of(out)
        plain = [text for text in TEXTS[:20] if text]  # an empty file is no document
        names = [f"{n:02d}" for n, text in enumerate(TEXTS[:20]) if text]
        assert found == dict(zip(names, ids_of(gpt2, plain), strict=True))
        orders.append(list(found))
        assert shardkit.verify(out, against=tmp_path / "in").problems == []
    assert orders[0] != orders[1] != sorted(orders[1])
    blocks = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    make(tmp_path / "in", "arrow", tmp_path / "blocks", blocks, shuffle=True, seed=1)
    run = run_of(blocks_of(tmp_path / "blocks"))
    assert run == joined(tokens_of(tmp_path / "out1").values())
    assert shardkit.verify(tmp_path / "blocks", against=tmp_path / "in").problems == []


def test_a_shuffled_dataset_comes_from_one_in_order(
    corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    make(corpus, "arrow", tmp_path / "text")
    make(tmp_path / "text", "arrow", tmp_path / "out", {"tokenizer": gpt2}, shuffle=True)
    found = list(tokens_of(tmp_path / "out").values())
    assert found != expected
    assert sorted(found) == sorted(expected)


# --- datasets as sources --------------------------------------------------------------------------


@pytest.mark.parametrize("format", few(TEXT_FORMATS))
def test_text_of_a_dataset_becomes_tokens(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    make(corpus, format, tmp_path / "text", {"keep_fields": True}, shard_samples=40)
    options = {"tokenizer": gpt2, "keep_fields": True}
    make(tmp_path / "text", "arrow", tmp_path / "kept", options, workers=0)
    for n, sample in enumerate(samples_of(tmp_path / "kept")):
        assert sample["tokens"].tolist() == expected[n]
        assert {**sample, "tokens": None} == {
            "__key__": line_keys(corpus)[n], "tokens": None, "n": n,
        }  # fmt: skip
    options = {"tokenizer": gpt2, "seq_len": 64, "pack": "nosplit"}
    make(tmp_path / "text", "arrow", tmp_path / "blocks", options)
    assert blocks_of(tmp_path / "blocks") == packed(expected, 64, "nosplit", "pad").blocks
    for name in ("kept", "blocks"):
        report = shardkit.verify(tmp_path / name, against=tmp_path / "text")
        assert report.problems == []


def by_pyarrow(path: Path, to: str, columns: dict[str, Any]) -> Path:
    table = pa.table(columns)
    if to == "parquet":
        pq.write_table(table, path / "theirs.parquet", row_group_size=30)
        return path / "theirs.parquet"
    with pa.ipc.new_file(path / "theirs.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    return path / "theirs.arrow"


@pytest.mark.parametrize("to", ["arrow", "parquet"])
@pytest.mark.parametrize(
    "kind", [pa.string(), pytest.param(pa.large_string(), marks=pytest.mark.large)]
)
def test_columns_that_others_wrote_become_tokens(
    to: str, kind: Any, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
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
        (tmp_path / "in/a").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"in/a/{n}.jpg").write_bytes(make_image(n))
        if n != 2:
            (tmp_path / f"in/a/{n}.txt").write_text(TEXTS[n], "utf-8", newline="")
    options = {"tokenizer": gpt2, "keep_fields": True}
    image = shardkit.ImageOptions(resize=4)
    make(tmp_path / "in", "arrow", tmp_path / "out", options, image=image)
    samples = samples_of(tmp_path / "out")
    assert [sample.get("tokens", np.zeros(0)).tolist() for sample in samples] == [
        ids if n != 2 else [] for n, ids in enumerate(ids_of(gpt2, TEXTS[:4]))
    ]
    for sample in samples:
        assert sample["label"] == 0
        assert sample["image"] != make_image(int(sample["__key__"][-1]))
    assert load(tmp_path / "out").images["resized"] == 4


def test_a_folder_of_images_and_a_corpus_is_one_of_images_and_says_what_it_passed_over(
    gpt2: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jpg").write_bytes(make_image())
    write_corpus(tmp_path / "in/corpus.jsonl", ["one"])
    result = make(tmp_path / "in", "arrow", tmp_path / "out")
    assert [list(sample) for sample in samples_of(tmp_path / "out")] == [["__key__", "image"]]
    assert sum(result.ignored.values()) == 1
    with pytest.raises(UsageError, match="no text field"):
        make(tmp_path / "in", "arrow", tmp_path / "x", {"tokenizer": gpt2})


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


@pytest.mark.parametrize("format", few(sorted(FORMATS)))
def test_keys_hold_the_names_of_files_in_any_script(
    format: str, gpt2: Path, tmp_path: Path
) -> None:
    source = write_corpus(tmp_path / "übung/日本 語.v2.jsonl", TEXTS[:3])
    make(tmp_path / "übung", format, tmp_path / "out", {"tokenizer": gpt2})
    assert list(tokens_of(tmp_path / "out")) == line_keys(source)
    assert shardkit.verify(tmp_path / "out", against=tmp_path / "übung").problems == []


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
@pytest.mark.parametrize("seq_len", [pytest.param(None, marks=pytest.mark.large), 32])
def test_bad_documents_are_skipped_listed_in_order_and_the_others_packed(
    seq_len: int | None, damaged: tuple[Path, list[str], list[str]], gpt2: Path, tmp_path: Path
) -> None:
    source, texts, places = damaged
    remainder = {} if seq_len is None else {"remainder": "keep"}
    options = {"tokenizer": gpt2, "seq_len": seq_len, **remainder}
    found = []
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        result = make(
            source, "arrow", out, options, on_error="skip", shard_size="8kB", workers=workers
        )
        assert result.errors == len(BAD_LINES)
        found.append(files_of(out))
    assert found[0] == found[1]
    lines = [json.loads(line) for line in found[0]["__shardkit__/errors.jsonl"].splitlines()]
    assert [line["source"] for line in lines] == places
    for line, what in zip(lines, BAD_LINES.values(), strict=True):
        assert line["what"].startswith(what)
        assert line["offset"] >= int(line["source"].split()[-1])
    run = [token for s in samples_of(tmp_path / "out0") for token in s["tokens"].tolist()]
    assert run == joined(ids_of(gpt2, texts))
    report = shardkit.verify(tmp_path / "out0", against=source)
    assert report.problems == []
    assert any(f"{len(BAD_LINES)} samples of the source dropped" in note for note in report.notes)


def test_too_many_bad_documents_stop_the_run(
    damaged: tuple[Path, list[str], list[str]], gpt2: Path, tmp_path: Path
) -> None:
    options = {"tokenizer": gpt2, "seq_len": 32}
    with pytest.raises(SourceError, match=f"more than {len(BAD_LINES) - 1} samples are bad"):
        make(damaged[0], "arrow", tmp_path / "out", options, on_error="skip",
             max_errors=len(BAD_LINES) - 1)  # fmt: skip
    assert not (tmp_path / "out").exists()
    make(damaged[0], "arrow", tmp_path / "out", options, on_error="skip", max_errors=len(BAD_LINES))


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
        result = make(tmp_path / "in", "arrow", out, options, on_error="skip")
        assert (result.samples, result.errors) == (0, 3)
        assert samples_of(out) == []
        assert shardkit.verify(out, against=tmp_path / "in").problems == []


def _latin(root: Path) -> None:
    (root / "in").mkdir()
    (root / "in/a.txt").write_bytes(b"plain")
    (root / "in/b.txt").write_bytes("voilà".encode("latin-1"))


def _cut(root: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    data = compress(lines * 8)
    (root / f"in.jsonl.{suffix}").write_bytes(data[: len(data) * 3 // 4])


# What is wrong, how to make it, more of the command, exit code, what is said.
BAD_INPUT: dict[str, tuple[Callable[[Path], Any], str, int, list[str]]] = {
    "broken JSON": (
        lambda r: write_lines(r / "in.jsonl", ['{"text": "good"}', '{"text": "b']),
        "in.jsonl", 1, ["a line is not JSON", "byte 26", "--on-error skip"],
    ),
    "missing field": (
        lambda r: write_lines(r / "in.jsonl", ['{"text": "good"}', '{"body": "b"}']),
        "in.jsonl", 1, ["the document has no text", "byte 17", "no such field, but body"],
    ),
    "no such field anywhere": (
        lambda r: write_lines(r / "in.jsonl", ['{"a": "good", "b": "more"}']),
        "in.jsonl", 1, ["no field 'text'", "a (Text), b (Text)", "--text-field NAME"],
    ),
    "a number as text": (
        lambda r: write_lines(r / "in.jsonl", ['{"text": "good"}', '{"text": 3}']),
        "in.jsonl", 1, ["the document has no text", "found: int 3"],
    ),
    "NUL bytes": (
        lambda r: (r / "in.txt").write_bytes(b"good\na\0b\n"),
        "in.txt", 1, ["a NUL character", "byte 6"],
    ),
    "NUL bytes in JSON": (
        lambda r: (r / "in.jsonl").write_bytes(b'{"text": "good"}\n{"text": "a\0b"}\n'),
        "in.jsonl", 1, ["a line is not JSON", "byte 28"],
    ),
    "Latin-1 among UTF-8": (_latin, "in", 1, ["b.txt", "byte 4", "--encoding latin-1"]),
    "a .gz cut short": (
        lambda r: _cut(r, "gz", gzip.compress),
        "in.jsonl.gz", 1, ["the compressed file is damaged", "it is truncated"],
    ),
    "a .zst cut short": (
        lambda r: _cut(r, "zst", zstandard.compress),
        "in.jsonl.zst", 1, ["the compressed file is damaged", "it is truncated"],
    ),
    "an empty file": (
        lambda r: (r / "in.jsonl").touch(), "in.jsonl", 1, ["no documents", "empty file"],
    ),
    "blank lines": (
        lambda r: (r / "in.jsonl").write_text("\n \n"), "in.jsonl", 1, ["no documents"],
    ),
    "an empty folder": (lambda r: (r / "in").mkdir(), "in", 1, ["there are no images"]),
    "a missing file": (lambda r: None, "in.jsonl", 2, ["there is no such file", "in.jsonl"]),
    "a table of JSON": (
        lambda r: (r / "in.json").write_text('[\n{"text": "a"}\n]\n'),
        "in.json", 1, ["a single JSON array, not JSON Lines", "jq -c"],
    ),
}  # fmt: skip


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of the command; what would be a traceback is raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["shardkit", *map(str, words)])
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as end:
            cli.main()
    shown = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, shown.out, shown.err


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_one_clear_message(
    what: str,
    tokens: bool,
    gpt2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare, source, code, says = BAD_INPUT[what]
    prepare(tmp_path)
    more = ["--tokenizer", gpt2, "--seq-len", 8] if tokens else []
    words = ["convert", source, "--to", "arrow", "-o", "out", "--workers", 0, "--quiet", *more]
    found, out, err = command(capsys, *words)
    assert (found, out) == (code, "")
    for part in says:
        assert part in err
    assert err.count("shardkit: ") == 1
    assert not (tmp_path / "out").exists()
    found, out, _ = command(capsys, *words, "--json")
    assert found == code
    assert says[0] in json.dumps(json.loads(out))


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
    ([*T, "-o", "out.beton", "--to", "beton", "--shard-size", "1MB"], 2, "cannot be limited"),
]


@pytest.mark.parametrize(
    ("more", "code", "says"), BAD_OPTIONS, ids=[" ".join(map(str, o)) for o, *_ in BAD_OPTIONS]
)
def test_options_that_contradict_each_other_or_the_source_are_refused(
    more: list[object],
    code: int,
    says: str,
    corpus: Path,
    gpt2: Path,
    no_end: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / corpus.name).write_bytes(corpus.read_bytes())
    (tmp_path / "empty.json").touch()
    paths = {"TOKENIZER": gpt2, "NO_END": no_end}
    more = [paths.get(str(word), word) for word in more]
    before = files_of(tmp_path)
    words = ["convert", corpus.name, "--to", "arrow", "--workers", 0, "--quiet", *more]
    for plan in ([], ["--plan"]):
        found, out, err = command(capsys, *words, *plan)
        assert (found, out) == (code, "")
        assert says in err
    assert files_of(tmp_path) == before


# --- what a run says ------------------------------------------------------------------------------


@pytest.mark.parametrize(("pack", "remainder"), PACKS)
def test_the_summary_has_the_true_numbers(
    pack: str,
    remainder: str,
    corpus: Path,
    gpt2: Path,
    expected: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--tokenizer", gpt2, "--seq-len", 64, "--pack", pack, "--remainder", remainder]
    words = ["convert", corpus, "--to", "arrow", "-o", tmp_path / "out", "--workers", 0, *words]
    code, out, _ = command(capsys, *words)
    assert code == 0
    wanted = packed(expected, 64, pack, remainder)
    tokens = sum(map(len, expected))
    size = sum(len(text.encode()) for text in TEXTS)
    lengths = sorted(map(len, expected))
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line}
    assert rows["documents"].startswith(f"{len(TEXTS):,}; {lengths[0]:,} / ")
    assert rows["documents"].endswith(f"/ {lengths[-1]:,} tokens (min / median / max)")
    assert rows["all"].startswith(f"tokens {tokens:,}; {size / tokens:.2f} bytes of text in each; ")
    assert rows["all"].endswith("/s")
    stored = sum(len(block) for block, _ in wanted.blocks)
    share = f"{wanted.padding:,} tokens, {wanted.padding / stored:.2%} of all"
    assert rows.get("padding", "0 tokens, 0.00% of all") == share
    dropped = f"{wanted.dropped:,} tokens, {wanted.dropped / tokens:.2%} of all"
    assert rows.get("dropped", "0 tokens, 0.00% of all") == dropped
    assert rows["cut"].startswith(f"{wanted.cut:,} documents in more")
    code, out, _ = command(capsys, *words, "--json")
    report = json.loads(out)
    assert report["already_complete"]
    assert report["samples"] == len(wanted.blocks)
    text = report["splits"][""]["text"]
    assert {
        name: text[name] for name in ("documents", "tokens", "bytes", "padding", "dropped")
    } == {
        "documents": len(TEXTS),
        "tokens": tokens,
        "bytes": size,
        "padding": wanted.padding,
        "dropped": wanted.dropped,
    }
    powers = Counter(1 << (n.bit_length() - 1) for n in lengths)
    assert {int(start): count for start, count in text["histogram"].items()} == powers


@pytest.mark.usefixtures("small_parts")
def test_the_numbers_of_many_tasks_are_those_of_one(
    corpus: Path, gpt2: Path, tmp_path: Path
) -> None:
    options = {"tokenizer": gpt2}
    whole = make(corpus, "arrow", tmp_path / "one", options).splits[""]
    many = make(corpus, "arrow", tmp_path / "many", options, shard_size="8kB").splits[""]
    assert many.shards > 4
    assert many.text == whole.text
    lengths = [np.load(tmp_path / name / "__shardkit__/lengths.npy") for name in ("one", "many")]
    assert lengths[0].tolist() == lengths[1].tolist()


def test_inspect_has_tokenizer_documents_and_a_histogram(
    corpus: Path,
    gpt2: Path,
    expected: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"tokenizer": gpt2, "seq_len": 64, "pack": "nosplit", "remainder": "keep"}
    make(corpus, "arrow", tmp_path / "out", options, shard_size="16kB")
    blocks = blocks_of(tmp_path / "out")
    code, out, _ = command(capsys, "inspect", tmp_path / "out", "--json", "--full")
    report = json.loads(out)
    assert code == 0
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
    _, out, _ = command(capsys, "inspect", tmp_path / "out")
    for words in ("vocab_size", "Documents", "Histogram: tokens of a document", "#"):
        assert words in out
    shard = load(tmp_path / "out").shards[1]
    one = inspect(tmp_path / "out" / shard.file.name)
    assert one["samples"] == shard.samples
    assert one["text"] == {}
    assert sum(one["lengths"]["tokens"]["histogram"].values()) == shard.samples


@pytest.mark.usefixtures("small_parts")
def test_a_plan_says_what_would_be_done_and_touches_nothing(
    corpus: Path, gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", corpus, "--to", "arrow", "-o", tmp_path / "out", "--plan", "--workers", 0]
    words += ["--tokenizer", gpt2, "--seq-len", 64, "--shard-size", "16kB"]
    code, out, _ = command(capsys, *words)
    assert code == 0
    for part in ("of documents: tokens, doc_ends", "tokenizer=tokenizer.json", "seq_len=64"):
        assert part in out
    code, out, _ = command(capsys, *words, "--json")
    about = json.loads(out)
    assert about["samples"] is None
    assert about["bytes"] == corpus.stat().st_size
    assert about["tasks"] > 1
    assert list(about["parts"][0]["schema"]) == ["tokens", "doc_ends"]
    code, out, _ = command(capsys, *words, "--json", "--limit", 9)
    assert json.loads(out)["samples"] == 9
    assert os.listdir(tmp_path) == []


# --- runs that go on ------------------------------------------------------------------------------


def test_a_finished_dataset_is_known_again(corpus: Path, gpt2: Path, tmp_path: Path) -> None:
    options = {"tokenizer": gpt2, "seq_len": 64}
    first = make(corpus, "arrow", tmp_path / "out", options)
    again = make(corpus, "arrow", tmp_path / "out", {**options, "tokenizer": gpt2.parent})
    assert again.already_complete
    assert again.splits == first.splits


@pytest.mark.usefixtures("small_parts")
def test_an_unfinished_run_goes_on_only_with_the_same_options(
    damaged: tuple[Path, list[str], list[str]],
    gpt2: Path,
    wordpiece: Path,
    tmp_path: Path,
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
        ({"tokenizer": wordpiece}, "the tokenizer's file tokenizer.json has changed"),
        ({"tokenizer": None, "seq_len": None}, "tokenizer was"),
    ]
    for change, words in changes:
        with pytest.raises(OutputError, match="unfinished conversion") as error:
            make(source, "arrow", out, {**options, **change}, shard_size="8kB")
        assert words in str(error.value)
        assert "its own options and unchanged files" in str(error.value.fix)
    again = {"shard_size": "8kB", "on_error": "skip"}
    make(source, "arrow", tmp_path / "whole", options, **again)
    make(source, "arrow", out, options, workers=2, **again)
    assert files_of(out) == files_of(tmp_path / "whole")
    for change, words in changes:
        with pytest.raises(OutputError, match="holds another dataset") as error:
            make(source, "arrow", out, {**options, **change}, **again)
        assert words in str(error.value)


def test_a_tokenizer_that_changed_begins_no_run_in_the_old_ones_place(
    corpus: Path, tmp_path: Path
) -> None:
    path = tokenizer_zoo.write_json(tmp_path / "tok", "gpt2")
    make(corpus, "arrow", tmp_path / "out", {"tokenizer": path})
    changed = tokenizer_zoo.tokenizer_json("gpt2")
    changed["added_tokens"][0]["content"] = "<|other|>"
    tokenizer_zoo.write_json(tmp_path / "tok", changed)
    with pytest.raises(OutputError, match="another dataset") as error:
        make(corpus, "arrow", tmp_path / "out", {"tokenizer": path})
    assert error.value.found == "the tokenizer's file tokenizer.json has changed"


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


def test_the_output_lies_outside_of_the_source(corpus: Path, gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("text", "utf-8")
    with pytest.raises(OutputError, match="must not contain each other"):
        make(tmp_path / "in", "arrow", tmp_path / "in/out", {"tokenizer": gpt2})
    assert os.listdir(tmp_path / "in") == ["a.txt"]
    make(tmp_path / "in", "arrow", None, {"tokenizer": gpt2})  # type: ignore[arg-type]
    assert len(samples_of(tmp_path / "in-arrow")) == 1


# --- verify and what comes after ------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [None, 64])
@pytest.mark.parametrize("format", few(BLOCK_FORMATS))
def test_verify_finds_a_document_that_is_not_that_of_the_source(
    format: str, seq_len: int | None, gpt2: Path, tmp_path: Path
) -> None:
    texts = [f"document {n} says so" for n in range(30)]
    source = write_corpus(tmp_path / "a.jsonl", texts)
    make(source, format, tmp_path / "out", {"tokenizer": gpt2, "seq_len": seq_len})
    assert shardkit.verify(tmp_path / "out", against=source).sound
    write_corpus(source, [*texts[:20], texts[20].replace("says", "asks"), *texts[21:]])
    report = shardkit.verify(tmp_path / "out", against=source)
    assert {problem.what for problem in report.problems} <= {
        "a value differs from the source",
        "a value is missing in the source",
    }
    named = [problem for problem in report.problems if problem.where["field"] == "tokens"]
    if seq_len is None:
        assert [problem.where["key"] for problem in named] == [line_keys(source)[20]]
    else:
        assert named
    write_corpus(source, texts[:-1])
    report = shardkit.verify(tmp_path / "out", against=source)
    assert not report.sound


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


@pytest.mark.parametrize("format", few(sorted(FORMATS)))
def test_lengths_are_those_of_the_arrays(
    format: str, corpus: Path, gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    make(corpus, format, tmp_path / "out", {"tokenizer": gpt2}, shard_samples=30)
    manifest = load(tmp_path / "out")
    kept = np.load(tmp_path / "out/__shardkit__/lengths.npy", mmap_mode="r")
    assert kept["tokens"].tolist() == [len(ids) for ids in expected]
    with shardkit.open(tmp_path / "out" / manifest.shards[1].file.name) as shard:
        assert shard.lengths("tokens").tolist() == [len(s["tokens"]) for s in shard]
    assert shardkit.verify(tmp_path / "out/" / manifest.shards[1].file.name).problems == []
    with shardkit.open(tmp_path / "out") as dataset:
        for field in ("__key__", "text"):
            with pytest.raises(UsageError, match="one-dimensional arrays"):
                dataset.lengths(field)
    if format == "lance":  # whose shards are no datasets without it
        return
    (tmp_path / "out/__shardkit__/manifest.json").unlink()  # as if others had made it
    with shardkit.open(tmp_path / "out" / manifest.shards[0].file.name) as shard:
        assert shard.manifest is None
        (name,) = shard.schema
        assert shard.lengths(name).tolist() == [len(ids) for ids in expected[:30]]


# --- odd corpora ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", few(BLOCK_FORMATS))
def test_blocks_of_one_token_and_of_more_than_there_are(
    format: str, gpt2: Path, tmp_path: Path
) -> None:
    texts = ["one two", "", "three"]
    source, ids = write_corpus(tmp_path / "a.jsonl", texts), ids_of(gpt2, texts)
    for seq_len in (1, 70_000):
        for pack, remainder in PACKS[::2]:
            out = tmp_path / f"{seq_len}-{pack}-{remainder}"
            options = {"tokenizer": gpt2, "seq_len": seq_len, "pack": pack, "remainder": remainder}
            make(source, format, out, options)
            assert blocks_of(out) == packed(ids, seq_len, pack, remainder).blocks
            assert shardkit.verify(out, against=source).problems == []
    (sample,) = samples_of(tmp_path / "70000-concat-pad")
    assert sample["doc_ends"].dtype == "<u4"


@pytest.mark.parametrize("format", few(sorted(FORMATS)))
def test_documents_without_tokens(format: str, gpt2: Path, tmp_path: Path) -> None:
    for texts in ([""], ["", "a", "", ""]):
        source = write_corpus(tmp_path / f"{len(texts)}.jsonl", texts)
        for after in ((EOS,), ()):
            out = tmp_path / f"{len(texts)}-{len(after)}"
            options = {"tokenizer": gpt2, "append_eos": bool(after)}
            make(source, format, out, options)
            ids = ids_of(gpt2, texts, after=after)
            assert list(tokens_of(out).values()) == ids
            assert shardkit.verify(out, against=source).problems == []
            for pack, remainder in PACKS[2::4] if format in BLOCK_FORMATS else []:
                blocks = tmp_path / f"{out.name}-{pack}-{remainder}"
                fill = {"seq_len": 4, "pack": pack, "remainder": remainder}
                result = make(source, format, blocks, {**options, **fill})
                assert blocks_of(blocks) == packed(ids, 4, pack, remainder).blocks
                assert result.splits[""].text["documents"] == len(texts)
                inspect(blocks)


def test_every_kind_of_file_gives_the_same_tokens(
    gpt2: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    import bz2
    import csv
    import lzma

    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    table = io.StringIO()
    csv.writer(table).writerows([["n", "text"], *enumerate(TEXTS)])
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
        out = tmp_path / f"{name}-out"
        make(tmp_path / name, "arrow", out, {"tokenizer": gpt2, "encoding": encoding})
        assert list(tokens_of(out).values()) == expected, name
        assert shardkit.verify(out, against=tmp_path / name).problems == []


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


def _peaks(process: subprocess.Popen[bytes]) -> dict[int, int]:
    """The most memory in bytes that a process and each of its workers had, until it ends."""
    peaks: dict[int, int] = {}
    while process.poll() is None:
        pids = [process.pid]
        for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
            try:
                pids += map(int, task.read_text().split())
            except OSError:  # it has just ended
                continue
        for pid in pids:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            for line in status.splitlines():
                if line.startswith("VmHWM"):
                    peaks[pid] = max(peaks.get(pid, 0), int(line.split()[1]) * 1024)
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            pass
    return peaks


def converted(source: Path, out: Path, *more: object) -> tuple[int, str, list[int]]:
    """Exit code and errors of a run with two workers, and the peaks of its processes."""
    words = ["convert", source, "--to", "arrow", "-o", out, "--workers", 2, "--quiet", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "shardkit", *map(str, words)], stderr=subprocess.PIPE
    )
    peaks = _peaks(process)
    _, stderr = process.communicate()
    return process.returncode, stderr.decode(), sorted(peaks.values())


@pytest.mark.large
@pytest.mark.xdist_group("memory")  # one after the other
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("tokens", "size", "limit"),  # tokens take four times as long
    [(False, 400_000_000, 250_000_000), (True, 200_000_000, 200_000_000)],
    ids=["text", "tokens"],
)
def test_gigabytes_take_little_memory(
    tokens: bool, size: int, limit: int, gpt2: Path, disk: Path
) -> None:
    tmp_path = Path(tempfile.mkdtemp(dir=disk))  # memory is what is measured
    texts = tokenizer_zoo.documents(20_000, seed=3)
    with (tmp_path / "a.jsonl").open("wb") as file:
        round = 0
        while file.tell() < size:
            lines = (json.dumps({"text": f"{round} {text}"}, ensure_ascii=False) for text in texts)
            file.write("".join(line + "\n" for line in lines).encode())
            round += 1
    more = ["--tokenizer", gpt2, "--seq-len", 1024] if tokens else []
    code, stderr, peaks = converted(tmp_path / "a.jsonl", tmp_path / "out", *more)
    print(f"\npeaks: {[f'{peak / 1e6:.0f} MB' for peak in peaks]}")
    assert (code, stderr) == (0, "")
    assert len(peaks) == 3
    assert peaks[-1] < limit
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset.manifest is not None
        documents = dataset.manifest.text["documents"] if tokens else len(dataset)
    assert documents == round * len(texts)
    shutil.rmtree(tmp_path)


@pytest.mark.large
@pytest.mark.xdist_group("memory")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
def test_a_line_of_200_megabytes_is_a_document(tokens: bool, gpt2: Path, tmp_path: Path) -> None:
    import resource

    text = " ".join(tokenizer_zoo.documents(3000, seed=4))
    line = {"text": text * (200_000_000 // len(text.encode()) + 1)}
    source = write_lines(tmp_path / "a.jsonl", [line, {"text": "short"}])
    size = len(line["text"].encode())
    more = ["--tokenizer", gpt2, "--seq-len", 1024, "--remainder", "keep"] if tokens else []
    words = ["convert", source, "--to", "arrow", "-o", tmp_path / "out", "--workers", 2, *more]
    limit = 12_000_000_000  # of addresses: what is far too much must not end the machine
    process = subprocess.Popen([sys.executable, "-m", "shardkit", *map(str, words), "--quiet"])
    resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
    peaks = _peaks(process)
    print(f"\n{size:,} bytes, peaks: {[f'{peak / 1e6:.0f} MB' for peak in peaks.values()]}")
    assert process.returncode == 0
    assert max(peaks.values()) < 16 * size  # about 7 as text, 13 with tokens
    if not tokens:
        first, second = samples_of(tmp_path / "out")
        assert first["text"] == line["text"]
        assert second["text"] == "short"
    else:
        assert load(tmp_path / "out").text["documents"] == 2
        assert load(tmp_path / "out").text["bytes"] == size + 5
