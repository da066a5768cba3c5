"""Damaged shards of every format, read in forked processes.

A child reads one damaged shard after the other, with the memory and the time that each may take
limited, and says in shared memory which it is at, so that a child that dies or hangs names the
damage. The next child goes on behind it.
"""

import json
import lzma
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from shardkit.errors import ShardkitError
from shardkit.formats import FORMATS, file_name, get_format
from shardkit.formats.testing_samples import (
    EVERYTHING,
    compare_at_once,
    everything,
    make_image,
    write_shard,
)
from shardkit.schema import Array, Schema

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("bytes")
SECONDS, MEMORY = 10, 1 << 30  # of processor time, that reading one damaged shard may take
HANGS = 250  # seconds of a clock after which it is not working at all
_SAMPLES = 50  # that are read of each at most
_ENDS = 3000  # bytes at the beginning and at the end of a file, which is where headers are
_EVERYTHING = Schema({**EVERYTHING, "fixed": Array("<i2", (3,))})
_TOKENS = Schema({"x": Array("<u2", (None,))})


class Shard(NamedTuple):
    """A shard to be damaged, of ours or as others write them; ours are opened with the schema."""

    format: str
    write: Callable[[Path], Path]  # the files of a shard, into a folder; gives the path to open
    schema: Schema | None = None


def _ours(format, schema, folder):
    path = folder / file_name("s", format)
    samples = [{**everything(n), "fixed": np.arange(3, dtype="<i2")} for n in range(6)]
    if schema is _TOKENS:
        samples = [{"__key__": f"k{n}", "x": np.arange(n, dtype="<u2")} for n in range(40)]
    write_shard(get_format(format), path, schema, samples).close()
    return path


def _stored(names, folder):
    """Files of the folder `bytes`, of which the first is opened; compressed ones are unpacked."""
    for name in names.split():
        data = (STORED / name).read_bytes()
        path = folder / Path(name).name
        if name.endswith(".xz"):
            data, path = lzma.decompress(data), path.with_suffix("")
        path.write_bytes(data)
    return folder / Path(names.split(maxsplit=1)[0]).name.removesuffix(".xz")


def _plain_mds(folder):
    """The shard of MDSWriter without its compression."""
    data = (STORED / "mds/shard.00000.mds.zstd").read_bytes()
    path = folder / "shard.00000.mds"
    path.write_bytes(zstandard.ZstdDecompressor().decompressobj().decompress(data))
    return path


def _lance(how, version, folder):
    """A dataset as pylance writes it."""
    from tests.formats.test_lance import foreign

    foreign(folder / "x.lance", how, version)
    (path,) = (folder / "x.lance" / "_versions").glob("*.manifest")
    return path


def _table(way, folder):
    """Columns of all types, as others write them."""
    from tests.formats import test_arrow_third_party as foreign

    table = foreign.foreign_table()
    if way == "polars":
        import polars

        polars.from_arrow(table).write_ipc(folder / "p.arrow")
        return folder / "p.arrow"
    return foreign.write(table, folder, way, rows=2)


def _lmdb(name, folder):
    """An environment by its own library, with what others keep in theirs."""
    import msgpack

    from tests.formats import test_lmdb_third_party as foreign

    values = {
        "datum": {
            b"%08d_%d" % (n, n): foreign.datum((5, 6, 5), bytes(150), n, False) for n in range(6)
        },
        "pairs": foreign.numbered(6, image=make_image, label=b"%d".__mod__),
        "msgpack": {
            b"__len__": b"6",
            b"__keys__": msgpack.packb([f"{n}" for n in range(6)]),
            **{b"%d" % n: msgpack.packb([make_image(n), n, {"a": "b"}]) for n in range(6)},
        },
        "basicsr": {b"%d" % n: make_image(n, "PNG") for n in range(6)},
    }[name]
    foreign.make(folder / "x.lmdb", values)
    (folder / "x.lmdb/lock.mdb").unlink()
    if name == "basicsr":
        lines = "".join(f"{n}.png (6,8,3) 1\n" for n in range(6))
        (folder / "x.lmdb/meta_info.txt").write_text(lines)
    return folder / "x.lmdb/data.mdb"


def _array_record(options, folder):
    """Examples, as its library writes them."""
    from tests.formats import test_array_record as others

    records = [others.foreign(number) for number in range(12)]
    return others.by_library(folder / "x.array_record", records, options)


_FILES = {
    "wds-theirs": "wds/theirs.tar",
    "lmdb-theirs": "lmdb/theirs.mdb",
    "hf-theirs": "arrow/datasets.arrow",
    "beton-theirs": "beton/ffcv-1.0.2.beton.xz",
    "megatron-theirs": "megatron/theirs.bin megatron/theirs.idx",
    "mds-theirs": "mds/shard.00000.mds.zstd",
    "tfrecord-theirs": "tfrecord/theirs.tfrecord",
    "litdata-theirs": "litdata/chunk-0-0.bin litdata/index.json",
    "arrow-feather": "arrow/pandas.feather",
}
_WRITERS = {
    "mds-plain": _plain_mds,
    "array_record-theirs": partial(_array_record, "group_size:1"),
    "array_record-groups": partial(_array_record, "uncompressed,group_size:5"),
    "lance-theirs": partial(_lance, "plain", "2.2"),
    "lance-blobs": partial(_lance, "blob v2", "2.2"),
    "lance-old": partial(_lance, "blob", "2.0"),
    "parquet-theirs": partial(_table, "parquet"),
    **{f"arrow-{way}": partial(_table, way) for way in ("file", "stream", "lz4", "zstd", "polars")},
    **{f"lmdb-{name}": partial(_lmdb, name) for name in ("datum", "pairs", "msgpack", "basicsr")},
    **{name: partial(_stored, names) for name, names in _FILES.items()},
}
_SCHEMAS = {name: _TOKENS if name == "megatron" else _EVERYTHING for name in sorted(FORMATS)}
SHARDS = {
    **{
        name: Shard(name, partial(_ours, name, schema), schema) for name, schema in _SCHEMAS.items()
    },
    **{name: Shard(name.partition("-")[0], write) for name, write in _WRITERS.items()},
}


# --- damage --------------------------------------------------------------------------------------


def flip(files, number):
    """The files with one bit flipped, of those near the beginnings and ends of all, by number."""
    path, at = places(files)[number // 8]
    data = bytearray(files[path])
    data[at] ^= 1 << number % 8
    return {**files, path: bytes(data)}


def places(files):
    """The bytes near the beginning and the end of each file."""
    return [
        (path, at)
        for path, data in files.items()
        for at in range(len(data))
        if at < _ENDS or at >= len(data) - _ENDS
    ]


_EXTREMES = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63]


def mutate(files, rng):
    """One of the files cut, or with bits, numbers and pieces changed, moved or gone."""
    path = rng.choice([*files])
    data = bytearray(files[path])
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        if data:
            rng.choice(_WAYS)(data, _somewhere(len(data), rng), rng)
    if rng.random() < 0.5:
        mend_tar(data)
        mend_records(data, path)
    return {**files, path: bytes(data)}


def _somewhere(size, rng):
    near = min(size, _ENDS)
    at = [rng.randrange(near), size - 1 - rng.randrange(near), rng.randrange(size)]
    return rng.choice(at)


def _bit(data, at, rng):
    data[at] ^= 1 << rng.randrange(8)


def _byte(data, at, rng):
    data[at] = rng.choice([0, 255, rng.randrange(256)])


def _number(data, at, rng):
    """A whole number of two to eight bytes: an extreme one, or nearly the one that stood there."""
    size = rng.choice([2, 4, 8])
    at -= at % rng.choice([1, size])
    old = int.from_bytes(data[at : at + size], "little")
    new = rng.choice([*_EXTREMES, len(data), old + 1, old - 1, old * 2, old + 2**20])
    stop = min(at + size, len(data))
    data[at:stop] = (new % 2**64).to_bytes(8, "little")[: stop - at]


def _cut(data, at, rng):
    if rng.random() < 0.3:
        del data[at:]


def _remove(data, at, rng):
    del data[at : at + rng.choice([1, 4, 8, 64, 512])]


def _repeat(data, at, rng):
    size = rng.choice([1, 4, 8, 64, 512])
    data[at:at] = data[at : at + size]


def _splice(data, at, rng):
    start, size = rng.randrange(len(data)), rng.choice([4, 8, 24, 64, 512, 4096])
    piece = data[start : start + size]
    data[at : at + len(piece)] = piece


def _swap(data, at, rng):
    size = rng.choice([8, 24, 64, 512, 4096])
    other = rng.randrange(len(data))
    low, high = sorted((at, other))
    if low + size <= high <= len(data) - size:
        lower, higher = data[low : low + size], data[high : high + size]
        data[low : low + size], data[high : high + size] = higher, lower


_WAYS = [_bit, _byte, _number] * 2 + [_number, _cut, _remove, _repeat, _splice, _swap]


def mend_tar(data):
    """Make the checksums of a TAR's headers right, so that what is behind them is looked at."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            seal_header(data, at)


def mend_records(data, path):
    """The same of the checksums of records, as far as their lengths lead."""
    from shardkit.formats.tfrecord.records import checksum

    at = 0
    while path.suffix == ".tfrecord" and at + 16 <= len(data):
        size = min(int.from_bytes(data[at : at + 4], "little"), len(data) - at - 16)
        data[at : at + 8] = size.to_bytes(8, "little")
        data[at + 8 : at + 12] = checksum(bytes(data[at : at + 8]))
        data[at + 12 + size : at + 16 + size] = checksum(bytes(data[at + 12 : at + 12 + size]))
        at += 16 + size


# --- headers of TARs -----------------------------------------------------------------------------


def tar_header(name, size, kind=b"0", magic=b"ustar\00000", prefix=b""):
    """A header of any size field, with its checksum."""
    block = bytearray(512)
    for at, field in ((0, name[:100]), (124, size[:12]), (156, kind), (257, magic), (345, prefix)):
        block[at : at + len(field)] = field
    seal_header(block)
    return bytes(block)


def seal_header(block, at=0):
    block[at + 148 : at + 156] = b" " * 8
    block[at + 148 : at + 156] = b"%06o\0 " % sum(block[at : at + 512])


def padded(data):
    return data + bytes(-len(data) % 512)


def pax_record(name, value, wrong=0):
    """A record of a pax header; its length is `wrong` by so much."""
    size = len(name) + len(value) + 3
    length = size + len(str(size))
    length += len(str(length)) - len(str(size))
    return b"%d %b=%b\n" % (length + wrong, name, value)


_SIZES = [
    b"", b"0", b"5", b"00000000005\0", b"-1", b"-1000", b"-0777", b"-5", b"+5", b"0x5", b" 5 ",
    b"8", b"77777777777\0", b"777777777777", b"\x80" + bytes(10) + b"\5", b"\x80" + b"\xff" * 11,
    b"\xff" * 12, b"\xff" * 11 + b"\0", b"\xc0" + bytes(11), b"1_0", b"\xd9\xa3", b"5\0 9",
]  # fmt: skip
_NUMBERS = [
    b"0", b"5", b"-5", b"-1", b"1e3", b"", b" 5", b"\xd9\xa3", b"9" * 20, b"9" * 4200, b"9" * 5000,
    b"512", b"-1024", b"0005", b"5.0", b"\xff",
]  # fmt: skip
_KINDS = [bytes([kind]) for kind in b"0\0xgXLKS12567D\xff"]
_NAMES = [b"a.txt", b"b.json", b"nodot", b"dir/", b"", b".x", b"c.cls", b"\xff.jpg", b"n" * 100]


def tar_of_headers(files, rng):
    """A TAR of a sound member and some headers that lie in one way or another, in place of one."""
    body = [tar_header(b"a.txt", b"5") + padded(b"hello")] * rng.randrange(2)
    for _ in range(rng.randrange(1, 5)):
        kind, name, size = rng.choice(_KINDS), rng.choice(_NAMES), rng.choice(_SIZES)
        magic = rng.choice([b"ustar\00000", b"ustar  \0", b"\0" * 8])
        payload = rng.choice([b"", b"hello", b"{}", rng.randbytes(600)])
        if kind in b"xgXLK":
            payload = b"".join(_record(rng) for _ in range(rng.randrange(4)))
            size = rng.choice([size, b"%011o\0" % len(payload), b"%011o\0" % len(payload)])
        body.append(tar_header(name, size, kind, magic, rng.choice([b"", b"", b"p/q"])))
        body.append(padded(payload))
    if rng.random() < 0.8:
        body.append(bytes(1024))
    return dict.fromkeys(files, b"".join(body))


def _record(rng):
    name = rng.choice([b"path", b"size", b"size", b"linkpath", b"GNU.sparse.major", b"mtime", b""])
    value = rng.choice([*_NUMBERS, b"x.txt", b"a/" * 3000 + b"b.txt"])
    record = pax_record(name, value, rng.choice([0, 0, 0, 0, 1, -1, -4, 1000, 10**9]))
    return rng.choice([record, record, record, b"9" * 5000 + record, b"-" + record, record[:-1]])


# --- reading -------------------------------------------------------------------------------------


def read_all(path, format, layout, files):
    """All that can be read of a shard; raises whatever is no error of ours with the file's path."""

    def attempt(call, *arguments, **options):
        try:
            call(*arguments, **options)
        except ShardkitError as error:
            str(error)
            if error.where.get("path") not in files and "key" not in error.where:
                raise

    def read():
        reader = get_format(format).open(path, layout)
        for position in range(min(len(reader), _SAMPLES)):
            attempt(lambda: reader.schema.check(reader[position]))  # noqa: B023 - called at once
            if position < 3:
                attempt(reader.sample, position, json_text=True)
                attempt(reader.sample, position, [*reader.schema][:1])
        attempt(reader.keys)
        for field in reader.schema:
            attempt(reader.sizes, field)
        compare_at_once(reader)
        reader.close()

    attempt(read)


# --- children ------------------------------------------------------------------------------------

_KINDS_OF = {"mutate": mutate, "tar": tar_of_headers}


def run(name, seed, kinds, folder):
    """Damage a shard in several ways, each so often (every flip: 0); fail where a reader does.

    That is done by children of a new process: libraries that other tests have used may have left
    threads and locks in this one, with which a fork of it may hang.
    """
    words = [name, str(seed), json.dumps(kinds), str(folder)]
    command = [sys.executable, "-m", __name__, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def main(name, seed, kinds, folder):
    shard = SHARDS[name]
    path = shard.write(folder)
    layout = None if shard.schema is None else get_format(shard.format).layout(shard.schema)
    files = {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
    flips = 8 * len(places(files))

    def attempt(kind, number):
        rng = random.Random(f"{seed} {kind} {number}")
        damaged = flip(files, number) if kind == "flip" else _KINDS_OF[kind](files, rng)
        for file, data in damaged.items():
            file.unlink(missing_ok=True)  # what is mapped of the one before stays
            file.write_bytes(data)
        for known in [None] if layout is None else [None, layout]:
            read_all(path, shard.format, known and dict(known), files)

    failures = 0
    for kind, count in kinds.items():
        numbers = range(count)
        if kind == "flip":
            step = max(flips // count, 1) if count else 1
            numbers = range(seed % step, flips, step)
        failures += _serve(numbers, partial(attempt, kind), f"{name} {kind} seed {seed}")
    return min(failures, 1)


def _serve(numbers, attempt, what):
    """Attempt all numbers in children; prints each that fails and gives how many did."""
    shared = mmap.mmap(-1, 16)  # where the child is, and how many raised
    struct.pack_into("<qq", shared, 0, -1, 0)
    done = died = 0
    while done < len(numbers):
        child = os.fork()
        if not child:
            try:
                _attempt_all(numbers, done, attempt, what, shared)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, "a child did not come to the end"
            break
        done, _ = struct.unpack_from("<qq", shared)
        died += 1
        print(f"{what} number {numbers[done]}: {signal.Signals(os.WTERMSIG(status)).name}")
        done += 1
    return died + int(struct.unpack_from("<q", shared, 8)[0])


def _attempt_all(numbers, first, attempt, what, shared):
    warnings.simplefilter("ignore")
    for ends in (signal.SIGALRM, signal.SIGPROF):  # a child that hangs, in C too
        signal.signal(ends, signal.SIG_DFL)
    _limit_memory()
    for index in range(first, len(numbers)):
        struct.pack_into("<q", shared, 0, index)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, HANGS)
        try:
            attempt(numbers[index])
        except BaseException:
            struct.pack_into("<q", shared, 8, struct.unpack_from("<q", shared, 8)[0] + 1)
            print(f"{what} number {numbers[index]}:", traceback.format_exc(-4), flush=True)


def _limit_memory():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + MEMORY
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    # pylance's process has a bound of its own: it needs more addresses than this to begin with.
    free = partial(resource.setrlimit, resource.RLIMIT_AS, before)
    subprocess.Popen = partial(subprocess.Popen, preexec_fn=free)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4])))
