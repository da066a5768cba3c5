"""C4: from every format to every other and back, or merged: equal samples, and no codec called."""

import shutil

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit import testing
from shardkit.sample import JsonText
from shardkit.schema import Array, Audio, Bytes, Int, Json, Text, Video
from shardkit.sources.dataset import DatasetSource
from shardkit.testing import EVERYTHING, any_samples, assert_same, everything, make_image
from tests.conftest import IMAGE_FORMATS, examples, few, files_of
from tests.test_cli import run

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


def write(out, format, samples):
    with shardkit.create(out, format, EVERYTHING) as writer:
        for sample in samples:
            writer.write(sample)
    return out


def assert_holds(path, samples):
    with shardkit.open(path) as dataset:
        assert dict(dataset.schema) == dict(EVERYTHING)
        assert len(dataset) == len(samples)
        for found, expected in zip(dataset, samples, strict=True):
            assert_same(found, expected)


@pytest.fixture(autouse=True)
def no_codec(monkeypatch):
    """Whatever decodes or encodes an image ends the test."""

    def called(*args, **options):
        raise AssertionError("a codec ran")

    for name in ("decode_jpeg", "encode_jpeg"):
        monkeypatch.setattr(simplejpeg, name, called)
    for name in ("load", "tobytes"):
        monkeypatch.setattr(PIL.Image.Image, name, called)


JPEGS = [make_image(number) for number in range(10)]
MIXED = [make_image(number, format) for number in range(4) for format in ("JPEG", "PNG", "WEBP")]
SAMPLES = [everything(number) for number in range(15)]


def equal(found, expected):
    if isinstance(expected, np.ndarray):
        return found.shape == expected.shape and bool(np.array_equal(found, expected))
    return type(found) is type(expected) and found == expected


def boxes(count):
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
CHAINS = {
    "audio and video": (
        {"audio": Audio(), "video": Video(optional=True), "clip": Audio(optional=True)},
        [
            {"__key__": "a/1", "audio": testing.make_audio(1), "video": testing.make_video(1)},
            {
                "__key__": "a/2",
                "audio": testing.make_audio(2, 44100),
                "clip": testing.make_audio(3),
            },
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
    "classes of two fields": (
        {"fine": Int(), "n": Int(), "coarse": Int()},
        [{"__key__": f"{n}", "fine": n, "n": 7, "coarse": n // 2} for n in range(3)],
        {"fine": ("cat", "dog", "ant"), "coarse": ("mammal", "insect")},
    ),
    "boxes": (BOXES, [boxes(n) for n in (2, 0, 5, 1)], {"categories": ("cat", "dog")}),
}


@pytest.mark.parametrize("case", CHAINS)
def test_values_travel_through_every_format(tmp_path, case, large):
    """From each to the next, and from the last to the first."""
    schema, samples, classes = CHAINS[case]
    counts = {"classes": (1, 2), "classes of two fields": (1, 1, 1)}.get(case)
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
            assert dataset.classes == (next(iter(classes.values())) if classes else None)
            assert dataset.manifest.label_counts == counts
            stored = DatasetSource(dataset)
            for number, expected in enumerate(samples):
                found = stored[number]
                assert found.keys() == expected.keys()
                assert all(equal(found[name], expected[name]) for name in expected), found
        if case in ("audio and video", "classes of two fields"):
            assert shardkit.verify(path, against=source, decode=True).sound
    # Shards by themselves have the names of classes too.
    for format in names if case in ("boxes", "classes of two fields") else ():
        if format not in NAMELESS:
            (tmp_path / format / "__shardkit__/manifest.json").unlink()
            (shard,) = [*(tmp_path / format).glob("*[.-]00000*")] or [tmp_path / format]
            assert shardkit.open(shard).class_names == classes


@pytest.mark.parametrize(("one", "other"), PAIRS)
@settings(max_examples=min(examples(2), 6), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_there_and_back_gives_equal_samples(tmp_path_factory, one, other, data):
    folder = tmp_path_factory.mktemp("pair")
    images = JPEGS if ONLY_JPEG & {one, other} else MIXED  # as making one is what no test may do
    drawn = st.lists(any_samples(images=()), max_size=4, unique_by=lambda s: s["__key__"])
    samples = [{**s, "image": images[n]} for n, s in enumerate(data.draw(drawn))]
    write(folder / "a", one, samples)
    shardkit.convert(folder / "a", other, folder / "b", workers=0)
    assert_holds(folder / "b", samples)
    shardkit.convert(folder / "b", one, folder / "c", workers=0)
    assert_holds(folder / "c", samples)


@pytest.mark.large
def test_a_value_of_64_megabytes_passes_through_every_format(tmp_path):
    values = [b"x", np.random.default_rng(0).bytes(64_000_001), b""]
    path = tmp_path / "first"
    with shardkit.create(path, "wds", {"blob": Bytes()}) as writer:
        for key, value in zip(("small", "big", "last"), values, strict=True):
            writer.write({"__key__": key, "blob": value})
    for format in IMAGE_FORMATS:
        path, source = tmp_path / format, path
        shardkit.convert(source, format, path, workers=0)
        shutil.rmtree(source)
        assert [sample["blob"] for sample in shardkit.open(path)] == values


def test_a_class_that_no_field_names_is_refused(tmp_path):
    two = {"fine": Int(), "coarse": Int()}
    for schema, names, good, bad in (
        (two, {"fine": "abc", "coarse": "x"}, {"fine": 2, "coarse": -1}, {"fine": 2, "coarse": 1}),
        (BOXES, {"categories": "x"}, boxes(1), {**boxes(2), "__key__": "x"}),
    ):
        classes = {name: [*letters] for name, letters in names.items()}
        out = tmp_path / f"{len(classes)}"
        with shardkit.create(out, "wds", schema, classes=classes) as writer:
            writer.write(good)
            with pytest.raises(shardkit.SampleError, match="not the number of a class") as error:
                writer.write(bad)
        assert error.value.where["field"] == [*names][-1]


def test_class_names_by_field_are_for_python_samples_and_fields_that_can_be_classes(tmp_path):
    names = {"fine": ["a", "b"], "coarse": ["x"]}
    samples = [{"fine": 1, "coarse": 0}]
    shardkit.convert(samples, "arrow", tmp_path / "a", workers=0, classes=names)
    assert shardkit.open(tmp_path / "a").class_names == {"fine": ("a", "b"), "coarse": ("x",)}
    renamed = tmp_path / "renamed"
    shardkit.convert(tmp_path / "a", "wds", renamed, workers=0, rename={"coarse": "kind"})
    assert shardkit.open(renamed).class_names == {"fine": ("a", "b"), "kind": ("x",)}
    assert shardkit.verify(renamed, against=tmp_path / "a", decode=True).sound
    with pytest.raises(shardkit.UsageError, match="for Python sequences"):
        shardkit.convert(tmp_path / "a", "wds", tmp_path / "b", workers=0, classes=names)
    schema = {"text": Text(), "n": Int()}
    for classes in (["a"], {"text": ["a"]}, {"other": ["a"]}, {"n": "ab"}, {"n": [1]}):
        with pytest.raises(shardkit.UsageError, match="class"):
            shardkit.create(tmp_path / "c", "wds", schema, classes=classes)


# The second of three shards, where other tools call theirs otherwise.
SECOND = dict.fromkeys(("hf", "tfrecord"), "data-00001-of-00003")
SECOND |= {"mds": "shard.00001", "litdata": "chunk-0-00001"}


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_shards_of_every_format_keep_their_limits_and_order(tmp_path, format):
    write(tmp_path / "a", "wds", SAMPLES)
    shardkit.convert(tmp_path / "a", format, tmp_path / "b", workers=0, shard_samples=7)
    assert_holds(tmp_path / "b", SAMPLES)
    with shardkit.open(tmp_path / "b") as dataset:
        assert [dataset.extent(n)[0] for n in range(dataset.shards)] == [7, 7, 1]
        assert SECOND.get(format, "shard-000001") in str(dataset.shard_name(1))
    shardkit.convert(tmp_path / "a", format, tmp_path / "c", workers=0, shard_size="20kB")
    assert_holds(tmp_path / "c", SAMPLES)


@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_several_datasets_become_one_of_their_format(tmp_path, format):
    write(tmp_path / "a", format, SAMPLES[:5])
    write(tmp_path / "b", format, SAMPLES[3:9])
    result = shardkit.merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c")
    assert (result.format, result.samples) == (format, 11)
    both = [("a", range(5)), ("b", range(3, 9))]
    keys = [f"{name}/folder/{n:04d}" for name, numbers in both for n in numbers]
    samples = [SAMPLES[n] for _, numbers in both for n in numbers]
    expected = [{**s, "__key__": key} for key, s in zip(keys, samples, strict=True)]
    assert_holds(tmp_path / "c", expected)
    shardkit.convert([tmp_path / "a", tmp_path / "b"], format, tmp_path / "d", workers=0)
    assert files_of(tmp_path / "c") == files_of(tmp_path / "d")


def test_classes_of_one_name_are_one(tmp_path):
    for name, classes in (("a", ["cat", "dog"]), ("b", ["ant", "cat"])):
        schema = {"label": shardkit.Int()}
        with shardkit.create(tmp_path / name, "wds", schema, classes=classes) as writer:
            for label in range(2):
                writer.write({"label": label})
    assert "4 samples" in run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c").stdout
    with shardkit.open(tmp_path / "c") as merged:
        assert merged.classes is not None
        assert [merged.classes[s["label"]] for s in merged] == ["cat", "dog", "ant", "cat"]


def test_what_cannot_be_merged_is_refused(tmp_path):
    write(tmp_path / "a", "wds", SAMPLES[:1])
    write(tmp_path / "b", "lmdb", SAMPLES[1:2])
    with pytest.raises(shardkit.UsageError, match="have different formats") as refused:
        shardkit.merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c")
    assert "convert" in str(refused.value)
    assert "give -o OUT" in run("merge", tmp_path / "a", tmp_path / "b", check=2).stderr
    assert "Missing argument" in run("merge", check=2).stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_tokens_are_merged_and_cut_into_other_shards(tmp_path):
    schema = {"tokens": shardkit.Array("<i4", (None,))}
    tokens = [np.arange(n, 3 * n, dtype="<i4") for n in range(1, 9)]
    for name, part in (("a", tokens[:4]), ("b", tokens[4:])):
        with shardkit.create(tmp_path / name, "megatron", schema) as writer:
            for each in part:
                writer.write({"tokens": each})
    shardkit.merge(tmp_path / "a", tmp_path / "b", out=tmp_path / "c")
    shardkit.convert(tmp_path / "c", "megatron", tmp_path / "d", shard_samples=3, workers=0)
    for name, shards in (("c", 1), ("d", 3)):
        with shardkit.open(tmp_path / name) as dataset:
            assert dataset.shards == shards
            found = [sample["tokens"].tolist() for sample in dataset]
            assert found == [each.tolist() for each in tokens]
