"""Functions of other libraries: what they get and give, and that their draws are of the sample."""

import functools
import io

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader

import shardkit
from shardkit import Decode, RandomHorizontalFlip, Resize, UsageError
from shardkit.errors import SampleError
from shardkit.schema import Array, Image, Int, Schema
from shardkit.torch import Loader, StreamingDataset
from shardkit.transforms import Transforms
from tests import clients
from tests.boxed import coco, some_painted
from tests.codecs.sample_images import photo_like
from tests.sources.real import cases, refused
from tests.transforms.chunks import applied, draws_of, file_of


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for number in range(8):
        path = root / f"images/{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file_of(photo_like(number, 60 + number, 50)))
    shardkit.convert(root / "images", "wds", root / "out", workers=0)
    return root


class Noise(torch.nn.Module):
    """Draws in many of the ways that torch has."""

    def forward(self, image):
        assert image.shape[0] == 3
        assert image.dtype == torch.uint8
        drawn = [torch.rand(2), torch.randperm(4)[:2], torch.empty(2).uniform_(), torch.randn(2)]
        drawn += [torch.bernoulli(torch.full((2,), 0.5)), torch.randint(0, 9, (2,)).float()]
        ones = torch.ones(2)
        drawn += [torch.rand_like(ones), torch.randn_like(ones), torch.randint_like(ones, 9)]
        drawn += [torch.distributions.Normal(0.0, 1.0).sample((2,))]
        drawn += [torch.distributions.Beta(1.0, 2.0).sample((2,))]
        drawn += [torch.distributions.Gamma(2.0, 1.0).sample((2,))]
        drawn += [torch.binomial(torch.full((2,), 9.0), torch.full((2,), 0.5))]
        return torch.stack([*drawn, image.float()[0, 0, :2]])


def loaded(photos, way, **options):
    options = {"batch_size": 4, "shuffle": True, **options}
    if way == "workers":
        dataset = StreamingDataset(photos / "out", **options)
        return list(DataLoader(dataset, batch_size=None, num_workers=2))
    return list(Loader(photos / "out", threads=way, **options))


def kornia_flips():
    from kornia import augmentation

    steps = (augmentation.RandomHorizontalFlip(), augmentation.RandomResizedCrop((24, 32)))
    return augmentation.AugmentationSequential(*steps, augmentation.RandomGaussianNoise(p=1.0))


def kornia_blur():
    """Takes a batch only, as modules of kornia do that are not augmentations."""
    from kornia import filters, geometry

    return torch.nn.Sequential(
        filters.BoxBlur((3, 3)), Called(functools.partial(geometry.resize, size=(30, 40)))
    )


class Called(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, image):
        return self.function(image)


@pytest.mark.parametrize("make", [Noise, kornia_flips])
def test_torch_draws_for_each_sample_and_leaves_the_global_generator_alone(photos, make):
    """S3, S4: any threads and workers, and a run that goes on."""
    options = {"transforms": {"image": make()}}
    state = torch.get_rng_state()
    whole = loaded(photos, 0, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert len({image.numpy().tobytes() for batch in whole for image in batch["image"]}) == 8
    for way in (3, "workers"):
        for batch, other in zip(whole, loaded(photos, way, **options), strict=True):
            assert torch.equal(batch["image"], other["image"])
    stopped, continued = (
        Loader(photos / "out", batch_size=4, shuffle=True, **options) for _ in range(2)
    )
    next(iter(stopped))
    continued.load_state_dict(stopped.state_dict())
    assert torch.equal(next(iter(continued))["image"], whole[1]["image"])


def test_what_libraries_get_and_give(photos):
    def given(pixels):
        assert (pixels.dtype, pixels.shape[0], pixels.shape[2]) == (np.uint8, 50, 3)
        return pixels[:40, :32]

    def grey(pixels):
        return PIL.Image.fromarray(pixels).resize((24, 20)).convert("L")

    for steps, shape, kind in (
        (given, (3, 40, 32), torch.uint8),
        ([given, given_no_more], (3, 40, 32), torch.uint8),
        (lambda pixels: given(pixels).transpose(2, 0, 1), (3, 40, 32), torch.uint8),
        (lambda pixels: given(pixels) / 255, (3, 40, 32), torch.float64),
        (lambda pixels: pixels.mean(axis=(0, 1)), (3,), torch.float64),
        (lambda pixels: pixels[:5, :3, 0], (5, 3), torch.uint8),
        (lambda pixels: torch.zeros(5, 8, 9), (5, 8, 9), torch.float32),
        (grey, (1, 20, 24), torch.uint8),
        ([grey, torch.nn.Identity()], (1, 20, 24), torch.uint8),
        ([Resize((8, 9)), torch.nn.Identity(), RandomHorizontalFlip()], (3, 8, 9), torch.uint8),
        ([kornia_flips()], (3, 24, 32), torch.float32),
        ([kornia_blur(), kornia_flips()], (3, 24, 32), torch.float32),
    ):
        [batch, _] = loaded(photos, 0, transforms={"image": steps})
        assert (batch["image"].shape, batch["image"].dtype) == ((4, *shape), kind)
        options = {"batch_size": None, "transforms": {"image": steps}}
        single = next(iter(StreamingDataset(photos / "out", **options)))
        assert (single["image"].shape, single["image"].dtype) == (shape, kind)
        [batch, _] = Loader(photos / "out", batch_size=4, to="numpy", transforms={"image": steps})
        assert isinstance(batch["image"], np.ndarray)
    for bands in (2, 5):
        transforms = {
            "image": lambda pixels, bands=bands: np.repeat(pixels[:40, :32, :1], bands, 2)
        }
        assert loaded(photos, 0, transforms=transforms)[0]["image"].shape == (4, bands, 40, 32)
    [batch, _] = loaded(photos, 0, transforms={"image": torch.nn.Identity()})
    assert [image.shape[:2] for image in batch["image"]] == [(3, 50)] * 4  # of different widths


def given_no_more(pixels):
    assert pixels.shape == (40, 32, 3)
    return torch.from_numpy(pixels).permute(2, 0, 1)


_TORCHVISION = f"""{clients.TORCHVISION}
import functools, json, numpy, shardkit, torchvision
from pathlib import Path
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.transforms import v2
from shardkit.torch import Loader, StreamingDataset
root = Path(sys.argv[1])
"""


def test_torchvision_gives_what_its_image_folder_gives(photos):
    script = (
        _TORCHVISION
        + """
scaled = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
for compose in (
    v2.Compose([v2.Resize((24, 20)), *scaled]),
    v1.Compose([v1.Resize((24, 20)), v1.ToTensor()]),
    v2.Compose([*scaled, v2.Resize((24, 20))]),
    v2.Resize((24, 20)),
    functools.partial(v2.functional.resize, size=[24, 20]),
):
    folder = torchvision.datasets.ImageFolder(root / "images", compose)
    keys = [path.removeprefix(f"{root}/images/").removesuffix(".png") for path, _ in folder.samples]
    found = {}
    for batch in Loader(root / "out", batch_size=4, transforms={"image": compose}):
        found |= zip(batch["__key__"], batch["image"], strict=True)
    for key, (image, _) in zip(keys, folder, strict=True):
        image = image if torch.is_tensor(image) else v2.functional.pil_to_tensor(image)
        assert torch.equal(found[key], image)
random = v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.RandAugment(),
                     v2.AugMix(), v2.ColorJitter(0.3, 0.3, 0.3, 0.1), *scaled, v2.GaussianNoise()])
options = {"batch_size": 4, "shuffle": True, "transforms": {"image": random}}
whole = [*Loader(root / "out", threads=0, **options)]
workers = DataLoader(StreamingDataset(root / "out", **options), batch_size=None, num_workers=2)
for batches in (Loader(root / "out", threads=3, **options), workers):
    for one, other in zip(whole, batches, strict=True):
        assert torch.equal(one["image"], other["image"])
print(json.dumps(len(found)))
"""
    )
    assert clients.run("torchvision", script, photos) == 8


# --- whole samples -------------------------------------------------------------------------------

OBJECTS = Schema({"image": Image(), "boxes": Array("<f4", (None, 4)), "label": Int()})


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    root = tmp_path_factory.mktemp("objects")
    source = coco(root / "coco", some_painted(12, 2))
    shardkit.convert(source, "wds", root / "out", workers=0, drop=("segmentation",))
    return root / "out/train"


def test_a_function_of_whole_samples_gets_them_decoded(objects):
    def flipped(sample, rng):
        assert sample["__key__"]
        width = sample["image"].shape[1]
        assert rng.random() < 1
        boxes = sample["boxes"][:, [2, 1, 0, 3]] * np.float32([-1, 1, -1, 1])
        boxes[:, [0, 2]] += width
        return {**sample, "image": sample["image"][:, ::-1], "boxes": boxes}

    by_function = Loader(objects, batch_size=1, transforms=flipped)
    ours = Loader(objects, batch_size=1, transforms={"image": RandomHorizontalFlip(1)})
    for batch, other in zip(by_function, ours, strict=True):
        assert torch.equal(batch["image"][0], other["image"][0])
        assert torch.allclose(batch["boxes"][0], other["boxes"][0])
        assert torch.equal(batch["categories"][0], other["categories"][0])
        assert torch.equal(batch["image_id"], other["image_id"])
    error = refused(
        SampleError,
        "did not return the fields",
        next,
        iter(Loader(objects, batch_size=1, transforms=lambda sample: {"image": 1})),
    )
    assert error.found == "image"
    for function, words in (
        (lambda sample: {**sample, "pixels": 1}, "does not have: 'pixels'"),
        (lambda sample: {**sample, "boxes": sample["boxes"][:0]}, "other numbers of their rows"),
    ):
        with pytest.raises(SampleError, match=words):
            list(Loader(objects, batch_size=1, transforms=function))


def test_albumentations_move_boxes_of_whole_samples(objects, monkeypatch):
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # else importing it asks a server
    theirs = pytest.importorskip("albumentations", reason="an example of what plugs in")
    names = [name for name in ("categories", "iscrowd") if name in shardkit.open(objects).schema]
    params = theirs.BboxParams(format="pascal_voc", label_fields=names)
    steps = [theirs.RandomResizedCrop((64, 64), scale=(0.5, 1)), theirs.HorizontalFlip()]
    compose = theirs.Compose(steps, bbox_params=params)
    seen = 0
    for batch in Loader(objects, batch_size=4, last="short", transforms=compose):
        assert batch["image"].shape[1:] == (3, 64, 64)
        for boxes, categories in zip(batch["boxes"], batch["categories"], strict=True):
            assert (boxes.dtype, categories.dtype) == (torch.float32, torch.int64)
            assert boxes.shape == (len(categories), 4)
            seen += len(boxes)
    assert seen
    yolo = theirs.Compose(steps, bbox_params=theirs.BboxParams(format="yolo", label_fields=names))
    refused(UsageError, "boxes are in pixels", Transforms, yolo, OBJECTS)
    refused(UsageError, "boxes are in pixels", Transforms, theirs.Compose(steps), OBJECTS)
    refused(UsageError, "boxes are in pixels", Transforms, theirs.HorizontalFlip(), OBJECTS)
    unnamed = theirs.Compose(steps, bbox_params=theirs.BboxParams("pascal_voc"))
    with_rows = Schema({**OBJECTS, "categories": Array("<i8", (None,))})
    error = refused(UsageError, "a row of the fields beside", Transforms, unnamed, with_rows)
    assert "label_fields=['categories']" in error.expected
    kind = {"label": theirs.HorizontalFlip}  # the class in place of an instance
    refused(UsageError, "invalid transform of 'label'", Transforms, kind, OBJECTS)
    image = {"image": theirs.Compose(steps)}
    refused(UsageError, "would be moved, but not what is on it", Transforms, image, OBJECTS)


def test_albumentations_move_boxes_and_masks_of_any_name(monkeypatch):
    """As whole samples and by a tuple of fields, and as shardkit's own transforms move them."""
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    theirs = pytest.importorskip("albumentations", reason="an example of what plugs in")
    mask = Array("|u1", (None, None))
    schema = Schema({"photo": Image(), "mask": mask, "edge_mask": mask, "boxes": OBJECTS["boxes"]})
    pixels = photo_like(1, 20, 16)
    sample = {"__key__": "a", "photo": file_of(pixels), "mask": pixels[:, :, 0]}
    sample |= {"edge_mask": pixels[:, :, 1], "boxes": np.float32([[1, 2, 9, 12]])}
    params = {"bbox_params": theirs.BboxParams("pascal_voc")}
    alone = theirs.Compose([theirs.HorizontalFlip(p=1)], **params)
    compose = theirs.Compose(
        [theirs.HorizontalFlip(p=1)], additional_targets={"edge_mask": "mask"}, **params
    )
    refused(UsageError, "takes one image and one mask", Transforms, alone, schema)
    fields = tuple(schema)
    [expected] = applied({fields: RandomHorizontalFlip(1)}, [sample], schema)
    for transforms in (compose, {fields: compose}):
        [made] = applied(transforms, [sample], schema)
        for name in fields:
            assert np.allclose(made[name], expected[name]), name


def test_torchvision_moves_boxes_and_masks_of_whole_samples(objects):
    script = (
        _TORCHVISION
        + """
both = v2.Compose([v2.RandomHorizontalFlip(1), v2.ToImage()])
ours = {"image": shardkit.RandomHorizontalFlip(1)}
count = 0
loaders = [Loader(root, batch_size=1, transforms=transforms) for transforms in (both, ours)]
for one, other in zip(*loaders, strict=True):
    for name in ("boxes", "categories", "image"):
        assert torch.allclose(one[name][0], other[name][0]), name
        assert type(one[name][0]) is torch.Tensor, name
    count += 1
with shardkit.create(root / "../masked", to="arrow", schema={
    "image": shardkit.Image(), "mask": shardkit.Array("uint8", (None, None))}) as writer:
    for sample in shardkit.open(root):
        size = shardkit.open(root, transforms={"image": shardkit.Decode()})[sample["__key__"]]
        mask = size["image"][:, :, 0].copy()
        writer.write({"__key__": sample["__key__"], "image": sample["image"], "mask": mask})
crop = v2.Compose([v2.RandomCrop(16), v2.RandomHorizontalFlip(), v2.ToImage()])
for batch in Loader(root / "../masked", batch_size=4, transforms=crop):
    assert torch.equal(batch["image"][:, 0].long(), batch["mask"])
print(json.dumps(count))
"""
    )
    assert clients.run("torchvision", script, objects) == 12


@cases(
    "transforms words",
    ("crop", "given by field, or as a function"),
    ([len], "given by field, or as a function"),
    (Decode(), "given by field, or as a function"),
    (Decode, "given by field, or as a function"),
)
def test_what_is_no_function_of_samples_is_refused(transforms, words):
    refused(UsageError, words, Transforms, transforms, OBJECTS)


def test_libraries_do_not_move_shapes(tmp_path):
    source = coco(tmp_path / "coco", some_painted(4, 2))
    shardkit.convert(source, "wds", tmp_path / "out", workers=0)
    theirs = pytest.importorskip("albumentations", reason="an example of what plugs in")
    params = theirs.BboxParams(format="pascal_voc", label_fields=["categories"])
    compose = theirs.Compose([theirs.HorizontalFlip(p=1)], bbox_params=params)
    for transforms in (compose, {("image", "segmentation"): compose}):
        refused(
            UsageError,
            "but not 'segmentation'",
            Loader,
            tmp_path / "out/train",
            transforms=transforms,
            batch_size=1,
        )
    flipped = next(
        iter(Loader(tmp_path / "out/train", batch_size=4, transforms=lambda sample: sample))
    )
    assert len(flipped["segmentation"]) == 4


def test_a_module_of_kornia_takes_one_image():
    refused(UsageError, "gets a single image", Transforms, kornia_flips(), OBJECTS)


def test_a_sample_may_lack_what_is_on_its_image(monkeypatch):
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    theirs = pytest.importorskip("albumentations", reason="an example of what plugs in")
    params = theirs.BboxParams(format="pascal_voc", label_fields=["categories"])
    compose = theirs.Compose([theirs.HorizontalFlip(p=1)], bbox_params=params)
    kinds = {"mask": Image(optional=True), "boxes": Array("<f4", (None, 4), optional=True)}
    kinds |= {"categories": Array("<i8", (None,), optional=True)}
    image = {"__key__": "a", "image": file_of(photo_like(1, 20, 20))}
    for more in ({}, {"mask": file_of(photo_like(1, 20, 20)[:, :, 0])}):
        for transforms in (compose, lambda sample: sample):
            made, sample = Transforms(transforms, Schema({"image": Image(), **kinds})), image | more
            assert made.apply([sample], draws_of(1), {}) == {}
            assert sample.keys() == (image | more).keys()


def test_a_sample_may_lack_other_fields_than_its_image():
    schema = Schema({"image": Image(), "label": Int(optional=True)})
    sample = {"__key__": "a", "image": file_of(photo_like(1, 20, 20))}
    made = applied(lambda sample: {**sample, "label": 3}, [sample], schema)
    assert made[0]["label"] == 3
    errors = Transforms(lambda sample: sample, schema).apply([{"__key__": "a"}], draws_of(1), {})
    assert errors == {}


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_albumentations_move_all_that_is_on_an_image(tmp_path, monkeypatch, encoded, whole):
    """Also if the images are stored as pixels, and by names in a tuple."""
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    theirs = pytest.importorskip("albumentations", reason="an example of what plugs in")
    pixels, plane = np.zeros((30, 40, 3), np.uint8), (None, None)
    pixels[:, :10] = 9
    schema = {name: Array("<i8", (None,)) for name in ("categories", "tracks")}
    schema |= {"boxes": Array("<f4", (None, 4)), "label": Int(), "mask": Array("|u1", plane)}
    schema |= {"image": Image() if encoded else Array("|u1", (*plane, 3))}
    image = {"image": file_of(pixels) if encoded else pixels, "mask": pixels[:, :, 0]}
    boxes = {"boxes": np.float32([[0, 0, 10, 30], [30, 0, 40, 30]]), "label": 1}
    rows = {"categories": np.int64([3, 4]), "tracks": np.int64([7, 8])}
    with shardkit.create(tmp_path / "out", "arrow", schema) as writer:
        writer.write({"__key__": "a", **image, **boxes, **rows})
    params = theirs.BboxParams(format="pascal_voc", label_fields=["categories", "tracks"])
    moves = [theirs.HorizontalFlip(p=1), theirs.Crop(20, 0, 40, 30)]
    compose = theirs.Compose(moves, bbox_params=params)
    transforms = compose if whole else {("image", "mask", "boxes", "categories", "tracks"): compose}
    (batch,) = Loader(tmp_path / "out", batch_size=1, transforms=transforms)
    expected = np.zeros((30, 20), np.uint8)
    expected[:, 10:] = 9
    assert np.array_equal(batch["image"][0, 0], expected)
    assert np.array_equal(batch["mask"][0], expected)
    assert batch["boxes"][0].tolist() == [[10, 0, 20, 30]]
    assert [batch[name][0].tolist() for name in ("categories", "tracks")] == [[3], [7]]


def test_a_mask_alone_has_values_and_not_colours():
    mask = PIL.Image.fromarray(np.uint8([[0, 1], [2, 1]]), "P")
    mask.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    for made, dtype in ((mask, "uint8"), (PIL.Image.fromarray(np.uint16([[9, 999]])), "uint16")):
        file = io.BytesIO()
        made.save(file, "PNG")
        sample = {"__key__": "a", "mask": file.getvalue()}
        (found,) = applied({"mask": lambda mask: mask}, [sample], Schema({"mask": Image()}))
        assert found["mask"].dtype == dtype
        assert np.array_equal(found["mask"], np.asarray(made))


def test_a_function_that_changes_type_or_channels_comes_last(photos):
    [batch, _] = loaded(photos, 2, transforms={"image": [Resize((8, 9)), lambda p: p[:, :, :1]]})
    assert batch["image"].shape == (4, 1, 8, 9)
    steps = [lambda pixels: pixels[:, :, :1], Resize((8, 9))]
    error = refused(SampleError, "size", loaded, photos, 0, transforms={"image": steps})
    assert "function before crops" in error.fix
