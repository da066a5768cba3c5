"""Compares shards of TensorFlow Datasets and Hugging Face datasets with their dataset_info.json."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from shardkit.dataset.dataset import Dataset
from shardkit.errors import DamagedError
from shardkit.helpers.checked import MOST_BYTES
from shardkit.storage import fs

_INFO = "dataset_info.json"
# Of TensorFlow Datasets, `mnist-train.tfrecord-00000-of-00001`; of Hugging Face's prepared
# datasets, `mnist-train.arrow` or `mnist-train-00000-of-00002.arrow`.
_NAME = re.compile(
    r".*?-(\w+?)(?:\.(?:tfrecord|array_record)-(\d+)-of-\d+|(?:-\d+-of-\d+)?\.arrow)"
)


def check_prepared(folder: Path, dataset: Dataset) -> None:
    """Raise DamagedError if shards have other numbers of samples than dataset_info.json says."""
    path = folder / _INFO
    if not path.is_file() or dataset.format == "hf":  # which keeps the numbers of its origin
        return
    said: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
        splits = json.loads(fs.read(path, MOST_BYTES))["splits"]
        each = splits if isinstance(splits, list) else splits.values()
        said = {s["name"]: s.get("shardLengths") or s.get("num_examples") for s in each}
    totals: Counter[str] = Counter()
    for shard in range(dataset.shards):
        match, found = _NAME.fullmatch(dataset.shard_name(shard)), dataset.extent(shard)[0]
        lengths = said.get(match[1]) if match else None
        if match and match[2] and isinstance(lengths, list) and int(match[2]) < len(lengths):
            if str(lengths[int(match[2])]) != str(found):
                raise _other(dataset.shard_path(shard), f"{lengths[int(match[2])]}", found)
        elif match and type(lengths) is int:
            totals[match[1]] += found
    for name, found in totals.items():
        if found != said[name]:
            raise _other(path, f"{said[name]:,} in the split {name!r}", found)


def _other(path: Path, said: str, found: int) -> DamagedError:
    return DamagedError(
        f"there are more or fewer samples than {_INFO} says",
        path=path,
        expected=f"{said} samples",
        found=f"{found:,}",
    )
