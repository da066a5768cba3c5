"""Conversions in parts to a store: processes that share nothing else."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

import shardkit
from tests.conftest import IMAGE_FORMATS, write_images
from tests.conversion.part_kills import Forks, at_once, killed_parts
from tests.conversion.test_part_listing import lists
from tests.remote.servers import S3, Google
from tests.remote.test_writing import Bucket, below, died_everywhere, whole_or_no_dataset

SIZE = 8_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_images(tmp_path / "in", classes=2, each=8, kilobytes=2)


@pytest.fixture
def bucket(s3: S3) -> Bucket:
    return Bucket(s3)


def test_two_parts_and_merge_make_what_one_run_makes(
    source: Path, tmp_path: Path, google: Google
) -> None:
    bucket = Bucket(google)
    convert(source, tmp_path / "whole")
    options = {"shard_size": SIZE, "on_error": "fail"}
    first = bucket.convert(source, part="1/2", **options)
    assert (first.part.tasks, first.part.missing) == (6, 5)
    with pytest.raises(shardkit.OutputError, match="not all parts") as error:
        merge(bucket)
    assert error.value.found == "5 tasks are missing: 2/2 never began"
    bucket.convert(source, part="2/2", **options)
    assert bucket.objects() == below(tmp_path / "whole")
    assert merge(bucket).already_complete
    assert bucket.convert(source, part="1/2", **options).already_complete


def test_what_a_part_has_listed_is_in_the_store_for_the_others(
    source: Path, tmp_path: Path, google: Google
) -> None:
    bucket = Bucket(google)
    convert(source, tmp_path / "whole")
    options = {"shard_size": SIZE, "on_error": "fail"}
    for part, listed in (("1/3", True), ("1/3", False), ("2/3", False), ("3/3", False)):
        found = lists(source, lambda part=part: bucket.convert(source, part=part, **options))  # type: ignore[misc]
        assert bool(found) is listed
    assert bucket.objects() == below(tmp_path / "whole")


def convert(source: Path, out: Path, to: str = "wds") -> None:
    shardkit.convert(source, to, out, workers=0, shard_size=SIZE)


def merge(bucket: Bucket) -> shardkit.ConvertResult:
    return shardkit.merge(bucket.out, storage_options=bucket.options)


@pytest.mark.large
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a dead process closes nothing
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_parts_that_die_anywhere_are_continued(
    source: Path, tmp_path: Path, google: Google
) -> None:
    """The last part and a whole run go on in turn."""
    bucket = Bucket(google)
    shardkit.convert(source, "wds", tmp_path / "whole", workers=0, shard_size=30_000)
    whole = below(tmp_path / "whole")

    def part(which: str | None) -> None:
        bucket.convert(source, part=which, shard_size=30_000, on_error="fail")

    def parts() -> None:
        part("1/2")
        part("2/2")

    few = ["put_if outline.zip", "put_if 2-of-2.json", "put result.zip", "put_if run.json"]
    few += ["put unfinished.json", "copy .tar", "delete outline.zip", "delete job.json"]
    for number, _ in enumerate(died_everywhere(bucket.clear, parts, False, few)):
        whole_or_no_dataset(bucket, whole)
        (parts if number % 2 else lambda: part(None))()
        assert bucket.objects() == whole


@pytest.mark.large
@pytest.mark.timeout(600)
def test_parts_that_are_killed_at_random_are_continued(
    source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    """C1, C2: four at a time, of some formats in turn."""
    seed = random.randrange(10**9)
    dice, seen = random.Random(seed), Counter[str]()
    print(f"seed {seed}")
    with Forks(tmp_path, **bucket.store.environ()) as forks:
        for to in dice.sample(IMAGE_FORMATS, 4):
            convert(source, tmp_path / to, to)
            command = ["convert", source, "--to", to, "--shard-size", SIZE, "--workers", 0]
            bucket.clear()
            began = time.monotonic()
            assert forks.start(*command, "-o", bucket.out).wait()[0] == 0
            seconds = 1.5 * (time.monotonic() - began)
            bucket.clear()
            command += ["-o", bucket.out]
            seen.update(killed_parts(forks, command, bucket.out, seconds, dice))
            assert bucket.objects() == below(tmp_path / to), to
    print(dict(seen))
    assert seen["killed"] > 3


@pytest.mark.large
@pytest.mark.timeout(600)
def test_parts_and_whole_runs_that_begin_at_once(
    source: Path, tmp_path: Path, bucket: Bucket
) -> None:
    """Nothing is lost, and all but some are told."""
    convert(source, tmp_path / "whole")
    command = ["convert", source, "--to", "wds", "--shard-size", SIZE, "--workers", 0]
    with Forks(tmp_path, **bucket.store.environ()) as forks:
        assert at_once(forks, [*command, "-o", bucket.out], bucket.out)
    assert bucket.objects() == below(tmp_path / "whole")
