"""Our .beton files: the contract, their layout, and what is refused or damaged."""

from __future__ import annotations

import io
import itertools
import json
import lzma
import struct
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import simplejpeg

from shardkit import byte_source
from shardkit.codecs.image import jpeg_segments
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats import get_format
from shardkit.formats.base import Joins, ShardSpec
from shardkit.formats.beton import layout
from shardkit.formats.beton.layout import (
    ALLOCATION,
    DESCRIPTOR,
    HEADER,
    PAGE,
    moved_offset,
    value_offset,
)
from shardkit.formats.beton.reader import BetonReader
from shardkit.formats.beton.writer import ROOM
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bytes, Image, Int, Json, Schema, Text
from shardkit.testing import (
    EVERYTHING,
    OPTIONAL,
    FormatContract,
    assert_same,
    everything,
    make_image,
    write_shard,
)
from tests.codecs.sample_images import photo_like

BETON = get_format("beton")
STORED = Path(__file__).parent / "bytes" / "beton"


def keys_by_hand(path: Path) -> list[str]:
    """The keys as docs/beton.md says that they stand: FFCV has none, and its library no way."""
    data = path.read_bytes()
    (samples,) = struct.unpack_from("<Q", data, 8)
    magic, at, size = struct.unpack_from("<16sQQ", data, 24 + 1041 - 32)
    assert magic == b"shardkit section"
    text, keys = struct.unpack_from("<QQ", data, at)
    offsets = struct.unpack_from(f"<{samples + 1}Q", data, at + 16 + text)
    start = at + size - keys
    return [data[start + a : start + b].decode() for a, b in itertools.pairwise(offsets)]


class TestBeton(FormatContract):
    tested = get_format("beton")
    provides = OPTIONAL
    least_bytes = 40_000  # the room for the table

    def independent_keys(self, path: Path) -> list[str]:
        return keys_by_hand(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.beton"


def written(path: Path, schema: dict[str, Any], samples: list[Sample]) -> BetonReader:
    path.unlink(missing_ok=True)
    reader = write_shard(BETON, path, Schema(schema), samples)
    assert isinstance(reader, BetonReader)
    return reader


def allocations(path: Path) -> np.ndarray[Any, Any]:
    (at,) = struct.unpack_from("<Q", path.read_bytes(), 16)
    return np.frombuffer(path.read_bytes()[at:], ALLOCATION)


# --- layout --------------------------------------------------------------------------------------


def test_header_descriptors_and_rows_are_where_ffcv_reads_them(path: Path) -> None:
    jpeg = make_image(1)
    schema = {"image": Image(), "x": Array("<f4", (2, 3)), "label": Int()}
    x = np.arange(6, dtype="<f4").reshape(2, 3)
    written(path, schema, [{"__key__": "a", "image": jpeg, "x": x, "label": 7}])
    data = path.read_bytes()
    version, fields, page, samples, allocated = struct.unpack_from("<HHIQQ", data)
    assert (version, fields, page, samples) == (2, 3, 8 << 20, 1)
    assert struct.unpack_from("<B16s", data, 24) == (2, b"image".ljust(16, b"\0"))
    assert struct.unpack_from("<B16s", data, 24 + 1041) == (4, b"x".ljust(16, b"\0"))
    arguments = data[24 + 1041 + 17 : 24 + 2 * 1041]
    assert struct.unpack_from("<33Q", arguments) == (2, 3, *[0] * 30, 13)
    assert arguments[264:].rstrip(b"\0") == b'[["", "<f4"]]'
    mode, width, height, image, array, label = struct.unpack_from("<BHHQxxxQq", data, 24 + 3 * 1041)
    assert (mode, width, height, label) == (0, 8, 6, 7)
    assert data[image : image + len(jpeg)] == jpeg
    assert data[array : array + 24] == x.tobytes()
    rows = [struct.unpack_from("<QQQ", data, allocated + 24 * n) for n in range(2)]
    assert rows == [(0, image, len(jpeg)), (0, array, 24)]
    assert allocated + 48 == len(data)


def test_empty_values_have_a_byte_of_their_own(path: Path) -> None:
    samples = [{"__key__": str(n), "a": b"", "b": bytes(n % 2)} for n in range(5)]
    written(path, {"a": Bytes(), "b": Bytes()}, samples)
    pointers = allocations(path)["ptr"]
    assert len(np.unique(pointers)) == len(pointers) == 10
    assert allocations(path)["size"].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


def test_no_value_crosses_a_page_of_its_size() -> None:
    for at, size, expected in (
        (0, PAGE, 0), (1, PAGE, PAGE), (PAGE - 1, 1, PAGE - 1), (PAGE - 1, 2, PAGE),
        (1, PAGE + 1, 1),  # needs pages of twice the size, and is within the first of those
        (PAGE, PAGE + 1, 2 * PAGE), (5, 3 * PAGE, 5), (PAGE + 1, 3 * PAGE, 4 * PAGE),
        (0, 1 << 31, 0),
    ):  # fmt: skip
        assert value_offset(at, size) == expected, (at, size)


def test_many_values_are_placed_like_one_after_the_other() -> None:
    rng = np.random.default_rng(5)
    for _ in range(100):
        sizes = (rng.pareto(0.6, 60) * 300_000).astype(np.int64).clip(1, 5 * PAGE)
        at = end = int(rng.integers(0, 3 * PAGE))
        expected = []
        for size in sizes.tolist():
            expected.append(value_offset(end, size))
            end = expected[-1] + size
        pointers, stop = layout.value_offsets(sizes, at)
        assert pointers.tolist() == expected
        assert stop == end


def test_runs_of_values_move_without_crossing_pages() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        sizes = (rng.pareto(0.5, 12) * 100_000).astype(int).clip(1, 3 * PAGE).tolist()
        page = layout.page_for(max(sizes))
        start = at = int(rng.integers(1, 2 * PAGE))
        values = []
        for size in sizes:
            values.append((value_offset(at, size), size))
            at = sum(values[-1])
        start, target = values[0][0], int(rng.integers(1, 9 * PAGE))
        shift = moved_offset(start, at, target, page) - start
        assert start + shift >= target
        for ptr, size in values:
            assert (ptr + shift) // page == (ptr + shift + size - 1) // page


def test_values_make_room_for_a_long_table(path: Path) -> None:
    schema = {"blob": Bytes(), "label": Int(), "about": Json()}
    samples = [
        {"__key__": str(n), "blob": b"%d" % n * (n % 3), "label": n, "about": [n]}
        for n in range(1500)
    ]
    reader = written(path, schema, samples)
    assert layout.front_size(3, 40, 1500) > layout.front_size(3, 0, 0) + ROOM
    assert [reader[n] for n in range(1500)] == samples
    assert keys_by_hand(path) == [sample["__key__"] for sample in samples]


def test_a_bounded_file_keeps_its_bound_when_values_make_room(path: Path) -> None:
    for size in (0, 1, 40, 300, 3000):
        path.unlink(missing_ok=True)
        writer = BETON.create(path, ShardSpec(Schema({"blob": Bytes()}), max_bytes=300_000))
        number = 0
        while writer.write({"__key__": f"{number}", "blob": bytes(size)}):
            number += 1
        writer.close()
        assert 300_000 * 0.7 < path.stat().st_size <= 300_000
        assert len(BETON.open(path)) == number


def test_joined_files_of_many_pages_hold_their_values(tmp_path: Path) -> None:
    assert isinstance(BETON, Joins)
    rng = np.random.default_rng(0)
    schema = Schema({"blob": Bytes(), "x": Array("<i4", (2,), optional=True), "text": Text()})
    samples: list[Sample] = [
        {"__key__": f"k{n}", "blob": rng.bytes(size), "text": str(n)}
        for n, size in enumerate([4_000_000, 5_000_000, 1, 9_000_000, 0, 2_000_000] * 2)
    ]
    samples += [{"__key__": f"s{n}", "blob": b"%d" % n, "text": "t"} for n in range(700)]
    for sample in samples[::3]:
        sample["x"] = np.array([1, len(sample["blob"])], "<i4")
    parts = []
    for number, (start, stop) in enumerate([(0, 4), (4, 4), (4, 5), (5, 12), (12, 700)]):
        parts.append(tmp_path / f"{number}.beton")
        write_shard(BETON, parts[-1], schema, samples[start:stop])
    whole = tmp_path / "whole.beton"
    BETON.join(whole, parts, ShardSpec(schema, classes={"label": ["a", "b"]}))
    reader = BETON.open(whole)
    assert reader.layout["classes"] == {"label": ["a", "b"]}
    for number, sample in enumerate(samples[:700]):
        found = reader[number]
        assert ("x" in found) == ("x" in sample)
        assert [found[n] for n in ("__key__", "blob", "text")] == [
            sample[n] for n in ("__key__", "blob", "text")
        ]
    rows, page = allocations(whole), 16 << 20
    assert struct.unpack_from("<I", whole.read_bytes(), 4) == (page,)
    sizes = np.maximum(rows["size"], 1)
    assert (rows["ptr"] // page == (rows["ptr"] + sizes - 1) // page).all()
    assert rows["sample_id"].tolist() == np.repeat(np.arange(700), 3).tolist()


def test_a_join_takes_only_parts_of_its_kind(tmp_path: Path) -> None:
    assert isinstance(BETON, Joins)
    part = tmp_path / "part.beton"
    written(part, {"x": Int()}, [])
    with pytest.raises(DamagedError, match="fields of a part differ"):
        BETON.join(tmp_path / "whole.beton", [part], ShardSpec(Schema({"y": Int()})))
    foreign(part)
    with pytest.raises(DamagedError, match="no section"):
        BETON.join(tmp_path / "whole.beton", [part], ShardSpec(Schema({"y": Int()})))
    written(part, {"blob": Bytes()}, [{"__key__": "a", "blob": b"x"}])
    part.write_bytes(part.read_bytes()[:-24])
    with pytest.raises(DamagedError, match="number of values in a part"):
        BETON.join(tmp_path / "whole.beton", [part], ShardSpec(Schema({"blob": Bytes()})))


def test_a_joined_file_is_packed_like_one_that_was_written_whole(tmp_path: Path) -> None:
    assert isinstance(BETON, Joins)
    schema = Schema({"blob": Bytes()})
    sizes = np.random.default_rng(1).integers(0, 100_000, 900)
    samples = [{"__key__": str(n), "blob": bytes(size)} for n, size in enumerate(sizes)]
    parts = [tmp_path / f"{number}.beton" for number in range(9)]
    for number, part in enumerate(parts):
        write_shard(BETON, part, schema, samples[number * 100 : number * 100 + 100])
    whole, joined = tmp_path / "whole.beton", tmp_path / "joined.beton"
    write_shard(BETON, whole, schema, samples)
    BETON.join(joined, parts, ShardSpec(schema))
    assert abs(whole.stat().st_size - joined.stat().st_size) < ROOM + 100_000


# --- what is stored as what ----------------------------------------------------------------------


def encoded(format: str, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (12, 20), np.uint8)
    PIL.Image.fromarray(noise).convert(mode).save(file, format, **options)
    return file.getvalue()


def test_images_that_ffcv_cannot_show_are_encoded_and_counted(path: Path) -> None:
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    images = {
        "png": encoded("PNG"),
        "webp": encoded("WEBP"),
        "gif": encoded("GIF", "L"),
        "bmp": encoded("BMP"),
        "tiff": encoded("TIFF"),
        "pgm": encoded("PPM", "L"),
        "cmyk jpeg": encoded("JPEG", "CMYK"),
        "rotated jpeg": encoded("JPEG", exif=turned),
        "ppm with another header": encoded("PPM").replace(b"\n", b" ", 1),
    }
    kept = [encoded("JPEG"), encoded("JPEG", "L"), encoded("JPEG", progressive=True)]
    kept += [encoded("PPM"), encoded("JPEG") + b"trailing"]
    values = [*images.values(), *kept]
    writer = BETON.create(path, ShardSpec(Schema({"image": Image()})))
    for number, value in enumerate(values):
        assert writer.write({"__key__": str(number), "image": value})
    writer.close()
    assert dict(writer.encoded) == dict.fromkeys(images, 1)
    reader = BETON.open(path)
    for number, value in enumerate(values):
        found = reader[number]["image"]
        assert found == BETON.carried(Image(), value)
        assert (found == value) == (value in kept)
        with PIL.Image.open(io.BytesIO(found)) as shown:
            assert shown.mode in ("RGB", "L")
            assert shown.size == ((12, 20) if number == 7 else (20, 12))


def test_a_jpeg_without_huffman_tables_gets_the_standard_ones(path: Path) -> None:
    """FFCV keeps a decoder in each thread, which would take those of the image before."""
    whole = simplejpeg.encode_jpeg(photo_like(1, 40, 24), quality=90)
    without = whole
    for marker, start, stop in reversed(list(jpeg_segments(whole))):
        if marker == 0xC4:
            without = without[: start - 4] + without[stop:]
    writer = BETON.create(path, ShardSpec(Schema({"image": Image()})))
    assert writer.write({"__key__": "a", "image": without})
    writer.close()
    assert dict(writer.encoded) == {"jpeg without Huffman tables": 1}
    stored = BETON.open(path)[0]["image"]
    assert stored == BETON.carried(Image(), without)
    found = [(marker, stored[start:stop]) for marker, start, stop in jpeg_segments(stored)]
    expected = [(marker, whole[start:stop]) for marker, start, stop in jpeg_segments(whole)]
    assert sorted(found) == sorted(expected)
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(stored), simplejpeg.decode_jpeg(whole))


def test_a_refused_sample_counts_no_image(path: Path) -> None:
    schema = Schema({"image": Image()})
    writer = BETON.create(path, ShardSpec(schema, max_bytes=5000))
    assert writer.write({"__key__": "a", "image": encoded("PNG")})
    assert not writer.write({"__key__": "b", "image": encoded("PNG")})
    writer.close()
    assert dict(writer.encoded) == {"png": 1}


def test_a_cut_image_is_named(path: Path) -> None:
    writer = BETON.create(path, ShardSpec(Schema({"image": Image()})))
    for value in (encoded("JPEG")[:-20], encoded("PPM")[:-1], encoded("PNG")[:-60]):
        with pytest.raises(SampleError, match="the image is truncated") as error:
            writer.write({"__key__": "a", "image": value})
        assert error.value.where == {"key": "a", "field": "image"}
    writer.close()


def test_names_that_ffcv_would_cut_or_choke_on_are_refused(path: Path) -> None:
    for name in ("ü", "a" * 17, "", "a\0b"):
        with pytest.raises(FormatError, match="cannot have a field named") as error:
            BETON.layout(Schema({name: Int()}))
        assert "--rename" in str(error.value)
    BETON.layout(Schema({"a" * 16: Int()}))
    with pytest.raises(FormatError, match="this number of fields"):
        BETON.create(path, ShardSpec(Schema({})))


def test_values_that_ffcv_could_not_hold_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_VALUE", 1000)
    writer = BETON.create(path, ShardSpec(Schema({"blob": Bytes(), "about": Json()})))
    with pytest.raises(SampleError, match="too large for a page"):
        writer.write({"__key__": "a", "blob": bytes(1001), "about": None})
    with pytest.raises(SampleError, match="zero byte"):
        writer.write({"__key__": "a", "blob": b"", "about": JsonText('"\0"')})
    with pytest.raises(SampleError, match="not valid Unicode"):
        writer.write({"__key__": "\udc00", "blob": b"", "about": None})
    assert writer.write({"__key__": "a", "blob": bytes(1000), "about": "\0"})
    writer.close()
    assert len(allocations(path)) == 2
    assert BETON.open(path)[0]["about"] == "\0"


def test_arrays_that_ffcv_has_a_type_for() -> None:
    native = [("<f4", (2, 3)), ("|b1", (1,)), ("<u2", (1,) * 32), ("<c8", (2,))]
    others: Any = [("<f2", (2,)), (">f4", (2,)), ("<U3", (2,)), ("<f4", ()), ("<f4", (2, None))]
    others += [("<f4", (2, 0)), ("<f4", None), (None, None)]
    for kind in (*native, *others):
        schema = Schema({"x": Array(*kind)})
        (field,) = layout.fields_of(schema)
        expected = layout.TypeId.NDARRAY if kind in native else layout.TypeId.BYTES
        assert field.type_id == expected, kind
        assert any(".npy" in note for note in BETON.notes(schema)) == (kind in others)


def test_notes_say_what_is_stored_otherwise() -> None:
    assert BETON.notes(Schema({"blob": Bytes(), "label": Int()})) == []
    (note,) = BETON.notes(Schema({"image": Image(), "label": Int()}))
    assert "JPEG of quality 95" in note
    assert len(BETON.notes(EVERYTHING)) == 5
    (note,) = BETON.notes(Schema({"label": Int()}))
    assert "os_cache=True" in note


# --- files that others made ----------------------------------------------------------------------

JPEG = make_image(3)


def foreign(path: Path, *, tail: bytes = b"") -> tuple[Path, dict[str, int]]:
    """Two samples as FFCV's writer may leave them, and where the parts of the file are.

    Allocations stand in another order than the samples, an empty value shares the pointer of the
    next one, and two samples share an image.
    """
    fields = np.zeros(3, DESCRIPTOR)
    names = (b"image", b"blob", b"about")
    for number, (type_id, name) in enumerate(zip((2, 3, 5), names, strict=True)):
        fields[number] = (type_id, name, b"")
    table = HEADER.itemsize + fields.nbytes
    row = struct.Struct("<BHHQQQQQ")
    image = 4096
    blob = image + len(JPEG)
    about = blob + 3
    end = about + 5
    rows = row.pack(0, 8, 6, image, blob, 0, about, 5) + row.pack(0, 8, 6, image, blob, 3, about, 5)
    header = np.array((2, 3, PAGE, 2, end), HEADER).tobytes()
    front = (header + fields.tobytes() + rows).ljust(image, b"\0")
    allocated = [(1, about, 5), (1, blob, 3), (0, image, len(JPEG)), (0, blob, 0)]
    data = JPEG + b"xyz" + b"[1] \0"
    path.write_bytes(front + data + np.array(allocated, ALLOCATION).tobytes() + tail)
    return path, {"table": table, "image": image, "blob": blob, "about": about, "end": end}


def test_a_foreign_file_has_types_and_keys(tmp_path: Path) -> None:
    path, _ = foreign(tmp_path / "v1.0.beton", tail=b"half a row")
    reader = BETON.open(path)
    assert dict(reader.schema) == {"image": Image(), "blob": Bytes(), "about": Json()}
    expected = {"image": JPEG, "blob": b"", "about": [1]}
    assert_same(reader[0], {"__key__": "v1_0/000000000", **expected})
    assert_same(reader[1], {"__key__": "v1_0/000000001", **expected, "blob": b"xyz"})
    assert reader.keys() == ["v1_0/000000000", "v1_0/000000001"]  # type: ignore[attr-defined] # it has
    assert reader.sample(0, json_text=True)["about"] == "[1] "  # type: ignore[attr-defined] # it has
    assert reader.sizes("image").tolist() == [len(JPEG)] * 2  # type: ignore[attr-defined] # it has
    again = BETON.open(path, reader.layout)
    assert_same(again[1], reader[1])


def test_a_foreign_file_is_read_as_a_manifest_says_or_not(tmp_path: Path) -> None:
    path, _ = foreign(tmp_path / "a.beton")
    kinds = {"image": Bytes(), "blob": Bytes(), "about": Bytes(optional=True)}
    reader = BETON.open(path, {"schema": Schema(kinds).to_json()})
    assert (reader[1]["image"], reader[1]["about"]) == (JPEG, b"[1] ")
    with pytest.raises(DamagedError, match="has no field 'label'"):
        BETON.open(path, {"schema": Schema({"label": Int()}).to_json()})
    with pytest.raises(DamagedError, match="differs from its type in the manifest"):
        BETON.open(path, {"schema": Schema({"blob": Text()}).to_json()})
    for size in (0, 23, 500):
        path.write_bytes(struct.pack("<HHIQQ", 2, 1, PAGE, 0, 0)[:size].ljust(size, b"\0"))
        with pytest.raises(DamagedError, match="the file ends before"):
            BETON.open(path)


def patched(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "data", "error", "what"),
    [
        (0, b"\x01", FormatError, "not a .beton that shardkit can read"),
        (2, b"\0\0", FormatError, "no fields"),
        (2, b"\xff\xff", DamagedError, "the file ends before"),
        (8, b"\xff" * 8, DamagedError, "the file ends before"),
        (16, b"\xff" * 8, DamagedError, "incomplete or truncated"),
        (16, b"\0" * 8, DamagedError, "incomplete or truncated"),
        (24, b"\xff", FormatError, "'image' has a custom type"),
        (24, b"\x63", DamagedError, "'image' has an unknown type"),
        (24, b"\x04", DamagedError, "type of the array field 'image' is damaged"),
        (25, b"\xc3", DamagedError, "not ASCII"),
        (25, b"blob\0", DamagedError, "two fields named 'blob'"),
    ],
)
def test_damage_that_opening_meets(
    tmp_path: Path, at: int, data: bytes, error: type[Exception], what: str
) -> None:
    path, _ = foreign(tmp_path / "a.beton")
    patched(path, at, data)
    with pytest.raises(error, match=what):
        BETON.open(path)


@pytest.mark.parametrize(
    ("place_in_row", "data", "field", "what"),
    [
        (0, b"\x07", "image", "mode 7"),
        (0, b"\x01\xff\xff\xff\xff", "image", "does not contain its 12,884,508,675 bytes"),
        (5, b"\x11", "image", "not in the allocation table"),
        (13, b"\xff" * 8, "blob", "does not contain its"),
        (13, b"\0" * 8, "blob", "does not contain its"),
        (21, b"\xff" * 8, "blob", "does not contain its"),
        (37, b"\x02", "about", "Expecting"),
    ],
)
def test_damage_that_a_sample_meets(
    tmp_path: Path, place_in_row: int, data: bytes, field: str, what: str
) -> None:
    path, places = foreign(tmp_path / "a.beton")
    patched(path, places["table"] + 45 + place_in_row, data)
    reader = BETON.open(path)
    assert reader[0]["about"] == [1]
    with pytest.raises(SampleError, match=what) as error:
        reader[1]
    where = error.value.where
    assert where["path"] == path
    assert (where["position"], where["key"], where["field"]) == (1, "a/000000001", field)
    assert "offset" in where


@pytest.mark.parametrize("memory", [0, 100, 1 << 20])
def test_long_tables_stay_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr(byte_source, "IN_MEMORY", memory)
    schema = {
        "image": Image(), "x": Array("<i2", (3,)), "n": Int(), "about": Json(optional=True),
        "m": Array("<i4", (2,), optional=True),
    }  # fmt: skip
    samples: list[Sample] = [
        {"__key__": f"k{n}" * (n % 5 + 1), "image": JPEG, "x": np.array([n, 1, 2], "<i2"), "n": n}
        for n in range(200)
    ]
    for sample in samples[::3]:
        sample["about"], sample["m"] = {"a": sample["n"]}, np.array([1, sample["n"]], "<i4")
    reader = written(tmp_path / "ours.beton", schema, samples)
    for number, sample in enumerate(samples):
        assert_same(reader[number], sample)
    assert reader.keys() == [sample["__key__"] for sample in samples]
    assert reader.sizes("image").tolist() == [len(JPEG)] * 200
    assert len(reader.sizes("about")) == len(reader.sizes("m")) == 67
    out = np.zeros((2, 2), np.int32)
    assert reader.read_rows("m", np.array([9, 3]), out)
    assert out.tolist() == [[1, 9], [1, 3]]
    assert not reader.read_rows("m", np.array([9, 4]), out)
    assert (reader.in_memory > 0) == (memory == 1 << 20)
    theirs = unpacked("ffcv-1.0.2", tmp_path)
    expected = json.loads((STORED / "ffcv-1.0.2.json").read_text("utf-8"))
    assert [theirs[n]["image"].hex() for n in range(4)] == [each["image"] for each in expected]


def test_a_damaged_section_is_told(path: Path) -> None:
    written(path, EVERYTHING_FIXED, [fixed(0)])
    data = path.read_bytes()
    _, at, _ = struct.unpack_from("<16sQQ", data, 24 + 1041 - 32)
    text = data.index(b'{"version":1')
    for place_of, what in [(24 + 1041 - 16, 5), (24 + 1041 - 8, 5), (at, 7), (at + 8, 9)]:
        patched(path, place_of, struct.pack("<Q", what))
        with pytest.raises(DamagedError, match="section with keys"):
            BETON.open(path)
        path.write_bytes(data)
    patched(path, text, b"[")
    with pytest.raises(DamagedError, match="section with keys"):
        BETON.open(path)
    path.write_bytes(data.replace(b'{"version":1', b'{"version":9'))
    with pytest.raises(FormatError, match="of another version"):
        BETON.open(path)
    path.write_bytes(data.replace(b'"label":{"type":"Int"', b'"label":{"type":"Bed"'))
    with pytest.raises(FormatError, match="does not know"):
        BETON.open(path)
    path.write_bytes(data.replace(b'"about":{"type":"Json"', b'"about":{"type":"Bool"'))
    with pytest.raises(DamagedError, match="differ from those in its section"):
        BETON.open(path)
    path.write_bytes(data)
    patched(path, at + 16 + data[at] + 256 * data[at + 1] + 8, b"\xff" * 8)
    with pytest.raises(SampleError, match="outside the keys"):
        BETON.open(path)[0]


EVERYTHING_FIXED = {**EVERYTHING, "fixed": Array("<i2", (3,))}


def fixed(number: int) -> Sample:
    return {**everything(number), "fixed": np.array([number, 1, -1], "<i2")}


def unpacked(name: str, folder: Path) -> BetonReader:
    path = folder / f"{name}.beton"
    path.write_bytes(lzma.decompress((STORED / f"{name}.beton.xz").read_bytes()))
    return BetonReader(path)
