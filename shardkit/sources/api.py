"""The interface for sources in other packages, described in docs/adding-a-source.md.

What is here keeps its names and meanings; other modules of shardkit may change at any time.
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
