"""The contract of a source: a list of samples that a conversion can cut into tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.errors import ShardkitError
from shardkit.sample import Sample
from shardkit.schema import Schema

if TYPE_CHECKING:
    import numpy.typing as npt

    Indices: TypeAlias = "npt.NDArray[np.int64]"


class Source(ABC):
    """`len(source)` samples in a fixed order; `source[i]` reads one, in any thread.

    `source[i]` raises SampleError (or StorageError) for a sample that cannot be had.
    """

    schema: Schema
    classes: tuple[str, ...] | None = None
    label: str = "label"  # the field whose values `classes` names
    # What was found wrong while planning that belongs to no sample: a loop of links, say.
    problems: Sequence[ShardkitError] = ()
    # What a user may not expect of how the source was understood.
    notes: Sequence[str] = ()
    # What was passed over on purpose, and how often, for the summary.
    ignored: dict[str, int]

    def __init__(self) -> None:
        self.ignored = {}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample: ...

    @abstractmethod
    def sizes(self) -> npt.NDArray[np.int64]:
        """Payload bytes of every sample, as well as they are known without reading them."""

    @abstractmethod
    def select(self, indices: Indices) -> Source:
        """A source of these samples alone, in this order: small, and picklable for a worker."""

    @abstractmethod
    def fingerprint(self) -> dict[str, str] | None:
        """What identifies the content, in parts with a name each; None if nothing does.

        The part `times` decides only whether an interrupted run may continue: it is no part of the
        manifest, as copying a folder changes it.
        """

    def key(self, index: int) -> str | None:
        """The key of a sample where it is known without reading it."""
        return None

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call a sample in a list of errors: its path relative to the source, say."""

    def original(self, index: int, key: str) -> str | None:
        """The path that a sample had as a file, where its key does not tell it."""
        return None
