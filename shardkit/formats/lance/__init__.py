"""Lance through pylance: a dataset is one of Lance, of which our shards are the fragments.

process.py   what is asked of pylance, which runs in a process of its own
server.py    that process
reader.py    random access to data files and datasets
writer.py    a data file in one pass
commit.py    the manifest of Lance for a dataset's files
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import FormatError
from shardkit.formats.base import Format
from shardkit.formats.lance.commit import commit
from shardkit.formats.lance.reader import DATA, VERSIONS, LanceReader
from shardkit.formats.lance.writer import LanceWriter
from shardkit.manifest import Manifest
from shardkit.schema import Schema

if find_spec("lance") is None:  # it is imported by the process of `server.py` alone
    raise ModuleNotFoundError("No module named 'lance'", name="pylance")

_SAMPLE_OVERHEAD, _FIELD_OVERHEAD = 64, 40


class Lance(Format):
    name = "lance"
    abilities = (
        "write: one Lance dataset, of which the shards are the fragments; all field types",
        "read at random: images, bytes and long lists of ours from the file, without pylance",
        "read foreign datasets: the latest version, deletions and blobs, on this machine's disks",
    )
    reader = LanceReader
    writer = LanceWriter

    def layout(self, schema: Schema) -> dict[str, Any]:
        for name in schema:
            if "." in name or not name:
                raise FormatError(
                    "Lance has no columns with dots in their names, which lead into structs",
                    field=name,
                    fix="name the field otherwise, or leave it out",
                )
        return super().layout(schema)

    def bound(self, payload: npt.NDArray[np.int64], fields: int) -> npt.NDArray[np.int64]:
        return payload + (_SAMPLE_OVERHEAD + fields * _FIELD_OVERHEAD)

    def shard_stem(self, number: int, shards: int) -> str:
        return f"{DATA}/shard-{number:06d}"

    def listed(self, folder: Path) -> list[str] | None:
        """The manifest of the latest version: files of older ones are not to be read."""
        found = [path.name for path in (folder / VERSIONS).glob("*.manifest")]
        numbers = {int(name.partition(".")[0]): name for name in found if name[:-9].isdigit()}
        if not numbers:
            return None
        down = max(numbers) >= 2**63  # versions are numbered from the largest number downwards
        return [f"{VERSIONS}/{numbers[(min if down else max)(numbers)]}"]

    def complete(self, folder: Path, manifest: Manifest) -> list[Path]:
        return commit(folder, manifest)


FORMAT = Lance()
