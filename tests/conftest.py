"""How tests are run (docs/testing.md), and folders of generated images that many share."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import tempfile
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, is_hypothesis_test, settings

from shardkit.errors import FormatError, MissingLibraryError, ShardkitWarning
from shardkit.formats import FORMATS, get_format
from shardkit.schema import Image, Schema
from shardkit.testing import make_image

# Time never decides a test: a loaded machine is no failure. Nor does chance where nobody looks:
# what fails in continuous integration fails again here.
_quiet = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "derandomize": bool(os.environ.get("CI")),
    "print_blob": True,
}
_EXAMPLES, _MORE = 20, 5
settings.register_profile("default run", max_examples=_EXAMPLES, **_quiet)
settings.register_profile("large", max_examples=_MORE * _EXAMPLES, **_quiet)


def examples(count: int) -> int:
    """So many examples of a property by default, and as many times more in the large run."""
    return count * settings.default.max_examples // _EXAMPLES


PACKAGE = Path(__file__).parent.parent / "shardkit"
_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30  # bytes free there, so that temporary files may go there


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("large" if _is_large(config) else "default run")
    room = shutil.disk_usage(_MEMORY).free if os.access(_MEMORY, os.W_OK) else 0
    if room > _ROOM:  # what is not about disks need not wait for one to sync
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    # Ignored where a shell runs pytest in the background; what tests start would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What other tests left is not collected in a fork, where their threads are not: it would hang.
    os.register_at_fork(after_in_child=gc.freeze)
    # Else each of some hundred processes would compile shardkit anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True, scope="session")
def _warnings_name_a_line_of_the_caller() -> Iterator[None]:
    """Each warning of ours in any test: none is told of a line of shardkit."""
    warn = warnings.warn_explicit

    def checked(
        message: str, category: type[Warning], filename: str, *more: Any, **named: Any
    ) -> None:
        ours = issubclass(category, ShardkitWarning) and PACKAGE in Path(filename).parents
        assert not ours, f"a warning at {filename}: {message}"
        warn(message, category, filename, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn_explicit", checked)
        yield


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many processes as processors, but no more than files of tests that were asked for."""
    named = {arg.partition("::")[0] for arg in config.args}
    files = len(named) if all(name.endswith(".py") for name in named) else 8
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(files, available or 1, 8)
    if count == 1:  # without another process, which would only have to be started
        config.option.dist = "no"
        return 0
    return count


def _is_large(config: pytest.Config) -> bool:
    """Whether `-m` asks for the long tests."""
    asked = re.sub(r"not (\([^)]*\)|\w+)", "", config.option.markexpr)
    return re.search(r"\blarge\b", asked) is not None


@pytest.fixture(scope="session")
def large(pytestconfig: pytest.Config) -> bool:
    """Whether this is the long run: a test that asks is in both, with all of its cases in this."""
    return _is_large(pytestconfig)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of properties, and those that ask whether the run is a large one, are in both runs.

    Lance, whose library takes a process to run in, is in the large one but for its own tests. So
    are docs, and processes that train together.
    """
    for item in items:
        if item.get_closest_marker("docs") or item.get_closest_marker("torchrun"):
            item.add_marker("large")
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if "lance" in map(str, values) and item.path.name != "test_lance.py":
            item.add_marker("large")
    if _is_large(config):
        for item in items:
            scales = "large" in getattr(item, "fixturenames", ())
            if scales or is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("large")
    for item in items if getattr(config.option, "loadgroup", False) else ():
        # pytest-xdist 3.8 puts groups into `_nodeid`, which pytest 9.2 does not look at any more.
        group = item.get_closest_marker("xdist_group")
        if group is not None and hasattr(item, "_id"):
            item._id = type(item._id).parse(f"{item.nodeid}@{group.args[0]}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without its group, a timed test would run beside others and fail at random."""
    for item in session.items if getattr(session.config.option, "loadgroup", False) else ():
        group = item.get_closest_marker("xdist_group")
        if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
            raise pytest.UsageError(f"{item.nodeid} is not in its group {group.args[0]!r}")


_earlier: deque[str] = deque(maxlen=5)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure says how to repeat it, with what ran before it in its process."""
    report = yield
    if report.failed:
        names = (re.sub(r"@\w+$", "", name) for name in [*_earlier, item.nodeid])  # no group
        tests = " ".join(f"'{name}'" for name in names)
        load = "load {:.1f} {:.1f} {:.1f}".format(*os.getloadavg())
        command = f"pytest -n 0 -m '{item.config.option.markexpr}' {tests}"
        report.sections.append(("To repeat it", f"{command}\n({load})"))
    if call.when == "teardown":
        _earlier.append(item.nodeid)
    return report


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """A folder for the tests of page caches, and for those that write gigabytes: not in memory,
    unless the system's own temporary folder is."""
    with tempfile.TemporaryDirectory(prefix="shardkit-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _holds_images(format: str) -> bool:
    try:
        get_format(format).layout(Schema({"image": Image()}))
    except (FormatError, MissingLibraryError):  # some libraries have no files for some Pythons
        return False
    return True


def few(names: Iterable[str], *shown: str) -> list[ParameterSet]:
    """Cases of what takes long and is alike in most: those not `shown` are in the large run.

    Formats are, by default.
    """
    shown = shown or ("lmdb", "megatron", "wds")
    return [pytest.param(name, marks=[] if name in shown else pytest.mark.large) for name in names]


# All but those that hold tokens and nothing else.
IMAGE_FORMATS = [name for name in sorted(FORMATS) if _holds_images(name)]


def write_images(root: Path, classes: int = 3, each: int = 4, kilobytes: int = 0) -> Path:
    """`classes` folders of `each` JPEGs; each is followed by so many kilobytes of padding."""
    for label in range(classes):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(each):
            data = make_image(label * 100 + number) + bytes(kilobytes * 1000)
            (folder / f"{number:03d}.jpg").write_bytes(data)
    return root


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three classes of four images."""
    return write_images(tmp_path / "images")


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
