"""The number of processors that this process may use, by its CPU affinity and control groups.

Slurm and `taskset` set the affinity; Docker and Kubernetes limit the CPU time of a control group,
which `os.cpu_count()` ignores. File layouts: Linux's cgroup-v1/cpusets, cgroup-v2, and proc(5).
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def processors() -> int:
    """The number of processors that this process may use, rounded up, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, quota())))


def quota(root: Path = Path("/")) -> float:
    """The CPU quota of this process's control groups, in processors; inf without a limit."""
    try:
        return min(_limits(root), default=math.inf)
    except (OSError, ValueError, IndexError):  # not Linux, or control groups are hidden
        return math.inf


def _limits(root: Path) -> Iterator[float]:
    """The limits of the control groups of this process, and of all groups above them."""
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


def in_threads(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    threads: int,
    ahead: int,
    wait: Callable[[Future[_Result]], _Result] = Future.result,
    stop: Callable[[], object] = lambda: None,
) -> Generator[_Result, None, None]:
    """Yield `function(item)` for each item, in order; at most `ahead` items per thread are queued.

    `wait` gets the result of a future. If the iteration ends early, `stop` is called before waiting
    for the calls that are running.
    """
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > ahead * threads:
                    yield wait(waiting.popleft())
            while waiting:
                yield wait(waiting.popleft())
        except BaseException:
            stop()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
