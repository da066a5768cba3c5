"""Files in place of data that are elsewhere are named, and never taken for data."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.testing import make_image

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 12345\n" % (b"a" * 64)
ANNEX = b"/annex/objects/SHA256E-s12345--%s.jpg\n" % (b"a" * 64)
HTML = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head></html>"


def convert(source: Path, **options: object) -> str:
    """The error of a conversion, in words."""
    with pytest.raises(ShardkitError) as caught:
        shardkit.convert(source, to="mds", out=source.parent / "out", workers=0, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "a.txt",
        "a.md",
        "a.jsonl",
        "a.jsonl.gz",
        "a.csv",
        "a.tsv.zst",
        "a.tar",
        "a.parquet",
        "a.arrow",
        "a.tfrecord",
        "data.mdb",
        "a.beton",
        "a.npy",
        "a.jpg",
        "a.wav",
        "a.mp4",
    ],
)
def test_a_pointer_is_named_with_the_command_that_gets_the_data(tmp_path, name):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / name
    file.write_bytes(LFS)
    assert "git lfs pull" in convert(file.parent)
    file.write_bytes(ANNEX)
    assert "git annex get" in convert(file.parent)


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "1.txt", "1.json"])
def test_so_is_a_pointer_beside_images(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.jpg").write_bytes(make_image(1))
    (tmp_path / "in" / name).write_bytes(LFS)
    assert "git lfs pull" in convert(tmp_path / "in")


@pytest.mark.parametrize(
    "name", ["a.csv", "a.jsonl", "a.tsv", "a.jpg", "a.tar", "a.parquet", "a.tfrecord"]
)
def test_an_html_page_is_neither_a_table_nor_an_image_nor_a_shard(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(HTML)
    assert "HTML page" in convert(tmp_path / "in")


def test_files_that_are_only_in_icloud_are_counted(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.jpg").write_bytes(make_image(1))
    (tmp_path / "in/.2.jpg.icloud").write_bytes(b"bplist00")
    made = shardkit.convert(tmp_path / "in", to="wds", out=tmp_path / "out", workers=0)
    assert made.ignored == {"file that is only in iCloud": 1}


def test_text_about_pointers_and_html_as_text_are_text(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(b"A pointer:\n" + LFS)
    (tmp_path / "in/b.txt").write_bytes(HTML)
    shardkit.convert(tmp_path / "in", to="arrow", out=tmp_path / "out", workers=0)
    assert len(shardkit.open(tmp_path / "out")) == 2


def test_values_that_only_begin_as_pointers_do_are_values(tmp_path):
    for number, value in enumerate((b"/annex/objects/\0", b"/annex/objects/a", b"/annex/objects/")):
        rows, out = [{"blob": value, "image": make_image(1)}], tmp_path / str(number)
        out.mkdir()
        shardkit.convert(rows, "wds", out / "d", workers=0)
        shardkit.export(out / "d", "folder", out / "x")
        shardkit.convert(out / "x", "wds", out / "again", workers=0)
        assert shardkit.open(out / "again")[0]["blob"] == value
