"""Plan a text corpus: its files, their splits, and the fields of their documents."""

from __future__ import annotations

import contextlib
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import numpy as np

from shardkit.dataset.card import OUTSIDE, splits_of
from shardkit.dataset.folders import below as below_folder
from shardkit.errors import HoleError, SampleError, ShardkitError, SourceError, UsageError, near
from shardkit.formats.table_folders import refuse_partitions
from shardkit.formats.unsupported import way_with
from shardkit.metadata.splits import Split, grouped
from shardkit.options import ALL_FIELDS, Selection, TextOptions
from shardkit.sources.base import Source, Stream
from shardkit.sources.file_names import COMPRESSIONS, FORMS, parse_name
from shardkit.sources.file_table import odd_keys
from shardkit.sources.files import FilePath, below, file_path
from shardkit.sources.labels import LABEL, LabelColumn, find_labels
from shardkit.sources.metadata import GivenTable, Labelling, join
from shardkit.sources.text.blocks import expansion
from shardkit.sources.text.classes import FolderClasses, folder_classes
from shardkit.sources.text.copies import COPIES, check_copy, copies
from shardkit.sources.text.documents import Ranges, TextFiles, TextStream, located, open_file
from shardkit.sources.text.encodings import check_encoding, load_detector
from shardkit.sources.text.fields import Fields, Sampled, choose, fields_of
from shardkit.sources.text.files import UNSURE, Files
from shardkit.sources.text.lines import is_hole
from shardkit.sources.text.records import LINE_FIELD
from shardkit.storage import fs
from shardkit.storage.announced import incomplete, refuse_incomplete
from shardkit.storage.walk import NO_FILE, Walk, kind_of_file, look, relative_to

# Files at the top of a folder that describe its data; they are data only if there are no others.
_ABOUT = re.compile(
    r"(readme|licen[cs]e|changelog|contributing|citation|code_of_conduct|notice|datasheet)"
    r"([-_.][^.]*)?(\.(md|txt|text))?|(dataset_info|dataset_infos|dataset_dict|config)\.json"
)
_OF_IMDB = re.compile(r"urls_(pos|neg|unsup)\.txt|imdbEr\.txt")  # next to the folders of reviews
RANGE = 1 << 19  # bytes per range of a splittable file; a multiple of 4, the widest character
_SAMPLE_FILES = 16
_SAMPLE_DOCUMENTS = 100  # per file
_SAMPLE_BYTES = 256 << 10  # per file, unless its first document is longer
_EXPANSION_FILES = 8


def open_text(
    path: Path,
    options: TextOptions,
    *,
    split: str,
    selection: Selection = ALL_FIELDS,
    listed: Sequence[Path] = (),
    subset: str = "",
    also: Collection[str] = (),
    labels: Labelling | None = None,
) -> dict[str, Source | Stream]:
    """Open the documents of a file or folder, one source per split; `{"": source}` without splits.

    With `listed`, only these files are read, as if the folder contained no others. The fields in
    `also` that exist are read in any case, to filter documents by them. `labels` says where labels
    come from; without it there are none.

    Raises SourceError if there are no documents, or none of the first ones has the text.
    """
    if options.encoding != "auto":
        check_encoding(options.encoding)
    began = time_ns()
    labels = labels or Labelling()
    if listed:
        corpus = _listed(path, listed)
    else:
        corpus = _folder(path, labels.given) if path.is_dir() else _single(path)
    corpus.files.began = began
    corpus, announced = _whole(path, corpus, listed=bool(listed))
    splits: dict[str, Split] = {}
    if (split == "auto" or subset) and path.is_dir():
        splits = _splits(path, corpus, options, subset, listed=bool(listed))
        if split == "none" and splits:
            splits = {"": Split("", sorted(n for part in splits.values() for n in part.numbers))}
    whole = _whole_files(path, corpus, options, splits)
    notes = [*corpus.notes, *announced]
    if options.encoding == "auto":
        notes += _find_encodings(corpus)
    else:
        corpus.files.encodings = [options.encoding]
    corpus.files.ratios = _ratios(corpus)
    _set_header(path, corpus, options)
    notes += _find_quotes(corpus)
    fields, sampled = None, Sampled()
    if not whole:
        _refuse_table(path, labels)
        asked = labels.asked
        fields, sampled = _fields(path, corpus, options, selection, notes, also, asked)
        own = None if asked is None else asked.column
        left = [
            name
            for name in sampled.names()
            if name != own and (name not in fields.schema or name in fields.also)
        ]
        if left and selection == ALL_FIELDS and not options.keep_fields:
            some = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            notes.append(f"only the text of documents is stored; --keep-fields also stores {some}")
    chosen = splits or {"": Split("", list(range(len(corpus.files))))}
    by_split = {name: _files_of(corpus, split, whole=whole) for name, split in chosen.items()}
    every = {name: _below(corpus.files.folders, split.folder) for name, split in chosen.items()}
    if listed or not path.is_dir():
        labels = replace(labels, guess=False)
    classes = folder_classes(path, by_split, every, labels, whole=whole)
    problems = corpus.problems + _join_table(path, chosen, by_split, labels, whole=whole)
    sources: dict[str, Source | Stream] = {}
    for name, (folder, _) in chosen.items():
        root, files = below(corpus.root, folder) if folder else corpus.root, by_split[name]
        sources[name] = _source(root, files, fields, sampled, options.encoding_errors, classes)
    first = next(iter(sources.values()))
    first.ignored, first.problems = dict(corpus.ignored), problems
    first.notes = [*notes, *classes.notes]
    return sources


def _set_header(path: Path, corpus: _Corpus, options: TextOptions) -> None:
    """Set the columns of tables that have no header, numbering them as in the first such table."""
    if options.header is None:
        return
    files = corpus.files
    tables = (n for n in range(len(files)) if files.name(n).form in ("csv", "tsv"))
    first = next(tables, None)
    if first is None:
        raise UsageError(
            "columns and no_header are for CSV and TSV only",
            path=path,
            fix="remove --columns and --no-header",
        )
    width = 0 if options.header else open_file(corpus.root, files, first, "replace").width()
    files.header = options.header or tuple(f"column{number}" for number in range(width))


def _refuse_headless(
    path: Path, sampled: Sampled, options: TextOptions, text: str | None, notes: list[str]
) -> None:
    """Raise SourceError if the first row of a table seems to be data, not names of columns.

    If the name of the text is given, the header seems to be one after all: that is a note then.
    """
    doubt = sampled.doubtful_header() if options.header is None else None
    if doubt is None or (text == LINE_FIELD and options.field is None):
        return
    if options.field is not None and text is not None:
        notes.append(
            f"{doubt}: if the first line is a row, name the columns: --columns NAME,NAME,..."
        )
        return
    names = [f"NAME{number}" for number in range(sampled.width())]
    raise SourceError(
        "the first line of the table seems to be a row, not the header with the column names",
        path=path,
        expected="names of columns, such as label,text",
        found=doubt,
        fix=f"if it is a row, name its columns: --columns {','.join([*names[:-1], 'text'])}, or"
        f" number them: --no-header --text-field column{len(names) - 1}; if it is the header, say"
        " which column is the text: --text-field NAME",
    )


def _refuse_table(path: Path, labels: Labelling) -> None:
    """Raise UsageError for a metadata table, which names files, if these are not documents."""
    if labels.given is not None:
        raise UsageError(
            "metadata can only be used if each file is a document",
            path=path,
            fix="remove --metadata, or take whole files as documents: --documents file",
        )


def _join_table(
    path: Path,
    splits: Mapping[str, Split],
    files: dict[str, Files],
    labels: Labelling,
    *,
    whole: bool,
) -> list[ShardkitError]:
    """Join metadata rows to the files; files without a row are dropped and returned as problems."""
    if labels.given is None:
        if whole and labels.asked is not None:
            raise UsageError(
                f"there is no table with the column {labels.asked.column!r}",
                path=path,
                fix="name the table with --metadata FILE",
            )
        return []
    parts = [(split.folder, files[name]) for name, split in splits.items()]
    joined = join(labels.given.read(), parts, labels.asked, every=True)
    for name, found in zip(splits, joined, strict=True):
        files[name] = files[name].select(found.files)
        files[name].metadata = found.metadata
        if LABEL in found.metadata.schema:
            files[name].labels = []  # the table replaces labels from folders
    return [problem for found in joined for problem in found.problems]


def _files_of(corpus: _Corpus, split: Split, *, whole: bool) -> Files:
    """Return the files of a split, with folders relative to that of the split."""
    files = corpus.files.select(np.array(split.numbers, np.int64))
    files.folders = _below(files.folders, split.folder)
    if whole:
        files.odd_keys = odd_keys((files.stem(i), files.name(i).suffix) for i in range(len(files)))
    return files


def _below(folders: Iterable[str], above: str) -> list[str]:
    """Return the folders inside `above`, relative to it, and `above` itself as ""."""
    inside = (f for f in folders if not above or f == above or f.startswith(f"{above}/"))
    return [folder[len(above) :].lstrip("/") for folder in inside]


def _source(
    root: FilePath,
    files: Files,
    fields: Fields | None,
    sampled: Sampled,
    errors: str,
    classes: FolderClasses,
) -> Source | Stream:
    """Return the documents of one split; without `fields`, each file is one."""
    if fields is None:
        source = TextFiles(root, files, errors)
        source.add_labels(classes.names)
        return source
    stream = TextStream(root, files, _ranges(root, files), fields, errors)
    stream.add_labels(classes.names)
    stream.others = {n: None for n in sampled.names() if n not in fields.schema}
    stream.all_known = sampled.whole
    stream.also = fields.also
    stream.guessed = frozenset(fields.others)
    return stream


class _Corpus(NamedTuple):
    """The files found under a root."""

    root: FilePath
    files: Files
    tables: bool
    ignored: Counter[str]
    problems: list[ShardkitError]
    notes: tuple[str, ...] = ()


class _Found(NamedTuple):
    folder: int
    name: str
    size: int
    time: int
    inode: int = 0


def _single(path: Path) -> _Corpus:
    name = parse_name(path.name)
    if name is None:
        raise SourceError(
            "this is not a text file, judging by its name",
            path=path,
            expected=_suffixes(),
            fix="rename it according to its content",
        )
    about = fs.status(path)
    size = about.st_size if path.is_file() else NO_FILE
    file = _Found(0, path.name, size, about.st_mtime_ns, about.st_ino)
    files = _table([""], [file] if size else [])
    ignored = Counter({} if size else {"empty file": 1})
    above = path.parent
    root = "" if above == Path() else file_path(above)
    return _Corpus(root, files, name.form != "text", ignored, [])


def _listed(root: Path, paths: Sequence[Path]) -> _Corpus:
    """Return the given files below a folder, all of them tables or all texts, in this order."""
    folders: dict[str, int] = {}
    found = []
    for path in paths:
        folder, _, name = below_folder(root, path).rpartition("/")
        about = fs.status(path)
        size = about.st_size if stat.S_ISREG(about.st_mode) else NO_FILE
        number = folders.setdefault(folder, len(folders))
        found.append(_Found(number, name, size, about.st_mtime_ns, about.st_ino))
    filled = [file for file in found if file.size]
    ignored = Counter({"empty file": len(found) - len(filled)})
    table = parse_name(paths[0].name)
    tables = table is not None and table.form != "text"
    return _Corpus(file_path(root), _table(list(folders), filled), tables, +ignored, [])


def _folder(root: Path, given: GivenTable | None = None) -> _Corpus:
    """Return the files below a folder: the tables if there are any, otherwise the texts."""
    walk = Walk(root, None if given is None else relative_to(given.path, root))
    folders: list[str] = []
    texts: list[_Found] = []
    tables: list[_Found] = []
    about: list[_Found] = []  # describe the data: README.md, LICENSE.txt, dataset_infos.json
    suffixes: Counter[str] = Counter()  # of the texts, which are ignored if there are tables
    for listing in walk:
        number = len(folders)
        folders.append(listing.folder.relative)
        for entry in listing.files:
            name = parse_name(entry.name)
            if name is None:
                walk.ignored[kind_of_file(entry.name)] += 1
                continue
            size, time, inode = look(entry)
            found = _Found(number, entry.name, size, time, inode)
            if size == 0:
                walk.ignored["empty file"] += 1
            elif _is_about(listing.folder.relative, entry.name):
                about.append(found)
            elif name.form == "text":
                texts.append(found)
                suffixes[kind_of_file(entry.name)] += 1
            else:
                tables.append(found)
    if tables:
        walk.ignored += suffixes
    if tables or texts:
        walk.ignored.update(kind_of_file(file.name) for file in about)
    elif about:
        _refuse_only_about(root, about, walk.ignored)
        texts = about
    found_files = tables or texts
    found_files.sort(key=lambda file: f"{folders[file.folder]}/{file.name}".lstrip("/"))
    files = _table(folders, found_files)
    return _Corpus(file_path(root), files, bool(tables), walk.ignored, walk.problems, walk.notes)


def _is_about(folder: str, name: str) -> bool:
    """Whether a file describes the data: at the top, or a list among IMDb's reviews."""
    return bool(_OF_IMDB.fullmatch(name) or (not folder and _ABOUT.fullmatch(name.lower())))


def _refuse_only_about(root: Path, about: list[_Found], others: Counter[str]) -> None:
    """Raise SourceError if the only readable files describe others that cannot be read."""
    beside = {kind: count for kind, count in others.items() if kind not in ("hidden", "empty file")}
    if beside:
        raise SourceError(
            f"the only text here describes the data: {about[0].name}",
            path=root,
            found=", ".join(f"{count} x {kind}" for kind, count in beside.items()),
            expected=_suffixes(),
            fix=way_with(beside) or "unpack archives, or give the files that contain the data",
        )


def _table(folders: list[str], found: list[_Found]) -> Files:
    """Return the table of files, with the folders sorted by path."""
    order = sorted(range(len(folders)), key=folders.__getitem__)
    number = {folder: n for n, folder in enumerate(order)}
    return Files(
        folders=[folders[folder] for folder in order],
        names=[file.name for file in found],
        folder_of=np.array([number[file.folder] for file in found], np.uint32),
        sizes=np.array([file.size for file in found], np.int64),
        times=np.array([file.time for file in found], np.int64),
        inodes=np.array([file.inode for file in found], np.uint64),
        encodings=[],
        encoding_of=np.zeros(len(found), np.uint8),
        quoted_of=np.ones(len(found), np.uint8),
    )


def _whole(path: Path, corpus: _Corpus, *, listed: bool) -> tuple[_Corpus, list[str]]:
    """Return the corpus without copies of files, and notes on files that are announced but missing.

    Raises SourceError if such files are missing from a folder, or there are no documents at all.
    """
    corpus = _without_copies(corpus)
    if not corpus.files.names:
        raise _nothing(path, corpus)
    names = [
        corpus.files.relative(n) for n, name in enumerate(corpus.files.names) if "-of-" in name
    ]
    if not listed and path.is_dir():
        refuse_incomplete(path, names)
    several = listed and len(corpus.files) > 1
    found = incomplete(names) if several else []
    return corpus, [
        f"only some of the files that their names announce are read: {s}" for s in found
    ]


def _without_copies(corpus: _Corpus) -> _Corpus:
    """Leave out, and count, files that are compressed copies of others in their folder.

    Raises SourceError for one with another content, and SampleError if one cannot be read.
    """
    files = corpus.files
    found = copies(files.folder_of.tolist(), files.names)
    for copy, other in found.items():
        paths = [below(corpus.root, files.relative(number)) for number in (copy, other)]
        check_copy(paths[0], int(files.sizes[copy]), paths[1], int(files.sizes[other]))
    if not found:
        return corpus
    corpus.ignored[COPIES] += len(found)
    kept = np.array([number for number in range(len(files)) if number not in found], np.int64)
    return corpus._replace(files=files.select(kept))


def _nothing(path: Path, corpus: _Corpus) -> ShardkitError:
    if corpus.problems:
        return corpus.problems[0]
    found = ", ".join(f"{n} x {what}" for what, n in corpus.ignored.most_common(4))
    return SourceError(
        "there are no documents here", path=path, expected=_suffixes(), found=found or "nothing"
    )


def _suffixes() -> str:
    names = ", ".join("." + suffix for suffix in FORMS)
    return f"files that end in {names}, or these with {', '.join('.' + c for c in COMPRESSIONS)}"


# --- splits --------------------------------------------------------------------------------------


def _splits(
    path: Path, corpus: _Corpus, options: TextOptions, subset: str, *, listed: bool
) -> dict[str, Split]:
    """Return the splits given by file names or README.md; files outside them are counted."""
    names = [corpus.files.relative(index) for index in range(len(corpus.files))]
    documents = _one_document_each(corpus, options)
    if listed:
        return grouped(path, names, documents=documents)
    splits, others = splits_of(path, names, subset=subset, documents=documents)
    if others:
        corpus.ignored[OUTSIDE] += others
    return splits


def _one_document_each(corpus: _Corpus, options: TextOptions) -> bool:
    return not corpus.tables and options.documents != "line"


def _whole_files(
    path: Path, corpus: _Corpus, options: TextOptions, splits: dict[str, Split]
) -> bool:
    """Whether every file is one document.

    By default, the files of a folder are; a single file is not, nor `train.txt` next to `test.txt`.
    """
    if corpus.tables:
        return False
    if options.field not in (None, LINE_FIELD):
        raise UsageError(
            f"files of plain text have no field {options.field!r}",
            path=path,
            fix="remove --text-field: the field is called text",
        )
    if options.documents != "auto":
        return options.documents == "file"
    by_name = any(not folder for folder, _ in splits.values())
    return path.is_dir() and not by_name


# --- what the files hold -------------------------------------------------------------------------


def _spread(indices: Iterable[int], count: int) -> list[int]:
    """Return at most `count` of the indices, spread evenly."""
    chosen = list(indices)
    if len(chosen) <= count:
        return chosen
    return [chosen[n * (len(chosen) - 1) // (count - 1)] for n in range(count)]


def _ratios(corpus: _Corpus) -> dict[str, float]:
    """Return how much files grow when decompressed, by compression, estimated from a few files."""
    files = corpus.files
    by_compression: dict[str, list[int]] = {}
    for index, name in enumerate(files.names):
        suffix = name.rpartition(".")[2].lower()
        if suffix in COMPRESSIONS:
            by_compression.setdefault(suffix, []).append(index)
    ratios = {}
    for compression, indices in by_compression.items():
        taken = made = 0
        for index in _spread(indices, _EXPANSION_FILES):
            path = below(corpus.root, files.relative(index))
            stored, decompressed = expansion(path, int(files.sizes[index]), compression)
            taken, made = taken + max(stored, 0), made + decompressed
        ratios[compression] = round(made / taken, 3) if taken else 1.0
    return ratios


def _find_encodings(corpus: _Corpus) -> list[str]:
    """Detect the encoding of each file, and return a note with their counts."""
    files, detect = corpus.files, load_detector()
    files.encodings = ["utf-8"]
    for index in range(len(files)):
        try:
            file = open_file(corpus.root, files, index, "strict")
            encoding = detect(file.blocks())
        except SampleError:  # which is reported when the file is read
            continue
        if encoding not in files.encodings:
            files.encodings.append(encoding)
        files.encoding_of[index] = files.encodings.index(encoding)
    counts = Counter(files.encodings[number] for number in files.encoding_of.tolist())
    found = ", ".join(f"{name} ({count:,})" for name, count in counts.most_common())
    return [f"detected encodings, with the number of files: {found}"]


def _find_quotes(corpus: _Corpus) -> list[str]:
    """Find out whether the cells of each TSV are quoted; note quotes that do not show it."""
    files, kept = corpus.files, 0
    for index in range(len(files)) if corpus.tables else ():
        if files.name(index).form != "tsv":
            continue
        try:
            found = open_file(corpus.root, files, index, "strict").quotes()
        except SampleError:  # which is reported when the file is read
            files.quoted_of[index] = UNSURE
            continue
        files.quoted_of[index] = found.quoted is not None
        if found.plain is None:
            kept += found.unclear if found.quoted is None else 0
        elif found.quoted is not None:
            files.quoted_of[index] = UNSURE
    note = f"quotation marks around {kept:,} cells of TSV belong to the text: no cell needs them"
    return [note] if kept else []


def _fields(
    path: Path,
    corpus: _Corpus,
    options: TextOptions,
    selection: Selection,
    notes: list[str],
    also: Collection[str],
    asked: LabelColumn | None,
) -> tuple[Fields, Sampled]:
    """Choose the fields from the first documents of a few files; return them and the documents."""
    sampled, problems = _sample(corpus, options)
    if not sampled:
        if corpus.tables or (not problems and len(corpus.files) <= _SAMPLE_FILES):
            raise _unusable(path, problems)
        return Fields(LINE_FIELD, {}), sampled
    if corpus.tables:
        form = corpus.files.name(0).form
        refuse_partitions(path, corpus.files.folders, form, sampled.names())
    column = None if asked is None else asked.column
    text = choose(sampled, options.field, column)
    _refuse_headless(path, sampled, options, text, notes)
    if text is None:
        types = sampled.types()
        raise SourceError(
            f"the first documents have no field {options.field or LINE_FIELD!r}",
            path=path,
            expected=near(options.field or LINE_FIELD, types),
            found=", ".join(f"{name} ({type(kind).__name__})" for name, kind in types.items()),
            fix="say which field is the text: --text-field NAME",
        )
    if text != LINE_FIELD and options.field is None:
        notes.append(f"the text is the field {text!r}, the only one of type text")
    if options.keep_fields and sampled.reserved():
        names = ", ".join(sampled.reserved())
        notes.append(f"left out, because these names are reserved: {names}")
    fields = fields_of(sampled, text, selection, also, column, keep=options.keep_fields)
    if asked is not None:
        fields = _labelled(corpus, options, fields, asked, sampled)
        if asked.classes is None and fields.label is not None and fields.label.names is not None:
            notes.append(
                "all documents were read once to find their classes; --classes FILE avoids this"
            )
    return fields, sampled


def _labelled(
    corpus: _Corpus, options: TextOptions, fields: Fields, asked: LabelColumn, sampled: Sampled
) -> Fields:
    """Return the fields with a label, whose values are collected from all documents."""
    types = sampled.types()
    asked.refuse_unknown([name for name in types if name != LABEL or asked.column == LABEL])
    if asked.column == fields.text or LABEL in fields.others:
        asked.refuse_unknown([LABEL, *types])
        raise UsageError(
            f"the field {asked.column!r} is the text", fix="choose another field as the label"
        )
    kind = types[asked.column]
    labels = find_labels(asked, kind, lambda: _values(corpus, options, asked.column))
    return replace(fields, label=labels, label_kind=kind)


def _values(corpus: _Corpus, options: TextOptions, column: str) -> Iterator[Any]:
    """Yield the values of a field in all documents that can be read."""
    for index in range(len(corpus.files)):
        with contextlib.suppress(SampleError):  # which is reported when the file is read
            file = open_file(corpus.root, corpus.files, index, options.encoding_errors)
            for record in file.records():
                if isinstance(record.value, dict):
                    yield record.value.get(column)


def _sample(corpus: _Corpus, options: TextOptions) -> tuple[Sampled, list[SampleError]]:
    sampled = Sampled()
    sampled.whole = len(corpus.files) <= _SAMPLE_FILES
    problems = []
    for index in _spread(range(len(corpus.files)), _SAMPLE_FILES):
        file = open_file(corpus.root, corpus.files, index, options.encoding_errors)
        try:
            for number, record in enumerate(file.records(), 1):
                if isinstance(record.value, SampleError):
                    problems.append(located(record.value, file.path, record.start))
                else:
                    sampled.add(record.value, cells=file.form in ("csv", "tsv"))
                if number == _SAMPLE_DOCUMENTS or record.end >= _SAMPLE_BYTES:
                    sampled.whole &= file.form == "text"  # lines of text have no other fields
                    break
        except HoleError:  # the sizes of documents cannot be estimated
            raise
        except SampleError as error:
            problems.append(located(error, file.path, 0))
    return sampled, problems


def _unusable(path: Path, problems: list[SampleError]) -> SourceError:
    if not problems:
        return SourceError(
            "there are no documents here",
            path=path,
            expected="a document on a line, or a row of a table below its header",
            found="only blank lines, if any",
            fix="remove the files without documents",
        )
    first = problems[0]
    return SourceError(
        first.what, expected=first.expected, found=first.found, fix=first.fix, **first.where
    )


# --- byte ranges ------------------------------------------------------------------------


def _ranges(root: FilePath, files: Files) -> Ranges:
    """Split long files into ranges of equal length; readers find the start of a line themselves."""
    lengths = files.lengths()
    cut = np.zeros(len(files), bool)
    for index in np.flatnonzero(files.sizes > RANGE).tolist():
        cut[index] = _can_be_cut(root, files, index)
    counts = np.where(cut, -(-lengths // RANGE), 1)
    file = np.repeat(np.arange(len(files)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(file)) - first) * RANGE
    end = np.where(cut[file], np.minimum(start + RANGE, lengths[file]), lengths[file])
    return Ranges(file.astype(np.uint32), start.astype(np.int64), end.astype(np.int64))


def _can_be_cut(root: FilePath, files: Files, index: int) -> bool:
    """Whether the start of a record can be found from the bytes right before it.

    A row of a table may contain line ends, but only within quotes.
    """
    name = files.name(index)
    if name.compression:
        return False
    if name.form in ("text", "json"):
        return True
    if name.form == "tsv":
        return files.quoted(index) is False
    if b'"' not in '"'.encode(files.encoding(index)):
        return False
    try:
        found = open_file(root, files, index, "strict").blocks()
        return not any(b'"' in block or is_hole(block) for block in found)
    except SampleError:  # which is reported when the file is read
        return False
