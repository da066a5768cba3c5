"""The way in which bytes of data are read: ranges of a file, and tables in it."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import DamagedError, NotFoundError, StorageError
from shardkit.storage import byte_source
from shardkit.storage.blobs import ABSENT, read_blobs
from shardkit.storage.byte_source import LocalFile, Memory, Table


@pytest.fixture(params=["extension", "python"], autouse=True)
def _way(request, monkeypatch):
    """Every test here runs with the extension and without."""
    if request.param == "python":
        monkeypatch.setattr(byte_source, "reads", None)
    elif byte_source.reads is None:
        pytest.skip("the extension was not built: it needs a compiler")


@pytest.fixture
def tmp_path(disk):
    """Memory is no disk: systems read, and drop, its files in other ways."""
    return Path(tempfile.mkdtemp(dir=disk))


@pytest.fixture(scope="module")
def blob(disk):
    path = disk / "blob"
    path.write_bytes(np.random.default_rng(0).bytes(1_000_003))
    return path


@given(offset=st.integers(0, 1_000_003), length=st.integers(0, 1_000_003))
def test_a_range_of_a_file_is_that_of_its_bytes(blob, offset, length):
    data = blob.read_bytes()
    ranges = [(900_000, 5), (3, 70_000), (3, 0)]
    assert LocalFile(blob).read_ranges(ranges) == [data[a : a + n] for a, n in ranges]
    for source in (LocalFile(blob), Memory(data, blob)):
        assert source.size == 1_000_003
        if offset + length <= source.size:
            assert source.read(offset, length) == data[offset : offset + length]
        else:
            with pytest.raises(DamagedError, match="the file ends before") as error:
                source.read(offset, length)
            assert error.value.where == {"path": blob, "offset": offset}


RECORD = np.dtype([("start", "<u4"), ("size", "<u2")])


@pytest.mark.parametrize("most", [0, byte_source.IN_MEMORY])
def test_a_table_gives_its_records(blob, most, monkeypatch):
    monkeypatch.setattr(byte_source, "IN_MEMORY", most)
    for count in (0, 1, 160_000):
        expected = np.frombuffer(blob.read_bytes(), RECORD, count, 77)
        table = Table(LocalFile(blob), 77, count, RECORD)
        assert len(table) == count
        assert table.in_memory == (count * 6 if most else 0)
        assert (table.slice(0, count) == expected).all()
        numbers = np.array([0, count // 2, count - 1] if count else [], np.int64)
        assert (table.take(numbers) == expected[numbers]).all()
        for number in numbers.tolist():
            assert table.record(number) == expected[number].tobytes()


@given(starts=st.lists(st.integers(0, 999_003), max_size=20), size=st.integers(0, 1000))
def test_rows_are_the_ranges_from_their_starts_on(blob, starts, size):
    data = blob.read_bytes()
    for source in (LocalFile(blob), Memory(data, blob)):
        found = source.read_rows(np.array(starts, np.int64), size)
        assert found.shape == (len(starts), size)
        assert [row.tobytes() for row in found] == [data[s : s + size] for s in starts]


def test_what_lies_outside_of_a_file_and_what_cannot_be_opened_is_refused(blob, tmp_path):
    for offset, count in ((1_000_000, 1), (-6, 1), (0, -1)):
        with pytest.raises(DamagedError, match="the file ends before") as error:
            Table(LocalFile(blob), offset, count, RECORD)
        assert error.value.where == {"path": blob, "offset": max(offset, 0)}
    for starts in ([0, -1], [999_000], [2**62]):
        for source in (LocalFile(blob), Memory(blob.read_bytes(), blob)):
            with pytest.raises(DamagedError, match="ends before"):
                source.read_rows(np.array(starts), 1004)
    with pytest.raises(NotFoundError, match="cannot open"):
        LocalFile(tmp_path / "nothing")
    with pytest.raises(StorageError, match="cannot open: Is a directory") as error:
        LocalFile(tmp_path)
    assert error.value.where == {"path": tmp_path}


def test_a_file_that_is_cut_names_the_byte_from_which_it_is(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(bytes(10_000))
    file = LocalFile(path)
    monkeypatch.setattr(byte_source, "_AGE", float("inf"))
    assert file.read(0, 1) == b"\0"  # the last read that compares the file's size
    os.truncate(path, 7000)
    assert file.read(5000, 2000) == bytes(2000)
    with pytest.raises(DamagedError, match="truncated while it was open") as error:
        file.read(6990, 30)
    assert error.value.where == {"path": path, "offset": 6990}
    assert error.value.expected == "30 bytes from here"
    assert error.value.found == "10 bytes, then the end of the file"
    with pytest.raises(DamagedError, match="truncated while it was open"):
        file.read_rows(np.array([0, 6990]), 30)
    assert file.size == 10_000


def test_a_file_that_was_changed_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(bytes(100_000))
    os.utime(path, (1e9, 1e9))
    file = LocalFile(path)
    monkeypatch.setattr(byte_source, "_AGE", 0)
    assert file.read(5, 90_000) == bytes(90_000)
    path.rename(tmp_path / "y")
    os.link(tmp_path / "y", path)
    assert file.read(5, 9) == bytes(9)  # the same bytes under another name
    with path.open("r+b") as other:
        other.write(b"new")
    for read in (lambda: file.read(5, 9), lambda: file.read_rows(np.array([5]), 9)):
        with pytest.raises(DamagedError, match="changed while it was open") as error:
            read()
        assert error.value.where == {"path": path, "offset": 5}
        assert error.value.expected == "the time of change 2001-09-09T01:46:40.000000000"
    os.truncate(path, 7)
    with pytest.raises(DamagedError, match="changed while it was open") as error:
        file.read(0, 5)
    assert (error.value.expected, error.value.found) == ("100,000 bytes", "7 bytes")


def test_threads_read_what_is_theirs(blob):
    file, data = LocalFile(blob), blob.read_bytes()
    places = [(n * 7919 % 900_000, n * 31 % 40_000) for n in range(500)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda place: file.read(*place), places))
    assert all(part == data[s : s + n] for part, (s, n) in zip(found, places, strict=True))


@pytest.mark.parametrize("local", [False, True])
def test_values_of_several_files_are_read_into_one_buffer(tmp_path, local, monkeypatch):
    """Those that do not exist may be said to be anywhere."""
    datas = [bytes(range(100)), bytes(range(100, 200))]
    for number, data in enumerate(datas):
        (tmp_path / f"{number}").write_bytes(data)
    paths = [tmp_path / "0", tmp_path / "1"]
    sources = [*map(LocalFile, paths)] if local else [*map(Memory, datas, paths)]
    which, far = np.array([0, 1, 0, 1]), 1 << 62
    offsets = np.array([[90, 5, far, 0], [40, 100, 8, 20]])
    sizes = np.array([[10, 3, ABSENT, 7], [8, 0, 4, 4]])
    texts, numbers = read_blobs(sources, which, offsets, sizes)
    assert texts.values() == [datas[0][90:], datas[1][5:8], None, datas[1][:7]]
    found = numbers.arrays(np.dtype("<u4"), (-1, 1))
    assert [one.tobytes() for one in found] == [
        datas[0][40:48], b"", datas[0][8:12], datas[1][20:24],
    ]  # fmt: skip
    assert [one.shape for one in found] == [(2, 1), (0, 1), (1, 1), (1, 1)]
    assert all(one.flags.aligned and one.flags.writeable for one in found)
    backwards = numbers.take(np.array([3, 2])).arrays(np.dtype("<u4"))
    assert backwards.tobytes() == datas[1][20:24] + datas[0][8:12]
    with pytest.raises(ValueError, match="whole numbers"):
        texts.arrays(np.dtype("<u4"))
    for column, value, place, size in ((1, 0, 93, 8), (1, 1, far, 0), (0, 2, 0, ABSENT - 1)):
        wrong = offsets.copy(), sizes.copy()
        wrong[0][column, value], wrong[1][column, value] = place, size
        with pytest.raises(DamagedError, match="the file ends before"):
            read_blobs(sources, which, *wrong)
    monkeypatch.setattr("shardkit.storage.blobs._MOST", 35)
    with pytest.raises(ValueError, match="too much memory"):
        read_blobs(sources, which, offsets, sizes)
