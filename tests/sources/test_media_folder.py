"""Folders of audio and of video: bytes as they are, labels of class folders, text beside them."""

import gc
import re
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

import shardkit
from shardkit import Audio, Float, Int, Json, SampleError, Text, UsageError, Video, inspect
from shardkit.cli import group as cli
from shardkit.sources import open_sources
from shardkit.testing import make_audio, make_image, make_video
from tests.sources.real import convert, counts, opened, put, refused, verified


@pytest.fixture
def clips(tmp_path):
    """Class folders of audio, as ESC-50 and Speech Commands have them."""
    words = [f"{word}/{n}" for word in ("no", "yes") for n in (1, 2)]
    return put(tmp_path / "clips", {f"{w}.wav": make_audio(n) for n, w in enumerate(words)})


def test_class_folders_of_audio_have_labels(clips, tmp_path):
    result = verified(clips, tmp_path / "out")
    assert (result.samples, result.ignored) == (4, {})
    with shardkit.open(tmp_path / "out") as dataset:
        assert dict(dataset.schema) == {"audio": Audio(), "label": Int()}
        assert dataset.classes == ("no", "yes")
        assert dict(dataset[2]) == {"__key__": "yes/1", "audio": make_audio(2), "label": 1}
    put(clips, {"yes/3.wav": make_audio(rate=16000, samples=16000)})
    for source, name, where in (
        (clips, "long", "duration >= 1"),
        (tmp_path / "long", "fast", "sampling_rate == 16000"),
    ):
        result = shardkit.convert(source, "wds", tmp_path / name, where=where, workers=0)
        assert result.samples == 1
    put(tmp_path / "root/test", {"yes/9.wav": make_audio(9)})
    clips.rename(tmp_path / "root/train")
    found = open_sources(tmp_path / "root")
    assert counts(found) == {"train": 5, "test": 1}
    assert found["test"].classes == ("no", "yes")


def test_inspect_tells_hours_rates_and_sizes(tmp_path):
    audio = {"1.wav": make_audio(1), "2.wav": make_audio(1, 16000, 48000), "3.wav": make_audio()}
    convert(put(tmp_path / "a", audio), tmp_path / "speech", "lmdb")
    report = inspect(tmp_path / "speech", full=True)
    assert report["first"][1]["audio"] == "wav, 16,000 Hz x 1, 3.00 s, 96,044 bytes"
    about = report["media"]["audio"]
    assert (about["formats"], about["damaged"], "width" in about) == ({"wav": 3}, 0, False)
    found = [[*about[name].values()] for name in ("milliseconds", "sampling_rate", "channels")]
    rates = [3, 8000, 8000, 32000 / 3, 16000]
    assert found == [
        pytest.approx([3, 10, 10, 3020 / 3, 3000], 0.01),
        pytest.approx(rates, 0.01),
        [3, 1, 1, 1, 1],
    ]
    # As UCF-101 has videos, some in another container.
    videos = {"a/1.mp4": make_video(), "b/2.m4v": make_video(size=(32, 16), frames=50)}
    convert(put(tmp_path / "v", videos), tmp_path / "films")
    with shardkit.open(tmp_path / "films") as dataset:
        assert dict(dataset.schema) == {"video": Video(), "label": Int()}
        assert dataset[1] == {"__key__": "b/2", "video": videos["b/2.m4v"], "label": 1}
    done = CliRunner().invoke(cli, ["inspect", str(tmp_path / "films"), "--full"])
    assert "mp4 mjpeg 64 x 48, 25 frames at 25 Hz, 1.00 s" in done.output
    for row in (r"video +total +0.00 hours", r"width +32 / ", r"milliseconds +1,000 / "):
        assert re.search(row, done.output), row


def test_what_lies_beside_audio_becomes_fields_or_is_counted_or_a_question(clips, tmp_path):
    text = {f"{word}/{n}.txt": f"{word} {n}" for word in ("no", "yes") for n in (1, 2)}
    put(clips, {**text, "no/1.json": '{"n": 1}', "LICENSE": "x"})
    source = open_sources(clips)[""]
    kinds = {"audio": Audio(), "label": Int(), "text": Text(), "json": Json(optional=True)}
    assert dict(source.schema) == kinds
    assert source[0]["text"] == "no 1"
    assert source.ignored == {"file without suffix": 1}
    # ESC-50 has a picture beside its 2,000 clips.
    root = put(tmp_path / "esc", {f"{n}.wav": make_audio(n) for n in range(10)})
    put(root, {"esc.gif": make_image(), "README.md": "#", "LICENSE": ""})
    source = open_sources(root)[""]
    assert (len(source), dict(source.schema)) == (10, {"audio": Audio()})
    assert source.ignored == {".gif file": 1, ".md file": 1, "file without suffix": 1}
    put(root, {"more.jpg": make_image()})
    error = refused(UsageError, "several kinds", open_sources, root)
    assert error.found == "10 audio files, 2 images"


# datasets leaves the file open.
@pytest.mark.large
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_metadata_are_those_of_datasets_audio_folder(clips, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # Which it imports to encode samples of sound: there are none, but files.
    monkeypatch.setitem(sys.modules, "torchcodec", types.ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.encoders", Mock())
    lines = [f"{w}/{n}.wav,{w} {n},{n}.5" for w in ("yes", "no") for n in (1, 2)]
    put(clips, {"metadata.csv": "\n".join(["file_name,text,score", *lines])})
    source = open_sources(clips)[""]
    names = {"audio": Audio(), "label": Int(), "text": Text(), "score": Float()}
    assert dict(source.schema) == names
    theirs = datasets.load_dataset("audiofolder", data_dir=str(clips), split="train")
    theirs = theirs.cast_column("audio", datasets.Audio(decode=False))
    paths = [Path(row["audio"]["path"]).relative_to(clips).with_suffix("") for row in theirs]
    expected = dict(zip(map(Path.as_posix, paths), theirs, strict=True))
    assert len(expected) == len(source) == 4
    for n in range(4):
        row = expected[source[n]["__key__"]]
        assert (source[n]["text"], source[n]["score"]) == (row["text"], row["score"])
        assert Path(row["audio"]["path"]).read_bytes() == source[n]["audio"]
    gc.collect()  # that file, whose warning would be another test's


def test_librispeech_has_its_transcripts(tmp_path):
    folder = "LibriSpeech/dev-clean/84"
    files = {}
    for chapter in (121, 122):
        stems = [f"84-{chapter}-{n:04d}" for n in range(2)]
        files |= {f"{folder}/{chapter}/{stem}.wav": make_audio() for stem in stems}
        lines = "".join(f"{stem} GO ON {stem}\n" for stem in stems)
        files[f"{folder}/{chapter}/84-{chapter}.trans.txt"] = lines
    root = put(tmp_path, files) / folder
    source = open_sources(root)[""]
    assert dict(source.schema) == {"audio": Audio(), "label": Int(), "text": Text()}
    spoken = [f"GO ON 84-{chapter}-{n:04d}" for chapter in (121, 122) for n in range(2)]
    assert [source[n]["text"] for n in range(4)] == spoken
    assert source.ignored == {}
    (root / "122/84-122-0001.wav").unlink()
    error = refused(SampleError, "a listed clip does not exist", convert, root, tmp_path / "other")
    assert error.found == "84-122-0001"
    put(root, {"122/84-122.trans.txt": ""})
    assert open_sources(root)[""].schema["text"] == Text(optional=True)


def test_speech_commands_has_lists_of_splits_and_noise(clips, tmp_path):
    noise = {"_background_noise_/tap.wav": make_audio(), "_background_noise_/README.md": "#"}
    lists = {"validation_list.txt": "no/1.wav\n", "testing_list.txt": "yes/2.wav\nyes/1.wav\n"}
    put(clips, {**noise, **lists, "LICENSE": "x"})
    result = verified(clips, tmp_path / "out")
    assert result.ignored == {"file in _background_noise_": 1, "file without suffix": 1}
    expected = {"train": ["no/2"], "val": ["no/1"], "test": ["yes/1", "yes/2"]}
    assert list(result.splits) == list(expected)
    for split, keys in expected.items():
        dataset = shardkit.open(tmp_path / "out" / split)
        assert [sample["__key__"] for sample in dataset] == keys
        assert dataset.classes == ("no", "yes")
    assert len(opened(clips, split="none")[""]) == 4
    put(clips, {"validation_list.txt": "yes/1.wav\n"})
    refused(UsageError, "two split lists name the same file", open_sources, clips)


def test_esc_50_has_its_labels_in_a_table(tmp_path):
    files = {f"audio/1-{n}-A-{n % 2}.wav": make_audio(n) for n in range(4)}
    rows = "".join(f"1-{n}-A-{n % 2}.wav,{n % 2 + 1},{['dog', 'cat'][n % 2]}\n" for n in range(4))
    root = put(tmp_path / "ESC-50", {**files, "meta/esc50.csv": f"filename,fold,category\n{rows}"})
    refused(UsageError, "the only folder with audio files is called 'audio'", open_sources, root)
    options = {"metadata": root / "meta/esc50.csv", "file_column": "filename"}
    options |= {"label_column": "category"}
    convert(root / "audio", tmp_path / "out", **options)
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset.classes == ("cat", "dog")
        assert [sample["label"] for sample in dataset] == [1, 0, 1, 0]
        assert dataset[1]["fold"] == 2


def test_damaged_audio_is_an_error_or_left_out(clips, tmp_path):
    (clips / "no/2.wav").write_bytes((clips / "no/2.wav").read_bytes()[:-1])
    error = refused(SampleError, "the file is truncated", convert, clips, tmp_path / "out", "hf")
    assert error.where["key"] == "no/2"
    result = convert(clips, tmp_path / "out", "hf", on_error="skip")
    assert (result.samples, result.errors) == (3, 1)
