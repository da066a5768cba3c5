"""Arrow and Parquet files that others made, and files that are damaged."""

import datetime
import decimal
import json
from dataclasses import replace

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
import shardkit.stream
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats import format_of, get_format
from shardkit.formats.arrow.parquet import READS_GAPS
from shardkit.formats.arrow.reader import IpcReader
from shardkit.formats.testing_samples import compare_at_once
from shardkit.schema import Array, Bool, Bytes, Float, Image, Int, Json, Schema, Text
from shardkit.testing import make_image
from tests.formats.refusals import refused

ARROW, PARQUET = get_format("arrow"), get_format("parquet")
WAYS = ["file", "stream", "lz4", "zstd", "parquet"]


def write(table, folder, way, rows=None, name="foreign"):
    """A table as others write it, in batches of so many rows."""
    if way == "parquet":
        path = folder / f"{name}.parquet"
        pq.write_table(table, path, row_group_size=rows)
        return path
    path = folder / f"{name}.arrow"
    options = pa.ipc.IpcWriteOptions(compression=way if way in ("lz4", "zstd") else None)
    make = pa.ipc.new_stream if way == "stream" else pa.ipc.new_file
    with make(path, table.schema, options=options) as made:
        made.write_table(table, max_chunksize=rows)
    return path


def read(path):
    return get_format(format_of(path)).open(path)


DAY = datetime.datetime(2020, 1, 2, 3, 4, 5)
FILE = {"bytes": make_image(1), "path": "1.jpg"}
PAIRS, DEEP = [[1, 2], None, [3, 4]], [[1, 2], [3, 4]]
TRUTHS = [True, False, True]
DEEP_TYPE = pa.list_(pa.list_(pa.int16(), 2))
TYPES = [
    (pa.array([1, -2], pa.int8()), Int(), [1, -2]),
    (pa.array([1, 2**16 - 1], pa.uint16()), Int(), [1, 2**16 - 1]),
    (pa.array([1, None], pa.uint32()), Int(optional=True), [1, None]),
    (pa.array([0.5, 2.0], pa.float32()), Float(), [0.5, 2.0]),
    (pa.array(np.array([0.5, 2], "f2")), Float(), [0.5, 2.0]),
    (pa.array([True, None, False]), Bool(optional=True), [True, None, False]),
    (pa.array(["ä", ""], pa.large_string()), Text(), ["ä", ""]),
    (pa.array(["a", None, "a"]).dictionary_encode(), Text(optional=True), ["a", None, "a"]),
    (pa.array([7, 8, 7]).dictionary_encode(), Int(), [7, 8, 7]),
    (pa.array([b"a", b""], pa.large_binary()), Bytes(), [b"a", b""]),
    (pa.array([b"ab", b"cd"], pa.binary(2)), Bytes(), [b"ab", b"cd"]),
    (pa.array([None, make_image(1)]), Image(optional=True), [None, make_image(1)]),
    (pa.array([FILE, dict.fromkeys(FILE)]), Image(optional=True), [make_image(1), None]),
    (pa.array([{"bytes": b"sound", "path": None}]), Bytes(), [b"sound"]),
    (pa.array([[1, 2], []]), Array("<i8", (None,)), [[1, 2], []]),
    (pa.array([[1, 2], None]), Array("<i8", (None,), optional=True), [[1, 2], None]),
    (pa.array([[1.0]], pa.large_list(pa.float32())), Array("<f4", (None,)), [[1.0]]),
    (pa.array(PAIRS, pa.list_(pa.uint8(), 2)), Array("|u1", (2,), optional=True), PAIRS),
    (pa.array([DEEP, []], DEEP_TYPE), Array("<i2", (None, 2)), [DEEP, np.zeros((0, 2))]),
    (pa.array([TRUTHS, None]), Array("|b1", (None,), optional=True), [TRUTHS, None]),
    (pa.array([[True, None]]), Json(), [[True, None]]),
    (pa.array([[1, None]]), Json(), [[1, None]]),
    (pa.array([[[1], [2, 3]]]), Json(), [[[1], [2, 3]]]),
    (pa.array([["a"], None]), Json(optional=True), [["a"], None]),
    (pa.array([{"a": 1, "b": [DAY]}]), Json(), [{"a": 1, "b": ["2020-01-02T03:04:05"]}]),
    (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())), Json(), [[["k", 1]]]),
    (pa.array([DAY]), Json(), ["2020-01-02T03:04:05"]),
    (pa.array([DAY.date(), None]), Json(optional=True), ["2020-01-02", None]),
    (pa.array([decimal.Decimal("1.50")]), Json(), ["1.50"]),
    (pa.nulls(2), Json(optional=True), [None, None]),
]
if hasattr(pa, "string_view"):  # which an old pyarrow does not have
    TEXTS = ["short", None, "longer than the twelve bytes of a view"]
    BLOBS = [value.encode() for value in TEXTS if value]
    TYPES.append((pa.array(TEXTS, pa.string_view()), Text(optional=True), TEXTS))
    TYPES.append((pa.array(BLOBS, pa.binary_view()), Bytes(), BLOBS))
    TYPES.append((pa.array([TEXTS, []], pa.list_(pa.string_view())), Json(), [TEXTS, []]))


def foreign_table():
    """Three rows of all of TYPES, each of which takes another way through the reader."""
    columns = {}
    for number, (array, _, _) in enumerate(TYPES):
        rows = [array[n : n + 1] for n in (0, len(array) // 2, len(array) - 1)]
        columns[f"c{number}"] = pa.concat_arrays(rows)
    return pa.table(columns)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dictionaries", [False, True])  # with which batches are read whole
def test_columns_become_fields(tmp_path, way, dictionaries):
    table = foreign_table()
    kinds = {field.name: field.type for field in table.schema}
    table = table.select([n for n in kinds if pa.types.is_dictionary(kinds[n]) == dictionaries])
    if way == "parquet" and not READS_GAPS:  # this pyarrow cannot read such from Parquet
        fixed = [n for n in table.column_names if pa.types.is_fixed_size_list(kinds[n])]
        table = table.drop_columns(fixed)
    path = write(table, tmp_path, way, rows=2)
    reader = read(path)
    again = type(reader)(path, reader.layout)
    for name in table.column_names:
        array, kind, values = TYPES[int(name[1:])]
        assert reader.schema[name] == kind, array.type
        for number, place in enumerate((0, len(array) // 2, len(array) - 1)):
            expected = values[place]
            if isinstance(kind, Array) and expected is not None:
                expected = np.array(expected)
            for found in (reader, again):
                np.testing.assert_equal(found[number].get(name), expected)
    compare_at_once(reader)


@pytest.mark.skipif(not hasattr(pa, "bool8"), reason="an old pyarrow does not know them")
@pytest.mark.parametrize("way", WAYS)
def test_extension_types_of_arrow_itself_are_what_they_are_stored_as(tmp_path, way):
    columns = {
        "id": pa.array([b"x" * 16, None], pa.uuid()),
        "good": pa.array([1, 0], pa.int8()).cast(pa.bool8()),
        "about": pa.array(['{"a": 1}', "[]"], pa.json_()),
    }
    with shardkit.open(write(pa.table(columns), tmp_path, way)) as found:
        assert dict(found.schema) == {"id": Bytes(optional=True), "good": Int(), "about": Json()}
        first, second = ({n: v for n, v in s.items() if n != "__key__"} for s in found)
    assert first == {"id": b"x" * 16, "good": 1, "about": {"a": 1}}
    assert second == {"good": 0, "about": []}


@pytest.mark.parametrize("way", ["file", "stream"])
@pytest.mark.parametrize("deltas", [True, False])
def test_dictionaries_that_grow_or_are_replaced(tmp_path, way, deltas):
    deltas = deltas or way == "file"  # which a file must have
    growing, other = [["a"], ["a", "b"], ["a", "b", "c"]], [["a"], ["b", "a"], ["c", "x", "y"]]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=deltas)
    path, expected = tmp_path / "d.arrow", []
    schema = pa.schema({"x": pa.dictionary(pa.int8(), pa.string())})
    make = pa.ipc.new_stream if way == "stream" else pa.ipc.new_file
    with make(path, schema, options=options) as writer:
        for values in growing if deltas else other:
            indices = pa.array([len(values) - 1, 0, None], pa.int8())
            array = pa.DictionaryArray.from_arrays(indices, pa.array(values))
            writer.write_batch(pa.record_batch([array], schema=schema))
            expected += [values[-1], values[0], None]
    reader = ARROW.open(path)
    for n in (8, 0, 4, 5, 1, 6, 2, 3, 7):
        assert reader[n].get("x") == expected[n]
    compare_at_once(reader)


def test_only_some_batches_of_a_stream_are_compressed(tmp_path):
    batch = pa.record_batch({"x": [b"a", b"bc"] * 9, "n": range(18)})

    def stream(codec, batches):
        sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_stream(sink, batch.schema, options=options) as made:
            for one in batches:
                made.write_batch(one)
        return sink.getvalue().to_pybytes()[:-8]  # without its end

    front = stream(None, [])
    plain, compressed = (stream(codec, [batch])[len(front) :] for codec in (None, "zstd"))
    for number, batches in enumerate((plain + compressed, compressed + plain)):
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(front + batches)
        compare_at_once(ARROW.open(path))


@pytest.mark.parametrize("way", WAYS)
def test_keys_are_a_column_or_made_of_name_and_position(tmp_path, way):
    path = write(pa.table({"x": [1, 2, 3]}), tmp_path, way, rows=2)
    assert read(path).keys() == [f"foreign/{n:09d}" for n in range(3)]
    assert read(path)[2] == {"__key__": "foreign/000000002", "x": 3}
    compare_at_once(read(path))
    path = write(pa.table({"x": [1, 2], "__key__": ["a", "b"]}), tmp_path, way)
    assert read(path).keys() == ["a", "b"]
    assert read(path)[1] == {"__key__": "b", "x": 2}


ELSEWHERE = [{"bytes": make_image(), "path": None}, {"bytes": None, "path": "b.jpg"}]


@pytest.mark.parametrize("way", ["file", "parquet"])
@pytest.mark.parametrize(
    ("table", "message", "reads"),
    [
        (pa.table({"__url__": ["a"]}), "reserved name", False),
        (pa.table({"__key__": [1]}), "does not hold text", False),
        (pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), "the same name", False),
        (pa.table({"x": [{"a": b"bytes in a struct"}]}), "no field can hold", False),
        (pa.table({"x": [datetime.timedelta(1)]}), "no field can hold", False),
        (pa.table({"x": pa.array([1, 2**63], pa.uint64())}), "is not between", True),
        (pa.table({"x": ELSEWHERE}), "not its bytes", True),
        (pa.table({"x": [[0.0, 1.0], [float("nan"), None]]}), "JSON has no number", True),
    ],
)
def test_columns_and_values_that_cannot_be_read_are_named(tmp_path, way, table, message, reads):
    path = write(table, tmp_path, way)
    where = {"path": path, "field": table.column_names[0]}
    if reads:
        where |= {"position": 1, "key": "foreign/000000001"}
        assert "x" in read(path)[0]
    with refused(SampleError if reads else FormatError, message, where=where) as error:
        shardkit.open(path)[1]
    assert error.value.fix or reads


def test_shards_that_differ_are_read_with_one_schema(tmp_path):
    pq.write_table(pa.table({"x": [b"1"], "y": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [make_image(1)]}), tmp_path / "b.parquet")
    # A file without rows agrees with any type, as a column without values does.
    pandas.DataFrame({"x": [], "y": []}, dtype=object).to_parquet(tmp_path / "c.parquet")
    pq.write_table(pa.table({"x": pa.nulls(1)}), tmp_path / "d.parquet")
    with shardkit.open(tmp_path) as found:
        assert dict(found.schema) == {"x": Bytes(optional=True), "y": Int(optional=True)}
        assert [found[n].get("x") for n in range(3)] == [b"1", make_image(1), None]
    pq.write_table(pa.table({"x": [1]}), tmp_path / "e.parquet")
    found = "Bytes() in a.parquet, Image() in b.parquet, Int() in e.parquet"
    with refused(FormatError, "differs between shards", found=found):
        shardkit.open(tmp_path)
    assert read(write(pa.table({}), tmp_path, "stream")).schema == Schema({})


# The values of a column in two files, and what it is.
PARTS = {
    "text": (["a", None], [None, None], Text(optional=True)),
    "int": ([None, None], [1, 2], Int(optional=True)),
    "array": ([[1, 2], [3]], [None, None], Array("<i8", (None,), optional=True)),
    "image": ([make_image(1)] * 2, [None, None], Image(optional=True)),
    "json": ([{"a": 1}] * 2, [None, None], Json(optional=True)),
    "none": ([None, None], [None, None], Json(optional=True)),
}


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_a_column_without_values_is_of_any_type(tmp_path, kind):
    """pandas writes such a column as null, whatever the other files of the folder have there."""
    source = tmp_path / "in"
    source.mkdir()
    for part in range(2):
        frame = pandas.DataFrame({name: PARTS[name][part] for name in PARTS}, dtype=object)
        getattr(frame, f"to_{kind}")(source / f"{part}.{kind}")
    shardkit.convert(source, "wds", tmp_path / "out", workers=0)
    for place in (source, tmp_path / "out"):
        with shardkit.open(place) as found:
            assert dict(found.schema) == {name: kind for name, (_, _, kind) in PARTS.items()}
            for name, (one, other, _) in PARTS.items():
                for number, value in enumerate([*one, *other]):
                    expected = np.array(value) if name == "array" and value else value
                    np.testing.assert_equal(found[number].get(name), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_typed_column_without_values_is_of_any_type(tmp_path, way):
    """Such as one of floats, which pandas makes of numbers where all are missing."""
    write(pa.table({"x": ["a", "b"], "v": [1, 2]}), tmp_path, way)
    write(pa.table({"x": pa.nulls(1, pa.float64()), "v": [3]}), tmp_path, way, name="later")
    with shardkit.open(tmp_path) as found:
        assert dict(found.schema) == {"x": Text(optional=True), "v": Int()}
        assert [found[n].get("x") for n in range(3)] == ["a", "b", None]
        assert found.column("x").tolist() == ["a", "b", None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [None, 2])
def test_only_columns_with_nulls_are_optional(tmp_path, way, rows, monkeypatch):
    """Arrow says of nearly every column that it may hold nulls: the values count.

    Headers have their number: compressed files would be decoded whole for it.
    """
    columns = {
        "n": pa.array([1, None, None]), "text": pa.array(["a", "b", "c"]),
        "none": pa.nulls(3, pa.float64()), "lists": pa.array([[1], [2, 3], []]),
        "nested": pa.array([[["a"], None], None, []]),
    }  # fmt: skip
    path = write(pa.table(columns), tmp_path, way, rows)
    loaded = []
    monkeypatch.setattr(IpcReader, "_load", lambda *asked: loaded.append(asked))
    reader = read(path)
    assert loaded == []
    assert dict(reader.schema) == {
        "n": Int(optional=True), "text": Text(), "none": Float(optional=True),
        "lists": Array("<i8", (None,)), "nested": Json(optional=True),
    }  # fmt: skip
    assert reader.layout["empty"] == ["none"]


def test_batches_of_a_column_without_nulls_are_arrays(tmp_path):
    pandas.DataFrame({"label": range(8), "gap": [1, None] * 4}).to_parquet(tmp_path / "a.parquet")
    (batch,) = shardkit.stream.Loader(tmp_path / "a.parquet", batch_size=8, shuffle=False)
    assert batch["label"].tolist() == list(range(8))
    assert isinstance(batch["gap"], list)


@pytest.mark.parametrize("way", WAYS)
def test_features_of_hugging_face_count_beside_those_in_an_older_form(tmp_path, way):
    label = {"names": ["cat", "dog"], "_type": "ClassLabel"}
    features = {"words": [{"dtype": "string", "_type": "Value"}], "odd": None, "label": label}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"words": [["a"], []], "odd": [1, 2], "label": [0, 1]})
    reader = read(write(table.replace_schema_metadata(about), tmp_path, way))
    assert reader.layout["classes"] == {"label": ["cat", "dog"]}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_without_rows_is_a_shard_without_samples(tmp_path, way):
    reader = read(write(pa.table({"n": pa.array([], pa.int64())}), tmp_path, way))
    assert (len(reader), reader.keys()) == (0, [])
    if way != "parquet":
        assert (reader.spans().shape, reader.spans().dtype) == ((0, 2), np.int64)


TENSORS = {
    "plain": (np.arange(48, dtype="f4").reshape(2, 2, 3, 4), (2, 3, 4)),
    "one": (np.arange(6, dtype="i2").reshape(2, 3), (3,)),
    "square": (np.arange(18, dtype="i8").reshape(2, 3, 3), (3, 3)),
}


@pytest.mark.parametrize("way", WAYS)
def test_tensors_keep_their_shape(tmp_path, way):
    columns = {}
    for name, (values, _) in TENSORS.items():
        columns[name] = tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
        if way != "parquet" or READS_GAPS:
            parts = [tensors.storage[1:], pa.nulls(1, tensors.storage.type)]
            gap = pa.ExtensionArray.from_storage(tensors.type, pa.concat_arrays(parts))
            columns[f"{name} gap"] = gap
    path = write(pa.table(columns), tmp_path, way)
    (batch,) = shardkit.stream.Loader(path, batch_size=2, shuffle=False)
    shardkit.convert(path, "hf", tmp_path / "out", workers=0)
    with shardkit.open(path) as found, shardkit.open(tmp_path / "out") as again:
        for name, (values, shape) in TENSORS.items():
            kind = Array(values.dtype.str, shape)
            assert found.schema[name] == again.schema[name] == kind
            for dataset in (found, again):
                np.testing.assert_array_equal([dataset[n][name] for n in range(2)], values)
            assert found[0][name].flags.c_contiguous
            np.testing.assert_array_equal(batch[name], values)
            if f"{name} gap" in columns:
                assert found.schema[f"{name} gap"] == replace(kind, optional=True)
                np.testing.assert_array_equal(found[0][f"{name} gap"], values[1])
                assert f"{name} gap" not in found[1]


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 2, 3, 1)])
def test_tensors_whose_dimensions_are_permuted_are_refused(tmp_path, axes):
    values = np.arange(48).reshape(2, 2, 3, 4).transpose(axes)
    table = pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(values)})
    path = write(table, tmp_path, "file")
    with refused(FormatError, "permuted", where={"path": path, "field": "x"}):
        shardkit.open(path)


@pytest.mark.parametrize("name", ["arrow", "parquet"])
def test_files_of_another_kind_are_named(tmp_path, name):
    path = tmp_path / "s"
    for data in (b"", b"x", b"hello, I am text and rather long", bytes(100), make_image()):
        path.write_bytes(data)
        with refused(DamagedError, path=path):
            get_format(name).open(path)
    path.write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(FormatError if name == "arrow" else DamagedError):
        get_format(name).open(path)


def test_a_footer_that_points_beside_its_messages_is_damage(tmp_path):
    path = write(pa.table({"x": [1]}), tmp_path, "file")
    data = path.read_bytes()
    at = data.index(b"\xff" * 4, 12)  # the batch, behind the schema
    place = data.rindex(np.int64(at).tobytes())
    path.write_bytes(data[:place] + np.int64(at + 8).tobytes() + data[place + 8 :])
    with refused(DamagedError, "no message begins", path=path):
        ARROW.open(path)


@pytest.mark.parametrize("way", ["file", "stream"])
def test_a_damaged_value_costs_that_sample_only(tmp_path, way):
    path = write(pa.table({"x": ["first", "second", "third"]}), tmp_path, way)
    path.write_bytes(path.read_bytes().replace(b"second", b"sec\xffnd"))
    reader = read(path)
    assert (reader[0]["x"], reader[2]["x"]) == ("first", "third")
    with refused(SampleError, "value is damaged", position=1):
        reader[1]
    compare_at_once(reader)


def test_rows_of_a_list_that_lies_outside_of_its_values_are_not_read(tmp_path):
    """Its offsets are damaged: what follows the column in the file is no value of it."""
    lists = pa.array([list(range(n, n + 4)) for n in range(20)], pa.list_(pa.int64()))
    path = write(pa.table({"x": lists, "blob": [bytes(4000)] * 20}), tmp_path, "file")
    data = bytearray(path.read_bytes())
    at = data.index(np.arange(0, 84, 4, dtype="<i4").tobytes())
    data[at + 20 : at + 28] = np.array([400, 404], "<i4").tobytes()
    path.write_bytes(data)
    reader = ARROW.open(path)
    with pytest.raises(SampleError, match="damaged"):
        reader[5]
    compare_at_once(reader)
