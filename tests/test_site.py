"""The site of the docs builds, with no link or anchor that leads nowhere and no page left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    config = ROOT / ".mkdocs/mkdocs.yml"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", folder],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


def _html(site: Path, page: Path) -> str:
    name = page.relative_to(DOCS).with_suffix("")
    file = site / name / "index.html" if name.name != "index" else site / "index.html"
    return file.read_text("utf-8")


@pytest.mark.docs
def test_it_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\"> ]+)", text
        )
        assert loaded == [], page


@pytest.mark.docs
def test_lists_tables_and_code_are_shown_as_such(site):
    """What GitHub shows as one, and the site's Markdown only after a blank line, say."""
    for page in DOCS.rglob("*.md"):
        text, html = page.read_text("utf-8"), _html(site, page)
        without_code, blocks = re.subn(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        body = html[html.index("<article") : html.index("</article")]
        wanted = {
            "li": len(re.findall(r"^ *(?:-|\d+\.) ", without_code, re.MULTILINE)),
            "table": len(re.findall(r"^\|[-| :]+\|$", without_code, re.MULTILINE)),
        }
        shown = Counter(re.findall(r"<(li|table)\b", body))
        assert {name: shown[name] for name in wanted} == wanted, page.name
        assert body.count('<div class="highlight') + body.count("<pre><code") >= blocks, page.name
