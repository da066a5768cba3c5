"""ArrayRecord: the contract, the library and Grain both ways, what is refused or damaged."""

from __future__ import annotations

import os
import pickle
import random
import resource
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.byte_source import LocalFile
from shardkit.codecs.protobuf import dump_field
from shardkit.errors import DamagedError, FormatError, NotFoundError, SampleError, StorageError
from shardkit.formats import get_format
from shardkit.formats.array_record.records import Records
from shardkit.formats.base import ShardSpec
from shardkit.formats.tfrecord import example
from shardkit.schema import Array, Bytes, Image, Int, Schema, Text
from shardkit.testing import FormatContract, make_image
from shardkit.testing_samples import in_fork
from tests.conftest import few
from tests.stream.data import write_photos

module = pytest.importorskip("array_record.python.array_record_module", reason="needs array_record")
ARRAY_RECORD = get_format("array_record")
OPTIONS = [
    "group_size:1", "uncompressed,group_size:7", "uncompressed,group_size:1", "group_size:3",
    "brotli:5,group_size:1", "snappy,group_size:1", "snappy,group_size:100",
    "group_size:2,pad_to_block_boundary:true",
]  # fmt: skip


def by_library(path: Path, records: list[bytes], options: str = "group_size:1") -> Path:
    writer = module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def read_by_library(path: Path) -> list[bytes]:
    reader = module.ArrayRecordReader(str(path))
    assert reader.ok()
    return reader.read_all()


def foreign(number: int) -> bytes:
    """An Example as TFDS writes them: without a key, labels as numbers, boxes as floats."""
    parts = {
        "image": example.Feature(example.BYTES, [make_image(number)]),
        "label": example.Feature(example.INTS, [example.packed(np.array([number]))]),
        "name": example.Feature(example.BYTES, [f"n{number}".encode()]),
        "boxes": example.Feature(
            example.FLOATS, [np.arange(4 * (number % 3), dtype="<f4").tobytes()]
        ),
    }
    return dump_field(
        1, b"".join(chunk for name, each in parts.items() for chunk in example.entry(name, each))
    )


class TestArrayRecord(FormatContract):
    tested = ARRAY_RECORD
    provides = frozenset({"spans"})
    least_bytes = 1 << 17

    def independent_keys(self, path: Path) -> list[str]:
        found = []
        for record in read_by_library(path):
            found.append(
                example.feature(record, example.features(record)["__key__"]).one().decode()
            )
        return found


@pytest.mark.parametrize("options", few(OPTIONS, *OPTIONS[:2]))
def test_what_the_library_writes_is_read(tmp_path: Path, options: str) -> None:
    rng = random.Random(1)
    sizes = [rng.choice([0, 5, 100, 1000, 70_000, 200_000]) for _ in range(60)]
    for records in (
        [],
        [b""],
        [b"", b"a", b""],
        [rng.randbytes(size) for size in sizes],
        [b"%d" % number for number in range(3000)],
    ):
        path = by_library(tmp_path / "x.array_record", records, options)
        source = LocalFile(path)
        found = Records(source)
        assert [found.read(source, number) for number in range(len(found))] == records
        spans = found.spans()
        assert spans.shape == (len(records), 2)
        assert (spans[:, 0] < spans[:, 1]).all()


def test_examples_of_others_are_samples(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for number in range(2):
        name = f"tiny-train.array_record-0000{number}-of-00002"
        by_library(folder / name, [foreign(5 * number + n) for n in range(5)])
    dataset = shardkit.open(folder)
    assert (dataset.format, len(dataset)) == ("array_record", 10)
    assert dict(dataset.schema) == {
        "image": Image(), "label": Int(), "name": Text(), "boxes": Array("<f4", (None,)),
    }  # fmt: skip
    assert dataset[7]["label"] == 7
    assert dataset[7]["image"] == make_image(7)
    assert dataset[8]["boxes"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert dataset[6]["__key__"] == "tiny-train-00001-of-00002/000000001"
    assert len(shardkit.open(folder / name)) == 5
    shardkit.convert(folder, "wds", tmp_path / "tar", workers=0)
    found = shardkit.open(tmp_path / "tar")
    assert [sample["label"] for sample in found] == list(range(10))


def test_records_that_are_no_examples_are_bytes(tmp_path: Path) -> None:
    records = [pickle.dumps({"n": n}) for n in range(5)]
    dataset = shardkit.open(by_library(tmp_path / "x.arrayrecord", records))
    assert dict(dataset.schema) == {"record": Bytes()}
    assert [sample["record"] for sample in dataset] == records
    assert dataset[3]["__key__"] == "x/000000003"


def test_transposed_records_are_refused(tmp_path: Path) -> None:
    path = by_library(tmp_path / "x.array_record", [foreign(1)] * 9, "transpose:true,group_size:4")
    with pytest.raises(FormatError, match="transposed") as error:
        shardkit.open(path)
    assert "without transpose:true" in str(error.value.fix)


@pytest.mark.parametrize("ending", ["open", "cut", "half", "empty"])
def test_an_unclosed_or_cut_file_is_refused_where_the_library_has_no_records(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / "x.array_record"
    writer = module.ArrayRecordWriter(str(path), "uncompressed,group_size:1")
    for number in range(3000):
        writer.write(bytes(99) + b"%d" % number)
    if ending != "open":
        writer.close()
        os.truncate(path, {"cut": path.stat().st_size - 1, "half": 1 << 16, "empty": 0}[ending])
    library = module.ArrayRecordReader(str(path))
    assert (library.ok(), library.num_records()) == (False, 0)
    with pytest.raises((DamagedError, FormatError)) as error:
        shardkit.open(path)
    assert error.value.where["path"] == path
    if ending in ("cut", "half"):
        assert "truncated, or was never closed" in error.value.what


def test_grain_reads_ours_at_random_in_several_epochs(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain", reason="needs grain")
    folder = write_photos(tmp_path / "x", "array_record")
    shards = sorted(str(path) for path in folder.glob("*.array_record"))
    assert len(shards) == 5
    assert module.ArrayRecordReader(shards[0]).writer_options_string().startswith("group_size:1,")
    source = grain.sources.ArrayRecordDataSource(shards)
    ours = shardkit.open(folder)
    assert len(source) == len(ours) == 37
    sampler = grain.samplers.IndexSampler(37, shuffle=True, seed=1, num_epochs=3)
    numbers = []
    for record in grain.DataLoader(data_source=source, sampler=sampler):
        spans = example.features(record)
        number = int(example.feature(record, spans["label"]).numbers()[0])
        assert example.feature(record, spans["image"]).one() == ours[number]["image"]
        numbers.append(number)
    epochs = [numbers[n : n + 37] for n in range(0, 111, 37)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_full_disk_is_an_error_of_ours(tmp_path: Path) -> None:
    """In a process of its own, whose files may have so many bytes."""

    def fill() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        writer = ARRAY_RECORD.create(tmp_path / "x", ShardSpec(Schema({"x": Bytes()})))
        try:
            for number in range(100):
                writer.write({"__key__": str(number), "x": bytes(10_000)})
            writer.close()
        except StorageError as error:
            return str(error)
        return "all were written"

    assert "File too large" in in_fork(fill)
    with pytest.raises(NotFoundError):
        ARRAY_RECORD.create(tmp_path / "no" / "x", ShardSpec(Schema({"x": Bytes()})))


def test_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    writer = ARRAY_RECORD.create(tmp_path / "x", ShardSpec(Schema({"x": Text()})))
    with pytest.raises(SampleError, match="stored") as error:
        writer.write({"__key__": "a", "x": "\ud800"})
    assert error.value.where == {"key": "a", "field": "x"}
    writer.close()


@pytest.mark.parametrize("options", ["uncompressed,group_size:1", "zstd,group_size:5"])
def test_a_damaged_record_is_named_and_others_are_read(tmp_path: Path, options: str) -> None:
    records = [foreign(number) for number in range(20)]
    path = by_library(tmp_path / "x.array_record", records, options)
    source = LocalFile(path)
    start, _ = Records(source).spans()[12].tolist()
    data = bytearray(path.read_bytes())
    data[start + 8] ^= 0xFF  # the size of the chunk
    path.write_bytes(data)
    reader = ARRAY_RECORD.open(path)
    with pytest.raises(SampleError) as error:
        reader[12]
    assert (error.value.where["position"], error.value.where["offset"]) == (12, start)
    assert reader[0]["label"] == 0
    assert reader[19]["label"] == 19
