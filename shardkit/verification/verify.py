"""`shardkit.verify`: every step in its order, and the report."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit import manifest as manifests
from shardkit import storage
from shardkit.dataset import Dataset
from shardkit.errors import DamagedError, FormatError, ShardkitError, UsageError
from shardkit.formats import format_of
from shardkit.incomplete import without_manifest
from shardkit.manifest import File, Splits
from shardkit.opening import open_dataset, open_splits
from shardkit.page_cache import MemoryCache
from shardkit.pages import Pages
from shardkit.pieces import CHECKSUM
from shardkit.remote.path import RemotePath
from shardkit.verification.files import check_files
from shardkit.verification.samples import check_values
from shardkit.verification.shards import CheckedPart, check
from shardkit.verification.work import Findings, Meter, Monitor

if TYPE_CHECKING:
    from shardkit.verification.client import Client, ClientReport
    from shardkit.verification.groups import Against, Group


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found. The dataset is `sound` if there are no problems."""

    path: str
    format: str | None  # None where the manifest is too damaged to say
    samples: int  # that the manifest or the shards announce
    shards: int
    files: int
    bytes: int  # that were read to compare checksums
    problems: list[ShardkitError] = field(default_factory=list)  # by shard, then by position
    notes: list[str] = field(default_factory=list)
    clients: dict[str, ClientReport] = field(default_factory=dict)  # by the name of the library
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: all of it, of values that JSON can hold."""
        problems = [problem.to_dict() for problem in self.problems]
        clients = {name: report.to_dict() for name, report in self.clients.items()}
        return {**self.__dict__, "sound": self.sound, "problems": problems, "clients": clients}


def verify(
    path: str | os.PathLike[str],
    against: Against | None = None,
    *,
    metadata: str | os.PathLike[str] | None = None,
    decode: bool = False,
    client: bool = False,
    monitor: Monitor | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Check that a dataset is as it was written: find every problem, not only the first.

    Every file is read and compared with its checksum in the manifest; shards, counts and keys are
    compared with what the manifest says. `decode` reads every value as well, and decodes every
    image. `against` compares every sample with what the dataset was made of, given as to
    `convert`, or with a dataset of any format; `metadata` is the table that the conversion was
    given. `client` compares every sample with what the format's own library reads. Shards that
    others made have no checksums: all their samples are read. `storage_options` are as in
    `shardkit.open`.

    Raises NotFoundError, FormatError for anything but a dataset, and UsageError where no library
    for `client` is installed and can be imported. Damage is reported, not raised.
    """
    began = time.monotonic()
    with storage.using(storage_options, path, against, metadata):
        found = storage.source(path)
        if isinstance(found, RemotePath):  # each byte is requested once, if a shard has room in it
            found = found.through(Pages(MemoryCache()))
        run = _Run(found, Meter(monitor))
        run.open()
        compared = run.open_source(against, metadata) if against is not None else []
    clients = run.find_clients() if client else []
    try:
        run.check()
        run.check_values(decode)
        run.compare(compared)
        run.compare_clients(clients)
    finally:
        run.close()
    return run.report(time.monotonic() - began)


class _Run:
    """One verification: its parts, and what was found beside them."""

    def __init__(self, path: Path, meter: Meter) -> None:
        self._path = path
        self._meter = meter
        self._first = Findings()  # before all parts: manifests
        self._last = Findings()  # after them: what only a source tells
        self._parts: list[CheckedPart] = []
        self._format: str | None = None
        self._files: tuple[File, ...] = ()  # of a folder of splits itself
        self._kind = CHECKSUM  # of their checksums
        self._clients: dict[str, ClientReport] = {}
        self._notes: list[str] = []  # on libraries, and on the store

    def open(self) -> None:
        """Find the datasets at the path; a damaged manifest is a problem like any other."""
        manifest = None
        if manifests.has_manifest(self._path):
            try:
                manifest = manifests.load_any(self._path)
            except ShardkitError as problem:
                self._first.add(problem)
                return
        if manifest is not None and not self._path.exists():
            self._format = manifest.format
            self._first.add(
                DamagedError("the only file of the dataset is missing", path=self._path)
            )
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
        self._parts += [CheckedPart(name, dataset) for name, dataset in datasets]
        incomplete = without_manifest(self._path, [dataset for _, dataset in datasets])
        if incomplete is not None:
            self._first.add(incomplete)

    def _open_singly(self, problem: ShardkitError) -> list[Dataset]:
        """The shards in a foreign folder that can be opened; problems of others are noted."""
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
        if len(datasets) == len(singles):  # the problem is of the whole folder
            self._first.add(problem)
        return datasets

    def _open_splits(self, splits: Splits) -> None:
        errors = 0
        self._files, self._kind = splits.files, splits.checksum
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
                self._parts.append(CheckedPart(name, open_dataset(folder)))
            except ShardkitError as problem:
                self._first.add(problem)
                continue
            errors += manifest.errors
            said, found = (splits.format, samples), (manifest.format, manifest.samples)
            if said != found:
                self._first.add(_other_split(folder, said, found))
        if errors != splits.errors and len(self._parts) == len(splits.splits):
            self._first.add(
                DamagedError(
                    "the splits have not dropped as many samples as their common manifest says",
                    path=manifests.manifest_path(self._path),
                    expected=f"{splits.errors:,}",
                    found=f"{errors:,}",
                )
            )

    def open_source(self, against: Against, metadata: str | os.PathLike[str] | None) -> list[Group]:
        """What to compare; opened before the work, as the path may be wrong."""
        from shardkit.verification.groups import groups

        if not self._parts:
            return []
        return groups(self._path, self._parts, against, self._last, metadata)

    def check(self) -> None:
        """Files, shards, counts, keys."""
        total = sum(file.bytes for file in self._all_files())
        if total:
            self._meter.start("reading", total, "bytes")
        for problem in check_files(self._path, self._files, self._kind, self._meter):
            self._first.add(problem)
        for part in self._parts:
            check(part, self._meter)
        if isinstance(self._path, RemotePath) and not self._path.store.lists:
            self._notes.append("a web server has no listings: additional shards are not found")
        self._meter.report(now=True)

    def _all_files(self) -> list[File]:
        """Those that manifests name."""
        return [*self._files, *(file for part in self._parts for file in part.files)]

    def check_values(self, decode: bool) -> None:
        """All values, if asked for, or where there are no checksums."""
        parts = [part for part in self._parts if decode or part.manifest is None]
        if not parts:
            return
        samples = sum(part.dataset.extent(shard)[0] for part in parts for shard in part.readable)
        self._meter.start("decoding" if decode else "reading", samples, "samples")
        for part in parts:
            check_values(part, self._meter, decode=decode)
        self._meter.report(now=True)

    def compare(self, compared: list[Group]) -> None:
        """With the source, if there is one."""
        if not compared:
            return
        from shardkit.verification.compare import compare

        for group in compared:
            self._meter.start("comparing", *group.extent)
            compare(group, self._last, self._meter)
        self._meter.report(now=True)

    def find_clients(self) -> list[Client]:
        """The libraries to compare with; found before the work, as one may be missing."""
        from shardkit.verification.client import ClientReport, importable, installed_clients

        clients, notes = importable(installed_clients(self._parts))
        self._notes += notes
        self._clients = {client.name: ClientReport(found) for client, found in clients.items()}
        return list(clients)

    def compare_clients(self, clients: list[Client]) -> None:
        """With what these libraries read."""
        if not clients:
            return
        from shardkit.verification.client import compare

        for client in clients:
            total = sum(len(part.dataset) for part in self._parts)
            self._meter.start(f"reading with {client.name}", total, "samples")
            for part in self._parts:
                compare(part, client, self._clients[client.name], self._meter)
        self._meter.report(now=True)

    def close(self) -> None:
        for part in self._parts:
            part.dataset.close()

    def report(self, seconds: float) -> VerifyReport:
        every = [self._first, *(part.findings for part in self._parts), self._last]
        notes = [note for findings in every for note in findings.notes] + self._notes
        if any(part.manifest is None for part in self._parts):
            notes.append("there is no manifest with checksums: every sample was read instead")
        formats = [part.dataset.format for part in self._parts]
        ours = self._all_files()
        foreign = sum(part.dataset.shards for part in self._parts if part.manifest is None)
        return VerifyReport(
            path=str(self._path),
            format=self._format or next(iter(formats), None),
            samples=sum(len(part.dataset) for part in self._parts),
            shards=sum(part.dataset.shards for part in self._parts),
            files=len(ours) + foreign,
            bytes=sum(file.bytes for file in ours) - sum(self._meter.skipped),
            problems=[problem for findings in every for problem in findings.problems()],
            notes=notes,
            clients=self._clients,
            seconds=round(seconds, 3),
        )


def _other_split(folder: Path, said: tuple[str, int], found: tuple[str, int]) -> DamagedError:
    return DamagedError(
        "a split is not the dataset that the manifest above it names",
        path=folder,
        expected=f"{said[1]:,} samples as {said[0]}",
        found=f"{found[1]:,} samples as {found[0]}",
        fix="copy both again from where they are whole, or convert again",
    )
