"""Arrays as `.npy` bytes. Nothing is ever unpickled. Layout: NumPy's NEP 1."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def load_array(data: bytes) -> npt.NDArray[Any]:
    """The array in the bytes of a `.npy` file; raises ValueError for anything else."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read_header = _READ_HEADER.get(version)
        if read_header is not None:  # a shape that lies must not make us reserve what it says
            shape, _, dtype = read_header(file)
            said = int(np.prod([dtype.itemsize, *shape], dtype=object))
            if said != len(data) - file.tell():
                raise ValueError(
                    f"{said} bytes of values announced, {len(data) - file.tell()} there"
                )
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    except ValueError:
        raise
    except Exception as error:  # a damaged header is parsed as Python, and fails in many ways
        raise ValueError(f"the header is damaged: {error}") from None


def dump_array(value: npt.NDArray[Any]) -> bytes:
    """An array as the bytes of a `.npy` file."""
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()
