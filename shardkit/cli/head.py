"""`shardkit head`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardkit.cli import complain, print_json, say, storage_option
from shardkit.cli.help import Command, Example
from shardkit.cli.tables import print_table
from shardkit.errors import SampleError

if TYPE_CHECKING:
    from shardkit.dataset.dataset import Dataset

_CHARACTERS = 300  # maximum length of a value to show


@click.command(
    "head",
    cls=Command,
    context_settings={"show_default": True},
    examples=[
        Example("shardkit head shards", "The first five samples"),
        Example("shardkit head shards -n 100 --json", "A line of JSON for each of 100"),
    ],
)
@click.argument("path", metavar="DATASET", type=click.Path(path_type=Path))
@click.option(
    "-n", "count", type=click.IntRange(1), default=5, metavar="N", help="Number of samples."
)
@storage_option
@click.option("--json", "as_json", is_flag=True, help="Print each sample as a line of JSON.")
def command(path: Path, count: int, storage_options: dict[str, str], as_json: bool) -> None:
    """Show the first samples of DATASET: a dataset or a shard, made by shardkit or another tool.

    If there are several splits, the first samples of each are shown.

    Exit codes: 0 success, 1 a sample is damaged, 2 invalid command line.
    """
    from shardkit.dataset.find import open_splits
    from shardkit.inspection.samples import json_of, warn_of_unusable
    from shardkit.storage import fs

    with fs.using(storage_options, path):
        splits = open_splits(fs.source(path), partly=True)
    damaged = False
    for split, dataset in splits.items():
        of = {"split": split} if split else {}
        warn_of_unusable(dataset)
        for index in range(min(count, len(dataset))):
            try:
                if as_json:
                    print_json({**of, **json_of(dataset, index)}, indent=None)
                else:
                    _show(dataset, index, f"{split}, " if split else "")
            except SampleError as error:
                damaged = True
                if as_json:
                    print_json({**of, "index": index, **error.to_dict()}, indent=None)
                complain(f"shardkit: {error}")
        if not len(dataset):
            say(f"note: {dataset.place} has no samples")
    if damaged:
        sys.exit(1)


def _show(dataset: Dataset, index: int, split: str) -> None:
    from shardkit.formats.base import KEY
    from shardkit.inspection.samples import in_words

    sample = dataset.read(index)
    key = sample.pop(KEY)
    rows = []
    for field, value in sample.items():
        words = " ".join(in_words(dataset, field, value, True, sample).split())
        if len(words) > _CHARACTERS:
            whole = f" ({len(value):,} characters)" if isinstance(value, str) else ""
            words = f"{words[:_CHARACTERS]}...{whole}"
        rows.append((field, words))
    print_table(f"{split}sample {index}: {key}", rows)
