"""`Dataset.stats`: statistics for training, from one pass over all samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.codecs.header import read_header
from shardkit.codecs.image import NotAnImageError, UnsupportedError, unusable
from shardkit.codecs.media import media_of
from shardkit.codecs.pixels import to_rgb
from shardkit.errors import DamagedError, NotFoundError, SampleError, ShardkitError, UsageError
from shardkit.helpers.checked import Count, plain
from shardkit.helpers.prefetch import in_threads
from shardkit.helpers.progress import Steps
from shardkit.metadata.manifest import PixelStats
from shardkit.metadata.sizes import FieldSizes
from shardkit.sample import Sample
from shardkit.schema import Array, Encoded, FieldType, Image, Images, Int, Scalar, Schema, Text

if TYPE_CHECKING:
    from shardkit.dataset.views import Views

_CHUNK = 32  # samples per job of a thread
_ROWS = 1 << 20  # pixels counted at once: counting takes 8 bytes for each
_DROP = "convert the dataset with --check decode --on-error skip"  # instead of repairing an image
_EXAMPLES = 5  # groups of duplicates that are listed, and keys in each


@dataclass
class Pixels:
    """A histogram of the pixel values of images, per channel.

    With it, mean and standard deviation are exact, and do not depend on the order of merging.
    """

    images: Count = 0
    counts: list[Count] = field(default_factory=lambda: [0] * 768)  # of red, green, blue

    def __post_init__(self) -> None:
        self._pending = np.zeros(768, np.int64)

    def add(self, pixels: npt.NDArray[np.uint8]) -> None:
        """Count an image, (height, width, 3); `counts` is complete only after `flush`."""
        rows = max(_ROWS // max(pixels.shape[1], 1), 1)
        for start in range(0, len(pixels), rows):
            for channel in range(3):
                values = pixels[start : start + rows, :, channel].ravel()
                place = slice(256 * channel, 256 * (channel + 1))
                self._pending[place] += np.bincount(values, minlength=256)
        self.images += 1

    def flush(self) -> None:
        self.counts = (np.array(self.counts, np.int64) + self._pending).tolist()
        self._pending[:] = 0

    def merge(self, other: Pixels) -> None:
        self.images += other.images
        self._pending += np.array(other.counts, np.int64) + other._pending
        self.flush()

    def summary(self) -> PixelStats | None:
        """Return the statistics; None if there are no pixels."""
        channels = np.array(self.counts, np.float64).reshape(3, 256)
        number = sum(self.counts[:256])
        if not number:
            return None
        values = np.arange(256) / 255
        means = channels @ values / number
        distances = (values - means[:, None]) ** 2
        std = np.sqrt((channels * distances).sum(axis=1) / number)
        return PixelStats(self.images, number, tuple(means.tolist()), tuple(std.tolist()))


def pixels_of(value: Any, kind: FieldType) -> npt.NDArray[np.uint8] | None:
    """The pixels of a value as training sees them, (height, width, 3); None if it is no image.

    Raises NotAnImageError for a damaged image.
    """
    if isinstance(value, bytes) and isinstance(kind, Image):
        try:
            return to_rgb(value)
        except UnsupportedError:  # floating-point values, or more bands than colours
            return None
    is_image = isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] == 3
    if is_image and value.dtype == np.uint8 and isinstance(kind, Image | Array):
        pixels: npt.NDArray[np.uint8] = value
        return pixels
    return None


@dataclass
class _Numbers:
    """Mean and standard deviation, merged by the formula of Chan, Golub and LeVeque (1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean
    min: float = math.inf
    max: float = -math.inf

    def add(self, value: float) -> None:
        self.merge(_Numbers(1, value, 0.0, value, value))

    def merge(self, other: _Numbers) -> None:
        if not other.count:
            return
        count = self.count + other.count
        apart = other.mean - self.mean
        self.squares += other.squares + apart**2 * self.count * other.count / count
        self.mean += apart * other.count / count
        self.count = count
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def summary(self) -> dict[str, Any]:
        std = math.sqrt(self.squares / self.count)
        return {"min": self.min, "max": self.max, "mean": self.mean, "std": std}


class _Field:
    """The statistics of one field."""

    def __init__(self, kind: FieldType) -> None:
        self.kind = kind
        self.values = 0
        self.sizes: dict[str, FieldSizes] = {}  # by measure, such as "width"
        self.formats: Counter[str] = Counter()
        self.shapes: Counter[str] = Counter()  # of multidimensional arrays
        self.numbers = _Numbers()
        self.pixels = Pixels()

    def add(self, value: Any) -> None:
        """Count a value as stored. Raises NotAnImageError for a damaged image."""
        self.values += 1
        if isinstance(self.kind, Image | Images):
            for image in value if isinstance(self.kind, Images) else [value]:
                found = read_header(image)
                self.formats[found.kind] += 1
                self._size(bytes=len(image), width=found.width, height=found.height)
        elif isinstance(self.kind, Encoded):
            about = media_of(self.kind, value)._asdict()
            self.formats[" ".join(filter(None, (about.pop("format"), about.pop("codec"))))] += 1
            if (seconds := about.pop("duration")) is not None:
                about["milliseconds"] = round(1000 * seconds)
            self._size(bytes=len(value), **{n: v for n, v in about.items() if v is not None})
        elif isinstance(self.kind, Text):
            self._size(characters=len(value))
        elif isinstance(self.kind, Array):
            if value.ndim == 1:
                self._size(length=len(value))
                if value.dtype == np.bool_:  # such as a mask of the tokens that are learned
                    self._size(true=int(np.count_nonzero(value)))
            else:
                self.shapes[str(value.shape)] += 1
        elif isinstance(self.kind, Scalar):
            if math.isfinite(value):
                self.numbers.add(float(value))
        elif isinstance(value, bytes):
            self._size(bytes=len(value))

    def look(self, value: Any) -> None:
        """Count the pixels of a value as training sees it."""
        pixels = pixels_of(value, self.kind)
        if pixels is not None:
            self.pixels.add(pixels)
        elif isinstance(self.kind, Image) and not isinstance(value, bytes):
            raise UsageError(
                "the output of the transforms is not pixels",
                expected="uint8 (height, width, 3)",
                found=f"{getattr(value, 'dtype', type(value).__name__)} {np.shape(value)}",
                fix="open the dataset with transforms= that do not normalize",
            )

    def _size(self, **sizes: int) -> None:
        for measure, size in sizes.items():
            self.sizes.setdefault(measure, FieldSizes()).append(size)

    def merge(self, other: _Field) -> None:
        self.values += other.values
        for measure, sizes in other.sizes.items():
            sizes.flush()
            self.sizes.setdefault(measure, FieldSizes()).merge(sizes)
        self.formats += other.formats
        self.shapes += other.shapes
        self.numbers.merge(other.numbers)
        self.pixels.merge(other.pixels)

    def summary(self, *, numbers: bool, histograms: bool) -> dict[str, Any]:
        """`numbers`: the values are quantities, not class labels."""
        found: dict[str, Any] = {"type": type(self.kind).__name__, "values": self.values}
        if self.formats:
            found["formats"] = dict(self.formats.most_common())
        for measure, sizes in self.sizes.items():
            sizes.flush()
            about = sizes.summary()
            found[measure] = {
                "count": about.count,
                "min": about.min,
                "median": about.median,
                "mean": about.bytes / about.count,
                "max": about.max,
            }
            if histograms:
                found[measure]["histogram"] = sizes.ranges()
        if histograms and self.shapes:
            found["shapes"] = dict(self.shapes.most_common())
        if numbers and self.numbers.count:
            found.update(self.numbers.summary())
        if (pixels := self.pixels.summary()) is not None:
            found["pixels"] = {n: v for n, v in plain(pixels).items() if n != "unknown"}
        return found


class _Tally:
    """The statistics of some samples, in order."""

    def __init__(self, dataset: Views, quick: bool) -> None:
        self._dataset, self._quick = dataset, quick
        self._damaged: list[ShardkitError] = []
        self._fields = {name: _Field(kind) for name, kind in dataset.schema.items()}
        self._compared = compared(dataset.schema, dataset.label)
        self._labels: list[Any] = []
        self._digests: list[bytes] = []

    def read(self, index: int) -> None:
        """Count a sample as stored, and, unless quick, its pixels after its transform.

        A quick tally records damaged samples instead of raising.
        """
        try:
            sample = self._dataset.read(index)
            self._digests.append(content_digest(sample, self._compared))
            self._labels.append(sample.get(self._dataset.label))
            self._each(sample, index, _Field.add)
        except (SampleError, DamagedError, NotFoundError) as error:
            if not self._quick:
                raise
            self._damaged.append(error)
        if not self._quick:
            transform = self._dataset.transform_of(index)
            self._each(sample if transform is None else transform(sample), index, _Field.look)

    def _each(self, sample: Sample, index: int, count: Callable[[_Field, Any], None]) -> None:
        for name, field_ in self._fields.items():
            if name in sample:
                try:
                    count(field_, sample[name])
                except NotAnImageError as error:
                    shard, position = self._dataset.locate(index)
                    path = self._dataset.sample_path(shard, position)
                    found = unusable(error, sample["__key__"], name, _DROP)
                    raise found.located(path=path, position=position) from error

    def merge(self, other: _Tally) -> None:
        """Add the statistics of the samples that follow."""
        for name, field_ in self._fields.items():
            field_.merge(other._fields[name])
        self._labels += other._labels
        self._digests += other._digests
        self._damaged += other._damaged

    def summary(self) -> dict[str, Any]:
        numbered = (self._dataset.label, *self._dataset.class_names)
        found = {
            "samples": len(self._digests),
            "fields": {
                name: field_.summary(numbers=name not in numbered, histograms=self._quick)
                for name, field_ in self._fields.items()
            },
            "classes": self._classes(),
            "duplicates": self._duplicates(),
        }
        return found | {"damaged": self._damaged} if self._quick else found

    def _classes(self) -> list[dict[str, Any]] | None:
        """Return the classes of the label, with the weight that makes all classes count equally."""
        names = self._dataset.classes
        if not isinstance(self._dataset.schema.get(self._dataset.label), Int):
            return None
        none = {None, -1} if names else {None}  # if classes have names, -1 means no class
        counts = Counter(label for label in self._labels if label not in none)
        each = counts.total() / max(len(counts), 1)
        return [
            {
                "label": label,
                "name": names[label] if names else None,
                "samples": counts[label],
                "weight": each / counts[label] if counts[label] else None,
            }
            for label in (range(len(names)) if names else sorted(counts))
        ]

    def _duplicates(self) -> dict[str, Any]:
        """Statistics of samples with the same values as an earlier sample."""
        every = np.frombuffer(b"".join(self._digests), "S16" if not self._digests else "V16")
        _, group, counts = np.unique(every, return_inverse=True, return_counts=True)
        members: dict[int, list[int]] = {}
        for index in np.flatnonzero((counts > 1)[group]).tolist():
            members.setdefault(int(group[index]), []).append(index)
        groups = list(members.values())
        return {
            "compared": list(self._compared),
            "samples": sum(map(len, groups)) - len(groups),
            "groups": len(groups),
            "groups_of_several_labels": sum(
                len({repr(self._labels[n]) for n in group}) > 1 for group in groups
            ),
            "first": [
                [self._dataset.read(n)["__key__"] for n in group[:_EXAMPLES]]
                for group in groups[:_EXAMPLES]
            ],
        }


def compared(schema: Schema, label: str) -> tuple[str, ...]:
    """The fields compared to find duplicates: image fields, or otherwise all but the label."""
    images = tuple(name for name, kind in schema.items() if isinstance(kind, Image | Images))
    return images or tuple(name for name in schema if name != label)


def content_digest(sample: Sample, fields: Iterable[str]) -> bytes:
    """Return a digest of the values of these fields."""
    digest = xxhash.xxh3_128()
    for name in fields:
        value = _bytes_of(sample.get(name))
        digest.update(len(value).to_bytes(8, "little") + value)
    return digest.digest()


def _bytes_of(value: Any) -> bytes:
    """Return a value as bytes, equal for equal values of a field."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    if isinstance(value, list) and all(isinstance(entry, bytes) for entry in value):
        return b"".join(len(entry).to_bytes(8, "little") + entry for entry in value)
    return repr(value).encode("utf-8", "surrogatepass")


def stats(dataset: Views, monitor: Steps | None = None, *, quick: bool = False) -> dict[str, Any]:
    """See `Dataset.stats`.

    `quick`: decode no images, and list errors of damaged samples in `damaged` instead of raising
    them. Sizes then have a `histogram` (`FieldSizes.ranges`), and multidimensional arrays have
    counts of their `shapes`.
    """
    dataset, threads = dataset.side_by_side()

    def measure(start: int) -> _Tally:
        tally = _Tally(dataset, quick)
        for index in range(start, min(start + _CHUNK, len(dataset))):
            tally.read(index)
        return tally

    found, starts = _Tally(dataset, quick), range(0, len(dataset), _CHUNK)
    if monitor is not None:
        monitor.start("counting", len(dataset), "samples")
    for start, part in zip(starts, in_threads(measure, starts, threads, 2), strict=True):
        found.merge(part)
        if monitor is not None:
            monitor.advance(min(_CHUNK, len(dataset) - start))
    return found.summary()


def values_of(dataset: Views, field: str) -> Iterator[Any]:
    """The values of a field in all samples that have it, without those that cannot be read."""
    for sample in dataset.stored_samples((field,), skip=True):
        if field in sample:
            yield sample[field]


def encoded_stats(dataset: Views) -> dict[str, Any]:
    """Return the statistics of images, audio and video by field, without decoding them.

    Values that are none of these are counted as `damaged`.
    """
    found = {}
    for name, kind in dataset.schema.items():
        if isinstance(kind, Encoded | Images):
            about, damaged = _Field(kind), 0
            for value in values_of(dataset, name):
                try:
                    about.add(value)
                except NotAnImageError:
                    damaged += 1
            found[name] = {**about.summary(numbers=False, histograms=False), "damaged": damaged}
    return found
