"""The recipe: written into the manifest, read back, and the same plan built from it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import ConvertOptions, DamagedError, FormatError, ImageOptions, TextOptions
from shardkit import manifest as manifests
from shardkit.conversion import run
from shardkit.conversion.plan import make_plan
from shardkit.conversion.target import Target
from shardkit.recipe import Recipe, identity
from shardkit.sources import open_sources
from tests.codecs import tokenizer_zoo
from tests.conftest import make_image, write_images
from tests.test_verify import rewrite

OPTIONS: list[dict[str, Any]] = [
    {},
    {"on_error": "skip", "limit": 5, "shuffle": True, "seed": 2**64 - 1, "shard_samples": 3},
    {"classes": ["class1", "class0"], "rename": {"image": "jpg"}, "safe_keys": True},
    {"split": "train=0.5,val=0.5", "drop": ["label"], "shard_size": "40kB"},
    {"fields": ["label", "image"], "image": ImageOptions(resize=8, background="red")},
    {"transform": "json:dumps"},
]


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "in", classes=2)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_plan_of_a_recipe_that_was_read_back_is_the_plan_that_made_it(
    options, images, tmp_path
):
    recipe = Recipe.of("arrow", ConvertOptions(**options))
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    if "transform" in options:
        return
    plan = run.prepare(images, "wds", tmp_path / "out", ConvertOptions(**options))
    shardkit.convert(images, "wds", tmp_path / "out", workers=0, **options)
    recipe = Recipe.from_json(manifests.load_any(tmp_path / "out").recipe)
    assert recipe == plan.recipe
    again = make_plan(recipe, open_sources(images, recipe), Target(tmp_path / "out", "wds"))
    assert again.job == plan.job
    cuts, others = (
        [(task.split.name, task.start, task.stop, task.joined) for task in made.tasks]
        for made in (plan, again)
    )
    assert cuts == others
    assert shardkit.verify(tmp_path / "out", against=images).problems == []
    # What is done on errors is in the recipe, and makes no other dataset.
    assert manifests.load_any(tmp_path / "out").recipe["on_error"] == recipe.on_error
    other = {**options, "on_error": "fail" if recipe.on_error == "skip" else "skip"}
    assert shardkit.convert(images, "wds", tmp_path / "out", workers=0, **other).already_complete


def test_the_manifest_says_which_tasks_made_each_shard(tmp_path, monkeypatch):
    images = write_images(tmp_path / "in", classes=10)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 2_000)
    options = {"image": ImageOptions(resize=8), "shard_samples": 10}
    shardkit.convert(images, "arrow", tmp_path / "out", workers=0, **options)
    plan = run.prepare(images, "arrow", tmp_path / "out", ConvertOptions(**options))
    first = 0
    for shard in manifests.load(tmp_path / "out").shards:
        begin, end = (plan.tasks[number] for number in shard.tasks)
        assert begin.start <= first < begin.stop
        first += shard.samples
        assert end.start < first <= end.stop
    assert len(plan.tasks) > 3


def test_the_tokenizer_is_in_the_recipe(tmp_path):
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("".join(f'{{"text": "one two {n}"}}\n' for n in range(50)))
    text = TextOptions(tokenizer=tokenizer_zoo.write_json(tmp_path, "gpt2"), seq_len=16)
    shardkit.convert(corpus, "arrow", tmp_path / "out", text=text, workers=0)
    manifest = manifests.load(tmp_path / "out")
    recipe = Recipe.from_json(manifest.recipe)
    assert recipe.tokenizer == manifest.tokenizer
    assert (recipe.text.tokenizer, recipe.text.seq_len) == (manifest.tokenizer["file"], 16)


def test_classes_are_those_of_the_time_whether_listed_or_found(images, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "found", workers=0)
    (images / "class9").mkdir()  # an empty class that was listed is known to verify
    classes = ["class9", "class1", "class0"]
    shardkit.convert(images, "wds", tmp_path / "listed", classes=classes, workers=0)
    assert shardkit.verify(tmp_path / "listed", against=images).sound
    (images / "class9").rmdir()
    (images / "a").mkdir()
    (images / "a/1.jpg").write_bytes(make_image())
    problems = shardkit.verify(tmp_path / "found", against=images).problems
    assert [problem.what for problem in problems] == [
        "the class names differ from those of the source",
        "a sample of the source is missing",
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    image = ImageOptions(resize=8)
    shardkit.convert(write_images(root / "in"), "wds", root / "out", image=image, workers=0)
    return root / "out"


@pytest.fixture
def change(made, tmp_path):
    def changed(edit):
        rewrite(out := Path(shutil.copytree(made, tmp_path / "out")), edit)
        return out

    return changed


def again(out, made, **options):
    """The conversion that made a dataset, once more."""
    image = ImageOptions(resize=8, **options)
    return shardkit.convert(made.parent / "in", "wds", out, image=image, workers=0)


@pytest.mark.parametrize(("where", "name"), [((), "shear"), (("image",), "sharpen"), ((), "part")])
def test_an_option_of_a_later_version_is_no_damage(where, name, change, made):
    def newer(value):
        def edit(data):
            entry = data["recipe"]
            for key in where:
                entry = entry[key]
            entry[name] = value

        return edit

    out = change(newer("yes"))
    assert shardkit.verify(out).sound
    with pytest.raises(FormatError, match="does not know") as error:
        shardkit.verify(out, against=made.parent / "in")
    assert error.value.found == ".".join((*where, name))
    with pytest.raises(shardkit.OutputError, match="another dataset"):
        again(out, made)
    shutil.rmtree(out)
    assert shardkit.verify(change(newer(None)), against=made.parent / "in").sound


def _without_recipe(data):
    recipe = data.pop("recipe")
    del recipe["format"], recipe["classes"], recipe["on_error"], recipe["tokenizer"]
    data["source"] = recipe.pop("sources")
    data["options"] = recipe


@pytest.mark.parametrize(
    "edit",
    [
        _without_recipe,  # as earlier versions wrote it
        lambda data: [data["recipe"]["image"].pop(n) for n in ("upscale", "check")],
        lambda data: data["recipe"]["image"].update(later=None),
        lambda data: data["recipe"]["image"].update(later={}),
        lambda data: data["recipe"]["image_defaults"].update(later=False),
    ],
)
def test_options_of_other_versions_that_ask_for_nothing_make_no_other_dataset(edit, change, made):
    out = change(edit)
    assert again(out, made).already_complete
    if edit is _without_recipe:
        assert shardkit.verify(out, against=made.parent / "in").sound
        return
    with pytest.raises(shardkit.OutputError, match="another dataset") as error:
        again(out, made, check="decode")
    assert error.value.found == "check was header, is decode"


def test_what_differs_has_another_identity():
    for one, other in [
        ({"text": {"append_eos": None}}, {"text": {"append_eos": False}}),
        ({"image": {"quality": 90}}, {"image": {"quality": 80}}),
        ({"image": {"quality": 90}}, {"image": None}),
        ({"sources": {"a": "x", "b": None}}, {"sources": {"a": "x"}}),
        ({"tokenizer": {"eos_id": 0}}, {"tokenizer": {"eos_id": None}}),
    ]:
        assert identity(one) != identity(other)


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("sources", 5, "recipe.sources"),
        ("sources", {"": 5}, r'recipe.sources\[""\]'),
        ("classes", [1], r"recipe.classes\[0\]"),
        ("classes", 5, "recipe.classes"),
        ("limit", -1, "recipe.limit"),
        ("image", {"resize": "x"}, "recipe.image.resize"),
        ("image", {"resize": -1}, "recipe.image"),
        ("text", {"tokenizer": "x"}, "recipe"),
        ("tokenizer", {"kind": "bpe"}, "recipe.tokenizer"),
        ("transform", {"name": "x", "digest": "y"}, "recipe.transform.digest"),
        ("rename", {"a": 1}, "recipe.rename.a"),
    ],
)
def test_a_recipe_is_checked_field_by_field(name, value, place, change, made):
    out = change(lambda data: data["recipe"].update({name: value}))
    with pytest.raises(DamagedError, match=f"the manifest is damaged at {place}") as error:
        shardkit.verify(out, against=made.parent / "in")
    assert error.value.where["path"] == manifests.manifest_path(out)
