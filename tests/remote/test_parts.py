"""Conversions in parts to a store: processes that share nothing else."""

import pytest

import shardkit
from tests.conftest import write_images
from tests.conversion.part_kills import Forks, at_once, was_told
from tests.remote.buckets import below
from tests.remote.conftest import EACH_STORE
from tests.remote.crashes import resumed
from tests.remote.proxy import Rule
from tests.remote.test_writing import whole_or_no_dataset

SIZE = 8_000


@pytest.fixture
def source(tmp_path):
    return write_images(tmp_path / "in", classes=2, each=8, kilobytes=2)


@pytest.fixture
def whole(source, tmp_path):
    """What one run makes."""
    shardkit.convert(source, "wds", tmp_path / "whole", workers=0, shard_size=SIZE)
    return below(tmp_path / "whole")


def part(bucket, source, which, size=SIZE):
    return bucket.convert(source, part=which, shard_size=size, on_error="fail")


def merge(bucket):
    return shardkit.merge(bucket.out, storage_options=bucket.options)


@EACH_STORE
def test_two_parts_and_merge_make_what_one_run_makes(source, whole, bucket):
    first = part(bucket, source, "1/2")
    assert (first.part.tasks, first.part.missing, first.part.missing_parts) == (6, 5, ("2/2",))
    with pytest.raises(shardkit.OutputError, match="not all parts") as error:
        merge(bucket)
    assert error.value.found == "5 tasks are missing: 2/2 never began"
    assert part(bucket, source, "2/2").part.missing == 0
    merge(bucket)
    assert bucket.objects() == whole
    assert merge(bucket).already_complete
    assert part(bucket, source, "1/2").already_complete


@pytest.mark.large
def test_parts_that_die_anywhere_are_continued(source, tmp_path, bucket):
    """Parts with a merge, and a whole run, go on in turn."""
    shardkit.convert(source, "wds", tmp_path / "whole", workers=0, shard_size=30_000)
    whole = below(tmp_path / "whole")

    def go_on(*parts):
        for which in parts:
            part(bucket, source, which, 30_000)
        if None not in parts:
            merge(bucket)

    few = ["put_if publish-plan.zip", "put_if 2-of-2.json", "put result.zip", "put_if run.json"]
    few += ["put unfinished.json", "copy .tar", "delete publish-plan.zip", "delete job.json"]
    for number, _ in enumerate(resumed(bucket, lambda: go_on("1/2", "2/2"), few)):
        whole_or_no_dataset(bucket, whole)
        go_on(*(["1/2", "2/2"] if number % 2 else [None]))
        assert bucket.objects() == whole


@pytest.mark.large
def test_parts_that_are_killed_are_continued(source, tmp_path, whole, own):
    """C1, C2: four at a time, of which some are killed in their requests; then all again."""
    command = ["convert", source, "--to", "wds", "--shard-size", SIZE, "--workers", 0]
    parts = [f"{number}/4" for number in range(1, 5)]
    with Forks(tmp_path, **own.environ) as forks:
        # The killed parts are held before they have done their tasks: each time, some are left.
        for match in ("/0+[1-9]/shard-", "result.zip", "/parts/2-of-4"):
            own.proxy.clear()
            own.proxy.add(Rule(method="PUT", match=match, skip=1, hold=True))
            runs = [forks.start(*command, "-o", own.out, "--part", which) for which in parts]
            own.proxy.wait("PUT", match, 2)
            for run in runs[::2] if "parts" not in match else runs:
                run.kill()
            own.proxy.clear()  # the others request again what was held
            ended = [run.wait() for run in runs]
            assert -9 in [code for code, _ in ended]
            for code, said in ended:
                assert code in (0, 2, -9), said
                was_told(code, said)
        for which in parts:
            code, said = forks.start(*command, "-o", own.out, "--part", which).wait()
            assert code == 0, said
        code, said = forks.start("merge", own.out).wait()
        assert code == 0, said
    assert own.objects() == whole


@pytest.mark.large
@pytest.mark.timeout(600)
def test_parts_and_whole_runs_that_begin_at_once(source, tmp_path, whole, bucket):
    """Nothing is lost; some are told that others are at work, and come again."""
    command = ["convert", source, "--to", "wds", "--shard-size", SIZE, "--workers", 0]
    with Forks(tmp_path, **bucket.environ) as forks:
        at_once(forks, [*command, "-o", bucket.out], bucket.out)
    assert bucket.objects() == whole
