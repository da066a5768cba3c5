"""Small datasets for the tests of streaming, and how their batches are compared."""

import json
from collections import Counter

import numpy as np
import simplejpeg

import shardkit
from shardkit.schema import Array, Image, Int, Text

PHOTOS = {"image": Image(), "label": Int(), "caption": Text(optional=True)}


def photo(number, size=(48, 36)):
    """A JPEG without two parts alike."""
    width, height = size
    pixels = np.random.default_rng(number).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    return simplejpeg.encode_jpeg(pixels.repeat(4, 0).repeat(4, 1).copy(), quality=90)


def write(out, to, schema, samples, shard=8, **options):
    """A dataset of samples whose keys are their numbers."""
    with shardkit.create(out, to=to, schema=schema, shard_samples=shard, **options) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:04d}", **sample})
    return out


def write_photos(out, to="wds", samples=37, shard=8, size=(48, 36)):
    """Images whose label is their number, in shards of 8, the last of which is shorter."""
    captions = ({"caption": f"image {n}"} if n % 3 else {} for n in range(samples))
    made = ({"image": photo(n, size), "label": n, **more} for n, more in enumerate(captions))
    return write(out, to, PHOTOS, made, shard)


def write_tokens(out, to="arrow", samples=40, length=16, shard=9):
    """Blocks of tokens, uint16, that begin with their number."""
    made = ({"tokens": (np.arange(length) * 7 + n).astype(np.uint16)} for n in range(samples))
    return write(out, to, {"tokens": Array("uint16", (length,))}, made, shard)


def write_documents(out, lengths, to="arrow", shard=50):
    """Documents of such lengths: the tokens of number n are n * 1000, n * 1000 + 1, ..."""
    tokens = (np.arange(n * 1000, n * 1000 + m, dtype=np.uint32) for n, m in enumerate(lengths))
    made = ({"tokens": each} for each in tokens)
    return write(out, to, {"tokens": Array("uint32", (None,))}, made, shard)


def keys(batches):
    return [batch["__key__"] for batch in batches]


def real_keys(batches):
    """How often each sample came, without padding."""
    return Counter(
        key
        for batch in batches
        for key, valid in zip(batch["__key__"], batch["valid"], strict=True)
        if valid
    )


def with_states(loader, epochs):
    """The batches of some epochs, and the state behind each."""
    pairs = [(batch, loader.state_dict()) for _ in range(epochs) for batch in loader]
    return [batch for batch, _ in pairs], [state for _, state in pairs]


def same(one, other):
    """Whether two batches, or lists of them, hold the same values of the same types."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "dtype"):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and one == other


def through_json(state):
    return json.loads(json.dumps(state))
