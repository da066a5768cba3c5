"""Decompress into a temporary file, for random access."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from shardkit.codecs.compression import decompressed
from shardkit.errors import DamagedError, StorageError
from shardkit.helpers import os_errors
from shardkit.storage.byte_source import ByteSource, LocalFile


def unpacked(path: Path, blocks: Iterable[bytes], compression: str, what: str) -> ByteSource:
    """Return the decompressed bytes of blocks of a file; `what` names these in errors.

    The temporary file has no name: the system deletes it when it is closed or the process ends.
    """
    folder = os_errors.temporary_folder()
    fix = f"free some space, set TMPDIR to another folder, or unpack {what}"
    try:
        with tempfile.TemporaryFile(dir=folder) as plain:
            for data in decompressed(blocks, compression):
                plain.write(data)
            plain.flush()
            return LocalFile(path, os.dup(plain.fileno()))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise os_errors.explain(error, "unpack", path) from error
        raise StorageError(
            f"not enough space to unpack {what}",
            path=path,
            found=f"{shutil.disk_usage(folder).free:,} bytes free in {folder}",
            fix=fix,
        ) from error
    except ValueError as error:
        raise DamagedError(f"{what} is damaged: {error}", path=path) from error
