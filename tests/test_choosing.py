"""docs/choosing.md: its table says what the formats declare, and do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import FormatError
from shardkit.formats import FORMATS, get_format
from shardkit.schema import Array, Audio, Bool, Bytes, Float, Image, Images, Int, Json, Text, Video
from shardkit.testing import make_image
from tests.conftest import few

PAGE = (Path(__file__).parent.parent / "docs" / "choosing.md").read_text("utf-8")


def _table() -> dict[str, dict[str, str]]:
    """Format -> column -> cell."""
    _, _, part = PAGE.partition("## What each can do")
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


def test_all_formats_are_there():
    assert [*TABLE] == [*FORMATS]
    above = PAGE.partition("## What each can do")[0]
    assert [name for name in FORMATS if f"[`{name}`]" not in above] == []


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


def test_all_but_megatron_hold_all_types_of_fields():
    kinds = (Int(), Float(), Bool(), Text(), Bytes(), Json(), Audio(), Video(), Array("<f4", (2,)))
    for name in FORMATS:
        assert {_holds(name, field=kind) for kind in kinds} == {name != "megatron"}
