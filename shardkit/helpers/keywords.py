"""Functions with keyword options: their signatures, their help, and errors for misspelled names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter
from typing import Any, TypeVar

from shardkit.errors import UsageError, near
from shardkit.helpers.familiar import option_instead

_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
Function = TypeVar("Function", bound=Callable[..., Any])


def takes(*sources: Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorate a function whose `**options` are the fields of dataclasses, or those of functions.

    `help`, notebooks and `inspect` show all options, with their defaults and descriptions. An
    unknown name raises UsageError, which suggests similar names; so does a flag that is not a bool.
    """

    def decorate(function: Function) -> Function:
        own = inspect.signature(function)
        every = [p for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        first = {p.name for p in every}
        every += [p for source in sources for p in _by_name(source) if p.name not in first]
        known = [p.name for p in every if p.kind in _BY_NAME and p.name != "self"]
        flags = {p.name for p in every if p.annotation == "bool"}

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for name, value in options.items():
                if name in flags and not isinstance(value, bool):
                    raise UsageError(f"{name} must be True or False", found=f"{value!r:.200}")
                if name not in known:
                    fix = option_instead(name, known)
                    expected = near(name, known) if fix is None else None
                    what = f"there is no option {name!r}"
                    raise UsageError(what, expected=expected, fix=fix)
            return function(*args, **options)

        call.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
        texts = [inspect.getdoc(function) or "", *map(_doc, sources)]
        call.__doc__ = "\n\n".join(texts)
        return call  # type: ignore[return-value]

    return decorate


def called_by(field: Field[Any]) -> str:
    """Return the name that functions and the command line have for an option."""
    return field.metadata.get("called") or field.name


def docs_of(kind: type[Any]) -> dict[str, str]:
    """The descriptions of a dataclass's fields in its docstring: the lines after `name: `."""
    found = re.finditer(r"^(\w+): (.+(?:\n {4}.+)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    return {match[1]: " ".join(match[2].split()) for match in found}


def _by_name(source: Callable[..., Any]) -> list[Parameter]:
    """Return the fields of a dataclass, or the keyword-only parameters of a function."""
    if not (isinstance(source, type) and is_dataclass(source)):
        every = inspect.signature(source).parameters.values()
        return [p for p in every if p.kind is Parameter.KEYWORD_ONLY]
    found = []
    for field in fields(source):
        made = None if field.default_factory is MISSING else field.default_factory()
        default = made if field.default is MISSING else field.default
        kind = Parameter.KEYWORD_ONLY
        found.append(Parameter(called_by(field), kind, default=default, annotation=field.type))
    return found


def _doc(source: Callable[..., Any]) -> str:
    """The descriptions of the options in a docstring: for a dataclass, without its first line."""
    text = inspect.getdoc(source) or ""
    if not (isinstance(source, type) and is_dataclass(source)):
        return text
    for field in fields(source):
        text = re.sub(rf"^{field.name}: ", f"{called_by(field)}: ", text, flags=re.MULTILINE)
    return text.partition("\n\n")[2].partition("\n\nRaises ")[0]
