"""Do the tests notice? 120 small faults in the source, each of which some test must catch.

    .venv/bin/python tests/mutations.py [--root CHECKOUT] [--jobs 2] [--check] [WORD ...]

Each fault is put into a copy of the checkout, and the few files of tests that should catch it are
run there. WORDs choose those with such a number, or with the word in file or text; `--check` only
looks whether all of them can be applied. Ends with 1 where a fault survives, and where its text is
no longer found: then choose another place for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

_HERE = Path(__file__).parent
_MEMORY = Path("/dev/shm")
_SECONDS = 900  # for the tests of one fault


class Mutation(NamedTuple):
    """`old` stands once in the file, which is in shardkit/; `tests` are files in tests/."""

    file: str
    old: str
    new: str
    tests: str


def listed() -> list[Mutation]:
    """The faults of mutations.txt: a line "FILE TESTS", "-" and the old text, "+" and the new."""
    text = (_HERE / "mutations.txt").read_text("utf-8")
    found = []
    for head, *lines in map(str.splitlines, re.findall(r"^[^-+].*\n(?:[-+].*\n)+", text, re.M)):
        old, new = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
        file, _, tests = head.partition(" ")
        found.append(Mutation(file, old, new, tests))
    return found


def apply(mutation: Mutation, root: Path) -> str:
    """The file's text with the fault; raises ValueError where that is not to be had."""
    text = (root / "shardkit" / mutation.file).read_text("utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.old!r} stands {text.count(mutation.old)} times in the file")
    for name in mutation.tests.split():
        if not (root / "tests" / name).is_file():
            raise ValueError(f"there is no tests/{name}")
    return text.replace(mutation.old, mutation.new)


def copied(root: Path, place: Path) -> Path:
    """A copy of a checkout, with what is built in it."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "__pycache__", ".*_cache", "*.egg-info"
    )
    return Path(shutil.copytree(root, place, ignore=ignored))


def tested(mutation: Mutation, place: Path) -> str:
    """What became of a fault: "caught by TEST", "SURVIVED", or why neither can be said."""
    path = place / "shardkit" / mutation.file
    before = path.read_bytes()
    try:
        path.write_text(apply(mutation, place), "utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *(f"tests/{name}" for name in mutation.tests.split())],
            cwd=place, env={**os.environ, "PYTHONPATH": str(place), "CI": ""}, timeout=_SECONDS,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except ValueError as error:
        return f"NOT APPLIED: {error}"
    except subprocess.TimeoutExpired:
        return "NOT KNOWN: the tests take too long"
    finally:
        path.write_bytes(before)
    if done.returncode == 0:
        return "SURVIVED"
    if failed := re.search(r"^(?:FAILED|ERROR) (.{1,150})", done.stdout, re.MULTILINE):
        return f"caught by {failed[1]}"
    return (
        f"NOT KNOWN: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-500:]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=_HERE.parent)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    chosen = [
        (number, mutation)
        for number, mutation in enumerate(listed(), 1)
        if not options.words
        or str(number) in options.words
        or any(word in " ".join(mutation) for word in options.words if not word.isdigit())
    ]
    results: dict[int, str] = {}
    room = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=room) as folder:
        places: SimpleQueue[Path] = SimpleQueue()
        for number in range(0 if options.check else options.jobs):
            places.put(copied(options.root, Path(folder, str(number))))

        def run(number: int, mutation: Mutation) -> None:
            if options.check:
                try:
                    apply(mutation, options.root)
                except (ValueError, OSError) as error:
                    results[number] = f"NOT APPLIED: {error}"
                else:
                    results[number] = "can be applied"
            else:
                place, began = places.get(), time.monotonic()
                results[number] = f"{tested(mutation, place)}  ({time.monotonic() - began:.0f} s)"
                places.put(place)
            print(f"{number:2} {mutation.file}: {mutation.old!r}: {results[number]}", flush=True)

        with ThreadPoolExecutor(options.jobs) as threads:
            list(threads.map(lambda pair: run(*pair), chosen))
    bad = {n: result for n, result in results.items() if result.startswith(("SURVIVED", "NOT"))}
    good = "applicable" if options.check else "caught"
    print(f"\n{len(results)} faults, {len(results) - len(bad)} {good}; the others: {sorted(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
