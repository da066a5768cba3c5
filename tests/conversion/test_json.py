"""What is written as JSON is JSON: NaN and infinities are none of its numbers."""

from __future__ import annotations

import json
import math
import tarfile
from pathlib import Path
from typing import Any

import pytest

import shardkit
import shardkit.manifest
from shardkit.cli import print_json
from shardkit.errors import SampleError, SourceError
from shardkit.schema import Float, Json, Text
from tests.conftest import write_images
from tests.sources.test_text import put, put_lines

ODD = [math.inf, -math.inf, math.nan]


def strict(text: str | bytes) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_does_not_have_in_a_tar(tmp_path: Path) -> None:
    """They are strings, as Protocol Buffers has them; those of earlier versions are read too."""
    with shardkit.create(tmp_path / "out", "wds", {"score": Float()}) as writer:
        for value in (*ODD, 1.5):
            writer.write({"score": value})
    (path,) = (tmp_path / "out").glob("*.tar")
    with tarfile.open(path) as tar:
        stored = [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]
    assert [strict(data) for data in stored] == ["Infinity", "-Infinity", "NaN", 1.5]
    with shardkit.open(tmp_path / "out") as ds:
        found = [ds[n]["score"] for n in range(4)]
    assert str(found) == str([*ODD, 1.5])
    shardkit.convert(tmp_path / "out", "arrow", tmp_path / "arrow", workers=0)
    assert shardkit.verify(tmp_path / "arrow", against=tmp_path / "out").sound


@pytest.mark.parametrize("to", ["wds", "parquet"])
def test_json_with_such_numbers_is_refused(tmp_path: Path, to: str) -> None:
    with shardkit.create(tmp_path / "out", to, {"about": Json()}) as writer:
        for value in ODD:
            for about in (value, [value], {"n": value}):
                with pytest.raises(SampleError, match="not of its field's type"):
                    writer.write({"about": about})
        writer.write({"about": {"n": 1.0}})


def test_files_beside_images_and_metadata(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "in", classes=1, each=1)
    (image,) = folder.rglob("*.jpg")
    beside = put(image.with_suffix(".json"), '{"n": Infinity}')
    with pytest.raises(SampleError, match="beside an image is damaged") as error:
        shardkit.convert(folder, "wds", tmp_path / "out", workers=0)
    assert error.value.found == "JSON has no number Infinity"
    beside.unlink()
    row = {"file_name": image.name, "score": math.nan, "about": {"n": math.inf}}
    put_lines(image.parent / "metadata.jsonl", [row])
    with pytest.raises(SourceError, match="'about' of the metadata has numbers"):
        shardkit.convert(folder, "wds", tmp_path / "out", workers=0)
    shardkit.convert(folder, "wds", tmp_path / "out", workers=0, drop=["about"])
    assert math.isnan(shardkit.open(tmp_path / "out")[0]["score"])


def test_lines_of_json(tmp_path: Path) -> None:
    source = put_lines(tmp_path / "a.jsonl", [{"text": "a", "x": math.inf, "y": [math.nan]}])
    keep = shardkit.TextOptions(keep_fields=True)
    with pytest.raises(SampleError) as error:
        shardkit.convert(source, "wds", tmp_path / "out", workers=0, text=keep)
    assert error.value.where["field"] == "y"
    result = shardkit.convert(source, "wds", tmp_path / "x", workers=0, text=keep, drop=["y"])
    assert shardkit.open(tmp_path / "x")[0]["x"] == math.inf
    assert strict(json.dumps(result.to_dict()))
    source.write_text(source.read_text() + '{"text": "b", "y": [1]}\n')
    options = {"text": keep, "on_error": "skip"}
    shardkit.convert(source, "wds", tmp_path / "y", workers=0, schema=None, **options)
    manifest = shardkit.manifest.load(tmp_path / "y")
    strict((tmp_path / "y" / manifest.list_named("errors.jsonl").name).read_text())  # type: ignore[union-attr]
    assert manifest.schema["text"] == Text()


def test_json_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"speed": math.inf, "rows": [{"ratio": math.nan}, (1.5, -math.inf)]})
    found = strict(capsys.readouterr().out)
    assert found == {"speed": None, "rows": [{"ratio": None}, [1.5, None]]}
