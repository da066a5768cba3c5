"""`shardkit.convert`: starts the workers first, which load while this process imports the rest."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardkit.conversion.pool import LITTLE, Pool
from shardkit.errors import UsageError
from shardkit.formats import FORMATS
from shardkit.helpers.keywords import takes
from shardkit.helpers.part_of import PartOf
from shardkit.helpers.progress import OfConversion, Progress, watched
from shardkit.options import GROUPS, ConvertKeywords, ConvertOptions
from shardkit.storage import fs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shardkit.conversion.ray_engine import RayEngine
    from shardkit.conversion.run import ConvertResult, Monitor


_LITTLE_WORK = 2 << 20  # bytes to decode or tokenize in about the time that a worker needs to start
_LOOKS, _MANY = 4, 1 << 14  # files per folder whose size is asked for; files that are many


@takes(ConvertOptions, *GROUPS.values())
def convert(
    source: str | os.PathLike[str] | Iterable[Any],
    to: str,
    out: str | os.PathLike[str] | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
    progress: bool | Callable[[Progress], object] | Monitor = False,
    storage_options: Mapping[str, Any] | None = None,
    part: str | PartOf | None = None,
    **options: Unpack[ConvertKeywords],
) -> ConvertResult:
    """Convert images, text, a dataset of any format, or what a program has in memory.

    source: a path, a pattern (`shards-{000..099}.tar`, `data/*.parquet`), or a list of paths,
        patterns and datasets, which are combined. Images are read from a folder. Text is read from
        a folder or a file: .txt, .jsonl, .csv, .tsv, also compressed. From memory: samples (dicts)
        in a list, another sequence or any iterable, a dict of lists or arrays, or a table of
        pandas, Polars, Arrow or Hugging Face datasets. Iterables and tables are first written to a
        temporary folder, which is removed in the end.
    to: the name of the format. `shardkit formats` lists all formats.
    out: the folder to write, local or at a URL in a bucket, or a file such as `train.beton` for one
        shard without a folder. None: `<name>-<format>` next to a source that is a single path.
    schema: the schema of samples in memory. None: taken from those in a list or a dict of lists,
        from the first 1,000 of an iterable, or from the first of another sequence.
    progress: True shows the progress in one line. A function is called with a `shardkit.Progress`
        several times a second; an exception that it raises ends the call.
    storage_options: as in `shardkit.open`. They are never written to the output.
    part: "2/8" does the second eighth of the work; other processes, on any machines, do the rest.
        The result has a `part` and no splits. Once all parts have ended, `shardkit.merge(out)`
        publishes the dataset.

    Raises UsageError or OutputError before anything is changed; SourceError, SampleError or
    DamagedError for bad data; StorageError if the disk fails; WorkerError if a worker fails. After
    any of these errors, the same call continues where this one stopped. For a source in memory,
    whose content cannot be compared, it starts over.
    """
    began = time.monotonic()
    checked = ConvertOptions.of(**options)
    part_of = part if isinstance(part, PartOf | None) else PartOf.parse(part)
    if part_of is not None and checked.engine == "ray":
        raise UsageError(
            "parts are for clusters without Ray, and engine='ray' uses all of one",
            fix="leave out one of them",
        )
    ready: AbstractContextManager[Any] = nullcontext(source)
    if not isinstance(source, str | os.PathLike | list | tuple):
        from shardkit.conversion.spool import spooled

        ready = spooled(source, to, out, checked, schema, part_of, storage_options)
    with ready as found:
        result = _convert(found, to, out, checked, schema, progress, storage_options, part_of)
    return replace(result, seconds=round(time.monotonic() - began, 3))


def _convert(
    source: str | os.PathLike[str] | Sequence[Any],
    to: str,
    out: str | os.PathLike[str] | None,
    checked: ConvertOptions,
    schema: Mapping[str, Any] | None,
    progress: bool | Callable[[Progress], object] | Monitor,
    storage_options: Mapping[str, Any] | None,
    part: PartOf | None,
) -> ConvertResult:
    workers = checked.processes(source)
    declared = FORMATS.get(to) if isinstance(to, str) else None
    preload = [declared.module] if declared else []
    images = checked.image.active or checked.transform is not None
    if images:
        preload.append("shardkit.preprocess.images")
    if checked.audio.active:
        preload.append("shardkit.preprocess.audio")
    if checked.text.tokenizer is not None:
        preload.append("shardkit.codecs.tokenizers")
    # Copying into one shard is usually a single task, which this process runs itself.
    works = images or checked.audio.active or checked.text.tokenizer is not None
    early = declared is not None and (works or not declared.one_shard)
    ours = checked.workers is None
    if ours:
        early = early and _is_large(source, _LITTLE_WORK if works else LITTLE)
    engine: Pool | RayEngine
    cluster: RayEngine | None = None
    if checked.engine == "ray":
        from shardkit.conversion.ray_engine import RayEngine

        engine = cluster = RayEngine(checked, workers, source)
    else:
        preload.append("shardkit.sources.image_folder")
        engine = Pool(workers, preload, early=early, here=ours and not works)
    with engine as processes:
        from shardkit.conversion.run import prepare, run

        with fs.using(storage_options, source, out, checked.metadata):
            plan = prepare(source, to, out, checked, schema=schema, part=part)
        if cluster is not None:
            cluster.connect()
        with watched(progress, OfConversion) as monitor:
            return run(plan, checked, monitor, processes if workers else None)


def _is_large(source: str | os.PathLike[str] | Sequence[Any], most: int) -> bool:
    """Return whether a glance at a source finds more than `most` bytes, or cannot tell."""
    left: list[Any] = [*source] if isinstance(source, list | tuple) else [source]
    size = seen = 0
    try:
        while left and size <= most and seen <= _MANY:
            path = left.pop()
            if not os.path.isdir(path):
                size += os.stat(path).st_size
                continue
            with os.scandir(path) as entries:
                some = [*itertools.islice(entries, _MANY)]
            files = [entry for entry in some if not entry.is_dir()]
            left += [entry.path for entry in some if entry.is_dir()]
            sizes = [entry.stat().st_size for entry in files[:_LOOKS]]
            size += sum(sizes) * len(files) // max(len(sizes), 1)
            seen += 1 + len(some)
    except (OSError, TypeError, ValueError, UsageError):  # a pattern, a URL, a dataset
        return True
    return size > most or seen > _MANY
