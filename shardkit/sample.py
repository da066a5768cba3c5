"""Sample: a dict of fields with a string `__key__`; and the rule that makes keys of names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import xxhash

Sample = dict[str, Any]


class JsonText(str):
    """The original text of a JSON value.

    Sources hand it to writers, so that JSON is stored as it was; readers give parsed values.
    """

    __slots__ = ()

    @classmethod
    def checked(cls, text: str) -> JsonText:
        """The text of data, as it is; raises ValueError for what is not JSON, such as NaN."""
        _STRICT.decode(text)
        return cls(text)

    @classmethod
    def of(cls, value: Any) -> JsonText:
        """The text of any JSON value; text that is one already stays as it is.

        Raises ValueError for NaN and the infinities, which JSON does not have.
        """
        if isinstance(value, JsonText):
            return value
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return cls(text)


def _no_number(name: str) -> None:
    raise ValueError(f"JSON has no number {name}")


_STRICT = json.JSONDecoder(parse_constant=_no_number)


def renamed(sample: Sample, names: Mapping[str, str]) -> Sample:
    """A sample with fields renamed as `names` says (old: new)."""
    return {names.get(name, name): value for name, value in sample.items()} if names else sample


def key_of(stem: str) -> str:
    """The key of a file from its relative path without suffix: dots in the base name become `_`.

    WebDataset ends a key at the first dot of the base name, so a dot there would cut it.

    >>> key_of("v1.0/cat.02")
    'v1.0/cat_02'
    """
    folder, slash, base = stem.rpartition("/")
    return folder + slash + base.replace(".", "_")


def key_hash(key: str) -> int:
    """A number below 2^64 that two keys do not share, but by chance."""
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))


_UNSAFE = re.compile(r"[^A-Za-z0-9_/-]+|^__(?=[^/]*__(?:/|$))|^/|(?<=/)/|/$")


def safe_key(key: str) -> str:
    """The key in letters, digits, `-`, `_` and single slashes between names: fit for any tool.

    All else is percent-encoded as in URLs, so that `urllib.parse.unquote` gives the key again. The
    `__` of names such as `__x__`, which WebDataset passes over, is encoded too.

    >>> safe_key("my cat/v1.0 ü")
    'my%20cat/v1%2E0%20%C3%BC'
    """
    return _UNSAFE.sub(_percent_encoded, key)


def _percent_encoded(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


def unique_key(key: str, suffix: str, taken: Collection[str]) -> str:
    """`key`, or the first of `key~suffix`, `key~2`, `key~3`, ... that is not taken.

    >>> unique_key("cat/1", "png", {"cat/1"})
    'cat/1~png'
    """
    if key not in taken:
        return key
    candidate = f"{key}~{suffix}"
    number = 2
    while candidate in taken:
        candidate = f"{key}~{number}"
        number += 1
    return candidate
