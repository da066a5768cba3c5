"""`Finding`: one thing that holds training back, or will, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shardkit.errors import printable
from shardkit.sample import Sample

LEAST = 1.1  # times as fast: less is not worth a change, and may be chance


@dataclass(frozen=True)
class Finding:
    """What was seen, what to do, and what that gives.

    `cause` is one word: "extension", "storage", "decode", "transform", "copy", "threads",
    "workers", "padding", "format", "shards", "order". `stage` is the stage of loading
    (`shardkit.clock.STAGES`) that it makes cheaper, to `share` of what it costs now, from 0 to 1;
    where there is none, `rate` alone says what is expected.
    """

    cause: str
    seen: str  # with numbers, a sentence without its full stop
    do: str  # what to do about it, likewise
    rate: float | None = None  # samples/s (tokens/s for padding) after that; None: not about speed
    gain: float = 1.0  # how many times as fast that is as now
    stage: str | None = None
    share: float = 1.0
    command: str | None = None  # to type
    # Options of a Loader; "workers" are a DataLoader's.
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # Some samples as they are stored, and as they would be: to see what a loader makes of both.
    samples: tuple[list[Sample], list[Sample]] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """For people: what was seen, what to do, what that gives."""
        lines = [f"{self.cause}: {self.seen}.", f"   Do: {self.do}."]
        if self.command is not None:
            lines.append(f"   Type: {self.command}")
        if self.rate is not None:
            lines.append(f"   Gives: {self.rate:,.0f} samples/s, {self.gain:.2f} times as many.")
        elif self.gain > 1:
            lines.append(f"   Gives: {self.gain:.2f} times the speed.")
        return "\n".join(map(printable, lines))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; settings as they would be typed."""
        settings = {name: repr(value) for name, value in self.settings.items()}
        shown = {name: value for name, value in vars(self).items() if name != "samples"}
        return {**shown, "settings": settings}
