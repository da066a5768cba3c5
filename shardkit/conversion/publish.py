"""Finished tasks -> a dataset: shards numbered in task order, manifests, lists of errors and keys.

Every step can be repeated: a run that was killed in here does it all again with the same result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardkit import storage
from shardkit.conversion.lengths import length_fields, lengths_header
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
from shardkit.schema import Schema


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
    numbers = [task.number for task in plan.tasks if task.part.name == part.name]
    tasks = [partial.task_folder(number) for number in numbers]
    results = [read_result(task) for task in tasks]
    stats = Stats()
    stats.ignored.update(part.ignored)
    pieces = []
    for task, result in zip(tasks, results, strict=True):
        pieces += [(task, shard_of(entry)) for entry in result["shards"]]
        stats.merge(Stats.from_json(result["stats"]))
    if plan.one_shard:
        _check_pieces(pieces, {partial.task_folder(number) for number in earlier})
    schema = part.schema
    _check_keys(plan.format, schema, pieces)
    rename = plan.options.rename
    label = rename.get(part.source.label, part.source.label)
    guessed = [rename.get(name, name) for name in part.source.guessed]
    names = part.source.names_in(schema, rename)
    content = Content(plan.format, schema, names, label, guessed)
    problems = [error_line(None, problem) for problem in part.problems]
    lists = (
        *_write_list(partial.list_path(folder, ERRORS), problems + _lines(tasks, ERRORS)),
        *_write_list(partial.list_path(folder, FILTERED), _lines(tasks, FILTERED)),
        *_write_list(partial.list_path(folder, KEYS), _lines(tasks, KEYS)),
        *_write_lengths(partial.list_path(folder, LENGTHS), schema, tasks),
        *_write_tokenizer(part, partial, folder),
    )
    tokenizer, _ = part.tokenizer()
    return place(
        content,
        pieces,
        stats,
        folder,
        stem=partial.stem(plan.format.name),
        manifest=partial.list_path(folder, NAME),
        one_shard=plan.one_shard,
        errors=len(part.problems) + sum(result["errors"] for result in results),
        files=described(folder, lists),
        tokenizer=tokenizer,
        source=plan.identity["source"],
        options=plan.identity["options"],
        versions=plan.identity["versions"],
    )


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
    pieces: list[tuple[Path, Shard]],
    stats: Stats,
    folder: Path,
    *,
    stem: str | None,
    manifest: Path,
    one_shard: bool,
    files: tuple[File, ...] = (),
    **rest: Any,
) -> Manifest:
    """Give shards their final names in `folder`, or join them to one, and write the manifest.

    `pieces` are shards and the folders they lie in; `stem` is the name of an only shard.
    """
    format = content.format
    if len(pieces) == 1 and one_shard:  # what turned out to be all there is may not be synced
        for file in (pieces[0][1].file, *pieces[0][1].beside):
            if (pieces[0][0] / file.name).exists():
                storage.sync(pieces[0][0] / file.name)
    if len(pieces) == 1 or (pieces and not one_shard):
        shards = [
            _move_shard(shard, task, folder, stem or format.shard_stem(n, len(pieces)), format.name)
            for n, (task, shard) in enumerate(pieces)
        ]
    else:
        shards = [_joined(content, pieces, folder, stem or format.shard_stem(0, 1))]
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


def _joined(content: Content, pieces: list[tuple[Path, Shard]], folder: Path, stem: str) -> Shard:
    """One shard of the pieces that tasks made; an empty one of none."""
    format = content.format
    path = folder / file_name(stem, format.name)
    if pieces:
        assert isinstance(format, Joins)
        parts = [task / piece.file.name for task, piece in pieces]
        format.join(path, parts, content.schema, content.class_names)
    else:
        format.create(path, content.schema, None, content.class_names).close()
    shard = finished_shard(folder, stem, format.name)
    return replace(shard, samples=sum(piece.samples for _, piece in pieces))


def _check_pieces(pieces: list[tuple[Path, Shard]], earlier: set[Path]) -> None:
    """Compare the pieces of an earlier run. The only one may have its final name already."""
    for task, piece in pieces:
        if task in earlier and (len(pieces) > 1 or (task / piece.file.name).exists()):
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


def _check_keys(format: Format, schema: Schema, pieces: list[tuple[Path, Shard]]) -> None:
    """Raise SampleError where a key stands in two shards. Within each it was checked already."""
    folders = dict.fromkeys(task for task, _ in pieces)
    hashes = [np.frombuffer(storage.read(task / HASHES), np.uint64) for task in folders]
    every = np.concatenate([np.zeros(0, np.uint64), *hashes])
    order = np.argsort(every, kind="stable")
    for at in np.flatnonzero(every[order][1:] == every[order][:-1]).tolist():
        places = [_place_of(int(order[n]), pieces) for n in (at, at + 1)]
        keys = [_key_at(format, schema, *place) for place in places]
        if keys[0] == keys[1]:
            shards = [f"shard {number}, position {position}" for *_, number, position in places]
            raise SampleError(
                "two samples have the same key",
                key=keys[0],
                found=f"in {shards[0]} and in {shards[1]} of those that were made",
                fix=KEYS_REPEAT,
            )


def _place_of(sample: int, pieces: list[tuple[Path, Shard]]) -> tuple[Path, int, int]:
    """File and number of the shard that holds a sample, and its position there."""
    for number, (task, shard) in enumerate(pieces):
        if sample < shard.samples:
            return task / shard.file.name, number, sample
        sample -= shard.samples
    raise DamagedError("a task has more keys than samples", path=pieces[-1][0])


def _key_at(format: Format, schema: Schema, path: Path, number: int, position: int) -> str | None:
    """The key of a sample; None where an earlier run has given the shard its final name."""
    if not path.exists():
        return None
    reader = format.open(path, format.layout(schema))
    try:
        return str(reader[position]["__key__"])
    finally:
        reader.close()


def shard_of(entry: dict[str, Any]) -> Shard:
    """A shard from its JSON."""
    return Shard(
        File(**entry["file"]), entry["samples"], tuple(File(**file) for file in entry["beside"])
    )


def _move_shard(shard: Shard, task: Path, folder: Path, stem: str, format: str) -> Shard:
    """Give a task's shard its final name; one that was moved by an earlier run is left."""
    old = shard.file.name.removesuffix(file_name("", format))
    moved = []
    for file in (shard.file, *shard.beside):
        own = FOLDER + "/" if file.name.startswith(FOLDER + "/") else ""
        target = own + stem + file.name.removeprefix(own).removeprefix(old)
        if (task / file.name).exists():
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
