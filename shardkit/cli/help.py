"""The help of commands, with options in groups and examples at the end."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

from shardkit.helpers.familiar import option_instead
from shardkit.helpers.keywords import called_by, docs_of


class Example(NamedTuple):
    """A command line. A test runs it next to the datasets `photos`, `texts`, `shards`, `more`."""

    line: str
    about: str
    not_run: str = ""  # why no test runs it


class Command(click.Command):
    """A command with examples, whose options are in the groups made by `option_group`.

    Ungrouped options after a group, such as `--help`, belong to it as well.
    """

    def __init__(self, *args: Any, examples: Sequence[Example] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for arg in args * (not ctx.resilient_parsing):  # set during completion
            if arg[:1] in ("–", "—"):  # as word processors and web pages show two hyphens
                ctx.fail(f"{arg!r} begins with a dash: type two hyphens, --{arg.lstrip('–—')}")
            if re.match("-[a-z]=", arg):
                ctx.fail(f"{arg!r}: type a blank instead of =, as in {arg[:2]} {arg[3:]}")
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if instead := self._instead(error.option_name):
                ctx.fail(f"{error.message.rstrip('.')}: {instead}")
            raise

    def _instead(self, unknown: str) -> str | None:
        """Return what to type instead of an unknown option, if that is known."""
        flags = {_name(flag): flag for param in self.params for flag in param.opts}
        instead = option_instead(_name(unknown), flags)

        def typed(match: re.Match[str]) -> str:
            return flags[match[1]] + ("" if match[2] else " ")

        return instead and re.sub(rf"\b({'|'.join(flags)})=(True)?", typed, instead)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        title = "Options"
        for param in self.get_params(ctx):
            title = getattr(param, "group", title)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=26)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write_text(f"{example.about}:")
                formatter.write(f"    {example.line}\n")  # not wrapped, so that it can be copied


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def option_group(title: str, *decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds several `click.option`s to a command, as one group of its help.

    >>> @click.command("x", cls=Command, examples=[Example("shardkit x --size 3", "Three")])
    ... @option_group("Images", click.option("--size", help="Pixels."))
    ... def x() -> None: ...
    """

    def add(command: Any) -> Any:
        for decorate in reversed(decorators):
            command = decorate(command)
            command.__click_params__[-1].group = title
        return command

    return add


def options_of(title: str, kind: type[Any], **words: str) -> Callable[[Any], Any]:
    """A group of options for fields of a dataclass, with their types, defaults and descriptions.

    `words` maps the fields to add, in order, to a metavar, or to "" for a flag or a choice.
    """
    every, docs = {f.name: f for f in dataclasses.fields(kind)}, docs_of(kind)
    return option_group(title, *(_option(every[n], w, docs[n]) for n, w in words.items()))


# Options, each with a single value, of fields that are plurals of these names.
_SEVERAL = ("ray_option", "batch_size", "transform", "measure")
_FLAGS = {f"{name}s": f"--{name.replace('_', '-')}" for name in _SEVERAL}
_TYPES = {"int": int, "float": float}


def _option(field: dataclasses.Field[Any], word: str, about: str) -> Any:
    flag = _FLAGS.get(field.name, f"--{called_by(field).replace('_', '-')}")
    kind = str(field.type).removesuffix(" | None")
    about = about if about[0] == '"' else about[0].upper() + about[1:]  # do not capitalize a value
    about, says, none = re.sub(r'"(\S+?)"', r"\1", about).partition(" None: ")
    of = click.Path() if word == "FILE" else _TYPES.get(kind, str)
    arguments: dict[str, Any] = {"type": of, "metavar": word}
    if choices := field.metadata.get("choices"):
        arguments = {"type": click.Choice(choices)}
    elif kind == "bool":
        arguments = {"is_flag": True, "metavar": None}
        flag += f"/--no-{flag[2:]}" * str(field.type).endswith("None")
    elif "=" in word or "," in word:
        about += " Repeatable."
        callback = pairs if "=" in word else _numbers if "[int]" in kind else _names
        arguments = {"metavar": word, "multiple": True, "callback": callback}
    if isinstance(field.default, tuple) and field.default:
        arguments["default"] = [",".join(map(str, field.default))]
    elif field.default not in (None, (), dataclasses.MISSING) or says:
        arguments["default"] = field.default
    about += f"  [default: {none.removesuffix('.')}]" * bool(says)
    return click.option(flag, field.name, help=about, **arguments)


def pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return a dict of the pairs of a repeatable option."""
    found = [value.partition("=") for value in values]
    if not all(name and equals for name, equals, _ in found):
        raise click.BadParameter(f"expected {param.metavar}")  # not the value: it may be secret
    return {name: value for name, _, value in found}


def _numbers(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[int]:
    try:
        return [int(word) for word in _names(ctx, param, values)]
    except ValueError:
        raise click.BadParameter("expected numbers, such as 1,2,4") from None


def _names(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Return names separated by commas; a name with a comma is quoted, as in CSV."""
    return [name for row in csv.reader(values) for name in row or [""]]
