"""Commands in real processes that a signal ends at one of their changes, and what is left of them.

Not time decides when: each change of a file or an object is counted, by a run and its workers.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Forks for each line, a command: starting Python each time would take most of the time. It answers
# with the child's number, and to a number with the child's exit code.
_FORKS = """
import json, os, sys, traceback
import shardkit.cli.convert, shardkit.cli.merge, shardkit.cli.progress, shardkit.conversion.merge
import shardkit.conversion.convert, shardkit.sources.image_folder
from shardkit.cli import main
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):
        print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        continue
    child = os.fork()
    if not child:
        os.setsid()
        said = os.open(asked[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1), os.dup2(said, 2)
        sys.argv = ["shardkit", *asked[2:]]
        try:
            exec(asked[1])
            main()
        except SystemExit as ended:
            os._exit(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        os._exit(70)
    print(child, flush=True)
"""
# Counts changes by the length of a file, to which all processes of a run append.
_COUNTS = """
import os, threading
from shardkit.storage import fs

one_by_one = threading.Lock()  # else a thread sees the length that another one's change made
def counting(operation):
    def changed(*args):
        result = operation(*args)
        with one_by_one:
            os.write(counts, b".")
            number = os.lseek(counts, 0, os.SEEK_CUR)
        if number == {at}:
            {act}
        return result
    return changed

counts = os.open({counts!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for name in (*fs.CHANGES, *fs.STORE_CHANGES):
    setattr(fs, name, counting(getattr(fs, name)))
"""
# The same in the workers: `code` runs in them before anything else of shardkit.
_IN_WORKERS = """
from shardkit.conversion import pool
serve = "from shardkit.conversion.pool import serve"
assert serve in pool._START
pool._START = pool._START.replace(serve, "exec(" + repr({code!r}) + "); " + serve)
"""
_TO = {"run": "os.kill(os.getsid(0), {})", "group": "os.killpg(0, {})"}


class Forks:
    """Runs commands of shardkit, which say what they say to files in a folder."""

    def __init__(self, folder, **environ):
        self._folder, self.started = folder, 0
        self._environ = {**os.environ, **environ}

    def __enter__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", _FORKS]
        self._process = subprocess.Popen(command, env=self._environ, **pipes)
        return self

    def __exit__(self, *error):
        self._process.communicate()

    def ask(self, asked):
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, *words, at=0, sent=signal.SIGKILL, to="group", first=""):
        """After the change number `at`, from 1 on, a signal is sent to the "run", to its "group"
        with the workers, or to the "worker" that makes this change of all that workers make.
        The code `first` runs before the command."""
        self.started += 1
        said, counts = (self._folder / f"{name}-{self.started}" for name in ("said", "counts"))
        act = _TO.get(to, "os.kill(os.getpid(), {})").format(int(sent))
        code = _COUNTS.format(counts=str(counts), at=at, act=act)
        code = _IN_WORKERS.format(code=code) + (code if to in _TO else "") + first
        return Run(self.ask([str(said), code, *map(str, words)]), said, counts, self)


class Run:
    """A process that was started, the first of its session."""

    def __init__(self, child, said, counts, forks):
        self.child, self._said, self._counts, self._forks = child, said, counts, forks

    def wait(self):
        return self._forks.ask(self.child), self.said()

    def said(self):
        return self._said.read_text() if self._said.exists() else ""

    def kill(self):
        os.killpg(self.child, signal.SIGKILL)

    def changes(self):
        return self._counts.stat().st_size

    def states(self):
        """A letter of each process of the session that is not dead, as in Linux's /proc."""
        found = ""
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, session = path.read_text().rpartition(") ")[2].split()[:4]
            except OSError:  # it has just ended
                continue
            found += state if int(session) == self.child and state not in "ZX" else ""
        return found


def wait_for(condition, seconds=60):
    """The first true answer; a run that hangs fails here."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.002)
    raise AssertionError("it did not happen in time")


# What a process may be told that others are in the way of, or have just been.
_MEANWHILE = (
    *("another run", "of this output is running", "is already running"),
    "something was put at the output while this run was working",  # published as this run planned
)


def killed_parts(forks, command, out, changes, dice):
    """Run four parts at a time, kill some after one of their first `changes`, and repeat each until
    it is done, then merge, which is killed once too. Returns how many were killed."""
    killed, parts = 0, [f"{number}/4" for number in range(1, 5)]
    for turn in range(8):
        runs = {}
        for part in parts:
            at = 1 + int(dice.uniform(0, changes)) if turn < 2 and dice.random() < 0.7 else 0
            runs[part] = forks.start(*command, "--part", part, at=at)
        ended = {part: run.wait() for part, run in runs.items()}
        for code, said in ended.values():
            killed += code == -signal.SIGKILL
            assert was_told(code, said) or code in (0, -signal.SIGKILL), said
        parts = [part for part, (code, _) in ended.items() if code]
        if not parts:
            break
    assert not parts
    for at in (1 + int(dice.uniform(0, changes)), 0):
        code, said = forks.start("merge", out, "--json", at=at).wait()
        killed += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), said
    assert code == 0, said
    return killed


def was_told(code, said):
    """Whether a process came while others were at work, and was told to come again."""
    assert code != 2 or any(words in said for words in _MEANWHILE), said
    return code == 2


def at_once(forks, command, out):
    """Start parts, whole runs and merges at once, until all are content; how many were told."""
    words = [["--part", "1/2"], ["--part", "2/2"], [], ["--part", "1/2"], []]
    told = 0
    while words:
        runs = [(more, forks.start(*command, *more)) for more in words]
        merging = forks.start("merge", out).wait()
        assert merging[0] in (0, 2), merging
        ended = [(more, *run.wait()) for more, run in runs]
        assert all(code in (0, 2) for _, code, _ in ended), ended
        words = [more for more, code, said in ended if was_told(code, said)]
        told += len(words)
    assert forks.start("merge", out).wait()[0] == 0
    return told
