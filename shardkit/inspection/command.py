"""The command that creates a dataset, reconstructed from the recipe in its manifest."""

from __future__ import annotations

import csv
import dataclasses
import io
import shlex
from collections.abc import Iterator
from typing import Any

from shardkit.metadata.recipe import LISTS, Recipe
from shardkit.options import AudioOptions, ConvertOptions, ImageOptions, TextOptions

_OWN_NAMES = {"format": "image-format", "field": "text-field"}  # option names of image and text
_FILES = ("classes", "metadata")  # options that name files


def convert_command(recipe: Recipe) -> str:
    """The `shardkit convert` command, one option per line; SOURCE, OUT and FILE stand for paths."""
    words = [["shardkit", "convert", "SOURCE", "--to", recipe.format, "-o", "OUT"]]
    for name, value in changed_options(recipe):
        if value is False and name == "append-eos":
            words.append(["--no-append-eos"])
        elif value is True:
            words.append([f"--{name}"])
        elif isinstance(value, tuple):
            row = io.StringIO()
            csv.writer(row).writerow(value)
            words.append([f"--{name}", row.getvalue().removesuffix("\r\n")])
        else:
            words.append([f"--{name}", str(value)])
    return " \\\n  ".join(" ".join(map(_quoted, option)) for option in words)


def changed_options(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the options that differ from their defaults."""
    for option in dataclasses.fields(ConvertOptions):
        value: Any = getattr(recipe, option.name, None)
        usual = option.default
        if option.name in ("image", "audio", "text"):
            yield from _changed(value)
        elif option.name in _FILES and value:
            yield option.name, "FILE"
        elif option.name == "shard_size" and value is not None:
            yield "shard-size", f"{value // 10**6}MB" if value % 10**6 == 0 else value
        elif option.name == "shuffle":
            yield from (("shuffle", True),) if value is not None else ()
        elif option.name == "seed":
            seed = recipe.seed if recipe.shuffle is None else recipe.shuffle
            yield from (("seed", seed),) if seed else ()
        elif option.name == "keys":
            yield from (("keys", "FILE"),) if "" in recipe.keys else ()
        elif value == LISTS and option.name == "split":
            yield "split", ",".join(f"{split}=FILE" for split in recipe.keys)
        elif option.name == "rename":
            yield from (("rename", f"{old}={new}") for old, new in recipe.rename.items())
        elif option.name == "transform" and recipe.transform is not None:
            yield "transform", recipe.transform.name
        elif value not in (None, (), usual):
            yield option.name.replace("_", "-"), value


def _changed(options: ImageOptions | AudioOptions | TextOptions) -> Iterator[tuple[str, Any]]:
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if value != option.default:
            yield _OWN_NAMES.get(option.name, option.name.replace("_", "-")), value


def _quoted(word: str) -> str:
    """A word quoted for a shell; unprintable characters are escaped as in bash's $'\\u001b'."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08x}" for c in word)
    return f"$'{''.join(shown)}'"
