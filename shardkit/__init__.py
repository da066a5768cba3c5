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
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.codecs.media import media_info as media_info
    from shardkit.codecs.media_info import MediaInfo as MediaInfo
    from shardkit.codecs.shapes import masks as masks
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
    from shardkit.transforms.labels import MultiHot as MultiHot
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

# The public names of each module; NAME=OTHER: OTHER is its name in the module.
_NAMES = {
    "codecs.media": "media_info",
    "codecs.media_info": "MediaInfo",
    "codecs.shapes": "masks",
    "conversion.convert": "convert",
    "conversion.create": "create=DatasetWriter",
    "conversion.export": "export ExportResult",
    "conversion.merge": "merge",
    "conversion.run": "ConvertResult",
    "dataset.concatenated": "concatenate",
    "dataset.dataset": "Dataset",
    "errors": "DamagedError FormatError MissingKeyError MissingLibraryError NotFoundError"
    " OutputError SampleError ShardkitError ShardkitWarning SourceError StorageError UsageError"
    " WorkerError",
    "helpers.progress": "Progress",
    "inspection.inspect": "inspect",
    "options": "AudioOptions ConvertOptions ImageOptions TextOptions",
    "performance.bench": "bench",
    "performance.doctor": "doctor",
    "schema": "Array Audio Bool Bytes Float Image Images Int Json Schema Text Video",
    "stream.batching": "Bucket Dynamic Pack",
    "stream.collate": "pad_collate",
    "stream.options": "StreamOptions",
    "stream.sampling": "Balanced Weighted",
    "transforms.labels": "MultiHot",
    "transforms.media": "Mono RandomClip Resample SampleFrames",
    "transforms.steps": "CenterCrop Decode Normalize RandomHorizontalFlip RandomResizedCrop Resize",
    "transforms.transforms": "open",
    "verification.diff": "diff DiffReport",
    "verification.verify": "verify VerifyReport",
    "version": "__version__",
}
_PLACES = {
    name.partition("=")[0]: (module, name.rpartition("=")[2])
    for module, names in _NAMES.items()
    for name in names.split()
}

__all__ = sorted(_PLACES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        from shardkit.helpers.familiar import with_attribute_instead

        what = f"module 'shardkit' has no attribute {name!r}"
        error = with_attribute_instead(AttributeError(what), name)
        if _is_importing(sys._getframe(1)):  # `from shardkit import` would drop the text
            raise ImportError(str(error), name=__name__)
        raise error
    module, own = _PLACES[name]
    value = getattr(importlib.import_module(f"shardkit.{module}"), own)
    globals()[name] = value
    return value


def _is_importing(frame: FrameType) -> bool:
    """Return whether a frame executes `from ... import ...`."""
    from opcode import opmap

    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
