"""The format of docs/adding-a-format.md passes the contract, and a package can add it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from tests.test_docs import BLOCK, MODULE, ROOT


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page."""
    folder = tmp_path_factory.mktemp("package")
    page = (ROOT / "docs" / "adding-a-format.md").read_text("utf-8")
    for match in BLOCK.finditer(page):
        if named := MODULE.fullmatch(match["before"]):
            (folder / named[1]).write_text(match["code"], "utf-8")
    return folder


def run(*command: str, path: Path) -> str:
    found = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_example_is_short(package: Path) -> None:
    code = (package / "packed.py").read_text().splitlines()
    assert len([line for line in code if line.strip()]) < 100


@pytest.mark.docs
def test_the_example_passes_the_contract(package: Path) -> None:
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(package), path=package)
    assert " passed" in out
    assert "skipped" not in out


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed, as pip does it."""
    target = tmp_path_factory.mktemp("installed")
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
    ]
    run("-m", "pip", "install", *options, str(package), path=target)
    return target


def test_a_package_adds_a_format(installed: Path, images: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    command = ("-m", "shardkit", "convert")
    options = ("--workers", "2", "--shard-samples", "5")
    run(*command, str(images), "--to", "packed", "-o", str(out), *options, path=installed)
    assert sorted(p.name for p in out.glob("*.packed")) == [
        f"shard-{n:06d}.packed" for n in range(3)
    ]
    about = json.loads(run("-m", "shardkit", "inspect", str(out), "--json", path=installed))
    assert (about["format"], about["samples"]) == ("packed", 12)
    run("-m", "shardkit", "verify", str(out), "--against", str(images), path=installed)
    assert "packed" in run("-m", "shardkit", "formats", path=installed)
    run(*command, str(out), "--to", "wds", "-o", str(back), path=installed)
    shardkit.convert(images, "wds", tmp_path / "direct", workers=0)
    with shardkit.open(back) as found, shardkit.open(tmp_path / "direct") as expected:
        assert [*found] == [*expected]


@pytest.mark.large
def test_without_the_package_the_format_is_unknown(
    installed: Path, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run("-m", "shardkit", "convert", str(images), "--to", "packed", "-o", str(out), path=installed)
    with pytest.raises(shardkit.FormatError, match="a format that this version does not know"):
        shardkit.open(out)


def failed(*arguments: str, path: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "shardkit", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    return found.stderr


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        pytest.param("DECLARATION = 3", "a int", marks=pytest.mark.large),
        (
            "from shardkit.formats import Declaration\n"
            'DECLARATION = Declaration("packed", (".packed",), "")',
            "has no attribute 'FORMAT'",
        ),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named(
    installed: Path, images: Path, tmp_path: Path, module: str, found: str
) -> None:
    (tmp_path / "packed.py").write_text(module + "\n")
    path = f"{tmp_path}{os.pathsep}{installed}"
    said = failed("convert", str(images), "--to", "packed", path=path)
    assert "the format 'packed' cannot be loaded" in said
    assert found in said
    assert "shardkit-packed" in said


@pytest.mark.large
def test_a_package_that_cannot_be_loaded_disturbs_no_other_format(
    installed: Path, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "packed.py").write_text("import nothing_of_this_name\n")
    path = f"{tmp_path}{os.pathsep}{installed}"
    out, again = tmp_path / "out", tmp_path / "again"
    convert = ("-m", "shardkit", "convert")
    run(*convert, str(images), "--to", "wds", "-o", str(out), path=Path(path))
    shutil.rmtree(out / "__shardkit__")
    run(*convert, str(out), "--to", "lmdb", "-o", str(again), path=Path(path))
    run("-m", "shardkit", "formats", path=Path(path))
