"""Conversions on a Ray cluster of two nodes; writes how each ended, as JSON.

A process of its own, as Ray leaves threads: `test_ray.py` starts it once.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import shardkit
from shardkit import ImageOptions, ShardkitError, TextOptions
from shardkit.conversion import ray_engine
from tests.codecs import tokenizer_zoo
from tests.conftest import files_of, write_images
from tests.conversion.deaths import Interrupted
from tests.conversion.part_kills import wait_for
from tests.conversion.text_corpora import prose, write_corpus
from tests.remote.buckets import Bucket
from tests.remote.servers import Google

SMALL = {"shard_size": "8kB"}
RESIZED = {"image": ImageOptions(resize=16), **SMALL}
CASES = {}

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
        deadly(sample)
    return sample

def leaves(sample):
    if comes(sample):
        raise SystemExit(3)
    return sample
"""


def case(function):
    CASES[function.__name__] = function
    return function


class Meanwhile(Interrupted):
    """A monitor that adds up progress, and does something at the first of it."""

    def __init__(self, act):
        super().__init__(math.inf)
        self._acts = [act]

    def advance(self, progress):
        super().advance(progress)
        for act in self._acts:
            self._acts = []
            act()


def out(name):
    return name if "://" in str(name) else WORK / "out" / name


def on_ray(source, to, name, **options):
    return shardkit.convert(source, to, out(name), engine="ray", **options)


def local(source, to, name, **options):
    return shardkit.convert(source, to, out(name), workers=0, **options)


def assert_same(source, to, name, samples, errors=0, **options):
    """A conversion on Ray has the bytes of one process, and leaves nothing."""
    counts = Interrupted(math.inf)
    result = on_ray(source, to, f"{name}-ray", progress=counts, **options)
    local(source, to, f"{name}-local", **options)
    assert files_of(out(f"{name}-ray")) == files_of(out(f"{name}-local"))
    assert (result.samples, result.errors, counts.samples) == (samples, errors, samples + errors)
    assert not list(out("").glob("*.partial"))


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except ShardkitError as error:
        return error.to_dict()
    return {"error": None}


@contextlib.contextmanager
def set_to(**values):
    """Names of `ray_engine` that mean something else meanwhile."""
    before = {name: getattr(ray_engine, name) for name in values}
    try:
        vars(ray_engine).update(values)
        yield
    finally:
        vars(ray_engine).update(before)


def terms(**changed):
    """Set the terms that a node has to fulfil to what differs from what it finds."""
    before = ray_engine.terms_for
    return set_to(terms_for=lambda *args: {**before(*args), **changed})


@case
def tokens():
    tokenizer = tokenizer_zoo.write_json(WORK / "tokenizer", "gpt2")
    corpus = write_corpus(WORK / "corpus.jsonl", prose(200))
    text = TextOptions(tokenizer=str(tokenizer))
    assert_same(corpus, "megatron", "tokens", 200, text=text, **SMALL)


@case
def one_shard():
    assert_same(PHOTOS, "beton", "joined", 90, image=ImageOptions(resize=16))


@case
def splits_and_samples_that_are_skipped():
    """Of a relative path; and their shards."""
    os.chdir(WORK)
    try:
        options = {"split": "train=0.8,val=0.2", "on_error": "skip", **RESIZED}
        assert_same("bad", "arrow", "bad", 28, errors=2, **options)
    finally:
        os.chdir("/")
    assert_same(out("bad-local/train"), "parquet", "parquet", 23, **SMALL)


@case
def a_sequence():
    samples = [{"__key__": f"{n:03d}", "text": "word " * n} for n in range(100)]
    assert_same(samples, "arrow", "sequence", 100, **SMALL)


@case
def inodes_of_another_machine():
    with terms(machine="another"):
        assert_same(PHOTOS, "wds", "inodes", 40, limit=40, **SMALL)


def continued(source, to, first, second, most=45):
    """A run that was interrupted after `most` samples goes on with the other engine."""
    with contextlib.suppress(KeyboardInterrupt):
        first(source, "wds", to, progress=Interrupted(most), **RESIZED)
        raise AssertionError("it was not interrupted")
    second(source, "wds", to, progress=(rest := Interrupted(math.inf)), **RESIZED)
    assert rest.done > 0


@case
def a_store():
    """Source and output are in a bucket."""
    bucket = Bucket(SERVER)
    source = bucket.url("in")
    local(PHOTOS, "wds", source, limit=30, **SMALL)
    continued(source, bucket.url("a"), local, on_ray, 15)
    for name, convert in (("b", on_ray), ("c", local)):
        convert(source, "wds", bucket.url(name), **RESIZED)
    found = {}
    for key, data in bucket.objects().items():
        top, _, rest = key.partition("/")
        found.setdefault(top, {})[rest] = data
    assert found["a"] == found["b"] == found["c"]
    assert sorted(found) == ["a", "b", "c", "in"]


@case
def interrupted_runs():
    continued(PHOTOS, "a", on_ray, local)
    continued(PHOTOS, "b", local, on_ray)
    local(PHOTOS, "wds", "c", **RESIZED)
    assert files_of(out("a")) == files_of(out("b")) == files_of(out("c"))


@case
def ctrl_c():
    """The command, while tasks are held; the same again completes it."""
    words = f"convert {PHOTOS} --to wds -o {out('command')} --shard-size 8kB --engine ray"
    words += f" --transform steps:held --ray-address {ADDRESS} --ray-option num_cpus=1"
    command = [sys.executable, "-m", "shardkit", *words.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=MODULES, **pipes)
    tasks = out("command.partial/tasks")
    wait_for(lambda: any(tasks.glob("[0-9]*[0-9]")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, ""), said  # Ray has printed nothing
    assert "interrupted; the same command run again continues" in said
    assert all(path.name.isdigit() for path in tasks.iterdir())
    GO.touch()
    again = subprocess.run([*command, "--json"], cwd=MODULES, check=True, **pipes)
    assert "continuing" in again.stderr
    assert json.loads(again.stdout)["samples"] == 90
    local(PHOTOS, "wds", "command-local", transform="steps:held", **SMALL)
    GO.unlink()
    assert files_of(out("command")) == files_of(out("command-local"))


@case
def a_worker_that_dies_once():
    assert_same(PHOTOS, "wds", "once", 90, transform="steps:deadly_once", **RESIZED)


@case
def workers_that_die_twice():
    found = error_of(on_ray, PHOTOS, "wds", "deadly", transform="steps:deadly", **SMALL)
    assert found["error"] == "WorkerError"
    assert "two workers or their nodes died on the same task" in found["what"]
    assert "class1/00" in found["found"]
    found = error_of(on_ray, PHOTOS, "wds", "leaves", transform="steps:leaves", **SMALL)
    assert found["what"] == "the transform raised SystemExit: 3"


@case
def bad_samples():
    ours = error_of(on_ray, BAD, "wds", "ours", **RESIZED)
    assert ours == error_of(local, BAD, "wds", "theirs", **RESIZED)
    assert ours["key"] == "a/005"
    found = error_of(on_ray, BAD, "wds", "many", on_error="skip", max_errors=1, **RESIZED)
    assert found["what"] == "more than 1 samples are bad"


@case
def a_transform_that_nodes_cannot_import():
    folder = WORK / "elsewhere"
    folder.mkdir()
    (folder / "only_here.py").write_text("def same(sample):\n    return sample\n")
    sys.path.insert(0, str(folder))
    import only_here

    found = error_of(on_ray, PHOTOS, "wds", "import", transform=only_here.same, **SMALL)
    assert "No module named 'only_here'" in found["found"]
    assert "on node " in found["found"]
    assert "ray job submit --working-dir" in found["fix"]


@case
def a_node_that_is_not_as_the_driver():
    photo, versions = str(next(PHOTOS.rglob("*.jpg"))), ray_engine.versions_of
    other = set_to(versions_of=lambda *work: {**versions(*work), "shardkit": "0.0.1"})
    for differs, what, expected in (
        (terms(probe="/nowhere/tasks/probe"), "a node does not see the output", ""),
        (terms(witnesses=[("/nowhere/a.jpg", 10)]), "does not see the source", "10 bytes"),
        (terms(witnesses=[(photo, 10)]), "does not see the source", "10 bytes"),
        (other, "", "shardkit 0.0.1"),
    ):
        with differs:
            found = error_of(on_ray, PHOTOS, "wds", "terms", limit=40, **SMALL)
        assert "on node " in found["found"]
        assert what in found["what"]
        assert found.get("expected", "") == expected
        assert "s3://bucket/name" in found["fix"] or expected


@case
def what_tasks_may_ask_for():
    def what(expected="", **options):
        found = error_of(on_ray, PHOTOS, "wds", "options", **options)
        assert not expected or found["expected"] == expected
        return str(found["what"])

    with set_to(_NODE_SECONDS=0.5, _LOOK=0.5):
        assert "'num_gpus'" in what("num_cpus, memory, special", ray_options={"num_gpus": 1})
        for asked in ({"num_cpus": "many"}, {"memory": 0}):
            assert "must be a number above 0" in what(ray_options=asked)
        assert "another Ray cluster already" in what(ray_address="127.0.0.1:9")
        too_much = {"num_cpus": 2, "special": 0.5}
        no_room = what("num_cpus=2, special=0.5", ray_options=too_much, **SMALL)
        assert no_room == "no node of the Ray cluster has room for a task"
    enough = {"memory": "1MB", "special": 0.5}
    assert on_ray(PHOTOS, "wds", "enough", limit=9, ray_options=enough, **SMALL).samples == 9


@case
def a_node_that_dies():
    """At the first report of progress, while tasks are held."""

    def die():
        CLUSTER.remove_node(NODE, allow_graceful=False)
        GO.touch()

    options = {"transform": "steps:held", **SMALL}
    on_ray(PHOTOS, "wds", "orphans", progress=(counts := Meanwhile(die)), **options)
    local(PHOTOS, "wds", "alive", **options)
    assert counts.samples == 90
    assert files_of(out("orphans")) == files_of(out("alive"))


@case
def addresses_that_lead_nowhere():
    ray.shutdown()
    for address in ("127.0.0.1:9", "ray://here:10001"):
        found = error_of(on_ray, PHOTOS, "wds", "x", ray_address=address)
        assert found["what"] == "cannot connect to a Ray cluster"
    assert not ray.is_initialized()


if __name__ == "__main__":
    WORK = Path(sys.argv[1])
    MODULES, GO, PHOTOS, BAD = (WORK / name for name in ("modules", "go", "photos", "bad"))
    MODULES.mkdir()
    (WORK / "out").mkdir()
    (MODULES / "steps.py").write_text(TRANSFORMS.format(flags=str(WORK)))
    sys.path.insert(0, str(MODULES))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MODULES), os.environ.get("PYTHONPATH", "")])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name, milliseconds in (("period", 500), ("timeout", 60_000), ("initial_delay", 500)):
        os.environ[f"RAY_health_check_{name}_ms"] = str(milliseconds)
    write_images(PHOTOS, classes=3, each=30)
    shutil.copytree(PHOTOS / "class1", BAD / "a")
    for broken in ("005.jpg", "017.jpg"):
        (BAD / "a" / broken).write_bytes((BAD / "a" / broken).read_bytes()[:300])
    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "resources": {"special": 1}}
    with Google() as SERVER:
        os.environ.update(SERVER.environ())
        CLUSTER = Cluster(initialize_head=True, head_node_args=node)
        ADDRESS, NODE = CLUSTER.address, CLUSTER.add_node(**node)
        try:
            ray.init(ADDRESS, log_to_driver=False)
            for name in sys.argv[2:] or CASES:
                began, error = time.monotonic(), ""
                try:
                    CASES[name]()
                except BaseException:
                    error = traceback.format_exc()
                line = json.dumps([name, error, round(time.monotonic() - began, 1)])
                with (WORK / "results.jsonl").open("a") as results:
                    results.write(f"{line}\n")
        finally:
            ray.shutdown()
            CLUSTER.shutdown()
