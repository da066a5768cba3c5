"""What a conversion shows while it runs and when it is done."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.cli.tables import console, counted, print_table, size, spread

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from shardkit.conversion.plan import Plan
    from shardkit.conversion.run import ConvertResult
    from shardkit.conversion.work import Progress

_LINE_SECONDS = 5.0  # between two lines where there is no terminal


class _Quiet:
    """Shows nothing."""

    def start(self, plan: Plan, done: int) -> None: ...

    def advance(self, progress: Progress) -> None: ...

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Lines(_Quiet):
    """A plain line now and then, on standard error: for logs."""

    def start(self, plan: Plan, done: int) -> None:
        self._began = self._shown = time.monotonic()
        self._samples, self._bytes, self._total = done, 0, plan.samples
        what = f"{counted(plan.samples, 'sample')}, {size(plan.bytes)}"
        _say(what + (f"; continuing, {done:,} are done" if done else ""))

    def advance(self, progress: Progress) -> None:
        self._samples += progress.samples
        self._bytes += progress.bytes
        now = time.monotonic()
        if now - self._shown >= _LINE_SECONDS:
            self._shown = now
            speed = size(int(self._bytes / (now - self._began)))
            _say(f"{self._samples:,} of {self._total:,} samples, {speed}/s")


class _Bar(_Quiet):
    """A bar with samples, speed and the time that is left."""

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def start(self, plan: Plan, done: int) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("samples, {task.fields[speed]}/s, left:"),
            progress.TimeRemainingColumn(),
            console=console(stderr=True),
            transient=True,
        )
        self._began, self._bytes = time.monotonic(), 0
        title = "continuing" if done else "converting"
        self._task = self._bar.add_task(title, total=plan.samples, completed=done, speed="0 B")
        self._bar.start()

    def advance(self, progress: Progress) -> None:
        assert self._bar is not None
        self._bytes += progress.bytes
        speed = size(int(self._bytes / max(time.monotonic() - self._began, 0.001)))
        self._bar.update(self._task, advance=progress.samples, speed=speed)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def make_monitor(quiet: bool) -> _Quiet:
    """A bar on a terminal, lines elsewhere, nothing if asked."""
    if quiet:
        return _Quiet()
    return _Bar() if sys.stderr.isatty() else _Lines()


def show_plan(plan: Plan, out: Path) -> None:
    """What a conversion would do, for people."""
    about = plan.describe()
    rows = [("output", str(out)), ("format", plan.format.name)]
    for part in about["parts"]:
        name = f"split {part['split']}" if part["split"] else "samples"
        classes = f" in {counted(part['classes'], 'class')}" if part["classes"] else ""
        rows.append((name, f"{part['samples']:,}{classes}: {', '.join(part['schema'])}"))
    rows.append(("bytes to read", size(plan.bytes)))
    rows.append(("tasks", f"{len(plan.tasks):,}, each about one shard or more"))
    for option, value in about["options"].items():
        if value not in (None, {}):
            rows.append((option.replace("_", " "), size(value) if "size" in option else str(value)))
    rows += [("note", note) for note in about["notes"]] + _passed_over(about["ignored"])
    rows += [("problem", problem) for problem in about["problems"]]
    print_table("Would convert", rows)


def show_result(result: ConvertResult) -> None:
    """What a conversion made, for people."""
    rows = []
    for name, split in result.splits.items():
        classes = f" in {counted(split.classes, 'class')}" if split.classes else ""
        shards = counted(split.shards, "shard")
        words = f"{counted(split.samples, 'sample')}{classes}; {shards}, {size(split.bytes)}"
        rows.append((name or "made", words))
        rows += [
            (f"  {field}", f"{stats.count:,} values, {size(stats.bytes)}; {spread(stats)}")
            for field, stats in split.fields.items()
            if stats.min != stats.max
        ]
        if split.errors:
            rows.append(("  dropped", f"{split.errors:,}, listed in {split.path}/errors.jsonl"))
    rows += [("note", note) for note in result.notes] + _passed_over(result.ignored)
    if not result.already_complete:
        speed = size(int(result.source_bytes / max(result.seconds, 0.001)))
        rows.append(("time", f"{result.seconds:.1f} s, {speed}/s"))
    print_table(result.out, rows)
    if result.already_complete:
        print("It was complete already: same source (names and sizes), same options.")


def _passed_over(ignored: dict[str, int]) -> list[tuple[str, str]]:
    if not ignored:
        return []
    return [("passed over", ", ".join(f"{count:,} {what}" for what, count in ignored.items()))]


def _say(words: str) -> None:
    print(f"shardkit: {words}", file=sys.stderr, flush=True)
