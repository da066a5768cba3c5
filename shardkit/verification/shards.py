"""Checks one dataset, shard by shard: its files, and the keys and counts of undamaged shards.

A thread does all of a shard, so that the keys of one are read while the next is hashed, and while
its bytes are still in memory. No shard is opened before its files were checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import numpy as np

from shardkit import manifest as manifests
from shardkit import pieces
from shardkit.byte_source import ByteSource, open_source
from shardkit.checked import from_lines
from shardkit.dataset import Dataset
from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats import get_format
from shardkit.formats.base import KEY, ShardReader
from shardkit.manifest import File, Manifest, Shard
from shardkit.pieces import DIGEST
from shardkit.schema import Array, Bytes
from shardkit.verification.files import FileCheck, Ranges, check_files, strangers
from shardkit.verification.keys import Keys, Location, hashes_of
from shardkit.verification.work import (
    SHOWN,
    Findings,
    Meter,
    counted,
    in_threads,
    in_words,
    numbered,
    runs,
)

if TYPE_CHECKING:
    from shardkit.verification.keys import Hashes


@dataclass
class CheckedPart:
    """A dataset that is being verified: one split, or all there is."""

    name: str
    dataset: Dataset
    findings: Findings = field(default_factory=Findings)
    hashes: list[Hashes | None] = field(default_factory=list)  # of keys, per shard; None: unread

    @property
    def manifest(self) -> Manifest | None:
        return self.dataset.manifest

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards in the manifest; none for a foreign dataset."""
        if self.manifest is None:
            return []
        by_name = {shard.file.name: shard for shard in self.manifest.shards}
        return [by_name[self.dataset.shard_name(n)] for n in range(self.dataset.shards)]

    @property
    def whole(self) -> bool:
        """Whether these are all shards of the manifest, not only one."""
        return self.manifest is not None and self.dataset.shards == len(self.manifest.shards)

    @property
    def lists(self) -> tuple[File, ...]:
        """The files that belong to no shard."""
        return self.manifest.files if self.manifest is not None and self.whole else ()

    @property
    def kind(self) -> str:
        """Of the files' checksums."""
        return self.manifest.checksum if self.manifest else pieces.CHECKSUM

    @property
    def files(self) -> list[File]:
        shards = [file for shard in self.shards for file in shard.files]
        return [*shards, *self.lists]

    @property
    def readable(self) -> list[int]:
        """The undamaged shards that could be opened."""
        return [n for n, hashes in enumerate(self.hashes) if hashes is not None]

    @property
    def all_readable(self) -> bool:
        return len(self.readable) == self.dataset.shards

    def add(
        self,
        problem: ShardkitError,
        shard: int,
        position: int | None = None,
        key: str | None = None,
    ) -> None:
        """Add a problem of a shard, or of a sample in it, to the findings; in any thread."""
        path = self.dataset.shard_path(shard)
        located = problem.located(path=path, position=position, key=key)
        self.findings.add(located, shard, -1 if position is None else position)

    def key_at(self, location: Location) -> str | None:
        try:
            key: str = self.dataset.reader(location.shard).sample(location.position, ())[KEY]
            return key
        except ShardkitError:  # reported when the keys were read for the first time
            return None


def check(part: CheckedPart, meter: Meter) -> None:
    """Everything but the values: files, shards, counts, keys. Problems go to `part.findings`."""
    counts: Counter[str] = Counter()
    problems = check_files(part.dataset.path, part.lists, part.kind, meter)
    for problem in problems:
        part.findings.add(problem)
    for done in in_threads(lambda job: job(), _jobs(part, meter), meter, part.dataset.path):
        if done is not None:
            hashes, found = done
            part.hashes.append(hashes)
            counts.update(found)
    _check_keys(part)
    if part.manifest is None:
        names = [part.dataset.shard_name(number) for number in range(part.dataset.shards)]
        for problem in get_format(part.dataset.format).check_listed(part.dataset.path, names):
            part.findings.add(problem)
    elif part.whole:
        if not problems:
            _check_dropped(part, part.manifest)
        if part.all_readable:
            _check_counts(part, part.manifest, counts)
        _check_strangers(part, part.manifest)


_Found: TypeAlias = "tuple[Hashes | None, dict[str, int]]"


def _jobs(part: CheckedPart, meter: Meter) -> Iterator[Callable[[], _Found | None]]:
    """Of each shard the spans of its files, then the shard, which waits for them."""
    listed, firsts = _list_of_pieces(part)
    for number in range(part.dataset.shards):
        checks: list[FileCheck] = []
        first = firsts.get(part.dataset.shard_name(number), 0)
        for shard in part.shards[number : number + 1]:
            for file in shard.files:
                own = shard.file.name if checks else None
                known = b"" if listed is None else _digests(listed, first, file)
                first += pieces.listed(file.bytes)
                checks.append(FileCheck(part.dataset.path, file, part.kind, meter, known, own))
        for check in checks:
            for span in check.spans():
                yield partial(check.read, *span)
        yield partial(_check_shard, part, checks, number)


def _list_of_pieces(part: CheckedPart) -> tuple[ByteSource | None, dict[str, int]]:
    """The list of the digests of all pieces, and the number of each shard's first one.

    None where it cannot be used.
    """
    file = part.manifest.list_named(manifests.PIECES) if part.manifest else None
    if part.manifest is None or file is None:
        return None, {}
    firsts = accumulate((shard.listed for shard in part.manifest.shards), initial=0)
    names = (shard.file.name for shard in part.manifest.shards)
    try:
        return open_source(part.dataset.path / file.name), dict(zip(names, firsts, strict=False))
    except ShardkitError:  # the list is one of the files that are checked
        return None, {}


def _digests(listed: ByteSource, first: int, file: File) -> bytes:
    """The digests of a file's pieces as the list has them, which is not trusted."""
    number = pieces.listed(file.bytes)
    if number > pieces.MOST:
        return b""
    try:
        return listed.read(first * DIGEST, number * DIGEST)
    except ShardkitError:
        return b""


def _check_shard(part: CheckedPart, checks: list[FileCheck], number: int) -> _Found:
    """The hashes of a shard's keys, and the values of its optional fields; None if it is damaged.

    It is opened only if its files are whole; and where its own is not, to tell which samples are
    damaged.
    """
    beside = [check.problem() for check in checks[1:]]
    samples = None if any(beside) else partial(_samples_in, part, number)
    problems = [*(check.problem(samples) for check in checks[:1]), *beside]
    for found in filter(None, problems):
        part.findings.add(found, number)
    if any(problems):
        return None, {}
    try:
        with part.dataset.explained(number):
            reader = part.dataset.reader(number)
            hashes = hashes_of(reader)
            if len(hashes) != len(reader):
                raise DamagedError(
                    "a shard does not have a key for every sample",
                    expected=f"{len(reader):,}",
                    found=f"{len(hashes):,}",
                )
            return hashes, _counts(reader)
    except ShardkitError as problem:
        part.add(problem, number)
        return None, {}


def _samples_in(part: CheckedPart, number: int, ranges: Ranges) -> str:
    """Which samples of a damaged shard lie in ranges of its bytes, in words."""
    try:
        with part.dataset.explained(number):
            spans = part.dataset.reader(number).spans()
    except ShardkitError:
        return "which samples lie there cannot be told, as the shard cannot be opened"
    if spans is None:
        return "which samples lie there cannot be told in this format"
    lying = np.zeros(len(spans), bool)
    for start, stop in ranges:
        lying |= (spans[:, 0] < stop) & (spans[:, 1] > start)
    positions = np.flatnonzero(lying).tolist()
    if not positions:
        return "no sample lies there"
    words = []
    for shown, (first, last) in enumerate(runs(positions)):
        ends = dict.fromkeys((first, last)) if shown < SHOWN else ()
        keys = [part.key_at(Location(0, number, position)) for position in ends]
        known = " to ".join(repr(key) for key in keys if key is not None)
        words.append(numbered("sample", first, last) + (f" ({known})" if known else ""))
    return f"{in_words(words)} lie{'s' * (len(positions) == 1)} there"


def _counts(reader: ShardReader) -> dict[str, int]:
    """The number of values of optional fields, except large ones, which some formats would read."""
    counts = {}
    for name, kind in reader.schema.items():
        if kind.optional and not isinstance(kind, Bytes | Array):
            sizes = reader.sizes(name)
            if sizes is not None:
                counts[name] = len(sizes)
    return counts


def keys_of(parts: list[CheckedPart]) -> Keys:
    """The keys of all shards that could be read."""
    shards = [
        (p, number, hashes)
        for p, part in enumerate(parts)
        for number, hashes in enumerate(part.hashes)
        if hashes is not None
    ]
    return Keys(shards, lambda location: parts[location.part].key_at(location))


def _check_keys(part: CheckedPart) -> None:
    """Every key only once. Foreign shards often number keys in each shard: they get a note."""
    keys = keys_of([part])
    foreign = 0
    for key, first, again in keys.repeated():
        location, other = keys.location(again), keys.location(first)
        if part.manifest is None:
            foreign += 1
            continue
        problem = DamagedError(
            "two samples have the same key",
            key=key,
            expected="every key once in the dataset",
            found=f"the key of {part.dataset.shard_name(other.shard)}, position {other.position},"
            " as well",
            fix="convert again from a source whose keys differ",
        )
        part.add(problem, location.shard, location.position)
    if foreign:
        part.findings.notes.append(
            f"{counted(foreign, 'sample')} with a key that an earlier sample has as well"
        )


def _check_counts(part: CheckedPart, manifest: Manifest, counts: Counter[str]) -> None:
    """Values per field, as the shards have them, against those of the manifest."""
    for name, kind in manifest.schema.items():
        said = manifest.fields[name].count if name in manifest.fields else 0
        found = counts.get(name, manifest.samples)
        if said != found and (name in counts or not kind.optional):
            part.findings.add(
                DamagedError(
                    "a field does not have as many values as the manifest says",
                    path=part.dataset.manifest_path,
                    field=name,
                    expected=f"{said:,}",
                    found=f"{found:,}",
                    fix="convert again",
                )
            )


def _check_dropped(part: CheckedPart, manifest: Manifest) -> None:
    """As many lines in errors.jsonl and filtered.jsonl as samples were dropped."""
    counts = {
        manifests.ERRORS: manifest.errors,
        manifests.FILTERED: sum(manifest.filtered.values()),
    }
    for name, count in counts.items():
        try:
            found = len(listed(part, name))
        except ShardkitError as problem:
            part.findings.add(problem)
            continue
        if found != count:
            part.findings.add(
                DamagedError(
                    "the list of dropped samples is not as long as the manifest says",
                    path=part.dataset.manifest_path,
                    expected=f"{count:,} lines in {name}",
                    found=f"{found:,}",
                    fix="convert again",
                )
            )


class Dropped(TypedDict, total=False):
    """The parts of a line of errors.jsonl or filtered.jsonl that identify the sample."""

    source: str | None
    key: str


def listed(part: CheckedPart, name: str) -> list[Dropped]:
    """The entries of a list of dropped samples; raises DamagedError for a damaged list."""
    file = part.manifest.list_named(name) if part.manifest else None
    if file is None:
        return []
    path = part.dataset.path / file.name
    source = open_source(path)  # which has it in memory, if it was requested
    return list(from_lines(Dropped, source.read(0, source.size), name, path=path))


def _check_strangers(part: CheckedPart, manifest: Manifest) -> None:
    """Shards that the manifest does not name, where the folder is the dataset's own."""
    if part.dataset.place != part.dataset.path:
        return
    try:
        problems = strangers(part.dataset.path, manifest.format, {f.name for f in part.files})
    except ShardkitError as error:
        problems = [error]
    for problem in problems:
        part.findings.add(problem)
