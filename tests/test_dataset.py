"""`shardkit.open`: any index, any thread, any process, bounded files; and torch's DataLoader."""

from __future__ import annotations

import io
import pickle
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import shardkit
import shardkit.manifest
from shardkit.errors import DamagedError, FormatError, SampleError, UsageError
from shardkit.formats import FORMATS
from shardkit.opening import open_splits
from shardkit.testing import make_image
from tests.conftest import few, files_of, write_images

torch_data = pytest.importorskip("torch.utils.data", reason="torch is an extra")


KEYS = [f"class{c}/{n:03d}" for c in range(3) for n in range(10)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    source = write_images(root / "in", classes=3, each=10)
    shardkit.convert(source, "wds", root / "out", shard_samples=4, workers=0)
    return root / "out"


@pytest.fixture
def out(tmp_path, made):
    return Path(shutil.copytree(made, tmp_path / "out"))


def test_it_is_one_list_over_all_shards(out):
    with shardkit.open(out) as ds:
        assert len(ds) == 30
        assert ds.shards == 8
        assert ds.classes == ("class0", "class1", "class2")
        assert [sample["__key__"] for sample in ds] == KEYS
        assert ds[-1] == ds[29] == ds[np.int64(29)]
        assert ds[13] == {"__key__": "class1/003", "image": make_image(103), "label": 1}
        assert "30 samples in 8 shards" in repr(ds)
        for index in (30, -31):
            with pytest.raises(IndexError):
                ds[index]
        for asked in (1.5, None, [1, 2], (0, 1)):
            with pytest.raises(UsageError, match="by a whole number, a slice or a key") as caught:
                ds[asked]  # type: ignore[index]
            assert "select" in str(caught.value.fix)


def test_opening_reads_the_manifest_alone(out):
    for path in [*out.glob("*.tar"), *out.rglob("*.npy")]:
        path.rename(path.with_suffix(".away"))
    ds = shardkit.open(out)
    assert len(ds) == 30
    with pytest.raises(FileNotFoundError, match="cannot open the shard"):
        ds[0]


def test_a_single_shard_of_ours_knows_its_manifest(out):
    ds = shardkit.open(out / "shard-000003.tar")
    assert len(ds) == 4
    assert ds[1]["label"] == 1
    assert ds.classes == ("class0", "class1", "class2")


@pytest.mark.parametrize("what", ["folder", "shard", "splits"])
def test_opening_reads_each_manifest_once(tmp_path, out, what, monkeypatch):
    shardkit.convert(out, "wds", tmp_path / "split", split="train=0.5,val=0.5", workers=0)
    read, real = [], shardkit.manifest._from_json
    monkeypatch.setattr(
        shardkit.manifest, "_from_json", lambda data, path: read.append(path) or real(data, path)
    )
    if what == "splits":
        found = {name: len(ds) for name, ds in open_splits(tmp_path / "split").items()}
        assert found == {"train": 15, "val": 15}
        tops = [tmp_path / "split" / name for name in ("", "train", "val")]
        assert read == [top / "__shardkit__/manifest.json" for top in tops]
    else:
        path = out if what == "folder" else out / "shard-000000.tar"
        assert len(shardkit.open(path)) == (30 if what == "folder" else 4)
        assert read == [out / "__shardkit__/manifest.json"]


def test_foreign_shards_are_searched_once(tmp_path, monkeypatch):
    from shardkit.formats.wds import kept

    samples = [{"label": n} for n in range(20)]
    shardkit.convert(samples, "wds", tmp_path / "out", shard_samples=1, workers=0)
    (tmp_path / "out/__shardkit__/manifest.json").unlink()
    calls = []
    real = kept.scan
    monkeypatch.setattr(kept, "scan", lambda *args: (calls.append(args), real(*args))[1])
    ds = shardkit.open(tmp_path / "out")
    assert len(calls) == 20
    copy = pickle.loads(pickle.dumps(ds))
    for dataset in (ds, copy):
        assert [dataset[n]["cls"] for n in range(20)] == list(range(20))
    assert len(calls) == 20


def test_threads_share_a_dataset(out, monkeypatch):
    monkeypatch.setattr("shardkit.dataset._OPEN_SHARDS", 2)  # shards come and go all the time
    with shardkit.open(out) as ds:
        expected = [ds[n] for n in range(30)]
        order = np.random.default_rng(0).integers(0, 30, 600).tolist()
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(ds.__getitem__, order))
    assert found == [expected[n] for n in order]


def test_a_pickle_carries_paths_only(out):
    ds = shardkit.open(out)
    ds[0]
    data = pickle.dumps(ds)
    assert make_image(0) not in data
    assert pickle.loads(data)[17] == ds[17]


@pytest.mark.parametrize("method", few([None, "fork", "spawn"], None))
def test_torchs_dataloader_takes_it_as_it_is(out, method):
    ds = shardkit.open(out)
    by_key = {sample["__key__"]: sample for sample in ds}  # it is open, as often in training code
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method}
    loader = torch_data.DataLoader(ds, 8, shuffle=True, **(workers if method else {}))
    found = []
    for batch in loader:
        labels = batch["label"].tolist()
        for key, image, label in zip(batch["__key__"], batch["image"], labels, strict=True):
            assert by_key[key] == {"__key__": key, "image": image, "label": label}
            found.append(key)
    assert sorted(found) == KEYS


def test_a_shard_of_another_length_is_damaged(out):
    path = out / "shard-000001.tar"
    data = path.read_bytes()
    for changed in (data[:-512], data + b"\0" * 512):
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match="not as long as its manifest says") as error:
            shardkit.open(out)[5]
        assert error.value.where["path"] == path
        assert error.value.expected == f"{len(data):,} bytes"


def test_a_shard_that_no_manifest_describes_is_compared_with_what_it_was(out):
    path = out / "shard-000001.tar"
    dataset = shardkit.open(path.rename(out.with_name("alone.tar")))
    dataset.close()
    with dataset.shard_path(0).open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(DamagedError, match="not as long as when the dataset was opened"):
        dataset[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the manifest is damaged"),
        ('{"shardkit": 1}', "the manifest is damaged"),
        ('{"shardkit": 99}', "of another version"),
    ],
)
def test_a_damaged_manifest_is_named(out, text, message):
    (out / "__shardkit__/manifest.json").write_text(text)
    with pytest.raises((DamagedError, FormatError), match=message):
        shardkit.open(out)


def test_foreign_shards_that_disagree_about_a_field_give_its_bytes(tmp_path):
    for name, value in (("0.tar", b"1"), ("1.tar", b"cat")):
        with tarfile.open(tmp_path / name, "w") as tar:
            info = tarfile.TarInfo("a.cls")
            info.size = len(value)
            tar.addfile(info, io.BytesIO(value))
    ds = shardkit.open(tmp_path)
    assert ds.schema["cls"] == shardkit.Bytes()
    assert [sample["cls"] for sample in ds] == [b"1", b"cat"]


@pytest.mark.parametrize("folder", ["", "dataset", "tasks/000000"])
def test_unfinished_work_is_not_opened(out, folder):
    partial = out.with_name("x.partial")
    shutil.copytree(out, partial / folder)
    (partial / "job.json").write_text("{}")
    with pytest.raises(FormatError, match="unfinished conversion"):
        shardkit.open(partial / folder)
    shutil.rmtree(out)
    partial.rename(out.with_name("out.partial"))
    other = out.with_name("other")
    for use in (
        lambda: shardkit.open(out),
        lambda: shardkit.inspect(out),
        lambda: shardkit.diff(out, out),
        lambda: shardkit.convert(out, "wds", other, workers=0),
        lambda: shardkit.export(out, "files", other),
    ):
        with pytest.raises(FileNotFoundError) as error:
            use()
        assert "its conversion is unfinished: run the interrupted command" in str(error.value)


def test_a_lost_index_is_built_from_the_headers(out):
    expected = list(shardkit.open(out))
    for path in out.rglob("*.index.npy"):
        path.unlink()
    assert list(shardkit.open(out)) == expected


def test_an_index_that_lies_is_named(out):
    path = out / "__shardkit__/shard-000000.index.npy"
    index = np.load(path)
    for change in ("fewer", "beyond", "zero", "key"):
        changed = index.copy()
        if change == "fewer":
            changed = changed[:-1]
        elif change == "beyond":
            changed["image"]["offset"][0] = 10**9
        elif change == "zero":
            changed[0] = np.zeros((), changed.dtype)
        else:
            changed["__key__"]["offset"][0] = changed["image"]["offset"][0]
        np.save(path, changed)
        with pytest.raises((DamagedError, SampleError)) as error:
            shardkit.open(out)[0]
        assert error.value.where["path"] in (path, out / "shard-000000.tar")


def test_the_manifest_comes_back_as_it_was_written(out, tmp_path):
    (tmp_path / "copy").mkdir()
    shardkit.manifest.load(out).write(tmp_path / "copy/__shardkit__/manifest.json")
    path = "__shardkit__/manifest.json"
    assert files_of(tmp_path / "copy")[path] == files_of(out)[path]


def test_columns_of_two_types_in_a_folder_of_others_are_named(tmp_path):
    for name, value in (("a", 1), ("b", "x")):
        pyarrow.parquet.write_table(pyarrow.table({"v": [value]}), tmp_path / f"{name}.parquet")
    with pytest.raises(FormatError, match="differs between shards") as error:
        shardkit.open(tmp_path)
    assert error.value.found == "Int() in a.parquet, Text() in b.parquet"


def test_an_open_dataset_can_transform_its_samples(images, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    crop = {"image": shardkit.Resize((5, 4)), "label": float}
    dataset = shardkit.open(tmp_path / "out", transforms=crop)
    assert dataset[3]["image"].shape == (5, 4, 3)
    assert isinstance(dataset[3]["label"], float)
    assert np.array_equal(pickle.loads(pickle.dumps(dataset))[3]["image"], dataset[3]["image"])
    random = shardkit.open(tmp_path / "out", transforms={"label": _drawn})
    assert random[0]["label"] != random[0]["label"], "drawn anew whenever it is read"
    failing = shardkit.open(tmp_path / "out", transforms={"label": _fail})
    with pytest.raises(shardkit.SampleError, match="_fail") as caught:
        failing[2]
    assert caught.value.where["position"] == 2
    with pytest.raises(shardkit.UsageError, match="no field 'lable'"):
        shardkit.open(tmp_path / "out", transforms={"lable": float})


def _drawn(value: int, rng: Any) -> float:
    return float(rng.random())


def _fail(value: int) -> None:
    raise ValueError("no")


@pytest.mark.parametrize("name", ["__shardkit__", "__shardkit__/manifest.json"])
def test_what_stands_beside_the_shards_is_no_dataset(out, name):
    with pytest.raises(FormatError, match="but no samples") as error:
        shardkit.open(out / name)
    assert f"pass the dataset: {out}" in str(error.value.fix)


@pytest.mark.parametrize("format", ["wds", "lmdb"])
def test_datasets_of_one_file_in_a_folder_stay_datasets(tmp_path, format):
    suffix = FORMATS[format].suffixes[0]
    (tmp_path / "in").mkdir()
    for name in ("train", "val"):
        images = write_images(tmp_path / name, classes=2, kilobytes=1)
        shardkit.convert(images, format, tmp_path / f"in/{name}{suffix}", workers=0)
    found = open_splits(tmp_path / "in")
    assert list(found) == ["train", "val"]
    assert {dataset.classes for dataset in found.values()} == {("class0", "class1")}
    report = shardkit.verify(tmp_path / "in")
    assert report.sound
    assert not report.notes  # of missing checksums
    shardkit.convert(tmp_path / "in", "arrow", tmp_path / "out", workers=0)
    assert set(shardkit.open(tmp_path / "out/val").schema) == {"image", "label"}


def test_datasets_of_one_file_whose_labels_mean_something_else_are_not_mixed(images, tmp_path):
    (tmp_path / "in").mkdir()
    shardkit.convert(images, "wds", tmp_path / "in/a.tar", workers=0)
    shardkit.convert(images, "wds", tmp_path / "in/b.tar", workers=0)
    assert len(shardkit.open(tmp_path / "in")) == 2 * len(shardkit.open(tmp_path / "in/a.tar"))
    (images / "class0").rename(images / "zebra")
    shardkit.convert(images, "wds", tmp_path / "in/b.tar", workers=0, overwrite=True)
    with pytest.raises(FormatError, match="number their classes differently"):
        shardkit.open(tmp_path / "in")
