"""Publishes the dataset in the working folder as the output, in place of an old output.

Every step can be repeated: if a run dies here, the next one can finish publishing, or restore the
old dataset.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardkit.conversion.target import Target, file_in_the_way, refuse_others
from shardkit.metadata import manifest as manifests
from shardkit.storage import fs

DATASET = "dataset"
REPLACED = "replaced"
COPY = "copy"


class Commit:
    """Moves `dataset/` to the target, and an old dataset to `replaced/`, each by one rename."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._out = target.absolute
        self._folder = self._out.parent
        self._dataset = target.working_folder / DATASET
        self._replaced = target.working_folder / REPLACED

    def publish(self, overwrite: bool) -> None:
        """Publish the dataset, after moving an old dataset aside."""
        fs.sync(self._dataset)
        self._target.refuse_newcomer(overwrite)
        self._check()
        if self._out.exists():
            fs.remove(self._replaced)
            self._put_aside()
        self._move()
        fs.sync(self._folder)

    def restore(self) -> None:
        """Restore the old dataset, if a run died after it was moved aside."""
        if self._replaced.exists() and not self._out.exists():
            self._put_back()

    def _check(self) -> None:
        """Raise OutputError if something else is in the way."""

    def _put_aside(self) -> None:
        fs.rename(self._out, self._replaced)

    def _put_back(self) -> None:
        fs.rename(self._replaced, self._out)

    def _move(self) -> None:
        fs.rename(self._dataset, self._out)


class SingleCommit(Commit):
    """The same for a single file: the files that belong next to it are copied one by one, and then
    the file itself is moved."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._own = self._folder / manifests.FOLDER  # of its manifest and lists
        self._copy = target.working_folder / COPY

    def _check(self) -> None:
        """Raise OutputError if an unrelated file has the name of a file to be published."""
        old = self._names_of_old()
        for name in self._out_last(self._dataset):
            path, new = self._folder / name, self._dataset / name
            if name in old | {self._out.name} or not os.path.lexists(path):
                continue
            if not path.is_file() or fs.checksum(path) != fs.checksum(new):
                raise file_in_the_way(
                    path, "move it away and repeat the command: it continues where it stopped"
                )

    def _put_aside(self) -> None:
        names = self._names_of_old() - {self._out.name}
        fs.make_folder(self._replaced / manifests.FOLDER)
        for name in [self._out.name, *sorted(names)]:
            if (self._folder / name).exists():
                fs.rename(self._folder / name, self._replaced / name)
        fs.sync(self._replaced)

    def _put_back(self) -> None:
        self._make_own_folder()
        for name in self._out_last(self._replaced):
            fs.rename(self._replaced / name, self._folder / name)

    def _move(self) -> None:
        """Copy the small files, so that the originals remain if a run dies here; move the shard."""
        *others, out = self._out_last(self._dataset)
        self._make_own_folder()
        for name in others:
            original = self._dataset / name
            with fs.create(self._copy) as file:
                fs.append(file, original, original.stat().st_size)
            fs.sync(self._copy)
            fs.rename(self._copy, self._folder / name)
        fs.sync(self._own)
        fs.rename(self._dataset / out, self._out)

    def _make_own_folder(self) -> None:
        fs.make_folder(self._own)
        refuse_others(self._own)

    def _names_of_old(self) -> set[str]:
        """The names of all that belongs to the single file that is replaced."""
        if not self._out.exists():
            return set()
        own = manifests.FOLDER + "/"
        names = self._target.names_of_old(self._out_last(self._dataset))
        return {name if name.startswith(own) else name.partition("/")[0] for name in names}

    def _out_last(self, folder: Path) -> list[str]:
        """The names in a folder and in its __shardkit__, with the target's file at the end."""
        names = {path.name for path in folder.iterdir()}
        if manifests.FOLDER in names:
            ours = (folder / manifests.FOLDER).iterdir()
            names |= {f"{manifests.FOLDER}/{path.name}" for path in ours}
        return [*sorted(names - {self._out.name, manifests.FOLDER}), self._out.name]
