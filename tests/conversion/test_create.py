"""`shardkit.create`: a user's own samples; whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.errors import FormatError, OutputError, SampleError, UsageError
from shardkit.formats.tfrecord.writer import TFRecordWriter
from shardkit.testing import EVERYTHING, assert_same, everything, make_image
from tests.codecs.sample_images import encoded, opened, photo

SCHEMA = {"image": shardkit.Image(), "label": shardkit.Int()}


def test_samples_come_back_and_the_dataset_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with shardkit.create(out, "wds", EVERYTHING, shard_samples=4) as writer:
        for n in range(10):
            writer.write(everything(n))
            assert not out.exists()
    with shardkit.open(out) as ds:
        assert [s.samples for s in ds.manifest.shards] == [4, 4, 2]  # type: ignore[union-attr]
        for n in range(10):
            assert_same(ds[n], everything(n))
    assert not (tmp_path / "out.partial").exists()


def test_keys_are_numbered_where_there_are_none(tmp_path: Path) -> None:
    with shardkit.create(tmp_path / "out", "wds", SCHEMA) as writer:
        for n in range(3):
            writer.write({"image": make_image(n), "label": np.uint8(n)})
    with shardkit.open(tmp_path / "out") as ds:
        assert ds[2] == {"__key__": "000000002", "image": make_image(2), "label": 2}


def test_an_error_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with shardkit.create(tmp_path / "out", "wds", SCHEMA) as writer:
            writer.write({"image": make_image(), "label": 1})
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_bad_sample_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    with shardkit.create(tmp_path / "out", "wds", SCHEMA) as writer:
        writer.write({"__key__": "a", "image": make_image(), "label": 1})
        for sample, message in (
            ({"__key__": "a", "image": make_image(), "label": 1}, "same key"),
            ({"__key__": "b", "image": b"text", "label": 1}, "not an image"),
            ({"__key__": "b", "image": make_image(), "label": "1"}, "not of its field's type"),
            ({"__key__": "b", "image": make_image()}, "no field 'label'"),
            (
                {"__key__": "b.c", "image": make_image(), "label": 1},
                "cannot be named after this key",
            ),
            ({"__key__": "", "image": make_image(), "label": 1}, "not text"),
        ):
            with pytest.raises(SampleError, match=message):
                writer.write(sample)
        writer.write({"__key__": "b", "image": make_image(), "label": 2})
    with shardkit.open(tmp_path / "out") as ds:
        assert [ds[n]["__key__"] for n in range(len(ds))] == ["a", "b"]


def test_what_exists_is_kept_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with shardkit.create(out, "wds", SCHEMA) as writer:
        writer.write({"__key__": "old", "image": make_image(), "label": 1})
    with pytest.raises(OutputError, match="the output exists"):
        shardkit.create(out, "wds", SCHEMA)
    with shardkit.create(out, "wds", SCHEMA, overwrite=True) as writer:
        writer.write({"__key__": "new", "image": make_image(), "label": 1})
        assert shardkit.open(out)[0]["__key__"] == "old"
    assert shardkit.open(out)[0]["__key__"] == "new"


def test_an_unfinished_conversion_is_not_swept_away(images: Path, tmp_path: Path) -> None:
    (images / "class2/003.jpg").write_bytes(b"text")
    with pytest.raises(SampleError):
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)
    with pytest.raises(OutputError, match="unfinished conversion"):
        shardkit.create(tmp_path / "out", "wds", SCHEMA)


def test_writing_after_closing_is_refused(tmp_path: Path) -> None:
    writer = shardkit.create(tmp_path / "out", "wds", SCHEMA)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write({"image": make_image(), "label": 1})
    assert len(shardkit.open(tmp_path / "out")) == 0


def test_fields_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="field 'label' has no type"):
        shardkit.create(tmp_path / "out", "wds", {"label": int})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="cannot be the name of a field"):
        shardkit.create(tmp_path / "out", "wds", {"__key__": shardkit.Int()})


def test_a_mask_keeps_its_values_where_others_become_jpegs(tmp_path: Path) -> None:
    values = (np.mgrid[:16, :24][1] // 4 * 40).astype(np.uint8)
    schema = {"image": shardkit.Image(), "seg.png": shardkit.Image()}
    with shardkit.create(tmp_path / "a.beton", "beton", schema) as writer:
        mask = encoded(PIL.Image.fromarray(values), "PNG")
        writer.write({"image": encoded(photo(), "JPEG"), "seg.png": mask})
    with shardkit.open(tmp_path / "a.beton") as dataset:
        stored = np.asarray(opened(dataset[0]["seg.png"]))
    np.testing.assert_array_equal(stored, np.repeat(values[:, :, None], 3, axis=2))


def test_files_of_a_writer_that_would_be_taken_for_lists_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TFRecordWriter.finish

    def finish(writer: TFRecordWriter) -> None:
        plain(writer)
        path = writer.path.parent / "__shardkit__" / f"{writer.path.name}.offsets"
        path.write_bytes(b"0")

    monkeypatch.setattr(TFRecordWriter, "finish", finish)
    for out in ("folder", "single.tfrecord"):
        writer = shardkit.create(tmp_path / out, "tfrecord", SCHEMA)
        writer.write({"image": make_image(), "label": 1})
        with pytest.raises(FormatError, match="the writer of tfrecord uses a file name") as error:
            writer.close()
        assert error.value.found.endswith(".tfrecord.offsets")  # type: ignore[union-attr]
        assert not (tmp_path / out).exists()


@pytest.mark.parametrize("ending", ["del writer", "sys.exit()"])
def test_a_writer_that_is_never_closed_says_that_its_samples_are_not_published(tmp_path, ending):
    code = f"""
import sys, shardkit
writer = shardkit.create({str(tmp_path / "out")!r}, "wds", {{"label": shardkit.Int()}})
for label in range(3):
    writer.write({{"label": label}})
{ending}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "out was never closed, so none of its 3 samples is published" in ended.stderr
    assert not (tmp_path / "out").exists()
