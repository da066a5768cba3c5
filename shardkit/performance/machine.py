"""The machine: its description, and the resources that processes use."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.helpers.processors import processors
from shardkit.stream.ranks import default_threads

if TYPE_CHECKING:
    import psutil

# The interval between readings, as a multiple of the duration of a reading, which may walk through
# all processes of the machine, or all pages of this process.
_SPARE = 500


def about_machine() -> dict[str, Any]:
    """Return a description of the machine; None for unknown values."""
    named = None
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "system": platform.platform(),
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "processors": default_threads(),  # available ones
        "memory": memory(),
    }


def memory() -> int | None:
    """Return bytes of memory; None if psutil is not installed."""
    if not has_psutil():
        return None
    import psutil

    return int(psutil.virtual_memory().total)


# --- resource usage ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Resources used in an interval. Usages can be added. None: unknown.

    seconds: length of the interval, as far as processes were watched.
    cpu: processor seconds of these processes.
    disk: bytes that they read from disks, not from the page cache.
    memory: peak memory in bytes.
    gpu: sum of the GPU's utilization, from 0 to 1, over all readings.
    gpu_seen: number of these readings.
    gpu_memory: peak GPU memory in bytes.
    """

    seconds: float = 0.0
    cpu: float | None = None
    disk: int | None = None
    memory: int | None = None
    gpu: float | None = None
    gpu_seen: int = 0
    gpu_memory: int | None = None

    def __add__(self, other: Usage) -> Usage:
        joined: dict[str, Any] = {}
        for name, value in vars(self).items():
            known = [v for v in (value, getattr(other, name)) if v is not None]
            if known:
                joined[name] = (max if "memory" in name else sum)(known)
        return Usage(**joined)

    def to_dict(self) -> dict[str, float | None]:
        """Return JSON values: busy processors, their share of all, bytes, and bytes per second."""
        cpu, disk = (
            value / self.seconds if value is not None and self.seconds else None
            for value in (self.cpu, self.disk)
        )
        return {
            "cpu": cpu,
            "cpu_share": None if cpu is None else cpu / processors(),
            "memory": self.memory,
            "disk": disk,
            "gpu": None if self.gpu is None else self.gpu / self.gpu_seen,
            "gpu_memory": self.gpu_memory,
        }


class System:
    """Reads resource usage, at intervals that keep the overhead small.

    Without psutil, only that of the GPU.
    """

    def __init__(
        self, gpu: Callable[[], Usage], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`gpu` reads the usage of the GPU."""
        self._gpu, self._clock = gpu, clock
        self._tree = _Tree() if has_psutil() else None
        self._before: Usage | None = None
        self._next = clock()  # earliest time of the next reading

    def begin(self) -> None:
        """Start to count usage, unless the last reading is too recent."""
        self._before = None
        if self._clock() >= self._next:
            self._read()

    def used(self, *, last: bool = False) -> Usage:
        """Return the usage since the last reading; empty if that is too recent.

        The `last` call before the next `begin` always reads.
        """
        before = self._before
        if (before is None and last) or (not last and self._clock() < self._next):
            return Usage()
        now = self._read()
        if before is None:
            return Usage()
        # A difference is negative if a process has ended without being waited for.
        cpu = None if now.cpu is None or before.cpu is None else max(now.cpu - before.cpu, 0)
        disk = None if now.disk is None or before.disk is None else max(now.disk - before.disk, 0)
        return replace(now, seconds=now.seconds - before.seconds, cpu=cpu, disk=disk)

    def _read(self) -> Usage:
        """Read the GPU, and what processes have used since their start."""
        began = self._clock()
        cpu, disk, memory = self._tree.read() if self._tree else (None, None, None)
        now = replace(self._gpu(), seconds=began, cpu=cpu, disk=disk, memory=memory)
        ended = self._clock()
        self._before, self._next = now, ended + _SPARE * (ended - began)
        return now


class _Tree:
    """This process and its children, such as a DataLoader's workers."""

    def __init__(self) -> None:
        import psutil

        self._error: type[Exception] = psutil.Error
        self._process = psutil.Process()

    def read(self) -> tuple[float, int | None, int]:
        """Processor seconds and bytes from disks since the start, and bytes of memory."""
        cpu, disk, memory = 0.0, None, 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                # The time of an ended process is added to the process that waited for it.
                times = process.cpu_times()
                cpu += times.user + times.system + times.children_user + times.children_system
                if hasattr(process, "io_counters"):  # not on every system
                    disk = (disk or 0) + process.io_counters().read_bytes
                memory += self._memory(process)
            except self._error:  # the process has just ended, or belongs to another user
                continue
        return cpu, disk, memory

    def _memory(self, process: psutil.Process) -> int:
        """Bytes of memory. Includes a share of the shared memory if the system reports it."""
        try:
            found = process.memory_full_info()
        except self._error:
            return int(process.memory_info().rss)
        return int(getattr(found, "pss", 0) or found.uss)


def has_psutil() -> bool:
    """Return whether psutil, which reads the usage of processes, is installed."""
    return importlib.util.find_spec("psutil") is not None
