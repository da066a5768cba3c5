"""Claims keep other runs away from an output in a store, as stores have no locks.

A claim is an object that names the run working there. It can be replaced only by a conditional
request with its current tag (ETag), and its run does so every few seconds. If a claim does not
change, its run is dead, and a run that has observed this takes it over.

Below OUT.partial in a store:

run.json             the claim of a whole run, while it is running
parts/2-of-4.json    the claim of a part; it stays, and records whether the part is running

A part writes its claim and then looks for the claim of a whole run; a whole run writes its claim
and then looks for those of parts. So at least one of the two finds the other. The part withdraws
its claim, and waits to see whether the whole run is still alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from shardkit.conversion.locks import (
    OTHER_JOB,
    WHOLE_RUN,
    at_work,
    at_work_already,
    busy,
)
from shardkit.errors import OutputError, ShardkitError, StorageError, warn
from shardkit.helpers.checked import checked, parse
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.job import PARTS
from shardkit.storage import fs
from shardkit.storage.remote import store as stores
from shardkit.storage.remote.client import Tag
from shardkit.storage.remote.path import RemotePath

RUN = "run.json"
BEAT = 10.0  # seconds between two renewals
DEAD = 3  # number of these intervals without a renewal after which a run counts as dead
_LOOKS = 3  # times that a claim is read in each interval
_TRIES = 5  # attempts to take a claim that other runs compete for

Found: TypeAlias = "tuple[bytes, Tag]"  # a claim as read from the store

_held: set[str] = set()  # the runs of this process that hold claims


class Claim:
    """The claim of this run, from `take` to `release` or `remove`; renewed by a thread."""

    def __init__(self, path: RemotePath) -> None:
        self.run = uuid.uuid4().hex
        self._path = path
        self._about = {"run": self.run, **_this_process()}
        self._more: dict[str, Any] = {}
        self._beats = 0
        self._tag: Tag | None = None
        self._renewed = 0.0
        self._lost = self._ended = False
        self._lock = threading.Lock()
        self._end = threading.Event()

    @classmethod
    def take(
        cls,
        path: RemotePath,
        about: Mapping[str, Any] | None = None,
        *,
        refused: OutputError | None = None,
    ) -> Claim:
        """Take the claim. Raises OutputError (`refused`) if another run is active.

        To find out whether a run is still active takes half a minute, except for one of this
        machine that has ended. The claim also contains the entries of `about`, even after it is
        released.
        """
        claim = cls(path)
        claim._more.update(about or {})
        found = None
        for _ in range(_TRIES):
            alive = found is not None and not is_over(found[0]) and _watched(path, *found) != found
            if alive:
                raise refused or busy(path.parent)
            began, old = _now(), None if found is None else found[1]
            if claim._put(old):
                claim._renewed = began
                claim._check_conditions(old)
                _held.add(claim.run)
                threading.Thread(target=claim._beat, name="shardkit-claim", daemon=True).start()
                return claim
            found = path.store.read_tagged(path.key)
        raise refused or busy(path.parent)

    def check(self) -> None:
        """Raise OutputError if another run has taken the claim because this one stalled."""
        if not self._lost and _now() - self._renewed > 2 * BEAT:
            self._renew()
        if self._lost:
            raise OutputError(
                "another run has taken over this output, because this one stalled for too long",
                path=self._path.parent,
                fix="wait for that run, then run the same command again",
            )

    def release(self) -> None:
        """Tell other runs that this one has ended; its work is kept."""
        if self._stop():
            with contextlib.suppress(ShardkitError):  # other runs then find out later
                text = _text({"run": self.run, "released": True, **self._more})
                fs.put_if(text, self._path, self._tag)

    def remove(self) -> None:
        """Remove the claim, after everything else was removed."""
        self.check()
        if self._stop():
            fs.delete(self._path)

    def _stop(self) -> bool:
        """Stop renewing; returns whether this run still held the claim."""
        self._end.set()
        _held.discard(self.run)
        with self._lock:
            ours = not self._ended and not self._lost
            self._ended = True
        return ours

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            with contextlib.suppress(ShardkitError):  # without a connection, `check` raises it
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if self._ended or self._lost:
                return
            began = _now()
            if self._put(self._tag):
                self._renewed = began
            else:
                self._lost = True

    def _put(self, tag: Tag | None) -> bool:
        """Write the claim if it still has this tag; False if another run was faster."""
        self._beats += 1  # different bytes each time, so that the tag changes
        data = _text({**self._about, **self._more, "beat": self._beats})
        made = fs.put_if(data, self._path, tag)
        if made is None:
            found = self._path.store.read_tagged(self._path.key)
            if found is None or entries_of(found[0]).get("run") != self.run:
                return False
            made = found[1]  # written by a request of this run whose response was lost
            if found[0] != data:  # an earlier one, which other runs may have seen for a while
                made = fs.put_if(data, self._path, made)
                if made is None:
                    return False
        self._tag = made
        return True

    def _check_conditions(self, old: Tag | None) -> None:
        """Raise StorageError if the store ignores the conditions of requests.

        `old` is the tag of the claim that was taken over, whose run may still be alive.
        """
        data = _text({**self._about, **self._more, "beat": self._beats})
        made: list[Tag | None] = []

        def put(tag: Tag | None) -> None:
            made.append(fs.put_if(data, self._path, tag))

        for _ in range(2):  # once, a run that just ended may have removed the claim of a part
            made.clear()
            stores.together(put, {None, old})
            if not any(made):
                return
        fs.delete(self._path)
        raise StorageError(
            "the store ignores the conditions of requests (If-None-Match, If-Match), so that"
            " two runs writing to the same output would not notice each other",
            path=self._path.parent,
            fix="write to a path on this machine, then copy the result to the URL",
        )


class TakenError(OutputError):
    """Another process is replacing the job at this moment."""


class PartClaims:
    """The claim of one run or of one part: what `PartLock` is in a folder."""

    part: PartOf | None = None  # the part that this process carries out, if any

    def __init__(self, path: RemotePath) -> None:
        self._path, self._run = path, path / RUN
        self._claim: Claim | None = None

    @property
    def claim(self) -> Claim:
        assert self._claim is not None
        return self._claim

    def take(self) -> None:
        """Claim the output; raises OutputError if others are running."""
        self._claim = Claim.take(self._run)
        self._refuse_parts(WHOLE_RUN)

    def share(self, part: PartOf, job: str) -> None:
        """Claim a part of a job, given by its digest, unless a whole run is active."""
        self.part, refused = part, at_work_already(part, self._path)
        while True:
            self._claim = Claim.take(self._claim_of(part), {"job": job}, refused=refused)
            found = self._run.store.read_tagged(self._run.key)
            if found is None or is_over(found[0]):
                return
            self._claim.release()
            if not ended(self._run, found):
                raise busy(self._path)

    @contextlib.contextmanager
    def alone(self, job: str) -> Iterator[None]:
        """Keep new parts from beginning for a moment. Raises OutputError if other parts of the same
        `job` are running, and TakenError if another process does this at the moment."""
        run = Claim.take(self._run, refused=TakenError("taken"))
        try:
            self._refuse_parts(OTHER_JOB, job)
            yield
        finally:
            run.release()

    def refuse_busy(self) -> None:
        """Raise OutputError if others are running; claims nothing itself."""
        self._refuse_parts(OTHER_JOB)
        if not ended(self._run, self._run.store.read_tagged(self._run.key)):
            raise busy(self._path)

    def _refuse_parts(self, why: str, job: str | None = None) -> None:
        """Raise OutputError if other parts (of one `job`) are running; dead ones lose claims."""
        claims, live = self._parts(), []

        def look(part: PartOf) -> None:
            other = part != self.part and job in (None, entries_of(claims[part][0]).get("job"))
            if other and not ended(self._claim_of(part), claims[part]):
                live.append(part)

        stores.together(look, claims)
        if live:
            raise at_work(sorted(live), self._path, why)

    def _claim_of(self, part: PartOf) -> RemotePath:
        return self._path / PARTS / f"{part.name}.json"

    def _parts(self) -> dict[PartOf, Found]:
        """Return the claims of all parts."""
        found: dict[PartOf, Found] = {}
        store = self._path.store

        def read(key: str) -> None:
            part = PartOf.named(RemotePath(store, key).name.removesuffix(".json"))
            claim = store.read_tagged(key)
            if part is not None and claim is not None:
                found[part] = claim

        stores.together(read, store.keys((self._path / PARTS).key))
        return found

    def begun(self, job: str) -> list[PartOf]:
        """Return the parts of a job that have ever begun."""
        claims = self._parts()
        return sorted(part for part in claims if entries_of(claims[part][0]).get("job") == job)

    def check(self) -> None:
        """Raise OutputError if another run has taken over this output."""
        self.claim.check()

    def release(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()


def ended(path: RemotePath, found: Found | None) -> bool:
    """Whether the run of a claim has ended. The claim of a dead run is marked as released."""
    if found is None or is_over(found[0]):
        return True
    now = _watched(path, *found)
    if now != found:
        return now is None or is_over(now[0])
    text = _text({**entries_of(found[0]), "run": None, "released": True})
    return fs.put_if(text, path, found[1]) is not None


def _watched(path: RemotePath, data: bytes, tag: Tag) -> Found | None:
    """Wait until a claim changes, and return it; unchanged if its run must be dead."""
    seconds = DEAD * BEAT
    about = entries_of(data)
    warn(
        f"{path.parent} was claimed by a run on {about.get('host')} (process {about.get('pid')})"
        f" that has not reported its end: waiting up to {seconds:.0f} s to see whether it is"
        " still running"
    )
    for _ in range(DEAD * _LOOKS):
        time.sleep(BEAT / _LOOKS)
        found = path.store.read_tagged(path.key)
        if found is None or found[1] != tag:
            return found
    return data, tag


def is_over(data: bytes) -> bool:
    """Return whether the run of a claim has ended, according to the claim or to this machine."""
    about = entries_of(data)
    if about.get("released") is True:
        return True
    here = _this_process()
    if not here["machine"] or about.get("machine") != here["machine"]:
        return False
    if about.get("pid") == here["pid"] and about.get("started") == here["started"]:
        return about.get("run") not in _held
    pid = about.get("pid")
    return isinstance(pid, int) and _started(pid) != about.get("started")


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": pid,
        "started": _started(pid),
    }


def machine() -> str:
    """Identifies the scope of process IDs: boot, container, and user, as the processes of other
    users may be hidden. "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in ("Z", "X") else words[19]


def entries_of(data: bytes) -> dict[str, Any]:
    """Return the entries of a claim."""
    try:
        return checked(dict[str, Any], parse(data))
    except ValueError:  # not a claim, and so not renewed by any run
        return {}


def _text(about: dict[str, Any]) -> bytes:
    return json.dumps(about).encode() + b"\n"


def _now() -> float:
    """A monotonic time in seconds that includes the time in which the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
