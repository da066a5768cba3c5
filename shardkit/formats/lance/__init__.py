"""Lance, with pylance: a shardkit dataset is a Lance dataset whose fragments are the shards.

process.py   calls to pylance, which runs in a separate process
server.py    that process
reader.py    random access to data files and datasets
writer.py    writes data files, and the Lance manifest of a dataset
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import FormatError, rename_option
from shardkit.formats.base import Format
from shardkit.formats.lance.reader import DATA, VERSIONS, LanceReader
from shardkit.formats.lance.writer import LanceWriter, commit
from shardkit.metadata.manifest import Manifest
from shardkit.schema import Schema

if find_spec("lance") is None:  # only the process of `server.py` imports it
    raise ModuleNotFoundError("No module named 'lance'", name="pylance")

_SAMPLE_OVERHEAD, _FIELD_OVERHEAD = 64, 40


class Lance(Format):
    name = "lance"
    abilities = (
        "write: one Lance dataset, whose fragments are the shards; all field types",
        "read at random: its own images, bytes and long lists from the file, without pylance",
        "read third-party datasets: the latest version, deletions and blobs, on local disks",
    )
    reader = LanceReader
    writer = LanceWriter

    def layout(self, schema: Schema) -> dict[str, Any]:
        for name in schema:
            if "." in name or not name:
                raise FormatError(
                    "Lance column names cannot be empty or contain dots, which address structs",
                    field=name,
                    fix=f"rename it: {rename_option(name)}",
                )
        return super().layout(schema)

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + (_SAMPLE_OVERHEAD + fields * _FIELD_OVERHEAD)

    def shard_stem(self, number: int, shards: int) -> str:
        return f"{DATA}/shard-{number:06d}"

    def listed(self, folder: Path) -> list[str] | None:
        """Return the manifest of the latest version: files of older versions must not be read."""
        found = [path.name for path in (folder / VERSIONS).glob("*.manifest")]
        numbers = {int(name.partition(".")[0]): name for name in found if name[:-9].isdigit()}
        if not numbers:
            return None
        down = max(numbers) >= 2**63  # Lance can number versions downwards from 2**64 - 1
        return [f"{VERSIONS}/{numbers[(min if down else max)(numbers)]}"]

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        return commit(folder, manifest)


FORMAT = Lance()
