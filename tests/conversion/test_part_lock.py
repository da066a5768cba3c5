"""Who may work on one output at the same time: a whole run alone, parts of one job together."""

import errno
import os

import pytest

from shardkit.conversion import locks
from shardkit.conversion.folder import FolderPartial
from shardkit.conversion.locks import PartLock
from shardkit.conversion.target import Target
from shardkit.errors import OutputError, ShardkitWarning, StorageError
from shardkit.helpers.part_of import PartOf
from shardkit.storage import fs
from tests.conversion.part_process import at_once

JOB = {"recipe": {"format": "wds"}, "times": {}}
OTHER = {"recipe": {"format": "wds"}, "times": {"a": 1}}
ONE, TWO = PartOf(1, 2), PartOf(2, 2)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(locks, "_PAUSE", 0.001)
    monkeypatch.setattr(locks, "_working", set())


def partial(out):
    return FolderPartial(Target(out, "wds"))


def begun(out, part=None, job=JOB):
    found = partial(out)
    found.begin(job, resume=True, part=part)
    return found


def finish_task(run, number):
    fs.make_folder(run.task_folder(number))
    fs.write_file(run.task_folder(number) / "result.json", b"")


def refused(out, part, words, job=JOB):
    with pytest.raises(OutputError, match=words) as error:
        begun(out, part, job)
    assert error.value.fix
    return error.value


def test_parts_work_beside_each_other_and_a_whole_run_when_they_have_ended(out):
    one, two = begun(out, ONE), begun(out, TWO)
    finish_task(one, 0)
    one.release()
    assert two.begun() == [ONE, TWO]
    assert two.results() == {"000000"}
    two.release()
    whole = begun(out)
    assert whole.finished(map(whole.task_folder, range(2))) == {whole.task_folder(0)}
    refused(out, ONE, "another run is working")
    refused(out, None, "another run is working")
    whole.discard()
    assert not whole.path.exists()


def test_a_part_keeps_a_whole_run_out_which_says_which(out):
    two = begun(out, TWO)
    error = refused(out, None, "part 2/2 of this output is running, and a run without --part")
    assert error.found == "running: 2/2"
    two.release()
    begun(out).release()
    begun(out, TWO).release()


def test_who_looks_whether_anybody_is_at_work_is_told_and_keeps_nobody_out(out):
    for part, words in ((None, "another run is working"), (ONE, "part 1/2 of this output is")):
        run = begun(out, part)
        with pytest.raises(OutputError, match=words):
            partial(out).lock.refuse_busy()
        run.release()
        partial(out).lock.refuse_busy()


def test_what_is_waited_for_is_said_once(out, monkeypatch):
    monkeypatch.setattr(locks, "_QUIET", 0)
    whole = begun(out)
    with pytest.warns(ShardkitWarning, match="another run is working on this output: wait") as told:
        refused(out, TWO, "another run is working")
    assert len(told) == 1
    assert str(whole.path) in str(told[0].message)
    whole.release()
    one = begun(out, ONE)
    with pytest.warns(ShardkitWarning, match="part 1/2 is already running: waiting up to"):
        refused(out, ONE, "part 1/2 is already running")
    one.release()


def test_to_look_for_parts_at_work_makes_none(out, monkeypatch):
    """As where another run removes what parts have left while this one looks."""
    begun(out, ONE).release()
    two = begun(out, TWO)
    real = PartLock.begun

    def begun_before(lock):
        found = real(lock)
        fs.remove(two.path / "parts" / ONE.name)
        return found

    monkeypatch.setattr(PartLock, "begun", begun_before)
    refused(out, None, "part 2/2 of this output is running")
    assert [path.name for path in (two.path / "parts").iterdir()] == [TWO.name]
    two.release()


def test_a_part_that_is_at_work_is_not_begun_twice(out):
    two = begun(out, TWO)
    refused(out, TWO, "part 2/2 is already running")
    begun(out, PartOf(2, 3)).release()
    two.release()
    begun(out, TWO).release()


def test_parts_of_another_job_wait_for_those_at_work_and_then_begin_anew(out):
    one = begun(out, ONE)
    finish_task(one, 0)
    error = refused(out, TWO, "part 1/2 of this output is running, and this one has other", OTHER)
    assert error.found == "running: 1/2"
    assert one.results()
    one.release()
    error = refused(out, TWO, "there is unfinished work with other options", OTHER)
    assert str(one.path) in error.fix
    assert (one.results(), one.job()) == ({"000000"}, JOB)
    one.undo(one.task_folder(0))
    one.write(one.publish_plan, b"", replace=True)
    refused(out, TWO, "there is unfinished work with other options", OTHER)
    fs.remove(one.path / "plan")
    two = begun(out, TWO, OTHER)
    assert (two.results(), two.job(), two.begun()) == (set(), OTHER, [TWO])
    names = sorted(path.name for path in two.path.iterdir())
    assert names == ["job.json", "lock", "parts", "tasks"]


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(out, monkeypatch):
    real, removed = locks.try_lock, []

    def late(folder, *rest, **more):
        if not removed:
            removed.append(folder)
            folder.rmdir()
        return real(folder, *rest, **more)

    monkeypatch.setattr(locks, "try_lock", late)
    one = begun(out, ONE)
    assert removed
    assert one.begun() == [ONE]
    one.release()


def test_a_part_removes_what_it_left_itself_alone(out):
    one = begun(out, ONE)
    names = ["000000.1-of-2.abc.tmp", "000001.2-of-2.abc.tmp", "000002.abc.tmp", "000003"]
    for name in names:
        (one.tasks / name).mkdir()
    two = begun(out, TWO)
    assert sorted(path.name for path in two.tasks.iterdir()) == [names[0], *names[2:]]
    for run in (one, two):
        run.release()
    whole = begun(out)
    assert not list(whole.tasks.iterdir())


def test_a_part_that_comes_as_another_run_ends_says_so(out, monkeypatch):
    whole = begun(out)
    monkeypatch.setattr("time.sleep", lambda seconds: whole.discard())
    refused(out, ONE, "another run has just ended")
    assert not whole.path.exists()


NO_LOCKS = ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "EINVAL", "EBADF", "EPERM"]
AS_IF_HELD = ["EWOULDBLOCK", "EACCES"]


def no_locks(monkeypatch, name):
    """What it says: also of an `flock` that does nothing."""
    number = getattr(errno, name, 0)

    def flock(handle, how):
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    return os.strerror(number) if number else "every lock is granted"


@pytest.mark.parametrize("name", [*NO_LOCKS, *AS_IF_HELD, "nothing"])
def test_parts_work_without_locks(out, monkeypatch, name):
    why = no_locks(monkeypatch, name)
    with pytest.warns(ShardkitWarning) as found:
        one = begun(out, ONE)
    assert len(found) == 1
    assert f"has no locks ({why})" in str(found[0].message)
    assert "all parts have ended before you run `shardkit merge`" in str(found[0].message)
    (one.tasks / "000000.1-of-2.abc.tmp").mkdir()
    with pytest.warns(ShardkitWarning):
        two, twice = begun(out, TWO), begun(out, ONE)
    assert (one.tasks / "000000.1-of-2.abc.tmp").exists()  # who left it may be at work
    twice.release()
    assert one.begun() == two.begun() == [ONE, TWO]
    with pytest.warns(ShardkitWarning), pytest.raises(OutputError, match="cannot tell whether"):
        begun(out, TWO, OTHER)
    with pytest.warns(ShardkitWarning, match="no other run writes"):
        whole = begun(out)
    assert whole.begun() == [ONE, TWO]
    whole.discard()


def test_a_lock_that_fails_is_named(out, monkeypatch):
    no_locks(monkeypatch, "EIO")
    for part in (None, ONE):
        with pytest.raises(StorageError, match="cannot lock: Input/output error"):
            begun(out, part)


def test_what_a_probe_of_locks_has_left_is_no_stranger(out):
    one = begun(out, ONE)
    (one.path / "lock.0123").touch()
    one.release()
    begun(out).discard()
    assert not one.path.exists()


@pytest.mark.large
@pytest.mark.timeout(600)
def test_processes_that_begin_at_once(out):
    """Parts and whole runs, of two jobs, some killed: nobody is alone beside another."""
    at_once(str(out), 12)
