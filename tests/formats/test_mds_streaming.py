"""MDS and MosaicML Streaming, in one process: it reads what we write, we read what it writes."""

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
from shardkit.schema import Array, Audio, Image, Images, Int, Schema
from shardkit.testing import EVERYTHING, everything, make_audio, make_image
from tests import clients

pytestmark = [pytest.mark.large, pytest.mark.xdist_group("streaming")]  # to import it once

# `import streaming` wants torchvision for its image datasets, which nothing here is about.
_IMPORT = """
import hashlib, io, json, sys
from types import ModuleType
sys.modules["streaming.vision"] = ModuleType("streaming.vision")
import numpy as np
from streaming import MDSWriter, StreamingDataset
"""

KINDS = Schema(
    {
        **EVERYTHING,
        "more": Image(optional=True),
        "frames": Images(),
        "sound": Audio(),
        "fixed": Array("<f4", (2, 3)),
        "scalar": Array("<f8", ()),
        "flags": Array("|b1", (2,)),
        "count": Int(optional=True),
        "maybe": Array("<u2", (2,), optional=True),
    }
)


def kinds(number: int) -> dict[str, Any]:
    """A sample of KINDS; every second one has the optional fields."""
    sample = {
        **everything(number),
        "image": make_image(number, ("JPEG", "PNG", "WEBP")[number % 3]),
        "frames": [make_image(n) for n in range(number % 4)],
        "sound": make_audio(number),
        "fixed": np.arange(6, dtype="<f4").reshape(2, 3) + number,
        "scalar": np.array(number / 3, "<f8"),
        "flags": np.array([True, number % 2 == 0]),
    }
    if number % 2:
        sample |= {"count": 7, "more": make_image(9), "maybe": np.array([number, 70], "<u2")}
    return sample


# Reads a dataset; writes one of every encoding for each of the options, and prints what it reads.
_SCRIPT = (
    _IMPORT
    + """
from decimal import Decimal
from PIL import Image
from streaming.base.util import merge_index
from torch.utils.data import DataLoader

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

def rows(dataset):
    return [{n: plain(v) for n, v in dataset[k].items()} for k in range(len(dataset))]

def keys(batch):
    return [sample["__key__"] for sample in batch]

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

def write(out, numbers, pickled=False, **options):
    columns = {name: kind for name, kind in COLUMNS.items() if pickled or kind != "pkl"}
    with MDSWriter(columns=columns, out=out, **options) as writer:
        for n in numbers:
            writer.write({name: value for name, value in sample(n).items() if name in columns})

if __name__ == "__main__":
    ours, root, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    found = {"ours": rows(StreamingDataset(local=ours, shuffle=False, batch_size=4))}
    # Two epochs of a shuffled dataset, by two workers, in two canonical nodes.
    shuffled = StreamingDataset(
        local=ours, shuffle=True, batch_size=4, num_canonical_nodes=2, shuffle_seed=3
    )
    loader = DataLoader(shuffled, batch_size=4, num_workers=2, collate_fn=keys)
    found["epochs"] = [[key for batch in loader for key in batch] for epoch in range(2)]
    for name, given in options.items():
        write(f"{root}/{name}", range(6), **given)
    for part in "01":
        write(f"{root}/merged/{part}", range(3 * int(part), 3 * int(part) + 3), size_limit=20000)
    merge_index(f"{root}/merged", keep_local=True)
    name = next(iter(options))
    found["theirs"] = rows(
        StreamingDataset(local=f"{root}/local", remote=f"{root}/{name}", batch_size=1)
    )
    print(json.dumps(found))
"""
)

OPTIONS: dict[str, dict[str, Any]] = {
    "zstd": {"compression": "zstd:7", "hashes": ["sha1", "xxh64"], "size_limit": 30_000},
    "plain": {"size_limit": 30_000},
    "gz": {"compression": "gz", "size_limit": None},
    "bz2": {"compression": "bz2"},
    "br": {"compression": "br"},
    "snappy": {"compression": "snappy"},
    "pickled": {"pickled": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streaming")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What it reads of our dataset and its own, which are in the folder."""
    with shardkit.create(folder / "ours", "mds", KINDS, shard_samples=15) as writer:
        for number in range(40):
            writer.write(kinds(number))
    found = clients.run("streaming", _SCRIPT, folder / "ours", folder, json.dumps(OPTIONS))
    return dict(found)


def test_streaming_dataset_reads_every_type(found: dict[str, Any]) -> None:
    samples = [kinds(number) for number in range(40)]
    for row, sample in zip(found["ours"], samples, strict=True):
        for name in ("__key__", "label", "score", "text", "about", "good"):
            assert row[name] == sample[name]
        for name in ("blob", "sound", "fixed", "points", "scalar"):
            assert row[name] == plain(sample[name], True)
        flags = np.load(io.BytesIO(bytes.fromhex(row["flags"])))
        np.testing.assert_array_equal(flags, sample["flags"])
        assert row["image"][1][:2] == [6, 8]
        assert len(row["frames"]) == len(sample["frames"])
        optional = ("caption", "more", "count", "maybe")
        assert row["__absent__"] == [name for name in optional if name not in sample]
        assert row["more"] == sample.get("more", b"").hex()
        assert (row["caption"], row["count"]) == ("", sample.get("count", 0))
        assert row["maybe"] == plain(sample.get("maybe", np.empty(0, "<u2")), True)
    keys = sorted(sample["__key__"] for sample in samples)
    assert [sorted(epoch) for epoch in found["epochs"]] == [keys, keys]
    assert found["epochs"][0] != found["epochs"][1]


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


@pytest.mark.filterwarnings("ignore:compressed MDS shards:shardkit.errors.ShardkitWarning")
def test_what_mds_writer_writes_is_read(
    folder: Path, found: dict[str, Any], tmp_path: Path
) -> None:
    rows = found["theirs"]
    assert len(rows) == 6
    for name in ("zstd", "plain", "gz", "bz2", "merged"):
        with shardkit.open(folder / name) as dataset:
            assert dataset.shards == {"zstd": 2, "plain": 2, "merged": 4}.get(name, 1)
            assert_rows(dataset, rows)
            assert len(set(dataset.keys())) == 6
            (folder / name / "index.json").rename(folder / f"{name}.json")
        if name != "merged":  # whose parts are datasets by themselves
            with shardkit.open(folder / name) as dataset:  # shards describe themselves
                assert_rows(dataset, rows)
        (folder / f"{name}.json").rename(folder / name / "index.json")
        assert shardkit.verify(folder / name).sound
    for name in ("br", "snappy"):
        with pytest.raises(FormatError, match="Brotli or Snappy"):
            shardkit.open(folder / name)
    with pytest.raises(FormatError, match="reading a pickle runs the code in it") as error:
        shardkit.open(folder / "pickled")
    assert "--drop pkl" in str(error.value.fix)
    shardkit.convert(folder / "pickled", "mds", tmp_path / "out", drop=["pkl"], workers=0)
    with shardkit.open(tmp_path / "out") as dataset:
        assert_rows(dataset, rows)
