"""Datasets of the streaming tests, and how the workers of a DataLoader are started."""

import functools
import gc
import multiprocessing

import pytest

from shardkit.stream import batches
from tests.stream.data import write_photos

FORKSERVER, SPAWN = (pytest.param(n, marks=pytest.mark.large) for n in ("forkserver", "spawn"))


@pytest.fixture(scope="session")
def every(tmp_path_factory):
    """The same samples in the same shards, in any format."""
    root = tmp_path_factory.mktemp("every")
    return functools.cache(lambda format: write_photos(root / format, format))


@pytest.fixture
def photos(every):
    return every("wds")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Small batches are read at once too, as most tests have no others; returns the real limit."""
    limit = batches._FEW
    monkeypatch.setattr(batches, "_FEW", 1)
    return limit


@pytest.fixture
def few_objects():
    """What other tests left is no garbage of ours: to look through it takes longer than a test."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["fork", FORKSERVER, SPAWN])
def start_method(request):
    """Workers are forked, as on Linux up to Python 3.13; in the large run they also come from a
    forkserver, as from 3.14 on, and are spawned, as on macOS, which takes each of them seconds.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload(["torch", "shardkit.torch"])  # takes each worker seconds
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)
