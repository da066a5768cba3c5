"""Finished tasks -> a dataset: shards numbered in task order, manifests, lists of errors and keys.

Every step can be repeated: a run that was killed in here does it all again with the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from shardkit import storage
from shardkit.conversion.lengths import lengths_header
from shardkit.conversion.partial import Partial
from shardkit.conversion.plan import Part, Plan
from shardkit.conversion.shards import KEYS_REPEAT, Stats, finished_shard
from shardkit.conversion.work import HASHES, LENGTH_ROWS, error_line, read_result
from shardkit.errors import DamagedError, SampleError, StorageError
from shardkit.formats import file_name
from shardkit.formats.base import Format, Joins
from shardkit.manifest import (
    ERRORS,
    FILTERED,
    FOLDER,
    KEYS,
    LENGTHS,
    NAME,
    File,
    Manifest,
    Shard,
    Splits,
)
from shardkit.schema import Schema, length_fields


def assemble(plan: Plan, partial: Partial, earlier: Collection[int]) -> dict[str, Manifest]:
    """Fill `partial.dataset`; returns the manifests by split name.

    `earlier` are the tasks that another run has finished: the disk may not have their pieces.
    """
    made = {part.name: _assemble_part(plan, part, partial, earlier) for part in plan.parts}
    if list(made) != [""]:
        splits = {name: manifest.samples for name, manifest in made.items()}
        both = {name: plan.identity[name] for name in ("source", "options")}
        errors = sum(manifest.errors for manifest in made.values())
        folder = partial.dataset
        files = described(folder, plan.format.complete_splits(folder, list(splits)))
        Splits(plan.format.name, splits, errors, files=files, **both).write(partial.manifest())
    return made


def _assemble_part(plan: Plan, part: Part, partial: Partial, earlier: Collection[int]) -> Manifest:
    folder = partial.dataset / part.name
    storage.make_folder(folder / FOLDER)
    tasks = [task for task in plan.tasks if task.part.name == part.name]
    folders = [partial.task_folder(task.number) for task in tasks]
    results = [read_result(where) for where in folders]
    stats = Stats()
    stats.ignored.update(part.ignored)
    made: list[Made] = []
    for task, where, result in zip(tasks, folders, results, strict=True):
        made += [Made(where, shard, task.piece) for shard in result.shards]
        stats.merge(result.stats)
    groups = list(_groups(made, plan.max_bytes(), plan.options.shard_samples))
    _check_pieces(groups, {partial.task_folder(number) for number in earlier})
    schema = part.schema
    _check_keys(plan.format, schema, made)
    rename = plan.options.rename
    label = rename.get(part.source.label, part.source.label)
    guessed = [rename.get(name, name) for name in part.source.guessed]
    names = part.source.names_in(schema, rename)
    content = Content(plan.format, schema, names, label, guessed)
    problems = [error_line(None, problem) for problem in part.problems]
    lists = (
        *_write_list(partial.list_path(folder, ERRORS), problems + _lines(folders, ERRORS)),
        *_write_list(partial.list_path(folder, FILTERED), _lines(folders, FILTERED)),
        *_write_list(partial.list_path(folder, KEYS), _lines(folders, KEYS)),
        *_write_lengths(partial.list_path(folder, LENGTHS), schema, folders),
        *_write_tokenizer(part, partial, folder),
    )
    tokenizer, _ = part.tokenizer()
    return place(
        content,
        groups,
        stats,
        folder,
        stem=partial.stem(plan.format.name),
        manifest=partial.list_path(folder, NAME),
        errors=len(part.problems) + sum(result.errors for result in results),
        files=described(folder, lists),
        tokenizer=tokenizer,
        source=plan.identity["source"],
        options=plan.identity["options"],
        versions=plan.identity["versions"],
    )


class Made(NamedTuple):
    """A shard that a task has made, or the piece of one."""

    task: Path  # its folder
    shard: Shard
    piece: bool = False  # not synced, and to be joined with those beside it


def _groups(
    made: list[Made], max_bytes: int | None, max_samples: int | None
) -> Iterator[list[Made]]:
    """What becomes a shard each: pieces that lie side by side, as far as its limits allow.

    Shards of pieces come out about equally large, as those that tasks make by themselves.
    """
    for joined, run in itertools.groupby(made, lambda one: one.piece):
        if not joined:
            yield from ([one] for one in run)
            continue
        pieces = list(run)
        sizes = [piece.shard.file.bytes for piece in pieces]
        room = max((max_bytes or 2 * sum(sizes)) - max(sizes), *sizes, 1)
        aim = sum(sizes) / -(-sum(sizes) // room) if sum(sizes) else 0  # of each shard
        group: list[Made] = []
        size = samples = done = shards = 0
        for piece, more in zip(pieces, sizes, strict=True):
            full = max_bytes is not None and (
                size + more > max_bytes or done + more / 2 > aim * (shards + 1)
            )
            count = piece.shard.samples
            if group and (full or (max_samples is not None and samples + count > max_samples)):
                yield group
                group, size, samples, shards = [], 0, 0, shards + 1
            group.append(piece)
            size, samples, done = size + more, samples + count, done + more
        yield group


@dataclass(frozen=True)
class Content:
    """What all shards of a dataset have in common."""

    format: Format
    schema: Schema
    class_names: dict[str, tuple[str, ...]]
    label: str = "label"
    guessed: Collection[str] = ()  # optional fields that all samples may have

    def schema_of(self, samples: int, stats: Stats) -> Schema:
        """The schema, now that it is known which fields all samples have."""
        found = {name for name, sizes in stats.fields.items() if sizes.count == samples}
        return self.schema.with_optional(found.intersection(self.guessed), False)


def place(
    content: Content,
    groups: list[list[Made]],
    stats: Stats,
    folder: Path,
    *,
    stem: str | None,
    manifest: Path,
    files: tuple[File, ...] = (),
    **rest: Any,
) -> Manifest:
    """Give shards their final names in `folder`, and write the manifest.

    Each of the `groups` becomes a shard: it is one already, or pieces to join; without any, there
    is a shard without samples. `stem` is the name of an only shard.
    """
    format = content.format
    shards = []
    for number, group in enumerate(groups or [[]]):
        name = stem or format.shard_stem(number, max(len(groups), 1))
        if len(group) == 1:
            shards.append(_move_shard(group[0], folder, name, format.name))
        else:
            shards.append(_joined(content, group, folder, name))
    classes = content.class_names.get(content.label)
    made = Manifest(
        format=format.name,
        layout=format.layout(content.schema_of(sum(shard.samples for shard in shards), stats)),
        shards=tuple(shards),
        class_names=content.class_names,
        label=content.label,
        label_counts=None if classes is None else stats.label_counts(len(classes)),
        fields={n: stats.fields[n].summary() for n in content.schema if n in stats.fields},
        text=stats.text.summary(),
        **cast("dict[str, Any]", stats.summary()),
        files=files,
        **rest,
    )
    made = replace(made, files=(*files, *described(folder, format.complete(folder, made))))
    made.write(manifest)
    storage.sync(folder)
    return made


def described(folder: Path, paths: Iterable[Path]) -> tuple[File, ...]:
    """Files of the dataset in `folder`, as its manifest lists them."""
    return tuple(
        File(path.relative_to(folder).as_posix(), path.stat().st_size, storage.checksum(path))
        for path in paths
    )


def _joined(content: Content, pieces: list[Made], folder: Path, stem: str) -> Shard:
    """One shard of the pieces that tasks made; an empty one of none."""
    format = content.format
    path = folder / file_name(stem, format.name)
    if pieces:
        assert isinstance(format, Joins)
        parts = [piece.task / piece.shard.file.name for piece in pieces]
        format.join(path, parts, content.schema, content.class_names)
    else:
        format.create(path, content.schema, None, content.class_names).close()
    shard = finished_shard(folder, stem, format.name)
    return replace(shard, samples=sum(piece.shard.samples for piece in pieces))


def _check_pieces(groups: list[list[Made]], earlier: set[Path]) -> None:
    """Compare the pieces of an earlier run. One by itself may have its final name already."""
    for group in groups:
        for task, piece, unsynced in group:
            there = len(group) > 1 or (task / piece.file.name).exists()
            if unsynced and task in earlier and there:
                _check_piece(task, piece)


def _check_piece(task: Path, piece: Shard) -> None:
    """Pieces were not synced: after a power cut the disk may not have what the task wrote."""
    for file in (piece.file, *piece.beside):
        path = task / file.name
        size = path.stat().st_size if path.is_file() else -1
        if size == file.bytes and storage.checksum(path) == file.checksum:
            continue
        storage.remove(task)
        raise StorageError(
            "a piece of the dataset, made by an earlier run, is not what was written",
            path=path,
            expected=f"{file.bytes:,} bytes with checksum {file.checksum}",
            fix="run the same command again: it makes this piece anew",
        )


def _check_keys(format: Format, schema: Schema, made: list[Made]) -> None:
    """Raise SampleError where a key stands in two shards. Within each it was checked already."""
    folders = dict.fromkeys(one.task for one in made)
    hashes = [np.frombuffer(storage.read(task / HASHES), np.uint64) for task in folders]
    every = np.concatenate([np.zeros(0, np.uint64), *hashes])
    order = np.argsort(every, kind="stable")
    for at in np.flatnonzero(every[order][1:] == every[order][:-1]).tolist():
        places = [_place_of(int(order[n]), made) for n in (at, at + 1)]
        keys = [_key_at(format, schema, *place) for place in places]
        if keys[0] == keys[1]:
            shards = [f"shard {number}, position {position}" for *_, number, position in places]
            raise SampleError(
                "two samples have the same key",
                key=keys[0],
                found=f"in {shards[0]} and in {shards[1]} of those that were made",
                fix=KEYS_REPEAT,
            )


def _place_of(sample: int, made: list[Made]) -> tuple[Path, int, int]:
    """File and number of the shard that holds a sample, and its position there."""
    for number, (task, shard, _) in enumerate(made):
        if sample < shard.samples:
            return task / shard.file.name, number, sample
        sample -= shard.samples
    raise DamagedError("a task has more keys than samples", path=made[-1].task)


def _key_at(format: Format, schema: Schema, path: Path, number: int, position: int) -> str | None:
    """The key of a sample; None where an earlier run has given the shard its final name."""
    if not path.exists():
        return None
    reader = format.open(path, format.layout(schema))
    try:
        return str(reader[position]["__key__"])
    finally:
        reader.close()


def _move_shard(made: Made, folder: Path, stem: str, format: str) -> Shard:
    """Give a task's shard its final name; one that was moved by an earlier run is left."""
    task, shard, unsynced = made
    old = shard.file.name.removesuffix(file_name("", format))
    moved = []
    for file in (shard.file, *shard.beside):
        own = FOLDER + "/" if file.name.startswith(FOLDER + "/") else ""
        target = own + stem + file.name.removeprefix(own).removeprefix(old)
        if (task / file.name).exists():
            if unsynced:
                storage.sync(task / file.name)
            if "/" in target:
                storage.make_folder((folder / target).parent)
            storage.rename(task / file.name, folder / target)
            if "/" in target and not own:  # the manifest's folder is synced with it
                storage.sync((folder / target).parent)
        moved.append(File(target, file.bytes, file.checksum))
    return Shard(moved[0], shard.samples, tuple(moved[1:]))


def _write_list(path: Path, parts: list[bytes]) -> list[Path]:
    """A list beside the manifest, if there is anything to list."""
    data = b"".join(parts)
    if not data:
        return []
    storage.write_file(path, data)
    return [path]


def _write_tokenizer(part: Part, partial: Partial, folder: Path) -> list[Path]:
    """What made the tokens, beside the manifest: a dataset can be understood by itself."""
    _, files = part.tokenizer()
    written = []
    for name, data in files.items():
        path = partial.list_path(folder, name)
        storage.write_file(path, data)
        written.append(path)
    return written


def _write_lengths(path: Path, schema: Schema, tasks: list[Path]) -> list[Path]:
    """One array of what tasks kept of their samples' lengths, as `numpy.load` reads it."""
    names = length_fields(schema)
    if not names:
        return []
    parts = [task / LENGTH_ROWS for task in tasks]
    sizes = [part.stat().st_size for part in parts]
    with storage.create(path) as file:
        storage.write(file, [lengths_header(names, sum(sizes))])
        for part, size in zip(parts, sizes, strict=True):
            storage.append(file, part, size)
    storage.sync(path)
    return [path]


def _lines(tasks: list[Path], name: str) -> list[bytes]:
    return [storage.read(task / name) for task in tasks if (task / name).is_file()]
