"""Options by name: the command line, keyword arguments, their types and recipes agree."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.keywords import docs_of
from shardkit.options import (
    AudioOptions,
    ConvertKeywords,
    ConvertOptions,
    ImageOptions,
    TextOptions,
)
from shardkit.performance.bench import Sweep, SweepKeywords, bench
from shardkit.recipe import Recipe
from shardkit.stream import Loader, StreamingDataset
from shardkit.stream.options import LoaderKeywords, StreamKeywords, StreamOptions
from shardkit.tensorflow import dataset as tensors
from shardkit.torch import Loader as TorchLoader
from shardkit.torch import StreamingDataset as TorchDataset

OPTIONS = [ConvertOptions, ImageOptions, AudioOptions, TextOptions, StreamOptions, Sweep]
# Each function, and the dataclass whose fields it takes by name.
TAKES: list[tuple[Callable[..., Any], type[Any]]] = [
    (shardkit.convert, ConvertOptions),
    (bench, Sweep),
    *((kind, StreamOptions) for kind in (StreamingDataset, Loader, TorchDataset, TorchLoader)),
    (tensors, StreamOptions),
    (shardkit.doctor, StreamOptions),
]


def default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def test_the_docstring_of_options_tells_of_each():
    for kind in OPTIONS:
        assert list(docs_of(kind)) == [field.name for field in dataclasses.fields(kind)]


def test_keywords_for_type_checkers_are_the_options():
    for keywords, kind in (
        (ConvertKeywords, ConvertOptions), (StreamKeywords, StreamOptions), (SweepKeywords, Sweep)
    ):  # fmt: skip
        found = {name: type.__forward_arg__ for name, type in keywords.__annotations__.items()}
        assert found == {field.name: field.type for field in dataclasses.fields(kind)}


def test_keywords_of_loaders_are_their_arguments():
    own = set(LoaderKeywords.__annotations__) - set(StreamKeywords.__annotations__)
    given = inspect.signature(Loader).parameters
    assert own == set(given) - {"source"} - {f.name for f in dataclasses.fields(StreamOptions)}
    annotations = LoaderKeywords.__annotations__
    assert all(annotations[name].__forward_arg__ == given[name].annotation for name in own)


@pytest.mark.parametrize(("function", "kind"), TAKES)
def test_signatures_have_each_option_with_its_default(function, kind):
    given = inspect.signature(function).parameters
    assert not [p for p in given.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    text = f"{function.__doc__}\n{function.__init__.__doc__}"  # type: ignore[misc]
    for field in dataclasses.fields(kind):
        assert given[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert given[field.name].default == default(field)
        assert given[field.name].annotation == field.type
        assert f"\n{field.name}: " in text.replace("\n    ", "\n")


def test_the_command_line_has_each_option_with_its_default():
    command = importlib.import_module("shardkit.cli.convert").command
    found = command.make_context("convert", ["photos", "--to", "wds"]).params
    every = [field for kind in OPTIONS[:4] for field in dataclasses.fields(kind)]
    inner = {"image", "audio", "text"}
    flat = {field.name: default(field) for field in every if field.name not in inner}
    assert len(flat) == len(every) - len(inner)
    for name, usual in flat.items():
        assert (found[name] or None) == (usual or None), name
    rest = {"source", "to", "out", "plan_only", "part", "storage_options", "quiet", "as_json"}
    assert set(found) - set(flat) == rest


def test_bench_has_each_option_with_its_default():
    command = importlib.import_module("shardkit.cli.bench").command
    found = command.make_context("bench", ["shards"]).params
    for field in dataclasses.fields(Sweep):
        usual = default(field)
        value = tuple(found[field.name]) if isinstance(usual, tuple) else found[field.name] or None
        assert value == usual, field.name


def test_choices_of_the_command_line_are_those_of_the_options():
    """Each is taken, and another one is refused with the same list."""
    command = importlib.import_module("shardkit.cli.convert").command
    tokens = {"seq_len": 8, "tokenizer": "x"}
    also = dict.fromkeys(("pack", "remainder", "special_tokens"), tokens)
    also["resize_mode"] = {"resize": 8}
    tried = 0
    for param in command.params:
        if not isinstance(param.type, click.Choice):
            continue
        kind = next(k for k in OPTIONS if param.name in {f.name for f in dataclasses.fields(k)})
        for choice in param.type.choices:
            kind(**{param.name: choice, **also.get(param.name, {})})
            tried += 1
        with pytest.raises(UsageError) as caught:
            kind(**{param.name: "none such", **also.get(param.name, {})})
        words = ", ".join(map(repr, param.type.choices))
        assert caught.value.what.endswith(f"must be one of {words}")
    assert tried > 25


def test_recipes_have_the_options_that_decide_what_is_made():
    options = {field.name for field in dataclasses.fields(ConvertOptions)}
    recipe = {field.name for field in dataclasses.fields(Recipe)}
    run = {"max_errors", "overwrite", "workers", "engine", "ray_address", "ray_options"}
    assert options - recipe == run  # how, not what
    assert recipe - options == {"format", "sources", "image_defaults", "tokenizer"}
    usual, made = Recipe(""), Recipe.of("", ConvertOptions())
    for name in (options & recipe) - {"shard_size", "seed", "shuffle"}:
        assert getattr(made, name) == getattr(usual, name), name


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: shardkit.convert("a", "wds", shard_sise=1), "shard_size"),  # type: ignore[call-arg]
        (lambda: shardkit.open("a", transform={}), "transforms"),  # type: ignore[call-arg]
        (lambda: shardkit.verify("a", decod=True), "decode"),  # type: ignore[call-arg]
        (lambda: shardkit.inspect("a", sample=3), "samples"),  # type: ignore[call-arg]
        (lambda: shardkit.merge("a", outt="b"), "out"),  # type: ignore[call-arg]
        (lambda: shardkit.create("a", "wds", {}, shardsize=3), "shard_size"),  # type: ignore[call-arg]
        (lambda: shardkit.doctor("a", second=1), "seconds"),  # type: ignore[call-arg]
        (lambda: bench(["a"], treads=[1]), "threads"),  # type: ignore[call-arg]
        (lambda: Loader("a", batchsize=1), "batch_size"),  # type: ignore[call-arg]
        (lambda: TorchLoader("a", pin_memry=True), "pin_memory"),  # type: ignore[call-arg]
        (lambda: StreamingDataset("a", shufle=True), "shuffle"),  # type: ignore[call-arg]
        (lambda: TorchDataset("a", shufle=True), "shuffle"),  # type: ignore[call-arg]
        (lambda: StreamingDataset("a").with_options(sed=1), "seed"),  # type: ignore[call-arg]
        (lambda: tensors("a", epoch=1), "epochs"),  # type: ignore[call-arg]
        (lambda: ConvertOptions.of(shard_sise=1), "shard_size"),  # type: ignore[call-arg]
        (lambda: StreamOptions.of(shufle=1), "shuffle"),  # type: ignore[call-arg]
    ],
)
def test_a_mistyped_keyword_is_told_what_may_have_been_meant(call, meant):
    with pytest.raises(UsageError, match="there is no option") as caught:
        call()
    assert f"did you mean {meant}" in str(caught.value.expected)


USER = """
import shardkit
from shardkit.stream import Loader
from shardkit.torch import Loader as TorchLoader

result = shardkit.convert("photos", "wds", shard_size="1GB", workers=2)
samples: int = result.samples
report = shardkit.verify("out", decode=True)
sound: bool = report.sound
dataset = shardkit.open("out")
count: int = len(dataset)
loader = Loader(dataset, batch_size=8, shuffle=True, threads=2)
on_gpu = TorchLoader("out", batch_size=8, device="cuda", prefetch=2)
about = shardkit.inspect("out", samples=1)["fields"]
"""
WRONG = {
    'shardkit.convert("photos", "wds", shard_samples="many")': "shard_samples",
    'shardkit.convert("photos", "wds", shufle=True)': "shufle",
    'shardkit.verify("out", decode="yes")': "decode",
    'shardkit.open("out", transforms=3)': "transforms",
    'shardkit.inspect("out", samples="all")': "samples",
    'Loader("out", batch_size="8")': "batch_size",
    'Loader("out", threads="two")': "threads",
    'TorchLoader("out", shuffle="yes")': "shuffle",
    'TorchLoader("out", prefetch="2")': "prefetch",
}


# As a user's strict rules, without the time that the types of large libraries take.
MYPY = """
[mypy]
strict = True
[mypy-torch.*,tensorflow.*,pyarrow.*,PIL.*,pandas.*,ray.*,datasets.*,tokenizers.*,obstore.*,fsspec.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.mark.large
def test_type_checkers_see_the_types_of_options(tmp_path):
    """mypy, with its strict rules: a user's script passes, and each wrong line is refused."""
    script, rules = tmp_path / "script.py", tmp_path / "mypy.ini"
    right = USER.strip().splitlines()
    script.write_text("\n".join([*right, *WRONG]))
    rules.write_text(MYPY)
    words = ["--config-file", rules, "--cache-dir", tmp_path / "cache", script]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *words],
        capture_output=True, text=True, check=False, cwd=Path(shardkit.__file__).parents[1],
    )  # fmt: skip
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    told = {int(line.split(":")[1]): line for line in errors if line.startswith(str(script))}
    assert sorted(told) == [len(right) + 1 + n for n in range(len(WRONG))], found.stdout
    for number, (line, name) in enumerate(WRONG.items(), len(right) + 1):
        assert f'"{name}"' in told[number], line
