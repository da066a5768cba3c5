"""A user's own transform: any function of a value, or of several values by name."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from shardkit.errors import SampleError, ShardkitError
from shardkit.transforms.draws import Draws


class Call:
    """Calls a user's function, in any thread.

    A function with a parameter `rng` gets a NumPy Generator. An object with a method
    `set_random_seed`, as in albumentations, has its own generator: each thread has a copy of the
    object, and seeds it before each call. So random numbers depend only on (seed, epoch, sample).
    """

    def __init__(self, function: Callable[..., Any], stream: int) -> None:
        self._function = function
        self._stream = stream
        self._takes_rng = _takes_rng(function)
        self._own = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, (self._function, self._stream)

    def __repr__(self) -> str:
        return name_of(self._function)

    @property
    def draws(self) -> bool:
        """Whether the function gets random numbers for each sample."""
        return self._takes_rng or hasattr(self._function, "set_random_seed")

    def of_batch(self, batch: Any) -> Any:
        """Return what the function makes of a whole batch."""
        return self._function(batch)

    def __call__(
        self, values: dict[str, Any], by_name: bool, draws: Draws, row: int
    ) -> dict[str, Any]:
        """Return the new values of the fields: of a single one, or of all `by_name`.

        Other names that a function returns are ignored. Raises ShardkitError.
        """
        if not by_name:
            ((name, value),) = values.items()
            return {name: self._called(draws, row, (value,), {})}
        made = self._called(draws, row, (), values)
        if not isinstance(made, Mapping) or not values.keys() <= made.keys():
            found = f"{type(made).__name__} {made!r:.60}"
            if isinstance(made, Mapping):
                found = ", ".join(str(name) for name in made) or "nothing"
            raise SampleError(
                f"the transform {self!r} did not return the fields for which it was given",
                expected="a dict of " + ", ".join(values),
                found=found,
            )
        return {name: made[name] for name in values}

    def _called(
        self, draws: Draws, row: int, values: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        more = {"rng": draws.generator(row, self._stream)} if self._takes_rng else {}
        try:
            made = self._seeded(draws, row)(*values, **named, **more)
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

    def _seeded(self, draws: Draws, row: int) -> Callable[..., Any]:
        if not hasattr(self._function, "set_random_seed"):
            return self._function
        if not hasattr(self._own, "function"):
            self._own.function = copy.deepcopy(self._function)
        own: Any = self._own.function
        own.set_random_seed(draws.number(row, self._stream) >> 32)  # seeds have 32 bits
        return own  # type: ignore[no-any-return]


def name_of(function: Any) -> str:
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


def _takes_rng(function: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(function).parameters
    except (ValueError, TypeError):  # some functions in C have no signature
        return False
