"""Masks of polygons and RLE, bit for bit as pycocotools makes them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit import UsageError
from shardkit.codecs import rle, shapes
from tests.boxed import compressed
from tests.conftest import examples
from tests.sources.real import refused

# Of pycocotools, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIDES = st.integers(1, 40)
# Whole, half and other coordinates, also outside of the image.
NUMBERS = st.one_of(
    st.integers(-5, 45), st.integers(-10, 90).map(lambda n: n / 2), st.floats(-30, 70)
)
POLYGONS = st.lists(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=9), min_size=1, max_size=3
)


@settings(max_examples=examples(200))
@given(POLYGONS, SIDES, SIDES)
def test_polygons_as_pycocotools_fills_them(points, height, width):
    theirs = pytest.importorskip("pycocotools.mask")
    polygons = [[float(v) for point in polygon for v in point] for polygon in points]
    expected = theirs.decode(theirs.merge(theirs.frPyObjects(polygons, height, width)))
    assert np.array_equal(shardkit.masks([polygons], height, width), expected[None])


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32), SIDES, st.integers(1, 400), st.sampled_from([0, 0.02, 0.5, 1]))
def test_rle_as_pycocotools_packs_it(seed, height, width, share):
    theirs = pytest.importorskip("pycocotools.mask")
    mask = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    packed = theirs.encode(np.asfortranarray(mask))
    text = {"size": [height, width], "counts": packed["counts"].decode()}
    plain = rle.encode(mask, {"counts": []})
    assert rle.encode(mask, text) == text
    assert compressed(plain["counts"]) == text["counts"]
    assert np.array_equal(shardkit.masks([text, plain, None], height, width)[:2], [mask, mask])


def test_what_is_not_a_mask_of_the_size_is_refused():
    square = {"size": [2, 2], "counts": [1, 3]}
    assert shardkit.masks([square, [], None, [[]]], 2, 2).sum(axis=(1, 2)).tolist() == [3, 0, 0, 0]
    assert shardkit.masks([], 2, 3).shape == (0, 2, 3)
    for value, found in (
        ([square], "2 x 2 pixels on an image of 3 x 2"),
        ({}, "dict {}"),
        (["x"], "str 'x'"),
        ([{"size": [2, 2], "counts": [-1, 5]}], "do not add up"),
        ([{"size": [2, 2], "counts": [10**30]}], "do not add up"),
        ([{"size": [2, 2], "counts": "0" * 3}], "do not add up"),
        ([{"size": [2, 2], "counts": "o"}], "not compressed RLE"),
        ([{"size": [2, 2], "counts": "o" * 20 + "0"}], "not compressed RLE"),
        ([[[0, 0, 10**400, 1]]], "too large"),
    ):
        error = refused(UsageError, "not the segmentation of objects", shardkit.masks, value, 2, 3)
        assert found in str(error.found)


def test_masks_and_outlines_have_bounds(monkeypatch):
    far = [[-1e300, 0, 1e300, 0, 1e300, 5, -1e300, 5]]
    assert shardkit.masks([far], 9, 7)[0].sum(axis=1).tolist() == [7] * 5 + [0] * 4
    error = refused(UsageError, None, shardkit.masks, [None], 1 << 20, 1 << 20)
    assert "1 masks of 1,048,576 x 1,048,576" in str(error.found)
    square = {"size": [2, 2], "counts": [4]}
    monkeypatch.setattr(shapes, "_MOST", 9)
    sample = {"segmentation": [square] * 2}
    assert shapes.moved_shapes(sample, 6, (2, 2)) == sample
    with pytest.raises(shapes.SegmentationError, match="3 masks of 2 x 2 pixels"):
        shapes.moved_shapes({"segmentation": [square] * 3}, 6, (2, 2))
    monkeypatch.setattr(shapes, "_CROSSINGS", 8)
    refused(UsageError, None, shardkit.masks, [[[0, 0, 9, 0, 0, 9]]], 9, 9)
