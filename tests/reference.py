"""docs/reference/: every command and option, and every public name, as the code has them.

    python -m tests.reference

writes both pages; tests/test_reference.py holds that they are fresh.
"""

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import MISSING
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from shardkit import AudioOptions, ConvertOptions, ImageOptions, StreamOptions, TextOptions
from shardkit.cli import COMMANDS, group
from shardkit.errors import ShardkitError
from shardkit.helpers.keywords import _by_name, _doc, called_by
from shardkit.stream import Loader

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
HEAD = "<!-- Made by `python -m tests.reference`: change the code, not this page. -->\n"

# Module with public names -> what it is for.
MODULES = {
    "shardkit": "Converting, opening, inspecting and verifying; fields, options and errors.",
    "shardkit.torch": "Batches for torch, and a monitor of training loops.",
    "shardkit.stream": "Batches of NumPy arrays, without torch.",
    "shardkit.tensorflow": "Batches as a `tf.data.Dataset`.",
}

# Class -> those of its methods and properties that are for users.
_LOADER = (*("remaining", "set_epoch", "state_dict", "load_state_dict", "profile", "padding"),)
# Made by functions: nobody calls these classes.
GIVEN = (
    *("Dataset", "ConvertResult", "DiffReport", "ExportResult", "MediaInfo", "Progress"),
    "VerifyReport",
)
# Options that others take, too: they are described there alone.
SHARED: dict[str, Any] = {
    "shardkit.stream.Loader": Loader.__init__,
    "shardkit.StreamOptions": StreamOptions,
    "shardkit.ConvertOptions": ConvertOptions,
    "shardkit.ImageOptions": ImageOptions,
    "shardkit.AudioOptions": AudioOptions,
    "shardkit.TextOptions": TextOptions,
}
MEMBERS = {
    "Dataset": (
        *("classes", "class_names", "columns", "keys", "column", "lengths", "select", "filter"),
        *("stats", "locate", "sample_path", "tokenizer_path", "close"),
    ),
    "DatasetWriter": ("write", "close", "discard"),
    "ConvertResult": ("samples", "bytes", "errors", "to_dict"),
    "VerifyReport": ("sound", "verdict", "to_dict"),
    "Schema": ("check", "renamed", "to_json", "from_json"),
    "ShardkitError": ("to_dict",),
    "Loader": _LOADER,
    "StreamingDataset": ("set_epoch",),
    "Monitor": ("report", "close"),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")


def pages() -> dict[str, str]:
    """Name of the page -> its text."""
    return {"cli.md": cli(), "api.md": api()}


# The command line.


def cli() -> str:
    parts = [
        "# Command line\n",
        HEAD,
        "`shardkit COMMAND --help` prints the same. Exit codes: 0 done, 1 the data are at fault,"
        " 2 the command line is, 130 interrupted.\n",
        "\n".join(f"- [`{n}`](#shardkit-{n}): {h}" for n, h in COMMANDS.items()) + "\n",
    ]
    context = click.Context(group)
    commands = {name: group.get_command(context, name) or group for name in COMMANDS}
    shown = Counter(_option(o) for c in commands.values() for o in _options(c))
    shared = {option for option, count in shown.items() if count > 3}
    parts += ["\n".join(["Options of all or several commands:\n", *map(_option, _options(group))])]
    parts += ["\n".join(option for option in shown if option in shared) + "\n"]
    for name, command in commands.items():
        parts += [*_command(name, command, shared)]
    return "\n".join(parts)


def _command(name: str, command: click.Command, shared: Set[str]) -> Iterator[str]:
    context = click.Context(command, info_name=f"shardkit {name}")
    yield f"## shardkit {name}\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield from _text(inspect.cleandoc(command.help or ""))
    for title, options in _sections(command).items():
        if title:
            yield f"### {name}: {title.lower()}\n"
        yield "\n".join(o for o in map(_option, options) if o not in shared) + "\n"
    also = [f"`{o.opts[0]}`" for o in _options(command) if _option(o) in shared]
    if also:
        yield f"Also {', '.join(also)}.\n"
    examples = [f"# {e.about}\n{e.line}" for e in getattr(command, "examples", ())]
    if examples:
        yield "**Examples**\n\n```sh\n" + "\n\n".join(examples) + "\n```\n"


def _options(command: click.Command) -> list[click.Option]:
    return [option for options in _sections(command).values() for option in options]


def _sections(command: click.Command) -> dict[str, list[click.Option]]:
    """The options by the headings under which `--help` has them; "" where it has none."""
    found: dict[str, list[click.Option]] = {}
    title = ""
    for option in command.params:
        title = getattr(option, "group", title)
        if isinstance(option, click.Option) and not option.hidden:
            found.setdefault(title, []).append(option)
    return found


def _option(option: click.Option) -> str:
    record = option.get_help_record(click.Context(group))
    assert record is not None
    names, words = record
    return f"- `{names}`: {_escaped(' '.join(words.split()))}"


# Python.


def api() -> str:
    parts = ["# Python\n", HEAD, "Everything that is public.\n"]
    earlier: dict[str, tuple[str, list[str]]] = {}  # name -> the first that is called so, its text
    for module, purpose in MODULES.items():
        names = [_linked(f"{module}.{n}", n) for n in public(module)]
        parts += [f"## {module}\n", f"{purpose}\n", ", ".join(names) + "\n"]
        for name in public(module):
            blocks = [*_name(getattr(importlib.import_module(module), name), name)]
            there, known = earlier.setdefault(name, (f"{module}.{name}", blocks))
            if known is not blocks:
                blocks = [block for block in blocks if block not in known]
                blocks.append(f"{'Otherwise as' if blocks else 'As'} {_linked(there)}.\n")
            parts += [f"### {module}.{name}\n", *blocks]
    return "\n".join(parts)


def public(module: str) -> list[str]:
    """The public names of a module: `__all__`, or what it defines or imports for others."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return [name for name in loaded.__all__ if name != "__version__"]
    found = {n: v for n, v in vars(loaded).items() if not n.startswith("_") and callable(v)}
    for_others = re.findall(r"import (\w+) as \1\b", inspect.getsource(loaded))
    return sorted(n for n, v in found.items() if v.__module__ == module or n in for_others)


def _linked(name: str, short: str = "") -> str:
    return f"[`{short or name}`](#{name.replace('.', '').lower()})"


def _name(value: Any, name: str) -> Iterator[str]:
    """The blocks of text of a public name, without its heading."""
    is_error = inspect.isclass(value) and issubclass(value, ShardkitError)
    called = name not in GIVEN and not (is_error and value is not ShardkitError)
    found, doc, others = _described(value)
    if called:
        told = {one for match in ITEM.finditer(doc) for one in match[1].split(", ")}
        back = "" if inspect.isclass(value) else _returned(value)
        yield _code(name + _call(found, told, bool(others)) + back)
    else:
        doc = inspect.getdoc(value) or ""
    yield from _text(doc, {n: _declared(p, called) for n, p in found.items()})
    if others:
        yield f"`options`: those of {', '.join(others)}.\n"
    if inspect.isclass(value):
        yield from _members(value)


def _returned(value: Any) -> str:
    back = inspect.signature(value).return_annotation
    return "" if back is Parameter.empty else f" -> {_kind(back)}"


def _kind(annotation: Any) -> str:
    """An annotation as text, without the bounds of `Annotated`."""
    found = getattr(annotation, "__forward_arg__", annotation)
    text = found if isinstance(found, str) else inspect.formatannotation(found)
    return re.sub(r"Annotated\[([^,]+), .*]", r"\1", text)


def _described(value: Any) -> tuple[dict[str, Parameter], str, list[str]]:
    """The parameters of what is public, its docstring, and what else describes its options."""
    doc = inspect.getdoc(value) or ""
    if dataclasses.is_dataclass(value):
        return {f.name: _of_field(f) for f in dataclasses.fields(value)}, doc, []
    made = vars(value).get("__init__", value) if inspect.isclass(value) else value
    if made is not value and made.__doc__:
        doc += f"\n\n{inspect.getdoc(made)}"
    found, others = _parameters(value), []
    for name, source in SHARED.items():
        text = _doc(source)
        if text in doc and (inspect.isclass(source) or not inspect.isclass(value)):
            doc = doc.replace(text, "")
            found = {n: p for n, p in found.items() if n not in {p.name for p in _by_name(source)}}
            others.append(_linked(name) + _otherwise_called(source))
    return found, doc, others


def _otherwise_called(source: Any) -> str:
    fields = dataclasses.fields(source) if inspect.isclass(source) else ()
    names = [f"`{f.name}` as `{called_by(f)}`" for f in fields if f.name != called_by(f)]
    return f" ({', '.join(names)})" if names else ""


def _of_field(field: dataclasses.Field[Any]) -> Parameter:
    made = None if field.default_factory is MISSING else field.default_factory()
    default = made if field.default is MISSING else field.default
    if field.default is MISSING and field.default_factory is MISSING:
        default = Parameter.empty
    kind = Parameter.KEYWORD_ONLY if field.kw_only else Parameter.POSITIONAL_OR_KEYWORD
    return Parameter(field.name, kind, default=default, annotation=field.type)


def _parameters(value: Any) -> dict[str, Parameter]:
    try:
        every = inspect.signature(value).parameters
    except ValueError:  # of an exception, by C
        return {}
    return {name: p for name, p in every.items() if name not in ("self", "cls")}


def _members(value: type) -> Iterator[str]:
    """What `MEMBERS` has of a class, with what its docstring says first."""
    rows = []
    for name in MEMBERS.get(value.__name__, ()):
        doc = inspect.getdoc(inspect.getattr_static(value, name)) or ""
        function = getattr(value, name)
        called = _call(found := _parameters(function), {*found}) if callable(function) else ""
        rows.append(f"- **`{name}{called}`** {' '.join(_escaped(doc).split())}".rstrip())
    if rows:
        yield "\n".join(rows) + "\n"


def _declared(parameter: Parameter, with_default: bool = True) -> str:
    """`name: type = default`."""
    kind, default = parameter.annotation, parameter.default
    words = str(parameter.replace(annotation=Parameter.empty, default=Parameter.empty))
    if kind is not Parameter.empty:
        words += f": {_kind(kind)}"
    return f"{words} = {default!r}" if with_default and default is not Parameter.empty else words


def _call(found: dict[str, Parameter], told: Set[str], options: bool = False) -> str:
    """The parameters as in a call, with the types of those that are not `told` below."""
    words, star = [], False  # before those that are given by name alone
    for one in found.values():
        star = star or one.kind is Parameter.VAR_POSITIONAL
        if one.kind is Parameter.KEYWORD_ONLY and not star:
            star = True
            words.append("*")
        bare = one.replace(annotation=Parameter.empty)
        words.append(str(bare) if one.name in told else _declared(one))
    words += ["**options"] if options else []
    line = ", ".join(words)
    if len(line) < 80:
        return f"({line})"
    if not told:
        return "(\n    " + ",\n    ".join(words) + ",\n)"
    filled = textwrap.fill(line, 92, break_long_words=False, break_on_hyphens=False)
    return "(\n" + textwrap.indent(filled, "    ") + "\n)"


# Markdown.


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


ITEM = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (\S.*)", re.MULTILINE)


def _text(doc: str, declared: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, lists of `name: text`, and examples as code."""
    for block in re.split(r"\n\s*\n", doc.strip()):
        text = textwrap.dedent(block)
        if text.startswith(">>>"):
            yield f"```pycon\n{text}\n```\n"
        elif ITEM.match(text):
            yield "\n".join(_items(text, declared)) + "\n"
        elif text:
            yield _escaped(text) + "\n"


def _items(block: str, declared: Mapping[str, str]) -> list[str]:
    """`name: text` lines, whose continuation lines are indented, as a list."""
    items: list[str] = []
    for line in block.split("\n"):
        if match := ITEM.match(line):
            names = [declared.get(name, name) for name in match[1].split(", ")]
            items.append(f"- `{', '.join(names)}`: {_escaped(match[2])}")
        else:
            items.append(("  " if items else "") + _escaped(line.strip()))
    return items


def _escaped(text: str) -> str:
    """Text with what Markdown would take for markup escaped, but in `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<\[\]])", r"\\\1", p) for p in parts)


if __name__ == "__main__":
    main()
