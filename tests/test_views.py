"""Views of datasets: slices, numbers, conditions, keys and fields; several datasets as one."""

import copy
import pickle
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.statistics import values_of
from shardkit.dataset.views import size_of
from shardkit.errors import FormatError, MissingKeyError, OutputError, SampleError, UsageError
from shardkit.formats import FORMATS
from shardkit.performance.checks import convert_command
from shardkit.schema import Array, Bool, Bytes, Int, Json, Schema, Text
from shardkit.stream.loader import Loader
from shardkit.testing import assert_same
from tests.conftest import few, files_of
from tests.stream.data import keys, real_keys, same, through_json, write_documents, write_photos

SAMPLES = 37
MANY = 10**8


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("views") / "out")


@pytest.fixture
def ds(out):
    return shardkit.open(out)


def labels(dataset: Any) -> list[int]:
    return [sample["label"] for sample in dataset]


def test_views_of_views_are_as_those_of_lists(ds):
    expected, view = list(range(SAMPLES)), ds
    steps = [
        slice(None), slice(30), slice(None, None, -1), slice(2, 25, 3), [5, 0, -1, 5, 2, 1],
        slice(None, None, -2), np.array([True, False, True]), slice(1, None), slice(5, 9),
    ]  # fmt: skip
    for step in steps:
        if isinstance(step, slice):
            view, expected = view[step], expected[step]
        elif isinstance(step, list):
            view, expected = view.select(step), [expected[n] for n in step]
        else:
            view = view.select(step)
            expected = [value for value, has in zip(expected, step, strict=True) if has]
        assert labels(view) == expected
        assert view.column("label").tolist() == expected
        assert view.keys() == [f"{n:04d}" for n in expected]
        assert len(view) == len(expected)
        if expected:
            assert view[-1] == view[len(view) - 1] == ds[expected[-1]]
        with pytest.raises(IndexError):
            view[len(expected)]
    assert labels(ds.select(range(-3, 2))) == [34, 35, 36, 0, 1]
    for start, stop, step in np.random.default_rng(3).integers(-50, 50, (20, 3)).tolist():
        cut = slice(start, stop, step or None)
        assert labels(ds[::-3][cut]) == list(range(SAMPLES))[::-3][cut]


def test_what_cannot_be_selected(ds):
    for given, error, words in (
        ([37], IndexError, "index 37 is out of range: there are 37 samples"),
        (range(10**12), IndexError, "index 999999999999 is out of range"),
        ([0.5], UsageError, "float64"),
        ("0003", UsageError, "selected by their numbers"),
        ([[1], [2]], UsageError, r"shape \(2, 1\)"),
        ([[1], [2, 3]], UsageError, "selected by their numbers"),
        (np.ones(36, bool), UsageError, "a mask has one value per sample"),
        (None, UsageError, "selected by their numbers"),
        (slice("a", "b"), UsageError, "invalid slice of samples"),
        (slice(None, None, 0), UsageError, "invalid slice of samples"),
    ):
        with pytest.raises(error, match=words):
            ds[given] if isinstance(given, slice) else ds.select(given)


def test_filters_take_functions_and_conditions(ds, out):
    assert labels(ds.filter(lambda s: s["label"] % 5 == 2)) == [2, 7, 12, 17, 22, 27, 32]
    assert labels(ds[::-1].filter("label < 4 or label == 20")) == [20, 3, 2, 1, 0]
    assert labels(ds.filter("image.width == 48 and label >= 35")) == [35, 36]
    chosen = ds.select(np.random.default_rng(3).integers(0, SAMPLES, 60))
    for text, function in (
        ("caption is null", lambda s: "caption" not in s),
        ("caption > 'image 2'", lambda s: s.get("caption", "") > "image 2"),
        ("key in ('0003', '0004')", lambda s: s["__key__"] in ("0003", "0004")),
    ):
        for view in (ds, chosen[::-1]):
            assert labels(view.filter(text)) == [s["label"] for s in view if function(s)]
    seen = []
    ds[:3].filter(lambda sample: seen.append(sorted(sample)), fields=["caption"])
    assert seen == [["__key__"], ["__key__", "caption"], ["__key__", "caption"]]
    for given, fields, words in (
        ("lable == 3", None, "no field 'lable'"),
        (len, ["lable"], "(?s)no field 'lable'.*did you mean label"),
        ("label == 3", ["label"], "a condition names its fields itself"),
        ({"label": 3}, None, "a condition or a function"),
    ):
        with pytest.raises(UsageError, match=words):
            ds.filter(given, fields=fields)
    # Transforms ride along.
    transforms = {"image": [shardkit.Decode(), shardkit.CenterCrop(16)]}
    ds = shardkit.open(out, transforms=transforms)
    view = ds[::-1].filter(lambda sample: isinstance(sample["image"], bytes))[4:]
    assert len(view) == 33
    assert view[0]["image"].shape == (16, 16, 3)
    assert np.array_equal(view["0007"]["image"], ds[7]["image"])
    assert isinstance(view.column("image")[0], bytes)


@pytest.mark.large  # datasets takes long to import
def test_methods_are_those_of_hugging_face_datasets(ds):
    """As the page on reading says; but slices are columns there, and views here."""
    import datasets

    theirs = datasets.Dataset.from_list([{"label": n} for n in range(SAMPLES)])
    for chosen in ([3, 1, 1, 36], range(5, 20, 3), np.array([36, 0])):
        assert labels(ds.select(chosen)) == theirs.select(chosen)["label"][:]
    some, same_some = (each.filter(lambda s: s["label"] % 3 == 1) for each in (ds, theirs))
    assert labels(some) == same_some["label"][:]
    assert labels(ds[4:-3:2]) == theirs[4:-3:2]["label"]
    assert ds.column("label").tolist() == theirs["label"][:]
    both = datasets.concatenate_datasets([theirs, same_some])
    assert labels(shardkit.concatenate([ds, some])) == both["label"][:]
    for each in (ds, theirs):
        with pytest.raises(IndexError):
            each.select([SAMPLES])


class Endless:
    schema = Schema({"label": Int()})

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"__key__": str(index), "label": index}


def test_views_take_no_memory_or_8_bytes_a_sample(ds):
    many, count = Dataset.from_sequence(Endless()), 1_000_000
    view = many[::-1][10 : MANY // 2 : 2]
    assert view[7]["label"] == MANY - 1 - 10 - 14
    assert len(pickle.dumps(view)) < 2000
    chosen = many.select(np.array([5, 7, MANY - 1]))[1:]
    assert labels(chosen) == [7, MANY - 1]
    for even in ([*range(36, -1, -2)], np.arange(SAMPLES) % 7 == 1):
        assert isinstance(ds.select(even).indices, range)
    some = ds.select(np.random.default_rng(3).permutation(SAMPLES))
    assert len(pickle.dumps(some)) - len(pickle.dumps(ds)) < 8 * SAMPLES + 300
    assert labels(pickle.loads(pickle.dumps(some[3:]))) == labels(some)[3:]
    numbers = np.random.default_rng(0).integers(0, MANY, count)
    tracemalloc.start()
    try:
        view = many.select(numbers)
        turned = view[::-1][1:]
        assert tracemalloc.get_traced_memory()[0] < 8.1 * count
        loader = Loader(turned, batch_size=8, shuffle=True)
        next(iter(loader))
        assert tracemalloc.get_traced_memory()[0] < 18 * count  # in the order of the shards
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        next(iter(Loader(many[::-1], batch_size=8, shuffle=True)))
        assert tracemalloc.get_traced_memory()[1] - before < 8_000_000  # of 100 million samples
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "to", few((name for name in FORMATS if name not in ("megatron", "beton")), "arrow", "wds")
)
def test_columns_are_the_values_in_all_samples(tmp_path, to):
    schema = {
        "n": Int(), "maybe": Int(optional=True), "text": Text(), "data": Json(optional=True),
        "row": Array("float32", (3,)), "tokens": Array("uint16", (None,)),
    }  # fmt: skip
    with shardkit.create(tmp_path / "out", to, schema=schema, shard_samples=7) as writer:
        for n in range(20):
            row, tokens = np.full(3, n, np.float32), np.arange(n, dtype=np.uint16)
            sample = {"__key__": f"a/{n}", "n": -n, "text": "é" * n, "row": row, "tokens": tokens}
            maybe = {"maybe": n, "data": {"n": [n, None]}} if n % 3 else {}
            writer.write({**sample, **maybe})
    every = shardkit.open(tmp_path / "out")
    for ds in (every, every[::-1], every.select([4, 19, 4, 0, 13])):
        samples = list(ds)
        assert ds.columns == list(schema)
        assert ds.keys() == [sample["__key__"] for sample in samples]
        for field in schema:
            column = ds.column(field)
            assert len(column) == len(samples)
            for value, sample in zip(column, samples, strict=True):
                assert np.array_equal(value, sample.get(field))
        assert ds.column("n").dtype == np.int64
        assert (ds.column("row").dtype, ds.column("row").shape) == (np.float32, (len(ds), 3))
        assert {ds.column(f).dtype for f in ("maybe", "text", "data", "tokens")} == {np.dtype("O")}
        assert ds.column("__key__").tolist() == ds.keys()
    with pytest.raises(UsageError, match="no field 'tokns'") as caught:
        every.column("tokns")
    assert "did you mean tokens?" in str(caught.value.expected)


def test_columns_have_a_bound_and_name_what_is_damaged(ds, tmp_path, monkeypatch):
    monkeypatch.setattr("shardkit.dataset.views._CHUNK_BYTES", 5_000)  # about three samples
    assert ds.column("image")[3] == ds[3]["image"]
    assert ds.keys() == [f"{n:04d}" for n in range(SAMPLES)]
    monkeypatch.setattr("shardkit.dataset.views._MAX_BYTES", 20_000)
    with pytest.raises(UsageError, match="more memory than a column may"):
        ds.column("image")
    out = write_photos(tmp_path / "out", samples=9)
    shard = out / "shard-000000.tar"
    shard.write_bytes(shard.read_bytes().replace(b"image 5", b"im\xffge 5"))
    with pytest.raises(SampleError, match="a value is damaged") as caught:
        shardkit.open(out).column("caption")
    assert (caught.value.where["key"], caught.value.where["field"]) == ("0005", "caption")
    schema = Schema({"row": Array("int64", (2,))})
    rows = [{"__key__": str(n), "row": np.zeros(2 + n // 3, np.int64)} for n in range(5)]
    with pytest.raises(SampleError, match="not have the shape") as caught:
        Dataset.from_sequence(rows, schema).column("row")
    assert (caught.value.where["position"], caught.value.found) == (3, "(3,)")


def test_a_loop_gives_the_samples_as_they_are_alone(tmp_path, monkeypatch):
    """They are read several at a time, which the errors and the memory of arrays do not show."""
    schema = {"row": Array("float32", (3,)), "text": Text(), "more": Int(optional=True)}
    with shardkit.create(tmp_path / "out", "wds", schema=schema, shard_samples=40) as writer:
        for n in range(100):
            more = {"more": n} if n % 3 else {}
            row = np.full(3, n, np.float32)
            writer.write({"__key__": f"{n}", "row": row, "text": f"text {n}", **more})
    ds = shardkit.open(tmp_path / "out")
    for view in (ds, ds[::-1], ds.select([70, 3, 70, 99]), ds[:0]):
        alone = [view[n] for n in range(len(view))]
        for sample, expected in zip(view, alone, strict=True):
            assert_same(sample, expected)
            assert sample["row"].flags.owndata
    monkeypatch.setattr("shardkit.dataset.views._MOST_AT_ONCE", 100)
    assert ds.read_many(np.arange(5), ["text"]) is not None
    assert ds.read_many(np.arange(50), ["text"]) is None
    assert [sample["text"] for sample in ds] == [f"text {n}" for n in range(100)]
    ds.transform = lambda sample: {**sample, "text": sample["text"].upper()}
    assert next(sample["text"] for sample in ds[::-1]) == "TEXT 99"
    shard = tmp_path / "out/shard-000001.tar"
    shard.write_bytes(shard.read_bytes().replace(b"text 52", b"text\xff52"))
    seen, ds = [], shardkit.open(tmp_path / "out")
    with pytest.raises(SampleError, match="a value is damaged") as caught:
        seen.extend(sample["__key__"] for sample in ds)
    assert seen == [f"{n}" for n in range(52)]
    assert (caught.value.where["key"], caught.value.where["position"]) == ("52", 12)
    assert len([*values_of(ds, "text")]) == 99


def test_samples_are_found_by_their_keys(ds, out, tmp_path):
    assert ds["0012"] == ds[12]
    assert ds[::-1]["0012"] == ds[12]
    for view, key, there in (
        (ds, "0012", True),
        (ds[:10], "0012", False),
        (ds.select([3, 1, 30]), "0012", False),
        (ds, 12, False),
    ):
        assert (key in view) is there
    assert ds.select([30, 3, 12, 3])["0003"] == ds[3]
    with pytest.raises(KeyError, match="no sample has this key") as caught:
        ds["12"]
    assert isinstance(caught.value, MissingKeyError)
    assert caught.value.expected == "keys such as '0000', '0018', '0036'"
    for path in ("0012.jpg", "train/0012.jpg"):
        with pytest.raises(MissingKeyError) as caught:
            ds[path]
        assert caught.value.fix == "use the key '0012'"
    with pytest.raises(MissingKeyError, match="no key"):
        ds[:0]["0001"]
    for name in ("a.tar", "b.tar"):  # shards of others, which number their samples from zero
        (tmp_path / name).write_bytes((out / "shard-000000.tar").read_bytes())
    ds = shardkit.open(tmp_path)
    with pytest.raises(UsageError, match="several samples have this key") as caught:
        ds["0003"]
    assert caught.value.found == "numbers 3, 11"
    assert ds[:8]["0003"] == ds[3]


def test_lists_of_views_are_loaded_alike_from_any_format_and_by_any_ranks(ds, tmp_path):
    """S1 and S3, with parts."""
    other = shardkit.open(write_photos(tmp_path / "arrow", "arrow"))
    chosen = np.random.default_rng(3).permutation(SAMPLES)[:25]
    options = {"shuffle": True, "window": 16, "parts": 2, "fields": ["label"]}

    def load(ds, batch_size, **place):
        views = [ds.select(chosen), ds[30:3:-2]]
        return list(Loader(views, batch_size=batch_size, **place, **options))

    alone = load(ds, 4)
    assert real_keys(alone) == Counter([*ds.select(chosen).keys(), *ds[30:3:-2].keys()])
    assert all([*map(int, b["__key__"])] == b["label"].tolist() for b in alone)
    assert same(load(other, 4), alone)
    ranks = [keys(load(ds, 2, rank=rank, world_size=2)) for rank in range(2)]
    together = [sorted(one + two) for one, two in zip(*ranks, strict=True)]
    assert together == [sorted(batch) for batch in keys(alone)]


def test_loaders_go_by_the_lengths_rows_and_samples_of_views(ds, tmp_path):
    view = ds.select([30, 2, 31, 3])
    for sampling, expected in (
        (shardkit.Weighted(np.array([0, 1, 0, 3]), samples=8), {"0002": 2, "0003": 6}),
        (shardkit.Balanced("label", samples=8), dict.fromkeys(view.keys(), 2)),
    ):
        loader = Loader(view, batch_size=4, shuffle=True, sampling=sampling)
        assert real_keys(list(loader)) == expected
    lengths = np.random.default_rng(3).integers(1, 60, 120)
    chosen = np.random.default_rng(4).permutation(120)[:50]
    view = shardkit.open(write_documents(tmp_path / "out", lengths)).select(chosen)
    assert view.lengths("tokens").tolist() == lengths[chosen].tolist()
    loader = Loader(view, batching=shardkit.Dynamic(max_tokens=200), shuffle=True)
    assert real_keys(list(loader)) == Counter(view.keys())
    rows = [{"__key__": f"{n}", "row": np.array([n, -n], np.float32)} for n in range(40)]
    schema = {"row": Array("float32", (2,))}
    shardkit.convert(rows, "arrow", tmp_path / "rows", schema=schema, shard_samples=9, workers=0)
    ds = shardkit.open(tmp_path / "rows")
    views = [ds.select([30, 2, 31, 3]), ds[12:28:3], ds[35:]]
    found = {}
    for batch in Loader(views, batch_size=4, shuffle=True, last="short"):
        found |= dict(zip(batch["__key__"], batch["row"].tolist(), strict=True))
    assert found == {f"{n}": [n, -n] for n in (30, 2, 31, 3, *range(12, 28, 3), *range(35, 40))}


def test_a_state_is_of_a_selection(ds):
    view = ds.select(np.random.default_rng(3).permutation(SAMPLES)[:20])
    loader = Loader(view, batch_size=3, shuffle=True)
    whole, states = [], []
    for batch in loader:
        whole.append(batch)
        states.append(through_json(loader.state_dict()))
    for done in (1, 4):
        again = Loader(view, batch_size=3, shuffle=True)
        again.load_state_dict(states[done - 1])
        assert same(list(again), whole[done:])
    # Shuffled, the order of a view does not matter; which samples it has does.
    Loader(view[::-1], batch_size=3, shuffle=True).load_state_dict(states[0])
    for other in (ds, view[1:], ds[:20], ds[::-1][:20]):
        with pytest.raises(UsageError):
            Loader(other, batch_size=3, shuffle=True).load_state_dict(states[0])
    ordered = Loader(view, batch_size=3).state_dict()
    with pytest.raises(UsageError):
        Loader(view[::-1], batch_size=3).load_state_dict(ordered)


def test_views_are_converted(ds, tmp_path):
    view = ds.select(np.random.default_rng(3).permutation(SAMPLES)[:21])[::-1]
    shardkit.convert(view, "wds", tmp_path / "0", shard_samples=4, workers=0)
    assert [*shardkit.open(tmp_path / "0")] == [*view]
    text = "label < 9 and caption is not null"
    shardkit.convert(ds.path, "wds", tmp_path / "where", where=text, workers=0)
    assert [*shardkit.open(tmp_path / "where")] == [*ds.filter(text)]
    assert shardkit.verify(tmp_path / "0", view).sound
    assert len(shardkit.verify(tmp_path / "0", view[1:]).problems) == 1
    assert shardkit.convert(view, "wds", tmp_path / "0", shard_samples=4).already_complete
    for other in (view[::-1], view[:20], ds):
        with pytest.raises(OutputError):
            shardkit.convert(other, "wds", tmp_path / "0", shard_samples=4)
    with pytest.raises(shardkit.ShardkitError, match="0003"):  # twice
        shardkit.convert(ds.select([3, 1, 3]), "wds", tmp_path / "out")
    with pytest.raises(shardkit.ShardkitError, match="the view has no samples"):
        shardkit.convert(ds[:0], "wds", tmp_path / "out")
    with pytest.raises(UsageError, match="the view has no samples"):
        Loader(ds.filter("label > 100"), batch_size=2)


@pytest.mark.parametrize("to", ["wds", "lmdb"])
def test_inspecting_a_view_is_about_its_samples(tmp_path, to):
    ds = shardkit.open(write_photos(tmp_path / "out", to))
    view = ds.select([30, 2, 31, 3, 3])
    report = shardkit.inspect(view, full=True, samples=2)
    assert report["samples"] == 5
    assert [first["__key__"] for first in report["first"]] == ["0030", "0002"]
    counts = {each["label"]: each["samples"] for each in report["classes"]}
    assert counts == {2: 1, 3: 2, 30: 1, 31: 1}
    assert report["media"]["image"]["formats"] == {"jpeg": 5}
    stats = report["fields"]["image"]["stats"]
    lengths = [len(sample["image"]) for sample in view]
    expected = {"count": 5, "bytes": sum(lengths), "max": max(lengths)}
    assert stats is None if to == "lmdb" else stats.items() >= expected.items()
    assert report["bytes"] is None  # `caption` is optional: its sizes are not told by sample
    assert shardkit.inspect(ds) == shardkit.inspect(tmp_path / "out")
    assert shardkit.inspect(shardkit.concatenate([view, ds[:3]]))["samples"] == 8


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.large)])
def test_torchs_dataloader_and_random_split_take_them_as_they_are(ds, workers):
    torch_data = pytest.importorskip("torch.utils.data", reason="torch is an extra")
    from shardkit.torch import StreamingDataset

    view = ds.select([30, 2, 31, 3, 5])
    loader = torch_data.DataLoader(view, batch_size=2, num_workers=workers, collate_fn=labels)
    assert [*loader] == [[30, 2], [31, 3], [5]]
    streamed = StreamingDataset(view, batch_size=2, shuffle=True)
    loader = torch_data.DataLoader(streamed, batch_size=None, num_workers=workers)
    assert real_keys(list(loader)) == Counter(view.keys())
    one, other = torch_data.random_split(ds, [30, 7])
    assert sorted(labels(one) + labels(other)) == list(range(SAMPLES))
    assert labels(ds.select(one.indices)) == labels(one)
    with pytest.raises(UsageError, match="cannot be streamed") as caught:
        Loader(one, batch_size=2)
    assert caught.value.fix == "dataset.select(subset.indices) is a view of the same samples"


SCHEMA = {"label": Int(), "text": Text(), "odd": Bool(optional=True), "row": Array("int64", (2,))}


def write(path: Path, to: str, classes: list[str] | None, count: int, **more: Any) -> Dataset:
    """Samples whose text is the name of their class."""
    schema = {**SCHEMA, **more}
    with shardkit.create(path, to, schema=schema, classes=classes, shard_samples=5) as writer:
        for n in range(count):
            label = n % 3 if n % 4 else -1
            sample = {"__key__": f"{path.name}/{n}", "label": label, "row": np.array([n, label])}
            sample["text"] = "none" if label < 0 or classes is None else classes[label]
            odd = {"odd": True} if n % 2 else {}
            writer.write(sample | odd | dict.fromkeys(more, n * 2))
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
    assert joined.column("label").tolist() == [joined[n]["label"] for n in range(len(joined))]
    assert not expected or joined.read_many(np.arange(len(joined)), joined.schema) is not None
    assert joined.column("row").tolist() == [own["row"].tolist() for own in expected]


def test_bytes_that_only_some_datasets_have_are_read_at_once(tmp_path):
    fields = {"a": ("data", Bytes(), b"1"), "b": ("label", Int(), 2)}
    for path, (name, kind, value) in fields.items():
        with shardkit.create(tmp_path / path, "wds", schema={name: kind}) as writer:
            writer.write({"__key__": path, name: value})
    a, b = (shardkit.open(tmp_path / name) for name in "ab")
    for joined in (shardkit.concatenate([a, b]), shardkit.concatenate([b, a])):
        columns = joined.read_many(np.arange(2), ["data"])
        assert columns is not None
        assert columns["data"] == [sample.get("data") for sample in joined]


def test_samples_come_one_dataset_after_the_other(parts):
    a, b, c = parts
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
    again = shardkit.concatenate([shardkit.concatenate(parts[:2]), c])
    assert len(again.parts) == 3
    check(again, every)
    views = shardkit.concatenate([a[2:5], b[::-2], shardkit.concatenate([c, a])[5:9]])
    check(views, [*a[2:5], *b[::-2], *c[5:7], *a[:2]])
    one = shardkit.concatenate([a[2:5], a[7:], a[2:3]])
    assert one.classes == a.classes
    check(one, [*a[2:5], *a[7:], *a[2:3]])


def test_transforms_and_advice_are_those_of_each_dataset(parts):
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
    loader = Loader(shardkit.concatenate([a[:5], b]), batch_size=2)
    commands = [f"shardkit convert {part.place} --to {part.format}" for part in (a, b)]
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
            shardkit.concatenate(given)
    with shardkit.create(tmp_path / "x", "wds", schema={"label": Text()}) as writer:
        writer.write({"__key__": "1", "label": "cat"})
    with pytest.raises(FormatError, match="'label' differs between datasets"):
        shardkit.concatenate([parts[0], shardkit.open(tmp_path / "x")])
    plain = write(tmp_path / "plain", "wds", None, 4)
    with pytest.raises(FormatError, match="with labels without") as caught:
        shardkit.concatenate([parts[0], plain])
    assert "the same type and class names" in str(caught.value.fix)


def test_values_of_json_are_as_large_as_what_is_in_them():
    assert size_of({"a": "x" * 100, "b": [1, 2.5, {"c": np.zeros(3)}]}) == 3 + 100 + 16 + 24
