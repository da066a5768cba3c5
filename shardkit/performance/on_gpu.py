"""Loaders for `doctor` and `bench` whose batches are made on a GPU, by `decode="gpu"` or copied."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

from shardkit.errors import ShardkitError, ShardkitWarning
from shardkit.helpers.clock import STAGES
from shardkit.performance.findings import SHARE, Case, Finding
from shardkit.performance.runs import compare
from shardkit.stream.dataset import StreamingDataset
from shardkit.stream.loader import Loader

DEVICE = "cuda"  # tests replace it


def has_gpu() -> bool:
    """Return whether torch is installed, and finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    try:
        import torch

        torch.empty(0, device=DEVICE)
    except Exception:  # the type depends on the device and on torch's build
        return False
    return True


def loader_on_gpu(dataset: StreamingDataset, *, decode: str, **settings: Any) -> Loader:
    """Return a Loader whose batches are tensors on the GPU."""
    from shardkit.stream.torch_loader import Loader as ForTorch

    given = settings.get("device")
    device = given if getattr(given, "type", None) == DEVICE else DEVICE
    own = {"to": "torch", "pin_memory": False, "device": device, "decode": decode}
    return ForTorch(dataset, **{**settings, **own})


def decoding(case: Case, seconds: float) -> Finding | None:
    """Decode on the GPU, if there is one and decoding takes the most time: try it for `seconds`."""
    loader, share = case.loader, case.share("decode")
    most = share >= SHARE and share == max(map(case.share, STAGES))
    if not most or not case.cropped or loader.settings.get("decode") == "gpu" or not has_gpu():
        return None
    seen = f"decoding takes {share:.0%} of a thread's time"
    untried = f'{seen}; decode="gpu" was not tried: '
    if functions := case.calls():
        what = f"after it, functions get whole batches, on the GPU: {', '.join(functions)}"
        return Finding("decode", untried + what, 'make them take batches, and try decode="gpu"')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardkitWarning)  # given to those who use it
            other = loader_on_gpu(loader.dataset, **{**loader.settings, "decode": "gpu"})
        rate = compare({"gpu": other}, seconds)["gpu"].rate
    except ShardkitError as error:
        what = f"{error.what} ({error.found})" if error.found else error.what
        return Finding("decode", untried + what, error.fix or "decode on the processor")
    return case.finding(
        "decode",
        f'{seen}; with decode="gpu", the GPU, which did nothing else, made {rate:,.0f} samples/s',
        'use device="cuda", decode="gpu", and compare the speed of your training, as decoding '
        "takes time of the GPU",
        rate=rate,
        stage="decode",
        settings={"device": str(other.settings["device"]), "decode": "gpu"},
    )
