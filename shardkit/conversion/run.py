"""Plan, work, publish."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardkit import storage
from shardkit.checked import plain
from shardkit.conversion import pool
from shardkit.conversion.partial import (
    Partial,
    check_output,
    differences,
    is_complete,
    is_single,
)
from shardkit.conversion.plan import Plan, make_plan
from shardkit.conversion.publish import assemble
from shardkit.conversion.work import Progress, Work, read_result
from shardkit.errors import OutputError, ShardkitError, SourceError, UsageError
from shardkit.folders import is_pattern
from shardkit.formats import FORMATS, get_format
from shardkit.manifest import (
    ERRORS,
    FILTERED,
    FieldStats,
    Manifest,
    Splits,
    folder_of,
    load_any,
    manifest_path,
)
from shardkit.options import ConvertOptions
from shardkit.sources import open_sources

_OTHER_OPTIONS = "any option but --on-error takes --overwrite too: it begins again"


class Monitor(Protocol):
    """Who wants to know how a conversion goes on; called in the caller's thread."""

    def start(self, plan: Plan, done: int) -> None:
        """Work begins; an earlier run has `done` so many samples."""

    def advance(self, progress: Progress) -> None:
        """Samples were written or dropped. Negative after a worker died: its task begins again."""


@dataclass(frozen=True)
class SplitResult:
    """One dataset that was made."""

    path: str
    samples: int
    bytes: int  # of the shards
    shards: int
    errors: int  # samples that were dropped
    errors_list: str | None  # the file that lists them
    classes: int | None
    fields: dict[str, FieldStats]
    encoded: dict[str, int]  # images that the format could not hold as they were, by reason
    ignored: dict[str, int]  # what was passed over, and how often: files, fields, rows, ...
    keys: dict[str, int]  # that other readers stumble over, by what they have: blanks
    filtered: dict[str, int]  # samples that were dropped as options ask for it, by reason
    filtered_list: str | None  # the file that lists them
    text: dict[str, Any]  # documents, tokens and what became of them; empty without a tokenizer
    images: dict[str, int]  # what the steps did: passed, resized, encoded, kept; bytes in and out
    reasons: dict[str, int]  # why images were changed, other than to be resized


def notes_on_keys(splits: Iterable[SplitResult]) -> list[str]:
    """What other readers stumble over: known only once all keys were written."""
    found = sum((Counter(split.keys) for split in splits), Counter())
    return [
        f"keys with {what}, which DALI's index of a TAR and other tools cannot take: {count:,};"
        " --safe-keys percent-encodes them"
        for what, count in sorted(found.items())
    ]


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion made. `splits` has one entry, named "", where there are none."""

    out: str
    format: str
    splits: dict[str, SplitResult]
    source_bytes: int
    ignored: dict[str, int]  # what was passed over in all splits, and how often
    notes: list[str]  # what may surprise: images without labels, say
    already_complete: bool = False  # an earlier run of the same command had made it
    seconds: float = 0.0  # planning, working and publishing

    @property
    def samples(self) -> int:
        return sum(split.samples for split in self.splits.values())

    @property
    def bytes(self) -> int:
        return sum(split.bytes for split in self.splits.values())

    @property
    def errors(self) -> int:
        return sum(split.errors for split in self.splits.values())

    def to_dict(self) -> dict[str, Any]:
        totals = {"samples": self.samples, "bytes": self.bytes, "errors": self.errors}
        return {**plain(self), **totals}


def prepare(
    source: str | os.PathLike[str] | Sequence[Any],
    to: str,
    out: str | os.PathLike[str] | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
    **options: Any,
) -> Plan:
    """The plan of a conversion to `out`: everything is looked at, nothing is done."""
    get_format(to)  # an unknown one is an error before all others
    checked = ConvertOptions.of(**options)
    sources = open_sources(
        source,
        split=checked.split,
        classes=checked.classes,
        schema=schema,
        text=checked.documents,
        selection=checked.selection,
    )
    if any(checked.text.reads and not source.reads_text for source in sources.values()):
        raise UsageError(
            "encoding, encoding_errors and documents are for files of text",
            found="a source that has no such files",
        )
    single = out is not None and is_single(storage.local(out, output=True), to)
    return make_plan(sources, to, checked, single=single, workers=checked.processes(source))


def run(
    plan: Plan,
    source: str | os.PathLike[str] | Sequence[Any],
    out: str | os.PathLike[str] | None,
    monitor: Monitor | None,
    processes: pool.Pool | None,
) -> ConvertResult:
    """Carry out a plan made of `source`, in `processes` or in this one."""
    source_path = storage.local(source) if isinstance(source, str | os.PathLike) else None
    target = storage.local(
        default_output(source_path, plan.format.name) if out is None else out, output=True
    )
    single = is_single(target, plan.format.name)
    check_output(target, source_path, single=single)
    partial = Partial(target, single=single)
    if _is_done(plan, target, partial):
        return _result(plan, target, already_complete=True)
    _refuse_problems(plan)
    partial.begin(plan.identity, go_on=plan.resumable)
    try:
        finished = _finished(plan, partial)
        _work(plan, partial, finished, monitor, processes)
        assemble(plan, partial, finished)
        partial.publish()
    except BaseException as error:
        with contextlib.suppress(ShardkitError):
            partial.sweep()  # what other workers were at when one failed
            if (
                isinstance(error, ShardkitError)
                and "--" in (error.fix or "")
                and partial.has_work()
            ):
                error.fix = f"{error.fix} ({_OTHER_OPTIONS})"
        raise
    finally:
        partial.release()
    return _result(plan, target)


def default_output(source: Path | None, format: str) -> Path:
    """`<name>-<format>` beside the source."""
    if source is None:
        raise UsageError("a sequence needs an output folder", fix="pass out=")
    if is_pattern(source):
        raise UsageError("a pattern of shards needs an output", path=source, fix="give -o OUT")
    if source.name in ("", "..", "."):
        source = source.resolve()
    inside = [declared.inside for declared in FORMATS.values() if declared.inside]
    if source.is_file() and f"/{source.name}" in inside:  # the file in a shard that is a folder
        source = source.resolve().parent
    if source.is_file():
        from shardkit.sources.text.names import parse_name

        text = parse_name(source.name)
        if text is not None:
            return source.parent / f"{text.stem}-{format}"
    suffixes = [suffix for declared in FORMATS.values() for suffix in declared.suffixes]
    name = source.name
    for suffix in sorted(suffixes, key=len, reverse=True):
        if len(name) > len(suffix) and name.endswith(suffix):
            name = name.removesuffix(suffix)
            break
    return source.parent / f"{name}-{format}"


def _is_done(plan: Plan, out: Path, partial: Partial) -> bool:
    """Whether the dataset is there already; raises OutputError where it must not be replaced."""
    job = partial.job() if partial.exists() else None
    overwrite = plan.options.overwrite
    complete = is_complete(out, plan.identity, with_errors=plan.options.on_error == "skip")
    if complete and (job == plan.identity or not overwrite):
        if partial.exists() and job in (plan.identity, None):
            partial.begin(plan.identity, go_on=True)  # the last run was killed while cleaning up
            partial.discard()
        return True
    if job is not None and job != plan.identity and not overwrite and partial.has_work():
        raise OutputError(
            "there is an unfinished conversion to this output, of other options or another source,"
            " or with other versions",
            path=partial.path,
            found=differences(job, plan.identity),
            fix="repeat it with its own options to finish it, or start again with --overwrite",
        )
    if out.exists() and not _is_empty(out) and not overwrite:
        raise OutputError(
            "the output exists and holds another dataset",
            path=out,
            found=_difference(out, plan),
            fix="give another folder with -o, or replace this one with --overwrite",
        )
    return False


def _difference(out: Path, plan: Plan) -> str:
    """Why the dataset at `out` is not the one that is asked for."""
    made = _made_with(out)
    words = differences(made, {name: plan.identity[name] for name in made})
    if not words:
        dropped = load_any(out).errors and plan.options.on_error == "fail"
        words = "bad samples were dropped from it" if dropped else "it is damaged, or may be older"
    return words


def _made_with(out: Path) -> dict[str, Any]:
    manifest = load_any(out)
    made = {"source": manifest.source, "options": manifest.options}
    return {"format": manifest.format, **made}


def _is_empty(out: Path) -> bool:
    return out.is_dir() and not any(out.iterdir())


def _refuse_problems(plan: Plan) -> None:
    problems = [problem for part in plan.parts for problem in part.problems]
    if problems and plan.options.on_error == "fail":
        raise problems[0]
    if len(problems) > plan.options.max_errors:
        raise _too_many(plan.options.max_errors, " ".join(str(problems[0]).split()))


def _too_many(allowed: int, last: str = "") -> SourceError:
    return SourceError(
        f"more than {allowed:,} samples are bad",
        found=last or None,
        fix="look at them one by one with --on-error fail, or allow more with --max-errors",
    )


def _work(
    plan: Plan,
    partial: Partial,
    finished: set[int],
    monitor: Monitor | None,
    processes: pool.Pool | None,
) -> None:
    if monitor is not None:
        done = sum(plan.amount(task) for task in plan.tasks if task.number in finished)
        monitor.start(plan, done)
    bad = sum(len(part.problems) for part in plan.parts) + _errors_of(partial, finished)

    def report(progress: Progress) -> None:
        nonlocal bad
        bad += progress.errors
        if bad > plan.options.max_errors:
            raise _too_many(plan.options.max_errors)
        if monitor is not None:
            monitor.advance(progress)

    left = len(plan.tasks) - len(finished)
    works = _works(plan, partial, finished)
    # This process has all loaded that a single task takes. A sequence, which cannot be resumed, is
    # the user's own code: that stays where it was asked to be.
    if processes is None or (left == 1 and plan.resumable):
        if processes is not None:
            processes.kill()  # they would only be in the way
        pool.run_here(works, report)
    else:
        processes.run(works, left, report)


def _works(plan: Plan, partial: Partial, finished: set[int]) -> Iterator[Work]:
    options = plan.options
    for task in plan.tasks:
        if task.number not in finished:
            yield Work(
                number=task.number,
                folder=partial.task_folder(task.number),
                reading=task.reading(),
                format=plan.format.name,
                max_bytes=plan.max_bytes(),
                max_samples=options.shard_samples,
                schema=task.part.schema,
                rename=options.rename,
                safe_keys=options.safe_keys and not task.part.source.safe_keys,
                skip_errors=options.on_error == "skip",
                transformed=options.transform is not None,
                durable=not task.piece,
            )


def _finished(plan: Plan, partial: Partial) -> set[int]:
    """The tasks that an earlier run has done, less those that dropped samples if we must not."""
    finished = set(partial.finished(len(plan.tasks)))
    if plan.options.on_error == "fail":
        dropped = {number for number in finished if _errors_of(partial, {number})}
        if dropped and partial.dataset.exists():  # shards have moved, and their numbers may change
            storage.remove(partial.dataset)
            dropped = finished
        for number in sorted(dropped):
            storage.remove(partial.task_folder(number))
        finished -= dropped
    return finished


def _errors_of(partial: Partial, finished: set[int]) -> int:
    return sum(read_result(partial.task_folder(number)).errors for number in finished)


def _result(plan: Plan, out: Path, *, already_complete: bool = False) -> ConvertResult:
    made = load_any(out)
    folders = {name: out / name for name in made.splits} if isinstance(made, Splits) else {"": out}
    splits = {name: _split_result(folder) for name, folder in folders.items()}
    ignored = sum((Counter(split.ignored) for split in splits.values()), Counter())
    return ConvertResult(
        out=os.fspath(out),
        format=plan.format.name,
        splits=splits,
        source_bytes=plan.source_bytes,
        ignored=dict(sorted(ignored.items())),
        notes=[*plan.notes(), *notes_on_keys(splits.values())],
        already_complete=already_complete,
    )


def _beside(dataset: Path, name: str) -> Path:
    return folder_of(manifest_path(dataset)) / name


def _split_result(folder: Path) -> SplitResult:
    manifest = load_any(folder)
    assert isinstance(manifest, Manifest)
    lists = {
        name: None if listed is None else str(_beside(folder, listed.name))
        for name in (ERRORS, FILTERED)
        for listed in [manifest.list_named(name)]
    }
    return SplitResult(
        path=os.fspath(folder),
        samples=manifest.samples,
        bytes=manifest.bytes,
        shards=len(manifest.shards),
        errors=manifest.errors,
        errors_list=lists[ERRORS],
        classes=None if manifest.classes is None else len(manifest.classes),
        fields=manifest.fields,
        encoded=manifest.encoded,
        ignored=manifest.ignored,
        keys=manifest.keys,
        filtered=manifest.filtered,
        filtered_list=lists[FILTERED],
        text=manifest.text,
        images=manifest.images,
        reasons=manifest.reasons,
    )
