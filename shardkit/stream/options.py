"""The options of a stream of samples and its batches, as one object."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypedDict

from shardkit.errors import UsageError
from shardkit.options import SEEDS, ShortRepr, check_choice, check_numbers
from shardkit.stream.batching import Batching, Pack
from shardkit.stream.order import WINDOW
from shardkit.stream.sampling import Balanced, Sampling, Weighted

_ROWS = 1 << 26  # maximum rows of a batch: sample numbers of far more would not fit into memory


@dataclass(frozen=True, repr=False)
class StreamOptions(ShortRepr):
    """Options of `StreamingDataset` and `Loader`, by name.

    Order of samples:

    shuffle: shuffle the samples, in a different order each epoch.
    seed: random seed of this order and of the transforms.
    window: number of samples that are shuffled together.
    parts: number of canonical parts of an epoch; use a multiple of the number of machines.
    weights: proportions in which several datasets are drawn from. None: all samples of each.
    sampling: how often each sample is drawn: shardkit.Balanced(...) or shardkit.Weighted(...).

    Samples:

    fields: fields to read. None: all.
    transforms: a dict from a field, or a tuple of fields, to a transform, a function, or a list of
        these.
    cache: "memory" keeps samples in memory as stored, and "decoded" keeps decoded images. A folder
        keeps pages of remote data, shared by all processes of a machine. None: as set by the
        environment variables SHARDKIT_CACHE and SHARDKIT_CACHE_LIMIT, else 1 GiB of memory.
    cache_limit: maximum size of the cache folder: "200GB".
    storage_options: settings for URLs, such as credentials and endpoints, with the names of obstore
        or fsspec.
    on_error: "fail" at a bad sample, or "skip" it: the next good sample replaces it, and is False
        in `valid`.
    max_errors: with "skip", stop if more samples than this are bad.

    Batches (a StreamingDataset without one of the first three options gives single samples):

    batch_size: samples per batch of one rank.
    global_batch_size: samples per batch of all ranks together.
    batching: batches by length: shardkit.Bucket, shardkit.Dynamic or shardkit.Pack.
    last: the last batch of an epoch: "pad" fills it, "drop" drops it, "short" leaves it smaller.
    collate: function that makes a batch (a dict) from a list of samples.

    Ranks:

    rank: rank of this process. None: from torch.distributed, else RANK, else 0.
    world_size: number of ranks. None: from torch.distributed, else WORLD_SIZE, else 1.
    check_ranks: check that all ranks of torch.distributed read the same data, at the same position.

    Raises UsageError for invalid values and combinations.
    """

    shuffle: bool = False
    seed: int = 0
    window: int = WINDOW
    parts: int = 1
    weights: Sequence[float] | None = None
    sampling: Sampling | None = None
    fields: Sequence[str] | None = None
    transforms: Mapping[Any, Any] | None = None
    cache: str | os.PathLike[str] | None = None
    cache_limit: int | str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    on_error: str = "fail"
    max_errors: int = 1000
    batch_size: int | None = None
    global_batch_size: int | None = None
    batching: Batching | None = None
    last: str = "pad"
    collate: Callable[[Any], Mapping[str, Any]] | None = None
    rank: int | None = None
    world_size: int | None = None
    check_ranks: bool = True

    @property
    def in_memory(self) -> bool:
        """Whether all samples stay in memory after they are first read."""
        return self.cache in ("memory", "decoded")

    @property
    def cache_folder(self) -> str | os.PathLike[str] | None:
        """The folder for pages of remote data."""
        return None if self.in_memory else self.cache

    def __post_init__(self) -> None:
        check_numbers(self, window=1, parts=1, max_errors=0, rank=0, world_size=1)
        check_numbers(self, _ROWS, batch_size=1, global_batch_size=1)
        check_numbers(self, SEEDS, seed=0)
        cache = isinstance(self.cache, str | os.PathLike | None)
        weights = self.weights is None or _are_weights(self.weights)
        fields = self.fields is None or isinstance(self.fields, Collection)
        for name, right, what in (
            ("shuffle", isinstance(self.shuffle, bool), "True or False"),
            ("check_ranks", isinstance(self.check_ranks, bool), "True or False"),
            ("cache", cache, '"memory", "decoded" or a folder'),
            ("weights", weights, "positive numbers"),
            ("fields", fields and not isinstance(self.fields, str), "a list of names"),
            ("batching", isinstance(self.batching, Batching | None), "a Bucket, Dynamic or Pack"),
            ("collate", self.collate is None or callable(self.collate), "a function"),
        ):
            if not right:
                raise UsageError(f"{name} must be {what}", found=f"{getattr(self, name)!r:.200}")
        check_choice(self, "on_error", ("fail", "skip"))
        check_choice(self, "last", ("pad", "drop", "short"))
        ways = ("batch_size", "global_batch_size", "batching")
        chosen = [name for name in ways if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise UsageError(
                "the batch size is given in several ways", found=", ".join(chosen), fix="give one"
            )
        if isinstance(self.batching, Pack) and self.collate is not None:
            raise UsageError("Pack does not support collate", found="collate=", fix="leave it out")
        self._check_sampling()

    def _check_sampling(self) -> None:
        if self.sampling is None:
            return
        if not isinstance(self.sampling, Balanced | Weighted):
            raise UsageError(
                "sampling must be shardkit.Balanced(...) or shardkit.Weighted(...)",
                found=f"{self.sampling!r:.200}",
            )
        if not self.shuffle:
            raise UsageError("sampling requires shuffle=True", found="shuffle=False")
        if self.weights is not None:
            raise UsageError(
                "weights and sampling cannot be used together",
                fix="use sampling=Weighted(...) with weights for all samples of all datasets",
            )

    @property
    def batched(self) -> bool:
        """Whether batches are made, rather than single samples."""
        return (self.batch_size or self.global_batch_size or self.batching) is not None

    def per_rank(self, world_size: int) -> int:
        """Return samples per batch of one rank, for batches of a fixed size."""
        if self.global_batch_size is None:
            return self.batch_size or 1
        each, rest = divmod(self.global_batch_size, world_size)
        if rest:
            raise UsageError(
                "the global batch cannot be split evenly over the ranks",
                expected=f"a multiple of {world_size}",
                found=f"global_batch_size={self.global_batch_size}",
            )
        return each


class StreamKeywords(TypedDict, total=False):
    """The same as keyword arguments, for type checkers."""

    shuffle: bool
    seed: int
    window: int
    parts: int
    weights: Sequence[float] | None
    sampling: Sampling | None
    fields: Sequence[str] | None
    transforms: Mapping[Any, Any] | None
    cache: str | os.PathLike[str] | None
    cache_limit: int | str | None
    storage_options: Mapping[str, Any] | None
    on_error: str
    max_errors: int
    batch_size: int | None
    global_batch_size: int | None
    batching: Batching | None
    last: str
    collate: Callable[[Any], Mapping[str, Any]] | None
    rank: int | None
    world_size: int | None
    check_ranks: bool


class LoaderKeywords(StreamKeywords, total=False):
    """`StreamKeywords`, and the arguments of `Loader`."""

    threads: int | None
    prefetch: int
    prefetch_bytes: int | str
    profile: bool


def _are_weights(weights: Any) -> bool:
    """Return whether these are positive numbers with a finite sum."""
    try:
        return math.isfinite(math.fsum(weights)) and all(
            isinstance(weight, Real) and not isinstance(weight, bool) and float(weight) > 0
            for weight in weights
        )
    except (TypeError, ValueError, OverflowError):
        return False
