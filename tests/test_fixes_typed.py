"""What errors advise is typed as they say it, and works."""

import gzip
import io
import json
import re
import tarfile

import numpy as np
import PIL.Image
import pytest

from shardkit.testing import make_image
from tests.boxed import Painted, coco_json
from tests.sources.real import put
from tests.test_cli import run

IMAGE = make_image(1)


def tar(**members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as out:
        for name, data in members.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return file.getvalue()


def png(size, mode="L"):
    file = io.BytesIO()
    PIL.Image.new(mode, size).save(file, "PNG")
    return file.getvalue()


TURNED = Painted("a", (80, 120), [(10, 20, 30, 90)], ["person"], 3)
LINES = [{"text": "a", "name": "x"}, {"text": 5, "name": "y"}, {"text": "c", "name": "z"}]
TABLE = "file_name,label\n0.jpg,cat\n1.jpg,dog\n9.jpg,cat\n"
# What is wrong: files by name, words of the command, what to type after "fix:" as a pattern whose
# groups are words to add. A pattern that begins with "-" names words to leave out instead.
CASES = {
    "a bad image": ({"in/a/0.jpg": IMAGE, "in/a/1.jpg": b"no"}, "in", r"(--on-error skip)"),
    "a key that is not Unicode": (
        {"in.tar": tar(**{"caf\udce9_jpg": IMAGE})}, "in.tar", "(--safe-keys)",
    ),
    "NaN in JSON": (
        {"in.tar": tar(a_txt=b"x", a_json=b"1", b_txt=b"y", b_json=b"NaN")},
        "in.tar", r"(--drop json)",
    ),
    "NaN in JSON of one sample": (
        {"in.tar": tar(a_txt=b"x", a_json=b"1", b_txt=b"y", b_json=b"NaN")},
        "in.tar", "(--on-error skip)",
    ),
    "boxes on turned images": (
        {"in/images/a.png": TURNED.file(), "in/annotations/x.json": coco_json([TURNED])},
        "in", "(--annotations-frame upright)",
    ),
    "a box of another image": (
        {"in/images/a.png": png((9, 9)), "in/annotations/x.json": coco_json([TURNED])},
        "in --drop categories", "(--drop boxes,segmentation)",
    ),
    "a mark of UTF-16": ({"a.txt": b"\xff\xfea\0"}, "a.txt", r"(--encoding utf-16)"),
    "other bytes than UTF-8": ({"a.txt": b"b\xe4r"}, "a.txt", r"(--encoding \S+)"),
    "broken bytes": ({"a.txt": b"a\nb\xff\xff\xffc"}, "a.txt", r"(--encoding-errors replace)"),
    "a document that is no text": (
        {"a.jsonl": "".join(json.dumps(line) + "\n" for line in LINES)},
        "a.jsonl --text-field text", "(--on-error skip)",
    ),
    "a damaged line": ({"a.jsonl": '{"text": "a"}\n{"text"\n'}, "a.jsonl", "(--on-error skip)"),
    "several texts": (
        {"a.jsonl": '{"question": "a", "answer": "b"}\n'},
        "a.jsonl --text-field text", r"(--text-field) NAME",
    ),
    "a row without its file": (
        {"in/0.jpg": IMAGE, "in/1.jpg": IMAGE, "in/metadata.csv": TABLE}, "in", "(--on-error skip)",
    ),
    "classes without labels": (
        {"in/0.jpg": IMAGE, "names": "cat\n"}, "in --classes names", "-leave out (--classes)",
    ),
    "splits that one file cannot hold": (
        {"in/train/a/0.jpg": IMAGE, "in/val/a/0.jpg": IMAGE}, "in -o out.tar", "(--split none)",
    ),
    "blanks in keys": (
        {"in/my cat/0.jpg": IMAGE}, "in --beside dali", "(--safe-keys)",
    ),
    "an option that another needs": (
        {"in/a.jpg": IMAGE}, "in --resize-mode crop", r"give (--resize) N too",
    ),
    "an option for text of images": (
        {"in/a.jpg": IMAGE}, "in --no-header", "-leave out (--no-header)",
    ),
    "a field of text of images": (
        {"in/a.jpg": IMAGE}, "in --text-field x", "-leave out (--text-field)",
    ),
    "statistics of no pixels": ({"a.txt": "x"}, "a.txt --stats", "-leave out (--stats)"),
    "images that may be pairs": (
        {f"in/{side}/{n}.png": png((8, 8)) for side in ("left", "right") for n in range(2)}, "in",
        r"(--fields left,right)",
    ),
    "a file that its names announce": (
        {f"in/a-0000{n}-of-00003.jsonl.gz": gzip.compress(b'{"text": "a"}\n') for n in (0, 2)},
        "in", r"pattern: '(\S+)'",
    ),
}  # fmt: skip


# In place of N, K or NAME.
VALUES = {"--text-field": ["answer"], "--resize": ["8"]}


@pytest.mark.parametrize("name", CASES)
def test_the_fix_works_as_it_is_typed(name, tmp_path, monkeypatch):
    files, words, pattern = CASES[name]
    put(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    command = [*words.split(), "--to", "wds", "--workers", "0"]
    command += [] if "-o" in command else ["-o", "out"]
    said = run("convert", *command, check=None)
    assert said.returncode in (1, 2), said
    fix = re.search(r"fix: (.*)", said.stderr)[1]
    typed = re.search(pattern.removeprefix("-"), fix)
    assert typed, fix
    if pattern.startswith("-"):
        at = command.index(typed[1])
        del command[at : at + 1 + (not command[at + 1].startswith("-"))]
    elif typed[1].startswith("--"):
        command += typed[1].split()
        command += VALUES.get(typed[1], [])
    else:
        command[0] = typed[1]
    again = run("convert", *command, check=None)
    assert again.returncode == 0, (fix, again.stderr)


def test_another_recipe_for_the_same_output_says_how_to_start_over(tmp_path, monkeypatch):
    put(tmp_path, {"in/a/0.jpg": IMAGE, "in/a/1.png": png((40, 40), "RGB")})
    monkeypatch.chdir(tmp_path)
    command = ("convert", "in", "--to", "wds", "-o", "out", "--workers", "0")
    run(*command)
    said = run(*command, "--resize", "8", check=2).stderr
    assert "--overwrite" in re.search(r"fix: (.*)", said)[1]
    run(*command, "--resize", "8", "--overwrite")
    assert np.asarray(PIL.Image.open(tmp_path / "in/a/1.png")).shape == (40, 40, 3)
