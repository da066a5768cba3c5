"""decode="gpu": DALI fed by the Loader, with its operators of the processor.

With `-m gpu`, on a GPU.
"""

import functools
import gc
import re
import subprocess
import sys
import threading

import numpy as np
import PIL.Image
import pytest
import torch

import shardkit
from shardkit.errors import MissingLibraryError, SampleError, ShardkitWarning, UsageError
from shardkit.schema import Array, Image, Int
from shardkit.stream import gpu_decoding, torch_loader
from shardkit.torch import Loader
from shardkit.transforms.direct import Planned
from tests.codecs.sample_images import encoded, exif, photo_like
from tests.codecs.test_crop import needs_crop_many
from tests.stream.data import same, write

pytest.importorskip("nvidia.dali", reason='no DALI: pip install "shardkit[gpu]"')
pytestmark = needs_crop_many

CROP = [shardkit.RandomResizedCrop(48), shardkit.RandomHorizontalFlip()]
NORMALIZE = shardkit.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SIZES = [(160, 120), (97, 131), (200, 80), (64, 64), (241, 176), (48, 48)]


@functools.cache
def photo(number):
    return PIL.Image.fromarray(photo_like(number, *SIZES[number % len(SIZES)]))


def jpeg(number, mode="RGB", **options):
    return encoded(photo(number).convert(mode), "JPEG", **{"quality": 90, **options})


def write_jpegs(out, count=37, **others):
    """Images whose label is their number; `others` replaces some."""
    made = ({"image": others.get(f"n{n}", jpeg(n)), "label": n} for n in range(count))
    return write(out, "wds", {"image": Image(), "label": Int()}, made)


def damage(path, number, how):
    """Damage an image of a dataset: cut, gone, or with Huffman tables that are none."""
    image = jpeg(number)
    half, tables = len(image) // 2, image.index(b"\xff\xc4") + 5
    bad = {
        "cut": image[:half].ljust(len(image), b"\0"),
        "gone": bytes(len(image)),
        "tables": image[:tables] + b"\xff" * 7 + image[tables + 7 :],
    }
    for shard in path.glob("*.tar"):
        shard.write_bytes(shard.read_bytes().replace(image, bad[how]))


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    monkeypatch.setattr(torch_loader, "_DEVICES", [request.param])
    return request.param


@pytest.fixture(scope="session")
def jpegs(tmp_path_factory):
    return write_jpegs(tmp_path_factory.mktemp("jpegs") / "out")


@pytest.fixture
def decoded(monkeypatch):
    """The images that DALI was given, of the first field."""
    gc.collect()  # ends threads of other tests
    seen, feed = [], gpu_decoding._Pipeline._feed

    def noted(self, rows):
        (first, *_) = rows.values()
        seen.extend([row for row in first if isinstance(row, Planned)])
        feed(self, rows)

    monkeypatch.setattr(gpu_decoding._Pipeline, "_feed", noted)
    return seen


def both(path, **options):
    """Loaders whose batches should be equal."""
    options = {"batch_size": 5, "transforms": {"image": CROP}, "threads": 2} | options
    (device,) = torch_loader._DEVICES
    return Loader(path, **options), Loader(path, **options, device=device, decode="gpu")


def compare(one, other, images=("image",)):
    """Assert that two batches are equal, but for the difference of images that S7 allows."""
    assert list(one) == list(other)
    most = {"cpu": (2, 64), "cuda": (8, 255)}  # of an image on average, and at all
    for name, value in one.items():
        made = other[name]
        if name not in images:
            assert same(value, made.cpu() if isinstance(made, torch.Tensor) else made), name
            continue
        assert (value.shape, value.dtype, value.stride()) == (made.shape, made.dtype, made.stride())
        scale = 1 if value.dtype == torch.uint8 else 255 * 0.224
        apart = (value.float() - made.cpu().float()).abs() * scale
        mean, largest = most[made.device.type]
        assert apart.mean((1, 2, 3)).max() <= mean
        assert apart.max() <= largest


def compare_all(path, epochs=1, images=("image",), **options):
    ours, made = both(path, **options)
    for _ in range(epochs):
        for one, other in zip(ours, made, strict=True):
            compare(one, other, images)


@pytest.mark.parametrize(
    "steps",
    [
        CROP,
        [shardkit.Resize(64), shardkit.CenterCrop(48)],
        [shardkit.Resize((30, 50)), shardkit.RandomHorizontalFlip(1.0)],
        [shardkit.Resize(300), shardkit.RandomHorizontalFlip(), shardkit.CenterCrop((200, 100))],
        [shardkit.CenterCrop(64)],  # some images are smaller
        [*CROP, NORMALIZE],
        [*CROP, shardkit.Normalize((0.5,) * 3, (0.224,) * 3, dtype="bfloat16")],
        [*CROP, shardkit.Normalize((0.5,) * 3, (0.224,) * 3, dtype="float16")],
    ],
    ids=str,
)
def test_images_are_those_of_the_processor(jpegs, steps, decoded):
    compare_all(jpegs, transforms={"image": steps}, shuffle=True)
    assert len(decoded) >= 37


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"threads": 0},
        {"last": "short", "batch_size": 8},
        {"last": "drop", "fields": ["image"], "batch_size": 8},
        {"shuffle": True, "rank": 1, "world_size": 3},
        {"shuffle": True, "sampling": shardkit.Balanced("label")},
        {"cache": "memory"},
        {"transforms": {"image": CROP, "label": lambda label: label + 0.5}},
    ],
    ids=", ".join,
)
def test_batches_are_those_of_the_processor_in_every_epoch(jpegs, options, decoded):
    compare_all(jpegs, epochs=2, **options)
    assert len(decoded) > 20


def test_batches_that_are_held_keep_their_images(jpegs):
    ours, made = both(jpegs, shuffle=True)
    held = [batch for _ in range(5) for batch in made]
    assert len(held) == 40
    for one, other in zip((batch for _ in range(5) for batch in ours), held, strict=True):
        compare(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_batches_that_are_held_while_the_gpu_is_busy_are_right(jpegs, device):
    ours, made = both(jpegs, shuffle=True)
    busy, held = torch.randn(4096, 4096, device=device), []
    for batch in (batch for _ in range(5) for batch in made):
        for _ in range(6):
            busy = torch.tanh(busy @ busy)
        # In the same stream, behind the work above, while later batches are decoded.
        held.append({**batch, "image": batch["image"].clone()})
        assert batch["image"].is_cuda
    for one, other in zip((batch for _ in range(5) for batch in ours), held, strict=True):
        compare(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_memory_of_the_gpu_is_given_back(jpegs, device):
    used = []
    for _ in range(4):
        next(iter(both(jpegs, shuffle=True)[1]))
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    assert used[-1] <= used[1] + (64 << 20)


def test_a_state_in_the_middle_of_an_epoch_continues(jpegs):
    _, made = both(jpegs, shuffle=True)
    iteration = iter(made)
    for _ in range(3):
        next(iteration)
    state, rest = made.state_dict(), [*iteration]
    other = made.with_options(threads=0)
    other.load_state_dict(state)
    for one, again in zip(rest, other, strict=True):
        assert one["__key__"] == again["__key__"]
        assert torch.equal(one["image"], again["image"])


def test_loaders_and_iterations_at_the_same_time(jpegs):
    train, val = both(jpegs, shuffle=True), both(jpegs, seed=1, batch_size=7, last="short")
    for one, other, third, fourth in zip(*train, *val, strict=False):
        compare(one, other)
        compare(third, fourth)
    every = [[iter(loader), iter(loader)] for loader in val]
    for _ in range(4):
        for one, other in zip(*every, strict=True):
            compare(next(one), next(other))


def test_several_fields_of_images_and_what_is_on_them(tmp_path, decoded):
    boxes = np.array([[8, 8, 40, 40], [0, 0, 20, 64]], np.float32)
    kinds = {"image": Image(), "other": Image(), "mask": Image(), "boxes": Array("<f4", (None, 4))}
    made = []
    for number in range(10):
        mask = encoded(photo(number).convert("L"), "PNG")
        other = jpeg(number + 1, "L")
        made.append({"image": jpeg(number), "other": other, "mask": mask, "boxes": boxes})
    path = write(tmp_path / "out", "wds", kinds, made)
    small = [shardkit.Resize(20), shardkit.CenterCrop(16), NORMALIZE]
    transforms = {("image", "mask", "boxes"): CROP, "other": small}
    compare_all(path, images=("image", "other"), transforms=transforms)
    assert len(decoded) > 10
    transforms = {("image", "mask", "boxes"): [*CROP, lambda **values: values]}
    with pytest.raises(UsageError, match="a function of several fields"):
        both(path, transforms=transforms)


def test_images_beside_texts_of_different_lengths(tmp_path, decoded):
    kinds = {"image": Image(), "tokens": Array("uint16", (None,))}
    each = ({"image": jpeg(n), "tokens": np.arange(1 + n % 7, dtype=np.uint16)} for n in range(30))
    path = write(tmp_path / "out", "wds", kinds, each)
    compare_all(path, batch_size=None, batching=shardkit.Bucket(6, 3), shuffle=True)
    compare_all(path, collate=shardkit.pad_collate(field="tokens"))
    assert len(decoded) > 60


def others():
    """What DALI would not decode as the processor does, or not at all."""
    rgb = jpeg(0, keep_rgb=True)
    adobe = rgb[2:18]  # a segment that says what the names of the components say too
    lacking = jpeg(1).replace(b"\xff\xc4", b"\xff\xeb")  # its tables are the standard ones
    made = [
        rgb,
        rgb.replace(adobe, b""),
        lacking,
        jpeg(2, "CMYK"),
        *(jpeg(n, exif=exif(n)) for n in range(2, 9)),
    ]
    pixels = PIL.Image.fromarray(photo_like(3, 90, 70))
    made += [encoded(pixels, "PNG"), encoded(pixels, "WEBP"), encoded(pixels, "PPM")]
    made += [encoded(pixels.resize((1, 1)), "JPEG"), jpeg(1, "L"), jpeg(4, progressive=True)]
    one, two = (b"\x12\0\3\0\0\0" + bytes([count]) for count in (1, 2))
    made.append(jpeg(1, exif=exif(6).tobytes().replace(one, two)))  # two orientations: ignored
    return made


def test_other_images_are_made_by_the_processor_beside_those_of_dali(
    tmp_path, decoded, monkeypatch
):
    every = {f"n{2 * n}": image for n, image in enumerate(others())}
    path = write_jpegs(tmp_path / "out", **every)
    for steps in (CROP, [*CROP, NORMALIZE]):
        compare_all(path, transforms={"image": steps}, shuffle=True)
    assert 2 * 20 < len(decoded) < 2 * 37
    decoded.clear()
    every = {f"n{n}": image for n, image in enumerate(others()[:10])}
    monkeypatch.setattr(gpu_decoding, "_SEEN", 8)
    with pytest.warns(ShardkitWarning, match="left 10 of the first 10 images to the processor"):
        compare_all(write_jpegs(tmp_path / "alone", 10, **every))
    assert not decoded


@pytest.mark.parametrize("threads", [0, 2])
def test_damaged_images_give_the_errors_of_the_processor(tmp_path, threads, decoded):
    path = write_jpegs(tmp_path / "out")
    for number, how in {6: "tables", 13: "cut", 14: "tables", 15: "gone"}.items():
        damage(path, number, how)
    for options in ({"batch_size": 4}, {"batch_size": 5, "shuffle": True}):
        ours, made = both(path, threads=threads, on_error="skip", **options)
        for _ in range(2):
            for one, other in zip(ours, made, strict=True):
                compare(one, other)
            assert ours.errors == made.errors
            assert len(made.errors) == 4
    told = set()
    for loader in both(path, threads=threads, batch_size=4):
        iteration = iter(loader)
        next(iteration)
        with pytest.raises(SampleError) as caught:
            next(iteration)
        assert caught.value.where["key"] == "0006"
        assert loader.state_dict()["samples"] == 4
        told.add(str(caught.value))
    assert len(told) == 1
    with pytest.raises(SampleError, match="max_errors"):
        list(both(path, on_error="skip", max_errors=1)[1])


def test_a_batch_that_dali_alone_cannot_decode_is_made_by_the_processor(jpegs, monkeypatch):
    calls, cuts = [], gpu_decoding._cuts

    def fails_once(windows):
        made = cuts(windows)
        calls.append(len(windows))
        if calls.count(9) == 3 and len(windows) == 9:
            made["shape"][:] = 1 << 20  # pixels that no image has
        return made

    monkeypatch.setattr(gpu_decoding, "_cuts", fails_once)
    with pytest.warns(ShardkitWarning, match="DALI failed, and the processor decoded"):
        compare_all(jpegs, epochs=2, shuffle=True, batch_size=9)  # of no other test


def test_functions_after_the_transforms_get_whole_batches(jpegs):
    seen = []

    def function(images):
        seen.append(images)
        return images.float().mean(dim=(2, 3))

    transforms = {"image": [*CROP, function]}
    _, made = both(jpegs, transforms=transforms, shuffle=True)
    for one, other in zip(both(jpegs, shuffle=True)[0], made, strict=True):
        compare(one, {**other, "image": seen[-1]})
        assert torch.equal(other["image"], seen[-1].float().mean(dim=(2, 3)))


def test_a_function_that_fails_ends_the_iteration_before_its_batch(jpegs):
    calls = []

    def fails(images):
        calls.append(images)
        return images if len(calls) < 3 else 1 / 0

    for function, error in ((fails, ZeroDivisionError), (lambda images: None, UsageError)):
        _, made = both(jpegs, transforms={"image": [*CROP, function]})
        iteration = iter(made)
        with pytest.raises(error):
            list(iteration)
        assert made.state_dict()["samples"] == (10 if function is fails else 0)
        assert not [*iteration]


def test_threads_and_memory_end_with_the_loader(jpegs):
    gc.collect()
    before = threading.active_count()
    _, made = both(jpegs)
    batch = next(iter(made))  # the rest of the epoch is abandoned
    assert threading.active_count() > before
    del made
    gc.collect()
    assert threading.active_count() == before
    assert batch["image"].sum() > 0


EXIT = """
import sys, threading, time
import shardkit
from shardkit.stream import torch_loader
torch_loader._DEVICES.append("cpu")
path, device, how = sys.argv[1:]
crop = {"image": [shardkit.RandomResizedCrop(224)]}
loader = torch_loader.Loader(path, batch_size=8, transforms=crop, device=device, decode="gpu")
def load():
    while True:
        for batch in loader:
            pass
iteration = iter(loader)
next(iteration)
if how == "in a thread":
    threading.Thread(target=load, daemon=True).start()
    time.sleep(0.3)
"""


@pytest.mark.large
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("how", ["here", "in a thread"])
def test_the_interpreter_exits_without_a_word_while_batches_are_decoded(jpegs, device, how):
    command = [sys.executable, "-c", EXIT, jpegs, device, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_batches_of_an_abandoned_iteration_are_not_decoded(jpegs, decoded):
    _, made = both(jpegs, batch_size=2, prefetch=8)
    for _ in range(5):
        next(iter(made))
    assert len(decoded) < 5 * 37 / 2


def test_what_cannot_be_decoded_on_a_gpu_is_refused(jpegs, monkeypatch):
    def refused(match, **options):
        with pytest.raises(UsageError, match=re.escape(match)):
            both(jpegs, **options)

    refused("no field has images", transforms={})
    refused("'image': its transforms are not crops", transforms={"image": shardkit.Resize(20)})
    refused("its transforms are not", transforms={"image": [CROP[0], np.asarray, CROP[1]]})
    refused("draws for each sample", transforms={"image": [*CROP, lambda image, rng: image]})
    refused("collate", collate=lambda samples: {"n": np.arange(len(samples))})
    refused("cache", cache="decoded")
    monkeypatch.undo()
    for device in (None, "cpu"):
        with pytest.raises(UsageError, match='device="cuda"'):
            Loader(jpegs, batch_size=5, transforms={"image": CROP}, device=device, decode="gpu")


def test_other_fields_of_images_stay_with_the_processor_which_is_said(tmp_path):
    each = ({"image": jpeg(n), "other": jpeg(n + 1)} for n in range(6))
    path = write(tmp_path / "out", "wds", {"image": Image(), "other": Image()}, each)
    transforms = {"image": CROP, "other": [shardkit.Resize(40), shardkit.Decode()]}
    with pytest.warns(ShardkitWarning, match="leaves images to the processor: 'other'"):
        compare_all(path, transforms=transforms)


def test_a_missing_library_is_named_with_its_extra(jpegs, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(MissingLibraryError, match=re.escape("shardkit[gpu]")):
        both(jpegs)
