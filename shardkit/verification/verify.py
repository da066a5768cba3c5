"""`shardkit.verify`: runs all checks in order, and makes the report."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_dataset, open_described, open_splits, without_manifest
from shardkit.errors import (
    DamagedError,
    FormatError,
    ShardkitError,
    UsageError,
    printable,
)
from shardkit.formats import format_of
from shardkit.helpers.keywords import takes
from shardkit.helpers.part_of import WHOLE, PartOf
from shardkit.helpers.progress import Progress, watched
from shardkit.helpers.words import counted
from shardkit.metadata import manifest as manifests
from shardkit.metadata.manifest import File, Manifest, Splits
from shardkit.storage import fs
from shardkit.storage.checksums import CHECKSUM
from shardkit.storage.page_cache import MemoryCache
from shardkit.storage.pages import Pages
from shardkit.storage.remote.path import RemotePath
from shardkit.verification.files import find_damage, is_damage
from shardkit.verification.samples import check_values
from shardkit.verification.shards import CheckedPart, check
from shardkit.verification.work import Findings, Meter

if TYPE_CHECKING:
    from shardkit.verification.client import Client, ClientReport
    from shardkit.verification.groups import Against, Group
    from shardkit.verification.repair import Repair, RepairReport


_SHOWN = 3  # problems shown in the repr of a report


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """The result of `verify`.

    path: path of the dataset.
    format: name of its format. None: the manifest is too damaged to tell.
    samples, shards, files: their numbers, according to the manifest or the shards.
    bytes: bytes that were read to compare checksums.
    problems: the errors that were found, ordered by shard and position. After a repair, those that
        remain.
    notes: what was not checked, and why.
    clients: what the formats' own libraries have read, by name of the library.
    seconds: duration.
    part: the part that was verified, such as "2/8". `samples`, `shards`, `files` and `bytes` are
        then those of this part.
    repair: what was repaired, and what was not.
    checksums: whether every file has a checksum to compare with. False: without a manifest, damage
        is found only where it makes samples unreadable.
    """

    path: str
    format: str | None
    samples: int
    shards: int
    files: int
    bytes: int
    problems: list[ShardkitError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    clients: dict[str, ClientReport] = field(default_factory=dict)
    seconds: float = 0.0
    part: str | None = None
    repair: RepairReport | None = None
    checksums: bool = True

    def __repr__(self) -> str:
        found = self.verdict if self.sound else counted(len(self.problems), "problem")
        extent = f"{counted(self.samples, 'sample')} in {counted(self.shards, 'shard')}"
        lines = [f"<VerifyReport {self.path}: {found}, {self.format}, {extent}>"]
        lines += [f"  {problem.what}" for problem in self.problems[:_SHOWN]]
        return "\n".join(map(printable, lines))

    @property
    def sound(self) -> bool:
        """Whether no problem was found, and a repair has left none."""
        return not self.problems and not (self.repair and self.repair.left)

    @property
    def verdict(self) -> str:
        """The conclusion in a word: "sound", "damaged", or "readable" if there are no checksums."""
        return ("sound" if self.checksums else "readable") if self.sound else "damaged"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, as for `--json`."""
        problems = [problem.to_dict() for problem in self.problems]
        clients = {name: report.to_dict() for name, report in self.clients.items()}
        found = {**self.__dict__, "sound": self.sound, "problems": problems, "clients": clients}
        return found if self.repair is None else {**found, "repair": self.repair.to_dict()}


@takes()
def verify(
    path: str | os.PathLike[str],
    against: Against | None = None,
    *,
    metadata: str | os.PathLike[str] | None = None,
    decode: bool = False,
    client: bool = False,
    part: str | None = None,
    repair: Against | None = None,
    transform: str | Callable[..., Any] | None = None,
    progress: bool | Callable[[Progress], object] = False,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Check that a dataset is as it was written. Finds all problems, not only the first.

    Every file is read and compared with its checksum in the manifest. Shards, counts and keys are
    compared with the manifest. Shards from other tools have no checksums, so all their samples are
    read. Damage is reported, not raised.

    path: the dataset.
    against: compare every sample with the source of the dataset, given as for `convert`, or with a
        dataset of any format.
    metadata: the table that the conversion was given, for `against` and `repair`.
    decode: also read every value, and decode every image.
    client: compare every sample with what the format's own library reads.
    part: check only a share of the shards, such as "2/8", as one of several processes on any
        machines. Notes in the report say what this part leaves to the others.
    repair: repair damaged and missing files from the source of the dataset, given as for `convert`,
        or from a copy of the dataset. Files are copied or made again, and replaced once
        their checksums match the manifest. The report's `repair` lists them, and what was not
        repaired, with the reasons. `problems` are those that remain.
    transform: the transform that the conversion was given, for `repair`.
    progress: as in `shardkit.convert`.
    storage_options: as in `shardkit.open`.

    Raises NotFoundError, FormatError for anything but a dataset, and UsageError if no library for
    `client` is installed and can be imported, or if `part` is combined with `against` or `repair`.
    With `repair`, also raises OutputError if another run is working on the dataset, and
    StorageError if the dataset cannot be written.
    """
    began = time.monotonic()
    share = WHOLE if part is None else PartOf.parse(part)
    if share.total > 1 and (against is not None or repair is not None):
        raise UsageError(
            "a dataset is repaired, or compared with its source, by a single process",
            found=f"--part {share} with --{'repair' if against is None else 'against'}",
            fix="leave --part out",
        )
    with watched(progress) as monitor, contextlib.ExitStack() as ending:
        ending.enter_context(fs.using(storage_options, path, against, metadata, repair))
        found = fs.source(path)
        if isinstance(found, RemotePath):  # requests each byte once, if a shard fits in the cache
            found = found.through(Pages(MemoryCache()))
        run = _Run(found, Meter(monitor), share)
        ending.callback(run.close)
        run.open()
        if repair is not None:
            ending.enter_context(run.begin_repair(repair, metadata, transform))
            run.open()  # again, as another run may have ended before this one locked it out
        # Sources and libraries are opened before the checks, as they may be missing.
        groups = [] if against is None else run.open_source(against, metadata)
        clients = run.find_clients() if client else []
        run.check()
        if repair is not None:
            run.repair()
        run.check_values(decode)
        run.compare(groups, clients)
        return run.report(time.monotonic() - began)


class _Run:
    """One verification: its parts, and the findings that belong to no part."""

    def __init__(self, path: Path, meter: Meter, share: PartOf) -> None:
        self._path = path
        self._share = share
        self._meter = meter
        self._first = Findings()  # reported before those of the parts: manifests
        self._above = Findings()  # on files of the folder of splits itself
        self._last = Findings()  # reported after those of the parts: comparison with a source
        self._parts: list[CheckedPart] = []
        self._format: str | None = None
        self._common: tuple[File, ...] = ()  # files of the folder of splits itself, to check
        self._common_damage: list[File] = []
        self._kind = CHECKSUM  # the kind of their checksums
        self._clients: dict[str, ClientReport] = {}
        self._notes: list[str] = []  # about libraries, and about the store
        self._repair: Repair | None = None

    def open(self) -> None:
        """Find the datasets at the path; a damaged manifest is recorded as a problem."""
        self._first, self._parts = Findings(), []
        self._find()
        for path in {self._path, *(part.dataset.place for part in self._parts if part.manifest)}:
            if manifests.has_manifest(path):
                self._check_manifest(path)

    def _check_manifest(self, path: Path) -> None:
        """Record a manifest that says what was written, but in other bytes."""
        try:
            written = manifests.as_written(path)
        except (ShardkitError, ValueError, KeyError):  # it cannot be read, which was recorded
            return
        if written is not None:
            self._first.add(
                DamagedError(
                    "the manifest has changed since it was written, though it says the same",
                    path=manifests.manifest_path(path),
                )
            )

    def _find(self) -> None:
        manifest = None
        if manifests.has_manifest(self._path):
            try:
                manifest = manifests.load_any(self._path)
            except ShardkitError as problem:
                self._first.add(problem)
                return
        if isinstance(manifest, Manifest) and not self._path.exists():
            self._add_part("", open_described(self._path))  # its only file is missing
        elif isinstance(manifest, Splits):
            self._format = manifest.format
            self._open_splits(manifest)
        else:
            self._open_one()

    def _open_one(self) -> None:
        try:
            datasets = [*open_splits(self._path).items()]
        except (UsageError, FormatError):
            raise
        except ShardkitError as problem:
            datasets = [("", dataset) for dataset in self._open_singly(problem)]
        for name, dataset in datasets:
            self._add_part(name, dataset)
        incomplete = without_manifest(self._path, [dataset for _, dataset in datasets])
        if incomplete is not None:
            self._first.add(incomplete)

    def _add_part(self, name: str, dataset: Dataset) -> None:
        before = sum(part.dataset.shards for part in self._parts)
        self._parts.append(CheckedPart(name, dataset, self._share, before))

    def _open_singly(self, problem: ShardkitError) -> list[Dataset]:
        """The shards of other tools that can be opened; records the problems of the others."""
        singles = []
        if self._path.is_dir() and not manifests.has_manifest(self._path):
            names = sorted(path for path in self._path.iterdir() if path.name[0] != ".")
            singles = [path for path in names if format_of(path)]
        datasets = []
        for single in singles:
            try:
                datasets.append(open_dataset(single))
            except ShardkitError as error:
                self._first.add(error)
        if len(datasets) == len(singles):  # the problem concerns the whole folder
            self._first.add(problem)
        return datasets

    def _open_splits(self, splits: Splits) -> None:
        errors = 0
        self._common = splits.files if self._share.number == 1 else ()
        self._kind = splits.checksum
        for name, samples in splits.splits.items():
            folder = self._path / name
            try:
                if not manifests.has_manifest(folder):
                    raise DamagedError(
                        "the dataset of a split is missing",
                        path=folder,
                        expected=f"{samples:,} samples",
                    )
                manifest = manifests.load(folder)
                self._add_part(name, open_dataset(folder))
            except ShardkitError as problem:
                self._first.add(problem)
                continue
            errors += manifest.errors
            if (splits.format, samples) != (manifest.format, manifest.samples):
                self._first.add(
                    DamagedError(
                        "a split does not match the manifest of the folder above it",
                        path=folder,
                        expected=f"{samples:,} samples as {splits.format}",
                        found=f"{manifest.samples:,} samples as {manifest.format}",
                    )
                )
        if errors != splits.errors and len(self._parts) == len(splits.splits):
            self._first.add(
                DamagedError(
                    "the number of samples that the splits dropped differs from their manifest",
                    path=manifests.manifest_path(self._path),
                    expected=f"{splits.errors:,}",
                    found=f"{errors:,}",
                )
            )

    def begin_repair(
        self,
        source: Against,
        metadata: str | os.PathLike[str] | None,
        transform: str | Callable[..., Any] | None,
    ) -> Repair:
        """Return the repair, a context in which other runs are locked out."""
        from shardkit.verification.repair import Repair

        every = [part.dataset for part in self._parts]
        self._repair = Repair(self._path, every, source, metadata, transform, self._meter)
        return self._repair

    def repair(self) -> None:
        """Repair the damage that was found, and check the repaired files again."""
        assert self._repair is not None
        files = [*self._common_damage]
        files += [file for part in self._parts for _, file in part.damaged]
        self._meter.start("repairing", sum(file.bytes for file in files), "bytes")
        if self._repair.run(self._parts, self._common_damage, self._kind):
            self._meter.skipped.clear()
            for part in self._parts:
                part.dataset.close()
                part.dataset.forget_versions()
            self.check("reading again", files)

    def open_source(self, against: Against, metadata: str | os.PathLike[str] | None) -> list[Group]:
        """Return the groups to compare."""
        from shardkit.verification.groups import groups

        parts = self._parts
        return groups(self._path, parts, against, self._last, metadata) if parts else []

    def check(self, doing: str = "reading", files: Sequence[File] | None = None) -> None:
        """Check files, shards, counts and keys. `files` are those that are read, if not all."""
        files = self._all_files() if files is None else files
        total = sum(file.bytes for file in files)
        if total:
            self._meter.start(doing, total, "bytes")
        self._above = Findings()
        found = find_damage(self._path, self._common, self._kind, self._meter)
        self._common_damage = [file for file, problem in found if is_damage(problem)]
        for _, problem in found:
            self._above.add(problem)
        for part in self._parts:
            check(part, self._meter)
        if isinstance(self._path, RemotePath) and not self._path.store.lists:
            self._notes.append("a web server has no listings: extra shards cannot be detected")
        self._meter.report(now=True)

    def _all_files(self) -> list[File]:
        """Return the files to check, as listed in the manifests."""
        return [*self._common, *(file for part in self._parts for file in part.files)]

    def check_values(self, decode: bool) -> None:
        """Check all values, if requested or if there are no checksums."""
        parts = [part for part in self._parts if decode or part.manifest is None]
        if not parts:
            return
        samples = sum(part.dataset.extent(shard)[0] for part in parts for shard in part.readable)
        self._meter.start("decoding" if decode else "reading", samples, "samples")
        for part in parts:
            check_values(part, self._meter, decode=decode)
        self._meter.report(now=True)

    def find_clients(self) -> list[Client]:
        """Return the libraries to compare with."""
        from shardkit.verification.client import ClientReport, importable, installed_clients

        clients, notes = importable(installed_clients(self._parts))
        self._notes += notes
        self._clients = {client.name: ClientReport(found) for client, found in clients.items()}
        return list(clients)

    def compare(self, groups: Sequence[Group], clients: Sequence[Client]) -> None:
        """Compare with sources, and with what libraries read."""
        if groups:
            from shardkit.verification.compare import compare

            for group in groups:
                self._meter.start("comparing", *group.extent)
                compare(group, self._last, self._meter)
        if clients:
            from shardkit.verification.client import compare_client

            total = sum(part.samples for part in self._parts)
            for client in clients:
                self._meter.start(f"reading with {client.name}", total, "samples")
                for part in self._parts:
                    compare_client(part, client, self._clients[client.name], self._meter)
        self._meter.report(now=True)

    def close(self) -> None:
        for part in self._parts:
            part.dataset.close()

    def report(self, seconds: float) -> VerifyReport:
        every = [self._first, self._above, *(part.findings for part in self._parts), self._last]
        notes = [note for findings in every for note in findings.notes] + self._notes
        checksums = all(part.manifest is not None for part in self._parts)
        if not checksums:
            notes.append("there is no manifest with checksums: every sample was read instead")
        unread = sum(part.dataset.unread for part in self._parts if part.manifest is None)
        if unread:
            notes.append(f"{counted(unread, 'byte')} after the last samples are not samples")
        formats = [part.dataset.format for part in self._parts]
        ours = self._all_files()
        third_party = sum(len(part.numbers) for part in self._parts if part.manifest is None)
        if self._share.total > 1:
            notes += _left_to_others(self._share, self._parts)
        return VerifyReport(
            path=str(self._path),
            format=self._format or next(iter(formats), None),
            samples=sum(part.samples for part in self._parts),
            shards=sum(len(part.numbers) for part in self._parts),
            files=len(ours) + third_party,
            bytes=sum(file.bytes for file in ours) - sum(self._meter.skipped),
            problems=[problem for findings in every for problem in findings.problems()],
            notes=notes,
            clients=self._clients,
            seconds=round(seconds, 3),
            part=str(self._share) if self._share.total > 1 else None,
            repair=None if self._repair is None else self._repair.report,
            checksums=checksums,
        )


def _left_to_others(share: PartOf, parts: list[CheckedPart]) -> list[str]:
    """Notes on what a part does not check."""
    shards = sum(part.dataset.shards for part in parts)
    notes = [f"part {share} of {counted(shards, 'shard')}: the other parts check the others"]
    if share.number > 1:
        notes.append("part 1 checks what belongs to no shard: lists, and additional shards")
    if any(len(part.numbers) < part.dataset.shards for part in parts):
        notes.append(
            "keys in shards of different parts, and the number of values of each field, are"
            " compared only without --part"
        )
    return notes
