"""Text files with a line per file: the transcripts of LibriSpeech, and the lists of splits.

Lines of `84-121123.trans.txt` are a clip's name and its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError
from shardkit.schema import Schema, Text
from shardkit.sources.columns import Column, Metadata
from shardkit.sources.file_table import FileTable
from shardkit.storage import fs

TRANSCRIPTS = ".trans.txt"
_LACKS = "a listed clip does not exist"


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
        for line in filter(None, lines_of(root / file)):
            name, _, text = line.partition(" ")
            number = numbers.get(f"{folder}/{name}" if folder else name)
            if number is None:
                problems.append(not_there(root / file, name))
            else:
                rows[number] = len(texts)
                texts.append(text.strip())
    kind = Text(optional=bool((rows < 0).any()))
    return Metadata(Schema({"text": kind}), {"text": Column.of(kind, texts)}, rows)


def lines_of(path: Path) -> Sequence[str]:
    try:
        return [line.strip() for line in fs.read(path).decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        fix = "save it as UTF-8, or move it elsewhere"
        what = "the file is not valid UTF-8"
        raise SourceError(what, path=path, offset=error.start, fix=fix) from error


def divided(
    numbers: Mapping[str, int], lists: Mapping[str, Path], lacks: str = _LACKS
) -> tuple[dict[str, list[int]], list[ShardkitError]]:
    """Return the samples that the list of each split names, and the errors of other names.

    `numbers` are those of the samples, by name; `lacks` says what is wrong with other names. Raises
    UsageError for a name in two lists.
    """
    found, problems, seen = dict[str, list[int]](), list[ShardkitError](), dict[str, str]()
    for split, path in lists.items():
        names = dict.fromkeys(filter(None, lines_of(path)))
        if twice := [name for name in names if seen.setdefault(name, split) != split]:
            what = "two split lists name the same file"
            raise UsageError(what, path=path.parent, found=twice[0])
        problems += [not_there(path, name, lacks) for name in names if name not in numbers]
        found[split] = sorted(numbers[name] for name in names if name in numbers)
    return found, problems


def not_there(path: Path, name: str, lacks: str = _LACKS) -> SampleError:
    return SampleError(
        lacks,
        path=path,
        found=name,
        fix="restore it or remove its line, or use --on-error skip",
    )
