"""`shardkit merge`."""

from __future__ import annotations

from pathlib import Path

import click

from shardkit.cli import print_json, storage_option
from shardkit.cli.help import Command, Example


@click.command(
    "merge",
    cls=Command,
    examples=[
        Example("shardkit merge shards more -o both", "Two datasets of one format"),
        Example("shardkit merge shards", "What parts have made"),
    ],
)
@click.argument("datasets", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The dataset to write.")
@storage_option
@click.option("--quiet", is_flag=True, help="Print only errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(
    datasets: tuple[Path, ...],
    out: Path | None,
    storage_options: dict[str, str],
    quiet: bool,
    as_json: bool,
) -> None:
    """Combine several DATASETS of one format into OUT, without decoding anything.

    The result is the same as of `shardkit convert DATASETS --to FORMAT -o OUT`: keys begin with
    the name of their dataset, and classes with the same name become one class.

    Without -o, publish the dataset of `shardkit convert ... --part I/N`, once all parts have ended.
    If tasks are missing, the error names the parts that should do them.
    """
    from shardkit.cli.progress import show_result, shown
    from shardkit.conversion.merge import merge

    with shown(quiet) as progress:
        result = merge(*datasets, out=out, progress=progress, storage_options=storage_options)
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        show_result(result, complete="The output was already complete.")
