"""`shardkit.create`: a user's own samples; whole or not at all."""

import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.errors import FormatError, OutputError, SampleError, ShardkitError, UsageError
from shardkit.formats.tfrecord.records import TFRecordWriter
from shardkit.testing import EVERYTHING, assert_same, everything, make_image
from tests.codecs.sample_images import encoded, opened, photo
from tests.conversion.conftest import raised

SCHEMA = {"image": shardkit.Image(), "label": shardkit.Int()}


def sample(**changed):
    return {"image": make_image(), "label": 1, **changed}


def test_samples_come_back_and_the_dataset_appears_at_the_end(tmp_path, out):
    with shardkit.create(out, "wds", EVERYTHING, shard_samples=4) as writer:
        for n in range(10):
            writer.write(everything(n))
            assert not out.exists()
    with shardkit.open(out) as ds:
        assert [s.samples for s in ds.manifest.shards] == [4, 4, 2]
        for n in range(10):
            assert_same(ds[n], everything(n))
    assert not (tmp_path / "out.partial").exists()


def test_keys_are_numbered_and_a_bad_sample_is_named_and_the_rest_goes_on(out):
    with shardkit.create(out, "wds", SCHEMA) as writer:
        writer.write(sample(label=np.uint8(2)))
        writer.write(sample(__key__="a"))
        for bad, message in (
            (sample(__key__="a"), "same key"),
            (sample(__key__="b", image=b"text"), "not an image"),
            (sample(__key__="b", label="1"), "not of its field's type"),
            ({"__key__": "b", "image": make_image()}, "no field 'label'"),
            (sample(__key__="b.c"), "cannot be named after this key"),
            (sample(__key__=""), "not text"),
        ):
            raised(SampleError, message, writer.write, bad)
        writer.write(sample(__key__="b"))
    with shardkit.open(out) as ds:
        assert ds[0] == {"__key__": "000000000", **sample(label=2)}
        assert [ds[n]["__key__"] for n in range(1, len(ds))] == ["a", "b"]


def test_an_error_in_the_block_leaves_nothing(tmp_path, out):
    def fail():
        with shardkit.create(out, "wds", SCHEMA) as writer:
            writer.write(sample())
            raise KeyError("mine")

    raised(KeyError, "mine", fail)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_kept_until_the_new_one_is_whole(out):
    with shardkit.create(out, "wds", SCHEMA) as writer:
        writer.write(sample(__key__="old"))
    raised(OutputError, "the output exists", shardkit.create, out, "wds", SCHEMA)
    with shardkit.create(out, "wds", SCHEMA, overwrite=True) as writer:
        writer.write(sample(__key__="new"))
        assert shardkit.open(out)[0]["__key__"] == "old"
    assert shardkit.open(out)[0]["__key__"] == "new"


def test_an_unfinished_conversion_is_not_swept_away(images, out):
    (images / "class2/003.jpg").write_bytes(b"text")
    with pytest.raises(SampleError):
        shardkit.convert(images, "wds", out, workers=0)
    raised(OutputError, "unfinished conversion", shardkit.create, out, "wds", SCHEMA)


def test_what_a_killed_program_leaves_says_so(out):
    writer = shardkit.create(out, "wds", SCHEMA)
    writer.write(sample())
    for path in (out, out.with_name("out.partial")):
        error = raised(ShardkitError, "cannot open|unfinished", shardkit.open, path)
        assert "`shardkit.create` has not closed it" in error.fix
        assert "starts over" in error.fix
    writer.discard()


def test_writing_after_closing_and_fields_that_are_none_are_refused(tmp_path, out):
    writer = shardkit.create(out, "wds", SCHEMA)
    writer.close()
    writer.close()
    raised(ValueError, "closed", writer.write, sample())
    assert len(shardkit.open(out)) == 0
    with pytest.raises(UsageError, match="field 'label' has no type"):
        shardkit.create(tmp_path / "x", "wds", {"label": int})
    with pytest.raises(UsageError, match="cannot be the name of a field"):
        shardkit.create(tmp_path / "x", "wds", {"__key__": shardkit.Int()})


def test_a_mask_keeps_its_values_where_others_become_jpegs(tmp_path):
    values = (np.mgrid[:16, :24][1] // 4 * 40).astype(np.uint8)
    schema = {"image": shardkit.Image(), "seg.png": shardkit.Image()}
    with shardkit.create(tmp_path / "a.beton", "beton", schema) as writer:
        mask = encoded(PIL.Image.fromarray(values), "PNG")
        writer.write({"image": encoded(photo(), "JPEG"), "seg.png": mask})
    with shardkit.open(tmp_path / "a.beton") as dataset:
        stored = np.asarray(opened(dataset[0]["seg.png"]))
    np.testing.assert_array_equal(stored, np.repeat(values[:, :, None], 3, axis=2))


def test_files_of_a_writer_that_would_be_taken_for_lists_are_refused(tmp_path, monkeypatch):
    plain = TFRecordWriter.finish

    def finish(writer):
        plain(writer)
        path = writer.path.parent / "__shardkit__" / f"{writer.path.name}.offsets"
        path.write_bytes(b"0")

    monkeypatch.setattr(TFRecordWriter, "finish", finish)
    for out in ("folder", "single.tfrecord"):
        writer = shardkit.create(tmp_path / out, "tfrecord", SCHEMA)
        writer.write(sample())
        error = raised(FormatError, "the writer of tfrecord uses a file name", writer.close)
        assert error.found.endswith(".tfrecord.offsets")
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
