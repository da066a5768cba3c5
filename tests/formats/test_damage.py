"""Damaged and hostile shards of every format give samples or our errors, in bounded time and
memory (X1, X4).

They are read in forked processes (`damage.py`). The large run has the same ones each time;
`SHARDKIT_DAMAGE=20000` asks for so many others of each, with a seed that is printed, and for all
flips:

    SHARDKIT_DAMAGE=20000 pytest -m large tests/formats/test_damage.py
"""

import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.errors import DamagedError, FormatError
from shardkit.formats import FORMATS, get_format
from shardkit.formats.testing_samples import compare_at_once, in_fork
from shardkit.schema import Int, Schema
from tests.conftest import few
from tests.formats import damage

FULL = int(os.environ.get("SHARDKIT_DAMAGE", "0"))
# Of those that take the longest to read a quarter.
SLOW = {"parquet-theirs", "beton-theirs"}
SLOW |= {name for name in damage.SHARDS if name.startswith(("lance", "arrow-"))}


def test_every_format_is_damaged():
    assert {shard.format for shard in damage.SHARDS.values()} == set(FORMATS)


@pytest.mark.filterwarnings("ignore::shardkit.errors.ShardkitWarning")
@pytest.mark.parametrize("name", [n for n in damage.SHARDS if not n.startswith("lance")])
def test_samples_are_read_at_once_as_they_are_read_alone(name, tmp_path):
    """So are those of damaged shards, in the next test."""
    shard = damage.SHARDS[name]
    path, format = shard.write(tmp_path), get_format(shard.format)
    compare_at_once(format.open(path, shard.schema and format.layout(shard.schema)))


@pytest.mark.timeout(14400)
@pytest.mark.parametrize("name", few(damage.SHARDS))
def test_damaged_shards(name, tmp_path, large):
    """Mutated in many ways, and with each bit near the beginnings and ends of files flipped."""
    if not large:
        damage.run(name, 1, {"mutate": 25, "flip": 25}, tmp_path)
        return
    count = FULL or (15 if name in SLOW else 60)
    seed = random.randrange(2**32) if FULL else 1
    damage.run(name, seed, {"mutate": count, "flip": 0 if FULL else count}, tmp_path)


@pytest.mark.timeout(7200)
def test_headers_of_tars_that_lie(tmp_path, large):
    seed = random.randrange(2**32) if FULL else 1
    damage.run("wds-theirs", seed, {"tar": FULL or (2_000 if large else 200)}, tmp_path)


def read_whole(path, name, schema):
    format = get_format(name)
    reader = format.open(path, None if schema is None else format.layout(schema))
    return [reader[n] for n in range(len(reader))]


def refused(path, name, schema=None):
    with pytest.raises((DamagedError, FormatError)) as error:
        read_whole(path, name, schema)
    assert error.value.where["path"] == path
    return error.value


@pytest.mark.parametrize(
    "name", ["array_record", "arrow", "hf", "litdata", "lmdb", "mds", "megatron", "parquet"]
)
def test_a_file_that_is_cut_is_named(tmp_path, name):
    shard = damage.SHARDS[name]
    path, known = shard.write(tmp_path), get_format(name).layout(shard.schema)
    data = path.read_bytes()
    for size in [*range(0, len(data), 1024), 1, 3, 7, 8, 12, 33, len(data) - 9, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises((DamagedError, FormatError)) as error:
            get_format(name).open(path, known)
        assert error.value.where["path"].stem == path.stem


END = bytes(1024)
SOUND = damage.tar_header(b"a.txt", b"5") + damage.padded(b"hello")


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"0", b"5"])
def test_a_tar_with_a_size_that_is_none(tmp_path, kind):
    path = tmp_path / "x.tar"
    for size in (b"-1000", b"-0777", b"\xff" * 12, b"\xff" * 11 + b"\0", b"1_0", b"0o5", b"x"):
        path.write_bytes(SOUND + damage.tar_header(b"b.txt", size, kind) + END)
        error = refused(path, "wds")
        assert "invalid size" in error.what, size
        assert error.where["offset"] == len(SOUND)


@pytest.mark.parametrize(
    "text",
    [
        b"9" * 5000 + b" path=x\n", b"7 path\n=x\n", b"-10 path=x\n",
        *(damage.pax_record(b"size", size)
          for size in (b"9" * 5000, b"9" * 4200, b"-5", "\u0663".encode())),
        damage.pax_record(b"path", b"b.txt", -4), damage.pax_record(b"path", b"b.txt", 10**9),
        damage.pax_record(b"path", b"x/" * (1 << 20)),
    ],
    ids=lambda text: text[:20].decode(),
)  # fmt: skip
def test_a_pax_header_that_lies(tmp_path, text):
    path = tmp_path / "x.tar"
    front = damage.tar_header(b"p", b"%011o\0" % len(text), b"x") + damage.padded(text)
    path.write_bytes(SOUND + front + SOUND + END)
    error = refused(path, "wds")
    assert "pax header" in error.what or "extended header" in error.what
    assert len(str(error)) < 1000


def test_a_tar_with_many_records_for_many_members(tmp_path):
    text = b"".join(damage.pax_record(b"n%d" % n, b"") for n in range(60_000))
    path = tmp_path / "x.tar"
    front = damage.tar_header(b"p", b"%011o\0" % len(text), b"g") + damage.padded(text)
    members = (damage.tar_header(b"%d.txt" % n, b"0") for n in range(10_000))
    path.write_bytes(front + b"".join(members) + END)
    assert len(get_format("wds").open(path)) == 10_000  # each of 60 million records costs 20 ns


def write_ipc(path, table, codec=None):
    """An Arrow file of a table, or of a schema alone."""
    schema = table if isinstance(table, pa.Schema) else table.schema
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_file(path, schema, options=options) as made:
        if schema is not table:
            made.write_table(table)
    return path


def test_a_union_without_children_does_not_end_the_process(tmp_path):
    union = pa.sparse_union([])
    for stored in (union, pa.list_(union), pa.dictionary(pa.int8(), union)):
        path = write_ipc(tmp_path / f"{stored.id}.arrow", pa.schema([("label", stored)]))
        in_fork(lambda path: str(refused(path, "arrow", Schema({"label": Int()}))), path)


def test_more_rows_than_a_batch_can_hold(tmp_path):
    path = write_ipc(tmp_path / "x.arrow", pa.table({"label": [7] * 1000}))
    data = path.read_bytes()
    for rows in (2**28, 2**40, 2**62):
        lie = data.replace((1000).to_bytes(8, "little"), rows.to_bytes(8, "little"))
        path.write_bytes(lie)
        assert f"{rows:,} rows in 8,000 bytes" in refused(path, "arrow").what
        assert refused(path, "arrow", Schema({"label": Int()}))


def test_a_long_value_that_many_rows_name(tmp_path, large):
    indices = pa.array([0] * 1_000_000, pa.int8())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 10_000]))
    path = write_ipc(tmp_path / "x.arrow", pa.table({"text": column}))
    error = refused(path, "arrow")
    assert "1,010,004 bytes expand to 10,000,000,000 or more" in error.what
    if not large:
        return
    texts = pa.array(["x" * 100_000] * 1000)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), texts)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": column}), path, compression="zstd", store_schema=False)
    reader = get_format("parquet").open(path)
    for row in range(2):  # the second without reading it again
        with pytest.raises(DamagedError, match=r"bytes expand to .* over 1,000 times as many"):
            reader[row]


def test_a_row_group_with_long_dictionaries_is_read_in_pieces(tmp_path):
    path, rows = tmp_path / "x.parquet", 1000
    texts = [f"{n % 50:5}" * 4000 for n in range(rows)]  # 20 kB each, a megabyte in all
    table = pa.table({"x": texts, "n": list(range(rows)), "l": [[str(n % 3)] for n in range(rows)]})
    pq.write_table(table, path, row_group_size=rows, store_schema=False, compression="none")
    reader = get_format("parquet").open(path)
    for n in (0, 267, 268, 269, rows - 1):
        sample = reader[n]
        assert (sample["x"], sample["n"], sample["l"]) == (texts[n], n, [str(n % 3)])


def test_a_batch_that_becomes_over_a_thousand_times_as_long(tmp_path):
    table = pa.table({"x": pa.array([bytes(300 << 20)], pa.large_binary())})
    path = write_ipc(tmp_path / "x.arrow", table, "zstd")
    assert "bytes expand to" in refused(path, "arrow").what
