"""`Dataset`: the shards of a dataset in any format, as one sequence of samples."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from shardkit.codecs.array import load_table
from shardkit.codecs.media import length_of
from shardkit.dataset import readers
from shardkit.dataset.readers import SampleSequence, SequenceReader
from shardkit.dataset.views import REQUESTS, Views
from shardkit.errors import DamagedError, FormatError, ShardkitError, UsageError
from shardkit.formats import FORMATS, get_format
from shardkit.formats.base import Columns, Ranges, ShardReader
from shardkit.formats.columns import keys_of
from shardkit.helpers import os_errors
from shardkit.helpers.checked import checked, damaged, from_lines, under
from shardkit.helpers.indices import array
from shardkit.helpers.keywords import takes
from shardkit.helpers.prefetch import in_threads
from shardkit.helpers.progress import Progress, watched
from shardkit.metadata import manifest as manifests
from shardkit.metadata.manifest import File, Manifest
from shardkit.metadata.shared_schema import own_schema, shared_names, shared_schema
from shardkit.sample import Sample, key_hash
from shardkit.schema import (
    Array,
    Audio,
    Schema,
    audio_fields,
    label_of,
    length_fields,
    lengths_dtype,
    row_fields,
)
from shardkit.storage import fs
from shardkit.storage.byte_source import Memory, changed, version_of
from shardkit.storage.remote.client import Info, replaced
from shardkit.storage.remote.path import RemotePath

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Self


_TRIED = 4  # third-party shards, spread over all, that are inspected first: are they compressed?
_LOOKS = 8  # local third-party shards that are inspected at a time


@functools.lru_cache(maxsize=8)
def read_key_table(path: Path, checksum: str, kind: str) -> Mapping[str, str]:
    """The key table: key -> the sample's path as a file. Cached per process, path and checksum."""
    data = manifests.read_checked(path, checksum, kind)
    lines = from_lines(_KeyLine, data, "the key table", path=path)
    return {line["key"]: line["path"] for line in lines}


class _KeyLine(TypedDict):
    """A line of keys.jsonl."""

    key: str
    path: str


class Dataset(Views):
    """A map-style dataset: `len(ds)`, `ds[i]`, `ds.schema`, `ds.classes`, `ds.class_names`.

    `ds[key]` returns the sample with this key. `ds.keys()` and `ds.column(field)` return the keys,
    or one field, of all samples. `ds[10:20]`, `ds.select(indices)` and `ds.filter(condition)`
    return views, which are also datasets.

    A dataset can be used in any thread and any process. At most 1,024 shards of all datasets of a
    process are open at a time, or fewer if it may not open that many files. A pickled dataset
    contains only paths, and reads nothing before its first sample. Open a dataset with
    `shardkit.open`.
    """

    def __init__(
        self,
        path: Path,
        format: str = "",
        shards: Sequence[tuple[str, int | None, int | None]] = (),
        manifest: Manifest | None = None,
        manifest_path: Path | None = None,
        *,
        reader: ShardReader | None = None,
    ) -> None:
        """`shards` has the name, samples and bytes of each shard; None: known once it is opened.

        `path` is the folder that the names are relative to; `reader` reads the only shard if it is
        not a file (`from_sequence`).
        """
        if not format:
            what, fix = "a Dataset is made by shardkit.open", f"shardkit.open({str(path)!r})"
            raise UsageError(what, fix=fix)
        self.path = path
        self.format = format
        self.manifest = manifest
        self.manifest_path = manifest_path
        self._names = [name for name, _, _ in shards]
        self._bytes = [size for _, _, size in shards]
        # By file: size and time of change in ns, of the manifest, of shards of other tools, and
        # of other local shards that were opened.
        self._versions: dict[Path, tuple[int, int]] = {}
        self._latest: Path | None = None  # the last of these others
        if manifest is not None and format not in FORMATS:
            raise FormatError(
                "the dataset has a format that this version does not know",
                path=manifest_path,
                expected="one of " + ", ".join(sorted(FORMATS)),
                found=f"{format!r:.60}",
                fix="use the shardkit that wrote it, or a newer one",
            )
        self._only = reader
        if reader is None:
            self._format = get_format(format)
        self.temporary = False  # whether no later run can find it again
        self.problems: Sequence[ShardkitError] = ()  # of samples that were not written to it
        self.unusable: dict[str, ShardkitError] = {}  # fields that cannot be read, and why
        self.partitions: dict[str, list[str | None]] = {}  # columns in the names of shards' folders
        # By shard: its files in a store, and what the manifest says about them.
        self.remote_files: dict[str, list[tuple[str, Info]]] = {}
        self.beside: Mapping[str, int] = {}  # other files in the folder, by kind
        self._shared: dict[str, Any] = {}
        self._readers = readers.Readers()  # oldest first
        # `key_hash` of all keys, for shards whose reader had to scan for samples.
        self.key_hashes: dict[int, npt.NDArray[np.int64] | None] = {}
        self._starts: list[int] = []
        self._layouts: list[Any] = [manifest and self._layout(manifest)] * len(shards)
        if manifest is None:
            counts = self._look_into_all()
        else:
            counts = [samples or 0 for _, samples, _ in shards]
            self.schema, self._class_names = manifest.schema, manifest.class_names
            if manifest_path is not None and not isinstance(manifest_path, RemotePath):
                with contextlib.suppress(OSError):
                    self._versions[manifest_path] = version_of(manifest_path.stat())
        *self._starts, self._length = accumulate(counts, initial=0)

    @classmethod
    def from_sequence(
        cls,
        samples: SampleSequence,
        schema: Schema | None = None,
        *,
        class_names: Mapping[str, Sequence[str]] | None = None,
        path: Path = Path(),
        format: str = "sequence",
        size: int = 0,
    ) -> Self:
        """Make a dataset for a Loader from samples without shards, such as a list of dicts.

        samples: any sequence. `samples[i]` is a dict with `__key__` and the fields of the schema.
            Values are not checked. Several threads read from it at the same time.
        schema: the schema of the samples. None: `samples.schema`.
        class_names: class names by field.
        path, format, size: its path and format in messages, and its bytes as far as known.
        """
        if schema is None:
            schema = getattr(samples, "schema", None)
        if schema is None:
            raise UsageError(
                "these samples have no schema",
                found=type(samples).__name__,
                fix="give one, such as schema=shardkit.Schema({'label': shardkit.Int()})",
            )
        reader = SequenceReader(samples, schema, class_names or {}, path)
        return cls(path, format, [(".", len(samples), size)], None, reader=reader)

    @property
    def sequence(self) -> SampleSequence | None:
        """The samples that `from_sequence` was given; None for a dataset of shards."""
        only = self.whole._only
        return only.sequence if isinstance(only, SequenceReader) else None

    @property
    def class_names(self) -> dict[str, tuple[str, ...]]:
        return self._class_names

    @property
    def label(self) -> str:
        return label_of(self.class_names) if self.manifest is None else self.manifest.label

    @property
    def guessed(self) -> frozenset[str]:
        return frozenset(name for layout in self._layouts for name in layout.get("guessed", ()))

    @property
    def ours(self) -> bool:
        """Whether shardkit wrote the shards, according to the manifest or any shard."""
        return self.manifest is not None or any("ours" in layout for layout in self._layouts)

    @property
    def conventions(self) -> list[str]:
        """The storage conventions found in third-party shards, in words."""
        return sorted({layout["convention"] for layout in self._layouts if "convention" in layout})

    @property
    def ignored(self) -> dict[str, int]:
        """Counts, by kind, of what is ignored in third-party shards and beside them."""
        total: Counter[str] = Counter(self.beside)
        for layout in self._layouts:
            total.update(layout.get("ignored", {}))
        return dict(total)

    @property
    def unread(self) -> int:
        """Bytes of third-party shards that follow their last sample: zeros, or what is ignored."""
        return sum(layout.get("unread", 0) for layout in self._layouts)

    def read(self, index: int, fields: Collection[str] | None = None) -> Sample:
        shard, position = self.locate(index)
        try:
            return self.reader(shard).sample(position, fields)
        except Exception as error:
            found = fs.unreadable(error, self.sample_path(shard, position), position)
            raise found from found.__cause__

    def plan(
        self, shard: int, positions: npt.NDArray[np.int64], fields: Collection[str]
    ) -> Ranges | Columns | None:
        reader = self.reader(shard)
        own = [name for name in fields if name in reader.schema]
        plan = reader.plan(positions, own)
        if plan is None or len(own) == len(fields):
            return plan
        absent = {name: [None] * len(positions) for name in fields if name not in reader.schema}
        if isinstance(plan, Ranges):
            return plan._replace(known={**plan.known, **absent})
        return {**plan, **absent}

    def keys_of(self, shard: int) -> list[str]:
        """Return the keys of all samples in a shard, whether or not they are in the view."""
        reader = self.reader(shard)
        with self.explained(shard):
            return keys_of(reader)

    def _key_hashes(self, shard: int) -> npt.NDArray[np.int64]:
        found = self.key_hashes.get(shard)
        if found is None:
            keys = self.keys_of(shard)
            found = np.array([key_hash(key) for key in keys], np.uint64).view(np.int64)
        return found

    def part(self, shards: list[int]) -> Dataset:
        """Return a dataset of only these shards, for a task."""
        chosen = [(self._names[s], *self.extent(s)) for s in shards]
        part = copy.copy(self)  # without open shards, like a pickle
        part._chosen = None
        part.manifest = self.manifest and dataclasses.replace(self.manifest, shards=(), files=())
        part._names = [name for name, _, _ in chosen]
        part.remote_files = {n: self.remote_files[n] for n in part._names if n in self.remote_files}
        part._bytes = [size for _, _, size in chosen]
        part._layouts = [self._layouts[s] for s in shards]
        *part._starts, part._length = accumulate((n for _, n, _ in chosen), initial=0)
        return part

    def forget_versions(self) -> None:
        """Take the files as they are now, after a repair."""
        self._versions.clear()
        self._latest = None

    @property
    def parts(self) -> Sequence[Dataset]:
        """The datasets that this one was concatenated from, or just itself; never views."""
        return [self.whole]

    @property
    def checksums(self) -> dict[str, str]:
        """The known checksums of shards, by name."""
        shards = self.manifest.shards if self.manifest is not None else ()
        return {shard.file.name: shard.file.checksum for shard in shards}

    def original_paths(self) -> dict[str, str]:
        """The key table: the path of each sample's file, if it does not follow from its key."""
        table = self.key_table
        return {} if table is None else dict(read_key_table(*table))

    @property
    def key_table(self) -> tuple[Path, str, str] | None:
        """The file with the key table, its checksum, and the kind of checksum.

        None if all paths follow from the keys.
        """
        table = self.manifest.list_named(manifests.KEYS) if self.manifest else None
        if self.manifest is None or table is None:
            return None
        return self.path / table.name, table.checksum, self.manifest.checksum

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return the manifest's entry of the tokenizer, and its files; both empty where unknown."""
        copy = self._tokenizer_file
        if self.manifest is None or copy is None:
            return {}, {}
        entry, path = self.manifest.tokenizer, self.path / copy.name
        data = manifests.read_checked(path, copy.checksum, self.manifest.checksum)
        return entry, {entry["file"]: data}

    @property
    def tokenizer_path(self) -> Path | None:
        """Path of the copy of the tokenizer's file, or None if there is none."""
        copy = self._tokenizer_file
        return None if copy is None else self.path / copy.name

    @property
    def _tokenizer_file(self) -> File | None:
        entry = self.manifest.tokenizer if self.manifest else {}
        return self.manifest.list_named(entry["file"]) if self.manifest and entry else None

    def lengths(self, field: str) -> npt.NDArray[np.int64]:
        """Return the number of elements that `field` has in each sample, in order; 0 if absent.

        For audio, return the durations in milliseconds. If shardkit wrote the dataset, no sample is
        read. Raises UsageError for a field that is neither a one-dimensional array nor audio.
        """
        kind = self._check_lengths(field)
        fixed = kind.shape[0] if isinstance(kind, Array) and kind.shape is not None else None
        if fixed is not None and not kind.optional:
            return np.full(len(self), fixed, np.int64)
        rows = self.length_table()
        if rows is None or field not in (rows.dtype.names or ()):
            samples = self.stored_samples([field])
            return np.array([length_of(sample.get(field)) for sample in samples], np.int64)
        return rows[field].astype(np.int64)

    def _check_lengths(self, field: str) -> Array | Audio:
        kind = self.schema.get(field)
        fields = [*row_fields(self.schema), *audio_fields(self.schema)]
        if not isinstance(kind, Array | Audio) or field not in fields:
            raise UsageError(
                "only one-dimensional arrays and audio have lengths",
                path=self.place,
                field=field,
                expected="one of " + ", ".join(map(repr, fields)) if fields else "such a field",
                found="no such field" if kind is None else str(kind),
            )
        return kind

    @takes()
    def stats(self, *, progress: bool | Callable[[Progress], object] = False) -> dict[str, Any]:
        """Read every sample, and return statistics for training, as JSON values.

        `fields` has an entry for each field. An image field has `pixels`: the `mean` and `std` of
        red, green and blue (0 to 1) over all pixels as training sees them. These are upright RGB
        pixels, or the output of the transforms that the dataset was opened with. Sizes have their
        smallest, median (to 1 %), mean and largest value: `width`, `height` and `bytes` of images;
        `milliseconds`, `sampling_rate`, `channels` and more of audio and video; `characters` of
        text; and `length` of one-dimensional arrays. Numbers that are not classes have `mean`,
        `std`, `min` and `max`.

        `classes` has the number of samples of each class, and the `weight` that makes all classes
        count equally.

        `duplicates` has the number of `samples` with the same images as an earlier sample (without
        images: with the same values, except for the label). It also has the number of `groups` of
        duplicates, the keys in the first groups, and the number of groups with more than one label.

        `progress` is the same as in `shardkit.convert`.

        Raises SampleError for a damaged image, and UsageError for transforms that normalize.
        """
        from shardkit.dataset.statistics import stats  # imports image decoders

        with watched(progress) as monitor:
            return stats(self, monitor)

    def length_table(self) -> npt.NDArray[np.void] | None:
        """The table of lengths stored with the manifest: a row per sample, `length_fields`."""
        table = self.manifest.list_named(manifests.LENGTHS) if self.manifest else None
        if table is None or self.manifest is None:
            return None
        path = self.path / table.name
        samples = [shard.samples for shard in self.manifest.shards]
        source = None
        if isinstance(path, RemotePath):  # all of it is needed in any case
            data = manifests.read_checked(path, table.checksum, self.manifest.checksum)
            source = Memory(data, path)
        names = length_fields(self.schema)
        what = "the table of arrays' lengths"
        try:
            every = load_table(path, lengths_dtype(names), what, source)
        except DamagedError:
            arrays = [name for name in names if isinstance(self.schema[name], Array)]
            if arrays == names:
                raise
            every = load_table(path, lengths_dtype(arrays), what, source)  # from earlier versions
        if len(every) != sum(samples):
            raise DamagedError(
                "the table of arrays' lengths does not match the manifest",
                path=path,
                expected=f"{sum(samples):,} rows",
                found=f"{len(every):,}",
            )
        names = [shard.file.name for shard in self.manifest.shards]
        start_of = dict(zip(names, accumulate(samples, initial=0), strict=False))
        starts = [start_of[name] for name in self._names]
        parts = [every.slice(at, at + self.extent(n)[0]) for n, at in enumerate(starts)]
        found = np.concatenate([np.zeros(0, every.dtype), *parts])
        return found if self._chosen is None else found[array(self._chosen)]

    @property
    def place(self) -> Path:
        return self.path if self.manifest_path is None else manifests.dataset_of(self.manifest_path)

    def stat(self, shard: int) -> os.stat_result:
        """The shard's `os.stat`. Raises NotFoundError, and DamagedError for the wrong size."""
        path, expected = self.shard_path(shard), self._bytes[shard]
        with os_errors.explained("open the shard", path):
            found = path.stat()
        if expected not in (None, found.st_size):
            raise DamagedError(
                "the shard is not as long as "
                + ("its manifest says" if self.manifest else "when the dataset was opened"),
                path=path,
                expected=f"{expected:,} bytes",
                found=f"{found.st_size:,} bytes",
            )
        self._same_version(path, found)
        return found

    def _same_version(
        self, path: Path, found: os.stat_result, before: tuple[int, int] | None = None
    ) -> None:
        """Raise DamagedError if a file is not as `before`, or as when it was last looked at."""
        before = before or self._versions.get(path)
        if before not in (None, version_of(found)):
            assert before is not None
            if isinstance(path, RemotePath):
                raise replaced(str(path))
            raise changed(path, before, found)

    def reader(self, shard: int) -> ShardReader:
        """Return the open reader of one shard, which the dataset closes.

        There is no lock, as a fork in another thread could leave it held: two threads may open the
        same shard at the same time, and one of the two readers is then dropped.
        """
        reader = self._readers.get(shard) if self._only is None else self._only
        if reader is not None:
            return reader
        with self.explained(shard):
            opened = self._open(shard)
        reader = self._readers.setdefault(shard, opened)
        if reader is opened:
            readers.added(self._readers, shard, opened)
        return reader

    def _open(self, shard: int) -> ShardReader:
        path = self.shard_path(shard)
        self.expect(self._names[shard])  # a store loses this when its path is pickled
        found = self.stat(shard)
        if self.manifest_path in self._versions:
            # Shards of another conversion may be as long, and be there before its manifest.
            for known in filter(None, (self.manifest_path, self._latest)):
                with contextlib.suppress(FileNotFoundError):
                    self._same_version(known, known.stat())
            self._versions[path], self._latest = version_of(found), path
        layout = self._layouts[shard]
        try:
            opened = self._format.open(path, layout)
        except Exception as error:
            if not os_errors.shortage(error):
                raise
            readers.close_all()  # other code uses more files or memory than we left for it
            opened = self._format.open(path, layout)
        if not isinstance(path, RemotePath):  # it may have been replaced in the meantime
            with contextlib.suppress(FileNotFoundError):
                self._same_version(path, path.stat(), version_of(found))
        if self._starts and len(opened) != self.extent(shard)[0]:
            raise DamagedError(
                "the shard or its index has the wrong number of samples",
                path=path,
                expected=f"{self.extent(shard)[0]:,} samples",
                found=f"{len(opened):,}",
            )
        return opened

    @contextlib.contextmanager
    def explained(self, shard: int, position: int | None = None) -> Iterator[None]:
        """A context that turns any error of a shard's reader into a ShardkitError with location."""
        try:
            yield
        except Exception as error:
            found = fs.unreadable(error, self.shard_path(shard), position)
            raise found from found.__cause__

    def close(self) -> None:
        """Close all open shards. The next access opens them again."""
        self._readers.clear()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def expect(self, *shards: str) -> None:
        """Tell the store what the manifest says about the files of these shards.

        This saves requests for their sizes, and lets the store compare what is read with the
        digests of the files' pieces.
        """
        for shard in shards:
            for name, info in self.remote_files.get(shard, ()):
                path = self.path / name
                if isinstance(path, RemotePath):  # not a copy in a local folder
                    path.store.expect(path.key, info)

    def __getstate__(self) -> dict[str, Any]:
        opened = {"_readers": readers.Readers(), "key_hashes": {}, "_shared": {}}
        return {**self.__dict__, **opened}

    def __repr__(self) -> str:
        from shardkit.dataset import display

        return display.text(self)

    def _repr_html_(self) -> str:
        """For notebooks: the fields, and five samples with small images."""
        from shardkit.dataset import display

        return display.as_html(self)

    def _layout(self, manifest: Manifest) -> dict[str, Any]:
        """The layout for readers: the schema, and the checked entries that the format declares."""
        types, layout = self._format.layout_types, manifest.layout
        try:
            with under("layout"):
                own = {n: checked(hint, layout.get(n), n) for n, hint in types.items()}
        except ValueError as error:
            raise damaged("the manifest", error, path=self.manifest_path) from error
        return {"schema": layout["schema"], **own}

    def _look_into_all(self) -> list[int]:
        """Inspect all shards without a manifest, and set what they share; returns their samples."""
        every = range(self.shards)
        found: dict[int, tuple[int, int]] = {}
        for shard in every[:: -(-len(every) // _TRIED) or 1]:
            with contextlib.suppress(ShardkitError):  # raised again below, in order
                found[shard] = self._look_into(shard)
        # Compressed shards are unpacked, which takes disk space: open one after the other.
        threads = REQUESTS if isinstance(self.path, RemotePath) else _LOOKS
        threads = 1 if any(unpacked for _, unpacked in found.values()) else threads
        others = [shard for shard in every if shard not in found]
        found |= zip(others, in_threads(self._look_into, others, threads, 4), strict=True)
        counts = [found[shard][0] for shard in every]
        mixed_types_as_bytes = self._only is None and self._format.mixed_types_as_bytes
        names = None if mixed_types_as_bytes else self._names
        self.schema, self.unusable = shared_schema(self._layouts, counts, names)
        self._class_names = shared_names(self._layouts, self._names)
        common = self.schema.to_json()
        for shard, layout in enumerate(self._layouts):
            for field, error in layout.get("unusable", {}).items():
                self.unusable[field] = error.located(path=self.shard_path(shard))
            layout["schema"] = own_schema(layout, common)
        return counts

    def _look_into(self, shard: int) -> tuple[int, int]:
        """Record the layout of a third-party shard; returns its samples, and unpacked bytes."""
        path, version = self.shard_path(shard), None
        with self.explained(shard):
            if self._only is None:
                version = version_of(self.stat(shard))  # before opening, which may take long
            reader = self._open(shard) if self._only is None else self._only
        self._layouts[shard] = reader.layout
        self.key_hashes[shard] = reader.key_hashes
        if version is not None:
            self._bytes[shard], self._versions[path] = version[0], version
        return len(reader), reader.temporary_bytes
