"""`progress=`: what calls from Python show of themselves."""

from __future__ import annotations

import sys
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
        self.other = folder / "other"
        shardkit.convert([{"__key__": "x", "text": "x"}], "wds", folder / "text", workers=0)
        shardkit.convert([{"__key__": "y", "text": "y"}], "wds", self.other, workers=0)

    def __call__(self, name: str, progress: Any) -> object:
        parts = self.other, self.other.parent / "text"
        ways: dict[str, Callable[[], object]] = {
            "convert": lambda: shardkit.convert(
                self.source, "wds", self.out, shard_samples=3, workers=0, progress=progress
            ),
            "merge": lambda: shardkit.merge(*parts, out=self.out, progress=progress),
            "verify": lambda: shardkit.verify(self.made, decode=True, progress=progress),
            "export": lambda: shardkit.export(self.made, "files", self.out, progress=progress),
            "stats": lambda: shardkit.open(self.made).stats(progress=progress),
            "bench": lambda: shardkit.bench(
                [self.made], measures=["read"], threads=[0], rounds=1, progress=progress
            ),
        }
        return ways[name]()


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path)


NAMES = ["convert", "merge", "verify", "stats", "export", "bench"]


@pytest.mark.parametrize("name", NAMES)
def test_a_function_hears_how_far_each_step_is(calls: Calls, name: str) -> None:
    heard: list[Progress] = []
    calls(name, heard.append)
    steps = {step.doing: step for step in heard}  # the last of each
    wanted = {
        "convert": {"converting": (12, "samples")},
        "merge": {"converting": (2, "samples")},
        "verify": {"reading": (0, "bytes"), "decoding": (12, "samples")},
        "stats": {"counting": (12, "samples")},
        "export": {"exporting": (12, "samples")},
        "bench": {"measuring": (2, "runs")},
    }[name]
    assert set(steps) == set(wanted)
    for doing, (total, unit) in wanted.items():
        assert steps[doing].done == steps[doing].total > 0
        assert steps[doing].total == total or unit == "bytes"
        assert steps[doing].unit == unit
    assert heard[0].done == 0


@pytest.mark.parametrize("name", NAMES[:5])
def test_without_a_terminal_progress_is_in_lines(
    calls: Calls, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls(name, False)
    assert capsys.readouterr() == ("", "")
    if name in ("convert", "merge", "export"):
        calls.out = calls.out.with_name("again")
    calls(name, True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\r" not in shown.err
    total = 2 if name == "merge" else 12
    assert shown.err.endswith(f"{total} of {total} samples\n")


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_a_terminal_and_a_notebook_have_one_line(
    calls: Calls, where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert lines[-1].rstrip() == "decoding: 12 of 12 samples"


def test_a_function_ends_the_call_by_raising_and_the_call_continues(calls: Calls) -> None:
    def stop(step: Progress) -> None:
        if step.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls("convert", stop)
    assert not calls.out.exists()
    calls("convert", True)
    whole = calls.out.with_name("whole")
    shardkit.convert(calls.source, "wds", whole, shard_samples=3, workers=0)
    assert files_of(calls.out) == files_of(whole)


@pytest.mark.parametrize("name", NAMES)
def test_other_values_are_refused(calls: Calls, name: str) -> None:
    with pytest.raises(UsageError, match="progress must be True or a function"):
        calls(name, "yes")


def test_a_step_tells_of_itself_a_few_times_a_second_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
