"""Functions of other libraries: what each takes, and where its random numbers come from.

torchvision gets Pillow images, albumentations arrays (height, width, channels), kornia a batch of
one tensor (1, channels, height, width), other modules of torch tensors (channels, height, width).
Other functions get values as they are.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardkit.codecs.shapes import SHAPES
from shardkit.errors import UsageError
from shardkit.transforms.on_image import BOXES, IMAGE, MASK, ROWS

VALUE, NAMES, SAMPLE = "value", "names", "sample"  # how a function takes its fields
OF_TORCH = ("torchvision", "kornia", "torch")  # libraries whose random numbers are torch's
_LIBRARIES = ("torchvision", "albumentations", "kornia")
# Older versions of torch have no generator for these, but for what they are made of.
_LIKE = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
# The functions and methods of torch that take a generator.
_RANDOM = frozenset(
    [
        "_sample_dirichlet",
        "_standard_gamma",
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "randint",
        "randn",
        "random_",
        "randperm",
        "uniform_",
    ]
)


def library_of(function: Any) -> str:
    """Return the library whose conventions a function follows, by its base classes; "" for none."""
    while isinstance(function, functools.partial):
        function = function.func
    named = (getattr(kind, "__module__", None) for kind in (function, *type(function).__mro__))
    roots = {str(name).partition(".")[0] for name in named}
    for library in _LIBRARIES:
        if library in roots:
            return library
    if not _is("torch.nn", "Module", function):
        return ""
    inside = {type(module).__module__.partition(".")[0] for module in function.modules()}
    return "kornia" if "kornia" in inside else "torch"


def _is(module: str, name: str, value: Any) -> bool:
    """Return whether a value is of a class, without importing its module."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _torch() -> Any:
    return sys.modules["torch"]  # imported already, by the function


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of torch."""
    return _is("torch", "Tensor", value)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, by name."""
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # some functions in C have no signature
        return {}


def takes_bytes(function: Any) -> bool:
    """Return whether a function asks for encoded images, as `def f(data: bytes)` does."""
    return any(one.annotation in (bytes, "bytes") for one in parameters_of(function).values())


# --- calls ---------------------------------------------------------------------------------------


def check(function: Any, way: str, kinds: Mapping[str, str]) -> str:
    """Return the library of a function. Raises UsageError if it cannot take its fields this way.

    `kinds` are those of the fields.
    """
    library = library_of(function)
    if library == "kornia" and way != VALUE:
        raise UsageError(
            "a module of kornia gets a single image here, not several fields",
            found=f"{function!r:.200}",
            fix="transform whole batches with it, after loading; or use a function of samples",
        )
    shapes = [name for name, kind in kinds.items() if kind in SHAPES]
    if library in _LIBRARIES and shapes:
        raise UsageError(
            f"a transform of {library} moves masks and boxes, but not {shapes[0]!r}",
            found=f"{function!r:.200}",
            fix=f"leave {shapes[0]!r} out of fields=[...]; or use shardkit's transforms, or a"
            " function of samples that moves it, too",
        )
    if library == "albumentations" and way != VALUE:
        _targets(function, kinds)
        if BOXES in kinds.values():
            _check_bbox_params(function, [name for name, kind in kinds.items() if kind == ROWS])
    return library


def _check_bbox_params(function: Any, rows: list[str]) -> None:
    """Raise UsageError where albumentations would take boxes for others, or leave their rows."""
    params = _box_params(function)
    if params and params.format == "pascal_voc" and {*rows} <= {*(params.label_fields or ())}:
        return
    found = f"format={params.format!r}, label_fields={params.label_fields}" if params else "none"
    raise UsageError(
        "boxes are in pixels: x0, y0, x1, y1, and each has a row of the fields beside them",
        expected=f'Compose(..., bbox_params=BboxParams("pascal_voc", label_fields={rows}))',
        found=found,
    )


def _box_params(compose: Any) -> Any:
    """Return how albumentations takes boxes; None if it takes none."""
    return getattr(getattr(compose, "processors", {}).get("bboxes"), "params", None)


def call(
    function: Callable[..., Any],
    library: str,
    way: str,
    values: Mapping[str, Any],
    kinds: Mapping[str, str],
    more: Mapping[str, Any],
) -> Any:
    """Call a function with the values of some fields, which are of these kinds, as it takes them.

    `more` are further arguments. Returns its result: a value, or a dict of fields.
    """
    if library == "albumentations":
        return _albumented(function, way, values, kinds)
    size = None
    if library == "torchvision" and way != VALUE:
        images = (value for name, value in values.items() if kinds.get(name) == IMAGE)
        size = next((np.shape(array_of(image))[:2] for image in images), None)
    given = {n: _given(library, v, kinds.get(n, ""), size, way) for n, v in values.items()}
    if way == VALUE:
        (value,) = given.values()
        if library != "kornia" or not is_tensor(value):
            return function(value, **more)
        made = function(value[None], **more)
        return made[0] if is_tensor(made) and made.ndim and len(made) == 1 else made
    if way == NAMES and library != "torchvision":
        return function(**given, **more)
    return function(given, **more)


def _albumented(
    compose: Callable[..., Any], way: str, values: Mapping[str, Any], kinds: Mapping[str, str]
) -> Any:
    """Call albumentations, which has names of its own for images, masks and boxes."""
    targets = _targets(compose, kinds).items()
    names = {name: to for name, to in targets if values[name] is not None}
    # A sample may have no boxes, which albumentations expects if it was told about any.
    params = _box_params(compose)
    none: dict[str, Any] = dict.fromkeys((params and params.label_fields) or (), ())
    none |= {"bboxes": np.empty((0, 4))} if params else {}
    made = compose(**none | {to: array_of(values[name]) for name, to in names.items()})
    if way == VALUE:
        return made["image"]
    results = {name: made[to] for name, to in names.items()}
    for name, before in values.items():
        if kinds.get(name) not in (IMAGE, MASK) and name in results:
            array = np.asarray(results[name], before.dtype)
            results[name] = array.reshape(-1, *before.shape[1:])
    return {**values, **results}


_ALBUMENTED = {IMAGE: "image", MASK: "mask", BOXES: "bboxes"}


def _targets(function: Any, kinds: Mapping[str, str]) -> dict[str, str]:
    """Return the name that albumentations has for each field. Raises UsageError for equal ones."""
    params = _box_params(function)
    own = {*(getattr(function, "additional_targets", None) or ())}
    own |= {*((params and params.label_fields) or ())}
    known = {n: kind for n, kind in kinds.items() if kind or n in own}
    targets = {n: n if n in own else _ALBUMENTED.get(kind, n) for n, kind in known.items()}
    twice = next((n for n, to in targets.items() if [*targets.values()].count(to) > 1), None)
    if twice is not None:
        raise UsageError(
            "albumentations takes one image and one mask, unless others are named",
            found=", ".join(targets),
            fix=f'Compose(..., additional_targets={{"name": "{targets[twice]}"}}) for the others',
        )
    return targets


def _given(library: str, value: Any, kind: str, size: Any, way: str) -> Any:
    """Return a value as a library takes it."""
    if kind == IMAGE:
        return image_for(library, value)
    if library not in OF_TORCH or not isinstance(value, np.ndarray) or value.dtype.kind in "OSUMm":
        return array_of(value) if not library else value
    tensor = _tensor(value)
    if library == "torchvision" and way != VALUE and kind in (MASK, BOXES):
        tv_tensors: Any = sys.modules["torchvision.tv_tensors"]
        if kind == MASK:
            return tv_tensors.Mask(tensor)
        return tv_tensors.BoundingBoxes(tensor, format="XYXY", canvas_size=size)
    return tensor


def image_for(library: str, value: Any) -> Any:
    """Return an image, from shardkit or from an earlier function, as a library takes it."""
    if library == "torchvision":
        pixels = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3
        if pixels and value.shape[2] in (1, 3, 4):
            import PIL.Image

            return PIL.Image.fromarray(value[:, :, 0] if value.shape[2] == 1 else value)
        return _tensor(np.moveaxis(value, -1, -3)) if isinstance(value, np.ndarray) else value
    if library not in OF_TORCH:
        return array_of(value) if library or not is_tensor(value) else value
    if not is_tensor(value):
        value = _tensor(np.moveaxis(array_of(value), -1, -3))
    if library == "kornia" and not value.is_floating_point():
        return value.float() / _torch().iinfo(value.dtype).max
    return value


def _tensor(array: Any) -> Any:
    """Return a tensor with memory of its own, as a module may write into it."""
    return _torch().from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


# --- results -------------------------------------------------------------------------------------


def array_of(image: Any) -> Any:
    """Return (height, width, channels) of a Pillow image or a tensor; other values unchanged."""
    if _is("PIL.Image", "Image", image):
        pixels = np.asarray(image.convert("RGB") if image.mode == "P" else image)
        return pixels[:, :, None] if pixels.ndim == 2 else pixels
    if is_tensor(image) and image.ndim >= 3:
        return np.ascontiguousarray(np.moveaxis(image.numpy(force=True), -3, -1))
    return image


def result_of(value: Any, kind: str, before: Any) -> Any:
    """Return what becomes of a field: tensors only for images, and where a tensor or none was."""
    if is_tensor(value):
        if kind != IMAGE and isinstance(before, np.ndarray) and kind:
            return value.numpy(force=True)
        return value.detach().as_subclass(_torch().Tensor)
    return array_of(value)


def stacked(values: list[Any]) -> Any:
    """Stack numbers, or arrays or tensors of one shape and type; return other lists unchanged."""
    first = values[0]
    kinds = {(type(v), getattr(v, "dtype", None), getattr(v, "shape", ())) for v in values}
    if len(kinds) > 1 or isinstance(first, str):  # np.str_ is a generic, too
        return values
    if is_tensor(first):
        return _torch().stack(values)
    return np.stack(values) if isinstance(first, int | float | np.generic | np.ndarray) else values


def counts_of_rows(values: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, int]:
    """Return how many boxes there are, and rows of the fields that have one for each box."""
    if BOXES not in kinds.values():
        return {}
    rows: dict[str, Any] = {
        n: values.get(n) for n, kind in kinds.items() if kind in (BOXES, ROWS, *SHAPES)
    }
    shapes = {n: (len(v),) if isinstance(v, list) else np.shape(v) for n, v in rows.items()}
    return {name: shape[0] for name, shape in shapes.items() if shape}


def in_numpy(value: Any) -> Any:
    """Return the array of a tensor, or of each in a list; other values unchanged."""
    if type(value) is list:
        return [one.numpy(force=True) if is_tensor(one) else one for one in value]
    return value.numpy(force=True) if is_tensor(value) else value


# --- random numbers ------------------------------------------------------------------------------


def seeded(seed: int) -> Any:
    """A context in which torch draws from a generator of its own, in this thread only.

    The generator of the process, from which other threads draw, is neither used nor changed.
    """
    return _seeded()(seed)


@functools.cache
def _seeded() -> Any:
    torch = _torch()
    mode: Any = torch.overrides.TorchFunctionMode

    class Seeded(mode):  # type: ignore[misc]  # its class is known only when torch is imported
        def __init__(self, seed: int) -> None:
            super().__init__()
            self._generator = torch.Generator().manual_seed(seed)

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            more, name = {**(kwargs or {})}, getattr(function, "__name__", "")
            if name in _LIKE and more.get("generator") is None:
                limits = [more.pop(limit) for limit in ("low", "high") if limit in more]
                made = torch.empty_like(args[0], **more)
                return getattr(made, _LIKE[name])(*args[1:], *limits, generator=self._generator)
            if name in _RANDOM and more.get("generator") is None:
                more = {**more, "generator": self._generator}
            return function(*args, **more)

    return Seeded
