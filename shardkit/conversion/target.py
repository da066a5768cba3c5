"""The output of a conversion: a folder of shards, or one shard that is a dataset by itself."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit import manifest as manifests
from shardkit import storage
from shardkit.errors import OutputError, UsageError
from shardkit.formats import FORMATS, format_of, get_format
from shardkit.formats.base import Joins
from shardkit.names import FLAT, is_safe
from shardkit.patterns import is_pattern
from shardkit.remote.path import RemotePath
from shardkit.remote.store import together


@dataclass(frozen=True)
class Target:
    """Where a dataset goes; `single` if that is one shard and not a folder of them."""

    path: Path
    format: str
    single: bool = False

    @classmethod
    def of(cls, out: str | os.PathLike[str], format: str) -> Target:
        """The target that a path stands for. Raises UsageError for a name that none may have."""
        path = storage.output(out)
        return cls(path, format, _is_single(path, format))

    @property
    def absolute(self) -> Path:
        return storage.absolute(self.path)

    @property
    def working_folder(self) -> Path:
        """Where the conversion works until the target is whole."""
        return self.absolute.with_name(self.absolute.name + ".partial")

    @property
    def stem(self) -> str | None:
        """The name of the only shard without its suffix, where the target is that shard."""
        suffix = FORMATS[self.format].suffixes[0]
        return self.absolute.name[: -len(suffix)] if self.single else None

    def one_shard(self, bounded: bool) -> bool:
        """Whether all there is goes into one shard, if the shards' size is `bounded` or not."""
        if self.single and bounded:
            raise UsageError(
                "an output that is one shard has no bound", fix="give a folder with -o"
            )
        return self.single or (FORMATS[self.format].one_shard and not bounded)

    def list_path(self, folder: Path, name: str) -> Path:
        """Where the manifest or a list (errors.jsonl) of the dataset in `folder` belongs."""
        if self.single:
            return manifests.beside(folder / self.absolute.name, name)
        return folder / manifests.FOLDER / name

    @property
    def folder(self) -> Path:
        """The folder that the names in the manifest are relative to."""
        return self.absolute.parent if self.single else self.absolute

    @property
    def is_unfinished(self) -> bool:
        """Whether a run has begun to write there: in a store, where nothing can be renamed."""
        path = self.list_path(self.folder, manifests.UNFINISHED)
        return isinstance(path, RemotePath) and path.is_file()

    def is_empty(self) -> bool:
        """Whether there is nothing yet, or nothing that anybody has completed."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return True
        return self.is_unfinished and not manifests.has_manifest(self.path)

    def check(self, sources: Iterable[Path]) -> None:
        """Raise OutputError for a target in a source, or where something is that is not ours."""
        remote = isinstance(self.path, RemotePath)
        self._check_apart([one for one in sources if isinstance(one, RemotePath) == remote])
        parent = self.absolute.parent
        if not remote and not parent.is_dir():
            raise OutputError("the folder that would hold the output does not exist", path=parent)
        if self.single and not remote:
            refuse_others(parent / manifests.FOLDER)
        if isinstance(self.path, RemotePath):
            together(self.path.store.find, {path.key for path in self._asked_for()})
        with storage.explained("look at", self.path):
            self._check_existing()

    def refuse_newcomer(self, overwrite: bool) -> None:
        """Raise OutputError for what came there while a run worked; a dataset may `overwrite`."""
        found = "a dataset"
        try:
            self.check([])
            if overwrite or self.is_empty():
                return
        except OutputError as error:
            found = f"{error.what}: {error.found}" if error.found else error.what
        raise OutputError(
            "something came to the output while this run worked, which would replace it",
            path=self.path,
            found=found,
            fix="move it away, or replace a dataset with --overwrite, and repeat the command: a"
            f" conversion goes on with what is done, in {self.working_folder}",
        )

    def _asked_for(self) -> Iterator[RemotePath]:
        """The objects that are looked for before the work begins: asked for at the same time."""
        out = self.path
        for path in (out, *manifests.manifest_paths(out)):
            assert isinstance(path, RemotePath)
            yield path
        mark = self.list_path(self.folder, manifests.UNFINISHED)
        assert isinstance(mark, RemotePath)
        yield mark

    def _check_apart(self, sources: Iterable[Path]) -> None:
        own = [(path, _real(path)) for path in (self.path, self.working_folder)]
        for source in sources:
            real_source = _real(source)
            for path, real in own:
                if real_source in (real, *real.parents) or real in real_source.parents:
                    raise OutputError(
                        "the output and the source must not lie inside one another",
                        path=path,
                        found=f"source {source}",
                        fix="give another folder with -o",
                    )

    def _check_existing(self) -> None:
        out = self.path
        if self.is_unfinished:  # all of it is ours
            return
        if out.is_symlink() and not out.exists():
            raise OutputError("the output is a link that leads nowhere", path=out, fix="remove it")
        exists = out.exists()
        if not exists and not self.single:
            return
        if self.single and exists and manifests.single_manifest(out) is None:
            raise OutputError(
                "the output exists and is not known to be ours",
                path=out,
                expected=f"{manifests.FOLDER}/{manifests.beside(out).name} beside it",
                fix="move it away, or give another name with -o",
            )
        if self.single and not exists and not self.working_folder.exists():
            for path in filter(Path.exists, self._lists_beside()):
                raise file_in_the_way(path, "move it away, or give another name with -o")
        if not self.single and (out.is_file() or not out.is_dir()):
            raise OutputError("the output is a file", path=out, fix="give a folder with -o")
        if out.is_dir() and not manifests.has_manifest(out) and any(out.iterdir()):
            raise OutputError(
                "the output folder holds something that is not a dataset of ours",
                path=out,
                found=", ".join(sorted(p.name for p in out.iterdir())[:3]),
                fix="give another folder with -o; --overwrite replaces datasets only",
            )

    def _lists_beside(self) -> Iterator[Path]:
        for name in (manifests.NAME, manifests.ERRORS, manifests.FILTERED, manifests.KEYS):
            yield manifests.beside(self.path, name)


def _real(path: Path) -> Path:
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def file_in_the_way(path: Path, fix: str) -> OutputError:
    """The error for a file that is not ours where one of the output must go."""
    return OutputError(
        "a file stands where one that belongs to the output must go", path=path, fix=fix
    )


def default_output(sources: Sequence[Path], format: str) -> Path:
    """`<name>-<format>` beside the only source, or in the current folder if that is a URL."""
    if not sources:
        raise UsageError("a sequence needs an output folder", fix="pass out=")
    source = sources[0]
    if len(sources) > 1:
        raise UsageError("several sources need an output", fix="give -o OUT")
    if is_pattern(source):
        raise UsageError("a pattern of shards needs an output", path=source, fix="give -o OUT")
    if source.name in ("", "..", "."):
        source = source.resolve()
    inside = [declared.inside for declared in FORMATS.values() if declared.inside]
    if source.is_file() and f"/{source.name}" in inside:  # the file in a shard that is a folder
        source = source.resolve().parent
    folder = Path() if isinstance(source, RemotePath) else source.parent
    if source.is_file():
        from shardkit.sources.text.names import parse_name

        text = parse_name(source.name)
        if text is not None:
            return folder / f"{text.stem}-{format}"
    suffixes = [suffix for declared in FORMATS.values() for suffix in declared.suffixes]
    found = [s for s in suffixes if len(source.name) > len(s) and source.name.endswith(s)]
    return folder / f"{source.name.removesuffix(max(found, key=len, default=''))}-{format}"


def refuse_others(path: Path) -> None:
    """Raise OutputError for a folder to write into that somebody else may have put there.

    It must not be a link, and must belong to us or to the owner of the folder above it, who can do
    anything there (on shared and mapped file systems we may be that owner). A folder that does not
    exist is fine: another process may remove it at any moment.
    """
    with storage.explained("look at", path):
        try:
            about, above = path.lstat(), path.parent.stat()
        except FileNotFoundError:
            return
    if stat.S_ISLNK(about.st_mode):
        raise not_ours(path, f"a link to {os.readlink(path)!r}")
    if hasattr(os, "geteuid") and about.st_uid not in (os.geteuid(), above.st_uid):
        raise not_ours(path, f"it belongs to the user {about.st_uid}")


def not_ours(path: Path, found: str) -> OutputError:
    return OutputError(
        "a folder for files of shardkit is, or holds, what somebody else may have put there",
        path=path,
        found=found,
        fix="remove it, or give another output with -o, in a folder of your own",
    )


def _is_single(out: Path, format: str) -> bool:
    """Whether an output's name says that it is to be one shard, and no folder of them."""
    suffix = FORMATS[format].suffixes[0]
    can = FORMATS[format].single and isinstance(get_format(format), Joins)
    if not can or not out.name.lower().endswith(suffix):
        _refuse_suffix(out, format)
        return False
    if not out.name.endswith(suffix):
        raise UsageError(
            "the suffix of an output is in lower case", found=out.name, expected=f"...{suffix}"
        )
    if not is_safe(out.name, flat=True):  # a manifest names it, and readers would refuse that
        raise UsageError(
            "the output has a name that no dataset may have", found=out.name, expected=FLAT
        )
    return out.name != suffix


def _refuse_suffix(out: Path, format: str) -> None:
    """Raise UsageError for a folder that would be called like a shard of some format."""
    other = format_of(out)
    if other is None or (other == format and FORMATS[format].below):
        return
    single = isinstance(get_format(format), Joins)
    own = f"{out.name.partition('.')[0] or 'train'}{FORMATS[format].suffixes[0]}"
    raise UsageError(
        "the output is called like a file of another kind",
        path=out,
        expected=f"a name for a folder{f', or {own} for a single shard' if single else ''}",
        found=f"a name of --to {other}, and --to {format}"
        if other != format
        else f"a suffix of --to {format} that is read and not written",
        fix=f"give -o another name{'' if other == format else f', or --to {other}'}",
    )
