"""A folder in a store is listed as a whole, by listings side by side where it has much."""

import itertools
import random
import threading

import pytest

from shardkit.errors import StorageError
from shardkit.storage.remote import clients, listing
from shardkit.storage.remote.client import Entry, Info, PassingError
from shardkit.storage.remote.listing import ListedStore
from shardkit.storage.remote.store import Store
from tests.conftest import few
from tests.remote.proxy import Rule

PAGE = 10  # objects, in these tests


class Keys:
    """A client whose store has these keys; one that ends with a slash is a mark of a folder."""

    lists = True

    def __init__(self, keys, order=None):
        self.keys = sorted(keys, key=order)
        self.pages = self.entries_asked = 0
        self.failing = set()
        self._lock = threading.Lock()

    def below(self, folder, after):
        found = [k.rstrip("/") for k in self.keys if k.startswith(f"{folder}/" if folder else "")]
        found = found[found.index(after) + 1 :] if after else found
        for start in range(0, len(found), PAGE):
            with self._lock:
                self.pages += 1
                number = self.pages
            if number in self.failing:
                raise PassingError(StorageError("again"))
            yield [(key, Info(len(key), tag=key)) for key in found[start : start + PAGE]]

    def entries(self, folder):
        with self._lock:
            self.entries_asked += 1
        start, found = f"{folder}/" if folder else "", {}
        for key in self.keys:
            if key.startswith(start) and key != start:
                name, slash, _ = key[len(start) :].partition("/")
                found[name, slash] = Entry(name, None if slash else Info(len(key), tag=key))
        return list(found.values())

    def find(self, key):
        return None


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(listing, "FULL_PAGE", PAGE)


def listed(client, monkeypatch):
    """All that a walk from the folder `in` meets."""
    monkeypatch.setattr(Store, "client", lambda self, past_caches=False: client)
    store, found = ListedStore(Store("s3://b"), "in"), {}
    pending = ["in"]
    while pending:
        folder = pending.pop()
        names = store.entries(folder)
        assert [n for n, info in names if info] == sorted(n for n, info in names if info)
        assert [n for n, info in names if not info] == sorted(n for n, info in names if not info)
        found |= {f"{folder}/{name}": info for name, info in names if info is not None}
        pending += [f"{folder}/{name}" for name, info in names if info is None]
    return found


def tree(dice):
    """Keys of folders of all sizes in each other, with files beside them, and odd names."""
    keys = set()

    def fill(folder, depth):
        for n in range(dice.choice([0, 1, 3, 25])):
            keys.add(f"{folder}{dice.choice(['', '-', 'z', '!'])}{n:02d}.jpg")
        for n in range(dice.choice([0, 1, 2, 12]) if depth else 0):
            fill(f"{folder}{dice.choice(['a', 'b-', 'b', 'ü', '~'])}{n}/", depth - 1)

    fill("in/", 3)
    return [*keys, "in/last.txt"]


@pytest.mark.parametrize("seed", few([*range(40)], *range(1, 10)))
def test_it_is_what_one_listing_gives(seed, monkeypatch):
    dice = random.Random(seed)
    keys = tree(dice)
    marks = dice.sample([key.rpartition("/")[0] + "/" for key in keys], len(keys) // 9)
    order = (lambda key: key.replace("/", "\0")) if seed % 5 == 4 else None  # as some stores have
    client = Keys([*{*keys, *marks}], order)
    client.failing = {*dice.sample(range(1, 20), 4)}
    found = listed(client, monkeypatch)
    files = {key: info for key, info in found.items() if f"{key}/" not in marks}
    assert files == {key: Info(len(key), tag=key) for key in keys}
    assert found.keys() <= {key.rstrip("/") for key in client.keys}


def test_small_and_flat_folders_take_one_listing_more_at_most(monkeypatch):
    for keys, most in (
        ([f"in/{n}.jpg" for n in range(9)], 2),
        ([f"in/{n}/x.jpg" for n in range(9)], 2),
        ([f"in/{n:03d}/x.jpg" for n in range(200)], 21),
        # Of `in`, once more, and of nothing else.
        ([f"in/sub/{n:03d}.jpg" for n in range(200)], 23),
    ):
        client = Keys(keys)
        assert listed(client, monkeypatch).keys() == {*keys}
        assert client.pages + client.entries_asked <= most


def test_large_folders_behind_small_files_are_listed_by_themselves(monkeypatch):
    keys = [f"in/{n:02d}.txt" for n in range(15)]
    keys += [f"in/c{n % 3}/{n}.jpg" for n in range(600)]
    client = Keys(keys)
    assert listed(client, monkeypatch).keys() == {*keys}
    assert client.entries_asked == 2


class Endless(Keys):
    def below(self, folder, after):
        for number in itertools.count():
            yield [(f"in/{number}.jpg", Info(1))]


def test_a_listing_ends_when_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr(Store, "client", lambda self, past_caches=False: Endless([]))
    pages = listing._side_by_side(Store("s3://b"), "in")
    assert next(pages)[0][0] == "in/0.jpg"
    pages.close()  # the limit of a test ends what would never end


def test_folders_of_many_objects_are_listed_side_by_side(own, monkeypatch):
    monkeypatch.setattr(clients, "FULL_PAGE", PAGE)
    own.put({f"in/c{n % 12:02}/{n}.txt": b"x" for n in range(240)})
    own.proxy.add(Rule(match=r"prefix=in/c\d", gather=8, times=8))
    root = own.path("in").listed()
    below = [e for folder in root.scandir() for e in (root / folder.name).scandir()]
    assert len(below) == 240
    assert own.proxy.count(match=r"prefix=in/c\d").requests >= 8
