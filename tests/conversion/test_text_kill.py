"""C2 for text: kill -9, Ctrl-C and dead workers while documents are tokenized and packed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from shardkit.options import TextOptions
from tests.codecs import tokenizer_zoo
from tests.conftest import files_of
from tests.conversion.test_kill import finish, finished, wait_for, workers_of
from tests.conversion.text_corpora import prose, write_corpus

pytestmark = [
    pytest.mark.xdist_group("timed"),
    pytest.mark.skipif(
        not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc"
    ),
]

FILES = 12
DOCUMENTS = 250  # of each: a task of its own


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that no fast engine does, so that there is time to interrupt it."""
    return tokenizer_zoo.write_json(tmp_path_factory.mktemp("tokenizer"), "shuffled")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts = prose(FILES * DOCUMENTS)
    for n in range(FILES):
        first = n * DOCUMENTS
        write_corpus(folder / f"{n:02d}.jsonl", texts[first : first + DOCUMENTS])
    return folder


@pytest.fixture(scope="module")
def reference(
    source: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("reference") / "out"
    text = TextOptions(tokenizer=tokenizer, seq_len=128, pack="nosplit")
    shardkit.convert(source, "arrow", out, workers=0, shard_size="100kB", text=text)
    return files_of(out)


def start(source: Path, out: Path, tokenizer: Path, workers: int) -> subprocess.Popen[bytes]:
    words = ["convert", source, "--to", "arrow", "-o", out, "--shard-size", "100kB"]
    words += ["--tokenizer", tokenizer, "--seq-len", "128", "--pack", "nosplit"]
    words += ["--workers", str(workers), "--quiet"]
    return subprocess.Popen(
        [sys.executable, "-m", "shardkit", *words], start_new_session=True, stderr=subprocess.PIPE
    )


def done(out: Path) -> int:
    """The tasks that are finished, as far as one can see; one more when there is the output."""
    return FILES + 1 if out.exists() else len(finished(out))


def kill_when(process: subprocess.Popen[bytes], out: Path, tasks: int) -> None:
    """Kill the run and its workers once so many tasks are finished."""
    wait_for(lambda: done(out) >= tasks)
    os.killpg(process.pid, signal.SIGKILL)
    finish(process)


@pytest.mark.large
def test_a_run_killed_over_and_over_is_continued_by_any_number_of_workers(
    source: Path, tokenizer: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    before: dict[Path, int] = {}
    for workers, tasks in ((2, 1), (1, 4), (3, 7)):
        kill_when(start(source, out, tokenizer, workers), out, tasks)
        assert not out.exists()
        times = {path: path.stat().st_mtime_ns for path in finished(out)}
        assert len(times) >= tasks
        assert before.items() <= times.items()  # none is done twice
        before = times
    text = TextOptions(tokenizer=tokenizer, seq_len=128, pack="nosplit")
    shardkit.convert(source, "arrow", out, workers=0, shard_size="100kB", text=text)
    assert files_of(out) == reference
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.large
def test_the_task_of_a_worker_that_died_is_done_again(
    source: Path, tokenizer: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(source, out, tokenizer, 2)
    wait_for(lambda: done(out) >= 1)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    assert finish(process) == (0, "")
    assert files_of(out) == reference


@pytest.mark.large
def test_ctrl_c_ends_a_run_and_the_next_continues(tokenizer: Path, tmp_path: Path) -> None:
    texts = prose(4000)
    source = write_corpus(tmp_path / "a.jsonl", texts)
    out = tmp_path / "out"
    process = start(source, out, tokenizer, 2)
    wait_for(lambda: list((tmp_path / "out.partial/tasks").glob("*.tmp/shard-*")))
    os.killpg(process.pid, signal.SIGINT)
    code, stderr = finish(process)
    assert (code, stderr.strip()) == (
        130,
        "shardkit: interrupted; the same command run again continues",
    )
    assert not out.exists()
    assert list((tmp_path / "out.partial/tasks").iterdir()) == []
    assert finish(start(source, out, tokenizer, 1)) == (0, "")
    with shardkit.open(out) as dataset:
        assert dataset.manifest is not None
        assert dataset.manifest.text["documents"] == len(texts)


@pytest.mark.large
def test_another_tokenizer_does_not_continue_what_was_killed(
    source: Path, tokenizer: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tokenizer_zoo.write_json(tmp_path / "other", "gpt2")
    kill_when(start(source, out, tokenizer, 2), out, 2)
    code, stderr = finish(start(source, out, other, 2))
    assert code == 2
    assert "unfinished conversion" in stderr
    assert "the tokenizer's file tokenizer.json has changed" in " ".join(stderr.split())
    assert done(out) >= 2
    assert finish(start(source, out, tokenizer, 2)) == (0, "")
    assert files_of(out) == reference


@pytest.mark.large
@pytest.mark.timeout(3600)
def test_kill_9_many_times_is_continued(
    source: Path, tokenizer: Path, reference: dict[str, bytes], tmp_path: Path
) -> None:
    dice = random.Random(5)
    out = tmp_path / "out"
    killed = 0
    for _ in range(15):
        process = start(source, out, tokenizer, dice.randint(1, 4))
        kill_when(process, out, min(done(out) + dice.randint(0, 4), FILES + 1))
        if not out.exists():
            killed += 1
            continue
        assert files_of(out) == reference
        shutil.rmtree(out)
        shutil.rmtree(f"{out}.partial", ignore_errors=True)
    assert killed > 4
    assert finish(start(source, out, tokenizer, 2)) == (0, "")
    assert files_of(out) == reference
