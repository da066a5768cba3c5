"""Colour profiles become sRGB: as LittleCMS does it for Pillow's users, and as the maths says."""

import random

import numpy as np
import PIL.Image
import pytest
from PIL import ImageCms

from shardkit.codecs.color import ProfileError, cmyk, converted, to_srgb
from tests.codecs.sample_images import damaged, photo_like
from tests.codecs.sample_profiles import (
    ADOBE_GAMMA,
    ADOBE_RGB,
    SRGB,
    by_littlecms,
    cmyk_profile,
    grey_profile,
    rgb_profile,
    srgb_of,
    to_xyz,
)

PHOTO = photo_like(1, 60, 40)
GREYS = np.arange(256, dtype=np.uint8)[None]


def own_profile(space):
    """One of those that LittleCMS makes."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()


def test_srgb_needs_nothing_and_other_transforms_are_made_once():
    for profile in (own_profile("sRGB"), rgb_profile(SRGB, None)):
        assert to_srgb(profile, "RGB") is None
    assert to_srgb(grey_profile(None), "GRAY") is None
    assert to_srgb(rgb_profile(), "RGB") is to_srgb(rgb_profile(), "RGB")


@pytest.mark.parametrize("curve", [(ADOBE_RGB, ADOBE_GAMMA), (SRGB, 1.8), (ADOBE_RGB, 1.0)])
def test_rgb_is_what_littlecms_makes_of_it(curve):
    profile = rgb_profile(*curve)
    expected = by_littlecms(PIL.Image.fromarray(PHOTO), profile)
    np.testing.assert_array_equal(converted(PHOTO, to_srgb(profile, "RGB")), expected)
    assert np.abs(expected.astype(int) - PHOTO).max() > 2


def test_grey_and_ink_are_what_littlecms_makes_of_them():
    for gamma in (1.0, 1.8):
        profile, exact = grey_profile(gamma), ImageCms.Flags.NOOPTIMIZE
        # Without its short cuts, which are coarse in the darks.
        expected = by_littlecms(PIL.Image.fromarray(GREYS), profile, exact)
        np.testing.assert_array_equal(converted(GREYS, to_srgb(profile, "GRAY")), expected)
    image = PIL.Image.fromarray(PHOTO).convert("CMYK")
    made = converted(np.asarray(image), to_srgb(cmyk_profile(), "CMYK"))
    np.testing.assert_array_equal(made, by_littlecms(image, cmyk_profile()))
    assert np.abs(made.astype(int) - np.asarray(image.convert("RGB"))).max() > 20
    np.testing.assert_array_equal(np.asarray(cmyk(np.asarray(image))), np.asarray(image))


BROKEN = {
    "empty": b"",
    "text": b"no profile",
    "zeros": bytes(5000),
    "of Lab": own_profile("LAB"),
    "of XYZ": own_profile("XYZ"),
    "header cut": rgb_profile()[:60],
    "curves cut": rgb_profile()[:-60],
    "without red": rgb_profile().replace(b"rXYZ", b"????"),
    "grey cut": grey_profile(1.0)[:-12],
    "CMYK cut": cmyk_profile()[:-800],
}


def test_adobe_rgb_is_what_the_maths_says():
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    pixels = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    linear = (pixels / 255) ** ADOBE_GAMMA
    to_linear_srgb = np.linalg.inv(to_xyz(SRGB)) @ to_xyz(ADOBE_RGB)  # both have D65 for white
    expected = 255 * srgb_of(linear @ to_linear_srgb.T)
    made = converted(pixels, to_srgb(rgb_profile(), "RGB"))
    assert np.abs(made - expected).max() <= 2


@pytest.mark.parametrize("gamma", [1.5, 1.8, 2.2])
def test_a_gamma_is_what_the_maths_says(gamma):
    stored = round(gamma * 256) / 256  # of a profile
    expected = 255 * srgb_of((GREYS[0] / 255) ** stored)
    for pixels, profile, colour in [
        (GREYS, grey_profile(gamma), "GRAY"),
        (np.repeat(GREYS[:, :, None], 3, axis=2), rgb_profile(SRGB, gamma), "RGB"),
    ]:
        made = converted(pixels, to_srgb(profile, colour))
        assert made.shape == (1, 256, 3)
        assert np.abs(made - expected[:, None]).max() <= 2


def test_what_is_no_profile_or_one_of_other_colours_is_refused():
    for profile in BROKEN.values():
        for colour in ("RGB", "GRAY", "CMYK"):
            with pytest.raises(ProfileError):
                to_srgb(profile, colour)
    rgb, grey = (rgb_profile(), own_profile("sRGB")), (grey_profile(1.0),)
    others = {"GRAY": rgb, "CMYK": (*rgb, *grey), "RGB": (*grey, cmyk_profile())}
    for colour, profiles in others.items():
        for profile in profiles:
            with pytest.raises(ProfileError, match=f"on {colour} pixels"):
                to_srgb(profile, colour)


def test_no_damage_of_a_profile_gives_another_error():
    draw = random.Random(0)
    for _ in range(100):
        profile = damaged(rgb_profile(), draw, 400)
        try:
            transform = to_srgb(profile, "RGB")
        except ProfileError:
            continue
        assert transform is None or converted(PHOTO, transform).shape == PHOTO.shape
