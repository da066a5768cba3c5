"""Manifests with wrong values, through all that reads them; forked by test_manifest.py.

A seed and a number say what becomes of a manifest.
"""

import copy
import faulthandler
import json
import random
import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click.testing

import shardkit
from shardkit.cli.inspect import command as inspect
from shardkit.conversion.run import prepare
from shardkit.formats import FORMATS
from shardkit.metadata import manifest as manifests

SECONDS = 10  # of processor time that one manifest may take; then the process ends
HANGS = 250  # seconds of a clock after which it is not working at all
MEMORY = 1 << 30  # bytes of address space beside what is there at first
READ = 20  # samples
NUMBERS: list[Any] = [0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(2**63), 1.5]
NUMBERS += [float("nan"), float("inf"), True, False]
TEXTS = ["", "x", "../x", "/etc/passwd", "a" * 5000, "\x1b[31m", "\ud800", "<f8", "|S0", "(1,", "O"]
ARRAYS = [{"type": "Array", "dtype": "<f4", "shape": s} for s in ([2**40], "abc", [1.5], [-1], [0])]
KINDS = [*ARRAYS, {"type": "Array", "dtype": "i4,i4"}, {"type": "Int", "python": 1}, {"type": []}]
KINDS += [{"type": name} for name in ("Int", "Float", "Bool", "Text", "Bytes", "Json", "Image")]
KINDS += [{"type": "Array"}, {"type": "Images"}, {"type": "Int", "optional": "x"}]
OTHERS: list[Any] = [None, [], {}, [[]], [None], [-1], {"a": 1}, {"": {}}, *KINDS, *FORMATS]
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to every value in another."""
    if isinstance(value, dict):
        inner = list(value.items())
    else:
        inner = list(enumerate(value)) if isinstance(value, list) else []
    return [way] * bool(way) + [p for key, entry in inner for p in places(entry, (*way, key))]


def mutated(data: Any, chance: random.Random) -> Any:
    """A manifest with one to three values that are wrong."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        every = places(data)
        serious = [way for way in every if way[0] not in ("recipe", "versions")]
        *way, last = chance.choice(serious if chance.random() < 0.8 else every)
        inner = data
        for key in way:
            inner = inner[key]
        old = inner[last]
        kind = chance.randrange(8)
        if kind == 0:
            del inner[last]
        elif kind == 1 and isinstance(inner, dict):
            inner[chance.choice([*TEXTS, "unknown", "shape"])] = copy.deepcopy(old)
        elif kind == 1:
            inner.insert(chance.randrange(len(inner) + 1), copy.deepcopy(old))
        elif kind == 2 and type(old) is int:
            inner[last] = old + chance.choice([-1, 1, -2, 100, 10**6])
        elif kind == 3:
            other = data
            for key in chance.choice(every):
                other = other[key]
            inner[last] = copy.deepcopy(other)
        else:
            inner[last] = copy.deepcopy(chance.choice([*NUMBERS, *TEXTS, *OTHERS, DEEP]))
    return data


def read(path: Path) -> None:
    with shardkit.open(path) as dataset:
        uses = [lambda index=index: dataset[index] for index in range(min(len(dataset), READ))]
        uses += [lambda name=name: dataset.lengths(name) for name in dataset.schema]
        for use in uses:
            with suppress(shardkit.ShardkitError):
                use()
        assert repr(dataset)
        assert dataset.classes is None or isinstance(dataset.original_paths(), dict)
        assert dataset.tokenizer()


def show(path: Path) -> None:
    click.testing.CliRunner().invoke(inspect, [str(path)], catch_exceptions=False)


def source_of(dataset: Path) -> Path:
    """What a dataset was made of, if it was made of files; else itself."""
    of = {"text": "texts", "tokens": "of/tokens", "megatron": "of/megatron"}
    return dataset.parent.parent / of.get(dataset.name, "images")


def plan(path: Path) -> None:
    for to in ("arrow", "wds", "lmdb"):
        assert prepare(path, to).describe()


WAYS: dict[str, Callable[[Path], Any]] = {
    "open": read,
    "inspect": show,
    "verify": lambda path: shardkit.verify(path, decode=True).to_dict(),
    "plan": plan,
    "compare": lambda path: shardkit.verify(path, against=source_of(path)).to_dict(),
}


def failures(dataset: Path, outcomes: Counter[str]) -> list[str]:
    """What is neither a result nor an error of ours."""
    found = []
    for name, way in WAYS.items():
        try:
            way(dataset)
            outcomes[f"{name}: done"] += 1
        except shardkit.ShardkitError as error:
            outcomes[f"{name}: {type(error).__name__}"] += bool(str(error))
        except BaseException:
            found.append(f"{name}: {traceback.format_exc(-6)}")
    return found


def fuzz(folder: Path, seed: int, count: int) -> tuple[list[str], Counter[str]]:
    """So many manifests, one after the other: what failed, and how often what came of them."""
    warnings.simplefilter("ignore")
    datasets = sorted(folder.iterdir())
    wholes = {path: manifests.manifest_path(path).read_bytes() for path in datasets}
    for path in datasets:  # all that is loaded later belongs to what is there at first
        assert not (problems := failures(path, Counter())), problems[0]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    failed: list[str] = []
    outcomes: Counter[str] = Counter()
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        path = chance.choice(datasets)
        data = json.loads(wholes[path])
        del data[manifests._OWN_CHECKSUM]
        text = json.dumps(mutated(data, chance), ensure_ascii=False, indent=1)
        text_bytes = text.encode("utf-8", "backslashreplace")
        manifests.manifest_path(path).write_bytes(manifests._sealed(text_bytes))
        which = f"manifest {number} of seed {seed}, of {path.name}"
        print(which, flush=True)  # the last one, if the process ends
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        failed += [f"{which}: {problem}" for problem in failures(path, outcomes)]
        faulthandler.cancel_dump_traceback_later()
        manifests.manifest_path(path).write_bytes(wholes[path])
    return failed, outcomes
