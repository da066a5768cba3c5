"""TFRecord files: the contract, the layout read by hand, what others write, what is refused.

TensorFlow and DALI read and write them in test_tfrecord_tensorflow.py.
"""

import gzip
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import shardkit
from shardkit.codecs.protobuf import dump_field
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats import format_of, get_format
from shardkit.schema import Array, Bool, Float, Int, Schema, Text
from shardkit.testing import FormatContract, assert_reads, write_shard
from tests.formats.refusals import refused

TFRECORD = get_format("tfrecord")


def example_class():
    """tf.train.Example by protobuf's own library."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    lists = [("bytes_list", ".tf.BytesList"), ("float_list", ".tf.FloatList")]
    lists.append(("int64_list", ".tf.Int64List"))
    repeated, one = 3, 1
    for name, *fields in (
        ("BytesList", ("value", 1, repeated, 12, None)),
        ("FloatList", ("value", 1, repeated, 2, None)),
        ("Int64List", ("value", 1, repeated, 3, None)),
        ("Feature", *((field, n, one, 11, kind) for n, (field, kind) in enumerate(lists, 1))),
        ("Entry", ("key", 1, one, 9, None), ("value", 2, one, 11, ".tf.Feature")),
        ("Features", ("feature", 1, repeated, 11, ".tf.Entry")),
        ("Example", ("features", 1, one, 11, ".tf.Features")),
    ):
        made = file.message_type.add(name=name)
        for field, number, label, kind, type_name in fields:
            made.field.add(name=field, number=number, label=label, type=kind, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


EXAMPLE = example_class()


def records(path):
    """The payloads of a file, by the lengths alone."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        found.append(data[at + 12 : at + 12 + size])
        at += size + 16
    assert at == len(data)
    return found


def by_protobuf(record):
    features = EXAMPLE.FromString(record).features.feature
    return {entry.key: entry.value for entry in features}


class TestTFRecord(FormatContract):
    tested = TFRECORD
    provides = frozenset({"join", "plan", "spans"})

    def independent_keys(self, path):
        found = map(by_protobuf, records(path))
        return [each["__key__"].bytes_list.value[0].decode() for each in found]


def record(data):
    """A record, by the words of TensorFlow's record_writer.h."""

    def masked(data):
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def part(tag, *data):
    """A field of a message of up to 127 bytes."""
    content = b"".join(data)
    return bytes([tag, len(content)]) + content


def example(*entries):
    return part(0x0A, *(part(0x0A, entry) for entry in entries))


def feature(name, value):
    return part(0x0A, name.encode()) + part(0x12, value)


def ints(*numbers):
    return part(0x1A, part(0x0A, bytes(numbers)))


def put(path, *examples):
    path.write_bytes(b"".join(map(record, examples)))
    return TFRECORD.open(path)


MINUS_ONE = b"\xff" * 9 + b"\x01"
UNPACKED = b"\x08\x05\x08" + MINUS_ONE
ODD = [
    # An int64_list that is not packed, and half packed.
    feature("x", part(0x1A, UNPACKED)),
    feature("x", part(0x1A, b"\x08\x05", part(0x0A, MINUS_ONE))),
    # The value before the name, fields that nobody knows of every type.
    part(0x12, part(0x1A, part(0x0A, b"\x05" + MINUS_ONE))) + part(0x0A, b"x"),
    b"\x18\x07" + feature("x", part(0x62, b"?") + ints(5) + part(0x1A, b"\x08" + MINUS_ONE)),
    b"\x21" + bytes(8) + b"\x2d" + bytes(4) + feature("x", part(0x0A) + part(0x1A, UNPACKED)),
]


def test_every_way_to_write_a_list_is_read(tmp_path):
    reader = put(tmp_path / "a.tfrecord", *(example(each) for each in ODD))
    assert [sample["x"].tolist() for sample in map(reader.sample, range(len(ODD)))] == [[5, -1]] * 5
    for each in records(tmp_path / "a.tfrecord"):
        assert by_protobuf(each)["x"].int64_list.value == [5, -1]
    halves = example(feature("f", part(0x12, b"\x0d" + struct.pack("<f", 0.5))))
    reader = put(tmp_path / "b.tfrecord", halves, halves)
    assert reader[1] == {"__key__": "b/000000001", "f": 0.5}


def test_long_lists_are_whole(tmp_path):
    schema = Schema({"x": Array("<i8", (None,))})
    values = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 30_000)
    values = np.concatenate([values, np.arange(-100, 200_000), [0]])
    sample = {"__key__": "k", "x": values}
    assert_reads(write_shard(TFRECORD, tmp_path / "a.tfrecord", schema, [sample]), [sample])
    (stored,) = map(by_protobuf, records(tmp_path / "a.tfrecord"))
    assert np.array_equal(stored["x"].int64_list.value, values)
    endless = example(feature("x", part(0x1A, part(0x0A, b"\xff" * 100))))
    put(tmp_path / "b.tfrecord", endless)
    with pytest.raises(FormatError, match="'x' cannot be read: it has a truncated number"):
        shardkit.open(tmp_path / "b.tfrecord")


def test_features_that_some_records_lack(tmp_path):
    some = example(feature("x", ints(1)), feature("y", ints(2)))
    reader = put(tmp_path / "a.tfrecord", some, example(feature("x", ints(3))), example())
    assert reader.schema == Schema({"x": Int(optional=True), "y": Int(optional=True)})
    assert [reader[n].get("y") for n in range(3)] == [2, None, None]
    many = [example(feature("x", ints(n % 100))) for n in range(300)]
    late = [*many[:298], some, example(feature("z", ints(1)))]
    reader, none = put(tmp_path / "late.tfrecord", *late), "which none of the samples examined"
    with refused(SampleError, f"a feature 'y', {none}", position=298) as error:
        reader[298]
    assert error.value.where["offset"] > 0
    lacks = put(tmp_path / "lacks.tfrecord", *many[:299], example())
    assert lacks.layout["guessed"] == ["x"]
    with pytest.raises(SampleError, match="no value for 'x'"):
        lacks[299]
    result = shardkit.convert(tmp_path / "lacks.tfrecord", "tfrecord", tmp_path / "out", workers=0)
    assert result.samples == 300
    assert shardkit.open(tmp_path / "out").schema["x"] == Int(optional=True)


def test_what_no_field_can_hold_is_refused(tmp_path):
    bytes_list = part(0x0A, part(0x0A, b"\0"), part(0x0A, b"\1"))
    put(tmp_path / "a.tfrecord", example(feature("x", ints(1)), feature("b", bytes_list)))
    with refused(FormatError, r"'b' cannot be read: .*lists of bytes", fix="--drop b"):
        shardkit.open(tmp_path / "a.tfrecord")
    put(tmp_path / "b.tfrecord", example(feature("x", ints(1))), example(feature("x", bytes_list)))
    with pytest.raises(FormatError, match="a bytes_list and an int64_list"):
        shardkit.open(tmp_path / "b.tfrecord")
    for data in (b"just text", b"\x0a\x7f", b""):
        with pytest.raises(FormatError, match="none of the examined records can be read"):
            put(tmp_path / "c.tfrecord", data)
    for schema in ({"x": Float(), "x/float64": Int()}, {"x": Array("|u1"), "x/shape": Int()}):
        with refused(FormatError, "the name of 'x/", fix="--rename"):
            TFRECORD.layout(Schema(schema))


def test_damage_is_found_where_it_is(tmp_path):
    schema = Schema({"label": Int(), "text": Text()})
    samples = [{"__key__": f"k{n}", "label": n, "text": f"text {n}"} for n in range(3)]
    path = tmp_path / "a.tfrecord"
    write_shard(TFRECORD, path, schema, samples).close()
    whole, layout = path.read_bytes(), TFRECORD.layout(schema)
    size = len(whole) // 3
    path.write_bytes(whole.replace(b"text 1", b"text !"))
    reader = TFRECORD.open(path, layout)
    assert [reader[0], reader[2]] == [samples[0], samples[2]]
    where = {"path": path, "position": 1, "offset": size, "key": "k1", "field": "text"}
    with refused(SampleError, "CRC-32C", where=where):
        reader[1]
    assert reader.sample(1, ["label"]) == {"__key__": "k1", "label": 1}  # the rest is not read
    for cut in (1, 13, size - 5):
        path.write_bytes(whole[:-cut])
        with refused(DamagedError, "ends inside a record", offset=2 * size):
            TFRECORD.open(path)
    path.write_bytes(whole[:size] + b"\1" + whole[size + 1 :])
    with refused(DamagedError, "a record's length", offset=size):
        TFRECORD.open(path)
    path.write_bytes(whole)
    (tmp_path / "__shardkit__" / "a.records.npy").unlink()  # an index that is lost is made again
    for known in (layout, None):
        assert_reads(TFRECORD.open(path, known), samples)


@pytest.mark.filterwarnings("ignore:compressed TFRecord files")
def test_compressed_files_are_told_by_their_checksums(tmp_path):
    """A length of 0x8b1f begins as gzip does."""

    data = bytes(0x8B1F - 23)
    value = dump_field(2, dump_field(1, dump_field(1, data)))
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(dump_field(1, dump_field(1, dump_field(1, b"b") + value))))
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    packed = tmp_path / "b.tfrecord"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for each in (path, packed):
        assert TFRECORD.open(each)[0]["b"] == data


def test_floats_keep_all_bits(tmp_path):
    schema = Schema({"f": Float()})
    values = [0.5, 0.1, 1e300, -0.0, float("inf"), 5e-324]
    samples = [{"__key__": f"{n}", "f": value} for n, value in enumerate(values)]
    reader = write_shard(TFRECORD, tmp_path / "a.tfrecord", schema, samples)
    assert_reads(reader, samples)
    assert_reads(TFRECORD.open(tmp_path / "a.tfrecord"), samples)
    sizes = [len(by_protobuf(each)) for each in records(tmp_path / "a.tfrecord")]
    assert sizes == [2, 3, 3, 2, 2, 3]  # with the one of 64 bits, where 32 are not enough


def test_arrays_are_lists_where_the_schema_tells_their_shape(tmp_path):
    kinds = {
        "a": Array("<u4", (None,)), "b": Array("<i2", (None, 2)), "c": Array("<f4", (1, 2)),
        "d": Array("<i8", ()), "e": Array("<i4", (None, None)), "f": Array("|u1", (2,)),
        "g": Array("<u8", (1,)), "h": Array(),
    }  # fmt: skip
    sample = {"__key__": "k"}
    for name, kind in kinds.items():
        sample[name] = np.ones([size or 2 for size in kind.shape or ()], kind.dtype or "<f4")
    write_shard(TFRECORD, tmp_path / "a.tfrecord", Schema(kinds), [sample]).close()
    (stored,) = map(by_protobuf, records(tmp_path / "a.tfrecord"))
    numbers = {"a": [1, 1], "b": [1] * 4, "d": [1], "e/shape": [2, 2]}
    assert {name: stored[name].int64_list.value for name in numbers} == numbers
    assert stored["c"].float_list.value == [1, 1]
    assert stored["e"].bytes_list.value == [b"\1\0\0\0" * 4]
    assert stored["f"].bytes_list.value == [b"\1\1"]
    for name in "gh":
        assert stored[name].bytes_list.value[0].startswith(b"\x93NUMPY")
        assert name in TFRECORD.notes(Schema(kinds))[0]


def test_a_bool_is_0_or_1(tmp_path):
    path, samples = tmp_path / "a.tfrecord", [{"__key__": f"{n}", "x": n} for n in range(3)]
    layout = write_shard(TFRECORD, path, Schema({"x": Int()}), samples).layout
    reader = TFRECORD.open(path, {**layout, "schema": Schema({"x": Bool()}).to_json()})
    assert [reader[n]["x"] for n in range(2)] == [False, True]
    with pytest.raises(SampleError, match="neither 0 nor 1"):
        reader[2]


def test_names_of_files():
    names = "a.tfrecord a.TFRecords a.tfrec a.tfrecord.gz mnist-train.tfrecord-00000-of-00010"
    for name in (*names.split(), "train-00000-of-01024"):
        assert format_of(Path(name)) == "tfrecord"
    for name in ("train-00000-of-00001.parquet", "a.tfrecord.txt", "00000-of-1"):
        assert format_of(Path(name)) != "tfrecord"
