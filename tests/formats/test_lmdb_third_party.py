"""LMDBs that others made, and what we make of them."""

import json
import pickle
import re
from functools import partial
from hashlib import sha1
from pathlib import Path

import lmdb
import msgpack
import numpy as np
import pytest
from click.testing import CliRunner
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import shardkit
from shardkit import Array, Bytes, Image, Int, Json, Text
from shardkit.cli.inspect import command
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.testing import assert_same, make_image
from tests.formats.refusals import refused


def make(folder, values, *, name=None, **options):
    """An environment by the LMDB library."""
    with lmdb.open(str(folder), map_size=1 << 28, max_dbs=4, **options) as environment:
        database = None if name is None else environment.open_db(name)
        with environment.begin(write=True, db=database) as transaction:
            for key, value in values.items():
                transaction.put(key, value)
    return folder


def datum(shape, data, label, encoded):
    """Caffe's message, written out by hand."""
    numbers = b"".join(bytes([8 * n, v]) for n, v in zip((1, 2, 3), shape, strict=True))
    size = bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return numbers + b"\x22" + size + data + bytes([0x28, label, 0x38, encoded])


def datum_class():
    """Caffe's message, as protoc makes it of caffe.proto."""
    file = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="Datum")
    kinds = {"channels": 5, "height": 5, "width": 5, "data": 12, "label": 5, "float_data": 2}
    for number, (name, kind) in enumerate({**kinds, "encoded": 8}.items(), 1):
        message.field.add(name=name, number=number, type=kind, label=3 if number == 6 else 1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum"))


def by_protobuf(messages):
    known = datum_class()
    return {key: known(**fields).SerializeToString() for key, fields in messages.items()}


def numbered(count, first=1, **parts):
    """As create_lmdb_dataset.py of deep-text-recognition-benchmark writes its cache."""
    cache = {
        b"%s-%09d" % (part.encode(), n): value_of(n)
        for n in range(first, first + count)
        for part, value_of in parts.items()
    }
    return {**cache, b"num-samples": b"%d" % count}


def folder2lmdb(bin_type):
    """Pairs of image and label, in the order of __keys__; before msgpack 1 bytes were text."""
    dumps = partial(msgpack.packb, use_bin_type=bin_type)
    values = {b"%d" % n: dumps((make_image(n), n % 3)) for n in range(12)}
    return {**values, b"__keys__": dumps([*values]), b"__len__": dumps(12)}


ARRAY = np.arange(6, dtype="<f4").reshape(2, 3)
PACKED = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": (2, 3), b"data": ARRAY.tobytes()}
IMAGES = [make_image(n) for n in range(12)]
PNG = make_image(2, "PNG")
WEBPS = {sha1(image).hexdigest(): image for image in (make_image(n, "WEBP") for n in range(5))}
SHAPE = bytes([8, 1, 16, 2, 24, 3])
FLOATS = b"\x32" + bytes([24]) + ARRAY.tobytes()
SINGLE = b"".join(b"\x35" + value.tobytes() for value in ARRAY.ravel())
BOTH = datum((1, 2, 3), bytes(range(6)), 5, False).replace(b"\x22\x86\0", b"\x22\6") + FLOATS
OTHER = b"\x4a\x01z" + b"\x51" + bytes(8)
PIXELS = np.random.default_rng(1).integers(0, 256, (4, 3, 5, 7), np.uint8)
FEATURES = np.random.default_rng(1).random((3, 4096), np.float32)
CAFFE, PAIRS = "Caffe's Datum messages", "a msgpack list each, listed in __keys__"
FLOATING = {"a": {"pixels": ARRAY.reshape(1, 2, 3), "label": 4}}
WHOLE = {"pixels": np.arange(6, dtype="u1").reshape(1, 2, 3), "label": 5}
WHOLE |= {"float_data": ARRAY.ravel()}
# What is stored, the samples of it, and what `conventions` tells.
STORED = {
    "file names": (  # and two entries that are no samples
        {b"cat/1.jpg": IMAGES[1], b"cat/1.png": PNG, b"dog/v1.2.jpeg": IMAGES[3],
         b"plain": IMAGES[4], b"\xff\x00\x01": IMAGES[5],
         b"num-samples": b"5", b"__meta__": pickle.dumps([1])},
        {"cat/1": {"image": IMAGES[1]}, "cat/1~png": {"image": PNG},
         "dog/v1_2": {"image": IMAGES[3]}, "plain": {"image": IMAGES[4]},
         "ff0001": {"image": IMAGES[5]}}, "an image each"),
    "LSUN, whose data.py exports each value as it is, under its key": (
        {key.encode(): image for key, image in WEBPS.items()},
        {key: {"image": image} for key, image in sorted(WEBPS.items())}, "LSUN's images"),
    "msgpack maps": (
        {b"0": msgpack.packb({"jpg": IMAGES[1], "label": 3, "x": PACKED, "tags": ["a"]}),
         b"1": msgpack.packb({"jpg": IMAGES[2], "label": None, "more": "text"}),
         b"__len__": msgpack.packb(2), b"__keys__": msgpack.packb(["0", "1"])},
        {"0": {"jpg": IMAGES[1], "label": 3, "x": ARRAY, "tags": ["a"]},
         "1": {"jpg": IMAGES[2], "label": None, "more": "text"}}, None),
    "a msgpack map of old": (
        {b"a": msgpack.packb({"image": IMAGES[1], "x": PACKED}, use_bin_type=False)},
        {"a": {"image": IMAGES[1], "x": ARRAY}}, None),
    "tensorpack's LMDBSerializer, with msgpack-numpy": (
        {b"%d" % n: msgpack.packb([PACKED, f"ü{n}", b"\xff"]) for n in range(3)},
        {f"{n}": {"value0": ARRAY, "value1": f"ü{n}", "value2": b"\xff"} for n in range(3)}, None),
    **{f"folder2lmdb, bin_type {bin_type}": (
        folder2lmdb(bin_type),
        {f"{n}": {"image": make_image(n), "label": n % 3} for n in range(12)}, PAIRS)
       for bin_type in (True, False)},
    "JSON": ({b"a": b'{"x" : 1.50}', b"b": b'{"y":[]}'},
             {"a": {"json": {"x": 1.5}}, "b": {"json": {"y": []}}}, None),
    "bytes": ({b"a": b"\xff\xfe", b"b": b"b"},
              {"a": {"value": b"\xff\xfe"}, "b": {"value": b"b"}}, None),
    "bytes that happen to be a list": (
        {b"a": b"\x92\1\2", b"b": b"\x93"},
        {"a": {"value": b"\x92\1\2"}, "b": {"value": b"\x93"}}, None),
    # Floats are the pixels where there are no bytes; nothing in a message is lost.
    "packed floats": ({b"a": SHAPE + FLOATS + bytes([0x28, 4])}, FLOATING, CAFFE),
    "single floats": ({b"a": SHAPE + SINGLE + bytes([0x28, 4])}, FLOATING, CAFFE),
    "pixels and floats": ({b"a": BOTH, b"b": BOTH + OTHER},
                          {"a": WHOLE, "b": {**WHOLE, "other": OTHER}}, CAFFE),
    "a datum with two labels": ({b"a": BOTH + b"\x28\6"}, {"a": {"value": BOTH + b"\x28\6"}}, None),
    "convert_imageset": (
        by_protobuf({b"%08d_cat/%d.jpg" % (n, n): {"data": PIXELS[n].tobytes(), "label": n - 1,
                     "channels": 3, "height": 5, "width": 7} for n in range(4)}),
        {f"cat/{n}": {"pixels": PIXELS[n], "label": n - 1} for n in range(4)}, CAFFE),
    "convert_imageset --encoded": (
        by_protobuf({b"%d" % n: {"data": IMAGES[n], "label": n, "encoded": True, "channels": 3}
                     for n in range(3)}),
        {f"{n}": {"image": IMAGES[n], "label": n} for n in range(3)}, CAFFE),
    "Caffe's features": (
        by_protobuf({b"%d" % n: {"channels": 4096, "height": 1, "width": 1, "float_data": [*values]}
                     for n, values in enumerate(FEATURES)}),
        {f"{n}": {"pixels": values.reshape(-1, 1, 1)} for n, values in enumerate(FEATURES)}, CAFFE),
    "nothing": ({}, {}, None),
}  # fmt: skip
TYPES = {"image": Image, "jpg": Image, "pixels": Array, "x": Array, "value0": Array, "json": Json}
TYPES |= {"tags": Json, "more": Text, "value": Bytes, "value1": Text, "value2": Bytes}
TYPES |= {"float_data": Array, "other": Bytes, "label": Int}


@pytest.mark.parametrize("name", STORED)
def test_what_others_store_becomes_samples(tmp_path, name):
    values, samples, conventions = STORED[name]
    dataset = shardkit.open(make(tmp_path / "x_train_lmdb", values))
    for found, (key, fields) in zip(dataset, samples.items(), strict=True):
        assert_same(found, {"__key__": key, **fields})
    for field, kind in dataset.schema.items():
        assert type(kind) is (Json if (name, field) == ("msgpack maps", "label") else TYPES[field])
    assert conventions is None or dataset.conventions == [conventions]


def test_json_is_converted_as_it_stands(tmp_path):
    make(tmp_path / "json", STORED["JSON"][0])
    shardkit.convert(tmp_path / "json", "wds", tmp_path / "wds", workers=0)
    assert b'{"x" : 1.50}' in (tmp_path / "wds/shard-000000.tar").read_bytes()


def test_an_environment_that_was_changed_often_is_read_as_it_is_now(tmp_path):
    with lmdb.open(str(tmp_path / "x"), map_size=1 << 28) as environment:
        for round_ in range(20):
            with environment.begin(write=True) as transaction:
                for number in range(200):
                    transaction.put(b"%04d" % number, b"%d %d" % (round_, number) * (number % 700))
                transaction.delete(b"%04d" % round_)
    dataset = shardkit.open(tmp_path / "x")
    assert len(dataset) == 199
    assert dataset[198]["value"] == b"19 199" * 199


def test_a_datum_of_very_many_floats_takes_no_longer_than_they_do(tmp_path):
    """One by one they are 2,000,000 fields; to add bytes to bytes would take minutes."""
    shape = b"\x08\x01\x10\x01\x18\x80\x89\x7a"
    one = shape + b"\x35" + b"\x35".join(np.arange(2_000_000, dtype="<f4").view("V4").tolist())
    (sample,) = shardkit.open(make(tmp_path / "x", {b"a": one}))
    assert sample["pixels"].shape == (1, 1, 2_000_000)


def test_databases_that_cannot_be_read_as_one_are_refused(tmp_path):
    folder = make(tmp_path / "x", {b"a": b"1"}, name=b"train")
    assert shardkit.open(folder)[0]["__key__"] == "a"  # one alone is read, and one that is a file
    dataset = shardkit.open(make(tmp_path / "file.lmdb", {b"a": b"1"}, subdir=False))
    assert dataset[0] == {"__key__": "a", "value": b"1"}
    make(folder, {b"b": b"2"}, name=b"val")
    with refused(FormatError, "several named databases", found="'train', 'val'"):
        shardkit.open(folder)
    with lmdb.open(str(tmp_path / "y"), max_dbs=1) as environment:
        database = environment.open_db(b"d", dupsort=True)
        with environment.begin(write=True, db=database) as transaction:
            transaction.put(b"a", b"1")
            transaction.put(b"a", b"2")
    with pytest.raises(FormatError, match="DUPSORT"):
        shardkit.open(tmp_path / "y")


class Bomb:
    def __reduce__(self):
        return exit, (1,)


def test_pickles_are_refused_by_name_and_never_loaded(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        values = {b"a": pickle.dumps({"image": IMAGES[1], "x": Bomb()}, protocol)}
        with refused(FormatError, "pickles", key="a", says="shardkit.create"):
            shardkit.open(make(tmp_path / f"{protocol}", values))


@pytest.mark.parametrize("name", ["pair", "map"])
def test_what_pyarrow_serialized_is_refused_by_name(tmp_path, name):
    value = (Path(__file__).parent / f"bytes/lmdb/pyarrow-11-{name}.bin").read_bytes()
    with refused(FormatError, r"pyarrow\.serialize", key="0", says="pyarrow 11"):
        shardkit.open(make(tmp_path / "x", {b"0": value, b"__len__": value}))


def test_a_value_unlike_the_others_is_named(tmp_path):
    images = {b"%03d" % n: IMAGES[n % 9] for n in range(150)} | {b"140": pickle.dumps({"a": 1})}
    with refused(SampleError, "not an image like the others", key="140"):
        shardkit.open(make(tmp_path / "x", images))[140]
    maps = {b"%03d" % n: msgpack.packb({"label": n}) for n in range(150)}
    maps[b"140"] = msgpack.packb({"label": 140, "more": 1})
    dataset = shardkit.open(make(tmp_path / "y", maps))
    none = "a field 'more', which none of the samples examined"
    with refused(SampleError, none, key="140", says="--on-error skip"):
        dataset[140]
    result = shardkit.convert(dataset, "wds", tmp_path / "out", workers=0, on_error="skip")
    assert (result.samples, result.errors) == (149, 1)
    nested = make(tmp_path / "nested", {b"a": msgpack.packb({"x": {"y": b"bytes in a map"}})})
    with refused(SampleError, "no field can hold", field="x", path=nested / "data.mdb"):
        shardkit.open(nested)


def test_text_recognition(tmp_path):
    """An image and its text are a sample: what LmdbDataset reads for each index from 1."""
    cache = numbered(12, image=make_image, label=lambda n: f"wörd {n}".encode())
    folder = make(tmp_path / "MJ_train", cache)
    dataset = shardkit.open(folder)
    assert dict(dataset.schema) == {"image": Image(), "label": Text()}
    assert dataset.conventions == ["text recognition's image-000000001, label-000000001, ..."]
    assert dataset.ignored == {"entry 'num-samples'": 1}
    assert len(dataset) == 12
    for n, sample in enumerate(dataset, 1):
        parts = {part: cache[b"%s-%09d" % (part.encode(), n)] for part in ("image", "label")}
        parts["label"] = parts["label"].decode()
        assert_same(sample, {"__key__": f"{n:09d}", **parts})
    assert shardkit.inspect(folder)["conventions"] == dataset.conventions
    shown = CliRunner().invoke(command, [str(folder)]).output
    assert re.search("stored as.*text recognition", shown, re.DOTALL)
    for to in ("wds", "lmdb"):
        shardkit.convert(folder, to, tmp_path / to, workers=0)
        assert list(shardkit.open(tmp_path / to)) == list(dataset)
        assert shardkit.verify(tmp_path / to, folder).sound


def test_text_recognition_with_more_parts_and_with_some_missing(tmp_path):
    cache = numbered(3, 0, image=make_image, label=b"%d".__mod__, wh=lambda n: b"8_6")
    del cache[b"label-000000001"]
    cache[b"lexicon-000000002"] = b"\xff"
    dataset = shardkit.open(make(tmp_path / "x", cache))
    optional = {"label": Text(optional=True), "lexicon": Bytes(optional=True)}
    assert dict(dataset.schema) == {"image": Image(), "wh": Text(), **optional}
    assert_same(dataset[1], {"__key__": "000000001", "image": IMAGES[1], "wh": "8_6"})
    many = {b"%s-%09d" % (b"abcdefgh"[n : n + 1], n): b"x" for n in range(8)}
    dataset = shardkit.open(make(tmp_path / "many", {**many, b"image-000000009": b"x"}))
    assert (len(dataset), list(dataset.schema)) == (9, ["value"])


def test_counts_and_lists_that_promise_more_than_there_is(tmp_path):
    cache = numbered(3, image=make_image, label=b"%d".__mod__)
    image, two = {b"a": IMAGES[1]}, {b"a": IMAGES[1], b"b": IMAGES[2]}
    for number, (values, what, found) in enumerate([
        ({**cache, b"num-samples": b"4"}, "samples are missing", "3"),
        ({**image, b"__len__": msgpack.packb(200)}, "samples are missing", "1"),
        ({**folder2lmdb(True), b"__keys__": msgpack.packb([b"0", b"99"])},
         "__keys__ names a sample", "99"),
    ]):  # fmt: skip
        with refused(DamagedError, what, found=found):
            shardkit.open(make(tmp_path / f"{number}", values))
    assert len(shardkit.open(make(tmp_path / "fewer", {**two, b"__len__": b"1"}))) == 2
    some = {**folder2lmdb(True), b"__keys__": msgpack.packb([b"0", b"1"])}  # all others are there
    assert len(shardkit.open(make(tmp_path / "some", some))) == 12


def test_basicsr(tmp_path):
    """make_lmdb_from_imgs: PNGs without suffix, and a line for each in meta_info.txt."""
    keys = ["000_00000002", "000_00000001", "baboon"]
    images = {key: make_image(n, "PNG") for n, key in enumerate(keys)}
    folder = make(tmp_path / "DIV2K.lmdb", {k.encode(): v for k, v in images.items()})
    lines = [f"{key}.png (6,8,3) 1\n" for key in keys]
    (folder / "meta_info.txt").write_text("".join(lines))
    dataset = shardkit.open(folder)
    assert dataset.conventions == ["BasicSR's images, with meta_info.txt"]
    paths = [line.split(".")[0] for line in lines]  # as its datasets read them
    assert [(s["__key__"], s["image"]) for s in dataset] == [(p, images[p]) for p in paths]
    shardkit.convert(folder, "wds", tmp_path / "wds", workers=0)
    assert list(shardkit.open(tmp_path / "wds")) == list(dataset)
    (folder / "meta_info.txt").write_text("".join([*lines, "lost.png (6,8,3) 1\n"]))
    what = "names a sample that the LMDB does not have"
    with refused(DamagedError, what, path=folder / "meta_info.txt", found="lost"):
        shardkit.open(folder)
    (folder / "meta_info.txt").write_text("notes of mine")
    assert shardkit.open(folder).conventions == ["an image each"]


def test_what_only_the_last_sample_tells_to_be_in_all(tmp_path):
    """MDS stores optional fields otherwise: its index says what its shards have."""
    values = {b"%03d" % n: msgpack.packb({"image": make_image(n)}) for n in range(101)}
    out = tmp_path / "out"
    result = shardkit.convert(make(tmp_path / "x", values), "mds", out, workers=0)
    assert "'image': MDS returns optional images as bytes, not decoded" in result.notes
    (listed,) = json.loads((out / "index.json").read_bytes())["shards"]
    with shardkit.open(out) as dataset:
        assert dataset.schema == {"image": Image(optional=True)}
        assert [sample["image"] for sample in dataset] == [make_image(n) for n in range(101)]
    data = (out / "shard.00000.mds").read_bytes()
    stored = json.loads(data[4 * 103 : int.from_bytes(data[4:8], "little")])
    columns = {
        "column_names": ["__absent__", "__key__", "image"],
        "column_encodings": ["json", "str", "bytes"],
    }
    assert columns.items() <= listed.items()
    assert columns.items() <= stored.items()
