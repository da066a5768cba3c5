"""`verify --repair` of datasets in stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.conversion import claim as claims
from shardkit.errors import OutputError
from shardkit.verification.repair import Repair
from shardkit.verification.work import Meter
from tests.conftest import few, write_images
from tests.remote.test_writing import QUICK, Bucket, bucket, scratch  # noqa: F401


@pytest.mark.parametrize("format", few(["arrow", "beton", "hf", "lmdb", "mds", "wds"], "wds"))
@QUICK
def test_objects_become_what_they_were(
    bucket: Bucket,  # noqa: F811
    format: str,
    tmp_path: Path,
    large: bool,
) -> None:
    source = write_images(tmp_path / "source", each=6)
    options: dict[str, Any] = {"shard_samples": 4, "shard_size": None}
    bucket.convert(source, format, split="train=0.5,val=0.5", **options)
    shardkit.convert(bucket.out, "arrow", tmp_path / "copy", storage_options=bucket.options)
    whole = bucket.objects()
    names = [name for name in whole if not name.endswith("manifest.json")]
    for number, name in enumerate(names if large else names[::4]):
        giver = [source, tmp_path / "copy"][number % 2]
        if number % 3:
            bucket.put(name, b"damaged")
        else:
            bucket.store.open(bucket.name).delete(name)
        report = shardkit.verify(bucket.out, repair=giver, storage_options=bucket.options)
        assert report.sound, (name, report.problems, report.repair.left)
        assert bucket.objects() == whole
        assert [file.path.endswith(name) for file in report.repair.files] == [True]


@QUICK
@pytest.mark.large
def test_a_single_object(bucket: Bucket, tmp_path: Path) -> None:  # noqa: F811
    source = write_images(tmp_path / "source", kilobytes=400)
    out = f"{bucket.out}/train.tar"
    shardkit.convert(source, "wds", out, storage_options=bucket.options, workers=0)
    whole = bucket.objects()
    for name in whole:
        if not name.endswith("manifest.json"):
            bucket.store.open(bucket.name).delete(name)
            report = shardkit.verify(out, repair=source, storage_options=bucket.options)
            assert report.sound, (name, report.problems)
            assert bucket.objects() == whole


@QUICK
@pytest.mark.filterwarnings("ignore:.*was claimed by a run")
def test_two_repairs_at_once(
    bucket: Bucket,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.05)
    source = write_images(tmp_path / "source")
    bucket.convert(source)
    whole = bucket.objects()
    bucket.put("out/shard-000000.tar", b"damaged")
    before = bucket.objects()
    options = {"storage_options": bucket.options}
    datasets = [shardkit.open(bucket.out, **options)]
    with Repair(bucket.path("out"), datasets, source, None, None, Meter(None)):
        with pytest.raises(OutputError, match="another run"):
            shardkit.verify(bucket.out, repair=source, **options)
        with pytest.raises(OutputError, match="another run"):
            bucket.convert(source, overwrite=True)
    assert bucket.objects() == before
    assert shardkit.verify(bucket.out, repair=source, **options).sound
    assert bucket.objects() == whole
