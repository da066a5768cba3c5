"""The other libraries that `shardkit bench` compares with, each with a store of the same samples.

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

from shardkit import storage
from shardkit.codecs.image import SUFFIX_OF, format_of
from shardkit.codecs.pixels import ppm_header, to_ppm
from shardkit.conversion.convert import convert
from shardkit.dataset import Dataset
from shardkit.errors import SampleError, ShardkitError, UsageError, WorkerError
from shardkit.json_process import JsonProcess
from shardkit.opening import open_dataset
from shardkit.performance.contender import PEER, Contender
from shardkit.performance.defaults import image_field
from shardkit.processors import processors
from shardkit.sample import Sample
from shardkit.schema import Array, Bytes, FieldType, Image, Int

SCRIPT = Path(__file__).with_name("peer_loops.py")
_IMAGES, _PIXELS, _TOKENS = "images", "raw pixels", "tokens"
# Name -> kinds of data that it is measured with.
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
}  # the stores that shardkit writes
_TAR = 16_000_000  # bytes of a TAR: small, so that all workers get about as many


def interpreters_in(folders: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The interpreters of virtual environments: of each folder, or of those directly inside of it.

    Raises UsageError for a folder without any.
    """
    found = []
    for folder in map(Path, folders):
        with storage.explained("list", folder):
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
                expected="one, or some directly inside of it, as `python -m venv` makes them",
            )
        found += inside
    return found


def contenders(
    dataset: Dataset, interpreters: Sequence[str], work: Path, *, limit: int
) -> tuple[list[Contender], dict[str, str]]:
    """The peers that can be measured with the first `limit` samples; why the others cannot.

    Each runs in the first interpreter that has it, beginning with this one. Stores are written into
    `work`, in a folder named after the samples, and reused.
    """
    try:
        data = _data_of(dataset, min(limit, len(dataset)))
        stores = _Stores(data, work / data.name)
    except ShardkitError as error:
        return [], dict.fromkeys(PEERS, error.what)
    # Nothing is imported, which takes seconds each: a broken library fails when it is run.
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
    """What the script answers in an interpreter; raises WorkerError where it fails."""
    try:
        with JsonProcess([python, str(SCRIPT), *words]) as process:
            answer: dict[str, Any] = process.receive()
    except WorkerError as error:
        raise WorkerError(error.found or error.what, path=python) from error
    if "error" in answer:
        raise WorkerError(answer["error"], path=python)
    return answer


def _note(name: str, store: Path) -> str | None:
    """The images that were re-encoded for FFCV, which reads only JPEG and pixels."""
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
    """Images, pixels or tokens, whichever there are; raises SampleError for anything else."""
    field, schema = image_field(dataset), dataset.schema
    if field is not None and count:
        labels = [name for name in (dataset.label, "cls") if isinstance(schema.get(name), Int)]
        data = _Data(dataset, _IMAGES, field, labels[0] if labels else None, count)
        pixels = ppm_header(data[0]["image"]) is not None
        return replace(data, kind=_PIXELS) if pixels else data
    if count and _are_blocks(schema.get("tokens")):
        return _Data(dataset, _TOKENS, "tokens", None, count)
    raise SampleError("the samples have neither images nor blocks of tokens of one length")


def _are_blocks(kind: FieldType | None) -> bool:
    """Whether a field has integer arrays of one length."""
    if not isinstance(kind, Array) or kind.optional or np.dtype(kind.dtype).kind not in "iu":
        return False
    return kind.shape is not None and len(kind.shape) == 1 and bool(kind.shape[0])


# --- their stores --------------------------------------------------------------------------------


class _Stores:
    """The stores of the same samples in one folder, by the peers' names in the script."""

    def __init__(self, data: _Data, folder: Path) -> None:
        self.data, self.folder = data, folder

    def get(self, name: str, python: str) -> Path:
        """The peer's store, which is written if missing, and renamed once complete."""
        store = self.folder / name
        if store.exists():
            return store
        storage.make_folder(self.folder)
        with storage.explained("write", self.folder):
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
            storage.rename(out, store)
        return store

    def _convert(self, name: str, out: Path) -> None:
        samples = None
        if name == "webdataset":  # at least two TARs a worker, as workers do not share one
            some = [len(self.data[number]["image"]) for number in range(min(len(self.data), 100))]
            size = sum(some) * len(self.data) // len(some)
            samples = max(len(self.data) // max(size // _TAR, 2 * processors()), 1)
        # As images `datasets` would decode them itself, not by the decoder that others use.
        schema = {"image": Bytes() if name == "datasets" else Image(), "label": Int()}
        source = cast("Sequence[Sample]", self.data)
        convert(source, _FORMATS[name], out, schema=schema, shard_samples=samples)

    def _write_files(self, out: Path) -> None:
        """A folder for each label, and the images as files."""
        for number in range(len(self.data)):
            value, label = self.data[number].values()
            suffix = SUFFIX_OF[format_of(value) or "jpeg"]
            path = out / f"{label:06d}" / f"{number:08d}.{suffix}"
            storage.make_folder(path.parent)
            with storage.explained("write", path):
                path.write_bytes(value)

    def _write_blocks(self, out: Path) -> None:
        """All blocks in one array in a file that can be mapped."""
        storage.make_folder(out)
        first, path = self.data[0]["image"], out / "tokens.npy"
        with storage.explained("write", path):
            blocks = np.lib.format.open_memmap(
                path, mode="w+", dtype=first.dtype, shape=(len(self.data), len(first))
            )
            for number in range(len(self.data)):
                blocks[number] = self.data[number]["image"]
            blocks.flush()
