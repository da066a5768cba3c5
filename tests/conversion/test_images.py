"""Conversions with steps for images, end to end: every format, any number of workers, kill -9."""

import importlib.metadata
import json
import re
import sys
from dataclasses import asdict, replace

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

import shardkit
from shardkit.conversion import run as engine
from shardkit.errors import OutputError, SampleError, UsageError
from shardkit.metadata.manifest import load
from shardkit.options import IMAGE_DEFAULTS, ConvertOptions, ImageOptions
from shardkit.testing import assert_same
from tests.conftest import files_of
from tests.conversion.conftest import raised
from tests.conversion.test_keys import write_tar
from tests.conversion.test_text import peaks_of
from tests.peers import by_webdataset
from tests.preprocess import test_images as steps
from tests.preprocess.test_images import encoded, exif, opened, photo, pixels_of
from tests.test_cli import run

# A module of a user's, which workers can load.
STEPS = """
def step(sample):
    return {**sample, "image": 255 - sample["image"], "mean": float(sample["image"].mean())}

def fails(sample):
    raise ValueError("as asked")
"""
# The others store what these do, as in test_any_to_any.py; FFCV's has no PNG, masks and arrays.
TWO_FORMATS = pytest.mark.parametrize("format", ["wds", "beton"])
RESIZED = ImageOptions(resize=32)


def write(root, files):
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def numbers(size=(120, 80)):
    """A mask: a number for each block of 20 pixels."""
    rows, columns = np.mgrid[: size[1], : size[0]] // 20
    return PIL.Image.fromarray((rows * 7 + columns).astype(np.uint8))


@pytest.fixture(scope="module")
def files():
    """24 images of every kind in 3 classes, some with a mask."""
    files = {}
    for number in range(24):
        name = f"class{number // 8}/{number:03d}"
        image = photo(size=(120, 80) if number % 4 else (50, 70), seed=number)
        match number % 8:
            case 0 | 1 | 4:
                files[f"{name}.jpg"] = encoded(image, "JPEG", quality=90)
            case 2:
                files[f"{name}.jpg"] = encoded(image, "JPEG", exif=exif(6), quality=90)
                files[f"{name}_mask.png"] = encoded(numbers(), "PNG")
            case 3:
                files[f"{name}.png"] = encoded(image, "PNG")
                files[f"{name}_mask.png"] = encoded(numbers(), "PNG")
            case 5:
                files[f"{name}.webp"] = encoded(image, "WEBP")
            case 6:
                files[f"{name}.gif"] = encoded(image, "GIF")
            case 7:
                small = image.resize((48, 32))  # as it is asked for
                files[f"{name}.jpg"] = encoded(small, "JPEG")
    return files


@pytest.fixture
def images(files, tmp_path):
    return write(tmp_path / "in", files)


def make(source, format, out, **options):
    return shardkit.convert(source, format, out, **{"workers": 0, "image": RESIZED, **options})


def samples_of(path):
    with shardkit.open(path) as dataset:
        return list(dataset)


def tar_of(path, mask):
    """A TAR as WebDataset's users make them: `n.jpg` beside the mask, `n.seg.png`."""
    image, numbered = encoded(photo(size=(120, 80)), "JPEG"), encoded(numbers(), "PNG")
    names = [(f"{n}.jpg", f"{n}.{mask}") for n in range(3)]
    return write_tar(path, [pair for jpg, png in names for pair in ((jpg, image), (png, numbered))])


def original(source, sample):
    """The image that a sample was made of, upright."""
    (path,) = (p for p in source.glob(f"{sample['__key__']}.*") if "_mask" not in p.name)
    return PIL.ImageOps.exif_transpose(opened(path.read_bytes())).convert("RGB")


def values_of(mask):
    """Those of a mask as it is stored: an array, a PNG or, in .beton, a PPM of three channels."""
    values = mask if isinstance(mask, np.ndarray) else np.asarray(opened(mask))
    if values.ndim == 3:
        assert (values == values[:, :, :1]).all()
        values = values[:, :, 0]
    return values


@pytest.fixture
def my_steps(tmp_path, monkeypatch):
    """A module to be imported as new processes would, here and in those."""
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    write(tmp_path / "modules", {"my_steps.py": STEPS.encode()})
    return "my_steps:step"


@TWO_FORMATS
def test_images_are_resized_as_pillow_does_it(images, tmp_path, format):
    result = make(images, format, tmp_path / "out").splits[""]
    counts = {name: count for name, count in result.images.items() if "bytes" not in name}
    assert counts == {"passed": 3, "resized": 21}
    assert result.reasons == {"rotated": 3}
    found = samples_of(tmp_path / "out")
    assert len(found) == 24
    for sample in found:
        image = original(images, sample)
        scale = 32 / min(image.size)
        size = tuple(round(side * scale) for side in image.size)
        assert opened(sample["image"]).size == size
        by_pillow = image.resize(size, PIL.Image.Resampling.BILINEAR)
        # Of a JPEG with so much grain; off by a pixel it is 19.
        assert steps.psnr(pixels_of(sample["image"]), by_pillow) > 25


@TWO_FORMATS
@pytest.mark.parametrize("way", ["keep", "raw"])
def test_masks_lie_on_their_images_with_their_values(images, tmp_path, format, way):
    make(images, format, tmp_path / "out", image=ImageOptions(resize=40, format=way))
    with_mask = [sample for sample in samples_of(tmp_path / "out") if "mask" in sample]
    assert len(with_mask) == 6
    for sample in with_mask:
        mask = numbers()
        if pixels_of(sample["image"]).shape[:2] == (60, 40):
            mask = mask.rotate(-90, expand=True)
        np.testing.assert_array_equal(values_of(sample["mask"]), np.asarray(mask)[1::2, 1::2])


@TWO_FORMATS
def test_raw_images_are_arrays_or_ppm(images, tmp_path, format):
    image = ImageOptions(format="raw", resize=30, resize_mode="pad")
    make(images, format, tmp_path / "out", image=image)
    samples = samples_of(tmp_path / "out")
    for sample in samples:
        value = sample["image"]
        if format == "beton":
            assert value.startswith(b"P6\n30 30\n255\n")
        else:
            assert (value.dtype, value.shape) == (np.uint8, (30, 30, 3))
        image = original(images, sample)
        if set(image.size) == {120, 80}:  # of the others, margins are odd
            expected = PIL.ImageOps.pad(
                image, (30, 30), PIL.Image.Resampling.BILINEAR, color="white"
            )
            assert steps.psnr(pixels_of(value), expected) > 40
    schema = load(tmp_path / "out").schema
    fixed = shardkit.Array("|u1", (30, 30, 3))
    assert schema["image"] == (shardkit.Image() if format == "beton" else fixed)
    if format == "wds":
        theirs = by_webdataset(tmp_path / "out/shard-000000.tar", decode=True)
        for sample, ours in zip(theirs, samples, strict=True):
            assert sample["__key__"] == ours["__key__"]
            np.testing.assert_array_equal(sample["image.npy"], ours["image"])


@pytest.fixture
def small_tasks(monkeypatch):
    monkeypatch.setattr("shardkit.conversion.cuts._TASK_BYTES", 1)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 20_000)


def test_the_same_bytes_for_any_number_of_workers(images, tmp_path, my_steps, small_tasks):
    (images / "class1/cut.jpg").write_bytes(encoded(photo(), "JPEG")[:-9])
    (images / "class1/tiny.png").write_bytes(encoded(photo(size=(9, 9)), "PNG"))
    options = {
        "image": ImageOptions(resize=32, min_size=10), "on_error": "skip", "shuffle": True,
        "transform": my_steps, "shard_samples": 4,
    }  # fmt: skip
    assert len(engine.prepare(images, "wds", options=ConvertOptions(**options)).tasks) > 3
    for workers in (0, 2):
        result = make(images, "wds", tmp_path / f"out{workers}", workers=workers, **options)
        assert (result.samples, result.errors) == (24, 1)
    made = files_of(tmp_path / "out0")
    assert {"__shardkit__/errors.jsonl", "__shardkit__/filtered.jsonl"} <= made.keys()
    assert made == files_of(tmp_path / "out2")


def test_a_run_is_continued_with_the_same_options_for_images_alone(images, tmp_path, out):
    write(images, {"class2/zzz.jpg": encoded(photo(), "JPEG")[:-9]})
    image = ImageOptions(resize=32, min_size=40)
    raised(SampleError, "is truncated", make, images, "wds", out, shard_samples=4, image=image)
    before = files_of(tmp_path / "out.partial")
    for change, words in (
        ({"resize": 24}, ["resize", "32", "24"]),
        ({"quality": 50}, ["quality", "None", "50"]),
        ({"background": "red"}, ["background", "#ff0000"]),
        ({"resize": None, "min_size": None}, ["image", "resize", "None"]),
    ):
        with pytest.raises(OutputError, match="unfinished conversion") as error:
            make(images, "wds", out, shard_samples=4, image=replace(image, **change))
        assert all(word in str(error.value.found) for word in words)
    assert files_of(tmp_path / "out.partial") == before
    for folder in (out, tmp_path / "whole"):
        make(images, "wds", folder, shard_samples=4, image=image, on_error="skip")
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_transform_with_other_code_is_another(images, tmp_path, out, my_steps, monkeypatch):
    make(images, "wds", out, transform=my_steps)
    write(tmp_path / "modules", {"my_steps.py": STEPS.replace("255", "25").encode()})
    monkeypatch.delitem(sys.modules, "my_steps")
    error = raised(OutputError, "another dataset", make, images, "wds", out, transform=my_steps)
    assert error.found == "the code of the transform has changed"


def test_a_function_that_nothing_tells_from_another_is_never_found_done(images, tmp_path):
    """As in a notebook: a cell is changed and run again."""

    def run_cell(number, name, **options):
        def marked(sample):
            return {**sample, "mark": number}

        return make(images, "wds", tmp_path / name, transform=marked, **options)

    run_cell(1, "done")
    try:
        again = run_cell(2, "done")
    except OutputError:
        again = run_cell(2, "done", overwrite=True)
    assert not again.already_complete
    (images / "class2/zzz.jpg").write_bytes(b"text")
    with pytest.raises(SampleError):
        run_cell(1, "unfinished", shard_samples=4)
    run_cell(2, "unfinished", shard_samples=4, on_error="skip")
    for name in ("done", "unfinished"):
        assert {sample["mark"] for sample in samples_of(tmp_path / name)} == {2}


def test_planning_does_not_depend_on_names(images):
    def planned(rename):
        options = ConvertOptions(rename=rename, shard_size="8kB", image=RESIZED)
        return engine.prepare(images, "wds", options=options).tasks

    assert len(planned({})) == len(planned({"image": "jpg"})) > 3


def test_shards_keep_their_limit_and_are_filled(tmp_path, out):
    photos = {f"{n:03d}.jpg": encoded(photo(size=(300, 200), seed=n), "JPEG") for n in range(60)}
    source = write(tmp_path / "in", photos)
    make(source, "wds", out, image=ImageOptions(resize=100), shard_size="100kB")
    sizes = [shard.file.bytes for shard in load(out).shards]
    assert max(sizes) <= 100_000
    assert min(sizes) > 0.5 * max(sizes)


def test_the_manifest_has_options_versions_counts_and_reasons(images, tmp_path, out, my_steps):
    image = ImageOptions(resize=32, background="red", format="png", min_size=40)
    (images / "class1/alpha.png").write_bytes(encoded(steps.see_through(), "PNG"))
    result = make(images, "wds", out, image=image, transform=my_steps).splits[""]
    manifest = load(out)
    assert manifest.recipe["image"] == asdict(image)
    assert manifest.recipe["image"]["background"] == "#ff0000"
    assert manifest.recipe["image_defaults"] == IMAGE_DEFAULTS
    assert manifest.recipe["transform"]["name"] == my_steps
    assert len(manifest.recipe["transform"]["digest"]) == 32
    for name in ("shardkit", "simplejpeg", "pillow", "numpy"):
        assert importlib.metadata.version(name).startswith(manifest.versions[name])
    kept = [path for path in files_of(images) if "_mask" not in path]
    small = [path for path in kept if min(opened((images / path).read_bytes()).size) < 40]
    assert manifest.filtered == {"smaller than 40": len(small)} == result.filtered
    sizes = [(images / path).stat().st_size for path in kept if path not in small]
    stored = sum(len(sample["image"]) for sample in samples_of(out))
    counts = {"resized": len(sizes), "bytes in": sum(sizes), "bytes out": stored}
    assert manifest.images == result.images == counts
    assert manifest.reasons == result.reasons == {
        "changed by the transform": 22, "gif to png": 3, "jpeg to png": 12, "rotated": 3,
        "transparent": 1, "webp to png": 3,
    }  # fmt: skip
    assert str(tmp_path) not in (out / "__shardkit__/manifest.json").read_text()
    make(images, "wds", tmp_path / "plain", image=ImageOptions())  # without steps
    plain = load(tmp_path / "plain")
    assert (plain.images, plain.reasons, plain.filtered) == ({}, {}, {})
    assert plain.recipe["image"] is plain.recipe["transform"] is None
    assert "numpy" not in plain.versions


def odd_sizes(root):
    sizes = {"a/wide": (90, 30), "a/good": (60, 50), "b/small": (20, 20), "b/big": (400, 300)}
    return write(root, {f"{n}.png": encoded(photo(size=s), "PNG") for n, s in sizes.items()})


FILTERS = ImageOptions(min_size=25, max_aspect=2, max_pixels=10_000)


@pytest.mark.parametrize("name", ["out", "train.lmdb"])
def test_what_filters_drop_is_counted_and_listed_and_no_error(tmp_path, name):
    source, out = odd_sizes(tmp_path / "in"), tmp_path / name
    beside = "out/__shardkit__/filtered.jsonl"
    listed = tmp_path / (beside if name == "out" else f"__shardkit__/{name}.filtered.jsonl")
    result = make(source, "lmdb", out, image=FILTERS)
    assert (result.samples, result.errors) == (1, 0)
    dropped = [
        ("a/wide", "aspect over 2", "90 x 30"),
        ("b/big", "more than 10,000 pixels", "400 x 300"),
        ("b/small", "smaller than 25", "20 x 20"),
    ]
    assert result.splits[""].filtered == {reason: 1 for _, reason, _ in dropped}
    assert result.splits[""].filtered_list == str(listed)
    assert list(map(json.loads, listed.read_text().splitlines())) == [
        {"source": f"{key}.png", "key": key, "reason": reason, "found": found}
        for key, reason, found in dropped
    ]
    assert [sample["__key__"] for sample in samples_of(out)] == ["a/good"]
    report = shardkit.verify(out, against=source)
    assert report.problems == []
    assert "3 samples of the source filtered out, as requested" in report.notes
    listed.write_text(listed.read_text().replace("wide", "tall"))
    assert not shardkit.verify(out).sound


def test_splits_count_for_themselves(tmp_path, out):
    odd_sizes(tmp_path / "in/train")
    write(tmp_path / "in/val", {"a/x.png": encoded(photo(), "PNG")})
    result = make(tmp_path / "in", "wds", out, image=ImageOptions(resize=40, min_size=25))
    assert result.splits["train"].filtered == {"smaller than 25": 1}
    assert result.splits["val"].filtered == {}
    assert result.splits["val"].images["resized"] == 1
    assert not (out / "val/__shardkit__/filtered.jsonl").exists()
    assert shardkit.verify(out, against=tmp_path / "in").sound


JPEG = encoded(photo(size=(300, 200)), "JPEG")
BAD = {  # what is said of them
    "cut.jpg": (JPEG[: len(JPEG) // 2], "is truncated"),
    "damaged.jpg": (steps.without_middle(JPEG), "premature end"),
    "empty.jpg": (b"", "an empty file"),
    "text.png": (b"no image", "text: 'no image'"),
    "flipped.png": (steps.with_flipped_bit(encoded(photo(), "PNG")), "broken PNG file"),
    "bomb.png": (steps.bomb(50_000, 50_000), "too many pixels"),
    "wide.jpg": (encoded(PIL.Image.new("RGB", (65501, 3)), "PNG"), "cannot be stored"),
    "unmasked.jpg": (JPEG, "a mask of 120 x 80 pixels"),
}


def test_every_kind_of_bad_image_is_dropped_and_listed(tmp_path, small_tasks):
    # The wide one is not resized: there is a side of 3 pixels.
    image = ImageOptions(resize=100, format="jpeg")
    files = {f"{n}.jpg": JPEG for n in range(3)}
    for name, (data, what) in BAD.items():
        bad = {f"bad-{name}": data}
        if name == "unmasked.jpg":
            bad["bad-unmasked_mask.png"] = encoded(numbers(), "PNG")
        files |= bad
        alone = write(tmp_path / name, {"a.jpg": JPEG, **bad})
        with pytest.raises(SampleError) as error:
            make(alone, "wds", tmp_path / f"{name}-stopped", image=image)
        assert what in str(error.value)
        assert error.value.where["path"] == f"bad-{name}"
    source, out = write(tmp_path / "in", files), tmp_path / "out"
    result = make(source, "wds", out, image=image, on_error="skip", shard_samples=4)
    assert (result.samples, result.errors) == (3, len(BAD))
    found = (out / "__shardkit__/errors.jsonl").read_text().splitlines()
    for line, name in zip(map(json.loads, found), sorted(BAD), strict=True):
        assert line["source"] == f"bad-{name}"
        key, _, suffix = line["source"].partition(".")
        assert line["key"] in (key, f"{key}~{suffix}")
        assert line["field"] == ("mask" if "unmasked" in key else "image")
        assert BAD[name][1] in f"{line['what']} {line['found']}"
    assert shardkit.verify(out, against=source).problems == []


RECOMPRESSED = ImageOptions(resize=32, resize_mode="crop", quality=60, format="jpeg")
WAYS = {
    "resized": ("wds", {"image": RESIZED}),
    "raw": ("beton", {"image": ImageOptions(format="raw", resize=32)}),
    "filtered": ("wds", {"image": ImageOptions(resize=32, min_size=45)}),
    "renamed": ("wds", {"image": RESIZED, "rename": {"image": "jpg", "mask": "seg"}}),
    "cropped and recompressed": ("beton", {"image": RECOMPRESSED}),
    "shuffled": ("wds", {"image": RESIZED, "shuffle": True, "shard_samples": 5}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_dataset_is_sound_until_a_pixel_of_its_source_changes(images, out, way):
    format, options = WAYS[way]
    make(images, format, out, **options)
    assert shardkit.verify(out, against=images, decode=True).problems == []
    for name, field, colour, more in (
        ("class1/009.jpg", "image", "white", {"quality": 90}),
        ("class0/003_mask.png", "mask", 99, {}),
    ):
        before = (images / name).read_bytes()
        image = opened(before)
        image.paste(colour, (50, 30, 70, 50))
        (images / name).write_bytes(encoded(image, image.format or (more and "JPEG"), **more))
        (problem,) = shardkit.verify(out, against=images).problems
        assert problem.what == "a value differs from the source"
        assert problem.where["key"] == name[:10]
        assert problem.where["field"] == options.get("rename", {}).get(field, field)
        (images / name).write_bytes(before)


def test_datasets_that_were_made_alike_are_alike(images, tmp_path):
    for one, two, way in (
        ("wds", "parquet", "resized"),
        ("lmdb", "parquet", "raw"),
        ("beton", "beton", "cropped and recompressed"),
    ):
        paths = [tmp_path / f"{way}{number}" for number in range(2)]
        for path, format in zip(paths, (one, two), strict=True):
            make(images, format, path, **WAYS[way][1])
        assert shardkit.verify(paths[0], against=paths[1]).problems == []


def test_a_dataset_made_of_a_resized_one_is_sound_against_it(images, tmp_path):
    make(images, "wds", tmp_path / "one", image=ImageOptions(resize=60))
    make(tmp_path / "one", "lmdb", tmp_path / "two", image=ImageOptions(resize=30))
    make(tmp_path / "two", "parquet", tmp_path / "three", image=ImageOptions())
    assert shardkit.verify(tmp_path / "two", against=tmp_path / "one").problems == []
    assert shardkit.verify(tmp_path / "three", against=tmp_path / "two").problems == []
    assert not shardkit.verify(tmp_path / "two", against=images).sound  # resized once, not twice


def test_of_a_transform_only_keys_are_compared(images, tmp_path):
    def step(sample):
        return {**sample, "image": 255 - sample["image"]} if sample["label"] else None

    make(images, "wds", tmp_path / "out", transform=step)
    report = shardkit.verify(tmp_path / "out", against=images)
    assert report.problems == []  # what it drops is not missed
    assert any("only keys are compared" in note for note in report.notes)
    (images / "class1/009.jpg").rename(images / "class1/new.jpg")
    found = shardkit.verify(tmp_path / "out", against=images).problems
    assert sorted(problem.where["key"] for problem in found) == ["class1/009", "class1/new"]


def test_other_versions_of_the_codecs_are_said(images, tmp_path, monkeypatch):
    make(images, "wds", tmp_path / "out")
    monkeypatch.setattr("simplejpeg.__version__", "99")
    report = shardkit.verify(tmp_path / "out", against=images)
    assert report.problems == []
    assert any("other versions of the codecs" in note for note in report.notes)


@pytest.mark.parametrize(
    ("format", "image"),
    [
        ("wds", ImageOptions(resize=64)),
        ("lmdb", ImageOptions(resize=64, resize_mode="crop", format="jpeg", quality=70)),
        ("wds", ImageOptions(resize=64, resize_mode="pad", format="png")),
        ("lmdb", ImageOptions(resize=64, resize_mode="exact", upscale=True, format="jpeg")),
        ("wds", ImageOptions(resize=64, resize_mode="longer", format="webp", chroma="444")),
        ("lmdb", ImageOptions(icc="srgb", background="black")),
        ("beton", ImageOptions(resize=32, format="raw")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.resize_mode}-{value.format}",
)
def test_what_was_done_once_is_not_done_again(images, tmp_path, format, image):
    make(images, format, tmp_path / "one", image=image)
    again = make(tmp_path / "one", format, tmp_path / "two", image=image).splits[""]
    # Recompressing those that were kept is no gain the second time either.
    assert again.images["passed"] + again.images.get("kept", 0) == again.samples
    assert again.images["bytes in"] == again.images["bytes out"]
    for two, one in zip(samples_of(tmp_path / "two"), samples_of(tmp_path / "one"), strict=True):
        assert_same(two, one)


def test_the_command_does_what_its_options_say(images, tmp_path, out, my_steps):
    words = (
        "--resize 30 --resize-mode pad --upscale --image-format jpeg --quality 77 --chroma 422 "
        "--background teal --icc keep --min-size 33 --max-aspect 1.6 --max-pixels 9600 "
        "--check decode --transform my_steps:step"
    )
    run("convert", images, "--to", "wds", "-o", out, *words.split())
    image = ImageOptions(
        resize=30, resize_mode="pad", upscale=True, format="jpeg", quality=77, chroma="422",
        background="teal", icc="keep", min_size=33, max_aspect=1.6, max_pixels=9600, check="decode",
    )  # fmt: skip
    make(images, "wds", tmp_path / "same", image=image, transform=my_steps)
    assert files_of(out) == files_of(tmp_path / "same")


def test_the_summary_says_what_became_of_images(images, out):
    (images / "class0/alpha.png").write_bytes(encoded(steps.see_through(), "PNG"))
    (images / "class0/tiny.png").write_bytes(encoded(photo(size=(9, 9)), "PNG"))
    words = ["convert", images, "--to", "wds", "-o", out, "--resize", "32", "--min-size", "10"]
    found = run(*words)
    text = " ".join(found.stdout.split())
    for said in (
        "3 passed through", "22 resized", "1 smaller than 10", "3 rotated", "1 transparent",
        "filtered.jsonl", "taken as the mask of 'image'",
    ):  # fmt: skip
        assert said in text + found.stderr
    assert "filtered" in text
    about = json.loads(run(*words, "--json").stdout)["splits"][""]
    assert about["images"]["resized"] == 22
    assert about["filtered"] == {"smaller than 10": 1}


def test_a_plan_shows_the_steps_and_does_nothing(images, tmp_path, my_steps):
    before = files_of(tmp_path)
    words = ["convert", images, "--to", "wds", "--plan", "--resize", "37", "--background", "teal"]
    words += ["--transform", "my_steps:step"]
    text = " ".join(run(*words).stdout.split())
    assert re.search(r"resize\W37", text)
    for shown in ("#008080", "transform my_steps:step", "mean"):
        assert shown in text
    about = json.loads(run(*words, "--json").stdout)
    assert about["recipe"]["image"]["resize"] == 37
    assert about["parts"][0]["schema"]["mean"] == {"type": "Float"}
    made = files_of(tmp_path).keys() - before.keys()
    assert all("__pycache__" in name for name in made)  # Python's own, of the transform
    assert before.items() <= files_of(tmp_path).items()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--resize big", 2, "is not a valid integer"),
        ("--resize-mode crop", 2, "requires --resize N"),
        ("--resize 9 --resize-mode fill", 2, "'fill' is not one of"),
        ("--transform nowhere:step", 2, "cannot be imported"),
        ("--resize 20", 1, "the image is truncated"),
        ("--check decode", 1, "the image is truncated"),
        ("--transform my_steps:fails", 1, "the transform raised ValueError: as asked"),
    ],
)
def test_exit_codes_and_messages(tmp_path, words, code, message, my_steps):
    cut = {} if "fails" in words else {"b.jpg": JPEG[:-50]}
    source = write(tmp_path / "in", {"a.jpg": JPEG, **cut})
    words = ["--to", "wds", "-o", tmp_path / "out", "--workers", "0", *words.split()]
    assert message in run("convert", source, *words, check=code).stderr
    assert not (tmp_path / "out").exists()
    assert code == 1 or not (tmp_path / "out.partial").exists()


def test_numbers_of_numpy_are_numbers(images, tmp_path, out):
    image = ImageOptions(resize=np.int64(32), max_aspect=np.float64(3))
    make(images, "wds", out, image=image)
    make(images, "wds", tmp_path / "same", image=ImageOptions(resize=32, max_aspect=3.0))
    assert files_of(out) == files_of(tmp_path / "same")


def test_what_the_format_cannot_hold_is_refused_before_anything_is_made(images, tmp_path, out):
    """FFCV decodes JPEG and raw pixels."""
    with pytest.raises(UsageError, match="cannot hold png"):
        make(images, "beton", out, image=ImageOptions(format="png"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_transform_is_found_in_the_current_folder_by_workers_too(images, out, monkeypatch):
    monkeypatch.chdir(write(out.with_name("here"), {"steps_in_this_folder.py": STEPS.encode()}))
    words = "--to wds --workers 1 --transform steps_in_this_folder:step --shard-size 8kB"
    run("convert", images, "-o", out, *words.split())
    assert "mean" in shardkit.open(out).schema


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize(
    ("progressive", "side", "megabytes"),
    [
        (False, 8000, 1000),
        # libjpeg keeps all coefficients: two bytes for each of 1.5 samples a pixel are 303 MB.
        (True, 256, 700),
    ],
)
def test_an_image_of_100_megapixels_needs_little_memory(tmp_path, progressive, side, megabytes):
    tile = np.asarray(photo(size=(1160, 870)))
    image = PIL.Image.fromarray(np.tile(tile, (10, 10, 1)))
    write(tmp_path / "in", {"huge.jpg": encoded(image, "JPEG", progressive=progressive)})
    peaks = peaks_of(tmp_path / "in", "-o", tmp_path / "out", "--resize", side)
    assert load(tmp_path / "out").images["resized"] == 1
    assert peaks[-1] < megabytes * 10**6


@TWO_FORMATS
@pytest.mark.parametrize("resize", [40, None])
def test_members_of_a_tar_that_are_masks_keep_their_values(tmp_path, out, format, resize):
    source = tar_of(tmp_path / "a.tar", "seg.png")
    result = make(source, format, out, image=ImageOptions(resize=resize))
    size = (60, 40) if resize else (120, 80)
    expected = np.asarray(numbers().resize(size, PIL.Image.Resampling.NEAREST))
    for sample in samples_of(out):
        np.testing.assert_array_equal(values_of(sample["seg.png"]), expected)
    taken = "'seg.png' is taken as the mask of 'jpg'" in " ".join(result.notes)
    assert taken is (resize is not None or format == "beton")
    assert shardkit.verify(out, against=source).sound


def test_an_image_that_may_be_a_mask_is_refused_by_the_command(tmp_path):
    source = tar_of(tmp_path / "a.tar", "second.png")
    convert = ("convert", source, "--to", "wds", "--workers", "0", "--resize", "40", "-o")
    assert "--masks second.png" in run(*convert, tmp_path / "no", check=2).stderr
    assert not (tmp_path / "no").exists()
    before = {*numbers().tobytes()}
    for masks in ("second.png", "none"):
        run(*convert, tmp_path / masks, "--masks", masks)
        found = opened(samples_of(tmp_path / masks)[0]["second.png"])
        assert found.mode == "L"
        assert ({*found.tobytes()} <= before) == (masks != "none")  # images have values in between
