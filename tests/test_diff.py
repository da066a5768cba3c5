"""`shardkit diff`: which samples two datasets do not have in common."""

import json
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import SampleError, UsageError
from shardkit.sample import JsonText, Sample
from shardkit.testing import make_image
from tests.test_cli import run

FIELDS = {
    "image": shardkit.Image(),
    "label": shardkit.Int(),
    "score": shardkit.Float(optional=True),
    "tags": shardkit.Json(),
}


def sample(number: int, **changed: object) -> Sample:
    values = {"image": make_image(number), "label": number % 2, "tags": {"n": number}}
    return {"__key__": f"s/{number}", **values, **changed}


def write(path: Path, samples: list[Sample], to: str = "wds", **options: object) -> Path:
    with shardkit.create(path, to, FIELDS, **options) as writer:  # type: ignore[arg-type]
        for each in samples:
            writer.write(each)
    return path


def test_what_is_added_removed_and_changed_is_counted_and_named(tmp_path):
    old = [sample(n) for n in range(6)]
    changed = sample(3, image=make_image(99), tags={"n": 3.0})
    new = [sample(5), sample(1, label=7), sample(2, score=float("nan")), changed]
    new += [sample(4), sample(9)]
    a, b = write(tmp_path / "a", old), write(tmp_path / "b", new, "parquet")
    report = shardkit.diff(a, b)
    assert not report.equal
    assert (report.equal_samples, report.removed, report.added, report.changed) == (2, 1, 1, 3)
    assert (report.first_removed, report.first_added) == (["s/0"], ["s/9"])
    assert report.fields == {"label": 1, "score": 1, "image": 1, "tags": 1}
    assert report.first_changed["s/1"] == {"label": ("int 1", "int 7")}
    assert report.first_changed["s/2"] == {"score": ("absent", "present")}
    assert set(report.first_changed["s/3"]) == {"image", "tags"}
    back = shardkit.diff(b, a, first=1)
    assert (back.removed, back.added, back.changed) == (1, 1, 3)
    assert (back.first_removed, back.first_added) == (["s/9"], ["s/0"])
    assert len(back.first_changed) == 1
    twice = [{"__key__": "a", "x": 1}, {"__key__": "a", "x": 2}]  # matched in their order
    assert shardkit.diff(twice, twice).equal
    many = [{"__key__": "a", "x": 1}] * 2_000
    assert shardkit.diff(many, many).equal_samples == 2_000
    report = shardkit.diff(twice, twice[:1])
    assert (report.equal_samples, report.first_removed) == (1, ["a"])


def test_the_command_has_its_exit_codes(tmp_path):
    a = write(tmp_path / "a", [sample(0), sample(1)])
    b = write(tmp_path / "b", [sample(1), sample(0)], "lmdb")
    c = write(tmp_path / "c", [sample(0, label=5)])
    assert "equal" in run("diff", a, b).stdout
    shown = run("diff", a, c, check=1).stdout
    for words in ("1 sample of A alone", "label in 1", "s/1", "s/0: label: int 0 -> int 5"):
        assert words in shown
    found = json.loads(run("diff", a, c, "--json", check=1).stdout)
    assert (found["equal"], found["removed"], found["fields"]) == (False, 1, {"label": 1})
    assert found["first_changed"] == {"s/0": {"label": ["int 0", "int 5"]}}
    assert run("diff", a, c, "--quiet", check=1).stdout == ""
    run("diff", a, tmp_path / "nothing", check=2)
    run("diff", a, check=2)


def test_a_source_is_compared_with_what_was_made_of_it(images, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "a", workers=0)
    assert shardkit.diff(images, tmp_path / "a").equal
    next(images.rglob("*.jpg")).unlink()
    report = shardkit.diff(images, tmp_path / "a")
    assert (report.added, report.removed, report.changed) == (1, 0, 0)


def test_text_is_read_from_its_beginning_on_either_side(tmp_path):
    lines = [json.dumps({"text": f"document {number}"}) for number in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), "utf-8")
    shardkit.convert(tmp_path / "a.jsonl", "parquet", tmp_path / "b", workers=0, limit=4)
    assert shardkit.diff(tmp_path / "a.jsonl", tmp_path / "b").removed == 1
    assert shardkit.diff(tmp_path / "b", tmp_path / "a.jsonl").added == 1
    with pytest.raises(UsageError, match="both sources can only be read from the beginning"):
        shardkit.diff(tmp_path / "a.jsonl", tmp_path / "a.jsonl")


def test_splits_of_one_name_are_compared_with_each_other(tmp_path):
    for name, count, classes in (("a", 3, ["cat", "dog"]), ("b", 4, ["dog", "cat"])):
        (tmp_path / name).mkdir()
        for split in ("train", "val"):
            numbers = range(count if split == "val" else 3)
            samples = [sample(n, label=int(split == "val")) for n in numbers]
            write(tmp_path / name / split, samples, classes=classes)
    report = shardkit.diff(tmp_path / "a", tmp_path / "b")
    assert (report.equal_samples, report.first_added) == (6, ["val/s/3"])
    assert report.classes == ["label"]  # once, not for each split
    report = shardkit.diff(tmp_path / "a", tmp_path / "a" / "val")
    assert (report.equal_samples, report.removed) == (0, 3)  # train's are the first of their keys


def test_json_is_compared_by_its_value_and_numbers_by_their_type(tmp_path):
    names = {"classes": ["cat", "dog"]}
    a = write(tmp_path / "a", [sample(0, tags=JsonText('{"a": 1,\n "b": 2}'))], **names)
    b = write(tmp_path / "b", [sample(0, tags=JsonText('{"b":2,"a":1}'))], **names)
    c = write(tmp_path / "c", [sample(0, tags={"a": 1.0, "b": 2})], classes=["dog", "cat"])
    assert shardkit.diff(a, b).equal
    report = shardkit.diff(a, c)
    assert (report.equal, report.fields, report.classes) == (False, {"tags": 1}, ["label"])
    samples, other = ([{"__key__": "a", "x": np.zeros(2, kind)}] for kind in (np.int32, np.int64))
    assert shardkit.diff(samples, other).fields == {"x": 1}


def test_a_bad_sample_is_an_error(images, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "a", workers=0)
    (images / "class0/bad.json").write_text("{", "utf-8")
    (images / "class0/bad.jpg").write_bytes(make_image())
    with pytest.raises(SampleError, match="damaged"):
        shardkit.diff(images, tmp_path / "a")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(SampleError) as error:
        shardkit.diff(tmp_path / "texts", tmp_path / "texts")
    assert (error.value.fix or "").startswith("convert this side first, and use --encoding")
