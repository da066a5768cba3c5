"""MDS and MosaicML Streaming, in one process: it reads what we write, we read what it writes."""

import io
import json

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.errors import FormatError
from shardkit.testing import make_image
from tests import clients
from tests.formats.loaders import PLAIN, plain, rich
from tests.formats.refusals import refused

pytestmark = [pytest.mark.large, pytest.mark.xdist_group("streaming")]  # to import it once

# `import streaming` wants torchvision for its image datasets, which nothing here is about.
_IMPORT = """
import hashlib, io, json, sys
from types import ModuleType
sys.modules["streaming.vision"] = ModuleType("streaming.vision")
import numpy as np
from streaming import MDSWriter, StreamingDataset
"""

KINDS, _sample = rich("more frames sound fixed scalar flags count maybe")


def kinds(number):
    return {**_sample(number), "image": make_image(number, ("JPEG", "PNG", "WEBP")[number % 3])}


# Reads a dataset; writes one of every encoding for each of the options, and prints what it reads.
_SCRIPT = """
from decimal import Decimal
from PIL import Image
from streaming.base.util import merge_index
from torch.utils.data import DataLoader

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

OPTIONS = {
    "zstd": {"compression": "zstd:7", "hashes": ["sha1", "xxh64"], "size_limit": 30_000},
    "plain": {"size_limit": 30_000},
    "gz": {"compression": "gz", "size_limit": None},
    "bz2": {"compression": "bz2"},
    "br": {"compression": "br"},
    "snappy": {"compression": "snappy"},
    "pickled": {"pickled": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streaming")


@pytest.fixture(scope="module")
def found(folder):
    """What it reads of our dataset and its own, which are in the folder."""
    with shardkit.create(folder / "ours", "mds", KINDS, shard_samples=15) as writer:
        for number in range(40):
            writer.write(kinds(number))
    script, options = _IMPORT + PLAIN + _SCRIPT, json.dumps(OPTIONS)
    return clients.run("streaming", script, folder / "ours", folder, options)


def test_streaming_dataset_reads_every_type(found):
    samples = [kinds(number) for number in range(40)]
    for row, sample in zip(found["ours"], samples, strict=True):
        for name in ("__key__", "label", "score", "text", "about", "good"):
            assert row[name] == sample[name]
        for name in ("blob", "sound", "fixed", "points", "scalar"):
            assert row[name] == plain(sample[name])
        flags = np.load(io.BytesIO(bytes.fromhex(row["flags"])))
        np.testing.assert_array_equal(flags, sample["flags"])
        assert row["image"][1][:2] == [6, 8]
        assert len(row["frames"]) == len(sample["frames"])
        optional = ("caption", "more", "count", "maybe")
        assert row["__absent__"] == [name for name in optional if name not in sample]
        assert row["more"] == sample.get("more", b"").hex()
        assert (row["caption"], row["count"]) == ("", sample.get("count", 0))
        assert row["maybe"] == plain(sample.get("maybe", np.empty(0, "<f4")))
    keys = sorted(sample["__key__"] for sample in samples)
    assert [sorted(epoch) for epoch in found["epochs"]] == [keys, keys]
    assert found["epochs"][0] != found["epochs"][1]


def seen(name, value):
    """A value as the script prints it."""
    if isinstance(value, list):
        return [seen(name, each) for each in value]
    if isinstance(value, bytes) and name != "bytes":
        with PIL.Image.open(io.BytesIO(value)) as image:
            return plain(image)
    return plain(value)


def assert_rows(samples, rows, jpegs=True):
    """The samples are those that StreamingDataset reads; pixels of JPEGs depend on the decoder."""
    for sample, row in zip(samples, rows, strict=True):
        found = {name: value for name, value in sample.items() if name != "__key__"}
        assert set(found) == set(row)
        for name, value in found.items():
            if jpegs or "jpeg" not in name:
                assert seen(name, value) == row[name], name


@pytest.mark.filterwarnings(
    "ignore:(compressed MDS shards|images with a palette):shardkit.errors.ShardkitWarning"
)
def test_what_mds_writer_writes_is_read(folder, found, tmp_path):
    rows = found["theirs"]
    assert len(rows) == 6
    for name, shards in {"zstd": 2, "plain": 2, "gz": 1, "bz2": 1, "merged": 4}.items():
        with shardkit.open(folder / name) as dataset:
            assert dataset.shards == shards
            assert_rows(dataset, rows)
            assert len(set(dataset.keys())) == 6
        assert shardkit.verify(folder / name).sound
        if name != "merged":  # whose parts are datasets by themselves
            (folder / name / "index.json").unlink()
            with shardkit.open(folder / name) as dataset:  # shards describe themselves
                assert_rows(dataset, rows)
    for name in ("br", "snappy"):
        with pytest.raises(FormatError, match="Brotli or Snappy"):
            shardkit.open(folder / name)
    with refused(FormatError, "reading a pickle runs the code in it", fix="--drop pkl"):
        shardkit.open(folder / "pickled")
    shardkit.convert(folder / "pickled", "mds", tmp_path / "out", drop=["pkl"], workers=0)
    with shardkit.open(tmp_path / "out") as dataset:
        assert_rows(dataset, rows)
