"""A step of the user's own: how it is found and told from others, what it gets and may give."""

from __future__ import annotations

import functools
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
from shardkit.errors import SampleError, UsageError
from shardkit.options import ImageOptions
from shardkit.preprocess.filtered import Filtered
from shardkit.preprocess.images import ImageSteps, Shaped
from shardkit.preprocess.steps import schema_after, steps_for
from shardkit.preprocess.transform import load_transform, same
from shardkit.schema import Array, Image, Int, Json, Schema, Text
from shardkit.sources.sequence import SequenceSource
from tests.conftest import files_of, write_images
from tests.preprocess.test_images import PLAIN, encoded, exif, opened, photo, pixels_of, psnr

Sample = dict[str, Any]
Step = Callable[[Sample], Any]


# --- finding and telling them ---------------------------------------------------------------------


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
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes modules that can be imported while the test runs."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> Path:
        monkeypatch.delitem(sys.modules, name, raising=False)
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        # Two sources of the same length in the same second would share their bytecode.
        for cached in tmp_path.glob(f"__pycache__/{name}.*"):
            cached.unlink()
        return path

    return write


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no_such_module:step", "cannot be imported"),
        ("os", "not the name of a transform"),
        (":step", "not the name of a transform"),
        ("os:", "not the name of a transform"),
        ("", "not the name of a transform"),
        ("os:no_such_name", "has no 'no_such_name'"),
        ("os:path.no_such_name", "has no 'path.no_such_name'"),
        ("os:sep", "is not a function"),
        (3, "is not a function"),
        ({"a": 1}, "is not a function"),
    ],
)
def test_what_is_no_transform_is_named(given: Any, message: str) -> None:
    for workers in (None, 0, 2):
        with pytest.raises(UsageError, match=message):
            load_transform(given, workers)


def test_a_module_that_does_not_import_is_named_with_its_reason(module: Any) -> None:
    for number, (source, reason) in enumerate(
        [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError"), ("import nowhere", "nowhere")]
    ):
        module(f"bad_step{number}", source)
        with pytest.raises(UsageError, match=reason) as error:
            load_transform(f"bad_step{number}:f", 0)
        assert error.value.found == f"bad_step{number}"


def in_main() -> Step:
    """A function as a script or a notebook has it."""
    function = types.FunctionType(brighter.__code__, globals(), "of_a_script")
    function.__module__, function.__qualname__ = "__main__", "of_a_script"
    return function


def test_what_workers_cannot_load_is_refused_unless_there_are_none() -> None:
    def local(sample: Sample) -> Sample:
        return sample

    for function in (
        lambda sample: sample, local, in_main(), functools.partial(lambda n, sample: sample, 1)
    ):  # fmt: skip
        for workers in (None, 1, 5):
            with pytest.raises(UsageError, match="worker processes cannot load") as error:
                load_transform(function, workers)
            assert "workers=0" in str(error.value.fix)
        assert load_transform(function, 0).digest is None


def test_what_can_be_imported_can_go_to_workers() -> None:
    step = Brighter(3)
    for function in (
        brighter, step, step.method, Brighter.static, functools.partial(brighter, by=2)
    ):  # fmt: skip
        transform = load_transform(function, 5)
        assert transform.digest is not None
        assert pickle.loads(pickle.dumps(transform)).digest == transform.digest
    name = f"{__name__}:brighter"
    assert load_transform(name, 5) == load_transform(brighter, 5)
    assert load_transform(f"{__name__}:Brighter.static", 2).function is Brighter.static


def test_the_digest_tells_functions_and_arguments_apart() -> None:
    functions = [
        brighter, Brighter(1), Brighter(2), Brighter(1).method, Brighter.static,
        functools.partial(brighter, by=1), functools.partial(brighter, by=2),
        functools.partial(functools.partial(brighter, by=3)),
    ]  # fmt: skip
    digests = [load_transform(function, 0).digest for function in functions]
    assert len(set(digests)) == len(functions)
    assert digests == [load_transform(function, 0).digest for function in functions]


def test_the_digest_changes_with_the_source_and_with_nothing_else(module: Any) -> None:
    path = module("my_step", "def step(sample):\n    return sample\n")
    before = load_transform("my_step:step", 2).digest
    os.utime(path, (1, 1))
    assert load_transform("my_step:step", 2).digest == before
    module("my_step", "def step(sample):\n    return None  \n")
    after = load_transform("my_step:step", 2).digest
    assert after != before
    import my_step  # type: ignore[import-not-found]

    partial = functools.partial(my_step.step)
    old = load_transform(partial, 2).digest
    module("my_step", "def step(sample):\n    return sample\n")
    import my_step  # type: ignore[import-not-found]

    assert load_transform(functools.partial(my_step.step), 2).digest != old
    assert load_transform("my_step:step", 2).digest == before


def test_the_digest_is_the_same_in_every_process(module: Any, tmp_path: Path) -> None:
    """Or a run could not be continued: sets and hashes differ from process to process."""
    module(
        "my_steps",
        "class Step:\n"
        "    def __init__(self):\n"
        "        self.names = {'a', 'b', 'c', 'd', 'e'}\n"
        "    def __call__(self, sample):\n"
        "        return sample\n"
        "step = Step()\n",
    )
    code = (
        "from shardkit.preprocess.transform import load_transform;"
        "print(load_transform('my_steps:step', 2).digest)"
    )
    found = {
        subprocess.check_output(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        ("a", "a", True),
        (b"a", b"b", False),
        (None, None, True),
        (float("nan"), float("nan"), True),
        ([1, {"a": 2}], [1, {"a": 2}], True),
        ([1, {"a": 2}], [1, {"a": 3}], False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(4), False),
        (np.arange(3), np.arange(3.0), False),
        (np.arange(3), [0, 1, 2], False),
        (np.zeros((2, 1)), np.zeros((1, 2)), False),
        (np.array([1, np.nan]), np.array([1, np.nan]), True),
        (np.array(["a"]), np.array(["b"]), False),
        ({"x": np.arange(3)}, {"x": np.arange(3)}, True),
        ({"x": {"y": np.zeros(2)}}, {"x": {"y": np.ones(2)}}, False),
    ],
    ids=repr,
)
def test_equal_results_are_equal(one: Any, other: Any, equal: bool) -> None:
    assert same(one, other) is equal


# --- what it gets and gives -----------------------------------------------------------------------

SCHEMA = Schema({"image": Image(), "label": Int()})


def steps_with(function: Step, schema: Schema = SCHEMA, **options: Any) -> ImageSteps:
    transform = load_transform(function, 0)
    steps = steps_for(schema, ImageOptions(**options), transform, "array")
    assert steps is not None
    return steps


def shaped(function: Step, data: bytes = PLAIN["png"], **options: Any) -> Shaped:
    return steps_with(function, **options)({"__key__": "a", "image": data, "label": 3})


def test_it_gets_pixels_after_all_other_steps_and_everything_else_as_it_is() -> None:
    got: list[Sample] = []

    def look(sample: Sample) -> Sample:
        got.append(dict(sample))
        return sample

    data = encoded(photo(), "JPEG", exif=exif(6))
    shaped(look, data, resize=40, resize_mode="pad", background="#123456")
    (sample,) = got
    assert list(sample) == ["__key__", "image", "label"]
    assert (sample["__key__"], sample["label"]) == ("a", 3)
    pixels = sample["image"]
    assert (pixels.dtype, pixels.shape) == (np.uint8, (40, 40, 3))
    assert (pixels[:, 0] == (0x12, 0x34, 0x56)).all()
    expected = shaped_without(data, resize=40, resize_mode="pad", background="#123456")
    np.testing.assert_array_equal(pixels, expected)


def shaped_without(data: bytes, **options: Any) -> Any:
    """The pixels that steps make without a transform."""
    steps = steps_for(
        Schema({"image": Image()}), ImageOptions(format="raw", **options), None, "array"
    )
    assert steps is not None
    return steps({"__key__": "a", "image": data}).sample["image"]


def test_without_options_it_gets_upright_rgb_pixels() -> None:
    for kind in ("jpeg", "grey jpeg", "palette png", "gif"):
        found: list[Any] = []
        steps = steps_with(lambda sample, found=found: found.append(sample["image"]) or sample)
        steps({"__key__": "a", "image": PLAIN[kind], "label": 1})
        assert psnr(found[0], opened(PLAIN[kind]).convert("RGB")) > 40


def test_masks_are_values_on_the_resized_image() -> None:
    schema = Schema({"image": Image(), "mask": Image()})
    got: list[Any] = []

    def look(sample: Sample) -> Sample:
        got.append(sample["mask"])
        return sample

    numbers = np.arange(120 * 80, dtype=np.uint8).reshape(80, 120)
    for mask in (PIL.Image.fromarray(numbers), PIL.Image.fromarray(numbers.astype(np.uint16) * 9)):
        sample = {"__key__": "a", "image": PLAIN["png"], "mask": encoded(mask, "PNG")}
        steps_with(look, schema)(sample)
        np.testing.assert_array_equal(got[-1], mask)
        steps_with(look, schema, resize=40)(sample)
        assert got[-1].shape == (40, 60)
        assert not got[-1].flags.writeable
        assert set(np.unique(got[-1])) <= set(np.unique(np.asarray(mask)))


def test_a_mask_is_stored_as_it_comes_back() -> None:
    schema = Schema({"image": Image(), "mask": Image()})
    palette = PIL.Image.fromarray(np.arange(120 * 80, dtype=np.uint8).reshape(80, 120) % 5)
    palette.putpalette([n % 256 for n in range(0, 7 * 768, 7)])
    sample = {"__key__": "a", "image": PLAIN["png"], "mask": encoded(palette, "PNG")}
    same_mask = steps_with(lambda s: s, schema)(sample).sample
    assert same_mask == sample

    changed = steps_with(lambda s: {**s, "mask": (s["mask"] + 1).astype(np.uint8)}, schema)(sample)
    assert changed.sample["image"] == PLAIN["png"]
    mask = opened(changed.sample["mask"])
    assert mask.mode == "P"
    assert mask.getpalette()[:768] == palette.getpalette()[:768]
    np.testing.assert_array_equal(np.asarray(mask), np.asarray(palette) + 1)

    deep = steps_with(lambda s: {**s, "mask": s["mask"].astype(np.uint16) * 1000}, schema)(sample)
    np.testing.assert_array_equal(opened(deep.sample["mask"]), np.asarray(palette, int) * 1000)
    for bad in (np.float64, np.int64, np.complex64):
        with pytest.raises(SampleError) as error:
            steps_with(lambda s, bad=bad: {**s, "mask": s["mask"].astype(bad)}, schema)(sample)
        assert error.value.where == {"key": "a", "field": "mask"}


def test_unchanged_pixels_pass_byte_for_byte() -> None:
    for kind, data in PLAIN.items():
        found = shaped(lambda sample: {**sample, "label": 7}, data)
        assert found.sample == {"__key__": "a", "image": data, "label": 7}, kind
        assert found.images["passed"] == 1
        assert found.reasons == {}


def test_changed_pixels_are_encoded_and_counted() -> None:
    found = shaped(brighter)
    assert found.reasons == {"changed by the transform": 1}
    assert found.images["encoded"] == 1
    expected = np.minimum(np.asarray(photo()), 245) + 10
    np.testing.assert_array_equal(pixels_of(found.sample["image"]), expected)
    jpeg = shaped(brighter, encoded(photo(), "JPEG", quality=95), quality=80).sample["image"]
    assert opened(jpeg).quantization == opened(encoded(photo(), "JPEG", quality=80)).quantization  # type: ignore[attr-defined]


def test_changed_pixels_of_a_resized_image_are_counted_as_resized() -> None:
    found = shaped(brighter, resize=40)
    assert found.images["resized"] == 1
    assert found.reasons == {"changed by the transform": 1}
    other_size = shaped(lambda s: {**s, "image": s["image"][:5, :7]})
    assert opened(other_size.sample["image"]).size == (7, 5)


def test_a_grey_array_is_a_image_of_that_grey() -> None:
    found = shaped(lambda s: {**s, "image": s["image"][:, :, 1]})
    np.testing.assert_array_equal(
        pixels_of(found.sample["image"]), np.repeat(np.asarray(photo())[:, :, 1:2], 3, axis=2)
    )


@pytest.mark.parametrize("view", [np.fliplr, np.flipud, lambda p: p[::2, ::3], np.asfortranarray])
def test_views_are_stored_as_they_look(view: Callable[[Any], Any]) -> None:
    found = shaped(lambda s: {**s, "image": view(s["image"])})
    np.testing.assert_array_equal(pixels_of(found.sample["image"]), view(np.asarray(photo())))


def test_fields_are_added_changed_and_left_out_and_the_key_stays() -> None:
    found = shaped(lambda s: {"label": s["label"] * 2, "text": "new", "__key__": "another"})
    assert found.sample == {"label": 6, "text": "new", "__key__": "a"}
    assert found.images == {}
    assert shaped(lambda s: {"text": "x"}).sample == {"text": "x", "__key__": "a"}


def test_none_drops_the_sample() -> None:
    with pytest.raises(Filtered) as found:
        shaped(lambda sample: None)
    assert found.value.reason == "dropped by the transform"
    assert found.value.key == "a"


def test_what_it_raises_is_an_error_of_the_sample() -> None:
    def fails(sample: Sample) -> Sample:
        raise KeyError("caption")

    with pytest.raises(SampleError, match="the transform raised KeyError: 'caption'") as error:
        shaped(fails)
    assert error.value.where == {"key": "a"}
    assert f"{fails.__qualname__}" in str(error.value.fix)
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize("result", [3, "text", [1], (1, 2), {1: 2}, np.zeros(3), b"", object()])
def test_what_is_no_sample_is_an_error_of_the_sample(result: Any) -> None:
    with pytest.raises(SampleError, match="something that is not a sample") as error:
        shaped(lambda sample: result)
    assert error.value.where == {"key": "a"}


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 1), np.uint8), np.zeros((0, 4, 3), np.uint8), np.zeros(3, np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8), np.zeros((4, 4), bool),
    ],
    ids=lambda pixels: f"{pixels.dtype}{pixels.shape}",
)  # fmt: skip
def test_an_array_that_is_no_image_is_an_error_of_the_sample(pixels: Any) -> None:
    with pytest.raises(SampleError, match="something that is not an image") as error:
        shaped(lambda sample: {**sample, "image": pixels})
    assert error.value.where == {"key": "a", "field": "image"}
    assert str(pixels.shape) in str(error.value.found)


@pytest.mark.parametrize("field", ["image", "mask"])
def test_writing_into_what_is_given_is_a_clear_error(field: str) -> None:
    schema = Schema({"image": Image(), "mask": Image()})

    def writes(sample: Sample) -> Sample:
        assert not sample[field].flags.writeable
        sample[field][0, 0] = 0
        return sample

    mask = encoded(photo("L"), "PNG")
    with pytest.raises(SampleError, match="read-only") as error:
        steps_with(writes, schema)({"__key__": "a", "image": PLAIN["png"], "mask": mask})
    assert error.value.where == {"key": "a"}


def test_changing_the_dict_that_is_given_changes_nothing_else() -> None:
    sample = {"__key__": "a", "image": PLAIN["png"], "label": 3}

    def takes(given: Sample) -> Sample:
        del given["image"]
        given["label"] = 0
        return given

    assert steps_with(takes)(sample).sample == {"__key__": "a", "label": 0}
    assert sample == {"__key__": "a", "image": PLAIN["png"], "label": 3}


def test_it_runs_on_samples_without_images_too() -> None:
    steps = steps_with(lambda s: {**s, "label": -s["label"]}, Schema({"label": Int()}))
    assert steps({"__key__": "a", "label": 3}).sample == {"__key__": "a", "label": -3}


# --- which fields there are after it --------------------------------------------------------------


def schema_of(function: Step, count: int = 3, **options: Any) -> Schema:
    samples = [{"__key__": f"{n}", "image": PLAIN["png"], "label": n} for n in range(count)]
    source = SequenceSource(samples, SCHEMA)
    return schema_after(steps_with(function, **options), source)


def test_the_schema_is_that_of_what_comes_back() -> None:
    assert dict(schema_of(lambda s: s)) == dict(SCHEMA)
    added = schema_of(
        lambda s: {**s, "text": "t", "about": {"a": [1]}, "mean": s["image"].mean(axis=(0, 1))}
    )
    assert dict(added) == {**SCHEMA, "text": Text(), "about": Json(), "mean": Array("<f8")}
    assert dict(schema_of(lambda s: {"label": s["label"]})) == {"label": Int()}
    assert dict(schema_of(lambda s: {**s, "label": str(s["label"])}))["label"] == Text()
    assert dict(schema_of(lambda s: {**s, "image": s["image"][:9, :9]})) == dict(SCHEMA)
    raw = schema_of(brighter, format="raw", resize=8, resize_mode="pad")
    assert raw["image"] == Array("|u1", (8, 8, 3))
    other = schema_of(
        lambda s: {**s, "image": s["image"][:3]}, format="raw", resize=8, resize_mode="pad"
    )
    assert other["image"] == Array("|u1")


def test_what_is_random_is_refused() -> None:
    state = iter(range(1000))
    for function in (
        lambda s: {**s, "label": next(state)},
        lambda s: {**s, "image": s["image"] ^ np.uint8(next(state) % 256)},
        lambda s: {**s, "noise": np.random.default_rng().random(3)},
        lambda s: s if next(state) % 2 else {"label": 3},
    ):
        with pytest.raises(UsageError, match="different results for the same sample") as error:
            schema_of(function)
        assert "training" in str(error.value.fix)


def test_what_is_not_a_number_is_not_random() -> None:
    assert "x" in schema_of(lambda s: {**s, "x": np.array([np.nan, 1.0]), "y": float("nan")})


# --- a whole conversion ---------------------------------------------------------------------------


def by_label(sample: Sample) -> Sample | None:
    """Drops a class, fails on a sample, changes labels, adds a field and leaves the rest."""
    if sample["label"] == 1:
        return None
    if sample["__key__"].endswith("003"):
        raise ValueError("three")
    return {**sample, "label": 2 - sample["label"], "mean": float(sample["image"].mean())}


def test_a_conversion_does_all_that_a_transform_says(images: Path, tmp_path: Path) -> None:
    name = f"{__name__}:by_label"
    with pytest.raises(SampleError, match="raised ValueError: three") as error:
        shardkit.convert(images, "wds", tmp_path / "out", transform=name, workers=0)
    assert error.value.where["path"] == "class0/003.jpg"
    result = shardkit.convert(
        images, "wds", tmp_path / "out", transform=name, workers=0, on_error="skip"
    )
    split = result.splits[""]
    assert (result.samples, result.errors) == (6, 2)
    assert split.filtered == {"dropped by the transform": 4}
    assert split.images["passed"] == 6
    with shardkit.open(tmp_path / "out") as dataset:
        assert [s["label"] for s in dataset] == [2, 2, 2, 0, 0, 0]
        assert dataset.manifest is not None
        assert dataset.manifest.label_counts == (3, 0, 3)
        for sample in dataset:
            path = images / f"{sample['__key__']}.jpg"
            assert sample["image"] == path.read_bytes()
            assert sample["mean"] == pytest.approx(np.asarray(opened(sample["image"])).mean())


def test_a_transform_that_is_random_is_refused_before_anything_is_written(
    images: Path, tmp_path: Path
) -> None:
    before = files_of(tmp_path)
    state = iter(range(100))
    with pytest.raises(UsageError, match="different results for the same sample"):
        shardkit.convert(
            images, "wds", tmp_path / "out", workers=0,
            transform=lambda s: {**s, "label": next(state)},
        )  # fmt: skip
    assert files_of(tmp_path) == before


def test_a_label_of_no_class_is_an_error_of_the_sample(images: Path, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="label is not the number of a class"):
        shardkit.convert(
            images, "wds", tmp_path / "out", workers=0, transform=lambda s: {**s, "label": 3}
        )


@pytest.mark.parametrize("format", ["wds", "lmdb"])
@pytest.mark.parametrize("odd", [0, 2])
def test_values_of_more_than_one_type_are_errors_of_their_samples(
    images: Path, tmp_path: Path, format: str, odd: int
) -> None:
    def mixed(sample: Sample) -> Sample:
        return {**sample, "x": "text" if sample["label"] == odd else 3}

    out = tmp_path / "out"
    with pytest.raises(SampleError, match="not of its field's type"):
        shardkit.convert(images, format, out, transform=mixed, workers=0)
    result = shardkit.convert(
        images, format, out, transform=mixed, workers=0, on_error="skip", overwrite=True
    )
    assert {result.samples, result.errors} == {4, 8}


def for_one_class(sample: Sample) -> Sample:
    return {**sample, "extra": 1} if sample["label"] == 1 else sample


def test_a_field_that_some_samples_get_is_optional(images: Path, tmp_path: Path) -> None:
    shardkit.convert(images, "wds", tmp_path / "out", transform=for_one_class, workers=0)
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset.schema["extra"] == Int(optional=True)
        assert ["extra" in sample for sample in dataset] == [False] * 4 + [True] * 4 + [False] * 4


def only_the_last(sample: Sample) -> Sample | None:
    return None if sample["label"] == 0 else {**sample, "extra": 1}


def test_a_transform_that_drops_the_first_class_may_add_a_field(tmp_path: Path) -> None:
    """However many samples stand before the first that stays."""
    source = write_images(tmp_path / "in", classes=2, each=20)
    result = shardkit.convert(source, "wds", tmp_path / "out", transform=only_the_last, workers=0)
    assert result.samples == 20
    assert shardkit.open(tmp_path / "out").schema["extra"] == Int()


def test_a_transform_that_drops_everything_makes_an_empty_dataset(
    images: Path, tmp_path: Path
) -> None:
    result = shardkit.convert(
        images, "wds", tmp_path / "out", workers=0, transform=lambda sample: None
    )
    assert result.samples == 0
    assert result.splits[""].filtered == {"dropped by the transform": 12}
    assert len(shardkit.open(tmp_path / "out")) == 0


def test_renaming_comes_after_the_transform(images: Path, tmp_path: Path) -> None:
    shardkit.convert(
        images, "wds", tmp_path / "out", workers=0, rename={"image": "jpg", "extra": "more"},
        transform=only_the_last,
    )  # fmt: skip
    with shardkit.open(tmp_path / "out") as dataset:
        assert list(dataset[0]) == ["__key__", "jpg", "label", "more"]
