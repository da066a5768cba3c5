"""Checks one dataset, shard by shard: its files, and the keys and counts of undamaged shards.

A thread does all of a shard, so that the keys of one are read while the next is hashed, and while
its bytes are still in memory. No shard is opened before its files were checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import TypeAlias, TypedDict

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
from shardkit.part_of import WHOLE, PartOf
from shardkit.pieces import DIGEST
from shardkit.schema import Array, Bytes
from shardkit.verification.files import FileCheck, Ranges, find_damage, is_damage, strangers
from shardkit.verification.keys import Hashes, Keys, Location, hashes_of
from shardkit.verification.work import (
    LAST,
    SHOWN,
    Findings,
    Meter,
    in_threads,
    in_words,
    numbered,
    runs,
)
from shardkit.words import counted

# Of a shard: the hashes of its keys, None where it was not read, and values of optional fields.
_Found: TypeAlias = "tuple[Hashes | None, dict[str, int]]"


@dataclass
class CheckedPart:
    """A dataset that is being verified: one split, or all there is."""

    name: str
    dataset: Dataset
    share: PartOf = WHOLE  # which shards are checked: of all, of which `before` come before these
    before: int = 0
    findings: Findings = field(default_factory=Findings)
    found: list[_Found] = field(default_factory=list)  # by shard
    damaged: list[tuple[int, File]] = field(default_factory=list)  # by shard, or LAST: of none

    @property
    def hashes(self) -> list[Hashes | None]:
        """Of keys, per shard; None: unread."""
        return [hashes for hashes, _ in self.found]

    @property
    def manifest(self) -> Manifest | None:
        return self.dataset.manifest

    @property
    def numbers(self) -> range:
        """The shards to check."""
        total = self.share.total
        return range((self.share.number - 1 - self.before) % total, self.dataset.shards, total)

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
        """The files to check that belong to no shard."""
        manifest, first = self.manifest, self.share.number == 1
        return manifest.files if manifest is not None and self.whole and first else ()

    @property
    def kind(self) -> str:
        """Of the files' checksums."""
        return self.manifest.checksum if self.manifest else pieces.CHECKSUM

    @property
    def files(self) -> list[File]:
        """Those to check that the manifest names."""
        shards = self.shards and [self.shards[number] for number in self.numbers]
        return [*(file for shard in shards for file in shard.files), *self.lists]

    @property
    def samples(self) -> int:
        """Of the shards to check, as the manifest or the shards announce them."""
        return sum(self.dataset.extent(number)[0] for number in self.numbers)

    @property
    def readable(self) -> list[int]:
        """The undamaged shards that could be opened."""
        return [n for n, (hashes, _) in enumerate(self.found) if hashes is not None]

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

    def note(self, problem: ShardkitError, file: File, shard: int = LAST) -> None:
        """Add a problem of a file; one that is damaged, and not only not to be read now, is so."""
        self.findings.add(problem, shard)
        if is_damage(problem):
            self.damaged.append((shard, file))

    def key_at(self, location: Location) -> str | None:
        try:
            key: str = self.dataset.reader(location.shard).sample(location.position, ())[KEY]
            return key
        except ShardkitError:  # reported when the keys were read for the first time
            return None


def check(part: CheckedPart, meter: Meter) -> None:
    """Everything but the values: files, shards, counts, keys. Problems go to `part.findings`.

    Once more, after a repair, of shards only those that were damaged are read.
    """
    again = {number for number, _ in part.damaged} if part.found else None
    before, part.found, part.damaged = part.found, [], []
    part.findings.forget({*(again or ()), LAST})
    problems = find_damage(part.dataset.path, part.lists, part.kind, meter)
    for file, problem in problems:
        part.note(problem, file)
    jobs = _jobs(part, meter, before, again)
    for done in in_threads(lambda job: job(), jobs, meter, part.dataset.path):
        if done is not None:
            part.found.append(done)
    counts: Counter[str] = Counter()
    for _, found in part.found:
        counts.update(found)
    _check_keys(part)
    if part.share.number > 1:  # the rest is the first one's to check
        return
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


def _jobs(
    part: CheckedPart, meter: Meter, before: list[_Found], again: Collection[int] | None
) -> Iterator[Callable[[], _Found | None]]:
    """Of each shard the spans of its files, then the shard, which waits for them.

    Of shards not to be read `again` what was found `before`.
    """
    listed, firsts = _list_of_pieces(part)
    for number in range(part.dataset.shards):
        if again is not None and number not in again:
            yield partial(before.__getitem__, number)
            continue
        if number not in part.numbers:
            yield lambda: (None, {})
            continue
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
    for one, found in zip(checks, problems, strict=True):
        if found is not None:
            part.note(found, one.file, number)
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
        known = {file.name for file in (*manifest.all_files(), *manifest.files)}
        problems = strangers(part.dataset.path, manifest.format, known)
    except ShardkitError as error:
        problems = [error]
    for problem in problems:
        part.findings.add(problem)
