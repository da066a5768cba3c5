"""Makes batches of samples whose arrays differ in length, by padding or packing.

Batches hold numpy arrays and lists; `shardkit.torch` converts the arrays to tensors.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError, UsageError, near
from shardkit.options import check_choice, check_numbers
from shardkit.sample import Sample
from shardkit.stream.segments import laid_out

Values = NDArray[Any]

Collate = Callable[[Sequence[Sample]], Mapping[str, Any]]


@dataclass(frozen=True)
class PadCollate:
    """Collate samples into a batch: one-dimensional arrays become rows, padded to the longest.

    All padded fields get the same length: that of the longest array in the batch, rounded up to
    `multiple_of`, or else `length`. The batch also has `lengths` and `attention_mask`, which is
    False for padding.

    Numbers become arrays of int64, float64 or bool. Text, bytes and JSON values become lists.
    Arrays of more dimensions are stacked. A field that no sample has is ignored. The object can be
    pickled, and works as `collate_fn` of torch's DataLoader, which then gives NumPy arrays.

    value: the padding value: one for all fields except booleans, such as a `loss_mask`, which get
        False; or a dict by field (0 for other fields).
    side: the side that is padded: "right" or "left".
    multiple_of: round the length up to a multiple of this.
    length: pad to this length; no array may be longer. None: to the longest array of the batch.
    field: the field of `lengths` and `attention_mask`. None: "tokens", or else the first padded
        field. An array of more dimensions, such as "boxes", is padded only if it is named here, or
        in `value`.
    axis: pad the array of `field` along its first axis (0) or its last (-1), as for audio of shape
        (channels, frames).
    """

    value: float | Mapping[str, float] = 0
    _: KW_ONLY
    side: str = "right"  # or "left"
    multiple_of: int = 1
    length: int | None = None
    field: str | None = None
    axis: int = 0  # or -1

    def __post_init__(self) -> None:
        check_numbers(self, multiple_of=1, length=1)
        check_choice(self, "side", ("right", "left"))
        if self.axis not in (0, -1):
            raise UsageError("axis must be 0 or -1", found=repr(self.axis))
        values = self.value.values() if isinstance(self.value, Mapping) else [self.value]
        if not all(isinstance(value, numbers.Real) for value in values):
            raise UsageError(
                "the padding value must be a number, or numbers by field",
                found=repr(self.value),
                fix="give a number, such as 0, if the tokenizer has no padding token",
            )
        if self.length is not None and self.length % self.multiple_of:
            raise UsageError(
                "length is not a multiple of multiple_of",
                found=f"{self.length}, {self.multiple_of}",
            )

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the batch of these samples."""
        names = dict.fromkeys(name for sample in samples for name in sample)
        columns = {name: _column(samples, name) for name in names}
        moved = self.field if self.axis else None
        if moved in columns:
            columns[moved] = [_moved(value, -1, 0) for value in columns[moved]]
        rows = {n: v for n, v in columns.items() if self._is_padded(n, v[0])}
        self._check_names(list(columns), list(rows))
        dtypes = {n: _dtype(samples, n, v, (None, *v[0].shape[1:])) for n, v in rows.items()}
        counts = {n: np.fromiter(map(len, arrays), np.int64) for n, arrays in rows.items()}
        length = self._length(samples, counts) if rows else 0
        batch = {
            name: self._padded(name, values, dtypes[name], length)
            if name in rows
            else _gathered(samples, name, values)
            for name, values in columns.items()
        }
        if moved in rows:
            batch[moved] = np.ascontiguousarray(_moved(batch[moved], 1, -1))
        if rows:
            lengths = counts[self.field or ("tokens" if "tokens" in rows else next(iter(rows)))]
            positions = np.arange(length)[:: 1 if self.side == "right" else -1]
            batch |= {"attention_mask": positions < lengths[:, None], "lengths": lengths}
        return batch

    def _is_padded(self, name: str, value: Any) -> bool:
        sides = value.ndim if isinstance(value, np.ndarray) else 0
        named = name == self.field or (isinstance(self.value, Mapping) and name in self.value)
        return sides == 1 or (sides > 1 and named)

    def _padded(self, name: str, arrays: list[Values], dtype: np.dtype[Any], length: int) -> Values:
        shape = (len(arrays), length, *arrays[0].shape[1:])
        padded = _filled(shape, self._value(name, dtype), dtype, name)
        for row, array in zip(padded, arrays, strict=True):
            start = 0 if self.side == "right" else length - len(array)
            row[start : start + len(array)] = array
        return padded

    def _value(self, name: str, dtype: np.dtype[Any]) -> float:
        if isinstance(self.value, Mapping):
            return self.value.get(name, 0)
        return 0 if dtype == np.bool_ else self.value

    def _length(self, samples: Sequence[Sample], counts: Mapping[str, NDArray[np.int64]]) -> int:
        field = max(counts, key=lambda name: int(counts[name].max()))
        longest = int(counts[field].max())
        if self.length is None:
            return -(-longest // self.multiple_of) * self.multiple_of
        if longest > self.length:
            raise SampleError(
                "an array is longer than the length of the batch",
                key=samples[int(counts[field].argmax())].get("__key__"),
                field=field,
                expected=f"at most {self.length:,} elements",
                found=f"{longest:,}",
                fix="raise length, or cut long arrays in a transform",
            )
        return self.length

    def _check_names(self, fields: list[str], padded: list[str]) -> None:
        """Raise UsageError for a name that is not a padded field, as a typo would be ignored."""
        asked = list(self.value) if isinstance(self.value, Mapping) else []
        for name in [*asked, *([self.field] if self.field else [])]:
            if name not in padded:
                raise UsageError(
                    f"{name!r} is not a padded field",
                    expected=near(name, padded) if padded else None,
                    found="fields " + ", ".join(map(repr, fields)),
                    fix="name a field of one-dimensional arrays",
                )
        taken = [name for name in ("attention_mask", "lengths") if padded and name in fields]
        if taken:
            raise UsageError(
                f"the batch would have two values named {taken[0]!r}",
                fix="leave the field out with fields=[...], or rename it",
            )


pad_collate = PadCollate


PACKED = ("segment_ids", "position_ids", "lengths")  # what a batch of packed rows has, too


def packed(
    segments: NDArray[np.int64],
    samples: Sequence[Sample],
    seq_len: int,
    pad_value: float,
    fields: Sequence[str],
) -> dict[str, Any]:
    """Pack samples into a batch, according to the `segments` of a `MicroBatch`.

    Each of `fields`, `segment_ids` and `position_ids` are (rows, seq_len): `segment_ids` is 1 for a
    row's first document, 2 for its second, 0 for padding; `position_ids` start at 0 for each
    segment. `lengths` (rows,) has the number of tokens of each row. Raises SampleError if arrays of
    a sample differ in length.
    """
    row, _, start, stop = segments.T
    lengths = np.bincount(row, stop - start).astype(np.int64)
    # Padding is added as a last segment of each row, so that all rows are one concatenation.
    ends = np.searchsorted(row, np.arange(len(lengths)), side="right")
    columns = {field: _column(samples, field) for field in fields}
    _check_lengths(samples, columns)
    batch = {}
    for field, arrays in columns.items():
        dtype = _dtype(samples, field, arrays, (None,))
        padding = _filled((seq_len,), pad_value, dtype, field)
        parts = _parts(segments, samples, field, arrays)
        for end, length in zip(ends[::-1].tolist(), lengths[::-1].tolist(), strict=True):
            parts.insert(end, padding[length:])
        batch[field] = np.concatenate(parts, dtype=padding.dtype).reshape(-1, seq_len)
    ids, positions = laid_out(row, stop - start, (len(lengths), seq_len))
    return {**batch, "segment_ids": ids, "position_ids": positions, "lengths": lengths}


def _check_lengths(samples: Sequence[Sample], columns: Mapping[str, Sequence[Any]]) -> None:
    (first, arrays), *others = columns.items()
    for name, values in others:
        for sample, array, value in zip(samples, arrays, values, strict=True):
            if np.shape(array)[:1] != np.shape(value)[:1]:
                raise SampleError(
                    f"the array has another length than {first!r}, so it cannot be packed with it",
                    key=sample.get("__key__"),
                    field=name,
                    expected=f"{len(array):,} values, one for each of its tokens",
                    found=_described(value),
                    fix=f"leave the field out: fields={[n for n in columns if n != name]}",
                )


def _parts(
    segments: NDArray[np.int64], samples: Sequence[Sample], field: str, arrays: Sequence[Values]
) -> list[Values]:
    parts = []
    for _, number, start, stop in segments.tolist():
        if stop > len(arrays[number]):
            raise SampleError(
                "a document is shorter than the length that its batch was planned with",
                key=samples[number].get("__key__"),
                field=field,
                expected=f"at least {stop:,} tokens",
                found=f"{len(arrays[number]):,}",
                fix="leave the length of packed documents as it is, or run `shardkit verify`",
            )
        parts.append(arrays[number][start:stop])
    return parts


def _moved(value: Any, axis: int, to: int) -> Any:
    return np.moveaxis(value, axis, to) if isinstance(value, np.ndarray) and value.ndim else value


def _column(samples: Sequence[Sample], name: str) -> list[Any]:
    for sample in samples:
        if name not in sample:
            raise SampleError(
                "a sample lacks a field that its batch requires",
                key=sample.get("__key__"),
                field=name,
                found="fields " + ", ".join(map(repr, sample)),
                fix="fill it in with a transform, or leave the field out with fields=[...]",
            )
    return [sample[name] for sample in samples]


def _gathered(samples: Sequence[Sample], name: str, values: list[Any]) -> Any:
    """Return an array if the values are all numbers or all arrays, else a list."""
    if isinstance(values[0], np.ndarray):
        _dtype(samples, name, values, values[0].shape)
        return np.stack(values)
    kinds = {type(value) for value in values}
    truths = [kind for kind in kinds if issubclass(kind, bool | np.bool_)]
    if truths:
        return np.array(values, np.bool_) if len(truths) == len(kinds) else values
    if all(issubclass(kind, numbers.Integral) for kind in kinds):
        try:
            return np.array(values, np.int64)
        except OverflowError:  # a JSON value may be any number
            return values
    if all(issubclass(kind, numbers.Real) for kind in kinds):
        return np.array(values, np.float64)
    return values


def _dtype(
    samples: Sequence[Sample], name: str, values: Sequence[Any], shape: tuple[int | None, ...]
) -> np.dtype[Any]:
    """The common dtype of arrays, in native byte order. The first length may be None: any."""
    first, start = values[0], 1 if shape[:1] == (None,) else 0
    inner = shape[start:]
    for sample, value in zip(samples, values, strict=True):
        if not (
            isinstance(value, np.ndarray)
            and value.ndim == len(shape)
            and value.shape[start:] == inner
            and value.dtype == first.dtype
        ):
            kind = getattr(first, "dtype", "numbers")
            raise SampleError(
                "the arrays of a batch differ in shape or type",
                key=sample.get("__key__"),
                field=name,
                expected=f"an array of {kind} of shape {shape}".replace("None", "n"),
                found=_described(value),
                fix="make them equal with a transform, or leave the field out with fields=[...]",
            )
    native: np.dtype[Any] = first.dtype.newbyteorder("=")
    return native


def _filled(shape: tuple[int, ...], value: float, dtype: np.dtype[Any], field: str) -> Values:
    with np.errstate(invalid="ignore"):
        fits = dtype.kind in "fc" or np.asarray(value).astype(dtype) == value
    if not fits:
        raise UsageError(
            "the padding value cannot be represented in the field's type",
            field=field,
            expected=f"a value of {dtype}",
            found=repr(value),
            fix="choose another value, or convert the field to a wider type with a transform",
        )
    return np.full(shape, value, dtype)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return type(value).__name__
