"""Pixels that are not 8-bit: what cannot be decoded without loss is refused, or said."""

import struct

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit.codecs import pixels
from shardkit.codecs.image import NotAnImageError, probe
from shardkit.codecs.pixels import to_rgb
from shardkit.errors import ShardkitWarning
from shardkit.inspection.inspect import inspect
from tests.codecs.sample_images import encoded

RAMP = np.arange(64).reshape(8, 8)
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # TIFF's SampleFormat


def tiff(values, kind):
    """An uncompressed TIFF of the values (height, width, channels) as they are."""
    height, width, channels = values.shape
    data, after = values.tobytes(), 8 + 2 + 12 * 10 + 4
    counts = {258: values.itemsize * 8, 339: kind}  # one per channel
    lists = b"".join(struct.pack(f"<{channels}H", *[n] * channels) for n in counts.values())
    tags = {256: width, 257: height, 259: 1, 262: 1, 277: channels, 278: height, 279: len(data)}
    tags[273] = after + len(lists)
    out = struct.pack("<2sHIH", b"II", 42, 8, len(tags) + len(counts))
    for tag, value in sorted({**tags, **counts}.items()):
        several = tag in counts and channels > 2
        place = after + 2 * channels * (tag == 339) if several else value * (1 + (1 << 16))
        place = place if tag in counts else value
        out += struct.pack("<HHII", tag, 3, channels if tag in counts else 1, place)
    return out + bytes(4) + lists + data


@pytest.mark.parametrize(
    ("dtype", "kind", "channels", "words"),
    [
        ("<i4", SIGNED, 1, "signed pixels"),
        ("<i2", SIGNED, 1, "signed pixels"),
        ("<u4", UNSIGNED, 1, "32-bit pixels"),
        ("<f4", FLOAT, 1, "floating-point pixels"),
        ("|u1", UNSIGNED, 5, "not damaged"),
        ("<f8", FLOAT, 1, "not damaged"),
    ],
)
def test_kinds_that_cannot_be_decoded_are_refused_by_name(dtype, kind, channels, words):
    data = tiff(np.repeat(RAMP[:, :, None], channels, axis=2).astype(dtype), kind)
    with pytest.raises(NotAnImageError, match=words):
        to_rgb(data)


def test_what_is_left_out_is_said_once(monkeypatch):
    monkeypatch.setattr(pixels, "_warned", set())
    deep = encoded(Image.fromarray((RAMP * 1000).astype(np.uint16)), "PNG")
    pages = [Image.fromarray(RAMP.astype(np.uint8) + n) for n in range(3)]
    several = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    for data, words, values in (
        (deep, "low byte is lost", (RAMP * 1000) >> 8),
        (tiff((RAMP[:, :, None] * 1000).astype("<u2"), UNSIGNED), None, (RAMP * 1000) >> 8),
        (several, "only the first is decoded", RAMP),
        (several, None, RAMP),
    ):
        if words is None:  # said before
            found = to_rgb(data)
        else:
            with pytest.warns(ShardkitWarning, match=words):
                found = to_rgb(data)
        assert (found == values[:, :, None]).all()
    assert probe(deep)[1:] == (8, 8)


@pytest.mark.filterwarnings("ignore::shardkit.errors.ShardkitWarning")
def test_what_would_be_left_out_is_counted(tmp_path):
    deep = encoded(Image.fromarray((RAMP * 1000).astype(np.uint16)), "PNG")
    pages = [Image.fromarray(RAMP.astype(np.uint8) + n) for n in range(3)]
    several = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    rows = [{"image": data} for data in (deep, deep, several, encoded(pages[0], "PNG"))]
    shardkit.convert(rows, "wds", tmp_path / "o", schema={"image": shardkit.Image()}, workers=0)
    expected = {"png (16-bit)": 2, "tiff (animated)": 1, "png": 1}
    assert inspect(tmp_path / "o", full=True)["media"]["image"]["formats"] == expected
    stats = shardkit.open(tmp_path / "o").stats()
    assert stats["fields"]["image"]["formats"] == expected
