"""Our .beton files: the contract, their layout, and what is refused or damaged."""

import io
import itertools
import struct
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import simplejpeg

from shardkit.codecs.image import jpeg_segments
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.formats.beton import layout
from shardkit.formats.beton.layout import PAGE
from shardkit.formats.beton.writer import ROOM
from shardkit.formats.testing_samples import (
    assert_reads,
    compare_at_once,
    everything,
    make_image,
    write_shard,
)
from shardkit.sample import JsonText
from shardkit.schema import Array, Bytes, Image, Int, Json, Schema, Text
from shardkit.testing import EVERYTHING, OPTIONAL, FormatContract
from tests.codecs.sample_images import photo_like
from tests.formats.refusals import refused

BETON = get_format("beton")
STORED = Path(__file__).parent / "bytes" / "beton"


def keys_by_hand(path):
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

    def independent_keys(self, path):
        return keys_by_hand(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "train.beton"


def written(path, schema, samples):
    path.unlink(missing_ok=True)
    return write_shard(BETON, path, Schema(schema), samples)


def allocations(path):
    (at,) = struct.unpack_from("<Q", path.read_bytes(), 16)
    return np.frombuffer(path.read_bytes()[at:], layout.ALLOCATION)


def test_header_descriptors_and_rows_are_where_ffcv_reads_them(path):
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


def test_empty_values_have_a_byte_of_their_own(path):
    samples = [{"__key__": str(n), "a": b"", "b": bytes(n % 2)} for n in range(5)]
    written(path, {"a": Bytes(), "b": Bytes()}, samples)
    pointers = allocations(path)["ptr"]
    assert len(np.unique(pointers)) == len(pointers) == 10
    assert allocations(path)["size"].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


def test_no_value_crosses_a_page_of_its_size():
    for at, size, expected in (
        (0, PAGE, 0), (1, PAGE, PAGE), (PAGE - 1, 1, PAGE - 1), (PAGE - 1, 2, PAGE),
        (1, PAGE + 1, 1),  # needs pages of twice the size, and is within the first of those
        (PAGE, PAGE + 1, 2 * PAGE), (5, 3 * PAGE, 5), (PAGE + 1, 3 * PAGE, 4 * PAGE),
        (0, 1 << 31, 0),
    ):  # fmt: skip
        assert layout.value_offset(at, size) == expected, (at, size)


def test_many_values_are_placed_like_one_after_the_other_and_move_together():
    rng = np.random.default_rng(5)
    for number in range(200):
        many = number % 2 == 0
        sizes = (rng.pareto(0.6, 60 if many else 12) * 300_000).astype(np.int64).clip(1, 5 * PAGE)
        at = end = int(rng.integers(1, 3 * PAGE))
        expected = []
        for size in sizes.tolist():
            expected.append(layout.value_offset(end, size))
            end = expected[-1] + size
        pointers, stop = layout.value_offsets(sizes, at)
        assert (pointers.tolist(), stop) == (expected, end)
        page, target = layout.page_for(int(sizes.max())), int(rng.integers(1, 9 * PAGE))
        moved = pointers + layout.moved_offset(expected[0], end, target, page) - expected[0]
        assert moved[0] >= target
        assert (moved // page == (moved + sizes - 1) // page).all()


def test_values_make_room_for_a_long_table(path):
    schema = {"blob": Bytes(), "label": Int(), "about": Json()}
    samples = [
        {"__key__": str(n), "blob": b"%d" % n * (n % 3), "label": n, "about": [n]}
        for n in range(1500)
    ]
    reader = written(path, schema, samples)
    assert layout.front_size(3, 40, 1500) > layout.front_size(3, 0, 0) + ROOM
    assert [reader[n] for n in range(1500)] == samples
    assert keys_by_hand(path) == [sample["__key__"] for sample in samples]


def test_a_bounded_file_keeps_its_bound_when_values_make_room(path):
    for size in (0, 1, 40, 300, 3000):
        path.unlink(missing_ok=True)
        writer = BETON.create(path, ShardSpec(Schema({"blob": Bytes()}), max_bytes=300_000))
        number = 0
        while writer.write({"__key__": f"{number}", "blob": bytes(size)}):
            number += 1
        writer.close()
        assert 300_000 * 0.7 < path.stat().st_size <= 300_000
        assert len(BETON.open(path)) == number


def joined(folder, schema, samples, cuts, **spec):
    """The reader of a file of parts that tasks made."""
    parts, path = [], folder / "joined.beton"
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        parts.append(folder / f"{number}.beton")
        write_shard(BETON, parts[-1], schema, samples[start:stop]).close()
    BETON.join(path, parts, ShardSpec(schema, **spec))
    return BETON.open(path)


def test_joined_files_of_many_pages_hold_their_values(tmp_path):
    rng = np.random.default_rng(0)
    schema = Schema({"blob": Bytes(), "x": Array("<i4", (2,), optional=True), "text": Text()})
    sizes = [4_000_000, 5_000_000, 1, 9_000_000, 0, 2_000_000] * 2 + [3] * 688
    samples = [{"__key__": f"k{n}", "blob": rng.bytes(size)} for n, size in enumerate(sizes)]
    for number, sample in enumerate(samples):
        if number % 3 == 0:
            sample["x"] = np.array([1, number], "<i4")
        sample["text"] = f"{number}"
    classes = {"label": ["a", "b"]}
    reader = joined(tmp_path, schema, samples, [0, 4, 4, 5, 12, 700], classes=classes)
    assert reader.layout["classes"] == classes
    assert_reads(reader, samples)
    rows, page = allocations(reader.path), 16 << 20
    assert struct.unpack_from("<I", reader.path.read_bytes(), 4) == (page,)
    sizes = np.maximum(rows["size"], 1)
    assert (rows["ptr"] // page == (rows["ptr"] + sizes - 1) // page).all()
    assert rows["sample_id"].tolist() == np.repeat(np.arange(700), 3).tolist()


def test_a_join_takes_only_parts_of_its_kind(tmp_path):
    part, whole = tmp_path / "part.beton", tmp_path / "whole.beton"
    written(part, {"x": Int()}, [])
    with pytest.raises(DamagedError, match="fields of a part differ"):
        BETON.join(whole, [part], ShardSpec(Schema({"y": Int()})))
    foreign(part)
    with pytest.raises(DamagedError, match="no section"):
        BETON.join(whole, [part], ShardSpec(Schema({"y": Int()})))
    written(part, {"blob": Bytes()}, [{"__key__": "a", "blob": b"x"}])
    part.write_bytes(part.read_bytes()[:-24])
    with pytest.raises(DamagedError, match="number of values in a part"):
        BETON.join(whole, [part], ShardSpec(Schema({"blob": Bytes()})))


def test_a_joined_file_is_packed_like_one_that_was_written_whole(tmp_path):
    schema, sizes = Schema({"blob": Bytes()}), np.random.default_rng(1).integers(0, 100_000, 900)
    samples = [{"__key__": str(n), "blob": bytes(size)} for n, size in enumerate(sizes)]
    together = joined(tmp_path, schema, samples, range(0, 901, 100)).path.stat().st_size
    whole = written(tmp_path / "whole.beton", schema, samples).path.stat().st_size
    assert abs(whole - together) < ROOM + 100_000


def encoded(format, mode="RGB", **options):
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (12, 20), np.uint8)
    PIL.Image.fromarray(noise).convert(mode).save(file, format, **options)
    return file.getvalue()


def test_images_that_ffcv_cannot_show_are_encoded_and_counted(path):
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    images = {format.lower(): encoded(format) for format in ("PNG", "WEBP", "BMP", "TIFF")}
    images |= {"gif": encoded("GIF", "L"), "pgm": encoded("PPM", "L")}
    images |= {"cmyk jpeg": encoded("JPEG", "CMYK"), "rotated jpeg": encoded("JPEG", exif=turned)}
    images["ppm with another header"] = encoded("PPM").replace(b"\n", b" ", 1)
    kept = [encoded("JPEG"), encoded("JPEG", "L"), encoded("JPEG", progressive=True)]
    kept += [encoded("PPM"), encoded("JPEG") + b"trailing"]
    values = [*images.values(), *kept]
    writer = BETON.create(path, ShardSpec(Schema({"image": Image()})))
    for number, value in enumerate(values):
        assert writer.write({"__key__": str(number), "image": value})
    for cut in (encoded("JPEG")[:-20], encoded("PPM")[:-1], encoded("PNG")[:-60]):
        where = {"key": "a", "field": "image"}
        with refused(SampleError, "the image is truncated", where=where):
            writer.write({"__key__": "a", "image": cut})
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
    compare_at_once(reader)
    # One for which there is no room is not counted.
    writer = BETON.create(path, ShardSpec(Schema({"image": Image()}), max_bytes=5000))
    assert [writer.write({"__key__": key, "image": images["png"]}) for key in "ab"] == [True, False]
    writer.close()
    assert dict(writer.encoded) == {"png": 1}


def test_a_jpeg_without_huffman_tables_gets_the_standard_ones(path):
    """FFCV keeps a decoder in each thread, which would take those of the image before."""
    whole = without = simplejpeg.encode_jpeg(photo_like(1, 40, 24), quality=90)
    for marker, start, stop in reversed(list(jpeg_segments(whole))):
        if marker == 0xC4:
            without = without[: start - 4] + without[stop:]
    writer = BETON.create(path, ShardSpec(Schema({"image": Image()})))
    assert writer.write({"__key__": "a", "image": without})
    writer.close()
    assert dict(writer.encoded) == {"jpeg without Huffman tables": 1}
    stored = BETON.open(path)[0]["image"]
    assert stored == BETON.carried(Image(), without)
    found, expected = (
        sorted((marker, jpeg[start:stop]) for marker, start, stop in jpeg_segments(jpeg))
        for jpeg in (stored, whole)
    )
    assert found == expected
    np.testing.assert_array_equal(simplejpeg.decode_jpeg(stored), simplejpeg.decode_jpeg(whole))


def test_names_that_ffcv_would_cut_or_choke_on_are_refused(path):
    for name in ("ü", "a" * 17, "", "a\0b"):
        with refused(FormatError, "cannot have a field named", says="--rename"):
            BETON.layout(Schema({name: Int()}))
    BETON.layout(Schema({"a" * 16: Int()}))
    with pytest.raises(FormatError, match="this number of fields"):
        BETON.create(path, ShardSpec(Schema({})))


def test_values_that_ffcv_could_not_hold_are_refused(path, monkeypatch):
    monkeypatch.setattr(layout, "MAX_VALUE", 1000)
    writer = BETON.create(path, ShardSpec(Schema({"blob": Bytes(), "about": Json()})))
    for key, blob, about, what in (
        ("a", bytes(1001), None, "too large for a page"),
        ("a", b"", JsonText('"\0"'), "zero byte"),
        ("\udc00", b"", None, "not valid Unicode"),
    ):
        with pytest.raises(SampleError, match=what):
            writer.write({"__key__": key, "blob": blob, "about": about})
    assert writer.write({"__key__": "a", "blob": bytes(1000), "about": "\0"})
    writer.close()
    assert len(allocations(path)) == 2
    assert BETON.open(path)[0]["about"] == "\0"


def test_notes_say_what_is_stored_otherwise():
    native = [("<f4", (2, 3)), ("|b1", (1,)), ("<u2", (1,) * 32), ("<c8", (2,))]
    others = [("<f2", (2,)), (">f4", (2,)), ("<U3", (2,)), ("<f4", ()), ("<f4", (2, None))]
    others += [("<f4", (2, 0)), ("<f4", None), (None, None)]
    for kind in (*native, *others):  # of arrays, FFCV has a type for some
        schema = Schema({"x": Array(*kind)})
        (field,) = layout.fields_of(schema)
        expected = layout.TypeId.NDARRAY if kind in native else layout.TypeId.BYTES
        assert field.type_id == expected, kind
        assert any(".npy" in note for note in BETON.notes(schema)) == (kind in others)
    assert BETON.notes(Schema({"blob": Bytes(), "label": Int()})) == []
    (note,) = BETON.notes(Schema({"image": Image(), "label": Int()}))
    assert "JPEG of quality 95" in note
    assert len(BETON.notes(EVERYTHING)) == 5
    (note,) = BETON.notes(Schema({"label": Int()}))
    assert "os_cache=True" in note


JPEG = make_image(3)


ROW = layout.HEADER.itemsize + 3 * layout.DESCRIPTOR.itemsize + 45  # of the second sample


def foreign(path, *, tail=b""):
    """Two samples as FFCV's writer may leave them.

    Allocations stand in another order than the samples, an empty value shares the pointer of the
    next one, and two samples share an image.
    """
    fields = np.zeros(3, layout.DESCRIPTOR)
    for number, (type_id, name) in enumerate([(2, b"image"), (3, b"blob"), (5, b"about")]):
        fields[number] = (type_id, name, b"")
    row, image = struct.Struct("<BHHQQQQQ"), 4096
    blob = image + len(JPEG)
    about, end = blob + 3, blob + 8
    rows = row.pack(0, 8, 6, image, blob, 0, about, 5) + row.pack(0, 8, 6, image, blob, 3, about, 5)
    header = np.array((2, 3, PAGE, 2, end), layout.HEADER).tobytes()
    front = (header + fields.tobytes() + rows).ljust(image, b"\0")
    allocated = [(1, about, 5), (1, blob, 3), (0, image, len(JPEG)), (0, blob, 0)]
    allocated = np.array(allocated, layout.ALLOCATION).tobytes()
    path.write_bytes(front + JPEG + b"xyz" + b"[1] \0" + allocated + tail)
    return path


def test_a_foreign_file_has_types_and_keys(tmp_path):
    path = foreign(tmp_path / "v1.0.beton", tail=b"half a row")
    reader = BETON.open(path)
    assert dict(reader.schema) == {"image": Image(), "blob": Bytes(), "about": Json()}
    keys = ["v1_0/000000000", "v1_0/000000001"]
    samples = [{"__key__": key, "image": JPEG, "blob": b"", "about": [1]} for key in keys]
    samples[1]["blob"] = b"xyz"
    for each in (reader, BETON.open(path, reader.layout)):
        assert_reads(each, samples)
    assert reader.keys() == keys
    assert reader.sample(0, json_text=True)["about"] == "[1] "
    assert reader.sizes("image").tolist() == [len(JPEG)] * 2
    # Or what a dataset says whose other files have other bytes there.
    other = BETON.open(path, {"schema": Schema({"image": Bytes(), "blob": Bytes()}).to_json()})
    assert other[1]["image"] == JPEG
    with pytest.raises(DamagedError, match="has no field 'label'"):
        BETON.open(path, {"schema": Schema({"label": Int()}).to_json()})
    with pytest.raises(DamagedError, match="differs from its type in the manifest"):
        BETON.open(path, {"schema": Schema({"blob": Text()}).to_json()})
    for size in (0, 23, 500):
        path.write_bytes(struct.pack("<HHIQQ", 2, 1, PAGE, 0, 0)[:size].ljust(size, b"\0"))
        with pytest.raises(DamagedError, match="the file ends before"):
            BETON.open(path)


def patched(path, at, data):
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
        # In the row of the second sample.
        (ROW, b"\x07", "image", "mode 7"),
        (ROW, b"\x01\xff\xff\xff\xff", "image", "does not contain its 12,884,508,675 bytes"),
        (ROW + 5, b"\x11", "image", "not in the allocation table"),
        (ROW + 13, b"\xff" * 8, "blob", "does not contain its"),
        (ROW + 13, b"\0" * 8, "blob", "does not contain its"),
        (ROW + 21, b"\xff" * 8, "blob", "does not contain its"),
        (ROW + 37, b"\x02", "about", "Expecting"),
    ],
)
def test_damage_is_met_by_opening_or_by_its_sample(tmp_path, at, data, error, what):
    path = foreign(tmp_path / "a.beton")
    patched(path, at, data)
    if not isinstance(error, str):
        with pytest.raises(error, match=what):
            BETON.open(path)
        return
    reader = BETON.open(path)
    assert reader[0]["about"] == [1]
    where = {"path": path, "position": 1, "key": "a/000000001", "field": error}
    with refused(SampleError, what, **where) as raised:
        reader[1]
    assert "offset" in raised.value.where
    if at in (ROW + 1, ROW + 5, ROW + 21):  # what `inspect` would count
        with refused(DamagedError, "stored size of a value is wrong", path=path, field=error):
            reader.sizes(error)


def test_a_damaged_section_is_told(path):
    schema = {**EVERYTHING, "fixed": Array("<i2", (3,))}
    written(path, schema, [{**everything(0), "fixed": np.zeros(3, "<i2")}])
    data = path.read_bytes()
    _, at, _ = struct.unpack_from("<16sQQ", data, 24 + 1041 - 32)
    keys = at + 16 + data[at] + 256 * data[at + 1] + 8
    numbers = [(24 + 1041 - 16, 5), (24 + 1041 - 8, 5), (at, 7), (at + 8, 9)]
    changes = [(place, struct.pack("<Q", number)) for place, number in numbers]
    for place, changed in [*changes, (data.index(b'{"version":1'), b"[")]:
        patched(path, place, changed)
        with pytest.raises(DamagedError, match="section with keys"):
            BETON.open(path)
        path.write_bytes(data)
    for old, new, error, what in (
        (b'{"version":1', b'{"version":9', FormatError, "of another version"),
        (b'"label":{"type":"Int"', b'"label":{"type":"Bed"', FormatError, "does not know"),
        (
            b'"about":{"type":"Json"',
            b'"about":{"type":"Bool"',
            DamagedError,
            "differ from those in",
        ),
    ):
        path.write_bytes(data.replace(old, new))
        with pytest.raises(error, match=what):
            BETON.open(path)
    path.write_bytes(data)
    patched(path, keys, b"\xff" * 8)
    with pytest.raises(SampleError, match="outside the keys"):
        BETON.open(path)[0]
