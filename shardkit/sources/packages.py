"""Sources of other packages: what they return is checked, and errors name the package."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from shardkit.errors import SampleError, ShardkitError, SourceError
from shardkit.options import Selection
from shardkit.sample import Sample
from shardkit.sources.base import Document, Indices, Source, SourceInfo, SourceWrapper, Stream

if TYPE_CHECKING:
    from shardkit.helpers.mapped import Sizes


class Package(NamedTuple):
    """The package of a source."""

    source: str  # the name of its entry point
    name: str
    function: str  # its recogniser

    def failed(self, expected: str, found: object, **where: Any) -> SourceError:
        return SourceError(
            f"the source {self.source!r} of the package {self.name} failed",
            expected=expected,
            found=str(found),
            fix=f"install another version of {self.name}, or uninstall it",
            **where,
        )

    @contextmanager
    def named(self, what: str, **where: Any) -> Iterator[None]:
        """Convert exceptions of the package's code to errors that name it."""
        try:
            yield
        except (ShardkitError, MemoryError):
            raise
        except Exception as error:
            raise self.failed(what, f"{type(error).__name__}: {error}", **where) from error

    def checked(self, source: SourceInfo, sample: Any) -> Sample:
        """Return a sample of the source; raises SampleError if it does not fit the schema."""
        key = sample.get("__key__") if isinstance(sample, dict) else None
        if not isinstance(key, str) or not key:
            raise self.failed("samples that are dicts with text as '__key__'", f"{sample!r:.100}")
        return source.schema.check(source.selected(sample))

    def sizes(self, whole: Source | Stream) -> Sizes:
        with self.named("sizes of all samples or ranges"):
            found = whole.sizes()
            if isinstance(found, list | tuple):
                found = np.array(found, np.int64)
            if len(found) != len(whole):
                raise ValueError(f"{len(found)} sizes of {len(whole)}")
        return found

    def fingerprint(self, whole: Source | Stream) -> dict[str, str] | None:
        """Its hashes as shardkit names them."""
        with self.named("hashes as texts, by name, or None"):
            found = dict(whole.fingerprint() or {})
            times = {"times": found.pop("times")} if "times" in found else {}
            text = json.dumps(sorted(found.items()))
        return {"files": xxhash.xxh3_128_hexdigest(text.encode()), **times} if found else None


class PackageSource(SourceWrapper):
    """The source of a package, checked."""

    def __init__(self, whole: Source, package: Package) -> None:
        super().__init__(whole)
        self._package, self.is_scattered = package, whole.is_scattered

    def __getitem__(self, index: int) -> Sample:
        with self._package.named("a sample, or a SampleError"):
            sample = self._whole[index]
        return self._package.checked(self, sample)

    def nearby(self, first: int, last: int) -> Sequence[int]:
        return self._whole.nearby(first, last)

    def sizes(self) -> Sizes:
        return self._package.sizes(self._whole)

    def fingerprint(self) -> dict[str, str] | None:
        return self._package.fingerprint(self._whole)


class PackageStream(Stream):
    """The stream of a package, checked."""

    def __init__(self, whole: Stream, package: Package) -> None:
        super().__init__()
        self.describe_as(whole)
        self._whole, self._package, self.also = whole, package, whole.also

    def __len__(self) -> int:
        return len(self._whole)

    def sizes(self) -> Sizes:
        return self._package.sizes(self._whole)

    def narrow(self, selection: Selection) -> None:
        self._whole = copy.copy(self._whole)
        self._whole.narrow(selection)
        super().narrow(selection)

    def select(self, ranges: Indices) -> PackageStream:
        part = copy.copy(self)
        part._whole = self._whole.select(ranges)
        return part

    def fingerprint(self) -> dict[str, str] | None:
        return self._package.fingerprint(self._whole)

    def documents(self) -> Iterator[Document]:
        with self._package.named("documents"):
            for document in self._whole.documents():
                yield document._replace(sample=self._judged(document.sample))

    def _judged(self, sample: Sample | SampleError) -> Sample | SampleError:
        if isinstance(sample, SampleError):
            return sample
        try:
            return self._package.checked(self, sample)
        except SampleError as error:
            return error


def packaged(sources: Mapping[str, Any], package: Package) -> dict[str, Source | Stream]:
    """Return the sources that a recogniser returned, by split."""
    with package.named("sources whose __init__ calls super().__init__() and sets `schema`"):
        return {
            name: (PackageStream if isinstance(source, Stream) else PackageSource)(source, package)
            for name, source in sources.items()
        }
