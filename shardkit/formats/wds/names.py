"""Maps member names of a TAR to keys and fields, by WebDataset's rules and our field names.

A member `KEY.EXTENSION` is split at the first dot of its base name. Consecutive members with the
same key form one sample, whose fields are the extensions in lower case. Source: webdataset 1.0,
`tariterators.py`; tests/formats/test_wds_third_party.py compares the rules with that library.

In our own datasets, fields have other names (`image`, `label`), and the manifest maps each field to
its extensions. An image field has several, as the extension depends on the format of the file; so
do audio and video.
"""

from __future__ import annotations

import re

from shardkit.codecs.media import SUFFIXES_OF
from shardkit.errors import FormatError, drop_option, rename_option
from shardkit.schema import Array, Bool, Bytes, FieldType, Float, Images, Int, Json, Schema, Text

_SPLIT = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")

# The types to which WebDataset decodes extensions, without those that need pickle.
_DECODED: dict[str, type[FieldType]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), Int),
    **dict.fromkeys(("txt", "text", "transcript"), Text),
    **dict.fromkeys(("json", "jsn"), Json),
    "npy": Array,
    **{suffix: kind for kind, suffixes in SUFFIXES_OF.items() for suffix in suffixes},
}
# Fields for which WebDataset users expect an extension other than the name of the field.
_EXPECTED = {"label": (Int, "cls"), "text": (Text, "txt")}
_DEFAULT: dict[type[FieldType], str] = {
    **dict.fromkeys((Int, Float, Bool, Json), "json"),
    Text: "txt",
    Array: "npy",
}


def split(member: str) -> tuple[str, str] | None:
    """Key and field of a member; None for a member that WebDataset skips.

    >>> split("a/b.seg.PNG")
    ('a/b', 'seg.png')
    """
    if _META.match(member):
        return None
    match = _SPLIT.match(member)
    return (match[1], match[2].lower()) if match else None


def decoded_type(field: str) -> type[FieldType]:
    """The type that a third-party field's last extension stands for; Bytes for an unknown one."""
    return _DECODED.get(field.rpartition(".")[2], Bytes)


def extensions(schema: Schema) -> dict[str, list[str]]:
    """Return the extensions that each field may have in a TAR; several for encoded files.

    Raises FormatError if a field name cannot be an extension, or if two fields would share one.
    """
    names = {field: re.sub(r"[/\0]", "_", field.lower()) for field in schema}
    if unfit := [field for field, name in names.items() if name != field]:
        raise FormatError(
            f"a TAR member cannot be named after the field {unfit[0]!r}",
            expected="lower case without '/': WebDataset reads extensions in lower case",
            fix="rename it: " + " ".join(rename_option(field, names[field]) for field in unfit),
        )
    result = {field: _extensions(field, kind) for field, kind in schema.items()}
    _refuse_meeting(result)
    return result


def _extensions(field: str, kind: FieldType) -> list[str]:
    stored = type(kind)
    if stored is Images:
        raise FormatError(
            f"a TAR cannot hold the list of images in the field {field!r}: a member is one file",
            fix=f"write arrow, parquet, hf or lmdb, or convert without it: {drop_option(field)}",
        )
    expected_type, extension = _EXPECTED.get(field, (None, ""))
    if expected_type is stored:
        return [extension]
    if stored is Bytes or decoded_type(field) is stored:
        return [field]
    if stored in SUFFIXES_OF:
        prefix = "" if field == stored.__name__.lower() else field + "."
        return [prefix + suffix for suffix in SUFFIXES_OF[stored]]
    return [f"{field}.{_DEFAULT[stored]}"]


def _refuse_meeting(extensions: dict[str, list[str]]) -> None:
    owner: dict[str, str] = {}
    for field, names in extensions.items():
        for name in names:
            if name in owner:
                raise FormatError(
                    f"the fields {owner[name]!r} and {field!r} would both be stored as .{name}",
                    fix=f"rename one of them: {rename_option(field)}",
                )
            owner[name] = field
