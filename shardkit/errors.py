"""The errors of shardkit: what happened, where, what was expected and found, how to fix it."""

from __future__ import annotations

import errno
import re
import shlex
import sys
import threading
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

# The default `fix` for a damaged file of a dataset.
AGAIN = "copy it again from an undamaged copy, or create it again"

_NAMES = 40  # maximum number of names that an error lists

# The locations an error can name, in the order they are printed.
_LOCATIONS = ("path", "shard", "position", "key", "field", "offset", "line")

# An error of a worker of torch's DataLoader, with its traceback, in another process.
_FROM_WORKER = re.compile(r"Caught \w+ in \w+ worker process \d+\.\nOriginal Traceback")


class ShardkitError(Exception):
    """Base class of all errors that shardkit raises deliberately.

    what: what happened, in one sentence.
    expected: what was expected.
    found: what was found instead.
    fix: what you can do about it.
    where: where it happened: any of path, shard, position (number of the sample in the shard), key,
        field, offset (bytes from the start of the file) and line (from 1, in tables).

    Raises TypeError for other locations.
    """

    exit_code = 1  # bad data

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        fix: str | None = None,
        **where: Any,
    ) -> None:
        unknown = where.keys() - set(_LOCATIONS)
        if unknown:
            known = ", ".join(_LOCATIONS)
            raise TypeError(f"unknown locations in an error: {sorted(unknown)}, expected {known}")
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.found = found
        self.fix = fix
        self.where: dict[str, Any] = {
            place: where[place] for place in _LOCATIONS if where.get(place) is not None
        }

    def located(self, **where: Any) -> ShardkitError:
        """Return the same error with missing parts of its location filled in."""
        located = type(self)(
            self.what,
            expected=self.expected,
            found=self.found,
            fix=self.fix,
            **{**where, **self.where},
        )
        located.__cause__ = self.__cause__
        return located

    def to_dict(self) -> dict[str, Any]:
        """Return the parts that are not empty, as for `--json` and `errors.jsonl`."""
        parts = {"expected": self.expected, "found": self.found, "fix": self.fix}
        where = {k: v if isinstance(v, int) else str(v) for k, v in self.where.items()}
        return {
            "error": type(self).__name__,
            "what": self.what,
            **where,
            **{name: text for name, text in parts.items() if text is not None},
        }

    def __str__(self) -> str:
        lines = [self.what]
        if _FROM_WORKER.match(self.what):  # torch makes the error again, of all its text
            return "\n".join(map(printable, self.what.rstrip().split("\n")))
        if self.where:
            lines.append("  where: " + ", ".join(_place(k, v) for k, v in self.where.items()))
        for name in ("expected", "found", "fix"):
            text = getattr(self, name)
            if text is not None:
                lines.append(f"  {name}: {text}")
        return "\n".join(map(printable, lines))

    def __reduce__(self) -> tuple[Any, ...]:
        parts = {"expected": self.expected, "found": self.found, "fix": self.fix, **self.where}
        return _rebuild, (type(self), self.what, parts)


def _rebuild(cls: type[ShardkitError], what: str, parts: dict[str, Any]) -> ShardkitError:
    return cls(what, **parts)


def _place(name: str, value: Any) -> str:
    if name == "offset":
        return f"byte {value}"
    if name == "path":
        return str(value)
    return f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}"


def printable(text: str) -> str:
    """Escape all non-printable characters, so that a text is safe to print to a terminal.

    Names, keys and values come from untrusted data: a terminal obeys escape sequences in them, line
    breaks can forge lines, and direction marks reorder text. As in `repr`, é and 漢 are kept.

    >>> print(printable("cat\\x1b[31m.jpg"))
    cat\\x1b[31m.jpg
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def near(name: object, known: Iterable[str]) -> str:
    """The text of `expected` for an unknown name: the known names, and those that are similar.

    >>> near("labl", ["image", "label"])
    'one of image, label; did you mean label?'
    """
    every = list(known)
    words = "one of " + ", ".join(every[:_NAMES]) + ", ..." * (len(every) > _NAMES)
    close = similar(str(name), every)
    return words + (f"; did you mean {' or '.join(close)}?" if close else "")


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the most similar one or two of the known names; capital letters do not differ."""
    from difflib import get_close_matches

    lower, by_lower = name.lower(), {each.lower(): each for each in known}
    found = [lower] if lower in by_lower else get_close_matches(lower, by_lower, 2, 0.6)
    return [by_lower[one] for one in found]


def drop_option(field: str) -> str:
    """Return the option that drops a field in a conversion, quoted for a shell."""
    name = '"' + field.replace('"', '""') + '"' if set(field) & set(',"\n\r') else field
    return f"--drop {shlex.quote(name)}"


def rename_option(field: str, name: str = "NAME") -> str:
    """Return the option that renames a field in a conversion, quoted for a shell."""
    return f"--rename {shlex.quote(f'{field}={name}')}"


def is_want_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, also while loading a library or starting a thread."""
    if isinstance(error, ImportError):
        words = ("failed to map segment", "cannot allocate memory")
        return any(word in str(error).lower() for word in words)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return str(error) == "can't start new thread"
    if isinstance(error, SystemError):  # raised by Python's import system
        return str(error) == "error return without exception set"
    return isinstance(error, MemoryError)


def memory_ran_out(error: BaseException, where: str = "") -> str:
    """Return the message for this, with the last line of the original one, such as NumPy's."""
    reason = str(error).strip().rpartition("\n")[2]
    return f"memory ran out{where}" + (f": {reason}" if reason else "")


class UsageError(ShardkitError):
    """Invalid command line or arguments. Nothing was started."""

    exit_code = 2


class NotFoundError(UsageError, FileNotFoundError):
    """A given path does not exist."""


class MissingKeyError(UsageError, KeyError):
    """No sample has the given key."""


class MissingLibraryError(UsageError, ImportError):
    """An optional library is needed, but not installed."""


class OutputError(UsageError):
    """The output cannot be used: it already exists, is unfinished, or is inside the source."""


class FormatError(ShardkitError):
    """A path has no known format, or a format does not support what was requested."""


class SourceError(ShardkitError):
    """A source as a whole cannot be used, such as an empty folder or a loop of links."""


class SampleError(ShardkitError):
    """A single sample is bad. With `on_error="skip"`, samples that raise this error are skipped."""


class DamagedError(ShardkitError):
    """A file is truncated, or its bytes contradict its format or its manifest."""

    def __init__(self, what: str, *, fix: str | None = AGAIN, **where: Any) -> None:
        super().__init__(what, fix=fix, **where)


class StorageError(ShardkitError):
    """The system failed to read or write: disk full, no permission, device error."""


class UnreachableError(StorageError, UsageError):
    """The store does not respond: its address is wrong, or there is no connection.

    Raised only if none of this process's requests to it was ever answered: nothing was started.
    """


class WorkerError(ShardkitError):
    """A worker process died, or raised an exception that is not a ShardkitError."""


class ShardkitWarning(UserWarning):
    """Something works, but not as well as it could, or not as you might expect."""

    def __str__(self) -> str:
        return printable(super().__str__())


# Modules whose stack frames may be between the user's code and ours.
_BETWEEN = ("shardkit", "contextlib", "functools", "concurrent", "threading", "torch")


def warn(text: str) -> None:
    """Issue a warning that points to the line of the user's code that called shardkit.

    In a thread of shardkit, that is the line that the main thread is executing.
    """
    text = re.sub(r"\n\s*", "; ", text)  # an error has several lines
    caller, main = _outside(sys._getframe(1)), threading.main_thread().ident or 0
    if caller is None and threading.get_ident() != main:
        caller = _outside(sys._current_frames().get(main))
    if caller is None:
        warnings.warn(text, ShardkitWarning, stacklevel=2)
        return
    names, file = caller.f_globals, caller.f_code.co_filename
    registry = names.setdefault("__warningregistry__", {})
    module = names.get("__name__")
    warnings.warn_explicit(text, ShardkitWarning, file, caller.f_lineno, module, registry)


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN:
            return frame
        frame = frame.f_back
    return None
