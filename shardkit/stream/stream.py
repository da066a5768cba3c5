"""Turns datasets, options and a rank into steps: the base of all loaders."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_dataset
from shardkit.errors import UsageError, warn
from shardkit.schema import Bool, Float, Int, Json, Schema, Text, audio_fields, row_fields
from shardkit.storage import fs
from shardkit.storage.page_cache import MemoryCache, cache_from
from shardkit.storage.pages import Pages, through
from shardkit.storage.remote.path import RemotePath
from shardkit.stream.batching import Batching, Pack
from shardkit.stream.collate import PACKED, Collate, PadCollate
from shardkit.stream.options import StreamOptions
from shardkit.stream.order import Mixture, Numbers, Order
from shardkit.stream.ranks import World
from shardkit.stream.read_ahead import ReadAhead
from shardkit.stream.reading import Samples, common_schema, fingerprint, sizes
from shardkit.stream.sampling import AnyOrder, Balanced, Sampled, Sampling, values_of
from shardkit.stream.sampling import identity as sampling_identity
from shardkit.stream.schedule import Fixed, Planned, Schedule, Step
from shardkit.transforms.transforms import Transforms

OneSource: TypeAlias = "str | os.PathLike[str] | Dataset"
Source: TypeAlias = "OneSource | Sequence[OneSource]"


class Stream:
    """The samples of datasets, in the order given by the options. Creating it reads no sample."""

    def __init__(self, source: Source, options: StreamOptions) -> None:
        self.options = options
        self.datasets, self.pages = _opened(source, options)
        self.batching = options.batching
        self.lengths: Numbers | None = None  # of all samples in `field`, for `batching`
        self.field = ""
        fields = options.fields
        if self.batching is not None:
            self.field = _counted(common_schema(self.datasets, fields), self.batching)
            self.lengths = np.concatenate([d.lengths(self.field) for d in self.datasets])
            self.batching = self.batching.with_lengths(self.lengths)
            if isinstance(self.batching, Pack):
                fields = _packed(common_schema(self.datasets, fields), self.field, fields is None)
        if self.pages is None and options.cache_folder is not None:
            raise UsageError(
                "a cache folder can be used only for remote data",
                found=f"cache={str(options.cache_folder)!r} with local data",
            )
        self.samples = Samples(self.datasets, fields, cached=options.in_memory)
        self.transforms = Transforms(options.transforms or {}, self.samples.schema)
        if options.cache == "decoded":
            self.samples.decoded = self.transforms.encoded
        self.order = _order(self.datasets, options)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that determines the sample order, as JSON: a state is valid only if this is equal."""
        options = self.options
        found = {
            "samples": len(self.samples),
            "datasets": [fingerprint(dataset) for dataset in self.datasets],
            **{name: getattr(options, name) for name in ("shuffle", "seed", "window", "parts")},
            "weights": None if options.weights is None else list(map(float, options.weights)),
            "batching": None if self.batching is None else str(self.batching),
        }
        if options.sampling is not None:  # states of earlier versions do not have this key
            found["sampling"] = sampling_identity(options.sampling)
        return found

    @property
    def json(self) -> Collection[str]:
        """The fields of a batch that are JSON values as stored, in which there are no arrays."""
        names = {name for name, kind in self.samples.schema.items() if isinstance(kind, Json)}
        return () if self.own_collate else names - self.transforms.fields

    @property
    def own_collate(self) -> Collate | None:
        """The user's collate function, unless it is a PadCollate."""
        collate = self.options.collate
        return None if isinstance(collate, PadCollate) else collate

    def ahead(self, steps: Iterator[Step], epoch: int, world: World) -> Iterator[Step]:
        """Return the steps. For remote data, their samples are read ahead."""
        if self.pages is None:
            return steps
        alone = isinstance(self.pages.cache, MemoryCache)
        parts = _parts_read_here(self.order.parts, world, alone)
        return self._read_ahead.steps(steps, epoch, parts)

    @cached_property
    def _read_ahead(self) -> ReadAhead:
        assert self.pages is not None
        return ReadAhead(self.samples, self.pages, self.order, self.datasets)

    def weight(self, step: Step) -> float:
        """About how large the batch of a step is, compared with those of other steps."""
        if step.segments is not None:
            return len(step.valid)  # rows of the same length
        if self.lengths is not None:  # padded
            return len(step.number) * int(self.lengths[step.number].max())
        return self.samples.stored_bytes(step.number)

    def schedule(self, world: World) -> Schedule:
        """Return the steps of one rank."""
        options, order = self.options, self.order
        if self.batching is not None and self.lengths is not None:
            last, seed, window = options.last, options.seed, options.window
            return Planned(order, self.batching, self.lengths, *world, last, seed, window)
        schedule = Fixed(order, options.per_rank(world.size), *world, options.last)
        if order.samples < schedule.size and options.last != "short":
            found = (
                f"{order.samples:,} samples, {schedule.size:,} for a batch of all ranks together"
            )
            if options.last == "drop":
                raise UsageError(
                    "the dataset is smaller than one batch, so there are no batches",
                    found=found,
                    fix='make batches smaller, or use last="pad"',
                )
            warn(f"the dataset is smaller than one batch: samples are repeated ({found})")
        return schedule


def _parts_read_here(parts: int, world: World, alone: bool) -> frozenset[int] | None:
    """Return the canonical parts read by the ranks that share a cache. None: all, or unknown.

    alone: the cache is private to this rank. Otherwise, all ranks of a machine share it (torchrun
    sets LOCAL_WORLD_SIZE).
    """
    each, rest = divmod(parts, world.size)
    ranks = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if rest or not ranks or world.size % ranks:
        return None
    first = world.rank - world.rank % ranks
    return frozenset(range(first * each, (first + ranks) * each))


def _opened(source: Source, options: StreamOptions) -> tuple[list[Dataset], Pages | None]:
    """The opened datasets, and the page cache through which remote ones are opened and read."""
    every: Sequence[Any] = source if isinstance(source, list | tuple) else [source]
    for each in every:
        if not isinstance(each, str | os.PathLike | Dataset):
            raise UsageError(
                "the source cannot be streamed",
                expected="a path, a dataset opened by shardkit.open, or a list of them",
                found=repr(each)[:200],
                fix="dataset.select(subset.indices) is a view of the same samples"
                if isinstance(getattr(each, "dataset", None), Dataset)
                else None,
            )
    with fs.using(options.storage_options, *every):
        given = [each if isinstance(each, Dataset) else fs.source(each) for each in every]
    pages = None
    paths = [path for each in given for path in getattr(each, "paths", (each,))]
    if any(isinstance(path, RemotePath) for path in paths):
        pages = Pages(cache_from(options.cache_folder, options.cache_limit))
    found = [
        each.at(partial(through, pages=pages))
        if isinstance(each, Dataset)
        else open_dataset(through(each, pages))
        for each in given
    ]
    for dataset in found:
        if dataset.transform is not None:
            what = "a dataset with transforms cannot be streamed"
            raise UsageError(what, path=dataset.place, fix="pass transforms= here instead")
        if not len(dataset):
            what = f"the {'dataset' if dataset.indices is None else 'view'} has no samples"
            raise UsageError(what, path=dataset.place)
    if not found:
        raise UsageError("there is no dataset to stream", found=repr(source))
    # For shuffling, views are put into stored order, so that blocks of a shard can be read together
    # (in the view's order, a block may be a single sample). Not if weights or classes are given per
    # sample, in the view's order.
    by = None if options.sampling is None else values_of(options.sampling)
    if options.shuffle and not isinstance(by, np.ndarray):
        found = [dataset.in_order() for dataset in found]
    return found, pages


def _order(datasets: list[Dataset], options: StreamOptions) -> AnyOrder:
    ordering: dict[str, Any] = {"parts": options.parts, "window": options.window}
    every = np.concatenate([sizes(dataset) for dataset in datasets])
    if options.sampling is not None:
        values = _sampled_by(datasets, options.sampling)
        samples = options.sampling.samples or len(values)
        sampler = options.sampling.sampler(values, samples, options.seed)
        return Sampled(every, sampler, seed=options.seed, **ordering)
    ordering["shuffle"] = options.shuffle
    if options.weights is None:
        return Order(every, seed=options.seed, **ordering)
    if len(options.weights) != len(datasets):
        what = f"weights needs one number for each dataset, of which there are {len(datasets)}"
        raise UsageError(what, found=f"{len(options.weights)}")
    orders = [Order(sizes(d), seed=options.seed + n, **ordering) for n, d in enumerate(datasets)]
    return Mixture(orders, options.weights, options.seed)


def _sampled_by(datasets: list[Dataset], sampling: Sampling) -> npt.NDArray[Any]:
    """The class or weight of each sample. If a field is named, it is read for all samples."""
    given = values_of(sampling)
    samples = sum(map(len, datasets))
    if isinstance(given, np.ndarray):
        if len(given) != samples:
            what = f"sampling needs one value for each sample: {samples:,} values"
            raise UsageError(what, found=f"{len(given):,}")
        return given
    field = given or datasets[0].label
    kind = common_schema(datasets, [field])[field]
    if not isinstance(kind, Int | Float | Bool | Text):
        raise UsageError(
            f"{type(sampling).__name__} needs a single value for each sample",
            field=field,
            expected="a field of numbers, booleans or text, or a list with one value for each",
            found=type(kind).__name__,
        )
    names = {dataset.class_names.get(field) for dataset in datasets}
    if isinstance(sampling, Balanced) and len(names) > 1:
        raise UsageError(
            f"the datasets have different class names for {field!r}, so its numbers differ",
            found=", ".join(str(dataset.place) for dataset in datasets[:5]),
            fix="convert them into one dataset, or pass Balanced(...) a class for each sample",
        )
    found = [value for dataset in datasets for value in dataset.column(field).tolist()]
    # If classes have names, -1 means "no class".
    unnamed = -1 if isinstance(sampling, Balanced) and None not in names else None
    lacking = sum(value in (None, unnamed) for value in found)
    if lacking:
        raise UsageError(
            f"sampling needs a value of {field!r} for each sample",
            found=f"{lacking:,} of {samples:,} samples without one",
            fix="leave them out of the dataset, or pass sampling= a value for each sample",
        )
    return np.array(found)


def _counted(schema: Schema, batching: Batching) -> str:
    """The field whose lengths are used to plan batches. Lengths of audio are in milliseconds."""
    arrays = row_fields(schema) + ([] if isinstance(batching, Pack) else audio_fields(schema))
    wanted = batching.field or ("tokens" if "tokens" in arrays else arrays[0] if arrays else None)
    if wanted not in arrays:
        raise UsageError(
            "batches by length need a field of one-dimensional arrays or audio",
            expected=", ".join(arrays) or "such a field",
            found=", ".join(schema) if wanted is None else repr(wanted),
            fix=f"name it: {type(batching).__name__}(..., field=...)",
        )
    return wanted


def _packed(schema: Schema, counted: str, every: bool) -> list[str]:
    """The fields that are packed: the counted one, and other arrays, which have a value per token.

    Raises UsageError for a field that cannot be packed and was asked for. `every`: no fields were.
    """
    shapes = {name: getattr(kind, "shape", None) for name, kind in schema.items()}
    may = (None, (None,), shapes[counted])  # a fixed length is not that of tokens
    arrays = [name for name in row_fields(schema) if shapes[name] in may]
    fields = [counted, *(name for name in arrays if name != counted)]
    others = [name for name in schema if name not in fields]
    rows = "Pack makes rows of several samples, which cannot hold"
    taken = [name for name in fields if name in PACKED]
    if taken or (others and not every):
        wrong = [*taken, *others][0]
        raise UsageError(
            f"the batch would have two values named {wrong!r}" if taken else f"{rows} this field",
            field=wrong,
            expected="arrays with one value for each token",
            fix=f"fields={[name for name in fields if name not in taken]}",
        )
    if others:
        names = ", ".join(map(repr, others))
        warn(f"{rows} the fields {names}: they are ignored (silent with fields={fields})")
    return fields
