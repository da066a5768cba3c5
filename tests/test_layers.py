"""Imports point one way: down the list of folders and modules in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardkit"


def layers() -> dict[str, int]:
    """The line of each folder or module of the package in the list."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    block = re.search(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    found: dict[str, int] = {}
    for number, line in enumerate(block[1].splitlines()):
        for name in takewhile(lambda word: word.endswith(("/", ".py")), line.split()):
            unit = name.removesuffix("/").removesuffix(".py")
            assert unit not in found, f"{name} is listed twice"
            found[unit] = number
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and unit of each import of the package, late ones and those for types too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "shardkit":
                names = [f"shardkit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("shardkit."):
                yield node.lineno, name.split(".")[1]


def modules() -> Iterator[tuple[str, Path]]:
    """All modules, with the folder or module that they are listed by."""
    for path in sorted(PACKAGE.rglob("*.py")):
        unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if unit != "__init__":
            yield unit, path


def test_each_folder_and_module_is_listed_once() -> None:
    assert set(layers()) == {unit for unit, _ in modules()}


def test_no_import_leads_upwards() -> None:
    order = layers()
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {found}"
        for unit, path in modules()
        for line, found in imports(path)
        if found != unit and order[found] <= order[unit]
    ]
    assert not wrong
