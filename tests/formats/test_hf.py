"""Folders for Hugging Face datasets: the contract, and what datasets itself makes of them."""

import io
import json
from pathlib import Path

import numpy as np
import pandas
import PIL.Image
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit.stream
from shardkit import Array, Audio, Bytes, Float, Image, Images, Int, Json, Schema, Text, Video
from shardkit.errors import FormatError, SampleError, UsageError
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.formats.testing_samples import (
    everything,
    make_audio,
    make_image,
    make_video,
    write_shard,
)
from shardkit.inspection.inspect import inspect
from shardkit.testing import EVERYTHING, OPTIONAL, FormatContract
from shardkit.transforms import Decode
from tests.formats.refusals import refused

HF = get_format("hf")
CLASSES = ("cat", "dog", "a name\nwith Ä")


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """The library, with its caches in the test's folder and no way to a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


class TestHf(FormatContract):
    tested = get_format("hf")
    provides = OPTIONAL

    def independent_keys(self, path):
        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
            return list(stream.read_all().column("__key__").to_pylist())


def labelled(number):
    return {**everything(number), "label": number % 3}


def saved(folder, samples, **options):
    with shardkit.create(folder, "hf", EVERYTHING, classes=CLASSES, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def test_datasets_loads_features_bytes_and_images_which_come_back_equal(datasets, tmp_path):
    samples = [labelled(n) for n in range(7)]
    found = datasets.load_from_disk(str(saved(tmp_path / "set", samples, shard_samples=3)))
    assert len(found) == 7
    assert found.features["image"] == datasets.Image()
    assert found.features["label"] == datasets.ClassLabel(names=list(CLASSES))
    pair = datasets.List(datasets.Value("float32"), length=2)
    assert found.features["points"] == datasets.List(pair)
    undecoded = found.cast_column("image", datasets.Image(decode=False))
    for row, bare, sample in zip(found, undecoded, samples, strict=True):
        np.testing.assert_array_equal(np.asarray(row["image"]), pixels(sample["image"]))
        assert bare.pop("image") == {"bytes": sample["image"], "path": None}
        assert json.loads(bare.pop("about")) == sample["about"]
        assert bare.pop("points") == sample["points"].tolist()
        assert bare.pop("caption") == sample.get("caption")
        assert bare == {name: sample[name] for name in bare}
    found.save_to_disk(str(tmp_path / "theirs"), num_shards=2)
    for again, sample in zip(shardkit.open(tmp_path / "theirs"), samples, strict=True):
        again["about"] = json.loads(again["about"])  # what was JSON is text to datasets
        np.testing.assert_equal(again, sample)


def pixels(image):
    return np.asarray(PIL.Image.open(io.BytesIO(image)))


def test_the_two_files_are_those_that_datasets_writes(datasets, tmp_path):
    folder = saved(tmp_path / "ours", [labelled(n) for n in range(4)])
    datasets.load_from_disk(str(folder)).save_to_disk(str(tmp_path / "theirs"))
    for name in ("dataset_info.json", "state.json"):
        ours, theirs = ((tmp_path / side / name).read_text() for side in ("ours", "theirs"))
        own, other = (json.loads(text).get("_fingerprint", "") for text in (ours, theirs))
        assert len(own) == len(other)
        # What datasets calls List since version 4 is Sequence to all versions.
        assert ours.replace(own, other).replace('"Sequence"', '"List"') == theirs


def test_the_features_are_those_that_three_versions_of_datasets_were_tried_with(datasets, tmp_path):
    """`read` is what datasets 2.21, 3.6 and 5.2 made of `written`; the installed one is asked."""
    stored = json.loads((Path(__file__).parent / "bytes/arrow/features.json").read_text())
    kinds = {"box": Array("<f4", (4,)), "images": Images(), "fine": Int()}
    classes = {"label": ["cat", "dog"], "fine": ["a", "b", "c"]}
    spec = ShardSpec(Schema({**EVERYTHING, **kinds}), classes=classes)
    openers = {"arrow": pa.ipc.open_file, "parquet": pq.ParquetFile, "hf": pa.ipc.open_stream}
    for name, opener in openers.items():
        get_format(name).create(tmp_path / name, spec).close()
        with opener(tmp_path / name) as file:
            columns = file.schema_arrow if name == "parquet" else file.schema
        found = json.loads(columns.metadata[b"huggingface"])["info"]["features"]
        assert found == stored["written"]
    assert [version[:3] for version in stored["read"]] == ["2.2", "3.6", "5.2"]
    for version, read in stored["read"].items():
        assert list(read) == list(stored["written"]), version
        for name, kind in {"label": "ClassLabel", "fine": "ClassLabel", "image": "Image"}.items():
            assert read[name].startswith(kind), version
        for name in ("images", "box", "points"):
            assert read[name].startswith(("Sequence(", "List(")), version
        assert "Image(" in read["images"]
    installed = datasets.Features.from_dict(stored["written"])
    assert installed["images"] == datasets.Sequence(datasets.Image())
    assert installed["fine"].names == ["a", "b", "c"]


def columns_of_theirs(datasets):
    """Of each column its feature, its type to us, and the value of a row."""
    value, lists = datasets.Value, datasets.List
    struct, grid = {"a": value("int32"), "b": value("string")}, Array("|u1", (2, 3))
    return {
        "image": (datasets.Image(), Image(), lambda n: {"bytes": make_image(n), "path": "x.jpg"}),
        "label": (datasets.ClassLabel(names=["cat", "dog"]), Int(), lambda n: n % 2),
        "score": (value("float32"), Float(), lambda n: n / 2),
        "small": (value("uint8"), Int(), lambda n: n),
        "text": (value("string"), Text(), lambda n: f"text {n}"),
        "blob": (value("binary"), Bytes(), lambda n: bytes([n]) * n),
        "vector": (lists(value("float32")), Array("<f4", (None,)), lambda n: [float(n)] * n),
        "pair": (lists(value("int64"), length=2), Array("<i8", (2,)), lambda n: [n, -n]),
        "grid": (datasets.Array2D((2, 3), "uint8"), grid, lambda n: [[n, 1, 2]] * 2),
        "tags": (lists(value("string")), Json(), lambda n: ["x"] * n),
        "more": (struct, Json(), lambda n: {"a": n, "b": None}),
        "maybe": (value("string"), Text(optional=True), lambda n: None if n % 2 else "there"),
    }


def theirs(datasets, count=10):
    columns = columns_of_theirs(datasets)
    rows = {name: [value(n) for n in range(count)] for name, (_, _, value) in columns.items()}
    kinds = datasets.Features({name: feature for name, (feature, _, _) in columns.items()})
    return datasets.Dataset.from_dict(rows, features=kinds)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_that_datasets_saved_and_a_file_of_its_cache_are_read(datasets, tmp_path, shards):
    theirs(datasets).save_to_disk(str(tmp_path / "set"), num_shards=shards)
    columns = columns_of_theirs(datasets)
    with shardkit.open(tmp_path / "set") as found:
        assert found.format == "hf"
        assert found.classes == ("cat", "dog")
        assert dict(found.schema) == {name: kind for name, (_, kind, _) in columns.items()}
        assert len({sample["__key__"] for sample in found}) == len(found) == 10
        for number in range(10):
            expected = {name: value(number) for name, (_, _, value) in columns.items()}
            expected["image"] = expected["image"]["bytes"]
            expected = {name: value for name, value in expected.items() if value is not None}
            sample = found[number]
            assert list(sample) == ["__key__", *expected]
            for name, value in expected.items():
                is_array = isinstance(columns[name][1], Array)
                np.testing.assert_equal(sample[name], np.array(value) if is_array else value)
    theirs(datasets, 3).map(lambda row: row, cache_file_name=str(tmp_path / "cache.arrow"))
    reader = HF.open(tmp_path / "cache.arrow")
    assert [reader[n]["image"] for n in range(3)] == [make_image(n) for n in range(3)]
    assert reader.layout["classes"] == {"label": ["cat", "dog"]}


def test_audio_and_video_have_their_features(datasets, tmp_path):
    """From datasets to shards, and back: bytes and features are the same."""
    kinds = {"speech": datasets.Audio(sampling_rate=16_000), "clip": datasets.Video()}
    values = {"speech": make_audio(1), "clip": make_video(2)}
    rows = {name: [{"bytes": value, "path": "x"}] for name, value in values.items()}
    # Not by from_dict: to encode sound it wants a library that decodes it.
    table = pa.table(rows, schema=datasets.Features(kinds).arrow_schema)
    theirs = datasets.Dataset(datasets.table.InMemoryTable(table))
    theirs.save_to_disk(str(tmp_path / "theirs"))
    theirs.to_parquet(str(tmp_path / "theirs.parquet"))
    for source in (tmp_path / "theirs", tmp_path / "theirs.parquet"):
        assert dict(shardkit.open(source).schema) == {"speech": Audio(), "clip": Video()}
    found = datasets.load_from_disk(str(by_tars(tmp_path / "theirs", "hf")))
    # At which rate datasets decodes is no property of the bytes.
    assert found.features["speech"] == datasets.Audio()
    assert found.features["clip"] == kinds["clip"]
    assert found.cast_column("speech", kinds["speech"]).features["speech"] == kinds["speech"]
    row = found.cast_column("speech", datasets.Audio(sampling_rate=8000, decode=False))
    row = row.cast_column("clip", datasets.Video(decode=False))[0]
    assert {name: row[name]["bytes"] for name in kinds} == values
    linked = [{"bytes": None, "path": "/elsewhere/x.wav"}]
    table = table.set_column(0, "speech", pa.array(linked, table.schema.field(0).type))
    pq.write_table(table, tmp_path / "l.parquet")
    with pytest.raises(SampleError, match="only the path of a file"):
        shardkit.open(tmp_path / "l.parquet")[0]


def by_tars(source, format):
    """What becomes of a dataset in a format, by way of TARs."""
    shardkit.convert(source, "wds", source.with_name("tar"), workers=0)
    shardkit.convert(source.with_name("tar"), format, source.with_name("out"), workers=0)
    return source.with_name("out")


@pytest.mark.parametrize("format", ["hf", "arrow", "parquet"])
def test_class_labels_and_lists_of_them_keep_their_names(datasets, tmp_path, format):
    """As CIFAR-100 has two, and boxes lists: from datasets to shards of any format, and back."""
    label = datasets.ClassLabel(names=["cat", "dog", "ant"])
    kinds = {"fine_label": label, "n": datasets.Value("int64")}
    kinds["coarse_label"] = datasets.ClassLabel(names=["mammal", "insect"])
    kinds["categories"] = datasets.Sequence(label)
    rows = {"fine_label": [0, 1, 2], "n": [5, 6, 7], "coarse_label": [0, 0, 1]}
    rows["categories"] = [[0, 2], [], [1]]
    theirs = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    theirs.save_to_disk(str(tmp_path / "theirs"))
    fine, coarse = ("cat", "dog", "ant"), ("mammal", "insect")
    names = {"fine_label": fine, "coarse_label": coarse, "categories": fine}
    assert shardkit.open(tmp_path / "theirs").class_names == names
    out = by_tars(tmp_path / "theirs", format)
    about = inspect(out)["fields"]
    assert (about["coarse_label"]["class_names"], about["n"]["class_names"]) == (coarse, None)
    if format == "hf":
        found = datasets.load_from_disk(str(out))
    else:
        files = sorted(map(str, out.glob(f"*.{format}")))
        found = datasets.load_dataset(format, data_files=files, split="train")
    assert {name: found.features[name] for name in kinds} == kinds
    assert {name: found[name][:] for name in rows} == rows


@pytest.mark.parametrize("format", ["hf", "arrow", "parquet", "lmdb"])
def test_lists_of_images_go_there_and_back(datasets, tmp_path, format):
    lists_of = datasets.List
    kinds = {"images": datasets.Sequence(datasets.Image()), "maybe": lists_of(datasets.Image())}
    lists = [[make_image(1), make_image(2, "PNG")], [], [make_image(3)]]
    stored = [[{"bytes": image, "path": None} for image in images] for images in lists]
    rows = {"images": stored, "maybe": [None, stored[0], []]}
    source = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    source.save_to_disk(str(tmp_path / "theirs"))
    shardkit.convert(tmp_path / "theirs", format, tmp_path / "ours", workers=0)
    shardkit.convert(tmp_path / "ours", "hf", tmp_path / "back", workers=0)
    for folder in ("theirs", "ours", "back"):
        with shardkit.open(tmp_path / folder) as found:
            assert dict(found.schema) == {"images": Images(), "maybe": Images(optional=True)}
            assert [found[n]["images"] for n in range(3)] == lists
            assert [found[n].get("maybe") for n in range(3)] == [None, lists[0], []]
    assert shardkit.verify(tmp_path / "back", against=tmp_path / "theirs", decode=True).sound
    back = datasets.load_from_disk(str(tmp_path / "back"))
    assert {name: back.features[name] for name in kinds} == kinds
    for row, images in zip(back, lists, strict=True):
        np.testing.assert_equal([*map(np.asarray, row["images"])], [*map(pixels, images)])
    undecoded = dict.fromkeys(kinds, lists_of(datasets.Image(decode=False)))
    undecoded = datasets.Features({"__key__": datasets.Value("string"), **undecoded})
    assert back.cast(undecoded)["images"][:] == stored


def test_lists_of_images_in_parquet_of_datasets_and_others(datasets, tmp_path):
    """With Hugging Face's metadata, or by their form and first image without."""
    images = [[make_image(1), make_image(2)], [make_image(3)]]
    stored = [[{"bytes": data, "path": "x.jpg"} for data in images_] for images_ in images]
    features = datasets.Features({"x": datasets.Sequence(datasets.Image())})
    source = datasets.Dataset.from_dict({"x": stored}, features=features)
    source.to_parquet(str(tmp_path / "a.parquet"))
    pq.write_table(source.data.table.replace_schema_metadata(None), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": images}), tmp_path / "c.parquet")
    pandas.DataFrame({"x": images}).to_feather(tmp_path / "d.feather")
    polars.DataFrame({"x": images}).write_ipc(tmp_path / "e.arrow")
    for path in sorted(tmp_path.glob("*.*")):
        with shardkit.open(path) as found:
            assert dict(found.schema) == {"x": Images()}, path
            assert [found[n]["x"] for n in range(2)] == images
    pq.write_table(pa.table({"x": [[b"no image"]]}), tmp_path / "f.parquet")
    with pytest.raises(FormatError, match="no field can hold"):
        shardkit.open(tmp_path / "f.parquet")
    linked = {"bytes": None, "path": "a.jpg"}
    pq.write_table(pa.table({"x": [stored[1], None, [linked], [None]]}), tmp_path / "g.parquet")
    with shardkit.open(tmp_path / "g.parquet") as found:
        assert (found[0]["x"], "x" in found[1]) == ([make_image(3)], False)
        for position, message in {2: "not its bytes", 3: "list of images contains a null"}.items():
            with refused(SampleError, message, position=position):
                found[position]


def test_lists_of_images_elsewhere(tmp_path):
    """What is not for them says so; the rest looks at each."""
    lists = [[make_image(1), make_image(2)], [make_image(3)[:-9]], []]
    samples = [{"pages": images} for images in lists]
    for format in ("wds", "beton", "megatron"):
        with pytest.raises(FormatError):
            shardkit.convert(samples, format, tmp_path / format, workers=0)
    image = shardkit.ImageOptions(resize=8)
    with pytest.raises(UsageError, match="not supported for lists of images"):
        shardkit.convert(samples, "hf", tmp_path / "resized", workers=0, image=image)
    result = shardkit.convert(samples, "hf", tmp_path / "out", workers=0, on_error="skip")
    assert (result.samples, result.errors) == (2, 1)
    about = inspect(tmp_path / "out", full=True, samples=1)
    assert about["media"]["pages"]["formats"] == {"jpeg": 2}
    assert about["fields"]["pages"]["stats"]["max"] == sum(map(len, lists[0]))
    assert about["first"][0]["pages"].count("jpeg 8 x 6") == 2
    with pytest.raises(UsageError, match="for images"):
        shardkit.open(tmp_path / "out", transforms={"pages": [Decode()]})
    (batch,) = shardkit.stream.Loader(tmp_path / "out", batch_size=2, shuffle=False)
    assert batch["pages"] == [lists[0], []]
    other = [{"pages": [make_image(1), make_image(3)], "__key__": "000000000"}]
    other.append({"pages": [], "__key__": "000000002"})
    (problem,) = shardkit.verify(tmp_path / "out", against=other).problems
    assert problem.what == "a value differs from the source"
    assert "image 1" in problem.expected


def test_classes_that_shards_number_differently_or_a_class_label_cannot_have(datasets, tmp_path):
    for name, classes in {"a": ["cat", "dog"], "b": ["dog", "cat"]}.items():
        with_label(tmp_path / f"{name}.arrow", "arrow", classes)
    with refused(FormatError, "differ between shards", found="['dog', 'cat'] in b.arrow"):
        shardkit.open(tmp_path)
    path = with_label(tmp_path / "data-00000-of-00001.arrow", "hf", ["same", "same"])
    found = datasets.Dataset.from_file(str(path))
    assert found.features["label"] == datasets.Value("int64")
    assert HF.open(path).layout["classes"] == {"label": ["same", "same"]}


def with_label(path, format, classes):
    spec = ShardSpec(Schema({"label": Int()}), classes={"label": classes})
    writer = get_format(format).create(path, spec)
    writer.write({"__key__": "a", "label": 1})
    writer.close()
    return path


def test_images_that_lie_elsewhere_are_named(datasets, tmp_path):
    (tmp_path / "a.jpg").write_bytes(make_image(1))
    features = datasets.Features({"image": datasets.Image()})
    source = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.jpg")]}, features=features)
    table = source.data.table
    with pa.ipc.new_stream(tmp_path / "linked.arrow", table.schema) as stream:
        stream.write_table(table)
    with refused(SampleError, "not its bytes", says=str(tmp_path / "a.jpg"), field="image"):
        HF.open(tmp_path / "linked.arrow")[0]
    source.save_to_disk(str(tmp_path / "embedded"))
    assert shardkit.open(tmp_path / "embedded")[0]["image"] == make_image(1)


def test_arrays_of_every_number_type_load(datasets, tmp_path):
    kinds = ["<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "|i1", "|u1", "<f2", "<f4", "<f8"]
    schema = Schema({f"a{n}": Array(kind, (None, 2)) for n, kind in enumerate(kinds)})
    sample = {name: np.ones((3, 2), kind.dtype) for name, kind in schema.items()}
    path = tmp_path / "data-00000-of-00001.arrow"
    write_shard(HF, path, schema, [{"__key__": "a", **sample}]).close()
    found = datasets.Dataset.from_file(str(path))[0]
    assert {name: found[name] for name in schema} == dict.fromkeys(schema, [[1, 1]] * 3)


def test_a_folder_of_splits_by_the_library_is_a_source(tmp_path, datasets):
    some = datasets.Dataset.from_dict({"label": [1, 2], "text": ["a", "b"]})
    datasets.DatasetDict({"train": some, "val": some}).save_to_disk(tmp_path / "theirs")
    result = shardkit.convert(tmp_path / "theirs", "wds", tmp_path / "out", workers=0)
    assert {name: split.samples for name, split in result.splits.items()} == {"train": 2, "val": 2}
    with refused(FormatError, "one dataset per split", says="theirs/train"):
        shardkit.open(tmp_path / "theirs")
