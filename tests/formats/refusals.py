"""What an error of ours says: where it happened, what was found, what to do."""

from contextlib import contextmanager

import pytest


@contextmanager
def refused(kind, match=None, *, fix="", says="", where=None, **parts):
    """A block that raises such an error: `where` is all it names, `parts` some of it."""
    with pytest.raises(kind, match=match) as raised:
        yield raised
    error = raised.value
    assert fix in (error.fix or "")
    assert says in str(error)
    assert where is None or error.where == where
    for name, value in parts.items():
        found = vars(error)[name] if name in ("expected", "found") else error.where[name]
        assert found == value, name
