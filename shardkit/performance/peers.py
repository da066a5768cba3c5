"""Other libraries ("peers") that `shardkit bench` measures, each with a store of the same samples.

They run in their own processes and environments (`peer_loops.py`), as their requirements conflict.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from shardkit.codecs.image import SUFFIX_OF, format_of
from shardkit.codecs.pixels import ppm_header, to_ppm
from shardkit.conversion.convert import convert
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_dataset
from shardkit.errors import SampleError, ShardkitError, UsageError, WorkerError
from shardkit.helpers import os_errors
from shardkit.helpers.json_process import JsonProcess
from shardkit.helpers.processors import processors
from shardkit.performance.contender import PEER, Contender
from shardkit.performance.defaults import image_field
from shardkit.sample import Sample
from shardkit.schema import Array, Bytes, FieldType, Image, Int
from shardkit.storage import fs

SCRIPT = Path(__file__).with_name("peer_loops.py")
_IMAGES, _PIXELS, _TOKENS = "images", "raw pixels", "tokens"
# Name of a peer -> kinds of data with which it is measured.
PEERS = {
    "imagefolder": (_IMAGES,),
    "webdataset": (_IMAGES,),
    "datasets": (_IMAGES,),
    "ffcv": (_IMAGES, _PIXELS),
    "litdata": (_IMAGES, _TOKENS),
    "streaming": (_IMAGES,),
    "mmap": (_TOKENS,),
}
_FORMATS = {
    "webdataset": "wds",
    "datasets": "hf",
    "ffcv": "beton",
}  # stores that shardkit writes
_TAR = 16_000_000  # bytes per TAR: small, so that all workers get about the same number of TARs


def interpreters_in(folders: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The interpreters of virtual environments: the folders, and those directly inside them.

    Raises UsageError for a folder without virtual environments.
    """
    found = []
    for folder in map(Path, folders):
        with os_errors.explained("list", folder):
            environments = [folder, *sorted(folder.iterdir())]
        inside = [
            str(environment / name)
            for environment in environments
            for name in ("bin/python", "Scripts/python.exe")
            if (environment / "pyvenv.cfg").is_file() and (environment / name).exists()
        ]
        if not inside:
            raise UsageError(
                "the folder has no virtual environments",
                path=folder,
                expected="a virtual environment made by `python -m venv`, or a folder of them",
            )
        found += inside
    return found


def contenders(
    dataset: Dataset, interpreters: Sequence[str], work: Path, *, limit: int
) -> tuple[list[Contender], dict[str, str]]:
    """The peers that can be measured with the first `limit` samples, and why the others cannot.

    Each runs in the first interpreter in which it is installed, starting with this one. Stores are
    written to a folder in `work` that is named after the samples, and are reused.
    """
    try:
        data = _data_of(dataset, min(limit, len(dataset)))
        stores = _Stores(data, work / data.name)
    except ShardkitError as error:
        return [], dict.fromkeys(PEERS, error.what)
    # The libraries are not imported here, which takes seconds: a broken one fails when it runs.
    installed = [(python, _ask(python, "found")) for python in (sys.executable, *interpreters)]
    found = {name: _peer(name, stores, installed) for name in PEERS}
    ready = [peer for peer in found.values() if isinstance(peer, Contender)]
    return ready, {name: why for name, why in found.items() if isinstance(why, str)}


def _peer(
    name: str, stores: _Stores, installed: list[tuple[str, dict[str, Any]]]
) -> Contender | str:
    """The peer, or why it cannot be measured."""
    kind, kinds = stores.data.kind, PEERS[name]
    if kind not in kinds:
        return f"not measured with {kind}, only with {' and '.join(kinds)}"
    loop = f"{name}-tokens" if kinds[0] != kind == _TOKENS else name
    having = [(python, about[loop]) for python, about in installed if "version" in about[loop]]
    if not having:
        missing = min((about[loop]["missing"] for _, about in installed), key=len)
        return f"not installed: pip install {' '.join(missing)}"
    python, about = having[0]
    try:
        store = stores.get(loop, python)
    except ShardkitError as error:
        return f"its store could not be written: {error.what}"
    command = [python, str(SCRIPT), "run", loop, str(store)]
    measures = ("load",) if name == "ffcv" else ("read", "load")
    details = {"version": about["version"], "path": os.fspath(store), "note": _note(name, store)}
    return Contender(name, PEER, command, store, details, measures)


def _ask(python: str, *words: str) -> dict[str, Any]:
    """Run the script in an interpreter and return its answer. Raises WorkerError if it fails."""
    try:
        with JsonProcess([python, str(SCRIPT), *words]) as process:
            answer: dict[str, Any] = process.receive()
    except WorkerError as error:
        raise WorkerError(error.found or error.what, path=python) from error
    if "error" in answer:
        raise WorkerError(answer["error"], path=python)
    return answer


def _note(name: str, store: Path) -> str | None:
    """A note on images that were re-encoded for FFCV, which reads only JPEG and pixels."""
    manifest = open_dataset(store).manifest if name == "ffcv" else None
    if manifest is None or not manifest.encoded:
        return None
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.encoded.items())
    return f"encoded as JPEG for it: {reasons}"


# --- the samples ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    """The first samples of a dataset, with the fields that all peers get."""

    dataset: Dataset
    kind: str
    field: str
    label: str | None
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """An image's bytes or a block of tokens, and the label."""
        sample = self.dataset[index]
        value = sample.get(self.field)
        if value is None:
            raise SampleError(f"a sample has no {self.field!r}", key=sample["__key__"])
        if self.kind != _TOKENS and isinstance(value, np.ndarray):
            value = to_ppm(value)
        return {"image": value, "label": sample.get(self.label, 0) if self.label else 0}

    @cached_property
    def name(self) -> str:
        """A unique name: the number of samples, and a hash of all values."""
        digest = xxhash.xxh3_128()
        for number in range(self.count):
            value, label = self[number].values()
            about = len(value) if isinstance(value, bytes) else value.dtype.str
            digest.update(f"{about} {label} ".encode())
            digest.update(value)
        return f"{self.count}-{self.kind.replace(' ', '-')}-{digest.hexdigest()[:16]}"


def _data_of(dataset: Dataset, count: int) -> _Data:
    """The images, pixels or tokens of a dataset. Raises SampleError if it has none of them."""
    field, schema = image_field(dataset), dataset.schema
    if field is not None and count:
        labels = [name for name in (dataset.label, "cls") if isinstance(schema.get(name), Int)]
        data = _Data(dataset, _IMAGES, field, labels[0] if labels else None, count)
        pixels = ppm_header(data[0]["image"]) is not None
        return replace(data, kind=_PIXELS) if pixels else data
    if count and _are_blocks(schema.get("tokens")):
        return _Data(dataset, _TOKENS, "tokens", None, count)
    raise SampleError("the samples have neither images nor token blocks of equal length")


def _are_blocks(kind: FieldType | None) -> bool:
    """Whether a field has integer arrays of equal length."""
    if not isinstance(kind, Array) or kind.optional or np.dtype(kind.dtype).kind not in "iu":
        return False
    return kind.shape is not None and len(kind.shape) == 1 and bool(kind.shape[0])


# --- their stores --------------------------------------------------------------------------------


class _Stores:
    """The stores of the same samples in one folder, by the peers' names in the script."""

    def __init__(self, data: _Data, folder: Path) -> None:
        self.data, self.folder = data, folder

    def get(self, name: str, python: str) -> Path:
        """The peer's store. If missing, it is written to a temporary folder and then renamed."""
        store = self.folder / name
        if store.exists():
            return store
        fs.make_folder(self.folder)
        with os_errors.explained("write", self.folder):
            unfinished = tempfile.TemporaryDirectory(prefix="unfinished-", dir=self.folder)
        with unfinished as folder:
            out = Path(folder) / name
            if name == "imagefolder":
                self._write_files(out)
            elif name == "mmap":
                self._write_blocks(out)
            elif name in _FORMATS:
                self._convert(name, out)
            else:
                source = self.get("mmap" if self.data.kind == _TOKENS else "imagefolder", python)
                _ask(python, "write", name, str(source), str(out))
            fs.rename(out, store)
        return store

    def _convert(self, name: str, out: Path) -> None:
        samples = None
        if name == "webdataset":  # at least two TARs per worker, as workers do not share a TAR
            some = [len(self.data[number]["image"]) for number in range(min(len(self.data), 100))]
            size = sum(some) * len(self.data) // len(some)
            samples = max(len(self.data) // max(size // _TAR, 2 * processors()), 1)
        # Stored as bytes for `datasets`, which would decode images with a decoder of its own.
        schema = {"image": Bytes() if name == "datasets" else Image(), "label": Int()}
        source = cast("Sequence[Sample]", self.data)
        convert(source, _FORMATS[name], out, schema=schema, shard_samples=samples)

    def _write_files(self, out: Path) -> None:
        """Write the images as files, in one folder per label."""
        for number in range(len(self.data)):
            value, label = self.data[number].values()
            suffix = SUFFIX_OF[format_of(value) or "jpeg"]
            path = out / f"{label:06d}" / f"{number:08d}.{suffix}"
            fs.make_folder(path.parent)
            with os_errors.explained("write", path):
                path.write_bytes(value)

    def _write_blocks(self, out: Path) -> None:
        """Write all blocks as one array to a file for memory mapping."""
        fs.make_folder(out)
        first, path = self.data[0]["image"], out / "tokens.npy"
        with os_errors.explained("write", path):
            blocks = np.lib.format.open_memmap(
                path, mode="w+", dtype=first.dtype, shape=(len(self.data), len(first))
            )
            for number in range(len(self.data)):
                blocks[number] = self.data[number]["image"]
            blocks.flush()
