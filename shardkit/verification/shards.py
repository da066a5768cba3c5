"""One dataset, shard by shard: its files first, and only of a whole shard keys and counts.

A thread does all of a shard, so that the keys of one are read while the next is hashed, and while
what was just read is still in memory. No shard is opened before its files were found whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from shardkit import manifest as manifests
from shardkit import storage
from shardkit.checked import from_lines
from shardkit.dataset import Dataset
from shardkit.errors import DamagedError, ShardkitError
from shardkit.formats.base import KEY, ShardReader
from shardkit.manifest import File, Manifest, Shard
from shardkit.schema import Array, Bytes
from shardkit.verification.files import check_file, strangers
from shardkit.verification.keys import Keys, Location, hashes_of
from shardkit.verification.work import LAST, Findings, Meter, counted, in_threads

if TYPE_CHECKING:
    from shardkit.verification.keys import Hashes


@dataclass
class Part:
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
        """What the manifest says of the shards; nothing for a foreign dataset."""
        if self.manifest is None:
            return []
        by_name = {shard.file.name: shard for shard in self.manifest.shards}
        return [by_name[self.dataset.shard_name(n)] for n in range(self.dataset.shards)]

    @property
    def whole(self) -> bool:
        """Whether this is all that a manifest names, and not one shard of it."""
        return self.manifest is not None and self.dataset.shards == len(self.manifest.shards)

    @property
    def lists(self) -> tuple[File, ...]:
        """The files that belong to no shard."""
        return self.manifest.files if self.manifest is not None and self.whole else ()

    @property
    def files(self) -> list[File]:
        shards = [f for shard in self.shards for f in (shard.file, *shard.beside)]
        return [*shards, *self.lists]

    @property
    def readable(self) -> list[int]:
        """The shards that were found whole and could be opened."""
        return [n for n, hashes in enumerate(self.hashes) if hashes is not None]

    @property
    def all_readable(self) -> bool:
        return len(self.readable) == self.dataset.shards

    def key_at(self, location: Location) -> str | None:
        try:
            key: str = self.dataset.reader(location.shard).sample(location.position, ())[KEY]
            return key
        except ShardkitError:  # reported when the keys were read for the first time
            return None


@dataclass
class _Found:
    """What a thread found in one shard."""

    problems: list[tuple[int, ShardkitError]] = field(default_factory=list)  # with positions
    hashes: Hashes | None = None
    counts: dict[str, int] = field(default_factory=dict)  # values per field, where that is cheap


def check(part: Part, meter: Meter) -> None:
    """Everything but the values: files, shards, counts, keys. Problems go to `part.findings`."""
    counts: Counter[str] = Counter()
    jobs = range(part.dataset.shards)
    for number, found in enumerate(in_threads(partial(_check_shard, part, meter), jobs, meter)):
        for position, problem in found.problems:
            part.findings.add(problem, number, position)
        part.hashes.append(found.hashes)
        counts.update(found.counts)
    _check_keys(part)
    if part.manifest is not None and part.whole:
        whole = [_is_whole(part, file, meter) for file in part.lists]
        if all(whole):
            _check_dropped(part, part.manifest)
        if part.all_readable:
            _check_counts(part, part.manifest, counts)
        _check_strangers(part, part.manifest)


def _check_shard(part: Part, meter: Meter, number: int) -> _Found:
    found = _Found()
    for shard in part.shards[number : number + 1]:
        for file in (shard.file, *shard.beside):
            try:
                owner = shard.file.name if file is not shard.file else None
                check_file(part.dataset.path, file, meter, owner)
            except ShardkitError as problem:
                found.problems.append((-1, problem))
    if not found.problems:
        _look_into(part, number, found)
    return found


def _look_into(part: Part, number: int, found: _Found) -> None:
    """Keys and counts of a shard whose files are whole."""
    path = part.dataset.shard_path(number)
    try:
        reader = part.dataset.reader(number)
        hashes = hashes_of(reader)
        if len(hashes) != len(reader):
            raise DamagedError(
                "a shard does not have a key for every sample",
                expected=f"{len(reader):,}",
                found=f"{len(hashes):,}",
            )
        counts = _counts(reader)
    except Exception as error:
        found.problems.append((-1, problem_of(error, path)))
        return
    found.hashes, found.counts = hashes, counts


def problem_of(error: Exception, path: Path, position: int | None = None) -> ShardkitError:
    """The problem that reading a shard met; raises what says nothing of its bytes."""
    found = storage.unreadable(error, path, position)
    if not isinstance(found, ShardkitError):
        raise found
    return found


def _counts(reader: ShardReader) -> dict[str, int]:
    """How many values optional fields have; but for large ones, which some formats would read."""
    counts = {}
    for name, kind in reader.schema.items():
        if kind.optional and not isinstance(kind, Bytes | Array):
            sizes = reader.sizes(name)
            if sizes is not None:
                counts[name] = len(sizes)
    return counts


def keys_of(parts: list[Part]) -> Keys:
    """The keys of all shards that could be read."""
    shards = [
        (p, number, hashes)
        for p, part in enumerate(parts)
        for number, hashes in enumerate(part.hashes)
        if hashes is not None
    ]
    return Keys(shards, lambda location: parts[location.part].key_at(location))


def _check_keys(part: Part) -> None:
    """Every key once. In shards that others made, which often count anew in each, a note."""
    keys = keys_of([part])
    foreign = 0
    for key, first, again in keys.repeated():
        location, other = keys.location(again), keys.location(first)
        if part.manifest is None:
            foreign += 1
            continue
        problem = DamagedError(
            "two samples have the same key",
            path=part.dataset.shard_path(location.shard),
            position=location.position,
            key=key,
            expected="every key once in the dataset",
            found=f"the key of {part.dataset.shard_name(other.shard)}, position {other.position},"
            " as well",
            fix="convert again from a source whose keys differ",
        )
        part.findings.add(problem, location.shard, location.position)
    if foreign:
        part.findings.notes.append(
            f"{counted(foreign, 'sample')} with a key that an earlier sample has as well"
        )


def _is_whole(part: Part, file: File, meter: Meter) -> bool:
    try:
        check_file(part.dataset.path, file, meter)
    except ShardkitError as problem:
        part.findings.add(problem)
        return False
    return True


def _check_counts(part: Part, manifest: Manifest, counts: Counter[str]) -> None:
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


def _check_dropped(part: Part, manifest: Manifest) -> None:
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
    """A line of errors.jsonl or filtered.jsonl, as far as it says which sample it is."""

    source: str | None
    key: str


def listed(part: Part, name: str) -> list[Dropped]:
    """The entries of a list of dropped samples; raises DamagedError for what is no such list."""
    file = part.manifest.list_named(name) if part.manifest else None
    if file is None:
        return []
    path = part.dataset.path / file.name
    return list(from_lines(Dropped, storage.read(path), name, path=path))


def _check_strangers(part: Part, manifest: Manifest) -> None:
    """Shards that the manifest does not name, where the folder is the dataset's own."""
    if part.dataset.place != part.dataset.path:
        return
    try:
        problems = strangers(part.dataset.path, manifest.format, {f.name for f in part.files})
    except ShardkitError as error:
        problems = [error]
    for problem in problems:
        part.findings.add(problem, LAST)
