"""`shardkit verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardkit.cli import complain, print_json, search_here, storage_option
from shardkit.cli.help import Command, Example
from shardkit.cli.tables import counted, print_table, size

if TYPE_CHECKING:
    from shardkit.verification.client import ClientReport
    from shardkit.verification.verify import VerifyReport

_PROBLEMS = 100  # maximum number to print; --json has all


class _Command(Command):
    """Accepts several paths after `--against` and `--repair`, as a shell expands a pattern."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for option in ("--against", "--repair"):
            if option in args and not args[0].startswith("-"):  # otherwise the last may be PATH
                first = args.index(option) + 2
                end = next((n for n in range(first, len(args)) if args[n][:1] == "-"), len(args))
                more = [word for path in args[first:end] for word in (option, path)]
                args = [*args[:first], *more, *args[end:]]
        return super().parse_args(ctx, args)


@click.command(
    "verify",
    cls=_Command,
    examples=[
        Example("shardkit verify shards --decode", "Checksums, and every image"),
        Example("shardkit verify shards --against photos", "Compared with its source"),
    ],
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="SOURCE...",
    help="Compare every sample with these sources, given as for convert.",
)
@click.option(
    "--repair",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="SOURCE...",
    help="Rebuild damaged files from these sources, given as for convert, or from a copy.",
)
@click.option("--metadata", metavar="FILE", help="The --metadata table of the conversion.")
@click.option(
    "--transform",
    metavar="MODULE:FUNCTION",
    help="For --repair: the --transform of the conversion.",
)
@click.option("--decode", is_flag=True, help="Also read every value and decode every image.")
@click.option(
    "--client",
    is_flag=True,
    help="Compare every sample with what the format's own library reads (webdataset, lmdb, ...).",
)
@click.option(
    "--part",
    metavar="I/N",
    help="Check share I of the shards, as one of N processes on any machines.",
)
@storage_option
@click.option("--quiet", is_flag=True, help="Print only problems.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def command(
    path: Path,
    against: tuple[Path, ...],
    repair: tuple[Path, ...],
    metadata: str | None,
    transform: str | None,
    decode: bool,
    client: bool,
    part: str | None,
    storage_options: dict[str, str],
    quiet: bool,
    as_json: bool,
) -> None:
    """Check that the dataset at PATH is as it was written: all its files, shards and keys.

    With --repair, damaged files are replaced by their original contents, as their checksums
    prove. Undamaged files are not touched.

    Exit codes: 0 sound, 1 damaged, 2 invalid command line.
    """
    from shardkit.cli.progress import shown
    from shardkit.verification.verify import verify

    if transform is not None:
        search_here()
    with shown(quiet) as progress:
        report = verify(
            path,
            against or None,
            metadata=metadata,
            decode=decode,
            client=client,
            part=part,
            repair=repair or None,
            transform=transform,
            progress=progress,
            storage_options=storage_options,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        _show(report, quiet)
    if not report.sound:
        sys.exit(1)


def _show(report: VerifyReport, quiet: bool) -> None:
    for problem in report.problems[:_PROBLEMS]:
        complain(f"shardkit: {problem}")
    if len(report.problems) > _PROBLEMS:
        more = len(report.problems) - _PROBLEMS
        complain(f"shardkit: and {counted(more, 'problem')} more (--json lists all)")
    for left in report.repair.left if report.repair else ():
        complain(f"shardkit: {left}")
    if quiet:
        return
    content = f"{counted(report.samples, 'sample')} in {counted(report.shards, 'shard')}"
    read = f"{counted(report.files, 'file')}" + (f", {size(report.bytes)}" if report.bytes else "")
    words = f"{content}, {read}, checked in {report.seconds:.2f} s"
    if not report.sound:
        words = f"{counted(len(report.problems), 'problem')}; {words}"
    rows = [(f"{report.verdict}:", words)]
    if report.repair is not None:
        files = report.repair.files
        words = f"{counted(len(files), 'file')}, {size(report.repair.bytes)}"
        rows.insert(0, ("repaired:", f"{words}, from {report.repair.source}"))
        rows[1:1] = [(f"{file.how}:", file.path) for file in files[:_PROBLEMS]]
    rows += [("client:", _of_client(client)) for client in report.clients.values()]
    print_table(report.path, rows + [("note:", note) for note in report.notes])


def _of_client(client: ClientReport) -> str:
    """Return the library, the number of samples that it read, and what could not be compared."""
    versions = ", ".join(f"{name} {version}" for name, version in client.versions.items())
    words = f"{versions}: {counted(client.samples, 'sample')}, "
    equal = "all equal" if client.samples else "nothing compared"
    words += counted(client.problems, "difference") if client.problems else equal
    rest = [f"{what} ({count:,})" for what, count in (+client.not_compared).items()]
    return words + (f"; not compared: {', '.join(rest)}" if rest else "")
