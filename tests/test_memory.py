"""Memory that runs out is an error of its own: never a signal or a traceback, and no sample is at
fault (X1, X3, X4). In processes whose memory is limited."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit import storage
from shardkit.errors import StorageError, is_want_of_memory
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


class Hungry:
    """A sequence with a sample that memory does not suffice for."""

    def __len__(self):
        return 3

    def __getitem__(self, number):
        return hungry({"image": make_image(number), "label": number})


def hungry(sample):
    if sample["label"] == 2:
        raise MemoryError
    return sample


def test_no_sample_is_skipped_where_memory_runs_out(tmp_path):
    samples = [{"image": make_image(n), "label": n} for n in range(3)]
    options = {"workers": 0, "on_error": "skip"}
    for source, transform in ((Hungry(), None), (samples, hungry)):
        with pytest.raises(MemoryError):
            shardkit.convert(source, "wds", tmp_path / "out", transform=transform, **options)
        assert not (tmp_path / "out").exists()


def test_a_shard_that_memory_does_not_suffice_to_open_is_not_damaged(tmp_path, monkeypatch):
    shardkit.convert([{"x": np.arange(3)}], "wds", tmp_path / "out", workers=0)

    def fail(*arguments, **named):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    dataset = shardkit.open(tmp_path / "out")
    monkeypatch.setattr(type(dataset._format), "open", fail)
    for use in (lambda: shardkit.verify(tmp_path / "out"), lambda: dataset[0]):
        with pytest.raises(StorageError, match="memory ran out"):
            use()


def test_a_small_file_takes_little_memory_whatever_the_bound(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    tracemalloc.start()
    try:
        assert storage.read(tmp_path / "x", 1 << 27) == b"12345"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert storage.read(tmp_path / "x", 3) == b"1234"


def test_what_is_want_of_memory():
    for error in (MemoryError(), OSError(errno.ENOMEM, ""), RuntimeError("can't start new thread")):
        assert is_want_of_memory(error)
    assert is_want_of_memory(ImportError("x.so: failed to map segment from shared object"))
    assert is_want_of_memory(SystemError("error return without exception set"))
    for other in (OSError(errno.EIO, ""), RuntimeError("x"), ImportError("x"), SystemError("x")):
        assert not is_want_of_memory(other)
