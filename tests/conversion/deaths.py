"""Runs that die: storage layers that die at an operation, that copy what a death there would leave,
and that know what a power cut would lose."""

import re
import shutil

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.storage import fs
from tests.conftest import files_of


class Died(BaseException):
    """The process is gone: no `except Exception` may catch this."""


class Watched:
    """A storage layer that calls `seen` with the number of each operation, and with "before" it,
    in its "middle", and "after" it.

    `log` has what each operation did to which kind of path: numbers are left out.
    """

    dead = False

    def __init__(self, patch, seen):
        self.log = []
        self._seen = seen
        for name in fs.CHANGES:
            patch.setattr(fs, name, self._wrap(name, getattr(fs, name)))

    def _wrap(self, name, operation):
        def wrapped(*args):
            if self.dead:
                raise Died
            number = len(self.log)
            path = args[0].path if name in ("write", "rewrite") else args[0]
            kind = re.sub(r"(?<=\.)[0-9a-f]+(?=\.tmp)|\d+", "#", "/".join(path.parts[-2:]))
            self.log.append((name, kind))
            self._seen(number, "before")
            first, second = _halves(name, operation, args)
            result = first()
            try:
                self._seen(number, "middle")
                second()
                self._seen(number, "after")
            except Died:
                if name == "create":
                    result.close()
                raise
            return result

        return wrapped


def _halves(name, operation, args):
    """An operation in two steps; the second of most does nothing."""
    if name == "write":
        file, chunks = args
        data = b"".join(chunks)
        half = len(data) // 2
        return (lambda: operation(file, [data[:half]])), (lambda: operation(file, [data[half:]]))
    if name == "remove" and args[0].is_dir():
        children = sorted(args[0].iterdir())
        some = children[: len(children) // 2 + 1]
        return (lambda: [operation(child) for child in some]), (lambda: operation(*args))
    return (lambda: operation(*args)), (lambda: None)


class Dying(Watched):
    """A storage layer that dies before, in the middle of, or after its operation number `at`.

    Once dead, it does nothing more, whatever clean-up code tries.
    """

    def __init__(self, patch, at=-1, when="never"):
        super().__init__(patch, self._die)
        self._moment = at, when

    def _die(self, number, when):
        if (number, when) == self._moment:
            self.dead = True
            raise Died


def left_by_deaths(folder, run, everywhere=False):
    """Run, and put a folder into each state that a death of the run would have left there.

    It is copied in the middle of and after each change `everywhere`, else the first of each kind
    that writes, renames or removes: a kind is what is done to which kind of path. Nothing is run
    again to get there.
    """
    saved = folder.with_name(f"{folder.name}-at-deaths")
    moments = []

    def seen(number, when):
        name, path = layer.log[number]
        differs = name != "sync" if when == "after" else name in ("write", "remove")
        some = name in ("write", "rename", "remove") and layer.log.count((name, path)) == 1
        chosen = everywhere or some
        if when != "before" and differs and chosen:
            shutil.copytree(folder, saved / f"{len(moments)}", symlinks=True)
            moments.append(f"{when} operation {number}, {name} {path}")

    with pytest.MonkeyPatch.context() as patch:
        layer = Watched(patch, seen)
        run()
    assert len(layer.log) > 15
    for number, moment in enumerate(moments):
        print(f"died {moment}")
        shutil.rmtree(folder)
        (saved / f"{number}").rename(folder)
        fs._written.clear()  # what a new process does not know
        yield
    shutil.rmtree(saved)


def continued_after_deaths(
    folder, run, results, again=None, everywhere=False, name="out", hidden=True
):
    """Whatever a death of `run` leaves in the folder of an output, nothing looks complete but one
    of `results`, the files of the folder; and `again`, or the same run, makes the last of them.
    Unfinished work does not open where it is `hidden`."""
    for number, _ in enumerate(left_by_deaths(folder, run, everywhere)):
        if (folder / name).exists():
            found = files_of(folder).items()
            assert {file: data for file, data in found if ".partial/" not in file} in results
        if hidden and (folder / f"{name}.partial").exists():
            with pytest.raises(ShardkitError):
                shardkit.open(folder / f"{name}.partial")
        again(number) if again else run()
        assert files_of(folder) == results[-1]


def logged(dying, begin, run):
    """What a run does that does not die; `dying` is a class like `Dying`."""
    begin()
    with pytest.MonkeyPatch.context() as patch:
        whole = dying(patch)
        run()
    assert len(whole.log) > 15
    return whole.log


def died_at(moments, dying, log, begin, run):
    """Begin anew and run, dying at another of the moments each time: at which operation, and when
    ("before" it, ...). For what cannot be copied: see `left_by_deaths`."""
    for at, when in moments:
        begin()
        with pytest.MonkeyPatch.context() as patch:
            layer = dying(patch, at, when)
            try:
                run()
            except Died:
                pass
        assert layer.dead
        assert layer.log == log[: at + 1]
        yield


class Recorder:
    """A storage layer that knows what a power cut would lose, and checks what becomes visible."""

    def __init__(self, patch):
        self.unsynced = set()  # files with bytes, folders with entries
        self.log = []
        for name in fs.CHANGES:
            patch.setattr(fs, name, self._wrap(name, getattr(fs, name)))

    def _wrap(self, name, operation):
        def wrapped(*args):
            path = args[0].path if name in ("write", "rewrite") else args[0]
            self._note(name, path, *args[1:])
            self.log.append((name, path))
            return operation(*args)

        return wrapped

    def _note(self, name, path, *more):
        if name == "sync":
            self.unsynced.discard(path)
        elif name == "remove":
            self.unsynced = {p for p in self.unsynced if p != path and path not in p.parents}
        elif name == "rename":
            lost = [p for p in self.unsynced if p == path or path in p.parents]
            assert not lost, f"{path} becomes {more[0]} before these are on the disk: {lost}"
            self.unsynced |= {path.parent, more[0].parent}
        elif name in ("write", "rewrite"):
            self.unsynced.add(path)
        elif name == "create" or not path.exists():
            self.unsynced |= {path.parent, *([path] if name == "create" else [])}


def change(image):
    """In place, so that a dataset of it is still of the same recipe."""
    data = bytearray(image.read_bytes())
    data[-10] ^= 1
    image.write_bytes(data)


class Interrupted:
    """A monitor that ends a run when more than `most` samples are done; `done` were before it."""

    done = -1

    def __init__(self, most):
        self._most, self.samples = most, 0

    def start(self, plan, done):
        self.done = done

    def advance(self, progress):
        self.samples += progress.samples
        if self.samples > self._most:
            raise KeyboardInterrupt

    def copied(self, more, total):
        pass
