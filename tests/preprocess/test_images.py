"""What the steps make of single images: what passes, what is re-encoded, and why; by Pillow."""

import contextlib
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from PIL import ImageCms
from PIL.Image import Resampling
from PIL.JpegImagePlugin import get_sampling

from shardkit import Image, Int, SampleError, Schema, UsageError
from shardkit.options import RESIZE_MODES, ImageOptions
from shardkit.preprocess.images import ImageSteps, Shaped, steps_for
from shardkit.preprocess.items import Filtered
from shardkit.preprocess.single_image import geometry
from tests.codecs.sample_images import encoded, exif
from tests.sources.real import refused

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]
FINE = {"JPEG": {"quality": 98, "subsampling": 0}, "WEBP": {"lossless": True}}
BILINEAR = Resampling.BILINEAR


def photo(mode: str = "RGB", size: tuple[int, int] = (120, 80), seed: int = 0) -> PIL.Image.Image:
    """Soft colours with some grain: a resize that is off by a pixel is off by many levels."""
    dice = np.random.default_rng(seed)
    coarse = PIL.Image.fromarray(dice.integers(0, 256, (9, 12, 3), np.uint8))
    soft = np.asarray(coarse.resize(size, Resampling.BICUBIC), np.int16)
    grain = dice.integers(-9, 10, soft.shape, np.int16)
    return PIL.Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8)).convert(mode)


def finely(image: PIL.Image.Image, format: str, **options: Any) -> bytes:
    """Encoded with as little loss as the format allows."""
    return encoded(image, format, **FINE.get(format, {}), **options)


def opened(data: bytes) -> PIL.Image.Image:
    """An image, loaded; its format and what else its file says stay with it."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        image.load()
        return image


def steps_of(schema, source=None, raw="array", **options) -> ImageSteps:
    """The steps for images of such fields."""
    steps = steps_for(Schema(schema), ImageOptions(**options), None, raw, source)
    assert steps is not None
    return steps


def shaped(data: bytes, raw: str = "array", **options: Any) -> Shaped:
    return steps_of({"image": Image()}, raw=raw, **options)({"__key__": "a", "image": data})


def made(data: bytes, **options: Any) -> Any:
    """The image that the steps make of one."""
    return shaped(data, **options).sample["image"]


def pixels_of(value: Any) -> np.ndarray[Any, Any]:
    """Raw pixels, or those that Pillow sees in a file."""
    return value if isinstance(value, np.ndarray) else np.array(opened(value).convert("RGB"))


def psnr(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(10 * np.log10(255**2 / max(np.square(found - expected).mean(), 1e-9)))


def assert_passes(data: bytes, **options: Any) -> None:
    found = shaped(data, **options)
    assert found.sample["image"] == data
    assert found.images == {"passed": 1, "bytes in": len(data), "bytes out": len(data)}
    assert found.reasons == {}


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# sRGB with the primaries of red and green exchanged: its colours are known without any library.
SWAPPED = SRGB.replace(b"rXYZ", b"?").replace(b"gXYZ", b"rXYZ").replace(b"?", b"gXYZ")


# --- what passes ----------------------------------------------------------------------------------
PLAIN = {
    **{format.lower(): encoded(photo(), format) for format in FORMATS},
    **{f"{f.lower()} with sRGB": encoded(photo(), f, icc_profile=SRGB) for f in FORMATS[:3]},
    "progressive jpeg": encoded(photo(), "JPEG", progressive=True),
    "jpeg of full colour": encoded(photo(), "JPEG", subsampling=0, quality=100),
    "grey jpeg": encoded(photo("L"), "JPEG"),
    "jpeg that says it is upright": encoded(photo(), "JPEG", exif=exif(1)),
    "jpeg with something behind it": encoded(photo(), "JPEG") + b"\0\0a web server was here",
    "png with something behind it": encoded(photo(), "PNG") + b"\r\n",
    "grey png": encoded(photo("L"), "PNG"),
    "black and white png": encoded(photo("1"), "PNG"),
    "palette png": encoded(photo("P"), "PNG"),
    "lossless webp": encoded(photo(), "WEBP", lossless=True),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_image_of_the_right_size_passes_byte_for_byte(kind):
    for options in (
        {"resize": 120, "resize_mode": "longer"},
        {"resize": 500},  # no image becomes larger unasked
        {"resize": 200, "resize_mode": "exact"},
        {"resize": 200, "resize_mode": "crop"},
        {"icc": "srgb", "background": "black"},
        {"icc": "keep"},
        {"resize": 80, "check": "decode"},
        {"min_size": 80, "max_aspect": 1.5, "max_pixels": 120 * 80},
    ):
        assert_passes(PLAIN[kind], **options)
    if kind in ("jpeg", "png", "webp"):
        assert_passes(PLAIN[kind], format=kind, resize=80)


def test_every_image_that_a_sample_has_is_shaped_and_without_such_fields_options_are_refused():
    steps = steps_of({"left": Image(), "right": Image(optional=True), "label": Int()}, resize=20)
    data = PLAIN["png"]
    both = steps({"__key__": "a", "left": data, "right": data, "label": 3})
    size = len(both.sample["left"])
    assert both.images == {"resized": 2, "bytes in": 2 * len(data), "bytes out": 2 * size}
    assert both.sample["left"] == both.sample["right"] != data
    one = steps({"__key__": "a", "left": data, "label": 3})
    assert one.sample == {"__key__": "a", "left": both.sample["left"], "label": 3}
    with pytest.raises(UsageError, match="no images"):
        steps_for(Schema({"label": Int()}), ImageOptions(resize=3), None, "array")
    assert steps_for(Schema({"label": Int()}), ImageOptions(), None, "array") is None
    assert steps_for(Schema({"image": Image()}), ImageOptions(), None, "array") is None


# --- what is re-encoded ---------------------------------------------------------------------------
def palette_with_a_hole() -> PIL.Image.Image:
    image = photo("P")
    image.info["transparency"] = 3
    return image


def see_through(mode: str = "RGBA") -> PIL.Image.Image:
    image = photo("RGBA")
    image.putalpha(PIL.Image.linear_gradient("L").resize(image.size))
    return image.convert(mode)


def frames(format: str, **options: Any) -> bytes:
    other = photo(seed=9)
    return encoded(photo(), format, save_all=True, append_images=[other], duration=50, **options)


def chunk(name: bytes, content: bytes) -> bytes:
    """Of a PNG."""
    check = struct.pack(">I", zlib.crc32(name + content))
    return struct.pack(">I", len(content)) + name + content + check


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def deep(kind: str) -> bytes:
    """16 bits a channel, of which the low ones are noise."""
    noise = np.random.default_rng(2).integers(0, 256, (80, 120, 3), np.uint16)
    pixels = (np.asarray(photo(), np.uint16) << 8) + noise
    height, width, _ = pixels.shape
    if kind == "PPM":
        return b"P6 %d %d 65535\n" % (width, height) + pixels.astype(">u2").tobytes()
    if kind == "PNG":
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
        return png(width, height, 16, 2, rows)
    tags = {256: width, 257: height, 258: 122, 259: 1, 262: 2, 273: 128, 277: 3, 278: height}
    tags[279] = pixels.nbytes
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    entries[2] = struct.pack("<HHII", 258, 3, 3, 122)  # where three numbers of bits stand
    start = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + b"".join(entries) + bytes(4)
    return start.ljust(122, b"\0") + struct.pack("<3H", 16, 16, 16) + pixels.tobytes()


def deep_grey(format: str) -> bytes:
    values = np.asarray(photo("L"), np.uint16) * 256 + 77
    return encoded(PIL.Image.fromarray(values), format)


def over_white(image: PIL.Image.Image, background: str = "white") -> PIL.Image.Image:
    under = PIL.Image.new("RGBA", image.size, background)
    return PIL.Image.alpha_composite(under, image.convert("RGBA")).convert("RGB")


def swapped(image: PIL.Image.Image) -> PIL.Image.Image:
    red, green, blue = image.split()
    return PIL.Image.merge("RGB", (green, red, blue))


UPRIGHT_IN = {
    ("JPEG", 6): photo().transpose(PIL.Image.Transpose.ROTATE_270),
    ("PNG", 3): photo().rotate(180),
    ("WEBP", 2): PIL.ImageOps.mirror(photo()),
    ("TIFF", 4): PIL.ImageOps.flip(photo()),
}
FIRST = "animated"  # and more words, that only the first frame stays
UNREADABLE = "with an unreadable colour profile, taken as sRGB"
COARSE = {"cmyk JPEG": encoded(photo("CMYK"), "JPEG", quality=98)}
COARSE |= {"GIF": encoded(photo(), "GIF"), "WEBP": encoded(photo(), "WEBP", quality=95)}
ODD = {  # the file, the reason, and what is seen
    **{
        f"rotated {format}": (finely(photo(), format, exif=exif(turn)), "rotated", seen)
        for (format, turn), seen in UPRIGHT_IN.items()
    },
    **{
        f"transparent {kind}": (data, "transparent", over_white(image))
        for kind, image, data in (
            ("PNG", see_through(), encoded(see_through(), "PNG")),
            ("grey PNG", see_through("LA"), encoded(see_through("LA"), "PNG")),
            ("palette PNG", palette_with_a_hole(), encoded(palette_with_a_hole(), "PNG")),
            ("WEBP", see_through(), finely(see_through(), "WEBP")),
            ("lossy WEBP", see_through(), encoded(see_through(), "WEBP", quality=95)),
        )
    },
    "animated GIF": (frames("GIF"), FIRST, opened(COARSE["GIF"])),
    "animated PNG": (frames("PNG"), FIRST, photo()),
    "animated WEBP": (frames("WEBP", lossless=True), FIRST, photo()),
    "animated lossy WEBP": (frames("WEBP", quality=95), FIRST, opened(COARSE["WEBP"])),
    "cmyk JPEG": (COARSE["cmyk JPEG"], "cmyk", opened(COARSE["cmyk JPEG"])),
    **{
        f"{format} with a profile": (data, "with a colour profile", swapped(photo()))
        for format in ("JPEG", "PNG", "WEBP", "TIFF")
        for data in [finely(photo(), format, icc_profile=SWAPPED)]
    },
    "PNG with a damaged profile": (
        encoded(photo(), "PNG", icc_profile=SWAPPED[:200]), UNREADABLE, photo()
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_an_image_that_is_not_plain_is_made_anew_and_says_why(kind):
    data, reason, seen = ODD[kind]
    found = shaped(data, icc="srgb", chroma="444", quality=100)
    ((said, count),) = found.reasons.items()
    assert (said, count) == (reason, 1) or (reason == FIRST and "first frame" in said)
    assert said.startswith(reason)
    assert found.images["encoded"] == 1
    result = opened(found.sample["image"])
    codec = next((format for format in ("JPEG", "WEBP", "PPM") if format in kind), "PNG")
    assert (result.format, result.mode) == (codec, "RGB")
    assert getattr(result, "n_frames", 1) == 1
    assert not result.getexif()
    assert not result.info.get("icc_profile")
    # Without loss but for the codec, and the rounding of profiles.
    assert psnr(result, seen.convert("RGB")) > (32 if "JPEG" in kind or "lossy" in kind else 45)
    assert shaped(found.sample["image"], icc="srgb").images["passed"] == 1
    for options in ({"min_size": 10}, {"check": "decode"}):  # no step for pixels
        assert_passes(data, **options)


DEEP = {f"{kind}": (deep(kind), photo()) for kind in ("PNG", "PPM", "TIFF")}
DEEP |= {f"grey {kind}": (deep_grey(kind), photo("L")) for kind in ("PNG", "TIFF")}


@pytest.mark.parametrize("kind", DEEP)
def test_16_bits_are_reduced_for_a_jpeg_which_is_said(kind):
    data, seen = DEEP[kind]
    found = shaped(data, format="jpeg", chroma="444", quality=100)
    assert {said for said in found.reasons if "jpeg" not in said} == {"16-bit"}
    result = opened(found.sample["image"])
    assert (result.format, result.mode) == ("JPEG", "L" if "grey" in kind else "RGB")
    assert psnr(result.convert("RGB"), seen.convert("RGB")) > 32


# --- orientation and resizing ---------------------------------------------------------------------
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_all_orientations_are_applied_as_pillow_does_it(format, orientation):
    options = {"exif": exif(orientation), "lossless": True}
    # A JPEG 17 times as large as the result is decoded at a part of its size.
    size = (596, 409) if format == "JPEG" else (121, 83)
    data = encoded(photo(size=size), format, **options)
    width, height = (35, 24) if orientation < 5 else (24, 35)
    by_pillow = PIL.ImageOps.exif_transpose(opened(data)).resize((width, height), BILINEAR)
    for way in ("raw", "png", "jpeg"):
        found = made(data, resize=24, format=way, quality=100, chroma="444")
        assert pixels_of(found).shape == (height, width, 3)
        assert psnr(pixels_of(found), by_pillow) > 40
        if way != "raw":
            assert not opened(found).getexif()
            assert b"Exif" not in found


def test_an_orientation_behind_the_pixels_of_a_png_counts_too():
    """Where some editors put it, and the PNG specification allows it."""
    data = PLAIN["png"]
    data = data[:-12] + chunk(b"eXIf", exif(6).tobytes().removeprefix(b"Exif\0\0")) + data[-12:]
    expected = PIL.ImageOps.exif_transpose(opened(data))
    assert expected.size == (80, 120)
    np.testing.assert_array_equal(made(data, format="raw"), expected)


@pytest.mark.parametrize("upscale", [False, True])
@pytest.mark.parametrize("mode", RESIZE_MODES)
def test_resized_pixels_are_pillows_where_the_geometry_says(mode, upscale):
    """Larger, smaller, and where one side can grow while the other shrinks; test_geometry.py has
    the sizes and places themselves. Pixels of an image that is only cut or padded stay, and margins
    have the colour that is asked for."""
    options = {"resize": 40, "resize_mode": mode, "upscale": upscale}
    sizes = ((300, 200), (200, 301), (41, 43), (30, 20), (300, 12), (90, 40), (40, 38), (2, 2))
    for number, size in enumerate(sizes):
        image, place = photo(size=size), geometry(*size, ImageOptions(**options))
        colour = (None, "#102030", "teal")[number % 3]
        data, full = encoded(image, "PNG"), (place.full_width, place.full_height)
        expected = PIL.Image.new("RGB", (place.columns, place.rows), colour or "white")
        margins = np.asarray(expected)[[0, -1]]
        expected.paste(image.resize(full, BILINEAR), (-place.left, -place.top))
        found = shaped(data, background=colour, **options)
        pixels = pixels_of(found.sample["image"])
        assert psnr(pixels, expected) > 40
        if full == size:
            np.testing.assert_array_equal(pixels, expected)
        elif mode == "pad" and place.full_height + 2 < place.rows:
            np.testing.assert_array_equal(pixels[[0, -1]], margins)
        stays = size == full == expected.size
        assert (found.sample["image"] == data) == stays
        assert ("resized" in found.images) == (not stays)
    image = photo(size=(596, 409))  # half a pixel to the side is told by such a bound
    shifted = image.resize((35, 24), BILINEAR, box=(8.5, 0, 596, 409))
    assert psnr(image.resize((35, 24), BILINEAR), shifted) < 36


@pytest.mark.parametrize("format", FORMATS)
def test_a_single_pixel_goes_through_everything(format):
    data = encoded(PIL.Image.new("RGB", (1, 1), (200, 100, 50)), format)
    for mode in RESIZE_MODES:
        side = 1 if mode == "shorter" else 5
        for way in ("keep", "webp", "raw", "png"):
            options = {"resize_mode": mode, "upscale": mode not in ("shorter", "pad")}
            pixels = pixels_of(made(data, resize=5, format=way, **options))
            assert pixels.shape == (side, side, 3)
        assert np.abs(pixels[side // 2, side // 2] - np.array([200, 100, 50])).max() <= 4


def test_a_side_of_65500_pixels_is_kept_and_more_than_a_codec_can_hold_is_a_clear_error():
    data = encoded(photo(size=(131, 3)).resize((65500, 3), Resampling.NEAREST), "JPEG", quality=95)
    assert_passes(data, resize=3)
    found = made(data, resize=131, resize_mode="longer", format="raw")
    assert psnr(found, opened(data).resize((131, 1), BILINEAR)) > 40
    assert opened(made(data, resize=100, resize_mode="exact")).size == (100, 3)
    assert opened(made(data, quality=10)).size == (65500, 3)  # as long as a JPEG can be
    wide = encoded(PIL.Image.new("RGB", (65501, 1)), "PNG")
    for format, limit in (("jpeg", "65,500"), ("webp", "16,383")):
        error = refused(SampleError, "cannot be stored", made, wide, format=format)
        assert error.where == {"key": "a", "field": "image"}
        assert limit in str(error.found)
        assert "--on-error skip" in str(error.fix)
    assert_passes(wide, format="png")


# --- codecs ---------------------------------------------------------------------------------------


def test_a_lossless_webp_stays_lossless_and_a_lossy_one_is_recompressed_if_that_makes_it_smaller():
    expected = made(encoded(photo(), "PNG"), resize=40)
    lossless = made(encoded(photo(), "WEBP", lossless=True), resize=40)
    np.testing.assert_array_equal(pixels_of(lossless), pixels_of(expected))
    assert b"VP8L" in lossless[:32]
    assert b"VP8 " in made(encoded(photo(), "WEBP"), resize=40)[:32]
    assert b"VP8 " in made(encoded(photo(), "PNG"), resize=40, format="webp")[:32]
    data = encoded(photo(), "WEBP", quality=95)
    found = shaped(data, quality=10)
    assert found.images["recompressed"] == 1
    assert len(found.sample["image"]) < len(data) / 2
    small = found.sample["image"]
    again = shaped(small, quality=100)
    assert (again.sample["image"], again.images["kept"]) == (small, 1)


@pytest.mark.parametrize("source", FORMATS)
def test_images_keep_their_codec_or_one_without_loss_or_get_the_one_asked_for(source):
    data = encoded(photo(), source)
    kept = opened(made(data, resize=40))
    assert kept.format == ("PNG" if source in ("GIF", "BMP", "TIFF") else source)
    assert kept.mode == "RGB"
    for format in {"jpeg", "png", "webp"} - {source.lower()}:
        found = shaped(data, format=format)
        assert found.reasons == {f"{source.lower()} to {format}": 1}
        assert opened(found.sample["image"]).format == format.upper()
        bound = 27 if format != "png" else 60  # grain, at quality 90
        assert psnr(pixels_of(found.sample["image"]), opened(data).convert("RGB")) > bound


def test_quality_and_chroma_are_those_asked_for_or_the_defaults():
    def tables(data):
        return opened(data).quantization  # type: ignore[attr-defined]

    data = encoded(photo(), "PNG")
    for quality in (1, 37, 50, 90, 100):
        found = made(data, format="jpeg", quality=quality)
        assert tables(found) == tables(encoded(photo(), "JPEG", quality=quality))
    default = made(PLAIN["jpeg"], resize=40)
    assert tables(default) == tables(encoded(photo(), "JPEG", quality=90))
    assert get_sampling(opened(default)) == 2  # 4:2:0
    for number, chroma in enumerate(("444", "422", "420")):
        assert get_sampling(opened(made(data, format="jpeg", chroma=chroma))) == number
    sizes = [len(made(data, format="webp", quality=quality)) for quality in (20, 60, 95)]
    assert sizes == sorted(set(sizes))


def test_raw_images_are_pixels():
    for kind in ("png", "palette png", "lossless webp", "bmp", "ppm", "grey png"):
        expected = np.asarray(opened(PLAIN[kind]).convert("RGB"))
        found = shaped(PLAIN[kind], "array", format="raw")
        value = found.sample["image"]
        assert (value.dtype, value.flags.c_contiguous) == (np.uint8, True)
        np.testing.assert_array_equal(value, expected)
        assert found.images["bytes out"] == expected.size
        ppm = opened(shaped(PLAIN[kind], "ppm", format="raw").sample["image"])
        assert ppm.format == "PPM"
        np.testing.assert_array_equal(ppm, expected)


# --- recompression --------------------------------------------------------------------------------
def jpeg(quality: int, subsampling: str = "4:2:0", **options: Any) -> bytes:
    image = photo(size=(240, 160))
    return encoded(image, "JPEG", quality=quality, subsampling=subsampling, **options)


def test_a_finer_jpeg_is_recompressed_unless_it_would_come_out_larger():
    for options in ({}, {"progressive": True}, {"subsampling": "4:4:4"}):
        data = jpeg(95, **options)
        found = shaped(data, quality=50)
        result = found.sample["image"]
        assert found.images == {
            "recompressed": 1, "bytes in": len(data), "bytes out": len(result)
        }  # fmt: skip
        assert found.reasons == {}
        assert len(result) < len(data) / 2
        assert opened(result).quantization == opened(jpeg(50)).quantization
        assert psnr(opened(result), opened(data)) > 30
    flat = PIL.Image.new("RGB", (8, 8), (90, 90, 90))
    small = {"quality": 91, "optimize": True}  # 8 pixels need no tables of 400 bytes
    data = encoded(flat, "JPEG", **small)
    found = shaped(data, quality=90)
    assert found.sample["image"] == data
    assert found.images == {"kept": 1, "bytes in": len(data), "bytes out": len(data)}
    assert found.reasons == {}
    # Larger pixels for a reason are another matter.
    turned = encoded(flat, "JPEG", exif=exif(6), **small)
    assert shaped(turned, quality=90).images["encoded"] == 1


def test_what_is_as_coarse_as_asked_or_has_no_loss_passes_and_finer_chroma_is_recompressed():
    for quality in (1, 49, 50, 51, 90, 100):
        assert_passes(jpeg(quality), quality=quality)
        assert_passes(jpeg(max(quality // 2, 1)), quality=quality)
    for kind in ("png", "lossless webp", "bmp", "gif", "ppm"):
        assert_passes(PLAIN[kind], quality=10, chroma="420")
    for finer, asked in (("4:4:4", "420"), ("4:4:4", "422"), ("4:2:2", "420")):
        found = shaped(jpeg(90, finer), chroma=asked)
        assert found.images["recompressed"] == 1
        assert get_sampling(opened(found.sample["image"])) == {"422": 1, "420": 2}[asked]
    for coarser, asked in (("4:2:0", "444"), ("4:2:0", "420"), ("4:2:2", "422"), ("4:2:2", "444")):
        assert_passes(jpeg(90, coarser), chroma=asked)
    assert_passes(PLAIN["grey jpeg"], chroma="420")


# --- colour profiles and transparency -------------------------------------------------------------
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_profile_is_applied_or_kept_whole_but_for_srgb_itself(format):
    data = finely(photo(), format, icc_profile=SWAPPED)
    small = photo().resize((60, 40), BILINEAR)
    for icc, expected, profile in (
        (None, swapped(small), None),
        ("srgb", swapped(small), None),
        ("keep", small, SWAPPED),
    ):
        found = opened(made(data, resize=40, icc=icc, quality=100, chroma="444"))
        assert psnr(found, expected) > 38
        assert (found.info.get("icc_profile") or None) == profile
    assert_passes(data, icc="keep")
    srgb = encoded(photo(), format, icc_profile=SRGB)
    assert not opened(made(srgb, resize=40)).info.get("icc_profile")
    assert opened(made(srgb, resize=40, icc="keep")).info["icc_profile"] == SRGB
    profile = SWAPPED[:128] + np.random.default_rng(0).bytes(200_000)  # of many segments
    data = encoded(photo(), "JPEG", icc_profile=profile)
    found = made(data, resize=40, icc="keep", format=format.lower())
    assert opened(found).info["icc_profile"] == profile
    assert opened(made(found, resize=20, icc="keep")).info["icc_profile"] == profile


def test_transparent_pixels_show_the_background_and_reasons_add_up():
    for background in ("white", "#000000", "rgb(10, 200, 30)"):
        for image in (see_through(), see_through("LA"), palette_with_a_hole()):
            found = made(encoded(image, "PNG"), background=background)
            np.testing.assert_array_equal(pixels_of(found), over_white(image, background))
    data = encoded(see_through(), "PNG", exif=exif(8), icc_profile=SWAPPED)
    found = shaped(data, resize=30, format="jpeg")
    assert found.reasons == {
        "transparent": 1, "rotated": 1, "png to jpeg": 1, "with a colour profile": 1
    }  # fmt: skip
    assert {n: c for n, c in found.images.items() if "bytes" not in n} == {"resized": 1}
    assert shaped(PLAIN["jpeg"], resize=30).reasons == {}


# --- filters --------------------------------------------------------------------------------------
def unwanted(data: bytes, **options: Any) -> dict[str, str]:
    return refused(Filtered, None, shaped, data, **options).to_json()


def test_filters_say_what_they_drop_and_keep_what_is_on_the_line():
    """They look at the image before it is resized."""
    data = encoded(photo(size=(120, 40)), "PNG")
    assert_passes(data, min_size=40, max_aspect=3, max_pixels=4800)
    for options, reason in (
        ({"min_size": 41}, "smaller than 41"),
        ({"min_size": 41, "resize": 10}, "smaller than 41"),
        ({"min_size": 41, "resize": 100, "upscale": True}, "smaller than 41"),
        ({"max_aspect": 2.9}, "aspect over 2.9"),
        ({"max_pixels": 4799}, "more than 4,799 pixels"),
    ):
        assert unwanted(data, **options) == {"key": "a", "reason": reason, "found": "120 x 40"}
    for orientation in (1, 6):
        turned = encoded(photo(size=(120, 40)), "JPEG", exif=exif(orientation))
        assert unwanted(turned, max_aspect=2)["reason"] == "aspect over 2"


def bomb(width: int, height: int, depth: int = 8) -> bytes:
    """A grey PNG of a few bytes whose header announces so many pixels."""
    return png(width, height, depth, 0, bytes(1000))


def test_more_pixels_than_memory_has_room_for_are_an_error_unless_they_are_filtered():
    data = bomb(30_000, 30_000)
    for options in ({"resize": 10}, {"format": "raw"}, {"check": "decode"}, {"format": "jpeg"}):
        error = refused(SampleError, "too many pixels", shaped, data, **options)
        assert error.where == {"key": "a", "field": "image"}
        assert "30,000 x 30,000" in str(error.found)
        assert "134,217,728" in str(error.expected)
        assert "--max-pixels" in str(error.fix)
        assert unwanted(data, max_pixels=10**8, **options)["found"] == "30000 x 30000"
    assert_passes(data, min_size=1)  # nothing is decoded
    assert_passes(data, resize=30_000)
    # On the line it may be decoded, or if it is allowed, and turns out to be no image.
    refused(SampleError, "cannot be decoded", shaped, bomb(1 << 17, 1 << 10), resize=10)
    many = bomb(1 << 14, (1 << 13) + 1, depth=1)  # 17 MB decoded, of which most are missing
    refused(SampleError, "cannot be decoded", shaped, many, check="decode", max_pixels=1 << 28)
    long = encoded(photo(size=(2000, 1)), "PNG")
    refused(SampleError, "too many pixels", shaped, long, resize=10_000, upscale=True)


# --- damage ---------------------------------------------------------------------------------------
def without_middle(data: bytes) -> bytes:
    """A JPEG or WebP whose header and end are sound, and some pixels are gone."""
    middle = len(data) // 2
    return data[:middle] + data[middle + 300 :]


def with_flipped_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def test_decoding_finds_damage_that_headers_do_not_tell():
    for data in (
        without_middle(PLAIN["jpeg"]),
        without_middle(encoded(photo(), "JPEG", progressive=True, quality=95)),
        with_flipped_bit(PLAIN["png"]),
    ):
        assert_passes(data, resize=80)
        for options in ({"resize": 80, "check": "decode"}, {"check": "decode"}, {"resize": 40}):
            error = refused(SampleError, "cannot be decoded", shaped, data, **options)
            assert error.where == {"key": "a", "field": "image"}
            assert error.found


@pytest.mark.parametrize("kind", PLAIN)
def test_an_image_that_is_cut_is_an_error_in_every_step(kind):
    data = PLAIN[kind].partition(b"a web server")[0]
    for options in ({"resize": 40}, {"resize": 80, "check": "decode"}, {"format": "raw"}):
        for part in (data[: len(data) // 2], data[:20], b""):
            with pytest.raises(SampleError, match=r"not an image|is truncated|cannot be decoded"):
                shaped(part, **options)


@pytest.mark.parametrize("progressive", [False, True])
def test_no_image_is_made_of_what_decoding_calls_damaged(progressive):
    """Unless the damage is to nothing that is seen."""
    data = encoded(photo(size=(160, 120)), "JPEG", quality=85, progressive=progressive)
    whole = made(data, resize=100, format="raw")
    first, behind = 8 * (data.index(b"\xff\xda") + 20), 8 * (len(data) - 2)
    sound, ruined = 0, []
    for bit in range(first, behind, (behind - first) // 150 | 1):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(SampleError):
            shaped(bytes(damaged), check="decode")
            continue
        sound += 1
        with contextlib.suppress(SampleError):
            found = made(bytes(damaged), resize=100, format="raw")
            ruined += [bit] if psnr(found, whole) < 30 else []
    assert sound
    assert ruined == []


# --- always the same ------------------------------------------------------------------------------
def test_threads_make_the_same_bytes():
    steps = steps_of({"image": Image()}, resize=40, resize_mode="pad")
    images = [*PLAIN.values(), *(data for data, *_ in ODD.values())]
    samples = [{"__key__": str(n), "image": data} for n, data in enumerate(images)]
    before = [bytes(data) for data in images]
    expected = [steps(sample).sample for sample in samples]
    with ThreadPoolExecutor(8) as threads:
        assert [found.sample for found in threads.map(steps, samples)] == expected
    assert [sample["image"] for sample in samples] == before
