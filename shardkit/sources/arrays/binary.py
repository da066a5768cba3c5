"""Images and labels in binary files: idx, the format of MNIST, and the batches of CIFAR.

Layouts: http://yann.lecun.com/exdb/mnist (its page in web archives), and
https://www.cs.toronto.edu/~kriz/cifar.html. Images become PNG, which is lossless.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.compression import compression_of
from shardkit.codecs.pixels import to_png
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.helpers import os_errors
from shardkit.schema import Image, Int
from shardkit.sources.arrays.rows import Column, FileSpan, Found, Rows, damaged, kind_of
from shardkit.storage import fs

# --- idx -----------------------------------------------------------------------------------------

_IDX = re.compile(
    r"((?P<prefix>.+)[-_])?(?P<split>train|t10k|test(ing)?|val(id(ation)?)?)[-_]"
    r"(?P<what>images|labels)[-.]idx\d-(ubyte|int)(?P<gz>\.gz)?",
    re.IGNORECASE,
)
_DTYPES = {8: "|u1", 9: "|i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def find_idx(root: Path, names: Iterable[str]) -> Found:
    """Return the images and labels below a folder, by split; `t10k` is the test split."""
    arrays: dict[str, Rows] = {}
    groups, used, copies = set(), [], 0
    for name in sorted(names):  # plain files come before compressed copies, kept by torchvision
        folder, _, base = name.rpartition("/")
        match = _IDX.fullmatch(base)
        if match is None:
            raise SourceError(
                "cannot tell from its name what an idx file (MNIST's format) contains",
                path=root / name,
                expected="such as train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz",
                fix="rename it, or move it away",
            )
        field = match["what"].lower().removesuffix("s")
        array = f"{match['split'].lower().replace('t10k', 'test')}_{field}"
        group = posixpath.join(folder, match["prefix"] or "")
        if array in arrays and group in groups:
            copies += 1
            continue
        groups.add(group)
        if len(groups) == 1:
            arrays[array] = read_idx(field, root / name)
            used.append(name)
    if len(groups) > 1:
        raise UsageError(
            "the folder contains several datasets in MNIST's format",
            path=root,
            found=", ".join(group or "train-images, ..." for group in sorted(groups)),
            fix="move the files of one into a separate folder, and give that folder",
        )
    mapping = f"{groups.pop()}-mapping.txt"
    classes = _emnist_names(root / mapping) if (root / mapping).is_file() else None
    for array, column in arrays.items():
        images = arrays.get(array.replace("label", "image"))
        if images is None:
            raise SourceError("there are labels without images", path=root, found=array)
        if len(images) != len(column):
            raise SourceError(
                "there are not as many labels as images",
                path=root,
                expected=f"{len(images):,} labels",
                found=f"{len(column):,}",
                fix="the files belong to two datasets, or one is damaged: download them again",
            )
    ignored = {"compressed copy of a file": copies} if copies else {}
    if classes:
        used.append(mapping)
    return Found(arrays, used, {"label": classes} if classes else {}, (), ignored)


def read_idx(field: str, path: Path) -> Rows:
    """Return the rows of an idx file: images of bytes as PNG, single numbers, or arrays."""
    with os_errors.explained("open", path):
        source = FileSpan(path).open()
        compression = compression_of(source.read(0, min(6, source.size)))
        part = FileSpan(path, compression)
        source = part.open()
        head = source.read(0, min(4, source.size))
        dims = head[3] if len(head) == 4 else 0
        if head[:2] != b"\0\0" or len(head) < 4 or head[2] not in _DTYPES or not dims:
            raise damaged(path, "the file is not in idx format", "two zero bytes first", head.hex())
        start = 4 + 4 * dims
        lengths = np.frombuffer(source.read(4, 4 * dims), ">u4").tolist()
    dtype, shape = np.dtype(_DTYPES[head[2]]), tuple(lengths[1:])
    size = int(np.prod([dtype.itemsize, *lengths], dtype=object))
    if source.size != start + size:
        what = "the size of an idx file does not match its header"
        raise damaged(path, what, f"{start + size:,} bytes", f"{source.size:,}")
    kind, make = kind_of(field, dtype, shape)
    if field == "image" and dtype == np.uint8 and len(shape) == 2 and all(shape):
        kind, make = Image(), to_png
    stride = size // lengths[0] if lengths[0] else 0
    return Rows(kind, ((part, start, lengths[0]),), dtype.str, shape, stride, make)


def _emnist_names(path: Path) -> tuple[str, ...]:
    """Return the characters of EMNIST's labels, from lines of a label and character codes."""
    try:
        lines = [[int(n) for n in line.split()] for line in fs.read(path).split(b"\n") if line]
        names = {label: chr(codes[0]) for label, *codes in lines}
        if not all(0 <= label < 1000 for label in names):
            raise ValueError(f"the label {max(names)}, which is not from 0 to 999")
    except (ValueError, IndexError, OverflowError) as error:
        what = "the class name file is damaged"
        raise damaged(path, what, "lines of numbers", str(error)) from error
    return tuple(names.get(label, "N/A") for label in range(max(names, default=-1) + 1))


# --- CIFAR ---------------------------------------------------------------------------------------

_PIXELS = 3 * 32 * 32
_TEN = re.compile(r"(data_batch_(\d+)|test_batch)\.bin", re.IGNORECASE)


def _png_of_planes(values: npt.NDArray[Any]) -> bytes:
    return to_png(np.ascontiguousarray(values.transpose(1, 2, 0)))


def find_cifar(root: Path, names: Sequence[str]) -> Found:
    """Return the binary batches of CIFAR-10 or CIFAR-100 in a folder or one below it."""
    folder = min(names).rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    base = root / folder if folder else root
    by_name = {name.removeprefix(prefix): name for name in names}
    batches = sorted(
        (int(match[2] or 0), name) for name in by_name if (match := _TEN.fullmatch(name))
    )
    if batches:
        of_split = {
            "train": [base / name for number, name in batches if number],
            "test": [base / name for number, name in batches if not number],
        }
        labels, tables = {"label": 0}, {"label": "batches.meta.txt"}
    else:
        of_split = {s: [p] for s in ("train", "test") if (p := base / f"{s}.bin").is_file()}
        labels = {"coarse_label": 0, "label": 1}
        tables = {"coarse_label": "coarse_label_names.txt", "label": "fine_label_names.txt"}
    arrays: dict[str, Column | ShardkitError] = {}
    for split, files in of_split.items():
        if files:
            columns = _cifar(files, labels)
            arrays.update({f"{split}_{field}": column for field, column in columns.items()})
    if not arrays:
        raise SourceError(
            "the folder contains no batches of CIFAR",
            path=base,
            expected="data_batch_1.bin to test_batch.bin, or train.bin and test.bin",
        )
    class_names, used = {}, []
    for field, name in tables.items():
        if (base / name).is_file():
            text = fs.read(base / name).decode("utf-8", "replace")
            class_names[field] = tuple(filter(None, map(str.strip, text.split("\n"))))
            used.append(prefix + name)
    used += [prefix + path.name for files in of_split.values() for path in files]
    return Found(arrays, used, class_names)


def _cifar(files: Sequence[Path], labels: Mapping[str, int]) -> dict[str, Column]:
    """Return the columns; a record is a byte per label, and three planes of 32 x 32 pixels."""
    record = len(labels) + _PIXELS
    counts = []
    for path in files:
        with os_errors.explained("open", path):
            size = FileSpan(path).open().size
        if size % record:
            what = "a batch of CIFAR ends inside an image"
            raise damaged(path, what, f"records of {record:,} bytes", f"{size:,} bytes")
        counts.append(size // record)

    def parts(start: int) -> tuple[tuple[FileSpan, int, int], ...]:
        return tuple((FileSpan(p), start, n) for p, n in zip(files, counts, strict=True))

    kind, make = kind_of("label", np.dtype("u1"), ())
    assert isinstance(kind, Int)
    columns: dict[str, Column] = {
        "image": Rows(Image(), parts(len(labels)), "|u1", (3, 32, 32), record, _png_of_planes)
    }
    for field, at in sorted(labels.items(), reverse=True):
        columns[field] = Rows(kind, parts(at), "|u1", (), record, make)
    return columns
