"""CSV, TSV, JSON Lines and JSON as tables: all columns become fields."""

import csv
import io
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import SampleError, ShardkitError, SourceError
from shardkit.metadata.recipe import Recipe
from shardkit.schema import Array, Bool, Float, Int, Json, Text
from shardkit.sources import open_sources
from tests.sources.test_text import errors, put, samples, stream

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def types(path, **options):
    return {name: type(kind) for name, kind in stream(path, **options).schema.items()}


def rows(path, **options):
    return [
        {n: v for n, v in s.items() if n != "__key__"} for s in samples(stream(path, **options))
    ]


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1", "-2", ""], Int, [1, -2, None]),
        (["1", "1.5"], Float, [1.0, 1.5]),
        (["1", "nan", "-inf"], Float, [1.0, math.nan, -math.inf]),
        (["-0", "1e3", "2."], Float, [-0.0, 1000.0, 2.0]),
        (["nan"], Text, ["nan"]),
        (["1", "007"], Text, ["1", "007"]),
        (["1", "1e999"], Text, ["1", "1e999"]),
        (["1", str(2**63)], Text, ["1", str(2**63)]),
        ([str(-(2**63) + 1)], Int, [-(2**63) + 1]),
        (["0.5", str(2**53 + 1)], Text, ["0.5", str(2**53 + 1)]),
        (["True", "false", ""], Bool, [True, False, None]),
        (["True", "1"], Text, ["True", "1"]),
        (["1\n2"], Text, ["1\n2"]),
        (["1", "NA", "2", "3"], Text, ["1", "NA", "2", "3"]),
        (["2026-01-31"], Text, ["2026-01-31"]),
        (["\u0661"], Text, ["\u0661"]),
        ([" 1"], Text, [" 1"]),
    ],
)
def test_a_cell_that_does_not_fit_is_found_in_any_row(tmp_path, cells, kind, values):
    """Types are those of all rows, not of the first ones."""
    content = io.StringIO()
    csv.writer(content).writerows([["n", "x"], *([cells[0], "x"] for _ in range(5000))])
    csv.writer(content).writerows([cell, "x"] for cell in cells)
    path = put(tmp_path / "a.csv", content.getvalue())
    assert types(path) == {"n": kind, "x": Text}
    found = [row.get("n") for row in rows(path)[-len(cells) :]]
    np.testing.assert_equal(found, values)
    noted = any("the column 'n' is text" in note for note in stream(path).notes)
    assert noted == (kind is Text and cells[0] in ("1", "0.5", " 1"))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None], Int()),
        ([1, 2.5], Float()),
        ([1, 2**63], Json()),
        ([0.5, 2**53 + 1], Json()),
        ([True, None], Bool()),
        ([True, 1], Json()),
        (["a", 1], Json()),
        ([[1], [], None], Array("<i8", (None,))),
        ([[1], [0.5]], Array("<f8", (None,))),
        ([[1, None]], Json()),
        ([[[1]]], Json()),
        ([{"a": 1}, []], Json()),
    ],
)
def test_json_values_keep_their_types(tmp_path, values, kind):
    lines = [{"n": 0}] + [{"n": values[0]}] * 5000 + [{"n": value} for value in values]
    path = put(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines[1:]))
    source = stream(path)
    assert source.schema["n"] == type(kind)(**{**vars(kind), "optional": None in values})
    for value, row in zip(values, rows(path)[-len(values) :], strict=True):
        found = row.get("n")
        plain = found.tolist() if isinstance(found, np.ndarray) else found
        assert (json.loads(plain) if isinstance(kind, Json) else plain) == value


FRACTIONS = st.integers(-(10**12), 10**12).map(lambda n: n / 8 + 1 / 16)
COLUMNS = {
    "int": st.integers(-(2**63) + 1, 2**63 - 1),
    "float": FRACTIONS,
    "bool": st.booleans(),
    "text": st.text(st.characters(categories=["L"]), min_size=1).map("x{}".format),
}
MISSING = {name: st.none() | column for name, column in COLUMNS.items()}


def written(root, table):
    """A table in all forms, one file each."""
    root.mkdir(exist_ok=True)
    with open(root / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, table[0]).writeheader()
        csv.DictWriter(file, table[0]).writerows(table)
    put(root / "b.jsonl", "".join(json.dumps(row) + "\n" for row in table))
    put(root / "c.json", json.dumps(table, indent=2))
    pq.write_table(pa.Table.from_pylist(table), root / "d.parquet")
    return sorted(root.iterdir())


@given(st.fixed_dictionaries(COLUMNS), st.lists(st.fixed_dictionaries(MISSING)))
def test_a_table_is_the_same_in_every_form(first, others):
    table = [first, *others]
    expected = [{n: v for n, v in row.items() if v is not None} for row in table]
    with tempfile.TemporaryDirectory() as folder:
        for path in written(Path(folder), table):
            (source,) = open_sources(path, Recipe("arrow")).values()
            assert [type(source.schema[n]) for n in COLUMNS] == [Int, Float, Bool, Text]
            found = [document.sample for document in source.documents()]
            assert [{n: v for n, v in s.items() if n != "__key__"} for s in found] == expected


def test_a_table_becomes_the_same_dataset_from_every_form(tmp_path):
    table = [{"i": n, "f": n / 4, "b": n > 2, "s": f"s{n}", "m": n or None} for n in range(5)]
    found = []
    for number, path in enumerate(written(tmp_path, table)):
        shardkit.convert(path, "arrow", tmp_path / f"{number}", workers=0)
        ds = shardkit.open(tmp_path / f"{number}")
        found.append((ds.schema, [{**sample, "__key__": ""} for sample in ds]))
    assert [one == found[0] for one in found] == [True] * 4
    assert [name for name, kind in found[0][0].items() if kind.optional] == ["m"]


def test_a_table_has_the_columns_types_and_values_that_others_read(tmp_path):
    datasets, pandas, polars = map(pytest.importorskip, ("datasets", "pandas", "polars"))
    kinds = {"int64": Int, "float64": Float, "bool": Bool, "large_string": Text, "string": Text}
    kinds |= {"Int64": Int, "Float64": Float, "Boolean": Bool, "String": Text}
    table = [{"i": n, "f": n / 4, "b": n > 2, "s": f"s {n}"} for n in range(20)]
    lines = ["i,f,b,s", *(f"{n},{n / 4},{str(n > 2).lower()},s {n}" for n in range(20))]
    put(tmp_path / "a.csv", "\n".join(lines))
    put(tmp_path / "a.json", "".join(json.dumps(row) + "\n" for row in table))
    for form in ("csv", "json"):
        path = tmp_path / f"a.{form}"
        theirs = datasets.load_dataset(
            form, data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train"
        )
        assert types(path) == {n: kinds[kind.dtype] for n, kind in theirs.features.items()}
        assert rows(path) == [*theirs] == table
    frame = polars.read_csv(tmp_path / "a.csv")
    assert types(tmp_path / "a.csv") == {n: kinds[str(kind)] for n, kind in frame.schema.items()}
    assert frame.to_dicts() == pandas.read_csv(tmp_path / "a.csv").to_dict("records") == table


def test_semicolons_tabs_and_bars_separate_cells_if_no_comma_does(tmp_path):
    for delimiter in ";\t|":
        content = "a;b\n1;2,5\n\n3;'x;y'\n".replace("'", '"').replace(";", delimiter)
        source = stream(put(tmp_path / "a.csv", content))
        assert [s["b"] for s in samples(source)] == ["2,5", f"x{delimiter}y"]
        assert any(repr(delimiter) in note for note in source.notes)
    for content in ("text\na;b\nc\n", "a,b\n1;2,5\n", "a;b\n1\n"):
        source = stream(put(tmp_path / "a.csv", content))
        assert not any("separated" in note for note in source.notes)


def test_quotation_marks_are_text_if_told_and_files_are_then_divided(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkit.sources.text.scan.RANGE", 16)
    path = put(tmp_path / "a.csv", 'a,b\n"he said" hi,1\n5 o",2\n"x",3\n')
    (error, *_) = errors(stream(path))
    assert "--quoting none" in str(error.fix)
    source = stream(path, quoting="none")
    assert len(source) > 1
    assert [s["a"] for s in samples(source)] == ['"he said" hi', '5 o"', '"x"']
    with pytest.raises(ShardkitError, match="for CSV and TSV only"):
        stream(put(tmp_path / "a.jsonl", "{}"), quoting="none")


def test_a_bad_row_has_its_line(tmp_path, monkeypatch):
    content = "a,b\n" + "1,2\n" * 20 + "1,2,3\n" + "1,2\n" * 20 + "4\n"
    path = put(tmp_path / "a.csv", content)
    for size in (1 << 19, 32):
        monkeypatch.setattr("shardkit.sources.text.scan.RANGE", size)
        first, second = errors(stream(path))
        assert [first.where["line"], second.where["line"]] == [22, 43]
        assert (first.expected, first.found) == ("2: a, b", "3")
    with pytest.raises(SampleError, match="line 22"):
        shardkit.convert(path, "arrow", tmp_path / "out", workers=0)


@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (",a\n0,1\n", "a column of the table has no name", "--drop ''"),
        ("a,a\n0,1\n", "two columns of the table have the same name", "--columns"),
        ("a,b\n", "there are no documents", "remove"),
    ],
)
def test_a_header_that_names_no_fields_is_refused(tmp_path, content, what, fix):
    with pytest.raises(SourceError, match=what) as raised:
        stream(put(tmp_path / "a.csv", content))
    assert fix in str(raised.value.fix)


def test_a_first_line_that_seems_to_be_a_row_is_noted(tmp_path):
    path = put(tmp_path / "a.csv", "5.1,setosa\n4.9,setosa\n")
    (note,) = [note for note in stream(path).notes if "seems to be a row" in note]
    assert "--columns NAME0,NAME1" in note
    for options in ({"no_header": True}, {"columns": "width,kind"}):
        source = stream(path, **options)
        assert len(samples(source)) == 2
        assert not any("seems" in note for note in source.notes)
    assert list(source.schema) == ["width", "kind"]


def test_rows_without_values_and_labels(tmp_path):
    path = put(tmp_path / "a.csv", "a,kind\n,cat\n2,dog\n,\n")
    assert rows(path) == [{"kind": "cat"}, {"a": 2, "kind": "dog"}, {}]
    shardkit.convert(
        put(tmp_path / "b.csv", "a,kind\n,cat\n2,dog\n"),
        "arrow",
        tmp_path / "out",
        label_column="kind",
        workers=0,
    )
    ds = shardkit.open(tmp_path / "out")
    assert [(s.get("a"), s["label"]) for s in ds] == [(None, 0), (2, 1)]
    assert ds.class_names["label"] == ("cat", "dog")


@pytest.mark.parametrize("cells", [["1", "NA", "2"], [" 1", "2"], ["NA", "1", "2"]])
def test_a_column_of_numbers_that_is_text_is_noted(tmp_path, cells):
    path = put(tmp_path / "a.csv", "n,s\n" + "".join(f"{cell},1x\n" for cell in cells))
    (note,) = [note for note in stream(path).notes if "although most are numbers" in note]
    assert note.startswith("the column 'n' is text because of cells such as")


def test_a_table_that_may_be_inside_of_a_row_is_noted(tmp_path):
    for text in ('{"data": [{"a": 1}, {"a": 2}]}', '{"a": {"0": 1, "1": 2}}'):  # as of pandas
        assert "the table is a single row" in stream(put(tmp_path / "a.json", text)).notes[1]
    assert len(stream(put(tmp_path / "a.json", '{"a": 1}')).notes) == 1


@pytest.mark.parametrize("to", ["mds", "wds", "parquet"])
def test_only_columns_with_missing_values_are_optional(tmp_path, to):
    put(tmp_path / "in" / "a.csv", "a,b\n1,2\n3,\n")
    put(tmp_path / "in" / "b.csv", "a,c\n5,6\n")
    shardkit.convert(tmp_path / "in", to, tmp_path / "out", workers=0)
    schema = shardkit.open(tmp_path / "out").schema
    assert [name for name, kind in schema.items() if kind.optional] == ["b", "c"]


def test_a_column_of_json_with_several_types_is_noted(tmp_path):
    path = put(tmp_path / "a.jsonl", '{"a": 1, "b": 1, "c": [1]}\n{"a": "x", "b": 2.5, "c": {}}\n')
    assert stream(path).notes[1:] == [
        "the column 'a' is JSON because it has values of several types"
    ]


def test_words_for_true_are_class_names_as_labels(tmp_path):
    path = put(tmp_path / "a.csv", "a,ok\n1,True\n2,False\n")
    assert types(path) == {"a": Int, "ok": Bool}
    source = open_sources(path, Recipe("arrow", label_column="ok"))[""]
    assert source.class_names == {"label": ("False", "True")}
    assert [s["label"] for s in samples(source)] == [1, 0]


def test_names_of_columns_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkit.sources.text.scan._MAX_COLUMNS", 100)
    path = put(tmp_path / "a.jsonl", "".join(f'{{"{n}": 1, "text": ""}}\n' for n in range(101)))
    with pytest.raises(SourceError, match="over 100 columns") as raised:
        stream(path)
    assert "--text-field" in str(raised.value.fix)
    assert stream(path, field="text").schema.keys() == {"text"}


@pytest.mark.parametrize("name", ["a.csv", "b.jsonl"])
def test_rows_can_be_chosen_by_number_as_those_of_parquet(tmp_path, name):
    table = [{"n": n, "kind": "abc"[n % 3], "s": f'{n // 2}, "\\n"'} for n in range(60)]
    path = next(p for p in written(tmp_path / "in", table) if p.name == name)
    shares = {"split": "train=0.8,val=0.2"}
    for number, (options, counts) in enumerate(
        (
            ({**shares, "stratify": "kind"}, {"train": 48, "val": 12}),
            ({**shares, "stratify": "kind", "fields": ["n"]}, {"train": 48, "val": 12}),
            ({"dedup": "exact", "fields": ["s"]}, {"": 30}),
            ({"split": "train=0.5,val=0.5", "group": "s", "where": "n >= 20"}, None),
        )
    ):
        done = shardkit.convert(path, "arrow", tmp_path / f"{number}", workers=0, **options)
        found = {split: list(shardkit.open(one.path)) for split, one in done.splits.items()}
        assert counts is None or {split: len(some) for split, some in found.items()} == counts
        for sample in (sample for some in found.values() for sample in some):
            row = next(row for row in table if row["n"] == sample.get("n") or "n" not in sample)
            assert "n" not in sample or {**row, **sample} == {**row, "__key__": sample["__key__"]}
    groups = [{sample["s"] for sample in some} for some in found.values()]
    assert not groups[0] & groups[1]
    assert sum(map(len, found.values())) == 40


def test_a_column_of_files_and_folders_is_that_of_the_files(tmp_path):
    put(tmp_path / "x=1" / "a.csv", "x,y\n2,3\n")
    assert rows(tmp_path) == [{"x": 2, "y": 3}]
    assert "values of x are those in the files" in stream(tmp_path).notes[0]
