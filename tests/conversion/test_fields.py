"""Which fields of a source are stored, and are optional; what an error proposes to type works."""

import datetime
import re
import shlex
from pathlib import Path

import lmdb
import msgpack
import numpy as np
import pytest
from click.testing import CliRunner

import shardkit
import shardkit.stream
from shardkit.cli import group
from shardkit.errors import FormatError, OutputError, SampleError, SourceError, UsageError
from shardkit.metadata.manifest import load
from shardkit.schema import Int
from shardkit.testing import make_image
from tests.conftest import few, write_images
from tests.conversion.conftest import raised
from tests.conversion.test_text import by_pyarrow
from tests.sources.test_text import put, put_lines


def command(*words):
    """What is typed, and what it says; raises our errors as the command line prints them."""
    found = CliRunner().invoke(group, ["convert", *map(str, words), "--workers", "0"])
    if found.exception is not None:
        raise found.exception
    return found.output


def fix_of(error):
    """The words of the option that an error proposes."""
    assert "--drop" in error.fix
    return shlex.split("--drop" + error.fix.partition("--drop")[2].partition(", or ")[0])


def typed(kind, source, out, *options):
    """Type what errors of a kind propose, which is enough in the end; the options proposed."""
    proposed = []
    for _ in range(3):
        try:
            command(source, "--to", "wds", "-o", out, *options, *proposed)
        except kind as error:
            proposed += fix_of(error)
        else:
            return proposed
    raise AssertionError(proposed)


def stored(source, out, to="wds", **options):
    shardkit.convert(source, to, out, workers=0, **options)
    with shardkit.open(out) as ds:
        samples = [ds[n] for n in range(len(ds))]
        assert all(sample.keys() <= {"__key__", *ds.schema} for sample in samples)
    if isinstance(source, Path):
        assert shardkit.verify(out, against=source, decode=True).problems == []
    return [{n: v for n, v in sample.items() if n != "__key__"} for sample in samples]


def test_of_tables_and_json_lines(tmp_path):
    first = {"text": "a", "label": 1, "id": "x"}
    text = {"text": shardkit.TextOptions(field="text")}
    keep = {"text": shardkit.TextOptions(field="text", keep_fields=True)}
    for source in (
        put(tmp_path / "a.csv", "text,label,id\na,1,x\nb,2,y\n"),
        put_lines(tmp_path / "a.jsonl", [first]),
    ):
        for number, (options, expected, counted) in enumerate(
            (
                ({}, ["text", "label", "id"], set()),
                (keep, ["text", "label", "id"], set()),
                ({"fields": ["label", "text"]}, ["text", "label"], {"'id'"}),
                ({**text, "fields": ["label"]}, ["label"], {"'text', 'id'"}),
                ({**keep, "drop": ["id"]}, ["text", "label"], {"'id'"}),
                ({"fields": ["label"]}, ["label"], {"'text', 'id'"}),
                ({**keep, "drop": ["text"]}, ["label", "id"], {"'text'"}),
                ({**text, "drop": ["id"]}, ["text"], {"'id'", None}),
            )
        ):
            out = tmp_path / f"{source.name}-{number}"
            assert stored(source, out, **options)[0] == {n: first[n] for n in expected}
            assert load(out).ignored.keys() == {
                f"fields dropped as asked: {names}" if names else "values of 'label'"
                for names in counted
            }


def test_of_a_folder_of_images_with_metadata(tmp_path):
    folder = write_images(tmp_path / "in", classes=2, each=2)
    for path in folder.rglob("*.jpg"):
        path.with_name(path.stem + "_mask.png").write_bytes(make_image(format="PNG"))
        path.with_suffix(".json").write_text("{damaged")
    rows = "".join(f"{p.relative_to(folder)},{n},x\n" for n, p in enumerate(folder.rglob("*.jpg")))
    put(folder / "metadata.csv", f"file_name,number,note\n{rows}")
    raised(SampleError, "file of a field is damaged", stored, folder, tmp_path / "all")
    samples = stored(folder, tmp_path / "one", drop=["json", "note", "label"])
    assert [list(sample) for sample in samples] == [["image", "mask", "number"]] * 4
    assert load(tmp_path / "one").classes is None
    samples = stored(folder, tmp_path / "two", fields=["label", "number"], rename={"label": "y"})
    assert [list(sample) for sample in samples] == [["y", "number"]] * 4
    assert load(tmp_path / "two").label_counts == (2, 2)


def test_of_splits_of_which_one_has_no_such_field(tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / "in" / split, classes=1, each=1)
    put(tmp_path / "in/val/class0/000.txt", "words")
    shardkit.convert(tmp_path / "in", "wds", tmp_path / "out", workers=0, drop=["text"])
    for split in ("train", "val"):
        assert list(load(tmp_path / "out" / split).schema) == ["image", "label"]
    assert shardkit.verify(tmp_path / "out", against=tmp_path / "in").sound


@pytest.mark.parametrize(
    "to", few(["wds", "lmdb", "arrow", "parquet", "hf", "beton"], "lmdb", "hf")
)
def test_of_datasets_of_all_formats(tmp_path, to):
    samples = [{"label": n, "text": f"{n}", "about": {"n": [n]}} for n in range(3)]
    shardkit.convert(samples, to, tmp_path / "in", workers=0)
    found = stored(tmp_path / "in", tmp_path / "one", drop=["text"])
    assert found == [{"label": n, "about": {"n": [n]}} for n in range(3)]
    found = stored(tmp_path / "in", tmp_path / "two", to, fields=["label"])
    assert found == [{"label": n} for n in range(3)]


def test_of_a_sequence_also_of_what_no_field_can_hold(tmp_path):
    samples = [{"label": n, "when": {n}, "x": 1.0} for n in range(3)]
    caught = raised(SampleError, "no field can hold", stored, samples, tmp_path / "out")
    assert "drop=['when']" in str(caught.fix)
    assert stored(samples, tmp_path / "one", drop=["when"])[2] == {"label": 2, "x": 1.0}
    assert stored(samples, tmp_path / "two", fields=["x"])[2] == {"x": 1.0}
    # Copies that were selected alike are equal, however that was said.
    both = {"fields": ["label", "x"], "rename": {"label": "y"}}
    for name, options in (("a", both), ("b", both), ("one again", {"fields": ["label", "x"]})):
        stored(samples, tmp_path / name, "wds" if name == "a" else "arrow", **options)
    for one, other in (("a", "b"), ("one", "one again")):
        assert shardkit.verify(tmp_path / one, against=tmp_path / other).sound
    samples[2]["more"] = 1
    schema = {"label": Int(), "x": shardkit.Float()}
    raised(SampleError, "does not name: 'more'", stored, samples, tmp_path / "three", drop=["when"])
    assert stored(samples, tmp_path / "four", schema=schema, fields=["x"])[2] == {"x": 1.0}


def test_of_tokens(tmp_path, gpt2):
    rows = [{"text": "words", "label": n, "id": 1} for n in (3, 4)]
    lines = put_lines(tmp_path / "a.jsonl", rows)
    text = shardkit.TextOptions(tokenizer=gpt2)
    samples = stored(lines, tmp_path / "out", text=text, fields=["text", "label"])
    assert [list(sample) for sample in samples] == [["tokens", "label"]] * 2
    blocks = shardkit.TextOptions(tokenizer=gpt2, seq_len=4)
    with pytest.raises(UsageError, match="cannot store their other fields"):
        stored(lines, tmp_path / "x", text=blocks, fields=["text", "label"])
    raised(UsageError, "no text field", stored, lines, tmp_path / "x", text=text, fields=["label"])
    samples = stored(lines, tmp_path / "blocks", text=blocks, drop=["label"])
    assert list(samples[0]) == ["tokens", "doc_ends"]


def test_a_transform_gets_the_selected_fields(tmp_path):
    samples = [{"label": 1, "id": 2}, {"label": 3, "id": 4}]
    found = stored(samples, tmp_path / "x", drop=["id"], transform=lambda s: {**s, "new": len(s)})
    assert found == [{"label": 1, "new": 2}, {"label": 3, "new": 2}]


@pytest.mark.parametrize("to", ["arrow", "parquet"])
def test_a_column_that_no_field_can_hold_is_not_the_end(tmp_path, to):
    odd = {"when, exactly": [datetime.timedelta(1)] * 2, "__url__": ["x", "y"]}
    path = by_pyarrow(tmp_path, to, {"text": ["a", "b"], **odd})
    with pytest.raises(FormatError):
        shardkit.open(path)
    assert len(typed(FormatError, path, tmp_path / "out")) == 4
    assert list(load(tmp_path / "out").schema) == ["text"]
    assert shardkit.verify(tmp_path / "out", against=path).sound
    assert stored(path, tmp_path / "two", fields=["text"]) == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(FormatError):
        stored(path, tmp_path / "x", fields=["__url__"])


def test_a_column_of_two_types_is_not_the_end(tmp_path):
    for name, value in (("a", 1), ("b", "x")):
        by_pyarrow(tmp_path / "in", "arrow", {"text": [name], "other": [value]}, name)
    raised(FormatError, "differs between shards", stored, tmp_path / "in", tmp_path / "out")
    assert typed(FormatError, tmp_path / "in", tmp_path / "out") == ["--drop", "other"]
    assert [*shardkit.open(tmp_path / "out").column("text")] == ["a", "b"]


def test_a_column_of_metadata_that_no_field_can_be_called(tmp_path):
    """Such as the index without a name that pandas writes."""
    folder = write_images(tmp_path / "in", classes=1, each=1)
    put(folder / "metadata.csv", ",file_name,n\n0,class0/000.jpg,1\n")
    raised(SourceError, "the column ''", command, folder, "--to", "wds", "-o", tmp_path / "out")
    assert typed(SourceError, folder, tmp_path / "out") == ["--drop", ""]
    assert list(load(tmp_path / "out").schema) == ["image", "n"]


def test_values_and_fields_that_the_first_documents_do_not_foretell(tmp_path):
    rows = [{"text": "a", "n": 1, "m": 2}] * 120
    rows += [{"text": "b", "n": "x", "m": 2}, {"text": "c", "n": 1, "new": 2}]
    lines = put_lines(tmp_path / "a.jsonl", rows)
    options = typed(SampleError, lines, tmp_path / "out", "--text-field", "text", "--keep-fields")
    assert options == ["--drop", "n", "--drop", "new"]
    assert list(load(tmp_path / "out").schema) == ["text", "m"]
    assert shardkit.verify(tmp_path / "out", against=lines).sound


def test_names_that_are_unknown_or_contradict_each_other_are_refused(tmp_path):
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
        caught = raised(UsageError, message, stored, source, tmp_path / "out", **options)
        if "lable" in message:
            assert caught.expected == "one of text, label; did you mean label?"


def test_another_selection_is_another_dataset(tmp_path):
    table = put(tmp_path / "a.csv", "text,label,id\na,1,x\n")
    command(table, "--to", "wds", "-o", tmp_path / "out", "--fields", "text,label")
    command(table, "--to", "wds", "-o", tmp_path / "out", "--fields", "text", "--fields", "label")
    with pytest.raises(shardkit.OutputError) as caught:
        command(table, "--to", "wds", "-o", tmp_path / "out", "--fields", "text")
    assert "fields was ['label', 'text']" in str(caught.value)


TEXTS = ["first", "second: ä", "third"]


def texts_of(path):
    with shardkit.open(path) as ds:
        return [ds[n]["text"] for n in range(len(ds))]


def failure(*words):
    with pytest.raises(shardkit.ShardkitError) as caught:
        command(*words)
    return caught.value


@pytest.mark.parametrize(
    ("encoding", "form"),
    [
        *(("latin-1", form) for form in ("txt", "jsonl", "csv")),
        *(("utf-16", form) for form in ("txt", "jsonl", "csv")),
        ("utf-16-le", "jsonl"),
        ("utf-16-be", "csv"),
        ("utf-32", "txt"),
        ("utf-32-le", "csv"),
        ("utf-32-be", "jsonl"),
    ],
)
def test_encodings(tmp_path, encoding, form):
    lines = {"txt": TEXTS, "csv": ["text", *TEXTS], "jsonl": [f'{{"text": "{t}"}}' for t in TEXTS]}
    source = put(tmp_path / f"a.{form}", "\n".join(lines[form]).encode(encoding))
    typed = [source, "--to", "wds", "-o", tmp_path / "out"]
    fix = str(failure(*typed).fix)
    proposed = re.findall(r"--encoding (\S+?),? ", fix + " ")
    assert proposed
    for name in [proposed[0], *(["auto"] if "auto" in fix else [])]:
        command(*typed, "--encoding", name, "--overwrite")
        assert texts_of(tmp_path / "out") == TEXTS


@pytest.mark.parametrize("option", ["--encoding-errors replace", "--on-error skip"])
def test_bad_bytes(tmp_path, option):
    source = put(tmp_path / "a.txt", "\n".join(TEXTS).encode("latin-1"))
    typed = [source, "--to", "wds", "-o", tmp_path / "out"]
    assert option in str(failure(*typed).fix)
    command(*typed, *option.split())
    skipped = option == "--on-error skip"
    assert len(texts_of(tmp_path / "out")) == (2 if skipped else 3)


def test_text_with_a_nul_in_an_encoding_that_it_has(tmp_path):
    source = put(tmp_path / "a.txt", "one\n\0two\n".encode("utf-16"))
    error = failure(source, "--to", "wds", "-o", tmp_path / "x", "--encoding", "utf-16")
    assert error.fix == "remove it, or use --on-error skip"


def test_other_options_where_work_would_be_lost(tmp_path):
    """Then they are refused (C2), and the first error says already what it takes."""
    for name, data in (("a", b"x" * 5000), ("b", b"y" * 5000), ("c", "ä".encode("latin-1"))):
        put(tmp_path / f"in/{name}.txt", data)
    typed = [tmp_path / "in", "--to", "wds", "-o", tmp_path / "out", "--shard-size", 4096]
    error = failure(*typed)
    assert isinstance(error, SampleError)
    assert "--encoding latin-1" in str(error.fix)
    assert "--overwrite" in str(error.fix)
    assert isinstance(failure(*typed, "--encoding", "latin-1"), OutputError)
    command(*typed, "--encoding", "latin-1", "--overwrite")
    assert texts_of(tmp_path / "out")[2] == "ä"


KEEP = shardkit.TextOptions(keep_fields=True)


def optional(path):
    with shardkit.open(path) as ds:
        return [name for name, kind in ds.schema.items() if kind.optional]


def first_batch(path):
    return next(iter(shardkit.stream.Loader(path, batch_size=4, shuffle=False)))


@pytest.mark.parametrize(
    "to", few(["wds", "lmdb", "arrow", "parquet", "hf", "beton"], "wds", "lmdb", "arrow", "hf")
)
def test_kept_fields_of_documents(tmp_path, to):
    rows = [{"text": f"{n}", "label": n, "some": n} for n in range(9)]
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


def test_one_shard_that_is_joined(tmp_path):
    for number in range(3):
        put_lines(tmp_path / f"in/{number}.jsonl", [{"text": "x" * 2000, "n": number}] * 20)
    for to in ("lmdb", "beton"):
        out = tmp_path / f"a.{to}"
        shardkit.convert(tmp_path / "in", to, out, workers=0, text=KEEP)
        assert optional(out) == []
        assert shardkit.verify(out, against=tmp_path / "in", decode=True).sound


def test_every_split_by_itself_and_only_samples_that_are_stored(tmp_path):
    put_lines(tmp_path / "in/train.jsonl", [{"text": "a", "n": 1}, {"text": 0}])
    put_lines(tmp_path / "in/val.jsonl", [{"text": "a", "n": 1}, {"text": "b"}])
    text = shardkit.TextOptions(field="text", keep_fields=True)
    options = {"workers": 0, "text": text, "on_error": "skip"}
    shardkit.convert(tmp_path / "in", "wds", tmp_path / "out", **options)
    assert optional(tmp_path / "out/train") == []  # the document without text is not stored
    assert optional(tmp_path / "out/val") == ["n"]
    table = put(tmp_path / "a.csv", "text,label,note\na,1,\nb,2,x\n")
    shardkit.convert(table, "arrow", tmp_path / "table", workers=0, text=KEEP)
    assert optional(tmp_path / "table") == ["note"]


def environment(path, count, *lacking):
    """Maps of x and y, but for those that lack y."""
    with lmdb.open(str(path), map_size=1 << 26) as base, base.begin(write=True) as transaction:
        for n in range(count):
            value = {"x": n} if n in lacking else {"x": n, "y": n}
            assert transaction.put(b"%06d" % n, msgpack.packb(value))
    return path


def test_msgpack_maps(tmp_path):
    path = environment(tmp_path / "in", 300, *range(0, 300, 2))
    assert optional(path) == ["y"]
    np.testing.assert_array_equal(first_batch(path)["x"], [0, 1, 2, 3])
    shardkit.convert(path, "wds", tmp_path / "out", workers=0)
    assert optional(tmp_path / "out") == ["y"]
    few = environment(tmp_path / "few", 2, 0)  # which are all looked at
    assert optional(few) == ["y"]
    assert [shardkit.open(few)[n].get("y") for n in range(2)] == [None, 1]


def test_a_value_without_a_field_that_all_have_that_were_looked_at(tmp_path):
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
