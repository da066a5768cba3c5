"""A walk has one order, whatever is listed ahead; listings that wait are made side by side."""

import contextlib
import threading
from pathlib import Path

from shardkit.storage import walk
from shardkit.storage.walk import Walk, look


def make_tree(root, names, depth):
    root.mkdir()
    for number in range(3):
        (root / f"{number}.txt").write_bytes(b"x" * number)
    (root / ".hidden").touch()
    for name in names if depth else ():
        make_tree(root / name, names, depth - 1)


def found(root):
    walked = Walk(root, None, lambda name: name.endswith("txt"))
    listings = [
        (folder.relative, sorted((e.name, look(e)[0]) for e in files), {b.relative for b in below})
        for folder, files, below in walked
    ]
    return listings, dict(walked.ignored), [p.what for p in walked.problems], len(walked.notes)


def test_folders_come_in_the_same_order_when_they_are_listed_ahead(tmp_path, monkeypatch):
    make_tree(tmp_path / "root", ["b", "a b", "a", "a.b"], 2)
    (tmp_path / "root" / "a" / "loop").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "b" / "out").symlink_to(tmp_path)
    monkeypatch.setattr(walk, "_WAITING", 1e9)
    one_by_one = found(tmp_path / "root")
    folders = [listing[0] for listing in one_by_one[0]]
    assert folders == sorted(folders, key=lambda folder: (folder.partition("/")[0], folder))
    monkeypatch.setattr(walk, "_WAITING", -1e9)  # every listing seems to wait
    monkeypatch.setattr(walk, "_FEW", 1)
    monkeypatch.setattr(walk, "_TOGETHER", 1)
    for most in (1, 4, 32):
        monkeypatch.setattr(walk, "_THREADS", most)
        assert found(tmp_path / "root") == one_by_one


def test_listings_that_wait_are_made_side_by_side(tmp_path, monkeypatch):
    make_tree(tmp_path / "root", [f"{n:03d}" for n in range(40)], 1)
    monkeypatch.setattr(walk, "_WAITING", -1e9)
    monkeypatch.setattr(walk, "_THREADS", 8)
    under_way, most, original = set[Path](), 0, walk.scandir
    enough = threading.Event()

    @contextlib.contextmanager
    def counted(path):
        nonlocal most
        under_way.add(path)
        most = max(most, len(under_way))
        if most >= 8:
            enough.set()
        if int(path.name if path.name.isdecimal() else 0) >= 20:  # once there are enough listings
            assert enough.wait(60)
        with original(path) as entries:
            yield entries
        under_way.remove(path)

    monkeypatch.setattr(walk, "scandir", counted)
    assert len(found(tmp_path / "root")[0]) == 41
    assert most >= 8


def test_files_of_one_folder_are_looked_at_side_by_side(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    for number in range(1000):
        (root / f"{number}.txt").touch()
    monkeypatch.setattr(walk, "_WAITING", -1e9)
    original, together, first = walk._look_at, threading.Barrier(4), iter(range(1, 5))

    def looked(entries):
        if threading.current_thread() is not threading.main_thread() and next(first, None):
            together.wait(60)
        original(entries)

    monkeypatch.setattr(walk, "_look_at", looked)
    ((_, files, _),) = found(root)[0]
    assert len(files) == 1000
    assert next(first, None) is None
