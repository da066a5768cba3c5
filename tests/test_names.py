"""X3: whatever a dataset names, nothing but it and the output is read, written or moved."""

import contextlib
import json
import ntpath
import os
import shutil
import sys
from pathlib import PureWindowsPath

import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.dataset.find import open_splits
from shardkit.errors import DamagedError, UsageError
from shardkit.helpers.names import is_safe
from shardkit.inspection.inspect import inspect
from shardkit.metadata import manifest as manifests
from shardkit.verification.verify import verify
from tests.conftest import examples, files_of

SECRET = b"machine x login y password SECRET\n"
MANIFEST = f"{manifests.FOLDER}/{manifests.NAME}"


def write_json(path, data):
    """A JSON file; a manifest with the checksum that whoever changes one can make as well."""

    def text():
        return json.dumps(data, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace")

    if data.pop("manifest_checksum", None):
        data["manifest_checksum"] = _hash(text())
    path.write_bytes(text() + b"\n")


def _hash(data):
    return xxhash.xxh3_128_hexdigest(data)


def convert(source, to, out, **options):
    shardkit.convert(source, to, out, workers=0, **options)


def samples(count=8):
    return [{"__key__": f"{n:04d}", "text": "x" * n, "label": n % 2} for n in range(count)]


def with_files(folder):
    """Put into a dataset what one of tokens has: a copy of its tokenizer."""
    data = json.loads((folder / MANIFEST).read_bytes())
    (folder / manifests.FOLDER / "t.json").write_bytes(SECRET[:5])
    digest = _hash(SECRET[:5])
    data["files"] += [{"name": f"{manifests.FOLDER}/t.json", "bytes": 5, "checksum": digest}]
    about = {"kind": "x", "file": "t.json", "digest": digest, "vocab_size": 1}
    ids = dict.fromkeys(("eos_id", "bos_id", "pad_id"))
    data["tokenizer"] = {**about, **ids, "special_tokens": "text"}
    write_json(folder / MANIFEST, data)


def _saved_by_hf(folder, **options):
    convert(samples(), "hf", folder, shard_samples=3, **options)
    for ours in list(folder.rglob(manifests.FOLDER)):
        shutil.rmtree(ours)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Datasets of each kind that names files, whole."""
    root = tmp_path_factory.mktemp("sets")
    for name, to in (("tar", "wds"), ("lmdb", "lmdb")):
        convert(samples(), to, root / name, shard_samples=3)
        with_files(root / name)
    convert(samples(), "arrow", root / "splits", split="train=0.5,val=0.5")
    (root / "single").mkdir()
    convert(samples(), "arrow", root / "single/x.arrow")
    _saved_by_hf(root / "hf")
    _saved_by_hf(root / "hf_splits", split="train=0.5,val=0.5")
    return root


# Of each kind: what is opened, and the files in it that name others.
KINDS = {
    "tar": ("", MANIFEST),
    "lmdb": ("", MANIFEST),
    "splits": ("", MANIFEST),
    "splits/train": ("", f"train/{MANIFEST}"),
    "single": ("x.arrow", f"{manifests.FOLDER}/x.arrow.{manifests.NAME}"),
    "hf": ("", "state.json"),
    "hf_splits": ("", "dataset_dict.json"),
    "hf_splits/train": ("", "train/state.json"),
}


def places(data, *way):
    """The way to each string in JSON, names of members too."""
    if isinstance(data, str):
        yield way
    elif isinstance(data, dict | list):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            if isinstance(name, str) and way:
                yield (*way, name, "its name")
            yield from places(value, *way, name)


def put(data, way, name):
    *above, last = way
    renames = last == "its name"
    if renames:
        *above, last = above
    for step in above:
        data = data[step]
    data[name if renames else last] = data.pop(last) if renames else name


class Touched:
    """What Python is asked to open, list, make, rename or remove, while `on`."""

    def __init__(self):
        self.on = False
        self.paths: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event, args):
        if self.on and (event == "open" or event.startswith(("os.", "shutil."))):
            paths = (os.fsdecode(arg) for arg in args if isinstance(arg, str | bytes | os.PathLike))
            self.paths += map(os.path.abspath, paths)


touched = Touched()


def use(path, out):
    """Do all that one does with a dataset."""

    def read():
        for dataset in open_splits(path).values():
            dataset.original_paths(), dataset.tokenizer(), [*dataset]

    for act in (
        read,
        lambda: inspect(path),
        lambda: verify(path, against=samples(), decode=True),
        lambda: convert(path, "wds", out),
        lambda: convert(samples(3), "arrow", path, overwrite=True),
    ):
        with contextlib.suppress(Exception):  # what damage gives is tested elsewhere
            act()


def evil_names(world):
    """Names that lead to the victim, as seen from a dataset at world/a/evil, and further below."""
    targets = ["victim", "victim/shard-000000.tar", "victim/.netrc", "victim/new", "new"]
    ways = [str(world), "../..", "../../..", "x/../../..", "./../..", "//" + str(world), "..\\.."]
    names = st.builds(
        lambda way, to: f"{way}/{to}", st.sampled_from(ways), st.sampled_from(targets)
    )
    return names | st.sampled_from(["..", ".", "", "../..", "CON", "nul.tar", "C:x", "\0", "/"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_no_string_of_a_dataset_leads_out_of_it(kind, sets, tmp_path, monkeypatch, large):
    world = tmp_path / "world"
    opened, described = KINDS[kind]
    original = json.loads((sets / kind.partition("/")[0] / described).read_bytes())
    every = [*places(original)]
    likely = [way for way in every if way[-1] in ("name", "file", "filename") or "splits" in way]
    monkeypatch.chdir(tmp_path)

    @settings(max_examples=examples(8), suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(every) | st.sampled_from(likely), evil_names(world))
    def check(way, name):
        shutil.rmtree(world, ignore_errors=True)
        evil, out = world / "a/evil", world / "a/out"
        shutil.copytree(sets / kind.partition("/")[0], evil)
        shutil.copytree(sets / "tar", world / "victim")
        (world / "victim/.netrc").write_bytes(SECRET)
        before = files_of(world / "victim")
        data = json.loads((evil / described).read_bytes())
        put(data, way, name)
        write_json(evil / described, data)
        touched.paths, touched.on = [], True
        try:
            use(evil / opened, out)
        finally:
            touched.on = False
        allowed = [str(evil), str(out)]
        outside = [p for p in touched.paths if p.startswith(str(world)) and p != str(evil.parent)]
        assert [p for p in outside if not p.startswith(tuple(allowed))] == []
        assert files_of(world / "victim") == before
        assert sorted(os.listdir(world)) == ["a", "victim"]
        assert not any(SECRET in content for content in files_of(out).values())

    for way in every if large else ():
        check = example(way, "../../victim/shard-000000.tar")(check)
    check()


NAMED = [
    ("tar", ("shards", 1, "file", "name"), "shards[1].file.name"),
    ("tar", ("shards", 2, "beside", 0, "name"), "shards[2].beside[0].name"),
    ("tar", ("files", 0, "name"), "files[0].name"),
    ("tar", ("tokenizer", "file"), "tokenizer.file"),
    ("lmdb", ("shards", 0, "file", "name"), "shards[0].file.name"),
    ("single", ("shards", 0, "file", "name"), "shards[0].file.name"),
    ("splits", ("splits", "val", "its name"), "splits"),
    ("hf", ("_data_files", 1, "filename"), "_data_files[1].filename"),
    ("hf_splits", ("splits", 1), "splits"),
]
UNSAFE = ["/abs/x", "../x", "a/../../x", "a\\x", "C:x", "aux.tar", "a\0"]
# Each name in one place, and each place with one.
TRIED = [*((NAMED[0], name) for name in UNSAFE), *((named, UNSAFE[1]) for named in NAMED[1:])]


@pytest.mark.parametrize(("named", "name"), TRIED)
def test_the_error_says_which_name_of_which_file(named, name, sets, tmp_path):
    kind, way, field = named
    opened, described = KINDS[kind]
    shutil.copytree(sets / kind, tmp_path / "evil")
    data = json.loads((tmp_path / "evil" / described).read_bytes())
    put(data, way, name)
    write_json(tmp_path / "evil" / described, data)
    with pytest.raises(DamagedError, match="unsafe name") as caught:
        open_splits(tmp_path / "evil" / opened)
    assert caught.value.where == {"path": tmp_path / "evil" / described, "field": field}
    assert caught.value.found == repr(name)
    problems = verify(tmp_path / "evil" / opened).problems
    assert str(caught.value) in [str(problem) for problem in problems]


# Each but the last may be part of a device's name, or lead somewhere else.
_PIECES = [
    *("..", ".", "/", "\\", ":", "C:", "con", "NUL", "aux.x", " ", "ü", "\udcff", "\0", "~", "x")
]


@settings(max_examples=examples(100))
@given(st.lists(st.sampled_from(_PIECES)).map("".join) | st.text(max_size=300))
def test_a_safe_name_stays_inside_on_any_system(name):
    """POSIX and Windows agree that it is inside, and no device."""
    if not is_safe(name):
        return
    os.fsencode(name)
    for system in (os.path, ntpath):
        root = "/root/data" if system is os.path else "C:\\root\\data"
        joined = system.normpath(system.join(root, name))
        assert joined.startswith(root + system.sep)
        assert len(joined.split(system.sep)) == len(root.split(system.sep)) + len(name.split("/"))
    for part in name.split("/"):
        if sys.version_info >= (3, 13):
            assert not ntpath.isreserved(part)
        else:
            assert not PureWindowsPath(part).is_reserved()


def test_usual_names_are_safe_and_others_are_not_written(tmp_path):
    for name in ("shard-000000.tar", "a/b.mdb", "é.beton", "..x", "x..y", ".hidden", "consul.tar"):
        assert is_safe(name), name
    assert not is_safe("a/b", flat=True)
    assert not is_safe("x" * 256)
    for name in ("nul.arrow", "a\\b.arrow", "C:x.arrow"):
        with pytest.raises(UsageError, match="invalid name of an output"):
            convert(samples(), "arrow", tmp_path / name)
    with pytest.raises(UsageError, match="invalid split"):
        convert(samples(), "arrow", tmp_path / "out", split="con=0.5,val=0.5")


def test_links_of_the_file_system_are_followed(sets, tmp_path):
    """As the cache of the Hugging Face hub has them, for all files, shards in folders too."""
    for kind in ("tar", "lmdb"):
        repository = tmp_path / f"datasets--x--{kind}"
        (repository / "blobs").mkdir(parents=True)
        for name in files_of(sets / kind):
            blob = repository / "blobs" / _hash(name.encode())
            shutil.copy(sets / kind / name, blob)
            link = repository / "snapshots/main" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        (tmp_path / f"{kind}_link").symlink_to(repository / "snapshots/main")
        for path in (repository / "snapshots/main", tmp_path / f"{kind}_link"):
            assert [*shardkit.open(path)] == [*shardkit.open(sets / kind)]
            assert verify(path, decode=True).sound
            convert(path, "wds", tmp_path / f"{kind}_out", overwrite=True)
            assert shardkit.open(tmp_path / f"{kind}_out").tokenizer()[1] == {"t.json": SECRET[:5]}


@pytest.mark.parametrize("file", ["t.json", "keys.jsonl"])
def test_a_link_to_a_secret_brings_nothing(file, sets, tmp_path):
    """As archives may have them: only what has the checksum in the manifest is used or copied."""
    (tmp_path / ".netrc").write_bytes(SECRET)
    shutil.copytree(sets / "tar", tmp_path / "evil")
    data = json.loads((tmp_path / "evil" / MANIFEST).read_bytes())
    size, checksum = len(SECRET), "0" * 32
    data["files"] = [{"name": f"{manifests.FOLDER}/{file}", "bytes": size, "checksum": checksum}]
    write_json(tmp_path / "evil" / MANIFEST, data)
    (tmp_path / "evil" / manifests.FOLDER / file).unlink(missing_ok=True)
    (tmp_path / "evil" / manifests.FOLDER / file).symlink_to(tmp_path / ".netrc")
    with pytest.raises(DamagedError, match="changed since it was written"):
        convert(tmp_path / "evil", "arrow", tmp_path / "out")
    assert not (tmp_path / "out").exists()
