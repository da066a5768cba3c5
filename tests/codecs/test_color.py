"""Colour profiles become sRGB: as LittleCMS does it for Pillow's users, and as the maths says."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest
from PIL import ImageCms

from shardkit.codecs.color import ProfileError, cmyk, converted, to_srgb
from tests.codecs.sample_images import (
    ADOBE_GAMMA,
    ADOBE_RGB,
    SRGB,
    by_littlecms,
    cmyk_profile,
    grey_profile,
    photo_like,
    rgb_profile,
    srgb_of,
    to_xyz,
)

PHOTO = photo_like(1, 60, 40)
GREYS = np.arange(256, dtype=np.uint8)[None]


def own_profile(space: str) -> bytes:
    """One of those that LittleCMS makes."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "profile", [own_profile("sRGB"), rgb_profile(SRGB, None)], ids=["its own", "by hand"]
)
def test_srgb_needs_nothing(profile: bytes) -> None:
    assert to_srgb(profile, "RGB") is None


def test_grey_with_the_curve_of_srgb_needs_nothing() -> None:
    assert to_srgb(grey_profile(None), "GRAY") is None


@pytest.mark.parametrize(
    "profile",
    [rgb_profile(), rgb_profile(SRGB, 1.8), rgb_profile(ADOBE_RGB, 1.0)],
    ids=["Adobe RGB", "another curve", "linear"],
)
def test_rgb_is_what_littlecms_makes_of_it(profile: bytes) -> None:
    transform = to_srgb(profile, "RGB")
    expected = by_littlecms(PIL.Image.fromarray(PHOTO), profile)
    np.testing.assert_array_equal(converted(PHOTO, transform), expected)
    assert np.abs(expected.astype(int) - PHOTO).max() > 2


@pytest.mark.parametrize("gamma", [1.0, 1.8])
def test_grey_is_what_littlecms_makes_of_it(gamma: float) -> None:
    transform = to_srgb(grey_profile(gamma), "GRAY")
    # Without its short cuts, which are coarse in the darks.
    exact = ImageCms.Flags.NOOPTIMIZE
    expected = by_littlecms(PIL.Image.fromarray(GREYS), grey_profile(gamma), exact)
    np.testing.assert_array_equal(converted(GREYS, transform), expected)


def test_adobe_rgb_is_what_the_maths_says() -> None:
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    pixels = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    linear = (pixels / 255) ** ADOBE_GAMMA
    to_linear_srgb = np.linalg.inv(to_xyz(SRGB)) @ to_xyz(ADOBE_RGB)  # both have D65 for white
    expected = 255 * srgb_of(linear @ to_linear_srgb.T)
    made = converted(pixels, to_srgb(rgb_profile(), "RGB"))
    assert np.abs(made - expected).max() <= 2


@pytest.mark.parametrize("gamma", [1.5, 1.8, 2.2])
def test_a_gamma_is_what_the_maths_says(gamma: float) -> None:
    stored = round(gamma * 256) / 256  # of a profile
    expected = 255 * srgb_of((GREYS[0] / 255) ** stored)
    for pixels, profile, colour in [
        (GREYS, grey_profile(gamma), "GRAY"),
        (np.repeat(GREYS[:, :, None], 3, axis=2), rgb_profile(SRGB, gamma), "RGB"),
    ]:
        made = converted(pixels, to_srgb(profile, colour))
        assert made.shape == (1, 256, 3)
        assert np.abs(made - expected[:, None]).max() <= 2


def test_the_transform_of_a_profile_is_made_once() -> None:
    assert to_srgb(rgb_profile(), "RGB") is to_srgb(rgb_profile(), "RGB")


@pytest.mark.parametrize("colour", ["RGB", "GRAY", "CMYK"])
@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no profile", id="text"),
        pytest.param(bytes(5000), id="zeros"),
        pytest.param(own_profile("LAB"), id="of Lab"),
        pytest.param(own_profile("XYZ"), id="of XYZ"),
        pytest.param(rgb_profile()[:60], id="header cut"),
        pytest.param(rgb_profile()[:-60], id="curves cut"),
        pytest.param(rgb_profile().replace(b"rXYZ", b"????"), id="without red"),
        pytest.param(grey_profile(1.0)[:-12], id="grey cut"),
        pytest.param(cmyk_profile()[:-800], id="CMYK cut"),
    ],
)
def test_what_is_no_profile_is_refused(profile: bytes, colour: str) -> None:
    with pytest.raises(ProfileError):
        to_srgb(profile, colour)


@pytest.mark.parametrize(
    ("profile", "colour"),
    [
        pytest.param(rgb_profile(), "GRAY", id="RGB on GRAY"),
        pytest.param(rgb_profile(), "CMYK", id="RGB on CMYK"),
        pytest.param(own_profile("sRGB"), "GRAY", id="sRGB on GRAY"),
        pytest.param(grey_profile(1.0), "RGB", id="GRAY on RGB"),
        pytest.param(grey_profile(1.0), "CMYK", id="GRAY on CMYK"),
        pytest.param(cmyk_profile(), "RGB", id="CMYK on RGB"),
    ],
)
def test_a_profile_of_other_colours_is_refused(profile: bytes, colour: str) -> None:
    with pytest.raises(ProfileError, match=f"on {colour} pixels"):
        to_srgb(profile, colour)


def test_no_damage_of_a_profile_gives_another_error() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        profile = bytearray(rgb_profile())
        for at in random.integers(0, len(profile), 3):
            profile[at] = random.integers(256)
        try:
            transform = to_srgb(bytes(profile), "RGB")
        except ProfileError:
            continue
        assert transform is None or converted(PHOTO, transform).shape == PHOTO.shape


def test_cmyk_is_what_littlecms_makes_of_it() -> None:
    image = PIL.Image.fromarray(PHOTO).convert("CMYK")
    made = converted(np.asarray(image), to_srgb(cmyk_profile(), "CMYK"))
    np.testing.assert_array_equal(made, by_littlecms(image, cmyk_profile()))
    assert np.abs(made.astype(int) - np.asarray(image.convert("RGB"))).max() > 20


def test_cmyk_pixels_are_pillows() -> None:
    image = PIL.Image.fromarray(PHOTO).convert("CMYK")
    np.testing.assert_array_equal(np.asarray(cmyk(np.asarray(image))), np.asarray(image))
