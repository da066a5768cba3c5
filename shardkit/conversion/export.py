"""`shardkit.export`: a dataset as plain files, which other tools read and `convert` reads again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardkit.codecs import image, media
from shardkit.codecs.media import SUFFIXES_OF
from shardkit.conversion.existing import begun_anew
from shardkit.conversion.export_coco import CocoExport
from shardkit.conversion.partial import Partial
from shardkit.conversion.target import Target
from shardkit.dataset.dataset import Dataset
from shardkit.errors import (
    FormatError,
    OutputError,
    SampleError,
    ShardkitError,
    UsageError,
    near,
)
from shardkit.formats.wds.names import extensions
from shardkit.formats.wds.values import ENCODERS
from shardkit.helpers import os_errors
from shardkit.helpers.keywords import takes
from shardkit.helpers.names import file_stem, folded, why_renamed
from shardkit.helpers.prefetch import in_threads
from shardkit.helpers.progress import Progress, Steps, watched
from shardkit.options import Selection
from shardkit.sample import key_hash
from shardkit.schema import (
    Array,
    Audio,
    Bytes,
    FieldType,
    Float,
    Image,
    Images,
    Int,
    Json,
    Schema,
    Text,
    Video,
)
from shardkit.sources import exported, open_sources
from shardkit.sources.base import Source
from shardkit.sources.exported import (
    ABOUT,
    IS_NUMBER,
    KEY,
    OWN,
    TEXTS,
    VERSION,
    About,
    inline,
    json_row,
)
from shardkit.sources.inputs import paths_of
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

KINDS = ("folder", "jsonl", "files", "coco")
_TABLES = {"folder": "metadata.jsonl", "jsonl": "data.jsonl", "files": f"{OWN}.jsonl"}
_FILE_NAME = "file_name"
_OTHERS = "torchvision's ImageFolder and Keras"
_MEDIA = (Image, Audio, Video)
_THREADS, _AHEAD = 4, 4
_RENAMED = {
    "encoded": "with characters or names that not every system takes",
    "cut": "too long",
    "alike": "of the same file name as another where case does not count",
}


@dataclass
class ExportResult:
    """The result of an export.

    out: the folder.
    to: the kind of export: "folder", "jsonl" or "files".
    samples, files: number of samples and of files.
    bytes: size of all files, without the tables.
    renamed: number of samples whose keys differ from their file names, by reason.
    notes: how other libraries read the folder differently from shardkit.
    already_complete: whether an earlier run of the same command has made the export.
    """

    out: str
    to: str
    samples: int = 0
    files: int = 0
    bytes: int = 0
    renamed: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    already_complete: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


@contextlib.contextmanager
def _not_resumed() -> Iterator[None]:
    """Correct the advice of errors which are raised by conversions, too, such as a full disk."""
    try:
        yield
    except ShardkitError as error:
        if error.fix is not None:
            error.fix = error.fix.replace("continues where it stopped", "starts over")
        raise


@takes()
@_not_resumed()
def export(
    dataset: str | os.PathLike[str] | Dataset,
    to: str,
    out: str | os.PathLike[str],
    *,
    progress: bool | Callable[[Progress], object] = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ExportResult:
    """Write the samples of a dataset as plain files to a new folder.

    dataset: a path, or an open dataset.
    to: "folder", "jsonl", "files" or "coco".
    out: the folder to write. An existing output is never overwritten.
    progress: as in `shardkit.convert`.
    storage_options: as in `shardkit.open`.

    With "folder", images, audio or video are written to one folder per class, next to
    `metadata.jsonl`, which has the other fields. ImageFolder of torchvision,
    `image_dataset_from_directory` of Keras, and ImageFolder and AudioFolder of Hugging Face
    datasets can read the result. With "jsonl", `data.jsonl` has one line per sample. With "files",
    each value is a file `KEY.FIELD`, as in a TAR. Values that a table cannot hold exactly are
    written to separate files, and the table has their paths. With "coco", images and
    `annotations/instances_SPLIT.json` have boxes, categories, iscrowd, segmentation and keypoints,
    and `captions_SPLIT.json` has captions; a note names the other fields.

    `convert(out, ...)` gives equal samples again, with the same keys. Keys that are not valid file
    names on every system are changed only in the file names, and counted. `out` appears when it is
    complete. After an interruption, the same call starts over; if it is complete, with the same
    samples, nothing is done.

    Raises UsageError if `to="folder"` and the dataset has no media, OutputError if another output
    exists, and the errors of reading the dataset.
    """
    if to not in KINDS:
        raise UsageError("there is no such kind of export", found=to, expected=near(to, KINDS))
    with fs.using(storage_options, dataset, out):
        sources = _sources(dataset)
        target = Target(fs.output(out), "")
    made_of = {name: source.fingerprint() for name, source in sources.items()}
    if (done := _already_made(target.path, to, made_of)) is not None:
        return done
    apart = dataset.paths if isinstance(dataset, Dataset) else paths_of(dataset)
    partial = _begin(target, to, apart)
    try:
        result = ExportResult(os.fspath(target.path), to)
        with watched(progress) as monitor:
            _write(sources, made_of, partial.dataset, result, monitor)
        fs.sync_all(partial.dataset)
        partial.publish(overwrite=False)
    except Exception:
        partial.discard()  # an export is not resumed
        raise
    finally:
        partial.release()
    return result


def _sources(dataset: Any) -> dict[str, Source]:
    """Open the splits of a dataset. Raises UsageError for text, and the errors that they know."""
    found: dict[str, Source] = {}
    for name, source in open_sources(dataset).items():
        if not isinstance(source, Source):
            raise UsageError(
                "text files are not a dataset",
                path=None if isinstance(dataset, Dataset) else dataset,
                fix="convert them first: shardkit convert SOURCE --to FORMAT",
            )
        for problem in source.problems:
            raise problem
        found[name] = source
    return found


def _write(
    sources: Mapping[str, Source],
    made_of: Mapping[str, dict[str, str] | None],
    folder: Path,
    result: ExportResult,
    monitor: Steps | None,
) -> None:
    """Write all samples and the descriptions of the export, and count them in `result`."""
    to, renamed, others = result.to, Counter[str](), list[Path]()  # reasons; files of no sample
    fs.make_folder(folder)
    if monitor is not None:
        monitor.start("exporting", sum(map(len, sources.values())), "samples")
    if to == "coco":
        _write_coco(sources, folder, result, monitor)
        return
    top = _about(splits=[*sources])
    for name, source in sources.items():
        about = _Export(source, to, folder / name, result, renamed, others).run(monitor)
        if name:
            others.append(_write_about(folder / name, about))
        else:
            top = about
    result.renamed = {_RENAMED[why]: renamed[why] for why in _RENAMED if renamed[why]}
    result.notes = list(dict.fromkeys(result.notes))
    if None not in made_of.values():
        known = {"to": to, "sources": made_of, "samples": result.samples, "files": result.files}
        size = result.bytes + sum(path.stat().st_size for path in others)
        extent = [result.files + len(others), size]
        known |= {"bytes": result.bytes, "renamed": result.renamed, "notes": result.notes}
        known |= {"extent": extent}
        top["made"] = cast("exported.ExportOrigin", known)
    _write_about(folder, top)


def _write_coco(
    sources: Mapping[str, Source], folder: Path, result: ExportResult, monitor: Steps | None
) -> None:
    renamed, notes = Counter[str](), dict[str, None]()
    for name, source in sources.items():
        made = CocoExport(source, name, folder, _main(source.schema))
        for size, reason in made.run():
            result.samples += 1
            result.bytes += size
            renamed[reason] += 1
            if monitor is not None:
                monitor.advance(1)
        notes |= dict.fromkeys(made.notes)
    result.files, result.notes = result.samples, [*notes]
    result.renamed = {_RENAMED[why]: renamed[why] for why in _RENAMED if renamed[why]}


def _begin(target: Target, to: str, sources: Iterable[Path]) -> Partial:
    """Return an empty working folder, after removing what an interrupted export has left."""
    if isinstance(target.path, RemotePath):
        raise UsageError(
            "an export is written to this machine, not to a URL",
            path=target.path,
            fix="export to a local folder, then copy that to the URL",
        )
    out = target.path
    with os_errors.explained("look at", out):
        if os.path.lexists(out) and not (out.is_dir() and next(out.iterdir(), None) is None):
            fix = "give another folder with -o, or remove this one first"
            raise OutputError("the output exists", path=out, fix=fix)
    target.check(sources)
    return begun_anew(target, {"export": to}, "give another folder with -o")


def _already_made(
    out: Path, to: str, made_of: Mapping[str, dict[str, str] | None]
) -> ExportResult | None:
    """The result of a complete export of the same samples that is at `out`; None if it is not."""
    try:
        about = exported.read_about(out)
    except ShardkitError:  # the output is refused later, whatever it is
        return None
    made = None if about is None else about.get("made")
    if made is None or (made["to"], made["sources"]) != (to, made_of):
        return None
    if made["extent"] != _extent(out):  # files are missing, or were added or changed
        return None
    known: Any = {name: made[name] for name in ("samples", "files", "bytes", "renamed", "notes")}
    return ExportResult(os.fspath(out), to, **known, already_complete=True)


def _extent(folder: Path) -> list[int]:
    """Return the number and the bytes of all files of an export, except its description."""
    paths = (os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
    about = os.path.join(folder, ABOUT)
    sizes = [os.lstat(path).st_size for path in paths if path != about]
    return [len(sizes), sum(sizes)]


def _about(**known: Any) -> About:
    about: Any = About(
        table="", splits=[], schema={}, columns={}, class_names={}, named=[], files=False,
        tokenizer={},
    )  # fmt: skip
    return cast("About", {**about, **known})


def _write_about(folder: Path, about: About) -> Path:
    path, text = folder / ABOUT, json.dumps({"version": VERSION, **about}, indent=1)
    fs.write_file(path, text.encode() + b"\n")
    return path


class _Export:
    """Writes the samples of one source to a folder."""

    def __init__(
        self,
        source: Source,
        to: str,
        folder: Path,
        result: ExportResult,
        renamed: Counter[str],
        others: list[Path],
    ) -> None:
        """What is written is counted in `result` and `renamed`, and listed in `others`."""
        self._source, self._to, self._folder = source, to, folder
        self._result, self._renamed, self._others = result, renamed, others
        self._schema = schema = source.schema
        self._main = _main(schema) if to == "folder" else None
        names = source.class_names
        self._named = {
            n: names[n]
            for n in names
            if to != "files" and isinstance(schema[n], Int) and _tell_apart(names[n])
        }
        label = source.label if to == "folder" else ""
        self._label = label if isinstance(schema.get(label), Int) and label in names else None
        classes = names.get(self._label or "", ())
        self._own = dict(zip(schema, _distinct(_flat(name) for name in schema), strict=True))
        self._apart = {name for name in schema if name != self._main and self._alike_main(name)}
        bare = {self._main} if classes else {self._main, *self._apart}
        self._endings = _endings(schema, to, self._own, bare)
        self._suffixes = {e.rpartition(".")[2] for each in self._endings.values() for e in each}
        self._suffixes.add("jsonl")  # of the tables
        self._classes = _distinct(
            file_stem(name.replace("/", "%2F") + "/x", self._suffixes)[:-2] for name in classes
        )
        self._counts = [0] * (len(classes) + 1)  # of samples by class; the last: of none
        self._columns = {name: self._column(name) for name in schema}
        self._make_folder = lru_cache(4096)(fs.make_folder)

    def _alike_main(self, name: str) -> bool:
        """Return whether a field has media of the same kind as the main field."""
        main = type(self._schema.get(self._main or ""))
        return type(self._schema[name]) in ((Image, Images) if main is Image else (main,))

    def _column(self, name: str) -> str:
        """The name of a field's column; for media, the name that Hugging Face's loaders expect."""
        if name == self._main:
            return _FILE_NAME
        several = isinstance(self._schema[name], Images)
        column = f"{name}_{_FILE_NAME}{'s' * several}" if name in self._apart else name
        while column in (KEY, TEXTS, _FILE_NAME, *(self._schema if column != name else ())):
            column += "_"
        return column

    def run(self, monitor: Steps | None) -> About:
        """Write the samples; returns the description of the folder."""
        fs.make_folder(self._folder)
        for name in self._classes:  # readers number the folders
            self._make_folder(self._folder / name)
        self._alike = self._find_alike() if self._has_files() else {}
        self._others.append(self._folder / _TABLES[self._to])
        with fs.BufferedFile(self._others[-1]) as table:
            written = in_threads(self._write, range(len(self._source)), _THREADS, _AHEAD)
            with contextlib.closing(written):  # stops all threads after an error
                for row, reason, sizes, known in written:
                    table.write(_line(row))
                    self._result.samples += 1
                    self._result.files += len(sizes)
                    self._result.bytes += sum(sizes)
                    self._renamed[reason] += 1
                    self._counts[-1 if known is None else known] += 1
                    if monitor is not None:
                        monitor.advance(1)
        entry, files = self._source.tokenizer()
        for name, data in files.items():
            self._others.append(self._folder / f"{OWN}-{name}")
            fs.write_file(self._others[-1], data)
        self._result.notes += self._notes()
        return _about(
            table=_TABLES[self._to],
            schema=self._schema.to_json(),
            columns=self._columns,
            class_names={n: [*names] for n, names in self._source.class_names.items()},
            named=[*self._named],
            files=self._to == "files",
            tokenizer=entry,
        )

    def _notes(self) -> list[str]:
        """What is different for others, which number the folders and read all that is in them."""
        *counts, rest = self._counts
        order, notes = sorted(self._classes), list[str]()
        if order != self._classes:
            number, name = next(
                (n, name) for n, name in enumerate(self._classes) if name != order[n]
            )
            there = order.index(name)
            notes.append(
                f"{_OTHERS} number classes by name: {name} is {there} there, and {number} here"
            )
        if empty := [name for name, count in zip(self._classes, counts, strict=True) if not count]:
            notes.append(
                f"classes without samples: {len(empty):,}, such as {empty[0]}:"
                " torchvision's ImageFolder needs allow_empty=True"
            )
        if self._classes and rest:
            notes.append(
                f"samples without a class: {rest:,}, beside the class folders, where {_OTHERS} do"
                " not look"
            )
        return notes

    def _ordered(self) -> dict[str, FieldType]:
        """Return the fields as columns: the main one first."""
        return {**({self._main: self._schema[self._main]} if self._main else {}), **self._schema}

    def _has_files(self) -> bool:
        kinds = self._schema.values()
        return self._to == "files" or any(isinstance(k, Bytes | Images | Array) for k in kinds)

    # --- names of files

    def _stem(self, number: int, key: str, label: Any) -> str:
        stem = file_stem(key, self._suffixes)
        if (known := self._class(label)) is not None:
            own = self._classes[known] + "/"
            stem = own + stem.removeprefix(own)
        elif self._classes:  # a folder would be one more class
            stem = _flat(stem)
        return stem + self._alike.get(number, "")

    def _class(self, label: Any) -> int | None:
        """Return the number of the class folder for a label, if there is one."""
        return label if type(label) is int and 0 <= label < len(self._classes) else None

    def _stems(self) -> Iterator[tuple[str, str]]:
        """Stems and keys of all samples."""
        part = self._source.select(np.arange(len(self._source))).skimmed()
        part.narrow(Selection((self._label,) if self._label else (), partial=True))
        for number, document in enumerate(part.documents()):
            if isinstance(document.sample, SampleError):
                raise document.sample.located(path=document.name)
            key = document.sample[KEY]
            yield self._stem(number, key, document.sample.get(self._label or "")), key

    def _find_alike(self) -> dict[int, str]:
        """Suffixes for stems that are not unique if case and Unicode normalization are ignored, by
        the number of the sample."""
        self._alike = {}
        stems = (folded(_flat(stem)) for stem, _ in self._stems())
        hashes = np.fromiter(stems, np.uint64, len(self._source))
        _, first = np.unique(hashes, return_index=True)
        again = np.ones(len(hashes), np.bool_)
        again[first] = False
        if not again.any():
            return {}
        ordered, taken, found = np.sort(hashes), set[int](), dict[int, str]()
        for number, (stem, key) in enumerate(self._stems()):
            if not again[number]:
                continue
            for more in itertools.count():
                added = f"~{key_hash(key):016x}" + (f"~{number}~{more}" if more else "")
                name = folded(_flat(stem + added))
                at = int(ordered.searchsorted(np.uint64(name)))
                if name not in taken and (at == len(ordered) or int(ordered[at]) != name):
                    break
            taken.add(name)
            found[number] = added
        return found

    def _why_renamed(self, number: int, key: str) -> str:
        return (
            "alike" if number in self._alike else why_renamed(file_stem(key, self._suffixes), key)
        )

    # --- samples

    def _write(self, number: int) -> tuple[dict[str, Any], str, list[int], int | None]:
        """Write the files of a sample. Returns its row, why the file names differ from its key,
        the sizes of the files, and the number of its class."""
        sample = self._source[number]
        key = sample[KEY]
        if self._main is not None and self._main not in sample:
            raise SampleError(
                "a sample has no file for its row of the table",
                key=key,
                field=self._main,
                fix="export it --to jsonl or files",
            )
        stem = self._stem(number, key, sample.get(self._label or ""))
        row: dict[str, Any] = {KEY: key}
        sizes: list[int] = []
        for name, kind in self._ordered().items():
            value = sample.get(name)
            if name in sample:
                value = self._value(stem, name, kind, sample[name], sizes)
            row[self._columns[name]] = value
        known = self._class(sample.get(self._label or ""))
        return row, self._why_renamed(number, key) if sizes else "", sizes, known

    def _value(self, stem: str, name: str, kind: FieldType, value: Any, sizes: list[int]) -> Any:
        """Return a value as it appears in the table, after writing its files."""
        if name in self._named and 0 <= value < len(self._named[name]):
            return self._named[name][value]
        if self._to != "files" and (found := inline(kind, value)) is not None:
            # Readers of metadata.jsonl expect one type in a column.
            if name in self._named or (self._to == "folder" and isinstance(kind, Json)):
                return str(found)
            return value if self._to == "folder" and isinstance(kind, Float) else found
        if isinstance(kind, Images):
            return [
                self._file(stem, name, Image(), each, f"{n}.", sizes)
                for n, each in enumerate(value)
            ]
        return self._file(stem, name, kind, value, "", sizes)

    def _file(
        self, stem: str, name: str, kind: FieldType, value: Any, number: str, sizes: list[int]
    ) -> str:
        data = kind.entry(ENCODERS)(value)
        endings = self._endings[name]
        if type(kind) in SUFFIXES_OF:
            format = media.format_of(data) or image.format_of(data)
            suffixes = SUFFIXES_OF[type(kind)]
            suffix = next((s for s, f in suffixes.items() if f == format), "bin")
            ending = next((e for e in endings if e.rpartition(".")[2] == suffix), endings[-1])
        else:
            ending = endings[0]
        head, dot, suffix = ending.rpartition(".")
        file = f"{self._place(stem, name)}.{head}{dot}{number}{suffix}"
        path = self._folder / file
        self._make_folder(path.parent)
        if os.path.lexists(path):
            raise OutputError(
                "two files of the export have the same name on this file system", path=path
            )
        fs.write_loose(path, data)
        sizes.append(len(data))
        return file

    def _place(self, stem: str, name: str) -> str:
        """Return the stem of a file of a field. Others take any image in a folder for a sample.

        Further images are beside the class folders; without classes, each field has its folder.
        """
        if not self._apart:
            return stem
        if self._classes:
            return _flat(stem) if name in self._apart else stem
        return f"{self._own[name if name in self._apart else self._main or '']}/{stem}"


def _line(row: dict[str, Any]) -> bytes:
    """Return the line of the table for a sample."""
    line = json_row(row)
    if len(line) > exported.MAX_ROW:
        raise SampleError(
            "a sample is too long for a row of a table",
            key=row[KEY],
            expected=f"at most {exported.MAX_ROW:,} bytes",
            fix="export it --to files",
        )
    return line


def _flat(stem: str) -> str:
    """Return a stem without folders."""
    return file_stem(stem.replace("/", "%2F"))


def _distinct(names: Iterable[str]) -> list[str]:
    """Return the names, with numbers added to those that some file systems take for another."""
    found: dict[int, str] = {}
    for number, name in enumerate(names):
        more = ""
        while folded(name + more) in found:
            more += f"~{number}"
        found[folded(name + more)] = name + more
    return list(found.values())


def _tell_apart(names: Sequence[str]) -> bool:
    """Whether class names identify the labels: distinct, not empty, and not other numbers."""
    numbers = (int(name) for name in names if IS_NUMBER.fullmatch(name))
    inside = all(0 <= number < len(names) for number in numbers)
    return inside and len(set(names)) == len(names) and "" not in names


def _main(schema: Schema) -> str:
    """Return the field whose files an exported folder contains: images, audio or video."""
    found = [name for name, kind in schema.items() if isinstance(kind, _MEDIA)]
    if not found:
        raise UsageError(
            "the dataset has no images, audio or video",
            found=", ".join(f"{name}: {kind}" for name, kind in schema.items()),
            fix="export it --to jsonl or files",
        )
    usual = ("image", "audio", "video")
    return min(found, key=lambda name: (schema[name].optional, name not in usual))


def _endings(
    schema: Schema, to: str, own: Mapping[str, str], bare: Collection[str | None]
) -> dict[str, list[str]]:
    """The possible extensions of each field's files, without the dot: as in a TAR, or OWN.SUFFIX.

    Media have several extensions, the last of which is for unknown file formats. Those of `bare`
    fields have no prefix.
    """
    lists = [name for name, kind in schema.items() if isinstance(kind, Images)]
    found: dict[str, list[str]] = {}
    if to == "files":
        try:
            found = extensions(Schema({n: kind for n, kind in schema.items() if n not in lists}))
        except FormatError:  # a TAR cannot have fields with these names
            pass
        plain = [e.replace(".", "_") for each in found.values() for e in each]
        found = found if all(file_stem(e) == e for e in plain) else {}
    for name, kind in schema.items():
        if name not in found:
            prefix = "" if name in bare else own[name] + "."
            found[name] = [prefix + suffix for suffix in _suffixes(kind)]
        elif len(found[name]) > 1:
            found[name].append(f"{own[name]}.bin")
    return found


def _suffixes(kind: FieldType) -> list[str]:
    if isinstance(kind, Image | Images | Audio | Video):
        return [*SUFFIXES_OF[Image if isinstance(kind, Images) else type(kind)], "bin"]
    return [kind.entry({Array: "npy", Bytes: "bin", Text: "txt", FieldType: "json"})]
