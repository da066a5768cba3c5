"""`shardkit.convert`: same bytes every time (C1), no silent skips (C3), round trips (C4)."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import xxhash

import shardkit
from shardkit.conversion import convert as conversion
from shardkit.conversion import pool, read_ahead, run
from shardkit.conversion.folder import FolderPartial
from shardkit.conversion.target import default_output
from shardkit.errors import OutputError, SampleError, SourceError, UsageError, WorkerError
from shardkit.formats.arrow.reader import BatchReader
from shardkit.inspection.inspect import inspect
from shardkit.metadata.manifest import load
from shardkit.schema import Image
from shardkit.testing import assert_same, make_image
from tests.conftest import files_of, write_images
from tests.conversion.conftest import raised
from tests.peers import by_webdataset


def convert(source, out, to="wds", **options):
    return shardkit.convert(source, to, out, **{"workers": 0, **options})


def keys(path):
    with shardkit.open(path) as ds:
        return [ds[n]["__key__"] for n in range(len(ds))]


def lines_of(out, name="errors"):
    return [json.loads(s) for s in (out / f"__shardkit__/{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def many(tmp_path):
    """60 images of about 6 kB: several shards of 100 kB."""
    return write_images(tmp_path / "many", classes=4, each=15, kilobytes=5)


def test_c1_the_manifest_tells_the_dataset_and_not_where_the_source_lies(images, tmp_path):
    """C1: the same bytes wherever that is."""
    convert(images, tmp_path / "one")
    manifest = load(tmp_path / "one")
    assert (manifest.samples, manifest.label_counts) == (12, (4, 4, 4))
    assert manifest.classes == ("class0", "class1", "class2")
    sizes = sorted(path.stat().st_size for path in images.rglob("*.jpg"))
    stats = manifest.fields["image"]
    assert (stats.count, stats.bytes, stats.min, stats.max) == (12, sum(sizes), sizes[0], sizes[-1])
    assert abs(stats.median - sizes[5]) <= 0.01 * sizes[5]
    assert str(tmp_path) not in (tmp_path / "one/__shardkit__/manifest.json").read_text()
    for shard in manifest.shards:
        for file in (shard.file, *shard.beside):
            data = (tmp_path / "one" / file.name).read_bytes()
            assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (file.bytes, file.checksum)
    images = images.rename(tmp_path / "elsewhere")
    for path in images.rglob("*.jpg"):
        os.utime(path, (1, 1))
    convert(images, tmp_path / "two")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_shards_keep_their_limit_and_are_filled_evenly(many, tmp_path):
    convert(many, tmp_path / "out", shard_size="120kB")
    sizes = [shard.file.bytes for shard in load(tmp_path / "out").shards]
    assert max(sizes) <= 120_000
    assert len(sizes) == -(-sum(sizes) // 120_000)
    assert min(sizes) > 0.8 * max(sizes)
    convert(many, tmp_path / "count", shard_samples=7)
    assert [s.samples for s in load(tmp_path / "count").shards] == [7] * 8 + [4]


def test_a_sample_over_the_limit_gets_a_shard_of_its_own(images, out):
    (images / "class1/001.jpg").write_bytes(make_image() + bytes(50_000))
    convert(images, out, shard_size=20_000)
    assert [s.samples for s in load(out).shards if s.file.bytes > 20_000] == [1]
    assert keys(out) == [f"class{c}/{n:03d}" for c in range(3) for n in range(4)]


def test_limit_and_shuffle(many, tmp_path):
    convert(many, tmp_path / "plain", limit=10)
    assert keys(tmp_path / "plain") == [f"class0/{n:03d}" for n in range(10)]
    convert(many, tmp_path / "one", limit=30, shuffle=True)
    convert(many, tmp_path / "two", limit=30, shuffle=True, seed=1)
    one, two = keys(tmp_path / "one"), keys(tmp_path / "two")
    assert len(set(one)) == len(set(two)) == 30
    assert one != two
    assert len({key.split("/")[0] for key in one}) == 4


def test_a_shuffled_dataset_is_read_in_the_order_in_which_it_is_stored(tmp_path, monkeypatch):
    """Rows of columns are read by pages, of which random order would need another for each row."""
    samples = [{"text": f"sample {n}"} for n in range(500)]
    convert(samples, tmp_path / "in", "arrow", shard_size="8kB")
    assert shardkit.open(tmp_path / "in").shards > 1
    read, real = [], BatchReader.read

    def noted(self, position, *args, **more):
        read.append((self.path.name, position))
        return real(self, position, *args, **more)

    monkeypatch.setattr(BatchReader, "read", noted)
    convert(tmp_path / "in", tmp_path / "out", "arrow", shuffle=True)
    assert len(read) == 500
    assert read == sorted(read)
    monkeypatch.undo()
    texts = shardkit.open(tmp_path / "out").column("text")
    assert sorted(texts) == sorted(sample["text"] for sample in samples)
    moved = [int(text.split()[1]) for text in texts]
    assert sum(abs(n - at) for at, n in enumerate(moved)) > 500 * 100  # at random: 500 * 167


def test_a_shuffled_dataset_that_is_compressed_takes_no_more_memory(tmp_path, monkeypatch):
    """Its sizes are those of compressed samples: how much is read at a time is found by reading."""
    samples = [{"text": f"{n:05d}" + "a" * 40_000} for n in range(600)]
    convert(samples, tmp_path / "in", "parquet")
    assert (tmp_path / "in/shard-000000.parquet").stat().st_size < 1_000_000
    gathered, real = [], read_ahead._read

    def noted(*args):
        chunk = real(*args)
        gathered.append(sum(len(sample["text"]) for sample in chunk.samples))
        return chunk

    monkeypatch.setattr(read_ahead, "_read", noted)
    convert(tmp_path / "in", tmp_path / "out", "arrow", shuffle=True)
    assert sum(gathered) == 600 * 40_005
    assert max(gathered) <= 16 << 20
    assert sorted(shardkit.open(tmp_path / "out").column("text")) == [s["text"] for s in samples]


def test_splits_by_hash_are_stable_when_files_are_added(many, tmp_path):
    split = "train=0.7,val=0.2,test=0.1"
    result = convert(many, tmp_path / "out", split=split)
    assert list(result.splits) == ["train", "val", "test"]
    found = {name: keys(tmp_path / "out" / name) for name in result.splits}
    every = [f"class{c}/{n:03d}" for c in range(4) for n in range(15)]
    assert Counter(itertools.chain(*found.values())) == Counter(every)
    assert 30 < len(found["train"]) < 52
    (many / "class0/new.jpg").write_bytes(make_image())
    convert(many, tmp_path / "more", split=split)
    for name, before in found.items():
        assert set(before) <= set(keys(tmp_path / "more" / name))


def test_split_folders_become_datasets_published_together(tmp_path):
    write_images(tmp_path / "in/train", classes=2)
    write_images(tmp_path / "in/val", classes=3)
    result = convert(tmp_path / "in", tmp_path / "out")
    assert {name: split.samples for name, split in result.splits.items()} == {"train": 8, "val": 12}
    assert shardkit.open(tmp_path / "out/train").classes == ("class0", "class1", "class2")
    error = raised(shardkit.FormatError, "one dataset per split", shardkit.open, tmp_path / "out")
    assert str(tmp_path / "out/train") in str(error)
    assert list(convert(tmp_path / "out", tmp_path / "again").splits) == ["train", "val"]
    for name in ("train", "val"):
        assert keys(tmp_path / "again" / name) == keys(tmp_path / "out" / name)


def test_fields_get_other_names_and_a_dataset_that_is_open_is_a_source(images, tmp_path):
    convert(images, tmp_path / "out", rename={"image": "jpg", "label": "cls"})
    with shardkit.open(tmp_path / "out") as ds:
        assert list(ds.schema) == ["jpg", "cls"]
        assert ds[0] == {"__key__": "class0/000", "jpg": make_image(), "cls": 0}
        convert(ds, tmp_path / "copy")
    for name in ("out", "copy"):
        assert load(tmp_path / name).label_counts == (4, 4, 4)
        assert load(tmp_path / name).classes == ("class0", "class1", "class2")
    classes = inspect(tmp_path / "out/shard-000000.tar")["classes"]
    assert [entry["samples"] for entry in classes] == [4, 4, 4]
    raised(UsageError, "no field 'photo'", convert, images, tmp_path / "x", rename={"photo": "jpg"})


def test_c3_a_bad_sample_stops_the_run_and_is_named(images, out):
    (images / "class1/002.jpg").write_bytes(b"this is text, not an image")
    for workers in (0, 1):
        error = raised(SampleError, "not an image", convert, images, out, workers=workers)
        assert error.where["path"] == "class1/002.jpg"
        assert error.found == "text: 'this is text, not an ima'"
    assert not out.exists()


def test_c1_c3_any_number_of_workers_lists_skipped_samples_in_order(many, tmp_path):
    names = ["class0/000", "class1/002", "class3/014"]
    for name, data in zip(names, (b"", b"text", None), strict=True):
        path = many / f"{name}.jpg"
        path.write_bytes(data) if data is not None else (path.unlink(), path.symlink_to("nowhere"))
    for workers in (0, 2):
        options = {"on_error": "skip", "shard_size": "100kB", "workers": workers}
        result = convert(many, tmp_path / f"{workers}", **options)
        assert (result.samples, result.errors) == (57, 3)
        assert result.splits[""].shards >= 4
    assert files_of(tmp_path / "0") == files_of(tmp_path / "2")
    lines = lines_of(tmp_path / "0")
    assert [(line["source"], line["key"]) for line in lines] == [(f"{k}.jpg", k) for k in names]
    assert lines[0]["found"] == "an empty file (0 bytes)"
    assert str(tmp_path) not in str(lines)


@pytest.mark.parametrize(
    ("kind", "message", "named", "samples"),
    [
        ("loop of links", "leads back to a folder above", "loop", 12),
        ("name", "not valid Unicode", "class0/\udcff.jpg", 11),
    ],
)
def test_c3_paths_to_no_sample_stop_the_run_or_are_listed(
    images, out, kind, message, named, samples
):
    if kind == "name":
        os.rename(images / "class0/001.jpg", os.fsencode(images) + b"/class0/\xff.jpg")
    else:
        (images / "class0/loop").symlink_to("..")
    raised(SampleError if kind == "name" else SourceError, message, convert, images, out)
    result = convert(images, out, on_error="skip")
    assert (result.samples, result.errors) == (samples, 1)
    assert [line["source"] for line in lines_of(out)] == [named]


def test_names_that_keys_do_not_tell_and_the_text_of_json_are_kept(images, tmp_path):
    os.rename(images / "class0/001.jpg", images / "class0/a.b.c.jpg")
    (images / "class2/000.png").write_bytes(make_image(1, "PNG"))
    text = '{"b" : 1.50,\n "a":[ ] }'
    (images / "class0/000.json").write_text(text)
    for source, out in ((images, tmp_path / "one"), (tmp_path / "one", tmp_path / "two")):
        convert(source, out)
        assert lines_of(out, "keys") == [
            {"key": "class0/a_b_c", "path": "class0/a.b.c.jpg"},
            {"key": "class2/000~png", "path": "class2/000.png"},
        ]
        assert by_webdataset(out / "shard-000000.tar")[0]["json"].decode() == text


class Lazy:
    """A map-style dataset such as torch users write: no keys, numpy values."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        if index == 13:
            raise RuntimeError("thirteen")
        return {"image": make_image(index), "label": np.int64(index)}


def test_any_sequence_is_a_source(out):
    with pytest.raises(SampleError, match="the sequence raised RuntimeError: thirteen"):
        shardkit.convert(Lazy(), "wds", out)
    classes = [f"c{n}" for n in range(30)]
    result = shardkit.convert(Lazy(), "wds", out, on_error="skip", classes=classes)
    assert (result.samples, result.errors) == (29, 1)
    with shardkit.open(out) as ds:
        assert ds[13] == {"__key__": "000000014", "image": make_image(14), "label": 14}
        assert ds.schema["image"] == Image()
        assert ds.classes is not None


def test_a_sequence_goes_to_workers_if_asked_and_if_it_can(tmp_path):
    samples = [{"image": make_image(n), "label": n} for n in range(30)]
    samples[13]["label"] = "thirteen"
    for workers in (0, 1):
        options = {"on_error": "skip", "shard_samples": 5, "workers": workers}
        convert(samples, tmp_path / f"{workers}", **options)
    assert len(keys(tmp_path / "0")) == 29
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1")

    class Local(Lazy):
        pass

    with pytest.raises(WorkerError, match="cannot be sent to worker processes") as error:
        convert(Local(), tmp_path / "out", workers=1)
    assert "workers=0" in str(error.value)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "the sequence has no samples"),
        ([3], "an item is not a sample"),
        ([{"__key__": "", "label": 1}], "the key of a sample is not text"),
        ([{"label": {1, 2}}], "a type that no field can hold"),
        ([{"about": {"x": float("nan")}}], "dict with values not valid in JSON, such as NaN"),
        ([{"label": 1}, {"label": "x"}], "not of its field's type"),
        ([{"label": 1}, {}], "has no field 'label'"),
        ([{"label": 1}, {"label": 1, "more": 2}], "does not name: 'more'"),
    ],
)
def test_sequences_that_hold_no_samples_are_named(out, samples, message):
    raised((SampleError, SourceError), message, shardkit.convert, samples, "wds", out)


def test_a_key_of_two_samples_is_a_bad_sample(out):
    samples = [{"__key__": "a", "label": n} for n in range(2)]
    raised(SampleError, "two samples have the same key", shardkit.convert, samples, "wds", out)
    result = shardkit.convert(samples, "wds", out, on_error="skip")
    assert (result.samples, result.errors) == (1, 1)


def test_without_an_output_it_goes_beside_the_source(images, tmp_path):
    assert shardkit.convert(images, "wds", workers=0).out == str(tmp_path / "images-wds")
    shard = tmp_path / "images-wds/shard-000000.tar"
    assert default_output([shard], "wds") == shard.parent / "shard-000000-wds"
    assert default_output([Path(".")], "wds").name == f"{Path.cwd().name}-wds"
    raised(UsageError, "need an output", shardkit.convert, [{"label": 1}], "wds")


def test_the_same_run_again_is_complete_and_another_replaces_if_asked(images, tmp_path, out):
    out.mkdir()  # an empty folder is fine
    convert(images, out)
    before = files_of(out)
    again = convert(images, out)
    assert (again.already_complete, again.samples) == (True, 12)
    error = raised(OutputError, "holds another dataset", convert, images, out, shuffle=True)
    assert error.found == "shuffle was None, is 0"
    assert files_of(out) == before
    convert(images, out, shuffle=True, overwrite=True)
    convert(images, tmp_path / "fresh", shuffle=True)
    assert files_of(out) == files_of(tmp_path / "fresh")
    assert not (tmp_path / "out.partial").exists()


def test_what_is_no_dataset_is_never_replaced(images, tmp_path, out):
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    mine = tmp_path / "other.partial/dataset/precious.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(make_image())  # in a folder that is only called like unfinished work
    before = files_of(tmp_path)
    for more in ({}, {"overwrite": True}):
        error = raised(OutputError, "is not a dataset written by", convert, images, out, **more)
        assert error.found == "thesis.txt"
        raised(OutputError, "the output is a file", convert, images, tmp_path / "file", **more)
    raised(OutputError, "contains something else", convert, images, tmp_path / "other")
    assert files_of(tmp_path) == before


def test_output_and_source_do_not_lie_inside_one_another(images, tmp_path):
    (tmp_path / "link").symlink_to(images)
    shutil.copytree(images, tmp_path / "named.partial")
    before = files_of(tmp_path)
    for source, out in (
        *((images, "images/out"), (images, "images"), (images, ".")),
        *((tmp_path / "link", "images/x"), (tmp_path / "named.partial", "named")),
    ):
        raised(OutputError, "must not contain each other", convert, source, tmp_path / out)
    assert files_of(tmp_path) == before


def test_unfinished_work_of_other_options_or_files_is_not_touched(many, tmp_path, out):
    (many / "class0/000.txt").write_text("one")
    (many / "class3/014.jpg").write_bytes(b"text")
    options = {"shard_size": "100kB"}
    with pytest.raises(SampleError):
        convert(many, out, **options)
    partial = tmp_path / "out.partial"
    before = files_of(partial)
    assert any("result.json" in name for name in before)
    with pytest.raises(OutputError, match="unfinished conversion") as error:
        convert(many, out, shuffle=True, **options)
    assert error.value.found == "shuffle was None, is 0"
    for name, data in (("class0/000.txt", b"two"), ("class3/014.jpg", make_image())):
        path = many / name
        old, about = path.read_bytes(), path.stat()
        path.write_bytes(data)
        os.utime(path, (1, 1))
        error = raised(OutputError, "unfinished conversion", convert, many, out, **options)
        assert error.found == "the source has changed"
        path.write_bytes(old)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(SampleError):  # it goes on, and no further
        convert(many, out, **options)
    assert files_of(partial) == before
    raised(shardkit.FormatError, "unfinished conversion", shardkit.open, partial)
    convert(many, out, overwrite=True, on_error="skip", **options)
    assert not partial.exists()
    assert len(keys(out)) == 59


def changed(job, change):
    """The description of an unfinished conversion as another version has it."""
    versions = job["versions"]
    if change == "tasks":  # as 0.1.0 was before tasks were cut by their work
        return {**job, "versions": {n: v for n, v in versions.items() if n != "tasks"}}
    if change == "version":
        return {**job, "versions": {**versions, "shardkit": "99.0"}}
    recipe = job.pop("recipe")
    return {**job, "format": recipe["format"], "source": recipe["sources"], "options": recipe}


ANOTHER = r"unfinished conversion .* another version"
DAMAGED = r"(?s)description of an unfinished.*job\.json"


@pytest.mark.parametrize(
    ("change", "message", "found"),
    [
        ("tasks", ANOTHER, "tasks was None, is 2"),
        ("version", ANOTHER, f"shardkit was 99.0, is {shardkit.__version__}"),
        ("recipe", ANOTHER, None),
        *((data, DAMAGED, ...) for data in (b"", b"[1]", b"{")),
    ],
)
def test_unfinished_work_of_others_is_kept_until_overwrite(
    many, tmp_path, out, change, message, found
):
    partial = tmp_path / "out.partial"
    with pytest.MonkeyPatch.context() as patch:  # all tasks are done, and nothing is published
        patch.setattr("shardkit.conversion.run.assemble", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(many, out)
    if not isinstance(change, bytes):
        change = json.dumps(
            changed(json.loads((partial / "job.json").read_bytes()), change)
        ).encode()
    (partial / "job.json").write_bytes(change)
    before = {name: data for name, data in files_of(partial).items() if "lock" not in name}
    assert any(name.startswith("tasks/") for name in before)
    for part in (None, "1/1") if message == DAMAGED else (None,):
        error = raised(OutputError, message, convert, many, out, part=part)
        if message == ANOTHER:
            assert error.found == found
            assert error.fix == "start again with --overwrite"
        assert before.items() <= files_of(partial).items()
    convert(many, out, overwrite=True)
    assert len(keys(out)) == 60


def test_two_runs_do_not_work_on_one_output(images, out):
    plan = run.prepare(images, "wds", out)
    first = FolderPartial(plan.target)
    first.begin(plan.job, resume=True)
    raised(OutputError, "another run is working", convert, images, out)
    first.release()
    convert(images, out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": "many"}, "invalid size"),
        ({"shard_size": "1kB"}, "room for 4,096 bytes"),
        ({"shard_size": "1MB", "shard_samples": 3}, "cannot be combined"),
        ({"shard_samples": 0}, "shard_samples must be"),
        ({"workers": -1}, "workers must be"),
        ({"limit": 0}, "limit must be"),
        *(({"split": split}, "invalid split") for split in ("train=0.9,val=0.2", "x", "../a=1")),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"speed": 3}, "no option 'speed'"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_read(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        shardkit.convert(tmp_path / "not there", "wds", tmp_path / "out", **options)


def test_an_unknown_format_and_a_missing_source_are_named(tmp_path, images):
    for source, to, out, error, message in (
        (images, "zip", "out", UsageError, "no format 'zip'"),
        (tmp_path / "nothing", "wds", "out", FileNotFoundError, "no such file or folder"),
        (images / "class0/000.jpg", "wds", "out", shardkit.FormatError, "a single image"),
        (images, "wds", "a/b", OutputError, "would hold the output does not exist"),
    ):
        raised(error, message, convert, source, tmp_path / out, to)


def test_a_shard_is_another_source_than_the_next_and_may_not_be_missing(many, tmp_path):
    convert(many, tmp_path / "ds", shard_samples=20)
    before = files_of(tmp_path / "ds")
    first, second = (tmp_path / f"ds/shard-00000{n}.tar" for n in range(2))
    convert(first, tmp_path / "out")
    error = raised(OutputError, "holds another dataset", convert, second, tmp_path / "out")
    assert error.found == "the source has changed"
    second.unlink()
    with pytest.raises(OutputError, match="holds another dataset") as error:
        convert(many, tmp_path / "ds", shard_samples=20)
    assert "damaged" in str(error.value.found)
    convert(many, tmp_path / "ds", shard_samples=20, overwrite=True)
    assert files_of(tmp_path / "ds") == before


def test_an_archive_beside_class_folders_is_a_question_and_an_image_a_mistake(images, tmp_path):
    """Unless labels are not asked for."""
    archive = images / "download.tgz"
    archive.write_bytes(b"x")
    raised(UsageError, "both shards and what may be images", convert, images, tmp_path / "out")
    archive.unlink()
    (images / "preview.jpg").write_bytes(make_image())
    with pytest.raises(UsageError, match="there are images beside the class folders") as error:
        convert(images, tmp_path / "out")
    assert error.value.found == "preview.jpg"
    assert convert(images, tmp_path / "out", fields=["image"]).samples == 13
    for name in ("a", "b"):  # as many as class folders: an album, and no mistake
        (images / f"{name}.jpg").write_bytes(make_image())
    result = convert(images, tmp_path / "album")
    assert result.samples == 15
    assert result.notes == ["no labels from folders: 'a.jpg' lies beside them"]


def test_workers_that_cannot_be_started_end_the_run(images, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(WorkerError, match="cannot be started"):
        convert(images, tmp_path / "out", workers=2, shard_size=8000)


@pytest.mark.parametrize("options", [{}, {"split": "a=0.5,b=0.5"}, {"shard_size": 8000}])
def test_little_work_starts_no_process(images, out, monkeypatch, options):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert convert(images, out, workers=None, **options).samples == 12


@pytest.mark.parametrize("bad", [None, 0, -1])
def test_this_process_works_beside_one_worker_less(many, tmp_path, monkeypatch, bad):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a) or popen(*a, **k))
    monkeypatch.setattr("shardkit.options.processors", lambda: 2)
    for module in (pool, conversion):
        monkeypatch.setattr(module, "LITTLE", 0)
    if bad is not None:  # in the first task, which the worker gets, or in the last
        sorted(many.rglob("*.jpg"))[bad].write_bytes(b"no image")
        with pytest.raises(SampleError):
            convert(many, tmp_path / "out", workers=None, shard_size=100_000)
    else:
        convert(many, tmp_path / "out", workers=None, shard_size=100_000)
        convert(many, tmp_path / "alone", shard_size=100_000)
        assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")
    assert len(started) == 1


def test_a_glance_at_a_source_tells_whether_to_start_workers_early(images, monkeypatch):
    size = sum(path.stat().st_size for path in images.rglob("*.jpg"))
    assert not conversion._is_large([images], 2 * size)
    for source in (str(images), [images, images], "s3://bucket/photos", images / "*/*.jpg", [{}]):
        assert conversion._is_large(source, size // 2)
    monkeypatch.setattr(conversion, "_MANY", 3)
    assert conversion._is_large(images, 2 * size)


def test_x2_code_in_the_current_folder_is_not_run(images, tmp_path, monkeypatch):
    for name in ("pickle.py", "struct.py", "numpy.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    convert(images, tmp_path / "out", workers=1, shard_size=8000)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("to", "name", "found"),
    [
        ("wds", "x.lmdb", "a name of --to lmdb, and --to wds"),
        ("wds", "x.tar.gz", "a suffix of --to wds that is only read, not written"),
        ("lmdb", "x.TAR", "a name of --to wds, and --to lmdb"),
        ("lmdb", "data.mdb", "a suffix of --to lmdb that is only read, not written"),
        ("arrow", "x.feather", "a suffix of --to arrow that is only read, not written"),
        ("hf", "x.arrow", "a name of --to arrow, and --to hf"),
        ("beton", "x.bin", "a name of --to megatron, and --to beton"),
    ],
)
def test_an_output_is_not_called_like_a_file_of_another_format(images, tmp_path, to, name, found):
    error = raised(UsageError, "that of another kind of file", convert, images, tmp_path / name, to)
    assert error.found == found
    with pytest.raises(UsageError, match="that of another kind of file"):
        shardkit.create(tmp_path / name, to, {"image": Image()})
    assert not (tmp_path / name).exists()


def test_a_single_shard_of_a_format_that_cannot_join_is_refused(images, tmp_path):
    error = raised(
        UsageError, "is that of a single shard", convert, images, tmp_path / "x.mds", "mds"
    )
    assert error.found == "--to mds, which only writes folders"


def test_what_cannot_be_read_twice_is_nothing_to_compare_with(tmp_path):
    shardkit.convert([{"n": 1}], "wds", tmp_path / "out")
    for source in (({"n": n} for n in range(3)), iter([{"n": 1}]), {1}, 7):
        with pytest.raises(UsageError, match="sequence with a length") as caught:
            shardkit.verify(tmp_path / "out", against=source)
        assert "convert it to a list" in str(caught.value.fix)
    with pytest.raises(UsageError, match="sequence with a length"):
        shardkit.convert(7, "wds", tmp_path / "x")


def test_converting_images_loads_nothing_for_text_and_little_else(images, out):
    words = ["convert", str(images), "--to", "wds", "-o", str(out), "--quiet"]
    code = (
        f"import sys, shardkit.cli\nsys.argv[1:] = {words}\n"
        "try: shardkit.cli.main()\nfinally: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    others = {"shardkit.sources.text.scan", "zstandard", "pyarrow", "tokenizers", "numpy.ma"}
    assert not loaded & {*others, "importlib.metadata", "rich"}
    assert sum(name.startswith("shardkit.") for name in loaded) < 170  # half a millisecond each


def test_a_dataset_of_a_sequence_and_its_views_are_converted(tmp_path):
    samples = [{"__key__": f"k{n}", "label": n % 2, "x": np.full(2, n, "<f4")} for n in range(5)]
    schema = shardkit.Schema({"label": shardkit.Int(), "x": shardkit.Array("<f4", (2,))})
    names = {"label": ("even", "odd")}
    dataset = shardkit.Dataset.from_sequence(samples, schema, class_names=names)
    for number, every in enumerate(([0, 1, 2, 3, 4], [3, 4], [4, 0])):
        given = dataset.select(every) if number else dataset
        chosen = [samples[n] for n in every]
        out = tmp_path / f"{number}"
        for _ in range(2):  # the same samples cannot be recognized: they are converted again
            result = shardkit.convert(given, "wds", out, workers=0, overwrite=True)
            assert (result.samples, result.already_complete) == (len(chosen), False)
        found = shardkit.open(out)
        assert (found.schema, found.class_names) == (schema, names)
        for sample, expected in zip(found, chosen, strict=True):
            assert_same(sample, expected)
