"""`shardkit --version`: versions of shardkit and of the libraries that encode and decode."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from shardkit.codecs import extension
from shardkit.version import __version__

_OPTIONAL = {  # purpose -> packages, and the extra that installs them
    "text": (("tokenizers", "tiktoken"), "text"),
    "audio": (("soundfile", "soxr"), "audio"),
    "video": (("av",), "video"),
    "Zstandard": (("zstandard",), "zstd"),
}


def versions() -> Iterator[str]:
    """The lines to show."""
    yield f"shardkit {__version__}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    if extension.MISSING:
        yield "fast loading of JPEGs: no"
        yield f"  found: {extension.MISSING}\n  fix: {extension.FIX}"
    else:
        built_with = getattr(extension._crop, "LIBJPEG_TURBO", "")
        yield f"fast loading of JPEGs: yes (extension with libjpeg-turbo {built_with})"
    yield f"images: Pillow {version('Pillow')} ({_of_pillow()}), simplejpeg {version('simplejpeg')}"
    for what, (packages, name) in _OPTIONAL.items():
        try:
            yield f"{what}: " + ", ".join(f"{package} {version(package)}" for package in packages)
        except PackageNotFoundError:
            yield f'{what}: no (pip install "shardkit[{name}]")'


def _of_pillow() -> str:
    from PIL import features

    names = {"libjpeg_turbo": "libjpeg-turbo", "webp": "WebP", "avif": "AVIF", "libtiff": "libtiff"}
    return ", ".join(
        f"{shown} {features.version(name) if features.check(name) else 'missing'}"
        for name, shown in names.items()
    )
