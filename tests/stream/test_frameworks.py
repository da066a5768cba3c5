"""Our order in tf.data and in JAX, and the code blocks of docs/frameworks.md: real libraries."""

import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import shardkit
import shardkit.tensorflow
from shardkit.errors import UsageError
from tests import clients
from tests.stream.data import write_documents, write_photos
from tests.test_docs import BLOCK, NOT_RUN, ROOT

COMMON = """
import itertools, json, sys
import numpy as np
import shardkit, shardkit.stream
photos, documents = sys.argv[1:3]
crop = [shardkit.RandomResizedCrop(24), shardkit.RandomHorizontalFlip()]
options = dict(shuffle=True, seed=3, transforms={"image": crop}, fields=["image", "label"])

def ours(epochs, **more):
    loader = shardkit.stream.Loader(photos, **options, **more)
    return [{n: np.array(v) for n, v in batch.items()} for _ in range(epochs) for batch in loader]

def same(found, expected):
    assert len(found) == len(expected), (len(found), len(expected))
    for one, other in zip(found, expected):
        assert (np.asarray(one["image"]) == other["image"]).all()
        assert (np.asarray(one["label"]) == other["label"]).all()
        assert (np.asarray(one["valid"]) == other["valid"]).all()
"""

TENSORFLOW = (
    COMMON
    + """
import tensorflow as tf
from shardkit.tensorflow import dataset

# Three epochs, prefetched, and from each batch on.
whole, expected = dataset(photos, epochs=3, batch_size=4, **options), ours(3, batch_size=4)
found = list(whole.prefetch(3))
same(found, expected)
assert [k.decode() for k in found[5]["__key__"].numpy()] == list(expected[5]["__key__"])
assert whole.element_spec["image"].shape == (4, 24, 24, 3)
for done in (1, 9, 10, 11, 25, 30):
    state = found[done - 1]["__state__"].numpy()
    rest = dataset(photos, epochs=3, batch_size=4, state=state, **options)
    same(list(rest.prefetch(2)), expected[done:])

# A look takes nothing away, and iterations side by side do not meet.
next(iter(whole.take(1)))
pairs = list(tf.data.Dataset.zip((whole.prefetch(2), whole.prefetch(5))))
same([a for a, _ in pairs], expected)
same([b for _, b in pairs], expected)
endless = iter(dataset(photos, epochs=None, batch_size=4, **options).prefetch(2))
same([next(endless) for _ in range(30)], expected)

# Two ranks, stopped inside the second epoch; one goes on.
two = [
    dataset(photos, epochs=2, global_batch_size=8, rank=rank, world_size=2, **options)
    for rank in range(2)
]
pairs, alone = list(tf.data.Dataset.zip(tuple(two))), ours(2, global_batch_size=8)
joined = [{n: np.concatenate([a[n], b[n]]) for n in ("image", "label", "valid")} for a, b in pairs]
same(joined, alone)
states = {one["__state__"].numpy() for one in pairs[6]}
rest = dataset(photos, epochs=2, global_batch_size=8, state=states.pop(), **options)
assert not states
same(list(rest), alone[7:])

# Strings, ragged, padded and packed.
raw = list(dataset(photos, batch_size=4, fields=["image"], last="short"))
assert tf.io.decode_jpeg(raw[0]["image"][1]).shape == (36, 48, 3) and len(raw[-1]["valid"]) == 1
ragged = list(dataset(documents, batch_size=3, last="short"))
lengths = [row.shape[0] for batch in ragged for row in batch["tokens"]]
assert lengths == [3, 5, 1, 7, 4, 4, 9] and ragged[-1]["tokens"][0, 8] == 6008
padded = dataset(documents, batch_size=2, collate=shardkit.pad_collate())
assert [b["tokens"].shape[1] for b in padded] == [5, 7, 4, 9]
step = {"label": shardkit.MultiHot(37, "float32")}
hot = dataset(photos, batch_size=4, fields=["label"], transforms=step)
assert hot.element_spec["label"] == tf.TensorSpec((4, 37), tf.float32)
assert next(iter(hot))["label"].numpy().sum(axis=1).tolist() == [1, 1, 1, 1]
packed = next(iter(dataset(documents, batching=shardkit.Pack(16, 2))))
assert packed["tokens"].shape == (2, 16) and packed["tokens"].dtype == tf.uint32

# What no tensor holds, and errors inside an iteration.
def message(**more):
    try:
        return [len(b) for b in dataset(photos, batch_size=4, **more)]
    except (shardkit.UsageError, tf.errors.UnknownError) as error:
        return f"{type(error).__name__} {error}"

def bad(label):
    if label == 20:
        raise ValueError("twenty")
    return label

def late(label):
    return np.zeros(label // 20)

messages = [
    message(),
    message(fields=["label"], state="no JSON"),
    message(fields=["label"], epochs=0),
    message(fields=["label"], transforms={"label": lambda label: {"no": label}}),
    message(fields=["label"], transforms={"label": bad}),
    message(fields=["label"], transforms={"label": late}),
]
iter(dataset(photos, epochs=None, batch_size=4, **options).prefetch(9)).get_next()
print(json.dumps(messages))  # and the process ends, though threads make batches
"""
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("frameworks")
    lengths = [3, 5, 1, 7, 4, 4, 9]
    return write_photos(root / "photos"), write_documents(root / "documents", lengths)


BLOCKS = """
found = globals().copy()
import os
os.chdir(sys.argv[3])
{blocks}
seen = int(model.optimizer.iterations), len(history.history["loss"])
seen = [*seen, json.loads(position.numpy())["epoch"], state["epoch"]]
print(json.dumps([found["messages"], seen]))
"""


@pytest.fixture(scope="module")
def by_tensorflow(data, tmp_path_factory):
    """What the script prints, and the code blocks of the page behind it: it takes long to start."""
    folder = tmp_path_factory.mktemp("page")
    text = (ROOT / "docs/frameworks.md").read_text("utf-8")
    blocks = [m["code"] for m in BLOCK.finditer(text) if NOT_RUN.fullmatch(m["before"])]
    assert len(blocks) == 3
    shutil.copytree(ROOT / "sample_data/images", folder / "images")
    shardkit.convert(folder / "images", "wds", folder / "shards", workers=0)
    script = TENSORFLOW + BLOCKS.format(blocks="\n".join(blocks))
    return clients.run("tensorflow", script, *data, folder)


@pytest.mark.large
def test_tf_data_has_our_batches_and_states_that_travel_with_them(by_tensorflow):
    for words, message in zip(
        (
            ("UsageError", "'caption'", "fields="),
            ("UsageError", "not a valid state"),
            ("UsageError", "epochs must be 1 or more"),
            ("UsageError", "the values cannot become a tensor", "'label'", "dict"),
            ("UnknownError", "SampleError", "key '0020', field 'label'"),
            ("UnknownError", "a batch differs from the first one", "'label'"),
        ),
        by_tensorflow[0],
        strict=True,
    ):
        assert [word for word in words if word not in str(message)] == [], message


@pytest.mark.large
def test_code_blocks_of_the_page_run(by_tensorflow):
    """Those of TensorFlow and JAX, where they are installed; the others run with all pages."""
    assert by_tensorflow[1] == [2 * 5, 2, 1, 1]


JAX = (
    COMMON
    + """
import jax
from jax.sharding import NamedSharding, PartitionSpec

rank, port = sys.argv[3:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
sharding = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
total = jax.jit(lambda image: image.astype("int64").sum(), out_shardings=NamedSharding(
    sharding.mesh, PartitionSpec()))

def loader():
    return shardkit.stream.Loader(photos, global_batch_size=8, rank=jax.process_index(),
        world_size=jax.process_count(), **options)

def train(loader, epochs):
    sums = []
    for _ in range(loader.epoch, epochs):
        for batch in loader:
            whole = jax.make_array_from_process_local_data(sharding, batch["image"])
            assert whole.shape == (8, 24, 24, 3)
            sums.append((int(total(whole)), loader.state_dict()))
    return sums

expected = [int(batch["image"].sum()) for batch in ours(3, global_batch_size=8)]
done = train(loader(), 3)
assert [number for number, _ in done] == expected
for steps in (2, 5, 7):
    again = loader()
    again.load_state_dict(json.loads(json.dumps(done[steps - 1][1])))
    assert [number for number, _ in train(again, 3)] == expected[steps:]

kept = [jax.device_put(batch["image"]) for batch in loader()]  # its memory is not taken again
mine = [batch["image"].copy() for batch in loader()]
assert all((np.asarray(a) == b).all() for a, b in zip(kept, mine))
print(json.dumps(len(done)))
"""
)


@pytest.mark.large
def test_two_processes_of_jax_make_global_batches_and_continue(data):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(clients.run, "jax", JAX, *data, n, port) for n in range(2)]
        assert [rank.result() for rank in ranks] == [15, 15]


@pytest.mark.skipif("tensorflow" in sys.modules, reason="tensorflow is here")
def test_without_tensorflow_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UsageError, match="needs tensorflow") as error:
        shardkit.tensorflow.dataset(tmp_path)
    assert error.value.fix == 'pip install "shardkit[tensorflow]"'
