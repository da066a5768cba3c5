"""Compares a dataset with its source or another dataset, sample by sample, matched by key.

The source is read once, in its own order; the samples of the dataset are looked up by key.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from shardkit.conversion.plan import label_of_text
from shardkit.errors import DamagedError, SampleError, ShardkitError
from shardkit.formats import get_format
from shardkit.helpers.processors import processors
from shardkit.helpers.words import counted
from shardkit.metadata.manifest import ERRORS, FILTERED
from shardkit.preprocess.items import Filtered, Item, sample_of
from shardkit.preprocess.pipeline import Steps
from shardkit.sample import Sample, safe_key
from shardkit.schema import Audio, Image
from shardkit.sources.base import Source, Stream
from shardkit.verification.groups import Group
from shardkit.verification.matching import Keys, Location, difference
from shardkit.verification.shards import CheckedPart, keys_of, listed
from shardkit.verification.work import Findings, Meter


def compare(group: Group, findings: Findings, meter: Meter) -> None:
    """Compare all samples. Problems of stored samples go to the findings of their part."""
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
        except ShardkitError as error:  # such as a source shard that cannot be read
            findings.add(error)
            comparison.complete = False
    comparison.conclude()


# Differences that are expected, and only noted: the noun that is counted, and the rest of the note.
_NOTES = {
    "encoded": ("image", "re-encoded, as this format requires"),
    "filtered": ("sample", "of the source filtered out, as requested"),
    "dropped": ("sample", "of the source dropped when the dataset was made, as errors.jsonl says"),
}


class _Comparison:
    """The state of comparing one group."""

    def __init__(self, group: Group, findings: Findings) -> None:
        self._group = group
        self._findings = findings
        self._keys: Keys = keys_of(group.parts)
        self._format = get_format(group.parts[0].dataset.format)
        self._schema = group.parts[0].dataset.schema
        self._dropped = _Dropped(group.parts, ERRORS)
        self._filtered = _Dropped(group.parts, FILTERED)
        self._recipe = group.recipe
        self._manifest = next((part.manifest for part in group.parts if part.manifest), None)
        self._noted: Counter[str] = Counter()  # counts for the notes in _NOTES
        self._missing: list[tuple[str, str | None]] = []  # names in the source, and keys
        self._names: dict[str, str] = {}
        self._common: set[str] = set()
        self.complete = True  # the sources were read to their end

    def begin(self, source: Source | Stream) -> Steps:
        """Compare fields and classes; returns the conversion steps to apply to the source."""
        self._names = {old: new for old, new in self._recipe.rename.items() if old in source.schema}
        text = self._recipe.text
        only = "" if text.keep_fields else text.field or ""
        names = list(source.schema)
        if only in names:
            names = [n for n in names if n in (only, label_of_text(source, self._recipe))]
        theirs = [self._names.get(name, name) for name in names]
        self._common = self._schema.keys() & set(theirs)
        if self._recipe.transform is not None:
            self._note("made with a transform, which verify does not run: only keys are compared")
            self._common = set()
        else:
            self._compare_schemas(source, theirs)
        return self._steps(source)

    def begin_made(self) -> None:
        """Prepare to compare samples made by tasks, which have all fields of the dataset."""
        self._names = self._recipe.rename
        self._common = set(self._schema)

    def _steps(self, source: Source | Stream) -> Steps:
        """The steps of the conversion; fields that other versions of codecs change are ignored."""
        kinds = source.schema.values()
        if self._manifest is None or self._recipe.transform is not None:
            return Steps(None, None)
        images = audio = None
        changed: dict[str, tuple[Mapping[str, str], Collection[str]]] = {}
        if any(isinstance(kind, Image) for kind in kinds):
            from shardkit.preprocess.images import steps_for

            raw = self._format.raw_images
            images = steps_for(source.schema, self._recipe.image, None, raw, source)
            if images is not None:
                changed["images are"] = images.versions(), (*images.images, *images.masks)
        if any(isinstance(kind, Audio) for kind in kinds):
            from shardkit.preprocess.audio import AudioSteps

            audio = AudioSteps.of(source.schema, self._recipe.audio)
            if audio is not None:
                changed["audio is"] = audio.versions(), audio.fields
        for what, (versions, fields) in changed.items():
            if not versions.items() <= self._manifest.versions.items():
                self._note(f"made with other versions of the codecs: {what} not compared")
                self._common -= {self._names.get(name, name) for name in fields}
        return Steps(images, audio)

    def _note(self, words: str) -> None:
        if words not in self._findings.notes:
            self._findings.notes.append(words)

    def _compare_schemas(self, source: Source | Stream, theirs: Collection[str]) -> None:
        """Report fields that only one side has, and class names that differ."""
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
        dataset, rename = self._group.parts[0].dataset, self._recipe.rename
        named = dataset.class_names
        for old, expected in source.class_names.items():
            field = dataset.label if old == source.label else rename.get(old, old)
            if field in named and named[field] != expected:
                problem = DamagedError(
                    "the class names differ from those of the source",
                    path=path,
                    field=field,
                    expected=f"{list(expected)!r:.200}",
                    found=f"{list(named[field])!r:.200}",
                )
                self._findings.add(problem)

    def compare_item(self, item: Item) -> None:
        """Compare one sample of the source after its steps, or the reason why there is none."""
        read = item.read
        if not isinstance(read, Filtered):
            sample = read if isinstance(read, SampleError) else sample_of(read)
            self._compare_sample(item.name, sample)
        elif read.key is None or self._keys.unmatched(self._stored(read.key)) is None:
            self._noted["filtered"] += 1  # otherwise it stays unmatched, and is reported later

    def _compare_sample(self, name: str, sample: Sample | SampleError) -> None:
        key = sample.where.get("key") if isinstance(sample, SampleError) else sample["__key__"]
        key = None if key is None else self._stored(key)
        number = None if key is None else self._keys.unmatched(key)
        if number is not None:
            self._keys.matched[number] = True
            if isinstance(sample, SampleError):
                self._findings.add(sample.located(path=name))
            else:
                self._compare_with(number, sample)
        elif self._dropped.has(name, key):
            self._noted["dropped"] += 1
        elif self._filtered.has(name, key):
            self._noted["filtered"] += 1
        elif isinstance(sample, SampleError):
            self._findings.add(sample.located(path=name))
        else:
            self._missing.append((name, key))

    def _stored(self, key: str) -> str:
        """Return the key under which the dataset stores a key of the source."""
        return safe_key(key) if self._group.safe_keys else key

    def _compare_with(self, number: int, expected: Sample) -> None:
        location = self._keys.location(number)
        part = self._group.parts[location.part]
        try:
            found = _read(part, location)
            problems = list(self._differences(found, expected))
        except ShardkitError as error:
            problems = [error]
        for problem in problems:
            part.add(problem, location.shard, location.position, expected["__key__"])

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
                    "a value differs from the source", field=name, expected=words[0],
                    found=words[1],
                )  # fmt: skip
            elif name in found or name in expected:
                lacks = "dataset" if name in expected else "source"
                yield SampleError(f"a value is missing in the {lacks}", field=name)

    def _was_encoded(self, name: str, found: Any, expected: Any) -> bool:
        """Return whether the format cannot store this image as it is, and stores it re-encoded."""
        kind = self._schema[name]
        if not isinstance(kind, Image) or not isinstance(expected, bytes):
            return False
        try:
            same = bool(self._format.carried(kind, expected) == found)
        except ShardkitError:  # not an image
            return False
        self._noted["encoded"] += same
        return same

    def conclude(self) -> None:
        """Report the samples that only one side has, once all are compared."""
        for name, (noun, words) in _NOTES.items():
            if self._noted[name]:
                self._findings.notes.append(f"{counted(self._noted[name], noun)} {words}")
        self._conclude_missing()
        if self.complete:
            for number in np.flatnonzero(~self._keys.matched).tolist():
                location = self._keys.location(number)
                part, key = self._group.parts[location.part], self._keys.key(number)
                problem = SampleError(
                    "the source does not have this sample",
                    fix="convert again, if the source has changed since",
                )
                part.add(problem, location.shard, location.position, key)

    def _conclude_missing(self) -> None:
        missing = self._missing
        count = f"{counted(len(missing), 'sample')} of the source not in the dataset"
        limit = self._limit()
        if not missing:
            return
        if not all(part.all_readable for part in self._group.parts):
            self._findings.notes.append(f"{count}, or in shards that cannot be read")
        elif any(part.manifest and not part.whole for part in self._group.parts):
            self._findings.notes.append(f"{count}: only some of its shards were verified")
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
        """Return the limit that the dataset was made with, if it has that many samples."""
        available = sum(
            len(source) if isinstance(source, Source) else sys.maxsize
            for source in self._group.sources
        )
        limit, dropped = self._recipe.limit, self._dropped.count + self._filtered.count
        dropped -= sum(len(source.filtered) for source in self._group.sources)  # before the limit
        reached = any(
            limit is not None and len(part.dataset) + dropped >= min(limit, available)
            for part in self._group.parts
        )
        return limit if reached else None


def _read(part: CheckedPart, location: Location) -> Sample:
    """Read a sample, with JSON as its original text if the format stores it."""
    reader = part.dataset.reader(location.shard)
    with part.dataset.explained(location.shard, location.position):
        return reader.sample(location.position, json_text=True)


class _Dropped:
    """The entries in a list of dropped samples, by their names in the source and by their keys."""

    def __init__(self, parts: list[CheckedPart], name: str) -> None:
        self._names: set[object] = set()
        self.count = 0
        for part in parts:
            try:
                entries = listed(part, name)
            except ShardkitError:  # already reported, when the list was checked
                continue
            self.count += len(entries)
            for entry in entries:
                self._names |= {entry.get("source"), entry.get("key")}
        self._names.discard(None)

    def has(self, name: str, key: str | None) -> bool:
        return name in self._names or key in self._names
