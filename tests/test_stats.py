"""`stats`: what numpy counts of the same pixels, classes, lengths and duplicates."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import shardkit
from shardkit.codecs.pixels import to_rgb
from shardkit.dataset.statistics import Pixels
from shardkit.errors import SampleError, UsageError
from shardkit.stream import Loader
from shardkit.testing import make_image
from tests.conftest import files_of
from tests.test_cli import run

SCHEMA = {
    "image": shardkit.Image(),
    "label": shardkit.Int(),
    "caption": shardkit.Text(optional=True),
    "tokens": shardkit.Array("uint16", (None,)),
    "price": shardkit.Float(),
}
LABELS = [0, 0, 0, 2, 2, 2]


def samples():
    """The image of the fourth is that of the first, with another label; of the last the fifth's."""
    made = [
        {
            "__key__": f"{n:03d}",
            "label": LABELS[n],
            "price": float(n) ** 2,
            **({"caption": "é" * n} if n else {}),
            "image": make_image(n, ("PNG", "JPEG")[n % 2], (20 + n % 3, 30)),
            "tokens": np.arange(n, dtype=np.uint16),
        }
        for n in range(6)
    ]
    made[3]["image"], made[5]["image"] = made[0]["image"], made[4]["image"]
    return made


def are_of(found, every):
    """Mean and deviation of red, green and blue are those of all pixels, by numpy in float64."""
    flat = np.concatenate([pixels.reshape(-1, 3) for pixels in every]) / 255
    assert np.allclose(found.mean, flat.mean(axis=0), rtol=0, atol=1e-12)
    assert np.allclose(found.std, flat.std(axis=0), rtol=0, atol=1e-12)


def write(path, to="wds"):
    classes = ["a", "b", "c"]
    with shardkit.create(path, to, SCHEMA, classes=classes, shard_samples=4) as writer:
        for one in samples():
            writer.write(one)
    return path


@pytest.fixture(scope="module", params=["wds", "parquet"])
def dataset(request, tmp_path_factory):
    return shardkit.open(write(tmp_path_factory.mktemp("stats") / "data", request.param))


def test_they_are_what_numpy_counts(dataset):
    found = json.loads(json.dumps(dataset.stats()))
    assert found["samples"] == 6
    fields, made = found["fields"], samples()
    are_of(SimpleNamespace(**fields["image"]["pixels"]), [to_rgb(one["image"]) for one in made])
    assert fields["image"]["pixels"]["images"] == 6
    assert fields["image"]["formats"] == {"png": 5, "jpeg": 1}
    assert (
        fields["image"]["height"].items()
        >= {"min": 30, "median": 30, "mean": 30, "max": 30}.items()
    )
    assert (fields["image"]["width"]["min"], fields["image"]["width"]["max"]) == (20, 22)
    sizes = [len(one["image"]) for one in made]
    assert fields["image"]["bytes"]["mean"] == pytest.approx(sum(sizes) / 6)
    assert fields["caption"]["values"] == 5
    assert fields["caption"]["characters"] == {
        "count": 5,
        "min": 1,
        "median": 3,
        "mean": 3,
        "max": 5,
    }
    assert fields["tokens"]["length"] == {"count": 6, "min": 0, "median": 2, "mean": 2.5, "max": 5}
    prices = np.arange(6.0) ** 2
    assert fields["price"]["mean"] == pytest.approx(prices.mean())
    assert fields["price"]["std"] == pytest.approx(prices.std())
    assert (fields["price"]["min"], fields["price"]["max"]) == (0, 25)
    assert "mean" not in fields["label"]
    # As scikit-learn's "balanced" has them, over classes that occur.
    classes = [(entry["name"], entry["samples"], entry["weight"]) for entry in found["classes"]]
    assert classes == [("a", 3, 6 / (2 * 3)), ("b", 0, None), ("c", 3, 6 / (2 * 3))]
    assert found["duplicates"] == {
        "compared": ["image"],
        "samples": 2,
        "groups": 2,
        "groups_of_several_labels": 1,
        "first": [["000", "003"], ["004", "005"]],
    }


def test_pixels_are_those_that_transforms_show_and_normalizing_gives_zero_and_one(tmp_path):
    path = write(tmp_path / "data")
    crop = {"image": shardkit.CenterCrop(8)}
    found = shardkit.open(path, transforms=crop).stats()["fields"]["image"]
    [batch] = Loader(path, batch_size=6, transforms=crop)
    are_of(SimpleNamespace(**found["pixels"]), batch["image"])
    assert found["pixels"]["pixels"] == 6 * 64
    assert found["width"]["max"] == 22, "sizes are those stored"
    normalize = shardkit.Normalize.of(shardkit.open(path))
    transforms = {"image": [shardkit.Decode(), normalize]}
    [batch] = Loader(path, batch_size=6, transforms=transforms)
    values = np.concatenate([np.asarray(image).reshape(-1, 3) for image in batch["image"]])
    assert np.allclose(values.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(values.std(axis=0), 1, atol=1e-5)
    with pytest.raises(UsageError, match="output of the transforms is not pixels"):
        shardkit.open(path, transforms=transforms).stats()
    with pytest.raises(UsageError, match="which field has the images"):
        shardkit.Normalize.of(shardkit.open(path), "caption")
    with pytest.raises(UsageError, match=r"shardkit\.open"):
        shardkit.Normalize.of(path)
    shardkit.convert([{"text": "a"}], "wds", tmp_path / "out", workers=0)
    with pytest.raises(UsageError, match="no images to normalize"):
        shardkit.Normalize.of(shardkit.open(tmp_path / "out"))
    with pytest.raises(UsageError, match="there are no images"):
        shardkit.convert([{"text": "a"}], "wds", tmp_path / "x", stats=True)


RESIZED = shardkit.ImageOptions(resize=16, format="jpeg")


@pytest.mark.parametrize(
    ("to", "options"), [("wds", {}), ("arrow", {"image": RESIZED}), ("beton", {"image": RESIZED})]
)
def test_a_manifest_has_them_where_asked_for(tmp_path, monkeypatch, to, options):
    fields = {"image": SCHEMA["image"], "label": SCHEMA["label"]}
    made = [{n: one[n] for n in ("__key__", *fields)} for one in samples()]
    shardkit.convert(made, to, tmp_path / "out", schema=fields, stats=True, workers=0, **options)
    dataset = shardkit.open(tmp_path / "out")
    about = dataset.manifest.pixels["image"]
    are_of(about, [to_rgb(one["image"]) for one in dataset])
    monkeypatch.setattr(type(dataset), "stats", None)  # nothing is counted again
    assert shardkit.Normalize.of(dataset).mean == about.mean


def test_conversions_count_the_same_with_any_workers_and_once(tmp_path):
    for n in range(12):
        folder = tmp_path / "photos" / "ab"[n % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n:03d}.png").write_bytes(make_image(n, "PNG", (20, 30)))
    options = {"stats": True, "shard_samples": 5}
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        shardkit.convert(tmp_path / "photos", "wds", out, workers=workers, **options)
    assert files_of(tmp_path / "out0") == files_of(tmp_path / "out2")
    assert "pixels" in run("inspect", tmp_path / "out0").stdout.lower()
    shardkit.convert(tmp_path / "photos", "wds", tmp_path / "plain", workers=0)
    with pytest.raises(shardkit.OutputError):  # another recipe
        shardkit.convert(tmp_path / "photos", "wds", tmp_path / "plain", stats=True)
    every = [np.random.default_rng(n).integers(0, 256, (n, 5, 3), np.uint8) for n in (1, 7, 400)]
    whole, merged = Pixels(), Pixels()
    for image in every:
        whole.add(image)
    for image in reversed(every):  # in any order
        part = Pixels()
        part.add(image)
        merged.merge(part)
    whole.flush()
    assert merged == whole
    are_of(whole.summary(), every)


def test_the_command_prints_them_for_each_split(tmp_path):
    path = write(tmp_path / "data")
    text = run("stats", path).stdout
    for words in ("(red, green, blue)", "weight 1", "2 in 2 groups", "several", "000, 003"):
        assert words in text
    found = json.loads(run("stats", path, "--json").stdout)
    assert found == json.loads(json.dumps(shardkit.open(path).stats()))
    (tmp_path / "out").mkdir()
    for split in ("train", "val"):
        write(tmp_path / "out" / split)
    found = json.loads(run("stats", tmp_path / "out", "--json").stdout)["splits"]
    assert {name: report["samples"] for name, report in found.items()} == {"train": 6, "val": 6}


def test_damage_is_told_by_key_and_without_images_all_but_the_label_is_compared(tmp_path):
    made = samples()
    whole = make_image(9, "PNG", (200, 300))
    made[4]["image"] = whole[:500] + bytes([whole[500] ^ 255]) + whole[501:]
    with pytest.raises(SampleError, match="004"):
        shardkit.convert(made, "arrow", tmp_path / "out", schema=SCHEMA, stats=True)
    shardkit.convert(made, "arrow", tmp_path / "out", schema=SCHEMA)
    with pytest.raises(SampleError, match="--check decode --on-error skip") as raised:
        shardkit.open(tmp_path / "out").stats()
    path = tmp_path / "out/shard-000000.arrow"
    where = {"path": path, "position": 4, "key": "004", "field": "image"}
    assert raised.value.where == where
    drop = {"image": shardkit.ImageOptions(check="decode"), "on_error": "skip", "workers": 0}
    shardkit.convert(tmp_path / "out", "arrow", tmp_path / "kept", **drop)
    assert shardkit.open(tmp_path / "kept").stats()["samples"] == len(made) - 1
    rows = [{"text": "same", "label": n} for n in range(3)] + [{"text": "other", "label": 0}]
    shardkit.convert(rows, "parquet", tmp_path / "rows")
    found = shardkit.open(tmp_path / "rows").stats()["duplicates"]
    assert (found["compared"], found["samples"], found["groups"]) == (["text"], 2, 1)
