"""Shows images in a terminal: with its image protocol, or otherwise as coloured half blocks.

What is sent is encoded here from a few decoded pixels; the bytes of the data are never sent.
"""

from __future__ import annotations

import base64
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import click
import numpy as np

from shardkit.cli.tables import console
from shardkit.codecs.image import NotAnImageError, probe
from shardkit.codecs.pixels import encode, to_rgb
from shardkit.codecs.window import Pixels
from shardkit.dataset.display.previews import as_pixels
from shardkit.schema import FieldType, images_in

_MOST = 1 << 26  # maximum number of pixels of an image to decode
_CELL = 8  # assumed width of a cell in pixels; its height is twice that
_CHUNK = 4096  # characters per escape sequence in kitty's protocol
_KITTY = {"xterm-kitty", "xterm-ghostty"}
_ITERM = {"iTerm.app", "iTerm2", "WezTerm", "mintty"}
# Set by programs that contain a terminal, which do not pass images on.
_WITHIN = {"TMUX", "STY", "ZELLIJ", "NVIM", "VIM_TERMINAL", "INSIDE_EMACS"}


def protocol(environ: Mapping[str, str]) -> str:
    """How a terminal shows images, judging from the environment: kitty, iterm or blocks."""
    term, program = environ.get("TERM", ""), environ.get("TERM_PROGRAM", "")
    if term.startswith(("screen", "tmux", "dumb")) or not _WITHIN.isdisjoint(environ):
        return "blocks"
    if not program:  # else the variables below may be inherited from another terminal
        program = "kitty" if "KITTY_WINDOW_ID" in environ else environ.get("LC_TERMINAL", "")
    if term in _KITTY or program in ("kitty", "ghostty"):
        return "kitty"
    return "iterm" if program in _ITERM else "blocks"


def show_images(kind: FieldType | None, value: Any, columns: int = 80, rows: int = 0) -> None:
    """Show the images in a value, if standard output is a terminal that can show them.

    Each takes at most this many cells; 0 rows: nearly the height of the terminal. Images that are
    damaged, or have more than 67 million pixels, are skipped: their description says so.
    """
    if not sys.stdout.isatty():
        return
    size = shutil.get_terminal_size()
    box = min(columns, size.columns - 1), max(rows or size.lines - 4, 4)
    pixels = as_pixels(value)
    images = () if kind is None else images_in(kind, value)
    for image in images if pixels is None else (pixels,):
        _show(image, *box)


def _show(image: Any, columns: int, rows: int) -> None:
    way = protocol(os.environ)
    scale = 1 if way == "blocks" else _CELL
    pixels = _small(image, columns * scale, rows * 2 * scale)
    if pixels is None:
        return
    if way == "blocks":
        _blocks(pixels)
        return
    data, cells = encode(pixels, "png"), -(-pixels.shape[1] // _CELL)
    click.echo((_kitty if way == "kitty" else _iterm)(data, cells))


def _small(image: Any, width: int, height: int) -> Pixels | None:
    """The image's pixels, reduced to fit a width and height; None if it cannot be decoded."""
    import PIL.Image

    if not isinstance(image, np.ndarray):
        try:
            info = probe(image)
            if info.width * info.height > _MOST:
                return None
            image = to_rgb(image, (width, height))
        except NotAnImageError:
            return None
    made = PIL.Image.fromarray(np.ascontiguousarray(image))
    made.thumbnail((width, height))
    return np.array(made)


def _kitty(png: bytes, cells: int) -> str:
    """Kitty's graphics protocol: show a PNG `cells` wide (c), and send no responses (q=2)."""
    text = base64.b64encode(png).decode()
    chunks = [text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK)]
    keys = [f"a=T,f=100,c={cells},q=2"] + ["q=2"] * (len(chunks) - 1)
    more = [1] * (len(chunks) - 1) + [0]
    sent = zip(keys, more, chunks, strict=True)
    return "".join(f"\x1b_G{key},m={number};{chunk}\x1b\\" for key, number, chunk in sent)


def _iterm(png: bytes, cells: int) -> str:
    """iTerm2's inline images protocol."""
    keys = f"inline=1;size={len(png)};width={cells};preserveAspectRatio=1"
    return f"\x1b]1337;File={keys}:{base64.b64encode(png).decode()}\a"


def _blocks(pixels: Pixels) -> None:
    """Print two pixels per cell, in as many colours as the terminal says it supports."""
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    out = console()
    if out.color_system is None or out.no_color or not out.encoding.startswith("utf"):
        return
    if len(pixels) % 2:
        pixels = np.concatenate([pixels, pixels[-1:]])
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        line = Text(no_wrap=True)
        for above, below in zip(upper, lower, strict=True):
            line.append("▀", Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        out.print(line)
