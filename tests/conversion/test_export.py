"""C4: an export, converted again, gives equal samples; and X3: no key leaves its folder."""

from __future__ import annotations

import csv
import gc
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit import cli, storage
from shardkit.errors import OutputError, SampleError, ShardkitError, SourceError, UsageError
from shardkit.names import file_stem, is_safe
from shardkit.sample import JsonText, Sample
from shardkit.schema import (
    Array,
    Audio,
    Bool,
    Bytes,
    Float,
    Image,
    Images,
    Int,
    Json,
    Schema,
    Text,
    Video,
)
from shardkit.sources import exported as exported_source
from shardkit.sources import open_sources
from shardkit.testing import (
    EVERYTHING,
    any_samples,
    assert_same,
    everything,
    make_audio,
    make_image,
    make_video,
)
from tests.conftest import IMAGE_FORMATS, examples, few, files_of
from tests.conversion.part_kills import Forks
from tests.test_cli import run

KINDS = ("folder", "jsonl", "files")
FORMAT = "lmdb"  # it has any key


def write(path: Path, samples: list[Sample], schema: Any, to: str = FORMAT, **options: Any) -> Path:
    with shardkit.create(path, to, schema, **options) as writer:
        for each in samples:
            writer.write(each)
    return path


def assert_again(folder: Path, exported: Path, samples: list[Sample], to: str = FORMAT) -> None:
    """The export, converted, has these samples, in this order and with the same schema."""
    again = folder / f"again-{exported.name}"
    shardkit.convert(exported, to, again, workers=0)
    with shardkit.open(again) as dataset:
        for found, expected in zip(dataset, samples, strict=True):
            assert_same(found, expected)


def there_and_back(folder: Path, kind: str, samples: list[Sample], schema: Any) -> Path:
    """The folder of an export whose samples are equal when it is converted again."""
    dataset = write(folder / "dataset", samples, schema)
    shardkit.export(dataset, kind, folder / kind)
    assert_again(folder, folder / kind, samples)
    assert shardkit.diff(dataset, folder / kind).equal
    return folder / kind


IMAGE = Image()
CASES: dict[str, tuple[dict[str, Any], list[Sample]]] = {
    "images and masks": (
        {"image": IMAGE, "mask": Image(optional=True), "caption": Text()},
        [
            {"__key__": "a/1", "image": make_image(1), "mask": make_image(2, "PNG"), "caption": ""},
            {"__key__": "a/2", "image": make_image(3, "WEBP"), "caption": ' "x", y\r\nz\0 '},
            {"__key__": "b", "image": make_image(4, "PNG"), "caption": "json:7"},
        ],
    ),
    "boxes": (
        {
            "image": IMAGE,
            "boxes": Array("<f4", (None, 4)),
            "labels": Array("<i8", (None,), optional=True),
        },
        [
            {"__key__": "1", "image": make_image(1), "boxes": np.zeros((0, 4), "<f4")},
            {
                "__key__": "2",
                "image": make_image(2),
                "boxes": np.array([[0.1, 1, 2, 1e30]], "<f4"),
                "labels": np.arange(3),
            },
            {"__key__": "3", "image": make_image(3), "boxes": np.full((1, 4), np.nan, "<f4")},
        ],
    ),
    "audio": (
        {"audio": Audio(), "text": Text(optional=True)},
        [
            {"__key__": "a", "audio": make_audio(1), "text": ""},
            {"__key__": "b", "audio": make_audio(2)},
        ],
    ),
    "video": (
        {"clip": Video(), "audio": Audio(optional=True)},
        [
            {"__key__": "a", "clip": make_video(1), "audio": make_audio(1)},
            {"__key__": "b", "clip": make_video(2)},
        ],
    ),
    "several images": (
        {"image": IMAGE, "views": Images()},
        [
            {
                "__key__": "a",
                "image": make_image(1),
                "views": [make_image(2), make_image(3, "PNG")],
            },
            {"__key__": "b", "image": make_image(1), "views": []},
        ],
    ),
    "numbers": (
        {
            "image": IMAGE,
            "n": Int(optional=True),
            "x": Float(optional=True),
            "yes": Bool(optional=True),
        },
        [
            {
                "__key__": "a",
                "image": make_image(1),
                "n": -(2**63),
                "x": float("nan"),
                "yes": False,
            },
            {"__key__": "b", "image": make_image(1), "n": 0, "x": -0.0, "yes": True},
            {"__key__": "c", "image": make_image(1), "x": float("-inf")},
            {"__key__": "d", "image": make_image(1), "x": 5e-324},
        ],
    ),
    "odd fields": (
        {
            "image": IMAGE,
            "jpg": IMAGE,
            "file_name": Text(),
            "jpg_file_name": Text(),
            "a/b:C": Bytes(),
            'json:"\0,': Int(),
            "A/B:c": Bytes(),
            "": Bytes(),
            "__json__": Int(),
        },
        [
            {
                "__key__": "a",
                "image": make_image(1),
                "jpg": make_image(2),
                "file_name": "../x",
                "jpg_file_name": "/etc",
                "a/b:C": b"1",
                'json:"\0,': 4,
                "A/B:c": b"2",
                "": b"",
                "__json__": 3,
            }
        ],
    ),
}
WITHOUT_MEDIA = {
    "tokens": (
        {"tokens": Array("<u2", (None,)), "doc_ends": Array("<i4", (None,))},
        [
            {"__key__": "0", "tokens": np.arange(5, dtype="<u2"), "doc_ends": np.zeros(0, "<i4")},
            {"__key__": "1", "tokens": np.zeros(0, "<u2"), "doc_ends": np.ones(2, "<i4")},
        ],
    ),
    "arrays": (
        {
            "any": Array(),
            "words": Array("<U3", (None,)),
            "large": Array("<f8", (70, 70)),
            "complex": Array("<c8", (None,)),
            "big": Array(">u8", (None, 2)),
            "one": Array("<i4", ()),
            "half": Array("<f2", (None, None)),
        },
        [
            {
                "__key__": "a",
                "any": np.arange(6, dtype="<i2").reshape(2, 3),
                "words": np.array(["a", "bcd"], "<U3"),
                "large": np.random.default_rng(0).random((70, 70)),
                "complex": np.array([1j], "<c8"),
                "big": np.array([[2**64 - 1, 0]], ">u8"),
                "one": np.array(3, "<i4"),
                "half": np.zeros((0, 2), "<f2"),
            }
        ],
    ),
    "json": (
        {"about": Json(), "more": Json(optional=True)},
        [
            {"__key__": "a", "about": None, "more": [1, 2.5, "x\u2028"]},
            {"__key__": "b", "about": {"__json__": {"about": "1"}}},
        ],
    ),
    "text documents": (
        {"text": Text(), "blob": Bytes(optional=True)},
        [
            {"__key__": "corpus/1", "text": "line\nline\r\n\0 漢 🎉", "blob": b"\0\xff"},
            {"__key__": "corpus/2", "text": ""},
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
def test_every_kind_of_sample_survives(tmp_path: Path, kind: str, case: str) -> None:
    schema, samples = {**CASES, **WITHOUT_MEDIA}[case]
    there_and_back(tmp_path, kind, samples, schema)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(4), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_samples_survive(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    drawn = st.lists(any_samples(), min_size=1, max_size=4, unique_by=lambda s: s["__key__"])
    there_and_back(folder, kind, data.draw(drawn), EVERYTHING)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "wds"))
def test_datasets_of_every_format_are_exported(tmp_path: Path, format: str, kind: str) -> None:
    samples = [everything(n) for n in range(6)]
    write(tmp_path / "a", samples, EVERYTHING, format)
    result = shardkit.export(tmp_path / "a", kind, tmp_path / "out")
    assert (result.samples, result.renamed) == (6, {})
    assert_again(tmp_path, tmp_path / "out", samples, format)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_json_is_kept(tmp_path: Path, kind: str) -> None:
    text = JsonText('{"b" :1.50,\n "a":[ 1e400 ],"ü":"\\u00e4"}')
    schema = {"image": IMAGE, "about": Json()}
    write(tmp_path / "a", [{"__key__": "x", "image": make_image(), "about": text}], schema)
    shardkit.export(tmp_path / "a", kind, tmp_path / "out")
    source: Any = open_sources(tmp_path / "out")[""]
    assert isinstance(source[0]["about"], JsonText)
    assert source[0]["about"] == text


# --- names of files ------------------------------------------------------------------------------

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
def test_no_key_leaves_the_folder_or_replaces_a_file(tmp_path: Path, kind: str) -> None:
    schema = {"image": IMAGE, "label": Int(), "image.jpg": Bytes()}
    samples: list[Sample] = [
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
    assert len([f for f in files if "__shardkit__" not in f]) >= 2 * len(HOSTILE)
    assert sum(result.renamed.values()) >= 35
    reasons = {reason.split()[0] for reason in result.renamed}
    assert reasons == {"with", "too"} | ({"of"} if kind != "folder" else set())
    again = shardkit.export(dataset, kind, tmp_path / "again")
    assert again.renamed == result.renamed
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
def test_any_key_has_a_stem_that_is_safe(key: str, endings: set[str]) -> None:
    stem = file_stem(key, endings)
    assert is_safe(f"{stem}.jpg")
    assert "." not in stem.rpartition("/")[2]
    assert len(stem.encode()) <= 700


def test_usual_keys_are_the_names_of_their_files() -> None:
    for key in ("cat/0001", "v1.0/a b", "grüße/漢", "001.Black_footed_Albatross/x-1", "a~png"):
        assert file_stem(key, {"jpg", "png"}) == key


def test_keys_made_to_meet_are_kept_apart(tmp_path: Path) -> None:
    """Also where somebody has computed what is added to the other one."""
    from shardkit.sample import key_hash

    keys = ["Cat", "cat", f"cat~{key_hash('cat'):016x}", "CAT"]
    samples: list[Sample] = [{"__key__": k, "text": k, "blob": k.encode()} for k in keys]
    schema = {"text": Text(), "blob": Bytes()}
    exported = there_and_back(tmp_path, "files", samples, schema)
    names = {path.name.casefold() for path in exported.iterdir()}
    assert len(names) == 2 * len(keys) + 1


def test_keys_that_come_twice_have_files_of_their_own(tmp_path: Path) -> None:
    samples: list[Sample] = [{"__key__": "a", "blob": bytes([n])} for n in range(3)]
    dataset = shardkit.Dataset.from_sequence(samples, Schema({"blob": Bytes()}))
    shardkit.export(dataset, "files", tmp_path / "out")
    assert shardkit.diff(samples, tmp_path / "out").equal


# --- what others read ----------------------------------------------------------------------------


def classified(folder: Path) -> tuple[Path, list[Sample]]:
    samples: list[Sample] = [
        {"__key__": f"{name}/{n}", "image": make_image(10 * n), "label": label, "score": n / 2}
        for label, name in enumerate(["dog", "cat"])
        for n in range(3)
    ]
    samples[1]["mask"] = make_image(5, "PNG")
    schema = {"image": IMAGE, "label": Int(), "score": Float(), "mask": Image(optional=True)}
    return write(folder / "dataset", samples, schema, classes=["dog", "cat"]), samples


def test_a_folder_has_its_classes_and_a_table(tmp_path: Path) -> None:
    dataset, samples = classified(tmp_path)
    run("export", dataset, "--to", "folder", "-o", tmp_path / "out")
    assert (tmp_path / "out/cat/2.jpg").read_bytes() == samples[5]["image"]
    assert (tmp_path / "out/dog/1.mask.png").read_bytes() == samples[1]["mask"]
    with open(tmp_path / "out/metadata.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {
        "__key__": "dog/1",
        "file_name": "dog/1.jpg",
        "label": "dog",
        "score": "0.5",
        "mask_file_name": "dog/1.mask.png",
    }
    assert_again(tmp_path, tmp_path / "out", samples)
    with shardkit.open(tmp_path / "again-out") as again:
        assert again.classes == ("dog", "cat")


def test_labels_put_images_into_folders(tmp_path: Path) -> None:
    samples: list[Sample] = [
        {"__key__": "1", "image": make_image(1), "label": 0},
        {"__key__": "2", "image": make_image(2), "label": -1},
        {"__key__": "3", "image": make_image(3)},
    ]
    schema = {"image": IMAGE, "label": Int(optional=True)}
    dataset = write(tmp_path / "a", samples, schema, classes=["a/b", "-2"])
    shardkit.export(dataset, "folder", tmp_path / "out")
    names = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.jpg")}
    assert names == {"a%2Fb/1.jpg", "2.jpg", "3.jpg"}
    assert_again(tmp_path, tmp_path / "out", samples)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # datasets leaves metadata.csv open
def test_hugging_face_reads_the_folder(tmp_path: Path) -> None:
    import datasets

    dataset, samples = classified(tmp_path)
    shardkit.export(dataset, "folder", tmp_path / "out")
    found = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "c")
    )
    found = found.cast_column("image", datasets.Image(decode=False))
    assert [row["__key__"] for row in found] == [sample["__key__"] for sample in samples]
    assert [row["label"] for row in found] == ["dog"] * 3 + ["cat"] * 3
    assert isinstance(found.features["mask"], datasets.Image)
    for row, sample in zip(found, samples, strict=True):
        assert Path(row["image"]["path"]).read_bytes() == sample["image"]
    gc.collect()  # here, where the warning is ignored


def test_our_own_folder_source_reads_it_without_what_we_know(tmp_path: Path) -> None:
    dataset, samples = classified(tmp_path)
    shardkit.export(dataset, "folder", tmp_path / "out")
    shutil.rmtree(tmp_path / "out/__shardkit__")
    shardkit.convert(
        tmp_path / "out", "wds", tmp_path / "again", label_column="label", drop=["__key__"]
    )
    with shardkit.open(tmp_path / "again") as again:
        assert again.classes == ("cat", "dog")
        assert {s["__key__"] for s in again} >= {s["__key__"] for s in samples}


def test_json_lines_are_plain(tmp_path: Path) -> None:
    schema = {"text": Text(), "tokens": Array("<i4", (None,)), "x": Json()}
    samples: list[Sample] = [
        {"__key__": "a", "text": "ä\n", "tokens": np.arange(3, dtype="<i4"), "x": {"y": [None]}}
    ]
    exported = there_and_back(tmp_path, "jsonl", samples, schema)
    (line,) = (exported / "data.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line) == {
        "__key__": "a",
        "text": "ä\n",
        "tokens": [0, 1, 2],
        "x": {"y": [None]},
    }


def test_tokens_keep_their_tokenizer(tmp_path: Path) -> None:
    from tests.codecs import tokenizer_zoo

    (tmp_path / "a.txt").write_text("one two three\n" * 20, "utf-8")
    path = tokenizer_zoo.write_json(tmp_path / "tok", "gpt2")
    shardkit.convert(
        tmp_path / "a.txt",
        "wds",
        tmp_path / "a",
        text=shardkit.TextOptions(tokenizer=path),
        workers=0,
    )
    shardkit.export(tmp_path / "a", "jsonl", tmp_path / "out")
    shardkit.convert(tmp_path / "out", "wds", tmp_path / "b", workers=0)
    with shardkit.open(tmp_path / "a") as a, shardkit.open(tmp_path / "b") as b:
        assert a.tokenizer() == b.tokenizer()
        assert a.tokenizer()[0]


def test_splits_have_folders_of_their_own(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("val", 2)):
        (tmp_path / "in" / split).mkdir(parents=True)
        for n in range(count):
            (tmp_path / "in" / split / f"{n}.jpg").write_bytes(make_image(n))
    shardkit.convert(tmp_path / "in", "wds", tmp_path / "a", workers=0)
    shardkit.export(tmp_path / "a", "folder", tmp_path / "out")
    assert (tmp_path / "out/val/metadata.csv").is_file()
    assert shardkit.diff(tmp_path / "a", tmp_path / "out").equal
    shardkit.convert(tmp_path / "out", "wds", tmp_path / "b", workers=0)
    assert {p.name for p in (tmp_path / "b").iterdir()} == {"__shardkit__", "train", "val"}
    shutil.copytree(tmp_path / "in/val", tmp_path / "out/test")
    result = shardkit.convert(tmp_path / "out", "wds", tmp_path / "c", workers=0)
    assert result.ignored == {"file or folder beside those of splits": 1}


def test_a_view_is_exported(tmp_path: Path) -> None:
    dataset, samples = classified(tmp_path)
    with shardkit.open(dataset) as whole:
        shardkit.export(whole.select([4, 1]), "files", tmp_path / "out")
    assert_again(tmp_path, tmp_path / "out", [samples[4], samples[1]])


# --- what was changed, or is damaged -------------------------------------------------------------


def edited(folder: Path, old: str, new: str) -> None:
    table = folder / "metadata.csv"
    table.write_text(table.read_text("utf-8").replace(old, new, 1), "utf-8")


def test_an_export_may_be_edited(tmp_path: Path) -> None:
    dataset, _ = classified(tmp_path)
    out = tmp_path / "out"
    shardkit.export(dataset, "folder", out)
    edited(out, "dog/0,dog/0.jpg,dog,0.0", "new,dog/0.jpg,cat,7")
    shutil.copy(out / "cat/0.jpg", out / "cat/more.jpg")
    lines = (out / "metadata.csv").read_text("utf-8").splitlines(keepends=True)
    again = lines[1].replace("new,", "twice,")  # two rows name one file
    (out / "metadata.csv").write_text("".join([*lines[:-1], again]), "utf-8")
    result = shardkit.convert(out, "wds", tmp_path / "b", workers=0)
    assert result.samples == 6
    assert result.ignored == {"file that metadata.csv does not name": 2}
    with shardkit.open(tmp_path / "b") as found:
        assert (found[0]["__key__"], found[0]["label"], found[0]["score"]) == ("new", 1, 7.0)


@pytest.mark.parametrize("kind", ["folder", "jsonl"])
def test_columns_that_are_added_are_counted(tmp_path: Path, kind: str) -> None:
    dataset, samples = classified(tmp_path)
    out = tmp_path / "out"
    shardkit.export(dataset, kind, out)
    table = out / {"folder": "metadata.csv", "jsonl": "data.jsonl"}[kind]
    head, *rows = table.read_text("utf-8").splitlines()
    if kind == "folder":
        table.write_text("\n".join([f"{head},more", *(f"{row},x" for row in rows)]), "utf-8")
    else:
        table.write_text("\n".join(r[:-1] + ',"more":1}' for r in (head, *rows)), "utf-8")
    result = shardkit.convert(out, "wds", tmp_path / "b", workers=0)
    assert result.ignored == {"value in a column that is not a field of the export": len(samples)}


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
def test_what_does_not_fit_is_an_error_with_its_place(
    tmp_path: Path, old: str, new: str, error: type[ShardkitError], words: str
) -> None:
    dataset, _ = classified(tmp_path)
    shardkit.export(dataset, "folder", tmp_path / "out")
    edited(tmp_path / "out", old, new)
    with pytest.raises(error) as found:
        shardkit.convert(tmp_path / "out", "wds", tmp_path / "b", workers=0)
    assert words in str(found.value)
    assert str(tmp_path / "out") in str(found.value)


def test_damaged_tables_give_errors_of_ours(tmp_path: Path, large: bool) -> None:
    """X1: bytes changed, removed and added at random, in each kind of table."""
    schema, samples = CASES["several images"]
    schema = {**schema, **CASES["numbers"][0], "about": Json(), "blob": Bytes()}
    more = {"x": 0.5, "n": 3, "about": {"a": [1.50]}, "blob": b"x"}
    dataset = write(tmp_path / "a", [{**sample, **more} for sample in samples], schema)
    generator, failed, read = np.random.default_rng(7), 0, 0
    for kind, name in (("folder", "metadata.csv"), ("jsonl", "data.jsonl")):
        shardkit.export(dataset, kind, tmp_path / kind)
        for path in (tmp_path / kind / name, tmp_path / kind / "__shardkit__/exported.json"):
            whole = path.read_bytes()
            for _ in range(300 if large else 40):
                damaged = bytearray(whole)
                for at in generator.integers(0, len(whole), generator.integers(1, 4)).tolist():
                    more_bytes = generator.choice([b"", b'"', b"[", b"9", b"\xff", b"\n", b"{}"])
                    damaged[at : at + int(generator.integers(0, 3))] = bytes(more_bytes)
                path.write_bytes(damaged)
                try:
                    source: Any = open_sources(tmp_path / kind)[""]
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


def test_rows_have_a_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X4: a quote that is missing does not make a row of all that follows."""
    dataset, _ = classified(tmp_path)
    shardkit.export(dataset, "folder", tmp_path / "out")
    monkeypatch.setattr(exported_source, "MAX_ROW", 100)
    assert len(open_sources(tmp_path / "out")[""]) == 6
    edited(tmp_path / "out", "dog/0.jpg", '"dog/0.jpg')
    with pytest.raises(SourceError, match="a closing quote is missing"):
        open_sources(tmp_path / "out")
    long = write(tmp_path / "l", [{"__key__": "a", "text": "x" * 101}], {"text": Text()})
    with pytest.raises(SampleError, match="too long for a row") as refused:
        shardkit.export(long, "jsonl", tmp_path / "lines")
    assert "--to files" in str(refused.value)
    shardkit.export(long, "files", tmp_path / "files")


def test_long_cells_are_read_by_other_processes(tmp_path: Path) -> None:
    samples: list[Sample] = [
        {"__key__": f"{n}", "image": make_image(n), "text": "x" * 300_000} for n in range(8)
    ]
    dataset = write(tmp_path / "a", samples, {"image": IMAGE, "text": Text()})
    shardkit.export(dataset, "folder", tmp_path / "out")
    shardkit.convert(tmp_path / "out", "wds", tmp_path / "b", workers=1, shard_size="500kB")
    assert shardkit.diff(dataset, tmp_path / "b").equal


def test_a_file_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, _ = classified(tmp_path)
    shardkit.export(dataset, "folder", tmp_path / "out")
    source: Any = open_sources(tmp_path / "out")[""]
    os.utime(tmp_path / "out/dog/1.mask.png", (1, 1))
    assert source[0]
    with pytest.raises(SampleError, match="changed while"):
        source[1]
    os.utime(tmp_path / "out/metadata.csv", (1, 1))
    with pytest.raises(SampleError, match="changed while"):
        source[0]


def test_a_damaged_description_is_an_error(tmp_path: Path) -> None:
    dataset, _ = classified(tmp_path)
    out = tmp_path / "out"
    shardkit.export(dataset, "folder", out)
    path = out / "__shardkit__/exported.json"
    about = json.loads(path.read_text("utf-8"))
    for name, value in (
        *(("table", "../x.csv"), ("table", 7), ("schema", {"a": {"type": "No"}}), ("version", 2)),
        *(("columns", []), ("splits", ["../x"]), ("tokenizer", {"file": "../x"})),
    ):
        path.write_text(json.dumps({**about, name: value}), "utf-8")
        with pytest.raises(ShardkitError):
            shardkit.convert(out, "wds", tmp_path / "b", workers=0)
        assert not (tmp_path / "b").exists()


# --- outputs -------------------------------------------------------------------------------------


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    text = write(tmp_path / "t", [{"__key__": "a", "text": "x"}], {"text": Text()})
    with pytest.raises(UsageError, match="no images, audio or video"):
        shardkit.export(text, "folder", tmp_path / "out")
    with pytest.raises(UsageError, match="did you mean files"):
        shardkit.export(text, "file", tmp_path / "out")
    with pytest.raises(UsageError, match="written to this machine"):
        shardkit.export(text, "jsonl", "s3://bucket/out")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n', "utf-8")
    with pytest.raises(UsageError, match="text files are not a dataset"):
        shardkit.export(tmp_path / "x.jsonl", "jsonl", tmp_path / "out")
    with (
        shardkit.open(text) as opened,
        pytest.raises(OutputError, match="must not contain each other"),
    ):
        shardkit.export(opened, "jsonl", tmp_path / "t/out")
    some = write(tmp_path / "s", [{"__key__": "a"}], {"image": Image(optional=True)})
    with pytest.raises(SampleError, match="no file for its row of the table"):
        shardkit.export(some, "folder", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"t", "x.jsonl", "s"}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    dataset, _ = classified(tmp_path)
    (tmp_path / "out").mkdir()
    shardkit.export(dataset, "files", tmp_path / "out")  # an empty folder may be there
    before = files_of(tmp_path)
    for out in ("out", "dataset", "dataset/inside", "missing/out"):
        with pytest.raises(OutputError):
            shardkit.export(dataset, "files", tmp_path / out)
        said = run("export", dataset, "--to", "files", "-o", tmp_path / out, check=2).stderr
        assert "--overwrite" not in said  # which export does not have
    assert files_of(tmp_path) == before


def test_an_unfinished_conversion_is_not_removed(tmp_path: Path) -> None:
    samples: list[Sample] = [{"__key__": f"{n}", "blob": bytes(300_000)} for n in range(20)]
    dataset = write(tmp_path / "a", samples, {"blob": Bytes()})
    shardkit.convert(dataset, "wds", tmp_path / "out", part="1/2", shard_size="1MB", workers=0)
    assert not (tmp_path / "out").exists()
    before = files_of(tmp_path)
    with pytest.raises(OutputError, match="unfinished conversion"):
        shardkit.export(dataset, "files", tmp_path / "out")
    assert files_of(tmp_path) == before


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Files of later samples are being written in threads then."""
    samples = [{"__key__": f"d{n}/k", "data": bytes(500_000)} for n in range(40)]
    shardkit.convert(samples, "arrow", tmp_path / "in", workers=0)

    def stop(progress: shardkit.Progress) -> None:
        raise ValueError("enough")

    for _ in range(3):
        with pytest.raises(ValueError, match="enough"):
            shardkit.export(tmp_path / "in", "files", tmp_path / "out", progress=stop)
        assert not list(tmp_path.glob("out*"))


def test_numbers_of_no_class_do_not_become_classes_that_are_called_so(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{n}", "image": make_image(n), "label": label}
        for n, label in enumerate((0, 1, -1))
    ]
    classes = ["a", "5"]
    dataset = shardkit.convert(samples, "hf", tmp_path / "in", classes=classes, workers=0).out
    shardkit.export(dataset, "folder", tmp_path / "out")
    with open(tmp_path / "out/metadata.csv", newline="", encoding="utf-8") as file:
        assert [row["label"] for row in csv.DictReader(file)] == ["0", "1", "-1"]
    shardkit.convert(tmp_path / "out", "hf", tmp_path / "again", workers=0)
    with shardkit.open(tmp_path / "again") as again:
        assert again.classes == ("a", "5")
        assert list(again.column("label")) == [0, 1, -1]


@pytest.mark.parametrize("change", ["create", "write", "rename", "sync_all", "make_folder"])
def test_an_export_that_dies_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    dataset, _ = classified(tmp_path)
    shardkit.export(dataset, "folder", tmp_path / "expected")
    real, calls = getattr(storage, change), 0

    def counting(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args)

    monkeypatch.setattr(storage, change, counting)
    shardkit.export(dataset, "folder", tmp_path / "counted")
    assert calls
    end = 0 if change == "make_folder" else calls - 1  # threads may make a folder several times
    for last in {0, calls // 4, calls // 2, end}:
        left = last

        def dying(*args: Any) -> Any:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            return real(*args)

        monkeypatch.setattr(storage, change, dying)
        with pytest.raises(KeyboardInterrupt):
            shardkit.export(dataset, "folder", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    monkeypatch.setattr(storage, change, real)
    shardkit.export(dataset, "folder", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.large
def test_an_export_that_is_killed_begins_again(tmp_path: Path) -> None:
    samples: list[Sample] = [{"__key__": f"k{n}", "blob": b"x"} for n in range(200)]
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


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, _ = classified(tmp_path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "sync_all", interrupted)
    words = ["shardkit", "export", str(dataset), "--to", "files", "-o", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    assert cli._run() == 130
    assert "interrupted; the same command run again starts over" in capsys.readouterr().err


def test_the_command_says_what_it_renamed(tmp_path: Path) -> None:
    samples: list[Sample] = [{"__key__": key, "x": 1} for key in ("a.b", "a_b", "A_B")]
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


@pytest.mark.parametrize("to", ["folder", "jsonl", "files"])
def test_keys_that_look_like_values_come_back(tmp_path: Path, to: str) -> None:
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
