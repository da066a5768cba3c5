"""MDS: the contract, the layout read and written by hand, what is refused or damaged.

StreamingDataset reads ours, and we read what MDSWriter writes, in test_mds_streaming.py.
"""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard

import shardkit
from shardkit.codecs.image import probe
from shardkit.errors import DamagedError, FormatError
from shardkit.formats import get_format
from shardkit.formats.testing_samples import EVERYTHING, everything, write_shard
from shardkit.schema import Array, Bytes, Image, Int, Schema, Text
from shardkit.testing import FormatContract
from tests.formats.refusals import refused
from tests.formats.test_mds_streaming import assert_rows

MDS = get_format("mds")
SAID = "ignore:(compressed MDS shards|images with a palette):shardkit.errors.ShardkitWarning"


def by_facts(path):
    """The stored values of all samples, by column, read as streaming's MDSReader does."""
    data, found = path.read_bytes(), []
    count = int(np.frombuffer(data, "<u4", 1)[0])
    ends = np.frombuffer(data, "<u4", count + 1, 4).tolist()
    header = json.loads(data[4 * (count + 2) : ends[0]])
    for at in ends[:-1]:
        sizes = []
        for size in header["column_sizes"]:
            sizes.append(size or int(np.frombuffer(data, "<u4", 1, at)[0]))
            at += 0 if size else 4  # noqa: PLW2901 - on to what follows
        bounds = itertools.accumulate(sizes, initial=at)
        values = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
        found.append(dict(zip(header["column_names"], values, strict=True)))
        assert at + sum(sizes) in ends
    return found


class TestMds(FormatContract):
    tested = get_format("mds")
    provides = frozenset({"plan", "spans"})

    def independent_keys(self, path):
        return [sample["__key__"].decode() for sample in by_facts(path)]


def test_the_index_names_what_a_conversion_wrote(tmp_path):
    samples = [everything(number) for number in range(9)]
    out = tmp_path / "out"
    with shardkit.create(out, "mds", EVERYTHING, shard_samples=5) as writer:
        for sample in samples:
            writer.write(sample)
    index = json.loads((out / "index.json").read_text())
    assert index["version"] == 2
    names = sorted(["__key__", "__absent__", *EVERYTHING])
    for number, shard in enumerate(index["shards"]):
        path = out / f"shard.{number:05d}.mds"
        file = {"basename": path.name, "bytes": path.stat().st_size, "hashes": {}}
        assert shard.pop("raw_data") == file
        assert shard.pop("samples") == (5, 4)[number]
        encodings = dict(zip(names, shard.pop("column_encodings"), strict=True))
        sizes = dict(zip(names, shard.pop("column_sizes"), strict=True))
        assert {n: s for n, s in sizes.items() if s} == {"good": 1, "label": 8, "score": 8}
        assert (encodings["image"], encodings["points"]) == ("jpeg", "ndarray:float32")
        nothing = {"compression": None, "zip_data": None, "size_limit": None, "hashes": []}
        assert shard == {"column_names": names, "format": "mds", "version": 2, **nothing}
        texts = [sample["text"].decode() for sample in by_facts(path)]
        assert texts == [sample["text"] for sample in samples[5 * number :][:5]]


THEIRS = Path(__file__).with_name("bytes") / "mds"


@pytest.fixture
def theirs(tmp_path):
    """A dataset of MDSWriter, compressed, with hashes."""
    ignored = shutil.ignore_patterns("ours*", "rows.json")
    return Path(shutil.copytree(THEIRS, tmp_path / "theirs", ignore=ignored))


@pytest.mark.filterwarnings(SAID)
def test_every_encoding_of_mds_writer_is_read(theirs, tmp_path):
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


@pytest.mark.filterwarnings(SAID)
def test_verify_compares_sizes_and_hashes_of_the_index(theirs):
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


def test_an_index_that_leads_elsewhere_or_is_of_another_version_is_refused(theirs):
    index = json.loads((theirs / "index.json").read_text())
    for name in ("../x.mds", "/x.mds"):
        index["shards"][0]["zip_data"]["basename"] = name
        (theirs / "index.json").write_text(json.dumps(index))
        with pytest.raises(DamagedError, match="unsafe name"):
            shardkit.open(theirs)
    (theirs / "index.json").write_text('{"version": 3, "shards": []}')
    with pytest.raises(FormatError, match="of another version"):
        shardkit.open(theirs)


def test_a_header_that_does_not_fit_is_an_error(tmp_path):
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
            with refused((DamagedError, FormatError), what, path=path):
                MDS.open(path, layout)


def test_names_of_columns_and_what_surprises(tmp_path):
    with pytest.raises(FormatError, match="stores the names of missing fields"):
        MDS.layout(Schema({"__absent__": Text()}))
    notes = MDS.notes(Schema({"a": Array("|b1"), "b": Image(optional=True), "c": Image()}))
    assert [note.partition(":")[0] for note in notes[:2]] == ["'a'", "'b'"]
    assert len(notes) == 3
    # Columns may be called as other indexes call their parts.
    samples = [{"__key__": "a", "chunks": 1, "config": 2, "shards": 3}]
    shardkit.convert(samples, "mds", tmp_path / "x", workers=0)
    shutil.rmtree(tmp_path / "x/__shardkit__")
    assert [*shardkit.open(tmp_path / "x")] == samples


@pytest.mark.parametrize("name", ["mds", "litdata"])
@pytest.mark.parametrize("more", [-5_000, 1_000, 60_000, 120_000, 140_000])
def test_a_limit_a_little_above_four_mebibytes_holds(tmp_path, name, more):
    """Space for the offsets is reserved once the samples take more than that."""
    limit = (4 << 20) + more
    with shardkit.create(tmp_path / "d", to=name, schema={"x": Bytes()}, shard_size=limit) as out:
        for number in range(2_200):
            out.write({"__key__": str(number), "x": bytes(4_000)})
    sizes = [p.stat().st_size for p in (tmp_path / "d").iterdir() if p.suffix in (".mds", ".bin")]
    assert sum(sizes) > 2_200 * 4_000
    assert max(sizes) <= limit
    assert max(sizes) > 4_000_000
