"""Checks one dataset, shard by shard: its files, and the keys and counts of undamaged shards.

A shard's keys are read right after its files were hashed, while its bytes are still in memory, and
while the next shard is being hashed. No shard is opened before its files were checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import TypeAlias, TypedDict

import numpy as np

from shardkit.dataset.dataset import Dataset
from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats import get_format
from shardkit.formats.base import KEY, ShardReader
from shardkit.helpers.checked import from_lines
from shardkit.helpers.part_of import WHOLE, PartOf
from shardkit.helpers.words import counted
from shardkit.metadata import manifest as manifests
from shardkit.metadata.manifest import File, Manifest, Shard
from shardkit.schema import Array, Bytes
from shardkit.storage import checksums
from shardkit.storage.byte_source import ByteSource, open_source
from shardkit.storage.checksums import DIGEST
from shardkit.verification.files import FileCheck, Ranges, find_damage, is_damage, strangers
from shardkit.verification.matching import Hashes, Keys, Location, hashes_of
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

# Per shard: the hashes of its keys (None: not read), and the number of values per optional field.
_Found: TypeAlias = "tuple[Hashes | None, dict[str, int]]"


@dataclass
class CheckedPart:
    """A dataset that is being verified: one split, or the whole dataset."""

    name: str
    dataset: Dataset
    share: PartOf = WHOLE  # which shards are checked, counted over all splits
    before: int = 0  # number of shards in the splits before this one
    findings: Findings = field(default_factory=Findings)
    found: list[_Found] = field(default_factory=list)  # by shard
    damaged: list[tuple[int, File]] = field(default_factory=list)  # shard (LAST: none) and file

    @property
    def hashes(self) -> list[Hashes | None]:
        """The hashes of the keys in each shard; None if it was not read."""
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
        """The shards in the manifest; empty for a third-party dataset."""
        if self.manifest is None:
            return []
        by_name = {shard.file.name: shard for shard in self.manifest.shards}
        return [by_name[self.dataset.shard_name(n)] for n in range(self.dataset.shards)]

    @property
    def whole(self) -> bool:
        """Whether the dataset was opened with all shards of its manifest."""
        return self.manifest is not None and self.dataset.shards == len(self.manifest.shards)

    @property
    def lists(self) -> tuple[File, ...]:
        """The files to check that belong to no shard."""
        manifest, first = self.manifest, self.share.number == 1
        return manifest.files if manifest is not None and self.whole and first else ()

    @property
    def kind(self) -> str:
        """The kind of the files' checksums."""
        return self.manifest.checksum if self.manifest else checksums.CHECKSUM

    @property
    def files(self) -> list[File]:
        """The files to check, as listed in the manifest."""
        shards = self.shards and [self.shards[number] for number in self.numbers]
        return [*(file for shard in shards for file in shard.files), *self.lists]

    @property
    def samples(self) -> int:
        """Number of samples in the shards to check, according to the manifest or the shards."""
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
        """Add a problem of a shard, or of a sample in it. May be called in any thread."""
        path = self.dataset.shard_path(shard)
        located = problem.located(path=path, position=position, key=key)
        self.findings.add(located, shard, -1 if position is None else position)

    def note(self, problem: ShardkitError, file: File, shard: int = LAST) -> None:
        """Add a problem of a file, and mark the file as damaged unless it is only unreadable."""
        self.findings.add(problem, shard)
        if is_damage(problem):
            self.damaged.append((shard, file))

    def key_at(self, location: Location) -> str | None:
        try:
            key: str = self.dataset.reader(location.shard).sample(location.position, ())[KEY]
            return key
        except ShardkitError:  # already reported, when the keys were first read
            return None


def check(part: CheckedPart, meter: Meter) -> None:
    """Check files, shards, counts and keys, but no values. Problems go to `part.findings`.

    When called again, after a repair, it reads only the shards that were damaged.
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
    if part.share.number > 1:  # the first part checks the rest
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
    """Jobs: for each shard, the spans of its files, then the shard itself, which waits for them.

    For shards that are not read `again`, a job returns the result from `before`.
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
                first += checksums.listed(file.bytes)
                checks.append(FileCheck(part.dataset.path, file, part.kind, meter, known, own))
        for check in checks:
            for span in check.spans():
                yield partial(check.read, *span)
        yield partial(_check_shard, part, checks, number)


def _list_of_pieces(part: CheckedPart) -> tuple[ByteSource | None, dict[str, int]]:
    """Return the file with the digests of all pieces, and the index of each shard's first digest.

    The file is None if it is missing or cannot be opened.
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
    """The digests of a file's pieces according to the list, which is untrusted; b"" if unusable."""
    number = checksums.listed(file.bytes)
    if number > checksums.MAX_PIECES:
        return b""
    try:
        return listed.read(first * DIGEST, number * DIGEST)
    except ShardkitError:
        return b""


def _check_shard(part: CheckedPart, checks: list[FileCheck], number: int) -> _Found:
    """Return the hashes of a shard's keys (None: damaged), and the counts of its optional fields.

    The shard is opened only if its files are undamaged, or to find out which of its samples lie in
    the damaged byte ranges of its main file.
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
    """Return which samples of a damaged shard lie in these byte ranges, in words."""
    try:
        with part.dataset.explained(number):
            spans = part.dataset.reader(number).spans()
    except ShardkitError:
        return "the samples that lie there are unknown, as the shard cannot be opened"
    if spans is None:
        return "the samples that lie there cannot be determined in this format"
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
    """Value counts of optional fields, except large ones: some formats would have to read them."""
    counts = {}
    for name, kind in reader.schema.items():
        if kind.optional and not isinstance(kind, Bytes | Array):
            sizes = reader.sizes(name)
            if sizes is not None:
                counts[name] = len(sizes)
    return counts


def keys_of(parts: list[CheckedPart]) -> Keys:
    """Return the keys of all shards that could be read."""
    shards = [
        (p, number, hashes)
        for p, part in enumerate(parts)
        for number, hashes in enumerate(part.hashes)
        if hashes is not None
    ]
    return Keys(shards, lambda location: parts[location.part].key_at(location))


def _check_keys(part: CheckedPart) -> None:
    """Check that keys are unique. Shards of other tools often restart numbering: a note."""
    keys = keys_of([part])
    third_party = 0
    for key, first, again in keys.repeated():
        location, other = keys.location(again), keys.location(first)
        if part.manifest is None:
            third_party += 1
            continue
        problem = DamagedError(
            "two samples have the same key",
            key=key,
            expected="every key once in the dataset",
            found=f"the key of {part.dataset.shard_name(other.shard)}, position {other.position},"
            " as well",
            fix="convert again from a source with unique keys",
        )
        part.add(problem, location.shard, location.position)
    if third_party:
        part.findings.notes.append(
            f"{counted(third_party, 'sample')} with the same key as an earlier sample"
        )


def _check_counts(part: CheckedPart, manifest: Manifest, counts: Counter[str]) -> None:
    """Compare the number of values per field in the shards with the manifest."""
    for name, kind in manifest.schema.items():
        stated = manifest.fields[name].count if name in manifest.fields else 0
        found = counts.get(name, manifest.samples)
        if stated != found and (name in counts or not kind.optional):
            what = "a field does not have as many values as the manifest says"
            _add_other(part, what, f"{stated:,}", found, name)


def _check_dropped(part: CheckedPart, manifest: Manifest) -> None:
    """Check that errors.jsonl and filtered.jsonl have one line per dropped sample."""
    filtered = sum(manifest.filtered.values())
    for name, count in ((manifests.ERRORS, manifest.errors), (manifests.FILTERED, filtered)):
        try:
            found = len(listed(part, name))
        except ShardkitError as problem:
            part.findings.add(problem)
            continue
        if found != count:
            what = "the list of dropped samples is not as long as the manifest says"
            _add_other(part, what, f"{count:,} lines in {name}", found)


def _add_other(
    part: CheckedPart, what: str, expected: str, found: int, field: str | None = None
) -> None:
    path = part.dataset.manifest_path
    about = {"expected": expected, "found": f"{found:,}", "fix": "convert again"}
    part.findings.add(DamagedError(what, path=path, field=field, **about))


class Dropped(TypedDict, total=False):
    """The parts of a line of errors.jsonl or filtered.jsonl that identify the sample."""

    source: str | None
    key: str


def listed(part: CheckedPart, name: str) -> list[Dropped]:
    """Return the entries of a list of dropped samples; raises DamagedError for a damaged list."""
    file = part.manifest.list_named(name) if part.manifest else None
    if file is None:
        return []
    path = part.dataset.path / file.name
    source = open_source(path)  # for a remote file, uses pages that were already requested
    return list(from_lines(Dropped, source.read(0, source.size), name, path=path))


def _check_strangers(part: CheckedPart, manifest: Manifest) -> None:
    """Report shards that the manifest does not list, if the dataset has a folder of its own."""
    if part.dataset.place != part.dataset.path:
        return
    try:
        known = {file.name for file in (*manifest.all_files(), *manifest.files)}
        problems = strangers(part.dataset.path, manifest.format, known)
    except ShardkitError as error:
        problems = [error]
    for problem in problems:
        part.findings.add(problem)
