"""Parses the README.md (dataset card) of a repository on the Hugging Face Hub."""

from __future__ import annotations

import fnmatch
import functools
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from shardkit.codecs.image import SUFFIXES
from shardkit.errors import SourceError, UsageError
from shardkit.helpers.names import FLAT, is_safe
from shardkit.helpers.yaml import parse_yaml
from shardkit.metadata.splits import KINDS, Split, grouped
from shardkit.storage import fs

CARD = "README.md"
OUTSIDE = "file outside of the splits in README.md"  # counted as ignored
_CARD_BYTES = 1 << 20
# An image's path, or its URL on the Hub, in Markdown or HTML.
_SHOWN = re.compile(
    rf"(?:https?://[^\s\"'()<>]*?/(?:resolve|blob|raw)/[^/\s]+/)?"
    rf"([^\s\"'()<>\[\]=]+\.(?:{'|'.join(SUFFIXES)}))\b",
    re.I,
)
_MAX_PATTERNS = 10_000  # maximum number of wildcard patterns: each is matched with every file


@dataclass(frozen=True)
class Subset:
    """An entry of `configs:`. `patterns`: file patterns by split; at "" if there are no splits."""

    name: str
    patterns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    folder: str = ""  # `data_dir`


class Found(NamedTuple):
    """The splits of files, and the number of files that are in no split."""

    splits: dict[str, Split]
    others: int = 0


def named_subset(path: Path) -> tuple[Path, str]:
    """Split `FOLDER#SUBSET` into folder and subset ("" if the whole path exists)."""
    name, sign, subset = path.name.partition("#")
    if not sign or not name or path.exists():
        return path, ""
    return path.with_name(name), subset


def splits_of(
    root: Path, names: Sequence[str], *, subset: str = "", documents: bool = False
) -> Found:
    """Return the splits of the files below a folder, by its README.md, or otherwise by their names.

    `subset` is the name of a subset in README.md. Raises UsageError if README.md is ambiguous, and
    SourceError if files that it names are missing.
    """
    chosen = _chosen(root, subset)
    if chosen is None or not (chosen.patterns or chosen.folder):
        return Found(grouped(root, names, documents=documents))
    if not chosen.patterns:
        below = [n for n, name in enumerate(names) if name.startswith(f"{chosen.folder}/")]
        named = grouped(root, [names[n] for n in below], documents=documents) if below else {}
        splits = {s: Split(f, [below[n] for n in numbers]) for s, (f, numbers) in named.items()}
        return Found(splits or {"": Split("", below)}, len(names) - len(below))
    splits = {s: _matching(root, names, chosen, s) for s in chosen.patterns}
    taken = [number for split in splits.values() for number in split.numbers]
    if len(set(taken)) < len(taken):
        twice = next(number for number in taken if taken.count(number) > 1)
        raise UsageError(
            "the repository's README.md puts a file into two splits",
            path=root / CARD,
            found=names[twice],
            fix="correct it, or take all together with --split none",
        )
    return Found(splits, len(names) - len(taken))


def _matching(root: Path, names: Sequence[str], subset: Subset, split: str) -> Split:
    number_of = {name: number for number, name in enumerate(names)}
    parts = [name.split("/") for name in names]
    numbers: set[int] = set()
    for path in subset.patterns[split]:
        pattern = posixpath.normpath(f"{subset.folder}/{path}".lstrip("/"))
        if _has_wildcard(pattern):
            found = {n for n, name in enumerate(parts) if _fits(pattern.split("/"), name)}
        else:
            found = {number_of[pattern]} if pattern in number_of else set()
        if not found:
            raise SourceError(
                "files named in the repository's README.md are missing",
                path=root / CARD,
                expected=path,
                fix="get all of the repository (git lfs pull, or huggingface_hub.snapshot_download)"
                ", or take what is there with --split none",
            )
        numbers |= found
    return Split("", sorted(numbers))


def _has_wildcard(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def _fits(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """Whether a path matches an fsspec pattern, as used by `datasets`; both split at slashes."""
    at = {0}  # the numbers of leading path parts that the pattern so far can match
    for part in pattern:
        if part == "**":
            at = set(range(min(at), len(name) + 1)) if at else at
        else:
            at = {n + 1 for n in at if n < len(name) and fnmatch.fnmatchcase(name[n], part)}
    return len(name) in at


def _chosen(root: Path, subset: str) -> Subset | None:
    """Return the requested subset, or the only one; None if README.md has no subsets."""
    subsets = read_subsets(root)
    if subset in subsets:
        return subsets[subset]
    if subset:
        raise UsageError(
            f"the repository has no subset {subset!r}",
            path=root / CARD if subsets else root,
            found=", ".join(subsets) or "none in README.md",
            fix="give the folder alone, or FOLDER#SUBSET",
        )
    if len(subsets) > 1:
        ways = [f"'{root}#{name}'" for name in subsets]
        raise UsageError(
            "the repository has several subsets, which are datasets of their own",
            path=root / CARD,
            found=", ".join(list(subsets)[:5]),
            fix=f"give one of them: {', '.join(ways[:5])}; or take all together with --split none",
        )
    return next(iter(subsets.values()), None)


def check_images(root: Path, found: Collection[str], subset: str) -> None:
    """Compare the splits of images, `found` by folder names, with those in README.md, if any.

    Raises UsageError if README.md has several subsets, or splits that the folders do not show.
    """
    subsets = read_subsets(root)
    if len(subsets) > 1 or subset:
        raise UsageError(
            "subsets of an image repository can only be selected by their folders",
            path=root / CARD,
            found=", ".join(list(subsets)[:5]),
            fix="give the folder of one of them, or take all together with --split none",
        )
    splits = [split for one in subsets.values() for split in one.patterns if split]
    told = {KINDS.get(split, split) for split in splits}
    if len(told) > 1 and told != {KINDS.get(split, split) for split in found}:
        raise UsageError(
            "the splits in README.md do not match the names of the repository's folders",
            path=root / CARD,
            expected=", ".join(splits),
            found=", ".join(filter(None, found)) or "none by name",
            fix="give the folder of one split, or take all together with --split none",
        )


def lists_files(root: Path) -> bool:
    """Return whether README.md says which files are data, if it can be understood."""
    try:
        return any(subset.patterns or subset.folder for subset in read_subsets(root).values())
    except UsageError:  # raised again when the splits are determined
        return False


def read_subsets(root: Path) -> dict[str, Subset]:
    """Return the subsets, by name, under `configs:` in the YAML front matter of a README.md."""
    front = re.match(r"---\s*\n(.*?)\n---", _text_of(root / CARD), re.DOTALL)
    block = re.search(r"^configs:[^\n]*\n((?:[-\s#][^\n]*\n?)*)", front[1] if front else "", re.M)
    if block is None:
        return {}
    found = _parsed(block[0])
    if isinstance(found, str):
        raise UsageError(
            "the configs in the repository's README.md cannot be parsed",
            path=root / CARD,
            found=found[:200],
            expected="a list of config_name and data_files, in YAML",
            fix="correct them, or take all files together with --split none",
        )
    return found


@functools.lru_cache(maxsize=1)  # called several times, and parsing 1 MB takes seconds
def _parsed(block: str) -> dict[str, Subset] | str:
    """Return the subsets, or a text saying why they cannot be parsed."""
    try:
        parsed = parse_yaml(block, "text", "the list of files in the README.md of a Hub repository")
        found = {s.name: s for s in map(_subset, parsed["configs"] or ())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    every = (path for one in found.values() for paths in one.patterns.values() for path in paths)
    if sum(map(_has_wildcard, every)) > _MAX_PATTERNS:
        return f"more than {_MAX_PATTERNS:,} patterns"
    return found


def _subset(entry: dict[str, Any]) -> Subset:
    files = entry.get("data_files", [])
    if all(isinstance(item, dict) for item in files):
        splits = {_word(item["split"]): list(_paths(item["path"])) for item in files}
    else:
        splits = {"": list(_paths(files))}
    if bad := next((split for split in splits if split and not is_safe(split, flat=True)), None):
        raise ValueError(f"a split {bad!r}, which is not {FLAT}")
    folder = _word(entry.get("data_dir") or "").strip("./")
    return Subset(_word(entry["config_name"]), splits, folder)


def _paths(value: Any) -> Iterator[str]:
    for path in [value] if isinstance(value, str) else value:
        if not isinstance(path, str):
            raise TypeError(f"a path {_word(path):.60}")
        yield path


def _word(value: Any) -> str:
    """A name as text. Lists are not shown: a few aliases in YAML can stand for 10^11 words."""
    if isinstance(value, list | tuple | dict | set):
        raise TypeError(f"a {type(value).__name__} in place of a name or a path")
    return str(value)


def shown_images(folder: Path) -> frozenset[str]:
    """Return the images shown in a folder's README.md, as paths relative to the folder."""
    found = _SHOWN.findall(_text_of(folder / CARD))
    return frozenset(posixpath.normpath(unquote(name)) for name in found)


def _text_of(path: Path) -> str:
    if not path.is_file():
        return ""
    return fs.read(path, _CARD_BYTES).decode("utf-8", "replace")
