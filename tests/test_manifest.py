"""Manifests that are damaged, or made to do harm, and the recipes in them: all wrong is named."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import shardkit
from shardkit import ConvertOptions, ImageOptions, TextOptions
from shardkit.conversion.plan import make_plan
from shardkit.conversion.run import prepare
from shardkit.conversion.target import Target
from shardkit.errors import DamagedError, FormatError, NotFoundError
from shardkit.formats.testing_samples import in_fork
from shardkit.helpers import checked
from shardkit.metadata import manifest as manifests
from shardkit.metadata.recipe import Recipe, identity
from shardkit.sources import open_sources
from tests.codecs.tokenizer_zoo import write_json
from tests.conftest import IMAGE_FORMATS, make_image, write_images
from tests.fuzz_manifests import fuzz
from tests.test_cli import run
from tests.test_verify import rewrite


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset of three shards with classes."""
    root = tmp_path_factory.mktemp("manifest")
    shardkit.convert(write_images(root / "in"), "wds", root / "out", shard_samples=4, workers=0)
    return root / "out"


def put(data: Any, value: Any, keys: Any) -> Any:
    """The data with a value under these keys; with `...`, without one."""
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return data


@pytest.fixture
def change(made, tmp_path):
    """What sets an entry of a manifest, and seals it again."""

    def changed(value, *keys):
        data = json.loads(manifests.manifest_path(made).read_bytes())
        del data[manifests._OWN_CHECKSUM]
        manifests._write(tmp_path / "out/__shardkit__/manifest.json", put(data, value, keys))
        return tmp_path / "out"

    return changed


@pytest.mark.parametrize(
    ("value", "keys", "place", "expected", "found"),
    [
        ("x", ("shards", 2, "samples"), "shards[2].samples", "a whole number from 0 up", '"x"'),
        (-1, ("shards", 0, "file", "bytes"), "shards[0].file.bytes", "from 0 up", "-1"),
        (True, ("errors",), "errors", "from 0 up", "true"),
        (2**63, ("errors",), "errors", "from 0 up", "9223372036854775808"),
        (1.5, ("errors",), "errors", "from 0 up", "1.5"),
        (..., ("shards", 1, "file"), "shards[1].file", "a value", "nothing"),
        (None, ("shards", 1), "shards[1]", "an object", "null"),
        ({}, ("shards",), "shards", "a list", "an object of 0"),
        ("é" * 99, ("shards", 0, "beside"), "shards[0].beside", "a list", r'"\u00e9\u00e9'),
        ("X" * 32, ("shards", 0, "file", "checksum"), "checksum", "32 hex digits", '"XXX'),
        ([["a"]], ("class_names", "label"), "class_names.label[0]", "text", "a list of 1"),
        ({"\x1b[2J": 0}, ("class_names",), r'class_names["\u001b[2J"]', "a list", "0"),
        ([1, 2], ("label_counts",), "label_counts", "a count for each class", "a list of 2"),
        (2**63 - 1, ("shards", 0, "samples"), "shards", "add up to less than 2^63", ""),
        (5, ("layout", "schema"), "layout.schema", "an object", "5"),
        (7, ("layout", "schema", "label", "type"), "layout.schema.label.type", "text", "7"),
        (1, ("layout", "schema", "label", "optional"), "label.optional", "true or false", "1"),
        (..., ("layout", "extensions"), "layout.extensions", "an object", "null"),
        ([{}], ("layout", "extensions", "label"), "extensions.label[0]", "text", "an object of 0"),
        ({"file": "x"}, ("tokenizer",), "tokenizer.kind", "a value", "nothing"),
        ({"tokens": 1}, ("text",), "text.documents", "a value", "nothing"),
    ],
)
def test_a_value_that_is_wrong_is_named(change, value, keys, place, expected, found):
    with pytest.raises(DamagedError, match="the manifest is damaged at ") as error:
        shardkit.open(change(value, *keys))
    assert place in error.value.what
    assert expected in str(error.value.expected)
    assert found in str(error.value.found)
    assert "copy it again" in str(error.value.fix)
    assert str(error.value).isascii()


def test_types_that_nobody_can_have_and_of_later_versions_are_refused(change):
    kinds = [{"dtype": dtype} for dtype in ("O", "(1,", "<f3", "i4,i4")]
    kinds += [{"dtype": "<f4", "shape": "abc"}, {"shape": [-1]}, {"shape": [2**40, 2]}]
    for kind in (*kinds, {"shape": [1] * 33}, {"unknown": 1}):
        with pytest.raises(DamagedError, match=r"at layout\.schema\.x"):
            shardkit.open(change({"type": "Array", **kind}, "layout", "schema", "x"))
    with pytest.raises(FormatError, match="a type that this version does not know"):
        shardkit.open(change({"type": "Mesh"}, "layout", "schema", "x"))
    with pytest.raises(FormatError, match="a format that this version does not know"):
        shardkit.open(change("zarr", "format"))
    deep = 1
    for _ in range(32):
        deep = {"a": [deep]}
    with pytest.raises(DamagedError, match=r"at recipe\.a") as error:
        shardkit.open(change(deep, "recipe"))
    assert error.value.expected == "at most 32 levels of lists and objects"


def test_json_that_is_no_manifest_is_damaged(made):
    for text, message in (
        (b'{"shardkit": 1, "x": NaN}', "not a JSON number"),
        (b'{"shardkit": 1, "x": 1e999}', "not a JSON number"),
        (b'{"shardkit": 1, "x": ' + b"9" * 5000 + b"}", r"4300 digits|limit \(4300\)"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"shardkit": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}", "damaged"),
        (b'{"shardkit": 1, "x": "\xff"}', "utf-8"),
    ):
        path = made.parent / "other/__shardkit__/manifest.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        with pytest.raises(DamagedError, match=message):
            shardkit.open(made.parent / "other")


def test_a_manifest_has_a_size_that_neither_reader_nor_writer_exceed(made, tmp_path, monkeypatch):
    manifest = manifests.load(made)
    monkeypatch.setattr(manifests, "MAX_BYTES", 1000)
    monkeypatch.setattr(checked, "MAX_BYTES", 1000)
    with pytest.raises(DamagedError, match="more than 1,000 bytes"):
        manifests.load(made)
    with pytest.raises(FormatError, match="more shards than a manifest can list"):
        manifest.write(tmp_path / "manifest.json")
    assert not [*tmp_path.iterdir()]


def replaced(dataset: Path, name: str, data: bytes) -> Path:
    """Write a file that a manifest lists, with a checksum that holds."""

    def change(manifest: dict[str, Any]) -> None:
        (entry,) = (file for file in manifest["files"] if file["name"].endswith(name))
        entry |= {"bytes": len(data), "checksum": xxhash.xxh3_128_hexdigest(data)}

    rewrite(dataset, change)
    (path,) = (dataset / "__shardkit__").glob(name)
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """A dataset with a key table and a list of errors."""
    root = tmp_path_factory.mktemp("listed")
    images = write_images(root / "in", classes=1)
    shutil.copy(images / "class0/000.jpg", images / "class0/a.b.jpg")
    (images / "class0/bad.jpg").write_text("no image")
    shardkit.convert(images, "wds", root / "out", on_error="skip", workers=0)
    return root / "out"


@pytest.mark.parametrize(
    "data",
    [b"{", b"\xff\xfe", b"[1]\n", b'{"key": [1], "path": "x"}', b"[" * 10**5, b'{"key": NaN}'],
)
def test_a_damaged_line_of_a_list_is_named(listed, tmp_path, data):
    dataset = Path(shutil.copytree(listed, tmp_path / "out"))
    path = replaced(dataset, "keys.jsonl", b'{"key": "a", "path": "b"}\n' + data)
    for use in (
        lambda: shardkit.open(dataset).original_paths(),
        lambda: shardkit.convert(dataset, "arrow", tmp_path / "to", workers=0),
    ):
        with pytest.raises(DamagedError, match="line 2 of the key table is damaged") as error:
            use()
        assert error.value.where["path"] == path
    dataset = Path(shutil.copytree(listed, tmp_path / "other"))
    path = replaced(dataset, "errors.jsonl", data)
    (problem,) = shardkit.verify(dataset).problems
    assert "line 1 of errors.jsonl is damaged" in problem.what
    assert problem.where["path"] == path


HEADER = "{'descr': %s, 'fortran_order': False, 'shape': (%d,), }"


def test_a_damaged_table_of_lengths_is_named(tmp_path):
    tokens = [{"__key__": str(n), "tokens": np.arange(n, dtype="<u2")} for n in range(9)]
    schema = {"tokens": shardkit.Array("<u2", (None,))}
    out = tmp_path / "out"
    shardkit.convert(tokens, "parquet", out, schema=schema, workers=0)
    assert shardkit.open(out).lengths("tokens").tolist() == [*range(9)]
    for header, values in (
        ("{'descr': [('tokens', '<u4'", 36),
        ("'''", 36),
        (HEADER % ("[('tokens', '<u4')]", 10**21), 36),
        (HEADER % ("[('tokens', '<u4')]", 9), 32),
        (HEADER % ("[('tokens', '<u4')]", 8), 32),
        (HEADER % ("[('tokens', '|S0')]", 10**12), 0),
        (HEADER % ("[('tokens', '<f4')]", 9), 36),
        (HEADER % ("'|O'", 9), 72),
    ):
        text = header.ljust(117).encode() + b"\n"
        start = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little")
        path = replaced(out, "lengths.npy", start + text + bytes(values))
        with pytest.raises(DamagedError, match="the table of arrays' lengths") as error:
            shardkit.open(out).lengths("tokens")
        assert error.value.where["path"] == path


@pytest.mark.parametrize("format", ["arrow", "lmdb", "beton"])
def test_damaged_metadata_in_a_shard_are_named(made, tmp_path, format):
    """Shards of ours without a manifest say themselves what is in them."""
    shardkit.convert(made, format, tmp_path / "to", workers=0)
    with shardkit.open(tmp_path / "to") as dataset:
        path = dataset.shard_path(0)
    shutil.rmtree(tmp_path / "to/__shardkit__")
    assert len(shardkit.open(path)) == 12
    whole = path.read_bytes()
    for old, new in (
        ('"classes"', '"klasses"'),
        ('["class0", "class1", "class2"]', '["class0", "class1", 12345678]'),
        ('"label": {"type": "Int"}', '"label": {"type": 12345}'),
        ('"label": {"type": "Int"}', '"label": ["type", "Int"]'),
        ('"schema"', '"sxhema"'),
        ('"schema": {"image"', '"schema": {{{{{{{{'),
    ):
        if format == "beton":  # whose text has no blanks
            changed = whole.replace(old.replace(" ", "").encode(), new.replace(" ", "").encode())
        else:
            changed = whole.replace(old.encode(), new.encode())
        assert len(changed) == len(whole), "all offsets stay as they are"
        assert changed != whole
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=r"damaged|contradicts") as error:
            shardkit.open(path)
        assert error.value.where["path"] == path


def test_shards_that_are_missing_or_not_as_long_are_named_when_a_conversion_is_planned(
    change, made, tmp_path
):
    """No memory is taken for samples that no shard has."""
    with pytest.raises(DamagedError, match=r"at shards\[0\]\.samples"):
        shardkit.open(change(2**40, "shards", 0, "samples"))
    file = {"name": "shard-000000.tar", "bytes": 2**20, "checksum": "0" * 32}
    dataset = change([{"file": file, "samples": 2**26, "beside": []}], "shards")
    (dataset / file["name"]).write_bytes(b"x")
    with pytest.raises(DamagedError, match="not as long as its manifest says"):
        shardkit.convert(dataset, "arrow", tmp_path / "to", workers=0)
    dataset = Path(shutil.copytree(made, tmp_path / "cut"))
    (dataset / "shard-000001.tar").unlink()
    with pytest.raises(NotFoundError, match="cannot open the shard") as error:
        shardkit.convert(dataset, "arrow", tmp_path / "to", workers=0)
    assert error.value.where["path"] == dataset / "shard-000001.tar"


def test_a_damaged_result_of_a_task_is_named(tmp_path, monkeypatch):
    images = write_images(tmp_path / "in")

    def convert():
        shardkit.convert(images, "wds", tmp_path / "out", workers=0)

    with monkeypatch.context() as patch:
        patch.setattr("shardkit.conversion.run.assemble", None)
        with pytest.raises(TypeError):
            convert()
    path = tmp_path / "out.partial/tasks/000000/result.json"
    whole = path.read_bytes()
    damages = [
        ("x", ("errors",), "errors"),
        (-1, ("shards", 0, "samples"), r"shards\[0\]\.samples"),
        ({"x": 1}, ("stats", "labels"), "labels"),
        (..., ("stats", "text"), "text"),
        ([], ("stats", "fields", "image", "buckets"), "fields.image.buckets"),
    ]
    for value, keys, place in damages:
        path.write_text(json.dumps(put(json.loads(whole), value, keys)))
        said = f"the result of a task is damaged at .*{place}"
        with pytest.raises(DamagedError, match=said) as error:
            convert()
        assert error.value.where["path"] == path
    shutil.rmtree(path.parent)  # as the error says
    convert()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """One of each format, of splits, and of tokens."""
    root = tmp_path_factory.mktemp("fuzz")
    images = write_images(root / "images", classes=2, each=3)
    (images / "class0/000.txt").write_text("a caption")
    shutil.copy(images / "class0/001.jpg", images / "class0/a.b.jpg")
    (root / "of").mkdir()
    for format in IMAGE_FORMATS:
        shardkit.convert(images, format, root / f"of/{format}", shard_samples=4, workers=0)
    shardkit.convert(images, "hf", root / "of/splits", split="a=0.5,b=0.5", workers=0)
    schema = {"tokens": shardkit.Array("<u2", (None,)), "score": shardkit.Float()}
    for name, to, fields in (("tokens", "parquet", 2), ("megatron", "megatron", 1)):
        kinds = dict([*schema.items()][:fields])
        values = [{"tokens": np.arange(n, dtype="<u2"), "score": n / 7} for n in range(9)]
        samples = [
            {"__key__": str(n), **{field: one[field] for field in kinds}}
            for n, one in enumerate(values)
        ]
        shardkit.convert(samples, to, root / "of" / name, schema=kinds, workers=0)
    (root / "texts").mkdir()
    (root / "texts/a.txt").write_text("a word\nand another\n" * 9)
    text = shardkit.TextOptions(tokenizer=write_json(root, "gpt2"), seq_len=8)
    shardkit.convert(root / "texts", "arrow", root / "of/text", text=text, workers=0)
    return root / "of"


def test_manifests_with_wrong_values_give_samples_or_our_errors(datasets, tmp_path, large):
    """X1, X4: none ends the process, takes 1 GiB more than a sound one, or 10 seconds."""
    text = Path(shutil.copytree(datasets / "text", tmp_path / "text"))  # of no documents
    rewrite(text, lambda data: data["text"].update(histogram=dict.fromkeys("159", 0)))
    assert "Histogram" in run("inspect", text).stdout
    full = int(os.environ.get("SHARDKIT_DAMAGE", "0"))  # as in formats/test_damage.py
    seed = random.randrange(10**6) if full else 2_170_800
    count = (full or 300) if large else 100
    failed, outcomes = in_fork(fuzz, datasets, seed, count)
    assert not failed, "\n".join(failed)[:10_000]
    assert outcomes["open: done"] > count / 20
    assert outcomes["open: DamagedError"] > count / 20


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
    plan = prepare(images, "wds", tmp_path / "out", ConvertOptions(**options))
    shardkit.convert(images, "wds", tmp_path / "out", workers=0, **options)
    recipe = Recipe.from_json(manifests.load_any(tmp_path / "out").recipe)
    assert recipe == plan.recipe
    again = make_plan(recipe, open_sources(images, recipe), Target(tmp_path / "out", "wds"))
    assert again.job == plan.job
    cuts, others = (
        [(task.split.name, task.start, task.stop, task.joined) for task in resized.tasks]
        for resized in (plan, again)
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
    plan = prepare(images, "arrow", tmp_path / "out", ConvertOptions(**options))
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
    text = TextOptions(tokenizer=write_json(tmp_path, "gpt2"), seq_len=16)
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
def resized(tmp_path_factory):
    root = tmp_path_factory.mktemp("resized")
    image = ImageOptions(resize=8)
    shardkit.convert(write_images(root / "in"), "wds", root / "out", image=image, workers=0)
    return root / "out"


@pytest.fixture
def edited(resized, tmp_path):
    def changed(edit):
        rewrite(out := Path(shutil.copytree(resized, tmp_path / "out")), edit)
        return out

    return changed


def again(out, resized, **options):
    """The conversion that made a dataset, once more."""
    image = ImageOptions(resize=8, **options)
    return shardkit.convert(resized.parent / "in", "wds", out, image=image, workers=0)


@pytest.mark.parametrize(("where", "name"), [((), "shear"), (("image",), "sharpen"), ((), "part")])
def test_an_option_of_a_later_version_is_no_damage(where, name, edited, resized):
    def newer(value):
        def edit(data):
            entry = data["recipe"]
            for key in where:
                entry = entry[key]
            entry[name] = value

        return edit

    out = edited(newer("yes"))
    assert shardkit.verify(out).sound
    with pytest.raises(FormatError, match="does not know") as error:
        shardkit.verify(out, against=resized.parent / "in")
    assert error.value.found == ".".join((*where, name))
    with pytest.raises(shardkit.OutputError, match="another dataset"):
        again(out, resized)
    shutil.rmtree(out)
    assert shardkit.verify(edited(newer(None)), against=resized.parent / "in").sound


def test_a_manifest_may_gain_entries_and_lack_new_ones(edited):
    """Of a later version, whose entries stay where it is written again, and of an earlier one."""

    def edit(data):
        data["later"] = 1
        data["shards"][0]["file"]["blocks"] = ["ab"]
        data["fields"]["image"]["mean"] = 1.0
        del data["ignored"]

    path = manifests.manifest_path(out := edited(edit))
    found, data = manifests.load(out), json.loads(path.read_bytes())
    assert (found.samples, found.ignored) == (12, {})
    assert shardkit.verify(out).sound
    found.write(path)
    del data[manifests._OWN_CHECKSUM]
    assert json.loads(path.read_bytes()).items() >= {**data, "ignored": {}}.items()


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
def test_options_of_other_versions_that_ask_for_nothing_make_the_same_dataset(
    edit, edited, resized
):
    out = edited(edit)
    assert again(out, resized).already_complete
    if edit is _without_recipe:
        assert shardkit.verify(out, against=resized.parent / "in").sound
        return
    with pytest.raises(shardkit.OutputError, match="another dataset") as error:
        again(out, resized, check="decode")
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
def test_a_recipe_is_checked_field_by_field(name, value, place, edited, resized):
    out = edited(lambda data: data["recipe"].update({name: value}))
    with pytest.raises(DamagedError, match=f"the manifest is damaged at {place}") as error:
        shardkit.verify(out, against=resized.parent / "in")
    assert error.value.where["path"] == manifests.manifest_path(out)


def test_no_object_of_a_manifest_has_an_entry_for_unknown_ones(tmp_path):
    with shardkit.create(tmp_path / "d", "wds", {"x": shardkit.Int()}) as writer:
        writer.write({"x": 1})
    text = (tmp_path / "d/__shardkit__/manifest.json").read_text()
    assert '"unknown"' not in text
