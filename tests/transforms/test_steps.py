"""The transforms of images, one by one: their options, and torchvision's definitions of them."""

from __future__ import annotations

import math
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit import transforms
from shardkit.codecs.window import Window
from shardkit.errors import UsageError
from shardkit.transforms import (
    CenterCrop,
    Decode,
    Draws,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from shardkit.transforms.steps import to_bfloat16

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SIDES = st.integers(1, 700)


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Decode(), "Decode()"),
        (RandomResizedCrop(224), "RandomResizedCrop(224)"),
        (
            RandomResizedCrop((8, 9), scale=(0.3, 1), ratio=[1, 1]),
            "RandomResizedCrop((8, 9), scale=(0.3, 1.0), ratio=(1.0, 1.0))",
        ),
        (CenterCrop([4, 5]), "CenterCrop((4, 5))"),
        (Resize(np.int64(256)), "Resize(256)"),
        (RandomHorizontalFlip(), "RandomHorizontalFlip()"),
        (RandomHorizontalFlip(0.25), "RandomHorizontalFlip(p=0.25)"),
        (
            Normalize(np.zeros(3), [1, 2, 3], "float16"),
            "Normalize((0.0, 0.0, 0.0), (1.0, 2.0, 3.0), dtype='float16')",
        ),
    ],
)
def test_they_print_as_they_are_made(made, text):
    assert repr(made) == text
    again = eval(text, vars(transforms))
    assert again == made == pickle.loads(pickle.dumps(made))
    assert hash(again) == hash(made)


@pytest.mark.parametrize("kind", [RandomResizedCrop, CenterCrop, Resize])
@pytest.mark.parametrize(
    "size", [0, -1, 1.5, True, "224", None, (1,), (1, 2, 3), (0, 4), (4, 1.5), 1 << 16, math.inf]
)
def test_a_size_is_one_or_two_whole_numbers(kind, size):
    with pytest.raises(UsageError, match="size must be") as error:
        kind(size)
    assert error.value.found == repr(size)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomResizedCrop(8, scale=(1, 0.5)), "scale must be two numbers"),
        (lambda: RandomResizedCrop(8, scale=0.5), "scale must be two numbers"),
        (lambda: RandomResizedCrop(8, scale=(0, 0)), "scale must be two numbers"),
        (lambda: RandomResizedCrop(8, ratio=(0, 1)), "ratio must be two numbers"),
        (lambda: RandomResizedCrop(8, ratio=(1, math.nan)), "ratio must be two numbers"),
        (lambda: RandomHorizontalFlip(1.1), "p must be a probability"),
        (lambda: RandomHorizontalFlip("a"), "p must be a probability"),
        (lambda: Normalize(0.5, (1, 1, 1)), "mean must be three numbers"),
        (lambda: Normalize((0, 0, 0), (1, 1)), "std must be three numbers"),
        (lambda: Normalize((0, 0, 0), (1, 0, 1)), "std must be above 0"),
        (lambda: Normalize((0, 0, 0), (1, 1, 1), "int8"), "dtype must be one of"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


# --- where pixels go -----------------------------------------------------------------------------


def placed(step, width, height, *drawn):
    window = Window.whole(width, height)
    step.apply(window, drawn)
    return window


def theirs(width, height, scale, ratio, uniform):
    """x, y, width, height by torchvision's definition, from a generator of its own."""
    for _ in range(10):
        area = height * width * uniform(*scale)
        aspect = math.exp(uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            y = int(uniform(0, height - h + 1))
            x = int(uniform(0, width - w + 1))
            return x, y, w, h
    if width / height < min(ratio):
        w, h = width, round(width / min(ratio))
    elif width / height > max(ratio):
        w, h = round(height * max(ratio)), height
    else:
        w, h = width, height
    return (width - w) // 2, (height - h) // 2, w, h


def distance(one, other):
    """Of Kolmogorov and Smirnov, as a multiple of what equal distributions reach once in 1,000."""
    both = np.sort(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(v), both, side="right") / len(v) for v in (one, other)]
    usual = math.sqrt((len(one) + len(other)) / (len(one) * len(other)))
    return float(np.abs(shares[0] - shares[1]).max() / usual / 1.95)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((341, 256), {}),
        ((256, 341), {"scale": (0.3, 0.9)}),
        ((500, 90), {}),  # few tries fit
        ((64, 64), {"ratio": (0.2, 5)}),
        ((120, 100), {"scale": (0.9, 1.0), "ratio": (1, 3)}),
    ],
)
def test_crops_are_distributed_as_torchvisions_are(size, options):
    count = 10_000
    step = RandomResizedCrop(224, **options)
    draws = Draws(3, np.zeros(count, np.int64), np.arange(count))
    drawn = draws.uniform(0, step.numbers).tolist()
    windows = [placed(step, *size, *row) for row in drawn]
    ours = np.array([(p.x, p.y, p.width, p.height) for p in windows], np.float64)
    uniform = random.Random(5).uniform
    others = np.array(
        [theirs(*size, step.scale, step.ratio, uniform) for _ in range(count)], np.float64
    )
    for x, y, w, h in (ours.T,):
        assert x.min() >= 0
        assert y.min() >= 0
        assert (x + w).max() <= size[0]
        assert (y + h).max() <= size[1]
    measures = (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: np.log(b[:, 2] / b[:, 3]),
        lambda b: b[:, 0],
        lambda b: b[:, 1],
        lambda b: b[:, 0] / (size[0] - b[:, 2] + 1),
        lambda b: b[:, 1] / (size[1] - b[:, 3] + 1),
    )
    for measure in measures:
        assert distance(measure(ours), measure(others)) < 1
    centred = (others[:, 0] == (size[0] - others[:, 2]) // 2).mean()
    assert abs((ours[:, 0] == (size[0] - ours[:, 2]) // 2).mean() - centred) < 0.02


def test_crops_fill_the_size_asked_for():
    window = placed(RandomResizedCrop((20, 30)), 64, 48, *[0.5] * 22)
    assert (window.full_width, window.full_height) == (window.columns, window.rows) == (30, 20)


@given(SIDES, SIDES, st.floats(0.05, 20), st.floats(1, 20))
def test_where_no_try_fits_the_crop_is_torchvisions(width, height, least, factor):
    step = RandomResizedCrop(8, scale=(40, 50), ratio=(least, least * factor))
    window = placed(step, width, height, *[0.5] * 22)
    expected = theirs(width, height, step.scale, step.ratio, random.Random(0).uniform)
    found = (window.x, window.y, window.width, window.height)
    if min(expected[2:]) > 0:  # where torchvision leaves no pixel, we leave one
        assert found == expected
    assert min(found[2:]) > 0


@given(SIDES, SIDES, st.integers(1, 700))
def test_the_shorter_side_is_resized_as_torchvision_rounds(width, height, size):
    window = placed(Resize(size), width, height)
    short, long = (width, height) if width <= height else (height, width)
    sides = size, int(size * long / short)
    expected = sides if width <= height else sides[::-1]
    assert (window.full_width, window.full_height) == (window.columns, window.rows) == expected
    assert Resize(size).known((height, width)) == expected[::-1]


def test_both_sides_are_resized_as_told():
    window = placed(Resize((20, 30)), 64, 48)
    assert (window.columns, window.rows) == (30, 20)
    assert Resize((20, 30)).known(None) == (20, 30)
    assert Resize(20).known(None) is None


@given(SIDES, SIDES, SIDES, SIDES)
def test_the_middle_is_torchvisions(width, height, columns, rows):
    window = placed(CenterCrop((rows, columns)), width, height)
    left = (columns - width) // 2 if columns > width else 0  # padding, and then the crop
    top = (rows - height) // 2 if rows > height else 0
    x = round((max(width, columns) - columns) / 2.0)
    y = round((max(height, rows) - rows) / 2.0)
    assert (window.left, window.top, window.columns, window.rows) == (
        x - left,
        y - top,
        columns,
        rows,
    )


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_so_many_images_are_mirrored(p):
    draws = Draws(0, np.zeros(20_000, np.int64), np.arange(20_000)).uniform(0, 1).tolist()
    share = np.mean([placed(RandomHorizontalFlip(p), 4, 4, *row).flip for row in draws])
    assert share == pytest.approx(p, abs=0.015 * (0 < p < 1))


@given(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.booleans())
def test_flips_before_and_after_a_window_are_those_of_pixels(width, size, before, after):
    """Compared with what they do to a row of numbers, which has zeros beyond its edges."""
    row = np.arange(1, width + 1)[:: -1 if before else 1]
    first = placed(CenterCrop((1, size)), width, 1).left
    row = np.array([row[n] if 0 <= n < width else 0 for n in range(first, first + size)])
    row = row[:: -1 if after else 1]
    window = Window.whole(width, 1)
    RandomHorizontalFlip(float(before)).apply(window, [0])
    CenterCrop((1, size)).apply(window, [])
    RandomHorizontalFlip(float(after)).apply(window, [0])
    found = [
        n + 1 if 0 <= n < width else 0 for n in range(window.left, window.left + window.columns)
    ]
    np.testing.assert_array_equal(found[:: -1 if window.flip else 1], row)


# --- normalising ---------------------------------------------------------------------------------

EVERY = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(16, 16, 3)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", torch.float32), ("float16", torch.float16)]
)
def test_normalised_values_are_those_that_torch_computes(dtype, kind):
    step = Normalize(*IMAGENET, dtype)
    out = np.empty(EVERY.shape, step.stored)
    step(EVERY, out)
    mean, std = torch.tensor(IMAGENET, dtype=torch.float64)
    exact = (torch.from_numpy(EVERY) / torch.tensor(255, dtype=torch.float64) - mean) / std
    np.testing.assert_array_equal(out, exact.to(kind).numpy())


@given(st.integers(1, 40), st.integers(1, 40))
@example(700, 600)
@example(2, 1 << 18)
def test_images_of_any_size_are_normalised(height, width):
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    for dtype in ("float32", "bfloat16"):
        step = Normalize(*IMAGENET, dtype)
        every, out = (np.empty(p.shape, step.stored) for p in (EVERY, pixels))
        step(EVERY, every)
        step(pixels, out)
        np.testing.assert_array_equal(out, every.reshape(256, 3)[pixels, [0, 1, 2]])


def test_bfloat16_is_rounded_as_torch_rounds():
    step = Normalize(*IMAGENET, "bfloat16")
    out = np.empty(EVERY.shape, step.stored)
    step(EVERY, out)
    single = np.empty(EVERY.shape, np.float32)
    Normalize(*IMAGENET)(EVERY, single)
    expected = torch.from_numpy(single).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(out).view(torch.bfloat16), expected)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_every_number_becomes_the_nearest_bfloat16(values):
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    numbers = np.concatenate([np.array(values, np.float32), ties])
    found = torch.from_numpy(to_bfloat16(numbers)).view(torch.bfloat16)
    assert torch.equal(found, torch.from_numpy(numbers).to(torch.bfloat16))
