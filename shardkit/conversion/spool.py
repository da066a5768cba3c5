"""Tables and iterables in Python as a source: written once to a temporary folder, then converted.

A conversion reads its source more than once and from several processes, which these cannot be.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardkit.codecs.given import as_fields, schema_of
from shardkit.conversion.create import DatasetWriter
from shardkit.conversion.target import Target, default_output
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.find import open_dataset
from shardkit.dataset.views import size_of
from shardkit.errors import SampleError, ShardkitError, SourceError, UsageError
from shardkit.formats import get_format
from shardkit.formats.base import KEY
from shardkit.helpers.extras import extra
from shardkit.helpers.part_of import PartOf
from shardkit.options import ConvertOptions, Selection
from shardkit.sample import Sample
from shardkit.schema import Bytes, Encoded, Schema
from shardkit.sources.sequence import Rows, checked_sample, is_table
from shardkit.storage import fs

_EXAMPLES, _BYTES = 1000, 64 << 20  # the first samples of an iterable, which tell its schema
_ROWS = 1000  # in a batch of Hugging Face datasets


@contextmanager
def spooled(
    source: Any,
    to: str,
    out: str | os.PathLike[str] | None,
    options: ConvertOptions,
    schema: Mapping[str, Any] | None,
    part: PartOf | None,
    storage_options: Mapping[str, Any] | None,
) -> Iterator[Any]:
    """Yield the source: a temporary dataset of a table or an iterable, anything else as it is.

    Everything that can be refused is refused before the source is read.
    """
    table = is_table(source)
    if not (table or _is_iterable(source)):
        yield source
        return
    kind = type(source).__name__
    if part is not None or options.engine == "ray":
        raise UsageError(
            f"a {kind} is only in this process, so that others cannot share the work",
            fix="write it to a file, such as Parquet, and convert that",
        )
    if not table and getattr(source, "batch_size", None) is not None:
        raise UsageError(
            f"a {kind} gives batches, not samples", fix=f"give its dataset: the {kind}'s `.dataset`"
        )
    get_format(to)
    with fs.using(storage_options, out):
        target = Target.of(default_output([], to) if out is None else out, to)
        target.check_new(options.overwrite)
    with tempfile.TemporaryDirectory(prefix="shardkit-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if table:
            found = _of_table(source, folder / f"{kind}.arrow")
        else:
            found = _of_iterable(source, folder / kind, options, schema)
        if isinstance(found, Rows):
            yield found
            return
        found.temporary = True
        with found:
            yield found


def _is_iterable(source: Any) -> bool:
    known = isinstance(source, str | os.PathLike | Mapping)
    sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return not (known or sequence) and hasattr(source, "__iter__")


def _of_table(table: Any, path: Path) -> Dataset | Rows:
    """Write a table as an Arrow file; return its rows if it has objects that Arrow cannot hold."""
    with extra("arrow", f"converting a {type(table).__name__}"):
        import pyarrow as pa
    try:
        schema, batches = _batches(table, pa)
        if KEY not in schema.names:
            schema, batches = schema.append(pa.field(KEY, pa.string())), _with_keys(batches, pa)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    except (ShardkitError, MemoryError):
        raise
    except Exception as error:  # of Arrow, or of a user's function that makes the rows
        if hasattr(table, "columns") and not path.exists():
            return _rows(table)
        raise _raised(table, error, SourceError) from error
    return open_dataset(path, partly=True)


def _rows(table: Any) -> Rows:
    """The rows of a table of pandas or Polars, from memory."""
    names = list(table.columns)
    again = [name for name in names if names.count(name) > 1]
    if again:
        raise SourceError("two columns have the same name", field=str(again[0]))
    return Rows({str(name): [*_values(table[name])] for name in names})


def _raised(source: object, error: Exception, kind: type[ShardkitError]) -> ShardkitError:
    return kind(f"the {type(source).__name__} raised {type(error).__name__}: {error}")


def _batches(table: Any, pa: Any) -> tuple[Any, Iterable[Any]]:
    """Return the Arrow schema of a table and its batches."""
    if hasattr(table, "with_format"):  # of Hugging Face, whose images are files or their bytes
        with extra("hf", f"converting a {type(table).__name__}"):
            from datasets.table import embed_table_storage

        found = map(embed_table_storage, table.with_format("arrow").iter(_ROWS))
        first = next(found, pa.table({}))
        tables = itertools.chain([first], found)
        return first.schema, (batch for rows in tables for batch in rows.to_batches())
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(table, pandas.DataFrame):
        named = table.index.names != [None] or not pandas.api.types.is_integer_dtype(table.index)
        table = pa.Table.from_pandas(table, preserve_index=named)  # others are numbers of rows
    elif "Object" in map(str, getattr(table, "dtypes", ())):
        raise pa.ArrowInvalid("objects of Python in Polars")
    reader = pa.RecordBatchReader.from_stream(table)
    return reader.schema, reader


def _with_keys(batches: Iterable[Any], pa: Any) -> Iterator[Any]:
    """Add a column with the numbers of the rows, which are the keys of samples."""
    numbers = itertools.count()
    for batch in batches:
        keys = [f"{number:09d}" for number in itertools.islice(numbers, len(batch))]
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, pa.array(keys, pa.string())], [*batch.schema.names, KEY]
        )


def _values(column: Any) -> Iterator[Any]:
    """The values of a column of pandas or Polars, with None where one is missing."""
    missing = column.isna() if hasattr(column, "isna") else itertools.repeat(False)
    return (None if lacks else v for v, lacks in zip(column, missing, strict=False))


def _of_iterable(
    source: Iterable[Any],
    folder: Path,
    options: ConvertOptions,
    schema: Mapping[str, Any] | None,
) -> Dataset:
    """Write the samples of an iterable to shards, with a schema of the first ones if none is given.

    Encoded values are stored as bytes, and all fields may be missing: what is wrong with a sample
    is found where it is converted.
    """
    samples = _samples(source)
    examples = [*_first(samples)]
    if not examples:
        raise SourceError(f"the {type(source).__name__} has no samples")
    found, others = schema_of(examples) if schema is None else (Schema(schema), {})
    fields = None if options.fields is None else tuple(options.fields)
    selection = Selection(fields, tuple(options.drop))
    for error in (error for name, error in others.items() if selection.has(name)):
        raise error
    every = itertools.chain(examples, samples)
    chosen = ({n: v for n, v in sample.items() if n not in others} for sample in every)
    may_be_none = found.keys() if schema is None else ()
    present, problems = _write(chosen, folder, found, may_be_none, options)
    dataset = open_dataset(folder)
    dataset.problems = problems
    lacking = [name for name in found if present[name] < len(dataset)]
    dataset.schema = found.with_optional(lacking) if schema is None else found
    dataset.unusable.update(others)
    return dataset


def _write(
    samples: Iterable[Sample],
    folder: Path,
    schema: Schema,
    may_be_none: Collection[str],
    options: ConvertOptions,
) -> tuple[Counter[str], list[ShardkitError]]:
    """Write shards; return how many samples have a value, by field, and errors of those skipped."""
    required = {name for name, kind in schema.items() if not kind.optional}
    stored = {n: Bytes() if isinstance(kind, Encoded) else kind for n, kind in schema.items()}
    optional = (schema.keys() - required) | {*may_be_none}
    present: Counter[str] = Counter()
    problems: list[ShardkitError] = []
    with DatasetWriter(folder, "mds", Schema(stored).with_optional(optional)) as writer:
        for sample in samples:
            try:
                if not sample.keys() >= required:
                    schema.check(sample)  # raises the error of a missing field
                writer.write(sample)
            except SampleError as error:
                if options.on_error == "fail":
                    raise
                problems.append(error)
                if len(problems) > options.max_errors:  # which refuses the conversion
                    break
                continue
            present.update(name for name, value in sample.items() if value is not None)
    return present, problems


def _samples(source: Iterable[Any]) -> Iterator[Sample]:
    number = -1
    try:
        for number, sample in enumerate(source):
            yield as_fields(checked_sample(sample, number))
    except (ShardkitError, MemoryError):
        raise
    except Exception as error:  # user code
        raise _raised(source, error, SampleError).located(position=number + 1) from error


def _first(samples: Iterator[Sample]) -> Iterator[Sample]:
    size = 0
    for sample in itertools.islice(samples, _EXAMPLES):
        yield sample
        size += sum(map(size_of, sample.values()))
        if size > _BYTES:
            return
