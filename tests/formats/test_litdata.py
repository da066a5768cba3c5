"""LitData's chunks, which its own library writes and reads in a process of its own."""

import io
import itertools
import json
import struct
from typing import ClassVar

import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.codecs.array import dump_array
from shardkit.errors import DamagedError, FormatError, SampleError
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.formats.litdata.values import load_json, serializer
from shardkit.formats.testing_samples import assert_same, make_image, write_shard
from shardkit.sample import JsonText
from shardkit.schema import Array, Bytes, Image, Images, Int, Json, Schema
from shardkit.testing import FormatContract
from tests import clients
from tests.formats.loaders import PLAIN, plain, rich
from tests.formats.refusals import refused

LITDATA = get_format("litdata")
RICH, rich = rich("pair sound row big names any")


def dataset(out, samples, schema=RICH, **options):
    with shardkit.create(out, "litdata", schema, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return out


def items_of(path):
    """The bytes of every sample of a plain chunk."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("<I", data)
    ends = struct.unpack_from(f"<{count + 1}I", data, 4)
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def values_of(item):
    """Its values: as many as make the sizes fill it; all samples have all fields."""
    for count in range(1, len(item) // 4 + 1):
        sizes = struct.unpack_from(f"<{count}I", item)
        if 4 * count + sum(sizes) == len(item):
            ends = [*itertools.accumulate(sizes, initial=4 * count)]
            return [item[a:b] for a, b in itertools.pairwise(ends)]
    raise AssertionError("its sizes do not fill it")


class TestLitData(FormatContract):
    tested = LITDATA
    provides = frozenset({"plan", "spans"})
    gaps: ClassVar = {
        "test_without_its_layout_a_shard_still_reads": "names and types are in index.json alone"
    }

    def independent_keys(self, path):
        """The first value of each sample, behind the sizes of all."""
        found = []
        for item in items_of(path):
            complete = item[:-11] if item.endswith(b'["caption"]') else item
            found.append(values_of(complete)[0].decode())
        return found


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
def theirs(tmp_path_factory):
    return tmp_path_factory.mktemp("theirs")


@pytest.fixture(scope="module")
def read(theirs):
    """What LitData, in one process, reads of two datasets of ours; it writes some of its own."""
    out = dataset(theirs / "out", [rich(n) for n in range(20)], shard_samples=6)
    some = [{"__key__": f"{n}", "blob": bytes([n] * n), "n": n} for n in range(20)]
    small = dataset(theirs / "small", some, {"blob": Bytes(), "n": Int()})
    return clients.run("litdata", _START + PLAIN + _SCRIPT, out, small, theirs)


def seen(name, value):
    """A value as the script above prints it."""
    if name in ("image", "pair"):
        many = value if isinstance(value, list) else [value]
        images = [np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB")) for data in many]
        pixels = [plain(image.transpose(2, 0, 1)) for image in images]
        return pixels if isinstance(value, list) else pixels[0]
    return plain(dump_array(value) if name == "names" else value)


@pytest.mark.large
@pytest.mark.xdist_group("litdata")
def test_litdata_reads_every_value_in_order_and_shuffled_by_processes(read):
    found, epochs, blobs, numbers = read
    samples = [rich(n) for n in range(20)]
    for sample, value in zip(samples, found, strict=True):
        expected = {name: seen(name, value) for name, value in sample.items()}
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
def test_what_litdata_writes_is_read(theirs, tmp_path):
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


def test_fields_that_may_be_absent_and_never_are(tmp_path):
    """What a writer takes for optional is not, in the end: LitData reads the same values."""
    lines = "".join(json.dumps({"text": f"t{n}", "n": n}) + "\n" for n in range(5))
    (tmp_path / "a.jsonl").write_text(lines)
    shardkit.convert(tmp_path / "a.jsonl", "litdata", tmp_path / "out", workers=0)
    found = shardkit.open(tmp_path / "out")
    assert [sample["text"] for sample in found] == [f"t{n}" for n in range(5)]
    names = json.loads((tmp_path / "out/index.json").read_text())["config"]["data_format"]
    for item in items_of(tmp_path / "out/chunk-0-00000.bin"):
        assert len(values_of(item)) == len(names)


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
        (2, DamagedError, r"as many samples as index\.json says"),
        (None, FormatError, r"index\.json beside it"),
    ],
)
def test_an_index_that_cannot_be_read_says_why(tmp_path, change, error, match):
    out = dataset(tmp_path / "out", [{"__key__": "a", "n": 1}], {"n": Int()})
    path = out / "index.json"
    index = json.loads(path.read_text())
    del index["shardkit"]
    if isinstance(change, dict):
        index["config"] |= change
    else:
        index["chunks"][0]["chunk_size"] = change
    path.write_text(json.dumps(index))
    if change is None:
        path.unlink()
    chunk = out / "chunk-0-00000.bin"
    with refused(error, match, path=path if isinstance(change, dict) else chunk):
        LITDATA.open(chunk)


def test_what_litdata_cannot_hold_is_refused(tmp_path):
    with pytest.raises(FormatError) as error:
        LITDATA.layout(Schema({"images": Images(optional=True)}))
    assert error.value.fix
    writer = LITDATA.create(tmp_path / "x", ShardSpec(Schema({"a": Array(), "i": Images()})))
    for field, value in (("a", np.array(["text"])), ("i", [])):
        sample = {"__key__": "k", "a": np.zeros(2), "i": [make_image(1)], field: value}
        with refused(SampleError, "LitData", where={"key": "k", "field": field}):
            writer.write(sample)
    notes = LITDATA.notes(Schema({"image": Image(optional=True), "names": Array("<U3")}))
    assert [note.split(":")[0] for note in notes[:2]] == ["'image'", "'names'"]
    assert "missing" in notes[2]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x01", b"\x0c", b"\x05\xff\xff\xff\xff",
        b"\x07\x09\0\0\0abc", b"\x05\1\0\0\0" b"\1\0\0\0a" * 300, b"\x09" + b"\xff" * 8, b"NaN",
        b"\x06\1\0\0\0\1\0\0\0\1\0\0\0a\x33", b"[1",
    ],
)  # fmt: skip
def test_damaged_lists_and_objects_are_refused(data):
    with pytest.raises((ValueError, struct.error)):
        JsonText.checked(load_json(data))


def test_json_of_ours_is_text_and_of_litdata_binary(tmp_path):
    path = tmp_path / "x.bin"
    text = JsonText('\n\t {"a": [1.50, null]}')
    reader = write_shard(LITDATA, path, Schema({"j": Json()}), [{"__key__": "a", "j": text}])
    assert reader.sample(0, json_text=True)["j"] == '{"a": [1.50, null]}'
    assert values_of(items_of(path)[0])[1] == b'{"a": [1.50, null]}'
    assert load_json(b"\x02\2\0\0\0" + struct.pack("<2q", 5, -6)) == "[5,-6]"


def test_of_a_large_sample_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    schema = Schema({"blob": Bytes(), "n": Int(), "more": Json(optional=True)})
    samples = [{"__key__": f"{n}", "blob": bytes(200_000), "n": n} for n in range(2)]
    reader = write_shard(LITDATA, tmp_path / "x.bin", schema, samples)
    read, source = [], type(reader.source)
    real = source.read

    def noted(self, at, size):
        read.append(size)
        return real(self, at, size)

    monkeypatch.setattr(source, "read", noted)
    assert reader.sample(1, ["n", "more"]) == {"__key__": "1", "n": 1}
    assert reader.keys() == ["0", "1"]
    assert max(read) < 100
    offset = reader.offset(1, "n")
    assert (tmp_path / "x.bin").read_bytes()[offset : offset + 8] == struct.pack("<q", 1)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0, 5)])
@pytest.mark.parametrize(("code", "dtype"), [(0, "<f4"), (1, "<f4"), (11, "|u1"), (17, "<i8")])
def test_tensors_of_both_byte_orders_are_read(order, shape, code, dtype):
    """LitData wrote the integers before a tensor little-endian up to 0.2.29, then big-endian."""
    value = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    head = struct.pack(f"{order}{2 + len(shape)}I", code, len(shape), *shape)
    found = serializer("tensor")[1](head + value.tobytes())
    assert (found.dtype, found.shape) == (value.dtype, shape)
    assert (found == value).all()
