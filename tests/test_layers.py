"""Imports point one way: down the list of folders and modules in docs/architecture.md."""

from __future__ import annotations

import re
from itertools import takewhile

from tests.parsed import PACKAGE, ROOT, code


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


def unit(file: str) -> str:
    """The folder or module that a file of the package is listed by."""
    return file.partition("/")[0].removesuffix(".py")


def test_each_folder_and_module_is_listed_once():
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    assert set(layers()) == {unit(file) for file in files} - {"__init__"}


def test_no_import_leads_upwards():
    """Late ones and those for types neither."""
    order, wrong = layers(), []
    for file, line, module, _ in code().imports:
        if module.startswith("shardkit.") and unit(file) != "__init__":
            found = module.split(".")[1]
            if found != unit(file) and order[found] <= order[unit(file)]:
                wrong.append(f"{file}:{line} imports {found}")
    assert not wrong
