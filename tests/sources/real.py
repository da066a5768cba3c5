"""Folders as the tools of others make them, in small: each as its tool lays it out."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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


def img2dataset(root: Path) -> Path:
    """`img2dataset --output_format webdataset`: a TAR, a table and statistics for each shard."""
    for number in range(2):
        name = f"{number:05d}"
        tar(root / f"{name}.tar", f"{name}0000", f"{name}0001")
        parquet(root / f"{name}.parquet", "http://x/1.jpg", "http://x/2.jpg")
        put(root, {f"{name}_stats.json": json.dumps({"count": 2, "successes": 2})})
    return root


def yolo(root: Path) -> Path:
    """As Ultralytics lays it out."""
    files = {f"images/{split}/{n}.jpg": None for split in ("train", "val") for n in range(2)}
    boxes = {f"labels/{split}/{n}.txt": "0 .5 .5 1 1\n" for split in ("train", "val") for n in "01"}
    return put(root, {**files, **boxes, "data.yaml": "names: [cat]\n"})


def yolo_by_split(root: Path) -> Path:
    """As Roboflow exports it."""
    files = {f"{split}/images/1.jpg": None for split in ("train", "valid", "test")}
    boxes = {f"{split}/labels/1.txt": "0 .5 .5 1 1\n" for split in ("train", "valid", "test")}
    return put(root, {**files, **boxes, "data.yaml": "names: [cat]\n"})


def ade20k(root: Path) -> Path:
    return put(
        root,
        {
            "images/training/ADE_train_00000001.jpg": None,
            "images/validation/ADE_val_00000001.jpg": None,
            "annotations/training/ADE_train_00000001.png": None,
            "annotations/validation/ADE_val_00000001.png": None,
        },
    )


def mds(root: Path) -> Path:
    """MosaicML Streaming with shards of JSON, and a folder for each split."""
    file = {"basename": "shard.00000.json", "bytes": 9, "hashes": {}}
    shard = {"format": "json", "samples": 1, "raw_data": file, "zip_data": None}
    index = {"version": 2, "shards": [shard]}
    for split in ("train", "val"):
        files = {"index.json": json.dumps(index), "shard.00000.json": bytes(9)}
        put(root / split, files)
    return root


def cifar10(root: Path) -> Path:
    batch = pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]})
    names = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta")
    return put(root, {**dict.fromkeys(names, batch), "readme.html": "<html>"})


def cifar10_binary(root: Path) -> Path:
    names = (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin")
    about = {"batches.meta.txt": "airplane\n", "readme.html": "<html>"}
    return put(root, {**dict.fromkeys(names, bytes(3073)), **about})


def cifar100(root: Path) -> Path:
    batch = pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)})
    return put(root, {**dict.fromkeys(("train", "test", "meta"), batch), "file.txt~": "x"})


def cifar100_binary(root: Path) -> Path:
    names = {"fine_label_names.txt": "apple\n", "coarse_label_names.txt": "fruit\n"}
    return put(root, {"train.bin": bytes(3074), "test.bin": bytes(3074), **names})


def mnist(root: Path) -> Path:
    images = gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 1, 28, 28) + bytes(784))
    labels = gzip.compress(struct.pack(">HBBI", 0, 8, 1, 1) + bytes(1))
    names = {"images-idx3": images, "labels-idx1": labels}
    return put(root, {f"train-{name}-ubyte.gz": data for name, data in names.items()})


def tfrecord() -> bytes:
    """A record of tf.train.Example: the feature `label` is 1."""
    record = "0a100a0e0a056c6162656c12051a030a0101"
    return bytes.fromhex(f"1200000000000000241f6425{record}f5d6547b")


def tfds(root: Path) -> Path:
    """As TensorFlow Datasets prepares it."""
    names = ("mnist-train.tfrecord-00000-of-00001", "mnist-test.tfrecord-00000-of-00001")
    about = {"dataset_info.json": "{}", "features.json": "{}", "label.labels.txt": "0\n1\n"}
    return put(root, {**dict.fromkeys(names, tfrecord()), **about})


def hdf5(root: Path) -> Path:
    return put(root, {"camelyonpatch_level_2_split_train_x.h5": b"\x89HDF\r\n\x1a\n" + bytes(9)})
