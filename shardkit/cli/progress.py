"""Shows the progress of a command, and the plan and the result of a conversion."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
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
from shardkit.options import AudioOptions, ImageOptions, TextOptions

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from typing_extensions import Self

    from shardkit.conversion.plan import Plan
    from shardkit.conversion.run import ConvertResult, PartResult, SplitResult
    from shardkit.conversion.work import Progress as TaskProgress

_LINE_SECONDS = 5.0  # interval between lines if there is no terminal


class Progress:
    """Shows the progress of a command: a bar on a terminal, otherwise lines; nothing if `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Bar | None = None

    def note(self, words: str) -> None:
        if not self._quiet:
            say(f"note: {words}")

    def begin(self, title: str, words: str, total: int, unit: str, done: int = 0) -> None:
        """Begin a step that counts a unit such as "bytes" or "samples"."""
        self._done, self._bytes, self._total, self._unit = done, 0, total, unit
        self._began = self._shown = time.monotonic()
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._show_bar(title)
        else:
            say(words)

    def step(self, count: int, size: int) -> None:
        """`count` more units are done; `size` bytes are used to compute the speed."""
        self._done += count
        self._bytes += size
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, advance=count, words=self._words())
        elif not self._quiet and now - self._shown >= _LINE_SECONDS:
            self._shown = now
            say(self._words())

    def _show_bar(self, title: str) -> None:
        """Show a bar with the amount done, the speed and the remaining time."""
        from rich import progress

        self.__exit__()
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[words]}, left:"),
            progress.TimeRemainingColumn(),
            console=console(stderr=True),
            transient=True,
            refresh_per_second=2,  # each takes milliseconds, also of what `bench` measures
        )
        self._task = self._bar.add_task(
            title, total=self._total, completed=self._done, words=self._words()
        )
        self._bar.start()

    def _words(self) -> str:
        seconds = max(time.monotonic() - self._began, 0.001)
        if self._unit == "bytes":
            far = f"{size(self._done)} of {size(self._total)}"
        else:
            far = f"{self._done:,} of {self._total:,} {self._unit}"
        return f"{far}, {size(int(self._bytes / seconds))}/s" if self._bytes else far

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class ConvertMonitor(Progress):
    """Shows the progress of a conversion."""

    def start(self, plan: Plan, done: int) -> None:
        title = "continuing" if done else "converting"
        total = sum(map(plan.amount, plan.own))
        samples = "" if plan.samples is None else f"{counted(plan.samples, 'sample')}, "
        words = samples + size(plan.bytes)
        if plan.part is not None:
            words += f"; {_part(plan)}"
        if done:
            far = size(done) if plan.unit == "bytes" else f"{done:,}"
            words += f"; continuing, {far} are done"
        for note in plan.notes():
            self.note(note)
        self.begin(title, words, total, plan.unit, done)

    def advance(self, progress: TaskProgress) -> None:
        far = progress.bytes if self._unit == "bytes" else progress.samples
        self.step(far, progress.bytes)

    def copied(self, more: int, total: int) -> None:
        if not more:
            self.begin("publishing", f"publishing: the store copies {size(total)}", total, "bytes")
        self.step(more, more)


class StepsMonitor(Progress):
    """Shows the steps of a command such as `verify` or `bench`."""

    def start(self, doing: str, total: int, unit: str) -> None:
        amount = size(total) if unit == "bytes" else counted(total, unit.removesuffix("s"))
        self.begin(doing, f"{doing} {amount}", total, unit)

    def advance(self, count: int) -> None:
        self.step(count, count if self._unit == "bytes" else 0)


def show_plan(plan: Plan, state: str, estimate: dict[str, Any]) -> None:
    """Print what a conversion would do, the `state` of its output, and the `estimate` of costs."""
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
    rows += _options(about["recipe"])
    rows += [("note", note) for note in about["notes"]] + _passed_over(about["ignored"])
    if about["filtered"]:
        rows.append(("left out", tally(about["filtered"])))
    rows += [("problem", problem) for problem in about["problems"]]
    print_table("Would convert", rows)


def _part(plan: Plan) -> str:
    amount = size(plan.own_bytes)
    return f"part {plan.part} has {len(plan.own):,} of {counted(len(plan.tasks), 'task')}, {amount}"


def _estimated(about: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows with the estimated bytes, time and disk space of a conversion."""
    if "problem" in about:
        yield "estimate", about["problem"]
    if "written" in about:
        yield "to write", f"about {size(about['written'])}"
        tried = f"{counted(about['tried']['samples'], 'sample')}, {size(about['tried']['bytes'])}"
        tried += ", were tried"
        if bad := about["tried"]["bad"]:
            tried += f", and {bad:,} that {'is' if bad == 1 else 'are'} bad"
        if large := about["tried"]["too_large"]:
            tried += f"; {counted(large, 'sample')} too large to try, whose bytes are known"
        working = counted(about["processes"], "process")
        speed = (about["disk"] or {}).get("speed")
        written = f"; the disk writes {size(speed)}/s" if speed else "; writing was not tried"
        yield (
            "time",
            f"about {about['seconds']:,.1f} s with {working}: {tried}{written}",
        )
    if about["disk"]:
        disk = about["disk"]
        spare = f", besides {size(disk['unfinished'])} unfinished" if disk["unfinished"] else ""
        needed = f"about {size(disk['needed'])} needed, " if "needed" in disk else ""
        yield "disk", f"{needed}{size(disk['free'])} free in {disk['folder']}{spare}"


def _options(recipe: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows with the options of a recipe that differ from the defaults."""
    shown = {**recipe, "tokenizer": None, "image_defaults": None, "sources": None}
    for name, value in shown.items():
        label = name.replace("_", " ")
        if value in (None, False, [], {}, "fail") or name == "format":
            continue
        if name in _USUAL:
            usual = asdict(_USUAL[name])
            asked = ", ".join(f"{n}={v}" for n, v in value.items() if v != usual[n])
            yield _LABELS.get(name, name), asked
        elif name == "transform":
            yield label, value["name"]
        elif name == "classes":
            yield label, f"{len(value):,} names"
        else:
            yield label, size(value) if name == "shard_size" else str(value)


_USUAL: dict[str, ImageOptions | AudioOptions | TextOptions] = {
    "image": ImageOptions(),
    "audio": AudioOptions(),
    "text": TextOptions(),
}
_LABELS = {"image": "images"}


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
            rows.append(("  left out", words))
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
    """What is left to do when a part has ended."""
    words = "All tasks are done."
    if part.missing:
        others = f"part {part.missing_parts[0]}"
        if len(part.missing_parts) > 1:
            others += f" and {counted(len(part.missing_parts) - 1, 'other')}"
        words = f"Not done yet: {counted(part.missing, 'task')} of {others}."
    return f"{words} Run `shardkit merge {out}` once all parts have ended."


def _images(split: SplitResult) -> tuple[str, str]:
    """A row with the numbers of images that were passed through, resized and re-encoded."""
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
    return [("passed over", tally(ignored))]
