"""LMDBs that others made, and what we make of them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import lmdb
import msgpack
import numpy as np
import pytest

import shardkit
from shardkit.errors import FormatError, SampleError
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
    dataset = shardkit.open(make(tmp_path / "x", values))
    assert dict(dataset.schema) == {"image": shardkit.Image()}
    keys = ["cat/1", "cat/1~png", "dog/v1_2", "plain", "ff0001"]
    assert [sample["__key__"] for sample in dataset] == keys
    assert [sample["image"] for sample in dataset] == list(values.values())


def test_large_and_small_values_in_many_pages(tmp_path: Path) -> None:
    values = {b"%06d" % n: bytes([n % 251]) * (n * 7 % 9000) for n in range(3000)}
    dataset = shardkit.open(make(tmp_path / "x", values))
    assert len(dataset) == 3000
    for number in (0, 1, 1500, 2999):
        sample = {"__key__": f"{number:06d}", "value": values[b"%06d" % number]}
        assert_same(dataset[number], sample)


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


def test_caffes_datum_with_its_keys(tmp_path: Path) -> None:
    pixels = np.arange(3 * 8 * 6, dtype=np.uint8).reshape(3, 8, 6)
    values = {
        b"00000000_cat/a.jpg": datum((3, 8, 6), pixels.tobytes(), 7, False),
        b"00000001_dog/b.jpg": datum((3, 8, 6), pixels[::-1].tobytes(), 8, False),
    }
    dataset = shardkit.open(make(tmp_path / "raw", values))
    assert_same(dataset[0], {"__key__": "cat/a", "pixels": pixels, "label": 7})
    encoded = {b"00000000_x.jpg": datum((3, 8, 6), make_image(1), 1, True)}
    dataset = shardkit.open(make(tmp_path / "encoded", encoded))
    assert_same(dataset[0], {"__key__": "x", "image": make_image(1), "label": 1})


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


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_refused_by_name_and_never_loaded(tmp_path: Path, protocol: int) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return exit, (1,)

    values = {b"a": pickle.dumps({"image": make_image(1), "x": Bomb()}, protocol)}
    with pytest.raises(FormatError, match="pickles") as error:
        shardkit.open(make(tmp_path / "x", values))
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


def test_metadata_entries_are_no_samples(tmp_path: Path) -> None:
    values = {b"img": make_image(1), b"num-samples": b"1", b"__meta__": pickle.dumps([1])}
    assert [s["__key__"] for s in shardkit.open(make(tmp_path / "x", values))] == ["img"]


def test_converting_a_foreign_environment_with_workers(tmp_path: Path) -> None:
    values = {b"%04d.jpg" % n: make_image(n) for n in range(40)}
    make(tmp_path / "x", values)
    shardkit.convert(tmp_path / "x", "lmdb", tmp_path / "out", shard_samples=8, workers=2)
    dataset = shardkit.open(tmp_path / "out")
    assert [sample["image"] for sample in dataset] == list(values.values())
    assert dataset.shards == 5
    assert json.loads((tmp_path / "out/__shardkit__/manifest.json").read_text())["format"] == "lmdb"
