"""Transforms of a chunk without its samples: one call crops all images, without interpreter lock.

What is on the images is moved after that. Values that cannot be transformed in this way, or that
are damaged, are left to `Chain.apply`, which raises their errors. Images that another decoder makes
into pixels get only a window here: they become `Planned`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.crop import WINDOW, crop_many, windows_of_many
from shardkit.codecs.header import Header
from shardkit.codecs.window import Window
from shardkit.helpers.clock import enter
from shardkit.sample import Sample
from shardkit.storage.blobs import Blobs
from shardkit.transforms.draws import Draws
from shardkit.transforms.on_image import MASK, move
from shardkit.transforms.steps import Normalize, Size

Done = npt.NDArray[np.bool_]

_IMAGE = WINDOW.index("image_width")  # the first column after those of the window


class Planned(NamedTuple):
    """An image that stays encoded, for a decoder of whole batches."""

    data: npt.NDArray[np.uint8]  # its bytes, in the buffer that they were read into
    window: list[int]  # the columns of `crop.WINDOW`


@dataclass(frozen=True)
class Direct:
    """A job of known size, and the table of Normalize after it."""

    fields: tuple[str, ...]  # the image, then what is on it
    kinds: tuple[str, ...]  # of what is on it
    stream: int  # of random numbers
    numbers: int  # how many of them an image needs
    program: npt.NDArray[np.float64]  # as in `crop_many`
    normalize: Normalize | None
    size: Size | None  # of images that are pixels; None: they are encoded
    result: Size

    def apply(
        self,
        columns: MutableMapping[str, Any],
        draws: Draws,
        out: Mapping[str, npt.NDArray[Any]],
    ) -> Done:
        """Transform the images of a chunk, and what is on them; returns which rows are done.

        columns: for the field of the image `Blobs`, or pixels, uint8 (rows, height, width, 3);
            for each other field a list of its values, None for one that is absent, in which results
            replace them, unless they are in `out`.
        out: an array for each field in `Chain.outputs`, whose rows of the chunk are contiguous. If
            the image's is missing, no image is decoded: its column becomes a list of `Planned`.

        The values of rows that are not done, and what is in `out` for them, are undefined: their
        samples must be read again, and go through `Chain.apply`.
        """
        enter("decode")
        image, *others = self.fields
        data, starts, sizes = self._buffer(columns[image])
        drawn = draws.uniform(self.stream, self.numbers)
        given = data, starts, sizes, drawn, self.program
        if image in out:
            table = self.normalize.table if self.normalize else None
            done, windows = crop_many(*given, out[image], table=table, size=self.size)
        else:
            done, windows = windows_of_many(*given, self.result)
            each = zip(starts.tolist(), (starts + sizes).tolist(), windows.tolist(), strict=True)
            columns[image] = [Planned(data[start:stop], window) for start, stop, window in each]
        if others:
            self._move([columns[name] for name in others], done, windows.tolist())
        for name, kind in zip(others, self.kinds, strict=True):
            for row in np.flatnonzero(done).tolist() if kind == MASK else ():
                out[name][row] = columns[name][row]
        return done

    def plan(
        self, samples: Sequence[Sample | None], draws: Draws, out: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Replace the images of samples by `Planned`, where that is possible; see `apply`."""
        image, *others = self.fields
        every = [{} if sample is None else sample for sample in samples]
        values = [sample.get(image) for sample in every]
        columns: dict[str, Any] = {name: [s.get(name) for s in every] for name in others}
        columns[image] = Blobs.of([v if isinstance(v, bytes) else None for v in values])
        for row in np.flatnonzero(self.apply(columns, draws, out)).tolist():
            every[row].update((n, columns[n][row]) for n in self.fields if n not in out)

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
