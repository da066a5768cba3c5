"""Every code block in README and docs/ runs, or says beside it why it is not run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import forking

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?P<before>[^\n]*)\n(?P<marker><!-- test command -->\n)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = re.compile(r"<!-- not run: \w.+ -->")
MODULE = re.compile(r"<!-- module: (.+) -->")  # a file of its own; see formats/test_adding.py


# Runs a page's blocks in order: shell blocks in bash, Python blocks in one namespace.
DRIVER = """
import json, subprocess, sys
sys.path[0] = ""
namespace = {"__name__": "docs"}
for language, code in json.load(sys.stdin):
    if language == "sh":
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
    else:
        exec(compile(code, "block", "exec"), namespace)
"""


# Blocks that need servers, machines or other libraries: remote/test_docs.py, test_cluster.py and
# test_coming_from.py run them.
REMOTE, CLUSTER = ROOT / "docs" / "remote.md", ROOT / "docs" / "cluster.md"
COMING_FROM = ROOT / "docs" / "coming-from.md"


@pytest.fixture(scope="module")
def forks():
    """Commands whose processes are forks of one that has imported all."""
    with forking() as folder:
        yield folder


@pytest.mark.docs
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in (REMOTE, CLUSTER, COMING_FROM)],
    ids=lambda page: page.name,
)
def test_code_blocks_run(page, tmp_path, forks):
    run_blocks(page.read_text("utf-8"), tmp_path, forks)


def run_blocks(text: str, tmp_path: Path, forks: Path | None = None, **environ: str) -> None:
    """Run the code blocks of a page in a folder with the sample data."""
    blocks = []
    for match in BLOCK.finditer(text):
        if MODULE.fullmatch(match["before"]) or NOT_RUN.fullmatch(match["before"]):
            continue
        if match["language"] != "text":
            assert match["language"] in ("sh", "python"), f"a block neither run nor marked: {match}"
            blocks.append((match["language"], match["code"]))
    if not blocks:
        return
    shutil.copytree(ROOT / "sample_data", tmp_path / "sample_data")
    path = [*([forks] if forks else []), Path(sys.executable).parent, os.environ["PATH"]]
    driver = [sys.executable, "-c", DRIVER]
    if forks:
        (forks / "driver.py").write_text(DRIVER)
        driver = [forks / "python", forks / "driver.py"]
    found = subprocess.run(
        driver, input=json.dumps(blocks), check=False, cwd=tmp_path,
        env={**os.environ, **environ, "PATH": ":".join(map(str, path))},
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_and_option_is_documented():
    import importlib

    from shardkit.cli import COMMANDS

    text = "".join(page.read_text("utf-8") for page in PAGES)
    for name in COMMANDS:
        assert f"shardkit {name}" in text
        command = importlib.import_module(f"shardkit.cli.{name}").command
        options = [parameter.opts for parameter in command.params if parameter.opts[0][0] == "-"]
        assert [names for names in options if not any(option in text for option in names)] == []


def test_continuous_integration_runs_the_command_of_the_readme():
    blocks = BLOCK.finditer((ROOT / "README.md").read_text("utf-8"))
    (command,) = [match["code"] for match in blocks if match["marker"]]
    script = ROOT / ".ci/run"
    found = subprocess.run(
        ["bash", script, "--print-test-command"], check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == command.strip()


WITH_EXAMPLES = [
    "cli.help",
    "errors",
    "formats.wds.names",
    "names",
    "options",
    "sample",
    "schema",
    "words",
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_run(module):
    import doctest
    import importlib

    failed, tried = doctest.testmod(importlib.import_module(f"shardkit.{module}"))
    assert tried > 0
    assert failed == 0
