"""README, docs/ and sample_data/: code blocks run, tables hold, the site of the docs builds."""

import doctest
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import PIL.Image
import pytest

import shardkit
from shardkit.cli import COMMANDS
from shardkit.errors import FormatError
from shardkit.formats import FORMATS, get_format
from shardkit.schema import Array, Audio, Bool, Bytes, Float, Image, Images, Int, Json, Text, Video
from shardkit.testing import make_image
from tests.conftest import few, files_of
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


OVERVIEWS = ("index", "converting", "streaming")


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


def test_every_command_and_option_is_documented_and_links_lead_somewhere():
    text = "".join(page.read_text("utf-8") for page in PAGES)
    for name in COMMANDS:
        assert f"shardkit {name}" in text
        command = importlib.import_module(f"shardkit.cli.{name}").command
        options = [parameter.opts for parameter in command.params if parameter.opts[0][0] == "-"]
        assert [names for names in options if not any(option in text for option in names)] == []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_front_page_has_the_version_and_leads_to_all_pages():
    pages = {name: (ROOT / f"docs/{name}.md").read_text("utf-8") for name in OVERVIEWS}
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    oldest = re.search(r'requires-python = ">=(.+)"', project)
    assert oldest is not None
    assert f"Version {shardkit.__version__}, for Python {oldest[1]} or newer" in pages["index"]
    linked = set(re.findall(r"\]\(([\w-]+\.md)", "".join(pages.values())))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == linked | {"index.md"}


def test_continuous_integration_runs_the_command_of_the_readme():
    blocks = BLOCK.finditer((ROOT / "README.md").read_text("utf-8"))
    (command,) = [match["code"] for match in blocks if match["marker"]]
    script = ROOT / ".ci/run"
    found = subprocess.run(
        ["bash", script, "--print-test-command"], check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == command.strip()


WITH_EXAMPLES = "cli.help errors formats.wds.names helpers.names helpers.words sample schema"


@pytest.mark.parametrize("module", WITH_EXAMPLES.split())
def test_examples_in_docstrings_run(module):
    failed, tried = doctest.testmod(importlib.import_module(f"shardkit.{module}"))
    assert tried > 0
    assert failed == 0


DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder]
    words += ["-f", ROOT / ".mkdocs/mkdocs.yml"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.docs
def test_the_site_shows_lists_tables_and_code_as_such_and_loads_nothing_from_elsewhere(site):
    """What GitHub shows as one, and the site's Markdown only after a blank line, say."""
    address = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\"> ]+)")
    for page in site.rglob("*.html"):
        assert address.findall(page.read_text("utf-8")) == [], page
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("")
        file = site / name / "index.html" if name.name != "index" else site / "index.html"
        text, html = page.read_text("utf-8"), file.read_text("utf-8")
        without_code, blocks = re.subn(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        body = html[html.index("<article") : html.index("</article")]
        wanted = {
            "li": len(re.findall(r"^ *(?:-|\d+\.) ", without_code, re.MULTILINE)),
            "table": len(re.findall(r"^\|[-| :]+\|$", without_code, re.MULTILINE)),
        }
        shown = Counter(re.findall(r"<(li|table)\b", body))
        assert {name: shown[name] for name in wanted} == wanted, page.name
        assert body.count('<div class="highlight') + body.count("<pre><code") >= blocks, page.name


CHOOSING = (ROOT / "docs" / "choosing.md").read_text("utf-8")


def _table() -> dict[str, dict[str, str]]:
    """Format -> column -> cell."""
    _, _, part = CHOOSING.partition("## What each can do")
    rows = [
        [cell.strip().replace("`", "") for cell in line[1:-1].split("|")]
        for line in part.partition("\n- **")[0].split("\n")
        if line.startswith("|")
    ]
    head, _, *body = rows
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


TABLE = _table()


def _holds(name: str, **fields: shardkit.schema.FieldType) -> bool:
    try:
        get_format(name).layout(shardkit.Schema(fields))
    except FormatError:
        return False
    return True


def test_all_formats_are_there_and_all_but_megatron_hold_all_types_of_fields():
    assert [*TABLE] == [*FORMATS]
    above = CHOOSING.partition("## What each can do")[0]
    assert [name for name in FORMATS if f"[`{name}`]" not in above] == []
    kinds = (Int(), Float(), Bool(), Text(), Bytes(), Json(), Audio(), Video(), Array("<f4", (2,)))
    for name in FORMATS:
        assert {_holds(name, field=kind) for kind in kinds} == {name != "megatron"}


@pytest.mark.parametrize("name", few(FORMATS, "wds", "parquet", "beton", "mds"))
def test_each_row_is_what_the_format_declares(name):
    declared, format, row = FORMATS[name], get_format(name), TABLE[name]
    assert row["needs"] == (f"shardkit[{declared.extra}]" if declared.extra else "")
    read = "with its row group" if format.grouped else "by itself"
    assert row["one sample at random"] == read
    kept = "JPEG or pixels" if format.encodes_images else "as they are"
    assert row["images"] == (kept if _holds(name, image=Image()) else "none")
    assert row["lists of images"] == ("yes" if _holds(name, images=Images()) else "no")
    one = "by default" if declared.one_shard else "yes" if declared.single else "no"
    assert row["as one file"] == one
    assert row["largest shard"] == ("4 GiB" if format.largest else "any")
    assert format.largest in (None, 2**32 - 1)


@pytest.mark.parametrize("name", few((n for n in FORMATS if n != "megatron"), "wds", "lmdb"))
def test_what_a_sample_takes(name, tmp_path):
    """Of the shards themselves, without `__shardkit__`."""
    out, samples, size = tmp_path / "out", 200, 10_000
    with shardkit.create(out, name, {"image": Image(), "label": Int()}) as writer:
        for number in range(samples):
            image = make_image(number)
            padded = image + bytes(size - len(image))
            writer.write({"__key__": f"class0/{number:06d}", "image": padded, "label": 1})
    files = [p for p in out.rglob("*") if p.is_file() and "__shardkit__" not in p.parts]
    beside = sum(path.stat().st_size for path in files) / samples - size
    said = int(re.sub(",", "", TABLE[name]["bytes beside an image of 10 kB"]))
    assert said == pytest.approx(beside, rel=0.1)


SAMPLE_DATA = ROOT / "sample_data"


def about(path: Path) -> tuple[str, tuple[int, int], dict[int, int], bool]:
    """Mode, size, EXIF tags, and whether there is transparency."""
    with PIL.Image.open(path) as image:
        transparent = "transparency" in image.info
        return image.mode, image.size, dict(image.getexif()), transparent


def test_the_script_makes_it_the_same_every_time(tmp_path):
    for name in ("made", "again"):
        runpy.run_path(str(SAMPLE_DATA / "make.py"))["make"](tmp_path / name)
    stored, found = files_of(SAMPLE_DATA), files_of(tmp_path / "made")
    del stored["make.py"]
    assert set(found) == set(stored)
    assert sum(map(len, stored.values())) < 1_000_000
    for name, data in stored.items():
        if name.endswith((".txt", ".jsonl")):
            assert found[name] == data
        else:  # encoders differ between versions of Pillow; images hardly do
            assert about(SAMPLE_DATA / name) == about(tmp_path / "made" / name)
    assert files_of(tmp_path / "again") == found


def test_it_has_every_oddity_and_converts(tmp_path):
    images, text = SAMPLE_DATA / "images", SAMPLE_DATA / "text"
    names = {path.name for path in images.rglob("*.*")}
    assert {"v1.0.final.png", "größe.jpg", "web.webp", "00.jpg", "00.png", "00.txt"} <= names
    assert about(images / "circle/grey.jpg")[0] == "L"
    assert about(images / "circle/cmyk.jpg")[0] == "CMYK"
    assert about(images / "square/palette.png")[::3] == ("P", True)
    assert about(images / "circle/upright.jpg")[2] == {0x0112: 6}
    assert sorted(p.suffix for p in text.iterdir() if p.is_file()) == [".jsonl", *[".txt"] * 3]
    essays = [p.read_text("utf-8") for p in (text / "essays").iterdir()]
    assert 3000 < sum(map(len, essays)) < 8000
    assert max(map(len, essays)) > 2 * min(map(len, essays))
    sources = {images: 17, text / "essays": 8, text / "notes.jsonl": 3, text / "shards.txt": 2}
    for source, samples in sources.items():
        out = tmp_path / source.name
        assert shardkit.convert(source, "wds", out, workers=0).samples == samples
    assert shardkit.open(tmp_path / "images").classes == ("circle", "square", "stripes")
