"""The usual options of a Loader, found out from a dataset's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.dataset import Dataset
from shardkit.errors import UsageError
from shardkit.performance.defaults import TRANSFORMS, image_field, open_any, usual_options
from shardkit.stream import Loader
from shardkit.testing import make_image


def stored(place: Path, schema: dict[str, Any], samples: list[dict[str, Any]]) -> Dataset:
    with shardkit.create(place, to="arrow", schema=schema) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": str(number), **sample})
    return shardkit.open(place)


def first_batch(dataset: Dataset, **recipe: Any) -> dict[str, Any]:
    return next(iter(Loader(dataset, **usual_options(dataset, batch_size=4, **recipe))))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform_makes_batches_of_images(images: Path, transform: str) -> None:
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


def test_a_function_of_the_users_gets_pixels(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_recipe.py").write_text("def shape(p):\n    return len(p.shape)\n")
    monkeypatch.syspath_prepend(tmp_path)
    batch = first_batch(open_any(images), transform="mine_recipe:shape")
    assert batch["image"].tolist() == [3, 3, 3, 3]


def test_stored_pixels_are_images_where_nothing_is_encoded(tmp_path: Path) -> None:
    schema = {
        "vector": shardkit.Array("uint8", (4,)),
        "pixels": shardkit.Array("uint8", (20, 30, 3)),
    }
    sample = {"vector": np.zeros(4, np.uint8), "pixels": np.zeros((20, 30, 3), np.uint8)}
    dataset = stored(tmp_path / "raw", schema, [sample] * 4)
    assert image_field(dataset) == "pixels"
    assert first_batch(dataset, size=16)["pixels"].shape == (4, 16, 16, 3)
    schema["encoded"] = shardkit.Image()
    both = stored(tmp_path / "both", schema, [sample | {"encoded": make_image(0)}] * 4)
    assert image_field(both) == "encoded"
    fields = {"depth": shardkit.Image(), "image": shardkit.Image()}
    masked = stored(tmp_path / "m", fields, [dict.fromkeys(fields, make_image())])
    assert image_field(masked) == "image"


def test_arrays_of_unlike_lengths_are_padded_and_others_left_alone(tmp_path: Path) -> None:
    lengths = [3, 1, 2, 5]
    varying = shardkit.Array("int32", (None,))
    samples = [{"tokens": np.arange(n, dtype=np.int32)} for n in lengths]
    batch = first_batch(stored(tmp_path / "varying", {"tokens": varying}, samples))
    assert batch["tokens"].shape == (4, 5)
    assert sorted(batch["lengths"].tolist()) == sorted(lengths)
    blocks = [{"tokens": np.arange(8, dtype=np.int32)}] * 4
    fixed = stored(tmp_path / "fixed", {"tokens": shardkit.Array("int32", (8,))}, blocks)
    assert usual_options(fixed, batch_size=4) == {"batch_size": 4, "shuffle": True}
    assert first_batch(fixed)["tokens"].shape == (4, 8)
    assert usual_options(fixed, batch_size=4, transform="crop") == usual_options(
        fixed, batch_size=4, transform="none"
    )


def test_a_stored_attention_mask_is_not_in_the_way_of_padding(tmp_path: Path) -> None:
    schema = {
        "input_ids": shardkit.Array("int32", (None,)),
        "attention_mask": shardkit.Array("int8", (None,)),
    }
    samples = [
        {"input_ids": np.arange(n, dtype=np.int32), "attention_mask": np.ones(n, np.int8)}
        for n in (1, 2, 3, 4)
    ]
    batch = first_batch(stored(tmp_path / "masked", schema, samples))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 4)


def test_what_cannot_be_padded_comes_in_lists(tmp_path: Path) -> None:
    schema = {"tokens": shardkit.Array("int32", (None,), optional=True), "n": shardkit.Int()}
    samples: list[dict[str, Any]] = [{"tokens": np.zeros(n, np.int32), "n": n} for n in (1, 2, 3)]
    dataset = stored(tmp_path / "optional", schema, [*samples, {"n": 4}])
    assert isinstance(first_batch(dataset)["tokens"], list)


def test_what_cannot_be_is_refused(images: Path, tmp_path: Path) -> None:
    dataset = open_any(images)
    with pytest.raises(UsageError, match="smaller than one batch") as caught:
        usual_options(dataset, batch_size=13)
    assert "12 samples, batches of 13" in str(caught.value)
    assert "batches of at most 12" in str(caught.value)
    with pytest.raises(UsageError, match="crop, resize, center, decode, none, or module:function"):
        usual_options(dataset, batch_size=4, transform="corp")
    with pytest.raises(UsageError, match="cannot be imported"):
        usual_options(dataset, batch_size=4, transform="no_such_module:f")
    numbers = stored(tmp_path / "n", {"n": shardkit.Int()}, [{"n": 1}])
    with pytest.raises(UsageError, match="needs images, but the dataset has none"):
        usual_options(numbers, batch_size=1, transform="json:loads")
