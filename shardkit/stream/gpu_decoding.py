"""Decodes the images of batches on a GPU, by NVIDIA's DALI.

DALI gets encoded images, where each is cut, and to which size that is resized. What they are, and
in which order, is up to `batches`. In tests, the same pipeline runs on the processor.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import simplejpeg
import torch

from shardkit.codecs.crop import WINDOW
from shardkit.errors import MissingLibraryError, UsageError, warn
from shardkit.stream.ranks import default_threads
from shardkit.transforms.direct import Direct, Planned
from shardkit.transforms.steps import Normalize

_DEPTH = 3  # batches that DALI works on at a time
_ENGINE = 0.9  # share of the JPEGs for the GPU's own JPEG engine, where it has one
_SEEN = 1000  # images after which it is said if most are not decoded here
_END_SECONDS = 5.0  # to wait for the thread to end
_SIZE = slice(WINDOW.index("columns"), WINDOW.index("columns") + 2)  # and rows, of a result
_FIX = 'pip install "shardkit[gpu]", for CUDA 13 on Linux, or nvidia-dali-cuda120, for CUDA 12'


def require_dali() -> None:
    """Raise MissingLibraryError if DALI is not installed."""
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        what = 'decode="gpu" needs DALI, which is not installed'
        raise MissingLibraryError(what, found=str(error), fix=_FIX) from error


class Decoding:
    """The images of a batch that is being decoded."""

    def __init__(self, rows: Mapping[str, Sequence[Planned | torch.Tensor]]) -> None:
        """`rows`: for each field, images or results (height, width, 3), in order."""
        self.rows = rows
        self.images: dict[str, torch.Tensor] = {}  # by field: (batch, height, width, 3)
        self.failure: Future[str] = Future()  # done with them; "" if there was none

    def __len__(self) -> int:
        return max(map(len, self.rows.values()))

    @functools.cached_property
    def planned(self) -> list[Planned]:
        """The images that are still encoded, of all fields."""
        return [v for rows in self.rows.values() for v in rows if isinstance(v, Planned)]

    @property
    def others(self) -> list[torch.Tensor]:
        return [v for rows in self.rows.values() for v in rows if isinstance(v, torch.Tensor)]

    @property
    def nbytes(self) -> int:
        """The bytes of all images, and, roughly, of what becomes of them."""
        sizes = [one.data.nbytes + 3 * math.prod(one.window[_SIZE]) for one in self.planned]
        return sum(sizes) + sum(one.nbytes for one in self.others)


class Decoder:
    """Decodes batches in a thread, which ends when nothing refers to the decoder any more."""

    def __init__(
        self,
        fields: Mapping[str, Direct],
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """`stream` is that in which results are written."""
        self._given = fields, device, stream
        self._lock = threading.Lock()
        self._queue: _Queue = SimpleQueue()
        self._process = 0  # in which the thread was started
        self._counts: list[int] | None = [0, 0]  # images so far, encoded and others

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoder, self._given  # another process has a thread of its own

    def decode(self, decoding: Decoding) -> None:
        """Begin to decode a batch, unless nothing refers to it any more when its turn comes."""
        with self._lock:
            self._count(decoding)
            if self._process != os.getpid():
                self._start()
            if self.end.alive:
                self._queue.put(weakref.ref(decoding))
            else:
                _abandon(decoding)

    def _count(self, decoding: Decoding) -> None:
        """Warn once if most images are not decoded here."""
        if self._counts is None:
            return
        self._counts[0] += len(decoding.planned)
        self._counts[1] += len(decoding.others)
        if sum(self._counts) >= _SEEN:
            (planned, others), self._counts = self._counts, None
            if others > planned:
                warn(
                    f'decode="gpu" left {others:,} of the first {others + planned:,} images to the'
                    " processor: it takes upright JPEGs, grey or YCbCr, in sRGB"
                )

    def _start(self) -> None:
        stopped = threading.Event()
        self._queue, self._process = SimpleQueue(), os.getpid()
        # A daemon: at exit, the interpreter joins all others before it calls `_stop`.
        thread = threading.Thread(
            target=_work, args=(self._queue, stopped, *self._given), daemon=True
        )
        thread.start()
        self.end = weakref.finalize(self, _stop, self._queue, stopped, thread)
        _decoders.add(self)


_Queue: TypeAlias = "SimpleQueue[weakref.ref[Decoding] | None]"
_decoders: weakref.WeakSet[Decoder] = weakref.WeakSet()


def stop() -> None:
    """Stop decoding, at exit: before DALI, which was imported earlier, ends its pipelines."""
    for decoder in list(_decoders):
        decoder.end()


def _stop(queue: _Queue, stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    queue.put(None)
    if thread is not threading.current_thread():  # a finalizer may run in any thread
        thread.join(_END_SECONDS)


def _work(queue: _Queue, stopped: threading.Event, *given: Any) -> None:
    """Decode batches as they come, several at a time."""
    pipeline = _Pipeline(*given)
    while not stopped.is_set():
        try:
            reference = queue.get(block=not pipeline.begun)
        except Empty:
            pipeline.finish()
            continue
        decoding = None if reference is None else reference()
        if decoding is not None:
            pipeline.begin(decoding)
        del decoding  # or it would stay in memory until the next one
    pipeline.close()
    while not queue.empty():
        reference = queue.get()
        decoding = None if reference is None else reference()
        if decoding is not None:
            _abandon(decoding)


def _abandon(decoding: Decoding) -> None:
    decoding.failure.set_exception(UsageError("no batch is decoded while the interpreter exits"))


class _Pipeline:
    """DALI's pipeline, and the batches in it. It is made again after it failed."""

    def __init__(
        self, fields: Mapping[str, Direct], device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self._fields, self._device, self._stream = fields, device, stream
        self._kinds = {name: _kind(direct.normalize) for name, direct in fields.items()}
        self._made: Any = None
        self._most = 0  # rows that it was made for
        self.begun: deque[Decoding] = deque()

    def begin(self, decoding: Decoding) -> None:
        """Begin to decode a batch. Waits for another if there are too many."""
        try:
            if not decoding.planned:
                self._write(decoding, None)
                decoding.failure.set_result("")
                return
            while self.begun and (len(decoding) > self._most or len(self.begun) >= _DEPTH):
                self.finish()
            if self._made is None or len(decoding) > self._most:
                self._make(max(len(decoding), self._most))
            self._feed(decoding.rows)
            self._made.schedule_run()
            self.begun.append(decoding)
        except BaseException as error:
            decoding.failure.set_exception(error)
            self._restart()

    def finish(self) -> None:
        """Wait for the batch that was begun first."""
        decoding = self.begun.popleft()
        try:
            self._write(decoding, self._made.share_outputs(self._stream))
            self._made.release_outputs()
            decoding.failure.set_result("")
        except RuntimeError as error:  # a damaged image
            decoding.failure.set_result(str(error) or repr(error))
            self._restart()
        except BaseException as error:
            decoding.failure.set_exception(error)
            self._restart()

    def _restart(self) -> None:
        """Make the pipeline again, for the batches in it: none is left after a failure."""
        begun, self.begun, self._made = self.begun, deque(), None
        for decoding in begun:
            self.begin(decoding)

    def close(self) -> None:
        """Give memory back."""
        while self.begun:
            self.finish()
        if self._made is not None:
            from nvidia.dali.backend import ReleaseUnusedMemory  # type: ignore[attr-defined]

            self._made = None
            if self._device.type == "cuda":
                ReleaseUnusedMemory()

    def _make(self, most: int) -> None:
        self._made, self._most = None, most
        try:
            self._made = made = _pipeline(self._fields, most, self._device)
            # The first call runs as many batches as there are at a time: they have one image.
            for _ in range(_DEPTH):
                self._feed({name: [_nothing()] for name in self._fields})
            made.schedule_run()
            for _ in range(_DEPTH):
                made.share_outputs()
                made.release_outputs()
        except RuntimeError as error:
            self._made = None
            raise UsageError(
                f"DALI does not work on {str(self._device)!r}",
                expected="a GPU with enough free memory, and a driver for the CUDA of DALI",
                found=f"{error}"[-500:],
                fix=f'decode="cpu"; or {_FIX}',
            ) from error

    def _feed(self, every: Mapping[str, Sequence[Planned | torch.Tensor]]) -> None:
        from nvidia.dali.tensors import TensorCPU, TensorListCPU

        for name, rows in every.items():
            planned = [row if isinstance(row, Planned) else _nothing() for row in rows]
            data = TensorListCPU([TensorCPU(row.data, "") for row in planned])
            self._made.feed_input(f"data {name}", data)
            for what, values in _cuts(np.array([row.window for row in planned])).items():
                self._made.feed_input(f"{what} {name}", values)

    def _write(self, decoding: Decoding, outputs: Sequence[Any] | None) -> None:
        """Make the results of a batch: those of DALI, and over these what was made before."""
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for number, (name, rows) in enumerate(decoding.rows.items()):
                kind = self._kinds[name]
                if outputs is None:
                    shape = len(rows), *self._fields[name].result, 3
                    made = torch.empty(shape, dtype=kind, device=self._device)
                else:
                    found = torch.utils.dlpack.from_dlpack(outputs[number].as_tensor())
                    # DALI reuses the GPU's memory without regard to torch's streams.
                    made = found.to(kind, copy=self._stream is not None)
                for row, value in enumerate(rows):
                    if isinstance(value, torch.Tensor):
                        made[row].copy_(value)
                decoding.images[name] = made
        if self._stream is not None:
            self._stream.synchronize()


def _pipeline(fields: Mapping[str, Direct], most: int, device: torch.device) -> Any:
    from nvidia.dali import Pipeline

    on_gpu, threads = device.type == "cuda", default_threads()
    pipeline = Pipeline(
        batch_size=most,
        num_threads=threads - threads // 8,  # reading takes the others
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=_DEPTH,
    )
    with pipeline:
        pipeline.set_outputs(*(_pixels(name, direct, on_gpu) for name, direct in fields.items()))
    pipeline.build()
    return pipeline


def _pixels(name: str, direct: Direct, on_gpu: bool) -> Any:
    """Return the pixels of a field in a pipeline that is being defined."""
    from nvidia.dali import fn, types

    data = fn.external_source(name=f"data {name}", no_copy=True)
    start, shape, begin, end, flip = (fn.external_source(name=f"{n} {name}") for n in _CUTS)
    gpu: dict[str, Any] = {"hw_decoder_load": _ENGINE, "affine": False} if on_gpu else {}
    pixels = fn.decoders.image_slice(
        data, start, shape, device="mixed" if on_gpu else "cpu", output_type=types.RGB,
        adjust_orientation=False,  # DALI sees one in more EXIF data than `crop` does
        normalized_anchor=False, normalized_shape=False, axes=(0, 1), **gpu,
    )  # fmt: skip
    pixels = fn.resize(
        pixels, size=direct.result, roi_start=begin, roi_end=end,
        interp_type=types.INTERP_LINEAR, antialias=True, subpixel_scale=False,
    )  # fmt: skip
    if direct.normalize is None:
        return fn.flip(pixels, horizontal=flip)
    mean, std = ([255 * n for n in of] for of in (direct.normalize.mean, direct.normalize.std))
    return fn.crop_mirror_normalize(  # bfloat16 and float16 are made of its float32
        pixels, mirror=flip, mean=mean, std=std, output_layout="HWC"
    )


def _kind(normalize: Normalize | None) -> torch.dtype:
    kind = getattr(torch, normalize.dtype if normalize else "uint8")
    assert isinstance(kind, torch.dtype)
    return kind


_CUTS = ("start", "shape", "begin", "end", "flip")


def _cuts(windows: Any) -> dict[str, Any]:
    """Return for each window the part that is decoded, and which region of that is resized.

    int32: "start" and "shape" of the part, (n, 2), vertical first, and "flip", (n,). float32:
    "begin" and "end" of the region, in pixels of the part. The part has all that the filter reads
    around the region, but ends where the crop does.
    """
    column = dict(zip(WINDOW, windows.T, strict=True))

    def side(crop: str, length: str, full: str, window: str, count: str) -> tuple[Any, ...]:
        scale = column[length] / column[full]
        start = column[window] * scale
        stop = start + column[count] * scale
        reach = np.maximum(scale, 1) + 1
        first = np.maximum(np.floor(start - reach), 0)
        last = np.minimum(np.ceil(stop + reach), column[length])
        return column[crop] + first, last - first, start - first, stop - first

    top, height, above, below = side("y", "height", "full_height", "top", "rows")
    left, width, before, behind = side("x", "width", "full_width", "left", "columns")
    pairs = (top, left), (height, width), (above, before), (below, behind)
    kinds = np.int32, np.int32, np.float32, np.float32
    both = [np.stack(pair, 1).astype(kind) for pair, kind in zip(pairs, kinds, strict=True)]
    return dict(zip(_CUTS, (*both, column["flip"].astype(np.int32)), strict=True))


@functools.cache
def _nothing() -> Planned:
    """A black image that takes the place of one that is not decoded here."""
    size = 16
    data = simplejpeg.encode_jpeg(np.zeros((size, size, 3), np.uint8))
    window = {"width": size, "height": size, "full_width": size, "full_height": size}
    window |= {"columns": size, "rows": size}
    return Planned(np.frombuffer(data, np.uint8), [window.get(name, 0) for name in WINDOW])
