"""What the first part of a conversion lists, the others load: `--part` without listing N times."""

import contextlib
import os
import random
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import xxhash

import shardkit
from shardkit.conversion import part_listing
from shardkit.conversion.partial import LISTING, PLAN
from shardkit.conversion.run import prepare
from shardkit.errors import DamagedError, OutputError, SampleError, ShardkitError, ShardkitWarning
from shardkit.helpers import mapped
from shardkit.helpers.part_of import PartOf
from shardkit.options import ConvertOptions
from shardkit.sources import packed_names
from shardkit.testing import make_audio, make_image
from tests.conftest import examples, files_of, write_images
from tests.conversion.conftest import raised
from tests.conversion.part_kills import Forks, wait_for
from tests.conversion.test_part_lock import no_locks
from tests.conversion.test_parts import convert
from tests.sources.test_text import put

HEADER = 40  # bytes before it: digests and a length
NASTY = [0, 1, 46, 47, 127, 128, 255]


_hearers = []


def _hear(event, args):
    wanted = _hearers and event in ("os.scandir", "os.listdir", "open")
    if wanted and isinstance(args[0], str | bytes | os.PathLike):
        _hearers[-1].append((event, Path(os.path.abspath(os.fsdecode(args[0])))))


sys.addaudithook(_hear)


@contextlib.contextmanager
def hearing():
    """What Python lists and opens meanwhile."""
    _hearers.append([])
    try:
        yield _hearers[-1]
    finally:
        _hearers.pop()


def lists(source, act):
    """How often a folder of the source is listed meanwhile."""
    with hearing() as heard:
        act()
    return sum(event != "open" and path.is_relative_to(source) for event, path in heard)


def lists_as(part, source, out, **options):
    """How often a part of a conversion lists the source."""
    return lists(source, lambda: convert(source, out, part, **options))


def listing_at(out):
    return out.with_name(f"{out.name}.partial") / PLAN / LISTING


def splits(root):
    """With sidecars, keys that need telling apart, a folder that is no class, and odd names."""
    for split in ("train", "val"):
        write_images(root / split, classes=2, each=4, kilobytes=2)
    for number in range(3):
        (root / f"train/class0/00{number}.txt").write_text("text")
    shutil.copy(root / "train/class1/000.jpg", root / "train/class1/000.more.jpg")
    shutil.copy(root / "train/class1/000.jpg", root / "train/class1/000.jpeg")
    (root / "train/class1/below").mkdir()
    odd = os.path.join(os.fsencode(root / "train/class1/below"), b"caf\xe9 \n.jpg")
    shutil.copy(root / "val/class0/000.jpg", odd)  # no key that can be stored
    (root / "train/notes.doc").write_text("x")


def flat(root):
    for number in range(9):
        put(root / f"{number:03}.jpg", make_image(number) + bytes(2000))


def audio(root):
    for label in ("bark", "song"):
        for number in range(5):
            put(root / f"{label}/{number}.wav", make_audio(number, samples=1500))


CASES = {
    "splits": (splits, {"on_error": "skip"}),
    "flat": (flat, {"shuffle": True, "limit": 8, "split": "a=0.5,b=0.5"}),
    "fields": (splits, {"fields": ["image"], "split": "none", "on_error": "skip"}),
    "audio": (audio, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_after_the_first_do_not_list(tmp_path, out, case):
    make, options = CASES[case]
    source, moved = tmp_path / "in", tmp_path / "elsewhere"
    make(source)
    whole = convert(source, tmp_path / "whole", **options)
    assert lists_as("1/3", source, out, **options)
    for part in ("1/3", "2/3"):
        assert not lists_as(part, source, out, **options)
    shutil.move(source, moved)  # as another machine may see it
    results = []
    assert not lists(moved, lambda: results.append(convert(moved, out, "3/3", **options)))
    assert files_of(out) == files_of(tmp_path / "whole")
    (result,) = results
    assert (result.notes, result.ignored) == (whole.notes, whole.ignored)
    assert not out.with_name("out.partial").exists()


def test_a_long_listing_is_stored_and_loaded_by_pieces(tmp_path, out, monkeypatch):
    """And lies in temporary files."""
    source = tmp_path / "in"
    splits(source)
    convert(source, tmp_path / "whole", on_error="skip")
    monkeypatch.setattr(mapped, "MOST", 64)
    monkeypatch.setattr(mapped, "PIECE", 3)
    monkeypatch.setattr(packed_names, "FEW", 0)
    convert(source, out, "1/2", on_error="skip")
    assert not lists_as("2/2", source, out, on_error="skip")
    assert files_of(out) == files_of(tmp_path / "whole")


def test_the_plan_alone_loads_as_well_and_stores_nothing(source, tmp_path, out):
    def plan():
        prepare(source, "wds", out, ConvertOptions(shard_size="8kB"), part=PartOf(2, 2))

    assert lists(source, plan)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    convert(source, out, "1/2")
    assert not lists(source, plan)


@pytest.mark.parametrize(
    "options",
    [{"where": "label == 0"}, {"dedup": "exact"}, {"to": "parquet"}],
    ids=["where", "dedup", "text"],
)
def test_other_sources_are_listed_by_each_part(source, tmp_path, out, options):
    if "to" in options:
        source = tmp_path / "texts"
        for number in range(4):
            put(source / f"{number}.txt", "words " * 3000)
    for part in ("1/2", "2/2"):
        assert lists_as(part, source, out, **options)
        assert not listing_at(out).exists()
    convert(source, tmp_path / "whole", **options)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_file_that_changed_or_went_is_named(source, out):
    convert(source, out, "1/2")
    for path in source.rglob("*.jpg"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + b"x")
    error = raised(SampleError, "the file changed", convert, source, out, "2/2")
    assert Path(error.where["path"]).parent.parent == source


def test_another_set_of_files_is_listed_again_and_told(source, tmp_path, out):
    convert(source, out, "1/2")
    (source / "class1/.hidden").touch()  # another time of its folder
    assert lists_as("1/2", source, out)
    assert not lists_as("1/2", source, out)
    others = [shutil.copytree(source, tmp_path / f"other{n}") for n in range(3)]
    (others[0] / "class1/007.jpg").unlink()
    (others[1] / "class0/new.jpg").write_bytes(b"x")
    (others[2] / "class0").rename(others[2] / "class2")
    for other in others:
        raised(OutputError, "the source has changed", convert, other, out, "2/2", on_error="skip")


def test_inodes_of_another_machine_tell_nothing(source, tmp_path, out, whole, monkeypatch):
    """A copy has the names, sizes and times of its files, and was made later."""
    convert(source, out, "1/2")
    copy = shutil.copytree(source, tmp_path / "copy")
    raised(SampleError, "another file of that name", convert, copy, out, "2/2")
    monkeypatch.setattr(part_listing, "machine", lambda: "another boot")
    assert not lists_as("2/2", copy, out)
    assert files_of(out) == whole


def _planned(source, out):
    """What a second part would do; it reads all of its samples."""
    options = ConvertOptions(shard_size="8kB", workers=0)
    plan = prepare(source, "wds", out, options, part=PartOf(2, 2))
    for split in plan.splits:
        samples = [document.sample for document in split.source.documents()]
        assert all(isinstance(sample, dict | ShardkitError) for sample in samples)
    return plan.job


def harmed(data, dice, change, start=0):
    """With one byte changed, or three."""
    data = bytearray(data)
    for _ in range(dice.choice([1, 1, 3])):
        at = dice.randrange(start, len(data))
        data[at] = change(data[at])
    return bytes(data)


def test_a_damaged_listing_is_named_or_does_no_harm(source, out, whole):
    convert(source, out, "1/2")
    path, job = listing_at(out), _planned(source, out)
    stored, dice = path.read_bytes(), random.Random(20)
    damaged = 0
    for _ in range(60):
        data = harmed(stored, dice, lambda byte: byte ^ 1 << dice.randrange(8))
        path.write_bytes(data[: dice.randrange(len(data))] if dice.random() < 0.2 else data)
        with contextlib.suppress(ShardkitError):
            assert _planned(source, out) == job  # what is damaged is not asked for
            continue
        error = raised(DamagedError, "the stored listing of the source is", _planned, source, out)
        assert error.where["path"] == path
        damaged += 1
    assert damaged > 40
    path.unlink()
    convert(source, out, "2/2")
    assert files_of(out) == whole


def with_digest(data):
    return data[:16] + xxhash.xxh3_128_digest(data[32:]) + data[32:]


def test_a_listing_of_a_stranger_leads_nowhere_else(source, tmp_path, out):
    """X3: whoever made it has made its digest as well."""
    (source / "class0/000.txt").write_text("x")
    (tmp_path / "001.jpg").write_bytes(b"secret")
    convert(source, out, "1/2")
    path = listing_at(out)
    whole, dice = path.read_bytes(), random.Random(20)
    assert with_digest(whole) == whole
    hostile = {
        b"class0\0": b"../../\0", b"class1\0": b"/class\0", b"000.jpg\0": b"/../../\0",
        b"001.jpg\0": b"../.jpg\0", b"002.jpg\0": b"00/.jpg\0", b"003.jpg\0": b".03.jpg\0",
        b"004.jpg\0": b"0040jpg\0", b"005.jpg\0": b"005.j\\g\0", b"006.jpg\0": b"006.j\0g\0",
        b'"root": ""': b'"root":"/"', b'"image"': b'"audio"', b'"split": ""': b'"split": 77',
        b'"Int"': b'"Any"', b'"class1"]': b'"class"  ', b'"began": ': b'"began":-',
    }  # fmt: skip
    for old, new in hostile.items():
        assert old in whole
        assert len(old) == len(new)
        path.write_bytes(with_digest(whole.replace(old, new)))
        raised(DamagedError, "the stored listing of the source is damaged", _planned, source, out)
    inside = (source, out.with_name("out.partial"))
    for _ in range(examples(50)):
        path.write_bytes(with_digest(harmed(whole, dice, lambda _: dice.choice(NASTY), HEADER)))
        with hearing() as heard, contextlib.suppress(ShardkitError):
            _planned(source, out)
        opened = [p for event, p in heard if event == "open" and p.is_relative_to(tmp_path)]
        assert all(any(name.is_relative_to(one) for one in inside) for name in opened)


def test_a_link_in_place_of_a_listing_is_not_read(source, tmp_path, out):
    convert(source, out, "1/2")
    folder = listing_at(out).parent.parent
    shutil.move(folder, tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    raised(OutputError, "created by somebody else", convert, source, out, "2/2")


@pytest.mark.parametrize(("look", "part"), [("lstat", "1/2"), ("listdir", None)])
def test_a_working_folder_that_another_part_removes_meanwhile(
    source, tmp_path, monkeypatch, look, part
):
    """As a part does that has listed a source of which no listing can be stored."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    module = Path if look == "lstat" else os
    real = getattr(module, look)

    def late(path, *rest):
        if os.fspath(path) == str(partial) and not [*os.scandir(partial)]:
            monkeypatch.undo()
            partial.rmdir()
        return real(path, *rest)

    monkeypatch.setattr(module, look, late)
    convert(source, out, part)
    assert getattr(module, look) is real  # it was removed


# Notes which folders of the source it lists, and waits at the second, while there is a gate. The
# first may be one that is only looked into, before it is known which part lists.
_LISTS = """
import time
seen = set()
def hear(event, args):
    if event == "os.scandir" and str(args[0]).startswith({classes!r}):
        seen.add(str(args[0]))
        with open({log!r} + str(os.getpid()), "a") as file:
            print(args[0], file=file)
        while len(seen) > 1 and os.path.exists({gate!r}):
            time.sleep(0.01)
sys.addaudithook(hear)
"""


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.large)])
def test_of_parts_that_begin_together_one_lists(tmp_path, killed):
    """The second waits for the one that lists, and lists itself only when that one is killed."""
    source, out = write_images(tmp_path / "in", classes=5, each=4, kilobytes=2), tmp_path / "out"
    convert(source, tmp_path / "whole")
    gate, log = tmp_path / "gate", tmp_path / "log-"
    gate.touch()
    first = _LISTS.format(classes=f"{source}/class", log=str(log), gate=str(gate))
    words = ["convert", source, "--to", "wds", "-o", out, "--shard-size", "8kB", "--workers", 0]

    def listed(run):
        path = Path(f"{log}{run.child}")
        return len({*path.read_text().splitlines()}) if path.exists() else 0

    with Forks(tmp_path) as forks:
        one = forks.start(*words, "--part", "1/2", first=first)
        wait_for(lambda: listed(one) == 2)
        two = forks.start(*words, "--part", "2/2", first=first)
        wait_for(lambda: "another part lists the source" in two.said())
        if killed:
            one.kill()
            one.wait()
        gate.unlink()
        code, said = two.wait()
        assert code == 0, said
        again = forks.start(*words, "--part", "1/2", first=first) if killed else one
        assert again.wait()[0] == 0
    assert [listed(run) == 5 for run in (again, two)] == [not killed, killed]
    shardkit.merge(out)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_part_that_fails_leaves_nothing_behind(source, tmp_path):
    (source / "class2").mkdir()
    for options in ({}, {"include_class": ("x",)}):
        with pytest.raises(ShardkitError):
            convert(source, tmp_path / "out", "1/2", **options)
    more, whole = write_images(tmp_path / "more"), tmp_path / "whole"
    convert(more, whole)
    raised(OutputError, "holds another dataset", convert, more, whole, "1/2", shard_size="9kB")
    assert convert(more, whole, "1/2").already_complete
    assert {path.name for path in tmp_path.iterdir()} == {"in", "more", "whole"}


def test_without_locks_the_first_to_store_is_loaded(source, out, whole, monkeypatch):
    no_locks(monkeypatch, "ENOLCK")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardkitWarning)
        assert lists_as("1/2", source, out)
        assert not lists_as("2/2", source, out)
        shardkit.merge(out)
    assert files_of(out) == whole
