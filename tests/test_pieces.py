"""Checksums made of the digests of pieces: of what is written, rewritten, and read again."""

import random

import pytest
import xxhash

import shardkit
from shardkit.conversion import publish
from shardkit.metadata import manifest as manifests
from shardkit.storage import checksums, fs
from shardkit.storage.checksums import DIGEST, PIECE, Hasher, checksum_of, count, listed
from tests.conftest import files_of

SIZES = (0, 1, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5)


def plainly(data: bytes) -> bytes:
    """The digests, by the definition."""
    parts = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    return b"".join(map(xxhash.xxh3_128_digest, parts))


@pytest.mark.parametrize("size", SIZES)
def test_digests_and_checksums_do_not_depend_on_how_the_bytes_come(size, tmp_path):
    chance = random.Random(size)
    data = chance.randbytes(size)
    for most in (size + 1, 300_000, 2 * PIECE):
        hasher, left = Hasher(), memoryview(data)
        while left:
            step = chance.randint(0, most)
            hasher.update(left[:step])
            left = left[step:]
        assert hasher.digests() == plainly(data)
    assert len(plainly(data)) == DIGEST * count(size)
    own = plainly(data) if count(size) == 1 else xxhash.xxh3_128_digest(plainly(data))
    assert checksums.checksum(data) == checksum_of(plainly(data)) == own.hex()
    assert checksums.checksum(data, checksums.WHOLE) == xxhash.xxh3_128_hexdigest(data)
    path = tmp_path / "x"
    fs.write_file(path, data)
    for _ in range(2):  # from writing, then from reading
        assert fs.digests(path) == plainly(data)
    assert listed(size) == (count(size) if size > PIECE else 0)
    # Bytes that are replaced are hashed again.
    for offset in (0, 10, PIECE - 2, 2 * PIECE, 3 * PIECE - 1):
        if offset + 5 <= size:
            changed = bytearray(data)
            with fs.create(path) as file:
                fs.write(file, [data])
                fs.rewrite(file, offset, b"other")
            changed[offset : offset + 5] = b"other"
            assert path.read_bytes() == changed
            assert fs._written[path] == (size, plainly(bytes(changed)))


# So many that a file has several pieces: of "wds" the index, too.
ROWS = {"wds": 20_000, "beton": 60, "lmdb": 60}


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("wds", "out"),
        pytest.param("wds", "train.tar", marks=pytest.mark.large),
        pytest.param("beton", "train.beton", marks=pytest.mark.large),
        ("lmdb", "out"),
    ],
)
def test_the_list_has_the_digests_of_all_files_of_several_pieces(format, name, tmp_path):
    """Also of an index."""
    with shardkit.create(tmp_path / "source", format, {"x": shardkit.Bytes()}) as out:
        for n in range(ROWS[format]):
            out.write({"x": bytes([n % 256]) * (40 if format == "wds" else 40_000)})
    target = tmp_path / name
    shardkit.convert(tmp_path / "source", format, target, workers=0)
    manifest = manifests.load(target)
    folder = manifests.folder_of(manifests.manifest_path(target))
    found = manifest.list_named(manifests.PIECES)
    assert found is not None
    beside = f"{name}.{manifests.PIECES}" if "." in name else manifests.PIECES
    assert found.name == f"__shardkit__/{beside}"
    every = [(folder / file.name).read_bytes() for file in manifest.all_files()]
    assert any(len(data) > PIECE for data in every)
    expected = b"".join(plainly(data) for data in every if len(data) > PIECE)
    assert (folder / found.name).read_bytes() == expected
    assert [checksums.checksum(data) for data in every] == [
        f.checksum for f in manifest.all_files()
    ]


@pytest.mark.parametrize(("format", "name"), [("wds", "out"), ("beton", "train.beton")])
def test_it_is_the_same_for_any_workers_and_after_an_interruption(
    format, name, tmp_path, monkeypatch
):
    """C1, where shards keep their files, and where they are joined."""
    monkeypatch.setattr("shardkit.conversion.cuts._COPIED_BYTES", 2 * PIECE)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 2 * PIECE)
    chance = random.Random(2)
    with shardkit.create(tmp_path / "source", "wds", {"x": shardkit.Bytes()}) as out:
        for _ in range(80):
            out.write({"x": chance.randbytes(90_000)})
    options = {"shard_samples": 20} if format == "wds" else {}

    def made(folder, workers):
        (tmp_path / folder).mkdir(exist_ok=True)
        out = tmp_path / folder / name
        shardkit.convert(tmp_path / "source", format, out, workers=workers, **options)
        return files_of(tmp_path / folder)

    expected = made("0", 0)
    assert sum(file.endswith(manifests.PIECES) for file in expected) == 1
    if format == "beton":
        assert manifests.load(tmp_path / "0" / name).shards[0].tasks == (0, 3)
        assert made("2", 2) == expected
    real, calls = publish.described, []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 2:  # the shards have their final names, and the list of pieces is there
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(publish, "described", dies)
        with pytest.raises(KeyboardInterrupt):
            made("killed", 0)
    assert made("killed", 0) == expected
    assert shardkit.verify(tmp_path / "killed" / name).sound
