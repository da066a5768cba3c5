"""Documents of text corpora: lines, JSON, tables, whole files; any encoding and compression."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import pickle
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit import (
    Bool,
    Float,
    Int,
    Json,
    SampleError,
    Schema,
    Text,
    TextOptions,
    UsageError,
)
from shardkit.metadata.recipe import Recipe
from shardkit.sample import JsonText, Sample
from shardkit.sources.base import Document, Source, Stream
from shardkit.sources.text import scan
from shardkit.sources.text.scan import open_text
from shardkit.sources.text_files import blocks, encodings
from tests.conftest import examples, few
from tests.sources.real import refused

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,  # as the command has it
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "latin-1", "cp1252", "gb18030")


def put(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def put_lines(path: Path, values: Iterable[Any]) -> Path:
    return put(path, "".join(json.dumps(value) + "\n" for value in values))


def open_one(path: Path, **options: Any) -> Source | Stream:
    (source,) = open_text(path, Recipe("", text=TextOptions(**options)), strict=False).values()
    return source


def stream(path: Path, **options: Any) -> Stream:
    source = open_one(path, **options)
    assert isinstance(source, Stream)
    return source


def files(path: Path, **options: Any) -> Source:
    source = open_one(path, **options)
    assert isinstance(source, Source)
    return source


def samples(source: Stream) -> list[Sample]:
    """All samples; the first one that is bad is raised."""
    for error in errors(source):
        raise error
    return [document.sample for document in source.documents()]


def values(source: Stream, name: str = "text") -> list[Any]:
    return [sample[name] for sample in samples(source)]


def errors(source: Stream) -> list[SampleError]:
    return [d.sample for d in source.documents() if isinstance(d.sample, SampleError)]


def text_of(alphabet: st.SearchStrategy[str], encoding: str) -> st.SearchStrategy[str]:
    """Text that survives its encoding: some characters share a code."""
    codec = encoding.replace("-sig", "")
    return st.text(alphabet, max_size=30).filter(lambda t: t.encode(codec).decode(codec) == t)


def table(rows: Iterable[Iterable[Any]], suffix: str, ending: str) -> str:
    out, quoting = io.StringIO(), csv.QUOTE_NONNUMERIC
    between = "," if suffix == "csv" else "\t"
    csv.writer(out, delimiter=between, lineterminator=ending, quoting=quoting).writerows(rows)
    return out.getvalue()


@pytest.mark.large
@settings(max_examples=examples(4))
@given(st.data())
def test_every_form_comes_back_from_any_encoding_compression_and_cutting(data):
    def one_of(*values):
        return data.draw(st.sampled_from(values))

    encoding, suffix = one_of(*ENCODINGS), one_of("txt", "jsonl", "csv", "tsv")
    how, ending = one_of(*COMPRESS), one_of("\n", "\r\n")
    plain = encoding.replace("-sig", "")
    # A tab and a line end in one cell may be a row that a stray quote swallows.
    excluded = {"txt": "\0\r\n", "tsv": "\0\t"}.get(suffix, "\0")
    characters = st.characters(codec=plain, exclude_characters=excluded)
    texts = data.draw(st.lists(text_of(characters, encoding), min_size=1, max_size=20))
    if suffix == "txt":
        texts = [t for t in texts if t and not t.isspace()] or ["x"]
        content = ending.join(texts) + one_of("", ending)
    elif suffix == "jsonl":
        content = "".join(json.dumps({"text": t}, ensure_ascii=False) + ending for t in texts)
    else:
        content = table([["text", "n"], *([t, n] for n, t in enumerate(texts))], suffix, ending)
    raw = content.encode(encoding)
    step = max(-(-len(raw) // data.draw(st.integers(1, 3))), 1)  # bytes of members or frames
    members = [COMPRESS[how](raw[at : at + step]) for at in range(0, max(len(raw), 1), step)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "RANGE", 4 * data.draw(st.integers(1, 20)))
        patch.setattr(blocks, "BLOCK", 4 * data.draw(st.integers(1, 20)))
        patch.setattr(blocks, "COMPRESSED_BLOCK", data.draw(st.integers(1, 50)))
        name = f"a.{suffix}.{how}".rstrip(".")
        options = {} if suffix == "txt" else {"field": "text"}
        source = stream(put(Path(folder) / name, b"".join(members)), encoding=encoding, **options)
        found = samples(source)
        assert [sample["text"] for sample in found] == texts
        starts = [int(sample["__key__"].removeprefix(f"{name}/")) for sample in found]
        codec = f"{encoding}-le" if encoding in ("utf-16", "utf-32") else plain
        for start, after, text in zip(starts, [*starts[1:], len(raw)], texts, strict=True):
            line = raw[start:after].decode(codec)
            if suffix == "txt":
                assert line.rstrip("\r\n") == text.rstrip("\r\n")
            elif suffix == "jsonl":
                assert json.loads(line) == {"text": text}
        cuts = sorted(data.draw(st.sets(st.integers(1, max(len(source) - 1, 1)), max_size=4)))
        groups = itertools.pairwise([0, *(c for c in cuts if c < len(source)), len(source)])
        parts = [source.select(np.arange(a, b)) for a, b in groups]
        again = [s for part in parts for s in samples(pickle.loads(pickle.dumps(part)))]
        assert again == found
        if not how:
            assert sum(source.sizes()) == len(raw)
            assert sum(d.size for d in source.documents()) == len(raw)


def test_documents_say_where_they_are_and_parts_come_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "RANGE", 16)
    name = "web/part-0.jsonl"
    put_lines(tmp_path / name, [{"text": "one"}, {"text": "two"}])
    source = stream(tmp_path)
    assert source.unique_keys
    expected = [
        Document(f"{name}: byte {at}", {"__key__": f"{name}/{at}", "text": text}, 16)
        for at, text in ((0, "one"), (16, "two"))
    ]
    assert list(source.documents()) == expected
    backwards = source.select(np.arange(len(source))[::-1])
    assert list(backwards.documents()) == expected[::-1]
    assert sum(backwards.sizes()) == sum(source.sizes())


def test_blank_lines_are_no_documents(tmp_path):
    path = put(tmp_path / "a.txt", "\n  \none\n\r\n\t\ntwo\n\n")
    assert [d.size for d in stream(path).documents()] == [8, 8]
    assert values(stream(path)) == ["one", "two"]
    assert values(stream(put(tmp_path / "a.jsonl", '\n{"text": "one"}\n  \n'))) == ["one"]
    assert values(stream(put(tmp_path / "a.csv", "\ntext,n\n\none,1\n\n"))) == ["one"]
    # A lone carriage return ends no line.
    path = put(tmp_path / "b.txt", "one\rtwo\r\r\nthree\u2028four\x0bfive\x85")
    assert values(stream(path)) == ["one\rtwo\r", "three\u2028four\x0bfive\x85"]


def test_a_whole_file_stays_as_it_is_and_its_path_is_its_key(tmp_path):
    text = "\ufeff\r\none\rtwo\n\n ü \u2028 end"
    path = put(tmp_path / "a.txt", text)
    put(tmp_path / "b.md.gz", gzip.compress(text.encode()) + gzip.compress(b"more"))
    source = files(tmp_path)
    assert dict(source.schema) == {"text": Text()}
    assert source[0] == files(path, documents="file")[0] == {"__key__": "a", "text": text[1:]}
    assert source[1] == {"__key__": "b", "text": text[1:] + "more"}
    assert pickle.loads(pickle.dumps(source.select(np.array([1]))))[0] == source[1]
    assert source.sizes()[0] == len(text.encode())
    # One file is lines and a folder is files, unless told.
    lines = samples(stream(tmp_path, documents="line"))
    assert [line["__key__"] for line in lines][:2] == ["a.txt/5", "a.txt/14"]
    assert [line["text"] for line in lines][:2] == values(stream(path))
    expected = {  # and the path that is kept, where it is another
        "a.TXT.gz": ("a", None),
        "a.md": ("a~md", "a.md"),
        "a.txt": ("a~txt", "a.txt"),
        "v1.0/b.c.txt": ("v1.0/b_c", "v1.0/b.c.txt"),
        "v1.0/d.text": ("v1.0/d", None),
    }
    for name in expected:
        put(tmp_path / "names" / name, gzip.compress(b"x") if name.endswith("gz") else b"x")
    source = files(tmp_path / "names")
    for n, (name, (key, kept)) in enumerate(expected.items()):
        assert source.name(n) == name
        assert source[n]["__key__"] == source.key(n) == key
        assert source.original(n, key) == kept
    assert source.select(np.array([3, 1])).key(0) == "v1.0/b_c"


def optional(**kinds: Any) -> dict[str, Any]:
    return {name: kind(optional=True) for name, kind in kinds.items()}


ROWS: list[dict[str, Any]] = [
    {"text": "a", "i": 1, "f": 1, "b": True, "s": "x", "j": {"k": [1, None]}, "none": None},
    {"text": "b", "i": -5, "f": 0.5, "b": False, "s": "ü", "j": "text", "late": 3},
    {"i": None, "text": "c", "j": [1.5]},
]


def test_other_fields_are_kept_with_their_types_and_the_text_is_the_one_asked_for(tmp_path):
    source = stream(put_lines(tmp_path / "a.jsonl", ROWS), field="text", keep_fields=True)
    others = optional(i=Int, f=Float, b=Bool, s=Text, j=Json, none=Json, late=Int)
    assert dict(source.schema) == {"text": Text(), **others}
    schema = Schema.from_json(source.schema.to_json())
    found = samples(source)
    for sample, row in zip(found, ROWS, strict=True):
        present = {name: value for name, value in row.items() if value is not None}
        assert schema.check(sample).keys() == {"__key__", *present}
        for name, value in present.items():
            got = sample[name]
            assert (json.loads(got) if isinstance(got, JsonText) else got) == value
    assert isinstance(found[0]["f"], float)
    assert stream(tmp_path / "a.jsonl", field="text").schema.keys() == {"text"}
    row = {"title": "t", "body": "b", "n": 1, "__key__": "k"}
    path = put_lines(tmp_path / "a.jsonl", [row])
    assert values(stream(path, field="body"), "body") == ["b"]
    source = stream(path, field="body", keep_fields=True)
    assert dict(source.schema) == {"body": Text(), **optional(title=Text, n=Int)}
    assert samples(source) == [{**row, "__key__": "a.jsonl/0"}]
    (document,) = source.documents()
    assert document.ignored == ["__key__"]  # which samples keep for themselves
    path = put_lines(tmp_path / "b.jsonl", [{"n": 1, "content": "c"}])
    source = stream(path, tokenizer="a")
    assert values(source, "content") == ["c"]
    assert source.notes == [
        "the text is the field 'content', the only one of type text",
        "only the text of documents is stored; --keep-fields also stores n",
    ]
    blocks = stream(path, tokenizer="a", seq_len=8)  # which cannot have other fields
    assert blocks.notes[1:] == ["only the text of documents is stored, without n"]
    told = stream(
        put_lines(tmp_path / "c.jsonl", [{"n": 1, "text": "c"}]), field="text", keep_fields=True
    )
    assert told.notes == []


def test_columns_of_tables_are_the_narrowest_that_fits(tmp_path):
    content = 'text,i,f,z,e\n"a, ""b""\nc",1,0.5,007,\nd,-2,3,1,\n,,,,\n'
    source = stream(put(tmp_path / "a.csv", content), field="text", keep_fields=True)
    assert dict(source.schema) == {"text": Text(), **optional(i=Int, f=Float, z=Text, e=Text)}
    assert samples(source) == [
        {"__key__": "a.csv/13", "text": 'a, "b"\nc', "i": 1, "f": 0.5, "z": "007"},
        {"__key__": "a.csv/37", "text": "d", "i": -2, "f": 3.0, "z": "1"},
        {"__key__": "a.csv/47", "text": ""},
    ]
    put(tmp_path / "b/b.csv", "text,n,s,m\nb,0.5,y,z\n")  # beside JSON
    put_lines(tmp_path / "b/a.jsonl", [{"text": "a", "n": 1, "s": "x", "m": 1}])
    source = stream(tmp_path / "b", field="text", keep_fields=True)
    assert dict(source.schema) == {"text": Text(), **optional(n=Float, s=Text, m=Json)}
    expected = {"__key__": "b.csv/11", "text": "b", "n": 0.5, "s": "y", "m": '"z"'}
    assert samples(source)[1] == expected


def test_json_lines_and_tables_are_those_of_pandas(tmp_path):
    rows = [{"text": f'{n}\n\u2028\U0001f600 \\ "', "n": n} for n in range(50)]
    paths = [tmp_path / "a.jsonl.gz", tmp_path / "b.csv"]
    frame = pandas.DataFrame(rows)
    frame.to_json(paths[0], orient="records", lines=True, compression="gzip")
    frame.to_csv(paths[1], index=False)
    for path in paths:
        found = samples(stream(path, field="text", keep_fields=True))
        assert [{k: v for k, v in s.items() if k != "__key__"} for s in found] == rows


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@given(st.lists(st.tuples(cells, cells), min_size=1), st.sampled_from(["\n", "\r\n"]))
def test_tables_are_those_of_pythons_csv(rows, ending):
    content = table([("text", "b"), *rows], "csv", ending)
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder) / "a.csv", content)
        expected = list(csv.DictReader(io.StringIO(content, newline="")))
        assert values(stream(path, field="text")) == [row["text"] for row in expected]


@pytest.mark.parametrize("how", few(["", "gz", "zst"], "gz"))
def test_memory_is_that_of_a_block_and_a_document(tmp_path, monkeypatch, how):
    monkeypatch.setattr(blocks, "BLOCK", 1 << 14)
    monkeypatch.setattr(blocks, "COMPRESSED_BLOCK", 1 << 10)
    texts = (Random(number).randbytes(500).hex().encode() for number in range(4000))
    content = b"".join(b'{"text": "%s"}\n' % text for text in texts)
    source = stream(put(tmp_path / f"a.jsonl.{how}".rstrip("."), COMPRESS[how](content)))
    tracemalloc.start()
    assert sum(1 for _ in source.documents()) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(content) / 4


def test_a_very_long_line_is_a_document_unless_no_format_could_hold_it(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "RANGE", 1 << 18)
    text = "long " * 1_000_000
    line = json.dumps({"text": text})
    for suffix, content in {"txt": text, "jsonl": line, "csv": f"text\n{text}"}.items():
        source = stream(put(tmp_path / f"a.{suffix}", content + "\nend\n"))
        assert len(source) == 20
        first, _ = (document.sample for document in source.documents())
        assert first["text"] == text
    monkeypatch.setattr(encodings, "MAX_LINE", 1000)
    monkeypatch.setattr(blocks, "BLOCK", 64)
    path = put(tmp_path / "a.txt", "a\n" + "x" * 5000 + "\nb\n" + "y" * 5000)
    found = [d.sample for d in stream(path).documents()]
    assert [s["text"] for s in found if isinstance(s, dict)] == ["a", "b"]
    too_long = errors(stream(path))
    assert [e.where["offset"] for e in too_long] == [2, 5005]
    assert "too long" in too_long[0].what


def test_a_plan_of_many_files_and_a_stream_for_a_worker_are_small(tmp_path):
    for n in range(2000):
        put_lines(tmp_path / f"{n % 7}/{n}.jsonl", [{"text": "a"}])
    stream(tmp_path / "0")  # imports what it needs
    tracemalloc.start()
    source = stream(tmp_path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source) == 2000
    assert held / 2000 < 200
    one = source.select(np.array([1234]))
    assert len(pickle.dumps(one)) < 1600
    assert samples(one)[0]["__key__"] == samples(source)[1234]["__key__"]


def test_the_mark_at_the_start_is_no_text_and_what_is_none_can_be_replaced_or_left_out(tmp_path):
    put(tmp_path / "a.txt", "one\n\ufefftwo".encode("utf-8-sig"))
    assert values(stream(tmp_path / "a.txt")) == ["one", "\ufefftwo"]
    for encoding, mark in (("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff")):
        put(tmp_path / "b.txt", mark + "one\ntwo".encode(encoding))
        for said in ("utf-16", encoding):
            assert values(stream(tmp_path / "b.txt", encoding=said)) == ["one", "two"]
    path = put(tmp_path / "c.txt", b"one \xff\ntwo\n")
    assert values(stream(path, encoding_errors="replace")) == ["one \ufffd", "two"]
    assert values(stream(path, encoding_errors="ignore")) == ["one ", "two"]
    assert values(stream(path, encoding="latin-1")) == ["one ÿ", "two"]


def test_encodings_are_found_file_by_file(tmp_path):
    text = "Der Bär aß viele süße Äpfel, und die Möwen flogen über die Dächer der Stadt.\n" * 40
    for name, encoding in (("a", "utf-8"), ("b", "cp1252"), ("c", "utf-16"), ("d", "utf-16-be")):
        put(tmp_path / f"{name}.txt", text.encode(encoding))
    put(tmp_path / "e.txt.gz", gzip.compress(text.encode("cp1252")))
    source = files(tmp_path, encoding="auto")
    assert [source[n]["text"] for n in range(5)] == [text] * 5
    assert len(source.notes) == 1
    assert "utf-8 (1)" in source.notes[0]
    assert source.select(np.array([3]))[0]["text"] == text
    lines = stream(tmp_path, encoding="auto", documents="line")
    assert values(lines) == [text[: text.index("\n")]] * 200
    (tmp_path / "f.txt").symlink_to("nowhere")  # which is reported when the file is read
    put(tmp_path / "g.txt", "plain")
    assert files(tmp_path, encoding="auto")[6]["text"] == "plain"
    # Cut inside a character, where it is looked at.
    path = put(tmp_path / "a.txt", "a" + "ü" * 70_000)
    assert files(path, encoding="auto", documents="file")[0]["text"] == "a" + "ü" * 70_000
    refused(UsageError, "not supported for text files", stream, path, encoding="punycode")


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        # A quotation mark is a character, unless the file shows that cells are quoted.
        (['" he said\t1', "b\t2", 'c "\t3'], ['" he said', "b", 'c "']),
        (['"a" b\t1', '"c"\t2'], ['"a" b', '"c"']),
        (['12" disc\t1', "x\t2"], ['12" disc', "x"]),
        (['"a"\t1'], ['"a"']),
        (['"a ""b"""\t1', '"c"\t2'], ['a "b"', "c"]),
        (['"a\tb"\t1', '"c"\t2'], ["a\tb", "c"]),
        (['"a', 'b"\t1', '"c"\t2'], ["a\nb", "c"]),
        (['"a', "", "b", 'c"\t1'], ["a\n\nb\nc"]),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_quotes_of_a_tsv_are_text_unless_it_shows_otherwise(
    tmp_path, rows, texts, ending, encoding
):
    lines = ["text\tn", *rows]
    path = put(tmp_path / "a.tsv", "".join(line + ending for line in lines).encode(encoding))
    found = values(stream(path, encoding=encoding))
    assert found == [text.replace("\n", ending) for text in texts]


def test_a_quoted_header_of_a_tsv_shows_it_and_what_is_guessed_is_noted(tmp_path):
    path = put(tmp_path / "a.tsv", '"text"\t"n"\n"a"\t1\n')
    assert values(stream(path)) == ["a"]
    assert not any("quotation" in note for note in stream(path).notes)
    assert values(stream(put(tmp_path / "c.tsv", 'text\t12" (")\n"a\t1\n'))) == ['"a']
    one = 'text\n"a\nb\nc"\nd\n'  # of one column: no line is known to be a row by itself
    assert values(stream(put(tmp_path / "d.tsv", one))) == ["a\nb\nc", "d"]
    assert values(stream(put(tmp_path / "d.tsv", 'text\n"a\nb\n"c\n'))) == ['"a', "b", '"c']
    source = stream(put(tmp_path / "b.tsv", 'text\tn\n"a"\t1\nb\t"2"\n'))
    assert values(source) == ['"a"', "b"]
    assert any("quotation marks around 2 cells" in note for note in source.notes)
    path = put(tmp_path / "b.tsv", 'text\tn\n"a"\t1\n"b\t2\n')  # where no cell can be quoted
    assert not any("quotation" in note for note in stream(path).notes)


def test_a_quoted_cell_that_holds_rows_is_an_error_where_it_begins(tmp_path):
    row = 'x ""y""'
    tsv = f'text\tn\n"{row}"\t1\n"a\nb\t2\nc"\t3\n'
    two = f'n\ttext\n1\t"{row}"\n2\t"a\n3\tb"\n'  # which is a row less if it is one
    csv_ = 'text,n\n"a,1\n' + "b,2\n" * 10 + 'c",3\nd,4\n'
    for name, text, what in (
        ("a.tsv", tsv, "holds 3 lines that look like rows"),
        ("a.csv", csv_, "holds 12 lines that look like rows"),
    ):
        (error,) = errors(stream(put(tmp_path / name, text)))
        assert what in error.what
        assert error.where["offset"] == text.index('"a')
    (error,) = errors(stream(put(tmp_path / "c.tsv", two)))
    assert "holds 2 lines that look like rows" in error.what
    assert error.where["offset"] == two.index('2\t"a')
    path = put(tmp_path / "c.tsv", f'n\ttext\n1\t"{row}"\n2\t"a\nb"\n')
    assert values(stream(path)) == ['x "y"', "a\nb"]
    (error,) = errors(stream(put(tmp_path / "b.tsv", f'text\tn\n"{row}"\t1\n"a\t2\n')))
    assert ("never closed" in error.what, error.where["offset"]) == (True, 19)
    path = put(tmp_path / "b.tsv", f'text\tn\n"{row}"\t1\n"""a"\t2\n')  # as the error says
    assert values(stream(path)) == ['x "y"', '"a']
    prose = '"Hi, Ann\nI am, well\nbye, Bob"'  # in CSV, text may well have as many commas
    assert len(values(stream(put(tmp_path / "p.csv", f"text,n\n{prose},1\n")))) == 1
