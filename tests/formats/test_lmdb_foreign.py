"""LMDBs that others made, and what we make of them."""

from __future__ import annotations

import json
import lzma
import pickle
import re
from base64 import b85decode
from collections.abc import Mapping
from hashlib import sha1
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest
from click.testing import CliRunner

import shardkit
from shardkit.cli.inspect import command
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.testing import assert_same, make_image


def make(
    folder: Path, values: Mapping[bytes, bytes], *, name: bytes | None = None, **options: bool
) -> Path:
    """An environment by the LMDB library."""
    with lmdb.open(str(folder), map_size=1 << 28, max_dbs=4, **options) as environment:
        database = None if name is None else environment.open_db(name)
        with environment.begin(write=True, db=database) as transaction:
            for key, value in values.items():
                transaction.put(key, value)
    return folder


def test_images_under_file_names(tmp_path: Path) -> None:
    values = {
        b"cat/1.jpg": make_image(1),
        b"cat/1.png": make_image(2, "PNG"),
        b"dog/v1.2.jpeg": make_image(3),
        b"plain": make_image(4),
        b"\xff\x00\x01": make_image(5),
    }
    about = {b"num-samples": b"5", b"__meta__": pickle.dumps([1])}  # which are no samples
    dataset = shardkit.open(make(tmp_path / "x", {**values, **about}))
    assert dict(dataset.schema) == {"image": shardkit.Image()}
    keys = ["cat/1", "cat/1~png", "dog/v1_2", "plain", "ff0001"]
    assert [sample["__key__"] for sample in dataset] == keys
    assert [sample["image"] for sample in dataset] == list(values.values())


def test_an_environment_that_was_changed_often_is_read_as_it_is_now(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "x"), map_size=1 << 28) as environment:
        for round_ in range(20):
            with environment.begin(write=True) as transaction:
                for number in range(200):
                    transaction.put(b"%04d" % number, b"%d %d" % (round_, number) * (number % 700))
                transaction.delete(b"%04d" % round_)
    dataset = shardkit.open(tmp_path / "x")
    assert len(dataset) == 199
    assert dataset[198]["value"] == b"19 199" * 199


def test_msgpack_maps_become_fields(tmp_path: Path) -> None:
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    packed = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": (2, 3), b"data": array.tobytes()}
    values = {
        b"0": msgpack.packb({"jpg": make_image(1), "label": 3, "x": packed, "tags": ["a"]}),
        b"1": msgpack.packb({"jpg": make_image(2), "label": None, "more": "text"}),
        b"__len__": msgpack.packb(2),
        b"__keys__": msgpack.packb(["0", "1"]),
    }
    dataset = shardkit.open(make(tmp_path / "x", values))
    assert {name: type(kind).__name__ for name, kind in dataset.schema.items()} == {
        "jpg": "Image", "label": "Json", "x": "Array", "tags": "Json", "more": "Text",
    }  # fmt: skip
    assert_same(
        dataset[0], {"__key__": "0", "jpg": make_image(1), "label": 3, "x": array, "tags": ["a"]}
    )
    assert_same(dataset[1], {"__key__": "1", "jpg": make_image(2), "label": None, "more": "text"})


def test_json_and_bytes(tmp_path: Path) -> None:
    text = {b"a": b'{"x" : 1.50}', b"b": b'{"y":[]}'}
    dataset = shardkit.open(make(tmp_path / "json", text))
    assert dataset[0]["json"] == {"x": 1.5}
    shardkit.convert(tmp_path / "json", "wds", tmp_path / "wds", workers=0)
    assert b'{"x" : 1.50}' in (tmp_path / "wds/shard-000000.tar").read_bytes()
    raw = shardkit.open(make(tmp_path / "raw", {b"a": b"\xff\xfe", b"b": b"b"}))
    assert [sample["value"] for sample in raw] == [b"\xff\xfe", b"b"]


def datum(shape: tuple[int, int, int], data: bytes, label: int, encoded: bool) -> bytes:
    """Caffe's message, written out by hand."""
    numbers = b"".join(bytes([8 * n, v]) for n, v in zip((1, 2, 3), shape, strict=True))
    size = bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return numbers + b"\x22" + size + data + bytes([0x28, label, 0x38, encoded])


def test_fields_of_a_datum_that_caffe_or_others_added(tmp_path: Path) -> None:
    """Floats are the pixels where there are no bytes; nothing in a message is lost."""
    floats = np.arange(6, dtype="<f4")
    shape = bytes([8, 1, 16, 2, 24, 3])
    packed = b"\x32" + bytes([24]) + floats.tobytes()
    single = b"".join(b"\x35" + value.tobytes() for value in floats)
    for number, stored in enumerate((packed, single)):
        values = {b"a": shape + stored + bytes([0x28, 4])}
        (sample,) = list(shardkit.open(make(tmp_path / f"{number}", values)))
        assert_same(sample, {"__key__": "a", "pixels": floats.reshape(1, 2, 3), "label": 4})
    both = datum((1, 2, 3), bytes(range(6)), 5, False).replace(b"\x22\x86\x00", b"\x22\x06")
    values = {b"a": both + packed, b"b": both + b"\x4a\x01z" + b"\x51" + bytes(8)}
    first, second = shardkit.open(make(tmp_path / "both", values))
    np.testing.assert_array_equal(first["float_data"], floats)
    assert second["other"] == b"\x4a\x01z" + b"\x51" + bytes(8)
    assert (first["label"], first["pixels"].ravel().tolist()) == (5, list(range(6)))
    twice = {b"a": both + bytes([0x28, 6])}  # which of the labels?
    assert list(shardkit.open(make(tmp_path / "twice", twice)).schema) == ["value"]


def test_pickles_are_refused_by_name_and_never_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return exit, (1,)

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        values = {b"a": pickle.dumps({"image": make_image(1), "x": Bomb()}, protocol)}
        with pytest.raises(FormatError, match="pickles") as error:
            shardkit.open(make(tmp_path / f"{protocol}", values))
        assert error.value.where["key"] == "a"
        assert "shardkit.create" in str(error.value)


def test_a_pickle_among_other_values_is_bytes_at_most(tmp_path: Path) -> None:
    values = {b"%03d" % n: make_image(n) for n in range(150)}
    values[b"140"] = pickle.dumps({"a": 1})
    dataset = shardkit.open(make(tmp_path / "x", values))
    with pytest.raises(SampleError, match="not an image like the others") as error:
        dataset[140]
    assert error.value.where["key"] == "140"


def test_a_named_database_alone_is_read_and_several_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "x", {b"a": b"1"}, name=b"train")
    assert shardkit.open(folder)[0]["__key__"] == "a"
    make(folder, {b"b": b"2"}, name=b"val")
    with pytest.raises(FormatError, match="several named databases") as error:
        shardkit.open(folder)
    assert error.value.found == "'train', 'val'"


def test_several_values_under_one_key_are_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "x"), max_dbs=1) as environment:
        database = environment.open_db(b"d", dupsort=True)
        with environment.begin(write=True, db=database) as transaction:
            transaction.put(b"a", b"1")
            transaction.put(b"a", b"2")
    with pytest.raises(FormatError, match="DUPSORT"):
        shardkit.open(tmp_path / "x")


def test_an_empty_environment_and_one_that_is_a_file(tmp_path: Path) -> None:
    assert len(shardkit.open(make(tmp_path / "empty", {}))) == 0
    dataset = shardkit.open(make(tmp_path / "file.lmdb", {b"a": b"1"}, subdir=False))
    assert dataset[0] == {"__key__": "a", "value": b"1"}


# --- as the scripts of others make them ----------------------------------------------------------


def test_lsun(tmp_path: Path) -> None:
    """Its data.py exports each value as it is, under its key."""
    images = [make_image(n, "WEBP") for n in range(5)]
    values = {sha1(image).hexdigest().encode(): image for image in images}
    dataset = shardkit.open(make(tmp_path / "church_train_lmdb", values))
    assert dataset.conventions == ["LSUN's images"]
    exported = {sample["__key__"].encode(): sample["image"] for sample in dataset}
    assert exported == values


def datum_class() -> Any:
    """Caffe's message, as protoc makes it of caffe.proto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="caffe.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="Datum")
    kinds = {"channels": 5, "height": 5, "width": 5, "data": 12, "label": 5, "float_data": 2}
    for number, (name, kind) in enumerate({**kinds, "encoded": 8}.items(), 1):
        message.field.add(name=name, number=number, type=kind, label=3 if number == 6 else 1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum"))


def test_caffes_datums_by_protobuf(tmp_path: Path) -> None:
    """Raw pixels as convert_imageset writes them, images by its --encoded, and features."""
    datum_of = datum_class()
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (4, 3, 5, 7), np.uint8)
    raw = {
        b"%08d_cat/%d.jpg" % (n, n): datum_of(
            channels=3, height=5, width=7, data=pixels[n].tobytes(), label=n - 1
        )
        for n in range(4)
    }
    encoded = {
        b"%08d" % n: datum_of(data=make_image(n), label=n, encoded=True, channels=3)
        for n in range(3)
    }
    features = rng.random((3, 4096), np.float32)
    floats = {
        b"%010d" % n: datum_of(channels=4096, height=1, width=1, float_data=features[n].tolist())
        for n in range(3)
    }
    for name, messages in {"raw": raw, "encoded": encoded, "floats": floats}.items():
        make(tmp_path / name, {k: m.SerializeToString() for k, m in messages.items()})
        assert shardkit.open(tmp_path / name).conventions == ["Caffe's Datum messages"]
    for n, sample in enumerate(shardkit.open(tmp_path / "raw")):
        assert_same(sample, {"__key__": f"cat/{n}", "pixels": pixels[n], "label": n - 1})
    dataset = shardkit.open(tmp_path / "encoded")
    assert isinstance(dataset.schema["label"], shardkit.Int)
    for n, sample in enumerate(dataset):
        assert_same(sample, {"__key__": f"{n:08d}", "image": make_image(n), "label": n})
    for n, sample in enumerate(shardkit.open(tmp_path / "floats")):
        assert_same(sample, {"__key__": f"{n:010d}", "pixels": features[n].reshape(-1, 1, 1)})


def test_a_datum_of_very_many_floats_takes_no_longer_than_they_do(tmp_path: Path) -> None:
    """One by one they are 2,000,000 fields; to add bytes to bytes would take minutes."""
    shape = b"\x08\x01\x10\x01\x18\x80\x89\x7a"
    one = shape + b"\x35" + b"\x35".join(np.arange(2_000_000, dtype="<f4").view("V4").tolist())
    (sample,) = shardkit.open(make(tmp_path / "x", {b"a": one}))
    assert sample["pixels"].shape == (1, 1, 2_000_000)


def numbered(count: int, first: int = 1, **parts: Any) -> dict[bytes, bytes]:
    """As create_lmdb_dataset.py of deep-text-recognition-benchmark writes its cache."""
    cache = {
        b"%s-%09d" % (part.encode(), n): value_of(n)
        for n in range(first, first + count)
        for part, value_of in parts.items()
    }
    return {**cache, b"num-samples": b"%d" % count}


def test_text_recognition(tmp_path: Path) -> None:
    """An image and its text are a sample: what LmdbDataset reads for each index from 1."""
    cache = numbered(12, image=make_image, label=lambda n: f"wörd {n}".encode())
    folder = make(tmp_path / "MJ_train", cache)
    dataset = shardkit.open(folder)
    assert dict(dataset.schema) == {"image": shardkit.Image(), "label": shardkit.Text()}
    assert dataset.conventions == ["text recognition's image-000000001, label-000000001, ..."]
    assert dataset.ignored == {"entry 'num-samples'": 1}
    environment = lmdb.open(str(folder), readonly=True, lock=False)
    with environment, environment.begin() as transaction:
        assert int(transaction.get(b"num-samples")) == len(dataset)
        for index, sample in enumerate(dataset, 1):
            label = transaction.get(b"label-%09d" % index).decode("utf-8")
            image = transaction.get(b"image-%09d" % index)
            assert_same(sample, {"__key__": f"{index:09d}", "image": image, "label": label})
    assert shardkit.inspect(folder)["conventions"] == dataset.conventions
    shown = CliRunner().invoke(command, [str(folder)]).output
    assert re.search("stored as.*text recognition", shown, re.DOTALL)
    for to in ("wds", "lmdb"):
        shardkit.convert(folder, to, tmp_path / to, workers=0)
        assert list(shardkit.open(tmp_path / to)) == list(dataset)
        assert shardkit.verify(tmp_path / to, folder).sound


def test_text_recognition_with_more_parts_and_with_some_missing(tmp_path: Path) -> None:
    cache = numbered(3, 0, image=make_image, label=b"%d".__mod__, wh=lambda n: b"8_6")
    del cache[b"label-000000001"]
    cache[b"lexicon-000000002"] = b"\xff"
    dataset = shardkit.open(make(tmp_path / "x", cache))
    parts = {"image": shardkit.Image(), "label": shardkit.Text(optional=True)}
    parts |= {"wh": shardkit.Text(), "lexicon": shardkit.Bytes(optional=True)}
    assert dict(dataset.schema) == parts
    assert_same(dataset[1], {"__key__": "000000001", "image": make_image(1), "wh": "8_6"})
    many = {b"%s-%09d" % (b"abcdefgh"[n : n + 1], n): b"x" for n in range(8)}
    dataset = shardkit.open(make(tmp_path / "many", {**many, b"image-000000009": b"x"}))
    assert (len(dataset), list(dataset.schema)) == (9, ["value"])


def test_a_count_that_promises_more_than_there_is(tmp_path: Path) -> None:
    cache = numbered(3, image=make_image, label=b"%d".__mod__)
    damaged = make(tmp_path / "x", {**cache, b"num-samples": b"4"})
    with pytest.raises(DamagedError, match="samples are missing") as error:
        shardkit.open(damaged)
    assert error.value.found == "3"
    listed = {b"a": make_image(1), b"__len__": msgpack.packb(200)}
    with pytest.raises(DamagedError, match="samples are missing"):
        shardkit.open(make(tmp_path / "y", listed))
    fewer = {b"a": make_image(1), b"b": make_image(2), b"__len__": b"1"}
    assert len(shardkit.open(make(tmp_path / "z", fewer))) == 2


@pytest.mark.parametrize("bin_type", [True, False])
def test_folder2lmdb_with_msgpack(tmp_path: Path, bin_type: bool) -> None:
    """Pairs of image and label, in the order of __keys__; before msgpack 1 bytes were text."""

    def dumps(value: Any) -> bytes:
        return bytes(msgpack.packb(value, use_bin_type=bin_type))

    count = 12
    values = {b"%d" % n: dumps((make_image(n), n % 3)) for n in range(count)}
    keys = [b"%d" % n for n in range(count)]
    about = {b"__keys__": dumps(keys), b"__len__": dumps(count)}
    dataset = shardkit.open(make(tmp_path / "train.lmdb", {**values, **about}))
    assert dataset.conventions == ["a msgpack list each, listed in __keys__"]
    assert dict(dataset.schema) == {"image": shardkit.Image(), "label": shardkit.Int()}
    for n, sample in enumerate(dataset):  # dataset[index] of ImageFolderLMDB
        assert_same(sample, {"__key__": f"{n}", "image": make_image(n), "label": n % 3})
    lost = {**values, **about, b"__keys__": dumps([*keys, b"99"])}
    with pytest.raises(DamagedError, match="__keys__ names a sample") as error:
        shardkit.open(make(tmp_path / "lost", lost))
    assert error.value.found == "99"
    some = {**values, **about, b"__keys__": dumps(keys[:3])}  # all others are there, too
    assert len(shardkit.open(make(tmp_path / "some", some))) == count


def test_lists_of_other_things(tmp_path: Path) -> None:
    """As tensorpack's LMDBSerializer writes datapoints, with msgpack-numpy; and a map of old."""
    array = np.arange(6, dtype="<i2").reshape(2, 3)
    packed = {b"nd": True, b"type": "<i2", b"kind": b"", b"shape": (2, 3), b"data": array.tobytes()}
    values = {b"%08d" % n: msgpack.packb([packed, f"ü{n}", b"\xff"]) for n in range(3)}
    dataset = shardkit.open(make(tmp_path / "x", values))
    found = {"__key__": "00000002", "value0": array, "value1": "ü2", "value2": b"\xff"}
    assert_same(dataset[2], found)
    old = {b"a": msgpack.packb({"image": make_image(1), "x": packed}, use_bin_type=False)}
    (sample,) = shardkit.open(make(tmp_path / "old", old))
    assert_same(sample, {"__key__": "a", "image": make_image(1), "x": array})
    numbers = {b"a": msgpack.packb([1, 2]), b"b": b"\x93"}  # bytes that happen to be a list
    assert list(shardkit.open(make(tmp_path / "bytes", numbers)).schema) == ["value"]
    nested = make(tmp_path / "nested", {b"a": msgpack.packb({"x": {"y": b"bytes in a map"}})})
    with pytest.raises(SampleError, match="no field can hold") as error:
        shardkit.open(nested)
    assert (error.value.where["path"].parent, error.value.where["field"]) == (nested, "x")


def test_basicsr(tmp_path: Path) -> None:
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
    with pytest.raises(DamagedError, match="names a sample that the LMDB does not have") as error:
        shardkit.open(folder)
    assert (error.value.where["path"], error.value.found) == (folder / "meta_info.txt", "lost")
    (folder / "meta_info.txt").write_text("notes of mine")
    assert shardkit.open(folder).conventions == ["an image each"]


# What pyarrow 11 made of (JPEG's first bytes, 3), and of {"image": bytes, "a": an array}.
SERIALIZED = [
    "T>t=p0RR90|NsC0{{R4OUPP&sy}^%2e?SZwC&74`@VoD70tr6B_dtH-dcr<ssYimQ{Y9$HP;Yq($NfNeq_0wRa"
    "y9SOZFkiEFx}O$0MoxSmfeLsKa39{Te~X?CAtFnc^8YW_D@5X@SYnw;w!0HNrSliWdD*k*e<YyuCPe?jKo``&p"
    "DXC6-(mRDO4~*`GzK3$7b>Ic=`qGd3=yf@>5r@F(>|yjq$ho=zIZ!06!4u0fNvO+g!4e`#%)5{>asIdDmFj8|X"
    "uZ{pcG=Wt=$3GgoR{GydzR7TSmnLH_z2Z2xB-X&UZfa-K#{-1flX9I{FOp03e$l;Wf31VP{8t=@^QzB0KJc2ry"
    "&29@A_F)g_iCmrqM%zA8+zyI!{X|M",
    "T>t=p0RR90|NsC0{{R4Le!CTGhAXEX=~sDD3=|-GTq9bg$AzstsiWGd&VXbzjy6bQ@<lSi4ae?(PR+VbHV<J1f"
    "X-w=Y{`jSUc~IjW+B^)Eh7mKWTFOy%FCt2{CqJZbt;GfFMuad%X||eh?N5d7Fr8NCo{vdChl|0+14Ns9<UINQp"
    "vHrWYV?^BZv<*^35H+#js)95X?Qia4#d?x0m#4gp;vRF5`D7ju2#hfWO1)W7IO*M5gY2vEZOZmy|^11($kdov7"
    "KgvRThw%T6hB)!@D)m3w&`W(X0)7Tr7jQRI82=Fz^EsxN30uGo?$<jB(WMUCI1kmtvhm#caO&RCy>?01_$9%&l"
    "PLW4ucU?~R|hBi?+nUb<1x9o8~xndR*WgU+KXRXFQs*#&1RPW*E;7wuygy&%8VTRO;Kxn_YOvIxBf5n;h3ffCQ"
    "SoXzLk7Dk?(?O6p$)ZIPQ4<?6?)%5+^bTFn&(@_oqX|T7;`98NTZuzyObJ2it*-4n63e<<+#3?f4QP;>Xm^uwP"
    "88&cA9SNcGJpE%QGf",
]


@pytest.mark.parametrize("stored", SERIALIZED)
def test_what_pyarrow_serialized_is_refused_by_name(tmp_path: Path, stored: str) -> None:
    value = lzma.decompress(b85decode(stored))
    with pytest.raises(FormatError, match=r"pyarrow\.serialize") as error:
        shardkit.open(make(tmp_path / "x", {b"0": value, b"__len__": value}))
    assert error.value.where["key"] == "0"
    assert "pyarrow 11" in str(error.value)


def test_a_field_in_none_of_the_samples_looked_at_first_is_named(tmp_path: Path) -> None:
    values = {b"%03d" % n: msgpack.packb({"label": n}) for n in range(150)}
    values[b"140"] = msgpack.packb({"label": 140, "more": 1})
    dataset = shardkit.open(make(tmp_path / "x", values))
    with pytest.raises(
        SampleError, match="a field 'more', which none of the samples examined"
    ) as error:
        dataset[140]
    assert error.value.where["key"] == "140"
    assert "--on-error skip" in str(error.value)
    result = shardkit.convert(dataset, "wds", tmp_path / "out", workers=0, on_error="skip")
    assert (result.samples, result.errors) == (149, 1)


def test_what_only_the_last_sample_tells_to_be_in_all(tmp_path: Path) -> None:
    """MDS stores optional fields otherwise: its index says what its shards have."""
    values = {b"%03d" % n: msgpack.packb({"image": make_image(n)}) for n in range(101)}
    make(tmp_path / "x", values)
    out = tmp_path / "out"
    result = shardkit.convert(tmp_path / "x", "mds", out, workers=0)
    assert "'image': MDS returns optional images as bytes, not decoded" in result.notes
    (listed,) = json.loads((out / "index.json").read_bytes())["shards"]
    with shardkit.open(out) as dataset:
        assert dataset.schema == {"image": shardkit.Image(optional=True)}
        assert [sample["image"] for sample in dataset] == [make_image(n) for n in range(101)]
    data = (out / "shard.00000.mds").read_bytes()
    stored = json.loads(data[4 * 103 : int.from_bytes(data[4:8], "little")])
    columns = {
        "column_names": ["__absent__", "__key__", "image"],
        "column_encodings": ["json", "str", "bytes"],
    }
    assert columns.items() <= listed.items()
    assert columns.items() <= stored.items()
