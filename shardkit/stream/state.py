"""Where a stream stands, as a small JSON dict that is the same on all ranks."""

from __future__ import annotations

import json
from typing import Any

from shardkit.errors import UsageError
from shardkit.stream.order import ORDER_VERSION
from shardkit.stream.schedule import Place


def save(identity: dict[str, Any], epoch: int, place: Place) -> dict[str, Any]:
    """The state; `identity` is what must be the same where it is loaded."""
    return {"order_version": ORDER_VERSION, "epoch": epoch, **place._asdict(), "stream": identity}


def load(state: dict[str, Any], identity: dict[str, Any]) -> tuple[int, Place]:
    """Epoch and place of a state. Raises UsageError for another stream's, with what differs."""
    try:
        version = state["order_version"]
        epoch, place = int(state["epoch"]), Place(int(state["samples"]), int(state["batches"]))
        theirs = dict(state["stream"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"this is no state of a Loader: {error!r}",
            expected="what state_dict() gave",
            found=repr(state)[:200],
        ) from error
    if version != ORDER_VERSION:
        raise UsageError(
            "the state is of another version of the order of samples",
            expected=f"order_version {ORDER_VERSION}",
            found=f"order_version {version}",
            fix="continue with the shardkit that saved it, or begin a new epoch",
        )
    ours = json.loads(json.dumps(identity))
    differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if differing:
        raise UsageError(
            "the state is of another dataset or of other settings",
            expected=", ".join(f"{name} {theirs.get(name)!r}" for name in differing),
            found=", ".join(f"{name} {ours.get(name)!r}" for name in differing),
            fix="use the dataset and settings of the run that saved it, or begin without a state",
        )
    return epoch, place
