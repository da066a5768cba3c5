"""A claim keeps other runs away from an output in a store, which has no locks.

It is an object that says which run works there. Only who knows its tag can replace it, and its run
does so every few seconds: one that stays as it is was left by a run that is dead, and whoever has
seen that takes it over.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from shardkit import storage
from shardkit.checked import checked, parse
from shardkit.errors import OutputError, ShardkitError, StorageError, warn
from shardkit.remote import store as stores
from shardkit.remote.path import RemotePath
from shardkit.remote.store import Tag

BEAT = 10.0  # seconds between two renewals
DEAD = 3  # so many of them without a renewal: its run is dead
_LOOKS = 3  # at a claim, in each of these
_TRIES = 5  # to get a claim that others want as well

Found: TypeAlias = "tuple[bytes, Tag]"  # a claim, as it was read

_held: set[str] = set()  # the runs of this process


class Claim:
    """The claim of this run, from `take` to `release` or `remove`; a thread renews it."""

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
        busy: OutputError | None = None,
        wait: bool = True,
    ) -> Claim:
        """Raises OutputError where another run is at work, which takes half a minute to tell.

        Of a run of this machine that has ended that is known at once; without `wait`, any other
        one is taken to be at work. The claim says `about` as well, also when it is released.
        """
        claim = cls(path)
        claim._more.update(about or {})
        found = None
        for _ in range(_TRIES):
            if found is not None and not is_over(found[0]):
                now = _watched(path, *found) if wait else None
                if now != found:
                    raise busy or another_run(path)
            began, old = _now(), None if found is None else found[1]
            if claim._put(old):
                claim._renewed = began
                claim._check_conditions(old)
                _held.add(claim.run)
                threading.Thread(target=claim._beat, name="shardkit-claim", daemon=True).start()
                return claim
            found = path.store.read_tagged(path.key)
        raise busy or another_run(path)

    def say(self, **about: Any) -> None:
        """Have the claim say this too."""
        self._more.update(about)
        self._renew()
        self.check()

    def check(self) -> None:
        """Raise OutputError where another run has taken the claim, as this one stood still."""
        if not self._lost and _now() - self._renewed > 2 * BEAT:
            self._renew()
        if self._lost:
            raise OutputError(
                "another run has taken over this output, as this one stood still for too long",
                path=self._path.parent,
                fix="wait for that run, then run the same command again",
            )

    def release(self) -> None:
        """Tell other runs that this one has ended; its work stays."""
        if self._stop():
            with contextlib.suppress(ShardkitError):  # others find out, only later
                text = _text({"run": self.run, "released": True, **self._more})
                storage.put_if(text, self._path, self._tag)

    def remove(self) -> None:
        """Remove the claim, after all else."""
        self.check()
        if self._stop():
            storage.delete(self._path)

    def _stop(self) -> bool:
        """End the renewals; whether the claim is this run's still."""
        self._end.set()
        _held.discard(self.run)
        with self._lock:
            ours = not self._ended and not self._lost
            self._ended = True
        return ours

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            with contextlib.suppress(ShardkitError):  # without a connection `check` raises it
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
        """Write the claim where it has this tag; False where another run was faster."""
        self._beats += 1  # other bytes each time, so that it gets another tag
        data = _text({**self._about, **self._more, "beat": self._beats})
        made = storage.put_if(data, self._path, tag)
        if made is None:
            found = self._path.store.read_tagged(self._path.key)
            if found is None or said(found[0]).get("run") != self.run:
                return False
            made = found[1]  # by a request of ours whose answer was lost
            if found[0] != data:  # an earlier one: others may have seen it for long
                made = storage.put_if(data, self._path, made)
                if made is None:
                    return False
        self._tag = made
        return True

    def _check_conditions(self, old: Tag | None) -> None:
        """Raise StorageError for a store that writes whatever the condition of a request is.

        `old` is the tag of the claim that was taken over, whose run may still be alive.
        """
        data = _text({**self._about, **self._more, "beat": self._beats})
        made: list[Tag | None] = []

        def put(tag: Tag | None) -> None:
            made.append(storage.put_if(data, self._path, tag))

        for _ in range(2):  # a run that ends may have removed the claim of a part, but once only
            made.clear()
            stores.together(put, {None, old})
            if not any(made):
                return
        storage.delete(self._path)
        raise StorageError(
            "the store ignores the conditions of requests (If-None-Match, If-Match), so that"
            " two runs that write to the same output would not notice each other",
            path=self._path.parent,
            fix="write to a path on this machine, then copy the result to the URL",
        )


def ended(path: RemotePath, found: Found | None) -> bool:
    """Whether the run of a claim has ended. One that is dead loses its claim by this."""
    if found is None or is_over(found[0]):
        return True
    now = _watched(path, *found)
    if now != found:
        return now is None or is_over(now[0])
    text = _text({**said(found[0]), "run": None, "released": True})
    return storage.put_if(text, path, found[1]) is not None


def _watched(path: RemotePath, data: bytes, tag: Tag) -> Found | None:
    """What a claim is once it changes, or where it must be a dead run's, as it does not."""
    seconds = DEAD * BEAT
    about = said(data)
    warn(
        f"{path.parent} was claimed by a run on {about.get('host')} (process {about.get('pid')})"
        f" that has not said that it ended: waiting up to {seconds:.0f} s to see whether it is at"
        " work"
    )
    for _ in range(DEAD * _LOOKS):
        time.sleep(BEAT / _LOOKS)
        found = path.store.read_tagged(path.key)
        if found is None or found[1] != tag:
            return found
    return data, tag


def another_run(path: RemotePath) -> OutputError:
    return OutputError(
        "another run is working on this output",
        path=path.parent,
        fix="wait for it, or convert to another output, with -o",
    )


def is_over(data: bytes) -> bool:
    """Whether the run of a claim has ended, as it says itself, or as this machine tells."""
    about = said(data)
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
    """What numbers of processes belong to: a boot, and a container; "" where it cannot be told.

    And a user, as those of others may be hidden.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the boot; None where it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in ("Z", "X") else words[19]


def said(data: bytes) -> dict[str, Any]:
    """What a claim says."""
    try:
        return checked(dict[str, Any], parse(data))
    except ValueError:  # whatever it is, nobody renews it
        return {}


def _text(about: dict[str, Any]) -> bytes:
    return json.dumps(about).encode() + b"\n"


def _now() -> float:
    """Seconds that go on while the machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
