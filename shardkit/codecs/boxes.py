"""Where the boxes on an image go when it is turned, cropped, resized, mirrored or padded.

Boxes are (n, 4): x0, y0, x1, y1 in continuous coordinates, pixel i covering i to i + 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.codecs.window import Window

Boxes = npt.NDArray[np.floating]

# What goes with boxes by its name: a row for each.
WITH_BOXES = ("categories", "iscrowd", "difficult", "truncated")
# The orientation that takes an upright image back to one that is stored in an orientation.
TURNED_BACK = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}
_LEAST = 1 / 1024  # pixels of width and height: what has less left of it is gone


def is_boxes(value: object) -> bool:
    """Whether a value can be boxes: floats of shape (n, 4)."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype in (np.float32, np.float64)
        and value.ndim == 2
        and value.shape[1] == 4
    )


def turned_boxes(boxes: Boxes, orientation: int, size: tuple[int, ...]) -> Boxes:
    """Boxes on an image of this width and height as EXIF's orientation turns it upright."""
    width, height = size
    turned = boxes.copy()
    if orientation in (2, 3, 7, 8):
        turned[:, [0, 2]] = width - boxes[:, [2, 0]]
    if orientation in (3, 4, 6, 7):
        turned[:, [1, 3]] = height - boxes[:, [3, 1]]
    return turned[:, [1, 0, 3, 2]] if orientation >= 5 else turned


def boxes_in(boxes: Boxes, window: Window) -> tuple[Boxes, npt.NDArray[np.bool_]]:
    """Boxes on an upright image as they are in a window of it, and which have anything left there.

    They are clipped at the edges of what the window shows of the image: margins hold nothing.
    """
    start = np.array([window.x, window.y] * 2)
    scale = np.array([window.full_width / window.width, window.full_height / window.height] * 2)
    corner = np.array([window.left, window.top] * 2)
    made = (boxes.astype(np.float64) - start) * scale - corner
    inner = window.clipped()
    low = np.array([inner.left - window.left, inner.top - window.top])
    high = low + np.array([inner.columns, inner.rows])
    made[:, :2], made[:, 2:] = made[:, :2].clip(low, high), made[:, 2:].clip(low, high)
    if window.flip:
        made[:, [0, 2]] = window.columns - made[:, [2, 0]]
    kept = (made[:, 2:] - made[:, :2] >= _LEAST).all(axis=1)
    return made[kept].astype(boxes.dtype), kept
