"""Subsets of a source, selected by class, by key, by a condition, or at random.

Samples of a `Source` are selected while planning, reading only the fields that are needed; those of
a stream while it is read. Excluded samples are counted but not listed, as the recipe defines them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from shardkit.dataset.conditions import Condition, condition, value_of
from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError, near
from shardkit.helpers.indices import array, pick
from shardkit.helpers.mapped import Sizes
from shardkit.metadata.recipe import Recipe
from shardkit.metadata.splits import in_order
from shardkit.options import Selection, is_split
from shardkit.sample import Sample
from shardkit.schema import Encoded, Int, Schema
from shardkit.sources.base import Document, Indices, Source, SourceInfo, SourceWrapper, Stream
from shardkit.sources.key_lists import KeyList, check_found

_MOST_SPLITS = 100  # that the values of a column make


def chance(key: str, seed: int, what: str) -> float:
    """A pseudorandom number in [0, 1] from key and seed, independent for each purpose `what`."""
    data = f"{what}\0{key}".encode("utf-8", "surrogateescape")
    return xxhash.xxh3_64_intdigest(data, seed) / 2**64


# --- filters --------------------------------------------------------------------------------------


class Filter(Protocol):
    """Selects samples by some of their fields. Pickled for the tasks of a stream."""

    @property
    def fields(self) -> tuple[str, ...]: ...

    def reason(self, sample: Sample) -> str:
        """Why a sample is excluded, worded to follow a number; "" if it is kept."""


def judged(filters: Iterable[Filter], document: Document) -> tuple[Sample, str]:
    """The sample, and the first reason to exclude it, or ""; raises the error of reading it."""
    sample = document.sample
    if isinstance(sample, SampleError):
        raise sample
    return sample, next(filter(None, (one.reason(sample) for one in filters)), "")


@dataclass(frozen=True)
class OfClasses:
    """Samples of some classes. Those without a class are kept if `unlabelled`."""

    label: str
    numbers: Mapping[int, int] | None  # of the classes that are kept: old -> new; None: no labels
    unlabelled: bool

    @property
    def fields(self) -> tuple[str, ...]:
        return () if self.numbers is None else (self.label,)

    def reason(self, sample: Sample) -> str:
        if self.numbers is None:
            return "samples without a label"
        label = sample.get(self.label, -1)
        stays = self.unlabelled if label == -1 else label in self.numbers
        return "" if stays else "samples of other classes"


@dataclass(frozen=True)
class OfKeys:
    """Samples whose key is in one of the lists."""

    lists: tuple[KeyList, ...]
    fields = ()

    def reason(self, sample: Sample) -> str:
        named = any(sample["__key__"] in keys for keys in self.lists)
        return "" if named else "samples that are not among the keys"


@dataclass(frozen=True)
class Where:
    """Samples that satisfy a condition."""

    condition: Condition

    @property
    def fields(self) -> tuple[str, ...]:
        return self.condition.fields

    def reason(self, sample: Sample) -> str:
        found = self.condition(sample)
        if found is None:
            return "samples without a value that --where asks for"
        return "" if found else "samples that --where leaves out"


@dataclass(frozen=True)
class RandomShare:
    """A random share of all samples. Adding samples does not change the choice among the others."""

    share: float
    seed: int
    fields = ()

    def reason(self, sample: Sample) -> str:
        drawn = chance(sample["__key__"], self.seed, "sample") < self.share
        return "" if drawn else "samples that --sample leaves out"


# --- sources of the selected samples --------------------------------------------------------------


class _Chosen(SourceInfo):
    """Base of subsets: the description of the whole source, with the remaining classes."""

    _classes: OfClasses | None

    def _describe(self, whole: Source | Stream, classes: OfClasses | None) -> None:
        self.describe_as(whole)
        self.ignored = dict(whole.ignored)
        self._classes = classes
        numbers = None if classes is None else classes.numbers
        if classes is not None and numbers is not None and classes.label in self.class_names:
            names = self.class_names[classes.label]
            left = tuple(names[number] for number in numbers)
            self.class_names = {**self.class_names, classes.label: left}

    def _renumbered(self, sample: Sample) -> Sample:
        classes = self._classes
        if classes is None or classes.numbers is None or sample.get(classes.label, -1) == -1:
            return sample
        return {**sample, classes.label: classes.numbers[sample[classes.label]]}


class Subset(_Chosen, SourceWrapper):
    """The samples at `indices` of a whole source."""

    def __init__(
        self, whole: Source, indices: range | Indices, classes: OfClasses | None = None
    ) -> None:
        super().__init__(whole)
        self._describe(whole, classes)
        self._indices = indices
        # The value of each sample for the fields that samples are split by.
        self.values: dict[str, Sequence[Any]] = {}

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        return self._renumbered(self._whole[self._at(index)])

    def _at(self, index: int) -> int:
        return int(self._indices[index])

    def narrow(self, selection: Selection) -> None:
        super().narrow(selection)
        if self._classes is not None and self._classes.label not in self.schema:
            self._classes = None

    def sizes(self) -> Sizes:
        return self._whole.sizes()[array(self._indices)]

    def select(self, indices: Indices) -> Source:
        part = self._whole.select(array(pick(self._indices, indices)))
        return part if self._classes is None else Subset(part, range(len(part)), self._classes)

    def all_keys(self) -> Sequence[str]:
        every = self._whole.all_keys()
        return [every[index] for index in array(self._indices).tolist()]


class SubsetStream(_Chosen, Stream):
    """The documents of a stream, with those that are not selected marked as ignored.

    `also` are fields that are read only for filtering: `narrow` does not reach the whole stream.
    """

    def __init__(
        self,
        whole: Stream,
        filters: Sequence[Filter],
        classes: OfClasses | None = None,
        also: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._describe(whole, classes)
        self._whole, self._filters, self._also = whole, filters, also
        self.schema = Schema({n: kind for n, kind in whole.schema.items() if n not in also})
        self.others = {**whole.others, **dict.fromkeys(also)}

    def __len__(self) -> int:
        return len(self._whole)

    def sizes(self) -> Sizes:
        return self._whole.sizes()

    def select(self, ranges: Indices) -> SubsetStream:
        part = SubsetStream(self._whole.select(ranges), self._filters, self._classes, self._also)
        part.selection, part.schema = self.selection, self.schema
        part.class_names = dict(self.class_names)
        return part

    def fingerprint(self) -> dict[str, str] | None:
        return self._whole.fingerprint()

    def documents(self) -> Iterator[Document]:
        return map(self._judged, self._whole.documents())

    def _judged(self, document: Document) -> Document:
        try:
            sample, reason = judged(self._filters, document)
        except SampleError as error:
            return document._replace(sample=error)
        if reason:
            return document._replace(left_out=reason)
        stored = {"__key__", *self.schema}
        more = [n for n in self._also if n in sample and n not in stored and self.selection.has(n)]
        return document._replace(
            sample={n: v for n, v in self._renumbered(sample).items() if n in stored},
            ignored=(*document.ignored, *more),
        )


def choose(
    sources: dict[str, Source | Stream],
    recipe: Recipe,
    lists: Mapping[str, KeyList],
    strict: bool = True,
) -> dict[str, Source | Stream]:
    """Select the samples that a recipe asks for from each of `sources`, the splits of one source.

    Raises UsageError if options do not apply to the source, SourceError if no sample is left.
    """
    named = {*recipe.include_class, *recipe.exclude_class}
    known = dict.fromkeys(name for source in sources.values() for name in source.classes or ())
    for name in sorted(named - known.keys()) if strict else ():
        raise UsageError(
            f"there is no class {name!r}" if known else "the source has no class names",
            expected=near(name, known) if known else None,
            fix=None if known else "use --where 'label == 3' to select by number",
        )
    needs_all = recipe.dedup or lists or recipe.stratify or recipe.group
    if needs_all:
        sources = {n: _by_number(source) for n, source in sources.items()}
    if needs_all and any(isinstance(source, Stream) for source in sources.values()):
        raise UsageError(
            "--dedup, key lists, strata and groups do not work for a stream of documents, which"
            " are known only once read",
            fix="convert them without these options first, then convert that dataset with them",
        )
    if lists and strict:
        check_found(lists.values(), [s for s in sources.values() if isinstance(s, Source)])
    found = {name: _chosen(source, recipe, lists) for name, source in sources.items()}
    if not any(map(len, found.values())):
        bad = [problem for source in found.values() for problem in source.problems]
        if bad and recipe.on_error == "fail":
            raise bad[0]
        raise nothing_left(sum((Counter(s.ignored) for s in found.values()), Counter()))
    return found


def by_column(source: Source | Stream, name: str) -> dict[str, Subset]:
    """Divide a source by the values of a field, each of which is the name of a split.

    Raises UsageError for a stream, and for values that cannot name splits.
    """
    whole = _by_number(source)
    if isinstance(whole, Stream):
        raise UsageError(
            "--split-column does not work for documents, which are known only once they are read",
            fix="convert them without it first, then convert that dataset with it",
        )
    values = _values(whole, np.arange(len(whole)), name)
    members: dict[str, list[int]] = {}
    folders: dict[str, str] = {}  # file systems may ignore case
    for number, value in enumerate(values):
        split = str(value)
        good = value is not None and is_split(split) and folders.setdefault(split.lower(), split)
        if good != split or len(folders) > _MOST_SPLITS:
            raise UsageError(
                f"the values of {name!r} cannot be the names of splits",
                key=whole.all_keys()[number],
                expected=f"in each sample, one of at most {_MOST_SPLITS:,} names or numbers, which"
                " differ not only in case",
                found="no value" if value is None else repr(value),
                fix=f"correct the values, or leave such samples out: --where '{name} is not null'",
            )
        members.setdefault(split, []).append(number)
    found = {split: Subset(whole, np.array(members[split])) for split in in_order(sorted(members))}
    for other in [*found.values()][1:]:  # what was found while planning is listed once
        other.problems, other.ignored, other.notes, other.filtered = (), {}, (), ()
    return found


def nothing_left(left_out: Mapping[str, int]) -> SourceError:
    reasons = (f"{count:,} {why}" for why, count in left_out.items() if why.startswith("samples "))
    return SourceError(
        "no sample of the source is left",
        found=", ".join(reasons),
        fix="change the selection by --where, --include-class, --keys or --sample",
    )


def _chosen(
    source: Source | Stream, recipe: Recipe, lists: Mapping[str, KeyList]
) -> Source | Stream:
    classes = _of_classes(source, recipe)
    filters: list[Filter] = [] if classes is None else [classes]
    if lists:
        filters.append(OfKeys(tuple(lists.values())))
    if recipe.where is not None:
        where = condition(recipe.where, source.schema, source.class_names)
        filters += map(Where, where.conjuncts or [where])  # each may need fewer fields
    drawn = [] if recipe.sample is None else [RandomShare(recipe.sample, recipe.seed or 0)]
    if isinstance(source, Stream):
        filters += drawn
        return SubsetStream(source, filters, classes, source.also)
    left_out: Counter[str] = Counter()
    problems: list[ShardkitError] = []
    indices = np.arange(len(source))
    encoded = {name for name, kind in source.schema.items() if isinstance(kind, Encoded)}
    for images in (False, True):  # images are read only for the samples still selected
        some = [one for one in filters if encoded.isdisjoint(one.fields) != images]
        if some:
            indices = _filtered(source, indices, some, left_out, problems)
    copies: dict[int, dict[str, str]] = {}
    if recipe.dedup is not None:
        from shardkit.sources.duplicates import duplicates  # decodes images

        copies = duplicates(source.select(indices), recipe.dedup, recipe.selection)
        indices = np.delete(indices, list(copies))
    if drawn:
        indices = _filtered(source, indices, drawn, left_out, problems)
    subset = Subset(source, indices, classes)
    subset.ignored.update(left_out)
    subset.problems = (*source.problems, *problems)
    subset.filtered = tuple(copies.values())
    subset.key_lists = {name: keys.hashes for name, keys in lists.items()}
    for name in filter(None, (recipe.stratify, recipe.group)):
        subset.values[name] = _values(source, indices, name)
    return subset


def _by_number(source: Source | Stream) -> Source | Stream:
    found = source.by_number() if isinstance(source, Stream) else source
    return source if found is None else found


def _of_classes(source: Source | Stream, recipe: Recipe) -> OfClasses | None:
    included, excluded = recipe.include_class, recipe.exclude_class
    if source.classes is None:  # a split without labels, beside others that have them
        return OfClasses(source.label, None, unlabelled=False) if included else None
    if not (included or excluded):
        return None
    if not isinstance(source.schema[source.label], Int):
        raise UsageError(
            "samples can have several classes, so they cannot be selected by a single one",
            field=source.label,
            fix="select by one of them: --where '\"NAME\" in FIELD'",
        )
    names = enumerate(source.classes)
    stay = [n for n, name in names if (name in included if included else name not in excluded)]
    numbers = {old: new for new, old in enumerate(stay)}
    return OfClasses(source.label, numbers, unlabelled=not included)


def _read(
    source: Source, indices: Indices, fields: Iterable[str]
) -> Iterator[tuple[int, Document]]:
    """Read some samples with only some fields; images may be only their headers."""
    part = source.select(indices).skimmed()
    part.narrow(Selection(tuple(dict.fromkeys(fields)), partial=True))
    yield from zip(indices.tolist(), part.documents(), strict=True)


def _filtered(
    source: Source,
    indices: Indices,
    filters: Sequence[Filter],
    left_out: Counter[str],
    problems: list[ShardkitError],
) -> Indices:
    """Return the indices of the samples that pass all filters."""
    kept = []
    for index, document in _read(source, indices, (n for one in filters for n in one.fields)):
        try:
            _, reason = judged(filters, document)
        except SampleError as error:  # unknown whether it would be selected
            problems.append(error.located(path=document.name))
            continue
        if reason:
            left_out[reason] += 1
        else:
            kept.append(index)
    return np.array(kept, np.int64)


def _values(source: Source, indices: Indices, name: str) -> list[Any]:
    """The value of a field in each sample, to split by: an integer, text or bool, or None."""
    fields, get = value_of(name, source.schema, source.class_names)
    values: list[Any] = []
    for _, document in _read(source, indices, fields):
        if isinstance(document.sample, SampleError):  # the conversion reports the error
            values.append(None)
            continue
        value = get(document.sample)
        if value is not None and not isinstance(value, int | str):
            raise UsageError(
                f"samples cannot be split by {name!r}",
                key=document.sample["__key__"],
                expected="integers, text, or true and false",
                found=f"{type(value).__name__} {value!r:.60}",
            )
        values.append(value)
    return values
