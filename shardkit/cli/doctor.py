"""`shardkit doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardkit.cli import print_json, search_here, storage_option
from shardkit.cli.help import Command, Example


@click.command(
    "doctor",
    cls=Command,
    context_settings={"show_default": True},
    examples=[
        Example("shardkit doctor shards --batch-size 8", "What slows loading down"),
        Example("shardkit doctor shards --batch-size 8 --json", "For a program"),
    ],
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=64,
    metavar="N",
    help="Batch size of one rank, in samples.",
)
@click.option(
    "--transform",
    default="crop",
    metavar="NAME",
    help="Image transform: crop (random, resized), resize, center, decode, none, "
    "or your own module:function.",
)
@click.option(
    "--size",
    type=click.IntRange(1),
    default=224,
    metavar="N",
    help="Width and height of crops, in pixels.",
)
@click.option(
    "--threads",
    type=click.IntRange(0),
    metavar="N",
    help="Loading threads.  [default: number of processors]",
)
@click.option(
    "--window", type=click.IntRange(1), metavar="N", help="Size of the shuffle window, in samples."
)
@click.option(
    "--ranks", type=click.IntRange(1), default=1, metavar="N", help="Number of ranks (world size)."
)
@click.option(
    "--need",
    type=click.FloatRange(0, min_open=True),
    metavar="RATE",
    help="Rate that the model needs, in samples per second.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    metavar="S",
    help="Approximate duration of each run.",
)
@storage_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    path: Path,
    batch_size: int,
    transform: str,
    size: int,
    storage_options: dict[str, str],
    as_json: bool,
    seconds: float,
    **options: Any,
) -> None:
    """Find what slows down loading from PATH, a dataset or a folder of images."""
    from shardkit.performance.defaults import open_any, usual_options
    from shardkit.performance.doctor import doctor
    from shardkit.storage import fs
    from shardkit.stream import Loader

    if ":" in transform:
        search_here()
    with fs.using(storage_options, path):
        dataset = open_any(path)
    usual = usual_options(dataset, batch_size=batch_size, transform=transform, size=size)
    chosen = {name: value for name, value in options.items() if value is not None}
    about = {name: chosen.pop(name) for name in ("ranks", "need") if name in chosen}
    found = doctor(Loader(dataset, **usual, **chosen), seconds=seconds, **about)
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(str(found))
