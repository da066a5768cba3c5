"""ArrayRecord: the contract, the library and Grain both ways, what is refused or damaged."""

import itertools
import os
import pickle
import random
import resource

import numpy as np
import pytest

import shardkit
from shardkit.codecs.protobuf import dump_field
from shardkit.errors import DamagedError, FormatError, NotFoundError, SampleError, StorageError
from shardkit.formats import get_format
from shardkit.formats.array_record.records import Records
from shardkit.formats.base import ShardSpec
from shardkit.formats.testing_samples import in_fork
from shardkit.formats.tfrecord import example
from shardkit.schema import Array, Bytes, Image, Int, Schema, Text
from shardkit.storage.byte_source import LocalFile
from shardkit.testing import FormatContract, make_image
from tests.conftest import few
from tests.formats.refusals import refused
from tests.stream.data import write_photos

module = pytest.importorskip("array_record.python.array_record_module", reason="needs array_record")
ARRAY_RECORD = get_format("array_record")
OPTIONS = [
    "group_size:1", "uncompressed,group_size:7", "uncompressed,group_size:1", "group_size:3",
    "brotli:5,group_size:1", "snappy,group_size:1", "snappy,group_size:100",
    "group_size:2,pad_to_block_boundary:true",
]  # fmt: skip


def by_library(path, records, options="group_size:1"):
    writer = module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def read_by_library(path):
    reader = module.ArrayRecordReader(str(path))
    assert reader.ok()
    return reader.read_all()


def foreign(number):
    """An Example as TFDS writes them: without a key, labels as numbers, boxes as floats."""
    boxes = np.arange(4 * (number % 3), dtype="<f4").tobytes()
    parts = {
        "image": (example.BYTES, make_image(number)),
        "label": (example.INTS, example.packed(np.array([number]))),
        "name": (example.BYTES, f"n{number}".encode()),
        "boxes": (example.FLOATS, boxes),
    }
    features = (
        example.entry(name, example.Feature(kind, [data])) for name, (kind, data) in parts.items()
    )
    return dump_field(1, b"".join(itertools.chain(*features)))


class TestArrayRecord(FormatContract):
    tested = ARRAY_RECORD
    provides = frozenset({"plan", "spans"})
    least_bytes = 1 << 17

    def independent_keys(self, path):
        keys = [(record, example.features(record)["__key__"]) for record in read_by_library(path)]
        return [example.feature(record, span).one().decode() for record, span in keys]


@pytest.mark.parametrize("options", few(OPTIONS, *OPTIONS[:2]))
def test_what_the_library_writes_is_read(tmp_path, options):
    rng = random.Random(1)
    sizes = [rng.choice([0, 5, 100, 1000, 70_000, 200_000]) for _ in range(60)]
    many, long = [b"%d" % number for number in range(3000)], [rng.randbytes(n) for n in sizes]
    for records in ([], [b""], [b"", b"a", b""], long, many):
        path = by_library(tmp_path / "x.array_record", records, options)
        source = LocalFile(path)
        found = Records(source)
        assert [found.read(source, number) for number in range(len(found))] == records
        spans = found.spans()
        assert spans.shape == (len(records), 2)
        assert (spans[:, 0] < spans[:, 1]).all()


def test_examples_of_others_are_samples(tmp_path):
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


def test_records_that_are_no_examples_are_bytes_and_transposed_ones_refused(tmp_path):
    records = [pickle.dumps({"n": n}) for n in range(5)]
    dataset = shardkit.open(by_library(tmp_path / "x.arrayrecord", records))
    assert dict(dataset.schema) == {"record": Bytes()}
    assert [sample["record"] for sample in dataset] == records
    assert dataset[3]["__key__"] == "x/000000003"
    path = by_library(tmp_path / "x.array_record", [foreign(1)] * 9, "transpose:true,group_size:4")
    with refused(FormatError, "transposed", fix="without transpose:true"):
        shardkit.open(path)


@pytest.mark.parametrize("ending", ["open", "cut", "half", "empty"])
def test_an_unclosed_or_cut_file_is_refused_where_the_library_has_no_records(tmp_path, ending):
    path = tmp_path / "x.array_record"
    writer = module.ArrayRecordWriter(str(path), "uncompressed,group_size:1")
    for number in range(3000):
        writer.write(bytes(99) + b"%d" % number)
    if ending != "open":
        writer.close()
        os.truncate(path, {"cut": path.stat().st_size - 1, "half": 1 << 16, "empty": 0}[ending])
    library = module.ArrayRecordReader(str(path))
    assert (library.ok(), library.num_records()) == (False, 0)
    with refused((DamagedError, FormatError), path=path) as error:
        shardkit.open(path)
    if ending in ("cut", "half"):
        assert "truncated, or was never closed" in error.value.what


def test_grain_reads_ours_at_random_in_several_epochs(tmp_path):
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


def test_what_cannot_be_written_is_an_error_of_ours(tmp_path):
    """A full disk: in a process of its own, whose files may have so many bytes."""

    def fill():
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
    writer = ARRAY_RECORD.create(tmp_path / "y", ShardSpec(Schema({"x": Text()})))
    with refused(SampleError, "stored", where={"key": "a", "field": "x"}):
        writer.write({"__key__": "a", "x": "\ud800"})
    writer.close()


@pytest.mark.parametrize("options", ["uncompressed,group_size:1", "zstd,group_size:5"])
def test_a_damaged_record_is_named_and_others_are_read(tmp_path, options):
    path = by_library(tmp_path / "x.array_record", [foreign(n) for n in range(20)], options)
    start = int(Records(LocalFile(path)).spans()[12][0])
    data = bytearray(path.read_bytes())
    data[start + 8] ^= 0xFF  # the size of the chunk
    path.write_bytes(data)
    reader = ARRAY_RECORD.open(path)
    with refused(SampleError, position=12, offset=start):
        reader[12]
    assert (reader[0]["label"], reader[19]["label"]) == (0, 19)
