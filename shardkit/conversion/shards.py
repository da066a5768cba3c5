"""Samples -> shards in a folder, closed at their limit; with what the manifest says of them."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit import storage
from shardkit.codecs.image import NotAnImageError, unusable
from shardkit.codecs.media import length_of
from shardkit.conversion.stats import Stats
from shardkit.errors import FormatError, SampleError
from shardkit.formats import file_name
from shardkit.formats.base import Format, ShardSpec, ShardWriter
from shardkit.manifest import FOLDER, File, Shard
from shardkit.pieces import checksum_of, listed
from shardkit.remote import store as stores
from shardkit.remote.path import RemotePath
from shardkit.sample import Sample, key_hash
from shardkit.schema import Schema, check_label, length_fields
from shardkit.statistics import Pixels, pixels_of

KEYS_REPEAT = "give every sample a key of its own"
# Files beside the shards, for publishing them.
HASHES = "keys.u64"  # xxh3-64 of every key, in the order of the samples
LENGTH_ROWS = "lengths.u32"  # rows of `manifest.LENGTHS`: of each sample, those of `length_fields`


@dataclass(frozen=True)
class Content:
    """What all shards of a dataset have in common."""

    format: Format
    spec: ShardSpec
    label: str = "label"  # the field with the class
    guessed: Collection[str] = ()  # optional fields that all samples may have
    pixels: Collection[str] = ()  # fields of images whose pixels are counted

    @property
    def schema(self) -> Schema:
        return self.spec.schema

    def schema_of(self, samples: int, stats: Stats) -> Schema:
        """The schema, now that it is known which fields all samples have."""
        if self.format.optional_matters:
            return self.schema
        found = {name for name, sizes in stats.fields.items() if sizes.count == samples}
        return self.schema.with_optional(found.intersection(self.guessed), False)


class ShardSequence:
    """Writes samples into `folder`: shard 0, 1, ... as their limits demand."""

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
        """Without `durable` the shards are not synced: whoever reads them compares checksums.

        With `upload` they go there at once, and do not stay in the folder.

        With `unique_keys` they are not compared: the source cannot repeat one.
        """
        self._folder = folder
        self._content = content
        self._max_samples = max_samples
        self._writer: ShardWriter | None = None
        self._samples = 0  # in the open shard
        self._keys: set[str] = set()  # in the open shard
        self._durable = durable and upload is None
        self._upload = upload
        self._unique_keys = unique_keys
        self.shards: list[Shard] = []
        self.pieces: list[bytes] = []  # of each shard, as `finished_shard` gives them
        self.stats = Stats.of(content.schema, content.label)
        self._key_hashes = array("Q")  # of all shards; a shard's own keys are compared as they are
        self._length_fields = length_fields(content.schema)
        self._lengths = array("I")

    def write(self, sample: Sample) -> None:
        """Add a checked sample. After a SampleError the sequence goes on without that sample."""
        if self._samples == self._max_samples:
            self._close_shard()
        self._check(sample)
        pixels = self._pixels(sample)
        if not self._open_shard().write(sample):
            self._close_shard()
            self._open_shard().write(sample)
        self._samples += 1
        if not self._unique_keys:
            self._keys.add(sample["__key__"])
        self._key_hashes.append(key_hash(sample["__key__"]))
        self._lengths.extend(length_of(sample.get(name)) for name in self._length_fields)
        self.stats.add(sample)
        for name, values in pixels.items():
            self.stats.pixels.setdefault(name, Pixels()).add(values)

    def close(self) -> None:
        """Complete the last shard. All files are on the disk when this returns."""
        if self._writer is not None:
            self._close_shard()
        storage.write_file(self._folder / HASHES, np.array(self._key_hashes, "<u8").tobytes())
        if self._length_fields:
            lengths = np.array(self._lengths, "<u4")
            storage.write_file(self._folder / LENGTH_ROWS, lengths.tobytes())
        self.stats.flush()

    def _check(self, sample: Sample) -> None:
        """What no single sample tells: keys that were used, labels without a class."""
        key = sample["__key__"]
        if key in self._keys:
            raise SampleError("two samples have the same key", key=key, fix=KEYS_REPEAT)
        for field, names in self._content.spec.classes.items():
            check_label(sample, field, names)

    def _pixels(self, sample: Sample) -> dict[str, npt.NDArray[np.uint8]]:
        """The pixels that are to be counted."""
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

    def abandon(self) -> None:
        """Let go of the open shard; whoever owns the folder removes what is in it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def _stem(self) -> str:
        return f"shard-{len(self.shards):06d}"

    def _open_shard(self) -> ShardWriter:
        """The writer of the shard that is open, which begins with this call if none is."""
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
            if self._upload is not None:
                upload_shard(self._folder, shard, self._upload)
            self.shards.append(replace(shard, samples=self._samples))
            self.pieces.append(pieces)
        else:
            for folder in (self._folder, self._folder / FOLDER):
                for path in [*folder.glob(f"{self._stem}*")]:
                    storage.remove(path)
        self._samples = 0
        self._keys.clear()


def upload_shard(folder: Path, shard: Shard, to: RemotePath) -> None:
    """Move the files of a shard to a store, under the same names."""
    stores.together(lambda file: storage.put(folder / file.name, to / file.name), shard.files)
    for file in shard.files:
        storage.remove(folder / file.name)


def finished_shard(
    folder: Path, stem: str, format: str, *, durable: bool = True, alone: bool = True
) -> tuple[Shard, bytes]:
    """The shard whose files in `folder` begin with `stem`, once they are on the disk.

    With it come the digests of its files' pieces, as `manifest.PIECES` has them. Unless it is
    `alone` there, what an only shard has beside it is passed over; a writer's files so named are
    refused.
    """
    own_name = file_name(stem, format)
    lists = own_name.partition("/")[0] + "."  # what an only shard has beside it: manifest, errors
    tops = [*folder.glob(stem + ".*"), *folder.glob(f"{FOLDER}/{stem}.*")]
    own = [
        top
        for top in tops
        if not top.name.startswith(lists) or (top.parent == folder and top.suffix != ".json")
    ]
    if alone and (others := {*tops} - {*own}):
        odd = min(others).relative_to(folder)
        raise FormatError(
            f"the writer of {format} calls a file as manifests and lists beside an only shard are",
            found=str(odd),
            fix=f"make the format call it {odd.parent / stem}.SUFFIX",
        )
    paths = sorted(path for top in own for path in (top, *top.rglob("*")))
    if any(path.parent.name == FOLDER for path in paths):
        paths.append(folder / FOLDER)
    files, digests = {}, {}
    for path in paths:
        if durable:
            storage.sync(path)
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            digests[name] = storage.digests(path)
            files[name] = File(name, path.stat().st_size, checksum_of(digests[name]))
    shard = Shard(files.pop(own_name), 0, tuple(files.values()))
    return shard, b"".join(digests[file.name] for file in shard.files if listed(file.bytes))
