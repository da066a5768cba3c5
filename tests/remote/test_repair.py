"""`verify --repair` of datasets in stores."""

import pytest

import shardkit
from shardkit.errors import OutputError
from shardkit.verification.repair import Repair
from shardkit.verification.work import Meter
from tests.conftest import few, write_images
from tests.remote.conftest import EACH_STORE, renewed


def repaired(bucket, url, giver, name):
    """The object that was damaged, and no other, becomes what it was."""
    report = shardkit.verify(url, repair=giver, storage_options=bucket.options)
    assert report.sound, (name, report.problems, report.repair.left)
    assert [file.path.endswith(name) for file in report.repair.files] == [True]


@pytest.mark.parametrize("format", few(["arrow", "beton", "hf", "lmdb", "mds", "wds"], "wds"))
def test_objects_become_what_they_were(bucket, format, tmp_path, large):
    """Removed, or of other bytes; from the source, or from a copy."""
    source = write_images(tmp_path / "source", each=4)
    options = {"shard_samples": 3, "shard_size": None}
    bucket.convert(source, format, split="train=0.5,val=0.5", **options)
    shardkit.convert(source, format, tmp_path / "copy", split="train=0.5,val=0.5", **options)
    whole = bucket.objects()
    names = [name for name in whole if not name.endswith("manifest.json")]
    for number, name in enumerate(names if large else names[::4]):
        if number % 3:
            bucket.put({name: b"damaged"})
        else:
            bucket.delete(name)
        repaired(bucket, bucket.out, [source, tmp_path / "copy"][number % 2], name)
        assert bucket.objects() == whole


@pytest.mark.large
def test_a_single_object(bucket, tmp_path):
    source, out = write_images(tmp_path / "source"), bucket.url("out/train.tar")
    shardkit.convert(source, "wds", out, storage_options=bucket.options, workers=0)
    whole = bucket.objects()
    for name in whole:
        if not name.endswith("manifest.json"):
            bucket.delete(name)
            repaired(bucket, out, source, name)
            assert bucket.objects() == whole


@EACH_STORE
@pytest.mark.filterwarnings("ignore:.*was claimed by a run")
def test_two_repairs_at_once(bucket, tmp_path, monkeypatch):
    source = write_images(tmp_path / "source")
    bucket.convert(source)
    whole, name = bucket.objects(), "out/shard-000000.tar"
    bucket.put({name: b"damaged"})
    with Repair(bucket.path("out"), [bucket.open("out")], source, None, None, Meter(None)) as first:
        # Who looks sees it renewed.
        monkeypatch.setattr("time.sleep", lambda seconds: renewed(first._partial.lock.claim))
        with pytest.raises(OutputError, match="another run"):
            shardkit.verify(bucket.out, repair=source, storage_options=bucket.options)
        with pytest.raises(OutputError, match="another run"):
            bucket.convert(source, overwrite=True)
    assert bucket.objects() == whole | {name: b"damaged"}
    repaired(bucket, bucket.out, source, name)
    assert bucket.objects() == whole
