"""`shardkit.convert`: starts the workers, then loads the engine, which takes as long."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardkit import storage
from shardkit.conversion.pool import Pool
from shardkit.formats import FORMATS
from shardkit.options import ConvertOptions

if TYPE_CHECKING:
    from shardkit.conversion.run import ConvertResult, Monitor


def convert(
    source: str | os.PathLike[str] | Sequence[Any],
    to: str,
    out: str | os.PathLike[str] | None = None,
    *,
    schema: Mapping[str, Any] | None = None,
    monitor: Monitor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ConvertResult:
    """Convert images, text, a dataset of any format, or a Python sequence of samples.

    `source` is a path, a pattern (`shards-{000..099}.tar`, `data/*.parquet`), a list of such and of
    datasets, which are united, or a sequence of samples: dicts. Images are a folder; text is a
    folder or a file: .txt, .jsonl, .csv, .tsv, also compressed.

    `to` is the name of a format (`shardkit formats` lists them), `out` the folder to make, here or
    at a URL in a bucket, or a file such as `train.beton` for one shard without a folder; without it
    the output of a single path goes beside that, as `<name>-<format>`. The `options` are the fields
    of `shardkit.ConvertOptions`. `schema` is for sequences, whose first sample is asked otherwise.
    `storage_options` are as in `shardkit.open`; nothing that is written has them.

    Raises UsageError or OutputError before anything is touched; SourceError, SampleError,
    DamagedError for bad data; StorageError when the disk fails; WorkerError when a worker does.
    After any of them, the same call continues where this one stopped; for a sequence, whose content
    cannot be compared, it begins again.
    """
    began = time.monotonic()
    checked = ConvertOptions.of(**options)
    workers = checked.processes(source)
    declared = FORMATS.get(to)
    preload = [declared.module] if declared else []
    images = checked.image.active or checked.transform is not None
    if images:
        preload.append("shardkit.preprocess.images")
    if checked.audio.active:
        preload.append("shardkit.preprocess.audio")
    if checked.text.tokenizer is not None:
        preload.append("shardkit.codecs.tokenizers")
    # One shard of what is copied is most often one task, which this process does itself.
    works = images or checked.audio.active or checked.text.tokenizer is not None
    early = declared is not None and (works or not declared.one_shard)
    with Pool(workers, [*preload, "shardkit.sources.image_folder"], early=early) as processes:
        from shardkit.conversion.run import prepare, run

        with storage.using(storage_options, source, out, checked.metadata):
            plan = prepare(source, to, out, checked, schema=schema)
        result = run(plan, checked, monitor, processes if workers else None)
    return replace(result, seconds=round(time.monotonic() - began, 3))
