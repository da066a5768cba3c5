"""What calls from Python show of themselves: progress, and warnings that name the user's line."""

import gzip
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.errors import ShardkitWarning, UsageError
from shardkit.helpers.progress import Progress, Steps
from shardkit.stream import Loader
from shardkit.torch import Loader as TorchLoader
from tests.conftest import files_of, write_images
from tests.parsed import code


class Calls:
    """Functions that take progress, by name."""

    def __init__(self, folder: Path) -> None:
        self.source = write_images(folder / "images")
        self.made, self.out = folder / "made", folder / "out"
        shardkit.convert(self.source, "wds", self.made, shard_samples=5, workers=0)

    def __call__(self, name: str, progress: Any) -> object:
        more = {"convert": {"shard_samples": 3, "workers": 0}, "verify": {"decode": True}}
        more["bench"] = {"measures": ["read"], "threads": [0], "rounds": 1}
        more["merge"] = {"out": self.out}
        function, *given = {
            "convert": (shardkit.convert, self.source, "wds", self.out),
            "merge": (shardkit.merge, self.made),
            "verify": (shardkit.verify, self.made, self.source),
            "export": (shardkit.export, self.made, "files", self.out),
            "stats": (shardkit.open(self.made).stats,),
            "bench": (shardkit.bench, [self.made]),
        }[name]
        return function(*given, progress=progress, **more.get(name, {}))


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
    monkeypatch.setattr("shardkit.helpers.progress.time.monotonic", lambda: now[0])
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


def assert_told(call: Callable[[], object], message: str, place: str, lines: int = 1) -> None:
    """Of the only warning of a call: of the line in this file that ends with a comment, `place`.

    Python tells of a call in several lines by any of them, so of these `lines` up to that one.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (one,) = [warning for warning in caught if warning.category is ShardkitWarning]
    assert message in str(one.message)
    assert one.filename == __file__
    every = Path(__file__).read_text("utf-8").splitlines()
    (last,) = [number for number, text in enumerate(every, 1) if text.endswith(f"  # {place}")]
    assert last - lines < one.lineno <= last


@pytest.fixture
def made(images, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "made", shard_samples=5, workers=0)
    return tmp_path / "made"


def test_opening_and_shards_that_threads_look_into(made):
    folder, zipped = made.with_name("foreign"), made.with_name("zipped")
    shutil.copytree(made, folder / "inner")
    shutil.copy(made / "shard-000000.tar", folder / "a.tar")
    zipped.mkdir()
    for shard in sorted(made.glob("*.tar")):
        (zipped / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))

    def call():
        shardkit.open(folder)  # of opening

    def call_in_threads():
        warnings.simplefilter("default")  # of several shards once
        shardkit.open(zipped)  # of a thread

    assert_told(call, "not those in its folders", "of opening")
    assert_told(call_in_threads, "unpacked to temporary files", "of a thread")


def test_a_loader_also_of_torch(made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call():
        Loader(
            made,
            batch_size=64,
            threads=2,
        )  # its end

    def call_torch():
        TorchLoader(made, batch_size=4, pin_memory=True)  # of torch

    assert_told(call, "smaller than one batch", "its end", lines=5)
    assert_told(call_torch, "", "of torch")


def test_an_iteration(tmp_path):
    names = [f"class {n}" for n in range(100)]
    schema = {"label": shardkit.Int()}
    with shardkit.create(tmp_path / "sorted", "wds", schema, classes=names) as writer:
        for number in range(4000):
            writer.write({"label": number // 40})
    loader = Loader(tmp_path / "sorted", batch_size=64, shuffle=True, window=100)
    assert_told(lambda: next(iter(loader)), "sorted by class", "of an iteration")  # of an iteration


def test_a_thread_of_the_user(made):
    def work():
        Loader(made, batch_size=64)  # of the user's thread

    def call():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert_told(call, "", "of the user's thread")


def test_all_warnings_go_the_same_way():
    """tests/conftest.py looks at each that any test sees."""
    assert [file for file, name in code().attributes if name == "warnings.warn"] == ["errors.py"]
