"""Our formats against the libraries that they are for: writing, reading in order and at random.

    python -m tests.benchmarks.ecosystems --data PHOTOS --work FOLDER [--rounds 5] [NAME...]

PHOTOS is what photos.py made. Each round runs ours and the library's, in turns, each in a process
of its own that does the same with a few photos first, and is timed then: imports, helper processes
and what a library compiles or opens once are `start`, the seconds before. All read files that are
in memory, in one process with one thread that asks, and sync what they write. Beside these two are
`wds`, which is our TAR; and where photos are written, `cores`, which is ours with a worker for each
processor, as `shardkit convert` has them, and `copy`, which reads all files, and writes and syncs
their bytes as one: what no format can do without. `processors` are seconds of these, without helper
processes that stay: they tell something on a busy machine as well. Prints a JSON object in a line
for each library and action, and its row of the table in docs/benchmarks.md on stderr.

A library is a function in `LIBRARIES`: it imports what it needs, and returns what is timed, by
action: `write` (the photos as they are, with their labels), `read` (all in order) and `random`
(each once, or as near to that as it comes), which return how many samples there were. It runs with
the libraries of tests/clients.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
FEW = "few-photos"  # in the folder of work
Actions = dict[str, Callable[[], int]]
Photo = tuple[bytes, int]  # and its label


def photos_in(folder: Path) -> Iterator[Photo]:
    """The bytes and the label of every photo; classes are folders."""
    for label, each in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        for path in sorted(each.glob("*.jpg")):
            yield path.read_bytes(), label


def sync(store: Path) -> None:
    for path in (store, *store.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def copy(photos: Path, store: Path) -> Actions:
    """The bytes of all photos in one file."""

    def write() -> int:
        store.mkdir()
        count = 0
        with (store / "photos").open("wb", buffering=1 << 20) as file:
            for image, _ in photos_in(photos):
                file.write(image)
                count += 1
        sync(store)
        return count

    return {"write": write}


# --- ours -----------------------------------------------------------------------------------------


def shardkit(format: str, workers: int | None, photos: Path, store: Path) -> Actions:
    """The index, the manifest and checksums are written as always."""
    import shardkit
    from shardkit import convert

    def write() -> int:
        return convert(photos, format, store, workers=workers).samples

    def read() -> int:
        return sum(len(sample["image"]) > 0 for sample in shardkit.open(store))

    def at_random() -> int:
        dataset = shardkit.open(store)
        order = random.Random(1).sample(range(len(dataset)), len(dataset))
        return sum(len(dataset[number]["image"]) > 0 for number in order)

    return {"write": write, "read": read, "random": at_random}


# --- theirs ---------------------------------------------------------------------------------------


def tfrecord(photos: Path, store: Path) -> Actions:
    """TensorFlow; it has no random access: `random` is a shuffle buffer of 1,000."""
    import tensorflow as tf

    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def write() -> int:
        count = 0
        store.mkdir()
        with tf.io.TFRecordWriter(str(store / "photos.tfrecord")) as writer:
            for image, label in photos_in(photos):
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
                count += 1
        sync(store)
        return count

    def read(buffer: int = 0) -> int:
        data = tf.data.TFRecordDataset([str(store / "photos.tfrecord")])
        data = data.shuffle(buffer, seed=1) if buffer else data
        data = data.map(lambda record: tf.io.parse_single_example(record, features))
        return sum(len(sample["image"]) > 0 for sample in data.as_numpy_iterator())

    return {"write": write, "read": read, "random": partial(read, 1000)}


def mds(photos: Path, store: Path) -> Actions:
    """MosaicML Streaming, with images as bytes: Pillow images would take its time to open."""
    from types import ModuleType

    sys.modules["streaming.vision"] = ModuleType("streaming.vision")  # it imports torchvision
    from streaming import MDSWriter, StreamingDataset

    def write() -> int:
        columns, count = {"image": "bytes", "label": "int"}, 0
        with MDSWriter(columns=columns, out=str(store), size_limit="256mb") as writer:
            for image, label in photos_in(photos):
                writer.write({"image": image, "label": label})
                count += 1
        sync(store)
        return count

    def dataset() -> Any:
        return StreamingDataset(local=str(store), batch_size=1)

    def read() -> int:
        return sum(len(sample["image"]) > 0 for sample in dataset())

    def at_random() -> int:
        data = dataset()
        order = random.Random(1).sample(range(len(data)), len(data))
        return sum(len(data[number]["image"]) > 0 for number in order)

    return {"write": write, "read": read, "random": at_random}


def array_record(photos: Path, store: Path) -> Actions:
    """Grain's data source of ArrayRecord files; Examples are made and parsed by TensorFlow."""
    import grain
    import tensorflow as tf
    from array_record.python.array_record_module import ArrayRecordWriter

    def write() -> int:
        count = 0
        store.mkdir()
        writer = ArrayRecordWriter(str(store / "photos.array_record"), "group_size:1")
        for image, label in photos_in(photos):
            feature = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())
            count += 1
        writer.close()
        sync(store)
        return count

    def read(shuffle: bool = False) -> int:
        source = grain.sources.ArrayRecordDataSource([str(store / "photos.array_record")])
        order = random.Random(1).sample(range(len(source)), len(source)) if shuffle else None
        return sum(
            len(
                tf.train.Example.FromString(source[number])
                .features.feature["image"]
                .bytes_list.value[0]
            )
            > 0
            for number in order or range(len(source))
        )

    return {"write": write, "read": read, "random": partial(read, True)}


def litdata(photos: Path, store: Path) -> Actions:
    """LitData's `BinaryWriter`, as `optimize` has it in each of its processes; images as files."""
    from litdata import StreamingDataset
    from litdata.streaming.writer import BinaryWriter
    from litdata.types import File

    def write() -> int:
        writer = BinaryWriter(str(store), chunk_bytes="64MB")
        count = 0
        for image, label in photos_in(photos):
            writer[count] = {"image": File(bytes=image), "label": label}
            count += 1
        writer.done()
        writer.merge()
        sync(store)
        return count

    def read() -> int:
        return sum(len(sample["image"]) > 0 for sample in StreamingDataset(str(store)))

    def at_random() -> int:
        data = StreamingDataset(str(store))
        order = random.Random(1).sample(range(len(data)), len(data))
        return sum(len(data[number]["image"]) > 0 for number in order)

    return {"write": write, "read": read, "random": at_random}


def lance(photos: Path, store: Path) -> Actions:
    """pylance as it comes: images in a plain column; each at random by a `take` of its own."""
    import lance
    import pyarrow as pa

    schema = pa.schema([("image", pa.large_binary()), ("label", pa.int64())])

    def batches() -> Iterator[Any]:
        every = photos_in(photos)
        while some := list(islice(every, 100)):
            images, labels = zip(*some, strict=True)
            yield pa.record_batch([pa.array(images, pa.large_binary()), labels], schema=schema)

    def write() -> int:
        made = lance.write_dataset(batches(), store, schema=schema)
        sync(store)
        return int(made.count_rows())

    def read() -> int:
        data = lance.dataset(str(store)).to_batches(batch_size=64)
        return sum(len(image) > 0 for some in data for image in some["image"].to_pylist())

    def at_random() -> int:
        data = lance.dataset(str(store))
        order = random.Random(1).sample(range(data.count_rows()), data.count_rows())
        taken = (data.take([number])["image"][0].as_py() for number in order)
        return sum(len(image) > 0 for image in taken)

    return {"write": write, "read": read, "random": at_random}


class Library(NamedTuple):
    actions: Callable[[Path, Path], Actions]
    format: str  # of ours
    module: str
    package: str  # whose version is reported


LIBRARIES: dict[str, Library] = {
    "tfrecord": Library(tfrecord, "tfrecord", "tensorflow", "tensorflow-cpu"),
    "mds": Library(mds, "mds", "streaming", "mosaicml-streaming"),
    "array_record": Library(array_record, "array_record", "array_record", "array_record"),
    "litdata": Library(litdata, "litdata", "litdata", "litdata"),
    "lance": Library(lance, "lance", "lance", "pylance"),
}


# --- runs -----------------------------------------------------------------------------------------


def run(name: str, who: str, action: str, photos: Path, work: Path) -> list[float]:
    """What `timed` finds, in a process of its own."""
    store, few = work / f"{name}-{who}", work / f"{name}-{who}-few"
    if action == "write":
        for each in (store, few):
            shutil.rmtree(each, ignore_errors=True)
        os.sync()
    clients = [str(Path(sys.prefix, "clients"))] if who == name else []
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    folders = [photos, store, work / FEW, few]
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--run", name, who, action, *folders],
        env={**os.environ, **quiet, "PYTHONPATH": os.pathsep.join([*clients, str(ROOT)])},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr.decode()[-3000:])
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def timed(name: str, who: str, action: str, *folders: str) -> list[float]:
    """Seconds of an action, its samples, the seconds of its start, and those of processors."""
    began = time.perf_counter()
    photos, store, few_photos, few = map(Path, folders)
    library = LIBRARIES[name]
    make = {
        "shardkit": partial(shardkit, library.format, 0),
        "cores": partial(shardkit, library.format, None),
        "wds": partial(shardkit, "wds", 0),
        "copy": copy,
        name: library.actions,
    }[who]
    make(few_photos, few)[action]()
    work = make(photos, store)[action]
    ready, used = time.perf_counter(), sum(os.times()[:4])
    count = work()
    took, used = time.perf_counter() - ready, sum(os.times()[:4]) - used
    return [took, count, ready - began, used]


def compare(name: str, photos: Path, work: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """The results of a library, one for each action."""
    samples = sum(1 for _ in photos.glob("*/*.jpg"))
    for path in sorted(photos.glob("*/*.jpg"))[:8]:
        few = work / FEW / path.relative_to(photos)
        few.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, few)
    seconds: dict[str, dict[str, list[list[float]]]] = {
        "write": {who: [] for who in ("shardkit", "cores", "wds", "copy", name)},
        "read": {who: [] for who in ("shardkit", "wds", name)},
        "random": {who: [] for who in ("shardkit", "wds", name)},
    }
    for number in range(rounds):
        for action, of in seconds.items():
            for who in sorted(of, reverse=bool(number % 2)):
                found = run(name, who, action, photos, work)
                assert found[1] == samples, f"{who} {action}: {found[1]} of {samples} samples"
                of[who].append([round(each, 4) for each in found])
    for action, of in seconds.items():
        took = {who: [each[0] for each in found] for who, found in of.items()}
        median = {who: statistics.median(values) for who, values in took.items()}
        yield {
            "library": f"{name} ({version(LIBRARIES[name].package)})",
            "action": action,
            "samples_per_second": {who: round(samples / m) for who, m in median.items()},
            "shardkit_faster_by": {
                who: round(m / median["shardkit"], 2) for who, m in median.items()
            },
            "seconds": took,
            "start": {who: statistics.median(e[2] for e in found) for who, found in of.items()},
            "processors": {who: statistics.median(e[3] for e in f) for who, f in of.items()},
            "samples": samples,
        }


def row(result: dict[str, Any]) -> str:
    """A row of the table in docs/benchmarks.md."""
    rates, used = result["samples_per_second"], result["processors"]
    name = result["library"].partition(" ")[0]
    faster = result["shardkit_faster_by"][name]
    found = [f"{rates['shardkit']:,}", f"{rates[name]:,}", f"{faster:.2f}"]
    found += [f"{rates[who]:,}" if who in rates else "" for who in ("cores", "copy", "wds")]
    found += [f"{used[who]:.2f}" for who in ("shardkit", name)]
    return f"| {name}, {result['action']} | {' | '.join(found)} |"


def version(package: str) -> str:
    from importlib.metadata import distributions

    for found in distributions(name=package, path=[str(Path(sys.prefix, "clients")), *sys.path]):
        return f"{package} {found.version}"
    raise SystemExit(f"{package} is not installed")


def main(arguments: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LIBRARIES))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    results = []
    for name in options.names or LIBRARIES:
        for result in compare(name, options.data, options.work, options.rounds):
            print(json.dumps(result), flush=True)
            print(row(result), file=sys.stderr, flush=True)
            results.append(result)
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(timed(*sys.argv[2:])))
    else:
        main(sys.argv[1:])
