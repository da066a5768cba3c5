"""A user's function, called in a process of its own: it may crash, exit, print or read stdin."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from shardkit.errors import WorkerError
from shardkit.helpers.pickled_process import PickledProcess, private_pipes, read_message, serve
from shardkit.helpers.words import ended
from shardkit.sample import Sample


class Elsewhere:
    """Calls a function of a sample in another process, which is started by the first call.

    Pickled, it is the function itself, which workers call directly.
    """

    def __init__(self, name: str, function: Callable[[Sample], Sample | None]) -> None:
        """`name` is the function's name in errors."""
        self._name, self._function = name, function

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._function,)

    def __call__(self, sample: Sample) -> Sample | None:
        """Return the function's result, or raise its error.

        Raises WorkerError, with the sample's key, if the process ends.
        """
        writable = [n for n, v in sample.items() if isinstance(v, np.ndarray) and v.flags.writeable]
        try:
            made, unchanged = self._process.ask("call", sample, writable)
        except _EndedError as error:
            del self._process  # the next call starts another
            raise WorkerError(
                f"the transform ended its process, which {ended(error.code)}",
                key=sample["__key__"],
                fix=f"fix {self._name}: it must return the sample, return None, or raise an error",
            ) from error
        if unchanged:
            made |= {name: sample[other] for name, other in unchanged.items()}
        result: Sample | None = made
        return result

    @cached_property
    def _process(self) -> PickledProcess:
        about = (sys.path, pickle.dumps(self._function))
        process = PickledProcess(__name__, about, _EndedError)
        weakref.finalize(self, process.kill)
        return process


def _itself(function: Any) -> Any:
    return function


class _EndedError(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


class _Called:
    """In the process: the function that is called."""

    def __init__(self, function: Callable[[Sample], Sample | None]) -> None:
        self._function = function

    def call(self, sample: Sample, writable: list[str]) -> tuple[Any, dict[str, str]]:
        """Return the function's result, and which of its values are pixels that were sent.

        These are not encoded again, which is known from their identity. Arrays that were sent are
        read-only, save `writable`.
        """
        sample = {**sample, **{name: sample[name].copy() for name in writable}}
        arrays = {n: v for n, v in sample.items() if isinstance(v, np.ndarray)}
        frozen = {id(value): name for name, value in arrays.items() if name not in writable}
        made = self._function(sample)
        if not isinstance(made, dict):
            return made, {}
        unchanged = {name: frozen[id(value)] for name, value in made.items() if id(value) in frozen}
        return {**made, **dict.fromkeys(unchanged)}, unchanged


def main() -> None:
    """Answer calls until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    requests, answers = private_pipes()
    sys.path[:], function = read_message(requests)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    serve(requests, answers, _Called(pickle.loads(function)), threads=1)


if __name__ == "__main__":
    main()
