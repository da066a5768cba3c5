"""A step of the user's own: how it is found and told from others, what it gets and may give."""

import functools
import importlib
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit import Array, Image, ImageOptions, Int, Json, SampleError, Schema, Text, UsageError
from shardkit.errors import SourceError
from shardkit.preprocess.images import ImageSteps, Shaped, schema_after, steps_for
from shardkit.preprocess.items import Filtered
from shardkit.preprocess.transform import load_transform, same
from shardkit.sources.sequence import SequenceSource
from tests.conftest import files_of, write_images
from tests.preprocess.test_images import PLAIN, encoded, exif, made, opened, photo, pixels_of, psnr
from tests.sources.real import cases, refused

Sample = dict[str, Any]
Step = Callable[[Sample], Any]


def brighter(sample: Sample, by: int = 10) -> Sample:
    return {**sample, "image": np.minimum(sample["image"], 255 - by) + np.uint8(by)}


class Brighter:
    """A step with a state."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, sample: Sample) -> Sample:
        return brighter(sample, self.by)

    def method(self, sample: Sample) -> Sample:
        return self(sample)

    @staticmethod
    def static(sample: Sample) -> Sample:
        return sample


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes modules that can be imported while the test runs."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, source):
        monkeypatch.delitem(sys.modules, name, raising=False)
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        # Two sources of the same length in the same second would share their bytecode.
        for cached in tmp_path.glob(f"__pycache__/{name}.*"):
            cached.unlink()
        return path

    return write


@cases(
    "given message",
    ("no_such_module:step", "cannot be imported"),
    ("steps.py:step", "write steps:step"),
    *((name, "not the name of a transform") for name in ("os", ":step", "os:", "")),
    ("os:no_such_name", "has no 'no_such_name'"),
    ("os:path.no_such_name", "has no 'path.no_such_name'"),
    *((what, "is not a function") for what in ("os:sep", 3, {"a": 1})),
)
def test_what_is_no_transform_is_named(given, message):
    for workers in (None, 0, 2):
        refused(UsageError, message, load_transform, given, workers)


def test_a_module_that_does_not_import_is_named_with_its_reason(module):
    for number, (source, reason) in enumerate(
        [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError"), ("import nowhere", "nowhere")]
    ):
        module(f"bad_step{number}", source)
        error = refused(UsageError, reason, load_transform, f"bad_step{number}:f", 0)
        assert error.found == f"bad_step{number}"


def in_main() -> Step:
    """A function as a script or a notebook has it."""
    function = types.FunctionType(brighter.__code__, globals(), "of_a_script")
    function.__module__, function.__qualname__ = "__main__", "of_a_script"
    return function


def test_what_workers_cannot_load_is_refused_unless_there_are_none():
    def local(sample):
        return sample

    of_lambda = functools.partial(lambda n, sample: sample, 1)
    for function in (lambda sample: sample, local, in_main(), of_lambda):
        for workers in (None, 1, 5):
            with pytest.raises(UsageError, match="worker processes cannot load") as error:
                load_transform(function, workers)
            assert "workers=0" in str(error.value.fix)
        assert load_transform(function, 0).digest is None


def test_what_can_be_imported_can_go_to_workers_and_has_a_digest_of_its_own():
    step, partial = Brighter(3), functools.partial(brighter, by=2)
    for function in (brighter, step, step.method, Brighter.static, partial):
        transform = load_transform(function, 5)
        assert transform.digest is not None
        assert pickle.loads(pickle.dumps(transform)) == transform
    assert load_transform(f"{__name__}:brighter", 5) == load_transform(brighter, 5)
    sent = pickle.dumps(load_transform(f"{__name__}:Brighter.static", 2).elsewhere())
    assert pickle.loads(sent).function is Brighter.static
    functions = [
        brighter, Brighter(1), Brighter(2), Brighter(1).method, Brighter.static,
        functools.partial(brighter, by=1), functools.partial(brighter, by=2),
        functools.partial(functools.partial(brighter, by=3)),
    ]  # fmt: skip
    digests = [load_transform(function, 0).digest for function in functions]
    assert len(set(digests)) == len(functions)
    assert digests == [load_transform(function, 0).digest for function in functions]


def test_the_digest_changes_with_the_source_and_with_nothing_else_in_every_process(
    module, tmp_path
):
    def digests():
        step = importlib.import_module("my_step").step
        given = ("my_step:step", functools.partial(step))
        return [load_transform(function, 2).digest for function in given]

    path = module("my_step", "def step(sample):\n    return sample\n")
    before = digests()
    os.utime(path, (1, 1))
    assert digests() == before
    module("my_step", "def step(sample):\n    return None  \n")
    assert not set(before) & set(digests())
    module("my_step", "def step(sample):\n    return sample\n")
    assert digests() == before
    # Or a run could not be continued: sets and hashes differ from process to process.
    start = "    def __init__(self):\n        self.names = set('abcde')\n"
    call = "    def __call__(self, sample):\n        return sample\n"
    module("my_steps", f"class Step:\n{start}{call}step = Step()\n")
    code = (
        "from shardkit.preprocess.transform import load_transform;"
        "print(load_transform('my_steps:step', 2).digest)"
    )
    expected = f"{load_transform('my_steps:step', 2).digest}\n"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "PYTHONHASHSEED": seed}
        found = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
        assert found == expected


def test_equal_results_are_equal():
    numbers = np.arange(3)
    for one, other in (
        (float("nan"), float("nan")),
        ([1, {"a": 2, "b": None}], [1, {"b": None, "a": 2}]),
        ({"x": np.array([1, np.nan])}, {"x": np.array([1, np.nan])}),
    ):
        assert same(one, other), one
    for one, other in (
        *((1, True), (1, 1.0), (b"a", b"b"), ({"a": 1}, {"b": 1})),
        ([1, {"a": 2}], [1, {"a": 3}]),
        *((numbers, np.arange(3.0)), (numbers, [0, 1, 2])),
        (np.zeros((2, 1)), np.zeros((1, 2))),
        (np.array(["a"]), np.array(["b"])),
        ({"x": {"y": np.zeros(2)}}, {"x": {"y": np.ones(2)}}),
    ):
        assert not same(one, other), one


KINDS = {"image": Image(), "label": Int()}
WITH_MASK = {"image": Image(), "mask": Image()}


def steps_with(function: Step, kinds: dict[str, Any] = KINDS, **options: Any) -> ImageSteps:
    transform = load_transform(function, 0)
    steps = steps_for(Schema(kinds), ImageOptions(**options), transform, "array")
    assert steps is not None
    return steps


def shaped(function: Step, data: bytes = PLAIN["png"], **options: Any) -> Shaped:
    return steps_with(function, **options)({"__key__": "a", "image": data, "label": 3})


def looked_at(kinds: dict[str, Any], sample: Sample, **options: Any) -> Sample:
    """What a transform of a sample gets."""
    got: list[Sample] = []
    steps_with(lambda given: got.append(dict(given)) or given, kinds, **options)(sample)
    return got[0]


def test_it_gets_pixels_after_all_other_steps_and_everything_else_as_it_is():
    data = encoded(photo(), "JPEG", exif=exif(6))
    options = {"resize": 40, "resize_mode": "pad", "background": "#123456"}
    sample = looked_at(KINDS, {"__key__": "a", "image": data, "label": 3}, **options)
    assert list(sample) == ["__key__", "image", "label"]
    assert (sample["__key__"], sample["label"]) == ("a", 3)
    pixels = sample["image"]
    assert (pixels.dtype, pixels.shape) == (np.uint8, (40, 40, 3))
    assert (pixels[:, 0] == (0x12, 0x34, 0x56)).all()
    np.testing.assert_array_equal(pixels, made(data, format="raw", **options))
    for kind in ("jpeg", "grey jpeg", "palette png", "gif"):  # without options, upright RGB
        seen = looked_at(KINDS, {"__key__": "a", "image": PLAIN[kind], "label": 3})["image"]
        assert psnr(seen, opened(PLAIN[kind]).convert("RGB")) > 40


def test_a_mask_is_values_on_the_resized_image_and_stored_as_it_comes_back():
    numbers = np.arange(120 * 80, dtype=np.uint8).reshape(80, 120)
    for mask in (PIL.Image.fromarray(numbers), PIL.Image.fromarray(numbers.astype(np.uint16) * 9)):
        sample = {"__key__": "a", "image": PLAIN["png"], "mask": encoded(mask, "PNG")}
        np.testing.assert_array_equal(looked_at(WITH_MASK, sample)["mask"], mask)
        small = looked_at(WITH_MASK, sample, resize=40)["mask"]
        assert small.shape == (40, 60)
        assert not small.flags.writeable
        assert set(np.unique(small)) <= set(np.unique(np.asarray(mask)))
    palette = PIL.Image.fromarray(np.arange(120 * 80, dtype=np.uint8).reshape(80, 120) % 5)
    palette.putpalette([n % 256 for n in range(0, 7 * 768, 7)])
    sample = {"__key__": "a", "image": PLAIN["png"], "mask": encoded(palette, "PNG")}

    def stored(change):
        return steps_with(lambda s: {**s, "mask": change(s["mask"])}, WITH_MASK)(sample).sample

    assert stored(lambda mask: mask) == sample
    changed = stored(lambda mask: (mask + 1).astype(np.uint8))
    assert changed["image"] == PLAIN["png"]
    mask = opened(changed["mask"])
    assert mask.mode == "P"
    assert mask.getpalette()[:768] == palette.getpalette()[:768]
    np.testing.assert_array_equal(np.asarray(mask), np.asarray(palette) + 1)
    deep = stored(lambda mask: mask.astype(np.uint16) * 1000)
    np.testing.assert_array_equal(opened(deep["mask"]), np.asarray(palette, int) * 1000)
    for bad in (np.float64, np.int64, np.complex64):
        error = refused(SampleError, None, stored, lambda mask, bad=bad: mask.astype(bad))
        assert error.where == {"key": "a", "field": "mask"}


def test_pixels_pass_byte_for_byte_unless_they_change():
    for kind, data in PLAIN.items():
        found = shaped(lambda sample: {**sample, "label": 7}, data)
        assert found.sample == {"__key__": "a", "image": data, "label": 7}, kind
        assert found.images["passed"] == 1
        assert found.reasons == {}
    found = shaped(brighter)
    assert found.reasons == {"changed by the transform": 1}
    assert found.images["encoded"] == 1
    expected = np.minimum(np.asarray(photo()), 245) + 10
    np.testing.assert_array_equal(pixels_of(found.sample["image"]), expected)
    jpeg = shaped(brighter, encoded(photo(), "JPEG", quality=95), quality=80).sample["image"]
    assert opened(jpeg).quantization == opened(encoded(photo(), "JPEG", quality=80)).quantization
    resized = shaped(brighter, resize=40)
    assert resized.images["resized"] == 1
    assert resized.reasons == {"changed by the transform": 1}
    pixels = np.asarray(photo())
    grey = np.repeat(pixels[:, :, 1:2], 3, axis=2)
    views = [(view, view(pixels)) for view in (np.fliplr, np.flipud, np.asfortranarray)]
    views += [(lambda p: p[::2, ::3], pixels[::2, ::3]), (lambda p: p[:, :, 1], grey)]
    for view, expected in views:  # stored as they look
        stored = shaped(lambda s, view=view: {**s, "image": view(s["image"])}).sample["image"]
        np.testing.assert_array_equal(pixels_of(stored), expected)


def test_fields_are_added_changed_and_left_out_and_the_key_stays():
    found = shaped(lambda s: {"label": s["label"] * 2, "text": "new", "__key__": "another"})
    assert found.sample == {"label": 6, "text": "new", "__key__": "a"}
    assert found.images == {}
    assert shaped(lambda s: {"text": "x"}).sample == {"text": "x", "__key__": "a"}
    steps = steps_with(lambda s: {**s, "label": -s["label"]}, {"label": Int()})  # no images
    assert steps({"__key__": "a", "label": 3}).sample == {"__key__": "a", "label": -3}

    def takes(given):
        del given["image"]
        given["label"] = 0
        return given

    sample = {"__key__": "a", "image": PLAIN["png"], "label": 3}
    assert steps_with(takes)(sample).sample == {"__key__": "a", "label": 0}
    assert sample == {"__key__": "a", "image": PLAIN["png"], "label": 3}


def test_none_drops_the_sample_and_errors_or_what_is_no_sample_or_image_are_errors_of_it():
    def fails(sample):
        raise KeyError("caption")

    found = refused(Filtered, None, shaped, lambda sample: None)
    assert (found.key, found.reason) == ("a", "dropped by the transform")
    error = refused(SampleError, "the transform raised KeyError: 'caption'", shaped, fails)
    assert error.where == {"key": "a"}
    assert f"{fails.__qualname__}" in str(error.fix)
    assert isinstance(error.__cause__, KeyError)
    for result in (3, "text", [1], (1, 2), {1: 2}, np.zeros(3), b"", object()):
        with pytest.raises(SampleError, match="something that is not a sample") as error:
            shaped(lambda sample, result=result: result)
        assert error.value.where == {"key": "a"}
    for shape, dtype in (
        ((4, 4, 3), "f4"), ((4, 4, 4), "u1"), ((4, 4, 1), "u1"), ((0, 4, 3), "u1"), ((3,), "u1"),
        ((2, 4, 4, 3), "u1"), ((4, 4), "?"),
    ):  # fmt: skip
        pixels = np.zeros(shape, dtype)
        with pytest.raises(SampleError, match="something that is not an image") as error:
            shaped(lambda sample, pixels=pixels: {**sample, "image": pixels})
        assert error.value.where == {"key": "a", "field": "image"}
        assert str(shape) in str(error.value.found)


@pytest.mark.parametrize("field", ["image", "mask"])
def test_writing_into_what_is_given_is_a_clear_error(field):
    def writes(sample):
        assert not sample[field].flags.writeable
        sample[field][0, 0] = 0
        return sample

    mask = encoded(photo("L"), "PNG")
    with pytest.raises(SampleError, match="read-only") as error:
        steps_with(writes, WITH_MASK)({"__key__": "a", "image": PLAIN["png"], "mask": mask})
    assert error.value.where == {"key": "a"}


def schema_of(function: Step, **options: Any) -> dict[str, Any]:
    samples = [{"__key__": f"{n}", "image": PLAIN["png"], "label": n} for n in range(3)]
    source = SequenceSource(samples, Schema(KINDS))
    return dict(schema_after(steps_with(function, **options), source))


def test_the_schema_is_that_of_what_comes_back():
    assert schema_of(lambda s: s) == KINDS
    more = {"text": "t", "about": {"a": [1]}}
    assert schema_of(lambda s: {**s, **more, "mean": s["image"].mean(axis=(0, 1))}) == {
        **KINDS, "text": Text(), "about": Json(), "mean": Array("<f8")
    }  # fmt: skip
    assert schema_of(lambda s: {"label": s["label"]}) == {"label": Int()}
    assert schema_of(lambda s: {**s, "label": str(s["label"])})["label"] == Text()
    assert schema_of(lambda s: {**s, "image": s["image"][:9, :9]}) == KINDS
    raw = {"format": "raw", "resize": 8, "resize_mode": "pad"}
    assert schema_of(brighter, **raw)["image"] == Array("|u1", (8, 8, 3))
    assert schema_of(lambda s: {**s, "image": s["image"][:3]}, **raw)["image"] == Array("|u1")
    # NaN is not equal to itself, and not random.
    assert "x" in schema_of(lambda s: {**s, "x": np.array([np.nan, 1.0]), "y": float("nan")})


def by_label(sample: Sample) -> Sample | None:
    """Drops a class, fails on a sample, changes labels, adds a field and leaves the rest."""
    if sample["label"] == 1:
        return None
    if sample["__key__"].endswith("003"):
        raise ValueError("three")
    return {**sample, "label": 2 - sample["label"], "mean": float(sample["image"].mean())}


def converted(source: Path, out: Path, transform: Any, **options: Any) -> shardkit.ConvertResult:
    return shardkit.convert(source, "wds", out, transform=transform, workers=0, **options)


def test_a_conversion_does_all_that_a_transform_says(images, tmp_path):
    name, out = f"{__name__}:by_label", tmp_path / "out"
    error = refused(SampleError, "raised ValueError: three", converted, images, out, name)
    assert error.where["path"] == "class0/003.jpg"
    result = converted(images, out, name, on_error="skip")
    split = result.splits[""]
    assert (result.samples, result.errors) == (6, 2)
    assert split.filtered == {"dropped by the transform": 4}
    assert split.images["passed"] == 6
    with shardkit.open(out) as dataset:
        assert [s["label"] for s in dataset] == [2, 2, 2, 0, 0, 0]
        assert dataset.manifest is not None
        assert dataset.manifest.label_counts == (3, 0, 3)
        for sample in dataset:
            path = images / f"{sample['__key__']}.jpg"
            assert sample["image"] == path.read_bytes()
            assert sample["mean"] == pytest.approx(np.asarray(opened(sample["image"])).mean())


def test_what_is_random_or_no_class_is_refused(images, tmp_path):
    before, state = files_of(tmp_path), iter(range(100))
    with pytest.raises(UsageError, match="different results for the same sample"):
        converted(images, tmp_path / "out", lambda s: {**s, "label": next(state)})
    assert files_of(tmp_path) == before
    with pytest.raises(SampleError, match="label is not the number of a class"):
        converted(images, tmp_path / "out", lambda s: {**s, "label": 3})
    state = iter(range(1000))
    for function in (
        lambda s: {**s, "label": next(state)},
        lambda s: {**s, "image": s["image"] ^ np.uint8(next(state) % 256)},
        lambda s: {**s, "noise": np.random.default_rng().random(3)},
        lambda s: s if next(state) % 2 else {"label": 3},
    ):
        error = refused(UsageError, "different results for the same sample", schema_of, function)
        assert "training" in str(error.fix)


@pytest.mark.parametrize("odd", [0, 2])
def test_values_of_more_than_one_type_are_errors_of_their_samples(images, tmp_path, odd):
    def mixed(sample):
        return {**sample, "x": "text" if sample["label"] == odd else 3}

    refused(SampleError, "not of its field's type", converted, images, tmp_path / "out", mixed)
    result = converted(images, tmp_path / "out", mixed, on_error="skip", overwrite=True)
    assert {result.samples, result.errors} == {4, 8}


def test_a_transform_may_drop_the_first_class_or_all_and_add_fields_to_some(images, tmp_path):
    out = tmp_path / "out"
    converted(images, out, lambda s: {**s, "extra": 1} if s["label"] == 1 else s)
    with shardkit.open(out) as dataset:
        assert dataset.schema["extra"] == Int(optional=True)
        assert ["extra" in sample for sample in dataset] == [False] * 4 + [True] * 4 + [False] * 4
    # However many samples stand before the first that stays. It is renamed afterwards.
    source, out = write_images(tmp_path / "in", classes=2, each=20), tmp_path / "last"
    result = converted(source, out, only_the_last, rename={"image": "jpg", "extra": "more"})
    assert result.samples == 20
    schema = {"jpg": Image(), "label": Int(), "more": Int()}
    assert dict(shardkit.open(out).schema) == schema
    assert list(shardkit.open(out)[0]) == ["__key__", *schema]
    with pytest.raises(SourceError, match="no sample of the source is left") as caught:
        converted(images, tmp_path / "none", lambda sample: None)
    assert caught.value.found == "12 dropped by the transform"


def only_the_last(sample: Sample) -> Sample | None:
    return None if sample["label"] == 0 else {**sample, "extra": 1}
