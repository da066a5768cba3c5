"""Other packages: libraries that extras of shardkit install, and packages that extend shardkit."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardkit.errors import MissingLibraryError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


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


def entry_points(group: str) -> Sequence[EntryPoint]:
    """Return the entry points of a group in all installed packages, which are read only once."""
    return tuple(_installed().select(group=group)) if _may_extend() else ()


@functools.cache
def _installed() -> Any:
    import importlib.metadata  # slow

    return importlib.metadata.entry_points()


@functools.cache
def _may_extend() -> bool:
    """Return whether a package may extend shardkit, which takes a tenth of reading all packages."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    return len(finders) > 1 or any(map(_has_extension, sys.path))


def _has_extension(folder: str) -> bool:
    """Return whether a package in a folder of modules, or in an archive of them, may extend it."""
    try:
        names = [name for name in os.listdir(folder or ".") if name.lower().endswith("-info")]
    except OSError:
        return os.path.isfile(folder)
    return any(_names_us(os.path.join(folder, name, "entry_points.txt")) for name in names)


def _names_us(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return b"[shardkit." in file.read()
    except OSError:  # most packages have no entry points
        return False


def package_of(entry: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return entry.dist.name if entry.dist is not None else entry.value
