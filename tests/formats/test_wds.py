"""Our TAR shards: the contract, and what webdataset, tarfile and GNU tar make of them."""

import io
import subprocess
import tarfile

import numpy as np
import pytest
import webdataset

import shardkit
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.formats.testing_samples import (
    assert_reads,
    everything,
    in_fork,
    make_image,
    write_shard,
)
from shardkit.formats.wds.layout import header, index_path
from shardkit.schema import Array, Bool, Bytes, Float, Image, Int, Json, Schema, Text
from shardkit.testing import EVERYTHING, OPTIONAL, FormatContract
from tests.formats.refusals import refused
from tests.peers import by_webdataset

WDS = get_format("wds")


class TestWds(FormatContract):
    tested = get_format("wds")
    provides = OPTIONAL

    def independent_keys(self, path):
        return [sample["__key__"] for sample in by_webdataset(path)]


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard-000000.tar"
    write_shard(WDS, path, EVERYTHING, [everything(n) for n in range(6)])
    return path


def test_webdataset_reads_the_same_fields_and_bytes(shard):
    for number, found in zip(range(6), by_webdataset(shard), strict=True):
        expected = everything(number)
        assert found.pop("__key__") == expected["__key__"]
        assert found.pop("jpg") == expected["image"]
        assert found.pop("cls") == str(expected["label"]).encode()
        assert found.pop("txt") == expected["text"].encode()
        assert found.pop("blob") == expected["blob"]
        points = np.load(io.BytesIO(found.pop("points.npy")))
        np.testing.assert_array_equal(points, expected["points"])
        caption = set() if number % 3 else {"caption.txt"}
        assert set(found) == {"score.json", "good.json", "about.json"} | caption

    def read():  # in a fork, as its class leaves files to the garbage collector
        found = webdataset.WebDataset(str(shard), shardshuffle=False).decode()
        return [(sample["__key__"], sample["cls"], len(sample["jpg"])) for sample in found]

    samples = [everything(n) for n in range(6)]
    assert in_fork(read) == [(s["__key__"], s["label"], len(s["image"])) for s in samples]


def test_tarfile_and_gnu_tar_list_the_same_names(tmp_path):
    path = tmp_path / "shard-000000.tar"
    keys = ["a", "long/" + "x" * 200, "ü/" + "é" * 60, "n" * 96, "n" * 97]
    schema = Schema({"text": Text(), "label": Int()})
    write_shard(WDS, path, schema, [{"__key__": k, "text": k, "label": 1} for k in keys])
    expected = [f"{key}.{extension}" for key in keys for extension in ("txt", "cls")]
    with tarfile.open(path) as tar:
        assert tar.getnames() == expected
        assert [tar.extractfile(m).read().decode() for m in tar][::2] == keys
    command = ["tar", "tf", path, "--quoting-style=literal"]
    listed = subprocess.run(command, check=True, capture_output=True)
    assert (listed.stdout.decode().splitlines(), listed.stderr) == (expected, b"")


def test_members_are_adjacent_with_fixed_headers_and_nothing_more(shard):
    with tarfile.open(shard) as tar:
        members = tar.getmembers()
    headers = {(m.mtime, m.uid, m.gid, m.mode, m.uname, m.gname) for m in members}
    assert headers == {(315532800, 0, 0, 0o644, "", "")}
    assert all(not m.pax_headers for m in members)
    keys = [m.name.split(".")[0] for m in members]
    assert keys == sorted(keys)
    payload = sum(512 + -(-m.size // 512) * 512 for m in members)
    assert shard.stat().st_size == payload + 1024
    # One over 8 GiB has a size that tar reads.
    info = tarfile.TarInfo.frombuf(header(b"big.bin", 9 * 2**30), "utf-8", "strict")
    assert info.size == 9 * 2**30


def test_the_index_is_a_plain_array_that_says_where_everything_stands(shard):
    index = np.load(index_path(shard), mmap_mode="r")
    data = shard.read_bytes()
    for number, row in enumerate(index):
        expected = everything(number)
        offset, size, width, height = row["image"]
        assert data[offset : offset + size] == expected["image"]
        assert (width, height) == (8, 6)
        key_offset, key_size = row["__key__"]
        assert data[key_offset : key_offset + key_size].decode() == expected["__key__"]
        assert (row["caption"]["offset"] == 0) == ("caption" not in expected)


def test_an_image_gets_the_extension_of_its_bytes(tmp_path):
    path, schema = tmp_path / "shard-000000.tar", Schema({"image": Image(), "mask": Image()})
    extensions = {"JPEG": "jpg", "TIFF": "tif"}
    extensions |= {kind: kind.lower() for kind in ("PNG", "WEBP", "GIF", "BMP", "PPM")}
    mask = make_image(2, "PNG")
    samples = [{"__key__": k, "image": make_image(1, k), "mask": mask} for k in extensions]
    assert_reads(write_shard(WDS, path, schema, samples), samples)
    for extension, found in zip(extensions.values(), by_webdataset(path), strict=True):
        assert set(found) == {"__key__", extension, "mask.png"}


@pytest.mark.parametrize(
    ("field", "kind", "extension"),
    [
        ("label", Int(), "cls"), ("cls", Int(), "cls"), ("width", Int(), "width.json"),
        ("text", Text(), "txt"), ("txt", Text(), "txt"), ("caption", Text(), "caption.txt"),
        ("json", Json(), "json"), ("about", Json(), "about.json"), ("x.json", Json(), "x.json"),
        ("score", Float(), "score.json"), ("good", Bool(), "good.json"),
        ("blob", Bytes(), "blob"), ("jpg", Bytes(), "jpg"), ("json", Bytes(), "json"),
        ("npy", Array(), "npy"), ("points", Array(), "points.npy"),
        ("jpg", Image(), "jpg"), ("seg.png", Image(), "seg.png"), ("label", Text(), "label.txt"),
    ],
)  # fmt: skip
def test_extensions_follow_webdatasets_conventions(field, kind, extension):
    assert WDS.layout(Schema({field: kind}))["extensions"] == {field: [extension]}


def test_fields_and_keys_that_make_no_names_of_members_are_refused(tmp_path):
    for schema, match in (
        ({"label": Int(), "cls": Int()}, r"both be stored as \.cls"),
        ({"image": Image(), "jpg": Image()}, r"both be stored as \.jpg"),
        ({"Label": Int()}, "cannot be named after the field"),
        ({"a/b": Int()}, "cannot be named after the field"),
        ({"A": Int(), "b": Int(), "C": Int()}, "--rename A=a --rename C=c$"),
    ):
        with pytest.raises(FormatError, match=match):
            WDS.layout(Schema(schema))
    writer = WDS.create(tmp_path / "shard-000000.tar", ShardSpec(Schema({"label": Int()})))
    for key in ("a.b", "x/.h", "a.", "__m__/a", "a\0b", ""):  # which webdataset reads differently
        with pytest.raises(SampleError, match="cannot be named after this key"):
            writer.write({"__key__": key, "label": 1})
    assert writer.write({"__key__": "__fine", "label": 1})
    writer.close()
    assert [s["__key__"] for s in by_webdataset(tmp_path / "shard-000000.tar")] == ["__fine"]


def test_a_damaged_index_gives_errors_wherever_it_points(shard):
    path, layout, size = index_path(shard), WDS.layout(EVERYTHING), shard.stat().st_size
    whole, data = np.load(path), path.read_bytes()
    for column in ("__key__", "blob", "image"):
        for offset, length in ((1, 2**63), (2**64 - 1, 5), (size - 1, 2), (2**63, 2**63)):
            index = whole.copy()
            index[column]["offset"], index[column]["size"] = offset, length
            np.save(path, index)
            reader = WDS.open(shard, layout)
            with refused(DamagedError, "the file ends before", position=2, field=column):
                reader[2]
            if column != "__key__" and length > size:
                with refused(DamagedError, "stored size of a value is wrong", field=column):
                    reader.sizes(column)
            with pytest.raises(DamagedError):
                reader.keys() if column == "__key__" else reader.sample(2, [column])
    path.write_bytes(data[:-100])
    with refused(DamagedError, "index of a shard is damaged", path=path):
        WDS.open(shard, layout)
    np.save(path, np.zeros(3))
    with pytest.raises(DamagedError, match="does not match its manifest"):
        WDS.open(shard, layout)


@pytest.mark.parametrize("name", ["µ", "标签", "ﬁ"])
def test_a_field_may_have_a_name_in_any_script(tmp_path, name):
    lists = f"{name}s"
    schema = {name: shardkit.Int(), lists: shardkit.Array("<i4", (None,))}
    with shardkit.create(tmp_path / "d", "wds", schema) as out:
        out.write({"__key__": "a", name: 7, lists: np.arange(3, dtype="<i4")})
    dataset = shardkit.open(tmp_path / "d")
    assert (dataset[0][name], dataset[0][lists].tolist()) == (7, [0, 1, 2])
    assert dataset.lengths(lists).tolist() == [3]
    assert np.load(tmp_path / "d/__shardkit__/lengths.npy")[lists].tolist() == [3]
