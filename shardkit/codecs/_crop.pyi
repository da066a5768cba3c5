from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LIBJPEG_TURBO: str  # its version when this was compiled

def crop_many(
    data: Any,
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    drawn: npt.NDArray[np.float64],
    program: npt.NDArray[np.float64],
    table: npt.NDArray[Any] | None,
    out: npt.NDArray[Any],
    done: npt.NDArray[np.bool_],
    windows: npt.NDArray[np.int32],
    out_size: tuple[int, int],
    size: tuple[int, int],
    profiles: tuple[bytes, ...],
    max_pixels: int,
    /,
) -> None: ...
def crop_jpegs(
    images: Sequence[bytes],
    jobs: npt.NDArray[np.int32],
    out: npt.NDArray[np.uint8] | Sequence[npt.NDArray[np.uint8]],
    done: npt.NDArray[np.bool_],
    max_pixels: int,
    /,
) -> None: ...
def crop_pixels(
    images: Sequence[npt.NDArray[np.uint8]],
    jobs: npt.NDArray[np.int32],
    out: npt.NDArray[np.uint8] | Sequence[npt.NDArray[np.uint8]],
    reduced: int,
    /,
) -> None: ...
def look_up(
    pixels: npt.NDArray[np.uint8], table: npt.NDArray[Any], out: npt.NDArray[Any], /
) -> None: ...
def use_avx2(wanted: bool, /) -> bool: ...
