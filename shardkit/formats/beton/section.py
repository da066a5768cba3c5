"""Our own section of a .beton: what FFCV has no place for, where it does not look.

    head       JSON text's size, keys' size in bytes
    text       JSON: version, schema, classes; zeros to a multiple of 8
    offsets    of each key in the keys, and of the end
    presence   a byte per sample for each optional field, field after field: 0 where it is absent
    keys       UTF-8, one after the other

In a mapped file a section is read where it stands: to open one costs the same for ten samples and
ten million.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from shardkit.checked import checked, parse
from shardkit.errors import DamagedError, FormatError
from shardkit.schema import Schema
from shardkit.storage import SMALL, Data, PreadFile, piece

if TYPE_CHECKING:
    import numpy.typing as npt

    Classes = Mapping[str, Sequence[str]] | None

VERSION = 1
_HEAD = np.dtype([("text", "<u8"), ("keys", "<u8")])
_OFFSET = np.dtype("<u8")


class _Version(TypedDict):
    """Of a section: others are not looked at."""

    version: Any


class _About(_Version):
    """The text of a section."""

    schema: dict[str, Any]
    classes: dict[str, list[str]] | None


def optional_fields(schema: Schema) -> list[str]:
    """The fields that have a column of presence, in the order of those columns."""
    return [name for name, kind in schema.items() if kind.optional]


def pack_text(schema: Schema, classes: Classes) -> bytes:
    """The JSON text, with the zeros behind it."""
    named = None if classes is None else {name: list(names) for name, names in classes.items()}
    about = {"version": VERSION, "schema": schema.to_json(), "classes": named}
    text = json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()
    return text + bytes(-len(text) % 8)


def size(text: bytes, samples: int, optional: int, keys: int) -> int:
    """Bytes of a section with `text`, and `keys` bytes of keys."""
    return _HEAD.itemsize + len(text) + _OFFSET.itemsize * (samples + 1) + optional * samples + keys


def pack_head(text: bytes, keys: int) -> bytes:
    """The head and the text."""
    return np.array((len(text), keys), _HEAD).tobytes() + text


class Section(NamedTuple):
    """A section in a file."""

    schema: Schema
    classes: dict[str, list[str]] | None
    offsets: memoryview  # where each key begins among the keys, and where the last one ends
    keys: Data  # what the keys stand in, from byte `keys_at` on
    keys_at: int
    keys_size: int
    presence: dict[str, npt.NDArray[np.uint8]]

    def key_offsets(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self.offsets, _OFFSET)


def unpack(data: Data, at: int, length: int, samples: int, path: Path) -> Section:
    """The section of `length` bytes at `at`; raises DamagedError where it contradicts itself."""
    if length < _HEAD.itemsize or at + length > len(data):
        raise _damaged(path, at, f"{length:,} bytes in a file of {len(data):,}")
    head = np.frombuffer(data[at : at + _HEAD.itemsize], _HEAD)[0]
    text_size, keys_size = int(head["text"]), int(head["keys"])
    text_at = at + _HEAD.itemsize
    if text_size > length:
        raise _damaged(path, at, f"a text of {text_size:,} bytes in {length:,}")
    schema, classes = _unpack_text(data[text_at : text_at + text_size], path, text_at)
    optional = optional_fields(schema)
    offsets_at = text_at + text_size
    presence_at = offsets_at + _OFFSET.itemsize * (samples + 1)
    keys_at = presence_at + len(optional) * samples
    if keys_at + keys_size != at + length:
        raise _damaged(path, at, f"parts of {keys_at + keys_size - at:,} bytes in {length:,}")
    columns = np.frombuffer(piece(data, presence_at, keys_at), np.uint8)
    presence = dict(zip(optional, columns.reshape(len(optional), samples), strict=True))
    offsets = piece(data, offsets_at, presence_at)
    keys = data
    if isinstance(data, PreadFile) and keys_size <= SMALL * samples:
        keys, keys_at = data[keys_at : keys_at + keys_size], 0
    return Section(schema, classes, offsets, keys, keys_at, keys_size, presence)


def _unpack_text(text: bytes, path: Path, at: int) -> tuple[Schema, dict[str, list[str]] | None]:
    try:
        found = parse(text.rstrip(b"\0"))
        version = checked(_Version, found)["version"]
        if version == VERSION:
            about = checked(_About, found)
            return Schema.from_json(about["schema"]), about["classes"]
    except FormatError as error:  # a type that this version does not know
        raise error.located(path=path, offset=at) from error.__cause__
    except ValueError as error:
        raise _damaged(path, at, f"a text that is no description: {error}") from error
    raise FormatError(
        "the file was made by a version of shardkit that this one does not know",
        path=path,
        offset=at,
        expected=f"version {VERSION} of the section",
        found=f"{version!r:.60}",
        fix="install a newer shardkit",
    )


def _damaged(path: Path, at: int, found: str) -> DamagedError:
    return DamagedError(
        "the section with keys and types is damaged",
        path=path,
        offset=at,
        found=found,
        fix="copy the file again, or convert again",
    )
