"""C4: from every format to every other and back, with equal samples and no codec called."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Audio, Bytes, Int, Json, Text, Video
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
from tests.conftest import IMAGE_FORMATS, examples

# Their shards by themselves have no names of classes.
NAMELESS = ("wds", "tfrecord", "array_record")
# Each format passes its contract there and back with TAR; of other pairs some that differ most.
PAIRS = [("wds", format) for format in IMAGE_FORMATS if format != "wds"] + [
    pytest.param(one, other, marks=pytest.mark.large)
    for one, other in (
        ("lmdb", "beton"), ("parquet", "tfrecord"), ("mds", "litdata"), ("hf", "array_record"),
        ("arrow", "lmdb"), ("parquet", "parquet"),
    )
]  # fmt: skip
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
FIFTEEN = [everything(number) for number in range(15)]


def with_image(sample: Sample, images: list[bytes], number: int) -> Sample:
    return {**sample, "image": images[number % len(images)]}


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return found.shape == expected.shape and bool(np.array_equal(found, expected))
    return type(found) is type(expected) and found == expected


def boxes(count: int) -> Sample:
    return {
        "__key__": f"{count}",
        "boxes": np.arange(4 * count, dtype=np.float32).reshape(count, 4) / 8,
        "categories": np.arange(count) % 2,
        "iscrowd": np.arange(count) % 3 == 0,
    }


BOXES = {
    "boxes": Array("float32", (None, 4)),
    "categories": Array("int64", (None,)),
    "iscrowd": Array("bool", (None,)),
}
CHAINS: dict[str, tuple[dict[str, Any], list[Sample], dict[str, tuple[str, ...]]]] = {
    "audio and video": (
        {"audio": Audio(), "video": Video(optional=True), "clip": Audio(optional=True)},
        [
            {"__key__": "a/1", "audio": make_audio(1), "video": make_video(1)},
            {"__key__": "a/2", "audio": make_audio(2, 44100), "clip": make_audio(3)},
        ],
        {},
    ),
    "no samples": (dict(EVERYTHING), [], {}),
    "the text of JSON": (
        {"about": Json()},
        [{"__key__": "x", "about": JsonText('{"b" :1.50,\n "a":[ ],"ü":"\\u00e4"}')}],
        {},
    ),
    "classes": (
        {"label": Int()},
        [{"__key__": f"{n}", "label": label} for n, label in enumerate((0, 1, 1, -1))],
        {"label": ("cat", "dog")},
    ),
    "boxes": (BOXES, [boxes(n) for n in (2, 0, 5, 1)], {"categories": ("cat", "dog")}),
}


@pytest.mark.parametrize("case", CHAINS)
def test_values_travel_through_every_format(tmp_path: Path, case: str, large: bool) -> None:
    """From each to the next, and from the last to the first."""
    schema, samples, classes = CHAINS[case]
    names = [name for name in IMAGE_FORMATS if large or name != "lance"]
    path = tmp_path / "first"
    with shardkit.create(path, names[0], schema, classes=classes or None) as writer:
        for sample in samples:
            writer.write(sample)
    for format in (*names[1:], names[0]):
        path, source = tmp_path / format, path
        shardkit.convert(source, format, path, workers=0)
        with shardkit.open(path) as dataset:
            assert dict(dataset.schema) == schema
            assert (dataset.class_names or {}) == classes
            assert dataset.manifest is not None
            assert dataset.manifest.label_counts == ((1, 2) if "label" in classes else None)
            stored = DatasetSource(dataset)
            for number, expected in enumerate(samples):
                found = stored[number]
                assert found.keys() == expected.keys()
                assert all(equal(found[name], expected[name]) for name in expected), found
        if case == "audio and video":
            assert shardkit.verify(path, against=source).sound
    # Shards by themselves have the names of classes too.
    for format in names if case == "boxes" else ():
        if format not in NAMELESS:
            (tmp_path / format / "__shardkit__/manifest.json").unlink()
            (shard,) = [*(tmp_path / format).glob("*[.-]00000*")] or [tmp_path / format]
            assert shardkit.open(shard).class_names == classes


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


@pytest.mark.large
def test_a_value_of_64_megabytes_passes_through_every_format(tmp_path: Path) -> None:
    values = [b"x", np.random.default_rng(0).bytes(64_000_001), b""]
    path = tmp_path / "first"
    with shardkit.create(path, "wds", {"blob": Bytes()}) as writer:
        for key, value in zip(("small", "big", "last"), values, strict=True):
            writer.write({"__key__": key, "blob": value})
    for format in IMAGE_FORMATS:
        path, source = tmp_path / format, path
        shardkit.convert(source, format, path, workers=0)
        shutil.rmtree(source)
        with shardkit.open(path) as dataset:
            assert [sample["blob"] for sample in dataset] == values


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_class_names_of_every_field_travel(tmp_path: Path, format: str) -> None:
    """There and back, also without the manifest where the shards themselves have the names."""
    schema = {"fine": Int(), "n": Int(), "coarse": Int()}
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


@pytest.mark.parametrize(
    ("schema", "names", "good", "bad"),
    [
        (
            {"fine": Int(), "coarse": Int()},
            {"fine": ["a", "b", "c"], "coarse": ["x"]},
            {"fine": 2, "coarse": -1},
            {"fine": 2, "coarse": 1},
        ),
        (BOXES, {"categories": ["x"]}, boxes(1), {**boxes(2), "__key__": "x"}),
    ],
)
def test_a_class_that_no_field_names_is_refused(
    tmp_path: Path, schema: Any, names: Any, good: Sample, bad: Sample
) -> None:
    with shardkit.create(tmp_path / "a", "wds", schema, classes=names) as writer:
        writer.write(good)
        with pytest.raises(shardkit.SampleError, match="not the number of a class") as error:
            writer.write(bad)
    assert error.value.where["field"] == [*names][-1]


def test_class_names_by_field_are_for_python_samples(tmp_path: Path) -> None:
    names = {"fine": ["a", "b"], "coarse": ["x"]}
    samples = [{"fine": 1, "coarse": 0}]
    shardkit.convert(samples, "arrow", tmp_path / "a", workers=0, classes=names)
    assert shardkit.open(tmp_path / "a").class_names == {"fine": ("a", "b"), "coarse": ("x",)}
    with pytest.raises(shardkit.UsageError, match="for Python sequences"):
        shardkit.convert(tmp_path / "a", "wds", tmp_path / "b", workers=0, classes=names)


def test_class_names_of_what_is_no_class_are_refused(tmp_path: Path) -> None:
    schema = {"text": Text(), "n": Int()}
    for classes in (["a"], {"text": ["a"]}, {"other": ["a"]}, {"n": "ab"}, {"n": [1]}):
        with pytest.raises(shardkit.UsageError, match="class"):
            shardkit.create(tmp_path / "a", "wds", schema, classes=classes)


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_shards_of_every_format_keep_their_limits_and_order(tmp_path: Path, format: str) -> None:
    write(tmp_path / "a", "wds", FIFTEEN)
    shardkit.convert(tmp_path / "a", format, tmp_path / "b", workers=0, shard_samples=7)
    assert_holds(tmp_path / "b", FIFTEEN)
    with shardkit.open(tmp_path / "b") as dataset:
        assert [dataset.extent(n)[0] for n in range(dataset.shards)] == [7, 7, 1]
    shardkit.convert(tmp_path / "a", format, tmp_path / "c", workers=0, shard_size="20kB")
    assert_holds(tmp_path / "c", FIFTEEN)
