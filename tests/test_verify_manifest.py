"""`verify` finds every changed byte of a manifest, and says where there is none to compare with."""

import shutil

import pytest

import shardkit


@pytest.mark.parametrize(
    ("old", "new"), [(b"e+16", b"E+16"), (b"\n}\n", b"\n}\n\n"), (b'": ', b'":\t')]
)
def test_a_changed_byte_of_a_manifest_that_says_the_same_is_found(images, tmp_path, old, new):
    options = shardkit.ImageOptions(max_aspect=1e16)
    shardkit.convert(images, "wds", tmp_path / "out", image=options, workers=0)
    manifest = tmp_path / "out" / "__shardkit__" / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes(before.replace(old, new, 1))
    assert shardkit.open(tmp_path / "out")[0]["__key__"]
    (problem,) = shardkit.verify(tmp_path / "out").problems
    assert "the manifest has changed" in problem.what


@pytest.mark.parametrize("format", ["wds", "lmdb"])
def test_a_shard_of_a_dataset_is_checked_with_the_checksums_of_its_manifest(
    images, tmp_path, format
):
    shardkit.convert(images, format, tmp_path / "out", shard_samples=6, workers=0)
    shard = sorted((tmp_path / "out").glob("shard-*"))[1]
    assert shardkit.verify(shard).verdict == "sound"
    file = shard / "data.mdb" if shard.is_dir() else shard
    data = bytearray(file.read_bytes())
    data[data.rindex(b"\xff\xd9") - 9] ^= 1  # in the last image, which can still be decoded
    file.write_bytes(data)
    for path in {shard, file}:
        (problem,) = shardkit.verify(path).problems
        assert problem.what == "a file has changed since it was written"


def test_without_a_manifest_data_are_called_readable_rather_than_sound(images, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "one.tar", workers=0)
    assert shardkit.verify(tmp_path / "one.tar").verdict == "sound"
    shutil.rmtree(tmp_path / "__shardkit__")
    report = shardkit.verify(tmp_path / "one.tar")
    assert report.verdict == "readable"
    assert "there is no manifest with checksums: every sample was read instead" in report.notes
