"""Folders of DICOM, NIfTI and `.npz` files, each of which becomes several fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardkit.codecs.media import ARCHIVES, VOLUMES, Kind
from shardkit.codecs.volumes import read_archive, read_volume
from shardkit.errors import SampleError
from shardkit.sample import JsonText
from shardkit.schema import Array, FieldType, Json
from shardkit.sources.files import FilePath, below, read_file
from shardkit.sources.image_folder import Files, ImageFolder


class VolumeFolder(ImageFolder):
    """The DICOM and NIfTI files below `root`: an array, and what its header says of the values."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._left_out: list[str] = []  # threads may append to it

    @classmethod
    def fields_of(cls, media: Kind, root: FilePath, files: Files) -> dict[str, FieldType]:
        return {media.field: Array(), "header": Json()}

    def _read(self, data: bytes) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of a file, and what is left out; raises ValueError if it is damaged."""
        volume = read_volume(data)
        header = JsonText.of(volume.header)
        return {self.media.field: volume.values, "header": header}, volume.left_out

    def _fields(self, data: bytes, path: FilePath) -> dict[str, Any]:
        try:
            found, left_out = self._read(data)
        except ValueError as error:
            raise _unusable(path, error) from error
        self._left_out += left_out
        return {name: value for name, value in found.items() if name in self.schema}

    def left_out(self) -> Mapping[str, int]:
        return Counter(self._left_out)


class ArchiveFolder(VolumeFolder):
    """The `.npz` files below `root`: their arrays, by the names that the first file has."""

    @classmethod
    def fields_of(cls, media: Kind, root: FilePath, files: Files) -> dict[str, FieldType]:
        first = below(root, files.relative(0))
        try:
            return {name: Array() for name in _named(read_archive(read_file(first)), media.field)}
        except ValueError as error:
            raise _unusable(first, error) from error

    def _read(self, data: bytes) -> tuple[dict[str, Any], list[str]]:
        arrays = _named(read_archive(data), self.media.field)
        if missing := [name for name in self.own if name not in arrays]:
            raise ValueError(f"no array {missing[0]!r}, which the first file has")
        return arrays, [
            f"array {n!r:.50} that the first file lacks" for n in arrays.keys() - self.own
        ]


def _unusable(path: FilePath, error: ValueError) -> SampleError:
    return SampleError(
        "the file is damaged, or of a kind that is not read",
        path=path,
        expected="a DICOM file with pixels, a NIfTI file of one part, or an .npz of numbers",
        found=str(error),
        fix="repair it, use --on-error skip, or read the files with your own code and write the"
        " samples with shardkit.create",
    )


def _named(arrays: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the arrays of a file as fields: a single one has the name of all such arrays."""
    return {field: next(iter(arrays.values()))} if len(arrays) == 1 else arrays


FOLDERS: Mapping[Kind, type[ImageFolder]] = {VOLUMES: VolumeFolder, ARCHIVES: ArchiveFolder}
