"""`shardkit.concatenate`: several datasets as one."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.dataset import Dataset
from shardkit.errors import FormatError, UsageError
from shardkit.performance.checks import convert_command
from shardkit.schema import Array, Bool, Int, Text
from shardkit.stream.loader import Loader
from tests.conftest import files_of
from tests.stream.data import real_keys, write_documents

SCHEMA = {"label": Int(), "text": Text(), "odd": Bool(optional=True), "row": Array("int64", (2,))}


def write(path: Path, to: str, classes: list[str] | None, count: int, **more: Any) -> Dataset:
    """Samples whose text is the name of their class."""
    schema = {**SCHEMA, **more}
    with shardkit.create(path, to, schema=schema, classes=classes, shard_samples=5) as writer:
        for n in range(count):
            label = n % 3 if n % 4 else -1
            sample = {"__key__": f"{path.name}/{n}", "label": label, "row": np.array([n, label])}
            sample["text"] = "none" if label < 0 or classes is None else classes[label]
            if n % 2:
                sample["odd"] = True
            writer.write(sample | dict.fromkeys(more, n * 2))
    return shardkit.open(path)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    root = tmp_path_factory.mktemp("parts")
    return [
        write(root / "a", "wds", ["cat", "dog", "owl"], 13),
        write(root / "b", "arrow", ["ant", "cat", "dog"], 11, width=Int()),
        write(root / "c", "lmdb", ["cat", "dog", "owl"], 7),
    ]


def check(joined: Dataset, expected: list[dict[str, Any]]) -> None:
    """The samples are these, with labels that name the same classes."""
    assert len(joined) == len(expected)
    for sample, own in zip(joined, expected, strict=True):
        name = "none" if sample["label"] < 0 else (joined.classes or ())[sample["label"]]
        assert name == sample["text"]
        assert sample["row"].tolist() == own["row"].tolist()
        same = {n: value for n, value in sample.items() if n not in ("label", "row")}
        assert same == {n: value for n, value in own.items() if n not in ("label", "row")}
    assert joined.keys() == [own["__key__"] for own in expected]
    assert joined.column("label").tolist() == [sample["label"] for sample in joined]
    assert joined.column("row").tolist() == [own["row"].tolist() for own in expected]


def test_samples_come_one_dataset_after_the_other(parts):
    joined = shardkit.concatenate(parts)
    every = [sample for part in parts for sample in part]
    assert joined.classes == ("ant", "cat", "dog", "owl")
    assert joined.shards == sum(part.shards for part in parts)
    assert joined.schema == {**SCHEMA, "width": Int(optional=True)}
    check(joined, every)
    check(joined[::-1], every[::-1])
    check(joined.select([30, 13, 2, 29]), [every[n] for n in (30, 13, 2, 29)])
    check(joined.filter("width > 6"), [s for s in every if s.get("width", 0) > 6])
    check(joined.filter("label == 'ant'"), [s for s in every if s["text"] == "ant"])
    assert joined.column("width").tolist() == [s.get("width") for s in every]
    assert joined["b/3"]["width"] == 6
    for other in (copy.copy(joined), pickle.loads(pickle.dumps(joined[4:]))):
        check(other, every[len(every) - len(other) :])
    again = shardkit.concatenate([shardkit.concatenate(parts[:2]), parts[2]])
    assert len(again.parts) == 3
    check(again, every)


def test_views_are_concatenated(parts):
    a, b, c = parts
    joined = shardkit.concatenate([a[2:5], b[::-2], shardkit.concatenate([c, a])[5:9]])
    check(joined, [*a[2:5], *b[::-2], *c[5:7], *a[:2]])
    one = shardkit.concatenate([a[2:5], a[7:], a[2:3]])
    assert one.classes == a.classes
    check(one, [*a[2:5], *a[7:], *a[2:3]])


def test_transforms_are_those_of_each_dataset(parts):
    a, b, _ = parts
    changed = copy.copy(b)
    changed.transform = lambda sample: {**sample, "text": sample["text"].upper()}
    joined = shardkit.concatenate([a, changed])
    assert joined[3]["text"] == a[3]["text"]
    assert joined[13 + 3]["text"] == b[3]["text"].upper()
    assert joined[::-1][11 - 4]["text"] == b[3]["text"].upper()
    with pytest.raises(UsageError, match="a dataset with transforms cannot be streamed"):
        Loader(joined, batch_size=2)
    with pytest.raises(UsageError, match="a dataset with transforms cannot be converted"):
        shardkit.convert(joined, "wds", "never")


def test_advice_names_each_dataset(parts):
    loader = Loader(shardkit.concatenate([parts[0][:5], parts[1]]), batch_size=2)
    commands = [f"shardkit convert {part.place} --to {part.format}" for part in parts[:2]]
    assert convert_command(loader.dataset.stream) == " && ".join(commands)


@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_read_them(parts, shuffle):
    joined = shardkit.concatenate(parts)
    for dataset in (joined, joined[::-3], joined.filter("odd"), parts[0][::-2]):
        loader = Loader(dataset, batch_size=4, shuffle=shuffle, threads=2, last="short")
        batches = list(loader)
        assert real_keys(batches) == Counter(dataset.keys())
        for batch in batches:
            for n, key in enumerate(batch["__key__"]):
                assert batch["label"][n] == dataset[key]["label"]
                assert batch["row"][n].tolist() == dataset[key]["row"].tolist()
        if not shuffle:
            assert [key for batch in batches for key in batch["__key__"]] == dataset.keys()
    state = Loader(joined, batch_size=4, shuffle=shuffle, last="short").state_dict()
    with pytest.raises(UsageError):
        Loader(joined[1:], batch_size=4, shuffle=shuffle, last="short").load_state_dict(state)


def test_rows_and_lengths(tmp_path):
    a = shardkit.open(write_documents(tmp_path / "a", [3, 5, 2]))
    b = shardkit.open(write_documents(tmp_path / "b", [7, 1]))
    joined = shardkit.concatenate([a, b])
    assert joined.lengths("tokens").tolist() == [3, 5, 2, 7, 1]
    assert joined[::-2].lengths("tokens").tolist() == [1, 2, 3]
    loader = Loader(joined, batching=shardkit.Dynamic(max_tokens=8), shuffle=True)
    assert real_keys(list(loader)) == Counter(joined.keys())
    with pytest.raises(UsageError, match="several samples have this key"):
        joined["0001"]


def test_they_convert_as_a_list_does(parts, tmp_path):
    joined = shardkit.concatenate(parts)
    for name, source in (("list", parts), ("one", joined)):
        shardkit.convert(source, "wds", tmp_path / name, shard_samples=6, workers=0)
    assert files_of(tmp_path / "list") == files_of(tmp_path / "one")
    view = joined.select(np.random.default_rng(1).permutation(31)[:20])
    for workers in (0, 2):
        out = tmp_path / f"view{workers}"
        shardkit.convert(view, "arrow", out, shard_samples=6, workers=workers)
    assert files_of(tmp_path / "view0") == files_of(tmp_path / "view2")
    found = shardkit.open(tmp_path / "view0")
    assert found.classes == joined.classes
    assert [s["__key__"].partition("/")[2] for s in found] == view.keys()
    assert [(s["label"], s["text"]) for s in found] == [(s["label"], s["text"]) for s in view]
    assert shardkit.verify(tmp_path / "view0", view).sound
    assert not shardkit.verify(tmp_path / "view0", view[:-1]).sound
    assert shardkit.convert(view, "arrow", out, shard_samples=6).already_complete
    with pytest.raises(UsageError):
        shardkit.convert(view[::-1], "arrow", out, shard_samples=6, workers=0)


def test_what_cannot_be_concatenated(parts, tmp_path):
    for given in ([], parts[0], [parts[0], "shards"], None):
        with pytest.raises(UsageError, match="needs a list of datasets"):
            shardkit.concatenate(given)  # type: ignore[arg-type]
    with shardkit.create(tmp_path / "x", "wds", schema={"label": Text()}) as writer:
        writer.write({"__key__": "1", "label": "cat"})
    with pytest.raises(FormatError, match="'label' differs between datasets"):
        shardkit.concatenate([parts[0], shardkit.open(tmp_path / "x")])
    plain = write(tmp_path / "plain", "wds", None, 4)
    with pytest.raises(FormatError, match="with labels without") as caught:
        shardkit.concatenate([parts[0], plain])
    assert "the same type and class names" in str(caught.value.fix)
