"""Streaming into torch: `Loader`, and the slower `StreamingDataset` for torch's own DataLoader.

`Monitor` measures how long a training loop waits for data.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from shardkit.errors import OutputError, UsageError
from shardkit.helpers.extras import extra

with extra("torch", "shardkit.torch", "; without torch, shardkit.stream has a Loader of arrays"):
    import torch

from shardkit.performance import monitor as monitoring
from shardkit.performance.machine import Usage
from shardkit.stream.torch_loader import Loader, StreamingDataset, documents

__all__ = ["Loader", "Monitor", "StreamingDataset", "documents"]


class Monitor(monitoring.Monitor[monitoring.T]):
    __doc__ = monitoring.Monitor.__doc__

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
        return torch.profiler.record_function("waiting for data")


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
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = "the folder cannot be created"
            raise OutputError(what, path=path, found=str(error)) from error
        self._writer = SummaryWriter(str(path))

    def write(self, row: monitoring.Row) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"monitor/{name}", value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
