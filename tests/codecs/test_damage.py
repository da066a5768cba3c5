"""The strict check of images: what lacks a part is damaged, however well it is packed."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.codecs import damage as checks
from shardkit.codecs.damage import damage, strict_warnings
from shardkit.codecs.image import TooLargeError
from shardkit.codecs.jpeg import decode_jpeg
from shardkit.codecs.pixels import to_rgb
from shardkit.errors import SampleError
from shardkit.options import ImageOptions
from tests.codecs.sample_images import encoded, opened, photo
from tests.codecs.test_pixels import JPEGS

# Of each pass of an interlaced PNG: its first column and row, and its steps.
_ADAM7 = [[*map(int, each)] for each in ["0088", "4088", "0448", "2044", "0224", "1022", "0112"]]


@pytest.fixture(autouse=True)
def _strictly():
    with strict_warnings():
        yield


def _chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _chunks(data):
    at = 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        at += 12 + size


def _repacked(data, change, frame=0):
    """A PNG with other rows in one of its frames, packed as a valid stream, in two chunks."""
    made, number = data[:8], -1
    for name, content in _chunks(data):
        number += name == b"fcTL" or (name == b"IDAT" and number < 0)
        if name not in (b"IDAT", b"fdAT") or number != frame:
            made += _chunk(name, content)
            continue
        head = content[:4] if name == b"fdAT" else b""
        packed = zlib.compress(change(zlib.decompress(content[len(head) :])))
        cut = 0 if head else len(packed) // 2  # chunks with such a head are numbered
        made += _chunk(name, packed[:cut]) if cut else b""
        made += _chunk(name, head + packed[cut:])
    return made


def _interlaced(width, height):
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    passes = (pixels[y::dy, x::dx] for x, y, dx, dy in _ADAM7)
    rows = b"".join(b"\0" + row.tobytes() for part in passes for row in part if row.size)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    made = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
    made += _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    assert np.array_equal(np.asarray(opened(made)), pixels)
    return made


def _png(mode):
    if mode == "I;16":
        return encoded(PIL.Image.fromarray(np.arange(384, dtype=np.uint16).reshape(16, 24)), "PNG")
    options = {"bits": int(mode[1:])} if mode[1:].isdigit() else {}
    return encoded(photo(mode[0] if options else mode), "PNG", **options)


@pytest.mark.parametrize("mode", ["1", "L", "P1", "P2", "P4", "P", "LA", "RGB", "RGBA", "I;16"])
def test_rows_of_a_png_that_are_missing(mode):
    whole = _png(mode)
    assert damage(_repacked(whole, bytes)) is None
    # Nothing is lost by what is behind, and it takes no memory.
    assert damage(_repacked(whole, lambda rows: rows + bytes(10_000_000))) is None
    assert damage(whole + b"\r\n") is None
    for left in (0, 1, 2, 8, 15):
        assert damage(_repacked(whole, lambda rows, n=left: rows[: n * len(rows) // 16])), left
    assert damage(_repacked(whole, lambda rows: rows[:-1]))


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 1), (1, 5), (8, 8), (9, 17), (37, 24)])
def test_rows_of_an_interlaced_png_that_are_missing(size):
    whole = _interlaced(*size)
    assert damage(whole) is None
    assert damage(_repacked(whole, lambda rows: rows[: len(rows) // 2]))
    assert damage(_repacked(whole, lambda rows: rows[:-1]))


@pytest.mark.parametrize("default", [False, True], ids=["all", "and a default image"])
def test_rows_of_an_animated_png_that_are_missing(default):
    more = [photo().rotate(90), photo().rotate(180)]
    options = {"save_all": True, "append_images": more, "default_image": default}
    whole = encoded(photo(), "PNG", **options)
    assert damage(whole) is None
    for frame in range(3):
        assert damage(_repacked(whole, bytes, frame)) is None
        assert damage(_repacked(whole, lambda rows: rows[: len(rows) // 2], frame)), frame


@pytest.mark.parametrize(("mode", "options"), JPEGS)
def test_jpegs_of_every_kind_that_are_cut(mode, options):
    whole = encoded(photo(mode, (97, 61)), "JPEG", **options)
    assert damage(whole) is None
    assert damage(whole[: len(whole) * 2 // 3] + b"\xff\xd9")


def test_a_jpeg_that_the_fast_library_does_not_support_is_decoded_by_another():
    """Of flat colour, it has as many blocks if red, not grey, has twice as many columns."""
    flat = encoded(PIL.Image.new("RGB", (16, 8), "gray"), "JPEG", subsampling=1, optimize=True)
    odd = flat.replace(b"\x01\x21\x00\x02\x11\x01", b"\x01\x11\x00\x02\x21\x01")
    assert decode_jpeg(odd, "RGB") is None
    assert damage(odd) is None
    assert damage(odd[:-8])
    np.testing.assert_array_equal(to_rgb(odd), opened(odd))


def test_other_formats_that_are_cut_and_a_gif_whose_codes_end_too_soon_in_good_order():
    for format in ("GIF", "BMP", "WEBP", "PPM", "TIFF"):
        whole = encoded(photo("RGB"), format)
        assert damage(whole) is None
        for left in (1 / 4, 1 / 2, 3 / 4):
            assert damage(whole[: int(len(whole) * left)]), (format, left)
    assert damage(_gif(100)) is None
    assert all(damage(_gif(pixels)) for pixels in (0, 1, 50, 99))


def _gif(pixels):
    """10 by 10 pixels, of which there are only so many before the code that ends them."""
    number = sum(code << 9 * at for at, code in enumerate([256, *[5] * pixels, 257]))
    packed = number.to_bytes(-(-9 * (pixels + 2) // 8), "little")
    head = b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0xF7, 0, 0) + bytes(768)
    return head + b",\0\0\0\0\n\0\n\0\0\x08" + bytes([len(packed)]) + packed + b"\0;"


def test_verify_and_convert_find_it(tmp_path):
    (tmp_path / "images").mkdir()
    half = _repacked(encoded(photo(), "PNG"), lambda rows: rows[: len(rows) // 2])
    (tmp_path / "images/a.png").write_bytes(half)
    shardkit.convert(tmp_path / "images", to="wds", out=tmp_path / "out", workers=0)
    (problem,) = shardkit.verify(tmp_path / "out", decode=True).problems
    assert problem.found == "a png file whose rows end after 584 of 1,168 bytes"
    options = {"image": ImageOptions(check="decode"), "workers": 0}
    with pytest.raises(SampleError, match="image"):
        shardkit.convert(tmp_path / "images", to="wds", out=tmp_path / "x", **options)


@pytest.mark.parametrize("bound", ["MAX_FRAMES", "MAX_DECODED"])
def test_frames_are_decoded_up_to_a_bound(bound, monkeypatch):
    """A frame of a GIF of a few kB can have as many pixels as its canvas."""
    frames = [PIL.Image.new("L", (10, 10), level) for level in (1, 100, 200)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert damage(data) is None
    monkeypatch.setattr(checks, bound, 2 if bound == "MAX_FRAMES" else 299)
    with pytest.raises(TooLargeError, match="3 or more, of 300 pixels in all"):
        damage(data)


def test_an_image_of_too_many_pixels_is_not_decoded(monkeypatch):
    data = encoded(photo(), "PNG")
    monkeypatch.setattr("shardkit.codecs.pixels.MAX_PIXELS", 24 * 16 - 1)
    with pytest.raises(TooLargeError, match="24 x 16"):
        to_rgb(data)


@pytest.mark.parametrize(("shape", "dtype"), [((9, 8, 5), "uint8"), ((9, 8, 3), "float32")])
def test_tiffs_that_pillow_cannot_read_are_sound_unless_they_are_cut(shape, dtype):
    tifffile = pytest.importorskip("tifffile")
    values = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    file = io.BytesIO()
    tifffile.imwrite(file, values, photometric="minisblack", planarconfig="contig")
    assert damage(file.getvalue()) is None
    assert damage(file.getvalue()[:-9])
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as pages:
        pages.write(np.zeros((9, 8), np.uint8))  # which Pillow can read
        pages.write(values, photometric="minisblack", planarconfig="contig")
    assert damage(file.getvalue()) is None
