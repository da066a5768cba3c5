"""`shardkit verify --repair`: damaged files become what they were, and all others stay."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import manifest as manifests
from shardkit import pieces, storage
from shardkit.conversion.partial import partial_of
from shardkit.conversion.target import Target
from shardkit.errors import NotFoundError, OutputError, SampleError, StorageError, UsageError
from shardkit.formats import FORMATS, get_format
from shardkit.formats.base import Joins
from shardkit.manifest import Manifest, Splits
from shardkit.pieces import WHOLE
from shardkit.testing import make_image
from shardkit.verification.repair import Repair, RepairReport
from shardkit.verification.work import Meter
from tests.conftest import IMAGE_FORMATS, few, write_images
from tests.conversion.test_crash import Dying, died_at, logged
from tests.test_cli import run
from tests.test_verify import rewrite

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


def check(dataset: Path, whole: State, damaged: set[str], repair: Any, **options: Any) -> None:
    """Repair it: all is as it was, files that were not damaged untouched."""
    seen: list[Any] = []
    report = shardkit.verify(dataset, repair=repair, progress=seen.append, **options)
    assert seen
    folder = manifests.folder_of(manifests.manifest_path(dataset))
    assert not report.problems, (report.problems, report.repair)
    assert report.sound
    assert report.repair is not None
    assert not report.repair.left
    found = state(folder)
    assert found.keys() == whole.keys()
    for name, (*entry, data) in whole.items():
        assert found[name][2] == data, name
        assert ([*found[name][:2]] == entry) == (name not in damaged), name
    assert {Path(file.path).name for file in report.repair.files} == {
        Path(name).name for name in damaged
    }


def make(source: Path, to: str, out: Path, **options: Any) -> Path:
    shardkit.convert(source, to, out, workers=0, **{"shard_samples": 5, **options})
    return out


@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "wds", "lmdb", "beton"))
def test_each_file(format: str, tmp_path: Path) -> None:
    source = write_images(tmp_path / "source")
    out = make(source, format, tmp_path / "out")
    other = "arrow" if format != "arrow" else "wds"
    copy = make(out, other, tmp_path / "other", shard_samples=7)
    same = shutil.copytree(out, tmp_path / "same")
    chance = random.Random(format)
    for path in named(out):
        for giver in (source, same, copy):
            whole = state(out)
            name, damage = chance.choice([*DAMAGES.items()])
            damage(path, chance)
            print(path, name, giver)
            check(out, whole, {path.relative_to(out).as_posix()}, giver)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers

    model = tokenizers.models.WordLevel({"[UNK]": 0, "alpha": 1, "beta": 2}, "[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("format", few(sorted(FORMATS), "megatron"))
def test_tokens(format: str, tmp_path: Path, tokenizer: Path) -> None:
    """Documents, and blocks of several; the copy of the tokenizer comes from a copy alone."""
    chance = random.Random(format)
    folder = tmp_path / "text"
    folder.mkdir()
    lines = (" ".join(chance.choices(["alpha", "beta", "stone"], k=40)) for _ in range(90))
    (folder / "a.txt").write_text("\n".join(lines))
    for seq_len in (None,) if format == "megatron" else (None, 16):  # it has no blocks
        text = shardkit.TextOptions(tokenizer=str(tokenizer), seq_len=seq_len)
        out = make(folder, format, tmp_path / f"out{seq_len}", shard_samples=60, text=text)
        other = "arrow" if format != "arrow" else "wds"
        copy = make(out, other, tmp_path / f"copy{seq_len}")
        for path in named(out):
            for giver in (folder, copy):
                whole = state(out)
                path.unlink()
                if (giver, path.name) == (folder, "tokenizer.json"):
                    (left,) = repaired(out, folder).left
                    assert left.where["path"] == path
                    giver = copy  # noqa: PLW2901
                check(out, whole, {path.relative_to(out).as_posix()}, giver)


def shout(sample: dict[str, Any]) -> dict[str, Any] | None:
    if sample["__key__"].endswith("002"):
        return None
    return {**sample, "note": sample["__key__"].upper()}


@pytest.mark.parametrize("repair", few(["source", "same", "copy"], "source"))
@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "wds"))
def test_splits_lists_and_transforms(format: str, repair: str, tmp_path: Path) -> None:
    source = write_images(tmp_path / "source", each=9)
    (source / "class1" / "bad.jpg").write_bytes(b"no image")
    (source / "class1" / "sp ace.jpg").write_bytes(
        (source / "class1/001.jpg").read_bytes()[:-20] + bytes(20)
    )
    options: dict[str, Any] = {
        "transform": shout,
        "on_error": "skip",
        "split": "train=0.7,val=0.3",
        "shuffle": True,
        "seed": 3,
        "safe_keys": True,
    }
    out = make(source, format, tmp_path / "out", **options)
    same = shutil.copytree(out, tmp_path / "same")
    copy = make(out, "arrow" if format != "arrow" else "wds", tmp_path / "copy", shard_samples=3)
    giver = {"source": source, "same": same, "copy": copy}[repair]
    chance = random.Random(format)
    for path in named(out):
        if repair == "copy" and path.name in ("errors.jsonl", "filtered.jsonl", "keys.jsonl"):
            continue
        whole = state(out)
        damage = chance.choice([*DAMAGES.values()])
        damage(path, chance)
        dataset = chance.choice([out, out / path.relative_to(out).parts[0]])
        if not (dataset / "__shardkit__").is_dir():
            dataset = out
        print(path, dataset)
        more = {"transform": shout} if repair == "source" else {}
        check(out, whole, {path.relative_to(out).as_posix()}, giver, **more)


@pytest.mark.parametrize(
    "format", few([n for n in IMAGE_FORMATS if FORMATS[n].single], "wds", "beton", "lmdb")
)
def test_single(format: str, tmp_path: Path) -> None:
    source = write_images(tmp_path / "source", each=9)
    suffix = FORMATS[format].suffixes[0]
    (tmp_path / "out").mkdir()
    out = make(source, format, tmp_path / f"out/train{suffix}", shard_samples=None)
    same = Path(shutil.copytree(out.parent, tmp_path / "same")) / out.name
    copy = make(out, "arrow" if format != "arrow" else "wds", tmp_path / "copy", shard_samples=3)
    chance = random.Random(format)
    for path in named(out):
        for giver in (source, same, copy):
            whole = state(out.parent)
            name, damage = chance.choice([*DAMAGES.items()])
            damage(path, chance)
            print(path, name, giver)
            check(out, whole, {path.relative_to(out.parent).as_posix()}, giver)


def test_a_source_that_has_changed_is_told(tmp_path: Path) -> None:
    """What can be rebuilt is; the rest names the sample that is not as it was."""
    source = write_images(tmp_path / "source", each=9)
    out = make(source, "wds", tmp_path / "out")
    shards = [path for path in named(out) if path.suffix == ".tar"]
    whole = state(out)
    for path in shards[:2]:
        path.write_bytes(path.read_bytes()[:-1] + b"x")  # in no sample
    changed = source / "class0/002.jpg"
    changed.write_bytes(changed.read_bytes()[:-40] + b"x" + changed.read_bytes()[-39:])
    damaged = shards[0].read_bytes()
    report = shardkit.verify(out, repair=source)
    assert report.repair is not None
    assert [Path(file.path) for file in report.repair.files] == shards[1:2]
    assert state(out)[shards[1].name][2] == whole[shards[1].name][2]
    assert shards[0].read_bytes() == damaged
    (left,), (problem,) = report.repair.left, report.problems
    assert left.where["path"] == problem.where["path"] == shards[0]
    assert (left.found or "").endswith("different from the damaged shard: 'class0/002'")
    changed.unlink()
    (left,) = repaired(out, source).left
    assert left.found == (
        "the rebuilt shard differs from the original; the source has changed;"
        " different from the damaged shard: 'class0/002' (missing)"
    )
    assert shards[0].read_bytes() == damaged
    assert not (tmp_path / "out.partial").exists()


def repaired(dataset: Path, source: Any, **options: Any) -> RepairReport:
    found = shardkit.verify(dataset, repair=source, **options).repair
    assert found is not None
    return found


def test_a_copy_that_is_none_is_refused(tmp_path: Path) -> None:
    source = write_images(tmp_path / "source", each=9)
    out = make(source, "wds", tmp_path / "out")
    few, shuffled = tmp_path / "few", tmp_path / "shuffled"
    make(out, "arrow", few, limit=20)
    make(out, "arrow", shuffled, shuffle=True)
    make(out, "arrow", tmp_path / "lacking", fields=("image",))
    path = out / "shard-000001.tar"
    path.write_bytes(b"damaged")
    before = state(out)
    (left,) = repaired(out, few).left
    assert "the given data are neither the source nor a copy of the dataset" in (left.found or "")
    assert "20 samples" in (left.found or "")
    (left,) = repaired(out, shuffled).left
    rebuilt = (
        "the rebuilt shard differs from the original; it was rebuilt from the samples of a copy"
    )
    assert rebuilt in (left.found or "")
    (left,) = repaired(out, tmp_path / "lacking").left
    assert "without 'label'" in (left.found or "")
    assert state(out) == before
    with pytest.raises(UsageError, match="cannot be repaired from itself"):
        shardkit.verify(out, repair=out)
    with pytest.raises(NotFoundError):
        shardkit.verify(out, repair=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="repaired by a single process"):
        shardkit.verify(out, repair=source, part="1/2")
    assert state(out) == before


def test_manifests_come_from_a_copy(tmp_path: Path, images: Path) -> None:
    """Of the same format, which has the same files; else nothing is touched."""
    out = make(images, "mds", tmp_path / "out", split="a=0.5,b=0.5")
    same = shutil.copytree(out, tmp_path / "same")
    other = make(images, "mds", tmp_path / "other", split="a=0.5,b=0.5", shard_samples=3)
    chance = random.Random(1)
    for path in sorted(out.rglob("manifest.json")):
        whole = state(out)
        flip(path, chance)
        for wrong in (images, other):
            before = state(out)
            if wrong == other and path.parent.parent == out:
                continue
            report = shardkit.verify(out, repair=wrong)
            assert not report.sound
            assert report.repair is not None
            assert any(
                "the manifest is damaged" in (left.found or "") for left in report.repair.left
            )
            assert state(out) == before
        check(out, whole, {path.relative_to(out).as_posix()}, same)
        path.unlink()
        check(out, whole, {path.relative_to(out).as_posix()}, same)
    foreign = shardkit.convert(images, "parquet", tmp_path / "foreign", workers=0).out
    folders = make(images, "lance", tmp_path / "folders")
    bare = shutil.copytree(out / "a", tmp_path / "alone")
    flip(bare / "__shardkit__/manifest.json", chance)
    before = state(bare)
    for wrong in (foreign, folders, same):  # of other formats, and with splits: other folders
        found = run("verify", bare, "--repair", wrong, check=1)
        assert "a damaged file was not repaired" in found.stderr
        assert state(bare) == before
    bare = shutil.copytree(out / "a", tmp_path / "bare")
    before = state(bare)
    shutil.rmtree(bare / "__shardkit__")
    assert not shardkit.verify(bare, repair=images).sound
    found = run("verify", bare, "--repair", same / "a")  # a single split, elsewhere
    assert "copied:" in found.stdout
    assert {name: data for name, (*_, data) in state(bare).items()} == {
        name: data for name, (*_, data) in before.items()
    }


def test_a_copy_of_another_version_replaces_no_sound_shard(tmp_path: Path, images: Path) -> None:
    """Where the manifest is missing nothing tells damage from an image that was corrected."""
    older = make(images, "mds", tmp_path / "older")
    (images / "class0/000.jpg").write_bytes(make_image(99))
    out = make(images, "mds", tmp_path / "out")
    manifest = manifests.manifest_path(out)
    text = manifest.read_bytes()
    shards = sorted(out.glob("shard.*"))
    assert len(shards) > 2
    assert [path.read_bytes() != (older / path.name).read_bytes() for path in shards].count(
        True
    ) == 1
    for damaged in (b"", text[:-9]):
        manifest.write_bytes(damaged)
        before = state(out)
        (left,) = repaired(out, older).left
        assert "the copy has different shards; shard.00000.mds, damaged or from another" in str(
            left
        )
        assert "move these shards away" in str(left)
        assert state(out) == before
    same = shutil.copytree(out, tmp_path / "same")
    (same / manifest.relative_to(out)).write_bytes(text)
    shards[0].write_bytes(b"damaged")  # but what is left of the manifest tells of its checksum
    assert not repaired(out, same).left
    assert manifest.read_bytes() == text
    manifest.write_bytes(text[:-9])
    for path in shards:
        path.unlink()
    assert not repaired(out, same).left
    manifest.unlink()
    shards[0].unlink()
    assert not repaired(out, same).left
    assert state(out).keys() == state(same).keys()


def test_a_manifest_and_a_shard_that_a_list_names(tmp_path: Path, images: Path) -> None:
    out = make(images, "litdata", tmp_path / "out")
    same = shutil.copytree(out, tmp_path / "same")
    manifests.manifest_path(out).unlink()
    (out / "chunk-0-00001.bin").unlink()
    assert not repaired(out, same).left
    assert state(out).keys() == state(same).keys()


def test_two_runs_at_once(tmp_path: Path, images: Path) -> None:
    out = make(images, "wds", tmp_path / "out")
    (out / "shard-000001.tar").unlink()
    with Repair(out, [shardkit.open(out)], images, None, None, Meter(None)):
        for run in (
            lambda: shardkit.verify(out, repair=images),
            lambda: shardkit.convert(images, "wds", out, overwrite=True, workers=0),
        ):
            with pytest.raises(OutputError, match="another run is working on this output"):
                run()
    assert not (tmp_path / "out.partial").exists()
    assert not repaired(out, images).left
    work = tmp_path / "out.partial"
    (images / "class2/003.jpg").write_bytes(b"none")
    with pytest.raises(SampleError):
        make(images, "wds", out, overwrite=True, shard_samples=None, shard_size=5000)
    before = state(work)
    with pytest.raises(OutputError, match="there is an unfinished conversion to this dataset"):
        shardkit.verify(out, repair=images)
    assert state(work) == before
    run = partial_of(Target(out, "wds"))  # nobody is told to remove what another works at
    run.begin(run.job() or {}, resume=True)
    for command in (
        lambda: shardkit.verify(out, repair=images),
        lambda: make(images, "wds", out, shard_samples=2),
    ):
        with pytest.raises(OutputError, match="another run is working on this output"):
            command()
    run.release()


def test_links_are_not_written_through(tmp_path: Path, images: Path) -> None:
    out = make(images, "wds", tmp_path / "out", split="a=0.5,b=0.5")
    (out / "a").rename(tmp_path / "elsewhere")
    (out / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/shard-000000.tar").write_bytes(b"damaged")
    before = state(tmp_path)
    (left,) = repaired(out, images).left
    assert "leads through a symbolic link" in (left.found or "")
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


@pytest.mark.parametrize("room", [1_000, 3_000, 20_000])
def test_a_full_disk(tmp_path: Path, images: Path, room: int) -> None:
    out = make(images, "wds", tmp_path / "out")
    for number in range(2):
        (out / f"shard-{number:06d}.tar").write_bytes(b"damaged")
    before = state(out)
    real, left = storage.NewFile.write, room

    def write(file: storage.NewFile, chunks: list[bytes]) -> None:
        nonlocal left
        left -= sum(map(len, chunks))
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, chunks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.NewFile, "write", write)
        with pytest.raises(StorageError, match="the disk is full"):
            shardkit.verify(out, repair=images)
    assert not (tmp_path / "out.partial").exists()
    changed = {name for name, entry in state(out).items() if entry != before[name]}
    assert changed <= {"shard-000000.tar"}
    assert not repaired(out, images).left


@pytest.fixture
def only_new_garbage() -> Iterator[None]:
    """What other tests have loaded is not looked through each time that garbage is collected."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_what_a_killed_repair_leaves_is_in_nobodys_way(tmp_path: Path, images: Path) -> None:
    out, work = make(images, "wds", tmp_path / "out"), tmp_path / "out.partial"
    for command in (
        lambda: shardkit.merge(out),
        lambda: make(images, "wds", out),
        lambda: make(images, "wds", out, part="1/2"),
        lambda: shardkit.verify(out, repair=images),
    ):
        work.mkdir()
        (work / "job.json").write_text('{"repair": true}')
        (work / "dataset").mkdir()
        before = state(out)
        command()
        assert not work.exists()
        assert state(out) == before


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a dead process closes nothing
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("only_new_garbage")
def test_a_repair_that_dies_anywhere(tmp_path: Path, images: Path, large: bool) -> None:
    out = make(images, "wds", tmp_path / "out", shard_samples=6)
    same = shutil.copytree(out, tmp_path / "same")
    whole = {name: data for name, (*_, data) in state(out).items()}
    ruined = ["shard-000001.tar", "__shardkit__/shard-000001.index.npy"][: 1 + large]

    for giver in (images, same) if large else (images,):

        def begin() -> None:
            shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
            for name in ruined:
                (out / name).write_bytes(b"damaged")

        def run() -> None:
            shardkit.verify(out, repair=giver)  # noqa: B023

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
            assert not repaired(out, images).left
            assert {name: data for name, (*_, data) in state(out).items()} == whole
            assert not (tmp_path / "out.partial").exists()


def test_the_command(tmp_path: Path, images: Path) -> None:
    out = make(images, "wds", tmp_path / "out")
    (out / "shard-000001.tar").unlink()
    found = run("verify", out, "--repair", images, "--against", images, "--decode")
    assert "repaired:  1 file, " in found.stdout
    assert f"rebuilt:   {out / 'shard-000001.tar'}" in found.stdout
    assert "sound:" in found.stdout
    (out / "shard-000001.tar").unlink()
    (out / "shard-000000.tar").write_bytes(b"")
    (images / "class0/000.jpg").unlink()
    found = run("verify", out, "--repair", images, "--json", check=1)
    report = json.loads(found.stdout)
    assert not report["sound"]
    assert [file["how"] for file in report["repair"]["files"]] == ["rebuilt"] * len(
        report["repair"]["files"]
    )
    assert {left["path"] for left in report["repair"]["left"]} == {
        one["path"] for one in report["problems"]
    }
    assert (
        "a damaged file was not repaired" in run("verify", out, "--repair", images, check=1).stderr
    )


def test_datasets_without_a_recipe(tmp_path: Path) -> None:
    """What `create` made is repaired from copies."""
    out = tmp_path / "out"
    with shardkit.create(out, "wds", {"text": shardkit.Text()}, shard_samples=3) as writer:
        for number in range(8):
            writer.write({"text": f"text {number}"})
    copy = make(out, "arrow", tmp_path / "copy")
    for path in named(out):
        whole = state(out)
        path.unlink()
        check(out, whole, {path.relative_to(out).as_posix()}, copy)
    (out / "shard-000000.tar").unlink()
    (left,) = repaired(out, write_images(tmp_path / "images")).left
    print(left)


def test_one_shard_by_itself(tmp_path: Path, images: Path) -> None:
    out = make(images, "wds", tmp_path / "out")
    whole = state(out)
    for number in (0, 1):
        path = out / f"shard-{number:06d}.tar"
        path.write_bytes(path.read_bytes()[:-1])
    report = shardkit.verify(out / "shard-000001.tar", repair=images)
    assert report.sound
    assert {name for name, entry in state(out).items() if entry[2] != whole[name][2]} == {
        "shard-000000.tar"
    }


JOINING = [name for name in IMAGE_FORMATS if isinstance(get_format(name), Joins)]


@pytest.mark.parametrize("format", few(JOINING, "wds"))
def test_shards_that_several_tasks_made(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are joined: from the source, and from a copy that does not know of tasks."""
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 5_000)
    source = write_images(tmp_path / "source", each=9, kilobytes=2)
    size = None if FORMATS[format].one_shard else 20_000
    image = shardkit.ImageOptions(resize=4)
    options = {"shard_samples": None, "shard_size": size, "image": image}
    out = make(source, format, tmp_path / "out", **options)
    assert any(one.tasks[0] < one.tasks[1] for one in manifests.load(out).shards)
    copy = make(out, "arrow" if format != "arrow" else "wds", tmp_path / "copy")
    for path in named(out):
        for giver in (source, copy):
            whole = state(out)
            path.unlink()
            damaged = {path.relative_to(out).as_posix()}
            if (format, giver) == ("beton", copy):  # its pages begin anew where a task's did
                assert "the rebuilt shard differs" in str(repaired(out, copy).left[0])
                check(out, whole, damaged, source)
            else:
                check(out, whole, damaged, giver)


@pytest.mark.large
@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_bits(format: str, tmp_path: Path) -> None:
    """20 random bits of each format, in any files, of which some lie in the same."""
    source = write_images(tmp_path / "source", each=20, kilobytes=20)
    large = source / "class1/large.jpg"
    large.write_bytes(make_image(7) + random.Random(7).randbytes(3 << 20))  # several pieces
    out = make(source, format, tmp_path / "out", shard_samples=16)
    same = shutil.copytree(out, tmp_path / "same")
    copy = make(out, "arrow" if format != "arrow" else "wds", tmp_path / "copy", shard_samples=9)
    chance = random.Random(format)
    paths = named(out)
    sizes = [path.stat().st_size for path in paths]
    flipped = 0
    while flipped < 20:
        whole = state(out)
        chosen = chance.choices(paths, sizes if flipped % 2 else None, k=chance.randrange(1, 4))
        for path in chosen:
            flip(path, chance)
        flipped += len(chosen)
        damaged = {
            name for name, (*_, data) in state(out).items() if data != whole[name][2]
        }  # a bit that is flipped twice is as it was
        check(out, whole, damaged, chance.choice([source, same, copy]))


@pytest.mark.large
@pytest.mark.parametrize("format", ["wds", "lmdb", "hf", "beton"])
def test_kills(format: str, tmp_path: Path) -> None:
    """kill -9 at any moment: no file is worse than before, and the next run repairs all."""
    source = write_images(tmp_path / "source", each=20, kilobytes=200)
    out = make(source, format, tmp_path / "out")
    whole = {name: data for name, (*_, data) in state(out).items()}
    chance = random.Random(format)
    command = [sys.executable, "-m", "shardkit", "verify", out, "--repair", source, "--quiet"]
    seconds, killed = 0.0, 0
    for number in range(7):
        for name in whole:
            if not name.endswith("manifest.json"):
                (out / name).write_bytes(b"damaged")
        began = time.monotonic()
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        if number:
            time.sleep(chance.uniform(0.2, 1) * seconds)
            process.kill()
        process.communicate()
        seconds = seconds or time.monotonic() - began
        if process.returncode == -signal.SIGKILL:
            killed += 1
        elif number:  # it has ended before: the machine was busier when the first one ran
            seconds /= 2
        found = {name: data for name, (*_, data) in state(out).items()}
        assert found.keys() == whole.keys()
        assert all(data in (b"damaged", whole[name]) for name, data in found.items())
        assert not repaired(out, source).left
        assert {name: data for name, (*_, data) in state(out).items()} == whole
        assert not (tmp_path / "out.partial").exists()
    assert killed


def test_copies_that_are_damaged_as_well(tmp_path: Path, images: Path) -> None:
    out = make(images, "wds", tmp_path / "out")
    same = shutil.copytree(out, tmp_path / "same")
    for folder in (out, same):
        path = folder / "shard-000001.tar"
        path.write_bytes(path.read_bytes()[:700] + b"other" + path.read_bytes()[705:])
    before = state(out)
    (left,) = repaired(out, same).left
    assert f"{same / 'shard-000001.tar'} is damaged as well" in (left.found or "")
    assert state(out) == before


@pytest.mark.large
def test_files_for_other_loaders(tmp_path: Path, images: Path) -> None:
    beside = ("dali", "energon", "wids")
    for split in ("none", "train=0.5,val=0.5"):
        out = make(images, "wds", tmp_path / split, split=split, beside=beside)
        copy = make(out, "arrow", tmp_path / f"{split} copy")
        for path in named(out):
            whole = state(out)
            path.write_bytes(b"damaged")
            giver = copy if len(path.name) % 2 else images
            check(out, whole, {path.relative_to(out).as_posix()}, giver)


def test_older_checksums(tmp_path: Path, images: Path) -> None:
    """Of whole files, as earlier versions made them, which no list of pieces belongs to."""
    out = make(images, "wds", tmp_path / "out")

    def change(data: dict[str, Any]) -> None:
        data["checksum"] = WHOLE
        for shard in data["shards"]:
            for entry in (shard["file"], *shard["beside"]):
                entry["checksum"] = pieces.checksum((out / entry["name"]).read_bytes(), WHOLE)
        for entry in data["files"]:
            entry["checksum"] = pieces.checksum((out / entry["name"]).read_bytes(), WHOLE)

    rewrite(out, change)
    copy = make(out, "arrow", tmp_path / "copy")
    for path in named(out):
        for giver in (images, copy):
            whole = state(out)
            path.write_bytes(path.read_bytes()[:-1])
            check(out, whole, {path.relative_to(out).as_posix()}, giver)
