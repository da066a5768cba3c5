"""What publishing needs of a plan, and what the parts of a conversion agree on.

Parts store it, so that `merge` needs no source and no options, and compare their own with it. It is
in `plan/publish-plan.zip` in OUT.partial, or below its <job> in a store:

publish-plan.json         the `PublishPlanHeader` of the publishing plan
tasks.i64            a row of integers for each task: split, start, stop, bytes, joined
0/errors.jsonl       of split 0, the lines found while planning, with which its lists begin
0/filtered.jsonl
0/chosen.u64         the list of keys that selected its samples
0/tokenizer/...      the files of its tokenizer
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.conversion.shards import Content
from shardkit.conversion.work import error_line, json_line, unzipped, zipped
from shardkit.errors import DamagedError, OutputError, UsageError
from shardkit.formats import get_format
from shardkit.formats.base import Format, ShardSpec
from shardkit.helpers.checked import Count, checked, damaged, parse, plain
from shardkit.helpers.names import checked_name
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.manifest import CHOSEN, ERRORS, FILTERED
from shardkit.metadata.recipe import Recipe
from shardkit.schema import Schema

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.conversion.partial import Partial
    from shardkit.conversion.plan import Plan
    from shardkit.conversion.splits import Split

_PUBLISH_PLAN = "publish-plan.json"
_TASKS = "tasks.i64"
_TOKENIZER = "tokenizer/"
_COLUMNS = 5
_FOUND = ("problems", "ignored", "filtered", "tokenizer")  # of a split, found while planning
_SHOWN = 12  # parts that an error names


@dataclass(frozen=True)
class SplitOutline:
    """What publishing needs of one dataset of the output."""

    name: str
    schema: dict[str, Any]
    max_bytes: Count | None
    classes: dict[str, tuple[str, ...]]
    beside: tuple[str, ...]
    label: str
    guessed: tuple[str, ...]
    pixels: tuple[str, ...]
    problems: Count  # samples that planning found bad
    ignored: dict[str, Count]
    filtered: dict[str, Count]
    tokenizer: dict[str, Any]

    def content(self, format: Format) -> Content:
        """Return the content that the split's shards have in common."""
        spec = ShardSpec(Schema.from_json(self.schema), self.max_bytes, self.classes, self.beside)
        return Content(format, spec, self.label, self.guessed, self.pixels)


@dataclass(frozen=True)
class PublishPlanHeader:
    """The contents of publish-plan.json."""

    job: dict[str, Any]  # as in job.json
    splits: tuple[SplitOutline, ...]
    source_bytes: Count
    notes: tuple[str, ...]
    max_errors: Count  # bad samples that publishing allows
    overwrite: bool  # whether publishing may replace another dataset


@dataclass(frozen=True)
class PublishPlan(PublishPlanHeader):
    """What publishing needs of a plan."""

    recipe: Recipe
    contents: tuple[Content, ...]  # of the shards of each split
    tasks: npt.NDArray[np.int64]  # as in tasks.i64
    files: Mapping[str, bytes]  # the other files of the archive, by name

    @classmethod
    def of(cls, plan: Plan, max_errors: int = 0, overwrite: bool = False) -> PublishPlan:
        """Return the publishing plan of a plan, with the options that publishing needs."""
        numbers = {id(split): number for number, split in enumerate(plan.splits)}
        rows = [(numbers[id(t.split)], t.start, t.stop, t.size, t.joined) for t in plan.tasks]
        return cls(
            job=plan.job,
            splits=tuple(map(_outlined, plan.splits)),
            source_bytes=plan.source_bytes,
            notes=tuple(plan.notes()),
            max_errors=max_errors,
            overwrite=overwrite,
            recipe=plan.recipe,
            contents=tuple(split.content for split in plan.splits),
            tasks=np.array(rows, np.int64).reshape(-1, _COLUMNS),
            files={
                f"{number}/{name}": data
                for number, split in enumerate(plan.splits)
                for name, data in _files(split).items()
                if data
            },
        )

    @property
    def problems(self) -> int:
        """Samples that planning found bad."""
        return sum(split.problems for split in self.splits)

    def tasks_of(self, split: int) -> list[tuple[int, bool]]:
        """Return numbers of the tasks of a split, and whether their shards are to be joined."""
        numbers = np.flatnonzero(self.tasks[:, 0] == split)
        return [(number, bool(self.tasks[number, 4])) for number in numbers.tolist()]

    def file(self, split: int, name: str) -> bytes:
        return self.files.get(f"{split}/{name}", b"")

    def tokenizer_files(self, split: int) -> dict[str, bytes]:
        start = f"{split}/{_TOKENIZER}"
        return {
            n.removeprefix(start): data for n, data in self.files.items() if n.startswith(start)
        }

    def packed(self) -> bytes:
        """The publishing plan as one archive: the same bytes for the same publishing plan."""
        about = {f.name: plain(getattr(self, f.name)) for f in fields(PublishPlanHeader)}
        text = json.dumps(about, allow_nan=False).encode()
        return zipped(
            {_PUBLISH_PLAN: text, _TASKS: self.tasks.astype("<i8").tobytes(), **self.files}
        )

    @classmethod
    def unpacked(cls, packed: bytes, path: Path) -> PublishPlan:
        """Return the publishing plan in the archive at `path`; raises DamagedError."""
        try:
            files = unzipped(packed)
            about = checked(PublishPlanHeader, parse(files.pop(_PUBLISH_PLAN, b"")))
            tasks = np.frombuffer(files.pop(_TASKS, b""), "<i8").reshape(-1, _COLUMNS)
            recipe = Recipe.from_json(checked(dict[str, Any], about.job.get("recipe")), path)
            format = get_format(recipe.format)
            contents = tuple(split.content(format) for split in about.splits)
        except (ValueError, UsageError) as error:
            fix = "run the whole conversion again without --part: it keeps the finished tasks"
            raise damaged("the stored plan", error, path=path, fix=fix) from error
        found = cls(
            **vars(about), recipe=recipe, contents=contents, tasks=tasks.astype(np.int64),
            files=files,
        )  # fmt: skip
        found._check(path)
        return found

    def _check(self, path: Path) -> None:
        """Raise DamagedError for contents that no plan can have."""
        tasks = self.tasks
        if tasks.size and (tasks.min() < 0 or tasks[:, 0].max() >= len(self.splits)):
            raise DamagedError("the stored plan is damaged: a task has no split", path=path)
        for number, split in enumerate(self.splits):
            for name in (*filter(None, [split.name]), *self.tokenizer_files(number)):
                checked_name(name, path, "splits", flat=True)


def _outlined(split: Split) -> SplitOutline:
    content = split.content
    return SplitOutline(
        name=split.name,
        schema=content.schema.to_json(),
        max_bytes=content.spec.max_bytes,
        classes={name: tuple(names) for name, names in content.spec.classes.items()},
        beside=tuple(content.spec.beside),
        label=content.label,
        guessed=tuple(sorted(content.guessed)),
        pixels=tuple(content.pixels),
        problems=len(split.problems),
        ignored=dict(split.ignored),
        filtered=dict(Counter(line["reason"] for line in split.filtered)),
        tokenizer=split.tokenizer()[0],
    )


def _files(split: Split) -> dict[str, bytes]:
    """The lines found while planning for the lists of a dataset, and its tokenizer's files."""
    lists = split.source.key_lists
    chosen = [lists[name].astype("<u8").tobytes() for name in (split.name, "") if name in lists]
    return {
        ERRORS: b"".join(error_line(None, error) for error in split.problems),
        FILTERED: b"".join(map(json_line, split.filtered)),
        CHOSEN: b"".join(chosen[:1]),
        **{f"{_TOKENIZER}{name}": data for name, data in split.tokenizer()[1].items()},
    }


# --- the parts of a conversion


def agree(publish_plan: PublishPlan, partial: Partial) -> None:
    """Store the publishing plan of this part for `merge`, or compare it with the stored one.

    Of the options that do not change any task, those of the part that began last count. Parts that
    may drop samples (--on-error skip) reuse the work of parts that may not. Raises OutputError if
    this part would run other tasks, or run them differently.
    """
    path = partial.publish_plan
    if (packed := partial.read(path)) is None:
        partial.write(path, publish_plan.packed(), replace=False)
        packed = partial.read(path)  # another part may have been faster
    assert packed is not None
    stored = PublishPlan.unpacked(packed, path)
    if words := _differences(stored, publish_plan):
        raise OutputError(
            "this part has a different plan than the parts that began before",
            path=path,
            found=words,
            fix="give all parts the same source and options",
        )
    if _policy(stored) != _policy(publish_plan):
        partial.write(path, publish_plan.packed(), replace=True)


def _policy(publish_plan: PublishPlan) -> tuple[str, int, bool]:
    """Return the options that do not change any task."""
    return publish_plan.recipe.on_error, publish_plan.max_errors, publish_plan.overwrite


def _differences(stored: PublishPlan, own: PublishPlan) -> str:
    """The differences between the publishing plans of two parts of the same job, in words."""
    before, now = stored.recipe.on_error, own.recipe.on_error
    if (before, now) == ("skip", "fail"):
        return f"on_error was {before}, is {now}"
    if not np.array_equal(stored.tasks, own.tasks):
        return f"the work was divided into {len(stored.tasks):,} tasks, now {len(own.tasks):,}"
    same = _work_of(stored) == _work_of(own)
    return "" if same else "splits have other names, fields or classes"


def _work_of(publish_plan: PublishPlan) -> str:
    """Return what the tasks have to do, without what planning has ignored, which may change."""
    found = (vars(split).items() for split in publish_plan.splits)
    work = [{name: plain(value) for name, value in each if name not in _FOUND} for each in found]
    return json.dumps(work, sort_keys=True)


def who_is_missing(begun: Sequence[PartOf], missing: Collection[int]) -> tuple[str, list[PartOf]]:
    """Return the parts that should do the `missing` tasks: in words, and as a list."""
    counts = Counter(part.total for part in begun)
    words = "1 task is missing" if len(missing) == 1 else f"{len(missing):,} tasks are missing"
    if not counts:
        return words, []
    total = counts.most_common(1)[0][0]
    parts = parts_of(missing, total)
    kinds = {
        "never began": [part for part in parts if part not in begun],
        "began and did not end": [part for part in parts if part in begun],
    }
    which = [f"{_listed(found)} {kind}" for kind, found in kinds.items() if found]
    return f"{words}: {'; '.join(which)}", parts


def parts_of(tasks: Collection[int], total: int) -> list[PartOf]:
    """Return the parts, of so many, that the tasks belong to."""
    return [PartOf(number, total) for number in sorted({task % total + 1 for task in tasks})]


def _listed(parts: Sequence[PartOf]) -> str:
    names = [str(part) for part in parts[:_SHOWN]]
    more = [f"{len(parts) - _SHOWN:,} more"] if len(parts) > _SHOWN else []
    return ", ".join([*names, *more])
