"""A plan of any number of files: time and memory, and how both grow.

    python -m tests.benchmarks.planning --entries 10000000 [--table]

Plans the conversion of a folder of images that is generated while it is listed: 1,000 files in a
folder, 10 folders in a class, no file on any disk. With `--table` the labels come from a CSV file
that has a row for each file, in another order. Prints JSON: seconds, those of a bare loop over the
same entries, and the most memory: `anonymous` is what the system cannot take away, `with_files` has
the pages of temporary files as well, which it can.
"""

import contextlib
import json
import os
import random
import stat
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.harness import Memory, arguments, seconds_of

_FOLDERS, _IN_FOLDER = 10, 1000  # folders in a class, files in a folder
_FOLDER = os.stat_result((stat.S_IFDIR, *[0] * 9))


class Entry:
    """One name of a folder, as `os.scandir` has it."""

    __slots__ = ("_status", "name")

    def __init__(self, name, status):
        self.name, self._status = name, status

    @property
    def path(self):
        return self.name

    def is_dir(self):
        return self._status is _FOLDER

    def is_file(self):
        return self._status is not _FOLDER

    def is_symlink(self):
        return False

    def stat(self):
        return self._status


class Tree:
    """A tree of so many files below a root: `class/folder/file`."""

    def __init__(self, root, files):
        self.root, self._files = root, files

    @contextlib.contextmanager
    def scandir(self, path):
        yield self.entries([*map(int, path.relative_to(self.root).parts)])

    def entries(self, numbers=()):
        sizes = (_FOLDERS * _IN_FOLDER, _IN_FOLDER, 1)
        first = sum(n * size for n, size in zip(numbers, sizes, strict=False))
        last = min(self._files, first + (self._files, *sizes)[len(numbers)])
        if len(numbers) < 2:
            for number in range(len(range(first, last, sizes[len(numbers)]))):
                yield Entry(f"{number:06d}", _FOLDER)
            return
        status = os.stat_result(
            (stat.S_IFREG, first, 0, 1, 0, 0, 100_000 + first % 1009, 0, 0, 0),
            {"st_mtime_ns": 1_700_000_000_000_000_000 + first},
        )
        for number in range(first, last):
            yield Entry(f"{number:012d}.jpg", status)

    def every(self):
        """Paths and what is known of them."""
        for one in self.entries():
            for below in self.entries([int(one.name)]):
                for entry in self.entries([int(one.name), int(below.name)]):
                    yield f"{one.name}/{below.name}/{entry.name}", entry.stat()


@contextlib.contextmanager
def instead_of_disk(tree):
    """All of shardkit lists the tree."""
    from shardkit.storage import walk

    original = walk.scandir

    def replace(old, new):
        for module in [m for m in sys.modules.values() if getattr(m, "scandir", None) == old]:
            module.scandir = new

    replace(original, tree.scandir)
    try:
        yield
    finally:
        replace(tree.scandir, original)  # of modules that were loaded meanwhile, too


def labels(tree, table):
    """A table with one of 1,000 words for each file, and the options that join it."""
    draw = random.Random(0)
    names = [name.removesuffix(".jpg") for name, _ in tree.every()]
    draw.shuffle(names)
    with table.open("w") as file:
        file.write("image_id,label,age,weight,note\n")
        for number, name in enumerate(names):
            word = f"class {draw.randrange(1000):03d}"
            file.write(f'{name},{word},{number},{draw.random():.4f},"said, {name} is {word}"\n')
    columns = {"file_column": "image_id", "file_suffix": ".jpg", "label_column": "label"}
    return {"metadata": table, **columns}


def measured(entries, *, table=False):
    """A plan of so many files."""
    from shardkit.conversion.run import prepare
    from shardkit.options import ConvertOptions

    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), entries)
        bare = 2 * seconds_of(lambda: sum(1 for _ in tree.every()))  # once to see what it is
        with tempfile.TemporaryDirectory() as beside:
            options = labels(tree, Path(beside, "train.csv")) if table else {}
            with instead_of_disk(tree), Memory() as memory:
                began = time.perf_counter()
                plan = prepare(folder, "wds", f"{folder}-out", ConvertOptions.of(**options))
                seconds = time.perf_counter() - began
                selecting = seconds_of(lambda: len(plan.tasks[-1].reading().source))
            assert plan.samples == entries
            assert plan.splits[0].source.classes is not None
    return {
        "entries": entries,
        "tasks": len(plan.tasks),
        "seconds": round(seconds, 2),
        "of_generating": round(bare, 2),
        "seconds_to_select_a_task": round(selecting, 4),
        "anonymous": memory.anonymous,
        "with_files": memory.with_files,
    }


def main(words):
    parser = arguments(__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args(words)
    return measured(given.entries, table=given.table)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
