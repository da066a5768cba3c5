"""C2 in real processes: signals at any change, dead workers, Ctrl-C; what workers are sent."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.conversion import pool
from shardkit.conversion.run import prepare, work_of
from shardkit.conversion.work import TaskProgress, is_finished, read_result, run_task
from shardkit.errors import WorkerError
from shardkit.options import ConvertOptions
from shardkit.sources import open_sources
from shardkit.testing import make_image
from tests.conftest import files_of, write_images
from tests.conversion.part_kills import Forks, wait_for
from tests.conversion.text_corpora import turns, write_lines
from tests.sources.test_text import put

pytestmark = [
    pytest.mark.xdist_group("timed"),
    pytest.mark.skipif(
        not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc"
    ),
]

RUNS = {
    "images as they are": ("images", "--to wds --workers 2 --shard-size 25kB"),
    "images resized": ("images", "--to beton --resize 24 --workers 1 --shard-size 9kB"),
    "images whose shards are joined": (
        "images",
        "--to wds --resize 24 --workers 2 --shard-samples 5",
    ),
    "images in this process": ("images", "--to lmdb --workers 0 --shard-size 25kB"),
    "images to Lance": ("images", "--to lance --workers 1 --shard-size 50kB"),
    "images that are skipped or left out": (
        "bad",
        "--to tfrecord --resize 5 --min-size 5 --on-error skip --workers 1 --shard-size 5kB",
    ),
    "images split": ("images", "--to hf --split train=0.8,val=0.2 --workers 1 --shard-size 25kB"),
    "shards": ("shards", "--to arrow --workers 1 --shard-size 25kB"),
    "text": ("text", "--to parquet --workers 1 --shard-size 25kB"),
    "text as tokens": (
        "text",
        "--to arrow --seq-len 128 --pack nosplit --workers 1 --shard-size 10kB",
    ),
    "conversations whose shards are joined": (
        "chats",
        "--to arrow --seq-len 64 --chat-template template --workers 1 --shard-size 50kB",
    ),
    "tokens": ("tokens", "--to megatron --workers 0"),
}
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}
INTERRUPTED = "shardkit: interrupted; the same command run again continues"


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with Forks(tmp_path_factory.mktemp("forks")) as forks:
        yield forks


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    found = {name: root / name for name in ("images", "bad", "shards", "text", "tokens")}
    write_images(found["images"], classes=3, each=8, kilobytes=5)
    write_images(found["bad"], classes=3, each=8)
    put(found["bad"] / "class0/003.jpg", b"text")
    put(found["bad"] / "class1/small.png", make_image(1, "PNG", size=(4, 4)))
    shardkit.convert(found["images"], "wds", found["shards"], shard_size="25kB", workers=0)
    for number in range(12):
        put(found["text"] / f"{number}.txt", f"{number} words " * 1000)
    found |= {"chats": root / "chats", "template": root / "chat.jinja"}
    found["template"].write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    found["chats"].mkdir()
    for number in range(8):
        chats = ({"messages": turns([n], [number, 2] * 9)} for n in range(50))
        write_lines(found["chats"] / f"{number}.jsonl", chats)
    schema = {"tokens": shardkit.Array("uint16", (None,))}
    with shardkit.create(found["tokens"], to="arrow", schema=schema) as writer:
        for number in range(500):
            writer.write({"tokens": np.arange(number % 97, dtype=np.uint16)})
    return found


def partial_of(out):
    return out.with_name(f"{out.name}.partial")


def finished(out):
    """The results of the tasks that a run has finished; those in the making have an ending."""
    return list(partial_of(out).glob("tasks/[0-9][0-9][0-9][0-9][0-9][0-9]/result.json"))


@pytest.mark.large
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_any_signal_ends_says_a_line_and_is_continued(
    forks, sources, tmp_path, gpt2, name
):
    """C2, X1: to the run alone, or with its workers, one after the other on the same output."""
    source, options = RUNS[name]
    words = [
        *(sources.get(word, word) for word in options.split()),
        *(["--tokenizer", gpt2] if "--seq-len" in options else []),
    ]
    command = ["convert", sources[source], *words, "--quiet", "-o"]
    out, whole = tmp_path / "out", tmp_path / "whole"
    joined = "joined" in name
    small = "from shardkit.conversion import cuts; cuts._LEAST_WORK = 5_000" if joined else ""
    run = forks.start(*command, whole, first=small)
    assert run.wait() == (0, "")
    at = run.changes() // (4 if joined else 5)  # the last comes as shards are joined
    before = {}
    for number, (sent, code) in enumerate(SIGNALS.items()):
        to = "run" if (number + len(name)) % 2 else "group"
        print(f"{sent.name} to the {to} after {at} changes")
        ended = forks.start(*command, out, at=at, sent=sent, to=to, first=small)
        found, said = ended.wait()
        assert (found, said.strip()) == (code, INTERRUPTED if code == 130 else "")
        assert not out.exists()
        wait_for(lambda run=ended: not run.states())  # nobody goes on for a run that is gone
        times = {path: path.stat().st_mtime_ns for path in finished(out)}
        assert before.items() <= times.items()  # no task is done twice
        before = times
    assert forks.start(*command, out, first=small).wait() == (0, "")
    assert files_of(out) == files_of(whole)
    assert not partial_of(out).exists()
    if "--workers 0" not in options:  # the task of a worker that dies is done again
        run = forks.start(*command, tmp_path / "again", at=4, to="worker", first=small)
        assert run.wait() == (0, "")
        assert run.changes() > 4
        assert files_of(tmp_path / "again") == files_of(whole)


@pytest.mark.large
def test_ctrl_c_ends_a_run_whose_workers_hang(forks, sources, tmp_path):
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

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if self.armed and index == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"image": make_image(index), "label": index}

    def __getstate__(self):
        return {"armed": True}


def test_a_task_that_kills_two_workers_ends_the_run_with_its_name(tmp_path):
    sequence = Deadly()
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


def test_a_task_that_is_done_is_not_done_again_when_its_worker_dies(tmp_path, monkeypatch):
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


# In a worker: the first one that begins task 1 is killed, and each notes whether it names samples.
NAMES = """
import os, signal
from shardkit.conversion import read_ahead, work
real = work.run_task

def run_task(task, report):
    with open({began!r}, "a") as file:
        print(task.number, read_ahead.begins is not None, file=file)
    if task.number == 1 and not os.path.exists({died!r}):
        open({died!r}, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    real(task, report)

work.run_task = run_task
"""


def test_samples_are_named_in_the_task_that_is_repeated_and_no_other(tmp_path, monkeypatch):
    """As that is slow."""
    source, began = (
        write_images(tmp_path / "in", classes=2, each=4, kilobytes=2),
        tmp_path / "began",
    )
    serve, code = "from shardkit.conversion.pool import serve", NAMES
    code = code.format(began=str(began), died=str(tmp_path / "died"))
    monkeypatch.setattr(pool, "_START", pool._START.replace(serve, f"exec({code!r}); {serve}"))
    shardkit.convert(source, "wds", tmp_path / "out", shard_size=12_000, workers=1)
    lines = began.read_text().splitlines()
    assert len(lines) > 3
    assert [line for line in lines if "True" in line] == ["1 True"]


def is_alive(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
WORKER = [sys.executable, "-c", pool._START]


def test_a_worker_ends_when_its_parent_is_killed_while_sending():
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


def test_a_worker_whose_parent_reads_no_more_ends_without_a_word():
    """Also while its other thread waits for tasks, from a pipe that is still open."""
    with subprocess.Popen(WORKER, **PIPES) as worker:
        worker.stdout.close()
        for message in (sys.path, [], b"no task, which it reports"):
            worker.stdin.write(pickle.dumps(message))
        worker.stdin.flush()
        assert (worker.wait(60), worker.stderr.read()) == (0, b"")


def test_a_task_carries_no_keys_of_other_samples(tmp_path):
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


def test_what_a_task_reported_is_in_its_result(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkit.conversion.work._REPORT_SECONDS", 0)
    photos = write_images(tmp_path / "in", classes=2, each=5)
    (photos / "class0/bad.jpg").write_bytes(b"text")
    plan = prepare(photos, "wds", tmp_path / "out", ConvertOptions(on_error="skip"))
    (task,) = plan.tasks
    heard = []
    (tmp_path / "tasks").mkdir()
    run_task(work_of(task, plan.recipe, tmp_path / "tasks/000000"), heard.append)
    total = sum(heard, TaskProgress(0, 0, 0))
    assert (total.samples, total.errors, total.bytes) == (11, 1, task.size)
    assert read_result(tmp_path / "tasks/000000").progress == total


def test_a_pool_that_was_killed_runs_the_second_wave(tmp_path):
    plan = prepare(
        write_images(tmp_path / "in", classes=1, each=20, kilobytes=5),
        "wds",
        tmp_path / "out",
        ConvertOptions(shard_size=25_000),
    )
    folders = [tmp_path / "tasks" / f"{task.number:06d}" for task in plan.tasks]
    works = [work_of(task, plan.recipe, at) for task, at in zip(plan.tasks, folders, strict=True)]
    (tmp_path / "tasks").mkdir()
    with pool.Pool(2) as processes:
        processes.kill()
        processes.run(iter(works), len(works), lambda progress: None)
    assert len(works) > 2
    assert all(map(is_finished, folders))
