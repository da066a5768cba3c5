"""What no check foresees in data: an error of ours with its place, at whatever it is met."""

import base64
import errno
import gzip
import io
import json
import os
import re
import struct
import sys
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest

import shardkit
from shardkit.codecs.tokenizers.tokenizer import Tokenizer
from shardkit.conversion.bucket import Scratch
from shardkit.dataset.dataset import Dataset
from shardkit.errors import (
    DamagedError,
    FormatError,
    NotFoundError,
    SampleError,
    ShardkitError,
    StorageError,
    UsageError,
)
from shardkit.helpers import os_errors
from shardkit.helpers.json_process import JsonProcess
from shardkit.inspection.inspect import inspect
from shardkit.stream import Loader
from shardkit.testing import make_image
from tests.conftest import IMAGE_FORMATS, few, write_images

_READS = (
    "__getitem__", "sample", "read_fields", "stored", "keys", "plan", "sizes",
    "plan",
)  # fmt: skip
_RAISED = [
    ValueError("x"), KeyError("x"), IndexError("x"), TypeError("x"), AttributeError("x"),
    struct.error("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x"), OverflowError("x"),
    RecursionError("x"), ZeroDivisionError("x"), AssertionError("x"), EOFError("x"),
]  # fmt: skip


@pytest.fixture(scope="module", params=few(IMAGE_FORMATS))
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    images = write_images(folder / "images", classes=2, each=2)
    shardkit.convert(images, to=request.param, out=folder / "out", workers=0)
    return folder / "out"


def _raise(error):
    raise error


def _uses(path):
    """All that reads the samples of a dataset."""
    again = path.with_name("again")
    return [
        lambda: shardkit.open(path)[1],
        lambda: list(Loader(path, batch_size=2, threads=0, fields=["label"])),
        lambda: [_raise(problem) for problem in shardkit.verify(path, decode=True).problems],
        lambda: [_raise(problem) for problem in shardkit.verify(path, path).problems],
        lambda: inspect(path, full=True),
        lambda: shardkit.convert(path, to="wds", out=again, workers=0, overwrite=True),
    ]


def _break(monkeypatch, path, error):
    """Make a format's reader raise whatever is read."""
    reader = type(shardkit.open(path).reader(0))
    for name in _READS:
        if hasattr(reader, name):
            monkeypatch.setattr(reader, name, lambda *_, **__: _raise(error))


def test_what_a_reader_raises(made, monkeypatch):
    """Each use meets an error, and each error a use."""
    uses = _uses(made)
    met = [(use, _RAISED[0]) for use in uses]
    met += [(uses[n % len(uses)], error) for n, error in enumerate(_RAISED)]
    for use, error in met:
        with monkeypatch.context() as patch:
            _break(patch, made, error)
            with pytest.raises(DamagedError, match="no specific message") as raised:
                use()
        assert type(error).__name__ in (raised.value.found or "")
        assert made.name in str(raised.value.where["path"])
        assert raised.value.__cause__ is error
    for error, kind, words in (  # what says nothing of the data, and what opening raises
        (MemoryError("x"), MemoryError, "x"),
        (OSError(errno.EIO, "x"), StorageError, "cannot read"),
        (None, DamagedError, "no specific message"),
    ):
        if error is not None:
            _break(monkeypatch, made, error)
        else:
            monkeypatch.setattr(Dataset, "_open", lambda *_: _raise(KeyError("x")))
        for use in uses:
            with pytest.raises(kind, match=words):
                use()


def _folder(root, row="", name=b"cat"):
    folder = os.fsencode(root / "in") + b"/" + name
    os.makedirs(folder)
    for number in range(2):
        Path(os.fsdecode(folder + b"/%d.jpg" % number)).write_bytes(make_image(number))
    if row:
        text = '{"file_name": "cat/0.jpg", ' + row + '}\n{"file_name": "cat/1.jpg"}\n'
        (root / "in" / "metadata.jsonl").write_text(text)
    return root / "in"


def write_tar(path, *members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_names_that_are_not_unicode_and_numbers_beyond_all_floats(tmp_path, format):
    field = "name of a field is not valid|ASCII"
    for number, (make, words) in enumerate((
        (lambda root: _folder(root, name=b"\xff"), "the name of a class is not valid Unicode"),
        (lambda root: _folder(root, '"\\ud800": 1'), field),
        (lambda root: write_tar(root / "x.tar", ("a.\udcff", b"x")), field),
    )):  # fmt: skip
        (root := tmp_path / str(number)).mkdir()
        source = make(root)
        for on_error in ("fail", "skip"):
            with pytest.raises(ShardkitError, match=words):
                shardkit.convert(source, format, root / "x", workers=0, on_error=on_error)
    number = int("9" * 400)
    source = _folder(tmp_path, f'"a": {number}')
    shardkit.convert(source, to=format, out=tmp_path / "out", workers=0)
    assert shardkit.open(tmp_path / "out")[0]["a"] == number  # as JSON


@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
@pytest.mark.parametrize(
    "make",
    [
        lambda root: _folder(root, '"a": "\\ud800"'),
        lambda root: _folder(root, '"a": {"\\ud800": 1}'),
        lambda root: write_tar(root / "x.tar", ("a.cls", b"1"), ("b.cls", b"9" * 19)),
        lambda root: write_tar(root / "x.tar", ("a.cls", b"1"), ("b.cls", b"-9223372036854775809")),
        lambda root: write_tar(root / "x.tar", ("a.cls", b"1"), ("b.cls", b"9" * 5000)),
        lambda root: write_tar(root / "x.tar", ("a.json", b"1"), ("b.json", b'{"x": [NaN]}')),
    ],
    ids=["text", "json", "over 2^63", "under -2^63", "5,000 digits", "NaN"],
)
def test_values_that_no_format_can_store(tmp_path, format, make):
    source, out = make(tmp_path), tmp_path / "out"
    with pytest.raises(SampleError) as raised:
        shardkit.convert(source, to=format, out=out, workers=0)
    assert raised.value.where["key"]
    result = shardkit.convert(source, to=format, out=out, workers=0, on_error="skip")
    assert result.errors == 1
    assert shardkit.verify(out, decode=True).sound


@pytest.mark.filterwarnings("ignore:compressed TARs")
@pytest.mark.parametrize("full", ["folder", "file"])
def test_a_temporary_folder_that_is_full(tmp_path, full, monkeypatch):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(write_tar(tmp_path / "in.tar", ("a.txt", b"x")).read_bytes()))
    name = "gettempdir" if full == "folder" else "TemporaryFile"
    code = errno.ENOENT if full == "folder" else errno.ENOSPC
    monkeypatch.setattr(tempfile, name, lambda **_: _raise(OSError(code, "none can be used")))
    with pytest.raises(StorageError, match=r"unpack|no folder for temporary files") as raised:
        shardkit.open(path)
    assert "TMPDIR" in (raised.value.fix or "")


@pytest.mark.parametrize("use", [
    lambda folder: shardkit.convert([{"text": "a"}], "lance", folder / "out", workers=0),
    lambda _: Scratch(),
    lambda _: JsonProcess([sys.executable]),
])  # fmt: skip
@pytest.mark.parametrize("gone", [True, False])
def test_a_temporary_folder_that_is_gone(tmp_path, monkeypatch, use, gone):
    """Since the process began, as at the end of a job; or there was none that is writable."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    if not gone:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: _raise(OSError(errno.ENOENT, "none")))
    with pytest.raises((StorageError, NotFoundError), match=r"temporary (file|folder)"):
        use(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_disk_without_inodes_and_a_quota_are_no_full_disk(tmp_path, monkeypatch):
    """There may be much space: nobody looks for what takes it."""
    path = tmp_path / "out.partial/x.tar"

    def said(code):
        return str(os_errors.explain(OSError(code, ""), "write", path))

    assert re.search(r"the disk is full\n.*\n  found: [\d,]+ bytes free\n", said(errno.ENOSPC))
    quota = said(errno.EDQUOT)
    assert "a quota is used up" in quota
    assert "bytes free" not in quota
    about = SimpleNamespace(f_files=1000, f_favail=0, f_blocks=9, f_bavail=7, f_bfree=7, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: about)
    assert re.search(
        r"no inodes for more files\n.* found: [\d,]+ bytes free, 0 inodes free\n.*`df -i`",
        said(errno.ENOSPC),
        re.DOTALL,
    )


@pytest.mark.large
def test_tables_of_very_many_columns(tmp_path):
    def convert(names):
        path = tmp_path / "x.csv"
        path.write_text(",".join(names) + "\n" + ",".join("x" * len(names)) + "\n")
        text = shardkit.TextOptions(field="c0")
        shardkit.convert(path, "wds", tmp_path / "out", workers=0, text=text)

    convert([f"c{n}" for n in range(60_000)])
    with pytest.raises(ShardkitError, match="the same name"):
        convert(["c"] * 60_000)
    table = pyarrow.table({f"c{n}": [n] for n in range(8_000)})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write(table)
    assert inspect(tmp_path / "a.arrow")["fields"]["c9"]["stats"]["count"] == 1


def test_a_tar_of_very_many_extensions(tmp_path):
    """Its index would have a place for each of them in each sample."""
    few = write_tar(tmp_path / "in.tar", *((f"{n}.f{n % 9}", b"x") for n in range(3000)))
    assert len(shardkit.open(few)) == 3000
    many = write_tar(tmp_path / "in.tar", *((f"{n}.f{n}", b"x") for n in range(3000)))
    with pytest.raises(FormatError, match="too many extensions"):
        shardkit.open(many)


def _tokenize(tmp_path, on_error="fail", model=(), **parts):
    """Convert two texts with a tokenizer.json of the letters a to c, and these parts."""
    vocabulary = {letter: n for n, letter in enumerate("abc")}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], **dict(model)}
    path, source = tmp_path / "tokenizer.json", tmp_path / "in.txt"
    path.write_text(json.dumps({"version": "1.0", "model": model, **parts}))
    source.write_text("abc\nabcd\n")
    options = {"text": shardkit.TextOptions(tokenizer=path, append_eos=False), "workers": 0}
    return shardkit.convert(source, "wds", tmp_path / "out", on_error=on_error, **options)


def test_a_tokenizer_that_panics_or_makes_nothing_of_a_text(tmp_path, monkeypatch):
    """What Rust panics with is no Exception."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(UsageError, match="not a tokenizer") as raised:
        _tokenize(tmp_path, normalizer=normalizer)
    assert type(raised.value.__cause__).__name__ == "PanicException"
    with pytest.raises(UsageError, match="not a tokenizer"):
        _tokenize(tmp_path, pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}})
    with pytest.raises(SampleError, match="cannot encode") as raised:
        _tokenize(tmp_path, model={"unk_token": "none"})
    assert "not found in the vocabulary" in (raised.value.found or "")
    assert _tokenize(tmp_path, model={"unk_token": "none"}, on_error="skip").errors == 1
    # A pattern of tiktoken's files stands in the manifest.
    tokenizer = Tokenizer(
        "tiktoken", "x.tiktoken", "", None, "tiktoken", "special", 1, None, None, None, pattern="("
    )
    monkeypatch.setattr(Tokenizer, "_data", lambda _: base64.b64encode(b"a") + b" 0\n")
    with pytest.raises(UsageError, match="cannot be used"):
        tokenizer.encode(["a"])
