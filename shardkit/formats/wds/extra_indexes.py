"""Files beside TARs that let the loaders of other libraries read them unchanged: `--beside`.

dali      shard-000000.idx      the index of DALI's fn.readers.webdataset, as wds2idx 1.2 writes it
energon   shard-000000.tar.idx  the offsets of the samples; `.nv-meta` describes the folder
wids      wids.json             the shards and their numbers of samples

The two `.idx` files are written with each shard, the others from the manifest at the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import FormatError, SampleError
from shardkit.formats.wds.layout import BLOCK, NAME
from shardkit.metadata.manifest import Manifest
from shardkit.storage import fs

# Name -> whether it works for an output that is a single file: Energon's files describe a folder.
LOADERS = {"dali": True, "energon": False, "wids": True}

_VERSION = b"v1.2"  # of DALI's index
_WORDS = 4  # words per member in DALI's index: extension, offset, size, name
_BLANK = re.compile(rb"\s")
_META = ".nv-meta"
_LARGEST = 8**11  # bytes of a member from which its size is not in octal, which wids cannot read
_ENERGON = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


class Beside:
    """Collects and writes the files that the loaders in `asked` need beside one shard."""

    def __init__(self, path: Path, asked: Iterable[str], extensions: Iterable[bytes]) -> None:
        """Raises FormatError for an extension that a loader cannot handle."""
        self._path = path
        self._asked = frozenset(asked)
        self._lines: list[bytes] = []
        for extension in extensions if "dali" in self._asked else ():
            if len(extension) < 2 or _BLANK.search(extension):
                raise FormatError(
                    "DALI's index, which separates names by blanks, cannot hold a field",
                    found=f"the extension {extension.decode()!r}",
                    fix="rename the field with --rename, or omit --beside dali",
                )

    def add(self, key: str, members: Sequence[tuple[bytes, bytes, int, int]]) -> None:
        """Add a sample's members: name, extension with its dot, offset and size.

        Raises SampleError for a sample that a loader cannot read.
        """
        for name, extension, _, size in members:
            if "wids" in self._asked and (len(name) + len(extension) > NAME or size >= _LARGEST):
                raise SampleError(
                    "wids cannot read a member of a TAR",
                    key=key,
                    expected=f"a name of up to {NAME} bytes, and less than 8 GiB",
                    found=f"{len(name) + len(extension)} bytes of name, {size:,} bytes",
                    fix="give it a shorter key, or omit --beside wids",
                )
        if "dali" not in self._asked:
            return
        if _BLANK.search(members[0][0]):
            raise SampleError(
                "DALI's index, which separates names by blanks, cannot hold a key",
                key=key,
                fix="use --safe-keys, which encodes blanks, or omit --beside dali",
            )
        words = [b"%b %d %d %b%b" % (e[1:], at, size, n, e) for n, e, at, size in members]
        self._lines.append(b" ".join(words))

    def write(self, index: npt.NDArray[np.void]) -> None:
        """Write the files of a finished shard; `index` contains all of its samples."""
        if "dali" in self._asked:
            lines = [b"%b %d" % (_VERSION, len(self._lines)), *self._lines, b""]
            fs.write_file(self._path.with_suffix(".idx"), b"\n".join(lines))
        if "energon" in self._asked:
            path = self._path.with_name(f"{self._path.name}.idx")
            fs.write_file(path, _starts(index).tobytes())

    def append(self, part: Path, start: int) -> None:
        """Add the samples of the shard `part`, which begin at byte `start` of this one."""
        if "dali" in self._asked:
            for line in fs.read(part.with_suffix(".idx")).splitlines()[1:]:
                words = line.split(b" ")
                words[1::_WORDS] = [b"%d" % (int(word) + start) for word in words[1::_WORDS]]
                self._lines.append(b" ".join(words))


def _starts(index: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """The offset of each sample, which is the end of the previous one, and the end of the last."""
    starts = np.zeros(len(index) + 1, "<u8")
    for name in index.dtype.names or ():
        if name != "__key__":
            ends = (index[name]["offset"] + index[name]["size"] + BLOCK - 1) // BLOCK * BLOCK
            starts[1:] = np.maximum(starts[1:], ends)
    return starts


def complete(folder: Path, parts: Mapping[str, Manifest]) -> list[Path]:
    """Write the files that describe a folder: its dataset (named ""), or its splits by name."""
    asked = {name for manifest in parts.values() for name in manifest.recipe.get("beside", ())}
    shards = {name: [s for s in each.shards if s.samples] for name, each in parts.items()}
    contents: dict[str, Any] = {}
    if "wids" in asked and "" in parts:
        listed = [
            {"url": s.file.name, "nsamples": s.samples, "filesize": s.file.bytes}
            for s in shards[""]
        ]
        first = parts[""].shards[0].file.name
        name = "wids.json" if first == "shard-000000.tar" else f"{first}.wids.json"
        index = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": listed}
        contents[name] = index
    if "energon" in asked:
        fs.make_folder(folder / _META)
        paths = {
            split: {f"{split}/{s.file.name}".lstrip("/"): s.samples for s in each}
            for split, each in shards.items()
        }
        counts = {path: samples for each in paths.values() for path, samples in each.items()}
        named = {split or "train": [*each] for split, each in paths.items()}
        if "" in parts:
            named |= {"val": [], "test": []}
        contents[f"{_META}/.info.json"] = {"shard_counts": counts}
        contents[f"{_META}/split.yaml"] = {"split_parts": named, "exclude": []}  # JSON is YAML, too
        contents[f"{_META}/dataset.yaml"] = _ENERGON
    for name, content in contents.items():
        text = content
        if not isinstance(content, str):
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        fs.write_file(folder / name, text.encode())
    if "energon" in asked:
        fs.sync(folder / _META)
    return [folder / name for name in contents]
