"""Options by name: the command line, keyword arguments, types and recipes; what makes no sense."""

import copy
import dataclasses
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import click
import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.helpers import familiar
from shardkit.helpers.keywords import called_by, docs_of
from shardkit.metadata.recipe import Recipe
from shardkit.options import (
    CHROMA,
    GROUPS,
    IMAGE_DEFAULTS,
    IMAGE_FORMATS,
    RESIZE_MODES,
    AudioOptions,
    ConvertKeywords,
    ConvertOptions,
    ImageOptions,
    TextOptions,
)
from shardkit.performance.bench import Sweep, SweepKeywords, bench
from shardkit.stream import Loader, StreamingDataset
from shardkit.stream.options import LoaderKeywords, StreamKeywords, StreamOptions
from shardkit.tensorflow import dataset as tensors
from shardkit.torch import Loader as TorchLoader
from shardkit.torch import StreamingDataset as TorchDataset

OPTIONS = [ConvertOptions, ImageOptions, AudioOptions, TextOptions, StreamOptions, Sweep]
# Each function, and the dataclass whose fields it takes by name.
TAKES: list[tuple[Callable[..., Any], type[Any]]] = [
    *((shardkit.convert, kind) for kind in (ConvertOptions, *GROUPS.values())),
    (bench, Sweep),
    *((kind, StreamOptions) for kind in (StreamingDataset, Loader, TorchDataset, TorchLoader)),
    (tensors, StreamOptions),
    (shardkit.doctor, StreamOptions),
]


def default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def test_docstrings_and_keywords_for_type_checkers_have_each_option():
    for kind in OPTIONS:
        assert list(docs_of(kind)) == [field.name for field in dataclasses.fields(kind)]
    for keywords, kinds in (
        (ConvertKeywords, (ConvertOptions, *GROUPS.values())),
        (StreamKeywords, [StreamOptions]),
        (SweepKeywords, [Sweep]),
    ):
        found = {name: type.__forward_arg__ for name, type in keywords.__annotations__.items()}
        assert found == {called_by(f): f.type for kind in kinds for f in dataclasses.fields(kind)}
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
        name = called_by(field)
        assert given[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert given[name].default == default(field)
        assert given[name].annotation == field.type
        assert f"\n{name}: " in text.replace("\n    ", "\n")


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
    typed = {param.opts[-1].lstrip("-").replace("-", "_") for param in command.params}
    assert typed | {"storage_options", "ray_options"} >= {called_by(f) for f in every} - inner
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
    also["loss_on"] = {"chat_template": "auto", **tokens}
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
    assert recipe - options == {"format", "sources", "image_defaults", "tokenizer", "chat_template"}
    usual, made = Recipe(""), Recipe.of("", ConvertOptions())
    for name in (options & recipe) - {"shard_size", "seed", "shuffle"}:
        assert getattr(made, name) == getattr(usual, name), name


def test_options_by_name_are_those_of_objects_and_of_the_command_line(images, tmp_path):
    asked = {"resize": 8, "image_format": "jpeg", "quality": 80}
    image = ImageOptions(resize=8, format="jpeg", quality=80)
    shardkit.convert(images, "wds", tmp_path / "a", workers=0, **asked)
    shardkit.convert(images, "wds", tmp_path / "b", workers=0, image=image)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    command = importlib.import_module("shardkit.cli.convert").command
    command.main([str(images), "--to=wds", f"-o{tmp_path / 'c'}", *words], standalone_mode=False)
    files = [[*(tmp_path / name).rglob("*.*")] for name in "abc"]
    stored = [{path.name: path.read_bytes() for path in found} for found in files]
    assert stored[0]
    assert stored[0] == stored[1] == stored[2]
    for options, words in (
        ({"image": image, "quality": 3}, "quality= cannot be combined with image="),
        ({"seq_len": 8}, "seq_len requires a tokenizer"),
        ({"format": "jpeg"}, "there is no option 'format'"),
    ):
        with pytest.raises(UsageError, match=words):
            shardkit.convert(images, "wds", tmp_path / "d", **options)


def test_a_mistyped_keyword_is_told_what_may_have_been_meant():
    for function, given, options in (
        (shardkit.convert, ("a", "wds"), "shard_sise shard_size"),
        (shardkit.open, ("a",), "transfroms transforms"),
        (shardkit.verify, ("a",), "decod decode"),
        (shardkit.inspect, ("a",), "sample samples"),
        (shardkit.merge, ("a",), "outt out"),
        (shardkit.create, ("a", "wds", {}), "shardsize shard_size"),
        (shardkit.doctor, ("a",), "second seconds"),
        (bench, (["a"],), "treads threads"),
        (Loader, ("a",), "batchsize batch_size"),
        (TorchLoader, ("a",), "pin_memry pin_memory"),
        (StreamingDataset, ("a",), "shufle shuffle"),
        (TorchDataset, ("a",), "shufle shuffle"),
        (StreamingDataset("a").with_options, (), "sed seed"),
        (tensors, ("a",), "epoch epochs"),
        (ConvertOptions.of, (), "shard_sise shard_size"),
    ):
        mistyped, meant = options.split()
        with pytest.raises(UsageError, match="there is no option") as caught:
            function(*given, **{mistyped: 1})
        assert f"did you mean {meant}" in str(caught.value.expected)


# What is given, and the beginning of what the error says instead; "-": no option, so no name.
FAMILIAR = {
    TorchLoader: {
        "num_workers prefetch_factor drop_last collate_fn": "threads prefetch last collate",
        "sampler batch_sampler shuffle_seed generator": "sampling batching seed seed",
        "num_canonical_nodes shuffle_block_size shardshuffle order": "parts window shuffle shuffle",
        "cache_dir os_cache pipelines columns": "cache cache transforms fields",
        "local remote split streaming nodesplitter": "cache cache - - -",
        "persistent_workers worker_init_fn validate_hash": "- - -",
    },
    shardkit.convert: {
        "num_workers threads format output": "workers workers to out",
        "maxcount maxsize chunk_bytes size_limit": "shard_samples shard_size shard_size shard_size",
        "num_shards force hashes": "shard_samples overwrite -",
        "delimiter header packing assistant_only_loss": "- columns seq_len loss_on",
    },
    shardkit.create: {"columns maxcount": "schema shard_samples"},
    shardkit.open: {"transform split streaming": "transforms - -"},
}


def test_the_options_of_other_libraries_lead_to_ours():
    for function, cases in FAMILIAR.items():
        options = inspect.signature(function).parameters
        for words, ways in cases.items():
            for word, way in zip(words.split(), ways.split(), strict=True):
                with pytest.raises(UsageError) as caught:
                    function(**{word: 1})
                assert caught.value.expected is None
                beginning = re.match(r"write (\w+)=", caught.value.fix)
                assert way == (beginning[1] if beginning else "-"), word
                assert way in options or way == "-"
    with pytest.raises(UsageError, match="write batch_size=VALUE, in lower case"):
        Loader("a", BATCH_SIZE=1)


def test_the_attributes_of_other_libraries_lead_to_ours(tmp_path):
    with shardkit.create(tmp_path / "a", "wds", {"n": shardkit.Int()}) as writer:
        writer.write({"__key__": "a", "n": 1})
    dataset = shardkit.open(tmp_path / "a")
    loaders = [kind(dataset, batch_size=1) for kind in (Loader, TorchLoader, TorchDataset)]
    names = {name for words in familiar._ATTRIBUTES for name in words.split()}
    for owner in (shardkit, dataset, dataset[:1], *loaders):
        for name in names - set(dir(owner)):
            with pytest.raises(AttributeError, match=f"no attribute {name!r}; instead: "):
                getattr(owner, name)
        assert not hasattr(owner, "map")  # as other libraries ask
        with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
            _ = owner.nonsense
    assert all(name not in dir(dataset) or name not in dir(loaders[0]) for name in names)
    with pytest.raises(ImportError, match=r"instead: from shardkit\.torch import Loader"):
        from shardkit import Loader as _
    with pytest.raises(shardkit.MissingKeyError, match=r"dataset\.column\('n'\)"):
        _ = dataset["n"]
    with pytest.raises(UsageError, match=r"shardkit\.open\('shards'\)"):
        shardkit.Dataset("shards")
    assert pickle.loads(pickle.dumps(dataset))[0]["n"] == copy.copy(dataset)[0]["n"] == 1


def test_an_error_inside_of_a_property_is_not_hidden():
    class Broken(familiar.Familiar):
        @property
        def features(self):
            return None.wrong

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'wrong'"):
        _ = Broken().features


USER = """
import shardkit
from shardkit.stream import Loader
from shardkit.torch import Loader as TorchLoader

result = shardkit.convert("photos", "wds", shard_size="1GB", workers=2, resize=256, mono=True)
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
    'shardkit.convert("photos", "wds", resize="256")': "resize",
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


BAD = {
    "resize": (0, -1, 1.5, "256", [256]),
    "quality": (0, 101, 89.5, "90"),
    "min_size": (0, -5, 2.0, "8"),
    "max_pixels": (0, -5, 1e6, "1"),
    "max_aspect": (0, 0.99, -2, float("nan"), "3", 1j),
    "format": ("jpg", "gif", "JPEG", None, ""),
    "chroma": ("440", "4:2:0", 420, ""),
    "icc": ("rgb", True, ""),
    "check": ("all", None, True),
    "resize_mode": ("middle", "SHORTER", None, ""),
    "background": (
        *("whitest", "#ggg", "#12345", "rgb(1,2)", "", "x" * 1000, 0, (1, 2, 3), b"white"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_name(name):
    for bad in BAD[name]:
        with pytest.raises(UsageError) as caught:
            ImageOptions(**{"resize": 8, name: bad})
        assert caught.value.what.startswith(name)
        assert caught.value.found == (str(bad) if bad == 101 else repr(bad))


def test_options_that_contradict_each_other_or_would_change_are_refused():
    for options, fix in (
        ({"upscale": True}, "resize"),
        ({"resize_mode": "crop"}, "resize"),
        ({"format": "raw", "icc": "keep"}, "icc"),
    ):
        with pytest.raises(UsageError) as caught:
            ImageOptions(**options)
        assert fix in str(caught.value.fix)
    with pytest.raises(FrozenInstanceError):
        ImageOptions().resize = 8
    with pytest.raises(UsageError, match="image must be"):
        ConvertOptions(image={"resize": 8})


def test_good_values_are_kept_and_colours_stored_alike():
    for good in (
        *({"resize": side} for side in (1, 256, 10**6)),
        *({"resize": 8, "resize_mode": mode, "upscale": True} for mode in RESIZE_MODES),
        *({"format": format, "icc": "srgb"} for format in IMAGE_FORMATS),
        *({"quality": quality} for quality in (1, 100)),
        *({"chroma": chroma} for chroma in CHROMA),
        *({"max_aspect": aspect} for aspect in (1, 1.5, 20)),
        {"format": "png", "icc": "keep"},
        {"min_size": 1, "max_pixels": 1, "check": "decode"},
    ):
        options = ImageOptions(**good)
        assert {name: getattr(options, name) for name in good} == good
    for stored, *colours in (
        ("#ffffff", "white", "White", "#fff", "#FFF"),
        ("#808080", "#808080"),
        ("#12abcd", "#12aBcD"),
        ("#010203", "rgb(1,2,3)", "rgb(1, 2, 3)"),
        ("#ff0080", "rgb(100%,0%,50%)"),
        ("#00ff00", "hsl(120, 100%, 50%)"),
        ("#6495ed", "cornflowerblue"),  # CSS Color 4, 6.1
    ):
        for colour in colours:
            options = ImageOptions(background=colour)
            assert options.background == stored
            assert options == ImageOptions(background=stored)


def test_pixels_may_change_by_what_was_asked_for_and_not_by_filters():
    pixels = [{"resize": 256, **more} for more in ({}, {"resize_mode": "crop"}, {"upscale": True})]
    pixels += [{"format": "jpeg"}, {"quality": 90}, {"chroma": "420"}, {"icc": "srgb"}]
    pixels += [{"background": "white"}, IMAGE_DEFAULTS]
    filters = [{"min_size": 1}, {"max_aspect": 1.0}, {"max_pixels": 1}, {"check": "decode"}]
    filters += [{"masks": "none"}, {"boxes": "none"}]
    tried = {name for given in (*pixels, *filters) for name in given}
    assert tried == {field.name for field in fields(ImageOptions)}
    # Even the defaults, where they are asked for: images that have not got them are re-encoded.
    for given in (*pixels, *filters, *({name: v} for name, v in IMAGE_DEFAULTS.items())):
        assert ImageOptions(**given).active
    assert all(ImageOptions(**given).pixels for given in pixels)
    assert not any(ImageOptions(**given).pixels for given in filters)
    assert not ImageOptions().pixels
    assert not ImageOptions().active
    assert ConvertOptions().image == ImageOptions()
    made = [
        Recipe.of("wds", ConvertOptions(**given)).to_json()["image"]
        for given in ({}, {"image": ImageOptions()}, {"image": ImageOptions(background="#fff")})
    ]
    assert made[:2] == [None, None]
    assert made[2]["background"] == "#ffffff"
