"""The command line: one thin file per command, imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import click

from shardkit.errors import (
    ShardkitError,
    ShardkitWarning,
    is_want_of_memory,
    memory_ran_out,
    printable,
)
from shardkit.version import __version__

# Name -> what `shardkit --help` says of it.
COMMANDS = {
    "convert": "Convert images, text or a dataset into shards.",
    "inspect": "Say what is in a dataset or a shard.",
    "verify": "Find every flipped bit, missing file and damaged image.",
    "doctor": "Find out what holds loading back, and what to change.",
    "bench": "Measure how fast datasets load, side by side.",
    "formats": "List the formats and what each can do.",
}


class _ClosedPipe(Exception):  # noqa: N818 - it is no fault
    """Nobody reads the output any more; click would take the error of the system for its own."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, SystemExit) as error:  # the latter is what rich makes of it
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Show the version, and exit."""
    if not wanted:
        return
    from shardkit.codecs import extension

    click.echo(f"shardkit {__version__}")
    click.echo(f"fast loading of JPEGs: {'no' if extension.MISSING else 'yes'}")
    if extension.MISSING:
        click.echo(f"  found: {extension.MISSING}\n  fix: {extension.FIX}")
    ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version)
def group() -> None:
    """Convert datasets for machine learning into fast shards, and read them."""


def main() -> None:
    """Run the command line.

    Exit codes: 0 done, 1 the data are at fault, 2 the command line is, 130 interrupted, and 141
    where whoever reads the output wants no more of it: as other Unix tools, which SIGPIPE ends.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names that are not Unicode
    warnings.showwarning = _show_warning
    # Nothing here multiplies matrices. The threads that OpenBLAS, a part of NumPy, starts for it
    # take memory, and end the process where that is short.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = _run()
        if sys.stdout is not None:  # closed from the beginning
            sys.stdout.flush()
    except (_ClosedPipe, BrokenPipeError):
        code = 141
        for number in (1, 2):  # what is left to write goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    sys.exit(code)


def _run() -> int:
    """Run the command that was typed; returns the exit code."""
    try:
        group.main(standalone_mode=False)
    except click.ClickException as error:
        with io.StringIO() as words:
            error.show(words)
            complain(words.getvalue().rstrip())
        return error.exit_code
    except (click.exceptions.Exit, click.Abort, KeyboardInterrupt) as error:
        return _ended(error)
    except ShardkitError as error:
        _show(error)
        return error.exit_code
    except Exception as error:
        if not is_want_of_memory(error):
            raise
        complain(f"shardkit: {memory_ran_out(error)}\n  fix: use fewer --workers or --threads")
        return 1
    return 0


def _ended(error: BaseException) -> int:
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    again = "; the same command run again continues" if "convert" in sys.argv[1:2] else ""
    complain(f"\nshardkit: interrupted{again}")
    # `python -m` ends as if nobody had caught an interrupt that came in code from a string, as that
    # of dataclasses is, until it runs the next.
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
    """Ours are for people: without the line of code that Python would show."""
    if issubclass(category, ShardkitWarning):
        complain(f"shardkit: warning: {message}")
    else:
        complain(warnings.formatwarning(message, category, filename, lineno, line))


def _show(error: ShardkitError) -> None:
    if "--json" in sys.argv:
        print_json(error.to_dict())
    complain(f"shardkit: {error}")


def complain(text: str) -> None:
    """Print lines to standard error. Whatever came into them from data cannot steer a terminal."""
    click.echo("\n".join(map(printable, text.split("\n"))), err=True)


def search_here() -> None:
    """Import modules of the current folder too, where people keep transforms of their own.

    Processes that are started get this path as well.
    """
    sys.path.insert(0, os.getcwd())


def print_json(data: dict[str, Any]) -> None:
    """Numbers that JSON does not have, such as a speed without a time, are null.

    Plain ASCII where a text has what must not go to a terminal, and where that takes no Unicode.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    finite, unicode = _finite(data), encoding.lower().startswith("utf")
    text = json.dumps(finite, ensure_ascii=False, indent=1, allow_nan=False)
    if not (unicode and all(map(str.isprintable, text.split("\n")))):
        text = json.dumps(finite, indent=1, allow_nan=False)
    click.echo(text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
