"""Audio decoded while loading: libsndfile's samples, rates, channels and random parts."""

import functools
import io
import math
import shutil

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch
from click.testing import CliRunner

import shardkit
from shardkit import Bucket, Decode, Dynamic, Mono, Pack, RandomClip, Resample
from shardkit.cli import group as cli
from shardkit.errors import SampleError, UsageError
from shardkit.schema import Array, Audio, Image, Int, Schema
from shardkit.testing import make_audio, make_image
from shardkit.torch import Loader
from shardkit.transforms import Transforms
from tests.sources.real import refused
from tests.transforms.chunks import applied, batches_any_way

Samples = npt.NDArray[np.float32]
NOISE = np.random.default_rng(0).normal(size=(9001, 2)) * 0.3
KINDS = [("WAV", kind) for kind in ("PCM_16", "PCM_24", "FLOAT", "ULAW")]
KINDS += [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("AIFF", "PCM_16")]
KINDS += [("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")]


def encoded(sound, rate=16000, format="WAV", subtype="FLOAT"):
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=format, subtype=subtype)
    return file.getvalue()


def made(values, steps, turn=0):
    """What a chain makes of values; raises the first error."""
    samples = [{"__key__": str(n), "audio": value} for n, value in enumerate(values)]
    found = applied({"audio": steps}, samples, Schema({"audio": Audio()}), seed=7, turn=turn)
    return [sample["audio"] for sample in found]


@pytest.mark.parametrize(("format", "subtype"), KINDS)
def test_samples_and_parts_are_those_that_soundfile_gives(format, subtype):
    """Whether a part is sought in the file, or cut from all of its samples."""
    data = encoded(NOISE, 16_000, format, subtype)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    [whole] = made([data], Decode())
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole, expected.T)
    [one] = made([encoded(NOISE[:, 0], 16_000, format, subtype)], Mono())
    assert one.shape == (1, 9001)
    for turn in range(3):
        [sought] = made([data], [RandomClip(0.25)], turn)
        [cut] = made([data], [Decode(), Mono(), RandomClip(0.25)], turn)
        assert sought.shape == (2, 4000)
        starts = np.flatnonzero(whole[0] == sought[0, 0])
        assert any(np.array_equal(whole[:, s : s + 4000], sought) for s in starts.tolist())
        np.testing.assert_array_equal(sought.mean(axis=0, keepdims=True, dtype="f4"), cut)


def test_parts_begin_anywhere_and_short_audio_is_followed_by_zeros():
    ramp = np.arange(100, dtype=np.float32) / 128
    data = encoded(ramp, 100)
    parts = [made([data], [RandomClip(0.9)], turn)[0] for turn in range(100)]
    starts = [round(float(part[0, 0]) * 128) for part in parts]
    assert set(starts) == set(range(11))
    [short] = made([data], [RandomClip(1.5)])
    np.testing.assert_array_equal(short, np.append(ramp, np.zeros(50, np.float32))[None])
    [empty] = made([encoded(ramp[:0], 100)], [RandomClip(0.05)])
    np.testing.assert_array_equal(empty, np.zeros((1, 5)))


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100])
def test_parts_have_one_length_whatever_the_rate_was(rate):
    data = encoded(NOISE[:, 0], rate)
    for seconds in (0.1, 1 / 7):
        steps = [RandomClip(seconds), Resample(16_000)]
        for order in (steps, steps[::-1]):
            assert made([data], order)[0].shape == (1, round(seconds * 16_000))
    stereo = encoded(NOISE, 16_000)  # functions get the samples
    assert made([stereo], [Decode(), np.shape]) == [(2, 9001)]
    assert made([stereo], [Resample(8000), Mono(), np.shape]) == [(1, 4501)]
    assert made([stereo], [len]) == [len(stereo)]


def tones(rate, frequencies, seconds=1.0):
    t = np.arange(round(rate * seconds)) / rate
    return sum(np.sin(2 * np.pi * f * t + f) for f in frequencies) / len(frequencies)


@pytest.mark.parametrize(("rate", "to"), [(44_100, 16_000), (48_000, 16_000), (8000, 16_000)])
def test_resampling_is_that_of_the_continuous_signal(rate, to):
    """To 1e-5 below half of what the lower rate can hold, to 0.01 dB up to 90 %."""
    low = min(rate, to) / 2
    inner = slice(to // 50, -(to // 50))
    for part, bound in ((0.01, 1e-5), (0.3, 1e-5), (0.5, 1e-5), (0.7, 1.2e-3), (0.9, 1.2e-3)):
        [found] = made([encoded(tones(rate, [part * low]), rate)], Resample(to))
        exact = tones(to, [part * low])
        assert found.shape == (1, len(exact))
        assert np.abs(found[0] - exact)[inner].max() < bound
    # What the lower rate cannot hold is gone.
    if to < rate:
        [gone] = made([encoded(tones(rate, [1.2 * low, 1.6 * low]), rate)], Resample(to))
        assert np.abs(gone[0])[inner].max() < 1e-5


def torchaudio_resampled(sound, rate, to, width=6):
    """`torchaudio.functional.resample` (sinc_interp_hann), as its documentation defines it."""
    cutoff = min(rate, to) * 0.99
    times = np.arange(math.ceil(len(sound) * to / rate)) / to
    reach = math.ceil(width * rate / cutoff) + 1
    at = np.round(times * rate).astype(int) + np.arange(-reach, reach + 1)[:, None]
    t = np.clip((at / rate - times) * cutoff, -width, width)
    inside = (at >= 0) & (at < len(sound))
    samples = np.where(inside, sound[np.clip(at, 0, len(sound) - 1)], 0)
    return (samples * np.sinc(t) * np.cos(t * np.pi / width / 2) ** 2).sum(0) * cutoff / rate


@pytest.mark.parametrize(("rate", "to"), [(44_100, 16_000), (16_000, 44_100)])
def test_resampling_is_closer_to_the_signal_than_torchaudios_default(rate, to):
    frequencies = [part * min(rate, to) / 2 for part in (0.01, 0.3, 0.7)]
    sound, exact = (tones(hertz, frequencies, 0.3) for hertz in (rate, to))
    [found] = made([encoded(sound, rate)], Resample(to))
    signals = (
        found[0],
        torchaudio_resampled(sound, rate, to, 64),
        torchaudio_resampled(sound, rate, to),
    )
    inner = slice(to // 20, -(to // 20))
    ours, long, usual = (np.abs(signal - exact)[inner].max() for signal in signals)
    assert max(ours, long) < 1e-3 < usual


def test_what_is_no_chain_is_refused():
    schema = Schema({"audio": Audio(), "image": Image(), "n": Int(), "a": Array("<f4", (None,))})
    clip, crop = RandomClip(1), shardkit.CenterCrop(3)
    chains = {"audio": ([len, clip], [Decode(), len, clip], [crop], [clip, crop])}
    chains |= {"image": ([clip], [Decode(), clip]), "n": ([clip],), "a": ([clip],)}
    chains[("audio", "n")] = ([clip],)
    for field, steps in ((field, steps) for field, some in chains.items() for steps in some):
        refused(UsageError, None, Transforms, {field: steps}, schema)
    numbers = (0, -1, "1", None, math.nan, math.inf)
    wrong = {Resample: (1.5, 10**6, "16000", True, 0, -1), RandomClip: numbers}
    for kind, value in ((kind, value) for kind, values in wrong.items() for value in values):
        refused(UsageError, None, kind, value)
    assert repr([clip, Resample(8000), Mono()]) == "[RandomClip(1), Resample(8000), Mono()]"


def test_bad_audio_is_an_error_with_its_sample():
    good = make_audio()
    flac = bytearray(encoded(NOISE[:, 0], 16_000, "FLAC", "PCM_16"))
    flac[len(flac) // 2 : len(flac) // 2 + 2000] = bytes(2000)
    fast = bytearray(good)
    fast[24:28] = (4_000_000_000).to_bytes(4, "little")
    m4a = b"\0\0\0\x1cftypM4A \0\0\0\0M4A mp42isom"
    for data in (good[:-1], bytes(flac), make_image(), b"", m4a):
        assert refused(SampleError, None, made, [data], Decode()).where["field"] == "audio"
    for steps in (Resample(16_000), [RandomClip(2.0)]):
        refused(SampleError, None, made, [bytes(fast)], steps)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    path = tmp_path_factory.mktemp("clips") / "clips"
    with shardkit.create(path, "wds", {"audio": Audio(), "label": Int()}) as writer:
        for number in range(40):
            length = 800 + 370 * (number * 7 % 40)
            writer.write({"audio": make_audio(number, 8000, length), "label": number % 3})
    return path


def test_batches_of_clips_resume_and_divide_as_those_of_images(clips):
    """S-guarantees: the same clips for any ranks, threads and stops."""
    options = {"global_batch_size": 8, "shuffle": True, "seed": 3}
    options["transforms"] = {"audio": [RandomClip(0.1), Resample(16_000)]}
    first = batches_any_way(functools.partial(Loader, clips, **options), "audio")
    assert (first[0]["audio"].shape, first[0]["audio"].dtype) == ((8, 1, 1600), torch.float32)
    loader = Loader(clips, **options)
    first, second = (
        dict(pair for b in loader for pair in zip(b["__key__"], b["audio"], strict=True))
        for _ in range(2)
    )
    assert any(not torch.equal(first[key], second[key]) for key in first), (
        "each epoch has clips of its own"
    )


def test_batches_by_duration_are_planned_from_headers_and_padded_behind(clips):
    lengths = shardkit.open(clips).lengths("audio")
    assert lengths.tolist() == [round((800 + 370 * (n * 7 % 40)) / 8) for n in range(40)]
    transforms = {"audio": [Mono(), Resample(16_000)]}
    for batching in (Bucket(4, (300, 900)), Bucket(4, 3), Dynamic(5000)):
        loader = Loader(clips, batching=batching, shuffle=True, transforms=transforms)
        seen = []
        for batch in loader:
            audio, real = batch["audio"], batch["lengths"]
            assert audio.shape == (len(real), 1, int(real.max()))
            assert batch["attention_mask"].sum(dim=1).tolist() == real.tolist()
            for row, length in zip(audio, real.tolist(), strict=True):
                assert not row[:, length:].any()
            milliseconds = (real[batch["valid"]] / 16).tolist()
            if isinstance(batching, Dynamic):
                assert max(milliseconds) * len(milliseconds) <= 5001
            elif isinstance(batching.boundaries, tuple):
                assert len(set(np.searchsorted(batching.boundaries, milliseconds))) == 1
            seen += milliseconds
        assert sorted(seen) == pytest.approx(sorted(lengths.tolist()), abs=0.6)
    # What stays encoded is a list; packed rows are not for audio.
    [batch, *_] = Loader(clips, batching=Bucket(4, 2, "audio"))
    assert all(isinstance(value, bytes) for value in batch["audio"])
    refused(UsageError, None, Loader, clips, batching=Pack(10, 2, field="audio"))


def test_durations_are_in_statistics_and_read_where_there_is_no_table(clips, tmp_path):
    """Of an earlier version, whose table had arrays alone, and of others."""
    kinds = {"audio": Audio(), "a": Array("<i4", (None,))}
    with shardkit.create(tmp_path / "new", "wds", kinds) as writer:
        for n in range(5):
            audio = make_audio(n, 8000, 800 * n + 80)
            writer.write({"audio": audio, "a": np.arange(n, dtype="<i4")})
    dataset = shardkit.open(tmp_path / "new")
    expected = [100 * n + 10 for n in range(5)]
    table = tmp_path / "new/__shardkit__/lengths.npy"
    rows = np.load(table)
    assert (rows.dtype.names, rows["audio"].tolist()) == (("audio", "a"), expected)
    np.save(table, rows[["a"]].astype([("a", "<u4")]))
    assert dataset.lengths("audio").tolist() == expected
    assert dataset.lengths("a").tolist() == [*range(5)]
    (foreign := tmp_path / "foreign").mkdir()
    shutil.copy(clips / "shard-000000.tar", foreign)
    there = shardkit.open(foreign)
    assert there.lengths("wav").tolist() == shardkit.open(clips).lengths("audio").tolist()
    found = shardkit.open(clips).stats()["fields"]["audio"]
    assert found["formats"] == {"wav": 40}
    assert (found["milliseconds"]["min"], found["sampling_rate"]["max"]) == (100, 8000)
    assert found["channels"]["max"] == 1
    assert shardkit.inspect(clips)["lengths"]["audio"]["shortest"] == 100
    for command, words in (("inspect", "milliseconds of 'audio'"), ("stats", "sampling_rate")):
        assert words in CliRunner().invoke(cli, [command, str(clips)]).output
