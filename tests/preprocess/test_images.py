"""What the steps make of single images: what passes, what is re-encoded, and why; by Pillow."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from PIL import ImageCms
from PIL.Image import Resampling
from PIL.JpegImagePlugin import get_sampling

from shardkit.errors import SampleError, UsageError
from shardkit.options import ImageOptions
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.images import ImageSteps, Shaped
from shardkit.preprocess.steps import steps_for
from shardkit.schema import Image, Int, Schema

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]


def photo(mode: str = "RGB", size: tuple[int, int] = (120, 80), seed: int = 0) -> PIL.Image.Image:
    """Soft colours with some grain: a resize that is off by a pixel is off by many levels."""
    dice = np.random.default_rng(seed)
    coarse = PIL.Image.fromarray(dice.integers(0, 256, (9, 12, 3), np.uint8))
    soft = np.asarray(coarse.resize(size, Resampling.BICUBIC), np.int16)
    grain = dice.integers(-9, 10, soft.shape, np.int16)
    return PIL.Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: PIL.Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def opened(data: bytes) -> PIL.Image.Image:
    """An image, loaded; its format and what else its file says stay with it."""
    with PIL.Image.open(io.BytesIO(data)) as image:
        image.load()
        return image


def exif(orientation: int) -> PIL.Image.Exif:
    made = PIL.Image.Exif()
    made[0x010F] = "a camera"
    made[0x0112] = orientation
    return made


def steps_of(
    schema: dict[str, Any], source: Any = None, raw: str = "array", **options: Any
) -> ImageSteps:
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
    "jpeg": encoded(photo(), "JPEG"),
    "progressive jpeg": encoded(photo(), "JPEG", progressive=True),
    "jpeg of full colour": encoded(photo(), "JPEG", subsampling=0, quality=100),
    "grey jpeg": encoded(photo("L"), "JPEG"),
    "jpeg with sRGB": encoded(photo(), "JPEG", icc_profile=SRGB),
    "jpeg that says it is upright": encoded(photo(), "JPEG", exif=exif(1)),
    "jpeg with something behind it": encoded(photo(), "JPEG") + b"\0\0a web server was here",
    "png": encoded(photo(), "PNG"),
    "png with something behind it": encoded(photo(), "PNG") + b"\r\n",
    "grey png": encoded(photo("L"), "PNG"),
    "black and white png": encoded(photo("1"), "PNG"),
    "palette png": encoded(photo("P"), "PNG"),
    "png with sRGB": encoded(photo(), "PNG", icc_profile=SRGB),
    "webp": encoded(photo(), "WEBP"),
    "lossless webp": encoded(photo(), "WEBP", lossless=True),
    "webp with sRGB": encoded(photo(), "WEBP", icc_profile=SRGB),
    "gif": encoded(photo(), "GIF"),
    "bmp": encoded(photo(), "BMP"),
    "tiff": encoded(photo(), "TIFF"),
    "ppm": encoded(photo(), "PPM"),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_image_of_the_right_size_passes_byte_for_byte(kind: str) -> None:
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


def test_without_a_pixel_step_even_odd_images_pass() -> None:
    for data in (encoded(photo(), "JPEG", exif=exif(6)), encoded(photo("RGBA"), "PNG")):
        assert_passes(data, min_size=10)
        assert_passes(data, check="decode")


def test_a_dataset_without_images_has_no_use_for_their_options() -> None:
    with pytest.raises(UsageError, match="no images"):
        steps_for(Schema({"label": Int()}), ImageOptions(resize=3), None, "array")
    assert steps_for(Schema({"label": Int()}), ImageOptions(), None, "array") is None
    assert steps_for(Schema({"image": Image()}), ImageOptions(), None, "array") is None


def test_every_image_of_a_sample_is_shaped_and_an_absent_one_is_not() -> None:
    steps = steps_of({"left": Image(), "right": Image(optional=True), "label": Int()}, resize=20)
    data = PLAIN["png"]
    both = steps({"__key__": "a", "left": data, "right": data, "label": 3})
    size = len(both.sample["left"])
    assert both.images == {"resized": 2, "bytes in": 2 * len(data), "bytes out": 2 * size}
    assert both.sample["left"] == both.sample["right"] != data
    one = steps({"__key__": "a", "left": data, "label": 3})
    assert one.sample == {"__key__": "a", "left": both.sample["left"], "label": 3}


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
    return (
        struct.pack(">I", len(content)) + name + content
        + struct.pack(">I", zlib.crc32(name + content))
    )  # fmt: skip


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def deep(suffix: str) -> bytes:
    """16 bits a channel, of which the low ones are noise."""
    noise = np.random.default_rng(2).integers(0, 256, (80, 120, 3), np.uint16)
    pixels = (np.asarray(photo(), np.uint16) << 8) + noise
    height, width, _ = pixels.shape
    if suffix == ".ppm":
        return b"P6 %d %d 65535\n" % (width, height) + pixels.astype(">u2").tobytes()
    if suffix == ".png":
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


Make = Callable[[], Any]
UNREADABLE = "with an unreadable colour profile, taken as sRGB"
FIRST = "animated"  # and more words, that only the first frame stays
ODD: dict[str, tuple[Make, str, Make, str]] = {  # file, reason, what is seen, codec
    "rotated jpeg": (
        lambda: encoded(photo(), "JPEG", exif=exif(6), quality=98, subsampling=0), "rotated",
        lambda: photo().transpose(PIL.Image.Transpose.ROTATE_270), "JPEG",
    ),
    "rotated png": (
        lambda: encoded(photo(), "PNG", exif=exif(3)), "rotated", lambda: photo().rotate(180), "PNG"
    ),
    "rotated webp": (
        lambda: encoded(photo(), "WEBP", lossless=True, exif=exif(2)), "rotated",
        lambda: PIL.ImageOps.mirror(photo()), "WEBP",
    ),
    "rotated tiff": (
        lambda: encoded(photo(), "TIFF", exif=exif(4)), "rotated",
        lambda: PIL.ImageOps.flip(photo()), "PNG",
    ),
    "transparent png": (
        lambda: encoded(see_through(), "PNG"), "transparent",
        lambda: over_white(see_through()), "PNG",
    ),
    "transparent grey png": (
        lambda: encoded(see_through("LA"), "PNG"), "transparent",
        lambda: over_white(see_through("LA")), "PNG",
    ),
    "palette png with a hole": (
        lambda: encoded(palette_with_a_hole(), "PNG"), "transparent",
        lambda: over_white(palette_with_a_hole()), "PNG",
    ),
    "transparent webp": (
        lambda: encoded(see_through(), "WEBP", lossless=True), "transparent",
        lambda: over_white(see_through()), "WEBP",
    ),
    "transparent lossy webp": (
        lambda: encoded(see_through(), "WEBP", quality=95), "transparent",
        lambda: over_white(see_through()), "WEBP",
    ),
    "16-bit png": (lambda: deep(".png"), "16-bit", photo, "PNG"),
    "16-bit grey png": (lambda: deep_grey("PNG"), "16-bit", lambda: photo("L"), "PNG"),
    "16-bit grey tiff": (lambda: deep_grey("TIFF"), "16-bit", lambda: photo("L"), "PNG"),
    "16-bit ppm": (lambda: deep(".ppm"), "16-bit", photo, "PPM"),
    "16-bit tiff": (lambda: deep(".tiff"), "16-bit", photo, "PNG"),
    "animated gif": (
        lambda: frames("GIF"), FIRST, lambda: opened(encoded(photo(), "GIF")), "PNG"
    ),
    "animated png": (lambda: frames("PNG"), FIRST, photo, "PNG"),
    "animated lossy webp": (
        lambda: frames("WEBP", quality=95), FIRST,
        lambda: opened(encoded(photo(), "WEBP", quality=95)), "WEBP",
    ),
    "animated webp": (lambda: frames("WEBP", lossless=True), FIRST, photo, "WEBP"),
    "cmyk jpeg": (
        lambda: encoded(photo("CMYK"), "JPEG", quality=98), "cmyk",
        lambda: opened(encoded(photo("CMYK"), "JPEG", quality=98)), "JPEG",
    ),
    "jpeg with a profile": (
        lambda: encoded(photo(), "JPEG", icc_profile=SWAPPED, quality=98, subsampling=0),
        "with a colour profile", lambda: swapped(photo()), "JPEG",
    ),
    "png with a profile": (
        lambda: encoded(photo(), "PNG", icc_profile=SWAPPED), "with a colour profile",
        lambda: swapped(photo()), "PNG",
    ),
    "webp with a profile": (
        lambda: encoded(photo(), "WEBP", icc_profile=SWAPPED, lossless=True),
        "with a colour profile", lambda: swapped(photo()), "WEBP",
    ),
    "tiff with a profile": (
        lambda: encoded(photo(), "TIFF", icc_profile=SWAPPED), "with a colour profile",
        lambda: swapped(photo()), "PNG",
    ),
    "png with a damaged profile": (
        lambda: encoded(photo(), "PNG", icc_profile=SWAPPED[:200]), UNREADABLE, photo, "PNG"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_an_image_that_is_not_plain_is_made_anew_and_says_why(kind: str) -> None:
    make, reason, seen, codec = ODD[kind]
    found = shaped(make(), icc="srgb", chroma="444", quality=100)
    ((said, count),) = found.reasons.items()
    assert (said, count) == (reason, 1) or (reason == FIRST and "first frame" in said)
    assert said.startswith(reason)
    assert found.images["encoded"] == 1
    result = opened(found.sample["image"])
    assert (result.format, result.mode) == (codec, "RGB")
    assert getattr(result, "n_frames", 1) == 1
    assert not result.getexif()
    assert not result.info.get("icc_profile")
    # Without loss but for the codec, and the rounding of profiles.
    assert psnr(result, seen().convert("RGB")) > (32 if "jpeg" in kind or "lossy" in kind else 45)
    again = shaped(found.sample["image"], icc="srgb")
    assert again.images["passed"] == 1


def test_reasons_add_up_and_resizing_is_counted_apart() -> None:
    data = encoded(see_through(), "PNG", exif=exif(8), icc_profile=SWAPPED)
    found = shaped(data, resize=30, format="jpeg")
    assert found.reasons == {
        "transparent": 1, "rotated": 1, "png to jpeg": 1, "with a colour profile": 1
    }  # fmt: skip
    assert {n: c for n, c in found.images.items() if "bytes" not in n} == {"resized": 1}
    assert shaped(PLAIN["jpeg"], resize=30).reasons == {}


# --- orientation and resizing ---------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_all_orientations_are_applied_as_pillow_does_it(format: str, orientation: int) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    # A JPEG 17 times as large as the result is decoded at a part of its size.
    data = encoded(
        photo(size=(596, 409) if format == "JPEG" else (121, 83)),
        format,
        exif=exif(orientation),
        **options,
    )
    width, height = (35, 24) if orientation < 5 else (24, 35)
    upright = PIL.ImageOps.exif_transpose(opened(data))
    by_pillow = upright.resize((width, height), Resampling.BILINEAR)
    for way in ("raw", "png", "jpeg"):
        found = made(data, resize=24, format=way, quality=100, chroma="444")
        assert pixels_of(found).shape == (height, width, 3)
        assert psnr(pixels_of(found), by_pillow) > 40
        if way != "raw":
            assert not opened(found).getexif()
            assert b"Exif" not in found


def test_an_orientation_behind_the_pixels_of_a_png_counts_too() -> None:
    """Where some editors put it, and the PNG specification allows it."""
    data = PLAIN["png"]
    data = data[:-12] + chunk(b"eXIf", exif(6).tobytes().removeprefix(b"Exif\0\0")) + data[-12:]
    expected = PIL.ImageOps.exif_transpose(opened(data))
    assert expected.size == (80, 120)
    np.testing.assert_array_equal(made(data, format="raw"), expected)


def test_the_bound_on_resizing_tells_a_shift_of_half_a_pixel() -> None:
    image = photo(size=(596, 409))
    right = image.resize((35, 24), Resampling.BILINEAR)
    wrong = image.resize((35, 24), Resampling.BILINEAR, box=(8.5, 0, 596, 409))
    assert psnr(right, wrong) < 36


@pytest.mark.parametrize(
    ("mode", "upscale", "size", "expected"),
    [
        ("shorter", False, (120, 80), (60, 40)),
        ("shorter", False, (30, 20), (30, 20)),
        ("shorter", True, (30, 20), (60, 40)),
        ("longer", False, (120, 80), (40, 27)),
        ("exact", False, (30, 80), (30, 40)),
        ("exact", True, (30, 80), (40, 40)),
        ("crop", False, (30, 80), (30, 40)),
        ("crop", True, (30, 80), (40, 40)),
        ("pad", False, (30, 20), (40, 40)),
        ("pad", True, (30, 20), (40, 40)),
    ],
)
def test_every_mode_gives_its_size(
    mode: str, upscale: bool, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    """More sizes are in tests/preprocess/test_geometry.py."""
    data = encoded(photo(size=size), "PNG")
    found = shaped(data, resize=40, resize_mode=mode, upscale=upscale)
    assert opened(found.sample["image"]).size == expected
    assert (found.sample["image"] == data) == (size == expected)
    assert ("resized" in found.images) == (size != expected)


@pytest.mark.parametrize("mode", ["shorter", "longer", "exact"])
def test_resized_pixels_are_pillows_in_every_mode(mode: str) -> None:
    """Larger, smaller, and where one side can grow while the other shrinks."""
    for size in (300, 200), (200, 301), (41, 43), (30, 20), (300, 12):
        image = photo(size=size)
        found = made(encoded(image, "PNG"), resize=40, resize_mode=mode, upscale=True)
        expected = image.resize(opened(found).size, Resampling.BILINEAR)
        assert psnr(pixels_of(found), expected) > 40


def test_a_crop_is_the_middle() -> None:
    for size, small in (((150, 90), (67, 40)), ((90, 150), (40, 67))):
        image = photo(size=size)
        left, top = (small[0] - 40) // 2, (small[1] - 40) // 2
        expected = image.resize(small, Resampling.BILINEAR).crop((left, top, left + 40, top + 40))
        found = made(encoded(image, "PNG"), resize=40, resize_mode="crop")
        assert psnr(pixels_of(found), expected) > 40


def test_a_crop_alone_leaves_the_pixels_that_stay_as_they_were() -> None:
    image = photo(size=(90, 40))
    found = made(encoded(image, "PNG"), resize=40, resize_mode="crop")
    np.testing.assert_array_equal(pixels_of(found), np.asarray(image)[:, 25:65])


@pytest.mark.parametrize(
    ("background", "colour"),
    [(None, (255, 255, 255)), ("#102030", (16, 32, 48)), ("teal", (0, 128, 128))],
)
@pytest.mark.parametrize("turned", [False, True])
def test_padding_has_the_background_in_its_margins(
    turned: bool, background: str | None, colour: tuple[int, int, int]
) -> None:
    image = photo(size=(60, 120) if turned else (120, 60))
    found = made(encoded(image, "PNG"), resize=40, resize_mode="pad", background=background)
    pixels = pixels_of(found)
    assert pixels.shape == (40, 40, 3)
    if turned:
        pixels, image = pixels.swapaxes(0, 1), image.transpose(PIL.Image.Transpose.TRANSPOSE)
    assert (pixels[:10] == colour).all()
    assert (pixels[30:] == colour).all()
    assert psnr(pixels[10:30], image.resize((40, 20), Resampling.BILINEAR)) > 40


def test_padding_puts_a_small_image_unchanged_in_the_middle() -> None:
    for size in (30, 20), (40, 20), (2, 2), (40, 38):
        image = photo(size=size)
        pixels = pixels_of(made(encoded(image, "PNG"), resize=40, resize_mode="pad"))
        expected = PIL.Image.new("RGB", (40, 40), "white")
        expected.paste(image, ((40 - size[0]) // 2, (40 - size[1]) // 2))
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("mode", "upscale", "side"),
    [("shorter", False, 1), ("pad", False, 5), ("longer", True, 5), ("exact", True, 5),
     ("crop", True, 5)],
)  # fmt: skip
def test_a_single_pixel_goes_through_everything(
    format: str, mode: str, upscale: bool, side: int
) -> None:
    data = encoded(PIL.Image.new("RGB", (1, 1), (200, 100, 50)), format)
    for way in ("keep", "webp", "raw", "png"):
        found = made(data, resize=5, resize_mode=mode, upscale=upscale, format=way)
        pixels = pixels_of(found)
        assert pixels.shape == (side, side, 3)
    assert np.abs(pixels[side // 2, side // 2] - np.array([200, 100, 50])).max() <= 4


def test_a_side_of_65500_pixels_is_resized_and_kept() -> None:
    data = encoded(photo(size=(131, 3)).resize((65500, 3), Resampling.NEAREST), "JPEG", quality=95)
    assert_passes(data, resize=3)
    found = made(data, resize=131, resize_mode="longer", format="raw")
    assert psnr(found, opened(data).resize((131, 1), Resampling.BILINEAR)) > 40
    assert opened(made(data, resize=100, resize_mode="exact")).size == (100, 3)
    assert opened(made(data, quality=10)).size == (65500, 3)  # as long as a JPEG can be


def test_an_image_that_its_codec_cannot_hold_is_a_clear_error() -> None:
    wide = encoded(PIL.Image.new("RGB", (65501, 1)), "PNG")
    for format, limit in (("jpeg", "65,500"), ("webp", "16,383")):
        with pytest.raises(SampleError, match="cannot be stored") as error:
            made(wide, format=format)
        assert error.value.where == {"key": "a", "field": "image"}
        assert limit in str(error.value.found)
        assert "--on-error skip" in str(error.value.fix)
    assert_passes(wide, format="png")


# --- codecs ---------------------------------------------------------------------------------------


def test_keep_keeps_the_codec_or_takes_one_without_loss() -> None:
    for format in FORMATS:
        found = opened(made(encoded(photo(), format), resize=40))
        assert found.format == ("PNG" if format in ("GIF", "BMP", "TIFF") else format)
        assert found.mode == "RGB"


def test_a_lossless_webp_stays_lossless_and_a_lossy_one_lossy() -> None:
    expected = made(encoded(photo(), "PNG"), resize=40)
    lossless = made(encoded(photo(), "WEBP", lossless=True), resize=40)
    np.testing.assert_array_equal(pixels_of(lossless), pixels_of(expected))
    assert b"VP8L" in lossless[:32]
    assert b"VP8 " in made(encoded(photo(), "WEBP"), resize=40)[:32]
    assert b"VP8 " in made(encoded(photo(), "PNG"), resize=40, format="webp")[:32]


@pytest.mark.parametrize("source", FORMATS)
def test_images_are_converted_to_the_codec_asked_for(source: str) -> None:
    data = encoded(photo(), source)
    for format in {"jpeg", "png", "webp"} - {source.lower()}:
        found = shaped(data, format=format)
        assert found.reasons == {f"{source.lower()} to {format}": 1}
        assert opened(found.sample["image"]).format == format.upper()
        bound = 27 if format != "png" else 60  # grain, at quality 90
        assert psnr(pixels_of(found.sample["image"]), opened(data).convert("RGB")) > bound


def test_quality_and_chroma_are_those_asked_for_or_the_defaults() -> None:
    def tables(data: bytes) -> Any:
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


def test_raw_images_are_pixels() -> None:
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


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": "4:4:4"}])
def test_a_finer_jpeg_is_recompressed(options: dict[str, Any]) -> None:
    data = jpeg(95, **options)
    found = shaped(data, quality=50)
    assert found.images == {
        "recompressed": 1, "bytes in": len(data), "bytes out": len(found.sample["image"])
    }  # fmt: skip
    assert found.reasons == {}
    assert found.images["bytes out"] < len(data) / 2
    result = opened(found.sample["image"])
    assert result.quantization == opened(jpeg(50)).quantization  # type: ignore[attr-defined]
    assert psnr(result, opened(data)) > 30


def test_a_jpeg_of_that_quality_or_a_coarser_one_passes() -> None:
    for quality in (1, 49, 50, 51, 90, 100):
        assert_passes(jpeg(quality), quality=quality)
        assert_passes(jpeg(max(quality // 2, 1)), quality=quality)


def test_a_jpeg_that_would_come_out_larger_keeps_its_bytes() -> None:
    flat = PIL.Image.new("RGB", (8, 8), (90, 90, 90))
    data = encoded(flat, "JPEG", quality=91, optimize=True)  # 8 pixels need no tables of 400 bytes
    found = shaped(data, quality=90)
    assert found.sample["image"] == data
    assert found.images == {"kept": 1, "bytes in": len(data), "bytes out": len(data)}
    assert found.reasons == {}
    # Larger pixels for a reason are another matter.
    turned = encoded(flat, "JPEG", quality=91, optimize=True, exif=exif(6))
    assert shaped(turned, quality=90).images["encoded"] == 1


def test_chroma_alone_recompresses_what_is_finer() -> None:
    for finer, asked in (("4:4:4", "420"), ("4:4:4", "422"), ("4:2:2", "420")):
        found = shaped(jpeg(90, finer), chroma=asked)
        assert found.images["recompressed"] == 1
        assert get_sampling(opened(found.sample["image"])) == {"422": 1, "420": 2}[asked]
    for coarser, asked in (("4:2:0", "444"), ("4:2:0", "420"), ("4:2:2", "422"), ("4:2:2", "444")):
        assert_passes(jpeg(90, coarser), chroma=asked)
    assert_passes(PLAIN["grey jpeg"], chroma="420")


def test_quality_is_nothing_to_images_without_loss() -> None:
    for kind in ("png", "lossless webp", "bmp", "gif", "ppm"):
        assert_passes(PLAIN[kind], quality=10, chroma="420")


def test_a_lossy_webp_is_recompressed_if_that_makes_it_smaller() -> None:
    data = encoded(photo(), "WEBP", quality=95)
    found = shaped(data, quality=10)
    assert found.images["recompressed"] == 1
    assert len(found.sample["image"]) < len(data) / 2
    small = found.sample["image"]
    again = shaped(small, quality=100)
    assert again.sample["image"] == small
    assert again.images["kept"] == 1


# --- colour profiles and transparency -------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "options"),
    [("JPEG", {"quality": 100, "subsampling": 0}), ("PNG", {}), ("WEBP", {"lossless": True})],
)
def test_a_profile_is_applied_or_kept(format: str, options: dict[str, Any]) -> None:
    data = encoded(photo(), format, icc_profile=SWAPPED, **options)
    small = photo().resize((60, 40), Resampling.BILINEAR)
    for icc, expected, profile in (
        (None, swapped(small), None),
        ("srgb", swapped(small), None),
        ("keep", small, SWAPPED),
    ):
        found = opened(made(data, resize=40, icc=icc, quality=100, chroma="444"))
        assert psnr(found, expected) > 38
        assert (found.info.get("icc_profile") or None) == profile
    assert_passes(data, icc="keep")


@pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
def test_a_profile_of_many_segments_is_kept_whole(format: str) -> None:
    profile = SWAPPED[:128] + np.random.default_rng(0).bytes(200_000)
    data = encoded(photo(), "JPEG", icc_profile=profile)
    found = made(data, resize=40, icc="keep", format=format)
    assert opened(found).info["icc_profile"] == profile
    assert opened(made(found, resize=20, icc="keep")).info["icc_profile"] == profile


def test_srgb_itself_is_not_stored_again() -> None:
    for kind in ("jpeg with sRGB", "png with sRGB", "webp with sRGB"):
        assert not opened(made(PLAIN[kind], resize=40)).info.get("icc_profile")
        assert opened(made(PLAIN[kind], resize=40, icc="keep")).info["icc_profile"] == SRGB


def test_transparent_pixels_show_the_background() -> None:
    for background in ("white", "#000000", "rgb(10, 200, 30)"):
        for image in (see_through(), see_through("LA"), palette_with_a_hole()):
            found = made(encoded(image, "PNG"), background=background)
            np.testing.assert_array_equal(pixels_of(found), over_white(image, background))


# --- filters --------------------------------------------------------------------------------------


def unwanted(data: bytes, **options: Any) -> dict[str, str]:
    with pytest.raises(Filtered) as found:
        shaped(data, **options)
    return found.value.to_json()


def test_filters_say_what_they_drop_and_keep_what_is_on_the_line() -> None:
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


def test_more_pixels_than_memory_has_room_for_are_an_error_unless_they_are_filtered() -> None:
    data = bomb(30_000, 30_000)
    for options in ({"resize": 10}, {"format": "raw"}, {"check": "decode"}, {"format": "jpeg"}):
        with pytest.raises(SampleError, match="too many pixels") as error:
            shaped(data, **options)
        assert error.value.where == {"key": "a", "field": "image"}
        assert "30,000 x 30,000" in str(error.value.found)
        assert "134,217,728" in str(error.value.expected)
        assert "--max-pixels" in str(error.value.fix)
        assert unwanted(data, max_pixels=10**8, **options)["found"] == "30000 x 30000"
    assert_passes(data, min_size=1)  # nothing is decoded
    assert_passes(data, resize=30_000)
    # On the line it may be decoded, and turns out to be no image.
    with pytest.raises(SampleError, match="cannot be decoded"):
        shaped(bomb(1 << 17, 1 << 10), resize=10)


def test_resizing_to_more_pixels_than_memory_has_room_for_is_an_error() -> None:
    with pytest.raises(SampleError, match="too many pixels"):
        shaped(encoded(photo(size=(2000, 1)), "PNG"), resize=10_000, upscale=True)


# --- damage ---------------------------------------------------------------------------------------


def without_middle(data: bytes) -> bytes:
    """A JPEG or WebP whose header and end are sound, and some pixels are gone."""
    middle = len(data) // 2
    return data[:middle] + data[middle + 300 :]


def with_flipped_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def test_decoding_finds_damage_that_headers_do_not_tell() -> None:
    for data in (
        without_middle(PLAIN["jpeg"]),
        without_middle(encoded(photo(), "JPEG", progressive=True, quality=95)),
        with_flipped_bit(PLAIN["png"]),
    ):
        assert_passes(data, resize=80)
        for options in ({"resize": 80, "check": "decode"}, {"check": "decode"}, {"resize": 40}):
            with pytest.raises(SampleError, match="cannot be decoded") as error:
                shaped(data, **options)
            assert error.value.where == {"key": "a", "field": "image"}
            assert error.value.found


@pytest.mark.parametrize("kind", PLAIN)
def test_an_image_that_is_cut_is_an_error_in_every_step(kind: str) -> None:
    data = PLAIN[kind].partition(b"a web server")[0]
    for options in ({"resize": 40}, {"resize": 80, "check": "decode"}, {"format": "raw"}):
        for part in (data[: len(data) // 2], data[:20], b""):
            with pytest.raises(SampleError, match=r"not an image|is truncated|cannot be decoded"):
                shaped(part, **options)


@pytest.mark.parametrize("progressive", [False, True])
def test_no_image_is_made_of_what_decoding_calls_damaged(progressive: bool) -> None:
    """Unless the damage is to nothing that is seen."""
    data = encoded(photo(size=(160, 120)), "JPEG", quality=85, progressive=progressive)
    whole = made(data, resize=100, format="raw")
    first, behind = 8 * (data.index(b"\xff\xda") + 20), 8 * (len(data) - 2)
    refused, ruined = 0, []
    for bit in range(first, behind, (behind - first) // 150 | 1):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(SampleError):
            shaped(bytes(damaged), check="decode")
            continue
        refused += 1
        with contextlib.suppress(SampleError):
            found = made(bytes(damaged), resize=100, format="raw")
            ruined += [bit] if psnr(found, whole) < 30 else []
    assert refused
    assert ruined == []


def test_an_image_of_many_pixels_that_is_allowed_is_decoded_by_the_check() -> None:
    data = bomb(1 << 14, (1 << 13) + 1, depth=1)  # 17 MB decoded, of which most are missing
    with pytest.raises(SampleError, match="cannot be decoded"):
        shaped(data, check="decode", max_pixels=1 << 28)


# --- always the same ------------------------------------------------------------------------------


def test_threads_make_the_same_bytes() -> None:
    steps = steps_of({"image": Image()}, resize=40, resize_mode="pad")
    images = [*PLAIN.values(), *(make() for make, *_ in ODD.values())]
    samples = [{"__key__": str(n), "image": data} for n, data in enumerate(images)]
    before = [bytes(data) for data in images]
    expected = [steps(sample).sample for sample in samples]
    with ThreadPoolExecutor(8) as threads:
        assert [found.sample for found in threads.map(steps, samples)] == expected
    assert [sample["image"] for sample in samples] == before
