"""The command line: one thin module per command, imported when the command is called.

Each imports only those on lines below its own:

    bench convert export merge stats verify
    cat diff doctor formats head inspect progress
    __init__
    help tables
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import json
import math
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import click

from shardkit.cli.help import pairs
from shardkit.errors import (
    ShardkitError,
    ShardkitWarning,
    StorageError,
    UsageError,
    is_want_of_memory,
    memory_ran_out,
    near,
    printable,
)
from shardkit.helpers.familiar import command_instead

# Name -> help.
COMMANDS = {
    "convert": "Convert images, text or a dataset into shards.",
    "merge": "Make one dataset of several, or of the parts of a conversion.",
    "inspect": "Describe a dataset or a shard.",
    "head": "Show the first samples of a dataset.",
    "cat": "Show or write one sample, or one of its values.",
    "stats": "Count classes, pixels, lengths and duplicates, for training.",
    "export": "Write the samples of a dataset as plain files.",
    "diff": "Compare the samples of two datasets.",
    "verify": "Find every flipped bit, missing file and damaged image.",
    "doctor": "Find what slows loading down, and what to change.",
    "bench": "Measure how fast datasets load, side by side.",
    "formats": "List the formats and what each can do.",
}


# Errors of writing to standard output; for other files, a ShardkitError is raised.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _ClosedPipe(Exception):  # noqa: N818 - not an error
    """The reader closed the output. Not a BrokenPipeError, which click would handle itself."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, SystemExit) as error:  # rich converts the former to the latter
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        raise _ClosedPipe from error


class _Commands(click.Group):
    """A group whose commands are modules of this package."""

    def make_context(self, *words: Any, **options: Any) -> click.Context:
        with _writing():
            return super().make_context(*words, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _writing():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"shardkit.cli.{name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        unknown = args[0] not in COMMANDS and not ctx.resilient_parsing  # set during completion
        if unknown:  # click before 8.4 makes no suggestions
            ctx.fail(f"No such command {args[0]!r}: {_command_instead(args[0])}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _command_instead(name: str) -> str:
    if instead := command_instead(name):
        return f"type `shardkit {instead}`"
    if os.path.exists(name):
        path = shlex.quote(name)
        return f"type `shardkit convert {path} --to FORMAT`, or `shardkit inspect {path}`"
    return near(name, COMMANDS)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Show the version, and exit."""
    if not wanted:
        return
    from shardkit.codecs.extension import FIX, MISSING
    from shardkit.storage import byte_source
    from shardkit.version import versions

    lines = [f"{name} {version}" for name, version in versions().items()]
    lines.append(f"fast reading: {'yes' if byte_source.reads else 'no'}")
    lines.append(f"fast loading of JPEGs: {'no' if MISSING else 'yes'}")
    lines += [f"  found: {MISSING}"] if MISSING else []
    lines += [f"  fix: {FIX}"] if MISSING or not byte_source.reads else []
    click.echo("\n".join(lines))
    ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the versions of shardkit and its libraries, and exit.",
)
def group() -> None:
    """Convert machine-learning datasets into shards that load fast, and read them."""


def main() -> None:
    """Run the command line.

    Exit codes: 0 success, 1 bad data, 2 invalid command line, 130 interrupted, and 141 if the
    reader of the output closed it, as for other Unix tools, which SIGPIPE kills.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names that are not valid Unicode
    warnings.showwarning = _show_warning
    sys.excepthook = _show_unforeseen
    # No command multiplies matrices. The threads that OpenBLAS (in NumPy) starts for that take
    # memory, and starting them kills the process if memory is short.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = _run()
        if sys.stdout is not None:  # None if it was closed when the process started
            sys.stdout.flush()
    except (_ClosedPipe, BrokenPipeError):
        code = 141
        _discard()
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        complain(f"shardkit: cannot write the output: {os.strerror(error.errno)}")
        code = 1
        _discard()
    sys.exit(code)


def _discard() -> None:
    """Redirect output to the null device, so that flushing at exit does not fail."""
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _run() -> int:
    """Run the command, and return the exit code."""
    try:
        group.main(standalone_mode=False)
    except click.ClickException as error:
        advice = _advice(error)
        with io.StringIO() as words:
            error.show(words)
            complain("\n".join([words.getvalue().expandtabs(1).rstrip(), *advice]))
        return error.exit_code
    except (click.exceptions.Exit, click.Abort, KeyboardInterrupt) as error:
        return _ended(error)
    except ShardkitError as error:
        _show(error)
        return error.exit_code
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            # `storage` explains most of these, but not those of Python itself, such as of an import
            what, path = f"cannot open: {os.strerror(error.errno)}", error.filename
            fix = "raise the process's limit with `ulimit -n 65536`, or close what keeps files open"
            _show(StorageError(what, path=path, fix=fix))
            return 1
        if not is_want_of_memory(error):
            raise
        complain(f"shardkit: {memory_ran_out(error)}\n  fix: use fewer --workers or --threads")
        return 1
    return 0


def _advice(error: click.ClickException) -> list[str]:
    """Return lines that help with an invalid command line: the option's help, or an example."""
    if type(error) is click.BadParameter and isinstance(error.param, click.Option):
        return [f"{error.param.opts[0]}: {error.param.help}"]
    command = getattr(getattr(error, "ctx", None), "command", None)
    return [f"Example: {example.line}" for example in getattr(command, "examples", ())[:1]]


_REPEATED = {"convert": "continues", "merge": "continues", "export": "starts over"}


def _ended(error: BaseException) -> int:
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    then = _REPEATED.get("".join(sys.argv[1:2]))
    complain("\nshardkit: interrupted" + (f"; the same command run again {then}" if then else ""))
    # After an interrupt in code compiled from a string, such as that of dataclasses, `python -m`
    # exits as if it had not been caught, unless other code compiled from a string runs.
    exec("")
    return 130


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show warnings of shardkit without the line of code that Python would show."""
    if issubclass(category, ShardkitWarning):
        complain(f"shardkit: warning: {message}")
    else:
        complain(warnings.formatwarning(message, category, filename, lineno, line))


def _show_unforeseen(*error: Any) -> None:
    """Show an unexpected exception as Python does, but with control characters escaped."""
    import traceback

    complain("".join(traceback.format_exception(*error)).rstrip())


def _show(error: ShardkitError) -> None:
    if "--json" in sys.argv:
        print_json(error.to_dict())
    complain(f"shardkit: {error}")


def complain(text: str) -> None:
    """Print lines to standard error, with control characters escaped."""
    click.echo("\n".join(map(printable, text.split("\n"))), err=True)


def say(words: str) -> None:
    """Print one line to standard error, with line breaks escaped as well."""
    complain(printable(f"shardkit: {words}"))


@contextlib.contextmanager
def named_as_typed() -> Iterator[None]:
    """Name options in errors as they are typed, `--seq-len 8`, not as in Python, `seq_len=8`."""
    try:
        yield
    except UsageError as error:
        params = click.get_current_context().command.params
        typed = {p.name: p.opts[0] for p in params if isinstance(p, click.Option)}

        def with_value(match: re.Match[str]) -> str:
            value = match[2].strip("'")
            return f"{typed[match[1]]} {value}" if match[1] in typed else match[0]

        for part in ("what", "expected", "fix"):
            text = getattr(error, part) or ""
            text = re.sub(r"(?<![\w-])(\w+)=('[^']*'|[^\s,;]+)", with_value, text)
            # Without an underscore, a name in a sentence may be a usual word.
            names = r"^\w+|\w+_\w+|(?<= combined with )\w+"
            text = re.sub(names, lambda m: typed.get(m[0], m[0]), text)
            setattr(error, part, text or None)
        raise


def search_here() -> None:
    """Allow imports from the current folder, for a user's transforms.

    Child processes inherit the path.
    """
    sys.path.insert(0, os.getcwd())


def storage_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--storage-option` to a command, which gets a dict `storage_options`."""
    return click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        callback=pairs,
        metavar="KEY=VALUE",
        help="For URLs: a credential, an endpoint, ... (docs/remote.md). Repeatable.",
    )(command)


def print_json(data: dict[str, Any], *, indent: int | None = 1) -> None:
    """Print one JSON object, with null for infinities and NaN; on one line if `indent` is None.

    It is plain ASCII if it contains control characters, or if the output is not Unicode.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    finite, unicode = _finite(data), encoding.lower().startswith("utf")
    text = json.dumps(finite, ensure_ascii=False, indent=indent, allow_nan=False)
    if not (unicode and all(map(str.isprintable, text.split("\n")))):
        text = json.dumps(finite, indent=indent, allow_nan=False)
    click.echo(text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
