"""Folders for Hugging Face datasets: the contract, and what datasets itself makes of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import PIL.Image
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
import shardkit.stream
from shardkit.errors import SampleError
from shardkit.formats import get_format
from shardkit.formats.arrow.columns import features
from shardkit.formats.base import ShardSpec
from shardkit.inspection import inspect
from shardkit.manifest import File, Manifest, Shard
from shardkit.schema import (
    Array,
    Audio,
    Bytes,
    Float,
    Image,
    Images,
    Int,
    Json,
    Schema,
    Text,
    Video,
)
from shardkit.testing import (
    EVERYTHING,
    OPTIONAL,
    FormatContract,
    everything,
    make_audio,
    make_image,
    make_video,
    write_shard,
)
from shardkit.transforms import Decode

HF = get_format("hf")
CLASSES = ("cat", "dog", "a name\nwith Ä")


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The library, with its caches in the test's folder and no way to a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


class TestHf(FormatContract):
    tested = get_format("hf")
    provides = OPTIONAL

    def independent_keys(self, path: Path) -> list[str]:
        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
            return list(stream.read_all().column("__key__").to_pylist())


def saved(folder: Path, schema: Schema, shards: list[list[dict[str, Any]]]) -> Path:
    """A folder as a conversion to `hf` leaves it."""
    folder.mkdir(parents=True)
    made = []
    for number, samples in enumerate(shards):
        path = folder / f"{HF.shard_stem(number, len(shards))}.arrow"
        writer = HF.create(path, ShardSpec(schema, classes={"label": CLASSES}))
        for sample in samples:
            assert writer.write(schema.check(sample))
        writer.close()
        made.append(Shard(File(path.name, path.stat().st_size, str(number)), len(samples)))
    manifest = Manifest("hf", HF.layout(schema), tuple(made), class_names={"label": CLASSES})
    names = [path.name for path in HF.complete(folder, manifest)]
    assert sorted(names) == ["dataset_info.json", "state.json"]
    return folder


def labelled(number: int) -> dict[str, Any]:
    return {**everything(number), "label": number % 3}


def test_load_from_disk_gives_features_bytes_and_images(datasets: Any, tmp_path: Path) -> None:
    samples = [labelled(n) for n in range(7)]
    folder = saved(tmp_path / "set", EVERYTHING, [samples[:3], [], samples[3:]])
    found = datasets.load_from_disk(str(folder))
    assert len(found) == 7
    assert found.features["image"] == datasets.Image()
    assert found.features["label"] == datasets.ClassLabel(names=list(CLASSES))
    assert found.features["points"] == datasets.List(
        datasets.List(datasets.Value("float32"), length=2)
    )
    for row, sample in zip(found, samples, strict=True):
        with PIL.Image.open(io.BytesIO(sample["image"])) as expected:
            np.testing.assert_array_equal(np.asarray(row["image"]), np.asarray(expected))
    undecoded = found.cast_column("image", datasets.Image(decode=False))
    for row, sample in zip(undecoded, samples, strict=True):
        assert row.pop("image") == {"bytes": sample["image"], "path": None}
        assert json.loads(row.pop("about")) == sample["about"]
        assert row.pop("points") == sample["points"].tolist()
        assert row.pop("caption") == sample.get("caption")
        assert row == {name: sample[name] for name in row}


def test_the_two_files_are_those_that_datasets_writes(datasets: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path / "ours", EVERYTHING, [[labelled(n) for n in range(4)]])
    datasets.load_from_disk(str(folder)).save_to_disk(str(tmp_path / "theirs"))
    for name in ("dataset_info.json", "state.json"):
        ours, theirs = ((tmp_path / side / name).read_text() for side in ("ours", "theirs"))
        fingerprint = json.loads(theirs).get("_fingerprint", "")
        own = json.loads(ours).get("_fingerprint", "")
        assert len(fingerprint) == len(own)
        # What datasets calls List since version 4 is Sequence to all versions.
        assert ours.replace(own, fingerprint).replace('"Sequence"', '"List"') == theirs


@pytest.mark.parametrize("name", ["arrow", "parquet", "hf"])
def test_features_are_of_the_types_that_every_version_of_datasets_knows(
    tmp_path: Path, name: str
) -> None:
    """Those of datasets 2.0, whose `Features.from_dict` looks a type up by its name."""
    kinds = {"tokens": Array("<i4", (None,)), "box": Array("<f4", (4,))}
    schema = Schema({**EVERYTHING, **kinds, "big": Array("<f4", (2, 3))})
    path = tmp_path / "s"
    get_format(name).create(path, ShardSpec(schema, classes={"label": CLASSES})).close()
    opener: Any = {"arrow": pa.ipc.open_file, "parquet": pq.ParquetFile, "hf": pa.ipc.open_stream}
    with opener[name](path) as file:
        columns = file.schema_arrow if name == "parquet" else file.schema
    found = json.loads(columns.metadata[b"huggingface"])["info"]["features"]
    assert list(found) == ["__key__", *schema]
    assert types_of(found) == {"Value", "Sequence", "ClassLabel", "Image"}


def test_the_features_are_those_that_three_versions_of_datasets_were_tried_with(
    datasets: Any,
) -> None:
    """`read` is what datasets 2.21, 3.6 and 5.2 made of `written`; the installed one is asked."""
    stored = json.loads((Path(__file__).parent / "bytes/arrow/features.json").read_text())
    kinds = {"box": Array("<f4", (4,)), "images": Images(), "fine": Int()}
    classes = {"label": ["cat", "dog"], "fine": ["a", "b", "c"]}
    assert features(Schema({**EVERYTHING, **kinds}), classes) == stored["written"]
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


def types_of(feature: Any) -> set[str]:
    if not isinstance(feature, dict):
        return set()
    own = {feature["_type"]} if isinstance(feature.get("_type"), str) else set()
    return own.union(*map(types_of, feature.values()))


def test_shards_that_tasks_made_together_load_from_disk(
    datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 500)
    monkeypatch.setattr("shardkit.sources.text.scan.RANGE", 400)
    lines = [f"line {number}, and so on" for number in range(300)]
    (tmp_path / "in.txt").write_text("\n".join(lines))
    out = tmp_path / "out"
    shardkit.convert(tmp_path / "in.txt", "hf", out, shard_size="16kB", workers=0)
    assert datasets.load_from_disk(str(out))["text"][:] == lines
    shards = [path.name for path in sorted(out.glob("*.arrow"))]
    assert len(shards) > 1
    assert shards[1] == f"data-00001-of-{len(shards):05d}" + ".arrow"
    assert HF.shard_stem(3, 12) == "data-00003-of-00012"


def row_of_theirs(number: int) -> dict[str, Any]:
    return {
        "image": {"bytes": make_image(number), "path": f"{number}.jpg"},
        "label": number % 2,
        "score": number / 2,
        "small": number,
        "text": f"text {number}",
        "blob": bytes([number]) * number,
        "vector": [float(number)] * number,
        "pair": [number, -number],
        "grid": [[number, 1, 2], [3, 4, 5]],
        "tags": ["x"] * number,
        "more": {"a": number, "b": None},
        "maybe": None if number % 2 else "there",
    }


def theirs(datasets: Any, count: int = 10) -> Any:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "score": datasets.Value("float32"),
            "small": datasets.Value("uint8"),
            "text": datasets.Value("string"),
            "blob": datasets.Value("binary"),
            "vector": datasets.List(datasets.Value("float32")),
            "pair": datasets.List(datasets.Value("int64"), length=2),
            "grid": datasets.Array2D((2, 3), "uint8"),
            "tags": datasets.List(datasets.Value("string")),
            "more": {"a": datasets.Value("int32"), "b": datasets.Value("string")},
            "maybe": datasets.Value("string"),
        }
    )
    rows = [row_of_theirs(n) for n in range(count)]
    columns = {name: [row[name] for row in rows] for name in features}
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_that_datasets_saved_is_read(datasets: Any, tmp_path: Path, shards: int) -> None:
    theirs(datasets).save_to_disk(str(tmp_path / "set"), num_shards=shards)
    with shardkit.open(tmp_path / "set") as found:
        assert found.format == "hf"
        assert found.classes == ("cat", "dog")
        assert dict(found.schema) == {
            "image": Image(), "label": Int(), "score": Float(), "small": Int(), "text": Text(),
            "blob": Bytes(), "vector": Array("<f4", (None,)), "pair": Array("<i8", (2,)),
            "grid": Array("|u1", (2, 3)), "tags": Json(), "more": Json(),
            "maybe": Text(optional=True),
        }  # fmt: skip
        assert len(found) == 10
        for number in range(10):
            sample = found[number]
            del sample["__key__"]
            expected = {n: v for n, v in row_of_theirs(number).items() if v is not None}
            expected["image"] = expected["image"]["bytes"]
            assert list(sample) == list(expected)
            for name, value in expected.items():
                is_array = name in ("vector", "pair", "grid")
                np.testing.assert_equal(sample[name], np.array(value) if is_array else value)
        assert len({found[n]["__key__"] for n in range(10)}) == 10


def test_a_cache_file_of_datasets_is_read(datasets: Any, tmp_path: Path) -> None:
    theirs(datasets, 3).map(lambda row: row, cache_file_name=str(tmp_path / "cache.arrow"))
    reader = HF.open(tmp_path / "cache.arrow")
    assert [reader[n]["image"] for n in range(3)] == [make_image(n) for n in range(3)]
    assert reader.layout["classes"] == {"label": ["cat", "dog"]}


def test_audio_and_video_have_their_features(datasets: Any, tmp_path: Path) -> None:
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
    shardkit.convert(tmp_path / "theirs", "wds", tmp_path / "tar", workers=0)
    shardkit.convert(tmp_path / "tar", "hf", tmp_path / "out", workers=0)
    found = datasets.load_from_disk(str(tmp_path / "out"))
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


@pytest.mark.parametrize("format", ["hf", "arrow", "parquet"])
def test_class_labels_and_lists_of_them_keep_their_names(
    datasets: Any, tmp_path: Path, format: str
) -> None:
    """As CIFAR-100 has two, and boxes lists: from datasets to shards of any format, and back."""
    label = datasets.ClassLabel(names=["cat", "dog", "ant"])
    kinds = {
        "fine_label": label,
        "n": datasets.Value("int64"),
        "coarse_label": datasets.ClassLabel(names=["mammal", "insect"]),
        "categories": datasets.Sequence(label),
    }
    rows = {"fine_label": [0, 1, 2], "n": [5, 6, 7], "coarse_label": [0, 0, 1]}
    rows["categories"] = [[0, 2], [], [1]]
    theirs = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    theirs.save_to_disk(str(tmp_path / "theirs"))
    fine = ("cat", "dog", "ant")
    names = {"fine_label": fine, "coarse_label": ("mammal", "insect"), "categories": fine}
    assert shardkit.open(tmp_path / "theirs").class_names == names
    shardkit.convert(tmp_path / "theirs", "wds", tmp_path / "tar", workers=0)
    shardkit.convert(tmp_path / "tar", format, tmp_path / "out", workers=0)
    about = inspect(tmp_path / "out")
    assert about["fields"]["coarse_label"]["class_names"] == ("mammal", "insect")
    assert about["fields"]["n"]["class_names"] is None
    if format == "hf":
        found = datasets.load_from_disk(str(tmp_path / "out"))
    else:
        files = sorted(map(str, (tmp_path / "out").glob(f"*.{format}")))
        found = datasets.load_dataset(format, data_files=files, split="train")
    assert {name: found.features[name] for name in kinds} == kinds
    assert {name: found[name][:] for name in rows} == rows


@pytest.mark.parametrize("format", ["hf", "arrow", "parquet", "lmdb"])
def test_lists_of_images_go_there_and_back(datasets: Any, tmp_path: Path, format: str) -> None:
    features = datasets.Features(
        {"images": datasets.Sequence(datasets.Image()), "maybe": datasets.List(datasets.Image())}
    )
    lists = [[make_image(1), make_image(2, "PNG")], [], [make_image(3)]]
    stored = [[{"bytes": image, "path": None} for image in images] for images in lists]
    rows = {"images": stored, "maybe": [None, stored[0], []]}
    source = datasets.Dataset.from_dict(rows, features=features)
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
    assert {name: back.features[name] for name in features} == features
    for row, images in zip(back, lists, strict=True):
        decoded = [np.asarray(image) for image in row["images"]]
        np.testing.assert_equal(
            decoded, [np.asarray(PIL.Image.open(io.BytesIO(i))) for i in images]
        )
    undecoded = datasets.Features(
        {"__key__": datasets.Value("string"), "images": datasets.List(datasets.Image(decode=False)),
         "maybe": datasets.List(datasets.Image(decode=False))}
    )  # fmt: skip
    assert back.cast(undecoded)["images"][:] == stored


def test_lists_of_images_in_parquet_of_datasets_and_others(datasets: Any, tmp_path: Path) -> None:
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
    with pytest.raises(shardkit.FormatError, match="no field can hold"):
        shardkit.open(tmp_path / "f.parquet")


def test_a_list_with_a_gap_or_a_link_names_its_sample(tmp_path: Path) -> None:
    stored, linked = {"bytes": make_image(1), "path": None}, {"bytes": None, "path": "a.jpg"}
    lists = [[stored], None, [linked], [None]]
    pq.write_table(pa.table({"x": lists}), tmp_path / "a.parquet")
    with shardkit.open(tmp_path / "a.parquet") as found:
        assert (found[0]["x"], "x" in found[1]) == ([make_image(1)], False)
        for position, message in {2: "not its bytes", 3: "list of images contains a null"}.items():
            with pytest.raises(SampleError, match=message) as error:
                found[position]
            assert error.value.where["position"] == position


def test_lists_of_images_elsewhere(tmp_path: Path) -> None:
    """What is not for them says so; the rest looks at each."""
    lists = [[make_image(1), make_image(2)], [make_image(3)[:-9]], []]
    samples = [{"pages": images} for images in lists]
    for format in ("wds", "beton", "megatron"):
        with pytest.raises(shardkit.FormatError):
            shardkit.convert(samples, format, tmp_path / format, workers=0)
    image = shardkit.ImageOptions(resize=8)
    with pytest.raises(shardkit.UsageError, match="not supported for lists of images"):
        shardkit.convert(samples, "hf", tmp_path / "resized", workers=0, image=image)
    result = shardkit.convert(samples, "hf", tmp_path / "out", workers=0, on_error="skip")
    assert (result.samples, result.errors) == (2, 1)
    about = inspect(tmp_path / "out", full=True, samples=1)
    assert about["images"]["pages"]["formats"] == {"jpeg": 2}
    assert about["fields"]["pages"]["stats"]["max"] == sum(map(len, samples[0]["pages"]))
    assert about["first"][0]["pages"].count("jpeg 8 x 6") == 2
    decode = {"pages": [Decode()]}
    with pytest.raises(shardkit.UsageError, match="for images"):
        shardkit.open(tmp_path / "out", transforms=decode)
    (batch,) = shardkit.stream.Loader(tmp_path / "out", batch_size=2, shuffle=False)
    assert batch["pages"] == [samples[0]["pages"], []]
    other = [samples[0] | {"__key__": "000000000"}, {"pages": [], "__key__": "000000002"}]
    other[0] = {**other[0], "pages": [make_image(1), make_image(3)]}
    report = shardkit.verify(tmp_path / "out", against=other)
    assert [problem.what for problem in report.problems] == ["a value differs from the source"]
    assert "image 1" in (report.problems[0].expected or "")


def test_shards_that_number_classes_differently_are_refused(tmp_path: Path) -> None:
    for name, classes in {"a": ["cat", "dog"], "b": ["dog", "cat"]}.items():
        writer = get_format("arrow").create(
            tmp_path / f"{name}.arrow",
            ShardSpec(Schema({"label": Int()}), classes={"label": classes}),
        )
        writer.write({"__key__": name, "label": 0})
        writer.close()
    with pytest.raises(shardkit.FormatError, match="differ between shards") as error:
        shardkit.open(tmp_path)
    assert error.value.found == "['dog', 'cat'] in b.arrow"


def test_images_that_lie_elsewhere_are_named(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(make_image(1))
    features = datasets.Features({"image": datasets.Image()})
    source = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.jpg")]}, features=features)
    with pa.OSFile(str(tmp_path / "linked.arrow"), "wb") as file:
        table = source.data.table
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    reader = HF.open(tmp_path / "linked.arrow")
    with pytest.raises(SampleError, match="not its bytes") as error:
        reader[0]
    assert str(tmp_path / "a.jpg") in (error.value.found or "")
    assert error.value.where["field"] == "image"
    source.save_to_disk(str(tmp_path / "embedded"))
    assert shardkit.open(tmp_path / "embedded")[0]["image"] == make_image(1)


def test_what_datasets_loads_of_ours_comes_back_equal(datasets: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path / "ours", EVERYTHING, [[labelled(n) for n in range(9)]])
    datasets.load_from_disk(str(folder)).save_to_disk(str(tmp_path / "theirs"), num_shards=2)
    ours, again = shardkit.open(folder), shardkit.open(tmp_path / "theirs")
    for number in range(9):
        for name, value in again[number].items():
            expected = ours[number][name]
            # What was JSON is text to datasets.
            np.testing.assert_equal(json.loads(value) if name == "about" else value, expected)


def test_class_names_that_a_class_label_cannot_have_are_left_out(
    datasets: Any, tmp_path: Path
) -> None:
    path = tmp_path / "data-00000-of-00001.arrow"
    writer = HF.create(
        path, ShardSpec(Schema({"label": Int()}), classes={"label": ["same", "same"]})
    )
    writer.write({"__key__": "a", "label": 1})
    writer.close()
    found = datasets.Dataset.from_file(str(path))
    assert found.features["label"] == datasets.Value("int64")
    assert HF.open(path).layout["classes"] == {"label": ["same", "same"]}


def test_arrays_of_every_number_type_load(datasets: Any, tmp_path: Path) -> None:
    kinds = ["<i2", "<i4", "<i8", "<u2", "<u4", "<u8", "|i1", "|u1", "<f2", "<f4", "<f8"]
    schema = Schema({f"a{n}": Array(kind, (None, 2)) for n, kind in enumerate(kinds)})
    sample = {"__key__": "a"}
    sample |= {name: np.ones((3, 2), kind.dtype) for name, kind in schema.items()}
    path = tmp_path / "data-00000-of-00001.arrow"
    write_shard(HF, path, schema, [sample]).close()
    found = datasets.Dataset.from_file(str(path))[0]
    for name in schema:
        assert found[name] == [[1, 1]] * 3


def test_a_folder_of_splits_by_the_library_is_a_source(tmp_path: Path, datasets: Any) -> None:
    columns = {"label": [1, 2], "text": ["a", "b"]}
    splits = {
        "train": datasets.Dataset.from_dict(columns),
        "val": datasets.Dataset.from_dict(columns),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "theirs")
    result = shardkit.convert(tmp_path / "theirs", "wds", tmp_path / "out", workers=0)
    assert {name: split.samples for name, split in result.splits.items()} == {"train": 2, "val": 2}
    with pytest.raises(shardkit.FormatError, match="one dataset per split") as error:
        shardkit.open(tmp_path / "theirs")
    assert "theirs/train" in str(error.value)
