"""What LitData's chunks and MDS shards share: 32-bit offsets first, and an index.json beside them.

What each is by itself is in test_litdata.py and test_mds.py.
"""

import shutil
import struct

import pytest

import shardkit
from shardkit import Bytes, Int, Schema
from shardkit.dataset.find import open_splits
from shardkit.errors import DamagedError, SampleError, UsageError
from shardkit.formats import file_name, get_format
from shardkit.formats.base import ShardSpec
from shardkit.formats.testing_samples import assert_reads, assert_same, everything, write_shard
from shardkit.testing import EVERYTHING, open_files
from tests.formats.refusals import refused

BOTH = pytest.mark.parametrize("name", ["litdata", "mds"])
WRITERS = {"litdata": "litdata.chunk.LitDataWriter", "mds": "mds.shard.MdsWriter"}


@BOTH
def test_a_shard_of_any_size_reads_the_same(tmp_path, monkeypatch, name):
    """In memory; copied behind its offsets; with more room for them than they need."""
    format, samples = get_format(name), [everything(number) for number in range(40)]
    path, found = tmp_path / file_name("shard-000000", name), []
    for held, room in ((1 << 22, 1 << 17), (2000, 1), (2000, 4000)):
        monkeypatch.setattr("shardkit.formats.offsets._IN_MEMORY", held)
        monkeypatch.setattr(f"shardkit.formats.{WRITERS[name]}.room", room)
        assert_reads(write_shard(format, path, EVERYTHING, samples), samples)
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        found.append(path.read_bytes())
        writer = format.create(path, ShardSpec(EVERYTHING, max_bytes=9000))
        taken = sum(writer.write(sample) for sample in samples)
        writer.close()
        assert 0 < taken < 40
        assert path.stat().st_size <= 9000
        path.unlink()
    assert found[0] == found[1]
    assert found[2][4:8] == struct.pack("<I", 4000)


@BOTH
@pytest.mark.parametrize("size", [9, 99_999])
def test_sizes_that_do_not_fit_a_sample_are_damage_at_its_first_byte(tmp_path, name, size):
    path, schema = tmp_path / file_name("x", name), Schema({"a": Bytes(), "n": Int()})
    samples = [{"__key__": key, "a": bytes(size), "n": 1} for key in "ab"]
    reader = write_shard(get_format(name), path, schema, samples)
    (_, start), (_, stop) = reader.spans().T
    whole = path.read_bytes()
    assert whole[reader.offset(1, "__key__")] == ord("b")
    for change in (b"\xff\xff\xff\x7f", struct.pack("<I", size + stop)):
        path.write_bytes(whole[:start] + change + whole[start + 4 :])
        reader = get_format(name).open(path, reader.layout)
        assert reader[0] == samples[0]
        for fields in (None, ["n"]):
            where = {"path": path, "position": 1, "offset": start}
            with refused(DamagedError, "do not add up", fix="copy it again", **where):
                reader.sample(1, fields)


@BOTH
def test_closing_closes_the_file_whose_offsets_are_not_in_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr("shardkit.storage.byte_source.IN_MEMORY", 8)
    path, schema = tmp_path / file_name("x", name), Schema({"n": Int()})
    samples = [{"__key__": f"{number}", "n": number} for number in range(9)]
    reader = write_shard(get_format(name), path, schema, samples)
    assert reader[7] == samples[7]
    assert open_files(tmp_path)
    reader.close()
    assert not open_files(tmp_path)
    with pytest.raises(ValueError, match="closed"):
        reader[7]


@BOTH
def test_what_needs_more_than_32_bits_is_refused(tmp_path, monkeypatch, name):
    with pytest.raises(UsageError, match="cannot be that large"):
        shardkit.create(tmp_path / "out", name, {"n": Int()}, shard_size="5GB")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("shardkit.formats.offsets.LARGEST", 1000)
    writer = get_format(name).create(tmp_path / "x", ShardSpec(Schema({"blob": Bytes()})))
    called = {"litdata": "LitData", "mds": "MDS"}[name]
    with refused(SampleError, f"large for {called}, which has 32-bit", where={"key": "big"}):
        writer.write({"__key__": "big", "blob": bytes(1001)})
    assert writer.write({"__key__": "a", "blob": bytes(500)})
    assert not writer.write({"__key__": "b", "blob": bytes(500)})  # the shard is full
    writer.close()


def test_an_index_of_others_is_none(tmp_path):
    for name, text in (
        ("mds", '{"chunks": [], "config": {}}'),
        ("mds", '{"chunks": [], "config": {"shards": 1}}'),
        ("litdata", '{"chunks": [], "other": 1}'),
        ("litdata", '{"version": 2, "shards": []}'),
    ):
        (tmp_path / "index.json").write_text(text)
        assert get_format(name).listed(tmp_path) is None, text


@BOTH
def test_without_a_manifest_schema_and_classes_are_known(tmp_path, name):
    samples = [{**everything(number), "label": number % 2} for number in range(9)]
    out, classes = tmp_path / "out", ["cat", "dog"]
    with shardkit.create(out, name, EVERYTHING, classes=classes, shard_samples=5) as writer:
        for sample in samples:
            writer.write(sample)
    assert shardkit.verify(out).sound
    shutil.rmtree(out / "__shardkit__")
    for index in (True, False)[: 1 + (name == "mds")]:  # whose shards describe themselves
        if not index:
            (out / "index.json").unlink()
        with shardkit.open(out) as dataset:
            assert (dataset.schema, dataset.classes) == (EVERYTHING, ("cat", "dog"))
            assert dataset.ours
            for found, sample in zip(dataset, samples, strict=True):
                assert_same(found, sample)


@BOTH
def test_splits_without_our_manifest_are_folders_with_an_index_each(images, tmp_path, name):
    out = tmp_path / "out"
    shardkit.convert(images, name, out, split="train=0.5,val=0.5", workers=0)
    for manifest in list(out.glob("**/__shardkit__")):
        shutil.rmtree(manifest)
    found = open_splits(out)
    names = {split: dataset.path.name for split, dataset in found.items()}
    assert names == {"train": "train", "val": "val"}
    assert sum(map(len, found.values())) == 12
