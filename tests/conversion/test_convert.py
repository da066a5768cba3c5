"""`shardkit.convert`: same bytes every time (C1), no silent skips (C3), round trips (C4)."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit import ConvertOptions
from shardkit.conversion import read_ahead, run
from shardkit.conversion.target import default_output
from shardkit.errors import (
    OutputError,
    SampleError,
    ShardkitWarning,
    SourceError,
    StorageError,
    UsageError,
    WorkerError,
)
from shardkit.formats.arrow.reader import BatchReader
from shardkit.inspection import inspect
from shardkit.manifest import load
from shardkit.schema import Image
from shardkit.testing import EVERYTHING, assert_same, everything, make_image
from tests.conftest import files_of, write_images
from tests.peers import by_webdataset


def keys(path: Path) -> list[str]:
    with shardkit.open(path) as ds:
        return [ds[n]["__key__"] for n in range(len(ds))]


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """60 images of about 6 kB: several shards of 100 kB."""
    return write_images(tmp_path / "many", classes=4, each=15, kilobytes=5)


def test_c1_the_same_bytes_for_any_number_of_workers(many: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shard_size": "100kB", "shuffle": True, "seed": 3}
    for workers in (0, 3):
        result = shardkit.convert(many, "wds", tmp_path / f"{workers}", workers=workers, **options)
        assert result.samples == 60
        assert result.splits[""].shards >= 4
        assert files_of(tmp_path / f"{workers}") == files_of(tmp_path / "0")


def test_c1_the_same_bytes_wherever_the_source_lies(many: Path, tmp_path: Path) -> None:
    shardkit.convert(many, "wds", tmp_path / "one", workers=0)
    os.rename(many, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").rglob("*.jpg"):
        os.utime(path, (1, 1))
    shardkit.convert(tmp_path / "elsewhere", "wds", tmp_path / "two", workers=0)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_the_manifest_says_what_the_dataset_is(images: Path, tmp_path: Path) -> None:
    shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    manifest = load(tmp_path / "out")
    assert manifest.samples == 12
    assert manifest.classes == ("class0", "class1", "class2")
    assert manifest.label_counts == (4, 4, 4)
    sizes = sorted(path.stat().st_size for path in images.rglob("*.jpg"))
    stats = manifest.fields["image"]
    assert (stats.count, stats.bytes, stats.min, stats.max) == (12, sum(sizes), sizes[0], sizes[-1])
    assert abs(stats.median - sizes[5]) <= 0.01 * sizes[5]
    text = (tmp_path / "out" / "__shardkit__/manifest.json").read_text()
    assert str(tmp_path) not in text
    import xxhash

    for shard in manifest.shards:
        for file in (shard.file, *shard.beside):
            data = (tmp_path / "out" / file.name).read_bytes()
            assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (file.bytes, file.checksum)


def test_shards_keep_their_limit_and_are_filled_evenly(many: Path, tmp_path: Path) -> None:
    shardkit.convert(many, "wds", tmp_path / "out", shard_size="120kB", workers=0)
    sizes = [shard.file.bytes for shard in load(tmp_path / "out").shards]
    assert max(sizes) <= 120_000
    assert len(sizes) == -(-sum(sizes) // 120_000)
    assert min(sizes) > 0.8 * max(sizes)
    shardkit.convert(many, "wds", tmp_path / "count", shard_samples=7, workers=0)
    assert [s.samples for s in load(tmp_path / "count").shards] == [7] * 8 + [4]


def test_a_sample_over_the_limit_gets_a_shard_of_its_own(images: Path, tmp_path: Path) -> None:
    (images / "class1/001.jpg").write_bytes(make_image() + bytes(50_000))
    shardkit.convert(images, "wds", tmp_path / "out", shard_size=20_000, workers=0)
    shards = load(tmp_path / "out").shards
    assert [s.samples for s in shards if s.file.bytes > 20_000] == [1]
    assert keys(tmp_path / "out") == [f"class{c}/{n:03d}" for c in range(3) for n in range(4)]


def test_limit_and_shuffle(many: Path, tmp_path: Path) -> None:
    shardkit.convert(many, "wds", tmp_path / "plain", limit=10, workers=0)
    assert keys(tmp_path / "plain") == [f"class0/{n:03d}" for n in range(10)]
    shardkit.convert(many, "wds", tmp_path / "one", limit=30, shuffle=True, workers=0)
    shardkit.convert(many, "wds", tmp_path / "two", limit=30, shuffle=True, seed=1, workers=0)
    one, two = keys(tmp_path / "one"), keys(tmp_path / "two")
    assert len(set(one)) == len(set(two)) == 30
    assert one != two
    assert len({key.split("/")[0] for key in one}) == 4


def test_a_shuffled_dataset_is_read_in_the_order_in_which_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of columns are read by pages, of which random order would need another for each row."""
    samples = [{"text": f"sample {n}"} for n in range(500)]
    shardkit.convert(samples, "arrow", tmp_path / "in", shard_size="8kB", workers=0)
    assert shardkit.open(tmp_path / "in").shards > 1
    read, real = [], BatchReader.read

    def noted(self: BatchReader, position: int, *args: Any, **more: Any) -> Any:
        read.append((self.path.name, position))
        return real(self, position, *args, **more)

    monkeypatch.setattr(BatchReader, "read", noted)
    shardkit.convert(tmp_path / "in", "arrow", tmp_path / "out", shuffle=True, workers=0)
    assert len(read) == 500
    assert read == sorted(read)
    monkeypatch.undo()
    texts = shardkit.open(tmp_path / "out").column("text")
    assert sorted(texts) == sorted(sample["text"] for sample in samples)
    moved = [int(text.split()[1]) for text in texts]
    assert sum(abs(n - at) for at, n in enumerate(moved)) > 500 * 100  # at random: 500 * 167


def test_a_shuffled_dataset_that_is_compressed_takes_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sizes are those of compressed samples: how much is read at a time is found by reading."""
    samples = [{"text": f"{n:05d}" + "a" * 40_000} for n in range(600)]
    shardkit.convert(samples, "parquet", tmp_path / "in", workers=0)
    assert (tmp_path / "in/shard-000000.parquet").stat().st_size < 1_000_000
    gathered, real = [], read_ahead._read

    def noted(*args: Any) -> Any:
        chunk = real(*args)
        gathered.append(sum(len(sample["text"]) for sample in chunk.samples))
        return chunk

    monkeypatch.setattr(read_ahead, "_read", noted)
    shardkit.convert(tmp_path / "in", "arrow", tmp_path / "out", shuffle=True, workers=0)
    assert sum(gathered) == 600 * 40_005
    assert max(gathered) <= 16 << 20
    assert sorted(shardkit.open(tmp_path / "out").column("text")) == [s["text"] for s in samples]


def test_splits_by_hash_are_stable_when_files_are_added(many: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"split": "train=0.7,val=0.2,test=0.1", "workers": 0}
    result = shardkit.convert(many, "wds", tmp_path / "out", **options)
    assert list(result.splits) == ["train", "val", "test"]
    found = {name: keys(tmp_path / "out" / name) for name in result.splits}
    assert Counter(itertools.chain(*found.values())) == Counter(
        f"class{c}/{n:03d}" for c in range(4) for n in range(15)
    )
    assert 30 < len(found["train"]) < 52
    (many / "class0/new.jpg").write_bytes(make_image())
    shardkit.convert(many, "wds", tmp_path / "more", **options)
    for name, before in found.items():
        assert set(before) <= set(keys(tmp_path / "more" / name))


def test_split_folders_become_datasets_published_together(tmp_path: Path) -> None:
    write_images(tmp_path / "in/train", classes=2)
    write_images(tmp_path / "in/val", classes=3)
    result = shardkit.convert(tmp_path / "in", "wds", tmp_path / "out", workers=0)
    assert {name: split.samples for name, split in result.splits.items()} == {"train": 8, "val": 12}
    assert shardkit.open(tmp_path / "out/train").classes == ("class0", "class1", "class2")
    with pytest.raises(shardkit.FormatError, match="one dataset per split") as error:
        shardkit.open(tmp_path / "out")
    assert str(tmp_path / "out/train") in str(error.value)
    again = shardkit.convert(tmp_path / "out", "wds", tmp_path / "again", workers=0)
    assert list(again.splits) == ["train", "val"]
    for name in ("train", "val"):
        assert keys(tmp_path / "again" / name) == keys(tmp_path / "out" / name)


def test_rename(images: Path, tmp_path: Path) -> None:
    names = {"image": "jpg", "label": "cls"}
    shardkit.convert(images, "wds", tmp_path / "out", rename=names, workers=0)
    with shardkit.open(tmp_path / "out") as ds:
        assert list(ds.schema) == ["jpg", "cls"]
        assert ds[0] == {"__key__": "class0/000", "jpg": make_image(), "cls": 0}
    assert load(tmp_path / "out").label_counts == (4, 4, 4)
    classes = inspect(tmp_path / "out/shard-000000.tar")["classes"]
    assert [entry["samples"] for entry in classes] == [4, 4, 4]
    with pytest.raises(UsageError, match="no field 'photo'"):
        shardkit.convert(images, "wds", tmp_path / "x", rename={"photo": "jpg"}, workers=0)


def test_c3_a_bad_sample_stops_the_run_and_is_named(images: Path, tmp_path: Path) -> None:
    (images / "class1/002.jpg").write_bytes(b"this is text, not an image")
    for workers in (0, 1):
        with pytest.raises(SampleError, match="not an image") as error:
            shardkit.convert(images, "wds", tmp_path / "out", workers=workers)
        assert error.value.where["path"] == "class1/002.jpg"
        assert error.value.found == "text: 'this is text, not an ima'"
    assert not (tmp_path / "out").exists()


def test_c3_skipped_samples_are_listed_in_order(many: Path, tmp_path: Path) -> None:
    (many / "class0/000.jpg").write_bytes(b"")
    (many / "class1/002.jpg").write_bytes(b"text")
    (many / "class3/014.jpg").unlink()
    (many / "class3/014.jpg").symlink_to("nowhere")
    options: dict[str, Any] = {"on_error": "skip", "shard_size": "100kB"}
    for workers in (0, 2):
        result = shardkit.convert(many, "wds", tmp_path / f"{workers}", workers=workers, **options)
        assert (result.samples, result.errors) == (57, 3)
    assert files_of(tmp_path / "0") == files_of(tmp_path / "2")
    text = (tmp_path / "0/__shardkit__/errors.jsonl").read_text()
    lines = list(map(json.loads, text.splitlines()))
    keys = ["class0/000", "class1/002", "class3/014"]
    assert [(line["source"], line["key"]) for line in lines] == [(f"{k}.jpg", k) for k in keys]
    assert lines[0]["found"] == "an empty file (0 bytes)"
    assert str(tmp_path) not in text


def test_c3_too_many_bad_samples_stop_the_run(many: Path, tmp_path: Path) -> None:
    for n in range(5):
        (many / f"class0/{n:03d}.jpg").write_bytes(b"text")
    options: dict[str, Any] = {"on_error": "skip", "shard_size": "50kB", "workers": 0}
    with pytest.raises(SourceError, match="more than 4 samples are bad"):
        shardkit.convert(many, "wds", tmp_path / "out", max_errors=4, **options)
    shardkit.convert(many, "wds", tmp_path / "out", max_errors=5, **options)
    assert len(keys(tmp_path / "out")) == 55


def test_c3_a_loop_of_links_stops_the_run_or_is_listed(images: Path, tmp_path: Path) -> None:
    (images / "class0/loop").symlink_to("..")
    with pytest.raises(SourceError, match="leads back to a folder above"):
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    result = shardkit.convert(images, "wds", tmp_path / "out", workers=0, on_error="skip")
    assert (result.samples, result.errors) == (12, 1)
    (line,) = (tmp_path / "out/__shardkit__/errors.jsonl").read_text().splitlines()
    assert json.loads(line)["source"] == "loop"


def test_c4_a_dataset_is_a_source_and_comes_back_equal(images: Path, tmp_path: Path) -> None:
    samples = [everything(n) for n in range(20)]
    shardkit.convert(samples, "wds", tmp_path / "one", schema=EVERYTHING, shard_samples=6)
    shardkit.convert(tmp_path / "one", "wds", tmp_path / "two", workers=0, shard_samples=9)
    with shardkit.open(tmp_path / "two") as ds:
        assert dict(ds.schema) == dict(EVERYTHING)
        for number, sample in enumerate(samples):
            assert_same(ds[number], sample)
    shardkit.convert(images, "wds", tmp_path / "ds", workers=0)
    with shardkit.open(tmp_path / "ds") as ds:  # one that is open has its classes too
        shardkit.convert(ds, "wds", tmp_path / "copy")  # type: ignore[arg-type]
    assert load(tmp_path / "copy").classes == ("class0", "class1", "class2")


def test_json_text_passes_through_unchanged(images: Path, tmp_path: Path) -> None:
    text = '{"b" : 1.50,\n "a":[ ] }'
    (images / "class0/000.json").write_text(text)
    shardkit.convert(images, "wds", tmp_path / "one", workers=0)
    shardkit.convert(tmp_path / "one", "wds", tmp_path / "two", workers=0)
    for name in ("one", "two"):
        found = by_webdataset(tmp_path / name / "shard-000000.tar")[0]
        assert found["json"].decode() == text


def test_the_key_table_keeps_names_that_keys_do_not_tell(images: Path, tmp_path: Path) -> None:
    os.rename(images / "class0/001.jpg", images / "class0/a.b.c.jpg")
    (images / "class2/000.png").write_bytes(make_image(1, "PNG"))
    for source, out in ((images, "one"), (tmp_path / "one", "two")):
        shardkit.convert(source, "wds", tmp_path / out, workers=0)
        lines = (tmp_path / out / "__shardkit__/keys.jsonl").read_text().splitlines()
        assert list(map(json.loads, lines)) == [
            {"key": "class0/a_b_c", "path": "class0/a.b.c.jpg"},
            {"key": "class2/000~png", "path": "class2/000.png"},
        ]


def test_a_name_that_is_not_unicode_is_a_bad_sample(images: Path, tmp_path: Path) -> None:
    os.rename(images / "class0/001.jpg", os.fsencode(images) + b"/class0/\xff.jpg")
    with pytest.raises(SampleError, match="not valid Unicode"):
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    result = shardkit.convert(images, "wds", tmp_path / "out", workers=0, on_error="skip")
    assert (result.samples, result.errors) == (11, 1)
    (line,) = (tmp_path / "out/__shardkit__/errors.jsonl").read_text().splitlines()
    assert json.loads(line)["source"] == "class0/\udcff.jpg"


class Lazy:
    """A map-style dataset such as torch users write: no keys, numpy values."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise RuntimeError("thirteen")
        return {"image": make_image(index), "label": np.int64(index)}


def test_any_sequence_is_a_source(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="the sequence raised RuntimeError: thirteen"):
        shardkit.convert(Lazy(), "wds", tmp_path / "out")  # type: ignore[arg-type]
    result = shardkit.convert(
        Lazy(),
        "wds",
        tmp_path / "out",
        on_error="skip",
        classes=[f"c{n}" for n in range(30)],  # type: ignore[arg-type]
    )
    assert (result.samples, result.errors) == (29, 1)
    with shardkit.open(tmp_path / "out") as ds:
        assert ds[13] == {"__key__": "000000014", "image": make_image(14), "label": 14}
        assert ds.schema["image"] == shardkit.Image()
        assert ds.classes is not None


def test_a_sequence_goes_to_workers_if_asked(tmp_path: Path) -> None:
    samples = [{"image": make_image(n), "label": n} for n in range(30)]
    samples[13]["label"] = "thirteen"
    for workers in (0, 1):
        options: dict[str, Any] = {"on_error": "skip", "shard_samples": 5, "workers": workers}
        shardkit.convert(samples, "wds", tmp_path / f"{workers}", **options)
    assert len(keys(tmp_path / "0")) == 29
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1")


def test_a_sequence_that_cannot_go_to_workers_is_named(tmp_path: Path) -> None:
    class Local(Lazy):
        pass

    with pytest.raises(WorkerError, match="cannot be sent to worker processes") as error:
        shardkit.convert(Local(), "wds", tmp_path / "out", workers=1)  # type: ignore[arg-type]
    assert "workers=0" in str(error.value)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "the sequence has no samples"),
        ([3], "an item that is not a sample"),
        ([{"__key__": "", "label": 1}], "the key of a sample is not text"),
        ([{"label": {1, 2}}], "a type that no field can hold"),
        ([{"about": {"x": float("nan")}}], "dict with values not valid in JSON, such as NaN"),
        ([{"label": 1}, {"label": "x"}], "not of its field's type"),
        ([{"label": 1}, {}], "has no field 'label'"),
        ([{"label": 1}, {"label": 1, "more": 2}], "does not name: 'more'"),
    ],
)
def test_sequences_that_hold_no_samples_are_named(
    tmp_path: Path, samples: list[Any], message: str
) -> None:
    with pytest.raises((SampleError, SourceError), match=message):
        shardkit.convert(samples, "wds", tmp_path / "out")


def test_a_plan_says_what_would_be_done_and_does_nothing(many: Path, tmp_path: Path) -> None:
    before = files_of(tmp_path)
    plan = run.prepare(many, "wds", options=ConvertOptions(shard_size="100kB"))
    about = plan.describe()
    assert about["samples"] == 60
    assert about["tasks"] == len(plan.tasks) >= 4
    assert about["parts"][0]["classes"] == 4
    assert files_of(tmp_path) == before


def test_without_an_output_it_goes_beside_the_source(images: Path, tmp_path: Path) -> None:
    assert shardkit.convert(images, "wds", workers=0).out == str(tmp_path / "images-wds")
    shard = tmp_path / "images-wds/shard-000000.tar"
    assert default_output([shard], "wds") == shard.parent / "shard-000000-wds"
    assert default_output([Path(".")], "wds").name == f"{Path.cwd().name}-wds"
    with pytest.raises(UsageError, match="needs an output folder"):
        shardkit.convert([{"label": 1}], "wds")


def test_the_same_command_again_finds_its_work_done(images: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty folder is fine
    shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    before = files_of(tmp_path / "out")
    again = shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    assert (again.already_complete, again.samples) == (True, 12)
    assert files_of(tmp_path / "out") == before


def test_another_dataset_is_replaced_only_if_asked(images: Path, tmp_path: Path) -> None:
    shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    with pytest.raises(OutputError, match="holds another dataset") as error:
        shardkit.convert(images, "wds", tmp_path / "out", workers=0, shuffle=True)
    assert error.value.found == "shuffle was None, is 0"
    shardkit.convert(images, "wds", tmp_path / "out", workers=0, shuffle=True, overwrite=True)
    shardkit.convert(images, "wds", tmp_path / "fresh", workers=0, shuffle=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    assert not (tmp_path / "out.partial").exists()


def test_what_is_no_dataset_is_never_replaced(images: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    before = files_of(tmp_path)
    for more in ({}, {"overwrite": True}):
        with pytest.raises(OutputError, match="is not a dataset written by") as error:
            shardkit.convert(images, "wds", tmp_path / "out", workers=0, **more)
        assert error.value.found == "thesis.txt"
        with pytest.raises(OutputError, match="the output is a file"):
            shardkit.convert(images, "wds", tmp_path / "file", workers=0, **more)
    assert files_of(tmp_path) == before


def test_output_and_source_do_not_lie_inside_one_another(images: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(images)
    before = files_of(tmp_path)
    for source, out in (
        (images, "images/out"), (images, "images"), (images, "."), (tmp_path / "link", "images/x"),
    ):  # fmt: skip
        with pytest.raises(OutputError, match="must not contain each other"):
            shardkit.convert(source, "wds", tmp_path / out, workers=0)
    assert files_of(tmp_path) == before


def test_unfinished_work_of_other_options_is_not_touched(many: Path, tmp_path: Path) -> None:
    (many / "class3/014.jpg").write_bytes(b"text")
    options: dict[str, Any] = {"shard_size": "100kB", "workers": 0}
    with pytest.raises(SampleError):
        shardkit.convert(many, "wds", tmp_path / "out", **options)
    partial = tmp_path / "out.partial"
    before = files_of(partial)
    assert any("result.json" in name for name in before)
    with pytest.raises(OutputError, match="unfinished conversion") as error:
        shardkit.convert(many, "wds", tmp_path / "out", shuffle=True, **options)
    assert error.value.found == "shuffle was None, is 0"
    (many / "class3/014.jpg").write_bytes(make_image())
    with pytest.raises(OutputError, match="unfinished conversion") as error:
        shardkit.convert(many, "wds", tmp_path / "out", **options)
    assert error.value.found == "the source has changed"
    assert files_of(partial) == before
    with pytest.raises(shardkit.FormatError, match="unfinished conversion"):
        shardkit.open(partial)
    shardkit.convert(many, "wds", tmp_path / "out", overwrite=True, **options)
    assert not partial.exists()
    assert len(keys(tmp_path / "out")) == 60


def _cut_otherwise(job: dict[str, Any]) -> None:
    del job["versions"]["tasks"]  # as 0.1.0 was before tasks were cut by their work


def _without_recipe(job: dict[str, Any]) -> None:
    recipe = job.pop("recipe")
    job |= {"format": recipe["format"], "source": recipe["sources"], "options": recipe}


ANOTHER = r"unfinished conversion .* another version"
DAMAGED = r"(?s)description of an unfinished.*job\.json"
VERSION = shardkit.__version__


@pytest.mark.parametrize(
    ("change", "message", "found"),
    [
        (_cut_otherwise, ANOTHER, "tasks was None, is 2"),
        (lambda job: job["versions"].update(shardkit="99.0"), ANOTHER,
         f"shardkit was 99.0, is {VERSION}"),
        (_without_recipe, ANOTHER, None),
        (b"", DAMAGED, ...),
        (b"[1]", DAMAGED, ...),
        (b"{", DAMAGED, ...),
    ],
)  # fmt: skip
def test_unfinished_work_that_cannot_go_on_is_kept_until_overwrite(
    many: Path, tmp_path: Path, change: Any, message: str, found: Any
) -> None:
    partial = tmp_path / "out.partial"
    with pytest.MonkeyPatch.context() as patch:  # all tasks are done, and nothing is published
        patch.setattr("shardkit.conversion.run.assemble", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shardkit.convert(many, "wds", tmp_path / "out", workers=0)
    if isinstance(change, bytes):
        (partial / "job.json").write_bytes(change)
    else:
        job = json.loads((partial / "job.json").read_bytes())
        change(job)
        (partial / "job.json").write_text(json.dumps(job))
    before = {name: data for name, data in files_of(partial).items() if "lock" not in name}
    assert any(name.startswith("tasks/") for name in before)
    for part in (None, "1/1") if message == DAMAGED else (None,):
        with pytest.raises(OutputError, match=message) as error:
            shardkit.convert(many, "wds", tmp_path / "out", workers=0, part=part)
        if message == ANOTHER:
            assert error.value.found == found
            assert error.value.fix == "start again with --overwrite"
        assert before.items() <= files_of(partial).items()
    shardkit.convert(many, "wds", tmp_path / "out", overwrite=True, workers=0)
    assert len(keys(tmp_path / "out")) == 60


def test_two_runs_do_not_work_on_one_output(images: Path, tmp_path: Path) -> None:
    from shardkit.conversion.partial import FolderPartial

    plan = run.prepare(images, "wds", tmp_path / "out")
    first = FolderPartial(plan.target)
    first.begin(plan.job, resume=True)
    with pytest.raises(OutputError, match="another run is working"):
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    first.release()
    shardkit.convert(images, "wds", tmp_path / "out", workers=0)


@pytest.mark.parametrize(
    "number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO]
)
def test_without_locks_a_run_goes_on_and_says_so(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As on NFS without lockd, or Lustre mounted without flock. A disk that fails is no such."""

    def flock(handle: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    if number == errno.EIO:
        with pytest.raises(StorageError, match="cannot lock: Input/output error"):
            shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    else:
        with pytest.warns(ShardkitWarning, match="has no locks .*no other run writes"):
            shardkit.convert(images, "wds", tmp_path / "out", workers=0)
        assert keys(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": "many"}, "invalid size"),
        ({"shard_size": "1kB"}, "room for 4,096 bytes"),
        ({"shard_size": "1MB", "shard_samples": 3}, "cannot be combined"),
        ({"shard_samples": 0}, "shard_samples must be"),
        ({"workers": -1}, "workers must be"),
        ({"limit": 0}, "limit must be"),
        ({"split": "train=0.9,val=0.2"}, "invalid split"),
        ({"split": "x"}, "invalid split"),
        ({"split": "../a=1"}, "invalid split"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"speed": 3}, "no option 'speed'"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_read(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        shardkit.convert(tmp_path / "not there", "wds", tmp_path / "out", **options)


def test_an_unknown_format_and_a_missing_source_are_named(tmp_path: Path, images: Path) -> None:
    with pytest.raises(UsageError, match="no format 'zip'"):
        shardkit.convert(images, "zip", tmp_path / "out", workers=0)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        shardkit.convert(tmp_path / "nothing", "wds", tmp_path / "out", workers=0)
    with pytest.raises(shardkit.FormatError, match="a single image"):
        shardkit.convert(images / "class0/000.jpg", "wds", tmp_path / "out", workers=0)
    with pytest.raises(OutputError, match="would hold the output does not exist"):
        shardkit.convert(images, "wds", tmp_path / "a/b", workers=0)


def test_one_shard_of_a_dataset_is_another_source_than_the_next(many: Path, tmp_path: Path) -> None:
    shardkit.convert(many, "wds", tmp_path / "ds", workers=0, shard_samples=20)
    first, second = (tmp_path / f"ds/shard-00000{n}.tar" for n in range(2))
    shardkit.convert(first, "wds", tmp_path / "out", workers=0)
    with pytest.raises(OutputError, match="holds another dataset") as error:
        shardkit.convert(second, "wds", tmp_path / "out", workers=0)
    assert error.value.found == "the source has changed"


def test_a_dataset_that_lost_a_shard_is_not_complete(many: Path, tmp_path: Path) -> None:
    shardkit.convert(many, "wds", tmp_path / "out", workers=0, shard_samples=20)
    before = files_of(tmp_path / "out")
    (tmp_path / "out/shard-000001.tar").unlink()
    with pytest.raises(OutputError, match="holds another dataset") as error:
        shardkit.convert(many, "wds", tmp_path / "out", workers=0, shard_samples=20)
    assert "damaged" in str(error.value.found)
    shardkit.convert(many, "wds", tmp_path / "out", workers=0, shard_samples=20, overwrite=True)
    assert files_of(tmp_path / "out") == before


def test_an_archive_beside_class_folders_is_a_question(images: Path, tmp_path: Path) -> None:
    (images / "download.tgz").write_bytes(b"x")
    with pytest.raises(UsageError, match="both shards and what may be images"):
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)


def test_an_image_beside_class_folders_is_a_mistake_unless_labels_are_not_asked_for(
    images: Path, tmp_path: Path
) -> None:
    (images / "preview.jpg").write_bytes(make_image())
    with pytest.raises(UsageError, match="there are images beside the class folders") as error:
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    assert error.value.found == "preview.jpg"
    result = shardkit.convert(images, "wds", tmp_path / "out", workers=0, fields=["image"])
    assert result.samples == 13
    for name in ("a", "b"):  # as many as class folders: an album, and no mistake
        (images / f"{name}.jpg").write_bytes(make_image())
    result = shardkit.convert(images, "wds", tmp_path / "album", workers=0)
    assert result.samples == 15
    assert result.notes == ["no labels from folders: 'a.jpg' lies beside them"]


def test_a_key_of_two_samples_is_a_bad_sample(tmp_path: Path) -> None:
    samples = [{"__key__": "a", "label": n} for n in range(2)]
    with pytest.raises(SampleError, match="two samples have the same key"):
        shardkit.convert(samples, "wds", tmp_path / "out")
    result = shardkit.convert(samples, "wds", tmp_path / "out", on_error="skip")
    assert (result.samples, result.errors) == (1, 1)


def test_captions_that_change_in_place_stop_a_run_from_continuing(
    many: Path, tmp_path: Path
) -> None:
    caption = many / "class0/000.txt"
    caption.write_text("one")
    (many / "class3/014.jpg").write_bytes(b"text")
    options: dict[str, Any] = {"shard_size": "100kB", "workers": 0}
    with pytest.raises(SampleError):
        shardkit.convert(many, "wds", tmp_path / "out", **options)
    caption.write_text("two")
    os.utime(caption, (1, 1))
    with pytest.raises(OutputError, match="unfinished conversion"):
        shardkit.convert(many, "wds", tmp_path / "out", **options)


def test_a_folder_that_is_only_called_like_our_unfinished_work_is_left_alone(
    images: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "out.partial/dataset/precious.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(make_image())
    with pytest.raises(OutputError, match="contains something else"):
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    assert mine.exists()
    images.rename(tmp_path / "images.partial")
    with pytest.raises(OutputError, match="must not contain each other"):
        shardkit.convert(tmp_path / "images.partial", "wds", tmp_path / "images", workers=0)


def test_workers_that_cannot_be_started_end_the_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(WorkerError, match="cannot be started"):
        shardkit.convert(images, "wds", tmp_path / "out", workers=2, shard_size=8000)


def test_x2_code_in_the_current_folder_is_not_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pickle.py", "struct.py", "numpy.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    shardkit.convert(images, "wds", tmp_path / "out", workers=1, shard_size=8000)
    assert not (tmp_path / "ran").exists()


def test_four_hundred_fields(tmp_path: Path) -> None:
    sample = {f"field{n}": n for n in range(400)}
    shardkit.convert([sample] * 3, "wds", tmp_path / "out")
    assert shardkit.open(tmp_path / "out")[2] == {"__key__": "000000002", **sample}


def test_what_json_cannot_give_back_is_refused(tmp_path: Path) -> None:
    for value in ({"a": {1, 2}}, {1: "x"}, [(1, 2)], "\udcff", {"a": float("nan")}):
        with pytest.raises(SampleError, match="not of its field's type"):
            shardkit.convert([{"x": value}], "wds", tmp_path / "x", schema={"x": shardkit.Json()})


@pytest.mark.parametrize(
    ("to", "name", "found"),
    [
        ("wds", "x.lmdb", "a name of --to lmdb, and --to wds"),
        ("wds", "x.tar.gz", "a suffix of --to wds that is only read, not written"),
        ("lmdb", "x.TAR", "a name of --to wds, and --to lmdb"),
        ("lmdb", "data.mdb", "a suffix of --to lmdb that is only read, not written"),
        ("arrow", "x.parquet", "a name of --to parquet, and --to arrow"),
        ("arrow", "x.feather", "a suffix of --to arrow that is only read, not written"),
        ("parquet", "x.beton", "a name of --to beton, and --to parquet"),
        ("hf", "x.arrow", "a name of --to arrow, and --to hf"),
        ("beton", "x.bin", "a name of --to megatron, and --to beton"),
    ],
)
def test_an_output_is_not_called_like_a_file_of_another_format(
    images: Path, tmp_path: Path, to: str, name: str, found: str
) -> None:
    with pytest.raises(UsageError, match="that of another kind of file") as error:
        shardkit.convert(images, to, tmp_path / name, workers=0)
    assert error.value.found == found
    with pytest.raises(UsageError, match="that of another kind of file"):
        shardkit.create(tmp_path / name, to, {"image": Image()})
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("source", [({"n": n} for n in range(3)), iter([{"n": 1}]), {1}, 7])
def test_a_source_without_length_is_refused_with_what_to_give_instead(
    source: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="a path, or a sequence") as caught:
        shardkit.convert(source, "wds", tmp_path / "out")
    assert "convert it to a list" in str(caught.value.fix)
    assert "shardkit.create" in str(caught.value.fix)
    shardkit.convert([{"n": 1}], "wds", tmp_path / "out")
    with pytest.raises(UsageError, match="a path, or a sequence"):
        shardkit.verify(tmp_path / "out", against=source)


def test_converting_images_loads_nothing_for_text(images: Path, tmp_path: Path) -> None:
    code = (
        "import sys, shardkit\n"
        f"shardkit.convert({str(images)!r}, 'wds', {str(tmp_path / 'out')!r}, workers=0)\n"
        "others = {'shardkit.sources.text.scan', 'zstandard', 'pyarrow', 'tokenizers'}\n"
        "print(sorted(others & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_dataset_of_a_sequence_and_its_views_are_converted(tmp_path: Path) -> None:
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
