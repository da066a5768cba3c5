"""Workers and what they are sent."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.conversion import pool
from shardkit.conversion.run import prepare, work_of
from shardkit.conversion.work import Progress, run_task, unheard
from shardkit.options import ConvertOptions
from shardkit.sources import open_sources
from shardkit.testing import make_image
from tests.conftest import write_images

PIPES: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
WORKER = [sys.executable, "-c", pool._START]


def test_a_worker_ends_when_its_parent_is_killed_while_sending() -> None:
    """The path, what to import, or a task; and when a message is none."""
    messages = [pickle.dumps(sys.path), pickle.dumps(["json"]), pickle.dumps(["task"] * 100)]
    sent = [b"".join([*messages[:at], messages[at][: len(messages[at]) // 2]]) for at in range(3)]
    workers = [subprocess.Popen(WORKER, **PIPES) for _ in range(4)]
    for worker, data in zip(workers, [*sent, b"".join([*messages[:2], b"no pickle"])], strict=True):
        if worker is workers[-1]:  # garbage ends it by itself
            worker.stdin.write(data)
            worker.stdin.flush()
            assert worker.wait(60) == 1
            worker.communicate()
        else:
            assert worker.communicate(data, timeout=60)[1] == b""
            assert worker.returncode == 1


def test_a_worker_whose_parent_reads_no_more_ends_without_a_word() -> None:
    """Also while its other thread waits for tasks, from a pipe that is still open."""
    with subprocess.Popen(WORKER, **PIPES) as worker:
        worker.stdout.close()
        for message in (sys.path, [], b"no task, which it reports"):
            worker.stdin.write(pickle.dumps(message))
        worker.stdin.flush()
        assert (worker.wait(60), worker.stderr.read()) == (0, b"")


def test_a_task_carries_no_keys_of_other_samples(tmp_path: Path) -> None:
    photos = tmp_path / "in"
    photos.mkdir()
    for number in range(300):
        (photos / f"a.{'long' * 20}.{number}.jpg").write_bytes(make_image(number))
    shardkit.convert(photos, "wds", tmp_path / "first", workers=0)
    source = open_sources(tmp_path / "first")[""]
    some = source.select(np.arange(10))
    assert len(pickle.dumps(some)) < 4000 < 300 * 80
    copy = pickle.loads(pickle.dumps(some))
    assert copy.original(0, copy[0]["__key__"]).endswith(".0.jpg")
    shardkit.convert(tmp_path / "first", "arrow", tmp_path / "second", workers=0)
    with shardkit.open(tmp_path / "first") as first, shardkit.open(tmp_path / "second") as second:
        assert len(first.original_paths()) == 300
        assert first.original_paths() == second.original_paths()


def test_what_a_task_reported_is_in_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a task that was finished as its node died, reports may be lost."""
    monkeypatch.setattr("shardkit.conversion.work._REPORT_SECONDS", 0)
    photos = write_images(tmp_path / "in", classes=2, each=5)
    (photos / "class0/bad.jpg").write_bytes(b"text")
    plan = prepare(photos, "wds", tmp_path / "out", ConvertOptions(on_error="skip"))
    (task,) = plan.tasks
    heard: list[Progress] = []
    (tmp_path / "tasks").mkdir()
    run_task(work_of(task, plan.recipe, tmp_path / "tasks/000000"), heard.append)
    total = sum(heard, Progress(0, 0, 0))
    assert (total.samples, total.errors, total.bytes) == (11, 1, task.size)
    for known in (0, 4, len(heard)):
        lost = sum(heard[known:], Progress(0, 0, 0))
        assert unheard(tmp_path / "tasks/000000", heard[:known]) == lost
