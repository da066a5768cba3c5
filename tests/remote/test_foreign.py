"""What others wrote, at URLs: TARs, which are searched once; patterns, splits, folders."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit import storage
from shardkit.errors import ShardkitError, ShardkitWarning, UsageError
from shardkit.formats.wds import kept
from shardkit.opening import open_dataset, open_splits
from shardkit.page_cache import PAGE
from shardkit.schema import Array, Bytes, Schema
from shardkit.stream.batching import Bucket, Dynamic, Pack
from shardkit.stream.loader import Loader
from tests.remote.conftest import Through
from tests.remote.proxy import Proxy
from tests.remote.servers import Google, Nginx
from tests.remote.test_reading import upload
from tests.remote.test_streaming import epochs, loader


def tar(path: Path, samples: int, size: int) -> Path:
    """A TAR that is not ours, in a folder."""
    dice = random.Random(samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    with shardkit.create(path.parent / "made", "wds", {"x": Bytes()}, shard_size="1GB") as out:
        for n in range(samples):
            out.write({"__key__": f"k{n:05}", "x": dice.randbytes(size)})
    shutil.move(path.parent / "made/shard-000000.tar", path)
    shutil.rmtree(path.parent / "made")
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two TARs: 5 MB of small samples, 8 MB of three large ones."""
    root = tmp_path_factory.mktemp("shards")
    tar(root / "small-000.tar", 500, 10_000)
    tar(root / "large-000.tar", 3, 2_700_000)
    return root


@pytest.fixture(scope="module")
def bucket(google: Google, shards: Path) -> str:
    return upload(google, shards)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(url: str, options: dict[str, Any]) -> shardkit.Dataset:
    with storage.using(options):
        return open_dataset(url)


def everything(dataset: shardkit.Dataset) -> bytes:
    return pickle.dumps([dataset[n] for n in range(len(dataset))])


# --- a TAR without an index ----------------------------------------------------------------------


def test_a_tar_is_searched_by_few_requests(
    google: Google, bucket: str, shards: Path, through: Through
) -> None:
    proxy = through(google)
    size = (shards / "small-000.tar").stat().st_size
    found = opened(google.url(bucket, "small-000.tar"), google.options(proxy.endpoint))
    count = proxy.count("GET", r"\.tar$")
    assert len(found) == 500
    assert count.requests <= size / PAGE + 6
    assert count.sent <= size + 4 * PAGE
    proxy.clear()
    found = opened(google.url(bucket, "large-000.tar"), google.options(proxy.endpoint))
    assert len(found) == 3
    # The first page, which tells how it is compressed; of the rest no payload.
    assert proxy.count("GET", r"\.tar$").sent <= PAGE + 6 * (1 << 16)
    assert everything(found) == everything(open_dataset(shards / "large-000.tar"))


def test_a_tar_is_searched_once(
    google: Google, bucket: str, shards: Path, through: Through, cache: Path
) -> None:
    proxy, url = through(google), google.url(bucket, "small-000.tar")
    opened(url, google.options(proxy.endpoint))
    assert {path.name.partition("-")[0][:6] for path in cache.glob("*.page")} == {"layout"}
    proxy.clear()
    found = opened(url, google.options(proxy.endpoint))
    assert proxy.count("GET", r"\.tar$").requests <= 2  # what it is, and how it is compressed
    assert everything(found) == everything(open_dataset(shards / "small-000.tar"))


def test_a_layout_of_several_pages(
    google: Google, bucket: str, shards: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "PAGE", 1000)
    url = google.url(bucket, "small-000.tar")
    opened(url, google.options())
    assert len([*cache.glob("layout*.page")]) > 5
    here = everything(open_dataset(shards / "small-000.tar"))
    monkeypatch.setattr(kept, "scan", None)  # must not be called
    assert everything(opened(url, google.options())) == here


def _cut(page: Path) -> None:
    page.write_bytes(page.read_bytes()[:-5])


def _flipped(page: Path) -> None:
    data = bytearray(page.read_bytes())
    data[len(data) // 2] ^= 1
    page.write_bytes(data)


def _forged(page: Path) -> None:
    """The checksum fits, and what it is of is no layout."""
    import xxhash

    data = page.read_bytes()[8:].replace(b'"samples": 500', b'"samples": 400')
    page.write_bytes(xxhash.xxh3_64_digest(data) + data)


def _nonsense(page: Path) -> None:
    import xxhash

    page.write_bytes(xxhash.xxh3_64_digest(b"[1]\n") + b"[1]\n")


@pytest.mark.parametrize("damage", [_cut, _flipped, _forged, _nonsense, Path.unlink])
def test_a_damaged_layout_is_made_again(
    damage: Any, google: Google, bucket: str, shards: Path, cache: Path
) -> None:
    url = google.url(bucket, "small-000.tar")
    opened(url, google.options())
    (page,) = cache.glob("layout*.page")
    whole = page.read_bytes()
    damage(page)
    found = opened(url, google.options())
    assert everything(found) == everything(open_dataset(shards / "small-000.tar"))
    if damage not in (_forged, _nonsense):  # which nothing removes, as their checksums hold
        assert page.read_bytes() == whole


def test_a_tar_that_was_replaced_is_searched_again(
    google: Google, shards: Path, cache: Path, tmp_path: Path
) -> None:
    bucket = upload(google, shards)
    url = google.url(bucket, "small-000.tar")
    assert opened(url, google.options())[3]["__key__"] == "k00003"
    other = tar(tmp_path / "other/small-000.tar", 501, 10_000)
    google.open(bucket).put("small-000.tar", other.read_bytes())
    found = opened(url, google.options())
    assert len(found) == 501
    assert everything(found) == everything(open_dataset(other))


def test_what_a_tar_warns_of_is_said_each_time(google: Google, shards: Path, cache: Path) -> None:
    cut = (shards / "large-000.tar").read_bytes().rstrip(b"\0")
    cut += bytes(-len(cut) % 512)
    bucket = google.bucket()
    google.open(bucket).put("a.tar", cut)
    for _ in range(2):
        with pytest.warns(ShardkitWarning, match="without the zero blocks"):
            assert len(opened(google.url(bucket, "a.tar"), google.options())) == 3


def test_a_loader_searches_and_reads_the_same_pages(
    google: Google, bucket: str, shards: Path, through: Through, tmp_path: Path
) -> None:
    """The search fills the cache, and a second Loader neither searches nor downloads."""
    proxy, url = through(google), google.url(bucket, "small-*.tar")
    size = (shards / "small-000.tar").stat().st_size
    here = epochs(loader(shards / "small-000.tar", {}), 1)
    for most in (1.02 * size + (1 << 16), 0):
        proxy.clear()
        there = loader(url, google.options(proxy.endpoint), cache=tmp_path / "cache")
        assert epochs(there, 1) == here
        assert proxy.count("GET", r"\.tar$").sent <= most
    assert len([*(tmp_path / "cache").glob("layout*.page")]) == 1


@pytest.mark.filterwarnings("ignore:the cache holds")
def test_a_layout_stays_while_a_small_cache_is_full(
    google: Google, bucket: str, tmp_path: Path
) -> None:
    made = loader(
        google.url(bucket, "small-*.tar"), google.options(), cache=tmp_path, cache_limit=3 * PAGE
    )
    epochs(made, 2)
    assert len([*tmp_path.glob("layout*.page")]) == 1
    pages = sum(path.stat().st_size for path in tmp_path.glob("*.page"))
    assert pages <= 3 * PAGE


def test_a_cache_that_is_smaller_than_a_batch(
    google: Google, bucket: str, shards: Path, tmp_path: Path
) -> None:
    """It holds a page, and a batch has values of eight: what has no room is read alone."""
    url = google.url(bucket, "large-*.tar")
    made = Loader(url, batch_size=3, storage_options=google.options(), cache_limit=PAGE)
    assert epochs(made, 2) == epochs(Loader(shards / "large-000.tar", batch_size=3), 2)
    with pytest.raises(UsageError, match="too small for a page"):
        Loader(url, batch_size=3, storage_options=google.options(), cache_limit=PAGE - 1)


def test_a_cache_folder_that_cannot_be_used(
    google: Google, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cache folder"):
        opened(google.url(bucket, "small-000.tar"), google.options())


# --- names ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train-000.tar to train-003.tar and val-000.tar, without a manifest."""
    root = tmp_path_factory.mktemp("tars")
    for name, count in (("train", 40), ("val", 10)):
        made = root / "made"
        with shardkit.create(made, "wds", {"x": Bytes()}, shard_samples=10) as out:
            for n in range(count):
                out.write({"__key__": f"{name}{n:03}", "x": bytes([n]) * 100})
        for n, path in enumerate(sorted(made.glob("*.tar"))):
            path.rename(root / f"{name}-{n:03}.tar")
        shutil.rmtree(made)
    return root


@pytest.mark.parametrize("pattern", ["train-*.tar", "train-{000..003}.tar", "train-00[0-3].tar"])
def test_patterns(pattern: str, google: Google, tars: Path, tmp_path: Path) -> None:
    url = google.url(upload(google, tars), pattern)
    found, local = opened(url, google.options()), open_dataset(tars / pattern)
    assert len(found) == len(local) == 40
    assert everything(found) == everything(local)
    made = shardkit.convert(url, "arrow", tmp_path / "out", storage_options=google.options())
    assert made.samples == 40


def test_a_range_of_names_on_a_web_server(web: Nginx, tars: Path) -> None:
    shutil.copytree(tars, web.root / "tars")
    found = open_dataset(f"{web.endpoint}/tars/train-{{001..002}}.tar")
    assert [found[n]["__key__"] for n in (0, 19)] == ["train010", "train029"]
    with pytest.raises(ShardkitError, match="no such") as caught:
        open_dataset(f"{web.endpoint}/tars/train-{{003..005}}.tar")
    assert "train-004.tar" in str(caught.value)
    for bad in ("{3..1}", "{0..99999999}"):
        with pytest.raises(UsageError, match="the braces in a pattern"):
            open_dataset(f"{web.endpoint}/tars/train-{bad}.tar")


def test_splits(google: Google, tars: Path, tmp_path: Path) -> None:
    url = google.url(upload(google, tars))
    with storage.using(google.options()):
        assert {name: len(split) for name, split in open_splits(url).items()} == {
            "train": 40,
            "val": 10,
        }
    made = shardkit.convert(url, "arrow", tmp_path / "out", storage_options=google.options())
    assert {name: split.samples for name, split in made.splits.items()} == {"train": 40, "val": 10}
    url = google.url(upload(google, tmp_path), "out")
    with storage.using(google.options()):
        found = open_splits(url)
    assert everything(found["val"]) == everything(open_dataset(tmp_path / "out/val"))
    assert shardkit.verify(
        url, google.url(upload(google, tars)), storage_options=google.options()
    ).sound


def test_what_hugging_face_datasets_saved(google: Google, tmp_path: Path) -> None:
    import datasets

    made = datasets.Dataset.from_dict({"text": [f"t{n}" for n in range(9)]})
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "many"))
    (tmp_path / "hub/data").mkdir(parents=True)
    for split in ("train", "test"):
        made.to_parquet(str(tmp_path / f"hub/data/{split}-00000-of-00001.parquet"))
    (tmp_path / "hub/README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    bucket = upload(google, tmp_path)
    for name, splits in (("one", [""]), ("many", ["train", "test"]), ("hub", ["train", "test"])):
        with storage.using(google.options()):
            there = open_splits(google.url(bucket, name))
        here = open_splits(tmp_path / name)
        assert list(there) == list(here) == splits
        assert all(everything(there[split]) == everything(here[split]) for split in splits)
        shardkit.convert(
            google.url(bucket, name),
            "wds",
            tmp_path / f"out-{name}",
            storage_options=google.options(),
        )
        assert shardkit.verify(tmp_path / f"out-{name}", tmp_path / name).sound


# --- batches by length ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batching", [Bucket(4, (20, 60)), Dynamic(400), Pack(64, 4)], ids=lambda b: type(b).__name__
)
def test_batches_by_length_are_those_of_this_machine(
    batching: Any, google: Google, tmp_path: Path
) -> None:
    schema = Schema({"tokens": Array("<u2", (None,))})
    with shardkit.create(tmp_path / "d", "megatron", schema, shard_samples=60) as out:
        for n in range(200):
            out.write({"__key__": f"k{n}", "tokens": np.arange(n % 97 + 1, dtype="<u2")})
    url = google.url(upload(google, tmp_path), "d")
    more: dict[str, Any] = {"batching": batching, "shuffle": True, "seed": 3}
    if type(batching) is not Pack:
        more["collate"] = list
    here = Loader(tmp_path / "d", **more)
    there = Loader(url, storage_options=google.options(), **more)
    assert epochs(there, 2) == epochs(here, 2)


# --- the formats' own libraries ------------------------------------------------------------------


@pytest.mark.parametrize(
    "format",
    [
        "lmdb",
        *(pytest.param(n, marks=pytest.mark.large) for n in ("wds", "hf")),
    ],
)
def test_verify_with_the_library_of_a_format(
    format: str, google: Google, through: Through, tmp_path: Path
) -> None:
    with shardkit.create(tmp_path / "d", format, {"x": Bytes()}, shard_samples=10) as out:
        for n in range(30):
            out.write({"__key__": f"k{n}", "x": bytes([n]) * 100})
    proxy: Proxy = through(google)
    url = google.url(upload(google, tmp_path), "d")
    report = shardkit.verify(url, client=True, storage_options=google.options(proxy.endpoint))
    assert report.sound, report.problems[0]
    assert all(client.samples == 30 for client in report.clients.values())
    assert report.clients
