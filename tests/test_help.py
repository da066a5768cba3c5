"""The help of the command line: every command, option and example."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import shardkit
from shardkit.cli import COMMANDS
from shardkit.cli.help import Command, Example
from shardkit.formats import BUILT_IN, MEANT
from tests.test_cli import run

ROOT = Path(__file__).parent.parent


def command(name: str) -> Command:
    found = importlib.import_module(f"shardkit.cli.{name.replace('-', '_')}").command
    assert isinstance(found, Command)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_and_option_has_help(name):
    shown = " ".join(run(name, "--help").stdout.split())
    assert len(str(command(name).help)) > 20
    for param in command(name).params:
        if isinstance(param, click.Option):
            assert param.help, f"{name} {param.opts[0]}"
            assert " ".join(param.help.split()) in shown


def test_convert_has_its_options_in_groups():
    shown = run("convert", "--help").stdout
    groups = ["Input", "Choosing and splitting", "Images", "Text", "Audio", "Output", "Run"]
    positions = [shown.index(f"\n{title}:\n") for title in groups]
    assert positions == sorted(positions)
    assert "\nOptions:\n" not in shown
    assert shown.count("--help") == 1


def examples() -> Iterator[Example]:
    for name in COMMANDS:
        found = command(name).examples
        assert len(found) == 2, f"{name} has {len(found)} examples"
        yield from found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with what examples are about."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(ROOT / "sample_data" / "images", folder / "photos")
    shutil.copytree(ROOT / "sample_data" / "text", folder / "texts")
    for name in ("shards", "more"):
        shardkit.convert(folder / "photos", "wds", folder / name, workers=0)
    return folder


SLOW = ("shardkit bench", "shardkit doctor")


def one(example: Example) -> object:
    marks = [pytest.mark.large] if example.line.startswith(SLOW) else []
    return pytest.param(example, id=example.line, marks=marks)


@pytest.mark.parametrize("example", [one(e) for e in examples() if not e.not_run])
def test_each_example_runs(example, prepared, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    program, name, *words = example.line.split()
    assert program == "shardkit"
    if {"|", ">"} & {*words}:  # a shell's
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        line = ["bash", "-euo", "pipefail", "-c", example.line]
        subprocess.run(line, check=True, env={**os.environ, "PATH": path})
    else:
        run(name, *words)
    assert f"    {example.line}\n" in run(name, "--help").stdout  # in one piece


def test_an_example_that_no_test_runs_says_why():
    assert {example.not_run for example in examples() if example.not_run} <= {"needs a bucket"}


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("convrt", "did you mean convert?"),
        ("convert photos --to wds --shufle", "'--shuffle'"),
        ("convert photos --to bton", "did you mean beton?"),
        *[
            (f"convert photos --to {name}", f"did you mean {meant} (")
            for name, meant in (
                *(("tar", "wds"), ("webdataset", "wds"), ("WebDatset", "wds"), ("ffcv", "beton")),
                *(("tfrecords", "tfrecord"), ("jsonl", "parquet"), ("streaming", "mds")),
            )
        ],
        ("convert photos --to wds --fields labl", "did you mean label?"),
        ("convert photos --to wds --rename imge=x", "did you mean image?"),
        ("convert photos --to wds --where labl==1", "did you mean label?"),
        ("convert photos --to wds --include-class circel", "did you mean circle?"),
        ("convert texts/notes.jsonl --to wds --text-field txt", "did you mean text?"),
        ("convert texts/notes.jsonl --to wds --label-column idd", "did you mean id?"),
        ("convert texts/notes.jsonl --to wds --text-field text --drop idd", "did you mean id?"),
        ("convert photos --to wds --metadata t.csv --file-column fil", "did you mean file?"),
        ("bench shards --measure lod", "did you mean load?"),
    ],
)
def test_a_mistyped_word_is_told_what_may_have_been_meant(words, meant, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    (prepared / "t.csv").write_text("file,label\ncircle/00.jpg,1\n")
    assert meant in run(*words.split(), check=None).stderr


def test_the_names_that_formats_have_elsewhere_lead_to_ours():
    assert set(MEANT.values()) <= set(BUILT_IN)
    assert not set(MEANT) & set(BUILT_IN)
