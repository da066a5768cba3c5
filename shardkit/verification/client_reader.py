"""A script that reads shards with the library of their format, in its own process.

It imports nothing from shardkit, so that its values come from that library alone, and runs in its
own process, so that a crash ends no other. From stdin it reads a job, a JSON object on one line:

    client   a name in `READERS`
    fields   field -> its type and the type's options, as in a manifest
    members  extension -> field, for TARs

and then paths, one per line: single shards, or the folder of a dataset. To stdout it writes lines:
an object with the versions; then, for each path, [key, summaries] for each sample, followed by
{"end": true}, or by {"error": text} if the library raised an error. A key is null if the library
does not return keys.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module, metadata
from itertools import pairwise
from typing import Any

import numpy as np

# Readers use `Any`: the libraries may be missing, and have no type annotations.
Sample = tuple["str | None", dict[str, Any]]  # key and fields
Job = dict[str, Any]

_LONGEST = 60  # characters up to which a value is its own summary
_ROWS = 100  # read at a time
_PIXELS = 64 << 20  # bytes of an FFCV batch


def summary(value: Any) -> str:
    """A text that is the same only for equal values of equal types; a digest for long values.

    All NaN are equal, and the order of keys in JSON objects does not matter.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "fc":
            value = np.where(np.isnan(value), value.dtype.type(np.nan), value)
        head, data = f"array {value.dtype.str} {value.shape}", value.tobytes()
    elif isinstance(value, bytes):
        head, data = "bytes", value
    elif isinstance(value, list) and value and all(isinstance(one, bytes) for one in value):
        head, data = f"{len(value)} images", " ".join(map(summary, value)).encode()
    else:
        text = json.dumps(value, sort_keys=True, default=repr)
        if len(text) <= _LONGEST:
            return text
        head, data = "text", text.encode()
    return (
        f"{head}, {len(data):,} bytes, digest {hashlib.blake2b(data, digest_size=12).hexdigest()}"
    )


def loaded(data: bytes) -> Any:
    """Load an array from the bytes of a .npy file."""
    return np.load(io.BytesIO(data), allow_pickle=False)


# --- TAR ------------------------------------------------------------------------------------------


def read_webdataset(path: str, job: Job) -> Iterator[Sample]:
    """Decode values with the library's own decoders, except those that unpickle."""
    import webdataset
    from webdataset.autodecode import basichandlers

    shards = webdataset.SimpleShardList([path])
    for sample in webdataset.DataPipeline(shards, webdataset.tarfile_to_samples()):
        fields = {}
        for extension, data in sample.items():
            name = job["members"].get(extension, extension)
            kind = job["fields"].get(name, {"type": "Bytes"})["type"]
            if extension not in _OWN:
                known = extension.split(".")[-1] in _DECODED
                raw = kind in (*_ENCODED, "Bytes") or not known
                fields[name] = data if raw else basichandlers(extension, data)
        yield sample["__key__"], fields


_ENCODED = ("Image", "Audio", "Video")
_OWN = ("__key__", "__url__", "__local_path__")
_DECODED = frozenset(  # extensions
    ("cls", "cls2", "index", "inx", "id", "txt", "text", "transcript", "json", "jsn", "npy")
)


# --- LMDB -----------------------------------------------------------------------------------------


def read_lmdb(path: str, job: Job) -> Iterator[Sample]:
    import lmdb
    import msgpack

    folder = os.path.dirname(path) if os.path.basename(path) == "data.mdb" else path
    options = {"readonly": True, "lock": False, "subdir": folder != path, "readahead": False}
    with lmdb.open(folder, **options) as environment, environment.begin() as transaction:
        for number, stored in transaction.cursor():
            if not number.isdigit():  # not a sample
                continue
            fields = msgpack.unpackb(stored)
            key = fields.pop("__key__")
            for name in fields.keys() & job["fields"].keys():
                kind = job["fields"][name]["type"]
                if kind in _STORED_AS:
                    fields[name] = _STORED_AS[kind](fields[name])
            yield key, fields


_STORED_AS: Mapping[str, Callable[[Any], Any]] = {"Json": json.loads, "Array": loaded}


# --- Arrow, Parquet, folders of Hugging Face datasets ---------------------------------------------


def read_pyarrow(path: str, job: Job) -> Iterator[Sample]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    if job["format"] == "parquet":
        with ParquetFile(path) as table:
            for batch in table.iter_batches(_ROWS):
                yield from rows(batch, job["fields"])
    else:
        with pyarrow.memory_map(path) as source, pyarrow.ipc.open_file(source) as file:
            for number in range(file.num_record_batches):
                yield from rows(file.get_batch(number), job["fields"])


def read_datasets(path: str, job: Job) -> Iterator[Sample]:
    """Read Arrow tables, so that no images are decoded."""
    import datasets

    if os.path.isdir(path):
        data = datasets.load_from_disk(path)
    elif job["format"] == "hf":
        data = datasets.Dataset.from_file(path)
    else:
        given = {"data_files": [path], "split": "train", "streaming": True}
        data = datasets.load_dataset(job["format"], **given)
    for table in data.with_format("arrow").iter(_ROWS):
        for batch in table.to_batches():
            yield from rows(batch, job["fields"])


def rows(batch: Any, fields: Mapping[str, Any]) -> Iterator[Sample]:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    keys = columns.pop("__key__")
    for number in range(batch.num_rows):
        values = {name: column[number] for name, column in columns.items()}
        yield (
            keys[number].as_py(),
            {
                name: of_scalar(value, fields.get(name, {"type": ""}))
                for name, value in values.items()
                if value.is_valid
            },
        )


def of_scalar(scalar: Any, kind: Mapping[str, Any]) -> Any:
    """The value of an Arrow scalar: the bytes of an image struct, parsed JSON, lists as arrays."""
    name = kind["type"]
    if name == "Array" and hasattr(scalar, "values"):
        values, shape = scalar.values, [len(scalar.values), *kind["shape"][1:]]
        while values.type.num_fields:
            values = values.flatten()
        found = values.to_numpy(zero_copy_only=False).reshape(shape)
        return found.view(np.bool_) if kind["dtype"] == "|b1" else found  # stored as 0 and 1
    value = scalar.as_py()
    if name == "Images":
        return [image["bytes"] for image in value]
    if name in _ENCODED:
        return value["bytes"]
    return _STORED_AS[name](value) if name in _STORED_AS else value


# --- .beton ---------------------------------------------------------------------------------------


def read_ffcv(path: str, job: Job) -> Iterator[Sample]:
    """Read with FFCV's loader; the lengths of values come from the table of its reader."""
    from ffcv.loader import Loader, OrderOption
    from ffcv.reader import Reader

    reader = Reader(path)
    tables = {name: reader.metadata[f"f{n}"] for n, name in enumerate(reader.field_names)}
    images = [name for name in tables if "mode" in (tables[name].dtype.names or ())]
    largest = max((int(pixels_of(tables[name]).max(initial=1)) for name in images), default=1)
    rows = max(min(_PIXELS // (3 * largest), _ROWS), 1)
    loader = Loader(
        path, batch_size=rows, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False,
        pipelines={name: [whole_images()] for name in images},
    )  # fmt: skip
    stored, position = np.memmap(path, np.uint8, "r"), 0
    sizes = np.sort(reader.alloc_table, order="ptr")
    for batch in loader:
        columns = dict(zip(loader.pipeline_specs, map(np.asarray, batch), strict=True))
        for row in range(len(next(iter(columns.values())))):
            fields = {}
            for name, column in columns.items():
                entry, kind = tables[name][position], job["fields"].get(name, {"type": ""})
                if name in images:
                    fields[name] = of_image(column[row], entry, stored, sizes)
                else:
                    fields[name] = of_ffcv(column[row], entry, kind["type"])
            yield None, fields
            position += 1


def pixels_of(table: Any) -> Any:
    return table["width"].astype(np.int64) * table["height"]


def whole_images() -> Any:
    """A decoder for images of any size, uncropped: each is stored at the start of its row."""
    from dataclasses import replace

    from ffcv.fields.rgb_image import SimpleRGBImageDecoder
    from ffcv.pipeline.allocation_query import AllocationQuery

    class Whole(SimpleRGBImageDecoder):  # type: ignore[misc] # untyped base class
        def declare_state_and_memory(self, previous_state: Any) -> Any:
            shape, dtype = (3 * int(pixels_of(self.metadata).max(initial=1)),), np.dtype("u1")
            state = replace(previous_state, jit_mode=True, shape=shape, dtype=dtype)
            return state, AllocationQuery(shape, dtype)

    return Whole()


def of_image(row: Any, entry: Any, stored: Any, sizes: Any) -> Any:
    """The pixels of a raw image, or the bytes of a JPEG if they decode to the same pixels."""
    from ffcv.libffcv import imdecode

    height, width, at = int(entry["height"]), int(entry["width"]), int(entry["data_ptr"])
    pixels = row[: 3 * height * width].reshape(height, width, 3)
    if entry["mode"] != 0:
        return pixels
    size = int(sizes["size"][np.searchsorted(sizes["ptr"], at)])
    data = np.array(stored[at : at + size])
    expected = np.zeros_like(pixels)
    imdecode(data, expected, height, width, height, width, 0, 0, 1, 1, False, False)
    return data.tobytes() if np.array_equal(pixels, expected) else pixels


def of_ffcv(value: Any, entry: Any, kind: str) -> Any:
    """Return the value of a field: a number, bytes without padding, or parsed JSON."""
    from ffcv.fields.json import JSONField

    if "size" not in (entry.dtype.names or ()):
        return value if kind == "Array" else value.item()
    data = value[: int(entry["size"])]
    if kind in ("Json", "Text"):
        return JSONField.unpack(data)
    return loaded(data.tobytes()) if kind == "Array" and len(data) else data.tobytes()


# --- Megatron -------------------------------------------------------------------------------------


def read_megatron(path: str, job: Job) -> Iterator[Sample]:
    """Documents as int64, with their sequences concatenated."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(path.removesuffix(".bin"))
    ends = data.document_indices.tolist()
    for start, stop in pairwise(ends):
        sequences = [np.zeros(0, np.int64), *(data[number] for number in range(start, stop))]
        yield None, dict.fromkeys(job["fields"], np.concatenate(sequences).astype(np.int64))


# --- TFRecord -------------------------------------------------------------------------------------


def read_tensorflow(path: str, job: Job) -> Iterator[Sample]:
    import tensorflow

    for record in tensorflow.data.TFRecordDataset([path]).as_numpy_iterator():
        stored = tensorflow.train.Example.FromString(record).features.feature
        features = {n: getattr(f, f.WhichOneof("kind")).value for n, f in stored.items()}
        names = job["fields"].keys() & features.keys()
        fields = {name: of_features(features, name, job["fields"][name]) for name in names}
        yield features["__key__"][0].decode(), fields


def of_features(features: Mapping[str, Any], name: str, kind: Mapping[str, Any]) -> Any:
    values, shape = features[name], features.get(name + "/shape")
    if kind["type"] == "Array" and len(values) and isinstance(values[0], bytes):
        return loaded(values[0]) if shape is None else raw(values[0], kind["dtype"], shape)
    if kind["type"] == "Array":
        sides = [-1 if side is None else side for side in kind["shape"]]
        return np.array(values, kind["dtype"]).reshape(sides)
    if kind["type"] == "Images":
        return list(values)
    if name + "/float64" in features:
        return raw(features[name + "/float64"][0], "<f8", ()).item()
    value = values[0].decode() if kind["type"] in ("Text", "Json") else values[0]
    return json.loads(value) if kind["type"] == "Json" else value


def raw(data: bytes, dtype: str, shape: Iterable[int]) -> Any:
    return np.frombuffer(data, dtype).reshape(list(shape))


# --- the process ----------------------------------------------------------------------------------

# Name -> distributions whose versions are reported, modules to import, reader.
READERS: dict[str, tuple[str, str, Callable[[str, Job], Iterable[Sample]]]] = {
    "webdataset": ("webdataset", "webdataset", read_webdataset),
    "lmdb": ("lmdb msgpack", "lmdb msgpack", read_lmdb),
    "pyarrow": ("pyarrow", "pyarrow pyarrow.parquet", read_pyarrow),
    "datasets": ("datasets pyarrow", "datasets", read_datasets),
    "ffcv": ("ffcv", "ffcv.loader", read_ffcv),
    "tensorflow": ("tensorflow", "tensorflow", read_tensorflow),
    "megatron-core": ("megatron-core", "megatron.core.datasets.indexed_dataset", read_megatron),
}


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # from another distribution, such as tensorflow-cpu
        return str(import_module(distribution).__version__)


def main() -> None:
    """Run the job from stdin. Output that a library prints is redirected to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1 << 16)
    os.dup2(2, 1)
    del sys.path[0]  # the folder of this file: its modules must not shadow others

    def say(what: Any) -> None:
        out.write(json.dumps(what) + "\n")

    job: Job = json.loads(sys.stdin.readline())
    distributions, modules, read = READERS[job["client"]]
    for module in modules.split():
        import_module(module)
    say({name: version(name) for name in distributions.split()})
    out.flush()
    for line in sys.stdin:
        path = json.loads(line)
        try:
            for key, fields in read(path, job):
                say([key, {name: summary(value) for name, value in fields.items()}])
            say({"end": True})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"[:2000]})
        out.flush()
    os._exit(0)  # skip Python's shutdown, in which numba fails


if __name__ == "__main__":
    main()
