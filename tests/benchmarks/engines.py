"""One conversion with processes of this machine and with Ray on the same processors.

    python tests/benchmarks/engines.py --data FOLDER --work FOLDER [--rounds 3] [--workers N]

FOLDER has images, which are made 256 pixels large and stored as TAR shards. In turns,
`shardkit.convert` runs with `engine="local"` and with `engine="ray"`, on a cluster of this machine
that was started before, with as many processors as there are workers. What is measured is the call,
with its planning and with the workers' start: those of Ray are new in each round, as a new
connection gets new ones. `again` is a second conversion in the same connection, whose workers are
there. Prints JSON; `same` tells whether the bytes are.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # where `tests` is: this may run as a file

import shardkit
from tests.benchmarks.harness import arguments, files_of, fresh, measure, seconds_of, summary


def main(words: list[str]) -> dict[str, Any]:
    import ray

    parser = arguments(__doc__, "data", "work", "rounds", rounds=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args(words)
    seconds: dict[str, list[float]] = {"again": []}

    def converted(engine: str, **more: Any) -> float:
        out = fresh(given.work / engine)
        options: dict[str, Any] = {"image": shardkit.ImageOptions(resize=256), "shard_size": "8MB"}
        return seconds_of(
            lambda: shardkit.convert(given.data, "wds", out, engine=engine, **options, **more)
        )

    def by_ray() -> float:
        quiet: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False}
        ray.init(num_cpus=given.workers, object_store_memory=128 << 20, **quiet)
        first = converted("ray")
        seconds["again"].append(converted("ray"))
        ray.shutdown()
        return first

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    runs = {"local": lambda: converted("local", workers=given.workers), "ray": by_ray}
    seconds |= measure(runs, given.rounds)
    made = files_of(given.work / "local")
    samples = len(shardkit.open(given.work / "local"))
    found = summary(seconds, {"ray": "local", "again": "local"}, samples)
    return {"workers": given.workers, **found, "same": made == files_of(given.work / "ray")}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=1))
