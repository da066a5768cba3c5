"""Bad text: every error names the file and the byte, and the good documents around it are kept."""

import csv
import gzip
import json
import os
import pickle
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import SampleError, SourceError, UsageError
from shardkit.sources.text_files import blocks, records
from tests.sources.real import cases, refused
from tests.sources.test_text import COMPRESS, errors, files, put, put_lines, stream, values

GOOD = b'{"text": "good", "n": 1, "f": 0.5, "j": {"a": 1}, "s": "x"}\n'
MANY = GOOD * 100  # as many as tell the types of fields


def good(path: Path, **options: Any) -> list[str]:
    found = [document.sample for document in stream(path, **options).documents()]
    return [sample["text"] for sample in found if isinstance(sample, dict)]


@cases(
    "line offset what found",
    (b'{"text": "a', 9, "not JSON: Unterminated string", '\'{"text": "a\''),
    (b'{"text": "a\tb"}', 11, "not JSON: Invalid control character", None),
    (b'{"text": "\xc3\xbc" x}', 14, "not JSON: Expecting ',' delimiter", None),
    (b"\x00\x00\x00", 0, "not JSON: Expecting value", "'\\x00\\x00\\x00'"),
    (b'{"text": "' + b"1" * 90 + b'" 2', 102, "not JSON", "'" + "1" * 28 + "\" 2'"),
    (b'{"text": ' + b"[" * 200_000, 0, "not JSON", None),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", 0, "not JSON", None),
    (b'["text"]', 0, "not a JSON object", "'[\"text\"]'"),
    (b'{"text": "a\xff"}', 11, "not valid UTF-8", "0xff: invalid start byte"),
    (b'{"n": 2}', 0, "has no text", "no such field, but n"),
    (b"{}", 0, "has no text", "no such field, but none at all"),
    (b'{"text": null}', 0, "has no text", "null"),
    (b'{"text": ["a"]}', 0, "has no text", "list ['a']"),
    (b'{"text": "a\\ud800b"}', 0, "a lone surrogate", "\\ud800 after 1 characters"),
    (b'{"text": "a", "s": "\\udc00"}', 0, "a lone surrogate", None),
    (b'{"text": "a", "j": ["\\udc00"]}', 0, "a lone surrogate", None),
    (b'{"text": "a", "j": NaN}', 0, "not have the type", "float nan"),
    (b'{"text": "a", "j": [1e999]}', 0, "not have the type", "list [inf]"),
    (b'{"text": "a", "n": "b"}', 0, "not have the type", "str 'b'"),
    (b'{"text": "a", "n": true}', 0, "not have the type", "bool True"),
    (b'{"text": "a", "n": 9223372036854775808}', 0, "not have the type", None),
    (b'{"text": "a", "f": 1' + b"0" * 400 + b"}", 0, "not have the type", None),
    (b'{"text": "a", "x": 1}', 0, "the first documents do not have", "int 1"),
)
def test_a_bad_line_of_json_is_an_error_with_its_place(tmp_path, line, offset, what, found):
    path = put(tmp_path / "a.jsonl", MANY + line + b"\n" + GOOD)
    documents = list(stream(path, field="text", keep_fields=True).documents())
    (bad,) = [d for d in documents if isinstance(d.sample, SampleError)]
    assert bad is documents[100]
    assert bad.name == f"a.jsonl: byte {len(MANY)}"
    error = bad.sample
    assert what in error.what
    assert (error.where["path"], error.where["offset"]) == (str(path), len(MANY) + offset)
    assert error.where["key"] == f"a.jsonl/{len(MANY)}"
    assert found is None or error.found == found
    assert pickle.loads(pickle.dumps(error)).to_dict() == error.to_dict()


def test_what_json_allows_is_no_error(tmp_path):
    lines = b'{"text": "a\\u0000b", "text": "last\\u0000", "f": 3}\r\n'
    lines += b'{"text": "\\ud83d\\ude00", "f": NaN, "n": null}'
    path = put(tmp_path / "a.jsonl", MANY + lines)
    assert values(stream(path, field="text", keep_fields=True))[100:] == ["last\0", "\U0001f600"]


@cases(
    "content what",
    ('{\n"text": "a"}', "a single JSON object"),
    ('[{"text": "a"}, {"text": tru}, {"text": "b"}]', "Expecting value"),
    ('[{"text": "a"} {"text": "b"}]', "',' is missing"),
    ('[{"text": "a"}, {"text": "b', "Unterminated string"),
    ('[{"text": "a"}', "',' is missing"),
    ('[{"text": "a"}]\n[]', "more after the array"),
    (b'[{"text": "a"}, {"text": "\xff"}]', "not valid utf-8"),
    ("[" + '{"a":' * 100_000, "recursion"),
)
def test_json_that_is_damaged_is_one_error_for_the_rest(tmp_path, content, what):
    put(tmp_path / "a.json", content)
    put_lines(tmp_path / "b.json", [{"text": "b"}])
    (error,) = errors(stream(tmp_path))
    assert what in str(error)
    assert error.where["path"] == str(tmp_path / "a.json")
    assert good(tmp_path)[-1] == "b"


@pytest.mark.parametrize("block", [7, 1 << 20])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_elements_of_an_array_are_rows_with_their_offsets(
    tmp_path, block, encoding, monkeypatch
):
    monkeypatch.setattr(blocks, "BLOCK", block)
    rows = [{"text": f"ä\U0001f600 {n}" * n, "n": [n, {}], "x": "]},{"} for n in range(20)]
    content = json.dumps([*rows, 5], indent=1, ensure_ascii=False).replace("\n", "\r\n")
    path = put(tmp_path / "a.json", content.encode(encoding))
    source = stream(path, encoding=encoding.replace("-sig", ""))
    found = [d.sample for d in source.documents()]
    assert [s["text"] for s in found[:-1]] == [row["text"] for row in rows]
    assert isinstance(found[-1], SampleError)
    assert "not a JSON object" in found[-1].what
    at = int(found[3]["__key__"].removeprefix("a.json/"))
    data = path.read_bytes()[at:].decode({"utf-16": "utf-16-le"}.get(encoding, "utf-8"))
    assert json.JSONDecoder().raw_decode(data)[0] == rows[3]


def test_a_quote_that_swallows_too_much_is_an_error_where_it_opens(tmp_path, monkeypatch):
    path = put(tmp_path / "a.csv", b'text\none\n"two\nthree\nfour\n')
    (error,) = errors(stream(path))
    assert "never closed" in error.what
    assert str(error.found).startswith("3 lines that belong to it")
    assert (error.where["offset"], good(path)) == (9, ["one"])
    monkeypatch.setattr(records, "_MAX_CELL", 1000)
    path = put(tmp_path / "a.csv", b'text\none\n"two\n' + b"x\n" * 1000)
    before = csv.field_size_limit(1000)
    try:
        (error, *_) = errors(stream(path))
    finally:
        csv.field_size_limit(before)
    assert "field larger" in error.what
    assert error.where["offset"] == 9


@cases(
    "row offset what",
    (b"one,2,3", 0, "not have as many cells"),
    (b"one", 0, "not have as many cells"),
    (b'"one"x,2', 0, "not CSV"),
    (b"one\rtwo,2", 0, "not CSV"),
    (b"\xff,2", 0, "not valid UTF-8"),
    (b'"one\ntw\xff",2', 7, "not valid UTF-8"),
    (b'"one\ntw\0",2', 7, "a NUL character"),
    (b"one,x", 0, "not have the type"),
    (b"one,2.5", 0, "not have the type"),
)
def test_a_bad_row_is_an_error_with_its_place(tmp_path, row, offset, what):
    start = b"text,n\n" + b'"a\nb",1\n' * 100
    path = put(tmp_path / "a.csv", start + row + b"\nlast,3\n")
    (error,) = errors(stream(path, field="text", keep_fields=True))
    assert what in error.what
    assert (error.where["path"], error.where["offset"]) == (str(path), len(start) + offset)
    assert good(path, field="text", keep_fields=True) == ["a\nb"] * 100 + ["last"]


def test_a_field_or_header_that_there_is_not_is_one_error_that_lists_what_there_is(tmp_path):
    put(tmp_path / "in/a.csv", "text,n\none,1\n")
    put(tmp_path / "in/b.csv", "body,n\ntwo,1\nthree,2\n")
    put(tmp_path / "in/c.csv", "n,text\n1,four\n")
    (error,) = errors(stream(tmp_path / "in", field="text"))
    assert error.what == "the table has no column 'text'"
    assert error.where["path"] == str(tmp_path / "in/b.csv")
    assert good(tmp_path / "in", field="text") == ["one", "four"]
    path = put_lines(tmp_path / "a.jsonl", [{"title": "a", "body": "b", "n": 1}])
    caught = refused(SourceError, "no field 'text'", stream, path, field="text")
    assert caught.found == "title (Text), body (Text), n (Int)"
    assert "--text-field" in str(caught.fix)
    refused(SourceError, "no field 'other'", stream, path, field="other")
    plain = put(tmp_path / "a.txt", "one")
    refused(UsageError, "plain text have no field", stream, plain, field="body")
    for content, what in (
        ("text,a,a\nx,1,2\n", "two columns of the table have the same name"),
        ('"text\nx\n', "never closed"),
        ("title,body\na,b\n", "no field 'text'"),
        ("\0", "a NUL character"),
        ("text\n", "there are no documents"),
    ):
        refused(SourceError, what, stream, put(tmp_path / "a.csv", content), field="text")


def test_bytes_and_characters_that_are_no_text_are_found_in_every_form(tmp_path):
    path = put(tmp_path / "a.txt", b"one\ntwo \xfc\nthree\n")
    (error,) = errors(stream(path))
    assert (error.where["offset"], error.found) == (8, "0xfc: invalid start byte")
    assert "--encoding" in str(error.fix)
    assert good(path) == ["one", "three"]
    error = refused(SampleError, "not valid UTF-8", files(tmp_path).__getitem__, 0)
    assert error.where == {"path": str(path), "key": "a", "offset": 8}
    for encoding in ("utf-16", "utf-32"):  # whose mark says which they are
        put(path, "one\ntwo\n".encode(encoding))
        (error,) = errors(stream(path))
        assert encoding.upper() in error.what
        assert f"--encoding {encoding}" in str(error.fix)
        refused(SampleError, "byte order mark", files(tmp_path).__getitem__, 0)
    for encoding, offset in (("utf-8", 6), ("utf-16-le", 12)):
        put(path, "one\ntw\0\u0a00o\nthree\n".encode(encoding))
        (error,) = errors(stream(path, encoding=encoding))
        assert error.where["offset"] == offset
        assert good(path, encoding=encoding) == ["one", "three"]
        whole = files(tmp_path, encoding=encoding)
        assert refused(SampleError, "NUL", whole.__getitem__, 0).where["offset"] == offset


ROWS = {
    "jsonl": ("", '{"text": "a%d"}'),
    "csv": ("text,n", "a%d,1"),
    "tsv": ("text\tn", "a%d\t1"),
    "txt": ("", "a%d"),
}


def rows_of(form: str, number: int) -> list[str]:
    head, row = ROWS[form]
    return [head] * bool(head) + [row % n for n in range(number)]


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_a_few_nul_bytes_in_place_of_text_are_an_error_where_they_begin(tmp_path, form, encoding):
    rows = rows_of(form, 150)
    before = "\n".join(rows).encode(encoding)
    after = "\n".join(["", *rows[-150:]]).encode(encoding)
    path = put(tmp_path / f"a.{form}", before + bytes(64) + after)
    (error,) = errors(stream(path, encoding=encoding))
    assert ("not JSON" if form == "jsonl" else "NUL character") in error.what
    assert error.where["offset"] == len(before)
    assert len(good(path, encoding=encoding)) == 149 + 150


@pytest.mark.parametrize("form", ROWS)
def test_a_sparse_file_is_an_error_at_once(tmp_path, form):
    for rows in (1, 150):  # the hole begins among the first documents, or after them
        text = "\n".join([*rows_of(form, rows), ""])
        path = put(tmp_path / f"a.{form}", text)
        os.truncate(path, 1 << 40)
        # The file is not skipped: it may go on after the hole.
        error = refused(SourceError, "NUL bytes", lambda path: errors(stream(path)), path)
        assert error.where["offset"] == len(text)


def test_the_quotes_of_a_tsv_that_is_cut_are_those_before(tmp_path):
    rows = ["text\tn", *(f'"said" {n}\t"{n}"' for n in range(2000))]
    data = gzip.compress("\n".join(rows).encode())
    path = put(tmp_path / "a.tsv.gz", data[:-100])
    (error,) = errors(stream(path))
    assert "damaged" in error.what
    assert good(path)[0] == '"said" 0'


@pytest.mark.parametrize("how", ["gz", "zst", "bz2", "xz"])
def test_a_compressed_file_that_is_cut_or_damaged_gives_what_is_before(tmp_path, monkeypatch, how):
    monkeypatch.setattr(blocks, "COMPRESSED_BLOCK", 64)
    lines = b"".join(b'{"text": "%d"}\n' % n for n in range(50))
    rest = b'{"text": "%s"}\n' % random.Random(0).randbytes(5000).hex().encode()
    # The first member is whole: how far a reader comes in the second is its library's affair.
    path = put(tmp_path / f"a.jsonl.{how}", (COMPRESS[how](lines) + COMPRESS[how](rest))[:-100])
    put_lines(tmp_path / "b.jsonl", [{"text": "b"}])
    (error,) = errors(stream(tmp_path))
    assert "damaged" in error.what
    assert str(error.found).startswith("it is truncated")
    assert error.where["path"] == str(path)
    assert len(lines) <= error.where["offset"] < len(lines) + len(rest)
    assert good(tmp_path) == [*map(str, range(50)), "b"]
    put(tmp_path / f"c/a.txt.{how}", path.read_bytes())
    refused(SampleError, "damaged", files(tmp_path / "c").__getitem__, 0)
    plain = put(tmp_path / f"a.jsonl.{how}", GOOD)  # not compressed at all
    refused(SourceError, "damaged", stream, plain)


@pytest.mark.parametrize("how", ["gz", "xz", "bz2", "zst"])
def test_zeros_are_padding_only_where_they_fill_up_a_block_of_tape(tmp_path, how):
    one, two = COMPRESS[how](b"one\ntwo\n"), COMPRESS[how](b"three\n")
    path = put(tmp_path / f"a.txt.{how}", one + bytes(-len(one) % 512 + 512))
    assert values(stream(path)) == ["one", "two"]
    for rest in (b"more", bytes(-len(one) % 512 + 1), bytes(-len(one) % 512) + two, bytes(1 << 14)):
        put(path, one + rest)
        (error,) = errors(stream(path))
        assert (error.where["offset"], good(path)) == (8, ["one", "two"])
    put(path, bytes(len(one)))
    zeros = put(tmp_path / f"b.jsonl.{how}", bytes(1024))
    refused(SourceError, "damaged", stream, zeros)
    assert "damaged" in errors(stream(path))[0].what


@pytest.mark.parametrize("how", ["gz", "zst", "bz2", "xz"])
@given(data=st.data())
def test_flipped_bits_never_give_other_documents(how, data):
    texts = [f"{n} " + "words " * (n % 7) for n in range(60)]
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    whole = bytearray(COMPRESS[how](content))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        put_lines(Path(folder) / "0.jsonl", [{"text": "first"}])
        put(Path(folder) / f"a.jsonl.{how}", bytes(whole))
        found = list(stream(Path(folder)).documents())
    bad = [d for d in found if isinstance(d.sample, SampleError)]
    got = [d.sample["text"] for d in found if not isinstance(d.sample, SampleError)]
    assert bad or got == ["first", *texts]


def test_a_file_that_changed_since_the_plan_or_is_none_is_an_error_in_its_turn(tmp_path):
    for number, change in enumerate((b"", b"one\n", b"one\ntwo\nmore\n")):
        root = tmp_path / str(number)
        for name in ("a.txt", "b.txt"):
            put(root / name, b"one\ntwo\n")
        lines, whole = stream(root, documents="line"), files(root)
        path = put(root / "a.txt", change)
        (error,) = errors(lines)
        assert error.what == "the file changed while the conversion ran"
        assert error.where["path"] == str(path)
        left = [d.sample["__key__"] for d in lines.documents() if isinstance(d.sample, dict)]
        assert left == ["b.txt/0", "b.txt/4"]
        refused(SampleError, "the file changed", whole.__getitem__, 0)
        path.unlink()
        (error,) = errors(lines)
        assert "cannot be read" in error.what
    root = tmp_path / "pipes"
    put_lines(root / "a.jsonl", [{"text": "a"}])
    (root / "b.jsonl").symlink_to("nowhere")
    for name in ("c.jsonl.gz", "d.csv"):
        os.mkfifo(root / name)
    source = stream(root)
    pipe = "the file cannot be read: it is a pipe, not a regular file"
    assert [e.what for e in errors(source)] == ["the symbolic link is broken", pipe, pipe]
    assert (good(root), source.sizes().tolist()) == (["a"], [14, 0, 0, 0])
    refused(SourceError, "not a regular file", stream, root / "d.csv")


@given(
    st.binary(max_size=300),
    st.sampled_from([".txt", ".jsonl", ".csv", ".tsv", ".jsonl.zst", ".txt.gz"]),
    st.sampled_from(["utf-8", "utf-16", "cp1252", "shift_jis", "auto"]),
)
def test_any_bytes_give_documents_or_errors(data, suffix, encoding):
    with tempfile.TemporaryDirectory() as folder:
        path = put(Path(folder) / f"a{suffix}", data)
        try:
            source = stream(path, encoding=encoding, field="text", keep_fields=True)
        except SourceError:  # there is no good document to tell its fields by
            return
        for document in source.documents():
            assert document.size >= 0
            if isinstance(document.sample, SampleError):
                assert document.sample.where["path"] == str(path)
                assert 0 <= document.sample.where["offset"] <= 2 * len(data) + 1000
            else:
                assert source.schema.check(document.sample) == document.sample
