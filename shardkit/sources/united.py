"""Several sources as one: the samples of one source after the other, with a common schema.

Keys, and the names of samples in error lists, are prefixed with the name of their source, which
makes them unique. Classes of the same name are merged, and labels are renumbered where needed.
"""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

import numpy as np
import xxhash

from shardkit.errors import SampleError, ShardkitError, UsageError, drop_option
from shardkit.helpers.indices import array, compact, digest
from shardkit.helpers.mapped import Sizes, joined
from shardkit.metadata.recipe import Recipe
from shardkit.metadata.shared_schema import other_numbers, renumbered, shared_schema, united_classes
from shardkit.metadata.splits import KINDS, in_order
from shardkit.options import Selection
from shardkit.sample import Sample, safe_key
from shardkit.schema import Array, Schema, check_label
from shardkit.sources.base import Document, Source, SourceInfo, Stream

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.sources.base import Indices

_Any: TypeAlias = "Source | Stream"


@dataclass(frozen=True)
class Member:
    """One of the united sources, with the changes applied to its samples."""

    name: str
    source: _Any
    numbers: Mapping[str, Sequence[int]]  # field -> old class number -> new class number
    safe: bool  # whether keys are made safe

    def key(self, key: str) -> str:
        if self.safe:
            own = key if self.source.safe_keys else safe_key(key)
            return f"{safe_key(self.name)}/{own}"
        return f"{self.name}/{key}"

    def own_key(self, key: str) -> str:
        """The key that a sample has in its source, from its key here."""
        own = key[len(self.key("")) :]
        return unquote(own) if self.safe and not self.source.safe_keys else own

    def original(self, path: str | None) -> str | None:
        return None if path is None else f"{self.name}/{path}"

    def sample(self, sample: Sample) -> Sample:
        """Replace key and labels of a sample of the source by those of the united source."""
        for field, numbers in self.numbers.items():
            if field in sample:
                check_label(sample, field, self.source.class_names[field])
                sample[field] = renumbered(sample[field], numbers)
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

    view = ""  # digest that distinguishes views of the same sources

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
        names = {name for _, hashes in every for name in hashes or ()}
        if any(hashes is None for _, hashes in every):
            return None
        return {
            kind: xxhash.xxh3_128_hexdigest(
                (
                    json.dumps([(name, (hashes or {}).get(kind)) for name, hashes in every])
                    + self.view
                ).encode()
            )
            for kind in sorted(names)
        }

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        found = [m.source.tokenizer() for m in self.members if _may_hold_tokens(m.source)]
        return found[0] if found and all(one == found[0] for one in found) else ({}, {})

    def _starts(self) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *(len(member.source) for member in self.members)])

    def _chosen(self, indices: Indices) -> tuple[list[Member], Indices]:
        """The members with only these samples, and the position of each sample in them."""
        starts = self._starts()
        member_of = np.searchsorted(starts, indices, side="right") - 1
        order = np.argsort(member_of, kind="stable")
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        numbers, counts = np.unique(member_of, return_counts=True)
        chosen = []
        for number, own in zip(numbers, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            source = self.members[number].source.select(indices[own] - starts[number])
            chosen.append(replace(self.members[number], source=source))
        return chosen, position


class United(_Several, Source):
    """United sources whose samples can be read in any order."""

    def __init__(
        self, members: Sequence[Member], schema: Schema, indices: Indices | None = None
    ) -> None:
        super().__init__(members, schema)
        self._indices = indices  # position of each sample in the members
        self._ends = self._starts()[1:].tolist()

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._indices is None else len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        member, source, position = self._at(index)
        try:
            return member.sample(source[position])
        except SampleError as error:
            raise member.error(error) from error.__cause__

    def _at(self, index: int) -> tuple[Member, Source, int]:
        if self._indices is not None:
            index = int(self._indices[index])
        member = self.members[number := bisect_right(self._ends, index)]
        assert isinstance(member.source, Source)
        return member, member.source, index - self._ends[number] + len(member.source)

    def sizes(self) -> Sizes:
        sizes = super().sizes()
        return sizes if self._indices is None else sizes[self._indices]

    def select(self, indices: Indices) -> United:
        if self._indices is not None:
            indices = self._indices[indices]
        members, positions = self._chosen(indices)
        order = compact(positions)  # not needed if samples are in order
        natural = isinstance(order, range) and len(order) > 0 and order[0] == 0
        return United(members, self.schema, None if natural else positions)

    def all_keys(self) -> Sequence[str]:
        sources = [(m, m.source) for m in self.members if isinstance(m.source, Source)]
        keys = [member.key(key) for member, source in sources for key in source.all_keys()]
        return keys if self._indices is None else [keys[n] for n in self._indices.tolist()]

    def skimmed(self) -> United:
        sources = [(m, m.source) for m in self.members if isinstance(m.source, Source)]
        members = [replace(member, source=source.skimmed()) for member, source in sources]
        return United(members, self.schema, self._indices)

    def check_unchanged(self) -> None:
        for member in self.members:
            assert isinstance(member.source, Source)
            member.source.check_unchanged()

    def key(self, index: int) -> str | None:
        member, source, position = self._at(index)
        key = source.key(position)
        return None if key is None else member.key(key)

    def name(self, index: int) -> str:
        member, source, position = self._at(index)
        return f"{member.name}/{source.name(position)}"

    def original(self, index: int, key: str) -> str | None:
        member, source, position = self._at(index)
        return member.original(source.original(position, member.own_key(key)))


class UnitedStream(_Several, Stream):
    """United sources, at least one of which is a stream.

    Each sample of a member that is not a stream counts as a range of its own.
    """

    def __init__(self, members: Sequence[Member], schema: Schema) -> None:
        super().__init__(members, schema)
        streams = [m.source for m in members if isinstance(m.source, Stream)]
        stored = {n for m in members for n in m.source.schema if n not in _also(m.source)}
        self.also = {n for stream in streams for n in stream.also if n not in stored}

    def __len__(self) -> int:
        return int(self._starts()[-1])

    def select(self, ranges: Indices) -> UnitedStream:
        return UnitedStream(self._chosen(ranges)[0], self.schema)

    def documents(self) -> Iterator[Document]:
        for member in self.members:
            for document in member.source.documents():
                yield member.document(document)
            if isinstance(member.source, Source):
                member.source.check_unchanged()


def _also(source: _Any) -> Collection[str]:
    return source.also if isinstance(source, Stream) else ()


# --- uniting -------------------------------------------------------------------------------------


def unite(opened: Mapping[str, Mapping[str, _Any]], recipe: Recipe) -> dict[str, _Any]:
    """Unite sources, given by name and split; returns the united source of each split.

    Raises UsageError if only some have splits, or if their tokens come from different tokenizers.
    Fields that differ in type, or in whether classes have names, are `others` of the result.
    """
    splits = _splits(opened)
    classes, errors = _classes(splits)
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


def view_of(united: Source, indices: range | Indices) -> United:
    """The samples of a united source at `indices`, for a view of concatenated datasets."""
    assert isinstance(united, United)
    view = copy.copy(united)
    view.members, view._indices = united._chosen(array(indices))
    view._ends, view.view = view._starts()[1:].tolist(), digest(indices)
    return view


def _splits(opened: Mapping[str, Mapping[str, _Any]]) -> dict[str, dict[str, _Any]]:
    """The sources of each split, by source name."""
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


def _classes(
    splits: Mapping[str, Mapping[str, _Any]],
) -> tuple[dict[str, tuple[str, ...]], dict[str, ShardkitError]]:
    """The class names by field, the same for all splits; and the errors of conflicting fields."""
    sources = [(name, one) for split in splits.values() for name, one in split.items() if len(one)]
    found: dict[str, tuple[str, ...]] = {}
    errors: dict[str, ShardkitError] = {}
    for field in dict.fromkeys(field for _, source in sources for field in source.class_names):
        tables = [(n, s.class_names.get(field)) for n, s in sources if field in s.schema]
        names, error = united_classes(tables)
        if names is not None:
            found[field] = names
        elif error is not None:
            error.fix = f"name the classes in all sources, or convert without: {drop_option(field)}"
            errors[field] = error
    return found, errors


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
            notes.append(
                f"the field {field!r} is {replace(kind, optional=False)}, from {', '.join(kinds)}"
            )
    for name, source in sources.items():
        others |= {n: e for n, e in source.others.items() if e is not None or n not in one.schema}
        notes += [f"{name}: {note}" for note in source.notes]
    one.others = {**others, **wrong}
    one.notes = notes
    one.problems = [problem for source in sources.values() for problem in source.problems]
    one.ignored = dict(sum((Counter(s.ignored) for s in sources.values()), Counter()))
    _check_tokenizers(one, sources)


def _may_hold_tokens(source: _Any) -> bool:
    return any(isinstance(kind, Array) for kind in source.schema.values())


def _check_tokenizers(one: _Any, sources: Mapping[str, _Any]) -> None:
    made = {name: s.tokenizer()[0] for name, s in sources.items() if _may_hold_tokens(s)}
    known = {name: entry for name, entry in made.items() if entry}
    different = next((n for n, entry in known.items() if entry != next(iter(known.values()))), None)
    if different is not None:
        raise UsageError(
            "the tokens of the sources were made by different tokenizers",
            found=f"{next(iter(known))} and {different}",
            fix="convert the text of both again, with the same tokenizer",
        )
    if known and len(known) < len(made):
        some = ", ".join(name for name in made if name not in known)
        one.notes = [
            *one.notes,
            f"the tokenizer of {some} is unknown, so no tokenizer is stored",
        ]
