from typing import Literal, overload

import numpy as np
import numpy.typing as npt

_Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
_Int64s = npt.NDArray[np.int64]

def read_ranges(
    handles: npt.NDArray[np.int32],
    offsets: _Int64s,
    sizes: _Int64s,
    starts: _Int64s,
    out: bytearray | npt.NDArray[np.uint8],
    /,
) -> int: ...
def read(handle: int, length: int, offset: int, size: int, /) -> bytes | None: ...
@overload
def slices(
    data: _Buffer, starts: _Int64s, sizes: _Int64s, text: Literal[False], /
) -> list[bytes | None]: ...
@overload
def slices(
    data: _Buffer, starts: _Int64s, sizes: _Int64s, text: Literal[True], /
) -> list[str | None]: ...
def integers(data: _Buffer, starts: _Int64s, sizes: _Int64s, out: _Int64s, /) -> bool: ...
