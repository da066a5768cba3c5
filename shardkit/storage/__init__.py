"""Files and objects: local disks, buckets and web servers, and the cache of their bytes.

Each imports only those on lines below its own:

    blobs digests
    byte_source
    pages
    page_cache walk
    fs patterns
    remote/
    __init__ checksums pointers
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The functions that formats in other packages import from here: use `formats.api.fs`."""
    if name not in ("create", "write"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("shardkit.storage.fs"), name)
