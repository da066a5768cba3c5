"""What is not of the type that a function takes is refused with a sentence, and a way out."""

import contextlib
import inspect
import itertools

import datasets
import numpy as np
import pytest
from torch.utils.data import DataLoader

import shardkit
import shardkit.stream
from shardkit import Array, Int, Schema, concatenate, convert
from shardkit.metadata.recipe import Recipe

ROWS = [{"label": number} for number in range(3)]
ONE = Schema({"label": Int()})
HF_SPLITS = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda out: convert((row for row in ROWS), "wds"), "need an output"),
        (
            lambda out: convert((row for row in ROWS), "wds", out, part="1/2"),
            "generator is only in",
        ),
        (lambda out: convert(iter(ROWS), "wds", out, engine="ray"), "fix: write it to a file"),
        (lambda out: convert(DataLoader(ROWS, 2), "wds", out), "DataLoader gives batches"),
        (lambda out: convert({"label": 3}, "wds", out), "found: 'label': int"),
        (lambda out: convert({"a": [1], "b": [1, 2]}, "wds", out), "found: a: 1, b: 2"),
        (lambda out: convert(HF_SPLITS, "wds", out), "found: 'train': Dataset"),
        (lambda out: convert(ROWS, None, out), "there is no format 'None'"),
        (lambda out: convert(ROWS, "wds", 5), "a path must be text"),
        (lambda out: convert(ROWS, "wds", out, split={"train": 1.0}), "invalid split"),
        (lambda out: convert(ROWS, "wds", out, split=0.9), "invalid split"),
        (lambda out: convert(ROWS, "wds", out, stratify=["label"]), "stratify must be text"),
        (lambda out: convert(ROWS, "wds", out, rename=["label"]), "rename must be a dict"),
        (lambda out: convert(ROWS, "wds", out, classes=5), "classes must be a list"),
        (lambda out: convert(ROWS, "wds", out, schema=["label"]), "a schema must be a dict"),
        (lambda out: convert(ROWS, "wds", out, resize="256"), "resize must be a whole number"),
        (lambda out: shardkit.create(out, "wds", {5: Int()}), "the name of a field must be text"),
        (lambda out: shardkit.open([str(out)]), "fix: open each path, and join the datasets"),
        (lambda out: shardkit.open(None), "a path must be text"),
        (lambda out: shardkit.verify(b"out"), "a path must be text"),
        (lambda out: Array("float33"), "cannot have this dtype"),
        (lambda out: Array(object), "cannot have this dtype"),
        (lambda out: Array("f4", 3), "the shape of an array"),
        (lambda out: Array("f4", (3, -1)), "the shape of an array"),
        (lambda out: shardkit.verify(out, decode="yes"), "decode must be True or False"),
        (lambda out: shardkit.inspect(out, samples="all"), "samples must be a whole number"),
        (lambda out: shardkit.media_info(5), "data must be the bytes"),
        (lambda out: shardkit.masks([], "3", 4), "height and width are numbers of pixels"),
        (lambda out: convert(ROWS, "wds", out, part=5), "invalid part"),
        (lambda out: convert(ROWS, ["wds"], out), "there is no format"),
        (lambda out: shardkit.StreamOptions(batching=5), "batching must be a Bucket"),
        (lambda out: shardkit.Dataset.from_sequence(ROWS, ONE).column(["label"]), "no field"),
        (lambda out: concatenate(["out"]), "concatenate needs a list of datasets"),
        (lambda out: concatenate([]), "concatenate needs a list of datasets"),
        (lambda out: shardkit.Dataset.from_sequence(ROWS), "these samples have no schema"),
    ],
)
def test_it_is_refused(call, words, tmp_path):
    with pytest.raises(shardkit.UsageError) as error:
        call(tmp_path / "out")
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


VALUES: list[object] = [
    *(None, -1, 0, 3.5, float("nan"), 10**30, True, "big", "", b"x", [], ["a"], [1], ("x", 2), {1}),
    *({}, {"a": 1}, object(), np.array([1, 2]), int, len),
]
OPTIONS = (
    *(shardkit.ConvertOptions, shardkit.ImageOptions, shardkit.AudioOptions, shardkit.TextOptions),
    *(shardkit.StreamOptions, shardkit.Bucket, shardkit.Dynamic, shardkit.Pack),
)


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_of_any_value_are_taken_or_refused(kind):
    """No bare error: neither when they are made, nor when a recipe is made of them."""
    parameters = inspect.signature(kind).parameters
    needed = {name: 8 for name, p in parameters.items() if p.default is inspect.Parameter.empty}
    taken = 0
    for name, value in itertools.product(parameters, VALUES):
        with contextlib.suppress(shardkit.UsageError):
            made = kind(**{**needed, name: value})
            if kind is shardkit.ConvertOptions:
                Recipe.of("wds", made).to_json()
            taken += 1
    assert 0 < taken < len(parameters) * len(VALUES) / 2


@pytest.mark.parametrize("name", inspect.signature(convert).parameters)
def test_arguments_of_convert_of_any_value_are_taken_or_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a text is a path
    own = {"source": ROWS, "to": "wds", "out": tmp_path / "out", "workers": 0}
    if name in ("progress", "workers"):  # the user's function; as many processes as are asked for
        return
    for value in VALUES:
        with contextlib.suppress(shardkit.ShardkitError):
            convert(**{**own, "overwrite": True, name: value})


def test_what_is_no_sample_and_no_batch_is_named(tmp_path):
    with shardkit.create(tmp_path / "out", "wds", {"label": Int()}) as writer:
        with pytest.raises(shardkit.SampleError, match="not a dict of fields"):
            writer.write([1])
        writer.write({"label": 1})
    loader = shardkit.stream.Loader(tmp_path / "out", batch_size=1, collate=lambda rows: rows)
    with pytest.raises(shardkit.UsageError, match="did not return a batch") as error:
        next(iter(loader))
    assert "list, from tests.test_wrong_types." in str(error.value.found)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    (tmp_path / "tokenizer.json").write_text(pointer)
    (tmp_path / "a.txt").write_text("a")
    text = shardkit.TextOptions(tokenizer=tmp_path / "tokenizer.json")
    with pytest.raises(shardkit.DamagedError, match="pointer of git-lfs"):
        convert(tmp_path / "a.txt", "wds", tmp_path / "tokens", text=text)


def test_the_ways_out_work(tmp_path):
    columns = {"label": [1, 2], "name": ["a", "b"]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    convert(datasets.Dataset.from_list(rows), "wds", tmp_path / "out")  # which has to_dict, too
    dataset = shardkit.open(tmp_path / "out")
    assert [sample["name"] for sample in dataset] == ["a", "b"]
    schema = Schema({"label": Int()})
    unnamed = shardkit.Dataset.from_sequence([{"__key__": "c", "label": 3}], schema)
    joined = concatenate([unnamed, dataset[0:0], dataset])
    assert [sample["label"] for sample in joined] == [3, 1, 2]
    assert Array(np.float32, [np.int64(3), None]).shape == (3, None)
