"""Bytes that a store sends are compared with the digests of their pieces."""

import pickle
import re
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import shardkit
from shardkit.dataset.find import _remote_files, open_dataset
from shardkit.errors import DamagedError, ShardkitError
from shardkit.metadata import manifest as manifests
from shardkit.schema import Array, Bytes, Schema
from shardkit.storage import byte_source
from shardkit.storage.checksums import CHECKSUM, DIGEST, PIECE, count
from shardkit.storage.digests import PieceList
from shardkit.storage.fs import source
from shardkit.stream.loader import Loader
from tests.remote.proxy import Rule
from tests.remote.test_reading import same
from tests.test_irregular import Swap
from tests.test_verify import as_earlier_versions_wrote_it

FORMATS = ("wds", "lmdb", "arrow", "parquet", "hf", "beton", "megatron")
SAMPLES, SIZE = 60, 70_000  # two shards of 2 MB
LIST = f"__shardkit__/{manifests.PIECES}"
OTHER = "the bytes that the store returned are not those that were written"


def make(out, format, *, lengths=False):
    rng, tokens = np.random.default_rng(5), format == "megatron" or lengths
    kind = Array("|u1", (None,)) if tokens else Bytes()
    with shardkit.create(out, format, Schema({"x": kind}), shard_samples=SAMPLES // 2) as made:
        for n in range(SAMPLES):
            value = rng.integers(0, 200, SIZE + n, np.uint8)
            made.write({"__key__": f"k{n}", "x": value if tokens else value.tobytes()})
    return out


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    for format in FORMATS:
        make(root / format, format)
    return root


def shards(dataset):
    """A regular expression for the files of all shards."""
    return "|".join(file.name.replace(".", "[.]") + "$" for file in dataset.manifest.all_files())


@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_byte_is_requested_once_more_past_caches(format, seen, datasets):
    local = open_dataset(datasets / format)
    for wrong in ({"times": 1}, {"cached": True}):
        found = seen.open(format)
        seen.proxy.clear()
        seen.proxy.add(Rule(flip=1000, method="GET", match=shards(local), **wrong))
        assert same(found, local)


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_that_stay_wrong_are_an_error(format, seen, datasets):
    """Which names the piece and its bytes, reading at random and by a loader: there is never a
    sample, and no end of the epoch."""
    url, found = seen.url(format), seen.open(format)
    name = open_dataset(datasets / format).shard_name(1)
    seen.proxy.add(Rule(flip=1000, method="GET", match=name.replace(".", "[.]") + "$"))
    for n in (SAMPLES // 2, SAMPLES - 1):
        with pytest.raises(DamagedError, match=OTHER) as caught:
            found[n]
        assert str(caught.value.where["path"]) == f"{url}/{name}"
        assert re.search(r"piece \d \(bytes .* when they were requested again", caught.value.found)
        assert caught.value.where["offset"] % PIECE == 0
        assert "shardkit verify" in str(caught.value.fix)
    loader = Loader(url, batch_size=4, shuffle=True, storage_options=seen.options)
    with pytest.raises(DamagedError, match=OTHER):
        list(loader)


def test_a_wrong_page_is_not_put_into_the_cache(seen, datasets, tmp_path):
    """By threads that read ahead neither, which may still be at work as the next Loader begins."""
    more = {"batch_size": 4, "storage_options": seen.options, "cache": tmp_path / "cache"}
    seen.proxy.add(Rule(flip=5000, method="GET", match="shard-000001[.]tar$"))
    with pytest.raises(DamagedError, match=OTHER):
        list(Loader(seen.url("wds"), **more))
    seen.proxy.clear()
    there, here = Loader(seen.url("wds"), **more), Loader(datasets / "wds", batch_size=4)
    assert pickle.dumps(list(there)) == pickle.dumps(list(here))


def test_an_object_that_is_cut_while_it_is_in_use_is_not_a_fault_of_the_store(
    bucket, datasets, tmp_path
):
    bucket.put(datasets / "wds")
    name = "shard-000001.tar"
    data = bucket.get(name)
    cut = Swap(lambda: bucket.put({name: data[:-1000]}))
    with pytest.raises(DamagedError, match="not as long as when it was written") as caught:
        shardkit.convert(
            bucket.url(), "arrow", tmp_path / "out", workers=0, shard_samples=10, progress=cut,
            storage_options=bucket.options,
        )  # fmt: skip
    assert str(caught.value.where["path"]) == bucket.url(name)
    assert caught.value.expected == f"{len(data):,} bytes"
    assert caught.value.found == f"{len(data) - 1000:,} bytes"
    assert "shardkit verify" in str(caught.value.fix)


def test_a_conversion_copies_no_wrong_bytes(seen, tmp_path):
    """Its workers compare what they read as well."""
    seen.proxy.add(Rule(flip=9000, skip=1, method="GET", match="shard-000001[.]tar$"))
    with pytest.raises(ShardkitError, match=OTHER):
        shardkit.convert(
            seen.url("wds"), "arrow", tmp_path / "out", workers=2, shard_samples=10,
            storage_options=seen.options,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_pickle_compares_too(seen):
    found = pickle.loads(pickle.dumps(seen.open("wds")))
    part = pickle.loads(pickle.dumps(found.part([1])))
    seen.proxy.clear()
    seen.proxy.add(Rule(flip=9, method="GET", match="[.]tar$"))
    for dataset in (found, part):
        with pytest.raises(DamagedError, match=OTHER):
            dataset[3]
    assert seen.proxy.count("HEAD", "shard-").requests == 0


def test_lengths_and_other_lists_are_compared(own, tmp_path):
    own.put(make(tmp_path / "d", "wds", lengths=True))
    found = own.open()
    own.proxy.add(Rule(flip=200, times=1, method="GET", match="lengths[.]npy$"))
    with pytest.raises(DamagedError, match="a file has changed since it was written"):
        found.lengths("x")
    assert found.lengths("x").tolist() == [SIZE + n for n in range(SAMPLES)]


def test_the_list_is_read_once_and_not_at_opening(seen, datasets):
    """And once more if it came wrong."""
    for wrong in (0, 1):
        found = seen.open("wds")
        seen.proxy.clear()
        assert len(found) == SAMPLES
        assert seen.proxy.count(match=manifests.PIECES).requests == 0
        seen.proxy.add(Rule(flip=20, times=wrong, method="GET", match=manifests.PIECES))
        assert same(found, open_dataset(datasets / "wds"))
        assert seen.proxy.count("GET", manifests.PIECES).requests == 1 + wrong


def test_the_list_is_read_once_though_its_page_is_evicted_and_large_reads_take_one_request(
    seen, datasets, monkeypatch
):
    monkeypatch.setattr(byte_source, "LATEST", 1)
    # The page may be evicted between the thread that asks for the list and the one that needs it.
    monkeypatch.setattr(PieceList, "ask", lambda *_: None)
    found, local = seen.open("wds"), open_dataset(datasets / "wds")
    seen.proxy.clear()
    assert same(found, local)
    assert seen.proxy.count("GET", manifests.PIECES).requests == 1
    seen.proxy.clear()
    file, path = local.manifest.shards[0].file, found.path / local.shard_name(0)
    assert len(byte_source.RemoteFile(path).read(10, file.bytes - 10)) == file.bytes - 10
    assert count(file.bytes) > 2
    assert seen.proxy.count("GET", path.name).requests < count(file.bytes)


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_list_is_an_error(damage, bucket, datasets):
    bucket.put(datasets / "wds")
    found, data = bucket.open(), bytearray((datasets / "wds" / LIST).read_bytes())
    data[20] ^= damage == "flipped"
    bucket.put({LIST: bytes(data[:-1] if damage == "cut" else data)})
    if damage == "missing":
        bucket.delete(LIST)
    with pytest.raises(DamagedError, match="the list of piece checksums") as caught:
        [found[n] for n in (0, SAMPLES - 1)]
    assert manifests.PIECES in str(caught.value)


def test_a_list_that_came_wrong_into_the_cache_is_requested_again(seen, datasets, tmp_path):
    here = pickle.dumps(list(Loader(datasets / "wds", batch_size=4)))
    for more in ({}, {"cache": tmp_path / "cache"}):
        seen.proxy.clear()
        seen.proxy.add(Rule(flip=20, times=1, method="GET", match=manifests.PIECES))
        for _ in range(2):  # the second finds the wrong one in the folder
            there = Loader(seen.url("wds"), batch_size=4, storage_options=seen.options, **more)
            assert pickle.dumps(list(there)) == here


def test_a_dataset_of_an_earlier_version_reads_and_verifies(own, tmp_path):
    """Its files of several pieces cannot be compared while they are read; its indexes can."""
    local = open_dataset(make(tmp_path / "d", "wds"))
    assert len([local[n] for n in range(SAMPLES)]) == SAMPLES  # with its own index, in memory
    as_earlier_versions_wrote_it(tmp_path / "d")
    own.put(tmp_path / "d")
    assert same(own.open(), local)
    assert shardkit.verify(own.url(), storage_options=own.options).sound
    own.proxy.add(Rule(flip=200, method="GET", match="index[.]npy$"))
    with pytest.raises(DamagedError, match=OTHER):
        own.open()[0]


@pytest.mark.parametrize("format", FORMATS)
def test_verify_downloads_each_byte_once(format, seen, datasets):
    assert shardkit.verify(seen.url(format), storage_options=seen.options).sound
    manifest = manifests.load(datasets / format)
    for file in (*manifest.all_files(), *manifest.files):
        assert seen.proxy.count("GET", f"/{format}/{file.name}$").sent == file.bytes, file.name


def test_verify_names_what_has_changed_at_a_url(bucket, datasets):
    bucket.put(datasets / "wds")
    name = open_dataset(datasets / "wds").shard_name(1)
    data = bucket.get(name)
    for changed, what in (
        (data + b"x", "a file is longer than it was"),
        (data[:-1], "a file is truncated"),
        (data[:PIECE] + b"x" + data[PIECE + 1 :], "a file has changed"),
    ):
        bucket.put({name: changed})
        (problem,) = shardkit.verify(bucket.url(), storage_options=bucket.options).problems
        assert problem.what.startswith(what)
    assert problem.where["offset"] == PIECE
    assert "piece 1 (bytes 1,048,576 to" in str(problem.found)
    assert "sample" in str(problem.found)


def test_verify_is_not_misled_by_the_way(seen):
    seen.proxy.add(Rule(flip=1000, times=1, method="GET", match="wds/shard-000001[.]tar$"))
    assert shardkit.verify(seen.url("wds"), storage_options=seen.options).sound


def test_digests_of_very_many_shards_take_little_memory():
    """All that is known of a shard of 256 MB and its index, once it was read: 10,000 of them take
    less than 60 MB."""
    shard = manifests.File("shard.tar", 256_000_000, "0" * 32)
    index = manifests.File("__shardkit__/shard.index.npy", 80_000, "1" * 32)
    every = tuple(
        manifests.Shard(replace(shard, name=f"{n}.tar"), 10, (index,)) for n in range(500)
    )
    listed = SimpleNamespace(
        shards=every, checksum=CHECKSUM, list_named=lambda name: manifests.File(name, 0, "")
    )
    folder = source("s3://bucket/folder")
    tracemalloc.start()
    try:
        known = dict(_remote_files(listed, folder))
        for files in known.values():
            for _, info in files:
                info.pieces._digests = info.pieces._digests or bytes(DIGEST * count(info.size))
        assert tracemalloc.get_traced_memory()[0] < 6000 * len(every)
    finally:
        tracemalloc.stop()
