"""Conversions with steps for images, end to end: every format, any number of workers, kill -9."""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest

import shardkit
from shardkit.conversion import run as engine
from shardkit.errors import OutputError, SampleError, SourceError, UsageError
from shardkit.manifest import load
from shardkit.options import IMAGE_DEFAULTS, ConvertOptions, ImageOptions
from shardkit.testing import assert_same
from tests.conftest import IMAGE_FORMATS, files_of
from tests.peers import by_webdataset
from tests.preprocess.test_images import (
    bomb,
    encoded,
    exif,
    frames,
    opened,
    photo,
    pixels_of,
    psnr,
    see_through,
    with_flipped_bit,
    without_middle,
)
from tests.test_cli import run

# A module of a user's, which workers can load.
STEPS = """
def step(sample):
    return {**sample, "image": 255 - sample["image"], "mean": float(sample["image"].mean())}

def fails(sample):
    raise ValueError("as asked")
"""
# The others store what these do, as a test says; FFCV's has no PNG, no masks and no arrays.
TWO_FORMATS = pytest.mark.parametrize("format", ["wds", "beton"])
RESIZED = ImageOptions(resize=32)


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def numbers(size: tuple[int, int] = (120, 80)) -> PIL.Image.Image:
    """A mask: a number for each block of 20 pixels."""
    rows, columns = np.mgrid[: size[1], : size[0]] // 20
    return PIL.Image.fromarray((rows * 7 + columns).astype(np.uint8))


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
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
def images(files: dict[str, bytes], tmp_path: Path) -> Path:
    return write(tmp_path / "in", files)


def make(source: Path, format: str, out: Path, **options: Any) -> shardkit.ConvertResult:
    return shardkit.convert(source, format, out, **{"workers": 0, "image": RESIZED, **options})


def samples_of(path: Path) -> list[dict[str, Any]]:
    with shardkit.open(path) as dataset:
        return list(dataset)


def tar_of(path: Path, mask: str, samples: int = 3) -> Path:
    """A TAR as WebDataset's users make them: `n.jpg` beside the mask, `n.seg.png`."""
    with tarfile.open(path, "w") as file:
        for number in range(samples):
            image = encoded(photo(size=(120, 80), seed=number), "JPEG")
            for name, data in (("jpg", image), (mask, encoded(numbers(), "PNG"))):
                member = tarfile.TarInfo(f"{number}.{name}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return path


def original(source: Path, sample: dict[str, Any]) -> PIL.Image.Image:
    """The image that a sample was made of, upright."""
    (path,) = (p for p in source.glob(f"{sample['__key__']}.*") if "_mask" not in p.name)
    upright = PIL.ImageOps.exif_transpose(opened(path.read_bytes()))
    return upright.convert("RGB")


def values_of(mask: Any) -> Any:
    """Those of a mask as it is stored: an array, a PNG or, in .beton, a PPM of three channels."""
    values = mask if isinstance(mask, np.ndarray) else np.asarray(opened(mask))
    if values.ndim == 3:
        assert (values == values[:, :, :1]).all()
        values = values[:, :, 0]
    return values


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes `my_steps.py`, to be imported as new processes would, here and in those."""
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))

    def write_source(source: str) -> None:
        monkeypatch.delitem(sys.modules, "my_steps", raising=False)
        write(tmp_path / "modules", {"my_steps.py": source.encode()})
        shutil.rmtree(tmp_path / "modules/__pycache__", ignore_errors=True)

    return write_source


@pytest.fixture
def my_steps(write_module: Callable[[str], None]) -> str:
    write_module(STEPS)
    return "my_steps:step"


# --- formats --------------------------------------------------------------------------------------


@TWO_FORMATS
def test_images_are_resized_as_pillow_does_it(images: Path, tmp_path: Path, format: str) -> None:
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
        assert psnr(pixels_of(sample["image"]), by_pillow) > 25


@pytest.mark.parametrize("image", [RESIZED, ImageOptions(resize=40, format="raw")], ids=str)
def test_all_formats_that_hold_any_image_hold_the_same(
    images: Path, tmp_path: Path, image: ImageOptions
) -> None:
    shutil.rmtree(images / "class2")
    found = {}
    for format in IMAGE_FORMATS:
        make(images, format, tmp_path / format, image=image)
        found[format] = samples_of(tmp_path / format)
    for format, samples in found.items():
        for sample, expected in zip(samples, found["wds"], strict=True):
            if format != "beton":
                assert_same(sample, expected)
            else:
                value = expected["image"]
                same = image.format == "raw" or opened(value).format == "JPEG"
                assert not same or (pixels_of(sample["image"]) == pixels_of(value)).all()


@TWO_FORMATS
@pytest.mark.parametrize("way", ["keep", "raw"])
def test_masks_lie_on_their_images_with_their_values(
    images: Path, tmp_path: Path, format: str, way: str
) -> None:
    make(images, format, tmp_path / "out", image=ImageOptions(resize=40, format=way))
    with_mask = [sample for sample in samples_of(tmp_path / "out") if "mask" in sample]
    assert len(with_mask) == 6
    for sample in with_mask:
        mask = numbers()
        if pixels_of(sample["image"]).shape[:2] == (60, 40):
            mask = mask.rotate(-90, expand=True)
        np.testing.assert_array_equal(values_of(sample["mask"]), np.asarray(mask)[1::2, 1::2])


@TWO_FORMATS
def test_raw_images_are_arrays_or_ppm(images: Path, tmp_path: Path, format: str) -> None:
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
            assert psnr(pixels_of(value), expected) > 40
    schema = load(tmp_path / "out").schema
    fixed = shardkit.Array("|u1", (30, 30, 3))
    assert schema["image"] == (shardkit.Image() if format == "beton" else fixed)
    if format == "wds":
        theirs = by_webdataset(tmp_path / "out/shard-000000.tar", decode=True)
        for sample, ours in zip(theirs, samples, strict=True):
            assert sample["__key__"] == ours["__key__"]
            np.testing.assert_array_equal(sample["image.npy"], ours["image"])


@TWO_FORMATS
def test_raw_pixels_are_those_of_the_image(tmp_path: Path, format: str) -> None:
    source = write(tmp_path / "in", {"a.png": encoded(photo(), "PNG")})
    make(source, format, tmp_path / "out", image=ImageOptions(format="raw"))
    (sample,) = samples_of(tmp_path / "out")
    np.testing.assert_array_equal(pixels_of(sample["image"]), photo())


# --- always the same bytes ------------------------------------------------------------------------


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.conversion.cuts._TASK_BYTES", 1)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 20_000)


@pytest.mark.usefixtures("small_tasks")
def test_the_same_bytes_for_any_number_of_workers(
    images: Path, tmp_path: Path, my_steps: str
) -> None:
    (images / "class1/cut.jpg").write_bytes(encoded(photo(), "JPEG")[:-9])
    (images / "class1/tiny.png").write_bytes(encoded(photo(size=(9, 9)), "PNG"))
    options: dict[str, Any] = {
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


@pytest.mark.large
def test_one_shard_has_the_same_bytes_for_any_number_of_workers(
    images: Path, tmp_path: Path
) -> None:
    for workers in (0, 2):
        (tmp_path / f"{workers}").mkdir()
        make(images, "beton", tmp_path / f"{workers}/one.beton", workers=workers)
    assert files_of(tmp_path / "0") == files_of(tmp_path / "2")


# --- what decides whether a run continues ---------------------------------------------------------


def test_a_run_is_continued_with_the_same_options_for_images_alone(
    images: Path, tmp_path: Path
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    write(images, {"class2/zzz.jpg": encoded(photo(), "JPEG")[:-9]})
    image = ImageOptions(resize=32, min_size=40)
    with pytest.raises(SampleError, match="is truncated"):
        make(images, "wds", out, shard_samples=4, image=image)
    before = files_of(tmp_path / "out.partial")
    for change, words in (
        ({"resize": 24}, ["resize", "32", "24"]),
        ({"quality": 50}, ["quality", "None", "50"]),
        ({"background": "red"}, ["background", "#ff0000"]),
        ({"min_size": 10}, ["min_size", "10"]),
        ({"resize": None, "min_size": None}, ["image", "resize", "None"]),
    ):
        with pytest.raises(OutputError, match="unfinished conversion") as error:
            make(images, "wds", out, shard_samples=4, image=replace(image, **change))
        for word in words:
            assert word in str(error.value.found)
    assert files_of(tmp_path / "out.partial") == before
    for folder in (out, whole):
        make(images, "wds", folder, shard_samples=4, image=image, on_error="skip")
    assert files_of(out) == files_of(whole)
    with pytest.raises(OutputError, match="holds another dataset") as error:
        make(images, "wds", out, shard_samples=4, on_error="skip")
    assert "min_size" in str(error.value.found)


def test_another_source_of_a_transform_does_not_continue_a_run(
    images: Path, tmp_path: Path, write_module: Callable[[str], None]
) -> None:
    options: dict[str, Any] = {
        "image": ImageOptions(), "transform": "my_steps:step", "shard_samples": 4
    }  # fmt: skip
    out = tmp_path / "out"
    (images / "class2/zzz.jpg").write_bytes(b"text")
    write_module("def step(sample):\n    return sample\n")
    with pytest.raises(SampleError, match="not an image"):
        make(images, "wds", out, **options)
    write_module("def step(sample):\n    return {**sample, 'new': 1}\n")
    with pytest.raises(OutputError, match="unfinished conversion") as error:
        make(images, "wds", out, **options)
    assert "transform" in str(error.value.found)
    write_module("def step(sample):\n    return sample\n")
    make(images, "wds", out, on_error="skip", **options)
    assert make(images, "wds", out, on_error="skip", **options).already_complete
    write_module("def step(sample):\n    return {**sample, 'new': 1}\n")
    with pytest.raises(OutputError, match="holds another dataset") as error:
        make(images, "wds", out, on_error="skip", **options)
    assert "transform" in str(error.value.found)


def test_a_function_that_nothing_tells_from_another_is_never_found_done(
    images: Path, tmp_path: Path
) -> None:
    """As in a notebook: a cell is changed and run again."""

    def run_cell(number: int, name: str, **options: Any) -> Any:
        def marked(sample: dict[str, Any]) -> dict[str, Any]:
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


def test_planning_does_not_depend_on_names(images: Path) -> None:
    options: dict[str, Any] = {"shard_size": "8kB", "image": RESIZED}
    plain = engine.prepare(images, "wds", options=ConvertOptions(**options))
    renamed = engine.prepare(
        images, "wds", options=ConvertOptions(rename={"image": "jpg"}, **options)
    )
    assert len(plain.tasks) == len(renamed.tasks) > 3


def test_shards_keep_their_limit_and_are_filled(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in",
        {f"{n:03d}.jpg": encoded(photo(size=(300, 200), seed=n), "JPEG") for n in range(60)},
    )
    make(source, "wds", tmp_path / "out", image=ImageOptions(resize=100), shard_size="100kB")
    sizes = [shard.file.bytes for shard in load(tmp_path / "out").shards]
    assert max(sizes) <= 100_000
    assert min(sizes) > 0.5 * max(sizes)


# --- manifest and lists ---------------------------------------------------------------------------


@pytest.mark.usefixtures("my_steps")
def test_the_manifest_has_options_versions_counts_and_reasons(images: Path, tmp_path: Path) -> None:
    image = ImageOptions(resize=32, background="red", format="png", min_size=40)
    (images / "class1/alpha.png").write_bytes(encoded(see_through(), "PNG"))
    result = make(images, "wds", tmp_path / "out", image=image, transform="my_steps:step").splits[
        ""
    ]
    manifest = load(tmp_path / "out")
    assert manifest.recipe["image"] == asdict(image)
    assert manifest.recipe["image"]["background"] == "#ff0000"
    assert manifest.recipe["image_defaults"] == IMAGE_DEFAULTS
    assert manifest.recipe["transform"]["name"] == "my_steps:step"
    assert len(manifest.recipe["transform"]["digest"]) == 32
    for name in ("shardkit", "simplejpeg", "pillow", "numpy"):
        version = importlib.metadata.version(name)
        assert version.startswith(manifest.versions[name])
    kept = [path for path in files_of(images) if "_mask" not in path]
    small = [path for path in kept if min(opened((images / path).read_bytes()).size) < 40]
    assert manifest.filtered == {"smaller than 40": len(small)} == result.filtered
    sizes = [(images / path).stat().st_size for path in kept if path not in small]
    stored = [len(sample["image"]) for sample in samples_of(tmp_path / "out")]
    assert manifest.images == {
        "resized": len(sizes), "bytes in": sum(sizes), "bytes out": sum(stored)
    } == result.images  # fmt: skip
    assert manifest.reasons == result.reasons == {
        "changed by the transform": 22, "gif to png": 3, "jpeg to png": 12, "rotated": 3,
        "transparent": 1, "webp to png": 3,
    }  # fmt: skip
    assert str(tmp_path) not in (tmp_path / "out/__shardkit__/manifest.json").read_text()


def test_without_steps_the_manifest_says_nothing_of_them(images: Path, tmp_path: Path) -> None:
    make(images, "wds", tmp_path / "out", image=ImageOptions())
    manifest = load(tmp_path / "out")
    assert (manifest.images, manifest.reasons, manifest.filtered) == ({}, {}, {})
    assert manifest.recipe["image"] is None
    assert manifest.recipe["transform"] is None
    assert "numpy" not in manifest.versions


def odd_sizes(root: Path) -> Path:
    sizes = {"a/wide": (90, 30), "a/good": (60, 50), "b/small": (20, 20), "b/big": (400, 300)}
    return write(root, {f"{n}.png": encoded(photo(size=s), "PNG") for n, s in sizes.items()})


FILTERS = ImageOptions(min_size=25, max_aspect=2, max_pixels=10_000)


def test_what_filters_drop_is_counted_and_listed_and_no_error(tmp_path: Path) -> None:
    source, out = odd_sizes(tmp_path / "in"), tmp_path / "out"
    result = make(source, "lmdb", out, image=FILTERS)
    assert (result.samples, result.errors) == (1, 0)
    split = result.splits[""]
    dropped = [
        ("a/wide", "aspect over 2", "90 x 30"),
        ("b/big", "more than 10,000 pixels", "400 x 300"),
        ("b/small", "smaller than 25", "20 x 20"),
    ]
    assert split.filtered == {reason: 1 for _, reason, _ in dropped}
    assert split.filtered_list == str(out / "__shardkit__/filtered.jsonl")
    lines = (out / "__shardkit__/filtered.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [
        {"source": f"{key}.png", "key": key, "reason": reason, "found": found}
        for key, reason, found in dropped
    ]
    assert [sample["__key__"] for sample in samples_of(out)] == ["a/good"]
    report = shardkit.verify(out, against=source)
    assert report.problems == []
    assert "3 samples of the source filtered out, as requested" in report.notes


def test_the_list_of_a_single_file_lies_beside_it(tmp_path: Path) -> None:
    source = odd_sizes(tmp_path / "in")
    result = make(source, "lmdb", tmp_path / "train.lmdb", image=FILTERS)
    listed = tmp_path / "__shardkit__/train.lmdb.filtered.jsonl"
    assert result.splits[""].filtered_list == str(listed)
    assert len(listed.read_text().splitlines()) == 3
    assert shardkit.verify(tmp_path / "train.lmdb", against=source).sound
    listed.write_text(listed.read_text().replace("wide", "tall"))
    assert not shardkit.verify(tmp_path / "train.lmdb").sound


@TWO_FORMATS
def test_filters_that_drop_everything_are_an_error(tmp_path: Path, format: str) -> None:
    source = odd_sizes(tmp_path / "in")
    with pytest.raises(SourceError, match="no sample of the source is left") as caught:
        make(source, format, tmp_path / "out", image=ImageOptions(min_size=1000))
    assert "smaller than 1000" in str(caught.value.found)
    assert not (tmp_path / "out").exists()


def test_splits_count_for_themselves(tmp_path: Path) -> None:
    odd_sizes(tmp_path / "in/train")
    write(tmp_path / "in/val", {"a/x.png": encoded(photo(), "PNG")})
    result = make(
        tmp_path / "in", "wds", tmp_path / "out", image=ImageOptions(resize=40, min_size=25)
    )
    assert result.splits["train"].filtered == {"smaller than 25": 1}
    assert result.splits["val"].filtered == {}
    assert result.splits["val"].images["resized"] == 1
    assert not (tmp_path / "out/val/__shardkit__/filtered.jsonl").exists()
    assert shardkit.verify(tmp_path / "out", against=tmp_path / "in").sound


# --- bad images ---------------------------------------------------------------------------------

JPEG = encoded(photo(size=(300, 200)), "JPEG")
BAD = {  # what is said of them
    "cut.jpg": (JPEG[: len(JPEG) // 2], "is truncated"),
    "damaged.jpg": (without_middle(JPEG), "premature end"),
    "empty.jpg": (b"", "an empty file"),
    "text.png": (b"no image", "text: 'no image'"),
    "flipped.png": (with_flipped_bit(encoded(photo(), "PNG")), "broken PNG file"),
    "cut.png": (encoded(photo(), "PNG")[:-30], "is truncated"),
    "cut.webp": (encoded(photo(), "WEBP")[:-100], "is truncated"),
    "cut.gif": (encoded(photo(), "GIF")[:-100], "is truncated"),
    "cut.bmp": (encoded(photo(), "BMP")[:-100], "truncated"),
    "cut.tif": (encoded(photo(), "TIFF")[:-100], "truncated"),
    "bomb.png": (bomb(50_000, 50_000), "too many pixels"),
    "wide.jpg": (encoded(PIL.Image.new("RGB", (65501, 3)), "PNG"), "cannot be stored"),
    "unmasked.jpg": (JPEG, "a mask of 120 x 80 pixels"),
}


@pytest.mark.usefixtures("small_tasks")
def test_every_kind_of_bad_image_is_dropped_and_listed(tmp_path: Path) -> None:
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


def test_a_suffix_that_lies_changes_nothing(tmp_path: Path) -> None:
    png, jpeg, webp = (encoded(photo(), format) for format in ("PNG", "JPEG", "WEBP"))
    files = {"a.jpg": png, "b.png": jpeg, "c.gif": webp}
    source = write(tmp_path / "in", files)
    result = make(source, "wds", tmp_path / "kept", image=ImageOptions(resize=80))
    assert result.splits[""].images["passed"] == 3
    assert [s["image"] for s in samples_of(tmp_path / "kept")] == [png, jpeg, webp]
    make(source, "wds", tmp_path / "out", image=ImageOptions(resize=40))
    found = [opened(sample["image"]).format for sample in samples_of(tmp_path / "out")]
    assert found == ["PNG", "JPEG", "WEBP"]
    (first, *_) = by_webdataset(tmp_path / "out/shard-000000.tar")
    assert "png" in "".join(first)


def test_of_animations_the_first_frame_stays_and_the_summary_says_so(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in",
        {"a.gif": frames("GIF"), "b.webp": frames("WEBP"), "c.png": encoded(photo(), "PNG")},
    )
    result = make(source, "wds", tmp_path / "out", image=ImageOptions(resize=40))
    ((reason, count),) = result.splits[""].reasons.items()
    assert count == 2
    assert "animated" in reason
    assert "first frame" in reason
    first = photo().resize((60, 40), PIL.Image.Resampling.BILINEAR)
    for sample in samples_of(tmp_path / "out"):
        assert psnr(pixels_of(sample["image"]), first) > 25
        assert not getattr(opened(sample["image"]), "is_animated", False)


# --- verify ---------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "resized": {"image": RESIZED},
    "raw": {"image": ImageOptions(format="raw", resize=32)},
    "filtered": {"image": ImageOptions(resize=32, min_size=45)},
    "renamed": {"image": RESIZED, "rename": {"image": "jpg", "mask": "seg", "label": "cls"}},
    "cropped and recompressed": {
        "image": ImageOptions(resize=32, resize_mode="crop", quality=60, format="jpeg")
    },
    "shuffled": {"image": RESIZED, "shuffle": True, "shard_samples": 5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("format", "way"),
    [(("beton" if way in ("raw", "cropped and recompressed") else "wds"), way) for way in WAYS],
)
def test_a_dataset_is_sound_against_its_source_and_a_changed_pixel_is_found(
    images: Path, tmp_path: Path, format: str, way: str
) -> None:
    out = tmp_path / "out"
    make(images, format, out, **WAYS[way])
    report = shardkit.verify(out, against=images, decode=True)
    assert report.problems == []
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
        assert problem.where["field"] == WAYS[way].get("rename", {}).get(field, field)
        (images / name).write_bytes(before)


@pytest.mark.parametrize(
    ("one", "two", "way"),
    [
        ("wds", "parquet", "resized"),
        ("lmdb", "parquet", "raw"),
        ("beton", "beton", "cropped and recompressed"),
    ],
)
def test_datasets_that_were_made_alike_are_alike(
    images: Path, tmp_path: Path, one: str, two: str, way: str
) -> None:
    make(images, one, tmp_path / "one", **WAYS[way])
    make(images, two, tmp_path / "two", **WAYS[way])
    assert shardkit.verify(tmp_path / "one", against=tmp_path / "two").problems == []


def test_a_dataset_made_of_a_resized_one_is_sound_against_it(images: Path, tmp_path: Path) -> None:
    make(images, "wds", tmp_path / "one", image=ImageOptions(resize=60))
    make(tmp_path / "one", "lmdb", tmp_path / "two", image=ImageOptions(resize=30))
    make(tmp_path / "two", "parquet", tmp_path / "three", image=ImageOptions())
    assert shardkit.verify(tmp_path / "two", against=tmp_path / "one").problems == []
    assert shardkit.verify(tmp_path / "three", against=tmp_path / "two").problems == []
    assert not shardkit.verify(tmp_path / "two", against=images).sound  # resized once, not twice


def test_of_a_transform_only_keys_are_compared(images: Path, tmp_path: Path) -> None:
    def step(sample: dict[str, Any]) -> dict[str, Any] | None:
        return {**sample, "image": 255 - sample["image"]} if sample["label"] else None

    make(images, "wds", tmp_path / "out", transform=step)
    report = shardkit.verify(tmp_path / "out", against=images)
    assert report.problems == []  # what it drops is not missed
    assert any("only keys are compared" in note for note in report.notes)
    (images / "class1/009.jpg").rename(images / "class1/new.jpg")
    found = shardkit.verify(tmp_path / "out", against=images).problems
    assert sorted(problem.where["key"] for problem in found) == ["class1/009", "class1/new"]


def test_other_versions_of_the_codecs_are_said(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(images, "wds", tmp_path / "out")
    monkeypatch.setattr("simplejpeg.__version__", "99")
    report = shardkit.verify(tmp_path / "out", against=images)
    assert report.problems == []
    assert any("other versions of the codecs" in note for note in report.notes)


# --- twice ----------------------------------------------------------------------------------------


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
def test_what_was_done_once_is_not_done_again(
    images: Path, tmp_path: Path, format: str, image: ImageOptions
) -> None:
    make(images, format, tmp_path / "one", image=image)
    again = make(tmp_path / "one", format, tmp_path / "two", image=image).splits[""]
    # Recompressing those that were kept is no gain the second time either.
    assert again.images["passed"] + again.images.get("kept", 0) == again.samples
    assert again.images["bytes in"] == again.images["bytes out"]
    for two, one in zip(samples_of(tmp_path / "two"), samples_of(tmp_path / "one"), strict=True):
        assert_same(two, one)


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.usefixtures("my_steps")
def test_the_command_does_what_its_options_say(images: Path, tmp_path: Path) -> None:
    words = [
        "--resize", "30", "--resize-mode", "pad", "--upscale", "--image-format", "jpeg",
        "--quality", "77", "--chroma", "422", "--background", "teal", "--icc", "keep",
        "--min-size", "33", "--max-aspect", "1.6", "--max-pixels", "9600", "--check", "decode",
        "--transform", "my_steps:step",
    ]  # fmt: skip
    run("convert", images, "--to", "wds", "-o", tmp_path / "out", *words)
    image = ImageOptions(
        resize=30, resize_mode="pad", upscale=True, format="jpeg", quality=77, chroma="422",
        background="teal", icc="keep", min_size=33, max_aspect=1.6, max_pixels=9600, check="decode",
    )  # fmt: skip
    make(images, "wds", tmp_path / "same", image=image, transform="my_steps:step")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "same")


def test_the_summary_says_what_became_of_images(images: Path, tmp_path: Path) -> None:
    (images / "class0/alpha.png").write_bytes(encoded(see_through(), "PNG"))
    (images / "class0/tiny.png").write_bytes(encoded(photo(size=(9, 9)), "PNG"))
    found = run(
        "convert", images, "--to", "wds", "-o", tmp_path / "out", "--resize", "32",
        "--min-size", "10",
    )  # fmt: skip
    text = " ".join(found.stdout.split())
    for words in (
        "3 passed through", "22 resized", "1 smaller than 10", "3 rotated", "1 transparent",
        "filtered.jsonl", "taken as the mask of 'image'",
    ):  # fmt: skip
        assert words in text + found.stderr
    assert "left out" in text
    about = json.loads(
        run("convert", images, "--to", "wds", "-o", tmp_path / "two", "--resize", "32",
            "--min-size", "10", "--json").stdout
    )  # fmt: skip
    assert about["splits"][""]["images"]["resized"] == 22
    assert about["splits"][""]["filtered"] == {"smaller than 10": 1}


@pytest.mark.usefixtures("my_steps")
def test_a_plan_shows_the_steps_and_does_nothing(images: Path, tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("my_steps")
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--resize 0", 2, "resize must be"),
        ("--resize big", 2, "is not a valid integer"),
        ("--resize-mode crop", 2, "require resize"),
        ("--upscale", 2, "require resize"),
        ("--resize 9 --resize-mode fill", 2, "'fill' is not one of"),
        ("--image-format raw --icc keep", 2, "no colour profile"),
        ("--transform nowhere:step", 2, "cannot be imported"),
        ("--transform os", 2, "not the name of a transform"),
        ("--resize 20", 1, "the image is truncated"),
        ("--check decode", 1, "the image is truncated"),
        ("--transform my_steps:fails", 1, "the transform raised ValueError: as asked"),
    ],
)
def test_exit_codes_and_messages(tmp_path: Path, words: str, code: int, message: str) -> None:
    cut = {} if "fails" in words else {"b.jpg": JPEG[:-50]}
    source = write(tmp_path / "in", {"a.jpg": JPEG, **cut})
    words = ["--to", "wds", "-o", tmp_path / "out", "--workers", "0", *words.split()]
    assert message in run("convert", source, *words, check=code).stderr
    assert not (tmp_path / "out").exists()
    assert code == 1 or not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": 2.5}, "resize must be"),
        ({"format": "avif"}, "format must be"),
        ({"icc": "drop"}, "icc must be"),
        ({"check": "none"}, "check must be"),
        ({"max_pixels": 0}, "max_pixels must be"),
        ({"background": 7}, "background"),
        ({"background": "nocolour"}, "background must be a colour"),
        ({"quality": 101}, "quality goes from 1 to 100"),
        ({"quality": 0}, "quality must be"),
        ({"chroma": "411"}, "chroma must be"),
        ({"max_aspect": 0.5}, "max_aspect must be"),
        ({"max_aspect": float("nan")}, "max_aspect must be"),
        ({"min_size": -1}, "min_size must be"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ImageOptions(**options)
    with pytest.raises(UsageError, match="ImageOptions"):
        ConvertOptions(image=options)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(images: Path, tmp_path: Path) -> None:
    image = ImageOptions(resize=np.int64(32), max_aspect=np.float64(3))  # type: ignore[arg-type]
    make(images, "wds", tmp_path / "out", image=image)
    make(images, "wds", tmp_path / "same", image=ImageOptions(resize=32, max_aspect=3.0))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "same")


def test_what_the_format_cannot_hold_is_refused_before_anything_is_made(
    images: Path, tmp_path: Path
) -> None:
    """FFCV decodes JPEG and raw pixels."""
    for format in ("png",):
        with pytest.raises(UsageError, match=f"cannot hold {format}"):
            make(images, "beton", tmp_path / "out", image=ImageOptions(format=format))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_transform_is_found_in_the_current_folder_by_workers_too(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "here", {"steps_in_this_folder.py": STEPS.encode()})
    monkeypatch.chdir(tmp_path / "here")
    run(
        "convert", images, "--to", "wds", "-o", tmp_path / "out", "--workers", "1",
        "--transform", "steps_in_this_folder:step", "--shard-size", "8kB",
    )  # fmt: skip
    assert "mean" in shardkit.open(tmp_path / "out").schema


def test_images_that_are_not_there_are_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no images"):
        shardkit.convert([{"label": 1}], "wds", tmp_path / "out", image=RESIZED)
    assert not list(tmp_path.iterdir())


# --- memory ---------------------------------------------------------------------------------------

# The peak of the process itself: `ru_maxrss` begins with that of the process that started it.
CHILD = """
import re, sys
import shardkit
image = shardkit.ImageOptions(resize=int(sys.argv[3]))
result = shardkit.convert(sys.argv[1], "wds", sys.argv[2], workers=0, image=image)
assert result.splits[""].images["resized"] == 1
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.xdist_group("memory")
@pytest.mark.large
@pytest.mark.parametrize(
    ("progressive", "side", "megabytes"),
    [
        (False, 8000, 1000),
        # libjpeg keeps all coefficients: two bytes for each of 1.5 samples a pixel are 303 MB.
        (True, 256, 700),
    ],
)
def test_an_image_of_100_megapixels_needs_little_memory(
    tmp_path: Path, progressive: bool, side: int, megabytes: int
) -> None:
    tile = np.asarray(photo(size=(1160, 870)))
    image = PIL.Image.fromarray(np.tile(tile, (10, 10, 1)))
    write(tmp_path / "in", {"huge.jpg": encoded(image, "JPEG", progressive=progressive)})
    found = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "in", tmp_path / "out", str(side)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    print(f"\na side of {side:,}: {int(found.stdout) / 1e6:,.0f} MB")
    assert int(found.stdout) < megabytes * 10**6


# --- masks in datasets of others -----------------------------------------------------------------


@TWO_FORMATS
@pytest.mark.parametrize("resize", [40, None])
def test_members_of_a_tar_that_are_masks_keep_their_values(
    tmp_path: Path, format: str, resize: int | None
) -> None:
    source = tar_of(tmp_path / "a.tar", "seg.png")
    out = tmp_path / "out"
    result = make(source, format, out, image=ImageOptions(resize=resize))
    size = (60, 40) if resize else (120, 80)
    expected = np.asarray(numbers().resize(size, PIL.Image.Resampling.NEAREST))
    for sample in samples_of(out):
        np.testing.assert_array_equal(values_of(sample["seg.png"]), expected)
    taken = "'seg.png' is taken as the mask of 'jpg'" in " ".join(result.notes)
    assert taken is (resize is not None or format == "beton")
    assert shardkit.verify(out, against=source).sound


def test_masks_of_hugging_face_datasets_keep_their_values(tmp_path: Path) -> None:
    """As in scene_parse_150: the library itself writes the fields `image` and `annotation`."""
    import datasets

    kinds = datasets.Features(image=datasets.Image(), annotation=datasets.Image())
    images = [photo(size=(120, 80), seed=number) for number in range(3)]
    rows = {"image": images, "annotation": [numbers()] * 3}
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "in")
    expected = np.asarray(numbers().resize((60, 40), PIL.Image.Resampling.NEAREST))
    for format in ("lmdb", "parquet"):
        make(tmp_path / "in", format, tmp_path / format, image=ImageOptions(resize=40))
        for sample in samples_of(tmp_path / format):
            np.testing.assert_array_equal(opened(sample["annotation"]), expected)
            assert opened(sample["image"]).mode == "RGB"


@pytest.mark.parametrize("format", ["hf", "lmdb"])
def test_index_maps_in_sources_of_any_format_are_masks_or_a_question(
    tmp_path: Path, format: str
) -> None:
    image, mask = encoded(photo(size=(120, 80)), "JPEG"), encoded(numbers(), "PNG")
    for name in ("depth_map", "second"):
        schema = {"image": shardkit.Image(), name: shardkit.Image()}
        with shardkit.create(tmp_path / name, format, schema) as writer:
            writer.write({"image": image, name: mask})
    make(tmp_path / "depth_map", "wds", tmp_path / "out", image=ImageOptions(resize=40))
    (sample,) = samples_of(tmp_path / "out")
    assert opened(sample["depth_map"]).mode == "L"
    with pytest.raises(UsageError, match="images may be masks"):
        make(tmp_path / "second", "wds", tmp_path / "no", image=ImageOptions(resize=40))


def test_an_image_that_may_be_a_mask_is_refused_by_the_command(tmp_path: Path) -> None:
    source = tar_of(tmp_path / "a.tar", "second.png")
    convert = ("convert", str(source), "--to", "wds", "--workers", "0", "--resize", "40")
    refused = run(*convert, "-o", str(tmp_path / "no"), check=2)
    assert "--masks second.png" in refused.stderr
    assert not (tmp_path / "no").exists()
    run(*convert, "-o", str(tmp_path / "mask"), "--masks", "second.png")
    run(*convert, "-o", str(tmp_path / "image"), "--masks", "none")
    modes = [
        opened(samples_of(tmp_path / name)[0]["second.png"]).mode for name in ("mask", "image")
    ]
    assert modes == ["L", "RGB"]
