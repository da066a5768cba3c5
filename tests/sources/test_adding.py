"""The source of docs/adding-a-source.md, added by a package."""

import json

import pytest

import shardkit
from shardkit.testing import make_audio
from tests.formats.test_adding import COMMANDS, run
from tests.test_docs import BLOCK, MODULE, ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the package of the page is installed, as pip does it."""
    folder, target = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("installed")
    page = (ROOT / "docs" / "adding-a-source.md").read_text("utf-8")
    for match in BLOCK.finditer(page):
        (folder / MODULE.fullmatch(match["before"])[1]).write_text(match["code"], "utf-8")
    code = (folder / "kaldi_data.py").read_text("utf-8").splitlines()
    assert len([line for line in code if line.strip()]) < 60
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run("-m", "pip", "install", *offline, "--target", str(target), str(folder), path=target)
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
        ("def recognise(candidate): return 3", "found: int"),
        ("def recognise(candidate): return {}", "found: no sources"),
        ("def recognise(candidate): 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_package_that_fails_is_named(installed, kaldi, tmp_path, module, found):
    (tmp_path / "kaldi_data.py").write_text(module + "\n")
    said = run("-c", BROKEN, str(kaldi), str(tmp_path / "out"), path=f"{tmp_path}:{installed}")
    for part in ("the source 'kaldi' of the package shardkit-kaldi failed", found):
        assert part in said
