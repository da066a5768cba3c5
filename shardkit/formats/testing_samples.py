"""Samples of every type, and functions of tests that need neither pytest nor hypothesis."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import operator
import os
import pickle
import struct
import traceback
import wave
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.errors import ShardkitError
from shardkit.formats.base import Format, ShardReader, ShardSpec
from shardkit.formats.columns import carried_out, samples_of
from shardkit.sample import Sample
from shardkit.schema import Array, Bool, Bytes, Float, Image, Int, Json, Schema, Text
from shardkit.storage.blobs import Blobs


def make_image(number: int = 0, format: str = "JPEG", size: tuple[int, int] = (8, 6)) -> bytes:
    """An encoded image, another one for each number: a `format` of Pillow, `size` in pixels."""
    import PIL.Image

    file = BytesIO()
    colour = (number * 37 % 256, number * 91 % 256, number * 151 % 256)
    PIL.Image.new("RGB", size, colour).save(file, format)
    return file.getvalue()


def make_audio(number: int = 0, rate: int = 8000, samples: int = 80) -> bytes:
    """A WAV file of 16 bits and one channel: `samples` at `rate` Hz, others for each number."""
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, samples, "NONE", ""))
        writer.writeframes((np.arange(samples) * (number + 1)).astype("<i2").tobytes())
    return file.getvalue()


def make_video(number: int = 0, size: tuple[int, int] = (64, 48), frames: int = 25) -> bytes:
    """Return an MP4 file of 25 frames a second and a `size`, another one for each number.

    It has headers, and frames that cannot be decoded.
    """

    def box(name: str, *parts: bytes) -> bytes:
        content = b"".join(parts)
        return struct.pack(">I", 8 + len(content)) + name.encode() + content

    clock = struct.pack(">IIIII", 0, 0, 0, 25, frames)  # version, times, ticks a second, length
    frame = bytes(32) + struct.pack(">HH", *size) + bytes(50)
    table = box("stbl", box("stsd", struct.pack(">II", 0, 1), box("jpeg", frame[8:])))
    sizes = box("stsz", struct.pack(">III", 0, 4, frames))
    times = box("stts", struct.pack(">IIII", 0, 1, frames, 1))
    chunks = box("stsc", struct.pack(">IIIII", 0, 1, 1, frames, 1))
    offsets = box("stco", struct.pack(">III", 0, 1, 28))
    table = box("stbl", table[8:], times, chunks, sizes, offsets)
    handler = box("hdlr", bytes(8), b"vide", bytes(13))
    track = box("trak", box("mdia", box("mdhd", clock, bytes(4)), handler, box("minf", table)))
    movie = box("moov", box("mvhd", clock, bytes(80)), track)
    start = box("ftyp", b"isom", bytes(4), b"isom")
    return start + box("mdat", bytes([number % 256]) * 4 * frames) + movie


# One field of every type; the last may be absent.
EVERYTHING = Schema(
    {
        "image": Image(),
        "label": Int(),
        "score": Float(),
        "good": Bool(),
        "text": Text(),
        "blob": Bytes(),
        "about": Json(),
        "points": Array("<f4", (None, 2)),
        "caption": Text(optional=True),
    }
)


def everything(number: int) -> Sample:
    """Return the sample of such a number, of the schema EVERYTHING."""
    sample: Sample = {
        "__key__": f"folder/{number:04d}",
        "image": make_image(number),
        "label": number - 2,
        "score": number / 3,
        "good": number % 2 == 0,
        "text": f"line {number}\nÄ 漢 🎉",
        "blob": bytes(range(number % 256)),
        "about": {"n": number, "list": [1, 2.5, None, "x"], "deep": {"ü": True}},
        "points": np.arange(number * 2, dtype="<f4").reshape(number, 2),
    }
    if number % 3 == 0:
        sample["caption"] = ""
    return sample


def assert_same(found: Sample, expected: Sample) -> None:
    """Assert that `found` has the keys of `expected` in their order, equal values, equal types."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype, name
            np.testing.assert_array_equal(found[name], value)
        elif isinstance(value, float) and math.isnan(value):
            assert math.isnan(found[name])
        else:
            assert found[name] == value, name


def assert_reads(reader: ShardReader, samples: Sequence[Sample]) -> None:
    """Assert that the reader has exactly these samples."""
    assert len(reader) == len(samples)
    for number, sample in enumerate(samples):
        assert_same(reader[number], sample)


def read_at_once(
    reader: ShardReader, positions: Sequence[int], fields: Sequence[str]
) -> list[Sample] | None:
    """Return the samples that `reader.plan` describes; None if it does not."""
    plan = reader.plan(np.array(positions, np.int64), fields)
    if plan is None:
        return None
    columns = carried_out([plan])
    for name, column in columns.items():
        kind = reader.schema.get(name)
        assert isinstance(kind, Bytes) or not isinstance(column, Blobs)
        # Else the columns of several shards would be joined to numbers.
        assert not (isinstance(kind, Array) and isinstance(column, np.ndarray)) or column.ndim > 1
    arrays = {n: column for n, column in columns.items() if isinstance(column, np.ndarray)}
    copies = {name: array.copy() for name, array in arrays.items()}
    samples = samples_of({**columns, **copies}, reader.schema)
    for array in arrays.values():  # which belong to the caller
        array.fill(0)
    return samples


def compare_at_once(reader: ShardReader) -> None:
    """Assert that samples read at once, maybe from a damaged shard, are those read alone."""
    alone: list[Sample | None] = []
    every = [*range(min(len(reader), 50))]
    for position in every:
        try:
            alone.append(reader.sample(position))
        except ShardkitError:
            alone.append(None)
    for positions in ([every, every[::-1]] if every else []) + [[position] for position in every]:
        try:
            found = read_at_once(reader, positions, list(reader.schema))
        except Exception:  # all of them are errors of damaged data
            continue
        for sample, position in zip(found or [], positions, strict=found is not None):
            expected = alone[position]
            assert expected is not None, f"sample {position} cannot be read"
            assert_same(sample, expected)


def write_shard(
    format: Format, path: Path, schema: Schema, samples: Sequence[Sample]
) -> ShardReader:
    """Return a shard of these samples at `path`, of a schema and a format, opened."""
    writer = format.create(path, ShardSpec(schema))
    for sample in samples:
        assert writer.write(schema.check(sample))
    writer.close()
    return format.open(path, format.layout(schema))


def open_files(folder: Path) -> int:
    """Number of files in a folder that this process has open. Ignores all other files."""
    files = {(found.st_dev, found.st_ino) for found in map(Path.stat, folder.rglob("*"))}
    count = 0
    for handle in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the handle of the listing itself is closed
            found = os.fstat(handle)
            count += (found.st_dev, found.st_ino) in files
    return count


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"something else")
    other.replace(path)


# Ways to change the file of an open shard.
def _change(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 3)  # in no first or last sample
        file.write(b"damaged")


HARMS: dict[str, Callable[[Path], None]] = {
    "cut to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
    "replaced": _replace,
    "changed": _change,
}


def read_harmed(readers: Mapping[str, ShardReader]) -> dict[str, list[Sample]]:
    """Return what `readers` give, by harm, whose files are so changed once a first sample was read.

    In place of a sample that raises, it has the error's `where`.
    """
    found = {}
    for harm, reader in readers.items():
        print("the file is", harm, flush=True)  # which pytest shows if this process crashes
        found[harm] = [reader[0]]
        HARMS[harm](reader.path)
        for position in range(1, len(reader)):
            try:
                found[harm].append(reader[position])
            except ShardkitError as error:
                found[harm].append(dict(error.where))
    return found


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns for these `arguments` in a forked process, which may crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            with open(writing, "wb") as file:
                pickle.dump(function(*arguments), file)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"the process ended with {code}"
    return pickle.loads(answer)


@functools.cache
def _another() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def in_another_process(reader: ShardReader, position: int) -> Sample:
    """Return a sample of `reader` at this `position`, read in a process that was not forked.

    One process does it for all: its start takes longer than what it reads.
    """
    return _another().submit(operator.getitem, reader, position).result(timeout=60)
