"""All access to file systems goes through this module: create, sync, rename, remove, read.

URLs are `RemotePath`s, which are read in the same way; changes of objects in stores are here too.
Callers write `storage.rename(...)` and import no functions from here, so that tests can replace
them with functions that record calls or crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

from shardkit.errors import DamagedError, ShardkitError, UsageError
from shardkit.helpers import os_errors
from shardkit.storage.checksums import DIGEST, PIECE, Hasher, checksum_of
from shardkit.storage.pointers import refuse_pointer
from shardkit.storage.remote.client import Tag
from shardkit.storage.remote.path import RemotePath, parsed, remote_path

Chunk: TypeAlias = bytes | memoryview  # memoryviews of bytes, so that len() counts those

# The functions that change a file system: the crash tests interrupt before and after each call.
CHANGES = ("make_folder", "create", "write", "rewrite", "sync", "rename", "remove")
# The functions that change a store.
STORE_CHANGES = ("put", "put_if", "copy", "delete")

_REMOVALS = 10  # attempts to remove a folder that another process still writes to
_PAUSE = 0.05  # seconds between attempts
_BLOCK = 1 << 20  # bytes per read while hashing and copying
_DOWNLOAD = 8 << 20  # bytes per request while downloading an object
_MAX_CHUNKS = 1024  # maximum per system call (IOV_MAX)
_BUFFER = 1 << 18  # bytes collected before a write: few enough to still be in the CPU cache
_WRITE_BACK = 8 << 20  # bytes after which write-back is started


_WRITABLE = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
_options: ContextVar[Mapping[str, Any] | None] = ContextVar("storage_options", default=None)


@contextlib.contextmanager
def using(options: Mapping[str, Any] | None, *paths: object) -> Iterator[None]:
    """A context in which URLs are opened with these storage options.

    Raises UsageError for options that are not a mapping of names, and if there is no URL among
    `paths`, all paths (or lists of paths) that were given together with the options.
    """
    if options is not None and not (
        isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    ):
        raise UsageError(  # must not show the values, which may be secret
            "storage options must be a dict of names and values", found=type(options).__name__
        )
    every = (one for path in paths for one in (path if isinstance(path, list | tuple) else [path]))
    urls = (one for one in every if isinstance(one, str | os.PathLike) and parsed(one) is not None)
    if options and paths and next(urls, None) is None:
        raise UsageError(
            "storage options are for URLs, and none is given",
            found=", ".join(sorted(options)),
            fix="leave them out, or give a URL",
        )
    token = _options.set(options or _options.get())
    try:
        yield
    finally:
        _options.reset(token)


def source(path: str | os.PathLike[str]) -> Path:
    """Parse a user's path of data to read: a local path, or a URL as a RemotePath.

    Raises UsageError for a URL that cannot be opened.
    """
    if isinstance(path, RemotePath):
        return path
    found = _scheme_and_rest(path)
    return Path(path) if found is None else remote_path(*found, _options.get())


def _scheme_and_rest(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Like `parsed`, but None also for a local file whose name looks like a URL."""
    found = parsed(path)
    if found is None or (not isinstance(path, RemotePath) and os.path.lexists(path)):
        return None
    if found[0] == "file":
        raise UsageError(
            "a path on this machine must be given without a scheme",
            found=f"file:///{found[1]}",
            fix=f"give /{found[1]}",
        )
    return found


def absolute(path: Path) -> Path:
    """Return the absolute path; a URL is returned unchanged."""
    return path if isinstance(path, RemotePath) else Path(os.path.abspath(path))


def output(path: str | os.PathLike[str]) -> Path:
    """Parse a user's output path: a local path, or a URL in a bucket.

    A symbolic link is resolved, so that the link itself is not replaced. Raises UsageError for
    other kinds of URLs, and for a whole bucket.
    """
    found = _scheme_and_rest(path)
    if found is None:
        linked = os.path.islink(path) and os.path.exists(path)
        return Path(os.path.realpath(path)) if linked else Path(path)
    scheme, rest = found
    if scheme not in _WRITABLE:
        raise UsageError(
            "cannot write to this kind of URL",
            found=f"{scheme}://",
            expected="s3://, gs://, az://, or a path on this machine",
            fix="write to a path on this machine, then copy the result to the URL",
        )
    url = path if isinstance(path, RemotePath) else remote_path(scheme, rest, _options.get())
    if not url.key:
        raise UsageError(
            "the output is a whole bucket", found=str(url), fix=f"give a folder in it: {url}/NAME"
        )
    return url


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file for reading: `open(path, "rb", opener=storage.regular)`.

    All data files are opened with this. Other kinds of files raise OSError: for example, a pipe
    without a writer would block forever.
    """
    return regular_with_status(path, flags)[0]


def regular_with_status(path: str | os.PathLike[str], flags: int) -> tuple[int, os.stat_result]:
    """Like `regular`, also with what `os.fstat` returns."""
    try:
        handle = os.open(path, flags | _NO_WAITING)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError("it is a socket or a device, not a regular file") from error
        raise
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode):
        return handle, status
    os.close(handle)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = "pipe" if stat.S_ISFIFO(status.st_mode) else "device"
    raise OSError(f"it is a {kind}, not a regular file")


_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless it exists."""
    with os_errors.explained("make the folder", path):
        path.mkdir(parents=True, exist_ok=True)


class NewFile:
    """A file that is written sequentially, unbuffered; its pieces are hashed while written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "x+b", buffering=0)  # noqa: SIM115 - closed by close()
        except FileExistsError:  # left by an earlier run, or a link, which must not be followed
            path.unlink()
            self._file = open(path, "x+b", buffering=0)  # noqa: SIM115
        self._hasher = Hasher()
        self._size = 0
        self._started = 0  # bytes for which write-back was started
        self._rewritten: set[int] = set()  # numbers of the pieces that were changed later
        _written.pop(path, None)

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks, in as few system calls as possible."""
        for first in range(0, len(chunks), _MAX_CHUNKS):
            self._write(chunks[first : first + _MAX_CHUNKS])

    def _write(self, chunks: Sequence[Chunk]) -> None:
        handle, expected = self._file.fileno(), sum(map(len, chunks))
        for chunk in chunks:
            self._hasher.update(chunk)
        self._size += expected
        written = os.writev(handle, chunks)
        if written < expected:  # a signal, or a nearly full disk
            rest = memoryview(b"".join(chunks))[written:]
            while rest:
                rest = rest[self._file.write(rest) :]
        fresh = self._size - self._started
        if fresh >= _WRITE_BACK:
            if _sync_file_range is not None and write_back:
                _sync_file_range(handle, self._started, fresh, _BEGIN)  # a hint: it may fail
            self._started = self._size

    def rewrite(self, offset: int, data: bytes) -> None:
        """Replace bytes that were already written; `close` reads and hashes their pieces again."""
        self._rewritten.update(range(offset // PIECE, (offset + len(data) - 1) // PIECE + 1))
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def close(self) -> None:
        if not self._file.closed:
            try:
                _written[self.path] = (self._size, self._digests())
            finally:
                self._file.close()

    def _digests(self) -> bytes:
        digests = bytearray(self._hasher.digests())
        for number in self._rewritten:
            hasher = Hasher()
            with os_errors.explained("read", self.path):
                hasher.update(os.pread(self._file.fileno(), PIECE, number * PIECE))
            digests[DIGEST * number : DIGEST * (number + 1)] = hasher.digests()
        return bytes(digests)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _of_linux(name: str) -> Any:
    """Return a function of Linux's C library; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


# Starts write-back early, so that syncing a complete shard takes little time. Without it,
# everything works, but more slowly.
_sync_file_range = _of_linux("sync_file_range")
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
# Syncs a whole file system, instead of millions of files one by one.
_syncfs = _of_linux("syncfs")
# Whether write-back is started early: files that will be removed soon do not need it.
write_back = True
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE: start, do not wait


# Sizes, and digests of pieces, of files that this process has just written, so that `digests` need
# not read them.
_written: dict[Path, tuple[int, bytes]] = {}


def create(path: Path) -> NewFile:
    """Create a new file, open for writing. An existing file is replaced."""
    with os_errors.explained("create", path):
        return NewFile(path)


def write(file: NewFile, chunks: Sequence[Chunk]) -> None:
    """Append all chunks to a file made by `create`."""
    with os_errors.explained("write", file.path):
        file.write(chunks)


class BufferedFile:
    """A new file with a buffer that collects chunks until there are enough for a write."""

    def __init__(self, path: Path) -> None:
        self.file = create(path)
        self.size = 0  # in bytes, including the buffer
        self._flushed = 0
        self._chunks: list[Chunk] = []

    def write(self, *chunks: Chunk) -> None:
        """Append chunks. Their memory must not change until `flush`."""
        self._chunks += chunks
        self.size += sum(map(len, chunks))
        if self.size - self._flushed >= _BUFFER:
            self.flush()

    def flush(self) -> None:
        chunks, self._chunks, self._flushed = self._chunks, [], self.size
        write(self.file, chunks)

    def __enter__(self) -> BufferedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self.file:
            if kind is None:
                self.flush()


def append(file: NewFile, source: Path, size: int, start: int = 0) -> int:
    """Append `size` bytes of another file, from offset `start` on; returns `size`."""
    left = size
    with (
        os_errors.explained("read", source),
        open(source, "rb", buffering=0, opener=regular) as part,
    ):
        part.seek(start)
        while left:
            block = part.read(min(left, _BLOCK))
            if not block:
                raise DamagedError(
                    "a file is truncated",
                    path=source,
                    offset=start + size - left,
                    expected=f"{left:,} bytes more",
                )
            write(file, [block])
            left -= len(block)
    return size


def rewrite(file: NewFile, offset: int, data: bytes) -> None:
    """Replace bytes of a file made by `create`: a header that is known only at the end."""
    with os_errors.explained("write", file.path):
        file.rewrite(offset, data)


def replace_file(path: Path, data: bytes) -> None:
    """Create or replace a file atomically, by renaming a temporary file."""
    part = path.with_name(f".{path.name[:100]}.{os.getpid()}.partial")
    try:
        write_file(part, data)
        rename(part, path)
    finally:
        remove(part)
    sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write and sync a small file."""
    with create(path) as file:
        write(file, [data])
    sync(path)


def sync(path: Path) -> None:
    """Sync a file's contents, or a folder's entries (creations, renames), to the disk."""
    with os_errors.explained("sync", path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """A temporary folder whose name begins with `prefix`; it is removed at the end."""
    folder = os_errors.temporary_folder()
    with os_errors.explained("make a temporary folder", folder / prefix):
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=folder)
    with made as path:
        yield Path(path)


def status(path: Path) -> os.stat_result:
    """Return the `os.stat` of a file or object of a source."""
    with os_errors.explained("read the source", path):
        return path.stat()


def write_loose(path: Path, data: bytes) -> None:
    """Write one of very many small files, without syncing it or remembering its digests."""
    with create(path) as file:
        write(file, [data])
    _written.pop(path, None)


def sync_all(folder: Path) -> None:
    """Sync all files and folders below a folder to the disk."""
    with os_errors.explained("sync", folder):
        if _syncfs is None:  # os.sync may return before the files are on the disk
            for at, _, files in os.walk(folder):
                for name in ("", *files):
                    sync(Path(at, name))
            return
        handle = os.open(folder, os.O_RDONLY)
        try:
            if _syncfs(handle):
                raise OSError(ctypes.get_errno(), "")
        finally:
            os.close(handle)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder atomically."""
    with os_errors.explained("rename", old):
        os.rename(old, new)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if it exists."""
    with os_errors.explained("remove", path):
        for left in reversed(range(_REMOVALS)):
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                return
            except OSError as error:
                # A child of a killed process may still be writing to the folder for a moment.
                if error.errno != errno.ENOTEMPTY or not left:
                    raise
            time.sleep(_PAUSE)


def read(path: Path, most: int = -2) -> bytes:
    """Read a whole file, or the first `most + 1` bytes if it has more than `most`."""
    if isinstance(path, RemotePath):
        store, key = path.store, path.key
        if most < 0:
            data = store.read_all(key)
        else:
            size = min(store.info(key).size, most + 1)
            data = store.read(key, 0, size) if size else b""
    else:
        with os_errors.explained("read", path), open(path, "rb", opener=regular) as file:
            if most >= 0:  # Python would allocate the full requested size
                most = min(most, os.fstat(file.fileno()).st_size)
            try:
                data = file.read(most + 1)
            except MemoryError as error:
                size = os.fstat(file.fileno()).st_size
                raise MemoryError(f"{path} has {size:,} bytes") from error
    refuse_pointer(data, path, DamagedError)
    return data


def read_whole(path: str, size: int | None = None) -> tuple[bytes, os.stat_result]:
    """Read a whole file, and return its bytes and its `os.stat` after reading.

    If its expected `size` is given, reads it in one call, and at most one byte more. OSErrors are
    left to the caller, as this is the inner loop of a conversion.
    """
    if size is None:
        with open(path, "rb", buffering=0, opener=regular) as file:
            return file.read(), os.fstat(file.fileno())
    handle = regular(path, os.O_RDONLY)
    try:
        data = os.read(handle, size + 1)
        while 0 < len(data) < size:  # a signal, or more than one call can read
            more = os.read(handle, size + 1 - len(data))
            if not more:
                break
            data += more
        return data, os.fstat(handle)
    finally:
        os.close(handle)


def put(data: bytes | Path, to: RemotePath) -> None:
    """Upload bytes or a file as an object. It appears complete, or not at all."""
    to.store.put(to.key, data)


def put_if(data: bytes, to: RemotePath, tag: Tag | None) -> Tag | None:
    """Like `put`, but only if the object has this tag (None: does not exist). Returns its new tag.

    Returns None if the condition does not hold, or if a response was lost in a way that looks so.
    """
    return to.store.put_if(to.key, data, tag)


def copy(old: RemotePath, new: RemotePath, size: int) -> None:
    """Copy an object of this size within its store."""
    old.store.copy(old.key, new.key, size)


def delete(path: RemotePath) -> None:
    """Remove an object, if it exists."""
    path.store.delete(path.key)


def download(source: RemotePath, path: Path, size: int) -> None:
    """Download an object of this size to a file, without syncing it."""
    with create(path) as file:
        for start in range(0, size, _DOWNLOAD):
            stop = min(start + _DOWNLOAD, size)
            write(file, [source.store.read(source.key, start, stop)])


# Compressed data may expand by this factor, or to this many bytes. Anything that expands more is
# treated as a decompression bomb.
EXPANSION, FREE_EXPANSION = 1000, 1 << 28


def check_expansion(made: int, stored: int) -> None:
    """Raise ValueError if `stored` bytes expand to too many."""
    if made > max(EXPANSION * stored, FREE_EXPANSION):
        raise ValueError(
            f"{stored:,} bytes expand to {made:,} or more, over {EXPANSION:,} times as many:"
            " if this is intended, decompress the data with another program first"
        )


def digests(path: Path) -> bytes:
    """The digests of a file's pieces. Those remembered from writing are used, once, if valid."""
    size, known = _written.pop(path, (-1, b""))
    if size == path.stat().st_size:
        return known
    hasher = Hasher()
    view = memoryview(bytearray(_BLOCK))
    with os_errors.explained("read", path), open(path, "rb", buffering=0, opener=regular) as file:
        while length := file.readinto(view):
            hasher.update(view[:length])
    return hasher.digests()


def checksum(path: Path) -> str:
    """Return the checksum of a file, computed from its `digests`."""
    return checksum_of(digests(path))


def unreadable(error: Exception, path: Path, position: int | None = None) -> Exception:
    """Convert an error raised while reading a file to a ShardkitError with its location.

    Readers check what they read, but untrusted bytes can make parsers and libraries raise anything.
    MemoryError is returned unchanged, as it says nothing about the data. A shortage of file handles
    or memory is reported as such, whatever error a reader made of it.
    """
    if lack := os_errors.shortage(error):
        error = os_errors.explain(lack, "open", path)
        error.__cause__ = lack
    if isinstance(error, ShardkitError):
        return error.located(path=path, position=position)
    if isinstance(error, MemoryError | Warning):
        return error
    found: ShardkitError
    if isinstance(error, OSError):
        found = os_errors.explain(error, "read", path).located(position=position)
    else:
        found = DamagedError(
            "the data are damaged, in a way that shardkit has no specific message for",
            path=path,
            position=position,
            found=f"{type(error).__name__}: {error}",
            fix="copy or create the file again; `shardkit verify` shows what else is damaged",
        )
    found.__cause__ = error
    return found
