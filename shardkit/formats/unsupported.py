"""Recognizes datasets in formats that shardkit does not read, for errors that name the format."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import FormatError
from shardkit.storage import fs


class Kind(NamedTuple):
    """A format that shardkit does not read as a dataset."""

    words: str  # "MNIST in its own files (idx)"
    fix: str = ""
    source: bool = False  # it can be converted (`sources.arrays`), but not opened as a dataset
    files: bool = False  # a folder with such files may contain other files that are samples


def _by(reader: str) -> str:
    return f"read it with {reader}, and write its samples with shardkit.create"


LITDATA = Kind(
    "a chunk of LitData without the index.json that describes it",
    "copy the index.json too, and pass the folder that contains both",
)
MDS = Kind(
    "MosaicML Streaming data that is not in MDS, or is compressed with Brotli or Snappy",
    _by("streaming.StreamingDataset"),
)
CIFAR = Kind("CIFAR in its own files", source=True)
CIFAR_PICKLED = Kind(
    "CIFAR for Python, which consists of pickles, and shardkit never loads pickles",
    "download the binary version, cifar-10-binary.tar.gz or cifar-100-binary.tar.gz, and unpack it",
)
MNIST = Kind("MNIST in its own files (idx)", source=True)
NPZ = Kind("arrays in .npz files", source=True)
ARCHIVE = Kind("CIFAR in an archive", "unpack it (the binary version), and pass its folder")
MATLAB = Kind(
    "SVHN in MATLAB files",
    "load it with scipy.io.loadmat, save it with numpy.savez, with samples as the first dimension,"
    " and convert that file",
)
IMAGENET = Kind(
    "ImageNet as it is downloaded, archives of images",
    "unpack them: each n*.tar into a folder of its name in train/, the others into val/ and test/",
)
HDF5 = Kind("data in HDF5 files", source=True)
RECORDIO = Kind("a dataset of MXNet's RecordIO files", _by("mxnet.recordio"))
AUDIO = Kind(
    "audio in a format other than WAV, FLAC, MP3, Ogg, M4A and AIFF",
    "convert it to one of these formats with ffmpeg or sox",
    files=True,
)
VIDEO = Kind(
    "video in a format other than MP4, MOV, WebM, MKV and AVI",
    "convert it to one of these formats with ffmpeg; -c copy does so without encoding again",
    files=True,
)
IMAGE = Kind(
    "image data in a format other than JPEG, PNG, WebP, GIF, BMP, TIFF and PPM",
    "convert them to PNG: PIL.Image.open(FILE).save(OUT); HEIC needs pillow-heif",
    files=True,
)

_SUFFIXES = {
    suffix: kind
    for suffixes, kind in (
        ("h5 hdf5 hdf he5", HDF5),
        ("npz", NPZ),
        ("rec", RECORDIO),
        ("avif avifs heic heif jp2 j2k jpx jpf j2c jxl tga ico", IMAGE),
        ("psd pcx dds sgi dib qoi icns ras xbm xpm cur eps", IMAGE),
        ("aac wma sph amr ape", AUDIO),
        ("mpg mpeg wmv flv 3gp", VIDEO),
    )
    for suffix in suffixes.split()
}
_NAMES = (
    (LITDATA, re.compile(r"chunk-\d+-\d+(\.\w+)*\.bin")),
    (MDS, re.compile(r".+\.mds\.(br|snappy)")),
    (CIFAR, re.compile(r"(data_batch_\d+|test_batch)\.bin|(fine|coarse)_label_names\.txt")),
    (CIFAR_PICKLED, re.compile(r"data_batch_\d+|test_batch|batches\.meta")),
    (MATLAB, re.compile(r"(train|test|extra)_32x32\.mat")),
    (ARCHIVE, re.compile(r"cifar-100?-(python|binary|matlab)\.tar\.gz")),
    (MNIST, re.compile(r"(.*[-_])?(images|labels)[-.]idx\d-(u?byte|int)(\.gz)?")),
    (IMAGENET, re.compile(r"ilsvrc2012_img_(train|val|test)\w*\.tar|n\d{8}\.tar")),
)
_ARRAYS = (
    'in "with shardkit.create(OUT, FORMAT) as out:", call'
    ' out.write({"__key__": name, "array": values}) for each'
)
_IF_TRUSTED = _by("your own code if you trust it")
# Files that are no samples: they are named in errors only, since many lie beside other data.
_OTHERS = {
    suffix: Kind(words, fix)
    for suffixes, words, fix in (
        ("pt pth ckpt safetensors", "a file of tensors", f"load it with its library; {_ARRAYS}"),
        ("mha mhd nrrd nhdr mgz", "a volume", f"load it with SimpleITK or nibabel; {_ARRAYS}"),
        ("ply pcd las laz e57 xyz", "a point cloud", f"load it with open3d or laspy; {_ARRAYS}"),
        ("mat nc zarr", "a file of arrays", f"load it with scipy, xarray or zarr; {_ARRAYS}"),
        ("zip", "a .zip archive", "unpack it: python -m zipfile -e FILE FOLDER"),
        ("rar 7z", "an archive", "unpack it, and pass the folder"),
        ("pkl pickle", "a pickle, and loading one can run any code", _IF_TRUSTED),
        ("xlsx xls ods", "a spreadsheet", "save it as CSV"),
        ("sqlite sqlite3 db duckdb", "a database", "write a table of it to a Parquet file"),
        ("avro orc", "a table in Avro or ORC", "write it as Parquet with its library"),
    )
    for suffix in suffixes.split()
}
# Other names of shards of the format tfrecord, which do not end in one of its suffixes.
TFRECORD_NAMES = re.compile(r".+\.tfrec(ords?)?(\.gz)?-\d+-of-\d+(\.gz)?|[^.]+-\d{5}-of-\d{5}")
TFRECORD_SUFFIXES = tuple(
    f".{n}{gz}" for gz in ("", ".gz") for n in ("tfrecord", "tfrecords", "tfrec")
)
_HDF5 = b"\x89HDF\r\n\x1a\n"
_MOSAIC = re.compile(r"shard\.\d{5}\.(json|csv|tsv|xsv)\b.*")


def kind_by_name(name: str) -> Kind | None:
    """Return the unsupported format that a file name indicates, if any."""
    name = name.lower()
    kind = _SUFFIXES.get(name.rpartition(".")[2]) if "." in name else None
    return kind or next((kind for kind, pattern in _NAMES if pattern.fullmatch(name)), None)


def other_kind(name: str) -> Kind | None:
    """Return what an error calls a file, by its name, that is no sample and no dataset."""
    _, *ends = name.lower().split(".")
    return _OTHERS.get(".".join(ends[-2:])) or _OTHERS.get(ends[-1] if ends else "")


def way_with(counts: Iterable[str]) -> str:
    """Return what to do about files in other formats, from words for them such as ".zip file"."""
    kinds = {n: kind for n in counts if (kind := other_kind(f"x{n.removesuffix(' file')}"))}
    return "; ".join(f"a {name} is {kind.words}: {kind.fix}" for name, kind in kinds.items())


def kind_of_folder(names: Collection[str]) -> Kind | None:
    """Return the unsupported format that the names of all files in a folder indicate, if any."""
    if {"meta", "train", "test"} <= set(names):
        return CIFAR_PICKLED  # CIFAR-100
    if "index.json" in names and any(map(_MOSAIC.fullmatch, names)):
        return MDS
    return None


def kind_of_file(path: Path) -> Kind | None:
    """Return the unsupported format that a file's name or its first bytes indicate, if any."""
    kind = kind_by_name(path.name)
    if kind is not None or not path.is_file():
        has_index = path.suffix == ".bin" and path.with_suffix(".idx").is_file()
        return None if has_index else kind
    return HDF5 if fs.read(path, len(_HDF5)).startswith(_HDF5) else None


def not_read(kind: Kind, path: Path, found: str | None = None, fix: str = "") -> FormatError:
    """The error for data in an unsupported format; `fix` says what to do with files beside it."""
    what, fixes = f"this is {kind.words}; shardkit cannot read it", [kind.fix, fix]
    if kind.source:
        what = f"this is {kind.words}: it can be converted, but not opened as a dataset"
        fixes = [fix or f"convert it first: shardkit convert {path} --to wds"]
    return FormatError(what, path=path, found=found, fix="; ".join(filter(None, fixes)))
