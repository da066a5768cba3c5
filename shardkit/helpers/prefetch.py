"""Calls in threads, ahead of the use of their results, which are given in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Started = TypeVar("_Started")
_Result = TypeVar("_Result")


def prefetch(
    items: Iterable[_Item],
    start: Callable[[_Item], _Started],
    ahead: Iterator[float],
    weigh: Callable[[_Item], float] = lambda item: 1,
) -> Iterator[_Started]:
    """Yield `start(item)` for each item, in order; later items were started already by then.

    `ahead` gives, for each result, the weight that started items may reach: with the default
    `weigh`, their number. At least one is started. If the iteration ends early, futures that do not
    run yet are cancelled.
    """
    left, end = iter(items), object()
    waiting: deque[tuple[_Started, float]] = deque()
    load = 0.0
    try:
        for most in ahead:
            while not waiting or load < most:
                item: Any = next(left, end)
                if item is end:
                    break
                weight = weigh(item)
                waiting.append((start(item), weight))
                load += weight
            if not waiting:
                return
            started, weight = waiting.popleft()
            load -= weight
            yield started
    finally:
        for started, _ in waiting:
            if isinstance(started, Future):
                started.cancel()


def growing(first: int, most: int) -> Iterator[int]:
    """Yield numbers for `prefetch`: from `first`, twice as many each time, up to `most`."""
    while True:
        yield first
        first = min(2 * first, most)


def split(whole: range, counts: Iterable[int]) -> Iterator[range]:
    """Yield consecutive parts of a range, of so many numbers each."""
    for count in counts:
        if not whole:
            return
        yield whole[:count]
        whole = whole[count:]


def in_threads(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    threads: int,
    ahead: int,
    wait: Callable[[Future[_Result]], _Result] = Future.result,
    stop: Callable[[], object] = lambda: None,
) -> Generator[_Result, None, None]:
    """Yield `function(item)` for each item, in order; at most `ahead` items per thread are queued.

    `wait` gets the result of a future. If the iteration ends early, `stop` is called before waiting
    for the calls that are running.
    """
    with ThreadPoolExecutor(threads) as pool:
        try:
            futures = prefetch(
                items,
                lambda item: pool.submit(function, item),
                itertools.repeat(ahead * threads + 1),
            )
            for future in futures:
                yield wait(future)
        except BaseException:
            stop()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
