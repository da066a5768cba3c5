"""TensorFlow and DALI read what we write; we read what TensorFlow writes. Skipped without them."""

import base64
import hashlib
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import FormatError
from shardkit.formats import get_format
from shardkit.schema import Float, Json, Text
from shardkit.testing import make_image, write_shard
from tests import clients
from tests.formats.loaders import rich

# TensorFlow takes seconds to import.
pytestmark = [pytest.mark.large, pytest.mark.xdist_group("tensorflow")]

TFRECORD = get_format("tfrecord")
SCHEMA, sample = rich("frames row fixed pixels double names maybe count")


def plain(value):
    """A value as the script prints it, which has this function."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list) or getattr(value, "dtype", "") == "object":
        return [plain(each) for each in value]
    return np.asarray(value).tolist()


SCRIPT = """
import base64, json, sys
import numpy as np

ours, folder = sys.argv[1:]
jpeg = open(folder + "/x.jpg", "rb").read()

rows = []
for sample in samples(ours):
    assert tf.io.decode_jpeg(sample["image"]).shape == (6, 8, 3)
    rows.append({name: plain(value.numpy()) for name, value in sample.items()})
batches = 0
for _ in range(2):
    data = tf.data.TFRecordDataset(files(ours)).shuffle(7).batch(4)
    for batch in data.map(lambda records: tf.io.parse_example(records, features(ours))):
        batches += int(batch["__key__"].shape[0])

def feature(value):
    first = value[0] if value else b""
    if isinstance(first, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if isinstance(first, float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))

def example(n):
    lists = {
        "image": [jpeg], "images": [jpeg] * (n % 3), "blob": [bytes([n % 256, 255])],
        "text": ["line é %d" % n], "empty text": [""], "words": ["a", "b c", "é"][: n % 4],
        "label": [n - 3], "extremes": [-(2**63), 2**63 - 1, 0][: n % 4],
        "score": [n / 3], "boxes": [0.5, n / 7] * (n % 3), "meta.json": ['{"n": %d}' % n],
    }
    if n % 2:
        lists["sometimes"] = [n]
    lists = {k: [x.encode() if isinstance(x, str) else x for x in v] for k, v in lists.items()}
    features = {k: feature(v) for k, v in lists.items()}
    features["boxes"] = tf.train.Feature(float_list=tf.train.FloatList(value=lists["boxes"]))
    features["extremes"] = tf.train.Feature(int64_list=tf.train.Int64List(value=lists["extremes"]))
    features["nothing"] = tf.train.Feature()
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

def write(name, records, compression=""):
    with tf.io.TFRecordWriter(folder + "/" + name, compression) as writer:
        for record in records:
            writer.write(record)

write("plain.tfrecord", map(example, range(30)))
write("gzip.tfrecord.gz", map(example, range(30)), "GZIP")
write("zlib.tfrecord", map(example, range(3)), "ZLIB")
write("many.tfrecords", (example(n % 30) for n in range(500)))
write("empty.tfrecord", [])
for n in range(2):
    write(f"toy-train.tfrecord-0000{n}-of-00002", map(example, range(10)))
write("toy-test.tfrecord-00000-of-00001", map(example, range(5)))
sequence = tf.train.SequenceExample()
sequence.feature_lists.feature_list["x"].feature.add().int64_list.value.append(1)
write("sequence.tfrecord", [sequence.SerializeToString()])

from shardkit.verification.verify import verify

report = verify(ours, client=True)
said = [str(problem) for problem in report.problems]
verified = [report.sound, {n: c.to_dict() for n, c in report.clients.items()}, said]
print(json.dumps({"rows": rows, "batches": batches, "verified": verified}))
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return tmp_path_factory.mktemp("theirs")


@pytest.fixture(scope="module", autouse=True)
def found(theirs):
    """What TensorFlow, in one process, reads of our dataset; it writes files of its own."""
    (theirs / "x.jpg").write_bytes(make_image(1))
    ours = theirs.parent / "ours"
    with shardkit.create(ours, "tfrecord", SCHEMA, shard_samples=8) as writer:
        for number in range(20):
            writer.write(sample(number))
    # With the functions that the page tells users of TensorFlow.
    page = (Path(__file__).parents[2] / "docs/tfrecord.md").read_text("utf-8")
    (code,) = re.findall(r"runs it with TensorFlow, .*?```python\n(.*?)```", page, re.S)
    return clients.run("tensorflow", code + inspect.getsource(plain) + SCRIPT, ours, theirs)


def test_tensorflow_parses_every_field(found):
    samples = [sample(n) for n in range(20)]
    assert found["batches"] == 40
    for got, expected in zip(found["rows"], samples, strict=True):
        assert base64.b64decode(got.pop("__key__")).decode() == expected["__key__"]
        for name, kind in SCHEMA.items():
            value = got.pop(name)
            if name not in expected:
                assert value == []
            elif name == "names":
                assert base64.b64decode(value).startswith(b"\x93NUMPY")
            elif isinstance(kind, Float):
                assert value == float(np.float32(expected[name]))
            elif isinstance(kind, Text | Json):
                value = [value] if isinstance(value, str) else value
                text = base64.b64decode(value[0]).decode()
                assert (text if isinstance(kind, Text) else json.loads(text)) == expected[name]
            elif kind.optional:
                assert value == np.ravel(plain(expected[name])).tolist()
            else:
                assert value == plain(expected[name]), name
        assert all(name.endswith("/shape") for name in got)
    sound, by_client, problems = found["verified"]
    assert (sound, problems) == (True, [])
    about = by_client["tensorflow"]
    assert (about["samples"], about["not_compared"]) == (20, {})


def expected(n, key):
    sometimes = {"sometimes": n} if n % 2 else {}
    return {
        "__key__": f"{key}/{n:09d}", "image": make_image(1), "images": [make_image(1)] * (n % 3),
        "text": f"line é {n}", "empty text": "", "words": ["a", "b c", "é"][: n % 4],
        "blob": bytes([n % 256, 255]), "meta.json": {"n": n}, "label": n - 3,
        "extremes": np.array([-(2**63), 2**63 - 1, 0][: n % 4], "<i8"),
        "score": float(np.float32(n / 3)), "boxes": np.array([0.5, n / 7] * (n % 3), "<f4"),
        **sometimes,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["plain.tfrecord", "gzip.tfrecord.gz"])
@pytest.mark.filterwarnings("ignore:compressed TFRecord files")
def test_we_read_all_that_tensorflow_writes(theirs, tmp_path, name):
    key = name.partition(".")[0] + "_gz" * name.endswith("gz")
    with shardkit.open(theirs / name) as found:
        for number, each in enumerate(found):
            want = expected(number, key)
            assert each.keys() == want.keys()
            for field, value in want.items():
                assert type(each[field]) is type(value), field
                assert np.array_equal(each[field], value), field
        assert len(found) == 30
        assert found.schema["sometimes"].optional
        assert found.schema["nothing"].optional
    shardkit.convert(theirs / name, "tfrecord", tmp_path / "out", workers=0)
    again = shardkit.open(tmp_path / "out")
    assert [s["label"] for s in again] == [n - 3 for n in range(30)]
    assert again[7]["words"] == expected(7, key)["words"]


def test_files_are_found_by_their_names(theirs, tmp_path):
    folder, out = tmp_path / "toy" / "1.0.0", tmp_path / "out"
    folder.mkdir(parents=True)
    for path in theirs.glob("toy-*"):
        (folder / path.name).write_bytes(path.read_bytes())
    for name in ("features.json", "dataset_info.json"):
        (folder / name).write_text("{}")
    (folder / "sometimes.labels.txt").write_text("\n".join(["cat", "dog", *map(str, range(10))]))
    assert shardkit.convert(folder, "tfrecord", out, workers=0).samples == 25
    counts = {out / "train": 20, out / "test": 5}
    counts |= {theirs / "many.tfrecords": 500, theirs / "empty.tfrecord": 0}
    assert {path: len(shardkit.open(path)) for path in counts} == counts
    with pytest.raises(FormatError, match="SequenceExample"):
        shardkit.open(theirs / "sequence.tfrecord")
    with pytest.raises(FormatError, match="not a TFRecord file"):
        shardkit.open(theirs / "zlib.tfrecord")


DALI = """
import hashlib, json, sys
import nvidia.dali.fn as fn
import nvidia.dali.tfrecord as tfrec
from nvidia.dali import pipeline_def

features = {
    "__key__": tfrec.FixedLenFeature((), tfrec.string, ""),
    "image": tfrec.FixedLenFeature((), tfrec.string, ""),
    "label": tfrec.FixedLenFeature([1], tfrec.int64, -1),
    "score": tfrec.FixedLenFeature([1], tfrec.float32, -1.0),
    "row": tfrec.VarLenFeature(tfrec.int64, 0),
}

@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def pipeline():
    inputs = fn.readers.tfrecord(
        path=[sys.argv[1]], index_path=[sys.argv[2]], features=features, name="reader"
    )
    return tuple(inputs[name] for name in features)

run = pipeline()
run.build()
found = []
for _ in range(run.epoch_size("reader")):
    key, image, label, score, tokens = [each.at(0) for each in run.run()]
    digest = hashlib.md5(image.tobytes()).hexdigest()
    key = key.tobytes().decode()
    found.append([key, digest, label.tolist(), score.tolist(), tokens.tolist()])
print(json.dumps(found))
"""


def test_dali_reads_it_by_our_index(tmp_path):
    samples = [sample(n) for n in range(12)]
    write_shard(TFRECORD, tmp_path / "a.tfrecord", SCHEMA, samples).close()
    index = np.load(tmp_path / "__shardkit__" / "a.records.npy")
    rows = np.stack([index["offset"], index["size"]], axis=1)
    np.savetxt(tmp_path / "a.idx", rows, fmt="%d")
    found = clients.run("nvidia.dali", DALI, tmp_path / "a.tfrecord", tmp_path / "a.idx")
    for got, want in zip(found, samples, strict=True):
        digest = hashlib.md5(want["image"]).hexdigest()
        score = float(np.float32(want["score"]))
        assert got == [want["__key__"], digest, [want["label"]], [score], want["row"].tolist()]
