"""Who may work on one output in a store: a whole run alone, parts of one job together."""

import warnings

import pytest

from shardkit.conversion import claim as claims
from shardkit.conversion.bucket import BucketPartial
from shardkit.conversion.claim import Claim, PartClaims
from shardkit.conversion.target import Target
from shardkit.errors import OutputError, ShardkitWarning
from shardkit.helpers.part_of import PartOf
from tests.conversion.test_part_lock import JOB, ONE, OTHER, TWO
from tests.remote.conftest import EACH_STORE, renewed

pytestmark = pytest.mark.filterwarnings("ignore:.* was claimed by a run")
THREE = PartOf(3, 3)


@pytest.fixture(autouse=True)
def _beat(monkeypatch, tmp_path):
    """Whoever waits sees that all that are alive renew their claims, and nothing else does."""
    made, take = [], Claim.take

    def taken(*given, **more):
        made.append(take(*given, **more))
        return made[-1]

    def beat(seconds):
        for claim in made:
            if claim.run in claims._held:
                renewed(claim)

    monkeypatch.setattr(Claim, "take", taken)
    monkeypatch.setattr(claims, "BEAT", 1e6)
    monkeypatch.setattr("time.sleep", beat)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    while _open:
        _open.pop().release()


_open = []


def partial(bucket):
    return BucketPartial(Target(bucket.path("out"), "wds"), bucket.path("out"))


def begun(bucket, part=None, job=JOB):
    found = partial(bucket)
    _open.append(found)
    found.begin(job, resume=True, part=part)
    return found


def refused(bucket, part, words, job=JOB):
    with pytest.raises(OutputError, match=words) as error:
        begun(bucket, part, job)
    assert error.value.fix
    return error.value


def test_who_looks_whether_anybody_is_at_work_is_told(bucket):
    for part, words in ((None, "another run"), (ONE, "part 1/")):
        run = begun(bucket, part)
        other = partial(bucket)
        with pytest.raises(OutputError, match=words):
            other.lock.refuse_busy()
        run.release()
        other.lock.refuse_busy()


def die(run):
    """As a process of this machine does."""
    claims._held.discard(run.lock.claim.run)


@EACH_STORE
def test_parts_work_beside_each_other_and_a_whole_run_when_they_have_ended(bucket):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, two = begun(bucket, ONE), begun(bucket, TWO)
        one.release()
        assert two.begun() == [ONE, TWO]
        two.lock.check()
        two.release()
        whole = begun(bucket)
    whole.lock.check()
    refused(bucket, ONE, "another run is working")
    refused(bucket, None, "another run is working")
    whole.discard()
    assert bucket.objects() == {}


def test_a_part_keeps_a_whole_run_out_which_says_which(bucket):
    two = begun(bucket, TWO)
    error = refused(bucket, None, "part 2/2 of this output is running, and a run without --part")
    assert error.found == "running: 2/2"
    two.lock.check()
    two.release()
    whole = begun(bucket)
    refused(bucket, TWO, "another run is working")
    whole.lock.check()
    whole.release()
    begun(bucket, TWO).lock.check()


def test_a_part_that_is_at_work_is_not_begun_twice(bucket):
    two = begun(bucket, TWO)
    with pytest.warns(ShardkitWarning, match="was claimed by a run on"):
        refused(bucket, TWO, "part 2/2 is already running")
    begun(bucket, PartOf(2, 3))
    two.lock.check()
    two.release()
    begun(bucket, TWO)


@EACH_STORE
def test_parts_of_another_job_wait_for_those_at_work_and_then_begin_anew(bucket):
    one = begun(bucket, ONE)
    error = refused(bucket, TWO, "part 1/2 of this output is running, and this one has", OTHER)
    assert error.found == "running: 1/2"
    assert one.job() == JOB
    one.lock.check()
    one.release()
    two = begun(bucket, TWO, OTHER)
    assert two.job() == OTHER
    begun(bucket, THREE, OTHER)
    refused(bucket, ONE, "parts? 2/2 .* is running", JOB)
    two.lock.check()


@EACH_STORE
@pytest.mark.parametrize("known", [True, False])
def test_parts_and_runs_of_the_dead_are_passed_over(bucket, monkeypatch, known):
    """At once where this machine knows it; else they lose their claims if they live after all."""
    one, two = begun(bucket, ONE), begun(bucket, TWO)
    for run in (one, two):
        die(run)
    if not known:
        monkeypatch.setattr(claims, "machine", lambda: "another")
    with warnings.catch_warnings():
        if known:
            warnings.simplefilter("error")
        whole = begun(bucket)
        die(whole)
        two_again = begun(bucket, TWO)
    for run in [two] if known else [one, two]:
        with pytest.raises(OutputError, match="taken over"):
            renewed(run.lock.claim)
    two_again.lock.check()


def test_a_whole_run_that_withdraws_lets_a_waiting_part_in(bucket, monkeypatch):
    claim = Claim.take(bucket.path("out.partial/run.json"))
    real = claims._watched

    def watched(*found):
        claim.release()
        return real(*found)

    monkeypatch.setattr(claims, "_watched", watched)
    begun(bucket, ONE).lock.check()


def test_a_claim_that_a_run_removes_as_it_ends_is_no_fault_of_the_store(bucket, monkeypatch):
    begun(bucket, ONE).release()
    path, real = bucket.path("out.partial/parts/1-of-2.json"), Claim._check_conditions

    def check(claim, old):
        path.store.delete(path.key)
        real(claim, old)

    monkeypatch.setattr(Claim, "_check_conditions", check)
    claim = Claim.take(path)
    renewed(claim)


def test_a_part_that_waited_removes_no_work_of_another_job(bucket):
    """Without work, the parts of the other job have not begun in this one."""
    one = begun(bucket, ONE)
    one.release()
    two = begun(bucket, TWO, OTHER)
    assert two.begun() == [TWO]
    two.write(two.publish_plan, b"", replace=True)
    two.release()
    refused(bucket, ONE, "there is unfinished work with other options", JOB)
    assert two.job() == OTHER


def test_no_part_slips_in_as_another_job_begins(bucket, monkeypatch):
    begun(bucket, ONE).release()
    real, slow = PartClaims._refuse_parts, []

    def look(lock, *about):
        real(lock, *about)
        if not slow:  # a part of the old job comes after the look, and withdraws
            slow.append(lock)
            refused(bucket, ONE, "another run is working")

    monkeypatch.setattr(PartClaims, "_refuse_parts", look)
    two = begun(bucket, TWO, OTHER)
    assert slow == [two.lock]
    refused(bucket, ONE, "part 2/2 of this output is running")
    two.lock.check()
