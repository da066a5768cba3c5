"""Samples -> shards in a folder, closed at their limit; with their entries for the manifest."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import NotAnImageError, unusable
from shardkit.codecs.media import is_read, length_of, media_of, milliseconds, unread
from shardkit.codecs.media_info import NotMediaError
from shardkit.conversion.stats import Stats
from shardkit.dataset.statistics import Pixels, pixels_of
from shardkit.errors import FormatError, SampleError
from shardkit.formats import file_name
from shardkit.formats.base import Format, ShardSpec, ShardWriter
from shardkit.metadata.manifest import FOLDER, File, Shard
from shardkit.sample import Sample, key_hash
from shardkit.schema import Audio, Schema, Video, check_label, length_fields
from shardkit.storage import fs
from shardkit.storage.checksums import checksum_of, listed
from shardkit.storage.remote import store as stores
from shardkit.storage.remote.path import RemotePath

KEYS_REPEAT = "give every sample a unique key"
# Files next to the shards, needed for publishing.
HASHES = "keys.u64"  # xxh3-64 of every key, in the order of the samples
LENGTH_ROWS = "lengths.u32"  # rows of `manifest.LENGTHS`: `length_fields` of each sample


@dataclass(frozen=True)
class Content:
    """What all shards of a dataset have in common."""

    format: Format
    spec: ShardSpec
    label: str = "label"  # the field with the class
    guessed: Collection[str] = ()  # optional fields that may turn out to be in all samples
    pixels: Collection[str] = ()  # image fields for which pixel statistics are computed

    @property
    def schema(self) -> Schema:
        return self.spec.schema

    def schema_of(self, samples: int, stats: Stats) -> Schema:
        """Return the final schema, once it is known which fields all samples have."""
        if self.format.optional_changes_encoding:
            return self.schema
        found = {name for name, sizes in stats.fields.items() if sizes.count == samples}
        return self.schema.with_optional(found.intersection(self.guessed), False)


class ShardSequence:
    """Writes samples to shards 0, 1, ... in `folder`, as the limits require."""

    def __init__(
        self,
        folder: Path,
        content: Content,
        max_samples: int | None,
        *,
        durable: bool = True,
        upload: RemotePath | None = None,
        unique_keys: bool = False,
    ) -> None:
        """Without `durable`, shards are not synced: readers have to compare checksums.

        With `upload`, each shard is moved there when it is complete.

        With `unique_keys`, keys are not compared, as the source cannot repeat one.
        """
        self._folder = folder
        self._content = content
        self._max_samples = max_samples
        self._writer: ShardWriter | None = None
        self._samples = 0  # in the open shard
        self._keys: set[str] = set()  # in the open shard
        self._durable = durable and upload is None
        self.upload = upload
        self._unique_keys = unique_keys
        self.shards: list[Shard] = []
        self.pieces: list[bytes] = []  # digests of each shard, as returned by `finished_shard`
        self.stats = Stats.of(content.schema, content.label)
        self._key_hashes = array("Q")  # of all shards; within a shard, the keys are compared
        self._length_fields = length_fields(content.schema)
        self._media = [n for n, kind in content.schema.items() if isinstance(kind, Audio | Video)]
        self._lengths = array("I")

    def write(self, sample: Sample) -> None:
        """Add a checked sample. After a SampleError, writing can go on without that sample."""
        if self._samples == self._max_samples:
            self._close_shard()
        self._check(sample)
        pixels = self._pixels(sample)
        durations = self._durations(sample)
        if not self._open_shard().write(sample):
            self._close_shard()
            self._open_shard().write(sample)
        self._samples += 1
        if not self._unique_keys:
            self._keys.add(sample["__key__"])
        self._key_hashes.append(key_hash(sample["__key__"]))
        for name in self._length_fields:
            length = durations.get(name)
            self._lengths.append(length_of(sample.get(name)) if length is None else length)
        self.stats.add(sample)
        for name, values in pixels.items():
            self.stats.pixels.setdefault(name, Pixels()).add(values)

    def close(self) -> None:
        """Complete the last shard. All files are on the disk when this returns."""
        if self._writer is not None:
            self._close_shard()
        fs.write_file(self._folder / HASHES, np.array(self._key_hashes, "<u8").tobytes())
        if self._length_fields:
            lengths = np.array(self._lengths, "<u4")
            fs.write_file(self._folder / LENGTH_ROWS, lengths.tobytes())
        self.stats.flush()

    def _check(self, sample: Sample) -> None:
        """Raise SampleError for a repeated key, or a label without a class."""
        key = sample["__key__"]
        if key in self._keys:
            raise SampleError("two samples have the same key", key=key, fix=KEYS_REPEAT)
        for field, names in self._content.spec.classes.items():
            check_label(sample, field, names)

    def _pixels(self, sample: Sample) -> dict[str, npt.NDArray[np.uint8]]:
        """Return the decoded pixels of the fields in `Content.pixels`."""
        found = {}
        for name in self._content.pixels:
            if name in sample:
                try:
                    pixels = pixels_of(sample[name], self._content.schema[name])
                except NotAnImageError as error:
                    raise unusable(error, sample["__key__"], name) from error
                if pixels is not None:
                    found[name] = pixels
        return found

    def _durations(self, sample: Sample) -> dict[str, int]:
        """The durations of audio and video in milliseconds, 0 if unknown; checks the headers."""
        found = {}
        for name in self._media:
            if name in sample:
                kind = self._content.schema[name]
                try:
                    info = media_of(kind, sample[name])
                except NotMediaError as error:
                    raise unusable(error, sample["__key__"], name) from error
                found[name] = milliseconds(info)
                if not is_read(info):
                    self.stats.ignored[unread(kind, info.format)] += 1
        return found

    def abandon(self) -> None:
        """Close the open shard without completing it; the folder's owner removes the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def _stem(self) -> str:
        return f"shard-{len(self.shards):06d}"

    def _open_shard(self) -> ShardWriter:
        """Return the writer of the open shard; opens one if there is none."""
        if self._writer is None:
            format = self._content.format
            path = self._folder / file_name(self._stem, format.name)
            self._writer = format.create(path, self._content.spec)
        return self._writer

    def _close_shard(self) -> None:
        writer, self._writer = self._writer, None
        assert writer is not None
        writer.close()
        if self._samples:
            self.stats.encoded.update(writer.encoded)
            self.stats.keys.update(writer.keys)
            name = self._content.format.name
            shard, pieces = finished_shard(self._folder, self._stem, name, durable=self._durable)
            if self.upload is not None:
                upload_shard(self._folder, shard, self.upload)
            self.shards.append(replace(shard, samples=self._samples))
            self.pieces.append(pieces)
        else:
            for folder in (self._folder, self._folder / FOLDER):
                for path in [*folder.glob(f"{self._stem}*")]:
                    fs.remove(path)
        self._samples = 0
        self._keys.clear()


def upload_shard(folder: Path, shard: Shard, to: RemotePath) -> None:
    """Move the files of a shard to a store, under the same names."""
    stores.together(lambda file: fs.put(folder / file.name, to / file.name), shard.files)
    for file in shard.files:
        fs.remove(folder / file.name)


def finished_shard(
    folder: Path, stem: str, format: str, *, durable: bool = True
) -> tuple[Shard, bytes]:
    """Return the shard whose files in `folder` begin with `stem`, after syncing them to the disk.

    Also returns the digests of its files' pieces, as stored in `manifest.PIECES`. The manifest and
    lists of a single-shard dataset have reserved names next to the shard: a writer's file with such
    a name is an error.
    """
    own_name = file_name(stem, format)
    lists = own_name.partition("/")[0] + "."  # prefix of reserved names: manifest, errors
    own = [*folder.glob(stem + ".*"), *folder.glob(f"{FOLDER}/{stem}.*")]
    others = [
        top
        for top in own
        if top.name.startswith(lists) and (top.parent != folder or top.suffix == ".json")
    ]
    if others:
        odd = min(others).relative_to(folder)
        raise FormatError(
            f"the writer of {format} uses a file name reserved for manifests and lists",
            found=str(odd),
            fix=f"make the format call it {odd.parent / stem}.SUFFIX",
        )
    paths = sorted(path for top in own for path in (top, *top.rglob("*")))
    if any(path.parent.name == FOLDER for path in paths):
        paths.append(folder / FOLDER)
    files, digests = {}, {}
    for path in paths:
        if durable:
            fs.sync(path)
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            digests[name] = fs.digests(path)
            files[name] = File(name, path.stat().st_size, checksum_of(digests[name]))
    shard = Shard(files.pop(own_name), 0, tuple(files.values()))
    return shard, b"".join(digests[file.name] for file in shard.files if listed(file.bytes))
