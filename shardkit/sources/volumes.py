"""Folders of DICOM and NIfTI files: the array of each, and what its header says of the pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from shardkit.codecs.volumes import read_volume
from shardkit.errors import SampleError
from shardkit.sample import JsonText
from shardkit.schema import FieldType, Json
from shardkit.sources.files import FilePath
from shardkit.sources.image_folder import ImageFolder


class VolumeFolder(ImageFolder):
    """The volumes below `root`."""

    also: ClassVar[Mapping[str, FieldType]] = {"header": Json()}

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._left_out: list[str] = []  # threads may append to it

    def _fields(self, data: bytes, path: FilePath) -> dict[str, Any]:
        try:
            volume = read_volume(data)
            found = {self.media.field: volume.values, "header": JsonText.of(volume.header)}
        except ValueError as error:
            raise SampleError(
                "the volume is damaged, or of a kind that is not read",
                path=path,
                expected="a DICOM file with pixels, or a NIfTI file of one part",
                found=str(error),
                fix="repair it, use --on-error skip, or read the files with your own code and"
                " write the samples with shardkit.create",
            ) from error
        self._left_out += volume.left_out
        return {name: value for name, value in found.items() if name in self.schema}

    def left_out(self) -> Mapping[str, int]:
        return Counter(self._left_out)
