"""The source of docs/adding-a-source.md, added by a package."""

import copy
import json
from types import SimpleNamespace

import pytest

import shardkit
from shardkit.sources import candidate
from shardkit.sources.api import Document, Int, Schema, Source, Stream, Text
from shardkit.testing import make_audio
from tests.formats.test_adding import COMMANDS, run
from tests.test_docs import BLOCK, MODULE, ROOT


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The files of the page."""
    folder = tmp_path_factory.mktemp("package")
    page = (ROOT / "docs" / "adding-a-source.md").read_text("utf-8")
    for match in BLOCK.finditer(page):
        (folder / MODULE.fullmatch(match["before"])[1]).write_text(match["code"], "utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(package, tmp_path_factory):
    """Where the package of the page is installed, as pip does it."""
    target = tmp_path_factory.mktemp("installed")
    code = (package / "kaldi_data.py").read_text("utf-8").splitlines()
    assert len([line for line in code if line.strip()]) < 60
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run("-m", "pip", "install", *offline, "--target", str(target), str(package), path=target)
    return target


@pytest.fixture
def kaldi(tmp_path):
    """A data folder of Kaldi with five utterances."""
    for name in ("data", "audio"):
        (tmp_path / name).mkdir()
    for number in range(5):
        (tmp_path / f"audio/{number}.wav").write_bytes(make_audio(number))
    lines = [f"utt{number} ../audio/{number}.wav\n" for number in range(5)]
    (tmp_path / "data/wav.scp").write_text("".join(lines))
    (tmp_path / "data/text").write_text("utt1 hello world\nutt4 bye\n")
    return tmp_path / "data"


def test_a_package_adds_a_source(installed, kaldi, images, tmp_path):
    out = f"{tmp_path}/out"
    commands = [
        ["convert", f"{kaldi}", "--to", "wds", "-o", out, "--workers", "2", "--shard-samples", "2"],
        ["verify", out, "--against", f"{kaldi}"],
        ["convert", f"{kaldi}", "--to", "mds", "-o", f"{out}2", "--fields", "text", "--limit", "2"],
        ["convert", f"{images}", "--to", "wds", "-o", f"{out}3"],
    ]
    run("-c", COMMANDS, json.dumps(commands), path=installed)
    with shardkit.open(out) as found:
        texts = [sample.get("text") for sample in found]
        assert texts == [None, "hello world", None, None, "bye"]
        assert [sample["__key__"] for sample in found] == [f"utt{n}" for n in range(5)]
        assert found[3]["audio"] == make_audio(3)
    with shardkit.open(f"{out}2") as found:
        assert [*found] == [{"__key__": "utt0"}, {"__key__": "utt1", "text": "hello world"}]
    with pytest.raises(shardkit.ShardkitError):
        shardkit.convert(kaldi, "wds", tmp_path / "none")  # without the package


@pytest.mark.docs
def test_the_test_of_the_page_passes(package, installed):
    options = ["-q", "-p", "no:cacheprovider", str(package / "test_fasta.py")]
    assert "2 passed" in run("-m", "pytest", *options, path=installed)


# Prints what a conversion of a folder says that no built-in source reads.
BROKEN = """
import sys, warnings
import shardkit
warnings.simplefilter("always")
sys.stderr = sys.stdout
try:
    shardkit.convert(sys.argv[1], "wds", sys.argv[2], workers=0)
except shardkit.ShardkitError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("def recognise(candidate): return 3", "found: TypeError"),
        ("def recognise(candidate): return {}", "it returned {}"),
        ("def recognise(candidate): 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_package_that_fails_is_named(installed, kaldi, tmp_path, module, found):
    (tmp_path / "kaldi_data.py").write_text(module + "\n")
    said = run("-c", BROKEN, str(kaldi), str(tmp_path / "out"), path=f"{tmp_path}:{installed}")
    for part in ("the source 'kaldi' of the package shardkit-kaldi failed", found):
        assert part in said
    assert r"\n" not in said


class _Numbers:
    def __init__(self):
        super().__init__()
        self.schema = Schema({"n": Int(), "text": Text(optional=True)})
        self.numbers = range(3)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"__key__": f"{self.numbers[index]}", "n": self.numbers[index]}

    def sizes(self):
        return [8] * len(self)

    def select(self, indices):
        part = copy.copy(self)
        part.numbers = [self.numbers[index] for index in indices]
        return part

    def fingerprint(self):
        return {"mine": "abc"}

    def name(self, index):
        return f"number {index}"


class Numbers(_Numbers, Source):
    """Three samples."""


class Streamed(_Numbers, Stream):
    """The same, in order."""

    def documents(self):
        for index in range(len(self)):
            yield Document(f"number {index}", self[index], 8)


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Converts a folder that the recogniser of a package reads as a given source."""

    def convert(source, **options):
        entry = SimpleNamespace(
            name="mine", value="mine:f", dist=None, load=lambda: lambda _: source
        )
        monkeypatch.setattr(candidate, "_entry_points", lambda: [entry])
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder/a.txt").write_text("read by shardkit alone")
        out = tmp_path / "out"
        shardkit.convert(tmp_path / "folder", "wds", out, workers=0, **options)
        with shardkit.open(out) as found:
            return [*found]

    return convert


@pytest.mark.parametrize("base", [Numbers, Streamed])
@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"__key__": "a"}, "has no field 'n'"),
        ({"__key__": "a", "n": 1, "more": 2}, "does not name: 'more'"),
        ({"n": 1}, "the source 'mine' of the package mine:f failed"),
        (3, "the source 'mine' of the package mine:f failed"),
    ],
)
def test_samples_that_do_not_fit_the_schema_are_errors(converted, base, sample, said):
    class Wrong(base):
        def __getitem__(self, index):
            return sample if self.numbers[index] else super().__getitem__(index)

    with pytest.raises(shardkit.ShardkitError, match=said):
        converted(Wrong())
    if "n'" in said:
        assert [one["n"] for one in converted(Wrong(), on_error="skip", overwrite=True)] == [0]


@pytest.mark.parametrize("base", [Numbers, Streamed])
def test_a_source_comes_before_loose_files_and_has_the_usual_options(converted, base):
    assert [one["n"] for one in converted(base())] == [0, 1, 2]
    converted(base())  # the same again: there is nothing to do
    chosen = converted(base(), where="n > 0", fields=["n"], overwrite=True)
    assert [one["n"] for one in chosen] == [1, 2]


def test_a_subset_is_not_ignored(converted, tmp_path):
    converted(Numbers())
    with pytest.raises(shardkit.UsageError, match="no subset 'x'") as raised:
        shardkit.convert(f"{tmp_path}/folder#x", "wds", tmp_path / "other")
    assert raised.value.where == {"path": tmp_path / "folder"}


def test_a_label_column_is_made_of_a_source_and_refused_for_a_stream(converted):
    assert [one["label"] for one in converted(Numbers(), label_column="n")] == [0, 1, 2]
    with pytest.raises(shardkit.UsageError, match="a stream of samples cannot have a label"):
        converted(Streamed(), label_column="n", overwrite=True)


def test_a_changed_fingerprint_is_another_source_and_none_cannot_be_told(converted):
    class Other(Numbers):
        found = "abcd"

        def fingerprint(self):
            return self.found and {"mine": self.found}

    converted(Numbers())
    with pytest.raises(shardkit.OutputError, match="holds another dataset") as raised:
        converted(Other())
    assert raised.value.found == "the source has changed"
    Other.found = None
    converted(Other(), overwrite=True)
    with pytest.raises(shardkit.OutputError, match="may hold another dataset") as raised:
        converted(Other())
    assert "no fingerprint" in raised.value.found


def test_mistakes_of_a_source_name_its_package(converted):
    class Bare(Numbers):
        def __init__(self):
            self.schema = Schema({"n": Int()})

    class Short(Numbers):
        def sizes(self):
            return [1]

    for wrong, said in [(Bare, "super().__init__()"), (Short, "1 sizes of 3")]:
        with pytest.raises(shardkit.SourceError, match="the package mine:f") as raised:
            converted(wrong())
        assert said in f"{raised.value}"


def test_a_stream_itself_is_no_sequence(tmp_path):
    class Alone(Stream):
        __len__ = sizes = select = fingerprint = documents = lambda *_: 0

    with pytest.raises(shardkit.UsageError) as raised:
        shardkit.convert(Alone(), "wds", tmp_path / "out")
    assert raised.value.found == "Alone"
