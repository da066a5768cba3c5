"""Writing, converting, verifying, resizing and starting, beside others.

    python tests/benchmarks/bench.py write   --data PHOTOS --work FOLDER [--peers ENVS] [--rounds 5]
    python tests/benchmarks/bench.py convert --data PHOTOS --work FOLDER
    python tests/benchmarks/bench.py verify  --data PHOTOS --work FOLDER
    python tests/benchmarks/bench.py images  --data ORIGINALS --work FOLDER [--peers ENVS]
    python tests/benchmarks/bench.py start   --data PHOTOS --work FOLDER

PHOTOS is what photos.py made, ORIGINALS what it made with --as-they-are; ENVS is what make_peers.sh
made, and without it the libraries that we do not depend on are left out. `--formats wds,lmdb` looks
at these alone. Prints one JSON object. How fast datasets are read is `shardkit bench`'s to say.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `tests` is: this may run as a file

from shardkit.formats import FORMATS
from tests.benchmarks.harness import (
    SHARDKIT,
    Pairs,
    answer,
    arguments,
    called,
    fresh,
    measure,
    seconds_of,
    summary,
    timed,
)
from tests.remote.process import ROOT

CONTENDER = Path(__file__).with_name("contender.py")
# Format -> its library in contender.py. We depend on the first two.
PEERS = {"wds": "webdataset", "lmdb": "lmdb", "arrow": "datasets", "beton": "ffcv"}


class Bench:
    """The places and interpreters of one benchmark."""

    def __init__(self, data: Path, work: Path, peers: Path | None, formats: list[str]) -> None:
        self.data, self.work, self.peers, self.formats = data, work, peers, formats
        self.python = peers / "main/bin/python" if peers else Path(sys.executable)

    def contender(self, action: str, name: str, *paths: Path) -> float:
        """Seconds that a contender says it took."""
        python = sys.executable if name.startswith("shardkit") else self.python
        return float(answer(python, CONTENDER, action, name, *paths)["seconds"])

    def written(self, action: str, name: str) -> float:
        """The same of one that writes to a folder of its own."""
        out = fresh(self.work / name)
        if not name.startswith("shardkit_"):  # which makes it
            out.mkdir()
        return self.contender(action, name, self.data, out)

    def convert(self, source: Path, format: str, *options: str) -> Path:
        """The whole command, with two workers; returns what it made."""
        out = fresh(self.work / f"shardkit-{format}")
        words = ["convert", source, "--to", format, "-o", out, "--workers", 2, "--quiet"]
        called(*SHARDKIT, *words, *options)
        return out

    def converted(self, *words: Any) -> float:
        return seconds_of(lambda: self.convert(*words))

    def write(self) -> Pairs:
        """Libraries beside `shardkit.convert` in a process; tar beside the whole command."""
        runs = {
            f"shardkit {f}": partial(self.written, "write", f"shardkit_{f}") for f in self.formats
        }
        pairs = {}
        for format, peer in PEERS.items():
            if format in self.formats and (self.peers or format in ("wds", "lmdb")):
                runs[peer] = partial(self.written, "write", peer)
                pairs[peer] = f"shardkit {format}"
        if "wds" in self.formats:
            runs["tar + sync"] = self.tar
            runs["shardkit wds, command"] = lambda: self.converted(self.data, "wds")
            pairs["tar + sync"] = "shardkit wds, command"
        return runs, pairs

    def tar(self) -> float:
        out = fresh(self.work / "photos.tar")
        return timed(["tar", "cf", out, "-C", self.data, "."], ["sync", out])

    def from_format_to_format(self) -> Pairs:
        """From each format to the next, beside copying the source's shards and a sync."""
        runs, pairs = {}, {}
        for one, other in zip(self.formats, [*self.formats[1:], self.formats[0]], strict=True):
            source = self.convert(self.data, one).rename(fresh(self.work / f"source-{one}"))
            name, copy = f"shardkit {one} to {other}", f"copy {one} + sync"
            runs[name] = partial(self.converted, source, other)
            runs[copy] = partial(self.copy, source)
            pairs[copy] = name
        return runs, pairs

    def copy(self, source: Path) -> float:
        out = fresh(self.work / "copy")
        out.mkdir()
        files = sorted(path for path in source.rglob("*") if path.is_file())
        return timed(["cp", *files, out], ["sync", *(out / path.name for path in files)])

    def verify(self) -> Pairs:
        """`shardkit.verify` beside reading the same bytes with xxh3, with as many threads."""
        runs, pairs = {}, {}
        for format in self.formats:
            out = self.convert(self.data, format)
            name, bare = f"shardkit verify {format}", f"xxh3 of {format}"
            runs[name] = partial(self.contender, "verify", "shardkit", out)
            runs[bare] = partial(self.contender, "verify", "xxh3", out)
            pairs[bare] = name
        return runs, pairs

    def images(self) -> Pairs:
        """Shorter side 256, quality 90: the whole command beside the codecs alone, and peers."""
        ours = "shardkit convert --resize 256"
        options = ("--resize", "256", "--quality", "90")
        runs = {
            ours: partial(self.converted, self.data, "wds", *options),
            # The same libraries and functions on files in memory: nothing is read or written.
            "codecs alone": partial(
                self.contender, "resize", "shardkit_codecs", self.data, self.work
            ),
        }
        for peer in (
            "pillow_bilinear",
            "pillow_lanczos",
            *(("ffcv", "litdata") * bool(self.peers)),
        ):
            runs[peer] = partial(self.written, "resize", peer)
        return runs, {peer: ours for peer in runs if peer != ours}

    def start(self) -> Pairs:
        def convert() -> float:
            out = fresh(self.work / "start")
            words = ["convert", ROOT / "sample_data/images", "--to", "wds", "-o", out, "--quiet"]
            return timed([*SHARDKIT, *words])

        runs = {
            "shardkit --help": lambda: timed([*SHARDKIT, "--help"]),
            "shardkit convert sample_data/images": convert,
        }
        return runs, {}


KINDS = {
    "write": Bench.write, "convert": Bench.from_format_to_format, "verify": Bench.verify,
    "images": Bench.images, "start": Bench.start,
}  # fmt: skip


def main(words: list[str]) -> dict[str, Any]:
    parser = arguments(__doc__, "data", "work", "peers", "rounds")
    parser.add_argument("what", choices=KINDS)
    images = [name for name in FORMATS if name != "megatron"]  # which holds tokens alone
    parser.add_argument("--formats", default=",".join(images))
    given = parser.parse_args(words)
    bench = Bench(given.data, given.work, given.peers, given.formats.split(","))
    runs, pairs = KINDS[given.what](bench)
    samples = sum(1 for _ in given.data.rglob("*.jpg"))
    return {"benchmark": given.what, **summary(measure(runs, given.rounds), pairs, samples)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
