"""What a conversion takes: the estimate of `--plan`, and a run that cannot fit on the disk."""

import json
import shutil
import warnings

import pytest

import shardkit
from shardkit import ConvertOptions, ImageOptions, TextOptions
from shardkit.cli.progress import show_plan
from shardkit.conversion import estimate
from shardkit.conversion.run import prepare
from shardkit.errors import OutputError, ShardkitWarning
from tests.conftest import IMAGE_FORMATS, few, files_of, write_images
from tests.sources.test_text import put
from tests.test_cli import run


def stored(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """3 MB."""
    return write_images(tmp_path_factory.mktemp("photos") / "in", 2, 25, kilobytes=60)


@pytest.fixture
def free(monkeypatch):
    """Makes so many bytes free on each disk."""

    def set_free(count):
        usage = shutil.disk_usage("/")._replace(free=count)
        monkeypatch.setattr("shardkit.conversion.estimate.shutil.disk_usage", lambda path: usage)

    return set_free


def planned(source, to, out, **options):
    return estimate.estimate(prepare(source, to, out, ConvertOptions(**options)))


@pytest.mark.parametrize("format", few(IMAGE_FORMATS, "beton", "wds"))
def test_bytes_are_about_those_written_or_refused_as_too_many(photos, tmp_path, format, free):
    out = tmp_path / "out"
    found = planned(photos, format, out)
    assert not out.exists()
    shardkit.convert(photos, format, out, workers=0)
    truth = stored(out)
    assert 0.8 * truth < found.written < 1.2 * truth
    assert 0.9 * stored(photos) < found.certain <= truth
    before = files_of(tmp_path)
    free(truth * 3 // 4)
    with pytest.raises(OutputError, match="does not fit on its disk") as error:
        shardkit.convert(photos, format, tmp_path / "second", workers=0)
    for said in (f"{truth * 3 // 4:,} bytes free in {tmp_path}", "-o", "--plan"):
        assert said in str(error.value)
    assert files_of(tmp_path) == before
    free(truth)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardkitWarning)
        shardkit.convert(photos, format, tmp_path / "second", workers=0)


def test_samples_that_are_too_large_are_not_tried(photos, out, tmp_path, free, monkeypatch, capsys):
    shardkit.convert(photos, "wds", tmp_path / "first", workers=0)
    truth = stored(tmp_path / "first")
    monkeypatch.setattr(estimate, "_TRIED_BYTES", 10_000)
    monkeypatch.setattr(estimate, "_try", None)  # it would copy them
    plan = prepare(photos, "wds", out, ConvertOptions())
    show_plan(plan, "", estimate.describe(plan, 1, 0.0))
    assert "too large to try their conversion" in " ".join(capsys.readouterr().out.split())
    free(truth * 3 // 4)
    with pytest.raises(OutputError, match="does not fit on its disk"):
        shardkit.convert(photos, "wds", out, workers=0)


def test_some_samples_that_are_too_large_or_bad_are_not_tried(photos, out, tmp_path, monkeypatch):
    source = shutil.copytree(photos, tmp_path / "in")
    large, bad = source / "class0/000.jpg", source / "class0/001.jpg"
    with monkeypatch.context() as patch:
        large.write_bytes(large.read_bytes() + bytes(1_000_000))
        patch.setattr(estimate, "_TRIED_BYTES", 500_000)
        found = planned(source, "wds", out)
        assert 0 < found.read < 1_000_000
        shardkit.convert(source, "wds", out, workers=0)
        assert 0.8 * stored(out) < found.written < 1.2 * stored(out)
    bad.write_bytes(b"no image")
    found = planned(source, "wds", tmp_path / "second")
    assert found.written > 1_000_000
    assert found.bad == 1
    assert ", and 1 that is bad" in run("convert", source, "--to", "wds", "--plan").stdout
    for path in source.rglob("*.jpg"):
        path.write_bytes(b"no image")
    about = estimate.describe(prepare(source, "wds", tmp_path / "third"), 2, 0.0)
    assert about["problem"] == "none of the tried samples can be stored"
    assert about["disk"]["free"] > 0


def test_what_an_unfinished_run_has_written_counts(photos, out, free):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.conversion.run.assemble", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shardkit.convert(photos, "wds", out, workers=0)
    free(100_000)
    for _ in range(2):  # the second time it is complete: nothing is written
        shardkit.convert(photos, "wds", out, workers=0)
    with pytest.raises(OutputError, match="does not fit"):
        shardkit.convert(photos, "wds", out, workers=0, overwrite=True, shuffle=True)


def test_where_the_result_is_uncertain_a_warning_says_so(photos, tmp_path, free):
    free(100_000)
    image = ImageOptions(format="raw")
    with pytest.warns(ShardkitWarning, match="may become full: .* can be resumed"):
        shardkit.convert(photos, "wds", tmp_path / "raw", workers=0, image=image)
    rows = [{"__key__": str(n), "text": "word " * 2000} for n in range(50)]
    with pytest.warns(ShardkitWarning, match="may become full"):
        shardkit.convert(rows, "arrow", tmp_path / "text")
    free(1 << 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardkit.convert(photos, "wds", tmp_path / "enough", workers=0, image=image)


def test_with_much_space_or_nothing_to_try_a_run_goes_on(photos, tmp_path, monkeypatch, free):
    with monkeypatch.context() as patch:
        patch.setattr(estimate, "estimate", None)  # it is not asked
        shardkit.convert(photos, "wds", tmp_path / "out", workers=0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    about = estimate.describe(prepare(photos, "wds", tmp_path / "second"), 2, 0.0)
    assert about["problem"].startswith("could not try a sample: ")
    free(10)
    shardkit.convert(photos, "wds", tmp_path / "second", workers=0)


@pytest.mark.parametrize("options", [{"drop": ["text"]}, {}])
def test_what_is_not_stored_or_can_be_compressed_needs_no_space(photos, tmp_path, free, options):
    fields = {"image": shardkit.Image(), "text": shardkit.Text()}
    with shardkit.create(tmp_path / "in", "wds", fields) as new:
        for path in sorted(photos.rglob("*.jpg")):
            new.write({"image": path.read_bytes(), "text": "again and again " * 10_000})
    free(stored(tmp_path / "in") // 2)
    shardkit.convert(tmp_path / "in", "parquet", tmp_path / "out", workers=0, **options)


def test_joined_shards_need_their_space_twice(photos, tmp_path):
    image = ImageOptions(resize=48)
    whole = planned(photos, "lmdb", tmp_path / "x.lmdb", image=image)
    plan = prepare(photos, "lmdb", tmp_path / "x.lmdb", ConvertOptions(image=image))
    assert bool(whole.joined) == any(task.joined for task in plan.tasks)
    assert whole.needed == whole.written + whole.joined


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_tokens_count_with_their_blocks_and_tokenizer(tmp_path, out, gpt2, monkeypatch, seconds):
    """However soon trying ends: a document is tried with all of its blocks."""
    monkeypatch.setattr(estimate, "_SECONDS", seconds)
    lines = "\n".join(f"line {n} of some words" for n in range(2_000))
    for number in range(3):
        put(tmp_path / f"corpus/{number}.txt", lines)
    text = TextOptions(tokenizer=gpt2, seq_len=128)
    found = planned(tmp_path / "corpus", "arrow", out, text=text)
    assert found.documents <= 3 < found.samples
    shardkit.convert(tmp_path / "corpus", "arrow", out, text=text, workers=0)
    assert 0.8 < found.written / stored(out) < 1.2
    assert (found.certain, found.joined) == (0, 0)


@pytest.mark.parametrize("seq_len", [None, 64])
def test_a_limit_of_a_long_file_counts(tmp_path, gpt2, seq_len):
    source = put(tmp_path / "long.txt", "a line of some words\n" * 8_000)
    text = TextOptions(tokenizer=gpt2 if seq_len else None, seq_len=seq_len)
    options = {"limit": 2000, "text": text}
    found = planned(source, "mds", tmp_path / "out", **options)
    shardkit.convert(source, "mds", tmp_path / "out", workers=0, **options)
    assert 0.6 < found.written / stored(tmp_path / "out") < 1.4


def test_the_plan_tells_what_it_takes(images, tmp_path):
    before = files_of(tmp_path)
    words = ["convert", images, "--to", "wds", "--plan", "--workers", "3"]
    about = json.loads(run(*words, "--json").stdout)["estimate"]
    read = sum(map(len, files_of(images).values()))
    assert about["tried"] == {"samples": 12, "bad": 0, "bytes": read}
    assert about["processes"] == 1  # for one task
    assert about["seconds"] >= 0
    disk = about["disk"]
    assert (disk["folder"], disk["unfinished"]) == (str(tmp_path), 0)
    assert disk["needed"] == about["written"]
    shown = run(*words).stdout
    assert all(s in shown for s in ("to write", "with 1 process: 12 samples", "needed,", "free in"))
    assert files_of(tmp_path) == before
