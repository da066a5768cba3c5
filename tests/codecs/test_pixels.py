"""Decoding any image to the pixels that a person sees, and encoding pixels."""

import itertools

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import simplejpeg

from shardkit.codecs.color import to_srgb
from shardkit.codecs.crop import resize
from shardkit.codecs.header import read_header
from shardkit.codecs.image import CutError, NotAnImageError
from shardkit.codecs.pixels import PpmHeader, decode, encode, ppm_header, to_ppm, to_rgb
from tests.codecs.sample_images import encoded, exif, opened, photo, photo_like
from tests.codecs.sample_profiles import by_littlecms, cmyk_profile, grey_profile, rgb_profile

PHOTO = photo_like(5, 97, 61)


def differ(one, other):
    """The levels that two images differ by, at most."""
    return int(np.abs(one.astype(int) - other).max())


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_images_are_turned_as_exif_says(format):
    for orientation in range(1, 9):
        data = encoded(photo(), format, exif=exif(orientation))
        found = to_rgb(data)
        with opened(data) as image:
            expected = np.array(PIL.ImageOps.exif_transpose(image))
        assert found.shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
        assert differ(found, expected) <= 8  # decoders of JPEG differ
        assert read_header(data).upright == found.shape[1::-1]


@pytest.mark.parametrize("chroma", ["", "444", "420"])
def test_cmyk_and_ycck_are_what_pillow_makes_of_them(chroma):
    inks = PIL.Image.fromarray(PHOTO).convert("CMYK")
    data = encoded(inks, "JPEG", quality=95)
    if chroma:
        pixels = np.ascontiguousarray(inks)
        data = simplejpeg.encode_jpeg(pixels, colorspace="CMYK", colorsubsampling=chroma)
    assert read_header(data).oddity == "cmyk"
    with opened(data) as image:
        assert image.info["adobe_transform"] == (2 if chroma else 0)  # YCCK or not
        assert differ(to_rgb(data), np.array(image.convert("RGB"))) <= (2 if chroma else 0)


@pytest.mark.parametrize(
    ("mode", "format", "profile"),
    [
        *[("RGB", format, rgb_profile()) for format in ("JPEG", "PNG", "WEBP", "TIFF")],
        *[("L", format, grey_profile(1.8)) for format in ("JPEG", "PNG", "TIFF")],
        *[("CMYK", format, cmyk_profile()) for format in ("JPEG", "TIFF")],
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_a_profile_is_applied(mode, format, profile):
    stored = PIL.Image.fromarray(PHOTO).convert(mode)
    plain, data = to_rgb(encoded(stored, format)), encoded(stored, format, icc_profile=profile)
    with opened(data) as image:
        # Decoders of JPEG differ, and so the pixels are ours; but Pillow has inks.
        before = {"RGB": plain, "L": plain[:, :, 0]}.get(mode)
        expected = by_littlecms(image if before is None else PIL.Image.fromarray(before), profile)
    # LittleCMS interpolates in a table of its own; a table of all levels may be more exact.
    assert differ(to_rgb(data), expected) <= (0 if mode == "RGB" else 2)
    assert differ(expected, plain) > 10


def test_images_without_loss_give_their_pixels_and_frames_the_first():
    for format in ("PNG", "BMP", "TIFF", "PPM"):
        np.testing.assert_array_equal(to_rgb(encoded(photo(), format)), np.array(photo()))
    frames = [PIL.Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert to_rgb(data)[0, 0].tolist() == [255, 0, 0]  # the first frame counts
    with pytest.raises(NotAnImageError, match="floating-point"):
        to_rgb(encoded(photo("F"), "TIFF"))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG", "PPM"])
def test_cut_images_and_flipped_bits_are_refused(format):
    data = encoded(photo(size=(90, 60)), format)
    for size in (len(data) * 2 // 3, 40):
        with pytest.raises(NotAnImageError):
            to_rgb(data[:size])
    if format == "PNG":  # which has checksums
        for at in np.linspace(data.index(b"IDAT") + 4, data.index(b"IEND") - 9, 20).astype(int):
            flipped = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            with pytest.raises(NotAnImageError):
                to_rgb(flipped)


def test_transparent_pixels_show_white_or_the_background_that_is_asked_for():
    image = photo("RGBA")
    image.putalpha(0)
    palette = PIL.Image.new("P", (5, 4), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((0, 0), 0)
    half, keyed = PIL.Image.new("LA", (3, 2), (0, 128)), PIL.Image.new("RGB", (2, 2), (1, 2, 3))
    for data, level in [
        (encoded(image, "PNG"), 255),
        (encoded(image, "WEBP", lossless=True), 255),
        (encoded(half, "PNG"), 127),
        (encoded(keyed, "PNG", transparency=(1, 2, 3)), 255),
        (encoded(PIL.Image.new("P", (2, 2)), "PNG", transparency=0), 255),
    ]:
        assert (to_rgb(data) == level).all()
    assert to_rgb(encoded(palette, "PNG"))[0, 0].tolist() == [10, 20, 30]

    background = (200, 30, 41)

    def decoded(image, format, **options):
        data = encoded(image, format, **options)
        return decode(data, read_header(data), background=background).pixels

    seen, alpha = PHOTO[0, 0].astype(int), 77
    image = PIL.Image.new("RGBA", (5, 4), (*seen.tolist(), alpha))
    mixed = (seen * alpha + np.array(background) * (255 - alpha)) / 255
    for format, options in [("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True})]:
        pixels = decoded(image, format, **options)
        assert pixels.shape == (4, 5, 3)
        assert np.abs(pixels - mixed).max() <= 1
    for format in ("PNG", "GIF"):
        pixels = decoded(palette, format, transparency=1)
        assert pixels[0, 0].tolist() == [10, 20, 30]
        assert (pixels[1:] == background).all()
    np.testing.assert_array_equal(decoded(photo(), "PNG"), photo())


def test_grey_of_any_depth_keeps_its_high_byte():
    values = np.array([[0, 255, 256, 0xFFFF, 0x1234, 0x80FF]], np.uint16)
    for format in ("PNG", "TIFF"):
        data = encoded(PIL.Image.fromarray(values), format)
        assert to_rgb(data)[0, :, 0].tolist() == [0, 0, 1, 255, 0x12, 0x80]
    assert to_rgb(encoded(photo("1"), "PNG")).max() == 255
    np.testing.assert_array_equal(to_rgb(encoded(photo("L"), "PNG"))[:, :, 1], photo("L"))
    assert to_rgb(b"P5 2 1 255\n\x07\x09").tolist() == [[[7] * 3, [9] * 3]]


@pytest.mark.parametrize(
    ("mode", "format", "profile"),
    [
        ("RGB", "JPEG", rgb_profile()),
        *[("L", format, grey_profile(1.8)) for format in ("JPEG", "PNG")],
        *[("CMYK", format, cmyk_profile()) for format in ("JPEG", "TIFF")],
        ("RGBA", "PNG", rgb_profile()),
        *[("CMYK", "JPEG", None), ("P", "GIF", None), ("RGB", "PPM", None)],
    ],
    ids=lambda value: "profile" if isinstance(value, bytes) else str(value),
)
def test_what_was_decoded_can_be_resized(mode, format, profile):
    image = PIL.Image.fromarray(PHOTO).convert(mode)
    data = encoded(image, format, **({"icc_profile": profile} if profile else {}))
    header = read_header(data)
    transform = None if profile is None else to_srgb(profile, header.colour)
    pixels, reduced, _ = decode(data, header, least=(30, 20), transform=transform)
    assert resize(pixels, 30, 20, (header.width, header.height), reduced).shape == (20, 30, 3)


def test_a_profile_that_is_broken_or_of_other_colours_is_passed_over():
    for mode, formats in {
        "RGB": ("JPEG", "WEBP"),
        "L": ("JPEG", "PNG"),
        "CMYK": ("JPEG", "TIFF"),
        "P": ("PNG",),
        "LA": ("PNG",),
    }.items():
        image, other = photo(mode), rgb_profile() if mode == "CMYK" else cmyk_profile()
        for format, profile in itertools.product(formats, (b"no", rgb_profile()[:-60], other)):
            found = to_rgb(encoded(image, format, icc_profile=profile))
            np.testing.assert_array_equal(found, to_rgb(encoded(image, format)))


JPEGS = [
    ("RGB", {}),
    ("RGB", {"progressive": True}),
    ("RGB", {"restart_marker_rows": 1}),
    ("RGB", {"subsampling": 0, "optimize": True}),
    ("L", {}),
    ("CMYK", {}),
]


@pytest.mark.parametrize(("mode", "options"), JPEGS)
def test_a_jpeg_that_ends_too_early_is_refused_even_with_an_end(mode, options):
    data = encoded(PIL.Image.fromarray(PHOTO).convert(mode), "JPEG", **options)
    scan = data.index(b"\xff\xda") + 20
    for part in (0.2, 0.55, 0.9):
        size = scan + int((len(data) - scan) * part)
        with pytest.raises(NotAnImageError):
            to_rgb(data[:size] + b"\xff\xd9")
    for needless in (bytes(3), bytes(40)):  # some writers fill up to a whole block
        np.testing.assert_array_equal(to_rgb(data[:-2] + needless + data[-2:]), to_rgb(data))


def test_headers_of_ppm():
    for start, header in [
        (b"P6\n2 1\n255\n", PpmHeader(2, 1, 11)),
        (b"P6 2\t1 255 ", PpmHeader(2, 1, 11)),
        (b"P6\n# by a scanner\n2 # wide\n1\n255\n", PpmHeader(2, 1, 33)),
        (b"P6 2 1 65535 ", None),
        (b"P5 2 1 255 ", None),
        (b"P6 0 1 255 ", None),
        (b"P6 21 255 ", None),
    ]:
        data = start + b"abcdef"
        assert ppm_header(data) == header
        if header is not None:
            assert data[header.start : header.stop] == b"abcdef"
            with pytest.raises(CutError):
                ppm_header(data[:-1])
    pixels = np.array(photo())
    assert to_ppm(pixels) == encoded(photo(), "PPM")
    np.testing.assert_array_equal(to_rgb(to_ppm(pixels)), pixels)


def test_quality_and_chroma_are_those_that_are_asked_for():
    for chroma, quality in itertools.product(("420", "422", "444"), (10, 75, 100)):
        header = read_header(encode(PHOTO, "jpeg", quality=quality, chroma=chroma))
        assert header.chroma == chroma
        assert header.table == read_header(encoded(photo(), "JPEG", quality=quality)).table
    files = [encode(PHOTO, "webp", quality=quality) for quality in (20, 60, 95)]
    assert sorted(files, key=len) == files
    assert not any(read_header(data).lossless for data in files)
    assert np.abs(to_rgb(files[-1]).astype(int) - PHOTO).mean() < 5


def test_encoding_is_nearly_lossless_and_always_the_same():
    pixels = np.array(photo())
    data = encode(pixels[:, ::-1], "jpeg", quality=95, chroma="444")  # also of a view
    assert data == encode(pixels[:, ::-1], "jpeg", quality=95, chroma="444")
    assert read_header(data)[:5] == ("jpeg", 24, 16, 1, "")
    assert np.abs(to_rgb(data).astype(int) - pixels[:, ::-1]).mean() < 2
    long = np.zeros((1, 65501, 3), np.uint8)
    assert read_header(encode(long, "png")).width == 65501
    assert read_header(encode(long[:, :16383], "webp")).width == 16383
    webp = r"16,384 pixels, .* at most 16,383"
    for height, width, format, message in [
        (1, 65501, "jpeg", "65,500"),
        (1, 16384, "webp", webp),
        (16384, 1, "webp", webp),
    ]:
        with pytest.raises(ValueError, match=message):
            encode(np.zeros((height, width, 3), np.uint8), format)


@pytest.mark.parametrize("format", ["png", "webp", "ppm"])
@pytest.mark.parametrize("shape", [(61, 97), (1, 1), (1, 300), (300, 1)])
def test_lossless_formats_give_the_same_pixels_back(format, shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    pixels.flags.writeable = False
    for given in (pixels, pixels[::-1, ::-1], pixels.swapaxes(0, 1)):
        data = encode(given, format, lossless=True)
        header = read_header(data)
        assert (header.format, header.lossless, header.oddity) == (format, True, "")
        np.testing.assert_array_equal(to_rgb(data), given)
        with opened(data) as image:
            np.testing.assert_array_equal(np.array(image), given)


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
@pytest.mark.parametrize("size", [480, 65519, 65520, 200_000])  # a JPEG's segment has 65,519
def test_a_profile_is_stored(format, size):
    profile = np.random.default_rng(0).bytes(size)
    data = encode(PHOTO, format, profile=profile)
    assert read_header(data).profile == profile
    with opened(data) as image:
        assert image.info["icc_profile"] == profile
    np.testing.assert_array_equal(to_rgb(data), to_rgb(encode(PHOTO, format)))
