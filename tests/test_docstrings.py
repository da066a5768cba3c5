"""Every public name says what it is, what its arguments mean, and which errors it raises."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from tests.reference import MEMBERS, MODULES, public

NAMES = [(module, name) for module in (*MODULES, "shardkit.testing") for name in public(module)]


def text_of(value: Any) -> str:
    """What `help` shows of a function, or of a class, its bases and what makes it."""
    every = [value]
    if inspect.isclass(value):
        every = [*value.__mro__, *(kind.__init__ for kind in value.__mro__)]
    ours = [one for one in every if str(getattr(one, "__module__", "")).startswith("shardkit")]
    return "\n".join(inspect.getdoc(one) or "" for one in ours)


def check(value: Any, text: str | None) -> None:
    """Each argument and each error that is raised by name in its body is in the text."""
    assert text is not None
    names = [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    assert {error for error in raised(value) if error not in text} == set()


def raised(value: Any) -> set[str]:
    function = value.__dict__.get("__init__") if inspect.isclass(value) else inspect.unwrap(value)
    if function is None or inspect.unwrap(function).__code__.co_filename == "<string>":
        return set()  # made by dataclasses
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    nodes = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
    names = {ast.unparse(error.func) for error in nodes if isinstance(error, ast.Call)}
    return {name for name in names if name.endswith("Error")}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=str)
def test_a_public_name_tells_of_itself(module, name):
    value = getattr(importlib.import_module(module), name)
    if not callable(value):
        return
    assert len((inspect.getdoc(value) or "").split()) >= 3
    if name not in ("Dataset", "FormatContract", "ShardkitWarning"):  # nobody makes these
        check(value, text_of(value))


def members() -> Iterator[Any]:
    for module, name in NAMES:
        value = getattr(importlib.import_module(module), name)
        for member in MEMBERS.get(getattr(value, "__name__", ""), ()):
            yield pytest.param(value, member, id=f"{module}.{name}.{member}")


@pytest.mark.parametrize(("kind", "name"), [*members()])
def test_a_method_for_users_tells_of_itself(kind, name):
    found = inspect.getattr_static(kind, name)
    if isinstance(found, property):
        assert inspect.getdoc(found)
    else:
        check(getattr(found, "__func__", found), inspect.getdoc(getattr(kind, name)))


def test_the_checks_can_fail():
    def function(count, size):
        """Something with a count."""
        raise ValueError("x")

    with pytest.raises(AssertionError, match="size"):
        check(function, function.__doc__)
    with pytest.raises(AssertionError, match="ValueError"):
        check(function, "count and size")
    check(function, "count and size; raises ValueError")
