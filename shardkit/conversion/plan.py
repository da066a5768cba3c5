"""Source and options -> tasks: which samples each makes shards of, fixed before any work starts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shardkit.codecs.image import NotAnImageError
from shardkit.conversion.shards import Stats
from shardkit.errors import SampleError, ShardkitError, UsageError
from shardkit.formats import FORMATS, get_format
from shardkit.formats.base import Format
from shardkit.options import ConvertOptions, parse_split
from shardkit.order import permutation
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.transform import Transform, load_transform
from shardkit.sample import renamed
from shardkit.schema import Image, Schema
from shardkit.sources.base import Source
from shardkit.version import __version__

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.preprocess.images import ImageSteps
    from shardkit.sources.base import Indices

_TASK_BYTES = 256 * 10**6  # of a task whose shards are bounded by samples
# The only shard is made in pieces: a few for each worker where pictures are encoded. Where values
# are copied, one process keeps the disk busy, and joining copies them twice: then pieces are there
# for a run to continue at, and only a large one has any.
_PIECES = 16
_PROBES = 16  # samples that tell whether pictures are encoded
_MARGIN = 1.1  # so that a guess of sizes does not fall short
_ENCODED_BYTES = (16 * 10**6, 256 * 10**6)
_COPIED_BYTES = 4000 * 10**6


@dataclass(frozen=True)
class Part:
    """One dataset of the output: a split's name ("" for the only one), and its samples in order."""

    name: str
    source: Source
    order: Indices
    steps: ImageSteps | None  # what is done to every sample first
    schema: Schema  # of the samples after that, and with their new names
    problems: tuple[ShardkitError, ...] = ()  # found while planning, belonging to no sample


@dataclass(frozen=True)
class Task:
    """A slice of a part's order that becomes 0 to n shards."""

    number: int
    part: Part
    start: int
    stop: int

    def source(self) -> Source:
        return self.part.source.select(self.part.order[self.start : self.stop])


@dataclass(frozen=True)
class Plan:
    """All that is to be done. `identity` says whether two runs make the same dataset."""

    format: Format
    options: ConvertOptions
    parts: list[Part]
    tasks: list[Task]
    sizes: list[int]  # payload bytes per task
    identity: dict[str, Any]
    resumable: bool
    one_shard: bool  # tasks make pieces, which publishing joins

    @property
    def samples(self) -> int:
        return sum(len(part.order) for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def ignored(self) -> dict[str, int]:
        """What the sources passed over, and how often."""
        total: Counter[str] = Counter()
        for source in {id(part.source): part.source for part in self.parts}.values():
            total.update(source.ignored)
        return dict(total)

    def notes(self) -> list[str]:
        notes = [note for part in self.parts for note in part.source.notes]
        for part in self.parts:
            notes += self.format.notes(part.schema)
            if part.steps is not None:
                notes += part.steps.notes()
        return list(dict.fromkeys(notes))

    def max_bytes(self) -> int | None:
        return None if self.one_shard else self.options.max_bytes()

    def describe(self) -> dict[str, Any]:
        """For `--plan`: what would be done."""
        return {
            "format": self.format.name,
            "samples": self.samples,
            "bytes": self.bytes,
            "tasks": len(self.tasks),
            "parts": [
                {
                    "split": part.name or None,
                    "samples": len(part.order),
                    "schema": part.schema.to_json(),
                    "classes": None if part.source.classes is None else len(part.source.classes),
                }
                for part in self.parts
            ],
            "ignored": self.ignored(),
            "notes": self.notes(),
            "one_shard": self.one_shard,
            "problems": [str(p) for part in self.parts for p in part.problems],
            "options": self.identity["options"],
        }


def make_plan(
    sources: dict[str, Source],
    to: str,
    options: ConvertOptions,
    *,
    single: bool = False,
    workers: int | None = None,
) -> Plan:
    """Cut the sources into tasks; `single` if the output is a single shard and not a folder.

    `workers` is 0 where no process but this one must load what the user gave. Raises UsageError or
    FormatError for options that do not fit them.
    """
    format = get_format(to)
    bounded = options.shard_size is not None or options.shard_samples is not None
    one_shard = single or (FORMATS[to].one_shard and not bounded)
    if single and bounded:
        raise UsageError("an output that is one shard has no bound", fix="give a folder with -o")
    transform = None
    if options.transform is not None:
        transform = load_transform(options.transform, workers)
    parts = []
    for name, source in sources.items():
        steps, schema = _steps(source, options, transform, format)
        format.layout(schema)
        for split, order, problems in _splits(name, source, options):
            parts.append(Part(split, source, order, steps, schema, problems))
    tasks: list[Task] = []
    sizes: list[int] = []
    for part in parts:
        payload = part.source.sizes()[part.order]
        limits = (None, None) if one_shard else (options.max_bytes(), options.shard_samples)
        encodes = one_shard and _encodes(part, format)
        stored = payload if one_shard else _stored(part, payload, options.rename)
        bounds = format.bound(stored, len(part.schema))
        for start, stop in _cuts(bounds, *limits, encodes=encodes):
            tasks.append(Task(len(tasks), part, start, stop))
            sizes.append(int(payload[start:stop].sum()))
    if single and len(parts) > 1:
        raise UsageError(
            "splits are folders, and the output is one shard",
            found=", ".join(part.name for part in parts),
            fix="give a folder with -o, or --split none",
        )
    fingerprints = {name: source.fingerprint() for name, source in sources.items()}
    identity = {
        "format": to,
        "source": {name: (f or {}).get("files") for name, f in fingerprints.items()},
        "times": {name: (f or {}).get("times") for name, f in fingerprints.items()},
        "options": {
            **options.shaping(),
            **({"shard_size": None} if one_shard else {}),
            "transform": transform.identity() if transform else None,
        },
        "versions": _versions(parts),
    }
    resumable = None not in fingerprints.values() and not (transform and transform.digest is None)
    return Plan(format, options, parts, tasks, sizes, identity, resumable, one_shard)


def _encodes(part: Part, format: Format) -> bool:
    """Whether pictures are encoded, and not copied, as far as a few samples tell."""
    pictures = {n: kind for n, kind in part.source.schema.items() if isinstance(kind, Image)}
    if part.steps is not None or not format.encodes_pictures:
        return part.steps is not None
    for index in _probes(part):
        try:
            sample = part.source[index]
            for name, kind in pictures.items():
                if name in sample and format.carried(kind, sample[name]) != sample[name]:
                    return True
        except (SampleError, NotAnImageError):  # the conversion will meet it again, and say so
            continue
    return False


def _probes(part: Part) -> list[int]:
    """A few samples of a part, the same whenever it is planned."""
    step = max(len(part.order) // _PROBES, 1)
    chosen: list[int] = part.order[::step].tolist()
    return chosen


def _stored(
    part: Part, payload: npt.NDArray[np.int64], rename: dict[str, str]
) -> npt.NDArray[np.int64]:
    """Payload bytes after the steps: about what a few samples tell, and somewhat more."""
    if part.steps is None or not len(payload):
        return payload
    stats, read = Stats(part.schema), 0
    sizes = part.source.sizes()
    for index in _probes(part):
        try:
            shaped = part.steps(part.source[index])
            stats.add(part.schema.check(renamed(shaped.sample, rename)))
        except (SampleError, Filtered):
            continue
        read += int(sizes[index])
    stats.flush()
    written = sum(field.bytes for field in stats.fields.values())
    return (payload * (_MARGIN * written / max(read, 1))).astype(np.int64)


def _steps(
    source: Source, options: ConvertOptions, transform: Transform | None, format: Format
) -> tuple[ImageSteps | None, Schema]:
    """The steps for a source, and the fields that its samples have in the end."""
    # A format that makes JPEGs of other pictures needs steps for masks, whatever was asked for.
    if not options.image.active and transform is None and format.raw_pictures == "array":
        return None, source.schema.renamed(options.rename)
    from shardkit.preprocess.steps import schema_after, steps_for

    steps = steps_for(source.schema, options.image, transform, format.raw_pictures)
    return steps, schema_after(steps, source).renamed(options.rename)


def _versions(parts: list[Part]) -> dict[str, str]:
    """Of what decides the bytes: us, and the codecs where there are steps."""
    steps = next((part.steps for part in parts if part.steps is not None), None)
    return {"shardkit": __version__, **(steps.versions() if steps is not None else {})}


def _splits(
    name: str, source: Source, options: ConvertOptions
) -> Iterator[tuple[str, Indices, tuple[ShardkitError, ...]]]:
    shares = parse_split(options.split)
    members_of = _by_hash(source, shares) if shares else {name: np.arange(len(source))}
    problems = tuple(source.problems)
    for split, members in members_of.items():
        order = members
        if options.shuffle:
            order = members[permutation(len(members), options.seed)]
        yield split, order[: options.limit], problems
        problems = ()  # listed once


def _by_hash(source: Source, shares: dict[str, float]) -> dict[str, Indices]:
    """Samples by the hash of their keys: a sample stays in its split whatever is added later."""
    hashes = np.empty(len(source), np.float64)
    for index in range(len(source)):
        key = source.key(index)
        if key is None:
            try:
                key = source[index]["__key__"]
            except SampleError:  # the conversion will meet it again, and say so
                key = source.name(index)
        hashes[index] = xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")) / 2**64
    ends = np.cumsum(list(shares.values()))
    ends[-1] = 1.0
    number = np.searchsorted(ends, hashes, side="right")
    number = np.minimum(number, len(shares) - 1)
    return {name: np.flatnonzero(number == n) for n, name in enumerate(shares)}


def _cuts(
    bounds: npt.NDArray[np.int64],
    max_bytes: int | None,
    max_samples: int | None,
    *,
    encodes: bool,
) -> Iterator[tuple[int, int]]:
    """Where the tasks begin and end: about one shard each, or one piece of the only shard."""
    if max_samples is not None:
        mean = int(bounds.mean()) + 1 if len(bounds) else 1
        step = max_samples * max(1, _TASK_BYTES // (mean * max_samples))
        for start in range(0, len(bounds), step):
            yield start, min(start + step, len(bounds))
        return
    ends = np.concatenate([[0], np.cumsum(bounds)])
    limit = max_bytes or _piece_bytes(int(ends[-1]), encodes=encodes)
    tasks = -(-int(ends[-1]) // limit)
    cuts = _even_cuts(ends, tasks)
    if np.diff(ends[cuts]).max(initial=0) > limit:  # by the size of a sample: one more has room
        cuts = _even_cuts(ends, tasks + 1)
    yield from itertools.pairwise(cuts.tolist())


def _piece_bytes(total: int, *, encodes: bool) -> int:
    if not encodes:
        return _COPIED_BYTES
    return min(max(total // _PIECES, _ENCODED_BYTES[0]), _ENCODED_BYTES[1])


def _even_cuts(ends: npt.NDArray[np.int64], tasks: int) -> npt.NDArray[np.int64]:
    """Numbers of samples at which `tasks` slices of nearly equal bytes begin and end."""
    aims = int(ends[-1]) * np.arange(tasks + 1) // max(tasks, 1)
    return np.unique(np.searchsorted(ends, aims, side="left"))
