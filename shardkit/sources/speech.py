"""Files of speech corpora beside the clips: transcripts, split lists, noise.

LibriSpeech has `84-121123.trans.txt` in each folder, whose lines are a clip's name and its text.
Speech Commands has `validation_list.txt` and `testing_list.txt`, which name clips, and a folder
`_background_noise_`, which is not a class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError
from shardkit.schema import Schema, Text
from shardkit.sources.columns import Column, Metadata
from shardkit.sources.file_table import FileTable
from shardkit.sources.image_folder import ImageFolder
from shardkit.storage import fs

TRANSCRIPTS = ".trans.txt"
NOISE = "_background_noise_"
_LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}


def has_lists(names: Collection[str]) -> bool:
    """Whether the files in a folder include the split lists of Speech Commands."""
    return set(_LISTS.values()) <= set(names)


def read_transcripts(
    root: Path, files: Iterable[str], clips: FileTable, problems: list[ShardkitError]
) -> Metadata:
    """Read the texts of clips from transcript files, whose lines are a clip's name and its text.

    Missing clips are added to `problems`. Raises SourceError for a damaged file.
    """
    numbers = {clips.stem(number): number for number in range(len(clips))}
    rows, texts = np.full(len(clips), -1, np.int64), list[str]()
    for file in sorted(files):
        folder = file.rpartition("/")[0]
        for line in filter(None, _lines(root / file)):
            name, _, text = line.partition(" ")
            number = numbers.get(f"{folder}/{name}" if folder else name)
            if number is None:
                problems.append(_no_clip(root / file, name))
            else:
                rows[number] = len(texts)
                texts.append(text.strip())
    kind = Text(optional=bool((rows < 0).any()))
    return Metadata(Schema({"text": kind}), {"text": Column.of(kind, texts)}, rows)


def listed_splits(root: Path, source: ImageFolder) -> dict[str, ImageFolder]:
    """Split the clips by list; the rest is `train`. Raises UsageError for a clip in both lists."""
    numbers = {source.name(number): number for number in range(len(source))}
    split_of = np.zeros(len(source), np.int8)
    problems: list[ShardkitError] = []
    for number, file in enumerate(_LISTS.values(), 1):
        for name in filter(None, _lines(root / file)):
            if name not in numbers:
                problems.append(_no_clip(root / file, name))
            elif split_of[numbers[name]] not in (0, number):
                raise UsageError("two split lists name the same file", path=root, found=name)
            else:
                split_of[numbers[name]] = number
    found = {}
    for number, split in enumerate(("train", *_LISTS)):
        if (split_of == number).any():
            found[split] = source.select(np.flatnonzero(split_of == number))
    first = next(iter(found.values()))
    words = f"the splits come from {' and '.join(_LISTS.values())}"
    first.notes, first.problems = (*source.notes, words), (*source.problems, *problems)
    first.ignored = dict(Counter(source.ignored) - Counter({".txt file": len(_LISTS)}))
    return found


def _lines(path: Path) -> Sequence[str]:
    try:
        return [line.strip() for line in fs.read(path).decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        fix = "save it as UTF-8, or move it elsewhere"
        what = "the file is not valid UTF-8"
        raise SourceError(what, path=path, offset=error.start, fix=fix) from error


def _no_clip(path: Path, name: str) -> SampleError:
    return SampleError(
        "a listed clip does not exist",
        path=path,
        found=name,
        fix="restore it or remove its line, or use --on-error skip",
    )
