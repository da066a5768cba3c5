"""Images and text at URLs: the same datasets, bit by bit, as from a folder of this machine."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import tokenizers

import shardkit
from shardkit import byte_source, storage
from shardkit.conversion.run import prepare, run
from shardkit.errors import (
    NotFoundError,
    OutputError,
    SampleError,
    ShardkitError,
    StorageError,
    UsageError,
)
from shardkit.inspection import inspect
from shardkit.options import ConvertOptions, TextOptions
from shardkit.remote import store as stores
from shardkit.testing import make_audio, make_image
from tests.boxed import coco_json, some_painted, voc_xml
from tests.conftest import few
from tests.remote.conftest import Through
from tests.remote.proxy import Rule
from tests.remote.servers import S3, SIGNED, Google, Nginx, Store, request
from tests.remote.test_reading import upload

# --- what is converted ---------------------------------------------------------------------------


def classes() -> dict[str, bytes]:
    """Folders of classes, with files beside the images, odd names and what is passed over."""
    files = {f"class{n % 3}/sub{n % 2}/{n:03}.jpg": make_image(n) for n in range(30)}
    for n in range(0, 30, 3):
        files[f"class0/sub{n % 2}/{n:03}.txt"] = f"caption {n}".encode()
        files[f"class0/sub{n % 2}/{n:03}_mask.png"] = make_image(n, "PNG")
    files["class1/v1.0 ü.jpg"] = make_image(77)
    files["class1/.hidden"] = files["class2/notes.pdf"] = b"x"
    return files


def metadata() -> dict[str, bytes]:
    rows = "".join(f"{n:03}.jpg,{n},{n / 2}\n" for n in range(12))
    files = {f"{n:03}.jpg": make_image(n) for n in range(12)}
    return {**files, "metadata.csv": f"file_name,number,half\n{rows}".encode()}


def splits() -> dict[str, bytes]:
    names = [("train", 12), ("val", 6)]
    return {
        f"{split}/c{n % 2}/{n}.jpg": make_image(n) for split, count in names for n in range(count)
    }


def texts() -> dict[str, bytes]:
    files = {f"b/c{n % 4}/{n}.txt": f"document {n}\n".encode() * 10 * (n + 1) for n in range(20)}
    return {**files, "a.md": b"# one", "z/deep/er.txt": b"last", "z/empty.txt": b""}


def lines() -> dict[str, bytes]:
    """JSON lines of some megabytes, in several files, one compressed."""
    dice = random.Random(5)
    rows = [
        json.dumps({"text": f"line {n} " + "word " * dice.randrange(200), "n": n}) + "\n"
        for n in range(6000)
    ]
    parts = ["".join(rows[start : start + 2000]).encode() for start in range(0, 6000, 2000)]
    compressed = gzip.compress(parts[1], 1)
    return {"x/0.jsonl": parts[0], "x/1.jsonl.gz": compressed, "y/2.jsonl": parts[2]}


def table() -> dict[str, bytes]:
    rows = "".join(f'{n},"a, ""{n}"""\n' for n in range(100))
    return {"a.csv": f"id,text\n{rows}".encode(), "b.csv": b"id,text\n1,x\n"}


def boxes() -> dict[str, bytes]:
    """COCO, of sizes that the annotations do not say."""
    images = some_painted(12, 3)
    text = re.sub(r'"(width|height)": \d+, ', "", coco_json(images))
    files = {f"train2017/{image.name}.png": image.file() for image in images}
    return {**files, "annotations/instances_train2017.json": text.encode()}


def xml() -> dict[str, bytes]:
    """Pascal VOC."""
    images = some_painted(12, 4)
    files = {f"JPEGImages/{image.name}.png": image.file() for image in images}
    files |= {f"Annotations/{image.name}.xml": voc_xml(image).encode() for image in images}
    lists = {"train": images[:9], "val": images[9:]}
    for split, some in lists.items():
        text = "".join(f"{image.name}\n" for image in some)
        files[f"ImageSets/Main/{split}.txt"] = text.encode()
    return files


def speech() -> dict[str, bytes]:
    """As Speech Commands has it, and as LibriSpeech."""
    files = {f"{w}/{n:02}.wav": make_audio(n) for w in ("no", "yes") for n in range(8)}
    lists = {"validation_list.txt": b"no/01.wav\n", "testing_list.txt": b"yes/02.wav\n"}
    texts = {"no/no.trans.txt": "".join(f"{n:02} no {n}\n" for n in range(8)).encode()}
    return {**files, **lists, **texts}


def digits() -> dict[str, bytes]:
    """As MNIST's files, some compressed."""
    values = np.random.default_rng(0).integers(0, 256, (40, 8, 8), "u1")
    images = struct.pack(">HBBIII", 0, 8, 3, 40, 8, 8) + values.tobytes()
    labels = struct.pack(">HBBI", 0, 8, 1, 40) + bytes(range(40))
    names = {"train-images-idx3-ubyte.gz": gzip.compress(images, mtime=0)}
    return {**names, "train-labels-idx1-ubyte": labels, "readme.txt": b"x"}


def arrays() -> dict[str, bytes]:
    """An archive of arrays, compressed, and some megabytes."""
    dice, file = np.random.default_rng(0), io.BytesIO()
    rows = {f"{s}_x": dice.normal(size=(n, 64, 64)) for s, n in (("train", 50), ("test", 20))}
    labels = {f"{s}_y": np.arange(n) for s, n in (("train", 50), ("test", 20))}
    np.savez_compressed(file, **rows, **labels)
    return {"x.npz": file.getvalue()}


TREES: dict[str, tuple[Callable[[], dict[str, bytes]], dict[str, Any]]] = {
    "classes": (classes, {"shard_samples": 8}),
    "metadata": (metadata, {}),
    "splits": (splits, {}),
    "boxes": (boxes, {}),
    "xml": (xml, {}),
    "texts": (texts, {}),
    "lines": (lines, {"shard_size": "500KB", "text": shardkit.TextOptions(keep_fields=True)}),
    "speech": (speech, {}),
    "digits": (digits, {"shard_samples": 15}),
    "arrays": (arrays, {"to": "arrow"}),
    "table": (table, {"split": "train=0.8,val=0.2"}),
}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind."""
    root = tmp_path_factory.mktemp("trees")
    for kind, (files, _) in TREES.items():
        write(root / kind, files())
    return root


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def bucket(google: Google, trees: Path) -> str:
    return upload(google, trees)


def convert(url: Any, out: Path, options: dict[str, Any], **more: Any) -> Any:
    more = {"workers": 0, **more}
    out.parent.mkdir(exist_ok=True)
    return shardkit.convert(url, more.pop("to", "wds"), out, storage_options=options, **more)


# --- the same bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TREES)
def test_the_result_is_that_of_a_folder(
    kind: str, google: Google, bucket: str, trees: Path, tmp_path: Path
) -> None:
    _, options = TREES[kind]
    made = convert(google.url(bucket, kind), tmp_path / "there", google.options(), **options)
    here = convert(str(trees / kind), tmp_path / "here", {}, **options)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert (made.samples, made.ignored, made.notes) == (here.samples, here.ignored, here.notes)
    assert made.samples >= 12


def layouts() -> dict[str, bytes]:
    """Folders as others lay them out, each below its own name."""
    names = [f"ILSVRC2012_val_{n:08d}" for n in range(1, 5)]
    imagenet = {f"train/n0{n % 2}/{n}.JPEG": make_image(n) for n in range(4)}
    imagenet |= {f"val/{name}.JPEG": make_image(n) for n, name in enumerate(names)}
    truth = {"ILSVRC2012_validation_ground_truth.txt": b"2\n1\n1\n2\n"}
    truth["map_clsloc.txt"] = b"n00 2 a\nn01 1 b\n"
    imagenet |= {f"ILSVRC2012_devkit_t12/data/{name}": data for name, data in truth.items()}
    files = [("train", "de/a.jsonl"), ("test", "de/b.jsonl")]
    split = "".join(f"  - split: {name}\n    path: {path}\n" for name, path in files)
    card = f"---\nconfigs:\n- config_name: de\n  data_files:\n{split}- config_name: en\n"
    hub = {"README.md": f"{card}  data_files: en/*\n---\n".encode()}
    hub |= {
        name: f'{{"text": "{name}"}}\n'.encode()
        for name in ("de/a.jsonl", "de/b.jsonl", "en/c.jsonl")
    }
    numbered = {f"00000/{n:09d}.jpg": make_image(n) for n in range(3)}
    numbered["00000_stats.json"] = b'{"count": 5, "successes": 3}'
    every = {"imagenet": imagenet, "above/imagenet": imagenet, "hub": hub, "numbered": numbered}
    return {f"{kind}/{name}": data for kind, tree in every.items() for name, data in tree.items()}


@pytest.mark.parametrize("kind", ["imagenet", "above", "hub#de", "hub#en", "numbered"])
def test_layouts_of_others_are_understood_at_urls(
    kind: str, google: Google, tmp_path: Path
) -> None:
    root = write(tmp_path / "in", layouts())
    url = google.url(upload(google, root), kind)
    made = convert(url, tmp_path / "there", google.options())
    here = convert(str(root / kind), tmp_path / "here", {})
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert (made.samples, made.ignored) == (here.samples, here.ignored)
    assert [note.replace(url, "") for note in made.notes] == [
        note.replace(str(root / kind), "") for note in here.notes
    ]


@pytest.mark.large
def test_several_urls_and_patterns(
    google: Google, bucket: str, trees: Path, tmp_path: Path
) -> None:
    """Beside a folder of this machine too."""
    tars = tmp_path / "tars"
    shardkit.convert(trees / "classes", "wds", tars, workers=0, shard_samples=4)
    shutil.rmtree(tars / "__shardkit__")
    other = upload(google, tars)
    cases: dict[str, tuple[list[Any], list[Any]]] = {
        "folders": (
            [google.url(bucket, "classes"), trees / "metadata"],
            [trees / "classes", trees / "metadata"],
        ),
        "text": ([google.url(bucket, "lines/{x,y}/*")], [trees / "lines/{x,y}/*"]),
        "shards": ([google.url(other, "shard-*.tar")], sorted(tars.glob("*.tar"))),
        "listed": (
            [google.url(other, path.name) for path in sorted(tars.glob("*.tar"))],
            [tars / "*.tar"],
        ),
    }
    for name, (there, here) in cases.items():
        options = {"drop": ["label"]} if name == "folders" else {}
        made = tmp_path / name
        convert(there, made / "there", google.options(), **options)
        convert(here, made / "here", {}, **options)
        assert contents(made / "there") == contents(made / "here")
        assert shardkit.verify(
            made / "there", against=there, storage_options=google.options()
        ).sound


def test_every_store(store: Store, trees: Path, tmp_path: Path) -> None:
    for kind in ("classes", "lines"):
        _, options = TREES[kind]
        url = store.url(upload(store, trees), kind)
        convert(url, tmp_path / kind / "there", store.options(), **options)
        convert(str(trees / kind), tmp_path / kind / "here", {}, **options)
        assert contents(tmp_path / kind / "there") == contents(tmp_path / kind / "here")


@pytest.fixture
def memory(trees: Path) -> Iterator[str]:
    import fsspec

    system = fsspec.filesystem("memory")
    system.put(str(trees), "/trees", recursive=True)
    yield "memory://trees"
    system.rm("/trees", recursive=True)


@pytest.mark.parametrize("kind", few(TREES, "classes", "lines"))
def test_a_file_system_of_fsspec(kind: str, memory: str, trees: Path, tmp_path: Path) -> None:
    _, options = TREES[kind]
    convert(f"{memory}/{kind}", tmp_path / "there", {}, **options)
    convert(str(trees / kind), tmp_path / "here", {}, **options)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_one_file_of_text(
    google: Google, bucket: str, web: Nginx, trees: Path, tmp_path: Path
) -> None:
    write(web.root / "corpus", lines())
    convert(str(trees / "lines/x/0.jsonl"), tmp_path / "here", {})
    convert(google.url(bucket, "lines/x/0.jsonl"), tmp_path / "there", google.options())
    convert(f"{web.endpoint}/corpus/x/0.jsonl", tmp_path / "web", {})
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert contents(tmp_path / "web") == contents(tmp_path / "here")


def test_a_table_of_labels_at_a_url(
    google: Google, bucket: str, web: Nginx, trees: Path, tmp_path: Path
) -> None:
    """In a bucket among the images, which it is none of; and on a web server alone."""
    rows = "".join(f"{name:03},{['even', 'odd'][name % 2]}\n" for name in range(12))
    folder = write(tmp_path / "in", {**metadata(), "labels.csv": f"id,label\n{rows}".encode()})
    (folder / "metadata.csv").unlink()
    where = google.url(upload(google, folder))
    write(web.root / "tables", {"labels.csv": (folder / "labels.csv").read_bytes()})
    asked = {"file_column": "id", "file_suffix": ".jpg", "label_column": "label"}
    here = {**asked, "metadata": folder / "labels.csv"}
    convert(str(folder), tmp_path / "here", {}, **here)
    there = {**asked, "metadata": f"{where}/labels.csv"}
    convert(where, tmp_path / "there", google.options(), **there)
    convert(str(folder), tmp_path / "both", google.options(), **there)
    (folder / "labels.csv").unlink()
    convert(
        str(folder),
        tmp_path / "web",
        {},
        **{**asked, "metadata": f"{web.endpoint}/tables/labels.csv"},
    )
    assert shardkit.open(tmp_path / "here").classes == ("even", "odd")
    for name in ("there", "web"):
        assert contents(tmp_path / name) == contents(tmp_path / "here")
    assert shardkit.verify(
        tmp_path / "here", where, metadata=there["metadata"], storage_options=google.options()
    ).sound


@pytest.mark.large
def test_a_whole_bucket_and_workers_that_decode(google: Google, tmp_path: Path) -> None:
    """By the command, whose workers get the credentials of its options and of nothing else."""
    folder = write(tmp_path / "in", classes())
    options = google.options()
    command = [
        "convert", google.url(upload(google, folder)), "--to", "wds", "-o", "there",
        "--workers", "2", "--resize", "16", "--shard-samples", "4",
        *(f"--storage-option={name}={value}" for name, value in options.items()),
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", *command],
        check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    image = shardkit.ImageOptions(resize=16)
    convert(str(folder), tmp_path / "here", {}, image=image, shard_samples=4)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    secret = options["bearer_token"].encode()
    assert not any(secret in data for data in contents(tmp_path / "there").values())


def test_a_forked_process_lists_and_reads(google: Google, bucket: str, tmp_path: Path) -> None:
    with storage.using(google.options()):
        assert storage.source(google.url(bucket, "classes")).is_dir()  # obstore runs here
    child = os.fork()
    if not child:
        try:
            convert(google.url(bucket, "classes"), tmp_path / "out", google.options())
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(shardkit.open(tmp_path / "out")) == 31


def test_verify_against(google: Google, bucket: str, trees: Path, tmp_path: Path) -> None:
    for kind in ("classes", "lines", "splits"):
        _, options = TREES[kind]
        convert(str(trees / kind), tmp_path / kind, {}, **options)
        url = google.url(bucket, kind)
        report = shardkit.verify(tmp_path / kind, url, storage_options=google.options())
        assert report.sound, report.problems[0]
    other = write(tmp_path / "other", {**classes(), "class0/sub0/000.jpg": make_image(99)})
    url = google.url(upload(google, other))
    report = shardkit.verify(tmp_path / "classes", url, storage_options=google.options())
    (problem,) = report.problems
    assert problem.where["key"] == "class0/sub0/000"


def test_tokens_at_a_url_are_compared_with_their_text(
    google: Google, trees: Path, tmp_path: Path
) -> None:
    """The dataset's own tokenizer makes them again, and tells what they are."""
    file = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["document 1 2 3"], 300, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(file))
    source, local = trees / "texts", tmp_path / "local" / "tokens"
    convert(str(source), local, {}, text=TextOptions(tokenizer=str(file), seq_len=32))
    url = google.url(upload(google, local.parent), "tokens")
    report = shardkit.verify(url, source, storage_options=google.options())
    assert report.sound, report.problems[0]
    there = inspect(url, storage_options=google.options())
    assert there["first"] == inspect(local)["first"]
    with pytest.raises(UsageError, match="cannot be read from a URL"):
        convert(
            str(source),
            tmp_path / "out",
            {},
            text=TextOptions(tokenizer="gs://bucket/tokenizer.json"),
        )


# --- requests ------------------------------------------------------------------------------------


def put_all(store: Store, files: dict[str, bytes]) -> str:
    bucket = store.bucket()
    client = store.open(bucket)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda pair: client.put(*pair), files.items()))
    return bucket


def test_subsets_of_objects_are_chosen_by_headers_and_by_values_alone(
    google: Google, through: Through, tmp_path: Path
) -> None:
    files = {f"c{n % 2}/{n:03}.jpg": make_image(n, size=(8 + n % 5, 8)) for n in range(100)}
    files = {name: data + bytes(100_000) for name, data in files.items()}
    url, proxy = google.url(put_all(google, files)), through(google)
    proxy.add(Rule(latency=0.5, match="jpg"))
    asked = {"where": "label == 'c1' and width == 9", "sample": 0.9, "split": "a=0.5,b=0.5"}
    with storage.using(google.options(proxy.endpoint)):
        plan = prepare(url, "wds", tmp_path / "out", ConvertOptions.of(**asked))
    entries = [entry for entry in proxy.log() if entry.target.endswith(".jpg")]
    assert len(entries) == 50  # those of the class
    assert proxy.count("GET").sent < 50 * 25_000
    assert max(sum(e.start <= entry.start < e.end for e in entries) for entry in entries) >= 16
    there = convert(url, tmp_path / "there", google.options(), **asked)
    here = convert(str(write(tmp_path / "in", files)), tmp_path / "here", {}, **asked)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert there.samples == here.samples == plan.samples
    checked = shardkit.verify(tmp_path / "there", against=url, storage_options=google.options())
    assert checked.problems == []


@pytest.mark.parametrize("format", ["wds", "parquet"])
def test_subsets_of_datasets_do_not_read_what_they_do_not_ask_for(
    format: str, google: Google, through: Through, tmp_path: Path
) -> None:
    dice = random.Random(3)
    schema = {"x": shardkit.Bytes(), "label": shardkit.Int(), "group": shardkit.Text()}
    with shardkit.create(tmp_path / "in", format, schema, shard_size="8MB") as out:
        for n in range(200):
            out.write({"x": dice.randbytes(100_000), "label": n % 10, "group": f"g{n % 7}"})
    url, proxy = google.url(upload(google, tmp_path / "in")), through(google)
    asked = {"where": "label == 3", "group": "group", "folds": 2}
    with storage.using(google.options(proxy.endpoint)):
        plan = prepare(url, "wds", tmp_path / "out", ConvertOptions.of(**asked))
    assert plan.samples == 20
    assert proxy.count("GET").sent < 6_000_000  # of 20 MB
    here = prepare(tmp_path / "in", "wds", tmp_path / "out", ConvertOptions.of(**asked))
    assert [split.slice.order.tolist() for split in here.splits] == [
        split.slice.order.tolist() for split in plan.splits
    ]


def test_one_listing_and_a_request_for_each_object(
    google: Google, through: Through, tmp_path: Path
) -> None:
    """Of 40 folders and 1,040 objects: two pages, whichever folder they lie in."""
    files = {f"c{n % 40:02}/{n}.txt": f"text {n}".encode() for n in range(1040)}
    proxy = through(google)
    url = google.url(put_all(google, {f"in/{name}": data for name, data in files.items()}), "in")
    proxy.add(Rule(status=503, match="start-after|continuation-token", times=1))
    made = convert(url, tmp_path / "out", google.options(proxy.endpoint))
    assert made.samples == 1040
    lists = [entry for entry in proxy.log() if "list-type" in entry.target]
    assert len(lists) <= 6  # of the folder alone, and of all below; two for the page that failed
    assert proxy.count("GET", r"/in/c\d+/\d+\.txt$").requests == 1040
    assert proxy.count("HEAD").requests <= 6
    convert(str(write(tmp_path / "in", files)), tmp_path / "here", {})
    assert contents(tmp_path / "out") == contents(tmp_path / "here")


def test_ranges_of_a_long_file_are_downloaded_once(
    google: Google, bucket: str, through: Through, trees: Path, tmp_path: Path
) -> None:
    proxy = through(google)
    options = {"text": shardkit.TextOptions(keep_fields=True), "shard_size": "500KB"}
    convert(
        google.url(bucket, "lines"), tmp_path / "out", google.options(proxy.endpoint), **options
    )
    size = sum(len(data) for data in lines().values())
    sample = 3 * (1 << 20)  # the beginnings of three files, from which the fields are known
    assert proxy.count("GET", "jsonl").sent <= 1.1 * size + sample
    assert proxy.count("HEAD", "jsonl").requests <= 3


def test_objects_are_read_side_by_side(google: Google, through: Through, tmp_path: Path) -> None:
    """How many requests are under way at a time is in the log of the proxy."""
    files = {f"c{n % 2}/{n:03}.jpg": make_image(n % 5) for n in range(200)}
    url, proxy = google.url(put_all(google, files)), through(google)
    proxy.add(Rule(latency=0.05, match="jpg"))
    convert(url, tmp_path / "out", google.options(proxy.endpoint))
    entries = [entry for entry in proxy.log() if entry.target.endswith(".jpg")]
    assert len(entries) == 200
    most = max(sum(e.start <= entry.start < e.end for e in entries) for entry in entries)
    assert most >= 16


@pytest.mark.parametrize(
    ("format", "requests"), [("wds", 1.2), pytest.param("lmdb", 1.3, marks=pytest.mark.large)]
)
def test_samples_that_a_conversion_shuffles_are_read_by_themselves(
    format: str,
    requests: float,
    google: Google,
    through: Through,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With their tables once; and those in their order by pieces of 1 MiB."""
    monkeypatch.setattr(byte_source, "LATEST", 2)  # pieces in memory: fewer than the dataset has
    dice, samples = random.Random(3), 300
    with shardkit.create(tmp_path / "in", format, {"x": shardkit.Bytes()}, shard_size="2MB") as out:
        for n in range(samples):
            out.write({"__key__": f"k{n}", "x": dice.randbytes(20_000)})
    url, proxy = google.url(upload(google, tmp_path / "in")), through(google)
    size = sum(len(data) for data in contents(tmp_path / "in").values())
    for name, most in {"shuffled": requests * samples, "ordered": 30}.items():
        proxy.clear()
        more = {"shuffle": name == "shuffled", "shard_size": "2MB"}
        convert(url, tmp_path / "there" / name, google.options(proxy.endpoint), **more)
        found = proxy.count("GET")
        assert found.sent < 1.1 * size
        assert found.requests < most
        convert(str(tmp_path / "in"), tmp_path / "here" / name, {}, **more)
        assert contents(tmp_path / "there" / name) == contents(tmp_path / "here" / name)


@pytest.mark.large
@pytest.mark.parametrize(
    "rule",
    [
        Rule(status=503, times=3, method="GET", match="jpg|jsonl"),
        pytest.param(
            Rule(reset_after=100, times=3, method="GET", match="jpg|jsonl"), marks=pytest.mark.large
        ),
        pytest.param(
            Rule(close_after=100, times=3, method="GET", match="jpg|jsonl"), marks=pytest.mark.large
        ),
        Rule(shorten=10, times=3, method="GET", match="jpg|jsonl"),
    ],
    ids=["503", "reset", "close", "shorten"],
)
def test_faults_that_pass_change_nothing(
    rule: Rule, google: Google, bucket: str, through: Through, trees: Path, tmp_path: Path
) -> None:
    proxy = through(google)
    for kind in ("classes", "lines"):
        proxy.clear()
        proxy.add(rule)
        _, options = TREES[kind]
        url = google.url(bucket, kind)
        convert(url, tmp_path / kind / "there", google.options(proxy.endpoint), **options)
        convert(str(trees / kind), tmp_path / kind / "here", {}, **options)
        assert contents(tmp_path / kind / "there") == contents(tmp_path / kind / "here")


def test_a_store_that_goes_away_drops_no_samples(
    google: Google, bucket: str, through: Through, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "ATTEMPTS", 2)
    proxy = through(google)
    proxy.add(Rule(status=503, match="jpg", skip=5))
    with pytest.raises(StorageError, match="returned an unexpected response"):
        convert(
            google.url(bucket, "classes"), tmp_path / "out", google.options(proxy.endpoint),
            on_error="skip",
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


# --- changes -------------------------------------------------------------------------------------


def other(data: bytes) -> bytes:
    """Other bytes, which are as good."""
    return data.replace(b"document", b"DOCUMENT").replace(b"line", b"LINE")[:-2] + (
        data[-2:] if b"document" in data or b"line" in data else b"XX"
    )


@pytest.mark.parametrize(
    "name",
    ["classes/class0/sub0/000.jpg", "classes/class0/sub0/000.txt", "texts/b/c1/1.txt",
     "lines/x/0.jsonl"],
)  # fmt: skip
@pytest.mark.parametrize("how", ["replaced", "shorter", "removed"])
def test_an_object_that_changes_after_planning(
    name: str, how: str, google: Google, trees: Path, tmp_path: Path
) -> None:
    kind, _, rest = name.partition("/")
    bucket = upload(google, trees / kind)
    client, data = google.open(bucket), (trees / name).read_bytes()
    options = ConvertOptions.of(workers=0)
    with storage.using(google.options()):
        plan = prepare(google.url(bucket), "wds", tmp_path / "out", options)
    if how == "removed":
        client.put(rest, b"")  # so that no other test sees a missing object
        from obstore import delete

        delete(client, rest)
    else:
        client.put(rest, other(data) if how == "replaced" else data[: len(data) // 2])
    with pytest.raises(SampleError, match="changed while the conversion ran") as caught:
        run(plan, options, None, None)
    assert str(caught.value.where["path"]).startswith(google.url(bucket))
    assert not (tmp_path / "out").exists()


def test_a_listing_that_changes(google: Google, trees: Path, tmp_path: Path) -> None:
    """What is added after planning is not of this run, and the next one is of another source."""
    bucket = upload(google, trees / "classes")
    url, client = google.url(bucket), google.open(bucket)
    options = ConvertOptions.of(workers=0)
    with storage.using(google.options()):
        plan = prepare(url, "wds", tmp_path / "out", options)
    client.put("class0/new.jpg", make_image(5))
    run(plan, options, None, None)
    convert(str(trees / "classes"), tmp_path / "here", {})
    assert contents(tmp_path / "out") == contents(tmp_path / "here")
    with pytest.raises(OutputError, match="holds another dataset") as caught:
        convert(url, tmp_path / "out", google.options())
    assert caught.value.found == "the source has changed"


@pytest.mark.large
@pytest.mark.parametrize("kind", ["classes", "texts", "shards", "foreign shards"])
def test_a_run_goes_on_where_it_was(
    kind: str, google: Google, trees: Path, through: Through, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And not where the source has changed, also to the same size."""
    folder, out = tmp_path / "in", tmp_path / "out"
    if kind in ("classes", "texts"):
        shutil.copytree(trees / kind, folder)
    else:
        convert(str(trees / "classes"), folder, {}, shard_samples=4)
        if kind == "foreign shards":
            shutil.rmtree(folder / "__shardkit__")
    bucket, proxy = upload(google, folder), through(google)
    url, options = google.url(bucket), google.options(proxy.endpoint)
    more: dict[str, Any] = {"shard_size": "5KB", "to": "arrow"}
    monkeypatch.setattr(byte_source, "LATEST", 0)  # or small shards stay in memory
    data = [name for name in contents(folder) if name.endswith((".jpg", ".txt", ".tar"))]
    last = max(name for name in data if not name.endswith("empty.txt"))
    reads = 2 if kind == "foreign shards" else 0  # while planning
    proxy.add(Rule(status=403, match=last, method="GET", skip=reads))
    with pytest.raises(StorageError, match="refuses access"):
        convert(url, out, options, **more)
    assert any((tmp_path / "out.partial/tasks").glob("*/result.json"))

    if kind != "shards":  # which their manifest stands for
        proxy.clear()
        whole = (folder / last).read_bytes()
        at = min(600, len(whole) // 2)  # of a TAR, in the first payload
        google.open(bucket).put(last, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(OutputError, match="other options or another source") as caught:
            convert(url, out, options, **more)
        assert caught.value.found == "the source has changed"
        google.open(bucket).put(last, whole)

    proxy.clear()
    convert(url, out, options, **more)
    if kind in ("classes", "texts"):
        read = {entry.target for entry in proxy.log() if entry.target.endswith((".jpg", ".txt"))}
        assert 0 < len(read) < len(data) / 2
    convert(str(folder), tmp_path / "here", {}, **more)
    assert contents(out) == contents(tmp_path / "here")


@pytest.mark.large
def test_a_killed_run_is_continued(
    google: Google, bucket: str, trees: Path, through: Through, tmp_path: Path
) -> None:
    proxy = through(google)
    proxy.add(Rule(latency=30, match="class2"))
    command = [
        sys.executable, "-m", "shardkit", "convert", google.url(bucket, "classes"), "--to", "wds",
        "-o", "out", "--workers", "2", "--shard-size", "5KB",
    ]  # fmt: skip
    environ = {**os.environ, **google.environ(proxy.endpoint)}
    tasks = tmp_path / "out.partial/tasks"
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, start_new_session=True)
    while process.poll() is None and not any(tasks.glob("*/result.json")):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert any(tasks.glob("*/result.json"))
    proxy.clear()
    subprocess.run(command, check=True, cwd=tmp_path, env=environ, capture_output=True, timeout=120)
    convert(str(trees / "classes"), tmp_path / "here", {}, shard_size="5KB")
    assert contents(tmp_path / "out") == contents(tmp_path / "here")
    read = {entry.target for entry in proxy.log() if entry.target.endswith(".jpg")}
    assert 0 < len(read) < 31


# --- what stores hold, and folders do not --------------------------------------------------------


def test_marks_of_folders_and_objects_named_like_folders(s3: S3, tmp_path: Path) -> None:
    bucket = put_all(s3, {f"in/c{n % 2}/{n}.jpg": make_image(n) for n in range(4)})
    for mark in ("in/", "in/c0/", "in/c1/"):
        request(f"{s3.endpoint}/{bucket}/{mark}", "PUT", b"", **SIGNED)
    made = convert(s3.url(bucket, "in"), tmp_path / "out", s3.options())
    assert (made.samples, made.ignored) == (4, {})
    s3.open(bucket).put("in/c0/0.jpg/1.jpg", make_image(7))
    made = convert(s3.url(bucket, "in"), tmp_path / "two", s3.options())
    assert made.samples == 5


@pytest.mark.parametrize("name", ["in/a//b.jpg", "in/../b.jpg", "in/./b.jpg", "in/a\tb.jpg"])
def test_a_name_that_no_file_can_have(name: str, s3: S3, tmp_path: Path) -> None:
    bucket = put_all(s3, {"in/c/a.jpg": make_image()})
    request(f"{s3.endpoint}/{bucket}/{quote(name)}", "PUT", make_image(), **SIGNED)
    with pytest.raises(StorageError, match="object with an unsupported name") as caught:
        convert(s3.url(bucket, "in"), tmp_path / "out", s3.options())
    assert name.startswith(caught.value.found or "-")


@pytest.mark.parametrize("name", ["ü b", "%41", "a+b", "a\\b", "a#b?", "*[x]", "~x", "a&b=c"])
def test_odd_names(name: str, s3: S3, tmp_path: Path) -> None:
    bucket = s3.bucket()
    request(f"{s3.endpoint}/{bucket}/{quote(f'in/{name}.jpg')}", "PUT", make_image(), **SIGNED)
    convert(s3.url(bucket, "in"), tmp_path / "there", s3.options())
    convert(str(write(tmp_path / "in", {f"{name}.jpg": make_image()})), tmp_path / "here", {})
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["folder", "file"])
def test_bad_input(
    source: str, s3: S3, through: Through, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each has words of its own, and leaves nothing behind."""
    monkeypatch.setattr(stores, "ATTEMPTS", 1)
    key, proxy = {"folder": "classes", "file": "lines/x/0.jsonl"}[source], through(s3)
    bucket = put_all(s3, {"classes/a.jpg": make_image(), "lines/x/0.jsonl": b"{}"})
    options = s3.options(proxy.endpoint)

    def refused(url: str, given: dict[str, Any]) -> ShardkitError:
        with pytest.raises(ShardkitError) as caught:
            convert(url, tmp_path / "out", given)
        assert "testsecret" not in str(caught.value)
        assert not [*tmp_path.iterdir()]
        return caught.value

    error = refused(f"s3://no-such-bucket/{key}", options)
    assert isinstance(error, NotFoundError)
    assert "there is no such bucket" in str(error)
    for code, words in (
        ("AccessDenied", "the store refuses access"),
        ("ExpiredToken", "the credentials have expired"),
        ("AuthorizationHeaderMalformed", "the store refuses"),
        ("PermanentRedirect", "the bucket is in another region"),
    ):
        proxy.clear()
        status = {"AccessDenied": 403, "PermanentRedirect": 301}.get(code, 400)
        proxy.add(Rule(status=status, body=f"<Error><Code>{code}</Code></Error>"))
        error = refused(s3.url(bucket, key), options)
        assert isinstance(error, StorageError), code
        assert words in str(error), (code, str(error))
    proxy.clear()
    error = refused(s3.url(bucket, key), {**options, "endpoint": "http://127.0.0.1:9"})
    assert "the store cannot be reached" in str(error)
    assert "unknown URL scheme" in str(refused(f"nonsense://x/{key}", {}))
    assert "there is no such" in str(refused(s3.url(bucket, "nothing"), options))


def test_a_url_of_one_image_is_no_dataset(google: Google, bucket: str, tmp_path: Path) -> None:
    name = "classes/class0/sub0/000.jpg"
    with pytest.raises(ShardkitError) as there:
        convert(google.url(bucket, name), tmp_path / "out", google.options())
    local = write(tmp_path / "in", {"000.jpg": make_image()}) / "000.jpg"
    with pytest.raises(ShardkitError) as here:
        convert(str(local), tmp_path / "out", {})
    assert there.value.what == here.value.what


def test_a_folder_of_a_web_server_is_not_listed(web: Nginx, tmp_path: Path) -> None:
    write(web.root / "photos", metadata())
    with pytest.raises(NotFoundError, match="cannot list the contents of a folder") as caught:
        convert(f"{web.endpoint}/photos", tmp_path / "out", {})
    assert "copy other data to this machine" in (caught.value.fix or "")


def test_loose_images_are_not_loaded_from_a_url(google: Google, bucket: str) -> None:
    from shardkit.performance.defaults import open_any

    with (
        storage.using(google.options()),
        pytest.raises(ShardkitError, match="each would need a request"),
    ):
        open_any(google.url(bucket, "classes"))
    with storage.using(google.options()), pytest.raises(UsageError, match="splits") as caught:
        open_any(google.url(bucket, "splits"))
    assert google.url(bucket, "splits/train") in (caught.value.fix or "")
