"""Streaming into torch: `Loader`, and the slower `StreamingDataset` for torch's own DataLoader.

`Monitor` measures how long a training loop waits for data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from shardkit.errors import OutputError, UsageError, warn
from shardkit.helpers.extras import extra

with extra("torch", "shardkit.torch", "; without torch, shardkit.stream has a Loader of arrays"):
    import torch

from shardkit.performance import monitor as monitoring
from shardkit.performance.machine import Usage
from shardkit.stream.torch_loader import Loader, StreamingDataset

__all__ = ["Loader", "Monitor", "StreamingDataset"]


class Monitor(monitoring.Monitor[monitoring.T]):
    __doc__ = monitoring.Monitor.__doc__

    _profiler: torch.profiler.profile | None = None

    @contextmanager
    def profiler(
        self, folder: str | os.PathLike[str], *, wait: int = 1, warmup: int = 1, active: int = 3
    ) -> Iterator[torch.profiler.profile]:
        """Profile the loop over this monitor with torch.profiler; write the trace to a `folder`.

        The first `wait` batches are skipped, the next `warmup` are profiled and discarded, and the
        next `active` are recorded. The trace shows "waiting for data" where the loop waits. You can
        open it in TensorBoard and Perfetto. Raises UsageError for other numbers, and OutputError if
        the folder cannot be created.
        """
        if min(wait, warmup) < 0 or active < 1:
            raise UsageError(
                "wait and warmup must be 0 or more, active 1 or more",
                found=f"wait={wait}, warmup={warmup}, active={active}",
            )
        path = _folder(folder)
        written = torch.profiler.tensorboard_trace_handler(str(path))
        steps = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        try:
            with torch.profiler.profile(schedule=steps, on_trace_ready=written) as self._profiler:
                yield self._profiler
        finally:
            done, self._profiler = self._profiler, None
        if done is not None and done.step_num <= wait + warmup:
            warn(
                f"almost nothing was recorded: the loop ended after {done.step_num} batches, "
                f"of which the first {wait + warmup} are skipped"
            )

    def _open(self, path: Path) -> monitoring.Log:
        return super()._open(path) if path.suffix.lower() == ".csv" else _TensorBoard(path)

    def _gpu(self) -> Usage:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return Usage()
        free, total = torch.cuda.mem_get_info()
        try:
            busy = torch.cuda.utilization() / 100
        except Exception:  # nvidia-ml-py is not installed, or a MIG instance, which does not tell
            return Usage(gpu_memory=total - free)
        return Usage(gpu=busy, gpu_seen=1, gpu_memory=total - free)

    def _waiting(self) -> AbstractContextManager[object]:
        if self._profiler is None:
            return super()._waiting()
        return torch.profiler.record_function("waiting for data")

    def _stepped(self) -> None:
        if self._profiler is not None:
            self._profiler.step()


class _TensorBoard:
    """Writes TensorBoard events to a folder."""

    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard, which writes such logs, is not installed",
                path=path,
                fix="pip install 'shardkit[monitor]', or log into a .csv file",
            ) from None
        self._writer = SummaryWriter(str(_folder(path)))

    def write(self, row: monitoring.Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"monitor/{name}", value, row["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, created if it does not exist."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            "the folder cannot be created", path=path, found=str(error), fix="give another folder"
        ) from error
    return path
