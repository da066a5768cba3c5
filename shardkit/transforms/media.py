"""The common base of transforms of audio and video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt

from shardkit.transforms.steps import Transform


@dataclass(frozen=True, repr=False)
class MediaTransform(Transform):
    """Base of the transforms of audio or video, some of which take random numbers in [0, 1)."""

    numbers: ClassVar[int] = 0  # how many random numbers it takes


@dataclass(frozen=True)
class MediaJob:
    """Decodes encoded files, value by value, and applies the transforms that follow, in order."""

    stream: int  # of random numbers
    steps: tuple[Any, ...] = ()

    takes: ClassVar[tuple[type[Transform], ...]] = ()  # the supported transforms

    @property
    def numbers(self) -> int:
        """How many random numbers are needed per value."""
        return sum(step.numbers for step in self.steps)

    def made(self, value: Any, drawn: Sequence[float]) -> npt.NDArray[Any]:
        """Return the result for a value. Raises NotMediaError for one that cannot be decoded."""
        raise NotImplementedError
