"""Datasets written to stores: the same bytes as on a disk; whole or not there; continued."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest

import shardkit
from shardkit import ImageOptions
from shardkit.conversion import claim as claims
from shardkit.conversion import existing, run
from shardkit.conversion.bucket import Scratch
from shardkit.conversion.claim import Claim
from shardkit.errors import DamagedError, OutputError, ShardkitError, StorageError, UsageError
from shardkit.storage import fs
from shardkit.storage.remote import store as stores
from tests.conftest import IMAGE_FORMATS, write_images
from tests.conversion.deaths import Died
from tests.remote.buckets import Bucket, below
from tests.remote.conftest import EACH_STORE, renewed
from tests.remote.crashes import changes_to, resumed
from tests.remote.proxy import Rule


@pytest.fixture
def source(tmp_path):
    folder = write_images(tmp_path / "in", classes=2, each=4, kilobytes=2)
    (folder / "class0/a.b.jpg").write_bytes((folder / "class0/000.jpg").read_bytes())
    (folder / "class1/001.jpg").write_bytes(b"text")
    return folder


@pytest.fixture
def small(source):
    """Half of the images, for what goes on after each change of a run."""
    for path in source.rglob("00[23].jpg"):
        path.unlink()
    return source


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """A folder of each test's own for what is temporary on this machine."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def convert(source, out, to="wds", **options):
    options = {"workers": 0, "shard_size": 12_000, "on_error": "skip", **options}
    return shardkit.convert(source, to, out, **options)


def create(out, count=5, **options):
    schema = {"label": shardkit.Int()}
    with shardkit.create(out, "wds", schema, shard_samples=2, **options) as writer:
        for n in range(count):
            writer.write({"label": n})


def converted(source, bucket, *to, **options):
    """The run ends, and there is what one makes on a disk; what both of them return."""
    found = bucket.convert(source, *to, **options)
    given = {**options, "workers": 0, "overwrite": True}
    made = convert(source, source.parent / "reference", *to, **given)
    assert bucket.objects() == below(source.parent / "reference")
    return found, made


# --- the same bytes


@pytest.mark.parametrize("workers", [0, 2])
def test_a_conversion_makes_the_bytes_that_it_makes_on_a_disk(source, bucket, workers, scratch):
    found, made = converted(source, bucket, workers=workers)
    assert list(scratch.iterdir()) == []
    assert found.out == found.splits[""].path == bucket.out
    assert found.splits[""].errors_list == f"{bucket.out}/__shardkit__/errors.jsonl"
    assert (found.samples, found.bytes, found.errors) == (made.samples, made.bytes, made.errors)
    assert bucket.convert(source).already_complete
    assert len(bucket.open("out")) == 8
    assert shardkit.verify(bucket.out, source, storage_options=bucket.options).sound
    with pytest.raises(OutputError, match="the output exists and holds another dataset") as error:
        bucket.convert(source, shuffle=True)
    assert "shuffle was None" in str(error.value)


SPLIT = {"split": "train=0.6,val=0.4"}


@pytest.mark.parametrize(
    "options",
    [SPLIT, {**SPLIT, "beside": ["dali", "energon", "wids"]}, {"shuffle": True}],
    ids=["splits", "files for other loaders", "shuffled"],
)
def test_options_make_what_they_make_on_a_disk_and_what_was_there_goes(options, source, bucket):
    for more in (options, {"overwrite": True}):
        converted(source, bucket, **more)
    assert shardkit.verify(bucket.out, storage_options=bucket.options).sound


def test_every_store_is_written(store, source, monkeypatch):
    """Puts, copies, removals and claims; no request has a condition that a store ignores."""
    bucket, seen = Bucket(store), []
    for name in ("put", "put_if"):
        real = getattr(fs, name)

        def spy(data, *rest, real=real):
            seen.append(data if isinstance(data, bytes) else data.read_bytes())
            return real(data, *rest)

        monkeypatch.setattr(fs, name, spy)
    for shuffle in (False, True):
        converted(source, bucket, overwrite=shuffle, shuffle=shuffle)
    assert any(b'"recipe"' in data for data in seen)
    assert any(b'"pid"' in data for data in seen)
    secrets = [word.encode() for word in bucket.options.values() if re.search("test|==$", word)]
    assert secrets
    assert not [data for data in seen if any(secret in data for secret in secrets)]
    with pytest.raises(UsageError, match="there is no such bucket"):
        convert(source, store.url("nothing-here", "out"), storage_options=store.options())


def test_the_environment_is_enough(store, monkeypatch):
    for name, value in store.environ().items():
        monkeypatch.setenv(name, value)
    url = store.url(store.bucket(), "out")
    create(url)
    assert shardkit.open(url)[3]["label"] == 3


@pytest.fixture
def small_tasks(monkeypatch):
    for name in ("_COPIED_BYTES", "_LEAST_WORK"):
        monkeypatch.setattr(f"shardkit.conversion.cuts.{name}", 8_000)


JOINED = {"shard_size": None, "image": ImageOptions(resize=16)}


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize(  # a store sees no formats, only files that are put and copied
    "format",
    [pytest.param(n, marks=[] if n == "lmdb" else pytest.mark.large) for n in IMAGE_FORMATS],
)
def test_shards_that_are_joined(format, source, bucket):
    converted(source, bucket, format, **JOINED)


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("format", ["wds", pytest.param("beton", marks=pytest.mark.large)])
def test_an_output_that_is_one_shard(format, source, tmp_path, bucket):
    name = {"wds": "train.tar", "beton": "train.beton"}[format]
    (tmp_path / "local").mkdir()
    bucket.put({"sets/other.txt": b"x"})
    more = {"shard_size": None, "shuffle": True, "overwrite": True}
    more["beside"] = ["dali", "wids"] if format == "wds" else []
    for seed in (1, 2):  # the second replaces the first
        convert(source, tmp_path / "local" / name, format, seed=seed, **more)
        given = {"storage_options": bucket.options, "seed": seed, **more}
        convert(source, bucket.url(f"sets/{name}"), format, **given)
        assert bucket.objects() == below(tmp_path / "local", "sets") | {"sets/other.txt": b"x"}
    assert len(bucket.open(f"sets/{name}")) == 8


@EACH_STORE
def test_create(tmp_path, bucket):
    for count in (5, 3):
        create(tmp_path / "local", count, overwrite=count == 3)
        create(bucket.out, count, storage_options=bucket.options, overwrite=count == 3)
        assert bucket.objects() == below(tmp_path / "local")
    with pytest.raises(OutputError, match="the output exists"):
        create(bucket.out, storage_options=bucket.options)
    bucket.clear()

    def fail():
        options = {"shard_samples": 1, "storage_options": bucket.options}
        with shardkit.create(bucket.out, "wds", {"label": shardkit.Int()}, **options) as writer:
            for n in range(3):
                writer.write({"label": n})
            assert any("shard-000000.tar" in key for key in bucket.listed())
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert bucket.listed() == [], "an error in the block leaves nothing"


@pytest.mark.parametrize("name", ["out", "out.tar"])
def test_a_dataset_that_comes_while_a_run_works_is_refused(source, tmp_path, bucket, name):
    more = {"shard_size": None, "storage_options": bucket.options}
    url, coming = bucket.url(f"sets/{name}"), ["other"]
    for folder, shuffle in (("other", True), ("fresh", False)):
        (tmp_path / folder).mkdir()
        convert(source, tmp_path / folder / name, shard_size=None, shuffle=shuffle)

    def come(what):
        if what.endswith("result.zip") and coming:
            bucket.put(tmp_path / coming.pop(), "sets/")

    with (
        changes_to(bucket, come),
        pytest.raises(OutputError, match="put at the output while this run was") as error,
    ):
        convert(source, url, **more)
    assert str(error.value.fix).endswith(f"/sets/{name}.partial")
    found = bucket.objects()
    work = {key for key in found if key.startswith(f"sets/{name}.partial/")}
    assert any(key.endswith("result.zip") for key in work)
    others = {key: data for key, data in found.items() if key not in work}
    assert others == below(tmp_path / "other", "sets")
    convert(source, url, overwrite=True, **more)
    assert bucket.objects() == below(tmp_path / "fresh", "sets")


# --- runs that die


def whole_or_no_dataset(bucket, *datasets):
    """Whether there is a dataset, which then is one of these; else nothing opens."""
    keys = bucket.listed()
    if "out/__shardkit__/manifest.json" in keys:
        out = {key: data for key, data in bucket.objects().items() if key.startswith("out/")}
        out.pop("out/__shardkit__/unfinished.json", None)
        assert out in datasets
        return True
    for name in ("out", "out.partial"):
        if any(key.startswith(f"{name}/") for key in keys):
            with pytest.raises(ShardkitError):
                bucket.open(name)
    return False


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("format", ["wds", pytest.param("lmdb", marks=pytest.mark.large)])
def test_a_run_that_dies_anywhere_is_continued(format, small, tmp_path, bucket, large):
    """Also one that joins shards."""
    options = JOINED if format == "lmdb" else {}
    convert(small, tmp_path / "reference", format, **options)
    reference = below(tmp_path / "reference")
    few = ["put result.zip", "copy .tar", "put errors.jsonl", "delete job.json"]
    begun = resumed(
        bucket, lambda: bucket.convert(small, format, **options), None if large else few
    )
    for _ in begun:
        whole_or_no_dataset(bucket, reference)
        bucket.convert(small, format, **options)
        assert bucket.objects() == reference


@pytest.mark.large
@pytest.mark.parametrize("size", [8_000, 16_000], ids=["another", "of the same recipe"])
def test_replacing_a_dataset_that_dies_anywhere_is_never_a_mixture(small, tmp_path, bucket, size):
    convert(small, tmp_path / "old", shard_size=size)
    data = bytearray((small / "class0/000.jpg").read_bytes())
    data[-10] ^= 1
    (small / "class0/000.jpg").write_bytes(data)
    convert(small, tmp_path / "new", shard_size=16_000)
    old, new = below(tmp_path / "old"), below(tmp_path / "new")
    assert old != new
    assert size == 16_000 or old.keys() - new.keys()

    def replace():
        bucket.convert(small, shard_size=16_000, overwrite=True)

    bucket.put(old)
    seen = set()
    for _ in resumed(bucket, replace):
        seen.add(whole_or_no_dataset(bucket, old, new))
        replace()
        assert bucket.objects() == new
    assert seen == {True, False}


def test_create_that_dies_anywhere_begins_again(tmp_path, bucket, large):
    create(tmp_path / "reference")
    reference = below(tmp_path / "reference")

    def make(**more):
        create(bucket.out, storage_options=bucket.options, **more)

    few = ["put .tar", "copy .tar", "put manifest.json"]
    for _ in resumed(bucket, make, None if large else few):
        make(overwrite=whole_or_no_dataset(bucket, reference))
        assert bucket.objects() == reference


def test_a_dataset_of_an_earlier_version_is_replaced_manifests_first(source, tmp_path, bucket):
    folders, done = ("out", "out/train", "out/val"), []
    convert(source, tmp_path / "out", **SPLIT)
    for folder in folders:
        path = tmp_path / folder
        (path / "__shardkit__/manifest.json").rename(path / "shardkit.json")
    bucket.put(tmp_path / "out", "out/")
    old = {f"delete {key}" for key in bucket.listed()}
    with changes_to(bucket, done.append):
        converted(source, bucket, overwrite=True)
    first = [what for what in done if what in old][:3]
    assert first[0] == "delete out/shardkit.json"
    assert {*first} == {f"delete {folder}/shardkit.json" for folder in folders}
    marks = {f"put {folder}/__shardkit__/unfinished.json" for folder in folders}
    assert marks <= {*done[: done.index(first[0])]}


def stop_in_work(bucket, source, **options):
    """A conversion that dies when two tasks are done."""
    done = []

    def count(what):
        done.append(what)
        if sum(what.endswith("result.zip") for what in done) == 2:
            raise Died

    with changes_to(bucket, count), pytest.raises(Died):
        bucket.convert(source, **options)
    assert not list(Path(tempfile.gettempdir()).iterdir())


@pytest.mark.filterwarnings("ignore:.* was claimed by a run on")
@EACH_STORE
def test_work_that_is_done_is_not_done_again_on_another_machine_either(source, bucket, monkeypatch):
    stop_in_work(bucket, source)
    monkeypatch.setattr(claims, "machine", lambda: "another")
    monkeypatch.setattr(claims, "_watched", lambda path, *found: found)  # nothing happens
    before = {key for key in bucket.listed() if key.endswith("result.zip")}
    puts = []
    with changes_to(bucket, puts.append):
        converted(source, bucket)
    made = {f"put {key}" for key in before}
    assert any(what.endswith("result.zip") for what in puts)
    assert made.isdisjoint(puts)


@pytest.mark.parametrize("missing", ["result", "shards"])
def test_a_result_that_is_missing_is_made_again(missing, source, bucket, monkeypatch):
    """In a listing; or its shards, as after a run that was killed while it removed another's."""
    stop_in_work(bucket, source)
    if missing == "shards":
        bucket.delete(*(k for k in bucket.listed() if k.endswith("/000000/shard-000000.tar")))
    else:
        real = stores.Store.keys
        monkeypatch.setattr(
            stores.Store,
            "keys",
            lambda self, at: [k for k in real(self, at) if "/000000/" not in k],
        )  # fmt: skip
    converted(source, bucket)  # what it knows of is removed


def test_a_run_of_other_options_is_refused_and_begins_again_with_overwrite(source, bucket):
    stop_in_work(bucket, source)
    before = bucket.objects()
    with pytest.raises(OutputError, match="unfinished conversion to this output") as error:
        bucket.convert(source, shuffle=True)
    assert "shuffle was None, is 0" in str(error.value)
    assert f"{bucket.out}.partial" in str(error.value)
    assert bucket.objects() == before
    converted(source, bucket, shuffle=True, overwrite=True)


def test_samples_that_were_dropped_are_read_again_where_none_may_be(source, bucket):
    (source / "class1/001.jpg").unlink()
    bad = source / "class0/001.jpg"
    good, time_ns = bad.read_bytes(), bad.stat().st_mtime_ns

    def fill(data):
        bad.write_bytes(data)
        os.utime(bad, ns=(time_ns, time_ns))

    fill(bytes(len(good)))
    stop_in_work(bucket, source)
    fill(good)
    converted(source, bucket, on_error="fail")
    assert len(bucket.open("out")) == 8


@EACH_STORE
def test_names_in_a_mark_stay_in_the_output(source, tmp_path, bucket):
    """X3: what it names is removed before the new dataset is copied."""
    kept = dict.fromkeys(["kept.txt", "out2/kept.txt"], b"x")
    names = ["../kept.txt", "/kept.txt", "x/../../out2/kept.txt", "..", "", "left.tar"]
    mark = json.dumps({"names": names}).encode()
    bucket.put({**kept, "out/left.tar": b"x", "out/__shardkit__/unfinished.json": mark})
    bucket.convert(source)
    convert(source, tmp_path / "reference")
    assert bucket.objects() == below(tmp_path / "reference") | kept


def test_a_result_that_is_damaged_is_named(source, bucket, scratch):
    """Also one whose names lead out, and one that is compressed."""
    stop_in_work(bucket, source)
    key = next(key for key in bucket.listed() if key.endswith("000000/result.zip"))
    damaged = [io.BytesIO(b"junk"), io.BytesIO(), io.BytesIO()]
    with zipfile.ZipFile(damaged[1], "w") as archive:
        archive.writestr("../../../stray", b"{}")
    with zipfile.ZipFile(damaged[2], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("result.json", b"{}")
    for packed in damaged:
        bucket.put({key: packed.getvalue()})
        with pytest.raises(DamagedError) as error:
            bucket.convert(source)
        assert str(error.value.where["path"]) == bucket.url(key)
        assert not list(scratch.parent.rglob("stray"))


def test_a_key_in_two_shards_is_named(bucket):
    samples = [{"__key__": key, "label": 1} for key in "abcdefgb"]
    options = {"shard_samples": 2, "shard_size": None, "on_error": "fail"}
    with pytest.raises(shardkit.SampleError, match="two samples have the same key") as error:
        bucket.convert(samples, schema={"label": shardkit.Int()}, **options)
    assert error.value.where["key"] == "b"


# --- two runs


def test_an_output_that_another_run_completes_meanwhile(source, bucket, monkeypatch):
    real = existing.is_complete

    def late(*what):
        found = real(*what)
        monkeypatch.setattr(existing, "is_complete", real)
        bucket.convert(source)
        return found

    monkeypatch.setattr(existing, "is_complete", late)
    with pytest.raises(OutputError, match="another run created or replaced") as error:
        bucket.convert(source)
    assert "repeat the command" in (error.value.fix or "")
    bucket.convert(source)


@pytest.mark.filterwarnings("error::shardkit.ShardkitWarning")
def test_a_claim_is_taken_from_a_dead_run_only(store, monkeypatch):
    bucket, slept = Bucket(store), []
    path = bucket.path("out.partial/run.json")
    first = Claim.take(path)
    for _ in range(3):
        renewed(first)
    monkeypatch.setattr(claims, "machine", lambda: "another")
    monkeypatch.setattr("time.sleep", slept.append)
    with pytest.warns(shardkit.ShardkitWarning, match="was claimed by a run on .* up to 30 s"):
        second = Claim.take(path)
    assert sum(slept) == pytest.approx(3 * claims.BEAT)
    with pytest.raises(OutputError, match="another run has taken over this output"):
        renewed(first)
    first.release()
    with pytest.raises(OutputError):
        first.remove()
    second.check()
    second.release()
    Claim.take(path).remove()  # at once
    assert bucket.objects() == {}


def test_a_claim_is_renewed_while_its_run_works(bucket, monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.001)
    claim = Claim.take(bucket.path("out.partial/run.json"))
    for _ in range(3):
        before = bucket.get("out.partial/run.json")
        while bucket.get("out.partial/run.json") == before:  # the limit of a test ends this
            pass
    claim.remove()


@pytest.mark.filterwarnings("error::shardkit.ShardkitWarning")
def test_a_run_of_this_machine_that_was_killed_is_known_at_once(bucket):
    child = os.fork()
    if not child:
        Claim.take(bucket.path("out.partial/run.json"))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    Claim.take(bucket.path("out.partial/run.json")).remove()


@EACH_STORE
def test_a_run_whose_claim_was_taken_publishes_nothing(source, bucket):
    def taken(what):
        if what.startswith("copy "):
            claims.BEAT = 0  # it stood still for long; `changes_to` sets it back
            bucket.put({"out.partial/run.json": b'{"run": "another"}'})

    with changes_to(bucket, taken), pytest.raises(OutputError, match="taken over this output"):
        bucket.convert(source)
    assert bucket.get("out.partial/run.json") == b'{"run": "another"}'
    assert not whole_or_no_dataset(bucket)


def test_a_run_that_another_one_overtakes_before_it_begins_finds_out(
    source, tmp_path, bucket, monkeypatch
):
    real = Claim.take

    def take(path):
        convert(source, tmp_path / "other", shuffle=True)
        bucket.put(tmp_path / "other", "out/")
        return real(path)

    monkeypatch.setattr(Claim, "take", take)
    with pytest.raises(OutputError, match="another run has just written to this output"):
        bucket.convert(source)
    bucket.delete("out.partial/run.json")
    assert bucket.objects() == below(tmp_path / "other")


@EACH_STORE
def test_a_claim_whose_answer_is_lost_is_held(own, monkeypatch):
    """Also where none came for longer than is waited for."""
    lost, real = Rule(method="PUT", match="run.json", times=1, reset_after=0), fs.put_if
    own.proxy.add(lost)
    claim = Claim.take(own.path("out.partial/run.json"))
    own.proxy.clear()
    own.proxy.add(lost)
    renewed(claim)

    def never(*what):
        real(*what)
        monkeypatch.setattr(fs, "put_if", real)
        raise StorageError("no answer")

    monkeypatch.setattr(fs, "put_if", never)
    with pytest.raises(StorageError):
        renewed(claim)
    renewed(claim)
    claim.remove()
    assert own.objects() == {}


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_store_that_ignores_conditions_is_refused(taken_over, source, bucket, monkeypatch):
    """Also If-Match alone: else a run could renew a claim that another has taken over."""
    path, real = bucket.path("out.partial/run.json"), stores.Store.put_if
    if taken_over:
        Claim.take(path).release()

    def put_if(self, key, data, tag):
        if tag is not None or not taken_over:
            self.delete(key)
        return real(self, key, data, None)

    monkeypatch.setattr(stores.Store, "put_if", put_if)
    with pytest.raises(StorageError, match="ignores the conditions of requests") as error:
        bucket.convert(source)
    assert "write to a path on this machine" in str(error.value)
    assert bucket.objects() == {}


def test_a_run_of_another_user_is_not_believed_dead(bucket, monkeypatch):
    """Whose processes may be hidden."""
    claim = Claim.take(bucket.path("out.partial/run.json"))
    about = json.loads(bucket.get("out.partial/run.json"))
    dead = json.dumps({**about, "pid": 1, "started": "never"}).encode()
    assert claims.is_over(dead)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not claims.is_over(dead)
    claim.remove()


@EACH_STORE
def test_faults_of_the_network_change_nothing(source, tmp_path, own):
    own.proxy.add(
        Rule(method="PUT", match="shard-", skip=1, times=1, status=503),
        Rule(method="PUT", match="shard-", skip=3, times=1, refuse=True),
        Rule(method="PUT", match="result.zip", times=1, reset_after=0),
        Rule(method="PUT", match="manifest.json", times=1, reset_after=0),
        Rule(method="DELETE", skip=2, times=2, status=500),
    )
    converted(source, own)


def test_requests_are_not_repeated_after_ctrl_c():
    """Which else waits for minutes, where nothing answers."""
    attempts, began = [], threading.Event()

    def request():
        attempts.append(1)
        began.set()
        assert stores._batch.over.wait(60)
        raise stores.PassingError(StorageError("the store cannot be reached"))

    def interrupt(item):
        assert began.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stores.together(
            lambda item: stores._patiently(request) if item else None, [0, 1], interrupt
        )
    assert len(attempts) == 1


def test_each_of_many_items_is_worked_on_once_and_reported():
    worked, reported = [], []
    stores.together(worked.append, range(20_000), reported.append)
    assert sorted(worked) == sorted(reported) == [*range(20_000)]


def command(source, out, *more):
    return [
        sys.executable, "-m", "shardkit", "convert", str(source), "--to", "wds", "-o", out,
        "--on-error", "skip", "--shard-size", "12kB", *more,
    ]  # fmt: skip


@pytest.mark.large
@pytest.mark.parametrize("match", [r"/out\.partial/.*shard-", "/out/shard-"], ids=["put", "copy"])
def test_ctrl_c_does_not_wait_for_a_long_request(match, source, own):
    """Neither for an upload nor for a copy: what they were to make is not made."""
    own.proxy.add(Rule(method="PUT", match=match, hold=True))
    words = command(source, own.out, "--workers", "0")
    program = (
        "from shardkit.storage.remote import store; store._EXIT_SECONDS = 1.0\n"
        "from shardkit.cli import main; main()"
    )
    words[1:3] = ["-c", program]
    environ = {**os.environ, **own.environ}
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as process:
        own.proxy.wait("PUT", match)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=100)
    own.proxy.clear()
    assert process.returncode == 130
    assert "waiting up to 1 s for pending requests" in told
    assert ("publishing: " in told) == ("partial" not in match)
    assert not [key for key in own.listed() if re.search(match, f"/{key}")]
    converted(source, own)  # goes on at once, as the run has said that it ended


# --- what is refused


def test_other_urls_and_whole_buckets_are_not_written(source, bucket):
    for url in ("https://example.org/x", "memory://x", "hf://datasets/a/b"):
        for call in (lambda url=url: convert(source, url), lambda url=url: create(url)):
            with pytest.raises(UsageError, match="cannot write to this") as error:
                call()
            assert "then copy the result to the URL" in str(error.value.fix)
    with pytest.raises(UsageError, match="the output is a whole bucket") as error:
        convert(source, bucket.url(), storage_options=bucket.options)
    assert f"give a folder in it: {bucket.url()}/NAME" in str(error.value)


def test_a_store_that_refuses(source, own):
    for status, code, words in (
        (403, "AccessDenied", "the store does not allow writing here"),
        (400, "ExpiredToken", "the credentials have expired"),
    ):
        own.proxy.clear()
        own.proxy.add(Rule(method="PUT", status=status, body=f"<Error><Code>{code}</Code></Error>"))
        with pytest.raises(StorageError, match=words) as error:
            own.convert(source)
        assert "testtoken" not in repr(error.value) + str(error.value)
        assert own.out in str(error.value)


@EACH_STORE
def test_objects_of_others_are_left(source, bucket):
    for keys, words in (
        (["out", "out/x"], "the output is a file"),
        (["out/theirs.txt"], "not a dataset written by shardkit"),
        (["out.partial/theirs.txt"], "contains something else"),
    ):
        bucket.clear()
        bucket.put(dict.fromkeys(keys, b"x"))
        for overwrite in (False, True):
            with pytest.raises(OutputError, match=words) as error:
                bucket.convert(source, overwrite=overwrite)
            assert "theirs.txt" in str(error.value) or keys[0] == "out"
        assert bucket.listed() == keys


def test_an_output_in_the_source(source, tmp_path, bucket):
    convert(source, tmp_path / "first")
    bucket.put(tmp_path / "first", "in/first/")
    given = {"storage_options": bucket.options}
    for out in ("in/first/deep", "in/first", "in"):
        with pytest.raises(OutputError, match="must not contain each other"):
            shardkit.convert(bucket.url("in/first"), "arrow", bucket.url(out), **given)


def test_a_shard_that_no_request_can_carry(source, bucket, monkeypatch):
    cases = [
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
        assert bool(bucket.listed()) == (module is stores)


# --- real processes


@pytest.mark.large
def test_a_process_that_is_killed_is_continued(tmp_path, source, own, scratch):
    """From a store to a store, in its first and its last put of a shard, in copies and at the end;
    its folder on this machine goes too."""
    convert(source, tmp_path / "whole")
    at_work = Scratch()  # of another run, which stays
    own.put(source, "photos/")
    reference = below(source, "photos") | below(tmp_path / "whole")
    words = command(own.url("photos"), own.out, "--quiet", "--workers", "2")
    environ = {**os.environ, **own.environ}
    for match, skip in (
        (r"/out\.partial/.*shard-", 0), (r"/out\.partial/.*result", 2), ("/out/shard-", 1),
        ("/out/__shardkit__/manifest.json", 0),
    ):  # fmt: skip
        own.proxy.clear()
        own.proxy.add(Rule(method="PUT", match=match, skip=skip, hold=True))
        with subprocess.Popen(words, env=environ, start_new_session=True) as process:
            own.proxy.wait("PUT", match, skip + 1)
            os.killpg(process.pid, signal.SIGKILL)
        words[-1] = "0"
        own.proxy.clear()
        assert not whole_or_no_dataset(own)
        assert len([*scratch.iterdir()]) > 1
    done = subprocess.run(words, env=environ, check=True, stderr=subprocess.PIPE)
    assert done.stderr == b""
    assert own.objects() == reference
    assert list(scratch.iterdir()) == [at_work.path]
    at_work.close()
