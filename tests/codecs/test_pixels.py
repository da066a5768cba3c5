"""Decoding any picture to pixels, and the headers of JPEG and PPM."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

from shardkit.codecs.header import read_header
from shardkit.codecs.image import CutError, NotAnImageError, check_end
from shardkit.codecs.pixels import PpmHeader, encode, ppm_header, to_ppm, to_rgb


def photo(mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> PIL.Image.Image:
    noise = np.random.default_rng(1).integers(0, 256, (2, 3, 3), np.uint8)
    return PIL.Image.fromarray(noise).resize(size, PIL.Image.Resampling.BICUBIC).convert(mode)


def encoded(picture: PIL.Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def exif(orientation: int) -> PIL.Image.Exif:
    made = PIL.Image.Exif()
    made[0x010F] = "a camera"
    made[0x0112] = orientation
    return made


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_pictures_give_their_pixels(format: str) -> None:
    np.testing.assert_array_equal(to_rgb(encoded(photo(), format)), np.array(photo()))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_jpegs_give_nearly_their_pixels(options: dict[str, Any]) -> None:
    found = to_rgb(encoded(photo(), "JPEG", quality=98, **options))
    assert np.abs(found.astype(int) - np.array(photo())).mean() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_pictures_are_turned_as_exif_says(format: str, orientation: int) -> None:
    data = encoded(photo(), format, exif=exif(orientation))
    with PIL.Image.open(io.BytesIO(data)) as picture:
        expected = np.array(PIL.ImageOps.exif_transpose(picture))
    assert to_rgb(data).shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
    assert np.abs(to_rgb(data).astype(int) - expected).max() <= 8  # decoders of JPEG differ
    header = read_header(data)
    if format == "TIFF":  # Pillow turns it while it decodes
        assert header.oddity == ("rotated" if orientation != 1 else "")
    else:
        assert (header.width, header.height, header.orientation) == (24, 16, orientation)
    assert header.upright == to_rgb(data).shape[1::-1]


def test_a_big_endian_orientation_and_a_damaged_one() -> None:
    tiff = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    for payload, expected in [(tiff, 6), (tiff[:8] + b"\0\0" + tiff[10:], 1), (b"II", 1)]:
        segment = b"Exif\0\0" + payload
        head = b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment
        data = encoded(photo(), "JPEG")
        assert read_header(data[:2] + head + data[2:]).orientation == expected


def test_transparent_pixels_show_white() -> None:
    picture = photo("RGBA")
    picture.putalpha(0)
    for data in (encoded(picture, "PNG"), encoded(picture, "WEBP", lossless=True)):
        assert (to_rgb(data) == 255).all()
    half = PIL.Image.new("LA", (3, 2), (0, 128))
    assert (to_rgb(encoded(half, "PNG")) == 127).all()
    palette = PIL.Image.new("P", (2, 2))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert (to_rgb(encoded(palette, "PNG", transparency=0)) == 255).all()
    assert to_rgb(encoded(palette, "PNG"))[0, 0].tolist() == [10, 20, 30]
    keyed = PIL.Image.new("RGB", (2, 2), (1, 2, 3))
    assert (to_rgb(encoded(keyed, "PNG", transparency=(1, 2, 3))) == 255).all()


def test_grey_of_any_depth_keeps_its_high_byte() -> None:
    values = np.array([[0, 255, 256, 0xFFFF, 0x1234, 0x80FF]], np.uint16)
    for format in ("PNG", "TIFF"):
        data = encoded(PIL.Image.fromarray(values), format)
        assert to_rgb(data)[0, :, 0].tolist() == [0, 0, 1, 255, 0x12, 0x80]
    assert to_rgb(encoded(photo("1"), "PNG")).max() == 255
    np.testing.assert_array_equal(to_rgb(encoded(photo("L"), "PNG"))[:, :, 1], photo("L"))
    assert to_rgb(b"P5 2 1 255\n\x07\x09").tolist() == [[[7] * 3, [9] * 3]]


def test_cmyk_is_what_pillow_makes_of_it() -> None:
    data = encoded(photo("CMYK"), "JPEG", quality=95)
    assert read_header(data).oddity == "cmyk"
    with PIL.Image.open(io.BytesIO(data)) as picture:
        np.testing.assert_array_equal(to_rgb(data), np.array(picture.convert("RGB")))


def test_the_first_frame_counts() -> None:
    frames = [PIL.Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert to_rgb(data)[0, 0].tolist() == [255, 0, 0]


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(NotAnImageError, match="floating-point"):
        to_rgb(encoded(photo("F"), "TIFF"))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG", "PPM"])
def test_cut_pictures_are_refused(format: str) -> None:
    data = encoded(photo(size=(90, 60)), format)
    for size in (len(data) * 2 // 3, 40):
        with pytest.raises(NotAnImageError):
            to_rgb(data[:size])


@pytest.mark.parametrize(
    ("marker", "precision", "components", "oddity"),
    [
        (0xC0, 8, 3, ""),
        (0xC1, 8, 1, ""),
        (0xC2, 8, 3, ""),
        (0xC3, 8, 3, "lossless"),
        (0xC9, 8, 3, "arithmetic"),
        (0xCA, 8, 3, "arithmetic"),
        (0xC1, 12, 3, "12-bit"),
        (0xC0, 8, 4, "cmyk"),
        (0xC0, 8, 2, "2-component"),
    ],
)
def test_jpegs_that_are_not_plain_are_told(
    marker: int, precision: int, components: int, oddity: str
) -> None:
    size = (16).to_bytes(2, "big") + (24).to_bytes(2, "big")
    frame = bytes([0xFF, marker, 0, 17, precision]) + size + bytes([components]) + bytes(9)
    data = b"\xff\xd8\xff\xff\xfe\0\x04hi" + frame + b"\xff\xda\0\x02pixels\xff\xd9"
    header = read_header(data)
    assert (header.width, header.height, header.oddity) == (24, 16, oddity)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xd8\xff", "ends inside its header"),
        (b"\xff\xd8\xff\xd9\0\0\0\0", "ends before its pixels"),
        (b"\xff\xd8\xff\xe0\0\x02hello", "damaged at byte 6"),
        (b"\xff\xd8\xff\xda\0\x02\xff\xd9", "without a frame header"),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\0\0\x01\x01\0\0\0\xff\xda\0\x02\xff\xd9", "1 x 0 pixels"),
    ],
)
def test_a_header_that_is_none_is_told(data: bytes, reason: str) -> None:
    with pytest.raises(NotAnImageError, match=reason):
        read_header(data)


def test_the_end_of_a_jpeg_may_have_something_behind_it() -> None:
    data = encoded(photo(), "JPEG")
    check_end(data + b"\0\0trailing", "jpeg")
    with pytest.raises(CutError):
        check_end(data[:-2], "jpeg")
    thumbnail = b"\xff\xe1\0\x0aExif\0\0\xff\xd9"  # an end marker in the header is not the end
    with pytest.raises(CutError):
        check_end(data[:2] + thumbnail + data[2:-2], "jpeg")


@pytest.mark.parametrize(
    ("start", "header"),
    [
        (b"P6\n2 1\n255\n", PpmHeader(2, 1, 11)),
        (b"P6 2\t1 255 ", PpmHeader(2, 1, 11)),
        (b"P6\n# by a scanner\n2 # wide\n1\n255\n", PpmHeader(2, 1, 33)),
        (b"P6 2 1 65535 ", None),
        (b"P5 2 1 255 ", None),
        (b"P6 0 1 255 ", None),
        (b"P6 21 255 ", None),
    ],
)
def test_headers_of_ppm(start: bytes, header: PpmHeader | None) -> None:
    data = start + b"abcdef"
    assert ppm_header(data) == header
    if header is not None:
        assert data[header.start : header.stop] == b"abcdef"
        with pytest.raises(CutError):
            ppm_header(data[:-1])


def test_pixels_come_back_from_ppm() -> None:
    pixels = np.array(photo())
    assert to_ppm(pixels) == encoded(photo(), "PPM")
    np.testing.assert_array_equal(to_rgb(to_ppm(pixels)), pixels)


def test_encoding_is_nearly_lossless_and_always_the_same() -> None:
    pixels = np.array(photo())
    data = encode(pixels[:, ::-1], "jpeg", quality=95, chroma="444")  # also of a view
    assert data == encode(pixels[:, ::-1], "jpeg", quality=95, chroma="444")
    assert read_header(data)[:5] == ("jpeg", 24, 16, 1, "")
    assert np.abs(to_rgb(data).astype(int) - pixels[:, ::-1]).mean() < 2
    with pytest.raises(ValueError, match="65,500"):
        encode(np.zeros((1, 65501, 3), np.uint8), "jpeg")
