"""Datasets written to stores: the same bytes as on a disk; whole or not there; continued."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import ImageOptions, storage
from shardkit.conversion import claim as claims
from shardkit.conversion import existing, run
from shardkit.conversion.claim import Claim
from shardkit.errors import (
    DamagedError,
    OutputError,
    SampleError,
    ShardkitError,
    StorageError,
    UsageError,
)
from shardkit.remote import store as stores
from shardkit.remote.path import RemotePath
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images
from tests.conversion.test_crash import Died, change, died_at, logged
from tests.remote.conftest import Through
from tests.remote.proxy import Rule
from tests.remote.servers import S3, Store

SECRET = "testsecret"  # of tests.remote.servers


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_images(tmp_path / "in", classes=2, each=4, kilobytes=2)
    (folder / "class0/a.b.jpg").write_bytes((folder / "class0/000.jpg").read_bytes())
    (folder / "class1/001.jpg").write_bytes(b"text")
    return folder


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of each test's own for what is temporary on this machine."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def convert(source: Path | str, out: Path | str, to: str = "wds", **options: Any) -> Any:
    options = {"workers": 0, "shard_size": 12_000, "on_error": "skip", **options}
    return shardkit.convert(source, to, out, **options)


class Bucket:
    """An empty bucket, and what it holds."""

    def __init__(self, store: Store) -> None:
        self.store, self.name = store, store.bucket()
        self.options = store.options()
        self.out = store.url(self.name, "out")

    def objects(self) -> dict[str, bytes]:
        import obstore

        opened = self.store.open(self.name)
        while True:
            keys = [meta["path"] for page in obstore.list(opened) for meta in page]
            try:
                return {key: bytes(obstore.get(opened, key).bytes()) for key in sorted(keys)}
            except FileNotFoundError:  # a request of a process that was killed is still at work
                continue

    def clear(self) -> None:
        import obstore

        for key in self.objects():
            obstore.delete(self.store.open(self.name), key)

    def put(self, key: str, data: bytes = b"x") -> None:
        self.store.open(self.name).put(key, data)

    def upload(self, folder: Path, key: str) -> None:
        for name, data in files_of(folder).items():
            self.put(f"{key}/{name}", data)

    def path(self, key: str) -> RemotePath:
        """Through a connection of its own, as another process has."""
        with storage.using(self.options):
            found = storage.source(self.store.url(self.name, key))
        assert isinstance(found, RemotePath)
        return found

    def convert(self, source: Path | str, to: str = "wds", **options: Any) -> Any:
        return convert(source, self.out, to, storage_options=self.options, **options)


@pytest.fixture
def bucket(request: pytest.FixtureRequest, s3: S3) -> Bucket:
    """Of S3, or of another store for a test that names one."""
    return Bucket(request.getfixturevalue(request.param) if hasattr(request, "param") else s3)


# Our own small store, for very many requests, which take moto ten times as long.
QUICK = pytest.mark.parametrize("bucket", ["google"], indirect=True)


def below(folder: Path, key: str = "out") -> dict[str, bytes]:
    """The objects that a dataset in a folder should be."""
    return {f"{key}/{name}": data for name, data in files_of(folder).items()}


# --- the same bytes


@pytest.mark.parametrize("workers", [0, 2])
def test_a_conversion_makes_the_bytes_that_it_makes_on_a_disk(
    source: Path, tmp_path: Path, bucket: Bucket, workers: int, scratch: Path
) -> None:
    made = convert(source, tmp_path / "local")
    found = bucket.convert(source, workers=workers)
    assert bucket.objects() == below(tmp_path / "local")
    assert list(scratch.iterdir()) == []
    assert found.out == found.splits[""].path == bucket.out
    assert found.splits[""].errors_list == f"{bucket.out}/__shardkit__/errors.jsonl"
    assert (found.samples, found.bytes, found.errors) == (made.samples, made.bytes, made.errors)
    again = bucket.convert(source)
    assert again.already_complete
    with shardkit.open(bucket.out, storage_options=bucket.options) as dataset:
        assert len(dataset) == 8
    assert shardkit.verify(bucket.out, source, storage_options=bucket.options).sound


def test_files_for_other_loaders(source: Path, tmp_path: Path, bucket: Bucket) -> None:
    options: dict[str, Any] = {"beside": ["dali", "energon", "wids"], "split": "train=0.5,val=0.5"}
    convert(source, tmp_path / "local", **options)
    bucket.convert(source, **options)
    assert bucket.objects() == below(tmp_path / "local")
    assert bucket.objects().keys() >= {"out/.nv-meta/.info.json", "out/val/shard-000000.tar.idx"}
    assert shardkit.verify(bucket.out, storage_options=bucket.options).sound


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_COPIED_BYTES", "_LEAST_WORK"):
        monkeypatch.setattr(f"shardkit.conversion.cuts.{name}", 8_000)


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize(
    ("format", "name"),  # each of both: a store sees no formats, only files that are put and copied
    [
        ("lmdb", "s3"),
        *(pytest.param(name, "google", marks=pytest.mark.large) for name in IMAGE_FORMATS),
        pytest.param("beton", "azure", marks=pytest.mark.large),
    ],
)
def test_shards_that_are_joined(
    format: str, name: str, source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bucket = Bucket(request.getfixturevalue(name))
    options: dict[str, Any] = {"shard_size": None, "image": ImageOptions(resize=16)}
    convert(source, tmp_path / "local", format, **options)
    bucket.convert(source, format, **options)
    assert bucket.objects() == below(tmp_path / "local")


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("format", ["wds", pytest.param("beton", marks=pytest.mark.large)])
def test_an_output_that_is_one_shard(
    format: str, source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    name = {"wds": "train.tar", "beton": "train.beton"}[format]
    url = bucket.store.url(bucket.name, f"sets/{name}")
    (tmp_path / "local").mkdir()
    bucket.put("sets/other.txt")
    for seed in (1, 2):  # the second replaces the first
        options: dict[str, Any] = {"shard_size": None, "shuffle": True, "seed": seed}
        options["beside"] = ["dali", "wids"] if format == "wds" else []
        convert(source, tmp_path / "local" / name, format, overwrite=True, **options)
        with_options = {"storage_options": bucket.options, "overwrite": True}
        convert(source, url, format, **options, **with_options)
        assert bucket.objects() == below(tmp_path / "local", "sets") | {"sets/other.txt": b"x"}
    with shardkit.open(url, storage_options=bucket.options) as dataset:
        assert len(dataset) == 8


def test_splits(source: Path, tmp_path: Path, bucket: Bucket) -> None:
    convert(source, tmp_path / "local", split="train=0.6,val=0.4")
    found = bucket.convert(source, split="train=0.6,val=0.4")
    assert bucket.objects() == below(tmp_path / "local")
    assert found.splits["val"].path == f"{bucket.out}/val"
    convert(source, tmp_path / "local", overwrite=True)
    bucket.convert(source, overwrite=True)
    assert bucket.objects() == below(tmp_path / "local")


def test_from_a_store_to_a_store(source: Path, tmp_path: Path, bucket: Bucket) -> None:
    convert(source, tmp_path / "first")
    bucket.upload(tmp_path / "first", "first")
    convert(tmp_path / "first", tmp_path / "local", "arrow")
    bucket.convert(bucket.store.url(bucket.name, "first"), "arrow")
    assert bucket.objects() == below(tmp_path / "first", "first") | below(tmp_path / "local")


@pytest.mark.parametrize("name", few(["google", "azure"], "google"))
def test_other_stores(
    name: str, source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bucket = Bucket(request.getfixturevalue(name))
    convert(source, tmp_path / "local")
    bucket.convert(source)
    assert bucket.objects() == below(tmp_path / "local")
    convert(source, tmp_path / "local", overwrite=True, shuffle=True)
    bucket.convert(source, overwrite=True, shuffle=True)
    assert bucket.objects() == below(tmp_path / "local")


def create(out: Path | str, count: int = 5, **options: Any) -> None:
    schema = {"label": shardkit.Int()}
    with shardkit.create(out, "wds", schema, shard_samples=2, **options) as writer:
        for n in range(count):
            writer.write({"label": n})


def test_create(tmp_path: Path, bucket: Bucket) -> None:
    create(tmp_path / "local")
    create(bucket.out, storage_options=bucket.options)
    assert bucket.objects() == below(tmp_path / "local")
    with pytest.raises(OutputError, match="the output exists"):
        create(bucket.out, storage_options=bucket.options)
    create(tmp_path / "local", 3, overwrite=True)
    create(bucket.out, 3, storage_options=bucket.options, overwrite=True)
    assert bucket.objects() == below(tmp_path / "local")


@pytest.mark.parametrize("name", ["out", "out.tar"])
def test_a_dataset_that_comes_while_a_run_works_is_refused(
    source: Path, tmp_path: Path, bucket: Bucket, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, shuffle in (("other", True), ("fresh", False)):
        (tmp_path / folder).mkdir()
        convert(source, tmp_path / folder / name, shard_size=None, shuffle=shuffle)
    assemble = run.assemble

    def assembled(*args: Any) -> None:
        assemble(*args)
        monkeypatch.setattr(run, "assemble", assemble)
        bucket.upload(tmp_path / "other", "sets")

    def made(**options: Any) -> None:
        url = bucket.store.url(bucket.name, f"sets/{name}")
        convert(source, url, shard_size=None, storage_options=bucket.options, **options)

    monkeypatch.setattr(run, "assemble", assembled)
    with pytest.raises(OutputError, match="put at the output while this run was") as error:
        made()
    assert str(error.value.fix).endswith(f"/sets/{name}.partial")
    found = bucket.objects()
    work = {key for key in found if key.startswith(f"sets/{name}.partial/")}
    assert any(key.endswith("result.zip") for key in work)
    others = {key: data for key, data in found.items() if key not in work}
    assert others == below(tmp_path / "other", "sets")
    made(overwrite=True)
    assert bucket.objects() == below(tmp_path / "fresh", "sets")


def test_an_error_in_the_block_of_create_leaves_nothing(bucket: Bucket) -> None:
    def fail() -> None:
        schema = {"label": shardkit.Int()}
        options: Any = {"shard_samples": 1, "storage_options": bucket.options}
        with shardkit.create(bucket.out, "wds", schema, **options) as writer:
            for n in range(3):
                writer.write({"label": n})
            assert any("shard-000000.tar" in key for key in bucket.objects())
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert bucket.objects() == {}


# --- runs that die


class Dying:
    """A store that dies before or after its change number `at`, as `test_crash.Dying` for disks.

    Changes come one after the other. `log` has what each did to which object; a digest or a run is
    a number there.
    """

    def __init__(self, patch: pytest.MonkeyPatch, at: int = -1, when: str = "never") -> None:
        self.log: list[tuple[str, str]] = []
        self.at, self.when, self.dead = at, when, False
        for name in storage.STORE_CHANGES:
            patch.setattr(storage, name, self._wrap(name, getattr(storage, name)))
        patch.setattr(stores, "together", _in_turn)

    def _wrap(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if self.dead:
                raise Died
            mine = len(self.log) == self.at
            path = args[0] if name == "delete" else args[1]
            self.log.append((name, re.sub(r"[0-9a-f]{32}", "#", path.key)))
            self.dead = mine
            if mine and self.when == "before":
                raise Died
            result = operation(*args)
            if mine:
                raise Died
            return result

        return wrapped


def _in_turn(
    work: Callable[[Any], object],
    items: Iterable[Any],
    report: Callable[[Any], object] = lambda item: None,
) -> None:
    for item in sorted(items, key=str):
        work(item)
        report(item)


def died_everywhere(
    begin: Callable[[], None], run: Callable[[], None], large: bool, few: Collection[str] = ()
) -> Iterator[None]:
    """Die after each change in the large run, and before the first; else after the first of each
    of a `few`, such as "put run.json". Before a change there is what the one before it has left."""
    log = logged(Dying, begin, run)
    ends = [f"{name} {key}" for name, key in log]
    chosen = [
        next(at for at, end in enumerate(ends) if re.fullmatch(f"{what} .*{name}", end))
        for what, _, name in (kind.partition(" ") for kind in few)
    ]
    moments = [(0, "before"), *((at, "after") for at in range(len(log)))]
    few_moments = [(at, "after") for at in chosen]
    return died_at(moments if large else few_moments, Dying, log, begin, run)


def whole_or_no_dataset(bucket: Bucket, *datasets: dict[str, bytes]) -> bool:
    """Whether there is a dataset, which then is one of these; else nothing opens."""
    found = bucket.objects()
    out = {key: data for key, data in found.items() if key.startswith("out/")}
    if "out/__shardkit__/manifest.json" in out:
        out.pop("out/__shardkit__/unfinished.json", None)
        assert out in datasets
        return True
    if out:
        with pytest.raises(ShardkitError):
            shardkit.open(bucket.out, storage_options=bucket.options)
    if any(key.startswith("out.partial/") for key in found):
        with pytest.raises(ShardkitError):
            shardkit.open(f"{bucket.out}.partial", storage_options=bucket.options)
    return False


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a dead process closes nothing
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@QUICK
def test_a_run_that_dies_anywhere_is_continued(
    source: Path, tmp_path: Path, bucket: Bucket, large: bool, scratch: Path
) -> None:
    convert(source, tmp_path / "reference")
    reference = below(tmp_path / "reference")
    few = ["put result.zip", "copy .tar", "put errors.jsonl", "delete job.json"]
    for _ in died_everywhere(bucket.clear, lambda: bucket.convert(source), large, few):
        whole_or_no_dataset(bucket, reference)
        bucket.convert(source)
        assert bucket.objects() == reference
        assert list(scratch.iterdir()) == []


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.large
@QUICK
@pytest.mark.parametrize("size", [8_000, 16_000], ids=["another", "of the same recipe"])
def test_replacing_a_dataset_that_dies_anywhere_is_never_a_mixture(
    source: Path, tmp_path: Path, bucket: Bucket, size: int, large: bool
) -> None:
    convert(source, tmp_path / "old", shard_size=size)
    change(source / "class0/000.jpg")
    convert(source, tmp_path / "new", shard_size=16_000)
    old, new = below(tmp_path / "old"), below(tmp_path / "new")
    assert old != new
    assert size == 16_000 or old.keys() - new.keys()

    def begin() -> None:
        bucket.clear()
        bucket.upload(tmp_path / "old", "out")

    def replace() -> None:
        bucket.convert(source, shard_size=16_000, overwrite=True)

    seen = set()
    few = [
        "put unfinished.json", "delete manifest.json", "delete .tar", "copy .npy",
        "put manifest.json", "delete unfinished.json",
    ]  # fmt: skip
    for _ in died_everywhere(begin, replace, large, few):
        seen.add(whole_or_no_dataset(bucket, old, new))
        replace()
        assert bucket.objects() == new
    assert seen == {True, False}


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.large
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@QUICK
def test_joining_that_dies_anywhere_is_continued(
    source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    options: dict[str, Any] = {"shard_size": None, "image": ImageOptions(resize=16)}
    convert(source, tmp_path / "reference", "lmdb", **options)
    reference = below(tmp_path / "reference")

    def join() -> None:
        bucket.convert(source, "lmdb", **options)

    for _ in died_everywhere(bucket.clear, join, large=True):
        whole_or_no_dataset(bucket, reference)
        join()
        assert bucket.objects() == reference


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@QUICK
def test_create_that_dies_anywhere_begins_again(
    tmp_path: Path, bucket: Bucket, large: bool
) -> None:
    create(tmp_path / "reference")
    reference = below(tmp_path / "reference")

    def make() -> None:
        create(bucket.out, storage_options=bucket.options)

    few = ["put .tar", "copy .tar", "put manifest.json"]
    for _ in died_everywhere(bucket.clear, make, large, few):
        if whole_or_no_dataset(bucket, reference):
            create(bucket.out, storage_options=bucket.options, overwrite=True)
        else:
            make()
        assert bucket.objects() == reference


def test_a_dataset_of_an_earlier_version_is_replaced_manifests_first(
    source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    convert(source, tmp_path / "old", split="train=0.6,val=0.4")
    for path in (tmp_path / "old", tmp_path / "old/train", tmp_path / "old/val"):
        (path / "__shardkit__/manifest.json").rename(path / "shardkit.json")
    bucket.upload(tmp_path / "old", "out")
    there = bucket.objects()
    with pytest.MonkeyPatch.context() as patch:
        layer = Dying(patch)
        bucket.convert(source, overwrite=True)
    first = [key for name, key in layer.log if name == "delete" and key in there][:3]
    assert first[0] == "out/shardkit.json"
    assert {*first[1:]} == {"out/train/shardkit.json", "out/val/shardkit.json"}
    before = layer.log[: layer.log.index(("delete", first[0]))]
    for folder in ("out", "out/train", "out/val"):
        assert ("put", f"{folder}/__shardkit__/unfinished.json") in before
    convert(source, tmp_path / "new")
    assert bucket.objects() == below(tmp_path / "new")


class Puts:
    """The keys that are put, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        real = storage.put

        def put(data: Any, to: RemotePath) -> None:
            self.keys.append(to.key)
            real(data, to)

        patch.setattr(storage, "put", put)


def stop_in_work(bucket: Bucket, source: Path, at: int = 8, **options: Any) -> None:
    """A conversion that dies with some tasks done."""
    with pytest.MonkeyPatch.context() as patch:
        Dying(patch, at, "after")
        with pytest.raises(Died):
            bucket.convert(source, **options)
    assert any(key.endswith("result.zip") for key in bucket.objects())


def test_work_that_is_done_is_not_done_again_on_another_machine_either(
    source: Path, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in_work(bucket, source)
    done = {key for key in bucket.objects() if key.endswith("result.zip")}
    puts = Puts(monkeypatch)
    monkeypatch.setattr(claims, "machine", lambda: "another")
    monkeypatch.setattr(claims, "BEAT", 0.05)
    with pytest.warns(
        shardkit.ShardkitWarning, match="waiting up to 0 s to see whether it is still running"
    ):
        bucket.convert(source)
    made = {key for key in puts.keys if key.endswith("result.zip")}
    assert made
    assert made.isdisjoint(done)
    convert(source, tmp_path / "reference")
    assert bucket.objects() == below(tmp_path / "reference")


def test_a_result_that_a_listing_misses_is_made_again(
    source: Path, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in_work(bucket, source)
    real = stores.Store.keys
    monkeypatch.setattr(
        stores.Store, "keys",
        lambda self, folder: [k for k in real(self, folder) if "/000000/" not in k],
    )  # fmt: skip
    bucket.convert(source)
    convert(source, tmp_path / "reference")
    assert bucket.objects() == below(tmp_path / "reference")  # what it knows of is removed


def test_a_result_whose_shards_are_gone_is_made_again(
    source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    """As after a run that was killed while it removed the work of another."""
    stop_in_work(bucket, source)
    shards = [key for key in bucket.objects() if key.endswith("/000000/shard-000000.tar")]
    storage.delete(bucket.path(*shards))
    bucket.convert(source)
    convert(source, tmp_path / "reference")
    assert bucket.objects() == below(tmp_path / "reference")


def test_a_run_of_other_options_is_refused_and_begins_again_with_overwrite(
    source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    stop_in_work(bucket, source)
    before = bucket.objects()
    with pytest.raises(OutputError, match="unfinished conversion to this output") as error:
        bucket.convert(source, shuffle=True)
    assert "shuffle was None, is 0" in str(error.value)
    assert f"{bucket.out}.partial" in str(error.value)
    assert bucket.objects() == before
    bucket.convert(source, shuffle=True, overwrite=True)
    convert(source, tmp_path / "reference", shuffle=True)
    assert bucket.objects() == below(tmp_path / "reference")


def test_samples_that_were_dropped_are_read_again_where_none_may_be(
    source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    (source / "class1/001.jpg").unlink()
    bad = source / "class0/001.jpg"
    good, time_ns = bad.read_bytes(), bad.stat().st_mtime_ns

    def fill(data: bytes) -> None:
        bad.write_bytes(data)
        os.utime(bad, ns=(time_ns, time_ns))

    fill(bytes(len(good)))
    stop_in_work(bucket, source)
    fill(good)
    bucket.convert(source, on_error="fail")
    convert(source, tmp_path / "reference", on_error="fail")
    assert bucket.objects() == below(tmp_path / "reference")
    assert len(shardkit.open(bucket.out, storage_options=bucket.options)) == 8


def test_names_in_a_mark_stay_in_the_output(source: Path, tmp_path: Path, bucket: Bucket) -> None:
    """X3: what it names is removed before the new dataset is copied."""
    kept = ["kept.txt", "out2/kept.txt"]
    for key in [*kept, "out/left.tar"]:
        bucket.put(key)
    names = ["../kept.txt", "/kept.txt", "x/../../out2/kept.txt", "..", "", "left.tar"]
    bucket.put("out/__shardkit__/unfinished.json", json.dumps({"names": names}).encode())
    bucket.convert(source)
    convert(source, tmp_path / "reference")
    assert bucket.objects() == below(tmp_path / "reference") | dict.fromkeys(kept, b"x")


@pytest.mark.parametrize("what", ["junk", "a name that leads out", "compressed"])
def test_a_result_that_is_damaged_is_named(
    what: str, source: Path, bucket: Bucket, scratch: Path
) -> None:
    stop_in_work(bucket, source)
    key = next(key for key in bucket.objects() if key.endswith("000000/result.zip"))
    with io.BytesIO() as packed:
        if what == "junk":
            packed.write(b"junk")
        else:
            kind = zipfile.ZIP_DEFLATED if what == "compressed" else zipfile.ZIP_STORED
            with zipfile.ZipFile(packed, "w", kind) as archive:
                archive.writestr("../../../stray" if "name" in what else "result.json", b"{}")
        bucket.put(key, packed.getvalue())
    with pytest.raises(DamagedError) as error:
        bucket.convert(source)
    assert str(error.value.where["path"]) == bucket.store.url(bucket.name, key)
    assert not list(scratch.parent.rglob("stray"))


def test_a_key_in_two_shards_is_named(bucket: Bucket) -> None:
    samples: Any = [{"__key__": key, "label": 1} for key in "abcdefgb"]
    with pytest.raises(SampleError, match="two samples have the same key") as error:
        shardkit.convert(
            samples, "wds", bucket.out, shard_samples=2, workers=0, storage_options=bucket.options,
            schema={"label": shardkit.Int()},
        )  # fmt: skip
    assert error.value.where["key"] == "b"


# --- two runs


def test_a_run_that_is_at_work_keeps_others_out(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim.take(bucket.path("out.partial/run.json"))
    monkeypatch.setattr(claims, "BEAT", 0.2)
    monkeypatch.setattr("time.sleep", lambda seconds: claim._renew())
    with (
        pytest.warns(shardkit.ShardkitWarning, match="was claimed by a run on"),
        pytest.raises(OutputError, match="another run is working on this output"),
    ):
        bucket.convert(source)
    claim.release()
    bucket.convert(source)


def test_an_output_that_another_run_completes_meanwhile(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = existing.is_complete

    def late(*what: Any) -> bool:
        found = real(*what)
        monkeypatch.setattr(existing, "is_complete", real)
        bucket.convert(source)
        return found

    monkeypatch.setattr(existing, "is_complete", late)
    with pytest.raises(OutputError, match="another run created or replaced") as error:
        bucket.convert(source)
    assert "repeat the command" in (error.value.fix or "")
    bucket.convert(source)


def test_a_claim_is_taken_from_a_dead_run_only(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(store)
    path = bucket.path("out.partial/run.json")
    first = Claim.take(path)
    for _ in range(3):
        first._renew()
        first.check()
    monkeypatch.setattr(claims, "machine", lambda: "another")
    monkeypatch.setattr(claims, "BEAT", 0.02)
    with pytest.warns(shardkit.ShardkitWarning, match="was claimed by a run on"):
        second = Claim.take(path)
    with pytest.raises(OutputError, match="another run has taken over this output"):
        first.check()
    first.release()
    with pytest.raises(OutputError):
        first.remove()
    second.check()
    second.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = Claim.take(path)  # at once
    third.remove()
    assert bucket.objects() == {}


def test_a_run_of_this_machine_that_was_killed_is_known_at_once(bucket: Bucket) -> None:
    script = (
        "import os, signal, sys; from shardkit import storage;"
        "from shardkit.conversion.claim import Claim;"
        "Claim.take(storage.source(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    url = f"{bucket.out}.partial/run.json"
    environ = {**os.environ, **bucket.store.environ()}
    done = subprocess.run([sys.executable, "-c", script, url], env=environ, check=False)
    assert done.returncode == -signal.SIGKILL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Claim.take(bucket.path("out.partial/run.json")).remove()


def test_a_run_whose_claim_was_taken_publishes_nothing(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = storage.copy

    def copy(old: RemotePath, new: RemotePath, size: int) -> None:
        real(old, new, size)
        monkeypatch.setattr(storage, "copy", real)
        monkeypatch.setattr(claims, "BEAT", 0)  # it stood still for long
        bucket.put("out.partial/run.json", b'{"run": "another"}')

    monkeypatch.setattr(storage, "copy", copy)
    monkeypatch.setattr(stores, "together", _in_turn)
    with pytest.raises(OutputError, match="taken over this output"):
        bucket.convert(source)
    assert bucket.objects()["out.partial/run.json"] == b'{"run": "another"}'
    assert not whole_or_no_dataset(bucket)


def test_a_run_that_another_one_overtakes_before_it_begins_finds_out(
    source: Path, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Claim.take

    def take(path: RemotePath) -> Claim:
        convert(source, tmp_path / "other", shuffle=True)
        bucket.upload(tmp_path / "other", "out")
        return real(path)

    monkeypatch.setattr(Claim, "take", take)
    with pytest.raises(OutputError, match="another run has just written to this output"):
        bucket.convert(source)
    assert {k: v for k, v in bucket.objects().items() if "run.json" not in k} == below(
        tmp_path / "other"
    )


def test_a_claim_whose_answer_is_lost_is_held(s3: S3, through: Through) -> None:
    bucket, proxy = Bucket(s3), through(s3)
    bucket.options = s3.options(proxy.endpoint)
    proxy.add(Rule(method="PUT", match="run.json", times=1, reset_after=0))
    claim = Claim.take(bucket.path("out.partial/run.json"))
    proxy.add(Rule(method="PUT", match="run.json", times=1, reset_after=0))
    claim._renew()
    claim.check()
    tag = claim._tag
    claim._renew()
    claim._tag = tag  # as where no answer came for longer than is waited for
    claim._renew()
    claim.check()
    claim.remove()
    assert bucket.objects() == {}


def test_a_store_that_ignores_conditions_is_refused(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stores.Store.put_if
    monkeypatch.setattr(
        stores.Store, "put_if",
        lambda self, key, data, tag: (self.delete(key), real(self, key, data, None))[1],
    )  # fmt: skip
    with pytest.raises(StorageError, match="ignores the conditions of requests") as error:
        bucket.convert(source)
    assert "write to a path on this machine" in str(error.value)
    assert bucket.objects() == {}


def test_a_store_that_ignores_if_match_is_refused_where_a_claim_is_taken_over(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run that had it could renew it, and take the other's away."""
    path, real = bucket.path("out.partial/run.json"), stores.Store.put_if
    Claim.take(path).release()

    def put_if(self: stores.Store, key: str, data: bytes, tag: stores.Tag | None) -> Any:
        if tag is not None:
            self.delete(key)
        return real(self, key, data, None)

    monkeypatch.setattr(stores.Store, "put_if", put_if)
    with pytest.raises(StorageError, match="ignores the conditions of requests"):
        Claim.take(path)


def test_a_run_of_another_user_is_not_believed_dead(bucket: Bucket) -> None:
    """Whose processes may be hidden."""
    claim = Claim.take(bucket.path("out.partial/run.json"))
    about = claim._about
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "_started", lambda pid: None if pid == 1 else "0")
        assert claims.is_over(claims._text({**about, "pid": 1}))
        patch.setattr(os, "geteuid", lambda: 12345)
        assert not claims.is_over(claims._text({**about, "pid": 1}))
    claim.remove()


def test_faults_of_the_network_change_nothing(
    source: Path, tmp_path: Path, s3: S3, through: Through
) -> None:
    bucket, proxy = Bucket(s3), through(s3)
    bucket.options = s3.options(proxy.endpoint)
    proxy.add(
        Rule(method="PUT", match="shard-", skip=1, times=1, status=503),
        Rule(method="PUT", match="shard-", skip=3, times=1, refuse=True),
        Rule(method="PUT", match="result.zip", times=1, reset_after=0),
        Rule(method="PUT", match="manifest.json", times=1, reset_after=0),
        Rule(method="DELETE", skip=2, times=2, status=500),
    )
    bucket.convert(source)
    convert(source, tmp_path / "local")
    assert bucket.objects() == below(tmp_path / "local")


def test_requests_are_not_repeated_after_ctrl_c() -> None:
    """Which else waits for minutes, where nothing answers."""
    attempts, began = [], threading.Event()

    def request() -> None:
        attempts.append(1)
        began.set()
        assert stores._batch.over is not None
        assert stores._batch.over.wait(20)
        raise stores.PassingError(StorageError("the store cannot be reached"))

    def interrupt(item: int) -> None:
        assert began.wait(20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stores.together(
            lambda item: stores._patiently(request) if item else None, [0, 1], interrupt
        )
    assert len(attempts) == 1


@pytest.mark.large
@pytest.mark.parametrize(
    "match",
    [pytest.param(r"/out\.partial/.*shard-", marks=pytest.mark.large), "/out/shard-"],
    ids=["upload", "copy"],
)
def test_ctrl_c_does_not_wait_for_a_long_request(
    match: str, source: Path, s3: S3, through: Through
) -> None:
    """Neither for an upload nor for a copy: what they were to make is not made."""
    bucket, proxy = Bucket(s3), through(s3)
    proxy.add(Rule(method="PUT", match=match, latency=60))
    program = (
        "import sys; from shardkit.remote import store; store._GOODBYE = 1.0\n"
        "from shardkit.cli import main; main()"
    )
    command = [
        sys.executable, "-c", program, "convert", str(source), "--to", "wds", "-o", bucket.out,
        "--on-error", "skip", "--shard-size", "12kB", "--workers", "0",
    ]  # fmt: skip
    environ = {**os.environ, **s3.environ(proxy.endpoint)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        while not proxy.count("PUT", match).requests:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "waiting up to 1 s for pending requests" in told
    assert ("publishing: the store copies" in told) == ("partial" not in match)
    made = {key for key in bucket.objects() if re.search(match, f"/{key}")}
    assert not made
    bucket.convert(source)  # goes on at once, as the run has said that it ended
    assert bucket.path("out").is_dir()


# --- what is refused


@pytest.mark.parametrize("url", ["https://example.org/x", "memory://x", "hf://datasets/a/b"])
def test_other_urls_are_not_written(url: str, source: Path) -> None:
    for call in (lambda: convert(source, url), lambda: create(url)):
        with pytest.raises(UsageError, match="cannot write to this") as error:
            call()
        assert "then copy the result to the URL" in str(error.value.fix)


def test_a_whole_bucket_is_not_an_output(source: Path, bucket: Bucket) -> None:
    url = bucket.store.url(bucket.name)
    with pytest.raises(UsageError, match="the output is a whole bucket") as error:
        convert(source, url, storage_options=bucket.options)
    assert f"give a folder in it: {url}/NAME" in str(error.value)


def test_a_bucket_that_is_not_there(source: Path, s3: S3) -> None:
    with pytest.raises(UsageError, match="there is no such bucket"):
        convert(source, "s3://nothing-here/out", storage_options=s3.options())


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "the store does not allow writing here"),
        (400, "ExpiredToken", "the credentials have expired"),
    ],
)
def test_a_store_that_refuses(
    status: int, code: str, words: str, source: Path, s3: S3, through: Through
) -> None:
    bucket, proxy = Bucket(s3), through(s3)
    bucket.options = s3.options(proxy.endpoint)
    body = f"<Error><Code>{code}</Code></Error>"
    proxy.add(Rule(method="PUT", status=status, body=body))
    with pytest.raises(StorageError, match=words) as error:
        bucket.convert(source)
    assert SECRET not in repr(error.value) + str(error.value)
    assert bucket.out in str(error.value)


def test_an_object_in_the_place_of_the_output(source: Path, bucket: Bucket) -> None:
    bucket.put("out")
    bucket.put("out/x")
    with pytest.raises(OutputError, match="the output is a file"):
        bucket.convert(source)


def test_objects_of_others_in_the_output(source: Path, bucket: Bucket) -> None:
    bucket.put("out/theirs.txt")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="not a dataset written by shardkit") as error:
            bucket.convert(source, overwrite=overwrite)
        assert "theirs.txt" in str(error.value)
    bucket.clear()
    bucket.put("out.partial/theirs.txt")
    with pytest.raises(OutputError, match="contains something else") as error:
        bucket.convert(source)
    assert "theirs.txt" in str(error.value)
    assert list(bucket.objects()) == ["out.partial/theirs.txt"]


def test_another_dataset_in_the_output(source: Path, bucket: Bucket) -> None:
    bucket.convert(source)
    with pytest.raises(OutputError, match="the output exists and holds another dataset") as error:
        bucket.convert(source, shuffle=True)
    assert "shuffle was None" in str(error.value)


@pytest.mark.parametrize("out", ["in/first/deep", "in/first", "in"])
def test_an_output_in_the_source(out: str, source: Path, tmp_path: Path, bucket: Bucket) -> None:
    convert(source, tmp_path / "first")
    bucket.upload(tmp_path / "first", "in/first")
    bucket.out = bucket.store.url(bucket.name, out)
    with pytest.raises(OutputError, match="must not contain each other"):
        bucket.convert(bucket.store.url(bucket.name, "in/first"), "arrow")


def test_a_shard_that_no_request_can_carry(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (run, {}),  # known before the work begins
        (run, {"to": "lmdb", "shard_size": None}),
        (stores, {"shard_samples": 4, "shard_size": None}),
    ]
    for module, options in cases:
        with monkeypatch.context() as patch:
            patch.setattr(module, "LARGEST", 5_000)
            with pytest.raises(ShardkitError) as error:
                bucket.convert(source, **options)
        assert "larger than one request" in str(error.value)
        assert "--shard-size" in str(error.value)
        assert bool(bucket.objects()) == (module is stores)


def test_credentials_are_in_nothing_that_is_written(
    source: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    for name in ("put", "put_if"):
        real = getattr(storage, name)

        def spy(data: Any, *rest: Any, real: Any = real) -> Any:
            seen.append(data if isinstance(data, bytes) else data.read_bytes())
            return real(data, *rest)

        monkeypatch.setattr(storage, name, spy)
    bucket.convert(source)
    assert any(b'"recipe"' in data for data in seen)
    assert any(b'"pid"' in data for data in seen)
    assert not [data for data in seen if SECRET.encode() in data]


@pytest.mark.large
def test_scratch_of_killed_runs_is_removed(source: Path, bucket: Bucket, scratch: Path) -> None:
    script = (
        "import os; from shardkit.conversion.scratch import Scratch; one = Scratch();"
        "(one.path / 'x').touch(); print(one.path, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    left = Path(done.stdout.strip())
    assert (left / "x").exists()
    from shardkit.conversion.scratch import Scratch

    at_work = Scratch()
    assert not left.exists()
    bucket.convert(source)
    assert list(scratch.iterdir()) == [at_work.path]
    at_work.close()


# --- real processes


@pytest.mark.large
@pytest.mark.timeout(1800)
def test_kill_9_at_random_is_continued(tmp_path: Path, bucket: Bucket, scratch: Path) -> None:
    """Four kills of a conversion of photos from S3 to S3."""
    images = write_images(tmp_path / "in", classes=4, each=50, kilobytes=5)
    bucket.upload(images, "photos")
    convert(images, tmp_path / "whole", shard_size=50_000)
    reference = below(images, "photos") | below(tmp_path / "whole")
    url = bucket.store.url(bucket.name, "photos")
    command = [
        sys.executable, "-m", "shardkit", "convert", url, "--to", "wds", "-o", bucket.out,
        "--shard-size", "50kB", "--workers", "2", "--quiet", "--on-error", "skip",
    ]  # fmt: skip
    environ = {**os.environ, **bucket.store.environ()}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=environ, start_new_session=True, stderr=subprocess.PIPE
        )

    assert start().communicate()[1] == b""
    assert bucket.objects() == reference
    for key in below(tmp_path / "whole"):
        storage.delete(bucket.path(key))
    seed = random.randrange(10**9)
    dice, killed, unfinished = random.Random(seed), 0, 0
    print(f"seed {seed}")
    while killed < 4:
        process, done = start(), dice.randint(0, 16)  # of about 20 tasks
        while process.poll() is None and results(bucket) < done:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.3))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        process.communicate()
        if "out/__shardkit__/manifest.json" in bucket.objects():
            whole_or_no_dataset(bucket, below(tmp_path / "whole"))
            assert start().communicate()[1] == b""
            assert bucket.objects() == reference
            for key in below(tmp_path / "whole"):
                storage.delete(bucket.path(key))
        unfinished += any(key.startswith("out.partial/") for key in bucket.objects())
    assert start().communicate()[1] == b""
    assert bucket.objects() == reference
    assert list(scratch.iterdir()) == []
    print(f"{killed} kills, {unfinished} left work to continue")
    assert unfinished


def results(bucket: Bucket) -> int:
    """How many tasks of the unfinished run are done."""
    return sum(key.endswith("/result.zip") for key in bucket.store.keys(bucket.name))


@pytest.mark.large
def test_the_command_prints_the_url_and_json(source: Path, bucket: Bucket) -> None:
    command = [
        sys.executable, "-m", "shardkit", "convert", str(source), "--to", "wds", "-o", bucket.out,
        "--on-error", "skip", "--shard-size", "12kB",
    ]  # fmt: skip
    given = [f"--storage-option={name}={value}" for name, value in bucket.options.items()]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    for more in ([], ["--json"], ["--plan"]):
        done = subprocess.run(
            [*command, *more, *given], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert bucket.out in done.stdout
        assert SECRET not in done.stdout + done.stderr
        if more == ["--json"]:
            assert json.loads(done.stdout)["out"] == bucket.out
