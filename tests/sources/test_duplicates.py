"""Samples that are copies of others: found, listed with the one that stays, and left out."""

import functools
import io
import json
import random
import tracemalloc
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit import ConvertOptions, UsageError
from shardkit.codecs.perceptual import perceptual_hash
from shardkit.conversion.run import prepare
from shardkit.sources.duplicates import NEAR, Content, Copy, copies
from tests.codecs.sample_images import encoded as saved
from tests.codecs.sample_images import photo_like
from tests.conftest import files_of
from tests.sources.real import convert, keys, put, refused, verified
from tests.test_cli import run


@functools.cache
def encoded(number, size=(320, 240), format="JPEG", **options):
    return saved(Image.fromarray(photo_like(number, 320, 240)).resize(size), format, **options)


@pytest.fixture
def photos(tmp_path):
    """Two classes: photos, a copy of one, two that look like it, and two flat images."""
    files = {"a/0.jpg": encoded(0), "a/1.jpg": encoded(1), "a/2.jpg": encoded(0)}
    files["b/3.webp"] = encoded(0, (80, 60), "WEBP", quality=40)
    files |= {"b/4.png": encoded(1, (640, 480), "PNG"), "b/5.jpg": encoded(2)}
    files |= {f"b/{number}.png": flat(grey) for number, grey in ((6, 200), (7, 201), (8, 200))}
    return put(tmp_path / "photos", files)


def flat(grey):
    return saved(Image.new("L", (30, 30), grey), "PNG")


def listed(path):
    text = (path / "__shardkit__/filtered.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_exact_copies_are_left_out_and_listed_as_by_any_workers_and_of_any_format(photos, tmp_path):
    out = tmp_path / "out"
    words = ("convert", photos, "--to", "wds", "-o", out, "--dedup", "exact", "--workers", 0)
    found = json.loads(run(*words, "--json").stdout)
    assert found["splits"][""]["filtered"] == {"duplicate": 2}
    assert keys(out) == ["a/0", "a/1", "b/3", "b/4", "b/5", "b/6", "b/7"]
    assert listed(out) == [
        {"source": "a/2.jpg", "key": "a/2", "reason": "duplicate", "found": "the same as a/0"},
        {"source": "b/8.png", "key": "b/8", "reason": "duplicate", "found": "the same as b/6"},
    ]
    assert "2 duplicate; listed in" in " ".join(run(*words).stdout.split())
    convert(photos, tmp_path / "all")
    for how in ("exact", "near"):
        convert(photos, tmp_path / how, dedup=how, shard_samples=3)
        convert(tmp_path / "all", tmp_path / f"of-{how}", dedup=how, shard_samples=3)
        assert keys(tmp_path / how) == keys(tmp_path / f"of-{how}")
    convert(photos, tmp_path / "two", dedup="near", workers=2, shard_samples=3)
    assert files_of(tmp_path / "two") == files_of(tmp_path / "near")


def test_near_copies_of_any_size_quality_and_format_are_left_out(photos, tmp_path):
    out = tmp_path / "out"
    verified(photos, out, "arrow", dedup="near")
    assert keys(out) == ["a/0", "a/1", "b/5", "b/6", "b/7"], "flat images are compared byte by byte"
    reasons = {line["key"]: (line["reason"], line["found"].split()[-1]) for line in listed(out)}
    near = "near duplicate with another label"
    same = {"a/2": ("duplicate", "a/0"), "b/8": ("duplicate", "b/6")}
    assert reasons == {**same, "b/3": (near, "a/0"), "b/4": (near, "a/1")}
    assert shardkit.verify(out).sound
    convert(photos, tmp_path / "few", dedup="near", where="width < 320")  # conditions come first
    assert keys(tmp_path / "few") == ["b/3", "b/6", "b/7"]
    (photos / "b/9.jpg").write_bytes(encoded(3))
    assert not shardkit.verify(out, against=photos).sound


def test_they_are_left_out_before_samples_are_drawn_and_bad_images_are_not(photos, tmp_path):
    options = ConvertOptions.of(dedup="near", split="train=0.5,val=0.5")
    plan = prepare(photos, "wds", tmp_path / "o", options)
    found = {"duplicate": 2, "near duplicate with another label": 2}
    assert plan.describe()["filtered"] == found
    assert plan.samples == 5
    convert(photos, tmp_path / "sample", dedup="exact", sample=0.5, seed=1)
    convert(photos, tmp_path / "both", sample=0.5, seed=1)
    assert set(keys(tmp_path / "sample")) == set(keys(tmp_path / "both")) - {"a/2", "b/8"}
    (photos / "a/1.jpg").write_bytes(encoded(1)[:-40])
    refused(shardkit.SampleError, r"a/1\.jpg", convert, photos, tmp_path / "out", dedup="near")
    result = convert(photos, tmp_path / "skip", dedup="near", on_error="skip")
    assert result.splits[""].errors == 1
    assert keys(tmp_path / "skip") == ["a/0", "b/4", "b/5", "b/6", "b/7"]


def test_without_images_all_but_labels_are_compared_and_long_files_are_refused(photos, tmp_path):
    rows = [{"text": text, "label": n} for n, text in enumerate(["a", "b", "a"])]
    convert(rows, tmp_path / "out", "parquet", dedup="exact")
    assert [sample["label"] for sample in shardkit.open(tmp_path / "out")] == [0, 1]
    refused(UsageError, "exactly one image field", convert, rows, tmp_path / "near", dedup="near")
    with pytest.raises(UsageError, match="dedup must be one of 'exact', 'near'"):
        convert(photos, tmp_path / "fuzzy", dedup="fuzzy")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "a"}\n')
    with pytest.raises(UsageError, match=r"(?s)convert them without these options first"):
        convert(path, tmp_path / "long", "arrow", dedup="exact")
    convert(path, tmp_path / "long", "arrow")
    convert(tmp_path / "long", tmp_path / "less", "arrow", dedup="exact")
    assert len(shardkit.open(tmp_path / "less")) == 1


def test_fields_that_are_not_stored_are_not_compared(tmp_path):
    some = range(4)
    rows = [{"left": encoded(n % 2), "right": encoded(n), "label": n % 2, "id": n} for n in some]
    schema = {name: shardkit.Image() for name in ("left", "right")}
    schema |= {name: shardkit.Int() for name in ("label", "id")}

    def left(**options):
        out = tmp_path / "out"
        convert(rows, out, "parquet", schema=schema, overwrite=True, **options)
        return len(shardkit.open(out))

    refused(UsageError, "exactly one image field", left, dedup="near")
    assert left(dedup="near", drop=["right"]) == 2
    assert left(dedup="exact", fields=["left"]) == 2
    assert left(dedup="exact", fields=["right", "label"]) == 4
    assert left(dedup="exact", drop=["left", "right"]) == 4  # by id
    assert left(dedup="exact", fields=["label"]) == 4  # by the images


def test_copies_with_other_labels_are_counted_and_a_split_without_rows_has_none(tmp_path):
    images = put(tmp_path / "in", dict.fromkeys(("train/a/1.jpg", "train/b/2.jpg"), encoded(1)))
    put(images, dict.fromkeys(("train/a/3.jpg", "val/c/1.jpg"), encoded(1)))
    result = convert(images, tmp_path / "out", dedup="exact")
    labels = {"duplicate": 1, "duplicate with another label": 1}
    assert result.splits["train"].filtered == labels
    convert(images, tmp_path / "dataset")
    some = tmp_path / "some"
    convert(tmp_path / "dataset", some, "arrow", where="label == 'c'", dedup="exact")
    assert shardkit.open(some / "val").keys() == ["c/1"]
    assert not shardkit.verify(some, against=tmp_path / "dataset").problems


def simple(contents):
    """The same, pair by pair."""
    stay, found = [], []
    for number, content in enumerate(contents):
        if content is None:
            continue
        same = [n for n in stay if contents[n].digest == content.digest]
        near = []
        if content.looks is not None:
            others = [n for n in stay if contents[n].looks is not None]
            near = [((contents[n].looks ^ content.looks).bit_count(), n) for n in others]
        distance, of = min(near, default=(NEAR + 1, None))
        if same:
            found.append(Copy(number, same[0], None))
        elif distance <= NEAR:
            found.append(Copy(number, of, distance))
        else:
            stay.append(number)
    return found


def test_they_are_those_of_all_pairs():
    for seed in range(30):
        dice = random.Random(seed)
        centres = [dice.getrandbits(64) for _ in range(5)]
        contents = []
        for number in range(dice.randrange(60)):
            looks = dice.choice(centres)
            for _ in range(dice.randrange(9)):
                looks ^= 1 << dice.randrange(64)
            bad, without = dice.random() < 0.05, dice.random() < 0.1
            digest = dice.choice([b"%d" % number, b"same"] if without else [b"%d" % number])
            contents.append(None if bad else Content(digest, None if without else looks))
        assert copies(contents) == simple(contents), f"seed {seed}"


def test_copies_of_copies_and_thousands_that_are_all_alike_are_listed_with_the_one_that_stays():
    contents = [Content(b"a", 0), Content(b"b", 0), Content(b"b", 0), *[Content(b"c", 1)] * 2]
    assert copies(contents) == [Copy(1, 0, 0), Copy(2, 0, 0), Copy(3, 0, 1), Copy(4, 0, 1)]
    # Frames of a video: each pair is near, and none is the same.
    looks = [sum(1 << bit for bit in bits) for bits in combinations(range(64), 3)][:5000]
    contents = [Content(number.to_bytes(2, "big"), hash) for number, hash in enumerate(looks)]
    tracemalloc.start()
    found = copies(contents)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(copy.number, copy.of) for copy in found] == [(n, 0) for n in range(1, 5000)]
    assert peak < 128 << 20  # all pairs would take gigabytes


def test_the_hash_is_that_of_imagehash():
    """As its `phash` computes it: the formula of the cosine transform, term by term."""
    at, low = np.arange(32), range(8)
    for number in range(3):
        data = encoded(number, (100, 80), "PNG")
        grey = Image.open(io.BytesIO(data)).convert("L").resize((32, 32), Image.Resampling.LANCZOS)
        values = np.asarray(grey, np.float64)
        waves = [np.cos(np.pi * k * (2 * at + 1) / 64) for k in low]
        found = np.array([[(values * np.outer(y, x)).sum() for x in waves] for y in waves])
        bits = (found > np.median(found)).ravel()
        assert perceptual_hash(data) == int("".join(str(int(bit)) for bit in bits), 2)
