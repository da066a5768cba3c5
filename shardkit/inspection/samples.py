"""Finds samples by index or key, and shows values as text, JSON, or the bytes of a file."""

from __future__ import annotations

import heapq
import io
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.display.previews import decoded, image_in_words, media_in_words
from shardkit.errors import (
    MissingKeyError,
    NotFoundError,
    OutputError,
    ShardkitError,
    UsageError,
    printable,
    warn,
)
from shardkit.formats.base import KEY
from shardkit.sample import Sample
from shardkit.schema import (
    Array,
    Bytes,
    Encoded,
    Image,
    Images,
    Int,
    Json,
    Text,
    holds_keypoints,
    images_in,
    numbers_of,
)
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

_INDEX = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_BOTH = 100_000  # samples whose keys are read to check whether an index is also a key
_SIMILAR = 1_000_000  # samples whose keys are searched for similar ones
_DOWNLOAD = 10**9  # bytes of a remote dataset that may be downloaded for this
_KEYS = 3  # similar keys that are suggested for a missing one
_VALUES, _TOKENS, _BYTES = 8, 32, 32  # shown of an array, of tokens and of bytes


def find(dataset: Dataset, name: str) -> tuple[int, str]:
    """The index of the sample named by the user, and a note if the name is also the key of another.

    A valid index without leading zeros is an index (negative ones count from the end); anything
    else is a key. Raises MissingKeyError, with similar keys, or UsageError for a key of several
    samples.
    """
    count = len(dataset)
    if _INDEX.fullmatch(name) and -count <= int(name) < count:
        index = int(name) % count
        keyed = dataset.numbers_of(name) if _may_read_keys(dataset, _BOTH) else []
        others = ", ".join(str(other) for other in keyed[:5] if other != index)
        note = f"{name} is taken as an index; the sample with this key has the index {others}"
        return index, note if others else ""
    try:
        return dataset.number_of(name), ""
    except MissingKeyError as error:
        if _INDEX.fullmatch(name):
            error.fix = f"as an index, it would have to be below {count:,}"
        elif similar := ", ".join(map(repr, _similar(dataset, name))):
            error.fix = error.fix or f"similar keys: {similar}"
        raise


def _may_read_keys(dataset: Dataset, most: int) -> bool:
    """Return whether all keys can be read quickly enough to give a hint."""
    remote = any(isinstance(path, RemotePath) for path in dataset.paths)
    size = sum(dataset.extent(shard)[1] for shard in range(dataset.shards)) if remote else 0
    return len(dataset) <= most and size <= _DOWNLOAD


def _similar(dataset: Dataset, name: str) -> list[str]:
    """The keys with the longest common prefix and suffix; none if there are too many keys."""
    if not _may_read_keys(dataset, _SIMILAR):
        return []
    return heapq.nlargest(
        _KEYS, dataset.keys(), lambda key: _alike(key, name) + _alike(key[::-1], name[::-1])
    )


def _alike(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    same = (x == y for x, y in zip(a, b, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))


def warn_of_unusable(dataset: Dataset) -> None:
    """Warn about fields that cannot be read; samples are shown without them."""
    for name, error in dataset.unusable.items():
        words = f"the field {name!r} is ignored: {error.what}"
        warn(words)


def value_of(dataset: Dataset, index: int, field: str | None) -> tuple[str, Any]:
    """A field of a sample and its value. None stands for the only field; otherwise UsageError."""
    if field not in (None, KEY):
        dataset.kind_of(field)
    sample = dataset.read(index, None if field is None else [field])
    key = sample.pop(KEY)
    if field == KEY:
        return KEY, key
    if len(sample) != 1:
        if field or not sample:
            what = (
                "the sample has no value of this optional field"
                if field
                else "the sample has no values"
            )
            raise UsageError(what, path=dataset.place, key=key, field=field)
        raise UsageError(
            "the sample has several fields, and only one can be written",
            path=dataset.place,
            key=key,
            found=", ".join(f"{name} ({type(dataset.schema[name]).__name__})" for name in sample),
            fix=f"choose one of them: --field {next(iter(sample))}",
        )
    return next(iter(sample.items()))


def in_words(
    dataset: Dataset, field: str, value: Any, short: bool = False, sample: Sample | None = None
) -> str:
    """A value as text, complete or `short`. Text keeps its line breaks and is not escaped.

    A `loss_mask` is shown as the tokens of its `sample` that are learned.
    """
    kind = dataset.schema.get(field)
    if isinstance(kind, Image | Images):
        return "\n".join(map(image_in_words, images_in(kind, value))) or "no images"
    if isinstance(kind, Encoded):
        return media_in_words(value)
    if isinstance(kind, Bytes):
        return f"{len(value):,} bytes: {value[:_BYTES]!r}" + "..." * (len(value) > _BYTES)
    if isinstance(kind, Array):
        some = printable(", ".join(map(str, _first(value)))) + ", ..." * (value.size > _VALUES)
        about = f"{value.dtype} {value.shape}: {some}" + _named(dataset, field, value)
        if field == "loss_mask" and sample is not None:
            text, before = _learned(dataset, sample.get("tokens"), value, short), "; "
        else:
            text, before = _text(dataset, field, value, short), "; as text: "
        return (before if short else "\n").join([about, *text])
    if isinstance(kind, Json):
        return json.dumps(value, ensure_ascii=False, indent=None if short else 2)
    return f"{value}" + (_named(dataset, field, value) if isinstance(kind, Int) else "")


def _named(dataset: Dataset, field: str, value: Any) -> str:
    """Return the names of the first classes in a label, in parentheses; empty if there are none."""
    named = not holds_keypoints(dataset.schema.get(field))
    names = dataset.class_names.get(field, ()) if named else ()
    some = [names[n] for n in numbers_of(value)[:_VALUES] if 0 <= n < len(names)] if names else []
    return f" ({printable(', '.join(some))})" if some else ""


def _first(array: np.ndarray[Any, Any]) -> list[Any]:
    """Return the first values of an array, as numbers or text."""
    some = array.flat[:_VALUES].tolist()
    return [one if isinstance(one, bool | int | float) else f"{one!s:.40}" for one in some]


def _text(dataset: Dataset, field: str, tokens: Any, short: bool) -> list[str]:
    """Tokens as text; nothing for other arrays, or if the dataset has no tokenizer."""
    if field != "tokens" or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return []
    some = tokens[:_TOKENS] if short else tokens
    try:
        text = decoded(dataset, some.tolist())
    except ShardkitError as error:  # such as a missing library
        return [f"(not decoded: {'; '.join(filter(None, (error.what, error.fix)))})"]
    return [] if text is None else [text + "..." * (len(some) < len(tokens))]


def _learned(dataset: Dataset, tokens: Any, mask: Any, short: bool) -> list[str]:
    """How many tokens are learned, and each run of them as text. Nothing for other arrays."""
    if mask.ndim != 1 or mask.shape != np.shape(tokens):
        return []
    borders = np.flatnonzero(np.diff(mask != 0, prepend=False, append=False)).reshape(-1, 2)
    texts = [_text(dataset, "tokens", tokens[start:stop], short) for start, stop in borders]
    count = f"learned: {np.count_nonzero(mask):,} of {len(mask):,} tokens"
    found = [count, *itertools.chain(*texts)]
    return [" | ".join(found)] if short else found


def json_of(dataset: Dataset, index: int) -> dict[str, Any]:
    """Return a sample as JSON values: text and JSON in full, bytes as their number."""
    sample = dataset.read(index)
    key = sample.pop(KEY)
    fields = {name: _json_value(dataset, name, value) for name, value in sample.items()}
    return {"index": index, "key": key, "fields": fields}


def _json_value(dataset: Dataset, field: str, value: Any) -> Any:
    kind = dataset.schema.get(field)
    if isinstance(kind, Images):
        return [{"bytes": len(image)} for image in value]
    if isinstance(kind, Bytes):
        return {"bytes": len(value)}
    if not isinstance(kind, Array):
        return value
    about = {"dtype": value.dtype.str, "shape": list(value.shape), "first": _first(value)}
    text = _text(dataset, field, value, short=True)
    return {**about, "text": text[0]} if text else about


def as_bytes(dataset: Dataset, field: str, value: Any) -> bytes:
    """A value as the contents of a file: bytes, media and text (UTF-8) as stored, arrays as `.npy`.

    Anything else is a line of text. Raises UsageError for a list of several images.
    """
    kind = dataset.schema.get(field)
    if isinstance(kind, Images) and len(value) != 1:
        raise UsageError(
            "the value is a list of images, which one file cannot hold",
            path=dataset.place,
            field=field,
            found=f"{len(value):,} images",
            fix="from Python: shardkit.open(PATH)[INDEX][FIELD][NUMBER]",
        )
    if isinstance(kind, Array):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return file.getvalue()
    if isinstance(kind, Bytes | Images):
        return bytes(value if isinstance(kind, Bytes) else value[0])
    if isinstance(kind, Text) or field == KEY:
        return str(value).encode("utf-8", "surrogatepass")
    text = json.dumps(value, ensure_ascii=False) if isinstance(kind, Json) else str(value)
    return text.encode() + b"\n"


def write_new(path: Path, data: bytes, overwrite: bool) -> None:
    """Write a file atomically. Raises OutputError if it exists, unless `overwrite`."""
    out = fs.output(path)
    if isinstance(out, RemotePath):
        raise UsageError("the output must be a local file", found=str(out))
    if os.path.lexists(out) and not (overwrite and out.is_file()):
        fix = "give another name" + ", or --overwrite" * out.is_file()
        raise OutputError("the output exists already", path=out, fix=fix)
    if not out.parent.is_dir():
        raise NotFoundError("the folder of the output does not exist", path=out.parent)
    fs.replace_file(out, data)
