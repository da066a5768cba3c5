"""`shardkit inspect --html`: a report about a dataset as a single, self-contained HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_splits, without_manifest
from shardkit.errors import OutputError
from shardkit.inspection.inspect import opened, report_of
from shardkit.inspection.report.page import READ, START, Part, page
from shardkit.storage import fs


def html_report(
    path: str | os.PathLike[str] | Dataset,
    *,
    full: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Return an HTML page about a dataset, a shard, a folder of splits, or an open dataset or view.

    path: a path, an open dataset, or a view of one.
    full: read all samples. By default, counts that are not in a manifest are those of 2,000 evenly
        spaced samples (at most 256 MiB; an eighth of both at a URL).
    storage_options: as in `shardkit.open`.

    The page shows some samples, up to 3 MiB for each split, and lists damaged samples. Raises the
    errors of `shardkit.open`.
    """
    source, datasets, warning = opened(path, storage_options)
    most = None if full else READ
    parts = [
        Part(name, dataset, report_of(dataset, str(source), 0, False, most))
        for name, dataset in datasets.items()
    ]
    return page(str(source), parts, warning, full=full)


def write_report(html: str, file: Path) -> None:
    """Write the page to a file. An existing file is replaced only if it is a shardkit report.

    Raises OutputError for any other existing file.
    """
    if os.path.lexists(file) and fs.read(file, len(START)).decode("latin-1")[:-1] != START:
        raise OutputError(
            "the file exists and is not a shardkit report",
            path=file,
            fix="give another file name, or remove the file",
        )
    fs.replace_file(file, html.encode())
