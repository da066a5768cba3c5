"""LitData's chunks, which its own library writes and reads in a process of its own."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.codecs.array import dump_array
from shardkit.errors import DamagedError, FormatError, SampleError, ShardkitError, UsageError
from shardkit.formats import get_format, offsets
from shardkit.formats.base import ShardSpec
from shardkit.formats.litdata.nested import load_json
from shardkit.formats.litdata.values import serializer
from shardkit.formats.litdata.writer import LitDataWriter
from shardkit.schema import Array, Audio, Bytes, Image, Images, Int, Json, Schema
from shardkit.testing import (
    EVERYTHING,
    FormatContract,
    assert_same,
    everything,
    make_audio,
    make_image,
    write_shard,
)
from tests import clients
from tests.conftest import files_of

LITDATA = get_format("litdata")
# A sample of each type that LitData has something for, with arrays of all kinds.
RICH = Schema(
    {
        **EVERYTHING,
        "images": Images(),
        "sound": Audio(),
        "row": Array("<u2", (None,)),
        "big": Array(">i4", (2,)),
        "names": Array("<U3", (2,)),
        "any": Array(),
    }
)


def rich(number: int) -> dict[str, Any]:
    return {
        **everything(number),
        "images": [make_image(number), make_image(number + 1, "PNG")],
        "sound": make_audio(number),
        "row": np.arange(number, dtype="<u2"),
        "big": np.array([number, -1], ">i4"),
        "names": np.array(["a", f"{number}"], "<U3"),
        "any": np.full((1, number), number, "<f8"),
    }


def dataset(out: Path, samples: list[Any], schema: Any = RICH, **options: Any) -> Path:
    with shardkit.create(out, "litdata", schema, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return out


def items_of(path: Path) -> list[bytes]:
    """The bytes of every sample of a plain chunk."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("<I", data)
    ends = struct.unpack_from(f"<{count + 1}I", data, 4)
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def values_of(item: bytes) -> list[bytes]:
    """Its values: as many as make the sizes fill it; all samples have all fields."""
    for count in range(1, len(item) // 4 + 1):
        sizes = struct.unpack_from(f"<{count}I", item)
        if 4 * count + sum(sizes) == len(item):
            ends = [*itertools.accumulate(sizes, initial=4 * count)]
            return [item[a:b] for a, b in itertools.pairwise(ends)]
    raise AssertionError("its sizes do not fill it")


class TestLitData(FormatContract):
    tested = LITDATA
    provides = frozenset({"spans"})
    gaps: ClassVar = {
        "test_without_its_layout_a_shard_still_reads": "names and types are in index.json alone"
    }

    def independent_keys(self, path: Path) -> list[str]:
        """The first value of each sample, behind the sizes of all."""
        found = []
        for item in items_of(path):
            complete = item[:-11] if item.endswith(b'["caption"]') else item
            found.append(values_of(complete)[0].decode())
        return found


# --- LitData itself ------------------------------------------------------------------------------

# Its images need torchvision, which the tests do not install: Pillow decodes them instead.
_START = """
import io, json, sys, types, zlib
import numpy as np, torch, PIL.Image
vision, inner = types.ModuleType("torchvision"), types.ModuleType("torchvision.io")
def decode(data, mode):
    pixels = np.array(PIL.Image.open(io.BytesIO(data.numpy().tobytes())).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)
inner.decode_jpeg = inner.decode_image = decode
inner.ImageReadMode = types.SimpleNamespace(RGB="RGB")
sys.modules |= {"torchvision": vision, "torchvision.io": inner}
"""
_SCRIPT = """
import litdata
def plain(value):
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, (bytes, memoryview)):
        return f"bytes {zlib.crc32(value)}"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = np.ascontiguousarray(value)
        return f"{value.dtype} {value.shape} {zlib.crc32(value.tobytes())}"
    return value
dataset = litdata.StreamingDataset(sys.argv[1])
samples = [{name: plain(value) for name, value in dataset[n].items()} for n in range(len(dataset))]
epochs = []
shuffled = litdata.StreamingDataset(sys.argv[1], shuffle=True)
loader = litdata.StreamingDataLoader(
    shuffled, batch_size=4, num_workers=2, collate_fn=lambda batch: [s["__key__"] for s in batch]
)
whole = litdata.StreamingDataset(sys.argv[2], shuffle=True)
collated = litdata.StreamingDataLoader(whole, batch_size=4, num_workers=2)
for epoch in range(2):
    epochs.append([key for batch in loader for key in batch])
batches = [[batch["blob"], batch["n"].tolist()] for batch in collated]
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter
def write(name, samples, **options):
    writer = BinaryWriter(f"{sys.argv[3]}/{name}", **{"chunk_size": 4, **options})
    for number, sample in enumerate(samples):
        writer[number] = sample
    writer.done()
    writer.merge()
def image(n):
    file = io.BytesIO()
    PIL.Image.new("RGB", (8, 6), (n * 20, 9, 9)).save(file, "JPEG")
    return PIL.Image.open(io.BytesIO(file.getvalue()))
def row(n):
    return {
        "image": image(n), "raw": PIL.Image.new("RGB", (3, 2), (n, 0, 1)), "n": n, "x": n / 2,
        "good": n % 2 == 0, "text": f"t{n}", "blob": bytes([n] * n),
        "row": np.arange(n, dtype=np.uint16), "table": np.ones((n, 2), np.float32),
        "bare": torch.arange(n), "tensor": torch.ones((2, n), dtype=torch.float16),
        "deep": {"a": [n, (n + 1, "z")], "b": [[1.5, 2.5]]}, "images": [image(n), image(n + 1)],
        "boxes": [[1, 2, n], [3.5]], "people": [{"a": 1, "b": None}, {"a": 2, "b": "x"}],
        "flags": [True], "words": ["x", "é"], "none": [], "object": {"k": "y", "z": [1]},
    }
for level in ("", "batch", "sample", "chunk"):
    how = {"compression": "zstd", "compression_level": level, "compression_batch_size": 3}
    write(level or "plain", map(row, range(10)), **(how if level else {}))
rows = [{"text": f"t{n}", "n": n, "d": {"a": n}, "x": None if n % 2 else 1} for n in range(10)]
write("rows", rows)
write("packed-rows", rows, compression="zstd")
tokens = [torch.arange(n * 10, dtype=torch.int32).to(torch.uint16) for n in range(1, 11)]
write("tokens", tokens, chunk_size=300, item_loader=TokensLoader(block_size=10))
write("single", range(10))
write("tuples", [(n, str(n)) for n in range(10)])
write("pickles", [{"n": n, "set": {n}, "blob": b"x"} for n in range(10)])
print(json.dumps([samples, epochs, [[each.hex() for each in b] for b, _ in batches],
                  [n for _, n in batches]]))
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("theirs")


@pytest.fixture(scope="module")
def read(theirs: Path) -> Any:
    """What LitData, in one process, reads of two datasets of ours; it writes some of its own."""
    out = dataset(theirs / "out", [rich(n) for n in range(20)], shard_samples=6)
    some = [{"__key__": f"{n}", "blob": bytes([n] * n), "n": n} for n in range(20)]
    small = dataset(theirs / "small", some, {"blob": Bytes(), "n": Int()})
    return clients.run("litdata", _START + _SCRIPT, out, small, theirs)


def seen(value: Any, decoded: bool) -> Any:
    """A value as the script above prints it."""
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [seen(each, decoded) for each in value]
    if isinstance(value, bytes) and decoded:
        pixels = np.array(PIL.Image.open(io.BytesIO(value)).convert("RGB")).transpose(2, 0, 1)
        return seen(np.ascontiguousarray(pixels), False)
    if isinstance(value, bytes):
        return f"bytes {zlib.crc32(value)}"
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "U":
            return seen(dump_array(value), False)
        little = value.astype(value.dtype.newbyteorder("<"))
        return f"{little.dtype} {little.shape} {zlib.crc32(little.tobytes())}"
    return value


@pytest.mark.large
@pytest.mark.xdist_group("litdata")
def test_litdata_reads_every_value_in_order_and_shuffled_by_processes(read: Any) -> None:
    found, epochs, blobs, numbers = read
    samples = [rich(n) for n in range(20)]
    for sample, value in zip(samples, found, strict=True):
        expected = {n: seen(v, n in ("image", "images")) for n, v in sample.items()}
        assert value == {"caption": "", **expected}
        assert list(value) == ["__key__", *RICH]
    keys = [sample["__key__"] for sample in samples]
    assert [sorted(epoch) for epoch in epochs] == [keys, keys]
    assert epochs[0] != epochs[1]
    together = dict(zip(itertools.chain(*numbers), itertools.chain(*blobs), strict=True))
    assert together == {n: (bytes([n] * n)).hex() for n in range(20)}


@pytest.mark.large
@pytest.mark.xdist_group("litdata")
@pytest.mark.usefixtures("read")
def test_what_litdata_writes_is_read(theirs: Path, tmp_path: Path) -> None:
    plain = [*shardkit.open(theirs / "plain")]
    assert len(plain) == 10
    for n, sample in enumerate(plain):
        assert sample.pop("__key__") == f"chunk-0-{n // 4}/{n % 4:09d}"
        assert sample.pop("image")[:3] == b"\xff\xd8\xff"
        assert [image[:3] for image in sample.pop("images")] == [b"\xff\xd8\xff"] * 2
        assert sample.pop("raw")[:11] == b"P6\n3 2\n255\n"
        dtypes = {"row": "<u2", "table": "<f4", "bare": "<i8", "tensor": "<f2"}
        arrays = {name: sample.pop(name) for name in dtypes}
        assert {name: array.dtype.str for name, array in arrays.items()} == dtypes
        assert arrays["row"].tolist() == arrays["bare"].tolist() == [*range(n)]
        assert (arrays["table"].shape, arrays["tensor"].shape) == ((n, 2), (2, n))
        assert sample == {
            "n": n, "x": n / 2, "good": n % 2 == 0, "text": f"t{n}", "blob": bytes([n] * n),
            "deep/a/0": n, "deep/a/1/0": n + 1, "deep/a/1/1": "z", "deep/b": [[1.5, 2.5]],
            "boxes": [[1, 2, n], [3.5]], "people": [{"a": 1, "b": None}, {"a": 2, "b": "x"}],
            "flags": [True], "words": ["x", "é"], "none": [], "object/k": "y", "object/z": [1],
        }  # fmt: skip
    whole = [*shardkit.open(theirs / "plain")]
    for way in ("batch", "sample", "chunk"):
        for sample, expected in zip(shardkit.open(theirs / way), whole, strict=True):
            assert_same(sample, expected)
    for way in ("rows", "packed-rows"):
        for n, sample in enumerate(shardkit.open(theirs / way)):
            assert sample.pop("__key__") == f"chunk-0-{n // 4}/{n % 4:09d}"
            assert sample == {"text": f"t{n}", "n": n, "d": {"a": n}} | ({} if n % 2 else {"x": 1})
    tokens = shardkit.open(theirs / "tokens")
    assert dict(tokens.schema) == {"value": Array("<u2", (None,))}
    assert [len(sample["value"]) for sample in tokens] == [n * 10 for n in range(1, 11)]
    assert [sample["value"] for sample in shardkit.open(theirs / "single")] == [*range(10)]
    assert shardkit.open(theirs / "tuples")[7]["1"] == "7"
    with pytest.raises(FormatError, match="pickled") as error:
        shardkit.open(theirs / "pickles")
    assert "--drop set" in (error.value.fix or "")
    shardkit.convert(theirs / "pickles", "wds", tmp_path / "wds", drop=["set"], workers=0)
    assert shardkit.open(tmp_path / "wds")[3]["n"] == 3


# --- datasets ------------------------------------------------------------------------------------


def test_values_are_equal_on_and_back_and_bytes_too(tmp_path: Path) -> None:
    schema = Schema({n: kind for n, kind in RICH.items() if n not in ("any", "images")})
    samples = [{k: v for k, v in rich(n).items() if k in {"__key__", *schema}} for n in range(12)]
    out = dataset(tmp_path / "out", samples, schema, shard_samples=5)
    assert {"chunk-0-00000.bin", "chunk-0-00001.bin", "chunk-0-00002.bin", "index.json"} < set(
        files_of(out)
    )
    shardkit.convert(out, "wds", tmp_path / "wds", workers=0)
    back = tmp_path / "back"
    shardkit.convert(tmp_path / "wds", "litdata", back, shard_samples=5, workers=0)
    for sample, expected in zip(shardkit.open(back), samples, strict=True):
        assert_same(sample, schema.check(expected))
    assert shardkit.verify(back).sound
    for name in ("chunk-0-00000.bin", "index.json"):
        assert (out / name).read_bytes() == (back / name).read_bytes()


def test_fields_that_may_be_absent_and_never_are(tmp_path: Path) -> None:
    """What a writer takes for optional is not, in the end: LitData reads the same values."""
    lines = "".join(json.dumps({"text": f"t{n}", "n": n}) + "\n" for n in range(5))
    (tmp_path / "a.jsonl").write_text(lines)
    shardkit.convert(tmp_path / "a.jsonl", "litdata", tmp_path / "out", workers=0)
    found = shardkit.open(tmp_path / "out")
    assert [sample["text"] for sample in found] == [f"t{n}" for n in range(5)]
    names = json.loads((tmp_path / "out/index.json").read_text())["config"]["data_format"]
    for item in items_of(tmp_path / "out/chunk-0-00000.bin"):
        assert len(values_of(item)) == len(names)


def test_without_its_manifest_index_json_tells_types_and_classes(tmp_path: Path) -> None:
    samples = [everything(n) for n in range(5)]
    out = dataset(tmp_path / "out", samples, EVERYTHING)
    shutil.rmtree(out / "__shardkit__")
    found = shardkit.open(out)
    assert (dict(found.schema), found.ours) == (dict(EVERYTHING), True)
    for sample, expected in zip(found, samples, strict=True):
        assert_same(sample, expected)


def test_an_index_json_of_others_is_none_of_litdata(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"chunks": [], "other": 1}')
    assert LITDATA.listed(tmp_path) is None
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    assert LITDATA.listed(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"encryption": {"level": "chunk"}}, FormatError, "encrypted"),
        ({"item_loader": "ParquetLoader"}, FormatError, "Parquet"),
        ({"item_loader": "TemporalArrayLoader"}, FormatError, "another loader"),
        ({"data_spec": "[1, {}]"}, DamagedError, "pytree"),
        ({"data_spec": "[" * 100_000}, DamagedError, "index is damaged"),
        ({"data_format": ["str"]}, DamagedError, "index is damaged"),
        ({"data_format": 3}, DamagedError, "data_format"),
    ],
)
def test_an_index_that_cannot_be_read_says_why(
    tmp_path: Path, change: dict[str, Any], error: type[ShardkitError], match: str
) -> None:
    out = dataset(tmp_path / "out", [{"__key__": "a", "n": 1}], {"n": Int()})
    index = json.loads((out / "index.json").read_text())
    del index["shardkit"]
    index["config"] |= change
    (out / "index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=match) as raised:
        LITDATA.open(out / "chunk-0-00000.bin")
    assert raised.value.where["path"] == out / "index.json"


def test_a_chunk_without_its_index_is_named(tmp_path: Path) -> None:
    out = dataset(tmp_path / "out", [{"__key__": "a", "n": 1}], {"n": Int()})
    text = (out / "index.json").read_text().replace('"chunk_size": 1', '"chunk_size": 2')
    index = json.loads(text)
    del index["shardkit"]
    (out / "index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match=r"as many samples as index\.json says"):
        LITDATA.open(out / "chunk-0-00000.bin")
    (out / "index.json").unlink()
    with pytest.raises(FormatError, match=r"index\.json beside it"):
        LITDATA.open(out / "chunk-0-00000.bin")


# --- writing -------------------------------------------------------------------------------------


def test_more_than_4_gib_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="cannot be that large"):
        shardkit.create(tmp_path / "out", "litdata", {"n": Int()}, shard_size="5GB")
    monkeypatch.setattr(offsets, "LARGEST", 1000)
    writer = LITDATA.create(tmp_path / "x.bin", ShardSpec(Schema({"blob": Bytes()})))
    with pytest.raises(SampleError, match="32-bit offsets") as error:
        writer.write({"__key__": "a", "blob": bytes(1000)})
    assert error.value.where == {"key": "a"}
    assert writer.write({"__key__": "a", "blob": bytes(900)})
    assert not writer.write({"__key__": "b", "blob": bytes(100)})


@pytest.mark.parametrize("room", [1 << 16, 400])
def test_large_chunks_have_room_for_offsets_or_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(offsets, "_IN_MEMORY", 1000)
    monkeypatch.setattr(LitDataWriter, "room", room)
    samples = [{"__key__": f"{n}", "blob": bytes([n] * n)} for n in range(200)]
    path = tmp_path / "x.bin"
    reader = write_shard(LITDATA, path, Schema({"blob": Bytes()}), samples)
    for number, sample in enumerate(samples):
        assert_same(reader[number], sample)
    assert [each.name for each in tmp_path.iterdir()] == ["x.bin"]
    assert path.read_bytes()[4:8] == struct.pack("<I", max(room, 4 * 202))


def test_what_litdata_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as refused:
        LITDATA.layout(Schema({"images": Images(optional=True)}))
    assert refused.value.fix
    writer = LITDATA.create(tmp_path / "x", ShardSpec(Schema({"a": Array(), "i": Images()})))
    image = [make_image(1)]
    for field, value in (("a", np.array(["text"])), ("i", [])):
        sample: dict[str, Any] = {"__key__": "k", "a": np.zeros(2), "i": image, field: value}
        with pytest.raises(SampleError, match="LitData") as error:
            writer.write(sample)
        assert error.value.where == {"key": "k", "field": field}
    notes = LITDATA.notes(Schema({"image": Image(optional=True), "names": Array("<U3")}))
    assert [note.split(":")[0] for note in notes[:2]] == ["'image'", "'names'"]
    assert "missing" in notes[2]


# --- lists and objects ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x01", b"\x0c", b"\x05\xff\xff\xff\xff",
        b"\x07\x09\0\0\0abc", b"\x05\1\0\0\0" b"\1\0\0\0a" * 300, b"\x09" + b"\xff" * 8, b"NaN",
        b"\x06\1\0\0\0\1\0\0\0\1\0\0\0a\x33", b"[1",
    ],
)  # fmt: skip
def test_damaged_lists_and_objects_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        load_json(data)


def test_json_of_ours_is_text_and_of_litdata_binary(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    text = shardkit.sample.JsonText('\n\t {"a": [1.50, null]}')
    reader = write_shard(LITDATA, path, Schema({"j": Json()}), [{"__key__": "a", "j": text}])
    assert reader.sample(0, json_text=True)["j"] == '{"a": [1.50, null]}'
    assert values_of(items_of(path)[0])[1] == b'{"a": [1.50, null]}'
    assert load_json(b"\x02\2\0\0\0" + struct.pack("<2q", 5, -6)) == "[5,-6]"


def test_of_a_large_sample_only_what_is_asked_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema({"blob": Bytes(), "n": Int(), "more": Json(optional=True)})
    samples = [{"__key__": f"{n}", "blob": bytes(200_000), "n": n} for n in range(2)]
    reader = write_shard(LITDATA, tmp_path / "x.bin", schema, samples)
    read: list[int] = []
    real = type(reader.source)._read
    monkeypatch.setattr(
        type(reader.source),
        "_read",
        lambda self, at, size: read.append(size) or real(self, at, size),  # type: ignore[func-returns-value]
    )
    assert reader.sample(1, ["n", "more"]) == {"__key__": "1", "n": 1}
    assert reader.keys() == ["0", "1"]
    assert max(read) < 100
    offset = reader.offset(1, "n")
    assert offset is not None
    assert (tmp_path / "x.bin").read_bytes()[offset : offset + 8] == struct.pack("<q", 1)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0, 5)])
@pytest.mark.parametrize(("code", "dtype"), [(0, "<f4"), (1, "<f4"), (11, "|u1"), (17, "<i8")])
def test_tensors_of_both_byte_orders_are_read(
    order: str, shape: tuple[int, ...], code: int, dtype: str
) -> None:
    """LitData wrote the integers before a tensor little-endian up to 0.2.29, then big-endian."""
    value = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    head = struct.pack(f"{order}{2 + len(shape)}I", code, len(shape), *shape)
    found = serializer("tensor")[1](head + value.tobytes())
    assert (found.dtype, found.shape) == (value.dtype, shape)
    assert (found == value).all()
