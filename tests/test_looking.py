"""`shardkit head` and `shardkit cat`: what they show, write and refuse."""

import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import shardkit
from shardkit.cli import main
from shardkit.formats import FORMATS
from shardkit.helpers import os_errors
from shardkit.schema import Array, Image, Images, Int, Text
from shardkit.storage import fs
from shardkit.testing import EVERYTHING, everything, make_image
from tests.conftest import few
from tests.conversion.test_chats import PLAIN, TEMPLATE
from tests.conversion.text_corpora import few_words, write_corpus, write_lines
from tests.terminals import on_terminal
from tests.test_cli import run


def piped(*words: object) -> bytes:
    """What a command writes to standard output, byte for byte, in this process."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile("w+") as out:
        patch.setattr(sys, "argv", ["shardkit", *map(str, words)])
        patch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        out.buffer.seek(0)
        return out.buffer.read()


def write(path: Path, samples: list[dict[str, Any]], schema: Any, **options: Any) -> Path:
    to = options.pop("to", "wds")
    with shardkit.create(path, to=to, schema=schema, **options) as out:
        for sample in samples:
            out.write(sample)
    return path


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """Samples with fields of nearly all types."""
    path = tmp_path_factory.mktemp("every") / "out"
    return write(path, [everything(n) for n in range(8)], EVERYTHING, shard_samples=3)


@pytest.mark.parametrize("format", few(sorted(set(FORMATS) - {"megatron"}), "lmdb", "wds"))
def test_every_format_by_index_and_by_key(tmp_path, format):
    schema = {"image": Image(), "label": Int()}
    samples = [{"__key__": f"k{n}", "image": make_image(n), "label": n} for n in range(5)]
    data = write(tmp_path / "x", samples, schema, to=format, shard_samples=2)
    keys = shardkit.open(data).keys()
    for name, number in (("0", 0), ("-1", -1), (keys[3], 3)):
        run("cat", "--field", "image", "-o", tmp_path / "i", "--overwrite", "--", data, name)
        assert (tmp_path / "i").read_bytes() == samples[number]["image"]
    lines = [json.loads(line) for line in run("head", data, "-n", 3, "--json").stdout.splitlines()]
    assert [(line["index"], line["key"]) for line in lines] == list(enumerate(keys[:3]))
    expected = [{"image": {"bytes": len(s["image"])}, "label": s["label"]} for s in samples[:3]]
    assert [line["fields"] for line in lines] == expected


def test_shards_foreign_data_and_splits(every, images, tmp_path):
    shard = sorted(every.glob("*.tar"))[1]
    assert run("cat", shard, 0, "--field", "label").stdout == "1\n"
    assert run("cat", shard, "folder/0005", "--field", "label").stdout == "3\n"
    odd = pyarrow.array([1, 2], pyarrow.duration("s"))
    blob = pyarrow.array([b"x", None], pyarrow.binary())
    table = pyarrow.table({"words": ["a\nb", "ü"], "n": [5, 6], "time": odd, "blob": blob})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    shown = run("head", tmp_path / "x.parquet")
    assert "a b" in shown.stdout
    assert "the field 'time' is ignored: a column is of a type that no field can" in shown.stderr
    found = run("cat", tmp_path / "x.parquet", 1, "--field", "words")
    assert found.stdout == "ü"
    assert "the field 'time' is ignored" in found.stderr
    refused = run("cat", tmp_path / "x.parquet", 1, "--field", "time", check=2)
    assert "expected: one of words, n, blob" in refused.stderr
    shardkit.convert(images, "wds", tmp_path / "out", split="a=0.5,b=0.5", workers=0)
    shown = run("head", tmp_path / "out", "-n", 1).stdout
    assert [line for line in shown.split("\n") if "sample 0" in line][1].startswith("b, sample 0")
    lines = run("head", tmp_path / "out", "-n", 1, "--json").stdout.splitlines()
    assert [json.loads(line)["split"] for line in lines] == ["a", "b"]
    refused = run("cat", tmp_path / "out", 0, check=1).stderr
    assert str(tmp_path / "out" / "a") in refused


def test_what_head_says_and_a_terminal_gets(every, tmp_path):
    shown = run("head", every, "-n", 4).stdout
    assert re.search(r"sample 3: folder/0003\n image +jpeg 8 x 6, [\d,]+ bytes", shown)
    assert re.search(r" points +float32 \(3, 2\): 0\.0, 1\.0, 2\.0, 3\.0, 4\.0, 5\.0 *\n", shown)
    assert re.search(r" blob +3 bytes: b'\\x00\\x01\\x02' *\n", shown)
    assert re.search(r" text +line 3 Ä 漢 🎉", shown)
    assert re.search(r' about +\{"n": 3, "list"', shown)
    assert "sample 4" not in shown
    found, sample = json.loads(run("head", every, "-n", 1, "--json").stdout), everything(0)
    points = {"dtype": "<f4", "shape": [0, 2], "first": []}
    expected = {"text": sample["text"], "about": sample["about"], "points": points}
    assert found["fields"].items() >= expected.items()
    long = write(tmp_path / "x", [{"__key__": "a", "text": "word " * 500}], {"text": Text()})
    assert "word ... (2,500 characters)" in " ".join(run("head", long).stdout.split())
    lines = on_terminal("cat", every, 3).split("\r\n")
    assert lines[0] == "sample 3: 'folder/0003'"
    at = lines.index("'text': ")
    assert lines[at + 1 : at + 3] == ["  line 3", "  Ä 漢 🎉"]
    assert "'points': float32 (3, 2): 0.0, 1.0, 2.0, 3.0, 4.0, 5.0" in lines
    assert '  "n": 3,' in [line.removeprefix("  ") for line in lines]


def test_a_pipe_gets_the_stored_bytes(every):
    sample = everything(3)
    assert piped("cat", every, 3, "--field", "image") == sample["image"]
    assert piped("cat", every, 3, "--field", "text") == sample["text"].encode()
    assert piped("cat", every, 3, "--field", "blob") == sample["blob"]
    array = np.load(io.BytesIO(piped("cat", every, 3, "--field", "points")))
    np.testing.assert_array_equal(array, sample["points"])
    for field, text in (("about", json.dumps(sample["about"], ensure_ascii=False)), ("label", "1")):
        assert run("cat", every, 3, "--field", field).stdout == text + "\n"
    assert run("cat", every, 3, "--field", "__key__").stdout == "folder/0003"


def test_a_pipe_gets_one_field(every, tmp_path):
    for more in ((), ("-o", tmp_path / "x")):
        refused = run("cat", every, 1, *more, check=2)
        assert not refused.stdout
        assert "image (Image), label (Int), score (Float)" in refused.stderr
        assert "--field image" in refused.stderr
    absent = run("cat", every, 1, "--field", "caption", check=2).stderr
    assert "no value of this optional field" in absent
    assert "found:" not in absent
    assert "did you mean image?" in run("cat", every, 1, "--field", "imge", check=2).stderr
    one = write(tmp_path / "one", [{"__key__": "a", "text": "x\r\ny"}], {"text": Text()}, to="lmdb")
    assert piped("cat", one, "a") == b"x\r\ny"
    images = [{"__key__": str(n), "images": [make_image(0)] * n} for n in (1, 2)]
    lists = write(tmp_path / "lists", images, {"images": Images()}, to="arrow")
    assert piped("cat", lists, 0) == make_image(0)
    assert "2 images" in run("cat", lists, 1, check=2).stderr


def test_a_file_is_written_whole_and_never_replaced_unasked(every, tmp_path, monkeypatch):
    out, given = tmp_path / "x", ("cat", every, 1, "--field", "image", "-o", tmp_path / "x")
    assert run(*given).stdout == ""
    assert out.read_bytes() == make_image(1)
    out.write_bytes(b"old")
    assert "--overwrite" in run(*given, check=2).stderr

    def fails(old, new):
        assert old.read_bytes() == make_image(1)
        raise os_errors.explain(OSError(28, "full"), "rename", new)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "rename", fails)
        run(*given, "--overwrite", check=1)
    assert out.read_bytes() == b"old"
    assert run(*given, "--overwrite").stdout == ""
    assert out.read_bytes() == make_image(1)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for name in ("link", "no/x", "."):
        run(*given[:-1], tmp_path / name, "--overwrite", check=2)
    run(*given[:-1], "s3://bucket/x", check=2)
    assert sorted(os.listdir(tmp_path)) == ["link", "x"]


def test_a_number_is_an_index_and_else_a_key(tmp_path):
    keys = ["3", "007", "b", "0", "99", "same", "same"]
    data = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"__key__": keys, "label": range(7)}), data)
    for name, label in (("1", 1), ("-2", 5), ("007", 1), ("99", 4), ("b", 2)):
        found = run("cat", data, name)
        assert (found.stdout, found.stderr) == (f"{label}\n", ""), name
    for name, label, other in (("0", 0, 3), ("3", 3, 0)):
        found = run("cat", data, name)
        assert found.stdout == f"{label}\n"
        assert f"{name} is taken as an index" in found.stderr
        assert f"with this key has the index {other}\n" in found.stderr
    assert "found: numbers 5, 6" in run("cat", data, "same", check=2).stderr
    assert "it would have to be below 7" in run("cat", data, 7, check=2).stderr
    # Similar keys are named.
    keys = [f"{name}/{n:02d}" for name in ("circle", "square", "stripe") for n in range(12)]
    samples = [{"__key__": key, "label": 0} for key in keys]
    data = write(tmp_path / "x", samples, {"label": Int()})
    found = run("cat", data, "square/07.jpg", check=2)
    assert "use the key 'square/07'" in found.stderr
    for name, meant in (("square_07", "square/07"), ("sqare/11", "square/11"),
                        ("xcircle/03", "circle/03"), ("circle/99", "circle/")):  # fmt: skip
        found = run("cat", data, name, check=2)
        assert re.search(f"similar keys: .*'{meant}", found.stderr), found.stderr
    empty = write(tmp_path / "empty", [], {"label": Int()})
    assert "expected: no key" in run("cat", empty, "a", check=2).stderr
    assert "has no samples" in run("head", empty).stderr


@pytest.mark.parametrize("format", ["wds", "megatron"])
def test_tokens_are_decoded(tmp_path, format):
    (tmp_path / "words.json").write_text(json.dumps(few_words(400)))
    texts = [" ".join(f"w{n}" for n in range(300)), "w3 w1 w4"]
    source = write_corpus(tmp_path / "in.jsonl", texts)
    options = {"tokenizer": tmp_path / "words.json", "append_eos": False}
    shardkit.convert(
        source, format, tmp_path / "out", text=shardkit.TextOptions(**options), workers=0
    )
    shown = run("head", tmp_path / "out").stdout
    assert "uint16 (3,): 3, 1, 4; as text: w3 w1 w4\n" in shown
    assert " w31... " in " ".join(shown.split())
    assert "w3 w1 w4" in run("inspect", tmp_path / "out").stdout
    lines = run("head", tmp_path / "out", "--json").stdout.splitlines()
    assert json.loads(lines[1])["fields"]["tokens"]["text"] == "w3 w1 w4"
    shown = on_terminal("cat", tmp_path / "out", 0, "--field", "tokens")
    assert shown.startswith("uint16 (300,): 0, 1, 2, 3, 4, 5, 6, 7, ...\r\n")
    assert shown.split("\r\n")[1:] == [texts[0], ""]
    path = shardkit.open(tmp_path / "out").tokenizer_path
    assert path is not None
    path.write_text("{}")
    assert "not decoded: the tokenizer file of" in run("head", tmp_path / "out").stdout


def test_what_is_learned_of_conversations_is_shown(tmp_path):
    template = tmp_path / "template"
    template.write_text(TEMPLATE)
    (tmp_path / "words.json").write_text(json.dumps(few_words(400)))
    source = write_lines(tmp_path / "in.jsonl", [{"messages": PLAIN * 2}])
    text = shardkit.TextOptions(tokenizer=tmp_path / "words.json", chat_template=template)
    shardkit.convert(source, "wds", tmp_path / "out", text=text, workers=0)
    shown = run("head", tmp_path / "out").stdout
    assert "; learned: 4 of 14 tokens | w3 w13 | w3 w13\n" in shown
    shown = on_terminal("cat", tmp_path / "out", 0)
    assert "\r\n  learned: 4 of 14 tokens\r\n  w3 w13\r\n  w3 w13" in shown
    # A mask of something else is an array like any other.
    data = write(tmp_path / "x", [{"__key__": "a", "loss_mask": np.ones(2, bool)}],
                 {"loss_mask": Array("|b1", (2,))})  # fmt: skip
    assert "bool (2,): True, True\n" in run("head", data).stdout


def test_a_damaged_sample_is_named_and_others_are_shown(tmp_path):
    samples = [{"__key__": f"k{n}", "a": np.arange(4)} for n in range(3)]
    data = write(tmp_path / "x", samples, {"a": Array("<i8", (4,))})
    (shard,) = data.glob("*.tar")
    stored = shard.read_bytes()
    second = stored.index(b"\x93NUMPY", stored.index(b"\x93NUMPY") + 1)
    shard.write_bytes(stored[:second] + b"\0" + stored[second + 1 :])
    found = run("head", data, check=1)
    assert "sample 0: k0" in found.stdout
    assert "sample 2: k2" in found.stdout
    assert "'k1'" in found.stderr
    lines = [json.loads(x) for x in run("head", data, "--json", check=1).stdout.splitlines()]
    assert [(line["index"], line["key"]) for line in lines] == [(0, "k0"), (1, "k1"), (2, "k2")]
    assert (lines[1]["error"], "fields" in lines[1]) == ("SampleError", False)
