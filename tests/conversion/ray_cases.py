"""Conversions on a Ray cluster of three nodes; writes what they came to, as JSON.

A process of its own, as Ray leaves threads: `test_ray.py` starts it once, and looks at the results.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import shardkit
from shardkit import ImageOptions, ShardkitError, TextOptions
from shardkit.conversion import ray_engine
from tests.codecs import tokenizer_zoo
from tests.conftest import files_of, write_images
from tests.conversion.text_corpora import prose, write_corpus
from tests.remote.servers import S3

SMALL = {"shard_size": "20kB"}
CASES: dict[str, Callable[[], Any]] = {}

TRANSFORMS = """
import os, pathlib, signal, time

FLAGS = pathlib.Path({flags!r})

def slow(sample):
    time.sleep(0.02)
    return sample

def deadly(sample):
    if sample["__key__"] == "class1/005":
        os.kill(os.getpid(), signal.SIGKILL)
    return sample

def deadly_once(sample):
    if sample["__key__"] == "class1/005" and not (FLAGS / "died").exists():
        (FLAGS / "died").touch()
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    return sample

def leaves(sample):
    if sample["__key__"] == "class1/005":
        raise SystemExit(3)
    return sample
"""


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


class Counts:
    """A monitor that adds up progress, and does something at the first of it."""

    def __init__(self, at_first: Callable[[], Any] | None = None) -> None:
        self.done = self.samples = self.reports = self.errors = 0
        self._at_first = at_first

    def start(self, plan: Any, done: int) -> None:
        self.done = done

    def advance(self, progress: Any) -> None:
        self.samples += progress.samples
        self.errors += progress.errors
        self.reports += 1
        action, self._at_first = self._at_first, None
        if action is not None:
            action()

    def copied(self, more: int, total: int) -> None:
        pass


def interrupt() -> None:
    raise KeyboardInterrupt


def out(name: str) -> Path:
    (WORK / "out").mkdir(exist_ok=True)
    return WORK / "out" / name


def on_ray(source: Any, to: str, name: Any, **options: Any) -> Any:
    path = name if "://" in str(name) else out(name)
    return shardkit.convert(source, to, path, engine="ray", **options)


def local(source: Any, to: str, name: Any, **options: Any) -> Any:
    path = name if "://" in str(name) else out(name)
    return shardkit.convert(source, to, path, workers=0, **options)


def same(source: Any, to: str, name: str, **options: Any) -> Mapping[str, Any]:
    """What a conversion on Ray comes to, and whether its bytes are those of one process."""
    counts = Counts()
    result = on_ray(source, to, f"{name}-ray", progress=counts, **options)
    local(source, to, f"{name}-local", **options)
    ours, theirs = files_of(out(f"{name}-ray")), files_of(out(f"{name}-local"))
    return {
        "same": ours == theirs, "shards": sum(s.shards for s in result.splits.values()),
        "samples": result.samples, "seen": counts.samples, "errors": result.errors,
        "left": [p.name for p in out("").glob("*.partial")],
    }  # fmt: skip


def error_of(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        function()
    except ShardkitError as error:
        return error.to_dict()
    return {"error": None}


# --- as one machine -------------------------------------------------------------------------------


@case
def photos() -> Any:
    return same(PHOTOS, "wds", "photos", image=ImageOptions(resize=16), **SMALL)


@case
def tokens() -> Any:
    tokenizer = tokenizer_zoo.write_json(WORK / "tokenizer", "gpt2")
    corpus = write_corpus(WORK / "corpus.jsonl", prose(3000))
    text = TextOptions(tokenizer=str(tokenizer))
    return same(corpus, "megatron", "tokens", text=text, **SMALL)


@case
def tars_to_parquet() -> Any:
    return same(out("photos-ray"), "parquet", "parquet", **SMALL)


@case
def one_shard() -> Any:
    return same(PHOTOS, "beton", "joined", image=ImageOptions(resize=16))


@case
def splits_and_samples_that_are_skipped() -> Any:
    return same(
        BAD, "arrow", "skipped", split="train=0.8,val=0.2", on_error="skip",
        image=ImageOptions(resize=16), **SMALL,
    )  # fmt: skip


@case
def a_relative_path() -> Any:
    os.chdir(WORK)
    try:
        return same("photos", "wds", "relative", limit=40, **SMALL)
    finally:
        os.chdir("/")


@case
def a_sequence() -> Any:
    samples = [{"__key__": f"{n:03d}", "text": "word " * n} for n in range(300)]
    return same(samples, "arrow", "sequence", **SMALL)


@case
def inodes_of_another_machine() -> Any:
    before = ray_engine.terms_for
    ray_engine.terms_for = lambda *a: {**before(*a), "machine": "another"}  # type: ignore[assignment]
    try:
        return same(PHOTOS, "wds", "inodes", limit=40, **SMALL)
    finally:
        ray_engine.terms_for = before


@case
def a_store() -> Any:
    """Source and output are in a bucket; runs that were interrupted go on with the other engine."""
    bucket = SERVER.bucket()
    source = f"s3://{bucket}/in"
    options = {"image": ImageOptions(resize=16), **SMALL}
    local(PHOTOS, "wds", source, limit=120, **SMALL)
    earlier = []
    for name, first, second in (("a", on_ray, local), ("b", local, on_ray)):
        to = f"s3://{bucket}/{name}"
        interrupted(lambda: first(source, "wds", to, progress=Counts(interrupt), **options))  # noqa: B023
        second(source, "wds", to, progress=(counts := Counts()), **options)
        earlier.append(counts.done)
    on_ray(source, "wds", f"s3://{bucket}/c", **options)
    local(source, "wds", f"s3://{bucket}/d", **options)
    found: dict[str, dict[str, bytes]] = {}
    for key, data in SERVER.objects(bucket).items():
        top, _, rest = key.partition("/")
        found.setdefault(top, {})[rest] = data
    return {"same": [found[n] == found["d"] for n in "abc"], "all": sorted(found), "done": earlier}


# --- interrupted ----------------------------------------------------------------------------------


def interrupted(run: Callable[[], Any]) -> None:
    try:
        run()
    except KeyboardInterrupt:
        return
    raise AssertionError("it was not interrupted")


@case
def interrupted_runs() -> Any:
    options = {"image": ImageOptions(resize=16), "limit": 600, **SMALL}
    earlier = {}
    for name, first, second in (("a", on_ray, local), ("b", local, on_ray)):
        monitor = Counts(lambda: None)
        monitor.advance = until_some(out(f"{name}.partial"))  # type: ignore[method-assign]
        interrupted(lambda: first(PHOTOS, "wds", name, progress=monitor, **options))  # noqa: B023
        left = sorted(path.name for path in out(f"{name}.partial/tasks").iterdir())
        second(PHOTOS, "wds", name, progress=(counts := Counts()), **options)
        earlier[name] = {"done": counts.done, "left": [n for n in left if "." in n]}
    local(PHOTOS, "wds", "c", **options)
    return {"same": files_of(out("a")) == files_of(out("b")) == files_of(out("c")), **earlier}


def until_some(partial: Path) -> Callable[[Any], None]:
    def advance(progress: Any) -> None:
        if sum(path.name.isdigit() for path in (partial / "tasks").iterdir()) >= 2:
            raise KeyboardInterrupt

    return advance


@case
def ctrl_c() -> Any:
    """The command, with a transform that takes long; the same again completes it."""
    command = [
        sys.executable, "-m", "shardkit", "convert", str(PHOTOS), "--to", "wds",
        "-o", str(out("command")), "--shard-size", "20kB", "--transform", "slow_ones:slow",
        "--limit", "150", "--engine", "ray", "--ray-address", ADDRESS, "--ray-option", "num_cpus=1",
    ]  # fmt: skip
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=MODULES, **pipes)
    tasks = out("command.partial/tasks")
    while not any(tasks.glob("[0-9]*[0-9]")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)
    done = len([path for path in tasks.iterdir() if path.name.isdigit()])
    left = [path.name for path in tasks.iterdir() if not path.name.isdigit()]
    again = subprocess.run([*command, "--json"], cwd=MODULES, check=False, **pipes)
    local(PHOTOS, "wds", "command-local", limit=150, transform="slow_ones:slow", **SMALL)
    return {
        "code": process.returncode, "said": said, "done": done, "left": left, "again": again.stderr,
        "samples": json.loads(again.stdout)["samples"],
        "same": files_of(out("command")) == files_of(out("command-local")),
    }  # fmt: skip


# --- what dies ------------------------------------------------------------------------------------


@case
def a_node_that_dies() -> Any:
    options = {"transform": "slow_ones:slow", "limit": 300, **SMALL}
    counts = Counts(lambda: CLUSTER.remove_node(NODES.pop(), allow_graceful=False))
    on_ray(PHOTOS, "wds", "orphans", progress=counts, **options)
    local(PHOTOS, "wds", "alive", **options)
    return {"same": files_of(out("orphans")) == files_of(out("alive")), "seen": counts.samples}


@case
def a_worker_that_dies_once() -> Any:
    options = {"transform": "slow_ones:deadly_once", "image": ImageOptions(resize=16), **SMALL}
    return same(PHOTOS, "wds", "once", limit=300, **options)


@case
def a_worker_that_dies_twice() -> Any:
    run = lambda: on_ray(PHOTOS, "wds", "twice", transform="slow_ones:deadly", **SMALL)  # noqa: E731
    return error_of(run)


@case
def a_transform_that_leaves() -> Any:
    run = lambda: on_ray(PHOTOS, "wds", "leaves", transform="slow_ones:leaves", **SMALL)  # noqa: E731
    return error_of(run)


# --- errors ---------------------------------------------------------------------------------------


@case
def a_bad_sample() -> Any:
    options = {"image": ImageOptions(resize=16)}
    ours = error_of(lambda: on_ray(BAD, "wds", "bad", **options))
    return {"ours": ours, "theirs": error_of(lambda: local(BAD, "wds", "bad", **options))}


@case
def too_many_bad_samples() -> Any:
    options = {"image": ImageOptions(resize=16), "on_error": "skip", "max_errors": 1}
    return error_of(lambda: on_ray(BAD, "wds", "too-many", **options))


@case
def a_transform_that_nodes_cannot_import() -> Any:
    folder = WORK / "elsewhere"
    folder.mkdir()
    (folder / "only_here.py").write_text("def same(sample):\n    return sample\n")
    sys.path.insert(0, str(folder))
    import only_here

    run = lambda: on_ray(PHOTOS, "wds", "import", transform=only_here.same, **SMALL)  # noqa: E731
    return error_of(run)


def with_terms(**changed: Any) -> dict[str, Any]:
    """The error where a node is not as the driver says it is here."""
    before = ray_engine.terms_for
    ray_engine.terms_for = lambda *a: {**before(*a), **changed}
    try:
        return error_of(lambda: on_ray(PHOTOS, "wds", "terms", limit=40, **SMALL))
    finally:
        ray_engine.terms_for = before


@case
def a_node_that_differs() -> Any:
    photo = str(next(PHOTOS.rglob("*.jpg")))
    versions = ray_engine.versions_of
    ray_engine.versions_of = lambda work: {**versions(work), "shardkit": "0.0.1"}
    try:
        other = with_terms()
    finally:
        ray_engine.versions_of = versions
    return {
        "output": with_terms(probe="/nowhere/tasks/probe"),
        "source": with_terms(witnesses=[("/nowhere/a.jpg", 10)]),
        "size": with_terms(witnesses=[(photo, 10)]),
        "versions": other,
    }


@case
def options() -> Any:
    def given(**options: Any) -> dict[str, Any]:
        return error_of(lambda: on_ray(PHOTOS, "wds", "options", **options))

    ray_engine._PATIENCE, ray_engine._LOOK = 0.5, 0.5
    try:
        return {
            "unknown": given(ray_options={"num_gpus": 1}),
            "number": given(ray_options={"num_cpus": "many"}),
            "zero": given(ray_options={"memory": 0}),
            "room": given(ray_options={"num_cpus": 2, "special": 0.5}, **SMALL),
            "another": given(ray_address="127.0.0.1:9"),
            "special": on_ray(PHOTOS, "wds", "special", limit=40, **SMALL,
                              ray_options={"memory": "1MB", "special": 0.5}).samples,
        }  # fmt: skip
    finally:
        ray_engine._PATIENCE, ray_engine._LOOK = 600.0, 5.0


@case
def a_cluster_that_does_not_listen() -> Any:
    ray.shutdown()
    try:
        return {
            "silent": error_of(lambda: on_ray(PHOTOS, "wds", "x", ray_address="127.0.0.1:9")),
            "client": error_of(lambda: on_ray(PHOTOS, "wds", "x", ray_address="ray://here:10001")),
            "running": ray.is_initialized(),
        }
    finally:
        ray.init(ADDRESS, log_to_driver=False)


if __name__ == "__main__":
    WORK = Path(sys.argv[1])
    MODULES = WORK / "modules"
    MODULES.mkdir()
    (MODULES / "slow_ones.py").write_text(TRANSFORMS.format(flags=str(WORK)))
    sys.path.insert(0, str(MODULES))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MODULES), os.environ.get("PYTHONPATH", "")])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name, milliseconds in (("period", 500), ("timeout", 1000), ("initial_delay", 500)):
        os.environ[f"RAY_health_check_{name}_ms"] = str(milliseconds)
    PHOTOS = write_images(WORK / "photos", classes=3, each=500)
    BAD = shutil.copytree(PHOTOS / "class1", WORK / "bad" / "a")
    for broken in ("017.jpg", "123.jpg"):
        (BAD / broken).write_bytes((BAD / broken).read_bytes()[:300])
    BAD = BAD.parent
    NODE = {"num_cpus": 1, "object_store_memory": 100 << 20, "resources": {"special": 1}}
    with S3() as SERVER:
        os.environ.update(SERVER.environ())
        CLUSTER = Cluster(initialize_head=True, head_node_args=NODE)
        ADDRESS = CLUSTER.address
        NODES = [CLUSTER.head_node, CLUSTER.add_node(**NODE), CLUSTER.add_node(**NODE)]
        try:
            ray.init(ADDRESS, log_to_driver=False)
            for name in sys.argv[2:] or CASES:
                began = time.monotonic()
                try:
                    result = CASES[name]()
                except BaseException:
                    result = {"raised": traceback.format_exc()}
                line = json.dumps([name, result, round(time.monotonic() - began, 1)])
                with (WORK / "results.jsonl").open("a") as results:
                    results.write(f"{line}\n")
        finally:
            ray.shutdown()
            CLUSTER.shutdown()
