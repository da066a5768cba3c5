"""Arrays that lie in temporary files are those that memory would have held."""

import errno
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

from shardkit.errors import StorageError
from shardkit.helpers import mapped, order
from shardkit.helpers.mapped import Growing, Runs, computed, running_sum, selected
from shardkit.helpers.order import permutation


@pytest.fixture(params=["in memory", "in files"])
def _limits(request, monkeypatch):
    if request.param == "in files":
        monkeypatch.setattr(mapped, "MAX_IN_MEMORY", 100)
        monkeypatch.setattr(mapped, "_BUFFER", 64)
    monkeypatch.setattr(mapped, "PIECE", 37)


@pytest.mark.usefixtures("_limits")
@pytest.mark.parametrize("count", [0, 1, 37, 1000])
def test_long_arrays_hold_the_same(count):
    numbers = np.arange(count)
    growing = Growing(np.int64)
    for n in range(count):
        growing.extend([n])
    assert len(growing) == count
    found = growing.array()
    assert (found == numbers).all()
    assert type(found) is np.ndarray
    assert (computed(count, np.int64, lambda piece: numbers[piece] * 3) == numbers * 3).all()
    odd = selected(count, lambda piece: numbers[piece] % 2 == 1)
    assert (odd == np.flatnonzero(numbers % 2)).all()
    assert running_sum(numbers).tolist() == [0, *np.cumsum(numbers)]


@pytest.mark.usefixtures("_limits")
def test_a_long_permutation_is_that_of_all_hashes(monkeypatch):
    whole = [permutation(1000, seed).tolist() for seed in (0, 7)]
    monkeypatch.setattr(order, "_SORTED", 90)
    assert [permutation(1000, seed).tolist() for seed in (0, 7)] == whole
    assert sorted(whole[0]) == list(range(1000))


@pytest.mark.parametrize("late", [False, True])
def test_a_full_disk_is_an_error_of_ours(monkeypatch, late):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_once_flushed(**_):
        return SimpleNamespace(write=len, flush=full)

    monkeypatch.setattr(tempfile, "TemporaryFile", full_once_flushed if late else full)
    monkeypatch.setattr(mapped, "MAX_IN_MEMORY", 100)
    with pytest.raises(StorageError, match="the disk is full"):
        computed(1000, np.int64, lambda piece: np.arange(piece.start, piece.stop))


@pytest.mark.parametrize("seed", range(8))
def test_runs_are_the_array_that_they_stand_for(seed):
    dice = np.random.default_rng(seed)
    values = dice.integers(0, 5, 12) * dice.integers(0, 2, 12)
    runs = Runs(values, dice.integers(0, 9, 12).cumsum())
    if not len(runs):
        return
    plain = np.asarray(runs)
    assert len(runs) == len(plain)
    assert (runs.sum(), runs.mean()) == (plain.sum(), plain.mean())
    for start, stop in dice.integers(0, len(plain) + 1, (20, 2)):
        assert np.asarray(runs[start:stop]).tolist() == plain[start:stop].tolist()
        assert runs[start:stop].sum() == plain[start:stop].sum()
    numbers = dice.integers(0, len(plain), 50)
    for chosen in (numbers, slice(None, None, 3)):
        assert (runs[chosen] == plain[chosen]).all()
    made = mapped.mapped(runs, lambda some: some * 3 + 1)
    assert np.asarray(made).tolist() == (plain * 3 + 1).tolist()
    twice = mapped.joined([runs, runs])
    assert np.asarray(twice).tolist() == mapped.joined([runs, plain]).tolist()
    sums, plain_sums = running_sum(runs), running_sum(plain)
    every = np.arange(-1, len(plain) + 1)
    assert (sums[every] == plain_sums[every]).all()
    aims = np.arange(-2, plain_sums[-1] + 3)
    for side in ("left", "right"):
        for aim in (aims, 3):
            found = np.searchsorted(sums, aim, side=side)
            assert np.array_equal(found, np.searchsorted(plain_sums, aim, side=side))
