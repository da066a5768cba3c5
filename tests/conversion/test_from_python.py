"""What programs have in memory as a source: tables, columns, iterables, images and tensors."""

import datetime
import decimal
import io
import os
import subprocess
import sys
import tempfile

import datasets
import ml_dtypes
import numpy as np
import pandas as pd
import PIL.Image
import polars as pl
import pyarrow as pa
import pytest
import torch

import shardkit
from shardkit.codecs.given import as_field
from shardkit.errors import OutputError, SampleError, SourceError
from shardkit.schema import Array, Float, Image, Images, Int, Json, Text
from shardkit.testing import assert_same, make_image
from tests.conversion.conftest import raised

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
IMAGE = PIL.Image.fromarray(PIXELS)
ROWS = [{"n": n, "text": f"line {n}", "maybe": None if n % 3 else n / 2} for n in range(40)]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
FRAME = pd.DataFrame(COLUMNS)
FAILING = datasets.IterableDataset.from_generator(lambda: ({"n": 1 / n} for n in (1, 0)))


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Temporary folders are here, and gone in the end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def stored(source, out, to="wds", **options):
    shardkit.convert(source, to, out, **options)
    with shardkit.open(out) as dataset:
        return dataset.schema, [*dataset]


def decoded(data):
    return np.asarray(PIL.Image.open(io.BytesIO(data)))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


SOURCES = {
    "list": lambda: ROWS,
    "columns": lambda: COLUMNS,
    "generator": lambda: (row for row in ROWS),
    "torch": Stream,
    "pandas": lambda: FRAME,
    "pandas with an index": lambda: FRAME[::-1][::-1].set_index(pd.Index(range(3, 43))),
    "polars": lambda: pl.DataFrame(COLUMNS),
    "arrow": lambda: pa.table(COLUMNS),
    "batches": lambda: pa.table(COLUMNS).to_reader(7),
    "datasets": lambda: datasets.Dataset.from_dict(COLUMNS),
    "stream": lambda: datasets.Dataset.from_dict(COLUMNS).to_iterable_dataset(),
    "stream of unknown types": lambda: datasets.IterableDataset.from_generator(lambda: ROWS),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_rows_are_the_same_samples(name, tmp_path):
    schema, samples = stored(SOURCES[name](), tmp_path / "out")
    assert schema == {"n": Int(), "text": Text(), "maybe": Float(optional=True)}
    for number, (found, row) in enumerate(zip(samples, ROWS, strict=True)):
        values = {field: value for field, value in row.items() if value is not None}
        assert_same(found, {"__key__": f"{number:09d}", **values})


def test_options_hold_for_tables_and_iterables(tmp_path):
    options = {"where": "n < 30", "rename": {"n": "label"}, "drop": ["maybe"], "classes": None}
    options |= {"split": "train=0.5,val=0.5", "shuffle": True, "shard_samples": 4, "workers": 2}
    found = {}
    for name in ("list", "generator", "polars"):
        shardkit.convert(SOURCES[name](), "arrow", tmp_path / name, **options)
        splits = [shardkit.open(tmp_path / name / split) for split in ("train", "val")]
        found[name] = [[*split] for split in splits]
        assert sum(map(len, splits)) == 30
    assert found["list"] == found["generator"] == found["polars"]
    names = [f"class {n}" for n in range(40)]
    rows = ({"label": row["n"]} for row in ROWS)
    shardkit.convert(rows, "hf", tmp_path / "named", classes=names)
    assert shardkit.open(tmp_path / "named").classes == tuple(names)


def test_text_of_a_table_is_tokenized_and_images_are_resized(tmp_path, gpt2):
    schema, samples = stored(FRAME, tmp_path / "a", "arrow", tokenizer=gpt2, seq_len=16)
    assert [*schema] == ["tokens", "doc_ends"]
    assert all(len(sample["tokens"]) == 16 for sample in samples)
    images = ({"image": PIL.Image.new("RGB", (60, 40), "red")} for _ in range(3))
    _, samples = stored(images, tmp_path / "b", resize=20, image_format="jpeg", quality=80)
    assert [decoded(sample["image"]).shape for sample in samples] == [(20, 30, 3)] * 3
    assert all(sample["image"][:2] == b"\xff\xd8" for sample in samples)


def test_values_of_other_libraries(tmp_path):
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)
    given = {
        "image": IMAGE,
        "images": [IMAGE, IMAGE],
        "tensor": torch.arange(6.0, requires_grad=True).reshape(2, 3),
        "half": torch.tensor([1.5, -2], dtype=torch.bfloat16),
        "other half": np.array([1.5, -2], ml_dtypes.bfloat16),
        "label": torch.tensor(3),
        "small": np.float32(0.5),
        "when": when,
        "day": np.datetime64("2026-01-02"),
        "price": decimal.Decimal("1.10"),
        "about": {"n": np.int64(1), "box": np.arange(2), "t": torch.ones(2), "at": [when]},
        "nothing": pd.NA,
    }
    half = np.array([1.5, -2], np.float32)
    at = when.isoformat()
    expected = {
        "tensor": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": half, "other half": half, "label": 3, "small": 0.5,
        "when": at, "day": "2026-01-02", "price": "1.10",
        "about": {"n": 1, "box": [0, 1], "t": [1.0, 1.0], "at": [at]},
    }  # fmt: skip
    second = {**given, "nothing": pd.NaT, "label": np.int64(3)}
    for source in ([given, second], iter([given, second])):
        schema, samples = stored(source, tmp_path / type(source).__name__, "arrow")
        assert schema["image"] == Image()
        assert schema["images"] == Images()
        assert schema["half"] == Array("<f4")
        assert schema["nothing"] == Json(optional=True)
        for sample in samples:
            for png in (sample.pop("image"), *sample.pop("images")):
                assert np.array_equal(decoded(png), PIXELS)
            assert_same(sample, {"__key__": sample["__key__"], **expected})
    with shardkit.create(tmp_path / "out", "wds") as writer:
        writer.write({"image": IMAGE, "label": torch.tensor(3), "x": half})
        raised(SampleError, "not of its field's type", writer.write, {**given, "label": "x"})
        writer.write({"image": make_image(), "label": 4, "x": torch.ones(2)})
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset.schema == {"image": Image(), "label": Int(), "x": Array("<f4")}
        assert np.array_equal(decoded(dataset[0]["image"]), PIXELS)
        assert [sample["label"] for sample in dataset] == [3, 4]


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_objects_in_a_table_are_values(frame, tmp_path):
    """Arrow has no images of Pillow, and no arrays of several dimensions."""
    columns = {"image": [IMAGE, IMAGE], "label": [0, 1]}
    schema, samples = stored(frame(columns), tmp_path / "out")
    assert schema == {"image": Image(), "label": Int()}
    assert np.array_equal(decoded(samples[1]["image"]), PIXELS)
    if frame is pd.DataFrame:
        table = pd.DataFrame({"pixels": [PIXELS, PIXELS], "text": ["a", None]})
        schema, samples = stored(table, tmp_path / "arrays")
        assert schema == {"pixels": Array("|u1"), "text": Text(optional=True)}
        assert np.array_equal(samples[1]["pixels"], PIXELS)


def test_images_of_hugging_face_stay_as_they_are(tmp_path):
    """Their bytes are not decoded, those in files are read, and classes keep their names."""
    (tmp_path / "b.jpg").write_bytes(make_image(1))
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    rows = {"image": [{"bytes": make_image(0), "path": None}, str(tmp_path / "b.jpg")]}
    data = datasets.Dataset.from_dict({**rows, "label": [1, 0]}, datasets.Features(features))
    for name, source in (("map", data), ("stream", data.to_iterable_dataset())):
        _, samples = stored(source, tmp_path / name)
        assert [sample["image"] for sample in samples] == [make_image(0), make_image(1)]
        assert shardkit.open(tmp_path / name).classes == ("cat", "dog")
    own = data.with_transform(lambda rows: {"size": [image.size[0] for image in rows["image"]]})
    _, samples = stored(own, tmp_path / "own")
    assert [sample["size"] for sample in samples] == [8, 8]


def test_what_does_not_fit_is_named_and_leaves_nothing(tmp_path, out):
    late = [{"n": n if n < 1050 else "x"} for n in range(1100)]
    for source, error, words, where in (
        (iter(late), SampleError, "not of its field's type", ("key", "000001050")),
        (iter([{"x": {1}}]), SampleError, "no field can hold", ("field", "x")),
        (iter([3]), SampleError, "an item is not a sample", ("position", 0)),
        (({"n": 1 / n} for n in (1, 0)), SampleError, "raised ZeroDivisionError", ("position", 1)),
        (iter([{"n": 1}, {}]), SampleError, "no field 'n'", ("key", "000000001")),
        (iter([{"n": 1}, {"m": 1}]), SampleError, "no field 'n'", ("key", "000000001")),
        (iter([{"a": IMAGE.convert("CMYK")}]), SampleError, "image.convert", ("field", "a")),
        (iter([]), SourceError, "the list_iterator has no samples", None),
        (iter([(1, 2)]), SampleError, "fix: give dicts, such as", ("position", 0)),
        (FAILING, SampleError, "the IterableDataset raised ZeroDivisionError", None),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), SourceError, "same name", ("field", "a")),
        (pd.DataFrame({"a": [1, "x"]}), SampleError, "not of its field's type", ("field", "a")),
    ):
        with pytest.raises(error) as caught:
            shardkit.convert(source, "wds", out)
        assert words in str(caught.value)
        assert where is None or caught.value.where[where[0]] == where[1]
        assert not out.exists()
    error = raised(SampleError, "not of", shardkit.convert, iter(late), "wds", out)
    assert error.fix == "correct it, or pass schema= with a type that fits all values"
    error = raised(
        SampleError, "CMYK", shardkit.convert, [{"a": IMAGE.convert("CMYK")}], "wds", out
    )
    assert "drop=['a']" in str(error.fix)
    assert "image.convert" in str(error.fix)
    # Values of no type are left out if asked for; a rare one needs a schema.
    assert stored(iter([{"n": 1, "x": {1}}]), out, drop=["x"])[1] == [
        {"__key__": "000000000", "n": 1}
    ]
    raised(OutputError, "the output exists", shardkit.convert, iter(late), "wds", out)
    floats = ({"n": n / 2 if n > 1000 else 0} for n in range(1100))
    schema, _ = stored(floats, tmp_path / "b", schema={"n": Float()})
    assert schema == {"n": Float()}


def test_bad_samples_of_an_iterable_are_skipped_and_a_failed_run_starts_over(tmp_path, out):
    def images():
        yield from ({"image": b"text" if n == 2 else make_image(n)} for n in range(6))

    rows = [{"image": make_image(0)}, *images()]
    raised(SampleError, "not an image", shardkit.convert, iter(rows), "wds", out)
    result = shardkit.convert(iter(rows), "wds", out, on_error="skip")
    assert (result.samples, result.errors) == (6, 1)
    late = [{"n": "x" if n in (1002, 1005) else n} for n in range(1010)]
    result = shardkit.convert(iter(late), "wds", tmp_path / "late", on_error="skip")
    assert (result.samples, result.errors) == (1008, 2)
    options = {"on_error": "skip", "max_errors": 1}
    few = "more than 1 samples are bad"
    raised(SourceError, few, shardkit.convert, iter(late), "wds", tmp_path / "few", **options)


def test_an_index_of_pandas_becomes_a_field_unless_it_has_numbers_of_rows(tmp_path):
    def of(name, index):
        return stored(pd.DataFrame({"n": [1]}, index=index), tmp_path / name)[1][0]

    assert of("a", ["x"]) == {"__key__": "000000000", "n": 1, "__index_level_0__": "x"}
    assert of("b", pd.RangeIndex(1, name="row")) == {"__key__": "000000000", "n": 1, "row": 0}
    assert of("c", [7]) == {"__key__": "000000000", "n": 1}


def test_a_sequence_has_missing_values_and_numbers_of_both_kinds(tmp_path):
    rows = [{"a": 1, "b": "x"}, {"a": 2.5, "b": None}]
    schema, samples = stored(rows, tmp_path / "out")
    assert schema == {"a": Float(), "b": Text(optional=True)}
    assert [sample.get("b") for sample in samples] == ["x", None]
    assert shardkit.verify(tmp_path / "out", against={"a": [1, 2.5], "b": ["x", None]}).sound


def test_a_killed_run_leaves_no_dataset(tmp_path):
    code = f"""
import os, shardkit
def rows():
    yield {{"n": 1}}
    os._exit(7)
shardkit.convert(rows(), "wds", {str(tmp_path / "out")!r})
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 7
    assert not (tmp_path / "out").exists()


def test_values_that_fields_hold_are_not_touched():
    around: list[object] = [1]
    around.append(around)
    assert as_field(around) is around
    around += [around, np.int64(1)]
    raised(SampleError, "nested too deeply", as_field, around)
    for value in (b"x", "x", 1, True, PIXELS, [1, "x"], {"a": None}, (1, 2), np.str_("x")):
        assert as_field(value) is value
