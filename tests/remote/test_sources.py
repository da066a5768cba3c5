"""Images and text at URLs: the same datasets, bit by bit, as from a folder of this machine."""

import gzip
import io
import itertools
import json
import random
import re
import shutil
import struct
from urllib.parse import quote

import numpy as np
import pytest
import tokenizers

import shardkit
from shardkit.conversion.run import prepare, run
from shardkit.errors import NotFoundError, OutputError, ShardkitError, StorageError, UsageError
from shardkit.formats.testing_samples import in_fork
from shardkit.inspection.inspect import inspect
from shardkit.options import ConvertOptions, TextOptions
from shardkit.storage import byte_source, fs
from shardkit.storage.page_cache import MemoryCache
from shardkit.testing import make_audio, make_image
from tests.boxed import coco_json, some_painted, voc
from tests.conftest import few, files_of
from tests.remote.buckets import Bucket
from tests.remote.conftest import buckets_of
from tests.remote.proxy import Rule
from tests.remote.servers import SIGNED, request
from tests.sources.real import put

KINDS = {  # and with which options they are converted
    "classes": {"shard_samples": 8},
    **{kind: {} for kind in ("metadata", "splits", "boxes", "xml", "texts", "speech")},
    "lines": {"shard_size": "500KB", "text": TextOptions(keep_fields=True)},
    "digits": {"shard_samples": 15},
    "arrays": {"to": "arrow"},
    "table": {"split": "train=0.8,val=0.2"},
}
# Folders as others lay them out; some are a part of a folder, or one above.
LAYOUTS = ("imagenet", "above", "hub#de", "hub#en", "numbered")
CARD = """---
configs:
- config_name: de
  data_files:
  - split: train
    path: de/a.jsonl
  - split: test
    path: de/b.jsonl
- config_name: en
  data_files: en/*
---
"""


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """A folder of each kind."""
    root = tmp_path_factory.mktemp("trees")
    # With files beside the images, odd names and what is ignored.
    classes = {f"class{n % 3}/sub{n % 2}/{n:03}.jpg": make_image(n) for n in range(30)}
    for n in range(0, 30, 3):
        classes[f"class0/sub{n % 2}/{n:03}.txt"] = f"caption {n}"
        classes[f"class0/sub{n % 2}/{n:03}_mask.png"] = make_image(n, "PNG")
    classes["class1/v1.0 ü.jpg"] = make_image(77)
    put(root / "classes", {**classes, "class1/.hidden": b"x", "class2/notes.pdf": b"x"})

    rows = "".join(f"{n:03}.jpg,{n},{n / 2}\n" for n in range(12))
    put(root / "metadata", {f"{n:03}.jpg": make_image(n) for n in range(12)})
    put(root / "metadata", {"metadata.csv": f"file_name,number,half\n{rows}"})
    for split, count in (("train", 12), ("val", 6)):
        put(root / "splits", {f"{split}/c{n % 2}/{n}.jpg": make_image(n) for n in range(count)})

    images = some_painted(12, 3)  # COCO, of sizes that the annotations do not say
    text = re.sub(r'"(width|height)": \d+, ', "", coco_json(images))
    put(root / "boxes", {f"train2017/{image.name}.png": image.file() for image in images})
    put(root / "boxes", {"annotations/instances_train2017.json": text})
    images = some_painted(12, 4)
    lists = voc(root / "xml", {"train": images[:9], "val": images[9:]}) / "ImageSets/Main"
    for path in lists.glob("bottle_*"):  # of a class
        path.unlink()

    texts = {f"b/c{n % 4}/{n}.txt": f"document {n}\n" * 10 * (n + 1) for n in range(20)}
    put(root / "texts", {**texts, "a.md": "# one", "z/deep/er.txt": "last", "z/empty.txt": ""})
    dice = random.Random(5)
    lines = [
        json.dumps({"text": f"line {n} " + "word " * dice.randrange(200), "n": n}) + "\n"
        for n in range(6000)
    ]
    parts = ["".join(lines[start : start + 2000]) for start in range(0, 6000, 2000)]
    compressed = gzip.compress(parts[1].encode(), 1)
    put(root / "lines", {"x/0.jsonl": parts[0], "x/1.jsonl.gz": compressed, "y/2.jsonl": parts[2]})
    rows = "".join(f'{n},"a, ""{n}"""\n' for n in range(100))
    put(root / "table", {"a.csv": f"id,text\n{rows}", "b.csv": "id,text\n1,x\n"})

    # As Speech Commands has it, and as LibriSpeech.
    for word in ("no", "yes"):
        put(root / "speech", {f"{word}/{n:02}.wav": make_audio(n) for n in range(8)})
    said = "".join(f"{n:02} no {n}\n" for n in range(8))
    lists = {"validation_list.txt": "no/01.wav\n", "testing_list.txt": "yes/02.wav\n"}
    put(root / "speech", {**lists, "no/no.trans.txt": said})

    dice = np.random.default_rng(0)
    pixels = struct.pack(">HBBIII", 0, 8, 3, 40, 8, 8) + dice.bytes(40 * 8 * 8)
    labels = struct.pack(">HBBI", 0, 8, 1, 40) + bytes(range(40))
    put(root / "digits", {"train-images-idx3-ubyte.gz": gzip.compress(pixels, mtime=0)})
    put(root / "digits", {"train-labels-idx1-ubyte": labels, "readme.txt": "x"})
    arrays, file = {}, io.BytesIO()  # compressed, and some megabytes
    for split, count in (("train", 50), ("test", 20)):
        arrays |= {f"{split}_x": dice.normal(size=(count, 64, 64)), f"{split}_y": np.arange(count)}
    np.savez_compressed(file, **arrays)
    put(root / "arrays", {"x.npz": file.getvalue()})

    for folder in (root / "imagenet", root / "above/imagenet"):
        put(folder, {f"train/n0{n % 2}/{n}.JPEG": make_image(n) for n in range(4)})
        put(folder, {f"val/ILSVRC2012_val_{n:08d}.JPEG": make_image(n) for n in range(1, 5)})
        devkit = folder / "ILSVRC2012_devkit_t12/data"
        put(devkit, {"ILSVRC2012_validation_ground_truth.txt": "2\n1\n1\n2\n"})
        put(devkit, {"map_clsloc.txt": "n00 2 a\nn01 1 b\n"})
    hub = {name: f'{{"text": "{name}"}}\n' for name in ("de/a.jsonl", "de/b.jsonl", "en/c.jsonl")}
    put(root / "hub", {**hub, "README.md": CARD})
    put(root / "numbered", {f"00000/{n:09d}.jpg": make_image(n) for n in range(3)})
    return put(root, {"numbered/00000_stats.json": '{"count": 5, "successes": 3}'})


@pytest.fixture(scope="module")
def data(google, trees):
    return Bucket(google, trees)


def convert(source, out, given=None, **more):
    more = {"workers": 0, "to": "wds", **more}
    out.parent.mkdir(exist_ok=True)
    return shardkit.convert(source, out=out, storage_options=given or None, **more)


@pytest.fixture
def same(tmp_path):
    """`same(there, here, options)` converts both, and compares the datasets; what conversions
    return of a URL and of this machine."""
    numbers = itertools.count(1)

    def compare(there, here, given, **more):
        number = next(numbers)
        outs = [tmp_path / f"{place}{number}" for place in ("there", "here")]
        made = convert(there, outs[0], given, **more), convert(here, outs[1], **more)
        assert files_of(outs[0]) == files_of(outs[1])
        return made

    return compare


# --- the same bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, *LAYOUTS])
def test_the_result_is_that_of_a_folder(kind, data, trees, same):
    made, here = same(data.url(kind), str(trees / kind), data.options, **KINDS.get(kind, {}))
    assert (made.samples, made.ignored) == (here.samples, here.ignored)
    notes = [note.replace(data.url(kind), "") for note in made.notes]
    assert notes == [note.replace(str(trees / kind), "") for note in here.notes]
    assert made.samples >= (12 if kind in KINDS else 1)


@pytest.mark.large
def test_several_urls_and_patterns(data, trees, tmp_path, same):
    """Beside a folder of this machine too."""
    convert(trees / "classes", tmp_path / "tars", shard_samples=4)
    shutil.rmtree(tmp_path / "tars/__shardkit__")
    data.put(tmp_path / "tars", "tars/")
    tars = sorted((tmp_path / "tars").glob("*.tar"))
    folders = [data.url("classes"), trees / "metadata"]
    same(folders, [trees / "classes", trees / "metadata"], data.options, drop=["label"])
    for there, here in (
        ([data.url("lines/{x,y}/*")], [trees / "lines/{x,y}/*"]),
        ([data.url("tars/shard-*.tar")], tars),
        ([data.url(f"tars/{path.name}") for path in tars], [tmp_path / "tars/*.tar"]),
    ):
        same(there, here, data.options)
    out = sorted(tmp_path.glob("there*"))[-1]
    assert shardkit.verify(out, against=there, storage_options=data.options).sound


def test_every_store(store, trees, same):
    bucket = Bucket(store)
    for kind in ("classes", "lines"):
        bucket.put(trees / kind, f"{kind}/")
        same(bucket.url(kind), str(trees / kind), bucket.options, **KINDS[kind])
    for mark in ("in/", "in/c0/") if store.scheme != "az" else ():  # of folders
        request(f"{bucket.store.endpoint}/{bucket.name}/{mark}", "PUT", b"", **SIGNED)
    for name, count in (("in/c0/0.jpg", 1), ("in/c0/0.jpg/1.jpg", 2)):
        bucket.put({name: make_image()})
        prepared = plan_of(bucket, "in")
        assert (prepared.samples, prepared.ignored()) == (count, {})


def plan_of(bucket, key="", out="out", **options):
    with fs.using(bucket.options):
        return prepare(bucket.url(key), "wds", out, ConvertOptions.of(**options))


@pytest.mark.parametrize("kind", few(KINDS, "classes", "lines"))
def test_a_file_system_of_fsspec(kind, trees, same):
    import fsspec

    system = fsspec.filesystem("memory")
    system.put(str(trees / kind), f"/trees/{kind}", recursive=True)
    same(f"memory://trees/{kind}", str(trees / kind), {}, **KINDS[kind])
    system.rm("/trees", recursive=True)


def test_one_file_of_text(data, web, trees, same):
    put(web.root / "corpus", {"0.jsonl": (trees / "lines/x/0.jsonl").read_bytes()})
    for url in (data.url("lines/x/0.jsonl"), f"{web.endpoint}/corpus/0.jsonl"):
        same(url, str(trees / "lines/x/0.jsonl"), data.options if "gs" in url[:2] else {})


def test_a_table_of_labels_at_a_url(bucket, web, tmp_path):
    """In a bucket among the images, which it is none of; and on a web server alone."""
    rows = "".join(f"{name:03},{['even', 'odd'][name % 2]}\n" for name in range(12))
    table = f"id,label\n{rows}".encode()
    images = {f"{n:03}.jpg": make_image(n) for n in range(12)}
    folder = put(tmp_path / "in", {**images, "labels.csv": table})
    bucket.put(folder)
    put(web.root / "tables", {"labels.csv": table})
    url, web_url = bucket.url("labels.csv"), f"{web.endpoint}/tables/labels.csv"
    asked = {"file_column": "id", "file_suffix": ".jpg", "label_column": "label"}
    convert(str(folder), tmp_path / "here", metadata=folder / "labels.csv", **asked)
    convert(bucket.url(), tmp_path / "there", bucket.options, metadata=url, **asked)
    convert(str(folder), tmp_path / "both", bucket.options, metadata=url, **asked)
    (folder / "labels.csv").unlink()
    convert(str(folder), tmp_path / "web", metadata=web_url, **asked)
    assert shardkit.open(tmp_path / "here").classes == ("even", "odd")
    for name in ("there", "web"):
        assert files_of(tmp_path / name) == files_of(tmp_path / "here")
    given = {"metadata": url, "storage_options": bucket.options}
    assert shardkit.verify(tmp_path / "here", bucket.url(), **given).sound


def test_a_forked_process_lists_and_reads(data, tmp_path):
    assert data.path("classes").is_dir()  # obstore runs here

    def work():
        convert(data.url("classes"), tmp_path / "out", data.options)

    in_fork(work)
    assert len(shardkit.open(tmp_path / "out")) == 31


def test_verify_against(data, bucket, trees, tmp_path):
    for kind in ("classes", "lines", "splits"):
        convert(str(trees / kind), tmp_path / kind, **KINDS[kind])
        report = shardkit.verify(tmp_path / kind, data.url(kind), storage_options=data.options)
        assert report.sound, report.problems[0]
    bucket.put(trees / "classes")
    bucket.put({"class0/sub0/000.jpg": make_image(99)})
    given = {"storage_options": bucket.options}
    (problem,) = shardkit.verify(tmp_path / "classes", bucket.url(), **given).problems
    assert problem.where["key"] == "class0/sub0/000"


def test_tokens_at_a_url_are_compared_with_their_text(bucket, trees, tmp_path):
    """The dataset's own tokenizer makes them again, and tells what they are."""
    file = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["document 1 2 3"], 300, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(file))
    source, local = str(trees / "texts"), tmp_path / "tokens"
    convert(source, local, text=TextOptions(tokenizer=str(file), seq_len=32))
    bucket.put(local)
    report = shardkit.verify(bucket.url(), source, storage_options=bucket.options)
    assert report.sound, report.problems[0]
    there = inspect(bucket.url(), storage_options=bucket.options)
    assert there["first"] == inspect(local)["first"]
    with pytest.raises(UsageError, match="cannot be read from a URL"):
        convert(source, tmp_path / "out", text=TextOptions(tokenizer="gs://b/tokenizer.json"))


# --- requests ------------------------------------------------------------------------------------


def test_subsets_of_objects_are_chosen_by_headers_and_by_values_alone(own, tmp_path, same):
    """The headers are read side by side."""
    files = {f"c{n % 2}/{n:03}.jpg": make_image(n, size=(8 + n % 5, 8)) for n in range(100)}
    files = {name: data + bytes(100_000) for name, data in files.items()}
    own.put(files)
    own.proxy.add(Rule(match="jpg", gather=16, times=16))
    asked = {"where": "label == 'c1' and width == 9", "sample": 0.9, "split": "a=0.5,b=0.5"}
    plan = plan_of(own, out=tmp_path / "out", **asked)
    assert own.proxy.count(match="jpg$").requests == 50  # those of the class
    assert own.proxy.count("GET").sent < 50 * 25_000
    here = str(put(tmp_path / "in", files))
    there, here = same(own.url(), here, own.options, **asked)
    assert there.samples == here.samples == plan.samples
    given = {"against": own.url(), "storage_options": own.options}
    assert shardkit.verify(tmp_path / "there1", **given).problems == []


@pytest.mark.parametrize("format", ["wds", "parquet"])
def test_subsets_of_datasets_do_not_read_what_they_do_not_ask_for(format, own, tmp_path):
    dice = random.Random(3)
    schema = {"x": shardkit.Bytes(), "label": shardkit.Int(), "group": shardkit.Text()}
    with shardkit.create(tmp_path / "in", format, schema, shard_size="8MB") as out:
        for n in range(200):
            out.write({"x": dice.randbytes(100_000), "label": n % 10, "group": f"g{n % 7}"})
    own.put(tmp_path / "in")
    asked = {"where": "label == 3", "group": "group", "folds": 2}
    plan = plan_of(own, out=tmp_path / "out", **asked)
    assert plan.samples == 20
    assert own.proxy.count("GET").sent < 6_000_000  # of 20 MB
    here = prepare(tmp_path / "in", "wds", tmp_path / "out", ConvertOptions.of(**asked))
    orders = ([split.slice.order.tolist() for split in each.splits] for each in (here, plan))
    assert next(orders) == next(orders)


@buckets_of("google", "s3")  # azurite lists 5,000 objects at a time
def test_one_listing_and_a_request_for_each_object(own, tmp_path, same):
    """Of 40 folders and 1,040 objects: two pages, whichever folder they lie in. Objects are read
    side by side, and again after a fault."""
    files = {f"c{n % 40:02}/{n}.txt": f"text {n}".encode() for n in range(1040)}
    own.put(files, "in/")
    own.proxy.add(
        Rule(status=503, match="start-after|continuation-token", times=1),
        Rule(shorten=1, match=r"/in/c\d+/\d+\.txt$", skip=40, times=3),
        Rule(reset_after=2, match=r"/in/c\d+/\d+\.txt$", skip=60, times=3),
        Rule(match=r"/in/c\d+/\d+\.txt$", gather=16, times=16),
    )
    made, _ = same(own.url("in"), str(put(tmp_path / "in", files)), own.options)
    assert made.samples == 1040
    # Of the folder alone, and of all below; two for the page that failed.
    assert own.proxy.count(match="list-type").requests <= 6
    assert own.proxy.count("GET", r"/in/c\d+/\d+\.txt$").requests == 1046
    assert own.proxy.count("HEAD").requests <= 6


def test_ranges_of_a_long_file_are_downloaded_once(seen, trees, tmp_path):
    convert(seen.url("lines"), tmp_path / "out", seen.options, **KINDS["lines"])
    size = sum(map(len, files_of(trees / "lines").values()))
    sample = 3 * (1 << 20)  # the beginnings of three files, from which the fields are known
    assert seen.proxy.count("GET", "jsonl").sent <= 1.1 * size + sample
    assert seen.proxy.count("HEAD", "jsonl").requests <= 3


@pytest.mark.parametrize(
    ("format", "requests"), [("wds", 1.2), pytest.param("lmdb", 1.3, marks=pytest.mark.large)]
)
def test_samples_that_a_conversion_shuffles_are_read_by_themselves(
    format, requests, own, tmp_path, same,
    monkeypatch,
):  # fmt: skip
    """With their tables once; and those in their order by pieces of 1 MiB."""
    monkeypatch.setattr(byte_source, "LATEST", 2)  # pieces in memory: fewer than the dataset has
    dice, samples = random.Random(3), 300
    with shardkit.create(tmp_path / "in", format, {"x": shardkit.Bytes()}, shard_size="2MB") as out:
        for n in range(samples):
            out.write({"__key__": f"k{n}", "x": dice.randbytes(20_000)})
    own.put(tmp_path / "in")
    size = sum(len(data) for data in files_of(tmp_path / "in").values())
    for shuffle, most in ((True, requests * samples), (False, 30)):
        own.proxy.clear()
        more = {"shuffle": shuffle, "shard_size": "2MB"}
        same(own.url(), str(tmp_path / "in"), own.options, **more)
        found = own.proxy.count("GET")
        assert found.sent < 1.1 * size
        assert found.requests < most


def test_a_store_that_goes_away_drops_no_samples(seen, tmp_path):
    seen.proxy.add(Rule(status=503, match="jpg", skip=5))
    with pytest.raises(StorageError, match="returned an unexpected response"):
        convert(seen.url("classes"), tmp_path / "out", seen.options, on_error="skip")
    assert not (tmp_path / "out").exists()


# --- changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [("classes", "class0/sub0/000.jpg"), ("classes", "class0/sub0/000.txt"),
     ("texts", "b/c1/1.txt"), ("lines", "x/0.jsonl")],
)  # fmt: skip
def test_an_object_that_changes_after_planning(kind, name, bucket, trees, tmp_path):
    """To other bytes that are as good, to fewer, and to nothing."""
    bucket.put(trees / kind)
    data = bucket.get(name)
    other = data[:-2] + b"XX" if name.endswith(".jpg") else data.replace(b"o", b"O")
    for changed in (other, data[: len(data) // 2], None):
        bucket.put({name: data})
        plan = plan_of(bucket, out=tmp_path / "out", workers=0)
        bucket.delete(name)
        bucket.put({} if changed is None else {name: changed})
        with pytest.raises(
            shardkit.SampleError, match="changed while the conversion ran"
        ) as caught:
            run(plan, ConvertOptions.of(workers=0), None, None)
        assert str(caught.value.where["path"]).startswith(bucket.url())
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "out.partial")


def test_a_listing_that_changes(bucket, trees, tmp_path):
    """What is added after planning is not of this run, and the next one is of another source."""
    bucket.put(trees / "classes")
    plan = plan_of(bucket, out=tmp_path / "out", workers=0)
    bucket.put({"class0/new.jpg": make_image(5)})
    run(plan, ConvertOptions.of(workers=0), None, None)
    convert(str(trees / "classes"), tmp_path / "here")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "here")
    with pytest.raises(OutputError, match="holds another dataset") as caught:
        convert(bucket.url(), tmp_path / "out", bucket.options)
    assert caught.value.found == "the source has changed"


@pytest.mark.large
@pytest.mark.parametrize("kind", ["classes", "texts", "shards", "third-party shards"])
def test_a_run_goes_on_where_it_was(kind, own, trees, tmp_path, monkeypatch):
    """And not where the source has changed, also to the same size."""
    folder, out = trees / kind, tmp_path / "out"
    if "shards" in kind:
        folder = tmp_path / "in"
        convert(str(trees / "classes"), folder, shard_samples=4)
        if kind == "third-party shards":
            shutil.rmtree(folder / "__shardkit__")
    own.put(folder)
    more = {"shard_size": "5KB", "to": "arrow"}
    monkeypatch.setattr(MemoryCache, "get", lambda *_: None)  # or small shards stay in memory
    names = [name for name in own.listed() if name.endswith((".jpg", ".txt", ".tar"))]
    last = max(name for name in names if not name.endswith("empty.txt"))
    reads = 2 if kind == "third-party shards" else 0  # while planning
    own.proxy.add(Rule(status=403, match=last, method="GET", skip=reads))
    with pytest.raises(StorageError, match="refuses access"):
        convert(own.url(), out, own.options, **more)
    assert any((tmp_path / "out.partial/tasks").glob("*/result.json"))

    if kind != "shards":  # which their manifest stands for
        own.proxy.clear()
        whole = own.get(last)
        at = min(600, len(whole) // 2)  # of a TAR, in the first payload
        own.put({last: whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]})
        with pytest.raises(OutputError, match="other options or another source") as caught:
            convert(own.url(), out, own.options, **more)
        assert caught.value.found == "the source has changed"
        own.put({last: whole})

    own.proxy.clear()
    convert(own.url(), out, own.options, **more)
    if "shards" not in kind:
        read = {entry.target for entry in own.proxy.log() if entry.target[-4:] in (".jpg", ".txt")}
        assert 0 < len(read) < len(names) / 2
    convert(str(folder), tmp_path / "here", **more)
    assert files_of(out) == files_of(tmp_path / "here")


# --- names, and bad input ------------------------------------------------------------------------


@buckets_of("google", "s3")
@pytest.mark.parametrize("name", ["in/a//b.jpg", "in/../b.jpg", "in/./b.jpg", "in/a\tb.jpg"])
def test_a_name_that_no_file_can_have(name, bucket):
    bucket.put({"in/c/a.jpg": make_image()})
    url = f"{bucket.store.endpoint}/{bucket.name}/{quote(name)}"
    request(url, "PUT", make_image(), **SIGNED)
    with pytest.raises(StorageError, match="object with an unsupported name") as caught:
        plan_of(bucket, "in")
    assert name.startswith(caught.value.found or "-")


@buckets_of("google", "s3")
def test_odd_names(bucket, tmp_path, same):
    names = ["ü b", "%41", "a+b", "a\\b", "a#b?", "*[x]", "~x", "a&b=c"]
    files = {f"{name}.jpg": make_image(n) for n, name in enumerate(names)}
    for name, image in files.items():
        url = f"{bucket.store.endpoint}/{bucket.name}/{quote(f'in/{name}')}"
        request(url, "PUT", image, **SIGNED)
    same(bucket.url("in"), str(put(tmp_path / "in", files)), bucket.options)


@pytest.mark.parametrize("key", ["classes", "lines/x/0.jsonl"])
def test_what_cannot_be_read_leaves_nothing_behind(key, seen, tmp_path):
    away = {**seen.options, "base_url": "http://127.0.0.1:9"}
    for url, given, words in (
        (f"gs://no-such-bucket/{key}", seen.options, "there is no such bucket"),
        (seen.url(key), away, "the store cannot be reached"),
        (f"nonsense://x/{key}", {}, "unknown URL scheme"),
        (seen.url("nothing"), seen.options, "there is no such"),
    ):
        with pytest.raises(ShardkitError, match=words):
            convert(url, tmp_path / "out", given)
        assert not [*tmp_path.iterdir()]


def test_a_folder_of_a_web_server_is_not_listed(web, tmp_path):
    put(web.root / "photos", {"0.jpg": make_image()})
    with pytest.raises(NotFoundError, match="cannot list the contents of a folder") as caught:
        convert(f"{web.endpoint}/photos", tmp_path / "out")
    assert "copy other data to this machine" in (caught.value.fix or "")


def test_loose_images_are_not_loaded_from_a_url(data):
    from shardkit.performance.defaults import open_any

    with fs.using(data.options), pytest.raises(ShardkitError, match="image files at a URL"):
        open_any(data.url("classes"))
    with fs.using(data.options), pytest.raises(UsageError, match="splits") as caught:
        open_any(data.url("splits"))
    assert data.url("splits/train") in (caught.value.fix or "")
