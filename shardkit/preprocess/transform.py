"""A user's transform: any function of a sample, as a step of a conversion.

It gets the sample with its images as pixels, read-only uint8 arrays (height, width, 3), and masks
as (height, width), after all other steps and before encoding. It returns the sample to store:
fields may be changed, added or removed, and None drops the sample. Equal samples must give equal
results.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardkit.errors import SampleError, UsageError, WorkerError
from shardkit.preprocess.elsewhere import Elsewhere
from shardkit.sample import Sample


@dataclass(frozen=True)
class Transform:
    """A user's function. `digest` hashes its code and arguments; None if it cannot be imported."""

    name: str
    function: Callable[[Sample], Sample | None] = field(repr=False, compare=False)
    digest: str | None

    def __call__(self, sample: Sample) -> Sample | None:
        """Call the function. Raises SampleError for any exception, and for an invalid result."""
        key = sample["__key__"]
        try:
            made = self.function(sample)
        except (MemoryError, KeyboardInterrupt, WorkerError):  # not errors of the sample
            raise
        except BaseException as error:  # also sys.exit()
            raise SampleError(
                f"the transform raised {type(error).__name__}: {error}",
                key=key,
                fix=f"fix {self.name}, or drop such samples with --on-error skip",
            ) from error
        if made is not None and not (isinstance(made, dict) and all(type(n) is str for n in made)):
            raise SampleError(
                "the transform returned something that is not a sample",
                key=key,
                expected="a dict of fields, or None to drop the sample",
                found=f"{type(made).__name__} {made!r:.60}",
            )
        return made if made is None else {**made, "__key__": key}

    def elsewhere(self) -> Transform:
        """Return the transform, whose function this process calls in another one."""
        return replace(self, function=Elsewhere(self.name, self.function))


def load_transform(named: str | Callable[..., Any], workers: int | None) -> Transform:
    """Return the transform given by an option. Raises UsageError if workers cannot load it."""
    function = _named(named) if isinstance(named, str) else named
    if not callable(function):
        raise UsageError("the transform is not a function", found=repr(function))
    owner = _owner(function)
    name = named if isinstance(named, str) else f"{owner.__module__}:{owner.__qualname__}"
    digest = _digest(function)
    if digest is None and workers != 0:
        raise UsageError(
            "worker processes cannot load the transform",
            found=name,
            fix="move it to the top of a module that can be imported, or use workers=0",
        )
    return Transform(name, function, digest)


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    if not (module and name):
        raise UsageError(
            "this is not the name of a transform", found=repr(text), expected="module:function"
        )
    try:
        with contextlib.redirect_stdout(sys.stderr):  # importing runs the user's code
            found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the module of the transform cannot be imported: {error!r}",
            found=module,
            fix=f"write {module.removesuffix('.py')}:{name}"
            if module.endswith(".py")
            else "run the command in the module's folder, or install it",
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"the module {module!r} has no {name!r}", found=text)
        found = getattr(found, part)
    return found


def _owner(function: Any) -> Any:
    """Return a function, or the class of an object that can be called."""
    return function if hasattr(function, "__qualname__") else type(function)


def _digest(function: Any) -> str | None:
    """Hash the function's state, and the source of the modules that define it.

    Returns None if it cannot be imported: it is defined in the running script, a notebook, or
    inside another function.
    """
    try:
        file = io.BytesIO()
        _Steady(file, protocol=4).dump(function)
        digest = xxhash.xxh3_128(file.getvalue())
    except Exception:  # the state of a user's object may raise anything
        return None
    inner, modules = function, set()
    while inner is not None:
        modules.add(_owner(inner).__module__)
        inner = getattr(inner, "func", None)  # functools.partial
    if "__main__" in modules:
        return None
    for name in sorted(modules):
        digest.update(name.encode())
        with contextlib.suppress(TypeError):  # a module without source
            digest.update(Path(inspect.getfile(importlib.import_module(name))).read_bytes())
    return digest.hexdigest()


class _Steady(pickle.Pickler):
    """Gives the same bytes in every process: sets, whose order differs, are sorted lists."""

    def persistent_id(self, value: Any) -> Any:
        is_set = isinstance(value, set | frozenset)
        return (type(value).__name__, sorted(value, key=repr)) if is_set else None


def same(one: Any, other: Any) -> bool:
    """Return whether two results of a transform are equal, arrays by their values and types."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[n], other[n]) for n in one)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    return type(one) is type(other) and (repr(one) == repr(other) or bool(one == other))
