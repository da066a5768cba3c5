"""What data say, on the command line: no name or text in them steers a terminal or forges lines."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import lmdb
import msgpack
import pyarrow
import pyarrow.parquet
import pytest

import shardkit
from shardkit.cli import COMMANDS, complain, main
from shardkit.errors import DamagedError, ShardkitWarning, printable
from shardkit.performance.findings import Finding
from shardkit.testing import make_image
from tests.conftest import IMAGE_FORMATS, few
from tests.terminals import on_terminal
from tests.test_cli import run
from tests.test_unforeseen import write_tar

# A title, a colour (C0, C1), another direction, what has no width, and a line of its own.
EVIL = "é\x1b]0;title\x07\x9b31m\u202e\u2066\u200b\x7f\r\nshardkit: sound"
FORGED = "shardkit: sound"


def check(*words):
    """Run a command, and look at all that it prints; returns its exit code and that."""
    printed = []
    for more in ((), ("--json",)):
        found = run(*words, *more, check=None)
        for text in (found.stdout, found.stderr):
            lines = text.split("\n")
            bad = [line for line in lines if not line.isprintable() or line.startswith(FORGED)]
            assert not bad, (words, more, bad)
        printed.append(found)
    if text := printed[1].stdout:
        a_line_each = words[0] == "head" and not text.startswith("{\n")  # as errors do
        assert all(map(json.loads, text.splitlines() if a_line_each else [text]))
    return printed[0].returncode, printed[0].stdout + printed[0].stderr


def write_rows(root, rows):
    """The fields of the images in a folder, whatever folders they are in."""
    paths = sorted(root.rglob("*.jpg"))
    lines = [json.dumps({"file_name": str(path.relative_to(root)), **rows}) for path in paths]
    (root / "metadata.jsonl").write_text("".join(line + "\n" for line in lines))


@pytest.fixture
def evil(tmp_path):
    """Images in splits and classes whose names are all evil, with fields of such names."""
    root = tmp_path / EVIL
    for split in (root / "train", root / "val"):
        for name in (EVIL, "日本"):
            (split / name).mkdir(parents=True)
            (split / name / f"{EVIL}.jpg").write_bytes(make_image(1))
        (split / EVIL / "note.md").write_text(EVIL)
        write_rows(split, {EVIL: EVIL, "é": {EVIL: EVIL}})
    return root


@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_commands_on_evil_names(evil, tmp_path, format):
    out = tmp_path / ("out" + EVIL)
    given = ("convert", evil, "--to", format, "--workers", 0, "-o", out)
    code, words = check(*given)
    if format == "lance":
        assert (code, "pylance cannot write" in words) == (1, True)
        out = tmp_path / "out"
        given = (*given[:-1], out)
        code, words = check(*given)
    if format == "beton":
        assert (code, "ASCII characters" in words) == (1, True)
        given = (*given, "--rename", f"{EVIL}=x", "--rename", "é=y")
        code, words = check(*given)
    assert (code, "\\x1b]0;title" in words) == (0, format != "lance"), words
    check(*given[:-2], "--plan")
    for split in ("", "train"):
        check("head", out / split)
        code, words = check("inspect", out / split, "--full")
        assert (code, "日本" in words, "é" in words) == (0, True, True)
    assert check("verify", out, "--decode", "--against", evil)[0] == 0
    assert check(*given, "--limit", 1)[0] == 2  # another dataset is there
    shutil.rmtree(evil / "train" / EVIL)
    assert check("verify", out, "--against", evil)[0] == 1
    shard = max((p for p in (out / "val").rglob("*") if p.is_file()), key=os.path.getsize)
    shard.write_bytes(shard.read_bytes()[:-600])
    assert check("verify", out)[0] == 1
    check("inspect", out / "val")
    assert check("convert", out, "--to", "lmdb", "-o", tmp_path / "x", "--workers", 0)[0] == 1


def _tar(path):
    members = ((f"{EVIL}.jpg", make_image(1)), (f"{EVIL}.json", json.dumps({EVIL: EVIL}).encode()))
    more = ((f"{EVIL}.{EVIL}", b"x"), (f"{EVIL}2.cls", b"\x1b[31m"), ("a.txt", b"\xff"))
    write_tar(path, *members, *more)


def _table(path):
    columns = {EVIL: [EVIL, None], "é": [{EVIL: EVIL}, None], "image": [make_image(1), b"\x1b]0;"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _lmdb(path):
    with lmdb.open(os.fspath(path)) as database, database.begin(write=True) as entries:
        entries.put(EVIL.encode(), msgpack.packb({EVIL: EVIL, "é": b"x"}))
        entries.put(b"\xff\xfe", msgpack.packb({EVIL: 5}))


def _folder(path):
    bad = os.fsencode(path) + b"/\xff\x1b]0;"
    os.makedirs(bad)
    for name, data in ((b"\xfe.jpg", make_image(1)), (b"\x1b[31m.jpg", b"\x1b]0;")):
        Path(os.fsdecode(bad + b"/" + name)).write_bytes(data)


LINES = "".join(json.dumps({"text": text, EVIL: text}) + "\n" for text in (EVIL, 5))
OF_OTHERS = {
    "x.tar": _tar, "x.parquet": _table, "x.lmdb": _lmdb, "x": _folder,
    "x.jsonl": lambda path: path.write_text(LINES),
    "x.csv": lambda path: path.write_bytes(f"\x1b[31m,b,b\n{EVIL},\x1b,y\n".encode()),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OTHERS)
def test_commands_on_evil_data_of_others(tmp_path, name):
    path = tmp_path / (EVIL + name)
    OF_OTHERS[name](path)
    for command in ("inspect", "head", "verify"):
        check(command, path)
    for options in ((), ("--plan",), ("--on-error", "skip"), ("--check", "decode")):
        out = tmp_path / f"out{len(options)}{options[-1:]}"
        check("convert", path, "--to", "wds", "--workers", 0, "-o", out, *options)


def test_bench_and_doctor(tmp_path):
    folder = tmp_path / EVIL / EVIL
    folder.mkdir(parents=True)
    (folder / "1.jpg").write_bytes(make_image(1))
    (folder / "2.jpg").write_bytes(b"\x1b]0;")
    options = ("--measure", "load", "--threads", 1, "--rounds", 1, "--limit", 2)
    assert "\\x1b" in check("bench", folder.parent, *options)[1]
    finding = Finding("order", EVIL, EVIL, command=EVIL)
    assert all(line.isprintable() for line in str(finding).split("\n"))


# What would be seen on a screen if it passed: an answer to be typed, and hidden text.
SCREEN = f"{EVIL}\x1b[6n\x1b[8m"
# What our own tables, bars and images are made of.
OURS = re.compile(r"\x1b\[(?!8m)[0-9;]*m|\x1b\[\?25[lh]|\x1b\[(1A|2K)|\r(?=\x1b\[(1A|2K)|\n)")


def check_terminal(*words, check=0, text=False):
    """Run a command on a terminal, look at all that it gets, and return that without our own.

    `text`: the lines of a text are shown as lines.
    """
    shown = OURS.sub("", on_terminal(*words, check=check))
    for line in shown.split("\n"):
        assert line.isprintable(), (words, line)
        assert text or not line.startswith(FORGED), (words, shown)
    return shown


@pytest.fixture(scope="module")
def screen(tmp_path_factory):
    """Images and texts with keys, classes, fields and values that a terminal would obey."""
    root = tmp_path_factory.mktemp("screen") / SCREEN
    for name in (SCREEN, "b"):
        folder = root / name
        folder.mkdir(parents=True)
        (folder / f"{SCREEN}.jpg").write_bytes(make_image(1))
        (folder / f"{SCREEN}.txt").write_text(SCREEN)
    (root / "b" / "bad.jpg").write_bytes(SCREEN.encode())
    (root / "b" / f"{SCREEN}.md").write_text(SCREEN)
    write_rows(root, {"words": SCREEN, SCREEN: {SCREEN: SCREEN}})
    return root


def test_every_command_on_a_terminal(screen, tmp_path, monkeypatch):
    """A terminal gets bars and colours: none of its escape sequences is of the data."""
    monkeypatch.setattr("shardkit.cli.progress._SOON", 0)
    out = tmp_path / SCREEN
    convert = ("convert", screen, "--to", "wds", "-o", out, "--workers", 0)
    assert "bad.jpg" in check_terminal(*convert, check=1)
    convert += ("--on-error", "skip")
    shown = check_terminal(*convert)
    assert all(words in shown for words in ("converting", "━", "\\x1b[6n"))
    check_terminal(*convert)  # the output was already complete
    check_terminal(*convert, "--plan")
    check_terminal(*convert, "--limit", 1, check=2)
    check_terminal("merge", out)
    part = ("--out", tmp_path / f"{SCREEN}2", "--part", "2/2")
    assert "2` once" in check_terminal(*convert, "--shard-samples", 1, *part)
    assert "\\u202e" in check_terminal("inspect", out, "--full")
    check_terminal("inspect", out, "--html", tmp_path / f"{SCREEN}.html")
    assert "\\u202e" in check_terminal("stats", out)
    check_terminal("head", out)
    check_terminal("cat", out, SCREEN, check=2)
    for name in ("0", shardkit.open(out).keys()[1]):  # of each class
        shown = check_terminal("cat", out, name)
        assert "\\x9b31m\\u202e" in shown
        check_terminal("cat", out, name, "--field", "label")
    check_terminal("cat", out, "0", "--field", SCREEN, text=True)
    assert "é\\x1b]0;title" in check_terminal("cat", out, "0", "--field", "text", text=True)
    check_terminal("cat", out, "0", "--field", SCREEN + "x", check=2)
    check_terminal("cat", out, "0", "--field", "image", "-o", out / SCREEN / SCREEN, check=2)
    check_terminal("verify", out, "--against", screen, check=None)
    given = ("--batch-size", 2, "--threads", 1, "--rounds", 1, "--limit", 2)
    check_terminal("bench", out, "--measure", "load", *given)
    check_terminal("diff", screen, out, check=1)
    for to in ("folder", "jsonl", "files"):
        check_terminal("export", out, "--to", to, "-o", tmp_path / (to + SCREEN))
    check_terminal("formats")
    given = ("--batch-size", 1, "--threads", 1, "--seconds", 0.01)
    assert "samples/s" in check_terminal("doctor", out, *given)
    check_terminal(SCREEN, check=2)
    (shard,) = out.glob("*.tar")
    shard.write_bytes(shard.read_bytes().replace(b"\xff\xd9", b"\0\0"))
    assert "damaged" in check_terminal("verify", out, check=1)
    (out / "__shardkit__" / "manifest.json").rename(tmp_path / "manifest.json")
    assert "its manifest is missing" in check_terminal("inspect", out)
    (tmp_path / "manifest.json").rename(out / "__shardkit__" / "manifest.json")
    shard.write_bytes(shard.read_bytes()[:-2000])
    for command in ("inspect", "head", "stats"):
        check_terminal(command, out, check=1)
    with shardkit.create(tmp_path / f"{SCREEN}0", "wds", {"label": shardkit.Int()}):
        pass
    assert "has no samples" in check_terminal("head", tmp_path / f"{SCREEN}0")
    text = Path(__file__).read_text("utf-8")
    assert [name for name in COMMANDS if f'"{name}"' not in text] == []  # none is forgotten


def test_a_traceback_is_shown_not_obeyed(capfd):
    """Of a mistake of ours, with a name of the data in its message."""
    complain(f"one\n{SCREEN}")
    assert capfd.readouterr().err == f"one\n{printable(SCREEN)}\n".replace("\\r\\n", "\\r\n")
    script = """
import sys
from shardkit import cli

def fails(*words, **options):
    raise RuntimeError(sys.argv[1])

cli.group.main = fails
cli.main()
"""
    command = [sys.executable, "-c", script, SCREEN]
    found = subprocess.run(command, capture_output=True, check=False)
    assert found.returncode == 1
    shown = found.stderr.decode()
    assert shown.startswith("Traceback (most recent call last):")
    assert "RuntimeError: é\\x1b]0;title" in shown
    assert all(line.isprintable() for line in shown.split("\n"))


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_json_in_any_encoding(evil, tmp_path, monkeypatch, encoding):
    shardkit.convert(evil / "train", to="lmdb", out=tmp_path / "out", workers=0)
    shown = []
    for more in ((), ("--json",)):
        with io.TextIOWrapper(io.BytesIO(), encoding) as stream, monkeypatch.context() as patch:
            words = ["shardkit", "inspect", str(tmp_path / "out"), *more]
            ours = {"stdout": stream, "stderr": stream, "argv": words, "excepthook": None}
            for name, value in ours.items():
                patch.setattr(sys, name, value)
            patch.setattr(warnings, "showwarning", warnings.showwarning)
            patch.setenv("OPENBLAS_NUM_THREADS", "1")
            with pytest.raises(SystemExit, match=r"^0$"):
                main()
            shown.append(stream.buffer.getvalue())
    assert json.loads(shown[1])["classes"][0]["name"] == EVIL
    assert ("日本" in shown[0].decode(encoding)) is (encoding == "utf-8")


def test_what_python_shows():
    assert printable("é 漢 🎉") == "é 漢 🎉"
    assert printable("a\n\tb\udcff\u2028") == r"a\n\tb\udcff\u2028"
    error = DamagedError(EVIL, path=Path(EVIL), key=EVIL, expected=EVIL, found=EVIL, fix=EVIL)
    assert [line.isprintable() for line in str(error).split("\n")] == [True] * 5
    assert error.to_dict()["found"] == EVIL
    with pytest.warns(ShardkitWarning, match=r"é\\x1b\]0;title"):
        warnings.warn(EVIL, ShardkitWarning, stacklevel=1)
