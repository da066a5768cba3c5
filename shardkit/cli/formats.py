"""`shardkit formats`."""

from __future__ import annotations

import click

from shardkit.cli import print_json
from shardkit.cli.help import Command, Example
from shardkit.cli.tables import print_table
from shardkit.errors import FormatError, UsageError
from shardkit.formats import FORMATS, get_format


@click.command(
    "formats",
    cls=Command,
    examples=[
        Example("shardkit formats", "All of them"),
        Example("shardkit formats --json", "For a program"),
    ],
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the formats and their abilities."""
    about = {
        name: {"suffixes": list(declared.suffixes), "summary": declared.summary, **_abilities(name)}
        for name, declared in FORMATS.items()
    }
    if as_json:
        print_json(about)
        return
    for name, declared in FORMATS.items():
        rows = [("files", ", ".join(declared.suffixes))]
        for word, found in _abilities(name).items():
            rows += [("can" if word == "abilities" else word, line) for line in found]
        print_table(f"{name}: {declared.summary}", rows)


def _abilities(name: str) -> dict[str, list[str]]:
    """Return the abilities of a format, or what it `needs` if a library is missing."""
    try:
        return {"abilities": list(get_format(name).abilities)}
    except (UsageError, FormatError) as error:
        return {"abilities": [], "needs": [error.fix or error.what]}
