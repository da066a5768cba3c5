"""decode="gpu" without a GPU: DALI's operators of the processor, fed by the Loader."""

import gc
import threading

import numpy as np
import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.stream import torch_loader
from shardkit.torch import Loader
from tests.codecs.test_crop import needs_crop_many
from tests.stream.data import same

pytest.importorskip("nvidia.dali", reason='DALI is not installed: pip install "shardkit[gpu]"')
pytestmark = needs_crop_many

CROP = {"image": [shardkit.RandomResizedCrop(16), shardkit.RandomHorizontalFlip()]}
MEAN, MOST = 1.0, 40  # difference to the processor's pixels: on average, and the largest


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch):
    monkeypatch.setattr(torch_loader, "_DEVICES", ["cpu"])


def both(path, **options):
    """Loaders whose batches should be equal."""
    options = {"batch_size": 5, "transforms": CROP, "threads": 2} | options
    return Loader(path, **options), Loader(path, **options, device="cpu", decode="gpu")


def compare(one, other, images=("image",)):
    """Assert that two batches are equal, but for small differences of images."""
    assert list(one) == list(other)
    for name, value in one.items():
        if name not in images:
            assert same(value, other[name]), name
            continue
        made = other[name]
        assert (value.shape, value.dtype, value.stride()) == (made.shape, made.dtype, made.stride())
        apart = (value.float() - made.float()).abs()
        assert apart.mean() <= MEAN
        assert apart.max() <= MOST


def test_batches_are_those_of_the_processor_in_every_epoch(photos):
    ours, made = both(photos, shuffle=True)
    for _ in range(2):
        for one, other in zip(ours, made, strict=True):
            compare(one, other)


def test_batches_that_are_held_keep_their_images(photos):
    ours, made = both(photos, shuffle=True)
    held = [batch for _ in range(5) for batch in made]
    assert len(held) == 40
    for one, other in zip((batch for _ in range(5) for batch in ours), held, strict=True):
        compare(one, other)


def test_a_state_in_the_middle_of_an_epoch_continues(photos):
    _, made = both(photos, shuffle=True)
    iteration = iter(made)
    for _ in range(3):
        next(iteration)
    state, rest = made.state_dict(), [*iteration]
    _, other = both(photos, shuffle=True, threads=0)
    other.load_state_dict(state)
    assert same([*other], rest)


def test_threads_end_with_the_loader(photos):
    before = threading.active_count()
    _, made = both(photos)
    batch = next(iter(made))  # the rest of the epoch is abandoned
    del made
    gc.collect()
    assert threading.active_count() == before
    assert batch["image"].sum() > 0


def test_what_cannot_be_decoded_on_a_gpu_is_refused(photos, monkeypatch):
    def refused(match, **options):
        with pytest.raises(UsageError, match=match):
            both(photos, **options)

    refused("no field has images", transforms={})
    refused("no field has images", transforms={"image": shardkit.Resize(20)})
    refused("collate", collate=lambda samples: {"n": np.arange(len(samples))})
    refused("cache", cache="decoded")
    monkeypatch.undo()
    refused('device="cuda"')
