"""`shardkit head` and `shardkit cat`: what they show, write and refuse."""

import base64
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest

import shardkit
from shardkit.cli import main, terminal
from shardkit.cli.terminal import protocol
from shardkit.formats import FORMATS
from shardkit.helpers import os_errors
from shardkit.schema import Array, Image, Images, Int, Text
from shardkit.storage import fs
from shardkit.testing import EVERYTHING, everything, make_image
from tests.conftest import few
from tests.conversion.text_corpora import few_words, write_corpus
from tests.terminals import COLUMNS, LINES, on_terminal
from tests.test_cli import run
from tests.test_unforeseen import write_tar


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
    assert "the field 'time' is left out: a column is of a type that no field can" in shown.stderr
    found = run("cat", tmp_path / "x.parquet", 1, "--field", "words")
    assert found.stdout == "ü"
    assert "the field 'time' is left out" in found.stderr
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
    lines = on_terminal("cat", every, 3, NO_COLOR="1").split("\r\n")
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
    assert "uint16 (3,): 3, 1, 4; as text: w3 w1 w4 \n" in shown
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


def test_the_environment_tells_the_protocol():
    for environ, expected in (
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "iterm"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm"),
        ({"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"}, "blocks"),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/x"}, "blocks"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1", "NVIM": "x"}, "blocks"),
        ({"TERM": "dumb", "KITTY_WINDOW_ID": "1"}, "blocks"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1", "TERM_PROGRAM": "vscode"}, "blocks"),
        ({"TERM": "xterm-kitty", "TERM_PROGRAM": "iTerm.app"}, "kitty"),
        ({}, "blocks"),
    ):
        assert protocol(environ) == expected, environ


def written_halves(path: Path, *halves: tuple[int, int, int]) -> Path:
    """A TAR with an image of 1600 x 800 pixels in two colours, and with a damaged one."""
    pixels = np.array([halves], np.uint8).repeat(800, axis=0).repeat(800, axis=1)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return write_tar(path, ("a.png", file.getvalue()), ("bad.png", file.getvalue()[:2000]))


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Red on the left, blue on the right."""
    return written_halves(tmp_path_factory.mktemp("halves") / "x.tar", (255, 0, 0), (0, 0, 255))


def are_halves(image: PIL.Image.Image) -> bool:
    left, right = (np.asarray(image)[5:-5, at] for at in (slice(5, 20), slice(-20, -5)))
    return bool((left == [255, 0, 0]).all() and (right == [0, 0, 255]).all())


def test_kitty_gets_a_png_in_chunks_and_iterm_in_one(halves):
    shown = on_terminal("cat", halves, 0, "--field", "png", TERM="xterm-kitty")
    sent = re.findall("\x1b_G([^;]*);([^\x1b]*)\x1b\\\\", shown)
    assert sent[0][0].startswith("a=T,f=100,c=80,q=2,m=")
    assert [keys[-1] for keys, _ in sent] == ["1"] * (len(sent) - 1) + ["0"]
    assert all(len(data) <= 4096 and len(data) % 4 == 0 for _, data in sent)
    image = PIL.Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in sent))))
    assert image.size == (640, 320)
    assert are_halves(image)
    assert "\x1b_G" in on_terminal("head", halves, "-n", 1, TERM="xterm-kitty")
    shown = on_terminal("cat", halves, "a", TERM_PROGRAM="iTerm.app")
    ((keys, data),) = re.findall("\x1b]1337;File=([^:]*):([^\a]*)\a", shown)
    png = base64.b64decode(data, validate=True)
    assert keys == f"inline=1;size={len(png)};width=80;preserveAspectRatio=1"
    assert are_halves(PIL.Image.open(io.BytesIO(png)))


def test_others_get_half_blocks_in_the_colours_that_they_have(halves, tmp_path, monkeypatch):
    samples = [{"__key__": "a", "rgb": np.full((4, 6, 3), 200, np.uint8), "x": np.zeros((4, 6))}]
    schema = {"rgb": Array("|u1", (4, 6, 3)), "x": Array("<f8", (4, 6))}
    shown = on_terminal("cat", write(tmp_path / "x", samples, schema), 0)
    assert shown.count("\x1b[38;2;200;200;200;48;2;200;200;200m▀") == 12 == shown.count("▀")
    shown = on_terminal("cat", halves, 0)
    rows = [line.count("▀") for line in shown.split("\r\n") if "▀" in line]
    assert rows == [80] * 20
    assert shown.count("\x1b[38;2;255;0;0;48;2;255;0;0m▀") > 700
    assert shown.count("\x1b[38;2;0;0;255;48;2;0;0;255m▀") > 700
    # In colours of its own, as rich remembers how it showed the others in this process.
    green = written_halves(tmp_path / "green.tar", (0, 255, 0), (255, 255, 0))
    assert "38;5;46" in on_terminal("cat", green, 0, COLORTERM="")
    small = on_terminal("head", halves, "-n", 1)
    assert [line.count("▀") for line in small.split("\r\n") if "▀" in line] == [40] * 10
    assert "▀" not in run("head", halves).stdout
    assert (COLUMNS, LINES) == (100, 30)  # of which an image takes 80 and 26 at most

    def is_described(name, words="png 1600 x 800", **environ):
        shown = on_terminal("cat", halves, name, **environ)
        return words in shown and "▀" not in shown

    assert is_described(0, TERM="dumb", COLORTERM="")
    assert is_described(0, NO_COLOR="1")
    assert is_described("bad", "png 1600 x 800, 2,000 bytes")  # it cannot be decoded
    monkeypatch.setattr(terminal, "_MOST", 1600 * 800 - 1)
    monkeypatch.setattr(terminal, "to_rgb", None)  # X4: which is not called for a larger one
    assert is_described("a")
