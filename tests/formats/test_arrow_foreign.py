"""Arrow and Parquet files that others made, and files that are damaged."""

from __future__ import annotations

import datetime
import decimal
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Image, Int, Json, Schema, Text
from shardkit.testing import EVERYTHING, everything, make_image, write_shard

ARROW, PARQUET = get_format("arrow"), get_format("parquet")
WAYS = ["file", "stream", "lz4", "zstd", "parquet"]


def write(table: pa.Table, folder: Path, way: str, rows: int | None = None) -> Path:
    """A table as others write it, in batches of so many rows."""
    if way == "parquet":
        path = folder / "foreign.parquet"
        pq.write_table(table, path, row_group_size=rows)
        return path
    path = folder / "foreign.arrow"
    options = pa.ipc.IpcWriteOptions(compression=way if way in ("lz4", "zstd") else None)
    make = pa.ipc.new_stream if way == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema, options=options) as made:
        made.write_table(table, max_chunksize=rows)
    return path


def read(path: Path) -> Any:
    name = format_of(path)
    assert name is not None
    return get_format(name).open(path)


def column(reader: Any, name: str = "x") -> list[Any]:
    return [reader[n].get(name) for n in range(len(reader))]


DAY = datetime.datetime(2020, 1, 2, 3, 4, 5)
TYPES: list[tuple[pa.Array, FieldType, list[Any]]] = [
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
    (
        pa.array([{"bytes": make_image(1), "path": "1.jpg"}, {"bytes": None, "path": None}]),
        Image(optional=True),
        [make_image(1), None],
    ),
    (pa.array([{"bytes": b"sound", "path": None}]), Bytes(), [b"sound"]),
    (pa.array([[1, 2], []]), Array("<i8", (None,)), [[1, 2], []]),
    (pa.array([[1, 2], None]), Array("<i8", (None,), optional=True), [[1, 2], None]),
    (pa.array([[1.0]], pa.large_list(pa.float32())), Array("<f4", (None,)), [[1.0]]),
    (
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.uint8(), 2)),
        Array("|u1", (2,), optional=True),
        [[1, 2], None, [3, 4]],
    ),
    (
        pa.array([[[1, 2], [3, 4]], []], pa.list_(pa.list_(pa.int16(), 2))),
        Array("<i2", (None, 2)),
        [[[1, 2], [3, 4]], np.zeros((0, 2))],
    ),
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
    TYPES += [
        (pa.array(TEXTS, pa.string_view()), Text(optional=True), TEXTS),
        (pa.array(BLOBS, pa.binary_view()), Bytes(), BLOBS),
        (pa.array([TEXTS, []], pa.list_(pa.string_view())), Json(), [TEXTS, []]),
    ]


def foreign_table() -> pa.Table:
    """Three rows of all of TYPES, each of which takes another way through the reader."""
    columns = {}
    for number, (array, _, _) in enumerate(TYPES):
        rows = [array[n : n + 1] for n in (0, len(array) // 2, len(array) - 1)]
        columns[f"c{number}"] = pa.concat_arrays(rows)
    return pa.table(columns)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dictionaries", [False, True])  # with which batches are read whole
def test_columns_become_fields(tmp_path: Path, way: str, dictionaries: bool) -> None:
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


@pytest.mark.parametrize("way", WAYS)
def test_extension_types_of_arrow_itself_are_what_they_are_stored_as(
    tmp_path: Path, way: str
) -> None:
    if not hasattr(pa, "bool8"):
        return  # an old pyarrow does not know them
    columns = {
        "id": pa.array([b"x" * 16, None], pa.uuid()),
        "good": pa.array([1, 0], pa.int8()).cast(pa.bool8()),
        "about": pa.array(['{"a": 1}', "[]"], pa.json_()),
    }
    with shardkit.open(write(pa.table(columns), tmp_path, way)) as found:
        assert dict(found.schema) == {"id": Bytes(optional=True), "good": Int(), "about": Json()}
        assert [found[n].get("id") for n in range(2)] == [b"x" * 16, None]
        assert [found[n]["good"] for n in range(2)] == [1, 0]
        assert [found[n]["about"] for n in range(2)] == [{"a": 1}, []]


@pytest.mark.parametrize("way", WAYS)
def test_batches_with_dictionaries_read_at_random(tmp_path: Path, way: str) -> None:
    texts = [f"value {n % 7}" for n in range(100)]
    table = pa.table({"x": pa.array(texts).dictionary_encode(), "n": list(range(100))})
    reader = read(write(table, tmp_path, way, rows=9))
    for n in np.random.default_rng(0).permutation(100).tolist():
        assert (reader[n]["x"], reader[n]["n"]) == (texts[n], n)


@pytest.mark.parametrize("way", ["file", "stream"])
@pytest.mark.parametrize("deltas", [True, False])
def test_dictionaries_that_grow_or_are_replaced(tmp_path: Path, way: str, deltas: bool) -> None:
    growing = [["a"], ["a", "b"], ["a", "b", "c"]]
    dictionaries = growing if deltas or way == "file" else [["a"], ["b", "a"], ["c", "x", "y"]]
    options = pa.ipc.IpcWriteOptions(
        emit_dictionary_deltas=deltas or way == "file",  # which a file must have
    )
    path, expected = tmp_path / "d.arrow", []
    schema = pa.schema({"x": pa.dictionary(pa.int8(), pa.string())})
    make = pa.ipc.new_stream if way == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, schema, options=options) as writer:
        for values in dictionaries:
            indices = pa.array([len(values) - 1, 0, None], pa.int8())
            array = pa.DictionaryArray.from_arrays(indices, pa.array(values))
            writer.write_batch(pa.record_batch([array], schema=schema))
            expected += [values[-1], values[0], None]
    reader = ARROW.open(path)
    for n in (8, 0, 4, 5, 1, 6, 2, 3, 7):
        assert reader[n].get("x") == expected[n]


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather_of_pandas_with_categories(tmp_path: Path, compression: str) -> None:
    kinds = pandas.Categorical(["p", None, "q", "p"])
    frame = pandas.DataFrame({"kind": kinds, "n": range(4), "when": pandas.Timestamp(DAY)})
    frame.to_feather(tmp_path / "f.feather", compression=compression)
    with shardkit.open(tmp_path / "f.feather") as found:
        assert dict(found.schema) == {"kind": Text(optional=True), "n": Int(), "when": Json()}
        assert [found[n].get("kind") for n in range(4)] == ["p", None, "q", "p"]
        assert found[3]["when"] == DAY.isoformat()


@pytest.mark.parametrize("way", WAYS)
def test_keys_are_a_column_or_made_of_name_and_position(tmp_path: Path, way: str) -> None:
    path = write(pa.table({"x": [1, 2, 3]}), tmp_path, way, rows=2)
    assert read(path).keys() == [f"foreign/{n:09d}" for n in range(3)]
    assert read(path)[2] == {"__key__": "foreign/000000002", "x": 3}
    path = write(pa.table({"x": [1, 2], "__key__": ["a", "b"]}), tmp_path, way)
    assert read(path).keys() == ["a", "b"]
    assert read(path)[1] == {"__key__": "b", "x": 2}


@pytest.mark.parametrize("way", ["file", "parquet"])
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"__url__": ["a"]}), "reserved name"),
        (pa.table({"__key__": [1]}), "does not hold text"),
        (pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), "the same name"),
        (pa.table({"x": pa.array([{"a": b"bytes in a struct"}])}), "no field can hold"),
        (pa.table({"x": pa.array([datetime.timedelta(1)])}), "no field can hold"),
    ],
)
def test_columns_that_no_field_can_hold_are_named(
    tmp_path: Path, way: str, table: pa.Table, message: str
) -> None:
    path = write(table, tmp_path, way)
    with pytest.raises(FormatError, match=message) as error:
        shardkit.open(path)
    assert error.value.where == {"path": path, "field": table.column_names[0]}
    assert error.value.fix


@pytest.mark.parametrize("way", ["file", "parquet"])
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([1, 2**63], pa.uint64()), "too large"),
        (
            pa.array([{"bytes": make_image(), "path": None}, {"bytes": None, "path": "b.jpg"}]),
            "not its bytes",
        ),
        (pa.array([[0.0, 1.0], [float("nan"), None]]), "JSON has no number"),
    ],
)
def test_values_that_cannot_be_read_are_named(
    tmp_path: Path, way: str, array: pa.Array, message: str
) -> None:
    path = write(pa.table({"x": array}), tmp_path, way)
    reader = read(path)
    assert "x" in reader[0]
    with pytest.raises(SampleError, match=message) as error:
        reader[1]
    assert error.value.where == {
        "path": path, "position": 1, "key": "foreign/000000001", "field": "x",
    }  # fmt: skip


def test_shards_that_differ_are_read_with_one_schema(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [b"1"], "y": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [make_image(1)]}), tmp_path / "b.parquet")
    with shardkit.open(tmp_path) as found:
        assert dict(found.schema) == {"x": Bytes(), "y": Int(optional=True)}
        assert [found[n]["x"] for n in range(2)] == [b"1", make_image(1)]


PARTS: dict[str, tuple[list[Any], list[Any], FieldType]] = {
    "text": (["a", None], [None, None], Text(optional=True)),
    "int": ([None, None], [1, 2], Int(optional=True)),
    "array": ([[1, 2], [3]], [None, None], Array("<i8", (None,), optional=True)),
    "image": ([make_image(1)] * 2, [None, None], Image(optional=True)),
    "json": ([{"a": 1}] * 2, [None, None], Json(optional=True)),
    "none": ([None, None], [None, None], Json(optional=True)),
}


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_a_column_without_values_is_of_any_type(tmp_path: Path, kind: str) -> None:
    """pandas writes such a column as null, whatever the other files of the folder have there."""
    source = tmp_path / "in"
    source.mkdir()
    for part in range(2):
        frame = pandas.DataFrame({name: PARTS[name][part] for name in PARTS}, dtype=object)
        getattr(frame, f"to_{kind}")(source / f"{part}.{kind}")
    shardkit.convert(source, "wds", tmp_path / "out", workers=0)
    for place in (source, tmp_path / "out"):
        with shardkit.open(place) as found:
            assert dict(found.schema) == {
                name: expected for name, (_, _, expected) in PARTS.items()
            }
            for name, (one, other, _) in PARTS.items():
                for number, value in enumerate([*one, *other]):
                    expected = np.array(value) if name == "array" and value else value
                    np.testing.assert_equal(found[number].get(name), expected)


def test_a_file_without_rows_agrees_with_any_type(tmp_path: Path) -> None:
    for name, values in {"a": [0.5], "b": []}.items():
        pandas.DataFrame({"x": values}, dtype=object).to_parquet(tmp_path / f"{name}.parquet")
    assert dict(shardkit.open(tmp_path).schema) == {"x": Float()}


@pytest.mark.parametrize("way", WAYS)
def test_a_typed_column_without_values_is_of_any_type(tmp_path: Path, way: str) -> None:
    """Such as one of floats, which pandas makes of numbers where all are missing."""
    (tmp_path / "a").mkdir()
    first = write(pa.table({"x": ["a", "b"], "v": [1, 2]}), tmp_path, way)
    second = write(pa.table({"x": pa.nulls(1, pa.float64()), "v": [3]}), tmp_path / "a", way)
    second.rename(first.with_stem("later"))
    (tmp_path / "a").rmdir()
    with shardkit.open(tmp_path) as found:
        assert dict(found.schema) == {"x": Text(optional=True), "v": Int()}
        assert [found[n].get("x") for n in range(3)] == ["a", "b", None]
        numbers, out = np.arange(1), np.zeros((1, 2))
        reader: Any = found.reader(1)
        assert not hasattr(reader, "read_rows") or not reader.read_rows("x", numbers, out)


def test_columns_of_two_types_are_refused_by_the_shards_that_have_values(tmp_path: Path) -> None:
    for name, array in {"a": ["t"], "b": pa.nulls(1), "c": [1]}.items():
        pq.write_table(pa.table({"x": array}), tmp_path / f"{name}.parquet")
    with pytest.raises(FormatError, match="differs between shards") as error:
        shardkit.open(tmp_path)
    assert error.value.found == "Text() in a.parquet, Int() in c.parquet"


@pytest.mark.parametrize("way", WAYS)
def test_only_columns_with_nulls_are_optional(tmp_path: Path, way: str) -> None:
    """Arrow says of nearly every column that it may hold nulls: the values count."""
    table = pa.table({"full": [1, 2, 3], "gaps": [1, None, 3], "lists": [[1], [2], [3]]})
    assert all(field.nullable for field in table.schema)
    for rows in (None, 2):
        reader = read(write(table, tmp_path, way, rows))
        optional = {name: kind.optional for name, kind in reader.schema.items()}
        assert optional == {"full": False, "gaps": True, "lists": False}


@pytest.mark.parametrize("way", ["file", "stream", "lz4"])
def test_nulls_are_counted_in_headers_without_reading_columns(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed files would be decoded whole for it."""
    columns = {
        "n": pa.array([1, None, None]), "text": pa.array(["a", "b", "c"]),
        "none": pa.nulls(3, pa.float64()), "lists": pa.array([[1], [2, 3], []]),
        "nested": pa.array([[["a"], None], None, []]),
    }  # fmt: skip
    path = write(pa.table(columns), tmp_path, way, rows=2)
    loaded: list[list[str]] = []
    load = IpcReader._load

    def note(self: IpcReader, number: int, names: Any) -> Any:
        loaded.append([*names])
        return load(self, number, names)

    monkeypatch.setattr(IpcReader, "_load", note)
    reader = read(path)
    assert loaded == []
    assert dict(reader.schema) == {
        "n": Int(optional=True), "text": Text(), "none": Float(optional=True),
        "lists": Array("<i8", (None,)), "nested": Json(optional=True),
    }  # fmt: skip
    assert reader.layout["empty"] == ["none"]


def test_batches_of_a_column_without_nulls_are_arrays(tmp_path: Path) -> None:
    pandas.DataFrame({"label": range(8), "gap": [1, None] * 4}).to_parquet(tmp_path / "a.parquet")
    (batch,) = shardkit.stream.Loader(tmp_path / "a.parquet", batch_size=8, shuffle=False)
    assert batch["label"].tolist() == list(range(8))
    assert isinstance(batch["gap"], list)


TENSORS = {
    "plain": (np.arange(48, dtype="f4").reshape(2, 2, 3, 4), (2, 3, 4)),
    "one": (np.arange(6, dtype="i2").reshape(2, 3), (3,)),
    "swapped": (np.arange(24, dtype="u1").reshape(2, 4, 3).transpose(0, 2, 1), (3, 4)),
    "square": (np.arange(18, dtype="i8").reshape(2, 3, 3).transpose(0, 2, 1), (3, 3)),
}


@pytest.mark.parametrize("way", WAYS)
def test_tensors_keep_their_shape(tmp_path: Path, way: str) -> None:
    columns = {}
    for name, (values, _) in TENSORS.items():
        columns[name] = tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
        parts = [tensors.storage[1:], pa.nulls(1, tensors.storage.type)]
        if way != "parquet" or READS_GAPS:
            columns[f"{name} gap"] = pa.ExtensionArray.from_storage(
                tensors.type, pa.concat_arrays(parts)
            )
    path = write(pa.table(columns), tmp_path, way)
    (batch,) = shardkit.stream.Loader(path, batch_size=2, shuffle=False)
    shardkit.convert(path, "hf", tmp_path / "out", workers=0)
    with shardkit.open(path) as found, shardkit.open(tmp_path / "out") as again:
        for name, (values, shape) in TENSORS.items():
            kind = Array(values.dtype.str, shape)
            assert found.schema[name] == again.schema[name] == kind
            for n in range(2):
                np.testing.assert_array_equal(found[n][name], values[n])
                np.testing.assert_array_equal(again[n][name], values[n])
                assert found[n][name].flags.c_contiguous
            np.testing.assert_array_equal(batch[name], values)
            if f"{name} gap" in columns:
                assert found.schema[f"{name} gap"] == replace(kind, optional=True)
                np.testing.assert_array_equal(found[0][f"{name} gap"], values[1])
                assert f"{name} gap" not in found[1]


def test_tensors_whose_dimensions_are_rotated_are_refused(tmp_path: Path) -> None:
    """pyarrow makes such of arrays, and fails to read them: the specification has it otherwise."""
    values = np.arange(48).reshape(2, 2, 3, 4).transpose(0, 2, 3, 1)
    path = write(
        pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(values)}), tmp_path, "file"
    )
    with pytest.raises(FormatError, match="rotated") as error:
        shardkit.open(path)
    assert error.value.where == {"path": path, "field": "x"}


def test_a_table_without_rows_or_columns(tmp_path: Path) -> None:
    assert len(read(write(pa.table({"x": pa.array([], pa.int8())}), tmp_path, "file"))) == 0
    assert read(write(pa.table({}), tmp_path, "stream")).schema == Schema({})


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["arrow", "hf", "parquet"])
def test_a_file_that_is_cut_is_named(tmp_path: Path, name: str) -> None:
    format = get_format(name)
    path = tmp_path / f"s.{name}"
    write_shard(format, path, EVERYTHING, [everything(n) for n in range(4)]).close()
    data = path.read_bytes()
    for size in [*range(0, len(data) - 8, len(data) // 16), 3, 7, 8, 12, len(data) - 9]:
        path.write_bytes(data[:size])
        with pytest.raises((DamagedError, FormatError)) as error:
            format.open(path, format.layout(EVERYTHING))
        assert error.value.where["path"] == path


@pytest.mark.parametrize("name", ["arrow", "parquet"])
def test_files_of_another_kind_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s"
    for data in (b"", b"x", b"hello, I am text and rather long", bytes(100), make_image()):
        path.write_bytes(data)
        with pytest.raises(DamagedError) as error:
            get_format(name).open(path)
        assert error.value.where["path"] == path
    path.write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(FormatError if name == "arrow" else DamagedError):
        get_format(name).open(path)


@pytest.mark.parametrize("way", ["file", "stream"])
def test_a_damaged_value_costs_that_sample_only(tmp_path: Path, way: str) -> None:
    path = write(pa.table({"x": ["first", "second", "third"]}), tmp_path, way)
    path.write_bytes(path.read_bytes().replace(b"second", b"sec\xffnd"))
    reader = read(path)
    assert (reader[0]["x"], reader[2]["x"]) == ("first", "third")
    with pytest.raises(SampleError, match="value is damaged") as error:
        reader[1]
    assert error.value.where["position"] == 1


def test_rows_of_a_list_that_lies_outside_of_its_values_are_not_read(tmp_path: Path) -> None:
    """Its offsets are damaged: what follows the column in the file is no value of it."""
    arrays = {"x": [list(range(n, n + 4)) for n in range(20)], "blob": [bytes(4000)] * 20}
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file:
        table = pa.table({"x": pa.array(arrays["x"], pa.list_(pa.int64())), "blob": arrays["blob"]})
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    data = bytearray((tmp_path / "x.arrow").read_bytes())
    at = data.index(np.arange(0, 84, 4, dtype="<i4").tobytes())
    data[at + 20 : at + 28] = np.array([400, 404], "<i4").tobytes()
    (tmp_path / "x.arrow").write_bytes(data)
    reader = ARROW.open(tmp_path / "x.arrow")
    with pytest.raises(SampleError, match="damaged"):
        reader[5]
    out = np.full((1, 4), 7, np.int64)
    assert not reader.read_rows("x", np.array([5]), out)
    assert (out == 7).all()
    assert reader.read_rows("x", np.array([7]), out)
