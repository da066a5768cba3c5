"""The doctor on real loaders: what is grossly wrong is named first, and what cannot be is said."""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import shardkit
import shardkit.torch
from shardkit.cli import group
from shardkit.cli.doctor import command
from shardkit.codecs.image import probe
from shardkit.errors import SampleError, UsageError
from shardkit.formats import columns
from shardkit.helpers.clock import Spent
from shardkit.performance import doctor as doctoring
from shardkit.performance import findings, on_gpu, runs
from shardkit.performance.doctor import doctor
from shardkit.performance.runs import Run
from shardkit.stream import Loader, torch_loader
from shardkit.stream.profile import Times
from shardkit.transforms import images
from tests.codecs.test_crop import needs_crop_many
from tests.conftest import write_images
from tests.stream.data import same, write_documents, write_photos

SECONDS = 0.02
CROP = {"image": shardkit.RandomResizedCrop(16)}
PROCESSORS = 4
BATCHES = 4


class Machine:
    """A machine on which it is known how long everything takes, so that no clock decides.

    Loaders load some batches for real; what that costs is added up: by those who call `cost`, by
    pixels that are decoded, and a little for each sample.
    """

    def __init__(self, patch):
        self.spent = {}
        patch.setattr(doctoring, "default_threads", lambda: PROCESSORS)
        patch.setattr(runs, "ROUNDS", 1)
        patch.setattr(runs, "run", self.run)
        decode = images.crop_jpegs

        def counted(encoded, *rest):
            sizes = [probe(data)[1:] for data in encoded]
            self.cost("decode", 1e-8 * sum(width * height for width, height in sizes))
            return decode(encoded, *rest)

        patch.setattr(images, "crop_jpegs", counted)

    def cost(self, stage, seconds, *, waiting=False):
        before = self.spent.get(stage, Spent())
        self.spent[stage] = before.more(seconds, 0.0 if waiting else seconds)

    def run(self, loader, seconds):
        """As `runs.run`: threads wait side by side, and share the processors."""
        self.spent = {}
        some = itertools.islice(loader.with_options(threads=0), BATCHES)
        batches = [len(batch["valid"]) for batch in some]
        for stage in ("read", "decode", "collate"):
            self.cost(stage, 1e-5 * sum(batches))
        threads = PROCESSORS if loader.threads is None else loader.threads
        wall, busy = map(sum, zip(*self.spent.values(), strict=True))
        taken = max(wall / max(threads, 1), busy / PROCESSORS)
        times = Times(taken, threads, sum(batches), len(batches), taken, 0.0, self.spent)
        return Run(times.rate, times)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("doctor") / "photos", samples=64, shard=32)


def test_a_run_that_was_disturbed_does_not_count(monkeypatch):
    rates = {"now": iter([1.0, 100.0, 110.0]), "alone": iter([90.0, 900.0, 80.0])}
    monkeypatch.setattr(runs, "run", lambda loader, seconds: Run(next(rates[loader])))
    found = runs.compare({name: name for name in rates}, seconds=1)
    assert {name: run.rate for name, run in found.items()} == {"now": 100.0, "alone": 90.0}


def test_late_storage_is_named_first(photos, machine, monkeypatch):
    whole = columns.read_blobs

    def late(sources, which, *ranges):
        machine.cost("read", 0.005 * len(which), waiting=True)
        return whole(sources, which, *ranges)

    monkeypatch.setattr(columns, "read_blobs", late)
    loader = Loader(photos, batch_size=8, transforms=CROP)
    memory, threads = doctor(loader, seconds=SECONDS).findings
    assert (memory.cause, threads.cause) == ("storage", "storage")
    assert memory.settings == {"cache": "memory"}  # beside which threads give less
    assert threads.settings == {"threads": 64}
    assert threads.gain == pytest.approx(16, rel=0.1)
    assert loader.epoch == 0  # its own position stays
    assert len(list(loader.with_options(**memory.settings))) == 8


def test_a_missing_extension_is_named_first(photos, machine, monkeypatch):
    monkeypatch.setattr(findings, "MISSING", "it was not built")
    # However little training needs.
    found = doctor(photos, batch_size=8, transforms=CROP, need=1.0, seconds=0.02).findings[0]
    assert found.cause == "extension"
    assert "about 3 times as fast: it was not built" in found.seen
    decoded = doctor(photos, batch_size=8, transforms={"image": shardkit.Decode()}, seconds=0.02)
    assert "extension" not in [one.cause for one in decoded.findings]


def test_large_images_and_a_slow_transform_are_named_first(photos, tmp_path, machine):
    out = write_photos(tmp_path / "large", samples=8, size=(480, 360))
    found = doctor(Loader(out, batch_size=4, transforms=CROP), seconds=SECONDS).findings[0]
    assert found.cause == "decode"
    assert "--resize 24" in found.command

    def slow(pixels):
        machine.cost("transform", 0.01)
        return pixels

    steps = {"image": [shardkit.RandomResizedCrop(16), slow]}
    found = doctor(Loader(photos, batch_size=8, transforms=steps), seconds=SECONDS).findings[0]
    assert found.cause == "transform"
    assert "slow" in found.seen


def test_padding_is_named_first(tmp_path, machine):
    out = write_documents(tmp_path / "documents", [4] * 60 + [2000] * 4)
    before = Loader(out, batch_size=8, shuffle=True, collate=shardkit.pad_collate())
    found = doctor(before, seconds=SECONDS).findings[0]  # with a gain: test_checks.py
    assert found.cause == "padding"
    assert found.gain > 1.1


def test_what_a_loader_warns_of_is_a_finding(tmp_path, machine):
    write_images(tmp_path / "in", classes=100, each=8)
    shardkit.convert(tmp_path / "in", "wds", tmp_path / "sorted", workers=0, shard_samples=50)
    loader = Loader(tmp_path / "sorted", batch_size=8, shuffle=True, window=64, transforms=CROP)
    found = doctor(loader, seconds=0.02)  # a warning would be an error here
    assert found.findings[-1].cause == "order"
    assert found.findings[-1].settings["window"] > 64


def test_a_step_tells_how_much_the_model_takes(photos, machine, monkeypatch):
    loader = Loader(photos, batch_size=8, transforms=CROP)
    batches = []
    clock = SimpleNamespace(perf_counter=lambda: len(batches) * 0.5)
    monkeypatch.setattr(doctoring, "time", clock)
    found = doctor(loader, step=batches.append, seconds=SECONDS)
    assert len(batches) > runs.ROUNDS
    assert all(batch is batches[0] for batch in batches)
    assert found.need == 8 / 0.5
    assert "keeps up" in found.verdict
    assert not [finding for finding in found.findings if finding.rate]  # nothing to gain
    assert doctor(loader, need=1e9, seconds=SECONDS).need == 1e9


def test_what_was_measured_while_training_is_used(photos):
    loader = Loader(photos, batch_size=8, transforms=CROP, profile=True)
    assert len(list(loader)) == 8
    assert doctor(loader, seconds=SECONDS).need == loader.profile.stepping
    assert loader.profile.batches == 8


def test_a_path_takes_any_size_of_batches(photos, tmp_path, machine):
    documents = write_documents(tmp_path / "documents", [5] * 40)
    for path, size, options in (
        (photos, 16, {"global_batch_size": 16}),
        (documents, 8, {"batching": shardkit.Bucket(8, 2)}),
    ):
        times = doctor(path, seconds=SECONDS, **options).times
        assert times.samples / times.batches == size


def test_a_gpu_that_gets_batches_from_ordinary_memory_is_told(photos, machine, monkeypatch):
    loader = shardkit.torch.Loader(photos, batch_size=8, transforms=CROP)
    for there in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        found = [f.settings for f in doctor(loader, seconds=SECONDS).findings if f.cause == "copy"]
        assert found == [{"device": "cuda"}] * there


@needs_crop_many
def test_decoding_on_a_gpu_is_tried_where_decoding_takes_the_most_time(
    tmp_path, machine, monkeypatch
):
    """By DALI's operators for processors, whose time is none here."""
    pytest.importorskip("nvidia.dali")
    path = write_photos(tmp_path / "large", samples=8, size=(480, 360))

    def found(loader=Loader, steps=CROP, **options):
        made = loader(path, batch_size=4, transforms=steps)
        every = doctor(made, seconds=SECONDS, **options).findings
        return [one for one in every if 'decode="gpu"' in one.seen]

    assert not found()  # without a GPU
    monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(torch_loader, "_DEVICES", ["cpu"])
    for kind in (Loader, shardkit.torch.Loader):
        (one,) = found(kind)
        assert one.settings == {"device": "cpu", "decode": "gpu"}
        assert one.rate == pytest.approx(PROCESSORS / 3e-5)
        assert one.gain > 50
        assert "which did nothing else, made 133,333 samples/s" in one.seen
    fast = shardkit.torch.Loader(path, batch_size=4, transforms=CROP, **one.settings)
    assert not [f for f in doctor(fast, seconds=SECONDS).findings if f.settings]
    assert not found(need=1.0)  # what loading gives is enough
    assert not found(steps={"image": shardkit.Decode()})
    (one,) = found(steps={"image": [*CROP.values(), abs]})
    assert "not tried: after it, functions get whole batches, on the GPU: builtins.abs" in one.seen
    assert one.rate is None
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    (one,) = found()
    assert "not tried" in one.seen
    assert "needs DALI, which is not installed" in one.seen
    assert one.do.startswith('pip install "shardkit[gpu]"')
    assert one.rate is None


def test_samples_in_memory_give_the_same_batches(photos):
    loader = Loader(photos, batch_size=8, transforms=CROP, profile=True, threads=1)
    stream = loader.dataset.stream
    samples = [stream.samples.read(number) for number in runs.first_numbers(stream, 64)]
    other = runs.in_memory(loader, samples)
    assert len(other) == 64
    for one, another in zip(loader, other, strict=False):
        assert one["__key__"] == another["__key__"]
        assert same(one["label"], another["label"])


def test_a_dataset_that_is_smaller_than_a_batch_is_measured_with_a_warning(
    photos, tmp_path, machine
):
    tiny = write_photos(tmp_path / "tiny", samples=3)
    for options in ({}, {"batch_size": 5}):
        with pytest.warns(shardkit.ShardkitWarning, match="has only 3 samples, fewer than a batch"):
            found = doctor(tiny, seconds=SECONDS, **options)
        assert found.times.samples / found.times.batches == 3
    with pytest.warns(shardkit.ShardkitWarning, match="smaller than one batch: samples are repea"):
        found = doctor(Loader(tiny, batch_size=5, transforms=CROP), seconds=SECONDS)
    assert found.rate > 0
    with shardkit.create(tmp_path / "none", "wds", {"n": shardkit.Int()}):
        pass
    with pytest.raises(UsageError, match="no samples"):
        doctor(tmp_path / "none")


def test_prefetching_more_is_advised_only_if_it_was_faster(photos, machine, monkeypatch):
    rates = {(4, 4): 100.0, (0, 1): 20.0, (16, 4): 300.0, (64, 4): 400.0, (64, 64): 500.0}

    def run(loader, seconds):
        threads = PROCESSORS if loader.threads is None else loader.threads
        spent = {"read": Spent(0.9, 0.01), "decode": Spent(0.1, 0.1)}
        times = Times(1.0, threads, 64, 8, 1.0, 0.0, spent)
        return Run(rates.get((threads, loader.prefetch), 1.0), times)

    monkeypatch.setattr(runs, "run", run)
    loader = Loader(photos, batch_size=8, transforms=CROP)
    for rate, ahead in ((500.0, {"prefetch": 64}), (420.0, {})):
        rates[64, 64] = rate
        (found,) = doctor(loader).findings
        assert found.settings == {"threads": 64, **ahead}
        assert found.rate == (rate if ahead else 400)


def test_what_cannot_be_measured_is_said(photos, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="must be over 0"):
        doctor(photos, seconds=0)
    (tmp_path / "own_steps.py").write_text("def turned(pixels):\n    raise ValueError('no luck')\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)  # where the command finds functions
    options = ["--transform", "own_steps:turned", "--batch-size", "8", "--seconds", "0.02"]
    error = CliRunner().invoke(command, [str(photos), *options, "--json"]).exception
    assert "own_steps.turned raised ValueError: no luck" in str(error)
    assert isinstance(error, SampleError)
    assert error.where["path"].parent == photos


def test_the_command_prints_what_was_found(photos, machine):
    def run(*arguments):
        options = ["--seconds", str(SECONDS), "--size", "16", "--batch-size", "8"]
        done = CliRunner().invoke(command, [str(photos), *options, *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    assert "doctor" in group.list_commands(None)
    text = run()
    assert text.startswith(f"{photos}\n")
    assert "Loading gives" in text
    report = json.loads(run("--json", "--need", "1"))
    assert (report["source"], report["need"]) == (str(photos), 1)
    assert "keeps up" in report["verdict"]
