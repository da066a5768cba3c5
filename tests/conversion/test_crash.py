"""C2: a run that dies at any operation leaves nothing that looks complete, and can be continued."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import storage
from shardkit.errors import SampleError, ShardkitError, StorageError
from shardkit.formats import file_name
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images


class Died(BaseException):
    """The process is gone: no `except Exception` may catch this."""


class Dying:
    """A storage layer that dies before, in the middle of, or after its operation number `at`.

    Once dead, it does nothing more, whatever clean-up code tries. `log` has what each operation did
    to which kind of path: numbers are left out.
    """

    def __init__(self, patch: pytest.MonkeyPatch, at: int = -1, when: str = "never") -> None:
        self.log: list[tuple[str, str]] = []
        self.at = at
        self.when = when
        self.dead = False
        for name in storage.CHANGES:
            patch.setattr(storage, name, self._wrap(name, getattr(storage, name)))

    def _wrap(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if self.dead:
                raise Died
            mine = len(self.log) == self.at
            path = args[0].path if name in ("write", "rewrite") else args[0]
            self.log.append(
                (name, re.sub(r"(?<=\.)[0-9a-f]+(?=\.tmp)|\d+", "#", "/".join(path.parts[-2:])))
            )
            self.dead = mine
            if mine and self.when == "before":
                raise Died
            if mine and self.when == "middle" and name == "write":
                file, chunks = args
                joined = b"".join(chunks)
                operation(file, [joined[: len(joined) // 2]])
                raise Died
            if mine and self.when == "middle" and name == "remove" and args[0].is_dir():
                children = sorted(args[0].iterdir())
                for child in children[: len(children) // 2 + 1]:
                    operation(child)
                raise Died
            result = operation(*args)
            if mine:
                if name == "create":
                    result.close()
                raise Died
            return result

        return wrapped


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_images(tmp_path / "in", classes=2, each=4, kilobytes=2)
    (folder / "class0/a.b.jpg").write_bytes((folder / "class0/000.jpg").read_bytes())
    (folder / "class1/001.jpg").write_bytes(b"text")
    return folder


def change(image: Path) -> None:
    """In place, so that a dataset of it is still of the same recipe."""
    data = bytearray(image.read_bytes())
    data[-10] ^= 1
    image.write_bytes(data)


def convert(source: Path, out: Path, to: str = "wds", **options: Any) -> None:
    options = {"workers": 0, "shard_size": 12_000, "on_error": "skip", **options}
    shardkit.convert(source, to, out, **options)


def logged(dying: Any, begin: Callable[[], None], run: Callable[[], None]) -> list[Any]:
    """What a run does that does not die; `dying` is a class like `Dying`."""
    begin()
    with pytest.MonkeyPatch.context() as patch:
        whole = dying(patch)
        run()
    assert len(whole.log) > 15
    found: list[Any] = whole.log
    return found


def died_at(
    moments: Iterable[tuple[int, str]],
    dying: Any,
    log: list[Any],
    begin: Callable[[], None],
    run: Callable[[], None],
) -> Iterator[None]:
    """Begin anew and run, dying at another of the moments each time: at which operation, and when
    ("before" it, ...)."""
    for at, when in moments:
        begin()
        with pytest.MonkeyPatch.context() as patch:
            layer = dying(patch, at, when)
            try:
                run()
            except Died:
                pass
        assert layer.dead
        assert layer.log == log[: at + 1]
        yield


def died_everywhere(
    begin: Callable[[], None], run: Callable[[], None], large: bool
) -> Iterator[None]:
    """Die wherever the disk is another: in the middle of and after each change of it in the large
    run, else after the first and the last of each kind, and in the middle of the last. A kind is
    what is done to which kind of path. Before a change there is what the one before it has left.
    """
    log = logged(Dying, begin, run)
    first = {kind: at for at, kind in reversed(list(enumerate(log)))}
    last = {kind: at for at, kind in enumerate(log)}
    moments = [(0, "before")] if large else []
    for at, kind in enumerate(log):
        if kind[0] == "sync" or not (large or at in (first[kind], last[kind])):
            continue
        times = ["middle", "after"] if large or at == last[kind] else ["after"]
        if kind[0] not in ("write", "remove"):  # the others have no middle
            times = [when for when in times if when != "middle"]
        moments += [(at, when) for when in times]
    return died_at(moments, Dying, log, begin, run)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a dead process closes nothing
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_that_dies_anywhere_is_continued(source: Path, tmp_path: Path, large: bool) -> None:
    convert(source, tmp_path / "reference")
    reference = files_of(tmp_path / "reference")
    assert {"__shardkit__/errors.jsonl", "__shardkit__/keys.jsonl", "shard-000002.tar"} <= set(
        reference
    )
    out = tmp_path / "out"
    for _ in died_everywhere(lambda: storage.remove(out), lambda: convert(source, out), large):
        if out.exists():
            assert files_of(out) == reference
        if (tmp_path / "out.partial").exists():
            with pytest.raises(ShardkitError):
                shardkit.open(tmp_path / "out.partial")
        convert(source, out)
        assert files_of(out) == reference
        assert not (tmp_path / "out.partial").exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(1, marks=pytest.mark.large), 2],
    ids=["another", "of the same recipe"],
)
def test_replacing_a_dataset_that_dies_anywhere_keeps_the_old_or_gives_the_new(
    source: Path, tmp_path: Path, seed: int, large: bool
) -> None:
    convert(source, tmp_path / "old", shuffle=True, seed=seed)
    change(source / "class0/000.jpg")
    convert(source, tmp_path / "new", shuffle=True, seed=2)
    old, new = files_of(tmp_path / "old"), files_of(tmp_path / "new")
    out = tmp_path / "out"

    def replace() -> None:
        convert(source, out, shuffle=True, seed=2, overwrite=True)

    def begin() -> None:
        storage.remove(out)
        shutil.copytree(tmp_path / "old", out)

    for _ in died_everywhere(begin, replace, large):
        if out.exists():
            assert files_of(out) in (old, new)
        else:  # between the two renames: both are whole, beside the output
            assert files_of(tmp_path / "out.partial/replaced") == old
            assert files_of(tmp_path / "out.partial/dataset") == new
        replace()
        assert files_of(out) == new
        assert not (tmp_path / "out.partial").exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_beginning_again_without_dropped_samples_may_die_anywhere(
    source: Path, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that drops samples had begun to publish; the next may drop none."""
    convert(source, tmp_path / "reference")
    out, partial, saved = tmp_path / "out", tmp_path / "out.partial", tmp_path / "saved"
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.conversion.commit.Commit.publish", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out)
    assert (partial / "dataset/shard-000002.tar").exists()
    partial.rename(saved)

    def begin() -> None:
        storage.remove(out)
        storage.remove(partial)
        shutil.copytree(saved, partial)

    def run() -> None:
        with pytest.raises(SampleError):
            convert(source, out, on_error="fail")

    for _ in died_everywhere(begin, run, large):
        convert(source, out)
        assert files_of(out) == files_of(tmp_path / "reference")
        assert not partial.exists()


@pytest.mark.large
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_parts_that_die_anywhere_are_continued(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "reference")
    reference, out = files_of(tmp_path / "reference"), tmp_path / "out"

    def parts() -> None:
        for part in ("1/2", "2/2"):
            convert(source, out, part=part)

    for number, _ in enumerate(died_everywhere(lambda: storage.remove(out), parts, False)):
        if out.exists():
            assert files_of(out) == reference
        if number % 2:
            parts()
        else:
            convert(source, out)
        assert files_of(out) == reference
        assert not (tmp_path / "out.partial").exists()


@pytest.mark.large
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_merging_that_dies_anywhere_is_continued(source: Path, tmp_path: Path) -> None:
    """A merge that replaces another dataset."""
    convert(source, tmp_path / "old", shuffle=True)
    convert(source, tmp_path / "reference")
    old, reference = files_of(tmp_path / "old"), files_of(tmp_path / "reference")
    out, done = tmp_path / "out", tmp_path / "done"
    shutil.copytree(tmp_path / "old", done)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.conversion.partial.FolderPartial.try_alone", lambda partial: False)
        for part in ("1/2", "2/2"):
            convert(source, done, part=part, overwrite=True)

    def begin() -> None:
        storage.remove(out)
        shutil.copytree(tmp_path / "old", out)
        shutil.copytree(tmp_path / "done.partial", tmp_path / "out.partial")

    def merge() -> None:
        shardkit.merge(out)

    for number, _ in enumerate(died_everywhere(begin, merge, False)):
        if out.exists():
            assert files_of(out) in (old, reference)
        if number % 2:
            merge()
        else:
            convert(source, out, part="2/2", overwrite=True)
        assert files_of(out) == reference
        assert not (tmp_path / "out.partial").exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_create_that_dies_anywhere_leaves_nothing_that_looks_complete(
    tmp_path: Path, large: bool
) -> None:
    def create(out: Path) -> None:
        schema = {"label": shardkit.Int()}
        with shardkit.create(out, "wds", schema, shard_samples=2) as writer:
            for n in range(5):
                writer.write({"label": n})

    create(tmp_path / "reference")
    reference = files_of(tmp_path / "reference")
    out = tmp_path / "out"
    for _ in died_everywhere(lambda: storage.remove(out), lambda: create(out), large):
        if out.exists():
            assert files_of(out) == reference
            storage.remove(out)
        create(out)
        assert files_of(out) == reference
        assert not (tmp_path / "out.partial").exists()


class Recorder:
    """A storage layer that knows what a power cut would lose, and checks what becomes visible."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.unsynced: set[Path] = set()  # files with bytes, folders with entries
        self.log: list[tuple[str, Path]] = []
        for name in storage.CHANGES:
            patch.setattr(storage, name, self._wrap(name, getattr(storage, name)))

    def _wrap(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        note = getattr(self, f"_{name}")

        def wrapped(*args: Any) -> Any:
            note(*args)
            path = args[0].path if name in ("write", "rewrite") else args[0]
            self.log.append((name, path))
            return operation(*args)

        return wrapped

    def _make_folder(self, path: Path) -> None:
        if not path.exists():
            self.unsynced.add(path.parent)

    def _create(self, path: Path) -> None:
        self.unsynced |= {path, path.parent}

    def _write(self, file: storage.NewFile, chunks: list[bytes]) -> None:
        self.unsynced.add(file.path)

    def _rewrite(self, file: storage.NewFile, offset: int, data: bytes) -> None:
        self.unsynced.add(file.path)

    def _sync(self, path: Path) -> None:
        self.unsynced.discard(path)

    def _rename(self, old: Path, new: Path) -> None:
        lost = [path for path in self.unsynced if path == old or old in path.parents]
        assert not lost, f"{old} becomes {new} before these are on the disk: {lost}"
        self.unsynced |= {old.parent, new.parent}

    def _remove(self, path: Path) -> None:
        self.unsynced = {p for p in self.unsynced if p != path and path not in p.parents}


@pytest.mark.parametrize("shard_size", [12_000, None])
@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_nothing_becomes_visible_before_it_is_on_the_disk(
    source: Path, tmp_path: Path, format: str, shard_size: int | None
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        convert(source, out, format, shard_size=shard_size)
    renames = [path for name, path in recorder.log if name == "rename"]
    assert renames[-1] == tmp_path / "out.partial/dataset"
    assert not {p for p in recorder.unsynced if p == out or out in p.parents or p == out.parent}
    # Each shard, index and result is synced once it is written, each task once its files are.
    synced = {path.name for name, path in recorder.log if name == "sync"}
    shard = Path(file_name("shard-000000", format)).name
    assert {shard, "result.json", "tasks"} <= synced
    assert format != "wds" or "shard-000000.index.npy" in synced
    # After the last rename: the folder that holds the output, and only then the cleaning up.
    after = recorder.log[recorder.log.index(("rename", renames[-1])) + 1 :]
    assert after[0] == ("sync", tmp_path)
    assert {name for name, _ in after[1:]} == {"remove"}


@pytest.mark.parametrize("room", [0, 3_000, 20_000, 40_000])
def test_a_full_disk_is_named_and_the_run_continues_when_there_is_space(
    source: Path, tmp_path: Path, room: int
) -> None:
    convert(source, tmp_path / "reference")
    real = storage.NewFile.write
    left = room

    def write(file: storage.NewFile, chunks: list[bytes]) -> None:
        nonlocal left
        left -= sum(map(len, chunks))
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, chunks)

    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.NewFile, "write", write)
        with pytest.raises(StorageError, match="the disk is full") as error:
            convert(source, out)
    assert "free some space, then run the same command again" in str(error.value)
    assert "bytes free" in str(error.value)
    assert not out.exists()
    left_over = [p for p in files_of(tmp_path / "out.partial") if p.startswith("tasks/")]
    assert all(".tmp" not in path for path in left_over)
    convert(source, out)
    assert files_of(out) == files_of(tmp_path / "reference")


def test_work_that_is_done_is_not_done_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (source / "class1/003.jpg").write_bytes(b"not yet an image")
    with pytest.raises(ShardkitError, match="more than 1 samples"):
        convert(source, out, max_errors=1)
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "out.partial/tasks").glob("*/result.json")}
    assert done
    seen: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        real = storage.create
        patch.setattr(storage, "create", lambda path: (seen.append(path), real(path))[1])
        convert(source, out)
    made = {p.parent.name.split(".")[0] for p in seen if p.name == "result.json"}
    assert made
    assert made.isdisjoint(path.parent.name for path in done)


def test_shards_that_moved_are_not_lost_when_tasks_are_done_again(tmp_path: Path) -> None:
    source = write_images(tmp_path / "in", classes=2, each=2, kilobytes=3)
    bad = [source / f"class0/{n:03d}.jpg" for n in range(2)]
    good = [path.read_bytes() for path in bad]
    times = [path.stat().st_mtime_ns for path in bad]
    for path in bad:
        path.write_bytes(bytes(path.stat().st_size))
        os.utime(path, ns=(times[0], times[0]))
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.manifest.Manifest.write", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # the first task dropped all, the shard has moved
            convert(source, out)
    for path, data in zip(bad, good, strict=True):
        path.write_bytes(data)
        os.utime(path, ns=(times[0], times[0]))
    convert(source, out, on_error="fail")
    convert(source, tmp_path / "reference", on_error="fail")
    assert files_of(out) == files_of(tmp_path / "reference")
    assert len(shardkit.open(out)) == 4


def test_an_old_dataset_that_was_put_aside_is_given_back(tmp_path: Path) -> None:
    schema = {"label": shardkit.Int()}
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with shardkit.create(out, "wds", schema) as writer:
        writer.write({"label": 1})
    before = files_of(out)
    partial.mkdir()
    (partial / "lock").touch()
    out.rename(partial / "replaced")  # a run was killed between its two renames

    def fail() -> None:
        with shardkit.create(out, "wds", schema, overwrite=True) as writer:
            writer.write({"label": 2})
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()
    assert files_of(out) == before


def test_after_a_failed_write_nothing_is_published(tmp_path: Path) -> None:
    schema = {"blob": shardkit.Bytes()}
    writer = shardkit.create(tmp_path / "out", "wds", schema)
    with pytest.MonkeyPatch.context() as patch:

        def fail(file: storage.NewFile, chunks: list[bytes]) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(storage.NewFile, "write", fail)
        with pytest.raises(StorageError):
            writer.write({"blob": bytes(1_000_000)})
    with pytest.raises(ValueError, match="closed"):
        writer.write({"blob": b"x"})
    writer.close()
    assert not (tmp_path / "out").exists()


# In a worker: each task that is begun is noted, and the first worker that does task 1 is killed
# after its last rename, before it can say so.
DIES = """
import os, signal
from shardkit.conversion import work
real = work.run_task

def run_task(task, report):
    with open({began!r}, "a") as file:
        file.write(f"{{task.number}}\\n")
    real(task, report)
    if task.number == 1:
        open({died!r}, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)

work.run_task = run_task
"""


def test_a_task_that_is_done_is_not_done_again_when_its_worker_dies(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardkit.conversion import pool

    out, began, died = (tmp_path / name for name in ("out", "began", "died"))
    code = DIES.format(began=str(began), died=str(died))
    serve = "from shardkit.conversion.pool import serve"
    assert serve in pool._START
    monkeypatch.setattr(pool, "_START", pool._START.replace(serve, f"exec({code!r}); {serve}"))
    convert(source, out, workers=2)
    assert died.exists()
    tasks = began.read_text().split()
    assert sorted(set(tasks)) == sorted(tasks)
    convert(source, tmp_path / "reference")
    assert files_of(out) == files_of(tmp_path / "reference")
