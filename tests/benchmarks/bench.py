"""Whole commands and calls of shardkit beside others, in turns.

    python -m tests.benchmarks.bench write   --data PHOTOS --work FOLDER [--peers ENVS] [--rounds 5]
    python -m tests.benchmarks.bench convert --data PHOTOS --work FOLDER
    python -m tests.benchmarks.bench verify  --data PHOTOS --work FOLDER
    python -m tests.benchmarks.bench images  --data ORIGINALS --work FOLDER [--peers ENVS]
    python -m tests.benchmarks.bench tokens  --data CORPUS --work FOLDER [--peers ENVS]
    python -m tests.benchmarks.bench engines --data PHOTOS --work FOLDER [--workers 2]
    python -m tests.benchmarks.bench start   --data PHOTOS --work FOLDER

and of loading, with the same options: `load`, epochs of crops beside other libraries, with two
threads or workers; `first`, from the start of a process to its first batch, without what `import
torch` takes; `free`, how much slower a loop in Python runs while the Loader's threads are busy;
`profile`, an epoch with the Loader's clocks and without.

PHOTOS is what `data photos` made, ORIGINALS what it made with --as-they-are, CORPUS what `data
corpus` made; ENVS is what make_peers.sh made, and without it the libraries that we do not depend on
are left out. `--formats wds,lmdb` looks at these alone; `tokens --only "" --workers 1,2` at
shardkit alone, with each of these numbers of processes. Prints one JSON object.

`engines` is one conversion, images made 256 pixels large, with processes of this machine and with
Ray on as many processors. The call is measured, with its planning and the workers' start: those of
Ray are new in each round, as a new connection gets new ones; `again` is a second conversion in the
same connection, whose workers are there. `same` tells whether the bytes are.
"""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import shardkit
from shardkit.formats import FORMATS
from tests.benchmarks import harness
from tests.benchmarks.harness import LOOPS, SHARDKIT, answer, called, fresh, script, timed
from tests.benchmarks.harness import seconds_of as seconds
from tests.conftest import files_of

CONTENDER = Path(__file__).with_name("contender.py")
# Format -> its library in contender.py. We depend on the first two.
PEERS = {"wds": "webdataset", "lmdb": "lmdb", "arrow": "datasets", "beton": "ffcv"}
# Library in loops.py -> the format that it reads; LitData and MosaicML Streaming write their own.
LOADERS = {"webdataset": "wds", "datasets": "hf", "ffcv": "beton", "litdata": "", "streaming": ""}
TOKENIZERS = ("datasets", "encode_batch")
CORPORA = {"tokens": "corpus.jsonl", "chats": "chats.jsonl"}

FIRST = """
import time, torch
began = time.perf_counter()
import sys, shardkit
from shardkit.torch import Loader
crop = {"image": shardkit.RandomResizedCrop(224)}
next(iter(Loader(sys.argv[1], batch_size=64, shuffle=True, transforms=crop)))
print(time.perf_counter() - began)
"""
LOADER = """
import sys, time, shardkit
from shardkit.stream import Loader
crop = {"image": shardkit.RandomResizedCrop(224)}
options = dict(batch_size=64, shuffle=True, transforms=crop)
"""
# The second epoch of a process, while nothing else is done.
EPOCH = f"""{LOADER}
loader = Loader(sys.argv[1], **options, profile=sys.argv[2] == "True")
for epoch in range(2):
    began = time.perf_counter()
    for _ in loader:
        pass
print(time.perf_counter() - began)
"""
# Seconds of a loop in Python beside the Loader's threads.
FREE = f"""{LOADER}
if threads := int(sys.argv[2]):
    more = dict(threads=threads, prefetch=500, prefetch_bytes="8GiB")
    iterator = iter(Loader(sys.argv[1], **options, **more))
    next(iterator)
began, total = time.perf_counter(), 0
for number in range(int(sys.argv[3])):
    total += number
print(time.perf_counter() - began)
"""


class Bench:
    """The places and interpreters of one benchmark. Its methods are the benchmarks: each returns
    contenders, and the names of those that are compared, peer -> ours."""

    def __init__(self, given):
        self.given, self.data, self.work, self.peers = given, given.data, given.work, given.peers
        self.formats = given.formats.split(",")
        self.python = self.peers / "main/bin/python" if self.peers else Path(sys.executable)
        self.tokenized = {}  # by contender

    def contender(self, action, name, *paths):
        """Seconds that a contender says it took."""
        python = sys.executable if name.startswith("shardkit") else self.python
        return float(answer(python, CONTENDER, action, name, *paths)["seconds"])

    def written(self, action, name):
        """The same of one that writes to a folder of its own."""
        out = fresh(self.work / name)
        if not name.startswith("shardkit_"):  # which makes it
            out.mkdir()
        return self.contender(action, name, self.data, out)

    def convert(self, source, format, *options):
        """The whole command, with two workers; returns what it made."""
        out = fresh(self.work / f"shardkit-{format}")
        words = ["convert", source, "--to", format, "-o", out, "--workers", 2, "--quiet"]
        called(*SHARDKIT, *words, *options)
        return out

    def converted(self, *words):
        return seconds(lambda: self.convert(*words))

    def write(self):
        """Libraries beside `shardkit.convert` in a process; tar beside the whole command."""
        ours = {
            f"shardkit {f}": partial(self.written, "write", f"shardkit_{f}") for f in self.formats
        }
        runs, pairs = ours, {}
        for format, peer in PEERS.items():
            if format in self.formats and (self.peers or format in ("wds", "lmdb")):
                runs[peer] = partial(self.written, "write", peer)
                pairs[peer] = f"shardkit {format}"
        if "wds" in self.formats:
            runs["tar + sync"] = self.tar
            runs["shardkit wds, command"] = lambda: self.converted(self.data, "wds")
            pairs["tar + sync"] = "shardkit wds, command"
        return runs, pairs

    def tar(self, data=None):
        out = fresh(self.work / "photos.tar")
        return timed(["tar", "cf", out, "-C", data or self.data, "."], ["sync", out])

    def from_format_to_format(self):
        """From each format to the next, beside copying the source's shards and a sync."""
        runs, pairs = {}, {}
        for one, other in zip(self.formats, [*self.formats[1:], self.formats[0]], strict=True):
            source = self.convert(self.data, one).rename(fresh(self.work / f"source-{one}"))
            name, copy = f"shardkit {one} to {other}", f"copy {one} + sync"
            runs[name] = partial(self.converted, source, other)
            runs[copy] = partial(self.copy, source)
            pairs[copy] = name
        return runs, pairs

    def copy(self, source):
        out = fresh(self.work / "copy")
        out.mkdir()
        files = sorted(path for path in source.rglob("*") if path.is_file())
        return timed(["cp", *files, out], ["sync", *(out / path.name for path in files)])

    def verify(self):
        """`shardkit.verify` beside reading the same bytes with xxh3, with as many threads."""
        runs, pairs = {}, {}
        for format in self.formats:
            out = self.convert(self.data, format)
            name, bare = f"shardkit verify {format}", f"xxh3 of {format}"
            runs[name] = partial(self.contender, "verify", "shardkit", out)
            runs[bare] = partial(self.contender, "verify", "xxh3", out)
            pairs[bare] = name
        return runs, pairs

    def images(self):
        """Shorter side 256, quality 90: the whole command beside the codecs alone, and peers."""
        ours, options = "shardkit convert --resize 256", ("--resize", "256", "--quality", "90")
        # The same libraries and functions on files in memory: nothing is read or written.
        codecs = partial(self.contender, "resize", "shardkit_codecs", self.data, self.work)
        runs = {ours: partial(self.converted, self.data, "wds", *options), "codecs alone": codecs}
        peers = ["pillow_bilinear", "pillow_lanczos", *(("ffcv", "litdata") * bool(self.peers))]
        runs |= {peer: partial(self.written, "resize", peer) for peer in peers}
        return runs, {peer: ours for peer in runs if peer != ours}

    def tokens(self):
        return self._tokenizing("tokens", "tokenizer.json", "--seq-len", 1024)

    def chats(self):
        return self._tokenizing("chats", "", "--chat-template", "auto")

    def _tokenizing(self, what, tokenizer, *options):
        """The whole command beside scripts that make as many tokens of the same lines."""
        corpus, tokenizer = self.data / CORPORA[what], self.data / tokenizer
        words = ["--to", "arrow", "--tokenizer", tokenizer, *options, "--json", "--quiet"]
        command = [*SHARDKIT, "convert", corpus, *words]

        def run(name, count, *command):
            out = fresh(self.work / name)
            said = []
            taken = seconds(lambda: said.append(called(*command, out)))
            self.tokenized[name] = count(said[0])
            return taken

        def ours(said):
            return json.loads(said)["splits"][""]["text"]["tokens"]

        def theirs(said):
            return json.loads(said.splitlines()[-1])["tokens"]

        runs = {}
        for number in self.given.workers.split(","):
            name = f"shardkit, workers {number}" if runs else "shardkit"
            runs[name] = partial(run, name, ours, *command, "--workers", number, "-o")
        for name in filter(None, self.given.only.split(",") if what == "tokens" else ["datasets"]):
            peer = [self.python, CONTENDER, what, name, corpus, tokenizer]
            runs[name] = partial(run, name, theirs, *peer)
        return runs, {name: "shardkit" for name in runs if name != "shardkit"}

    def engines(self):
        import ray

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        workers = int(self.given.workers)
        options = {"image": shardkit.ImageOptions(resize=256), "shard_size": "8MB"}
        quiet = {"log_to_driver": False, "include_dashboard": False}

        def converted(engine, **more):
            out = fresh(self.work / engine)
            more |= {"engine": engine, **options}
            return seconds(lambda: shardkit.convert(self.data, "wds", out, **more))

        def by_ray(times):
            ray.init(num_cpus=workers, object_store_memory=128 << 20, **quiet)
            taken = [converted("ray") for _ in range(times)]
            ray.shutdown()
            return taken[-1]

        local = partial(converted, "local", workers=workers)
        runs = {"local": local, "ray": partial(by_ray, 1), "again": partial(by_ray, 2)}
        return runs, {"ray": "local", "again": "local"}

    def start(self):
        """Few photos to many, with as many workers as shardkit likes, beside tar and a sync."""
        runs, pairs = {"shardkit --help": partial(timed, [*SHARDKIT, "--help"])}, {}
        photos = sorted(self.data.rglob("*.jpg"))
        for count in (count for count in (32, 1000, 10_000, 50_000) if count <= len(photos)):
            source = self.work / f"photos-{count}"
            for photo in photos[:: len(photos) // count][:count] if not source.exists() else ():
                copy = source / photo.relative_to(self.data)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(photo, copy)
            words = [*SHARDKIT, "convert", source, "--to", "wds", "--quiet", "-o"]
            ours, peer = f"shardkit, {count} photos", f"tar + sync, {count} photos"
            runs[ours] = lambda words=words: timed([*words, fresh(self.work / "start")])
            runs[peer] = partial(self.tar, source)
            pairs[peer] = ours
        return runs, pairs

    def store(self):
        """The photos as TARs, to load."""
        if not (self.work / "wds").exists():
            self.work.mkdir(parents=True, exist_ok=True)
            shardkit.convert(self.data, "wds", self.work / "wds", workers=2)
        return self.work / "wds"

    def load(self):
        """The second epoch of a process."""

        def epoch(python, name, store, **more):
            tars = sorted(map(str, store.glob("*.tar")))
            asked = {"url": str(store), "urls": tars, "decode": True, "workers": 2, **more}
            with harness.Contender(python, name, asked) as contender:
                contender.epoch()
                return contender.epoch()["seconds"]

        few = max(sum(1 for _ in self.data.rglob("*.jpg")) // 16, 1)  # so that workers share none
        stores = {
            f: self.convert(self.data, f, *(("--shard-samples", few) if f == "wds" else ()))
            for f in {*self.formats, *filter(None, LOADERS.values())}
        }
        runs = {
            f"shardkit {f}": partial(epoch, sys.executable, "shardkit", stores[f], threads=2)
            for f in self.formats
        }
        runs["imagefolder"] = partial(epoch, self.python, "imagefolder", self.data)
        for name, format in LOADERS.items():
            if not self.peers and name not in ("webdataset", "datasets"):
                continue
            python = self.peers / "streaming/bin/python" if name == "streaming" else self.python
            store = stores.get(format)
            if store is None:
                store = fresh(self.work / name)
                called(python, LOOPS, "write", name, self.data, store)
            runs[name] = partial(epoch, python, name, store)
        first = f"shardkit {self.formats[0]}"
        return runs, {name: first for name in runs if name != first}

    def first(self):
        def batch():
            """From the start of the interpreter on; `import torch` is taken out."""
            return timed([sys.executable, "-c", "pass"]) + float(script(FIRST, self.store()))

        return {"first batch": batch}, {}

    def free(self):
        names = ("alone", "beside 1 threads", "beside 2 threads")
        loops = [(FREE, self.store(), threads, self.given.count) for threads in range(3)]
        runs = {name: partial(script, *loop) for name, loop in zip(names, loops, strict=True)}
        return runs, dict.fromkeys(names[1:], "alone")

    def profile(self):
        each = {f"profile={on}": partial(script, EPOCH, self.store(), on) for on in (False, True)}
        return each, {"profile=True": "profile=False"}

    def told(self, what):
        """What is reported besides seconds, when all have run."""
        if what == "engines":
            ours, rays = files_of(self.work / "local"), files_of(self.work / "ray")
            return {"workers": int(self.given.workers), "same": ours == rays}
        if what not in CORPORA:
            return {}
        if len({*self.tokenized.values()}) > 1:
            raise SystemExit(f"they do not make the same tokens: {self.tokenized}")
        size = (self.data / CORPORA[what]).stat().st_size
        return {"bytes": size, "tokens": self.tokenized["shardkit"]}


KINDS = {
    "write": Bench.write, "convert": Bench.from_format_to_format, "verify": Bench.verify,
    "images": Bench.images, "tokens": Bench.tokens, "chats": Bench.chats,
    "engines": Bench.engines, "start": Bench.start,
    "load": Bench.load, "first": Bench.first, "free": Bench.free, "profile": Bench.profile,
}  # fmt: skip


def main(words):
    parser = harness.arguments(__doc__, "data", "work", "peers", "rounds")
    parser.add_argument("what", choices=KINDS)
    images = [name for name in FORMATS if name != "megatron"]  # which holds tokens alone
    parser.add_argument("--formats", default=",".join(images))
    parser.add_argument("--only", default=",".join(TOKENIZERS), help="which others tokenize")
    parser.add_argument("--workers", default="2", help="of shardkit, in `tokens` and `engines`")
    parser.add_argument("--count", type=int, default=30_000_000, help="how far `free` counts")
    given = parser.parse_args(words)
    bench = Bench(given)
    runs, pairs = KINDS[given.what](bench)
    taken = harness.measure(runs, given.rounds)
    told = bench.told(given.what)
    samples = told.get("tokens") or sum(1 for _ in given.data.rglob("*.jpg"))
    return {"benchmark": given.what, **told, **harness.summary(taken, pairs, samples)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
