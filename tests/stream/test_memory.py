"""Memory of batches: used again when nobody refers to it any more, and never before."""

import gc
import pickle
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from shardkit.schema import Array, Bytes
from shardkit.stream.batches import Memory
from shardkit.stream.loader import Loader
from tests.stream.data import write

pytestmark = pytest.mark.usefixtures("few_objects")
SHAPE, DTYPE = (4, 6), np.dtype(np.uint8)


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[1:3, ::2],
        lambda array: array.view(np.uint16).T,
        lambda array: np.lib.stride_tricks.sliding_window_view(array, 2, 0)[1],
        lambda array: array.view(np.recarray),
        memoryview,
        lambda array: memoryview(array)[2:],
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[1:].view(torch.int16),
        lambda array: torch.from_dlpack(array)[0],
        np.from_dlpack,
        lambda array: np.asarray(torch.from_numpy(array)[2]),
        lambda array: array.flat,
    ],
)
@pytest.mark.parametrize("cycle", [False, True])
def test_memory_is_kept_while_anything_of_it_is_left(view, cycle):
    memory = Memory(2)
    array = memory.take(SHAPE, DTYPE)
    array[:] = 7
    where = address(array)
    left = {"view": view(array)}
    if cycle:
        left["itself"] = left
    del array
    other = memory.take(SHAPE, DTYPE)
    other[:] = 9
    assert address(other) != where
    assert 9 not in np.asarray(left["view"])
    del left
    if cycle:
        gc.collect()
    assert address(memory.take(SHAPE, DTYPE)) == where, "given back with the last view"


def test_what_is_free_serves_any_array_of_as_many_bytes_up_to_a_bound():
    memory = Memory(2)
    held = [memory.take(SHAPE, DTYPE) for _ in range(5)]
    where = {address(array) for array in held}
    assert len(where) == 5
    held.clear()
    assert memory.take((3, 0), DTYPE).shape == (3, 0)
    assert len(memory._free[24]) == 2  # that is the bound
    again = [memory.take((3, 4), np.dtype(">u2")) for _ in range(2)]
    assert {address(array) for array in again} < where
    assert (again[0].shape, again[0].dtype) == ((3, 4), ">u2")


def test_arrays_of_all_sizes_leave_no_more_free_than_was_in_use():
    """As of `Dynamic`, whose batches have any number of rows."""
    memory = Memory(2)
    for rows in [*range(1, 30), *range(29, 0, -1)]:
        held = [memory.take((rows, 6), DTYPE) for _ in range(2)]
        del held
    kept = [buffer.nbytes for buffers in memory._free.values() for buffer in buffers]
    assert sum(kept) <= 3 * 29 * 6  # what the last arrays add
    where = address(memory.take((29, 6), DTYPE))
    assert address(memory.take((29, 6), DTYPE)) == where, "one size is always there again"


def test_no_python_code_runs_when_memory_is_given_back():
    """There a Ctrl-C would be lost: an error in a callback is printed, and goes no further."""
    memory, calls = Memory(2), []
    array = memory.take(SHAPE, DTYPE)
    where = address(array)
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    del array
    sys.setprofile(None)
    assert "call" not in calls  # of a function in Python; calls of C are others
    assert address(memory.take(SHAPE, DTYPE)) == where


def test_an_array_in_garbage_that_comes_to_life_again_keeps_its_memory():
    """Weak references to what is itself in a cycle are cleared before finalizers run."""
    memory, saved = Memory(2), []

    class Saves:
        def __del__(self):
            saved.append(self.array)

    one = Saves()
    one.array, one.itself = memory.take(SHAPE, DTYPE), one
    where = address(one.array)
    del one
    gc.collect()
    assert address(memory.take(SHAPE, DTYPE)) != where
    assert address(saved.pop()) == where
    assert address(memory.take(SHAPE, DTYPE)) == where


def test_a_copy_and_the_end_of_the_memory_are_harmless():
    memory = Memory(2)
    array = memory.take(SHAPE, DTYPE)
    array[:] = 3
    del memory
    assert (pickle.loads(pickle.dumps(array)) == 3).all()
    assert (array == 3).all()


def test_threads_that_take_and_release_never_share_an_array():
    """Each writes its number all over what it holds, and finds it there later."""
    memory, wrong = Memory(3), []

    def work(number):
        held = []
        for turn in range(100):
            array = memory.take(SHAPE, DTYPE)
            array[:] = number
            held.append(array[1:])
            if len(held) > turn % 5:
                wrong.extend(one for one in held if (one != number).any())
                held.clear()

    with ThreadPoolExecutor(8) as threads:
        [*threads.map(work, range(8))]
    assert not wrong


@pytest.mark.parametrize("count", [None, 2])
def test_arrays_that_are_kept_keep_nothing_else_that_was_read(count, tmp_path):
    schema = {"data": Bytes(), "row": Array("int64", (None,), optional=True)}
    rows = (np.arange(n if count is None else count) for n in range(1, 9))
    path = write(tmp_path / "d", "arrow", schema, ({"data": bytes(9999), "row": r} for r in rows))
    (batch,) = Loader(path, batch_size=8, threads=0)
    kept = batch["row"][0]
    while kept.base is not None:
        kept = kept.base
    assert kept.nbytes < 9999


def test_large_values_are_in_memory_only_once(tmp_path):
    samples = ({"data": bytes(1 << 20)} for _ in range(4))
    path = write(tmp_path / "d", "wds", {"data": Bytes()}, samples)
    batches = iter(Loader(path, batch_size=4, threads=0))
    tracemalloc.start()
    try:
        assert len(next(batches)["data"]) == 4
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()
