"""Errors that say what to do in Python or with files: it works as it is said."""

import bz2
import gzip
import io
import json
import lzma
import re
import shlex
import shutil
import struct
from importlib.util import find_spec
from typing import Any

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit import TextOptions
from shardkit.codecs import packed_images
from shardkit.errors import (
    FormatError,
    OutputError,
    SampleError,
    ShardkitError,
    ShardkitWarning,
    UsageError,
)
from shardkit.testing import make_image

WORDS = b"some text, and more of it\n" * 50


def _convert(source, out, **options: Any) -> Any:
    return shardkit.convert(source, to="arrow", out=out, workers=0, **options)


@pytest.mark.parametrize(
    ("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)]
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_compressed_text_under_another_name(suffix, compress, name, encoding, tmp_path):
    lines = {"a.jsonl": b'{"text": "a"}\n' * 50, "a.csv": b"text\n" + b"a\n" * 50}
    path = tmp_path / "d" / name
    path.parent.mkdir()
    path.write_bytes(compress(lines.get(name, WORDS)))
    text = TextOptions(encoding=encoding, documents="line")
    for source in (path, path.parent):
        with pytest.raises(ShardkitError, match="the file is compressed") as error:
            _convert(source, tmp_path / "o", text=text)
    path.rename(path.with_name(str(error.value.fix).removeprefix("rename it to ")))
    assert _convert(path.parent, tmp_path / "o", text=text).samples == 50


def test_plain_ppm_is_read_as_pillow_reads_it(tmp_path):
    texts = {"a": "P3\n2 1\n255\n255 0 0 9 9 9\n", "b": "P2\n2 1\n255\n7 9\n", "c": "P1 2 1\n1 0\n"}
    (tmp_path / "d").mkdir()
    for name, text in texts.items():
        (tmp_path / "d" / f"{name}.ppm").write_text(text)
    _convert(tmp_path / "d", tmp_path / "o")
    for sample in shardkit.open(tmp_path / "o", transforms={"image": shardkit.Decode()}):
        expected = PIL.Image.open(tmp_path / "d" / f"{sample['__key__']}.ppm").convert("RGB")
        assert np.array_equal(sample["image"], np.asarray(expected))


@pytest.mark.parametrize("format", ["AVIF", "JPEG2000"])
def test_images_in_other_formats_are_called_so(format, tmp_path):
    data, image = io.BytesIO(), PIL.Image.new("RGB", (16, 16))
    try:
        image.save(data, format)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow does not write {format}")
    (tmp_path / "d").mkdir()
    path = tmp_path / "d" / "a.jpg"
    path.write_bytes(data.getvalue())
    with pytest.raises(ShardkitError, match="in a format that cannot be read") as error:
        _convert(path.parent, tmp_path / "o")
    code = re.search(r"PIL.Image.open\(FILE\).save\(OUT\)", str(error.value.fix))
    assert code is not None
    exec(code[0], {"PIL": PIL, "FILE": path, "OUT": path.with_suffix(".png")})
    path.unlink()
    assert _convert(path.parent, tmp_path / "o").samples == 1


def test_another_option_is_no_change_of_the_source(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,n\na,1\n")
    _convert(path, tmp_path / "o")
    with pytest.raises(OutputError) as error:
        _convert(path, tmp_path / "o", text=TextOptions(keep_fields=True))
    assert error.value.found == "keep_fields was False, is True"
    path.write_text("text,n\nab,1\n")
    with pytest.raises(OutputError, match="the source has changed"):
        _convert(path, tmp_path / "o")


def test_a_value_inside_json_is_suggested(tmp_path):
    rows = [{"meta": {"similarity": n / 10}, "n": n} for n in range(4)]
    with pytest.raises(UsageError) as error:
        _convert(rows, tmp_path / "o", where="similarity > 0.1")
    typed = re.search(r"meta\.similarity", str(error.value.expected))
    assert typed is not None
    result = _convert(rows, tmp_path / "o", where=f"{typed[0]} > 0.1")
    assert result.samples == 2


def test_a_compressed_table_under_another_name(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.png").write_bytes(make_image(3))
    table = tmp_path / "t.csv"
    table.write_bytes(gzip.compress(b"file_name,n\na.png,1\n"))
    with pytest.raises(ShardkitError, match="the file is compressed") as error:
        _convert(tmp_path / "d", tmp_path / "o", metadata=table)
    table = table.rename(table.with_name(str(error.value.fix).removeprefix("rename it to ")))
    _convert(tmp_path / "d", tmp_path / "o", metadata=table)
    assert [s["n"] for s in shardkit.open(tmp_path / "o")] == [1]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("A", "wds"), ("a/b c", "wds"), ("n" * 17, "beton"), ("__absent__", "mds"),
        ("a.b", "lance"),
    ],
)  # fmt: skip
def test_a_name_that_a_format_cannot_hold(name, format, tmp_path):
    if format == "lance" and find_spec("lance") is None:  # importing it here would warn of forks
        pytest.skip("pylance is not installed")
    rows, schema = [{name: 1, "t": "x"}], {name: shardkit.Int(), "t": shardkit.Text()}
    options = {"schema": schema, "workers": 0}
    with pytest.raises(FormatError) as error:
        shardkit.convert(rows, format, tmp_path / "o", **options)
    assert error.value.fix is not None
    assert error.value.fix.startswith("rename it: --rename ")
    old, _, new = shlex.split(error.value.fix)[-1].partition("=")
    assert (old, new) == (name, {"A": "a", "a/b c": "a_b c"}.get(name, "NAME"))
    done = shardkit.convert(rows, format, tmp_path / "o", **options, rename={old: new.lower()})
    assert done.samples == 1


@pytest.mark.parametrize(
    ("optional", "format"), [(False, "wds"), (False, "beton"), (True, "litdata")]
)
def test_lists_of_images_that_a_format_cannot_hold(optional, format, tmp_path):
    rows = [{"x": [make_image(1)], "n": 1}]
    schema = {"x": shardkit.Images(optional=optional), "n": shardkit.Int()}
    with pytest.raises(FormatError, match="list") as error:
        shardkit.convert(rows, format, tmp_path / "o", schema=schema, workers=0)
    assert "convert without it: --drop x" in str(error.value.fix)
    shardkit.convert(rows, format, tmp_path / "o", schema=schema, drop=["x"], workers=0)


def test_half_of_a_surrogate_pair_is_called_so(tmp_path):
    rows = [{"t": "\ud800"}, {"t": "x"}]
    options = {"schema": {"t": shardkit.Text()}, "workers": 0}
    with pytest.raises(SampleError) as error:
        shardkit.convert(rows, "wds", tmp_path / "o", **options)
    assert "half of a surrogate pair" in str(error.value.found)
    assert "--on-error skip" in str(error.value.fix)
    done = shardkit.convert(rows, "wds", tmp_path / "o", on_error="skip", **options)
    assert done.samples == 1


def mds(folder, encoding, values):
    """Write a dataset as MDSWriter does, of a column `x` with these stored values and one `n`."""
    names = ["n", "x"]
    columns = {"column_encodings": ["int", encoding], "column_names": names}
    columns["column_sizes"] = [8, None]
    header = json.dumps({**columns, "format": "mds", "version": 2}).encode()
    rows = [struct.pack("<Iq", len(x), n) + x for n, x in enumerate(values)]
    ends = np.cumsum([4 * (len(rows) + 2) + len(header), *map(len, rows)])
    shard = np.array([len(rows), *ends], "<u4").tobytes() + header + b"".join(rows)
    folder.mkdir()
    (folder / "shard.00000.mds").write_bytes(shard)
    raw = {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}
    about = {**columns, "compression": None, "format": "mds", "hashes": [], "raw_data": raw}
    about |= {"samples": len(rows), "size_limit": None, "version": 2, "zip_data": None}
    (folder / "index.json").write_text(json.dumps({"shards": [about], "version": 2}))


def litdata(folder, values):
    """Write a dataset of LitData, whose `x` is text."""
    schema = {"x": shardkit.Text(), "n": shardkit.Int()}
    with shardkit.create(folder, "litdata", schema) as out:
        for n, x in enumerate(values):
            out.write({"__key__": f"{n}", "x": "x" * len(x), "n": n})
    (chunk,) = folder.glob("*.bin")
    data = chunk.read_bytes()
    for x in values:
        data = data.replace(b"x" * len(x), x, 1)
    chunk.write_bytes(data)
    shutil.rmtree(folder / "__shardkit__")


HSV = struct.pack("<3I", 5, 4, 3) + b"HSV" + bytes(60)
L = struct.pack("<3I", 5, 4, 1) + b"L" + bytes(20)
VALUES = {
    "str_int": (b"7", b"1" + b"0" * 30, "a number of 100 bits is not between", None),
    "int ": (b"7", b"1.5", "damaged: invalid literal .* b'1.5'", None),
    "str": (b"ok", b"ok\xff", "damaged: .*utf-8", r"b'ok\xff'"),
    "json": (b"{}", b"{'a': 1}", "damaged: .*double quotes", "\"{'a': 1}\""),
    "json ": (b"{}", b'{"a": NaN}', "cannot be kept: JSON has no number NaN", None),
    "pil": (L, HSV, "cannot be kept: the image has Pillow's mode 'HSV'", None),
    "litdata": (b"texts", b"te\xff\xff", "damaged: .*utf-8", r"b'te\xff\xff'"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_other_libraries_wrote(name, tmp_path):
    sound, bad, what, found = VALUES[name]
    if name == "litdata":
        litdata(tmp_path / "d", [sound, bad])
    else:
        mds(tmp_path / "d", {"int ": "str_int"}.get(name, name.strip()), [sound, bad])
    with pytest.raises(SampleError, match=what) as error:
        _convert(tmp_path / "d", tmp_path / "o")
    where = error.value.where
    assert (where["position"], where["field"], error.value.found) == (1, "x", found)
    assert error.value.expected is not None
    fix = str(error.value.fix)
    assert "--drop x" in fix
    assert "--on-error skip" in fix
    assert _convert(tmp_path / "d", tmp_path / "p", drop=["x"]).samples == 2
    assert _convert(tmp_path / "d", tmp_path / "q", on_error="skip").samples == 1


def test_images_without_their_palette(tmp_path):
    palette = struct.pack("<3I", 2, 1, 1) + b"P\7\x09"
    mds(tmp_path / "d", "pil", [palette])
    packed_images.warn_of_palettes.cache_clear()
    with pytest.warns(ShardkitWarning, match="stored without it"):
        (sample,) = shardkit.open(tmp_path / "d")
    assert np.asarray(PIL.Image.open(io.BytesIO(sample["x"]))).tolist() == [[7, 9]]


def test_a_list_of_images_that_litdata_cannot_hold(tmp_path):
    rows = [{"x": [make_image(1)], "n": 1}, {"x": [], "n": 2}]
    options = {"schema": {"x": shardkit.Images(), "n": shardkit.Int()}, "workers": 0}
    with pytest.raises(SampleError, match="cannot read an empty list") as error:
        shardkit.convert(rows, "litdata", tmp_path / "o", **options)
    assert "--drop x" in str(error.value.fix)
    assert "--on-error skip" in str(error.value.fix)
    for more in ({"drop": ["x"]}, {"on_error": "skip"}):
        shardkit.convert(rows, "litdata", tmp_path / f"{more}", **options, **more)
