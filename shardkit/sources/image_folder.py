"""A folder of images as a source: `class/.../file`, or flat without labels.

Order and labels match torchvision's ImageFolder (`datasets/folder.py`): classes by name, within a
class the folders by path, within a folder the files by name. Links to folders are followed.
The sidecars of an image `cat.jpg` become fields: `cat.txt` -> text, `cat.json` -> json,
`cat.npy` -> npy, `cat_mask.png`, `cat_seg.png`, `cat_depth.png` -> mask, seg, depth; a
`metadata.csv` or `metadata.jsonl` adds its columns.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.codecs.array import load_array
from shardkit.codecs.media import IMAGES, Kind
from shardkit.errors import SampleError, ShardkitError
from shardkit.helpers.mapped import computed, pieces
from shardkit.options import Selection
from shardkit.sample import JsonText, Sample, stem_of
from shardkit.schema import Array, FieldType, Image, Json, Schema, Text
from shardkit.sources.annotations import ON_IMAGE, Annotations
from shardkit.sources.base import Indices
from shardkit.sources.file_table import FEW, FileSource, FileTable
from shardkit.sources.files import (
    FilePath,
    Planned,
    below,
    changed,
    read_file,
    read_head,
    read_with_status,
)


class Sidecar(NamedTuple):
    """A file beside an image that becomes a field, found by its name: stem plus `ending`."""

    ending: str
    field: str
    type: FieldType


SIDECARS = (
    Sidecar(".txt", "text", Text()),
    Sidecar(".json", "json", Json()),
    Sidecar(".npy", "npy", Array()),
    # As in ADE20K, and as unpacked from WebDataset TAR files; all are mask names.
    *(Sidecar(f"_{name}.png", name, Image()) for name in ("mask", "seg", "depth")),
    *(Sidecar(f".{name}.png", f"{name}.png", Image()) for name in ("mask", "seg", "depth")),
)


def sidecars_of(media: Kind) -> tuple[Sidecar, ...]:
    """Return the sidecars of a kind of media: masks, which come last, are for images only."""
    return tuple(s for s in SIDECARS if media is IMAGES or not isinstance(s.type, Image))


class ImageFolder(FileSource["Files"]):
    """The images below `root`."""

    def __init__(
        self,
        root: FilePath,
        files: Files,
        schema: Schema,
        class_names: Mapping[str, tuple[str, ...]],
        media: Kind = IMAGES,
    ) -> None:
        super().__init__(root, files)
        self.schema = schema
        self.class_names = class_names
        self._labelled = "label" in schema and None not in files.labels
        self.media = media
        self.own: Collection[str] = (media.field,)  # the fields that a file becomes
        self._heads = False  # whether images are read as `Head`
        self._rows: list[tuple[int, ...]] | None = None

    def __getitem__(self, index: int) -> Sample:
        files = self.files
        columns = (files.sizes, files.folder_of, files.times, files.inodes, files.sidecars)
        if self._rows is None and len(files) <= FEW:
            self._rows = list(zip(*(column.tolist() for column in columns), strict=True))
        numbers = [int(c[index]) for c in columns] if self._rows is None else self._rows[index]
        size, folder, time, inode, sidecars = numbers
        name = files.relative(index)
        key = self.key(index)
        try:
            sample: Sample = {"__key__": key}
            if any(name in self.schema for name in self.own):
                planned = Planned(time, inode, files.began)
                path = below(self.root, name)
                head = self._heads and self.media.type is Image
                data = read_head(path, size) if head else read_file(path, size, planned)
                sample.update(self._fields(data, path))
            if self._labelled:
                sample["label"] = files.labels[folder]
            if sidecars:
                self._add_sidecars(sample, name, sidecars, int(files.sidecar_times[index]))
        except ShardkitError as error:
            raise error.located(key=key) from error.__cause__
        if files.metadata is not None:
            row = self._metadata(index, name, sample)
            sample.update({n: v for n, v in row.items() if n in self.schema})
        return sample

    @classmethod
    def fields_of(cls, media: Kind, root: FilePath, files: Files) -> dict[str, FieldType]:
        """Return the fields that each file becomes."""
        return {media.field: media.type()}

    def _fields(self, data: bytes, path: FilePath) -> dict[str, Any]:
        """Return the fields that a file becomes."""
        return {self.media.field: _value(data, path, self.media.field, self.schema)}

    def _metadata(self, index: int, name: str, sample: Sample) -> dict[str, Any]:
        """Return the metadata of a sample, with boxes on the stored image."""
        metadata, image = self.files.metadata, sample.get("image")
        assert metadata is not None
        if not isinstance(metadata, Annotations) or ON_IMAGE.isdisjoint(self.schema):
            return metadata.row(index)
        if image is None and metadata.relative:
            image = read_head(below(self.root, name), int(self.files.sizes[index]))
        return (
            metadata.row(index)
            if image is None
            else metadata.stored_row(index, image, sample["__key__"])
        )

    def _add_sidecars(self, sample: Sample, name: str, sidecars: int, planned: int) -> None:
        """Read the sidecars of an image. Their times are compared if all of them are read."""
        stem, times, unread = stem_of(name), 0, False
        for bit, sidecar in enumerate(SIDECARS):
            if sidecars >> bit & 1:
                if sidecar.field in self.schema:
                    path = below(self.root, stem + sidecar.ending)
                    data, about = read_with_status(path)
                    sample[sidecar.field] = _value(data, path, sidecar.field, self.schema)
                    times ^= mixed_time(about.st_mtime_ns, bit)
                else:
                    unread = True
        if times != planned and not unread:
            raise changed(below(self.root, name), "a later change of a file beside it")

    def narrow(self, selection: Selection) -> None:
        super().narrow(selection)
        self._labelled &= "label" in self.schema

    def skimmed(self) -> ImageFolder:
        found = copy.copy(self)
        found._heads = True
        return found

    def sizes(self) -> npt.NDArray[np.int64]:
        files = self.files
        return computed(
            len(files), np.int64, lambda p: np.maximum(files.sizes[p], 0) + files.sidecar_sizes[p]
        )

    def select(self, indices: Indices) -> ImageFolder:
        files = self.files.select(indices)
        found = type(self)(self.root, files, self.schema, self.class_names, self.media)
        found.own = self.own
        return found

    def fingerprint(self) -> dict[str, str]:
        files = self.files
        digest = xxhash.xxh3_128()
        for folder in files.folders:
            digest.update(os.fsencode(folder) + b"\0")
        files.hash_names(digest)
        bits = files.sidecars
        if bits.max(initial=0) < 256:  # as uint8: existing recipes contain this hash
            bits = computed(len(files), np.uint8, lambda p: files.sidecars[p].astype(np.uint8))
        for numbers in (files.folder_of, files.sizes, bits, files.sidecar_sizes):
            digest.update(np.ascontiguousarray(numbers).data)
        if files.metadata is not None:
            digest.update(files.metadata.fingerprint())
        digest.update(json.dumps([self.classes, files.labels]).encode())
        times = xxhash.xxh3_128()
        for piece in pieces(len(files)):
            times.update((files.times[piece] ^ files.sidecar_times[piece]).data)
        return {"files": digest.hexdigest(), "times": times.hexdigest()}


@dataclass
class Files(FileTable):
    """The images, with their sidecars."""

    columns = (*FileTable.columns, "sidecars", "sidecar_sizes", "sidecar_times")

    sidecars: npt.NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))
    sidecar_sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sidecar_times: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


# --- reading one sample --------------------------------------------------------------------------


def mixed_time(time: int, sidecar: int) -> int:
    """The time of a sidecar, shifted by its number, to combine those of all into one number."""
    return time << sidecar & 2**63 - 1


def _value(data: bytes, path: FilePath, name: str, schema: Schema) -> Any:
    kind = schema[name]
    try:
        if isinstance(kind, Array):
            return load_array(data)
        if not isinstance(kind, Text | Json):
            return data
        text = data.decode("utf-8-sig")
        return JsonText.checked(text) if isinstance(kind, Json) else text
    except (ValueError, RecursionError) as error:
        expected = kind.python + (", UTF-8" if isinstance(kind, Text) else "")
        if isinstance(kind, Array):
            expected = "a complete .npy file of numbers; pickled objects are never loaded"
        raise SampleError(
            "the file of a field is damaged, or of another kind",
            path=path,
            field=name,
            expected=expected,
            found=str(error),
            fix=f"repair it, convert without it: --drop {name}, or use --on-error skip",
        ) from error
