"""One round of the soak of tests/soak.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.large
@pytest.mark.xdist_group("timed")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and calls prlimit")
def test_random_faults_lose_nothing_and_leave_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--minutes", "0", "--seed", "1"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["rounds"] >= 1
    assert counts["batches"] > 0
