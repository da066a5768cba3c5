"""Transform bounding boxes along with their image: rotate, crop, resize, mirror or pad.

Boxes are (n, 4): x0, y0, x1, y1 in continuous coordinates; pixel i covers i to i + 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.codecs.window import Window

Boxes = npt.NDArray[np.floating]
Points = npt.NDArray[np.float64]  # (..., 2): x, y

# Names of fields that have a row per box, and are filtered along with the boxes.
WITH_BOXES = ("categories", "iscrowd", "difficult", "truncated")
# For each EXIF orientation, the one that turns an upright image back to it.
TURNED_BACK = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}
_LEAST = 1 / 1024  # pixels of width and height; boxes with less left are dropped


def is_boxes(value: object) -> bool:
    """Return whether a value can be boxes: floats of shape (n, 4)."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype in (np.float32, np.float64)
        and value.ndim == 2
        and value.shape[1] == 4
    )


def turned_boxes(boxes: Boxes, orientation: int, size: tuple[int, ...]) -> Boxes:
    """Return boxes on an image of this width and height after it is turned upright as EXIF says."""
    width, height = size
    turned = boxes.copy()
    if orientation in (2, 3, 7, 8):
        turned[:, [0, 2]] = width - boxes[:, [2, 0]]
    if orientation in (3, 4, 6, 7):
        turned[:, [1, 3]] = height - boxes[:, [3, 1]]
    return turned[:, [1, 0, 3, 2]] if orientation >= 5 else turned


def boxes_in(boxes: Boxes, window: Window) -> tuple[Boxes, npt.NDArray[np.bool_]]:
    """Return the boxes on an upright image as seen in a window of it, and which ones are left.

    Boxes are clipped to the part of the window that shows the image, not its margins.
    """
    corners = boxes.astype(np.float64).reshape(-1, 2, 2)
    made = placed(corners, window).reshape(-1, 4)
    low, high = inner_edges(window)
    made[:, :2], made[:, 2:] = made[:, :2].clip(low, high), made[:, 2:].clip(low, high)
    if window.flip:
        made[:, [0, 2]] = window.columns - made[:, [2, 0]]
    kept: npt.NDArray[np.bool_] = np.all(made[:, 2:] - made[:, :2] >= _LEAST, axis=1)
    return made[kept].astype(boxes.dtype), kept


def placed(points: Points, window: Window) -> Points:
    """Return points (..., 2) in coordinates of a window, before mirroring."""
    scale = np.array([window.full_width / window.width, window.full_height / window.height])
    found: Points = (points - [window.x, window.y]) * scale
    return found - [window.left, window.top]


def inner_edges(window: Window) -> tuple[Points, Points]:
    """Return the first and last x, y of a window that show the image, not its margins."""
    inner = window.clipped()
    low = np.array([inner.left - window.left, inner.top - window.top], np.float64)
    return low, low + np.array([inner.columns, inner.rows])
