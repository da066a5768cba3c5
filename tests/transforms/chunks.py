"""Samples and how the tests send them through transforms."""

import copy
import functools
from collections import namedtuple
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image

from shardkit.schema import Image, Schema
from shardkit.transforms import Draws, Transforms
from tests.codecs.sample_images import encoded, photo_like
from tests.stream.data import same

Sample = dict[str, Any]
Pixels = npt.NDArray[np.uint8]

IMAGES = Schema({"image": Image()})
BOTH = Schema({"image": Image(), "mask": Image()})


def file_of(pixels, format="PNG", **options):
    return encoded(PIL.Image.fromarray(pixels), format, **options)


def photos(count, format="JPEG"):
    """Images of many sizes."""
    return [{"__key__": f"{n}", "image": _photo(n, format)} for n in range(count)]


@functools.cache
def _photo(number, format):
    size = (60 + 17 * number % 50, 50 + 23 * number % 60)
    return file_of(photo_like(number, *size), format)


def draws_of(count, seed=0, turn=0, first=0):
    return Draws(seed, np.full(count, turn), np.arange(first, first + count))


def begun(transforms, count):
    """The memory of a batch, full of a value that nobody wants."""
    known = transforms.outputs().items()
    return {name: np.full((count, *shape), 77, dtype) for name, (shape, dtype) in known}


Encoded = namedtuple("Encoded", ["data", "starts", "sizes"])


def in_one_buffer(values):
    """Values one after the other, with a byte between them; None is absent."""
    sizes = np.array([-1 if value is None else len(value) for value in values], np.int64)
    starts = np.cumsum(1 + sizes.clip(0)) - sizes.clip(0)
    return Encoded(b"".join(b"?" + (value or b"") for value in values), starts, sizes)


def directly(transforms, samples, draws):
    """What becomes of samples without them: batches and lists by field, and which are done.

    None if they are needed.
    """
    direct = transforms.direct()
    if direct is None:
        return None
    columns = {name: [s.get(name) for s in samples] for name in transforms.fields}
    for one in direct:
        values = columns[one.fields[0]]
        if one.size is None:
            columns[one.fields[0]] = in_one_buffer(values)
        elif len({value.shape for value in values}) == 1:
            columns[one.fields[0]] = np.stack(values)
        else:
            return None
    out = begun(transforms, len(samples))
    done = np.logical_and.reduce([one.apply(columns, draws, out) for one in direct])
    return {**columns, **out}, done


def applied(steps, samples, schema=IMAGES, *, chunk=None, seed=0, turn=0):
    """What becomes of samples, chunk by chunk, also in one call; raises the first error."""
    made = []
    for first in range(0, len(samples), chunk or len(samples)):
        some = copy.deepcopy(samples[first : first + (chunk or len(samples))])
        transforms, draws = Transforms(steps, schema), draws_of(len(some), seed, turn, first)
        out, direct = begun(transforms, len(some)), directly(transforms, some, draws)
        errors = transforms.apply(some, draws, out)
        rows = [{**s, **{n: rows[k] for n, rows in out.items()}} for k, s in enumerate(some)]
        for row, sample in enumerate(rows):
            if direct is not None and direct[1][row]:
                assert row not in errors
                found = {name: direct[0][name][row] for name in transforms.fields}
                assert_same([sample | found], [sample])
        for error in errors.values():
            raise error
        made += rows
    return made


def assert_same(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, list):
                assert value == other[name]
            else:
                np.testing.assert_array_equal(value, other[name])
            if isinstance(value, np.ndarray):
                assert value.dtype == other[name].dtype


def batches_any_way(make, field):
    """An epoch's batches, which are those of any ranks and threads, and of a run that went on."""
    whole = list(make(threads=0))
    assert same(list(make(threads=3)), whole)
    ranks = [make(rank=rank, world_size=2) for rank in range(2)]
    for both, batch in zip(zip(*ranks, strict=True), whole, strict=True):
        assert same(np.concatenate([half[field] for half in both]), batch[field].numpy())
    stopped, continued = make(), make()
    next(iter(stopped))
    continued.load_state_dict(stopped.state_dict())
    assert same(list(continued), whole[1:])
    return whole
