"""Several sources as one: the samples of one source after the other, with a common schema.

Keys, and the names of samples in error lists, are prefixed with the name of their source, which
makes them unique. Classes of the same name are merged, and labels are renumbered where needed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

import numpy as np
import xxhash

from shardkit.dataset.concatenated import merged_classes, renumber
from shardkit.errors import SampleError, ShardkitError, UsageError, drop_option
from shardkit.helpers.indices import ascending, digest
from shardkit.helpers.mapped import Sizes, joined
from shardkit.metadata.recipe import Recipe
from shardkit.metadata.shared_schema import other_numbers, shared_schema
from shardkit.metadata.splits import KINDS, in_order
from shardkit.options import Selection
from shardkit.sample import Sample, safe_key
from shardkit.schema import Array, Schema
from shardkit.sources.base import Document, Source, SourceInfo, Stream
from shardkit.sources.subset import Subset

if TYPE_CHECKING:
    from shardkit.sources.base import Indices

_Any: TypeAlias = "Source | Stream"


@dataclass(frozen=True)
class Member:
    """One of the united sources, with the changes applied to its samples."""

    name: str
    source: Any  # a Source or Stream
    numbers: Mapping[str, Sequence[int]]  # field -> old class number -> new class number
    safe: bool  # whether keys are made safe

    def key(self, key: str) -> str:
        if self.safe:
            own = key if self.source.safe_keys else safe_key(key)
            return f"{safe_key(self.name)}/{own}"
        return f"{self.name}/{key}"

    def own_key(self, key: str) -> str:
        """Return the key that a sample has in its source, from its key here."""
        own = key[len(self.key("")) :]
        return unquote(own) if self.safe and not self.source.safe_keys else own

    def original(self, path: str | None) -> str | None:
        return None if path is None else f"{self.name}/{path}"

    def sample(self, sample: Sample) -> Sample:
        """Replace key and labels of a sample of the source by those of the united source."""
        sample = renumber(sample, self.numbers, self.source.class_names)
        sample["__key__"] = self.key(sample["__key__"])
        return sample

    def error(self, error: SampleError) -> SampleError:
        if isinstance(key := error.where.get("key"), str):
            error.where["key"] = self.key(key)
        return error

    def document(self, document: Document) -> Document:
        try:
            if isinstance(document.sample, SampleError):
                raise document.sample
            read: Sample | SampleError = self.sample(document.sample)
        except SampleError as error:
            read = self.error(error)
        return document._replace(
            name=f"{self.name}/{document.name}",
            sample=read,
            original=self.original(document.original),
        )


class _Several(SourceInfo):
    """Base class of `United` and `UnitedStream`."""

    def __init__(self, members: Sequence[Member], schema: Schema) -> None:
        super().__init__()
        self.members = members
        self.schema = schema
        sources = [member.source for member in members]
        self.guessed = frozenset(name for source in sources for name in source.guessed)
        self.all_known = all(source.all_known for source in sources)
        self.reads_text = any(source.reads_text for source in sources)
        self.encodes_images = any(source.encodes_images for source in sources)
        self.unique_keys = all(source.unique_keys for source in sources)
        self.safe_keys = all(member.safe for member in members)
        self.requests = max(getattr(source, "requests", 0) for source in sources)
        self._starts = [*accumulate(map(len, sources), initial=0)]

    def __len__(self) -> int:
        return self._starts[-1]

    def narrow(self, selection: Selection) -> None:
        for member in self.members:
            member.source.narrow(selection)
            if not member.source.schema and not selection.partial:
                raise UsageError(
                    "no field of one of the sources would be stored",
                    found=member.name,
                    expected="some of " + ", ".join(self.schema),
                    fix="omit that source, or select other fields",
                )
        super().narrow(selection)

    def sizes(self) -> Sizes:
        return joined([member.source.sizes() for member in self.members])

    def fingerprint(self) -> dict[str, str] | None:
        every = [(member.name, member.source.fingerprint()) for member in self.members]
        if any(hashes is None for _, hashes in every):
            return None
        return {
            kind: xxhash.xxh3_128_hexdigest(
                json.dumps([(name, hashes.get(kind)) for name, hashes in every]).encode()
            )
            for kind in sorted({kind for _, hashes in every for kind in hashes})
        }

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        found = [m.source.tokenizer() for m in self.members if _may_hold_tokens(m.source)]
        return found[0] if found and all(one == found[0] for one in found) else ({}, {})

    def left_out(self) -> Mapping[str, int]:
        return sum((Counter(member.source.left_out()) for member in self.members), Counter())

    def _chosen(self, indices: Indices) -> tuple[list[Member], Indices]:
        """Return the members with only these samples, and the position of each sample in them."""
        member_of = np.searchsorted(self._starts, indices, side="right") - 1
        order = np.argsort(member_of, kind="stable")
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        numbers, counts = np.unique(member_of, return_counts=True)
        chosen = []
        for number, own in zip(numbers, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            source = self.members[number].source.select(indices[own] - self._starts[number])
            chosen.append(replace(self.members[number], source=source))
        return chosen, position


class United(_Several, Source):
    """United sources whose samples can be read in any order."""

    def __getitem__(self, index: int) -> Sample:
        member, position = self._at(index)
        try:
            return member.sample(member.source[position])
        except SampleError as error:
            raise member.error(error) from error.__cause__

    def _at(self, index: int) -> tuple[Member, int]:
        number = bisect_right(self._starts, index) - 1
        return self.members[number], index - self._starts[number]

    def select(self, indices: Indices) -> Source:
        members, positions = self._chosen(indices)
        found = United(members, self.schema)
        return found if ascending(positions) else Subset(found, positions)

    def all_keys(self) -> Sequence[str]:
        return [member.key(key) for member in self.members for key in member.source.all_keys()]

    def skimmed(self) -> United:
        members = [replace(member, source=member.source.skimmed()) for member in self.members]
        return United(members, self.schema)

    def check_unchanged(self) -> None:
        for member in self.members:
            member.source.check_unchanged()

    def key(self, index: int) -> str | None:
        member, position = self._at(index)
        key = member.source.key(position)
        return None if key is None else member.key(key)

    def name(self, index: int) -> str:
        member, position = self._at(index)
        return f"{member.name}/{member.source.name(position)}"

    def original(self, index: int, key: str) -> str | None:
        member, position = self._at(index)
        return member.original(member.source.original(position, member.own_key(key)))


class UnitedStream(_Several, Stream):
    """United sources, at least one of which is a stream.

    Each sample of a member that is not a stream counts as a range of its own.
    """

    def __init__(self, members: Sequence[Member], schema: Schema) -> None:
        super().__init__(members, schema)
        also = {m.name: set(getattr(m.source, "also", ())) for m in members}
        stored = {n for m in members for n in m.source.schema if n not in also[m.name]}
        self.also = set().union(*also.values()) - stored

    def select(self, ranges: Indices) -> UnitedStream:
        return UnitedStream(self._chosen(ranges)[0], self.schema)

    def documents(self) -> Iterator[Document]:
        for member in self.members:
            for document in member.source.documents():
                yield member.document(document)
            if isinstance(member.source, Source):
                member.source.check_unchanged()


# --- uniting -------------------------------------------------------------------------------------


def unite(opened: Mapping[str, Mapping[str, _Any]], recipe: Recipe) -> dict[str, _Any]:
    """Unite sources, given by name and split; returns the united source of each split.

    Raises UsageError if only some have splits, or if their tokens come from different tokenizers.
    Fields that differ in type, or in whether classes have names, are `others` of the result.
    """
    splits = _splits(opened)
    # The same for all splits.
    classes, errors = merged_classes(pair for split in splits.values() for pair in split.items())
    for field, error in errors.items():
        way = error.fix or "name the classes in all sources"
        error.fix = f"{way}, or convert without: {drop_option(field)}"
    united: dict[str, _Any] = {}
    for split, sources in splits.items():
        members = [
            Member(name, source, other_numbers(source.class_names, classes), recipe.safe_keys)
            for name, source in sources.items()
        ]
        layouts = [{"schema": source.schema.to_json()} for source in sources.values()]
        counts = [len(source) for source in sources.values()]
        schema, wrong = shared_schema(layouts, counts, list(sources), "source")
        wrong = {**errors, **wrong}
        schema = Schema({name: kind for name, kind in schema.items() if name not in wrong})
        streams = any(isinstance(source, Stream) for source in sources.values())
        one: _Any = UnitedStream(members, schema) if streams else United(members, schema)
        _describe(one, sources, classes, wrong)
        united[split] = one
    return united


class View(Subset):
    """The samples at `indices` of a united source, for a view of concatenated datasets."""

    def fingerprint(self) -> dict[str, str] | None:
        found = super().fingerprint()
        view = digest(self._indices)
        return found and {
            kind: xxhash.xxh3_128_hexdigest(f"{hashed} {view}".encode())
            for kind, hashed in found.items()
        }


def _splits(opened: Mapping[str, Mapping[str, _Any]]) -> dict[str, dict[str, _Any]]:
    """Return the sources of each split, by source name."""
    without = [name for name, splits in opened.items() if list(splits) == [""]]
    if without and len(without) < len(opened):
        others = next(name for name in opened if name not in without)
        raise UsageError(
            "sources with splits cannot be united with sources without",
            expected="splits in all sources, or in none",
            found=f"{', '.join(opened[others])} in {others}, none in {without[0]}",
            fix="give one split of each, or convert all as one dataset with --split none",
        )
    every = [[*splits] for splits in opened.values()]
    # "val" in one source and "validation" in another are the same split, unless one has both.
    alike = all(len({KINDS.get(n, n) for n in names}) == len(names) for names in every)
    called: dict[str, str] = {}
    found: dict[str, dict[str, _Any]] = {}
    for source, splits in opened.items():
        for name, one in splits.items():
            split = called.setdefault(KINDS.get(name, name) if alike else name, name)
            found.setdefault(split, {})[source] = one
    return {split: found[split] for split in in_order(found)}


def _describe(
    one: _Any,
    sources: Mapping[str, _Any],
    classes: Mapping[str, tuple[str, ...]],
    wrong: Mapping[str, ShardkitError],
) -> None:
    """Set the description of a united source from the sources of its split."""
    one.class_names = {field: names for field, names in classes.items() if field in one.schema}
    others: dict[str, ShardkitError | None] = {}
    notes = [f"keys begin with the name of their source: {', '.join(sources)}"]
    for field, kind in one.schema.items():
        here = [s.schema[field] for s in sources.values() if field in s.schema]
        kinds = dict.fromkeys(str(replace(kind, optional=False)) for kind in here)
        if len(kinds) > 1:
            common = replace(kind, optional=False)
            notes.append(f"the field {field!r} is {common}, from {', '.join(kinds)}")
    for name, source in sources.items():
        others |= {n: e for n, e in source.others.items() if e is not None or n not in one.schema}
        notes += [f"{name}: {note}" for note in source.notes]
    if unknown := _without_tokenizer(sources):
        notes.append(f"the tokenizer of {', '.join(unknown)} is unknown, so no tokenizer is stored")
    one.others = {**others, **wrong}
    one.notes = notes
    one.problems = [problem for source in sources.values() for problem in source.problems]
    one.ignored = dict(sum((Counter(s.ignored) for s in sources.values()), Counter()))


def _may_hold_tokens(source: _Any) -> bool:
    return any(isinstance(kind, Array) for kind in source.schema.values())


def _without_tokenizer(sources: Mapping[str, _Any]) -> list[str]:
    """Return the sources whose tokenizer is unknown, if others have one, which must be the same."""
    made = {name: s.tokenizer()[0] for name, s in sources.items() if _may_hold_tokens(s)}
    known = {name: entry for name, entry in made.items() if entry}
    different = next((n for n, entry in known.items() if entry != next(iter(known.values()))), None)
    if different is not None:
        raise UsageError(
            "the tokens of the sources were made by different tokenizers",
            found=f"{next(iter(known))} and {different}",
            fix="convert the text of both again, with the same tokenizer",
        )
    return [name for name in made if name not in known] if known else []
