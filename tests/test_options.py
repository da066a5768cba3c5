"""The options of images: what makes no sense is refused when they are made, by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from shardkit.errors import UsageError
from shardkit.options import (
    CHROMA,
    IMAGE_DEFAULTS,
    IMAGE_FORMATS,
    RESIZE_MODES,
    ConvertOptions,
    ImageOptions,
)
from shardkit.recipe import Recipe


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("resize", bad) for bad in (0, -1, 1.5, "256", [256])],
        *[("quality", bad) for bad in (0, 101, 89.5, "90")],
        *[("min_size", bad) for bad in (0, -5, 2.0, "8")],
        *[("max_pixels", bad) for bad in (0, -5, 1e6, "1")],
        *[("max_aspect", bad) for bad in (0, 0.99, -2, float("nan"), "3", 1j)],
        *[("format", bad) for bad in ("jpg", "gif", "JPEG", None, "")],
        *[("chroma", bad) for bad in ("440", "4:2:0", 420, "")],
        *[("icc", bad) for bad in ("rgb", True, "")],
        *[("check", bad) for bad in ("all", None, True)],
        *[("resize_mode", bad) for bad in ("middle", "SHORTER", None, "")],
        *[("background", bad) for bad in ("whitest", "#ggg", "#12345", "rgb(1,2)", "", "x" * 1000)],
        *[("background", bad) for bad in (0, (1, 2, 3), b"white")],
    ],
)
def test_a_bad_value_is_refused_by_name(name, bad):
    with pytest.raises(UsageError) as caught:
        ImageOptions(**{"resize": 8, name: bad})  # type: ignore[arg-type]
    assert caught.value.what.startswith(name)
    assert caught.value.found == (str(bad) if bad == 101 else repr(bad))


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"upscale": True}, "resize"),
        ({"resize_mode": "crop"}, "resize"),
        ({"format": "raw", "icc": "keep"}, "icc"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, fix):
    with pytest.raises(UsageError) as caught:
        ImageOptions(**options)
    assert fix in str(caught.value.fix)


@pytest.mark.parametrize(
    "good",
    [
        *[{"resize": side} for side in (1, 256, 10**6)],
        *[{"resize": 8, "resize_mode": mode, "upscale": True} for mode in RESIZE_MODES],
        *[{"format": format, "icc": "srgb"} for format in IMAGE_FORMATS],
        *[{"quality": quality} for quality in (1, 100)],
        *[{"chroma": chroma} for chroma in CHROMA],
        *[{"max_aspect": aspect} for aspect in (1, 1.5, 20)],
        {"format": "png", "icc": "keep"},
        {"min_size": 1, "max_pixels": 1, "check": "decode"},
    ],
)
def test_good_values_are_kept(good):
    options = ImageOptions(**good)
    assert {name: getattr(options, name) for name in good} == good


@pytest.mark.parametrize(
    ("colour", "stored"),
    [
        ("white", "#ffffff"),
        ("White", "#ffffff"),
        ("#fff", "#ffffff"),
        ("#FFF", "#ffffff"),
        ("#808080", "#808080"),
        ("#12aBcD", "#12abcd"),
        ("rgb(1,2,3)", "#010203"),
        ("rgb(1, 2, 3)", "#010203"),
        ("rgb(100%,0%,50%)", "#ff0080"),
        ("hsl(120, 100%, 50%)", "#00ff00"),
        ("cornflowerblue", "#6495ed"),  # CSS Color 4, 6.1
    ],
)
def test_colours_are_stored_alike(colour, stored):
    options = ImageOptions(background=colour)
    assert options.background == stored
    assert options == ImageOptions(background=stored)


# Of each option a value that was asked for; filters look at images, and change none.
PIXELS: dict[str, dict[str, Any]] = {
    "resize": {"resize": 256},
    "resize_mode": {"resize": 256, "resize_mode": "crop"},
    "upscale": {"resize": 256, "upscale": True},
    "format": {"format": "jpeg"},
    "quality": {"quality": 90},
    "chroma": {"chroma": "420"},
    "background": {"background": "white"},
    "icc": {"icc": "srgb"},
}
FILTERS = {"min_size": 1, "max_aspect": 1.0, "max_pixels": 1, "check": "decode"}
OTHERS = {"masks": "none", "boxes": "none"}


@pytest.mark.parametrize("name", [field.name for field in fields(ImageOptions)])
def test_pixels_may_change_by_what_was_asked_for_and_not_by_filters(name):
    options = ImageOptions(**PIXELS.get(name) or {name: {**FILTERS, **OTHERS}[name]})
    assert options.pixels == (name in PIXELS)
    assert options.active


def test_nothing_is_active_unless_it_was_asked_for():
    options = ImageOptions()
    assert not options.pixels
    assert not options.active
    assert ConvertOptions().image == options
    # Even the defaults, where they are asked for: images that have not got them are re-encoded.
    assert all(ImageOptions(**{name: value}).active for name, value in IMAGE_DEFAULTS.items())
    assert ImageOptions(**IMAGE_DEFAULTS).pixels


def test_the_options_of_images_are_an_object_that_does_not_change():
    with pytest.raises(FrozenInstanceError):
        ImageOptions().resize = 8  # type: ignore[misc]
    with pytest.raises(UsageError, match="image must be"):
        ConvertOptions(image={"resize": 8})  # type: ignore[arg-type]


def test_what_is_done_to_images_shapes_the_output():
    plain = Recipe.of("wds", ConvertOptions()).to_json()
    assert plain["image"] is None
    shaped = [
        Recipe.of("wds", ConvertOptions(image=image)).to_json()
        for image in (ImageOptions(), ImageOptions(resize=8), ImageOptions(background="#fff"))
    ]
    assert shaped[0] == plain
    assert shaped[1]["image"]["resize"] == 8
    assert shaped[2]["image"]["background"] == "#ffffff"
    assert shaped[1] != shaped[2] != plain
