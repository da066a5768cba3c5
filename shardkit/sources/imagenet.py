"""Labels of ImageNet's validation images, which are all in one folder, from accompanying files.

These are a table of the images (of Tiny ImageNet, Kaggle or Caffe), or the ground truth of the
devkit: one number per image, which `meta.mat` or `map_clsloc.txt` maps to a class. This number is
not the index of the class in alphabetical order.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import SourceError
from shardkit.helpers import os_errors
from shardkit.helpers.extras import extra
from shardkit.storage import fs

DEVKIT = re.compile(r".*devkit.*", re.I)  # folder, such as ILSVRC2012_devkit_t12
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
EXPECTED = f"{TRUTH} of the devkit, Kaggle's LOC_val_solution.csv, or Caffe's val.txt beside it"
_LISTS = ("val.txt", "val_list.txt", "val_map.txt")  # of Caffe, PaddlePaddle, CNTK
_SYNSETS = ("synset_words.txt", "synsets.txt", "LOC_synset_mapping.txt")
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
_MAX_BYTES = 64 << 20


class Truth(NamedTuple):
    """A label file, and the class names in it by image name without suffix."""

    path: Path
    class_of: dict[str, str]

    def classes(self, names: Sequence[str], known: Collection[str]) -> list[str]:
        """Return the class of each image. Raises SourceError for an unknown image or class."""
        stems = [_stem(name) for name in names]
        lacking = next((stem for stem in stems if stem not in self.class_of), None)
        if lacking is not None:
            raise _bad(self.path, "lacks an image", found=lacking)
        found = [self.class_of[stem] for stem in stems]
        if others := sorted(set(found) - set(known)):
            raise _bad(self.path, "names a class that train does not have", found=others[0])
        return found


def is_validation(names: Sequence[str]) -> bool:
    """Return whether files are named like ImageNet's validation images."""
    return bool(names) and _NUMBER.fullmatch(_stem(names[0])) is not None


def find_truth(root: Path, folder: Path, classes: Sequence[str]) -> Truth | None:
    """Return the labels of the images in a split's `folder`, from a file in or beside it.

    `classes` are those of train. Raises SourceError for an invalid file.
    """
    for place in _places(root, folder):
        if (path := place / "val_annotations.txt").is_file():
            return _of_rows(path, (line.split("\t") for line in _lines(path)))
        if (path := place / "LOC_val_solution.csv").is_file():
            return _of_rows(path, (line.replace(",", " ").split() for line in _lines(path)[1:]))
        for path in (place / name for name in _LISTS if (place / name).is_file()):
            rows = [row for row in map(str.split, _lines(path)) if row]
            if rows and "." in rows[0][0]:  # else Kaggle's numbered list of names without labels
                return _of_list(path, rows, _synsets(place) or sorted(classes))
        if (path := place / TRUTH).is_file():
            names = _names_by_id(place)
            ids = [line.strip() for line in _lines(path)]
            rows = [[f"ILSVRC2012_val_{n:08d}", names.get(one, "")] for n, one in enumerate(ids, 1)]
            return _of_rows(path, iter(rows))
    return None


def _places(root: Path, folder: Path) -> Iterator[Path]:
    yield from (folder, root)
    above = [root]
    if root.parts[-2:] == ("Data", "CLS-LOC"):  # layout of Kaggle
        above += [root.parents[1], root.parents[2]]
        yield from above[1:]
    for place in above:
        with os_errors.explained("list", place):
            kits = sorted(p for p in place.iterdir() if DEVKIT.fullmatch(p.name) and p.is_dir())
        for kit in kits:
            yield from (kit, kit / "data")


def _of_list(path: Path, rows: Sequence[Sequence[str]], synsets: Sequence[str]) -> Truth:
    """Build from rows of an image name and a class index or class name."""
    if all(row[1:] and row[1].isdecimal() for row in rows):
        if (most := max(int(row[1]) for row in rows)) >= len(synsets):
            raise _bad(
                path,
                "has a class index that is out of range",
                found=f"{most}, of {len(synsets)} classes",
                expected=f"{' or '.join(_SYNSETS[:2])} beside it, with the names in index order",
            )
        rows = [[row[0], synsets[int(row[1])]] for row in rows]
    return _of_rows(path, iter(rows))


def _of_rows(path: Path, rows: Iterator[Sequence[str]]) -> Truth:
    """Build from rows whose first two cells are an image name and its class name."""
    class_of: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or not row[1]:
            raise _bad(path, f"has no class in row {number}", found=" ".join(row).strip()[:60])
        if class_of.setdefault(_stem(row[0]), row[1]) != row[1]:
            raise _bad(path, "gives an image two classes", found=row[0])
    return Truth(path, class_of)


def _synsets(place: Path) -> list[str]:
    """Return the class names in index order, if a file lists them."""
    path = next((place / name for name in _SYNSETS if (place / name).is_file()), None)
    return [] if path is None else [line.split()[0] for line in _lines(path) if line.strip()]


def _names_by_id(place: Path) -> dict[str, str]:
    """Return the class names by their numbers in the ground truth."""
    if (path := place / "map_clsloc.txt").is_file():
        return {row[1]: row[0] for row in map(str.split, _lines(path)) if len(row) > 1}
    path = place / "meta.mat"
    if not path.is_file():
        raise SourceError(
            "the ground truth has class numbers, but no file maps them to class names",
            path=place / TRUTH,
            expected="meta.mat or map_clsloc.txt beside it, as in the data folder of the devkit",
            fix="unpack the complete devkit",
        )
    instead = ", or put the devkit's map_clsloc.txt beside it"
    with extra("imagenet", "reading the devkit's meta.mat", instead):
        from scipy.io import loadmat  # type: ignore[import-untyped]
    data = _read(path)
    try:
        synsets = loadmat(io.BytesIO(data), squeeze_me=True)["synsets"]
        return {str(one["ILSVRC2012_ID"]): str(one["WNID"]) for one in synsets}
    except Exception as error:  # scipy raises many kinds
        raise _bad(path, "cannot be read", found=f"{type(error).__name__}: {error}") from error


def _read(path: Path) -> bytes:
    data = fs.read(path, _MAX_BYTES)
    if len(data) > _MAX_BYTES:
        raise _bad(path, "is too large", found=f"more than {_MAX_BYTES:,} bytes")
    return data


def _lines(path: Path) -> list[str]:
    return _read(path).decode("utf-8-sig", "replace").splitlines()


def _stem(name: str) -> str:
    base = name.rpartition("/")[2]
    return base.rpartition(".")[0] or base


def _bad(path: Path, what: str, *, found: str, expected: str | None = None) -> SourceError:
    return SourceError(
        f"the file with the image labels {what}",
        path=path,
        found=found,
        expected=expected,
        fix="correct it, or move it elsewhere and put the images into class folders",
    )
