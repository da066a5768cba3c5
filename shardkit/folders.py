"""What a folder holds that no manifest describes: shards, images, text, or data we do not read."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardkit import manifest as manifests
from shardkit.codecs.image import SUFFIXES
from shardkit.errors import FormatError, UsageError
from shardkit.formats import FORMATS, format_of
from shardkit.formats.foreign import Kind, kind_by_name, kind_of_folder, not_read
from shardkit.splits import CARD, check_card, common_start, grouped, shown_images
from shardkit.walk import Walk, kind_of_file

# Results of `map` and `filter` that Hugging Face datasets keeps beside the dataset they are of.
_CACHE = re.compile(r"(cache-[0-9a-f]+(_\d+_of_\d+)?|tmp\w+)\.arrow")
_IMAGES = tuple(f".{suffix}" for suffix in SUFFIXES)


@dataclass
class Contents:
    """The files below a folder, by what they are. Names are relative to it."""

    root: Path
    shards: dict[str, str] = field(default_factory=dict)  # name -> format
    images: list[str] = field(default_factory=list)  # one of each folder that has any
    image_files: int = 0
    text_files: int = 0
    foreign: dict[Kind, list[str]] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)  # other files than shards, by kind

    def add_images(self, names: Sequence[str]) -> None:
        """Note the images of a folder."""
        self.image_files += len(names)
        self.images += names[:1]

    @property
    def at_top(self) -> bool:
        """Whether there are shards in the folder itself, and not only below."""
        return any(_holder(name, format) == "" for name, format in self.shards.items())


def look_into(root: Path, is_text: Callable[[str], bool] = lambda name: False) -> Contents:
    """What is in a folder and, unless it holds shards itself, below.

    Images that README.md shows are no data, where there are any.
    """
    found, walk = Contents(root), Walk(root)
    shown = shown_images(root)
    about: list[str] = []
    unpaired: dict[str, str] = {}
    for folder, entries, folders in walk:
        # Of millions of images, names are looked at once.
        names = [e.name for e in entries if not e.name.lower().endswith(_IMAGES)]
        shards = _shards_among(names, {below.relative.rpartition("/")[2] for below in folders})
        paired = {name for name, format in shards.items() if FORMATS[format].needs}
        prefix = f"{folder.relative}/" if folder.relative else ""
        together = kind_of_folder(names)
        if len(names) < len(entries):
            images = [prefix + e.name for e in entries if e.name.lower().endswith(_IMAGES)]
            about += [name for name in images if name in shown]
            found.add_images([name for name in images if name not in shown] if shown else images)
        for name in names:
            if _belongs_to(name, shards):
                continue
            kind = together or kind_by_name(name)
            if kind is not None and name not in paired:
                found.foreign.setdefault(kind, []).append(prefix + name)
            elif name in shards:
                found.shards[prefix + name] = shards[name]
                continue
            elif (format := format_of(Path(name))) and FORMATS[format].needs:
                unpaired[prefix + name] = format
            elif is_text(name):
                found.text_files += 1
            found.ignored[kind_of_file(name)] += 1
        if found.shards and not folder.relative:
            break
    if found.shards or found.text_files > is_text(CARD):
        found.ignored.update(map(kind_of_file, about))
    else:
        found.add_images(about)
    if walk.problems and not (found.ignored or found.shards or found.image_files):
        raise walk.problems[0]
    if unpaired and not found.shards and not found.foreign:
        found.shards = unpaired  # whose error says what is missing
    return found


def _belongs_to(name: str, shards: Mapping[str, str]) -> bool:
    """Whether a file is the index or the lock of one of the shards."""
    return any(
        name.endswith(ending) and name.removesuffix(ending) + of in shards
        for declaration in FORMATS.values()
        for ending, of in declaration.beside.items()
    )


def _shards_among(names: Sequence[str], folders: set[str]) -> dict[str, str]:
    """The files in a folder that are shards, with their formats.

    Caches are none, nor tables that img2dataset puts beside its shards, nor a .bin without .idx.
    """
    every = {name: format for name in names if (format := format_of(Path(name)))}
    beside = {name.rpartition(".")[0] for name in names if name.endswith((".tar", ".tfrecord"))}
    beside |= {name for name in folders if name.isdigit()}
    hub = "dataset_info.json" in names  # of a dataset that Hugging Face datasets prepared
    return {
        name: format
        for name, format in every.items()
        if not (format == "parquet" and name.removesuffix(".parquet") in beside)
        and not (hub and _CACHE.fullmatch(name))
        and _has_index(name, format, names)
    }


def _has_index(name: str, format: str | None, names: Sequence[str]) -> bool:
    """Whether the file is there without which a file of this name is no shard."""
    if format is None or not (needs := FORMATS[format].needs):
        return True
    return name.rpartition(".")[0] + needs in names


def _holder(name: str, format: str) -> str:
    """The folder that holds a shard; a shard may itself be a folder."""
    above = posixpath.dirname(name)
    return posixpath.dirname(above) if FORMATS[format].inside and above else above


def refuse_foreign(found: Contents) -> None:
    """Raise FormatError for data of a format that is not read, unless more can be read.

    Files of text are no more than what describes such data, except for single files of audio.
    """
    readable = len(found.shards) or found.image_files
    for kind, names in found.foreign.items():
        others = readable or found.text_files
        if len(names) >= others or not (readable or kind.files):
            words = f"{len(names):,} file{'s' * (len(names) > 1)} such as {min(names)!r}"
            fix = ""
            if others:
                words += f", and {others:,} others"
                fix = "to convert the others alone, give their own folder or file"
            raise not_read(kind, found.root, words, fix)


def shards_by_split(found: Contents, *, together: bool = False) -> dict[str, list[str]]:
    """The shards of a folder, a list for each split; `{"": shards}` if names name one at most.

    `together`: all are wanted as one. Raises FormatError for shards of several formats or of
    several datasets, UsageError for names that leave a question.
    """
    top = {name: format for name, format in found.shards.items() if not _holder(name, format)}
    names = sorted(top or found.shards)
    formats = sorted({found.shards[name] for name in names})
    if len(formats) > 1:
        raise FormatError(
            "the folder holds shards of several formats",
            path=found.root,
            found=", ".join(formats),
            fix="give one of the shards, or a folder that holds one format",
        )
    holders = [_holder(name, found.shards[name]) for name in names]
    made = [holder for holder in dict.fromkeys(holders) if holder and _is_dataset(found, holder)]
    if made:
        raise _several(found.root, "datasets", made)
    if together:
        return {"": names}
    splits = grouped(found.root, names)
    check_card(found.root, list(splits))
    if len(splits) > 1:
        every = {split: [names[n] for n in numbers] for split, (_, numbers) in splits.items()}
    else:
        every = {"": names}
    for split_names in every.values():
        folders = dict.fromkeys(_holder(name, found.shards[name]) for name in split_names)
        if len(folders) > 1:
            raise _several(found.root, "shards", list(folders))
    return every


def _is_dataset(found: Contents, folder: str) -> bool:
    path = found.root / folder
    return manifests.has_manifest(path) or listing_format(path) is not None


def listing_format(folder: Path) -> str | None:
    """The format, if any, of which a file in the folder names the shards."""
    for name, declaration in FORMATS.items():
        if declaration.listing and (folder / declaration.listing).is_file():
            return name
    return None


def _several(root: Path, what: str, folders: Sequence[str]) -> FormatError:
    ways = [str(root / folder) for folder in folders]
    return FormatError(
        f"this folder holds {what} in several folders",
        path=root,
        found=", ".join(folder or "." for folder in folders[:5]),
        fix=f"give one of them: {', '.join(ways[:5])}",
    )


def way_to(root: Path, names: Sequence[str], others: Iterable[str]) -> str:
    """A path that opens these shards and no others: a shard, a folder or a pattern."""
    folder = posixpath.dirname(names[0])
    rest = [name for name in others if name not in names]
    if len(names) == 1:
        return str(root / names[0])
    if not any(posixpath.dirname(name) == folder for name in rest):
        return str(root / folder)
    begin = common_start(names).rstrip("0123456789")
    suffix = "." + names[0].rpartition(".")[2]
    if fnmatch.filter(rest, begin + "*" + suffix):
        return str(root / names[0])
    return str(root / (begin + "*" + suffix))


_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")  # as in shells: {000..127}
_MOST_NAMES = 1 << 20  # of a pattern


def is_pattern(path: Path) -> bool:
    """Whether a path names shards by a pattern: `data/train-*.parquet`, `data/{000..127}.tar`."""
    special = re.search(r"[*?[]", path.name) or _RANGE.search(path.name)
    return bool(special) and not (path.exists() or path.is_symlink())


def _names_of(pattern: Path) -> list[str]:
    """The names that ranges in a pattern stand for: no folder is looked into."""
    names = [""]
    at = 0
    for found in _RANGE.finditer(pattern.name):
        first, last = found.groups()
        numbers = range(int(first), int(last) + 1)
        if not 0 < len(numbers) * len(names) <= _MOST_NAMES:
            raise UsageError(
                "the range in a pattern has no numbers, or too many",
                path=pattern,
                found=found[0],
                fix="give a pattern such as folder/train-{000..127}.tar, in quotes",
            )
        before = pattern.name[at : found.start()]
        names = [f"{name}{before}{n:0{len(first)}d}" for name in names for n in numbers]
        at = found.end()
    return [name + pattern.name[at:] for name in names]


def shards_like(pattern: Path) -> tuple[list[str], str]:
    """The shards in a folder whose names fit a pattern, and their format."""
    folder = pattern.parent
    if _RANGE.search(pattern.name):
        names = _names_of(pattern)
    else:
        names = sorted(p.name for p in folder.glob(pattern.name) if p.name[0] != ".")
    found = {name: format for name in names if (format := format_of(Path(name)))}
    if len(set(found.values())) != 1:
        raise UsageError(
            "the pattern does not name shards of one format",
            path=pattern,
            found=", ".join(sorted(set(found.values()))) or f"{len(names)} other files",
            fix="give a pattern such as folder/train-*.parquet, in quotes",
        )
    return list(found), next(iter(found.values()))
