"""Runs that die after a change of a store, by snapshots of a bucket."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from shardkit import storage
from shardkit.conversion import claim
from shardkit.remote import store as stores
from tests.remote.buckets import Bucket


class Died(BaseException):
    """The process is gone: no `except Exception` may catch this."""


@contextlib.contextmanager
def changes_to(bucket: Bucket, after: Callable[[str], object]) -> Iterator[None]:
    """Calls `after` with each change, such as "put out/a.tar", when it is made: one after the
    other. Once that has raised `Died`, nothing is changed any more, whatever cleaning up tries.

    Claims are not renewed while time passes, as the thread that does it might do it at any change.
    """
    dead = False

    def wrap(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            nonlocal dead
            if dead:
                raise Died
            result = operation(*args)
            try:
                after(f"{name} {args[0 if name == 'delete' else 1].key}")
            except Died:
                dead = True
                raise
            return result

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in storage.STORE_CHANGES:
            patch.setattr(storage, name, wrap(name, getattr(storage, name)))
        patch.setattr(stores, "together", _in_turn)
        patch.setattr(claim, "BEAT", 1e6)
        yield


def _in_turn(
    work: Callable[[Any], object],
    items: Iterable[Any],
    report: Callable[[Any], object] = lambda item: None,
) -> None:
    for item in sorted(items, key=str):
        work(item)
        report(item)


def resumed(
    bucket: Bucket, run: Callable[[], object], few: Iterable[str] | None = None
) -> Iterator[str]:
    """The bucket as it is before a run, and then after each change that the run makes; or after
    the first of each of a `few`, such as "put run.json". Yields what the last change was."""
    moments = [("", bucket.snapshot())]
    with changes_to(bucket, lambda what: moments.append((what, bucket.snapshot()))):
        run()
    assert len(moments) > 12
    if few is not None:
        patterns = [re.compile("{} .*{}".format(*what.split(" "))) for what in few]
        moments = [next(m for m in moments if pattern.fullmatch(m[0])) for pattern in patterns]
    for what, snapshot in moments:
        bucket.restore(snapshot)
        print("after", what)
        yield what
