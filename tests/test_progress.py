"""`progress=`: what calls from Python show of themselves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.progress import Progress, Steps
from tests.conftest import files_of, write_images


class Calls:
    """Functions that take progress, by name."""

    def __init__(self, folder: Path) -> None:
        self.source = write_images(folder / "images")
        self.made, self.out = folder / "made", folder / "out"
        shardkit.convert(self.source, "wds", self.made, shard_samples=5, workers=0)

    def __call__(self, name: str, progress: Any) -> object:
        ways: dict[str, Callable[[], object]] = {
            "convert": lambda: shardkit.convert(
                self.source, "wds", self.out, shard_samples=3, workers=0, progress=progress
            ),
            "merge": lambda: shardkit.merge(self.made, out=self.out, progress=progress),
            "verify": lambda: shardkit.verify(
                self.made, self.source, decode=True, progress=progress
            ),
            "export": lambda: shardkit.export(self.made, "files", self.out, progress=progress),
            "stats": lambda: shardkit.open(self.made).stats(progress=progress),
            "bench": lambda: shardkit.bench(
                [self.made], measures=["read"], threads=[0], rounds=1, progress=progress
            ),
        }
        return ways[name]()


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path)


@pytest.mark.parametrize("name", ["convert", "merge", "verify", "stats", "export", "bench"])
def test_a_function_hears_how_far_each_step_is(calls, name):
    with pytest.raises(UsageError, match="progress must be True or a function"):
        calls(name, "yes")
    heard: list[Progress] = []

    def hear(step):
        assert threading.current_thread() is threading.main_thread()
        heard.append(step)

    calls(name, hear)
    assert heard[0].done == 0
    last = {step.doing: step for step in heard}
    assert all(step.done == step.total for step in last.values())
    assert [(doing, step.unit) for doing, step in last.items()] == {
        "convert": [("converting", "samples")],
        "merge": [("converting", "samples")],
        "verify": [("reading", "bytes"), ("decoding", "samples"), ("comparing", "samples")],
        "stats": [("counting", "samples")],
        "export": [("exporting", "samples")],
        "bench": [("measuring", "runs")],
    }[name]
    assert heard[-1].total == (2 if name == "bench" else 12)


@pytest.mark.parametrize("name", ["convert", "verify"])
def test_without_a_terminal_progress_is_in_lines(calls, name, capsys):
    calls(name, False)
    assert capsys.readouterr() == ("", "")
    calls.out = calls.out.with_name("again")
    calls(name, True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\r" not in shown.err
    assert shown.err.endswith("12 of 12 samples\n")


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_a_terminal_and_a_notebook_have_one_line(calls, where, capsys, monkeypatch):
    if where == "terminal":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    else:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    calls("verify", True)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.endswith("\n")
    first, *lines = shown.removesuffix("\n").split("\r")
    assert first == ""
    assert {len(line) for line in lines} == {78}  # so that each covers the one before
    assert lines[-1].rstrip() == "comparing: 12 of 12 samples"


def test_a_function_ends_the_call_by_raising_and_the_call_continues(calls):
    def stop(step):
        if step.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls("convert", stop)
    assert not calls.out.exists()
    calls("convert", True)
    whole = calls.out.with_name("whole")
    shardkit.convert(calls.source, "wds", whole, shard_samples=3, workers=0)
    assert files_of(calls.out) == files_of(whole)


def test_a_step_tells_of_itself_a_few_times_a_second_and_at_its_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("shardkit.progress.time.monotonic", lambda: now[0])
    told: list[Progress] = []
    steps = Steps(told.append, 1.0)
    steps.start("reading", 4_000_000, "bytes")
    for _ in range(40):
        now[0] += 0.25
        steps.advance(100_000)
    assert [step.seconds for step in told] == [*range(11)]
    assert str(told[5]) == "reading: 2 MB of 4 MB, 0:05 left"
    assert str(told[-1]) == "reading: 4 MB of 4 MB"
    now[0] += 0.25
    steps.start("decoding", 90, "samples", done=30)
    now[0] += 1800
    steps.advance(30)
    assert str(told[-1]) == "decoding: 60 of 90 samples, 30:00 left"
