"""Conversions on a Ray cluster of two nodes; writes what they came to, as JSON.

A process of its own, as Ray leaves threads: `test_ray.py` starts it once, and looks at the results.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import shardkit
from shardkit import ImageOptions, ShardkitError, TextOptions
from shardkit.conversion import ray_engine
from tests.codecs import tokenizer_zoo
from tests.conftest import files_of, write_images
from tests.conversion.part_kills import wait_for
from tests.conversion.text_corpora import prose, write_corpus
from tests.remote.servers import S3

SMALL = {"shard_size": "8kB"}
RESIZED: dict[str, Any] = {"image": ImageOptions(resize=16), **SMALL}
CASES: dict[str, Callable[[], Any]] = {}

# They do something on nodes alone: planning tries them where the run was started.
TRANSFORMS = """
import os, pathlib, signal, sys, time
from shardkit.conversion import work

FLAGS = pathlib.Path({flags!r})
ON_NODE = "default_worker" in sys.argv[0]
work._REPORT_SECONDS = 0  # each sample is reported

def comes(sample):
    return ON_NODE and sample["__key__"] == "class1/005"

def held(sample):
    while ON_NODE and sample["__key__"] >= "class1" and not (FLAGS / "go").exists():
        time.sleep(0.01)
    return sample

def deadly(sample):
    if comes(sample):
        os.kill(os.getpid(), signal.SIGKILL)
    return sample

def deadly_once(sample):
    if comes(sample) and not (FLAGS / "died").exists():
        (FLAGS / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sample

def leaves(sample):
    if comes(sample):
        raise SystemExit(3)
    return sample
"""


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


class Counts:
    """A monitor that adds up progress, and does something at the first of it."""

    def __init__(self, at_first: Callable[[], Any] = lambda: None) -> None:
        self.done = self.samples = self._reports = 0
        self._at_first = at_first

    def start(self, plan: Any, done: int) -> None:
        self.done = done

    def advance(self, progress: Any) -> None:
        self.samples += progress.samples
        self._reports += 1
        if self._reports == 1:
            self._at_first()

    def copied(self, more: int, total: int) -> None:
        pass


def out(name: Any) -> Any:
    return name if "://" in str(name) else WORK / "out" / name


def on_ray(source: Any, to: str, name: Any, **options: Any) -> Any:
    return shardkit.convert(source, to, out(name), engine="ray", **options)


def local(source: Any, to: str, name: Any, **options: Any) -> Any:
    return shardkit.convert(source, to, out(name), workers=0, **options)


def same(source: Any, to: str, name: str, **options: Any) -> dict[str, Any]:
    """What a conversion on Ray comes to, and whether its bytes are those of one process."""
    counts = Counts()
    result = on_ray(source, to, f"{name}-ray", progress=counts, **options)
    local(source, to, f"{name}-local", **options)
    return {
        "same": files_of(out(f"{name}-ray")) == files_of(out(f"{name}-local")),
        "samples": result.samples, "seen": counts.samples, "errors": result.errors,
        "left": [path.name for path in out("").glob("*.partial")],
    }  # fmt: skip


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
    try:
        function(*args, **options)
    except ShardkitError as error:
        return error.to_dict()
    return {"error": None}


@contextlib.contextmanager
def set_to(**values: Any) -> Iterator[None]:
    """Names of `ray_engine` that mean something else meanwhile."""
    before = {name: getattr(ray_engine, name) for name in values}
    try:
        vars(ray_engine).update(values)
        yield
    finally:
        vars(ray_engine).update(before)


def terms(**changed: Any) -> Any:
    """Set the terms that a node has to fulfil to what differs from what it finds."""
    before = ray_engine.terms_for
    return set_to(terms_for=lambda *args: {**before(*args), **changed})


# --- as one machine -------------------------------------------------------------------------------


@case
def tokens() -> Any:
    tokenizer = tokenizer_zoo.write_json(WORK / "tokenizer", "gpt2")
    corpus = write_corpus(WORK / "corpus.jsonl", prose(200))
    return same(corpus, "megatron", "tokens", text=TextOptions(tokenizer=str(tokenizer)), **SMALL)


@case
def one_shard() -> Any:
    return same(PHOTOS, "beton", "joined", image=ImageOptions(resize=16))


@case
def splits_and_samples_that_are_skipped() -> Any:
    """Of a relative path."""
    os.chdir(WORK)
    try:
        return same("bad", "arrow", "bad", split="train=0.8,val=0.2", on_error="skip", **RESIZED)
    finally:
        os.chdir("/")


@case
def shards() -> Any:
    return same(out("bad-local/train"), "parquet", "parquet", **SMALL)


@case
def a_sequence() -> Any:
    samples = [{"__key__": f"{n:03d}", "text": "word " * n} for n in range(100)]
    return same(samples, "arrow", "sequence", **SMALL)


@case
def inodes_of_another_machine() -> Any:
    with terms(machine="another"):
        return same(PHOTOS, "wds", "inodes", limit=40, **SMALL)


def continued(source: Any, to: Any, first: Any, second: Any) -> int:
    """A run that was interrupted goes on with the other engine; so many samples were done."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        first(source, "wds", to, progress=Counts(interrupt), **RESIZED)
        raise AssertionError("it was not interrupted")
    second(source, "wds", to, progress=(counts := Counts()), **RESIZED)
    return counts.done


@case
def a_store() -> Any:
    """Source and output are in a bucket."""
    bucket = SERVER.bucket()
    source = f"s3://{bucket}/in"
    local(PHOTOS, "wds", source, limit=30, **SMALL)
    continued(source, f"s3://{bucket}/a", local, on_ray)
    on_ray(source, "wds", f"s3://{bucket}/b", **RESIZED)
    local(source, "wds", f"s3://{bucket}/c", **RESIZED)
    found: dict[str, dict[str, bytes]] = {}
    for key, data in SERVER.objects(bucket).items():
        top, _, rest = key.partition("/")
        found.setdefault(top, {})[rest] = data
    return {"same": [found[n] == found["c"] for n in "ab"], "all": sorted(found)}


@case
def interrupted_runs() -> Any:
    continued(PHOTOS, "a", on_ray, local)
    continued(PHOTOS, "b", local, on_ray)
    local(PHOTOS, "wds", "c", **RESIZED)
    return {"same": files_of(out("a")) == files_of(out("b")) == files_of(out("c"))}


@case
def ctrl_c() -> Any:
    """The command, while tasks are held; the same again completes it."""
    command = [
        sys.executable, "-m", "shardkit", "convert", str(PHOTOS), "--to", "wds",
        "-o", str(out("command")), "--shard-size", "8kB", "--transform", "steps:held",
        "--engine", "ray", "--ray-address", ADDRESS, "--ray-option", "num_cpus=1",
    ]  # fmt: skip
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=MODULES, **pipes)
    tasks = out("command.partial/tasks")
    wait_for(lambda: any(tasks.glob("[0-9]*[0-9]")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)
    left = [path.name for path in tasks.iterdir() if not path.name.isdigit()]
    GO.touch()
    again = subprocess.run([*command, "--json"], cwd=MODULES, check=False, **pipes)
    local(PHOTOS, "wds", "command-local", transform="steps:held", **SMALL)
    GO.unlink()
    return {
        "code": process.returncode, "said": said, "left": left, "again": again.stderr,
        "samples": json.loads(again.stdout)["samples"],
        "same": files_of(out("command")) == files_of(out("command-local")),
    }  # fmt: skip


# --- what dies, and errors ------------------------------------------------------------------------


@case
def a_worker_that_dies_once() -> Any:
    return same(PHOTOS, "wds", "once", transform="steps:deadly_once", **RESIZED)


@case
def workers_that_die_twice() -> Any:
    return [
        error_of(on_ray, PHOTOS, "wds", name, transform=f"steps:{name}", **SMALL)
        for name in ("deadly", "leaves")
    ]


@case
def bad_samples() -> Any:
    return [
        error_of(on_ray, BAD, "wds", "x", **RESIZED),
        error_of(local, BAD, "wds", "x", **RESIZED),
        error_of(on_ray, BAD, "wds", "y", on_error="skip", max_errors=1, **RESIZED),
    ]


@case
def a_transform_that_nodes_cannot_import() -> Any:
    folder = WORK / "elsewhere"
    folder.mkdir()
    (folder / "only_here.py").write_text("def same(sample):\n    return sample\n")
    sys.path.insert(0, str(folder))
    import only_here

    return error_of(on_ray, PHOTOS, "wds", "import", transform=only_here.same, **SMALL)


@case
def a_node_that_differs() -> Any:
    photo = str(next(PHOTOS.rglob("*.jpg")))
    versions = ray_engine.versions_of
    differing = {
        "output": terms(probe="/nowhere/tasks/probe"),
        "source": terms(witnesses=[("/nowhere/a.jpg", 10)]),
        "size": terms(witnesses=[(photo, 10)]),
        "versions": set_to(versions_of=lambda work: {**versions(work), "shardkit": "0.0.1"}),
    }
    found = {}
    for name, differs in differing.items():
        with differs:
            found[name] = error_of(on_ray, PHOTOS, "wds", "terms", limit=40, **SMALL)
    return found


@case
def options() -> Any:
    def given(**options: Any) -> dict[str, Any]:
        return error_of(on_ray, PHOTOS, "wds", "options", **options)

    with set_to(_PATIENCE=0.5, _LOOK=0.5):
        found = {
            "unknown": given(ray_options={"num_gpus": 1}),
            "number": given(ray_options={"num_cpus": "many"}),
            "zero": given(ray_options={"memory": 0}),
            "room": given(ray_options={"num_cpus": 2, "special": 0.5}, **SMALL),
            "another": given(ray_address="127.0.0.1:9"),
        }
    asked = {"memory": "1MB", "special": 0.5}
    found["special"] = on_ray(PHOTOS, "wds", "special", limit=9, ray_options=asked, **SMALL).samples
    return found


@case
def a_node_that_dies() -> Any:
    """At the first report of progress, while tasks are held."""

    def die() -> None:
        CLUSTER.remove_node(NODE, allow_graceful=False)
        GO.touch()

    options = {"transform": "steps:held", **SMALL}
    on_ray(PHOTOS, "wds", "orphans", progress=(counts := Counts(die)), **options)
    local(PHOTOS, "wds", "alive", **options)
    return {"same": files_of(out("orphans")) == files_of(out("alive")), "seen": counts.samples}


@case
def a_cluster_that_does_not_listen() -> Any:
    ray.shutdown()
    addresses = ("127.0.0.1:9", "ray://here:10001")
    found = [error_of(on_ray, PHOTOS, "wds", "x", ray_address=address) for address in addresses]
    return {"errors": found, "running": ray.is_initialized()}


if __name__ == "__main__":
    WORK = Path(sys.argv[1])
    MODULES, GO, PHOTOS, BAD = (WORK / name for name in ("modules", "go", "photos", "bad"))
    MODULES.mkdir()
    (WORK / "out").mkdir()
    (MODULES / "steps.py").write_text(TRANSFORMS.format(flags=str(WORK)))
    sys.path.insert(0, str(MODULES))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MODULES), os.environ.get("PYTHONPATH", "")])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name, milliseconds in (("period", 500), ("timeout", 1000), ("initial_delay", 500)):
        os.environ[f"RAY_health_check_{name}_ms"] = str(milliseconds)
    write_images(PHOTOS, classes=3, each=30)
    shutil.copytree(PHOTOS / "class1", BAD / "a")
    for broken in ("005.jpg", "017.jpg"):
        (BAD / "a" / broken).write_bytes((BAD / "a" / broken).read_bytes()[:300])
    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "resources": {"special": 1}}
    with S3() as SERVER:
        os.environ.update(SERVER.environ())
        CLUSTER = Cluster(initialize_head=True, head_node_args=node)
        ADDRESS, NODE = CLUSTER.address, CLUSTER.add_node(**node)
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
