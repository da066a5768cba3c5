"""How datasets show themselves, in a terminal and in a notebook."""

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import PIL.Image

import shardkit
from shardkit.conversion.run import PartResult
from shardkit.dataset.dataset import Dataset
from shardkit.schema import Array, Bytes, Image, Images, Int, Json, Schema, Text
from shardkit.stream import Loader, StreamingDataset
from tests.conftest import write_images
from tests.stream.data import photo, write_photos

HOSTILE = "<script>alert(1)</script>\x1b[31m\"'>&"


class Tags(HTMLParser):
    """The tags of a page, those that are open, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def images(self) -> list[PIL.Image.Image]:
        sources = [str(attributes["src"]) for tag, attributes in self.found if tag == "img"]
        prefix = "data:image/webp;base64,"
        assert all(source.startswith(prefix) for source in sources)
        data = [base64.b64decode(source[len(prefix) :], validate=True) for source in sources]
        return [PIL.Image.open(io.BytesIO(one)) for one in data]


def test_a_dataset_tells_what_it_is(tmp_path):
    source = write_images(tmp_path / "in", classes=9, each=2)
    shardkit.convert(source, "wds", tmp_path / "out", shard_samples=4, workers=0)
    ds = shardkit.open(tmp_path / "out")
    fields = (
        "  image: Image()\n"
        "  label: Int(), 9 classes: class0, class1, class2, class3, class4, class5, ..."
    )
    out = tmp_path / "out"
    assert repr(ds) == f"<Dataset {out}: wds, 18 samples in 5 shards>\n{fields}"
    assert repr(ds[3:5]) == f"<Dataset {out}: wds, 2 samples of 18 in 5 shards>\n{fields}"
    both = shardkit.concatenate([ds, shardkit.open(out / "shard-000001.tar")])
    assert repr(both) == f"<Dataset {out} and 1 more: wds, 22 samples in 6 shards>\n{fields}"


def test_a_notebook_shows_samples(tmp_path):
    ds = shardkit.open(write_photos(tmp_path / "out", size=(480, 360)))
    ds.transform = lambda sample: {}  # samples are shown as they are stored
    page = Tags(ds._repr_html_())
    assert [image.size for image in page.images] == [(128, 96)] * 5
    assert np.abs(np.asarray(page.images[0], float).mean() - 127) < 30
    assert all(key in page.text for key in ("0000", "0007", "0014", "0022", "0029"))
    assert "37 samples in 5 shards" in page.text
    assert len(ds._repr_html_()) < 50_000  # of noise, which JPEG hardly makes smaller
    assert len(Tags(ds[:2]._repr_html_()).images) == 2
    assert "0 samples of 37" in Tags(ds[:0]._repr_html_()).text
    (shard, *_) = (tmp_path / "out").glob("*000.tar")
    shard.write_bytes(shard.read_bytes().replace(b"image 7", b"im\xffge 7"))
    page = Tags(shardkit.open(tmp_path / "out")._repr_html_())
    assert len(page.images) == 4
    assert "a value is damaged" in page.text


def test_nothing_of_the_data_becomes_a_part_of_the_page():
    fields = {HOSTILE: Text(), "label": Int(), "json": Json(), "image": Image(), "x": Bytes()}
    sample = {
        "__key__": HOSTILE, HOSTILE: HOSTILE * 99, "label": 0, "json": {HOSTILE: HOSTILE},
        "image": HOSTILE.encode(), "x": HOSTILE.encode(),
    }  # fmt: skip
    ds = Dataset.from_sequence(
        [sample], Schema(fields), class_names={"label": [HOSTILE]}, path=Path(HOSTILE)
    )
    shown = ds._repr_html_()
    page = Tags(shown)
    cards = {"figure", "figcaption", "code", "strong", "dl", "dt", "dd", "span", "small"}
    whole = {"div", "style", "p", "b", "table", "tr", "th", "td"}
    assert {tag for tag, _ in page.found} == whole | cards
    assert all(set(attributes) <= {"class", "dir", "scope"} for _, attributes in page.found)
    assert page.text.count("<script>alert(1)</script>") > 6
    assert "no image" in page.text
    assert "\x1b" not in shown + repr(ds)
    assert len(shown) < 6000
    assert len(repr(ds)) < 1000


def test_images_that_are_odd_or_damaged_and_those_of_three_fields():
    large, gray = io.BytesIO(), io.BytesIO()
    PIL.Image.new("1", (12_000, 12_000)).save(large, "png")  # 144 megapixels in 2 kB
    PIL.Image.new("L", (3, 500), 7).save(gray, "png")
    fields = {"image": Image(optional=True), "several": Images(), "raw": Array("uint8", (4, 6, 3))}
    rest = {"several": [], "raw": np.zeros((4, 6, 3), np.uint8)}
    samples = [
        {"__key__": "large", "image": large.getvalue(), **rest},
        {"__key__": "gray", "image": gray.getvalue(), **rest, "several": [photo(1)] * 9},
        {"__key__": "cut", "image": photo(2)[:300], **rest},
        {"__key__": "none", **rest},
    ]
    page = Tags(Dataset.from_sequence(samples, Schema(fields))._repr_html_())
    assert "png 12000 x 12000" in page.text
    sizes = [image.size for image in page.images]
    assert sorted(sizes) == [(1, 128), *[(6, 4)] * 4, *[(48, 36)] * 3]
    assert re.search("no image: .{3,80}cut", page.text)
    fields = {"a": Images(), **{f"image{n}": Image() for n in range(5)}, "z": Images()}
    sample = {name: [photo(1)] * 3 if len(name) == 1 else photo(2) for name in fields}
    samples = [{"__key__": str(n), **sample} for n in range(2)]
    page = Tags(Dataset.from_sequence(samples, Schema(fields))._repr_html_())
    assert len(page.images) == 2 * (3 + 1 + 1)
    assert page.text.count("3 images") == 2
    for number in (1, 2):
        assert page.text.count(f"jpeg 48 x 36, {len(photo(number)):,} bytes") == 2 * 3


def test_samples_are_taken_evenly_the_first_fields_shown_and_texts_and_names_cut():
    fields = {f"field {n}": Int() for n in range(200)}
    for count in (1, 5, 11):
        samples = [{"__key__": f"<{n}>", **dict.fromkeys(fields, n)} for n in range(count)]
        ds = Dataset.from_sequence(samples, Schema(fields))
        assert repr(ds).endswith("  ...: 180 more fields")
        text = Tags(ds._repr_html_()).text
        assert "field 20" not in text
        shown = [n for n in range(count) if f"<{n}>" in text]
        assert shown == sorted({n * count // min(count, 5) for n in range(min(count, 5))})
    for length, cut in ((120, False), (121, True)):
        ds = Dataset.from_sequence([{"__key__": "a", "t": "x" * length}], Schema({"t": Text()}))
        text = Tags(ds._repr_html_()).text
        assert ("x" * 120 in text, "x" * 120 + " ..." in text) == (True, cut)
    for length, name in ((60, "x" * 60), (61, "x" * 57 + "...")):
        sample = {"__key__": "a", "x" * length: 1}
        ds = Dataset.from_sequence([sample], Schema({"x" * length: Int()}))
        assert repr(ds).splitlines()[1] == f"  {name}: Int()"


def test_results_loaders_and_options_tell_of_themselves_in_a_line(images, tmp_path):
    out = tmp_path / "out"
    made = shardkit.convert(images, "wds", out, workers=0)
    words = rf"<ConvertResult {out}: wds, 12 samples, [\d.]+ kB in \d+\.\d s>"
    assert re.fullmatch(words, repr(made))
    again = shardkit.convert(images, "wds", out, workers=0)
    assert repr(again).endswith(" s, already complete>")
    options = {"split": "train=0.5,val=0.5", "stratify": "label", "workers": 0}
    splits = shardkit.convert(images, "wds", tmp_path / "splits", **options)
    assert repr(splits).startswith(f"<ConvertResult {tmp_path / 'splits'} (train, val): wds, 12")
    part = replace(made, splits={}, part=PartResult("1/2", 3, 5, 800, 1, 2, ("2/2",)), seconds=2.0)
    words = "wds, 5 samples, 800 B in 2.0 s, 1 dropped"
    assert repr(part) == f"<ConvertResult {out} (part 1/2): {words}>"
    assert repr(shardkit.verify(out)) == f"<VerifyReport {out}: sound, wds, 12 samples in 1 shard>"
    (out / "shard-000000.tar").write_bytes(b"x")
    damaged = repr(shardkit.verify(out)).split("\n")
    assert re.fullmatch(rf"<VerifyReport {out}: \d problems?, wds, .*>", damaged[0])
    assert 2 <= len(damaged) <= 4

    shardkit.convert(images, "wds", out, overwrite=True, workers=0)
    loader = Loader(out, batch_size=5, shuffle=True)
    words = f"<Loader {out}: (shuffle=True, batch_size=5)"
    assert repr(loader) == f"{words}; 3 batches, 3 left, of epoch 0>"
    next(iter(loader))
    assert repr(loader) == f"{words}; 3 batches, 2 left, of epoch 0>"
    source = [shardkit.open(out), str(tmp_path / "none")]
    assert repr(StreamingDataset(source)) == f"<StreamingDataset {out}, {tmp_path / 'none'}: ()>"
    assert repr(shardkit.StreamOptions(storage_options={"key": "secret"})) == "StreamOptions()"
    image = shardkit.ImageOptions(resize=8)
    assert repr(shardkit.ConvertOptions(image=image, seed=1)) == (
        "ConvertOptions(seed=1, image=ImageOptions(resize=8))"
    )
