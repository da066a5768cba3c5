"""The format of docs/adding-a-format.md passes the contract, and a package can add it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from tests.test_docs import BLOCK, MODULE, ROOT


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The files of the page."""
    folder = tmp_path_factory.mktemp("package")
    page = (ROOT / "docs" / "adding-a-format.md").read_text("utf-8")
    for match in BLOCK.finditer(page):
        if named := MODULE.fullmatch(match["before"]):
            (folder / named[1]).write_text(match["code"], "utf-8")
    return folder


def run(*command, path, code=0):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, *command]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == code, found.stdout + found.stderr
    return found.stdout


@pytest.mark.docs
def test_the_example_is_short_and_passes_the_contract(package):
    code = (package / "packed.py").read_text().splitlines()
    assert len([line for line in code if line.strip()]) < 100
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(package), path=package)
    assert " passed" in out
    assert "skipped" not in out


MISTAKES = """
import math
import test_packed
from packed import Packed, PackedReader
from shardkit.testing import FormatContract

class First(PackedReader):
    def read(self, position, *more):
        sample = super().read(position, *more)
        return super().read(0, *more) if b"damaged" in sample.get("blob", b"") else sample

class Numbers(PackedReader):
    def read(self, position, *more):
        sample = super().read(position, *more)
        return {n: 0.0 if type(v) is float and math.isnan(v) else v for n, v in sample.items()}

def of(kind):
    format = Packed()
    format.reader = kind
    return format

class TestFirst(test_packed.TestPacked):
    tested = of(First)

class TestNumbers(test_packed.TestPacked):
    tested = of(Numbers)

class TestBare(FormatContract):
    tested, suffix = Packed(), ".packed"

class TestUnnamed(FormatContract):
    tested = Packed()
"""


def test_the_contract_finds_mistakes_and_shows_values(package, tmp_path):
    (tmp_path / "test_mistakes.py").write_text(MISTAKES)
    names = "harmed and First or no_numbers and TestNumbers or every_type and (Bare or Unnamed)"
    options = ["-q", "-p", "no:cacheprovider", str(tmp_path), "-k", names]
    out = run("-m", "pytest", *options, path=f"{package}{os.pathsep}{ROOT}", code=1)
    assert "3 failed" in out
    for part in (
        "isnan>(0.0)",
        "assert '00' == '",
        "TestBare has no method `independent_keys(path)`",
        "TestUnnamed has no `suffix`, and its format is not installed",
    ):
        assert part in out


def test_names_of_earlier_versions_of_the_page_are_kept():
    from shardkit import byte_source, storage
    from shardkit.formats import api, base

    assert (storage.create, storage.write) == (api.fs.create, api.fs.write)
    assert (byte_source.Table, base.ShardReader) == (api.Table, api.ShardReader)
    assert byte_source.LocalFile


def test_the_interface_has_what_the_contract_names():
    from shardkit.formats import api

    named = re.findall(r"`api\.(\w+)`", api.__doc__)
    assert {"FOLDER", "check"} <= {*named} <= {*api.__all__}


@pytest.fixture(scope="module")
def installed(package, tmp_path_factory):
    """Where the package is installed, as pip does it."""
    target = tmp_path_factory.mktemp("installed")
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run("-m", "pip", "install", *offline, "--target", str(target), str(package), path=target)
    return target


# Several commands, one after the other, in one process that has the package.
COMMANDS = """
import json, sys
from click.testing import CliRunner
from shardkit.cli import group
said = []
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(group, command)
    assert done.exit_code == 0, done.output
    said.append(done.output)
print(json.dumps(said))
"""


def test_a_package_adds_a_format(installed, images, tmp_path):
    out, back = f"{tmp_path}/out", f"{tmp_path}/back"
    options = ["--workers", "2", "--shard-samples", "5"]
    commands = [
        ["convert", f"{images}", "--to", "packed", "-o", out, *options],
        ["inspect", out, "--json"],
        ["verify", out, "--against", f"{images}"],
        ["formats"],
        ["convert", out, "--to", "wds", "-o", back, "--workers", "0"],
    ]
    said = json.loads(run("-c", COMMANDS, json.dumps(commands), path=installed).splitlines()[-1])
    names = [path.name for path in sorted(Path(out).glob("*.packed"))]
    assert names == [f"shard-{n:06d}.packed" for n in range(3)]
    about = json.loads(said[1])
    assert (about["format"], about["samples"]) == ("packed", 12)
    assert "packed" in said[3]
    shardkit.convert(images, "wds", tmp_path / "direct", workers=0)
    with shardkit.open(back) as found, shardkit.open(tmp_path / "direct") as expected:
        assert [*found] == [*expected]
    with pytest.raises(shardkit.FormatError, match="a format that this version does not know"):
        shardkit.open(out)  # without the package


# Prints what a conversion to the format says; another format is not disturbed.
BROKEN = """
import sys
import shardkit
shardkit.convert(sys.argv[1], "wds", sys.argv[2], workers=0)
try:
    shardkit.convert(sys.argv[1], "packed", sys.argv[2], workers=0)
except shardkit.ShardkitError as error:
    print(error)
"""


NO_FORMAT = """
from shardkit.formats import Declaration
DECLARATION = Declaration("packed", (".packed",), "")
"""


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        pytest.param("DECLARATION = 3", "a int", marks=pytest.mark.large),
        pytest.param(NO_FORMAT, "has no attribute 'FORMAT'", marks=pytest.mark.large),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named(installed, images, tmp_path, module, found):
    (tmp_path / "packed.py").write_text(module + "\n")
    path = f"{tmp_path}{os.pathsep}{installed}"
    said = run("-c", BROKEN, str(images), str(tmp_path / "out"), path=path)
    for part in ("the format 'packed' cannot be loaded", found, "shardkit-packed"):
        assert part in said
