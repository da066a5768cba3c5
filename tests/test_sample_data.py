"""sample_data/ is what its script makes, small, and has every oddity that it promises."""

from __future__ import annotations

import runpy
from pathlib import Path

import PIL.Image
import pytest

import shardkit
from tests.conftest import files_of

SAMPLE_DATA = Path(__file__).parent.parent / "sample_data"


def about(path: Path) -> tuple[str, tuple[int, int], dict[int, int], bool]:
    """Mode, size, EXIF tags, and whether there is transparency."""
    with PIL.Image.open(path) as image:
        transparent = "transparency" in image.info
        return image.mode, image.size, dict(image.getexif()), transparent


@pytest.fixture
def made(tmp_path):
    runpy.run_path(str(SAMPLE_DATA / "make.py"))["make"](tmp_path)
    return tmp_path


def test_the_script_makes_it_the_same_every_time(made, tmp_path):
    stored = files_of(SAMPLE_DATA)
    del stored["make.py"]
    found = files_of(made)
    assert set(found) == set(stored)
    assert sum(map(len, stored.values())) < 1_000_000
    for name, data in stored.items():
        if name.endswith((".txt", ".jsonl")):
            assert found[name] == data
        else:  # encoders differ between versions of Pillow; images hardly do
            assert about(SAMPLE_DATA / name) == about(made / name)
    again = tmp_path / "again"
    runpy.run_path(str(SAMPLE_DATA / "make.py"))["make"](again)
    assert files_of(again) == {n: d for n, d in found.items() if not n.startswith("again")}


def test_it_has_every_oddity():
    images = SAMPLE_DATA / "images"
    names = {path.name for path in images.rglob("*.*")}
    assert {"v1.0.final.png", "größe.jpg", "web.webp", "00.jpg", "00.png", "00.txt"} <= names
    assert about(images / "circle/grey.jpg")[0] == "L"
    assert about(images / "circle/cmyk.jpg")[0] == "CMYK"
    assert about(images / "square/palette.png")[::3] == ("P", True)
    assert about(images / "circle/upright.jpg")[2] == {0x0112: 6}
    texts = sorted(p.suffix for p in (SAMPLE_DATA / "text").iterdir() if p.is_file())
    assert texts == [".jsonl", ".txt", ".txt", ".txt"]
    essays = [p.read_text("utf-8") for p in (SAMPLE_DATA / "text" / "essays").iterdir()]
    assert 3000 < sum(map(len, essays)) < 8000
    assert max(map(len, essays)) > 2 * min(map(len, essays))


def test_it_converts(tmp_path):
    text = SAMPLE_DATA / "text"
    sources = [(SAMPLE_DATA / "images", 17), (text / "essays", 8), (text / "notes.jsonl", 3)]
    for source, samples in (*sources, (text / "shards.txt", 2)):
        out = tmp_path / source.name
        assert shardkit.convert(source, "wds", out, workers=0).samples == samples
    assert shardkit.open(tmp_path / "images").classes == ("circle", "square", "stripes")
