"""X1: a file of the source that is written or replaced while a conversion runs is noticed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import DamagedError, SampleError, ShardkitError, SourceError
from tests.conftest import write_images
from tests.test_irregular import Swap


def _images(root: Path) -> Path:
    write_images(root, classes=2, each=3)
    (root / "class1/001.txt").write_text("a caption")
    return root / "class1/001.jpg"


def _sidecar(root: Path) -> Path:
    return _images(root).with_suffix(".txt")


def _texts(root: Path) -> Path:
    root.mkdir()
    for number in range(3):
        (root / f"{number}.txt").write_text(f"text {number}")
    return root / "1.txt"


def _lines(root: Path) -> Path:
    root.mkdir()
    for number in range(3):
        (root / f"{number}.jsonl").write_text(json.dumps({"text": f"text {number}"}) + "\n")
    return root / "1.jsonl"


def _shards(root: Path) -> Path:
    samples = [{"text": "text 1"} for _ in range(6)]
    shardkit.convert(samples, "lmdb", root, shard_samples=2, workers=0)
    return root / "shard-000001.lmdb/data.mdb"


def _foreign(root: Path) -> Path:
    _shards(root)
    shutil.rmtree(root / "__shardkit__")
    return root / "shard-000001.lmdb/data.mdb"


SOURCES = [_images, _sidecar, _texts, _lines, _shards, _foreign]


def _other(path: Path) -> bytes:
    """Other content, which is as good as what is there."""
    data = path.read_bytes()
    for old, new in ((b"text 1", b"next 1"), (b"next 1", b"text 1")):
        if old in data:
            return data.replace(old, new)
    return data[:-2] + b"XX"


def rewritten(path: Path) -> None:
    """The same size and inode, another content."""
    before = path.stat()
    path.write_bytes(_other(path))
    if path.stat().st_mtime_ns == before.st_mtime_ns:  # within one tick of the system's clock
        os.utime(path)
    assert path.stat().st_size == before.st_size


def replaced(path: Path) -> None:
    """Another file of the same size and time."""
    about = path.stat()
    other = path.with_name("other")
    other.write_bytes(_other(path))
    os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
    other.rename(path)
    assert path.stat().st_mtime_ns == about.st_mtime_ns


@pytest.mark.parametrize("change", [rewritten, replaced])
@pytest.mark.parametrize("make", SOURCES)
def test_a_file_that_keeps_its_size(
    make: Callable[[Path], Path], change: Callable[[Path], None], tmp_path: Path
) -> None:
    if (make, change) == (_sidecar, replaced):
        change = rewritten  # of what lies beside an image only the time is known
    source = tmp_path / "in"
    path = make(source)

    def convert(**options: Any) -> Any:
        return shardkit.convert(source, "wds", tmp_path / "out", workers=0, **options)

    kind = SourceError if make in (_shards, _foreign) else SampleError
    with pytest.raises(
        ShardkitError, match=r"changed while (the conversion ran|it was open)"
    ) as error:
        convert(progress=Swap(lambda: change(path)))
    in_place = make is _foreign and change is rewritten  # may be noticed by reading the open file
    assert type(error.value) in ((kind, DamagedError) if in_place else (kind,))
    near = path.with_suffix(".jpg") if make is _sidecar else path
    assert str(error.value.where["path"]) in (str(path), str(near), str(path.parent))
    assert not (tmp_path / "out").exists()
    if kind is SampleError:  # the others do not suffer
        shutil.rmtree(tmp_path / "out.partial")
        done = convert(progress=Swap(lambda: change(path)), on_error="skip")
        assert done.errors == 1
    else:  # nobody writes any more
        assert convert(overwrite=True).errors == 0


def test_what_only_looks_changed_is_none(tmp_path: Path) -> None:
    """Links made by a backup, permissions, and files that a file system numbers anew."""
    path = _images(tmp_path / "in")

    def touch() -> None:
        os.link(path, tmp_path / "backup")
        path.chmod(0o600)

    result = shardkit.convert(
        tmp_path / "in", "wds", tmp_path / "out", workers=0, progress=Swap(touch)
    )
    assert result.samples == 6


def test_another_inode_alone_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.sources.files import Planned, read_file

    path = _texts(tmp_path / "in")
    about = path.stat()
    later = about.st_ctime_ns + 1
    planned = Planned(about.st_mtime_ns, about.st_ino + 1, later)
    assert read_file(str(path), about.st_size, planned) == b"text 1"
    with pytest.raises(SampleError, match="changed"):
        read_file(str(path), about.st_size, planned._replace(began=about.st_ctime_ns))
