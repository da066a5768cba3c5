"""One contender of a benchmark, run in a process and an environment of its own.

    python contender.py write webdataset PHOTOS STORE
    python contender.py verify xxh3       STORE
    python contender.py resize litdata    PHOTOS STORE
    python contender.py tokens datasets   CORPUS TOKENIZER OUT

`verify` is done twice, and the second time counts. `resize` makes the shorter side 256 pixels and
encodes JPEG of quality 90, in two processes. `tokens` reads `text` of JSON lines, ends documents by
the tokenizer's end, and stores the run of tokens, in one function or 1,000 documents at a time.
`chats` renders and tokenizes `messages` as transformers does, with the mask of what is learned.
Prints {"seconds": ...}, and of `tokens` and `chats` how many tokens there are.
"""

import io
import json
import multiprocessing
import os
import shutil
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

END = "<|endoftext|>"


def photos_in(folder):
    """Path and label of every photo; classes are folders."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [(os.fspath(p), n) for n, c in enumerate(classes) for p in sorted(c.glob("*.jpg"))]


def load(item):
    return {"jpg": Path(item[0]).read_bytes(), "cls": item[1]}


def write_shardkit(format, photos, store):
    import shardkit

    shardkit.convert(photos, format, store, workers=2)


def write_webdataset(photos, store):
    import webdataset

    with webdataset.ShardWriter(f"{store}/shard-%06d.tar", maxsize=256e6, verbose=0) as writer:
        for number, item in enumerate(photos_in(photos)):
            writer.write({"__key__": f"{number:08d}", **load(item)})


def write_lmdb(photos, store):
    """The loop that everybody writes: 1,000 puts a transaction."""
    import lmdb
    import msgpack

    items = photos_in(photos)
    with lmdb.open(str(store), map_size=1 << 36) as environment:
        for start in range(0, len(items), 1000):
            with environment.begin(write=True) as transaction:
                for number, item in enumerate(items[start : start + 1000], start):
                    transaction.put(b"%012d" % number, msgpack.packb(load(item)))


def write_datasets(photos, store):
    import datasets

    kinds = {"jpg": datasets.Value("binary"), "cls": datasets.Value("int64")}
    options = {"cache_dir": f"{store}/cache", "features": datasets.Features(kinds)}
    made = datasets.Dataset.from_generator(lambda: map(load, photos_in(photos)), **options)
    made.save_to_disk(f"{store}/saved")


def write_ffcv(photos, store, max_resolution=None):
    import PIL.Image
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    class Photos(list):
        def __getitem__(self, index):
            path, label = super().__getitem__(index)
            return PIL.Image.open(path).convert("RGB"), label

    image = RGBImageField(write_mode="jpg", jpeg_quality=90, max_resolution=max_resolution)
    fields = {"image": image, "label": IntField()}
    writer = DatasetWriter(f"{store}/photos.beton", fields, num_workers=2)
    writer.from_indexed_dataset(Photos(photos_in(photos)))


def shorter_256(width, height):
    scale = min(256 / min(width, height), 1)
    return round(width * scale), round(height * scale)


def by_pillow(path, filter):
    """What most scripts do, in the fewest calls."""
    import PIL.Image

    with PIL.Image.open(path) as opened:
        image = opened.convert("RGB")
    size = shorter_256(*image.size)
    if size != image.size:
        image = image.resize(size, PIL.Image.Resampling[filter])
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def write_tar_by_pillow(items, filter, tar):
    with tarfile.open(tar, "w") as out:
        for number, (path, _) in enumerate(items):
            data = by_pillow(path, filter)
            member = tarfile.TarInfo(f"{number:08d}.jpg")
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))


def resize_pillow(photos, store, filter):
    """A pool of two processes, each of which writes its own TARs: nothing goes through pipes."""
    items = photos_in(photos)
    parts = [items[at : at + 500] for at in range(0, len(items), 500)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        work = [(part, filter, f"{store}/{n}.tar") for n, part in enumerate(parts)]
        pool.starmap(write_tar_by_pillow, work, chunksize=1)


def load_resized(item):
    return {"jpg": by_pillow(item[0], "BILINEAR"), "cls": item[1]}


def resize_litdata(photos, store):
    import litdata

    options = {"chunk_bytes": "64MB", "num_workers": 2}
    items = photos_in(photos)
    litdata.optimize(fn=load_resized, inputs=items, output_dir=str(store), **options)


def resize_ffcv(photos, store):
    """FFCV bounds the longer side: 341 pixels are what most photos get from 256 on the shorter."""
    write_ffcv(photos, store, max_resolution=341)


FILES = []  # in memory before processes are forked


def codecs_alone(part):
    import simplejpeg

    from shardkit.codecs.crop import resize

    for data in FILES[part::2]:
        pixels = simplejpeg.decode_jpeg(data, "RGB", strict=False)
        size = shorter_256(pixels.shape[1], pixels.shape[0])
        if size != (pixels.shape[1], pixels.shape[0]):
            pixels = resize(pixels, *size)
        simplejpeg.encode_jpeg(pixels, quality=90, colorspace="RGB", colorsubsampling="420")


def resize_shardkit_codecs(photos, store):
    """Decode, resize, encode and forget, on both cores, with the files in memory beforehand."""
    codecs_alone(0)  # which imports
    FILES.extend(Path(path).read_bytes() for path, _ in photos_in(photos))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        began = time.perf_counter()
        pool.map(codecs_alone, range(2), chunksize=1)
        return {"seconds": time.perf_counter() - began}


def verify_shardkit(store):
    from shardkit import verify

    assert verify(store).sound


def verify_xxh3(store):
    """Read every file and hash it, as many at a time as there are cores."""
    import xxhash

    def digest(path):
        hasher = xxhash.xxh3_128()
        view = memoryview(bytearray(1 << 20))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view):
                hasher.update(view[:count])
        return hasher.hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(digest, [path for path in store.rglob("*") if path.is_file()]))


def loaded_json(corpus, out):
    import datasets

    cache = Path(f"{out}-cache")
    shutil.rmtree(cache, ignore_errors=True)  # which would have what a run before made
    return datasets.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(cache)
    )


def tokens_datasets(corpus, tokenizer, out):
    """`map(batched=True, num_proc=2)` makes tokens and blocks of 1,024 of them; then saved."""
    import datasets
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    end = encoder.token_to_id(END)

    def blocks(batch):
        encoded = encoder.encode_batch(batch["text"], add_special_tokens=False)
        run = [token for document in encoded for token in (*document.ids, end)]
        return {"tokens": [run[n : n + 1024] for n in range(0, len(run), 1024)]}

    data = loaded_json(corpus, out)
    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"))})
    options = {"remove_columns": data.column_names, "features": features}
    made = data.map(blocks, batched=True, num_proc=2, **options)
    made.save_to_disk(out)
    return {"tokens": sum(len(tokens) for batch in made.iter(1000) for tokens in batch["tokens"])}


def tokens_encode_batch(corpus, tokenizer, out):
    """tokenizers' own threads; blocks appended to a file."""
    import numpy as np
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encoder = Tokenizer.from_file(str(tokenizer))
    end, total = encoder.token_to_id(END), 0
    with corpus.open(encoding="utf-8") as lines, out.open("wb") as file:
        texts = (json.loads(line)["text"] for line in lines)
        while batch := list(islice(texts, 1000)):
            encoded = encoder.encode_batch(batch, add_special_tokens=False)
            run = np.fromiter((t for d in encoded for t in (*d.ids, end)), np.uint16)
            run.tofile(file)
            total += len(run)
    return {"tokens": total}


def chats_datasets(corpus, tokenizer, out):
    """`map(batched=True, num_proc=2)` with `apply_chat_template`; then saved."""
    import datasets
    from transformers import AutoTokenizer

    encoder = AutoTokenizer.from_pretrained(str(tokenizer))

    def encoded(batch):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        made = encoder.apply_chat_template(batch["messages"], **options)
        return {"tokens": made["input_ids"], "loss_mask": made["assistant_masks"]}

    data = loaded_json(corpus, out)
    kinds = {"tokens": datasets.Value("uint16"), "loss_mask": datasets.Value("bool")}
    features = datasets.Features({name: datasets.List(kind) for name, kind in kinds.items()})
    options = {"remove_columns": data.column_names, "features": features}
    made = data.map(encoded, batched=True, num_proc=2, **options)
    made.save_to_disk(out)
    return {"tokens": sum(len(tokens) for batch in made.iter(1000) for tokens in batch["tokens"])}


def main(action, name, *paths):
    places = [Path(path) for path in paths]
    if action == "write" and name.startswith("shardkit_"):
        work = partial(write_shardkit, name.removeprefix("shardkit_"))
    elif name.startswith("pillow_"):
        work = partial(resize_pillow, filter=name.removeprefix("pillow_").upper())
    else:
        work = globals()[f"{action}_{name}"]
    if action == "verify":
        work(*places)
    began = time.perf_counter()
    found = work(*places) or {}
    print(json.dumps({"seconds": time.perf_counter() - began, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # litdata leaves threads behind that would keep the process
