"""One way to load batches for training, run in a process and an environment of its own.

    python loading_peer.py photos ffcv STORE     JPEG: decode, RandomResizedCrop(224), batches of 64
    python loading_peer.py raw    ffcv STORE     the same of pixels that are stored as they are
    python loading_peer.py tokens mmap STORE     blocks of 1,024 tokens, batches of 64, int64

All shuffle, use two workers or threads, and are measured in their second epoch. Peers that leave
decoding to the user decode and resize with OpenCV, as FFCV does: INTER_AREA. Prints
{"seconds": ..., "samples": ...}.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

BATCH, SIDE, WORKERS, BLOCK = 64, 224, 2, 1024

Epoch = Callable[[], Iterable[Any]]


def crop_of(height: int, width: int) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop: top, left, height, width."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def decoded(data: bytes) -> Any:
    import cv2
    import numpy as np
    import torch

    picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    top, left, height, width = crop_of(*picture.shape[:2])
    crop = picture[top : top + height, left : left + width]
    return torch.from_numpy(cv2.resize(crop, (SIDE, SIDE), interpolation=cv2.INTER_AREA))


def collated(samples: list[tuple[Any, int]]) -> tuple[Any, Any]:
    import torch

    return torch.stack([s[0] for s in samples]), torch.tensor([s[1] for s in samples])


def photos_shardkit(store: Path) -> Epoch:
    import shardkit
    from shardkit.torch import Loader

    transforms = {"image": shardkit.RandomResizedCrop(SIDE)}
    loader = Loader(store, batch_size=BATCH, shuffle=True, threads=WORKERS, transforms=transforms)
    return lambda: (batch["label"] for batch in loader)


def photos_ffcv(store: Path) -> Epoch:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor

    pipelines = {
        "image": [RandomResizedCropRGBImageDecoder((SIDE, SIDE)), ToTensor()],
        "label": [IntDecoder(), ToTensor()],
    }
    order = OrderOption.RANDOM
    loader = Loader(
        str(store), batch_size=BATCH, num_workers=WORKERS, order=order, pipelines=pipelines
    )
    return lambda: (batch[1] for batch in loader)


def photos_litdata(store: Path) -> Epoch:
    import litdata

    class Photos(litdata.StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return decoded(sample["jpg"]), sample["cls"]

    loader = litdata.StreamingDataLoader(
        Photos(str(store), shuffle=True), batch_size=BATCH, num_workers=WORKERS,
        collate_fn=collated, persistent_workers=True,
    )  # fmt: skip
    return lambda: (batch[1] for batch in loader)


def photos_webdataset(store: Path) -> Epoch:
    import webdataset
    from torch.utils.data import DataLoader

    shards = sorted(map(str, store.glob("*.tar")))
    data = webdataset.WebDataset(shards, shardshuffle=100).shuffle(1000)
    data = data.map(lambda sample: (decoded(sample["jpg"]), int(sample["cls"])))
    loader = DataLoader(
        data, batch_size=BATCH, num_workers=WORKERS, collate_fn=collated, persistent_workers=True
    )
    return lambda: (batch[1] for batch in loader)


def tokens_shardkit(store: Path) -> Epoch:
    from shardkit.torch import Loader

    loader = Loader(store, batch_size=BATCH, shuffle=True, fields=["tokens"])
    return lambda: (batch["tokens"][:, 0] for batch in loader)


def tokens_mmap(store: Path) -> Epoch:
    """The loop of nanoGPT and others: no order that is kept, no epoch, no keys."""
    import numpy as np
    import torch

    tokens = np.memmap(store, np.uint16, "r")

    def epoch() -> Iterable[Any]:
        for _ in range(len(tokens) // BLOCK // BATCH):
            places = torch.randint(len(tokens) - BLOCK, (BATCH,)).tolist()
            rows = [torch.from_numpy(tokens[at : at + BLOCK].astype(np.int64)) for at in places]
            yield torch.stack(rows)[:, 0]

    return epoch


def tokens_litdata(store: Path) -> Epoch:
    import litdata

    data = litdata.StreamingDataset(
        str(store), item_loader=litdata.TokensLoader(block_size=BLOCK), shuffle=True
    )
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=0)
    return lambda: (batch.long()[:, 0] for batch in loader)


def thousand_blocks(place: tuple[str, int]) -> Iterable[Any]:
    """Of a file of tokens those from a place on, as LitData stores them."""
    import numpy as np
    import torch

    path, start = place
    part = np.memmap(path, np.uint16, "r")[start : start + 1000 * BLOCK]
    yield torch.from_numpy(part.astype(np.int32)).to(torch.uint16)


def write_litdata_tokens(tokens: Path, store: Path) -> None:
    """LitData's own store of the same tokens."""
    import litdata

    places = [(str(tokens), n) for n in range(0, tokens.stat().st_size // 2, 1000 * BLOCK)]
    litdata.optimize(
        fn=thousand_blocks,
        inputs=places,
        output_dir=str(store),
        chunk_size=1000 * BLOCK,
        item_loader=litdata.TokensLoader(),
        num_workers=1,
    )


def main(what: str, name: str, store: str) -> None:
    import torch

    torch.set_num_threads(1)
    kind = "photos" if what == "raw" else what  # the same code reads pixels and JPEGs
    epoch = globals()[f"{kind}_{name}"](Path(store))
    sum(len(values) for values in epoch())
    began = time.perf_counter()
    samples = sum(len(values) for values in epoch())
    print(json.dumps({"seconds": time.perf_counter() - began, "samples": samples}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_litdata_tokens(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(*sys.argv[1:])
    os._exit(0)  # litdata leaves threads behind that would keep the process
