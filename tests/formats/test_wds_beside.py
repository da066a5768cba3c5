"""Files beside TARs for the loaders of DALI, Energon and wids: `--beside`."""

import json
import re
import shutil
import tarfile
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import FormatError, OutputError, SampleError, UsageError
from shardkit.testing import make_image
from tests import clients
from tests.conftest import files_of
from tests.conversion.deaths import Recorder, left_by_deaths
from tests.formats.refusals import refused

ALL = ("dali", "energon", "wids")
DEVICES = ["cpu", *(["gpu"] if Path("/dev/nvidia0").exists() else [])]  # those of this machine
KEYS = ["a", "dir.v1/b", "ü", "x" * 60, *(f"n{n}" for n in range(9))]


SCHEMA = {"image": shardkit.Image(), "label": shardkit.Int(), "text": shardkit.Text(optional=True)}


def samples(keys=KEYS):
    """Images of two formats, and a text that not all have."""
    return [
        {"__key__": key, "image": make_image(n, ("JPEG", "PNG")[n % 2]), "label": n % 3}
        | ({"text": f"text {n} ü"} if n % 4 else {})
        for n, key in enumerate(keys)
    ]


def convert(out, given=None, **options):
    given = samples() if given is None else given
    schema = SCHEMA if isinstance(given, list) else None
    return shardkit.convert(given, "wds", out, **{"schema": schema, "workers": 0, **options})


def dalis(path):
    """The index that wds2idx would write, made with tarfile."""
    with tarfile.open(path) as tar:
        members = [(*m.name.split("/")[-1].partition(".")[::2], m) for m in tar]
    lines = []
    for _, group in groupby(members, lambda m: (m[2].name.rpartition("/")[0], m[0])):
        lines.append(" ".join(f"{e} {m.offset_data} {m.size} {m.name}" for _, e, m in group))
    return "\n".join([f"v1.2 {len(lines)}", *lines, ""])


def energons(path):
    """Where samples begin, and where the last ends."""
    with tarfile.open(path) as tar:
        members = [(m.name.rpartition("/")[2].partition(".")[0], m) for m in tar]
    starts = [next(group)[1].offset for _, group in groupby(members, lambda m: m[0])]
    last = members[-1][1]
    return [*starts, last.offset_data + -(-last.size // 512) * 512]


def assert_indexes(folder):
    paths = sorted(folder.glob("*.tar"))
    assert paths
    for path in paths:
        assert path.with_suffix(".idx").read_text() == dalis(path)
        index = path.with_name(path.name + ".idx")
        assert np.fromfile(index, "<u8").tolist() == energons(path)


def test_indexes_say_where_tarfile_finds_the_members(tmp_path):
    convert(tmp_path / "one", beside=ALL)
    assert_indexes(tmp_path / "one")
    out = tmp_path / "several"
    convert(out, beside=ALL, shard_samples=4)
    assert_indexes(out)
    assert shardkit.verify(out).sound
    manifest = json.loads((out / "__shardkit__/manifest.json").read_text())
    named = {file["name"] for file in manifest["files"]}
    for shard in manifest["shards"]:
        named |= {shard["file"]["name"], *(file["name"] for file in shard["beside"])}
    there = files_of(out).keys()
    assert there - named == {"__shardkit__/manifest.json"}
    assert named <= there
    assert manifest["recipe"]["beside"] == [*ALL]
    with shardkit.open(out) as dataset:
        assert dataset.keys() == KEYS
    shutil.rmtree(out / "__shardkit__")  # a copy without manifest passes over them
    dataset = shardkit.open(out)
    assert dataset.shards == 4
    assert dataset.beside == {".json file": 1, "hidden": 1}
    assert [sample["__key__"] for sample in dataset] == KEYS


def test_long_names_have_their_headers_before_them(tmp_path):
    given = samples(["long/" + "x" * 150, "ü" * 60, "c"])
    convert(tmp_path / "out", given, beside=["dali", "energon"])
    assert_indexes(tmp_path / "out")
    with refused(SampleError, "wids cannot read", key=given[0]["__key__"]):
        convert(tmp_path / "wids", given, beside=["wids"])
    result = convert(tmp_path / "rest", given, beside=["wids"], on_error="skip")
    assert (result.samples, result.errors) == (1, 2)


def test_joined_shards_have_joined_indexes(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkit.conversion.cuts._COPIED_BYTES", 4_000)
    convert(tmp_path / "in")
    out, both = tmp_path / "train.tar", ["wids", "dali"]
    convert(out, tmp_path / "in", beside=both)
    with pytest.raises(UsageError, match="energon reads folders"):
        convert(out, tmp_path / "in", beside=ALL)
    ours = {name for name in files_of(tmp_path) if name.startswith("train")}
    assert ours == {"train.tar", "train.idx", "train.tar.wids.json"}
    assert (tmp_path / "train.idx").read_text() == dalis(out)
    index = json.loads((tmp_path / "train.tar.wids.json").read_text())
    assert [(s["url"], s["nsamples"]) for s in index["shardlist"]] == [("train.tar", 13)]
    tasks = json.loads((tmp_path / "__shardkit__/train.tar.manifest.json").read_text())
    assert tasks["shards"][0]["tasks"] != [0, 0]
    assert shardkit.verify(out).sound
    before = files_of(tmp_path)
    assert convert(out, tmp_path / "in", beside=both).already_complete
    convert(out, tmp_path / "in", beside=both, overwrite=True)
    assert files_of(tmp_path) == before


def test_other_files_are_another_dataset_and_the_same_samples(tmp_path):
    convert(tmp_path / "in")
    convert(tmp_path / "out", tmp_path / "in", beside=["dali"])
    with refused(OutputError, says="beside was ['dali'], is ['wids']"):
        convert(tmp_path / "out", tmp_path / "in", beside=["wids"])
    convert(tmp_path / "out", tmp_path / "in", beside=["wids", "energon"], overwrite=True)
    assert not (tmp_path / "out/shard-000000.idx").exists()
    assert shardkit.verify(tmp_path / "out", tmp_path / "in").sound


def test_verify_finds_what_is_changed_in_any_of_them(tmp_path):
    out = tmp_path / "out"
    convert(out, beside=ALL)
    names = [n for n in files_of(out) if not re.search(r"\.tar$|__shardkit__", n)]
    assert len(names) == 6
    for path in map(out.joinpath, names):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + b"?")
        (problem,) = shardkit.verify(out).problems
        assert problem.where["path"] == path
        path.unlink()
        (problem,) = shardkit.verify(out).problems
        assert "missing" in str(problem)
        path.write_bytes(data)


def test_what_a_loader_cannot_hold_is_refused(tmp_path):
    with refused(SampleError, "blanks", key="b c"):
        convert(tmp_path / "out", samples(["a", "b c"]), beside=["dali"])
    convert(tmp_path / "safe", samples(["a", "b c"]), beside=["dali"], safe_keys=True)
    assert "b%20c.png" in (tmp_path / "safe/shard-000000.idx").read_text()
    for field in ("a b", ""):
        given = [{"__key__": "a", field: b"x"}]
        with pytest.raises(FormatError, match="cannot hold a field"):
            convert(tmp_path / "field", given, schema=None, beside=["dali"])
    for to, beside, says in (
        ("lmdb", ["wids"], "--to wds, whose TARs"),
        ("wds", ["tfds"], "dali, energon, wids"),
        ("wds", "wids", "must be a list of names"),
    ):
        with pytest.raises(UsageError, match=says):
            shardkit.convert(samples(), to, tmp_path / "none", schema=SCHEMA, beside=beside)
    assert not (tmp_path / "none").exists()


@pytest.fixture
def splits(tmp_path):
    convert(tmp_path / "in")
    options = {"beside": ALL, "shard_samples": 3, "split": "train=0.6,val=0.4"}
    convert(tmp_path / "splits", tmp_path / "in", **options)
    return tmp_path / "splits"


def test_splits_are_energons_parts(splits):
    parts = json.loads((splits / ".nv-meta/split.yaml").read_text())["split_parts"]
    counts = json.loads((splits / ".nv-meta/.info.json").read_text())["shard_counts"]
    for name, paths in parts.items():
        assert sum(counts[path] for path in paths) == len(shardkit.open(splits / name))
        own = json.loads((splits / name / "wids.json").read_text())["shardlist"]
        assert [f"{name}/{shard['url']}" for shard in own] == paths
        assert_indexes(splits / name)
    assert [*parts] == ["train", "val"]
    assert shardkit.verify(splits).sound


@pytest.mark.large
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a dead process closes nothing
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["splits", "train.tar"])
def test_runs_that_die_anywhere_are_continued(tmp_path, name, monkeypatch):
    monkeypatch.setattr("shardkit.conversion.cuts._COPIED_BYTES", 4_000)
    convert(tmp_path / "in")
    options = {"beside": ALL, "split": "train=0.6,val=0.4"}
    if name == "train.tar":
        options = {"beside": ("dali", "wids"), "split": "none"}

    def make(folder):
        convert(tmp_path / folder / name, tmp_path / "in", overwrite=True, **options)

    for folder in ("out", "reference"):
        (tmp_path / folder).mkdir()
    if name == "train.tar":  # whose parts are not synced
        make("reference")
    else:
        with pytest.MonkeyPatch.context() as patch:
            recorder = Recorder(patch)
            make("reference")
        out = tmp_path / "reference" / name
        assert not {path for path in recorder.unsynced if path.is_relative_to(out)}
    reference = files_of(tmp_path / "reference")
    assert any(path.endswith("wids.json") for path in reference)
    for _ in left_by_deaths(tmp_path / "out", lambda: make("out"), everywhere=True):
        if (tmp_path / "out" / name).exists():
            found = {n: d for n, d in files_of(tmp_path / "out").items() if ".partial/" not in n}
            assert found == reference
        make("out")
        assert files_of(tmp_path / "out") == reference


DIGEST = "import glob, hashlib, json, sys\ndigest = lambda b: hashlib.md5(bytes(b)).hexdigest()\n"
WIDS = """
import wids
dataset = wids.ShardListDataset(sys.argv[1], cache_dir=sys.argv[2], transformations=[])
found = []
for n in [*range(len(dataset)), 0]:
    sample = dataset[n]
    fields = {k[1:]: digest(v.read()) for k, v in sample.items() if k[0] == "."}
    found.append([sample["__key__"], fields])
print(json.dumps(found))
"""
DALI = """
import os
gpu = sys.argv[2] == "gpu"
if gpu:
    del os.environ["CUDA_VISIBLE_DEVICES"]
from nvidia.dali import fn, pipeline_def
paths = sorted(glob.glob(sys.argv[1] + "/*.tar"))
extensions = ["jpg", "png", "cls", "txt"]
def read(indexes):
    @pipeline_def(batch_size=1, num_threads=1, device_id=0 if gpu else None)
    def pipeline():
        outputs = fn.readers.webdataset(
            paths=paths, index_paths=indexes, ext=extensions, name="reader",
            missing_component_behavior="empty",
        )
        return tuple(output.gpu() if gpu else output for output in outputs)
    pipe = pipeline()
    pipe.build()
    found = []
    for _ in range(2 * pipe.epoch_size("reader")):
        outputs = [output.as_cpu() if gpu else output for output in pipe.run()]
        values = [bytes(output.as_array()[0]) for output in outputs]
        found.append({e: digest(v) for e, v in zip(extensions, values) if v})
    return found
print(json.dumps([read([p[:-4] + ".idx" for p in paths]), read(None)]))
"""
ENERGON = """
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader
from megatron.energon import get_train_dataset, stateless
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset import sample_decoder
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta
def cook(sample):
    fields = {f: digest(sample[f]) for f in ("jpg", "png", "cls", "txt") if f in sample}
    return {"found": [sample["__key__"], fields]}
class Encoder(DefaultTaskEncoder):
    decoder = None
    cookers = [Cooker(stateless(cook))]
    def batch(self, samples):
        return samples
def read(folder, part):
    dataset = get_train_dataset(
        folder, split_part=part, batch_size=2, shuffle_buffer_size=None,
        max_samples_per_sequence=None, repeat=False, task_encoder=Encoder(),
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    return [sample["found"] for batch in get_loader(dataset) for sample in batch]
def count(folder, part):
    return [s.count for s in WebdatasetMeta.from_config(EPath(folder), split_part=part).shards]
out, splits, *preparations = sys.argv[1:]
parts = [(out, "train"), (splits, "train"), (splits, "val")]
found = [[count(*part), read(*part)] for part in parts]

from megatron.energon.cli.main import main
for arguments in preparations:
    try:
        main(json.loads(arguments), standalone_mode=False)
    except SystemExit as end:
        assert not end.code, end
print(json.dumps(found))
"""


def fields_of(sample):
    """What a loader should find: digests of payloads, by extension."""
    from hashlib import md5

    image = sample["image"]
    values = {"png" if image[1:4] == b"PNG" else "jpg": image, "cls": b"%d" % sample["label"]}
    if "text" in sample:
        values["txt"] = sample["text"].encode()
    return {extension: md5(value).hexdigest() for extension, value in values.items()}


EXPECTED = [(sample["__key__"], fields_of(sample)) for sample in samples()]


@pytest.mark.large
def test_wids_reads_every_sample(tmp_path):
    convert(tmp_path / "out", beside=ALL, shard_samples=4)
    (tmp_path / "cache").mkdir()
    found = clients.run("wids", DIGEST + WIDS, tmp_path / "out/wids.json", tmp_path / "cache")
    assert [(key, fields) for key, fields in found] == [*EXPECTED, EXPECTED[0]]


@pytest.mark.large
@pytest.mark.parametrize("device", DEVICES)
def test_dali_reads_two_epochs_with_and_without_our_index(tmp_path, device):
    convert(tmp_path / "out", beside=ALL, shard_samples=4)
    for found in clients.run("nvidia", DIGEST + DALI, tmp_path / "out", device):
        assert found == 2 * [fields for _, fields in EXPECTED]


@pytest.mark.large
def test_energon_reads_folders_and_parts_and_prepares_folders(tmp_path, splits):
    """`energon prepare` adds files to a dataset without ours, and writes the same as ours."""
    convert(tmp_path / "out", beside=ALL, shard_samples=4)
    convert(tmp_path / "plain", shard_samples=4)
    before = files_of(tmp_path / "out")
    how = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
    prepare = json.dumps(["prepare", *how, f"{tmp_path}/plain"])
    again = json.dumps(["prepare", "--tar-index-only", f"{tmp_path}/out"])
    found = clients.run("megatron", DIGEST + ENERGON, tmp_path / "out", splits, prepare, again)
    (counts, whole), *parts = found
    assert counts == [4, 4, 4, 1]
    assert sorted((key, fields) for key, fields in whole) == sorted(EXPECTED)
    for name, (counts, part) in zip(("train", "val"), parts, strict=True):
        expected = sorted(sample["__key__"] for sample in shardkit.open(splits / name))
        assert sorted(key for key, _ in part) == expected
        assert sum(counts) == len(expected)
    assert (tmp_path / "plain/.nv-meta/index.sqlite").is_file()
    after = files_of(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    for name in ("plain", "out"):
        assert shardkit.verify(tmp_path / name).sound
    for name in ("shard-000000.tar.idx", "shard-000003.tar.idx"):
        assert (tmp_path / "plain" / name).read_bytes() == before[name]
