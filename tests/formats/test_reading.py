"""How much of a shard is read, rows of many samples, and shards that change while they are open.

What holds for all formats alike is in `shardkit.testing.FormatContract`.
"""

import contextlib
import copy
import io
import os
import pickle
import shutil
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import DamagedError, SampleError
from shardkit.formats import FORMATS, file_name, get_format
from shardkit.formats.base import ShardReader
from shardkit.formats.columns import samples_of
from shardkit.formats.testing_samples import compare_at_once, read_at_once
from shardkit.schema import Array, Bytes, Int, Json, Schema, Text
from shardkit.storage import byte_source
from shardkit.storage.byte_source import LocalFile
from shardkit.stream.reading import Samples
from shardkit.testing import assert_reads, assert_same, open_files, write_shard
from tests.conftest import few
from tests.formats.refusals import refused

IN_FILES = ["arrow", "beton", "hf", "megatron", "wds"]  # formats whose arrays are read directly


@pytest.fixture(params=["extension", "python"])
def _way(request, monkeypatch):
    """With the extension that reads, and without."""
    if request.param == "python":
        monkeypatch.setattr(byte_source, "reads", None)


@pytest.fixture
def tmp_path(disk):
    """Memory is no disk: systems read, and drop, its files in other ways."""
    return Path(tempfile.mkdtemp(dir=disk))


def shard(folder, name, kinds, samples):
    """A reader of a new shard."""
    path = folder / file_name("shard-000000", name)
    return write_shard(get_format(name), path, Schema(kinds), samples)


def same_at_once(reader, samples, positions):
    found = read_at_once(reader, positions, list(reader.schema))
    for sample, position in zip(found, positions, strict=True):
        assert_same(sample, samples[position])


def blobs(count, size):
    random = np.random.default_rng(1)
    return [{"__key__": f"{n:05d}", "blob": random.bytes(size)} for n in range(count)]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ["arrow", "beton", "hf", "lmdb", "wds"])
def test_to_read_a_sample_takes_little_more_than_its_bytes(tmp_path, name, monkeypatch):
    samples = blobs(300, 20_000)
    reader = shard(tmp_path, name, {"blob": Bytes()}, samples)
    taken, plain = [], LocalFile.read

    def counted(self, offset, length):
        taken.append(length)
        return plain(self, offset, length)

    monkeypatch.setattr(LocalFile, "read", counted)
    for number in (150, 151, 3):
        assert_same(reader[number], samples[number])
    assert 3 * 20_000 <= sum(taken) < 3 * 20_000 + 32_768
    taken.clear()
    assert reader.sample(153, ()) == {"__key__": "00153"}
    assert name == "lmdb" or sum(taken) < 4096  # there key and fields are one value


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_arrays_of_several_lengths_are_read_at_once(tmp_path, name):
    lengths = [600 if n % 3 else 10 + n for n in range(60)]
    values = [np.arange(length, dtype="<i4") - n for n, length in enumerate(lengths)]
    samples = [{"__key__": f"{n}", "x": value} for n, value in enumerate(values)]
    reader = shard(tmp_path, name, {"x": Array("<i4", (None,))}, samples)
    for positions in ([4, 1, 58], [1, 3, 2]):
        same_at_once(reader, samples, positions)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", IN_FILES)
def test_rows_of_a_file_that_is_cut_are_left_to_be_read_one_by_one(tmp_path, name, monkeypatch):
    monkeypatch.setattr(byte_source, "_AGE", float("inf"))  # how old the last look at it may be
    samples = [{"__key__": f"{n}", "x": np.full(500, n, "<u2")} for n in range(40)]
    reader = shard(tmp_path, name, {"x": Array("<u2", (500,))}, samples)
    same_at_once(reader, samples, [0, 39])
    os.truncate(reader.path, reader.path.stat().st_size // 2)
    with pytest.raises(DamagedError, match="truncated while it was open"):
        read_at_once(reader, [0, 39], ["x"])
    with refused(DamagedError, "truncated while it was open", position=39):
        reader[39]


@pytest.mark.parametrize("size", [100, 80_000])  # of small ones, MDS and LitData read all values
def test_samples_of_several_formats_are_read_at_once(tmp_path, size):
    kinds, samples, datasets = (
        {"blob": Bytes(), "label": Int(), "text": Text(optional=True), "about": Json()},
        [],
        [],
    )
    for number, name in enumerate(["mds", "wds", "lmdb", "litdata", "tfrecord", "mds"]):
        with shardkit.create(tmp_path / f"{number}", to=name, schema=kinds, shard_samples=4) as out:
            for n in range(10):
                text = {"text": f"{n}"} if n % 3 else {}
                blob = bytes([number, n]) * (size // 2 + n)
                text["about"] = [n] * (n % 3)
                samples.append({"__key__": f"{number}-{n}", "blob": blob, "label": n, **text})
                out.write(samples[-1])
        datasets.append(shardkit.open(tmp_path / f"{number}"))
    for fields in (["label"], ["text", "label"], ["label", "blob"], [*kinds]):
        read = Samples(datasets, fields)
        for numbers in ([0], [59, 0, 0, 33, 12, 58, 24, 46], [*range(60)]):
            columns = read.read_many(np.array(numbers))
            assert columns is not None
            found = samples_of(columns, read.schema)
            for number, sample in zip(numbers, found, strict=True):
                own = {n: v for n, v in samples[number].items() if n in {"__key__", *fields}}
                assert_same({n: sample[n] for n in own}, own)
                assert sample.keys() == own.keys()


@pytest.mark.parametrize("name", ["litdata", "lmdb", "mds", "tfrecord"])
def test_any_changed_byte_gives_at_once_what_it_gives_alone(tmp_path, name):
    kinds = {"a": Bytes(), "b": Int(), "c": Text(optional=True)}
    samples = [{"__key__": "k", "a": b"ab", "b": 300, "c": "x"}, {"__key__": "l", "a": b"", "b": 0}]
    whole = shard(tmp_path, name, kinds, samples)
    start, stop, data = whole.spans().min(), whole.spans().max(), whole.path.read_bytes()
    for at in range(start, stop):
        for value in (1, 255):
            changed = bytearray(data)
            changed[at] = (changed[at] + value) % 256
            whole.path.write_bytes(changed)
            with contextlib.suppress(DamagedError):  # it cannot be opened
                compare_at_once(get_format(name).open(whole.path, whole.layout))


@pytest.mark.parametrize("name", ["arrow", "parquet"])
def test_a_batch_that_is_first_looked_at_when_it_is_gone_is_named(tmp_path, name, monkeypatch):
    monkeypatch.setattr(byte_source, "_AGE", float("inf"))
    samples = blobs(250, 2000)
    reader = shard(tmp_path, name, {"blob": Bytes()}, samples)
    assert_same(reader[0], samples[0])
    os.truncate(reader.path, reader.path.stat().st_size // 2)
    assert_same(reader[90], samples[90])
    with refused(DamagedError, path=reader.path, position=249) as error:
        reader[249]
    assert error.value.where["offset"] > 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_keys_that_are_longer_than_values_read_the_same(tmp_path, name):
    keys = [f"{n:04d}/" + "ключ" * 30 for n in range(90)]
    samples = [{"__key__": key, "x": np.array([n, 1], "<u2")} for n, key in enumerate(keys)]
    reader = shard(tmp_path, name, {"x": Array("<u2", (2,))}, samples)
    assert_reads(reader, samples)
    same_at_once(reader, samples, [89, 5])
    assert read_at_once(reader, [89, 5], []) == [{"__key__": keys[89]}, {"__key__": keys[5]}]


@pytest.mark.parametrize("memory", [0, 100, 1 << 20])
@pytest.mark.parametrize("name", ["beton", "litdata", "mds", "megatron", "tfrecord", "wds"])
def test_long_tables_stay_in_their_files(tmp_path, monkeypatch, name, memory):
    monkeypatch.setattr(byte_source, "IN_MEMORY", memory)
    keys = [f"k{n}" * (n % 5 + 1) for n in range(200)]
    if name == "megatron":
        kinds = {"m": Array("<u2", (None,))}
        samples = [{"__key__": k, "m": np.arange(n % 9, dtype="<u2")} for n, k in enumerate(keys)]
    else:
        kinds = {"blob": Bytes(), "text": Text(optional=True)}
        kinds["m"] = Array("<i4", (2,), optional=True)
        samples = [{"__key__": key, "blob": bytes(n)} for n, key in enumerate(keys)]
        for number, sample in enumerate(samples[::3]):
            sample["text"], sample["m"] = f"{number}", np.array([1, number], "<i4")
    reader = shard(tmp_path, name, kinds, samples)
    assert_reads(reader, samples)
    assert reader.keys() == keys
    assert (reader.in_memory > 0) == (memory == 1 << 20)
    for field in kinds if reader.sizes("m") is not None else ():
        assert len(reader.sizes(field)) == sum(field in sample for sample in samples)
    for positions in ([21, 30], [21, 31]):
        same_at_once(reader, samples, positions)


def many_shards(folder, name, count):
    schema = {"x": Array("<u2", (4,))}
    with shardkit.create(folder, to=name, schema=schema, shard_samples=1) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number}", "x": np.full(4, number, "<u2")})
    return shardkit.open(folder)


@pytest.mark.parametrize("name", few(["arrow", "wds"], "wds"))
def test_a_dataset_has_a_bounded_number_of_files_open(tmp_path, name, monkeypatch):
    monkeypatch.setattr("shardkit.dataset.readers._MAX_OPEN", 128)
    dataset = many_shards(tmp_path / "x", name, 130)
    for _ in range(2):
        assert [int(sample["x"][0]) for sample in dataset] == list(range(130))
    assert open_files(tmp_path) == 128
    dataset.close()
    assert open_files(tmp_path) == 0


def test_a_copy_of_a_dataset_shares_nothing_that_is_open(tmp_path):
    dataset = many_shards(tmp_path / "x", "arrow", 3)
    assert dataset[0]["__key__"] == "0"
    for other in (copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert [s["__key__"] for s in other] == ["0", "1", "2"]
        assert other.reader(0) is not dataset.reader(0)
    dataset.close()
    assert other[2]["__key__"] == "2"


def _tar(path, letter, year):
    """A third-party TAR of 20 samples of 3,000 bytes, changed on the first day of a year."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(20):
            member = tarfile.TarInfo(f"{number:02d}.bin")
            member.size = 3000
            tar.addfile(member, io.BytesIO(letter * 3000))
    os.utime(path, ((year - 1970) * 31_557_600,) * 2)
    return path


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("reopened", [False, True, "in a copy"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_foreign_shard_is_never_read_in_two_versions(tmp_path, reopened, in_place, monkeypatch):
    path = _tar(tmp_path / "x.tar", b"a", 2001)
    dataset = shardkit.open(path)
    assert dataset[0]["bin"] == b"a" * 3000
    monkeypatch.setattr(byte_source, "_AGE", 0)
    dataset.close()
    assert dataset[1]["bin"] == b"a" * 3000
    other = _tar(tmp_path / "other", b"b", 2002)
    if in_place:
        path.write_bytes(other.read_bytes())
        os.utime(path, (978_307_200 + 86_400,) * 2)
    else:
        other.rename(path)
    if reopened == "in a copy":
        dataset = pickle.loads(pickle.dumps(dataset))
    elif reopened:
        dataset.close()
    if not in_place and not reopened:  # the old file has no name any more
        assert dataset[2]["bin"] == b"a" * 3000
        return
    for _ in range(2):
        with pytest.raises(DamagedError, match="was changed while it was open") as error:
            dataset[2]
    assert str(path) in str(error.value)
    assert shardkit.open(path)[2]["bin"] == b"b" * 3000


@pytest.mark.parametrize("again", [False, True])
def test_shards_that_are_replaced_before_their_manifest_are_not_mixed(tmp_path, again):
    """As by a program that copies a new version over the old one, whose shards are as long."""
    dataset = many_shards(tmp_path / "x", "wds", 3)
    assert dataset[0]["__key__"] == "0"
    path = tmp_path / "x/shard-000000.tar"
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").rename(path)
    os.utime(path, (1e9, 1e9))
    if again:
        dataset.close()
    else:  # the file that was open has no name any more
        assert dataset[0]["__key__"] == "0"
    with pytest.raises(DamagedError, match="was changed while it was open") as error:
        dataset[0 if again else 1]
    assert str(path) in str(error.value)


@pytest.mark.parametrize("own", [False, True])
def test_a_shard_that_is_replaced_while_it_is_being_opened_is_refused(tmp_path, own, monkeypatch):
    dataset = many_shards(tmp_path / "x", "wds", 3)
    if not own:
        shutil.rmtree(tmp_path / "x/__shardkit__")
        dataset = shardkit.open(tmp_path / "x")
        dataset.close()
    wds = type(get_format("wds"))
    opens = wds.open

    def replaced(self, path, layout=None):
        path.with_name("new").write_bytes(path.read_bytes())
        os.utime(path.with_name("new"), (1e9, 1e9))
        path.with_name("new").rename(path)
        return opens(self, path, layout)

    monkeypatch.setattr(wds, "open", replaced)
    with pytest.raises(DamagedError, match="was changed while it was open") as error:
        dataset[1]
    assert "shard-000001.tar" in str(error.value)


def test_shards_of_a_dataset_that_was_made_anew_are_not_mixed_with_old_ones(tmp_path):
    dataset = many_shards(tmp_path / "x", "wds", 3)
    assert dataset[0]["__key__"] == "0"
    manifest = tmp_path / "x/__shardkit__/manifest.json"
    os.utime(manifest, (1e9, 1e9))  # as another conversion has another time
    with pytest.raises(DamagedError, match="was changed while it was open") as error:
        dataset[1]
    assert str(manifest) in str(error.value)


def test_a_damaged_key_has_advice_that_works(tmp_path):
    class Damaged(ShardReader):
        def __len__(self):
            return 1

        def read(self, position, fields=None, json_text=False):
            raise ValueError("no key")

    with pytest.raises(SampleError) as raised:
        Damaged(tmp_path, {"schema": {}})[0]
    assert raised.value.where["field"] == "__key__"
    assert raised.value.fix == "drop such samples with --on-error skip"
