"""How many samples and tokens a batch of any kind holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard


class Counted(NamedTuple):
    """Samples, tokens without padding, and with it; 0 where that is not known.

    Numbers, or arrays of one element: of a GPU, whose work would have to be waited for to read it.
    """

    samples: Any
    tokens: Any
    places: Any


def counted(batch: object) -> Counted:
    """What a batch holds, as far as it tells; waits for nothing."""
    if not isinstance(batch, Mapping):
        return Counted(_samples(batch), 0, 0)
    valid = batch.get("valid")
    samples = valid.sum() if _is_array(valid, 1, "bool") else _samples(batch)
    return Counted(samples, *_tokens(batch))


def _samples(batch: object) -> int:
    """The rows of the first array, or else the length of the first list."""
    if isinstance(batch, Mapping):
        columns: Iterable[object] = batch.values()
    elif isinstance(batch, list | tuple):
        if batch and all(isinstance(sample, Mapping) for sample in batch):
            return len(batch)  # nobody has put them together
        columns = batch
    else:
        columns = [batch]
    columns = list(columns)
    arrays = (_samples(c) if isinstance(c, Mapping) else _rows(c) for c in columns)
    lists = (len(column) for column in columns if isinstance(column, list | tuple))
    return next((rows for rows in (*arrays, *lists) if rows), 0)


def _rows(value: Any) -> int:
    shape = getattr(value, "shape", ())
    return int(shape[0]) if shape else 0


def _tokens(batch: Mapping[str, Any]) -> tuple[Any, int]:
    """Tokens without padding, and with it."""
    ids = batch.get("tokens", batch.get("input_ids"))
    mask, segments, lengths = (batch.get(n) for n in ("attention_mask", "segment_ids", "lengths"))
    padded = mask if _is_array(mask, 2, "bool", "int") else None
    whole = next((a for a in (padded, segments, ids) if _is_array(a, 2, "bool", "int")), None)
    if whole is not None and _is_array(lengths, 1, "int"):
        return lengths.sum(), math.prod(whole.shape)
    if padded is not None:
        return padded.sum(), math.prod(padded.shape)
    arrays = ids if isinstance(ids, list | tuple) else [ids]
    return sum(math.prod(array.shape) for array in arrays if hasattr(array, "shape")), 0


def _is_array(value: Any, dimensions: int, *kinds: str) -> TypeGuard[Any]:
    """Whether it is an array, of any library, of values of such kinds."""
    if len(getattr(value, "shape", ())) != dimensions:
        return False
    dtype = str(getattr(value, "dtype", ""))
    return any(kind in dtype for kind in kinds)
