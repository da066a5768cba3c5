"""Source and options -> tasks: which samples each makes shards of, fixed before any work starts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.codecs.image import NotAnImageError
from shardkit.conversion.reading import Reading, Share, key_fraction
from shardkit.conversion.shards import Stats
from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError
from shardkit.formats import FORMATS, get_format
from shardkit.formats.base import Format, Joins
from shardkit.options import ConvertOptions, TextOptions, parse_split
from shardkit.order import permutation
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.items import Item, Steps, sample_of
from shardkit.preprocess.text import text_field, text_steps
from shardkit.preprocess.transform import Transform, load_transform
from shardkit.sample import renamed
from shardkit.schema import Image, Schema, is_unicode
from shardkit.sources.base import Source, Stream, some_of
from shardkit.version import __version__

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.codecs.tokenizers import Tokenizer
    from shardkit.sources.base import Indices

# How tasks are cut, and what they leave behind: changes with that. A run goes on only with its own,
# and the blocks of tokens of another cannot be made again.
TASKS = "2"
_TASK_BYTES = 256 * 10**6  # of a task whose shards are bounded by samples, or not at all
# Where images are decoded or text is tokenized, tasks are cut by that work, whoever does it: each
# is at most so small a share of what is left, so that none of as many workers ever waits long.
_SHARES = 64
_LEAST_WORK = 2 << 20  # bytes to decode or tokenize, in a fifth of a second or so
_LEAST_BLOCKS = 128  # of a task's own: the last one may not be full
_TOKEN_BYTES = 4  # of text that becomes one, about
# Where values are copied, one process keeps the disk busy, and joining copies them twice: pieces of
# an only shard are there for a run to continue at, and only a large one has any.
_COPIED_BYTES = 4000 * 10**6
_PROBE_TEXT = 1 << 13  # characters of a document that the engines are compared on
_MARGIN = 1.1  # so that a guess of sizes does not fall short


@dataclass(frozen=True)
class Slice:
    """Of a source: its samples, or of a stream its parts, in this order."""

    order: Indices
    share: Share | None = None  # of a stream: only these documents
    counts: Indices | None = None  # of a stream with a limit: documents of each part in `order`


@dataclass(frozen=True)
class Part:
    """One dataset of the output: a split's name ("" for the only one), and what it is made of."""

    name: str
    source: Source | Stream
    slice: Slice
    steps: Steps  # what is done to every sample first
    schema: Schema  # of the samples after that, and with their new names
    problems: tuple[ShardkitError, ...] = ()  # found while planning, belonging to no sample
    ignored: Mapping[str, int] = field(default_factory=dict)  # found so, of the source

    @property
    def samples(self) -> int | None:
        """How many there are, where that is known without reading them."""
        counts, known = self.slice.counts, isinstance(self.source, Source)
        return len(self.slice.order) if known else None if counts is None else int(counts.sum())

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """What made the tokens, for the manifest, and its files; of a source that has them, its."""
        if self.steps.text is None:
            return self.source.tokenizer()
        return self.steps.text.tokenizer.identity(), self.steps.text.tokenizer.files()


@dataclass(frozen=True)
class Task:
    """A slice of a part's order that becomes 0 to n shards."""

    number: int
    part: Part
    start: int
    stop: int
    piece: bool = False  # its shards are to be joined with those of its neighbours

    def reading(self) -> Reading:
        part, chosen = self.part, self.part.slice
        source = part.source.select(chosen.order[self.start : self.stop])
        limit = None if chosen.counts is None else int(chosen.counts[self.start : self.stop].sum())
        return Reading(source, f"{self.number:06d}", part.steps, chosen.share, limit)


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
    one_shard: bool  # all there is goes into one, however large

    @property
    def unit(self) -> str:
        """What tells how far a run is: "samples", or "bytes" of the source."""
        documents = any(part.samples is None or part.steps.text for part in self.parts)
        return "bytes" if documents else "samples"

    def amount(self, task: Task) -> int:
        """How much there is of a task, in units."""
        return self.sizes[task.number] if self.unit == "bytes" else task.stop - task.start

    @property
    def samples(self) -> int | None:
        """Of the source; None where only reading it tells."""
        counts = [part.samples for part in self.parts]
        return None if None in counts else sum(filter(None, counts))

    @property
    def bytes(self) -> int:
        """To read; each of several splits reads a stream by itself."""
        return sum(self.sizes)

    @property
    def source_bytes(self) -> int:
        """Of the source, whoever reads them."""
        first = {id(part.source): part.name for part in reversed(self.parts)}
        return sum(
            self.sizes[task.number]
            for task in self.tasks
            if task.part.slice.share is None or first[id(task.part.source)] == task.part.name
        )

    def ignored(self) -> dict[str, int]:
        """What the sources passed over, and how often, as far as it is known by now."""
        total: Counter[str] = Counter()
        for part in self.parts:
            total.update(part.ignored)
        return dict(total)

    def notes(self) -> list[str]:
        notes = [note for part in self.parts for note in part.source.notes]
        for part in self.parts:
            notes += self.format.notes(part.schema) + part.steps.notes()
        return list(dict.fromkeys(notes))

    def max_bytes(self) -> int | None:
        return None if self.one_shard else self.options.max_bytes()

    def describe(self) -> dict[str, Any]:
        """For `--plan`: what would be done."""
        return {
            "format": self.format.name,
            "samples": self.samples,  # None: only reading the source tells
            "bytes": self.bytes,
            "tasks": len(self.tasks),
            "parts": [
                {
                    "split": part.name or None,
                    "samples": part.samples,
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
    sources: Mapping[str, Source | Stream],
    to: str,
    options: ConvertOptions,
    *,
    single: bool = False,
    workers: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Plan:
    """Cut the sources into tasks; `single` if the output is a single shard and not a folder.

    `workers` is 0 where no process but this one must load what the user gave. A `tokenizer` takes
    the place of the one that the options name. Raises UsageError or FormatError for options that do
    not fit the sources.
    """
    format = get_format(to)
    bounded = options.shard_size is not None or options.shard_samples is not None
    one_shard = single or (FORMATS[to].one_shard and not bounded)
    if single and bounded:
        raise UsageError("an output that is one shard has no bound", fix="give a folder with -o")
    transform = None
    if options.transform is not None:
        transform = load_transform(options.transform, workers)
    parts, fingerprints = [], {}
    tokenizer = tokenizer or _tokenizer(sources, options.text)
    for name, source in sources.items():
        steps, schema = _steps(source, options, transform, tokenizer, format)
        _check_names(schema, source)
        format.layout(schema)
        # Before memory is taken for each sample: shards are as large as their manifest says.
        fingerprints[name] = source.fingerprint()
        problems, ignored = tuple(source.problems), source.ignored
        for split, chosen in _splits(name, source, options):
            parts.append(Part(split, source, chosen, steps, schema, problems, ignored))
            problems, ignored = (), {}  # listed once
    tasks: list[Task] = []
    sizes: list[int] = []
    for part in parts:
        payload = part.source.sizes()[part.slice.order]
        limits = (None, None) if one_shard else (options.max_bytes(), options.shard_samples)
        cuts = list(_cuts(part, payload, format, options.rename, *limits))
        for start, stop, piece in cuts:
            tasks.append(Task(len(tasks), part, start, stop, piece and len(cuts) > 1))
            sizes.append(int(payload[start:stop].sum()))
    if single and len(parts) > 1:
        raise UsageError(
            "splits are folders, and the output is one shard",
            found=", ".join(part.name for part in parts),
            fix="give a folder with -o, or --split none",
        )
    identity = {
        "format": to,
        "source": {name: (f or {}).get("files") for name, f in fingerprints.items()},
        "times": {name: (f or {}).get("times") for name, f in fingerprints.items()},
        "options": {
            **options.shaping(),
            **({"shard_size": None} if one_shard else {}),
            "text": _text_identity(options.text, tokenizer),
            "transform": transform.identity() if transform else None,
        },
        "versions": _versions(parts),
    }
    resumable = None not in fingerprints.values() and not (transform and transform.digest is None)
    return Plan(format, options, parts, tasks, sizes, identity, resumable, one_shard)


def _check_names(schema: Schema, source: Source | Stream) -> None:
    """Raises SourceError for names that no manifest can hold."""
    for name in schema:
        if not is_unicode(name):
            raise SourceError(
                "the name of a field is not valid Unicode",
                field=name,
                fix="rename it in the source, or choose other fields with --fields",
            )
    for label, classes in source.class_names.items():
        if not is_unicode("".join(classes)):
            raise SourceError(
                "the name of a class is not valid Unicode",
                field=label,
                found=next(name for name in classes if not is_unicode(name)),
                fix="rename its folder, or whatever names it in the source",
            )


def _encodes(part: Part, format: Format) -> bool:
    """Whether values are decoded or encoded, and not copied, as far as a few samples tell."""
    images = {n: kind for n, kind in part.source.schema.items() if isinstance(kind, Image)}
    steps = part.steps.images is not None or part.steps.text is not None
    if steps or isinstance(part.source, Stream) or not format.encodes_images:
        return steps or isinstance(part.source, Stream)
    for document in some_of(part.source, part.slice.order):
        sample = {} if isinstance(document.sample, SampleError) else document.sample
        try:
            for name, kind in images.items():
                if name in sample and format.carried(kind, sample[name]) != sample[name]:
                    return True
        except NotAnImageError:  # the conversion will meet it again, and say so
            continue
    return False


def _bounds(
    part: Part,
    payload: npt.NDArray[np.int64],
    format: Format,
    rename: dict[str, str],
) -> npt.NDArray[np.int64]:
    """Bounds in bytes of what the source's samples, or a stream's parts, become.

    Where steps change them or nobody knows their number, about what a few tell, and some more.
    """
    if isinstance(part.source, Source) and not part.steps:
        return format.bound(payload, len(part.schema))
    stats, samples, read = Stats(part.schema), 0, 0
    few = some_of(part.source, part.slice.order)
    steps = _without_padding(part.steps)
    shaped = (Item(d.name, steps.shaped(d.sample, stats.ignored), d.size) for d in few)
    for item in steps.in_order(shaped, "", 1, stats.text, stats.ignored):
        read += item.size
        try:
            sample = renamed(sample_of(item.read), rename)
            stats.add(sample if steps.text else part.schema.check(sample))
        except (SampleError, Filtered):
            continue
        samples += 1
    if not samples:  # all are bad, or a few: the conversion will meet them again
        return format.bound(payload, len(part.schema))
    stats.flush()
    written = sum(field.bytes for field in stats.fields.values())
    mean = np.array([written // samples], np.int64)
    stored = int(format.bound(mean, len(part.schema))[0]) * samples
    return (payload * (_MARGIN * stored / max(read, 1))).astype(np.int64) + 1


def _without_padding(steps: Steps) -> Steps:
    """The same, less the padding of a last block, which of few documents would be a large part."""
    text = steps.text
    if text is None or text.options.seq_len is None or text.options.pack == "pad":
        return steps
    return replace(steps, text=replace(text, options=replace(text.options, remainder="keep")))


def _tokenizer(sources: Mapping[str, Source | Stream], options: TextOptions) -> Tokenizer | None:
    """The tokenizer, once its fast engine was compared with the other on some documents."""
    if options.tokenizer is None:
        return None
    from shardkit.codecs.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(
        options.tokenizer, special_tokens=options.special_tokens, eos_token=options.eos_token
    )
    texts: list[str] = []
    for source in sources.values():
        name = text_field(options, source.schema)
        found = (document.sample for document in some_of(source))
        texts += [s[name][:_PROBE_TEXT] for s in found if isinstance(s, dict) and name in s]
    return tokenizer.checked_on(texts)


def _text_identity(options: TextOptions, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """The options for text, for the manifest: a tokenizer is what it does and not where it was."""
    identity = None if tokenizer is None else tokenizer.identity()
    return {**asdict(options), "tokenizer": identity} if options != TextOptions() else None


def _steps(
    source: Source | Stream,
    options: ConvertOptions,
    transform: Transform | None,
    tokenizer: Tokenizer | None,
    format: Format,
) -> tuple[Steps, Schema]:
    """The steps for a source, and the fields that its samples have in the end."""
    images, schema = None, source.schema
    # A format that makes JPEGs of other images needs steps for masks, whatever was asked for.
    if options.image.active or transform is not None or format.raw_images != "array":
        from shardkit.preprocess.steps import schema_after, steps_for

        raw = format.raw_images
        images = steps_for(source.schema, options.image, transform, raw, source)
        schema = schema_after(images, source)
    text = fields = None
    documents = options.documents
    if tokenizer is None and documents.field is not None and not documents.keep_fields:
        name = text_field(documents, schema)
        others = source.schema.keys() - {name}
        if others:  # a dataset: sources of text have left them out
            fields, schema = (name,), Schema({n: schema[n] for n in schema if n not in others})
    if tokenizer is not None:
        text = text_steps(tokenizer, documents, schema)
        schema = text.schema_after(schema)
    return Steps(images, text, fields), schema.renamed(options.rename)


def _versions(parts: list[Part]) -> dict[str, str]:
    """Of what decides the bytes: us, and the libraries that do the steps."""
    found = {"shardkit": __version__, "tasks": TASKS}
    for part in parts:
        found |= part.steps.versions()
    return found


def _splits(
    name: str, source: Source | Stream, options: ConvertOptions
) -> Iterator[tuple[str, Slice]]:
    shares = parse_split(options.split)
    if isinstance(source, Stream):
        if options.shuffle:
            raise UsageError(
                "documents of a long file come in their order: they cannot be shuffled",
                fix="convert them without --shuffle first, and then that dataset with it",
            )
        yield from _stream_splits(name, source, shares, options.limit)
        return
    members_of = by_hash(source, shares) if shares else {name: np.arange(len(source))}
    for split, members in members_of.items():
        order = members
        if options.shuffle:
            order = members[permutation(len(members), options.seed)]
        yield split, Slice(order[: options.limit])


def shares_of(shares: dict[str, float]) -> dict[str, Share]:
    """Which of all fractions of keys belong to each split."""
    ends = np.cumsum([0.0, *shares.values()]).tolist()
    ends[-1] = 2.0  # above every fraction
    return {name: Share(ends[n], ends[n + 1]) for n, name in enumerate(shares)}


def _stream_splits(
    name: str, stream: Stream, shares: dict[str, float], limit: int | None
) -> Iterator[tuple[str, Slice]]:
    """Every split reads all parts, and leaves out the documents that are not its own."""
    parts = np.arange(len(stream))
    of_split = shares_of(shares)
    for split in of_split or [name]:
        share = of_split.get(split)
        if limit is None:
            yield split, Slice(parts, share)
        else:
            counts = np.array(list(_counts(stream, share, limit)), np.int64)
            yield split, Slice(parts[: len(counts)], share, counts)


def _counts(stream: Stream, share: Share | None, limit: int) -> Iterator[int]:
    """How many of the first documents each part has, up to the part that has the last of them."""
    for number in range(len(stream)):
        reading = Reading(stream.select(np.array([number])), "", Steps(), share, limit)
        count = sum(1 for _ in reading.items(1))
        yield count
        limit -= count
        if not limit:
            return


def by_hash(source: Source, shares: dict[str, float]) -> dict[str, Indices]:
    """Samples by the hash of their keys: a sample stays in its split whatever is added later."""
    fractions = np.empty(len(source), np.float64)
    for index in range(len(source)):
        key = source.key(index)
        if key is None:
            try:
                key = source[index]["__key__"]
            except SampleError:  # the conversion will meet it again, and say so
                key = source.name(index)
        fractions[index] = key_fraction(key)
    ends = np.cumsum(list(shares.values()))
    ends[-1] = 1.0
    number = np.searchsorted(ends, fractions, side="right")
    number = np.minimum(number, len(shares) - 1)
    return {name: np.flatnonzero(number == n) for n, name in enumerate(shares)}


def _cuts(
    part: Part,
    payload: npt.NDArray[np.int64],
    format: Format,
    rename: dict[str, str],
    max_bytes: int | None,
    max_samples: int | None,
) -> Iterator[tuple[int, int, bool]]:
    """Where the tasks begin and end, and whether each makes a piece, to be joined with others.

    A task makes about one shard, where values are copied; else it is cut by the work.
    """
    exact = part.samples is not None and part.steps.text is None  # samples of shards can be counted
    unbounded = max_bytes is None and max_samples is None  # all goes into one shard, however large
    if _joins(format, max_bytes) and _encodes(part, format):
        most = _TASK_BYTES
        if max_bytes is not None:
            stored = int(_bounds(part, payload, format, rename).sum())
            most = max(max_bytes * int(payload.sum()) // max(stored, 1), 1)
        shard = max_samples if exact else None
        for start, stop, piece in _work_cuts(payload, most, _least_work(part), shard):
            yield start, stop, piece or unbounded
        return
    bounds = _bounds(part, payload, format, rename)
    if max_samples is not None and exact:
        cuts = _whole_shards(bounds, max_samples)
    else:
        cuts = _even_cuts(bounds, max_bytes or (_TASK_BYTES if max_samples else _COPIED_BYTES))
    yield from ((start, stop, unbounded) for start, stop in cuts)


def _joins(format: Format, max_bytes: int | None) -> bool:
    """Whether pieces that are as large as `max_bytes` together make a shard that is no larger."""
    return isinstance(format, Joins) and (max_bytes is None or not format.join_pads)


def _least_work(part: Part) -> int:
    """Bytes of the smallest task: with blocks of tokens, those of so many."""
    text = part.steps.text
    seq_len = 0 if text is None else text.options.seq_len or 0
    return max(_LEAST_WORK, _LEAST_BLOCKS * seq_len * _TOKEN_BYTES)


def _work_cuts(
    work: npt.NDArray[np.int64], most: int, least: int, shard: int | None = None
) -> Iterator[tuple[int, int, bool]]:
    """Tasks of at most `most` bytes of work, and less towards the end: see _SHARES.

    With a `shard` of so many samples, each of its multiples is a cut between shards.
    """
    ends = np.concatenate([[0], np.cumsum(work)])
    start, samples, piece = 0, len(work), False
    while start < samples:
        left = int(ends[-1] - ends[start])
        whole = -(-left // most)
        shares = max(whole, min(_SHARES, left // least), 1)
        aim = int(ends[start]) - (-left // shares)
        stop = max(int(np.searchsorted(ends, aim, side="right")) - 1, start + 1)
        piece = piece or shares > whole
        if shard is not None:
            first = (start // shard + 1) * shard  # end of the shard that the task begins in
            stop = min(stop, first) if start % shard else max(stop - stop % shard, min(stop, first))
            piece = bool(start % shard) or (bool(stop % shard) and stop < samples)
        yield start, stop, piece
        start = stop


def _whole_shards(bounds: npt.NDArray[np.int64], max_samples: int) -> Iterator[tuple[int, int]]:
    """Tasks of as many samples as one or more shards have."""
    mean = int(bounds.mean()) + 1 if len(bounds) else 1
    step = max_samples * max(1, _TASK_BYTES // (mean * max_samples))
    for start in range(0, len(bounds), step):
        yield start, min(start + step, len(bounds))


def _even_cuts(bounds: npt.NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Tasks of nearly equal bytes, at most `limit` where samples allow it."""
    ends = np.concatenate([[0], np.cumsum(bounds)])
    tasks = -(-int(ends[-1]) // limit)
    cuts = _evenly(ends, tasks)
    if np.diff(ends[cuts]).max(initial=0) > limit:  # by the size of a sample: one more has room
        cuts = _evenly(ends, tasks + 1)
    yield from itertools.pairwise(cuts.tolist())


def _evenly(ends: npt.NDArray[np.int64], tasks: int) -> npt.NDArray[np.int64]:
    """Numbers of samples at which `tasks` slices of nearly equal bytes begin and end."""
    aims = int(ends[-1]) * np.arange(tasks + 1) // max(tasks, 1)
    return np.unique(np.searchsorted(ends, aims, side="left"))
