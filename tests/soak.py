"""Everything in turn with random faults, for as long as asked:

    python -m tests.soak --minutes 60 [--seed 7] [--data FOLDER] [--format wds]

A round converts, stops the conversion at random moments and continues it, verifies, damages files,
repairs them, and streams what is there, with a loop that is stopped and resumed. All bytes and
samples have to be those of a run without faults; nothing may be left in the temporary folder, no
open file, thread, process or memory in this one. A line tells of each round; the first fault ends
the soak with exit code 1 and what repeats it.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardkit.torch import Loader
from tests.codecs import tokenizer_zoo
from tests.conftest import files_of

SMALL = ("--shard-size", "60kB")
TOKENS = ("--tokenizer", "{tokenizer}", "--seq-len", "128")
IMAGES: dict[str, tuple[str, ...]] = {  # format -> options
    "wds": (*SMALL, "--resize", "48", "--split", "train=0.8,val=0.2"),
    "lmdb": ("--shard-samples", "25",),
    "arrow": (*SMALL, "--shuffle"),
    "parquet": SMALL,
    "hf": (*SMALL, "--split", "train=0.8,val=0.2"),
    "beton": ("--resize", "48"),
    "mds": (*SMALL, "--image-format", "png", "--resize", "32"),
    "litdata": SMALL,
    "tfrecord": SMALL,
    "array_record": SMALL,
    "lance": SMALL,
}  # fmt: skip
TEXTS = {"arrow": TOKENS, "megatron": TOKENS[:2], "wds": TOKENS}
MEMORY = 150_000_000  # bytes that a soak may grow by, once every library is loaded


class SoakError(Exception):
    """What must not be."""


def expect(holds: object, what: str) -> None:
    if not holds:
        raise SoakError(what)


@dataclass
class Job:
    """A conversion, and what it makes when nothing goes wrong."""

    source: Path
    words: list[str]
    files: dict[str, bytes]
    seconds: float


class Soak:
    def __init__(self, home: Path, dice: random.Random, data: Path | None) -> None:
        self.home, self.dice = home, dice
        self.counts: Counter[str] = Counter()
        self._jobs: dict[tuple[str, str], Job] = {}
        self.images = data or _images(home / "images", dice)
        self.texts = _texts(home / "texts", dice)
        self.tokenizer = home / "tokenizer.json"
        tokenizer_zoo.byte_level(size=400).save(str(self.tokenizer))

    def round(self, kind: str, format: str) -> None:
        job = self._job(kind, format)
        out = self.home / f"out-{format}"
        self._convert(job, out)
        code, said = self._run("verify", str(out))
        expect(code == 0, f"what was made is not sound: {said}")
        self._damage_and_repair(job, out)
        for split in [out / "train", out / "val"] if (out / "train").exists() else [out]:
            self._stream(split)
        shutil.rmtree(out)

    def _job(self, kind: str, format: str) -> Job:
        if (kind, format) not in self._jobs:
            source, options = {"images": (self.images, IMAGES), "texts": (self.texts, TEXTS)}[kind]
            words = [one.format(tokenizer=self.tokenizer) for one in options[format]]
            words = ["convert", str(source), "--to", format, *words]
            whole = self.home / f"whole-{kind}-{format}"
            began = time.monotonic()
            code, said = self._run(*words, "-o", str(whole), "--workers", "1")
            expect(code == 0, said)
            seconds = time.monotonic() - began
            self._jobs[kind, format] = Job(source, words, files_of(whole), seconds)
            shutil.rmtree(whole)
        return self._jobs[kind, format]

    def _convert(self, job: Job, out: Path) -> None:
        """With up to four ends at random moments; every run continues the last."""
        for fault in [*self.dice.choices(FAULTS, k=self.dice.randrange(5)), None]:
            workers = self.dice.randrange(3)
            words = [*job.words, "-o", str(out), "--workers", str(workers)]
            code, said = self._run(*words, fault=fault, within=1.2 * job.seconds)
            if out.exists():
                expect(files_of(out) == job.files, f"other bytes after {fault}: {said}")
            expect(out.exists() or code != 0, "exit code 0 without an output")
        expect(out.exists(), said)
        expect(not out.with_name(f"{out.name}.partial").exists(), "a partial output is left")

    def _damage_and_repair(self, job: Job, out: Path) -> None:
        untouched = {path: (out / path).stat().st_mtime_ns for path in job.files}
        for path in self._damage(out):
            del untouched[path]
        code, said = self._run("verify", str(out))
        expect(code == 1, f"damage was not found: {said}")
        repair = ("verify", str(out), "--repair", str(job.source))
        for fault in [*self.dice.choices(FAULTS, k=self.dice.randrange(3)), None]:
            code, said = self._run(*repair, fault=fault, within=1.2 * job.seconds)
        expect(code == 0, f"it is not repaired: {said}")
        expect(files_of(out) == job.files, "a repair made other bytes")
        touched = [p for p, when in untouched.items() if (out / p).stat().st_mtime_ns != when]
        expect(not touched, f"a repair touched sound files: {touched}")

    def _damage(self, out: Path) -> set[str]:
        """Flip a bit of some shards, cut or remove them; returns their paths."""
        shards = sorted(
            file for file in out.rglob("*")
            if file.is_file() and "__shardkit__" not in file.parts and file.stat().st_size > 500
        )  # fmt: skip
        chosen = self.dice.sample(shards, k=min(len(shards), self.dice.randrange(1, 4)))
        for file in chosen:
            data = bytearray(file.read_bytes())
            how = self.dice.choice(["flip", "flip", "cut", "remove"])
            self.counts[how] += 1
            if how == "flip":
                data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
            elif how == "cut":
                del data[self.dice.randrange(len(data)) :]
            file.write_bytes(data)
            if how == "remove":
                file.unlink()
        return {file.relative_to(out).as_posix() for file in chosen}

    def _stream(self, path: Path) -> None:
        """Two epochs, stopped anywhere; the rest is that of a loop that was not stopped."""
        options: Any = {"shuffle": True, "seed": self.dice.randrange(99), "batch_size": 7}
        loader = Loader(path, **options)
        whole = [_seen(batch) for _ in range(2) for batch in loader]
        expect(len(whole) == 2 * len(loader), "an epoch has another number of batches")
        stop = self.dice.randrange(1, len(whole))
        loader, first = Loader(path, **options), []
        while len(first) < stop:
            for batch in loader:
                first.append(_seen(batch))
                if len(first) == stop:
                    break
        state = json.loads(json.dumps(loader.state_dict()))
        loader, rest = Loader(path, **options, threads=self.dice.randrange(1, 4)), []
        loader.load_state_dict(state)
        while len(first) + len(rest) < len(whole):
            rest += [_seen(batch) for batch in loader]
        expect(first + rest == whole, f"{path.name}: resumed after {stop} batches, others came")
        self.counts["batches"] += 2 * len(whole)

    def _run(self, *words: str, fault: str | None = None, within: float = 0) -> tuple[int, str]:
        """The exit code of a command, and what it said."""
        self.counts[fault or words[0]] += 1
        command = [sys.executable, "-m", "shardkit", *words]
        if fault == "full":
            command = ["prlimit", f"--fsize={self.dice.randrange(1_000, 60_000)}", *command]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, "TMPDIR": str(self.temporary)},
        )  # fmt: skip
        if fault in SIGNALS:
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                process.wait(self.dice.uniform(0, within))
            for number in SIGNALS[fault]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                time.sleep(0.05)
        said = process.communicate(timeout=300)[1]
        expected = {0, 1}
        if fault in SIGNALS:
            expected = {-number for number in SIGNALS[fault]} | {0, 1, 130}
        expect(
            process.returncode in expected, f"{words} after {fault}: {process.returncode} {said}"
        )
        # Python itself says so where it is interrupted before a program begins.
        own = "Traceback" in said and (fault != "interrupted" or f"shardkit{os.sep}cli" in said)
        expect(not own, f"{words} after {fault}: {said}")
        return process.returncode, said

    @property
    def temporary(self) -> Path:
        (self.home / "tmp").mkdir(exist_ok=True)
        return self.home / "tmp"


SIGNALS = {
    "killed": [signal.SIGKILL],
    "terminated": [signal.SIGTERM],
    "interrupted": [signal.SIGINT],
    "paused": [signal.SIGSTOP, signal.SIGCONT],
}
FAULTS = [*SIGNALS, "killed", "full"]  # full: no file may be larger than some bytes


def _seen(batch: dict[str, Any]) -> bytes:
    """What tells two batches apart: keys, or the tokens themselves."""
    if "__key__" in batch:
        return json.dumps(list(batch["__key__"])).encode()
    return b"".join(np.asarray(value).tobytes() for value in batch.values())


def _images(folder: Path, dice: random.Random) -> Path:
    for number in range(240):
        file = folder / f"class{number % 5}" / f"{number:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        size = dice.randrange(40, 120), dice.randrange(40, 120)
        Image.effect_noise(size, 60).convert("RGB").save(file)
    return folder


def _texts(folder: Path, dice: random.Random) -> Path:
    folder.mkdir()
    every = tokenizer_zoo.documents()
    for number in range(40):
        text = "\n".join(dice.choices(every, k=dice.randrange(1, 60)))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def holdings(soak: Soak) -> dict[str, int]:
    """What this process has, which must not grow."""
    gc.collect()
    children = (Path(task, "children") for task in Path("/proc/self/task").iterdir())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": sum(len(each.read_text().split()) for each in children),
        "temporary": len(list(soak.temporary.iterdir())),
        "memory": pages * resource.getpagesize(),
    }


def expect_no_more(before: dict[str, int], now: dict[str, int]) -> None:
    for name, had in before.items():
        more = MEMORY if name == "memory" else 0
        expect(now[name] <= had + more, f"{name}: {now[name]:,}, {had:,} before")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--data", type=Path, help="a folder of class folders of images")
    parser.add_argument("--format", help="this format alone")
    asked = parser.parse_args()
    kinds = [("images", name) for name in IMAGES] + [("texts", name) for name in TEXTS]
    kinds = [(kind, name) for kind, name in kinds if asked.format in (None, name)]
    until, dice, before = time.monotonic() + 60 * asked.minutes, random.Random(asked.seed), None
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak, done = Soak(Path(folder), dice, asked.data), 0
        while not done or time.monotonic() < until:
            kind, name = kinds[done % len(kinds)]
            began = time.monotonic()
            try:
                soak.round(kind, name)
                now = holdings(soak)
                if done >= len(kinds):  # every library was loaded
                    before = before or now
                    expect_no_more(before, now)
            except SoakError as error:
                print(f"round {done + 1}, {kind} to {name}, seed {asked.seed}: {error}")
                print(json.dumps(soak.counts), flush=True)
                sys.exit(1)
            done += 1
            print(f"{done} {kind} to {name}: {time.monotonic() - began:.1f} s, {now}", flush=True)
        print(json.dumps({"rounds": done, **soak.counts}))


if __name__ == "__main__":
    main()
