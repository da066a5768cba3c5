"""A user's function runs in processes of its own, so whatever it does, the command reports it."""

import os
import re
import sys

import pytest

import shardkit
from shardkit.errors import SampleError, WorkerError
from tests.conftest import write_images

MODULE = """
import os, sys
from pathlib import Path

here = Path(__file__).parent

def keeps(sample):
    with open(here / "processes", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return sample

def exits(sample):
    if sample["__key__"] == (here / "bad").read_text():
        os._exit(0)
    return sample

def raises_exit(sample):
    if sample["__key__"] == (here / "bad").read_text():
        sys.exit(3)
    return sample

def talks(sample):
    print("from the transform")
    return {**sample, "read": sys.stdin.read()}

print("while it is imported")
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Two classes of 20 images; planning tries every second one, and the rest is one task."""
    (tmp_path / "user_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("user_code", None)
    return write_images(tmp_path / "in", classes=2, each=20, kilobytes=1)


def convert(source, function, **options):
    transform = f"user_code:{function}"
    return shardkit.convert(
        source, "wds", source.parent / "out", transform=transform, workers=1, **options
    )


def test_a_transform_never_runs_in_the_process_that_converts_or_repairs(source):
    convert(source, "keeps")
    (shard,) = (source.parent / "out").rglob("*.tar")
    shard.write_bytes(shard.read_bytes()[:-2000])
    transform = "user_code:keeps"
    report = shardkit.verify(source.parent / "out", repair=source, transform=transform)
    assert report.sound, str(report.repair.left[0])
    assert report.repair.files
    processes = [int(line) for line in (source.parent / "processes").read_text().split()]
    assert len(processes) > 80
    assert os.getpid() not in processes


@pytest.mark.parametrize("bad", range(4), ids="sample {}".format)
def test_a_transform_that_ends_its_process_is_named_with_its_sample(source, bad):
    """Whether planning tries the sample, or only the task."""
    key = f"class0/{bad:03d}"
    (source.parent / "bad").write_text(key)
    with pytest.raises(WorkerError, match="ended with code 0") as error:
        convert(source, "exits")
    assert re.search(rf"(key|began is) .{key}\b", str(error.value))
    assert not (source.parent / "out").exists()


def test_a_transform_that_calls_exit_makes_its_sample_bad(source):
    (source.parent / "bad").write_text("class1/007")
    with pytest.raises(SampleError, match="the transform raised SystemExit: 3"):
        convert(source, "raises_exit")
    assert convert(source, "raises_exit", on_error="skip").errors == 1


def test_a_transform_has_no_part_in_what_the_command_reads_and_prints(source, capfd):
    convert(source, "talks")
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "from the transform" in printed.err
    assert "while it is imported" in printed.err
    assert shardkit.open(source.parent / "out")[3]["read"] == ""
