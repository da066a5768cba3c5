"""Converting photos in a bucket, beside the local conversion and the transfer alone.

    python -m tests.benchmarks.remote_convert --data PHOTOS --work FOLDER [--rounds 5]

PHOTOS is what photos.py made. `from` reads a bucket behind link.py (50 ms a request, 100 MB/s a
connection) and writes here; `there` reads and writes S3 (moto). Whole commands with two workers,
interleaved, each round in another order. The transfer alone is obstore's in a process of its own,
with 64 threads: each photo is read and, for `there`, the finished shards are uploaded.
Prints one JSON object; the last figures are conversion / (local conversion + transfer).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Run, measure, summary
from tests.benchmarks.link import Link
from tests.remote.servers import S3

TRANSFER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import obstore
from obstore.store import from_url
store = from_url(sys.argv[1], client_options={"allow_http": True})
began = time.perf_counter()
keys = [found["path"] for batch in obstore.list(store, "photos/") for found in batch]
assert keys
with ThreadPoolExecutor(64) as pool:
    assert all(pool.map(lambda key: len(obstore.get(store, key).bytes()), keys))
    shards = sorted(Path(sys.argv[2]).glob("*.tar")) if len(sys.argv) > 2 else []
    list(pool.map(lambda path: obstore.put(store, "alone/" + path.name, path.read_bytes()), shards))
print(time.perf_counter() - began)
"""


def upload(server: S3, data: Path) -> str:
    """All photos below `photos/` of a new bucket."""
    import obstore

    bucket = server.bucket()
    store = server.open(bucket)
    paths = [path for path in data.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(16) as pool:
        names = [f"photos/{path.relative_to(data).as_posix()}" for path in paths]
        list(pool.map(lambda name, path: obstore.put(store, name, path), names, paths))
    return bucket


def convert(source: str, out: str, environ: dict[str, str]) -> float:
    words = [source, "--to", "wds", "-o", out, "--workers", "2", "--quiet", "--overwrite"]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "shardkit", "convert", *words], check=True, env=os.environ | environ
    )
    return time.perf_counter() - began


def transfer(environ: dict[str, str], *words: str) -> float:
    command = [sys.executable, "-c", TRANSFER, *words]
    found = subprocess.run(command, check=True, capture_output=True, env=os.environ | environ)
    return float(found.stdout)


def fresh(out: Path, run: Callable[[], float]) -> Run:
    def measured() -> float:
        shutil.rmtree(out, ignore_errors=True)
        return run()

    return measured


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    data, work = options.data.resolve(), options.work.resolve()
    (work / "root/bucket").mkdir(parents=True, exist_ok=True)
    linked = work / "root/bucket/photos"
    if not linked.exists():
        shutil.copytree(data, linked)
    local, got = work / "local", work / "got"
    convert(str(data), str(local), {})
    with Link(work / "root") as link, S3() as s3:
        bucket = upload(s3, data)
        near, far = s3.environ(), link.environ()
        runs: dict[str, Run] = {
            "local": fresh(local, lambda: convert(str(data), str(local), {})),
            "from": fresh(got, lambda: convert("s3://bucket/photos", str(got), far)),
            "from, transfer": lambda: transfer(far, "s3://bucket"),
            "there": lambda: convert(f"s3://{bucket}/photos", f"s3://{bucket}/out", near),
            "there, transfer": lambda: transfer(near, f"s3://{bucket}", str(local)),
        }
        seconds = measure(runs, options.rounds)
    samples = sum(path.is_file() for path in data.rglob("*"))
    found = summary(seconds, {}, samples)
    median = found["median"]
    found["of_local_and_transfer"] = {
        name: round(median[name] / (median["local"] + median[f"{name}, transfer"]), 2)
        for name in ("from", "there")
    }
    return {"section": "remote", "benchmark": "convert", **found}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
