"""What the doctor makes of runs: from made-up times, so that no clock decides."""

import json
from dataclasses import replace

import numpy as np
import pytest

import shardkit
from shardkit.helpers.clock import IDLE, Spent
from shardkit.performance import findings
from shardkit.performance.doctor import Diagnosis, ranked
from shardkit.performance.findings import Case, Finding
from shardkit.performance.runs import Run
from shardkit.storage import byte_source
from shardkit.stream import Loader
from shardkit.stream.profile import Times
from tests.codecs.sample_images import encoded, photo
from tests.stream.data import write_photos

BUSY = {"read": (0.1, 0.1), "decode": (0.8, 0.8), "collate": (0.1, 0.1)}
LATE = {"read": (0.9, 0.01), "decode": (0.1, 0.1)}
SLOW = {"read": (0.1, 0.1), "decode": (0.1, 0.1), "transform": (0.8, 0.8)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("advice") / "photos")


@pytest.fixture
def case(path):
    def made(now, alone, loader=None, path=path, **others):
        options = {"transforms": {"image": shardkit.CenterCrop(16)}, **(loader or {})}
        others = {"processors": 4, "memory": 10**9, **others}
        return Case(Loader(path, batch_size=8, **options), now=now, alone=alone, **others)

    return made


def run(rate, threads=1, stages=BUSY):
    """A run of a second, whose stages took these shares of it: by the wall, by the processor."""
    spent = {stage: Spent(wall * max(threads, 1), busy) for stage, (wall, busy) in stages.items()}
    return Run(rate, Times(1.0, threads, int(rate), 10, 1.0, 0.0, {**spent, IDLE: Spent()}))


def slow(pixels):
    return pixels


STEPS = {"transforms": {"image": [shardkit.CenterCrop(16), slow]}}


def collated(samples):
    return {"label": np.array([sample["label"] for sample in samples])}


def test_other_threads_are_advised_where_they_gave_more(case):
    found = findings.threads(case(run(100), run(100, 0), tried={4: run(350, 4)}))
    assert (found.cause, found.rate, found.gain) == ("threads", 350, 3.5)
    assert found.settings == {"threads": 4}
    assert "one thread makes 100 samples/s with 4 processors; 4 made 350" in found.seen
    assert findings.threads(case(run(100), run(100, 0), tried={4: run(105, 4)})) is None
    assert findings.threads(case(run(100), run(100, 0))) is None
    fewer = findings.threads(case(run(100, 16), run(90, 0), tried={4: run(150, 4)}))
    assert fewer.settings == {"threads": 4}


def test_late_storage_is_waited_for_by_more_threads_or_kept_in_memory(case):
    tried, in_memory = {16: run(800, 16, LATE), 64: run(900, 64, LATE)}, run(1000, 4)
    made = case(run(100, 4, LATE), run(25, 0, LATE), tried=tried, in_memory=in_memory)
    assert made.waits == pytest.approx(0.89)
    threads, memory = findings.threads(made), findings.storage(made)
    assert (threads.cause, threads.rate) == ("storage", 900)
    assert threads.settings == {"threads": 64}
    ahead = findings.threads(replace(made, ahead=run(1200, 64, LATE)))  # measured to be faster
    assert (ahead.rate, ahead.settings) == (1200, {"threads": 64, "prefetch": 64})
    assert (memory.cause, memory.rate, memory.settings) == ("storage", 1000, {"cache": "memory"})
    assert "89% of its time" in memory.seen
    # Storage that does not wait is not blamed; what does not fit into memory is not kept there.
    made = case(run(100, 4), run(25, 0), tried={16: run(300, 16)})
    assert findings.threads(made).cause == "threads"
    assert findings.storage(made) is None
    made = case(run(100, 4, LATE), run(25, 0, LATE), in_memory=in_memory, memory=None)
    assert "cache it in memory if it fits" in findings.storage(made).do
    made = case(run(100, 4, LATE), run(25, 0, LATE), in_memory=in_memory, memory=1000)
    assert findings.storage(made) is None


def test_a_transform_that_keeps_the_interpreter_needs_processes_and_others_to_be_cheaper(case):
    found = findings.transform(case(run(110, 4, SLOW), run(100, 0, SLOW), STEPS))
    assert (found.cause, found.rate, found.settings) == ("transform", 400, {"workers": 4})
    assert "tests.performance.test_findings.slow takes 80% of a thread's time, 8 ms" in found.seen
    assert "holds the GIL" in found.seen
    found = findings.transform(case(run(390, 4, SLOW), run(100, 0, SLOW), STEPS))  # shared
    assert found.rate == pytest.approx(390 / 0.2)
    assert not found.settings
    cheap = {"read": (0.5, 0.5), "decode": (0.4, 0.4), "transform": (0.1, 0.1)}
    assert findings.transform(case(run(390, 4, cheap), run(100, 0, cheap), STEPS)) is None


def test_a_collate_that_copies_is_left_out_and_floats_are_left_to_the_gpu(case):
    stages = {"read": (0.1, 0.1), "decode": (0.2, 0.2), "collate": (0.7, 0.7)}
    made = case(run(100, 2, stages), run(60, 0, stages), {"collate": collated})
    found = findings.collating(made)
    assert (found.cause, found.settings) == ("copy", {"collate": None})
    assert found.gain == pytest.approx(1 / 0.3)
    assert findings.collating(case(run(100, 2, stages), run(60, 0, stages))) is None
    assert made.loader.with_options(**found.settings).dataset.options.collate is None
    stages = {"decode": (0.5, 0.5), "transform": (0.5, 0.5)}
    floats = [shardkit.CenterCrop(16), shardkit.Normalize((0.5,) * 3, (0.5,) * 3)]
    options = {"transforms": {"image": floats}}
    found = findings.transform(case(run(100, 2, stages), run(60, 0, stages), options))
    assert (found.cause, found.rate) == ("copy", 200)
    own = findings.transform(case(run(100, 2, SLOW), run(60, 0, SLOW), STEPS))
    assert own.cause == "transform"


def test_what_data_cost_becomes_a_rate(case):
    made = case(run(100, 2), run(60, 0))
    found = made.rated(Finding("decode", "large", "smaller", stage="decode", share=0.25))
    assert found.rate == pytest.approx(100 / (1 - 0.8 * 0.75))
    assert made.rated(Finding("format", "files", "shards", stage="read", share=0.9)) is None
    order = Finding("order", "sorted", "shuffle")
    assert made.rated(order) is order


def test_findings_are_sorted_by_what_they_give_to_training():
    rates = {"threads": (150, 1.5), "order": (None, 1), "decode": (400, 4), "padding": (None, 2)}
    some = [Finding(cause, "", "", rate=rate, gain=gain) for cause, (rate, gain) in rates.items()]
    for need, expected in [
        (None, [("decode", 4), ("padding", 2), ("threads", 1.5), ("order", 1)]),
        (90, [("padding", 2), ("order", 1)]),
        (160, [("padding", 2), ("decode", 1.6), ("threads", 1.5), ("order", 1)]),
    ]:
        assert [(one.cause, round(one.gain, 2)) for one in ranked(some, 100, need)] == expected


def test_a_diagnosis_is_json_and_text_and_says_whether_loading_holds_training_back():
    for need, words in {
        None: ("Loading gives 100 samples/s; decode is 80% of making batches",),
        50: ("keeps up", "2.0 times what the model takes (50)"),
        200: ("holds the model back",),
    }.items():
        verdict = Diagnosis("shards", 100, need, run(100).times, ()).verdict
        assert all(some in verdict for some in words), verdict
    finding = Finding("decode", "large", "smaller", rate=200, gain=2, command="shardkit convert")
    found = Diagnosis("shards", 100, 400.0, run(100).times, (finding,))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["findings"][0]["cause"] == "decode"
    text = str(found)
    assert "1. decode: large.\n   Do: smaller.\n   Type: shardkit convert\n" in text
    assert "Gives: 200 samples/s, 2.00 times as many." in text


def test_crops_of_jpegs_without_the_extension_are_told_what_it_gives(case, tmp_path, monkeypatch):
    stages = {"read": (0.4, 0.4), "decode": (0.6, 0.6)}
    made = case(run(100, 1, stages), run(100, 0, stages))
    assert findings.extensions(made) == []
    monkeypatch.setattr(findings, "MISSING", "it was not built")
    (found,) = findings.extensions(made)
    assert found.rate == pytest.approx(100 / 0.6)  # a third of the time for what took 0.6
    assert "it was not built" in found.seen
    assert "gcc" in found.do
    assert findings.extensions(case(run(100), run(100, 0), {"transforms": None})) == []
    with shardkit.create(tmp_path / "png", "wds", {"image": shardkit.Image()}) as writer:
        for _ in range(8):
            writer.write({"image": encoded(photo(size=(24, 24)), "PNG")})
    assert findings.extensions(case(run(100), run(100, 0), path=tmp_path / "png")) == []
    monkeypatch.setattr(byte_source, "MISSING", "it was not built, either")
    found, other = findings.extensions(made)
    assert "it was not built, either" in other.seen
    assert (found.do, other.rate) == (other.do, None)
