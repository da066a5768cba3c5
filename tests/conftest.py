"""Folders of generated pictures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shardkit.errors import FormatError
from shardkit.formats import FORMATS, get_format
from shardkit.schema import Image, Schema
from shardkit.testing import picture

# Time never decides a test: a loaded machine is no failure.
settings.register_profile("shardkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardkit")


def _holds_pictures(format: str) -> bool:
    try:
        get_format(format).layout(Schema({"image": Image()}))
    except FormatError:
        return False
    return True


# All but those that hold tokens and nothing else.
PICTURE_FORMATS = [name for name in sorted(FORMATS) if _holds_pictures(name)]


def write_pictures(root: Path, classes: int = 3, each: int = 4, kilobytes: int = 0) -> Path:
    """`classes` folders of `each` JPEGs; each is followed by so many kilobytes of padding."""
    for label in range(classes):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(each):
            data = picture(label * 100 + number) + bytes(kilobytes * 1000)
            (folder / f"{number:03d}.jpg").write_bytes(data)
    return root


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three classes of four pictures."""
    return write_pictures(tmp_path / "images")


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In continuous integration nothing may be skipped: a skip there is a check that was lost."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
