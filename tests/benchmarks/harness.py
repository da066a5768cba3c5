"""What the benchmarks share: contenders that run in turns, medians, versions, and JSON at the end.

Each round runs every contender once, in an order of its own, so that what slows the machine down
for a while slows all of them.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

LOOPS = Path(__file__).with_name("loops.py")
SHARDKIT = [sys.executable, "-m", "shardkit"]
_PATIENCE = 60.0  # seconds for an epoch
# Whose versions are reported.
PACKAGES = ("shardkit", "webdataset", "ffcv", "numpy", "simplejpeg", "xxhash", "obstore")


def arguments(doc, *names):
    """A parser with the options that most have: --data, --work, --peers and --rounds, if named."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name in names:
        if name == "rounds":
            parser.add_argument("--rounds", type=int, default=5)
        else:
            parser.add_argument(f"--{name}", type=Path, required=name != "peers")
    return parser


def seconds_of(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def called(*command, **environ):
    """What a command prints to stdout."""
    words, environ = list(map(str, command)), {**os.environ, **environ}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def timed(*commands, **environ):
    """Seconds of these commands together, with their starts."""
    return seconds_of(lambda: [called(*command, **environ) for command in commands])


def answer(*command, **environ):
    """The JSON in the last line that a command prints."""
    return json.loads(called(*command, **environ).splitlines()[-1])


def script(code, *words, python=sys.executable, **environ):
    """The same of Python code in an interpreter of its own."""
    return answer(python, "-W", "ignore", "-c", code, *words, **environ)


def fresh(place):
    """A place for an output, with what stood there gone from the disk as well."""
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    os.sync()
    return place


def measure(runs, rounds):
    """What each contender returns, once a round."""
    found = {name: [] for name in runs}
    order = list(runs)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            value = runs[name]()
            found[name].append(round(value, 6) if isinstance(value, float) else value)
    return found


def summary(seconds, pairs, samples):
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": seconds,
        "median": medians,
        "samples_per_second": {name: round(samples / m) for name, m in medians.items()},
        "faster_by": {
            f"{ours} than {peer}": round(medians[peer] / medians[ours], 2)
            for peer, ours in pairs.items()
        },
        "samples": samples,
        **machine(),
    }


def machine():
    """The versions of what is measured, and on what."""
    there = [name for name in PACKAGES if importlib.util.find_spec(name)]
    versions = {"python": platform.python_version(), **{name: version(name) for name in there}}
    return {"versions": versions, "cores": os.cpu_count()}


class Memory:
    """The most memory of this process meanwhile, in MB, looked up every few milliseconds.

    `anonymous` is what the system cannot take away; `with_files` has the pages of temporary files
    as well, which it can.
    """

    def __enter__(self):
        self.anonymous = self.with_files = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def _watch(self):
        over = False
        while not over:
            over = self._end.wait(0.01)
            lines = Path("/proc/self/status").read_text().splitlines()
            sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
            self.anonymous = max(self.anonymous, int(sizes["RssAnon"]) >> 10)
            self.with_files = max(self.with_files, int(sizes["VmRSS"]) >> 10)


class Contender:
    """A process of loops.py that does epochs when it is asked to."""

    def __init__(self, python, name, asked, environ=()):
        self._process = subprocess.Popen(
            [python, "-W", "ignore", os.fspath(LOOPS), name, json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **dict(environ)}, start_new_session=True,
        )  # fmt: skip
        self._answer()

    def begin(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self):
        late = threading.Timer(_PATIENCE, self._kill)
        late.start()
        try:
            return json.loads(self._answer())
        finally:
            late.cancel()

    def epoch(self):
        self.begin()
        return self.end()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            error = self._process.stderr.read()[-3000:].strip()
            raise RuntimeError(error or f"no end in {_PATIENCE:.0f} s")
        return line

    def _kill(self):
        """With its workers, and what would remove the next one's shared memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._kill()
        self._process.communicate()
