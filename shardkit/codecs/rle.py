"""Run-length encoding of masks, as COCO has it: {"size": [height, width], "counts": ...}.

The runs of a mask go down its columns, beginning with zeros. `counts` is a list of their lengths,
or text: differences to the count before the previous one, in groups of 5 bits from the lowest on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.options import MAX_PIXELS

Mask = npt.NDArray[np.uint8]

_FIRST = 48  # the character of 0
_MORE, _SIGN, _BITS = 32, 16, 5  # bits of a character: another follows, negative; of the number
_LONGEST = 7  # characters per count


def counts_of(value: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Return the lengths of the runs. Raises ValueError if it is not the RLE of a mask."""
    size, counts = value.get("size"), value.get("counts")
    if not isinstance(size, list) or [type(side) for side in size] != [int, int]:
        raise ValueError(f"its size is {size!r:.40}")
    if not (min(size) > 0 and size[0] * size[1] <= MAX_PIXELS):
        raise ValueError(f"a mask of {size[1]} x {size[0]} pixels")
    if isinstance(counts, str):
        found = _unpacked(counts)
    elif isinstance(counts, list) and {*map(type, counts)} <= {int}:
        found = np.array([min(max(count, -1), MAX_PIXELS + 1) for count in counts], np.int64)
    else:
        raise ValueError(f"its counts are {counts!r:.40}")
    if found.min(initial=0) < 0 or int(found.sum()) != size[0] * size[1]:
        raise ValueError(f"its counts do not add up to {size[1]} x {size[0]} pixels")
    return found


def decode(value: dict[str, Any]) -> Mask:
    """Return the mask, (height, width), of 0 and 1. Raises ValueError as `counts_of` does."""
    counts = counts_of(value)
    height, width = value["size"]
    flat = np.repeat((np.arange(len(counts)) & 1).astype(np.uint8), counts)
    return flat.reshape(width, height).T


def encode(mask: Mask, like: dict[str, Any]) -> dict[str, Any]:
    """Return a mask as RLE, with the kind of `counts` that `like` has."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(edges, prepend=0, append=len(flat))
    if flat[0]:
        counts = np.concatenate([[0], counts])
    packed = isinstance(like["counts"], str)
    return {"size": [*mask.shape], "counts": _packed(counts) if packed else counts.tolist()}


def _unpacked(text: str) -> npt.NDArray[np.int64]:
    codes = np.frombuffer(text.encode("utf-32-le"), np.int32).astype(np.int64) - _FIRST
    if not codes.size:
        return codes
    ends = np.flatnonzero(codes & _MORE == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    valid = (
        codes.min() >= 0 and codes.max() < 2 * _MORE and len(ends) and ends[-1] == len(codes) - 1
    )
    if not valid or (ends - starts).max() >= _LONGEST:
        raise ValueError(f"its counts are not compressed RLE: {text!r:.40}")
    place = np.arange(len(codes)) - np.repeat(starts, ends - starts + 1)
    found = np.add.reduceat((codes & _MORE - 1) << _BITS * place, starts)
    found -= np.where(codes[ends] & _SIGN, 1 << _BITS * (ends - starts + 1), 0)
    for first in (1, 2):
        found[first::2] = found[first::2].cumsum()
    return found


def _packed(counts: npt.NDArray[np.int64]) -> str:
    left = counts.copy()
    left[3:] -= counts[1:-2]
    codes, used, more = [], [], np.ones(len(left), np.bool_)
    while more.any():
        used.append(more)
        code, left = left & _MORE - 1, left >> _BITS
        more = more & (left != np.where(code & _SIGN, -1, 0))
        codes.append(code + np.where(more, _MORE, 0) + _FIRST)
    wanted = np.stack(codes, axis=1)[np.stack(used, axis=1)]
    return wanted.astype(np.uint8).tobytes().decode()
