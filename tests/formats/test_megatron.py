"""Megatron's files: the contract, the layout read and written by hand, what is refused or damaged.

Megatron's own library reads and writes them in test_megatron_core.py.
"""

from __future__ import annotations

import itertools
import random
import struct
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import DamagedError, FormatError, SampleError, ShardkitError
from shardkit.formats import get_format
from shardkit.formats.base import Joins, ShardReader, ShardSpec
from shardkit.formats.megatron.reader import MegatronReader
from shardkit.sample import Sample
from shardkit.schema import Array, Bytes, Image, Int, Schema, Text
from shardkit.testing import ARRAYS, OPTIONAL, FormatContract, any_keys, assert_same, write_shard
from tests.conftest import files_of

MEGATRON = get_format("megatron")
TOKENS = Schema({"tokens": Array("<u2", (None,))})
CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}


def tokens(number: int) -> Sample:
    """A sample of the schema TOKENS; the first has none."""
    values = np.arange(number * 7, dtype="<u2") * 911 + number
    return {"__key__": f"folder/{number:04d}", "tokens": values}


def by_facts(path: Path) -> list[list[np.ndarray[Any, Any]]]:
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


def keys_by_facts(path: Path) -> list[str]:
    """The keys as docs/megatron.md says that they stand."""
    data = path.with_suffix(".keys").read_bytes()
    (count,) = struct.unpack("<Q", data[-8:])
    bounds = struct.unpack(f"<{count + 1}Q", data[-8 * (count + 2) : -8])
    assert bounds[-1] == len(data) - 8 * (count + 2)
    return [data[first:stop].decode() for first, stop in itertools.pairwise(bounds)]


def by_hand(
    path: Path, documents: list[list[list[int]]], dtype: str = "<u2", modes: bytes = b""
) -> Path:
    """A pair of files as Megatron's IndexedDatasetBuilder writes it."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    pointers = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    ends = np.cumsum([0, *map(len, documents)])
    path.write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(ends))
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + ends.astype("<i8").tobytes()
        + modes
    )
    return path


class TestMegatron(FormatContract):
    tested = get_format("megatron")
    provides = OPTIONAL
    schema = TOKENS
    small = Schema({"input_ids": Array("<i4", (2,))})
    small_values = (np.array([1, -1], "<i4"), np.array([70_000, 0], "<i4"))
    large = TOKENS
    arrays = tuple(
        kind for kind, _ in ARRAYS if kind.dtype in ("<u2", ">i4") and len(kind.shape or "xx") == 1
    )
    gaps: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            "test_empty_values_come_back",
            "test_images_come_back_byte_for_byte_or_as_the_format_says",
            "test_an_absent_value_of_any_type_is_absent",
            "test_audio_and_video_come_back_byte_for_byte",
            "test_without_its_layout_a_shard_still_reads",
            "test_an_image_that_is_none_is_refused_and_the_rest_goes_on",
            "test_json_text_is_stored_as_it_is",
            "test_the_bound_holds_with_images",
        ),
        "Megatron holds one field, a one-dimensional array of whole numbers",
    )

    def sample(self, number: int) -> Sample:
        return tokens(number)

    def any_sample(self) -> st.SearchStrategy[Sample]:
        values = st.lists(st.integers(0, 2**16 - 1), max_size=60).map(lambda v: np.array(v, "<u2"))
        return st.builds(lambda key, v: {"__key__": key, "tokens": v}, any_keys, values)

    def large_value(self, size: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(super().large_value(size // 2 * 2), "<u2")

    def independent_keys(self, path: Path) -> list[str]:
        assert len(by_facts(path)) == len(keys_by_facts(path))
        return keys_by_facts(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shard-000000.bin"


def written(path: Path, kind: Array, values: list[Any]) -> MegatronReader:
    samples = [{"__key__": f"{n}", "x": np.array(v, kind.dtype)} for n, v in enumerate(values)]
    reader = write_shard(MEGATRON, path, Schema({"x": kind}), samples)
    assert isinstance(reader, MegatronReader)
    for number, sample in enumerate(samples):
        assert_same(reader[number], sample)
    return reader


# --- layout --------------------------------------------------------------------------------------


def test_the_bytes_are_those_that_the_facts_describe(path: Path, tmp_path: Path) -> None:
    values = [[1, 2, 3], [], [65_535]]
    written(path, Array("<u2", (None,)), values)
    expected = by_hand(tmp_path / "hand.bin", [[value] for value in values])
    assert path.read_bytes() == expected.read_bytes()
    assert path.with_suffix(".idx").read_bytes() == expected.with_suffix(".idx").read_bytes()
    keys = b"012" + struct.pack("<5Q", 0, 1, 2, 3, 3)
    assert path.with_suffix(".keys").read_bytes() == keys


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("|u1", "<u2"), ("<u2", "<u2"), ("<u4", "<i4"), ("<u8", "<i8"), ("|i1", "i1"), ("<i2", "<i2"),
     ("<i4", "<i4"), ("<i8", "<i8"), (">u2", "<u2"), (">i8", "<i8")],
)  # fmt: skip
def test_a_type_is_stored_as_megatron_has_it_and_comes_back(
    path: Path, dtype: str, stored: str
) -> None:
    limits, types = np.iinfo(dtype), np.iinfo(stored)
    low, high = max(limits.min, types.min), min(limits.max, types.max)
    reader = written(path, Array(dtype, (None,)), [[], [low, 0, high], [7]])
    assert reader.sizes("x").tolist() == [n * np.dtype(stored).itemsize for n in (0, 3, 1)]
    found = [sequence for (sequence,) in by_facts(path)]
    assert {sequence.dtype for sequence in found} == {np.dtype(stored)}
    assert [sequence.tolist() for sequence in found] == [[], [low, 0, high], [7]]


@pytest.mark.parametrize(("dtype", "value"), [("<u4", 2**31), ("<u8", 2**63)])
def test_a_number_that_does_not_fit_is_refused_and_the_rest_goes_on(
    path: Path, dtype: str, value: int
) -> None:
    schema = Schema({"x": Array(dtype, (None,))})
    writer = MEGATRON.create(path, ShardSpec(schema))
    assert writer.write({"__key__": "a", "x": np.array([value - 1], dtype)})
    with pytest.raises(SampleError, match=str(value)) as error:
        writer.write({"__key__": "b", "x": np.array([1, value, 2], dtype)})
    assert error.value.where == {"key": "b", "field": "x"}
    assert writer.write({"__key__": "c", "x": np.array([3], dtype)})
    writer.close()
    reader = MEGATRON.open(path, MEGATRON.layout(schema))
    assert [reader[n]["__key__"] for n in range(len(reader))] == ["a", "c"]
    assert [reader[n]["x"].tolist() for n in range(len(reader))] == [[value - 1], [3]]
    (note,) = MEGATRON.notes(schema)
    assert "refused" in note


def test_a_sample_that_cannot_be_stored_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.formats.megatron.writer.MAX_TOKENS", 5)
    writer = MEGATRON.create(path, ShardSpec(Schema({"x": Array("<u2")})))
    with pytest.raises(SampleError, match="too long"):
        writer.write({"__key__": "a", "x": np.zeros(6, "<u2")})
    for values in (np.zeros((2, 2), "<u2"), np.array(1, "<u2")):
        with pytest.raises(SampleError, match="one dimension"):
            writer.write({"__key__": "a", "x": values})
    with pytest.raises(SampleError, match="Unicode"):
        writer.write({"__key__": "\ud800", "x": np.zeros(1, "<u2")})
    assert writer.write({"__key__": "a", "x": np.zeros(5, "<u2")})
    writer.close()
    assert keys_by_facts(path) == ["a"]
    assert len(by_facts(path)) == 1


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({}, "write only the tokens"),
        ({"a": Array("<u2", (None,)), "b": Array("<u2", (None,))}, "write only the tokens"),
        ({"tokens": Array("<u2", (9,)), "doc_ends": Array("<i8", (None,))}, "--seq-len"),
        ({"image": Image(), "label": Int()}, "store images as wds"),
        ({"text": Text()}, "--tokenizer"),
        ({"blob": Bytes()}, "another format"),
        ({"x": Array("<u2", (None, 2))}, "another format"),
        ({"x": Array(None, (None,))}, "another format"),
        ({"x": Array("<u2", (None,), optional=True)}, "another format"),
    ],
)
def test_another_schema_is_refused_with_what_to_do(fields: dict[str, Any], fix: str) -> None:
    with pytest.raises(FormatError, match="one field") as error:
        MEGATRON.layout(Schema(fields))
    assert fix in (error.value.fix or "")


def test_tokens_that_do_not_fit_their_schema_are_named(path: Path) -> None:
    for dtype in ("<f4", "|b1", "<c8", "<U3"):
        with pytest.raises(FormatError, match="integers only"):
            MEGATRON.layout(Schema({"x": Array(dtype, (None,))}))
        with pytest.raises(FormatError, match="integers only"):
            MEGATRON.create(path, ShardSpec(Schema({"x": Array(dtype, (None,))})))
    reader = write_shard(MEGATRON, path, TOKENS, [tokens(n) for n in range(2)])
    other = Schema({"tokens": Array("<i4", (None,))})
    with pytest.raises(DamagedError, match="does not match its shard"):
        MEGATRON.join(path.with_name("b.bin"), [path], ShardSpec(other))  # type: ignore[attr-defined]
    with pytest.raises(DamagedError, match="a different type"):
        MEGATRON.open(path, MEGATRON.layout(other))
    fixed = MEGATRON.open(path, MEGATRON.layout(Schema({"tokens": Array("<u2", (4,))})))
    with pytest.raises(SampleError, match="7 tokens, not 4"):
        fixed[1]
    path.write_bytes(b"")
    assert reader.sample(1, ()) == {"__key__": "folder/0001"}  # without its tokens


def test_the_limit_is_of_tokens_and_index_together(path: Path) -> None:
    writer = MEGATRON.create(path, ShardSpec(TOKENS, max_bytes=1000))
    taken = 0
    while writer.write({"__key__": f"{taken}", "tokens": np.zeros(0, "<u2")}):
        taken += 1
    writer.close()
    assert taken == (1000 - 34 - 8) // 20
    assert path.with_suffix(".idx").stat().st_size <= 1000


def test_samples_are_written_before_the_shard_is_closed(path: Path) -> None:
    writer = MEGATRON.create(path, ShardSpec(TOKENS))
    for number in range(100):
        writer.write({"__key__": f"{number}", "tokens": np.zeros(10_000, "<u2")})
    assert path.stat().st_size > 1_500_000
    writer.close()


def test_a_joined_shard_has_the_bytes_of_one_that_was_written_whole(tmp_path: Path) -> None:
    assert isinstance(MEGATRON, Joins)
    draw = random.Random(5)
    # More samples than are handled at a time, and parts without any.
    samples = [{"__key__": "k" * draw.randrange(9) + f"/{n}"} for n in range(20_000)]
    for number, sample in enumerate(samples):
        sample["tokens"] = np.full(draw.randrange(3), number, "<u2")  # type: ignore[assignment]
    parts = []
    for number, (first, stop) in enumerate(itertools.pairwise([0, 0, 17_000, 17_001, 20_000])):
        parts.append(tmp_path / f"part-{number}.bin")
        write_shard(MEGATRON, parts[-1], TOKENS, samples[first:stop]).close()
    MEGATRON.join(tmp_path / "joined.bin", parts, ShardSpec(TOKENS))
    write_shard(MEGATRON, tmp_path / "whole.bin", TOKENS, samples).close()
    for suffix in (".bin", ".idx", ".keys"):
        joined, whole = (tmp_path / f"{name}{suffix}" for name in ("joined", "whole"))
        assert joined.read_bytes() == whole.read_bytes()
    assert sorted(p.suffix for p in tmp_path.glob("joined.*")) == [".bin", ".idx", ".keys"]


# --- files that others made ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(CODES))
def test_a_document_is_a_sample_of_all_its_sequences(tmp_path: Path, dtype: str) -> None:
    documents = [[[1, 2], [3]], [], [[]], [[4], [], [5, 6]], [[7, 8, 9]], []]
    path = by_hand(tmp_path / "corpus.v1_text_document.bin", documents, dtype, modes=b"\1" * 7)
    with shardkit.open(path) as dataset:
        assert dataset.format == "megatron"
        assert dict(dataset.schema) == {"tokens": Array(dtype, (None,))}
        assert len(dataset) == 6
        for number, document in enumerate(documents):
            values = np.array([*itertools.chain(*document)], dtype)
            key = f"corpus_v1_text_document/{number:09d}"
            assert_same(dataset[number], {"__key__": key, "tokens": values})
        reader = dataset.reader(0)
        assert isinstance(reader, MegatronReader)
        size = np.dtype(dtype).itemsize
        assert reader.sizes("tokens").tolist() == [n * size for n in (3, 0, 0, 3, 3, 0)]


def test_sequences_are_read_where_their_offsets_say(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "x.bin", [[[1, 2], [3]], [[4]]])
    index = bytearray(path.with_suffix(".idx").read_bytes())
    index[34 + 12 : 34 + 36] = struct.pack("<3q", 4, 3, 0)  # the second is not even aligned
    path.with_suffix(".idx").write_bytes(index)
    reader = MEGATRON.open(path)
    assert reader[0]["tokens"].tolist() == [3, 4, 0x0300]
    assert reader[1]["tokens"].tolist() == [1]


def test_overlapping_sequences_take_no_more_memory_than_the_file(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "x.bin", [[[1]] * 1000, [[2]]])
    index = bytearray(path.with_suffix(".idx").read_bytes())
    index[34 : 34 + 4 * 1000] = struct.pack("<i", 1000) * 1000
    index[34 + 4 * 1001 : 34 + 4 * 1001 + 8 * 1000] = bytes(8 * 1000)
    path.with_suffix(".idx").write_bytes(index)
    reader = MEGATRON.open(path)
    with pytest.raises(SampleError, match="overlap") as error:
        reader[0]
    assert error.value.where["path"] == path
    assert reader[1]["tokens"].tolist() == [2]


def test_a_folder_of_files_is_one_dataset_with_keys_of_their_names(tmp_path: Path) -> None:
    by_hand(tmp_path / "b.bin", [[[3]]])
    by_hand(tmp_path / "a.bin", [[[1]], [[2]]])
    with shardkit.open(tmp_path) as dataset:
        found = [(sample["__key__"], *sample["tokens"]) for sample in dataset]
    assert found == [("a/000000000", 1), ("a/000000001", 2), ("b/000000000", 3)]


def test_our_files_without_manifest_and_keys_read_like_those_of_others(tmp_path: Path) -> None:
    path = tmp_path / "ours.bin"
    write_shard(MEGATRON, path, Schema({"input_ids": Array("|u1")}), [])
    write_shard(MEGATRON, path, TOKENS, [tokens(n) for n in range(3)])
    assert [shardkit.open(path)[n]["__key__"] for n in range(3)] == [
        f"folder/{n:04d}" for n in range(3)
    ]
    path.with_suffix(".keys").unlink()
    with pytest.raises(DamagedError, match="missing") as error:
        MEGATRON.open(path, MEGATRON.layout(TOKENS))
    assert error.value.where["path"] == path.with_suffix(".keys")
    for number in range(3):
        expected = {**tokens(number), "__key__": f"ours/{number:09d}"}
        assert_same(shardkit.open(path)[number], expected)


def test_a_bin_without_its_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"whatever")
    with pytest.raises(FormatError, match="index beside it") as error:
        shardkit.open(tmp_path / "weights.bin")
    assert error.value.expected == str(tmp_path / "weights.idx")


# --- reading -------------------------------------------------------------------------------------


def test_a_dataset_is_a_pair_with_its_keys_and_converts_on_and_back(tmp_path: Path) -> None:
    schema = {"ids": Array("<u4", (None,))}
    samples = [{"__key__": f"a/{n}", "ids": np.arange(n, dtype="<u4")} for n in range(50)]
    with shardkit.create(tmp_path / "out", "megatron", schema) as writer:
        for sample in samples:
            writer.write(sample)
    names = {f"shard-000000{end}" for end in (".bin", ".idx", ".keys")}
    assert names < set(files_of(tmp_path / "out"))
    shardkit.convert(tmp_path / "out", "arrow", tmp_path / "arrow", workers=0)
    shardkit.convert(tmp_path / "arrow", "megatron", tmp_path / "back.bin", workers=0)
    for name in ("out", "arrow", "back.bin"):
        with shardkit.open(tmp_path / name) as dataset:
            assert dict(dataset.schema) == schema
            for number, sample in enumerate(samples):
                assert_same(dataset[number], sample)
        assert shardkit.verify(tmp_path / name).sound
    for end in (".bin", ".idx", ".keys"):
        whole, back = tmp_path / f"out/shard-000000{end}", tmp_path / f"back{end}"
        assert whole.read_bytes() == back.read_bytes()


def test_files_beside_a_single_output_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train.idx").write_bytes(b"something else")
    writer = shardkit.create(tmp_path / "train.bin", "megatron", TOKENS)
    writer.write(tokens(1))
    with pytest.raises(ShardkitError):
        writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"train.idx", "train.bin.partial"}
    assert (tmp_path / "train.idx").read_bytes() == b"something else"


@settings(suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    dtype=st.sampled_from(["<u2", "<i4"]),
    documents=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6),
)
def test_any_documents_read_as_the_facts_say(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    dtype: str,
    documents: list[list[int]],
) -> None:
    number = itertools.count(1)
    filled = [[[next(number) for _ in range(n)] for n in document] for document in documents]
    path = by_hand(tmp_path_factory.mktemp("any") / "x.bin", filled, dtype)
    reader = MEGATRON.open(path)
    assert len(reader) == len(documents)
    for found, sequences in zip(
        (reader[n] for n in range(len(reader))), by_facts(path), strict=True
    ):
        expected = np.concatenate([np.zeros(0, dtype), *sequences])
        np.testing.assert_array_equal(found["tokens"], expected)


# --- damage --------------------------------------------------------------------------------------

_HUGE = 2**64 - 1


def read_all(reader: ShardReader) -> list[Sample]:
    return [reader[number] for number in range(len(reader))]


@pytest.mark.parametrize(
    ("offset", "value", "match", "named"),
    [
        (0, b"NOTANIDX", "not a .idx", 0),
        (9, struct.pack("<Q", 2), "unsupported version", 9),
        (17, b"\0", "invalid type", 17),
        (17, b"\x09", "invalid type", 17),
        (18, struct.pack("<Q", _HUGE), "is truncated", None),
        (18, struct.pack("<Q", 5), "is truncated", None),
        (26, struct.pack("<Q", _HUGE), "is truncated", None),
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
def test_a_number_that_contradicts_the_files_is_named(
    tmp_path: Path, offset: int, value: bytes, match: str, named: int | None
) -> None:
    path = by_hand(tmp_path / "x.bin", [[[1], [2]], [[3]], [[]]])
    index = bytearray(path.with_suffix(".idx").read_bytes())
    assert len(index) == 34 + 48 + 32
    index[offset : offset + len(value)] = value
    path.with_suffix(".idx").write_bytes(index)
    for read in (read_all, lambda reader: reader.sizes("tokens")):
        with pytest.raises((DamagedError, FormatError), match=match) as error:
            read(MEGATRON.open(path))
        assert error.value.where["path"] == path.with_suffix(".idx")
        assert error.value.where["offset"] == (len(index) if named is None else named)


def test_a_bad_number_far_into_the_index_is_found(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "x.bin", [[[1]]] * 20_000)
    index = path.with_suffix(".idx").read_bytes()
    # The high byte of a length, and of the end of a document: now it is negative.
    ends = 34 + 12 * 20_000
    for at, match in ((34 + 4 * 19_999 + 3, "outside"), (ends + 8 * 16_384 + 7, "document")):
        damaged = bytearray(index)
        damaged[at] = 0x80
        path.with_suffix(".idx").write_bytes(damaged)
        for read in (read_all, lambda reader: reader.sizes("tokens")):
            with pytest.raises(DamagedError, match=match) as error:
                read(MEGATRON.open(path))
            assert error.value.where["path"] == path.with_suffix(".idx")


def test_rows_of_documents_with_bad_numbers_are_left_to_be_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = by_hand(tmp_path / "x.bin", [[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]])
    index = path.with_suffix(".idx").read_bytes()
    ends = 34 + 12 * 4
    for offset, value in (
        (34 + 4, struct.pack("<i", -2)), (34 + 4, struct.pack("<i", 2**30)),
        (34 + 16 + 8, struct.pack("<q", -1)), (34 + 16 + 8, struct.pack("<q", 2**62)),
        (ends + 8, struct.pack("<q", -9)), (ends + 8, struct.pack("<q", 2**62)),
        (ends + 8, struct.pack("<2q", 2**62, 2**62 + 1)),
    ):  # fmt: skip
        path.with_suffix(".idx").write_bytes(index[:offset] + value + index[offset + len(value) :])
        for in_memory in (1 << 20, 0):
            monkeypatch.setattr("shardkit.byte_source.IN_MEMORY", in_memory)
            reader, out = MEGATRON.open(path), np.zeros((2, 2), np.int64)
            assert not reader.read_rows("tokens", np.array([0, 1]), out)
            assert not out.any()
            with pytest.raises(DamagedError):
                reader[1]


def test_long_tables_stay_in_their_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [tokens(n) for n in range(20)]
    reader = write_shard(MEGATRON, path, TOKENS, samples)
    assert reader.in_memory == 20 * (4 + 8 + 8 + 8 + len("folder/0000")) + 8 + 16
    monkeypatch.setattr("shardkit.byte_source.IN_MEMORY", 100)
    reader = MEGATRON.open(path, MEGATRON.layout(TOKENS))
    assert reader.in_memory == 80  # the lengths of sequences
    assert_same(read_all(reader)[13], samples[13])
    assert reader.keys() == [sample["__key__"] for sample in samples]
    assert reader.sizes("tokens").tolist() == [sample["tokens"].nbytes for sample in samples]
    out = np.zeros((2, 7), np.int64)
    assert reader.read_rows("tokens", np.array([1, 1]), out)
    assert out.tolist() == [samples[1]["tokens"].tolist()] * 2


def test_a_short_bin_or_index_is_named_at_once(path: Path) -> None:
    write_shard(MEGATRON, path, TOKENS, [tokens(n) for n in range(5)])
    known = MEGATRON.layout(TOKENS)
    for suffix in (".bin", ".idx", ".keys"):
        file = path.with_suffix(suffix)
        whole = file.read_bytes()
        for size in {0, 1, 33, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:size])
            with pytest.raises(DamagedError) as error:
                MEGATRON.open(path, known)
            assert error.value.where["path"] == path.with_suffix(
                ".keys" if suffix == ".keys" else ".idx"
            )
        file.write_bytes(whole)
    MEGATRON.open(path, known)


def test_a_number_that_the_declared_type_cannot_hold_is_damage(path: Path) -> None:
    written(path, Array("|u1", (None,)), [[1], [2, 255]])
    path.write_bytes(struct.pack("<3H", 1, 2, 256))
    reader = MEGATRON.open(path, MEGATRON.layout(Schema({"x": Array("|u1", (None,))})))
    assert reader[0]["x"].tolist() == [1]
    with pytest.raises(SampleError, match="256 is outside"):
        reader[1]
