"""The first epoch over photos on a web server far away: shardkit's Loader beside webdataset.

    python -m tests.benchmarks.remote_epoch --data PHOTOS [--photos 2000] [--rounds 5]

A proxy before nginx adds 50 ms to each request and lets each connection have 100 MB/s. Whole
processes, interleaved: from the start of the loop to its end, undecoded samples in shuffled order,
nothing cached. Prints medians, the bytes that the server sent, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import shardkit
from tests.remote.proxy import Proxy, Rule
from tests.remote.servers import Nginx

LATENCY, RATE = 0.05, 100e6

SHARDKIT = """
import sys, time, json
from shardkit.stream.loader import Loader
loader = Loader(sys.argv[1], batch_size=64, shuffle=True, last="short")
begin, first, count = time.perf_counter(), None, 0
for batch in loader:
    first = first or time.perf_counter() - begin
    count += len(batch["__key__"])
print(json.dumps([time.perf_counter() - begin, first, count]))
"""
WEBDATASET = """
import sys, time, json
import webdataset
urls = json.loads(sys.argv[2])
data = webdataset.WebDataset([f"pipe:curl -sf {url}" for url in urls], shardshuffle=len(urls))
loader = data.shuffle(1000).to_tuple("__key__", "jpg")
begin, first, count = time.perf_counter(), None, 0
for batch in loader:
    first = first or time.perf_counter() - begin
    count += 1
print(json.dumps([time.perf_counter() - begin, first, count]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder with JPEG photos")
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    photos = [
        path.read_bytes()
        for path in sorted(options.data.rglob("*"))
        if path.suffix.lower() in (".jpg", ".jpeg")
    ]
    with tempfile.TemporaryDirectory() as work:
        root = Path(work) / "root"
        with shardkit.create(root, "wds", {"jpg": shardkit.Image()}, shard_size="32MB") as out:
            for n in range(options.photos):
                out.write({"__key__": f"{n:07d}", "jpg": photos[n % len(photos)]})
        with Nginx(root, Path(tempfile.mkdtemp(dir=work))) as web, Proxy(web.endpoint) as proxy:
            measure(proxy, root, options.photos, options.rounds)


def measure(proxy: Proxy, root: Path, photos: int, rounds: int) -> None:
    names = sorted(path.name for path in root.glob("*.tar"))
    size = sum((root / name).stat().st_size for name in names)
    urls = json.dumps([f"{proxy.endpoint}/{name}" for name in names])
    found: dict[str, list[list[float]]] = {"shardkit": [], "webdataset": []}
    for number in range(rounds):
        codes = [("shardkit", SHARDKIT), ("webdataset", WEBDATASET)]
        for name, code in codes if number % 2 else codes[::-1]:
            proxy.clear()
            proxy.add(Rule(latency=LATENCY, rate=RATE))
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code, proxy.endpoint, urls],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            seconds, first, count = json.loads(done.stdout)
            assert count == photos, (name, count)
            found[name].append([seconds, first, proxy.count("GET").sent / size])
    print(f"{photos:,} photos, {size / 1e6:.0f} MB in {len(names)} shards")
    medians = {}
    for name, runs in found.items():
        seconds, first, share = (statistics.median(column) for column in zip(*runs, strict=True))
        medians[name] = seconds
        rate = size / 1e6 / seconds
        print(
            f"{name:10} {seconds:.2f} s, {rate:.0f} MB/s, first batch after {first:.2f} s,"
            f" {share:.3f} of the bytes"
        )
    print(f"shardkit is {medians['webdataset'] / medians['shardkit']:.1f} times as fast")


if __name__ == "__main__":
    main()
