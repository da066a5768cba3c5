"""MDS and MosaicML Streaming: it reads what we write, and we read what it writes.

In one process of `tests/clients.py` each way.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.errors import FormatError
from shardkit.sample import Sample
from shardkit.schema import Array, Audio, Bool, Bytes, Float, Image, Images, Int, Json, Schema, Text
from shardkit.testing import make_audio, make_image
from tests import clients

# `import streaming` wants torchvision for its image datasets, which nothing here is about.
_IMPORT = """
import hashlib, io, json, sys
from types import ModuleType
sys.modules["streaming.vision"] = ModuleType("streaming.vision")
import numpy as np
from streaming import MDSWriter, StreamingDataset
"""

_READ = (
    _IMPORT
    + """
from torch.utils.data import DataLoader

def plain(value):
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tolist()]
    if hasattr(value, "convert"):
        pixels = np.asarray(value.convert("RGB"))
        return [*pixels.shape, hashlib.md5(pixels.tobytes()).hexdigest()]
    if isinstance(value, list) and value and hasattr(value[0], "convert"):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.item() if isinstance(value, np.generic) else value

def rows(samples):
    return [{name: plain(value) for name, value in sample.items()} for sample in samples]

if __name__ == "__main__":
    dataset = StreamingDataset(local=sys.argv[1], shuffle=False, batch_size=4)
    found = {"rows": rows(dataset[n] for n in range(len(dataset))), "epochs": []}
    # Two epochs of a shuffled dataset, by two workers, in two canonical nodes.
    shuffled = StreamingDataset(
        local=sys.argv[1], shuffle=True, batch_size=4, num_canonical_nodes=2, shuffle_seed=3
    )
    loader = DataLoader(shuffled, batch_size=4, num_workers=2, collate_fn=list)
    for epoch in range(2):
        found["epochs"].append([s["__key__"] for batch in loader for s in batch])
    print(json.dumps(found))
"""
)

KINDS = Schema(
    {
        "image": Image(),
        "more": Image(optional=True),
        "frames": Images(),
        "label": Int(),
        "score": Float(),
        "good": Bool(),
        "text": Text(),
        "blob": Bytes(),
        "sound": Audio(),
        "about": Json(),
        "fixed": Array("<f4", (2, 3)),
        "points": Array("<i2", (None, 2)),
        "scalar": Array("<f8", ()),
        "flags": Array("|b1", (2,)),
        "caption": Text(optional=True),
        "count": Int(optional=True),
        "maybe": Array("<u2", (2,), optional=True),
    }
)


def kinds(number: int) -> dict[str, Any]:
    """A sample of KINDS; every second one has the optional fields."""
    sample = {
        "__key__": f"ü/{number:03d}",
        "image": make_image(number, ("JPEG", "PNG", "WEBP")[number % 3]),
        "frames": [make_image(n) for n in range(number % 4)],
        "label": number - 5,
        "score": number / 7,
        "good": number % 2 == 0,
        "text": f"line {number}\nÄ 漢",
        "blob": bytes(range(number)),
        "sound": make_audio(number),
        "about": {"n": [number, None]},
        "fixed": np.arange(6, dtype="<f4").reshape(2, 3) + number,
        "points": np.arange(number * 2, dtype="<i2").reshape(number, 2),
        "scalar": np.array(number / 3, "<f8"),
        "flags": np.array([True, number % 2 == 0]),
    }
    if number % 2:
        extra = {"caption": "", "count": 7, "more": make_image(9)}
        sample |= {**extra, "maybe": np.array([number, 70], "<u2")}
    return sample


def stored_array(value: np.ndarray[Any, Any]) -> list[Any]:
    return [value.dtype.str, list(value.shape), value.tolist()]


@pytest.mark.large
def test_streaming_dataset_reads_every_type(tmp_path: Path) -> None:
    samples = [kinds(number) for number in range(40)]
    with shardkit.create(tmp_path / "out", "mds", KINDS, shard_samples=15) as writer:
        for sample in samples:
            writer.write(sample)
    found = clients.run("streaming", _READ, tmp_path / "out")
    assert len(found["rows"]) == 40
    for row, sample in zip(found["rows"], samples, strict=True):
        for name in ("__key__", "label", "score", "text", "about"):
            assert row[name] == sample[name]
        assert row["good"] == int(sample["good"])
        assert (row["blob"], row["sound"]) == (sample["blob"].hex(), sample["sound"].hex())
        for name in ("fixed", "points", "scalar"):
            assert row[name] == stored_array(sample[name])
        flags = np.load(io.BytesIO(bytes.fromhex(row["flags"])))
        np.testing.assert_array_equal(flags, sample["flags"])
        assert row["image"][:3] == [6, 8, 3]
        assert len(row["frames"]) == len(sample["frames"])
        optional = ("more", "caption", "count", "maybe")
        assert row["__absent__"] == [name for name in optional if name not in sample]
        assert row["more"] == sample.get("more", b"").hex()
        assert (row["caption"], row["count"]) == ("", sample.get("count", 0))
        assert row["maybe"] == stored_array(sample.get("maybe", np.empty(0, "<u2")))
    keys = sorted(sample["__key__"] for sample in samples)
    assert [sorted(epoch) for epoch in found["epochs"]] == [keys, keys]
    assert found["epochs"][0] != found["epochs"][1]


# Writes a dataset of every encoding for each of the given options, and prints what is read of it.
_WRITE = (
    _IMPORT
    + """
from decimal import Decimal
from PIL import Image
from streaming.base.util import merge_index

NUMBERS = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64".split()
MODES = "RGB L 1 LA RGBA P CMYK I F I;16".split()
COLUMNS = {
    **{name: name for name in (*NUMBERS, "str", "bytes", "int", "json")},
    **{name: name for name in ("str_int", "str_float", "str_decimal", "png", "jpeg", "pkl")},
    **{name: name for name in ("jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "list[pil]")},
    "any": "ndarray", "typed": "ndarray:int16", "fixed": "ndarray:float32:2,3",
    **{f"mode {mode}": "pil" for mode in MODES},
}

def image(number, mode="RGB"):
    rng, size = np.random.default_rng(number), (5, 9)
    if mode in ("I", "F", "I;16"):
        dtype = {"I": "i4", "F": "f4", "I;16": "u2"}[mode]
        return Image.fromarray(rng.integers(0, 60000, size).astype(dtype))
    return Image.fromarray(rng.integers(0, 256, (*size, 3), "u1")).convert(mode)

def jpeg(number):
    file = io.BytesIO()
    image(number).save(file, "JPEG")
    return file.getvalue()

def sample(n):
    two = [jpeg(n), jpeg(n + 1)]
    numbers = {
        "uint8": 250 + n, "uint16": 65530 + n, "uint32": 2**32 - 9 + n, "uint64": 2**63 - 9 + n,
        "int8": -n, "int16": -n, "int32": -n, "int64": -n * 2**50, "int": n - 2**40,
        "float16": n / 8, "float32": n / 7, "float64": n / 3,
        "str_int": n * 2**40, "str_float": n / 3, "str_decimal": Decimal(n) / 3,
    }
    arrays = {
        "any": np.arange(n + 1, dtype=("u1", "f2", "i8")[n % 3]),
        "typed": np.full((n + 1, 2), -n, "i2"), "fixed": np.full((2, 3), n, "f4"),
    }
    images = {
        "png": image(n), "jpeg": two[0], "jpeg_array": two, "jpegarray": two,
        "list[jpeg]": [Image.open(io.BytesIO(one)) for one in two],
        "list[png]": [image(n)] * (n % 3), "list[pil]": [image(n), image(n, "L")],
        **{f"mode {mode}": image(n, mode) for mode in MODES},
    }
    others = {"str": f"t{n} Ä", "bytes": bytes(range(n)), "json": {"n": [n, None]}, "pkl": {1, 2}}
    return {**numbers, **arrays, **images, **others}

def plain(value):
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, Image.Image):
        return plain(np.asarray(value))
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes().hex()]
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, Decimal) else getattr(value, "item", lambda: value)()

def write(out, numbers, pickled=False, **options):
    columns = {name: kind for name, kind in COLUMNS.items() if pickled or kind != "pkl"}
    with MDSWriter(columns=columns, out=out, **options) as writer:
        for n in numbers:
            writer.write({name: value for name, value in sample(n).items() if name in columns})

if __name__ == "__main__":
    root, options = sys.argv[1], json.loads(sys.argv[2])
    for name, given in options.items():
        write(f"{root}/{name}", range(6), **given)
    for part in "01":
        write(f"{root}/merged/{part}", range(3 * int(part), 3 * int(part) + 3), size_limit=20000)
    merge_index(f"{root}/merged", keep_local=True)
    name = next(iter(options))
    dataset = StreamingDataset(local=f"{root}/local", remote=f"{root}/{name}", batch_size=1)
    rows = [dataset[n] for n in range(len(dataset))]
    print(json.dumps([{name: plain(value) for name, value in row.items()} for row in rows]))
"""
)


def pixels(data: bytes) -> list[Any]:
    with PIL.Image.open(io.BytesIO(data)) as image:
        values = np.asarray(image)
    return [values.dtype.str, list(values.shape), values.tobytes().hex()]


def plain(value: Any, as_bytes: bool) -> Any:
    """A value as the script prints it."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes().hex()]
    if isinstance(value, list):
        return [pixels(each) for each in value]
    if isinstance(value, bytes):
        return value.hex() if as_bytes else pixels(value)
    return value


def assert_rows(samples: Iterable[Sample], rows: list[dict[str, Any]], jpegs: bool = True) -> None:
    """The samples are those that StreamingDataset reads; pixels of JPEGs depend on the decoder."""
    for sample, row in zip(samples, rows, strict=True):
        found = {name: value for name, value in sample.items() if name != "__key__"}
        assert set(found) == set(row)
        for name, value in found.items():
            if jpegs or "jpeg" not in name:
                assert plain(value, name == "bytes") == row[name], name


@pytest.mark.large
@pytest.mark.filterwarnings("ignore:compressed MDS shards:shardkit.errors.ShardkitWarning")
def test_what_mds_writer_writes_is_read(tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "zstd": {"compression": "zstd:7", "hashes": ["sha1", "xxh64"], "size_limit": 30_000},
        "plain": {"size_limit": 30_000},
        "gz": {"compression": "gz", "size_limit": None},
        "bz2": {"compression": "bz2"},
        "br": {"compression": "br"},
        "snappy": {"compression": "snappy"},
        "pickled": {"pickled": True},
    }
    rows = clients.run("streaming", _WRITE, tmp_path, json.dumps(options))
    assert len(rows) == 6
    for name in ("zstd", "plain", "gz", "bz2", "merged"):
        with shardkit.open(tmp_path / name) as dataset:
            assert dataset.shards == {"zstd": 2, "plain": 2, "merged": 4}.get(name, 1)
            assert_rows(dataset, rows)
            assert len(set(dataset.keys())) == 6
            (tmp_path / name / "index.json").rename(tmp_path / f"{name}.json")
        if name != "merged":  # whose parts are datasets by themselves
            with shardkit.open(tmp_path / name) as dataset:  # shards describe themselves
                assert_rows(dataset, rows)
        (tmp_path / f"{name}.json").rename(tmp_path / name / "index.json")
        assert shardkit.verify(tmp_path / name).sound
    for name in ("br", "snappy"):
        with pytest.raises(FormatError, match="Brotli or Snappy"):
            shardkit.open(tmp_path / name)
    with pytest.raises(FormatError, match="reading a pickle runs the code in it") as error:
        shardkit.open(tmp_path / "pickled")
    assert "--drop pkl" in str(error.value.fix)
    shardkit.convert(tmp_path / "pickled", "mds", tmp_path / "out", drop=["pkl"], workers=0)
    with shardkit.open(tmp_path / "out") as dataset:
        assert_rows(dataset, rows)
