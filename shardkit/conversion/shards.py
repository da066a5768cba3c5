"""Samples -> shards in a folder, closed at their limit; with what the manifest says of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from shardkit import storage
from shardkit.checked import Count, checked
from shardkit.conversion.lengths import Lengths
from shardkit.errors import SampleError
from shardkit.formats import file_name
from shardkit.formats.base import Format, ShardSpec, ShardWriter
from shardkit.manifest import FOLDER, File, Shard
from shardkit.preprocess.text import TextTally
from shardkit.sample import JsonText, Sample
from shardkit.schema import (
    Array,
    Bool,
    Bytes,
    FieldType,
    Float,
    Image,
    Images,
    Int,
    Json,
    Text,
    check_label,
)
from shardkit.sizes import FieldSizes

KEYS_REPEAT = "give every sample a key of its own"
_COUNTS = ("encoded", "filtered", "ignored", "keys", "images", "reasons")
_MOST_IGNORED = 100  # kinds that a manifest names: JSON may have names without end
_FLUSH = 1 << 16  # sizes in memory before they are counted


def key_hash(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))


class ShardSequence:
    """Writes samples into `folder`: shard 0, 1, ... as their limits demand."""

    def __init__(
        self,
        folder: Path,
        format: Format,
        spec: ShardSpec,
        max_samples: int | None,
        *,
        label: str = "label",
        durable: bool = True,
        unique_keys: bool = False,
    ) -> None:
        """`label` is the field with the class.

        Without `durable` the shards are not synced: whoever reads them compares their checksums.
        With `unique_keys` they are not compared: the source cannot repeat one.
        """
        self._folder = folder
        self._format = format
        self._spec = spec
        self._max_samples = max_samples
        self._writer: ShardWriter | None = None
        self._samples = 0  # in the open shard
        self._keys: set[str] = set()  # in the open shard
        self._label = label
        self._durable = durable
        self._unique_keys = unique_keys
        self.shards: list[Shard] = []
        self.key_hashes = array("Q")  # of all shards; a shard's own keys are compared as they are
        self.lengths = Lengths(spec.schema)
        self.stats = Stats(spec.schema, label)

    def write(self, sample: Sample) -> int:
        """Add a checked sample; returns its payload bytes.

        After a SampleError the sequence goes on without that sample.
        """
        if self._samples == self._max_samples:
            self._close_shard()
        self._check(sample)
        if self._writer is None:
            self._open_shard()
        if not self._written(sample):
            self._close_shard()
            self._open_shard()
            self._written(sample)
        self._samples += 1
        if not self._unique_keys:
            self._keys.add(sample["__key__"])
        self.key_hashes.append(key_hash(sample["__key__"]))
        self.lengths.add(sample)
        return self.stats.add(sample)

    def close(self) -> None:
        """Complete the last shard. All files are on the disk when this returns."""
        if self._writer is not None:
            self._close_shard()
        self.stats.flush()

    def _check(self, sample: Sample) -> None:
        """What no single sample tells: keys that were used, labels without a class."""
        key = sample["__key__"]
        if key in self._keys:
            raise SampleError(
                "two samples have the same key",
                key=key,
                fix=KEYS_REPEAT,
            )
        for field, names in self._spec.classes.items():
            check_label(sample, field, names)

    def abandon(self) -> None:
        """Let go of the open shard; whoever owns the folder removes what is in it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def _path(self) -> Path:
        return self._folder / file_name(f"shard-{len(self.shards):06d}", self._format.name)

    def _written(self, sample: Sample) -> bool:
        assert self._writer is not None
        return self._writer.write(sample)

    def _open_shard(self) -> None:
        self._writer = self._format.create(self._path, self._spec)

    def _close_shard(self) -> None:
        writer, self._writer = self._writer, None
        assert writer is not None
        writer.close()
        stem = f"shard-{len(self.shards):06d}"
        if self._samples:
            self.stats.encoded.update(writer.encoded)
            self.stats.keys.update(writer.keys)
            shard = finished_shard(self._folder, stem, self._format.name, durable=self._durable)
            self.shards.append(replace(shard, samples=self._samples))
        else:
            for path in (*self._folder.glob(stem + "*"), *self._folder.glob(f"{FOLDER}/{stem}*")):
                storage.remove(path)
        self._samples = 0
        self._keys.clear()


def finished_shard(folder: Path, stem: str, format: str, *, durable: bool = True) -> Shard:
    """The shard whose files in `folder` begin with `stem`, once they are on the disk."""
    own_name = file_name(stem, format)
    lists = own_name.partition("/")[0] + "."  # what an only shard has beside it: manifest, errors
    tops = [*folder.glob(stem + ".*"), *folder.glob(f"{FOLDER}/{stem}.*")]
    paths = sorted(
        path for top in tops if not top.name.startswith(lists) for path in (top, *top.rglob("*"))
    )
    if any(path.parent.name == FOLDER for path in paths):
        paths.append(folder / FOLDER)
    files = {}
    for path in paths:
        if durable:
            storage.sync(path)
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            files[name] = File(name, path.stat().st_size, storage.checksum(path))
    own = files.pop(own_name)
    return Shard(own, 0, tuple(files.values()))


class _StatsEntry(TypedDict):
    """What `Stats.to_json` gives, beside _COUNTS."""

    fields: dict[str, FieldSizes]
    labels: dict[int, Count]
    text: dict[str, Any]


class Stats:
    """Counts over samples: sizes per field, samples per label; merged in any order alike."""

    def __init__(self, schema: Mapping[str, FieldType] | None = None, label: str = "label") -> None:
        self._label = label
        self.fields: dict[str, FieldSizes] = {}
        self.labels: Counter[int] = Counter()
        self.encoded: Counter[str] = Counter()  # images re-encoded by the format, by reason
        self.filtered: Counter[str] = Counter()  # samples dropped by an option, by reason
        self.ignored: Counter[str] = Counter()  # what was passed over: `sources.base.Described`
        self.keys: Counter[str] = Counter()  # that other readers stumble over, by reason
        self.images: Counter[str] = Counter()  # what became of them, and their bytes
        self.reasons: Counter[str] = Counter()  # why images were changed
        self.text = TextTally()
        self._pending: list[tuple[str, Callable[[Any], int], list[int]]] = [
            (name, _SIZES[type(kind)], []) for name, kind in (schema or {}).items()
        ]

    def add(self, sample: Sample) -> int:
        """Count one sample; returns its payload bytes."""
        total = 0
        for name, size_of, pending in self._pending:
            if name in sample:
                size = size_of(sample[name])
                total += size
                pending.append(size)
                if len(pending) >= _FLUSH:
                    self.flush()
        label = sample.get(self._label)
        if type(label) is int:
            self.labels[label] += 1
        return total

    def flush(self) -> None:
        """Count what was added since; the counts are whole only after this."""
        for name, _, sizes in self._pending:
            if sizes:
                self.fields.setdefault(name, FieldSizes()).add(sizes)
                sizes.clear()
        self.text.flush()

    def merge(self, other: Stats) -> None:
        for name, sizes in other.fields.items():
            self.fields.setdefault(name, FieldSizes()).merge(sizes)
        self.labels.update(other.labels)
        for name in _COUNTS:
            getattr(self, name).update(getattr(other, name))
        self.text.merge(other.text)

    def to_json(self) -> dict[str, Any]:
        return {
            "fields": {name: asdict(sizes) for name, sizes in self.fields.items()},
            "labels": {str(label): count for label, count in sorted(self.labels.items())},
            "text": self.text.to_json(),
            **self.counts(),
        }

    def counts(self) -> dict[str, dict[str, int]]:
        """What was done to images and samples, and what was passed over, in words."""
        return {name: dict(sorted(getattr(self, name).items())) for name in _COUNTS}

    @classmethod
    def from_json(cls, data: Any) -> Stats:
        """Raises ValueError for what `to_json` does not give."""
        found = checked(_StatsEntry, data)
        stats = cls()
        stats.fields = found["fields"]
        stats.labels.update(found["labels"])
        stats.text = TextTally.from_json(found["text"])
        for name in _COUNTS:
            getattr(stats, name).update(checked(dict[str, Count], data.get(name), name))
        return stats

    def summary(self) -> dict[str, dict[str, int]]:
        """The counts for the manifest: of what was passed over, the most frequent."""
        often = sorted(self.ignored.items(), key=lambda entry: (-entry[1], entry[0]))
        ignored = dict(sorted(often[:_MOST_IGNORED]))
        if rest := often[_MOST_IGNORED:]:
            ignored[f"of {len(rest):,} other kinds"] = sum(count for _, count in rest)
        return {**self.counts(), "ignored": ignored}

    def label_counts(self, classes: int) -> tuple[int, ...]:
        return tuple(self.labels[label] for label in range(classes))


# Bytes of a value by itself, whatever the format: text in UTF-8, numbers in 8 bytes.
_SIZES: dict[type[FieldType], Callable[[Any], int]] = {
    Int: lambda value: 8,
    Float: lambda value: 8,
    Bool: lambda value: 1,
    Bytes: len,
    Image: len,
    Images: lambda value: sum(map(len, value)),
    Text: lambda value: len(value.encode()),
    Json: lambda value: len(JsonText.of(value).encode()),
    Array: lambda value: int(value.nbytes),
}
