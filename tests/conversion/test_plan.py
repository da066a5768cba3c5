"""Where tasks begin and end: no core waits, no shard is too large, and few blocks are not full."""

import heapq
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit import ConvertOptions, ImageOptions, TextOptions
from shardkit.conversion import publish, work
from shardkit.conversion.locks import PartLock
from shardkit.conversion.plan import make_plan
from shardkit.conversion.target import Target
from shardkit.metadata.recipe import Recipe
from shardkit.schema import Schema, Text
from shardkit.sources import open_sources
from shardkit.sources.base import Document, Stream
from shardkit.sources.text.scan import RANGE
from tests.conftest import files_of, write_images

if TYPE_CHECKING:
    pass

WORDS = "one two three four five six seven eight nine ten "


class LongFile(Stream):
    """A corpus of so many bytes, cut as a file of lines is; only planning ever looks into it."""

    reads_text = True
    unique_keys = True

    def __init__(self, size, parts=None):
        super().__init__()
        self.schema = Schema({"text": Text()})
        self._size = size
        self._parts = np.arange(-(-size // RANGE)) if parts is None else parts

    def __len__(self):
        return len(self._parts)

    def sizes(self):
        return np.minimum(RANGE, self._size - self._parts * RANGE)

    def select(self, parts):
        return LongFile(self._size, self._parts[parts])

    def fingerprint(self):
        return None

    def documents(self):
        for part in self._parts:
            text = WORDS * 20
            yield Document(f"{part}", {"__key__": f"{part}", "text": text}, len(text))


def plan_of(size, gpt2, *, to="arrow", seq_len=1024):
    text = TextOptions(tokenizer=gpt2, seq_len=seq_len)
    return planned({"": LongFile(size)}, to, ConvertOptions(text=text))


def planned(sources, to, options=None):
    options = options or ConvertOptions()
    recipe, target = Recipe.of(to, options), Target(Path("out"), to)
    if target.one_shard(options.bounded):
        recipe = replace(recipe, shard_size=None)
    return make_plan(recipe, sources, target)


def simulated(plan, workers):
    """When the first of equally fast workers has nothing to do any more, and when the last.

    In shares of the time that all of them would take if work could be cut at will.
    """
    free, sizes = [0] * workers, [task.size for task in plan.tasks]
    for size in sizes:  # whoever is free first gets the next task, as in `pool.py`
        heapq.heappush(free, heapq.heappop(free) + size)
    ideal = sum(sizes) / workers
    return min(free) / ideal, max(free) / ideal


@pytest.mark.parametrize(
    ("size", "workers", "slack", "format"),
    [
        (60 * 10**6, 2, 0.05, "arrow"),
        (60 * 10**6, 4, 0.12, "megatron"),
        (10**9, 16, 0.04, "arrow"),
        (10**9, 64, 0.15, "megatron"),
        (10**11, 64, 0.01, "arrow"),
    ],
)
def test_no_core_waits_long_whatever_there_is_to_tokenize(size, workers, slack, format, gpt2):
    plan = plan_of(size, gpt2, to=format, seq_len=None if format == "megatron" else 1024)
    idle, done = simulated(plan, workers)
    assert plan.bytes == size
    assert idle > 1 - 3 * slack
    assert done < 1 + slack
    assert len(plan.tasks) < 64 + 300 + size / (100 * 10**6)


def test_large_corpora_begin_with_tasks_of_a_shard_each_that_nobody_has_to_join(gpt2):
    joined = [task.joined for task in plan_of(10**11, gpt2).tasks]
    first = joined.index(True)
    assert first > 100
    assert all(joined[first:])
    assert plan_of(1000, gpt2).tasks[0].joined is False


def test_less_than_one_block_in_a_hundred_ends_with_its_task(gpt2):
    for seq_len in (512, 131072):
        blocks = 300 * 10**6 / 4 / seq_len
        assert len(plan_of(300 * 10**6, gpt2, seq_len=seq_len).tasks) < max(blocks / 100, 2)


@pytest.fixture
def small_tasks(monkeypatch):
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 2_000)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_BLOCKS", 1)
    monkeypatch.setattr("shardkit.sources.text.scan.RANGE", 1_000)


@pytest.mark.parametrize("format", ["wds", pytest.param("beton", marks=pytest.mark.large)])
def test_shards_of_pieces_keep_to_their_size(format, gpt2, tmp_path, monkeypatch, small_tasks):
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 20_000)
    source = tmp_path / "corpus.txt"
    draw = random.Random(0)
    lines = (draw.sample(range(10**6), draw.randrange(40)) for _ in range(2500))
    source.write_text("".join(f"{' '.join(map(str, line))}\n" for line in lines))
    options = {"text": TextOptions(tokenizer=gpt2, seq_len=128), "workers": 0}
    one = shardkit.convert(source, format, tmp_path / "one", shard_size="1GB", **options)
    shardkit.convert(source, format, tmp_path / "out", shard_size=one.bytes // 3, **options)
    assert one.splits[""].shards == 1
    with shardkit.open(tmp_path / "out") as dataset:
        sizes = [dataset.shard_path(number).stat().st_size for number in range(dataset.shards)]
        tasks = {sample["__key__"].partition("/")[0] for sample in dataset}
    assert len(sizes) in (4, 5)
    assert max(sizes) <= one.bytes // 3
    if format != "beton":  # whose pages may make a joined shard larger than its pieces
        assert len(tasks) > 12
        assert min(sizes) > 0.6 * max(sizes)
    assert shardkit.verify(tmp_path / "out", against=source).problems == []


def joined(photos, out, format="wds", **options):
    image = ImageOptions(resize=8)
    options = {"workers": 0, **options}
    shardkit.convert(photos, format, out, shard_samples=10, image=image, **options)


@pytest.mark.parametrize("format", ["wds", "lmdb", "beton"])
def test_shards_of_pieces_have_as_many_samples_as_asked(format, tmp_path, small_tasks):
    photos = write_images(tmp_path / "in", classes=1, each=23, kilobytes=3)
    options = ConvertOptions(shard_samples=10, image=ImageOptions(resize=8))
    plan = planned(open_sources(photos), format, options)
    assert sum(task.joined for task in plan.tasks) > 6
    joined(photos, tmp_path / "out", format)
    with shardkit.open(tmp_path / "out") as dataset:
        assert [dataset.extent(n)[0] for n in range(dataset.shards)] == [10, 10, 3]


@pytest.mark.parametrize(("where", "dies", "calls"), [(work, "joined", 1), (publish, "named", 1)])
def test_a_run_that_died_while_joining_goes_on(where, dies, calls, tmp_path, small_tasks):
    """Some shards are joined by then, or all, and some have their names."""
    photos = write_images(tmp_path / "in", classes=1, each=23, kilobytes=3)
    joined(photos, tmp_path / "reference")
    real, allowed = getattr(where, dies), iter(range(calls))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            where, dies, lambda *a, **kw: real(*a, **kw) if next(allowed, -1) >= 0 else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            joined(photos, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again, join = [], work.joined
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "joined", lambda *a: (again.append(a), join(*a))[1])
        joined(photos, tmp_path / "out")
    assert len(again) == (2 if dies == "joined" else 0)  # of three shards
    assert files_of(tmp_path / "out") == files_of(tmp_path / "reference")


def test_workers_join_shards_as_one_process_does(tmp_path, small_tasks):
    photos = write_images(tmp_path / "in", classes=1, each=23, kilobytes=3)
    joined(photos, tmp_path / "reference")
    joined(photos, tmp_path / "workers", workers=2)
    for part in ("1/2", "2/2"):
        joined(photos, tmp_path / "parts", part=part)
    shardkit.merge(tmp_path / "parts")
    for made in ("workers", "parts"):
        assert files_of(tmp_path / made) == files_of(tmp_path / "reference")


def test_a_run_that_has_lost_its_claim_joins_no_more(tmp_path, small_tasks, monkeypatch):
    photos = write_images(tmp_path / "in", classes=1, each=23, kilobytes=3)

    def results():
        return list(tmp_path.glob("out.partial/tasks/joined-*"))

    monkeypatch.setattr(PartLock, "check", lambda _: 1 / 0 if results() else None)
    with pytest.raises(ZeroDivisionError):
        joined(photos, tmp_path / "out")
    assert len(results()) == 1  # of three


def test_resizing_one_large_shard_is_work_for_many(tmp_path, small_tasks):
    photos = write_images(tmp_path / "in", classes=1, each=40, kilobytes=3)
    shardkit.convert(photos, "wds", tmp_path / "large", workers=0)
    sources = open_sources(tmp_path / "large")
    for format in ("wds", "beton"):
        plan = planned(sources, format, ConvertOptions(image=ImageOptions(resize=8)))
        _, done = simulated(plan, 4)
        assert len(plan.tasks) > 30
        assert done < 1.1
    assert len(planned(sources, "wds").tasks) == 1  # nothing but copying


def test_small_batches_of_pieces_become_large_ones(gpt2, tmp_path, small_tasks):
    source = tmp_path / "corpus.txt"
    source.write_text("".join(f"{number} {WORDS}\n" for number in range(700)))
    for to in ("arrow", "parquet"):
        text = TextOptions(tokenizer=gpt2)
        shardkit.convert(source, to, tmp_path / to, text=text, workers=0)
    with pa.ipc.open_file(tmp_path / "arrow/shard-000000.arrow") as file:
        assert file.num_record_batches == 1
    assert pq.ParquetFile(tmp_path / "parquet/shard-000000.parquet").num_row_groups == 1
