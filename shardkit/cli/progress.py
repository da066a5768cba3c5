"""Shows the progress of a command, and the plan and the result of a conversion."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shardkit.cli import say
from shardkit.cli.tables import (
    console,
    counted,
    print_table,
    print_text,
    size,
    spread,
    tally,
    text_rows,
)
from shardkit.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from shardkit.conversion.plan import Plan
    from shardkit.conversion.run import ConvertResult, PartResult, SplitResult
    from shardkit.helpers.progress import Progress

_LINE_SECONDS = 5.0  # interval between lines if there is no terminal
_SOON = 0.2  # seconds without a bar, as many steps take no longer


@contextlib.contextmanager
def shown(quiet: bool) -> Iterator[Callable[[Progress], object] | bool]:
    """A context with the `progress` of a call: a bar on a terminal, otherwise a line now and then.

    False if `quiet`.
    """
    if quiet:
        yield False
    elif sys.stderr.isatty():
        bar = _Bar()
        try:
            yield bar
        finally:
            bar.stop()
    else:
        yield _Lines()


class _Lines:
    """Says how far a step is when it begins, and every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, now: Progress) -> None:
        if _begins(now):
            self._next = 0.0
        if now.seconds >= self._next:
            self._next = now.seconds + _LINE_SECONDS
            say(str(now))


class _Bar:
    """Shows how far a step is, and its speed, unless it ends soon."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __call__(self, now: Progress) -> None:
        if _begins(now):
            self.stop()
            self._before = now.done
        if self._task is None:
            if now.seconds < _SOON:
                return
            self._bar = _new_bar()
            self._task = self._bar.add_task(now.doing, total=now.total, words=now.amount)
            self._bar.start()
        words = now.amount
        if now.unit == "bytes" and now.seconds:
            words += f", {size(int((now.done - self._before) / now.seconds))}/s"
        assert self._bar is not None
        self._bar.update(self._task, completed=now.done, words=words)

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None


def _new_bar() -> Bar:
    from rich import progress  # slow

    columns = ("{task.description}", "{task.fields[words]}, left:")
    before, after = map(progress.TextColumn, columns)
    return progress.Progress(
        *(before, progress.BarColumn(), after, progress.TimeRemainingColumn()),
        console=console(stderr=True),
        transient=True,
        refresh_per_second=2,  # each takes milliseconds, also of what `bench` measures
    )


def _begins(now: Progress) -> bool:
    """Return whether a step begins, whose notes are then shown."""
    for note in () if now.seconds else now.notes:
        say(f"note: {note}")
    return not now.seconds


def show_plan(plan: Plan, state: str, estimate: dict[str, Any]) -> None:
    """Print what a conversion would do, the `state` of its output, and the `estimate` of costs."""
    from shardkit.inspection.command import changed_options

    about = plan.describe()
    rows = [("output", about["out"]), *([("state", state)] if state else [])]
    rows.append(("format", about["format"]))
    for part in about["parts"]:
        name = f"split {part['split']}" if part["split"] else "samples"
        classes = f" in {counted(part['classes'], 'class')}" if part["classes"] else ""
        amount = "of documents" if part["samples"] is None else f"{part['samples']:,}"
        rows.append((name, f"{amount}{classes}: {', '.join(part['schema'])}"))
    rows.append(("bytes to read", size(plan.bytes)))
    joined = sum(task.joined for task in plan.tasks)
    what = f"{joined:,} of them parts of shards" if joined else "each a shard or more"
    rows.append(("tasks", f"{len(plan.tasks):,}, {what}"))
    if plan.part is not None:
        rows.append(("part", _part(plan)))
    rows += _estimated(estimate)
    rows += [(name, str(value)) for name, value in changed_options(plan.recipe)]
    rows += [("note", note) for note in about["notes"]] + _passed_over(about["ignored"])
    if about["filtered"]:
        rows.append(("filtered", tally(about["filtered"])))
    rows += [("problem", problem) for problem in about["problems"]]
    print_table("Would convert", rows)


def _part(plan: Plan) -> str:
    amount = size(plan.own_bytes)
    return f"part {plan.part} has {len(plan.own):,} of {counted(len(plan.tasks), 'task')}, {amount}"


def _estimated(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield rows with the estimated bytes, time and disk space of a conversion."""
    if "problem" in about:
        yield "estimate", about["problem"]
    if "written" in about:
        yield "to write", f"about {size(about['written'])}"
        tried = f"{counted(about['tried']['samples'], 'sample')}, {size(about['tried']['bytes'])}"
        tried += ", were tried"
        if bad := about["tried"]["bad"]:
            tried += f", and {bad:,} that {'is' if bad == 1 else 'are'} bad"
        working = counted(about["processes"], "process")
        yield "time", f"about {about['seconds']:,.1f} s with {working}: {tried}"
    if about["disk"]:
        disk = about["disk"]
        spare = f", besides {size(disk['unfinished'])} unfinished" if disk["unfinished"] else ""
        needed = f"about {size(disk['needed'])} needed, " if "needed" in disk else ""
        yield "disk", f"{needed}{size(disk['free'])} free in {disk['folder']}{spare}"


COMPLETE = "The output was already complete: same source (names and sizes), same options."


def show_result(result: ConvertResult, complete: str = COMPLETE) -> None:
    """Print the result of a conversion."""
    from shardkit.conversion.run import notes_on_keys

    rows = []
    if (part := result.part) is not None:
        words = f"{counted(part.tasks, 'task')}, {counted(part.samples, 'sample')}: done"
        rows.append((f"part {part.part}", words))
        rows += [("  dropped", f"{part.errors:,}")] if part.errors else []
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
            rows.append(("  dropped", f"{split.errors:,}, listed in {split.errors_list}"))
        if split.filtered:
            words = f"{tally(split.filtered)}; listed in {split.filtered_list}"
            rows.append(("  filtered", words))
        if split.images:
            rows.append(_images(split))
        if split.reasons:
            rows.append(("  changed", tally(split.reasons)))
        if split.text:
            seconds = 0 if result.already_complete else result.seconds
            rows += [(f"  {name}", words) for name, words in text_rows(split.text, seconds)]
        if split.encoded:
            words = f"images that {result.format} cannot hold: {tally(split.encoded)}"
            rows.append(("  encoded", words))
    rows += [("note", note) for note in notes_on_keys(result.splits.values())]
    rows += _passed_over(result.ignored)
    if not result.already_complete:
        speed = size(int(result.source_bytes / max(result.seconds, 0.001)))
        rows.append(("time", f"{result.seconds:.1f} s, {speed}/s"))
    print_table(result.out, rows)
    if result.already_complete:
        print_text(complete)
    if result.part is not None:
        print_text(printable(_after_part(result.part, result.out)))


def _after_part(part: PartResult, out: str) -> str:
    """Return what is left to do when a part has ended."""
    words = "All tasks are done."
    if part.missing:
        others = f"part {part.missing_parts[0]}"
        if len(part.missing_parts) > 1:
            others += f" and {counted(len(part.missing_parts) - 1, 'other')}"
        words = f"Not done yet: {counted(part.missing, 'task')} of {others}."
    return f"{words} Run `shardkit merge {out}` once all parts have ended."


def _images(split: SplitResult) -> tuple[str, str]:
    """Return a row with the numbers of images that were passed through, resized and re-encoded."""
    done = {words: split.images[n] for n, words in _DONE.items() if n in split.images}
    before, after = (size(split.images.get(f"bytes {way}", 0)) for way in ("in", "out"))
    return ("  images", f"{tally(done) or 'none'}; {before} in, {after} out")


_DONE = {
    "passed": "passed through",
    "resized": "resized",
    "encoded": "re-encoded",
    "recompressed": "recompressed",
    "kept": "stored unchanged, as re-encoding would make them larger",
}


def _passed_over(ignored: dict[str, int]) -> list[tuple[str, str]]:
    if not ignored:
        return []
    return [("ignored", tally(ignored))]
