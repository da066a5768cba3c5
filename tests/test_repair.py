"""`shardkit verify --repair`: damaged files become what they were, and all others stay."""

import errno
import gc
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.conversion.existing import partial_of
from shardkit.conversion.target import Target
from shardkit.errors import NotFoundError, OutputError, SampleError, StorageError, UsageError
from shardkit.formats import FORMATS, get_format
from shardkit.formats.base import Joins
from shardkit.metadata import manifest as manifests
from shardkit.metadata.manifest import Manifest, Splits
from shardkit.storage import fs
from shardkit.testing import make_image
from shardkit.verification.repair import Repair, RepairReport
from shardkit.verification.work import Meter
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images
from tests.conversion.deaths import Dying, died_at, logged
from tests.test_cli import run
from tests.test_verify import as_earlier_versions_wrote_it, make

State = dict[str, tuple[int, int, bytes]]


def state(folder: Path) -> State:
    """Time, inode and bytes of every file."""
    return {
        path.relative_to(folder).as_posix(): (about.st_mtime_ns, about.st_ino, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for about in [path.stat()]
    }


def named(dataset: Path) -> list[Path]:
    """All files that the manifests of a dataset name."""
    manifest = manifests.load_any(dataset)
    folder = manifests.folder_of(manifests.manifest_path(dataset))
    own = [folder / file.name for file in manifest.files]
    if isinstance(manifest, Splits):
        return own + [path for name in manifest.splits for path in named(dataset / name)]
    assert isinstance(manifest, Manifest)
    return own + [folder / file.name for file in manifest.all_files()]


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": flip,
    "cut": cut,
    "empty": lambda path, chance: path.write_bytes(b""),
    "lose": lambda path, chance: path.unlink(),
    "pipe": lambda path, chance: (path.unlink(), os.mkfifo(path)),
    "lengthen": lambda path, chance: path.write_bytes(path.read_bytes() + b"x"),
}


def is_repaired(dataset: Path, damage: Callable[[], object], giver: Any, **options: Any) -> None:
    """Damage it, and repair it: all is as it was, files that were not damaged untouched."""
    folder = manifests.folder_of(manifests.manifest_path(dataset))
    whole = state(folder)
    damage()
    after = files_of(folder)
    damaged = {name for name, (*_, data) in whole.items() if after.get(name) != data}
    seen: list[Any] = []
    report = shardkit.verify(dataset, repair=giver, progress=seen.append, **options)
    assert seen
    assert report.repair is not None
    assert report.sound, (report.problems, report.repair)
    assert not report.repair.left
    found = state(folder)
    assert found.keys() == whole.keys()
    for name, (*entry, data) in whole.items():
        assert found[name][2] == data, name
        assert ([*found[name][:2]] == entry) == (name not in damaged), name
    assert {Path(file.path).name for file in report.repair.files} == {
        Path(name).name for name in damaged
    }


def each_is_repaired(dataset: Path, givers: Sequence[Path], **options: dict[str, Any]) -> None:
    """Each file, damaged in some way; by itself and with the next in turn, from each giver."""
    chance = random.Random(dataset.name)
    paths = named(dataset)
    for number, path in enumerate(paths):
        giver = givers[(number + number // len(givers)) % len(givers)]
        damaged = {path: chance.choice([*DAMAGES])}
        if number % 2 and path != paths[0]:
            damaged[paths[0]] = chance.choice([*DAMAGES])
        print(f"{damaged}, repaired from {giver}")

        def damage(damaged: dict[Path, str] = damaged) -> None:
            for path, name in damaged.items():
                DAMAGES[name](path, chance)

        is_repaired(dataset, damage, giver, **options.get(giver.name, {}))


def repaired(dataset: Path, source: Any, **options: Any) -> RepairReport:
    found = shardkit.verify(dataset, repair=source, **options).repair
    assert found is not None
    return found


def why_left(dataset: Path, source: Any, **options: Any) -> str:
    """Why its one damaged file cannot be repaired."""
    (left,) = repaired(dataset, source, **options).left
    return left.found or ""


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "wds", "lmdb", "beton"))
def test_each_file(format, single, tmp_path, large):
    if single and not FORMATS[format].single:
        return  # it has no such output
    source = write_images(tmp_path / "source")
    if large:  # of several pieces
        padding = random.Random(7).randbytes(3 << 20)
        (source / "class1/large.jpg").write_bytes(make_image(7) + padding)
    (tmp_path / "out").mkdir()
    name = "train" + FORMATS[format].suffixes[0] * single
    beside = ("dali", "energon", "wids") if format == "wds" and large and not single else ()
    options = {"shard_samples": None if single else 5, "beside": beside}
    out = make(source, format, tmp_path / "out" / name, **options)
    same = Path(shutil.copytree(out.parent, tmp_path / "same")) / name
    for turn in range(2 if single and large else 1):  # which has one or two files
        givers = [source, same]
        each_is_repaired(out, givers[turn:] + givers[:turn])
    chance, paths = random.Random(format), named(out)
    sizes = [path.stat().st_size for path in paths]
    for number in range(10 if large and not single else 0):  # 20 bits, of which some lie in one
        chosen = chance.choices(paths, sizes if number % 2 else None, k=2)

        def flip_two(chosen=chosen):
            for path in chosen:
                flip(path, chance)

        is_repaired(out, flip_two, [source, same][number % 2])
    is_repaired(out, partial(fs.remove, named(out)[-1]), source)


def test_what_earlier_versions_and_create_made_and_single_shards(tmp_path, images):
    """Checksums of whole files; without a recipe, from a copy alone."""
    out = make(images, "wds", tmp_path / "out")
    whole = state(out)
    for number in (0, 1):
        path = out / f"shard-{number:06d}.tar"
        path.write_bytes(path.read_bytes()[:-1])
    assert shardkit.verify(out / "shard-000001.tar", repair=images).sound
    changed = {name for name, entry in state(out).items() if entry[2] != whole[name][2]}
    assert changed == {"shard-000000.tar"}
    assert not repaired(out, images).left
    as_earlier_versions_wrote_it(out)
    each_is_repaired(out, [images, Path(shutil.copytree(out, tmp_path / "copy"))])
    texts = tmp_path / "texts"
    with shardkit.create(texts, "wds", {"text": shardkit.Text()}, shard_samples=3) as writer:
        for number in range(8):
            writer.write({"text": f"text {number}"})
    each_is_repaired(texts, [Path(shutil.copytree(texts, tmp_path / "texts copy"))])
    (texts / "shard-000000.tar").unlink()
    assert "does not record which tasks" in why_left(texts, images)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    import tokenizers

    model = tokenizers.models.WordLevel({"[UNK]": 0, "alpha": 1, "beta": 2}, "[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("format", few(sorted(FORMATS), "megatron"))
def test_tokens(format, tmp_path, tokenizer):
    """Documents, and blocks of several; the copy of the tokenizer comes from a copy alone."""
    chance = random.Random(format)
    folder = tmp_path / "text"
    folder.mkdir()
    lines = (" ".join(chance.choices(["alpha", "beta", "stone"], k=40)) for _ in range(90))
    (folder / "a.txt").write_text("\n".join(lines))
    for seq_len in (None,) if format == "megatron" else (None, 16):  # it has no blocks
        text = shardkit.TextOptions(tokenizer=str(tokenizer), seq_len=seq_len)
        out = make(folder, format, tmp_path / f"out{seq_len}", shard_samples=60, text=text)
        copy = Path(shutil.copytree(out, tmp_path / f"copy{seq_len}"))
        for number, path in enumerate(named(out)):
            giver = (folder, copy)[number % 2]
            if path.name == "tokenizer.json":
                giver, data = copy, path.read_bytes()
                path.unlink()
                (left,) = repaired(out, folder).left
                assert left.where["path"] == path
                path.write_bytes(data)
            is_repaired(out, path.unlink, giver)


def shout(sample: dict[str, Any]) -> dict[str, Any] | None:
    if sample["__key__"].endswith("002"):
        return None
    return {**sample, "note": sample["__key__"].upper()}


@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "wds"))
def test_splits_lists_and_transforms(format, tmp_path, large):
    source = write_images(tmp_path / "source", each=9)
    (source / "class1" / "bad.jpg").write_bytes(b"no image")
    image = (source / "class1/001.jpg").read_bytes()
    (source / "class1" / "sp ace.jpg").write_bytes(image[:-20] + bytes(20))
    options = {"transform": shout, "on_error": "skip", "safe_keys": True}
    options |= {"split": "train=0.7,val=0.3", "shuffle": True, "seed": 3}
    if format == "wds" and large:
        options["beside"] = ("dali", "energon", "wids")
    out = make(source, format, tmp_path / "out", **options)
    same = Path(shutil.copytree(out, tmp_path / "same"))
    each_is_repaired(out, [source, same], source={"transform": shout})


JOINING = [name for name in IMAGE_FORMATS if isinstance(get_format(name), Joins)]


@pytest.mark.parametrize("format", few(JOINING, "wds"))
def test_shards_that_several_tasks_made(format, tmp_path, monkeypatch):
    """And are joined."""
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 5_000)
    source = write_images(tmp_path / "source", each=9, kilobytes=2)
    size = None if FORMATS[format].one_shard else 20_000
    image = shardkit.ImageOptions(resize=4)
    options = {"shard_samples": None, "shard_size": size, "image": image}
    out = make(source, format, tmp_path / "out", **options)
    assert any(one.tasks[0] < one.tasks[1] for one in manifests.load(out).shards)
    each_is_repaired(out, [source])


def test_a_source_that_has_changed_is_told(tmp_path):
    """What can be rebuilt is."""
    source = write_images(tmp_path / "source", each=9)
    out = make(source, "wds", tmp_path / "out")
    shards = [path for path in named(out) if path.suffix == ".tar"]
    whole = shards[1].read_bytes()
    for path in shards[:2]:
        path.write_bytes(path.read_bytes()[:-1] + b"x")  # in no sample
    changed = source / "class0/002.jpg"
    changed.write_bytes(changed.read_bytes()[:-40] + b"x" + changed.read_bytes()[-39:])
    damaged = shards[0].read_bytes()
    report = shardkit.verify(out, repair=source)
    assert report.repair is not None
    assert [Path(file.path) for file in report.repair.files] == shards[1:2]
    assert [path.read_bytes() for path in shards[:2]] == [damaged, whole]
    (left,), (problem,) = report.repair.left, report.problems
    assert left.where["path"] == problem.where["path"] == shards[0]
    assert left.found == "the rebuilt shard differs from the original"
    errors = tmp_path / "skipped/__shardkit__/errors.jsonl"
    (source / "class0/bad.jpg").write_bytes(b"no image")
    make(source, "wds", tmp_path / "skipped", on_error="skip")
    errors.write_bytes(b"")
    (source / "class0/bad.jpg").unlink()
    assert "neither the source nor the shards give" in why_left(tmp_path / "skipped", source)
    changed.unlink()
    assert why_left(out, source).endswith("original; the source has changed")
    assert shards[0].read_bytes() == damaged
    assert not (tmp_path / "out.partial").exists()


def test_a_copy_that_is_none_or_is_damaged_as_well_is_refused(tmp_path):
    source = write_images(tmp_path / "source", each=9)
    out = make(source, "wds", tmp_path / "out")
    copies = {
        "the source has changed": make(out, "arrow", tmp_path / "few", limit=5),
        "rebuilt shard differs from the original": make(out, "wds", tmp_path / "2", shuffle=True),
    }
    path = out / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:700] + b"other" + path.read_bytes()[705:])
    same = Path(shutil.copytree(out, tmp_path / "same"))
    before = state(out)
    copies[f"{same / path.name} is damaged as well"] = same
    for said, copy in copies.items():
        assert said in why_left(out, copy)
    with pytest.raises(UsageError, match="cannot be repaired from itself"):
        shardkit.verify(out, repair=out)
    with pytest.raises(NotFoundError):
        shardkit.verify(out, repair=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is repaired, or compared with its source, by a single"):
        shardkit.verify(out, repair=source, part="1/2")
    assert state(out) == before


def test_links_are_not_written_through(tmp_path, images):
    out = make(images, "wds", tmp_path / "out", split="a=0.5,b=0.5")
    (out / "a").rename(tmp_path / "elsewhere")
    (out / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/shard-000000.tar").write_bytes(b"damaged")
    before = state(tmp_path)
    assert "leads through a symbolic link" in why_left(out, images)
    assert state(tmp_path) == before
    shard = out / "b/shard-000000.tar"
    data = shard.read_bytes()
    (tmp_path / "aside").write_bytes(b"damaged")
    shard.unlink()
    shard.symlink_to(tmp_path / "aside")
    repaired(out, images)
    assert shard.read_bytes() == data
    assert not shard.is_symlink()
    assert (tmp_path / "aside").read_bytes() == b"damaged"
    (tmp_path / "link").symlink_to(out)
    shard.write_bytes(b"damaged")
    repaired(tmp_path / "link/b", images)
    assert shard.read_bytes() == data


def test_two_runs_at_once(tmp_path, images):
    out, work = make(images, "wds", tmp_path / "out"), tmp_path / "out.partial"
    (out / "shard-000001.tar").unlink()

    def refuses(*commands):
        for command in (lambda: shardkit.verify(out, repair=images), *commands):
            with pytest.raises(OutputError, match="another run is working on this output"):
                command()

    with Repair(out, [shardkit.open(out)], images, None, None, Meter(None)):
        refuses(lambda: make(images, "wds", out, overwrite=True))
    assert not work.exists()
    assert not repaired(out, images).left
    (images / "class2/003.jpg").write_bytes(b"none")
    with pytest.raises(SampleError):
        make(images, "wds", out, overwrite=True, shard_samples=None, shard_size=5000)
    before = state(work)
    with pytest.raises(OutputError, match="there is an unfinished conversion to this dataset"):
        shardkit.verify(out, repair=images)
    assert state(work) == before
    conversion = partial_of(Target(out, "wds"))  # nobody is told to remove what another works at
    conversion.begin(conversion.job() or {}, resume=True)
    refuses(lambda: make(images, "wds", out, shard_samples=2))
    conversion.release()


@pytest.mark.parametrize("room", [1_000, 3_000, 20_000])
def test_a_full_disk(tmp_path, images, room):
    out = make(images, "wds", tmp_path / "out")
    for number in range(2):
        (out / f"shard-{number:06d}.tar").write_bytes(b"damaged")
    before = state(out)
    real, left = fs.NewFile.write, room

    def write(file, chunks):
        nonlocal left
        left -= sum(map(len, chunks))
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs.NewFile, "write", write)
        with pytest.raises(StorageError, match="the disk is full"):
            shardkit.verify(out, repair=images)
    assert not (tmp_path / "out.partial").exists()
    changed = {name for name, entry in state(out).items() if entry != before[name]}
    assert changed <= {"shard-000000.tar"}
    assert not repaired(out, images).left


def test_what_a_killed_repair_leaves_is_in_nobodys_way(tmp_path, images):
    out, work = make(images, "wds", tmp_path / "out"), tmp_path / "out.partial"
    for command in (
        lambda: shardkit.merge(out),
        lambda: make(images, "wds", out),
        lambda: make(images, "wds", out, part="1/2"),
        lambda: shardkit.verify(out, repair=images),
    ):
        (work / "dataset").mkdir(parents=True)
        (work / "job.json").write_text('{"repair": true}')
        before = state(out)
        command()
        assert not work.exists()
        assert state(out) == before


@pytest.fixture
def only_new_garbage():
    """What other tests have loaded is not looked through each time that garbage is collected."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a dead process closes nothing
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("only_new_garbage")
def test_a_repair_that_dies_anywhere(tmp_path, large):
    source = write_images(tmp_path / "source", classes=2, each=2)
    out = make(source, "wds", tmp_path / "out", shard_samples=2)
    same = Path(shutil.copytree(out, tmp_path / "same"))
    whole = files_of(out)
    ruined = ["shard-000001.tar", "__shardkit__/shard-000001.index.npy"][: 1 + large]

    for giver in (source, same) if large else (source,):

        def begin():
            shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
            for name in ruined:
                (out / name).write_bytes(b"damaged")

        run = partial(shardkit.verify, out, repair=giver)
        begin()
        before = state(out)
        log = logged(Dying, begin, run)
        last = {kind: at for at, kind in enumerate(log) if kind[0] != "sync"}
        # Before a change, and after a sync, there is what the change before it has left.
        changes = [at for at, kind in enumerate(log) if kind[0] != "sync"]
        moments = [(0, "before"), *((at, "after") for at in changes)]
        few = [(at, "after") for at in last.values()]
        for _ in died_at(moments if large else few, Dying, log, begin, run):
            found = state(out)
            assert found.keys() == whole.keys()
            for name, (*entry, data) in found.items():
                if name in ruined:
                    assert data in (b"damaged", whole[name])
                else:
                    assert (*entry, data) == before[name]
            gc.collect()
            assert not repaired(out, giver).left
            assert files_of(out) == whole
            assert not (tmp_path / "out.partial").exists()


# Repairs each dataset in a process of its own, which kills itself before its operation of that
# number on the disk. The processes are forks, so that shardkit is imported once.
KILLED = """
import itertools, os, signal, sys
import shardkit
from shardkit.storage import fs

def counted(operation, fatal, numbers):
    def wrapped(*arguments):
        if next(numbers) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments)
    return wrapped

source, *words = sys.argv[1:]
for out, fatal in zip(words[::2], words[1::2], strict=True):
    child = os.fork()
    if not child:
        numbers = itertools.count()
        for name in fs.CHANGES:
            setattr(fs, name, counted(getattr(fs, name), int(fatal), numbers))
        shardkit.verify(out, repair=source)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (out, fatal, status)
"""


@pytest.mark.large
@pytest.mark.parametrize("format", ["wds", "lmdb", "hf", "beton"])
def test_kills(format, tmp_path):
    """kill -9 at any operation: no file is worse than before, and the next run repairs all."""
    source = write_images(tmp_path / "source", each=5, kilobytes=20)
    out = make(source, format, tmp_path / "out")
    whole = files_of(out)

    def ruin():
        for name in whole:
            if not name.endswith("manifest.json"):
                (out / name).write_bytes(b"damaged")

    count = len(logged(Dying, ruin, partial(shardkit.verify, out, repair=source)))
    ruin()
    fatal = [count * n // 5 for n in range(1, 5)]
    copies = [Path(shutil.copytree(out, tmp_path / f"killed at {number}")) for number in fatal]
    words = [str(word) for pair in zip(copies, fatal, strict=True) for word in pair]
    subprocess.run([sys.executable, "-c", KILLED, source, *words], check=True)
    for copy in copies:
        found = files_of(copy)
        assert found.keys() == whole.keys(), copy
        assert all(data in (b"damaged", whole[name]) for name, data in found.items()), copy
        assert not repaired(copy, source).left, copy
        assert files_of(copy) == whole, copy
        assert not copy.with_name(f"{copy.name}.partial").exists()


def test_the_command(tmp_path, images):
    out = make(images, "wds", tmp_path / "out")
    (out / "shard-000001.tar").unlink()
    found = run("verify", out, "--repair", images, "--against", images, "--decode")
    assert "repaired:  1 file, " in found.stdout
    assert f"rebuilt:   {out / 'shard-000001.tar'}" in found.stdout
    assert "sound:" in found.stdout
    (out / "shard-000001.tar").unlink()
    (out / "shard-000000.tar").write_bytes(b"")
    (images / "class0/000.jpg").unlink()
    report = json.loads(run("verify", out, "--repair", images, "--json", check=1).stdout)
    assert not report["sound"]
    assert {file["how"] for file in report["repair"]["files"]} <= {"rebuilt"}
    left = {left["path"] for left in report["repair"]["left"]}
    assert left == {problem["path"] for problem in report["problems"]}
    again = run("verify", out, "--repair", images, check=1)
    assert "a damaged file was not repaired" in again.stderr
