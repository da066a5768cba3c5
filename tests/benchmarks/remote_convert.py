"""Converting photos in a bucket, beside the local conversion and the transfer alone.

    python -m tests.benchmarks.remote_convert --data PHOTOS --work FOLDER [--rounds 5]

PHOTOS is what photos.py made. `from` reads a bucket behind link.py (50 ms a request, 100 MB/s a
connection) and writes here; `there` reads and writes S3 (moto). Whole commands with two workers.
The transfer alone is obstore's in a process of its own, with 64 threads: each photo is read and,
for `there`, the finished shards are uploaded.
Prints one JSON object; the last figures are conversion / (local conversion + transfer).
"""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import SHARDKIT, arguments, fresh, measure, script, summary, timed
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


def convert(source: object, out: str | Path, environ: dict[str, str]) -> float:
    if isinstance(out, Path):
        fresh(out)
    words = [source, "--to", "wds", "-o", out, "--workers", "2", "--quiet", "--overwrite"]
    return timed([*SHARDKIT, "convert", *words], **environ)


def main(words: list[str]) -> dict[str, Any]:
    given = arguments(__doc__, "data", "work", "rounds").parse_args(words)
    data, work = given.data.resolve(), given.work.resolve()
    if not (work / "root/bucket/photos").exists():
        shutil.copytree(data, work / "root/bucket/photos")
    local = work / "local"
    convert(data, local, {})
    with Link(work / "root") as link, S3() as s3:
        bucket, near, far = f"s3://{upload(s3, data)}", s3.environ(), link.environ()
        runs = {
            "local": partial(convert, data, local, {}),
            "from": partial(convert, "s3://bucket/photos", work / "got", far),
            "from, transfer": partial(script, TRANSFER, "s3://bucket", **far),
            "there": partial(convert, f"{bucket}/photos", f"{bucket}/out", near),
            "there, transfer": partial(script, TRANSFER, bucket, local, **near),
        }
        seconds = measure(runs, given.rounds)
    found = summary(seconds, {}, sum(path.is_file() for path in data.rglob("*")))
    median = found["median"]
    found["of_local_and_transfer"] = {
        name: round(median[name] / (median["local"] + median[f"{name}, transfer"]), 2)
        for name in ("from", "there")
    }
    return {"section": "remote", "benchmark": "convert", **found}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
