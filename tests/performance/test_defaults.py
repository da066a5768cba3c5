"""The usual options of a Loader, found out from a dataset's schema."""

import numpy as np
import pytest

import shardkit
from shardkit.errors import ShardkitWarning, UsageError
from shardkit.performance.defaults import TRANSFORMS, image_field, open_any, usual_options
from shardkit.stream import Loader
from shardkit.testing import make_image


def stored(place, schema, samples):
    with shardkit.create(place, to="arrow", schema=schema) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": str(number), **sample})
    return shardkit.open(place)


def first_batch(dataset, **recipe):
    return next(iter(Loader(dataset, **usual_options(dataset, batch_size=4, **recipe))))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform_makes_batches_of_images(images, transform):
    values = first_batch(open_any(images), transform=transform, size=16)["image"]
    if transform in ("crop", "resize", "center"):
        assert values.shape == (4, 16, 16, 3)
    elif transform == "decode":
        assert all(value.ndim == 3 for value in values)
    else:
        assert all(value[:2] == b"\xff\xd8" for value in values)
    crop = {"image": [shardkit.RandomResizedCrop(224)]}
    usual = {"batch_size": 3, "shuffle": True, "transforms": crop}
    assert usual_options(open_any(images), batch_size=3) == usual


def test_stored_pixels_are_images_where_nothing_is_encoded(tmp_path):
    shapes = {"vector": (4,), "pixels": (20, 30, 3)}
    schema = {name: shardkit.Array("uint8", shape) for name, shape in shapes.items()}
    sample = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    dataset = stored(tmp_path / "raw", schema, [sample] * 4)
    assert image_field(dataset) == "pixels"
    assert first_batch(dataset, size=16)["pixels"].shape == (4, 16, 16, 3)
    schema["encoded"] = shardkit.Image()
    both = stored(tmp_path / "both", schema, [sample | {"encoded": make_image(0)}] * 4)
    assert image_field(both) == "encoded"
    fields = {"depth": shardkit.Image(), "image": shardkit.Image()}
    masked = stored(tmp_path / "m", fields, [dict.fromkeys(fields, make_image())])
    assert image_field(masked) == "image"


def test_arrays_of_unlike_lengths_are_padded_and_others_left_alone(tmp_path):
    lengths = [3, 1, 2, 5]
    samples = [{"tokens": np.arange(n, dtype=np.int32)} for n in lengths]
    varying = {"tokens": shardkit.Array("int32", (None,))}
    batch = first_batch(stored(tmp_path / "varying", varying, samples))
    assert batch["tokens"].shape == (4, 5)
    assert sorted(batch["lengths"].tolist()) == sorted(lengths)
    blocks = [{"tokens": np.arange(8, dtype=np.int32)}] * 4
    fixed = stored(tmp_path / "fixed", {"tokens": shardkit.Array("int32", (8,))}, blocks)
    usual = usual_options(fixed, batch_size=4)
    assert usual == {"batch_size": 4, "shuffle": True}
    assert first_batch(fixed)["tokens"].shape == (4, 8)
    for transform in ("crop", "none"):
        assert usual_options(fixed, batch_size=4, transform=transform) == usual


def test_a_stored_attention_mask_is_not_in_the_way_of_padding(tmp_path):
    kinds = {"input_ids": "int32", "attention_mask": "int8"}
    schema = {name: shardkit.Array(kind, (None,)) for name, kind in kinds.items()}
    samples = [{name: np.ones(n, kind) for name, kind in kinds.items()} for n in (1, 2, 3, 4)]
    batch = first_batch(stored(tmp_path / "masked", schema, samples))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 4)


def test_what_cannot_be_padded_comes_in_lists(tmp_path):
    schema = {"tokens": shardkit.Array("int32", (None,), optional=True), "n": shardkit.Int()}
    samples = [{"tokens": np.zeros(n, np.int32), "n": n} for n in (1, 2, 3)]
    dataset = stored(tmp_path / "optional", schema, [*samples, {"n": 4}])
    assert isinstance(first_batch(dataset)["tokens"], list)


def test_a_function_of_the_users_gets_pixels_and_what_cannot_be_is_refused(
    images, tmp_path, monkeypatch
):
    dataset = open_any(images)
    (tmp_path / "mine_recipe.py").write_text("def shape(p):\n    return len(p.shape)\n")
    monkeypatch.syspath_prepend(tmp_path)
    batch = first_batch(dataset, transform="mine_recipe:shape")
    assert batch["image"].tolist() == [3, 3, 3, 3]
    with pytest.warns(ShardkitWarning, match="only 12 samples, fewer than a batch of 13"):
        assert usual_options(dataset, batch_size=13)["batch_size"] == 12
    for transform, message in {
        "corp": "crop, resize, center, decode, none, or module:function",
        "no_such_module:f": "cannot be imported",
    }.items():
        with pytest.raises(UsageError, match=message):
            usual_options(dataset, batch_size=4, transform=transform)
    numbers = stored(tmp_path / "n", {"n": shardkit.Int()}, [{"n": 1}])
    with pytest.raises(UsageError, match="needs images, but the dataset has none"):
        usual_options(numbers, batch_size=1, transform="json:loads")
