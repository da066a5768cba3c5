"""`System`: what this process and its children use of the machine, by psutil and NVML."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.processors import processors

if TYPE_CHECKING:
    import psutil

# So many times as long as a reading takes lies between two of them: they are not to be felt, and
# some walk through all processes of the machine, or all pages of this one.
_SPARE = 500


@dataclass(frozen=True)
class Usage:
    """What was used in some time. Those of several times can be added. None: unknown.

    `seconds` is how long that time was, as far as processes were watched in it, `cpu` how many
    seconds of processors they took, `disk` how many bytes they read from disks rather than from
    the page cache. `memory` and `gpu_memory` are the most that was seen, in bytes; `gpu` sums up
    how busy the GPU was, from 0 to 1, over `gpu_seen` looks.
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
        """As JSON: processors that were busy and their share of all, bytes, bytes a second."""
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


class _Sums(NamedTuple):
    """What processes have used since they began, and their memory now."""

    when: float
    cpu: float | None = None
    disk: int | None = None
    memory: int | None = None


class System:
    """Reads what is used, seldom enough not to be felt. Without libraries it knows nothing."""

    def __init__(self, gpu: int | None, clock: Callable[[], float] = time.perf_counter) -> None:
        """`gpu` is the number of the GPU in use, among those that this process may see."""
        self._clock = clock
        self._tree = _Tree.found()
        self._gpu = None if gpu is None else _Gpu.found(gpu)
        self._before: _Sums | None = None
        self._next = clock()  # when to read again

    def begin(self) -> None:
        """What is used from now on counts; unless it was read a moment ago: then nothing does."""
        self._before = None
        if self._clock() >= self._next:
            self._read()

    def used(self, *, last: bool = False) -> Usage:
        """What was used since the last call, or nothing where that was a moment ago.

        The `last` call before the next `begin` always says what was used.
        """
        before = self._before
        if (before is None and last) or (not last and self._clock() < self._next):
            return Usage()
        now, usage = self._read()
        if before is None:
            return Usage()
        # Less than nothing where a process has gone that nobody waited for.
        cpu = None if now.cpu is None or before.cpu is None else max(now.cpu - before.cpu, 0)
        disk = None if now.disk is None or before.disk is None else max(now.disk - before.disk, 0)
        return usage + Usage(now.when - before.when, cpu, disk, now.memory)

    def _read(self) -> tuple[_Sums, Usage]:
        """What processes have used, and the GPU."""
        began = self._clock()
        now = self._before = _Sums(began, *(self._tree.read() if self._tree else ()))
        usage = self._gpu.read() if self._gpu else Usage()
        ended = self._clock()
        self._next = ended + _SPARE * (ended - began)
        return now, usage


class _Tree:
    """This process and those that it has started, such as a DataLoader's workers."""

    def __init__(self, library: Any) -> None:
        self._error: type[Exception] = library.Error
        self._process: psutil.Process = library.Process()

    @classmethod
    def found(cls) -> _Tree | None:
        """None where psutil is not installed."""
        try:
            import psutil
        except ImportError:
            return None
        return cls(psutil)

    def read(self) -> tuple[float, int | None, int]:
        """Seconds of processors and bytes from disks since they began, and bytes of memory."""
        cpu, disk, memory = 0.0, None, 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                # A process that has ended goes on counting in the one that waited for it.
                times = process.cpu_times()
                cpu += times.user + times.system + times.children_user + times.children_system
                if hasattr(process, "io_counters"):  # not on every system
                    disk = (disk or 0) + process.io_counters().read_bytes
                memory += self._memory(process)
            except self._error:  # it has just ended, or belongs to somebody else
                continue
        return cpu, disk, memory

    def _memory(self, process: psutil.Process) -> int:
        """With a part of what it shares with others, where the system divides that up."""
        try:
            found = process.memory_full_info()
        except self._error:
            return int(process.memory_info().rss)
        return int(getattr(found, "pss", 0) or found.uss)


class _Gpu:
    """One GPU, through its driver's library."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def found(cls, number: int) -> _Gpu | None:
        """The GPU of that number; None where there is no library, driver or such GPU."""
        try:
            import pynvml
        except ImportError:
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # which the driver itself does not heed
        names = [str(number)] * (number + 1) if visible is None else visible.split(",")
        name = names[number].strip() if number < len(names) else ""
        try:
            pynvml.nvmlInit()
            if name.isdigit():
                return cls(pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(name)))
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name))
        except pynvml.NVMLError:
            return None

    def read(self) -> Usage:
        """How busy it has been in the last moments, and its memory; without what is unknown."""
        busy = memory = None
        try:
            memory = int(self._library.nvmlDeviceGetMemoryInfo(self._handle).used)
            busy = self._library.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._library.NVMLError:  # a part of a GPU (MIG) has no rate
            pass
        return Usage(gpu=busy, gpu_seen=int(busy is not None), gpu_memory=memory)


def has_psutil() -> bool:
    """Whether the library is installed that reads what processes use."""
    return importlib.util.find_spec("psutil") is not None
