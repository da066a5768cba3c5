"""Epochs by one library, in a process and an environment of its own.

    python loops.py NAME '{"url": ..., "urls": [...], "decode": false, ...}'
    python loops.py write NAME PHOTOS STORE

Waits for a line on stdin before each epoch, and prints a line of JSON after it: seconds from the
start of the loop to its first batch and to its end, and samples. Ends with stdin. What is opened or
imported before the first epoch is not measured. `url` is a bucket, or a folder of this machine, and
`urls` are the TARs in it.

With `decode` each image is decoded and cropped to 224 pixels, in batches of 64. Without it a batch
is the encoded bytes, of which other libraries' workers pass on the lengths alone, so that no bytes
go through pipes. shardkit, FFCV and DALI also take the size of a `batch`, and `flip`, which mirrors
half of the images. This script imports nothing of shardkit but for shardkit's own runs.
"""

import functools
import json
import math
import os
import random
import resource
import sys
import tarfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType

BATCH = 64


def cropped(samples):
    """A batch: images decoded and cropped by OpenCV, and their labels."""
    import torch

    crops = [torch.from_numpy(crop(sample["image"])) for sample in samples]
    return torch.stack(crops), torch.tensor([int(sample["label"]) for sample in samples])


def crop(data, size=224):
    import numpy as np

    cv2 = opencv()
    data = data["bytes"] if isinstance(data, dict) else data  # of `datasets`
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    top, left, height, width = random_crop(*pixels.shape[:2])
    part = pixels[top : top + height, left : left + width]
    return cv2.resize(part, (size, size), interpolation=cv2.INTER_AREA)


@functools.cache
def opencv():
    """With one thread, as workers already run in parallel."""
    cv2 = import_module("cv2")
    cv2.setNumThreads(1)
    return cv2


def random_crop(height, width):
    """A crop as in torchvision's RandomResizedCrop: top, left, height, width."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def lengths(samples):
    return [len(sample["image"]) for sample in samples], None


def options(asked):
    """What torch's DataLoader and those like it are given."""
    return {
        "batch_size": BATCH,
        "num_workers": asked["workers"],
        "persistent_workers": asked["workers"] > 0,
        "collate_fn": cropped if asked["decode"] else lengths,
    }


def counted(batches):
    """An epoch: the samples of each batch."""
    return lambda: (len(batch[0]) for batch in batches)


def torch_loader(data, asked, **more):
    from torch.utils.data import DataLoader

    return counted(DataLoader(data, **options(asked), **more))


class ClassFolders:
    """Image files; their folders are the labels."""

    def __init__(self, root):
        folders = sorted(path for path in Path(root).iterdir() if path.is_dir())
        self.items = [(str(p), n) for n, f in enumerate(folders) for p in sorted(f.glob("*.*"))]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return load(self.items[index])


def load(item):
    return {"image": Path(item[0]).read_bytes(), "label": item[1]}


def imagefolder(asked):
    return torch_loader(ClassFolders(asked["url"]), asked, shuffle=True)


def datasets(asked):
    library = import_module("datasets")
    data = library.load_from_disk(asked["url"])
    return torch_loader(data.cast_column("image", library.Image(decode=False)), asked, shuffle=True)


def ffcv(asked):
    decoders, library = import_module("ffcv.fields.decoders"), import_module("ffcv.loader")
    transforms = import_module("ffcv.transforms")
    tensor, steps = transforms.ToTensor, [decoders.RandomResizedCropRGBImageDecoder((224, 224))]
    steps += [transforms.RandomHorizontalFlip()] if asked.get("flip") else []
    loader = library.Loader(
        str(next(Path(asked["url"]).glob("*.beton"))), batch_size=asked.get("batch", BATCH),
        num_workers=asked["workers"], order=library.OrderOption.RANDOM, drop_last=False,
        pipelines={"image": [*steps, tensor()], "label": [decoders.IntDecoder(), tensor()]},
    )  # fmt: skip
    return counted(loader)


def shardkit(asked):
    from shardkit import RandomHorizontalFlip, RandomResizedCrop
    from shardkit.stream.loader import Loader

    steps = [RandomResizedCrop(asked.get("crop", 224))]
    steps += [RandomHorizontalFlip()] if asked.get("flip") else []
    loader = Loader(
        asked["url"], batch_size=asked.get("batch", BATCH), shuffle=True, last="short",
        cache=asked.get("cache"), cache_limit=asked.get("limit"), parts=asked.get("parts", 1),
        rank=asked.get("rank"), world_size=asked.get("world"), check_ranks=False,
        threads=asked.get("threads"), fields=asked.get("fields"),
        transforms={"image": steps} if asked["decode"] else None,
    )  # fmt: skip
    return lambda: (len(batch["valid"]) for batch in loader)


def at_random(data):
    """Single images, all in an order of their own."""
    order = random.Random(1).sample(range(len(data)), len(data))

    def epoch():
        yield sum(len(data[number]["image"]) > 0 for number in order)

    return epoch


def shardkit_at_random(asked):
    return at_random(import_module("shardkit").open(asked["url"]))


def decode_jpeg(asked):
    """No loader: JPEGs in memory are decoded, and forgotten."""
    decode, images = import_module("simplejpeg").decode_jpeg, []
    for url in asked["urls"]:
        with tarfile.open(url) as tar:
            images += [tar.extractfile(m).read() for m in tar if m.name.endswith(".jpg")]

    def epoch():
        for image in images:
            decode(image)
        yield len(images)

    return epoch


def shardkit_through_dali(asked):
    """With decode="gpu", whose pipeline runs on the processor."""
    from shardkit import RandomHorizontalFlip, RandomResizedCrop
    from shardkit.stream import torch_loader

    torch_loader._DEVICES.append("cpu")
    loader = torch_loader.Loader(
        asked["url"], batch_size=asked["batch"], shuffle=True, last="short", device="cpu",
        decode="gpu", threads=asked["threads"], fields=["image", "label"],
        transforms={"image": [RandomResizedCrop(224), RandomHorizontalFlip()]},
    )  # fmt: skip
    return lambda: (len(batch["valid"]) for batch in loader)


def dali(asked):
    """Without a GPU, by its reader of TARs; batches stay DALI's own."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=asked["batch"], num_threads=asked["threads"], device_id=None)
    def pipeline():
        options = {"random_shuffle": True, "initial_fill": 1024, "name": "reader"}
        image, label = fn.readers.webdataset(paths=asked["urls"], ext=["jpg", "cls"], **options)
        image = fn.decoders.image_random_crop(image, device="cpu", output_type=types.RGB)
        image = fn.resize(image, size=(224, 224))
        return fn.flip(image, horizontal=fn.random.coin_flip()), fn.pad(label)

    made = pipeline(prefetch_queue_depth=3)
    made.build()
    batches = -(-made.reader_meta("reader")["epoch_size"] // asked["batch"])
    return lambda: (len(made.run()[0]) for _ in range(batches))


def webdataset(asked):
    import webdataset as wds

    urls = [f"pipe:curl -sf {url}" if "://" in url else url for url in asked["urls"]]
    data = wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=wds.split_by_node)
    data = data.shuffle(1000).rename(image="jpg", label="cls")
    return counted(wds.WebLoader(data, **options(asked)))


def litdata(asked):
    import litdata as library

    if "://" not in asked["url"]:
        data = library.StreamingDataset(asked["url"], shuffle=True)
        return counted(library.StreamingDataLoader(data, **options(asked)))
    from litdata.streaming import downloader
    from litdata.streaming.resolver import Dir

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # which has no option of its own

    keys = ("aws_access_key_id", "aws_secret_access_key")
    storage = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
    data = library.StreamingDataset(
        Dir(path=asked["cache"], url=asked["url"]), shuffle=True,
        storage_options={**storage, **{key: os.environ[key.upper()] for key in keys}},
        max_cache_size=asked.get("limit") or "100GB",
    )  # fmt: skip
    return counted(library.StreamingDataLoader(data, **options(asked)))


def litdata_at_random(asked):
    return at_random(import_module("litdata").StreamingDataset(asked["url"]))


def write_litdata(photos, store):
    items, limits = ClassFolders(photos).items, {"chunk_bytes": "64MB", "num_workers": 2}
    import_module("litdata").optimize(fn=load, inputs=items, output_dir=str(store), **limits)


def mosaicml():
    """The module `streaming` without its image datasets, which would import torchvision."""
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    return import_module("streaming")


def streaming(asked):
    library, remote = mosaicml(), "://" in asked["url"]
    library.base.util.clean_stale_shared_memory()  # of a run before, which was killed
    places = {"remote": asked["url"], "local": asked.get("cache")}
    data = library.StreamingDataset(
        **(places if remote else {"local": asked["url"]}), shuffle=True, batch_size=BATCH,
        cache_limit=asked.get("limit"),
    )  # fmt: skip
    return torch_loader(data, asked)


def write_streaming(photos, store):
    columns = {"image": "bytes", "label": "int"}
    with mosaicml().MDSWriter(out=str(store), columns=columns, size_limit="64mb") as writer:
        for item in ClassFolders(photos).items:
            writer.write(load(item))


def link(asked):
    """No library: the ranges of all shards, so many bytes a request, by threads with obstore."""
    import obstore
    from obstore.store import from_url

    bucket, _, folder = asked["url"].removeprefix("s3://").partition("/")
    store = from_url(f"s3://{bucket}", client_options={"allow_http": True})
    names = [f"{folder}/{url.rpartition('/')[2]}".lstrip("/") for url in asked["urls"]]
    ranges = []
    for name in names:
        size, step = obstore.head(store, name)["size"], asked["bytes"]
        ranges += [(name, at, min(at + step, size)) for at in range(0, size, step)]

    def epoch():
        def read(wanted):
            name, start, stop = wanted
            found = obstore.get_range(store, name, start=start, end=stop)
            assert len(found) == stop - start
            return stop - start

        with ThreadPoolExecutor(asked["workers"]) as pool:
            yield from pool.map(read, ranges)

    return epoch


CONTENDERS = {
    "shardkit": shardkit, "webdataset": webdataset, "litdata": litdata, "streaming": streaming,
    "link": link, "imagefolder": imagefolder, "datasets": datasets, "ffcv": ffcv, "dali": dali,
    "shardkit through dali": shardkit_through_dali,
    "shardkit at random": shardkit_at_random, "litdata at random": litdata_at_random,
    "decode_jpeg": decode_jpeg,
}  # fmt: skip


def processor():
    """Seconds of the processor, of this process and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(name, text, *places):
    if name == "write":
        {"litdata": write_litdata, "streaming": write_streaming}[text](*places)
        return
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")  # libraries print to stdout
    os.dup2(2, 1)
    epoch = CONTENDERS[name](json.loads(text))
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        busy, began, first, samples = processor(), time.perf_counter(), 0.0, 0
        for count in epoch():
            first = first or time.perf_counter() - began
            samples += count
        found = {
            "seconds": time.perf_counter() - began, "first": first, "samples": samples,
            "cpu": processor() - busy,
        }  # fmt: skip
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # some leave threads or processes that would keep this one
