"""The interface for sources in other packages, described in docs/adding-a-source.md.

What is here keeps its names and meanings; other modules of shardkit may change at any time.

A recogniser is a function of a `Candidate`. It returns the sources by split, one source if there
are no splits, or None if the path is of another kind. It raises SourceError for a path of its kind
that cannot be read.

A `Source` is a list of samples; a `Stream` has ranges, each of which is read from its start. Their
`__init__` calls that of the base class and sets `schema`. Samples are dicts with `__key__`, and
with those fields of `schema` that they have and that are selected (`selection.has`): a missing
field is absent, not None. shardkit checks each sample against the schema. The parts that `select`
returns are pickled for workers. A sample that cannot be read is a SampleError that names path, key
and offset: a `Source` raises it, and a `Stream` yields it in place of the sample.
"""

from shardkit.errors import SampleError, SourceError, UsageError
from shardkit.formats.api import (
    Array,
    Audio,
    Bool,
    Bytes,
    Float,
    Image,
    Images,
    Int,
    Json,
    JsonText,
    Sample,
    Schema,
    Text,
    Video,
    fs,
)
from shardkit.sources.base import Document, Source, Stream
from shardkit.sources.candidate import Candidate

__all__ = [
    "Array",
    "Audio",
    "Bool",
    "Bytes",
    "Candidate",
    "Document",
    "Float",
    "Image",
    "Images",
    "Int",
    "Json",
    "JsonText",
    "Sample",
    "SampleError",
    "Schema",
    "Source",
    "SourceError",
    "Stream",
    "Text",
    "UsageError",
    "Video",
    "fs",
]
