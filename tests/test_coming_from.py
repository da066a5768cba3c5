"""docs/coming-from.md: the code before and the code after give the same samples.

The other library's code runs in a process of its own on what that library, or a script, wrote;
ours on the same files. `train` of these notes the pixels and the label of each sample.

The ten tasks are run with all libraries, and their code is counted.
"""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardkit.testing import make_image
from tests import clients
from tests.forks import forking
from tests.formats.test_litdata import _START as LITDATA
from tests.formats.test_mds_streaming import _IMPORT as STREAMING
from tests.remote.servers import S3

DOCS = Path(__file__).parent.parent / "docs"
PAGE, TASKS = (DOCS / "coming-from.md").read_text("utf-8").split("\n## Ten tasks\n")
BLOCK = re.compile(
    r"^<!-- (before|after|task)(?:: (\w+))? -->\n```(python|sh)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SECTIONS = {
    part.partition("\n")[0]: BLOCK.findall(part) for part in re.split(r"^## ", PAGE, flags=re.M)[1:]
}

RECORD = """
import hashlib, json, os, sys
import numpy as np
os.chdir(sys.argv[1])
seen = []
def train(images, labels):
    for image, label in zip(images, labels, strict=True):
        pixels = np.ascontiguousarray(image)
        assert pixels.dtype == np.uint8 and pixels.shape[0] == 3, (pixels.dtype, pixels.shape)
        told = label if isinstance(label, str) else int(label)
        seen.append([hashlib.sha256(pixels.tobytes()).hexdigest(), told])
"""
PRINT = "\nprint(json.dumps(sorted(seen)))\n"

PHOTOS = """
photos = sorted(str(path) for path in __import__("pathlib").Path("photos").rglob("*.jpg"))
labels = [int(path.split("class")[1][0]) for path in photos]
"""
# How each section's data come into being, beside the photos.
MADE = {
    "ImageFolder and DataLoader": clients.TORCHVISION,
    "webdataset": PHOTOS
    + """
import webdataset
os.mkdir("tars")
for number in range(3):
    with webdataset.TarWriter(f"tars/train-{number:06d}.tar") as tar:
        for key in range(number, len(photos), 3):
            image = open(photos[key], "rb").read()
            tar.write({"__key__": f"{key:03d}", "jpg": image, "cls": labels[key]})
""",
    "datasets (Hugging Face)": PHOTOS
    + """
import datasets
datasets.disable_progress_bars()
table = datasets.Dataset.from_dict({"image": photos, "label": labels})
table.cast_column("image", datasets.Image()).save_to_disk("saved")
""",
    "FFCV": PHOTOS
    + """
import PIL.Image
from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
class Photos:
    def __len__(self):
        return len(photos)
    def __getitem__(self, number):
        return PIL.Image.open(photos[number]), labels[number]
fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
DatasetWriter("train.beton", fields, num_workers=1).from_indexed_dataset(Photos())
""",
    "LitData": LITDATA
    + PHOTOS
    + """
import litdata
def sample(number):
    return {"image": PIL.Image.open(photos[number]), "label": labels[number]}
litdata.optimize(
    sample, [*range(len(photos))], "optimized", chunk_size=5, num_workers=1, start_method="fork"
)
""",
    "MosaicML Streaming (MDS)": STREAMING
    + PHOTOS
    + """
import streaming
with streaming.MDSWriter(
    out="mosaic", columns={"image": "jpeg", "label": "int"}, size_limit=20_000
) as writer:
    for path, label in zip(photos, labels, strict=True):
        writer.write({"image": __import__("PIL.Image").Image.open(path), "label": label})
""",
    "img2dataset": PHOTOS
    + """
import pyarrow, pyarrow.parquet, webdataset
os.mkdir("laion")
for number in range(2):
    name = f"laion/{number:05d}"
    keys = [f"{number:05d}{key:04d}" for key in range(number, len(photos), 2)]
    with webdataset.TarWriter(f"{name}.tar") as tar:
        for key in keys:
            image = open(photos[int(key[5:])], "rb").read()
            about = {"key": key, "status": "success"}
            tar.write({"__key__": key, "jpg": image, "txt": f"photo {key}", "json": about})
    table = {"key": keys, "status": ["success"] * len(keys)}
    pyarrow.parquet.write_table(pyarrow.table(table), f"{name}.parquet")
    with open(f"{name}_stats.json", "w") as file:
        json.dump({"count": len(keys), "successes": len(keys), "failed_to_download": 0}, file)
""",
}


def test_every_section_is_run():
    assert {*SECTIONS} == {*MADE}
    assert PAGE.count("```python") + PAGE.count("```sh") == sum(map(len, SECTIONS.values()))
    for blocks in SECTIONS.values():
        assert [kind for kind, *_ in blocks][:2] == ["before", "after"]


@pytest.fixture(scope="module")
def forks():
    """Commands whose processes are forks of one that has imported all of ours."""
    with forking() as folder:
        yield folder


@pytest.mark.large
@pytest.mark.parametrize("section", SECTIONS)
def test_both_give_the_same_samples(section, tmp_path, forks):
    for label in range(3):
        folder = tmp_path / "photos" / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(4):
            image = make_image(label * 100 + number, size=(80, 64))
            (folder / f"{number}.jpg").write_bytes(image)
    (_, library, _, code), *after = SECTIONS[section]
    script = RECORD + MADE[section] + code + PRINT
    if find_spec(library) is None:
        before = clients.run(library, script, tmp_path)
    else:
        before = _run(sys.executable, script, tmp_path)
    assert len(before) == 12
    assert len({pixels for pixels, _ in before}) == 12

    for _, _, language, block in after:
        if language == "sh":
            path = f"{forks}:{Path(sys.executable).parent}:{os.environ['PATH']}"
            words = ["bash", "-euc", block]
            subprocess.run(words, cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
        else:
            assert _run(forks / "python", RECORD + block + PRINT, tmp_path) == before


# --- ten tasks ------------------------------------------------------------------------------------

# What the tasks find in their folder, and the variables and functions that they use.
DATA = """
import csv, pathlib
import numpy as np, PIL.Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
for folder in ("photos/cat", "photos/dog", "flat", "captioned", "tokenizer"):
    pathlib.Path(folder).mkdir(parents=True)
rows, chats = [["file", "label"]], []
for number in range(20):
    pixels = np.random.default_rng(number).integers(0, 255, (64, 80, 3), np.uint8)
    name, kind = f"{number:02d}", ("cat", "dog")[number % 2]
    for folder in (f"photos/{kind}", "flat", "captioned"):
        PIL.Image.fromarray(pixels).save(f"{folder}/{name}.jpg")
    pathlib.Path(f"captioned/{name}.txt").write_text(f"photo {number} of a {kind}")
    asked, told = f"What is photo {number}?", "a " * number + kind
    roles = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
    chats.append(json.dumps({"messages": roles}))
    rows.append([f"{name}.jpg", kind])
with open("labels.csv", "w", newline="") as file:
    csv.writer(file).writerows(rows)
pathlib.Path("chats.jsonl").write_text("\\n".join(chats))
made = Tokenizer(models.BPE())
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
first = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<eos>"], show_progress=False, initial_alphabet=first
)
made.train_from_iterator(chats, trainer)
made.save("tokenizer/tokenizer.json")
template = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<eos>{% endgeneration %}"
    "{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
)
config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
config = json.dumps(config | {"chat_template": template})
pathlib.Path("tokenizer/tokenizer_config.json").write_text(config)
"""
WITH = """
import collections, json, os, subprocess, sys
import boto3, pandas
os.chdir(sys.argv[1])
bucket = sys.argv[2]
frame = pandas.DataFrame({"x": [n / 2 for n in range(20)], "label": [n % 2 for n in range(20)]})
seen = collections.defaultdict(collections.Counter)
def train(*values):
    assert len({len(value) for value in values}) == 1
    seen[task]["train"] += len(values[0])
def validate(*values):
    seen[task]["val"] += len(values[0])
def upload(folder, key):
    client = boto3.client("s3")
    for path in __import__("pathlib").Path(folder).rglob("*.*"):
        client.upload_file(str(path), bucket[5:], f"{key}/{path.relative_to(folder).as_posix()}")
"""
# How each library starts, and what it uploads before the seventh task.
LIBRARIES = {
    "shardkit": ("", "shardkit.convert('photos', 'wds', f'{bucket}/wds')"),
    "datasets": (
        "import datasets; datasets.disable_progress_bars()",
        "photos.to_parquet('photos-parquet/a.parquet'); upload('photos-parquet', 'parquet')",
    ),
    "litdata": (
        """
import functools, litdata
from litdata.streaming import downloader
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
litdata.optimize = functools.partial(litdata.optimize, num_workers=1, start_method="fork")
""",
        "upload('photos-lit', 'litdata')",
    ),
    "streaming": (STREAMING, "upload('photos-mds', 'mds')"),
}


def tasks_of(library: str) -> dict[str, list[tuple[str, str]]]:
    """Task -> its blocks of code, each with its language."""
    if library == "shardkit":
        parts = re.split(r"^### ", TASKS, flags=re.M)[1:]
        titles = [part.partition("\n")[0] for part in parts]
        blocks = [[block[2:] for block in BLOCK.findall(part)] for part in parts]
        return dict(zip(titles, blocks, strict=True))
    text = (DOCS / "tasks" / f"with_{library}.py").read_text("utf-8")
    imports, *parts = re.split(r"^# (\d+\. .*)$", text, flags=re.M)
    parts[1] = imports + parts[1]
    return {t: [("python", code)] for t, code in zip(parts[::2], parts[1::2], strict=True)}


def statements(blocks: list[tuple[str, str]]) -> int:
    """The number of statements, without imports, and of shell commands."""
    count = 0
    for language, code in blocks:
        every = ast.walk(ast.parse(code)) if language == "python" else code.splitlines()
        kinds = (str, ast.stmt)
        own = [each for each in every if isinstance(each, kinds)]
        count += sum(not isinstance(each, ast.Import | ast.ImportFrom) for each in own)
    return count


def test_the_code_of_the_ten_tasks_is_counted():
    rows = [line.strip("| ").split(" | ") for line in TASKS.splitlines() if line.startswith("| ")]
    table = {title: counts for title, *counts in rows[1:]}
    found = {library: tasks_of(library) for library in LIBRARIES}
    assert all([*tasks] == [*table] for tasks in found.values())
    assert table == {t: [str(statements(tasks[t])) for tasks in found.values()] for t in table}
    assert TASKS.count("```") == 2 * sum(map(len, found["shardkit"].values()))


@pytest.fixture(scope="module")
def s3():
    if S3.missing():
        pytest.skip(S3.missing())
    with S3() as server:
        yield server


@pytest.mark.large
@pytest.mark.parametrize("library", LIBRARIES)
def test_ten_tasks_give_all_samples(library, tmp_path, s3, monkeypatch):
    start, upload = LIBRARIES[library]
    for name, value in {**s3.environ(), "S3_ENDPOINT_URL": s3.endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    script = WITH + DATA + start
    for task, blocks in tasks_of(library).items():
        script += f"\n{upload if task.startswith('7.') else ''}\ntask = {task.split('.')[0]}\n"
        for language, code in blocks:
            run = f"subprocess.run(['bash', '-euc', {code!r}], check=True)\n"
            script += run if language == "sh" else code
    script += "\nprint()\nprint(json.dumps(seen))\n"
    where = (tmp_path, s3.url(s3.bucket()))
    if find_spec(library) is None:
        seen = clients.run(library, script, *where)
    else:
        seen = _run(sys.executable, script, *where)
    numbers = {int(task): sum(counts.values()) for task, counts in seen.items()}
    assert numbers == {**dict.fromkeys(range(1, 10), 20), 8: 10}
    assert all(count > 0 for count in seen["9"].values())


def _run(python: object, script: str, folder: Path, *arguments: str) -> Any:
    """What the script prints."""
    file = folder / "script.py"
    file.write_text(script)
    words = [str(python), str(file), str(folder), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
