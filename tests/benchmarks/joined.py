"""A table of labels joined to as many files: time and memory, beside pandas.

    python tests/benchmarks/joined.py [--files 1000000] [--runs 3] [--keep FOLDER] [--json]

Makes that many files of one byte in folders of 1,000, and a CSV with a row for each, in another
order: id, one of 1,000 words, a whole number, a fraction, a sentence. Each way lists the files with
their sizes and times, reads the table, finds the row of each file and numbers the words:

- planning: what `shardkit convert --plan` does of the files alone
- ours: what `shardkit convert --metadata ... --plan` does, all of the planning
- pandas merge: `read_csv`, a frame of what `os.scandir` lists, `merge`, `factorize`
- pandas map: the same with a Series of labels by id, and `map`
- listing: `os.scandir` and `stat` alone, which all of them contain

Each runs in a process of its own, in turns. Seconds are the median of the runs, from before the
listing; MB are the most that the process had in memory, libraries included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAYS = ("listing", "planning", "ours", "pandas merge", "pandas map")
_IN_FOLDER = 1000


def make(root: Path, count: int) -> Path:
    """The files below `root`/files, and the table, whose path is returned."""
    draw = random.Random(0)
    names = []
    for first in range(0, count, _IN_FOLDER):
        folder = f"{first // _IN_FOLDER:05d}"
        (root / "files" / folder).mkdir(parents=True)
        for number in range(first, min(first + _IN_FOLDER, count)):
            names.append(f"{folder}/{number:08x}")
            (root / "files" / f"{names[-1]}.jpg").write_bytes(b"x")
    draw.shuffle(names)
    table = root / "train.csv"
    with table.open("w") as file:
        file.write("image_id,label,age,weight,note\n")
        for number, name in enumerate(names):
            word = f"class {draw.randrange(1000):03d}"
            file.write(f'{name},{word},{number},{draw.random():.4f},"said, {name} is {word}"\n')
    return table


def listed(root: Path) -> Iterator[tuple[str, int, int]]:
    """The path of each file, its size and its time."""
    for folder in sorted(os.listdir(root)):
        with os.scandir(root / folder) as entries:
            for entry in entries:
                about = entry.stat()
                yield f"{folder}/{entry.name[:-4]}", about.st_size, about.st_mtime_ns


def ours(root: Path, table: Path | None) -> int:
    from shardkit.conversion.run import prepare
    from shardkit.options import ConvertOptions

    asked: dict[str, Any] = {}
    if table is not None:
        asked = {"metadata": table, "file_column": "image_id", "file_suffix": ".jpg"}
        asked["label_column"] = "label"
    plan = prepare(root, "wds", root.parent / "out", ConvertOptions(**asked))
    assert plan.splits[0].source.classes is not None
    return plan.samples or 0


def by_pandas(root: Path, table: Path, *, merged: bool) -> int:
    import pandas

    files = pandas.DataFrame(listed(root), columns=["image_id", "size", "time"])
    frame = pandas.read_csv(table, dtype={"image_id": str})
    if merged:
        joined = files.merge(frame, on="image_id", how="left", validate="one_to_one")
    else:
        joined = files.assign(label=files["image_id"].map(frame.set_index("image_id")["label"]))
    joined["number"], classes = pandas.factorize(joined["label"], sort=True)
    assert len(classes)
    return int((joined["number"] >= 0).sum())


def run(way: str, root: Path, table: Path) -> dict[str, Any]:
    """One run in this process."""
    if way in ("planning", "ours"):
        import shardkit.conversion.run  # noqa: F401 - libraries are loaded before
    elif way.startswith("pandas"):
        import pandas  # noqa: F401
    began = time.perf_counter()
    if way == "listing":
        found = sum(1 for _ in listed(root))
    elif way == "ours":
        found = ours(root, table)
    elif way == "planning":
        found = ours(root, None)
    else:
        found = by_pandas(root, table, merged=way.endswith("merge"))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1000 if _LINUX else 1e6)
    return {"files": found, "seconds": seconds, "mb": peak}


_LINUX = sys.platform.startswith("linux")  # where ru_maxrss is in KiB, about


def measure(root: Path, table: Path, runs: int) -> dict[str, dict[str, float]]:
    """Median of the seconds, and the most memory, of each way."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(runs):
        for way in WAYS:
            command = [sys.executable, __file__, "--one", way, str(root / "files"), str(table)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[way].append(json.loads(done.stdout))
    counts = {one["files"] for every in found.values() for one in every}
    assert len(counts) == 1, f"not the same files were found: {counts}"
    return {
        way: {
            "files": every[0]["files"],
            "seconds": round(statistics.median(one["seconds"] for one in every), 3),
            "mb": round(max(one["mb"] for one in every), 1),
        }
        for way, every in found.items()
    }


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="make the files here, or use those that are")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "ROOT", "TABLE"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        way, root, table = asked.one
        print(json.dumps(run(way, Path(root), Path(table))))
        return {}
    with contextlib.ExitStack() as stack:
        root = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        table = root / "train.csv"
        if not table.exists():
            table = make(root, asked.files)
        found = measure(root, table, asked.runs)
    if asked.json:
        print(json.dumps(found))
    else:
        for way, numbers in found.items():
            print(f"{way:14s} {numbers['files']:>9,} files {numbers['seconds']:8.2f} s", end="")
            print(f" {numbers['mb']:8.0f} MB")
    return found


if __name__ == "__main__":
    main()
