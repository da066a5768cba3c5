"""MDS: the contract, the layout read and written by hand, what is refused or damaged.

StreamingDataset reads ours, and we read what MDSWriter writes, in test_mds_streaming.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import shardkit
from shardkit.codecs.image import probe
from shardkit.errors import DamagedError, FormatError, SampleError, UsageError
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.schema import Array, Bytes, Image, Int, Schema, Text
from shardkit.testing import (
    EVERYTHING,
    FormatContract,
    assert_reads,
    assert_same,
    everything,
    write_shard,
)
from tests.formats.test_mds_streaming import assert_rows

MDS = get_format("mds")
UNPACKED = "ignore:compressed MDS shards:shardkit.errors.ShardkitWarning"


def by_facts(path: Path) -> list[dict[str, bytes]]:
    """The stored values of all samples, by column, read as streaming's MDSReader does."""
    data = path.read_bytes()
    count = int(np.frombuffer(data, "<u4", 1)[0])
    ends = np.frombuffer(data, "<u4", count + 1, 4).tolist()
    header: dict[str, Any] = json.loads(data[4 * (count + 2) : ends[0]])
    found = []
    for begin in ends[:-1]:
        at, sizes = begin, []
        for size in header["column_sizes"]:
            sizes.append(size or int(np.frombuffer(data, "<u4", 1, at)[0]))
            at += 0 if size else 4
        sample = {}
        for name, size in zip(header["column_names"], sizes, strict=True):
            sample[name] = data[at : at + size]
            at += size
        found.append(sample)
        assert at in ends
    return found


class TestMds(FormatContract):
    tested = get_format("mds")
    provides = frozenset({"spans"})

    def independent_keys(self, path: Path) -> list[str]:
        return [sample["__key__"].decode() for sample in by_facts(path)]


@pytest.mark.parametrize(("held", "room"), [(1 << 22, 1 << 17), (2000, 4000), (2000, 1)])
def test_a_shard_of_any_size_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, room: int
) -> None:
    """In memory; with room for its offsets, or more than it needs; copied behind them."""
    monkeypatch.setattr("shardkit.formats.offsets._IN_MEMORY", held)
    monkeypatch.setattr("shardkit.formats.mds.writer.MdsWriter.room", room)
    samples = [everything(number) for number in range(40)]
    path = tmp_path / "shard-000000.mds"
    assert_reads(write_shard(MDS, path, EVERYTHING, samples), samples)
    assert [sample["text"].decode() for sample in by_facts(path)] == [s["text"] for s in samples]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    writer = MDS.create(path, ShardSpec(EVERYTHING, max_bytes=9000))
    taken = sum(writer.write(sample) for sample in samples)
    writer.close()
    assert 0 < taken < 40
    assert path.stat().st_size <= 9000


def converted(tmp_path: Path, **options: Any) -> Path:
    samples = [{**everything(number), "label": number % 2} for number in range(9)]
    out = tmp_path / "out"
    with shardkit.create(out, "mds", EVERYTHING, classes=["cat", "dog"], **options) as writer:
        for sample in samples:
            writer.write(sample)
    return out


def test_the_index_names_what_a_conversion_wrote(tmp_path: Path) -> None:
    out = converted(tmp_path, shard_samples=5)
    index = json.loads((out / "index.json").read_text())
    assert index["version"] == 2
    names = sorted(["__key__", "__absent__", *EVERYTHING])
    for number, shard in enumerate(index["shards"]):
        size = (out / f"shard.{number:05d}.mds").stat().st_size
        file = {"basename": f"shard.{number:05d}.mds", "bytes": size, "hashes": {}}
        assert shard.pop("raw_data") == file
        assert shard.pop("samples") == (5, 4)[number]
        encodings = dict(zip(names, shard.pop("column_encodings"), strict=True))
        sizes = dict(zip(names, shard.pop("column_sizes"), strict=True))
        assert {n: s for n, s in sizes.items() if s} == {"good": 1, "label": 8, "score": 8}
        assert encodings["image"] == "jpeg"
        assert encodings["points"] == "ndarray:float32"
        nothing = {"compression": None, "zip_data": None, "size_limit": None, "hashes": []}
        assert shard == {"column_names": names, "format": "mds", "version": 2, **nothing}


def test_without_a_manifest_schema_and_classes_are_known(tmp_path: Path) -> None:
    out = converted(tmp_path, shard_samples=5)
    with shardkit.open(out) as dataset:
        expected = list(dataset)
    shutil.rmtree(out / "__shardkit__")
    for index in (True, False):
        if not index:
            (out / "index.json").unlink()
        with shardkit.open(out) as dataset:
            assert (dataset.schema, dataset.classes) == (EVERYTHING, ("cat", "dog"))
            for found, sample in zip(dataset, expected, strict=True):
                assert_same(found, sample)


THEIRS = Path(__file__).with_name("bytes") / "mds"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A dataset of MDSWriter, compressed, with hashes."""
    ignored = shutil.ignore_patterns("ours*", "rows.json")
    return Path(shutil.copytree(THEIRS, tmp_path / "theirs", ignore=ignored))


@pytest.mark.filterwarnings(UNPACKED)
def test_every_encoding_of_mds_writer_is_read(theirs: Path, tmp_path: Path) -> None:
    rows = json.loads((THEIRS / "rows.json").read_text())
    with shardkit.open(theirs) as dataset:
        assert_rows(dataset, rows, jpegs=False)
        assert dataset.keys() == [f"shard_00000/{number:09d}" for number in range(3)]
        for name in ("jpeg", "jpeg_array", "jpegarray", "list[jpeg]"):
            value = dataset[1][name]
            for image in value if isinstance(value, list) else [value]:
                assert probe(image)[:3] == ("jpeg", 9, 5)
    result = shardkit.convert(theirs, "mds", tmp_path / "out", workers=0)
    assert result.ignored == {}
    with shardkit.open(tmp_path / "out") as dataset:
        assert_rows(dataset, rows, jpegs=False)


@pytest.mark.filterwarnings(UNPACKED)
def test_verify_compares_sizes_and_hashes_of_the_index(theirs: Path) -> None:
    assert shardkit.verify(theirs).sound
    index = json.loads((theirs / "index.json").read_text())
    file = index["shards"][0]["zip_data"]
    for change in ({"bytes": 7}, {"hashes": {"sha1": "00"}}, {"hashes": {"x": "00"}}):
        index["shards"][0]["zip_data"] = {**file, **change}
        (theirs / "index.json").write_text(json.dumps(index))
        (problem,) = shardkit.verify(theirs).problems
        assert problem.what == "the shard does not match index.json"
    plain = zstandard.ZstdDecompressor().decompressobj()
    data = plain.decompress((theirs / "shard.00000.mds.zstd").read_bytes())
    (theirs / "shard.00000.mds").write_bytes(data)  # is read in place of the compressed one
    (theirs / "index.json").write_text(json.dumps(index))
    assert shardkit.verify(theirs).sound
    index["shards"][0]["samples"] = 4
    (theirs / "index.json").write_text(json.dumps(index))
    (problem,) = shardkit.verify(theirs / "shard.00000.mds").problems
    assert (problem.expected, problem.found) == ("samples 4", "3")


def test_what_needs_more_than_32_bits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="cannot be that large"):
        converted(tmp_path, shard_size="5GB")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("shardkit.formats.offsets.LARGEST", 800)
    writer = MDS.create(tmp_path / "x.mds", ShardSpec(Schema({"blob": Bytes()})))
    with pytest.raises(SampleError, match="too large for MDS") as error:
        writer.write({"__key__": "big", "blob": bytes(1001)})
    assert error.value.where == {"key": "big"}
    assert writer.write({"__key__": "a", "blob": bytes(300)})
    assert not writer.write({"__key__": "b", "blob": bytes(300)})  # the shard is full
    writer.close()


def test_an_index_of_others_is_none(tmp_path: Path, theirs: Path) -> None:
    (tmp_path / "index.json").write_text('{"chunks": [], "config": {}}')
    assert MDS.listed(tmp_path) is None
    (tmp_path / "index.json").write_text('{"chunks": [], "config": {"shards": 1}}')
    assert MDS.listed(tmp_path) is None
    index = json.loads((theirs / "index.json").read_text())
    for name in ("../x.mds", "/x.mds"):
        index["shards"][0]["zip_data"]["basename"] = name
        (theirs / "index.json").write_text(json.dumps(index))
        with pytest.raises(DamagedError, match="unsafe name"):
            shardkit.open(theirs)
    (theirs / "index.json").write_text('{"version": 3, "shards": []}')
    with pytest.raises(FormatError, match="of another version"):
        shardkit.open(theirs)


def test_a_header_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path, schema = tmp_path / "x.mds", Schema({"n": Int()})
    write_shard(MDS, path, schema, [{"__key__": "a", "n": 1}]).close()
    data = path.read_bytes()
    for old, new, what in (
        (b'"column_sizes": [null,', b'"column_sizes": [', "header"),
        (b'["__key__", "n"]', b'["n", "n", "n"]', "header"),
        (b'["str", "int"]', b'["str", "png"]', "missing or wrong"),
        (b'["str", "int"]', b'["str", "???"]', "missing or wrong"),
        (b'{"type": "Int"}', b'{"type": 7}', "header"),
        (b'{"type": "Int"}', b'{"type": "X"}', "does not know"),
    ):
        assert old in data
        start, size = len(data) - 13, len(new) - len(old)
        changed = np.array([1, start + size, start + size + 13], "<u4").tobytes()
        path.write_bytes(changed + data[12:].replace(old, new))
        for layout in (None, MDS.layout(schema)):
            with pytest.raises((DamagedError, FormatError), match=what) as error:
                MDS.open(path, layout)
            assert error.value.where["path"] == path


def test_a_name_of_ours_is_refused_and_what_surprises_is_noted() -> None:
    with pytest.raises(FormatError, match="stores the names of missing fields"):
        MDS.layout(Schema({"__absent__": Text()}))
    notes = MDS.notes(Schema({"a": Array("|b1"), "b": Image(optional=True), "c": Image()}))
    assert [note.partition(":")[0] for note in notes[:2]] == ["'a'", "'b'"]
    assert len(notes) == 3


def test_columns_may_be_called_as_other_indexes_call_their_parts(tmp_path: Path) -> None:
    samples = [{"__key__": "a", "chunks": 1, "config": 2, "shards": 3}]
    shardkit.convert(samples, "mds", tmp_path / "x", workers=0)
    shutil.rmtree(tmp_path / "x/__shardkit__")
    assert [*shardkit.open(tmp_path / "x")] == samples


@pytest.mark.parametrize("name", ["mds", "litdata"])
@pytest.mark.parametrize("more", [-5_000, 1_000, 60_000, 120_000, 140_000])
def test_a_limit_a_little_above_four_mebibytes_holds(tmp_path: Path, name: str, more: int) -> None:
    """Space for the offsets is reserved once the samples take more than that."""
    limit = (4 << 20) + more
    with shardkit.create(tmp_path / "d", to=name, schema={"x": Bytes()}, shard_size=limit) as out:
        for number in range(2_200):
            out.write({"__key__": str(number), "x": bytes(4_000)})
    sizes = [p.stat().st_size for p in (tmp_path / "d").iterdir() if p.suffix in (".mds", ".bin")]
    assert sum(sizes) > 2_200 * 4_000
    assert max(sizes) <= limit
    assert max(sizes) > 4_000_000


def test_a_whole_number_of_more_than_64_bits_is_too_large_not_damaged(tmp_path: Path) -> None:
    columns = {"column_encodings": ["str_int"], "column_names": ["x"], "column_sizes": [None]}
    header = json.dumps({**columns, "format": "mds", "version": 2}).encode()
    values = [b"7", str(10**30).encode()]
    start = 4 * 4 + len(header)
    ends = np.cumsum([start, *(4 + len(value) for value in values)])
    shard = np.array([2, *ends], "<u4").tobytes() + header
    shard += b"".join(np.uint32(len(value)).tobytes() + value for value in values)
    (tmp_path / "shard.00000.mds").write_bytes(shard)
    raw = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}
    about = {**columns, "compression": None, "format": "mds", "hashes": [], "raw_data": raw}
    about |= {"samples": 2, "size_limit": None, "version": 2, "zip_data": None}
    (tmp_path / "index.json").write_text(json.dumps({"shards": [about], "version": 2}))
    dataset = shardkit.open(tmp_path)
    assert dataset[0]["x"] == 7
    with pytest.raises(SampleError, match="a value is too large: it takes more than 64 bits"):
        dataset[1]
