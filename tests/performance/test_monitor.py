"""`Monitor`: what it counts and measures, by clocks of the tests; logs, warnings, and profiles."""

import csv
import itertools
import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import shardkit
from shardkit.errors import OutputError, ShardkitWarning, UsageError
from shardkit.performance.machine import Usage
from shardkit.performance.monitor import Monitor as PlainMonitor
from shardkit.performance.monitor import _advice
from shardkit.performance.report import counted
from shardkit.torch import Loader, Monitor, StreamingDataset
from tests.performance.test_system import Clock
from tests.stream.data import write_documents, write_photos


class Waiting:
    """A loader of `batches` of 4 samples; the first takes `first` seconds, others `wait`."""

    def __init__(self, clock, batches=10, wait=1.0, first=5.0, end=0.0):
        self.clock, self.batches = clock, batches
        self.wait, self.first, self.end = wait, first, end

    def __len__(self):
        return self.batches

    def __iter__(self):
        for number in range(self.batches):
            self.clock.now += self.wait if number else self.first
            yield {"image": np.zeros((4, 2)), "number": number}
        self.clock.now += self.end


class InUse:
    """Of the machine: a GPU that is in use for such a share of the time."""

    def __init__(self, share):
        self.share = share

    def begin(self):
        pass

    def used(self, *, last=False):
        return Usage(gpu=self.share, gpu_seen=1)


def monitor_of(clock, loader, kind=Monitor, gpu=None, **options):
    monitor = kind(loader, **options)
    monitor._clock = clock
    monitor._system = InUse(gpu)
    return monitor


def train(monitor, step=3.0, stop=None):
    """Epochs of a loop whose steps take so many seconds."""
    for number, _ in enumerate(monitor):
        if number == stop:
            break
        monitor._clock.now += step
    return monitor.report()


def column(path, name):
    with path.open(newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


@pytest.fixture
def clock():
    clock = Clock()
    clock.now = 100.0
    return clock


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("monitor") / "photos")


def test_time_is_that_of_waiting_and_of_steps_and_the_first_batch_is_apart(clock):
    monitor = monitor_of(clock, Waiting(clock, batches=11, wait=1, first=5), every=4, gpu=1)
    for _ in range(3):
        report = train(monitor, step=3)
        clock.now += 1000  # between epochs: a validation, say
    assert (report.epochs, report.batches, report.samples) == (3, 33, 132)
    assert (report.start, report.data, report.step) == (15, 30, 99)
    assert (report.seconds, report.first_batch, report.waiting) == (144, 5, 30 / 129)
    assert (report.rate, report.stepping) == (132 / 129, 132 / 99)
    assert (report.token_rate, report.padding) == (None, None)
    # The end of the loader is waited for too; a batch counts when the next one is asked for.
    assert train(monitor_of(clock, Waiting(clock, batches=2, wait=1, end=7))).data == 8
    monitor = monitor_of(clock, Waiting(clock))
    assert [monitor.report().batches for _ in monitor] == list(range(10))


def test_a_batch_that_the_loop_leaves_in_counts_with_none_of_its_time(clock, tmp_path):
    log = tmp_path / "log.csv"
    monitor = monitor_of(clock, Waiting(clock), log=log, every=4)
    report = train(monitor, stop=6)
    clock.now += 1000
    assert (report.batches, report.start, report.data, report.step) == (6, 5, 5, 18)
    assert monitor.report() == report
    assert column(log, "batches") == ["4", "2"]
    assert train(monitor).batches == 16


def test_errors_of_the_loop_and_of_the_loader_pass_through(clock):
    def broken():
        yield from np.zeros((2, 4))
        raise OSError("no such shard")

    monitor = monitor_of(clock, broken())
    with pytest.raises(OSError, match="no such shard"):
        train(monitor)
    assert monitor.report().batches == 2
    monitor = monitor_of(clock, Waiting(clock))
    with pytest.raises(ZeroDivisionError):
        [1 // (batch["number"] - 2) for batch in monitor]
    assert monitor.report().batches == 2
    assert train(monitor).batches == 12


def test_an_empty_loader_gives_an_empty_report(clock):
    report = train(monitor_of(clock, []))
    assert report.batches == 0
    assert report.waiting is report.rate is report.first_batch is None
    assert str(report) == "0 batches in 0.00 s"
    json.dumps(report.to_dict(), allow_nan=False)


def test_batches_come_as_they_are_and_the_one_in_use_is_held_by_the_loop_alone(clock):
    class Batch:
        pass

    some = [object(), {"image": None}, (), "text"]
    assert list(Monitor(some)) == some
    batches = iter(Monitor(Batch() for _ in range(9)))
    batch = next(batches)
    known = weakref.ref(batch)
    del batch
    assert known() is None
    loader = Waiting(clock, batches=7)
    assert len(Monitor(loader)) == 7
    assert Monitor(loader).loader is loader
    with pytest.raises(TypeError):
        len(Monitor(iter(loader)))
    with pytest.raises(UsageError, match="every must be a whole number from 1 up"):
        Monitor(loader, every=0)


def test_a_report_for_people_has_what_is_known_and_no_more(clock):
    assert str(train(monitor_of(clock, Waiting(clock, batches=3), gpu=0.5))).splitlines() == [
        "3 batches in 16.00 s",
        "  waiting for data      18.2% of the time",
        "  first batch           5.00 s after an epoch begins",
        "  samples               1.09/s",
        "  without waiting       1.33/s",
        "  GPU                   50% of the time in use",
    ]
    loader = Waiting(clock, batches=3)
    loader.decode = "gpu"
    report = train(monitor_of(clock, loader))
    for one in (report, report + report):
        assert str(one).endswith("\n  images                decoded on the GPU")


FOUR = np.array([True, True, False, True])
MASK = np.array([[1, 1, 0], [1, 0, 0]])
IDS = np.zeros((2, 3), np.int64)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"image": np.zeros((4, 9)), "valid": FOUR}, (3, 0, 0)),
        ({"image": torch.zeros(4, 9), "valid": torch.from_numpy(FOUR)}, (3, 0, 0)),
        ({"__key__": ["a", "b"], "scale": 1.0, "image": torch.zeros(2, 9)}, (2, 0, 0)),
        ({"text": ["a", "b", "c"]}, (3, 0, 0)),
        ((torch.zeros(5, 3), torch.zeros(5)), (5, 0, 0)),
        ([torch.zeros(5, 3), torch.zeros(5)], (5, 0, 0)),
        (({"image": torch.zeros(6, 3)}, torch.zeros(6)), (6, 0, 0)),
        ((["a", "b"], ["c", "d"]), (2, 0, 0)),
        ([{"image": 1}, {"image": 2}, {"image": 3}], (3, 0, 0)),
        (torch.zeros(7, 2), (7, 0, 0)),
        *[(nothing, (0, 0, 0)) for nothing in (object(), "text", [])],
        ({"tokens": IDS}, (2, 6, 0)),
        ({"tokens": [np.zeros(3), np.zeros(5)]}, (2, 8, 0)),
        ({"tokens": IDS, "lengths": np.array([2, 1])}, (2, 3, 6)),
        ({"input_ids": torch.from_numpy(IDS), "attention_mask": torch.from_numpy(MASK)}, (2, 3, 6)),
        ({"x": IDS, "attention_mask": MASK > 0, "lengths": np.array([2, 1])}, (2, 3, 6)),
        ({"x": IDS, "segment_ids": IDS, "lengths": np.array([3, 2])}, (2, 5, 6)),
        # Not what these names stand for: a weight for each sample, and what is added to scores.
        ({"x": IDS, "valid": np.array([0.5, 0.5])}, (2, 0, 0)),
        ({"tokens": IDS, "attention_mask": MASK * -1e9}, (2, 6, 0)),
        ({"sound": np.zeros((2, 9)), "lengths": np.array([9, 4])}, (2, 0, 0)),
    ],
)
def test_samples_and_tokens_are_counted_without_padding(batch, expected):
    assert tuple(map(int, counted(batch))) == expected


def test_tokens_of_a_loop_are_summed_up(clock):
    batch = {"tokens": IDS, "lengths": np.array([2, 1])}
    report = train(monitor_of(clock, itertools.repeat(batch, 5), every=2), step=1)
    assert (report.tokens, report.padded_tokens) == (15, 30)
    assert (report.token_rate, report.padding) == (3, 0.5)


def test_data_that_hold_the_model_back_are_named_once_with_numbers(clock):
    loader = Waiting(clock, batches=200, wait=0.01, first=50)
    loader.dataset = SimpleNamespace(source=Path("my shards"))
    with pytest.warns(ShardkitWarning) as seen:
        train(monitor_of(clock, loader, every=10, gpu=0.4), step=0.03)
    assert [str(one.message) for one in seen] == [
        "the training loop waits for data 25% of its time: 100 samples/s, while its steps alone "
        "would allow 133; the GPU is in use 40% of the time; `shardkit doctor 'my shards'` finds "
        "the cause"
    ]
    assert seen[0].filename == __file__
    unknown = (object() for _ in Waiting(clock, batches=100, wait=0.5))  # counted as batches
    with pytest.warns(ShardkitWarning, match=r"1 batches/s, .* would allow 2$"):
        train(monitor_of(clock, unknown, every=10), step=0.5)


@pytest.mark.parametrize(
    ("loop", "gpu"),
    [
        ({"batches": 200, "wait": 0.09}, None),  # it waits less
        ({"batches": 30, "wait": 1}, None),  # nobody knows yet
        ({"batches": 200, "wait": 1}, 0.95),  # the GPU has work all the same
        ({"batches": 200, "wait": 0, "first": 1e6}, None),  # the beginning is no sign
    ],
)
def test_there_is_no_warning_where_data_do_not_hold_the_model_back(clock, loop, gpu):
    train(monitor_of(clock, Waiting(clock, **loop), every=20, gpu=gpu), step=1)
    loader = Waiting(clock, batches=10, wait=1000)  # which is slow at first, and then no more
    monitor = monitor_of(clock, loader, every=10)
    for _ in range(6):
        train(monitor, step=1)
        loader.wait = 0


def test_an_open_dataset_and_a_loader_of_ours_are_found_for_the_doctor(photos):
    opened = Loader(shardkit.open(photos), batch_size=4)
    in_workers = DataLoader(StreamingDataset(photos, batch_size=4), batch_size=None)
    for loader in (Loader(photos, batch_size=4), opened, in_workers):
        assert _advice(loader) == f"; `shardkit doctor {photos}` finds the cause"
    assert _advice([1, 2]) == ""


def test_ranks_but_the_first_are_silent_and_report_all_the_same(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    log = tmp_path / "log.csv"
    monitor = Monitor(Waiting(clock, batches=100), log=log, every=10)
    monitor._clock = clock
    report = train(monitor, step=0.1)
    assert not log.exists()
    assert (report.batches, report.usage) == (100, Usage())


@pytest.mark.parametrize("kind", [PlainMonitor, Monitor])
def test_a_csv_file_has_a_line_for_each_window_and_one_that_is_there_is_continued(
    clock, tmp_path, kind
):
    log = tmp_path / "runs" / "log.csv"
    monitor = monitor_of(clock, Waiting(clock), kind, log=log, every=4, gpu=0.5)
    train(monitor)
    train(monitor)
    assert column(log, "step") == ["4", "8", "10", "14", "18", "20"]
    assert column(log, "epoch") == [*"000111"]
    assert column(log, "batches") == [*"442442"]
    assert column(log, "first_batch") == ["5.0", "", "", "5.0", "", ""]
    assert [*map(float, column(log, "waiting")[:2])] == [3 / 15, 0.25]
    assert [*map(float, column(log, "rate")[:2])] == [16 / 15, 1]
    assert {*column(log, "gpu")} == {"0.5"}
    assert {*column(log, "memory")} == {""}
    train(monitor_of(clock, Waiting(clock), kind, log=log))
    assert column(log, "step")[-2:] == ["20", "10"]


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file/log.csv", "file/folder"):
        with pytest.raises(OutputError) as error:
            Monitor([], log=tmp_path / name)
        assert str(tmp_path / "file") in str(error.value)
    (tmp_path / "labels.csv").write_text("key,label\n")
    with pytest.raises(OutputError, match="not a monitor's log") as error:
        Monitor([], log=tmp_path / "labels.csv")
    assert error.value.found == "key, label"
    assert (tmp_path / "labels.csv").read_text() == "key,label\n"
    with pytest.raises(UsageError, match=r"the log must be a \.csv file"):
        PlainMonitor([], log=tmp_path / "runs")  # without torch


def test_a_log_that_cannot_be_written_any_more_does_not_end_the_training(clock, tmp_path):
    log = tmp_path / "runs" / "log.csv"
    monitor = monitor_of(clock, Waiting(clock), log=log, every=2)
    log.unlink()
    log.parent.rmdir()
    with pytest.warns(ShardkitWarning, match="stopped logging") as seen:
        assert train(monitor).batches == 10
    assert len(seen) == 1


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in names}


def test_tensorboard_reads_the_values_of_each_window_as_soon_as_an_epoch_ends(clock, tmp_path):
    monitor = monitor_of(clock, Waiting(clock), log=tmp_path, every=5, gpu=1)
    train(monitor)
    found = events_of(tmp_path)
    assert found["monitor/waiting"] == [(5, pytest.approx(4 / 19)), (10, 0.25)]
    assert found["monitor/rate"] == [(5, pytest.approx(20 / 19)), (10, 1)]
    assert found["monitor/first_batch"] == [(5, 5)]
    assert found["monitor/gpu"] == [(5, 1), (10, 1)]
    assert "monitor/memory" not in found
    with monitor:
        train(monitor)
    monitor.close()
    train(monitor)  # which logs no more
    assert [step for step, _ in events_of(tmp_path)["monitor/waiting"]] == [5, 10, 15, 20]


def test_without_tensorboard_the_user_hears_at_once_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"TensorBoard, .*, is not installed") as error:
        Monitor([], log=tmp_path / "runs")
    assert "shardkit[monitor]" in str(error.value.fix)
    assert not (tmp_path / "runs").exists()


def test_a_loader_of_ours_is_counted_exactly(photos, tmp_path):
    crop = {"image": shardkit.RandomResizedCrop(16)}
    monitor = Monitor(Loader(photos, batch_size=8, transforms=crop), every=2)
    for epoch in range(2):
        assert sum(len(batch["__key__"]) for batch in monitor) == 40
        assert monitor.loader.epoch == epoch
    report = monitor.report()
    assert (report.epochs, report.batches, report.samples) == (2, 10, 74)  # three are padding
    monitor.loader.load_state_dict(monitor.loader.state_dict())
    assert report.to_dict()["memory"] > 1_000_000
    assert report.to_dict()["cpu"] >= 0
    path = write_documents(tmp_path / "d", [3, 5, 2, 9, 4])
    loader = Loader(path, batch_size=2, last="short", collate=shardkit.pad_collate())
    monitor = Monitor(loader)
    assert len(list(monitor)) == 3
    assert monitor.report().tokens == 23
    assert monitor.report().padding == pytest.approx(loader.padding)


def test_workers_of_a_dataloader_are_watched(photos):
    dataset = StreamingDataset(photos, batch_size=8, transforms={"image": shardkit.Resize(16)})
    monitor = Monitor(DataLoader(dataset, batch_size=None, num_workers=2), every=2)
    assert len(list(monitor)) == len(monitor) == 5
    assert monitor.report().samples == 37
    assert monitor.report().usage.cpu is not None


@pytest.mark.large  # torch's profiler takes its time to start
def test_a_profile_marks_waiting(tmp_path):
    written = torch.profiler.tensorboard_trace_handler(str(tmp_path))
    with torch.profiler.profile(on_trace_ready=written):
        for batch in Monitor([torch.ones(4)] * 3):
            batch.cumsum(0)
    (path,) = tmp_path.glob("*.pt.trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    marks = [event["name"] for event in events if event.get("ph") == "X"]
    assert marks.count("aten::cumsum") == 3
    assert marks.count("waiting for data") == 3 + 2  # and for `iter`, and for the end
