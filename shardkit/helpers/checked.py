"""Parses JSON written by shardkit, with bounded size, and checks it against Python type hints.

Manifests, metadata in shards and lists beside them may be damaged or malicious. Values that pass
have their declared types, those of dataclasses and TypedDicts (`Any`: not checked). An error names
the location of the invalid value, such as `shards[3].samples`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, TypeVar, cast

from shardkit.errors import DamagedError, FormatError, UsageError

MAX_BYTES = 128 << 20  # maximum size of a manifest: one of 100,000 shards has 31 MB
_DEPTH = 32  # maximum nesting of lists and objects where any value is allowed
_SHOWN = 60  # characters of an invalid value to show
_T = TypeVar("_T")
_Check = Callable[[Any], Any]


@dataclass(frozen=True)
class Rule:
    """A condition in addition to the type, in a hint such as `Annotated[int, Rule(...)]`."""

    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("a whole number from 0 up", lambda n: 0 <= n < 2**63)]
Digest = Annotated[str, Rule("32 hex digits", re.compile(r"[0-9a-f]{32}").fullmatch)]


@dataclass(frozen=True)
class Extensible:
    """Base of objects to which later versions may add entries: `unknown` keeps them unchanged."""

    unknown: dict[str, Any] | None = field(default=None, kw_only=True, repr=False, compare=False)


class MismatchError(ValueError):
    """A value that does not match its type or rule, and its location."""

    def __init__(self, expected: str, value: Any, *keys: str | int) -> None:
        super().__init__()
        self.expected = expected
        self.found = _shown(value)
        self._path = ""
        for key in reversed(keys):
            self.inside(key)

    def inside(self, key: str | int) -> None:
        """Prepend `key` to the location: the value is an entry of a larger one."""
        name = isinstance(key, str) and key.isidentifier() and key.isascii()
        self._path = (f".{key}" if name else f"[{json.dumps(key):.{_SHOWN}}]") + self._path

    @property
    def location(self) -> str:
        return self._path.removeprefix(".")

    def __str__(self) -> str:
        at = f"{self.location}: " if self._path else ""
        return f"{at}expected {self.expected}, found {self.found}"


def parse(data: bytes) -> Any:
    """Parse JSON written by shardkit: UTF-8, finite numbers. Raises ValueError."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    try:
        return _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def checked(hint: type[_T], value: Any, *keys: str | int) -> _T:
    """Convert a parsed value to the type of a hint. Raises MismatchError at the location `keys`."""
    with under(*keys):
        found: _T = _checker(cast("Any", hint))(value)
    return found


@contextlib.contextmanager
def under(*keys: str | int) -> Iterator[None]:
    """A context that prepends the location `keys` to a MismatchError."""
    try:
        yield
    except MismatchError as error:
        for key in reversed(keys):
            error.inside(key)
        raise


def from_json(hint: type[_T], data: bytes, what: str, **where: Any) -> _T:
    """Parse and check JSON. Raises DamagedError, which says that `what` is damaged, and `where`."""
    try:
        return checked(hint, parse(data))
    except ValueError as error:
        raise damaged(what, error, **where) from error


def of_version(version: int, name: str, data: bytes, what: str, **where: Any) -> dict[str, Any]:
    """Parse a JSON object that has its version under `name`.

    Raises DamagedError, which says that `what` is damaged, and FormatError for another version.
    """
    try:
        found = parse(data)
        if type(found) is not dict or name not in found:
            raise MismatchError(f"an object with its version as {name!r}", found)
    except ValueError as error:
        raise damaged(what, error, **where) from error
    if found[name] != version:
        raise FormatError(
            f"{what} is of another version",
            expected=f"version {version}",
            found=f"version {found[name]!r:.60}",
            **{"fix": "use the shardkit that wrote it, or a newer one", **where},
        )
    return cast("dict[str, Any]", found)


def from_lines(hint: type[_T], data: bytes, what: str, **where: Any) -> Iterator[_T]:
    """Parse and check a file with one JSON value per line. Raises DamagedError."""
    for number, line in enumerate(data.splitlines(), 1):
        yield from_json(hint, line, f"line {number} of {what}", **where)


def damaged(what: str, error: Exception, **where: Any) -> DamagedError:
    """Return the DamagedError for an error raised by `parse` or `checked`."""
    if isinstance(error, MismatchError):
        at = f" at {error.location}" if error.location else ""
        about = {"expected": error.expected, "found": error.found}
        return DamagedError(f"{what} is damaged{at}", **about, **where)
    return DamagedError(f"{what} is damaged: {error}", **where)


def plain(value: Any) -> Any:
    """Convert dataclasses to JSON values, with the `unknown` entries that `checked` retained."""
    if is_dataclass(value):
        entries = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return entries | (entries.pop("unknown", None) or {})
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


@functools.cache
def _checker(hint: Any) -> _Check:
    """Return the function that checks a parsed value, and converts it to the type of a hint."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return _plain_checker(hint)
    if origin is Annotated:
        kind, rule = args
        if kind in _WORDS:
            return _scalar(kind, rule.words, rule.holds)
        return functools.partial(_ruled, _checker(kind), rule)
    if origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in args if arg is not types.NoneType]
        inner = _checker(kinds[0]) if len(kinds) == 1 else functools.partial(_either, kinds)
        return lambda value: None if value is None else inner(value)
    if origin in (list, tuple):
        return functools.partial(_listed, origin, _checker(args[0]))
    assert origin in (dict, Counter)
    entries = functools.partial(_entries, {}, _checker(Count if origin is Counter else args[1]), ())
    check = entries if args[0] is str else functools.partial(_numbered, entries)
    return (lambda value: Counter(check(value))) if origin is Counter else check


def _plain_checker(hint: Any) -> _Check:
    """Like `_checker`, for a hint without parameters."""
    if hint is Any:
        return _anything
    if typing.is_typeddict(hint):
        checks = {n: _checker(h) for n, h in typing.get_type_hints(hint, None, None, True).items()}
        required = [name for name in checks if name in hint.__required_keys__]
        return functools.partial(_entries, checks, _anything, required)
    return _object(hint) if is_dataclass(hint) else _scalar(hint, _WORDS[hint], lambda value: True)


def _scalar(kind: type, words: str, holds: Callable[[Any], Any]) -> _Check:
    kinds = (int, float) if kind is float else (kind,)

    def check(value: Any) -> Any:
        if type(value) in kinds and holds(value):
            return value
        raise MismatchError(words, value)

    return check


def _either(kinds: list[Any], value: Any) -> Any:
    """Return a value of one of several kinds: text, a list, an object, ..."""
    for kind in kinds:
        made_of = typing.get_origin(kind) or kind
        if made_of is type(value) or (made_of is tuple and type(value) is list):
            return _checker(kind)(value)
    words = (_WORDS.get(typing.get_origin(kind) or kind) for kind in kinds)
    raise MismatchError(" or ".join(filter(None, words)), value)


def _ruled(check: _Check, rule: Rule, value: Any) -> Any:
    found = check(value)
    if rule.holds(found):
        return found
    raise MismatchError(rule.words, value)


def _anything(value: Any, depth: int = _DEPTH) -> Any:
    if isinstance(value, list | dict):
        if not depth:
            raise MismatchError(f"at most {_DEPTH} levels of lists and objects", value)
        for entry in value.values() if isinstance(value, dict) else value:
            _anything(entry, depth - 1)
    return value


def _listed(kind: Callable[[list[Any]], Any], check: _Check, value: Any) -> Any:
    if type(value) not in (list, tuple):  # a schema that did not come from JSON has tuples
        raise MismatchError("a list", value)
    found: list[Any] = []
    try:
        for entry in value:
            found.append(check(entry))
    except MismatchError as error:
        error.inside(len(found))
        raise
    return kind(found)


def _entries(
    checks: Mapping[str, _Check], others: _Check, required: Collection[str], value: Any
) -> dict[str, Any]:
    """Return an object. Entries that have no check of their own are checked by `others`."""
    if type(value) is not dict:
        raise MismatchError("an object", value)
    for name in required:
        if name not in value:
            raise MismatchError("a value", _NOTHING, name)
    found = {}
    name = ""
    try:
        for name, entry in value.items():
            found[name] = checks.get(name, others)(entry)
    except MismatchError as error:
        error.inside(name)
        raise
    return found


def _numbered(entries: _Check, value: Any) -> dict[int, Any]:
    """Return an object whose keys are whole numbers."""
    found = entries(value)
    for name in found:
        if not re.fullmatch(r"-?[0-9]{1,19}", str(name)):
            raise MismatchError("whole numbers as names", name)
    return {int(name): entry for name, entry in found.items()}


def _object(kind: Any) -> _Check:
    """A dataclass. Unknown entries are retained if it is `Extensible`, otherwise an error."""
    hints = typing.get_type_hints(kind, include_extras=True)
    known = [f for f in dataclasses.fields(kind) if f.name != "unknown"]
    none = dataclasses.MISSING
    required = [f.name for f in known if f.default is none and f.default_factory is none]
    checks = {f.name: _checker(hints[f.name]) for f in known}
    extensible = issubclass(kind, Extensible)

    def check(value: Any) -> Any:
        found = _entries(checks, _anything, required, value)
        if not found.keys() <= checks.keys():
            more = {name: found.pop(name) for name in [*found] if name not in checks}
            if not extensible:
                raise MismatchError(f"only {', '.join(checks)}", next(iter(more)))
            found["unknown"] = more
        try:
            return kind(**found)
        except UsageError as error:  # raised by the class's own checks
            raise MismatchError(error.expected or str(error.what), error.found or value) from error

    return check


_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text"}
_WORDS |= {bool: "true or false", tuple: "a list", dict: "an object"}
_NOTHING = object()


def _shown(value: Any) -> str:
    """Return an invalid value for messages: short, and ASCII only."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    text = value[:_SHOWN] if isinstance(value, str) else value
    return "nothing" if value is _NOTHING else f"{json.dumps(text):.{_SHOWN}}"


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.{_SHOWN}} is not a JSON number")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
