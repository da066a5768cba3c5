"""`shardkit cat`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardkit.cli import say, storage_option
from shardkit.cli.help import Command, Example
from shardkit.cli.tables import print_text

if TYPE_CHECKING:
    from shardkit.dataset.dataset import Dataset
    from shardkit.sample import Sample


class _Cat(Command):
    """Accepts a negative INDEX without `--` in front."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        negative = [word for word in args if re.fullmatch("-[0-9]+", word)]
        if negative and "--" not in args:
            args = [*(word for word in args if word not in negative), "--", *negative]
        return super().parse_args(context, args)


@click.command(
    "cat",
    cls=_Cat,
    examples=[
        Example("shardkit cat shards 0 --field image > x.jpg", "The bytes of an image, as stored"),
        Example("shardkit cat shards 0 --field label", "One value; in a terminal, all without it"),
    ],
)
@click.argument("path", metavar="DATASET", type=click.Path(path_type=Path))
@click.argument("name", metavar="KEY|INDEX")
@click.option("--field", metavar="F", help="Only this field; __key__ is the key.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the value to this file.",
)
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@storage_option
def command(
    path: Path,
    name: str,
    field: str | None,
    out: Path | None,
    overwrite: bool,
    storage_options: dict[str, str],
) -> None:
    """Show one sample of DATASET in a terminal, or write one value to FILE or a pipe.

    A value is written as it is stored: the bytes of an image, text in UTF-8, arrays as .npy. A
    whole number is an INDEX if the dataset has such a sample, otherwise a KEY. A negative INDEX
    counts from the end.
    """
    from shardkit.dataset.find import open_dataset
    from shardkit.inspection.samples import as_bytes, find, value_of, warn_of_unusable, write_new
    from shardkit.storage import fs

    with fs.using(storage_options, path):
        dataset = open_dataset(path, partly=True)
    warn_of_unusable(dataset)
    index, note = find(dataset, name)
    if note:
        say(f"note: {note}")
    if out is None and field is None and sys.stdout is not None and sys.stdout.isatty():
        _show_all(dataset, index)
        return
    field, value = value_of(dataset, index, field)
    if out is not None:
        write_new(out, as_bytes(dataset, field, value), overwrite)
    elif sys.stdout is not None and sys.stdout.isatty():
        _show(dataset, field, value)
    else:
        click.echo(as_bytes(dataset, field, value), nl=False)


def _show_all(dataset: Dataset, index: int) -> None:
    """Every field of a sample; what takes several lines stands indented below the field's name."""
    from shardkit.formats.base import KEY

    sample = dataset.read(index)
    print_text(f"sample {index}: {sample.pop(KEY)!r}")
    for field, value in sample.items():
        _show(dataset, field, value, f"{field!r}: ", sample)


def _show(
    dataset: Dataset, field: str, value: Any, before: str = "", sample: Sample | None = None
) -> None:
    from shardkit.inspection.samples import in_words

    lines = in_words(dataset, field, value, sample=sample).split("\n")
    if before and len(lines) > 1:
        lines = ["", *(f"  {line}" for line in lines)]
    print_text("\n".join([before + lines[0], *lines[1:]]))
