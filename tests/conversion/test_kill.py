"""C2 with real processes: kill -9 at any moment, dead workers, Ctrl-C. The long form is `large`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.conversion.run import prepare
from shardkit.errors import WorkerError
from shardkit.options import ConvertOptions
from shardkit.testing import make_image
from tests.conftest import IMAGE_FORMATS, files_of, write_images

pytestmark = [
    pytest.mark.xdist_group("timed"),
    pytest.mark.skipif(
        not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc"
    ),
]


def start(source: Path, out: Path, format: str = "wds") -> subprocess.Popen[bytes]:
    command = ["convert", source, "--to", format, "-o", out, "--shard-size", "25kB"]
    return subprocess.Popen(
        [sys.executable, "-m", "shardkit", *command, "--workers", "2", "--quiet"],
        start_new_session=True,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr.decode()


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Those that do tasks: pylance may have a process, too, whose death is an error."""
    try:
        tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
        children = [pid for task in tasks for pid in (task / "children").read_text().split()]
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    except OSError:  # it has just ended
        return []
    return [int(pid) for pid, command in commands.items() if b"lance.server" not in command]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true answer; a run that hangs fails here."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.002)
    raise AssertionError("it did not happen in time")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_images(tmp_path / "in", classes=4, each=30, kilobytes=5)


@pytest.fixture
def reference(source: Path, tmp_path: Path) -> dict[str, bytes]:
    shardkit.convert(source, "wds", tmp_path / "reference", shard_size="25kB", workers=0)
    return files_of(tmp_path / "reference")


def partial_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def finished(out: Path) -> list[Path]:
    """The results of the tasks that a run has finished; those in the making have an ending."""
    return list(partial_of(out).glob("tasks/[0-9][0-9][0-9][0-9][0-9][0-9]/result.json"))


def kill_at_random(
    start: Callable[[], subprocess.Popen[bytes]],
    out: Path,
    reference: dict[str, bytes],
    tasks: int,
    rounds: int,
    seed: int,
) -> dict[str, int]:
    """Kill `rounds` runs, the whole group and one worker in turn; continue each.

    Each is killed when a random number of its `tasks` are finished, however slow the machine is.
    Every sixth is killed at a random time after its start instead, perhaps before it writes.
    """
    partial = partial_of(out)
    dice = random.Random(seed)
    seen = {"before work": 0, "in work": 0, "after": 0}
    for number in range(rounds):
        process = start()
        early, done = number % 6 == 5, dice.randint(0, tasks * 3 // 4)
        if early:
            time.sleep(dice.uniform(0.2, 0.8))
        else:
            wait_for(lambda run=process, n=done: len(finished(out)) >= n or run.poll() is not None)
        workers = workers_of(process)
        one_worker = workers and number % 2 and not early
        try:
            os.kill(dice.choice(workers) if one_worker else -process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code, stderr = finish(process)
        seen["after" if out.exists() else "in work" if partial.exists() else "before work"] += 1
        if out.exists():
            assert files_of(out) == reference
        if one_worker:
            assert (code, stderr) == (0, "")  # its task was done again
        for worker in workers:  # nobody goes on working for a run that is gone
            wait_for(lambda pid=worker: not is_alive(pid))
        assert finish(start()) == (0, "")
        assert files_of(out) == reference
        assert not partial.exists()
        shutil.rmtree(out)
    return seen


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.large
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("format", "rounds"), [(format, 12 if format == "wds" else 2) for format in IMAGE_FORMATS]
)
def test_kill_9_many_times_is_continued(
    source: Path, tmp_path: Path, format: str, rounds: int
) -> None:
    """Of each format a run whose worker dies, and one that is killed; all other moments of TAR,
    as tasks are continued by the same code."""
    out = tmp_path / "out"
    shardkit.convert(source, format, tmp_path / "whole", shard_size="25kB", workers=0)
    tasks = len(prepare(source, format, out, ConvertOptions(shard_size=25_000)).tasks)
    reference = files_of(tmp_path / "whole")
    seen = kill_at_random(lambda: start(source, out, format), out, reference, tasks, rounds, seed=9)
    print(f"\n{format}: {rounds} kills: {seen}")
    assert seen["in work"] >= rounds // 4


class Deadly:
    """A sequence that kills the process which reads its tenth sample, `times` times in all.

    It is harmless where it was made, as planning reads samples there, and armed by being sent to a
    worker.
    """

    def __init__(self, folder: Path, times: int) -> None:
        self.folder = folder
        self.times = times
        self.armed = False

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        deaths = len(list(self.folder.glob("death*")))
        if self.armed and index == 10 and deaths < self.times:
            (self.folder / f"death{deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"image": make_image(index), "label": index}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "armed": True}


def convert_deadly(tmp_path: Path, times: int, out: str) -> shardkit.ConvertResult:
    sequence: Any = Deadly(tmp_path, times)
    return shardkit.convert(sequence, "wds", tmp_path / out, shard_samples=6, workers=2)


@pytest.mark.large
def test_the_task_of_a_dead_worker_is_done_again(tmp_path: Path) -> None:
    convert_deadly(tmp_path, 0, "reference")
    result = convert_deadly(tmp_path, 1, "out")
    assert result.samples == 20
    assert (tmp_path / "death0").exists()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "reference")


def test_a_task_that_kills_two_workers_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"two workers died .* SIGKILL") as error:
        convert_deadly(tmp_path, 9, "out")
    assert "task 0: 20 samples from 'sample 0' on" in str(error.value)
    assert "fewer --workers" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.large
def test_ctrl_c_ends_a_run_whose_workers_hang_and_the_next_continues(
    source: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    process = start(source, out)
    workers = wait_for(lambda: workers_of(process))
    wait_for(lambda: list((tmp_path / "out.partial/tasks").glob("*/result.json")))
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    code, stderr = finish(process)
    print(f"\nCtrl-C took {time.monotonic() - began:.2f} s")
    assert code == 130
    assert stderr.strip() == "shardkit: interrupted; the same command run again continues"
    assert not out.exists()
    for worker in workers:
        wait_for(lambda pid=worker: not is_alive(pid))
    assert finish(start(source, out)) == (0, "")
    assert files_of(out) == reference


# --- every command, source, engine and format, interrupted by every signal ------------------------

# A source, and what it is converted to.
RUNS = {
    "images as they are": ("images", "--to wds --workers 2"),
    "images resized": ("images", "--to beton --resize 24 --workers 2"),
    "images in this process": ("images", "--to lmdb --workers 0"),
    "images split": ("images", "--to hf --split train=0.8,val=0.2 --workers 2"),
    "shards": ("shards", "--to arrow --workers 2"),
    "text": ("text", "--to parquet --workers 2"),
    "tokens": ("tokens", "--to megatron --workers 0"),
}
LOADS = """
import sys
import shardkit.stream
try:
    loader = shardkit.stream.Loader(sys.argv[1], batch_size=4, threads=int(sys.argv[2]))
    for batch in loader:
        print("begun", file=sys.stderr, flush=True)  # once: nobody reads a pipe that is full
        break
    while True:
        for batch in loader:
            pass
except KeyboardInterrupt:
    sys.exit(130)
"""
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}
INTERRUPTED = "shardkit: interrupted; the same command run again continues"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    found = {name: root / name for name in ("images", "shards", "text", "tokens")}
    write_images(found["images"], classes=4, each=30, kilobytes=5)
    shardkit.convert(found["images"], "wds", found["shards"], shard_size="25kB", workers=0)
    found["text"].mkdir()
    for number in range(40):
        (found["text"] / f"{number}.txt").write_text(f"{number} words " * 1000)
    schema = {"tokens": shardkit.Array("uint16", (None,))}
    with shardkit.create(found["tokens"], to="arrow", schema=schema) as writer:
        for number in range(2000):
            writer.write({"tokens": np.arange(number % 97, dtype=np.uint16)})
    return found


def works_in(process: subprocess.Popen[bytes], folder: Path) -> bool:
    """Whether a process has a file of a folder open: before, it may be where Python itself starts,
    which an interrupt ends with a traceback."""
    try:
        handles = [os.readlink(handle) for handle in Path(f"/proc/{process.pid}/fd").iterdir()]
    except OSError:  # it has just ended, or closed one
        return False
    return any(folder in Path(handle).parents for handle in handles)


def signalled(
    command: list[Any],
    when: Callable[[subprocess.Popen[bytes]], Any] | None,
    delay: float,
    sent: signal.Signals,
    group: bool,
) -> tuple[int, str]:
    """Exit code and words of a command that gets a signal so long after something has happened.

    That is its first line where nothing else is given.
    """
    process = subprocess.Popen(
        [sys.executable, *command], start_new_session=True, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    first = ""
    if when is None:
        assert process.stderr is not None
        first = process.stderr.readline().decode()
    else:
        wait_for(lambda: when(process) or process.poll() is not None)
    time.sleep(delay)
    workers = workers_of(process)
    try:
        (os.killpg if group else os.kill)(process.pid, sent)
    except ProcessLookupError:
        pass
    code, said = finish(process)
    for worker in workers:
        wait_for(lambda pid=worker: not is_alive(pid))
    return code, first + said


@pytest.mark.large
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [name if name == "tokens" else pytest.param(name, marks=pytest.mark.large) for name in RUNS],
)
def test_a_conversion_that_any_signal_ends_says_no_more_than_a_line_and_continues(
    sources: dict[str, Path], tmp_path: Path, name: str, large: bool
) -> None:
    """C2, X1: signals at random moments, one after the other on the same output."""
    source, options = RUNS[name]
    words = ["convert", sources[source], *options.split(), "--quiet"]
    if name != "tokens" and "beton" not in options:
        words += ["--shard-size", "25kB"]
    command = ["-m", "shardkit", *words, "-o"]
    out, whole = tmp_path / "out", tmp_path / "whole"
    process = subprocess.Popen([sys.executable, *command, whole], stderr=subprocess.PIPE)
    wait_for(lambda: partial_of(whole).exists() or process.poll() is not None)
    began = time.monotonic()
    assert finish(process) == (0, "")
    work = time.monotonic() - began
    reference = files_of(whole)
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    dice, codes = random.Random(seed), []
    for _ in range(2 if large else 1):
        for sent, code in SIGNALS.items():
            partial = partial_of(out)
            found, said = signalled(
                [*command, out], lambda run, at=partial: works_in(run, at),
                dice.uniform(0, work), sent, dice.random() < 0.5,
            )  # fmt: skip
            # -2: at the very end, when Python has put its handlers away
            said_so = (code, INTERRUPTED if code == 130 else "")
            assert (found, said.strip()) in [said_so, (0, ""), (-signal.SIGINT, "")]
            assert not out.exists() or files_of(out) == reference
            codes.append(found)
        assert signalled([*command, out], lambda run: False, 0, signal.SIGINT, False) == (0, "")
        assert files_of(out) == reference
        shutil.rmtree(out)
    print(f"{name}: {len(codes)} signals, of which {len(codes) - codes.count(0)} ended a run")


@pytest.mark.large
@pytest.mark.parametrize(
    "what",
    [
        "load",
        *(pytest.param(w, marks=pytest.mark.large) for w in ("bench", "load without threads")),
    ],
)
def test_reading_that_any_signal_ends_says_nothing_and_changes_nothing(
    sources: dict[str, Path], what: str, large: bool
) -> None:
    path = sources["shards"]
    before = files_of(path)
    if what == "bench":
        command = ["-m", "shardkit", "bench", path, "--rounds", "100000", "--batch-size", "4"]
    else:
        command = ["-c", LOADS, path, "0" if "without" in what else "2"]
    dice = random.Random(3)
    for sent, code in SIGNALS.items():
        for _ in range(2 if large else 1):
            found, said = signalled(command, None, dice.uniform(0, 0.5), sent, dice.random() < 0.5)
            assert found == code
            lines = {line for line in said.splitlines() if line != "begun" and "runs" not in line}
            assert lines <= {"", "shardkit: interrupted"}
    assert files_of(path) == before
