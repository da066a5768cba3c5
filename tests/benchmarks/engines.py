"""One conversion with processes of this machine and with Ray on the same processors.

    python tests/benchmarks/engines.py --data FOLDER [--work FOLDER] [--rounds 3] [--workers N]

FOLDER has images, which are made 256 pixels large and stored as TAR shards (`--to`, `--resize`). A
cluster of this machine is started before, with as many processors as there are workers. In turns,
`shardkit.convert` runs with `engine="local"` and with `engine="ray"`: what is measured is the call,
with its planning, and with the workers' start, which is part of both: those of Ray are new in each
round, as a new connection gets new ones. `again` is a second conversion in the same connection,
whose workers are there. Prints JSON: seconds of each round, medians, and their ratios; and whether
the bytes are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import shardkit
from shardkit import ImageOptions


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    import ray

    size = ImageOptions(resize=arguments.resize) if arguments.resize else ImageOptions()
    options: dict[str, Any] = {"image": size, "shard_size": arguments.shard_size}

    def converted(engine: str, **more: Any) -> float:
        out = work / engine
        shutil.rmtree(out, ignore_errors=True)
        began = time.perf_counter()
        shardkit.convert(arguments.data, arguments.to, out, engine=engine, **options, **more)
        return round(time.perf_counter() - began, 2)

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quiet: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False}
    seconds: dict[str, list[float]] = {"local": [], "ray": [], "again": []}
    for _ in range(arguments.rounds):
        seconds["local"].append(converted("local", workers=arguments.workers))
        began = time.perf_counter()
        ray.init(num_cpus=arguments.workers, object_store_memory=128 << 20, **quiet)
        seconds.setdefault("start", []).append(round(time.perf_counter() - began, 2))
        seconds["ray"].append(converted("ray"))
        seconds["again"].append(converted("ray"))
        ray.shutdown()
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "workers": arguments.workers,
        "seconds": seconds,
        "medians": medians,
        "ratio": round(medians["ray"] / medians["local"], 2),
        "ratio again": round(medians["again"] / medians["local"], 2),
        "same": _files(work / "local") == _files(work / "ray"),
        "load": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--to", default="wds")
    parser.add_argument("--resize", type=int, default=256)
    parser.add_argument("--shard-size", default="8MB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        print(json.dumps(measure(arguments, Path(work)), indent=1))


if __name__ == "__main__":
    main()
