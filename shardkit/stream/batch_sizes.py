"""The memory that batches take: measured when they are made, and estimated before."""

from __future__ import annotations

import sys
import threading
from typing import Any

# Types of values that hold no others, and no arrays.
PLAIN = frozenset({str, bytes, bool, int, float, type(None)})


class BatchSizes:
    """Estimates the bytes of batches before they are made.

    A batch is taken to be as large as the largest so far, and larger in proportion to its weight
    (`Stream.weight`) if no batch so far had this weight.
    """

    def __init__(self) -> None:
        self.known = 0  # number of batches that were made
        self._size, self._weight = 0, 1.0  # the largest so far
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[BatchSizes], tuple[()]]:
        return BatchSizes, ()  # another process measures by itself, as a lock cannot be sent

    def add(self, batch: dict[str, Any], weight: float) -> int:
        """Take into account a batch that was made; returns its bytes."""
        size = size_of(batch)
        with self._lock:
            self.known += 1
            self._size, self._weight = max(self._size, size), max(self._weight, weight)
        return size

    def estimate(self, weight: float) -> float:
        """Return the bytes of a batch of this weight."""
        return self._size * max(weight / self._weight, 1)


def size_of(value: Any) -> int:
    """Return the bytes of a batch, or of a value in it, with all that is in lists and dicts."""
    size, found, known = 0, [value], set()
    for one in found:  # without recursion, as JSON values may be deeply nested
        if type(one) in PLAIN:
            size += sys.getsizeof(one)
        elif isinstance(one, dict | list | tuple):
            size += sys.getsizeof(one)
            if id(one) not in known:
                known.add(id(one))
                found += [*one, *one.values()] if isinstance(one, dict) else one
        else:
            size += int(getattr(one, "nbytes", 0)) or sys.getsizeof(one)
    return size
