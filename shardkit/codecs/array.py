"""Arrays as `.npy` bytes. Nothing is ever unpickled. Layout: NumPy's NEP 1."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import DamagedError
from shardkit.storage.blobs import Blobs
from shardkit.storage.byte_source import ByteSource, Table, open_source

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_MAGIC = b"\x93NUMPY"
# NumPy parses a header with `ast`, which takes 50 us and occasionally fails in threads.
_HEADER = re.compile(
    rb"\{'descr': (.+), 'fortran_order': (True|False), 'shape': \(((?:\d+, ?)*\d*)\), ?\}\s*",
    re.DOTALL,
)
_LONGEST_HEADER = 1 << 20  # bytes; room for the types of hundreds of fields
_MAX_WITHOUT_BYTES = 1 << 20  # values of types such as |S0, for which NumPy still allocates
_SIMPLE = re.compile(rb"'([<>|][biufcSUmM]\d+(?:\[\w+\])?)'")


class NpyHeader(NamedTuple):
    """The header of a `.npy` file: the values begin at byte `start`."""

    descr: bytes  # the type, as Python source code
    fortran: bool
    shape: tuple[int, ...]
    start: int

    @property
    def simple(self) -> np.dtype[Any] | None:
        """The type; None for a structured one."""
        match = _SIMPLE.fullmatch(self.descr)
        return np.dtype(match[1].decode()) if match else None


def npy_header(data: bytes) -> NpyHeader | None:
    """Return the header of a `.npy` file; None if it is not in the form that NumPy writes."""
    if data[:6] != _MAGIC or len(data) < 12:
        return None
    start = 10 if data[6] == 1 else 12
    stop = start + int.from_bytes(data[8:start], "little")
    if stop > min(len(data), start + _LONGEST_HEADER):
        return None
    return _parsed(bytes(data[start:stop]), stop)


@lru_cache(256)  # the arrays of a field share one or a few headers
def _parsed(header: bytes, start: int) -> NpyHeader | None:
    match = _HEADER.fullmatch(header)
    if match is None:
        return None
    shape = tuple(int(n) for n in match[3].split(b",") if n.strip())
    return NpyHeader(match[1], match[2] == b"True", shape, start)


def load_array(data: bytes) -> npt.NDArray[Any]:
    """Return the array in the bytes of a `.npy` file; raises ValueError for anything else."""
    header = npy_header(data)
    try:
        dtype = None if header is None else header.simple
    except TypeError as error:  # not a NumPy type
        raise ValueError(str(error)) from error
    if header is None or dtype is None:
        return _by_numpy(data)
    values = len(data) - header.start  # bytes
    _check_size(dtype, header.shape, values)
    count = int(np.prod(header.shape, dtype=object))
    found = np.frombuffer(data, dtype, count, header.start) if values else np.empty(count, dtype)
    return found.copy().reshape(header.shape, order="F" if header.fortran else "C")


def load_column(
    files: Blobs, optional: bool, load: Callable[[bytes], npt.NDArray[Any]] = load_array
) -> npt.NDArray[Any] | list[Any]:
    """Return the arrays in files: as one array if they are alike, otherwise as a list.

    load: returns the array in a file, which ends with its values. optional: files may be absent.
    Single numbers, arrays without dimensions, are always in a list. Raises ValueError like `load`.
    """
    rows = files.rows()
    found = None if rows is None else _stacked(rows, load)
    return files.decoded(load, optional) if found is None else found


def _stacked(
    files: npt.NDArray[np.uint8], load: Callable[[bytes], npt.NDArray[Any]]
) -> npt.NDArray[Any] | None:
    """Return the arrays in files of one size, uint8 (files, bytes), as one array.

    None if the headers before their values differ, or describe an array that is not in C order, or
    big-endian: `load` may have swapped its bytes.
    """
    first = load(files[0].tobytes())
    if not (first.ndim and first.flags.c_contiguous) or first.dtype.str[0] == ">":
        return None
    start = files.shape[1] - first.nbytes
    heads, values = files[:, :start], files[:, start:].copy()
    if not (heads == heads[0]).all() or values[0].tobytes() != first.tobytes():
        return None
    return values.view(first.dtype).reshape(len(files), *first.shape)


def _by_numpy(data: bytes) -> npt.NDArray[Any]:
    """Load arrays of structured types, or with headers in a form that NumPy does not write."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read_header = _READ_HEADER.get(version)
        if read_header is not None:
            shape, _, dtype = read_header(file)
            _check_size(dtype, shape, len(data) - file.tell())
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    except ValueError:
        raise
    except Exception as error:  # parsing a damaged header as Python fails in many ways
        raise ValueError(f"the header is damaged: {error}") from error


def _check_size(dtype: np.dtype[Any], shape: tuple[int, ...], size: int) -> None:
    """Raise ValueError for a damaged shape, before memory is allocated for it."""
    announced = int(np.prod([dtype.itemsize, *shape], dtype=object))
    if announced != size:
        raise ValueError(f"the header says {announced} bytes of values, but there are {size}")
    if not dtype.itemsize and np.prod(shape, dtype=object) > _MAX_WITHOUT_BYTES:
        raise ValueError(f"the shape {shape} is too large for values without bytes")


def load_table(
    path: Path, dtype: np.dtype[np.void], what: str, source: ByteSource | None = None
) -> Table:
    """Return the records of a `.npy` file that shardkit wrote; `source` has its bytes, if given.

    Raises DamagedError for any other file; its message begins with `what`, the name of the table.
    """
    where: dict[str, Any] = {"path": path}
    source = source or open_source(path)
    header = npy_header(source.read(0, min(source.size, _LONGEST_HEADER)))
    if header is None or header.fortran or len(header.shape) != 1:
        raise DamagedError(f"{what} is damaged: it is not a table", **where)
    expected = repr(np.lib.format.dtype_to_descr(dtype))
    written = [expected.encode()]
    with contextlib.suppress(UnicodeEncodeError):
        written.append(expected.encode("latin-1"))  # as NumPy writes if it can
    if header.descr not in written:
        found = header.descr.decode(errors="replace")
        raise DamagedError(
            f"{what} does not match its manifest",
            **where,
            expected=expected,
            found=found[: len(expected) + 100],
        )
    (count,) = header.shape
    size = header.start + count * dtype.itemsize
    if source.size != size:
        raise DamagedError(
            f"{what} is damaged: its size does not match the number of rows in its header",
            **where,
            expected=f"{size:,} bytes",
            found=f"{source.size:,}",
        )
    return Table(source, header.start, count, dtype)


def is_latin(*names: str) -> bool:
    """Return whether NumPy can write these names in a header of the versions 1.0 and 2.0."""
    return all(ord(letter) < 256 for name in names for letter in name)


def table_header(dtype: np.dtype[np.void], count: int) -> bytes:
    """Return what precedes `count` records in a `.npy` file."""
    about = {"descr": dtype.descr, "fortran_order": False, "shape": (count,)}
    if is_latin(*(dtype.names or ())):
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, about)
        return file.getvalue()
    text = f"{repr(about)[:-1]}, }}".encode()  # version 3.0: NumPy has no public function for it
    start = -(-(13 + len(text)) // 64) * 64
    size = (start - 12).to_bytes(4, "little")
    return _MAGIC + b"\3\0" + size + text.ljust(start - 13) + b"\n"


def dump_array(value: npt.NDArray[Any]) -> bytes:
    """Return an array as the bytes of a `.npy` file."""
    file = io.BytesIO()
    names = value.dtype.names
    # Without a version, NumPy warns of the newer one that names of fields need in most scripts.
    version = None if not names or is_latin(*names) else (3, 0)
    np.lib.format.write_array(file, value, version, allow_pickle=False)
    return file.getvalue()
