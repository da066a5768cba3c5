"""Rows of arrays as samples: MNIST, CIFAR, .npy, .npz, HDF5; files as samples: DICOM, NIfTI.

Values are those that numpy and the libraries of the files have.
"""

import contextlib
import gzip
import io
import json
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import PIL.Image
import pydicom
import pytest
from pydicom import uid

import shardkit
from shardkit.codecs.volumes import read_volume
from shardkit.errors import (
    DamagedError,
    FormatError,
    MissingLibraryError,
    SampleError,
    ShardkitError,
    SourceError,
    UsageError,
)
from shardkit.schema import Array, Bool, Bytes, Float, Image, Int, Text
from shardkit.testing import make_image
from tests.conftest import files_of
from tests.sources import real
from tests.sources.real import cases, convert, counts, one, opened, put, refused, verified

RANDOM = np.random.default_rng(0)
DIGITS = RANDOM.integers(0, 256, (9, 28, 28), "u1")
LABELS = np.arange(9, dtype="u1")


def pixels(data: bytes) -> Any:
    image = PIL.Image.open(io.BytesIO(data))
    assert image.format == "PNG"
    return np.array(image)


# --- MNIST ---------------------------------------------------------------------------------------
def idx(values: np.ndarray[Any, Any], *, pack: bool = False) -> bytes:
    kind, sides = {"|u1": 8, ">f4": 13}[values.dtype.str], values.shape
    data = struct.pack(f">HBB{len(sides)}I", 0, kind, len(sides), *sides) + values.tobytes()
    return gzip.compress(data) if pack else data


def mnist(root: Path, ending: str = "-ubyte.gz", prefix: str = "") -> Path:
    pack = ending.endswith("gz")
    for split, stop in (("train", 9), ("t10k", 4)):
        put(root, {f"{prefix}{split}-images-idx3{ending}": idx(DIGITS[:stop], pack=pack)})
        put(root, {f"{prefix}{split}-labels-idx1{ending}": idx(LABELS[:stop], pack=pack)})
    return root


@pytest.mark.parametrize("ending", ["-ubyte.gz", "-ubyte"])
def test_mnist_is_images_and_labels_by_split(tmp_path, ending):
    root = mnist(tmp_path / "mnist", ending)
    result = verified(root, tmp_path / "out")
    assert {name: split.samples for name, split in result.splits.items()} == {"train": 9, "test": 4}
    with shardkit.open(tmp_path / "out/train") as dataset:
        assert dict(dataset.schema) == {"image": Image(), "label": Int()}
        for n in range(9):
            assert (pixels(dataset[n]["image"]) == DIGITS[n]).all()
            assert (dataset[n]["__key__"], dataset[n]["label"]) == (f"{n:09d}", n)
    about = json.loads((tmp_path / "out/train/__shardkit__/manifest.json").read_bytes())
    assert "zlib" in about["versions"]  # which makes the PNGs


def test_idx_of_other_kinds_names_its_classes_or_none_and_is_refused_if_damaged(tmp_path):
    root = mnist(tmp_path / "emnist", "-ubyte.gz", "emnist-letters-")
    mapping = "".join(f"{n} {64 + n} {96 + n}\n" for n in range(1, 27))
    put(root, {"emnist-letters-mapping.txt": mapping})
    train = opened(root)["train"]
    assert train.classes == ("N/A", *(chr(65 + n) for n in range(26)))
    assert train.ignored == {}
    mnist(root, "-ubyte.gz", "emnist-digits-")
    error = refused(UsageError, "several datasets", opened, root)
    assert error.found == "emnist-digits, emnist-letters"
    root, names = mnist(tmp_path / "fashion"), tuple(f"kind {n}" for n in range(9))
    assert opened(root, classes=names)["test"].classes == names
    two = opened(root, classes=("a", "b"))["train"]
    refused(ShardkitError, "label is not the number of a class", two.__getitem__, 5)
    table = str(put(tmp_path, {"x.csv": "file_name,a\n1,2\n"}) / "x.csv")
    refused(UsageError, "a metadata table is for folders", opened, root, metadata=table)
    floats = RANDOM.normal(size=(3, 2, 2)).astype(">f4")
    source = one(put(tmp_path / "floats", {"train-images-idx3-ubyte": idx(floats)}))
    assert dict(source.schema) == {"image": Array(">f4", (2, 2))}
    assert (source[2]["image"] == floats[2]).all()
    root = mnist(tmp_path / "mnist", "-ubyte")
    path = root / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], "does not match its header"),
        (b"<html>", "an HTML page"),
        (b"garbage", "not in idx format"),
        (gzip.compress(whole)[:-20], "is truncated"),
        (idx(DIGITS[:5]), "not as many labels"),
    ):
        path.write_bytes(content)
        refused((DamagedError, SourceError), message, opened, root)
    path.unlink()  # the test split is whole
    refused(SourceError, "labels without images", opened, root)


# --- CIFAR ---------------------------------------------------------------------------------------
def test_cifar_10_has_a_label_and_cifar_100_two_and_pickles_are_refused(tmp_path):
    images = RANDOM.integers(0, 256, (12, 3, 32, 32), "u1")
    records = [bytes([n % 10]) + images[n].tobytes() for n in range(12)]
    names = [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]
    files = {name: b"".join(records[2 * n : 2 * n + 2]) for n, name in enumerate(names)}
    root = put(tmp_path / "cifar-10-batches-bin", {**files, "batches.meta.txt": "plane\ncar\n\n"})
    train, test = opened(root, classes=tuple("abcdefghij")).values()
    assert (len(train), len(test)) == (10, 2)
    for n in range(10):
        assert (pixels(train[n]["image"]) == images[n].transpose(1, 2, 0)).all()
        assert train[n]["label"] == n
    assert test[1]["label"] == 1
    assert opened(tmp_path)["train"].classes == ("plane", "car")  # the folder above
    copy = pickle.loads(pickle.dumps(train.select(np.array([7, 3]))))
    assert [copy[0], copy[1]] == [train[7], train[3]]
    image = bytes(range(256)) * 12
    tables = {"fine_label_names.txt": "apple\nfish\n", "coarse_label_names.txt": "fruit\n"}
    records = b"\0\1" + image + b"\0\0" + image
    root = put(tmp_path / "cifar", {"train.bin": records, "test.bin": records[:3074], **tables})
    train = opened(root)["train"]
    assert train.class_names == {"label": ("apple", "fish"), "coarse_label": ("fruit",)}
    assert [(train[n]["label"], train[n]["coarse_label"]) for n in range(2)] == [(1, 0), (0, 0)]
    pickles = put(tmp_path / "pickles", real.FOLDERS["CIFAR-10"])
    error = refused(FormatError, "never loads pickles", opened, pickles)
    assert "cifar-10-binary.tar.gz" in str(error.fix)
    put(tmp_path / "cut", {"data_batch_1.bin": bytes(3072)})
    refused(DamagedError, "ends inside an image", opened, tmp_path / "cut")


# --- .npy and .npz -------------------------------------------------------------------------------
@cases(
    "values kind",
    (RANDOM.normal(size=(6, 3, 2)).astype("f4"), Array("<f4", (3, 2))),
    (np.arange(12, dtype=">u2").reshape(6, 2), Array(">u2", (2,))),
    (np.arange(6), Int()),
    (np.arange(6) > 2, Bool()),
    (np.arange(6) / 3, Float()),
    (np.array(["a", "bc", "ü", "", "e", "f"]), Text()),
    (np.array([b"a", b"bc", b"", b"d", b"e", b"f"]), Bytes()),
    (np.zeros((6, 0), "f8"), Array("<f8", (0,))),
    (np.arange(6) * 1j, Array("<c16", ())),
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_an_array_is_its_rows(tmp_path, values, kind):
    np.save(tmp_path / "x.npy", values)
    source = one(tmp_path / "x.npy")
    assert dict(source.schema) == {"array": kind}
    np.testing.assert_array_equal([source[n]["array"] for n in range(len(source))], values)
    verified(tmp_path / "x.npy", tmp_path / "out", "lmdb")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_medmnist_is_split(tmp_path, save):
    arrays, sizes = {}, {"train": 8, "val": 3, "test": 5}
    for split, count in sizes.items():
        arrays[f"{split}_images"] = RANDOM.integers(0, 256, (count, 28, 28, 3), "u1")
        arrays[f"{split}_labels"] = np.arange(count, dtype="u1")[:, None]
    save(tmp_path / "pathmnist.npz", **arrays)
    found = opened(tmp_path / "pathmnist.npz")
    assert counts(found) == sizes
    for split, source in pickle.loads(pickle.dumps(found)).items():
        assert dict(source.schema) == {"images": Array("|u1", (28, 28, 3)), "labels": Int()}
        for n in range(sizes[split]):
            assert (source[n]["images"] == arrays[f"{split}_images"][n]).all()
            assert source[n]["labels"] == n


def test_what_else_is_in_an_archive_is_named(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros((5, 2)), y=np.arange(5), mean=np.zeros(2), o=np.array([None] * 5))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("notes.txt", "hello")
    error = refused(FormatError, "cannot be stored as a field", opened, path)
    assert error.found == "Python objects, which are pickled"
    source = one(path, drop=("o",))
    assert list(source.schema) == ["x", "y"]
    others = ("array 'mean' of another length", "member that is no array")
    assert source.ignored == dict.fromkeys([*others, "fields dropped as asked: 'o'"], 1)
    np.savez(path, a=np.zeros(5), b=np.zeros(5), c=np.zeros(3), d=np.zeros(3))
    refused(UsageError, "several lengths", opened, path)


def test_files_named_after_splits_keep_the_names_of_their_arrays(tmp_path):
    arrays = {"x-y": np.arange(5), "x_y": np.arange(5) * 2, "mean": np.zeros(3)}
    for split in ("train", "test"):
        np.savez(tmp_path / f"{split}.npz", **arrays)
        with zipfile.ZipFile(tmp_path / f"{split}.npz", "a") as archive:
            archive.writestr("notes.txt", "hello")
    train, test = opened(tmp_path).values()
    assert [train[4]["x-y"], train[4]["x_y"]] == [test[4]["x-y"], test[4]["x_y"]] == [4, 8]
    assert train.ignored == {"array 'mean' of another length": 2, "member that is no array": 2}


def test_arrays_that_are_damaged_or_have_more_rows_than_a_file_can_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 4)))
    np.savez_compressed(tmp_path / "x.npz", x=RANDOM.normal(size=(30, 4)))
    array, archive = ((tmp_path / f"x.{suffix}").read_bytes() for suffix in ("npy", "npz"))
    columns, objects = np.asfortranarray(np.zeros((3, 4))), np.array([{}, {}])
    no_samples = ((columns, "Fortran"), (objects, "pickled"), (np.zeros((0, 4)), "no rows"))
    for values, message in no_samples:
        np.save(tmp_path / "y.npy", values, allow_pickle=True)
        refused((FormatError, SourceError), f"(?s){message}", opened, tmp_path / "y.npy")
    for suffix, damaged, message in (
        *(("npy", data, ".") for data in (array[:-1], array[:50], b"", b"hello")),
        ("npz", archive[:-30], r"the \.npz is damaged"),
        ("npz", archive[:100] + bytes(300) + archive[400:], "."),
    ):
        (tmp_path / f"x.{suffix}").write_bytes(damaged)
        refused((DamagedError, SourceError), message, opened, tmp_path / f"x.{suffix}")
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 0), }".ljust(117)
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0\x76\0" + head.encode() + b"\n")
    refused(SourceError, "more rows than their files can hold", opened, tmp_path / "x.npy")
    for shape, chunks, message in (
        ((1 << 40,), (1 << 20,), "more rows than their files can hold"),
        ((2, 1 << 40), (1, 1 << 20), "cannot be stored as a field"),
    ):
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file.create_dataset("x", shape=shape, chunks=chunks, dtype="u1")
        refused(ShardkitError, message, opened, tmp_path / "x.h5")


def save(root: Path, **arrays: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, values in arrays.items():
        np.save(root / f"{name}.npy", values)
    return root


def test_folders_of_arrays_have_one_in_each_sample_or_fields_and_others_stay(tmp_path, images):
    root = tmp_path / "arrays"
    save(root / "cat", a=np.full((5, 2), 3.5), b=np.zeros(3))
    save(root / "dog", c=np.full((7, 2), 3.5))
    source = one(root)
    assert dict(source.schema) == {"array": Array(), "label": Int()}
    assert source.classes == ("cat", "dog")
    assert (source[2]["array"] == np.full((7, 2), 3.5)).all()
    (root / "cat/b.npy").write_bytes(b"no array")
    refused(ShardkitError, "file of a field is damaged", convert, root, tmp_path / "out")
    result = convert(root, tmp_path / "out", on_error="skip")
    assert (result.samples, result.errors) == (2, 1)
    source = one(save(tmp_path / "a", images=DIGITS, labels=LABELS))
    assert dict(source.schema) == {"images": Array("|u1", (28, 28)), "labels": Int()}
    assert "fields of the same samples" in source.notes[0]
    found = opened(save(tmp_path / "b", x_train=DIGITS, x_test=DIGITS))
    assert {n: list(s.schema) for n, s in found.items()} == {"train": ["x"], "test": ["x"]}
    put(tmp_path / "c", {"README.md": "#", "LICENSE.txt": "x"})
    assert list(one(save(tmp_path / "c", x=np.zeros(3), y=np.zeros((3, 2)))).schema) == ["x", "y"]
    put(tmp_path / "texts", {f"{n}.txt": f"text {n}" for n in range(3)})
    source = one(save(tmp_path / "texts", **{f"{n}": np.zeros(n) for n in range(3)}))
    assert (len(source), list(source.schema)) == (3, ["text"])
    assert source.ignored == {".npy file": 3}
    save(images / "class0", **{f"{n:03d}": np.zeros(n) for n in range(4)})
    source = one(save(images, features=np.zeros(3)))
    assert list(source.schema) == ["image", "label", "npy"]
    assert source.ignored == {".npy file": 1}


# --- HDF5 ----------------------------------------------------------------------------------------
def hdf5(path: Path, data: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in data.items():
            file[name] = values
    return path


def test_hdf5(tmp_path):
    colours = h5py.enum_dtype({"red": 0, "green": 1}, basetype="i1")
    ragged = [np.arange(n, dtype="f4") for n in range(4)]
    jpegs = [np.frombuffer(make_image(n), "u1") for n in range(4)]
    plain = {"meta/score": np.arange(4) / 2, "text": ["a", "ü", "", "d"], "good": np.arange(4) > 1}
    path = hdf5(tmp_path / "x.h5", {**plain, "about": "made by us", "mean": np.zeros(3)})
    with h5py.File(path, "a") as file:
        file.create_dataset("images", data=DIGITS[:4], chunks=(2, 28, 28), compression="gzip")
        file.create_dataset("colour", data=[0, 1, 1, 0], dtype=colours)
        file.create_dataset("ragged", data=np.array(ragged, object), dtype=h5py.vlen_dtype("f4"))
        file.create_dataset("jpeg", data=np.array(jpegs, object), dtype=h5py.vlen_dtype("u1"))
    error = refused(FormatError, None, opened, path)
    assert (error.where["field"], error.found) == ("about", "a single value")
    source = one(path, drop=("about",))
    kinds = {"colour": Int(), "good": Bool(), "images": Array("|u1", (28, 28)), "jpeg": Image()}
    kinds |= {"meta.score": Float(), "ragged": Array("<f4", (None,)), "text": Text()}
    assert dict(source.schema) == kinds
    assert source.class_names == {"colour": ("red", "green")}
    assert source.ignored["array 'mean' of another length"] == 1
    for workers, name in ((0, "one"), (2, "out")):
        result = convert(path, tmp_path / name, "arrow", drop=["about"], workers=workers)
        assert result.samples == 4
    assert files_of(tmp_path / "one") == files_of(tmp_path / "out")
    with shardkit.open(tmp_path / "out") as dataset:
        for n, sample in enumerate(dataset):
            assert (sample["images"] == DIGITS[n]).all()
            assert sample["ragged"].tolist() == ragged[n].tolist()
            assert sample["jpeg"] == make_image(n)
            assert (sample["meta.score"], sample["text"]) == (n / 2, ["a", "ü", "", "d"][n])
            assert (sample["good"], sample["colour"]) == (n > 1, [0, 1, 1, 0][n])
    assert shardkit.verify(tmp_path / "out", against=path).sound


def test_several_files_of_mnist_and_groups_of_hdf5_are_splits(tmp_path):
    for ending in ("-ubyte.gz", "-ubyte"):  # torchvision's folder has each file twice
        mnist(tmp_path / "MNIST/raw", ending)
    found = opened(tmp_path / "MNIST")
    assert counts(found) == {"train": 9, "test": 4}
    assert found["train"].ignored == {"compressed copy of a file": 4, ".gz file": 4}
    groups = {"train/images": DIGITS[:6], "train/labels": LABELS[:6]}
    groups |= {"test/images": DIGITS[:2], "test/labels": LABELS[:2]}
    path = hdf5(tmp_path / "x.hdf5", groups)
    assert counts(opened(path)) == {"train": 6, "test": 2}
    refused(UsageError, "cannot be merged into one", opened, path, split="none")
    (tmp_path / "h5").mkdir()
    for name in ("train", "valid"):
        hdf5(tmp_path / f"h5/{name}.h5", {"x": np.arange(3)})
    assert list(opened(tmp_path / "h5")) == ["train", "valid"]


def test_hdf5_that_leads_elsewhere_or_has_a_group_for_each_sample_is_refused(tmp_path, monkeypatch):
    other = str(hdf5(tmp_path / "other.h5", {"x": np.arange(3)}))
    path = hdf5(tmp_path / "x.h5", {"y": h5py.ExternalLink(other, "x")})
    refused(SourceError, "a link", opened, path)
    hdf5(path, {"z": np.arange(3)})
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((3,), "i8")
        layout[:] = h5py.VirtualSource(other, "x", (3,))
        file.create_virtual_dataset("y", layout)
    assert refused(FormatError, None, opened, path).found == "data in other files"
    hdf5(path, {f"demo_{number}/actions": np.arange(3) for number in range(3)})
    refused(UsageError, "a group for each sample", opened, path)
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90))
    refused(SourceError, "cannot be read", opened, path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    path.write_bytes(b"")
    refused(ShardkitError, r'pip install "shardkit\[hdf5\]"', opened, path)


@pytest.mark.parametrize(("name", "count"), [("labels", 4), ("y", 2), ("captions", 13)])
def test_fewer_labels_than_samples_are_an_error(tmp_path, name, count):
    np.savez(tmp_path / "x.npz", images=np.zeros((20, 2, 2)), **{name: np.zeros(count)})
    error = refused(UsageError, "is not as long as the others", opened, tmp_path / "x.npz")
    assert (error.expected, error.found) == ("20 values", str(count))


# --- DICOM and NIfTI -----------------------------------------------------------------------------
def dicom(
    values: np.ndarray[Any, Any], syntax: Any = uid.ExplicitVRLittleEndian, **also: Any
) -> bytes:
    data = pydicom.Dataset()
    data.SOPClassUID, data.SOPInstanceUID = uid.CTImageStorage, "1.2.3"
    colours = values.ndim > 2 and values.shape[-1] == 3
    if values.ndim - colours == 3:
        data.NumberOfFrames = len(values)
    data.Rows, data.Columns = values.shape[-2 - colours :][:2]
    data.SamplesPerPixel, data.PlanarConfiguration = (3, 0) if colours else (1, None)
    data.PhotometricInterpretation = "RGB" if colours else "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 8 * values.itemsize
    data.HighBit = data.BitsStored - 1
    data.PixelRepresentation = int(values.dtype.kind == "i")
    order = ">" if syntax == uid.ExplicitVRBigEndian else "<"
    stored = values.astype(values.dtype.newbyteorder(order)).tobytes()
    data.PixelData = stored + bytes(len(stored) % 2)
    for name, value in also.items():
        setattr(data, name, value)
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    if syntax == uid.RLELossless:
        data.compress(syntax)
    elif syntax.is_encapsulated:
        data.PixelData = pydicom.encaps.encapsulate([data.PixelData])
    data.file_meta.TransferSyntaxUID = syntax
    file = io.BytesIO()
    data.save_as(file, enforce_file_format=True)
    return file.getvalue()


def nifti(values: np.ndarray[Any, Any], kind: Any = nibabel.Nifti1Image, order: str = "<") -> bytes:
    header = kind.header_class(endianness=order)
    header.set_data_dtype(values.dtype)
    image = kind(values, np.diag([1.0, 2, 3, 1]), header)
    image.header.set_slope_inter(2, 5)
    image.header["descrip"] = b"Jane Doe"
    data: bytes = image.to_bytes()
    return data


SLICE = RANDOM.integers(-1000, 3000, (6, 5), "i2")
VOLUME = RANDOM.integers(0, 256, (4, 3, 2), "u1")


def scans(root: Path) -> Path:
    """Two classes of DICOM files."""
    about: dict[str, Any] = {"PatientName": "Doe^Jane", "PatientID": "7", "StudyDate": "20200101"}
    about |= {"RescaleSlope": "1.5", "RescaleIntercept": "-1024", "PixelSpacing": ["0.5", "0.7"]}
    files = {f"{c}/{n}.dcm": dicom(SLICE + n, **about) for c in ("ill", "well") for n in (1, 2)}
    return put(root, files)


@pytest.mark.parametrize("format", ["wds", "lmdb", "arrow", "beton", "tfrecord", "mds"])
def test_scans_are_arrays_with_a_header_and_what_is_lost_is_counted(tmp_path, format):
    source = scans(tmp_path / "ct")
    result = verified(source, tmp_path / "out", format)
    patient = "DICOM elements about the patient (PatientName, PatientID, ...)"
    other = "other DICOM elements (times, devices, identifiers, ...)"
    assert result.ignored == {patient: 8, other: 12}  # StudyDate, and two UIDs
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset.classes == ("ill", "well")
        sample = dataset[1]
        assert sample["__key__"] == "ill/2"
        assert sample["array"].dtype == np.int16
        np.testing.assert_array_equal(sample["array"], SLICE + 1 + 1)
        header = sample["header"]
        assert (header["RescaleSlope"], header["RescaleIntercept"]) == (1.5, -1024)
        assert header["PixelSpacing"] == [0.5, 0.7]
    assert b"Jane" not in b"".join(files_of(tmp_path / "out").values())


def test_counts_of_what_is_lost_are_those_of_the_samples_that_are_converted(tmp_path):
    source = scans(tmp_path / "ct")
    put(tmp_path / "mr", {f"{n}.nii.gz": gzip.compress(nifti(VOLUME)) for n in "ab"})
    put(tmp_path / "mr", {"a.json": '{"EchoTime": 0.1}', "b.json": "{}"})
    result = convert([source, tmp_path / "mr"], tmp_path / "out", drop=["label"], limit=5)
    texts = "NIfTI texts, which may name a person (descrip, aux_file, ...)"
    assert [result.ignored[name] for name in sorted(result.ignored) if "patient" in name] == [8]
    assert result.ignored[texts] == 1
    sample = shardkit.open(tmp_path / "out")[4]
    assert sample["__key__"] == "mr/a"  # not a.nii
    assert sample["json"] == {"EchoTime": 0.1}
    np.testing.assert_array_equal(sample["array"], VOLUME)
    header = sample["header"]
    assert (header["scl_slope"], header["scl_inter"], header["affine"][1]) == (2, 5, [0, 2, 0, 0])
    result = convert(source, tmp_path / "one", fields=["label"])
    assert not [name for name in result.ignored if "DICOM" in name]


@pytest.mark.parametrize("kind", ["u1", "i2", "u2", "i4", "f4", "f8", "c8", "RGB"])
@pytest.mark.parametrize("order", "<>")
def test_values_of_nifti_are_those_of_nibabel(kind, order):
    values = RANDOM.integers(0, 100, (4, 3, 2, 2)).astype("u1" if kind == "RGB" else kind)
    if kind == "RGB":
        values = RANDOM.integers(0, 256, (4, 3, 2, 3), "u1")
        given = np.ascontiguousarray(values).view([(c, "u1") for c in "RGB"])[..., 0]
    for image in (nibabel.Nifti1Image, nibabel.Nifti2Image):
        data = nifti(given if kind == "RGB" else values, image, order)
        theirs = image.from_bytes(data).dataobj.get_unscaled()
        ours = read_volume(data).values
        assert ours.flags.c_contiguous
        np.testing.assert_array_equal(ours, values, strict=True)
        if kind != "RGB":
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "syntax",
    [
        uid.ExplicitVRLittleEndian,
        uid.ImplicitVRLittleEndian,
        uid.ExplicitVRBigEndian,
        uid.RLELossless,
    ],
)
@cases("kind shape", ("u1", (6, 5, 3)), ("u2", (6, 5, 3)), ("u2", (6, 5)), ("i2", (4, 6, 5)))
def test_values_of_dicom_are_those_that_were_stored(syntax, kind, shape):
    values = RANDOM.integers(0, 100, shape).astype(kind)
    np.testing.assert_array_equal(read_volume(dicom(values, syntax)).values, values, strict=True)


def test_what_the_header_says_of_pixels_is_true_of_the_array():
    ybr = dicom(RANDOM.integers(0, 256, (6, 5, 3), "u1"), PhotometricInterpretation="YBR_FULL")
    found = read_volume(ybr)
    theirs = pydicom.dcmread(io.BytesIO(ybr)).pixel_array
    np.testing.assert_array_equal(found.values, theirs, strict=True)
    assert found.header["PhotometricInterpretation"] == "RGB"
    bits = np.packbits(np.ones((6, 4), "u1"), bitorder="little")
    also = {"BitsAllocated": 1, "BitsStored": 1, "HighBit": 0, "PixelData": bits.tobytes() + b"\0"}
    ones = read_volume(dicom(np.zeros((6, 4), "u1"), **also)).values
    np.testing.assert_array_equal(ones, np.ones((6, 4), "u1"), strict=True)


def test_damaged_and_odd_scans_are_errors_of_their_samples(tmp_path):
    good = {"dcm": dicom(SLICE), "nii": nifti(VOLUME), "nii.gz": gzip.compress(nifti(VOLUME))}
    rows = {"Rows": 65535, "Columns": 65535, "NumberOfFrames": 10**6}
    wide = bytearray(good["nii"])
    wide[42:48] = struct.pack("<3h", 30000, 30000, 30000)
    several = {
        "dcm": [
            (dicom(SLICE, **rows), "at most 2,147,483,648"),
            (dicom(SLICE, PhotometricInterpretation="PALETTE COLOR"), "apply_color_lut"),
            (dicom(SLICE, uid.DeflatedExplicitVRLittleEndian), "another transfer syntax"),
            (good["nii"], "."),
        ],
        "nii": [
            (good["nii"].replace(b"n+1", b"ni1"), "in another file"),
            (bytes(wide), "at most 2,147,483,648"),
            (b"hello", "neither DICOM nor NIfTI"),
        ],
    }
    for suffix, data in good.items():
        cut = [(data[:length], ".") for length in (0, 3, len(data) // 2, len(data) - 1)]
        for number, (bad, words) in enumerate(cut + several.get(suffix, [])):
            root = put(tmp_path / f"{suffix}{number}", {f"a.{suffix}": bad})
            if suffix == "dcm" and bad is good["nii"]:
                assert read_volume(bad).values.shape == (4, 3, 2)  # by its first bytes
                continue
            refused(SampleError, "file is damaged", convert, root, tmp_path / "out")
            error = refused(ValueError, words, read_volume, bad)
            assert error is not None
    for data in good.values():
        for at in range(0, len(data), 7):
            flipped = bytearray(data)
            flipped[at] ^= 0xFF
            with contextlib.suppress(ValueError, MissingLibraryError):
                read_volume(bytes(flipped))


def test_scans_that_need_a_library_say_which(tmp_path, monkeypatch):
    root = put(tmp_path / "d", {"a.dcm": dicom(SLICE, uid.JPEGLosslessSV1)})
    refused(MissingLibraryError, "JPEG Lossless", convert, root, tmp_path / "out")
    for name, extra, data in (
        ("pydicom", "dicom", dicom(SLICE)),
        ("nibabel", "nifti", nifti(VOLUME)),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        error = refused(MissingLibraryError, f"needs {name}", read_volume, data)
        assert error.fix == f'pip install "shardkit[{extra}]"'


def test_scans_beside_their_masks_are_no_classes_and_a_file_is_no_dataset(tmp_path):
    root = put(tmp_path / "task", {f"{d}/a.nii": nifti(VOLUME) for d in ("imagesTr", "labelsTr")})
    error = refused(UsageError, "annotations or masks", convert, root, tmp_path / "out")
    assert str(root / "imagesTr") in error.fix
    unnamed = put(tmp_path / "unnamed", {"IM0001": dicom(SLICE)})
    assert "name them *.dcm" in refused(SourceError, "no images", opened, unnamed).fix
    error = refused(
        FormatError, "a single volume", convert, root / "imagesTr/a.nii", tmp_path / "o"
    )
    assert str(root / "imagesTr") in error.fix


# --- folders of .npz -----------------------------------------------------------------------------
def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def test_a_folder_of_npz_has_a_sample_for_each_file(tmp_path):
    two = {"image": np.asfortranarray(VOLUME), "mask": VOLUME > 9}
    root = put(tmp_path / "d", {f"{c}/{n}.npz": npz(**two) for c in ("cat", "dog") for n in (1, 2)})
    put(root, {"dog/2.npz": npz(**two, spacing=np.ones(3))})
    result = verified(root, tmp_path / "out")
    assert result.ignored == {"array 'spacing' that the first file lacks": 1}
    assert "each .npz file is a sample; to take rows as samples, convert one file" in result.notes
    with shardkit.open(tmp_path / "out") as dataset:
        assert list(dataset.schema) == ["image", "mask", "label"]
        assert dataset[3]["__key__"] == "dog/2"
        np.testing.assert_array_equal(dataset[3]["image"], VOLUME, strict=True)
        np.testing.assert_array_equal(dataset[3]["mask"], VOLUME > 9, strict=True)
    single = put(tmp_path / "s", {f"{n}.npz": npz(any=VOLUME + n) for n in (1, 2)})
    assert dict(one(single).schema) == {"array": Array()}
    np.testing.assert_array_equal(one(single)[1]["array"], VOLUME + 2, strict=True)
    put(single, {"3.npz": npz(image=VOLUME, mask=VOLUME)})
    error = refused(SampleError, "is damaged, or of a kind", convert, single, tmp_path / "other")
    assert error.found == "no array 'array', which the first file has"


def test_npz_that_may_be_rows_or_hide_a_label_or_are_damaged_are_refused(tmp_path):
    rows = npz(x=np.zeros((9, 4)), y=np.zeros(9))
    root = put(tmp_path / "rows", {f"{n}.npz": rows for n in (1, 2)})
    refused(UsageError, "several files of arrays", opened, root)
    named = {
        f"{c}/{n}.npz": npz(image=VOLUME, label=np.ones(2)) for c in ("cat", "dog") for n in (1, 2)
    }
    refused(SourceError, "an array 'label'", opened, put(tmp_path / "label", named))
    good = npz(a=VOLUME, b=VOLUME)
    for number, bad in enumerate((good[:40], good[:-30], b"", npz(a=np.array([None])))):
        root = put(tmp_path / f"{number}", {"1.npz": good, "2.npz": bad})
        refused(SampleError, "is damaged, or of a kind", convert, root, tmp_path / "out")
