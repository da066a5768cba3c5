"""What is written as JSON is JSON: NaN and infinities are none of its numbers."""

import json
import math
import tarfile

import pytest

import shardkit
import shardkit.metadata.manifest
from shardkit.cli import print_json
from shardkit.errors import SampleError, SourceError
from shardkit.schema import Float, Json, Text
from tests.conftest import write_images
from tests.sources.test_text import put, put_lines

ODD = [math.inf, -math.inf, math.nan]


def strict(text):
    def refuse(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_does_not_have_in_a_tar(tmp_path):
    """They are strings, as Protocol Buffers has them; those of earlier versions are read too."""
    with shardkit.create(tmp_path / "out", "wds", {"score": Float()}) as writer:
        for value in (*ODD, 1.5):
            writer.write({"score": value})
    (path,) = (tmp_path / "out").glob("*.tar")
    with tarfile.open(path) as tar:
        stored = [tar.extractfile(member).read() for member in tar]
    assert [strict(data) for data in stored] == ["Infinity", "-Infinity", "NaN", 1.5]
    with shardkit.open(tmp_path / "out") as ds:
        found = [ds[n]["score"] for n in range(4)]
    assert str(found) == str([*ODD, 1.5])
    shardkit.convert(tmp_path / "out", "arrow", tmp_path / "arrow", workers=0)
    assert shardkit.verify(tmp_path / "arrow", against=tmp_path / "out").sound


@pytest.mark.parametrize("to", ["wds", "parquet"])
def test_what_json_cannot_give_back_is_refused(out, to):
    with shardkit.create(out, to, {"about": Json()}) as writer:
        odd = [about for value in ODD for about in (value, [value], {"n": value})]
        for about in (*odd, {"a": {1, 2}}, {1: "x"}, [(1, 2)], "\udcff"):
            with pytest.raises(SampleError, match="not of its field's type"):
                writer.write({"about": about})
        writer.write({"about": {"n": 1.0}})


def test_files_beside_images_and_metadata(tmp_path, out):
    folder = write_images(tmp_path / "in", classes=1, each=1)
    beside = put(folder / "class0/000.json", '{"n": Infinity}')
    with pytest.raises(SampleError, match="file of a field is damaged") as error:
        shardkit.convert(folder, "wds", out, workers=0)
    assert error.value.found == "JSON has no number Infinity"
    beside.unlink()
    row = {"file_name": "000.jpg", "score": math.nan, "about": {"n": math.inf}}
    put_lines(folder / "class0/metadata.jsonl", [row])
    with pytest.raises(SourceError, match="'about' of the metadata has numbers"):
        shardkit.convert(folder, "wds", out, workers=0)
    shardkit.convert(folder, "wds", out, workers=0, drop=["about"])
    assert math.isnan(shardkit.open(out)[0]["score"])


def test_lines_of_json(tmp_path):
    source = put_lines(tmp_path / "a.jsonl", [{"text": "a", "x": math.inf, "y": [math.nan, "x"]}])
    options = {"workers": 0, "text": shardkit.TextOptions(keep_fields=True)}
    with pytest.raises(SampleError) as error:
        shardkit.convert(source, "wds", tmp_path / "out", **options)
    assert error.value.where["field"] == "y"
    result = shardkit.convert(source, "wds", tmp_path / "x", drop=["y"], **options)
    assert shardkit.open(tmp_path / "x")[0]["x"] == math.inf
    assert strict(json.dumps(result.to_dict()))
    source.write_text(source.read_text() + '{"text": "b", "y": [1, "x"]}\n')
    shardkit.convert(source, "wds", tmp_path / "y", schema=None, on_error="skip", **options)
    manifest = shardkit.metadata.manifest.load(tmp_path / "y")
    strict((tmp_path / "y" / manifest.list_named("errors.jsonl").name).read_text())
    assert manifest.schema["text"] == Text()


def test_json_on_the_command_line(capsys):
    print_json({"speed": math.inf, "rows": [{"ratio": math.nan}, (1.5, -math.inf)]})
    found = strict(capsys.readouterr().out)
    assert found == {"speed": None, "rows": [{"ratio": None}, [1.5, None]]}
