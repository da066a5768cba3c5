"""The options of a conversion: frozen dataclasses that check their values when created."""

from __future__ import annotations

import codecs
import contextlib
import csv
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from shardkit.errors import UsageError, near
from shardkit.helpers.keywords import called_by
from shardkit.helpers.names import is_safe
from shardkit.helpers.processors import processors
from shardkit.helpers.words import parse_size

if TYPE_CHECKING:
    from typing_extensions import Unpack


RESIZE_MODES = ("shorter", "longer", "exact", "crop", "pad")
IMAGE_FORMATS = ("keep", "jpeg", "png", "webp", "raw")
PACKINGS = ("concat", "nosplit", "pad")
REMAINDERS = ("keep", "drop", "pad")
CHROMA = ("420", "422", "444")  # from coarse to fine
SEEDS = (1 << 64) - 1  # the largest seed: order.py computes modulo 2^64
MAX_PIXELS = 1 << 27  # limit for images that are decoded, unless another one is given
MAX_RATE = 655_350  # Hz, the maximum of FLAC
# The values of options that are None, for images that are re-encoded.
IMAGE_DEFAULTS: dict[str, Any] = {
    "quality": 90,
    "chroma": "420",
    "background": "#ffffff",
    "icc": "srgb",
}


class ShortRepr:
    """Base of options, whose repr shows only the values that differ from the defaults."""

    def __repr__(self) -> str:
        usual, words = type(self)(), []
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.repr and value != getattr(usual, f.name):
                words.append(f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"


def _one_of(default: str | None, *choices: str, called: str | None = None) -> Any:
    """Return an option with a few choices, that functions and the command line call so."""
    return field(default=default, metadata={"choices": choices, "called": called})


def _called(name: str) -> Any:
    """Return an option, None by default, that functions and the command line call so."""
    return field(default=None, metadata={"called": name})


def _whole(default: int | None, least: int, most: int = 1 << 62) -> Any:
    """Return an option that is a whole number from `least` to `most`."""
    return field(default=default, metadata={"range": (least, most)})


class Options(ShortRepr):
    """Base of the options of a conversion, which are checked as their declarations say."""

    def __post_init__(self) -> None:
        check_types(self)
        for f in fields(self):  # type: ignore[arg-type]
            if choices := f.metadata.get("choices"):
                check_choice(self, f.name, (None, *choices) if f.default is None else choices)
            if limits := f.metadata.get("range"):
                check_numbers(self, limits[1], **{f.name: limits[0]})

    def _requires(self, names: Sequence[str], present: object, what: str, fix: str) -> None:
        """Raise UsageError if one of these options is given without `what` it requires."""
        for name in names:
            value = getattr(self, name)
            if not present and value not in (None, {}, getattr(type(self), name, None)):
                raise UsageError(f"{name} requires {what}", fix=fix)


@dataclass(frozen=True, repr=False)
class ImageOptions(Options):
    """How images are resized, re-encoded, filtered and checked. None: this option is not used.

    Images that already meet the options are copied byte for byte. Images that are re-encoded use
    `shardkit.options.IMAGE_DEFAULTS` for options that are None.

    resize: reduce images to this size in pixels; resize_mode selects the side.
    resize_mode: "shorter", "longer" or "exact" (both sides), or "crop" or "pad" to a square.
    upscale: enlarge images that are smaller than the size, too.
    format: "keep" the format of each image, or store "jpeg", "png", "webp" or "raw" (pixels).
    quality: quality of JPEG and WebP, from 1 to 100. None: 90.
    chroma: chroma subsampling of JPEG: "420", "422" or "444". None: "420".
    background: colour behind transparent pixels and in margins, such as "#808080". None: white.
    icc: "srgb" converts pixels by their colour profile; "keep" stores the profile. None: "srgb".
    min_size: drop images whose shorter side has fewer pixels.
    max_aspect: drop images whose sides have a larger ratio, longer to shorter.
    max_pixels: drop images with more pixels.
    check: check images that are copied by their "header" and end, or "decode" them completely.
    masks: fields that are masks, separated by commas, or "none". None: found by their names.
    boxes: fields of boxes (x0, y0, x1, y1 in pixels), or "none". None: the field "boxes".

    Raises UsageError for invalid values and combinations.
    """

    resize: int | None = _whole(None, 1)
    resize_mode: str = _one_of("shorter", *RESIZE_MODES)
    upscale: bool = False
    format: str = _one_of("keep", *IMAGE_FORMATS, called="image_format")
    quality: int | None = _whole(None, 1)
    chroma: str | None = _one_of(None, *CHROMA)
    background: str | None = None
    icc: str | None = _one_of(None, "srgb", "keep")
    min_size: int | None = _whole(None, 1)
    max_aspect: float | None = None
    max_pixels: int | None = _whole(None, 1)
    check: str = _one_of("header", "header", "decode")
    masks: str | None = None
    boxes: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quality is not None and self.quality > 100:
            raise UsageError("quality goes from 1 to 100", found=str(self.quality))
        aspect = self.max_aspect
        if aspect is not None:
            if not isinstance(aspect, numbers.Real) or not 1 <= aspect < math.inf:
                raise UsageError("max_aspect must be a number from 1 up", found=repr(aspect))
            object.__setattr__(self, "max_aspect", float(aspect))
        self._requires(("resize_mode", "upscale"), self.resize, "resize=N", "give resize=N too")
        if self.format == "raw" and self.icc == "keep":
            raise UsageError("raw pixels have no colour profile", fix="use icc='srgb'")
        if self.background is not None:
            object.__setattr__(self, "background", _colour(self.background))

    @property
    def mask_fields(self) -> tuple[str, ...] | None:
        """The fields that are masks; None if not specified."""
        return _named(self.masks)

    @property
    def box_fields(self) -> tuple[str, ...] | None:
        """The fields that are boxes; None if not specified."""
        return _named(self.boxes)

    @property
    def pixels(self) -> bool:
        """Whether pixels may change, so that every image must be inspected."""
        asked = (self.resize, self.quality, self.chroma, self.background, self.icc)
        return self.format != "keep" or any(value is not None for value in asked)

    @property
    def active(self) -> bool:
        """Whether images are processed, filtered or checked."""
        return self != ImageOptions()


@dataclass(frozen=True, repr=False)
class AudioOptions(Options):
    """How audio is resampled. Audio that changes is stored as FLAC; all other is copied as it is.

    sample_rate: resample audio to this rate in Hz, at most 655,350. None: not resampled.
    mono: store one channel, the mean of all channels.

    Raises UsageError for invalid values.
    """

    sample_rate: int | None = _whole(None, 1, MAX_RATE)
    mono: bool = False

    @property
    def active(self) -> bool:
        """Whether audio is processed."""
        return self != AudioOptions()


@dataclass(frozen=True, repr=False)
class TextOptions(Options):
    """How documents are read, tokenized and packed.

    Without a tokenizer, text is stored as text. With neither field nor tokenizer, the rows of JSON
    and tables are not documents, and all of their columns become fields.

    field: the field with the text of documents. None: with a tokenizer, "text" or the only text.
    keep_fields: of documents (with a text field or a tokenizer), also store the other fields.
    no_header: the first line of CSV and TSV is a row; columns are called column0, column1, ...
    columns: names of the columns of CSV and TSV without a header, separated by commas.
    quoting: quotation marks in tables: "auto": around cells, in TSV if it shows; "none": text.
    documents: unit of .txt: "file" or "line"; "auto": files in a folder, lines of a single file.
    encoding: encoding of text files, a Python codec name, or "auto": detected for each file.
    encoding_errors: for undecodable bytes: "strict" stops, "replace" or "ignore" goes on.
    tokenizer: tokenize with this tokenizer: its file, folder or name. None: text is stored.
    special_tokens: read "<|endoftext|>" in a document as the "special" token or as plain "text".
    append_eos: append the EOS token to each document. None: if the tokenizer has one.
    eos_token: the EOS token, if the tokenizer does not define it.
    bos: prepend the BOS token to each document.
    chat_template: render conversations with this chat template: "auto" is the tokenizer's own, else
        a file. None: the data are not conversations.
    loss_on: which tokens of conversations are learned: those of the "assistant", or "all".
    seq_len: pack documents into blocks of this many tokens. None: one sample per document.
    pack: how to pack: "concat", "nosplit" (no cuts if they fit) or "pad" (one per block).
        Conversations are never cut: "nosplit" is used in place of "concat".
    remainder: what to do with a block that is not full: "pad" it, "keep" it shorter or "drop" it.

    Raises UsageError for invalid values and combinations.
    """

    field: str | None = _called("text_field")
    keep_fields: bool = False
    no_header: bool = False
    columns: str | None = None
    quoting: str = _one_of("auto", "auto", "none")
    documents: str = _one_of("auto", "auto", "file", "line")
    encoding: str = "utf-8"
    encoding_errors: str = _one_of("strict", "strict", "replace", "ignore")
    tokenizer: str | os.PathLike[str] | None = None
    special_tokens: str = _one_of("special", "special", "text")
    append_eos: bool | None = None
    eos_token: str | None = None
    bos: bool = False
    chat_template: str | os.PathLike[str] | None = None
    loss_on: str = _one_of("assistant", "assistant", "all")
    seq_len: int | None = _whole(None, 1)
    pack: str = _one_of("concat", *PACKINGS)
    remainder: str = _one_of("pad", *REMAINDERS)

    def __post_init__(self) -> None:
        if self.chat_template is not None and self.seq_len and self.pack == "concat":
            object.__setattr__(self, "pack", "nosplit")
        super().__post_init__()
        names = self.header or ()
        if not all(names) or len(set(names)) < len(names):
            raise UsageError("columns must be different names", found=repr(self.columns))
        if self.encoding != "auto":
            object.__setattr__(self, "encoding", _encoding(self.encoding))
        tokens = ("special_tokens", "append_eos", "eos_token", "bos", "seq_len", "chat_template")
        fix = "give tokenizer=NAME or a path"
        self._requires(tokens, self.tokenizer is not None, "a tokenizer", fix)
        if self.remainder == "drop" and self.pack != "concat":
            raise UsageError(
                f"remainder='drop' would lose most documents with pack={self.pack!r}",
                expected="pad or keep, as few blocks come out full",
            )
        chats = self.chat_template is not None
        self._requires(("loss_on",), chats, "a chat template", "give chat_template='auto'")
        for name in ("field", "special_tokens", "append_eos", "bos") if chats else ():
            if getattr(self, name) != getattr(TextOptions, name):
                raise UsageError(
                    f"{name} cannot be combined with chat_template",
                    fix="leave it out: the template decides what is encoded",
                )
        self._requires(("pack", "remainder"), self.seq_len, "seq_len=N", "give seq_len=N too")

    @property
    def header(self) -> tuple[str, ...] | None:
        """The columns of tables without a header; () if they are numbered, None with a header."""
        if self.columns is None:
            return () if self.no_header else None
        return tuple(next(csv.reader([self.columns]), [""]))

    @property
    def reading(self) -> list[str]:
        """The options for reading text files that are given."""
        names = ("no_header", "columns", "quoting", "documents", "encoding", "encoding_errors")
        return [name for name in names if getattr(self, name) != getattr(TextOptions, name)]


@dataclass(frozen=True)
class Selection:
    """Which fields of a source are stored: all, those in `fields`, or all but those in `drop`."""

    fields: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    partial: bool = False  # some of several sources may have none of these fields

    def has(self, name: str) -> bool:
        return name not in self.drop if self.fields is None else name in self.fields


ALL_FIELDS = Selection()
# Options of `ConvertOptions` that are objects; `convert` also takes the fields of these by name.
GROUPS = {"image": ImageOptions, "audio": AudioOptions, "text": TextOptions}


@dataclass(frozen=True, repr=False)
class ConvertOptions(Options):
    """The options of a conversion.

    Sizes are bytes, or text: "256MB" (10^6 each) or "1GiB" (2^30).

    shard_size: maximum bytes per shard: "64MB". None: "256MB"; no limit for single-file formats.
    shard_samples: maximum samples per shard, instead of a size.
    shuffle: store the samples in random order.
    seed: random seed of shuffle, sample, folds, stratify and group.
    limit: store only the first N samples of each split, after shuffling.
    include_class: store only samples of these classes, with the labels 0, 1, ...
    exclude_class: store only samples of other classes.
    where: store only samples that meet a condition: "width >= 256 and label in (3, 7)".
    keys: store only samples with these keys: a file with one key per line, or in Python a list.
    dedup: remove duplicates: "exact" copies only, or also "near" copies of images.
    sample: store about this share of all samples, above 0 and up to 1.
    split: "auto" (folders such as train/), "none", shares ("train=0.9,val=0.1") or files of keys.
    split_column: the field or column whose values are the splits, such as "train" or 0.
    folds: make this many datasets of equal size instead: fold0, fold1, ...
    stratify: keep the shares of this field's values equal in all splits.
    group: keep all samples with the same value of this field in one split.
    classes: class names in the order of their labels: a file with one name per line, or in Python
        a list, or for Python samples a dict by field.
    metadata: a table with one row per file: .csv, .tsv, .jsonl or .parquet.
    file_column: the column of the table with the file names. None: "file_name".
    file_suffix: a suffix that is missing from the file names in the table, such as ".jpg".
    label_column: the column of the table or source that becomes the field `label`.
    label_columns: columns of 0 and 1, a column per class, that become the vector `labels`.
    label_separator: the text that separates several labels in one value.
    annotations_frame: whether boxes of COCO and Pascal VOC are on the "upright" images or on the
        "stored" ones, where EXIF turns them and their own stated size does not tell. None: as the
        stated sizes of others tell.
    fields: store only these fields of the source. None: all.
    drop: do not store these fields of the source.
    rename: rename fields: old -> new.
    safe_keys: percent-encode all characters of keys except A-Z, a-z, 0-9, -, _ and /.
    stats: compute the mean and standard deviation of all pixels, and store them in the manifest.
    beside: with TAR, also write files for the loaders of "dali", "energon" and "wids".
    image: a shardkit.ImageOptions.
    audio: a shardkit.AudioOptions.
    text: a shardkit.TextOptions.
    transform: run your own function on each sample: "module:function", or in Python a function.
    on_error: "fail" at the first bad sample, or "skip" bad samples and list them in errors.jsonl.
    max_errors: with "skip", stop if more samples than this are bad.
    overwrite: replace an existing dataset as soon as the new one is complete.
    workers: number of worker processes; 0 runs in this process. None: one per processor for paths.
    engine: run tasks in "local" processes, or with "ray" on the nodes of a Ray cluster.
    ray_address: HOST:PORT of the cluster, "auto" or "local". None: a running cluster, else local.
    ray_options: resources per task: num_cpus, memory ("4GB") or custom resources.

    Raises UsageError for invalid values and combinations.
    """

    shard_size: int | str | None = None
    shard_samples: int | None = _whole(None, 1)
    shuffle: bool = False
    seed: int = _whole(0, 0, SEEDS)
    limit: int | None = _whole(None, 1)
    include_class: Sequence[str] = ()
    exclude_class: Sequence[str] = ()
    where: str | None = None
    keys: str | os.PathLike[str] | Sequence[str] | None = None
    dedup: str | None = _one_of(None, "exact", "near")
    sample: float | None = None
    split: str = "auto"
    split_column: str | None = None
    folds: int | None = _whole(None, 2)
    stratify: str | None = None
    group: str | None = None
    classes: Sequence[str] | Mapping[str, Sequence[str]] | None = None
    metadata: str | os.PathLike[str] | None = None
    file_column: str | None = None
    file_suffix: str | None = None
    label_column: str | None = None
    label_columns: Sequence[str] = ()
    label_separator: str | None = None
    annotations_frame: str | None = _one_of(None, "upright", "stored")
    fields: Sequence[str] | None = None
    drop: Sequence[str] = ()
    rename: dict[str, str] = field(default_factory=dict)
    safe_keys: bool = False
    stats: bool = False
    beside: Sequence[str] = ()
    image: ImageOptions = field(default_factory=ImageOptions)
    audio: AudioOptions = field(default_factory=AudioOptions)
    text: TextOptions = field(default_factory=TextOptions)
    transform: str | Callable[..., Any] | None = None
    on_error: str = _one_of("fail", "fail", "skip")
    max_errors: int = _whole(1000, 0)
    overwrite: bool = False
    workers: int | None = _whole(None, 0)
    engine: str = _one_of("local", "local", "ray")
    ray_address: str | None = None
    ray_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_size is not None and self.shard_samples is not None:
            raise UsageError("shard_size and shard_samples cannot be combined")
        for name, kind in GROUPS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                what = f"{name} must be shardkit.{kind.__name__}(...)"
                raise UsageError(what, found=repr(value))
        self._check_selection()
        self._check_subset()
        self._check_labels()
        self._check_engine()
        if self.shard_size is not None and parse_size(self.shard_size) < 4096:
            raise UsageError("a shard must have room for 4,096 bytes", found=str(self.shard_size))

    def _check_subset(self) -> None:
        shares = {} if split_files(self.split) else parse_split(self.split)
        if self.include_class and self.exclude_class:
            raise UsageError("include_class and exclude_class cannot be combined")
        sample = self.sample
        if sample is not None and not (isinstance(sample, numbers.Real) and 0 < sample <= 1):
            raise UsageError(
                "sample is the share of samples to take",
                expected="a number above 0, up to 1",
                found=repr(sample),
                fix="limit=N takes a number of samples",
            )
        if self.folds is not None and self.split != "auto":
            raise UsageError("folds cannot be combined with another split", found=self.split)
        if self.split_column is not None and (self.split != "auto" or self.folds is not None):
            other = "folds" if self.folds is not None else f"split={self.split!r}"
            raise UsageError(f"split_column cannot be combined with {other}", fix="give only one")
        divides = "stratify" if self.stratify else "group" if self.group else None
        if divides and not (shares or self.folds):
            raise UsageError(
                f"{divides} needs a split",
                fix="give split='train=0.9,val=0.1' or folds=K, too",
            )
        if self.keys is not None and split_files(self.split):
            raise UsageError("keys cannot be combined with a split by files of keys")

    def _check_selection(self) -> None:
        several = ("fields", "drop", "include_class", "exclude_class", "beside", "label_columns")
        for name in several:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        if not all(self.rename.values()):
            raise UsageError("a field cannot be renamed to an empty name", found=repr(self.rename))
        lists = self.classes.values() if isinstance(self.classes, Mapping) else [self.classes]
        if not all(names is None or _are_names(names) for names in lists):
            raise UsageError("classes must be a list of names", found=repr(self.classes))
        if self.fields is not None and (self.drop or self.text.keep_fields):
            other = "drop" if self.drop else "keep_fields"
            raise UsageError(f"fields cannot be combined with {other}", fix="give only one of them")

    def _check_labels(self) -> None:
        files, table = ("file_column", "file_suffix"), self.metadata is not None
        self._requires(files, table, "a metadata table", "give metadata=FILE")
        if self.label_separator == "":
            raise UsageError("label_separator must not be empty", found="''")
        column = self.label_column is not None
        self._requires(("label_separator",), column, "label_column", "give label_column=NAME")
        if not self.label_columns:
            return
        if len(self.label_columns) < 2 or len({*self.label_columns}) < len(self.label_columns):
            raise UsageError(
                "label_columns must be two or more different columns",
                found=", ".join(self.label_columns),
                fix="give label_column=NAME for labels that are in one column",
            )
        if column or self.classes is not None:
            other = "label_column" if column else "classes"
            raise UsageError(f"label_columns cannot be combined with {other}", fix="give only one")

    def _check_engine(self) -> None:
        ray = self.engine == "ray"
        given = ("ray_address", "ray_options")
        self._requires(given, ray, "engine='ray'", "give engine='ray'")
        if ray and self.workers == 0:
            raise UsageError("workers=0 cannot be combined with engine='ray'")

    @property
    def bounded(self) -> bool:
        """Whether a limit for the size of shards was given."""
        return self.shard_size is not None or self.shard_samples is not None

    @classmethod
    def of(cls, **options: Unpack[ConvertKeywords]) -> ConvertOptions:
        """Create options by name, also those of images, audio and text: `resize=256`.

        Raises UsageError for an unknown name, and for a name that an object is given for, too.
        """
        given: dict[str, Any] = {**options}
        for group, kind in GROUPS.items():
            if own := _taken(given, group, kind):
                given[group] = kind(**own)
        check_names(cls, given)
        return cls(**given)

    def processes(self, source: object) -> int:
        """Number of worker processes for a source: by default, one per processor for files.

        A Python sequence runs the user's own code, which stays in this process.
        """
        if self.workers is not None:
            return self.workers
        sources = source if isinstance(source, list | tuple) else [source]
        paths = bool(sources) and all(
            isinstance(one, str | os.PathLike) or getattr(one, "temporary", False)
            for one in sources
        )
        return processors() if paths or self.engine == "ray" else 0

    def max_bytes(self) -> int | None:
        """Return the maximum size of a shard in bytes; None if it is limited by samples."""
        if self.shard_samples is not None:
            return None
        return parse_size("256MB" if self.shard_size is None else self.shard_size)


def _taken(given: dict[str, Any], group: str, kind: type[Any]) -> dict[str, Any]:
    """Take the options of a group, such as images, out of those given by name."""
    called = {called_by(f): f.name for f in fields(kind)}
    own = {called[name]: given.pop(name) for name in [*given] if name in called}
    if own and group in given:
        name = next(iter(own))
        raise UsageError(
            f"{name}= cannot be combined with {group}=",
            fix=f"put it into the other: {group}=shardkit.{kind.__name__}({name}=...)",
        )
    return own


class ImageKeywords(TypedDict, total=False):
    """`ImageOptions` as keyword arguments, for type checkers."""

    resize: int | None
    resize_mode: str
    upscale: bool
    image_format: str
    quality: int | None
    chroma: str | None
    background: str | None
    icc: str | None
    min_size: int | None
    max_aspect: float | None
    max_pixels: int | None
    check: str
    masks: str | None
    boxes: str | None


class AudioKeywords(TypedDict, total=False):
    """`AudioOptions` as keyword arguments, for type checkers."""

    sample_rate: int | None
    mono: bool


class TextKeywords(TypedDict, total=False):
    """`TextOptions` as keyword arguments, for type checkers."""

    text_field: str | None
    keep_fields: bool
    no_header: bool
    columns: str | None
    quoting: str
    documents: str
    encoding: str
    encoding_errors: str
    tokenizer: str | os.PathLike[str] | None
    chat_template: str | os.PathLike[str] | None
    loss_on: str
    special_tokens: str
    append_eos: bool | None
    eos_token: str | None
    bos: bool
    seq_len: int | None
    pack: str
    remainder: str


class ConvertKeywords(ImageKeywords, AudioKeywords, TextKeywords, total=False):
    """The options of `convert` as keyword arguments, for type checkers."""

    shard_size: int | str | None
    shard_samples: int | None
    shuffle: bool
    seed: int
    limit: int | None
    include_class: Sequence[str]
    exclude_class: Sequence[str]
    where: str | None
    keys: str | os.PathLike[str] | Sequence[str] | None
    dedup: str | None
    sample: float | None
    split: str
    split_column: str | None
    folds: int | None
    stratify: str | None
    group: str | None
    classes: Sequence[str] | Mapping[str, Sequence[str]] | None
    metadata: str | os.PathLike[str] | None
    file_column: str | None
    file_suffix: str | None
    label_column: str | None
    label_columns: Sequence[str]
    label_separator: str | None
    annotations_frame: str | None
    fields: Sequence[str] | None
    drop: Sequence[str]
    rename: dict[str, str]
    safe_keys: bool
    stats: bool
    beside: Sequence[str]
    image: ImageOptions
    audio: AudioOptions
    text: TextOptions
    transform: str | Callable[..., Any] | None
    on_error: str
    max_errors: int
    overwrite: bool
    workers: int | None
    engine: str
    ray_address: str | None
    ray_options: Mapping[str, Any]


def _named(fields: str | None) -> tuple[str, ...] | None:
    return None if fields is None else () if fields == "none" else tuple(fields.split(","))


def check_names(kind: type[Any], options: Iterable[str]) -> None:
    """Raises UsageError for a name that is not a field of a dataclass."""
    known = [f.name for f in fields(kind)]
    for name in options:
        if name not in known:
            raise UsageError(f"there is no option {name!r}", expected=near(name, known))


def check_numbers(options: Any, most: int = 1 << 62, **least: int) -> None:
    """Raises UsageError unless these options are whole numbers from their minimum up to `most`.

    None is accepted if the option's annotation includes it.
    """
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is None and _may_be_none(type(options), name):
            continue
        if not is_whole(value) or not lowest <= value <= most:
            expected = f"up to {most:,}" if is_whole(value) and value > most else None
            raise UsageError(
                f"{name} must be a whole number from {lowest} up",
                expected=expected,
                found=f"{value!r:.200}",
            )
        object.__setattr__(options, name, int(value))  # converts numpy integers


def is_whole(value: object) -> bool:
    """Return whether a value is an integer (also numpy's), but not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _may_be_none(kind: type[Any], name: str) -> bool:
    every = [getattr(base, "__annotations__", {}) for base in kind.__mro__]
    return any("None" in str(names.get(name)) for names in every if name in names)


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple | set | frozenset | dict) and all(
        isinstance(name, str) for name in value
    )


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


# By annotation, without " | None": whether a value is of this type, and what it must be.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "text"),
    "str | os.PathLike[str]": (_is_path, "a path"),
    "str | os.PathLike[str] | Sequence[str]": (
        lambda value: _is_path(value) or _are_names(value),
        "a path or a list of names",
    ),
    "Sequence[str]": (_are_names, "a list of names"),
    "dict[str, str]": (lambda value: isinstance(value, Mapping), "a dict of names"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "a dict"),
}


def check_types(options: Any) -> None:
    """Raises UsageError for an option that is not of the type of its annotation."""
    for f in fields(options):
        value = getattr(options, f.name)
        is_right, what = _KINDS.get(str(f.type).removesuffix(" | None"), (None, ""))
        optional = value is None and str(f.type).endswith(" | None")
        if is_right is not None and f.name != "split" and not optional and not is_right(value):
            raise UsageError(f"{f.name} must be {what}", found=f"{value!r:.200}")


def check_choice(options: Any, name: str, allowed: Sequence[str | None]) -> None:
    """Raises UsageError if the value of an option is not one of those allowed."""
    value = getattr(options, name)
    if not isinstance(value, str | None) or value not in allowed:
        words = ", ".join(repr(choice) for choice in allowed if choice is not None)
        raise UsageError(f"{name} must be one of {words}", found=repr(value))


def _encoding(name: str) -> str:
    """Python's canonical name of a text encoding."""
    try:
        codec = codecs.lookup(name)
        if not codec._is_text_encoding:  # base64, zlib: they encode bytes to bytes
            raise LookupError
    except (LookupError, TypeError):
        raise UsageError(
            "there is no such encoding", found=repr(name), expected="utf-8, latin-1, cp1252, auto"
        ) from None
    return codec.name


def _colour(text: str) -> str:
    """Convert a CSS colour in any notation to "#rrggbb"."""
    from PIL import ImageColor

    try:
        return "#{:02x}{:02x}{:02x}".format(*ImageColor.getrgb(text)[:3])
    except (ValueError, AttributeError, TypeError):
        raise UsageError(
            "background must be a colour", found=repr(text), expected="such as white or #808080"
        ) from None


def split_files(text: str) -> dict[str, str]:
    """Parse the files of "train=train.txt,val=val.txt"; empty if the text is something else."""
    parts = [part.partition("=") for part in text.split(",")] if isinstance(text, str) else []
    files = {name.strip(): path.strip() for name, _, path in parts}
    named = all(is_split(name) and path and not _is_number(path) for name, path in files.items())
    return files if named and len(files) == len(parts) else {}


def is_split(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*", name) is not None and is_safe(name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_split(text: str) -> dict[str, float]:
    """Parse the shares of "train=0.9,val=0.1"; empty for "auto" and "none"."""
    shares: dict[str, float] = {}
    if isinstance(text, str):
        if text in ("auto", "none"):
            return {}
        with contextlib.suppress(ValueError):
            parts = [part.split("=") for part in text.split(",")]
            shares = {name.strip(): float(share) for name, share in parts}
    good = all(is_split(name) for name in shares) and all(share > 0 for share in shares.values())
    if not (shares and good and abs(sum(shares.values()) - 1) < 1e-9):
        raise UsageError(
            "invalid split",
            found=repr(text),
            expected="auto, none, or shares that sum to 1, such as train=0.9,val=0.1;"
            " or for each split a file of keys",
        )
    return shares
