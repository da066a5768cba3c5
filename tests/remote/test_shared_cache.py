"""Loaders in several processes share a cache folder that is too small, and are killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardkit
from shardkit.page_cache import PAGE, FolderCache
from shardkit.schema import Bytes
from tests.remote.epochs import value
from tests.remote.pages import FULL_PAGE
from tests.remote.process import ROOT
from tests.remote.servers import Nginx
from tests.remote.test_page_cache import CLAIMS, LOCK, MARK, counted, linux, on_disk, stopped

SAMPLES, LIMIT = 600, 9 * FULL_PAGE  # of 24 pages


class Process(subprocess.Popen[str]):
    """One that does epochs, maybe on a disk that is full now and then."""

    def __init__(self, url: str, cache: Path, seed: int, full: bool) -> None:
        words = [url, SAMPLES, cache, LIMIT, seed, *["full"] * full]
        super().__init__(
            [sys.executable, "-m", "tests.remote.epochs", *map(str, words)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def began(self) -> float:
        """When the next epoch that ends began; 0 at first. An error with what it wrote, if it has
        ended."""
        assert self.stdout is not None
        line = self.stdout.readline()
        if not line:
            raise AssertionError(self.communicate(timeout=60)[1])
        return float(line)


@pytest.fixture(scope="module")
def url(web: Nginx) -> str:
    with shardkit.create(web.root / "shared", "wds", {"x": Bytes()}, shard_size="5MB") as out:
        for number in range(SAMPLES):
            out.write({"__key__": f"{number}", "x": value(number)})
    return f"{web.endpoint}/shared"


@pytest.mark.large
@linux
def test_four_loaders_share_a_cache_and_are_killed(url: str, tmp_path: Path, large: bool) -> None:
    """The last of them meets a full disk now and then."""
    draw, cache, kills = random.Random(5), tmp_path / "cache", 15 if large else 4
    loaders = [Process(url, cache, seed, seed == 3) for seed in range(4)]
    try:
        for loader in loaders:
            assert loader.began() == 0
        for kill in range(kills):
            time.sleep(draw.uniform(0, 0.3))
            victim = kill if kill < 4 else draw.randrange(4)
            loaders[victim].kill()
            loaders[victim].communicate(timeout=60)
            with stopped(loaders[:victim] + loaders[victim + 1 :]):
                assert on_disk(cache) <= LIMIT
            loaders[victim] = Process(url, cache, 100 + kill, victim == 3)
        last, most = time.monotonic(), 0
        for loader in loaders:  # a whole epoch of each
            while loader.began() < last:
                with stopped(loaders):  # there may be few pages while many are requested
                    most = max(most, on_disk(cache))
        assert LIMIT / 3 < most <= LIMIT
    finally:
        for loader in loaders:
            loader.kill()
        for loader in loaders:
            loader.communicate(timeout=60)
    again = FolderCache(cache, LIMIT)
    pages = {path.name for path in cache.iterdir()} - {MARK, LOCK, CLAIMS}
    assert LIMIT >= counted(cache) == on_disk(cache) > 0
    for name in pages:
        assert name.endswith(".page")
        file, number = name.removesuffix(".page").split("-")
        page = again.get(file, int(number))
        assert page is not None  # its checksum was compared
        assert 0 < len(page) <= PAGE
