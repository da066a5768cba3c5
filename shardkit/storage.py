"""All access to file systems goes through here: create, sync, rename, remove, read.

URLs are `RemotePath`s, which are read alike; what changes objects in stores is here too. Callers
write `storage.rename(...)`, never a name imported from here, so that tests can replace the
functions by ones that record or crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

from shardkit.errors import DamagedError, NotFoundError, ShardkitError, StorageError, UsageError
from shardkit.pieces import DIGEST, PIECE, Hasher, checksum_of
from shardkit.remote.path import RemotePath, parsed, remote_path
from shardkit.remote.store import Tag

Chunk: TypeAlias = bytes | memoryview  # memoryviews of bytes, so that len() counts those

# The functions that change a disk: the crash tests interrupt before and after each.
CHANGES = ("make_folder", "create", "write", "rewrite", "sync", "rename", "remove")
# Those that change a store.
STORE_CHANGES = ("put", "put_if", "copy", "delete")

_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
_SHORTAGES = (*_TOO_MANY_OPEN, errno.ENOMEM)
_REMOVALS = 10  # of a folder that another process still writes to
_PAUSE = 0.05  # seconds between two
_BLOCK = 1 << 20  # bytes per read while hashing and copying
_DOWNLOAD = 8 << 20  # bytes of an object that are requested at once
_MAX_CHUNKS = 1024  # that one call takes (IOV_MAX)
_BUFFER = 1 << 18  # bytes gathered before a write: few enough to be in the processor's cache still
_WRITE_BACK = 8 << 20  # bytes after which write-back is started


_WRITABLE = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
_options: ContextVar[Mapping[str, Any] | None] = ContextVar("storage_options", default=None)


@contextlib.contextmanager
def using(options: Mapping[str, Any] | None, *paths: object) -> Iterator[None]:
    """URLs that are given inside of it are opened with these storage options.

    Raises UsageError for what is no mapping of names, and where `paths`, all that were given
    together with options (also in lists), have no URL among them.
    """
    if options is not None and not (
        isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    ):
        raise UsageError(  # without the values, which may be secret
            "storage options must be a dict of names and values", found=type(options).__name__
        )
    given = (one for path in paths for one in (path if isinstance(path, list | tuple) else [path]))
    if options and paths and not any(map(_is_url, given)):
        raise UsageError(
            "storage options are for URLs, and none is given",
            found=", ".join(sorted(options)),
            fix="leave them away, or give a URL",
        )
    token = _options.set(options or _options.get())
    try:
        yield
    finally:
        _options.reset(token)


def _is_url(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and parsed(path) is not None


def source(path: str | os.PathLike[str]) -> Path:
    """What a user names as data to read: a path of this machine, or a URL as a RemotePath.

    Raises UsageError for a URL that cannot be opened.
    """
    if isinstance(path, RemotePath):
        return path
    found = parsed(path)
    if found is None or os.path.lexists(path):
        return Path(path)
    scheme, rest = found
    if scheme == "file":
        raise _with_scheme(rest)
    return remote_path(scheme, rest, _options.get())


def absolute(path: Path) -> Path:
    """The path from the root; a URL is one already."""
    return path if isinstance(path, RemotePath) else Path(os.path.abspath(path))


def output(path: str | os.PathLike[str]) -> Path:
    """What a user names to write to: a path of this machine, or a URL in a bucket.

    One that is a link stands for what it leads to, so that it stays a link. Raises UsageError for
    a URL of another kind, and for a whole bucket.
    """
    found = parsed(path)
    if not isinstance(path, RemotePath) and (found is None or os.path.lexists(path)):
        linked = os.path.islink(path) and os.path.exists(path)
        return Path(os.path.realpath(path)) if linked else Path(path)
    assert found is not None
    scheme, rest = found
    if scheme == "file":
        raise _with_scheme(rest)
    if scheme not in _WRITABLE:
        raise UsageError(
            "nothing can be written to a URL of this kind",
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


def _with_scheme(path: str) -> UsageError:
    return UsageError(
        "a path on this machine is given without a scheme",
        found=f"file:///{path}",
        fix=f"give /{path}",
    )


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file to read: `open(path, "rb", opener=storage.regular)`.

    All data are opened by this. Other kinds of files raise OSError: a pipe without a writer, for
    one, would block for ever.
    """
    try:
        handle = os.open(path, flags | _NO_WAITING)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError("it is a socket or a device, not a regular file") from error
        raise
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(f"it is a {'pipe' if stat.S_ISFIFO(mode) else 'device'}, not a regular file")


_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def make_folder(path: Path) -> None:
    """Make a folder and its parents; one that exists is left as it is."""
    with explained("make the folder", path):
        path.mkdir(parents=True, exist_ok=True)


class NewFile:
    """A file being written from front to back, unbuffered; its pieces are hashed as they pass."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "x+b", buffering=0)  # noqa: SIM115 - closed by close()
        except FileExistsError:  # of an earlier run; or a link, which must not be written through
            path.unlink()
            self._file = open(path, "x+b", buffering=0)  # noqa: SIM115
        self._hasher = Hasher()
        self._size = 0
        self._started = 0  # bytes whose write-back was started
        self._rewritten: set[int] = set()  # numbers of pieces
        _written.pop(path, None)

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks, in as few system calls as possible."""
        for first in range(0, len(chunks), _MAX_CHUNKS):
            self._write(chunks[first : first + _MAX_CHUNKS])

    def _write(self, chunks: Sequence[Chunk]) -> None:
        expected = sum(map(len, chunks))
        self._hasher.update_all(chunks, expected)
        self._size += expected
        written = os.writev(self._file.fileno(), chunks)
        if written < expected:  # a signal, or a nearly full disk
            rest = memoryview(b"".join(chunks))[written:]
            while rest:
                rest = rest[self._file.write(rest) :]
        if self._size - self._started >= _WRITE_BACK:
            _start_write_back(self._file.fileno(), self._started, self._size - self._started)
            self._started = self._size

    def rewrite(self, offset: int, data: bytes) -> None:
        """Replace bytes that were written before; their pieces are read again by `close`."""
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
            with explained("read", self.path):
                hasher.update(os.pread(self._file.fileno(), PIECE, number * PIECE))
            digests[DIGEST * number : DIGEST * (number + 1)] = hasher.digests()
        return bytes(digests)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _write_back_hint() -> Callable[[int, int, int, int], int] | None:
    """Linux's sync_file_range, which starts write-back early, so that the sync at the end of a
    shard has little left to wait for. Without it everything works, more slowly."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _write_back_hint()
# Linux's way to sync a whole file system, instead of millions of files one by one.
_syncfs = None
if sys.platform.startswith("linux"):
    _syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
# Whether write-back is started early: files that will be removed soon do not need it.
write_back = True
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE: start, do not wait


def _start_write_back(handle: int, offset: int, size: int) -> None:
    if _sync_file_range is not None and write_back:
        _sync_file_range(handle, offset, size, _BEGIN)  # a hint: its failure does not matter


# Sizes, and digests of pieces, of files that this process has just written, so that `digests` need
# not read them.
_written: dict[Path, tuple[int, bytes]] = {}


def create(path: Path) -> NewFile:
    """A new, empty file, open for writing."""
    with explained("create", path):
        return NewFile(path)


def write(file: NewFile, chunks: Sequence[Chunk]) -> None:
    """Append all chunks to a file made by `create`."""
    with explained("write", file.path):
        file.write(chunks)


class BufferedFile:
    """A new file whose chunks are gathered until there are enough for a write."""

    def __init__(self, path: Path) -> None:
        self.file = create(path)
        self.size = 0  # in bytes, with those in the buffer
        self._flushed = 0
        self._chunks: list[Chunk] = []

    def write(self, *chunks: Chunk) -> None:
        """Append chunks, whose memory must not change until `flush`."""
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
    """Append `size` bytes of another file, from `start` on; returns `size`."""
    left = size
    with explained("read", source), open(source, "rb", buffering=0, opener=regular) as part:
        part.seek(start)
        while left:
            block = part.read(min(left, _BLOCK))
            if not block:
                raise DamagedError(
                    "a file ends too soon",
                    path=source,
                    offset=start + size - left,
                    expected=f"{left:,} bytes more",
                )
            write(file, [block])
            left -= len(block)
    return size


def rewrite(file: NewFile, offset: int, data: bytes) -> None:
    """Replace bytes of a file made by `create`: a header that is known only at the end."""
    with explained("write", file.path):
        file.rewrite(offset, data)


def replace_file(path: Path, data: bytes) -> None:
    """Create or replace a file by one rename: at no moment is a part of it there."""
    part = path.with_name(f".{path.name[:100]}.{os.getpid()}.partial")
    try:
        write_file(part, data)
        rename(part, path)
    finally:
        remove(part)
    sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """A whole small file, synced."""
    with create(path) as file:
        write(file, [data])
    sync(path)


def sync(path: Path) -> None:
    """Return once a file's bytes, or a folder's entries (creations, renames), are on the disk."""
    with explained("sync", path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_loose(path: Path, data: bytes) -> None:
    """One of very many files, not yet synced, of which nothing is remembered."""
    with create(path) as file:
        write(file, [data])
    _written.pop(path, None)


def sync_all(folder: Path) -> None:
    """Return once all files and folders below one are on the disk."""
    with explained("sync", folder):
        if _syncfs is None:
            for path in (
                Path(at, name) for at, _, files in os.walk(folder) for name in ("", *files)
            ):
                sync(path)
            return
        handle = os.open(folder, os.O_RDONLY)
        try:
            if _syncfs(handle):
                raise OSError(ctypes.get_errno(), "")
        finally:
            os.close(handle)


def rename(old: Path, new: Path) -> None:
    """Rename atomically: a path has either the old name or the new one."""
    with explained("rename", old):
        os.rename(old, new)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if it exists."""
    with explained("remove", path):
        for left in reversed(range(_REMOVALS)):
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                return
            except OSError as error:
                # What a process of a killed one still writes there, for a moment.
                if error.errno != errno.ENOTEMPTY or not left:
                    raise
            time.sleep(_PAUSE)


def read(path: Path, most: int = -2) -> bytes:
    """All bytes of a file; of one with more than `most`, so many and one."""
    if isinstance(path, RemotePath):
        return path.store.read_all(path.key) if most < 0 else _beginning(path, most + 1)
    with explained("read", path), open(path, "rb", opener=regular) as file:
        if most >= 0:  # Python allocates all that is asked for
            most = min(most, os.fstat(file.fileno()).st_size)
        return file.read(most + 1)


def _beginning(path: RemotePath, most: int) -> bytes:
    """The first bytes of an object: all that it has, up to so many."""
    size = min(path.store.info(path.key).size, most)
    return path.store.read(path.key, 0, size) if size else b""


def read_whole(path: str, size: int | None = None) -> tuple[bytes, os.stat_result]:
    """All bytes of a file, and what the file was after they were read.

    Where its `size` is known, they are read in one call, and at most one byte more. OSErrors are
    left to the caller, as this is the inner loop of a conversion.
    """
    if size is None:
        with open(path, "rb", buffering=0, opener=regular) as file:
            return file.read(), os.fstat(file.fileno())
    handle = regular(path, os.O_RDONLY)
    try:
        data = os.read(handle, size + 1)
        while 0 < len(data) < size:  # a signal, or more than the system reads at once
            more = os.read(handle, size + 1 - len(data))
            if not more:
                break
            data += more
        return data, os.fstat(handle)
    finally:
        os.close(handle)


def put(data: bytes | Path, to: RemotePath) -> None:
    """Make an object of bytes or of a file: it appears whole, or not at all."""
    to.store.put(to.key, data)


def put_if(data: bytes, to: RemotePath, tag: Tag | None) -> Tag | None:
    """As `put`, where the object has this tag, or for None where there is none; its new tag.

    None where that is not so, or as an answer was lost.
    """
    return to.store.put_if(to.key, data, tag)


def copy(old: RemotePath, new: RemotePath, size: int) -> None:
    """Copy an object of so many bytes within its store."""
    old.store.copy(old.key, new.key, size)


def delete(path: RemotePath) -> None:
    """Remove an object, if it exists."""
    path.store.delete(path.key)


def download(source: RemotePath, path: Path, size: int) -> None:
    """Make a file, unsynced, of an object of so many bytes."""
    with create(path) as file:
        for start in range(0, size, _DOWNLOAD):
            stop = min(start + _DOWNLOAD, size)
            write(file, [source.store.read(source.key, start, stop)])


# Compressed data may expand by this factor, or to this many bytes. What expands more is a
# decompression bomb.
EXPANSION, FREE_EXPANSION = 1000, 1 << 28


def check_expansion(made: int, stored: int) -> None:
    """Raise ValueError where `stored` bytes expand to too many."""
    if made > max(EXPANSION * stored, FREE_EXPANSION):
        raise ValueError(
            f"{stored:,} bytes become {made:,} or more, over {EXPANSION:,} times as many:"
            " if that is meant, decompress it with another program first"
        )


def digests(path: Path) -> bytes:
    """The digests of a file's pieces: remembered once after writing, else made of its bytes."""
    size, known = _written.pop(path, (-1, b""))
    if size == path.stat().st_size:
        return known
    hasher = Hasher()
    view = memoryview(bytearray(_BLOCK))
    with explained("read", path), open(path, "rb", buffering=0, opener=regular) as file:
        while length := file.readinto(view):
            hasher.update(view[:length])
    return hasher.digests()


def checksum(path: Path) -> str:
    """The checksum of a file, which its `digests` make."""
    return checksum_of(digests(path))


def unreadable(error: Exception, path: Path, position: int | None = None) -> Exception:
    """The error to raise for one raised by reading a file: one of ours, with its location.

    Readers check what they read, but untrusted bytes can make parsers and libraries raise anything.
    MemoryError is left as it is, as it says nothing about the data; nor do too many open files,
    whatever error a reader made of them.
    """
    if lack := shortage(error):
        error = explain(lack, "open", path)
        error.__cause__ = lack
    if isinstance(error, ShardkitError):
        return error.located(path=path, position=position)
    if isinstance(error, MemoryError | Warning):
        return error
    found: ShardkitError
    if isinstance(error, OSError):
        found = explain(error, "read", path).located(position=position)
    else:
        found = DamagedError(
            "the data are damaged in a way that shardkit has no message of its own for",
            path=path,
            position=position,
            found=f"{type(error).__name__}: {error}",
            fix="copy or make the file again; `shardkit verify` tells what else is damaged",
        )
    found.__cause__ = error
    return found


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one of our errors, which says what failed for which path."""
    try:
        yield
    except OSError as error:
        raise explain(error, doing, path) from error


def explain(error: OSError, doing: str, path: Path) -> StorageError | NotFoundError:
    """The error of ours for an OSError met while `doing` something to `path`."""
    if isinstance(error, NotFoundError):
        again = error.located()  # of a store, which says more; another one, as it gets a cause
        assert isinstance(again, NotFoundError)
        return again
    if error.errno == errno.ENOENT:
        return NotFoundError(f"cannot {doing}: there is no such file or folder", path=path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "make space, then run the same command again: it continues where it was"
        try:
            found = f"{shutil.disk_usage(path.parent).free:,} bytes free"
        except OSError:
            found = None
        return StorageError(f"cannot {doing}: the disk is full", path=path, found=found, fix=fix)
    if error.errno in _TOO_MANY_OPEN:
        fix = "raise the limit of the process, `ulimit -n 65536`, or close what holds files open"
        if error.errno == errno.ENFILE:
            fix = "close other programs, or raise the limit of the system, fs.file-max"
        return StorageError(f"cannot {doing}: {reason(error)}", path=path, fix=fix)
    if error.errno == errno.ENOMEM:
        fix = "use fewer --workers or --threads, or raise the limit of memory, `ulimit -v`"
        return StorageError(f"cannot {doing}: memory ran out", path=path, fix=fix)
    return StorageError(f"cannot {doing}: {reason(error)}", path=path)


def shortage(error: BaseException | None) -> OSError | None:
    """The cause of an error, if it is too many open files or too little memory, and no file."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            return error
        error = error.__cause__
    return None


def reason(error: OSError) -> str:
    """The message of the system, or of `regular`."""
    return os.strerror(error.errno) if error.errno else str(error)
