"""Reads a TAR shard at random: one row of the index says where a sample's values stand.

Our own shards have that index beside them. For others it is built in memory from the headers.
"""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakValueDictionary

import numpy as np

from shardkit import storage
from shardkit.codecs.array import load_array, load_table
from shardkit.codecs.compression import COMPRESSED_BLOCK, compression_of, decompressed
from shardkit.errors import (
    DamagedError,
    FormatError,
    SampleError,
    ShardkitError,
    ShardkitWarning,
    StorageError,
)
from shardkit.formats.base import OldReader
from shardkit.formats.wds import names
from shardkit.formats.wds.layout import Member, column, find_index, index_dtype, members, row_struct
from shardkit.sample import JsonText, Sample
from shardkit.schema import (
    Array,
    Bool,
    Bytes,
    FieldType,
    Float,
    Image,
    Int,
    Json,
    Schema,
    Text,
    int64,
)
from shardkit.storage import Data

if TYPE_CHECKING:
    import numpy.typing as npt

    _Index: TypeAlias = npt.NDArray[np.void]

_MAGIC = 6  # bytes that tell how a file is compressed
_INDEX_BYTES = 64 << 20  # of the index of a foreign TAR, which may be as large as the TAR too
_BESIDES = 8192  # bytes that one read for all of a sample may take too many
_Decoder = Callable[[bytes], Any]
_Column = tuple[str, int, _Decoder | None]  # field, where its offset is in a row, what decodes it


class WdsReader(OldReader):
    """One TAR shard. Values are copies; the file itself is never read whole.

    It is mapped, or else read piece by piece, with its index in memory.
    """

    def __init__(
        self, path: Path, layout: dict[str, Any] | None = None, mapped: bool = True
    ) -> None:
        self._path = path
        self._mapped = mapped
        self._data: Data | None
        self._data, self.temporary_bytes = _opened(path, mapped)
        if layout is None:
            layout = _scan(self._data, path)
        place = None if "index" in layout else find_index(path)
        if "index" not in layout and place is None:
            layout = _scan(self._data, path, layout)
        self.key_hashes = layout.pop("key_hashes", None)
        self.layout = layout
        self.schema = Schema.from_json(self.layout["schema"])
        self._odd_keys: dict[int, str] = self.layout.get("odd_keys", {})
        index = self.layout.get("index")
        if index is None:
            assert place is not None
            index = load_table(place, index_dtype(self.schema), "the index of a shard", mapped)
        self._index: _Index = index
        self._length = len(index)
        # One call unpacks a row: numpy would take longer than the read itself.
        self._unpack = row_struct(self.schema).unpack_from
        self._row_size = index.dtype.itemsize
        self._rows = memoryview(cast(Any, index.view(np.uint8)))
        self._columns = _columns(self.schema, _DECODERS)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Sample:
        return self._read(position, self._columns)

    def _read(self, position: int, columns: list[_Column]) -> Sample:
        data = self._open
        if not 0 <= position < self._length:
            raise IndexError(f"{self._path} has {self._length} samples, not a position {position}")
        row = self._unpack(self._rows, position * self._row_size)
        start, size = row[:2]
        name = "__key__"
        sample: Sample = {}
        first = 0  # byte of the file that `data` begins with
        try:
            if not self._mapped:
                first, data = _one_piece(data, row, columns)
            if not size:
                sample[name] = self._odd_keys[position]
            else:
                sample[name] = data[start - first : start - first + size].decode()
            for name, at, decode in columns:
                start, size = row[at], row[at + 1]
                if start:
                    value = data[start - first : start - first + size]
                    if len(value) != size:
                        raise ValueError("the file ends before it")
                    sample[name] = value if decode is None else decode(value)
        except ShardkitError as error:  # the file was cut since
            raise error.located(
                position=position, key=sample.get("__key__"), field=name
            ) from error.__cause__
        except (ValueError, KeyError, RecursionError) as error:
            expected = self.schema[name].python if name in self.schema else "a key"
            raise SampleError(
                f"a value is damaged: {error}",
                path=self._path,
                position=position,
                key=sample.get("__key__"),
                field=name,
                offset=start,
                expected=expected,
            ) from error
        return sample

    def stored(self, position: int) -> Sample:
        """The sample with JSON values as the text that is stored."""
        return self._read(position, _columns(self.schema, {**_DECODERS, Json: _json_text}))

    def read_fields(self, position: int, fields: Collection[str]) -> Sample:
        """The sample with these fields alone; the bytes of the others are not touched."""
        return self._read(position, [column for column in self._columns if column[0] in fields])

    def read_rows(
        self, field: str, positions: npt.NDArray[np.int64], out: npt.NDArray[Any]
    ) -> bool:
        """Arrays of one shape in many samples: `.npy` members that begin with the same header."""
        if not isinstance(self.schema[field], Array):
            return False
        data, places = self._open, self._index[column(field)][positions]
        size = int(places["size"][0]) if len(places) else 0
        if not size or not ((places["offset"] != 0) & (places["size"] == size)).all():
            return not len(places)
        try:
            members = storage.rows(data, places["offset"].astype(np.int64), size)
            first = load_array(members[0].tobytes())
        except (ValueError, ShardkitError):
            return False
        start = size - first.nbytes
        alike = (members[:, :start] == members[0, :start]).all()
        if not alike or first.shape != out.shape[1:] or not first.flags.c_contiguous:
            return False
        out[...] = members[:, start:].view(first.dtype).reshape(out.shape)
        return True

    def read_keys(self, positions: npt.NDArray[np.int64]) -> list[str]:
        """The keys of many samples."""
        data, places = self._open, self._index["__key__"][positions]
        starts = places["offset"]
        stops = starts + places["size"]
        try:
            spans = zip(starts.tolist(), stops.tolist(), strict=True)
            keys = [data[start:stop].decode() for start, stop in spans]
        except (UnicodeDecodeError, ShardkitError):  # reading them one by one says where
            keys = [self._read(position, [])["__key__"] for position in positions.tolist()]
        if self._odd_keys:
            for number, position in enumerate(positions.tolist()):
                keys[number] = self._odd_keys.get(position, keys[number])
        return keys

    def keys(self) -> list[str]:
        """The key of every sample, in order."""
        return self.read_keys(np.arange(self._length))

    def sizes(self, field: str) -> npt.NDArray[np.int64]:
        """Stored bytes of the field in each sample that has it, in order."""
        places = self._index[column(field)]
        return cast("npt.NDArray[np.int64]", places["size"][places["offset"] != 0].astype(np.int64))

    @property
    def _open(self) -> Data:
        if self._data is None:
            raise ValueError(f"{self._path} is closed")
        return self._data

    def close(self) -> None:
        self._data = None

    def __reduce__(self) -> tuple[Any, ...]:
        return WdsReader, (self._path, self.layout, self._mapped)


def _one_piece(data: Data, row: tuple[int, ...], columns: list[_Column]) -> tuple[int, Data]:
    """All of a sample that is wanted, by one read: where it begins in the file, and its bytes.

    Where that would read much besides, 0 and `data` itself.
    """
    first, wanted = row[:2]
    stop = first + wanted
    for _, at, _ in columns:
        start, size = row[at], row[at + 1]
        if start:
            if start < first or not wanted:
                first = start
            stop = max(stop, start + size)
            wanted += size
    if stop - first <= wanted + _BESIDES:
        return first, data[first:stop]
    return 0, data


def _columns(schema: Schema, decoders: dict[type[FieldType], _Decoder | None]) -> list[_Column]:
    """Per field its name, where its offset is in an unpacked row, and what decodes its payload."""
    columns = []
    at = 2  # after the key's offset and size
    for name, kind in schema.items():
        columns.append((name, at, decoders[type(kind)]))
        at += 4 if isinstance(kind, Image) else 2
    return columns


# --- foreign shards ------------------------------------------------------------------------------


def _scan(data: Data, path: Path, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    """The layout of a TAR from its headers: schema, index, and odd keys.

    Odd are the keys that do not stand in one piece in the file, or are not Unicode. A TAR of ours
    that has lost its index comes with its `layout`, which names fields and types.
    """
    field_of = {}
    if layout is not None:
        field_of = {e: f for f, extensions in layout["extensions"].items() for e in extensions}
    keys: list[tuple[str, int]] = []
    found: dict[str, list[tuple[int, int, int]]] = {}
    ignored: Counter[str] = Counter()
    for key, name_offset, fields in _samples(data, path, ignored):
        for extension, member in fields.items():
            field = field_of.get(extension, extension)
            found.setdefault(field, []).append((len(keys), member.offset, member.size))
        keys.append((key, name_offset))
    if layout is not None:
        schema = Schema.from_json(layout["schema"])
        found = {field: places for field, places in found.items() if field in schema}
    else:
        schema = Schema({f: _foreign_type(f, p, data, len(keys)) for f, p in found.items()})
    row = index_dtype(schema)
    if len(keys) * row.itemsize > max(_INDEX_BYTES, len(data)):
        raise FormatError(
            "the TAR has too many extensions, most of which few of its samples have",
            path=path,
            expected="the same few members in each sample: a.jpg a.json, b.jpg b.json, ...",
            found=f"{len(schema):,} extensions in {len(keys):,} samples",
            fix="give members of a kind one extension: all behind the first dot of a name is it",
        )
    index = np.zeros(len(keys), row)
    for field, places in found.items():
        positions, offsets, sizes = np.array(places, np.int64).T
        index[column(field)]["offset"][positions] = offsets
        index[column(field)]["size"][positions] = sizes
    odd = {}
    for position, (key, name_offset) in enumerate(keys):
        encoded = key.encode("utf-8", "surrogateescape")
        if name_offset >= 0 and encoded == key.encode("utf-8", "replace"):
            index[position]["__key__"] = (name_offset, len(encoded))
        else:
            odd[position] = key
    found_out = {
        "schema": schema.to_json(),
        "index": index,
        "odd_keys": odd,
        "key_hashes": np.fromiter((hash(key) for key, _ in keys), np.int64, len(keys)),
    }
    return {**(layout or {}), **found_out, **({"ignored": ignored} if ignored else {})}


def _samples(
    data: Data, path: Path, ignored: Counter[str]
) -> list[tuple[str, int, dict[str, Member]]]:
    """Members grouped as WebDataset groups them: those with one key that stand side by side."""
    samples: list[tuple[str, int, dict[str, Member]]] = []
    first_with: dict[str, int] = {}
    current = None
    for member in members(data, path, ignored):
        split = names.split(member.name)
        if split is None:
            ignored["TAR member without an extension"] += 1
            continue
        key, field = split
        if key != current:
            if key in first_with:
                raise _key_again(path, member, key, field, samples[first_with[key]][2])
            first_with[key] = len(samples)
            samples.append((key, member.name_offset, {}))
            current = key
        fields = samples[-1][2]
        if field in fields or field in ("__key__", "__url__"):
            raise DamagedError(
                f"a sample has two members for its field {field!r}",
                path=path,
                key=key,
                offset=member.offset,
                expected="every extension once per sample; letter case does not count",
                fix="rename one of the members and pack the TAR again",
            )
        fields[field] = member
    # A member x.__bad__ that is not empty marks a sample which WebDataset drops.
    good = [s for s in samples if not ("__bad__" in s[2] and s[2].pop("__bad__").size)]
    if len(good) < len(samples):
        ignored["sample marked as __bad__"] += len(samples) - len(good)
    return good


def _key_again(
    path: Path, member: Member, key: str, field: str, earlier: dict[str, Member]
) -> DamagedError:
    first = next(iter(earlier.values()))
    if field in earlier:
        what = "two samples of the TAR have the same key"
        fix = "give them different names, or keep one, and pack the TAR again"
    else:
        what = "the members of a sample do not stand side by side in the TAR"
        fix = "pack it again in order of names: tar --sort=name -cf new.tar folder"
    return DamagedError(
        what,
        path=path,
        key=key,
        offset=member.offset,
        expected="all members of a key in one run",
        found=f"{member.name!r} here, {first.name!r} at byte {first.offset}, other keys between",
        fix=fix,
    )


def _foreign_type(
    field: str, places: list[tuple[int, int, int]], data: Data, samples: int
) -> FieldType:
    """The type of the extension; plain bytes where the first value of the field is not of it."""
    kind = names.decoded_type(field)
    decode = _DECODERS[kind]
    if decode is not None:
        _, offset, size = places[0]
        try:
            decode(data[offset : offset + size])
        except (ValueError, RecursionError):
            kind = Bytes
    return kind(optional=len(places) < samples)


def _opened(path: Path, mapped: bool) -> tuple[Data, int]:
    """The bytes of a TAR, and how many of them stand in a temporary file: all, if it is compressed.

    That file has no name any more: the system removes it when nobody uses it, or the process ends.
    """
    with storage.explained("open", path), open(path, "rb", opener=storage.regular) as file:
        if not compression_of(file.read(_MAGIC)):
            return (_map_file(file) if mapped else storage.PreadFile(path)), 0
        about = os.fstat(file.fileno())
    warnings.warn(
        f"compressed TARs in {path.parent} are unpacked to temporary files in"
        f" {_temporary_folder(path)} while they are open; for fast random access convert them once:"
        " shardkit convert ... --to wds",
        ShardkitWarning,
        stacklevel=4,
    )
    which = path, about.st_size, about.st_mtime_ns
    data = _in_use.get(which) or _unpacked(path)
    if isinstance(data, mmap.mmap):  # there is nothing to share of an empty file
        _in_use[which] = data
    return data, len(data)


# Compressed TARs that somebody has open in this process; size and time tell one file from another.
_in_use: WeakValueDictionary[tuple[Path, int, int], mmap.mmap] = WeakValueDictionary()


def _unpacked(path: Path) -> mmap.mmap | bytes:
    """The plain TAR in a compressed one."""
    try:
        plain: Any = tempfile.TemporaryFile(dir=_temporary_folder(path))  # noqa: SIM115
    except OSError as error:
        raise _no_room(path) from error
    with plain, storage.explained("open", path), open(path, "rb", opener=storage.regular) as file:
        compression = compression_of(file.read(_MAGIC))
        file.seek(0)
        try:
            blocks = iter(lambda: file.read(COMPRESSED_BLOCK), b"")
            for data in decompressed(blocks, compression):
                plain.write(data)
            plain.flush()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room(path) from error
            raise
        except ValueError as error:
            raise DamagedError(
                f"the compressed TAR is damaged: {error}", path=path, fix="copy the file again"
            ) from error
        return _map_file(plain)


def _no_room(path: Path) -> StorageError:
    folder = _temporary_folder(path)
    return StorageError(
        "there is no room to unpack a compressed TAR",
        path=path,
        found=f"{shutil.disk_usage(folder).free:,} bytes free in {folder}",
        fix="make space there, name another folder in the variable TMPDIR, or unpack the shards",
    )


def _temporary_folder(path: Path) -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:  # of those that there are, none can be written to
        raise StorageError(
            "no temporary folder can be written to, to unpack a compressed TAR",
            path=path,
            found=error.strerror,
            fix="make space, name another folder in the variable TMPDIR, or unpack the shards",
        ) from error


def _map_file(file: Any) -> mmap.mmap | bytes:
    size = file.seek(0, io.SEEK_END)
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""


# --- values --------------------------------------------------------------------------------------


def _json_text(data: bytes) -> JsonText:
    return JsonText.checked(data.decode())


def _bool(data: bytes) -> bool:
    value = json.loads(data)
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _float(data: bytes) -> float:
    return float(data.strip(b'"'))  # NaN and the infinities stand in quotes


_DECODERS: dict[type[FieldType], _Decoder | None] = {
    Bytes: None,
    Image: None,
    Int: int64,
    Float: _float,
    Bool: _bool,
    Text: bytes.decode,
    Json: json.loads,
    Array: load_array,
}
