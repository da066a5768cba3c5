"""Plan a text corpus: its files, their splits, and the fields of their documents."""

from __future__ import annotations

import contextlib
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import numpy as np

from shardkit.dataset.card import OUTSIDE, splits_of
from shardkit.dataset.conditions import names_in
from shardkit.dataset.folders import below as below_folder
from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError, drop_option, near
from shardkit.formats.table_folders import partition_columns
from shardkit.formats.unsupported import way_with
from shardkit.metadata.recipe import Recipe
from shardkit.metadata.splits import Split, grouped
from shardkit.options import ALL_FIELDS, Selection, TextOptions
from shardkit.schema import RESERVED, FieldType, Text
from shardkit.sources.base import Source, Stream
from shardkit.sources.columns import CHUNK
from shardkit.sources.conversations import Conversations, refuse_without_template
from shardkit.sources.file_table import odd_keys
from shardkit.sources.files import FilePath, below, file_path
from shardkit.sources.labels import LABEL, LabelColumn, find_labels
from shardkit.sources.metadata import GivenTable, join
from shardkit.sources.partitioned import values_of
from shardkit.sources.text.classes import label_folders
from shardkit.sources.text.documents import Files, Ranges, TextFiles, TextStream, located
from shardkit.sources.text.fields import Fields, Sampled, choose
from shardkit.sources.text_files import COMPRESSIONS, FORMS, TABLES, parse_name
from shardkit.sources.text_files.blocks import expansion
from shardkit.sources.text_files.encodings import check_encoding, detect
from shardkit.sources.text_files.records import LINE_FIELD, Record, TextFile
from shardkit.storage import fs
from shardkit.storage.patterns import incomplete, refuse_incomplete
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
_SAMPLE_BYTES = 256 << 10  # at a time, unless a document is longer
_EXPANSION_FILES = 8
_MAX_COLUMNS = 20_000  # whose types are found


def open_text(
    path: Path, recipe: Recipe, strict: bool, listed: Sequence[Path] = (), subset: str = ""
) -> dict[str, Source | Stream]:
    """Open the documents of a file or folder, one source per split; `{"": source}` without splits.

    With `listed`, only these files are read, as if the folder contained no others. Unless `strict`,
    folders that the recipe's classes do not name are further classes.

    Raises SourceError if there are no documents, or none of the first ones has the text.
    """
    options = recipe.documents
    if options.encoding != "auto":
        check_encoding(options.encoding)
    table, asked = GivenTable.of(recipe), LabelColumn.of(recipe)
    corpus = _find(path, options, listed, None if table is None else table.path)
    splits = _splits(corpus, recipe.split, subset)
    whole = _is_whole_files(corpus, splits)
    _find_encodings(corpus)
    corpus.files.ratios = _ratios(corpus)
    _find_headers(corpus)
    fields, sampled = None, Sampled()
    if not whole:
        if table is not None:
            raise UsageError(
                "metadata can only be used if each file is a document",
                path=path,
                fix="remove --metadata, or take whole files as documents: --documents file",
            )
        fields, sampled = _fields(corpus, recipe, asked)
    elif table is None and asked is not None:
        raise UsageError(
            f"there is no table with the column {asked.column!r}",
            path=path,
            fix="name the table with --metadata FILE",
        )
    splits = splits or {"": Split("", list(range(len(corpus.files))))}
    parts = {name: _files_of(corpus, split, whole=whole) for name, split in splits.items()}
    every = {name: _below(corpus.files.folders, split.folder) for name, split in splits.items()}
    named = recipe.classes if asked is None and not isinstance(recipe.classes, Mapping) else None
    # Without a list, filters may need labels of folders that only seem to be classes.
    guess = asked is None and whole and corpus.is_folder and (strict or recipe.chooses)
    classes, notes = label_folders(path, parts, every, named, guess=guess, strict=strict)
    if table is not None:
        _join_table(corpus, table, splits, parts)
    sources = {}
    for name, (folder, _) in splits.items():
        root = below(corpus.root, folder) if folder else corpus.root
        sources[name] = _source(root, parts[name], fields, sampled, options.encoding_errors)
        sources[name].add_labels(classes)
    first = next(iter(sources.values()))
    first.ignored, first.problems = dict(corpus.ignored), corpus.problems
    first.notes = [*corpus.notes, *notes]
    return {**sources}


# --- files ---------------------------------------------------------------------------------------


@dataclass
class _Corpus:
    """The files found at a path, all of them tables or all texts."""

    path: Path
    options: TextOptions
    is_folder: bool  # whether all files of a folder are read, rather than a file or listed ones
    root: FilePath
    files: Files
    tables: bool
    ignored: Counter[str]
    problems: list[ShardkitError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Found(NamedTuple):
    folder: int
    name: str
    size: int
    time: int
    inode: int


def _find(path: Path, options: TextOptions, listed: Sequence[Path], table: Path | None) -> _Corpus:
    """Return the files, without the metadata `table`.

    Raises SourceError if there are none, or if the names of files announce others.
    """
    began = time_ns()
    if listed:
        corpus = _of_files(path, path, listed, options)
    elif path.is_dir():
        walk = Walk(path, None if table is None else relative_to(table, path))
        corpus = _of_folder(path, walk, options)
    elif parse_name(path.name) is None:
        raise SourceError(
            "this is not a text file, judging by its name",
            path=path,
            expected=_suffixes(),
            fix="rename it according to its content",
        )
    else:
        corpus = _of_files(path, path.parent, [path], options)
    corpus.files.began = began
    if not corpus.files.names:
        if corpus.problems:
            raise corpus.problems[0]
        found = ", ".join(f"{n} x {what}" for what, n in corpus.ignored.most_common(4))
        raise SourceError(
            "there are no documents here",
            path=path,
            expected=_suffixes(),
            found=found or "nothing",
            fix=way_with(corpus.ignored) or None,
        )
    names = [corpus.files.relative(number) for number in range(len(corpus.files))]
    _refuse_copies(corpus, names)
    if corpus.is_folder:
        refuse_incomplete(path, names)
    elif len(names) > 1:
        corpus.notes += [
            f"only some of the files that their names announce are read: {some}"
            for some in incomplete(names)
        ]
    return corpus


def _of_files(path: Path, root: Path, paths: Sequence[Path], options: TextOptions) -> _Corpus:
    """Return the given files below a folder, in this order."""
    folders: dict[str, int] = {}
    found = []
    for file in paths:
        folder, _, name = below_folder(root, file).rpartition("/")
        about = fs.status(file)
        size = about.st_size if stat.S_ISREG(about.st_mode) else NO_FILE
        number = folders.setdefault(folder, len(folders))
        found.append(_Found(number, name, size, about.st_mtime_ns, about.st_ino))
    filled = [file for file in found if file.size]
    ignored = +Counter({"empty file": len(found) - len(filled)})
    first = parse_name(paths[0].name)
    tables = first is not None and first.form != "text"
    files = _table(list(folders), filled)
    above = "" if root == Path() else file_path(root)
    return _Corpus(path, options, False, above, files, tables, ignored)


def _of_folder(root: Path, walk: Walk, options: TextOptions) -> _Corpus:
    """Return the files below a folder: the tables if there are any, otherwise the texts."""
    folders: list[str] = []
    texts: list[_Found] = []
    tables: list[_Found] = []
    about: list[_Found] = []  # describe the data: README.md, LICENSE.txt, dataset_infos.json
    for listing in walk:
        folder, number = listing.folder.relative, len(folders)
        folders.append(folder)
        for entry in listing.files:
            name = parse_name(entry.name)
            if name is None:
                walk.ignored[kind_of_file(entry.name)] += 1
                continue
            found = _Found(number, entry.name, *look(entry))
            if found.size == 0:
                walk.ignored["empty file"] += 1
            elif _OF_IMDB.fullmatch(found.name) or (
                not folder and _ABOUT.fullmatch(found.name.lower())
            ):
                about.append(found)
            else:
                (texts if name.form == "text" else tables).append(found)
    # They are documents only if there is nothing else, such as data in other formats.
    if not (tables or texts or walk.ignored.keys() - {"hidden", "empty file"}):
        texts, about = about, []
    walk.ignored.update(kind_of_file(f.name) for f in [*about, *(texts if tables else ())])
    chosen = tables or texts
    chosen.sort(key=lambda file: f"{folders[file.folder]}/{file.name}".lstrip("/"))
    files = _table(folders, chosen)
    return _Corpus(
        root,
        options,
        True,
        file_path(root),
        files,
        bool(tables),
        walk.ignored,
        walk.problems,
        [*walk.notes],
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
        encoding_of=np.zeros(len(found), np.uint8),
        delimiter_of=np.zeros(len(found), np.uint8),
        quoted_of=np.ones(len(found), np.bool_),
    )


def _refuse_copies(corpus: _Corpus, names: Sequence[str]) -> None:
    """Raise SourceError for a file that is there plain and compressed: it would count twice."""
    seen: dict[str, str] = {}
    for name in names:
        compressed = name.lower().endswith(COMPRESSIONS)
        other = seen.setdefault(name.rpartition(".")[0] if compressed else name, name)
        if other != name:
            raise SourceError(
                "a file is there more than once, plain and compressed",
                path=corpus.path,
                found=f"{other} and {name}",
                fix="move one of them away, or give the files that are to be read",
            )


def _suffixes() -> str:
    names = ", ".join("." + suffix for suffix in FORMS)
    return f"files that end in {names}, or these with {', '.join('.' + c for c in COMPRESSIONS)}"


# --- splits --------------------------------------------------------------------------------------


def _splits(corpus: _Corpus, split: str, subset: str) -> dict[str, Split]:
    """Return the splits given by file names or README.md; files outside them are counted."""
    if not (split == "auto" or subset) or not corpus.path.is_dir():
        return {}
    names = [corpus.files.relative(index) for index in range(len(corpus.files))]
    documents = not corpus.tables and corpus.options.documents != "line"
    if not corpus.is_folder:
        splits = grouped(corpus.path, names, documents=documents)
    else:
        splits, others = splits_of(corpus.path, names, subset=subset, documents=documents)
        if others:
            corpus.ignored[OUTSIDE] += others
    if split == "none" and splits:
        return {"": Split("", sorted(n for part in splits.values() for n in part.numbers))}
    return splits


def _is_whole_files(corpus: _Corpus, splits: dict[str, Split]) -> bool:
    """Return whether every file is one document.

    By default, the files of a folder are; a single file is not, nor `train.txt` next to `test.txt`.
    """
    options = corpus.options
    if corpus.tables:
        return False
    if options.field not in (None, LINE_FIELD):
        raise UsageError(
            f"files of plain text have no field {options.field!r}",
            path=corpus.path,
            fix="remove --text-field: the field is called text",
        )
    if options.documents != "auto":
        return options.documents == "file"
    by_name = any(not folder for folder, _ in splits.values())
    return corpus.path.is_dir() and not by_name


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


def _join_table(
    corpus: _Corpus, table: GivenTable, splits: Mapping[str, Split], files: dict[str, Files]
) -> None:
    """Join metadata rows to the files; files without a row are dropped, and are problems."""
    parts = [(split.folder, files[name]) for name, split in splits.items()]
    joined = join(table.read(), parts, table.labels, every=True)
    for name, found in zip(splits, joined, strict=True):
        files[name] = files[name].select(found.files)
        files[name].metadata = found.metadata
        if found.labelled or LABEL in found.metadata.schema:
            files[name].labels = []  # the table replaces labels from folders
        corpus.problems += found.problems
        corpus.notes += found.notes


def _source(
    root: FilePath, files: Files, fields: Fields | None, sampled: Sampled, errors: str
) -> TextFiles | TextStream:
    """Return the documents of one split; without `fields`, each file is one."""
    if fields is None:
        return TextFiles(root, files, errors)
    stream = TextStream(root, files, _ranges(root, files), fields, errors)
    stream.others = {n: None for n in sampled.types if n not in fields.schema}
    stream.all_known = sampled.whole
    stream.also = fields.also
    stream.guessed = frozenset(fields.others)
    return stream


# --- what the files hold -------------------------------------------------------------------------


def _spread(indices: Sequence[int], count: int) -> Sequence[int]:
    """Return at most `count` of the indices, spread evenly."""
    if len(indices) <= count:
        return indices
    return [indices[n * (len(indices) - 1) // (count - 1)] for n in range(count)]


def _ratios(corpus: _Corpus) -> dict[str, float]:
    """Return how much files grow when decompressed, by compression, estimated from a few files."""
    files, ratios = corpus.files, {}
    suffixes = [name.rpartition(".")[2].lower() for name in files.names]
    for compression in {*COMPRESSIONS} & {*suffixes}:
        indices = [index for index, suffix in enumerate(suffixes) if suffix == compression]
        stored = made = 0
        for index in _spread(indices, _EXPANSION_FILES):
            path = below(corpus.root, files.relative(index))
            sizes = expansion(path, int(files.sizes[index]), compression)
            stored, made = stored + max(sizes[0], 0), made + sizes[1]
        ratios[compression] = round(made / stored, 3) if stored else 1.0
    return ratios


def _find_encodings(corpus: _Corpus) -> None:
    """Set the encoding of each file; detected ones are noted, with their counts."""
    files, encoding = corpus.files, corpus.options.encoding
    if encoding != "auto":
        files.encodings = [encoding]
        return
    files.encodings = ["utf-8"]
    for index in range(len(files)):
        with contextlib.suppress(SampleError):  # which is reported when the file is read
            encoding = detect(files.open(corpus.root, index).blocks())
            if encoding not in files.encodings:
                files.encodings.append(encoding)
            files.encoding_of[index] = files.encodings.index(encoding)
    counts = Counter(files.encodings[number] for number in files.encoding_of.tolist())
    found = ", ".join(f"{name} ({count:,})" for name, count in counts.most_common())
    corpus.notes.append(f"detected encodings, with the number of files: {found}")


def _find_headers(corpus: _Corpus) -> None:
    """Set the columns of tables without a header, and whether the cells of each TSV are quoted."""
    files, kept, delimiters = corpus.files, 0, Counter[str]()
    every = range(len(files)) if corpus.tables else ()
    tables = [number for number in every if files.name(number).form in TABLES]
    plain = corpus.options.quoting == "none"
    if (corpus.options.header is not None or plain) and not tables:
        raise UsageError(
            "columns, no_header and quoting are for CSV and TSV only",
            path=corpus.path,
            fix="remove --columns, --no-header and --quoting",
        )
    for index in tables:
        file = files.open(corpus.root, index)
        if files.name(index).form == "csv":
            delimiter = file.delimiter_found()
            files.delimiter_of[index] = ord(delimiter)
            delimiters[delimiter] += 1
            files.quoted_of[index] = not plain
        else:
            files.quoted_of[index], unclear = (False, 0) if plain else file.quotes()
            kept += unclear
    corpus.notes += [
        f"the cells are separated by {delimiter!r} instead of commas in {count:,} CSV"
        f" file{'s' * (count > 1)}"
        for delimiter, count in delimiters.items()
        if delimiter != ","
    ]
    if kept:
        corpus.notes.append(
            f"quotation marks around {kept:,} cells of TSV belong to the text: no cell needs them"
        )
    files.header = corpus.options.header
    if files.header == ():  # as many in all tables as in the first one
        files.header = files.open(corpus.root, tables[0], "replace").numbered_columns()


def _fields(corpus: _Corpus, recipe: Recipe, asked: LabelColumn | None) -> tuple[Fields, Sampled]:
    """Choose the fields, from what a few documents or all rows of tables hold; return both."""
    options = corpus.options
    table = corpus.tables and options.field is None and options.tokenizer is None
    sampled, problem = _sample(corpus, every=table)
    if not sampled:
        if not corpus.tables and (problem or len(corpus.files) > _SAMPLE_FILES):
            return Fields(LINE_FIELD, {}), sampled
        raise _nothing(corpus.path, problem)
    named = _in_folders(corpus)
    folders = sampled.add_folders(named)
    if both := [name for name in named if name not in folders]:
        corpus.notes.append(
            f"values of {', '.join(both)} are those in the files, not those in the names of folders"
        )
    types = sampled.of_rows() if table else sampled.of_documents()
    columns = () if asked is None else asked.columns
    chat = _conversations(corpus.path, options, types, recipe.selection)
    text = None
    if not chat and (not table or sampled.types == {LINE_FIELD: Text()}):
        text = _text_of(corpus, sampled, types, columns)
    if not table:  # any further document may lack a field
        types = {name: replace(kind, optional=True) for name, kind in types.items()}
    fields = _selected(corpus, recipe, types, (text, *chat), columns)
    fields = replace(fields, folders=folders)
    if "" in fields.others:
        raise SourceError(
            "a column of the table has no name",
            path=corpus.path,
            found=_listed(types),
            fix="name it in the first line (pandas writes no such column with index=False), or"
            f" convert without it: {drop_option('')}",
        )
    if asked is not None:
        fields = _labelled(corpus, fields, asked, sampled.of_documents())
    if chat:
        fields = replace(fields, others={**chat, **fields.others}, unchecked=chat)
    elif text is None:
        corpus.notes += _of_table(sampled, fields, headed=options.header is None)
    return fields, sampled


def _in_folders(corpus: _Corpus) -> Mapping[str, Sequence[str | None]]:
    """Return the columns that the folders of tables name, with the value of each folder."""
    files = corpus.files
    used = [files.folders[number] for number in np.unique(files.folder_of)]
    return partition_columns(corpus.path, used, files.name(0).form) if corpus.tables else {}


def _nothing(path: Path, problem: ShardkitError | None) -> SourceError:
    """Return the error for files without documents, of which the first one has this problem."""
    if problem is None:
        return SourceError(
            "there are no documents here",
            path=path,
            expected="a document on a line, or a row of a table below its header",
            found="only blank lines, if any",
            fix="remove the files without documents",
        )
    return SourceError(
        problem.what,
        expected=problem.expected,
        found=problem.found,
        fix=problem.fix,
        **problem.where,
    )


def _text_of(
    corpus: _Corpus, sampled: Sampled, types: Mapping[str, FieldType], labels: Collection[str]
) -> str:
    """Return the field with the text. Raises SourceError if it is not known."""
    options = corpus.options
    text = choose(types, options.field, labels)
    if options.field is None and text != LINE_FIELD and options.header is None:
        _refuse_headless(corpus.path, sampled)
    if text is None:
        raise SourceError(
            f"the first documents have no field {options.field or LINE_FIELD!r}",
            path=corpus.path,
            expected=near(options.field or LINE_FIELD, types),
            found=_listed(types),
            fix="say which field is the text: --text-field NAME",
        )
    if text != LINE_FIELD and options.field is None:
        corpus.notes.append(f"the text is the field {text!r}, the only one of type text")
    return text


def _selected(
    corpus: _Corpus,
    recipe: Recipe,
    types: Mapping[str, FieldType],
    texts: Sequence[str | None],
    labels: Sequence[str],
) -> Fields:
    """Return the fields that are read: those to store, and those that are filtered by.

    `texts` are the text, and the fields of conversations; `labels` the columns of labels.
    """
    (text, *chat), used = texts, {*texts, *labels}
    selection, keep = recipe.selection, corpus.options.keep_fields or not (text or chat)
    names = [name for name in types if name not in used and name not in RESERVED]
    stored = [name for name in names if keep and selection.has(name)]
    also = {*(names_in(recipe.where) if recipe.where else ()), recipe.stratify, recipe.group}
    only = [name for name in names if name in also and name not in stored]
    others = {n: types[n] for n in names if n in stored or n in only}
    left = [name for name in types if name not in used and name not in stored]
    if left and selection == ALL_FIELDS and not keep:
        some = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
        blocks = corpus.options.seq_len is not None  # which cannot have other fields
        advice = f", without {some}" if blocks else f"; --keep-fields also stores {some}"
        corpus.notes.append(f"only the text of documents is stored{advice}")
    return Fields(text, others, keep and selection.fields is None, selection, only)


def _listed(types: Mapping[str, FieldType]) -> str:
    return ", ".join(f"{name} ({type(kind).__name__})" for name, kind in types.items())


def _of_table(sampled: Sampled, fields: Fields, *, headed: bool) -> Iterator[str]:
    """Yield notes on the columns of tables: their types, and why these may surprise."""
    kept = {name: kind for name, kind in fields.schema.items() if name not in fields.also}
    yield f"columns that become fields: {_listed(kept)}"
    yield from sampled.surprises()
    if headed and (doubt := sampled.doubtful_header()):
        columns = ",".join(f"NAME{number}" for number in range(len(sampled.types)))
        yield (
            f"the first line of the table seems to be a row: there is {doubt}; if so, name the"
            f" columns: --columns {columns}, or number them: --no-header"
        )


def _conversations(
    path: Path, options: TextOptions, types: Mapping[str, FieldType], selection: Selection
) -> dict[str, FieldType]:
    """Return the fields with conversations, if they are to be rendered; else refuse them."""
    types = {name: kind for name, kind in types.items() if selection.has(name)}
    if options.chat_template is None:
        refuse_without_template(types, options)
        return {}
    read = Conversations.of(types, path=path).types(types)
    return {name: kind for name, kind in read.items() if selection.has(name)}


def _refuse_headless(path: Path, sampled: Sampled) -> None:
    """Raise SourceError if the first row of a table seems to be data, not names of columns."""
    doubt = sampled.doubtful_header()
    if doubt is None:
        return
    names = [f"NAME{number}" for number in range(len(sampled.types) - 1)]
    raise SourceError(
        "the first line of the table seems to be a row, not the header with the column names",
        path=path,
        expected="names of columns, such as label,text",
        found=doubt,
        fix=f"if it is a row, name its columns: --columns {','.join([*names, 'text'])}, or"
        f" number them: --no-header --text-field column{len(names)}; if it is the header, say"
        " which column is the text: --text-field NAME",
    )


def _labelled(
    corpus: _Corpus, fields: Fields, asked: LabelColumn, types: Mapping[str, FieldType]
) -> Fields:
    """Return the fields with a label, whose values are collected from all documents."""
    asked.refuse_unknown([n for n in types if n != asked.field or n in asked.columns])
    if fields.text in asked.columns or asked.field in (fields.text, *fields.others):
        asked.refuse_unknown([asked.field, *types])
        raise UsageError(
            f"the field {fields.text!r} is the text", fix="choose another field as the label"
        )
    kind = types[asked.column]
    labels = find_labels(asked, kind, lambda: _values(corpus, fields, asked))
    corpus.notes += labels.notes
    return replace(fields, label=labels, label_kind=kind)


def _values(corpus: _Corpus, fields: Fields, asked: LabelColumn) -> Iterator[Any]:
    """Yield the values of the columns in all documents that can be read."""
    for index in range(len(corpus.files)):
        named = values_of(corpus.files.folder(index), fields.folders)
        with contextlib.suppress(SampleError):  # which is reported when the file is read
            file = corpus.files.open(corpus.root, index, corpus.options.encoding_errors)
            for record in file.records():
                if isinstance(record.value, dict):
                    yield asked.value_in({**record.value, **named})


def _sample(corpus: _Corpus, *, every: bool) -> tuple[Sampled, ShardkitError | None]:
    """Return what the documents hold, and the error of the first bad one.

    These are the first documents of a few files, or all documents of `every` file.
    """
    sampled = Sampled()
    problem: ShardkitError | None = None
    count = len(corpus.files) if every else _SAMPLE_FILES
    sampled.whole = len(corpus.files) <= count
    for index in _spread(range(len(corpus.files)), count):
        file = corpus.files.open(corpus.root, index, corpus.options.encoding_errors)
        lists = _lists(file, CHUNK if every else _SAMPLE_DOCUMENTS)
        for some in lists:
            for record in some:
                if problem is None and isinstance(record.value, SampleError):
                    problem = located(record.value, file.path, record.start)
                    if file.form in TABLES:
                        problem = problem.located(line=file.line_of(record.start))
            if rows := [r.value for r in some if not isinstance(r.value, SampleError)]:
                sampled.add(rows, cells=file.form in TABLES)
            if every and len(sampled) > _MAX_COLUMNS:
                raise SourceError(
                    f"the table has over {_MAX_COLUMNS:,} columns",
                    path=corpus.path,
                    found=f"so many different names, up to byte {some[-1].start:,} of {file.path}",
                    fix="if the rows are documents, name the field with their text: --text-field",
                )
            if not every:  # lines of text have no other fields
                sampled.whole &= file.form == "text" or not next(lists, ())
                break
    return sampled, problem


def _lists(file: TextFile, most: int) -> Iterator[list[Record]]:
    """Yield the records of a file in lists that fit into memory; also the error for the rest."""
    some: list[Record] = []
    size = 0
    try:
        for record in file.records():
            some.append(record)
            size += record.end - record.start
            if len(some) == most or size >= _SAMPLE_BYTES:
                yield some
                some, size = [], 0
    except SampleError as error:
        some.append(Record(0, 0, error))
    yield some


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
    """Return whether the start of a record can be found from the bytes right before it.

    A row of a table may contain line ends, but only within quotes.
    """
    name, file = files.name(index), files.open(root, index)
    if name.compression or name.form == "text":
        return not name.compression
    try:
        if name.form == "json":
            return not file.is_array()
        if name.form == "tsv" or not file.quoted:
            return not file.quoted
        return b'"' in '"'.encode(file.encoding) and not file.has_quotes()
    except SampleError:  # which is reported when the file is read
        return False
