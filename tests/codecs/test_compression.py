"""Compressed bytes: what four libraries make comes back in pieces; no bomb goes off (X4)."""

import bz2
import gzip
import lzma

import numpy as np
import pytest
import zstandard

import shardkit
from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of, decompressed
from shardkit.errors import DamagedError, SampleError
from shardkit.storage import fs
from tests.conftest import few

COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}
MIB = 1 << 20


def blocks(data):
    return [data[at : at + COMPRESSED_BLOCK] for at in range(0, len(data), COMPRESSED_BLOCK)]


@pytest.mark.parametrize("name", COMPRESS)
def test_members_come_back_in_pieces(name):
    noise = np.random.default_rng(0).bytes(50_000)
    data = noise + bytes(3 * MIB) + noise
    stored = COMPRESS[name](data) + COMPRESS[name](b"more")
    padding = bytes(-len(stored) % 512 + 512)
    stored += padding
    assert compression_of(stored) == name
    found = list(decompressed(blocks(stored), name))
    assert b"".join(found) == data + b"more"
    assert max(map(len, found)) <= (MIB if name != "zst" else len(data))
    for cut in (1, 10, len(stored) // 2):
        with pytest.raises(ValueError, match=r"."):
            list(decompressed(blocks(stored[: -len(padding)][:-cut]), name))


@pytest.mark.parametrize("name", few(COMPRESS, "gz", "zst"))
def test_a_bomb_stops_at_a_thousand_times(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "FREE_EXPANSION", 16 * MIB)  # to be quick
    bomb, made = COMPRESS[name](bytes(4 * MIB)) * 10, 0
    with pytest.raises(ValueError, match="over 1,000 times as many"):  # noqa: PT012
        for piece in decompressed(blocks(bomb), name):
            made += len(piece)
    assert made <= max(20 * MIB, 1000 * len(bomb) + MIB)
    (tmp_path / f"x.tar.{name}").write_bytes(bomb)
    with (
        pytest.warns(shardkit.ShardkitWarning, match="unpacked"),
        pytest.raises(DamagedError, match="over 1,000 times as many"),
    ):
        shardkit.open(tmp_path / f"x.tar.{name}")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / f"x.txt.{name}").write_bytes(COMPRESS[name](b"a" * 4 * MIB) * 10)
    with pytest.raises(SampleError) as error:
        shardkit.convert(tmp_path / "text", to="arrow", out=tmp_path / "out", workers=0)
    assert "over 1,000 times as many" in str(error.value)
