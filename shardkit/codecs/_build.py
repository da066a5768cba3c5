"""Build the extensions, which are written in C, and warn about those that cannot be built.

pyproject.toml refers to `BuildExtension`. As they are optional, pip does not report a failure, and
it shows the output of a build only with -v: so the notice is also written to the terminal.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from setuptools.command.build_ext import build_ext

# By extension: its purpose, and what happens without it.
EXTENSIONS = {
    "shardkit.storage._reads": (
        "fast reading",
        "small samples are read several times slower while loading",
    ),
    "shardkit.codecs._crop": (
        "fast loading of JPEGs",
        "JPEGs are cropped and resized about 3 times slower while loading",
    ),
}
NOTICE = """
shardkit: WARNING: installed WITHOUT its extension for {purpose}
  found: {error:.120}
  Everything works, and {effect}.
  fix: install a C compiler and libjpeg-turbo's jpeglib.h (Debian: gcc libjpeg-dev python3-dev;
       conda: c-compiler libjpeg-turbo), then again, in this folder:
       pip install --force-reinstall --no-deps .
  `shardkit --version` says whether it is there.
"""


class BuildExtension(build_ext):  # type: ignore[misc]
    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            purpose, effect = EXTENSIONS[ext.name]
            _say(NOTICE.format(purpose=purpose, effect=effect, error=str(error)))
            raise  # setuptools continues without an optional extension


def _say(text: str) -> None:
    sys.stderr.write(text)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(text)
