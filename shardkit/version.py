"""The version, in one place, and those of the libraries that the results depend on."""

from __future__ import annotations

__version__ = "0.1.0"

_LIBRARIES = (
    *("numpy", "simplejpeg", "Pillow", "pyarrow", "xxhash", "torch"),
    *("tokenizers", "tiktoken", "soundfile", "soxr", "av", "zstandard"),
)


def versions() -> dict[str, str]:
    """Versions of shardkit, Python, and installed libraries."""
    import contextlib
    import importlib.metadata
    import platform

    found = {"shardkit": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
