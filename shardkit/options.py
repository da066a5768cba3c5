"""The options of a conversion: one frozen object, checked when it is made."""

from __future__ import annotations

import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from shardkit.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


@dataclass(frozen=True)
class ConvertOptions:
    """What shapes a conversion. Sizes are bytes, or text: "256MB" (10^6 each) or "1GiB" (2^30)."""

    shard_size: int | str | None = None  # at most this many bytes a shard; 256MB by default
    shard_samples: int | None = None  # or at most this many samples
    shuffle: bool = False
    seed: int = 0
    limit: int | None = None  # the first so many samples, after shuffling, of each split
    split: str = "auto"  # "auto", "none", or "train=0.9,val=0.1"
    classes: Sequence[str] | None = None  # class names in the order of their labels
    rename: dict[str, str] = field(default_factory=dict)  # field -> new name
    image_format: str = "keep"  # or "raw": decoded once, stored as pixels
    on_error: str = "fail"  # or "skip"
    max_errors: int = 1000  # with "skip": stop when more samples than this are bad
    overwrite: bool = False
    workers: int | None = None  # processes; None: all cores; 0: none, work in this one

    def __post_init__(self) -> None:
        if self.shard_size is not None and self.shard_samples is not None:
            raise UsageError("a shard is bounded by its size or by its samples, not by both")
        for name, least in (("shard_samples", 1), ("limit", 1), ("workers", 0), ("max_errors", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, numbers.Integral) or value < least):
                raise UsageError(
                    f"{name} must be a whole number from {least} up", found=repr(value)
                )
        if self.on_error not in ("fail", "skip"):
            raise UsageError("on_error must be 'fail' or 'skip'", found=repr(self.on_error))
        if self.image_format not in ("keep", "raw"):
            raise UsageError("image_format must be 'keep' or 'raw'", found=repr(self.image_format))
        parse_split(self.split)
        if self.shard_size is not None and parse_size(self.shard_size) < 4096:
            raise UsageError("a shard must have room for 4,096 bytes", found=str(self.shard_size))

    @classmethod
    def of(cls, **options: Any) -> ConvertOptions:
        """The options by name; raises UsageError for a name that is none."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(f"there is no option {name!r}", expected=", ".join(known))
        return cls(**options)

    def max_bytes(self) -> int | None:
        """The bound on a shard's bytes; None where samples bound it."""
        if self.shard_samples is not None:
            return None
        return parse_size("256MB" if self.shard_size is None else self.shard_size)

    def shaping(self) -> dict[str, Any]:
        """The options that decide the bytes of the output, for the manifest."""
        return {
            "shard_size": self.max_bytes(),
            "shard_samples": self.shard_samples,
            "shuffle": self.seed if self.shuffle else None,
            "limit": self.limit,
            "split": self.split,
            "rename": dict(self.rename),
            "image_format": self.image_format,
        }


def parse_size(text: int | str) -> int:
    """Bytes from a number or from text: "256MB" is 256 * 10^6, "256MiB" is 256 * 2^20.

    >>> parse_size("1.5kB")
    1500
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise UsageError("this is no size", found=repr(text), expected="such as 256MB or 1GiB")
    number, prefix, binary = match.groups()
    power = " kmgt".index(prefix.lower() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def parse_split(text: str) -> dict[str, float]:
    """The shares of "train=0.9,val=0.1"; nothing for "auto" and "none"."""
    if text in ("auto", "none"):
        return {}
    shares: dict[str, float] = {}
    try:
        for part in text.split(","):
            name, share = part.split("=")
            shares[name.strip()] = float(share)
    except ValueError:
        shares = {}
    names_good = all(re.fullmatch(r"\w[\w.-]*", name) for name in shares)
    good = names_good and all(share > 0 for share in shares.values())
    if not (shares and good and abs(sum(shares.values()) - 1) < 1e-9):
        raise UsageError(
            "this is no way to split",
            found=repr(text),
            expected="auto, none, or shares that sum to 1, such as train=0.9,val=0.1",
        )
    return shares
