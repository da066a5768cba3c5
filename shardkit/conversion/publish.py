"""Finished tasks -> a dataset: shards numbered in task order, manifests, lists of errors and keys.

Every step can be repeated: a run that was killed in here does it all again with the same result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkit import storage
from shardkit.conversion.partial import Partial
from shardkit.conversion.plan import Part, Plan
from shardkit.conversion.shards import Stats, shard_name
from shardkit.conversion.work import error_line, read_result
from shardkit.manifest import ERRORS, KEYS, File, Manifest, Shard, Splits
from shardkit.schema import Schema
from shardkit.version import __version__


def assemble(plan: Plan, partial: Partial) -> dict[str, Manifest]:
    """Fill `partial.dataset`; returns the manifests by split name."""
    made = {part.name: _assemble_part(plan, part, partial) for part in plan.parts}
    if list(made) != [""]:
        splits = {name: manifest.samples for name, manifest in made.items()}
        both = {"source": plan.identity["source"], "options": plan.options.shaping()}
        errors = sum(manifest.errors for manifest in made.values())
        Splits(plan.format.name, splits, errors, **both).write(partial.dataset)
    return made


def _assemble_part(plan: Plan, part: Part, partial: Partial) -> Manifest:
    folder = partial.dataset / part.name
    storage.make_folder(folder)
    tasks = [partial.task_folder(t.number) for t in plan.tasks if t.part.name == part.name]
    results = [read_result(task) for task in tasks]
    shards: list[Shard] = []
    stats = Stats(Schema({}))
    for task, result in zip(tasks, results, strict=True):
        for entry in result["shards"]:
            name = shard_name(len(shards), plan.format.name)
            shards.append(move_shard(entry, task, folder, name))
        stats.merge(Stats.from_json(result["stats"]))
    problems = [error_line(None, problem) for problem in part.problems]
    lists = (
        *_write_list(folder / ERRORS, problems + _lines(tasks, ERRORS)),
        *_write_list(folder / KEYS, _lines(tasks, KEYS)),
    )
    manifest = make_manifest(
        plan.format.name,
        plan.format.layout(part.schema(plan.options.rename)),
        shards,
        stats,
        part.source.classes,
        errors=len(part.problems) + sum(result["errors"] for result in results),
        files=lists,
        label=plan.options.rename.get("label", "label"),
        source=plan.identity["source"],
        options=plan.options.shaping(),
    )
    manifest.write(folder)
    storage.sync(folder)
    return manifest


def make_manifest(
    format: str,
    layout: dict[str, Any],
    shards: list[Shard],
    stats: Stats,
    classes: tuple[str, ...] | None,
    **rest: Any,
) -> Manifest:
    """The manifest of shards that lie in their place."""
    return Manifest(
        format=format,
        layout=layout,
        shards=tuple(shards),
        classes=classes,
        label_counts=None if classes is None else stats.label_counts(len(classes)),
        fields={n: stats.fields[n].summary() for n in layout["schema"] if n in stats.fields},
        versions={"shardkit": __version__},
        **rest,
    )


def move_shard(entry: dict[str, Any], task: Path, folder: Path, name: str) -> Shard:
    """Give a task's shard its final name; one that was moved by an earlier run is left."""
    own = File(**entry["file"])
    beside = [File(**file) for file in entry["beside"]]
    stem, final = Path(own.name).stem, Path(name).stem
    moved = []
    for file in (own, *beside):
        target = final + file.name.removeprefix(stem)
        if (task / file.name).exists():
            storage.rename(task / file.name, folder / target)
        moved.append(File(target, file.bytes, file.checksum))
    return Shard(moved[0], entry["samples"], tuple(moved[1:]))


def _write_list(path: Path, parts: list[bytes]) -> tuple[File, ...]:
    """A list beside the manifest, if there is anything to list."""
    data = b"".join(parts)
    if not data:
        return ()
    storage.write_file(path, data)
    return (File(path.name, len(data), storage.checksum(path)),)


def _lines(tasks: list[Path], name: str) -> list[bytes]:
    return [storage.read(task / name) for task in tasks if (task / name).is_file()]
