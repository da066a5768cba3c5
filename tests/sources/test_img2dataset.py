"""Folders as img2dataset writes them, with `output_format` webdataset, files or parquet."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.recipe import Recipe
from shardkit.sources import open_sources
from shardkit.sources.base import Source
from shardkit.testing import make_image
from shardkit.verification.verify import verify
from tests.sources.real import put

FAILED = "failed downloads of img2dataset"
OK = {"000000000": "success", "000000002": "success", "000010000": "success"}
BAD = {"000000001": "failed_to_download", "000010001": "failed_to_resize"}
STATUS = {**OK, **BAD}


def meta(key: str) -> dict[str, Any]:
    """What is in the JSON of a sample, and in the columns of the table."""
    good = STATUS[key] == "success"
    return {
        "url": f"http://x/{key}.jpg",
        "caption": f"caption {key}",
        "key": key,
        "status": STATUS[key],
        "error_message": None if good else "404",
        "width": 8 if good else None,
        "height": 8 if good else None,
        "exif": "{}" if good else None,
        "sha256": "ab" if good else None,
    }


def image(key: str) -> bytes:
    return make_image(int(key) % 97)


def written(root: Path, form: str, *, added: bool = False, with_json: bool = True) -> Path:
    """Two parts; `added`: columns that somebody put into the tables later."""
    for part in ("00000", "00001"):
        keys = sorted(key for key in STATUS if key.startswith(part))
        good = [key for key in keys if key in OK]
        stats = {"count": len(keys), "successes": len(good), "failed_to_download": 1, "duration": 1}
        put(root, {f"{part}_stats.json": json.dumps(stats)})
        rows = [meta(key) for key in keys]
        if added:
            for number, row in enumerate(rows):
                row |= {"score": number / 2, "tags": [row["key"], "x"]}
        if form == "parquet":
            rows = [
                {
                    "jpg": image(row["key"]) if row["key"] in OK else None,
                    "txt": row["caption"],
                    **row,
                }
                for row in rows
            ]
        pq.write_table(pa.Table.from_pylist(rows), root / f"{part}.parquet")
        files: dict[str, bytes] = {}
        for key in good:
            files |= {f"{key}.jpg": image(key), f"{key}.txt": f"caption {key}".encode()}
            files |= {f"{key}.json": json.dumps(meta(key), indent=4).encode()} if with_json else {}
        if form == "files":
            put(root / part, {**files})
        elif form == "webdataset":
            with tarfile.open(root / f"{part}.tar", "w") as tar:
                for name, data in files.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return root


def opened(root: Path) -> Source:
    (source,) = open_sources(root).values()
    assert isinstance(source, Source)
    return source


@pytest.mark.parametrize("form", ["webdataset", "files", "parquet"])
def test_failed_downloads_are_counted_and_no_samples(tmp_path: Path, form: str) -> None:
    root = written(tmp_path / "laion", form)
    source = opened(root)
    assert len(source) == 3
    assert source.ignored[FAILED] == 2
    image_field = "image" if form == "files" else "jpg"
    assert [source[n][image_field] for n in range(3)] == [image(key) for key in OK]
    assert "score" not in source.schema
    result = shardkit.convert(root, "arrow", tmp_path / "out", workers=0)
    assert (result.samples, result.ignored[FAILED]) == (3, 2)
    assert verify(tmp_path / "out", against=root).sound
    if form == "parquet":
        assert [source[n]["url"] for n in range(3)] == [meta(key)["url"] for key in OK]


@pytest.mark.parametrize("form", ["webdataset", "files"])
@pytest.mark.parametrize("with_json", [True, False])
def test_columns_of_the_tables_alone_are_joined_by_key(
    tmp_path: Path, form: str, with_json: bool
) -> None:
    root = written(tmp_path / "laion", form, added=True, with_json=with_json)
    source = opened(root)
    new = {"score", "tags"} if with_json else {*meta("000000000"), "score", "tags"} - {"key"}
    own = {"image", "text"} if form == "files" else {"jpg", "txt"}
    assert set(source.schema) == own | new | ({"json"} if with_json else set())
    assert any("columns from the tables beside the images" in note for note in source.notes)
    chosen = source.select(np.array([2, 0]))
    assert [chosen[n]["score"] for n in range(2)] == [0.0, 0.0]
    assert [source[n]["score"] for n in range(3)] == [0.0, 1.0, 0.0]
    assert [source[n]["tags"][0] for n in range(3)] == list(OK)
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        shardkit.convert(root, "arrow", out, workers=workers, shuffle=True, shard_samples=2)
        assert verify(out, against=root).sound
    stored = shardkit.open(tmp_path / "out2")
    found = {sample["__key__"].rpartition("/")[2]: sample for sample in stored}
    assert {key: sample["tags"][0] for key, sample in found.items()} == {k: k for k in OK}
    if not with_json:
        assert {key: sample["caption"] for key, sample in found.items()} == {
            key: meta(key)["caption"] for key in OK
        }
    (only,) = open_sources(root, Recipe("wds", fields=("score",))).values()
    assert dict(only[1]) == {"__key__": source[1]["__key__"], "score": 1.0}


def test_a_changed_table_is_a_change_of_the_source(tmp_path: Path) -> None:
    root = written(tmp_path / "laion", "webdataset", added=True)
    shardkit.convert(root, "arrow", tmp_path / "out", workers=0)
    table = pq.read_table(root / "00001.parquet").to_pylist()
    pq.write_table(
        pa.Table.from_pylist([{**row, "score": 9.0} for row in table]), root / "00001.parquet"
    )
    assert not verify(tmp_path / "out", against=root).sound


@pytest.mark.parametrize("stats", ["", "[]", '{"count": "x"}', '{"count": 1e400, "successes": 1}'])
def test_statistics_of_something_else_count_nothing(tmp_path: Path, stats: str) -> None:
    root = written(tmp_path / "laion", "webdataset")
    put(root, {"00000_stats.json": stats, "00001_stats.json": stats})
    assert FAILED not in opened(root).ignored
