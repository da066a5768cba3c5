"""What others wrote, at URLs: TARs, which are searched once; patterns, splits, folders."""

import pickle
import random
import shutil

import numpy as np
import pytest

import shardkit
from shardkit.dataset.find import open_dataset, open_splits
from shardkit.errors import ShardkitError, ShardkitWarning, UsageError
from shardkit.formats.wds import remote_index_cache
from shardkit.schema import Array, Bytes, Schema
from shardkit.storage import fs
from shardkit.storage.page_cache import PAGE, checksum_of
from shardkit.stream.batching import Bucket as ByLength
from shardkit.stream.batching import Dynamic, Pack
from shardkit.stream.loader import Loader
from tests.conftest import few
from tests.remote.buckets import Bucket
from tests.remote.test_streaming import epochs, loader
from tests.sources import real
from tests.sources.test_layouts import card


def tars(root, name, samples, size, each=10**6):
    """TARs that are not ours in a folder, which is returned."""
    dice, made = random.Random(samples), root / "made"
    with shardkit.create(made, "wds", {"x": Bytes()}, shard_samples=each) as out:
        for n in range(samples):
            out.write({"__key__": f"{name}{n:05}", "x": dice.randbytes(size)})
    for n, path in enumerate(sorted(made.glob("*.tar"))):
        path.rename(root / f"{name}-{n:03}.tar")
    shutil.rmtree(made)
    return root


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """5 MB of small samples, 8 MB of three large ones; four shards of a split, and one."""
    root = tmp_path_factory.mktemp("shards")
    for name, samples, size in (("small", 500, 10_000), ("large", 3, 2_700_000)):
        tars(root, name, samples, size)
    (root / "splits").mkdir()
    for name, samples in (("train", 40), ("val", 10)):
        tars(root / "splits", name, samples, 100, 10)
    return root


@pytest.fixture(scope="module")
def data(google, shards):
    return Bucket(google, shards)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def everything(dataset):
    return pickle.dumps([dataset[n] for n in range(len(dataset))])


def test_a_tar_is_searched_by_few_requests_and_once(seen, shards, cache):
    size = (shards / "small-000.tar").stat().st_size
    assert len(seen.open("small-000.tar")) == 500
    count = seen.proxy.count("GET", r"\.tar$")
    assert count.requests <= size / PAGE + 6
    assert count.sent <= size + 4 * PAGE
    assert {path.name.partition("-")[0][:6] for path in cache.glob("*.page")} == {"layout"}
    seen.proxy.clear()
    found = seen.open("small-000.tar")
    # What it is, and how it is compressed.
    assert seen.proxy.count("GET", r"\.tar$").requests <= 2
    assert everything(found) == everything(open_dataset(shards / "small-000.tar"))
    seen.proxy.clear()
    found = seen.open("large-000.tar")
    assert len(found) == 3
    # The first page, which tells how it is compressed; of the rest no payload.
    assert seen.proxy.count("GET", r"\.tar$").sent <= PAGE + 6 * (1 << 16)
    assert everything(found) == everything(open_dataset(shards / "large-000.tar"))


def test_a_layout_of_several_pages(data, shards, cache, monkeypatch):
    monkeypatch.setattr(remote_index_cache, "PAGE", 1000)
    data.open("small-000.tar")
    assert len([*cache.glob("layout*.page")]) > 5
    here = everything(open_dataset(shards / "small-000.tar"))
    monkeypatch.setattr(remote_index_cache, "scan", None)  # must not be called
    assert everything(data.open("small-000.tar")) == here


def _forged(path, data):
    """The checksum fits, and what it is of is no layout."""
    return checksum_of(path.stem.removesuffix("-0"), 0, data) + data


DAMAGE = {
    "cut": lambda path, page: page[:-5],
    "forged": lambda path, page: _forged(
        path, page[8:].replace(b'"samples": 500', b'"samples": 400')
    ),
    "nonsense": lambda path, page: _forged(path, b"[1]\n"),
    "removed": lambda path, page: None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_layout_is_made_again(damage, data, shards, cache):
    data.open("small-000.tar")
    (page,) = cache.glob("layout*.page")
    whole = page.read_bytes()
    page.unlink()
    if damage != "removed":
        page.write_bytes(DAMAGE[damage](page, whole))
    found = data.open("small-000.tar")
    assert everything(found) == everything(open_dataset(shards / "small-000.tar"))
    if damage in ("cut", "removed"):  # nothing removes the others, as their checksums hold
        assert page.read_bytes() == whole


def test_a_tar_that_was_replaced_is_searched_again_and_what_it_warns_of_is_said_each_time(
    bucket, shards, cache
):
    for name in ("small", "large"):
        bucket.put({"a.tar": (shards / f"{name}-000.tar").read_bytes()})
        local = open_dataset(shards / f"{name}-000.tar")
        assert everything(bucket.open("a.tar")) == everything(local)
    cut = bucket.get("a.tar").rstrip(b"\0")
    bucket.put({"a.tar": cut + bytes(-len(cut) % 512)})
    for _ in range(2):
        with pytest.warns(ShardkitWarning, match="without the zero blocks"):
            assert len(bucket.open("a.tar")) == 3


def test_a_loader_searches_and_reads_the_same_pages(seen, shards, tmp_path):
    """The search fills the cache, and a second Loader neither searches nor downloads."""
    size = (shards / "small-000.tar").stat().st_size
    here = epochs(loader(shards / "small-000.tar"), 1)
    for most in (1.02 * size + (1 << 16), 0):
        seen.proxy.clear()
        there = loader(seen.url("small-*.tar"), seen.options, cache=tmp_path / "cache")
        assert epochs(there, 1) == here
        assert seen.proxy.count("GET", r"\.tar$").sent <= most
    assert len([*(tmp_path / "cache").glob("layout*.page")]) == 1


@pytest.mark.filterwarnings("ignore:the cache holds")
def test_a_layout_stays_while_a_small_cache_is_full(data, tmp_path):
    more = {"cache": tmp_path, "cache_limit": 3 * PAGE}
    epochs(loader(data.url("small-*.tar"), data.options, **more), 2)
    assert len([*tmp_path.glob("layout*.page")]) == 1
    assert sum(path.stat().st_size for path in tmp_path.glob("*.page")) <= 3 * PAGE


def test_a_cache_that_is_smaller_than_a_batch(data, shards):
    """It holds a page, and a batch has values of eight: what has no room is read alone."""
    url, more = data.url("large-*.tar"), {"batch_size": 3, "storage_options": data.options}
    here = Loader(shards / "large-000.tar", batch_size=3)
    assert epochs(Loader(url, cache_limit=PAGE, **more), 2) == epochs(here, 2)
    with pytest.raises(UsageError, match="too small for a page"):
        Loader(url, cache_limit=PAGE - 1, **more)


def test_a_cache_folder_that_cannot_be_used(data, cache):
    cache.write_text("x")
    with pytest.raises(UsageError, match="cache folder"):
        data.open("small-000.tar")


@pytest.mark.parametrize("pattern", ["train-*.tar", "train-{000..003}.tar", "train-00[0-3].tar"])
def test_patterns(pattern, data, shards, tmp_path):
    found, local = data.open(f"splits/{pattern}"), open_dataset(shards / "splits" / pattern)
    assert len(found) == len(local) == 40
    assert everything(found) == everything(local)
    url, more = data.url(f"splits/{pattern}"), {"workers": 0, "storage_options": data.options}
    assert shardkit.convert(url, "arrow", tmp_path / "out", **more).samples == 40


def test_a_range_of_names_on_a_web_server(web, shards):
    shutil.copytree(shards / "splits", web.root / "tars")
    found = open_dataset(f"{web.endpoint}/tars/train-{{001..002}}.tar")
    assert [found[n]["__key__"] for n in (0, 19)] == ["train00010", "train00029"]
    with pytest.raises(ShardkitError, match="no such") as caught:
        open_dataset(f"{web.endpoint}/tars/train-{{003..005}}.tar")
    assert "train-004.tar" in str(caught.value)
    for bad in ("{3..1}", "{0..99999999}"):
        with pytest.raises(UsageError, match="the braces in a pattern"):
            open_dataset(f"{web.endpoint}/tars/train-{bad}.tar")


def splits_at(bucket, name):
    with fs.using(bucket.options):
        return dict(open_splits(bucket.url(name)))


def test_splits(data, bucket, tmp_path):
    sizes, given = {"train": 40, "val": 10}, {"storage_options": data.options}
    assert {name: len(split) for name, split in splits_at(data, "splits").items()} == sizes
    made = shardkit.convert(data.url("splits"), "arrow", tmp_path / "out", workers=0, **given)
    assert {name: split.samples for name, split in made.splits.items()} == sizes
    bucket.put(tmp_path / "out", "out/")
    there = splits_at(bucket, "out")
    assert everything(there["val"]) == everything(open_dataset(tmp_path / "out/val"))
    assert shardkit.verify(bucket.out, data.url("splits"), **given).sound


def test_a_subset_of_a_hub_repository(bucket, tmp_path):
    for name in ("de", "en"):
        real.parquet(tmp_path / f"hub/{name}.parquet", name)
    subsets = [{"config_name": n, "data_files": f"{n}.parquet"} for n in ("de", "en")]
    (tmp_path / "hub/README.md").write_text(card(*subsets))
    bucket.put(tmp_path / "hub", "hub/")
    assert bucket.open("hub#en")[0]["text"] == "en"
    assert bucket.convert(bucket.url("hub#en")).samples == 1
    with fs.using(bucket.options):
        assert shardkit.open(bucket.out)[0]["text"] == "en"


def test_what_hugging_face_datasets_saved(bucket, tmp_path):
    import datasets

    made = datasets.Dataset.from_dict({"text": [f"t{n}" for n in range(9)]})
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "many"))
    (tmp_path / "hub/data").mkdir(parents=True)
    for split in ("train", "test"):
        made.to_parquet(str(tmp_path / f"hub/data/{split}-00000-of-00001.parquet"))
    (tmp_path / "hub/README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    bucket.put(tmp_path)
    more = {"workers": 0, "storage_options": bucket.options}
    for name, splits in (("one", [""]), ("many", ["train", "test"]), ("hub", ["train", "test"])):
        there, here = splits_at(bucket, name), open_splits(tmp_path / name)
        assert list(there) == list(here) == splits
        assert all(everything(there[split]) == everything(here[split]) for split in splits)
        shardkit.convert(bucket.url(name), "wds", tmp_path / f"out-{name}", **more)
        assert shardkit.verify(tmp_path / f"out-{name}", tmp_path / name).sound


@pytest.mark.parametrize(
    "batching", [ByLength(4, (20, 60)), Dynamic(400), Pack(64, 4)], ids=lambda b: type(b).__name__
)
def test_batches_by_length_are_those_of_this_machine(batching, bucket, tmp_path):
    schema = Schema({"tokens": Array("<u2", (None,))})
    with shardkit.create(tmp_path / "d", "megatron", schema, shard_samples=60) as out:
        for n in range(200):
            out.write({"__key__": f"k{n}", "tokens": np.arange(n % 97 + 1, dtype="<u2")})
    bucket.put(tmp_path / "d")
    more = {"batching": batching, "shuffle": True, "seed": 3}
    if type(batching) is not Pack:
        more["collate"] = lambda rows: {"tokens": [row["tokens"].tolist() for row in rows]}
    here = Loader(tmp_path / "d", **more)
    there = Loader(bucket.url(), storage_options=bucket.options, **more)
    assert epochs(there, 2) == epochs(here, 2)


@pytest.mark.parametrize("format", few(["lmdb", "wds", "hf"], "lmdb"))
def test_verify_with_the_library_of_a_format(format, bucket, tmp_path):
    with shardkit.create(tmp_path / "d", format, {"x": Bytes()}, shard_samples=10) as out:
        for n in range(30):
            out.write({"__key__": f"k{n}", "x": bytes([n]) * 100})
    bucket.put(tmp_path / "d")
    report = shardkit.verify(bucket.url(), client=True, storage_options=bucket.options)
    assert report.sound, report.problems[0]
    assert all(client.samples == 30 for client in report.clients.values())
    assert report.clients
