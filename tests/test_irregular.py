"""X4: what stands in the place of a file is refused, where a pipe would let us wait for ever."""

import contextlib
import os
import shutil
import signal
import socket
from itertools import product

import numpy as np
import pytest

import shardkit
from shardkit.dataset.find import open_splits
from shardkit.errors import SampleError, ShardkitError
from shardkit.formats import FORMATS
from shardkit.inspection.inspect import inspect
from shardkit.verification.verify import verify
from tests.conftest import few, files_of, write_images


class HungError(BaseException):
    """Nothing of ours may catch this."""


@pytest.fixture(autouse=True)
def alarm():
    """Ends what waits for ever."""

    def hung(number, frame):
        raise HungError

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _socket(path):
    with pytest.MonkeyPatch.context() as here, socket.socket(socket.AF_UNIX) as made:
        here.chdir(path.parent)  # names of sockets are short
        made.bind(path.name)


def _device(path):
    path.symlink_to("/dev/zero")


IRREGULAR = [os.mkfifo, _socket, _device]


def uses(path, out):
    def read():
        for dataset in open_splits(path).values():
            list(dataset)
            dataset.original_paths()
            dataset.lengths("ids")

    def verified():
        for problem in verify(path, decode=True).problems:
            raise problem

    def converted():
        shardkit.convert(path, "wds", out, workers=0)

    return [read, lambda: inspect(path), verified, converted]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", few(FORMATS))
def test_whatever_stands_for_a_file_of_a_dataset(format, tmp_path, large):
    lengths = format != "beton"  # which has no arrays of any length
    values = [np.arange(n, dtype=np.uint16) if lengths else n for n in range(6)]
    schema = {"ids": shardkit.Array("uint16", (None,)) if lengths else shardkit.Int()}
    samples = [{"ids": value} for value in values]
    shardkit.convert(samples, format, tmp_path / "whole", schema=schema, workers=0)
    assert (tmp_path / "whole/__shardkit__/lengths.npy").exists() == lengths
    makes = IRREGULAR if large else [os.mkfifo]  # which is waited for without end
    for number, (name, make) in enumerate(product(files_of(tmp_path / "whole"), makes)):
        damaged = tmp_path / f"damaged{number}"
        shutil.copytree(tmp_path / "whole", damaged)
        (damaged / name).unlink()
        make(damaged / name)
        for without_manifest in (False, True):
            if without_manifest:
                shutil.rmtree(damaged / "__shardkit__")
            for use in uses(damaged, tmp_path / f"out{number}"):
                with contextlib.suppress(ShardkitError):
                    use()


@pytest.mark.parametrize("make", IRREGULAR)
def test_a_single_file_that_is_none(make, tmp_path):
    for name in ("x.tar", "x.arrow", "x.jsonl", "x.csv", "x.txt", "x.bin"):
        make(tmp_path / name)
        for use in uses(tmp_path / name, tmp_path / "out"):
            with pytest.raises(ShardkitError):
                use()


class Swap:
    """A monitor that changes a source between planning and reading."""

    def __init__(self, change):
        self._change = change

    def start(self, plan, done):
        self._change()

    def advance(self, progress):
        pass

    def copied(self, more, total):
        pass


@pytest.mark.parametrize("make", IRREGULAR)
def test_what_takes_the_place_of_a_file_while_converting(make, tmp_path):
    images = write_images(tmp_path / "images")
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / f"text/{number}.txt").write_text("text " * number)
    for source, path in (
        (images, images / "class1/001.jpg"),
        (tmp_path / "text", tmp_path / "text/1.txt"),
    ):

        def swap(path=path):
            path.unlink()
            make(path)

        with pytest.raises(SampleError, match="not a regular file"):
            shardkit.convert(source, "wds", tmp_path / "out", progress=Swap(swap), workers=0)
        done = shardkit.convert(source, "wds", tmp_path / "out", on_error="skip", workers=0)
        assert done.errors == 1
        shutil.rmtree(tmp_path / "out")
