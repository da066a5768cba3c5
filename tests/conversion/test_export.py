"""C4: an export, converted again, gives equal samples; and X3: no key leaves its folder."""

import csv
import errno
import gc
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit import cli, testing
from shardkit.errors import (
    OutputError,
    SampleError,
    ShardkitError,
    SourceError,
    StorageError,
    UsageError,
)
from shardkit.helpers.names import file_stem, is_safe
from shardkit.sample import JsonText, key_hash
from shardkit.schema import Array, Bytes, Image, Int, Json, Text
from shardkit.sources import exported as exported_source
from shardkit.sources import open_sources
from shardkit.storage import fs
from shardkit.testing import EVERYTHING, any_samples, assert_same, everything, make_image
from tests.conftest import IMAGE_FORMATS, examples, few, files_of
from tests.conversion.conftest import raised
from tests.conversion.deaths import Interrupted
from tests.conversion.part_kills import Forks
from tests.sources.test_text import put
from tests.test_cli import run

KINDS = ("folder", "jsonl", "files")
FORMAT = "lmdb"  # it has any key


def write(path, samples, schema, to=FORMAT, **options):
    with shardkit.create(path, to, schema, **options) as writer:
        for each in samples:
            writer.write(each)
    return path


def assert_again(folder, exported, samples, to=FORMAT):
    """The export, converted, has these samples, in this order and with the same schema."""
    again = folder / f"again-{exported.name}"
    shardkit.convert(exported, to, again, workers=0)
    with shardkit.open(again) as dataset:
        for found, expected in zip(dataset, samples, strict=True):
            assert_same(found, expected)


def there_and_back(folder, kind, samples, schema):
    """The folder of an export whose samples are equal when it is converted again."""
    dataset = write(folder / "dataset", samples, schema)
    shardkit.export(dataset, kind, folder / kind)
    assert_again(folder, folder / kind, samples)
    assert shardkit.diff(dataset, folder / kind).equal
    return folder / kind


IMAGE = Image()
NUMBERS = {
    "n": Int(optional=True),
    "x": shardkit.Float(optional=True),
    "yes": shardkit.Bool(optional=True),
}
ODD = {
    "jpg": (IMAGE, make_image(2)),
    "file_name": (Text(), "../x"),
    "jpg_file_name": (Text(), "/etc"),
    **{name: (Bytes(), name.encode()) for name in ("a/b:C", "A/B:c", "")},
    **{name: (Int(), 3) for name in ('json:"\0,', "__json__")},
}
# Fields and samples. The keys of these are 0, 1, ... where they have none.
CASES = {
    "images, masks, boxes and numbers": (
        {
            "image": IMAGE,
            "mask": Image(optional=True),
            "caption": Text(optional=True),
            "views": shardkit.Images(optional=True),
            "boxes": Array("<f4", (None, 4), optional=True),
            "labels": Array("<i8", (None,), optional=True),
            **NUMBERS,
        },
        [
            {"__key__": "a/1", "mask": make_image(2, "PNG"), "caption": "", "views": []},
            {"__key__": "a/2", "image": make_image(3, "WEBP"), "caption": ' "x", y\r\nz\0 '},
            {"caption": "json:7", "views": [make_image(2), make_image(3, "PNG")], "x": 5e-324},
            {"boxes": np.zeros((0, 4), "<f4"), "n": -(2**63), "x": float("nan"), "yes": False},
            {"boxes": np.array([[0.1, 1, 2, 1e30]], "<f4"), "labels": np.arange(3), "x": -0.0},
            {"boxes": np.full((1, 4), np.nan, "<f4"), "n": 0, "x": float("-inf"), "yes": True},
        ],
    ),
    "audio and video": (
        {
            "audio": shardkit.Audio(),
            "text": Text(optional=True),
            "clip": shardkit.Video(optional=True),
        },
        [
            {"audio": testing.make_audio(1), "text": ""},
            {"audio": testing.make_audio(2), "clip": testing.make_video(2)},
        ],
    ),
    "odd fields": (
        {"image": IMAGE, **{name: kind for name, (kind, _) in ODD.items()}},
        [{name: value for name, (_, value) in ODD.items()}],
    ),
}
MORE_ARRAYS = [
    *testing.ARRAYS,
    (Array("<f8", (70, 70)), np.random.default_rng(0).random((70, 70))),
    (Array(">u8", (None, 2)), np.array([[2**64 - 1, 0]], ">u8")),
    (Array("<f2", (None, None)), np.zeros((0, 2), "<f2")),
]
WITHOUT_MEDIA = {
    "arrays": (
        {f"{n}": kind for n, (kind, _) in enumerate(MORE_ARRAYS)},
        [{f"{n}": value for n, (_, value) in enumerate(MORE_ARRAYS)}],
    ),
    "json and text": (
        {
            "about": Json(),
            "more": Json(optional=True),
            "text": Text(),
            "blob": Bytes(optional=True),
        },
        [
            {"about": None, "more": [1, 2.5, "x\u2028"], "text": "line\r\n\0 漢 🎉"},
            {"about": {"__json__": {"about": "1"}}, "text": "", "blob": b"\0\xff"},
        ],
    ),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(pytest.param(kind, case, marks=[] if kind == "folder" else pytest.mark.large)
          for kind in KINDS for case in CASES),
        *((kind, case) for kind in ("jsonl", "files") for case in WITHOUT_MEDIA),
    ],
)  # fmt: skip
def test_every_kind_of_sample_survives(tmp_path, kind, case):
    schema, given = {**CASES, **WITHOUT_MEDIA}[case]
    samples = []
    for n, sample in enumerate(given):
        image = {"image": make_image(n)} if "image" in schema else {}
        samples.append({"__key__": f"{n}", **image, **sample})
    there_and_back(tmp_path, kind, samples, schema)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(4), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_samples_survive(tmp_path_factory, kind, data):
    folder = tmp_path_factory.mktemp("any")
    drawn = st.lists(any_samples(), min_size=1, max_size=4, unique_by=lambda s: s["__key__"])
    there_and_back(folder, kind, data.draw(drawn), EVERYTHING)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "wds"))
def test_datasets_of_every_format_are_exported(tmp_path, format, kind):
    samples = [everything(n) for n in range(6)]
    write(tmp_path / "a", samples, EVERYTHING, format)
    result = shardkit.export(tmp_path / "a", kind, tmp_path / "out")
    assert (result.samples, result.renamed) == (6, {})
    assert_again(tmp_path, tmp_path / "out", samples, format)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_json_is_kept(tmp_path, kind):
    text = JsonText('{"b" :1.50,\n "a":[ 1e400 ],"ü":"\\u00e4"}')
    schema = {"image": IMAGE, "about": Json()}
    write(tmp_path / "a", [{"__key__": "x", "image": make_image(), "about": text}], schema)
    shardkit.export(tmp_path / "a", kind, tmp_path / "out")
    source = open_sources(tmp_path / "out")[""]
    assert isinstance(source[0]["about"], JsonText)
    assert source[0]["about"] == text


HOSTILE = [
    "../x", "/etc/passwd", "C:\\x", "C:/x", "con", "NUL.txt", "a/COM1", "aux /b", "trailing.",
    "trailing ", "a. /b", " leading", ".hidden", "x" * 300, "y" * 300, "ü" * 200 + "/b",
    "/".join(["deep" * 20] * 20), "new\nline", "zero\0", "a", "a/b", "a.image.jpg/b", "a.jpg/b",
    "a.jpg", "Case", "case", "CASE/x", "case/x", "ß", "SS", "é", "e\u0301", "..", ".", "./a",
    "a//b", "a/", "__shardkit__/exported.json", "__json__", "metadata.csv", "metadata",
    "metadata.csv/x", "data.jsonl/x", "x.JPG/y", "x%2Fy",
    "x/y", "x:y", "x%3Ay", "\u202egpj.exe", "~", "*?<>|\"", "\ud7ff", "001.Black_Bird/1.2",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_key_leaves_the_folder_or_replaces_a_file(tmp_path, kind):
    schema = {"image": IMAGE, "label": Int(), "image.jpg": Bytes()}
    samples = [
        {"__key__": key, "image": make_image(n), "label": n % 3 - 1, "image.jpg": b"%d" % n}
        for n, key in enumerate(HOSTILE)
    ]
    dataset = write(tmp_path / "a", samples, schema, classes=["../up", "con"])
    before = {*tmp_path.iterdir()}
    result = shardkit.export(dataset, kind, tmp_path / "out")
    assert {*tmp_path.iterdir()} - before == {tmp_path / "out"}
    assert_again(tmp_path, tmp_path / "out", samples)
    names = [p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")]
    assert all(is_safe(name) and name.isprintable() for name in names)
    files = [name for name in names if (tmp_path / "out" / name).is_file()]
    assert len({name.casefold() for name in files}) == len(files)
    assert len([f for f in files if not f.startswith(".shardkit")]) >= 2 * len(HOSTILE)
    assert sum(result.renamed.values()) >= 35
    reasons = {reason.split()[0] for reason in result.renamed}
    assert reasons == {"with", "too"} | ({"of"} if kind != "folder" else set())
    assert shardkit.export(dataset, kind, tmp_path / "again").renamed == result.renamed
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")


KEYS = (
    st.text(max_size=40)
    | st.text("aA./~% \\:\0", max_size=12)
    | st.tuples(st.text("a.é%/", min_size=1, max_size=5), st.integers(20, 400)).map(
        lambda pair: pair[0] * pair[1]
    )
)


@settings(max_examples=examples(100))
@given(KEYS, st.sets(st.sampled_from("ab")))
def test_any_key_has_a_stem_that_is_safe(key, endings):
    stem = file_stem(key, endings)
    assert is_safe(f"{stem}.jpg")
    assert "." not in stem.rpartition("/")[2]
    assert len(stem.encode()) <= 700


def test_usual_keys_are_the_names_of_their_files():
    for key in ("cat/0001", "v1.0/a b", "grüße/漢", "001.Black_footed_Albatross/x-1", "a~png"):
        assert file_stem(key, {"jpg", "png"}) == key


def test_keys_made_to_meet_and_keys_that_come_twice_are_kept_apart(tmp_path):
    """Also where somebody has computed what is added to the other one."""
    keys = ["Cat", "cat", f"cat~{key_hash('cat'):016x}", "CAT"]
    samples = [{"__key__": k, "text": k, "blob": k.encode()} for k in keys]
    exported = there_and_back(tmp_path, "files", samples, {"text": Text(), "blob": Bytes()})
    names = {path.name.casefold() for path in exported.iterdir()}
    assert len(names) == 2 * len(keys) + 2
    twice = [{"__key__": "a", "blob": bytes([n])} for n in range(3)]
    dataset = shardkit.Dataset.from_sequence(twice, shardkit.Schema({"blob": Bytes()}))
    shardkit.export(dataset, "files", tmp_path / "out")
    assert shardkit.diff(twice, tmp_path / "out").equal


SAMPLES = [
    {"__key__": f"{name}/{n}", "image": make_image(10 * n), "label": label, "score": n / 2}
    for label, name in enumerate(["dog", "cat"])
    for n in range(3)
]
SAMPLES[1]["mask"] = make_image(5, "PNG")


@pytest.fixture
def dataset(tmp_path):
    schema = {
        "image": IMAGE,
        "label": Int(),
        "score": shardkit.Float(),
        "mask": Image(optional=True),
    }
    return write(tmp_path / "dataset", SAMPLES, schema, classes=["dog", "cat"])


def formerly(folder):
    """The same export in the layout of earlier versions, for media with a table in CSV."""
    own, table = folder / "__shardkit__", folder / "metadata.jsonl"
    about = json.loads((folder / ".shardkit.json").read_text("utf-8"))
    own.mkdir()
    for path in folder.glob(".shardkit*"):
        name = {".json": "exported.json", ".jsonl": "files.jsonl"}.get(path.name[9:])
        path.rename(own / (name or path.name[10:]))
    if about["files"]:
        about["table"] = "__shardkit__/files.jsonl"
    (own / "exported.json").write_text(json.dumps(about), "utf-8")
    if table.exists():
        (own / "exported.json").rename(folder / "shardkit-export.json")
        own.rmdir()
        about["table"] = "metadata.csv"
        (folder / "shardkit-export.json").write_text(json.dumps(about), "utf-8")
        rows = [json.loads(line) for line in table.read_text("utf-8").splitlines()]
        names = ["__key__", *dict.fromkeys(about["columns"].values())]
        names.insert(1, names.pop(names.index("file_name")))
        with open(folder / "metadata.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            for row in rows:
                texts = (n for n, v in row.items() if not isinstance(v, str))
                writer.writerow(row | {n: json.dumps(row[n]) for n in texts})
        table.unlink()
    return folder


# What earlier versions wrote for these samples.
OLD = """\
__key__,file_name,label,text,x,boxes,about,mask_file_name
dog/0,dog/0.jpg,dog,"json:\"\"\"\"",nan,"[[1.0,1.0,1.0,1.0]]",,
1,cat/1.jpg,cat,"json:""json:7, \\""a\\""\\n\"\"",-0.5,[],"[1.5,null]",
dog/2,dog/2.jpg,,,-inf,dog/2.boxes.npy,,dog/2.mask.png
"""


def test_a_table_of_earlier_versions_is_read(tmp_path, out):
    schema = {"image": IMAGE, "label": Int(optional=True), "text": Text(optional=True)}
    schema |= {"x": shardkit.Float(), "boxes": Array("<f4", (None, 4))}
    schema |= {"about": Json(optional=True), "mask": Image(optional=True)}
    infinite = np.full((1, 4), np.inf, "<f4")
    samples = [
        {"__key__": "dog/0", "label": 1, "text": "", "x": math.nan, "boxes": infinite**0},
        {"__key__": "1", "label": 0, "text": 'json:7, "a"\n', "x": -0.5, "boxes": infinite[:0]},
        {"__key__": "dog/2", "x": -math.inf, "boxes": infinite, "mask": make_image(3, "PNG")},
    ]
    samples[1]["about"] = [1.5, None]
    samples = [
        {"__key__": s["__key__"], "image": make_image(n), **s} for n, s in enumerate(samples)
    ]
    shardkit.export(write(tmp_path / "a", samples, schema, classes=["cat", "dog"]), "folder", out)
    for path in [*out.glob("dog%2F2.*")]:
        path.rename(out / path.name.replace("%2F", "/"))
    formerly(out)
    (out / "metadata.csv").write_text(OLD, "utf-8")
    assert again_of(out)[1].ignored == {}
    assert_again(tmp_path, out, samples)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_of_earlier_versions_are_read(tmp_path, kind):
    schema = {"image": IMAGE, "tokens": Array("<u2", (None,)), "blob": Bytes()}
    tokens = [np.arange(n, dtype="<u2") for n in range(3)]
    samples = [
        {"__key__": f"{n}", "image": make_image(n), "tokens": tokens[n], "blob": b"x"}
        for n in range(3)
    ]
    dataset = write(tmp_path / "a", samples, schema)
    formerly(there_and_back(tmp_path, kind, samples, schema))
    assert not [*(tmp_path / kind).glob(".shardkit*")]
    assert again_of(tmp_path / kind)[1].ignored == {}
    assert shardkit.diff(dataset, tmp_path / kind).equal
    raised(OutputError, "the output exists", shardkit.export, dataset, kind, tmp_path / kind)


@pytest.fixture
def exported(dataset, out):
    """Its folder, of images in classes and a table."""
    shardkit.export(dataset, "folder", out)
    return out


def again_of(exported):
    """What a conversion of an export stores, and leaves."""
    found = exported.with_name("again")
    result = shardkit.convert(exported, "wds", found, workers=0)
    return shardkit.open(found), result


def test_a_folder_has_its_classes_and_a_table(tmp_path, exported):
    assert (exported / "cat/2.jpg").read_bytes() == SAMPLES[5]["image"]
    assert (exported / "dog%2F1.mask.png").read_bytes() == SAMPLES[1]["mask"]
    row = {"__key__": "dog/1", "file_name": "dog/1.jpg", "label": "dog", "score": 0.5}
    row["mask_file_name"] = "dog%2F1.mask.png"
    assert json.loads((exported / "metadata.jsonl").read_text("utf-8").splitlines()[1]) == row
    assert_again(tmp_path, exported, SAMPLES)
    assert shardkit.open(tmp_path / "again-out").classes == ("dog", "cat")


def test_labels_put_images_into_folders(tmp_path):
    """Numbers of no class do not become classes that are called so."""
    for number, (classes, labels, names) in enumerate(
        (
            (["a/b", "-2"], (0, -1, None), {"a%2Fb/0.jpg", "1.jpg", "2.jpg"}),
            (["a", "5"], (0, 1, -1), {"a/0.jpg", "5/1.jpg", "2.jpg"}),
        )
    ):
        dataset, out = tmp_path / f"in{number}", tmp_path / f"out{number}"
        samples = [{"__key__": f"{n}", "image": make_image(n)} for n in range(3)]
        for n, label in enumerate(labels):
            samples[n] |= {} if label is None else {"label": label}
        write(dataset, samples, {"image": IMAGE, "label": Int(optional=True)}, classes=classes)
        shardkit.export(dataset, "folder", out)
        assert {p.relative_to(out).as_posix() for p in out.rglob("*.jpg")} == names
        assert_again(tmp_path, out, samples)
        assert shardkit.open(tmp_path / f"again-{out.name}").classes == tuple(classes)
    rows = (out / "metadata.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(row)["label"] for row in rows] == [0, 1, -1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # datasets leaves metadata.csv open
def test_hugging_face_reads_the_folder(tmp_path, exported):
    options = {"split": "train", "cache_dir": str(tmp_path / "cache")}
    found = datasets.load_dataset("imagefolder", data_dir=str(exported), **options)
    found = found.cast_column("image", datasets.Image(decode=False))
    assert [row["__key__"] for row in found] == [sample["__key__"] for sample in SAMPLES]
    assert [row["label"] for row in found] == ["dog"] * 3 + ["cat"] * 3
    assert isinstance(found.features["mask"], datasets.Image)
    for row, sample in zip(found, SAMPLES, strict=True):
        assert Path(row["image"]["path"]).read_bytes() == sample["image"]
    gc.collect()  # here, where the warning is ignored


def test_our_own_folder_source_reads_it_without_what_we_know(tmp_path, exported):
    (exported / ".shardkit.json").unlink()
    (exported / "dog%2F1.mask.png").unlink()
    options = {"label_column": "label", "drop": ["__key__", "mask_file_name"]}
    shardkit.convert(exported, "wds", tmp_path / "again", **options)
    with shardkit.open(tmp_path / "again") as again:
        assert again.classes == ("cat", "dog")
        assert {s["__key__"] for s in again} >= {s["__key__"] for s in SAMPLES}


def test_a_view_is_exported(tmp_path, dataset, out):
    with shardkit.open(dataset) as whole:
        shardkit.export(whole.select([4, 1]), "files", out)
    assert_again(tmp_path, out, [SAMPLES[4], SAMPLES[1]])


def test_json_lines_are_plain(tmp_path):
    schema = {"text": Text(), "tokens": Array("<i4", (None,)), "x": Json()}
    plain = {"__key__": "a", "text": "ä\n", "tokens": [0, 1, 2], "x": {"y": [None]}}
    samples = [{**plain, "tokens": np.arange(3, dtype="<i4")}]
    exported = there_and_back(tmp_path, "jsonl", samples, schema)
    (line,) = (exported / "data.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line) == plain


def test_tokens_keep_their_tokenizer(gpt2, tmp_path, out):
    put(tmp_path / "a.txt", "one two three\n" * 20)
    text = shardkit.TextOptions(tokenizer=gpt2)
    shardkit.convert(tmp_path / "a.txt", "wds", tmp_path / "a", text=text, workers=0)
    shardkit.export(tmp_path / "a", "jsonl", out)
    for former in (False, True):
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        with shardkit.open(tmp_path / "a") as a, again_of(out)[0] as b:
            assert a.tokenizer() == b.tokenizer()
            assert a.tokenizer()[0]
        if not former:
            formerly(out)


def test_splits_have_folders_of_their_own(tmp_path, out):
    for split, count in (("train", 4), ("val", 2)):
        for n in range(count):
            put(tmp_path / f"in/{split}/{n}.jpg", make_image(n))
    shardkit.convert(tmp_path / "in", "wds", tmp_path / "a", workers=0)
    shardkit.export(tmp_path / "a", "folder", out)
    assert (out / "val/metadata.jsonl").is_file()
    assert shardkit.diff(tmp_path / "a", out).equal
    shardkit.convert(out, "wds", tmp_path / "b", workers=0)
    assert {p.name for p in (tmp_path / "b").iterdir()} == {"__shardkit__", "train", "val"}
    shutil.copytree(tmp_path / "in/val", out / "test")
    result = shardkit.convert(out, "wds", tmp_path / "c", workers=0)
    assert result.ignored == {"file or folder beside those of splits": 1}


def edited(folder, old, new):
    (table,) = folder.glob("metadata.*")
    assert old in table.read_text("utf-8")
    table.write_text(table.read_text("utf-8").replace(old, new, 1), "utf-8")


@pytest.mark.parametrize("old", [False, True])
def test_an_export_may_be_edited(exported, old):
    table = (formerly(exported) if old else exported) / f"metadata.{'csv' if old else 'jsonl'}"
    edited(exported, "dog/0", "new")
    for before, after in (('label":"dog', 'label":"cat'), ('e":0.0', 'e":7')) if not old else ():
        edited(exported, before, after)
    if old:
        edited(exported, "dog,0.0", "cat,7")
    shutil.copy(exported / "cat/0.jpg", exported / "cat/more.jpg")
    lines = table.read_text("utf-8").splitlines(keepends=True)
    again = lines[int(old)].replace("new", "twice")  # two rows name one file
    table.write_text("".join([*lines[:-1], again]), "utf-8")
    found, result = again_of(exported)
    assert result.samples == 6
    assert result.ignored == {f"file that {table.name} does not name": 2}
    assert (found[0]["__key__"], found[0]["label"], found[0]["score"]) == ("new", 1, 7.0)


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "data.jsonl"])
def test_columns_that_are_added_are_counted(dataset, out, name):
    shardkit.export(dataset, "jsonl" if name == "data.jsonl" else "folder", out)
    table = out / name
    if not table.exists():
        formerly(out)
    head, *rows = table.read_text("utf-8").splitlines()
    if name == "metadata.csv":
        table.write_text("\n".join([f"{head},more", *(f"{row},x" for row in rows)]), "utf-8")
    else:
        table.write_text("\n".join(r[:-1] + ',"more":1}' for r in (head, *rows)), "utf-8")
    counted = {"value in a column that is not a field of the export": len(SAMPLES)}
    assert again_of(out)[1].ignored == counted


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ("dog/0.jpg", "../dataset/data.mdb", SampleError, "without '..'"),
        ("dog/0.jpg", "/etc/passwd", SampleError, "without '..'"),
        ("dog/0.jpg", "dog/9.jpg", SampleError, "cannot be read"),
        ("dog,0.0", "wolf,0.0", SampleError, "found: 'wolf'"),
        ("dog,0.0", "dogs,0.0", SampleError, "did you mean dog?"),
        ("dog,0.0", "dog,many", SampleError, "'many'"),
        (",score", ",points", SampleError, "found: no value"),
        (",score", ",label", SourceError, "two columns have the same name"),
        ("dog,0.0", "dog", SourceError, "a row of the table is damaged"),
        ("dog/0,dog/0.jpg", ",dog/0.jpg", SampleError, "'__key__'"),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_place(exported, old, new, error, words):
    edited(formerly(exported), old, new)
    with pytest.raises(error) as found:
        again_of(exported)
    assert words in str(found.value)
    assert str(exported) in str(found.value)


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ('"dog/0.jpg"', '"../dataset/data.mdb"', SampleError, "without '..'"),
        ('"dog/0.jpg"', "7", SampleError, "7"),
        ('"label":"dog"', '"label":"wolf"', SampleError, "found: 'wolf'"),
        ('"score":0.0', '"score":"many"', SampleError, "'many'"),
        (',"score":0.0', "", SampleError, "found: no value"),
        ('"about":"[', '"about":"{', SampleError, "about"),
        ('"about":"[1]"', '"about":[1]', SampleError, "about"),
        ('"score":0.0', '"score":', SourceError, "a row of the table is damaged"),
    ],
)
def test_what_does_not_fit_in_json_is_too(tmp_path, out, old, new, error, words):
    schema = {"image": IMAGE, "label": Int(), "score": shardkit.Float(), "about": Json()}
    samples = [{**{n: v for n, v in SAMPLES[0].items() if n in schema}, "about": [1]}]
    samples[0]["__key__"] = "dog/0"
    shardkit.export(write(tmp_path / "a", samples, schema, classes=["dog"]), "folder", out)
    edited(out, old, new)
    with pytest.raises(error, match=re.escape(words)):
        again_of(out)


def test_damaged_tables_give_errors_of_ours(tmp_path, large):
    """X1: bytes changed, removed and added at random, in each kind of table."""
    schema = {
        "image": IMAGE,
        "views": shardkit.Images(),
        **NUMBERS,
        "about": Json(),
        "blob": Bytes(),
    }
    views = {"a": [make_image(2), make_image(3, "PNG")], "b": []}
    samples = [{"__key__": key, "views": images} for key, images in views.items()]
    more = {"image": make_image(1), "x": 0.5, "n": 3, "about": {"a": [1.50]}, "blob": b"x"}
    dataset = write(tmp_path / "a", [{**sample, **more} for sample in samples], schema)
    generator, failed, read = np.random.default_rng(7), 0, 0
    for kind, name in (
        *(("folder", "metadata.jsonl"), ("jsonl", "data.jsonl")),
        *(("folder", "metadata.csv"),),
    ):
        if not (tmp_path / kind).exists():
            shardkit.export(dataset, kind, tmp_path / kind)
        if not (tmp_path / kind / name).exists():
            formerly(tmp_path / kind)
        for path in (tmp_path / kind / name, exported_source.about_path(tmp_path / kind)):
            whole = path.read_bytes()
            for _ in range(300 if large else 40):
                damaged = bytearray(whole)
                for at in generator.integers(0, len(whole), generator.integers(1, 4)).tolist():
                    more_bytes = generator.choice([b"", b'"', b"[", b"9", b"\xff", b"\n", b"{}"])
                    damaged[at : at + int(generator.integers(0, 3))] = bytes(more_bytes)
                path.write_bytes(damaged)
                try:
                    source = open_sources(tmp_path / kind)[""]
                except ShardkitError:
                    failed += 1
                    continue
                for number in range(len(source)):
                    try:
                        source.schema.check(source[number])
                        read += 1
                    except ShardkitError:
                        failed += 1
            path.write_bytes(whole)
    assert min(failed, read) > 30


def test_rows_have_a_longest(tmp_path, exported, monkeypatch):
    """X4: a quote that is missing does not make a row of all that follows."""
    monkeypatch.setattr(exported_source, "MAX_ROW", 120)
    assert len(open_sources(exported)[""]) == 6
    edited(formerly(exported), "dog/0.jpg", '"dog/0.jpg')
    raised(SourceError, "a closing quote is missing", open_sources, exported)
    long = write(tmp_path / "l", [{"__key__": "a", "text": "x" * 121}], {"text": Text()})
    with pytest.raises(SampleError, match="too long for a row") as refused:
        shardkit.export(long, "jsonl", tmp_path / "lines")
    assert "--to files" in str(refused.value)
    shardkit.export(long, "files", tmp_path / "files")


def test_long_cells_are_read_by_other_processes(tmp_path, out):
    samples = [{"__key__": f"{n}", "image": make_image(n), "text": "x" * 300_000} for n in range(8)]
    dataset = write(tmp_path / "a", samples, {"image": IMAGE, "text": Text()})
    shardkit.export(dataset, "folder", out)
    shardkit.convert(out, "wds", tmp_path / "b", workers=1, shard_size="500kB")
    assert shardkit.diff(dataset, tmp_path / "b").equal


def test_a_file_that_changes_meanwhile_is_noticed(exported):
    source = open_sources(exported)[""]
    os.utime(exported / "dog%2F1.mask.png", (1, 1))
    assert source[0]
    with pytest.raises(SampleError, match="changed while"):
        source[1]
    os.utime(exported / "metadata.jsonl", (1, 1))
    with pytest.raises(SampleError, match="changed while"):
        source[0]


def test_a_damaged_description_is_an_error(tmp_path, exported):
    path = exported / ".shardkit.json"
    about = json.loads(path.read_text("utf-8"))
    for name, value in (
        *(("table", "../x.csv"), ("table", 7), ("schema", {"a": {"type": "No"}}), ("version", 2)),
        *(("columns", []), ("splits", ["../x"]), ("tokenizer", {"file": "../x"})),
    ):
        path.write_text(json.dumps({**about, name: value}), "utf-8")
        with pytest.raises(ShardkitError):
            again_of(exported)
        assert not (tmp_path / "again").exists()


def test_what_cannot_be_exported_is_refused(tmp_path, out):
    text = write(tmp_path / "t", [{"__key__": "a", "text": "x"}], {"text": Text()})
    some = write(tmp_path / "s", [{"__key__": "a"}], {"image": Image(optional=True)})
    lines = put(tmp_path / "x.jsonl", '{"text": "a"}\n')
    for source, kind, to, error, message in (
        (text, "folder", out, UsageError, "no images, audio or video"),
        (text, "file", out, UsageError, "did you mean files"),
        (text, "jsonl", "s3://bucket/out", UsageError, "written to this machine"),
        (lines, "jsonl", out, UsageError, "text files are not a dataset"),
        (shardkit.open(text), "jsonl", text / "out", OutputError, "must not contain each other"),
        (some, "folder", out, SampleError, "no file for its row of the table"),
    ):
        raised(error, message, shardkit.export, source, kind, to)
    assert {path.name for path in tmp_path.iterdir()} == {"t", "x.jsonl", "s"}


def test_nothing_is_overwritten(tmp_path, dataset, out):
    out.mkdir()
    shardkit.export(dataset, "files", out)  # an empty folder may be there
    with pytest.raises(KeyboardInterrupt):
        shardkit.convert(dataset, "wds", tmp_path / "b", workers=0, progress=Interrupted(most=0))
    before = files_of(tmp_path)
    raised(OutputError, "unfinished conversion", shardkit.export, dataset, "files", tmp_path / "b")
    (out / "more").touch()
    before["out/more"] = b""
    for name in ("out", "dataset", "dataset/inside", "missing/out"):
        with pytest.raises(OutputError):
            shardkit.export(dataset, "files", tmp_path / name)
        said = run("export", dataset, "--to", "files", "-o", tmp_path / name, check=2).stderr
        assert "--overwrite" not in said  # which export does not have
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [False, True])
def test_a_finished_export_is_not_made_again(tmp_path, kind, splits):
    samples = [{"__key__": f"c{n}/k", "image": make_image(n), "n": n} for n in range(4)]
    schema = {"image": Image(), "n": Int()}
    source, out = write(tmp_path / "in", samples, schema), tmp_path / "out"
    if splits:
        shardkit.convert(source, FORMAT, tmp_path / "s", split="a=0.5,b=0.5", workers=0)
        source = tmp_path / "s"
    command = ("export", source, "--to", kind, "-o", out)
    first = json.loads(run(*command, "--json").stdout)
    before = {path: (out / path).stat().st_mtime_ns for path in files_of(out)}
    assert "already complete" in run(*command).stdout
    again = json.loads(run(*command, "--json").stdout)
    assert again == {**first, "already_complete": True}
    assert {path: (out / path).stat().st_mtime_ns for path in files_of(out)} == before
    other = next(name for name in KINDS if name != kind)
    raised(OutputError, "the output exists", shardkit.export, source, other, out)
    name = next(path for path in before if "/" in path and not path.endswith(".json"))
    data = (out / name).read_bytes()
    (out / name).unlink()
    raised(OutputError, "the output exists", shardkit.export, source, kind, out)
    (out / name).write_bytes(data)
    assert shardkit.export(source, kind, out).already_complete
    first_file = next(iter(source.rglob("*.mdb")))
    os.utime(first_file, ns=(1, 1))  # as if it were another one of the same size
    raised(OutputError, "the output exists", shardkit.export, source, kind, out)


def test_an_export_that_fails_leaves_nothing(tmp_path, out):
    """Files of later samples are being written in threads then."""
    samples = [{"__key__": f"d{n}/k", "data": bytes(500_000)} for n in range(40)]
    shardkit.convert(samples, "arrow", tmp_path / "in", workers=0)

    def stop(progress):
        raise ValueError("enough")

    for _ in range(3):
        raised(ValueError, "enough", shardkit.export, tmp_path / "in", "files", out, progress=stop)
        assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("change", ["create", "write", "rename", "sync_all", "make_folder"])
def test_an_export_that_dies_begins_again(tmp_path, dataset, out, monkeypatch, change):
    real, calls, last = getattr(fs, change), 0, math.inf

    def dying(*args):
        nonlocal calls
        calls += 1
        if calls > last:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(fs, change, dying)
    shardkit.export(dataset, "folder", tmp_path / "expected")
    most = calls
    assert most
    end = 0 if change == "make_folder" else most - 1  # threads may make a folder several times
    for stop in {*range(min(5, most)), most // 2, end}:
        calls, last = 0, stop
        with pytest.raises(KeyboardInterrupt):
            shardkit.export(dataset, "folder", out)
        assert not out.exists()
    last = math.inf
    shardkit.export(dataset, "folder", out)
    assert files_of(out) == files_of(tmp_path / "expected")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.large
def test_an_export_that_is_killed_begins_again(tmp_path):
    samples = [{"__key__": f"k{n}", "blob": b"x"} for n in range(200)]
    dataset = write(tmp_path / "a", samples, {"blob": Bytes()}, shard_size="1MB")
    out = tmp_path / "out"
    with Forks(tmp_path) as forks:
        for at in (1, 50, 300):
            died = forks.start("export", dataset, "--to", "files", "-o", out, at=at).wait()
            assert died == (-signal.SIGKILL, "")
            assert not out.exists()
            assert (tmp_path / "out.partial").exists()
        shardkit.export(dataset, "files", out)
    assert shardkit.diff(dataset, out).equal_samples == len(samples)
    assert not (tmp_path / "out.partial").exists()


def test_an_interrupt_says_how_to_go_on(dataset, out, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fs, "sync_all", interrupted)
    words = ["shardkit", "export", str(dataset), "--to", "files", "-o", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert cli._run() == 130
    assert "interrupted; the same command run again starts over" in capsys.readouterr().err


def test_a_full_disk_says_that_the_export_starts_over(dataset, out, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fs.NewFile, "write", full)
    error = raised(StorageError, "the disk is full", shardkit.export, dataset, "folder", out)
    assert error.fix == "free some space, then run the same command again: it starts over"


def test_the_command_says_what_it_renamed(tmp_path):
    samples = [{"__key__": key, "x": 1} for key in ("a.b", "a_b", "A_B")]
    dataset = write(tmp_path / "a", samples, {"x": Int()})
    shown = run("export", dataset, "--to", "files", "-o", tmp_path / "out").stdout
    assert "3 samples; 3 files" in shown
    assert "1 with characters or names that not every system takes" in shown
    assert "1 of the same file name as another" in shown
    report = json.loads(
        run("export", dataset, "--to", "jsonl", "-o", tmp_path / "lines", "--json").stdout
    )
    assert (report["samples"], report["files"], report["renamed"]) == (3, 0, {})
    run("export", dataset, "--to", "tar", "-o", tmp_path / "x", check=2)
    meant = run("convert", dataset, "--to", "folder", "-o", tmp_path / "x", check=2).stderr
    assert "`shardkit export --to folder`" in meant
    assert run("export", dataset, "--to", "files", "-o", tmp_path / "q", "--quiet").stdout == ""


def test_folders_number_the_classes_for_others(tmp_path):
    """Also classes without samples; and no other folder is taken for a class."""
    samples = [{"__key__": str(n), "image": make_image(n), "label": 2 * n} for n in range(2)]
    names = ["ant", "bee", "cat"]
    dataset = write(tmp_path / "a", samples, {"image": Image(), "label": Int()}, classes=names)
    shardkit.export(dataset, "folder", tmp_path / "out")
    out = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert out == [".shardkit.json", "ant", "bee", "cat", "metadata.jsonl"]
    assert_again(tmp_path, tmp_path / "out", samples)


@pytest.mark.parametrize("to", ["folder", "jsonl", "files"])
def test_keys_that_look_like_values_come_back(tmp_path, to):
    """Paths in a table begin with the key: like a list, or the prefix of a quoted cell."""
    keys = ["[1, 2", "[a]", "[", "json:x", 'json:"y"']
    schema = {"image": shardkit.Image(), "x": Array("<f4", (70, 70)), "y": Array("<i8", (None,))}
    with shardkit.create(tmp_path / "d", "wds", schema) as out:
        for n, key in enumerate(keys):
            values = {"x": np.full((70, 70), n, "<f4"), "y": np.arange(n)}
            out.write({"__key__": key, "image": make_image(n), **values})
    shardkit.export(tmp_path / "d", to, tmp_path / "e")
    shardkit.convert(tmp_path / "e", "wds", tmp_path / "f", workers=0)
    assert shardkit.diff(tmp_path / "d", tmp_path / "f").equal
