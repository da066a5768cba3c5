"""TARs that others made: what webdataset reads, we read alike; what is damaged is named."""

import bz2
import gzip
import io
import lzma
import subprocess
import tarfile
import warnings

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.codecs.compression import compression_of
from shardkit.errors import DamagedError, SampleError, ShardkitWarning
from shardkit.formats import get_format
from shardkit.formats.wds import names
from shardkit.testing import make_image
from tests.conftest import examples
from tests.formats.refusals import refused
from tests.peers import by_webdataset

WDS = get_format("wds")


def pack(path, members, format=tarfile.USTAR_FORMAT):
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def raw(path):
    """All samples as we read them."""
    reader = WDS.open(path)
    return [reader[n] for n in range(len(reader))]


VALUES = {"jpg": make_image, "cls": b"%d".__mod__, "json": b'{"n": %d}'.__mod__}
MEMBERS = [(f"set/{n:03d}.{name}", value(n)) for n in range(5) for name, value in VALUES.items()]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_kinds_of_headers_are_read(tmp_path, format):
    long = [("d" * 60 + "/" + "f" * 60 + f"{n}.txt", b"long") for n in range(2)]
    if format != tarfile.USTAR_FORMAT:
        long += [("e" * 300 + ".txt", b"longer"), ("ü" * 120 + "/漢.txt", "ö".encode())]
    path = pack(tmp_path / "x.tar", MEMBERS + long, format)
    found = raw(path)
    assert [s["__key__"] for s in found] == [s["__key__"] for s in by_webdataset(path)]
    assert found[0] == {"__key__": "set/000", "jpg": make_image(0), "cls": 0, "json": {"n": 0}}
    assert [s["txt"] for s in found[5:]] == [data.decode() for _, data in long]


def test_shards_of_gnu_tar_are_read(tmp_path):
    deep, path = "d" * 90 + "/" + "e" * 60, tmp_path / "x.tar"
    folder = tmp_path / "in" / deep
    folder.mkdir(parents=True)
    for n in range(3):
        (folder / f"{n}.png").write_bytes(make_image(n, "PNG"))
        (folder / f"{n}.cls").write_text(str(n))
    (folder / "link.png").symlink_to("0.png")
    images = [make_image(n, "PNG") for n in range(3)]
    expected = [{"__key__": f"./{deep}/{n}", "png": png, "cls": n} for n, png in enumerate(images)]
    for options in ([], ["--format=pax"], ["--format=gnu"], ["--format=ustar"]):
        command = ["tar", "--sort=name", *options, "-cf", path, "-C", tmp_path / "in", "."]
        subprocess.run(command, check=True)
        assert raw(path) == expected


PACKS = {"tar.gz": gzip.compress, "tgz": gzip.compress, "tar": gzip.compress}
PACKS |= {"tar.zst": zstandard.compress, "tar.bz2": bz2.compress, "tar.xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKS)
def test_compressed_tars_are_read_and_said_to_be_slow(tmp_path, suffix):
    plain, path = pack(tmp_path / "plain.tar", MEMBERS), tmp_path / f"x.{suffix}"
    path.write_bytes(PACKS[suffix](plain.read_bytes()))
    with pytest.warns(ShardkitWarning, match="compressed"):
        assert raw(path) == raw(plain)
    if suffix in ("tar.gz", "tar.zst", "tar.xz"):
        path.write_bytes(path.read_bytes()[:-400])
        with pytest.warns(ShardkitWarning), pytest.raises(DamagedError, match=r"damaged|truncated"):
            WDS.open(path)


# Names from formats.md's table, with what webdataset makes of each; some mark a sample as bad.
ODD_NAMES = [
    "a/b.seg.PNG", "a/.h", "a/._x.jpg", "a.b/c.d.jpg", "a.b/.h", ".h", ".h.jpg", "./x.jpg",
    "/d/x.jpg", "a//b.jpg", "x", "a/x", "x.a/b", "x.", "x..jpg", "x.jpg ", "__m__", "__m__/x.js",
    "__a.b__", "__m__.js", "d/__m__.js", "__m__y/z.js", "ü ö\\x.jpg", "d/__m__", "before.__bad__",
]  # fmt: skip


def test_a_name_is_split_as_webdataset_splits_it(tmp_path):
    for name in ODD_NAMES:
        members = [("before.bin", b"1"), (name, b"2"), ("zz.bin", b"3"), ("zz.__bad__", b"")]
        path = pack(tmp_path / "x.tar", members)
        ours = [(s.pop("__key__"), list(s)) for s in raw(path)]
        theirs = by_webdataset(path)
        theirs = [(s.pop("__key__"), [n for n in s if n != "__bad__"]) for s in theirs]
        assert ours == theirs, name
        assert ("before" in dict(ours)) == (name != "before.__bad__")


@settings(max_examples=examples(50))
@given(st.text(st.sampled_from("ab./_~Z é"), min_size=1, max_size=12))
def test_any_name_is_split_as_webdataset_splits_it(name):
    from webdataset.tariterators import base_plus_ext

    found = names.split(name)
    if found is not None:
        key, field = base_plus_ext(name)
        assert found == (key, field.lower())
    elif not name.startswith("__"):
        assert base_plus_ext(name) == (None, None)


def test_folders_links_and_devices_are_passed_over(tmp_path):
    path = tmp_path / "x.tar"
    kinds = [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
    with tarfile.open(path, "w") as tar:
        for number, kind in enumerate([*kinds, tarfile.REGTYPE]):
            info = tarfile.TarInfo(f"{number}.txt")
            info.type = kind
            tar.addfile(info)
    assert raw(path) == [{"__key__": "5", "txt": ""}]


def test_types_come_from_extensions_unless_the_first_value_says_otherwise(tmp_path):
    first = {"cls": b"cat", "json": b"{", "txt": b"\xff", "npy": b"no", "pkl": b"\x80\x04."}
    members = [(f"a.{extension}", data) for extension, data in first.items()]
    reader = WDS.open(pack(tmp_path / "x.tar", [*members, ("b.cls", b"dog")]))
    assert {type(kind) for kind in reader.schema.values()} == {shardkit.Bytes}
    assert reader.schema["json"].optional
    assert reader[0]["pkl"] == b"\x80\x04."  # never unpickled
    assert reader[1] == {"__key__": "b", "cls": b"dog"}
    path = pack(tmp_path / "y.tar", [("a.cls", b"1"), ("b.cls", b"two")])
    where = {"path": path, "position": 1, "key": "b", "field": "cls", "offset": 1536}
    with refused(SampleError, "a value is damaged", where=where, expected="int"):
        WDS.open(path)[1]


def test_a_truncated_tar_is_damaged_wherever_it_is_cut(tmp_path):
    data, path = pack(tmp_path / "whole.tar", MEMBERS).read_bytes(), tmp_path / "x.tar"
    end = 15 * 512 + sum(-(-len(d) // 512) * 512 for _, d in MEMBERS)
    for cut in [*range(100, end, 333), end - 1]:
        path.write_bytes(data[:cut])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((DamagedError, ShardkitWarning)) as error:
                WDS.open(path)
        if cut % 512:  # at a block's end between two members, only the end mark is missing
            assert isinstance(error.value, DamagedError)
            assert "truncated" in str(error.value)
            assert error.value.where["offset"] <= cut
            assert error.value.where["path"] == path


def test_a_tar_that_ends_too_early_or_too_late_is_read_with_a_warning(tmp_path):
    path = tmp_path / "x.tar"
    data = pack(path, MEMBERS).read_bytes().rstrip(b"\0")
    whole = data.ljust(len(data) // 512 * 512 + 512, b"\0")
    path.write_bytes(whole)
    with pytest.warns(ShardkitWarning, match="without the zero blocks"):
        assert len(raw(path)) == 5
    path.write_bytes(pack(path, [("a.txt", b"1")]).read_bytes() * 2)
    with pytest.raises(DamagedError, match="zeros between its data") as caught:
        WDS.open(path)
    assert caught.value.where["offset"] == 1024
    path.write_bytes(bytes(10_240))
    with pytest.raises(DamagedError, match="begins with zeros"):
        WDS.open(path)
    path.write_bytes(bytes(1024))  # an empty archive
    assert raw(path) == []
    path.write_bytes(whole + bytes(11_264))
    with pytest.warns(ShardkitWarning, match=r"ends with [\d,]+ zeros from byte"):
        assert len(raw(path)) == 5
    path.write_bytes(b"")
    with pytest.raises(DamagedError, match="the TAR file is empty"):
        WDS.open(path)


def test_a_damaged_header_is_named_with_its_byte(tmp_path):
    path = pack(tmp_path / "x.tar", [("a.txt", b"1"), ("b.txt", b"2")])
    data = bytearray(path.read_bytes())
    data[1024 + 3] ^= 0x40  # in the name of the second member
    path.write_bytes(data)
    with refused(DamagedError, "header is damaged", offset=1024, says="checksum"):
        WDS.open(path)


@pytest.mark.parametrize(
    ("names", "match", "where", "says"),
    [
        ("a.jpg a.JPG", "two members for its field 'jpg'", {"key": "a", "offset": 1536}, ""),
        ("a.txt b.txt a.txt", "have the same key", {"key": "a", "offset": 2560}, ""),
        ("a.txt b.txt a.cls", "not next to each other", {}, "'a.cls' here, 'a.txt' at byte 512"),
    ],
)
def test_members_that_make_no_sample_are_named(tmp_path, names, match, where, says):
    path = pack(tmp_path / "x.tar", [(name, b"1") for name in names.split()])
    with refused(DamagedError, match, says=says, path=path, **where) as error:
        WDS.open(path)
    assert "b.txt" not in names or "--sort=name" in str(error.value)


def test_a_sparse_member_is_refused_by_name(tmp_path):
    sparse = tmp_path / "hole.bin"
    with sparse.open("wb") as file:
        file.seek(1 << 20)
        file.write(b"x")
    path = tmp_path / "x.tar"
    for format in ("gnu", "pax"):
        command = ["tar", "--sparse", f"--format={format}", "-cf", path, "-C", tmp_path, "hole.bin"]
        subprocess.run(command, check=True)
        with pytest.raises(DamagedError, match="sparse"):
            WDS.open(path)


def test_converted_on_and_back_its_own_names_come_back(tmp_path):
    odd = [("z/9.seg.png", make_image(9, "PNG")), ("z/9.foo", b"\0\1"), ("z/9.jpeg", make_image(3))]
    path = pack(tmp_path / "x.tar", MEMBERS + odd)
    shardkit.convert(path, "wds", tmp_path / "out", workers=0)
    assert by_webdataset(tmp_path / "out" / "shard-000000.tar") == by_webdataset(path)


@pytest.mark.parametrize("first", ["BZh.txt", "BZh9.txt", "BZh91.txt", "BZhello.txt"])
def test_a_first_name_may_begin_like_bzip2(tmp_path, first):
    path = pack(tmp_path / "x.tar", [(first, b"one"), ("two.txt", b"two")])
    assert [sample["txt"] for sample in shardkit.open(path)] == ["one", "two"]
    for data in (path.read_bytes(), b""):
        head = bz2.compress(data)[:10]
        assert compression_of(head) == compression_of(head[:6]) == "bz2"


BESIDE = b"\x00\x05\x16\x07" + bytes(40)  # what macOS stores beside a file


def test_what_macos_adds_is_passed_over_and_counted(tmp_path):
    names = ["d/._a.jpg", "d/a.jpg", "d/._a.txt", "d/a.txt", "d/._b.jpg", "d/b.jpg", "d/b.txt"]
    image = make_image(1)
    kinds = {"jpg": image, "txt": b"caption"}
    members = [(n, BESIDE if "._" in n else kinds[n.rpartition(".")[2]]) for n in names]
    members.insert(2, ("./d/.DS_Store", b"Bud1"))
    result = shardkit.convert(pack(tmp_path / "a.tar", members), "arrow", tmp_path / "out")
    assert result.ignored == {"TAR member that macOS adds (._NAME, .DS_Store)": 4}
    samples = [*shardkit.open(tmp_path / "out")]
    assert samples == [{"__key__": f"d/{k}", "jpg": image, "txt": "caption"} for k in "ab"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([f"img_0.{n:02d}.png" for n in range(9)], "9 fields occur in one sample each, such as"),
        (["a.seg.png", "a.depth.png", "a.jpg", "b.jpg"], None),
        (["part/a.jpg", "part/b.jpg"], None),
    ],
)
def test_what_was_probably_not_meant_is_said(tmp_path, members, words):
    path = pack(tmp_path / "a.tar", [(name, make_image(1)) for name in members])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shardkit.open(path)
    found = [str(one.message) for one in said]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_a_number_that_json_does_not_have_can_be_left_out(tmp_path):
    members = [("a.txt", b"a"), ("a.json", b'{"x": 1}'), ("b.txt", b"b"), ("b.json", b'{"x": NaN}')]
    path = pack(tmp_path / "a.tar", members)
    with pytest.raises(SampleError, match="no number NaN") as error:
        shardkit.convert(path, "wds", tmp_path / "out", workers=0)
    assert "--drop json" in str(error.value.fix)
    shardkit.convert(path, "wds", tmp_path / "out", drop=["json"], overwrite=True)
    assert [sample["txt"] for sample in shardkit.open(tmp_path / "out")] == ["a", "b"]


@pytest.mark.parametrize("format", ["wds", "arrow", "lmdb"])
def test_a_key_that_is_not_unicode_can_be_encoded(tmp_path, format):
    image = make_image(1)
    path = pack(tmp_path / "a.tar", [("caf\udce9.jpg", image)])
    with pytest.raises(SampleError, match="not valid Unicode") as error:
        shardkit.convert(path, format, tmp_path / "out", workers=0)
    assert "--safe-keys" in str(error.value.fix)
    shardkit.convert(path, format, tmp_path / "out", safe_keys=True, overwrite=True)
    assert shardkit.open(tmp_path / "out")[0] == {"__key__": "caf%ED%B3%A9", "jpg": image}
