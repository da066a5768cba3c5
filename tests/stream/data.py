"""Small datasets for the tests of streaming, and how their batches are compared."""

from __future__ import annotations

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


def write_photos(out, to="wds", samples=37, shard=8, size=(48, 36)):
    """Images whose label is their number, in shards of 8, the last of which is shorter."""
    with shardkit.create(out, to=to, schema=PHOTOS, shard_samples=shard) as writer:
        for number in range(samples):
            sample = {"__key__": f"{number:04d}", "image": photo(number, size), "label": number}
            if number % 3:
                sample["caption"] = f"image {number}"
            writer.write(sample)
    return out


def write_tokens(out, to="arrow", samples=40, length=16, shard=9):
    """Blocks of tokens, uint16, that begin with their number."""
    schema = {"tokens": Array("uint16", (length,))}
    with shardkit.create(out, to=to, schema=schema, shard_samples=shard) as writer:
        for number in range(samples):
            tokens = (np.arange(length) * 7 + number).astype(np.uint16)
            writer.write({"__key__": f"{number:04d}", "tokens": tokens})
    return out


def write_documents(out, lengths, to="arrow", shard=50):
    """Documents of such lengths: the tokens of number n are n * 1000, n * 1000 + 1, ..."""
    schema = {"tokens": Array("uint32", (None,))}
    with shardkit.create(out, to=to, schema=schema, shard_samples=shard) as writer:
        for number, length in enumerate(lengths):
            tokens = (number * 1000 + np.arange(length)).astype(np.uint32)
            writer.write({"__key__": f"{number:04d}", "tokens": tokens})
    return out


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
