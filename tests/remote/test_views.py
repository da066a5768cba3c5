"""Views and concatenations of datasets in a store: as on this machine, with the bytes they need."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.dataset import Dataset
from shardkit.errors import ShardkitWarning
from shardkit.page_cache import PAGE
from shardkit.pages import file_id
from shardkit.schema import Bytes, Int
from shardkit.stream.loader import Loader
from shardkit.stream.read_ahead import NextUse
from tests.remote.buckets import Bucket
from tests.remote.servers import Google

SAMPLES, SIZE = 400, 40_000  # 16 MB
CHOSEN = np.random.default_rng(2).permutation(SAMPLES)[:150]
VIEWS: dict[str, Callable[[Dataset], Dataset]] = {
    "slice": lambda ds: ds[90:290],
    "backwards": lambda ds: ds[::-3],
    "chosen": lambda ds: ds.select(CHOSEN),
    "where": lambda ds: ds.filter("label in (3, 5)"),
    "twice": lambda ds: shardkit.concatenate([ds[:50], ds[30:80]]),
    "beside a folder": lambda ds: shardkit.concatenate([ds[100:160], _local[0][:40]]),
}
_local: list[Dataset] = []  # of this machine
pytestmark = pytest.mark.filterwarnings("ignore:the cache holds:shardkit.ShardkitWarning")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("views"), np.random.default_rng(5)
    schema = {"x": Bytes(), "label": Int()}
    with shardkit.create(root / "d", "wds", schema=schema, shard_size="3MB") as out:
        for n in range(SAMPLES):
            out.write({"__key__": f"k{n}", "x": rng.bytes(SIZE), "label": n % 7})
    _local[:] = [shardkit.open(root / "d")]
    return root / "d"


@pytest.fixture(scope="module")
def data(google: Google, here: Path) -> Bucket:
    return Bucket(google, here)


@pytest.fixture
def there(seen: Bucket) -> Dataset:
    return seen.open()


def loader(source: Any, **options: Any) -> Loader:
    return Loader(source, batch_size=16, seed=7, **options)


def downloaded(seen: Bucket, made: Loader) -> int:
    """Bytes of shards in an epoch."""
    seen.proxy.clear()
    list(made)
    return seen.proxy.count("GET", "tar").sent


@pytest.mark.parametrize(
    ("name", "shuffle"),
    [
        ("chosen", True),
        ("twice", False),
        ("beside a folder", True),
        *(
            pytest.param(name, shuffle, marks=pytest.mark.large)
            for name, shuffle in (
                ("slice", True), ("backwards", False), ("backwards", True), ("where", True),
                ("twice", True), ("chosen", False),
            )
        ),
    ],
)  # fmt: skip
def test_the_batches_are_those_of_this_machine(
    there: Dataset, here: Path, name: str, shuffle: bool
) -> None:
    local, remote = VIEWS[name](shardkit.open(here)), VIEWS[name](there)
    assert remote.keys() == local.keys()
    expected = loader(local, shuffle=shuffle)
    found = loader(remote, shuffle=shuffle, cache_limit=6 * PAGE)
    for _ in range(2):
        assert pickle.dumps(list(found)) == pickle.dumps(list(expected))


def test_a_view_downloads_its_pages_alone(there: Dataset, seen: Bucket) -> None:
    made = loader(there[90:290], shuffle=True)
    assert downloaded(seen, made) <= 200 * 42_000 + 2 * PAGE
    assert downloaded(seen, made) == 0


def test_a_small_cache_keeps_what_the_view_needs_next(there: Dataset, seen: Bucket) -> None:
    """Half of the pages stay; with the oldest removed first, a whole epoch is downloaded anew."""
    view = there[50:350]
    size = len(view) * 42_000
    made = loader(view, shuffle=True, cache_limit=size // 2)
    downloaded(seen, made)
    assert downloaded(seen, made) <= 0.7 * size


def test_the_next_use_of_a_page_is_that_of_its_samples_in_the_view(there: Dataset) -> None:
    """No later than that of any of them; never, where there are none, nor within half a page."""
    view = there[5::30]
    stream: Any = Loader(view, batch_size=2, shuffle=True, window=2).dataset.stream
    order, [dataset] = stream.order, stream.datasets
    uses, every = NextUse(order, stream.datasets), np.arange(len(view))
    uses.at(0, 0, None)
    window = np.empty(len(view))  # in which each sample of the view comes
    window[order.draw(0, every).number] = every // order.window
    numbers, later = dataset.stored(every), 0
    for shard in range(dataset.shards):
        path, (samples, _) = dataset.shard_path(shard), dataset.extent(shard)
        info, start = path.store.info(path.key), dataset.start(shard)
        own = (numbers >= start) & (numbers < start + samples)
        for page in range(-(-info.size // PAGE)):
            first, last = start + np.array([page, page + 1]) * PAGE * samples / info.size
            half = 0.6 * (last - first) + 1
            inside = window[own & (numbers >= first) & (numbers < last)]
            near = window[own & (numbers >= first - half) & (numbers < last + half)]
            found = uses(file_id(path, info), page)
            assert near.size or found == np.inf
            if inside.size:
                assert found <= inside.min()
                later += found > 0
    assert later


def test_a_filter_requests_each_page_once(there: Dataset, here: Path, seen: Bucket) -> None:
    seen.proxy.clear()
    view = there.filter(lambda sample: sample["x"][0] < 100)
    size = sum(file.stat().st_size for file in here.rglob("*.tar"))
    assert seen.proxy.count("GET", "tar").sent <= size
    assert view.keys() == shardkit.open(here).filter(lambda s: s["x"][0] < 100).keys()
    with pytest.raises(ZeroDivisionError):
        there.filter(lambda sample: 1 // 0)


def test_large_downloads_of_small_fields_are_warned_of(
    there: Dataset, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.views._LARGE", 8_000_000)
    for read, what in (
        (lambda ds: ds.keys(), "keys of 400"),
        (lambda ds: ds.column("label"), "values of 'label' of 400"),
        (lambda ds: ds["k12"], "keys of 400"),
        (lambda ds: ds.filter("label == 3"), "values of 'label' of 400"),
    ):
        with pytest.warns(ShardkitWarning, match=f"the {what} samples.* about 0.0 GB") as told:
            read(there)
        assert [warning.filename for warning in told] == [__file__]
        read(there[:100])
        read(shardkit.open(here))


def test_views_are_converted_from_a_store(there: Dataset, here: Path, tmp_path: Path) -> None:
    view, same = (each.select(CHOSEN[:40]) for each in (there, shardkit.open(here)))
    shardkit.convert(view, "arrow", tmp_path / "out", workers=0)
    assert [*shardkit.open(tmp_path / "out")] == [*same]
    assert shardkit.verify(tmp_path / "out", view).sound
