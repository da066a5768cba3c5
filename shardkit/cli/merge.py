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
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The dataset to make of all.")
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
    """Make one dataset OUT of several DATASETS of one format, without decoding anything.

    It is what `shardkit convert DATASETS --to FORMAT -o OUT` makes: keys begin with the name of
    their dataset, and classes of one name are one class.

    Without -o, publish the dataset that was made by `shardkit convert ... --part I/N`. The part
    that ends last has done so already, as a rule. Where tasks are missing, this says which parts
    they were left to.
    """
    from shardkit.cli.progress import ConvertMonitor, show_result
    from shardkit.conversion.merge import merge

    with ConvertMonitor(quiet) as monitor:
        result = merge(*datasets, out=out, progress=monitor, storage_options=storage_options)
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        show_result(result, complete="It was complete already.")
