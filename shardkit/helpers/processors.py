"""The number of processors that this process may use, by its CPU affinity and control groups.

Slurm and `taskset` set the affinity; Docker and Kubernetes limit the CPU time of a control group,
which `os.cpu_count()` ignores. File layouts: Linux's cgroup-v1/cpusets, cgroup-v2, and proc(5).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def processors() -> int:
    """Return the number of processors that this process may use, rounded up, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, quota())))


def quota(root: Path = Path("/")) -> float:
    """Return the CPU quota of this process's control groups, in processors; inf without a limit."""
    try:
        return min(_limits(root), default=math.inf)
    except (OSError, ValueError, IndexError):  # not Linux, or control groups are hidden
        return math.inf


def _limits(root: Path) -> Iterator[float]:
    """Yield the limits of the control groups of this process, and of all groups above them."""
    paths = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted, place = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        version = {"cgroup2": "", "cgroup": "cpu"}.get(kind)
        if version in paths and (kind == "cgroup2" or "cpu" in options.split(",")):
            top = root / place.lstrip("/")
            group = top / os.path.relpath(paths[version], mounted)
            # In a container, the path may exist only on the host: use the mounted group then.
            group = Path(os.path.normpath(group))
            if not group.is_dir() or not group.is_relative_to(top):
                group = top
            for each in (group, *group.parents):
                yield _limit(each)
                if each == top:
                    break


def _limit(group: Path) -> float:
    try:
        words = (group / "cpu.max").read_text().split()  # version 2: "max 100000"
    except OSError:
        try:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # version 1: -1 is no limit
            words = [(group / name).read_text() for name in names]
        except OSError:
            return math.inf
    time, period = (math.inf if word == "max" else int(word) for word in words)
    return time / period if time > 0 and period > 0 else math.inf
