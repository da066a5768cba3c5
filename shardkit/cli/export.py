"""`shardkit export`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardkit.cli import print_json, storage_option
from shardkit.cli.help import Command, Example
from shardkit.cli.tables import counted, print_table, print_text, size, tally


@click.command(
    "export",
    cls=Command,
    examples=[
        Example("shardkit export shards --to folder -o images", "Folders of images, a table"),
        Example("shardkit export shards --to files -o files", "A file for each value"),
    ],
)
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    type=click.Choice(["folder", "jsonl", "files", "coco"]),
    help="folder: images, audio or video in class folders, with metadata.jsonl; jsonl: JSON Lines,"
    " for text and tables; files: one file KEY.FIELD per value, as in a TAR; coco: images, and JSON"
    " of their boxes, categories, segmentation, keypoints and captions.",
)
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="The folder to write."
)
@storage_option
@click.option("--quiet", is_flag=True, help="Print only errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(
    dataset: Path, to: str, out: Path, storage_options: dict[str, str], quiet: bool, as_json: bool
) -> None:
    """Write the samples of DATASET as plain files, which `shardkit convert` can read again.

    Keys that are not valid file names on every system are escaped in the file names, and counted;
    the tables contain the original keys. After an interruption, the same command starts over; if
    the output is complete, it does nothing.
    """
    from shardkit.cli.progress import COMPLETE, shown
    from shardkit.conversion.export import export

    with shown(quiet or not sys.stderr.isatty()) as progress:
        result = export(dataset, to, out, progress=progress, storage_options=storage_options)
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        files = f"{counted(result.files, 'file')}, {size(result.bytes)}, and tables"
        rows = [("exported", f"{counted(result.samples, 'sample')}; {files}")]
        if result.renamed:
            rows.append(("renamed", f"files of keys {tally(result.renamed)}"))
        print_table(result.out, rows + [("note", note) for note in result.notes])
        if result.already_complete:
            print_text(COMPLETE)
