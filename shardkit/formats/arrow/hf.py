"""Folders as saved by Hugging Face datasets: Arrow streams, and two files that describe them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from shardkit.formats.arrow import ColumnFormat
from shardkit.formats.arrow.columns import features
from shardkit.formats.arrow.reader import IpcReader
from shardkit.formats.arrow.writer import ipc_stream
from shardkit.helpers.checked import MAX_BYTES, from_json
from shardkit.helpers.names import checked_name
from shardkit.metadata.manifest import Manifest
from shardkit.storage import fs


class _File(TypedDict):
    """A shard in state.json, as Hugging Face datasets writes it."""

    filename: str


class _State(TypedDict):
    """The file state.json of a folder that Hugging Face datasets saved."""

    _data_files: list[_File]


class Hf(ColumnFormat):
    name = "hf"
    abilities = (
        "write: folders for load_from_disk with features Image and ClassLabel, all field types",
        "read at random: folders of save_to_disk and streams, value by value",
        "convert to other formats without decoding: values and JSON text pass through unchanged",
    )

    def listed(self, folder: Path) -> list[str] | None:
        state = folder / "state.json"
        if not (folder / "dataset_info.json").is_file():
            return None
        saved = from_json(_State, fs.read(state, MAX_BYTES), "the file", path=state)
        return [
            checked_name(file["filename"], state, f"_data_files[{number}].filename")
            for number, file in enumerate(saved["_data_files"])
        ]

    def shard_stem(self, number: int, shards: int) -> str:
        return f"data-{number:05d}-of-{shards:05d}"

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        fingerprint = xxhash.xxh3_64()  # after which datasets names its caches
        for file in manifest.all_files():
            fingerprint.update(f"{file.checksum} ".encode())
        info = {
            "citation": "",
            "description": "",
            "features": features(manifest.schema, manifest.class_names),
            "homepage": "",
            "license": "",
        }
        state: dict[str, Any] = {
            "_data_files": [{"filename": shard.file.name} for shard in manifest.shards],
            "_fingerprint": fingerprint.hexdigest(),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        return [_write(folder / "dataset_info.json", info), _write(folder / "state.json", state)]

    def complete_splits(self, folder: Path, splits: Mapping[str, Manifest]) -> list[Path]:
        """Let a folder whose subfolders are splits be loaded as a DatasetDict."""
        return [_write(folder / "dataset_dict.json", {"splits": [*splits]}, indent=None)]


def _write(path: Path, content: dict[str, Any], indent: int | None = 2) -> Path:
    fs.write_file(path, json.dumps(content, indent=indent, allow_nan=False).encode())
    return path


FORMAT = Hf(IpcReader, ipc_stream)
