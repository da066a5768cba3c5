"""Other packages: libraries that extras of shardkit install, and packages that extend shardkit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardkit.errors import MissingLibraryError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints


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


def not_built(error: ImportError) -> str:
    """Return why an extension of shardkit cannot be imported."""
    absent = (error.name or "").count(".") == 1  # the name of the package that does not have it
    return "it was not built when shardkit was installed" if absent else str(error)


def entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group in all installed packages, which are read only once."""
    found: EntryPoints = _installed().select(group=group)
    return found


@functools.cache
def _installed() -> Any:
    import importlib.metadata  # slow

    return importlib.metadata.entry_points()


def package_of(entry: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return entry.dist.name if entry.dist is not None else entry.value
