"""Recognises Speech Commands, whose splits are in lists, and whose folder of noise is not a class.

`validation_list.txt` and `testing_list.txt` name clips; the others are for training.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from shardkit.codecs.media import AUDIO
from shardkit.dataset.folders import media_of
from shardkit.sources.base import WHOLE
from shardkit.sources.candidate import Candidate, Splits
from shardkit.sources.folder_scan import checked, scan_splits
from shardkit.sources.image_folder import ImageFolder
from shardkit.sources.transcripts import divided

_NOISE = "_background_noise_"
_LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}


def recognise(candidate: Candidate) -> Splits | None:
    """Return a folder of audio with both lists."""
    path = candidate.path
    there = candidate.is_folder and all((path / name).is_file() for name in _LISTS.values())
    if not there or media_of(candidate.contents) is not AUDIO:
        return None
    sources = scan_splits(candidate, AUDIO, _NOISE)
    if candidate.recipe.split == "auto" and WHOLE in sources:
        sources = _listed(path, sources[WHOLE])
    return checked(candidate, sources)


def _listed(root: Path, source: ImageFolder) -> dict[str, ImageFolder]:
    """Split the clips by list; the rest is `train`. Raises UsageError for a clip in both lists."""
    numbers = {source.name(number): number for number in range(len(source))}
    found, problems = divided(numbers, {split: root / name for split, name in _LISTS.items()})
    rest = {*numbers.values()}.difference(*found.values())
    chosen = {"train": sorted(rest), **found}
    splits = {name: source.select(np.array(some)) for name, some in chosen.items() if some}
    first = next(iter(splits.values()))
    words = f"the splits come from {' and '.join(_LISTS.values())}"
    first.notes, first.problems = (*source.notes, words), (*source.problems, *problems)
    first.ignored = dict(Counter(source.ignored) - Counter({".txt file": len(_LISTS)}))
    return splits
