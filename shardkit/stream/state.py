"""The state of a stream, as a small JSON dict that is the same on all ranks."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from shardkit.errors import UsageError
from shardkit.options import is_whole
from shardkit.stream.order import EPOCHS, ORDER_VERSION
from shardkit.stream.schedule import Progress, Schedule


def save(identity: dict[str, Any], epoch: int, progress: Progress) -> dict[str, Any]:
    """The state. It can be loaded only by a stream with the same `identity`."""
    return {
        "order_version": ORDER_VERSION,
        "epoch": epoch,
        **progress._asdict(),
        "stream": identity,
    }


def load(
    state: dict[str, Any], identity: dict[str, Any], schedule: Schedule
) -> tuple[int, Progress]:
    """Epoch and progress of a state. Raises UsageError if it is invalid or of another stream.

    `schedule` belongs to the stream with this `identity`; it knows which values are valid.
    """
    if not isinstance(state, dict):
        raise refused("type", state, "a dict")
    version = whole(state, "order_version")
    epoch = whole(state, "epoch", EPOCHS - 2)  # at its end, the next epoch begins
    progress = Progress(whole(state, "samples"), whole(state, "batches"))
    theirs = state.get("stream")
    if not isinstance(theirs, dict):
        raise refused("stream", theirs, "a dict")
    if version != ORDER_VERSION:
        raise UsageError(
            "the state was saved with another version of the sample order",
            expected=f"order_version {ORDER_VERSION}",
            found=f"order_version {version}",
            fix="resume with the version of shardkit that saved it, or start a new epoch",
        )
    ours, none = json.loads(json.dumps(identity)), object()
    try:
        differing = [n for n in ours | theirs if ours.get(n, none) != theirs.get(n, none)]
    except RecursionError:  # deeply nested lists
        differing = ["stream"]
    if differing:
        raise UsageError(
            "the state was saved with another dataset or other settings",
            expected=_named(theirs, differing),
            found=_named(ours, differing),
            fix="use the dataset and settings of the run that saved it, or start without a state",
        )
    normalized = schedule.normalized(epoch, progress)
    if normalized is None:
        raise refused("samples, batches", tuple(progress), schedule.valid)
    return epoch, normalized


def whole(state: dict[str, Any], name: str, most: int = (1 << 63) - 1) -> int:
    """An integer field of a state. Raises UsageError if it is not a number from 0 to `most`."""
    value: Any = state.get(name)
    if not is_whole(value) or not 0 <= value <= most:
        raise refused(name, value, f"0 to {most:,}")
    return int(value)


def refused(name: str, value: Any, expected: str) -> UsageError:
    """The error for an invalid field of a state."""
    return UsageError(
        f"not a valid state of a Loader: invalid {name}",
        expected=f"the result of state_dict(); {name}: {expected}",
        found=f"{reprlib.repr(value):.200}",
        fix="load the state as it was saved, or start without a state",
    )


def _named(identity: dict[str, Any], differing: list[str]) -> str:
    return ", ".join(
        f"{name if str(name).isidentifier() else reprlib.repr(name):.80}"
        f" {reprlib.repr(identity.get(name)):.200}"
        for name in differing[:9]
    )
