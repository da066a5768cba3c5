"""The base: keys, schema, errors, options, order, storage, paths and URLs."""

import ast
import errno
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

import shardkit
from shardkit import errors
from shardkit.codecs.image import NotAnImageError, checked
from shardkit.codecs.media import guessed_schema
from shardkit.conversion.stats import Stats
from shardkit.errors import SampleError, ShardkitError, StorageError, UsageError
from shardkit.formats import FORMATS
from shardkit.helpers.checked import checked as checked_json
from shardkit.helpers.checked import plain
from shardkit.helpers.order import permutation
from shardkit.helpers.words import parse_size
from shardkit.metadata.recipe import Recipe, identity
from shardkit.metadata.sizes import FieldSizes
from shardkit.options import ConvertOptions, parse_split
from shardkit.sample import JsonText, key_of, unique_key
from shardkit.schema import TYPES, Array, Bool, Bytes, Float, Image, Images, Int, Json, Schema, Text
from shardkit.storage import byte_source, checksums, fs
from shardkit.storage.remote.path import RemotePath
from shardkit.stream import Loader
from shardkit.testing import EVERYTHING, everything


def test_keys_lose_dots_and_find_a_free_name_and_json_is_kept_or_made():
    assert key_of("a.b/c.d.e") == "a.b/c_d_e"
    taken = set()
    for expected in ("a", "a~png", "a~2", "a~3"):
        assert unique_key("a", "png", taken) == expected
        taken.add(expected)
    text = JsonText('{"a" :1}')
    assert JsonText.of(text) is text
    assert JsonText.of({"ä": [1, None]}) == '{"ä":[1,null]}'
    assert JsonText.of("plain text") == '"plain text"'


def test_a_type_takes_its_values_and_no_others():
    for kind, good, bad in (
        (Int(), [0, -(2**63), np.int8(3), 2**63 - 1], [1.0, True, "1", None, 2**63]),
        (Float(), [1.5, 2, np.float32(1)], [True, "1", None, 1j]),
        (Bool(), [True, np.bool_(False)], [0, 1, None, "true"]),
        (Text(), ["", "ä"], [b"", 1, None]),
        (Bytes(), [b"", bytearray(b"x"), memoryview(b"y")], ["", 1, None]),
        (Image(), [b"\xff\xd8\xff"], ["", None]),
        (Images(), [[], [b"a", b"b"]], [b"", None, [""], [None], {b"a"}]),
        (Json(), [{}, [], None, 1, "x"], [b"", {1}, object()]),
        (Array("<i4", (None, 2)), [np.zeros((3, 2), "<i4")], [np.zeros(2, "<i4"), [[1, 2]]]),
        (Array(), [np.zeros(3), np.array("x")], [np.array([None]), 3]),
    ):
        for value in good:
            stored = kind.check(value)
            assert type(stored).__name__ in kind.python or isinstance(kind, Json)
            assert np.array_equal(stored, bytes(value) if isinstance(kind, Bytes) else value)
        for value in bad:
            with pytest.raises(TypeError):
                kind.check(value)


def test_schemas_and_stats_survive_json_and_pickle():
    # Lists of images are in no schema for all formats, as some refuse them.
    others = {"Images", "Audio", "Video"}
    assert set(TYPES) == {type(kind).__name__ for kind in EVERYTHING.values()} | others
    copy = Schema.from_json(json.loads(json.dumps(EVERYTHING.to_json())))
    assert dict(copy) == dict(EVERYTHING) == dict(pickle.loads(pickle.dumps(EVERYTHING)))
    shown = "Array(optional=True, dtype='<f4', shape=(None, 2))"
    assert repr(Array("<f4", (None, 2), optional=True)) == shown
    with pytest.raises(errors.FormatError, match="type that this version does not know"):
        Schema.from_json({"x": {"type": "Volume"}})
    stats = Stats.of(EVERYTHING)
    for n in range(20):
        stats.add(everything(n))
    stats.flush()
    copy = checked_json(Stats, json.loads(json.dumps(plain(stats))))
    assert (copy.fields, copy.labels) == (stats.fields, stats.labels)


def test_a_schema_is_guessed_from_a_sample_puts_it_in_order_and_says_what_is_missing():
    guessed = guessed_schema(everything(3))
    assert [*guessed] == [*EVERYTHING]
    assert all(type(guessed[name]) is type(kind) for name, kind in EVERYTHING.items())
    backwards = dict(reversed(everything(0).items()))
    assert list(EVERYTHING.check(backwards)) == ["__key__", *EVERYTHING]
    schema = Schema({"a": Int(), "b": Int(optional=True)})
    assert schema.check({"__key__": "x", "a": 1}) == {"__key__": "x", "a": 1}
    with pytest.raises(SampleError, match="has no field 'a'") as error:
        schema.check({"__key__": "x", "b": 1})
    assert error.value.where == {"key": "x"}


def test_every_error_tells_all_it_knows_and_pickles():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, ShardkitError)]
    assert len(kinds) > 5
    for kind in kinds:
        places = {"shard": "s.tar", "position": 3, "key": "k", "field": "f", "offset": 512}
        more = {"expected": "this", "found": "that", "fix": "do so"}
        error = kind("it went wrong", path=Path("a/b"), **places, **more)
        assert str(error) == (
            "it went wrong\n"
            "  where: a/b, shard 's.tar', position 3, key 'k', field 'f', byte 512\n"
            "  expected: this\n  found: that\n  fix: do so"
        )
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (kind, str(error))
        about = {"error": kind.__name__, "what": "it went wrong", "path": "a/b"}
        assert error.to_dict() == {**about, **places, **more}
        located = kind("x", key="mine").located(key="other", path="p")
        assert located.where == {"key": "mine", "path": "p"}
        with pytest.raises(TypeError, match=r"expected path, shard, .*offset"):
            kind("x", planet="earth")


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"lance"}))  # pylance reads by itself
def test_errors_keep_their_cause_on_the_way_up(tmp_path, format, monkeypatch):
    """A disk that fails while a Loader reads, through every layer that adds places."""
    schema, value = {"tokens": Array("<u2", (None,))}, np.arange(9, dtype=np.uint16)
    shardkit.convert([{"tokens": value}] * 4, format, tmp_path / "d", schema=schema, workers=0)

    def fails(*_):
        raise OSError(errno.EIO, "the disk is on fire")

    monkeypatch.setattr(byte_source, "reads", None)
    monkeypatch.setattr("os.pread", fails)
    with pytest.raises(ShardkitError, match="Input/output error") as caught:
        list(Loader(tmp_path / "d", batch_size=2, threads=0))
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EIO
    assert {"path", "offset"} <= caught.value.where.keys()


def test_no_handler_that_looks_at_an_error_takes_it_away():
    """`from None` is for errors that say nothing more, such as a KeyError: they have no name."""
    with pytest.raises(SampleError) as caught:  # what a decoder says stays the cause
        checked(b"\x89PNG\r\n\x1a\n" + bytes(40), "a", "image")
    assert isinstance(caught.value.__cause__, NotAnImageError)
    found = []
    for path in Path(shardkit.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for handler in ast.walk(ast.parse(text)) if " from None" in text else ():
            if isinstance(handler, ast.ExceptHandler) and handler.name is not None:
                raised = [node for node in ast.walk(handler) if isinstance(node, ast.Raise)]
                lines = [node.lineno for node in raised if ast.unparse(node).endswith(" from None")]
                found += [f"{path.name}:{line}" for line in lines]
    assert not found


def test_sizes_splits_and_options_are_parsed():
    for text, size in (
        *(("1", 1), (4096, 4096), ("256MB", 256_000_000), ("1.5 kB", 1500), ("2GiB", 2**31)),
        *(("1t", 10**12), ("64m", 64_000_000), ("3Ki", 3072)),
    ):
        assert parse_size(text) == size
    for text in ("", "MB", "-1", "1e3", "1 PB", "1 2"):
        with pytest.raises(UsageError, match="invalid size"):
            parse_size(text)
    assert parse_split("auto") == parse_split("none") == {}
    assert parse_split("a=0.9, b=0.1") == {"a": 0.9, "b": 0.1}

    def made(**options):
        return identity(Recipe.of("wds", ConvertOptions(**options)).to_json())

    # Options that shape the output are those in the manifest.
    assert made(workers=3, overwrite=True, on_error="skip") == made()
    assert made(shuffle=True) != made()


@given(st.integers(0, 500), st.integers(-(2**70), 2**70))
@example(10_000, 5)
def test_a_permutation_has_every_number_once_in_its_place_for_ever(length, seed):
    assert permutation(8, 0).tolist() == [5, 7, 1, 4, 2, 0, 6, 3]
    assert permutation(8, 1).tolist() == [6, 7, 0, 5, 1, 3, 2, 4]
    order, numbers = permutation(length, seed), np.arange(length)
    assert np.array_equal(np.sort(order), numbers)
    if length == 10_000:  # it is well mixed
        assert abs(np.corrcoef(order, numbers)[0, 1]) < 0.05
        assert (order == numbers).sum() < 10
        assert abs(np.corrcoef(order, permutation(length, seed + 1))[0, 1]) < 0.05


@given(st.lists(st.integers(0, 2**40), min_size=1), st.floats(0, 1))
@example([2, 1], 0.5)
def test_sizes_in_parts_sum_up_to_the_whole(sizes, share):
    cut = round(share * len(sizes))
    whole, first, second = FieldSizes(), FieldSizes(), FieldSizes()
    whole.add(sizes)
    for part, values in ((first, sizes[:cut]), (second, sizes[cut:])):
        if values:
            part.add(values)
    if not sizes[:cut]:
        first, second = second, first
    if second.count:
        first.merge(second)
    assert first == whole
    stats, middle = whole.summary(), sorted(sizes)[(len(sizes) - 1) // 2]
    assert (stats.count, stats.bytes) == (len(sizes), sum(sizes))
    assert (stats.min, stats.max) == (min(sizes), max(sizes))
    assert abs(stats.median - middle) <= 0.01 * middle


def test_a_file_has_the_checksum_of_its_bytes_written_or_read(tmp_path, monkeypatch):
    path, data = tmp_path / "x", [bytes([n]) * 300_000 for n in range(40)]
    with fs.create(path) as file:
        fs.write(file, data[:30])
        fs.write(file, data[30:])
    expected = checksums.checksum(b"".join(data))
    assert fs.checksum(path) == expected  # from writing
    assert fs.checksum(path) == expected  # from reading
    with fs.create(path) as file:
        fs.write(file, [b"one"])
    path.write_bytes(b"something else")
    assert fs.checksum(path) == xxhash.xxh3_128_hexdigest(b"something else")
    real = os.writev  # a write that the system takes in pieces is completed
    monkeypatch.setattr(os, "writev", lambda handle, chunks: real(handle, [b"".join(chunks)[:5]]))
    with fs.create(path) as file:
        fs.write(file, [b"hello", b" ", b"world"])
    assert path.read_bytes() == b"hello world"


def test_storage_errors_say_what_was_done_to_which_path(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError, match="cannot create: Is a directory") as error:
        fs.create(tmp_path)
    assert error.value.where == {"path": tmp_path}
    with pytest.raises(StorageError, match="Not a directory"):
        fs.make_folder(tmp_path / "file/x")
    with pytest.raises(FileNotFoundError, match="cannot rename: there is no such file"):
        fs.rename(tmp_path / "a", tmp_path / "b")
    fs.remove(tmp_path / "nothing")


def test_public_names_are_all_there_and_no_others():
    assert all(getattr(shardkit, name) is not None for name in shardkit.__all__)
    assert set(shardkit.__all__) <= set(dir(shardkit))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        shardkit.nothing  # noqa: B018


URL = "s3://bucket/folder/x.tar"


@pytest.mark.parametrize("url", [URL, Path(URL)], ids=["text", "path"])  # of two slashes, one
def test_a_url_is_a_remote_path_but_not_a_name_with_a_colon(url, tmp_path, monkeypatch):
    assert fs.output(url) == fs.source(url)
    found = fs.source(url)
    assert isinstance(found, RemotePath)
    assert str(found) == URL
    assert fs.source(found) is found
    assert (found.name, found.parent / "y.tar") == ("x.tar", fs.source(f"{URL[:-5]}y.tar"))
    with pytest.raises(UsageError, match="without a scheme") as error:
        fs.source("file:///tmp/x")
    assert error.value.fix == "give /tmp/x"
    (tmp_path / "data:" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("a:b", "C:/data", "./s3:/x", "12:30/x", "data:/x"):
        assert fs.source(name) == Path(name)
