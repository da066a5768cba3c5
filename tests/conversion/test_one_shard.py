"""Outputs of one shard: parts made by parallel tasks and joined; single files."""

from functools import partial
from pathlib import Path

import pytest

import shardkit
from shardkit import ImageOptions
from shardkit.conversion.run import prepare
from shardkit.conversion.target import default_output
from shardkit.errors import OutputError, StorageError, UsageError
from shardkit.formats import FORMATS
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images
from tests.conversion.conftest import raised
from tests.conversion.deaths import change, continued_after_deaths
from tests.sources.test_text import put

JOINED = sorted(name for name in IMAGE_FORMATS if FORMATS[name].single)
# Files of pages, a folder of its own, and an index beside the file: these die at each change.
EXHAUSTED = ("beton", "lmdb", "wds")


@pytest.fixture
def source(tmp_path):
    folder = write_images(tmp_path / "in", classes=3, each=4, kilobytes=2)
    (folder / "class0/a.b.jpg").write_bytes((folder / "class0/000.jpg").read_bytes())
    return folder


def set_part_bytes(monkeypatch, size):
    monkeypatch.setattr("shardkit.conversion.cuts._COPIED_BYTES", size)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", size)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    set_part_bytes(monkeypatch, 8_000)


def single(folder, format, name="train"):
    """The path of a single file, in a folder that is there."""
    folder.mkdir(exist_ok=True)
    return folder / (name + FORMATS[format].suffixes[0])


@pytest.mark.parametrize("format", JOINED)
def test_create_makes_single_files_too(tmp_path, format):
    out, text = single(tmp_path, format), {"text": shardkit.Text()}
    with shardkit.create(out, format, text) as writer:
        for number in range(5):
            writer.write({"text": f"{number}"})
    assert [sample["text"] for sample in shardkit.open(out)] == list("01234")
    raised(OutputError, "the output exists", shardkit.create, out, format, text)
    with shardkit.create(out, format, {"label": shardkit.Int()}, overwrite=True) as writer:
        writer.write({"label": 3})
    assert shardkit.open(out)[0]["label"] == 3
    assert all(name.startswith(("train", "__shardkit__/train")) for name in files_of(tmp_path))


def convert(source, out, format, **options):
    shardkit.convert(source, format, out, **{"workers": 0, **options})


def assert_holds(out, source):
    with shardkit.open(out) as dataset:
        assert len(dataset) == 13
        assert dataset.shards == 1
        assert dataset.classes == ("class0", "class1", "class2")
        for sample in dataset:
            path = dataset.original_paths().get(sample["__key__"], sample["__key__"] + ".jpg")
            assert (source / path).read_bytes() == sample["image"]


@pytest.mark.parametrize("format", few(JOINED, "lmdb"))
def test_parts_of_any_workers_make_the_same_file(source, tmp_path, format):
    assert prepare(source, format, single(tmp_path, format)).describe()["tasks"] > 3
    made = []
    for workers in (0, 1):
        out = single(tmp_path / f"w{workers}", format)
        convert(source, out, format, workers=workers)
        assert_holds(out, source)
        made.append(files_of(out.parent))
    assert made[0] == made[1]
    names = {name.removesuffix("/data.mdb") for name in made[0]}
    file = f"train{FORMATS[format].suffixes[0]}"
    expected = {file, *(f"__shardkit__/{file}.{name}" for name in ("manifest.json", "keys.jsonl"))}
    indexes = {"wds": "train.index.npy", "tfrecord": "train.records.npy"}
    assert names == expected | {f"__shardkit__/{indexes[f]}" for f in indexes if f == format}


@pytest.mark.parametrize("format", [name for name in JOINED if FORMATS[name].one_shard])
def test_a_folder_of_such_a_format_has_one_shard_unless_asked(source, tmp_path, format):
    convert(source, tmp_path / "one", format)
    assert_holds(tmp_path / "one", source)
    convert(source, tmp_path / "many", format, shard_samples=5)
    with shardkit.open(tmp_path / "many") as dataset:
        assert [dataset.extent(n)[0] for n in range(dataset.shards)] == [5, 5, 3]


@pytest.mark.parametrize("format", ["beton", "lmdb", "wds"])
def test_one_shard_of_more_work_than_tasks_share_is_one(source, tmp_path, format, monkeypatch):
    # As with more than 64 tasks of 256 MB.
    monkeypatch.setattr("shardkit.conversion.cuts._FRACTION", 2)
    monkeypatch.setattr("shardkit.conversion.cuts._TASK_BYTES", 5_000)
    convert(source, single(tmp_path, format), format, image=ImageOptions(resize=16))
    with shardkit.open(single(tmp_path, format)) as dataset:
        assert (dataset.shards, len({sample["__key__"] for sample in dataset})) == (1, 13)


# Many parts that are joined, or one that is moved.
MANY, ONE = 30_000, 10**9


@pytest.mark.large
@pytest.mark.parametrize(
    ("format", "seed", "part_bytes"),
    [
        *[(format, 1, MANY) for format in JOINED],
        *[("beton", 2, ONE), ("lmdb", 2, MANY), ("lmdb", 1, ONE), ("wds", 2, ONE)],
    ],
)
def test_replacing_a_single_file_that_dies_anywhere(
    source, tmp_path, format, seed, part_bytes, monkeypatch
):
    """The old dataset is another one, or with seed 2 of the same recipe."""
    set_part_bytes(monkeypatch, part_bytes)
    out, fresh = single(tmp_path / "out", format), single(tmp_path / "new", format)
    convert(source, out, format, shuffle=True, seed=seed)
    change(source / "class0/000.jpg")
    convert(source, fresh, format, shuffle=True, seed=2)
    replace = partial(convert, source, out, format, shuffle=True, seed=2, overwrite=True)
    results, everywhere = [files_of(path.parent) for path in (out, fresh)], format in EXHAUSTED
    continued_after_deaths(out.parent, replace, results, everywhere=everywhere, name=out.name)


@pytest.mark.parametrize(
    ("format", "part_bytes"),
    [
        ("wds", MANY),
        *(pytest.param(format, MANY, marks=pytest.mark.large) for format in JOINED[:-1]),
        *(pytest.param(format, ONE, marks=pytest.mark.large) for format in ("lmdb", "wds")),
    ],
)
def test_a_single_file_that_dies_anywhere_is_continued(
    source, tmp_path, format, part_bytes, large, monkeypatch
):
    set_part_bytes(monkeypatch, part_bytes)
    reference, out = single(tmp_path / "reference", format), single(tmp_path / "out", format)
    convert(source, reference, format)
    run, everywhere = partial(convert, source, out, format), large and format in EXHAUSTED
    results = [files_of(reference.parent)]
    continued_after_deaths(out.parent, run, results, everywhere=everywhere, name=out.name)


@pytest.mark.parametrize(
    ("format", "damage"),
    [
        *[("wds", "cut"), ("lmdb", "zeros"), ("wds", "gone")],
        *(pytest.param(format, "zeros", marks=pytest.mark.large) for format in JOINED),
    ],
)
def test_a_part_that_a_power_cut_took_is_made_again(source, tmp_path, format, damage):
    reference, out = single(tmp_path / "reference", format), single(tmp_path / "out", format)
    convert(source, reference, format)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.conversion.run.joins", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out, format)
    inside = "shard-000000" + FORMATS[format].suffixes[0] + FORMATS[format].inside
    part = Path(f"{out}.partial/tasks/000001/{inside}")
    size = part.stat().st_size
    part.unlink()
    if damage != "gone":
        part.write_bytes(bytes(size if damage == "zeros" else size // 2))
    error = raised(StorageError, "is damaged or missing", convert, source, out, format)
    assert "it writes this shard again" in str(error)
    assert not out.exists()
    convert(source, out, format)
    assert files_of(out.parent) == files_of(reference.parent)


def test_a_single_file_is_a_source_and_knows_when_it_is_complete(source, tmp_path):
    (tmp_path / "broken").symlink_to("nowhere")  # what lies around does not matter
    out = tmp_path / "train.lmdb"
    convert(source, out, "lmdb")
    assert shardkit.convert(source, "lmdb", out, workers=0).already_complete
    convert(out, tmp_path / "again.tar", "wds")
    with shardkit.open(tmp_path / "again.tar") as dataset:
        assert dataset.original_paths() == {"class0/a_b": "class0/a.b.jpg"}
        assert dataset.classes == ("class0", "class1", "class2")


def test_what_cannot_be_one_shard_is_refused_before_anything_is_made(source, tmp_path):
    out = tmp_path / "x.lmdb"
    for options in ({"shard_size": "1MB"}, {"shard_samples": 3}):
        raised(UsageError, "cannot be limited", convert, source, out, "lmdb", **options)
        raised(UsageError, "cannot be limited", shardkit.create, out, "lmdb", {}, **options)
    with pytest.raises(UsageError, match="splits are folders") as error:
        convert(source, out, "lmdb", split="train=0.5,val=0.5")
    assert error.value.found == "train, val"
    raised(UsageError, "in lower case", convert, source, tmp_path / "x.BETON", "beton")
    out.write_text("mine")
    raised(OutputError, "was not written by shardkit", convert, source, out, "lmdb", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "x.lmdb"}
    assert out.read_text() == "mine"


def test_an_unfinished_single_file_does_not_open_and_is_continued(source, tmp_path):
    out = single(tmp_path / "here", "lmdb")
    (source / "class1/001.jpg").write_bytes(b"text")
    with pytest.raises(shardkit.SampleError):
        convert(source, out, "lmdb")
    assert not out.exists()
    raised(shardkit.FormatError, "unfinished", shardkit.open, f"{out}.partial")
    convert(source, out, "lmdb", on_error="skip")
    names = ("manifest.json", "errors.jsonl", "keys.jsonl")
    listed = {f"__shardkit__/train.lmdb.{name}" for name in names}
    assert files_of(out.parent).keys() == {"train.lmdb/data.mdb", *listed}


def test_files_of_others_beside_the_output_are_never_replaced(source, tmp_path):
    beside = [f"train.lmdb.{name}" for name in ("manifest.json", "errors.jsonl", "keys.jsonl")]
    for name in (*beside, "train.index.npy"):
        file, to = ("train.tar", "wds") if name.endswith("npy") else ("train.lmdb", "lmdb")
        mine = put(tmp_path / "__shardkit__" / name, "mine")
        error = raised(OutputError, "a file is in the way", convert, source, tmp_path / file, to)
        assert error.where["path"] == mine
        assert mine.read_text() == "mine"
        assert not (tmp_path / file).exists()
        mine.unlink()
    convert(source, tmp_path / "train.tar", "wds")
    assert_holds(tmp_path / "train.tar", source)
    (tmp_path / "__shardkit__/train.tar.manifest.json").write_text("{")  # which is damaged then
    convert(source, tmp_path / "train.tar", "wds", overwrite=True)
    assert_holds(tmp_path / "train.tar", source)


def test_the_default_output_stands_beside_the_source(tmp_path):
    for name, format, expected in (
        ("x.tar", "lmdb", "x-lmdb"),
        ("x.tar.gz", "hf", "x-hf"),
        ("images", "wds", "images-wds"),
        ("x.lmdb/data.mdb", "wds", "x-wds"),
    ):
        put(tmp_path / name, "")
        assert default_output([tmp_path / name], format) == tmp_path / expected


@pytest.mark.parametrize("options", [{"shard_samples": 2}, {}])
def test_a_key_in_two_shards_stops_the_run(tmp_path, options):
    samples = [{"__key__": f"{number % 2}", "label": number} for number in range(4)]
    with pytest.raises(shardkit.SampleError, match="same key") as error:
        shardkit.convert(samples, "lmdb", tmp_path / "out", workers=0, **options)
    assert error.value.where["key"] == "0"
    assert not (tmp_path / "out").exists()
