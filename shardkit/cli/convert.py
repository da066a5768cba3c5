"""`shardkit convert`."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from shardkit.cli import named_as_typed, print_json, search_here, storage_option
from shardkit.cli.help import Command, Example, option_group, options_of
from shardkit.formats import BUILT_IN, format_names
from shardkit.helpers.part_of import PartOf
from shardkit.options import GROUPS, AudioOptions, ConvertOptions, ImageOptions, TextOptions


def _names(ctx: click.Context, param: click.Parameter, file: Path | None) -> list[str] | None:
    if file is None:
        return None
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise click.BadParameter(f"{file} is not UTF-8 text") from None
    return [line.strip() for line in lines if line.strip()]


@click.command(
    "convert",
    cls=Command,
    context_settings={"show_default": True},
    examples=[
        Example("shardkit convert photos --to wds -o out --shuffle", "Images, as TAR shards"),
        Example(
            "shardkit convert photos --to beton -o train.beton --resize 256 --split none",
            "Made smaller, as one file",
        ),
    ],
)
@click.argument("source", nargs=-1, required=True, type=click.Path(path_type=Path))
@option_group(
    "Input",
    click.option(
        "--classes",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        callback=_names,
        metavar="FILE",
        help="Class names, one per line, in the order of their labels.",
    ),
)
@options_of(
    "Input",
    ConvertOptions,
    metadata="FILE",
    file_column="NAME",
    file_suffix=".EXT",
    label_column="NAME",
    label_columns="A,B",
    label_separator="TEXT",
    annotations_frame="",
    fields="A,B",
    drop="A,B",
    rename="OLD=NEW",
    safe_keys="",
)
@options_of(
    "Choosing and splitting",
    ConvertOptions,
    where="CONDITION",
    include_class="A,B",
    exclude_class="A,B",
    keys="FILE",
    dedup="",
    sample="SHARE",
    limit="N",
    split="HOW",
    split_column="NAME",
    folds="K",
    stratify="FIELD",
    group="FIELD",
    seed="N",
)
@options_of(
    "Images",
    ImageOptions,
    resize="N",
    resize_mode="",
    upscale="",
    format="",
    quality="Q",
    chroma="",
    background="COLOUR",
    icc="",
    min_size="N",
    max_aspect="R",
    max_pixels="N",
    check="",
    masks="FIELDS",
    boxes="FIELDS",
)
@options_of(
    "Text and tables",
    TextOptions,
    field="NAME",
    keep_fields="",
    no_header="",
    columns="NAMES",
    quoting="",
    documents="",
    encoding="NAME",
    encoding_errors="",
    tokenizer="FILE",
    special_tokens="",
    append_eos="",
    eos_token="TOKEN",
    bos="",
    chat_template="auto|FILE",
    loss_on="",
    seq_len="N",
    pack="",
    remainder="",
)
@options_of("Audio", AudioOptions, sample_rate="HZ", mono="")
@option_group(
    "Output",
    click.option(
        "--to",
        required=True,
        metavar="FORMAT",  # no choice of click's: to look for other packages takes 0.05 s
        shell_complete=lambda ctx, param, begun: [n for n in format_names() if n.startswith(begun)],
        help=f"Output format: {', '.join(BUILT_IN)}, or one from another package.",
    ),
    click.option(
        "-o",
        "--out",
        type=click.Path(path_type=Path),
        help="Output folder, local or at s3://, or a single file: x.beton."
        "  [default: SOURCE-FORMAT, for one source]",
    ),
)
@options_of(
    "Output",
    ConvertOptions,
    shard_size="SIZE",
    shard_samples="N",
    shuffle="",
    stats="",
    beside="A,B",
    overwrite="",
)
@options_of(
    "Run",
    ConvertOptions,
    transform="MODULE:FUNCTION",
    on_error="",
    max_errors="N",
    workers="N",
    engine="",
    ray_address="HOST:PORT",
    ray_options="KEY=VALUE",
)
@click.option(
    "--part", metavar="I/N", help="Run share I of the tasks, as one of N processes on any machines."
)
@click.option(
    "--plan", "plan_only", is_flag=True, help="Print what would be done, with estimates, and exit."
)
@storage_option
@click.option("--quiet", is_flag=True, help="Print only errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(
    source: tuple[Path, ...],
    to: str,
    out: Path | None,
    plan_only: bool,
    part: str | None,
    storage_options: dict[str, str],
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SOURCE into shards: images, audio, video, text, tables, arrays, a dataset or a shard.

    Images, audio, video and scans (DICOM, NIfTI) are read from a folder; text from a folder or a
    file (.txt, .jsonl, .csv, .tsv, also compressed); arrays from .npy, .npz, HDF5, and the files of
    MNIST and CIFAR.
    Without a tokenizer or --text-field, JSON and CSV are tables: each row is a sample. Several
    sources become one dataset. Patterns such as 'data/*.parquet' and 'shards-{000..099}.tar' may
    be quoted or not.

    A run that was interrupted continues when the same command is given again.
    """
    from shardkit.cli.progress import show_plan, show_result, shown
    from shardkit.conversion.convert import convert

    options["fields"] = options["fields"] or None
    with named_as_typed():
        for group, kind in GROUPS.items():
            options[group] = kind(**{f.name: options.pop(f.name) for f in fields(kind)})
        chosen = ConvertOptions(**options)
    if options["transform"] is not None:
        search_here()
    if plan_only:
        began = time.monotonic()
        from shardkit.conversion.estimate import describe
        from shardkit.conversion.existing import partial_of, state_of
        from shardkit.conversion.run import prepare
        from shardkit.storage import fs

        with fs.using(storage_options, source, out, options["metadata"]):
            part_of = None if part is None else PartOf.parse(part)
            plan = prepare(source, to, out, chosen, part=part_of)
            partial = partial_of(plan.target)
            state = state_of(plan, partial, overwrite=chosen.overwrite).value
        workers = chosen.processes(source)
        about = describe(plan, workers, time.monotonic() - began)
        if as_json:
            print_json({**plan.describe(), "state": state, "estimate": about})
        else:
            show_plan(plan, state, about)
        return
    with shown(quiet) as progress:
        result = convert(
            source,
            to,
            out,
            progress=progress,
            storage_options=storage_options,
            part=part,
            **options,
        )
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        show_result(result)
