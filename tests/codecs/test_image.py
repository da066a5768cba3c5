"""Telling images from other bytes by their headers: against Pillow, and on damage."""

from __future__ import annotations

from io import BytesIO

import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs.image import SUFFIX_OF, SUFFIXES, NotAnImageError, is_image, probe

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]


def encoded(format: str, size: tuple[int, int], mode: str = "RGB", **options: object) -> bytes:
    file = BytesIO()
    PIL.Image.new(mode, size, 77 if mode == "L" else None).save(file, format, **options)
    return file.getvalue()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (17, 3), (640, 480), (5, 3000)])
def test_format_and_size_are_pillows(format: str, size: tuple[int, int]) -> None:
    data = encoded(format, size)
    info = probe(data)
    with PIL.Image.open(BytesIO(data)) as image:
        assert (info.width, info.height) == image.size
        assert info.format == str(image.format).lower()
    assert info.format in SUFFIX_OF
    assert is_image(data) or format == "PPM"  # two letters and text: too weak a sign


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("JPEG", {"progressive": True}), ("JPEG", {"mode": "L"}), ("JPEG", {"mode": "CMYK"}),
        ("JPEG", {"exif": b"Exif\0\0" + bytes(60_000)}), ("JPEG", {"icc_profile": bytes(150_000)}),
        ("JPEG", {"comment": b"\xff\xc0" * 100}), ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0MM"}), ("PNG", {"mode": "1"}), ("PNG", {"mode": "RGBA"}),
    ],
)  # fmt: skip
def test_variants_have_their_size(format: str, options: dict[str, str]) -> None:
    info = probe(encoded(format, (33, 21), **options))  # type: ignore[arg-type]
    assert info[1:] == (33, 21)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_header_that_is_cut_is_named(format: str) -> None:
    data = encoded(format, (64, 48))
    for cut in range(12, 24):
        with pytest.raises(NotAnImageError, match=r"ends inside its header|not IHDR|not an image"):
            probe(data[:cut])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "an empty file"),
        (b"hello there", "text: 'hello there'"),
        (b"\0\1\2\3", "bytes that are not an image: 00 01 02 03"),
        (b"\xff\xd8\xff\xe0\0\4ab\xff\xd9\0\0", "ends before its pixels"),
        (b"\xff\xd8\xff\xe0\0\4abcdef", "damaged at byte 8"),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\0\0\0\1\1\0\0", "says 0 x 0 pixels"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIDAT" + bytes(13), "not IHDR"),
        (b"RIFF\0\0\0\0WEBPJUNK" + bytes(20), "not an image"),
        (b"GIF89a", "damaged gif file"),
    ],
)
def test_what_is_no_image_is_described(data: bytes, message: str) -> None:
    with pytest.raises(NotAnImageError, match=message):
        probe(data)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")  # Pillow warns of damage it survives
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@given(st.sampled_from(FORMATS), st.data())
def test_no_damage_gives_another_error(format: str, data: st.DataObject) -> None:
    whole = bytearray(encoded(format, (9, 7)))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, min(len(whole) - 1, 60)))] = data.draw(st.integers(0, 255))
    try:
        probe(bytes(whole))
    except NotAnImageError:
        pass


def test_every_format_has_the_suffix_that_is_written() -> None:
    assert SUFFIX_OF == {
        "jpeg": "jpg", "png": "png", "webp": "webp", "gif": "gif", "bmp": "bmp", "tiff": "tif",
        "ppm": "ppm",
    }  # fmt: skip
    torchvision = {"jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"}
    assert torchvision <= set(SUFFIXES)
