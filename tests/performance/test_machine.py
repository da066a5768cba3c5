"""Files out of the page cache: what went, what stayed, and where nothing can be done."""

import mmap
import os
import sys
import tempfile
from pathlib import Path

import pytest

from shardkit.performance.machine import drop_from_cache, file_system

_IN_MEMORY = ("tmpfs", "ramfs")
_PAGES = 64


@pytest.fixture
def tmp_path(disk):
    """Memory is no disk: systems read, and drop, its files in other ways."""
    return Path(tempfile.mkdtemp(dir=disk))


def stays(place):
    """Whether files there cannot be dropped."""
    return not sys.platform.startswith("linux") or file_system(place) in _IN_MEMORY


def written(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(_PAGES * mmap.PAGESIZE))
    return path


def test_files_are_dropped_where_the_system_can_and_what_is_mapped_stays(tmp_path):
    written(tmp_path / "one/two/a.tar")
    written(tmp_path / "one/b.tar")
    (tmp_path / "one/empty").touch()
    assert drop_from_cache([tmp_path / "one"]) == (1.0 if stays(tmp_path) else 0.0)
    one, other = written(tmp_path / "one.bin"), written(tmp_path / "other.bin")
    with one.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # every page is touched
        assert drop_from_cache([one, other]) == (1.0 if stays(tmp_path) else 0.5)
    assert drop_from_cache([one, other]) == (1.0 if stays(tmp_path) else 0.0)


def test_the_files_beside_a_single_one_go_with_it(tmp_path):
    beside = written(tmp_path / "__shardkit__/x.beton.manifest.json")
    written(tmp_path / "x.beton")
    with beside.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        assert drop_from_cache([tmp_path / "x.beton"]) >= 0.5


def test_nothing_can_be_dropped_on_other_systems(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert drop_from_cache([written(tmp_path / "a")]) == 1.0
