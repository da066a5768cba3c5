"""The files of a text corpus, and the two sources of documents: whole files, and lines or rows."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import SampleError, UsageError
from shardkit.helpers.mapped import Growing
from shardkit.options import Selection
from shardkit.sample import Sample
from shardkit.schema import FieldType, Int, Schema, Text
from shardkit.sources.base import Document, Indices, Source, Stream
from shardkit.sources.file_table import FEW, FileSource, FileTable
from shardkit.sources.files import FilePath, below, check_unchanged
from shardkit.sources.labels import LABEL
from shardkit.sources.metadata import add_columns
from shardkit.sources.partitioned import values_of
from shardkit.sources.text.fields import Fields
from shardkit.sources.text_files import TABLES, Name, parse_name
from shardkit.sources.text_files.encodings import MARK_SIZE
from shardkit.sources.text_files.records import LINE_FIELD, TextFile
from shardkit.storage.remote.client import Info
from shardkit.storage.remote.path import RemotePath


@dataclass
class Files(FileTable):
    """The table of text files."""

    columns = (*FileTable.columns, "encoding_of", "quoted_of", "delimiter_of")

    header: tuple[str, ...] | None = None  # of tables that have none
    encodings: list[str] = field(default_factory=list)
    encoding_of: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    # Whether the cells of a table are quoted.
    quoted_of: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    # The character between the cells of a table; 0: that of its form.
    delimiter_of: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    # Decompressed bytes per compressed byte, by compression.
    ratios: dict[str, float] = field(default_factory=dict)

    def name(self, index: int) -> Name:
        name = parse_name(self.names[index])
        assert name is not None  # other files are not listed
        return name

    def stem(self, index: int) -> str:
        """Return the path without its suffixes, including that of the compression."""
        suffixes = len(self.names[index]) - len(self.name(index).stem)
        return self.relative(index)[:-suffixes]

    def open(
        self, root: FilePath, index: int, errors: str = "strict", field: str | None = None
    ) -> TextFile:
        """Return a file below `root`; as a table, it must have a column `field`, if given."""
        name, size = self.name(index), int(self.sizes[index])
        path = below(root, self.relative(index))
        if isinstance(path, RemotePath):
            path.store.expect(path.key, Info(size))
        return TextFile(
            path=path,
            size=size,
            form=name.form,
            compression=name.compression,
            encoding=self.encodings[self.encoding_of[index]],
            errors=errors,
            field=field,
            version=int(self.times[index]),
            quoted=bool(self.quoted_of[index]),
            delimiter=chr(self.delimiter_of[index]).strip("\0"),
            header=self.header,
        )

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the sizes after decompression, estimated from the ratios."""
        ratio = [self.ratios.get(name.rpartition(".")[2].lower(), 1.0) for name in self.names]
        return (np.maximum(self.sizes, 0) * np.array(ratio, np.float64)).astype(np.int64)

    def fingerprint(self, fields: list[str], classes: tuple[str, ...] | None) -> dict[str, str]:
        """Return hashes that identify the files and the fields that are read from them."""
        digest = xxhash.xxh3_128()
        for texts in (fields, self.folders):
            digest.update("\0".join(texts).encode("utf-8", "surrogateescape") + b"\0\0")
        self.hash_names(digest)
        for numbers in (self.folder_of, self.sizes):
            digest.update(np.ascontiguousarray(numbers).data)
        if classes is not None or self.labels:
            digest.update(json.dumps([classes, self.labels]).encode())
        if self.metadata is not None:
            digest.update(self.metadata.fingerprint())
        times = xxhash.xxh3_128(np.ascontiguousarray(self.times).data)
        return {"files": digest.hexdigest(), "times": times.hexdigest()}


class TextFiles(FileSource[Files]):
    """Text files under `root`, each of which is a document."""

    reads_text = True
    unique_keys = True

    def __init__(self, root: FilePath, files: Files, errors: str) -> None:
        super().__init__(root, files)
        self._errors = errors
        self.schema = Schema({LINE_FIELD: Text()})

    def add_labels(self, classes: tuple[str, ...] | None) -> None:
        """Add the labels from folders, with these class names, and the columns of metadata."""
        fields: dict[str, FieldType] = {**self.schema}
        files = self.files
        if files.labels and classes is not None:
            fields[LABEL] = Int()
            self.class_names = {LABEL: classes}
        if files.metadata is not None:
            add_columns(fields, files.metadata)
            self.class_names = {**self.class_names, **files.metadata.class_names}
            self.others = files.metadata.unusable
        self.schema = Schema(fields)

    def __getitem__(self, index: int) -> Sample:
        files, key = self.files, self.key(index)
        sample: Sample = {"__key__": key}
        try:
            if LINE_FIELD in self.schema:
                file = files.open(self.root, index, self._errors)
                sample[LINE_FIELD] = file.text(files.planned(index))
        except SampleError as error:
            raise error.located(key=key) from error.__cause__
        if files.labels and LABEL in self.schema:
            sample[LABEL] = files.labels[files.folder_of[index]]
        if files.metadata is not None:
            row = files.metadata.row(index)
            sample.update({n: v for n, v in row.items() if n in self.schema})
        return sample

    def sizes(self) -> npt.NDArray[np.int64]:
        return self.files.lengths()

    def select(self, indices: Indices) -> TextFiles:
        part = TextFiles(self.root, self.files.select(indices), self._errors)
        part.schema, part.class_names = self.schema, dict(self.class_names)
        return part

    def fingerprint(self) -> dict[str, str]:
        return self.files.fingerprint([LINE_FIELD], self.classes)


class Ranges(NamedTuple):
    """Byte ranges of files: the index of the file, and the bytes between which a record begins."""

    file: npt.NDArray[np.uint32]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]  # an estimate for a compressed file, which is never split

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges, merging adjacent ones."""
        behind = (self.file[1:] == self.file[:-1]) & (self.start[1:] == self.end[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~behind])[: len(self.file)])
        last = np.concatenate([first[1:], [len(self.file)]])[: len(first)] - 1
        found = (self.file[first], self.start[first], self.end[last])
        yield from zip(*(numbers.tolist() for numbers in found), strict=True)


class TextStream(Stream):
    """Files under `root` whose lines or rows are documents: JSON Lines, CSV, or text.

    Blank lines are skipped; their bytes count towards the next document.
    """

    reads_text = True
    unique_keys = True

    def __init__(
        self, root: FilePath, files: Files, ranges: Ranges, fields: Fields, errors: str
    ) -> None:
        super().__init__()
        self._root = root
        self._files = files
        self._ranges = ranges
        self._fields = fields
        self._errors = errors
        self.schema = fields.schema
        self.class_names = {} if fields.label is None else fields.label.class_names

    def add_labels(self, classes: tuple[str, ...] | None) -> None:
        """Add the labels from folders, with these class names."""
        if self._files.labels and classes is not None:
            if LABEL in self.schema:
                raise UsageError(
                    "the documents have a field 'label', and their folders are classes, too",
                    fix="remove --classes, or take the field: --label-column label",
                )
            self.schema = Schema({**self.schema, LABEL: Int()})
            self.class_names = {LABEL: classes}

    def __len__(self) -> int:
        return len(self._ranges.file)

    def sizes(self) -> npt.NDArray[np.int64]:
        return self._ranges.end - self._ranges.start

    def select(self, ranges: Indices) -> TextStream:
        used, file = np.unique(self._ranges.file[ranges], return_inverse=True)
        start, end = self._ranges.start[ranges], self._ranges.end[ranges]
        return self._of(
            Ranges(file.astype(np.uint32), start, end), self._files.select(used.astype(np.int64))
        )

    def _of(self, ranges: Ranges, files: Files | None = None) -> TextStream:
        stream = TextStream(self._root, files or self._files, ranges, self._fields, self._errors)
        stream.schema, stream.class_names = self.schema, dict(self.class_names)
        stream.narrow(self.selection)
        return stream

    def name(self, index: int) -> str:
        """Return the name of the first sample of a range."""
        file, start = int(self._ranges.file[index]), int(self._ranges.start[index])
        return f"{self._files.relative(file)}: byte {start}"

    def fingerprint(self) -> dict[str, str]:
        return self._files.fingerprint(list(self._fields.schema), self.classes)

    def documents(self) -> Iterator[Document]:
        for file, start, end in self._ranges.runs():
            yield from self._range(file, start, end)

    def _range(self, file: int, start: int, end: int) -> Iterator[Document]:
        relative, name = self._files.relative(file), self._files.name(file)
        text = self._files.open(self._root, file, self._errors, self._fields.text)
        cells = name.form in TABLES
        fields, labels = self._fields, self._files.labels
        named = values_of(self._files.folder(file), fields.folders)
        label = labels[self._files.folder_of[file]] if labels else None
        done = start  # where the last document ended
        try:
            for at, after, value in text.records(start, None if name.compression else end):
                sample: Sample | SampleError
                ignored: Sequence[str] = ()
                if done == start > 0:
                    done = at  # skip the end of the previous range's last line
                try:
                    if isinstance(value, SampleError):
                        raise value
                    taken, ignored = fields.take({**value, **named}, cells=cells)
                    if label is not None:
                        taken[LABEL] = label
                    sample = self.selected({"__key__": f"{relative}/{at}", **taken})
                except SampleError as error:
                    if cells:
                        error = cast(SampleError, error.located(line=text.line_of(at)))
                    sample = located(error, text.path, at, f"{relative}/{at}")
                size = after - done
                if not name.compression:  # the last line may lack a line end
                    size = min(size, text.size - done)
                yield Document(f"{relative}: byte {at}", sample, size, ignored)
                done = after
            check_unchanged(text.path, self._files.planned(file))
        except SampleError as error:  # the rest of this file cannot be read
            offset = error.where.get("offset", done)
            yield Document(f"{relative}: byte {offset}", located(error, text.path, offset), 0)

    def by_number(self) -> TextRows | None:
        files = range(len(self._files))
        if self._fields.text is not None or any(self._files.name(n).compression for n in files):
            return None
        file, start, end = Growing(np.uint32), Growing(np.int64), Growing(np.int64)
        for number in files:
            opened = self._files.open(self._root, number, self._errors)
            if self._files.name(number).form == "json" and opened.is_array():
                return None
            records = opened.records()
            while some := list(itertools.islice(records, FEW)):
                file.extend(np.full(len(some), number, np.uint32))
                # From the beginning, as there is no line end before the first record.
                start.extend(np.array([r.start if r.start > MARK_SIZE else 0 for r in some]))
                end.extend(np.array([r.end for r in some]))
        found = TextRows(self._of(Ranges(file.array(), start.array(), end.array())))
        found.describe_as(self)
        return found


class TextRows(Source):
    """The rows of tables by number, each of which is a range of a stream."""

    reads_text = True
    unique_keys = True

    def __init__(self, stream: TextStream) -> None:
        super().__init__()
        self.schema, self.class_names = stream.schema, stream.class_names
        self._stream = stream

    def narrow(self, selection: Selection) -> None:
        self._stream = copy.copy(self._stream)
        self._stream.narrow(selection)
        super().narrow(selection)

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, index: int) -> Sample:
        (document,) = self.select(np.array([index])).documents()
        if isinstance(document.sample, SampleError):
            raise document.sample
        return document.sample

    def sizes(self) -> npt.NDArray[np.int64]:
        return self._stream.sizes()

    def select(self, indices: Indices) -> TextRows:
        return TextRows(self._stream.select(indices))

    def documents(self) -> Iterator[Document]:
        return self._stream.documents()

    def name(self, index: int) -> str:
        return self._stream.name(index)

    def fingerprint(self) -> dict[str, str]:
        return self._stream.fingerprint()


def located(error: SampleError, path: FilePath, offset: int, key: str | None = None) -> SampleError:
    """Return the error with path, offset and key, unless it has its own."""
    return cast(SampleError, error.located(path=path, offset=offset, key=key))
