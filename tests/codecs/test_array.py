"""Arrays as .npy bytes: what NumPy writes is read, without NumPy's parser of headers."""

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardkit.codecs.array import dump_array, load_array, npy_header

DTYPES = st.one_of(
    arrays.scalar_dtypes(), arrays.byte_string_dtypes(), arrays.unicode_string_dtypes()
)
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))


@given(ARRAYS, st.booleans())
def test_what_numpy_writes_is_read(value, fortran):
    value = np.asfortranarray(value) if fortran else value
    data = dump_array(value)
    found = load_array(data)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert found.tobytes() == value.tobytes()
    assert found.flags.writeable
    header = npy_header(data)
    assert header is not None
    assert header.simple == value.dtype


@given(ARRAYS, st.data())
def test_damage_is_a_value_error_or_another_array(value, data):
    damaged = bytearray(dump_array(value))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ValueError):
        load_array(bytes(damaged))
    with pytest.raises(ValueError, match=r"magic|header|EOF|read"):
        load_array(dump_array(value)[: at // 2])


def header(descr, shape):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text


def test_arrays_of_parts_and_in_the_order_of_fortran_come_back():
    value = np.zeros(3, [("a", "<i4"), ("b", "<f8", (2,))])
    assert (load_array(dump_array(value)) == value).all()
    value = np.asfortranarray(np.arange(6).reshape(2, 3))
    assert load_array(dump_array(value)).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("descr", "shape", "message"),
    [
        *[(kind, "(1,)", ".") for kind in ("'<f3'", "'<M8[xx]'", "'|O'", "(1,")],
        *[("'<f8'", shape, ".") for shape in ("(-1,)", "(0, 1000000000000000000000)")],
        *[("'<f8'", shape, ".") for shape in ("(" + "1, " * 70 + ")", f"({'9' * 5000},)")],
        ("'<f8'", f"({'1' * 100}x,)", "."),  # which a regular expression may take ages to refuse
        # A shape that lies reserves nothing.
        ("'<f8'", "(1000000000, 1000000000)", "the header says"),
        *[(kind, "(1000000000000,)", "without bytes") for kind in ("'|S0'", "'<U0'", "'|V0'")],
        ("[('a', '|S0')]", "(1000000000000,)", "without bytes"),
        ("[('a', '<f8')]", "(1000000000, 1000000000)", "the header says"),
        ("'<f8'", "(3,)", "24 bytes of values, but there are 80"),
    ],
)
def test_headers_that_lie_are_value_errors(descr, shape, message):
    with pytest.raises(ValueError, match=message):
        load_array(header(descr, shape) + bytes(0 if message == "without bytes" else 80))


def test_threads_may_read_while_garbage_is_collected():
    """NumPy parses headers by `ast`, which fails then: "AST constructor recursion depth"."""

    def collected(phase, info):
        sum(range(10))

    data = [dump_array(np.zeros((n, 2), np.uint16)) for n in range(300)]
    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as threads:
            shapes = list(threads.map(lambda one: load_array(one).shape, data))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert shapes == [(n, 2) for n in range(300)]
