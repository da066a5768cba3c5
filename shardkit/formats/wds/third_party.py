"""Builds the layout of a third-party TAR, or of one without its index, from its headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardkit.errors import DamagedError, FormatError
from shardkit.formats.wds import names
from shardkit.formats.wds.layout import index_struct
from shardkit.formats.wds.members import Member, members, padded
from shardkit.formats.wds.values import DECODERS
from shardkit.sample import key_hash
from shardkit.schema import Bytes, FieldType, Image, Schema
from shardkit.storage.byte_source import ByteSource

_ONCE = 5  # so many fields that occur once are probably not meant as fields
_APPLE_DOUBLE = b"\x00\x05\x16\x07"  # RFC 1740
_INDEX_BYTES = 64 << 20  # limit of a third-party TAR's index, unless the TAR itself is larger


class _Scanned(NamedTuple):
    """A sample found in a TAR."""

    key: str
    offset: int  # of the key in the file; -1 if it is not stored contiguously
    fields: dict[str, Member]


def scan(source: ByteSource, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the layout of a TAR: schema, index, odd keys, hashes of all keys, and warnings.

    Odd keys are those that are not stored contiguously or are not valid Unicode. For a TAR of ours
    that has lost its index, `layout` defines the fields and types.
    """
    ignored: Counter[str] = Counter()
    warned: list[str] = []
    samples = _samples(source, ignored, warned)
    if layout is None:
        counts = Counter(field for sample in samples for field in sample.fields)
        schema = _schema(source, samples, counts)
        once = [field for field, count in counts.items() if count == 1 and "." in field]
        if len(once) >= max(_ONCE, len(samples)):
            warned.append(
                f"{source.path}: {len(once):,} fields occur in one sample each, such as"
                f" {once[0]!r}: a key ends at the first dot of a file name, so replace dots in"
                " names, and pack it again"
            )
    else:
        schema = Schema.from_json(layout["schema"])
        field_of = {e: f for f, extensions in layout["extensions"].items() for e in extensions}
        samples = [
            s._replace(fields={field_of.get(e, e): m for e, m in s.fields.items()}) for s in samples
        ]
    if len(samples) * index_struct(schema).size > max(_INDEX_BYTES, source.size):
        raise FormatError(
            "the TAR has too many extensions, most of which only a few of its samples have",
            path=source.path,
            found=f"{len(schema):,} extensions in {len(samples):,} samples",
            fix="give members of one kind the same extension (all that follows a name's first dot)",
        )
    odd_keys: dict[int, str] = {}
    ends = (padded(m.offset + m.size) for sample in samples for m in sample.fields.values())
    return {
        **(layout or {}),
        "schema": schema.to_json(),
        "index": b"".join(_records(schema, samples, odd_keys)),
        "odd_keys": odd_keys,
        "key_hashes": np.array([key_hash(s.key) for s in samples], np.uint64).view(np.int64),
        "warnings": warned,
        "unread": source.size - max(ends, default=0),
        **({"ignored": ignored} if ignored else {}),
    }


def _records(schema: Schema, samples: list[_Scanned], odd_keys: dict[int, str]) -> Iterator[bytes]:
    """The records of the index. Keys that they cannot hold are added to `odd_keys`, by position."""
    pack = index_struct(schema).pack
    images = {name for name, kind in schema.items() if isinstance(kind, Image)}
    for position, (key, offset, fields) in enumerate(samples):
        encoded = key.encode("utf-8", "surrogateescape")
        if offset >= 0 and encoded == key.encode("utf-8", "replace"):
            numbers = [offset, len(encoded)]
        else:
            odd_keys[position] = key
            numbers = [0, 0]
        for name in schema:
            member = fields.get(name)
            numbers += (member.offset, member.size) if member else (0, 0)
            if name in images:
                numbers += (0, 0)
        yield pack(*numbers)


def _schema(source: ByteSource, samples: list[_Scanned], counts: Counter[str]) -> Schema:
    """Return the fields in order of appearance, with the types that their extensions stand for."""
    first: dict[str, Member] = {}
    for sample in samples:
        for field, member in sample.fields.items():
            first.setdefault(field, member)
    return Schema(
        {f: _type(source, f, m)(optional=counts[f] < len(samples)) for f, m in first.items()}
    )


def _type(source: ByteSource, field: str, first: Member) -> type[FieldType]:
    """The type of the extension; plain bytes if the field's first value cannot be decoded as it."""
    kind = names.decoded_type(field)
    decode = kind().entry(DECODERS)
    if decode is not None:
        try:
            decode(source.read(first.offset, first.size))
        except (ValueError, RecursionError):
            return Bytes
    return kind


def _samples(source: ByteSource, ignored: Counter[str], warned: list[str]) -> list[_Scanned]:
    """Members grouped as WebDataset groups them: consecutive members with the same key."""
    samples: dict[str, _Scanned] = {}
    current = None
    for member in members(source, ignored, warned):
        if _is_of_macos(source, member):
            ignored["TAR member that macOS adds (._NAME, .DS_Store)"] += 1
            continue
        split = names.split(member.name)
        if split is None:
            ignored["TAR member without an extension"] += 1
            continue
        key, field = split
        where: dict[str, Any] = {"path": source.path, "key": key, "offset": member.offset}
        if key != current:
            if key in samples:
                earlier = next(iter(samples[key].fields.values()))
                raise DamagedError(
                    "the TAR has members of one key in two places: two samples have the same key,"
                    " or the members of a sample are not next to each other",
                    found=f"{member.name!r} here, {earlier.name!r} at byte {earlier.offset}",
                    fix="give samples different names, and pack it again, sorted by name:"
                    " tar --sort=name -cf new.tar folder",
                    **where,
                )
            samples[key] = _Scanned(key, member.name_offset, {})
            current = key
        fields = samples[key].fields
        if field in fields or field in ("__key__", "__url__"):
            raise DamagedError(
                f"a sample has two members for its field {field!r}",
                fix="rename one of them, and pack the TAR again",
                **where,
            )
        fields[field] = member
    # WebDataset drops samples that have a non-empty member x.__bad__.
    marks = [sample.fields.pop("__bad__", None) for sample in samples.values()]
    pairs = zip(samples.values(), marks, strict=True)
    good = [sample for sample, mark in pairs if not (mark is not None and mark.size > 0)]
    if len(good) < len(samples):
        ignored["sample marked as __bad__"] += len(samples) - len(good)
    return good


def _is_of_macos(source: ByteSource, member: Member) -> bool:
    """Whether a member holds what macOS stores of a folder, or beside a file in AppleDouble."""
    name = member.name.rpartition("/")[2]
    beside = name.startswith("._") and source.read(member.offset, min(4, member.size))
    return name == ".DS_Store" or beside == _APPLE_DOUBLE
