"""How many processors may be used: affinity, and control groups of both versions."""

import math
import os
from pathlib import Path

import pytest

from shardkit.helpers import processors as module
from shardkit.helpers.processors import processors, quota
from shardkit.options import ConvertOptions
from shardkit.stream.ranks import default_threads

V2 = "35 24 0:30 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 25 0:31 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHER_V1 = "37 25 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
DISK = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
HOST, SLURM = V2.format(root="/"), "0::/slurm/job_7/step_0\n"


def cfs(folder, quota, period):
    """The files of a group of version 1."""
    names = (f"cpu,cpuacct/{folder}cpu.cfs_{name}_us" for name in ("quota", "period"))
    return dict(zip(names, (quota, period), strict=True))


DOCKER = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n"
LIMITS_ABOVE = {  # of a batch job: those of all groups above hold too
    "slurm/cpu.max": "max 100000",
    "slurm/job_7/cpu.max": "300000 100000",
    "slurm/job_7/step_0/cpu.max": "800000 100000",
    "other/cpu.max": "100000 100000",
}


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "expected"),
    [
        # A container of its own control groups: Docker --cpus 2.5, Kubernetes.
        ("0::/\n", DISK + HOST, {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", DISK + HOST, {"cpu.max": "max 100000\n"}, math.inf),
        (SLURM, HOST, LIMITS_ABOVE, 3),
        # The host's path, where only what the container sees is mounted.
        ("0::/docker/abc\n", V2.format(root="/docker/abc"), {"cpu.max": "50000 100000"}, 0.5),
        ("0::/../../kube\n", HOST, {"cpu.max": "400000 100000"}, 4),
        (DOCKER, OTHER_V1 + V1.format(root="/docker/abc"), cfs("", "150000\n", "50000\n"), 3),
        ("3:cpu,cpuacct:/user\n", V1.format(root="/"), cfs("user/", "-1\n", "100000\n"), math.inf),
        ("0::/\n", DISK, {}, math.inf),
        ("nonsense", DISK, {}, math.inf),
        ("0::/\n", HOST, {"cpu.max": "many"}, math.inf),
        (None, None, {}, math.inf),
    ],
)
def test_limits_of_control_groups(tmp_path, groups, mounts, files, expected):
    texts = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts} if groups else {}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("limit", "allowed", "expected"),
    [(math.inf, 6, 6), (2.5, 6, 3), (0.1, 6, 1), (40, 6, 6), (3, 2, 2)],
)
def test_what_is_allowed_counts_everywhere(monkeypatch, limit, allowed, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.setattr(module, "quota", lambda: limit)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processors() == expected
    assert default_threads() == expected
    assert ConvertOptions().processes("a path") == expected


def test_no_other_count_is_used():
    package = Path(module.__file__).parent
    users = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "cpu_count" in path.read_text() or "sched_getaffinity" in path.read_text()
    ]
    assert users == ["processors.py"]
