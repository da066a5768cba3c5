"""`shardkit formats`."""

from __future__ import annotations

import click

from shardkit.cli import print_json
from shardkit.cli.tables import print_table
from shardkit.formats import FORMATS, get_format


@click.command("formats")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the formats and what each can do."""
    about = {
        name: {
            "suffixes": list(row.suffixes),
            "summary": row.summary,
            "abilities": list(get_format(name).abilities),
        }
        for name, row in FORMATS.items()
    }
    if as_json:
        print_json(about)
        return
    for name, row in FORMATS.items():
        abilities = get_format(name).abilities
        rows = [("files", ", ".join(row.suffixes)), *(("can", ability) for ability in abilities)]
        print_table(f"{name}: {row.summary}", rows)
