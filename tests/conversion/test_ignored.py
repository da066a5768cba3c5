"""What a conversion passes over is named with its count: in result, manifest and summary (C3)."""

import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import datasets
import lmdb
import msgpack
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from pyarrow import parquet

import shardkit
from shardkit.cli.progress import show_result
from shardkit.cli.tables import tally
from shardkit.errors import DamagedError, FormatError, SourceError
from shardkit.inspection.inspect import inspect
from shardkit.metadata.manifest import load
from shardkit.options import ImageOptions, TextOptions
from shardkit.schema import Array, Int, Text
from shardkit.testing import make_audio, make_image
from tests.conversion.test_keys import write_tar
from tests.sources import real
from tests.sources.test_text import put, put_lines


def ignored(source, out, **options):
    """What the manifest says; result and manifest agree."""
    result = shardkit.convert(source, "arrow", out, workers=0, **options)
    found = load(out).ignored
    assert result.ignored == found == result.splits[""].ignored
    assert result.to_dict()["ignored"] == found
    return found


TEXT = shardkit.TextOptions(field="text")


def test_fields_of_json_lines_and_columns_of_tables(tmp_path):
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": None, "id": "x"}, {"text": "c"}]
    lines = put_lines(tmp_path / "a.jsonl", rows)
    assert ignored(lines, tmp_path / "one", text=TEXT) == {
        "values of 'id'": 1,
        "values of 'label'": 1,
    }
    table = put(tmp_path / "b.csv", "text,label,note\na,1,\nb,2,x\n")
    counted = {"values of 'label'": 2, "values of 'note'": 1}
    assert ignored(table, tmp_path / "two", text=TEXT) == counted
    assert ignored(lines, tmp_path / "three") == ignored(table, tmp_path / "four") == {}


def test_fields_of_a_dataset_beside_the_text(gpt2, tmp_path):
    samples = [{"text": f"some words {n}", "label": n} for n in range(5)]
    del samples[2]["label"]
    schema = {"text": Text(), "label": Int(optional=True)}
    counted = {"values of 'label'": 4}
    assert ignored(samples, tmp_path / "text", schema=schema, text=TEXT) == counted
    for name, options in (("documents", {}), ("blocks", {"seq_len": 4})):
        text = shardkit.TextOptions(tokenizer=gpt2, **options)
        assert ignored(samples, tmp_path / name, schema=schema, text=text) == counted


def with_length(sample):
    return {**sample, "length": len(sample["text"])}


def test_fields_that_a_transform_adds_to_text_are_stored_but_with_tokens(gpt2, tmp_path):
    source = [{"text": "some words", "label": 1}] * 3
    for name, text, counted in (
        ("text", {"field": "text"}, {"values of 'label'": 3}),
        ("tokens", {"tokenizer": gpt2}, {"values of 'label'": 3, "values of 'length'": 3}),
    ):
        options = {"text": shardkit.TextOptions(**text), "transform": with_length}
        assert ignored(source, tmp_path / name, **options) == counted
    assert list(load(tmp_path / "text").schema) == ["text", "length"]


def test_each_split_has_its_own(tmp_path):
    rows = [{"text": f"{n}", "label": n} for n in range(40)]
    source = put_lines(tmp_path / "in/a.jsonl", rows)
    put(tmp_path / "in/b.xyz", "?")
    split = {"split": "train=0.7,val=0.3", "text": TEXT}
    result = shardkit.convert(source.parent, "arrow", tmp_path / "out", workers=0, **split)
    train, val = (load(tmp_path / "out" / name) for name in ("train", "val"))
    assert train.ignored == {".xyz file": 1, "values of 'label'": train.samples}
    assert val.ignored == {"values of 'label'": val.samples}
    assert result.ignored == {".xyz file": 1, "values of 'label'": 40}


def test_a_manifest_names_no_more_than_a_hundred_kinds(tmp_path):
    rows = [{"text": "a", f"id{n}": 1, "often": 2} for n in range(300)]
    found = ignored(put_lines(tmp_path / "a.jsonl", rows), tmp_path / "out", text=TEXT)
    assert found.pop("values of 'often'") == 300
    assert found.pop("of 201 other kinds") == 201
    assert len(found) == 99
    assert set(found.values()) == {1}


def test_what_others_put_into_our_lmdb_is_read_counted_or_refused(tmp_path):
    shardkit.convert([{"n": n} for n in range(60)], "lmdb", tmp_path / "in.lmdb", workers=0)

    def changed(name, entries):
        """The database without its manifest, with other entries; those without value are gone."""
        bare = shutil.copytree(tmp_path / "in.lmdb", tmp_path / f"{name}.lmdb")
        with lmdb.open(str(bare), map_size=1 << 24) as base, base.begin(write=True) as transaction:
            for key, value in entries.items():
                assert transaction.put(key, value) if value else transaction.delete(key)
        return bare

    sample = {"__key__": "new", "n": 60}
    source = changed("appended", {b"%012d" % 60: msgpack.packb(sample)})
    assert ignored(source, tmp_path / "out") == {}
    assert shardkit.open(tmp_path / "out")[60] == sample
    source = changed("counts", {b"__len__": b"60", b"num-samples": b"60"})
    found = {"entry '__len__'": 1, "entry 'num-samples'": 1}
    assert ignored(source, tmp_path / "counted") == inspect(source)["ignored"] == found
    assert load(tmp_path / "counted").samples == 60
    with pytest.raises(FormatError, match="are not samples and would be ignored") as error:
        shardkit.open(changed("others", {b"cat": b"x", b"000": b"y"}))
    assert error.value.found == "2 others, such as b'000'"
    with pytest.raises(DamagedError, match="missing from the LMDB"):
        shardkit.open(changed("deleted", {b"%012d" % 59: b""}))


def test_what_is_no_sample_in_archives_of_others(tmp_path):
    path = packed(tmp_path / "a.tar", "a.txt", "README", "b.txt", "b.__bad__")
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("c.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        for member in (link, folder):
            tar.addfile(member)
    assert ignored(path, tmp_path / "out") == {
        "TAR member that is a link or a device": 1,
        "TAR member without an extension": 1,
        "sample marked as __bad__": 1,
    }


def test_a_summary_has_singular_and_plural():
    counts = {"values of 'a'": 1, "hidden": 1, "values of 'b'": 11}
    assert tally(counts) == "1 value of 'a', 1 hidden, 11 values of 'b'"


def test_indexes_and_locks_of_shards_are_no_other_files(tmp_path):
    schema = {"tokens": Array("uint16", (None,))}
    samples = [{"tokens": np.arange(3, dtype=np.uint16)}]
    for to in ("wds", "megatron", "lmdb"):
        out = tmp_path / to
        shardkit.convert(samples, to, out, schema=schema, workers=0)
        shutil.rmtree(out / "__shardkit__")
        put(out / "notes.xyz", "?")
        folder = next(out.rglob("*.mdb")).parent if to == "lmdb" else out
        found = {} if to == "lmdb" else {".xyz file": 1}
        assert ignored(folder, tmp_path / f"{to}-out") == found


JPEG = make_image()


def tree(root, *names):
    """A folder of files: images by their names, and others."""
    for name in names:
        put(root / name, JPEG if name.endswith((".jpg", ".png")) else "x")
    return root


def packed(path, *names):
    images = (".jpg", ".png", ".xyz")
    return write_tar(path, [(name, JPEG if name.endswith(images) else b"x") for name in names])


def saved(root, **splits):
    """What Hugging Face datasets saves: of several splits, a dictionary."""
    every = {name: datasets.Dataset.from_dict({"n": values}) for name, values in splits.items()}
    datasets.disable_progress_bars()
    both = datasets.DatasetDict(every)
    (both if len(every) > 1 else next(iter(every.values()))).save_to_disk(root)
    return root


def table_of(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)
    return path


def without_label(sample):
    return {name: sample[name] for name in ("__key__", "image")}


def once(*names):
    """Each name with a count of 1: suffixes of files, and what is no suffix."""
    return {f"{name} file" if name[0] == "." else name: 1 for name in names}


def left_out(*names):
    return {f"fields dropped as asked: {', '.join(map(repr, names))}": len(names)}


def images_and_others(root):
    return tree(
        root, "cat/1.jpg", "dog/1.jpg", ".DS_Store", "cat/.2.jpg", "cat/2.txt", "cat/notes.pdf",
        "cat/1.heic", "README.md", "cat/list", "cat/9.npy", "corpus.jsonl",
    )  # fmt: skip


BARE = "file without suffix"
OTHER_FILES = {**once(".heic", ".jsonl", ".md", ".npy", ".pdf", ".txt", BARE), "hidden": 2}


def rows_and_others(root):
    rows = '{"text": "a", "n": 1, "__key__": "k"}\n\n{"text": "b", "n": null, "m": [1]}\n'
    put(root / "a.jsonl", rows)
    put(root / "none.jsonl", "")
    return tree(root, "b.txt", "README.md", "LICENSE", "c.html", ".h", "d.svg")


BESIDE_ROWS = once(".html", ".md", ".svg", ".txt", "empty file", BARE, "hidden")


def metadata(root):
    rows = "file_name,n,m\ncat/1.jpg,1,x\n"
    put(root / "metadata.csv", rows)
    return tree(root, "cat/1.jpg", "cat/2.jpg")


def repeated(root):
    """Shards of ours whose folder got other files."""
    shardkit.convert([{"n": 1, "text": "a"}, {"n": 2, "text": "b"}], "wds", root, workers=0)
    return tree(root, "notes.txt", ".h", "more/1.jpg", "more.tar")


def of_splits(root):
    source = tree(root.with_name("in"), "train/a/1.jpg", "val/a/1.jpg")
    shardkit.convert(source, "wds", root, workers=0)
    return tree(root, "notes.txt", "val/notes.txt", "more/1.jpg")


def tokens_of_others(root):
    samples = [{"tokens": np.arange(3, dtype=np.uint16)}]
    shardkit.convert(samples, "megatron", root, workers=0)
    shutil.rmtree(root / "__shardkit__")
    return tree(root, "vocab.json", "merges.txt")


def arrays(root):
    root.mkdir()
    names = np.array(["a", "b"])
    np.savez(root / "a.npz", images=np.zeros((4, 3)), mean=np.zeros(3), names=names)
    return root / "a.npz"


def rows_of_arrays(root):
    root.mkdir()
    for number in range(3):
        np.save(root / f"{number}.npy", np.zeros(3))
    return tree(root, "notes.pdf", "notes.txt", ".h")


def sounds(root):
    for number in range(12):
        put(root / f"{('yes', 'no')[number % 2]}/{number}.wav", make_audio(number))
    return root


@pytest.mark.parametrize("to", ["wds", "beton"])
def test_frames_that_are_lost_are_named(to, tmp_path):
    """By a step, and by a format that has no such images."""
    frames = [PIL.Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    (tmp_path / "in").mkdir()
    frames[0].save(tmp_path / "in/a.gif", save_all=True, append_images=frames[1:])
    options = {"image": shardkit.ImageOptions(resize=8)} if to == "wds" else {}
    result = shardkit.convert(tmp_path / "in", to, tmp_path / "out", workers=0, **options)
    split = result.splits[""]
    expected = "animated (first frame)" if to == "wds" else "gif (first frame)"
    assert [*split.reasons, *split.encoded] == [expected]


KEEP = {"text": shardkit.TextOptions(keep_fields=True)}
NO_ROW = "images without a row of metadata"
# What is converted (names of files, or what makes them), how, and what of it is named.
CASES = {
    "a folder of images": (images_and_others, {}, OTHER_FILES),
    "some fields": (
        images_and_others, {"fields": ["image"]}, {**OTHER_FILES, **left_out("label")}
    ),
    "a transform": (
        images_and_others, {"transform": without_label}, {**OTHER_FILES, "values of 'label'": 2}
    ),
    "classes that are listed": (
        "cat/1.jpg none/notes.txt", {"classes": ["cat"]}, once(".txt", "folder without images")
    ),
    "metadata": (metadata, {}, once(NO_ROW)),
    "split folders": (
        "train/a/1.jpg val/a/1.jpg val/a/2.json x.pdf val/y", {}, once(".json", ".pdf", BARE)
    ),
    "split folders without classes": (
        "train/a.jpg val/a.jpg train.csv README.md .DS_Store val/list.csv",
        {}, {".csv file": 2, **once(".md", "hidden")},
    ),
    "documents": (
        "a.txt b/c.txt README.md LICENSE d.pdf b/.h", {}, once(".md", ".pdf", BARE, "hidden")
    ),
    "rows": (
        rows_and_others, {"text": TEXT},
        {**BESIDE_ROWS, **once("values of 'n'", "values of 'm'", "values of '__key__'")},
    ),
    "some rows": (rows_and_others, {"limit": 1, "text": TEXT}, {
        **BESIDE_ROWS, **once("values of 'n'", "values of '__key__'")
    }),
    "rows with all fields": (rows_and_others, KEEP, {**BESIDE_ROWS, **once("values of '__key__'")}),
    "rows with some fields": (
        rows_and_others, {"fields": ["text", "m"]}, {**BESIDE_ROWS, **left_out("n", "__key__")}
    ),
    "a TAR of others": (
        lambda root: packed(root.with_name("a.tar"), "1.jpg", "1.png", "1.xyz", "README", ".x.jpg"),
        {"drop": ["xyz"]}, {"TAR member without an extension": 2, **left_out("xyz")},
    ),
    "a folder of Parquet": (
        lambda root: tree(
            table_of(root / "a.parquet", n=[1], d=[2]).parent, "_SUCCESS", "a.crc", ".h", "b.md"
        ),
        {"fields": ["n"]}, {**once(".crc", ".md", BARE, "hidden"), **left_out("d")},
    ),
    "a column of a type that no field has": (
        lambda root: table_of(root / "a.parquet", n=[1], __url__=["x"]),
        {"drop": ["__url__"]}, left_out("__url__"),
    ),
    "a dataset of datasets": (
        lambda root: tree(saved(root, train=[1, 2]), "notes.txt", "cache-0123.arrow"),
        {}, once(".arrow", ".txt"),
    ),
    "a dictionary of datasets": (
        lambda root: tree(saved(root, train=[1], test=[2]), "notes.txt", "extra/state.json"),
        {}, once(".txt", "folder"),
    ),
    "a dataset of ours": (repeated, {}, once(".tar", ".txt", "folder", "hidden")),
    "splits of ours": (of_splits, {}, {".txt file": 2, "folder": 1}),
    "Megatron's files": (tokens_of_others, {}, once(".json", ".txt")),
    "samples": (lambda root: [{"n": 1, "x": object()}], {"drop": ["x"]}, left_out("x")),
    "arrays": (
        arrays, {}, once("array 'mean' of another length", "array 'names' of another length")
    ),
    "files of arrays": (rows_of_arrays, {}, once(".pdf", ".txt", "hidden")),
    "CIFAR": (lambda root: tree(real.cifar10_binary(root), "notes.dat"), {}, once(".dat", ".html")),
    "audio": (
        lambda root: tree(sounds(root), "yes/0.lab", "cover.jpg", "README.md"),
        {}, once(".jpg", ".lab", ".md"),
    ),
    "several sources": (
        lambda root: [images_and_others(root), metadata(root.with_name("two"))],
        {"drop": ["label"]}, {**OTHER_FILES, **once(NO_ROW), **left_out("label")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_c3_all_that_is_passed_over_is_named_everywhere(case, tmp_path, capsys):
    """In the result, in JSON, in the manifest and in the summary."""
    make, options, expected = CASES[case]
    root = tmp_path / "source"
    source = tree(root, *make.split()) if isinstance(make, str) else make(root)
    result = shardkit.convert(source, "arrow", tmp_path / "out", workers=0, **options)
    assert result.ignored == expected
    assert json.loads(json.dumps(result.to_dict()))["ignored"] == expected
    manifests_of = [load(Path(split.path)).ignored for split in result.splits.values()]
    assert sum(map(Counter, manifests_of), Counter()) == expected
    show_result(result)
    shown = " ".join(capsys.readouterr().out.split())
    for what, count in expected.items():
        assert tally({what: count}) in shown
    if case != "samples":  # of which nothing tells whether they are the same
        again = shardkit.convert(source, "arrow", tmp_path / "out", workers=0, **options)
        assert (again.already_complete, again.ignored) == (True, expected)


def test_a_run_that_drops_every_sample_fails(tmp_path, images):
    html = tmp_path / "html/cat"
    html.mkdir(parents=True)
    for n in range(3):
        (html / f"{n}.jpg").write_bytes(b"<html>403 Forbidden</html>")
    for name, source, options, found in (
        (
            "skip",
            html.parent,
            {"on_error": "skip"},
            "3 bad, the first, cat/0.jpg: the value is",
        ),
        ("size", images, {"image": ImageOptions(min_size=10_000)}, "12 smaller than 10000"),
    ):
        out = tmp_path / name
        with pytest.raises(SourceError, match="no sample of the source is left") as caught:
            shardkit.convert(source, to="wds", out=out, workers=0, **options)
        assert str(caught.value.found).startswith(found)
        assert not out.exists()


def test_a_run_whose_documents_fill_no_block_fails(tmp_path, gpt2):
    put(tmp_path / "a.txt", "one two\nthree\n")
    text = TextOptions(tokenizer=gpt2, seq_len=1000, remainder="drop")
    with pytest.raises(SourceError, match="no sample of the source is left") as caught:
        shardkit.convert(tmp_path / "a.txt", to="arrow", out=tmp_path / "o", workers=0, text=text)
    assert "tokens that fill no block" in str(caught.value.found)


@pytest.mark.parametrize("name", ["metadata.jsonl", "a.jsonl"])
def test_labels_of_several_types_name_the_rare_ones(tmp_path, name):
    labels = ["cat", "cat", 7, "dog"]
    rows = [{"file_name": f"{n}.png", "text": "x", "label": v} for n, v in enumerate(labels)]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for n in range(4 if name == "metadata.jsonl" else 0):
        (folder / f"{n}.png").write_bytes(make_image(n, "PNG"))
    for on_error in ("fail", "skip"):
        with pytest.raises(SourceError, match="of several types") as caught:
            shardkit.convert(
                folder, to="wds", out=tmp_path / "o", label_column="label", on_error=on_error
            )
        where = "line 3 of the metadata" if name == "metadata.jsonl" else "document 3"
        assert str(caught.value.found).startswith(f"int in 1, first in {where}")
