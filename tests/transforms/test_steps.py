"""The transforms of images, one by one: their options, and torchvision's definitions of them."""

import dataclasses
import math
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit import CenterCrop, Decode, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from shardkit.codecs.crop import crop_many
from shardkit.codecs.window import Window
from shardkit.errors import UsageError
from shardkit.transforms import Draws, Transforms
from shardkit.transforms.steps import to_bfloat16
from tests.codecs.test_crop import needs_crop_many
from tests.sources.real import cases, refused
from tests.transforms.chunks import IMAGES

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SIDES = st.integers(1, 700)


@cases(
    "made text",
    (Decode(), "Decode()"),
    (RandomResizedCrop(224), "RandomResizedCrop(224)"),
    (RandomResizedCrop((8, 9), ratio=[1, 1]), "RandomResizedCrop((8, 9), ratio=(1.0, 1.0))"),
    (RandomResizedCrop(8, scale=(0.3, 1)), "RandomResizedCrop(8, scale=(0.3, 1.0))"),
    (CenterCrop([4, 5]), "CenterCrop((4, 5))"),
    (Resize(np.int64(256)), "Resize(256)"),
    (RandomHorizontalFlip(), "RandomHorizontalFlip()"),
    (RandomHorizontalFlip(0.25), "RandomHorizontalFlip(p=0.25)"),
    (
        Normalize(np.zeros(3), [1, 2, 3], "float16"),
        "Normalize((0.0, 0.0, 0.0), (1.0, 2.0, 3.0), dtype='float16')",
    ),
)
def test_they_print_as_they_are_made(made, text):
    assert repr(made) == text
    again = eval(text, globals())
    assert again == made == pickle.loads(pickle.dumps(made))
    assert hash(again) == hash(made)


@pytest.mark.parametrize("kind", [RandomResizedCrop, CenterCrop, Resize])
def test_a_size_is_one_or_two_whole_numbers(kind):
    numbers = [0, -1, 1.5, True, "224", None, 1 << 16, math.inf]
    for size in [*numbers, (1,), (1, 2, 3), (0, 4), (4, 1.5)]:
        assert refused(UsageError, "size must be", kind, size).found == repr(size)


@cases(
    "make words",
    (lambda: RandomResizedCrop(8, scale=(1, 0.5)), "scale must be two numbers"),
    (lambda: RandomResizedCrop(8, scale=0.5), "scale must be two numbers"),
    (lambda: RandomResizedCrop(8, scale=(0, 0)), "scale must be two numbers"),
    (lambda: RandomResizedCrop(8, ratio=(1, math.nan)), "ratio must be two numbers"),
    (lambda: RandomHorizontalFlip(1.1), "p must be a probability"),
    (lambda: RandomHorizontalFlip("a"), "p must be a probability"),
    (lambda: Normalize(0.5, (1, 1, 1)), "mean must be a number for each channel"),
    (lambda: Normalize((0, 0, 0), (1, 1)), "std must be a number for each channel"),
    (lambda: Normalize((0, 0, 0), (1, 0, 1)), "std must be above 0"),
    (lambda: Normalize((0, 0, 0), (1, 1, 1), "int8"), "dtype must be one of"),
)
def test_options_that_make_no_sense_are_refused(make, words):
    refused(UsageError, words, make)


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


@cases(
    "size options",
    ((341, 256), {"scale": (0.3, 0.9)}),
    ((500, 90), {}),  # few tries fit
    ((64, 64), {"ratio": (0.2, 5)}),
)
def test_crops_are_distributed_as_torchvisions_are(size, options):
    count, step, uniform = 4000, RandomResizedCrop(224, **options), random.Random(5).uniform
    draws = Draws(3, np.zeros(count, np.int64), np.arange(count))
    windows = [placed(step, *size, *row) for row in draws.uniform(0, step.numbers).tolist()]
    ours = np.array([(p.x, p.y, p.width, p.height) for p in windows], np.float64)
    others = np.array([theirs(*size, step.scale, step.ratio, uniform) for _ in range(count)], float)
    assert ours[:, :2].min() >= 0
    assert ((ours[:, :2] + ours[:, 2:]).max(axis=0) <= size).all()

    def measures(boxes):
        x, y, width, height = boxes.T
        yield from (width * height, np.log(width / height), x, y)
        yield from (x / (size[0] - width + 1), y / (size[1] - height + 1))

    for mine, other in zip(measures(ours), measures(others), strict=True):
        assert distance(mine, other) < 1
    centred = [(boxes[:, 0] == (size[0] - boxes[:, 2]) // 2).mean() for boxes in (ours, others)]
    assert abs(centred[0] - centred[1]) < 0.03


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
    for step, numbers in ((Resize((20, 30)), 0), (RandomResizedCrop((20, 30)), 22)):
        window = placed(step, 64, 48, *[0.5] * numbers)
        assert (window.columns, window.rows) == (30, 20)
        assert (window.full_width, window.full_height) == (30, 20)
        assert step.known(None) == (20, 30)
    assert Resize(20).known(None) is None


@given(SIDES, SIDES, SIDES, SIDES)
def test_the_middle_is_torchvisions(width, height, columns, rows):
    window = placed(CenterCrop((rows, columns)), width, height)
    left = (columns - width) // 2 if columns > width else 0  # padding, and then the crop
    top = (rows - height) // 2 if rows > height else 0
    x = round((max(width, columns) - columns) / 2.0)
    y = round((max(height, rows) - rows) / 2.0)
    assert (window.left, window.top) == (x - left, y - top)
    assert (window.columns, window.rows) == (columns, rows)


PROGRAMS = [
    [RandomResizedCrop((5, 7))],
    [RandomResizedCrop(4, (0, 1.5), (0.05, 20))],
    [RandomResizedCrop(4, (1, 1), (1e-300, 1e300))],
    [RandomResizedCrop(4, (30, 40), (0.9, 1.1)), CenterCrop((3, 9)), RandomHorizontalFlip()],
    [Resize((3, 8)), CenterCrop((5, 6))],
    [Resize(6), RandomHorizontalFlip(0.9), CenterCrop((4, 5)), RandomHorizontalFlip()],
    [RandomHorizontalFlip(), CenterCrop((3, 14)), RandomHorizontalFlip(0.2)],
]
SHAPES = [(1, 1), (1, 2), (2, 1), (7, 5), (3, 40), (9, 8), (64, 48), (1, 300), (41, 6)]


@needs_crop_many
@pytest.mark.parametrize("steps", PROGRAMS)
def test_windows_are_the_same_in_the_extension(steps):
    """Those of a million random numbers in all, and where rounding counts: 0, and almost 1."""
    count = 1300
    transforms = Transforms({"image": steps}, IMAGES)
    (direct,), job = transforms.direct(), transforms.chains[0].stages[0]
    for size in SHAPES:
        drawn = np.random.default_rng(sum(size)).random((count, direct.numbers))
        drawn[:20] = np.random.default_rng(3).choice([0, 0.5, 1 - 2**-53], (20, direct.numbers))
        starts, sizes = np.zeros(count, np.int64), np.full(count, 3 * math.prod(size))
        out = np.empty((count, *transforms.outputs()["image"][0]), np.uint8)
        pixels = np.zeros((*size, 3), np.uint8)
        done, found = crop_many(pixels, starts, sizes, drawn, direct.program, out, size=size)
        assert done.all()
        for row, numbers in zip(found.tolist(), drawn.tolist(), strict=True):
            window = job.window(size[1], size[0], numbers)
            assert row == [*dataclasses.astuple(window), size[1], size[0], 1]


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_so_many_images_are_mirrored(p):
    draws = Draws(0, np.zeros(5000, np.int64), np.arange(5000)).uniform(0, 1).tolist()
    share = np.mean([placed(RandomHorizontalFlip(p), 4, 4, *row).flip for row in draws])
    assert share == pytest.approx(p, abs=0.03 * (0 < p < 1))


@given(st.integers(1, 60), st.integers(1, 60), st.booleans(), st.booleans())
@example(5, 2, True, False)  # a margin of 1 on one side, and of 2 on the other
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
    columns = range(window.left, window.left + window.columns)
    found = [n + 1 if 0 <= n < width else 0 for n in columns]
    np.testing.assert_array_equal(found[:: -1 if window.flip else 1], row)


EVERY = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(16, 16, 3)


def normalised(pixels, dtype):
    step = Normalize(*IMAGENET, dtype)
    out = np.empty(pixels.shape, step.stored)
    step(pixels, out)
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_normalised_values_are_those_that_torch_computes(dtype):
    mean, std = torch.tensor(IMAGENET, dtype=torch.float64)
    exact = (torch.from_numpy(EVERY) / torch.tensor(255, dtype=torch.float64) - mean) / std
    np.testing.assert_array_equal(normalised(EVERY, dtype), exact.to(getattr(torch, dtype)).numpy())


@given(st.integers(1, 40), st.integers(1, 40))
@example(2, 1 << 18)
def test_images_of_any_size_are_normalised(height, width):
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    for dtype in ("float32", "bfloat16"):
        expected = normalised(EVERY, dtype).reshape(256, 3)[pixels, [0, 1, 2]]
        np.testing.assert_array_equal(normalised(pixels, dtype), expected)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_every_number_becomes_the_nearest_bfloat16(values):
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    numbers = np.concatenate([np.array(values, np.float32), ties])
    numbers = np.append(numbers, normalised(EVERY, "float32"))  # as it is used
    found = torch.from_numpy(to_bfloat16(numbers)).view(torch.bfloat16)
    assert torch.equal(found, torch.from_numpy(numbers).to(torch.bfloat16))
