"""`shardkit convert`."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from shardkit.cli import print_json, search_here, storage_option
from shardkit.formats import BUILT_IN
from shardkit.options import (
    CHROMA,
    IMAGE_FORMATS,
    PACKINGS,
    REMAINDERS,
    RESIZE_MODES,
    AudioOptions,
    ConvertOptions,
    ImageOptions,
    TextOptions,
)


def _renames(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    if not all(old and new for old, _, new in pairs):
        raise click.BadParameter("expected OLD=NEW")
    return {old: new for old, _, new in pairs}


def _fields(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    """Names separated by commas; a name with a comma is quoted, as in CSV."""
    return [name for row in csv.reader(values) for name in row or [""]]


def _names(ctx: click.Context, param: click.Parameter, file: Path | None) -> list[str] | None:
    if file is None:
        return None
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise click.BadParameter(f"{file} is not UTF-8 text") from None
    return [line.strip() for line in lines if line.strip()]


@click.command("convert", context_settings={"show_default": True})
@click.argument("source", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",  # no choice of click's: to look for other packages takes 0.05 s
    help=f"Format to make: {', '.join(BUILT_IN)}, or one that another package adds.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="Folder to make, here or at s3://, or a file: x.beton.  [default: SOURCE-FORMAT, of one]",
)
@click.option(
    "--shard-size", metavar="SIZE", help="Largest shard: 64MB, 1GiB, ...  [default: 256MB]"
)
@click.option("--shard-samples", type=int, metavar="N", help="Most samples in a shard, instead.")
@click.option("--shuffle", is_flag=True, help="Shuffle all samples.")
@click.option("--seed", type=int, default=0, help="Seed of --shuffle, --sample, --folds, ...")
@click.option("--workers", type=int, metavar="N", help="Processes.  [default: all cores]")
@click.option("--limit", type=int, metavar="N", help="Only so many samples of each split.")
@click.option(
    "--plan", "plan_only", is_flag=True, help="Print what would be done, without doing it."
)
@click.option(
    "--split",
    default="auto",
    metavar="HOW",
    help="auto: train/ val/ test/ become datasets; none; shares: train=0.9,val=0.1;"
    " or files of keys: train=a.txt,val=b.txt",
)
@click.option("--folds", type=int, metavar="K", help="K datasets of equal size: fold0, fold1, ...")
@click.option(
    "--stratify", metavar="FIELD", help="Each value of FIELD has its share in every split."
)
@click.option("--group", metavar="FIELD", help="Each value of FIELD is in one split alone.")
@click.option(
    "--include-class",
    multiple=True,
    callback=_fields,
    metavar="A,B",
    help="Only samples of these classes, which get the labels 0, 1, ... Repeatable.",
)
@click.option(
    "--exclude-class",
    multiple=True,
    callback=_fields,
    metavar="A,B",
    help="Only samples of other classes. Repeatable.",
)
@click.option(
    "--where",
    metavar="CONDITION",
    help="Only samples it holds for: 'width >= 256 and label in (3, 7)'.",
)
@click.option("--keys", metavar="FILE", help="Only samples with these keys, one a line.")
@click.option(
    "--dedup",
    type=click.Choice(["exact", "near"]),
    help="Leave out copies of samples, the same or, of images, alike; filtered.jsonl lists them.",
)
@click.option("--sample", type=float, metavar="SHARE", help="About this share of all samples: 0.1")
@click.option(
    "--classes",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_names,
    metavar="FILE",
    help="Class names, one a line, in the order of their labels.",
)
@click.option(
    "--metadata",
    metavar="FILE",
    help="A table with a row for each file: .csv, .tsv, .jsonl or .parquet, here or at a URL.",
)
@click.option(
    "--file-column", metavar="NAME", help="Its column that names files.  [default: file_name]"
)
@click.option("--file-suffix", metavar=".EXT", help="What these names lack at their end: .jpg")
@click.option(
    "--label-column",
    metavar="NAME",
    help="The column, of the table or of the source, that becomes the label.",
)
@click.option(
    "--label-separator", metavar="TEXT", help="Stands between several labels in a text: '|'"
)
@click.option(
    "--fields",
    multiple=True,
    callback=_fields,
    metavar="A,B",
    help="Store these fields of the source and no others. Repeatable.",
)
@click.option(
    "--drop",
    multiple=True,
    callback=_fields,
    metavar="A,B",
    help="Store all fields but these. Repeatable.",
)
@click.option(
    "--rename",
    multiple=True,
    callback=_renames,
    metavar="A=B",
    help="Rename field A to B. Repeatable.",
)
@click.option(
    "--safe-keys",
    is_flag=True,
    help="Percent-encode all characters of keys but ASCII letters, digits, -, _ and /.",
)
@click.option(
    "--stats",
    is_flag=True,
    help="Keep mean and deviation of all pixels in the manifest, which decodes each image.",
)
@click.option(
    "--beside",
    multiple=True,
    callback=_fields,
    metavar="A,B",
    help="With --to wds, files for the loaders of dali, energon, wids beside the shards.",
)
@click.option("--resize", type=int, metavar="N", help="Make images smaller: N pixels a side.")
@click.option(
    "--resize-mode",
    type=click.Choice(RESIZE_MODES),
    default="shorter",
    help="Which side gets N; exact: both; crop, pad: a square, cut out or with margins.",
)
@click.option("--upscale", is_flag=True, help="Make smaller images larger too.")
@click.option(
    "--image-format",
    "format",
    type=click.Choice(IMAGE_FORMATS),
    default="keep",
    help="Store images as these; raw: as pixels, in .beton as FFCV's raw images.",
)
@click.option("--quality", type=int, metavar="Q", help="Of JPEG and WebP.  [default: 90]")
@click.option(
    "--chroma", type=click.Choice(CHROMA), help="Colour resolution of JPEG.  [default: 420]"
)
@click.option(
    "--background", metavar="COLOUR", help="Behind transparent pixels, in margins. [default: white]"
)
@click.option(
    "--icc", type=click.Choice(["srgb", "keep"]), help="Colour profiles.  [default: to sRGB]"
)
@click.option("--min-size", type=int, metavar="N", help="Drop images with a side under N pixels.")
@click.option(
    "--max-aspect", type=float, metavar="R", help="Drop images over R times as long as wide."
)
@click.option("--max-pixels", type=int, metavar="N", help="Drop images of over N pixels.")
@click.option(
    "--check",
    type=click.Choice(["header", "decode"]),
    default="header",
    help="How images are checked that pass as they are: by header and end, or wholly.",
)
@click.option(
    "--masks",
    metavar="FIELDS",
    help="Fields of masks, commas between; none: all are images.  [default: by name]",
)
@click.option(
    "--boxes",
    metavar="FIELDS",
    help="Fields of boxes, x0 y0 x1 y1 in pixels; none: move none.  [default: boxes]",
)
@click.option(
    "--sample-rate",
    type=int,
    metavar="HZ",
    help="Audio of other rates is resampled, and stored as FLAC.",
)
@click.option("--mono", is_flag=True, help="Audio of several channels becomes their mean, as FLAC.")
@click.option(
    "--text-field", metavar="NAME", help="The field with the text.  [default: text, or the only]"
)
@click.option("--keep-fields", is_flag=True, help="Keep the other fields of documents, too.")
@click.option(
    "--documents",
    type=click.Choice(["auto", "file", "line"]),
    default="auto",
    help="Of .txt: one a file or one a line; auto: of a folder files, of a file lines.",
)
@click.option(
    "--encoding",
    default="utf-8",
    metavar="NAME",
    help="Encoding of text; auto: detected, file by file.",
)
@click.option(
    "--encoding-errors",
    type=click.Choice(["strict", "replace", "ignore"]),
    default="strict",
    help="Bytes that are not valid text: an error, U+FFFD, or left out.",
)
@click.option(
    "--tokenizer", metavar="FILE", help="Store tokens: tokenizer.json, a folder, a name, ..."
)
@click.option(
    "--special-tokens",
    type=click.Choice(["special", "text"]),
    default="special",
    help="What <|endoftext|> in a document is: the token, or text like any other.",
)
@click.option(
    "--append-eos/--no-append-eos",
    default=None,
    help="End documents with a token.  [default: if the tokenizer has one]",
)
@click.option("--eos-token", metavar="TOKEN", help="Which, where the tokenizer does not say.")
@click.option("--bos", is_flag=True, help="Begin documents with a token.")
@click.option("--seq-len", type=int, metavar="N", help="Pack documents into blocks of N tokens.")
@click.option(
    "--pack",
    type=click.Choice(PACKINGS),
    default="concat",
    help="Documents run on; or stay whole where they fit; or one in each block.",
)
@click.option(
    "--remainder",
    type=click.Choice(REMAINDERS),
    default="pad",
    help="A block that is not full: fill it, keep it short, or drop it.",
)
@click.option(
    "--transform", metavar="MODULE:FUNCTION", help="Your own function, applied to every sample."
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    help="A bad sample stops the run, or is dropped and listed in errors.jsonl.",
)
@click.option("--max-errors", type=int, default=1000, help="With skip: stop when there are more.")
@click.option(
    "--overwrite", is_flag=True, help="Replace an existing dataset, once the new one is complete."
)
@storage_option
@click.option("--quiet", is_flag=True, help="Print only errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(
    source: tuple[Path, ...],
    to: str,
    out: Path | None,
    plan_only: bool,
    storage_options: dict[str, str],
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SOURCE into shards: images, audio, video, text, arrays, a dataset, a single shard.

    Images, audio and video are a folder; text is a folder or a file: .txt, .jsonl, .csv, .tsv, also
    compressed; arrays are .npy, .npz, HDF5, and the files of MNIST and CIFAR.
    Several sources become one dataset. Patterns such as 'data/*.parquet' and
    'shards-{000..099}.tar' may be quoted or not.

    A run that was interrupted continues when the same command is given again.
    """
    from shardkit.cli.progress import ConvertMonitor, show_plan, show_result
    from shardkit.conversion.convert import convert

    options["fields"] = options["fields"] or None
    options["image"] = ImageOptions(**{f.name: options.pop(f.name) for f in fields(ImageOptions)})
    options["audio"] = AudioOptions(**{f.name: options.pop(f.name) for f in fields(AudioOptions)})
    options["field"] = options.pop("text_field")
    options["text"] = TextOptions(**{f.name: options.pop(f.name) for f in fields(TextOptions)})
    if options["transform"] is not None:
        search_here()
    if plan_only:
        from shardkit import storage
        from shardkit.conversion.run import prepare

        with storage.using(storage_options, source, out, options["metadata"]):
            plan = prepare(source, to, out, ConvertOptions(**options))
        if as_json:
            print_json(plan.describe())
        else:
            show_plan(plan)
        return
    with ConvertMonitor(quiet) as monitor:
        result = convert(
            source, to, out, monitor=monitor, storage_options=storage_options, **options
        )
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        show_result(result)
