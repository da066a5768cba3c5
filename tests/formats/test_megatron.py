"""Megatron's files: the contract, the layout by hand, Megatron's own library, and damage."""

import importlib.util
import itertools
import json
import random
import struct
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st

import shardkit
from shardkit.errors import DamagedError, FormatError, SampleError, ShardkitError
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.formats.testing_samples import compare_at_once
from shardkit.schema import Array, Schema, Text
from shardkit.testing import ARRAYS, OPTIONAL, FormatContract, any_keys, assert_same, write_shard
from tests.conftest import files_of
from tests.formats.refusals import refused

MEGATRON = get_format("megatron")
TOKENS = Schema({"tokens": Array("<u2", (None,))})
CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}
ENDS = (".bin", ".idx", ".keys")


def tokens(number):
    """A sample of the schema TOKENS; the first has none."""
    values = np.arange(number * 7, dtype="<u2") * 911 + number
    return {"__key__": f"folder/{number:04d}", "tokens": values}


def by_facts(path):
    """The sequences of all documents, read as Megatron's indexed_dataset does."""
    index = path.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    (dtype,) = (np.dtype(name) for name, known in CODES.items() if known == code)
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(index, "<i8", entries, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * entries
    data = path.read_bytes()
    values = [
        np.frombuffer(data, dtype, length, pointer)
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return [values[first:stop] for first, stop in itertools.pairwise(documents.tolist())]


def keys_by_facts(path):
    """The keys as docs/megatron.md says that they stand."""
    data = path.with_suffix(".keys").read_bytes()
    (count,) = struct.unpack("<Q", data[-8:])
    bounds = struct.unpack(f"<{count + 1}Q", data[-8 * (count + 2) : -8])
    assert bounds[-1] == len(data) - 8 * (count + 2)
    return [data[first:stop].decode() for first, stop in itertools.pairwise(bounds)]


def by_hand(path, documents, dtype="<u2", modes=b""):
    """A pair of files as Megatron's IndexedDatasetBuilder writes it."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    pointers = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    ends = np.cumsum([0, *map(len, documents)])
    path.write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    tables = (np.array(lengths, "<i4"), pointers.astype("<i8"), ends.astype("<i8"))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(ends))
    index = head + b"".join(table.tobytes() for table in tables) + modes
    path.with_suffix(".idx").write_bytes(index)
    return path


class TestMegatron(FormatContract):
    tested = get_format("megatron")
    provides = OPTIONAL
    schema = TOKENS
    small = Schema({"input_ids": Array("<i4", (2,))})
    small_values = (np.array([1, -1], "<i4"), np.array([70_000, 0], "<i4"))
    large = TOKENS
    arrays = tuple(k for k, _ in ARRAYS if k.dtype in ("<u2", ">i4") and len(k.shape or "xx") == 1)
    gaps: ClassVar = dict.fromkeys(
        [
            "test_empty_values_come_back",
            "test_floats_that_are_no_numbers_come_back",
            "test_images_come_back_byte_for_byte_or_as_the_format_says",
            "test_an_absent_value_of_any_type_is_absent",
            "test_audio_and_video_come_back_byte_for_byte",
            "test_without_its_layout_a_shard_still_reads",
            "test_an_image_that_is_none_is_refused_and_the_rest_goes_on",
            "test_json_text_is_stored_as_it_is",
        ],
        "Megatron holds one field, a one-dimensional array of whole numbers",
    )

    def sample(self, number):
        return tokens(number)

    def any_sample(self):
        values = st.lists(st.integers(0, 2**16 - 1), max_size=60).map(lambda v: np.array(v, "<u2"))
        return st.builds(lambda key, v: {"__key__": key, "tokens": v}, any_keys, values)

    def large_value(self, size):
        return np.frombuffer(super().large_value(size // 2 * 2), "<u2")

    def independent_keys(self, path):
        assert len(by_facts(path)) == len(keys_by_facts(path))
        return keys_by_facts(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shard-000000.bin"


def written(path, kind, values):
    samples = [{"__key__": f"{n}", "x": np.array(v, kind.dtype)} for n, v in enumerate(values)]
    reader = write_shard(MEGATRON, path, Schema({"x": kind}), samples)
    for number, sample in enumerate(samples):
        assert_same(reader[number], sample)
    return reader


# How each type is stored: as one that Megatron has.
STORED = {"|u1": "<u2", "<u2": "<u2", "<u4": "<i4", "<u8": "<i8", "|i1": "i1", "<i2": "<i2"}
STORED |= {"<i4": "<i4", "<i8": "<i8", ">u2": "<u2", ">i8": "<i8"}


@pytest.mark.parametrize(("dtype", "stored"), STORED.items())
def test_a_type_is_stored_as_megatron_has_it_and_comes_back(path, dtype, stored):
    limits, types = np.iinfo(dtype), np.iinfo(stored)
    low, high = max(limits.min, types.min), min(limits.max, types.max)
    values, schema = [[], [low, 0, high], [7]], Schema({"x": Array(dtype, (None,))})
    reader = written(path, schema["x"], values)
    assert reader.sizes("x").tolist() == [n * np.dtype(stored).itemsize for n in (0, 3, 1)]
    found = [sequence for (sequence,) in by_facts(path)]
    assert {sequence.dtype for sequence in found} == {np.dtype(stored)}
    assert [sequence.tolist() for sequence in found] == values
    if high == limits.max:
        return
    # A number that does not fit is refused, and the rest goes on.
    writer = MEGATRON.create(path, ShardSpec(schema))
    assert writer.write({"__key__": "a", "x": np.array([high], dtype)})
    with refused(SampleError, str(high + 1), where={"key": "b", "field": "x"}):
        writer.write({"__key__": "b", "x": np.array([1, high + 1, 2], dtype)})
    assert writer.write({"__key__": "c", "x": np.array([3], dtype)})
    writer.close()
    samples = read_all(MEGATRON.open(path, MEGATRON.layout(schema)))
    assert [(sample["__key__"], *sample["x"]) for sample in samples] == [("a", high), ("c", 3)]
    (note,) = MEGATRON.notes(schema)
    assert "refused" in note


def test_a_sample_that_cannot_be_stored_is_named(path, monkeypatch):
    monkeypatch.setattr("shardkit.formats.megatron.writer.MAX_TOKENS", 5)
    writer = MEGATRON.create(path, ShardSpec(Schema({"x": Array("<u2")})))
    for key, values, what in (
        ("a", np.zeros(6, "<u2"), "too long"),
        ("a", np.zeros((2, 2), "<u2"), "one dimension"),
        ("a", np.array(1, "<u2"), "one dimension"),
        ("\ud800", np.zeros(1, "<u2"), "Unicode"),
    ):
        with pytest.raises(SampleError, match=what):
            writer.write({"__key__": key, "x": values})
    assert writer.write({"__key__": "a", "x": np.zeros(5, "<u2")})
    writer.close()
    assert keys_by_facts(path) == ["a"]
    assert len(by_facts(path)) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tokens": Array("<u2", (9,)), "doc_ends": Array("<i8", (None,))},
        {"text": Text()},
        {"x": Array("<u2", (None, 2))},
        {"x": Array(None, (None,))},
        {"x": Array("<u2", (None,), optional=True)},
    ],
)
def test_another_schema_is_refused_with_what_to_do(fields):
    with refused(FormatError, "one field", fix="--tokenizer, without --seq-len"):
        MEGATRON.layout(Schema(fields))


def test_tokens_that_do_not_fit_their_schema_are_named(path):
    for dtype in ("<f4", "|b1", "<c8", "<U3"):
        schema = Schema({"x": Array(dtype, (None,))})
        with pytest.raises(FormatError, match="integers only"):
            MEGATRON.layout(schema)
        with pytest.raises(FormatError, match="integers only"):
            MEGATRON.create(path, ShardSpec(schema))
    reader = write_shard(MEGATRON, path, TOKENS, [tokens(n) for n in range(2)])
    other = Schema({"tokens": Array("<i4", (None,))})
    with pytest.raises(DamagedError, match="does not match its shard"):
        MEGATRON.join(path.with_name("b.bin"), [path], ShardSpec(other))
    with pytest.raises(DamagedError, match="a different type"):
        MEGATRON.open(path, MEGATRON.layout(other))
    fixed = MEGATRON.open(path, MEGATRON.layout(Schema({"tokens": Array("<u2", (4,))})))
    with pytest.raises(SampleError, match="7 tokens, not 4"):
        fixed[1]
    path.write_bytes(b"")
    assert reader.sample(1, ()) == {"__key__": "folder/0001"}  # without its tokens
    # Nor can the declared type hold every number of the stored one.
    written(path, Array("|u1", (None,)), [[1], [2, 255]])
    path.write_bytes(struct.pack("<3H", 1, 2, 256))
    reader = MEGATRON.open(path, MEGATRON.layout(Schema({"x": Array("|u1", (None,))})))
    assert reader[0]["x"].tolist() == [1]
    with pytest.raises(SampleError, match="256 is outside"):
        reader[1]


def test_the_limit_is_of_tokens_and_index_and_tokens_are_written_at_once(path):
    writer = MEGATRON.create(path, ShardSpec(TOKENS, max_bytes=1000))
    taken = 0
    while writer.write({"__key__": f"{taken}", "tokens": np.zeros(0, "<u2")}):
        taken += 1
    writer.close()
    assert taken == (1000 - 34 - 8) // 20
    assert path.with_suffix(".idx").stat().st_size <= 1000
    writer = MEGATRON.create(path, ShardSpec(TOKENS))
    for number in range(100):
        writer.write({"__key__": f"{number}", "tokens": np.zeros(10_000, "<u2")})
    assert path.stat().st_size > 1_500_000  # before the shard is closed
    writer.close()


def test_a_joined_shard_has_the_bytes_of_one_that_was_written_whole(tmp_path):
    draw = random.Random(5)
    # More samples than are handled at a time, and parts without any.
    samples = [{"__key__": "k" * draw.randrange(9) + f"/{n}"} for n in range(20_000)]
    for number, sample in enumerate(samples):
        sample["tokens"] = np.full(draw.randrange(3), number, "<u2")
    joined(tmp_path, samples, [0, 0, 17_000, 17_001, 20_000])
    write_shard(MEGATRON, tmp_path / "whole.bin", TOKENS, samples).close()
    for end in ENDS:
        together, whole = (tmp_path / f"{name}{end}" for name in ("joined", "whole"))
        assert together.read_bytes() == whole.read_bytes()
    assert sorted(p.suffix for p in tmp_path.glob("joined.*")) == [*ENDS]


def joined(folder, samples, cuts):
    """A file of parts that tasks made."""
    parts = []
    for number, (first, stop) in enumerate(itertools.pairwise(cuts)):
        parts.append(folder / f"part-{number}.bin")
        write_shard(MEGATRON, parts[-1], TOKENS, samples[first:stop]).close()
    MEGATRON.join(folder / "joined.bin", parts, ShardSpec(TOKENS))


@pytest.mark.parametrize("dtype", list(CODES))
def test_a_document_is_a_sample_of_all_its_sequences(tmp_path, dtype):
    documents = [[[1, 2], [3]], [], [[]], [[4], [], [5, 6]], [[7, 8, 9]], []]
    path = by_hand(tmp_path / "corpus.v1_text_document.bin", documents, dtype, modes=b"\1" * 7)
    with shardkit.open(path) as dataset:
        assert dataset.format == "megatron"
        assert dict(dataset.schema) == {"tokens": Array(dtype, (None,))}
        for number, (sample, document) in enumerate(zip(dataset, documents, strict=True)):
            values = np.array([*itertools.chain(*document)], dtype)
            key = f"corpus_v1_text_document/{number:09d}"
            assert_same(sample, {"__key__": key, "tokens": values})
        size = np.dtype(dtype).itemsize
        expected = [n * size for n in (3, 0, 0, 3, 3, 0)]
        assert dataset.reader(0).sizes("tokens").tolist() == expected


def changed(path, *changes):
    """The file with other bytes at some places of its index."""
    index = bytearray(path.with_suffix(".idx").read_bytes())
    for at, data in changes:
        index[at : at + len(data)] = data
    path.with_suffix(".idx").write_bytes(index)
    return path


def test_sequences_are_read_where_their_offsets_say(tmp_path):
    path = by_hand(tmp_path / "x.bin", [[[1, 2], [3]], [[4]]])
    changed(path, (34 + 12, struct.pack("<3q", 4, 3, 0)))  # the second is not even aligned
    found = [sample["tokens"].tolist() for sample in read_all(MEGATRON.open(path))]
    assert found == [[3, 4, 0x0300], [1]]
    # Those that overlap take no more memory than the file.
    path = by_hand(tmp_path / "x.bin", [[[1]] * 1000, [[2]]])
    changed(path, (34, struct.pack("<i", 1000) * 1000), (34 + 4 * 1001, bytes(8 * 1000)))
    reader = MEGATRON.open(path)
    with refused(SampleError, "overlap", path=path):
        reader[0]
    assert reader[1]["tokens"].tolist() == [2]


def test_keys_are_of_the_names_of_files_without_ours(tmp_path):
    by_hand(tmp_path / "b.bin", [[[3]]])
    by_hand(tmp_path / "a.bin", [[[1]], [[2]]])
    with shardkit.open(tmp_path) as dataset:
        found = [(sample["__key__"], *sample["tokens"]) for sample in dataset]
    assert found == [("a/000000000", 1), ("a/000000001", 2), ("b/000000000", 3)]
    path = tmp_path / "ours.bin"
    write_shard(MEGATRON, path, TOKENS, [tokens(n) for n in range(3)])
    assert shardkit.open(path).keys() == [f"folder/{n:04d}" for n in range(3)]
    path.with_suffix(".keys").unlink()
    with refused(DamagedError, "missing", path=path.with_suffix(".keys")):
        MEGATRON.open(path, MEGATRON.layout(TOKENS))
    for number, sample in enumerate(shardkit.open(path)):
        assert_same(sample, {**tokens(number), "__key__": f"ours/{number:09d}"})
    path.with_suffix(".idx").unlink()
    with refused(FormatError, "index beside it", expected=str(path.with_suffix(".idx"))):
        shardkit.open(path)


# Documents of several sequences by both ways of its builder, then all twice by merging. And of
# every prefix of ours all documents' sequences, mapped and not: copies, as its arrays are views.
SCRIPT = """
import json, sys
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

jobs, found = json.load(sys.stdin), {}
for prefix, dtype, multimodal in jobs["files"]:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", getattr(np, dtype), multimodal)
    for number, document in enumerate(jobs["documents"]):
        if number % 2:
            tokens = torch.tensor([token for sequence in document for token in sequence])
            lengths = [len(sequence) for sequence in document]
            builder.add_document(tokens, lengths, [1] * len(lengths))
        else:
            for sequence in document:
                builder.add_item(torch.tensor(sequence, dtype=torch.int64), 1)
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    merged = IndexedDatasetBuilder(f"{prefix}-twice.bin", getattr(np, dtype), multimodal)
    for _ in range(2):
        merged.add_index(prefix)
    merged.finalize(f"{prefix}-twice.idx")
for prefix in jobs["ours"]:
    for mapped in (True, False):
        data = IndexedDataset(prefix, mmap=mapped)
        ends = data.document_indices.tolist()
        documents = [[data[n].tolist() for n in range(a, b)] for a, b in zip(ends, ends[1:])]
        found[f"{prefix} {mapped}"] = [data.index.dtype.__name__, documents]
json.dump(found, sys.stdout)
"""

DOCUMENTS = [[[1, 2], [3]], [[4]], [], [[]], [[5, 6], [], [7, 8, 9]], [[10]]]
TYPES = ["uint8", "int8", "int16", "int32", "int64", "float32", "float64", "uint16"]


@pytest.mark.large  # its import takes as long as a hundred other tests
@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="needs megatron-core")
def test_megatron_reads_what_we_write_and_we_what_it_writes(tmp_path):
    ours = {}
    for dtype, stored in STORED.items():
        path = tmp_path / f"ours-{dtype.strip('<|>')}-{dtype[0] == '>'}.bin"
        high = min(np.iinfo(dtype).max, np.iinfo(stored).max)
        values = [[1, high, 0], [], list(range(100)), [5]]
        written(path, Array(dtype, (None,)), values)
        ours[f"{path.with_suffix('')}"] = [np.dtype(stored).name, [[value] for value in values]]
    some = [np.arange(n, dtype="<u2") for n in range(300)]
    samples = [{"__key__": f"{n}", "tokens": value} for n, value in enumerate(some)]
    joined(tmp_path, samples, [0, 100, 101, 300])
    ours[f"{tmp_path / 'joined'}"] = ["uint16", [[value.tolist()] for value in some]]
    files = [(f"{tmp_path}/{dtype}", dtype, number % 2) for number, dtype in enumerate(TYPES)]
    given = json.dumps({"files": files, "documents": DOCUMENTS, "ours": [*ours]})
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]  # it warns of what it would like
    done = subprocess.run(command, input=given, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {f"{prefix} {mapped}": ours[prefix] for prefix in ours for mapped in (True, False)}
    assert json.loads(done.stdout) == expected
    values = [[*itertools.chain(*document)] for document in DOCUMENTS]
    for prefix, dtype, _ in files:
        for path, documents in ((f"{prefix}.bin", values), (f"{prefix}-twice.bin", values * 2)):
            with shardkit.open(path) as dataset:
                assert dict(dataset.schema) == {"tokens": Array(dtype, (None,))}
                assert [sample["tokens"].tolist() for sample in dataset] == documents


def test_a_dataset_is_a_pair_with_its_keys_and_converts_on_and_back(tmp_path):
    schema = {"ids": Array("<u4", (None,))}
    samples = [{"__key__": f"a/{n}", "ids": np.arange(n, dtype="<u4")} for n in range(50)]
    with shardkit.create(tmp_path / "out", "megatron", schema) as writer:
        for sample in samples:
            writer.write(sample)
    assert {f"shard-000000{end}" for end in ENDS} < set(files_of(tmp_path / "out"))
    shardkit.convert(tmp_path / "out", "arrow", tmp_path / "arrow", workers=0)
    shardkit.convert(tmp_path / "arrow", "megatron", tmp_path / "back.bin", workers=0)
    for name in ("out", "arrow", "back.bin"):
        with shardkit.open(tmp_path / name) as dataset:
            assert dict(dataset.schema) == schema
            for found, sample in zip(dataset, samples, strict=True):
                assert_same(found, sample)
        assert shardkit.verify(tmp_path / name).sound
    for end in ENDS:
        whole, back = tmp_path / f"out/shard-000000{end}", tmp_path / f"back{end}"
        assert whole.read_bytes() == back.read_bytes()


def test_files_beside_a_single_output_are_not_overwritten(tmp_path):
    (tmp_path / "train.idx").write_bytes(b"something else")
    writer = shardkit.create(tmp_path / "train.bin", "megatron", TOKENS)
    writer.write(tokens(1))
    with pytest.raises(ShardkitError):
        writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"train.idx", "train.bin.partial"}
    assert (tmp_path / "train.idx").read_bytes() == b"something else"


_HUGE = 2**64 - 1


def read_all(reader):
    return [reader[number] for number in range(len(reader))]


@pytest.mark.parametrize(
    ("offset", "value", "match", "named"),
    [
        (0, b"NOTANIDX", "not a .idx", 0),
        (9, struct.pack("<Q", 2), "unsupported version", 9),
        (17, b"\0", "invalid type", 17),
        (17, b"\x09", "invalid type", 17),
        (18, struct.pack("<Q", _HUGE), "is truncated", 34 + 48 + 32),
        (18, struct.pack("<Q", 5), "is truncated", 34 + 48 + 32),
        (26, struct.pack("<Q", _HUGE), "is truncated", 34 + 48 + 32),
        (26, struct.pack("<Q", 0), "no document index", 26),
        (26, struct.pack("<Q", 3), "document index is damaged", 34 + 48 + 16),
        (34, struct.pack("<i", -1), "outside", 34 + 16),
        (38, struct.pack("<i", 2**31 - 1), "outside", 34 + 24),
        (34 + 16, struct.pack("<q", -2), "outside", 34 + 16),
        (34 + 40, struct.pack("<q", 7), "outside", 34 + 40),
        (34 + 24, struct.pack("<q", 2**63 - 1), "outside", 34 + 24),
        (34 + 48, struct.pack("<q", 1), "document index is damaged", 34 + 48),
        (34 + 56, struct.pack("<q", 4), "document index is damaged", 34 + 64),
        (34 + 64, struct.pack("<q", -1), "document index is damaged", 34 + 64),
        (34 + 72, struct.pack("<q", 3), "document index is damaged", 34 + 72),
    ],
)
def test_a_number_that_contradicts_the_files_is_named(tmp_path, offset, value, match, named):
    path = by_hand(tmp_path / "x.bin", [[[1], [2]], [[3]], [[]]])
    index = path.with_suffix(".idx")
    assert index.stat().st_size == 34 + 48 + 32
    changed(path, (offset, value))
    kind = FormatError if match == "unsupported version" else DamagedError
    for read in (read_all, sizes):
        with refused(kind, match, path=index, offset=named):
            read(MEGATRON.open(path))


def sizes(reader):
    return reader.sizes("tokens")


def test_a_bad_number_far_into_the_index_is_found(tmp_path):
    # The high byte of a length, and of the end of a document: now it is negative.
    ends = 34 + 12 * 20_000
    for at, match in ((34 + 4 * 19_999 + 3, "outside"), (ends + 8 * 16_384 + 7, "document")):
        path = changed(by_hand(tmp_path / "x.bin", [[[1]]] * 20_000), (at, b"\x80"))
        for read in (read_all, sizes):
            with refused(DamagedError, match, path=path.with_suffix(".idx")):
                read(MEGATRON.open(path))


def test_rows_of_documents_with_bad_numbers_are_left_to_be_read_one_by_one(tmp_path, monkeypatch):
    ends = 34 + 12 * 4
    for at, value in (
        (34 + 4, struct.pack("<i", -2)), (34 + 4, struct.pack("<i", 2**30)),
        (34 + 16 + 8, struct.pack("<q", -1)), (34 + 16 + 8, struct.pack("<q", 2**62)),
        (ends + 8, struct.pack("<q", -9)), (ends + 8, struct.pack("<q", 2**62)),
        (ends + 8, struct.pack("<2q", 2**62, 2**62 + 1)),
    ):  # fmt: skip
        path = by_hand(tmp_path / "x.bin", [[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]])
        changed(path, (at, value))
        for in_memory in (1 << 20, 0):
            monkeypatch.setattr("shardkit.storage.byte_source.IN_MEMORY", in_memory)
            reader = MEGATRON.open(path)
            compare_at_once(reader)
            with pytest.raises(DamagedError):
                reader[1]


def test_a_short_bin_or_index_is_named_at_once(path):
    write_shard(MEGATRON, path, TOKENS, [tokens(n) for n in range(5)])
    known = MEGATRON.layout(TOKENS)
    for suffix, named in {".bin": ".idx", ".idx": ".idx", ".keys": ".keys"}.items():
        file = path.with_suffix(suffix)
        whole = file.read_bytes()
        for size in {0, 1, 33, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:size])
            with refused(DamagedError, path=path.with_suffix(named)):
                MEGATRON.open(path, known)
        file.write_bytes(whole)
    MEGATRON.open(path, known)
