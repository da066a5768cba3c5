"""A process that works on an output, round after round, as `rounds` asks several to at once.

It does nothing there but to be there: what matters is when it may.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardkit import storage
from shardkit.conversion import claim, part_lock
from shardkit.conversion.partial import partial_of
from shardkit.conversion.target import Target
from shardkit.errors import OutputError
from shardkit.part_of import PartOf

JOBS = [{"recipe": {"format": "wds", "sources": [n]}} for n in range(2)]


def one(out: Path, who: str, job: int, seconds: float) -> dict[str, Any]:
    """Work as a part or as a whole run: from when until when, and alone or not."""
    partial = partial_of(Target(out, "wds"))
    found: dict[str, Any] = {"who": who, "job": job, "times": [], "said": ""}

    def work(alone: bool) -> None:
        until, times = time.monotonic() + seconds, [time.monotonic()] * 2
        found["times"].append((alone, times))
        while time.monotonic() < until:
            partial.check()
            times[1] = time.monotonic()
            time.sleep(0.002)

    try:
        part = None if who == "whole" else PartOf.parse(who)
        partial.begin(JOBS[job], resume=True, part=part)
        work(part is None)
        found["ended"] = True
        if part is not None and partial.try_alone():
            work(True)
    except OutputError as error:
        found["said"] = " ".join(str(error).split())
    finally:
        with contextlib.suppress(OutputError):
            partial.release()
    return found


def main(out: str, beat: float, patience: float) -> None:
    part_lock._PAUSE = patience / 20
    claim.BEAT, part_lock.PATIENCE, part_lock._TIE = beat, patience, patience
    for line in sys.stdin:
        print(json.dumps(one(storage.output(out), *json.loads(line))), flush=True)


Process = subprocess.Popen[bytes]


def rounds(
    out: str, environ: Mapping[str, str], count: int, *, beat: float, patience: float, seed: int
) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """What the processes of each round did, and whether one was killed in it."""
    dice = random.Random(seed)
    command = [sys.executable, "-m", __name__, out, str(beat), str(patience)]

    def start() -> Process:
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    processes = [start() for _ in range(6)]
    try:
        for _ in range(count):
            jobs = dice.choice([[0], [0], [0, 1]])
            names = dice.choice([["1/3", "2/3", "3/3"], ["1/3", "2/3", "3/3", "1/2", "whole"]])
            for process in processes:
                long = dice.choice([0, 0.01, patience, 3 * patience])
                asked = [dice.choice(names), dice.choice(jobs), dice.uniform(0, long)]
                assert process.stdin is not None
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
            kill = dice.random() < 0.1
            if kill:
                time.sleep(dice.uniform(0, patience))
                processes[0].send_signal(signal.SIGKILL)
            lines: list[bytes] = [
                process.stdout.readline() for process in processes if process.stdout
            ]
            assert all(lines[1 if kill else 0 :]), "a process has ended by itself"
            yield [json.loads(line) for line in lines if line], kill
            if kill:
                processes[0].communicate()
                processes[0] = start()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def check(done: list[dict[str, Any]], killed: bool) -> None:
    """Nobody alone beside another; one at least goes on, and is alone in the end."""
    times = [(alone, *t, n["job"], n["who"]) for n in done for alone, t in n["times"]]
    for at, (alone, begin, end, job, who) in enumerate(times):
        for other_alone, other_begin, other_end, other_job, other in times[:at]:
            if alone or other_alone or job != other_job or who == other:
                assert end <= other_begin or other_end <= begin, done
    said = {n["said"].partition(" where:")[0] for n in done}
    assert not any("Error" in words for words in said)
    if not killed:
        assert times, done
        whole = any(n["who"] == "whole" for n in done)
        assert whole or len({n["job"] for n in done}) > 1 or any(alone for alone, *_ in times), done


def at_once(
    out: str, environ: Mapping[str, str], count: int, *, beat: float, patience: float
) -> None:
    said: Counter[str] = Counter()
    for done, killed in rounds(out, environ, count, beat=beat, patience=patience, seed=1):
        check(done, killed)
        said.update(one["said"].partition(" where:")[0] or "went on" for one in done)
        said["alone"] += sum(alone for one in done for alone, _ in one["times"])
    print("\n".join(f"{count:5} {words}" for words, count in said.most_common()))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
