"""OUT.partial: where a conversion works until it is whole, and from where it continues.

job.json          what identifies the run
lock              held by the run that is at work
tasks/000012/     a finished task: its shards and result.json
tasks/000013.…    one in the making, removed when a run begins
dataset/          what becomes OUT, filled when all tasks are there
replaced/         the old OUT, between the two renames of --overwrite
copy              of a file that goes beside a single one

An OUT that is a single file (train.beton) has a few others beside it (train.idx,
__shardkit__/train.beton.manifest.json and so on). Those are copied one by one, and then the one
called OUT is moved.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkit import manifest as manifests
from shardkit import storage
from shardkit.checked import MOST_BYTES, checked, parse
from shardkit.conversion.work import UNFINISHED, is_finished
from shardkit.errors import OutputError, ShardkitError, ShardkitWarning, UsageError
from shardkit.formats import FORMATS, format_of, get_format
from shardkit.formats.base import Joins
from shardkit.names import FLAT, is_safe
from shardkit.options import ImageOptions, TextOptions

JOB = "job.json"
_LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
_COPY = "copy"
_PRIVATE = 0o700  # of the whole folder: what is in it has the usual permissions
_OURS = {JOB, JOB + UNFINISHED, _LOCK, "tasks", "dataset", "replaced", _COPY}


class Partial:
    """The working folder of one output; `single` if that is one shard and not a folder of them."""

    def __init__(self, out: Path, *, single: bool = False) -> None:
        self.out = Path(os.path.abspath(out))
        self.single = single
        self.path = self.out.with_name(self.out.name + ".partial")
        self.tasks = self.path / "tasks"
        self.dataset = self.path / "dataset"
        self._replaced = self.path / "replaced"
        self._lock: int | None = None

    def task_folder(self, number: int) -> Path:
        return self.tasks / f"{number:06d}"

    def exists(self) -> bool:
        return self.path.exists()

    def job(self) -> dict[str, Any] | None:
        """What the unfinished run was; None if it did not come so far as to say."""
        try:
            return checked(dict[str, Any], parse(storage.read(self.path / JOB, MOST_BYTES)))
        except (ShardkitError, ValueError):
            return None

    def has_work(self) -> bool:
        """Whether the unfinished run has done anything that would be lost."""
        return any(is_finished(entry) for entry in self.tasks.glob("*"))

    def begin(self, identity: dict[str, Any], *, go_on: bool) -> None:
        """Make and lock the folder; what is finished in it counts if we `go_on`."""
        if os.path.lexists(self.path):
            refuse_others(self.path)
            self._refuse_strangers()
        while self._lock is None:
            storage.make_folder(self.path)
            self._lock = _locked(self.path)
        try:
            refuse_others(self.path)
            with contextlib.suppress(OSError):  # some file systems have no permissions
                self.path.chmod(_PRIVATE)
            self._refuse_links()
            self._prepare(identity, go_on)
        except BaseException:
            self.release()
            raise

    def _prepare(self, identity: dict[str, Any], go_on: bool) -> None:
        self._restore()
        if not (go_on and self.job() == identity):
            for name in (JOB, JOB + UNFINISHED, "tasks", "dataset"):
                storage.remove(self.path / name)
            storage.write_file(self.path / (JOB + UNFINISHED), _dump(identity))
            storage.rename(self.path / (JOB + UNFINISHED), self.path / JOB)
            storage.sync(self.path)
            storage.sync(self.path.parent)
        storage.make_folder(self.tasks)
        self.sweep()

    def manifest(self) -> Path:
        """Where the manifest of the dataset that becomes a single file or a folder belongs."""
        return self.list_path(self.dataset, manifests.NAME)

    def stem(self, format: str) -> str | None:
        """The name of the only shard without its suffix, where the output is that shard."""
        return self.out.name[: -len(FORMATS[format].suffixes[0])] if self.single else None

    def list_path(self, folder: Path, name: str) -> Path:
        """Where the manifest or a list (errors.jsonl) of the dataset in `folder` belongs."""
        if self.single:
            return manifests.beside(folder / self.out.name, name)
        return folder / manifests.FOLDER / name

    def _restore(self) -> None:
        """Give the old dataset its place back, if a run died between the two renames."""
        if not self._replaced.exists() or self.out.exists():
            return
        if not self.single:
            storage.rename(self._replaced, self.out)
            return
        self._make_own_folder()
        for name in self._out_last(self._replaced):
            storage.rename(self._replaced / name, self.out.parent / name)

    def _out_last(self, folder: Path) -> list[str]:
        """What is in a folder and in its __shardkit__, with the entry called OUT at the end."""
        names = {path.name for path in folder.iterdir()}
        if manifests.FOLDER in names:
            ours = (folder / manifests.FOLDER).iterdir()
            names |= {f"{manifests.FOLDER}/{path.name}" for path in ours}
        return [*sorted(names - {self.out.name, manifests.FOLDER}), self.out.name]

    def _make_own_folder(self) -> None:
        """The folder beside a single file for its manifest and lists."""
        storage.make_folder(self.out.parent / manifests.FOLDER)
        refuse_others(self.out.parent / manifests.FOLDER)

    def _place_single(self) -> None:
        """The files of `dataset/` go beside each other. Copies of the small ones: the originals are
        there if a run dies in here, and the next has to do it again."""
        *others, out = self._out_last(self.dataset)
        self._make_own_folder()
        for name in others:
            original, copy = self.dataset / name, self.path / _COPY
            with storage.create(copy) as file:
                storage.append(file, original, original.stat().st_size)
            storage.sync(copy)
            storage.rename(copy, self.out.parent / name)
        storage.sync(self.out.parent / manifests.FOLDER)
        storage.rename(self.dataset / out, self.out)

    def _names_of_old(self) -> set[str]:
        """What belongs to the single file that is replaced."""
        if not self.out.exists():
            return set()
        manifest = manifests.manifest_path(self.out).relative_to(self.out.parent)
        names = {self.out.name, manifest.as_posix()}
        try:
            old = manifests.load(self.out)
        except ShardkitError:  # it is damaged, so what the new one has stands for it
            return names | {*self._out_last(self.dataset)}
        own = manifests.FOLDER + "/"
        stem = self.out.name.rpartition(".")[0] + "."  # what all names of its files begin with
        files = [f.name for f in (*old.all_files(), *old.files)]
        tops = {n if n.startswith(own) else n.partition("/")[0] for n in files}
        return names | {name for name in tops if name.removeprefix(own).startswith(stem)}

    def _refuse_to_replace(self, old: set[str]) -> None:
        """Raise OutputError where a file that is not ours stands in the place of one of ours."""
        for name in self._out_last(self.dataset):
            place = self.out.parent / name
            if name in old | {self.out.name} or not os.path.lexists(place):
                continue
            same = place.is_file() and storage.checksum(place) == storage.checksum(
                self.dataset / name
            )
            if not same:
                raise OutputError(
                    "a file stands where one that belongs to the output must go",
                    path=place,
                    fix="move it away, and run the same command again: its work is kept",
                )

    def _put_aside(self, old: set[str]) -> None:
        """The old dataset at OUT goes to `replaced/`."""
        if not self.single:
            storage.rename(self.out, self._replaced)
            return
        storage.make_folder(self._replaced / manifests.FOLDER)
        for name in [self.out.name, *sorted(old - {self.out.name})]:
            if (self.out.parent / name).exists():
                storage.rename(self.out.parent / name, self._replaced / name)
        storage.sync(self._replaced)

    def sweep(self) -> None:
        """Remove the tasks that are not finished, and that nobody is at."""
        for entry in sorted(self.tasks.glob("*")):
            if entry.name.endswith(UNFINISHED) or not is_finished(entry):
                storage.remove(entry)

    def release(self) -> None:
        """Let others in again; what is done stays for a later run."""
        handle, self._lock = self._lock, None
        if handle is not None and handle >= 0:
            os.close(handle)

    def finished(self, tasks: int) -> list[int]:
        """Numbers of the tasks that are done."""
        return [n for n in range(tasks) if is_finished(self.task_folder(n))]

    def publish(self) -> None:
        """`dataset/` becomes OUT, in one rename unless there is an old one to put aside first."""
        storage.sync(self.dataset)
        old = self._names_of_old() if self.single else set()
        if self.single:
            self._refuse_to_replace(old)
        if self.out.exists():
            storage.remove(self._replaced)
            self._put_aside(old)
        if self.single:
            self._place_single()
        else:
            storage.rename(self.dataset, self.out)
        storage.sync(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the whole folder; the lock goes last, so that no other run is in it meanwhile."""
        try:
            self._restore()
            for name in ("tasks", "dataset", "replaced", _COPY, JOB, JOB + UNFINISHED):
                storage.remove(self.path / name)
            storage.remove(self.path)
        finally:
            self.release()

    def _refuse_links(self) -> None:
        """Raise OutputError for a link, or what is no file, in the folder: we have made none.

        The old dataset in `replaced/` may have links of its own.
        """
        for folder, folders, files in os.walk(self.path):
            if Path(folder) == self.path and self._replaced.name in folders:
                folders.remove(self._replaced.name)
            for path in (Path(folder, name) for name in (*folders, *files)):
                with storage.explained("look at", path):
                    kind = stat.S_IFMT(path.lstat().st_mode)
                if kind not in (stat.S_IFDIR, stat.S_IFREG):
                    raise _not_ours(path, "a link, a pipe or a device")

    def _refuse_strangers(self) -> None:
        with storage.explained("list", self.path):
            names = {p.name for p in self.path.iterdir()}
        strangers = sorted(names - _OURS)
        if names and not strangers and not names & {JOB, _LOCK}:
            strangers = sorted(names)  # folders that happen to be called like ours
        if strangers:
            raise OutputError(
                "the folder for unfinished work holds something else",
                path=self.path,
                found=", ".join(strangers[:3]),
                fix="move it away, or give another output with -o",
            )


def refuse_others(path: Path) -> None:
    """Raise OutputError for a folder to write into that somebody else may have put there.

    It must be no link, and must belong to us or to the owner of the folder above, who can do there
    what he likes: on shared and mapped file systems ours may be the same.
    """
    with storage.explained("look at", path):
        about, above = path.lstat(), path.parent.stat()
    if stat.S_ISLNK(about.st_mode):
        raise _not_ours(path, f"a link to {os.readlink(path)!r}")
    if hasattr(os, "geteuid") and about.st_uid not in (os.geteuid(), above.st_uid):
        raise _not_ours(path, f"it belongs to the user {about.st_uid}")


def _not_ours(path: Path, found: str) -> OutputError:
    return OutputError(
        "a folder for files of shardkit is, or holds, what somebody else may have put there",
        path=path,
        found=found,
        fix="remove it, or give another output with -o, in a folder of your own",
    )


def _locked(folder: Path) -> int | None:
    """Keep other runs out of a folder until the handle is closed or the process ends.

    None if the folder was removed by its last run meanwhile; -1 on systems without such locks, and
    with a warning on file systems without them, as Lustre and NFS may be.
    """
    try:
        import fcntl
    except ImportError:
        return -1
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_ours(folder / _LOCK, "a link") from error
        raise storage.explain(error, "create", folder / _LOCK) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == os.stat(folder / _LOCK).st_ino:
            return handle
    except FileNotFoundError:
        pass
    except BlockingIOError:
        os.close(handle)
        raise OutputError(
            "another run is working on this output",
            path=folder,
            fix="wait for it, or give another output with -o",
        ) from None
    except OSError as error:
        os.close(handle)
        if error.errno not in _NO_LOCKS:
            raise storage.explain(error, "lock", folder / _LOCK) from error
        warnings.warn(
            f"the file system of {folder} has no locks ({os.strerror(error.errno)}): make sure that"
            " no other run writes to the same output",
            ShardkitWarning,
            stacklevel=2,
        )
        return -1
    os.close(handle)
    return None


def is_single(out: Path, format: str) -> bool:
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
    if other is None:
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


def check_output(out: Path, source: Path | None, *, single: bool = False) -> None:
    """Raise OutputError where the output would lie in the source, or replace what is not ours."""
    if source is not None:
        real_source = Path(os.path.realpath(source))
        for path in (out, Partial(out).path):
            real = Path(os.path.realpath(path))
            if real == real_source or real_source in real.parents or real in real_source.parents:
                raise OutputError(
                    "the output and the source must not lie inside one another",
                    path=path,
                    found=f"source {source}",
                    fix="give another folder with -o",
                )
    parent = Partial(out).out.parent
    if not parent.is_dir():
        raise OutputError("the folder that would hold the output does not exist", path=parent)
    if single and os.path.lexists(parent / manifests.FOLDER):
        refuse_others(parent / manifests.FOLDER)
    with storage.explained("look at", out):
        _check_place(out, single)


def _check_place(out: Path, single: bool) -> None:
    if out.is_symlink() and not out.exists():
        raise OutputError("the output is a link that leads nowhere", path=out, fix="remove it")
    if single and out.exists() and manifests.single_manifest(out) is None:
        raise OutputError(
            "the output exists and is not known to be ours",
            path=out,
            expected=f"{manifests.FOLDER}/{manifests.beside(out).name} beside it",
            fix="move it away, or give another name with -o",
        )
    if single and not out.exists() and not Partial(out).exists():
        for name in (manifests.NAME, manifests.ERRORS, manifests.FILTERED, manifests.KEYS):
            if manifests.beside(out, name).exists():
                raise OutputError(
                    "a file stands where one that belongs to the output must go",
                    path=manifests.beside(out, name),
                    fix="move it away, or give another name with -o",
                )
    if not single and out.exists() and not out.is_dir():
        raise OutputError("the output is a file", path=out, fix="give a folder with -o")
    if out.is_dir() and not manifests.has_manifest(out) and any(out.iterdir()):
        raise OutputError(
            "the output folder holds something that is no dataset of ours",
            path=out,
            found=", ".join(sorted(p.name for p in out.iterdir())[:3]),
            fix="give another folder with -o; --overwrite replaces datasets only",
        )


def is_complete(out: Path, identity: dict[str, Any], *, with_errors: bool) -> bool:
    """Whether `out` already holds, whole, the dataset that this run would make."""
    if not (manifests.has_manifest(out) and out.exists()):
        return False
    try:
        manifest = manifests.load_any(out)
        if manifest.errors and not with_errors:
            return False
        made = {"format": manifest.format, "source": manifest.source, "options": manifest.options}
        return (
            all(identity[name] == value for name, value in made.items())
            and None not in identity["source"].values()
            and (identity["options"]["transform"] or {"digest": ""})["digest"] is not None
            and _has_all_files(manifests.folder_of(manifests.manifest_path(out)), manifest)
        )
    except ShardkitError:  # whatever is there, it is not that
        return False


def _has_all_files(folder: Path, manifest: manifests.Manifest | manifests.Splits) -> bool:
    if isinstance(manifest, manifests.Splits):
        names = manifest.splits
        return all(_has_all_files(folder / name, manifests.load(folder / name)) for name in names)
    for file in (*manifest.all_files(), *manifest.files):
        try:
            size = os.stat(folder / file.name).st_size
        except OSError:
            return False
        if size != file.bytes:
            return False
    return True


# Options that a run has none of stand for these.
_USUAL = {"image": asdict(ImageOptions()), "text": asdict(TextOptions())}


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What two runs do not have in common, in words."""
    words = []
    for name in sorted(old.keys() | new.keys()):
        before, now = (run.get(name) or _USUAL.get(name, run.get(name)) for run in (old, new))
        if before == now:
            continue
        if name == "transform" and isinstance(before, dict) and isinstance(now, dict):
            same = before.get("name") == now["name"]
            words.append(
                f"the code of the transform {now['name']} has changed"
                if same
                else f"the transform was {before.get('name')}, is {now['name']}"
            )
        elif isinstance(before, dict) and isinstance(now, dict) and name not in ("source", "times"):
            words.append(differences(before, now))
        elif name in ("source", "times"):
            words.append("the source has changed")
        else:
            words.append(f"{name} was {before}, is {now}")
    return "; ".join(dict.fromkeys(words))


def _dump(identity: dict[str, Any]) -> bytes:
    return json.dumps(identity, indent=1, allow_nan=False).encode() + b"\n"
