"""Runs that die after a change of a store, by snapshots of a bucket."""

import contextlib
import re

import pytest

from shardkit.conversion import claim
from shardkit.storage import fs
from shardkit.storage.remote import store as stores
from tests.conversion.deaths import Died


@contextlib.contextmanager
def changes_to(bucket, after):
    """Calls `after` with each change, such as "put out/a.tar", when it is made: one after the
    other. Once that has raised `Died`, nothing is changed any more, whatever cleaning up tries.

    Claims are not renewed while time passes, as the thread that does it might do it at any change.
    """
    dead = False

    def wrap(name, operation):
        def wrapped(*args):
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
        for name in fs.STORE_CHANGES:
            patch.setattr(fs, name, wrap(name, getattr(fs, name)))
        patch.setattr(stores, "together", _in_turn)
        patch.setattr(claim, "BEAT", 1e6)
        yield


def _in_turn(work, items, report=lambda item: None):
    for item in sorted(items, key=str):
        work(item)
        report(item)


def resumed(bucket, run, few=None):
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
