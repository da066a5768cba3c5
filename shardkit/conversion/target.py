"""The output of a conversion: a folder of shards, or one shard that is a dataset by itself."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.errors import OutputError, ShardkitError, UsageError
from shardkit.formats import FORMATS, format_of, get_format
from shardkit.formats.base import Joins
from shardkit.helpers import os_errors
from shardkit.helpers.mistyped import tilde
from shardkit.helpers.names import FLAT, is_safe
from shardkit.metadata import manifest as manifests
from shardkit.storage import fs
from shardkit.storage.patterns import is_pattern
from shardkit.storage.remote.path import RemotePath
from shardkit.storage.remote.store import together


@dataclass(frozen=True)
class Target:
    """The path of the output. `single`: it is one shard file instead of a folder of shards."""

    path: Path
    format: str
    single: bool = False

    @classmethod
    def of(cls, out: str | os.PathLike[str], format: str) -> Target:
        """Create the target for an output path. Raises UsageError for an invalid name."""
        path = fs.output(out)
        return cls(path, format, _is_single(path, format))

    @property
    def absolute(self) -> Path:
        return fs.absolute(self.path)

    @property
    def working_folder(self) -> Path:
        """The folder in which the conversion works until the output is complete."""
        return self.absolute.with_name(self.absolute.name + ".partial")

    @property
    def stem(self) -> str | None:
        """The name of a single-shard output without its suffix; None for a folder."""
        suffix = FORMATS[self.format].suffixes[0]
        return self.absolute.name[: -len(suffix)] if self.single else None

    def one_shard(self, bounded: bool) -> bool:
        """Whether all samples go into one shard. `bounded`: the user limits the shard size."""
        if self.single and bounded:
            raise UsageError(
                "the size of a single-shard output cannot be limited", fix="give a folder with -o"
            )
        return self.single or (FORMATS[self.format].one_shard and not bounded)

    def list_path(self, folder: Path, name: str) -> Path:
        """The path of the manifest, or of a list (errors.jsonl), of the dataset in `folder`."""
        if self.single:
            return manifests.beside(folder / self.absolute.name, name)
        return folder / manifests.FOLDER / name

    @property
    def folder(self) -> Path:
        """The folder to which the names in the manifest are relative."""
        return self.absolute.parent if self.single else self.absolute

    @property
    def is_unfinished(self) -> bool:
        """Whether a run has begun to write the output; only in object stores, without renames."""
        path = self.list_path(self.folder, manifests.UNFINISHED)
        return isinstance(path, RemotePath) and path.is_file()

    def is_empty(self) -> bool:
        """Return whether nothing exists at the output yet, or only an incomplete upload."""
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return True
        return self.is_unfinished and not manifests.has_manifest(self.path)

    def check(self, sources: Iterable[Path]) -> None:
        """Raise OutputError if the output overlaps a source, or is not a dataset of shardkit."""
        remote = isinstance(self.path, RemotePath)
        self._check_apart([one for one in sources if isinstance(one, RemotePath) == remote])
        parent = self.absolute.parent
        if not remote and not parent.is_dir():
            fix = tilde(self.path) or f"mkdir -p {shlex.quote(str(parent))}"
            what = "the folder that would hold the output does not exist"
            raise OutputError(what, path=parent, fix=fix)
        if self.single and not remote:
            refuse_others(parent / manifests.FOLDER)
        if isinstance(self.path, RemotePath):
            together(self.path.store.find, {path.key for path in self._asked_for()})
        with os_errors.explained("look at", self.path):
            self._check_existing()

    def refuse_newcomer(self, overwrite: bool) -> None:
        """Raise OutputError if something was put at the output while the run was working.

        With `overwrite`, a dataset there is replaced.
        """
        found = "a dataset"
        try:
            self.check([])
            if overwrite or self.is_empty():
                return
        except OutputError as error:
            found = f"{error.what}: {error.found}" if error.found else error.what
        raise OutputError(
            "something was put at the output while this run was working",
            path=self.path,
            found=found,
            fix="move it away, or replace a dataset with --overwrite, and repeat the command: the"
            f" conversion continues with the finished work in {self.working_folder}",
        )

    def names_of_old(self, unknown: Iterable[str] = ()) -> set[str]:
        """Return the names of all files that belong to the single file at the output.

        If its manifest is damaged, `unknown` are the names that it is assumed to have.
        """
        out, own = self.absolute, manifests.FOLDER + "/"
        names = {out.name, manifests.manifest_path(out).relative_to(self.folder).as_posix()}
        try:
            old = manifests.load(out)
        except ShardkitError:
            return names | {*unknown} if out.exists() else set()
        stem = out.name.rpartition(".")[0] + "."  # prefix of the names of all its files
        files = [file.name for file in (*old.all_files(), *old.files)]
        return names | {name for name in files if name.removeprefix(own).startswith(stem)}

    def _asked_for(self) -> Iterator[RemotePath]:
        """The objects whose existence is checked before the work begins, in concurrent requests."""
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
                        "the output and the source must not contain each other",
                        path=path,
                        found=f"source {source}",
                        fix="give another folder with -o",
                    )

    def check_new(self, overwrite: bool) -> None:
        """Raise OutputError for an output that exists, unless it is to be replaced."""
        self.check([])
        if not overwrite and not self.is_empty():
            raise OutputError(
                "the output exists",
                path=self.path,
                fix="give another folder, or pass overwrite=True",
            )

    def _check_existing(self) -> None:
        out = self.path
        if self.is_unfinished:  # all its objects are ours
            return
        if out.is_symlink() and not out.exists():
            raise OutputError("the output is a broken symbolic link", path=out, fix="remove it")
        exists = out.exists()
        if not exists and not self.single:
            return
        if self.single and exists and manifests.single_manifest(out) is None:
            raise OutputError(
                "the output exists, and was not written by shardkit as far as can be told",
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
                "the output folder exists and is not a dataset written by shardkit",
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
    """Return the error for an existing file that the output would have to replace."""
    return OutputError("a file is in the way of a file of the output", path=path, fix=fix)


def default_output(sources: Sequence[Path], format: str) -> Path:
    """The default output: `<name>-<format>`, beside the source or, for a URL, in this folder."""
    if not sources:
        raise UsageError("objects of Python need an output", fix="pass out=")
    source = sources[0]
    if len(sources) > 1:
        raise UsageError("several sources need an output", fix="give -o OUT")
    if is_pattern(source):
        raise UsageError("a pattern of shards needs an output", path=source, fix="give -o OUT")
    if source.name in ("", "..", "."):
        source = source.resolve()
    inside = [declared.inside for declared in FORMATS.values() if declared.inside]
    if (
        source.is_file() and f"/{source.name}" in inside
    ):  # the data file of a shard that is a folder, as of LMDB
        source = source.resolve().parent
    folder = Path() if isinstance(source, RemotePath) else source.parent
    if source.is_file():
        from shardkit.sources.text_files import parse_name

        text = parse_name(source.name)
        if text is not None:
            return folder / f"{text.stem}-{format}"
    suffixes = [suffix for declared in FORMATS.values() for suffix in declared.suffixes]
    found = [s for s in suffixes if len(source.name) > len(s) and source.name.endswith(s)]
    return folder / f"{source.name.removesuffix(max(found, key=len, default=''))}-{format}"


def refuse_others(path: Path) -> None:
    """Raise OutputError if another user may have created a folder that we would write into.

    It must not be a link, and must belong to us or to the owner of the folder above it, who can do
    anything there (on shared and mapped file systems we may be that owner). A folder that does not
    exist is fine: another process may remove it at any moment.
    """
    with os_errors.explained("look at", path):
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
        "a folder that shardkit would write into may have been created by somebody else",
        path=path,
        found=found,
        fix="remove it, or give another output with -o, in a folder of your own",
    )


def _is_single(out: Path, format: str) -> bool:
    """Return whether the name of an output stands for a single shard instead of a folder."""
    suffix = FORMATS[format].suffixes[0]
    can = FORMATS[format].single and isinstance(get_format(format), Joins)
    if not can or not out.name.lower().endswith(suffix):
        _refuse_suffix(out, format)
        return False
    if not out.name.endswith(suffix):
        raise UsageError(
            "the suffix of an output must be in lower case", found=out.name, expected=f"...{suffix}"
        )
    if not is_safe(out.name, flat=True):  # readers refuse manifests with such a name
        raise UsageError("invalid name of an output", found=out.name, expected=FLAT)
    return out.name != suffix


def _refuse_suffix(out: Path, format: str) -> None:
    """Raise UsageError for a folder whose name has the suffix of a shard of some format."""
    other = format_of(out)
    if other is None or (other == format and FORMATS[format].below):
        return
    single = FORMATS[format].single and isinstance(get_format(format), Joins)
    own = f"{out.name.partition('.')[0] or 'train'}{FORMATS[format].suffixes[0]}"
    what, found = "is that of another kind of file", f"a name of --to {other}, and --to {format}"
    if other == format:
        found = f"a suffix of --to {format} that is only read, not written"
        if not single:
            what, found = "is that of a single shard", f"--to {format}, which only writes folders"
    raise UsageError(
        f"the suffix of the output {what}",
        path=out,
        expected=f"a name for a folder{f', or {own} for a single shard' if single else ''}",
        found=found,
        fix=f"give -o another name{'' if other == format else f', or --to {other}'}",
    )
