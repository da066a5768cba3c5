"""`_reads.c` beside Python: ranges, values and numbers, and what it refuses."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

reads = pytest.importorskip("shardkit.storage._reads", reason="the extension was not built")


@pytest.fixture(scope="module")
def files(disk):
    """Three files: their bytes, and the handles to read them by."""
    handles, contents = [], []
    for number, size in enumerate((0, 10_000, 300_000)):
        path = disk / f"file {number}"
        contents.append(np.random.default_rng(number).bytes(size))
        path.write_bytes(contents[-1])
        handles.append(os.open(path, os.O_RDONLY))
    yield contents, handles
    for handle in handles:
        os.close(handle)


def read_ranges(contents, handles, ranges, slots=None):
    """Read ranges (file, offset, size) of files; returns the answer, and memory and starts."""
    which, offsets, sizes = np.array(ranges, np.int64).reshape(-1, 3).T
    starts = np.cumsum(np.maximum(sizes, 0)) - np.maximum(sizes, 0)
    out = np.full(max(int(np.maximum(sizes, 0).sum()), 1), 7, np.uint8)
    order = np.array(handles, np.int32)[which]
    arguments = (order, offsets.copy(), sizes.copy(), starts)
    return reads.read_ranges(*arguments, out), out, starts


SIZES = st.one_of(st.integers(-2, 40), st.integers(0, 20_000))


@given(
    ranges=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300_000), SIZES), max_size=40),
    near=st.booleans(),
)
def test_ranges_of_several_files_are_read_in_one_call(files, ranges, near):
    contents, handles = files
    if near:  # that many are read together
        ranges = [(2, offset % 5000, size % 50) for _, offset, size in ranges] * 40
    found, out, starts = read_ranges(contents, handles, ranges)
    beyond = [n for n, (f, o, s) in enumerate(ranges) if s > 0 and o + s > len(contents[f])]
    assert found in (beyond or [-1])
    if not beyond:
        parts = [
            out[b : b + max(s, 0)].tobytes() for b, (_, _, s) in zip(starts, ranges, strict=True)
        ]
        assert parts == [contents[f][o : o + max(s, 0)] for f, o, s in ranges]


def test_ranges_on_a_disk_are_read_too(tmp_path):
    """Of a file that is not in memory: several are requested at once."""
    data = np.random.default_rng(0).bytes(4 << 20)
    path = tmp_path / "x"
    path.write_bytes(data)
    ranges = [(0, n * 7919 % (4 << 20), 5000) for n in range(400)]
    ranges = [(f, o, s) for f, o, s in ranges if o + s <= len(data)]
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found, out, starts = read_ranges([data], [file.fileno()], ranges)
    assert found in (-1, -2)  # not all systems forget the file
    parts = [out[b : b + s].tobytes() for b, (_, _, s) in zip(starts, ranges, strict=True)]
    assert parts == [data[o : o + s] for _, o, s in ranges]


def test_ranges_that_cannot_be_read_are_named(files):
    contents, handles = files
    whole = (1, 0, 10_000)
    for bad in ((1, 9_999, 2), (1, 10_000, 1), (0, 0, 1), (1, -1, 5), (2, 2**63 - 1, 9)):
        assert read_ranges(contents, handles, [whole, bad, whole])[0] == 1
    assert read_ranges(contents, [-1, *handles], [(1, 0, 9), (0, 3, 9)])[0] in (0, 1)
    assert read_ranges(contents, handles, [])[0] == -1


def test_ranges_that_do_not_fit_into_the_memory_are_refused(files):
    handles, read = np.full(3, files[1][2], np.int32), reads.read_ranges
    offsets, sizes, starts = np.zeros((3, 3), np.int64)
    out = bytearray(100)
    for start, size in ((0, 101), (100, 1), (-1, 5), (2**63 - 1, 5), (96, 5), (5, 2**63 - 1)):
        starts[1], sizes[1] = start, size
        with pytest.raises(ValueError, match="do not fit into the memory"):
            read(handles, offsets, sizes, starts, out)
    starts[1], sizes[1] = 2**62, -1  # absent
    good = (handles, offsets, sizes, starts, out)
    assert read(*good) == -1
    assert out == bytes(100)
    for number, bad in (
        (0, handles.astype(np.int64)),
        (0, handles[:2]),
        (1, offsets.astype(np.uint64)),
        (1, np.zeros(6, np.int64)[::2]),
        (2, sizes.astype(float)),
        (2, sizes.reshape(3, 1)),
        (3, starts.astype(">i8")),
        (3, [0, 0, 0]),
        (4, bytes(100)),
        (4, None),
    ):
        arguments = list(good)
        arguments[number] = bad
        with pytest.raises((ValueError, TypeError, BufferError)):
            read(*arguments)


def test_one_range_is_read_unless_the_file_does_not_have_it(files):
    (_, small, large), (empty, handle, other) = files
    for offset, size in ((0, 10_000), (9_000, 1000), (10_000, 0), (5, 0)):
        assert reads.read(handle, 10_000, offset, size) == small[offset : offset + size]
    assert reads.read(other, 300_000, 1, 299_999) == large[1:]  # with the lock released
    for offset, size in ((9_000, 1001), (-1, 5), (0, -1), (2**63 - 1, 5), (2**64, 5), (0, 2**64)):
        assert reads.read(handle, 10_000, offset, size) is None
    assert reads.read(other, 300_001, 200_000, 100_001) is None  # it was cut
    assert reads.read(handle, 2**63 - 1, 9_000, 1001) is None
    assert reads.read(empty, 9, 0, 9) is reads.read(-1, 9, 0, 5) is None
    for bad in ((handle, 0), (handle, 1, 0, 1, 2), (handle, 1, 0.5, 1), ("x", 1, 0, 1)):
        with pytest.raises(TypeError):
            reads.read(*bad)


def test_slices_are_bytes_or_texts(files):
    slices = reads.slices
    data = "größe".encode() + b"\xff"
    starts, sizes = np.array([0, 2, 2**62, 8, 5]), np.array([2, 2, -1, 0, 1])
    assert slices(data, starts, sizes, False) == [b"gr", "ö".encode(), None, b"", b"\x9f"]
    assert slices(data, starts[:4], sizes[:4], True) == ["gr", "ö", None, ""]
    assert slices(np.frombuffer(data, np.uint8), starts[:0], sizes[:0], True) == []
    for start, size in ((2, 1), (7, 1)):
        with pytest.raises(UnicodeDecodeError) as error:
            slices(data, np.array([0, start]), np.array([1, size]), True)
        assert error.value.object == data[start : start + size]
    for start, size in ((0, 9), (8, 1), (-1, 2), (2**63 - 1, 2), (0, -2), (0, 2**63 - 1)):
        for call in (
            lambda *a: slices(*a, False),
            lambda *a: reads.integers(*a, np.zeros(1, np.int64)),
        ):
            with pytest.raises(ValueError, match="do not fit into the memory"):
                call(data, np.array([start]), np.array([size]))
    with pytest.raises(ValueError, match="different lengths"):
        slices(data, starts, sizes[:3], False)


@given(texts=st.lists(st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(lambda n: b"%d" % n),
    st.from_regex(rb"\A-?[0-9]{1,20}\Z"),
    st.sampled_from([b"", b"-", b"+1", b"1_0", b" 1", b"1 ", b"--1", b"1.", b"-0", b"07", b":"]),
), max_size=5))  # fmt: skip
def test_integers_are_pythons(texts):
    sizes = np.array([len(text) for text in texts], np.int64)
    starts = np.cumsum(sizes) - sizes
    out = np.zeros(len(texts), np.int64)
    expected = [int(t) if t.removeprefix(b"-").isdigit() else None for t in texts]
    valid = all(n is not None and -(2**63) <= n < 2**63 for n in expected)
    assert reads.integers(b"".join(texts), starts, sizes, out) is valid
    if valid:
        assert out.tolist() == expected
    assert not reads.integers(b"1", np.array([0]), np.array([-1]), np.zeros(1, np.int64))  # absent


def test_threads_read_at_the_same_time(files):
    contents, handles = files
    ranges = [(n % 2 + 1, n * 7919 % 9_000, n * 31 % 900) for n in range(500)]
    expected = b"".join(contents[f][o : o + s] for f, o, s in ranges)
    found = []

    def work():
        for _ in range(20):
            found.append(read_ranges(contents, handles, ranges)[1].tobytes())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    assert set(found) == {expected}
