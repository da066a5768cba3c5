"""TARs that others made: what webdataset reads, we read alike; what is damaged is named."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import subprocess
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset
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
from tests.peers import by_webdataset

WDS = get_format("wds")


def pack(path: Path, members: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def raw(path: Path) -> list[dict[str, object]]:
    """All samples as we read them."""
    reader = WDS.open(path)
    return [reader[n] for n in range(len(reader))]


@pytest.fixture
def members() -> list[tuple[str, bytes]]:
    return [
        (f"set/{n:03d}.{extension}", data)
        for n in range(5)
        for extension, data in (
            ("jpg", make_image(n)),
            ("cls", b"%d" % n),
            ("json", b'{"n": %d}' % n),
        )
    ]


FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@pytest.mark.parametrize("format", FORMATS)
def test_all_kinds_of_headers_are_read(
    tmp_path: Path, members: list[tuple[str, bytes]], format: int
) -> None:
    long = [("d" * 60 + "/" + "f" * 60 + f"{n}.txt", b"long") for n in range(2)]
    if format != tarfile.USTAR_FORMAT:
        long.append(("e" * 300 + ".txt", b"longer"))
        long.append(("ü" * 120 + "/漢.txt", "ö".encode()))
    path = pack(tmp_path / "x.tar", members + long, format)
    found = raw(path)
    assert [s["__key__"] for s in found] == [s["__key__"] for s in by_webdataset(path)]
    assert found[0] == {"__key__": "set/000", "jpg": make_image(0), "cls": 0, "json": {"n": 0}}
    assert [s["txt"] for s in found[5:]] == [data.decode() for _, data in long]


def test_shards_of_webdatasets_own_writer_are_read(tmp_path: Path) -> None:
    with webdataset.ShardWriter(f"{tmp_path}/x-%06d.tar", maxcount=4, verbose=0) as writer:
        for n in range(10):
            writer.write({"__key__": f"k/{n}", "jpg": make_image(n), "cls": n, "txt": f"text {n}"})
    with shardkit.open(tmp_path) as ds:
        assert len(ds) == 10
        assert ds[7] == {"__key__": "k/7", "jpg": make_image(7), "cls": 7, "txt": "text 7"}
        assert ds.schema["cls"] == shardkit.Int()


def test_shards_of_gnu_tar_are_read(tmp_path: Path) -> None:
    deep = "d" * 90 + "/" + "e" * 60
    folder = tmp_path / "in" / deep
    folder.mkdir(parents=True)
    for n in range(3):
        (folder / f"{n}.png").write_bytes(make_image(n, "PNG"))
        (folder / f"{n}.cls").write_text(str(n))
    (folder / "link.png").symlink_to("0.png")
    for options in ([], ["--format=pax"], ["--format=gnu"], ["--format=ustar"]):
        path = tmp_path / "x.tar"
        command = ["tar", "--sort=name", *options, "-cf", path, "-C", tmp_path / "in", "."]
        subprocess.run(command, check=True)
        assert raw(path) == [
            {"__key__": f"./{deep}/{n}", "png": make_image(n, "PNG"), "cls": n} for n in range(3)
        ]


PACKS: dict[str, Callable[[bytes], bytes]] = {
    "tar.gz": gzip.compress,
    "tgz": gzip.compress,
    "tar.zst": zstandard.ZstdCompressor().compress,
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar": gzip.compress,
}


@pytest.mark.parametrize("suffix", PACKS)
def test_compressed_tars_are_read_and_said_to_be_slow(
    tmp_path: Path, members: list[tuple[str, bytes]], suffix: str
) -> None:
    plain = pack(tmp_path / "plain.tar", members)
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(PACKS[suffix](plain.read_bytes()))
    with pytest.warns(ShardkitWarning, match="compressed"):
        assert raw(path) == raw(plain)
    if suffix in ("tar.gz", "tar.zst", "tar.xz"):
        path.write_bytes(path.read_bytes()[:-400])
        with pytest.warns(ShardkitWarning), pytest.raises(DamagedError, match=r"damaged|truncated"):
            WDS.open(path)


# Names from formats.md's table, with what webdataset makes of each.
ODD_NAMES = [
    "a/b.seg.PNG", "a/.h", "a/._x.jpg", "a.b/c.d.jpg", "a.b/.h", ".h", ".h.jpg", "./x.jpg",
    "/d/x.jpg", "a//b.jpg", "x", "a/x", "x.a/b", "x.", "x..jpg", "x.jpg ", "__m__", "__m__/x.js",
    "__a.b__", "__m__.js", "d/__m__.js", "__m__y/z.js", "ü ö\\x.jpg", "d/__m__",
]  # fmt: skip


def test_a_name_is_split_as_webdataset_splits_it(tmp_path: Path) -> None:
    for name in ODD_NAMES:
        path = pack(tmp_path / "x.tar", [("before.bin", b"1"), (name, b"2"), ("zz.bin", b"3")])
        ours = [(s.pop("__key__"), list(s)) for s in raw(path)]
        theirs = [(s.pop("__key__"), list(s)) for s in by_webdataset(path)]
        assert ours == theirs, name


@settings(max_examples=examples(50))
@given(st.text(st.sampled_from("ab./_~Z é"), min_size=1, max_size=12))
def test_any_name_is_split_as_webdataset_splits_it(name: str) -> None:
    from webdataset.tariterators import base_plus_ext

    found = names.split(name)
    if found is not None:
        key, field = base_plus_ext(name)
        assert found == (key, field.lower())
    elif not name.startswith("__"):
        assert base_plus_ext(name) == (None, None)


def test_a_sample_marked_bad_is_dropped_as_webdataset_drops_it(tmp_path: Path) -> None:
    members = [("a.txt", b"1"), ("b.txt", b"2"), ("b.__bad__", b"x")]
    path = pack(tmp_path / "x.tar", [*members, ("c.txt", b"3"), ("c.__bad__", b"")])
    assert [s["__key__"] for s in raw(path)] == [s["__key__"] for s in by_webdataset(path)]
    assert [s["__key__"] for s in raw(path)] == ["a", "c"]


def test_folders_links_and_devices_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (
            ("d.jpg", tarfile.DIRTYPE), ("l.jpg", tarfile.SYMTYPE), ("h.jpg", tarfile.LNKTYPE),
            ("c.jpg", tarfile.CHRTYPE), ("p.jpg", tarfile.FIFOTYPE),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
        info = tarfile.TarInfo("ok.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"ok"))
    assert raw(path) == [{"__key__": "ok", "txt": "ok"}]


def test_types_come_from_extensions_unless_the_first_value_says_otherwise(tmp_path: Path) -> None:
    path = pack(
        tmp_path / "x.tar",
        [
            ("a.cls", b"cat"), ("a.json", b"{"), ("a.txt", b"\xff"), ("a.npy", b"no"),
            ("a.pkl", b"\x80\x04."), ("b.cls", b"dog"),
        ],
    )  # fmt: skip
    with pytest.warns(ShardkitWarning, match="'cls' are not whole numbers"):
        reader = WDS.open(path)
    assert {type(kind) for kind in reader.schema.values()} == {shardkit.Bytes}
    assert reader.schema["json"].optional
    assert reader[0]["pkl"] == b"\x80\x04."  # never unpickled
    assert reader[1] == {"__key__": "b", "cls": b"dog"}


def test_a_later_value_that_is_not_of_its_type_is_named(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", [("a.cls", b"1"), ("b.cls", b"two")])
    reader = WDS.open(path)
    with pytest.raises(SampleError, match="a value is damaged") as error:
        reader[1]
    where = {"path": path, "position": 1, "key": "b", "field": "cls", "offset": 1536}
    assert error.value.where == where
    assert error.value.expected == "int"


def test_a_truncated_tar_is_damaged_wherever_it_is_cut(
    tmp_path: Path, members: list[tuple[str, bytes]]
) -> None:
    data = pack(tmp_path / "whole.tar", members).read_bytes()
    end = 15 * 512 + sum(-(-len(d) // 512) * 512 for _, d in members)
    path = tmp_path / "x.tar"
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


def test_a_tar_that_ends_too_early_or_too_late_is_read_with_a_warning(
    tmp_path: Path, members: list[tuple[str, bytes]]
) -> None:
    data = pack(tmp_path / "whole.tar", members).read_bytes()
    path = tmp_path / "x.tar"
    path.write_bytes(data.rstrip(b"\0").ljust(len(data.rstrip(b"\0")) // 512 * 512 + 512, b"\0"))
    with pytest.warns(ShardkitWarning, match="without the zero blocks"):
        assert len(raw(path)) == 5
    path.write_bytes(pack(path, [("a.txt", b"1")]).read_bytes() * 2)
    with pytest.warns(ShardkitWarning, match="more data after its end marker at byte 1024"):
        assert len(raw(path)) == len(by_webdataset(path)) == 1
    path.write_bytes(b"")
    with pytest.raises(DamagedError, match="the TAR file is empty"):
        WDS.open(path)


def test_a_damaged_header_is_named_with_its_byte(
    tmp_path: Path, members: list[tuple[str, bytes]]
) -> None:
    path = pack(tmp_path / "x.tar", members)
    data = bytearray(path.read_bytes())
    data[1024 + 3] ^= 0x40  # in the name of the second member, which stands at byte 1,536
    data[2 * 512 + 512 + 3] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="header is damaged") as error:
        WDS.open(path)
    assert error.value.where["offset"] % 512 == 0
    assert "checksum" in str(error.value)


@pytest.mark.parametrize(
    ("names", "match", "where"),
    [
        (("a.jpg", "a.JPG"), "two members for its field 'jpg'", {"key": "a", "offset": 1536}),
        (("a.txt", "b.txt", "a.cls"), "are not next to each other", {}),
        (("a.txt", "b.txt", "a.txt"), "have the same key", {"key": "a", "offset": 2560}),
    ],
)
def test_members_that_make_no_sample_are_named(
    tmp_path: Path, names: tuple[str, ...], match: str, where: dict[str, Any]
) -> None:
    path = pack(tmp_path / "x.tar", [(name, b"1") for name in names])
    with pytest.raises(DamagedError, match=match) as error:
        WDS.open(path)
    assert error.value.where.items() >= {"path": path, **where}.items()
    if not where:
        assert "'a.cls' here, 'a.txt' at byte 512" in str(error.value)
        assert "--sort=name" in str(error.value)


def test_a_sparse_member_is_refused_by_name(tmp_path: Path) -> None:
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


def test_converted_on_and_back_its_own_names_come_back(
    tmp_path: Path, members: list[tuple[str, bytes]]
) -> None:
    odd = [("z/9.seg.png", make_image(9, "PNG")), ("z/9.foo", b"\0\1"), ("z/9.jpeg", make_image(3))]
    path = pack(tmp_path / "x.tar", members + odd)
    shardkit.convert(path, "wds", tmp_path / "out", workers=0)
    assert by_webdataset(tmp_path / "out" / "shard-000000.tar") == by_webdataset(path)


@pytest.mark.parametrize("first", ["BZh.txt", "BZh9.txt", "BZh91.txt", "BZhello.txt"])
def test_a_first_name_may_begin_like_bzip2(tmp_path: Path, first: str) -> None:
    path = pack(tmp_path / "x.tar", [(first, b"one"), ("two.txt", b"two")])
    assert [sample["txt"] for sample in shardkit.open(path)] == ["one", "two"]
    for data in (path.read_bytes(), b""):
        head = bz2.compress(data)[:10]
        assert compression_of(head) == compression_of(head[:6]) == "bz2"
