"""`create`: write a dataset from a user's own samples, one by one; published only if complete."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shardkit.conversion.existing import begun_anew
from shardkit.conversion.publish import described, publish_shards, write_lengths
from shardkit.conversion.shards import KEYS_REPEAT, Content, ShardSequence
from shardkit.conversion.target import Target
from shardkit.conversion.work import TaskShard, joined
from shardkit.errors import OutputError, SampleError, warn
from shardkit.formats import get_format
from shardkit.helpers.keywords import takes
from shardkit.metadata.manifest import FOLDER, LENGTHS
from shardkit.options import ConvertOptions, ImageOptions
from shardkit.schema import ClassNames, FieldType, Schema, label_of, named_classes
from shardkit.storage import fs


class DatasetWriter:
    """Writes a new dataset from your samples, in a `with` block. Created by `shardkit.create`.

    Call `write` for each sample. `close()`, or the end of the block, publishes the dataset. An
    error in the block discards it. One that is never closed is not published, with a warning.

    out: the folder or file to write, local or at a URL.
    to: the name of the format.
    schema: field name -> field type, such as shardkit.Image().
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
        schema: Mapping[str, FieldType],
        *,
        classes: ClassNames | None = None,
        shard_size: int | str | None = None,
        shard_samples: int | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        options = ConvertOptions(shard_size=shard_size, shard_samples=shard_samples)
        format = get_format(to)
        self._schema = Schema(schema)
        format.layout(self._schema)  # raises for fields that the format does not support
        names = named_classes(classes, self._schema)
        self._steps = None
        if format.raw_images != "array":  # masks must not be encoded as JPEG
            from shardkit.preprocess.images import steps_for

            self._steps = steps_for(self._schema, ImageOptions(), None, format.raw_images)
        with fs.using(storage_options, out):
            self._target = Target.of(out, to)
        max_bytes = None if self._target.one_shard(options.bounded) else options.max_bytes()
        spec = format.spec(self._schema, max_bytes, names)
        self._content = Content(format, spec, label_of(names))
        self._target.check([])
        if not overwrite and not self._target.is_empty():
            raise OutputError(
                "the output exists",
                path=self._target.path,
                fix="give another folder, or pass overwrite=True",
            )
        other = "pass overwrite=True"
        self._partial = begun_anew(self._target, {"create": True}, other, overwrite=overwrite)
        self._overwrite = overwrite
        self._folder = self._partial.tasks
        self._shards = ShardSequence(
            self._folder,
            self._content,
            options.shard_samples,
            upload=self._partial.upload(self._folder),
        )
        self._keys: set[str] = set()
        self._open = True
        self._unclosed = weakref.finalize(self, _warn_unclosed, self._target.path, self._keys)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one `sample`: its fields, and its `__key__`, which by default is its number.

        Raises SampleError if a value does not fit the schema or the key was used before. This
        sample is then dropped, and you can write further samples. Raises ValueError if the dataset
        is closed.
        """
        if not self._open:
            raise ValueError("the dataset is closed")
        if not isinstance(sample, Mapping):
            raise SampleError(
                "the sample is not a dict of fields",
                expected=", ".join(self._schema),
                found=type(sample).__name__,
            )
        numbered = {"__key__": f"{len(self._keys):09d}", **sample}
        checked = self._schema.check(numbered)
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
        """Publish the dataset. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._unclosed.detach()
        try:
            self._publish()
        finally:
            self._partial.release()

    def _publish(self) -> None:
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


def _warn_unclosed(path: Path, keys: set[str]) -> None:
    warn(
        f"{path} was never closed, so none of its {len(keys):,} samples is published: write them in"
        " a `with` block, or call close()"
    )
