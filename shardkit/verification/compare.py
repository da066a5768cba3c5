"""A dataset beside what it was made of, or beside another one: sample by sample, matched by keys.

The source is read once, in its own order; the samples of the dataset are looked up by their keys.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

import numpy as np

from shardkit.checked import Count, checked, damaged, under
from shardkit.conversion.plan import TASKS, Task, by_hash, make_plan, shares_of
from shardkit.conversion.reading import Reading, Share
from shardkit.errors import DamagedError, SampleError, ShardkitError, UsageError
from shardkit.formats import get_format
from shardkit.manifest import ERRORS, FILTERED, TokenizerEntry, has_manifest, load_any
from shardkit.options import ConvertOptions, ImageOptions, TextOptions, parse_split
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.items import Item, Steps, sample_of
from shardkit.processors import processors
from shardkit.sample import Sample, safe_key
from shardkit.schema import Image
from shardkit.sources import WHOLE, open_sources
from shardkit.sources.base import Source, Stream
from shardkit.sources.image_folder import ImageFolder
from shardkit.verification.keys import Keys, Place
from shardkit.verification.shards import Part, keys_of, listed
from shardkit.verification.values import difference
from shardkit.verification.work import Findings, Meter, counted

if TYPE_CHECKING:
    from shardkit.preprocess.images import ImageSteps

Against: TypeAlias = str | os.PathLike[str] | Sequence[Any]


@dataclass(frozen=True)
class Group:
    """Datasets whose samples together should be those of the sources together."""

    path: Path  # of all that is verified
    parts: list[Part]
    sources: list[Source | Stream]
    rename: dict[str, str]  # field of the sources -> field of the datasets
    safe_keys: bool = False  # the keys of the sources became such
    share: Share | None = None  # of streams: only these documents
    tasks: list[Task] | None = None  # that made the datasets, where samples depend on their cuts

    def readings(self, steps: Callable[[Source | Stream], Steps]) -> list[Reading]:
        """What is compared, and after which steps."""
        if self.tasks is not None:
            return [task.reading() for task in self.tasks]
        return [Reading(source, "", steps(source), self.share) for source in self.sources]

    @property
    def extent(self) -> tuple[int, str]:
        """How much there is to compare, and of what."""
        counts = [len(source) for source in self.sources if isinstance(source, Source)]
        if self.tasks is None and len(counts) == len(self.sources):
            return sum(counts), "samples"
        return sum(int(source.sizes().sum()) for source in self.sources), "bytes"


def groups(path: Path, parts: list[Part], against: Against, findings: Findings) -> list[Group]:
    """What is to be compared with what. Splits of only one side go to `findings`.

    Raises what `open_sources` raises for a source that cannot be opened.
    """
    for part in parts:
        _check_options(part)
    options = next((part.manifest.options for part in parts if part.manifest), {})
    sources = _open(against, options, parts)
    rename = {} if _was_made_so_too(against, options, "rename") else options.get("rename", {})
    splits = {part.name: part for part in parts}
    safe = bool(options.get("safe_keys")) and not all(s.safe_keys for s in sources.values())
    tasks = _tasks(sources, parts)
    name = _split_of(parts[0], against, sources) if WHOLE in splits else None
    if name is not None:
        tasks = tasks and [task for task in tasks if task.part.name == name]
        one, share = _part_of(sources, name, options)
        return [Group(path, parts, [one], rename, safe, share, tasks)]
    if WHOLE in splits or WHOLE in sources:
        return [Group(path, parts, list(sources.values()), rename, safe, None, tasks)]
    for name in sorted(splits.keys() ^ sources.keys()):
        side = "the source" if name in splits else "the dataset"
        findings.add(DamagedError(f"{side} has no split {name!r}", path=path))
    common = [name for name in splits if name in sources]
    return [
        Group(
            path / name,
            [splits[name]],
            [sources[name]],
            rename,
            safe,
            None,
            None if tasks is None else [task for task in tasks if task.part.name == name],
        )
        for name in common
    ]


class _Options(TypedDict, total=False):
    """The options in a manifest, as far as a comparison needs them."""

    shard_size: Count | None
    shard_samples: Count | None
    shuffle: int | None
    limit: Count | None
    split: str
    fields: list[str]
    drop: list[str]
    rename: dict[str, str]
    image: ImageOptions | None
    text: TextOptions | None
    transform: dict[str, Any] | None


def _check_options(part: Part) -> None:
    """Raise DamagedError for options in a manifest that no conversion can have had."""
    if part.manifest is None:
        return
    try:
        with under("options"):
            text = checked(_Options, part.manifest.options).get("text")
            if text is not None and text.tokenizer is not None:
                checked(TokenizerEntry, cast("Any", text.tokenizer), "text", "tokenizer")
    except ValueError as error:
        raise damaged("the manifest", error, path=part.dataset.manifest_path) from error


def _split_of(part: Part, against: Against, sources: Mapping[str, Source | Stream]) -> str | None:
    """Which split of the sources a dataset is, by the name of its folder; None for all of them.

    Raises UsageError where the dataset was made as one of several and the name is of none of them.
    """
    name = Path(os.path.abspath(part.dataset.path)).name
    options = part.manifest.options if part.manifest else {}
    shares: Collection[str] | None
    if WHOLE not in sources:
        same = part.manifest is not None and part.manifest.source.keys() == sources.keys()
        shares = sources.keys() if same or name in sources else None
    else:
        shares = parse_split(options.get("split", "auto"))
        shares = None if _was_made_so_too(against, options, "split") else shares
    if not shares:
        return None
    if name not in shares:
        raise UsageError(
            "which split of the source this dataset is cannot be told from the folder's name",
            found=name,
            expected=", ".join(shares),
            fix="call the folder as it was, or verify the folder of all splits",
        )
    return name


def _part_of(
    sources: Mapping[str, Source | Stream], name: str, options: dict[str, Any]
) -> tuple[Source | Stream, Share | None]:
    """One split of the sources: its own source, or those samples of the only one."""
    if WHOLE not in sources:
        return sources[name], None
    source, shares = sources[WHOLE], parse_split(options["split"])
    if isinstance(source, Stream):
        return source, shares_of(shares)[name]
    return source.select(by_hash(source, shares)[name]), None


def _tasks(sources: Mapping[str, Source | Stream], parts: list[Part]) -> list[Task] | None:
    """The tasks that made tokens of these sources; None where datasets are not made so."""
    part = next((part for part in parts if part.manifest), None)
    if part is None or part.manifest is None:
        return None
    options = part.manifest.options
    text = options.get("text") or {}
    copy = part.dataset.tokenizer_path
    if copy is None or not text.get("tokenizer") or options.get("transform"):
        return None
    if all(source.tokenizer()[0] for source in sources.values()):
        return None  # the source has tokens too: it is a copy of this dataset, say
    if text.get("seq_len") is not None and part.manifest.versions.get("tasks") != TASKS:
        raise UsageError(
            "the source cannot be compared with blocks of tokens that an earlier shardkit has made",
            path=part.dataset.path,
            fix="verify without --against, or convert again",
        )
    from shardkit.codecs.tokenizers import open_copy

    identity = text["tokenizer"]
    made = ConvertOptions(
        shard_size=options.get("shard_size"),
        shard_samples=options.get("shard_samples"),
        limit=options.get("limit"),
        split=options.get("split", "auto"),
        shuffle=options.get("shuffle") is not None,
        seed=options.get("shuffle") or 0,
        rename=options.get("rename") or {},
        **_selected(options),
        image=ImageOptions(**(options.get("image") or {})),
        text=TextOptions(**{**text, "tokenizer": identity["file"]}),
    )
    single = part.dataset.place != part.dataset.path
    tokenizer = open_copy(copy, identity, fast=True)
    return make_plan(sources, part.dataset.format, made, single=single, tokenizer=tokenizer).tasks


def _open(
    against: Against, options: dict[str, Any], parts: list[Part]
) -> dict[str, Source | Stream]:
    """The sources, with splits and labels as the conversion had them."""
    path = isinstance(against, str | os.PathLike)
    ours = path and has_manifest(Path(str(against)))
    made = options.get("split", "auto")
    split = "auto" if ours else made
    chosen = {} if _was_made_so_too(against, options, "fields", "drop") else _selected(options)
    made_with = ConvertOptions(text=TextOptions(**(options.get("text") or {})), **chosen)
    given: dict[str, Any] = {
        "split": split,
        "text": made_with.documents,
        "selection": made_with.selection,
    }
    sources = open_sources(against, strict=False, **given)
    table = next((part.dataset.classes for part in parts), None)
    for source in sources.values():
        found = source.classes
        own = table and found and table != found and set(found) <= set(table)
        if own and isinstance(source, ImageFolder):  # the order of --classes
            return open_sources(against, strict=False, classes=table, **given)
    return sources


def _selected(options: dict[str, Any]) -> dict[str, Any]:
    """The fields that a dataset was made with."""
    return {name: options[name] for name in ("fields", "drop") if options.get(name)}


def _was_made_so_too(against: Against, options: dict[str, Any], *names: str) -> bool:
    """Whether the source is a dataset that was made with the same options of these names."""
    if not isinstance(against, str | os.PathLike) or not has_manifest(Path(against)):
        return False
    theirs = load_any(Path(against)).options
    return all((theirs.get(name) or None) == (options.get(name) or None) for name in names)


def compare(group: Group, findings: Findings, meter: Meter) -> None:
    """Compare all samples. What has a place in a shard goes to that part's findings."""
    comparison = _Comparison(group, findings)
    _, unit = group.extent
    if group.tasks is not None:
        comparison.begin_made()
    for reading in group.readings(comparison.begin):
        try:
            for item in reading.items(processors()):
                meter.add(1 if unit == "samples" else item.size)
                meter.report()
                comparison.compare_item(item)
        except ShardkitError as error:  # a whole shard of the source, say
            findings.add(error)
            comparison.complete = False
    comparison.conclude()


@dataclass
class _Tally:
    """What is no problem and yet worth a note."""

    encoded: int = 0  # images that the format could not hold as they were
    dropped: int = 0
    filtered: int = 0
    missing: list[tuple[str, str | None]] = field(default_factory=list)  # name in source, key


class _Comparison:
    """The state of comparing one group."""

    def __init__(self, group: Group, findings: Findings) -> None:
        self._group = group
        self._findings = findings
        self._keys: Keys = keys_of(group.parts)
        self._matched = np.zeros(len(self._keys), bool)
        self._format = get_format(group.parts[0].dataset.format)
        self._schema = group.parts[0].dataset.schema
        self._dropped = _Dropped(group.parts, ERRORS)
        self._filtered = _Dropped(group.parts, FILTERED)
        self._manifest = next((part.manifest for part in group.parts if part.manifest), None)
        self._options = self._manifest.options if self._manifest else {}
        self._tally = _Tally()
        self._names: dict[str, str] = {}
        self._common: set[str] = set()
        self.complete = True  # the sources were read to their end

    def begin(self, source: Source | Stream) -> Steps:
        """Compare fields and classes; returns the steps that make the dataset's images again."""
        self._names = {old: new for old, new in self._group.rename.items() if old in source.schema}
        text = self._options.get("text") or {}
        only = "" if text.get("keep_fields") else text.get("field") or ""
        kept = [only] if only in source.schema else list(source.schema)
        theirs = [self._names.get(name, name) for name in kept]
        self._common = self._schema.keys() & set(theirs)
        if self._options.get("transform"):
            self._note("made with a transform, which verify does not run: only keys are compared")
            self._common = set()
        else:
            self._compare_schemas(source, theirs)
        return Steps(self._steps(source))

    def begin_made(self) -> None:
        """Compare what tasks make again: it has all the fields of the dataset."""
        self._names = self._group.rename
        self._common = set(self._schema)

    def _steps(self, source: Source | Stream) -> ImageSteps | None:
        images = any(isinstance(kind, Image) for kind in source.schema.values())
        if self._manifest is None or not images or self._options.get("transform"):
            return None
        from shardkit.preprocess.steps import steps_for

        options = ImageOptions(**(self._options.get("image") or {}))
        steps = steps_for(source.schema, options, None, self._format.raw_images, source)
        made_with = self._manifest.versions
        if steps is not None and not steps.versions().items() <= made_with.items():
            self._note("made with other versions of the codecs: images are not compared")
            self._common -= {self._names.get(n, n) for n in (*steps.images, *steps.masks)}
        return steps

    def _note(self, words: str) -> None:
        if words not in self._findings.notes:
            self._findings.notes.append(words)

    def _compare_schemas(self, source: Source | Stream, theirs: Collection[str]) -> None:
        """Fields that only one side has, and class names that differ."""
        ours = self._schema.keys()
        path = self._group.path
        for name in [n for n in (*ours, *theirs) if n not in self._common]:
            side = "source" if name in ours else "dataset"
            problem = DamagedError(
                f"a field is not in the {side}",
                path=path,
                field=name,
                expected="the same fields on both sides",
                found=f"{', '.join(ours)} in the dataset, {', '.join(theirs)} in the source",
            )
            self._findings.add(problem)
        dataset, rename = self._group.parts[0].dataset, self._group.rename
        named = dataset.class_names
        for old, expected in source.class_names.items():
            field = dataset.label if old == source.label else rename.get(old, old)
            if field in named and named[field] != expected:
                problem = DamagedError(
                    "the class names are not those of the source",
                    path=path,
                    field=field,
                    expected=f"{list(expected)!r:.200}",
                    found=f"{list(named[field])!r:.200}",
                )
                self._findings.add(problem)

    def compare_item(self, item: Item) -> None:
        """One sample of the source after its steps, or why there is none."""
        read = item.read
        if not isinstance(read, Filtered):
            sample = read if isinstance(read, SampleError) else sample_of(read)
            self._compare_sample(item.name, sample)
        elif self._number_of(read.key and self._stored(read.key)) is None:
            self._tally.filtered += 1  # else it stays unmatched, and is reported as unknown

    def _compare_sample(self, name: str, sample: Sample | SampleError) -> None:
        key = sample.where.get("key") if isinstance(sample, SampleError) else sample["__key__"]
        key = None if key is None else self._stored(key)
        number = self._number_of(key)
        if number is not None:
            self._matched[number] = True
            if isinstance(sample, SampleError):
                self._findings.add(sample.located(path=name))
            else:
                self._compare_with(number, sample)
        elif self._dropped.has(name, key):
            self._tally.dropped += 1
        elif self._filtered.has(name, key):
            self._tally.filtered += 1
        elif isinstance(sample, SampleError):
            self._findings.add(sample.located(path=name))
        else:
            self._tally.missing.append((name, key))

    def _stored(self, key: str) -> str:
        """What a key of the source became."""
        return safe_key(key) if self._group.safe_keys else key

    def _number_of(self, key: str | None) -> int | None:
        """The first sample of the dataset with this key that nothing was compared with yet."""
        for number in self._keys.with_hash(key) if key is not None else ():
            if not self._matched[number] and self._keys.key(number) == key:
                return number
        return None

    def _compare_with(self, number: int, expected: Sample) -> None:
        place = self._keys.place(number)
        part = self._group.parts[place.part]
        path = part.dataset.shard_path(place.shard)
        try:
            found = _read(part, place)
            problems = list(self._differences(found, expected))
        except ShardkitError as error:
            problems = [error]
        for problem in problems:
            located = problem.located(path=path, position=place.position, key=expected["__key__"])
            part.findings.add(located, place.shard, place.position)

    def _differences(self, found: Sample, expected: Sample) -> Iterator[ShardkitError]:
        expected = {self._names.get(name, name): value for name, value in expected.items()}
        for name in self._schema:
            if name not in self._common:
                continue
            if name in found and name in expected:
                words = difference(found[name], expected[name])
                if words is None or self._was_encoded(name, found[name], expected[name]):
                    continue
                yield SampleError(
                    "a value is not that of the source", field=name, expected=words[0],
                    found=words[1],
                )  # fmt: skip
            elif name in found or name in expected:
                lacks = "dataset" if name in expected else "source"
                yield SampleError(f"a value is not in the {lacks}", field=name)

    def _was_encoded(self, name: str, found: Any, expected: Any) -> bool:
        """Whether the format cannot hold this image and holds what it makes of it."""
        kind = self._schema[name]
        if not isinstance(kind, Image) or not isinstance(expected, bytes):
            return False
        try:
            same = bool(self._format.carried(kind, expected) == found)
        except ShardkitError:  # it is no image at all
            return False
        self._tally.encoded += same
        return same

    def conclude(self) -> None:
        """What only all samples together tell: those that one side lacks."""
        notes, tally = self._findings.notes, self._tally
        if tally.encoded:
            notes.append(f"{counted(tally.encoded, 'image')} encoded anew, as this format demands")
        if tally.filtered:
            notes.append(
                f"{counted(tally.filtered, 'sample')} of the source left out, as asked for"
            )
        if tally.dropped:
            notes.append(
                f"{counted(tally.dropped, 'sample')} of the source dropped when the dataset was"
                " made, as errors.jsonl says"
            )
        self._conclude_missing()
        if self.complete:
            for number in np.flatnonzero(~self._matched).tolist():
                self._report_unknown(number)

    def _conclude_missing(self) -> None:
        missing = self._tally.missing
        count = f"{counted(len(missing), 'sample')} of the source not in the dataset"
        limit = self._limit()
        if not missing:
            return
        if not all(part.all_readable for part in self._group.parts):
            self._findings.notes.append(f"{count}, or in shards that cannot be read")
        elif any(part.manifest and not part.whole for part in self._group.parts):
            self._findings.notes.append(f"{count}: this is a part of it")
        elif limit is not None:
            self._findings.notes.append(f"{count}, which was made with a limit of {limit:,}")
        else:
            for name, key in missing:
                self._findings.add(
                    SampleError(
                        "a sample of the source is missing",
                        path=self._group.path,
                        key=key,
                        expected=f"the sample {name} of the source",
                        fix="convert again, if the source has grown since",
                    )
                )

    def _limit(self) -> int | None:
        """The limit that the dataset was made with, if it has as many samples as that allows."""
        available = sum(
            len(source) if isinstance(source, Source) else sys.maxsize
            for source in self._group.sources
        )
        for part in self._group.parts:
            if part.manifest is None:
                continue
            limit = part.manifest.options.get("limit")
            dropped = self._dropped.count + self._filtered.count
            if limit is not None and len(part.dataset) + dropped >= min(limit, available):
                return int(limit)
        return None

    def _report_unknown(self, number: int) -> None:
        place = self._keys.place(number)
        part = self._group.parts[place.part]
        problem = SampleError(
            "the source does not have this sample",
            path=part.dataset.shard_path(place.shard),
            position=place.position,
            key=self._keys.key(number),
            fix="convert again, if the source has changed since",
        )
        part.findings.add(problem, place.shard, place.position)


def _read(part: Part, place: Place) -> Sample:
    """A sample, with JSON as its text where the format keeps that."""
    reader = part.dataset.reader(place.shard)
    with part.dataset.explained(place.shard, place.position):
        return reader.sample(place.position, json_text=True)


class _Dropped:
    """The samples that a list says were dropped, by their names in the source and by their keys."""

    def __init__(self, parts: list[Part], name: str) -> None:
        self._names: set[object] = set()
        self.count = 0
        for part in parts:
            try:
                entries = listed(part, name)
            except ShardkitError:  # reported when it was checked
                continue
            self.count += len(entries)
            for entry in entries:
                self._names |= {entry.get("source"), entry.get("key")}
        self._names.discard(None)

    def has(self, name: str, key: str | None) -> bool:
        return name in self._names or key in self._names
