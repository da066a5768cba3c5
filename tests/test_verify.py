"""`shardkit verify`: what it finds, what it calls it, and what it leaves alone."""

import io
import json
import math
import random
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import xxhash

import shardkit
from shardkit.codecs.damage import damage
from shardkit.errors import DamagedError, FormatError, SampleError, UsageError
from shardkit.formats import FORMATS, get_format
from shardkit.inspection.inspect import inspect
from shardkit.metadata import manifest as manifests
from shardkit.sample import JsonText
from shardkit.sources.image_folder import ImageFolder
from shardkit.storage import checksums, fs
from shardkit.storage.checksums import CHECKSUM, PIECE, WHOLE, count
from shardkit.testing import EVERYTHING, everything, make_image
from shardkit.verification.matching import difference
from tests.conftest import IMAGE_FORMATS, few, write_images
from tests.conversion.text_corpora import few_words
from tests.test_cli import run

EACH_FORMAT = pytest.mark.parametrize("format", few(IMAGE_FORMATS, "beton", "lmdb", "wds"))
INCOMPLETE = "the dataset is incomplete: its manifest is missing"


def make(source: Any, format: str, out: Path, **options: Any) -> Path:
    options = {"shard_samples": 5, "workers": 0, **options}
    shardkit.convert(source, format, out, **options)
    return out


@pytest.fixture
def out(images, tmp_path):
    """The images, as three TARs."""
    return make(images, "wds", tmp_path / "out")


def shard_paths(dataset: Path) -> list[Path]:
    manifest = manifests.load(dataset)
    return [
        manifests.folder_of(manifests.manifest_path(dataset)) / s.file.name for s in manifest.shards
    ]


def rewrite(dataset: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, with a checksum of its own that holds, as if it had been written so."""
    path = manifests.manifest_path(dataset)
    data = json.loads(path.read_bytes())
    change(data)
    del data[manifests._OWN_CHECKSUM]
    manifests._write(path, data)


def _entries(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What a manifest says of each file."""
    return [f for s in data["shards"] for f in (s["file"], *s["beside"])] + data["files"]


def accept_files(dataset: Path) -> None:
    """Give a manifest the checksums of the files as they are now."""

    def change(data: dict[str, Any]) -> None:
        for entry in _entries(data):
            path = dataset / entry["name"]
            entry.update(bytes=path.stat().st_size, checksum=fs.checksum(path))

    rewrite(dataset, change)


def as_earlier_versions_wrote_it(dataset: Path) -> None:
    """With checksums of whole files, and without a list of pieces."""

    def change(data: dict[str, Any]) -> None:
        data["checksum"] = WHOLE
        for listed in [f for f in data["files"] if f["name"].endswith(manifests.PIECES)]:
            data["files"].remove(listed)
            (dataset / listed["name"]).unlink()
        for file in _entries(data):
            file["checksum"] = xxhash.xxh3_128_hexdigest((dataset / file["name"]).read_bytes())

    rewrite(dataset, change)


def flip(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path.write_bytes(data)


def whats(dataset: Path, **options: Any) -> list[str]:
    return [problem.what for problem in shardkit.verify(dataset, **options).problems]


def paths_of(report: shardkit.VerifyReport) -> list[Path]:
    return [problem.where["path"] for problem in report.problems]


def photo(number: int, format: str = "JPEG") -> bytes:
    """An image whose entropy-coded data are long enough to be cut."""
    noise = np.random.default_rng(number).integers(0, 255, (40, 60, 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(noise).save(file, format)
    return file.getvalue()


def find_flipped_bits(dataset: Path, paths: list[Path], times: int) -> None:
    """Each by itself, in a manifest's last byte excepted: that is the end of the line."""
    chance = random.Random(0)
    for _ in range(times):
        path = chance.choice(paths)
        whole = path.read_bytes()
        bit = chance.randrange(8 * (len(whole) - (path.suffix == ".json")))
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        report = shardkit.verify(dataset)
        assert paths_of(report) == [path], (path, bit)
        assert isinstance(report.problems[0], DamagedError)
        path.write_bytes(whole)


@EACH_FORMAT
def test_a_sound_dataset_is_sound_and_every_flipped_bit_is_found(images, tmp_path, format, large):
    """Images that a format encodes anew are equal, and counted."""
    value = photo(4, "PNG")
    (images / "class0/004.png").write_bytes(value)
    out = make(images, format, tmp_path / "out")
    report = shardkit.verify(out, against=images, decode=True)
    assert (report.sound, report.problems) == (True, [])
    assert (report.format, report.samples, report.shards) == (format, 13, 3)
    anew = get_format(format).carried(shardkit.Image(), value) != value
    assert report.notes == (["1 image re-encoded, as this format requires"] if anew else [])
    manifest = manifests.load(out)
    files = [*manifest.all_files(), *manifest.files]
    assert (report.files, report.bytes) == (len(files), sum(file.bytes for file in files))
    for paths in (shard_paths(out), [out / "__shardkit__/manifest.json"]):
        find_flipped_bits(out, paths, 50 if large else 20)
    assert shardkit.verify(out).sound


@EACH_FORMAT
def test_swapped_cut_missing_and_additional_shards_are_found(images, tmp_path, format):
    out = make(images, format, tmp_path / "out")
    first, second, third = shard_paths(out)
    a, b = first.read_bytes(), second.read_bytes()
    manifest = manifests.manifest_path(out).read_bytes()
    second.write_bytes(random.Random(0).randbytes(5000))  # written so, as far as checksums tell
    accept_files(out)
    assert {*paths_of(shardkit.verify(out, against=images, decode=True))} == {second}
    manifests.manifest_path(out).write_bytes(manifest)
    first.write_bytes(b)
    second.write_bytes(a)
    assert paths_of(shardkit.verify(out)) == [first, second]
    first.write_bytes(a[:-1])
    second.unlink()
    # A copy of the third under a name that the next shard would have.
    top = out / third.relative_to(out).parts[0]
    extra = out / top.name.replace("2", "3", 1)
    if format == "lance":  # of which a manifest says what counts
        (top,) = (out / "_versions").iterdir()
        extra = top.with_name(f"{2**64 - 3}.manifest")
    (shutil.copytree if top.is_dir() else shutil.copy)(top, extra)
    report = shardkit.verify(out)
    assert paths_of(report) == [first, second, extra]
    cut, missing, additional = report.problems
    assert (cut.what, cut.where["offset"]) == ("a file is truncated", len(a) - 1)
    assert (cut.expected, cut.found) == (f"{len(a):,} bytes", f"{len(a) - 1:,} bytes")
    assert missing.what == "a file of the dataset is missing"
    assert additional.what == "the folder contains a shard that the manifest does not list"
    assert report.bytes < manifests.load(out).bytes


def test_files_are_read_and_are_as_long_as_the_manifest_says(out):
    first, second, third = shard_paths(out)
    # A checksum that is known from writing says nothing of the disk.
    digests = bytes.fromhex(manifests.load(out).shards[0].file.checksum)
    fs._written[first] = (first.stat().st_size, digests)
    flip(first, 700)
    assert not shardkit.verify(out).sound
    flip(first, 700)
    rewrite(out, lambda data: data.update(errors=2))
    assert whats(out) == ["the list of dropped samples is not as long as the manifest says"]
    rewrite(out, lambda data: data.update(errors=0))
    first.write_bytes(first.read_bytes() + b"x")
    second.unlink()
    second.mkdir()
    third.unlink()
    third.symlink_to("nowhere")
    assert whats(out) == [
        "a file is longer than it was",
        "a file of the dataset is not a regular file",
        "a file of the dataset is missing",
    ]


def test_no_shard_is_opened_before_its_files_are_found_whole(images, out, monkeypatch):
    first, _, third = shard_paths(out)
    first.write_bytes(b"")
    (out / "__shardkit__/shard-000001.index.npy").unlink()
    format, opened = get_format("wds"), []
    real = format.open
    monkeypatch.setattr(
        format, "open", lambda path, layout=None: opened.append(path) or real(path, layout)
    )
    report = shardkit.verify(out, against=images, decode=True)
    assert opened == [third]
    assert len(report.problems) == 2
    assert report.problems[1].where["shard"] == "shard-000001.tar"
    assert report.notes == [
        "10 samples of the source not in the dataset, or in shards that cannot be read"
    ]


def test_files_beside_the_shards_are_compared(images, tmp_path):
    (images / "class0/bad.jpg").write_text("no image")
    (images / "class0/a.b.png").write_bytes(make_image(9, "PNG"))
    out = make(images, "wds", tmp_path / "out", on_error="skip")
    assert shardkit.verify(out).sound
    shard = {"shard": "shard-000001.tar"}
    for name, where in (
        ("shard-000001.index.npy", shard), ("errors.jsonl", {}), ("keys.jsonl", {})
    ):  # fmt: skip
        path = out / "__shardkit__" / name
        flip(path, -3)
        (problem,) = shardkit.verify(out).problems
        assert problem.where == {"path": path, **where}
        whole = path.read_bytes()
        path.unlink()
        assert whats(out) == ["a file of the dataset is missing"]
        path.write_bytes(whole)
        flip(path, -3)


@EACH_FORMAT
def test_a_key_in_two_shards_is_found(images, tmp_path, format, monkeypatch):
    real = ImageFolder.key
    monkeypatch.setattr(ImageFolder, "key", lambda self, index: real(self, index)[-3:])
    monkeypatch.setattr("shardkit.conversion.publish._check_keys", lambda *args: None)
    out = make(images, format, tmp_path / "out", shard_samples=4)  # a class in each
    report = shardkit.verify(out)
    assert len(report.problems) == 8
    last = report.problems[-1]
    first, _, third = shard_paths(out)
    assert last.where == {"path": third, "position": 3, "key": "003"}
    assert first.relative_to(out).as_posix() in str(last.found)
    assert "position 3" in str(last.found)


@EACH_FORMAT
def test_an_image_that_is_cut_and_counts_that_the_shards_do_not_have_are_found(
    images, tmp_path, format
):
    (images / "class0/000.txt").write_text("a caption")
    whole = photo(3)
    (images / "class1/002.jpg").write_bytes(whole[: len(whole) // 2] + b"\xff\xd9")
    out = make(images, format, tmp_path / "out")
    assert shardkit.verify(out).sound
    (problem,) = shardkit.verify(out, decode=True).problems
    about = {"position": 1, "key": "class1/002", "field": "image"}
    assert problem.where == {"path": shard_paths(out)[1], **about}
    assert "premature end" in str(problem.found).lower()

    def more_samples(data):
        data["shards"][1]["samples"] += 1

    def more_labels(data):
        data["shards"][1]["samples"] -= 1
        for field in ("label", "text"):
            data["fields"][field]["count"] += 1

    rewrite(out, more_samples)
    assert paths_of(shardkit.verify(out))[0] == shard_paths(out)[1]
    rewrite(out, more_labels)
    found = {p.where["field"]: (p.expected, p.found) for p in shardkit.verify(out).problems}
    text = found.pop("text", None)  # counted where a format knows sizes without reading
    assert text == (("2", "1") if shardkit.open(out).reader(0).sizes("text") is not None else None)
    assert found == {"label": ("13", "12")}


def test_a_png_with_a_wrong_checksum_is_damaged():
    """Decoding does not look at it."""
    data = bytearray(photo(1, "PNG"))
    assert damage(bytes(data)) is None
    assert damage(b"text")
    data[-13] ^= 1  # the last byte of IDAT's, which IEND follows
    with PIL.Image.open(io.BytesIO(data)) as opened:
        opened.load()
    assert damage(bytes(data))


@EACH_FORMAT
def test_values_of_every_type_equal_those_of_their_source(tmp_path, format):
    source = tmp_path / "in"
    with shardkit.create(source, "wds", EVERYTHING) as writer:
        for n in range(7):
            writer.write(everything(n) | {"score": math.nan if n else 0.5})
    out = make(source, format, tmp_path / "out", shard_samples=3, shuffle=True)
    assert whats(out, decode=True, against=source) == []
    report = shardkit.diff(source, out)
    assert (report.equal, report.equal_samples) == (True, 7)


def test_values_that_cannot_be_read_or_are_of_no_class_are_found(tmp_path):
    samples = [{"__key__": f"{n}", "label": n, "about": {"n": n}} for n in range(4)]
    out = make(samples, "wds", tmp_path / "out")
    shard = out / "shard-000000.tar"
    shard.write_bytes(shard.read_bytes().replace(b'{"n":2}', b'{"n":2x'))
    accept_files(out)
    classes = {"class_names": {"label": ["a", "b", "c"]}, "label_counts": [1, 1, 1]}
    rewrite(out, lambda data: data.update(classes))
    assert shardkit.verify(out).sound
    bad_json, bad_label = shardkit.verify(out, decode=True).problems
    assert (bad_json.where["position"], bad_json.where["field"]) == (2, "about")
    assert bad_label.what == "the label is not the number of a class"
    assert bad_label.where["key"] == "3"


def test_renamed_fields_and_classes_in_another_order_are_equal(images, out, tmp_path):
    options = {
        "rename": {"image": "jpg", "label": "cls"},
        "classes": ["class2", "class0", "class1"],
    }
    one, again = (make(images, "wds", tmp_path / name, **options) for name in ("one", "again"))
    assert whats(one, against=images) == []
    assert whats(one, against=again) == []
    report = shardkit.verify(out, against=again)
    assert any(p.what.startswith("the class names differ") for p in report.problems)
    fields = [p.where["field"] for p in report.problems if p.what.startswith("a field")]
    assert fields == ["image", "label", "jpg", "cls"]


def test_what_differs_from_the_source_is_named(images, tmp_path, monkeypatch):
    (images / "class0/001.txt").write_text("a caption")
    out = make(images, "wds", tmp_path / "out", shuffle=True)
    with monkeypatch.context() as patch:  # hashes that meet are no repeated keys
        patch.setattr("builtins.hash", lambda value: 7)
        assert shardkit.verify(out, against=images).sound
    flip(images / "class0/000.jpg", 100)
    (images / "class0/001.txt").unlink()
    (images / "class0/002.txt").write_text("another")
    (images / "class1/000.jpg").rename(images / "class1/new.jpg")
    problems = {p.where["key"]: p for p in shardkit.verify(out, against=images).problems}
    other = problems["class0/000"]
    assert isinstance(other, SampleError)
    assert other.where["field"] == "image"
    assert str(other.found).endswith("bytes, first difference at byte 100")
    assert {key: problem.what for key, problem in problems.items()} == {
        "class0/000": other.what,
        "class0/001": "a value is missing in the source",
        "class0/002": "a value is missing in the dataset",
        "class1/000": "the source does not have this sample",
        "class1/new": "a sample of the source is missing",
    }
    ours = [p for p in problems.values() if "position" in p.where]
    for problem in ours:
        ds = shardkit.open(problem.where["path"])
        assert ds[problem.where["position"]]["__key__"] == problem.where["key"]
    assert len(ours) == 4
    samples = [{"__key__": f"{n}", "label": n} for n in range(5)]
    out = make(samples, "wds", tmp_path / "labels")
    samples[3] = {"__key__": "3", "label": 4}
    (problem,) = shardkit.verify(out, against=samples).problems
    assert (problem.where["key"], problem.where["field"]) == ("3", "label")
    assert (problem.expected, problem.found) == ("int 4", "int 3")


def test_dropped_samples_and_those_beyond_a_limit_are_notes(images, tmp_path):
    (images / "class0/001.jpg").write_text("no image")
    options = {"on_error": "skip", "shuffle": True, "seed": 1}
    limited = shardkit.verify(
        make(images, "wds", tmp_path / "out", limit=7, **options), against=images
    )
    assert limited.problems == []
    assert "which was made with a limit of 7" in " ".join(limited.notes)
    report = shardkit.verify(make(images, "wds", tmp_path / "all", **options), against=images)
    assert report.problems == []
    assert report.notes == [
        "1 sample of the source dropped when the dataset was made, as errors.jsonl says"
    ]


def test_a_source_that_is_damaged_or_unfinished_is_said_and_no_crash(images, out, tmp_path):
    two = make(out, "wds", tmp_path / "two")
    shard_paths(out)[1].write_bytes(b"x")
    assert paths_of(shardkit.verify(two, against=out)) == [shard_paths(out)[1]]
    (images / "class2/001.jpg").unlink()
    (images / "class2/001.jpg").symlink_to("nowhere")
    (what,) = whats(two, against=images)
    assert "link is broken" in what
    (images / "class2/001.jpg").unlink()
    (images / "class2/001.jpg").write_text("no image")
    with pytest.raises(SampleError):
        make(images, "wds", tmp_path / "unfinished")
    with pytest.raises(FormatError, match="unfinished"):
        shardkit.verify(tmp_path / "unfinished.partial")


def test_the_order_of_problems_does_not_depend_on_threads(images, tmp_path, monkeypatch):
    out = make(images, "wds", tmp_path / "out", shard_samples=1)
    damaged = shard_paths(out)[::2]
    for path in damaged:
        path.write_bytes(b"x")
    reports = []
    for threads in (1, 4):
        monkeypatch.setattr("shardkit.verification.work.processors", lambda n=threads: n)
        report = shardkit.verify(out, decode=True, against=images)
        assert paths_of(report) == damaged
        reports.append({**report.to_dict(), "seconds": 0})
    assert reports[0] == reports[1]


def test_values_are_equal_by_value_and_type():
    nans, unlike = np.array([math.nan, 1]), ("a", JsonText("[" * 200_000))
    same = (
        *((math.nan, math.nan), ([math.nan], [math.nan]), (nans, nans.copy())),
        *((np.zeros(2), np.zeros(2)), ({"a": 1, "b": 2}, {"b": 2, "a": 1})),
        *((JsonText("[1, 2]"), [1, 2]), ([1, 2], JsonText("[1,2]"))),
        (JsonText('{"b": 1}'), {"b": 1}),
    )
    other = (
        *((1, True), (1, 1.0), ([1], [1.0]), (b"ab", b"abc"), unlike),
        *((np.zeros(2), np.zeros((2, 1))), (np.zeros(2, "<f4"), np.zeros(2, "<f8"))),
        *((np.array(["a"]), np.array(["b"])), (JsonText("[1, 2]"), JsonText("[1,2]"))),
        (JsonText("a"), {"b": 1}),  # which only a damaged manifest takes for JSON
    )
    for pairs, equal in ((same, True), (other, False)):
        for found, expected in pairs:
            assert (difference(found, expected) is None) == equal, (found, expected)


SPLIT = "train=0.5,val=0.3,test=0.2"


def write_splits(source: Path) -> Path:
    """Images that are split as they lie."""
    for name in ("train", "val"):
        write_images(source / name, classes=2, kilobytes=1)
    return source


def test_every_split_is_verified(tmp_path):
    source = write_splits(tmp_path / "in")
    out = make(source, "wds", tmp_path / "out")
    report = shardkit.verify(out, against=source, decode=True)
    assert report.problems == []
    assert (report.samples, report.shards) == (16, 4)
    assert whats(out / "train", against=source) == []
    assert whats(out / "train", against=source / "train") == []
    assert whats(out / "train", against=out) == []
    together = make(source, "wds", tmp_path / "together", split="none")
    assert whats(together, against=source) == []

    (source / "val").rename(source / "test")
    assert whats(out, against=source) == [
        "the dataset has no split 'test'",
        "the source has no split 'val'",
    ]
    (source / "test").rename(source / "val")
    rewrite(out, lambda data: data["splits"].update(val=9))
    shard_paths(out / "train")[0].unlink()
    assert whats(out) == [
        "a split does not match the manifest of the folder above it",
        "a file of the dataset is missing",
    ]
    shutil.rmtree(out / "val")
    assert whats(out)[0] == "the dataset of a split is missing"
    assert whats(out / "train", against=source)[0] == "a file of the dataset is missing"


def test_each_split_that_shardkit_made_is_verified_by_itself(tmp_path):
    """Beside its source, a copy, and what was made of it."""
    source = write_images(tmp_path / "in", classes=2, each=15, kilobytes=1)
    out = make(source, "wds", tmp_path / "out", split=SPLIT, shuffle=True)
    for dataset in (out, out / "train", out / "val", out / "test", out / "val/shard-000000.tar"):
        assert whats(dataset, against=source) == []
    other = make(source, "lmdb", tmp_path / "other", split=SPLIT, shuffle=True)
    on = make(out / "train", "lmdb", tmp_path / "on")
    for against in (other, other / "train", on):
        assert whats(out / "train", against=against) == []
    assert whats(on, against=out / "train") == []
    # What belongs to another split is not missed, and what belongs to this one is.
    with shardkit.open(out / "val") as val:
        missing = val[0]["__key__"]
    (source / f"{missing}.jpg").unlink()
    assert whats(out / "train", against=source) == []
    (problem,) = shardkit.verify(out / "val", against=source).problems
    assert (problem.what, problem.where["key"]) == ("the source does not have this sample", missing)
    write_images(tmp_path / "in/more", classes=1, each=20, kilobytes=1)
    assert "a sample of the source is missing" in whats(out / "test", against=source)


def test_a_split_of_text_is_verified_by_itself(tmp_path):
    source, tokenizer = tmp_path / "in.jsonl", tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(few_words(9)))
    source.write_text("".join(f'{{"text": "w{n % 8} w{n % 7}"}}\n' for n in range(60)))
    tokens = shardkit.TextOptions(tokenizer=tokenizer, seq_len=8, append_eos=False)
    made = {"documents": {}, "limited": {"limit": 3}, "tokens": {"text": tokens}}
    for name, options in made.items():
        out = make(source, "parquet", tmp_path / name, split=SPLIT, **options)
        for split in manifests.load_any(out).splits:
            assert whats(out / split, against=source) == [], (name, split)


@pytest.mark.parametrize("given", [False, True], ids=["made", "of the source"])
def test_a_split_whose_folder_has_another_name_cannot_be_told(tmp_path, given):
    source = (write_splits if given else write_images)(tmp_path / "in")
    out = make(source, "wds", tmp_path / "out", split="auto" if given else SPLIT)
    (out / "train").rename(tmp_path / "mine")
    with pytest.raises(UsageError, match="does not say which split") as error:
        shardkit.verify(tmp_path / "mine", against=source)
    assert "rename the folder back" in str(error.value.fix)
    assert shardkit.verify(tmp_path / "mine").sound


@pytest.mark.parametrize(
    "format", few([n for n in IMAGE_FORMATS if FORMATS[n].single], "beton", "lmdb", "wds")
)
def test_a_dataset_that_is_one_file(images, tmp_path, format):
    suffix = FORMATS[format].suffixes[0]
    shutil.copy(images / "class0/000.jpg", tmp_path / f"other{suffix}")
    out = make(images, format, tmp_path / f"one{suffix}", shard_samples=None)
    assert whats(out, against=images, decode=True) == []
    (shard,) = shard_paths(out)
    shard.write_bytes(shard.read_bytes()[:-1])
    assert whats(out) == ["a file is truncated"]
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    (what,) = whats(out)
    assert "missing" in what


def test_one_shard_of_a_dataset(images, out):
    shard = out / "shard-000001.tar"
    report = shardkit.verify(shard, against=images)
    assert report.problems == []
    assert (report.samples, report.files) == (5, 2)
    assert report.notes == [
        "7 samples of the source not in the dataset: only some of its shards were verified"
    ]
    (out / "shard-000000.tar").unlink()
    assert shardkit.verify(shard).sound
    shard.write_bytes(shard.read_bytes()[:-1])
    assert whats(shard) == ["a file is truncated"]


@pytest.mark.filterwarnings("ignore::shardkit.ShardkitWarning")
def test_foreign_shards_are_read_sample_by_sample(out, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for n, path in enumerate(shard_paths(out)):
        shutil.copy(path, foreign / f"{n}.tar")
    report = shardkit.verify(foreign)
    assert report.problems == []
    assert (report.samples, report.files, report.bytes) == (12, 3, 0)
    assert report.notes == [
        "there is no manifest with checksums: every sample was read instead",
        "3,072 bytes after the last samples are not samples",
    ]
    shutil.copy(foreign / "0.tar", foreign / "3.tar")
    report = shardkit.verify(foreign)
    assert report.sound
    assert "5 samples with the same key as an earlier sample" in report.notes
    for n in (0, 2):
        whole = (foreign / f"{n}.tar").read_bytes()
        (foreign / f"{n}.tar").write_bytes(whole[:1000])
    report = shardkit.verify(foreign)
    assert paths_of(report) == [foreign / "0.tar", foreign / "2.tar"]
    assert report.samples == 10


def test_the_command_and_its_exit_codes(images, out, tmp_path):
    found = run("verify", out, "--against", images, "--decode")
    assert "sound:" in found.stdout
    assert "12 samples in 3 shards, 6 files" in found.stdout
    quiet = run("verify", out, "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("", "")
    assert json.loads(run("verify", out, "--json", "--quiet").stdout)["sound"]
    report = json.loads(run("verify", out, "--part", "3/3", "--json").stdout)
    assert (report["part"], report["samples"], report["sound"]) == ("3/3", 2, True)
    assert "part 3/3 of 3 shards" in run("verify", out, "--part", "3/3").stdout
    assert "--part I/N" in run("verify", out, "--part", "0/3", check=2).stderr

    for path in shard_paths(out):
        path.unlink()
    found = run("verify", out, check=1)
    assert found.stderr.count("a file of the dataset is missing") == 3
    assert "damaged:" in found.stdout
    assert "3 problems" in found.stdout
    report = json.loads(run("verify", out, "--json", check=1).stdout)
    assert [p["error"] for p in report["problems"]] == ["DamagedError"] * 3
    assert "no such file" in run("verify", tmp_path / "nothing", check=2).stderr
    assert "not a dataset" in run("verify", images, check=1).stderr
    run("verify", out, "--against", tmp_path / "nothing", check=2)

    many = make([{"label": n} for n in range(103)], "wds", tmp_path / "many", shard_samples=1)
    for path in shard_paths(many):
        path.write_bytes(b"")
    found = run("verify", many, check=1)
    assert found.stderr.count("a file is truncated") == 100
    assert "and 3 problems more" in found.stderr
    assert len(json.loads(run("verify", many, "--json", check=1).stdout)["problems"]) == 103


SIZE = 70_000  # of a value: 15 in a piece


def large(out: Path, format: str = "wds", samples: int = 80) -> Path:
    """A dataset of two shards of some pieces each."""
    tokens = format == "megatron"
    schema: dict[str, Any] = {"x": shardkit.Array("|u1", (None,)) if tokens else shardkit.Bytes()}
    noise = np.random.default_rng(0).integers(0, 200, SIZE + samples, np.uint8)
    with shardkit.create(out, format, schema, shard_samples=samples // 2) as writer:
        for n in range(samples):
            value = noise[n : n + SIZE]
            writer.write({"__key__": f"k{n}", "x": value if tokens else value.tobytes()})
    return out


@pytest.mark.parametrize("format", few(sorted(set(FORMATS) - {"lance"})))  # which cannot tell
def test_a_damaged_piece_and_its_samples_are_named(tmp_path, format):
    out = large(tmp_path / "out", format)
    assert shardkit.verify(out).sound
    second = shard_paths(out)[1]
    whole, kind = second.read_bytes(), "<u2" if format == "megatron" else "|u1"
    values = [np.frombuffer(shardkit.open(out)[40 + n]["x"], "|u1") for n in range(40)]
    places = [whole.find(value.astype(kind).tobytes()) for value in values]
    flip(second, PIECE + PIECE // 2, PIECE + PIECE // 2 + 10)
    (problem,) = shardkit.verify(out).problems
    if format == "wds":  # by itself, it has the same digests
        assert [p.found for p in shardkit.verify(second).problems] == [problem.found]
    assert problem.what == "a file has changed since it was written"
    assert problem.where == {"path": second, "offset": PIECE}
    number = count(second.stat().st_size)
    found = re.fullmatch(
        rf"different bytes in piece 1 \(bytes 1,048,576 to 2,097,151\), of {number} pieces;"
        r" samples (\d+) to (\d+) \('(.*)' to '(.*)'\) lie there",
        str(problem.found),
    )
    assert found is not None, problem.found
    first, last = int(found[1]), int(found[2])
    assert (found[3], found[4]) == (f"k{40 + first}", f"k{40 + last}")
    if format == "array_record":  # which packs them
        return
    assert min(places) >= 0
    size = SIZE * np.dtype(kind).itemsize
    lying = [n for n, at in enumerate(places) if at < 2 * PIECE and at + size > PIECE]
    assert first <= lying[0]
    assert last >= lying[-1]
    if format not in ("arrow", "hf", "parquet"):  # which name a batch of rows
        assert first >= lying[0] - 1
        assert last <= lying[-1] + 1


def test_pieces_that_lie_side_by_side_are_named_together(tmp_path):
    out = large(tmp_path / "out", samples=200)
    flip(shard_paths(out)[0], 100, 3 * PIECE, 4 * PIECE, 5 * PIECE - 1, 6 * PIECE + 3)
    (problem,) = shardkit.verify(out).problems
    words = str(problem.found)
    assert words.startswith(
        "different bytes in piece 0 (bytes 0 to 1,048,575), pieces 3 to 4 (bytes 3,145,728 to"
        " 5,242,879), piece 6 (bytes 6,291,456 to "
    )
    assert words.count("sample") == 3
    assert problem.where["offset"] == 0
    first = shard_paths(large(tmp_path / "lmdb", "lmdb"))[0]
    first.write_bytes(bytes(PIECE) + first.read_bytes()[PIECE:])
    (problem,) = shardkit.verify(tmp_path / "lmdb").problems
    assert "are unknown, as the shard cannot be opened" in str(problem.found)


def test_the_pieces_of_one_file_are_read_by_all_threads(tmp_path, monkeypatch):
    """Each waits for the other with its first piece."""
    from shardkit.storage.byte_source import LocalFile

    out = large(tmp_path / "out", "beton", 40 * 16)
    monkeypatch.setattr("shardkit.verification.work.processors", lambda: 2)
    meeting, real = threading.Barrier(2, timeout=120), LocalFile.read
    waiting = {0, 16 * PIECE}

    def read(self, offset, length):
        if length == PIECE and offset in waiting:
            waiting.discard(offset)
            meeting.wait()
        return real(self, offset, length)

    monkeypatch.setattr(LocalFile, "read", read)
    assert shardkit.verify(out).sound
    assert not waiting


@pytest.mark.parametrize("format", ["wds", "beton"])
def test_checksums_of_whole_files_are_compared_as_they_were(tmp_path, format):
    out = large(tmp_path / "out", format)
    as_earlier_versions_wrote_it(out)
    report = shardkit.verify(out)
    assert report.sound
    assert report.bytes == sum(f.bytes for f in manifests.load(out).all_files())
    first = shard_paths(out)[0]
    flip(first, 2 * PIECE)
    (problem,) = shardkit.verify(out).problems
    assert problem.where == {"path": first}
    assert problem.found == xxhash.xxh3_128_hexdigest(first.read_bytes())


def test_a_damaged_list_of_pieces_is_one_problem(tmp_path):
    out = large(tmp_path / "out")
    path = out / "__shardkit__" / manifests.PIECES
    whole, (first, second) = path.read_bytes(), shard_paths(out)
    flipped = bytes([*whole[:3], whole[3] ^ 1, *whole[4:]])
    for damaged in (flipped, whole[:-16], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        assert paths_of(shardkit.verify(out)) == [path]
        for shard in (first, second):
            flip(shard, 2 * PIECE + 100)
        report = shardkit.verify(out)
        assert paths_of(report) == [first, second, path]
        if damaged == flipped:  # that of the first shard: the second's are right
            assert "piece" not in str(report.problems[0].found)
            assert "piece 2" in str(report.problems[1].found)
        for shard in (first, second):
            flip(shard, 2 * PIECE + 100)


@pytest.mark.parametrize("kind", [CHECKSUM, WHOLE])
def test_a_file_of_any_size_takes_no_time_and_memory(tmp_path, kind):
    """As a manifest may say; the list of its pieces is as long, of zeros that no disk has."""
    out = large(tmp_path / "out")
    size = 2**60
    first, second = manifests.load(out).shards
    listed = count(size) + sum(checksums.listed(file.bytes) for file in second.files)

    def change(data, more=0):
        data["shards"][0]["file"]["bytes"] = size
        data["checksum"] = kind
        data["files"][-1]["bytes"] = 16 * listed + more

    rewrite(out, change)
    with (out / "__shardkit__" / manifests.PIECES).open("r+b") as file:
        file.truncate(2**40)
    report = shardkit.verify(out)
    found = {problem.where["path"].name: problem.what for problem in report.problems}
    assert found[first.file.name] == "a file is truncated"
    for wrong, words in (
        (lambda data: change(data, 16), "does not have a digest for each piece"),
        (lambda data: data.update(checksum="md5"), "xxh3-128-1MiB"),
    ):
        if kind == CHECKSUM:
            rewrite(out, wrong)
            with pytest.raises(DamagedError, match=words):
                shardkit.open(out)


@EACH_FORMAT
def test_a_folder_without_its_manifest_is_incomplete(images, tmp_path, format):
    out = make(images, format, tmp_path / "out")
    path = out / "__shardkit__/manifest.json"
    path.unlink()
    problem = shardkit.verify(out).problems[0]
    assert (problem.what, problem.where["path"]) == (INCOMPLETE, path)
    assert "a shard is checked by itself" in run("verify", out, check=1).stderr
    assert inspect(out)["incomplete"].startswith(INCOMPLETE)
    assert f"warning: {INCOMPLETE}" in run("inspect", out).stderr
    copied = shardkit.convert(out, "wds", tmp_path / "again", workers=0)
    assert any(note.startswith(INCOMPLETE) for note in copied.notes)
    shutil.rmtree(out / "__shardkit__")
    report = shardkit.verify(out)  # of these without their indexes nobody can say who wrote them
    assert report.sound == (format in ("wds", "tfrecord", "array_record"))
    assert shardkit.verify(shardkit.open(out).shard_path(0)).sound


@pytest.mark.parametrize("name", ["train.tar", "train.lmdb"])
def test_a_single_file_whose_manifest_alone_is_missing_is_incomplete(images, tmp_path, name):
    (images / "class0/a.b.png").write_bytes(make_image(9, "PNG"))  # which the key table has
    format = "lmdb" if name.endswith("lmdb") else "wds"
    out = make(images, format, tmp_path / name, shard_samples=None)
    (tmp_path / f"__shardkit__/{name}.manifest.json").unlink()
    assert whats(out) == [INCOMPLETE]
    shutil.rmtree(tmp_path / "__shardkit__")
    assert shardkit.verify(out).sound  # copied by itself, as one may


def test_what_lies_beside_splits_is_compared(images, tmp_path):
    out = make(images, "hf", tmp_path / "out", split="train=0.5,val=0.5")
    report = shardkit.verify(out)
    assert report.sound
    path = out / "dataset_dict.json"
    whole = path.read_bytes()
    assert report.bytes == sum(
        p.stat().st_size for p in out.rglob("*") if p.is_file() and p.name != "manifest.json"
    )
    for changed in (whole.replace(b"train", b"tramp"), whole[:-1], whole + b" ", None):
        path.unlink() if changed is None else path.write_bytes(changed)
        assert paths_of(shardkit.verify(out)) == [path]
    path.write_bytes(whole)
    (out / "__shardkit__/manifest.json").unlink()
    assert whats(out) == [INCOMPLETE]
    (out / "train/__shardkit__/manifest.json").unlink()
    shutil.rmtree(out / "__shardkit__")
    assert whats(out) == [INCOMPLETE]


def parts_of(path: Path, number: int, **options: bool) -> list[shardkit.VerifyReport]:
    return [
        shardkit.verify(path, part=f"{part}/{number}", **options) for part in range(1, number + 1)
    ]


@pytest.mark.parametrize(("format", "number"), [("wds", 2), ("lmdb", 5)])
def test_parts_check_every_shard_and_file_once(images, tmp_path, format, number):
    out = make(images, format, tmp_path / "out", shard_samples=4)
    whole, parts = shardkit.verify(out), parts_of(out, number)
    assert all(part.sound for part in parts)
    for name in ("samples", "shards", "files", "bytes"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    assert [part.shards for part in parts] == ([2, 1] if number == 2 else [1, 1, 1, 0, 0])
    assert [part.part for part in parts] == [f"{n + 1}/{number}" for n in range(number)]
    assert whole.part is None
    assert any("without --part" in note for note in parts[0].notes)
    assert any("part 1 checks" in note for note in parts[1].notes)
    with pytest.raises(UsageError, match="compared with its source, by a single process"):
        shardkit.verify(out, images, part="1/2")
    assert shardkit.verify(out, images, part="1/1").sound
    if format == "lmdb":  # the library is asked for the shards of the part alone
        second = shardkit.verify(out, part="2/2", client=True, decode=True)
        assert (second.sound, second.samples, second.clients["lmdb"].samples) == (True, 4, 4)
        assert +second.clients["lmdb"].not_compared == {}


@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "lmdb", "wds"))
def test_parts_find_what_the_whole_finds(images, tmp_path, format):
    """Each problem is found by exactly one of them, and named the same."""
    (images / "class1/broken.jpg").write_bytes(b"no image")
    out = make(images, format, tmp_path / "out", shard_samples=3, on_error="skip")
    paths = shard_paths(out)
    for path in (paths[0], paths[1], out / f"{manifests.FOLDER}/{manifests.ERRORS}"):
        flip(path, path.stat().st_size // 2)
    (paths[2] if paths[2].is_file() else paths[2].parent).replace(tmp_path / "away")
    if format != "lance":  # whose own manifest says what counts
        top = out / paths[1].relative_to(out).parts[0]
        (shutil.copytree if top.is_dir() else shutil.copy)(top, out / top.name.replace("1", "7", 1))
    whole = sorted(map(str, shardkit.verify(out).problems))
    assert len(whole) >= 4
    parts = [sorted(map(str, part.problems)) for part in parts_of(out, 3)]
    assert sorted(problem for part in parts for problem in part) == whole
    assert all(parts)


def test_shards_of_splits_and_of_others_are_shared_as_one_list(images, tmp_path):
    out = make(images, "wds", tmp_path / "out", folds=4, shard_samples=None)
    assert [part.shards for part in parts_of(out, 4)] == [1, 1, 1, 1]
    shard = out / "fold2/shard-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert [part.sound for part in parts_of(out, 4)] == [True, True, False, True]
    out = make(images, "wds", tmp_path / "theirs", shard_samples=4)
    shutil.rmtree(out / manifests.FOLDER)
    for path in out.glob("*.tar"):
        path.rename(out / path.name.replace("shard", "theirs"))
    second = out / "theirs-000001.tar"
    second.write_bytes(second.read_bytes()[:2000])
    whole = {str(problem) for problem in shardkit.verify(out).problems}
    assert whole  # what cannot be opened is said by each part
    assert [{str(problem) for problem in part.problems} for part in parts_of(out, 3)] == [whole] * 3
