"""`create`: write a dataset from a user's own samples, one by one; published only if complete."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from shardkit.codecs.given import as_fields, schema_of
from shardkit.conversion.existing import begun_anew
from shardkit.conversion.publish import described, publish_shards, write_lengths
from shardkit.conversion.shards import KEYS_REPEAT, Content, ShardSequence
from shardkit.conversion.target import Target
from shardkit.conversion.work import TaskShard, joined
from shardkit.errors import SampleError, UsageError, warn
from shardkit.formats import get_format
from shardkit.helpers.keywords import takes
from shardkit.metadata.manifest import FOLDER, LENGTHS
from shardkit.options import ConvertOptions, ImageOptions
from shardkit.sample import Sample
from shardkit.schema import ClassNames, FieldType, Schema, label_of, named_classes
from shardkit.storage import fs


class DatasetWriter:
    """Writes a new dataset from your samples, in a `with` block. Created by `shardkit.create`.

    Call `write` for each sample. `close()`, or the end of the block, publishes the dataset. An
    error in the block discards it. One that is never closed is not published, with a warning.

    out: the folder or file to write, local or at a URL.
    to: the name of the format.
    schema: field name -> field type, such as shardkit.Image(). None: that of the first sample.
    classes: class names in the order of their labels, or a dict of these by field.
    shard_size, shard_samples: maximum bytes, or samples, per shard, as in `shardkit.convert`.
    overwrite: replace an existing dataset.
    storage_options: as in `shardkit.open`.

    Raises UsageError for invalid arguments, and OutputError if the output exists.
    """

    @takes()
    def __init__(
        self,
        out: str | os.PathLike[str],
        to: str,
        schema: Mapping[str, FieldType] | None = None,
        *,
        classes: ClassNames | None = None,
        shard_size: int | str | None = None,
        shard_samples: int | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        options = ConvertOptions(shard_size=shard_size, shard_samples=shard_samples)
        self._format, self._options, self._classes = get_format(to), options, classes
        with fs.using(storage_options, out):
            self._target = Target.of(out, to)
        self._schema: Schema | None = None
        if schema is not None:
            self._begin(Schema(schema))
        self._target.check_new(overwrite)
        other = "pass overwrite=True"
        self._partial = begun_anew(self._target, {"create": True}, other, overwrite=overwrite)
        self._overwrite = overwrite
        self._folder = self._partial.tasks
        self._keys: set[str] = set()
        self._open = True
        self._unclosed = weakref.finalize(self, _warn_unclosed, self._target.path, self._keys)

    def _begin(self, schema: Schema) -> None:
        """Set the schema. Raises for fields that the format does not support."""
        format, options = self._format, self._options
        format.layout(schema)
        names = named_classes(self._classes, schema)
        self._steps = None
        if format.raw_images != "array":  # masks must not be encoded as JPEG
            from shardkit.preprocess.images import steps_for

            self._steps = steps_for(schema, ImageOptions(), None, format.raw_images)
        max_bytes = None if self._target.one_shard(options.bounded) else options.max_bytes()
        self._content = Content(format, format.spec(schema, max_bytes, names), label_of(names))
        self._schema = schema

    @cached_property
    def _shards(self) -> ShardSequence:
        most, upload = self._options.shard_samples, self._partial.upload(self._folder)
        return ShardSequence(self._folder, self._content, most, upload=upload)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one `sample`: its fields, and its `__key__`, which by default is its number.

        Values may also be images of Pillow, which are stored as PNG, tensors, NumPy's numbers, and
        dates, which are stored as text. None means that the sample lacks an optional field.

        Raises SampleError if a value does not fit the schema or the key was used before. This
        sample is then dropped, and you can write further samples. Raises ValueError if the dataset
        is closed.
        """
        if not self._open:
            raise ValueError("the dataset is closed")
        if not isinstance(sample, Mapping):
            raise SampleError(
                "the sample is not a dict of fields",
                expected=", ".join(self._schema or ()) or None,
                found=type(sample).__name__,
            )
        numbered = as_fields({"__key__": f"{len(self._keys):09d}", **sample})
        if self._schema is None:
            self._begin(_schema_of_first(numbered))
        assert self._schema is not None
        try:
            checked = self._schema.check(numbered)
        except SampleError as error:
            if "--on-error" in (error.fix or ""):  # of convert
                error.fix = "correct it, or pass schema= with a type that fits all values"
            raise
        key = checked["__key__"]
        if not isinstance(key, str) or not key:
            raise SampleError("the key of a sample is not text", found=repr(key))
        if key in self._keys:
            raise SampleError("two samples have the same key", key=key, fix=KEYS_REPEAT)
        try:
            self._shards.write(self._steps(checked).sample if self._steps else checked)
        except SampleError:
            raise  # the sample was not added, and nothing else has changed
        except BaseException:
            self.discard()  # the state of the files is unknown
            raise
        self._keys.add(key)

    def close(self) -> None:
        """Publish the dataset. A second call does nothing.

        Raises UsageError without a schema and samples to tell it.
        """
        if not self._open:
            return
        if self._schema is None:
            self.discard()
            raise UsageError(
                "a dataset without samples needs a schema",
                path=self._target.path,
                fix="pass schema={'image': shardkit.Image(), ...}",
            )
        self._open = False
        self._unclosed.detach()
        try:
            self._publish()
        finally:
            self._partial.release()

    def _publish(self) -> None:
        assert self._schema is not None
        shards = self._shards
        shards.close()
        folder = self._partial.dataset
        fs.make_folder(folder / FOLDER)
        path = self._target.list_path(folder, LENGTHS)
        lengths = write_lengths(path, self._schema, [self._folder])
        made = [*zip(shards.shards, shards.pieces, strict=True)]
        made = made or [joined(self._folder, self._content, [], 0, shards.upload)]
        publish_shards(
            self._content,
            [TaskShard(self._folder, *each) for each in made],
            shards.stats,
            folder,
            self._target,
            self._partial,
            files=described(folder, lengths),
        )
        self._partial.publish(overwrite=self._overwrite)

    def discard(self) -> None:
        """Remove everything that was written. The output stays as it was before."""
        if self._open:
            self._open = False
            self._unclosed.detach()
            try:
                if self._schema is not None:
                    self._shards.abandon()
            finally:
                self._partial.discard()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()


def _schema_of_first(sample: Sample) -> Schema:
    schema, others = schema_of([sample])
    for error in others.values():
        raise error
    for name, value in sample.items():
        if value is None:
            raise SampleError(
                "the first sample has no value here, so that the type of the field is unknown",
                field=name,
                fix="pass schema={...}, with optional=True for this field",
            )
    return schema


def _warn_unclosed(path: Path, keys: set[str]) -> None:
    warn(
        f"{path} was never closed, so none of its {len(keys):,} samples is published: write them in"
        " a `with` block, or call close()"
    )
