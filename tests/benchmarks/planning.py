"""A plan of any number of files: time and memory, and how both grow.

    python tests/benchmarks/planning.py --entries 10000000 [--shuffle] [--split] [--delay 0.001]

Plans the conversion of a folder of images that is generated while it is listed: 1,000 files in a
folder (`--in-folder`), 10 folders in a class, no file on any disk. With `--delay` each look at a
file, and each listing, takes so many seconds more, as on a network. Prints JSON: seconds, those of
a bare loop over the same entries, and the most memory: `anonymous` is what the system cannot take
away, `with_files` has the pages of temporary files as well, which it can.

With `--walk FOLDER` it walks through files that are there instead, as planning does, and looks at
each: `files_per_second`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_FOLDERS = 10  # in a class
_FOLDER = os.stat_result((stat.S_IFDIR, *[0] * 9))


class Entry:
    """One name of a folder, as `os.scandir` has it."""

    __slots__ = ("_status", "name")

    def __init__(self, name: str, status: os.stat_result) -> None:
        self.name, self._status = name, status

    @property
    def path(self) -> str:
        return self.name

    def is_dir(self) -> bool:
        return self._status is _FOLDER

    def is_file(self) -> bool:
        return self._status is not _FOLDER

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> os.stat_result:
        return self._status


class SlowEntry(Entry):
    """One that takes a while to look at, for the first time."""

    __slots__ = ("_known",)
    delay = 0.0

    def stat(self) -> os.stat_result:
        if not getattr(self, "_known", False):
            time.sleep(self.delay)
            self._known = True
        return self._status


class Tree:
    """A tree of so many files below a root: `class/folder/file`."""

    def __init__(self, root: Path, files: int, delay: float = 0.0, in_folder: int = 1000) -> None:
        self.root, self._files, self._delay, self._in_folder = root, files, delay, in_folder
        SlowEntry.delay = delay

    @contextlib.contextmanager
    def scandir(self, path: Path) -> Iterator[Iterator[Entry]]:
        if self._delay:
            time.sleep(self._delay)
        yield self.entries([*map(int, path.relative_to(self.root).parts)])

    def entries(self, numbers: Sequence[int]) -> Iterator[Entry]:
        sizes = (_FOLDERS * self._in_folder, self._in_folder, 1)
        first = sum(n * size for n, size in zip(numbers, sizes, strict=False))
        last = min(self._files, first + (self._files, *sizes)[len(numbers)])
        if len(numbers) < 2:
            for number in range(len(range(first, last, sizes[len(numbers)]))):
                yield Entry(f"{number:06d}", _FOLDER)
            return
        kind = SlowEntry if self._delay else Entry
        status = os.stat_result(
            (stat.S_IFREG, first, 0, 1, 0, 0, 100_000 + first % 1009, 0, 0, 0),
            {"st_mtime_ns": 1_700_000_000_000_000_000 + first},
        )
        for number in range(first, last):
            yield kind(f"{number:012d}.jpg", status)


@contextlib.contextmanager
def instead_of_disk(tree: Tree) -> Iterator[None]:
    """All of shardkit lists the tree."""
    from shardkit import walk

    original = walk.scandir

    def replace(old: Any, new: Any) -> None:
        for module in [m for m in sys.modules.values() if getattr(m, "scandir", None) == old]:
            module.scandir = new  # type: ignore[attr-defined]

    replace(original, tree.scandir)
    try:
        yield
    finally:
        replace(tree.scandir, original)  # of modules that were loaded meanwhile, too


class Memory:
    """The most memory of this process, in MB, looked up every few milliseconds."""

    def __enter__(self) -> Memory:
        self.anonymous = self.with_files = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            lines = Path("/proc/self/status").read_text().splitlines()
            sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
            self.anonymous = max(self.anonymous, int(sizes["RssAnon"]) >> 10)
            self.with_files = max(self.with_files, int(sizes["VmRSS"]) >> 10)


def measured(
    entries: int, delay: float = 0.0, in_folder: int = 1000, **options: Any
) -> dict[str, Any]:
    """A plan of so many files."""
    from shardkit.conversion.run import prepare
    from shardkit.options import ConvertOptions

    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), entries, delay, in_folder)
        began = time.perf_counter()
        for one in tree.entries(()) if not delay else ():
            for below in tree.entries([int(one.name)]):
                for entry in tree.entries([int(one.name), int(below.name)]):
                    entry.stat()
        bare = 2 * (time.perf_counter() - began)  # once to see what it is
        began = time.perf_counter()
        with instead_of_disk(tree), Memory() as memory:
            plan = prepare(folder, "wds", f"{folder}-out", ConvertOptions.of(**options))
            seconds = time.perf_counter() - began
            samples, tasks = plan.samples, len(plan.tasks)
            began = time.perf_counter()
            assert len(plan.tasks[-1].reading().source) > 0
            selecting = time.perf_counter() - began
    assert samples == entries
    return {
        "entries": entries,
        "folders": -(-entries // in_folder),
        "tasks": tasks,
        "seconds": round(seconds, 2),
        "of_generating": round(bare, 2),
        "seconds_to_select_a_task": round(selecting, 4),
        "anonymous": memory.anonymous,
        "with_files": memory.with_files,
    }


def walked(root: Path) -> dict[str, Any]:
    """A walk through files that are there."""
    from shardkit.walk import Walk, look

    began = time.perf_counter()
    walk = Walk(root, None, lambda name: True)
    files = sum(len([look(entry) for entry in listing.files]) for listing in walk)
    seconds = time.perf_counter() - began
    return {"files": files, "seconds": round(seconds, 2), "files_per_second": int(files / seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--in-folder", type=int, default=1000)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--walk", type=Path)
    given = parser.parse_args()
    if given.walk is not None:
        print(json.dumps(walked(given.walk)))
        return
    options: dict[str, Any] = {"shuffle": 1} if given.shuffle else {}
    options |= {"split": "train=0.9,val=0.1"} if given.split else {}
    print(json.dumps(measured(given.entries, given.delay, given.in_folder, **options)))


if __name__ == "__main__":
    main()
