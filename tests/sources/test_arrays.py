"""Rows of arrays as samples: MNIST, CIFAR, .npy, .npz, HDF5; values as numpy has them."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.errors import DamagedError, FormatError, ShardkitError, SourceError, UsageError
from shardkit.recipe import Recipe
from shardkit.schema import Array, Bool, Bytes, Float, Image, Int, Text
from shardkit.sources import open_sources
from shardkit.sources.base import Source
from shardkit.testing import make_image
from tests.sources import real
from tests.sources.real import put

RANDOM = np.random.default_rng(0)
DIGITS = RANDOM.integers(0, 256, (9, 28, 28), "u1")
LABELS = np.arange(9, dtype="u1")


def sources(path: Path, **options: Any) -> dict[str, Any]:
    return open_sources(path, Recipe("wds", **options))


def one(path: Path, **options: Any) -> Source:
    (source,) = sources(path, **options).values()
    return source


def pixels(data: bytes) -> Any:
    image = PIL.Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    return np.array(image)


# --- MNIST ---------------------------------------------------------------------------------------


def idx(values: np.ndarray[Any, Any], *, pack: bool = False) -> bytes:
    codes = {"|u1": 8, "|i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}
    head = struct.pack(
        f">HBB{values.ndim}I", 0, codes[values.dtype.str], values.ndim, *values.shape
    )
    data = head + values.tobytes()
    return gzip.compress(data) if pack else data


def mnist(root: Path, ending: str = "-ubyte.gz", prefix: str = "") -> Path:
    pack = ending.endswith("gz")
    files: dict[str, bytes | str | None] = {}
    for split, stop in (("train", 9), ("t10k", 4)):
        files[f"{prefix}{split}-images-idx3{ending}"] = idx(DIGITS[:stop], pack=pack)
        files[f"{prefix}{split}-labels-idx1{ending}"] = idx(LABELS[:stop], pack=pack)
    return put(root, files)


@pytest.mark.parametrize("ending", ["-ubyte.gz", "-ubyte"])
def test_mnist_is_images_and_labels_by_split(tmp_path: Path, ending: str) -> None:
    root = mnist(tmp_path / "mnist", ending)
    result = shardkit.convert(root, "wds", tmp_path / "out", workers=0)
    assert {name: split.samples for name, split in result.splits.items()} == {"train": 9, "test": 4}
    with shardkit.open(tmp_path / "out/train") as dataset:
        assert dict(dataset.schema) == {"image": Image(), "label": Int()}
        for n in range(9):
            assert (pixels(dataset[n]["image"]) == DIGITS[n]).all()
            assert (dataset[n]["__key__"], dataset[n]["label"]) == (f"{n:09d}", n)
    assert shardkit.verify(tmp_path / "out", against=root).sound
    about = json.loads((tmp_path / "out/train/__shardkit__/manifest.json").read_bytes())
    assert "zlib" in about["versions"]  # which makes the PNGs
    workers = 2 if ending == "-ubyte.gz" else 0
    shardkit.convert(root, "wds", tmp_path / "again", workers=workers)
    for split in ("train", "test"):
        both = [tmp_path / name / split / "shard-000000.tar" for name in ("out", "again")]
        assert both[0].read_bytes() == both[1].read_bytes()


def test_torchvisions_folder_has_each_file_twice(tmp_path: Path) -> None:
    mnist(tmp_path / "MNIST/raw", "-ubyte.gz")
    mnist(tmp_path / "MNIST/raw", "-ubyte")
    found = sources(tmp_path / "MNIST")
    assert {name: len(source) for name, source in found.items()} == {"train": 9, "test": 4}
    assert found["train"].ignored == {"compressed copy of a file": 4, ".gz file": 4}


def test_emnist_names_its_classes(tmp_path: Path) -> None:
    root = mnist(tmp_path / "emnist", "-ubyte.gz", "emnist-letters-")
    mapping = "".join(f"{n} {64 + n} {96 + n}\n" for n in range(1, 27))
    put(root, {"emnist-letters-mapping.txt": mapping})
    train = sources(root)["train"]
    assert train.classes == ("N/A", *(chr(65 + n) for n in range(26)))
    assert train.ignored == {}
    mnist(root, "-ubyte.gz", "emnist-digits-")
    with pytest.raises(UsageError, match="several datasets") as error:
        sources(root)
    assert error.value.found == "emnist-digits, emnist-letters"


def test_classes_of_a_user_name_the_labels(tmp_path: Path) -> None:
    root = mnist(tmp_path / "fashion")
    names = [f"kind {n}" for n in range(9)]
    assert sources(root, classes=tuple(names))["test"].classes == tuple(names)
    found = sources(root, classes=("a", "b"))["train"]
    with pytest.raises(ShardkitError, match="label is not the number of a class"):
        found[5]


def test_idx_of_other_types_are_arrays(tmp_path: Path) -> None:
    values = RANDOM.normal(size=(3, 2, 2)).astype(">f4")
    put(tmp_path, {"train-images-idx3-ubyte": idx(values)})
    source = one(tmp_path)
    assert dict(source.schema) == {"image": Array(">f4", (2, 2))}
    assert (source[2]["image"] == values[2]).all()


def test_tables_that_name_files_are_not_for_arrays(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("file_name,a\n1,2\n")
    with pytest.raises(UsageError, match="a metadata table is for folders"):
        shardkit.convert(
            mnist(tmp_path / "mnist"), "wds", tmp_path / "out", metadata=tmp_path / "x.csv"
        )


def test_damaged_idx(tmp_path: Path) -> None:
    root = mnist(tmp_path / "mnist", "-ubyte")
    path = root / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match="does not match its header"):
        sources(root)
    path.write_bytes(b"<html>")
    with pytest.raises(DamagedError, match="not in idx format"):
        sources(root)
    path.write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(DamagedError, match="is truncated"):
        sources(root)
    path.write_bytes(idx(DIGITS[:5]))
    with pytest.raises(SourceError, match="not as many labels"):
        sources(root)


# --- CIFAR ---------------------------------------------------------------------------------------


def test_cifar_10(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 256, (12, 3, 32, 32), "u1")
    records = [bytes([n % 10]) + images[n].tobytes() for n in range(12)]
    names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
    files = {name: b"".join(records[2 * n : 2 * n + 2]) for n, name in enumerate(names)}
    root = put(
        tmp_path / "cifar-10-batches-bin", {**files, "batches.meta.txt": "airplane\ncar\n\n"}
    )
    classes = tuple("abcdefghij")
    train, test = sources(root, classes=classes).values()
    assert (len(train), len(test)) == (10, 2)
    for n in range(10):
        assert (pixels(train[n]["image"]) == images[n].transpose(1, 2, 0)).all()
        assert train[n]["label"] == n
    assert test[1]["label"] == 1
    assert sources(tmp_path)["train"].classes == ("airplane", "car")  # the folder above
    copy = pickle.loads(pickle.dumps(train.select(np.array([7, 3]))))
    assert [copy[0], copy[1]] == [train[7], train[3]]


def test_cifar_100_has_two_labels(tmp_path: Path) -> None:
    image = bytes(range(256)) * 12
    tables = {"fine_label_names.txt": "apple\nfish\n", "coarse_label_names.txt": "fruit\n"}
    records = b"\0\1" + image + b"\0\0" + image
    root = put(tmp_path / "cifar", {"train.bin": records, "test.bin": records[:3074], **tables})
    shardkit.convert(root, "parquet", tmp_path / "out", workers=0)
    with shardkit.open(tmp_path / "out/train") as dataset:
        assert dataset.class_names == {"label": ("apple", "fish"), "coarse_label": ("fruit",)}
        assert [(s["label"], s["coarse_label"]) for s in dataset] == [(1, 0), (0, 0)]


def test_pickles_of_cifar_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="never loads pickles") as error:
        sources(real.cifar10(tmp_path))
    assert "cifar-10-binary.tar.gz" in str(error.value.fix)
    put(tmp_path / "cut", {"data_batch_1.bin": bytes(3072)})
    with pytest.raises(DamagedError, match="ends inside an image"):
        sources(tmp_path / "cut")


# --- .npy and .npz -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (RANDOM.normal(size=(6, 3, 2)).astype("f4"), Array("<f4", (3, 2))),
        (np.arange(12, dtype=">u2").reshape(6, 2), Array(">u2", (2,))),
        (np.arange(6), Int()),
        (np.arange(6) > 2, Bool()),
        (np.arange(6) / 3, Float()),
        (np.array(["a", "bc", "ü", "", "e", "f"]), Text()),
        (np.array([b"a", b"bc", b"", b"d", b"e", b"f"]), Bytes()),
        (np.zeros((6, 0), "f8"), Array("<f8", (0,))),
        (np.arange(6) * 1j, Array("<c16", ())),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_an_array_is_its_rows(tmp_path: Path, values: Any, kind: Any) -> None:
    np.save(tmp_path / "x.npy", values)
    source = one(tmp_path / "x.npy")
    assert dict(source.schema) == {"array": kind}
    assert len(source) == 6
    for n in range(6):
        np.testing.assert_array_equal(source[n]["array"], values[n])
    shardkit.convert(tmp_path / "x.npy", "lmdb", tmp_path / "out", workers=0)
    assert shardkit.verify(tmp_path / "out", against=tmp_path / "x.npy").sound


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_medmnist_is_split(tmp_path: Path, save: Any) -> None:
    arrays = {}
    for split, count in (("train", 8), ("val", 3), ("test", 5)):
        arrays[f"{split}_images"] = RANDOM.integers(0, 256, (count, 28, 28, 3), "u1")
        arrays[f"{split}_labels"] = np.arange(count, dtype="u1")[:, None]
    save(tmp_path / "pathmnist.npz", **arrays)
    workers = 2 if save is np.savez_compressed else 0
    result = shardkit.convert(tmp_path / "pathmnist.npz", "wds", tmp_path / "out", workers=workers)
    counts = {name: split.samples for name, split in result.splits.items()}
    assert counts == {"train": 8, "val": 3, "test": 5}
    for split, count in counts.items():
        with shardkit.open(tmp_path / "out" / split) as dataset:
            assert dict(dataset.schema) == {"images": Array("|u1", (28, 28, 3)), "labels": Int()}
            for n in range(count):
                assert (dataset[n]["images"] == arrays[f"{split}_images"][n]).all()
                assert dataset[n]["labels"] == n


def test_what_else_is_in_an_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros((5, 2)), y=np.arange(5), mean=np.zeros(2), o=np.array([None] * 5))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(FormatError, match="cannot be stored as a field") as error:
        sources(path)
    assert error.value.found == "Python objects, which are pickled"
    source = one(path, drop=("o",))
    assert list(source.schema) == ["x", "y"]
    assert source.ignored == {
        "array 'mean' of another length": 1,
        "member that is no array": 1,
        "fields left out as asked: 'o'": 1,
    }


def test_arrays_that_may_not_belong_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.zeros(5), b=np.zeros(5), c=np.zeros(3), d=np.zeros(3))
    with pytest.raises(UsageError, match="several lengths"):
        sources(path)
    np.save(tmp_path / "f.npy", np.asfortranarray(np.zeros((3, 4))))
    with pytest.raises(FormatError) as error:
        sources(tmp_path / "f.npy")
    assert "Fortran" in str(error.value.found)
    np.save(tmp_path / "o.npy", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(FormatError) as error:
        sources(tmp_path / "o.npy")
    assert "pickled" in str(error.value.found)
    np.save(tmp_path / "e.npy", np.zeros((0, 4)))
    with pytest.raises(SourceError, match="no rows"):
        sources(tmp_path / "e.npy")


def test_damaged_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 4)))
    data = (tmp_path / "x.npy").read_bytes()
    for harmed in (data[:-1], data[:50], b"", b"hello"):
        (tmp_path / "x.npy").write_bytes(harmed)
        with pytest.raises(DamagedError):
            sources(tmp_path / "x.npy")
    np.savez_compressed(tmp_path / "x.npz", x=RANDOM.normal(size=(30, 4)))
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(whole[:-30])
    with pytest.raises(SourceError, match=r"the \.npz is damaged"):
        sources(tmp_path / "x.npz")
    harmed = bytearray(whole)
    harmed[100:400] = bytes(300)
    (tmp_path / "x.npz").write_bytes(harmed)
    with pytest.raises(DamagedError):
        sources(tmp_path / "x.npz")


def test_more_rows_than_a_file_can_have_are_refused(tmp_path: Path) -> None:
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 0), }".ljust(117)
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0\x76\0" + head.encode() + b"\n")
    with pytest.raises(SourceError, match="more rows than their files can hold"):
        sources(tmp_path / "x.npy")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", shape=(1 << 40,), chunks=(1 << 20,), dtype="u1")
    with pytest.raises(SourceError, match="more rows than their files can hold"):
        sources(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", shape=(2, 1 << 40), chunks=(1, 1 << 20), dtype="u1")
    with pytest.raises(FormatError, match="cannot be stored as a field"):
        sources(tmp_path / "x.h5")


def test_a_folder_of_arrays_has_one_in_each_sample(tmp_path: Path) -> None:
    root = tmp_path / "arrays"
    for name in ("cat/a", "cat/b", "dog/c"):
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        np.save(root / f"{name}.npy", np.full((len(name), 2), 3.5))
    source = one(root)
    assert dict(source.schema) == {"array": Array(), "label": Int()}
    assert source.classes == ("cat", "dog")
    assert (source[2]["array"] == np.full((5, 2), 3.5)).all()
    (root / "cat/b.npy").write_bytes(b"no array")
    with pytest.raises(ShardkitError, match="not an array, or is damaged"):
        shardkit.convert(root, "wds", tmp_path / "out", workers=0)
    result = shardkit.convert(root, "wds", tmp_path / "out", workers=0, on_error="skip")
    assert (result.samples, result.errors) == (2, 1)


def test_a_few_arrays_of_one_length_are_fields_of_the_same_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", DIGITS)
    np.save(tmp_path / "labels.npy", LABELS)
    source = one(tmp_path)
    assert dict(source.schema) == {"images": Array("|u1", (28, 28)), "labels": Int()}
    assert "fields of the same samples" in source.notes[0]
    for split in ("train", "test"):
        np.save(tmp_path / f"x_{split}.npy", DIGITS)
    (tmp_path / "images.npy").unlink()
    (tmp_path / "labels.npy").unlink()
    assert {n: list(s.schema) for n, s in sources(tmp_path).items()} == {
        "train": ["x"],
        "test": ["x"],
    }


def test_arrays_beside_texts_leave_these_a_corpus(tmp_path: Path) -> None:
    for n in range(3):
        put(tmp_path / "texts", {f"{n}.txt": f"text {n}"})
        np.save(tmp_path / f"texts/{n}.npy", np.zeros(n))
    source = one(tmp_path / "texts")
    assert (len(source), list(source.schema)) == (3, ["text"])
    assert source.ignored == {".npy file": 3}
    put(tmp_path / "x", {"README.md": "#", "LICENSE.txt": "x"})
    np.save(tmp_path / "x/x.npy", np.zeros(3))
    np.save(tmp_path / "x/y.npy", np.zeros((3, 2)))
    assert list(one(tmp_path / "x").schema) == ["x", "y"]


def test_arrays_beside_images_are_theirs(images: Path, tmp_path: Path) -> None:
    for n in range(4):
        np.save(images / f"class0/{n:03d}.npy", np.zeros(n))
    np.save(images / "features.npy", np.zeros(3))
    source = one(images)
    assert list(source.schema) == ["image", "label", "npy"]
    assert source.ignored == {".npy file": 1}


# --- HDF5 ----------------------------------------------------------------------------------------


def test_hdf5(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    colours = h5py.enum_dtype({"red": 0, "green": 1}, basetype="i1")
    ragged = [np.arange(n, dtype="f4") for n in range(4)]
    jpegs = [np.frombuffer(make_image(n), "u1") for n in range(4)]
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=DIGITS[:4], chunks=(2, 28, 28), compression="gzip")
        file["meta/score"] = np.arange(4) / 2
        file["text"] = ["a", "ü", "", "d"]
        file["good"] = np.arange(4) > 1
        file.create_dataset("colour", data=[0, 1, 1, 0], dtype=colours)
        file.create_dataset("ragged", data=np.array(ragged, object), dtype=h5py.vlen_dtype("f4"))
        file.create_dataset("jpeg", data=np.array(jpegs, object), dtype=h5py.vlen_dtype("u1"))
        file["about"] = "made by us"
        file["mean"] = np.zeros(3)
    with pytest.raises(FormatError) as error:
        sources(path)
    assert (error.value.where["field"], error.value.found) == ("about", "a single value")
    source = one(path, drop=("about",))
    assert dict(source.schema) == {
        "colour": Int(),
        "good": Bool(),
        "images": Array("|u1", (28, 28)),
        "jpeg": Image(),
        "meta.score": Float(),
        "ragged": Array("<f4", (None,)),
        "text": Text(),
    }
    assert source.class_names == {"colour": ("red", "green")}
    assert source.ignored["array 'mean' of another length"] == 1
    result = shardkit.convert(path, "arrow", tmp_path / "out", drop=["about"], workers=2)
    assert result.samples == 4
    with shardkit.open(tmp_path / "out") as dataset:
        for n, sample in enumerate(dataset):
            assert (sample["images"] == DIGITS[n]).all()
            assert sample["ragged"].tolist() == ragged[n].tolist()
            assert sample["jpeg"] == make_image(n)
            assert (sample["meta.score"], sample["text"]) == (n / 2, ["a", "ü", "", "d"][n])
            assert (sample["good"], sample["colour"]) == (n > 1, [0, 1, 1, 0][n])
    assert shardkit.verify(tmp_path / "out", against=path).sound


def test_groups_of_hdf5_are_splits(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for split, count in (("train", 6), ("test", 2)):
            file[f"{split}/images"] = DIGITS[:count]
            file[f"{split}/labels"] = LABELS[:count]
    found = sources(tmp_path / "x.hdf5")
    assert {name: len(source) for name, source in found.items()} == {"train": 6, "test": 2}
    with pytest.raises(UsageError, match="cannot be merged into one"):
        sources(tmp_path / "x.hdf5", split="none")
    for name in ("train", "valid"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(3)
    (tmp_path / "x.hdf5").unlink()
    assert list(sources(tmp_path)) == ["train", "valid"]


def test_hdf5_that_leads_elsewhere_or_has_a_group_for_each_sample(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.arange(3)
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["y"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
    with pytest.raises(SourceError, match="a link"):
        sources(path)
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((3,), "i8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (3,))
        file.create_virtual_dataset("y", layout)
        file["z"] = np.arange(3)
    with pytest.raises(FormatError) as error:
        sources(path)
    assert error.value.found == "data in other files"
    with h5py.File(path, "w") as file:
        for number in range(3):
            file[f"demo_{number}/actions"] = np.arange(3)
    with pytest.raises(UsageError, match="a group for each sample"):
        sources(path)
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90))
    with pytest.raises(SourceError, match="cannot be read"):
        sources(path)


def test_without_h5py_its_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(b"")
    code = (
        "import sys; sys.modules['h5py'] = None; import shardkit;"
        f"shardkit.convert({str(tmp_path / 'x.h5')!r}, 'wds', {str(tmp_path / 'out')!r}, workers=0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "shardkit[hdf5]"' in done.stderr
