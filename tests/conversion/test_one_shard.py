"""Outputs of one shard: parts made by parallel tasks and joined; single files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import ImageOptions
from shardkit.conversion.run import prepare
from shardkit.conversion.target import default_output
from shardkit.errors import OutputError, StorageError, UsageError
from shardkit.formats import FORMATS
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images
from tests.conversion.deaths import change, left_by_deaths

JOINED = sorted(name for name in IMAGE_FORMATS if FORMATS[name].single)
# Files of pages, a folder of its own, and an index beside the file: these die at each change.
EXHAUSTED = ("beton", "lmdb", "wds")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_images(tmp_path / "in", classes=3, each=4, kilobytes=2)
    (folder / "class0/a.b.jpg").write_bytes((folder / "class0/000.jpg").read_bytes())
    return folder


def set_part_bytes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("shardkit.conversion.cuts._COPIED_BYTES", size)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", size)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_part_bytes(monkeypatch, 8_000)


def single(tmp_path: Path, format: str, name: str = "train") -> Path:
    return tmp_path / (name + FORMATS[format].suffixes[0])


def beside(folder: Path, name: str = "train") -> dict[str, bytes]:
    ours = (name, f"__shardkit__/{name}")
    return {file: data for file, data in files_of(folder).items() if file.startswith(ours)}


def convert(source: Path, out: Path, format: str, **options: Any) -> None:
    shardkit.convert(source, format, out, **{"workers": 0, **options})


def assert_holds(out: Path, source: Path) -> None:
    with shardkit.open(out) as dataset:
        assert len(dataset) == 13
        assert dataset.shards == 1
        assert dataset.classes == ("class0", "class1", "class2")
        for sample in dataset:
            path = dataset.original_paths().get(sample["__key__"], sample["__key__"] + ".jpg")
            assert (source / path).read_bytes() == sample["image"]


@pytest.mark.parametrize("format", few(JOINED, "lmdb"))
def test_parts_of_any_workers_make_the_same_file(source: Path, tmp_path: Path, format: str) -> None:
    assert prepare(source, format, single(tmp_path, format)).describe()["tasks"] > 3
    made = []
    for workers in (0, 1):
        folder = tmp_path / f"w{workers}"
        folder.mkdir()
        convert(source, single(folder, format), format, workers=workers)
        assert_holds(single(folder, format), source)
        made.append(files_of(folder))
    assert made[0] == made[1]
    names = {name.removesuffix("/data.mdb") for name in made[0]}
    suffix = FORMATS[format].suffixes[0]
    expected = {
        f"train{suffix}",
        f"__shardkit__/train{suffix}.manifest.json",
        f"__shardkit__/train{suffix}.keys.jsonl",
    }
    indexes = {"wds": "train.index.npy", "tfrecord": "train.records.npy"}
    assert names == expected | {f"__shardkit__/{indexes[f]}" for f in indexes if f == format}


@pytest.mark.parametrize("format", [name for name in JOINED if FORMATS[name].one_shard])
def test_a_folder_of_such_a_format_has_one_shard_unless_asked(
    source: Path, tmp_path: Path, format: str
) -> None:
    convert(source, tmp_path / "one", format)
    assert_holds(tmp_path / "one", source)
    convert(source, tmp_path / "many", format, shard_samples=5)
    with shardkit.open(tmp_path / "many") as dataset:
        assert [dataset.extent(n)[0] for n in range(dataset.shards)] == [5, 5, 3]


@pytest.mark.parametrize("format", ["beton", "lmdb", "wds"])
def test_one_shard_of_more_work_than_tasks_share_is_one(
    source: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with more than 64 tasks of 256 MB.
    monkeypatch.setattr("shardkit.conversion.cuts._FRACTION", 2)
    monkeypatch.setattr("shardkit.conversion.cuts._TASK_BYTES", 5_000)
    convert(source, single(tmp_path, format), format, image=ImageOptions(resize=16))
    with shardkit.open(single(tmp_path, format)) as dataset:
        assert (dataset.shards, len({sample["__key__"] for sample in dataset})) == (1, 13)


# Many parts that are joined, or one that is moved.
MANY, ONE = 30_000, 10**9


def without_partial(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(folder).items() if ".partial/" not in name}


@pytest.mark.large
@pytest.mark.parametrize(
    ("format", "seed", "part_bytes"),
    [
        *[(format, 1, MANY) for format in JOINED],
        *[("beton", 2, ONE), ("lmdb", 2, MANY), ("lmdb", 1, ONE), ("wds", 2, ONE)],
    ],
)
def test_replacing_a_single_file_that_dies_anywhere(
    source: Path, tmp_path: Path, format: str, seed: int, part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The old dataset is another one, or with seed 2 of the same recipe."""
    set_part_bytes(monkeypatch, part_bytes)
    folder = tmp_path / "out"
    (tmp_path / "new").mkdir()
    folder.mkdir()
    out = single(folder, format)
    convert(source, out, format, shuffle=True, seed=seed)
    change(source / "class0/000.jpg")
    convert(source, single(tmp_path / "new", format), format, shuffle=True, seed=2)
    old, new = files_of(folder), files_of(tmp_path / "new")

    def replace() -> None:
        convert(source, out, format, shuffle=True, seed=2, overwrite=True)

    for _ in left_by_deaths(folder, replace, format in EXHAUSTED):
        assert not out.exists() or without_partial(folder) in (old, new)
        replace()
        assert files_of(folder) == new


@pytest.mark.parametrize(
    ("format", "part_bytes"),
    [
        ("wds", MANY),
        *(pytest.param(format, MANY, marks=pytest.mark.large) for format in JOINED[:-1]),
        *(pytest.param(format, ONE, marks=pytest.mark.large) for format in ("lmdb", "wds")),
    ],
)
def test_a_single_file_that_dies_anywhere_is_continued(
    source: Path, tmp_path: Path, format: str, part_bytes: int, large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    set_part_bytes(monkeypatch, part_bytes)
    (tmp_path / "reference").mkdir()
    (tmp_path / "out").mkdir()
    convert(source, single(tmp_path / "reference", format), format)
    reference = files_of(tmp_path / "reference")
    out = single(tmp_path / "out", format)
    everywhere = large and format in EXHAUSTED
    for _ in left_by_deaths(out.parent, lambda: convert(source, out, format), everywhere):
        assert not out.exists() or without_partial(out.parent) == reference
        convert(source, out, format)
        assert files_of(out.parent) == reference


@pytest.mark.parametrize(
    ("format", "damage"),
    [
        *[("wds", "cut"), ("lmdb", "zeros"), ("wds", "gone")],
        *(pytest.param(format, "zeros", marks=pytest.mark.large) for format in JOINED),
    ],
)
def test_a_part_that_a_power_cut_took_is_made_again(
    source: Path, tmp_path: Path, format: str, damage: str
) -> None:
    (tmp_path / "reference").mkdir()
    convert(source, single(tmp_path / "reference", format), format)
    out = single(tmp_path / "out", format)
    out.parent.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.conversion.run.assemble", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out, format)
    inside = "shard-000000" + FORMATS[format].suffixes[0] + FORMATS[format].inside
    part = Path(f"{out}.partial/tasks/000001/{inside}")
    size = part.stat().st_size
    part.unlink()
    if damage != "gone":
        part.write_bytes(bytes(size if damage == "zeros" else size // 2))
    with pytest.raises(StorageError, match="is damaged or missing") as error:
        convert(source, out, format)
    assert "it writes this shard again" in str(error.value)
    assert not out.exists()
    convert(source, out, format)
    assert files_of(out.parent) == files_of(tmp_path / "reference")


@pytest.mark.parametrize("format", JOINED)
def test_create_makes_single_files_too(tmp_path: Path, format: str) -> None:
    out = single(tmp_path, format)
    with shardkit.create(out, format, {"text": shardkit.Text()}) as writer:
        for number in range(5):
            writer.write({"text": f"{number}"})
    assert [sample["text"] for sample in shardkit.open(out)] == list("01234")
    with pytest.raises(OutputError, match="the output exists"):
        shardkit.create(out, format, {"text": shardkit.Text()})
    with shardkit.create(out, format, {"label": shardkit.Int()}, overwrite=True) as writer:
        writer.write({"label": 3})
    assert shardkit.open(out)[0]["label"] == 3
    assert set(files_of(tmp_path)) == set(beside(tmp_path))


def test_a_single_file_is_a_source_and_knows_when_it_is_complete(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "train.lmdb"
    convert(source, out, "lmdb")
    assert shardkit.convert(source, "lmdb", out, workers=0).already_complete
    convert(out, tmp_path / "again.tar", "wds")
    with shardkit.open(tmp_path / "again.tar") as dataset:
        assert dataset.original_paths() == {"class0/a_b": "class0/a.b.jpg"}
        assert dataset.classes == ("class0", "class1", "class2")


def test_what_cannot_be_one_shard_is_refused_before_anything_is_made(
    source: Path, tmp_path: Path
) -> None:
    for options in ({"shard_size": "1MB"}, {"shard_samples": 3}):
        with pytest.raises(UsageError, match="cannot be limited"):
            convert(source, tmp_path / "x.lmdb", "lmdb", **options)
        with pytest.raises(UsageError, match="cannot be limited"):
            shardkit.create(tmp_path / "x.lmdb", "lmdb", {}, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="splits are folders") as error:
        convert(source, tmp_path / "x.lmdb", "lmdb", split="train=0.5,val=0.5")
    assert error.value.found == "train, val"
    (tmp_path / "x.lmdb").write_text("mine")
    with pytest.raises(OutputError, match="was not written by shardkit"):
        convert(source, tmp_path / "x.lmdb", "lmdb", overwrite=True)
    assert files_of(tmp_path).keys() - files_of(source.parent).keys() == set()
    assert (tmp_path / "x.lmdb").read_text() == "mine"
    assert not list(tmp_path.glob("*.partial"))


def test_an_unfinished_single_file_is_refused_by_open_and_continued_by_its_command(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "train.lmdb"
    (source / "class1/001.jpg").write_bytes(b"text")
    with pytest.raises(shardkit.SampleError):
        convert(source, out, "lmdb")
    assert not out.exists()
    with pytest.raises(shardkit.FormatError, match="unfinished"):
        shardkit.open(tmp_path / "train.lmdb.partial")
    convert(source, out, "lmdb", on_error="skip")
    assert set(beside(tmp_path)) == {
        "train.lmdb/data.mdb",
        *(f"__shardkit__/train.lmdb.{n}" for n in ("manifest.json", "errors.jsonl", "keys.jsonl")),
    }


def test_files_of_others_beside_the_output_are_never_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "__shardkit__").mkdir()
    for name in ("manifest.json", "errors.jsonl", "keys.jsonl"):
        mine = tmp_path / f"__shardkit__/train.lmdb.{name}"
        mine.write_text("mine")
        with pytest.raises(OutputError, match="a file is in the way") as error:
            convert(source, tmp_path / "train.lmdb", "lmdb")
        assert error.value.where["path"] == mine
        assert mine.read_text() == "mine"
        mine.unlink()
    (tmp_path / "__shardkit__/train.index.npy").write_text("mine")
    with pytest.raises(OutputError, match="a file is in the way"):
        convert(source, tmp_path / "train.tar", "wds")
    assert (tmp_path / "__shardkit__/train.index.npy").read_text() == "mine"
    assert not (tmp_path / "train.tar").exists()
    (tmp_path / "__shardkit__/train.index.npy").unlink()
    convert(source, tmp_path / "train.tar", "wds")
    assert_holds(tmp_path / "train.tar", source)


def test_what_lies_around_a_single_file_does_not_matter(source: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("nowhere")
    convert(source, tmp_path / "train.lmdb", "lmdb")
    assert shardkit.convert(source, "lmdb", tmp_path / "train.lmdb", workers=0).already_complete


def test_a_single_file_with_a_damaged_manifest_is_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "train.tar"
    convert(source, out, "wds")
    (tmp_path / "__shardkit__/train.tar.manifest.json").write_text("{")
    convert(source, out, "wds", overwrite=True)
    assert_holds(out, source)


def test_a_suffix_in_upper_case_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in lower case"):
        convert(source, tmp_path / "train.BETON", "beton")
    assert not list(tmp_path.glob("train*"))


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("x.tar", "lmdb", "x-lmdb"),
        ("x.lmdb", "arrow", "x-arrow"),
        ("x.tar.gz", "hf", "x-hf"),
        ("images", "wds", "images-wds"),
        ("x.lmdb/data.mdb", "wds", "x-wds"),
    ],
)
def test_the_default_output_stands_beside_the_source(
    tmp_path: Path, name: str, format: str, expected: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert default_output([tmp_path / name], format) == tmp_path / expected


@pytest.mark.parametrize("options", [{"shard_samples": 2}, {}])
def test_a_key_in_two_shards_stops_the_run(tmp_path: Path, options: dict[str, int]) -> None:
    samples = [{"__key__": f"{number % 2}", "label": number} for number in range(4)]
    with pytest.raises(shardkit.SampleError, match="same key") as error:
        shardkit.convert(samples, "lmdb", tmp_path / "out", workers=0, **options)
    assert error.value.where["key"] == "0"
    assert not (tmp_path / "out").exists()
