"""Our formats beside the libraries that they are for: writing, and reading at random.

    python -m tests.benchmarks.ecosystems --data PHOTOS --work FOLDER [--rounds 5] [NAME...]

PHOTOS is what `data photos` made. Each run is a process of its own that does the same with a few
photos first, and is timed then: imports, helper processes and what a library compiles or opens once
are not counted. All read files that are in memory, in one process with one thread that asks, and
sync what they write. Where photos are written there are also `cores`, which is ours with a worker
for each processor, as `shardkit convert` has them, and `copy`, which reads all files, and writes
and syncs their bytes as one: what no format can do without. Prints a JSON object in a line for each
library and action. It runs with the libraries of tests/clients.txt.
"""

import json
import os
import random
import shutil
import sys
import time
from collections import namedtuple
from functools import partial
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path

from tests.benchmarks.harness import answer, arguments, fresh, measure, summary
from tests.remote.process import ROOT

CLIENTS = str(Path(sys.prefix, "clients"))
# `write` photos, bytes and labels, to a folder; `read` all of them, each once, and return how many
# there are; the module that is imported, and the package whose version is reported.
Library = namedtuple("Library", "write read module package")


def photos_in(folder):
    """The bytes and the label of every photo; classes are folders."""
    for label, each in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        for path in sorted(each.glob("*.jpg")):
            yield path.read_bytes(), label


def sync(store):
    for path in (store, *store.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def at_random(length, image):
    return sum(len(image(number)) > 0 for number in random.Random(1).sample(range(length), length))


def write_copy(photos, store):
    store.mkdir()
    with (store / "photos").open("wb", buffering=1 << 20) as file:
        file.writelines(image for image, _ in photos)


def read_ours(store):
    import shardkit

    data = shardkit.open(store)
    return at_random(len(data), lambda number: data[number]["image"])


def example(image, label):
    import tensorflow as tf

    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def write_tfrecord(photos, store):
    import tensorflow as tf

    store.mkdir()
    with tf.io.TFRecordWriter(str(store / "photos.tfrecord")) as writer:
        for photo in photos:
            writer.write(example(*photo))


def read_tfrecord(store):
    """Without random access: with a shuffle buffer of 1,000."""
    import tensorflow as tf

    kinds = {"image": tf.string, "label": tf.int64}
    features = {name: tf.io.FixedLenFeature([], kind) for name, kind in kinds.items()}
    data = tf.data.TFRecordDataset([str(store / "photos.tfrecord")]).shuffle(1000, seed=1)
    data = data.map(lambda record: tf.io.parse_single_example(record, features))
    return sum(len(sample["image"]) > 0 for sample in data.as_numpy_iterator())


def write_mds(photos, store):
    """With images as bytes: Pillow images would take its time to open."""
    from tests.benchmarks.loops import mosaicml

    columns = {"image": "bytes", "label": "int"}
    with mosaicml().MDSWriter(columns=columns, out=str(store), size_limit="256mb") as writer:
        for image, label in photos:
            writer.write({"image": image, "label": label})


def read_mds(store):
    from tests.benchmarks.loops import mosaicml

    data = mosaicml().StreamingDataset(local=str(store), batch_size=1)
    return at_random(len(data), lambda number: data[number]["image"])


def write_array_record(photos, store):
    from array_record.python.array_record_module import ArrayRecordWriter

    store.mkdir()
    writer = ArrayRecordWriter(str(store / "photos.array_record"), "group_size:1")
    for photo in photos:
        writer.write(example(*photo))
    writer.close()


def read_array_record(store):
    """Grain's data source; Examples are parsed by TensorFlow."""
    import grain
    import tensorflow as tf

    source = grain.sources.ArrayRecordDataSource([str(store / "photos.array_record")])

    def image(number):
        feature = tf.train.Example.FromString(source[number]).features.feature
        return feature["image"].bytes_list.value[0]

    return at_random(len(source), image)


def write_litdata(photos, store):
    """`BinaryWriter`, as `optimize` has it in each of its processes; images as files."""
    from litdata.streaming.writer import BinaryWriter
    from litdata.types import File

    writer = BinaryWriter(str(store), chunk_bytes="64MB")
    for number, (image, label) in enumerate(photos):
        writer[number] = {"image": File(bytes=image), "label": label}
    writer.done()
    writer.merge()


def read_litdata(store):
    from litdata import StreamingDataset

    data = StreamingDataset(str(store))
    return at_random(len(data), lambda number: data[number]["image"])


def write_lance(photos, store):
    """As pylance comes: images in a plain column."""
    import lance
    import pyarrow as pa

    schema = pa.schema([("image", pa.large_binary()), ("label", pa.int64())])

    def batches():
        every = iter(photos)
        while some := list(islice(every, 100)):
            images, labels = zip(*some, strict=True)
            yield pa.record_batch([pa.array(images, pa.large_binary()), labels], schema=schema)

    lance.write_dataset(batches(), store, schema=schema)


def read_lance(store):
    """Each by a `take` of its own."""
    import lance

    data = lance.dataset(str(store))
    return at_random(data.count_rows(), lambda n: data.take([n])["image"][0].as_py())


# By the names of our formats.
LIBRARIES = {
    "tfrecord": Library(write_tfrecord, read_tfrecord, "tensorflow", "tensorflow-cpu"),
    "mds": Library(write_mds, read_mds, "streaming", "mosaicml-streaming"),
    "array_record": Library(write_array_record, read_array_record, "array_record", "array_record"),
    "litdata": Library(write_litdata, read_litdata, "litdata", "litdata"),
    "lance": Library(write_lance, read_lance, "lance", "pylance"),
}


def timed(name, who, action, photos, few_photos, store):
    """Seconds of an action, in this process, after the same with a few photos."""
    library, few = LIBRARIES[name], store.with_name(f"{store.name}-few")

    def done(source, out):
        count = sum(1 for _ in source.glob("*/*.jpg"))
        began = time.perf_counter()
        if action == "read":
            assert (library.read if who == name else read_ours)(out) == count
        elif who in ("shardkit", "cores"):
            from shardkit import convert

            convert(source, name, out, workers=0 if who == "shardkit" else None)
        else:
            (library.write if who == name else write_copy)(photos_in(source), out)
            sync(out)
        return time.perf_counter() - began

    done(few_photos, few)
    return done(photos, store)


def environ(name, who):
    """Only the library itself finds the folder of libraries."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    paths = [CLIENTS if who == name else "", str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**quiet, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def compare(name, photos, work, rounds):
    """The results of a library, one for each action."""
    samples, few = sorted(photos.glob("*/*.jpg")), work / "few-photos"
    for path in samples[:8]:
        copy = few / path.relative_to(photos)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)

    def run(action, who):
        """In a process of its own."""
        store = work / f"{name}-{who}"
        if action == "write":
            fresh(store.with_name(f"{store.name}-few"))
            fresh(store)
        command = [sys.executable, "-m", "tests.benchmarks.ecosystems", "--run", name, who, action]
        return float(answer(*command, photos, few, store, **environ(name, who)))

    for action, of in {"write": ("cores", "copy", name), "read": (name,)}.items():
        runs = {who: partial(run, action, who) for who in ("shardkit", *of)}
        found = summary(measure(runs, rounds), dict.fromkeys(of, "shardkit"), len(samples))
        library = f"{name} ({version(LIBRARIES[name].package)})"
        yield {"library": library, "action": "random" if action == "read" else action, **found}


def version(package):
    for found in distributions(name=package, path=[CLIENTS, *sys.path]):
        return f"{package} {found.version}"
    raise SystemExit(f"{package} is not installed")


def main(words):
    parser = arguments(__doc__, "data", "work", "rounds")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LIBRARIES))
    given = parser.parse_args(words)
    results = []
    for name in given.names or LIBRARIES:
        for result in compare(name, given.data, given.work, given.rounds):
            print(json.dumps(result), flush=True)
            results.append(result)
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(timed(*sys.argv[2:5], *map(Path, sys.argv[5:]))))
    else:
        main(sys.argv[1:])
