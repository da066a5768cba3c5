"""The finding that samples come class by class, so that batches teach little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shardkit.performance.checks_files import convert_command
from shardkit.performance.findings import Finding
from shardkit.stream.quality import class_shares, first_labels, sorted_by_class, times_alike
from shardkit.stream.stream import Stream

_CHANCE = 1e-6  # that a full shuffle begins with samples of one class alone


def sorted_order(stream: Stream) -> Finding | None:
    """A dataset that lies sorted by class, in a window that is too small, or not shuffled."""
    if not stream.options.shuffle:
        return _unshuffled(stream)
    found = sorted_by_class(stream)
    if found is None:
        return None
    return Finding(
        "order",
        seen=f"samples lie sorted by class, and a window of {stream.options.window:,} of them sees "
        f"about {found.seen:,.0f} of {found.classes:,} classes",
        do=f"shuffle in a window of {found.window:,}, or store the samples shuffled",
        command=convert_command(stream, "--shuffle"),
        settings={"window": found.window},
    )


def _unshuffled(stream: Stream) -> Finding | None:
    shares = class_shares(stream)
    labels = None if shares is None else first_labels(stream)
    if shares is None or labels is None:
        return None
    seen = len(np.unique(labels))
    alone = seen == 1 and shares.max() ** len(labels) < _CHANCE
    if not alone and times_alike(labels, shares) is None:
        return None
    settings: dict[str, Any] = {"shuffle": True}
    shuffled = sorted_by_class(Stream(stream.datasets, replace(stream.options, shuffle=True)))
    if shuffled is not None:
        settings["window"] = shuffled.window
    return Finding(
        "order",
        seen=f"samples come as they are stored, sorted by class: the first {len(labels):,} are of "
        f"{seen:,} of {np.count_nonzero(shares):,} classes",
        do="shuffle them, unless this is not for training",
        command=convert_command(stream, "--shuffle"),
        settings=settings,
    )
