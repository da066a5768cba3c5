"""Optional libraries: errors that name the extra of shardkit that installs a missing library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardkit.errors import MissingLibraryError


@contextmanager
def extra(name: str, what: str, instead: str = "") -> Iterator[None]:
    """A context for imports of libraries that `pip install "shardkit[name]"` installs.

    Raises MissingLibraryError if one is missing: `what` needs it; `instead` is another fix.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library in ("", "shardkit"):
            raise
        raise missing(name, what, library, instead) from error


def missing(name: str, what: str, library: str, instead: str = "") -> MissingLibraryError:
    """Return the error for a library of the extra `name` that is not installed."""
    return MissingLibraryError(
        f"{what} needs {library}, which is not installed",
        fix=f'pip install "shardkit[{name}]"{instead}',
    )
