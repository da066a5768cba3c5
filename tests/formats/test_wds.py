"""Our TAR shards: the contract, and what webdataset, tarfile and GNU tar make of them."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset

import shardkit
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.formats.wds.layout import index_path
from shardkit.schema import Array, Bool, Bytes, Float, Image, Int, Json, Schema, Text
from shardkit.testing import (
    EVERYTHING,
    OPTIONAL,
    FormatContract,
    assert_reads,
    assert_same,
    everything,
    make_image,
    write_shard,
)
from shardkit.testing_samples import in_fork
from tests.peers import by_webdataset

WDS = get_format("wds")


class TestWds(FormatContract):
    tested = get_format("wds")
    provides = OPTIONAL

    def independent_keys(self, path: Path) -> list[str]:
        return [sample["__key__"] for sample in by_webdataset(path)]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard-000000.tar"
    write_shard(WDS, path, EVERYTHING, [everything(n) for n in range(6)])
    return path


def test_webdataset_reads_the_same_fields_and_bytes(shard: Path) -> None:
    for number, found in zip(range(6), by_webdataset(shard), strict=True):
        expected = everything(number)
        assert found.pop("__key__") == expected["__key__"]
        assert found.pop("jpg") == expected["image"]
        assert found.pop("cls") == str(expected["label"]).encode()
        assert found.pop("txt") == expected["text"].encode()
        assert found.pop("blob") == expected["blob"]
        np.testing.assert_array_equal(
            np.load(io.BytesIO(found.pop("points.npy"))), expected["points"]
        )
        assert set(found) == {"score.json", "good.json", "about.json"} | (
            {"caption.txt"} if number % 3 == 0 else set()
        )


def test_webdatasets_own_class_reads_the_shard(shard: Path) -> None:
    """In a fork, as it leaves files to the garbage collector."""

    def read() -> list[tuple[str, int, int]]:
        found = webdataset.WebDataset(str(shard), shardshuffle=False).decode()
        return [(sample["__key__"], sample["cls"], len(sample["jpg"])) for sample in found]

    samples = [everything(n) for n in range(6)]
    assert in_fork(read) == [(s["__key__"], s["label"], len(s["image"])) for s in samples]


def test_tarfile_and_gnu_tar_list_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "shard-000000.tar"
    keys = ["a", "long/" + "x" * 200, "ü/" + "é" * 60, "n" * 96, "n" * 97]
    schema = Schema({"text": Text(), "label": Int()})
    write_shard(WDS, path, schema, [{"__key__": k, "text": k, "label": 1} for k in keys])
    expected = [f"{key}.{extension}" for key in keys for extension in ("txt", "cls")]
    with tarfile.open(path) as tar:
        assert tar.getnames() == expected
        assert [tar.extractfile(m).read().decode() for m in tar][::2] == keys  # type: ignore[union-attr]
    listed = subprocess.run(
        ["tar", "tf", path, "--quoting-style=literal"], check=True, capture_output=True
    )
    assert listed.stdout.decode().splitlines() == expected
    assert listed.stderr == b""


def test_members_are_adjacent_with_fixed_headers_and_nothing_more(shard: Path) -> None:
    with tarfile.open(shard) as tar:
        members = tar.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.mode, m.uname, m.gname) for m in members} == {
        (315532800, 0, 0, 0o644, "", "")
    }
    assert all(not m.pax_headers for m in members)
    keys = [m.name.split(".")[0] for m in members]
    assert keys == sorted(keys)
    payload = sum(512 + -(-m.size // 512) * 512 for m in members)
    assert shard.stat().st_size == payload + 1024


def test_the_index_is_a_plain_array_that_says_where_everything_stands(shard: Path) -> None:
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


def test_an_image_gets_the_extension_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "shard-000000.tar"
    extensions = {"TIFF": "tif", "JPEG": "jpg"}
    kinds = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]
    mask = make_image(2, "PNG")
    samples = [{"__key__": kind, "image": make_image(1, kind), "mask": mask} for kind in kinds]
    assert_reads(
        write_shard(WDS, path, Schema({"image": Image(), "mask": Image()}), samples), samples
    )
    for kind, found in zip(kinds, by_webdataset(path), strict=True):
        assert set(found) == {"__key__", extensions.get(kind, kind.lower()), "mask.png"}


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
def test_extensions_follow_webdatasets_conventions(field: str, kind: Int, extension: str) -> None:
    assert WDS.layout(Schema({field: kind}))["extensions"] == {field: [extension]}


def test_fields_that_have_no_member_of_their_own_are_refused() -> None:
    for schema, match in (
        ({"label": Int(), "cls": Int()}, r"both be stored as \.cls"),
        ({"image": Image(), "jpg": Image()}, r"both be stored as \.jpg"),
        ({"Label": Int()}, "cannot be named after the field"),
        ({"a/b": Int()}, "cannot be named after the field"),
    ):
        with pytest.raises(FormatError, match=match):
            WDS.layout(Schema(schema))


def test_keys_that_webdataset_would_read_differently_are_refused(tmp_path: Path) -> None:
    writer = WDS.create(tmp_path / "shard-000000.tar", ShardSpec(Schema({"label": Int()})))
    for key in ("a.b", "x/.h", "a.", "__m__/a", "a\0b", ""):
        with pytest.raises(SampleError, match="cannot be named after this key"):
            writer.write({"__key__": key, "label": 1})
    assert writer.write({"__key__": "__fine", "label": 1})
    writer.close()
    assert [s["__key__"] for s in by_webdataset(tmp_path / "shard-000000.tar")] == ["__fine"]


def test_members_over_8_gib_have_a_size_that_tar_reads() -> None:
    from shardkit.formats.wds.layout import header

    info = tarfile.TarInfo.frombuf(header(b"big.bin", 9 * 2**30), "utf-8", "strict")
    assert info.size == 9 * 2**30


def test_a_long_index_stays_in_its_file(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = WDS.layout(EVERYTHING)
    short = WDS.open(shard, layout)
    assert short.in_memory == np.load(index_path(shard)).nbytes
    monkeypatch.setattr("shardkit.byte_source.IN_MEMORY", 100)
    long = WDS.open(shard, layout)
    assert long.in_memory == 0
    assert long.keys() == short.keys()
    for number in range(6):
        assert_same(long[number], everything(number))
    for field in EVERYTHING:
        sizes = [reader.sizes(field) for reader in (long, short)]
        np.testing.assert_array_equal(*sizes)
    found = [np.zeros((2, *short[3]["points"].shape)) for _ in range(2)]
    answers = [
        r.read_rows("points", np.array([3, 3]), f)
        for r, f in zip((long, short), found, strict=True)
    ]
    assert answers[0] == answers[1]
    np.testing.assert_array_equal(*found)


def test_an_index_that_points_anywhere_gives_errors(shard: Path) -> None:
    whole = np.load(index_path(shard))
    reader = WDS.open(shard, WDS.layout(EVERYTHING))
    size = shard.stat().st_size
    for column in ("__key__", "blob", "image"):
        for offset, length in ((1, 2**63), (2**64 - 1, 5), (size - 1, 2), (2**63, 2**63)):
            index = whole.copy()
            index[column]["offset"], index[column]["size"] = offset, length
            np.save(index_path(shard), index)
            reader = WDS.open(shard, WDS.layout(EVERYTHING))
            with pytest.raises(DamagedError, match="the file ends before") as error:
                reader[2]
            assert error.value.where["position"] == 2
            assert error.value.where["field"] == column
            with pytest.raises(DamagedError):
                reader.keys() if column == "__key__" else reader.sample(2, [column])


def test_a_damaged_index_is_named(shard: Path) -> None:
    index = index_path(shard)
    layout = WDS.layout(EVERYTHING)
    index.write_bytes(index.read_bytes()[:-100])
    with pytest.raises(DamagedError, match="index of a shard is damaged") as error:
        WDS.open(shard, layout)
    assert error.value.where["path"] == index
    with index.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DamagedError, match="does not match its manifest"):
        WDS.open(shard, layout)


@pytest.mark.parametrize("name", ["µ", "标签", "ﬁ"])
def test_a_field_may_have_a_name_in_any_script(tmp_path: Path, name: str) -> None:
    lists = f"{name}s"
    schema = {name: shardkit.Int(), lists: shardkit.Array("<i4", (None,))}
    with shardkit.create(tmp_path / "d", "wds", schema) as out:
        out.write({"__key__": "a", name: 7, lists: np.arange(3, dtype="<i4")})
    dataset = shardkit.open(tmp_path / "d")
    assert (dataset[0][name], dataset[0][lists].tolist()) == (7, [0, 1, 2])
    assert dataset.lengths(lists).tolist() == [3]
    assert np.load(tmp_path / "d/__shardkit__/lengths.npy")[lists].tolist() == [3]
