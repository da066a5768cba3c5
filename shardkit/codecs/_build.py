"""Build the extension for fast loading of JPEGs, and warn if it cannot be built.

pyproject.toml refers to `BuildCrop`. As the extension is optional, pip does not report a failure,
and it shows the output of a build only with -v: so the notice is also written to the terminal.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from setuptools.command.build_ext import build_ext

NOTICE = """
shardkit: WARNING: installed WITHOUT its extension for fast loading of JPEGs
  found: {error:.120}
  Everything works, and JPEGs are cropped and resized about 3 times slower while loading.
  fix: install a C compiler and libjpeg-turbo's jpeglib.h (Debian: gcc libjpeg-dev python3-dev;
       conda: c-compiler libjpeg-turbo), then again, in this folder:
       pip install --force-reinstall --no-deps .
  `shardkit --version` says whether it is there.
"""


class BuildCrop(build_ext):  # type: ignore[misc]
    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            _say(NOTICE.format(error=str(error)))
            raise  # setuptools continues without an optional extension


def _say(text: str) -> None:
    sys.stderr.write(text)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(text)
