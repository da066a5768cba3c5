"""FFCV itself reads what we write, and we read what it writes; skipped where it is missing."""

import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import simplejpeg

from shardkit.codecs.pixels import ppm_header, to_ppm, to_rgb
from shardkit.formats import get_format
from shardkit.formats.base import ShardSpec
from shardkit.schema import Array, Bytes, Float, Image, Int, Json, Schema, Text
from shardkit.testing import EVERYTHING, everything, write_shard

pytestmark = [
    pytest.mark.large,
    pytest.mark.xdist_group("ffcv"),  # it compiles its decoders anew for each process
    pytest.mark.skipif(importlib.util.find_spec("ffcv") is None, reason="ffcv is not installed"),
]

BETON = get_format("beton")
WIDTH, HEIGHT = 44, 30

# Reads each file with the system's cache or without, all fields of all samples in order; `crop`
# takes images of any sizes. What images should be, FFCV's own decoder says of the same bytes. Then
# it runs the example of the documentation, in its folder.
READ = """
import json, sys, warnings
import numpy as np
from ffcv.fields.json import JSONField
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
from ffcv.libffcv import imdecode, resize_crop
from ffcv.loader import Loader, OrderOption

warnings.simplefilter("ignore")
folder, jobs = sys.argv[1], json.load(sys.stdin)
for name, job in jobs["files"].items():
    for cache in job["caches"]:
        pipelines = {n: [CenterCropRGBImageDecoder((16, 16), ratio=1)] for n in job["crop"]}
        loader = Loader(
            job["path"], batch_size=7, num_workers=2, os_cache=cache, drop_last=False,
            order=OrderOption.SEQUENTIAL, pipelines=pipelines,
        )
        found = [[] for _ in loader.reader.field_names]
        for batch in loader:
            for values, column in zip(batch, found):
                values = np.array(values)
                column.append(values.copy())
        columns = dict(zip(loader.pipeline_specs, map(np.concatenate, found)))
        for field in job["json"]:
            texts = [json.dumps(value) for value in JSONField.unpack(columns[field])]
            columns[field] = np.array(texts)
        np.savez(f"{folder}/{name}-{cache}.npz", **columns)
for name, (path, height, width) in jobs["images"].items():
    pixels = np.zeros((height, width, 3), np.uint8)
    data = np.fromfile(path, np.uint8)
    imdecode(data, pixels, height, width, height, width, 0, 0, 1, 1, False, False)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    crop = np.zeros((16, 16, 3), np.uint8)
    resize_crop(pixels, top, top + side, left, left + side, crop)
    np.savez(f"{folder}/image-{name}.npz", pixels=pixels, crop=crop)
import os
os.chdir(folder)
exec(jobs["example"], {})
os._exit(0)  # numba complains of what Python takes down before it
"""


def photo(number, width=WIDTH, height=HEIGHT):
    """Smooth noise, another one for each number: hard to decode nearly right by chance."""
    noise = np.random.default_rng(number).integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    return PIL.Image.fromarray(noise).resize((width, height), PIL.Image.Resampling.BICUBIC)


def encoded(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def jpegs():
    """Plain JPEGs of many kinds: FFCV must see what its own decoder makes of these very bytes."""
    found = [
        encoded(photo(number), "JPEG", quality=quality, subsampling=sampling, **options)
        for number, quality in enumerate((30, 75, 95, 100))
        for sampling in (0, 1, 2)
        for options in ({}, {"progressive": True}, {"optimize": True}, {"restart_marker_rows": 1})
    ]
    found += [encoded(photo(n).convert("L"), "JPEG", progressive=n % 2 == 0) for n in range(4)]
    pixels = np.array(photo(11))
    found += [simplejpeg.encode_jpeg(pixels, 95, "RGB", chroma) for chroma in ("411", "440")]
    found.append(encoded(photo(9), "JPEG", keep_rgb=True))
    found.append(encoded(photo(10), "JPEG") + b"\0\0garbage")
    return found


def others():
    """Images that FFCV would show as garbage."""
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    sideways = photo(24).transpose(PIL.Image.Transpose.ROTATE_90)
    return [
        encoded(photo(20), "PNG"),
        encoded(photo(21), "WEBP", quality=90),
        encoded(photo(22), "BMP"),
        encoded(photo(23).convert("CMYK"), "JPEG", quality=95),
        encoded(sideways, "JPEG", quality=95, exif=turned),
        encoded(photo(25), "TIFF"),
        encoded(photo(26), "PPM"),
    ]


_ARRAYS = {"points": Array("<f4", (2, 3)), "odd": Array("<f2", (2,)), "mask": Array("|b1", (5,))}
FIXED = Schema({**EVERYTHING, **_ARRAYS})


def fixed(number, image):
    sample = {
        **everything(number),
        "image": image,
        "text": f"line {number}\nÄ 漢 🎉" if number % 5 else "",
        "blob": bytes(range(number % 7)),
        "points": np.arange(6, dtype="<f4").reshape(2, 3) + number,
        "odd": np.array([number, 0.5], "<f2"),
        "mask": np.arange(5) % (number % 3 + 1) == 0,
    }
    return sample | ({"caption": "x" * number} if number % 3 == 0 else {})


def sized():
    sizes = [(40, 64), (64, 40), (33, 33), (17, 90)] * 3
    return [
        {"__key__": str(n), "image": encoded(photo(n, *size), ("JPEG", "PPM")[n // 8])}
        for n, size in enumerate(sizes)
    ]


def paged():
    """Some 30 MB: blobs that just do not fit a page, one over a page, rows of pixels."""
    rng = np.random.default_rng(7)
    sizes = [3_000_000, 3_000_000, 3_000_000, 10, 0, 9_000_000, 1, 5_000_000, 8 << 20, 0, 77]
    samples = [{"__key__": f"{n}", "blob": rng.bytes(size)} for n, size in enumerate(sizes)]
    for number, sample in enumerate(samples):
        sample["image"] = to_ppm(rng.integers(0, 256, (200, 300, 3), np.uint8))
        sample["label"] = number
    return samples


SMALL = Schema({"label": Int(), "blob": Bytes(), "x": Array("<i4", (2,))})


def small(number):
    x = np.array([number, -number], "<i4")
    return {"__key__": str(number), "label": number, "blob": b"%d" % number, "x": x}


# Files of ours, and with which caches FFCV reads them: it compiles its loader for each.
CACHES = {"fixed": [True, False], "sized": [True], "paged": [False], "joined": [True]}
CACHES["many"] = [False]


def example(folder):
    """The code of the documentation, and in the folder what it reads."""
    page = (Path(__file__).parents[2] / "docs/beton.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(from ffcv.*?)^```$", page, re.M | re.S)
    schema = Schema({"image": Image(), "label": Int(), "text": Text(optional=True)})
    samples = [{"__key__": f"{n}", "image": j, "label": n} for n, j in enumerate(jpegs()[:11])]
    samples[3]["text"] = "a text"
    write_shard(BETON, folder / "train.beton", schema, samples).close()
    return code


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The folder with all that FFCV read from files of ours."""
    folder = tmp_path_factory.mktemp("ffcv")
    image = Schema({"image": Image()})
    pages = Schema({"blob": Bytes(), "image": Image(), "label": Int()})
    shards = {
        "fixed": (FIXED, [fixed(n, image) for n, image in enumerate(jpegs() + others())]),
        "sized": (image, sized()),
        "paged": (pages, paged()),
        "many": (SMALL, [small(n) for n in range(3000)]),
        **{f"part-{start}": (pages, paged()[start : start + 3]) for start in range(0, 11, 3)},
    }
    for name, (schema, samples) in shards.items():
        write_shard(BETON, folder / f"{name}.beton", schema, samples).close()
    parts = [folder / f"part-{start}.beton" for start in range(0, 11, 3)]
    BETON.join(folder / "joined.beton", parts, ShardSpec(pages))
    images = {}
    for name in ("fixed", "sized"):
        reader = BETON.open(folder / f"{name}.beton")
        for number in range(len(reader)):
            data = reader[number]["image"]
            if ppm_header(data) is None:
                path = folder / f"{name}-{number}.jpg"
                path.write_bytes(data)
                images[f"{name}-{number}"] = (str(path), *to_rgb(data).shape[:2])
    files = {
        name: {
            "path": str(folder / f"{name}.beton"),
            "crop": ["image"] if name == "sized" else [],
            "json": ["text", "about", "caption"] if name == "fixed" else [],
            "caches": caches,
        }
        for name, caches in CACHES.items()
    }
    run(READ, folder, {"files": files, "images": images, "example": example(folder)})
    return folder


def run(script, folder, given):
    command, given = [sys.executable, "-c", script, folder], json.dumps(given)
    found = subprocess.run(
        command, input=given, check=False, capture_output=True, text=True, timeout=290
    )
    assert found.returncode == 0, found.stderr[-3000:]


def columns(read, name, cache):
    with np.load(read / f"{name}-{cache}.npz") as found:
        return dict(found)


@pytest.mark.parametrize("cache", [True, False], ids=["cached", "paged"])
def test_ffcv_reads_every_type(read, cache):
    found = columns(read, "fixed", cache)
    samples = [fixed(n, b"") for n in range(len(jpegs()) + len(others()))]
    assert [column.dtype for column in (found["points"], found["mask"])] == [np.float32, bool]
    for name in ("label", "score", "good", "points", "mask"):
        np.testing.assert_array_equal(found[name].squeeze(), [s[name] for s in samples])
    for name in ("text", "about", "caption"):
        assert [*map(json.loads, found[name])] == [sample.get(name) for sample in samples]
    for number, sample in enumerate(samples):
        assert bytes(found["blob"][number][: number % 7]) == sample["blob"]
    # JPEGs pass through, and show what FFCV makes of them; others are shown as they are.
    reader, images = BETON.open(read / "fixed.beton"), found["image"]
    for number, image in enumerate(jpegs() + others()):
        expected = to_rgb(image)
        assert expected.shape == (HEIGHT, WIDTH, 3)
        assert np.abs(images[number].astype(int) - expected).mean() < 5, number  # garbage: 80
        if number < len(jpegs()):
            assert reader[number]["image"] == image
            with np.load(read / f"image-fixed-{number}.npz") as by_ffcv:
                np.testing.assert_array_equal(images[number], by_ffcv["pixels"])
    np.testing.assert_array_equal(images[-1], to_rgb(others()[-1]))  # PPM: the pixels themselves


def test_ffcv_crops_images_of_any_size(read):
    found = columns(read, "sized", True)["image"]
    for number in range(8):
        with np.load(read / f"image-sized-{number}.npz") as expected:
            np.testing.assert_array_equal(found[number], expected["crop"])
    assert found[8:].std() > 0


@pytest.mark.parametrize(("name", "cache"), [("paged", False), ("joined", True), ("many", False)])
def test_ffcv_reads_values_on_several_pages_and_those_that_made_room_for_the_table(
    read, name, cache
):
    found = columns(read, name, cache)
    samples = [small(n) for n in range(3000)] if name == "many" else paged()
    assert found["label"].ravel().tolist() == [*range(len(samples))]
    for number, sample in enumerate(samples):
        assert bytes(found["blob"][number][: len(sample["blob"])]) == sample["blob"]
        if name != "many":
            np.testing.assert_array_equal(found["image"][number], to_rgb(sample["image"]))
    if name == "many":
        np.testing.assert_array_equal(found["x"], [sample["x"] for sample in samples])


WRITE = """
import json, sys
import numpy as np, torch
from ffcv.fields import (
    BytesField, FloatField, IntField, JSONField, NDArrayField, RGBImageField, TorchTensorField,
)
from ffcv.writer import DatasetWriter

folder, modes = sys.argv[1], json.load(sys.stdin)


class Samples:
    def __len__(self):
        return 70

    def __getitem__(self, number):
        rng = np.random.default_rng(number)
        pixels = rng.integers(0, 256, (20 + number % 5, 30 + number % 7, 3), np.uint8)
        blob = np.arange(1 + number % 9, dtype=np.uint8)
        points = rng.standard_normal((3, 2)).astype("<f4")
        tensor = torch.arange(4, dtype=torch.int16) + number
        return pixels, number - 5, number / 7, blob, {"n": [int(number), "Ä"]}, points, tensor


for mode, options in modes.items():
    fields = {
        "image": RGBImageField(**options),
        "label": IntField(),
        "score": FloatField(),
        "blob": BytesField(),
        "exactly16bytesxx": JSONField(),
        "points": NDArrayField(np.dtype("<f4"), (3, 2)),
        "tensor": TorchTensorField(torch.int16, (4,)),
    }
    writer = DatasetWriter(f"{folder}/v1.{mode}.beton", fields, page_size=1 << 21, num_workers=2)
    writer.from_indexed_dataset(Samples(), chunksize=10)
"""

MODES = {
    "raw": {"write_mode": "raw"},
    "jpg": {"write_mode": "jpg", "jpeg_quality": 95},
    "proportion": {"write_mode": "proportion", "compress_probability": 0.5},
    "smart": {"write_mode": "smart", "smart_threshold": 2200},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    run(WRITE, folder, MODES)
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_files_by_ffcv_come_back(written, mode):
    reader = BETON.open(written / f"v1.{mode}.beton")
    assert dict(reader.schema) == {
        "image": Image(), "label": Int(), "score": Float(), "blob": Bytes(),
        "exactly16bytesxx": Json(), "points": Array("<f4", (3, 2)), "tensor": Array("<i2", (4,)),
    }  # fmt: skip
    samples, raw = [reader[number] for number in range(len(reader))], 0
    assert len(samples) == 70
    for number, found in enumerate(samples):
        rng = np.random.default_rng(number)
        pixels = rng.integers(0, 256, (20 + number % 5, 30 + number % 7, 3), np.uint8)
        assert found["__key__"] == f"v1_{mode}/{number:09d}"
        assert (found["label"], found["score"]) == (number - 5, number / 7)
        assert found["blob"] == bytes(range(1 + number % 9))
        assert found["exactly16bytesxx"] == {"n": [number, "Ä"]}
        expected = rng.standard_normal((3, 2)).astype("<f4")
        np.testing.assert_array_equal(found["points"], expected)
        np.testing.assert_array_equal(found["tensor"], np.arange(4, dtype="<i2") + number)
        assert to_rgb(found["image"]).shape == pixels.shape
        if found["image"].startswith(b"P6"):
            raw += 1
            assert found["image"] == to_ppm(pixels)
        else:
            assert (found["image"][:2], found["image"][-2:]) == (b"\xff\xd8", b"\xff\xd9")
    assert {"raw": raw == 70, "jpg": raw == 0}.get(mode, 0 < raw < 70)
    if mode == "raw":
        sizes = [3 * (20 + n % 5) * (30 + n % 7) for n in range(70)]
        assert reader.sizes("image").tolist() == sizes
    if mode == "proportion":  # written again, its images are kept
        again = write_shard(BETON, written / "again.beton", reader.schema, samples)
        for number, sample in enumerate(samples):
            for name in ("image", "exactly16bytesxx"):
                assert again[number][name] == sample[name]
