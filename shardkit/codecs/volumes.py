"""Files of arrays: DICOM, read by pydicom, NIfTI, by nibabel, and `.npz`.

Values are those that are stored, without their slope and intercept, which are in the header.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.array import load_array
from shardkit.codecs.compression import COMPRESSED_BLOCK, decompressed
from shardkit.errors import MissingLibraryError
from shardkit.helpers.extras import extra

_MOST_BYTES = 1 << 31  # of a volume that is not compressed
_GZIP = b"\x1f\x8b"
_DEFLATED = b"1.2.840.10008.1.2.1.99"  # pydicom inflates such files without a bound
_PATIENT = 0x0010  # the group of the elements about the patient
# The elements that are kept: how pixels are to be understood, and nothing about a person.
_KEPT = (
    *("Modality", "BodyPartExamined", "Laterality", "ImageLaterality", "ViewPosition"),
    *("PhotometricInterpretation", "BitsStored", "PixelPaddingValue", "BurnedInAnnotation"),
    *("RescaleSlope", "RescaleIntercept", "RescaleType", "WindowCenter", "WindowWidth"),
    *("PixelSpacing", "ImagerPixelSpacing", "SliceThickness", "SpacingBetweenSlices"),
    *("ImagePositionPatient", "ImageOrientationPatient", "InstanceNumber", "NumberOfFrames"),
    "LossyImageCompression",
)
_PIXELS = ("Rows", "Columns", "SamplesPerPixel", "BitsAllocated")
# Elements that the array itself tells.
_TOLD = {*_PIXELS, "HighBit", "PixelRepresentation", "PlanarConfiguration"}
_TOLD |= {"PixelData", "FloatPixelData", "DoubleFloatPixelData"}
_GROUPS = {"SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"}


class Volume(NamedTuple):
    """An array with the dtype and shape of the file, and what is left of its header.

    left_out: what is not kept, an item for each, worded to follow a number.
    """

    values: npt.NDArray[Any]
    header: dict[str, Any]
    left_out: list[str]


def read_volume(data: bytes) -> Volume:
    """Read a DICOM or NIfTI file. Raises ValueError for anything else, and MissingLibraryError."""
    try:
        return _dicom(data) if data[128:132] == b"DICM" else _nifti(data)
    except (ValueError, MemoryError, ImportError, MissingLibraryError):
        raise
    except Exception as error:  # both libraries raise any exception on damaged data
        raise ValueError(f"{type(error).__name__}: {error}"[:500]) from error


def _check_bytes(shape: tuple[int, ...], itemsize: float) -> int:
    size = math.ceil(math.prod(map(int, shape)) * itemsize)
    if size > _MOST_BYTES or min(shape) < 1:
        words = " x ".join(map(str, shape))
        raise ValueError(f"values of {words}, {size:,} bytes; at most {_MOST_BYTES:,} are read")
    return size


def _in_order(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values in C order, and little-endian as of most files, to be stacked in batches."""
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


# --- DICOM ---------------------------------------------------------------------------------------


def _dicom(data: bytes) -> Volume:
    with extra("dicom", "a DICOM file"):
        from pydicom import dcmread
        from pydicom.datadict import keyword_for_tag
        from pydicom.pixels.decoders.base import get_decoder
    if _DEFLATED in data[:4096]:
        raise ValueError("a deflated DICOM file: write it with another transfer syntax")
    dataset = dcmread(io.BytesIO(data))
    if "Rows" not in dataset:
        raise ValueError("a DICOM file without pixels")
    rows, columns, samples, bits = (int(dataset.get(name) or 1) for name in _PIXELS)
    frames = int(dataset.get("NumberOfFrames") or 1)
    _check_bytes((frames, rows, columns, samples), max(bits, 8) / 8)  # single bits become bytes
    if dataset.get("PhotometricInterpretation") == "PALETTE COLOR":
        raise ValueError("a palette of colours: apply it with pydicom.pixels.apply_color_lut")
    syntax = dataset.file_meta.TransferSyntaxUID
    decoder = get_decoder(syntax)
    if not decoder.is_available:
        raise MissingLibraryError(
            f"DICOM with {syntax.name} needs decoders that pydicom does not find",
            fix="pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg",
        )
    values, made = decoder.as_array(dataset)
    header = {name: _plain(dataset[name].value) for name in _KEPT if name in dataset}
    header["PhotometricInterpretation"] = str(made["photometric_interpretation"])  # YBR becomes RGB
    return Volume(_in_order(values), header, [*_left_out(dataset.keys(), keyword_for_tag)])


def _plain(value: Any) -> Any:
    """Return a value of an element as JSON."""
    if value is None or isinstance(value, str):
        return None if value is None else str(value)
    if hasattr(value, "__iter__"):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, int) else float(value)


def _left_out(tags: Iterable[Any], keyword_of: Callable[[Any], str]) -> Iterator[str]:
    for tag in tags:
        name = keyword_of(tag)
        if tag.is_private:
            yield "private DICOM elements"
        elif tag.group == _PATIENT:
            yield "DICOM elements about the patient (PatientName, PatientID, ...)"
        elif name in _GROUPS:
            yield "DICOM functional groups, which may hold the slope and position of each frame"
        elif name not in _KEPT and name not in _TOLD:
            yield "other DICOM elements (times, devices, identifiers, ...)"


# --- NIfTI ---------------------------------------------------------------------------------------


def _nifti(data: bytes) -> Volume:
    with extra("nifti", "a NIfTI file"):
        import nibabel
    data = _inflated(data) if data[:2] == _GZIP else data
    kinds: dict[int, Any] = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
    sizes = {int.from_bytes(data[:4], order) for order in ("little", "big")} & kinds.keys()
    if not sizes:
        raise ValueError("neither DICOM nor NIfTI, by its first bytes")
    # Without a check, which would change numbers that are not plausible.
    header = kinds[sizes.pop()].from_fileobj(io.BytesIO(data), check=False)
    if not header["magic"].tobytes().startswith(b"n+"):
        raise ValueError("a NIfTI header whose values are in another file, or none")
    shape, dtype, start = header.get_data_shape(), header.get_data_dtype(), header.get_data_offset()
    size = _check_bytes(shape, dtype.itemsize)
    if start < 0 or start + size > len(data):
        raise ValueError(f"{len(data):,} bytes instead of {start + size:,}: its end is missing")
    values = np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape, order="F")
    if dtype.names:  # of colours, which become a last dimension
        values = np.ascontiguousarray(values).view(np.uint8).reshape(*shape, len(dtype.names))
    return Volume(_in_order(values), *_nifti_header(header))


def _nifti_header(header: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of a header as JSON, and what is left out: texts and extensions."""
    fields = header.structarr
    texts = [name for name in fields.dtype.names if fields[name].dtype.kind == "S"]
    numbers = {name: fields[name] for name in fields.dtype.names if name not in texts}
    slope, inter = header.get_slope_inter()
    numbers |= {"scl_slope": 1.0 if slope is None else slope, "scl_inter": inter or 0.0}
    numbers |= {"affine": header.get_best_affine()}
    left_out = ["NIfTI texts, which may name a person (descrip, aux_file, ...)"] * sum(
        bool(fields[name].tobytes().strip(b"\0")) for name in texts if name != "magic"
    )
    left_out += ["NIfTI header extensions"] * len(header.extensions)
    return {n: _finite(np.asarray(value).tolist()) for n, value in numbers.items()}, left_out


def _inflated(data: bytes) -> bytes:
    starts = range(0, len(data), COMPRESSED_BLOCK)
    blocks = (data[start : start + COMPRESSED_BLOCK] for start in starts)
    found = bytearray()
    for block in decompressed(blocks, "gz"):
        found += block
        if len(found) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES:,} bytes, decompressed")
    return bytes(found)


def _finite(value: Any) -> Any:
    """Return numbers as JSON has them: None for NaN and infinities."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if isinstance(value, int) or math.isfinite(value) else None


# --- .npz ----------------------------------------------------------------------------------------


def read_archive(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an `.npz` file by name. Raises ValueError for anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            _check_bytes((sum(member.file_size for member in members) or 1,), 1)
            if not members or not all(each.filename.endswith(".npy") for each in members):
                raise ValueError("members other than arrays, or none")
            found = {each.filename[:-4]: archive.read(each) for each in members}
    except (
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
        EOFError,
        OSError,
        OverflowError,
    ) as error:
        raise ValueError(f"the .npz is damaged: {error}") from error
    return {name: _in_order(load_array(value)) for name, value in found.items()}
