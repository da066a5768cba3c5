"""What the data alone tell of how they will load: that it is found, and found nowhere else."""

import re
import shlex
from functools import partial

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from click.testing import CliRunner

import shardkit
from shardkit import CenterCrop, Decode, RandomResizedCrop, Resize, pad_collate
from shardkit.cli import group
from shardkit.performance import checks as storing
from shardkit.performance.checks import images, other_format, padding, shards, sorted_order
from shardkit.performance.defaults import open_any
from shardkit.performance.doctor import checks
from shardkit.schema import Array, Bytes, Image, Int, Text
from shardkit.stream.loader import Loader
from shardkit.stream.options import StreamOptions
from shardkit.stream.stream import Stream
from tests.codecs import sample_images

PHOTO = (256, 192)
CROP, SMALL = {"image": RandomResizedCrop(32)}, {"image": Resize(192)}


def stream(source, **options):
    return Stream(source, StreamOptions(**{"batch_size": 4, "shuffle": True, **options}))


def photo(number, size=PHOTO):
    """Pixels that are smooth as those of a photo, with a little noise."""
    random = np.random.default_rng(number)
    coarse = PIL.Image.fromarray(random.integers(0, 255, (6, 8, 3), np.uint8))
    smooth = np.asarray(coarse.resize(size, PIL.Image.Resampling.BICUBIC))
    return np.clip(smooth + random.normal(0, 2, smooth.shape), 0, 255).astype(np.uint8)


def encoded(pixels, format="PNG", mode="RGB", **options):
    return sample_images.encoded(PIL.Image.fromarray(pixels).convert(mode), format, **options)


def jpeg(pixels):
    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=95)


def write(out, values, to="wds", name="image", kind=None, **options):
    """A dataset of one field."""
    with shardkit.create(out, to=to, schema={name: kind or Image()}, **options) as writer:
        for value in values:
            writer.write({name: value})
    return out


def photos(out, encode=jpeg, pixels=photo, count=4, **options):
    return write(out, [encode(pixels(n)) for n in range(count)], **options)


def loose(root, values):
    """A folder of images."""
    folder = root / "class"
    folder.mkdir(parents=True)
    for number, value in enumerate(values):
        (folder / f"{number:03d}.jpg").write_bytes(value)
    return open_any(root)


def assert_accepted(command):
    """That the commands are what `shardkit convert` takes."""
    for one in command.split(" && "):
        program, *arguments = shlex.split(one)
        assert program == "shardkit"
        result = CliRunner().invoke(group, [*arguments, "--plan", "--json"])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("to", ["wds", "arrow", "beton", "parquet"])
def test_images_far_larger_than_their_crops_are_found_with_what_a_smaller_size_saves(tmp_path, to):
    path = photos(tmp_path / "large", to=to)
    found = images(stream(path, transforms=CROP))
    assert (found.cause, found.stage) == ("decode", "decode")
    assert found.share == pytest.approx((40 / 192) ** 2)
    assert "4% of the pixels" in found.do
    assert "256 x 192 pixels" in found.seen
    assert "RandomResizedCrop(32) needs only 40" in found.seen
    assert "--resize 40 --quality 90" in found.command
    assert_accepted(found.command)
    image = shardkit.ImageOptions(resize=40, quality=90)
    shardkit.convert(path, to="wds", out=tmp_path / "small", image=image, workers=0)
    assert images(stream(tmp_path / "small", transforms=CROP)) is None


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"transforms": {"image": [RandomResizedCrop(64)]}}, 80),  # 73.1, by multiples of 8
        ({"transforms": {"image": [Decode(), RandomResizedCrop((32, 64)), np.sort]}}, 80),
        ({"transforms": {"image": [Resize(64), CenterCrop(56)]}}, 64),
        ({"transforms": {"image": [Resize((48, 64))]}}, 64),
        ({"transforms": {"image": RandomResizedCrop(224)}}, None),  # 256 of 192 pixels
        ({"transforms": {"image": CenterCrop(32)}}, None),  # it would see another part
        ({"transforms": {"image": [Decode(), np.sort]}}, None),
        ({"transforms": {"image": len}}, None),
        ({"transforms": CROP, "cache": "decoded"}, None),
        ({}, None),
    ],
)
def test_the_size_to_store_follows_from_the_transforms(tmp_path, options, size):
    found = images(stream(photos(tmp_path / "large"), **options))
    assert found is None if size is None else f"--resize {size} " in found.command


def test_images_that_are_not_looked_at_are_not_converted(tmp_path):
    """A command that is for all images would harm a mask, or an image that nobody decodes."""
    for other in ("other", "mask"):
        schema = {"image": Image(), other: Image()}
        with shardkit.create(tmp_path / other, to="wds", schema=schema) as writer:
            for number in range(8):
                mask = encoded(photo(number)[:, :, 0], mode="L")
                writer.write({"image": jpeg(photo(number)), other: mask})
    both = {("image", "other"): RandomResizedCrop(32)}
    for options in ({}, {"fields": ["image"]}, {"transforms": both}):
        given = stream(tmp_path / "other", **{"transforms": CROP, **options})
        assert images(given) is None
    for name in ("boxes", "corners"):  # which `convert` does not take for boxes
        schema = {"image": Image(), name: Array("float32", (None, 4))}
        with shardkit.create(tmp_path / name, to="wds", schema=schema) as writer:
            for number in range(8):
                boxes = np.zeros((1, 4), np.float32)
                writer.write({"image": jpeg(photo(number)), name: boxes})
        given = stream(tmp_path / name, transforms={("image", name): RandomResizedCrop(32)})
        assert (images(given) is None) == (name == "corners")
    both = {("image", "mask"): RandomResizedCrop(32)}
    assert_accepted(images(stream(tmp_path / "mask", transforms=both)).command)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP"])
def test_photos_in_formats_that_are_slow_to_decode_are_found(tmp_path, format):
    lossless = {"lossless": True} if format == "WEBP" else {}
    path = photos(tmp_path / "some", lambda pixels: encoded(pixels, format, **lossless))
    found = images(stream(path, transforms=SMALL))
    if format == "BMP":
        assert found is None
        return
    assert (found.cause, found.stage, found.share) == ("decode", "decode", 0.2)
    assert "4 of 4 images are in lossless formats" in found.seen
    assert found.seen.endswith(f"JPEG: {format}")
    assert "--image-format jpeg --quality 95" in found.command
    assert_accepted(found.command)


def test_images_that_are_jpeg_or_better_not_give_no_finding(tmp_path):
    for kind, encode in {
        "jpeg": jpeg,
        "lossy": partial(encoded, format="WEBP"),
        "transparent": partial(encoded, mode="RGBA"),
    }.items():
        path = photos(tmp_path / kind, encode)
        assert images(stream(path, transforms=SMALL)) is None


def test_bad_images_are_left_to_the_loader_to_tell(tmp_path):
    good = [jpeg(photo(n)) for n in range(8)]
    bad = [b"no image", good[0][:3000], good[0][:10]]
    found = images(stream(loose(tmp_path / "some", [*bad, *good]), transforms=CROP))
    assert "--resize 40" in found.command
    assert images(stream(loose(tmp_path / "all", bad[::2]), transforms=CROP)) is None


def test_parquet_and_loose_files_are_found_and_other_formats_are_not(tmp_path):
    parquet = stream(write(tmp_path / "some", map(str, range(64)), "parquet", "text", Text()))
    files = stream(loose(tmp_path / "loose", [jpeg(photo(n, (16, 16))) for n in range(20)]))
    for given, words in ((parquet, "a whole row group"), (files, "separate files")):
        found = other_format(given)
        assert (found.cause, found.stage, found.share) == ("format", "read", 0)
        assert words in found.seen
        assert "--to wds" in found.command
        assert_accepted(found.command)
    assert other_format(stream(tmp_path / "some", cache="memory")) is None
    for to in ("wds", "arrow", "beton", "lmdb"):
        assert other_format(stream(write(tmp_path / to, "abc", to, "text", Text()))) is None


def test_many_tiny_shards_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(storing, "_MANY", 10)
    path = write(tmp_path / "tiny", range(11), "arrow", "n", Int(), shard_samples=1)
    found = shards(stream(path), 1)
    assert (found.cause, found.rate) == ("shards", None)
    assert "11 shards" in found.seen
    assert "--shard-size 256MB" in found.command
    assert_accepted(found.command)
    few = write(tmp_path / "few", range(11), "arrow", "n", Int(), shard_samples=2)
    assert shards(stream(few), 1) is None
    monkeypatch.setattr(storing, "_TINY", 100)
    assert shards(stream(path), 1) is None


def test_fewer_shards_than_ranks_are_found(tmp_path):
    values = [bytes(1_000_000)] * 20
    path = write(tmp_path / "giant", values, "wds", "blob", Bytes(), shard_samples=10)
    for ranks in (1, 2, 4):  # 20 MB are too few for 8 MB for each of four
        assert shards(stream(path), ranks) is None
    giant = write(tmp_path / "one", values, "wds", "blob", Bytes())
    found = shards(stream(giant), 2)
    assert "1 shards for 2 ranks" in found.seen
    assert "--shard-size 10MB" in found.command
    assert_accepted(found.command)
    one_file = write(tmp_path / "one.beton", values[:17], "beton", "blob", Bytes())
    assert shards(stream(one_file), 2) is None


def labelled(out, labels, classes):
    names = [f"class {n}" for n in range(classes)]
    kinds = {"to": "arrow", "name": "label", "kind": Int()}
    return write(out, labels.tolist(), **kinds, classes=names, shard_samples=400)


@pytest.mark.parametrize("classes", [2, 100])
def test_sorted_data_that_are_not_shuffled_or_in_a_small_window_are_found(tmp_path, classes):
    labels = np.repeat(np.arange(classes), 4000 // classes)
    path = labelled(tmp_path / "sorted", labels, classes)
    mixed = labelled(tmp_path / "mixed", np.random.default_rng(0).permutation(labels), classes)
    found = sorted_order(stream(path, shuffle=False))
    assert found.settings == {"shuffle": True}
    assert f"of {classes} classes" in found.seen
    assert_accepted(found.command)
    list(Loader(path, batch_size=500, **found.settings))  # warns of nothing
    assert sorted_order(stream(mixed, shuffle=False)) is None
    if classes == 2:
        return
    both = sorted_order(stream(path, shuffle=False, window=128))
    assert both.settings.keys() == {"shuffle", "window"}
    assert sorted_order(stream(path, **both.settings)) is None
    found = sorted_order(stream(path, window=128))
    assert (found.cause, found.rate) == ("order", None)
    assert "of 100 classes" in found.seen
    assert_accepted(found.command)
    assert "--shuffle" in found.command
    assert sorted_order(stream(path, **found.settings)) is None
    assert sorted_order(stream(path)) is None
    assert sorted_order(stream(mixed, window=128)) is None


def test_data_of_one_class_or_without_labels_are_not_sorted(tmp_path):
    one = labelled(tmp_path / "one", np.zeros(500, np.int64), 1)
    none = write(tmp_path / "none", range(500), "arrow", "number", Int())
    for path in (one, none):
        assert sorted_order(stream(path, shuffle=False)) is None


def documents(out, **lengths):
    """Documents with arrays of such lengths."""
    kinds = {"tokens": "uint16", "more": "float32"}
    schema = {name: Array(kinds[name], (None,)) for name in lengths}
    with shardkit.create(out, to="arrow", schema=schema, shard_samples=100) as writer:
        for each in zip(*lengths.values(), strict=True):
            sizes = zip(lengths, each, strict=True)
            writer.write({name: np.zeros(size, kinds[name]) for name, size in sizes})
    return out


UNLIKE = (np.random.default_rng(0).pareto(1.2, 700) * 20).astype(int).clip(1, 900)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return documents(tmp_path_factory.mktemp("texts") / "texts", tokens=UNLIKE)


def padded(path, **options):
    """The share of padding that a loader has had at the end of an epoch."""
    loader = Loader(path, **options)
    assert all(loader)
    return loader.padding


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 16},
        {"global_batch_size": 32, "world": 2},
        {"batch_size": 16, "last": "short"},
        {"batch_size": 16, "shuffle": False},
        {"batch_size": 16, "collate": pad_collate(7, multiple_of=8)},
        {"batch_size": 16, "collate": pad_collate(side="left", length=1024, multiple_of=64)},
    ],
    ids=str,
)
def test_the_padding_now_and_with_buckets_is_about_that_of_a_real_loader(texts, options):
    world = options.pop("world", 1)
    options = {"collate": pad_collate(), "shuffle": True, "seed": 3, "batch_size": None, **options}
    found = padding(stream(texts, **options), world)
    ranks = {"rank": 0, "world_size": world}
    now = padded(texts, **options, **ranks)
    after = padded(texts, **{**options, **found.settings}, **ranks)
    assert found.cause == "padding"
    assert found.settings["batching"].batch_size == 16
    shares = [float(share) / 100 for share in re.findall(r"about ([\d.]+)%", found.seen + found.do)]
    assert shares == pytest.approx([now, after], abs=0.02)
    assert found.gain == pytest.approx((1 - after) / (1 - now), rel=0.05)
    for boundary in found.settings["batching"].boundaries:
        assert f" {boundary}, " in found.do or f" {boundary} tokens" in found.do


def test_batches_that_are_not_padded_or_not_known_give_no_finding(texts, tmp_path):
    like = documents(tmp_path / "like", tokens=np.arange(100) % 3 + 50)
    kind = {"name": "tokens", "kind": Array("<i8", (9,))}
    blocks = write(tmp_path / "blocks", np.zeros((40, 9), int), "arrow", **kind)
    for path, options in [
        (texts, {}),
        (texts, {"collate": list}),
        (texts, {"collate": pad_collate(), "transforms": {"tokens": lambda tokens: tokens[:4]}}),
        (texts, {"batch_size": None, "batching": shardkit.Dynamic(1000)}),
        (texts, {"batch_size": None, "batching": shardkit.Pack(1000, 4)}),
        (texts, {"batch_size": None, "batching": shardkit.Bucket(8, (800, 850))}),
        (texts, {"batch_size": 1, "collate": pad_collate()}),
        (like, {"collate": pad_collate()}),  # of lengths that hardly differ
        (blocks, {"collate": pad_collate()}),
    ]:
        assert padding(stream(path, **options), 1) is None


def test_a_dataset_without_faults_has_no_findings(tmp_path):
    path = photos(tmp_path / "good")
    given = {"transforms": {"image": RandomResizedCrop(224)}}
    assert checks(stream(path, **given), world_size=1) == []
