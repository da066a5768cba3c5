"""Text corpora end to end: documents, tokens and blocks in every format, whatever is asked for."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from tokenizers import Tokenizer

import shardkit
from shardkit.conversion import run as engine
from shardkit.errors import OutputError, SampleError, ShardkitError, SourceError, UsageError
from shardkit.formats import FORMATS
from shardkit.inspection.inspect import inspect
from shardkit.metadata.manifest import load
from shardkit.options import PACKINGS, REMAINDERS, ConvertOptions, TextOptions
from shardkit.preprocess.packing import PACKERS
from shardkit.sources.text import scan
from shardkit.testing import make_image
from tests.codecs import tokenizer_zoo
from tests.conftest import IMAGE_FORMATS, few, files_of
from tests.conversion.text_corpora import few_words, prose, write_corpus, write_lines
from tests.sources.test_text import put
from tests.test_cli import run

# Every way to fill blocks that makes sense.
PACKS = [
    (p, r) for p, r in itertools.product(PACKINGS, REMAINDERS) if (p == "concat") >= (r == "drop")
]
TEXTS = prose(80)
SINGLE = sorted(name for name in FORMATS if FORMATS[name].single)
EOS = 0  # of the zoo's gpt2


def line_keys(path):
    """The keys of the documents in a file of lines: where each begins."""
    starts, start = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        if line.strip():
            starts.append(f"{path.name}/{start}")
        start += len(line)
    return starts


def ids_of(tokenizer, texts, before=(), after=(EOS,)):
    """The ids of documents by the `tokenizers` library, with those that begin and end them."""
    opened = Tokenizer.from_file(str(tokenizer))
    return [[*before, *opened.encode(text, add_special_tokens=False).ids, *after] for text in texts]


def packed(documents, seq_len, pack, remainder, pad_id=EOS):
    """What one task should make, by the packers that tests/preprocess/test_packing.py proves."""
    packer = PACKERS[pack](seq_len, remainder, pad_id)
    made = [block for ids in documents for block in packer.add(np.array(ids, "<u2"))]
    blocks = [(b.tokens.tolist(), b.doc_ends.tolist()) for b in [*made, *packer.finish()]]
    counts = {name: packer.counts[name] for name in ("padding", "dropped", "cut")}
    return SimpleNamespace(blocks=blocks, **counts)


def make(source, to, out, text=None, sound=True, **options):
    """Convert in this process, and compare with the source; `text` are TextOptions by name."""
    options = {"workers": 0, **options}
    result = shardkit.convert(source, to, out, text=TextOptions(**(text or {})), **options)
    assert not sound or shardkit.verify(out, against=source).problems == []
    return result


def samples_of(path):
    with shardkit.open(path) as dataset:
        return list(dataset)


def blocks_of(path):
    return [(s["tokens"].tolist(), s["doc_ends"].tolist()) for s in samples_of(path)]


def tokens_of(path):
    """Tokens by key, in order."""
    return {sample["__key__"]: sample["tokens"].tolist() for sample in samples_of(path)}


def joined(documents):
    return [token for document in documents for token in document]


def run_of(blocks):
    """The tokens of blocks that are not padded, one after the other."""
    return joined(tokens for tokens, _ in blocks)


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory):
    """A tokenizer with [EOS] and [PAD], which no fast engine does."""
    return tokenizer_zoo.write_json(tmp_path_factory.mktemp("wordpiece"), "wordpiece")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Of a name in several scripts, which keys hold."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "übung 日本 語.v2.jsonl", TEXTS)


@pytest.fixture(scope="session")
def expected(gpt2):
    return ids_of(gpt2, TEXTS)


def powers_of(lengths):
    """A histogram: how many have so many bits."""
    return Counter(1 << (length.bit_length() - 1) for length in lengths)


@pytest.fixture
def small_parts(monkeypatch):
    """Files in parts of 4 kB, and an only shard in pieces: both are decided in planning alone."""
    monkeypatch.setattr(scan, "RANGE", 4096)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 8_000)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_BLOCKS", 8)


@pytest.mark.parametrize("format", few(sorted(FORMATS)))
def test_every_format_holds_tokens_and_their_lengths(format, corpus, gpt2, expected, tmp_path):
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
    first, second = (tmp_path / "out" / s.file.name for s in load(tmp_path / "out").shards[:2])
    assert shardkit.open(second).lengths("tokens").tolist() == lengths[30:60]
    assert shardkit.verify(second).problems == []
    if format == "lance":  # whose shards are no datasets without it
        return
    (tmp_path / "out/__shardkit__/manifest.json").unlink()  # as if others had made it
    with shardkit.open(first) as shard:
        assert shard.manifest is None
        (name,) = shard.schema
        assert shard.lengths(name).tolist() == lengths[:30]


@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "wds"))
def test_every_format_holds_the_blocks_of_packings(format, corpus, gpt2, expected, tmp_path):
    packs = PACKS if format == "wds" else [("concat", "pad"), ("nosplit", "keep")]
    for pack, remainder in packs:
        out = tmp_path / f"{pack}-{remainder}"
        options = {"tokenizer": gpt2, "seq_len": 96, "pack": pack, "remainder": remainder}
        text = make(corpus, format, out, options).splits[""].text
        wanted = packed(expected, 96, pack, remainder)
        assert blocks_of(out) == wanted.blocks
        keys = [f"000000/{n:08d}" for n in range(len(wanted.blocks))]
        assert [s["__key__"] for s in samples_of(out)] == keys
        assert all(text[name] == getattr(wanted, name) for name in ("padding", "dropped", "cut"))
        with shardkit.open(out) as dataset:
            for name, at in (("tokens", 0), ("doc_ends", 1)):
                lengths = [len(block[at]) for block in wanted.blocks]
                assert dataset.lengths(name).tolist() == lengths
            assert dataset.schema["tokens"].shape == (None if remainder == "keep" else 96,)


@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "wds"))
def test_every_format_holds_text_that_becomes_tokens(format, corpus, gpt2, expected, tmp_path):
    keys, text = line_keys(corpus), tmp_path / "text"
    result = make(corpus, format, text, {"keep_fields": True}, shard_samples=40)
    assert samples_of(text) == [
        {"__key__": key, "text": TEXTS[n], "n": n} for n, key in enumerate(keys)
    ]
    assert result.splits[""].text == {}
    assert load(text).tokenizer == {}
    make(text, "arrow", tmp_path / "kept", {"tokenizer": gpt2, "keep_fields": True})
    for n, sample in enumerate(samples_of(tmp_path / "kept")):
        assert sample.pop("tokens").tolist() == expected[n]
        assert sample == {"__key__": keys[n], "n": n}
    options = {"tokenizer": gpt2, "seq_len": 64, "pack": "nosplit"}
    make(text, "arrow", tmp_path / "blocks", options)
    assert blocks_of(tmp_path / "blocks") == packed(expected, 64, "nosplit", "pad").blocks


def test_tokens_that_begin_and_end_documents_or_lie_in_them(gpt2, wordpiece, tmp_path):
    texts = [*TEXTS[:5], "one<|endoftext|>two"]
    source = write_corpus(tmp_path / "a.jsonl", texts)
    llama = tokenizer_zoo.write_json(tmp_path / "llama", "llama3")
    vocab = json.loads(wordpiece.read_text("utf-8"))["model"]["vocab"]
    added = tokenizer_zoo.tokenizer_json("llama3")["added_tokens"]
    vocab |= {token["content"]: token["id"] for token in added}
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
    for how, specials in (("special", 1), ("text", 0)):
        text = {"tokenizer": gpt2, "special_tokens": how, "append_eos": False}
        make(source, "arrow", tmp_path / how, text)
        assert [*tokens_of(tmp_path / how).values()][-1].count(EOS) == specials


def test_the_tokenizer_is_in_the_manifest_and_beside_it(corpus, gpt2, wordpiece, tmp_path):
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


def test_c1_the_same_bytes_for_any_number_of_workers(corpus, gpt2, expected, tmp_path, small_parts):
    options = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        result = make(corpus, "arrow", out, options, shard_size="8kB", workers=workers)
        text = result.splits[""].text  # of all tasks
        assert text["documents"] == len(TEXTS)
        assert text["tokens"] == sum(map(len, expected))
        found = {int(start): count for start, count in text["histogram"].items()}
        assert found == powers_of(map(len, expected))
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out2")
    with shardkit.open(tmp_path / "out0") as dataset:
        assert dataset.shards > 4
        tasks = {sample["__key__"].split("/")[0] for sample in dataset}
    assert len(tasks) > 2
    blocks = blocks_of(tmp_path / "out0")
    assert run_of(blocks) == joined(expected)
    assert sum(len(tokens) < 64 for tokens, _ in blocks) <= len(tasks)


@pytest.mark.parametrize("format", few(SINGLE, "megatron"))
def test_c1_one_shard_of_pieces_by_any_workers(
    format, corpus, gpt2, expected, tmp_path, small_parts
):
    """How pieces become one shard differs by format, and not by who made them."""
    suffix = FORMATS[format].suffixes[0]
    options = ConvertOptions(text=TextOptions(tokenizer=gpt2))
    assert len(engine.prepare(corpus, format, tmp_path / "x", options).tasks) > 2
    found = []
    for workers in (0, 2) if format == "megatron" else (0,):
        out = tmp_path / str(workers) / f"train{suffix}"
        out.parent.mkdir()
        make(corpus, format, out, {"tokenizer": gpt2}, workers=workers)
        found.append(files_of(out.parent))
    assert found[0] == found[-1]
    assert list(tokens_of(out).values()) == expected
    assert f"__shardkit__/train{suffix}.tokenizer.json" in found[0]


def test_blocks_of_another_version_are_not_called_damaged(corpus, gpt2, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.conversion.plan.Plan.versions", {"shardkit": "0.1.0"})
        for name, seq_len in (("blocks", 32), ("documents", None)):
            text = {"tokenizer": gpt2, "seq_len": seq_len}
            make(corpus, "arrow", tmp_path / name, text, sound=False)
    assert shardkit.verify(tmp_path / "blocks").sound
    assert shardkit.verify(tmp_path / "documents", against=corpus).sound
    with pytest.raises(UsageError, match="an earlier shardkit"):
        shardkit.verify(tmp_path / "blocks", against=corpus)


def test_c1_the_same_bytes_wherever_source_and_tokenizer_lie(corpus, gpt2, tmp_path):
    other = tokenizer_zoo.write_json(tmp_path / "elsewhere", "gpt2")
    moved = shutil.copy(corpus, tmp_path / corpus.name)
    make(corpus, "arrow", tmp_path / "one", {"tokenizer": gpt2, "seq_len": 32})
    blocks = {"tokenizer": other.parent, "seq_len": 32}
    first = make(moved, "arrow", tmp_path / "two", blocks)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    again = make(moved, "arrow", tmp_path / "two", {**blocks, "tokenizer": gpt2})
    assert (again.already_complete, again.splits) == (True, first.splits)


@pytest.mark.parametrize("limit", [1, 60, 1000])
def test_a_limit_takes_the_first_documents(limit, corpus, gpt2, expected, tmp_path, small_parts):
    more = {"limit": limit, "shard_size": "8kB"}
    make(corpus, "arrow", tmp_path / "docs", {"tokenizer": gpt2}, **more)
    assert list(tokens_of(tmp_path / "docs").values()) == expected[:limit]
    with shardkit.open(tmp_path / "docs") as dataset:
        assert dataset.lengths("tokens").tolist() == [len(ids) for ids in expected[:limit]]
    blocks = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    make(corpus, "arrow", tmp_path / "blocks", blocks, **more)
    assert run_of(blocks_of(tmp_path / "blocks")) == joined(expected[:limit])


def test_shares_are_every_document_once(corpus, gpt2, expected, tmp_path, small_parts):
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
        assert (tmp_path / "docs" / name / "__shardkit__/tokenizer.json").is_file()


def test_long_files_are_not_shuffled_and_what_has_samples_is(corpus, gpt2, expected, tmp_path):
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
    orders, wanted = [], dict(zip(texts, ids_of(gpt2, texts.values()), strict=True))
    for seed in (1, 2):
        out = tmp_path / f"out{seed}"
        make(tmp_path / "in", "arrow", out, {"tokenizer": gpt2}, shuffle=True, seed=seed)
        documents = tokens_of(out)
        assert documents == wanted
        orders.append(list(documents))
    assert orders[0] != orders[1] != sorted(orders[1])
    blocks = {"tokenizer": gpt2, "seq_len": 64, "remainder": "keep"}
    make(tmp_path / "in", "arrow", tmp_path / "blocks", blocks, shuffle=True, seed=2)
    assert run_of(blocks_of(tmp_path / "blocks")) == joined(documents.values())


def by_pyarrow(folder, to, columns, name="theirs"):
    folder.mkdir(exist_ok=True)
    table, path = pa.table(columns), folder / f"{name}.{to}"
    if to == "parquet":
        pq.write_table(table, path, row_group_size=30)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    return path


@pytest.mark.parametrize("to", ["arrow", "parquet"])
def test_columns_that_others_wrote_become_tokens(to, gpt2, expected, tmp_path):
    kind = pa.string() if to == "arrow" else pa.large_string()
    columns = {"body": pa.array(TEXTS, kind), "n": pa.array(range(len(TEXTS)))}
    source = by_pyarrow(tmp_path, to, columns)
    make(source, "wds", tmp_path / "out", {"tokenizer": gpt2, "keep_fields": True})
    samples = samples_of(tmp_path / "out")
    assert [sample["tokens"].tolist() for sample in samples] == expected
    assert [sample["n"] for sample in samples] == list(range(len(TEXTS)))
    make(source, "megatron", tmp_path / "mega", {"tokenizer": gpt2})
    assert list(tokens_of(tmp_path / "mega").values()) == expected


def test_samples_without_text_are_left_out_unless_other_fields_are_kept(gpt2, tmp_path):
    texts = ["one two", None, "three", None, None]
    documents = ids_of(gpt2, [text for text in texts if text])
    source = by_pyarrow(tmp_path, "parquet", {"text": texts, "n": list(range(5))})
    result = make(source, "arrow", tmp_path / "kept", {"tokenizer": gpt2, "keep_fields": True})
    samples = samples_of(tmp_path / "kept")
    assert [sample["n"] for sample in samples] == list(range(5))
    assert ["tokens" in sample for sample in samples] == [text is not None for text in texts]
    assert result.splits[""].text["documents"] == 2
    assert result.splits[""].filtered == {}
    lengths = shardkit.open(tmp_path / "kept").lengths("tokens").tolist()
    assert lengths == [len(sample.get("tokens", ())) for sample in samples]
    blocks = {"seq_len": 4, "remainder": "keep"}
    for name, options in (("arrow", {}), ("megatron", {}), ("blocks", blocks)):
        out, to = tmp_path / name, "arrow" if options else name
        result = make(source, to, out, {"tokenizer": gpt2, **options})
        assert result.splits[""].filtered == {"without text": 3}
        if options:
            assert blocks_of(out) == packed(documents, 4, "concat", "keep").blocks
        else:
            assert list(tokens_of(out).values()) == documents


def test_captions_beside_images_become_tokens(gpt2, tmp_path, out):
    for n in range(4):
        put(tmp_path / f"in/a/{n}.jpg", make_image(n))
        if n != 2:
            put(tmp_path / f"in/a/{n}.txt", TEXTS[n].encode())
    options, image = {"tokenizer": gpt2, "keep_fields": True}, shardkit.ImageOptions(resize=4)
    make(tmp_path / "in", "arrow", out, options, image=image)
    ids = ids_of(gpt2, TEXTS[:4])
    for n, sample in enumerate(samples_of(out)):
        assert sample["label"] == 0
        assert sample["image"] != make_image(n)
        assert sample["tokens"].tolist() == ids[n] if n != 2 else "tokens" not in sample
    assert load(out).images["resized"] == 4


def test_fields_get_new_names(corpus, gpt2, tmp_path):
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
    with pytest.raises(UsageError, match="no field 'text' to rename"):
        make(corpus, "arrow", tmp_path / "x", {"tokenizer": gpt2}, rename={"text": "body"})


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
def damaged(tmp_path):
    """A corpus with bad lines among the good, its good texts, and the places of the bad."""
    rows = [{"text": text} for text in TEXTS[:30]]
    for n, line in enumerate(BAD_LINES):
        rows.insert(15 + 2 * n, line)
    source = write_lines(tmp_path / "in/bad.jsonl", rows)
    places = [
        key.replace("/", ": byte ")
        for key, row in zip(line_keys(source), rows, strict=True)
        if isinstance(row, str)
    ]
    return source, TEXTS[:30], places


@pytest.mark.parametrize("options", [{}, {"seq_len": 32, "remainder": "keep"}])
def test_bad_documents_are_listed_in_order_and_the_others_packed(options, damaged, gpt2, tmp_path):
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


def test_a_corpus_of_nothing_but_bad_documents(gpt2, tmp_path):
    source = write_lines(tmp_path / "a.jsonl", ['{"text": 1}'] * 3)
    with pytest.raises(ShardkitError, match="the document has no text") as error:
        make(source, "arrow", tmp_path / "out", {"tokenizer": gpt2})
    assert all(words in str(error.value) for words in ("a.jsonl", "found: int 1"))
    for n in range(3):
        put(tmp_path / f"in/{n}.txt", b"\xff\xfe\xfd")
    for options in ({}, {"tokenizer": gpt2}, {"tokenizer": gpt2, "seq_len": 8}):
        out = tmp_path / f"skipped{len(options)}"
        with pytest.raises(SampleError, match=r"not valid UTF-8|byte order mark"):
            make(tmp_path / "in", "arrow", out, options)
        with pytest.raises(SourceError, match="no sample of the source is left") as none:
            make(tmp_path / "in", "arrow", out, options, on_error="skip", overwrite=True)
        assert "3 bad, the first, " in str(none.value.found)


GOOD = b'{"text": "good"}\n'
# What is wrong, files by name, exit code, what is said.
BAD_INPUT = {
    "broken JSON": (
        {"in.jsonl": GOOD + b'{"text": "b'},
        1, ["a line is not JSON", "byte 26", "--on-error skip"],
    ),
    "no such field anywhere": (
        {"in.jsonl": b'{"a": "good", "b": "more"}'},
        1, ["no field 'text'", "a (Text), b (Text)", "--text-field NAME"],
    ),
    "Latin-1 among UTF-8": (
        {"in/a.txt": b"plain", "in/b.txt": "voilà".encode("latin-1")},
        1, ["b.txt", "byte 4", "--encoding latin-1"],
    ),
    "blank lines": ({"in.jsonl": b"\n \n"}, 1, ["no documents"]),
    "a missing file": ({}, 2, ["there is no such file", "in.jsonl"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_one_clear_message(what, gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files, code, says = BAD_INPUT[what]
    for name, data in files.items():
        put(tmp_path / name, data)
    source = next(iter(files), "in.jsonl").split("/")[0]
    words = ["convert", source, "--to", "arrow", "-o", "out", "--workers", 0, "--quiet"]
    found = run(*words, *(["--text-field", "text"] * ("field" in what)), check=code)
    assert found.stdout == ""
    assert all(part in found.stderr for part in says), found.stderr
    assert found.stderr.count("shardkit: ") == 1
    assert not (tmp_path / "out").exists()
    found = run(*words, "--tokenizer", gpt2, "--seq-len", 8, "--json", check=code)
    assert says[0] in json.dumps(json.loads(found.stdout))


@pytest.mark.parametrize(
    ("more", "code", "says"),  # more of the command, exit code, what is said
    [
        ("--seq-len 8", 2, "--seq-len requires a tokenizer"),
        ("--bos", 2, "bos requires a tokenizer"),
        ("--append-eos", 2, "--append-eos requires a tokenizer"),
        ("--eos-token </s>", 2, "--eos-token requires a tokenizer"),
        ("--special-tokens text", 2, "--special-tokens requires a tokenizer"),
        ("--tokenizer GPT2 --pack nosplit", 2, "give --seq-len N"),
        ("--tokenizer GPT2 --remainder keep", 2, "give --seq-len N"),
        ("--tokenizer GPT2 --seq-len 8 --pack pad --remainder drop", 2, "would lose most"),
        ("--tokenizer GPT2 --seq-len 0", 2, "--seq-len must be a whole number from 1 up"),
        ("--tokenizer GPT2 --seq-len many", 2, "not a valid integer"),
        ("--tokenizer GPT2 --pack tight", 2, "'tight' is not one of"),
        ("--tokenizer GPT2 --seq-len 8 --keep-fields", 2, "cannot store their other fields"),
        ("--tokenizer GPT2 --bos", 2, "no token with which documents begin"),
        ("--tokenizer GPT2 --eos-token <nope>", 2, "not in the vocabulary"),
        ("--tokenizer NO_END --append-eos", 2, "no token with which documents end"),
        ("--tokenizer corpus.jsonl", 2, "not a tokenizer"),
        ("--tokenizer nothing.json", 2, "there is no such tokenizer"),
        ("--tokenizer empty.json", 2, "an empty file"),
        ("--tokenizer .", 2, "the folder has no tokenizer"),
        ("--encoding latin-99", 2, "there is no such encoding"),
        ("--encoding base64", 2, "there is no such encoding"),
        ("--encoding unicode_escape", 2, "not supported for text files"),
        ("--text-field body", 1, "no field 'body'"),
        ("--shuffle", 2, "they cannot be shuffled"),
        ("--resize 8", 2, "options for images"),
        ("--split train=0.5", 2, "invalid split"),
        ("--classes corpus.jsonl", 2, "a list of classes needs a folder per class"),
        ("--to megatron", 1, "one field, a one-dimensional array"),
        ("--tokenizer GPT2 --to megatron --seq-len 8", 1, "without --seq-len"),
        ("--tokenizer GPT2 -o out.beton --to beton --shard-size 1MB", 2, "cannot be limited"),
    ],
)
def test_options_that_make_no_sense_are_refused(more, code, says, gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.jsonl", TEXTS[:3])
    (tmp_path / "empty.json").touch()
    paths = {"GPT2": gpt2, "NO_END": tokenizer_zoo.write_json(tmp_path / "words", few_words(200))}
    more = [paths.get(word, word) for word in more.split()]
    before = files_of(tmp_path)
    words = ["convert", "corpus.jsonl", "--to", "arrow", "--workers", 0, "--quiet", *more]
    for plan in ([], ["--plan"]):
        found = run(*words, *plan, check=code)
        assert found.stdout == ""
        assert says in found.stderr
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(("pack", "remainder"), [("concat", "drop"), ("nosplit", "pad")])
def test_the_summary_has_the_true_numbers(pack, remainder, corpus, gpt2, expected, tmp_path):
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
    assert (report["already_complete"], report["samples"]) == (True, len(wanted.blocks))
    text = report["splits"][""]["text"]
    assert (text["documents"], text["tokens"], text["bytes"]) == (len(TEXTS), tokens, size)


def test_inspect_has_tokenizer_documents_and_a_histogram(corpus, gpt2, expected, tmp_path):
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
        found = [about[n] for n in ("shortest", "median", "longest")]
        assert found == [lengths[at] for at in (0, (len(lengths) - 1) // 2, -1)]
        assert {int(n): count for n, count in about["histogram"].items()} == powers_of(lengths)
    out = run("inspect", tmp_path / "out").stdout
    for words in ("vocab_size", "Documents", "Histogram: tokens of a document", "#"):
        assert words in out
    shard = load(tmp_path / "out").shards[1]
    one = inspect(tmp_path / "out" / shard.file.name)
    assert (one["samples"], one["text"]) == (shard.samples, {})
    assert sum(one["lengths"]["tokens"]["histogram"].values()) == shard.samples
    first = inspect(tmp_path / "out")["first"][0]["tokens"]
    assert TEXTS[0][:8] in first  # as text, where there is a tokenizer
    (tmp_path / "out/__shardkit__/tokenizer.json").write_text("{}")
    ids = blocks[0][0]
    first = inspect(tmp_path / "out")["first"][0]["tokens"]
    assert first == f"uint16 {(len(ids),)}: {ids[:12]}"


def test_a_plan_says_what_would_be_done_and_touches_nothing(corpus, gpt2, tmp_path, small_parts):
    words = ["convert", corpus, "--to", "arrow", "-o", tmp_path / "out", "--plan", "--workers", 0]
    words += ["--tokenizer", gpt2, "--seq-len", 64, "--shard-size", "16kB"]
    out = run(*words).stdout
    for part in ("of documents: tokens, doc_ends", "tokenizer  ", "seq-len  "):
        assert part in out
    about = json.loads(run(*words, "--json").stdout)
    assert about["samples"] is None
    assert about["bytes"] == corpus.stat().st_size
    assert about["tasks"] > 1
    assert list(about["parts"][0]["schema"]) == ["tokens", "doc_ends"]
    assert json.loads(run(*words, "--json", "--limit", 9).stdout)["samples"] == 9
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_parts")
def test_an_unfinished_run_goes_on_only_with_the_same_options(damaged, gpt2, wordpiece, tmp_path):
    source, out = damaged[0], tmp_path / "out"
    options = {"tokenizer": gpt2, "seq_len": 64}
    with pytest.raises(SampleError):  # in a later task than the first
        make(source, "arrow", out, options, shard_size="8kB")
    assert list((tmp_path / "out.partial/tasks").glob("*/result.json"))
    changes = [
        ({"seq_len": 65}, "seq_len was 64, is 65"),
        ({"seq_len": None}, "seq_len was 64, is None"),
        ({"pack": "nosplit"}, "pack was concat, is nosplit"),
        ({"remainder": "keep"}, "remainder was pad, is keep"),
        ({"append_eos": False}, "append_eos was None, is False"),
        ({"special_tokens": "text"}, "special_tokens was special, is text"),
        ({"tokenizer": None, "seq_len": None}, "tokenizer was"),
        ({"tokenizer": wordpiece}, "the tokenizer's file has changed"),
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


@pytest.mark.parametrize("seq_len", [None, 64])
def test_verify_finds_a_document_that_is_not_that_of_the_source(seq_len, gpt2, tmp_path, out):
    texts = [f"document {n} says so" for n in range(30)]
    source = write_corpus(tmp_path / "a.jsonl", texts)
    make(source, "wds", out, {"tokenizer": gpt2, "seq_len": seq_len})
    write_corpus(source, [*texts[:20], texts[20].replace("says", "asks"), *texts[21:]])
    problems = shardkit.verify(out, against=source).problems
    differs = {"a value differs from the source", "a value is missing in the source"}
    assert {problem.what for problem in problems} <= differs
    named = [problem.where["key"] for problem in problems if problem.where["field"] == "tokens"]
    assert named == [line_keys(source)[20]] if seq_len is None else named
    write_corpus(source, texts[:-1])
    assert not shardkit.verify(out, against=source).sound


def test_tokens_go_on_from_format_to_format_with_their_tokenizer(corpus, gpt2, expected, tmp_path):
    before = tmp_path / "arrow"
    make(corpus, "arrow", before, {"tokenizer": gpt2}, shard_samples=30)
    identity = load(before).tokenizer
    for format in ("wds", "lmdb", "parquet", "beton", "hf", "megatron", "arrow"):
        out, source = tmp_path / f"{before.name}-{format}", before
        shardkit.convert(source, format, out, workers=0)
        assert load(out).tokenizer == identity
        assert (out / "__shardkit__/tokenizer.json").read_bytes() == gpt2.read_bytes()
        assert tokens_of(out) == dict(zip(line_keys(corpus), expected, strict=True))
        assert shardkit.open(out).lengths("tokens").tolist() == [len(ids) for ids in expected]
        assert shardkit.verify(out, against=source).problems == []
        before = out


@pytest.mark.parametrize("format", few(sorted(FORMATS), "megatron", "wds"))
@pytest.mark.parametrize("texts", [[""], ["", "a", "", ""]], ids=len)
def test_documents_without_tokens(texts, format, gpt2, tmp_path):
    source, ids = write_corpus(tmp_path / "a.jsonl", texts), ids_of(gpt2, texts, after=())
    options = {"tokenizer": gpt2, "append_eos": False}
    make(source, format, tmp_path / "out", options)
    assert list(tokens_of(tmp_path / "out").values()) == ids
    for pack, remainder in PACKS[2::4] if format == "wds" else []:
        blocks = tmp_path / f"{pack}-{remainder}"
        fill = {"seq_len": 4, "pack": pack, "remainder": remainder}
        result = make(source, format, blocks, {**options, **fill})
        assert blocks_of(blocks) == packed(ids, 4, pack, remainder).blocks
        assert result.splits[""].text["documents"] == len(texts)
        inspect(blocks)


def peaks_of(*words):
    """The most memory in bytes that a conversion and each of its two workers had."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads Linux's /proc")
    command = [sys.executable, "-m", "shardkit", "convert", *words, "--to", "arrow", "--quiet"]
    process = subprocess.Popen([*map(str, command), "--workers", "2"])
    peaks = {}
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


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize(
    ("more", "size", "limit"),  # tokens take four times as long
    [([], 200_000_000, 150_000_000), (["--seq-len", 1024], 100_000_000, 200_000_000)],
    ids=["text", "tokens"],
)
def test_gigabytes_take_little_memory(more, size, limit, gpt2, disk):
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
