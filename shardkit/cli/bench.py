"""`shardkit bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shardkit.cli import complain, print_json, search_here, storage_option
from shardkit.cli.help import Command, Example, options_of
from shardkit.cli.tables import counted, print_numbers, print_table, size
from shardkit.errors import printable
from shardkit.performance.bench import Sweep, bench
from shardkit.performance.defaults import FOLDER

_ABOUT = {
    "read": "every value, in shuffled order, hashed",
    "decode": "every image, whole",
    "load": "shuffled batches, as in training",
}
_HEADER = ("dataset", "setting", "samples/s", "spread", "stored", "times")


@click.command(
    "bench",
    cls=Command,
    context_settings={"show_default": True},
    examples=[
        Example(
            "shardkit bench shards photos --batch-size 8 --rounds 2",
            "Beside the folder it was made of",
        ),
        Example(
            "shardkit bench shards --measure load --threads 1,2 --batch-size 8",
            "Numbers of threads",
        ),
    ],
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@options_of(
    "Options",
    Sweep,
    threads="N,...",
    workers="N,...",
    batch_sizes="N,...",
    transforms="NAME,...",
    size="N",
    decode="NAME,...",
    measures="NAME,...",
    rounds="N",
    limit="N",
)
@storage_option
@click.option("--quiet", is_flag=True, help="Print only results and errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def command(
    paths: tuple[Path, ...],
    storage_options: dict[str, str],
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure side by side how fast PATHS load: datasets of any format, or folders of images.

    Each round runs every setting once; the medians are shown. Exit codes: 0 success, 1 all runs
    failed, 2 invalid command line.
    """
    from shardkit.cli.progress import shown
    from shardkit.storage import fs

    if any(":" in name for name in options["transforms"]):
        search_here()
    options["threads"] = options["threads"] or None
    with fs.using(storage_options, *paths), shown(quiet) as progress:
        report = bench(paths, progress=progress, **options)
    if as_json:
        print_json(report)
    else:
        _show(report)
    failed = {(run["contender"], run["error"]): None for run in report["runs"] if run["error"]}
    for name, error in failed:
        complain(f"shardkit: {printable(name)}: {error}")
    if all(run["error"] for run in report["runs"]):
        sys.exit(1)


def _show(report: dict[str, Any]) -> None:
    machine, settings, found = report["machine"], report["settings"], report["versions"]
    processors = counted(machine["processors"], "processor")
    memory = f", {size(machine['memory'])} of memory" if machine["memory"] else ""
    rows = [
        ("machine", f"{machine['processor']}, {processors}{memory}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.items())),
        (
            "figures",
            f"medians of {counted(settings['rounds'], 'run')} of at most {settings['limit']:,} "
            "samples; spread: the slowest to the fastest; times: the slowest of a table is 1",
        ),
    ]
    rows += [_contender_row(contender) for contender in report["contenders"]]
    print_table("Benchmark", rows)
    for measure in settings["measures"]:
        _show_measure(measure, report)
    if report["skipped"]:
        print_table("Not measured", list(report["skipped"].items()))


def _contender_row(contender: dict[str, Any]) -> tuple[str, str]:
    amount = f"{counted(contender['samples'], 'sample')}, {size(contender['bytes'])}"
    words = f"{contender['format']}: {amount}"
    if contender["format"] == FOLDER:
        words += "; workers are of torch's DataLoader with Pillow, without shardkit"
    return contender["name"], words


def _show_measure(measure: str, report: dict[str, Any]) -> None:
    runs = [run for run in report["runs"] if run["measure"] == measure]
    slowest = min((run["rate"] for run in runs if run["rate"]), default=0.0)
    rows: list[tuple[str, ...]] = []
    for run in runs:
        if run["rate"] is None:
            rows.append((run["contender"], _words_of(run), "failed", "", "", ""))
            continue
        stored = run["bytes_per_second"]
        rows.append(
            (
                run["contender"],
                _words_of(run),
                f"{run['rate']:,.0f}",
                f"{run['min']:,.0f} to {run['max']:,.0f}",
                f"{size(int(stored))}/s" if stored else "-",
                f"{run['rate'] / slowest:.2f}",
            )
        )
    measured = {run["contender"] for run in runs}
    rows += [
        (contender["name"], "-", "-", "-", "-", "-")
        for contender in report["contenders"]
        if contender["name"] not in measured
    ]
    print_numbers(f"{measure}: {_ABOUT[measure]}", _HEADER, rows)


def _words_of(run: dict[str, Any]) -> str:
    """Return the setting of a run in a report, as text."""
    parts = []
    for name in ("threads", "workers"):
        if run[name] is not None:
            parts.append(f"{run[name]} {name if run[name] != 1 else name[:-1]}")
    if run["batch_size"] is not None:
        parts.append(f"batch {run['batch_size']}")
    if run["transform"] not in (None, "none"):
        sized = run["transform"] in ("crop", "resize", "center")
        parts.append(f"{run['transform']} {run['size']}" if sized else run["transform"])
    if run["decode"] is not None:
        parts.append(f"decode {run['decode']}")
    return ", ".join(parts)
