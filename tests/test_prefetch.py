"""Prefetching: results in order, how far ahead, and what an early end cancels."""

from concurrent.futures import Future
from itertools import islice, repeat

from shardkit.helpers.prefetch import growing, in_threads, prefetch


def test_items_are_started_ahead_in_order_up_to_a_weight():
    started = []
    results = prefetch(range(9), lambda n: started.append(n) or n, growing(1, 4))
    ahead = [(next(results), len(started)) for _ in range(9)]
    assert ahead == [(0, 1), (1, 3), (2, 6), (3, 7), (4, 8), *((n, 9) for n in range(5, 9))]
    heavy = prefetch([5, 1, 1, 9], lambda n: started.append(n) or n, repeat(2), lambda n: n)
    del started[:]
    assert [(next(heavy), [*started]) for _ in range(2)] == [(5, [5]), (1, [5, 1, 1])]
    assert [*heavy] == [1, 9]


def test_an_early_end_cancels_what_has_not_begun():
    futures = [Future() for _ in range(4)]
    futures[0].set_result(7)
    futures[1].set_running_or_notify_cancel()
    results = prefetch(futures, lambda future: future, repeat(4))
    assert next(results).result() == 7
    results.close()
    assert [future.cancelled() for future in futures] == [False, False, True, True]


def test_threads_give_results_in_order_and_stop():
    stopped = []
    found = in_threads(lambda n: n * n, iter(range(100)), 4, 2, stop=lambda: stopped.append(1))
    assert [*islice(found, 50)] == [n * n for n in range(50)]
    found.close()
    assert stopped == [1]
