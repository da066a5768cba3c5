"""A user's own transform: any function of a value, or of several values by name."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from shardkit.errors import SampleError, ShardkitError, UsageError
from shardkit.transforms import functions
from shardkit.transforms.draws import Draws
from shardkit.transforms.functions import OF_TORCH, SAMPLE, VALUE
from shardkit.transforms.labels import MultiHot
from shardkit.transforms.on_image import IMAGE


class Call:
    """Calls a user's function, in any thread.

    A function with a parameter `rng` gets a NumPy Generator. Functions of torch, torchvision and
    kornia draw from a generator of torch that is seeded before each call. An object with a method
    `set_random_seed`, as in albumentations, has its own generator, and modules of kornia store what
    they draw: each thread has a copy. So random numbers depend only on (seed, epoch, sample).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        stream: int,
        way: str = VALUE,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        """`kinds`: of the fields that are an image, or on it."""
        self._given = (function, stream, way, kinds)
        self._function, self._stream, self._way, self._kinds = function, stream, way, kinds or {}
        self._library = functions.check(function, way, self._kinds)
        self._takes_rng = "rng" in functions.parameters_of(function)
        self._has_seed = hasattr(function, "set_random_seed")
        self._own = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, self._given

    def __repr__(self) -> str:
        return name_of(self._function)

    @property
    def output(self) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and type of all results, if known."""
        known = isinstance(self._function, MultiHot) and self._way == VALUE
        return self._function.output if known else None  # type: ignore[attr-defined]

    @property
    def draws(self) -> bool:
        """Whether the function gets random numbers for each sample."""
        return self._takes_rng or self._has_seed

    def of_batch(self, batch: Any) -> Any:
        """Return what the function makes of a whole batch of images, a tensor."""
        made = self._function(functions.image_for(self._library, batch))
        if made is None:
            raise UsageError(f"the transform {self!r} returned nothing", fix="return a value")
        return made

    @property
    def images(self) -> list[str]:
        """The fields of images."""
        return [name for name, kind in self._kinds.items() if kind == IMAGE]

    def __call__(self, values: dict[str, Any], draws: Draws, row: int) -> dict[str, Any]:
        """Return the new values of the fields. Raises ShardkitError.

        Other names that a function of a tuple of fields returns are ignored.
        """
        made = self._called(values, draws, row)
        if self._way == VALUE:
            made = dict.fromkeys(values, made)
        needed = {name for name, value in values.items() if value is not None}
        if not isinstance(made, Mapping) or not needed <= made.keys():
            found = f"{type(made).__name__} {made!r:.60}"
            if isinstance(made, Mapping):
                found = ", ".join(str(name) for name in made) or "nothing"
            raise SampleError(
                f"the transform {self!r} did not return the fields for which it was given",
                expected="a dict of " + ", ".join(values),
                found=found,
            )
        kinds = self._kinds
        self._check(made, values)
        return {
            name: functions.result_of(made.get(name), kinds.get(name, ""), before)
            for name, before in values.items()
        }

    def _check(self, made: Mapping[str, Any], values: dict[str, Any]) -> None:
        """Raise SampleError for fields that a batch would lack, and boxes without their rows."""
        new = [name for name in made if name not in values]
        if self._way == SAMPLE and new:
            raise SampleError(
                f"the transform {self!r} returned a field that the dataset does not have: "
                f"{new[0]!r}",
                expected=", ".join(values),
                fix="return it in the place of another field, or leave it out",
            )
        counts = functions.counts_of_rows(made, self._kinds)
        if len({*counts.values()}) > 1:
            raise SampleError(
                f"the transform {self!r} returned boxes, and other numbers of their rows",
                expected="a row for each box",
                found=", ".join(f"{count:,} {name}" for name, count in counts.items()),
                fix="drop the same rows of each",
            )

    def _called(self, values: dict[str, Any], draws: Draws, row: int) -> Any:
        more = {"rng": draws.generator(row, self._stream)} if self._takes_rng else {}
        try:
            with self._drawing(draws, row):
                function, kinds = self._seeded(draws, row), self._kinds
                made = functions.call(function, self._library, self._way, values, kinds, more)
        except (ShardkitError, MemoryError):
            raise
        except Exception as error:
            raise SampleError(
                f"the transform {self!r} raised {type(error).__name__}: {error}",
                fix='fix it, or leave such samples out with on_error="skip"',
            ) from error
        if made is None:
            raise SampleError(f"the transform {self!r} returned nothing", fix="return a value")
        return made

    def _drawing(self, draws: Draws, row: int) -> AbstractContextManager[Any]:
        if self._library not in OF_TORCH:
            return nullcontext()
        return functions.seeded(draws.number(row, self._stream))  # type: ignore[no-any-return]

    def _seeded(self, draws: Draws, row: int) -> Callable[..., Any]:
        if not self._has_seed and self._library != "kornia":
            return self._function
        if not hasattr(self._own, "function"):
            self._own.function = copy.deepcopy(self._function)
        own: Any = self._own.function
        if self._has_seed:
            own.set_random_seed(draws.number(row, self._stream) >> 32)  # seeds have 32 bits
        return own  # type: ignore[no-any-return]


def name_of(function: Any) -> str:
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"
