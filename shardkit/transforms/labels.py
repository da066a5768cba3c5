"""The transform of labels: several classes of a sample become a vector of zeros and ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import SampleError
from shardkit.options import check_choice, check_numbers


@dataclass(frozen=True)
class MultiHot:
    """Convert the numbers of classes to a vector with a 1 for each of them, and 0 elsewhere.

    It takes an array or a list of whole numbers, of any length, or a single one; -1 is no class.
    Batches have (rows, classes). Raises SampleError for any other value, and for the number of a
    class beyond the last one.

    classes: number of classes.
    dtype: type of the vector: "uint8", or "float32" for losses such as binary cross-entropy.
    """

    classes: int
    dtype: str = "uint8"

    def __post_init__(self) -> None:
        check_numbers(self, classes=1)
        check_choice(self, "dtype", ("uint8", "float32"))

    @property
    def output(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and type of each result."""
        return (self.classes,), np.dtype(self.dtype)

    def __call__(self, value: Any) -> npt.NDArray[Any]:
        """Return the vector of one sample: (classes,)."""
        try:
            numbers = np.atleast_1d(value)
        except ValueError as error:  # lists of several lengths
            raise self._unknown(value) from error
        none = numbers.shape == (0,)  # whose type may be float64
        if numbers.ndim != 1 or not (none or numbers.dtype.kind in "iu"):
            raise self._unknown(value)
        if not none and not -1 <= int(numbers.min()) <= int(numbers.max()) < self.classes:
            raise self._unknown(value)
        made = np.zeros(self.classes, self.dtype)
        made[numbers[numbers >= 0].astype(np.int64)] = 1
        return made

    def _unknown(self, value: Any) -> SampleError:
        return SampleError(
            f"the value is not a list of numbers of {self.classes:,} classes",
            expected=f"whole numbers from 0 to {self.classes - 1:,}, or -1 for no class",
            found=f"{value!r:.100}",
            fix="give MultiHot the number of all classes, such as len(ds.classes)",
        )
