"""Folders as the tools of others make them, in small, and what tests of sources and steps share."""

import gzip
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.metadata.recipe import Recipe
from shardkit.sources import open_sources
from shardkit.testing import make_image

CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
---
# A dataset
"""


def put(root: Path, files: Mapping[str, bytes | str | None]) -> Path:
    """Write files by their paths; None is an image."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = make_image(len(name), "PNG" if name.endswith("png") else "JPEG")
        if content is not None:
            data = content.encode() if isinstance(content, str) else content
        path.write_bytes(data)
    return root


def cases(names: str, *rows: Any, ids: Any = None) -> Any:
    """A table of cases, each row a test of its own."""
    return pytest.mark.parametrize(names.split() if " " in names else names, rows, ids=ids)


def refused(kind, words: str | None, call: Any, /, *args: Any, **options: Any) -> Any:
    """The error of a call that is refused with these words."""
    with pytest.raises(kind, match=words) as error:
        call(*args, **options)
    return error.value


def opened(root: Any, **options: Any) -> dict[str, Any]:
    """The sources of a conversion with these options, by split."""
    return open_sources(root, Recipe("wds", **options))


def one(root: Any, **options: Any) -> Any:
    """The only one."""
    (source,) = opened(root, **options).values()
    return source


def all_of(source: Any) -> list[Any]:
    return [source[number] for number in range(len(source))]


def counts(sources: dict[str, Any]) -> dict[str, int]:
    return {split: len(source) for split, source in sources.items()}


def convert(source: Any, out: Path, format: str = "wds", **options: Any) -> Any:
    return shardkit.convert(source, format, out, **{"workers": 0, **options})


def verified(source: Any, out: Path, format: str = "wds", **options: Any) -> Any:
    """A conversion, which is verified against its source."""
    result = convert(source, out, format, **options)
    report = shardkit.verify(out, against=source, metadata=options.get("metadata"))
    assert report.sound, report.problems
    return result


def keys(samples: Any) -> list[str]:
    """Of a source, or of a dataset by its path."""
    found = shardkit.open(samples) if isinstance(samples, Path) else all_of(samples)
    return [sample["__key__"] for sample in found]


def parquet(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": list(texts), "label": list(range(len(texts)))}), path)


def tar(path: Path, *keys: str) -> None:
    """A TAR of images with captions, as webdataset and img2dataset write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for key in keys:
            for suffix, data in (("jpg", make_image()), ("txt", b"a caption"), ("json", b"{}")):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


def hub_repository(root: Path, card: str = CARD) -> Path:
    """A snapshot of a dataset on the Hub, as `push_to_hub` makes it."""
    put(root, {"README.md": card, ".gitattributes": "*.parquet filter=lfs\n"})
    parquet(root / "data/train-00000-of-00002.parquet", "a", "b")
    parquet(root / "data/train-00001-of-00002.parquet", "c")
    parquet(root / "data/test-00000-of-00001.parquet", "d")
    return root


_BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
_PICKLE = pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]})
_INDEX = {"format": "json", "samples": 1, "zip_data": None}
_INDEX["raw_data"] = {"basename": "shard.00000.json", "bytes": 9, "hashes": {}}
_MDS = {"index.json": json.dumps({"version": 2, "shards": [_INDEX]}), "shard.00000.json": bytes(9)}
FOLDERS: dict[str, dict[str, bytes | str]] = {
    "MDS of JSON": {f"{split}/{n}": data for split in ("train", "val") for n, data in _MDS.items()},
    "CIFAR-10": {**dict.fromkeys([*_BATCHES, "batches.meta"], _PICKLE), "readme.html": "<html>"},
    "CIFAR-100": {**dict.fromkeys(("train", "test", "meta"), _PICKLE), "file.txt~": "x"},
    "CIFAR-10 binary": {
        **dict.fromkeys((f"{name}.bin" for name in _BATCHES), bytes(3073)),
        "batches.meta.txt": "airplane\n",
        "readme.html": "<html>",
    },
    "CIFAR-100 binary": {
        "train.bin": bytes(3074),
        "test.bin": bytes(3074),
        "fine_label_names.txt": "apple\n",
        "coarse_label_names.txt": "fruit\n",
    },
    "MNIST": {
        "train-images-idx3-ubyte.gz": gzip.compress(
            struct.pack(">HBB3I", 0, 8, 3, 1, 28, 28) + bytes(784)
        ),
        "train-labels-idx1-ubyte.gz": gzip.compress(struct.pack(">HBBI", 0, 8, 1, 1) + bytes(1)),
    },
    "HDF5": {"camelyonpatch_level_2_split_train_x.h5": b"\x89HDF\r\n\x1a\n" + bytes(9)},
}


def cifar10_binary(root: Path) -> Path:
    return put(root, FOLDERS["CIFAR-10 binary"])


def tfrecord() -> bytes:
    """A record of tf.train.Example: the feature `label` is 1."""
    record = "0a100a0e0a056c6162656c12051a030a0101"
    return bytes.fromhex(f"1200000000000000241f6425{record}f5d6547b")
