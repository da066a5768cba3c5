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

from shardkit.codecs.array import table_header
from shardkit.conversion.outline import Outline
from shardkit.conversion.partial import Partial
from shardkit.conversion.shards import HASHES, KEYS_REPEAT, LENGTH_ROWS, Content, finished_shard
from shardkit.conversion.stats import Stats
from shardkit.conversion.target import Target
from shardkit.conversion.work import read_result
from shardkit.errors import DamagedError, SampleError, SourceError, StorageError
from shardkit.formats import file_name, get_format
from shardkit.formats.base import Joins
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


def assemble(outline: Outline, target: Target, partial: Partial, earlier: Collection[int]) -> None:
    """Fill `partial.dataset`. Other processes have finished the tasks in `earlier`."""
    earlier = partial.unsynced(earlier)
    made = {
        split.name: _assemble_split(outline, number, target, partial, earlier)
        for number, split in enumerate(outline.splits)
    }
    recipe = outline.recipe
    if not any(manifest.samples for manifest in made.values()):
        _refuse_nothing(outline, partial, made.values())
    if list(made) != [""]:
        splits = {name: manifest.samples for name, manifest in made.items()}
        errors = sum(manifest.errors for manifest in made.values())
        folder, format = partial.dataset, get_format(recipe.format)
        files = described(folder, format.complete_splits(folder, made))
        manifest = Splits(format.name, splits, errors, recipe.to_json(), files)
        manifest.write(target.list_path(folder, NAME))


def _refuse_nothing(outline: Outline, partial: Partial, made: Collection[Manifest]) -> None:
    """Raise SourceError if samples were left out, were bad or were filtered until none was left."""
    left_out = sum((Counter(one.ignored) for one in made), Counter[str]())
    filtered = sum((Counter(one.filtered) for one in made), Counter[str]())
    errors = sum(manifest.errors for manifest in made)
    tokens = sum(manifest.text.get("dropped", 0) for manifest in made)
    reasons = [f"{count:,} {why}" for why, count in filtered.items()]
    reasons += [f"{tokens:,} tokens that fill no block"] if tokens else []
    if outline.recipe.chooses and not (errors or reasons):
        raise nothing_left(left_out)
    if not (errors or reasons):
        return
    if errors:
        folders = [partial.task_folder(task) for task in range(len(outline.tasks))]
        found = [outline.file(number, ERRORS) for number in range(len(outline.splits))]
        line = next(data for data in [*found, *_lines(folders, ERRORS)] if data).split(b"\n")[0]
        reasons.append(f"{errors:,} bad ones, the first: {json.loads(line)['what']}")
    raise SourceError(
        "no sample of the source is left: all were dropped",
        expected="at least one sample",
        found="; ".join(reasons),
        fix="repair the source, or change the options that drop its samples; then convert with"
        " --overwrite",
    )


def _assemble_split(
    outline: Outline, number: int, target: Target, partial: Partial, earlier: Collection[int]
) -> Manifest:
    split, recipe = outline.splits[number], outline.recipe
    content, folder = outline.contents[number], partial.dataset / split.name
    fs.make_folder(folder / FOLDER)
    tasks = outline.tasks_of(number)
    folders = [partial.task_folder(task) for task, _ in tasks]
    results = [read_result(path) for path in folders]
    stats = Stats()
    stats.ignored.update(split.ignored)
    stats.filtered.update(split.filtered)
    made: list[TaskShard] = []
    for (task, joined), path, result in zip(tasks, folders, results, strict=True):
        made += [
            TaskShard(path, shard, bytes.fromhex(pieces), task, joined)
            for shard, pieces in zip(result.shards, result.pieces, strict=True)
        ]
        stats.merge(result.stats)
    groups = list(_groups(made, recipe.shard_size, recipe.shard_samples))
    _check_unsynced(groups, earlier)
    _check_keys(content, made, partial)
    written = write_lists(outline, number, target, folder, folders)
    return publish_shards(
        content,
        groups,
        stats,
        folder,
        target,
        partial,
        errors=split.problems + sum(result.errors for result in results),
        files=described(folder, written),
        tokenizer=split.tokenizer,
        recipe=recipe.to_json(),
        versions=outline.job["versions"],
    )


def write_lists(
    outline: Outline, number: int, target: Target, folder: Path, tasks: list[Path]
) -> list[Path]:
    """Write the lists of a split to `folder`, from the folders of all its tasks."""
    lists = {
        ERRORS: [outline.file(number, ERRORS), *_lines(tasks, ERRORS)],
        FILTERED: [outline.file(number, FILTERED), *_lines(tasks, FILTERED)],
        KEYS: _lines(tasks, KEYS),
        CHOSEN: [outline.file(number, CHOSEN)],
    }
    tokenizer_files = outline.tokenizer_files(number)
    schema = outline.contents[number].schema
    return [
        *_write_lists(target, folder, lists),
        *write_lengths(target.list_path(folder, LENGTHS), schema, tasks),
        *_write_lists(target, folder, {name: [data] for name, data in tokenizer_files.items()}),
    ]


class TaskShard(NamedTuple):
    """A shard that a task has made."""

    folder: Path  # of the task
    shard: Shard
    pieces: bytes  # digests, as returned by `finished_shard`
    task: int | None = None
    joined: bool = False  # not synced yet, and to be joined with its neighbours


def _groups(
    made: list[TaskShard], max_bytes: int | None, max_samples: int | None
) -> Iterator[list[TaskShard]]:
    """Groups of shards, each of which becomes one shard: neighbours are joined up to the limits.

    Joined shards are of nearly equal size, like those that tasks write by themselves.
    """
    for joined, run in itertools.groupby(made, lambda one: one.joined):
        if not joined:
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
    groups: list[list[TaskShard]],
    stats: Stats,
    folder: Path,
    target: Target,
    partial: Partial,
    *,
    files: tuple[File, ...] = (),
    **rest: Any,
) -> Manifest:
    """Give shards their final names in `folder`, and write the manifest.

    Each of the `groups` becomes one shard, joined if there are several in it. Without any groups,
    an empty shard is written.
    """
    format = content.format
    shards, pieces = [], bytearray()
    for number, group in enumerate(groups or [[]]):
        name = target.stem or format.shard_stem(number, max(len(groups), 1))
        shard, own = named_shard(content, group, folder, name, partial)
        pieces += own
        numbers = [made.task for made in group if made.task is not None]
        shards.append(replace(shard, tasks=(numbers[0], numbers[-1]) if numbers else ()))
    class_names = {name: tuple(names) for name, names in content.spec.classes.items()}
    classes = class_names.get(content.label, ())
    counted = content.label in class_names and isinstance(content.schema[content.label], Int)
    made = Manifest(
        format=format.name,
        layout=format.layout(content.schema_of(sum(shard.samples for shard in shards), stats)),
        shards=tuple(shards),
        class_names=class_names,
        label=content.label,
        label_counts=stats.label_counts(len(classes)) if counted else None,
        fields={n: stats.fields[n].summary() for n in content.schema if n in stats.fields},
        pixels={n: found for n, p in stats.pixels.items() if (found := p.summary()) is not None},
        text=stats.text.summary(),
        **cast("dict[str, Any]", stats.summary()),
        files=files,
        **rest,
    )
    added = [*format.complete(folder, made), *_write_lists(target, folder, {PIECES: [pieces]})]
    made = replace(made, files=(*files, *described(folder, added)))
    made.write(target.list_path(folder, NAME))
    fs.sync(folder)
    return made


def described(folder: Path, paths: Iterable[Path]) -> tuple[File, ...]:
    """The manifest entries of files of the dataset in `folder`."""
    return tuple(
        File(path.relative_to(folder).as_posix(), path.stat().st_size, fs.checksum(path))
        for path in paths
    )


def named_shard(
    content: Content, group: list[TaskShard], folder: Path, stem: str, partial: Partial
) -> tuple[Shard, bytes]:
    """Write the shard of a group to `folder` under the name `stem`. Returns it, and its digests."""
    if len(group) != 1:
        return _joined(content, group, folder, stem, partial)
    shard = _rename_shard(group[0], folder, stem, content.format.name, partial)
    return shard, group[0].pieces


def _joined(
    content: Content, group: list[TaskShard], folder: Path, stem: str, partial: Partial
) -> tuple[Shard, bytes]:
    """Join a group into one shard, empty if the group is. Returns the shard, and its digests."""
    format = content.format
    path = folder / file_name(stem, format.name)
    spec = replace(content.spec, max_bytes=None)
    if group:
        assert isinstance(format, Joins)
        with partial.here([(made.folder, made.shard) for made in group]) as paths:
            format.join(path, paths, spec)
    else:
        format.create(path, spec).close()
    shard, pieces = finished_shard(folder, stem, format.name, alone=False)
    partial.keep(folder, shard)
    return replace(shard, samples=sum(made.shard.samples for made in group)), pieces


def _check_unsynced(groups: list[list[TaskShard]], earlier: Collection[int]) -> None:
    """Verify unsynced shards of an earlier run: a power failure may have damaged them.

    A shard that is alone in its group may have its final name already.
    """
    for group in groups:
        for made in group:
            there = len(group) > 1 or (made.folder / made.shard.file.name).exists()
            if made.joined and made.task in earlier and there:
                _check_files(made)


def _check_files(made: TaskShard) -> None:
    for file in made.shard.files:
        path = made.folder / file.name
        size = path.stat().st_size if path.is_file() else -1
        if size == file.bytes and fs.checksum(path) == file.checksum:
            continue
        fs.remove(made.folder)
        raise StorageError(
            "a shard to be joined, written by an earlier run, is damaged or missing",
            path=path,
            expected=f"{file.bytes:,} bytes with checksum {file.checksum}",
            fix="run the same command again: it writes this shard again",
        )


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
    """The number of the shard that contains a sample, and the sample's position in it."""
    for number, one in enumerate(made):
        if sample < one.shard.samples:
            return number, sample
        sample -= one.shard.samples
    raise DamagedError("a task has more keys than samples", path=made[-1].folder)


def _key_at(content: Content, made: TaskShard, position: int, partial: Partial) -> str | None:
    """The key of a sample; None if an earlier run has moved the shard to its final name."""
    path = partial.stored(made.folder / made.shard.file.name)
    if not path.exists():
        return None
    reader = content.format.open(path, content.format.layout(content.schema))
    try:
        return str(reader[position]["__key__"])
    finally:
        reader.close()


def _rename_shard(made: TaskShard, folder: Path, stem: str, format: str, partial: Partial) -> Shard:
    """Move a task's shard to its final name."""
    shard = made.shard
    old = shard.file.name.removesuffix(file_name("", format))
    moved = []
    for file in shard.files:
        own = FOLDER + "/" if file.name.startswith(FOLDER + "/") else ""
        target = own + stem + file.name.removeprefix(own).removeprefix(old)
        moved.append(File(target, file.bytes, file.checksum))
        partial.rename(made.folder / file.name, folder, moved[-1], synced=not made.joined)
    return Shard(moved[0], shard.samples, tuple(moved[1:]))


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
