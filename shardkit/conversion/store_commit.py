"""Publishes a dataset to a store, object by object; the object that makes it readable comes last.

This is the manifest or, for an output that is one shard, the shard. Before any object of the output
changes, a mark is written next to each manifest. A folder with a mark but without a manifest is not
a dataset, whatever it contains, and the next run knows that it may remove everything in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypedDict

from shardkit.conversion.target import Target, file_in_the_way
from shardkit.errors import ShardkitError
from shardkit.helpers.checked import checked, parse
from shardkit.helpers.names import is_safe
from shardkit.metadata import manifest as manifests
from shardkit.metadata.manifest import Splits
from shardkit.storage import fs
from shardkit.storage.remote import store as stores
from shardkit.storage.remote.path import RemotePath


class Placed(NamedTuple):
    """A file of the new dataset that is in the store already, under another name."""

    path: RemotePath
    bytes: int


class _Mark(TypedDict):
    """The contents of a mark."""

    names: list[str]  # of the objects that a run wrote to the output, or found there


class StoreCommit:
    """Publishes a dataset as the output. Each step can be repeated, also by another run."""

    def __init__(self, target: Target, check: Callable[[], None]) -> None:
        """`check` raises if another run has taken over."""
        assert isinstance(target.folder, RemotePath)
        self._target = target
        self._folder: RemotePath = target.folder
        self._check = check

    def publish(
        self,
        dataset: Path,
        placed: Mapping[Path, Placed],
        copied: Callable[[int, int], object],
        overwrite: bool,
    ) -> list[RemotePath]:
        """Publish the files in the folder `dataset`, and those already `placed` in the store.

        Returns the marks, which the caller removes. Progress is reported to `copied`, as the number
        of bytes just copied, and in total.
        """
        out = self._target.path
        assert isinstance(out, RemotePath)
        now = RemotePath(out.store.anew(), out.key)  # without what was cached when the run began
        replace(self._target, path=now).refuse_newcomer(overwrite)
        new: dict[str, Path | Placed] = {
            path.relative_to(dataset).as_posix(): path
            for path in sorted(dataset.rglob("*"))
            if path.is_file()
        }
        new |= {path.relative_to(dataset).as_posix(): where for path, where in placed.items()}
        self._check()
        old = self._old_names(new)
        marks = self._marks({*old, *new})
        text = json.dumps({"names": sorted(filter(is_safe, {*old, *new}))}).encode()
        for mark in marks:
            self._check()
            fs.put(text, mark)
        for names in reversed(self._by_rank(old)):
            stores.together(self._delete, names)
        sizes = {name: _size(what) for name, what in new.items()}
        copied(0, total := sum(sizes.values()))
        for names in self._by_rank(new):
            stores.together(
                lambda name: self._put(name, new[name]),
                names,
                lambda name: copied(sizes[name], total),
            )
        return marks

    def marks(self) -> list[RemotePath]:
        """The marks left by a run that was killed after the dataset was complete."""
        names = () if self._target.single else self._listed()
        ends = f"{manifests.FOLDER}/{manifests.UNFINISHED}"
        listed = [self._folder / name for name in names if name.endswith(ends)]
        return [*listed, *self._marks(())]

    def _put(self, name: str, what: Path | Placed) -> None:
        self._check()
        if isinstance(what, Placed):
            fs.copy(what.path, self._folder / name, what.bytes)
        else:
            fs.put(what, self._folder / name)

    def _delete(self, name: str) -> None:
        self._check()
        fs.delete(self._folder / name)

    def _by_rank(self, names: Iterable[str]) -> list[list[str]]:
        """Names in the order of writing: first files, then manifests of splits, then the top one
        (or the only shard)."""
        ranks: list[list[str]] = [[], [], []]
        for name in sorted(names):
            if self._target.single:
                rank = 2 if name == self._target.path.name else 0
            else:
                folder = _dataset_of(name)
                rank = 0 if folder is None else 1 if folder else 2
            ranks[rank].append(name)
        return ranks

    def _marks(self, names: Iterable[str]) -> list[RemotePath]:
        """A mark for the output, and for each of its splits."""
        own = self._target.list_path(Path(), manifests.UNFINISHED).as_posix()
        found = {own}
        if not self._target.single:
            folders = {folder for name in names if (folder := _dataset_of(name)) is not None}
            found |= {f"{folder}{manifests.FOLDER}/{manifests.UNFINISHED}" for folder in folders}
        return [self._folder / name for name in sorted(found)]

    # --- the dataset that is replaced

    def _old_names(self, new: Iterable[str]) -> set[str]:
        """Names of objects of the old dataset, and of a run that was killed while publishing."""
        names = self._marked()
        if not self._target.single:
            names |= self._listed() | self._in_manifests()
            return {n for n in names if n.rpartition("/")[2] != manifests.UNFINISHED}
        names |= self._target.names_of_old()
        for name in new:
            if name not in names and self._folder.store.find((self._folder / name).key):
                fix = "move it away, and run the same command again: it continues where it stopped"
                raise file_in_the_way(self._folder / name, fix)
        return names

    def _listed(self) -> set[str]:
        start = len(self._folder.key) + 1
        return {key[start:] for key in self._folder.store.keys(self._folder.key)}

    def _marked(self) -> set[str]:
        path = self._target.list_path(self._folder, manifests.UNFINISHED)
        assert isinstance(path, RemotePath)
        found = path.store.read_tagged(path.key)
        if found is None:
            return set()
        try:
            return {*filter(is_safe, checked(_Mark, parse(found[0]))["names"])}
        except ValueError:  # not a mark of ours: the listing decides what to remove
            return set()

    def _in_manifests(self) -> set[str]:
        """The names in the manifests of the old dataset, which a listing may not show yet."""
        names: set[str] = set()
        try:
            top = manifests.load_any(self._target.path)
            splits = [*top.splits] if isinstance(top, Splits) else []
            names |= {_MANIFEST, *(file.name for file in top.files)}
            for part in splits or [""]:
                one = manifests.load(self._target.path / part)
                files = [_MANIFEST, *(f.name for f in (*one.all_files(), *one.files))]
                names |= {f"{part}/{name}".lstrip("/") for name in files}
        except ShardkitError:  # there is no manifest, or it is damaged
            pass
        return names


def _size(what: Path | Placed) -> int:
    return what.bytes if isinstance(what, Placed) else what.stat().st_size


_MANIFEST = f"{manifests.FOLDER}/{manifests.NAME}"


def _dataset_of(name: str) -> str | None:
    """If an object is a manifest, the folder of its dataset: "", or with a trailing slash.

    Also recognizes the manifest's name in earlier versions.
    """
    for manifest in (_MANIFEST, manifests.OLD_NAME):
        if f"/{name}".endswith(f"/{manifest}"):
            return name.removesuffix(manifest)
    return None
