"""Pixels that are not 8-bit RGB: decoded as they are, or what is lost is refused, or said."""

import io
import struct
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageCms

import shardkit
from shardkit.codecs import pixels
from shardkit.codecs.header import read_header
from shardkit.codecs.image import NotAnImageError, probe
from shardkit.codecs.pixels import to_rgb
from shardkit.codecs.values import decoded
from shardkit.errors import SampleError, ShardkitWarning, UsageError
from shardkit.inspection.inspect import inspect
from shardkit.options import ImageOptions
from shardkit.preprocess.images import steps_for
from shardkit.schema import Schema
from shardkit.torch import Loader
from tests.codecs.sample_images import encoded

RAMP = np.arange(64).reshape(8, 8)
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # TIFF's SampleFormat


def tiff(values, kind):
    """An uncompressed TIFF of the values (height, width, channels) as they are."""
    height, width, channels = values.shape
    data, after = values.tobytes(), 8 + 2 + 12 * 10 + 4
    counts = {258: values.itemsize * 8, 339: kind}  # one per channel
    lists = b"".join(struct.pack(f"<{channels}H", *[n] * channels) for n in counts.values())
    tags = {256: width, 257: height, 259: 1, 262: 1, 277: channels, 278: height, 279: len(data)}
    tags[273] = after + len(lists)
    out = struct.pack("<2sHIH", b"II", 42, 8, len(tags) + len(counts))
    for tag, value in sorted({**tags, **counts}.items()):
        several = tag in counts and channels > 2
        place = after + 2 * channels * (tag == 339) if several else value * (1 + (1 << 16))
        place = place if tag in counts else value
        out += struct.pack("<HHII", tag, 3, channels if tag in counts else 1, place)
    return out + bytes(4) + lists + data


@pytest.mark.parametrize(
    ("dtype", "kind", "channels", "words"),
    [
        ("<i4", SIGNED, 1, "signed pixels"),
        ("<i2", SIGNED, 1, "signed pixels"),
        ("<u4", UNSIGNED, 1, "32-bit pixels"),
        ("<f4", FLOAT, 1, "floating-point pixels"),
        ("|u1", UNSIGNED, 5, "tiff .5 channels."),
        ("<f8", FLOAT, 1, "not damaged"),
    ],
)
def test_kinds_that_cannot_be_decoded_are_refused_by_name(dtype, kind, channels, words):
    data = tiff(np.repeat(RAMP[:, :, None], channels, axis=2).astype(dtype), kind)
    with pytest.raises(NotAnImageError, match=words):
        to_rgb(data)


def test_what_is_left_out_is_said_once(monkeypatch):
    monkeypatch.setattr(pixels, "_warned", set())
    deep = encoded(Image.fromarray((RAMP * 1000).astype(np.uint16)), "PNG")
    pages = [Image.fromarray(RAMP.astype(np.uint8) + n) for n in range(3)]
    several = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    for data, words, values in (
        (deep, "low byte is lost", (RAMP * 1000) >> 8),
        (tiff((RAMP[:, :, None] * 1000).astype("<u2"), UNSIGNED), None, (RAMP * 1000) >> 8),
        (several, "only the first is decoded", RAMP),
        (several, None, RAMP),
    ):
        if words is None:  # said before
            found = to_rgb(data)
        else:
            with pytest.warns(ShardkitWarning, match=words):
                found = to_rgb(data)
        assert (found == values[:, :, None]).all()
    assert probe(deep)[1:] == (8, 8)


@pytest.mark.filterwarnings("ignore::shardkit.errors.ShardkitWarning")
def test_what_would_be_left_out_is_counted(tmp_path):
    deep = encoded(Image.fromarray((RAMP * 1000).astype(np.uint16)), "PNG")
    pages = [Image.fromarray(RAMP.astype(np.uint8) + n) for n in range(3)]
    several = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    rows = [{"image": data} for data in (deep, deep, several, encoded(pages[0], "PNG"))]
    shardkit.convert(rows, "wds", tmp_path / "o", schema={"image": shardkit.Image()}, workers=0)
    expected = {
        "png (16-bit, 1 channel)": 2,
        "tiff (1 channel, 3 pages)": 1,
        "png (1 channel)": 1,
    }
    assert inspect(tmp_path / "o", full=True)["media"]["image"]["formats"] == expected
    stats = shardkit.open(tmp_path / "o").stats()
    assert stats["fields"]["image"]["formats"] == expected


def test_coordinates_of_a_geotiff_stay_in_its_file_or_are_counted_as_lost(tmp_path):
    keys = [(34735, 3, 4, (1, 1, 0, 0), True), (33550, 12, 3, (10.0, 10.0, 0.0), True)]
    earth = written(noise("uint8", 8, 9, 3), extratags=keys)
    rows = [{"image": data} for data in (earth, written(noise("uint8", 8, 9, 3)), earth)]
    options = {"schema": {"image": shardkit.Image()}, "workers": 0}
    done = shardkit.convert(rows, "wds", tmp_path / "kept", **options)
    assert done.ignored == {}
    assert shardkit.open(tmp_path / "kept")[0]["image"] == earth
    done = shardkit.convert(rows, "wds", tmp_path / "small", resize=4, **options)
    assert done.ignored == {
        "GeoTIFFs whose tags (coordinates, ...) are lost, as they are re-encoded": 2
    }
    done = shardkit.convert(rows, "beton", tmp_path / "a.beton", **options)
    assert done.splits[""].encoded == {"GeoTIFF without its tags": 2, "tiff": 1}


# --- as stored -----------------------------------------------------------------------------------


def noise(dtype, *shape):
    random, kind = np.random.default_rng(3), np.dtype(dtype)
    if kind.kind == "f":
        return random.random(shape).astype(kind)
    limits = np.iinfo(kind)
    return random.integers(limits.min, limits.max, (*shape,), kind, endpoint=True)


def written(values, planes=False, **options):
    """A TIFF by tifffile; alpha is not declared, so four channels are bands."""
    file, kind = io.BytesIO(), "rgb" if values.shape[2] == 3 else "minisblack"
    layout = "separate" if planes else "contig"
    values = np.moveaxis(values, 2, 0) if planes else values
    options = {"photometric": kind, **options}
    if values.ndim == 3 and 1 not in values.shape:
        options["planarconfig"] = layout
    tifffile.imwrite(file, np.squeeze(values), **options)
    return file.getvalue()


def deep_png(values):
    """A PNG of 16 bits that uses each filter, written row by row."""
    height, width, channels = values.shape
    step, rows, before = 2 * channels, [], bytes(2 * channels * width)
    for number, line in enumerate(
        values.astype(">u2").tobytes()[at : at + 2 * channels * width]
        for at in range(0, values.nbytes, 2 * channels * width)
    ):
        kind = number % 3  # none, left, above
        left = bytes(step) + line[:-step]
        under = (bytes(len(line)), left, before)[kind]
        rows.append(bytes([kind]) + bytes((a - b) % 256 for a, b in zip(line, under, strict=True)))
        before = line
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )  # fmt: skip


STORED = {
    **{f"png {n}": (deep_png(noise("u2", 9, 7, n)), noise("u2", 9, 7, n)) for n in (1, 2, 3, 4)},
    **{
        f"tiff {dtype} {n} {planes} {options}": (written(values, planes, **options), values)
        for dtype in ("u1", "u2", "i2", "i4", "f4", "f8")
        for n in (1, 3, 4, 5)
        for planes, options in (
            (False, {}), (True, {}), (False, {"byteorder": ">"}), (False, {"bigtiff": True}),
            (False, {"compression": "lzw"}), (False, {"compression": "zlib", "predictor": True}),
        )
        for values in [noise(dtype, 9, 7, n)]
    },
    "ppm": (b"P6 7 9 65535\n" + noise("u2", 9, 7, 3).astype(">u2").tobytes(), noise("u2", 9, 7, 3)),
    "pgm": (b"P5 7 9 4095\n" + noise("u2", 9, 7, 1).astype(">u2").tobytes(), noise("u2", 9, 7, 1)),
    "pages": (written(noise("u2", 3, 9, 7)), np.moveaxis(noise("u2", 3, 9, 7), 0, 2)),
}  # fmt: skip
STORED["pages"] = (
    encoded(
        Image.fromarray(noise("u2", 3, 9, 7)[0]), "TIFF", save_all=True,
        append_images=[Image.fromarray(page) for page in noise("u2", 3, 9, 7)[1:]],
    ),
    STORED["pages"][1],
)  # fmt: skip


@pytest.mark.parametrize("kind", STORED)
def test_values_are_those_of_the_file(kind):
    data, values = STORED[kind]
    header, found = read_header(data), decoded(data, "auto")
    np.testing.assert_array_equal(found, values)
    assert found.dtype == values.dtype.newbyteorder("=") == header.dtype
    assert header.channels * header.pages == values.shape[2]
    if found.dtype.itemsize <= 2 and found.dtype.kind == "u":
        assert (decoded(data, "float32") == values).all()


def test_a_cut_or_changed_file_is_damaged_or_read():
    for kind, (data, _) in STORED.items():
        for cut in range(8, len(data), max(len(data) // 7, 1)):
            try:
                decoded(data[:cut], "auto")
            except NotAnImageError:
                continue
            assert "tiff" in kind or kind == "pages"  # whose directory may come after the pixels


def test_channels_and_types_are_what_is_asked_for_or_refused():
    grey, colour = STORED["png 1"], STORED["png 3"]
    assert (decoded(grey[0], "uint16", 3) == grey[1]).all()
    with_alpha = decoded(colour[0], "auto", 4)
    assert (with_alpha[:, :, :3] == colour[1]).all()
    assert (with_alpha[:, :, 3] == 65535).all()
    for data, dtype, channels in ((colour[0], "auto", 1), (STORED["ppm"][0], "uint8", 4)):
        with pytest.raises(NotAnImageError, match=r"channels instead|not all uint8"):
            decoded(data, dtype, channels)
    eight = encoded(Image.fromarray(noise("u1", 9, 7, 3)), "PNG")
    assert (decoded(eight, "uint16") == noise("u1", 9, 7, 3)).all()  # not scaled
    grey = np.asarray(Image.fromarray(noise("u1", 9, 7, 3)).convert("L"))
    assert (decoded(eight, "uint8", 1)[:, :, 0] == grey).all()
    for options in ({"dtype": "int8"}, {"channels": 0}, {"channels": 1.5}):
        with pytest.raises(UsageError):
            shardkit.Decode(**options)


@pytest.mark.parametrize("to", ["wds", "lmdb", "arrow", "parquet", "mds", "tfrecord", "litdata"])
def test_every_bit_comes_through_a_format_into_a_batch(tmp_path, to):
    kinds = ("png 3", "tiff f4 5 False {}", "tiff u2 1 False {}", "pages")
    rows = [{n.split()[0] + str(i): STORED[n][0] for i, n in enumerate(kinds)}] * 2
    schema = {name: shardkit.Image() for name in rows[0]}
    shardkit.convert(rows, to, tmp_path / "o", schema=schema, workers=0)
    steps = {name: shardkit.Decode(dtype="auto") for name in schema}
    (batch,) = Loader(tmp_path / "o", batch_size=2, transforms=steps)
    for name, kind in zip(schema, kinds, strict=True):
        values = np.moveaxis(STORED[kind][1], 2, 0)
        assert batch[name].shape == (2, *values.shape)
        np.testing.assert_array_equal(batch[name].numpy()[1], values)


DEEP = [
    kind
    for kind, (_, values) in STORED.items()
    if values.dtype.itemsize > 1 or values.shape[2] not in (1, 3)
]


def converted(data, **options):
    """The image after the steps of a conversion: a file, or an array."""
    steps = steps_for(
        Schema({"image": shardkit.Image()}),
        ImageOptions(**options),
        None,
        options.pop("to", "array"),
    )
    return steps({"__key__": "a", "image": data})


@pytest.mark.parametrize("kind", DEEP)
def test_steps_of_a_conversion_keep_all_values(kind):
    data, values = STORED[kind]
    shaped = converted(data, format="raw")
    np.testing.assert_array_equal(shaped.sample["image"], values)
    side = 7 if values.dtype.kind + str(values.itemsize) in ("i4", "f8") else 5  # 7: only cropped
    for options, expected in (
        ({"format": "keep", "icc": "srgb"}, values),
        ({"format": "keep", "resize": side, "resize_mode": "crop"}, None),
    ):
        shaped = converted(data, **options)
        found = decoded(shaped.sample["image"], "auto")
        assert found.dtype == values.dtype.newbyteorder("=")
        if expected is None:
            assert found.shape == (side, side, values.shape[2])
            assert values.min() <= found.min() <= found.max() <= values.max()
        else:
            np.testing.assert_array_equal(found, expected)
            assert shaped.images["passed"] == 1
    png = values.dtype == np.uint16 and kind != "pages" and values.shape[2] <= 4
    if not png or (kind.startswith("tiff") and values.shape[2] == 4):  # its alpha is not declared
        with pytest.raises(SampleError, match="more bits, channels or pages"):
            converted(data, format="png")
    else:
        made = converted(data, format="png").sample["image"]
        assert read_header(made).format == "png"
        np.testing.assert_array_equal(decoded(made, "auto"), values)


def test_margins_are_0_and_what_resizing_would_round_is_refused():
    data, values = STORED["png 2"]
    found = decoded(converted(data, resize=9, resize_mode="pad").sample["image"], "auto")
    assert (found[:, 1:8] == values).all()
    assert not found[:, [0, 8]].any()
    with pytest.raises(SampleError, match="with all its values") as error:
        converted(STORED["tiff i4 1 False {}"][0], resize=5)
    assert "store it as it is" in error.value.fix


def test_orientation_and_profile_of_deep_images_are_kept():
    values = noise("u2", 9, 7, 3)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    profile = profile.replace(b"rXYZ", b"?").replace(b"gXYZ", b"rXYZ").replace(b"?", b"gXYZ")
    made = written(values, iccprofile=profile, extratags=[(274, 3, 1, 6, True)])
    shaped = converted(made, format="png")
    result = shaped.sample["image"]
    assert dict(shaped.reasons) == {
        "rotated": 1, "tiff to png": 1, "with a colour profile, not applied": 1,
    }  # fmt: skip
    np.testing.assert_array_equal(decoded(result, "auto"), np.rot90(values, -1))
    assert read_header(result).profile == profile
    small = converted(written(noise("f4", 9, 7, 3), iccprofile=profile), resize=5)
    assert read_header(small.sample["image"]).dtype == "float32"


@pytest.mark.filterwarnings("ignore::shardkit.errors.ShardkitWarning")
def test_what_cannot_hold_the_values_is_refused_by_name(tmp_path):
    schema = {"image": shardkit.Image()}
    rows = [{"image": STORED["png 1"][0]}]

    def convert(to="beton", name="o.beton", **options):
        return shardkit.convert(rows, to, tmp_path / name, schema=schema, workers=0, **options)

    for options in ({}, {"resize": 5}, {"image_format": "raw"}):
        with pytest.raises(SampleError, match="more bits, channels or pages") as refused:
            convert(**options)
        assert refused.value.found == "png (16-bit, 1 channel)"
    reasons = convert(image_format="jpeg").splits[""].reasons
    assert reasons == {"16-bit": 1, "png to jpeg": 1}
    for kind, was, lost in (
        ("png 4", "png", "transparent"),
        ("pages", "tiff", "several pages (first page)"),
    ):
        reasons = dict(converted(STORED[kind][0], format="jpeg").reasons)
        assert reasons == {lost: 1, "16-bit": 1, f"{was} to jpeg": 1}
    pages = converted(written(noise("u1", 9, 7, 3), photometric="minisblack"), resize=5)
    assert read_header(pages.sample["image"]).kind == "tiff (3 channels)"
    for to in ("arrow", "wds"):
        convert(to, f"raw-{to}", image_format="raw")
        dataset = shardkit.open(tmp_path / f"raw-{to}")
        assert dataset.schema["image"] == shardkit.Array("<u2", (None, None, 1))
        np.testing.assert_array_equal(dataset[0]["image"], STORED["png 1"][1])
    rows.append({"image": STORED["tiff f4 5 False {}"][0]})
    convert("arrow", "mixed", image_format="raw")
    assert shardkit.open(tmp_path / "mixed").schema["image"] == shardkit.Array()


def test_grey_stays_one_channel_unless_its_margins_have_colours():
    grey = encoded(Image.fromarray(noise("u1", 9, 7, 1)[:, :, 0]), "BMP")
    for format, background, channels in (
        ("png", "white", 1), ("jpeg", "white", 1), ("png", "red", 3), ("webp", "white", 3),
    ):  # fmt: skip
        shaped = converted(grey, format=format, background=background, resize=9, resize_mode="pad")
        assert read_header(shaped.sample["image"]).channels == channels


def test_crops_flips_and_normalize_keep_type_and_channels(tmp_path):
    values = noise("u2", 40, 30, 5)
    rows = [{"image": written(values)}] * 3
    schema = {"image": shardkit.Image()}
    shardkit.convert(rows, "wds", tmp_path / "o", schema=schema, workers=0)

    def batch(*steps, to="numpy", **options):
        decode = shardkit.Decode(**{"dtype": "uint16", "channels": 5, **options})
        transforms = {"image": [decode, *steps]}
        (made,) = Loader(tmp_path / "o", batch_size=3, transforms=transforms, to=to)
        return made["image"]

    flip = shardkit.RandomHorizontalFlip(1)
    assert (batch(flip)[0] == values[:, ::-1]).all()
    assert (batch(shardkit.CenterCrop((20, 10)))[0] == values[10:30, 10:20]).all()
    wide = batch(shardkit.CenterCrop(40))[0]
    assert (wide[:, 5:35] == values).all()
    assert not wide[:, :5].any()
    small = batch(shardkit.Resize((13, 11)))
    assert small.dtype == np.uint16
    for channel in range(5):
        plane = Image.fromarray(values[:, :, channel].astype(np.float32))
        expected = np.asarray(plane.resize((11, 13), Image.Resampling.BILINEAR))
        assert abs(small[0, :, :, channel] - expected).max() <= 1
    normalize = shardkit.Normalize((0.1, 0.2, 0.3, 0.4, 0.5), (1, 2, 3, 4, 5))
    made = batch(normalize, dtype="auto", to="torch")
    assert made.shape == (3, 5, 40, 30)
    exact = (values / 65535 - normalize.mean) / normalize.std
    np.testing.assert_allclose(made.numpy()[0], np.moveaxis(exact, 2, 0), rtol=1e-5, atol=1e-6)
    for steps, options, error in (
        ([shardkit.Normalize((0,) * 3, (1,) * 3)], {}, UsageError),
        ([shardkit.Normalize((0,) * 3, (1,) * 3)], {"channels": None}, SampleError),
        ([], {"dtype": "uint8"}, SampleError),
        ([], {"channels": 4}, SampleError),
    ):
        with pytest.raises(error):
            batch(*steps, **options)


def test_stats_of_sound_images_without_colours_count_them(tmp_path):
    rows = [{"image": STORED["tiff f4 5 False {}"][0]}]
    schema = {"image": shardkit.Image()}
    shardkit.convert(rows, "wds", tmp_path / "o", schema=schema, workers=0)
    found = shardkit.open(tmp_path / "o").stats()["fields"]["image"]
    assert found["formats"] == {"tiff (float32, 5 channels)": 1}
    assert "pixels" not in found
