"""Epochs over a dataset behind a link, by one library, in a process and an environment of its own.

    python remote_contender.py NAME '{"url": ..., "urls": [...], "decode": false, ...}'

Waits for a line on stdin before each epoch, and prints a line of JSON after it: seconds from the
start of the loop to its first batch and to its end, and samples. Ends with stdin. What is opened or
imported before the first epoch is not measured.

With `decode` each image is decoded and cropped to 224 pixels, in batches of 64. Without it a batch
is the encoded bytes, of which other libraries' workers pass on the lengths alone, so that no bytes
go through pipes. This script imports nothing of shardkit but for shardkit's own runs.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PEER_LOOPS = Path(__file__).parents[2] / "shardkit/performance/peer_loops.py"
BATCH = 64


def loops():
    """The script with the loops of `shardkit bench`, whose crops and imports are used here."""
    sys.path.append(str(PEER_LOOPS.parent))
    return importlib.import_module("peer_loops")


def lengths(samples):
    return [len(sample["image"]) for sample in samples], None


def collate(asked):
    return loops().Crops(224) if asked["decode"] else lengths


def counted(batches):
    """An epoch: the samples of each batch."""
    return lambda: (len(batch[0]) for batch in batches)


def shardkit(asked):
    from shardkit import RandomResizedCrop
    from shardkit.stream.loader import Loader

    loader = Loader(
        asked["url"], batch_size=BATCH, shuffle=True, last="short", cache=asked.get("cache"),
        cache_limit=asked.get("limit"), parts=asked.get("parts", 1), rank=asked.get("rank"),
        world_size=asked.get("world"), check_ranks=False,
        transforms={"image": RandomResizedCrop(224)} if asked["decode"] else None,
    )  # fmt: skip
    return lambda: (len(batch["__key__"]) for batch in loader)


def webdataset(asked):
    import webdataset as wds

    urls = [f"pipe:curl -sf {url}" for url in asked["urls"]]
    data = wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=wds.split_by_node)
    data = data.shuffle(1000).rename(image="jpg", label="cls")
    loader = wds.WebLoader(
        data, batch_size=BATCH, num_workers=asked["workers"], collate_fn=collate(asked)
    )
    return counted(loader)


def litdata(asked):
    import litdata as library
    from litdata.streaming import downloader
    from litdata.streaming.resolver import Dir

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # which has no option of its own

    keys = ("aws_access_key_id", "aws_secret_access_key")
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
    data = library.StreamingDataset(
        Dir(path=asked["cache"], url=asked["url"]), shuffle=True,
        storage_options={**options, **{key: os.environ[key.upper()] for key in keys}},
        max_cache_size=asked.get("limit") or "100GB",
    )  # fmt: skip
    loader = library.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=asked["workers"], collate_fn=collate(asked)
    )
    return counted(loader)


def streaming(asked):
    library = loops().mosaicml()
    library.base.util.clean_stale_shared_memory()  # of a run before, which was killed
    data = library.StreamingDataset(
        remote=asked["url"], local=asked["cache"], shuffle=True, batch_size=BATCH,
        cache_limit=asked.get("limit"),
    )  # fmt: skip
    from torch.utils.data import DataLoader

    loader = DataLoader(
        data, batch_size=BATCH, num_workers=asked["workers"], collate_fn=collate(asked),
        persistent_workers=asked["workers"] > 0,
    )  # fmt: skip
    return counted(loader)


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
    "link": link,
}  # fmt: skip


def processor():
    """Seconds of the processor, of this process and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(name, text):
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
