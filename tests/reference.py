"""docs/reference/: every command and option, and every public name, as the code has them.

    python -m tests.reference

writes both pages; tests/test_reference.py holds that they are fresh.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

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
GIVEN = ("Dataset", "ConvertResult", "VerifyReport")  # by functions: nobody calls these classes
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
    from shardkit.cli import COMMANDS, group

    parts = [
        "# Command line\n",
        HEAD,
        "`shardkit COMMAND --help` prints the same. Exit codes: 0 done, 1 the data are at fault,"
        " 2 the command line is, 130 interrupted.\n",
        _table(("command", ""), [(f"[`{n}`](#shardkit-{n})", h) for n, h in COMMANDS.items()]),
        *(
            _table(("option", ""), [_option(o, click.Context(group)) for o in options])
            for options in _sections(group).values()
        ),
    ]
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        parts += [*_command(name, command)]
    return "\n".join(parts)


def _command(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=f"shardkit {name}")
    yield f"## shardkit {name}\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield _text(inspect.cleandoc(command.help or ""))
    for title, options in _sections(command).items():
        if title:
            yield f"### {name}: {title.lower()}\n"
        yield _table(("option", ""), [_option(option, context) for option in options])
    examples = [f"# {e.about}\n{e.line}" for e in getattr(command, "examples", ())]
    if examples:
        yield "**Examples**\n\n```sh\n" + "\n\n".join(examples) + "\n```\n"


def _sections(command: click.Command) -> dict[str, list[click.Option]]:
    """The options by the headings under which `--help` has them; "" where it has none."""
    found: dict[str, list[click.Option]] = {}
    title = ""
    for option in command.params:
        title = getattr(option, "group", title)
        if isinstance(option, click.Option) and not option.hidden:
            found.setdefault(title, []).append(option)
    return found


def _option(option: click.Option, context: click.Context) -> tuple[str, str]:
    record = option.get_help_record(context)
    assert record is not None
    names, words = record
    return f"`{names}`", _escaped(" ".join(words.split()))


# Python.


def api() -> str:
    parts = ["# Python\n", HEAD, "Everything that is public.\n"]
    for module, purpose in MODULES.items():
        names = [f"[`{n}`](#{_anchor(module, n)})" for n in public(module)]
        parts += [f"## {module}\n", f"{purpose}\n", ", ".join(names) + "\n"]
        for name in public(module):
            parts += [*_name(module, name)]
    return "\n".join(parts)


def public(module: str) -> list[str]:
    """The public names of a module: `__all__`, or what it defines or imports for others."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return [name for name in loaded.__all__ if name != "__version__"]
    found = {n: v for n, v in vars(loaded).items() if not n.startswith("_") and callable(v)}
    for_others = re.findall(r"import (\w+) as \1\b", inspect.getsource(loaded))
    return sorted(n for n, v in found.items() if v.__module__ == module or n in for_others)


def _anchor(module: str, name: str) -> str:
    return f"{module}.{name}".replace(".", "").lower()


def _name(module: str, name: str) -> Iterator[str]:
    value = getattr(importlib.import_module(module), name)
    yield f"### {module}.{name}\n"
    if dataclasses.is_dataclass(value):
        yield _code("\n".join(_fields(value)))
    elif name not in GIVEN:
        yield _code(f"{name}{_signature(value)}")
    yield _text(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        own = vars(value).get("__init__")
        if own is not None and own.__doc__ and name not in GIVEN:
            yield _text(inspect.getdoc(own) or "")
        yield from _members(value)


def _members(value: type) -> Iterator[str]:
    """What `MEMBERS` has of a class, with what its docstring says first."""
    rows = []
    for name in MEMBERS.get(value.__name__, ()):
        member = inspect.getattr_static(value, name)
        doc = inspect.getdoc(member) or ""
        function = getattr(value, name)
        called = "" if isinstance(member, property) else _signature(function, short=True)
        rows.append(f"- **`{name}{called}`** {' '.join(_escaped(doc).split())}".rstrip())
    if rows:
        yield "\n".join(rows) + "\n"


def _fields(value: type) -> list[str]:
    """The fields of a dataclass and its private bases, as the source has them, without checks."""
    private = [base for base in reversed(value.__mro__) if base.__name__.startswith("_")]
    kept = [line for one in (*private, value) for line in _own_fields(one)]
    if "Annotated" in "".join(kept):
        return [value.__name__ + _signature(value, short=True)]
    return [f"{value.__name__}(", *kept, ")"] if kept else [f"{value.__name__}()"]


def _own_fields(value: type) -> list[str]:
    """The lines of the fields that are in the body of a class, with the comments above them."""
    source = re.sub(r"= (?:_one_of|_whole)\(([^,)]+).*\)", r"= \1", inspect.getsource(value))
    lines = source.split("\n")
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    kept: list[str] = []
    for node in (n for n in tree.body if isinstance(n, ast.AnnAssign)):
        first = node.lineno - 1
        while lines[first - 1].startswith("    #"):
            first -= 1
        kept += lines[first : node.end_lineno]
    return kept


class _Bare(str):
    """An annotation without quotes."""

    __repr__ = str.__str__


def _signature(value: Any, short: bool = False) -> str:
    """The parameters, each in a line of its own where they are long, but for `short`."""
    try:
        found = inspect.signature(value)
    except ValueError:  # of an exception, by C
        return "()"
    none, bare, lines = inspect.Parameter.empty, [], []
    star = False  # before those that are given by name alone
    for name, parameter in found.parameters.items():
        if name in ("self", "cls"):
            continue
        annotation = none if short else _bare(parameter.annotation)
        star = star or parameter.kind is inspect.Parameter.VAR_POSITIONAL
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            star = True
            lines.append("    *,")
        bare.append(parameter.replace(annotation=annotation))
        lines.append(f"    {bare[-1]},")
    back = _bare(found.return_annotation)
    line = str(found.replace(parameters=bare, return_annotation=none))
    end = "" if short or back is none else f" -> {inspect.formatannotation(back)}"
    return (line if short or len(line) < 80 else "\n".join(["(", *lines, ")"])) + end


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


# Markdown.


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _text(doc: str) -> str:
    """A docstring as Markdown: paragraphs, lists of `name: text`, and examples as code."""
    blocks = []
    for block in re.split(r"\n\s*\n", doc.strip()):
        if block.lstrip().startswith(">>>"):
            blocks.append("```pycon\n" + textwrap.dedent(block) + "\n```")
        elif re.match(r"\s*[a-z_]\w*(, [a-z_]\w*)*: \S", block):
            blocks.append("\n".join(_items(textwrap.dedent(block))))
        else:
            blocks.append(_escaped(textwrap.dedent(block)))
    return "\n\n".join(blocks) + "\n"


def _items(block: str) -> list[str]:
    """`name: text` lines, whose continuation lines are indented, as a list."""
    items: list[str] = []
    for line in block.split("\n"):
        if match := re.match(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)", line):
            items.append(f"- `{match[1]}`: {_escaped(match[2])}")
        else:
            items.append(("  " if items else "") + _escaped(line.strip()))
    return items


def _escaped(text: str) -> str:
    """Text with what Markdown would take for markup escaped, but in `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<\[\]])", r"\\\1", p) for p in parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(c.replace("|", r"\|") for c in r) for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
