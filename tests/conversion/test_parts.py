"""C1 to C3 of conversions in parts, which several processes do without talking to one another."""

import json
import random
from functools import partial

import pytest

import shardkit
from shardkit.conversion.partial import PUBLISH_PLAN
from shardkit.conversion.publish_plan import PublishPlan, who_is_missing
from shardkit.conversion.work import unzipped, zipped
from shardkit.errors import DamagedError, OutputError, SampleError, SourceError, UsageError
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.job import JOB
from shardkit.storage import fs
from tests.conftest import IMAGE_FORMATS, files_of
from tests.conversion.conftest import raised
from tests.conversion.deaths import Interrupted
from tests.conversion.part_kills import Forks, at_once, killed_parts
from tests.sources.test_text import put
from tests.test_cli import run as command

SIZE = "8kB"


@pytest.fixture
def bad(source):
    """The source with three bad samples, and the options that skip them."""
    for name in ("class0/001", "class0/007", "class1/005"):
        (source / f"{name}.jpg").write_bytes(b"text")
    return {"on_error": "skip", "image": shardkit.ImageOptions(check="decode")}


def convert(source, out, part=None, to="wds", **more):
    options = {"workers": 0, "shard_size": SIZE, **more}
    return shardkit.convert(source, to, out, part=part, **options)


def stop(source, out, part, at, **options):
    """Begin a part, or a whole run, and interrupt it when so many samples are done."""

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, part, progress=Interrupted(most=at - 1), **options)


def test_two_parts_make_what_one_run_makes(source, tmp_path, out):
    whole = convert(source, tmp_path / "whole")
    first = convert(source, out, "1/2")
    assert not out.exists()
    assert first.splits == {}
    assert (first.part.part, first.part.tasks, first.part.missing) == ("1/2", 6, 5)
    assert first.part.missing_parts == ("2/2",)
    about = first.to_dict()
    totals = {name: about[name] for name in ("samples", "bytes", "errors")}
    assert totals == {name: about["part"][name] for name in totals}
    assert totals["errors"] == 0 < totals["samples"] < 16
    shards = (tmp_path / "out.partial/tasks").rglob("*.tar")
    assert totals["bytes"] == sum(shard.stat().st_size for shard in shards)
    assert convert(source, out, "1/2").part == first.part
    assert convert(source, out, "2/2").part.missing == 0
    assert not out.exists()
    error = raised(shardkit.NotFoundError, "no such file", shardkit.open, out)
    assert f"run `shardkit merge {out}`" in error.fix
    result = shardkit.merge(out)
    assert files_of(out) == files_of(tmp_path / "whole")
    assert result.part is None
    assert result.samples == whole.samples == 16
    assert result.source_bytes == whole.source_bytes
    assert not out.with_name("out.partial").exists()
    for part in ("1/2", "2/3"):
        assert convert(source, out, part).already_complete
    assert shardkit.merge(out).already_complete


def test_a_task_that_two_parts_finish_is_one(source, out, whole, monkeypatch):
    """As where another number of parts is begun while the first ones are at work."""
    real = fs.rename

    def rename(old, new):
        if new.name == "000000":
            monkeypatch.setattr(fs, "rename", real)
            assert convert(source, out, "1/3").part.tasks == 4
            assert old.exists()
            assert new.exists()
        real(old, new)

    monkeypatch.setattr(fs, "rename", rename)
    convert(source, out, "1/2")
    assert not list((out.with_name("out.partial") / "tasks").glob("*.tmp"))
    convert(source, out, "2/2")
    shardkit.merge(out)
    assert files_of(out) == whole


MEMBERS = {"shard_size": None, "keys": ["class0/001", "class1/003"]}


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("wds", {"split": "train=0.5,val=0.5", "stats": True, "safe_keys": True}),
        ("parquet", {"dedup": "exact", "shuffle": True, "limit": 9}),
        pytest.param("lmdb", MEMBERS, marks=pytest.mark.large),
    ],
)
def test_merge_needs_neither_source_nor_options(source, tmp_path, out, to, options):
    (source / "class1/copy.jpg").write_bytes((source / "class1/003.jpg").read_bytes())
    (source / "notes.doc").write_bytes(b"x")
    whole = convert(source, tmp_path / "whole", to=to, **options)
    stop(source, out, None, at=1, to=to, **options)
    for part in ("1/3", "3/3", "2/3"):
        convert(source, out, part, to=to, **options)
    source.rename(tmp_path / "gone")
    result = shardkit.merge(out)
    assert files_of(out) == files_of(tmp_path / "whole")
    found, expected = ({**made.to_dict(), "seconds": None} for made in (result, whole))
    there, here = (json.dumps(f"{tmp_path / name}")[1:-1] for name in ("whole", "out"))
    assert found == json.loads(json.dumps(expected).replace(there, here))


def test_tokens_come_with_their_tokenizer(tmp_path, out, gpt2):
    """Arrays, which a schema has with shapes, and the files of a tokenizer, which merge copies."""
    for number in range(3):
        put(tmp_path / f"in/{number}.txt", f"{number} words " * 500)
    asked = {"to": "arrow", "text": shardkit.TextOptions(tokenizer=gpt2, seq_len=64)}
    convert(tmp_path / "in", tmp_path / "whole", **asked)
    for part in ("1/2", "2/2"):
        convert(tmp_path / "in", out, part, **asked)
    shardkit.merge(out)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_whole_run_finishes_what_parts_began_and_the_other_way_round(source, tmp_path, whole):
    convert(source, tmp_path / "a", "2/3")
    assert (tmp_path / "a.partial/tasks/000001/result.json").exists()
    assert convert(source, tmp_path / "a").part is None
    stop(source, tmp_path / "b", None, at=5)
    assert convert(source, tmp_path / "b", "1/2").part.missing < 5
    for part in ("2/4", "4/4"):
        convert(source, tmp_path / "b", part)
    shardkit.merge(tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") == whole


def test_parts_of_other_options_are_refused(source, tmp_path, out):
    convert(source, out, "1/2")
    before = files_of(tmp_path / "out.partial/tasks")
    for more in ({}, {"overwrite": True}):
        with pytest.raises(OutputError, match="shard_size was 8000, is 9000"):
            convert(source, out, "2/2", shard_size="9kB", **more)
    (source / "class0/000.jpg").unlink()
    error = raised(OutputError, "the source has changed", convert, source, out, "2/2")
    assert "out.partial" in error.fix
    assert files_of(tmp_path / "out.partial/tasks") == before


def test_merge_names_what_is_missing(source, out):
    raised(OutputError, "no conversion in parts", shardkit.merge, out)
    stop(source, out, None, at=5)
    raised(OutputError, "was not started in parts", shardkit.merge, out)
    convert(source, out, "1/3")
    stop(source, out, "3/3", at=2)
    error = raised(OutputError, "not all parts", shardkit.merge, out)
    words = "6 tasks are missing: 2/3 never began; 3/3 began and did not end"
    assert error.found == words
    assert "--part 2/3 and so on" in error.fix
    assert not out.exists()
    one, two = PartOf(1, 2), PartOf(2, 2)
    assert who_is_missing([one], {1}) == ("1 task is missing: 2/2 never began", [two])
    assert who_is_missing([], {1, 3}) == ("2 tasks are missing", [])


def test_parts_that_cannot_be(source, tmp_path, out):
    with pytest.raises(UsageError, match="cannot be verified that all parts"):
        shardkit.convert([{"x": n} for n in range(4)], "wds", out, part="1/2")
    for part in ("0/2", "3/2", "2", "1/0"):
        raised(UsageError, "invalid part", convert, source, out, part)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_parts_replace_a_dataset_where_they_are_told_to(source, out, whole):
    convert(source, out, shard_size="20kB")
    raised(OutputError, "holds another dataset", convert, source, out, "1/2")
    convert(source, out, "1/2", overwrite=True)
    convert(source, out, "2/2", overwrite=True)
    shardkit.merge(out)
    assert files_of(out) == whole
    # It may be what all parts have just made: a part that comes late does not begin again.
    assert convert(source, out, "1/2", overwrite=True).already_complete
    assert not out.with_name("out.partial").exists()


def test_merge_replaces_nothing_that_parts_were_not_told_to(source, tmp_path, out):
    convert(source, out, "1/2")
    convert(source, out, "2/2")
    (tmp_path / "out.partial").rename(tmp_path / "aside")
    convert(source, out, shard_size="20kB")
    before = files_of(out)
    (tmp_path / "aside").rename(tmp_path / "out.partial")
    error = raised(OutputError, "holds another dataset", shardkit.merge, out)
    assert files_of(out) == before
    assert "--overwrite" in error.fix
    convert(source, out, "1/2", overwrite=True)
    assert files_of(out) == before
    shardkit.merge(out)
    assert files_of(out) != before


def test_bad_samples(source, tmp_path, out, bad):
    assert convert(source, tmp_path / "whole", **bad).errors == 3
    done = [convert(source, out, part, **bad) for part in ("1/2", "2/2")]
    assert shardkit.merge(out).errors == sum(part.errors for part in done) == 3
    assert files_of(out) == files_of(tmp_path / "whole")
    assert 0 < done[0].part.errors < 3

    few, message = tmp_path / "few", "more than 2 samples are bad"
    convert(source, few, "1/2", max_errors=2, **bad)
    raised(SourceError, message, convert, source, few, "2/2", max_errors=2, **bad)
    convert(source, few, "2/2", **bad)
    convert(source, few, "1/2", max_errors=2, **bad)
    assert "--max-errors" in raised(SourceError, message, shardkit.merge, few).fix
    convert(source, few, "2/2", max_errors=3, **bad)
    shardkit.merge(few)
    assert files_of(few) == files_of(tmp_path / "whole")

    convert(source, tmp_path / "skips", "1/2", **bad)
    with pytest.raises(OutputError, match="on_error was skip, is fail"):
        convert(source, tmp_path / "skips", "2/2", **{**bad, "on_error": "fail"})


def test_parts_skip_bad_samples_where_others_stopped_at_them(source, tmp_path, out, bad):
    convert(source, tmp_path / "whole", **bad)
    stop(source, tmp_path / "fails", None, at=16, **bad)
    for name, parts in (("out", ("1/2", "2/2")), ("fails", ("1/1", "1/2", "2/2"))):
        for part in parts:
            with pytest.raises(SampleError):
                convert(source, tmp_path / name, part, **{**bad, "on_error": "fail"})
    assert not (tmp_path / "fails").exists()
    assert list((tmp_path / "out.partial/tasks").iterdir())
    raised(OutputError, "not all parts", shardkit.merge, tmp_path / "fails")
    for part in ("2/2", "1/2"):
        convert(source, out, part, **bad)
    shardkit.merge(out)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_what_is_passed_over_may_come_and_go_and_parts_may_have_no_tasks(source, out):
    (source / "class0/.hidden").write_bytes(b"x")
    done = convert(source, out, "15/15", workers=2)
    assert (done.part.tasks, done.part.missing) == (0, 11)
    convert(source, out, "1/2")
    (source / "class0/.hidden").unlink()
    (source / "class0/notes.doc").write_bytes(b"x")
    assert convert(source, out, "2/2").part.missing == 0
    assert shardkit.merge(out).samples == 16


def test_another_version_does_not_merge(source, tmp_path, out):
    convert(source, out, "1/1")
    path = tmp_path / "out.partial/job.json"
    job = json.loads(path.read_text())
    job["versions"]["shardkit"] = "0.0.1"
    path.write_text(json.dumps(job))
    for again in (shardkit.merge, partial(convert, source), partial(convert, source, part="1/1")):
        assert "0.0.1" in str(raised(OutputError, "by another version", again, out))


def test_a_damaged_job_is_named_and_its_work_stays(source, tmp_path, out):
    """Beside an older dataset too, which is not taken for the result."""
    convert(source, out, shuffle=True)
    convert(source, out, "1/2", overwrite=True)
    path = tmp_path / "out.partial" / JOB
    path.write_bytes(path.read_bytes()[:100])
    before = files_of(tmp_path)
    for again in (partial(convert, source, part="2/2"), shardkit.merge):
        error = raised(OutputError, "the description of an unfinished", again, out)
        assert error.where["path"] == path
    assert {**files_of(tmp_path), "out.partial/lock": b""} == {**before, "out.partial/lock": b""}


def test_a_damaged_plan_is_named(source, tmp_path, out, whole):
    convert(source, out, "1/2")
    path = tmp_path / "out.partial" / PUBLISH_PLAN
    stored = path.read_bytes()
    assert PublishPlan.unpacked(stored, path).packed() == stored
    for data in (b"", b"x", stored[:200], stored.replace(b'"max_bytes"', b'"mix_bytes"')):
        path.write_bytes(data)
        for again in (partial(convert, source, part="2/2"), shardkit.merge):
            raised(DamagedError, "the stored plan is damaged", again, out)
    convert(source, out)
    assert files_of(out) == whole


def test_an_archive_with_files_in_files_is_refused():
    """So that a small one cannot take much memory: each file may hold all that follow."""
    inner = zipped({"b": b"x" * 1000})
    directory = inner.index(b"PK\x01\x02")
    outer = zipped({"a": inner[:directory]})
    start, end = outer.index(b"PK\x01\x02"), outer.index(b"PK\x05\x06")
    entry = bytearray(inner[directory : inner.index(b"PK\x05\x06")])
    entry[42:46] = outer.index(b"PK\x03\x04", 1).to_bytes(4, "little")
    size = (end - start + len(entry)).to_bytes(4, "little")
    last = outer[end : end + 8] + b"\2\0\2\0" + size + outer[end + 16 :]
    packed = outer[:end] + entry + last
    raised(ValueError, "larger than the archive", unzipped, packed)
    assert unzipped(outer) == {"a": inner[:directory]}


def test_the_commands(source, out):
    words = ["convert", source, "--to", "wds", "-o", out, "--shard-size", SIZE, "--workers", 0]
    assert "6 of 11 tasks" in command(*words, "--part", "1/2", "--plan").stdout
    about = json.loads(command(*words, "--part", "1/2", "--plan", "--json").stdout)
    assert (about["tasks"], about["part"]["part"], about["part"]["tasks"]) == (11, "1/2", 6)
    assert 0 < about["part"]["bytes"] < about["bytes"]
    parts = json.loads(command(*words, "--part", "1/3", "--json").stdout)
    assert parts["samples"] == parts["part"]["samples"] > 0
    made = command(*words, "--part", "1/2").stdout
    assert "6 tasks" in made
    assert "3 tasks of part 2/2" in made
    assert f"shardkit merge {out}` once all parts have ended" in made
    assert "not all parts" in command("merge", out, check=2).stderr
    assert json.loads(command(*words, "--part", "2/2", "--json").stdout)["part"]["missing"] == 0
    assert "All tasks are done. Run" in command(*words, "--part", "2/2").stdout
    assert json.loads(command("merge", out, "--json").stdout)["part"] is None
    assert json.loads(command("merge", out, "--json").stdout)["already_complete"]
    assert "already complete" in command("merge", out).stdout
    assert command("merge", out, "--quiet").stdout == ""


@pytest.mark.large
@pytest.mark.xdist_group("timed")
@pytest.mark.timeout(600)
def test_parts_that_are_killed_are_continued(source, tmp_path):
    """C1, C2: four at a time, of all formats in turn, the last with workers."""
    dice, killed = random.Random(1), 0
    with Forks(tmp_path) as forks:
        for number, to in enumerate([*IMAGE_FORMATS, "wds"]):
            out, whole = tmp_path / f"out{number}", tmp_path / f"whole{number}"
            workers = number // len(IMAGE_FORMATS)
            command = ["convert", source, "--to", to, "--shard-size", "16kB", "--workers", workers]
            convert(source, whole, to=to, shard_size="16kB")
            killed += killed_parts(forks, [*command, "-o", out], out, 25, dice)
            assert files_of(out) == files_of(whole), to
            assert not out.with_name(f"{out.name}.partial").exists()
    assert killed > 20


@pytest.mark.large
@pytest.mark.xdist_group("timed")
def test_parts_and_whole_runs_that_begin_at_once(source, tmp_path, whole):
    """Nothing is lost, and all but some are told."""
    told = 0
    with Forks(tmp_path) as forks:
        for number in range(3):
            out = tmp_path / f"out{number}"
            command = ["convert", source, "--to", "wds", "--shard-size", SIZE, "--workers", 0]
            told += at_once(forks, [*command, "-o", out], out)
            assert files_of(out) == whole
            assert not out.with_name(f"{out.name}.partial").exists()
    print(f"{told} were told that others are at work")
