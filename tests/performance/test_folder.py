"""Folders of loose images as datasets, for the same loaders as all others."""

import json
import os
import pickle

import pytest

import shardkit
from shardkit.errors import FormatError, NotFoundError, SampleError, SourceError, UsageError
from shardkit.performance.defaults import open_any
from shardkit.stream import Loader
from shardkit.testing import make_image
from tests.conftest import write_images
from tests.stream.data import same

CROP = {"image": shardkit.RandomResizedCrop(32)}


def test_it_has_the_samples_of_a_conversion_and_a_loader_makes_the_same_batches(images, tmp_path):
    shardkit.convert(images, "wds", tmp_path / "shards", workers=0)
    loose, stored = open_any(images), open_any(tmp_path / "shards")
    assert (loose.format, stored.format) == ("folder", "wds")
    assert list(loose) == list(stored)
    assert loose.schema == stored.schema
    assert (loose.classes, loose.label) == (stored.classes, stored.label)
    assert loose.extent(0) == (12, sum(path.stat().st_size for path in images.rglob("*.jpg")))
    options = {"batch_size": 4, "shuffle": True, "transforms": CROP, "threads": 2}
    ours, theirs = (list(Loader(dataset, **options)) for dataset in (loose, stored))
    assert [len(batch["image"]) for batch in ours] == [4, 4, 4]
    assert same(ours, theirs)
    stopped, continued = (Loader(loose, **options) for _ in range(2))
    next(iter(stopped))
    continued.load_state_dict(stopped.state_dict())
    assert same(list(continued), ours[1:])
    [batch] = Loader(loose, batch_size=12, fields=["label"])
    assert sorted(batch) == ["__key__", "label", "valid"]


def test_sidecars_and_metadata_are_values_like_those_of_any_dataset(tmp_path):
    images = write_images(tmp_path / "images", classes=2, each=2)
    (images / "class0/000.json").write_text('{"a": [1]}')
    (images / "class0/000.txt").write_text("words")
    rows = [{"file_name": "class1/000.jpg", "more": [1, 2]}]
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, third = open_any(images)[0], open_any(images)[2]
    assert (first["json"], first["text"]) == ({"a": [1]}, "words")
    assert type(first["json"]) is dict
    assert third["more"] == [1, 2]
    dataset = open_any(images)
    dataset[2]["more"].append(3)
    assert dataset[2]["more"] == [1, 2]


def test_it_can_be_pickled_and_used_after_a_fork(images):
    torch_data = pytest.importorskip("torch.utils.data")
    from shardkit.torch import StreamingDataset

    dataset = open_any(images)
    first = dataset[0]
    assert pickle.loads(pickle.dumps(dataset))[0] == first
    stream = StreamingDataset(dataset, batch_size=4, transforms=CROP)
    batches = list(torch_data.DataLoader(stream, batch_size=None, num_workers=1))
    assert [key for batch in batches for key in batch["__key__"]] == [s["__key__"] for s in dataset]


def test_errors_name_the_file(images):
    dataset = open_any(images)
    (images / "class1/001.jpg").unlink()
    with pytest.raises(SampleError) as caught:
        dataset[5]
    assert caught.value.where["path"] == os.fspath(images / "class1/001.jpg")
    (images / "class1/001.jpg").write_bytes(make_image(101)[:-200])
    with pytest.raises(SampleError) as caught:
        list(Loader(open_any(images), batch_size=4, transforms=CROP))
    assert caught.value.where["key"] == "class1/001"
    assert caught.value.where["path"] == images / "class1/001.jpg"
    assert caught.value.where["position"] == 5


def test_what_is_no_folder_of_images_is_refused_with_what_to_do(tmp_path):
    for folder in ("texts", "empty", "x.partial/tasks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "texts/a.txt").write_text("words")
    (tmp_path / "x.partial/job.json").write_text("{}")
    for name, error, message in [
        ("texts", FormatError, "convert them first"),
        ("texts/a.txt", FormatError, "convert them first"),
        ("empty", SourceError, "no images"),
        ("missing", NotFoundError, "."),
        ("x.partial", FormatError, "unfinished"),
    ]:
        with pytest.raises(error, match=message):
            open_any(tmp_path / name)
    for split in ("train", "val"):
        write_images(tmp_path / "splits" / split)
    with pytest.raises(UsageError, match="train, val"):
        open_any(tmp_path / "splits")
    assert len(open_any(tmp_path / "splits/val")) == 12
