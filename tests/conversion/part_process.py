"""A process that works on an output, round after round, as `at_once` asks several to at once.

It does nothing there but to be there: what matters is when it may.
"""

import contextlib
import json
import random
import subprocess
import sys
import time

from shardkit.conversion import locks
from shardkit.conversion.existing import partial_of
from shardkit.conversion.target import Target
from shardkit.errors import OutputError
from shardkit.helpers.part_of import PartOf
from shardkit.storage import fs

JOBS = [{"recipe": {"format": "wds", "sources": [n]}} for n in range(2)]
PATIENCE = 0.2


def one(out, who, job, seconds):
    """Work as a part or as a whole run: from when until when, and alone or not."""
    partial = partial_of(Target(out, "wds"))
    found = {"who": who, "job": job, "times": [], "said": ""}

    def work(alone):
        until, times = time.monotonic() + seconds, [time.monotonic()] * 2
        found["times"].append((alone, times))
        while time.monotonic() < until:
            partial.lock.check()
            times[1] = time.monotonic()
            time.sleep(0.002)

    try:
        part = None if who == "whole" else PartOf.parse(who)
        partial.begin(JOBS[job], resume=True, part=part)
        work(part is None)
    except OutputError as error:
        found["said"] = " ".join(str(error).split())
    finally:
        with contextlib.suppress(OutputError):
            partial.release()
    return found


def at_once(out, rounds):
    """Parts and whole runs of two jobs, some of which are killed."""
    dice = random.Random(1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def start():
        return subprocess.Popen([sys.executable, "-m", __name__, out], **pipes)

    processes = [start() for _ in range(6)]
    try:
        for _ in range(rounds):
            jobs = dice.choice([[0], [0], [0, 1]])
            names = dice.choice([["1/3", "2/3", "3/3"], ["1/3", "2/3", "3/3", "1/2", "whole"]])
            for process in processes:
                long = dice.choice([0, 0.01, PATIENCE, 3 * PATIENCE])
                asked = [dice.choice(names), dice.choice(jobs), dice.uniform(0, long)]
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
            kill = dice.random() < 0.1
            if kill:
                time.sleep(dice.uniform(0, PATIENCE))
                processes[0].kill()
            lines = [process.stdout.readline() for process in processes]
            assert all(lines[1 if kill else 0 :]), "a process has ended by itself"
            check([json.loads(line) for line in lines if line], kill)
            if kill:
                processes[0].communicate()
                processes[0] = start()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def check(done, killed):
    """Nobody alone beside another, and one at least goes on."""
    times = [(alone, *t, n["job"], n["who"]) for n in done for alone, t in n["times"]]
    for at, (alone, begin, end, job, who) in enumerate(times):
        for other_alone, other_begin, other_end, other_job, other in times[:at]:
            if alone or other_alone or job != other_job or who == other:
                assert end <= other_begin or other_end <= begin, done
    assert not any("Error" in n["said"].partition(" where:")[0] for n in done)
    if not killed:
        assert times, done


if __name__ == "__main__":
    locks._PAUSE = PATIENCE / 20
    locks.LOCK_SECONDS = PATIENCE
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(one(fs.output(sys.argv[1]), *asked)), flush=True)
