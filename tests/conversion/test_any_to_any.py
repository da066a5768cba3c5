"""C4: from every format to every other and back, with equal samples and no codec called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.sample import JsonText, Sample
from shardkit.schema import Audio, Video
from shardkit.sources.dataset import DatasetSource
from shardkit.testing import (
    EVERYTHING,
    any_samples,
    assert_same,
    everything,
    make_audio,
    make_image,
    make_video,
)
from tests.conftest import IMAGE_FORMATS, examples, few

NAMES = IMAGE_FORMATS
NAMELESS = (
    "wds",
    "tfrecord",
    "array_record",
)  # whose shards by themselves have no names of classes
# By default those with TAR.
PAIRS = [
    pytest.param(one, other, marks=[] if "wds" in (one, other) else pytest.mark.large)
    for one in NAMES
    for other in NAMES
]
# FFCV has JPEG and raw pixels alone: other images are re-encoded (tests/formats/test_beton.py).
ONLY_JPEG = {"beton"}


def write(out: Path, format: str, samples: list[Sample]) -> Path:
    with shardkit.create(out, format, EVERYTHING) as writer:
        for sample in samples:
            writer.write(sample)
    return out


def assert_holds(path: Path, samples: list[Sample]) -> None:
    with shardkit.open(path) as dataset:
        assert dict(dataset.schema) == dict(EVERYTHING)
        assert len(dataset) == len(samples)
        for found, expected in zip(dataset, samples, strict=True):
            assert_same(found, expected)


@pytest.fixture(autouse=True)
def no_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever decodes or encodes an image ends the test."""

    def called(*args: object, **options: object) -> None:
        raise AssertionError("a codec ran")

    import PIL.Image
    import simplejpeg

    for module, names in (
        (simplejpeg, ("decode_jpeg", "encode_jpeg")),
        (PIL.Image.Image, ("load", "tobytes")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, called)


JPEGS = [make_image(number) for number in range(10)]
MIXED = [make_image(number, format) for number in range(4) for format in ("JPEG", "PNG", "WEBP")]
FIFTY = [everything(number) for number in range(50)]


def with_image(sample: Sample, images: list[bytes], number: int) -> Sample:
    return {**sample, "image": images[number % len(images)]}


def test_audio_and_video_through_every_format(tmp_path: Path) -> None:
    schema = {"audio": Audio(), "video": Video(optional=True), "clip": Audio(optional=True)}
    samples: list[Sample] = [
        {"__key__": "a/1", "audio": make_audio(1), "video": make_video(1)},
        {"__key__": "a/2", "audio": make_audio(2, 44100), "clip": make_audio(3)},
    ]
    path = tmp_path / "first"
    with shardkit.create(path, NAMES[0], schema) as writer:
        for sample in samples:
            writer.write(sample)
    for format in (*NAMES[1:], NAMES[0]):
        path, source = tmp_path / format, path
        shardkit.convert(source, format, path, workers=0)
        with shardkit.open(path) as dataset:
            assert dict(dataset.schema) == schema
            for found, expected in zip(dataset, samples, strict=True):
                assert_same(found, expected)
        assert shardkit.verify(path, against=source).sound


@pytest.mark.parametrize(("one", "other"), PAIRS)
@settings(max_examples=min(examples(2), 6), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_there_and_back_gives_equal_samples(
    tmp_path_factory: pytest.TempPathFactory, one: str, other: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    images = JPEGS if ONLY_JPEG & {one, other} else MIXED
    drawn = st.lists(any_samples_without_image(), max_size=4, unique_by=lambda s: s["__key__"])
    samples = [with_image(s, images, n) for n, s in enumerate(data.draw(drawn))]
    write(folder / "a", one, samples)
    shardkit.convert(folder / "a", other, folder / "b", workers=0)
    assert_holds(folder / "b", samples)
    shardkit.convert(folder / "b", one, folder / "c", workers=0)
    assert_holds(folder / "c", samples)


def any_samples_without_image() -> st.SearchStrategy[Sample]:
    """Images are drawn from ready ones, since making one is what no test here may do."""
    return any_samples(images=())


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_json_keeps_its_text(tmp_path: Path, one: str, other: str) -> None:
    text = JsonText('{"b" :1.50,\n "a":[ ],"ü":"\\u00e4"}')
    with shardkit.create(tmp_path / "a", one, {"about": shardkit.Json()}) as writer:
        writer.write({"__key__": "x", "about": text})
    shardkit.convert(tmp_path / "a", other, tmp_path / "b", workers=0)
    stored = DatasetSource(shardkit.open(tmp_path / "b"))[0]["about"]
    assert isinstance(stored, JsonText)
    assert stored == text


@pytest.mark.parametrize("format", few(NAMES, "lmdb"))
def test_a_value_of_64_megabytes_passes_through_every_format(tmp_path: Path, format: str) -> None:
    big = np.random.default_rng(0).bytes(64_000_001)
    with shardkit.create(tmp_path / "a", "wds", {"blob": shardkit.Bytes()}) as writer:
        writer.write({"__key__": "small", "blob": b"x"})
        writer.write({"__key__": "big", "blob": big})
        writer.write({"__key__": "last", "blob": b""})
    shardkit.convert(tmp_path / "a", format, tmp_path / "b", workers=0)
    found = [sample["blob"] for sample in shardkit.open(tmp_path / "b")]
    assert found[1] == big
    assert (found[0], found[2]) == (b"x", b"")


@pytest.mark.parametrize("format", NAMES)
def test_class_names_and_counts_travel(tmp_path: Path, format: str) -> None:
    with shardkit.create(
        tmp_path / "a", "wds", {"label": shardkit.Int()}, classes=["cat", "dog"]
    ) as writer:
        for label in (0, 1, 1, -1):
            writer.write({"label": label})
    shardkit.convert(tmp_path / "a", format, tmp_path / "b", workers=0)
    dataset = shardkit.open(tmp_path / "b")
    assert dataset.classes == ("cat", "dog")
    assert dataset.manifest is not None
    assert dataset.manifest.label_counts == (1, 2)
    assert [sample["label"] for sample in dataset] == [0, 1, 1, -1]


@pytest.mark.parametrize("format", NAMES)
def test_class_names_of_every_field_travel(tmp_path: Path, format: str) -> None:
    """There and back, also without the manifest where the shards themselves have the names."""
    schema = {"fine": shardkit.Int(), "n": shardkit.Int(), "coarse": shardkit.Int()}
    names = {"fine": ("cat", "dog", "ant"), "coarse": ("mammal", "insect")}
    with shardkit.create(tmp_path / "a", format, schema, classes=names) as writer:
        for n in range(3):
            writer.write({"fine": n, "n": 7, "coarse": n // 2})
    shardkit.convert(tmp_path / "a", "wds", tmp_path / "b", workers=0, rename={"coarse": "kind"})
    renamed = {"fine": names["fine"], "kind": names["coarse"]}
    shardkit.convert(tmp_path / "b", format, tmp_path / "c", workers=0)
    for folder, expected in {"a": names, "b": renamed, "c": renamed}.items():
        dataset = shardkit.open(tmp_path / folder)
        assert dataset.class_names == expected
        assert (dataset.label, dataset.classes) == ("fine", names["fine"])
        assert dataset.manifest is not None
        assert dataset.manifest.label_counts == (1, 1, 1)
    assert shardkit.verify(tmp_path / "b", against=tmp_path / "a", decode=True).sound
    assert shardkit.verify(tmp_path / "c", against=tmp_path / "b", decode=True).sound
    if format not in NAMELESS:
        (tmp_path / "c/__shardkit__/manifest.json").unlink()
        (shard,) = [*(tmp_path / "c").glob("*[.-]00000*")] or [tmp_path / "c"]  # of Lance
        assert shardkit.open(shard).class_names == renamed


_BOXES = {
    "boxes": shardkit.Array("float32", (None, 4)),
    "categories": shardkit.Array("int64", (None,)),
    "iscrowd": shardkit.Array("bool", (None,)),
}


@pytest.mark.parametrize("format", NAMES)
def test_boxes_and_the_names_of_their_classes_travel(tmp_path: Path, format: str) -> None:
    """Arrays of any length, none too: to each format, to another, and back."""
    samples = [
        {
            "__key__": f"{n}",
            "boxes": np.arange(4 * n, dtype=np.float32).reshape(n, 4) / 8,
            "categories": np.arange(n) % 2,
            "iscrowd": np.arange(n) % 3 == 0,
        }
        for n in (2, 0, 5, 1)
    ]
    names = {"categories": ("cat", "dog")}
    with shardkit.create(tmp_path / "a", format, _BOXES, classes=names) as writer:
        for sample in samples:
            writer.write(sample)
        with pytest.raises(shardkit.SampleError, match="not the number of a class"):
            writer.write({**samples[0], "__key__": "x", "categories": np.array([0, 2])})
    shardkit.convert(tmp_path / "a", "wds", tmp_path / "b", workers=0)
    shardkit.convert(tmp_path / "b", format, tmp_path / "c", workers=0)
    for folder in "abc":
        dataset = shardkit.open(tmp_path / folder)
        assert dataset.class_names == names
        assert dataset.manifest is not None
        assert dataset.manifest.label_counts is None
        for found, expected in zip(dataset, samples, strict=True):
            for field, kind in dataset.schema.items():
                assert kind.check(found[field]).shape == expected[field].shape
                assert np.array_equal(found[field], expected[field])
    if format not in NAMELESS:
        (tmp_path / "c/__shardkit__/manifest.json").unlink()
        (shard,) = [*(tmp_path / "c").glob("*[.-]00000*")] or [tmp_path / "c"]  # of Lance
        assert shardkit.open(shard).class_names == names


@pytest.mark.parametrize("format", NAMES)
def test_a_class_that_no_field_names_is_refused(tmp_path: Path, format: str) -> None:
    schema = {"fine": shardkit.Int(), "coarse": shardkit.Int()}
    names = {"fine": ["a", "b", "c"], "coarse": ["x"]}
    with shardkit.create(tmp_path / "a", format, schema, classes=names) as writer:
        writer.write({"fine": 2, "coarse": -1})
        with pytest.raises(shardkit.SampleError, match="not the number of a class") as error:
            writer.write({"fine": 2, "coarse": 1})
    assert error.value.where["field"] == "coarse"


def test_class_names_by_field_are_for_python_samples(tmp_path: Path) -> None:
    names = {"fine": ["a", "b"], "coarse": ["x"]}
    samples = [{"fine": 1, "coarse": 0}]
    shardkit.convert(samples, "arrow", tmp_path / "a", workers=0, classes=names)
    assert shardkit.open(tmp_path / "a").class_names == {"fine": ("a", "b"), "coarse": ("x",)}
    with pytest.raises(shardkit.UsageError, match="for Python sequences"):
        shardkit.convert(tmp_path / "a", "wds", tmp_path / "b", workers=0, classes=names)


def test_class_names_of_what_is_no_class_are_refused(tmp_path: Path) -> None:
    schema = {"text": shardkit.Text(), "n": shardkit.Int()}
    for classes in (["a"], {"text": ["a"]}, {"other": ["a"]}, {"n": "ab"}, {"n": [1]}):
        with pytest.raises(shardkit.UsageError, match="class"):
            shardkit.create(tmp_path / "a", "wds", schema, classes=classes)


@pytest.mark.parametrize("format", NAMES)
def test_a_dataset_without_samples_stays_one(tmp_path: Path, format: str) -> None:
    write(tmp_path / "a", format, [])
    for other in NAMES:
        shardkit.convert(tmp_path / "a", other, tmp_path / other, workers=0)
        assert_holds(tmp_path / other, [])


@pytest.mark.parametrize("format", NAMES)
def test_shards_of_every_format_keep_their_limits_and_order(tmp_path: Path, format: str) -> None:
    write(tmp_path / "a", "wds", FIFTY)
    shardkit.convert(tmp_path / "a", format, tmp_path / "b", workers=0, shard_samples=7)
    assert_holds(tmp_path / "b", FIFTY)
    with shardkit.open(tmp_path / "b") as dataset:
        assert [dataset.extent(n)[0] for n in range(dataset.shards)] == [7] * 7 + [1]
    shardkit.convert(tmp_path / "a", format, tmp_path / "c", workers=0, shard_size="60kB")
    assert_holds(tmp_path / "c", FIFTY)
