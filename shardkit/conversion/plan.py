"""Recipe, sources and target -> tasks: which samples each task writes to shards."""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from shardkit.conversion.cuts import TASKS, cuts
from shardkit.conversion.read_ahead import Reading
from shardkit.conversion.shards import Content
from shardkit.conversion.splits import Split, slices
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.formats import get_format
from shardkit.formats.base import Format
from shardkit.helpers.indices import array
from shardkit.helpers.part_of import PartOf
from shardkit.metadata.recipe import ChatTemplateEntry, Recipe, TokenizerEntry, TransformEntry
from shardkit.preprocess.chats import chat_steps
from shardkit.preprocess.pipeline import Steps
from shardkit.preprocess.text import TextSteps, text_field, text_steps
from shardkit.schema import Array, FieldType, Image, Schema, is_unicode
from shardkit.sources.base import Source, Stream, some_of
from shardkit.sources.conversations import Conversations
from shardkit.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.codecs.tokenizers import Tokenizer
    from shardkit.codecs.tokenizers.chat import ChatTemplate
    from shardkit.conversion.target import Target
    from shardkit.options import TextOptions
    from shardkit.preprocess.transform import Transform
    from shardkit.sample import Sample

_PROBE_TEXT = 1 << 13  # characters per document on which tokenizer engines are compared


@dataclass(frozen=True)
class Task:
    """A slice of a split's order that becomes 0 to n shards."""

    number: int
    split: Split
    start: int
    stop: int
    size: int  # payload bytes in the source
    joined: bool = False  # its shards are to be joined with those of its neighbours

    def reading(self) -> Reading:
        split, chosen = self.split, self.split.slice
        source = split.source.select(array(chosen.order[self.start : self.stop]))
        limit = None if chosen.counts is None else int(chosen.counts[self.start : self.stop].sum())
        return Reading(source, f"{self.number:06d}", split.steps, chosen.share, limit)


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion has to do."""

    recipe: Recipe
    target: Target
    splits: list[Split]
    tasks: list[Task]
    times: dict[str, str | None]  # by source, a hash of the modification times of its files
    part: PartOf | None = None  # the part that this process carries out, if any

    @cached_property
    def format(self) -> Format:
        return get_format(self.recipe.format)

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of what determines the output's bytes: shardkit, and libraries in the steps."""
        found = {"shardkit": __version__, "tasks": TASKS}
        for split in self.splits:
            found |= split.steps.versions()
        encodes = any(split.source.encodes_images for split in self.splits)
        if encodes or self.recipe.stats or self.recipe.dedup == "near":
            from shardkit.preprocess.single_image import codec_versions

            found |= codec_versions()
        return found

    @property
    def job(self) -> dict[str, Any]:
        """What must be equal for one run to resume another."""
        return {"recipe": self.recipe.to_json(), "times": self.times, "versions": self.versions}

    @property
    def resumable(self) -> bool:
        """Whether it can be verified that two runs make the same dataset."""
        transform = self.recipe.transform
        known = transform is None or transform.digest is not None
        return known and None not in self.recipe.sources.values()

    @property
    def unit(self) -> str:
        """The unit of progress: "samples", or "bytes" of the source."""
        documents = any(split.samples is None or split.steps.text for split in self.splits)
        return "bytes" if documents else "samples"

    def amount(self, task: Task) -> int:
        """Return the size of a task in units."""
        return task.size if self.unit == "bytes" else task.stop - task.start

    @cached_property
    def own(self) -> list[Task]:
        """The tasks of this process's part, or all tasks."""
        part = self.part
        return [task for task in self.tasks if part is None or part.has(task.number)]

    @property
    def own_bytes(self) -> int:
        return sum(task.size for task in self.own)

    @property
    def samples(self) -> int | None:
        """Number of samples in the source; None if it is unknown before they are read."""
        counts = [split.samples for split in self.splits]
        return None if None in counts else sum(filter(None, counts))

    @property
    def bytes(self) -> int:
        """Bytes to read; a stream is read once for each of its splits."""
        return sum(task.size for task in self.tasks)

    @property
    def source_bytes(self) -> int:
        """Bytes of the source, each counted once."""
        first = {id(split.source): split.name for split in reversed(self.splits)}
        return sum(
            task.size
            for task in self.tasks
            if task.split.slice.share is None or first[id(task.split.source)] == task.split.name
        )

    @property
    def problems(self) -> list[ShardkitError]:
        """Problems that were found while planning, and are not tied to a sample."""
        return [problem for split in self.splits for problem in split.problems]

    def ignored(self) -> dict[str, int]:
        """Return what the sources ignore, and how often, as far as planning has found out."""
        return dict(sum((Counter(split.ignored) for split in self.splits), Counter()))

    def notes(self) -> list[str]:
        notes = [note for split in self.splits for note in split.source.notes]
        for split in self.splits:
            notes += self.format.notes(split.schema) + split.steps.notes()
            if split.name and split.samples == 0:
                notes.append(f"the split {split.name!r} has no samples")
        return list(dict.fromkeys(notes))

    def describe(self) -> dict[str, Any]:
        """For `--plan`: what would be done."""
        return {
            "out": str(self.target.path),
            "format": self.format.name,
            "samples": self.samples,
            "bytes": self.bytes,
            "tasks": len(self.tasks),
            "part": None
            if self.part is None
            else {"part": str(self.part), "tasks": len(self.own), "bytes": self.own_bytes},
            "parts": [
                {
                    "split": split.name or None,
                    "samples": split.samples,
                    "schema": split.schema.to_json(),
                    "classes": None if split.source.classes is None else len(split.source.classes),
                }
                for split in self.splits
            ],
            "ignored": self.ignored(),
            "filtered": dict(
                Counter(line["reason"] for split in self.splits for line in split.filtered)
            ),
            "notes": self.notes(),
            "one_shard": self.recipe.one_shard,
            "problems": [str(problem) for problem in self.problems],
            "recipe": self.recipe.to_json(),
        }


def make_plan(
    recipe: Recipe,
    sources: Mapping[str, Source | Stream],
    target: Target,
    *,
    tokenizer: Tokenizer | None = None,
    transform: Transform | None = None,
) -> Plan:
    """Cut the sources into tasks.

    A `tokenizer` is used in place of the one that the recipe names. Raises UsageError or
    FormatError for options that do not fit the sources.
    """
    format = get_format(recipe.format)
    if recipe.text.tokenizer is not None:
        tokenizer = tokenizer or _load_tokenizer(sources, recipe.text)
    chat = None if tokenizer is None else _chat_template(recipe, tokenizer)
    tools = _Tools(recipe, format, tokenizer, chat, transform)
    splits: list[Split] = []
    fingerprints = {}
    for name, source in sources.items():
        steps, schema = tools.steps(source)
        _check_names(schema, source)
        format.layout(schema)
        content = _content(format, source, schema, recipe)
        # Do this before allocating memory per sample: it checks shards against their manifest.
        fingerprints[name] = source.fingerprint() or {}
        problems, ignored, filtered = tuple(source.problems), source.ignored, source.filtered
        for own_name, chosen in slices(name, source, recipe):
            splits.append(
                Split(own_name, source, chosen, steps, content, problems, ignored, filtered)
            )
            problems, ignored, filtered = (), {}, ()  # listed once
    tasks: list[Task] = []
    for split in splits:
        sizes = split.slice.values(split.source.sizes())
        for start, stop, joined in cuts(split, sizes, format, recipe):
            size = int(sizes[start:stop].sum())
            tasks.append(Task(len(tasks), split, start, stop, size, joined))
    if target.single and len(splits) > 1:
        raise UsageError(
            "splits are folders, but the output is one shard",
            found=", ".join(split.name for split in splits),
            fix="give a folder with -o, or --split none",
        )
    found = {name: hashes.get("files") for name, hashes in fingerprints.items()}
    times = {name: hashes.get("times") for name, hashes in fingerprints.items()}
    return Plan(tools.named(found), target, splits, tasks, times)


@dataclass(frozen=True)
class _Tools:
    """A recipe, with the format, tokenizer and transform that it names."""

    recipe: Recipe
    format: Format
    tokenizer: Tokenizer | None
    chat: ChatTemplate | None
    transform: Transform | None

    def named(self, sources: dict[str, str | None]) -> Recipe:
        """The recipe, which identifies sources, tokenizer and transform by content, not by path."""
        recipe = replace(self.recipe, sources=sources)
        if recipe.metadata is not None:
            recipe = replace(recipe, metadata=posixpath.basename(recipe.metadata))
        if self.tokenizer is not None:
            entry = cast("TokenizerEntry", self.tokenizer.identity())
            text = replace(recipe.text, tokenizer=entry["file"])
            recipe = replace(recipe, text=text, tokenizer=entry)
        if self.chat is not None:
            name = posixpath.basename(os.fspath(recipe.text.chat_template or ""))
            recipe = replace(
                recipe,
                text=replace(recipe.text, chat_template=name),
                chat_template=cast("ChatTemplateEntry", self.chat.identity()),
            )
        if self.transform is not None:
            recipe = replace(
                recipe, transform=TransformEntry(self.transform.name, self.transform.digest)
            )
        return recipe

    def steps(self, source: Source | Stream) -> tuple[Steps, Schema]:
        """Return the steps for a source, and the schema of its samples after them."""
        images, audio, schema = None, None, source.schema
        if self.recipe.audio.active:
            from shardkit.preprocess.audio import AudioSteps

            audio = AudioSteps.of(source.schema, self.recipe.audio)
        raw, options = self.format.raw_images, self.recipe.image
        # A format that re-encodes images as JPEG needs steps for masks, whatever the options.
        if options.active or self.transform is not None or raw != "array":
            from shardkit.preprocess.images import schema_after, steps_for

            images = steps_for(source.schema, options, self.transform, raw, source)
            schema = schema_after(images, source)
        text: TextSteps | None = None
        fields = None
        documents = self.recipe.documents
        label = label_of_text(source, self.recipe)
        if self.tokenizer is not None:
            if self.chat is not None:
                text = chat_steps(self.tokenizer, self.chat, documents, schema, label)
            else:
                text = text_steps(self.tokenizer, documents, schema, label)
            schema = text.schema_after(schema)
        elif documents.field is not None and not documents.keep_fields:
            name = text_field(documents, schema)
            others = source.schema.keys() - {name, label}
            if others:  # the source is a dataset: text sources have dropped these fields already
                schema = Schema({n: schema[n] for n in schema if n not in others})
                fields = tuple(n for n in source.schema if n in (name, label))
        return Steps(images, audio, text, fields), schema.renamed(self.recipe.rename)


def label_of_text(source: Source | Stream, recipe: Recipe) -> str | None:
    """The label that documents keep next to their text: from a folder, or the label column."""
    also = source.also if isinstance(source, Stream) else ()
    made = source.reads_text or recipe.has_label_column
    name = "labels" if recipe.label_columns else "label"
    return name if made and name in source.schema and name not in also else None


def _load_tokenizer(sources: Mapping[str, Source | Stream], options: TextOptions) -> Tokenizer:
    """The tokenizer, after comparing its fast engine with the other one on some documents."""
    from shardkit.codecs.tokenizers import load_tokenizer

    assert options.tokenizer is not None
    tokenizer = load_tokenizer(
        options.tokenizer, special_tokens=options.special_tokens, eos_token=options.eos_token
    )
    texts: list[str] = []
    for source in sources.values():
        text_of = _text_of(source, options)
        found = (document.sample for document in some_of(source))
        texts += [text_of(sample)[:_PROBE_TEXT] for sample in found if isinstance(sample, dict)]
    return tokenizer.checked_on(texts)


def _chat_template(recipe: Recipe, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template that the recipe has the text of, or that it names."""
    choice = recipe.text.chat_template
    if choice is None:
        return None
    from shardkit.codecs.tokenizers.chat import ChatTemplate

    if recipe.chat_template is not None:
        return ChatTemplate.of_identity(recipe.chat_template, tokenizer)
    return ChatTemplate.of(os.fspath(choice), tokenizer)


def _text_of(source: Source | Stream, options: TextOptions) -> Callable[[Sample], str]:
    """Return the function that returns the text of a sample."""
    if options.chat_template is not None:
        return Conversations.of(source.schema).text
    name = text_field(options, source.schema)
    return lambda sample: sample.get(name, "")


def _content(format: Format, source: Source | Stream, schema: Schema, recipe: Recipe) -> Content:
    """Return what a source's shards have in common; `schema` already has the renamed fields."""
    rename = recipe.rename
    names = source.names_in(schema, rename)
    label = rename.get(source.label, source.label)
    guessed = [rename.get(name, name) for name in source.guessed]
    pixels = _image_fields(schema, recipe) if recipe.stats else ()
    spec = replace(format.spec(schema, recipe.shard_size, names), beside=recipe.beside)
    return Content(format, spec, label, guessed, pixels)


def _image_fields(schema: Schema, recipe: Recipe) -> tuple[str, ...]:
    """Return the fields with images, encoded or raw, that are not masks."""
    from shardkit.codecs.image import is_mask_name

    named = recipe.image.mask_fields
    images = [n for n, kind in schema.items() if isinstance(kind, Image) or _are_pixels(kind)]
    masks = named if named is not None else [name for name in images if is_mask_name(name)]
    found = tuple(name for name in images if name not in masks)
    if not found:
        raise UsageError(
            "--stats measures the pixels of images, but there are no images",
            found=", ".join(schema),
            fix="leave out --stats",
        )
    return found


def _are_pixels(kind: FieldType) -> bool:
    """Return whether a field holds raw images: uint8 (height, width, 3)."""
    if not isinstance(kind, Array) or kind.dtype != "|u1" or kind.shape is None:
        return False
    return len(kind.shape) == 3 and kind.shape[2] == 3


def _check_names(schema: Schema, source: Source | Stream) -> None:
    """Raise SourceError for names that a manifest cannot represent."""
    for name in schema:
        if not is_unicode(name):
            raise SourceError(
                "the name of a field is not valid Unicode",
                field=name,
                fix="rename it in the source, or choose other fields with --fields",
            )
    for label, classes in source.class_names.items():
        if not is_unicode("".join(classes)):
            raise SourceError(
                "the name of a class is not valid Unicode",
                field=label,
                found=next(name for name in classes if not is_unicode(name)),
                fix="rename its folder, or whatever names it in the source",
            )
