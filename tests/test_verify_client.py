"""C6: with `verify --client` the library of each format reads what shardkit writes, beside it."""

import ast
import importlib.util
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.codecs.pixels import to_ppm
from shardkit.dataset.dataset import Dataset
from shardkit.errors import UsageError
from shardkit.sample import Sample
from shardkit.schema import Array, Bytes, Float, Images, Int, Json, Schema
from shardkit.testing import EVERYTHING, everything, make_image
from shardkit.verification import client
from shardkit.verification.client_reader import summary
from shardkit.verification.verify import VerifyReport, verify
from tests.conftest import few
from tests.test_cli import run
from tests.test_verify import accept_files, rewrite, shard_paths

SLOW = {"beton": "ffcv", "megatron": "megatron"}  # their libraries take long to import


def some(*default: str) -> pytest.MarkDecorator:
    """These formats, and in the large run all, as far as their libraries are there.

    TensorFlow lies apart: formats/test_tfrecord_tensorflow.py has the test of tfrecord.
    """
    formats = []
    for name in sorted({*client.CLIENTS} - {"tfrecord"}):
        module = SLOW.get(name, "shardkit")
        gone = importlib.util.find_spec(module) is None
        marks = [pytest.mark.skipif(gone, reason=f"{module} is not installed")]
        marks += [pytest.mark.xdist_group("ffcv")] if name in SLOW else []
        marks += [] if name in default else [pytest.mark.large]
        formats.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("format", formats)


TOKENS = Schema({"tokens": Array("<u2", (None,))})
# Beside those of EVERYTHING: numbers at their ends, arrays of other types and shapes.
MORE = Schema(
    {
        **EVERYTHING,
        "matrix": Array("<f8", (2, 3)),
        "flags": Array("|b1", (None,)),
        "half": Array("<f2", (None, 2)),
        "any": Array(),
        "maybe": Float(optional=True),
        "no": Json(optional=True),
    }
)


def sample(number: int, format: str) -> Sample:
    if format == "megatron":
        return {"__key__": f"{number}", "tokens": np.arange(number, dtype="<u2")}
    made = everything(number)
    made |= {
        "label": (-(2**63), 2**63 - 1, number)[number % 3],
        "score": (float("nan"), -0.0, float("inf"), number / 3)[number % 4],
        "about": (None, [], {"z": 1, "a": 1.0, "b": True}, "x" * 100, made["about"])[number % 5],
        "matrix": np.arange(6.0).reshape(2, 3) - number,
        "flags": np.arange(number) % 2 == 0,
        "half": np.full((number % 3, 2), np.nan, "<f2"),
        "any": np.array(["a", "bcd"]) if number % 2 else np.arange(number, dtype=">i4"),
    }
    if number % 2:
        made |= {"maybe": number / 7, "no": None}
    if format == "beton":  # raw images of any sizes, and PNGs, which become JPEGs
        pixels = np.random.default_rng(number).integers(0, 256, (8 + number, 20, 3), np.uint8)
        raw, png = to_ppm(pixels), make_image(number, "PNG")
        made["image"] = (raw, png, made["image"])[number % 3]
    return made


def make(tmp_path: Path, format: str, name: str = "out", count: int = 9) -> Path:
    schema = TOKENS if format == "megatron" else MORE
    with shardkit.create(tmp_path / name, format, schema, shard_samples=4) as writer:
        for number in range(count):
            writer.write(sample(number, format))
    return tmp_path / name


def checked(path: Path) -> VerifyReport:
    return verify(path, client=True)


@some("lmdb")
def test_the_library_reads_all_as_shardkit_does_but_a_sample_that_is_wrong(
    tmp_path, monkeypatch, format
):
    """As if our reader had got the sixth one wrong; the library reads what is there."""
    out = make(tmp_path, format)
    field, value = ("tokens", np.zeros(5, "<u2")) if format == "megatron" else ("label", 77)
    read = Dataset.__getitem__

    def wrong(self, index):
        return read(self, index) | ({field: value} if index == 5 else {})

    monkeypatch.setattr(Dataset, "__getitem__", wrong)
    report = checked(out)
    assert list(report.clients) == [library.name for library in client.CLIENTS[format]]
    assert json.loads(json.dumps(report.to_dict()))["clients"].keys() == report.clients.keys()
    samples = [sample(number, format) for number in range(9)]
    optional = [name for name, kind in MORE.items() if kind.optional]
    absent = {name: sum(one.get(name) is None for one in samples) for name in optional}
    for problem, (name, found) in zip(report.problems, report.clients.items(), strict=True):
        assert problem.what == f"{name} returns a different value"
        about = {"position": 1, "key": samples[5]["__key__"], "field": field}
        assert problem.where == {"path": problem.where["path"], **about}
        assert Path(problem.where["path"]) == shard_paths(out)[1]
        if format != "megatron":
            assert (problem.expected, problem.found) == ("77", str(samples[5]["label"]))
        assert (found.samples, found.problems) == (9, 1)
        assert all(found.versions.values())
        missing = {"keys": 9} if format in SLOW else {}
        if format == "beton":
            missing |= {f"absent values of {name!r}": n for name, n in absent.items() if n}
        assert found.to_dict()["not_compared"] == missing


@pytest.mark.large
def test_bytes_of_an_index_that_leads_elsewhere_are_found(tmp_path):
    """The index of a TAR is ours alone: webdataset goes by the headers of its members."""
    out = make(tmp_path, "wds")
    path = out / "__shardkit__/shard-000000.index.npy"
    index = np.load(path)
    index["image"][[1, 2]] = index["image"][[2, 1]]
    np.save(path, index)
    accept_files(out)
    assert shardkit.verify(out, decode=True).sound
    report = json.loads(run("verify", out, "--client", "--json", check=1).stdout)
    assert [problem["key"] for problem in report["problems"]] == ["folder/0001", "folder/0002"]
    assert {problem["field"] for problem in report["problems"]} == {"image"}
    found = report["clients"]["webdataset"]
    assert (found["samples"], found["problems"], list(found["versions"])) == (9, 2, ["webdataset"])


@pytest.mark.large  # webdataset imports torch
def test_nothing_is_unpickled(tmp_path):
    """Not even where a manifest says that a number is stored so; webdataset's decoder would."""
    place = tmp_path / "unpickled"
    code = pickle.dumps(_Touches(str(place)))
    with shardkit.create(tmp_path / "out", "wds", Schema({"x.pkl": Bytes()})) as writer:
        writer.write({"__key__": "a", "x.pkl": code})

    def change(data):
        data["layout"]["schema"]["x.pkl"] = {"type": "Text"}

    rewrite(tmp_path / "out", change)
    assert not checked(tmp_path / "out").sound
    assert not place.exists()


class _Touches:
    """What makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


@pytest.mark.parametrize("format", [pytest.param("hf", marks=pytest.mark.large), "lmdb"])
def test_splits_and_single_shards(tmp_path, format):
    (tmp_path / "out").mkdir()
    for split, count in (("train", 3), ("val", 2)):
        schema = {"pages": Images(optional=True)}
        with shardkit.create(tmp_path / "out" / split, format, schema, shard_samples=2) as writer:
            for number in range(count):
                pages = {} if number == 1 else {"pages": [make_image(n) for n in range(number)]}
                writer.write({"__key__": f"{number}", **pages})
    (shard, _) = shard_paths(tmp_path / "out/train")
    # Of a whole folder of "hf" the test above has the library read all.
    for path, count in {shard: 2, **({tmp_path / "out": 5} if format == "lmdb" else {})}.items():
        report = checked(path)
        assert report.problems == []
        assert {found.samples for found in report.clients.values()} == {count}
    if format == "lmdb":  # no samples are not all equal
        (shard,) = shard_paths(damaged := make(tmp_path, "lmdb", "damaged", count=4))
        shard.write_bytes(b"x" + shard.read_bytes()[1:])
        words = run("verify", damaged, "--client", check=1).stdout
        assert "0 samples, nothing compared; not compared: samples of damaged shards (4)" in words


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    (tmp_path / "shardkit_some_library").mkdir()  # a folder of its name is no library
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("shardkit_some_library") is not None
    assert not client._is_installed("shardkit_some_library")
    assert client._is_installed("lmdb")
    out, tars = make(tmp_path, "lmdb"), make(tmp_path, "wds", "tars")
    is_there = "shardkit.verification.client._is_installed"
    monkeypatch.setattr(is_there, lambda name: name == "lmdb")
    done = run("verify", out, "--client", check=2)
    assert "needs msgpack, which is not installed" in done.stderr
    assert 'fix: pip install "shardkit[lmdb]"' in done.stderr
    with pytest.raises(UsageError, match="webdataset") as error:
        checked(tars)
    assert error.value.fix == 'pip install "shardkit[webdataset]"'
    shutil.copy(tars / "shard-000000.tar", tmp_path / "other.tar")
    with pytest.raises(UsageError, match="only checks data that shardkit wrote"):
        checked(tmp_path / "other.tar")
    # A second library is not needed.
    monkeypatch.setattr(is_there, lambda name: name == "pyarrow")
    fake(monkeypatch, tmp_path, *given())
    assert list(checked(make(tmp_path, "arrow", "table", count=1)).clients) == ["pyarrow"]


def broken(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Packages of these names that are found first, here and in the client's process."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('no such symbol')")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)


def test_a_library_that_cannot_be_imported_is_a_note_where_another_one_works_and_else_an_error(
    tmp_path, monkeypatch
):
    out = make(tmp_path, "arrow")
    broken(monkeypatch, tmp_path / "path", "datasets")
    report = checked(out)
    assert report.sound
    assert [(name, found.samples) for name, found in report.clients.items()] == [("pyarrow", 9)]
    (note,) = report.notes
    assert "datasets is installed but cannot be imported" in note
    assert "no such symbol" in note
    broken(monkeypatch, tmp_path / "path", "pyarrow")
    monkeypatch.setattr("shardkit.verification.verify.check", None)  # the work is not begun
    with pytest.raises(UsageError, match="pyarrow is installed but cannot be") as error:
        checked(out)
    assert error.value.found == "ImportError: no such symbol"


def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *lines: str) -> None:
    """A script in the place of ours: what comes before the first line, which are the versions."""
    script = tmp_path / "fake.py"
    head = "import json, os, sys\njob = json.loads(sys.stdin.readline())\n"
    head += "def say(what):\n    print(json.dumps(what), flush=True)\n"
    script.write_text(head + "\n".join(lines))
    monkeypatch.setattr(client, "SCRIPT", script)


def given(*numbers: int, **other: int) -> list[str]:
    """Lines of a script that gives samples with these numbers as label."""
    lines = [f"say(['{n}', {{'label': '{other.get(f'_{n}', n)}'}}])" for n in numbers]
    return ["say({'x': '1'})", *lines, "say({'end': True})"]


@pytest.fixture
def labels(tmp_path):
    with shardkit.create(tmp_path / "out", "wds", Schema({"label": Int()})) as writer:
        for number in range(5):
            writer.write({"__key__": f"{number}", "label": number})
    return tmp_path / "out"


GIVES = "returns a sample that shardkit does not read"
LACKS = "does not return a sample that shardkit"


@pytest.mark.parametrize(
    ("lines", "words", "keys"),
    [
        (given(0, 1, 2, 3, 4), [], []),
        (given(0, 1, 3, 4), [LACKS], ["2"]),
        (given(4, 3, 2, 1, 0), [], []),
        (given(0, 1, 2, 3, 4, 4), [GIVES], ["4"]),
        (given(0, 1, 3, 4, 7, _4=5), [GIVES, LACKS, "a different value"], ["7", "2", "4"]),
    ],
)
def test_samples_that_one_side_lacks_are_named(labels, monkeypatch, lines, words, keys, tmp_path):
    fake(monkeypatch, tmp_path, *lines)
    report = checked(labels)
    assert [problem.where.get("key") for problem in report.problems] == keys
    for problem, expected in zip(report.problems, words, strict=True):
        assert expected in problem.what
    assert report.clients["webdataset"].problems == len(words)


READING = "webdataset ended while reading"
FAILING = {
    "aborts": ([*given(0, 1)[:-1], "os.abort()"], READING, "SIGABRT"),
    "exits": ([*given(0, 1)[:-1], "sys.exit('no more')"], READING, "no more"),
    "hangs": ([*given(0, 1)[:-1], "sys.stdin.read()"], READING, "not respond for"),
    "raises": ([*given(0, 1)[:-1], "say({'error': 'x'})"], "webdataset cannot read", "x"),
    "later": (["if 'format' in job:", "    1 / 0", *given(0)], READING, "ZeroDivisionError"),
    "import raises": (["1 / 0"], "cannot be imported", "ZeroDivisionError"),
    "import aborts": (["os.abort()"], "cannot be imported", "SIGABRT"),
}


@pytest.mark.parametrize("how", few(FAILING, "aborts", "later", "import raises"))
def test_a_library_that_fails_is_an_error(labels, monkeypatch, how, tmp_path):
    lines, what, found = FAILING[how]
    fake(monkeypatch, tmp_path, *lines)
    compare = client.compare_client

    def compare_impatiently(*arguments):  # once it has been imported
        monkeypatch.setattr(client, "_SILENT", 0.1)
        compare(*arguments)

    if how == "hangs":
        monkeypatch.setattr(client, "compare_client", compare_impatiently)
    if "import" in how:
        with pytest.raises(UsageError, match=what) as error:
            checked(labels)
        assert found in (error.value.found or "")
        return
    report = checked(labels)
    (problem,) = report.problems
    assert what in problem.what
    assert found in (problem.found or "")
    assert Path(problem.where["path"]).name == "shard-000000.tar"
    if how not in ("hangs", "later"):  # it may have been too slow to say anything
        assert report.clients["webdataset"].not_compared["samples"] == 3


def test_the_script_imports_nothing_of_shardkit():
    nodes = [*ast.walk(ast.parse(client.SCRIPT.read_text("utf-8")))]
    names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.startswith(("shardkit", "."))]


def test_summaries_are_the_same_for_equal_values_alone():
    for values in (
        [1, 1.0, True, "1", b"1", None, [1], {"1": 1}, np.array(1), np.array([1])],
        ["x" * 70, "x" * 71, "y" * 70, b"x" * 70, [b"x" * 70], [b"x" * 35, b"x" * 35], []],
        [np.zeros(3, "<f4"), np.zeros(3, "<f8"), np.zeros((1, 3), "<f4"), np.full(3, -0.0, "<f4")],
    ):
        assert len({summary(value) for value in values}) == len(values)
        assert [summary(value) for value in values] == [summary(value) for value in values]
        other = np.array([np.float32("nan"), -np.float32("nan")])
        assert summary(other) == summary(np.full(2, np.nan, "<f4"))
        assert summary({"b": 1, "a": 2}) == summary({"a": 2, "b": 1})
