"""docs/reference is what the code says, and every public name says what it is and raises."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import click
import pytest

import shardkit
from shardkit.cli import COMMANDS, group
from tests import reference
from tests.reference import MEMBERS, MODULES, public


@pytest.fixture(scope="module")
def pages():
    return reference.pages()


def test_it_is_fresh_and_has_every_public_name_and_nothing_of_this_machine(pages):
    for name, text in pages.items():
        stored = (reference.FOLDER / name).read_text("utf-8")
        assert stored == text, f"{name} is not what the code says: python -m tests.reference"
        assert not re.search(r" at 0x[0-9a-f]+|PosixPath", text)
    headings = set(re.findall(r"^### (\S+)$", pages["api.md"], re.MULTILINE))
    names = {f"shardkit.{name}" for name in shardkit.__all__ if name != "__version__"}
    names |= {"shardkit.torch.Loader", "shardkit.stream.Loader", "shardkit.tensorflow.dataset"}
    assert names <= headings


def test_every_option_of_a_command_is_there(pages):
    first, *parts = pages["cli.md"].split("\n## shardkit ")
    context = click.Context(group)
    for name, part in zip(["", *COMMANDS], [first, *parts], strict=True):
        assert part.startswith(f"{name}\n" if name else "#")
        command = group.get_command(context, name) if name else group
        options = [option for option in command.params if isinstance(option, click.Option)]
        names = [n for o in options for n in (*o.opts, *o.secondary_opts) if not o.hidden]
        assert [n for n in names if not re.search(rf"[`, /]{n}[`, ]", part)] == []


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
