"""The output of `shardkit export` as a source: a table with a row for each sample, and files.

`.shardkit.json` holds the schema and describes the columns of the table. A cell holds a value, or
the path of a file with the value. Rows are read by their offsets. Earlier versions wrote files of
other names, and CSV, which are read too.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import SampleError, SourceError, near
from shardkit.formats.wds.values import DECODERS, json_text
from shardkit.helpers import os_errors
from shardkit.helpers.checked import MAX_BYTES, Count, checked, damaged, of_version, under
from shardkit.helpers.mapped import Growing
from shardkit.helpers.names import INSIDE, checked_name, is_safe
from shardkit.metadata.manifest import FOLDER
from shardkit.sample import JsonText, Sample
from shardkit.schema import Array, Bytes, FieldType, Float, Images, Json, Schema, Text
from shardkit.sources.base import Indices, Source
from shardkit.sources.candidate import Candidate, Splits
from shardkit.sources.files import Planned, changed, check_unchanged, read_with_status
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

# Prefix of the names of our own files, which no key has: others take any folder for a class.
OWN = ".shardkit"
ABOUT = f"{OWN}.json"
_FORMERLY = ("shardkit-export.json", f"{FOLDER}/exported.json")
IS_NUMBER = re.compile("0|-?[1-9][0-9]{0,18}")  # how a label without a name is written
KEY, TEXTS = "__key__", "__json__"  # columns: the key, and the original JSON texts
VERSION = 1
_ESCAPE = "json:"  # prefix of a CSV cell whose text is encoded as JSON
_LONGEST_LIST = 4096  # maximum elements of a multidimensional array in a table
MAX_ROW = (1 << 31) - (1 << 16)  # bytes
_WRONG = (TypeError, ValueError, OverflowError, RecursionError)  # raised for invalid values


class ExportOrigin(TypedDict):
    """What an export was made of, and the extent of what it made."""

    to: str
    sources: dict[str, dict[str, str]]  # the fingerprints of its sources, by split
    samples: Count
    files: Count
    bytes: Count  # of these files
    renamed: dict[str, Count]
    notes: list[str]
    extent: list[Count]  # the number of all files but this one, and their bytes


class _TableInfo(TypedDict):
    table: str  # file name; "" if splits have their own folders
    splits: list[str]
    schema: dict[str, Any]
    columns: dict[str, str]  # by field
    class_names: dict[str, list[str]]
    named: list[str]  # fields whose classes are written as names in the table
    files: bool  # whether every value is a file, including numbers and text
    tokenizer: dict[str, Any]


class About(_TableInfo, total=False):
    """The content of `.shardkit.json`, without its version."""

    made: ExportOrigin  # at the top of an export


def about_path(folder: Path) -> Path:
    """Return the path of the description of an export."""
    paths = [folder / name for name in (ABOUT, *_FORMERLY)]
    return next((path for path in paths if path.is_file()), paths[0])


def read_about(folder: Path) -> About | None:
    """Read the description of a folder that was exported; None for any other folder."""
    path = about_path(folder)
    if isinstance(folder, RemotePath) or not path.is_file():
        return None
    data = fs.read(path, MAX_BYTES)
    found = of_version(VERSION, "version", data, "the description of an export", path=path)
    del found["version"]
    if path.name != ABOUT:
        found.pop("made", None)  # the same command writes another layout now
    try:
        return checked(About, found)
    except ValueError as error:
        raise damaged("the description of an export", error, path=path) from error


def recognise(candidate: Candidate) -> Splits | None:
    """Return a folder that `shardkit export` wrote."""
    about = None if candidate.subset else read_about(candidate.path)
    if about is None:
        return None
    candidate.refuse_options()
    return candidate.labelled(_open(candidate.path, about))


def _open(folder: Path, about: About) -> dict[str, Source]:
    """Return the splits of an export; without splits, its samples under ""."""
    if not about["splits"]:
        return {"": Exported(folder, about)}
    found = {}
    for name in about["splits"]:
        inner = read_about(folder / checked_name(name, about_path(folder), "splits", flat=True))
        if inner is None:
            raise SourceError("a split of the export is missing", path=folder / name)
        found[name] = Exported(folder / name, inner)
    with os_errors.explained("list", folder):
        beside = {n for n in os.listdir(folder) if not n.startswith(OWN)}
        beside -= {FOLDER, *_FORMERLY, *found}
    if beside:
        next(iter(found.values())).ignored["file or folder beside those of splits"] = len(beside)
    return cast("dict[str, Source]", found)


class Exported(Source):
    """The samples of a table, in row order."""

    def __init__(self, folder: Path, about: About) -> None:
        super().__init__()
        self._folder, self._about = os.fspath(folder), about
        self._path = folder / checked_name(about["table"], about_path(folder), "table")
        self._is_csv = self._path.suffix == ".csv"
        self._json_is_text = self._path.stem == "metadata"
        try:
            with under("schema"):
                self.schema = Schema.from_json(about["schema"])
        except ValueError as error:
            raise damaged("the description of an export", error, path=about_path(folder)) from error
        names = about["class_names"].items()
        self.class_names = {f: tuple(n) for f, n in names if f in self.schema}
        self._columns = {name: about["columns"].get(name, name) for name in self.schema}
        self._numbers = {
            field: {name: number for number, name in enumerate(self.class_names[field])}
            for field in about["named"]
            if field in self.class_names
        }
        self._plan()

    def _plan(self) -> None:
        """Scan the offsets of all rows, and the sizes and times of the files they name."""
        with os_errors.explained("read", self._path):
            about = os.stat(self._path)
        self._planned = Planned(about.st_mtime_ns, about.st_ino, 0)
        offsets, sizes, times, named = (Growing(np.int64) for _ in range(4))
        digest, others = xxhash.xxh3_128(), 0
        known = {KEY, TEXTS, *self._columns.values()}
        self._head: Any = None  # column names of CSV
        for start, data in _rows(self._path, self._is_csv):
            digest.update(data)
            if self._is_csv and self._head is None:
                self._head = self._parsed(data.removeprefix(codecs.BOM_UTF8), start)
                if len({*self._head}) < len(self._head):
                    names = ", ".join(self._head)
                    raise SourceError(
                        "two columns have the same name", path=self._path, found=f"{names:.200}"
                    )
                continue
            row = self._parsed(data, start)
            others += len(row.keys() - known)
            paths = self._files(row)
            about_files = [_size_and_time(f"{self._folder}/{path}") for path in paths]
            named.extend(
                [hash(path) for path, (_, time) in zip(paths, about_files, strict=True) if time]
            )
            offsets.extend([start, start + len(data)])
            sizes.extend([len(data) + sum(size for size, _ in about_files)])
            times.extend([_mixed(time for _, time in about_files)])
        self._rows = offsets.array().reshape(-1, 2)
        self._sizes, self._times = sizes.array(), times.array()
        self._digest = digest.hexdigest()
        if others:
            self.ignored["value in a column that is not a field of the export"] = others
        if (unnamed := self._count_files() - len(np.unique(named.array()))) > 0:
            self.ignored[f"file that {self._about['table']} does not name"] = unnamed

    def _count_files(self) -> int:
        """Return the number of files, without those that describe the export."""
        own = {os.fspath(self._path), os.fspath(about_path(Path(self._folder)))}
        walked = (each for each in os.walk(self._folder) if not each[0].endswith(FOLDER))
        files = ((at, name) for at, _, names in walked for name in names)
        return sum(not n.startswith(OWN) and os.path.join(at, n) not in own for at, n in files)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._rows[index].tolist()
        with (
            os_errors.explained("read", self._path),
            open(self._path, "rb", opener=fs.regular) as file,
        ):
            file.seek(start)
            row = self._parsed(file.read(stop - start), start)
        check_unchanged(os.fspath(self._path), self._planned)
        key = row.get(KEY)
        if not key or not isinstance(key, str):
            raise self._wrong(KEY, start, ValueError("" if key else "no value"), row)
        sample: Sample = {KEY: key}
        times: list[int] = []
        for name, kind in self.schema.items():
            try:
                value = self._read(name, kind, row, times)
                if value is None and not kind.optional:
                    raise ValueError("no value")
            except _WRONG as error:
                raise self._wrong(name, start, error, row).located(key=key) from error
            except SampleError as error:
                raise error.located(key=key, field=name) from error.__cause__
            if value is not None:
                sample[name] = value
        if len(self.schema) == len(self._about["schema"]) and _mixed(times) != self._times[index]:
            raise changed(os.fspath(self._path), "a later change of a file that it names")
        return sample

    def _parsed(self, data: bytes, start: int) -> Any:
        """Parse a row to cells by column, without empty CSV cells; or parse the CSV header."""
        try:
            if not self._is_csv:
                return checked(dict[str, Any], json.loads(data))
            csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW))  # a process-wide setting
            cells = next(csv.reader([data.decode()], strict=True), [])
            texts = [_unescaped(cell) for cell in cells]
            if self._head is None:
                return texts
            found = zip(self._head, texts, cells, strict=True)
            return {name: text for name, text, cell in found if cell}
        except (*_WRONG, csv.Error) as error:
            raise SourceError(
                "a row of the table is damaged",
                path=self._path,
                offset=start,
                found=str(error),
                fix="repair or remove it, or export again",
            ) from error

    def _wrong(
        self, field: str, start: int, error: Exception, row: Mapping[str, Any]
    ) -> SampleError:
        kind, names = self.schema.get(field, Text()), self._numbers.get(field)
        reason = "" if isinstance(error, json.JSONDecodeError) else str(error)
        value = row.get(self._columns.get(field, field))
        return SampleError(
            "a value in the table does not match the type of its field",
            path=self._path,
            offset=start,
            field=field,
            expected=near(value, names) if names else str(kind),
            found=reason or f"{value!r:.200}",
            fix="correct it, or skip such samples with --on-error skip",
        )

    def _files(self, row: Mapping[str, Any]) -> list[str]:
        """Return the files that a row names; invalid names are skipped, as reading reports them."""
        found = []
        for name, kind in self.schema.items():
            with contextlib.suppress(*_WRONG):
                found += self._paths(name, kind, row) or []
        return [path for path in found if is_safe(path)]

    def _paths(self, name: str, kind: FieldType, row: Mapping[str, Any]) -> list[str] | None:
        """Return the paths of the files that hold a value; None if the table holds it."""
        value = row.get(self._columns[name])
        if value is None:
            return None
        if isinstance(kind, Images):
            return checked(list[str], json.loads(value) if isinstance(value, str) else value)
        # A list is text in CSV. The path of a file may also begin with a bracket.
        is_path = isinstance(value, str) and (value.endswith(".npy") or not value.startswith("["))
        if self._about["files"] or isinstance(kind, Bytes) or (isinstance(kind, Array) and is_path):
            return [checked(str, value)]
        return None

    def _read(self, name: str, kind: FieldType, row: Mapping[str, Any], times: list[int]) -> Any:
        """Read the value of a field, or None; appends the times of its files to `times`."""
        paths = self._paths(name, kind, row)
        if paths is None:
            return self._value(name, kind, row)
        read = []
        for path in paths:
            if not is_safe(path):
                raise ValueError(f"{path!r:.200}, expected {INSIDE}")
            data, about = read_with_status(f"{self._folder}/{path}")
            times.append(about.st_mtime_ns)
            read.append(data)
        decode = json_text if isinstance(kind, Json) else kind.entry({**DECODERS, Images: None})
        return read if isinstance(kind, Images) else decode(read[0]) if decode else read[0]

    def _value(self, name: str, kind: FieldType, row: Mapping[str, Any]) -> Any:
        """Read a value that is in the table itself."""
        column, numbers = self._columns[name], self._numbers.get(name, {})
        value = row.get(column)
        if value is None and not (isinstance(kind, Json) and column in row):
            is_empty = self._is_csv and isinstance(kind, Text) and column in self._head
            return "" if is_empty and not kind.optional else None
        if self._is_csv:
            assert isinstance(value, str)
            named = numbers.get(value)
            value = _of_cell(kind, value) if named is None else named
        elif isinstance(kind, Json) and self._json_is_text:
            value = JsonText.checked(checked(str, value))
        elif isinstance(kind, Json):
            texts = row.get(TEXTS)
            text = texts.get(column) if isinstance(texts, dict) else None
            same = isinstance(text, str) and json.loads(text) == value
            value = JsonText(text) if same else JsonText.of(value)
        elif isinstance(value, str):
            if isinstance(kind, Float):
                value = float(value)
            elif numbers:
                number = int(value) if IS_NUMBER.fullmatch(value) else value
                value = numbers.get(value, number)
        if isinstance(kind, Array) and kind.shape is not None:
            shape = [-1 if n is None else n for n in kind.shape]
            value = np.array(value, kind.dtype).reshape(shape)
        return kind.check(value)

    def sizes(self) -> npt.NDArray[np.int64]:
        return self._sizes

    def select(self, indices: Indices) -> Exported:
        part = copy.copy(self)
        part._rows, part._sizes, part._times = (
            values[indices] for values in (self._rows, self._sizes, self._times)
        )
        return part

    def skimmed(self) -> Exported:
        return copy.copy(self)

    def fingerprint(self) -> dict[str, str]:
        files, times = xxhash.xxh3_128(self._digest.encode()), xxhash.xxh3_128()
        for array, digest in ((self._rows, files), (self._sizes, files), (self._times, times)):
            digest.update(np.ascontiguousarray(array).data)
        return {"files": files.hexdigest(), "times": times.hexdigest()}

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        entry = self._about["tokenizer"]
        if not entry:
            return {}, {}
        name = checked_name(entry.get("file"), self._path, "tokenizer", flat=True)
        beside = os.path.join(self._folder, f"{OWN}-{name}")
        former = os.path.join(self._folder, FOLDER, name)
        return entry, {name: fs.read(Path(former if os.path.isfile(former) else beside))}

    def name(self, index: int) -> str:
        return f"{self._path.name}: byte {self._rows[index][0]}"


def _rows(path: Path, is_csv: bool) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and bytes of each row; quoted CSV cells may contain line breaks."""
    start, lines, size, inside = 0, list[bytes](), 0, False
    with os_errors.explained("read", path), open(path, "rb", opener=fs.regular) as file:
        while line := file.readline(MAX_ROW + 1):
            lines.append(line)
            size += len(line)
            inside ^= is_csv and line.count(b'"') % 2 == 1
            if size > MAX_ROW:
                raise SourceError(
                    "a row of the table is too long, or a closing quote is missing",
                    path=path,
                    offset=start,
                    expected=f"at most {MAX_ROW:,} bytes",
                )
            if not inside:
                if line.strip():
                    yield start, b"".join(lines)
                start, lines, size = start + size, [], 0
        if lines:
            yield start, b"".join(lines)


def _size_and_time(path: str) -> tuple[int, int]:
    """Size and time of a file; zeros if it is missing, which reading it reports."""
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return 0, 0
    return about.st_size, about.st_mtime_ns


def _mixed(times: Iterable[int]) -> int:
    """Combine the times of some files, in order, into one number."""
    found = 0
    for time in times:
        found = (found * 31 + time) % 2**62
    return found


# --- values in tables ----------------------------------------------------------------------------


def inline(kind: FieldType, value: Any) -> Any:
    """Return a value as a table cell, JSON as its text; None if only a file can hold it exactly."""
    if isinstance(kind, Json):
        return JsonText.of(value)
    if isinstance(kind, Float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(kind, Array):
        return value.tolist() if _is_list(kind, value) else None
    return None if isinstance(kind, Bytes | Images) else value


def _is_list(kind: Array, value: npt.NDArray[Any]) -> bool:
    """Return whether the array can be restored exactly from a list of numbers."""
    if kind.dtype is None or not kind.shape or kind.shape.count(None) > 1 or 0 in kind.shape:
        return False
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        return False
    short = value.ndim == 1 or value.size <= _LONGEST_LIST
    return short and (value.dtype.kind != "f" or bool(np.isfinite(value).all()))


def _of_cell(kind: FieldType, cell: str) -> Any:
    if isinstance(kind, Text):
        return cell
    if isinstance(kind, Json):
        return JsonText.checked(cell)
    return float(cell) if isinstance(kind, Float) else json.loads(cell)


def _unescaped(cell: str) -> str:
    return checked(str, json.loads(cell[len(_ESCAPE) :])) if cell.startswith(_ESCAPE) else cell


def json_row(values: Mapping[str, Any]) -> bytes:
    """Format a JSON line of values from `inline`, without those that are None.

    JSON values are embedded; their text is stored as well if it cannot be restored from them.
    """
    texts = {n: v for n, v in values.items() if isinstance(v, JsonText) and not _is_plain(v)}
    parts = [
        f"{json.dumps(name, ensure_ascii=False)}:{_json(value)}"
        for name, value in {**values, **({TEXTS: texts} if texts else {})}.items()
        if value is not None
    ]
    return ("{" + ",".join(parts) + "}\n").encode()


def _json(value: Any) -> str:
    if isinstance(value, JsonText):
        return value.replace("\n", " ").replace("\r", " ")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_plain(text: JsonText) -> bool:
    try:
        return JsonText.of(json.loads(text)) == text
    except ValueError:  # a number beyond the range of floats
        return False
