"""`shardkit inspect --html`: what is on the page, what cannot get onto it, how large it becomes."""

import io
import itertools
import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import soundfile

import shardkit
from shardkit.cli.convert import command as convert_cli
from shardkit.codecs import frames
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.display import sheet
from shardkit.errors import DamagedError, NotFoundError, OutputError, StorageError, UsageError
from shardkit.inspection.command import convert_command
from shardkit.inspection.report import POLICY, READ, START, html_report, write_report
from shardkit.metadata.recipe import Recipe, identity
from shardkit.metadata.sizes import FieldSizes
from shardkit.options import AudioOptions, ConvertOptions, ImageOptions, TextOptions
from shardkit.storage import fs
from tests.browser import browser
from tests.codecs.sample_videos import encode
from tests.codecs.tokenizer_zoo import byte_level
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images
from tests.test_cli import run
from tests.test_display import Tags
from tests.test_hostile_text import EVIL, evil
from tests.test_verify import rewrite

__all__ = ["evil"]  # a fixture
HOSTILE = "\"'><script>alert(1)</script><img src=http://x/y onerror=alert(1)>&amp;" + EVIL
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "article", "section"),
    *("footer", "nav", "ul", "li", "a", "h1", "h2", "h3", "h4", "p", "div", "span", "strong"),
    *("small", "code", "pre", "dl", "dt", "dd", "figure", "figcaption", "img", "svg", "rect"),
    *("path", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "id", "href", "src", "alt"),
    *("width", "height", "viewbox", "preserveaspectratio", "role", "d", "x", "y", "tabindex"),
    *("scope", "dir", "aria-label", "aria-labelledby", "aria-hidden"),
}


def check(page: str) -> Tags:
    """What holds for every page: no other elements and addresses than its own, and the policy."""
    tags = Tags(page)
    assert page.startswith("<!doctype html>")
    assert {name for name, _ in tags.found} <= TAGS
    for name, attributes in tags.found:
        assert set(attributes) <= ATTRIBUTES, (name, attributes)
        for value in (attributes.get("href"), attributes.get("src")):
            assert value is None or value.startswith(("#part", "data:image/webp;base64,"))
        assert name != "img" or attributes["alt"]
        assert name != "th" or attributes["scope"] in ("row", "col")
    policies = [a["content"] for _, a in tags.found if a.get("http-equiv")]
    assert policies == [POLICY]
    assert all(line.isprintable() for line in page.split("\n"))
    names = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert len(names) == len(set(names))
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    return tags


def dataset(path: Path, to: str, classes: int = 1, each: int = 4, **options: Any) -> Path:
    """Of a folder of images beside it."""
    source = write_images(path.with_name("in"), classes=classes, each=each)
    shardkit.convert(source, to, path, workers=0, **options)
    return path


def of_samples(kinds: dict[str, Any], *samples: dict[str, Any], **more: Any) -> Dataset:
    return Dataset.from_sequence(
        [{"__key__": "a", **sample} for sample in samples], shardkit.Schema(kinds), **more
    )


@pytest.fixture
def hostile():
    fields_ = {
        HOSTILE: shardkit.Text(), "label": shardkit.Int(), "json": shardkit.Json(),
        "image": shardkit.Image(), "audio": shardkit.Audio(), "video": shardkit.Video(),
        "several": shardkit.Images(), "x": shardkit.Bytes(), "array": shardkit.Array(),
    }  # fmt: skip
    bad = HOSTILE.encode()
    sample = {
        "__key__": HOSTILE, HOSTILE: HOSTILE * 99, "label": 0, "json": {HOSTILE: HOSTILE},
        "image": bad, "audio": bad, "video": bad, "several": [bad], "x": bad,
        "array": np.array([HOSTILE]),
    }  # fmt: skip
    names = {"label": [HOSTILE]}
    return of_samples(fields_, *[sample] * 3, class_names=names, path=Path(HOSTILE))


def test_nothing_of_the_data_becomes_markup(hostile, evil, tmp_path):
    tags = check(html_report(hostile))
    assert tags.text.count("<script>alert(1)</script>") > 20
    assert "\\x1b]0;title" in tags.text
    assert tags.text.count("no image") >= 3
    assert "3 samples of these could not be read" in tags.text
    assert "There are no samples." in check(html_report(hostile[:0])).text
    # Neither do names in files and lists.
    (evil / "train" / EVIL / "bad.jpg").write_bytes(b"<script>")
    options = {"where": f"__key__ != {EVIL + HOSTILE!r}", "drop": ["é"], "on_error": "skip"}
    shardkit.convert(evil, "parquet", tmp_path / "out", workers=0, **options)
    tags = check(html_report(tmp_path / "out"))
    for words in ("ignored: ", "dropped: bad samples", "bad", "errors.jsonl", "--where "):
        assert words in tags.text, words
    listed = tmp_path / "out/train/__shardkit__/errors.jsonl"
    listed.write_text(json.dumps({"key": [HOSTILE], "what": {HOSTILE: 1}}) + "\n{\n")
    assert "the list cannot be read" in check(html_report(tmp_path / "out")).text


@pytest.mark.parametrize("format", few(IMAGE_FORMATS))
def test_each_format_with_and_without_its_manifest(tmp_path, format):
    source = write_images(tmp_path / "in", classes=3, each=5)
    (source / "class0" / "000.jpg").write_bytes(b"no image")
    out = tmp_path / "out"
    shardkit.convert(source, format, out, workers=0, on_error="skip")
    page = html_report(out)
    tags = check(page)
    assert page == html_report(out)
    assert len(tags.images) == 14
    for words in ("dropped: bad samples", "class0/000", "class1", "shardkit convert SOURCE"):
        assert words in tags.text
    assert f"--to {format}" in tags.text
    shutil.rmtree(out / "__shardkit__")
    foreign = check(html_report(out))
    assert "Unknown, as no manifest contains it." in foreign.text
    assert "others" in foreign.text


def test_splits_single_shards_and_views(tmp_path):
    options = {"split": "train=0.5,val=0.5", "shard_samples": 4}
    dataset(tmp_path / "out", "wds", 2, 20, **options)
    tags = check(html_report(tmp_path / "out"))
    headings = [a["id"] for name, a in tags.found if name == "article"]
    assert headings == ["part0", "part1"]
    assert "train" in tags.text
    assert "Splits2Samples40" in tags.text
    (one,) = sorted((tmp_path / "out/train").glob("*.tar"))[:1]
    assert "Samples4" in check(html_report(one)).text
    view = shardkit.open(tmp_path / "out/val")[3:5]
    assert "2 of 2 samples." in check(html_report(view)).text
    run("inspect", tmp_path / "out", "--html", tmp_path / "page.html")
    assert len(check((tmp_path / "page.html").read_text("utf-8")).images) == 40


def test_a_large_dataset_is_read_in_part(tmp_path):
    count, reads = 3 * READ, []
    samples = [{"__key__": f"{n}", "x": n, "label": n % 500} for n in range(count)]

    class Counted(list):
        def __getitem__(self, number):
            reads.append(number)
            return super().__getitem__(number)

    schema = shardkit.Schema({"x": shardkit.Int(), "label": shardkit.Int()})
    ds = Dataset.from_sequence(Counted(samples), schema)
    tags = check(html_report(ds))
    assert f"Counted in {READ:,} of {count:,} samples, evenly spaced" in tags.text
    assert "48 of 6,000 samples, evenly spaced" in tags.text
    counted = set(reads)
    assert set(range(0, count, 3)) <= counted
    assert len(counted) < READ + 60
    whole = check(html_report(ds, full=True))
    assert f"Counted in all {count:,} samples." in whole.text


def test_the_page_is_bounded(monkeypatch):
    monkeypatch.setattr(sheet, "_BYTES", 1 << 19)  # more images would take seconds
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    PIL.Image.fromarray(rng.integers(0, 256, (400, 400, 3), np.uint8)).save(file, "jpeg")
    images = {f"image{n}": shardkit.Images() for n in range(3)}
    text = {f"field {n}": "x" * 5000 for n in range(100)}
    schema = {**images, **dict.fromkeys(text, shardkit.Text())}
    sample = {"__key__": "k" * 5000, **dict.fromkeys(images, [file.getvalue()] * 3), **text}
    page = html_report(of_samples(schema, *[sample] * 40))
    tags = check(page)
    assert len(page) < sheet._BYTES + (1 << 20)
    assert "samples not shown, to limit the size of the page" in tags.text
    assert "and 73 more" in tags.text  # fields
    assert "and 79 more histograms" in tags.text
    assert "91 more fields" in tags.text


def test_values_of_all_kinds(monkeypatch):
    wav = io.BytesIO()
    soundfile.write(wav, np.sin(np.arange(16000) / 9), 8000, format="WAV")
    mask = io.BytesIO()
    PIL.Image.fromarray(np.full((40, 60), 3, np.uint8)).save(mask, "png")
    fields_ = {
        "audio": (shardkit.Audio(), wav.getvalue()), "video": (shardkit.Video(), encode()),
        "mask": (shardkit.Image(), mask.getvalue()), "number": (shardkit.Float(), 0.123456789),
        "text": (shardkit.Text(), "one\ntwo " + "x" * 900), "many": (shardkit.Json(), [0, 2]),
        "array": (shardkit.Array(), np.arange(100, dtype=np.float32)),
        "digit": (shardkit.Array(), np.zeros((28, 28), np.uint8)),
        "nan": (shardkit.Array(), np.full(9, np.nan)),
        "some": (shardkit.Array("int64"), np.array([1, 2])),
    }  # fmt: skip
    kinds, sample = ({name: both[n] for name, both in fields_.items()} for n in (0, 1))
    ds = of_samples(kinds, sample, class_names={"some": ["a0", "b1", "c2"]})
    tags = check(html_report(ds))
    (line,) = [str(a["d"]) for name, a in tags.found if name == "path"]
    assert line.count("M") == 160
    first, mask_ = tags.images  # the digit is in words: three values are shown as images
    assert first.size == (96, 64)
    assert np.abs(np.asarray(mask_.convert("L"), int) - 255).max() < 5
    for words in (
        "8,000 Hz x 1, 2.00 s", "mp4 h264 96 x 64, 40 frames", "png 60 x 40, 1 channel, brightened",
        "one\ntwo", "mp4 h264: 1", "908 characters", "0.123457", "[0, 2]", "b1, c2",
        "0 / 49.5 / 99 (min / mean / max)", "no finite number", "uint8 (28, 28)", "(28, 28): 1",
    ):  # fmt: skip
        assert words in tags.text, words
    for value, words in (
        (np.zeros((0, 3)), "float64 (0, 3): []"),
        (np.array(5.0), "float64 (): 5."),
        (np.array("x"), "'x'"),
        (np.array([b"a" * 900] * 9), "aaa..."),
        (np.array([1, 2**63], np.uint64), "9223372036854775808"),
        (np.ones(20, bool), "1 / 1 / 1 (min"),
        (np.full(9, 1e308), "1e+308 / inf / 1e+308 (min"),
        (np.zeros((5000, 1), np.uint8), "uint8 (5000, 1)"),
        (np.zeros((3, 9, 9), np.uint8), "uint8 (3, 9, 9)"),
    ):
        text = check(html_report(of_samples({"x": shardkit.Array()}, {"x": value}))).text
        assert words in text, words

    def missing(*_):
        raise UsageError("decoding video needs av, which is not installed", fix="pip install it")

    monkeypatch.setattr(frames, "read_frames", missing)
    text = check(html_report(of_samples({"video": shardkit.Video()}, {"video": encode()}))).text
    assert "mp4 h264 96 x 64" in text
    assert "needs av, which is not installed; pip install it" in text


def test_tokens_are_decoded_and_those_of_no_vocabulary_are_numbers(tmp_path):
    (tmp_path / "notes.txt").write_text("the cat sat on the mat.\nthe dog\n")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    options = TextOptions(tokenizer=tmp_path / "tokenizer.json", append_eos=False)
    shardkit.convert(tmp_path / "notes.txt", "arrow", tmp_path / "in", workers=0, text=options)
    tags = check(html_report(tmp_path / "in"))
    assert "the cat sat on the mat." in tags.text
    assert "tokens of all documents" in tags.text
    shardkit.export(tmp_path / "in", "jsonl", tmp_path / "plain")
    path = shardkit.open(tmp_path / "in").tokenizer_path
    assert path is not None
    path.unlink()
    without = check(html_report(tmp_path / "in")).text
    assert "the cat" not in without
    assert "uint16" in without
    about, table = tmp_path / "plain/.shardkit.json", tmp_path / "plain/data.jsonl"
    about.write_text(about.read_text().replace("<u2", "<i8"))
    table.write_text(table.read_text().replace('"tokens":[', '"tokens":[-5,', 1))
    shardkit.convert(tmp_path / "plain", "arrow", tmp_path / "out", workers=0)
    with shardkit.open(tmp_path / "out") as ds:
        assert "int64" in ds._repr_html_()
    assert "the dog" in check(html_report(tmp_path / "out")).text
    assert "-5" in run("inspect", tmp_path / "out").stdout


def test_duplicates_and_what_was_left_out_or_cannot_be(tmp_path):
    source = write_images(tmp_path / "in", classes=2, each=4)
    shutil.copy(source / "class0/000.jpg", source / "class1/zzz.jpg")
    (source / "class1" / "notes.txt").write_text("x")
    out = tmp_path / "out"
    shardkit.convert(source, "parquet", out, workers=0, where="label == 0", stats=True)
    tags = check(html_report(out))
    assert "ignored: " in tags.text
    assert "None. Compared: image." in tags.text
    assert "image: mean" in tags.text
    shardkit.convert(source, "parquet", tmp_path / "all", workers=0)
    text = check(html_report(tmp_path / "all")).text
    assert "Copies of an earlier sample: 1, in 1 group, 1 of which with several labels." in text
    assert "class0/000, class1/zzz" in text
    next((tmp_path / "all").glob("*.parquet")).unlink()
    text = check(html_report(tmp_path / "all")).text
    assert "9 samples of these could not be read" in text

    def counts(histogram):
        names = ("documents", "tokens", "bytes", "padding", "dropped", "cut")
        text = dict.fromkeys((*names, "shortest", "median", "longest"), 1)
        rewrite(out, lambda data: data.update(text={**text, "histogram": histogram}))

    counts({"1": 0})
    assert "tokens of all documents" in check(html_report(out)).text
    counts({str(size): 1 for size in range(66)})
    with pytest.raises(DamagedError, match="counts of sizes, by powers of two"):
        html_report(out)


def test_a_report_is_replaced_whole_or_not_at_all_and_another_file_never(tmp_path, monkeypatch):
    page, data = tmp_path / "page.html", dataset(tmp_path / "x.beton", "beton")
    write_report(f"{START} first", page)
    before = files_of(tmp_path)

    def full(*_):
        raise StorageError("cannot write: no space is left", path=page)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "write", full)
        with pytest.raises(StorageError):
            write_report(f"{START} second", page)
    with pytest.raises(OutputError, match="is not a shardkit report"):
        write_report("<!doctype html>", data)
    run("inspect", data, "--html", data, check=2)
    run("inspect", data, "--html", "x", "--json", check=2)
    with pytest.raises(NotFoundError):
        html_report(tmp_path / "nothing")
    assert files_of(tmp_path) == before
    for _ in range(2):
        run("inspect", data, "--html", page)
    assert page.read_bytes() != before["page.html"]


def _words(command: str) -> list[str]:
    """The words of a command, as bash reads them."""
    script = command.replace("shardkit", "printf '%s\\0'", 1)
    found = subprocess.check_output(["bash", "-c", script], env={"LC_ALL": "C.UTF-8"}, text=True)
    return found.split("\0")[:-1]


class _AskedError(Exception):
    """What the command line was to do."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard_samples": 7, "shuffle": True, "seed": 5, "on_error": "skip", "stats": True},
        {"shard_size": 12_345_678, "limit": 4, "sample": 0.5, "seed": 3, "safe_keys": True},
        {"include_class": ["a,b", 'c"d'], "split": "train=0.5,val=0.5", "stratify": "label"},
        {"where": 'label in (1, 2) and x == "it\'s"', "drop": ["a b", "-c"], "dedup": "near"},
        {"fields": ["x", "y"], "rename": {"x": "z", "é": "y"}, "folds": 4, "group": "who"},
        {"image": ImageOptions(resize=64, resize_mode="pad", format="webp", background="red")},
        {"audio": AudioOptions(16000, mono=True), "exclude_class": ["x\ny"], "beside": ["dali"]},
        {"text": TextOptions(field="body", keep_fields=True, encoding="latin-1")},
    ],
)
def test_the_command_asks_for_the_same_recipe(options, monkeypatch):
    def ask(source, to, out, **given):
        known = {field.name for field in fields(ConvertOptions)}
        options = {name: value for name, value in given.items() if name in known}
        raise _AskedError(Recipe.of(to, ConvertOptions(**options)))

    monkeypatch.setattr("shardkit.conversion.convert.convert", ask)
    asked = Recipe.of("wds", ConvertOptions(**options))
    text = convert_command(Recipe.from_json(json.loads(json.dumps(asked.to_json()))))
    assert all(line.isprintable() for line in text.split("\n"))
    with pytest.raises(_AskedError) as found:
        convert_cli.main(_words(text)[1:], standalone_mode=False)
    assert identity(found.value.args[0].to_json()) == identity(asked.to_json())


@pytest.mark.parametrize(
    "sizes",
    [[5], [0, 0], [*range(100)], [0, 10**6], [10**9, 10**9 + 1000], [100_000, 101_000, 100_500]],
)
def test_histograms_have_all_values(sizes):
    counted = FieldSizes()
    counted.add(sizes)
    ranges = counted.ranges()
    assert sum(count for _, _, count in ranges) == len(sizes)
    assert (ranges[0][0], ranges[-1][1]) == (min(sizes), max(sizes))
    assert 1 <= len(ranges) <= 24
    for (_, end, _), (start, _, _) in itertools.pairwise(ranges):
        assert start == end + 1
    if len(sizes) == 100:  # exact, where sizes are below 256
        assert all(count == end - start + 1 for start, end, count in ranges)


# The lowest contrast of a text with what lies behind it, by WCAG's formula.
CONTRAST = """
(() => {
  const light = rgb => { const [r, g, b] = rgb.map(v => (v /= 255) <= .03928 ? v / 12.92
    : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const parts = text => (text.match(/[\\d.]+/g) || []).map(Number);
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())) continue;
    let at = e, back = [0, 0, 0, 0];
    while (at && !(back.length == 3 || back[3] == 1)) {
      back = parts(getComputedStyle(at).backgroundColor); at = at.parentElement; }
    const a = light(parts(getComputedStyle(e).color).slice(0, 3)), b = light(back.slice(0, 3));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < worst[0]) worst = [ratio, e.tagName + ' ' + e.textContent.slice(0, 40)];
  }
  return worst;
})()
"""


@pytest.mark.large
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_in_a_browser(hostile, tmp_path, width, dark):
    """It asks for nothing, complains of nothing, and fits its width, also with all folds open."""
    source = write_images(tmp_path / "in", classes=40, each=2)
    shardkit.convert(source, "wds", tmp_path / "out", workers=0, split="train=0.5,val=0.5")
    bad = tmp_path / "bad.html"
    with browser() as chromium:
        for name, made in (("hostile", hostile), ("images", tmp_path / "out")):
            page = tmp_path / f"{name}.html"
            write_report(html_report(made), page)
            assert chromium.open(page, width, dark=dark) == []
            chromium.value("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert chromium.value("document.documentElement.scrollWidth") <= width
            broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
            decoded = "Promise.all([...document.images].map(i => i.decode()))"
            assert chromium.value(f"{decoded}.then(() => {broken})") == 0
            contrast, where = chromium.value(CONTRAST)
            assert contrast >= 4.5, where
            assert chromium.value("matchMedia('(prefers-color-scheme: dark)').matches") == dark
            assert chromium.value("document.scripts.length") == 0
        # These checks can fail.
        bad.write_text(
            "<script>console.log(1)</script><img src='x.png'><div style='width:2000px'>x</div>"
        )
        wrong = {event["method"] for event in chromium.open(bad, 390, dark=False)}
        assert {"Network.requestWillBeSent", "Runtime.consoleAPICalled"} <= wrong
        assert chromium.value("document.documentElement.scrollWidth") > 390
        bad.write_text("<p style='color:#999;background:#fff'>x</p>")
        chromium.open(bad, 390, dark=False)
        assert chromium.value(CONTRAST)[0] < 4.5
