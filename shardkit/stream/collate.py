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

Values = NDArray[Any]

Collate = Callable[[Sequence[Sample]], Mapping[str, Any]]

_ADDED = ("attention_mask", "lengths")


@dataclass(frozen=True)
class PadCollate:
    """Collate samples into a batch: one-dimensional arrays become rows, padded to the longest.

    All padded fields get the same length: that of the longest array in the batch, rounded up to
    `multiple_of`, or else `length`. The batch also has `lengths` and `attention_mask`, which is
    False for padding.

    Numbers become arrays of int64, float64 or bool. Text, bytes and JSON values become lists.
    Arrays of more dimensions are stacked. A field that no sample has is left out. The object can be
    pickled, and works as `collate_fn` of torch's DataLoader, which then gives NumPy arrays.

    value: the padding value: one for all fields, or a dict by field (0 for other fields).
    side: the side that is padded: "right" or "left".
    multiple_of: round the length up to a multiple of this.
    length: pad to this length; no array may be longer. None: to the longest array of the batch.
    field: the field of `lengths` and `attention_mask`. None: "tokens", or else the first padded
        field. An array of more dimensions, such as "boxes", is padded only if it is named here.
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
                "the padding value must be a number",
                expected="one for all fields, or numbers by field",
                found=repr(self.value),
                fix="give a number, such as 0, if the tokenizer has no padding token",
            )
        if self.length is not None and self.length % self.multiple_of:
            raise UsageError(
                "length is not a multiple of multiple_of",
                expected=f"a multiple of {self.multiple_of:,}",
                found=f"{self.length:,}",
                fix="give only one of them",
            )

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the batch of these samples."""
        names = dict.fromkeys(name for sample in samples for name in sample)
        columns = {name: _column(samples, name) for name in names}
        if self.axis and self.field in columns:
            columns[self.field] = [_moved(value, -1, 0) for value in columns[self.field]]
        rows = {n: v for n, v in columns.items() if _is_row(v[0]) or self._is_padded(n, v[0])}
        self._check_names(list(columns), list(rows))
        dtypes = {
            n: _row_type(samples, n, arrays, arrays[0].shape[1:]) for n, arrays in rows.items()
        }
        counts = {n: np.fromiter(map(len, arrays), np.int64) for n, arrays in rows.items()}
        length = self._length(samples, counts) if rows else 0
        batch: dict[str, Any] = {}
        for name, values in columns.items():
            if name in rows:
                batch[name] = self._padded(name, values, dtypes[name], length)
            else:
                batch[name] = _gathered(samples, name, values)
        if self.axis and self.field in rows:
            batch[self.field] = np.ascontiguousarray(_moved(batch[self.field], 1, -1))
        if rows:
            lengths = counts[self.field or ("tokens" if "tokens" in rows else next(iter(rows)))]
            positions = np.arange(length)[:: 1 if self.side == "right" else -1]
            batch |= {"attention_mask": positions < lengths[:, None], "lengths": lengths}
        return batch

    def _padded(self, name: str, arrays: list[Values], dtype: np.dtype[Any], length: int) -> Values:
        value = self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value
        padded = _filled((len(arrays), length, *arrays[0].shape[1:]), value, dtype, name)
        for row, array in zip(padded, arrays, strict=True):
            if self.side == "right":
                row[: len(array)] = array
            else:
                row[length - len(array) :] = array
        return padded

    def _is_padded(self, name: str, value: Any) -> bool:
        return name == self.field and isinstance(value, np.ndarray) and value.ndim > 1

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
        taken = [name for name in _ADDED if padded and name in fields]
        if taken:
            raise UsageError(
                f"the batch would have two values named {taken[0]!r}",
                expected="no field " + " or ".join(map(repr, _ADDED)),
                found="fields " + ", ".join(map(repr, fields)),
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
        padding = _filled((seq_len,), pad_value, _row_type(samples, field, arrays), field)
        parts = _parts(segments, samples, field, arrays)
        for end, length in zip(ends[::-1].tolist(), lengths[::-1].tolist(), strict=True):
            parts.insert(end, padding[length:])
        batch[field] = np.concatenate(parts, dtype=padding.dtype).reshape(-1, seq_len)
    sizes = np.insert(stop - start, ends, seq_len - lengths)
    number = np.arange(len(row)) - np.searchsorted(row, row) + 1  # of a segment in its row
    segments = np.repeat(np.insert(number, ends, 0).astype(np.int32), sizes)
    begins = np.repeat((np.cumsum(sizes) - sizes).astype(np.int32), sizes)
    positions = np.where(segments, np.arange(len(segments), dtype=np.int32) - begins, 0)
    return {
        **batch,
        "segment_ids": segments.reshape(-1, seq_len),
        "position_ids": positions.astype(np.int32, copy=False).reshape(-1, seq_len),
        "lengths": lengths,
    }


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
                    fix=f"leave the field out: fields={list(columns)[:1]}",
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
                fix="transforms must not change the length of packed documents; "
                "`shardkit verify` checks whether the dataset is damaged",
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
    """An array if the values are all numbers or all arrays, else a list."""
    first = values[0]
    if isinstance(first, np.ndarray):
        for sample, value in zip(samples, values, strict=True):
            alike = isinstance(value, np.ndarray) and value.shape == first.shape
            if not alike or value.dtype != first.dtype:
                raise _unlike(sample, name, value, _described(first))
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


def _is_row(value: Any, inner: tuple[int, ...] = ()) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0 and value.shape[1:] == inner


def _row_type(
    samples: Sequence[Sample], name: str, arrays: Sequence[Any], inner: tuple[int, ...] = ()
) -> np.dtype[Any]:
    """The common dtype of arrays of any length and of shape `inner` otherwise, in native order."""
    first = arrays[0]
    for sample, array in zip(samples, arrays, strict=True):
        if not _is_row(array, inner) or array.dtype != first.dtype:
            kind = f" of {first.dtype}" if _is_row(first, inner) else ""
            sides = ", ".join(map(str, ("n", *inner)))
            shape = f"of shape ({sides})" if inner else "with one dimension"
            raise _unlike(sample, name, array, f"an array{kind} {shape}")
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


def _unlike(sample: Sample, field: str, value: Any, expected: str) -> SampleError:
    return SampleError(
        "the arrays of a batch differ in shape or type",
        key=sample.get("__key__"),
        field=field,
        expected=expected,
        found=_described(value),
        fix="make them equal with a transform, or leave the field out with fields=[...]",
    )


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return type(value).__name__
