"""Compressed TARs: unpacked to files without a name, and a bounded number of bytes at a time."""

import errno
import gzip
import io
import os
import shutil
import sys
import tarfile
import tempfile
import threading
import warnings
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import FormatError, ShardkitWarning, StorageError
from shardkit.formats import compressed
from tests.formats.refusals import refused

SIZE = 10_240  # bytes of a small TAR
SAMPLES = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:compressed TARs:shardkit.errors.ShardkitWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    for shard in range(5):
        with tarfile.open(tmp_path / f"in/{shard}.tar.gz", "w:gz") as tar:
            for number in range(SAMPLES):
                member = tarfile.TarInfo(f"{shard}-{number}.txt")
                member.size = 5
                tar.addfile(member, io.BytesIO(b"%5d" % number))
    return tmp_path / "in"


def held(temporary):
    """Bytes of files without a name in the temporary folder that this process holds."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    targets = [(link, os.readlink(link)) for link in links if link.is_symlink()]
    mine = [link for link, target in targets if target.startswith(f"{temporary}/")]
    assert os.listdir(temporary) == []  # what has no name is gone with the process, however it ends
    return sum(os.stat(link).st_size for link in mine)


@pytest.fixture
def unpacked(monkeypatch):
    """The names of the shards that are unpacked, each time."""
    names = []
    real = compressed._unpacked

    def noted(source, what):
        names.append(source.path.name)
        return real(source, what)

    monkeypatch.setattr(compressed, "_unpacked", noted)
    return names


def read(dataset):
    return [sample["txt"].strip() for sample in dataset]


def test_they_are_held_within_a_bound_and_not_after_closing(source, temporary, monkeypatch):
    with shardkit.open(source) as dataset:
        assert held(temporary) == 0
        assert read(dataset) == ["0", "1", "2", "3"] * 5
        assert held(temporary) == 5 * SIZE
    assert held(temporary) == 0
    monkeypatch.setattr("shardkit.dataset.readers._TEMPORARY", 2.5 * SIZE)
    dataset = shardkit.open(source)
    most = 0
    for index in [*range(len(dataset)), 0, -1, 5]:
        assert dataset[index]["txt"].strip() == str(index % SAMPLES)
        most = max(most, held(temporary))
    assert most == 2 * SIZE
    del dataset
    assert held(temporary) == 0
    monkeypatch.setattr("shardkit.dataset.readers._TEMPORARY", 1)
    with shardkit.open(source) as dataset:  # one above the bound is open alone
        assert len(read(dataset)) == 20
        assert held(temporary) == SIZE


def test_a_file_is_unpacked_once_for_all_who_have_it_open(source, temporary, unpacked):
    first, second = shardkit.open(source / "0.tar.gz"), shardkit.open(source / "0.tar.gz")
    unpacked.clear()
    assert read(first) == read(second)
    assert unpacked == ["0.tar.gz"]
    assert held(temporary) == SIZE
    first.close()
    assert read(second)
    second.close()
    assert held(temporary) == 0


def test_shards_are_unpacked_one_after_the_other_also_where_the_first_is_not_compressed(
    source, monkeypatch
):
    (source / "0.tar").write_bytes(gzip.decompress((source / "0.tar.gz").read_bytes()))
    (source / "0.tar.gz").unlink()
    for number in range(5, 12):
        shutil.copy(source / "1.tar.gz", source / f"{number}.tar.gz")
    real, at_work, alone = compressed._unpacked, threading.Lock(), []

    def slowly(given, what):
        alone.append(at_work.acquire(blocking=False))
        os.sched_yield()  # to another thread, if there is one
        try:
            return real(given, what)
        finally:
            if alone[-1]:
                at_work.release()

    monkeypatch.setattr(compressed, "_unpacked", slowly)
    with shardkit.open(source) as dataset:
        assert dataset.shards == 12
    assert alone == [True] * 11


@pytest.mark.parametrize("tasks", [1, SAMPLES])
def test_tasks_of_one_shard_do_not_each_unpack_it(
    source, temporary, tmp_path, unpacked, tasks, monkeypatch
):
    monkeypatch.setattr("shardkit.conversion.cuts._TASK_BYTES", 1)
    options = {"shard_samples": SAMPLES // tasks, "workers": 0}
    found = shardkit.convert(source / "0.tar.gz", "wds", tmp_path / "out", **options)
    assert found.splits[""].shards == tasks
    assert unpacked == ["0.tar.gz"] * 2  # to plan, and to convert
    assert held(temporary) == 0


def test_messages_name_the_temporary_folder(source, temporary, monkeypatch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(shardkit.open(source))
    (said,) = {str(warning.message) for warning in caught if warning.category is ShardkitWarning}
    assert str(temporary) in said

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shardkit.codecs.compression.decompressed", full)
    says, path = str(temporary), source / "0.tar.gz"
    with refused(StorageError, "not enough space to unpack", says=says, fix="TMPDIR", path=path):
        shardkit.open(source)


def test_a_shard_and_its_compressed_copy_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in/a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("1.txt"), io.BytesIO())
    (tmp_path / "in/a.tar.gz").write_bytes(gzip.compress((tmp_path / "in/a.tar").read_bytes()))
    (tmp_path / "in/b.tar").write_bytes((tmp_path / "in/a.tar").read_bytes())
    with pytest.raises(FormatError, match="compressed copy") as caught:
        shardkit.open(tmp_path / "in")
    assert caught.value.fix == "remove one of the two, such as a.tar.gz"
    (tmp_path / "in/a.tar.gz").unlink()
    assert len(shardkit.open(tmp_path / "in")) == 2
