"""Tables of files: their names in one piece, and columns that may lie in temporary files."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import ConvertOptions, SourceError
from shardkit.conversion.run import prepare
from shardkit.helpers import mapped
from shardkit.sources import file_table, image_folder
from shardkit.sources.file_table import GrowingNames, Names
from tests.conftest import write_images
from tests.sources.real import cases, refused

FILE_NAMES = st.lists(st.binary(max_size=12)).map(
    lambda names: [name.replace(b"\0", b"").decode("utf-8", "surrogateescape") for name in names]
)


@given(FILE_NAMES, st.data())
def test_names_come_back(names, data):
    at = data.draw(st.lists(st.integers(0, max(len(names) - 1, 0)), max_size=9 if names else 0))
    growing = GrowingNames()
    for start in range(0, len(names), 3):
        growing.extend(names[start : start + 3])
    whole = growing.names()
    for few in (file_table.FEW, 0):
        found = pickle.loads(pickle.dumps(whole))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_table, "FEW", few)
            assert list(found) == [found[n] for n in range(len(names))] == names
            assert list(found.take(np.array(at, np.int64))) == [names[n] for n in at]
            assert list(found.take(np.arange(len(names))[1:])) == names[1:]


def test_a_part_of_names_takes_its_own_bytes_in_a_pickle_and_zero_bytes_are_refused():
    names = Names.of([f"{n:06d}.jpg" for n in range(10_000)])
    assert names[3] == "000003.jpg"
    for numbers in (np.arange(5000, 5010), np.array([7, 3])):
        assert len(pickle.dumps(names.take(numbers))) < 1000
    refused(SourceError, "zero byte", Names.of, ["a", "b\0c"])


@pytest.mark.parametrize("kind", ["images", "texts"])
@cases("options", {}, {"shuffle": True, "seed": 5}, {"split": "train=0.7,val=0.3", "limit": 20})
def test_a_plan_from_temporary_files_is_the_same(tmp_path, monkeypatch, kind, options):
    source = write_images(tmp_path / "in", classes=3, each=9)
    if kind == "texts":
        for path in [*source.rglob("*.*")]:
            path.write_text(path.name)
            path.rename(path.with_suffix(".txt"))
            (path.parent / f"{path.stem}.v2.text").write_text("x")
    else:
        image = next(source.rglob("*.*"))
        for name in ("a.b.png", "a_b.png", "a_b.jpg"):
            (image.parent / name).write_bytes(image.read_bytes())
        (image.parent / "a_b.txt").write_text("beside")

    def plan():
        asked = ConvertOptions.of(shard_size=4096, **options)
        made = prepare(source, "wds", tmp_path / "out", asked)
        parts = [pickle.loads(pickle.dumps(task.reading())).source for task in made.tasks]
        samples = [[(s.original(n, ""), s[n]) for n in range(len(s))] for s in parts]
        return [made.job, made.describe(), samples]

    expected = plan()
    monkeypatch.setattr(mapped, "MAX_IN_MEMORY", 50)
    monkeypatch.setattr(mapped, "PIECE", 7)
    for module in (file_table, image_folder):
        monkeypatch.setattr(module, "FEW", 0)
    assert plan() == expected
    assert len(expected[2]) > 1
