"""JPEGs decoded on a GPU: the Loader beside DALI's own reader, alone and feeding a ResNet.

    python -m tests.gpu.measure SHARDS... [--rounds 3] [--seconds 6] [--batch 256]

SHARDS are folders of TARs with the fields `image` and `label`. Images become 224 pixels by
RandomResizedCrop and flips. Prints one JSON object: images a second, the share of what a model
reaches with images that are there already, and the memory of the GPU that is left.
"""

import argparse
import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch

import shardkit
from shardkit.torch import Loader

CROPS = [shardkit.RandomResizedCrop(224), shardkit.RandomHorizontalFlip()]
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def ours(path, given, decode):
    loader = Loader(
        path, batch_size=given.batch, shuffle=True, last="drop", fields=["image", "label"],
        transforms={"image": CROPS}, device="cuda", decode=decode,
    )  # fmt: skip
    while True:
        for batch in loader:
            yield batch["image"]


def dali(path, given):
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def(batch_size=given.batch, num_threads=given.threads, device_id=0)
    def pipeline():
        image, label = fn.readers.webdataset(
            paths=[str(tar) for tar in sorted(Path(path).glob("*.tar"))], ext=["jpg", "cls"],
            random_shuffle=True, initial_fill=1024, name="reader",
        )  # fmt: skip
        image = fn.decoders.image_random_crop(
            image, device="mixed", output_type=types.RGB, hw_decoder_load=0.9
        )
        image = fn.resize(image, size=(224, 224))
        return fn.flip(image, horizontal=fn.random.coin_flip()), fn.pad(label)

    batches = DALIGenericIterator(
        [pipeline(prefetch_queue_depth=3)],
        ["image", "label"],
        reader_name="reader",
        auto_reset=True,
    )
    while True:
        for (batch,) in batches:
            yield batch["image"].permute(0, 3, 1, 2)


def there(given):
    image = torch.randint(0, 255, (given.batch, 224, 224, 3), dtype=torch.uint8, device="cuda")
    yield from itertools.repeat(image.permute(0, 3, 1, 2))


def trainer(name):
    """A function that trains a model by a batch; without a name, one that does nothing."""
    if not name:
        return lambda image: None
    import torchvision

    model = getattr(torchvision.models, name)().to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mean, std = (torch.tensor(n, device="cuda").view(1, 3, 1, 1) for n in (MEAN, STD))

    def step(image):
        labels = torch.zeros(len(image), dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            made = model((image.float() - mean) / std)
            loss = torch.nn.functional.cross_entropy(made, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def rate(batches, step, seconds):
    """Images a second, after some batches that do not count."""
    made, count, began = batches(), 0, None
    for number, image in enumerate(made):
        step(image)
        if number == 8:
            torch.cuda.synchronize()
            began = time.perf_counter()
        elif began is not None:
            count += len(image)
            if time.perf_counter() - began > seconds:
                break
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    made.close()
    return count / took


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=8, help="of DALI's own reader")
    given, report = parser.parse_args(), {"gpu": torch.cuda.get_device_name()}
    torch.backends.cudnn.benchmark = True
    for path, model in itertools.product(given.shards, ("", "resnet18", "resnet50")):
        runs = {
            "shardkit": partial(ours, path, given, "cpu"),
            "shardkit, decode=gpu": partial(ours, path, given, "gpu"),
            "dali": partial(dali, path, given),
        }
        if model:
            runs["images that are there"] = partial(there, given)
        step, found = trainer(model), {name: [] for name in runs}
        for _, (name, batches) in itertools.product(range(given.rounds), runs.items()):
            found[name].append(rate(batches, step, given.seconds))
        medians = {name: round(statistics.median(rates)) for name, rates in found.items()}
        report[f"{path} {model}".strip()] = medians
        free, total = torch.cuda.mem_get_info()
        torch.cuda.empty_cache()
        print(path, model, medians, f"{(total - free) >> 20:,} MiB in use", flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
