"""Transforms of a chunk without its samples: one call crops all images, without interpreter lock.

What is on the images is moved after that. Values that cannot be transformed in this way, or that
are damaged, are left to `Chain.apply`, which raises their errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardkit.codecs.crop import WINDOW, crop_many
from shardkit.codecs.header import Header
from shardkit.codecs.window import Window
from shardkit.helpers.clock import enter
from shardkit.transforms.draws import Draws
from shardkit.transforms.on_image import MASK, move
from shardkit.transforms.steps import Size

Done = npt.NDArray[np.bool_]

_IMAGE = WINDOW.index("image_width")  # the first column after those of the window


class Encoded(Protocol):
    """Values of different lengths in a buffer: the bytes `sizes[n]` from `starts[n]`; -1: none."""

    data: Any
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Direct:
    """A job of known size, and the table of Normalize after it."""

    fields: tuple[str, ...]  # the image, then what is on it
    kinds: tuple[str, ...]  # of what is on it
    stream: int  # of random numbers
    numbers: int  # how many of them an image needs
    program: npt.NDArray[np.float64]  # as in `crop_many`
    table: npt.NDArray[Any] | None
    size: Size | None  # of images that are pixels; None: they are encoded

    def apply(
        self,
        columns: Mapping[str, Any],
        draws: Draws,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> Done:
        """Transform the images of a chunk, and what is on them; returns which rows are done.

        columns: for the field of the image an `Encoded`, or pixels, uint8 (rows, height, width, 3);
            for each other field a list of its values, None for one that is absent, in which results
            replace them, unless they are in `out`.
        out: an array for each field in `Chain.outputs`, whose rows of the chunk are contiguous.

        The values of rows that are not done, and what is in `out` for them, are undefined: their
        samples must be read again, and go through `Chain.apply`.
        """
        enter("decode")
        image, *others = self.fields
        data, starts, sizes = self._buffer(columns[image])
        drawn = draws.uniform(self.stream, self.numbers)
        done, windows = crop_many(
            data, starts, sizes, drawn, self.program, out[image], table=self.table, size=self.size
        )
        if others:
            self._move([columns[name] for name in others], done, windows.tolist())
        for name, kind in zip(others, self.kinds, strict=True):
            for row in np.flatnonzero(done).tolist() if kind == MASK else ():
                out[name][row] = columns[name][row]
        return done

    def _buffer(self, column: Any) -> tuple[Any, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return a buffer with the images, and where each starts and how many bytes it has."""
        if self.size is None:
            return column.data, column.starts, column.sizes
        pixels, count = np.ascontiguousarray(column), 3 * math.prod(self.size)
        fits = pixels.dtype == np.uint8 and pixels.shape[1:] == (*self.size, 3)
        starts = np.arange(len(pixels), dtype=np.int64) * count
        return pixels, starts, np.full(len(pixels), count if fits else -1, np.int64)

    def _move(self, columns: list[list[Any]], done: Done, windows: list[list[Any]]) -> None:
        for row in np.flatnonzero(done).tolist():
            window, header = windows[row][:_IMAGE], windows[row][_IMAGE:]
            is_complete = all(column[row] is not None for column in columns)
            done[row] = is_complete and not move(
                columns, self.kinds, row, Header("", *header), Window(*window)
            )
