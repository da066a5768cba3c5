# ruff: noqa: E402 - the import of pandas is blocked before the other imports
"""The process that runs pylance and serves the calls of `process.ask`.

python -m shardkit.formats.lance.server
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final


class _NoPandas:
    """Keeps pyarrow from importing pandas, which takes half of the startup time, unneeded."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, _NoPandas)
import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader, LanceFileWriter
from lance.fragment import DataFile, FragmentMetadata

from shardkit.formats.lance.process import MEMORY, SMALL, About, FileRows, Page, bound
from shardkit.helpers.names import is_safe
from shardkit.helpers.pickled_process import read_message, serve

_VERSION: Final = "2.2"  # of the file format: the default of pylance 14
_OPEN = 64  # files and datasets that are open at once
_LATEST = 2**63  # manifests with numbers from here on are numbered downwards
_LOOKED_AT, _LOOKED_AT_BYTES = 16, 32 << 20  # rows and bytes read to estimate the sizes of values
_BLOB = (b"lance-encoding:blob", b"true")
_COMMIT_SECONDS = 10  # seconds to finish the manifest of a dataset for a caller that is dead
_EXTERNAL = 3  # the kind of a blob that is stored outside of the dataset


def _allow(memory: int) -> None:
    """Limit the memory of this process, in bytes; an existing limit is only ever raised."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows, or a lower hard limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft == resource.RLIM_INFINITY or soft < memory:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))


class _File:
    """A data file, opened for each column: it may be renamed or removed in the meantime."""

    def __init__(self, path: str, version: tuple[int, int, int]) -> None:
        """`version`: its inode, size and time when the caller opened it."""
        reader = LanceFileReader(path)
        about = reader.metadata()
        columns, rows = about.schema, reader.num_rows()
        self._readers = {name: LanceFileReader(path, columns=[name]) for name in columns.names}
        self._lock = threading.Lock()  # a reader cannot be used by two threads at once
        now = os.stat(path)
        if (now.st_size, now.st_mtime_ns) != version[1:]:
            from shardkit.storage.byte_source import changed  # takes a while

            raise changed(Path(path), version[1:], now)
        pages = {}
        # Only if each column of the schema is one column of the file, in the same order.
        if len(about.columns) == len(columns):
            found = zip(columns, about.columns, strict=True)
            pages = {field.name: _pages(path, field, column.pages) for field, column in found}
        whole = {n: p for n, p in pages.items() if p and sum(page.rows for page in p) == rows}
        self.about = About(columns, rows, _average(self, columns, rows), whole)

    def rows(self, names: Sequence[str], rows: range) -> pa.Table:
        size = len(rows)
        with self._lock:
            readers = [self._readers[name] for name in names]
            found = [reader.read_range(rows.start, size, batch_size=size) for reader in readers]
            return pa.table([f.to_table().column(0) for f in found], [*names])


class _Dataset:
    """A version of a dataset, given by the path of its manifest."""

    def __init__(self, path: str) -> None:
        number, folder = int(Path(path).stem), Path(path).parent.parent
        version = number if number < _LATEST else 2**64 - 1 - number
        self._dataset: Any = lance.dataset(str(folder), version=version)
        fragments = self._dataset.get_fragments()
        for file in (file for fragment in fragments for file in fragment.data_files()):
            if file.base_id is not None or not is_safe(str(file.path)):
                raise ValueError(f"a data file is outside of the dataset: {file.path!s}")
        parts = tuple(_parts(fragments, folder / "data"))
        columns = self._dataset.schema
        self._blobs = {field.name for field in columns if _is_blob(field)}
        for name in self._blobs:
            blobs = pa.field(name, pa.large_binary())
            columns = columns.set(columns.get_field_index(name), blobs)
        rows = self._dataset.count_rows()
        deleted = sum(one.physical_rows for one in fragments) - rows
        self.about = About(columns, rows, _average(self, columns, rows), {}, deleted, parts)

    def rows(self, names: Sequence[str], rows: range) -> pa.Table:
        numbers = [*rows]
        found = self._dataset.take(numbers, columns=[*names])
        for name in self._blobs.intersection(names):
            if any((one or {}).get("kind") == _EXTERNAL for one in found[name].to_pylist()):
                raise ValueError("the value is a URI of data outside of the dataset")
            values = [value for _, value in self._dataset.read_blobs(name, indices=numbers)]
            position = found.schema.get_field_index(name)
            found = found.set_column(position, name, pa.array(values, pa.large_binary()))
        return found


class _Server:
    """Serves the calls of `process.ask`."""

    def __init__(self) -> None:
        self._opened: OrderedDict[Any, _File | _Dataset] = OrderedDict()
        self._lock = threading.Lock()
        self._writers: dict[str, Any] = {}
        self._committing = threading.Lock()  # held while there is a temporary folder

    def about(self, which: tuple[str, tuple[int, int, int]]) -> About:
        """`which` has the path, and the inode, size and time of the file to detect changes."""
        return self._open(which).about

    def rows(
        self, which: tuple[str, tuple[int, int, int]], names: list[str], first: int, stop: int
    ) -> pa.Table:
        return self._open(which).rows(names, range(first, stop)).combine_chunks()

    def _open(self, which: tuple[str, tuple[int, int, int]]) -> _File | _Dataset:
        path, version = which
        with self._lock:
            found = self._opened.get(which)
            if found is None:
                _allow(bound(Path(path)))
                found = _Dataset(path) if path.endswith(".manifest") else _File(path, version)
                self._opened[which] = found
                if len(self._opened) > _OPEN:
                    self._opened.popitem(last=False)
            self._opened.move_to_end(which)
            return found

    def create(self, path: str, schema: pa.Schema) -> None:
        _allow(MEMORY)
        self._writers[path] = LanceFileWriter(path, schema, version=_VERSION)

    def write(self, path: str, batch: pa.RecordBatch) -> None:
        writer = self._writers.pop(path)  # not put back if this fails
        writer.write_batch(batch)
        self._writers[path] = writer

    def finish(self, path: str) -> None:
        self._writers.pop(path).close()

    def abandon(self, path: str) -> None:
        self._writers.pop(path, None)

    def commit(
        self, folder: str, schema: pa.Schema, shards: list[tuple[str, int, int]]
    ) -> tuple[str, bytes]:
        """The file name and bytes of a manifest for data files with these names, rows and sizes.

        `folder` is for temporary files: the default one may have changed since this process began.
        """
        with (
            self._committing,
            tempfile.TemporaryDirectory(prefix="shardkit-", dir=folder) as temporary,
        ):
            # A file with the same schema shows which of its columns stores which field.
            row = pa.table([pa.nulls(1, stored) for stored in schema.types], schema=schema)
            one = lance.write_dataset(row, f"{temporary}/one", data_storage_version=_VERSION)
            (like,) = one.get_fragments()[0].data_files()
            version = like.file_major_version, like.file_minor_version
            fragments: list[FragmentMetadata] = []
            for name, rows, size in shards:
                file = DataFile(name, like.fields, like.column_indices, *version, size)
                fragments.append(FragmentMetadata(len(fragments), [file], rows))
            overwrite = lance.LanceOperation.Overwrite(schema, fragments)
            lance.LanceDataset.commit(f"{temporary}/made", overwrite)
            (path,) = Path(temporary, "made", "_versions").glob("*.manifest")
            return path.name, path.read_bytes()

    def end(self) -> None:
        """Wait until there is no temporary folder, which nobody else would remove."""
        self._committing.acquire(timeout=_COMMIT_SECONDS)


def _parts(fragments: Sequence[Any], folder: Path) -> Iterator[FileRows]:
    """Yield the data files of fragments; `folder` has them."""
    stop = 0
    for fragment in fragments:
        first, stop = stop, stop + fragment.count_rows()
        for file in fragment.data_files():
            found = os.stat(folder / file.path)
            yield FileRows(first, stop, str(folder / file.path), (found.st_size, found.st_mtime_ns))


def _is_blob(field: pa.Field) -> bool:
    key, value = _BLOB
    new = getattr(field.type, "extension_name", "") == "lance.blob.v2"
    return new or (field.metadata or {}).get(key) == value


def _average(of: _File | _Dataset, columns: pa.Schema, rows: int) -> dict[str, float]:
    """Approximate bytes of a value, by column: from its type, or from a few rows."""
    found: dict[str, float] = {}
    for field in columns:
        try:
            found[field.name] = field.type.bit_width / 8
        except ValueError:
            sizes: list[int] = []
            for row in range(0, rows, -(-rows // _LOOKED_AT) or 1):
                if sum(sizes) < _LOOKED_AT_BYTES:
                    sizes.append(of.rows([field.name], range(row, row + 1)).nbytes)
            found[field.name] = sum(sizes) / max(len(sizes), 1)
    return found


def _pages(path: str, field: pa.Field, pages: Sequence[Any]) -> list[Page]:
    """Return the pages of a column whose values are stored uncompressed, one after the other.

    Empty if a page is stored in another way. pylance gives the positions of a page's buffers, but
    not their layout, so it is deduced from what is in them.
    """
    if (field.metadata or {}).get(b"lance-encoding:compression") != b"none":
        return []
    made: list[Page] = []
    with open(path, "rb") as file:
        for page in pages:
            buffers = [(buffer.position, buffer.size) for buffer in page.buffers]
            first = made[-1].first + made[-1].rows if made else 0
            if pa.types.is_fixed_size_list(field.type):
                found = _lists(first, field.type, buffers)
            else:
                found = _values(first, file, buffers)
            if found is None:
                return []
            made.append(found)
    return made


def _lists(first: int, type: pa.DataType, buffers: list[tuple[int, int]]) -> Page | None:
    if len(buffers) != 1 or not pa.types.is_primitive(type.value_type):
        return None
    width, odd = divmod(type.list_size * type.value_type.bit_width, 8)
    if not width or odd or buffers[0][1] % width:
        return None
    start, size = buffers[0]
    return Page(first, size // width, start, 0, width, 0, False)


def _values(first: int, file: BinaryIO, buffers: list[tuple[int, int]]) -> Page | None:
    """Return a page of values, each preceded by its size, and of their ends."""
    if len(buffers) != 2:
        return None
    (start, length), (at, size) = buffers
    file.seek(at)
    table = file.read(size)
    for width in (1, 2, 4, 8):
        ends = np.frombuffer(table[: size // width * width], f"<u{width}").astype(np.int64)
        if size % width or len(ends) < 2 or ends[0] or ends[-1] != length:
            continue
        sizes = np.diff(ends)
        row = int(np.argmax(sizes > 1))  # a null takes one byte
        file.seek(start + int(ends[row]))
        head = file.read(9)
        for before, nulls in ((8, False), (4, False), (9, True), (5, True)):
            known = int.from_bytes(head[nulls:before], "little") + before == sizes[row]
            if known and (sizes >= (1 if nulls else before)).all():
                return Page(first, len(sizes), start, at, width, before, nulls)
    return None


class _Plain:
    """The server's methods, with pylance's errors converted: OSError if the system raised it."""

    def __init__(self, server: _Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._server, name)

        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except OSError as error:
                if error.errno:  # Python's own
                    raise
                if number := re.search(r"\(os error (\d+)\)", str(error)):
                    raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
                raise ValueError(str(error)) from error  # pylance, for anything it cannot read

        return call


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    # Without this, repeated images would be stored in dictionaries, which only pylance can read.
    os.environ["LANCE_ENCODING_DICT_DIVISOR"] = str(10**9)
    _allow(SMALL)
    read_message(sys.stdin.buffer)
    server = _Server()
    serve(sys.stdin.buffer, sys.stdout.buffer, _Plain(server), 8, server.end)
