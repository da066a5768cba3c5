"""`fields` and `drop`: which fields of a source are stored, for every source."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import shardkit
from shardkit.cli import group
from shardkit.errors import FormatError, SampleError, ShardkitError, SourceError, UsageError
from shardkit.manifest import load
from shardkit.schema import Int, Text
from shardkit.testing import make_image
from tests.codecs import tokenizer_zoo
from tests.conftest import write_images
from tests.sources.test_text import put, put_lines


def command(*words: object) -> None:
    """What is typed; raises our errors as the command line prints them."""
    found = CliRunner().invoke(group, ["convert", *map(str, words), "--workers", "0", "--quiet"])
    if found.exception is not None:
        raise found.exception


def fix_of(error: ShardkitError) -> list[str]:
    """The words of the option that an error proposes."""
    assert error.fix is not None
    assert "--drop" in error.fix
    return shlex.split("--drop" + error.fix.partition("--drop")[2].partition(", or ")[0])


def stored(source: Any, out: Path, to: str = "wds", **options: Any) -> list[dict[str, Any]]:
    shardkit.convert(source, to, out, workers=0, **options)
    with shardkit.open(out) as ds:
        samples = [ds[n] for n in range(len(ds))]
        assert all(sample.keys() <= {"__key__", *ds.schema} for sample in samples)
    if isinstance(source, Path):
        assert shardkit.verify(out, against=source, decode=True).problems == []
    return [{n: v for n, v in sample.items() if n != "__key__"} for sample in samples]


# --- every source ---------------------------------------------------------------------------------


def test_of_tables_and_json_lines(tmp_path: Path) -> None:
    table = put(tmp_path / "a.csv", "text,label,id\na,1,x\nb,2,y\n")
    lines = put_lines(tmp_path / "a.jsonl", [{"text": "a", "label": 1, "id": "x"}])
    keep = shardkit.TextOptions(keep_fields=True)
    for number, source in enumerate((table, lines)):
        first = {"text": "a", "label": 1, "id": "x"}
        for name, expected, options in (
            ("all", ["text", "label", "id"], {"text": keep}),
            ("some", ["text", "label"], {"fields": ["label", "text"]}),
            ("others", ["text", "label"], {"text": keep, "drop": ["id"]}),
            ("one", ["label"], {"fields": ["label"]}),
            ("no text", ["label", "id"], {"text": keep, "drop": ["text"]}),
            ("text", ["text"], {"drop": ["id"]}),
        ):
            out = tmp_path / f"{name}-{number}"
            assert stored(source, out, **options)[0] == {n: first[n] for n in expected}
            asked = {"values of 'label'"} if name == "text" else set()
            if options != {"text": keep}:
                left = [
                    repr(n) for n in first if n not in expected and f"values of {n!r}" not in asked
                ]
                asked.add(f"fields left out as asked: {', '.join(left)}")
            assert load(out).ignored.keys() == asked


def test_of_a_folder_of_images_with_metadata(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "in", classes=2, each=2)
    for path in folder.rglob("*.jpg"):
        path.with_name(path.stem + "_mask.png").write_bytes(make_image(format="PNG"))
        path.with_suffix(".json").write_text("{damaged")
    rows = "".join(f"{p.relative_to(folder)},{n},x\n" for n, p in enumerate(folder.rglob("*.jpg")))
    put(folder / "metadata.csv", f"file_name,number,note\n{rows}")
    with pytest.raises(SampleError, match="beside an image is damaged"):
        stored(folder, tmp_path / "all")
    samples = stored(folder, tmp_path / "one", drop=["json", "note", "label"])
    assert [list(sample) for sample in samples] == [["image", "mask", "number"]] * 4
    assert load(tmp_path / "one").classes is None
    samples = stored(folder, tmp_path / "two", fields=["label", "number"], rename={"label": "y"})
    assert [list(sample) for sample in samples] == [["y", "number"]] * 4
    assert load(tmp_path / "two").label_counts == (2, 2)


def test_of_splits_of_which_one_has_no_such_field(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_images(folder / "train", classes=1, each=1)
    write_images(folder / "val", classes=1, each=1)
    next((folder / "val").rglob("*.jpg")).with_suffix(".txt").write_text("words")
    shardkit.convert(folder, "wds", tmp_path / "out", workers=0, drop=["text"])
    for split in ("train", "val"):
        assert list(load(tmp_path / "out" / split).schema) == ["image", "label"]
    assert shardkit.verify(tmp_path / "out", against=folder).sound


@pytest.mark.parametrize("some_format", ["wds", "lmdb", "arrow", "parquet", "hf", "beton"])
def test_of_datasets_of_all_formats(tmp_path: Path, some_format: str) -> None:
    samples = [{"label": n, "text": f"{n}", "about": {"n": [n]}} for n in range(3)]
    shardkit.convert(samples, some_format, tmp_path / "in", workers=0)
    found = stored(tmp_path / "in", tmp_path / "one", drop=["text"])
    assert found == [{"label": n, "about": {"n": [n]}} for n in range(3)]
    found = stored(tmp_path / "in", tmp_path / "two", some_format, fields=["label"])
    assert found == [{"label": n} for n in range(3)]


def test_of_a_sequence_also_of_what_no_field_can_hold(tmp_path: Path) -> None:
    samples = [{"label": n, "when": datetime.date(2000, 1, 1), "x": 1.0} for n in range(3)]
    with pytest.raises(SampleError, match="no field can hold") as caught:
        stored(samples, tmp_path / "out")
    assert "drop=['when']" in str(caught.value.fix)
    assert stored(samples, tmp_path / "one", drop=["when"])[2] == {"label": 2, "x": 1.0}
    assert stored(samples, tmp_path / "two", fields=["x"])[2] == {"x": 1.0}
    samples[2]["more"] = 1
    schema = {"label": Int(), "x": shardkit.Float()}
    with pytest.raises(SampleError, match="does not name: 'more'"):
        stored(samples, tmp_path / "three", drop=["when"])
    assert stored(samples, tmp_path / "four", schema=schema, fields=["x"])[2] == {"x": 1.0}


def test_of_tokens(tmp_path: Path) -> None:
    gpt2 = tokenizer_zoo.write_json(tmp_path, "gpt2")
    lines = put_lines(
        tmp_path / "a.jsonl", [{"text": "words", "label": n, "id": 1} for n in (3, 4)]
    )
    text = shardkit.TextOptions(tokenizer=gpt2)
    samples = stored(lines, tmp_path / "out", text=text, fields=["text", "label"])
    assert [list(sample) for sample in samples] == [["tokens", "label"]] * 2
    blocks = shardkit.TextOptions(tokenizer=gpt2, seq_len=4)
    with pytest.raises(UsageError, match="cannot store their other fields"):
        stored(lines, tmp_path / "x", text=blocks, fields=["text", "label"])
    with pytest.raises(UsageError, match="no text field"):
        stored(lines, tmp_path / "x", text=text, fields=["label"])
    samples = stored(lines, tmp_path / "blocks", text=blocks, drop=["label"])
    assert list(samples[0]) == ["tokens", "doc_ends"]


def add(sample: dict[str, Any]) -> dict[str, Any]:
    assert "id" not in sample
    return {**sample, "added": 1}


def test_a_transform_gets_the_selected_fields(tmp_path: Path) -> None:
    samples = [{"label": 1, "id": 2}, {"label": 3, "id": 4}]
    found = stored(samples, tmp_path / "out", drop=["id"], transform=add)
    assert found == [{"label": 1, "added": 1}, {"label": 3, "added": 1}]


# --- columns that no field can hold ---------------------------------------------------------------


@pytest.mark.parametrize("to", ["arrow", "parquet"])
def test_a_column_that_no_field_can_hold_is_not_the_end(tmp_path: Path, to: str) -> None:
    columns = {
        "text": ["a", "b"],
        "when, exactly": [datetime.timedelta(1)] * 2,
        "__url__": ["x", "y"],
    }
    table = pa.table(columns)
    path = tmp_path / f"in.{to}"
    if to == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    with pytest.raises(FormatError):
        shardkit.open(path)
    options: list[str] = []
    for _ in range(2):  # typing what the errors propose is enough
        with pytest.raises(FormatError) as caught:
            command(path, "--to", "wds", "-o", tmp_path / "out", *options)
        options += fix_of(caught.value)
    command(path, "--to", "wds", "-o", tmp_path / "out", *options)
    assert list(load(tmp_path / "out").schema) == ["text"]
    assert shardkit.verify(tmp_path / "out", against=path).sound
    assert stored(path, tmp_path / "two", fields=["text"]) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(FormatError):
        stored(path, tmp_path / "x", fields=["__url__"])


def test_a_column_of_two_types_is_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, value in (("a", 1), ("b", "x")):
        table = pa.table({"text": [name], "other": [value]})
        with pa.ipc.new_file(tmp_path / f"in/{name}.arrow", table.schema) as file:
            file.write_table(table)
    with pytest.raises(FormatError, match="differs between shards") as caught:
        stored(tmp_path / "in", tmp_path / "out")
    assert fix_of(caught.value) == ["--drop", "other"]
    assert stored(tmp_path / "in", tmp_path / "out", drop=["other"]) == [
        {"text": "a"},
        {"text": "b"},
    ]


def test_a_column_of_metadata_that_no_field_can_be_called(tmp_path: Path) -> None:
    """Such as the index without a name that pandas writes."""
    folder = write_images(tmp_path / "in", classes=1, each=1)
    (name,) = (p.relative_to(folder) for p in folder.rglob("*.jpg"))
    put(folder / "metadata.csv", f",file_name,n\n0,{name},1\n")
    with pytest.raises(SourceError, match="a column ''") as caught:
        command(folder, "--to", "wds", "-o", tmp_path / "out")
    command(folder, "--to", "wds", "-o", tmp_path / "out", *fix_of(caught.value))
    assert list(load(tmp_path / "out").schema) == ["image", "n"]


def test_values_and_fields_that_the_first_documents_do_not_foretell(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "a", "n": 1, "m": 2}] * 120
    rows += [{"text": "b", "n": "x", "m": 2}, {"text": "c", "n": 1, "new": 2}]
    lines = put_lines(tmp_path / "a.jsonl", rows)
    options: list[str] = []
    for _ in range(2):
        with pytest.raises(SampleError) as caught:
            command(lines, "--to", "wds", "-o", tmp_path / "out", "--keep-fields", *options)
        options += fix_of(caught.value)
    assert options == ["--drop", "n", "--drop", "new"]
    command(lines, "--to", "wds", "-o", tmp_path / "out", "--keep-fields", *options)
    assert list(load(tmp_path / "out").schema) == ["text", "m"]
    assert shardkit.verify(tmp_path / "out", against=lines).sound


# --- what is refused ------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_those_that_there_are(tmp_path: Path) -> None:
    table = put(tmp_path / "a.csv", "text,label\na,1\n")
    for options in ({"drop": ["lable"]}, {"fields": ["text", "lable"]}):
        with pytest.raises(UsageError, match="no field 'lable'") as caught:
            stored(table, tmp_path / "out", **options)
        assert caught.value.expected == "one of text, label; did you mean label?"
    with pytest.raises(UsageError, match="no field 'b'"):
        stored([{"a": 1}], tmp_path / "out", drop=["b"])
    images = write_images(tmp_path / "in", classes=1, each=1)
    with pytest.raises(UsageError, match="no field 'mask'"):
        stored(images, tmp_path / "out", drop=["mask"])
    with pytest.raises(UsageError, match="no field of the source would be stored"):
        stored(images, tmp_path / "out", drop=["image", "label"])
    with pytest.raises(UsageError, match="no field of the source would be stored"):
        stored(images, tmp_path / "out", fields=[])


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    source = [{"a": 1, "b": 2}]
    with pytest.raises(UsageError, match="cannot be combined"):
        stored(source, tmp_path / "out", fields=["a"], drop=["b"])
    with pytest.raises(UsageError, match="cannot be combined"):
        stored(source, tmp_path / "x", fields=["a"], text=shardkit.TextOptions(keep_fields=True))
    for options in ({"fields": "a"}, {"drop": "a"}, {"drop": [1]}):
        with pytest.raises(UsageError, match="must be a list of names"):
            stored(source, tmp_path / "out", **options)


def test_another_selection_is_another_dataset(tmp_path: Path) -> None:
    table = put(tmp_path / "a.csv", "text,label,id\na,1,x\n")
    command(table, "--to", "wds", "-o", tmp_path / "out", "--fields", "text,label")
    command(table, "--to", "wds", "-o", tmp_path / "out", "--fields", "text", "--fields", "label")
    with pytest.raises(shardkit.OutputError) as caught:
        command(table, "--to", "wds", "-o", tmp_path / "out", "--fields", "text")
    assert "fields was ['label', 'text']" in str(caught.value)


def test_verify_compares_copies_that_were_selected_alike(tmp_path: Path) -> None:
    source = [{"text": "a", "label": 1, "id": 2}]
    schema = {"text": Text(), "label": Int(), "id": Int()}
    for name, to in (("one", "wds"), ("two", "arrow")):
        stored(source, tmp_path / name, to, schema=schema, drop=["id"], rename={"label": "y"})
    assert shardkit.verify(tmp_path / "one", against=tmp_path / "two").sound
    stored(source, tmp_path / "three", schema=schema, fields=["text", "label"])
    stored(source, tmp_path / "four", schema=schema, drop=["id"])
    assert shardkit.verify(tmp_path / "three", against=tmp_path / "four").sound
