"""A field is optional only where a sample lacks it, so that batches of the others are arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest

import shardkit
import shardkit.stream
from shardkit.errors import SampleError
from shardkit.manifest import load
from tests.conftest import few
from tests.sources.test_text import put, put_lines

KEEP = shardkit.TextOptions(keep_fields=True)


def optional(path: Path) -> list[str]:
    with shardkit.open(path) as ds:
        return [name for name, kind in ds.schema.items() if kind.optional]


def first_batch(path: Path) -> dict[str, Any]:
    return next(iter(shardkit.stream.Loader(path, batch_size=4, shuffle=False)))


@pytest.mark.parametrize(
    "to", few(["wds", "lmdb", "arrow", "parquet", "hf", "beton"], "wds", "lmdb", "arrow", "hf")
)
def test_kept_fields_of_documents(tmp_path: Path, to: str) -> None:
    rows: list[dict[str, Any]] = [{"text": f"{n}", "label": n, "some": n} for n in range(9)]
    del rows[7]["some"]
    source = put_lines(tmp_path / "a.jsonl", rows)
    shardkit.convert(source, to, tmp_path / "out", workers=0, text=KEEP, rename={"label": "y"})
    assert optional(tmp_path / "out") == ["some"]
    batch = first_batch(tmp_path / "out")
    np.testing.assert_array_equal(batch["y"], [0, 1, 2, 3])
    assert batch["y"].dtype == np.int64
    assert shardkit.verify(tmp_path / "out", against=source, decode=True).problems == []
    shardkit.convert(tmp_path / "out", "wds", tmp_path / "again", workers=0)
    assert optional(tmp_path / "again") == ["some"]


def test_one_shard_that_is_joined(tmp_path: Path) -> None:
    for number in range(3):
        put_lines(tmp_path / f"in/{number}.jsonl", [{"text": "x" * 2000, "n": number}] * 20)
    for to in ("lmdb", "beton"):
        out = tmp_path / f"a.{to}"
        shardkit.convert(tmp_path / "in", to, out, workers=0, text=KEEP)
        assert optional(out) == []
        assert shardkit.verify(out, against=tmp_path / "in", decode=True).sound


def test_every_split_by_itself_and_only_samples_that_are_stored(tmp_path: Path) -> None:
    put_lines(tmp_path / "in/train.jsonl", [{"text": "a", "n": 1}, {"text": 0}])
    put_lines(tmp_path / "in/val.jsonl", [{"text": "a", "n": 1}, {"text": "b"}])
    options: dict[str, Any] = {"workers": 0, "text": KEEP, "on_error": "skip"}
    shardkit.convert(tmp_path / "in", "wds", tmp_path / "out", **options)
    assert optional(tmp_path / "out/train") == []  # the document without text is not stored
    assert optional(tmp_path / "out/val") == ["n"]
    table = put(tmp_path / "a.csv", "text,label,note\na,1,\nb,2,x\n")
    shardkit.convert(table, "arrow", tmp_path / "table", workers=0, text=KEEP)
    assert optional(tmp_path / "table") == ["note"]


# --- LMDBs of others ------------------------------------------------------------------------------


def environment(path: Path, count: int, *lacking: int) -> Path:
    """Maps of x and y, but for those that lack y."""
    with lmdb.open(str(path), map_size=1 << 26) as base, base.begin(write=True) as transaction:
        for n in range(count):
            value = {"x": n} if n in lacking else {"x": n, "y": n}
            assert transaction.put(b"%06d" % n, msgpack.packb(value))
    return path


def test_msgpack_maps(tmp_path: Path) -> None:
    path = environment(tmp_path / "in", 300, *range(0, 300, 2))
    assert optional(path) == ["y"]
    np.testing.assert_array_equal(first_batch(path)["x"], [0, 1, 2, 3])
    shardkit.convert(path, "wds", tmp_path / "out", workers=0)
    assert optional(tmp_path / "out") == ["y"]
    few = environment(tmp_path / "few", 2, 0)  # which are all looked at
    assert optional(few) == ["y"]
    with shardkit.open(few) as ds:
        assert [ds[n].get("y") for n in range(2)] == [None, 1]


def test_a_value_without_a_field_that_all_have_that_were_looked_at(tmp_path: Path) -> None:
    path = environment(tmp_path / "in", 300, 152)
    with shardkit.open(path) as ds:
        assert ds[151] == {"__key__": "000151", "x": 151, "y": 151}
        with pytest.raises(SampleError, match="no field 'y'") as error:
            ds[152]
    assert "shardkit convert" in str(error.value.fix)
    shardkit.convert(path, "wds", tmp_path / "out", workers=0)
    assert optional(tmp_path / "out") == ["y"]
    assert len(shardkit.open(tmp_path / "out")) == 300
    assert shardkit.verify(tmp_path / "out", against=path).sound
    shardkit.convert(path, "arrow", tmp_path / "one", workers=0, fields=["y"])
    assert load(tmp_path / "one").fields["y"].count == 299
