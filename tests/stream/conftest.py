"""How the workers of a DataLoader are started."""

from __future__ import annotations

import multiprocessing

import pytest

FORKSERVER, SPAWN = (pytest.param(n, marks=pytest.mark.large) for n in ("forkserver", "spawn"))


@pytest.fixture(params=["fork", FORKSERVER])
def start_method(request):
    """Workers are forked, as on Linux up to Python 3.13; in the large run also as from 3.14 on.

    Those that are spawned, as on macOS, get the same; each takes seconds, so that few tests ask for
    them.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload(["torch", "shardkit.torch"])  # takes each worker seconds
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)
