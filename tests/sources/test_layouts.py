"""Folders of other tools: converted as what they are, or refused by name; never something else."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import shardkit
from shardkit import FormatError, ShardkitError, SourceError, UsageError, bench, inspect, verify
from shardkit.cli import group
from shardkit.formats.unsupported import kind_by_name
from shardkit.metadata.splits import KINDS
from shardkit.sources import open_sources
from tests.sources import real
from tests.sources.real import (
    all_of,
    cases,
    convert,
    counts,
    keys,
    one,
    opened,
    put,
    refused,
    verified,
)


def splits(root: Path | str, **options: Any) -> dict[str, int]:
    """How many samples each split of a conversion would have."""
    return counts(opened(root, **options))


def inspected(path: Path | str) -> dict[str, int]:
    return {name: split["samples"] for name, split in inspect(path)["splits"].items()}


def of_documents(root: Path | str) -> dict[str, str]:
    """The texts of each split, one behind the other."""
    return {
        split: "".join(document.sample["text"] for document in source.documents())
        for split, source in open_sources(root).items()
    }


def by_datasets(root: Path) -> Any:
    import datasets

    return datasets.load_dataset(str(root), cache_dir=str(root.parent / "cache"))


def texts(path: Path) -> list[str]:
    with shardkit.open(path) as ds:
        return [ds[n]["text"] for n in range(len(ds))]


# --- repositories and caches of Hugging Face -----------------------------------------------------
def test_a_hub_repository_is_its_parquet_by_split_and_one_is_opened_by_a_pattern(tmp_path):
    root = real.hub_repository(tmp_path / "repository")
    data, out = root / "data", tmp_path / "out"
    result = verified(root, out, "arrow")
    assert (texts(out / "train"), texts(out / "test")) == (["a", "b", "c"], ["d"])
    assert result.ignored == {".md file": 1, "hidden": 1}
    assert inspected(data) == {"train": 3, "test": 1}
    assert verify(root).samples == 4
    error = refused(FormatError, "one dataset per split", shardkit.open, data)
    train, test = str(error.fix).removeprefix("open one of them: ").split(", ")
    assert (texts(Path(train)), texts(Path(test))) == (["a", "b", "c"], ["d"])
    assert splits(Path(train)) == {"": 3}
    words = "a pattern of shards needs an output"
    refused(UsageError, words, shardkit.convert, train, "wds", workers=0)
    assert verified(train, tmp_path / "one").samples == 3
    assert splits(data, split="none") == {"": 4}
    refused(UsageError, "nothing matches the pattern", shardkit.open, data / "val-*.parquet")
    put(root, {"assets/banner.png": None})
    error = refused(UsageError, "both shards and what may be images", open_sources, root)
    assert error.found == "'data/test-00000-of-00001.parquet' beside 'assets/banner.png'"


@cases(
    "image shown",
    ("assets/teaser.png", "![a]({})"),
    ("teaser.png", '<img src="./{}" width=9>'),
    ("assets/teaser.png", "![a](https://hub/datasets/me/x/resolve/main/{})"),
)
def test_images_that_a_readme_shows_are_no_data(tmp_path, image, shown):
    root = real.hub_repository(tmp_path / "hub")
    put(root, {image: None, "README.md": real.CARD + shown.format(image)})
    result = convert(root, tmp_path / "out")
    assert (result.samples, result.ignored) == (4, {".md file": 1, ".png file": 1, "hidden": 1})
    assert verify(root).samples == 4
    rows = {f"data/{split}.jsonl": '{"text": "x"}\n' for split in ("train", "test")}
    put(tmp_path / "text", {**rows, image: None, "README.md": shown.format(image)})
    assert splits(tmp_path / "text") == {"train": 1, "test": 1}
    put(tmp_path / "alone", {image: None, "README.md": shown.format(image)})
    assert splits(tmp_path / "alone") == {"": 1}


def test_opening_a_folder_with_images_says_what_to_do(tmp_path):
    for image in ("a/1.png", "z/1.png", "1.png"):  # beside shards, wherever they lie
        root = put(tmp_path / image[0], {image: None})
        real.parquet(root / "data/0.parquet", "x", "y")
        assert inspect(root)["ignored"] == {"image": 1}
        refused(UsageError, "both shards and what may be images", open_sources, root)
    with pytest.raises(FormatError, match=r"shardkit convert .* --to wds"):
        shardkit.open(put(tmp_path / "images", {"cat/1.jpg": None}))


def test_splits_are_neither_mixed_nor_taken_as_one(tmp_path):
    root = real.hub_repository(tmp_path / "hub")
    put(tmp_path / "images", {f"{split}/cat/1.jpg": None for split in ("train", "val")})
    for source in (root, tmp_path / "images"):
        with pytest.raises(UsageError, match="the source already has splits"):
            splits(source, split="train=0.9,val=0.1")
    convert(tmp_path / "images", tmp_path / "two")
    refused(UsageError, "cannot be taken as one dataset", splits, tmp_path / "two", split="none")
    for folder in ("two/__shardkit__", "two/train/__shardkit__"):
        refused(FormatError, "no samples", open_sources, tmp_path / folder)
    one = put(tmp_path / "one", {f"train/{name}/1.jpg": None for name in ("cat", "dog", "owl")})
    verified(one, tmp_path / "out", split="train=0.5,val=0.5")
    assert shardkit.open(tmp_path / "out/train").classes == ("cat", "dog", "owl")


def test_subsets_of_a_hub_repository_are_not_mixed_and_one_is_chosen_by_its_name(tmp_path):
    for subset in ("de", "en"):
        for split in ("train", "test"):
            real.parquet(tmp_path / f"{subset}/{split}-00000-of-00001.parquet", subset)
    error = refused(UsageError, "splits of their own", open_sources, tmp_path)
    assert f"{tmp_path}/de, {tmp_path}/en" in str(error.fix)
    for subset in ("de", "en"):
        real.parquet(tmp_path / f"other/{subset}/0000.parquet", "a")
    refused(FormatError, "in several folders", open_sources, tmp_path / "other")
    assert splits(tmp_path / "de") == {"train": 1, "test": 1}
    root = tmp_path / "data"
    for name in ("main", "de/train", "de/test"):
        real.parquet(root / f"{name}.parquet", name)
    subsets = [{"config_name": "all", "data_files": "main.parquet"}]
    put(root, {"README.md": card(*subsets, {"config_name": "de", "data_dir": "de"})})
    error = refused(UsageError, "several subsets", shardkit.open, root)
    assert f"'{root}#all', '{root}#de'" in str(error.fix)
    assert texts(Path(f"{root}#all")) == ["main"]
    assert splits(f"{root}#de") == inspected(f"{root}#de") == {"train": 1, "test": 1}
    assert splits(f"{root}#de", split="none") == {"": 2}
    result = shardkit.convert(f"{root}#de", "wds", workers=0)
    left_out = {".md file": 1, "file outside of the splits in README.md": 1}
    assert (result.samples, result.ignored) == (2, left_out)
    assert verify(tmp_path / "data#de-wds", against=f"{root}#de").sound
    refused(UsageError, "no subset 'fr'", shardkit.open, f"{root}#fr")
    put(tmp_path / "text", {"a.csv": "text\nx\n", "b.csv": "text\ny\n"})
    subsets = [{"config_name": name, "data_files": f"{name}.csv"} for name in "ab"]
    put(tmp_path / "text", {"README.md": card(*subsets)})
    refused(UsageError, "several subsets", open_sources, tmp_path / "text")
    assert of_documents(f"{tmp_path}/text#b") == {"": "y"}
    put(tmp_path / "has#sign", {"a.txt": "x"})
    assert splits(tmp_path / "has#sign") == {"": 1}


def card(*configs: dict[str, Any]) -> str:
    """A README.md whose YAML has these `configs`."""
    return f"---\nlicense: mit\n{yaml.dump({'configs': list(configs)})}tags:\n- x\n---\n# Data\n"


DEFAULT = {"config_name": "default"}


def of_splits(**paths: str | list[str]) -> list[dict[str, Any]]:
    return [{"split": split, "path": path} for split, path in paths.items()]


@cases(
    "configs expected",
    (of_splits(train="data.csv", test="holdout.csv"), {"train": "ab", "test": "c"}),
    (of_splits(test="h*.csv", other=["data.csv"]), {"test": "c", "other": "ab"}),
    (of_splits(train="**/*.csv"), {"train": "abcd"}),
    (of_splits(train="*.csv", extra=["x/**"]), {"train": "abc", "extra": "d"}),
    ("*.csv", {"": "abc"}),
    (["data.csv", "holdout.csv"], {"": "abc"}),
    (of_splits(train="data.csv"), {"train": "ab"}),
)
def test_splits_are_what_the_readme_says_as_datasets_has_it(tmp_path, configs, expected):
    suffix = "parquet" if "test" in expected else "csv"
    files = {"data": "ab", "holdout": "c", "x/y/more": "d"}
    for name, rows in files.items():
        if suffix == "csv":
            put(tmp_path, {f"{name}.csv": "\n".join(["text", *rows, ""])})
        else:
            real.parquet(tmp_path / f"{name}.parquet", *rows)
    readme = card({**DEFAULT, "data_files": configs}).replace(".csv", f".{suffix}")
    put(tmp_path, {"README.md": readme})
    sources, found = open_sources(tmp_path), of_documents(tmp_path)
    wanted = {split: "".join(rows["text"]) for split, rows in by_datasets(tmp_path).items()}
    if len(found) == 1:  # which theirs calls train, unless it has a name
        found, expected, wanted = ({"": "".join(s.values())} for s in (found, expected, wanted))
    assert found == expected == wanted
    others = len(files) - len("".join(expected.values()).replace("ab", "a"))
    first = next(iter(sources.values()))
    assert first.ignored.get("file outside of the splits in README.md", 0) == others


# Lists of ten aliases each, the last of which stands for 10^12 words; a number in base 60.
_LISTS = [", ".join([f"*a{n - 1}" if n else "x"] * 10) for n in range(12)]
_LEVELS = "".join(f"\n  - &a{n} [{each}]" for n, each in enumerate(_LISTS))
_FRONT = f"---\nconfigs:\n- x:{_LEVELS}\n  config_name: "
BOMBS = [
    f"{_FRONT}*a11\n  data_files: '*.csv'\n---\n",
    f"{_FRONT}a\n  data_files: *a11\n---\n",
    f"{_FRONT}a\n  data_files: [{{split: *a11, path: '*.csv'}}]\n---\n",
    f"{_FRONT}{'1:' * 600}1\n  data_files: '*.csv'\n---\n",
]
TWICE = of_splits(train=["**/m?.csv", "data.csv"], test="[l-z]y.csv")


@cases(
    "readme message",
    (card({**DEFAULT, "data_files": "no*.csv"}), "are missing"),
    (card({**DEFAULT, "data_files": TWICE}), "puts a file into two splits"),
    (card({**DEFAULT, "data_files": of_splits(**{"../x": "data.csv"})}), "cannot be parsed"),
    (card({**DEFAULT, "data_files": [{"split": "train"}]}), "cannot be parsed"),
    (card({**DEFAULT, "data_files": [{"split": "train", "path": 3}]}), "cannot be parsed"),
    ("---\nconfigs:\n- {config_name: [\n---\n", "cannot be parsed"),
    ("---\nconfigs:\n- a\n---\n", "cannot be parsed"),
    ("---\nconfigs: &a\n- *a\n---\n", "cannot be parsed"),
    *((bomb, "cannot be parsed") for bomb in BOMBS),
    (card({**DEFAULT, "data_files": ["*a" * 40 + "b"]}), "are missing"),
    (card({**DEFAULT, "data_files": ["*"] * 101}), "more than 100 patterns"),
)
def test_a_readme_that_leaves_a_question_is_refused(tmp_path, readme, message, monkeypatch):
    monkeypatch.setattr("shardkit.dataset.card._MAX_PATTERNS", 100)
    put(tmp_path, {"README.md": readme, "data.csv": "text\na\n", "my.csv": "text\nb\n"})
    error = refused(ShardkitError, message, open_sources, tmp_path)
    assert error.where["path"] == tmp_path / "README.md"
    assert list(splits(tmp_path, split="none")) == [""]
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert list(open_sources(tmp_path)) == [""]


HUB_NAMES = ["data/train-00000-of-00002-0a1b", "data/train-00001-of-00002-2c3d"]


@cases(
    "configs message",
    ([{**DEFAULT, "data_files": of_splits(train="a/**", test="b/**")}], "do not match"),
    ([{"config_name": "a"}, {"config_name": "b"}], "selected by their folders"),
)
def test_a_readme_of_images_is_compared_with_their_folders(tmp_path, configs, message):
    put(tmp_path, {"README.md": card(*configs), "a/1.jpg": None, "b/2.jpg": None})
    refused(UsageError, message, open_sources, tmp_path)
    put(tmp_path / "x", {"README.md": card(*configs[:1]), "train/a/1.jpg": None})
    put(tmp_path / "x", {"test/a/1.jpg": None})
    assert splits(tmp_path / "x") == {"train": 1, "test": 1}


@cases(
    "names",
    ["train", "test"],
    ["my_train_file", "my_test_file"],
    ["train1", "train-2", "test 3"],
    ["data/train", "data/validation", "data/test"],
    ["data/train/1", "data/train/2", "data/test/1"],
    ["train_0/1", "train_1/2", "test_0/3"],
    ["training", "eval"],
    ["x.train", "x.dev"],
    ["data/train_sft-00000-of-00001", "data/test_sft-00000-of-00001"],
    [*HUB_NAMES, "data/u.n-00000-of-00001"],
)
def test_splits_are_those_that_datasets_finds_by_name(tmp_path, names):
    for number, name in enumerate(names):
        put(tmp_path, {f"{name}.jsonl": f'{{"text": "{number}"}}\n', "README.md": "# Data"})
    theirs = by_datasets(tmp_path)
    as_theirs = {"train": "train", "validation": "validation", "test": "test"}
    ours = {
        as_theirs.get(KINDS.get(n, ""), n): sorted(t) for n, t in of_documents(tmp_path).items()
    }
    assert ours == {n: sorted(rows["text"]) for n, rows in theirs.items()}


def test_the_cache_of_datasets_gives_its_splits_without_cache_files(tmp_path):
    import datasets

    row = '{"text": "a", "n": 1}\n'
    put(tmp_path, {"train.jsonl": 2 * row, "test.jsonl": row})
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    loaded = datasets.load_dataset("json", data_files=files, cache_dir=str(tmp_path / "cache"))
    loaded["train"].map(lambda row: {"twice": 2 * row["n"]})
    folder = Path(loaded["train"].cache_files[0]["filename"]).parent
    assert len(list(folder.glob("cache-*.arrow"))) == 1
    for path in (folder, tmp_path / "cache"):
        assert splits(path) == {"train": 2, "test": 1}
    result = convert(folder, tmp_path / "out")
    assert (result.samples, result.ignored[".arrow file"]) == (3, 1)


@pytest.mark.parametrize("listed", [True, False])
def test_every_command_takes_a_dataset_dict(tmp_path, listed):
    """As `DatasetDict.save_to_disk` writes it, or a user its datasets one by one."""
    import datasets

    rows = {"train": ["a", "b"], "test": ["c"]}
    parts = {n: datasets.Dataset.from_dict({"text": texts}) for n, texts in rows.items()}
    dicts, root = datasets.DatasetDict(parts), tmp_path / "x/saved"
    if listed:
        dicts.save_to_disk(root)
    else:
        for name, dataset in dicts.items():
            dataset.save_to_disk(root / name)
    assert splits(root) == inspected(root) == splits(root.parent) == {"train": 2, "test": 1}
    error = refused(FormatError, "one dataset per split", shardkit.open, root)
    assert error.fix == f"open one of them: {root}/train, {root}/test"
    shown = CliRunner().invoke(group, ["inspect", str(root)])
    assert shown.exit_code == 0
    assert all(f"saved/{name}" in shown.output.replace("\n", "") for name in rows)
    assert verify(root).samples == 3
    verified(root, tmp_path / "out")
    refused(FormatError, "one dataset per split", bench, [root])
    refused(UsageError, "cannot be taken as one", splits, root, split="none")
    if listed:
        datasets.DatasetDict(sft=dicts["train"], gen=dicts["test"]).save_to_disk(tmp_path / "y/odd")
        for use in (shardkit.open, open_sources, inspect):
            error = refused(FormatError, "the dataset is in a subfolder", use, tmp_path / "y")
            assert error.fix == f"give it: {tmp_path}/y/odd"
    else:
        (root / "test").rename(root / "evaluation")
        dicts["test"].save_to_disk(root / "eval")
        refused(UsageError, "eval and evaluation are both test", open_sources, root)


# The table is JSON lines: of CSV theirs leaves files open.
@cases(
    "folder names", ("", ["1.jpg", "x/2.jpg"]), ("data/", ["cat/1.jpg", "dog/2.jpg", "dog/3.jpg"])
)
def test_image_folders_of_the_hub_are_as_datasets_reads_them(tmp_path, folder, names):
    put(tmp_path, {"README.md": "---\nlicense: mit\n---\n# Images", ".gitattributes": "x"})
    for split in ("train", "test"):
        put(tmp_path / folder / split, dict.fromkeys(names))
        if not folder:
            rows = [{"file_name": name, "n": n, "words": f"w{n}"} for n, name in enumerate(names)]
            put(tmp_path / split, {"metadata.jsonl": "\n".join(map(json.dumps, rows))})
    theirs, sources = by_datasets(tmp_path), open_sources(tmp_path)
    assert list(sources) == list(theirs) == ["train", "test"]
    for name, source in sources.items():
        ours = [{**source[n]} for n in range(len(source))]
        assert all(sample.pop("image") and sample.pop("__key__") for sample in ours)
        rows = theirs[name].remove_columns("image").to_list()
        assert sorted(ours, key=str) == sorted(rows, key=str)
        label = theirs[name].features.get("label")
        assert source.classes == (None if label is None else tuple(label.names))
    assert sources["train"].ignored == {".md file": 1, "hidden": 1}


@cases(
    "names expected",
    ("train-0 train-1 val-0", {"train": 4, "val": 2}),
    ("imagenet-train-0 imagenet-validation-0", {"train": 2, "validation": 2}),
    ("Train_0 TEST_0", {"train": 2, "test": 2}),
    ("data/train/0 data/test/0", {"train": 2, "test": 2}),
    ("dev train", {"train": 2, "dev": 2}),
    ("my_train_file my_test_file", {"train": 2, "test": 2}),
    ("train_v2 HOLDOUT_v2", {"train": 2, "holdout": 2}),
    ("test-data/train test-data/dev", {"train": 2, "dev": 2}),
    ("train-0 train-1", {"": 4}),  # one split is the dataset
    ("shard-0 shard-1", {"": 4}),
    ("train-0 extra-0", None),
    ("a-train b-test", None),
    ("train-0 val-0 all", None),
    ("train-0 val-0 valid-0", None),
)
def test_tars_are_split_by_their_names_or_refused(tmp_path, names, expected):
    for name in names.split():
        real.tar(tmp_path / f"{name}.tar", f"{name}a", f"{name}b")
    if expected is None:
        assert refused(UsageError, "--split none", open_sources, tmp_path).where["path"] == tmp_path
        assert splits(tmp_path, split="none") == {"": 2 * len(names.split())}
    else:
        assert splits(tmp_path) == expected


def test_documents_about_data_and_other_files_beside_what_can_be_read_are_counted(tmp_path, images):
    about = {"README.md": "# Data", "LICENSE.txt": "MIT", "dataset_infos.json": "{}"}
    put(tmp_path / "zip", {**about, "images.zip": b"PK"})
    with pytest.raises(SourceError, match="there are no documents here") as error:
        open_sources(tmp_path / "zip")
    assert "1 x .zip file" in str(error.value.found)
    put(tmp_path / "text", {**about, "train.txt": "a\nb\n", "test.txt": "c\n"})
    found = open_sources(tmp_path / "text")
    assert list(found) == ["train", "test"]
    assert found["train"].ignored == {".md file": 1, ".txt file": 1, ".json file": 1}
    put(tmp_path / "alone", {"README.md": "# A text"})
    assert splits(tmp_path / "alone") == {"": 1}
    put(images, {"class0/sound.wav": b"RIFF", "class1/features.h5": b"x"})
    source = open_sources(images)[""]
    assert len(source) == 12
    assert source.ignored == {".wav file": 1, ".h5 file": 1}
    put(tmp_path / "texts", {"a.txt": "x", "b.txt": "y", "c.mp3": b"ID3"})
    assert splits(tmp_path / "texts") == {"": 2}
    put(tmp_path / "texts", {"d.flv": b"", "e.flv": b""})
    error = refused(FormatError, "video", open_sources, tmp_path / "texts")
    assert "to convert only the others" in str(error.fix)

    (tmp_path / "all").mkdir()
    for name in ("one", "two"):  # two datasets are a question
        convert(images, tmp_path / "all" / name)
    error = refused(FormatError, "datasets in several folders", shardkit.open, tmp_path / "all")
    assert error.fix == f"give one of them: {tmp_path}/all/one, {tmp_path}/all/two"


# --- splits by name ------------------------------------------------------------------------------
@cases(
    "names expected",
    ("data/train.csv data/test.csv README.md", ["train", "test"]),
    ("reviews_train.csv reviews_test.csv", ["train", "test"]),
    ("a/train.txt b/test.txt", [""]),  # a document each
    ("en/train.csv de/test.csv", None),
)
def test_tables_of_text_are_split_by_their_names(tmp_path, names, expected):
    put(tmp_path, dict.fromkeys(names.split(), "text\nx\n"))
    if expected is None:
        refused(UsageError, "seem to contain several splits", open_sources, tmp_path)
    else:
        assert list(open_sources(tmp_path)) == expected


# --- folders of images ---------------------------------------------------------------------------
@cases(
    "names message fix",
    ("images/cat/1.jpg images/dog/2.jpg", "the only class", "images;"),
    ("a/b/cat/1.jpg a/b/dog/1.jpg", "the only class", "a/b;"),
    ("images/1.jpg images/2.jpg", "which is not a class", "images"),
    ("train2017/1.jpg", "which is not a class", "train2017"),
    ("seg_train/a/1.jpg foo_test/a/1.jpg", "seem to contain several splits", "rename"),
    ("seg_train/a/1.jpg seg_test/a/1.jpg seg_pred/1.jpg", "something else", "away"),
    ("a/train/c/1.jpg a/test/c/1.jpg b/train/c/1.jpg b/test/c/1.jpg", "of their own", "a, "),
    ("train/a/1.jpg val/a/2.jpg valid/a/3.jpg", "val and valid are both", "at a time"),
    ("train/1.jpg dev/2.jpg val/3.jpg", "val and dev are both", "at a time"),
    ("Train/a/1.jpg train/a/2.jpg val/a/3.jpg", "Train/ and train/", "move one"),
    ("train/a/1.jpg train2/a/2.jpg val/a/3.jpg", "train/ and train2/", "move one"),
    ("train/a/1.jpg val/2.jpg", "images of val have no labels", "class folders"),
    ("train/a/1.jpg train/b/1.jpg val/images/2.jpg", "val have no labels", "class"),
    ("bottle/train/good/1.png bottle/test/broken/1.png cap/1.png", "splits", "rename"),
    ("left/1.jpg left/2.jpg right/1.jpg right/2.jpg", "not classes", "--fields left,right if"),
    ("1.jpg masks/1.png", "cannot read yet", "only images"),
)
def test_folders_that_are_no_classes_are_refused(tmp_path, names, message, fix):
    put(tmp_path, dict.fromkeys(names.split()))
    assert fix in str(refused(UsageError, message, open_sources, tmp_path).fix)


AB = ("a", "b")


@cases(
    "names expected",
    ("Train/cat/1.jpg Val/cat/2.jpg", {"train": ("cat",), "val": ("cat",)}),
    ("Training/a/1.jpg Test/a/2.jpg", {"training": ("a",), "test": ("a",)}),
    ("train/1.jpg test/2.jpg", {"train": None, "test": None}),
    ("train/1.jpg", {"train": None}),
    ("train2017/1.jpg val2017/2.jpg", {"train": None, "val": None}),
    ("train_2/a/1.jpg holdout_2/a/2.jpg", {"train": ("a",), "holdout": ("a",)}),
    ("seg_train/a/1.jpg seg_test/a/1.jpg", {"train": ("a",), "test": ("a",)}),
    ("Training_Set/a/1.jpg Test_Set/a/1.jpg", {"training": ("a",), "test": ("a",)}),
    ("images/train/a/1.jpg images/val/a/2.jpg", {"train": ("a",), "val": ("a",)}),
    ("x.zip/data/train/a/1.jpg x.zip/data/dev/b/2.jpg", {"train": AB, "dev": AB}),
    ("train/a/1.jpg val/a/2.jpg __MACOSX/val/a/._2.jpg", {"train": ("a",), "val": ("a",)}),
    ("train/a/1.jpg train/b/1.jpg test/1.jpg", {"train": AB, "test": None}),
    ("train/a/1.jpg train/b/1.jpg test/test/1.jpg", {"train": AB, "test": None}),
    ("train/a/1.jpg train/b/1.jpg test/unknown/1.jpg", {"train": AB, "test": None}),
    ("train/a/1.jpg val/b/1.jpg test/b/1.jpg", {"train": AB, "val": AB, "test": AB}),
    ("cat/1.jpg", {"": ("cat",)}),
    ("mask/1.jpg no_mask/2.jpg", {"": ("mask", "no_mask")}),
    ("train/1.jpg a/2.jpg bullet_train/3.jpg", {"": ("a", "bullet_train", "train")}),
    (
        "train_station/1.jpg test_track/1.jpg a/1.jpg b/1.jpg c/1.jpg",
        {"": ("a", "b", "c", "test_track", "train_station")},
    ),
    *(  # one of many classes
        (f"{one}/1.jpg {two}/1.jpg a/1.jpg b/1.jpg c/1.jpg", {"": ("a", "b", "c", one, two)})
        for one, two in (("mask", "target"), ("mask", "train_station"), ("photo", "target"))
    ),
)
def test_folders_that_are_splits_or_classes(tmp_path, names, expected):
    put(tmp_path, dict.fromkeys(names.split()))
    assert {name: source.classes for name, source in open_sources(tmp_path).items()} == expected


def test_an_empty_folder_of_a_split_is_said(tmp_path):
    for number, name in enumerate(("train/a/1.jpg", "train/1.jpg", "train/1.txt", "train/1.tar")):
        root = put(tmp_path / str(number), {name: None, "val/.gitkeep": ""})
        if name.endswith("txt"):
            put(root, {name: "x"})
        elif name.endswith("tar"):
            real.tar(root / name, "a")
        error = refused(UsageError, "the folder of the split 'val' is empty", open_sources, root)
        assert error.where["path"] == root / "val"
        if not name.endswith(".jpg"):
            assert splits(root, split="none") == {"": 1}


def test_what_is_guessed_of_splits_and_a_single_class_is_noted(tmp_path):
    root = tmp_path / "in"
    names = ("train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/owl/1.jpg", "test/new/1.jpg")
    put(root / "x/data", {**dict.fromkeys(names), "labels.csv": "?"})
    put(root, {"README.md": "# Data", "__MACOSX/x/._data": "?"})
    found = open_sources(root)
    assert [note for source in found.values() for note in source.notes] == [
        f"the splits were found in {root}/x/data",
        "classes of val that train does not have: owl",
        "no labels in test: its images are in new/, not a class of other splits",
    ]
    assert found["train"].ignored == {".csv file": 1, ".md file": 1, "__MACOSX folder": 1}
    labelled = ["__key__", "image", "label"]
    assert [sorted(s[0]) for s in found.values()] == [labelled, labelled, ["__key__", "image"]]
    verified(root, tmp_path / "out")
    put(tmp_path / "flat", {**dict.fromkeys(names[:2]), "test/1.jpg": None})
    note = "no labels in test: its images are in no class folders"
    assert open_sources(tmp_path / "flat")["test"].notes == (note,)
    # CelebA has a single folder, whose images have no classes.
    root = put(tmp_path / "celeba", {"img_align/1.jpg": None, "list_attr_celeba.txt": "1\n"})
    source = one(root)
    assert source.classes == ("img_align",)
    assert source.notes[0].endswith(f"to convert without labels, give {root}/img_align")
    source = one(root / "img_align")
    assert (source.classes, source.notes) == (None, ())


@cases(
    "names classes",
    ("rgb/1.png depth/1.png", ("depth", "rgb")),
    ("images/a/1.jpg images/b/2.jpg", ("images",)),
)
def test_classes_that_are_named_are_taken_at_their_word(tmp_path, names, classes):
    put(tmp_path, dict.fromkeys(names.split()))
    assert one(tmp_path, classes=classes).classes == classes


# --- formats that are not read -------------------------------------------------------------------
PICKLES = "CIFAR for Python, which consists of pickles"


@cases(
    "kind name fix",
    ("MDS of JSON", "this is .*MosaicML Streaming data that is not in MDS", "create"),
    ("CIFAR-10", f"this is .*{PICKLES}", "binary version"),
    ("CIFAR-100", f"this is .*{PICKLES}", "binary version"),
    ("CIFAR-10 binary", "CIFAR", None),
    ("CIFAR-100 binary", "CIFAR", None),
    ("MNIST", "MNIST", None),
    ("HDF5", "HDF5", None),
)
def test_what_is_not_read_or_only_converted_is_called_by_its_name(tmp_path, kind, name, fix):
    root = put(tmp_path / "data", real.FOLDERS[kind])
    converts = f"convert it first: shardkit convert {root} --to wds"
    words = f"{name}.*cannot read it" if fix else f"{name}.*not opened as a dataset"
    for use in (shardkit.open, inspect, verify, *([open_sources] if fix else [])):
        assert (fix or converts) in str(refused(FormatError, words, use, root).fix)


@cases(
    "name data kind",
    ("shard.00000.mds.br", b"", "Brotli"),
    ("chunk-0-0.zstd.bin", b"", "LitData"),
    ("cifar-10-python.tar.gz", b"", "CIFAR"),
    ("data_batch_1", b"", "CIFAR"),
    ("train_32x32.mat", b"", "MATLAB"),
    ("song.AAC", b"", "audio"),
    ("film.flv", b"", "video"),
)
def test_a_file_that_is_not_read_is_called_by_its_name(tmp_path, name, data, kind):
    (tmp_path / name).write_bytes(data)
    for use in (open_sources, shardkit.open):
        refused(FormatError, f"{kind}.*cannot read it", use, tmp_path / name)


def test_tfrecords_of_others_are_read(tmp_path):
    names = ("mnist-train.tfrecord-00000-of-00001", "mnist-test.tfrecord-00000-of-00001")
    about = {"dataset_info.json": "{}", "features.json": "{}", "label.labels.txt": "0\n1\n"}
    root = tmp_path / "mnist" / "3.0.1"  # as TensorFlow Datasets prepares them
    put(root, {**dict.fromkeys(names, real.tfrecord()), **about})
    for path in (root, root.parent):
        assert splits(path) == {"train": 1, "test": 1}
    found = shardkit.open(root / "mnist-train.tfrecord-00000-of-00001")
    assert found.classes == ("0", "1")
    assert found[0] == {"__key__": "mnist-train-00000-of-00001/000000000", "label": 1}
    put(tmp_path / "records", {"00000.tfrecord": real.tfrecord()})  # as img2dataset writes them
    real.parquet(tmp_path / "records/00000.parquet", "http://x/1.jpg")
    with shardkit.open(tmp_path / "records") as ds:
        assert (ds.format, len(ds), list(ds.schema)) == ("tfrecord", 1, ["label"])


def test_other_names_are_of_no_such_format_and_a_bin_without_an_index_is_no_megatron(tmp_path):
    for name in ("train.bin", "shard-000000.tar", "a.txt", "index.json", "chunk.bin", "mds", "h5"):
        assert kind_by_name(name) is None
    real.tar(tmp_path / "shards/0.tar", "a", "b")
    put(tmp_path / "shards", {"vocab.bin": b"x"})
    result = convert(tmp_path / "shards", tmp_path / "out")
    assert (result.samples, result.ignored) == (2, {".bin file": 1})
    assert len(shardkit.open(tmp_path / "shards")) == 2
    put(tmp_path / "shards", {"vocab.idx": b"x"})
    refused(FormatError, "several formats", shardkit.open, tmp_path / "shards")
    put(tmp_path / "lonely", {"tokens.bin": b"x"})
    refused(FormatError, "needs its index beside it", shardkit.open, tmp_path / "lonely")


# --- TARs with other files beside them -----------------------------------------------------------
@pytest.mark.parametrize("beside", ["{}.parquet", "{}_stats.json"])
def test_img2datasets_folders_of_files_are_no_classes(tmp_path, beside):
    for part in ("00000", "00001"):
        put(tmp_path, {f"{part}/{part}0.jpg": None, f"{part}/{part}0.txt": "a", "metadata": "x"})
        put(tmp_path, {beside.format(part): "{}"})
    refused(ShardkitError, None, shardkit.open, tmp_path)
    source = one(tmp_path)
    assert list(source.schema) == ["image", "text"]
    assert "a part written by img2dataset" in source.notes[0]
    (tmp_path / beside.format("00001")).unlink()
    source = one(tmp_path)
    assert source.classes == ("00000", "00001")


def test_a_column_of_a_table_or_dataset_names_the_splits(tmp_path):
    put(tmp_path / "in", {f"{n}.jpg": None for n in range(4)})
    rows = "".join(f"{n}.jpg,{fold},{n}\n" for n, fold in enumerate(("val", "train", "val", "1")))
    put(tmp_path, {"t.csv": "file_name,fold,n\n" + rows})
    options = {"metadata": str(tmp_path / "t.csv"), "split_column": "fold"}
    result = verified(tmp_path / "in", tmp_path / "out", **options, drop=["fold"])
    assert {n: split.samples for n, split in result.splits.items()} == {
        "train": 1,
        "val": 2,
        "1": 1,
    }
    assert [sample["n"] for sample in shardkit.open(tmp_path / "out/val")] == [0, 2]
    convert(tmp_path / "in", tmp_path / "whole", metadata=options["metadata"])
    verified(tmp_path / "whole", tmp_path / "again", split_column="n", where="n > 1")
    assert keys(tmp_path / "again/3") == ["3"]
    call = (tmp_path / "whole", tmp_path / "no")
    refused(UsageError, "no column|no field|unknown", convert, *call, split_column="x")
    refused(UsageError, "cannot be combined", convert, *call, split_column="n", folds=2)
    put(tmp_path, {"t.csv": "file_name,fold,n\n0.jpg,,1\n1.jpg,../x,1\n2.jpg,a,1\n3.jpg,a,1\n"})
    error = refused(
        UsageError, "names of splits", convert, tmp_path / "in", tmp_path / "no", **options
    )
    assert error.found == "no value"


PAIRED = {"cat": "12", "dog": "12"}


@cases(
    "folders fields",
    ({"A": "12", "B": "12"}, "a b"),
    ({"hr": "12", "lr": "13"}, "hr lr"),
    ({"imgs": "12", "lbls": "12"}, "image mask"),
    ({"images": "12", "masks": "123", "depth": "12"}, "image mask depth"),
    ({"input": "12", "target": "12"}, "input target"),
    ({"in/JPEGImages": "12", "in/SegmentationClass": "1"}, "image mask"),
    ({"trainA": "12", "trainB": "34"}, None),
    ({"clean": "12", "noisy": "12", "edges": "12"}, None),
    ({"A": "123", "B": "12"}, None),
    ({"A": "12", "B": "34"}, "label"),  # letters, perhaps
    ({"A": "12", "B": "12", "C": "12"}, "label"),
    (PAIRED, "label"),
    ({"cat": "12", "dog": "13"}, "label"),
    ({"cat": "1", "dog": "1"}, "label"),
)
def test_folders_with_sides_of_pairs_are_no_classes(tmp_path, folders, fields):
    put(tmp_path, {f"{folder}/{stem}.png": None for folder, s in folders.items() for stem in s})
    if fields is None:
        assert "--classes FILE" in str(refused(UsageError, "classes", open_sources, tmp_path).fix)
    elif fields == "label":
        assert one(tmp_path).classes == tuple(sorted(folders))
        names = "the files in cat/ and dog/ have the same names: if they are pairs"
        assert any(names in note for note in one(tmp_path).notes) == (folders == PAIRED)
    else:
        source = one(tmp_path)
        names = [set(stems) for stems in folders.values()]
        assert [list(source.schema), len(source)] == [fields.split(), len(set.intersection(*names))]
        for sample in all_of(source):
            for folder, field in zip(folders, fields.split(), strict=True):
                path = tmp_path / folder / f"{sample['__key__']}.png"
                assert sample[field] == path.read_bytes()
        unpaired = sum(len(n) - len(source) for n in names)
        assert sum(source.ignored.values()) == unpaired
    if "in/JPEGImages" not in folders:
        classes = (*folders,)
        assert one(tmp_path, classes=classes).classes == classes


def test_sides_have_splits_endings_and_lists_and_fields_name_others(tmp_path):
    for n, names in enumerate(
        ("images/{0}/a/{1}.jpg masks/{0}/a/{1}_mask.png", "{0}/images/{1}.jpg {0}/masks/{1}.png")
    ):
        root = tmp_path / str(n)
        for split, stems in (("training", "12"), ("validation", "3")):
            put(
                root,
                dict.fromkeys(names.format(split, s).split()[k] for s in stems for k in (0, 1)),
            )
        found = open_sources(root)
        assert {s: [list(f.schema), len(f)] for s, f in found.items()} == {
            "training": [["image", "mask"], 2],
            "validation": [["image", "mask"], 1],
        }
        verified(root, tmp_path / f"out{n}", resize=8)
    put(root, dict.fromkeys(["testing/images/7.jpg"]))
    found = open_sources(root)
    assert list(found["testing"].schema) == ["image"]
    assert found["testing"].notes == ("no mask in testing",)
    voc = tmp_path / "voc"
    put(voc, {f"JPEGImages/{n}.jpg": None for n in range(6)})
    put(voc, {f"SegmentationClass/{n}.png": None for n in range(4)})
    put(
        voc, {"ImageSets/Segmentation/train.txt": "0\n1\n", "ImageSets/Segmentation/val.txt": "2\n"}
    )
    found = open_sources(voc)
    assert {s: keys(f) for s, f in found.items()} == {"train": ["0", "1"], "val": ["2"]}
    assert found["train"].ignored == {
        "images of JPEGImages/ without a partner": 2, "images of no split": 1,
    }  # fmt: skip
    put(voc, {"Annotations/0.xml": "<annotation/>"})
    assert list(one(voc, fields=("image", "mask"), split="none").schema) == ["image", "mask"]
    put(
        tmp_path / "left-right",
        dict.fromkeys(f"{s}/{n}.jpg" for s in ("Left", "Right") for n in (1, 2)),
    )
    assert list(one(tmp_path / "left-right", fields=("left", "right")).schema) == ["left", "right"]
    put(tmp_path / "x", {"images/1.jpg": None, "masks/2.png": None})
    refused(SourceError, "no image in masks/ has the name", open_sources, tmp_path / "x")
    put(tmp_path / "x", {"images/2.jpg": None, "images/2.png": None})
    refused(SourceError, "two images have the same name", open_sources, tmp_path / "x")
