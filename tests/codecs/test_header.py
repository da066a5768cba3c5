"""What the header of an image says, and whether it ends: against Pillow, and on damage."""

import itertools
import struct

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs.header import read_header
from shardkit.codecs.image import (
    SUFFIXES,
    CutError,
    NotAnImageError,
    check_end,
    is_image,
    probe,
)
from tests.codecs.sample_images import encoded, exif, opened, photo
from tests.codecs.sample_profiles import grey_profile, rgb_profile

SIZE = (33, 21)
RGB, GREY = photo("RGB", SIZE), photo("L", SIZE)
PALETTE = RGB.quantize(7)
DEEP = PIL.Image.new("I;16", SIZE, 0x1234)
SEE_THROUGH = photo("RGBA", SIZE)
SEE_THROUGH.putalpha(77)
FRAMES = {"save_all": True, "append_images": [PIL.Image.new("RGB", SIZE, "red")]}

# Of each format: how an image is stored, then the oddity and the colour that the header is to say.
GREYS = [GREY, GREY.convert("1")]
CASES = [
    *[("JPEG", RGB, how, "", "RGB") for how in ({}, {"progressive": True}, {"keep_rgb": True})],
    ("JPEG", RGB, {"exif": exif(6), "icc_profile": rgb_profile()}, "", "RGB"),
    ("JPEG", GREY, {}, "", "GRAY"),
    ("JPEG", GREY, {"icc_profile": grey_profile(1.0)}, "", "GRAY"),
    ("JPEG", GREY, {"icc_profile": rgb_profile()}, "", "RGB"),
    ("JPEG", RGB.convert("CMYK"), {"exif": exif(3)}, "cmyk", "CMYK"),
    *[(format, image, {}, "", "RGB") for format in ("PNG", "BMP") for image in (RGB, PALETTE)],
    *[(format, image, {}, "", "GRAY") for format in ("PNG", "BMP", "PPM") for image in GREYS],
    *[(format, DEEP, {}, "16-bit", "GRAY") for format in ("PNG", "TIFF")],
    ("PNG", PALETTE, {"transparency": 0}, "transparent", "RGB"),
    ("PNG", RGB, {"transparency": (1, 2, 3)}, "transparent", "RGB"),
    ("PNG", GREY, {"transparency": 9}, "transparent", "GRAY"),
    *[(format, SEE_THROUGH, {}, "transparent", "RGB") for format in ("PNG", "TIFF")],
    *[(format, SEE_THROUGH.convert("LA"), {}, "transparent", "GRAY") for format in ("PNG", "TIFF")],
    ("PNG", RGB, {"icc_profile": rgb_profile(), "exif": exif(5)}, "", "RGB"),
    ("PNG", GREY, {"icc_profile": grey_profile(2.2)}, "", "GRAY"),
    ("PNG", GREY, {"icc_profile": rgb_profile()}, "", "RGB"),
    *[(format, RGB, FRAMES, "animated", "RGB") for format in ("PNG", "WEBP", "GIF", "TIFF")],
    *[("WEBP", RGB, {"lossless": less}, "", "RGB") for less in (False, True)],
    *[("WEBP", SEE_THROUGH, {"lossless": less}, "transparent", "RGB") for less in (False, True)],
    ("WEBP", RGB, {"icc_profile": rgb_profile(), "exif": exif(8)}, "", "RGB"),
    ("WEBP", RGB, {"icc_profile": rgb_profile(), "lossless": True, "exif": exif(2)}, "", "RGB"),
    *[("GIF", image, {}, "", "RGB") for image in (PALETTE, GREY)],  # a palette like any other
    ("GIF", PALETTE, {"transparency": 0}, "transparent", "RGB"),
    ("TIFF", RGB, {"icc_profile": rgb_profile()}, "", "RGB"),
    ("TIFF", GREY, {"compression": "tiff_lzw"}, "", "GRAY"),
    ("TIFF", PALETTE, {}, "", "RGB"),
    ("TIFF", photo("F", SIZE), {}, "floating-point", "GRAY"),
    ("TIFF", RGB.convert("CMYK"), {}, "cmyk", "CMYK"),
    ("PPM", RGB, {}, "", "RGB"),
    ("PPM", PIL.Image.new("I", SIZE, 0x1234), {}, "16-bit", "GRAY"),
]
WHOLE = [encoded(image, format, **options) for format, image, options, _, _ in CASES]
LOSSY = ("JPEG", "WEBP")


@pytest.mark.parametrize(("format", "image", "options", "oddity", "colour"), CASES)
def test_a_header_says_what_pillow_says(format, image, options, oddity, colour):
    data = encoded(image, format, **options)
    header = read_header(data)
    assert (header.format, header.oddity, header.colour) == (format.lower(), oddity, colour)
    assert header.lossless == (format not in LOSSY or options.get("lossless", False))
    with opened(data) as found:
        assert (header.width, header.height) == found.size == SIZE
        assert header.orientation == found.getexif().get(0x0112, 1)
        assert header.profile == found.info.get("icc_profile") == options.get("icc_profile")
        assert (header.oddity == "animated") == getattr(found, "is_animated", False)
        seen_through = found.has_transparency_data
        assert (header.oddity == "transparent") == (seen_through and oddity != "animated")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_format_and_size_are_pillows_and_a_cut_header_is_named(format):
    more = {"JPEG": {"exif": b"Exif\0\0" + bytes(60_000), "comment": b"\xff\xc0" * 100}}
    for size in ((1, 1), (17, 3), (5, 3000)):
        data = encoded(PIL.Image.new("RGB", size), format, **more.get(format, {}))
        assert probe(data) == (format.lower(), *size)
        assert is_image(data) or format == "PPM"  # two letters and text: too weak a sign
    if format in ("JPEG", "PNG", "WEBP"):
        for cut in range(12, 24):
            with pytest.raises(NotAnImageError, match=r"ends inside its header|not IHDR|not an im"):
                read_header(data[:cut])
    torchvision = {"jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"}
    assert torchvision <= set(SUFFIXES)


def with_segment(marker, content, of=None):
    """A JPEG with another segment, as the first."""
    of = of or encoded(RGB, "JPEG")
    return of[:2] + marker + struct.pack(">H", len(content) + 2) + content + of[2:]


def test_orientation_is_that_of_exif_and_upright_has_its_sides_exchanged():
    for format, orientation in itertools.product(("JPEG", "PNG", "WEBP", "TIFF"), range(1, 9)):
        header = read_header(encoded(RGB, format, exif=exif(orientation)))
        assert (header.width, header.height, header.orientation) == (*SIZE, orientation)
        assert header.upright == (SIZE if orientation < 5 else SIZE[::-1])
    tiff = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    for payload, expected in [(tiff, 6), (tiff[:8] + b"\0\0" + tiff[10:], 1), (b"II", 1)]:
        assert read_header(with_segment(b"\xff\xe1", b"Exif\0\0" + payload)).orientation == expected


def test_chroma_is_libjpegs():
    for chroma in ("444", "422", "420", "440", "411"):
        data = simplejpeg.encode_jpeg(np.array(RGB), colorsubsampling=chroma)
        assert read_header(data).chroma == simplejpeg.decode_jpeg_header(data)[3] == chroma
    for mode in ("L", "CMYK"):  # which have no two channels of chroma
        assert read_header(encoded(photo(mode), "JPEG")).chroma == ""


def test_the_table_is_pillows_and_finer_for_more_quality():
    for mode in ("RGB", "L"):
        sums = []
        for quality in (5, 25, 50, 75, 90, 95, 100):
            data = encoded(photo(mode), "JPEG", quality=quality)
            with opened(data) as image:
                assert read_header(data).table == sum(image.quantization[0])
            sums.append(read_header(data).table)
        assert sums == sorted(set(sums), reverse=True)
        assert sums[-1] == 64  # quality 100 rounds to whole numbers only
    # One of 16 bits, behind another.
    chroma_first = bytes([1, *[9] * 64]) + b"\x10" + struct.pack(">64H", *range(300, 364))
    frame = b"\xff\xc1\0\x0b\x08\0\x01\0\x01\x01\x01\x11\0\xff\xda\0\x02"
    tables = b"\xff\xdb" + struct.pack(">H", len(chroma_first) + 2) + chroma_first
    assert read_header(b"\xff\xd8" + tables + frame).table == sum(range(300, 364))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_long_profile_comes_whole(format):
    profile = rgb_profile() + bytes(range(256)) * 700  # in three segments of a JPEG
    data = encoded(RGB, format, icc_profile=profile)
    assert read_header(data).profile == profile
    data = encoded(RGB, "JPEG")
    for number, part in [(2, b"second"), (1, b"first"), (3, b"third")]:
        data = with_segment(b"\xff\xe2", b"ICC_PROFILE\0" + bytes([number, 3]) + part, data)
    assert read_header(data).profile == b"firstsecondthird"


@pytest.mark.parametrize(
    ("marker", "precision", "components", "oddity"),
    [
        *[(0xC0, 8, 3, ""), (0xC1, 8, 1, ""), (0xC2, 8, 3, ""), (0xC3, 8, 3, "lossless")],
        *[(0xC9, 8, 3, "arithmetic"), (0xCA, 8, 3, "arithmetic"), (0xC1, 12, 3, "12-bit")],
        *[(0xC0, 8, 4, "cmyk"), (0xC0, 8, 2, "2-component")],
    ],
)
def test_jpegs_that_are_not_plain_are_told(marker, precision, components, oddity):
    size = struct.pack(">HH", 16, 24)
    frame = bytes([0xFF, marker, 0, 17, precision]) + size + bytes([components]) + bytes(9)
    header = read_header(b"\xff\xd8\xff\xff\xfe\0\x04hi" + frame + b"\xff\xda\0\x02pixels\xff\xd9")
    assert (header.width, header.height, header.oddity) == (24, 16, oddity)


WITH_END = [case[:3] for case in CASES if case[0] in ("JPEG", "PNG", "GIF", "WEBP")]


@pytest.mark.parametrize(("format", "image", "options"), WITH_END)
def test_a_whole_image_passes_with_anything_behind_it_and_a_cut_one_is_told(format, image, options):
    data, name = encoded(image, format, **options), format.lower()
    for behind in (b"", b"\0", b"\0\0trailing"):
        check_end(data + behind, name)
        assert read_header(data + behind) == read_header(data)
    for size in (len(data) - 1, len(data) // 2):
        with pytest.raises(CutError, match=f"{size:,} bytes of a {name} file without"):
            check_end(data[:size], name)
    for without_an_end in ("bmp", "tiff", "ppm"):
        check_end(b"", without_an_end)
    thumbnail = encoded(photo("RGB", (8, 8)), "JPEG")  # whose end is not that of the image
    data = with_segment(b"\xff\xe1", b"Exif\0\0" + thumbnail)
    check_end(data, "jpeg")
    inside = data.index(thumbnail) + len(thumbnail)
    for size in (len(data) - 1, len(data) * 3 // 4, inside + 10):
        with pytest.raises(CutError):
            check_end(data[:size], "jpeg")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty file"),
        (b"hello there", "text: 'hello there'"),
        (b"\0\1\2\3", "bytes that are not an image: 00 01 02 03"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIDAT" + bytes(13), "not IHDR"),
        (b"RIFF\0\0\0\0WEBPJUNK" + bytes(20), "not an image"),
        (b"GIF89a", "damaged gif file"),
        (b"\xff\xd8\xff", "ends inside its header"),
        (b"\xff\xd8\xff\xd9\0\0\0\0", "ends before its pixels"),
        (b"\xff\xd8\xff\xe0\0\x02hello", "damaged at byte 6"),
        (b"\xff\xd8\xff\xda\0\x02\xff\xd9", "without a frame header"),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\0\0\x01\x01\0\0\0\xff\xda\0\x02\xff\xd9", "1 x 0 pixels"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01", "ends inside its header"),
        (b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f\0\0\0", "ends inside its header"),
    ],
)
def test_a_header_that_is_none_is_told(data, reason):
    with pytest.raises(NotAnImageError, match=reason):
        read_header(data)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")  # Pillow warns of damage it survives
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@given(st.sampled_from(WHOLE), st.data())
def test_no_damage_gives_another_error(whole, data):
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, min(len(damaged), 700) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(0, len(damaged)))
    try:
        header = read_header(bytes(damaged[:size]))
    except NotAnImageError:
        return
    assert header.width > 0
    assert header.height > 0
    assert 1 <= header.orientation <= 8
