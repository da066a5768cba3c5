"""Finds out what a folder without a manifest contains: shards, images, text or unsupported data."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.codecs.media import ARCHIVES, ARRAYS, IMAGES, Kind
from shardkit.codecs.media import kind_by_name as media_by_name
from shardkit.dataset.card import CARD, OUTSIDE, lists_files, shown_images, splits_of
from shardkit.errors import DamagedError, FormatError, UsageError
from shardkit.formats import FORMATS, format_of, get_format, unsupported
from shardkit.formats.table_folders import refuse_table, without_partitions
from shardkit.formats.unsupported import kind_by_name, kind_of_folder, not_read
from shardkit.metadata import manifest as manifests
from shardkit.metadata.splits import KINDS, common_start, in_order, refuse_synonyms
from shardkit.sample import stem_of
from shardkit.storage import fs
from shardkit.storage.patterns import expand
from shardkit.storage.walk import DirEntry, Walk, kind_of_file

# Cached results of `map` and `filter`, which Hugging Face datasets stores beside the dataset.
_CACHE = re.compile(r"(cache-[0-9a-f]+(_\d+_of_\d+)?|tmp\w+)\.arrow")
_IMAGES = tuple(f".{suffix}" for suffix, _ in IMAGES.suffixes)


@dataclass
class Contents:
    """The files below a folder, by kind. Names are relative to the folder."""

    root: Path
    shards: dict[str, str] = field(default_factory=dict)  # name -> format
    images: list[str] = field(default_factory=list)  # one image per folder that has any
    media: Counter[Kind] = field(default_factory=Counter)  # number of files of each kind
    text_files: int = 0  # except those that have the same name as an audio or video file
    unsupported: dict[unsupported.Kind, list[str]] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)  # empty folders
    ignored: Counter[str] = field(default_factory=Counter)  # files that are not shards, by kind
    beside: list[str] = field(default_factory=list)  # subfolders that were not walked
    listed: bool = False  # whether README.md says which files are data

    def add_images(self, names: Sequence[str]) -> None:
        """Record the images of one folder."""
        if names:
            self.media[IMAGES] += len(names)
        self.images += names[:1]

    @property
    def image_files(self) -> int:
        return self.media[IMAGES]

    @property
    def at_top(self) -> bool:
        """Whether there are shards in the folder itself, not only in subfolders."""
        return any(_holder(name, format) == "" for name, format in self.shards.items())


def look_into(
    root: Path, is_text: Callable[[str], bool] = lambda name: False, without: str | None = None
) -> Contents:
    """Classify the files in a folder, and in its subfolders unless it contains shards itself.

    If README.md lists the data files, subfolders are always included. `without` is a file to leave
    out: the table of `--metadata`. Images shown in README.md are not data if there are other data.
    """
    found, walk = Contents(root, listed=lists_files(root)), Walk(root, without)
    shown = shown_images(root)
    about: list[str] = []
    unpaired: dict[str, str] = {}
    for folder, entries, folders in walk:
        # Images are ignored here, as there may be millions of them.
        names = [e.name for e in entries if not e.name.lower().endswith(_IMAGES)]
        below_here = {below.relative.rpartition("/")[2] for below in folders}
        refuse_table(root / folder.relative, names, below_here, top=not folder.relative)
        found.empty += [] if entries or folders or not folder.relative else [folder.relative]
        listed = _listed_among(names, root / folder.relative)
        shards = _shards_among(names, below_here)
        if len(names) < len(entries) or folders:
            shards.pop("metadata.parquet", None)  # metadata of the images here or below
        paired = {name for name, format in shards.items() if FORMATS[format].needs} | listed.keys()
        shards = _whole(root / folder.relative, names, shards | listed)
        prefix = f"{folder.relative}/" if folder.relative else ""
        together = kind_of_folder(names)
        if len(names) < len(entries):
            images = [prefix + e.name for e in entries if e.name.lower().endswith(_IMAGES)]
            about += [name for name in images if name in shown]
            found.add_images([name for name in images if name not in shown] if shown else images)
        media = _media_among(names, entries, is_text)
        found.media.update(media.values())
        clips = {stem_of(name) for name, kind in media.items() if kind is not ARRAYS}
        for name in names:
            if _belongs_to(name, shards):
                continue
            kind = together or kind_by_name(name)
            if kind is not None and name not in paired:
                found.unsupported.setdefault(kind, []).append(prefix + name)
            elif name in shards:
                found.shards[prefix + name] = shards[name]
                continue
            elif (format := format_of(Path(name))) and FORMATS[format].needs:
                unpaired[prefix + name] = format
            elif is_text(name):
                stem, _, suffix = name.rpartition(".")
                found.text_files += not (suffix in ("txt", "json") and stem in clips)
            found.ignored[kind_of_file(name)] += 1
        if found.shards and not folder.relative and not found.listed:
            found.beside = sorted(below.relative for below in folders)
            found.ignored.update("folder" for _ in folders)
            break
    _add_rest(found, walk, about, only_card=found.text_files <= is_text(CARD))
    if unpaired and not found.shards and not found.unsupported:
        found.shards = unpaired  # opening them raises an error that says what is missing
    return found


def _add_rest(found: Contents, walk: Walk, about: list[str], *, only_card: bool) -> None:
    """Count what the walk ignored, and the images shown in README.md if there are other data."""
    if found.shards:
        found.ignored += walk.ignored
    if found.shards or not only_card:
        found.ignored.update(map(kind_of_file, about))
    else:
        found.add_images(about)
    if walk.problems and not (found.ignored or found.shards or found.media):
        raise walk.problems[0]


def _media_among(
    names: Sequence[str], entries: Sequence[DirEntry], is_text: Callable[[str], bool]
) -> dict[str, Kind]:
    """The files in a folder that may be samples, without arrays that accompany another file."""
    kinds = {name: media_by_name(name) for name in names}
    media = {name: kind for name, kind in kinds.items() if kind and kind is not ARCHIVES}
    if ARRAYS in media.values():
        others = (e.name for e in entries if media_by_name(e.name) is not ARRAYS)
        beside = (name for name in others if media_by_name(name) or is_text(name))
        there = {name.rpartition(".")[0] for name in beside}
        media = {n: k for n, k in media.items() if k is not ARRAYS or n[:-4] not in there}
    return media


def _belongs_to(name: str, shards: Mapping[str, str]) -> bool:
    """Return whether a file is the index or the lock file of one of the shards."""
    return any(
        name.endswith(ending) and name.removesuffix(ending) + of in shards
        for declaration in FORMATS.values()
        for ending, of in declaration.beside.items()
    )


def _shards_among(names: Sequence[str], folders: set[str]) -> dict[str, str]:
    """The shards among files: no caches, tables of img2dataset, or .bin files without .idx."""
    every = {name: format for name in names if (format := format_of(Path(name)))}
    beside = {name.rpartition(".")[0] for name in names if name.endswith((".tar", ".tfrecord"))}
    beside |= {name for name in folders if name.isdigit()}
    there, hub = {*names}, "dataset_info.json" in names  # prepared by Hugging Face datasets
    return {
        name: format
        for name, format in every.items()
        if not (format == "parquet" and name.removesuffix(".parquet") in beside)
        and not (hub and _CACHE.fullmatch(name))
        and (not (needs := FORMATS[format].needs) or name.rpartition(".")[0] + needs in there)
    }


def _whole(folder: Path, names: Sequence[str], shards: dict[str, str]) -> dict[str, str]:
    """The shards. Raises DamagedError for an index of Megatron without its .bin beside others."""
    there = {*names}
    for name in names if "megatron" in shards.values() else ():
        if name.endswith(".idx") and not _belongs_to(name, shards):
            missing = f"{name.removesuffix('.idx')}.bin"
            if missing not in there:
                raise DamagedError("a shard is missing that has an index", path=folder / missing)
    return shards


def _listed_among(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the files in a folder that are listed as shards by a file in it, with their format."""
    if not any(declared.listing in names for declared in FORMATS.values()):
        return {}
    format, listed = listed_shards(folder) or ("", [])
    missing = [name for name in listed if name not in {*names}]
    if missing:
        raise DamagedError(
            f"a shard is missing that {FORMATS[format].listing} lists",
            path=folder / missing[0],
            expected=f"{len(listed):,} shards",
            found=f"{len(listed) - len(missing):,}",
        )
    return dict.fromkeys(listed, format)


def _holder(name: str, format: str) -> str:
    """The folder that a shard belongs to. A shard may be a folder, or in a dataset's subfolder."""
    above = posixpath.dirname(name)
    declared = FORMATS[format]
    own = (declared.below, declared.listing) if declared.below else ()
    inner = declared.inside or posixpath.basename(above) in own
    return posixpath.dirname(above) if inner and above else above


def media_of(found: Contents) -> Kind | None:
    """Return the kind of files that are the samples of a folder without shards; None for text.

    Images have priority, even if most files are text. A few files of other kinds are ignored;
    raises UsageError if there is more than one per ten samples.
    """
    most = found.media.most_common(1)
    if not most or (not found.image_files and found.text_files > most[0][1]):
        return None
    ((kind, count),) = most
    arrays = 0 if kind is ARRAYS else found.media[ARRAYS]
    if 10 * (sum(found.media.values()) - count - arrays) > count:
        raise UsageError(
            "the folder holds several kinds of files that may be its samples",
            path=found.root,
            found=", ".join(f"{n:,} {each.many}" for each, n in found.media.most_common()),
            expected="images, audio files or videos, with at most one other file per ten of them",
            fix="give a folder that contains only the files you want, or move the others away",
        )
    return kind


def refuse_unsupported(found: Contents) -> None:
    """Raise FormatError for data in an unsupported format, unless there is more supported data.

    Text files count as supported data only for a kind with `files`: beside other kinds, they
    probably just describe the data.
    """
    readable = len(found.shards) or sum(found.media.values())
    for kind, names in found.unsupported.items():
        others = readable or found.text_files
        if len(names) >= others or not (readable or kind.files):
            words = f"{len(names):,} file{'s' * (len(names) > 1)} such as {min(names)!r}"
            fix = ""
            if others:
                words += f", and {others:,} others"
                fix = "to convert only the others, give their own folder or file"
            raise not_read(kind, found.root, words, fix)


def skipped_media(found: Contents) -> tuple[str, ...]:
    """Notes on images, audio and video in other formats, which are ignored beside samples."""
    return tuple(
        f"{len(names):,} file{'s' * (len(names) > 1)} such as {min(names)!r} ignored,"
        f" {kind.words}: {kind.fix}"
        for kind, names in found.unsupported.items()
        if kind.files
    )


def refuse_empty_splits(found: Contents) -> None:
    """Raise UsageError if the folder of a split is empty."""
    for folder in sorted(found.empty):
        if posixpath.basename(folder).lower() in KINDS:
            raise UsageError(
                f"the folder of the split {posixpath.basename(folder)!r} is empty",
                path=found.root / folder,
                fix="remove it, put its files there, or take all together with --split none",
            )


def shards_by_split(
    found: Contents, *, together: bool = False, subset: str = ""
) -> dict[str, list[str]]:
    """The shards of a folder by split; `{"": shards}` if their names contain at most one split.

    `together`: return all of them as one. `subset`: only the shards of this subset in README.md.
    Raises FormatError for shards of several formats or datasets, UsageError for ambiguous names.
    """
    top = {name: format for name, format in found.shards.items() if not _holder(name, format)}
    names = sorted(top if top and not found.listed else found.shards)
    formats = sorted({found.shards[name] for name in names})
    if len(formats) > 1:
        raise FormatError(
            "the folder holds shards of several formats",
            path=found.root,
            found=", ".join(formats),
            fix="give one of the shards, or a folder with shards of one format",
        )
    if made := _datasets_among(found, names):
        raise _several(found.root, "datasets", made)
    if together and not subset:
        return {"": names}
    splits, others = splits_of(found.root, names, subset=subset)
    every = {split: [names[n] for n in numbers] for split, (_, numbers) in splits.items()}
    if others:
        found.ignored[OUTSIDE] += others
    if together:
        every = {"": sorted(name for split in every.values() for name in split) or names}
    elif len(every) < 2:
        every = {"": next(iter(every.values()), names)}
    for split_names in every.values() if not found.listed else ():
        holders = (_holder(name, found.shards[name]) for name in split_names)
        folders = dict.fromkeys(map(without_partitions, holders))
        if len(folders) > 1:
            raise _several(found.root, "shards", list(folders))
    return every


def datasets_of_splits(found: Contents) -> dict[str, str]:
    """The folders of datasets by split, if all are named after splits and there is nothing else.

    Raises UsageError if two of them are the same split.
    """
    made = _datasets_among(found, found.shards)
    named = {posixpath.basename(folder).lower(): folder for folder in made}
    holders = {_holder(name, format) for name, format in found.shards.items()}
    one_above = len({posixpath.dirname(folder) for folder in made}) == 1
    if len(named) < 2 or set(made) != holders or not one_above or not set(named) <= set(KINDS):
        return {}
    refuse_synonyms(found.root, named)
    return {split: named[split] for split in in_order(named)}


def _datasets_among(found: Contents, names: Iterable[str]) -> list[str]:
    """Return the folders of shards that are datasets: those with a manifest or a list of shards."""
    holders = dict.fromkeys(_holder(name, found.shards[name]) for name in sorted(names))
    return [
        folder
        for folder in filter(None, holders)
        if manifests.has_manifest(found.root / folder) or listed_shards(found.root / folder)
    ]


def listed_shards(folder: Path) -> tuple[str, list[str]] | None:
    """The format and the shards of a folder in which a file lists the shards (`Format.listed`)."""
    there: dict[str, bool] = {}
    for name, declaration in FORMATS.items():
        if file := declaration.listing:
            if file not in there:  # several formats may have a file of that name
                there[file] = (folder / file).exists()
            names = get_format(name).listed(folder) if there[file] else None
            if names is not None:
                return name, names
    return None


def _several(root: Path, what: str, folders: Sequence[str]) -> FormatError:
    above = {folder: posixpath.dirname(folder) for folder in folders if folder}
    of_splits = {up for up in set(above.values()) - {""} if manifests.split_names(root / up)}
    folders = list(dict.fromkeys(up if (up := above.get(f)) in of_splits else f for f in folders))
    ways = [str(root / folder) for folder in folders]
    one = f"the {what.rstrip('s')} is in a subfolder"
    return FormatError(
        one if len(folders) == 1 else f"this folder holds {what} in several folders",
        path=root,
        found=", ".join(folder or "." for folder in folders[:5]),
        fix=f"give {'it' if len(ways) == 1 else 'one of them'}: {', '.join(ways[:5])}",
    )


def way_to(root: Path, names: Sequence[str], others: Iterable[str]) -> str:
    """Return a path that opens these shards and no others: a shard, a folder or a pattern."""
    folder, own = posixpath.dirname(names[0]), set(names)
    rest = [name for name in others if name not in own]
    if len(names) == 1:
        return str(root / names[0])
    if not any(posixpath.dirname(name) == folder for name in rest):
        return str(root / folder)
    begin = common_start(names).rstrip("0123456789")
    suffix = "." + names[0].rpartition(".")[2]
    suffix = suffix if all(name.endswith(suffix) for name in names) else ""  # -00000-of-00010
    if fnmatch.filter(rest, begin + "*" + suffix):
        return str(root / names[0])
    return str(root / (begin + "*" + suffix))


def shards_like(pattern: Path) -> tuple[Path, list[str], str]:
    """Return the folder of the shards that match a pattern, their names in it, and their format."""
    paths = expand(pattern)
    formats = {format_of(path) for path in paths}
    if len(formats) != 1 or None in formats:
        others = [path.name for path in paths if format_of(path) is None]
        raise UsageError(
            "the pattern does not match shards of one format",
            path=pattern,
            found=", ".join([*sorted(filter(None, formats)), *others][:5]),
            fix="give a pattern such as folder/train-*.parquet, in quotes",
        )
    return shards_of(paths)


def shards_of(paths: Sequence[Path]) -> tuple[Path, list[str], str]:
    """Return the same for the paths of shards, which must all have the format of the first one."""
    folder = common_folder(paths)
    return folder, [below(folder, path) for path in paths], format_of(paths[0]) or ""


def common_folder(paths: Sequence[Path]) -> Path:
    """Return the deepest folder that contains all of these files, directly or in subfolders."""
    above = list(dict.fromkeys(path.parent for path in paths))
    if len(above) == 1:
        return above[0]
    above = [fs.absolute(folder) for folder in above]
    folder = above[0]
    while not all(folder in (other, *other.parents) for other in above):
        folder = folder.parent
    return folder


def below(folder: Path, path: Path) -> str:
    """Return a path relative to a folder that contains it, with slashes."""
    if path.parent != folder:
        path = fs.absolute(path)
    return path.relative_to(folder).as_posix()
