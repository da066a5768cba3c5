"""Memory and open files that run out are errors of their own: never a signal or a traceback, and
no sample or shard is at fault (X1, X3, X4). In processes that have little of them."""

import errno
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit.errors import StorageError, is_want_of_memory
from shardkit.formats import FORMATS
from shardkit.storage import fs
from shardkit.testing import make_image
from tests.conftest import write_images

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sets Linux's RLIMIT_AS")
# Of an image that needs 48 MB: where the last kilobytes are missing, Python itself dies.
SIDE = 4000


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_a_command_with_too_little_memory_says_so(tmp_path, command, large):
    import resource

    source, workers = write_images(tmp_path / "in", classes=2, each=2), "2" if large else "0"
    Image.new("RGB", (SIDE, SIDE)).save(next(source.iterdir()) / "large.png")
    words = ["--to", "wds", "-o", tmp_path / "out", "--resize", "16", "--workers", workers]
    if command == "verify":
        shardkit.convert(source, "wds", tmp_path / "sound", workers=0)
        source, words = tmp_path / "sound", ["--decode"]
    for megabytes in range(160, 1500, 440) if large else (160,):
        limit = megabytes * 1_000_000
        done = subprocess.run(
            [sys.executable, "-m", "shardkit", command, source, *words],
            capture_output=True, text=True, timeout=120, check=False,
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )  # fmt: skip
        said = f"{megabytes} MB: {done.stderr}"
        assert done.returncode == 0 or (done.returncode == 1 and "memory ran out" in said), said
        assert "Traceback" not in said
    assert done.returncode == 0 or not large, said


# Small ones first, which import what they need. A child for each image, as it stays limited.
LIMITED = """
import mmap, os, resource, sys
from pathlib import Path
import shardkit
from shardkit.codecs.damage import damage
from shardkit.codecs.header import read_header
from shardkit.codecs.pixels import decode

def limit(megabytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, [pages * mmap.PAGESIZE + (megabytes << 20)] * 2)

def check_image(image, small):
    image, small = image.read_bytes(), small.read_bytes()
    uses = damage, lambda data: decode(data, read_header(data))
    for use in uses:
        use(small)
    limit(30)
    for use in uses:
        try:
            assert False, use(image)
        except MemoryError:
            use(small)

def check_dataset(image, small):
    assert shardkit.verify(small, decode=True).sound
    limit(40)
    try:
        assert False, shardkit.verify(image, decode=True).problems
    except MemoryError as error:
        assert "16,000,000 pixels" in str(error), error

for name in sys.argv[2:]:
    child = os.fork()
    if not child:
        check = check_dataset if name == "dataset" else check_image
        check(Path(sys.argv[1], "large", name), Path(sys.argv[1], "small", name))
        break
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_an_image_that_is_too_large_for_the_memory_is_not_damaged(tmp_path):
    options = {name: {"quality": 1} for name in ("x.png", "x.webp", "x.jpg")}
    options["x.tiff"] = {"compression": "tiff_adobe_deflate"}
    for folder, side in (("small", 40), ("large", SIDE)):
        (tmp_path / folder).mkdir()
        for name, more in options.items():
            Image.new("RGB", (side, side)).save(tmp_path / folder / name, **more)
        sample = {"image": (tmp_path / folder / "x.png").read_bytes(), "label": 0}
        shardkit.convert([sample], "wds", tmp_path / folder / "dataset", workers=0)
    # Threads have no memory in store.
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path, *options, "dataset"],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def hungry(sample):
    if sample["label"] == 2:
        raise MemoryError
    return sample


class Hungry(list):
    """A sequence with a sample that memory does not suffice for."""

    def __getitem__(self, number):
        return hungry(super().__getitem__(number))


def test_no_sample_is_skipped_and_no_shard_damaged_where_memory_runs_out(tmp_path, monkeypatch):
    samples, out = [{"image": make_image(n), "label": n} for n in range(3)], tmp_path / "out"
    options = {"workers": 0, "on_error": "skip"}
    for source, transform in ((Hungry(samples), None), (samples, hungry)):
        with pytest.raises(MemoryError):
            shardkit.convert(source, "wds", out, transform=transform, **options)
        assert not out.exists()
    shardkit.convert(samples, "wds", tmp_path / "whole", workers=0)

    def fail(*arguments, **named):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    dataset = shardkit.open(tmp_path / "whole")
    monkeypatch.setattr(type(dataset._format), "open", fail)
    for use in (lambda: shardkit.verify(tmp_path / "whole"), lambda: dataset[0]):
        with pytest.raises(StorageError, match="memory ran out"):
            use()
    for error in (
        *(MemoryError(), OSError(errno.ENOMEM, ""), RuntimeError("can't start new thread")),
        ImportError("x.so: failed to map segment from shared object"),
        SystemError("error return without exception set"),
    ):
        assert is_want_of_memory(error)
    for other in (OSError(errno.EIO, ""), RuntimeError("x"), ImportError("x"), SystemError("x")):
        assert not is_want_of_memory(other)


def test_a_small_file_takes_little_memory_whatever_the_bound(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    tracemalloc.start()
    try:
        assert fs.read(tmp_path / "x", 1 << 27) == b"12345"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert fs.read(tmp_path / "x", 3) == b"1234"


SCHEMA = {"image": shardkit.Image(), "label": shardkit.Int()}
SHARDS = 30
START = """
import gc, os, random, resource, sys
import shardkit, shardkit.stream
from shardkit.errors import StorageError
from shardkit.sources import files

def limit(files):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))

def held():
    return len(os.listdir("/proc/self/fd"))

def fill(handles):
    try:
        while True:
            handles.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass

paths = sys.argv[1:]
"""


def run(code: str, *paths: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", f"{START}SHARDS = {SHARDS}\n{code}", *paths]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


def write(out: Path, to: str, shards: int) -> Path:
    schema = SCHEMA if to != "megatron" else {"tokens": shardkit.Array("uint16", (None,))}
    with shardkit.create(out, to=to, schema=schema, shard_samples=1) as writer:
        for number in range(shards):
            pixels = {"image": make_image(number % 3), "label": number}
            writer.write(pixels if to != "megatron" else {"tokens": np.array([number], np.uint16)})
    return out


@pytest.fixture(scope="module")
def every(tmp_path_factory, large):
    root = tmp_path_factory.mktemp("every")
    few = ["lmdb", "megatron", "wds"]
    formats = sorted({*FORMATS} - {*few}) if large else few
    return [write(root / format, format, SHARDS) for format in formats]


def test_few_files_are_enough_for_many_shards_and_datasets(every):
    code = """
limit(64)
photos = [path for path in paths if "megatron" not in path]

# As many shards stay open as may, however often they were opened.
dataset = shardkit.open(photos[0])
for number in range(SHARDS):
    dataset[number]
most = held()
for number in random.Random(0).choices(range(SHARDS), k=300):
    dataset[number]
assert held() == most, (held(), most)
dataset.close()

for path in paths:
    assert shardkit.verify(path).sound, path
datasets = [shardkit.open(path) for path in paths]
for number in range(SHARDS):
    for dataset in datasets:
        dataset[number]
assert held() < 60, held()
del dataset, datasets
options = {"batch_size": 8, "shuffle": True, "last": "short"}
for threads in (0, 3):
    loader = shardkit.stream.Loader(photos, threads=threads, **options)
    assert sum(len(batch["label"]) for batch in loader) == SHARDS * len(photos)
assert held() < 60, held()
del loader

# Shards make room for what the process opens besides.
limit(200)
dataset = shardkit.open(photos[-1])
for number in range(20):
    dataset[number]
fill([])
dataset[25]
assert shardkit.open(photos[-1])[3]["label"] == 3
"""
    run(code, *every)


def test_too_many_open_files_are_no_damage_in_any_format(every, tmp_path):
    """The shards are sound: no sample is skipped, and `verify` finds no problem, but ends."""
    code = """
image, *paths = paths
files.read_file(image)
limit(held() - 1)
try:
    files.read_file(image)
except StorageError as error:
    assert "ulimit -n" in error.fix
else:
    raise SystemExit("it was read")
limit(1024)

for path in paths:
    shardkit.verify(path), shardkit.open(path)[0]  # imports what it needs
    loader = shardkit.stream.Loader(path, batch_size=4, threads=0, on_error="skip")
    next(iter(loader)), loader.dataset.stream.samples.close()
    dataset = shardkit.open(path)
    limit(held() + 20)
    ballast = []
    uses = {
        "dataset": lambda: dataset[1],
        "verify": lambda: shardkit.verify(path),
        "loader": lambda: next(iter(loader)),
    }
    for name, use in uses.items():
        for left in range(3):
            gc.collect()  # an error of before may hold open shards, of which use() would make room
            fill(ballast)
            for _ in range(left):
                os.close(ballast.pop())
            try:
                use()
            except StorageError as error:
                assert "ulimit -n" in error.fix, error
            else:
                assert left, (path, name)
            dataset.close(), loader.dataset.stream.samples.close()
    for handle in ballast:
        os.close(handle)
    limit(1024)
"""
    (tmp_path / "0.jpg").write_bytes(make_image())
    run(code, tmp_path / "0.jpg", *every)


def test_shards_whose_tables_take_too_much_memory_are_closed(tmp_path, monkeypatch):
    first, second = (shardkit.open(write(tmp_path / name, "wds", 6)) for name in "ab")
    table = first.reader(0).in_memory
    assert table > 0
    # A shard that is opened again is counted once.
    monkeypatch.setattr("shardkit.dataset.readers._MEMORY", 7.5 * table)
    for _ in range(5):
        first.close()
        assert [sample["label"] for sample in first] == list(range(6))
        assert [*first._readers] == list(range(6))
    first.close()
    monkeypatch.setattr("shardkit.dataset.readers._MEMORY", 3.5 * table)
    for dataset in (first, second):
        assert [sample["label"] for sample in dataset] == list(range(6))
    assert [*first._readers] == []
    assert [*second._readers] == [3, 4, 5]
    monkeypatch.setattr("shardkit.dataset.readers._MEMORY", 0.5 * table)
    assert [sample["label"] for sample in second] == list(range(6))
    assert [*second._readers] == [5]
