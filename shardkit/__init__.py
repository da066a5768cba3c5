"""shardkit: convert datasets for machine learning into fast shards, and read them.

>>> import shardkit
>>> report = shardkit.convert("sample_data/images", to="wds", out=tmp / "shards")
>>> ds = shardkit.open(tmp / "shards")
>>> sorted(ds[0])
['__key__', 'image', 'label', 'text']

Importing this package loads nothing else: each name below is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.codecs.media import media_info as media_info
    from shardkit.codecs.media_info import MediaInfo as MediaInfo
    from shardkit.conversion.convert import convert as convert
    from shardkit.conversion.create import DatasetWriter as create  # noqa: F401, N813
    from shardkit.conversion.export import ExportResult as ExportResult
    from shardkit.conversion.export import export as export
    from shardkit.conversion.merge import merge as merge
    from shardkit.conversion.run import ConvertResult as ConvertResult
    from shardkit.dataset.concatenated import concatenate as concatenate
    from shardkit.dataset.dataset import Dataset as Dataset
    from shardkit.errors import DamagedError as DamagedError
    from shardkit.errors import FormatError as FormatError
    from shardkit.errors import MissingKeyError as MissingKeyError
    from shardkit.errors import MissingLibraryError as MissingLibraryError
    from shardkit.errors import NotFoundError as NotFoundError
    from shardkit.errors import OutputError as OutputError
    from shardkit.errors import SampleError as SampleError
    from shardkit.errors import ShardkitError as ShardkitError
    from shardkit.errors import ShardkitWarning as ShardkitWarning
    from shardkit.errors import SourceError as SourceError
    from shardkit.errors import StorageError as StorageError
    from shardkit.errors import UsageError as UsageError
    from shardkit.errors import WorkerError as WorkerError
    from shardkit.helpers.progress import Progress as Progress
    from shardkit.inspection.inspect import inspect as inspect
    from shardkit.options import AudioOptions as AudioOptions
    from shardkit.options import ConvertOptions as ConvertOptions
    from shardkit.options import ImageOptions as ImageOptions
    from shardkit.options import TextOptions as TextOptions
    from shardkit.performance.bench import bench as bench
    from shardkit.performance.doctor import doctor as doctor
    from shardkit.schema import Array as Array
    from shardkit.schema import Audio as Audio
    from shardkit.schema import Bool as Bool
    from shardkit.schema import Bytes as Bytes
    from shardkit.schema import Float as Float
    from shardkit.schema import Image as Image
    from shardkit.schema import Images as Images
    from shardkit.schema import Int as Int
    from shardkit.schema import Json as Json
    from shardkit.schema import Schema as Schema
    from shardkit.schema import Text as Text
    from shardkit.schema import Video as Video
    from shardkit.stream.batching import Bucket as Bucket
    from shardkit.stream.batching import Dynamic as Dynamic
    from shardkit.stream.batching import Pack as Pack
    from shardkit.stream.collate import pad_collate as pad_collate
    from shardkit.stream.options import StreamOptions as StreamOptions
    from shardkit.stream.sampling import Balanced as Balanced
    from shardkit.stream.sampling import Weighted as Weighted
    from shardkit.transforms.media import Mono as Mono
    from shardkit.transforms.media import RandomClip as RandomClip
    from shardkit.transforms.media import Resample as Resample
    from shardkit.transforms.media import SampleFrames as SampleFrames
    from shardkit.transforms.steps import CenterCrop as CenterCrop
    from shardkit.transforms.steps import Decode as Decode
    from shardkit.transforms.steps import Normalize as Normalize
    from shardkit.transforms.steps import RandomHorizontalFlip as RandomHorizontalFlip
    from shardkit.transforms.steps import RandomResizedCrop as RandomResizedCrop
    from shardkit.transforms.steps import Resize as Resize
    from shardkit.transforms.transforms import open as open
    from shardkit.verification.diff import DiffReport as DiffReport
    from shardkit.verification.diff import diff as diff
    from shardkit.verification.verify import VerifyReport as VerifyReport
    from shardkit.verification.verify import verify as verify
    from shardkit.version import __version__ as __version__

# Public name -> module, with ":NAME" if the name in the module is different.
_MODULES = {
    "convert": "conversion.convert",
    "merge": "conversion.merge",
    **dict.fromkeys(("export", "ExportResult"), "conversion.export"),
    "concatenate": "dataset.concatenated",
    "ConvertResult": "conversion.run",
    "ConvertOptions": "options",
    "ImageOptions": "options",
    "AudioOptions": "options",
    "TextOptions": "options",
    "MediaInfo": "codecs.media_info",
    "media_info": "codecs.media",
    "create": "conversion.create:DatasetWriter",
    "open": "transforms.transforms",
    "inspect": "inspection.inspect",
    "Dataset": "dataset.dataset",
    "verify": "verification.verify",
    "VerifyReport": "verification.verify",
    **dict.fromkeys(("diff", "DiffReport"), "verification.diff"),
    **dict.fromkeys(
        (
            *("Schema", "Int", "Float", "Bool", "Text", "Bytes", "Json", "Array"),
            *("Image", "Images", "Audio", "Video"),
        ),
        "schema",
    ),
    **dict.fromkeys(
        (
            "ShardkitError",
            "UsageError",
            "NotFoundError",
            "MissingKeyError",
            "MissingLibraryError",
            "OutputError",
            "FormatError",
            "SourceError",
            "SampleError",
            "DamagedError",
            "StorageError",
            "WorkerError",
            "ShardkitWarning",
        ),
        "errors",
    ),
    **dict.fromkeys(
        (
            "Decode",
            "RandomResizedCrop",
            "CenterCrop",
            "Resize",
            "RandomHorizontalFlip",
            "Normalize",
        ),
        "transforms.steps",
    ),
    **dict.fromkeys(("Mono", "RandomClip", "Resample", "SampleFrames"), "transforms.media"),
    **dict.fromkeys(("Bucket", "Dynamic", "Pack"), "stream.batching"),
    "pad_collate": "stream.collate",
    **dict.fromkeys(("Balanced", "Weighted"), "stream.sampling"),
    "StreamOptions": "stream.options",
    "bench": "performance.bench",
    "doctor": "performance.doctor",
    "Progress": "helpers.progress",
    "__version__": "version",
}

__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    place = _MODULES.get(name)
    if place is None:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
    module, _, other = place.partition(":")
    value = getattr(importlib.import_module(f"shardkit.{module}"), other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
