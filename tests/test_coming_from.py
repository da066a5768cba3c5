"""docs/coming-from.md: the code before and the code after give the same samples.

The other library's code runs in a process of its own on what that library, or a script, wrote;
ours on the same files. `train` of these notes the pixels and the label of each sample.
"""

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

PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text("utf-8")
BLOCK = re.compile(
    r"^<!-- (before|after)(?:: (\w+))? -->\n```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL
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
    "ImageFolder and DataLoader": """
import torch
try:
    import torchvision
except RuntimeError:  # its compiled part is for a torch with CUDA: the rest works without
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
""",
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


def _run(python: object, script: str, folder: Path) -> Any:
    """What the script prints."""
    file = folder / "script.py"
    file.write_text(script)
    words = [str(python), str(file), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
