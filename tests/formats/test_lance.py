"""Lance: the contract, pylance's own reading and writing, forks, and what is refused."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future

import numpy as np
import pyarrow as pa
import pytest

import shardkit
from shardkit.errors import DamagedError, FormatError, ShardkitError, UsageError
from shardkit.formats import get_format
from shardkit.formats.lance import process
from shardkit.formats.testing_samples import in_fork
from shardkit.schema import Array, Bytes, Float, Image, Int, Json, Schema, Text
from shardkit.testing import FormatContract, assert_same, make_image
from tests.conftest import files_of
from tests.conversion.test_kill import wait_for
from tests.formats.lance_client import lance
from tests.formats.loaders import PLAIN, plain, rich
from tests.formats.refusals import refused

LANCE = get_format("lance")


class TestLance(FormatContract):
    tested = LANCE
    suffix = ".lance"
    provides = frozenset({"plan"})

    def independent_keys(self, path):
        code = """
from lance.file import LanceFileReader
answer = LanceFileReader(path).read_all().to_table()["__key__"].to_pylist()
"""
        found = lance(code, path=str(path))
        return list(found)


SCHEMA, rich_sample = rich("more row fixed flags")


def sample(n):
    return {**rich_sample(n), "label": n % 7}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "set #1 ü%20.lance"
    with shardkit.create(path, "lance", SCHEMA, shard_size=50_000) as writer:
        for n in range(60):
            writer.write(sample(n))
    return path


def test_pylance_reads_the_whole_as_one_dataset(made):
    code = """
ds = lance.dataset(path)
ds.validate()
shown = lambda rows: [{n: plain(v) for n, v in row.items()} for row in rows]
answer = {
    "rows": shown(ds.to_table(columns=columns).to_pylist()),
    "taken": shown(ds.take([59, 0, 30, 30], columns=["__key__", "more"]).to_pylist()),
    "filtered": ds.count_rows(filter="label = 3"),
    "fragments": len(ds.get_fragments()),
    "batches": sum(batch.num_rows for batch in ds.to_batches(columns=["label"], batch_size=7)),
}
"""
    lists, values = ["row", "points", "fixed"], ["__key__", "image", "more", "label", "text"]
    code = "import numpy as np\n" + PLAIN + code
    found = lance(code, path=str(made), columns=[*lists, *values])
    samples = [sample(n) for n in range(60)]
    assert found["fragments"] == len(list((made / "data").iterdir())) > 1
    assert found["filtered"] == sum(n % 7 == 3 for n in range(60))
    assert found["batches"] == 60
    expected = []
    for own, wanted in zip(shardkit.open(made), samples, strict=True):
        assert_same(own, wanted)
        row = {name: wanted[name].tolist() for name in lists}
        expected.append(row | {name: plain(wanted.get(name)) for name in values})
    assert found["rows"] == expected
    taken = [{n: expected[k][n] for n in ("__key__", "more")} for k in (59, 0, 30, 30)]
    assert found["taken"] == taken


def test_many_texts_are_the_same_bytes_again(tmp_path):
    """Of so many, Lance itself would compress each file otherwise."""
    texts = [" ".join(str(number * factor) for factor in range(9)) for number in range(5000)]
    samples = [{"__key__": f"a long key {n}", "text": text} for n, text in enumerate(texts)]
    for name in ("one", "two"):
        shardkit.convert(samples, "lance", tmp_path / name, workers=0)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert [sample["text"] for sample in shardkit.open(tmp_path / "one")] == texts


def test_without_our_manifest_it_is_what_lance_says(made, tmp_path):
    """Rows that others delete and append count, and values come back in their types."""
    other = tmp_path / "other"
    shutil.copytree(made, other)
    shutil.rmtree(other / "__shardkit__")
    dataset = shardkit.open(other)
    assert_same(dataset[41], sample(41))
    assert (len(dataset), dict(dataset.schema)) == (60, dict(shardkit.open(made).schema))
    code = """
ds = lance.dataset(path)
ds.delete("label = 3")
lance.write_dataset(ds.take([0, 1]), path, mode="append")
"""
    lance(code, path=str(other))
    dataset = shardkit.open(other)
    left = [n for n in range(60) if n % 7 != 3]
    assert [s["__key__"] for s in dataset] == [sample(n)["__key__"] for n in (*left, 0, 1)]
    assert dataset.ignored == {"older version of the dataset": 2, "deleted row": 9}
    with pytest.raises(FormatError, match="a single data file of a Lance dataset"):
        shardkit.open(next((other / "data").iterdir()))
    (first,) = (other / "_versions").glob(f"{2**64 - 2}.manifest")
    assert len(shardkit.open(first)) == 60  # an older version, asked for by its manifest
    shardkit.convert(other, "wds", tmp_path / "wds", workers=0, on_error="skip")
    assert len(shardkit.open(tmp_path / "wds")) == len(left)  # as their keys were there before


FOREIGN = """
import os, shutil, datetime
shutil.rmtree(path, ignore_errors=True)
kind = pa.large_binary()
images = [bytes.fromhex(text) if text is not None else None for text in images]
blob = pa.field("image", kind, metadata={"lance-encoding:blob": "true"} if how == "blob" else None)
column = pa.array(images, kind)
if how == "blob v2":
    blob, column = lance.blob_field("image"), lance.blob_array(images)
rows = len(images)
vectors = pa.FixedSizeListArray.from_arrays(pa.array(range(rows * 8), pa.float32()), 8)
table = pa.table(
    [
        column,
        pa.array(range(rows), pa.int32()),
        vectors,
        pa.array([[n] * (n % 4) for n in range(rows)]),
        pa.array([{"a": n, "b": [str(n)]} for n in range(rows)]),
        pa.array([datetime.date(2020, 1, 1 + n % 28) for n in range(rows)]),
        pa.array([None if n % 2 else f"t{n}" for n in range(rows)]).dictionary_encode(),
        pa.array([1.0] * rows, pa.float64() if version == "legacy" else pa.float16()),
    ],
    schema=pa.schema([
        blob, ("id", pa.int32()), ("vector", vectors.type), ("list", pa.list_(pa.int64())),
        ("about", pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
        ("day", pa.date32()), ("word", pa.dictionary(pa.int32(), pa.string())),
        ("half", pa.float16() if version != "legacy" else pa.float64()),
    ]),
)
lance.write_dataset(table, path, data_storage_version=version, max_rows_per_file=17)
"""  # fmt: skip


def foreign(path, how, version):
    images = [None if n % 9 == 4 else make_image(n) for n in range(40)]
    texts = [None if image is None else image.hex() for image in images]
    lance(FOREIGN, path=str(path), how=how, version=version, images=texts)
    return images


@pytest.mark.parametrize(
    ("how", "version"),
    [
        *[("plain", "2.2"), ("blob v2", "2.2"), ("plain", "legacy"), ("blob", "2.0")],
        pytest.param("plain", "2.0", marks=pytest.mark.large),
        pytest.param("blob", "2.1", marks=pytest.mark.large),
    ],
)
def test_datasets_that_pylance_writes_are_read(tmp_path, how, version):
    path = tmp_path / "theirs.lance"
    images = foreign(path, how, version)
    dataset = shardkit.open(path)
    assert dict(dataset.schema) == {
        "image": Image(optional=True), "id": Int(), "vector": Array("<f4", (8,)),
        "list": Array("<i8", (None,)), "about": Json(), "day": Json(),
        "word": Text(optional=version != "legacy"), "half": Float(),
    }  # fmt: skip
    for n in (39, 4, 0, 17, 16, 23):
        found = {name: value for name, value in dataset[n].items() if name != "__key__"}
        assert (found.pop("image", None), found.pop("half")) == (images[n], 1.0)
        word = found.pop("word", None)
        assert version == "legacy" or word == (None if n % 2 else f"t{n}")  # which loses nulls
        assert found.pop("vector").tolist() == [8 * n + k for k in range(8)]
        assert found.pop("list").tolist() == [n] * (n % 4)
        day = f"2020-01-{1 + n % 28:02}"
        assert found == {"id": n, "about": {"a": n, "b": [str(n)]}, "day": day}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_data_files_that_are_replaced_are_not_mixed_with_old_ones(made, tmp_path, own, in_place):
    """Not even by pylance, which opens them again, and in new processes."""
    path = tmp_path / "x"
    shutil.copytree(made, path)
    if not own:
        shutil.rmtree(path / "__shardkit__")
    dataset = shardkit.open(path)
    assert_same(dataset[0], sample(0))
    for file in (path / "data").iterdir():
        data = file.read_bytes()
        if not in_place:
            file.unlink()
        file.write_bytes(data)
        os.utime(file, (1e9, 1e9))
    process._process.kill()
    process._process = None  # so that the next one opens the files again
    for again in (dataset, pickle.loads(pickle.dumps(dataset))):
        with pytest.raises(DamagedError, match="was changed while it was open") as error:
            again[1]
        assert str(path / "data") in str(error.value)


def test_forked_processes_and_loaders_read_on(made, large):
    """Readers that the parent has opened, and others."""
    dataset = shardkit.open(made)
    assert_same(dataset[3], sample(3))

    def read_again():
        again = shardkit.open(made)
        for n in (3, 4, 59):
            assert_same(dataset[n], sample(n))
            assert_same(again[n], sample(n))

    for _ in range(2):
        in_fork(read_again)
    assert_same(dataset[58], sample(58))
    if large:
        from torch.utils.data import DataLoader

        for method in ("fork", "spawn"):
            options = {"batch_size": None, "num_workers": 1, "multiprocessing_context": method}
            assert sum(1 for _ in DataLoader(dataset, **options)) == 60


def test_large_values_are_read_without_pylance(tmp_path, monkeypatch):
    """Also the first ones of a column that are null, and values of all sizes."""
    schema = {"image": Image(), "blob": Bytes(optional=True), "row": Array("<f4", (100,))}
    samples = [
        {"__key__": f"{n}", "image": make_image(n), "row": np.full(100, n, "<f4")}
        | ({"blob": bytes([n]) * (n % 3) * 9000} if n > 2 else {})
        for n in range(40)
    ]
    path = tmp_path / "x.lance"
    with shardkit.create(path, "lance", schema) as writer:
        for each in samples:
            writer.write(each)
    dataset = shardkit.open(path)
    assert dataset[0]["__key__"] == "0"
    monkeypatch.setattr("shardkit.formats.lance.reader.ask", None)
    for n in (39, 0, 3, 4, 20):
        found = dataset.read(n, ["image", "blob", "row"])
        assert (found["image"], found.get("blob")) == (make_image(n), samples[n].get("blob"))
        np.testing.assert_array_equal(found["row"], samples[n]["row"])


def test_when_its_process_dies_the_next_call_starts_another(made):
    shard = next((made / "data").iterdir())
    reader = LANCE.open(shard, LANCE.layout(SCHEMA))
    process._process._process.kill()
    with pytest.raises(MemoryError, match="it was killed, as operating systems do when"):
        process.ask(shard, "about", (str(shard), 1))
    assert reader[0]["__key__"] == LANCE.open(shard, reader.layout)[0]["__key__"]


def test_what_made_its_process_exit_is_not_asked_again(tmp_path, monkeypatch):
    """Each sample of the shard would take as long as the process takes to start, or to give up."""
    asked = []

    class Dies:
        def __init__(self, *args, **options):
            pass

        def call(self, method, which, *rows):
            asked.append(rows)
            (answer := Future()).set_exception(process._EndedError(-6))
            return answer

        def kill(self):
            return ""

    monkeypatch.setattr(process, "PickledProcess", Dies)
    monkeypatch.setattr(process, "_process", None)
    (path := tmp_path / "a.lance").touch()

    def ask(method, which, *rows):
        with pytest.raises(DamagedError, match="made the process of pylance exit"):
            process.ask(path, method, which, *rows)
        return len(asked)

    # Each is asked twice: the second time alone, as another call may have ended the process.
    assert [ask("about", "one"), ask("about", "one"), ask("rows", "one", ["a"], 0, 1)] == [2, 2, 2]
    assert [ask("rows", "two", ["a"], n, 9) for n in range(3)] == [4, 4, 4]


def test_calls_that_run_when_another_one_ends_its_process_are_asked_again(made):
    shard = max((made / "data").iterdir(), key=os.path.getsize)
    reader = LANCE.open(shard, LANCE.layout(SCHEMA))
    assert len(reader) >= 4
    calls = [(reader._which, ["__key__"], n, n + 1) for n in range(4)]
    os.kill(process._process._process.pid, signal.SIGSTOP)  # so that all of them are running
    answers = [process.call(shard, "rows", *call) for call in calls]
    os.kill(process._process._process.pid, signal.SIGABRT)
    os.kill(process._process._process.pid, signal.SIGCONT)
    assert [len(answer()) for answer in answers] == [1] * 4
    assert reader._which not in process._deaths


# In the process of pylance: folders are removed only once there is no `gate`.
HELD = """
import os, sys, time
def hear(event, args):
    while event == "shutil.rmtree" and os.path.exists({gate!r}):
        time.sleep(0.001)
sys.addaudithook(hear)
"""


def test_its_temporary_folder_is_removed_although_the_caller_is_dead(tmp_path, monkeypatch):
    (there := tmp_path / "tmp").mkdir()
    (gate := tmp_path / "gate").touch()
    (tmp_path / "sitecustomize.py").write_text(HELD.format(gate=str(gate)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    server = process.PickledProcess("shardkit.formats.lance.server", None, RuntimeError)
    schema = pa.schema([pa.field("n", pa.int64())], {b"shardkit": b""})
    server.call("commit", str(there), schema, [])
    wait_for(lambda: any(there.iterdir()))
    server._process.stdin.close()  # as if this process had been killed
    gate.unlink()
    server._process.wait()
    assert list(there.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="sets Linux's RLIMIT_AS")
def test_where_memory_does_not_suffice_for_its_process_nothing_is_damaged(tmp_path, large):
    import resource

    # A value that only pylance reads, for which it needs some hundred MB.
    letters = np.random.default_rng(0).integers(33, 120, 10_000_000, np.uint8)
    sample = {"text": letters.tobytes().decode()}
    shardkit.convert([sample], "lance", tmp_path / "out", workers=0)
    for limit in (450, 900, 1500, 2100, 6000) if large else (900, 6000):
        bytes = limit * 1_000_000
        done = subprocess.run(
            [sys.executable, "-m", "shardkit", "verify", tmp_path / "out"],
            capture_output=True, text=True, timeout=120, check=False,
            preexec_fn=lambda bytes=bytes: resource.setrlimit(resource.RLIMIT_AS, (bytes, bytes)),
        )  # fmt: skip
        said = f"{limit} MB: {done.stdout} {done.stderr}"
        assert done.returncode == 0 or (done.returncode == 1 and "memory ran out" in said), said
        assert not any(word in said for word in ("damage", "Traceback")), said
        assert limit > 500 or "in the process of pylance" in said
    assert done.returncode == 0, said


def test_what_damage_makes_it_ask_for_is_no_want_of_memory():
    said = "memory allocation of {} bytes failed\nstack backtrace:"
    assert process._want_of_memory(said.format(97820378), 2 << 30)
    assert process._want_of_memory("RuntimeError: can't start new thread", 2 << 30)
    assert process._want_of_memory(said.format(1 << 30), 2 << 30) is None
    assert process._want_of_memory(said.format(1 << 30), 8 << 30)
    assert process._want_of_memory(said.format(1 << 56), 8 << 30) is None
    assert process._want_of_memory("thread panicked: index out of bounds", 8 << 30) is None


def test_what_is_refused(made, tmp_path):
    with pytest.raises(FormatError, match="cannot be empty or contain dots"):
        LANCE.layout(Schema({"a.b": Int()}))
    with pytest.raises(UsageError, match="the suffix of the output is that of"):
        shardkit.convert(made, "lance", tmp_path / "out.tar")
    for name in ("one", "other"):
        shutil.copytree(made, tmp_path / f"a/{name}.lance")
    other = f"{tmp_path}/a/other.lance"
    with refused(FormatError, "holds datasets in several folders", says=other):
        shardkit.open(tmp_path / "a")
    code = """
uri = "file:///etc/hostname"
field = lance.blob_field("image")
table = pa.table([lance.blob_array([lance.Blob.from_uri(uri)])], schema=pa.schema([field]))
options = {"data_storage_version": "2.2", "allow_external_blob_outside_bases": True}
lance.write_dataset(table, path, **options)
"""
    lance(code, path=str(tmp_path / "outside"))
    with pytest.raises(ShardkitError, match="URI of data outside of the dataset"):
        shardkit.open(tmp_path / "outside")


def test_without_pylance_an_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("shardkit.formats.lance")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lance", None)
    with refused(UsageError, "needs pylance", says='pip install "shardkit[lance]"'):
        get_format("lance")
