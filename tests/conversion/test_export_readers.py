"""Exports as other libraries read them: ImageFolder of torchvision, Keras, and datasets."""

import gc
import io
import json
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest

import shardkit
from shardkit.schema import Array, Float, Image, Images, Int, Json, Text
from shardkit.testing import make_image
from tests import clients
from tests.conversion.test_export import HOSTILE, assert_again, write
from tests.test_cli import run
from tests.test_coming_from import MADE

IMAGE = Image()
LABELLED = {"image": IMAGE, "label": Int(optional=True)}
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")  # that both of them read


def labelled(names, labels, keys=None):
    """Samples of classes, with keys that may be in a folder which is not that of their class."""
    samples = []
    for n, label in enumerate(labels):
        key = keys[n] if keys else f"{names[n % len(names)]}/{n}"
        sample = {"__key__": key, "image": make_image(n)}
        samples.append(sample | ({} if label is None else {"label": label}))
    return LABELLED, samples, names


def captioned(names):
    """Samples with everything that a picture may have beside it."""
    schema = {"image": IMAGE, "label": Int()} if names else {"image": IMAGE}
    schema |= {"mask": Image(optional=True), "views": Images(), "caption": Text()}
    schema |= {"boxes": Array("<f4", (None, 4)), "about": Json(), "x": Float()}
    samples = []
    for n, text in enumerate(["NA", "007", "", "a dog", 'json:"x"']):
        sample = {"__key__": f"dog/{n}", "image": make_image(n)} | (
            {"label": n % 2} if names else {}
        )
        sample |= {"mask": make_image(50 + n, "PNG")} if n else {}
        sample |= {"views": [make_image(9 + n), make_image(n, "PNG")][: n % 3], "caption": text}
        sample |= {"boxes": np.full((n, 4), n, "<f4"), "about": [n, {"a": 1}, "x", None, []][n]}
        samples.append(sample | {"x": [0.5, float("nan"), 1.0, float("-inf"), 2.0][n]})
    return schema, samples, names


CASES = {
    "classes, one of them without samples": labelled(["ant", "bee", "cat"], [0, 2, 0, 2]),
    "classes in another order": labelled(["dog", "cat", "10", "9"], [0, 1, 2, 3, 0]),
    "samples without a class": labelled(["cat", "dog"], [1, None, 0, -1, None, 1]),
    "odd keys and names": labelled(
        ["a/b", "..", ".x", "__y__", "Cat", "cat", "a%2Fb", "con", "x.jpg", "metadata.jsonl"],
        [n % 11 - 1 for n in range(len(HOSTILE))],
        HOSTILE,
    ),
    "masks, views and captions, in classes": captioned(["cat", "dog"]),
    "masks, views and captions": captioned([]),
    "pairs": (
        {"hr": IMAGE, "lr": IMAGE},
        [{"__key__": f"a/{n}", "hr": make_image(n), "lr": make_image(9 + n)} for n in range(3)],
        [],
    ),
}
# Both number the folders, and take each image that is below one for a sample of its class.
THEIRS = """
import json, os, sys
os.environ["KERAS_BACKEND"] = "torch"
MADE
from torchvision.datasets import ImageFolder
from keras.src.utils.dataset_utils import index_directory
from keras.src.utils.image_dataset_utils import ALLOWLIST_FORMATS
found = []
for folder in sys.argv[1:]:
    images = ImageFolder(folder, allow_empty=True)
    one = [images.classes, sorted([os.path.relpath(p, folder), n] for p, n in images.samples)]
    files, numbers, names = index_directory(folder, "inferred", ALLOWLIST_FORMATS, shuffle=False)
    other = [names, sorted([os.path.relpath(p, folder), int(n)] for p, n in zip(files, numbers))]
    found.append([one, other])
print(json.dumps(found))
"""


def by_folders(folder):
    """The classes, and the files with their class numbers, by the rules of both."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = []
    for number, name in enumerate(names):
        for path in (folder / name).rglob("*"):
            if path.name.lower().endswith(SUFFIXES):
                files.append([path.relative_to(folder).as_posix(), number])
    return [names, sorted(files)]


def exported(folder, case):
    schema, samples, names = CASES[case]
    out = folder / f"out-{[*CASES].index(case)}"
    options = {"classes": names} if names else {}
    dataset = write(folder / f"in-{[*CASES].index(case)}", samples, schema, **options)
    return out, shardkit.export(dataset, "folder", out)


@pytest.mark.parametrize("case", CASES)
def test_classes_are_the_folders_and_samples_what_is_in_them(tmp_path, case):
    _, samples, names = CASES[case]
    out, result = exported(tmp_path, case)
    assert_again(tmp_path, out, samples)
    found, files = by_folders(out)
    if not names:  # a folder for each field, to be given by itself
        assert found == [name for name, kind in CASES[case][0].items() if "Image" in str(kind)]
        return
    assert len(found) == len(names)
    about = json.loads((out / ".shardkit.json").read_text("utf-8"))
    number_of = {(out / path).read_bytes(): found[number] for path, number in files}
    folders = {}  # of the classes, in their order
    for sample in samples:
        label = sample.get("label", -1)
        folder = number_of.pop(sample["image"], None)
        assert (folder is not None) == (0 <= label < len(names))
        assert folders.setdefault(label, folder) == folder
    assert not number_of
    rest = [sample for sample in samples if not 0 <= sample.get("label", -1) < len(names)]
    said = " ".join(result.notes)
    assert (f"samples without a class: {len(rest)}," in said) == bool(rest)
    assert ("classes without samples" in said) == (len(folders) - bool(rest) < len(names))
    sure = [folders.get(n) for n in range(len(names)) if n in folders]
    assert ("number classes by name" in said) >= (sure != sorted(sure))
    assert about["class_names"] == {"label": names}


@pytest.mark.large
def test_torchvision_and_keras_read_the_folders_so(tmp_path):
    folders = [exported(tmp_path, case)[0] for case in CASES]
    script = THEIRS.replace("MADE", MADE["ImageFolder and DataLoader"])
    for folder, (one, other) in zip(
        folders, clients.run("torchvision", script, *folders), strict=True
    ):
        assert one == other == by_folders(folder)


def test_notes_are_shown_and_stay(tmp_path):
    """Also where an export is complete already."""
    case = "samples without a class"
    exported(tmp_path, case)
    number = [*CASES].index(case)
    command = ("export", tmp_path / f"in-{number}", "--to", "folder", "-o", tmp_path / "out")
    first = run(*command).stdout
    assert "samples without a class: 3" in first
    assert run(*command).stdout.startswith(first.rstrip())
    assert len(json.loads(run(*command, "--json").stdout)["notes"]) == 1


def load(kind, folder, cache):
    return datasets.load_dataset(kind, data_dir=str(folder), cache_dir=str(cache))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_datasets_reads_all_fields(tmp_path, case):
    schema, samples, names = CASES[case]
    out, _ = exported(tmp_path, case)
    found = load("imagefolder", out, tmp_path / "cache")["train"]
    images = [name for name, kind in schema.items() if isinstance(kind, Image)]
    main = "image" if "image" in schema else images[0]
    assert [row["__key__"] for row in found] == [sample["__key__"] for sample in samples]
    for name in images:
        column = "image" if name == main else name
        plain = found.cast_column(column, datasets.Image(decode=False))[column]
        read = [each and Path(each["path"]).read_bytes() for each in plain]
        assert read == [sample.get(name) for sample in samples]
    if names:
        of = {} if "10" in names else dict(enumerate(names))  # which may be a number without a name
        labels = [sample.get("label") for sample in samples]
        assert [str(x) for x in found["label"]] == [str(of.get(n, n)) for n in labels]
    if "views" in schema:
        assert [[view.size for view in views] for views in found["views"]] == [
            [PIL.Image.open(io.BytesIO(view)).size for view in sample["views"]]
            for sample in samples
        ]
    for name in {"caption", "boxes", "x"} & schema.keys():
        expected = [np.asarray(sample[name]).tolist() for sample in samples]
        assert str([*found[name]]) == str(expected)
    if "about" in schema:
        assert [json.loads(text) for text in found["about"]] == [s["about"] for s in samples]
    gc.collect()  # here, where the warning is ignored
