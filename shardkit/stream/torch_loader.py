"""Streaming into torch: `StreamingDataset` for torch's DataLoader, and the faster `Loader`."""

from __future__ import annotations

import atexit
import copy
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo

from shardkit.errors import UsageError, warn
from shardkit.helpers.clock import DATA, DECODER, enter
from shardkit.helpers.keywords import takes
from shardkit.options import check_choice
from shardkit.stream import dataset as streaming
from shardkit.stream import gpu_decoding, segments
from shardkit.stream import loader as loading
from shardkit.stream.batch_sizes import PLAIN
from shardkit.stream.batches import Allocate, Batch, BatchMaker, FinishedBatch
from shardkit.stream.gpu_decoding import Decoder, Decoding, require_dali
from shardkit.stream.options import LoaderKeywords, StreamKeywords, StreamOptions
from shardkit.stream.schedule import (
    Step,
    StreamProgress,
    invalid_state,
    load_state,
    save_state,
    whole_number,
)
from shardkit.stream.stream import Source, Stream
from shardkit.transforms.transforms import Transforms

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
_FETCHING = "torch.utils.data._utils.fetch"  # the module that fetches samples for a DataLoader
_DEVICES = ["cuda"]  # types of devices for decode="gpu"; tests add the processor
_LATER = "__decoding__"  # in a batch, until it is decoded


class StreamingDataset(streaming.StreamingDataset, IterableDataset[Any]):
    """A dataset for `torch.utils.data.DataLoader`, whose workers share the work.

    With `batch_size=` here and `DataLoader(dataset, batch_size=None, num_workers=n)`, the dataset
    makes the batches, and they do not depend on the number of workers. Without it, the dataset
    yields single samples, and the DataLoader makes each batch from the samples of one worker. Each
    iteration is the next epoch, also with persistent workers. torchdata's StatefulDataLoader can
    save its state and continue from it, with the same number of workers.
    """

    @takes(StreamOptions)
    def __init__(self, source: Source, **options: Unpack[StreamKeywords]) -> None:
        """`source` is a path, an open dataset, or a list of these."""
        super().__init__(source, **options)
        self._epochs = _Epochs(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the `epoch` of the next iteration, also for workers that are already running."""
        super().set_epoch(epoch)
        self._epochs.restart(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._refuse_twice()
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch = self._epochs.begin(_iterator_of(worker) if worker else None)
        return _Position(self, epoch, number, workers)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_twice()  # checked here, as a spawned worker cannot see its parent's frames
        return {**super().__getstate__(), "_epochs": copy.copy(self._epochs)}

    def _refuse_twice(self) -> None:
        """Raise UsageError if Accelerate would split, or a DataLoader batch, a second time."""
        for frame, _ in walk_stack(sys._getframe()):
            module = frame.f_globals.get("__name__")
            iterating = frame.f_code.co_name == "__iter__"
            if module == "accelerate.data_loader" and iterating and self.world().size > 1:
                raise UsageError(
                    "both the StreamingDataset and Accelerate would split the data over the ranks",
                    fix="iterate over a shardkit.torch.Loader, or the DataLoader itself, without"
                    " accelerator.prepare; or let Accelerate split the data:"
                    " StreamingDataset(..., rank=0, world_size=1)",
                )
            fetcher = frame.f_locals.get("self") if module == _FETCHING else None
            if getattr(fetcher, "auto_collation", False) and self.options.batched:
                raise UsageError(
                    "both the StreamingDataset and the DataLoader would make batches",
                    fix="use DataLoader(dataset, batch_size=None, ...), which is faster; or no"
                    " batch_size, global_batch_size or batching in StreamingDataset",
                )


class _Position:
    """One worker's iterator over an epoch, with the state for torchdata's StatefulDataLoader."""

    def __init__(self, dataset: StreamingDataset, epoch: int, worker: int, workers: int) -> None:
        self._dataset = dataset
        self._worker, self._workers = worker, workers
        self._identity = {**dataset.stream.identity, "workers": workers}
        self._start(epoch, StreamProgress(), 0)

    def _start(self, epoch: int, progress: StreamProgress, number: int) -> None:
        self._epoch, self._progress, self._number = epoch, progress, number
        self._made = self._dataset.iterate(epoch, progress, number, self._worker, self._workers)

    def __iter__(self) -> _Position:
        return self

    def __next__(self) -> Any:
        self._number, self._progress, made = next(self._made)
        if not self._dataset.options.batched:  # as views, workers would send their whole batch
            made = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in made.items()}
        stream = self._dataset.stream
        return _tensors(made, stream, stream.transforms)

    def state_dict(self) -> dict[str, Any]:
        state = save_state(self._identity, self._epoch, self._progress)
        return {**state, "number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        schedule = self._dataset.schedule()
        epoch, progress = load_state(state, self._identity, schedule)
        number = whole_number(state, "number")
        if number > schedule.steps(epoch) or schedule.progress(epoch, number) != progress:
            raise invalid_state("number", number, "the number of steps up to this progress")
        self._start(epoch, progress, number)
        self._dataset._epochs.restart(epoch + 1)


class _Epochs:
    """Counts the epochs of one process and of its DataLoaders' workers, persistent or not.

    A table in shared memory has a row for each of the last iterations in workers: a number for the
    iterator of the DataLoader, the number of the iteration of each of its workers, and its epoch.
    The first of these workers writes the row. The last row has the epoch of the next iteration, and
    the number of rows that were written.
    """

    _ROWS = 64

    def __init__(self, epoch: int) -> None:
        table = torch.zeros((self._ROWS + 1, 3), dtype=torch.int64)
        self._table: torch.Tensor = table.share_memory_()  # type: ignore[no-untyped-call]
        self._begun: dict[int, int] = {}  # of each iterator, in this process
        self.restart(epoch)
        _counting.add(self)

    def begin(self, iterator: int | None) -> int:
        """The epoch of the iteration that this process starts; `iterator`: see `_iterator_of`."""
        begun = 0 if iterator is None else self._begun.get(iterator, 0) + 1
        with _locked():
            table = self._table.numpy()
            epoch, rows, _ = table[-1].tolist()
            if iterator is not None:
                self._begun[iterator] = begun
                for *known, of in table[:-1].tolist():
                    if known == [iterator, begun]:
                        return int(of)
                table[rows % self._ROWS] = iterator, begun, epoch
            table[-1, :2] = epoch + 1, rows + 1
        return int(epoch)

    def restart(self, epoch: int) -> None:
        """Make this the epoch of the next iteration."""
        self._table[-1, 0] = epoch

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if _starts_workers():
            return super().__reduce_ex__(protocol)
        return _Epochs, (int(self._table[-1, 0]),)  # another rank or copy counts by itself


_counting: weakref.WeakSet[_Epochs] = weakref.WeakSet()


def _forked() -> None:
    """Let a forked process that is no worker, such as another rank, count by itself."""
    if not _starts_workers():
        for epochs in list(_counting):
            epochs.__init__(int(epochs._table[-1, 0]))  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _starts_workers() -> bool:
    """Return whether this is called while a DataLoader makes its workers."""
    return any(
        frame.f_code.co_name == "__init__" and frame.f_globals["__name__"] in _LOADERS
        for frame, _ in walk_stack(sys._getframe())
    )


def _iterator_of(worker: WorkerInfo) -> int:
    """A number that the workers of one iterator of a DataLoader have in common, and no others.

    Their seed alone would repeat with torch's. They share a semaphore, whose name is known unless
    they were forked, and a pipe, whose number is.
    """
    seed = worker.seed - worker.id
    for frame, _ in walk_stack(sys._getframe()):
        found = frame.f_locals if frame.f_code.co_name == "_worker_loop" else {}
        if "done_event" in found and "data_queue" in found:
            name = found["done_event"]._cond._lock._semlock.name
            pipe = found["data_queue"]._reader.fileno()
            shared = f"{seed} {name or os.fstat(pipe).st_ino}"
            return xxhash.xxh3_64_intdigest(shared.encode()) >> 1 or 1
    return seed  # not a DataLoader of torch or torchdata


@contextmanager
def _locked() -> Iterator[None]:
    """Keep other processes out, as workers of two DataLoaders may begin at the same time."""
    handle = None
    try:
        # Not every system has such locks: the workers of one DataLoader agree anyway.
        with suppress(OSError, AttributeError):
            handle = os.open(__file__, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            with suppress(OSError, AttributeError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile holds it
            os.close(handle)


class Loader(loading.Loader):
    __doc__ = loading.Loader.__doc__ + (  # type: ignore[operator]
        """
    With `to="torch"`, the default, arrays are delivered as tensors, also those in lists, tuples and
    dicts; arrays of text, objects or times stay as they are. Images have shape (batch, 3, height,
    width) and channels_last memory format. uint16, uint32 and uint64 become int64, because torch
    has few operations for them.
    """
    )

    @takes(loading.Loader.__init__)
    def __init__(
        self,
        source: streaming.StreamingDataset | Source,
        *,
        to: str = "torch",
        pin_memory: bool = False,
        device: str | torch.device | None = None,
        decode: str = "cpu",
        **options: Unpack[LoaderKeywords],
    ) -> None:
        """Options for tensors and devices:

        to: "torch" for tensors, or "numpy" for NumPy arrays.
        pin_memory: make batches in page-locked memory, for asynchronous copies to a GPU. Lists,
            padded and packed rows, and what a collate function makes are copied into such memory.
        device: copy batches to this device. Copies to a GPU are asynchronous, from page-locked
            memory.
        decode: "gpu" decodes JPEGs on the GPU that is the device, for fields whose transforms are
            crops and resizes to one size, flips and Normalize. Functions after these get the whole
            batch, (batch, 3, height, width) on the device. Needs `shardkit[gpu]`.
        """
        self.to, self.device = to, None if device is None else _found(device)
        self.decode = decode
        check_choice(self, "to", ("torch", "numpy"))
        check_choice(self, "decode", ("cpu", "gpu"))
        if to == "numpy" and (pin_memory or device is not None):
            raise UsageError('pin_memory and device cannot be used with to="numpy"')
        self._copies = _Copies(self.device) if self.device and self.device.type == "cuda" else None
        self._pinned = pin_memory or self._copies is not None
        if self._pinned and not torch.cuda.is_available():
            warn("there is no GPU: pin_memory has no effect")
            self._pinned = False
        super().__init__(source, **options)
        self.dataset = _LoaderDataset.of(self.dataset)
        self._decoder: Decoder | None = None
        if decode == "gpu":
            self._decode_batches()

    def _decode_batches(self) -> None:
        """Leave images encoded, for a decoder of whole batches. Raises UsageError."""
        stream = self.dataset.stream
        if self.device is None or self.device.type not in _DEVICES:
            found = f"device={None if self.device is None else str(self.device)!r}"
            what = 'decode="gpu" gives batches on a GPU'
            raise UsageError(what, expected='device="cuda"', found=found)
        for name, given in ("collate", stream.own_collate), ("cache", stream.samples.decoded):
            if given:
                raise UsageError(
                    f'decode="gpu" decodes whole batches, which {name}= does not fit',
                    fix=f"leave {name}= out, or decode on the processor",
                )
        require_dali()
        _watch_exit()
        self._later = stream.transforms.for_batches()
        copies = None if self._copies is None else self._copies.stream
        self._decoder = Decoder(self._later.planned, self.device, copies)

    # Attributes of a DataLoader that other libraries read: Lightning to set the epoch; Accelerate's
    # skip_first_batches (with which transformers' Trainer resumes), to skip batches.

    num_workers = 0
    prefetch_factor = None

    @property
    def sampler(self) -> _BatchSampler:
        """A sampler of an epoch's batches."""
        return _BatchSampler(self)

    batch_sampler = sampler

    @staticmethod
    def collate_fn(batch: Batch) -> Batch:
        """Return the batch unchanged."""
        return batch

    @property
    def settings(self) -> dict[str, Any]:
        """The options of the loader itself, without those of its dataset."""
        own = {"to": self.to, "pin_memory": self._pinned, "device": self.device}
        return super().settings | own | {"decode": self.decode}

    def _memory(self) -> Allocate:
        return _page_locked if self._pinned else super()._memory()

    def _dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return _countable(dtype) if self.to == "torch" else super()._dtype(dtype)

    def _convert(self, batch: Batch) -> Batch:
        if self.to == "numpy":
            return super()._convert(batch)
        encoded = [n for n in self._transforms().planned if isinstance(batch[n], list)]
        some = {name: value for name, value in batch.items() if name not in encoded}
        tensors = _tensors(some, self.dataset.stream, self._transforms())
        if self._pinned:  # what a collate function, or rows of several samples, made elsewhere
            tensors = _each(tensors, torch.Tensor, _in_locked)
        if self._copies is not None:
            tensors = self._copies.begun(tensors)
        elif self.device is not None:
            tensors = _moved(tensors, self.device)
        if not encoded:
            return tensors
        made = {name: tensors.get(name) for name in batch}  # in the same order
        return made | tensors | {_LATER: self._begun({name: batch[name] for name in encoded})}

    def _transforms(self) -> Transforms:
        return super()._transforms() if self._decoder is None else self._later

    def _begun(self, encoded: Batch) -> Decoding:
        """Start to decode images."""
        assert self._decoder is not None
        given = {}
        for name, rows in encoded.items():
            bfloat16 = name in self._later.bfloat16_fields
            tensor = partial(_tensor, image=False, bfloat16=bfloat16)
            given[name] = [tensor(v) if isinstance(v, np.ndarray) else v for v in rows]
        decoding = Decoding(given)
        self._decoder.decode(decoding)
        return decoding

    def _decoded(self, made: FinishedBatch, step: Step) -> FinishedBatch:
        decoding = made.batch.pop(_LATER, None)
        if decoding is None:
            return made
        enter(DECODER)
        failure = decoding.failure.result()
        enter(DATA)
        if not failure:
            images = {name: made.movedim(-1, -3) for name, made in decoding.images.items()}
            return made._replace(batch=made.batch | images)
        # DALI does not say which image is damaged. The same batch, errors included, of the CPU:
        transforms = copy.copy(self._later)
        transforms.planned = {}
        stream = self.dataset.stream
        again = BatchMaker(stream, self._memory(), self._dtype, transforms).make(step)
        if not again.errors:
            warn(f"DALI failed, and the processor decoded a batch of {len(step.number)}: {failure}")
        return again._replace(batch=self._convert(again.batch))

    def _deliver(self, batch: Batch) -> Batch:
        batch = batch if self._copies is None else self._copies.finished(batch)
        for name, calls in self._transforms().after.items():
            for call in calls:
                batch[name] = call.of_batch(batch[name])
        return batch


@cache
def _watch_exit() -> None:
    atexit.register(_exit)


def _exit() -> None:
    """End decoding, but only after the threads that wait for it."""
    loading.end_at_exit()
    gpu_decoding.stop()


def documents(batch: Mapping[str, Any]) -> dict[str, Any]:
    device = next((v.device for v in batch.values() if isinstance(v, torch.Tensor)), None)
    found: dict[str, Any] = segments.documents(batch)
    longest = found.pop("max_seqlen")
    tensors = {name: torch.as_tensor(array, device=device) for name, array in found.items()}
    return {**tensors, "max_seqlen": longest}


documents.__doc__ = segments.documents.__doc__


class _BatchSampler:
    """A Loader's sampler: yields a function for each batch of its epoch, which makes the batch.

    The loader starts at the batch whose function is called first: earlier batches are skipped.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, unless a state was just loaded."""
        if not self._loader._loaded:
            self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Callable[[], Batch]]:
        loader = self._loader
        batches: loading.Iteration | None = None

        def make(number: int) -> Batch:
            nonlocal batches
            if batches is None:
                loader._skip_to(number)
                batches = iter(loader)
            return next(batches)

        try:
            for number in range(len(loader)):
                yield partial(make, number)
        finally:
            if batches is not None:
                batches.close()


class _LoaderDataset(streaming.StreamingDataset):
    """A Loader's `dataset`: its length in samples, and its batches through `_BatchSampler`."""

    @classmethod
    def of(cls, dataset: streaming.StreamingDataset) -> _LoaderDataset:
        """Return the same dataset, as an instance of this class."""
        made = cls.__new__(cls)
        made.__dict__.update({k: v for k, v in vars(dataset).items() if k != "_epochs"})
        return made

    def __len__(self) -> int:
        """The samples of all ranks in an epoch."""
        return self.stream.order.samples

    def __getitems__(self, make: object) -> Any:
        """Return the batch. Raises UsageError if a DataLoader asks for samples by index."""
        if callable(make):
            return make()
        raise UsageError(
            "a Loader's dataset does not support indexing",
            fix="iterate over the Loader; a DataLoader needs a shardkit.torch.StreamingDataset",
        )

    __getitem__ = __getitems__


class _Copies:
    """Copies batches to a GPU on a separate CUDA stream, while the GPU works on earlier ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Page-locked batches that are being copied: their memory must not be reused yet.
        self._sources: deque[tuple[torch.cuda.Event, Batch]] = deque()

    def begun(self, batch: Batch) -> Batch:
        """Start to copy a batch. May be called by any thread."""
        with torch.cuda.stream(self.stream):
            copied: Batch = _moved(batch, self._device)
            event = self.stream.record_event()
        self._sources.append((event, batch))
        return copied | {"__copied__": event}

    def finished(self, batch: Batch) -> Batch:
        """Return the batch, and make the calling thread's CUDA stream wait for its copy."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(batch.pop("__copied__"))
        _each(batch, torch.Tensor, lambda tensor: tensor.record_stream(current))
        while self._sources and self._sources[0][0].query():  # type: ignore[no-untyped-call]
            self._sources.popleft()
        return batch


def _found(device: str | torch.device) -> torch.device:
    """Return the device. Raises UsageError if it does not exist."""
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # the type depends on the device and on torch's build
        raise UsageError(
            f"there is no device {str(device)!r}: {str(error).splitlines()[0]}",
            found=f"torch {torch.__version__}, {torch.cuda.device_count()} CUDA devices",
            fix='leave device= out, or use device="cpu"',
        ) from error


def _moved(value: Any, device: torch.device) -> Any:
    return _each(value, torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True))


def _each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a value with all in it that is of a kind changed, also in lists, tuples and dicts."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {name: _each(one, kind, change) for name, one in value.items()}
    if type(value) in (list, tuple) or hasattr(value, "_make"):  # of named tuples
        if PLAIN.issuperset(map(type, value)):
            return value
        return getattr(value, "_make", type(value))(_each(one, kind, change) for one in value)
    return value


def _in_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in page-locked memory, where only dense ones of the CPU can be."""
    can_be = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if can_be and not tensor.is_pinned() else tensor


def _page_locked(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array in page-locked memory, from which a GPU copies asynchronously.

    The memory is reused by torch's allocator, since only torch knows which asynchronous copies
    still read from memory that is no longer referenced.
    """
    size = math.prod(shape) * dtype.itemsize
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape)


def _tensors(batch: Batch, stream: Stream, transforms: Transforms) -> Batch:
    """Return a batch or sample with its arrays converted to tensors."""
    own = stream.own_collate
    images = frozenset[str]() if own else transforms.images
    of_functions = frozenset[str]() if own else transforms.of_functions
    bfloat16 = frozenset[str]() if own else transforms.bfloat16_fields
    made = dict(batch)
    for name in batch.keys() - stream.json:
        is_image = name in images or (name in of_functions and _is_image(made, name))
        tensor = partial(_tensor, image=is_image, bfloat16=name in bfloat16)
        made[name] = _each(batch[name], np.ndarray, tensor)
    return made


def _is_image(batch: Batch, name: str) -> bool:
    """Return whether a function returned images (height, width, channels)."""
    value, sides = batch[name], 3
    if isinstance(value, list) and value:
        value = value[0]
    elif np.ndim(batch.get("valid", True)):  # not a single sample
        sides = 4
    if not isinstance(value, np.ndarray) or value.ndim < sides:
        return False
    *_, height, width, channels = value.shape
    return channels in (1, 3, 4) or channels < min(height, width)


def _tensor(value: npt.NDArray[Any], image: bool, bfloat16: bool) -> Any:
    """Return a tensor of an array, which shares its memory if it can. Text remains an array."""
    if value.dtype.kind in "OSUMm":
        return value
    if not value.flags.writeable or min(value.strides, default=0) < 0:
        value = value.copy()
    if value.dtype.name == "bfloat16":  # of ml_dtypes, from the user's collate
        value, bfloat16 = value.view(np.uint16), True
    if bfloat16:
        tensor = _shared(value).view(torch.bfloat16)
    else:
        tensor = _shared(value.astype(_countable(value.dtype), copy=False))
    # Channels first in shape and strides; the memory is unchanged, which makes it channels_last.
    return tensor.movedim(-1, -3) if image else tensor


def _shared(value: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor that shares an array's memory. If a tensor owns it, both share one torch storage."""
    tensor = torch.from_numpy(value)
    owner = getattr(value.base, "base", None)
    if not isinstance(owner, torch.Tensor):
        return tensor
    offset = (tensor.data_ptr() - owner.data_ptr()) // tensor.itemsize
    storage = owner.untyped_storage()
    return tensor.new_empty(0).set_(storage, offset, tensor.shape, tensor.stride())


def _countable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in native byte order; int64 for uint16 to uint64, for which torch lacks ops."""
    if dtype.kind == "u" and dtype.itemsize > 1:
        return np.dtype(np.int64)
    return dtype.newbyteorder("=")
