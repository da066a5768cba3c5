"""`fields` and `drop`: which fields of a source are stored, for every source."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import shardkit
from shardkit.cli import group
from shardkit.errors import FormatError, SampleError, ShardkitError, SourceError, UsageError
from shardkit.manifest import load
from shardkit.schema import Int, Text
from shardkit.testing import make_image
from tests.codecs import tokenizer_zoo
from tests.conftest import few, write_images
from tests.conversion.test_text import by_pyarrow
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
    first = {"text": "a", "label": 1, "id": "x"}
    keep = {"text": shardkit.TextOptions(keep_fields=True)}
    for source in (
        put(tmp_path / "a.csv", "text,label,id\na,1,x\nb,2,y\n"),
        put_lines(tmp_path / "a.jsonl", [first]),
    ):
        for number, (options, expected, counted) in enumerate(
            (
                (keep, ["text", "label", "id"], set()),
                ({"fields": ["label", "text"]}, ["text", "label"], {"'id'"}),
                ({**keep, "drop": ["id"]}, ["text", "label"], {"'id'"}),
                ({"fields": ["label"]}, ["label"], {"'text', 'id'"}),
                ({**keep, "drop": ["text"]}, ["label", "id"], {"'text'"}),
                ({"drop": ["id"]}, ["text"], {"'id'", None}),
            )
        ):
            out = tmp_path / f"{source.name}-{number}"
            assert stored(source, out, **options)[0] == {n: first[n] for n in expected}
            assert load(out).ignored.keys() == {
                f"fields left out as asked: {names}" if names else "values of 'label'"
                for names in counted
            }


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


@pytest.mark.parametrize(
    "to", few(["wds", "lmdb", "arrow", "parquet", "hf", "beton"], "lmdb", "hf")
)
def test_of_datasets_of_all_formats(tmp_path: Path, to: str) -> None:
    samples = [{"label": n, "text": f"{n}", "about": {"n": [n]}} for n in range(3)]
    shardkit.convert(samples, to, tmp_path / "in", workers=0)
    found = stored(tmp_path / "in", tmp_path / "one", drop=["text"])
    assert found == [{"label": n, "about": {"n": [n]}} for n in range(3)]
    found = stored(tmp_path / "in", tmp_path / "two", to, fields=["label"])
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


def test_a_transform_gets_the_selected_fields(tmp_path: Path) -> None:
    samples = [{"label": 1, "id": 2}, {"label": 3, "id": 4}]
    found = stored(samples, tmp_path / "x", drop=["id"], transform=lambda s: {**s, "new": len(s)})
    assert found == [{"label": 1, "new": 2}, {"label": 3, "new": 2}]


# --- columns that no field can hold ---------------------------------------------------------------


@pytest.mark.parametrize("to", ["arrow", "parquet"])
def test_a_column_that_no_field_can_hold_is_not_the_end(tmp_path: Path, to: str) -> None:
    odd = {"when, exactly": [datetime.timedelta(1)] * 2, "__url__": ["x", "y"]}
    path = by_pyarrow(tmp_path, to, {"text": ["a", "b"], **odd})
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
    for name, value in (("a", 1), ("b", "x")):
        by_pyarrow(tmp_path / "in", "arrow", {"text": [name], "other": [value]}, name)
    with pytest.raises(FormatError, match="differs between shards") as caught:
        stored(tmp_path / "in", tmp_path / "out")
    assert fix_of(caught.value) == ["--drop", "other"]
    found = stored(tmp_path / "in", tmp_path / "out", drop=["other"])
    assert found == [{"text": "a"}, {"text": "b"}]


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


def test_names_that_are_unknown_or_contradict_each_other_are_refused(tmp_path: Path) -> None:
    table = put(tmp_path / "a.csv", "text,label\na,1\n")
    images = write_images(tmp_path / "in", classes=1, each=1)
    two = [{"a": 1, "b": 2}]
    keep = shardkit.TextOptions(keep_fields=True)
    for source, options, message in (
        (table, {"drop": ["lable"]}, "no field 'lable'"),
        (table, {"fields": ["text", "lable"]}, "no field 'lable'"),
        (two, {"drop": ["c"]}, "no field 'c'"),
        (images, {"drop": ["mask"]}, "no field 'mask'"),
        (images, {"drop": ["image", "label"]}, "no field of the source would be stored"),
        (images, {"fields": []}, "no field of the source would be stored"),
        (two, {"fields": ["a"], "drop": ["b"]}, "cannot be combined"),
        (two, {"fields": ["a"], "text": keep}, "cannot be combined"),
        (two, {"fields": "a"}, "must be a list of names"),
        (two, {"drop": "a"}, "must be a list of names"),
        (two, {"drop": [1]}, "must be a list of names"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            stored(source, tmp_path / "out", **options)
        if "lable" in message:
            assert caught.value.expected == "one of text, label; did you mean label?"


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
