"""Finished tasks -> a dataset: shards numbered in task order, manifests, lists of errors and keys.

Every step can be repeated: after a run was killed here, the next one repeats them with the same
result.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from shardkit.codecs.array import table_header
from shardkit.conversion.partial import Partial
from shardkit.conversion.publish_plan import PublishPlan
from shardkit.conversion.shards import HASHES, KEYS_REPEAT, LENGTH_ROWS, Content
from shardkit.conversion.stats import Stats
from shardkit.conversion.target import Target
from shardkit.conversion.work import Joining, TaskShard, Work, check_shard, joined, read_result
from shardkit.errors import DamagedError, SampleError, SourceError
from shardkit.formats import file_name, get_format
from shardkit.formats.base import Format
from shardkit.metadata.manifest import (
    CHOSEN,
    ERRORS,
    FILTERED,
    FOLDER,
    KEYS,
    LENGTHS,
    NAME,
    PIECES,
    File,
    Manifest,
    Shard,
    Splits,
)
from shardkit.schema import Int, Schema, length_fields, lengths_dtype
from shardkit.sources.subset import nothing_left
from shardkit.storage import fs


class SplitShards(NamedTuple):
    """What the tasks of a split have made."""

    folders: list[Path]  # of the tasks
    groups: list[list[TaskShard]]  # each becomes one shard; an empty one becomes an empty shard
    stats: Stats
    errors: int


def shards_of(publish_plan: PublishPlan, number: int, partial: Partial) -> SplitShards:
    """Read the results of the tasks of a split. Raises SampleError if a key is in two shards."""
    split, recipe = publish_plan.splits[number], publish_plan.recipe
    stats, errors, made, folders = Stats(), split.problems, list[TaskShard](), list[Path]()
    stats.ignored.update(split.ignored)
    stats.filtered.update(split.filtered)
    for task, to_join in publish_plan.tasks_of(number):
        folder = partial.task_folder(task)
        result = read_result(folder)
        made += result.made(folder, task, to_join)
        stats.merge(result.stats)
        errors += result.errors
        folders.append(folder)
    _check_keys(publish_plan.contents[number], made, partial)
    groups = list(_groups(made, recipe.shard_size, recipe.shard_samples)) or [[]]
    return SplitShards(folders, groups, stats, errors)


def joins(
    publish_plan: PublishPlan,
    splits: Sequence[SplitShards],
    partial: Partial,
    earlier: Collection[int],
) -> list[Work]:
    """Return the tasks of the second wave, which join the shards of the first one.

    Other processes have finished the tasks in `earlier`, whose shards to be joined are compared
    with their checksums, as they were never synced.
    """
    works: dict[Path, Work] = {}
    for split, made_by_tasks in enumerate(splits):
        for group in made_by_tasks.groups:
            before = any(made.task in earlier for made in group)
            if len(group) == 1:
                _settle(group[0], before, partial)
                continue
            folder = _joined_at(partial, split, group)
            joining, number = Joining(tuple(group), before), len(publish_plan.tasks) + len(works)
            upload, content = partial.upload(folder), publish_plan.contents[split]
            works[folder] = Work.of(
                number, folder, joining, publish_plan.recipe, content, upload=upload
            )
    done = partial.finished(works) if works else ()
    return [work for folder, work in works.items() if folder not in done]


def _joined_at(partial: Partial, split: int, group: list[TaskShard]) -> Path:
    """The folder for the result of joining a group, which names its inputs by their checksums."""
    words = " ".join([f"{split}", *(made.shard.file.checksum for made in group)])
    return partial.tasks / f"joined-{xxhash.xxh3_64_hexdigest(words.encode())}"


def _settle(made: TaskShard, earlier: bool, partial: Partial) -> None:
    """Sync a shard that was to be joined, but is alone, unless it has been moved already."""
    local = partial.upload(made.folder) is None
    if made.joined and local and (made.folder / made.shard.file.name).exists():
        if earlier:
            check_shard(made)
        for file in made.shard.files:
            fs.sync(made.folder / file.name)


def assemble(
    publish_plan: PublishPlan, target: Target, partial: Partial, splits: Sequence[SplitShards]
) -> None:
    """Fill `partial.dataset` with the results of all tasks."""
    made = {
        split.name: _assemble_split(publish_plan, number, target, partial, splits[number])
        for number, split in enumerate(publish_plan.splits)
    }
    recipe = publish_plan.recipe
    if not any(manifest.samples for manifest in made.values()):
        _refuse_nothing(publish_plan, partial, made.values())
    if list(made) != [""]:
        samples = {name: manifest.samples for name, manifest in made.items()}
        errors = sum(manifest.errors for manifest in made.values())
        folder, format = partial.dataset, get_format(recipe.format)
        files = described(folder, format.complete_splits(folder, made))
        manifest = Splits(format.name, samples, errors, recipe.to_json(), files)
        manifest.write(target.list_path(folder, NAME))


def _refuse_nothing(
    publish_plan: PublishPlan, partial: Partial, made: Collection[Manifest]
) -> None:
    """Raise SourceError if samples were ignored, were bad or were filtered until none was left."""
    left_out = sum((Counter(one.ignored) for one in made), Counter[str]())
    filtered = sum((Counter(one.filtered) for one in made), Counter[str]())
    errors = sum(manifest.errors for manifest in made)
    tokens = sum(manifest.text.get("dropped", 0) for manifest in made)
    reasons = [f"{count:,} {why}" for why, count in filtered.items()]
    reasons += [f"{tokens:,} tokens that fill no block"] if tokens else []
    if publish_plan.recipe.chooses and not (errors or reasons):
        raise nothing_left(left_out)
    if not (errors or reasons):
        return
    if errors:
        folders = [partial.task_folder(task) for task in range(len(publish_plan.tasks))]
        found = [publish_plan.file(number, ERRORS) for number in range(len(publish_plan.splits))]
        lines = next(data for data in [*found, *_lines(folders, ERRORS)] if data)
        first = json.loads(lines.split(b"\n")[0])
        reasons.append(f"{errors:,} bad, the first, {first['source']}: {first['what']}")
    raise SourceError(
        "no sample of the source is left: all were dropped",
        expected="at least one sample",
        found="; ".join(reasons),
        fix="repair the source, or change the options that drop its samples; then convert with"
        " --overwrite",
    )


def _assemble_split(
    publish_plan: PublishPlan, number: int, target: Target, partial: Partial, made: SplitShards
) -> Manifest:
    split, folder = publish_plan.splits[number], partial.dataset / publish_plan.splits[number].name
    fs.make_folder(folder / FOLDER)
    written = write_lists(publish_plan, number, target, folder, made.folders)
    return publish_shards(
        publish_plan.contents[number],
        [_shard_of(partial, number, group) for group in made.groups],
        made.stats,
        folder,
        target,
        partial,
        errors=made.errors,
        files=described(folder, written),
        tokenizer=split.tokenizer,
        recipe=publish_plan.recipe.to_json(),
        versions=publish_plan.job["versions"],
    )


def _shard_of(partial: Partial, split: int, group: list[TaskShard]) -> TaskShard:
    """The shard that a group became, with the numbers of the first and the last of its tasks."""
    if len(group) == 1:
        (made,) = group
    else:
        folder = _joined_at(partial, split, group)
        (made,) = read_result(folder).made(folder)
    tasks = [one.task for one in group if one.task is not None]
    return made._replace(shard=replace(made.shard, tasks=(tasks[0], tasks[-1]) if tasks else ()))


def write_lists(
    publish_plan: PublishPlan, number: int, target: Target, folder: Path, tasks: list[Path]
) -> list[Path]:
    """Write the lists of a split to `folder`, from the folders of all its tasks."""
    lists = {
        ERRORS: [publish_plan.file(number, ERRORS), *_lines(tasks, ERRORS)],
        FILTERED: [publish_plan.file(number, FILTERED), *_lines(tasks, FILTERED)],
        KEYS: _lines(tasks, KEYS),
        CHOSEN: [publish_plan.file(number, CHOSEN)],
    }
    tokenizer_files = publish_plan.tokenizer_files(number)
    schema = publish_plan.contents[number].schema
    return [
        *_write_lists(target, folder, lists),
        *write_lengths(target.list_path(folder, LENGTHS), schema, tasks),
        *_write_lists(target, folder, {name: [data] for name, data in tokenizer_files.items()}),
    ]


def _groups(
    made: list[TaskShard], max_bytes: int | None, max_samples: int | None
) -> Iterator[list[TaskShard]]:
    """Groups of shards, each of which becomes one shard: neighbours are joined up to the limits.

    Joined shards are of nearly equal size, like those that tasks write by themselves.
    """
    for to_join, run in itertools.groupby(made, lambda one: one.joined):
        if not to_join:
            yield from ([one] for one in run)
            continue
        several = list(run)
        sizes = [one.shard.file.bytes for one in several]
        room = max((max_bytes or 2 * sum(sizes)) - max(sizes), *sizes, 1)
        aim = sum(sizes) / -(-sum(sizes) // room) if sum(sizes) else 0  # target size of a shard
        group: list[TaskShard] = []
        size = samples = done = shards = 0
        for one, more in zip(several, sizes, strict=True):
            full = max_bytes is not None and (
                size + more > max_bytes or done + more / 2 > aim * (shards + 1)
            )
            count = one.shard.samples
            if group and (full or (max_samples is not None and samples + count > max_samples)):
                yield group
                group, size, samples, shards = [], 0, 0, shards + 1
            group.append(one)
            size, samples, done = size + more, samples + count, done + more
        yield group


def publish_shards(
    content: Content,
    made: Sequence[TaskShard],
    stats: Stats,
    folder: Path,
    target: Target,
    partial: Partial,
    *,
    files: tuple[File, ...] = (),
    **rest: Any,
) -> Manifest:
    """Move shards to their final names in `folder`, and write the manifest."""
    format = content.format
    stems = [target.stem or format.shard_stem(number, len(made)) for number in range(len(made))]
    shards = [named(one.shard, stem, format) for one, stem in zip(made, stems, strict=True)]
    manifest = _manifest(content, shards, stats, files=files, **rest)
    for one, shard in zip(made, shards, strict=True):
        for old, new in zip(one.shard.files, shard.files, strict=True):
            partial.move(one.folder / old.name, folder, new)
    pieces = {PIECES: [one.pieces for one in made]}
    added = [*format.complete(folder, manifest), *_write_lists(target, folder, pieces)]
    manifest = replace(manifest, files=(*files, *described(folder, added)))
    manifest.write(target.list_path(folder, NAME))
    fs.sync(folder)
    return manifest


def _manifest(content: Content, shards: list[Shard], stats: Stats, **rest: Any) -> Manifest:
    """Return the manifest of shards, which does not list the files that are derived from it yet."""
    class_names = {name: tuple(names) for name, names in content.spec.classes.items()}
    classes = class_names.get(content.label, ())
    counted = content.label in class_names and isinstance(content.schema[content.label], Int)
    samples = sum(shard.samples for shard in shards)
    return Manifest(
        format=content.format.name,
        layout=content.format.layout(content.schema_of(samples, stats)),
        shards=tuple(shards),
        class_names=class_names,
        label=content.label,
        label_counts=stats.label_counts(len(classes)) if counted else None,
        fields={n: stats.fields[n].summary() for n in content.schema if n in stats.fields},
        pixels={n: found for n, p in stats.pixels.items() if (found := p.summary()) is not None},
        text=stats.text.summary(),
        **cast("dict[str, Any]", stats.summary()),
        **rest,
    )


def named(shard: Shard, stem: str, format: Format) -> Shard:
    """Return a shard whose files have their final names, in the same order."""
    old = shard.file.name.removesuffix(file_name("", format.name))
    files = []
    for file in shard.files:
        own = FOLDER + "/" if file.name.startswith(FOLDER + "/") else ""
        name = own + stem + file.name.removeprefix(own).removeprefix(old)
        files.append(File(name, file.bytes, file.checksum))
    return Shard(files[0], shard.samples, tuple(files[1:]), shard.tasks)


def described(folder: Path, paths: Iterable[Path]) -> tuple[File, ...]:
    """Return the manifest entries of files of the dataset in `folder`."""
    return tuple(
        File(path.relative_to(folder).as_posix(), path.stat().st_size, fs.checksum(path))
        for path in paths
    )


def named_shard(content: Content, group: Sequence[TaskShard], folder: Path, stem: str) -> None:
    """Make the shard of a group in a folder of this machine: repairs do so."""
    if len(group) != 1:
        at = folder / "joined"
        fs.make_folder(at)
        paths = [made.folder / made.shard.file.name for made in group]
        group = [TaskShard(at, *joined(at, content, paths, 0))]
    shard = group[0].shard
    for old, new in zip(shard.files, named(shard, stem, content.format).files, strict=True):
        made, path = group[0].folder / old.name, folder / new.name
        fs.make_folder(path.parent)
        if made.exists():  # it may have been tried before
            fs.rename(made, path)


def _check_keys(content: Content, made: list[TaskShard], partial: Partial) -> None:
    """Raise SampleError if a key is in two shards. Within each shard, keys were checked already."""
    folders = dict.fromkeys(one.folder for one in made)
    hashes = [np.frombuffer(fs.read(folder / HASHES), np.uint64) for folder in folders]
    every = np.concatenate([np.zeros(0, np.uint64), *hashes])
    order = np.argsort(every, kind="stable")
    for at in np.flatnonzero(every[order][1:] == every[order][:-1]).tolist():
        found = [_located(int(order[n]), made) for n in (at, at + 1)]
        keys = [_key_at(content, made[number], position, partial) for number, position in found]
        if keys[0] == keys[1]:
            shards = [f"shard {number}, position {position}" for number, position in found]
            raise SampleError(
                "two samples have the same key",
                key=keys[0],
                found=f"in {shards[0]} and in {shards[1]}, counted before any are joined",
                fix=KEYS_REPEAT,
            )


def _located(sample: int, made: list[TaskShard]) -> tuple[int, int]:
    """Return the number of the shard that contains a sample, and the sample's position in it."""
    for number, one in enumerate(made):
        if sample < one.shard.samples:
            return number, sample
        sample -= one.shard.samples
    raise DamagedError("a task has more keys than samples", path=made[-1].folder)


def _key_at(content: Content, made: TaskShard, position: int, partial: Partial) -> str | None:
    """Return the key of a sample; None if an earlier run has moved the shard to its final name."""
    path = partial.stored(made.folder / made.shard.file.name)
    if not path.exists():
        return None
    reader = content.format.open(path, content.format.layout(content.schema))
    try:
        return str(reader[position]["__key__"])
    finally:
        reader.close()


def _write_lists(
    target: Target, folder: Path, lists: Mapping[str, Sequence[bytes | bytearray]]
) -> Iterator[Path]:
    """Write the lists that are not empty to files next to the manifest."""
    for name, lines in lists.items():
        if data := b"".join(lines):
            path = target.list_path(folder, name)
            fs.write_file(path, data)
            yield path


def write_lengths(path: Path, schema: Schema, folders: list[Path]) -> list[Path]:
    """Write the lengths of values, from the folders of tasks, as one array for `numpy.load`.

    It has a row per sample, and a uint32 column for each of `length_fields`; none without these.
    """
    names = length_fields(schema)
    if not names:
        return []
    rows = [folder / LENGTH_ROWS for folder in folders]
    sizes = [path.stat().st_size for path in rows]
    dtype = lengths_dtype(names)
    with fs.create(path) as file:
        fs.write(file, [table_header(dtype, sum(sizes) // dtype.itemsize)])
        for own, size in zip(rows, sizes, strict=True):
            fs.append(file, own, size)
    fs.sync(path)
    return [path]


def _lines(tasks: list[Path], name: str) -> list[bytes]:
    return [fs.read(task / name) for task in tasks if (task / name).is_file()]
