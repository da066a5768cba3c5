"""The transforms of images: frozen objects, checked when they are created.

Names, options and behaviour are those of torchvision. A size is a number, or (height, width).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shardkit.codecs.crop import (
    CENTER_CROP,
    HORIZONTAL_FLIP,
    RANDOM_RESIZED_CROP,
    RESIZE,
    RESIZE_SHORTER,
    look_up,
)
from shardkit.codecs.window import Pixels, Window
from shardkit.errors import UsageError
from shardkit.options import check_choice, check_numbers

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.dataset.dataset import Dataset

Size = tuple[int, int]  # height and width
Kind = tuple[int, "np.dtype[Any]"]  # number of channels, and their type

_FLOATS = ("float32", "float16", "bfloat16")
_TRIES = 10
_MAX_SIDE = 1 << 15


@dataclass(frozen=True, repr=False)
class Transform:
    """Base of all transforms, some of which take random numbers in [0, 1)."""

    numbers: ClassVar[int] = 0  # how many random numbers it takes

    def __repr__(self) -> str:
        options = [
            repr(value) if f.default is dataclasses.MISSING else f"{f.name}={value!r}"
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return f"{type(self).__name__}({', '.join(options)})"


@dataclass(frozen=True, repr=False)
class Geometric(Transform):
    """Base of the transforms that move pixels."""

    def known(self, size: Size | None) -> Size | None:
        """Return the size of the result, if the size of the image and the options determine it."""
        return size

    def apply(self, window: Window, drawn: Sequence[float]) -> None:
        raise NotImplementedError

    def program(self) -> tuple[float, ...]:
        """Return what `apply` does as the first columns of a step of `crop.crop_many`."""
        raise NotImplementedError


class MediaTransform(Transform):
    """Base of the transforms of audio or video."""


@dataclass(frozen=True, repr=False)
class Decode(Transform):
    """Decode an image to upright pixels (height, width, channels), by default 8-bit RGB.

    The other image transforms decode the image themselves. Use this one before functions that
    expect pixels, and first in a list, with options, for other pixels than 8-bit RGB. For a field
    of audio, it gives the samples: float32 (channels, frames).

    With "uint8", images are as displayed: sRGB, transparent pixels over white, the high byte of
    16-bit values, and the first frame or page. With other types, values are those of the file: not
    scaled, without colour profiles, the pages of a TIFF one after the other as channels. A value
    that the type cannot hold is an error; float64 is rounded to float32. Transforms after that
    keep type and channels. They resize each channel with the same filter, in float32; 32-bit
    integers and float64 can only be cropped and mirrored.

    dtype: "uint8", "uint16", "float32", or "auto": the type that each image is stored in.
    channels: number of channels. None: three for "uint8", otherwise those of the image, with alpha.
        From grey to RGB, it is repeated; an alpha channel that is missing is opaque. "uint8" can be
        1 (grey), 3 (RGB) or 4 (RGB and alpha), or any number that images of 8 bits have.
    """

    dtype: str = "uint8"
    channels: int | None = None

    def __post_init__(self) -> None:
        check_choice(self, "dtype", ("uint8", "uint16", "float32", "auto"))
        check_numbers(self, channels=1)

    @property
    def is_rgb(self) -> bool:
        """Whether images become 8-bit RGB."""
        return self.dtype == "uint8" and self.channels in (None, 3)

    def known(self, channels: int | None, dtype: str | None) -> Kind | None:
        """Return the kind of the result, if all values have it; the arguments are of the values."""
        if self.is_rgb:
            channels, dtype = channels or 3, dtype or "uint8"
        else:
            channels = self.channels or channels
            dtype = dtype if self.dtype == "auto" else self.dtype
        return None if channels is None or dtype is None else (channels, np.dtype(dtype))


def are_channels(last: int | None, decode: Decode) -> bool:
    """Return whether the last side of an array can be channels: over 4, if `decode` says so."""
    return last is None or last <= 4 or not decode.is_rgb


@dataclass(frozen=True, repr=False)
class _Sized(Geometric):
    """Base of the transforms that give an image a size."""

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        sides: Any = (self.size,) if is_number(self.size) else _numbers(self.size, 2)
        if not sides or not all(side in range(1, _MAX_SIDE + 1) for side in sides):
            what = f"size must be 1 to {_MAX_SIDE:,} pixels, a whole number or (height, width)"
            raise UsageError(what, found=repr(self.size))
        whole = tuple(int(side) for side in sides)
        object.__setattr__(self, "size", whole[0] if len(whole) == 1 else whole)

    def known(self, size: Size | None) -> Size | None:
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)


@dataclass(frozen=True, repr=False)
class RandomResizedCrop(_Sized):
    """Crop a random part of the image, and resize it.

    If none of ten random parts fits into the image, the largest part in the center with an allowed
    aspect ratio is used.

    size: size of the result in pixels: one number for both sides, or (height, width).
    scale: range of the area of the part, relative to the area of the image.
    ratio: range of the aspect ratio of the part (width / height), drawn on a logarithmic scale.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    numbers = 2 + 2 * _TRIES

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "scale", nothing=True)
        _check_range(self, "ratio")

    def apply(self, window: Window, drawn: Sequence[float]) -> None:
        width, height = window.columns, window.rows
        least, most = math.log(self.ratio[0]), math.log(self.ratio[1])
        for by_area, by_aspect in zip(drawn[2::2], drawn[3::2], strict=True):
            area = width * height * _between(*self.scale, by_area)
            aspect = math.exp(_between(least, most, by_aspect))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                x, y = int(drawn[0] * (width - w + 1)), int(drawn[1] * (height - h + 1))
                break
        else:
            w, h = self._largest(width, height)
            x, y = (width - w) // 2, (height - h) // 2
        window.crop(x, y, w, h)
        window.resize(*_width_height(self.size))

    def program(self) -> tuple[float, ...]:
        return (RANDOM_RESIZED_CROP, *_width_height(self.size), *self.scale, *self.ratio)

    def _largest(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the largest part with an allowed aspect ratio."""
        least, most = self.ratio
        if width / height < least:
            return width, min(max(round(width / least), 1), height)
        if width / height > most:
            return min(max(round(height * most), 1), width), height
        return width, height


@dataclass(frozen=True, repr=False)
class Resize(_Sized):
    """Resize the image, with antialiasing.

    size: size of the shorter side in pixels, or (height, width).
    """

    def known(self, size: Size | None) -> Size | None:
        return self.size if isinstance(self.size, tuple) else size and self._scaled(*size)

    def apply(self, window: Window, drawn: Sequence[float]) -> None:
        if isinstance(self.size, tuple):
            window.resize(*_width_height(self.size))
        else:
            window.resize(*self._scaled(window.columns, window.rows))

    def program(self) -> tuple[float, ...]:
        kind = RESIZE if isinstance(self.size, tuple) else RESIZE_SHORTER
        return (kind, *_width_height(self.size))

    def _scaled(self, one: int, other: int) -> tuple[int, int]:
        """Return both sides; the shorter one gets the size, the longer one is rounded down."""
        assert isinstance(self.size, int)
        longer = int(self.size * max(one, other) / min(one, other))
        return (self.size, longer) if one <= other else (longer, self.size)


@dataclass(frozen=True, repr=False)
class CenterCrop(_Sized):
    """Crop the center of the image. If the image is smaller, it gets black margins.

    size: size of the result in pixels: one number for both sides, or (height, width).
    """

    def apply(self, window: Window, drawn: Sequence[float]) -> None:
        width, height = _width_height(self.size)
        window.cut(_margin(window.columns, width), _margin(window.rows, height), width, height)

    def program(self) -> tuple[float, ...]:
        return (CENTER_CROP, *_width_height(self.size))


@dataclass(frozen=True, repr=False)
class RandomHorizontalFlip(Geometric):
    """Mirror the image left to right, with probability `p`."""

    p: float = 0.5

    numbers = 1

    def __post_init__(self) -> None:
        if not is_number(self.p) or not 0 <= self.p <= 1:
            raise UsageError("p must be a probability, from 0 to 1", found=repr(self.p))

    def apply(self, window: Window, drawn: Sequence[float]) -> None:
        window.flip ^= drawn[0] < self.p

    def program(self) -> tuple[float, ...]:
        return (HORIZONTAL_FLIP, 1, 1, self.p)


@dataclass(frozen=True, repr=False)
class Normalize(Transform):
    """Normalize each channel: (pixel / largest - mean) / std.

    The largest value is 255 for uint8, 65535 for uint16 and so on, and 1 for floats.

    mean: means of the channels, such as red, green and blue.
    std: standard deviations of the channels.
    dtype: type of the result: "float32", "float16" or "bfloat16".
    """

    mean: Sequence[float]
    std: Sequence[float]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            count = np.size(values) if name == "mean" else len(self.mean)
            if not _numbers(values, count):
                what = f"{name} must be a number for each channel, such as red, green and blue"
                raise UsageError(what, found=repr(values))
            object.__setattr__(self, name, _numbers(values, count))
        if min(self.std) <= 0:
            raise UsageError("std must be above 0", found=repr(self.std))
        check_choice(self, "dtype", _FLOATS)

    @classmethod
    def of(cls, dataset: Dataset, field: str | None = None, dtype: str = "float32") -> Normalize:
        """Normalize by the statistics of a dataset, so that results have mean 0 and deviation 1.

        The mean and standard deviation of all pixels come from the manifest if the dataset was
        converted with `stats`. Otherwise `dataset.stats()` computes them, which decodes all images.
        If the dataset was opened with transforms that crop, only the pixels that these leave are
        counted.

        dataset: an open dataset, from `shardkit.open`.
        field: the field of images. None: the only one.
        dtype: as in `Normalize`.

        Raises UsageError for anything but a dataset with images, and if it has several such fields.
        """
        if not hasattr(dataset, "stats"):
            what = "Normalize.of takes an open dataset, from shardkit.open(PATH)"
            raise UsageError(what, found=f"{dataset!r:.200}")
        manifest = dataset.manifest
        whole = dataset.transform is None and dataset.indices is None
        if manifest is not None and whole and manifest.samples == len(dataset):
            found = {name: (about.mean, about.std) for name, about in manifest.pixels.items()}
        else:
            found = {}
        if not found or (field is not None and field not in found):
            fields = dataset.stats()["fields"]
            pixels = {name: about.get("pixels") for name, about in fields.items()}
            found = {name: (p["mean"], p["std"]) for name, p in pixels.items() if p is not None}
        if field is None and len(found) == 1:
            [field] = found
        if field not in found:
            no_images = "the dataset has no images to normalize"
            raise UsageError(
                "say which field has the images" if found else no_images,
                path=dataset.place,
                expected=", ".join(found) or None,
                found=repr(field) if found else f"the fields {', '.join(dataset.schema)}",
            )
        mean, std = found[field]
        return cls(mean, std, dtype)

    def __call__(self, pixels: Pixels, out: npt.NDArray[Any]) -> None:
        """Normalize pixels into an array of the same shape and type `stored`.

        Raises ValueError for another number of channels.
        """
        if pixels.shape[2] != len(self.mean):
            raise ValueError(f"{pixels.shape[2]} channels, but {len(self.mean)} means")
        if pixels.dtype == np.uint8 and pixels.shape[2] == 3:
            look_up(pixels, self.table, out)
            return
        largest = 1 if pixels.dtype.kind == "f" else np.iinfo(pixels.dtype).max
        exact = (pixels / largest - np.array(self.mean)) / np.array(self.std)
        out[...] = to_bfloat16(exact.astype(np.float32)) if self.is_bfloat16 else exact

    @property
    def is_bfloat16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def stored(self) -> np.dtype[Any]:
        """The type of arrays that hold the values; NumPy has no bfloat16, so they have its bits."""
        return np.dtype(np.uint16 if self.is_bfloat16 else self.dtype)

    @functools.cached_property
    def table(self) -> npt.NDArray[Any]:
        """The result for each of the 256 values of a channel: (256, channels)."""
        exact = (np.arange(256)[:, None] / 255 - np.array(self.mean)) / np.array(self.std)
        if self.is_bfloat16:
            return to_bfloat16(exact.astype(np.float32))
        table: npt.NDArray[Any] = exact.astype(self.dtype)
        return table


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 of finite numbers; ties are rounded to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _margin(length: int, wanted: int) -> int:
    """Return the pixels to cut off before the center; negative: pixels to add."""
    return round((length - wanted) / 2) if length > wanted else -((wanted - length) // 2)


def _between(low: float, high: float, drawn: float) -> float:
    return low + (high - low) * drawn


def _width_height(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size[1], size[0]) if isinstance(size, tuple) else (size, size)


# --- checks --------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)
    return is_real and math.isfinite(value)


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    """Return the values as floats; empty unless they are as many numbers."""
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str):
        return ()
    right = len(values) == count and all(is_number(value) for value in values)
    return tuple(map(float, values)) if right else ()


def _check_range(transform: Any, name: str, nothing: bool = False) -> None:
    """Check for two ascending numbers, the first of which may be 0 if `nothing` is allowed."""
    given = getattr(transform, name)
    least, most = _numbers(given, 2) or (0, 0)
    if not 0 <= least <= most or most == 0 or (least == 0 and not nothing):
        raise UsageError(
            f"{name} must be two numbers above 0, the smaller one first", found=repr(given)
        )
    object.__setattr__(transform, name, (least, most))
