"""Chains of transforms: what they are made of, what they give, and what functions of a user do."""

import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardkit import (
    CenterCrop,
    Decode,
    MultiHot,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from shardkit.errors import SampleError, ShardkitError, UsageError
from shardkit.schema import Array, Image, Int, Schema, Text
from shardkit.transforms import Transforms
from tests.codecs.sample_images import encoded
from tests.preprocess.test_masks import drawn, scene
from tests.sources.real import cases, refused
from tests.transforms.chunks import BOTH, IMAGES, applied, assert_same, begun, draws_of, photos

SCHEMA = Schema({"image": Image(), "mask": Image(), "text": Text(), "tokens": Array("<u2")})
NO_MASK = Schema({name: kind for name, kind in SCHEMA.items() if name != "mask"})
CROP, FLIP = RandomResizedCrop(24), RandomHorizontalFlip()
HALF = Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2), "bfloat16")
SINGLE = Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
PAIR = {"image": encoded(scene(), "JPEG"), "mask": encoded(drawn(), "PNG")}


def noisy(image, rng):
    return image + rng.integers(0, 9, image.shape, np.uint8)


def both_noisy(*, image, mask, rng):
    return {"image": noisy(image, rng), "mask": mask, "more": 3}


class Doubled:
    def __call__(self, value):
        return value * 2


def alone(transforms, samples):
    """What becomes of samples that are transformed one by one, by several threads."""

    def one(row):
        sample = dict(samples[row])
        assert not transforms.apply([sample], draws_of(1, first=row), {})
        return sample

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(len(samples))))


RAW = Schema({"image": Array("|u1", (40, 50, 3)), "mask": Array("<i4")})
PAIRED = {("image", "mask"): [CROP, HALF]}
SIZE, U1, F4 = (24, 24, 3), np.dtype(np.uint8), np.dtype(np.float32)


@cases(
    "steps schema outputs",
    ({}, IMAGES, {}),
    ({"image": CROP}, IMAGES, {"image": (SIZE, U1)}),
    ({"image": [Resize(9), CenterCrop(2)]}, IMAGES, {"image": ((2, 2, 3), U1)}),
    ({"image": [CROP, FLIP, SINGLE]}, IMAGES, {"image": (SIZE, F4)}),
    ({"image": [CROP, HALF]}, IMAGES, {"image": (SIZE, np.dtype(np.uint16))}),
    ({"image": [Decode(), noisy, CROP]}, IMAGES, {"image": (SIZE, U1)}),
    ({"image": [CROP, noisy]}, IMAGES, {}),
    ({"image": [Resize(30), FLIP, SINGLE]}, IMAGES, {}),
    ({"image": [FLIP, SINGLE]}, RAW, {"image": ((40, 50, 3), F4)}),
    ({"image": Resize(20)}, RAW, {"image": ((20, 25, 3), U1)}),
    ({"image": [noisy, FLIP]}, RAW, {}),
    (PAIRED, BOTH, {"image": (SIZE, np.dtype(np.uint16)), "mask": ((24, 24), np.dtype(np.int64))}),
    ({"text": str.lower, "tokens": np.sort}, SCHEMA, {}),
    ({"tokens": [np.sort, MultiHot(7, "float32")]}, SCHEMA, {"tokens": ((7,), F4)}),
)
def test_shapes_are_known_before_anything_is_read(steps, schema, outputs):
    assert Transforms(steps, schema).outputs() == outputs


def test_which_fields_are_what_is_known():
    transforms = Transforms({**PAIRED, "text": str.lower, "tokens": np.sort}, SCHEMA)
    assert transforms.fields == set(SCHEMA)
    assert transforms.images == transforms.encoded == transforms.bfloat16_fields == {"image"}
    ends_in_a_function = Transforms({"image": [CROP, noisy]}, NO_MASK)
    assert ends_in_a_function.images == ends_in_a_function.bfloat16_fields == set()
    assert ends_in_a_function.encoded == {"image"}


@cases("steps", [CROP, SINGLE], [CROP, HALF], [CROP, Doubled()], [FLIP, SINGLE], [Decode(), noisy])
def test_without_memory_of_a_batch_all_is_in_the_samples(steps):
    """As for a dataset that is read sample by sample; what came stays when more is made."""
    transforms, made = Transforms({"image": steps}, IMAGES), photos(4)
    assert not transforms.apply(made, draws_of(4), {})
    transforms.apply(photos(4), draws_of(4, turn=1), {})
    assert_same(made, applied({"image": steps}, photos(4)))
    out = begun(transforms, 3)  # samples that are not there are left alone
    assert transforms.apply([None, None, None], draws_of(3), out) == {}
    assert transforms.apply([], draws_of(0), begun(transforms, 0)) == {}
    assert all((values == 77).all() for values in out.values())


def sized(data: bytes):
    return len(data)


def backward(data: "bytes"):
    return data[::-1]


def test_functions_get_fields_that_are_no_images_and_bytes_if_they_ask_for_them():
    samples = [{"__key__": "a", "text": "ABC", "tokens": np.array([3, 1, 2], np.uint16)}]
    found = applied({"text": [str.lower, Doubled()], "tokens": np.sort}, samples, SCHEMA)[0]
    assert (found["text"], found["tokens"].tolist()) == ("abcabc", [1, 2, 3])

    def shortened(text, tokens):
        return {"text": text[: len(tokens)], "tokens": tokens[: len(text)], "more": 1}

    samples[0]["text"] = "ab"
    found = applied({("text", "tokens"): shortened}, samples, SCHEMA)[0]
    assert (found["text"], found["tokens"].tolist()) == ("ab", [3, 1])
    assert "more" not in found
    data = photos(1)[0]["image"]
    assert applied({"image": sized}, photos(1))[0]["image"] == len(data)
    assert applied({"image": np.shape}, photos(1))[0]["image"] == (50, 60, 3)
    backwards = [{"__key__": "0", "image": data[::-1]}]
    found = applied({"image": [backward, CROP]}, backwards)
    assert_same(found, applied({"image": [lambda value: value, CROP]}, photos(1)))


@cases(
    "value expected",
    (np.array([3, 0, 3]), [1, 0, 0, 1]),
    (np.array([], np.int64), [0, 0, 0, 0]),
    ([], [0, 0, 0, 0]),
    ([2, -1], [0, 0, 1, 0]),
    (np.array([1], np.uint8), [0, 1, 0, 0]),
    (3, [0, 0, 0, 1]),
    (-1, [0, 0, 0, 0]),
    (np.array([2**64 - 1], np.uint64), None),
    ([4], None),
    ([-2], None),
    ([0.5], None),
    ([True], None),
    ([[1]], None),
    ([[1], [1, 2]], None),
    (["a"], None),
)
def test_numbers_of_classes_become_a_vector(value, expected):
    samples = [{"__key__": "a", "tokens": value}]
    steps = {"tokens": MultiHot(4)}
    if expected is None:
        errors = Transforms(steps, SCHEMA).apply(samples, draws_of(1), {})
        assert "not a list of numbers of 4 classes" in str(errors[0])
        assert errors[0].where["key"] == "a"
        return
    (found,) = applied(steps, samples, SCHEMA)
    assert (found["tokens"].tolist(), found["tokens"].dtype) == (expected, U1)
    out = begun(Transforms({"tokens": MultiHot(4, "float32")}, SCHEMA), 1)
    assert out["tokens"].dtype == F4


@cases(
    "steps",
    {"image": [CROP, FLIP, HALF]},
    {"image": [Decode(), noisy, FLIP]},
    {"image": [FLIP, CROP, noisy]},
    {("image", "mask"): [CROP, FLIP]},
    {("image", "mask"): [Decode(), both_noisy, CROP]},
)
def test_chunks_threads_and_other_processes_change_nothing(steps):
    samples, schema = photos(8) + photos(8, "PNG"), IMAGES
    if ("image", "mask") in steps:
        samples, schema = [{**sample, **PAIR} for sample in samples], BOTH
    expected = applied(steps, samples, schema)
    assert_same(applied(steps, samples, schema, chunk=3), expected)
    transforms = Transforms(steps, schema)
    assert_same(alone(transforms, samples), expected)
    assert_same(alone(pickle.loads(pickle.dumps(transforms)), samples[:2]), expected[:2])


def test_epochs_seeds_samples_fields_and_places_in_a_chain_have_numbers_of_their_own():
    samples = [{**photos(1)[0], "__key__": f"{n}", "text": ""} for n in range(12)]
    seen = {
        sample["image"].tobytes()
        for options in ({}, {"turn": 1}, {"seed": 1})
        for sample in applied({"image": [CROP, FLIP]}, samples, **options)
    }
    assert len(seen) == 36
    schema = Schema({"left": Image(), "right": Image()})
    pair = {"__key__": "a", "left": samples[0]["image"], "right": samples[0]["image"]}
    found = applied({"left": CROP, "right": CROP}, [pair], schema)[0]
    assert (found["left"] != found["right"]).any()

    def draw(value, rng):
        return [*value, rng.random()] if isinstance(value, list) else [rng.random()]

    steps = {"text": [draw, functools.partial(draw), draw]}
    numbers = [s["text"] for s in applied(steps, samples[:5], SCHEMA)]
    assert len(np.unique(numbers)) == 15
    assert numbers == [s["text"] for s in applied(steps, samples[:5], SCHEMA, chunk=2)]


def test_albumentations_take_images_and_masks_and_draw_by_sample(monkeypatch):
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # else importing it asks a server
    theirs = pytest.importorskip("albumentations", reason="an example of what plugs in")
    flip, light = theirs.HorizontalFlip(p=0.5), theirs.RandomBrightnessContrast(p=0.8)
    compose = theirs.Compose([theirs.RandomResizedCrop((48, 40), scale=(0.5, 1)), flip, light])
    steps = {("image", "mask"): [Decode(), compose]}
    samples = [{"__key__": f"{n}", **PAIR} for n in range(8)]
    expected = applied(steps, samples, BOTH)
    assert {s["image"].shape for s in expected} == {(48, 40, 3)}
    assert all(s["mask"].dtype == np.int64 for s in expected)
    assert len({s["mask"].tobytes() for s in expected}) > 6
    transforms = Transforms(steps, BOTH)
    assert_same(alone(transforms, samples), expected)
    assert pickle.loads(pickle.dumps(transforms)).apply(samples, draws_of(8), {}) == {}
    assert_same(samples, expected)


def errors_of(steps, samples, schema=SCHEMA):
    transforms = Transforms(steps, schema)
    return transforms.apply(samples, draws_of(len(samples)), begun(transforms, len(samples)))


def odd_fails(value):
    if int(value) % 2:
        raise KeyError("caption")
    return value


def test_a_function_that_raises_is_an_error_of_its_sample_and_is_named():
    samples = [{"__key__": f"k{n}", "text": f"{n}"} for n in range(4)]
    errors = errors_of({"text": [odd_fails, Doubled()]}, samples)
    assert list(errors) == [1, 3]
    for row, error in errors.items():
        assert isinstance(error, SampleError)
        assert error.where == {"key": f"k{row}", "field": "text"}
        name = f"{odd_fails.__module__}.odd_fails"
        assert str(error.what) == f"the transform {name} raised KeyError: 'caption'"
        assert isinstance(error.__cause__, KeyError)
    assert [sample["text"] for sample in samples] == ["00", "1", "22", "3"]
    for kind in (SampleError, ShardkitError):  # of ours, which stay as they are

        def refuses(value, kind=kind):
            raise kind("too short", found="3") from ValueError("inner")

        (error,) = errors_of({"text": refuses}, [{"__key__": "a", "text": "abc"}]).values()
        assert (type(error), error.what, error.found) == (kind, "too short", "3")
        assert error.where == {"key": "a", "field": "text"}
        assert isinstance(error.__cause__, ValueError)


@cases(
    "field step words found",
    ("text", lambda value: None, "returned nothing", "None"),
    (("text", "tokens"), lambda text, tokens: [text], "not return the fields", "list"),
    (("text", "tokens"), lambda text, tokens: {"text": text}, "did not return", "text"),
    (("text", "tokens"), lambda text, tokens: {}, "did not return the fields", "nothing"),
    ("image", [Decode(), lambda value: value / 2, CROP], "not have the size", "float64"),
    ("image", [Decode(), lambda value: "none", SINGLE], "not an image", "str 'none'"),
)
def test_what_a_function_gives_must_be_usable(field, step, words, found):
    sample = {"__key__": "0", **PAIR, "text": "a", "tokens": np.zeros(3)}
    (error,) = errors_of({field: step}, [sample], NO_MASK).values()
    assert isinstance(error, SampleError)
    assert words in error.what
    assert found in str(error.found)
    assert error.where["key"] == "0"


def test_a_sample_that_failed_or_lacks_its_field_or_whose_sizes_differ_goes_no_further():
    seen = []
    bad, good = {"__key__": "0", "image": b"", "text": "a"}, {**photos(1)[0], "text": "b"}
    steps = {"image": CROP, "text": lambda text: seen.append(text) or text}
    assert list(errors_of(steps, [bad, good], NO_MASK)) == [0]
    assert seen == ["b"]
    image = {"image": photos(1)[0]["image"]}
    for steps in ({"text": str.lower}, {"image": Decode()}, {("image", "mask"): Decode()}):
        assert errors_of(steps, [{"__key__": "a"}]) == {}
    for steps, sample in (({("image", "mask"): CROP}, {}), ({("image", "mask"): Decode()}, image)):
        (error,) = errors_of(steps, [{"__key__": "a", **sample}]).values()
        assert isinstance(error, SampleError)
        assert "has no field" in error.what
        assert error.where["key"] == "a"

    def only_one(image, mask):
        return {"image": image[:40], "mask": mask}

    steps = {("image", "mask"): [Decode(), only_one, CROP]}
    (error,) = errors_of(steps, [{"__key__": "a", **PAIR}], BOTH).values()
    assert "a mask of 120 x 80 pixels on an image of 120 x 40" in str(error.found)
    assert error.where == {"key": "a", "field": "mask"}


@cases(
    "steps words",
    ([CROP], "given by field"),
    ({"photo": CROP}, "no field 'photo' to transform"),
    ({("image", "none"): CROP}, "no field 'none' to transform"),
    ({(): CROP}, "need a field, or a tuple"),
    ({("image", "image"): CROP}, "need a field, or a tuple"),
    ({"image": CROP, ("image", "mask"): CROP}, "'image' has transforms in two places"),
    ({"image": []}, "no transform for 'image'"),
    ({"image": RandomResizedCrop}, "invalid transform of 'image'"),
    ({"tokens": MultiHot}, "invalid transform of 'tokens'"),
    ({"image": [CROP, 3]}, "invalid transform of 'image'"),
    ({"image": "crop"}, "invalid transform of 'image'"),
    ({"text": CROP}, r"RandomResizedCrop\(24\) is for images, but field 'text' has none"),
    ({("text", "image"): CROP}, "is for images"),
    ({("image", "text"): CROP}, "'text' cannot be the mask of an image"),
    ({"image": [SINGLE, CROP]}, "comes after Normalize"),
    ({"image": [CROP, SINGLE, SINGLE]}, "comes after Normalize"),
    ({"image": [HALF, noisy]}, "noisy of 'image' comes after Normalize"),
)
def test_what_cannot_work_is_refused_before_anything_is_read(steps, words):
    refused(UsageError, words, Transforms, steps, SCHEMA)


def test_only_images_and_what_may_be_their_pixels_are_cropped():
    for kind in (Array("<c8"), Array("|u1", (8, 8)), Array("|u1", (None, None, 5)), Int()):
        refused(UsageError, "is for images", Transforms, {"image": CROP}, Schema({"image": kind}))
        Transforms({"image": [Doubled(), CROP]}, Schema({"image": kind}))  # of any function
    for kind in (Array(), Array("|u1"), Array("<f4", (None, None, 1)), Image()):
        Transforms({"image": CROP}, Schema({"image": kind}))
