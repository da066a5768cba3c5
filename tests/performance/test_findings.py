"""What the doctor makes of runs: from made-up times, so that no clock decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.clock import IDLE, Spent
from shardkit.performance import findings
from shardkit.performance.doctor import Diagnosis, code_line, ranked
from shardkit.performance.findings import Case, Finding
from shardkit.performance.runs import Run
from shardkit.stream import Loader
from shardkit.stream.profile import Times
from tests.codecs.sample_images import encoded, photo
from tests.stream.data import write_photos

BUSY = {"read": (0.1, 0.1), "decode": (0.8, 0.8), "collate": (0.1, 0.1)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("advice") / "photos")


def run(rate: float, threads: int = 1, stages: dict[str, tuple[float, float]] = BUSY) -> Run:
    """A run of a second, whose stages took these shares of it: by the wall, by the processor."""
    spent = {stage: Spent(wall * max(threads, 1), busy) for stage, (wall, busy) in stages.items()}
    return Run(rate, Times(1.0, threads, int(rate), 10, 1.0, 0.0, {**spent, IDLE: Spent()}))


def slow(pixels: Any) -> Any:
    return pixels


def collated(samples: Any) -> dict[str, Any]:
    return {"label": np.array([sample["label"] for sample in samples])}


def case(path: Path, now: Run, alone: Run, loader: dict[str, Any] | None = None, **others: Any):
    options = {"transforms": {"image": shardkit.CenterCrop(16)}, **(loader or {})}
    others = {"processors": 4, "memory": 10**9, **others}
    return Case(Loader(path, batch_size=8, **options), now=now, alone=alone, **others)


def test_other_threads_are_advised_where_they_gave_more(path: Path) -> None:
    found = findings.threads(case(path, run(100), run(100, 0), tried={4: run(350, 4)}))
    assert found is not None
    assert (found.cause, found.rate, found.gain) == ("threads", 350, 3.5)
    assert found.settings == {"threads": 4}
    assert "one thread makes 100 samples/s with 4 processors; 4 made 350" in found.seen
    assert findings.threads(case(path, run(100), run(100, 0), tried={4: run(105, 4)})) is None
    assert findings.threads(case(path, run(100), run(100, 0))) is None
    fewer = findings.threads(case(path, run(100, 16), run(90, 0), tried={4: run(150, 4)}))
    assert fewer is not None
    assert fewer.settings == {"threads": 4}


def test_late_storage_is_waited_for_by_more_threads_or_kept_in_memory(path: Path) -> None:
    late = {"read": (0.9, 0.01), "decode": (0.1, 0.1)}
    tried = {16: run(800, 16, late), 64: run(900, 64, late)}
    made = case(path, run(100, 4, late), run(25, 0, late), tried=tried, in_memory=run(1000, 4))
    assert made.waits == pytest.approx(0.89)
    threads, memory = findings.threads(made), findings.storage(made)
    assert threads is not None
    assert memory is not None
    assert (threads.cause, threads.rate) == ("storage", 900)
    assert threads.settings == {"threads": 64, "prefetch": 64}
    assert (memory.cause, memory.rate, memory.settings) == ("storage", 1000, {"cache": "memory"})
    assert "89% of its time" in memory.seen


def test_storage_that_does_not_wait_is_not_blamed(path: Path) -> None:
    made = case(path, run(100, 4), run(25, 0), tried={16: run(300, 16)})
    found = findings.threads(made)
    assert found is not None
    assert found.cause == "threads"
    assert findings.storage(made) is None


def test_what_does_not_fit_into_memory_is_not_kept_there(path: Path) -> None:
    late = {"read": (0.9, 0.01), "decode": (0.1, 0.1)}
    made = case(path, run(100, 4, late), run(25, 0, late), in_memory=run(1000, 4), memory=1000)
    assert findings.stored_bytes(made.loader) > 500
    assert findings.storage(made) is None


SLOW = {"read": (0.1, 0.1), "decode": (0.1, 0.1), "transform": (0.8, 0.8)}
STEPS = {"transforms": {"image": [shardkit.CenterCrop(16), slow]}}


def test_a_transform_that_keeps_the_interpreter_needs_processes(path: Path) -> None:
    found = findings.transform(case(path, run(110, 4, SLOW), run(100, 0, SLOW), STEPS))
    assert found is not None
    assert (found.cause, found.rate, found.settings) == ("transform", 400, {"workers": 4})
    assert "tests.performance.test_findings.slow takes 80% of a thread's time, 8 ms" in found.seen
    assert "holds the GIL" in found.seen


def test_a_transform_that_threads_share_can_only_become_cheaper(path: Path) -> None:
    found = findings.transform(case(path, run(390, 4, SLOW), run(100, 0, SLOW), STEPS))
    assert found is not None
    assert found.rate == pytest.approx(390 / 0.2)
    assert not found.settings
    cheap = {"read": (0.5, 0.5), "decode": (0.4, 0.4), "transform": (0.1, 0.1)}
    assert findings.transform(case(path, run(390, 4, cheap), run(100, 0, cheap), STEPS)) is None


def test_a_collate_that_copies_is_left_out(path: Path) -> None:
    stages = {"read": (0.1, 0.1), "decode": (0.2, 0.2), "collate": (0.7, 0.7)}
    made = case(path, run(100, 2, stages), run(60, 0, stages), {"collate": collated})
    found = findings.collating(made)
    assert found is not None
    assert (found.cause, found.settings) == ("copy", {"collate": None})
    assert found.gain == pytest.approx(1 / 0.3)
    assert findings.collating(case(path, run(100, 2, stages), run(60, 0, stages))) is None
    assert made.loader.with_options(**found.settings).dataset.options.collate is None


def test_floats_are_left_to_the_gpu(path: Path) -> None:
    stages = {"decode": (0.5, 0.5), "transform": (0.5, 0.5)}
    floats = [shardkit.CenterCrop(16), shardkit.Normalize((0.5,) * 3, (0.5,) * 3)]
    options = {"transforms": {"image": floats}}
    found = findings.transform(case(path, run(100, 2, stages), run(60, 0, stages), options))
    assert found is not None
    assert (found.cause, found.rate) == ("copy", 200)
    own = findings.transform(case(path, run(100, 2, SLOW), run(60, 0, SLOW), STEPS))
    assert own is not None
    assert own.cause == "transform"


def test_steps_of_unlike_length_need_more_batches_ahead(path: Path) -> None:
    made = case(path, run(100, 2), run(60, 0))
    spent = {"decode": Spent(1.0, 1.0), IDLE: Spent(1.0, 0.0)}
    uneven = Times(1.0, 2, 200, 20, data=0.2, step=0.8, spent=spent)
    found = findings.prefetch(made, uneven)
    assert found is not None
    assert found.settings == {"prefetch": 16}
    assert found.gain == pytest.approx(1.25)
    even = replace(uneven, spent={"decode": Spent(2.0, 2.0), IDLE: Spent()})
    assert findings.prefetch(made, even) is None


def test_what_data_cost_becomes_a_rate(path: Path) -> None:
    made = case(path, run(100, 2), run(60, 0))
    smaller = Finding("decode", "large", "smaller", stage="decode", share=0.25)
    found = made.rated(smaller)
    assert found is not None
    assert found.rate == pytest.approx(100 / (1 - 0.8 * 0.75))
    assert made.rated(Finding("format", "files", "shards", stage="read", share=0.9)) is None
    order = Finding("order", "sorted", "shuffle")
    assert made.rated(order) is order


def test_findings_are_sorted_by_what_they_give_to_training() -> None:
    some = [
        Finding("threads", "", "", rate=150, gain=1.5),
        Finding("order", "", ""),
        Finding("decode", "", "", rate=400, gain=4),
        Finding("padding", "", "", gain=2),
    ]
    causes = [one.cause for one in ranked(some, 100, None)]
    assert causes == ["decode", "padding", "threads", "order"]
    assert [one.cause for one in ranked(some, 100, 90)] == ["padding", "order"]
    limited = ranked(some, 100, 160)
    assert [(one.cause, round(one.gain, 2)) for one in limited] == [
        ("padding", 2), ("decode", 1.6), ("threads", 1.5), ("order", 1),
    ]  # fmt: skip


def test_the_verdict_says_whether_loading_holds_training_back() -> None:
    def verdict(need: float | None) -> str:
        return Diagnosis("shards", 100, need, run(100).times, ()).verdict

    assert verdict(None) == "Loading gives 100 samples/s; decode is 80% of making batches"
    assert "keeps up" in verdict(50)
    assert "2.0 times what the model takes (50)" in verdict(50)
    assert "holds the model back" in verdict(200)


def test_a_diagnosis_is_json_and_text() -> None:
    finding = Finding("decode", "large", "smaller", rate=200, gain=2, command="shardkit convert")
    found = Diagnosis("shards", 100, 400.0, run(100).times, (finding,), {"a": 1, "b": 2})
    data = json.loads(json.dumps(found.to_dict()))
    assert data["findings"][0]["cause"] == "decode"
    assert data["tuned"]["best"] == "b"
    text = str(found)
    assert "1. decode: large.\n   Do: smaller.\n   Type: shardkit convert\n" in text
    assert "Gives: 200 samples/s, 2.00 times as many." in text
    assert text.endswith("Use\n  b")


def test_the_line_of_code_can_be_run(path: Path) -> None:
    steps = [shardkit.RandomResizedCrop(16, scale=(0.5, 1.0)), shardkit.RandomHorizontalFlip()]
    loader = Loader(path, batch_size=8, shuffle=True, transforms={"image": steps}, threads=2)
    line = code_line(loader, {"threads": 3})
    again = eval(line, {"shardkit": shardkit, "Loader": Loader})
    assert again.threads == 3
    assert again.dataset.options == loader.dataset.options
    assert code_line(again, {}) == line
    processes = code_line(loader, {"workers": 2})
    assert processes.startswith("DataLoader(StreamingDataset(")
    assert processes.endswith("batch_size=None, num_workers=2, persistent_workers=True)")
    assert "threads" not in processes
    bucket = shardkit.Bucket(8, 4)
    assert "batching=shardkit.Bucket(" in code_line(
        loader, {"batching": bucket, "batch_size": None}
    )


def test_crops_of_jpegs_without_the_extension_are_told_what_it_gives(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {"read": (0.4, 0.4), "decode": (0.6, 0.6)}
    made = case(path, run(100, 1, stages), run(100, 0, stages))
    assert findings.extension(made) is None
    monkeypatch.setattr(findings, "MISSING", "it was not built")
    found = findings.extension(made)
    assert found is not None
    assert found.rate == pytest.approx(100 / 0.6)  # a third of the time for what took 0.6
    assert "it was not built" in found.seen
    assert "gcc" in found.do
    plain = {"transforms": None}
    assert findings.extension(case(path, run(100), run(100, 0), plain)) is None
    with shardkit.create(tmp_path / "png", "wds", {"image": shardkit.Image()}) as writer:
        for _ in range(8):
            writer.write({"image": encoded(photo(size=(24, 24)), "PNG")})
    assert findings.extension(case(tmp_path / "png", run(100), run(100, 0))) is None
