"""The cache of pages: what goes, the limit, and processes that share a folder and die."""

import contextlib
import errno
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import threading
from collections import namedtuple
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import NotFoundError, StorageError, UsageError
from shardkit.formats.testing_samples import in_fork
from shardkit.storage import fs, page_cache
from shardkit.storage.page_cache import PAGE, FolderCache, MemoryCache, cache_from
from tests.conftest import files_of
from tests.conversion.deaths import Died, Dying
from tests.remote.pages import FULL_PAGE, fail_in_the_middle, never, page

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
MARK, LOCK, CLAIMS = "shardkit-cache.json", "shardkit-cache.lock", "shardkit-cache.claims"


def blocks(size):
    """Bytes that a file takes of the disk."""
    return max(math.ceil(size / 4096), 1) * 4096


def on_disk(folder):
    """Bytes of the disk that pages take, and one that is being written."""
    files = [entry for entry in os.scandir(folder) if entry.name.endswith((".page", ".tmp"))]
    return sum(blocks(entry.stat().st_size) for entry in files)


def counted(folder):
    return int.from_bytes((folder / LOCK).read_bytes(), "little", signed=True)


def check(folder, ours=True):
    """A folder that nobody uses: nothing is left over, the count is right, all pages are whole."""
    cache = FolderCache(folder)
    names = {path.name for path in folder.iterdir()} - {MARK, LOCK, CLAIMS}
    assert all(name.endswith(".page") for name in names), names
    assert counted(folder) == on_disk(folder)
    for name in names:
        file, number = name.removesuffix(".page").split("-")
        data = cache.get(file, int(number))  # its checksum was compared
        assert data is not None, name
        assert not ours or data == page(file, int(number), len(data))


def started(work):
    """Starts a process that works, and is to be killed meanwhile or kills itself."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    return child


def killed(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.fixture(params=["folder", "memory"])
def make(request, tmp_path):
    """Makes a cache that has room for so many whole pages."""

    def made(pages=4):
        if request.param == "memory":
            return MemoryCache(pages * PAGE)
        return FolderCache(tmp_path / "cache", pages * FULL_PAGE)

    return made


def test_slices_end_with_their_page(make):
    cache = make()
    assert cache.put("a", 1, b"the last", never)
    assert cache.put("b", 1, b"", never)
    for _ in range(2):  # the checksum is compared the first time
        assert cache.get("a", 1, 4, 8) == cache.get("a", 1, 4, 100) == b"last"
        assert cache.get("a", 1, 5, 5) == cache.get("b", 1) == b""


def resident(cache, file="a"):
    return {number for number in range(300) if cache.resident(file, number)}


def test_of_pages_needed_at_one_time_the_oldest_goes(make, tmp_path):
    cache, put = make(3), [7, 2, 9, 1, 0, 8]
    for time, number in enumerate(put):
        left = set(put[max(0, time - 2) : time + 1])
        if time > 2:
            assert not cache.put("a", number, page("a", number), never)
        assert cache.put("a", number, page("a", number), never, keep=0)
        for path in tmp_path.glob(f"cache/a-{number}.page"):  # clocks of file systems are coarse
            os.utime(path, (time, time))
        assert resident(cache) == left


@pytest.mark.parametrize("kind", ["folder", "memory"])
@given(data=st.data())
def test_it_does_as_a_model_does(kind, data):
    """The model removes the page that is needed last, one by one, while that is needed later than
    the new one."""
    with tempfile.TemporaryDirectory() as folder:
        limit = data.draw(st.integers(FULL_PAGE, 3 * FULL_PAGE))
        cache = FolderCache(folder, limit) if kind == "folder" else MemoryCache(limit)
        model = {}  # page -> bytes
        names = [(file, number) for file in "ab" for number in range(6)]
        when = dict(zip(data.draw(st.permutations(names)), map(float, range(12)), strict=True))

        def next_use(file, number):
            return when[file, number]

        for _ in range(data.draw(st.integers(1, 15))):
            name = data.draw(st.sampled_from(names))
            size = 100_000 * (name[1] + 1) + 300_000 * (name[0] == "b")
            match data.draw(st.sampled_from(["put", "put", "get", "used", "again"])):
                case "put":
                    keep = data.draw(st.sampled_from([None, 0.0, 4.0, 8.0, math.inf]))
                    least = when[name] if keep is None else keep
                    occupied = blocks(8 + size) if kind == "folder" else size
                    expected = name in model
                    if not expected:
                        while sum(model.values()) + occupied > limit:
                            last = max(model, key=lambda page: when[page], default=None)
                            if last is None or when[last] <= least:
                                break
                            del model[last]
                        else:
                            expected = True
                            model[name] = occupied
                    assert cache.put(*name, page(*name, size), next_use, keep) is expected
                case "get":
                    start = data.draw(st.integers(0, size))
                    stop = data.draw(st.one_of(st.none(), st.integers(start, size)))
                    found = page(*name, size)[start:stop] if name in model else None
                    assert cache.get(*name, start, stop) == found
                case "used":
                    when[name] = max(when.values()) + 1
                case "again" if kind == "folder":
                    cache = FolderCache(folder, limit)
            assert {name for name in when if cache.resident(*name)} == set(model)
            if kind == "folder":
                assert on_disk(Path(folder)) == sum(model.values())


def test_an_epoch_downloads_what_no_cache_could_have(make):
    """Random orders of 300 pages, half of which have room: half of them are misses. With the least
    recently used going, 85 % are."""
    count, epochs = 300, 3
    orders = [random.Random(epoch).sample(range(count), count) for epoch in range(epochs + 1)]
    uses = {number: [] for number in range(count)}
    for position, number in enumerate(number for order in orders for number in order):
        uses[number].append(position)
    calls = 0

    def next_use(file, number):
        nonlocal calls
        calls += 1
        return next((use for use in uses[number] if use > now), math.inf)

    cache = make(1)
    size = 4000 if isinstance(cache, MemoryCache) else 4096
    now, misses = 0, [0] * epochs
    cache.limit = max(count // 2 * size, FULL_PAGE)  # at least a page: a bit more than the half
    room = cache.limit // size
    for epoch in range(epochs):
        for number in orders[epoch]:
            if cache.get("a", number) is None:
                misses[epoch] += 1
                cache.put("a", number, page("a", number, 4000), next_use)
            now += 1
    assert misses[0] == count
    assert all(found < 1.05 * (count - room) for found in misses[1:]), misses
    assert calls < 60 * sum(misses)


def test_pickled_it_is_the_same_folder_or_empty_memory(make):
    cache = make(5)
    cache.put("a", 0, page("a", 0), never)
    copy = pickle.loads(pickle.dumps(cache))
    assert copy.limit == cache.limit
    assert resident(copy) == ({0} if isinstance(cache, FolderCache) else set())
    assert copy.put("a", 0, page("a", 0), never)
    assert copy.put("a", 1, page("a", 1), never)
    assert copy.get("a", 0) == page("a", 0)


def test_a_damaged_page_is_a_miss_and_goes(tmp_path):
    FolderCache(tmp_path).put("a", 0, page("a", 0), never)
    path = tmp_path / "a-0.page"
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, 500_000)]
    for damaged in (*flipped, data[:-1], data + b"x", b""):
        for span in ((), (10, 20)):
            path.write_bytes(damaged)
            cache = FolderCache(tmp_path)
            assert cache.get("a", 0, *span) is None
            assert not path.exists()
            assert cache.put("a", 0, page("a", 0), never)
            check(tmp_path)
    os.truncate(path, 1000)  # after it was checked
    assert cache.get("a", 0, 2000, 3000) is None
    assert not cache.resident("a", 0)


@pytest.mark.parametrize("checked", [False, True])
def test_a_page_that_takes_the_place_of_another_is_a_miss(tmp_path, checked):
    cache, pages = FolderCache(tmp_path), [page("a", 0), page("a", 1)]
    for number, data in enumerate(pages):
        assert cache.put("a", number, data, never)
        assert cache.get("a", number, 5, 9) == data[5:9]
    if not checked:
        cache = FolderCache(tmp_path)
    one, other = tmp_path / "a-0.page", tmp_path / "a-1.page"
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    for number, data in enumerate(pages):
        assert cache.get("a", number, 5, 9) is None
        assert cache.put("a", number, data, never)
    with one.open("r+b") as file:  # overwritten in place
        file.write(bytes(1000))
    os.utime(one, (1e9, 1e9))
    assert cache.get("a", 0, 500, 600) is None
    check(tmp_path)


def test_two_jobs_share_a_folder(tmp_path):
    """What the other job knows nothing of goes first, and its smaller limit holds."""
    one, two = FolderCache(tmp_path, 6 * FULL_PAGE), FolderCache(tmp_path, 3 * FULL_PAGE)
    for number in range(6):
        assert one.put("a", number, page("a", number), lambda _, number: number)
    assert two.get("a", 5) == page("a", 5)

    def next_use(file, number):
        return number if file == "b" else math.inf

    assert two.put("b", 0, page("b", 0), next_use)
    assert on_disk(tmp_path) == 3 * FULL_PAGE
    assert one.get("b", 0) == page("b", 0)
    check(tmp_path)


def test_other_files_are_not_touched(tmp_path):
    outside, cache = tmp_path / "outside", FolderCache(tmp_path / "cache", 2 * FULL_PAGE)
    outside.mkdir()
    (outside / "precious").write_bytes(page("a", 9, 50_000))
    files = {"folder/a-0.page": b"no page", "notes-1.page.txt": b"notes", "é-1.page": b"text"}
    (cache.folder / "folder").mkdir()
    for name, data in files.items():
        (cache.folder / name).write_bytes(data)
    (cache.folder / "a-7.page").mkdir()
    (cache.folder / "a-8.page").symlink_to(outside / "precious")
    (cache.folder / "a-9.page").symlink_to(outside / "missing")
    for number in range(10):
        stored = cache.put("a", number, page("a", number), lambda _, number: -number, keep=-100)
        assert stored is (number < 7)
        assert cache.get("a", number) == (page("a", number) if stored else None)
    assert files_of(outside) == {"precious": page("a", 9, 50_000)}
    assert files.items() <= files_of(cache.folder).items()
    assert all((cache.folder / f"a-{number}.page").is_symlink() for number in (8, 9))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a-0.page": b"mine"}, "not empty, and is not a shardkit cache"),
        *(
            ({MARK: mark, "shardkit-cache.tmp": b"other"}, "another version .* or is damaged")
            for mark in (b'{"version": 2}', b"", b"{", b"[]")
        ),
    ],
)
def test_a_folder_that_is_not_of_this_cache_is_refused(tmp_path, files, words):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=words):
        FolderCache(tmp_path)
    assert files_of(tmp_path) == files


def test_links_in_place_of_the_files_of_the_cache_are_refused(tmp_path):
    target, text = tmp_path / "target", json.dumps({"version": 1})
    target.write_text(text)
    for name in (MARK, LOCK):
        (tmp_path / f"of {name}").mkdir()
        (tmp_path / f"of {name}" / name).symlink_to(target)
        with pytest.raises(UsageError):
            FolderCache(tmp_path / f"of {name}")
        assert target.read_text() == text


def test_a_folder_that_cannot_be_written_or_locked_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(UsageError, match="the cache folder cannot be used") as error:
            FolderCache(folder)
        assert error.value.fix == "give a writable folder on this machine"

    for module, name, code in (
        (page_cache.fcntl, "flock", errno.ENOLCK),
        (page_cache.os, "open", errno.EACCES),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, Mock(side_effect=OSError(code, os.strerror(code))))
            with pytest.raises(UsageError, match="cannot be used") as error:
                FolderCache(tmp_path / "new")
        assert error.value.found == f"cannot lock: {os.strerror(code)}"


def test_a_folder_that_is_removed_while_it_is_used_is_an_error(tmp_path):
    """As is a name that leads elsewhere."""
    cache = FolderCache(tmp_path / "cache")
    for name in ("../x", "a/b", "", ".", "a-b"):
        with pytest.raises(ValueError, match="letters and digits"):
            cache.put(name, 0, b"", never)
    cache.put("a", 0, page("a", 0), never)
    shutil.rmtree(tmp_path / "cache")
    assert cache.get("a", 0) is None
    with pytest.raises(NotFoundError, match="cannot lock"):
        cache.put("a", 1, page("a", 1), never)


# A disk that is full


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_no_room(tmp_path, monkeypatch, code):
    """A disk that fails is an error."""
    cache = FolderCache(tmp_path)
    assert cache.put("a", 0, page("a", 0), never)
    with monkeypatch.context() as patch:
        patch.setattr(fs, "write", fail_in_the_middle(code))
        if code == errno.EIO:
            with pytest.raises(StorageError, match="cannot write"):
                cache.put("a", 1, page("a", 1), never)
        else:
            assert not cache.put("a", 1, page("a", 1), never)
    check(tmp_path)
    assert cache.put("a", 1, page("a", 1), never)
    check(tmp_path)


def test_a_real_limit_of_files_is_no_room(tmp_path):
    def work():
        cache = FolderCache(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        assert cache.put("a", 0, page("a", 0, 400_000), never)
        assert not cache.put("a", 1, page("a", 1), never)
        assert cache.get("a", 0) == page("a", 0, 400_000)

    in_fork(work)
    check(tmp_path)


def test_a_disk_too_full_to_count_is_no_room(tmp_path, monkeypatch):
    cache, pwrite, left = FolderCache(tmp_path / "cache"), os.pwrite, 0

    def full(handle, data, offset):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(handle, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert not cache.put("a", 0, page("a", 0), never)
        left = 1
        assert cache.put("a", 1, page("a", 1), never)
        left = 0
        with pytest.raises(UsageError, match="cannot be used") as error:
            FolderCache(tmp_path / "new")
    assert error.value.found == "another process has locked it, or its disk is full"
    assert cache.put("a", 2, page("a", 2), never)
    assert counted(cache.folder) == on_disk(cache.folder)
    check(cache.folder)


def test_some_of_the_disk_is_left_free(tmp_path, monkeypatch):
    """5 % of a small one, or 1 GB: others' files take the rest of it here."""
    disk = namedtuple("disk", "total used free")
    total, others = 100 * FULL_PAGE, 80 * FULL_PAGE
    monkeypatch.setattr(
        page_cache.shutil,
        "disk_usage",
        lambda folder: disk(total, others, total - others - on_disk(folder)),
    )
    cache = FolderCache(tmp_path)
    for number in range(20):
        assert cache.put("a", number, page("a", number), lambda _, number: number) is (number < 15)
    others += 5 * FULL_PAGE
    assert cache.put("a", 30, page("a", 30), lambda _, number: number, keep=0)
    assert on_disk(tmp_path) == 10 * FULL_PAGE
    total = 100_000 * FULL_PAGE
    others = total - 1_000_000_000 - 11 * FULL_PAGE
    assert [cache.put("b", number, page("b", number), never) for number in (1, 2)] == [True, False]


# Processes that die


@pytest.mark.parametrize("when", ["middle", "after"])
def test_it_may_die_at_any_change(tmp_path, when):
    """At each step that changes the disk. Another process that has the folder open goes on, before
    one that opens it."""

    def run(folder):
        cache = FolderCache(folder, 2 * FULL_PAGE)
        for number in range(4):
            cache.put("a", number, page("a", number), lambda _, number: -number)
        (folder / "a-3.page").write_bytes(bytes(8 + PAGE))
        assert FolderCache(folder).get("a", 3) is None

    with pytest.MonkeyPatch.context() as patch:
        whole = Dying(patch)
        run(tmp_path / "whole")
    assert len(whole.log) > 15
    for at in range(len(whole.log)):
        folder = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Died):
            Dying(patch, at, when)
            run(folder)
        if (folder / MARK).exists():
            assert on_disk(folder) <= 2 * FULL_PAGE
            other = FolderCache.__new__(FolderCache)
            other.__setstate__((str(folder), 2 * FULL_PAGE))
            other.get("a", 3)  # it may be damaged
            assert other.put("a", 9, page("a", 9), never, keep=0)
            assert counted(folder) == on_disk(folder)
        check(folder)
        run(folder)


def test_what_a_process_claims_that_is_killed_is_free(tmp_path):
    cache, (said, say) = FolderCache(tmp_path), os.pipe()

    def work():
        os.write(say, b"1" if FolderCache(tmp_path).claim("a", 1) else b"0")
        signal.pause()

    child = started(work)
    assert os.read(said, 1) == b"1"
    assert not cache.claim("a", 1)
    assert cache.claim("a", 2)
    cache.unclaim("a", 1)  # which is not ours
    assert not cache.claim("a", 1)
    os.kill(child, signal.SIGKILL)
    assert killed(child)
    assert cache.claim("a", 1)


# Forks and threads


def changed_by_a_thread(cache):
    """Returns while a thread changes the cache, which is full; it goes on after the event."""
    began, go_on = threading.Event(), threading.Event()

    def next_use(file, number):
        began.set()
        go_on.wait(120)
        return math.inf

    while cache.put("a", number := len(resident(cache)), page("a", number), never):
        pass
    more = ("b", 1, page("b", 1), next_use, 0)
    threading.Thread(target=cache.put, args=more, daemon=True).start()
    assert began.wait(120)
    return go_on


def test_a_forked_process_has_a_lock_of_its_own():
    """Another thread changes the cache in memory while a process is forked, which counts anew what
    the thread has not counted yet."""
    cache = MemoryCache(2 * PAGE)
    go_on = changed_by_a_thread(cache)
    cache._used -= PAGE  # as between two steps of the change

    def work():
        assert cache.put("c", 1, page("c", 1), never, keep=0)
        assert len(resident(cache)) == 1

    in_fork(work)
    cache._used += PAGE
    go_on.set()


def test_a_forked_process_does_not_hold_the_lock_of_one_that_died(tmp_path):
    """The parent is killed while a thread of it holds the lock; its child goes on."""
    cache, (wait, go_on) = FolderCache(tmp_path, 2 * FULL_PAGE), os.pipe()

    def work():
        changed_by_a_thread(cache)
        if not os.fork():
            os.close(go_on)
            os.read(wait, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert killed(started(work))
    assert cache.put("c", 0, page("c", 0), never, keep=0)
    os.close(go_on)
    check(tmp_path)


def test_who_holds_the_lock_for_ever_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(page_cache, "_LOCK_SECONDS", 0.05)
    cache = FolderCache(tmp_path)
    with (tmp_path / LOCK).open() as other:
        page_cache.fcntl.flock(other, page_cache.fcntl.LOCK_EX)
        for _ in range(2):
            assert not cache.put("a", 0, page("a", 0), never)
        assert FolderCache(tmp_path).get("a", 0) is None
    assert cache.put("a", 0, page("a", 0), never)


# Which cache


def test_the_cache_comes_from_arguments_and_environment(tmp_path, monkeypatch):
    def found(folder=None, limit=None, **environ):
        for name in ("SHARDKIT_CACHE", "SHARDKIT_CACHE_LIMIT"):
            monkeypatch.setenv(name, environ.get(name, ""))
        cache = cache_from(folder, limit)
        return getattr(cache, "folder", None), cache.limit

    one, two = tmp_path / "one", tmp_path / "two"
    both = {"SHARDKIT_CACHE": str(two), "SHARDKIT_CACHE_LIMIT": "2GB"}
    assert found() == (None, 1 << 30)
    assert found(None, "3MiB") == (None, 3 << 20)
    assert found(one) == (one, None)
    assert found(**both) == (two, 2 * 10**9)
    assert found(str(one), 10**8, **both) == (one, 10**8)
    for asked in ((None, 0), (None, "0"), (None, PAGE - 1), (tmp_path / "new", PAGE)):
        with pytest.raises(UsageError, match="too small for a page"):
            found(*asked)
    with pytest.raises(UsageError) as error:
        MemoryCache(PAGE - 1)
    assert error.value.expected == "1,048,576 bytes or more"
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="invalid size as the limit") as error:
        found(SHARDKIT_CACHE_LIMIT="much")
    assert error.value.found == "'much'"
