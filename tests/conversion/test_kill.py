"""C2 with real processes: signals at any change, dead workers, Ctrl-C. The long form is `large`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.conversion import pool
from shardkit.errors import WorkerError
from shardkit.testing import make_image
from tests.codecs import tokenizer_zoo
from tests.conftest import files_of, write_images
from tests.conversion.part_kills import Forks, wait_for

pytestmark = [
    pytest.mark.xdist_group("timed"),
    pytest.mark.skipif(
        not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc"
    ),
]

# A source, and what it is converted to.
RUNS = {
    "images as they are": ("images", "--to wds --workers 2 --shard-size 25kB"),
    "images resized": ("images", "--to beton --resize 24 --workers 1 --shard-size 9kB"),
    "images in this process": ("images", "--to lmdb --workers 0 --shard-size 25kB"),
    "images to Lance": ("images", "--to lance --workers 1 --shard-size 50kB"),
    "images that are skipped or left out": (
        "bad",
        "--to tfrecord --resize 24 --min-size 17 --on-error skip --workers 1 --shard-size 5kB",
    ),
    "images split": ("images", "--to hf --split train=0.8,val=0.2 --workers 1 --shard-size 25kB"),
    "shards": ("shards", "--to arrow --workers 1 --shard-size 25kB"),
    "text": ("text", "--to parquet --workers 1 --shard-size 25kB"),
    "text as tokens": (
        "text",
        "--to arrow --tokenizer {tokenizer} --seq-len 128 --pack nosplit --workers 1"
        " --shard-size 10kB",
    ),
    "tokens": ("tokens", "--to megatron --workers 0"),
}
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}
INTERRUPTED = "shardkit: interrupted; the same command run again continues"


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("forks")) as forks:
        yield forks


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    found = {name: root / name for name in ("images", "bad", "shards", "text", "tokens")}
    write_images(found["images"], classes=3, each=8, kilobytes=5)
    write_images(found["bad"], classes=3, each=8)
    (found["bad"] / "class0/003.jpg").write_bytes(b"text")
    (found["bad"] / "class1/small.png").write_bytes(make_image(1, "PNG"))
    shardkit.convert(found["images"], "wds", found["shards"], shard_size="25kB", workers=0)
    found["text"].mkdir()
    for number in range(12):
        (found["text"] / f"{number}.txt").write_text(f"{number} words " * 1000)
    schema = {"tokens": shardkit.Array("uint16", (None,))}
    with shardkit.create(found["tokens"], to="arrow", schema=schema) as writer:
        for number in range(500):
            writer.write({"tokens": np.arange(number % 97, dtype=np.uint16)})
    found["tokenizer"] = tokenizer_zoo.write_json(root / "tokenizer", "gpt2")
    return found


def partial_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def finished(out: Path) -> list[Path]:
    """The results of the tasks that a run has finished; those in the making have an ending."""
    return list(partial_of(out).glob("tasks/[0-9][0-9][0-9][0-9][0-9][0-9]/result.json"))


@pytest.mark.large
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_any_signal_ends_says_no_more_than_a_line_and_is_continued(
    forks: Forks, sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """C2, X1: to the run alone, or with its workers, one after the other on the same output."""
    source, options = RUNS[name]
    words = options.format(tokenizer=sources["tokenizer"]).split()
    command = ["convert", sources[source], *words, "--quiet", "-o"]
    out, whole = tmp_path / "out", tmp_path / "whole"
    run = forks.start(*command, whole)
    assert run.wait() == (0, "")
    at = run.changes() // 5
    before: dict[Path, int] = {}
    for number, (sent, code) in enumerate(SIGNALS.items()):
        to = "run" if (number + len(name)) % 2 else "group"
        print(f"{sent.name} to the {to} after {at} changes")
        ended = forks.start(*command, out, at=at, sent=sent, to=to)
        found, said = ended.wait()
        assert (found, said.strip()) == (code, INTERRUPTED if code == 130 else "")
        assert not out.exists()
        wait_for(lambda run=ended: not run.states())  # nobody goes on for a run that is gone
        times = {path: path.stat().st_mtime_ns for path in finished(out)}
        assert before.items() <= times.items()  # no task is done twice
        before = times
    assert forks.start(*command, out).wait() == (0, "")
    assert files_of(out) == files_of(whole)
    assert not partial_of(out).exists()
    if "--workers 0" not in options:  # the task of a worker that dies is done again
        run = forks.start(*command, tmp_path / "again", at=4, to="worker")
        assert run.wait() == (0, "")
        assert run.changes() > 4
        assert files_of(tmp_path / "again") == files_of(whole)


@pytest.mark.large
def test_ctrl_c_ends_a_run_whose_workers_hang(
    forks: Forks, sources: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["convert", sources["images"], "--to", "wds", "--shard-size", "25kB", "--workers", 1]
    run = forks.start(*command, "--quiet", "-o", out, at=12, sent=signal.SIGSTOP, to="worker")
    wait_for(lambda: "T" in run.states())
    os.kill(run.child, signal.SIGINT)
    code, said = run.wait()
    assert (code, said.strip()) == (130, INTERRUPTED)
    assert not out.exists()
    wait_for(lambda: not run.states())


class Deadly:
    """A sequence that kills each process which reads its tenth sample.

    It is harmless where it was made, as planning reads samples there, and armed by being sent to a
    worker.
    """

    armed = False

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.armed and index == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"image": make_image(index), "label": index}

    def __getstate__(self) -> dict[str, Any]:
        return {"armed": True}


def test_a_task_that_kills_two_workers_ends_the_run_with_its_name(tmp_path: Path) -> None:
    sequence: Any = Deadly()
    with pytest.raises(WorkerError, match=r"two workers died .* SIGKILL") as error:
        shardkit.convert(sequence, "wds", tmp_path / "out", shard_samples=6, workers=1)
    assert "task 0: 20 samples from 'sample 0' on" in str(error.value)
    assert "fewer --workers" in str(error.value)
    assert not (tmp_path / "out").exists()


# In a worker: each task that is begun is noted, and the first worker that does task 1 is killed
# after its last rename, before it can say so.
DIES = """
import os, signal
from shardkit.conversion import work
real = work.run_task

def run_task(task, report):
    with open({began!r}, "a") as file:
        file.write(f"{{task.number}}\\n")
    real(task, report)
    if task.number == 1:
        open({died!r}, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)

work.run_task = run_task
"""


def test_a_task_that_is_done_is_not_done_again_when_its_worker_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_images(tmp_path / "in", classes=2, each=4, kilobytes=2)
    out, began, died = (tmp_path / name for name in ("out", "began", "died"))
    code = DIES.format(began=str(began), died=str(died))
    serve = "from shardkit.conversion.pool import serve"
    assert serve in pool._START
    monkeypatch.setattr(pool, "_START", pool._START.replace(serve, f"exec({code!r}); {serve}"))
    shardkit.convert(source, "wds", out, shard_size=12_000, workers=1)
    assert died.exists()
    tasks = began.read_text().split()
    assert sorted(set(tasks)) == sorted(tasks)
    shardkit.convert(source, "wds", tmp_path / "reference", shard_size=12_000, workers=0)
    assert files_of(out) == files_of(tmp_path / "reference")


# --- reading --------------------------------------------------------------------------------------

# Reads for long; making the ninth sample sends a signal, while the loop waits for a batch.
LOADS = """
import itertools, os, sys
import shardkit.stream
path, threads, sent = sys.argv[1], *map(int, sys.argv[2:])
made = itertools.count(1)
def transform(value):
    if next(made) == 9:
        os.kill(os.getpid(), sent)
    return value
try:
    options = {"batch_size": 4, "transforms": {"label": transform}}
    loader = shardkit.stream.Loader(path, threads=threads, **options)
    for epoch in range(10_000):
        for batch in loader:
            pass
except KeyboardInterrupt:
    sys.exit(130)
"""


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr.decode()


@pytest.mark.large
@pytest.mark.parametrize("threads", [2, 0, None], ids=["load", "load without threads", "bench"])
def test_reading_that_any_signal_ends_says_nothing_and_changes_nothing(
    sources: dict[str, Path], threads: int | None
) -> None:
    path = sources["shards"]
    before = files_of(path)
    for sent, code in SIGNALS.items():
        command = ["-c", LOADS, path, str(threads), str(int(sent))]
        if threads is None:
            command = ["-m", "shardkit", "bench", path, "--rounds", "100000", "--batch-size", "4"]
        process = subprocess.Popen(
            [sys.executable, *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        if threads is None:
            assert process.stderr is not None
            assert b"runs" in process.stderr.readline()
            process.send_signal(sent)
        found, said = finish(process)
        assert found == code
        lines = {line for line in said.splitlines() if "runs" not in line}
        assert lines <= {"", "shardkit: interrupted"}
    assert files_of(path) == before


# --- for tests of other files ---------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
