"""The loops of other libraries for `shardkit bench`: a script for an interpreter that has them.

    python peer_loops.py found                    print the peers that can run here, as JSON
    python peer_loops.py write NAME SOURCE STORE  write the peer's store from images or tokens
    python peer_loops.py run NAME STORE           do a run for each line of JSON, answer with JSON

A run is an epoch of all samples in the store. `read` passes every value to a consumer, which
hashes it; `load` makes batches for training. The script does not import shardkit, which need not
be installed in the interpreter's environment.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

# Modules in this script's folder must not shadow installed ones of the same name.
sys.path[:] = [folder for folder in sys.path if Path(folder) != Path(__file__).parent]

# Module -> package, if their names differ.
PACKAGES = {"cv2": "opencv-python-headless", "streaming": "mosaicml-streaming"}

_SUFFIXES = "jpg;jpeg;png;webp;gif;bmp;tif;tiff;ppm"
_CHUNK = 1000  # token blocks per chunk of litdata


class Setting(NamedTuple):
    """The setting of a run. The next run with the same setting reuses its loader."""

    measure: str
    workers: int
    batch_size: int = 64
    transform: str = "crop"
    size: int = 224

    def options(self, collate: Callable[[list[Any]], Any] | None = None) -> dict[str, Any]:
        """Arguments of torch's DataLoader and of similar loaders; by default for images."""
        if collate is None:
            collate = encoded if self.measure == "read" else Crops(self.crop())
        return {
            "batch_size": self.batch_size,
            "num_workers": self.workers,
            "persistent_workers": self.workers > 0,
            "collate_fn": collate,
        }

    def crop(self) -> int:
        """The width and height of the crops, in pixels."""
        if self.transform != "crop":
            raise ValueError("peers are measured only with the transform 'crop'")
        return self.size


# --- images --------------------------------------------------------------------------------------


def encoded(samples: list[dict[str, Any]]) -> list[bytes]:
    """Make a batch for `read`: the stored bytes."""
    return [sample["image"] for sample in samples]


class Crops:
    """Makes a batch for `load`: images decoded and cropped by OpenCV, and their labels."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, samples: list[dict[str, Any]]) -> tuple[Any, Any]:
        import torch

        crops = [torch.from_numpy(self._crop(sample["image"])) for sample in samples]
        return torch.stack(crops), torch.tensor([int(sample["label"]) for sample in samples])

    def _crop(self, data: bytes) -> Any:
        import numpy as np

        cv2 = opencv()
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        if pixels is None:
            raise ValueError("OpenCV cannot decode an image")
        top, left, height, width = random_crop(*pixels.shape[:2])
        crop = pixels[top : top + height, left : left + width]
        return cv2.resize(crop, (self.size, self.size), interpolation=cv2.INTER_AREA)


@functools.cache
def opencv() -> ModuleType:
    """OpenCV with one thread, as workers already run in parallel."""
    cv2 = import_module("cv2")
    cv2.setNumThreads(1)
    return cv2


def random_crop(height: int, width: int) -> tuple[int, int, int, int]:
    """A crop as in torchvision's RandomResizedCrop: top, left, height, width."""
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


class ClassFolders:
    """Image files; the name of their folder is the label."""

    def __init__(self, root: Path) -> None:
        self.items = [(str(path), int(path.parent.name)) for path in sorted(root.glob("*/*"))]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return load(self.items[index])


def load(item: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(item[0]).read_bytes(), "label": item[1]}


def data_loader(data: Any, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(data, **options)


def imagefolder(store: Path, setting: Setting) -> Any:
    return data_loader(ClassFolders(store), shuffle=True, **setting.options())


def webdataset(store: Path, setting: Setting) -> Any:
    shards = sorted(map(str, store.glob("*.tar")))
    data = import_module("webdataset").WebDataset(shards, shardshuffle=100).shuffle(1000)
    return data_loader(data.rename(image=_SUFFIXES, label="cls"), **setting.options())


def datasets(store: Path, setting: Setting) -> Any:
    data = import_module("datasets").load_from_disk(str(store))
    return data_loader(data, shuffle=True, **setting.options())


def ffcv(store: Path, setting: Setting) -> Any:
    decoders, loader = import_module("ffcv.fields.decoders"), import_module("ffcv.loader")
    tensor = import_module("ffcv.transforms").ToTensor
    crop = decoders.RandomResizedCropRGBImageDecoder((setting.crop(), setting.crop()))
    return loader.Loader(
        str(next(store.glob("*.beton"))),
        batch_size=setting.batch_size,
        num_workers=max(setting.workers, 1),
        order=loader.OrderOption.RANDOM,
        drop_last=False,
        pipelines={"image": [crop, tensor()], "label": [decoders.IntDecoder(), tensor()]},
    )


def litdata(store: Path, setting: Setting) -> Any:
    module = import_module("litdata")
    data = module.StreamingDataset(str(store), shuffle=True)
    return module.StreamingDataLoader(data, **setting.options())


def write_litdata(source: Path, store: Path) -> None:
    items, limits = ClassFolders(source).items, {"chunk_bytes": "64MB", "num_workers": 2}
    import_module("litdata").optimize(fn=load, inputs=items, output_dir=str(store), **limits)


def mosaicml() -> ModuleType:
    """The module `streaming` without its image datasets, which would import torchvision."""
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    return import_module("streaming")


def streaming(store: Path, setting: Setting) -> Any:
    module, size = mosaicml(), setting.batch_size
    data = module.StreamingDataset(local=str(store), shuffle=True, batch_size=size)
    return data_loader(data, **setting.options())


def write_streaming(source: Path, store: Path) -> None:
    columns = {"image": "bytes", "label": "int"}
    with mosaicml().MDSWriter(out=str(store), columns=columns, size_limit="64mb") as writer:
        for item in ClassFolders(source).items:
            writer.write(load(item))


# --- tokens --------------------------------------------------------------------------------------


class MappedBlocks:
    """The loop of nanoGPT: random blocks of a memory-mapped file, without workers.

    `read` yields every block once; `load` yields as many tokens, in blocks with random starts.
    """

    def __init__(self, store: Path, setting: Setting) -> None:
        import numpy as np

        self.blocks = np.load(store / "tokens.npy", mmap_mode="r")
        self.setting = setting

    def __iter__(self) -> Iterator[Any]:
        import numpy as np
        import torch

        count, length = self.blocks.shape
        if self.setting.measure == "read":
            for number in np.random.permutation(count).tolist():
                yield [self.blocks[number]]
            return
        tokens, size = self.blocks.reshape(-1), self.setting.batch_size
        for done in range(0, count, size):
            starts = torch.randint(len(tokens) - length + 1, (min(size, count - done),)).tolist()
            rows = [tokens[at : at + length].astype(np.int64) for at in starts]
            yield (torch.stack([torch.from_numpy(row) for row in rows]),)


def litdata_tokens(store: Path, setting: Setting) -> Any:
    module = import_module("litdata")
    blocks = module.TokensLoader(block_size=int((store / "block_size").read_text()))
    data = module.StreamingDataset(str(store), item_loader=blocks, shuffle=True)
    collate = arrays if setting.measure == "read" else rows_of_tokens
    return module.StreamingDataLoader(data, **setting.options(collate))


def arrays(blocks: list[Any]) -> list[Any]:
    return [block.numpy() for block in blocks]


def rows_of_tokens(blocks: list[Any]) -> tuple[Any]:
    import torch

    return (torch.stack(blocks).long(),)


def write_litdata_tokens(source: Path, store: Path) -> None:
    import numpy as np

    module, path = import_module("litdata"), source / "tokens.npy"
    count, block = np.load(path, mmap_mode="r").shape
    module.optimize(
        fn=some_tokens,
        inputs=[(str(path), at) for at in range(0, count, _CHUNK)],
        output_dir=str(store),
        chunk_size=_CHUNK * block,
        item_loader=module.TokensLoader(block_size=block),
        num_workers=1,
    )
    (store / "block_size").write_text(str(block))


def some_tokens(chunk: tuple[str, int]) -> Iterable[Any]:
    """The concatenated blocks of a chunk."""
    import numpy as np
    import torch

    path, start = chunk
    blocks = np.load(path, mmap_mode="r")[start : start + _CHUNK]
    if blocks.dtype == np.uint32:  # litdata lacks uint32; token ids fit into int32
        blocks = blocks.view(np.int32)
    yield torch.from_numpy(blocks.reshape(-1).copy())


# --- the script ----------------------------------------------------------------------------------


class Peer(NamedTuple):
    """A loop, the modules it needs (the first one gives the version), and its store's writer."""

    load: Callable[[Path, Setting], Iterable[Any]]
    needs: tuple[str, ...]
    write: Callable[[Path, Path], None] | None = None


_IMAGES = ("torch", "cv2", "xxhash")  # all peers but ffcv leave decoding to the user
PEERS = {
    "imagefolder": Peer(imagefolder, _IMAGES),
    "webdataset": Peer(webdataset, ("webdataset", *_IMAGES)),
    "datasets": Peer(datasets, ("datasets", *_IMAGES)),
    "ffcv": Peer(ffcv, ("ffcv", "torch")),
    "litdata": Peer(litdata, ("litdata", *_IMAGES), write_litdata),
    "streaming": Peer(streaming, ("streaming", *_IMAGES), write_streaming),
    "mmap": Peer(MappedBlocks, ("torch", "xxhash")),
    "litdata-tokens": Peer(litdata_tokens, ("litdata", "torch", "xxhash"), write_litdata_tokens),
}


def found() -> dict[str, dict[str, Any]]:
    """The version of each peer, or its missing packages, without importing the peers."""
    answer: dict[str, dict[str, Any]] = {}
    for name, (_, needs, _) in PEERS.items():
        missing = [module for module in needs if importlib.util.find_spec(module) is None]
        package = PACKAGES.get(needs[0], needs[0])
        if missing:
            answer[name] = {"missing": [PACKAGES.get(module, module) for module in missing]}
        else:
            answer[name] = {"version": f"{package} {metadata.version(package)}"}
    return answer


def serve(name: str, store: Path, requests: TextIO, answers: TextIO) -> None:
    """Answer requests, one per line, until there are no more."""
    loaders: dict[Setting, Iterable[Any]] = {}
    for line in requests:
        try:
            asked = json.loads(line)
            setting = Setting(**{name: asked[name] for name in Setting._fields if name in asked})
            if setting not in loaders:
                loaders[setting] = PEERS[name].load(store, setting)
            began = time.perf_counter()
            samples = consume(setting.measure, loaders[setting])
            answer: dict[str, Any] = {"seconds": time.perf_counter() - began, "samples": samples}
        except Exception as error:  # the peer's code may raise anything
            answer = {"error": last_line(error)}
            loaders.clear()  # as their state is unknown
        print(json.dumps(answer), file=answers, flush=True)


def consume(measure: str, batches: Iterable[Any]) -> int:
    """Iterate over an epoch; returns how many samples there were."""
    if measure == "load":
        return sum(len(batch[0]) for batch in batches)
    digest = import_module("xxhash").xxh3_64_intdigest
    count = 0
    for batch in batches:
        count += len(batch)
        for value in batch:
            digest(value)
    return count


def last_line(error: Exception) -> str:
    """An error as one line. The text of a worker's error contains its traceback."""
    lines = [line for line in str(error).splitlines() if any(map(str.isalnum, line))]
    kind, text = type(error).__name__, lines[-1].strip() if lines else ""
    return text if text.startswith(kind) else f"{kind}: {text}"


def main(action: str, *words: str) -> None:
    # Answers go to a copy of stdout; stdout itself is redirected to stderr, as libraries print.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer: dict[str, Any] = {}
    try:
        if action == "found":
            answer = found()
        elif action == "write":
            write = PEERS[words[0]].write
            assert write is not None
            write(Path(words[1]), Path(words[2]))
        else:
            import_module("torch").set_num_threads(1)  # as in workers
            serve(words[0], Path(words[1]), sys.stdin, answers)
            return
    except Exception as error:
        answer = {"error": last_line(error)}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:  # some peers leave threads or processes that would keep this process alive
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(0)
