"""Samples, which are dicts of fields with a string `__key__`, and rules for their keys."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    import numpy.typing as npt

Sample = dict[str, Any]


class JsonText(str):
    """The original text of a JSON value.

    Sources pass it to writers, so that JSON is stored unchanged; readers return parsed values.
    """

    __slots__ = ()

    @classmethod
    def checked(cls, text: str) -> JsonText:
        """Wrap text from data unchanged. Raises ValueError if it is not JSON, such as NaN."""
        _STRICT.decode(text)
        return cls(text)

    @classmethod
    def of(cls, value: Any) -> JsonText:
        """Serialize a JSON value; a JsonText is returned unchanged.

        Raises ValueError for NaN and infinities, which JSON does not have.
        """
        if isinstance(value, JsonText):
            return value
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return cls(text)


def _no_number(name: str) -> None:
    raise UnsupportedError(f"JSON has no number {name}")


_STRICT = json.JSONDecoder(parse_constant=_no_number)


class UnsupportedError(ValueError):
    """A stored value is valid, but no type of a field can hold it."""


def renamed(sample: Sample, names: Mapping[str, str]) -> Sample:
    """Return the sample with its fields renamed according to `names` (old -> new)."""
    return {names.get(name, name): value for name, value in sample.items()} if names else sample


def stem_of(path: str) -> str:
    """The path of a file without its suffix; "" without a suffix.

    >>> stem_of("v1.0/scan.nii.gz")
    'v1.0/scan'
    """
    return path[:-7] if path.endswith((".nii.gz", ".NII.GZ")) else path.rpartition(".")[0]


def key_of(stem: str) -> str:
    """The key of a file, from its relative path without suffix: dots in the base name become `_`.

    WebDataset ends a key at the first dot of the base name, so a dot would truncate it.

    >>> key_of("v1.0/cat.02")
    'v1.0/cat_02'
    """
    folder, slash, base = stem.rpartition("/")
    return folder + slash + base.replace(".", "_")


def key_hash(key: str) -> int:
    """Return a 64-bit hash of a key."""
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))


class KeyTable:
    """Finds keys by their hashes, with 16 bytes of memory for each key."""

    def __init__(self, hashes: npt.NDArray[np.uint64]) -> None:
        self.order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[self.order]  # sorted

    def __contains__(self, key: str) -> bool:
        return bool(self.find(key))

    def find(self, key: str) -> list[int]:
        """Return the positions of the key, and possibly of others with the same hash."""
        wanted = np.uint64(key_hash(key))
        begin, end = (np.searchsorted(self.hashes, wanted, side) for side in ("left", "right"))
        found: list[int] = self.order[begin:end].tolist()
        return found

    def find_first(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the first position of each hash; -1 for hashes that do not exist."""
        if not len(self.hashes):
            return np.full(len(hashes), -1, np.int64)
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[at] == hashes, self.order[at], -1)


_UNSAFE = re.compile(r"[^A-Za-z0-9_/-]+|^__(?=[^/]*__(?:/|$))|^/|(?<=/)/|/$")


def safe_key(key: str) -> str:
    """Make a key safe for all tools: letters, digits, `-`, `_`, and single slashes between names.

    Everything else is percent-encoded as in URLs, so that `urllib.parse.unquote` restores the key.
    The `__` of names such as `__x__`, which WebDataset skips, is encoded as well.

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
