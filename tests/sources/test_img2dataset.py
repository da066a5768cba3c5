"""Folders as img2dataset writes them, with `output_format` webdataset, files or parquet."""

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.testing import make_image
from shardkit.verification.verify import verify
from tests.sources.real import cases, one, put, verified

FAILED = "failed downloads of img2dataset"
OK = {"000000000": "success", "000000002": "success", "000010000": "success"}
BAD = {"000000001": "failed_to_download", "000010001": "failed_to_resize"}
STATUS = {**OK, **BAD}
IMAGES = {key: make_image(int(key) % 97) for key in OK}


def meta(key: str) -> dict[str, Any]:
    """What is in the JSON of a sample, and in the columns of the table."""
    about = {"url": f"http://x/{key}.jpg", "caption": f"caption {key}", "key": key}
    about |= {"status": STATUS[key], "error_message": None if key in OK else "404"}
    of_image = {"width": 8, "height": 8, "exif": "{}", "sha256": "ab"}
    return {**about, **(of_image if key in OK else dict.fromkeys(of_image))}


def written(root: Path, form: str, *, added: bool = False, with_json: bool = True) -> Path:
    """Two parts; `added`: columns that somebody put into the tables later."""
    for part in ("00000", "00001"):
        keys = sorted(key for key in STATUS if key.startswith(part))
        good = [key for key in keys if key in OK]
        stats = {"count": len(keys), "successes": len(good), "failed_to_download": 1, "duration": 1}
        put(root, {f"{part}_stats.json": json.dumps(stats)})
        rows = [meta(key) for key in keys]
        for number, row in enumerate(rows if added else ()):
            row |= {"score": number / 2, "tags": [row["key"], "x"]}
        if form == "parquet":
            rows = [{"jpg": IMAGES.get(row["key"]), "txt": row["caption"], **row} for row in rows]
        pq.write_table(pa.Table.from_pylist(rows), root / f"{part}.parquet")
        files: dict[str, bytes] = {}
        for key in good:
            files |= {f"{key}.jpg": IMAGES[key], f"{key}.txt": f"caption {key}".encode()}
            files |= {f"{key}.json": json.dumps(meta(key), indent=4).encode()} if with_json else {}
        if form == "files":
            put(root / part, files)
        elif form == "webdataset":
            with tarfile.open(root / f"{part}.tar", "w") as tar:
                for name, data in files.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return root


@pytest.mark.parametrize("form", ["webdataset", "files", "parquet"])
def test_failed_downloads_are_counted_and_no_samples(tmp_path, form):
    root = written(tmp_path / "laion", form)
    source = one(root)
    assert source.ignored[FAILED] == 2
    field = "image" if form == "files" else "jpg"
    assert [source[n][field] for n in range(len(source))] == list(IMAGES.values())
    assert "score" not in source.schema
    result = verified(root, tmp_path / "out", "arrow")
    assert (result.samples, result.ignored[FAILED]) == (3, 2)
    if form == "parquet":
        assert [source[n]["url"] for n in range(3)] == [meta(key)["url"] for key in OK]
    elif form == "webdataset":
        with shardkit.open(root) as ds:
            assert (ds.format, len(ds), list(ds.schema)) == ("wds", 3, ["jpg", "txt", "json"])
        assert shardkit.inspect(root)["ignored"] == {".parquet file": 2, ".json file": 2}
        assert result.ignored == {FAILED: 2, ".parquet file": 2, ".json file": 2}


@cases("form with_json", ("webdataset", True), ("webdataset", False), ("files", True))
def test_columns_of_the_tables_alone_are_joined_by_key(tmp_path, form, with_json):
    root = written(tmp_path / "laion", form, added=True, with_json=with_json)
    source = one(root)
    new = {"score", "tags"} if with_json else {*meta("000000000"), "score", "tags"} - {"key"}
    own = {"image", "text"} if form == "files" else {"jpg", "txt"}
    assert set(source.schema) == own | new | ({"json"} if with_json else set())
    assert any("columns from the tables beside the images" in note for note in source.notes)
    assert [source[n]["score"] for n in range(3)] == [0.0, 1.0, 0.0]
    assert [source[n]["tags"][0] for n in range(3)] == list(OK)
    chosen = pickle.loads(pickle.dumps(source.select(np.array([2, 1]))))
    assert [chosen[n]["score"] for n in range(2)] == [0.0, 1.0]
    out = tmp_path / "out"
    verified(root, out, "arrow", shuffle=True, shard_samples=2)
    found = {s["__key__"].rpartition("/")[2]: s for s in shardkit.open(out)}
    assert {key: sample["tags"][0] for key, sample in found.items()} == {k: k for k in OK}
    if not with_json:
        assert all(found[key]["caption"] == meta(key)["caption"] for key in OK)
    only = one(root, fields=("score",))
    assert dict(only[1]) == {"__key__": source[1]["__key__"], "score": 1.0}
    # A changed table is a change of the source.
    rows = [{**row, "score": 9.0} for row in pq.read_table(root / "00001.parquet").to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), root / "00001.parquet")
    assert not verify(out, against=root).sound


def test_statistics_of_something_else_count_nothing(tmp_path):
    root = written(tmp_path / "laion", "webdataset")
    for stats in ("", "[]", '{"count": "x"}', '{"count": 1e400, "successes": 1}'):
        put(root, {"00000_stats.json": stats, "00001_stats.json": stats})
        assert FAILED not in one(root).ignored
