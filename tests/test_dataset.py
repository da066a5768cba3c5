"""`shardkit.open`: any index, any thread, any process, bounded files; and torch's DataLoader."""

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import shardkit
import shardkit.metadata.manifest
from shardkit.dataset.find import open_splits
from shardkit.errors import (
    DamagedError,
    FormatError,
    SampleError,
    ShardkitError,
    UsageError,
)
from shardkit.formats import FORMATS
from shardkit.formats.wds import remote_index_cache
from shardkit.stream import Loader
from shardkit.testing import make_image
from tests.conftest import few, write_images
from tests.test_unforeseen import write_tar

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


def test_it_is_one_list_over_all_shards(made):
    with shardkit.open(made) as ds:
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
                ds[asked]
            assert "select" in str(caught.value.fix)
        data = pickle.dumps(ds)
        assert make_image(0) not in data  # it carries paths only
        assert pickle.loads(data)[17] == ds[17]
    one = shardkit.open(made / "shard-000003.tar")
    assert (len(one), one[1]["label"], one.classes) == (4, 1, ds.classes)


def test_opening_reads_the_manifest_alone_and_a_lost_index_is_built_from_the_headers(out, tmp_path):
    path = "__shardkit__/manifest.json"
    shardkit.metadata.manifest.load(out).write(tmp_path / "copy" / path)
    assert (tmp_path / "copy" / path).read_bytes() == (out / path).read_bytes()
    for name in ("__shardkit__", "__shardkit__/manifest.json"):
        with pytest.raises(FormatError, match="but no samples") as error:
            shardkit.open(out / name)
        assert f"pass the dataset: {out}" in str(error.value.fix)
    expected = list(shardkit.open(out))
    for path in out.rglob("*.index.npy"):
        path.unlink()
    assert list(shardkit.open(out)) == expected
    for path in out.glob("*.tar"):
        path.unlink()
    ds = shardkit.open(out)
    assert len(ds) == 30
    with pytest.raises(FileNotFoundError, match="cannot open the shard"):
        ds[0]
    for text, message in (
        ("{", "the manifest is damaged"),
        ('{"shardkit": 1}', "the manifest is damaged"),
        ('{"shardkit": 99}', "of another version"),
    ):
        (out / "__shardkit__/manifest.json").write_text(text)
        with pytest.raises((DamagedError, FormatError), match=message):
            shardkit.open(out)


def test_opening_reads_each_manifest_once(tmp_path, out, monkeypatch):
    shardkit.convert(out, "wds", tmp_path / "split", split="train=0.5,val=0.5", workers=0)
    read, real = [], shardkit.metadata.manifest._from_json
    monkeypatch.setattr(
        shardkit.metadata.manifest,
        "_from_json",
        lambda data, path: read.append(path) or real(data, path),
    )
    found = {name: len(ds) for name, ds in open_splits(tmp_path / "split").items()}
    assert found == {"train": 15, "val": 15}
    tops = [tmp_path / "split" / name for name in ("", "train", "val")]
    assert read == [top / "__shardkit__/manifest.json" for top in tops]
    for path, samples in ((out, 30), (out / "shard-000000.tar", 4)):
        read.clear()
        assert len(shardkit.open(path)) == samples
        assert read == [out / "__shardkit__/manifest.json"]


def test_foreign_shards_are_searched_once(tmp_path, monkeypatch):
    samples = [{"label": n} for n in range(20)]
    shardkit.convert(samples, "wds", tmp_path / "out", shard_samples=1, workers=0)
    (tmp_path / "out/__shardkit__/manifest.json").unlink()
    calls, real = [], remote_index_cache.scan
    monkeypatch.setattr(
        remote_index_cache, "scan", lambda *args: (calls.append(args), real(*args))[1]
    )
    ds = shardkit.open(tmp_path / "out")
    for dataset in (ds, pickle.loads(pickle.dumps(ds))):
        assert len(calls) == 20
        assert [dataset[n]["cls"] for n in range(20)] == list(range(20))
    assert len(calls) == 20


def test_threads_share_a_dataset(out, monkeypatch):
    monkeypatch.setattr("shardkit.dataset.readers._MAX_OPEN", 2)  # shards come and go all the time
    with shardkit.open(out) as ds:
        expected = [ds[n] for n in range(30)]
        order = np.random.default_rng(0).integers(0, 30, 600).tolist()
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(ds.__getitem__, order))
    assert found == [expected[n] for n in order]


@pytest.mark.parametrize("method", few([None, "fork", "spawn"], None))
def test_torchs_dataloader_takes_it_as_it_is(out, method):
    ds = shardkit.open(out)
    by_key = {sample["__key__"]: sample for sample in ds}  # it is open, as often in training code
    workers = {"num_workers": 2, "multiprocessing_context": method}
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
    path.write_bytes(data)
    dataset = shardkit.open(path.rename(out.with_name("alone.tar")))  # which no manifest describes
    dataset.close()
    with dataset.shard_path(0).open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(DamagedError, match="not as long as when the dataset was opened"):
        dataset[0]


def test_foreign_shards_that_disagree_about_a_field_give_its_bytes_or_are_named(tmp_path):
    for folder in ("tars", "tables"):
        (tmp_path / folder).mkdir()
    for name, value, text in (("a", 1, b"1"), ("b", "x", b"cat")):
        write_tar(tmp_path / f"tars/{name}.tar", ("a.cls", text))
        table = pyarrow.table({"v": [value]})
        pyarrow.parquet.write_table(table, tmp_path / f"tables/{name}.parquet")
    ds = shardkit.open(tmp_path / "tars")
    assert ds.schema["cls"] == shardkit.Bytes()
    assert [sample["cls"] for sample in ds] == [b"1", b"cat"]
    with pytest.raises(FormatError, match="differs between shards") as error:
        shardkit.open(tmp_path / "tables")
    assert error.value.found == "Int() in a.parquet, Text() in b.parquet"


@pytest.mark.parametrize("folder", ["", "dataset", "tasks/000000"])
def test_unfinished_work_is_not_opened(out, folder):
    partial = out.with_name("x.partial")
    shutil.copytree(out, partial / folder)
    (partial / "job.json").write_text("{}")
    for there in ("job.json", "lock"):  # also while old work is removed from it
        for path in (partial / folder, partial / folder / "*.tar", partial / folder / "a.tar"):
            with pytest.raises(FormatError, match="unfinished conversion"):
                shardkit.open(path)
        (partial / there).replace(partial / "lock")
    (partial / "job.json").write_text('{"recipe": {}}')
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


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ('{"recipe": {}}', "it continues where it stopped"),
        ('{"export": "folder"}', "it starts over"),
        ('{"repair": true}', "verify --repair"),
        ("{", "run the interrupted command again"),
    ],
)
def test_unfinished_work_says_what_to_do(out, job, words):
    partial = out.with_name("new.partial")
    partial.mkdir()
    (partial / "job.json").write_text(job)
    for path in (partial, out.with_name("new")):
        with pytest.raises(ShardkitError) as error:
            shardkit.open(path)
        assert words in error.value.fix


def test_an_index_that_lies_is_named(out):
    path = out / "__shardkit__/shard-000000.index.npy"
    index = np.load(path)
    beyond, zero, key = index.copy(), index.copy(), index.copy()
    beyond["image"]["offset"][0] = 10**9
    zero[0] = np.zeros((), zero.dtype)
    key["__key__"]["offset"][0] = key["image"]["offset"][0]
    for changed in (index[:-1], beyond, zero, key):
        np.save(path, changed)
        with pytest.raises((DamagedError, SampleError)) as error:
            shardkit.open(out)[0]
        assert error.value.where["path"] in (path, out / "shard-000000.tar")


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


# --- any sequence of samples as a dataset: for loaders, and for what has no shards


SCHEMA = shardkit.Schema({"label": shardkit.Int(), "json": shardkit.Json()})
SAMPLES = [{"__key__": f"{n}", "label": n % 2, "json": [n]} for n in range(10)]


def test_a_list_of_samples_is_a_dataset(tmp_path):
    """A loader reads it as it reads shards."""
    names = {"label": ["even", "odd"]}
    dataset = shardkit.Dataset.from_sequence(SAMPLES, SCHEMA, class_names=names, size=99)
    assert list(dataset) == SAMPLES
    assert (dataset.schema, dataset.classes) == (SCHEMA, ("even", "odd"))
    assert (dataset.shards, dataset.extent(0)) == (1, (10, 99))
    assert pickle.loads(pickle.dumps(dataset))[3] == SAMPLES[3]
    dataset[3]["json"].append(4)
    assert SAMPLES[3]["json"] == [3]
    with pytest.raises(IndexError):
        dataset[10]
    with shardkit.create(tmp_path / "shards", to="wds", schema=SCHEMA) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    one, other = (
        list(Loader(source, batch_size=4, shuffle=True, seed=3))
        for source in (shardkit.Dataset.from_sequence(SAMPLES, SCHEMA), tmp_path / "shards")
    )
    for batch, stored in zip(one, other, strict=True):
        assert batch["__key__"] == stored["__key__"]
        assert np.array_equal(batch["label"], stored["label"])


def test_an_error_of_a_sequence_says_which_sample_and_blames_no_field():
    asked = []

    class Broken(list):
        raised = RuntimeError("my own bug")

        def __getitem__(self, index):
            asked.append(index)
            raise self.raised

    dataset = shardkit.Dataset.from_sequence(Broken(SAMPLES), SCHEMA)
    with pytest.raises(SampleError) as caught:
        dataset[4]
    assert caught.value.what == "the sequence raised RuntimeError: my own bug"
    assert caught.value.where == {"path": Path(), "position": 4}
    assert caught.value.expected is None
    assert caught.value.__cause__ is Broken.raised
    assert asked == [4]
    Broken.raised = SampleError("no such image", key="k")
    with pytest.raises(SampleError, match="no such image") as caught:
        dataset[4]
    assert caught.value.where == {"path": Path(), "position": 4, "key": "k"}
    Broken.raised = MemoryError()
    with pytest.raises(MemoryError):
        dataset[4]
    Broken.schema, Broken.raised = SCHEMA, OSError("gone")
    with pytest.raises(shardkit.ShardkitError, match="gone") as caught:
        shardkit.Dataset.from_sequence(Broken(SAMPLES))[4]
    assert caught.value.where["position"] == 4
    samples = [{"__key__": "a", "label": 1, "json": {1, 2}}]
    with pytest.raises(shardkit.ShardkitError) as caught:
        shardkit.Dataset.from_sequence(samples, SCHEMA)[0]
    assert (caught.value.where["key"], caught.value.where["field"]) == ("a", "json")


@pytest.mark.parametrize("format", ["wds", "lmdb"])
def test_datasets_of_one_file_in_a_folder_stay_datasets(tmp_path, format):
    suffix, folder = FORMATS[format].suffixes[0], tmp_path / "in"
    folder.mkdir()
    for name in ("train", "val"):
        images = write_images(tmp_path / name, classes=2, kilobytes=1)
        shardkit.convert(images, format, folder / f"{name}{suffix}", workers=0)
    found = open_splits(folder)
    assert list(found) == ["train", "val"]
    assert {dataset.classes for dataset in found.values()} == {("class0", "class1")}
    report = shardkit.verify(folder)
    assert report.sound
    assert not report.notes  # of missing checksums
    shardkit.convert(folder, "arrow", tmp_path / "out", workers=0)
    assert set(shardkit.open(tmp_path / "out/val").schema) == {"image", "label"}


def test_a_folder_of_shards_is_opened_whatever_the_manifest_above_it_says(tmp_path):
    for folder in ("below", "__shardkit__"):
        (tmp_path / "in" / folder).mkdir(parents=True)
    write_tar(tmp_path / "in/below/a.tar", ("a.txt", b"x"))
    (tmp_path / "in/__shardkit__/manifest.json").write_text('{"shardkit": 999}')
    assert len(shardkit.open(tmp_path / "in/below")) == 1


def test_datasets_of_one_file_whose_labels_mean_something_else_are_not_mixed(images, tmp_path):
    (tmp_path / "in").mkdir()
    shardkit.convert(images, "wds", tmp_path / "in/a.tar", workers=0)
    shardkit.convert(images, "wds", tmp_path / "in/b.tar", workers=0)
    assert len(shardkit.open(tmp_path / "in")) == 2 * len(shardkit.open(tmp_path / "in/a.tar"))
    (images / "class0").rename(images / "zebra")
    shardkit.convert(images, "wds", tmp_path / "in/b.tar", workers=0, overwrite=True)
    with pytest.raises(FormatError, match="number their classes differently"):
        shardkit.open(tmp_path / "in")
