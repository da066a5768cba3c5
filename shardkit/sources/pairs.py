"""Folders that each hold one image of every sample, under the same names: `images/` and `masks/`.

Each folder becomes a field. Splits may be folders above or below them, or, for Pascal VOC, lists.
"""

from __future__ import annotations

import copy
import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from shardkit.codecs.media import IMAGES
from shardkit.dataset.folders import media_of
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.helpers.mapped import Sizes, computed
from shardkit.metadata.splits import in_order, split_of
from shardkit.options import Selection
from shardkit.sample import Sample
from shardkit.schema import Image, Schema
from shardkit.sources.base import WHOLE, Indices, Source, SourceWrapper
from shardkit.sources.candidate import Candidate, Splits
from shardkit.sources.folder_scan import FolderScan, add_metadata, checked
from shardkit.sources.image_folder import ImageFolder
from shardkit.sources.labels import LabelColumn
from shardkit.sources.layouts import are_sides, field_of, ignored_in, in_order_of_sides
from shardkit.sources.metadata import GivenTable
from shardkit.sources.transcripts import divided, lines_of

if TYPE_CHECKING:
    from typing_extensions import Self

_LISTS = "ImageSets/Segmentation"  # of Pascal VOC
_PROBES = 16  # files that are looked at to find the ending of names


class Pairs(SourceWrapper):
    """The images of a main folder, with those of the same number in other folders as fields."""

    _whole: ImageFolder

    def __init__(self, sides: Mapping[str, ImageFolder]) -> None:
        self._field, *others = sides
        super().__init__(sides[self._field])
        self._others = {name: sides[name] for name in others}
        fields = {self._named(name): kind for name, kind in self._whole.schema.items()}
        if taken := fields.keys() & self._others.keys():
            raise SourceError(
                f"the images of a folder have the name of another field, {min(taken)!r}",
                path=Path(self._others[min(taken)].root),
                fix="rename the folder, or the files or column of that name",
            )
        self.schema = Schema({**fields, **dict.fromkeys(self._others, Image())})

    def _named(self, name: str) -> str:
        return self._field if name == IMAGES.field else name

    def _of_each(self, change: Callable[[ImageFolder], ImageFolder]) -> Self:
        found = self._around(change(self._whole))
        found._others = {name: change(side) for name, side in self._others.items()}
        return found

    def __getitem__(self, index: int) -> Sample:
        sample = {self._named(name): value for name, value in self._whole[index].items()}
        for name, side in self._others.items():
            try:
                sample[name] = side[index][IMAGES.field]
            except ShardkitError as error:
                raise error.located(field=name) from error.__cause__
        return sample

    def narrow(self, selection: Selection) -> None:
        own = {self._field: IMAGES.field}
        fields = selection.fields
        theirs = None if fields is None else tuple(own.get(name, name) for name in fields)
        drop = tuple(own.get(name, name) for name in selection.drop)
        self._whole = copy.copy(self._whole)
        self._whole.narrow(replace(selection, fields=theirs, drop=drop))
        self._others = {n: side for n, side in self._others.items() if selection.has(n)}
        Source.narrow(self, selection)

    def select(self, indices: Indices) -> Self:
        return self._of_each(lambda side: side.select(indices))

    def skimmed(self) -> Self:
        return self._of_each(ImageFolder.skimmed)

    def sizes(self) -> Sizes:
        every = [side.sizes() for side in (self._whole, *self._others.values())]
        return computed(len(self), np.int64, lambda p: np.sum([s[p] for s in every], 0))

    def all_keys(self) -> Sequence[str]:
        return self._whole.all_keys()

    def fingerprint(self) -> dict[str, str]:
        found = [side.fingerprint() for side in (self._whole, *self._others.values())]
        names = [self._field, *self._others]
        return {
            what: xxhash.xxh3_128_hexdigest(
                "\0".join(names + [one[what] for one in found]).encode()
            )
            for what in ("files", "times")
        }


# --- recognising ---------------------------------------------------------------------------------


@dataclass
class _Layout:
    """The folders of each field, by split ("" without splits), relative to the source."""

    top: str  # the folder that holds all of them
    splits: dict[str, dict[str, str]]
    asked: bool  # whether --fields names them

    @property
    def sides(self) -> dict[str, str]:
        """The folders of a split that has all fields, or most of them."""
        return max(self.splits.values(), key=len)

    def read(self) -> dict[str, set[str]]:
        """The names of the folders that are read, by the folder that they are in."""
        found: dict[str, set[str]] = {}
        below = [path for sides in self.splits.values() for path in sides.values()]
        while below:
            for above, name in (pairs := {posixpath.split(path) for path in below}):
                found.setdefault(above, set()).add(name)
            below = [above for above, _ in pairs if above != self.top]
        return found


def recognise_asked(candidate: Candidate) -> Splits | None:
    """Return folders of images that `--fields` names."""
    fields = candidate.recipe.fields
    return _recognise(candidate, fields) if fields else None


def recognise(candidate: Candidate) -> Splits | None:
    """Return folders of images whose names say that each has one image of every sample."""
    return _recognise(candidate, ())


def _recognise(candidate: Candidate, asked: Sequence[str]) -> Splits | None:
    if not candidate.is_folder or media_of(candidate.contents) is not IMAGES:
        return None
    if candidate.recipe.classes is not None and candidate.recipe.label_column is None:
        return None  # they are classes
    folders = {posixpath.dirname(name) for name in candidate.contents.images}
    layout = _find(folders, asked, candidate.together)
    return None if layout is None else _open(layout, candidate)


def _find(folders: Collection[str], asked: Sequence[str], together: bool) -> _Layout | None:
    top = posixpath.commonpath(folders)
    paths = [path.removeprefix(top).strip("/").split("/") for path in folders]
    ends = {(path[0], path[1] if path[1:] else "") for path in paths}  # the first two names
    if sides := _sides({first for first, _ in ends}, asked):
        found = {(s, side, f"{side}/{s}") for side, s in ends if side in sides.values()}
        if together or not all(split_of(split) for split, _, _ in found):
            found = {("", side, side) for _, side, _ in found}
    elif not together and all(split_of(first) for first, _ in ends):
        sides = _sides({second for _, second in ends}, asked)
        found = {(s, side, f"{s}/{side}") for s, side in ends if side in sides.values()}
    if not sides:
        return None
    splits: dict[str, dict[str, str]] = {}
    for name, side, path in sorted(found):
        mine = splits.setdefault(split_of(name) or "", {})
        if mine.setdefault(field_of(side), posixpath.join(top, path)) != posixpath.join(top, path):
            raise UsageError(
                "two folders are the same split",
                found=f"{mine[field_of(side)]}/ and {posixpath.join(top, path)}/",
                fix="move one elsewhere, or take all together with --split none",
            )
    ordered = {s: {n: splits[s][n] for n in sides if n in splits[s]} for s in in_order(splits)}
    return _Layout(top, ordered, bool(asked))


def _sides(folders: Iterable[str], asked: Sequence[str]) -> dict[str, str]:
    """The folders that hold sides of samples, by field; empty if there are others among them."""
    every = [(field_of(folder), folder) for folder in folders]
    chosen = [one for one in every if one[0] in asked] if asked else every
    found = dict(chosen)
    if len(found) < len(chosen) or not (len(found) > 1 if asked else are_sides(found)):
        return {}
    return {name: found[name] for name in in_order_of_sides(found)}


def _open(layout: _Layout, candidate: Candidate) -> Splits | None:
    root, recipe = candidate.path, candidate.recipe
    scans = {
        split: {name: FolderScan(root / path, IMAGES) for name, path in folders.items()}
        for split, folders in layout.splits.items()
    }
    main, *others = layout.sides
    if any(main not in sides for sides in scans.values()):
        return None
    mains = [sides[main] for sides in scans.values()]
    add_metadata(root, mains, GivenTable.of(recipe), LabelColumn.of(recipe))
    if not layout.asked and {*layout.sides} == {"a", "b"} and not _are_pairs(scans):
        return None
    sources: dict[str, Source] = {split: _joined(sides) for split, sides in scans.items()}
    first = next(iter(sources.values()))
    folders = ", ".join(f"{path}/" for path in layout.sides.values())
    note = f"an image of each of {folders} is a sample: {', '.join(layout.sides)}"
    first.notes = (note, *first.notes)
    for split, source in sources.items():
        missing = [name for name in others if name not in scans[split]]
        source.notes = (*source.notes, *(f"no {name} in {split}" for name in missing))
    beside = [ignored_in(root / above, names) for above, names in layout.read().items()]
    first.ignored = dict(sum(beside, Counter(first.ignored)))
    if not candidate.together and (root / layout.top / _LISTS).is_dir() and [*sources] == [WHOLE]:
        sources = _listed(root / layout.top / _LISTS, first)
    return checked(candidate, sources)


def _are_pairs(scans: Mapping[str, Mapping[str, FolderScan]]) -> bool:
    """Return whether `a/` and `b/` are two sides, rather than classes, which may have any names.

    Raises UsageError if only some of the names are equal.
    """
    for sides in scans.values():
        first, *others = ({*_numbers(scan)} for scan in sides.values())
        second = {*others[0]} if others else set[str]()
        same, single = len(first & second), len(first ^ second)
        if same > max(single, 1) and single:
            raise UsageError(
                "the folders may hold pairs of images, or be classes",
                path=next(iter(sides.values())).root.parent,
                found=f"{same:,} names that are in both, and {single:,} that are not",
                fix=f"give --fields {','.join(sides)} for pairs, or --classes FILE for classes",
            )
        if single or same < 2:
            return False
    return True


# --- joining -------------------------------------------------------------------------------------


def _joined(sides: Mapping[str, FolderScan]) -> Pairs | ImageFolder:
    """The samples of one split: the files that are in all folders."""
    main, *others = sides.values()
    numbers = _numbers(main)
    rows = [_matched(main, numbers, scan) for scan in others]
    kept = np.arange(len(numbers))
    for row in rows:
        kept = kept[row[kept] >= 0]
    unpaired = {scan.root.name: len(scan.files) - len(kept) for scan in sides.values()}
    main.files = main.files.select(kept)
    for scan, row in zip(others, rows, strict=True):
        scan.files = scan.files.select(row[kept])
    made = Pairs({name: scan.source(None) for name, scan in sides.items()})
    made.problems = [problem for scan in sides.values() for problem in scan.problems]
    counts = sum((scan.ignored for scan in sides.values()), Counter[str]())
    counts.update({f"images of {name}/ without a partner": n for name, n in unpaired.items()})
    made.ignored = dict(+counts)
    return made


def _numbers(scan: FolderScan) -> dict[str, int]:
    """The number of each file, by its path without suffix, which two must not share."""
    files, found = scan.files, dict[str, int]()
    for number in range(len(files)):
        stem = files.stem(number)
        if stem in found:
            raise SourceError(
                "two images have the same name, so it is not clear which of them is in the sample",
                path=scan.root,
                found=f"{files.relative(found[stem])}, {files.relative(number)}",
                fix="keep one of them",
            )
        found[stem] = number
    return found


def _matched(main: FolderScan, numbers: Mapping[str, int], scan: FolderScan) -> Indices:
    """The file of a folder for each image of the main one; -1 if there is none.

    Raises SourceError if there is none for any of them.
    """
    theirs = _numbers(scan)
    ending = _ending(numbers, theirs)
    found = np.array([theirs.get(name + ending, -1) for name in numbers], np.int64)
    if not (found >= 0).any():
        raise SourceError(
            f"no image in {scan.root.name}/ has the name of one in {main.root.name}/",
            path=scan.root.parent,
            expected="files of the same names, or names that all end alike, such as 1_mask.png",
            found=f"{next(iter(numbers), 'none')} and {next(iter(theirs), 'none')}",
            fix="rename the files, convert one folder by itself, or, if the folders are classes,"
            " list them with --classes FILE",
        )
    return found


def _ending(names: Mapping[str, int], others: Mapping[str, int]) -> str:
    """What the others have after the name of their main image, such as `_mask`; "" if nothing."""
    if not names.keys().isdisjoint(others):
        return ""
    ends = (o[len(n) :] for n in islice(names, _PROBES) for o in others if o.startswith(n))
    found = Counter(end for end in ends if end and not end[0].isdigit())
    return found.most_common(1)[0][0] if found else ""


def _listed(folder: Path, source: Source) -> dict[str, Source]:
    """Divide the samples by the lists of Pascal VOC."""
    numbers = {name: number for number, name in enumerate(source.all_keys())}
    notes, lists = [*source.notes], dict[str, Path]()
    for split in ("train", "val", "test"):
        path = folder / f"{split}.txt"
        names = {*lines_of(path)} - {""} if path.is_file() else set()
        if not numbers.keys().isdisjoint(names):
            lists[split] = path
        elif names:
            notes.append(f"{path.name} is not read: its images have no masks")
    if not lists:
        return {WHOLE: source}
    chosen, problems = divided(numbers, lists, "a listed image does not exist, or has no mask")
    found: dict[str, Source] = {n: source.select(np.array(some)) for n, some in chosen.items()}
    for each in found.values():
        each.notes, each.problems, each.ignored = (), (), {}
    first = next(iter(found.values()))
    first.notes, first.problems = notes, [*source.problems, *problems]
    first.ignored = dict(source.ignored)
    first.ignored.pop(f"folder {folder.parent.name}/", None)
    if rest := len(numbers) - sum(map(len, chosen.values())):
        first.ignored["images of no split"] = rest
    return found
