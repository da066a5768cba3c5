"""What names and lists announce is compared with the files that are there."""

from __future__ import annotations

import gzip
import json
import shutil
import warnings

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import shardkit
from shardkit.errors import DamagedError, ShardkitError, ShardkitWarning, SourceError
from shardkit.storage.patterns import incomplete


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([f"a-{n:05d}-of-00003.txt" for n in range(3)], []),
        ([f"a-{n:05d}-of-00003.txt" for n in (1, 2, 3)], []),
        (["a-00001-of-00003.txt"], ["1 of 3 a-*-of-00003*.txt, not 00000, 00002"]),
        (["a-00003-of-00003.txt"], ["1 of 3 a-*-of-00003*.txt, not 00001, 00002"]),
        ([f"a-{n:05d}-of-00002-{n:016x}.parquet" for n in range(2)], []),
        (["d/b.000-of-002.gz", "b.001-of-002.gz"], ["not 001", "not 000"]),
        (["a-000-of-002.json", "a-001-of-002.json.zst"], []),
        (["a-000-of-003.json", "a-001-of-003.json.gz"], ["2 of 3 a-*-of-003*.json*, not 002"]),
        (["page-1-of-2.txt", "a-00-of-03.txt", "x-of-y.txt"], []),
    ],
)
def test_numbered_names_announce_their_set(names, found):
    made = [str(one) for one in incomplete(names)]
    assert len(made) == len(found)
    assert all(part[-5:] in one for part, one in zip(found, made, strict=True))


def test_a_folder_with_some_of_the_files_is_refused_and_a_pattern_warns(tmp_path):
    for n in (0, 1, 3):
        table = pa.table({"x": [n]})
        put = tmp_path / f"p/train-{n:05d}-of-00004.parquet"
        put.parent.mkdir(exist_ok=True)
        parquet.write_table(table, put)
        put = tmp_path / f"j/c4-train.{n:05d}-of-00004.json.gz"
        put.parent.mkdir(exist_ok=True)
        put.write_bytes(gzip.compress(b'{"text": "%d"}\n' % n))
    for name in "pj":
        with pytest.raises(SourceError, match="names of others announce") as caught:
            shardkit.convert(tmp_path / name, to="wds", out=tmp_path / f"{name}o", workers=0)
        assert "3 of 4" in str(caught.value.found)
        assert "not 00002" in str(caught.value.found)
        pattern = str(caught.value.fix).split("'")[1]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ShardkitWarning)
            made = shardkit.convert(pattern, to="wds", out=tmp_path / f"{name}o", workers=0)
        assert made.samples == 3
        said = [str(w.message) for w in warned] + made.notes
        assert any("3 of 4" in words for words in said)


@pytest.mark.parametrize("format", ["mds", "litdata"])
def test_a_shard_that_an_index_lists_is_missing(tmp_path, format):
    (tmp_path / "in").mkdir()
    samples = [{"__key__": str(n), "x": n} for n in range(6)]
    shardkit.convert(samples, to=format, out=tmp_path / "in/a", workers=0, shard_samples=2)
    shutil.rmtree(tmp_path / "in/a/__shardkit__")
    shard = sorted(path for path in (tmp_path / "in/a").iterdir() if path.suffix != ".json")[1]
    shard.unlink()
    for source in (tmp_path / "in", tmp_path / "in/a"):
        with pytest.raises(ShardkitError) as caught:
            shardkit.convert(source, to="arrow", out=tmp_path / "out", workers=0)
        assert shard.name in str(caught.value)


def test_a_shard_of_img2dataset_is_missing(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(2):
        samples = [{"__key__": f"{n}{i}", "x": np.array([i])} for i in range(2)]
        shardkit.convert(samples, to="wds", out=tmp_path / f"in/0000{n}.tar", workers=0)
        stats = {"count": 2, "successes": 2}
        (tmp_path / f"in/0000{n}_stats.json").write_text(json.dumps(stats))
    shutil.rmtree(tmp_path / "in/__shardkit__")
    shardkit.convert(tmp_path / "in", to="arrow", out=tmp_path / "out", workers=0)
    (tmp_path / "in/00001.tar").unlink()
    with pytest.raises(SourceError, match="only its statistics"):
        shardkit.convert(tmp_path / "in", to="arrow", out=tmp_path / "out2", workers=0)


def test_an_index_of_megatron_without_its_tokens(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(2):
        samples = [{"__key__": str(n), "tokens": np.arange(4, dtype=np.uint16)}]
        shardkit.convert(samples, to="megatron", out=tmp_path / f"in/{n}.bin", workers=0)
    shutil.rmtree(tmp_path / "in/__shardkit__")
    (tmp_path / "in/0.bin").unlink()
    with pytest.raises(DamagedError, match="has an index"):
        shardkit.open(tmp_path / "in")


@pytest.mark.parametrize("tool", ["tfds", "datasets"])
def test_numbers_of_samples_in_dataset_info_are_compared(tmp_path, tool):
    (tmp_path / "in").mkdir()
    for n in range(2):
        samples = [{"__key__": f"{n}{i}", "x": i} for i in range(3)]
        if tool == "tfds":
            path, format = tmp_path / f"in/a-train.tfrecord-0000{n}-of-00002", "tfrecord"
        else:
            path, format = tmp_path / f"in/a-train-0000{n}-of-00002.arrow", "arrow"
        out = tmp_path / f"{n}.{format}"
        shardkit.convert(samples, to=format, out=out, workers=0)
        shutil.move(out, path)
    info = {"splits": [{"name": "train", "shardLengths": ["3", "3"]}]}
    if tool == "datasets":
        info = {"splits": {"train": {"name": "train", "num_examples": 6}}}
    path = tmp_path / "in/dataset_info.json"
    path.write_text(json.dumps(info))
    shardkit.convert(tmp_path / "in", to="wds", out=tmp_path / "out", workers=0)
    path.write_text(json.dumps(info).replace("6", "7").replace('"3"]', '"4"]'))
    with pytest.raises(DamagedError, match="than dataset_info"):
        shardkit.convert(tmp_path / "in", to="wds", out=tmp_path / "out2", workers=0)
