"""The recipe of a dataset: everything that determines its samples and how they are stored.

`Recipe.of` makes it from a user's options, and a `Plan` is built from it. It is stored as `recipe`
in the manifest and in unfinished runs, so that converting again, resuming and `verify --against`
build the same plan. It has no paths, times or worker counts: the same source and options give the
same bytes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from shardkit.errors import FormatError
from shardkit.helpers.checked import (
    Count,
    Digest,
    MismatchError,
    Rule,
    checked,
    damaged,
    plain,
    under,
)
from shardkit.options import (
    IMAGE_DEFAULTS,
    SEEDS,
    AudioOptions,
    ConvertOptions,
    ImageOptions,
    Selection,
    TextOptions,
    parse_split,
    split_files,
)

# Not part of a dataset's identity: class names and metadata are in the hashes of `sources`.
_NO_PART = ("on_error", "classes", "metadata")

# The meaning of missing entries in options.
OPTION_DEFAULTS: dict[str, dict[str, Any]] = {
    "image": asdict(ImageOptions()),
    "audio": asdict(AudioOptions()),
    "text": asdict(TextOptions()),
}


class _TokenizerEntry(TypedDict, total=False):
    pattern: str
    special_ids: dict[str, Count]


class TokenizerEntry(_TokenizerEntry):
    """What made the tokens: `Tokenizer.identity`."""

    kind: str
    file: str  # its copy in the dataset
    digest: Digest
    vocab_size: Count
    eos_id: Count | None
    bos_id: Count | None
    pad_id: Count | None
    special_tokens: str


class ChatTemplateEntry(TypedDict):
    """What rendered conversations: `ChatTemplate.identity`."""

    templates: dict[str, str]
    special_tokens: dict[str, str]


@dataclass(frozen=True)
class TransformEntry:
    """A user's function: `preprocess.transform.Transform`."""

    name: str
    digest: Digest | None = None  # of its code and arguments; None if it cannot be determined


class KeysEntry(TypedDict):
    """A list of keys: its length, and a hash of the keys."""

    count: Count
    digest: Digest


_Seed = Annotated[int, Rule("a whole number from 0 to 2^64 - 1", lambda n: 0 <= n <= SEEDS)]
LISTS = "lists"  # value of `Recipe.split`: split by the lists in `Recipe.keys`


@dataclass(frozen=True)
class Recipe:
    """How a dataset is made. Names and meanings are those of `ConvertOptions`."""

    format: str
    # Split ("" without splits) -> hash of the source's contents; None if it cannot be determined.
    sources: dict[str, str | None] = field(default_factory=dict)
    classes: tuple[str, ...] | dict[str, tuple[str, ...]] | None = None
    metadata: str | None = None  # in a manifest, only the name of the file
    file_column: str | None = None
    file_suffix: str | None = None
    label_column: str | None = None
    label_columns: tuple[str, ...] = ()
    label_separator: str | None = None
    annotations_frame: str | None = None
    on_error: str = "fail"
    shard_size: Count | None = None  # in bytes. Without any limit, everything goes into one shard
    shard_samples: Count | None = None
    shuffle: _Seed | None = None  # the seed
    limit: Count | None = None
    include_class: tuple[str, ...] = ()
    exclude_class: tuple[str, ...] = ()
    where: str | None = None
    keys: dict[str, KeysEntry] = field(default_factory=dict)  # by split; "": for option `keys`
    dedup: str | None = None
    sample: float | None = None
    split: str = "auto"
    split_column: str | None = None
    folds: Count | None = None
    stratify: str | None = None
    group: str | None = None
    seed: _Seed | None = None  # for random sampling and splitting
    fields: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    rename: dict[str, str] = field(default_factory=dict)
    safe_keys: bool = False
    stats: bool = False
    beside: tuple[str, ...] = ()
    image: ImageOptions = field(default_factory=ImageOptions)
    image_defaults: dict[str, Any] | None = None  # for images that are re-encoded
    audio: AudioOptions = field(default_factory=AudioOptions)
    text: TextOptions = field(default_factory=TextOptions)
    tokenizer: TokenizerEntry | None = None
    chat_template: ChatTemplateEntry | None = None
    transform: TransformEntry | None = None

    @classmethod
    def of(cls, format: str, options: ConvertOptions) -> Recipe:
        """Return the recipe for these options, as far as it is known without source and target."""
        values: dict[str, Any] = {
            f.name: getattr(options, f.name, None) for f in dataclasses.fields(cls)
        }
        classes = options.classes
        if isinstance(classes, Mapping):
            values["classes"] = {name: tuple(names) for name, names in classes.items()}
        elif classes is not None:
            values["classes"] = tuple(classes)
        encodes = options.image.active or options.transform is not None
        values |= {
            "format": format,
            "sources": {},
            "include_class": tuple(sorted(set(options.include_class))),
            "exclude_class": tuple(sorted(set(options.exclude_class))),
            "keys": {},
            "split": LISTS if split_files(options.split) else options.split,
            "seed": options.seed if _draws(options) else None,
            "metadata": None if options.metadata is None else os.fspath(options.metadata),
            "shard_size": options.max_bytes(),
            "shuffle": options.seed if options.shuffle else None,
            "fields": None if options.fields is None else tuple(sorted(set(options.fields))),
            "drop": tuple(sorted(set(options.drop))),
            "label_columns": tuple(options.label_columns),
            "beside": tuple(sorted(set(options.beside))),
            "rename": dict(options.rename),
            "image_defaults": dict(IMAGE_DEFAULTS) if encodes else None,
            "transform": None,
        }
        return cls(**values)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each split, if samples are divided by shares."""
        if self.folds is not None:
            return {f"fold{n}": 1 / self.folds for n in range(self.folds)}
        return {} if self.split == LISTS else parse_split(self.split)

    @property
    def splits(self) -> list[str]:
        """The names of the splits that one source is divided into."""
        return list(self.keys) if self.split == LISTS else list(self.shares)

    @property
    def chooses(self) -> bool:
        """Whether samples are chosen or divided by more than a hash of their keys."""
        asked = (self.where, self.dedup, self.sample, self.stratify, self.group, self.folds)
        return bool(self.include_class or self.exclude_class) or any(
            option is not None for option in asked
        )

    @property
    def has_label_column(self) -> bool:
        """Whether labels come from columns of a table, or from fields."""
        return self.label_column is not None or bool(self.label_columns)

    @property
    def one_shard(self) -> bool:
        """Whether everything goes into one shard, however large."""
        return self.shard_size is None and self.shard_samples is None

    @property
    def selection(self) -> Selection:
        return Selection(self.fields, self.drop)

    @property
    def documents(self) -> TextOptions:
        """The options for text, with `keep_fields` if the fields to store are given by `fields`."""
        return self.text if self.fields is None else replace(self.text, keep_fields=True)

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON for a manifest; unused options of images, audio and text are None."""
        text = None if self.text == TextOptions() else asdict(self.text)
        image = asdict(self.image) if self.image.active else None
        audio = asdict(self.audio) if self.audio.active else None
        return {**plain(self), "image": image, "audio": audio, "text": text}

    @classmethod
    def from_json(cls, data: dict[str, Any], path: Path | None = None) -> Recipe:
        """Return the recipe from the manifest at `path`, checked field by field.

        Raises DamagedError for an invalid recipe, and FormatError for options of a later version
        that this one does not know.
        """
        used = _used(data, cls.__dataclass_fields__)
        unknown = [name for name in used if name not in cls.__dataclass_fields__]
        for name, usual in OPTION_DEFAULTS.items():
            if isinstance(options := used.get(name), dict):
                used[name] = _used(options, usual)
                unknown += [f"{name}.{option}" for option in used[name] if option not in usual]
        if unknown:
            raise FormatError(
                "the dataset was made with options that this version does not know",
                path=path,
                found=", ".join(unknown),
                fix="use the shardkit that made it, or a newer one",
            )
        try:
            with under("recipe"):
                found = checked(cls, {n: value for n, value in used.items() if value is not None})
                if (found.text.tokenizer is None) != (found.tokenizer is None):
                    raise MismatchError("the tokenizer of `text`", used.get("tokenizer"))
                if (found.text.chat_template is None) != (found.chat_template is None):
                    raise MismatchError("the template of `text`", used.get("chat_template"))
        except ValueError as error:
            raise damaged("the manifest", error, path=path) from error
        return found


def identity(recipe: dict[str, Any]) -> dict[str, Any]:
    """The entries of a recipe (as JSON) that determine the dataset, normalized for comparison.

    An option that the recipe's version did not have equals an unused one; for image, audio and text
    options, also one with its default. All of `sources` are kept: None is a source that cannot be
    identified.
    """
    found = {name: value for name, value in recipe.items() if name not in _NO_PART}
    for name, value in found.items():
        if isinstance(value, dict) and name != "sources":
            found[name] = _used(value, OPTION_DEFAULTS.get(name, ()))
    for name, usual in OPTION_DEFAULTS.items():
        if isinstance(value := found.get(name), dict | None):
            found[name] = usual | (value or {})
    return _used(found, ())


def recipe_of_version_1(format: Any, source: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Convert the separate entries `source` and `options` of early manifests to a recipe."""
    found = {**options, "format": format, "sources": source}
    text = options.get("text")
    made_with = text.get("tokenizer") if isinstance(text, dict) else None
    if isinstance(made_with, dict):
        found["text"] = {**cast("dict[str, Any]", text), "tokenizer": made_with.get("file")}
        found["tokenizer"] = made_with
    return found


def _draws(options: ConvertOptions) -> bool:
    """Return whether the seed affects which samples are in which split."""
    asked = (options.sample, options.folds, options.stratify, options.group)
    return any(value is not None for value in asked)


def _used(entries: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """The entries, without options that are not `known` to this version and that are unused."""
    return {n: value for n, value in entries.items() if n in known or not _unused(value)}


def _unused(value: Any) -> bool:
    """Return whether an option with this value has no effect."""
    return value is None or value is False or value in ({}, [])
