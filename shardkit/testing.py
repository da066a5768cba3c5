"""The contract of formats, as tests. Subclass `FormatContract`, and pytest runs all of them.

    class TestWds(FormatContract):
        tested = get_format("wds")

        def independent_keys(self, path):
            ...  # read with another library

Needs pytest and hypothesis (`pip install "shardkit[test]"`).
An example is tests/formats/test_wds.py.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import pickle
import struct
import wave
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import FormatError, SampleError, ShardkitError
from shardkit.formats import file_name
from shardkit.formats.base import Format, Joins, ShardReader, ShardSpec
from shardkit.sample import JsonText, Sample
from shardkit.schema import (
    Array,
    Audio,
    Bool,
    Bytes,
    Float,
    Image,
    Images,
    Int,
    Json,
    Schema,
    Text,
    Video,
)


def make_image(number: int = 0, format: str = "JPEG", size: tuple[int, int] = (8, 6)) -> bytes:
    """An encoded image, another one for each number: a `format` of Pillow, `size` in pixels."""
    import PIL.Image

    file = BytesIO()
    colour = (number * 37 % 256, number * 91 % 256, number * 151 % 256)
    PIL.Image.new("RGB", size, colour).save(file, format)
    return file.getvalue()


def make_audio(number: int = 0, rate: int = 8000, samples: int = 80) -> bytes:
    """A WAV file of 16 bits and one channel: `samples` at `rate` Hz, others for each number."""
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, samples, "NONE", ""))
        writer.writeframes((np.arange(samples) * (number + 1)).astype("<i2").tobytes())
    return file.getvalue()


def make_video(number: int = 0, size: tuple[int, int] = (64, 48), frames: int = 25) -> bytes:
    """An MP4 file of 25 frames a second and a `size`, another one for each number.

    It has headers and nothing to decode.
    """

    def box(name: str, *parts: bytes) -> bytes:
        content = b"".join(parts)
        return struct.pack(">I", 8 + len(content)) + name.encode() + content

    clock = struct.pack(">IIIII", 0, 0, 0, 25, frames)  # version, times, ticks a second, length
    frame = bytes(32) + struct.pack(">HH", *size) + bytes(50)
    table = box("stbl", box("stsd", struct.pack(">II", 0, 1), box("mp4v", frame[8:])))
    sizes = box("stsz", struct.pack(">III", 0, 4, frames))
    table = box("stbl", table[8:], sizes)
    handler = box("hdlr", bytes(8), b"vide", bytes(13))
    track = box("trak", box("mdia", box("mdhd", clock, bytes(4)), handler, box("minf", table)))
    movie = box("moov", box("mvhd", clock, bytes(80)), track)
    return box("ftyp", b"isom", bytes(4), b"isom") + movie + box("mdat", bytes([number]) * 9)


# One field of every type; the last may be absent.
EVERYTHING = Schema(
    {
        "image": Image(),
        "label": Int(),
        "score": Float(),
        "good": Bool(),
        "text": Text(),
        "blob": Bytes(),
        "about": Json(),
        "points": Array("<f4", (None, 2)),
        "caption": Text(optional=True),
    }
)


def everything(number: int) -> Sample:
    """The sample of such a number, of the schema EVERYTHING."""
    sample: Sample = {
        "__key__": f"folder/{number:04d}",
        "image": make_image(number),
        "label": number - 2,
        "score": number / 3,
        "good": number % 2 == 0,
        "text": f"line {number}\nÄ 漢 🎉",
        "blob": bytes(range(number % 256)),
        "about": {"n": number, "list": [1, 2.5, None, "x"], "deep": {"ü": True}},
        "points": np.arange(number * 2, dtype="<f4").reshape(number, 2),
    }
    if number % 3 == 0:
        sample["caption"] = ""
    return sample


def assert_same(found: Sample, expected: Sample) -> None:
    """Assert that `found` has the keys of `expected` in their order, equal values, equal types."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)
        elif isinstance(value, float) and math.isnan(value):
            assert math.isnan(found[name])
        else:
            assert found[name] == value, name


def assert_reads(reader: ShardReader, samples: Sequence[Sample]) -> None:
    """Assert that the reader has exactly these samples."""
    assert len(reader) == len(samples)
    for number, sample in enumerate(samples):
        assert_same(reader[number], sample)


_key_parts = st.text(
    st.characters(codec="utf-8", exclude_characters="./\0"), min_size=1, max_size=8
)
any_keys = (
    st.lists(_key_parts, min_size=1, max_size=3).map("/".join).filter(lambda k: k[:2] != "__")
)
_texts = st.text(st.characters(codec="utf-8"), max_size=30)
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def any_samples(draw: st.DrawFn, images: Sequence[str] = ("JPEG",)) -> Sample:
    """A sample of the schema EVERYTHING, of any values; images in one of these formats."""
    sample: Sample = {
        "__key__": draw(any_keys),
        "image": make_image(draw(st.integers(0, 9)), draw(st.sampled_from(images)))
        if images
        else b"",
        "label": draw(st.integers(-(2**63), 2**63 - 1)),
        "score": draw(st.floats()),
        "good": draw(st.booleans()),
        "text": draw(_texts),
        "blob": draw(st.binary(max_size=2000)),
        "about": draw(_json),
        "points": np.array(draw(st.lists(st.floats(width=32), max_size=6)), "<f4").repeat(2),
    }
    sample["points"] = sample["points"].reshape(-1, 2)
    if draw(st.booleans()):
        sample["caption"] = draw(_texts)
    return sample


def _read_in_process(reader: ShardReader, position: int, answers: Any) -> None:
    answers.put(reader[position]["__key__"])


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"something else")
    other.replace(path)


# Ways to change the file of an open shard.
HARMS: dict[str, Callable[[Path], None]] = {
    "cut to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
    "replaced": _replace,
}


def _read_harmed(
    format: Format, paths: dict[str, Path], layout: dict[str, Any], answers: Any
) -> None:
    """Read shards whose files change after they were opened and their first sample was read."""
    for harm, path in paths.items():
        reader = format.open(path, layout)
        found: list[Any] = [reader[0]]
        HARMS[harm](path)
        for position in range(1, len(reader)):
            try:
                found.append(reader[position])
            except ShardkitError as error:
                found.append(error.where)
        answers.put(found)


def open_files(folder: Path) -> int:
    """Number of files in a folder that this process has open. Ignores all other files."""
    files = {(found.st_dev, found.st_ino) for found in map(Path.stat, folder.rglob("*"))}
    count = 0
    for handle in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the handle of the listing itself is closed
            found = os.fstat(handle)
            count += (found.st_dev, found.st_ino) in files
    return count


# Health checks are off, as fixtures and subclasses are shared on purpose.
_GENERATED = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


class FormatContract:
    """Tests for every format. List tests that a format cannot pass in `gaps`; do not override them.

    A format that supports few field types overrides the class variables and the first methods here,
    which make the samples for tests that are not about a specific type.
    """

    tested: ClassVar[Format]
    # The suffix of a shard's file, such as ".lines", for a format that is not installed.
    suffix: ClassVar[str] = ""
    # The schema of `sample` and `any_sample`: as many types as the format supports.
    schema: ClassVar[Schema] = EVERYTHING
    # One field, and two values of it.
    small: ClassVar[Schema] = Schema({"label": Int()})
    small_values: ClassVar[tuple[Any, Any]] = (1, 2)
    # One field, for the values of `large_value`.
    large: ClassVar[Schema] = Schema({"blob": Bytes()})
    # Test, or test[parameter] -> why this format cannot pass it. If it passes, that is a failure.
    gaps: ClassVar[dict[str, str]] = {}
    # The minimum size of a shard in bytes, if the format has large pages.
    least_bytes: ClassVar[int] = 0

    @pytest.fixture(autouse=True)
    def _declared_gap(self, request: pytest.FixtureRequest) -> None:
        reason = self.gaps.get(request.node.name)
        if reason is not None:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def sample(self, number: int) -> Sample:
        """A sample of `schema`, different for each number. The key contains the number."""
        return everything(number)

    def any_sample(self) -> st.SearchStrategy[Sample]:
        """Samples of `schema` with arbitrary values."""
        return any_samples()

    def large_value(self, size: int) -> Any:
        """An incompressible value of this size in bytes."""
        return np.random.default_rng(size).bytes(size)

    @abstractmethod
    def independent_keys(self, path: Path) -> list[str]:
        """The keys of a shard, in order, read with another library."""

    @classmethod
    def file_name(cls) -> str:
        """The name of a shard's file."""
        stem = "shard-000000"
        return stem + cls.suffix if cls.suffix else file_name(stem, cls.tested.name)

    @pytest.fixture
    def format(self) -> Format:
        return self.tested

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / self.file_name()

    @pytest.fixture
    def samples(self) -> list[Sample]:
        """Ten samples with every type of field."""
        return [self.sample(n) for n in range(10)]

    @pytest.fixture
    def reader(self, format: Format, path: Path, samples: list[Sample]) -> Iterator[ShardReader]:
        """A reader of those samples."""
        reader = write_shard(format, path, self.schema, samples)
        yield reader
        reader.close()

    def test_every_type_comes_back_equal(self, reader: ShardReader, samples: list[Sample]) -> None:
        assert dict(reader.schema) == dict(self.schema)
        assert_reads(reader, samples)

    def test_another_library_reads_the_keys(
        self, reader: ShardReader, path: Path, samples: list[Sample]
    ) -> None:
        assert self.independent_keys(path) == _keys_of(samples)

    def test_an_empty_shard_has_no_samples(self, format: Format, path: Path) -> None:
        reader = write_shard(format, path, self.schema, [])
        assert len(reader) == 0
        with pytest.raises(IndexError):
            reader[0]

    def test_one_sample(self, format: Format, path: Path) -> None:
        (field,) = self.small
        samples = [{"__key__": "a", field: self.small_values[0]}]
        assert_reads(write_shard(format, path, self.small, samples), samples)

    def test_positions_out_of_range_raise(self, reader: ShardReader) -> None:
        for position in (-1, 10, 10**9):
            with pytest.raises(IndexError):
                reader[position]

    @pytest.mark.parametrize(
        "key", ["ключ/キー/🔑", "a" * 99, "a" * 300, "ü" * 80, " a b\\c", "x/y~2"]
    )
    def test_odd_keys_come_back(self, format: Format, path: Path, key: str) -> None:
        (field,) = self.small
        keys = [key, "plain"]
        samples = [{"__key__": k, field: v} for k, v in zip(keys, self.small_values, strict=True)]
        reader = write_shard(format, path, self.small, samples)
        assert [reader[0]["__key__"], reader[1]["__key__"]] == keys
        assert self.independent_keys(path) == keys

    def test_empty_values_come_back(self, format: Format, path: Path) -> None:
        schema = Schema({"text": Text(), "blob": Bytes(), "about": Json(), "points": Array("<i8")})
        empty = {"text": "", "blob": b"", "about": {}, "points": np.zeros((0, 3), "<i8")}
        samples = [{"__key__": key, **empty} for key in "abc"]
        assert_reads(write_shard(format, path, schema, samples), samples)

    @pytest.mark.parametrize(
        "format_of_image", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]
    )
    def test_an_image_comes_back_byte_for_byte(
        self, format: Format, path: Path, format_of_image: str
    ) -> None:
        samples = [
            {"__key__": "a", "image": make_image(1, format_of_image)},
            {"__key__": "b", "image": make_image(2)},
        ]
        reader = write_shard(format, path, Schema({"image": Image()}), samples)
        assert_reads(reader, samples)
        assert format.carried(Image(), samples[0]["image"]) == reader[0]["image"]

    def test_a_list_of_images_comes_back_or_is_refused(self, format: Format, path: Path) -> None:
        schema = Schema({"images": Images(), "more": Images(optional=True), "n": Int()})
        try:
            format.layout(schema)
        except FormatError as error:
            assert "images" in error.what + (error.found or "")  # noqa: PT017
            assert error.fix  # noqa: PT017
            return
        samples: list[Sample] = [
            {"__key__": "a", "images": [make_image(1), make_image(2, "PNG")], "more": [], "n": 1},
            {"__key__": "b", "images": [], "n": 2},
            {
                "__key__": "c",
                "images": [make_image(n) for n in range(40)],
                "more": [make_image(3)],
                "n": 3,
            },
        ]
        reader = write_shard(format, path, schema, samples)
        assert_reads(reader, [schema.check(sample) for sample in samples])
        other = format.create(path.with_name("other"), ShardSpec(schema))
        with pytest.raises(SampleError) as raised:
            other.write({"__key__": "x", "images": [make_image(1), b"no image"], "n": 1})
        other.close()
        assert raised.value.where["field"] == "images"

    def test_audio_and_video_come_back_byte_for_byte(self, format: Format, path: Path) -> None:
        schema = Schema({"audio": Audio(), "clip": Video(), "other": Audio(optional=True)})
        samples: list[Sample] = [
            {"__key__": "a", "audio": make_audio(1), "clip": make_video(1), "other": make_audio(2)},
            {"__key__": "b", "audio": make_audio(3, 16000), "clip": make_video(2)},
        ]
        reader = write_shard(format, path, schema, samples)
        assert dict(reader.schema) == dict(schema)
        assert_reads(reader, samples)
        writer = format.create(path.with_name("other"), ShardSpec(schema))
        harms = {"audio": make_audio(1)[:-1], "clip": make_video()[:99], "other": make_video()}
        for field, value in harms.items():
            with pytest.raises(SampleError) as raised:
                writer.write({**samples[0], field: value})
            assert raised.value.where == {"key": "a", "field": field}
        assert writer.write(samples[1])
        writer.close()

    def test_an_absent_value_of_any_type_is_absent(self, format: Format, path: Path) -> None:
        kinds = (Image, Int, Float, Bool, Text, Bytes, Json, Audio, Video)
        schema = Schema({f"f{n}": kind(optional=True) for n, kind in enumerate(kinds)})
        encoded = make_audio(), make_video()
        values = (make_image(3), -5, 0.5, True, "text", b"blob", [1, None], *encoded)
        whole = {f"f{n}": value for n, value in enumerate(values)}
        samples = [{"__key__": "all", **whole}]
        samples += [{"__key__": f"no{n}", **_without(whole, f"f{n}")} for n in range(len(kinds))]
        samples += [{"__key__": "one", "f1": 0}, {"__key__": "again", **whole}]
        assert_reads(write_shard(format, path, schema, samples), samples)

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (Array("<u2", (None,)), np.arange(5, dtype="<u2")),
            (Array("<u2", (None,)), np.zeros(0, "<u2")),
            (Array("<f4", (2, 3)), np.arange(6, dtype="<f4").reshape(2, 3)),
            (Array("<f8", (None, 2)), np.arange(4, dtype="<f8").reshape(2, 2)),
            (Array("<i8", ()), np.array(7, "<i8")),
            (Array("|b1", (2,)), np.array([True, False])),
            (Array(">i4", (2,)), np.array([1, -2], ">i4")),
            (Array("<f2", (3,)), np.array([1, 2, 3], "<f2")),
            (Array("<c8", (1,)), np.array([1 + 2j], "<c8")),
            (Array("<U3", (2,)), np.array(["a", "xyz"])),
            (Array(), np.arange(3, dtype="<i2")),
            (Array("|u1", (0, 2)), np.zeros((0, 2), "|u1")),
        ],
        ids=lambda value: str(value.size if isinstance(value, np.ndarray) else value),
    )
    def test_arrays_keep_dtype_and_shape(
        self, format: Format, path: Path, kind: Array, value: np.ndarray[Any, Any]
    ) -> None:
        samples = [{"__key__": key, "x": value} for key in "ab"]
        reader = write_shard(format, path, Schema({"x": kind}), samples)
        assert_reads(reader, samples)
        assert reader[0]["x"].flags.writeable

    def test_keys_are_those_of_the_samples(
        self, reader: ShardReader, samples: list[Sample]
    ) -> None:
        assert reader.keys() == _keys_of(samples)

    def test_joined_shards_read_like_one(self, format: Format, tmp_path: Path) -> None:
        if not isinstance(format, Joins):
            return
        parts, samples = [], [self.sample(n) for n in range(12)]
        for number, (start, stop) in enumerate([(0, 5), (5, 5), (5, 6), (6, 12)]):
            part = tmp_path / str(number) / self.file_name()
            part.parent.mkdir(parents=True)
            write_shard(format, part, self.schema, samples[start:stop]).close()
            parts.append(part)
        path = tmp_path / self.file_name()
        format.join(path, parts, ShardSpec(self.schema))
        assert_reads(format.open(path, format.layout(self.schema)), samples)
        assert self.independent_keys(path) == _keys_of(samples)

    def test_without_its_layout_a_shard_still_reads(self, format: Format, path: Path) -> None:
        schema = Schema({"jpg": Image(), "cls": Int(), "json": Json()})
        samples = [
            {"__key__": f"{n}", "jpg": make_image(n), "cls": n, "json": {"n": n}} for n in range(3)
        ]
        write_shard(format, path, schema, samples).close()
        reader = format.open(path, None)
        assert len(reader) == 3
        for number, sample in enumerate(samples):
            assert reader[number] == sample

    def test_a_value_of_many_megabytes(self, format: Format, path: Path) -> None:
        (field,) = self.large
        samples = [
            {"__key__": "a", field: self.large_value(20_000_003)},
            {"__key__": "b", field: self.large_value(5)},
        ]
        assert_reads(write_shard(format, path, self.large, samples), samples)

    def test_values_belong_to_the_caller(self, reader: ShardReader, samples: list[Sample]) -> None:
        for value in reader[5].values():
            if isinstance(value, np.ndarray):
                value.fill(0)
            elif isinstance(value, dict):
                value.clear()
        assert_same(reader[5], samples[5])
        kept = reader[6]
        reader.close()
        assert_same(kept, samples[6])

    def test_closing_twice_is_fine_and_reading_then_is_not(self, reader: ShardReader) -> None:
        reader.close()
        reader.close()
        with pytest.raises(ValueError, match="closed"):
            reader[0]

    def test_a_pickle_reads_the_same(self, reader: ShardReader, samples: list[Sample]) -> None:
        copy = pickle.loads(pickle.dumps(reader))
        assert_same(copy[7], samples[7])
        copy.close()

    def test_threads_read_the_same(self, reader: ShardReader, samples: list[Sample]) -> None:
        numbers = list(range(10)) * 40
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(reader.__getitem__, numbers))
        for number, sample in zip(numbers, found, strict=True):
            assert_same(sample, samples[number])

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # pytest itself has threads
    def test_another_process_reads_the_same(
        self, reader: ShardReader, method: str, samples: list[Sample]
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        answers = context.Queue()
        process = context.Process(target=_read_in_process, args=(reader, 3, answers))
        process.start()
        assert answers.get(timeout=60) == samples[3]["__key__"]
        process.join()
        assert process.exitcode == 0
        assert_same(reader[3], samples[3])

    def test_a_full_shard_refuses_a_sample_and_stays_as_it_was(
        self, format: Format, path: Path
    ) -> None:
        (field,) = self.large
        writer = format.create(path, ShardSpec(self.large, max_bytes=100_000))
        taken = 0
        while writer.write({"__key__": f"{taken:04d}", field: self.large_value(9000)}):
            taken += 1
        assert writer.write({"__key__": "small", field: self.large_value(0)})
        writer.close()
        assert 5 <= taken <= 11
        assert path.stat().st_size <= max(100_000, self.least_bytes)
        assert len(format.open(path, format.layout(self.large))) == taken + 1

    def test_an_empty_shard_takes_a_sample_of_any_size(self, format: Format, path: Path) -> None:
        (field,) = self.large
        writer = format.create(path, ShardSpec(self.large, max_bytes=5000))
        assert writer.write({"__key__": "big", field: self.large_value(50_000)})
        assert not writer.write({"__key__": "more", field: self.large_value(2)})
        writer.close()

    def test_the_same_calls_give_the_same_bytes(self, format: Format, tmp_path: Path) -> None:
        found = []
        for name in ("one", "two"):
            folder = tmp_path / name
            folder.mkdir()
            path = folder / self.file_name()
            write_shard(format, path, self.schema, [self.sample(n) for n in range(20)])
            found.append({p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()})
        assert found[0] == found[1]

    def test_an_image_that_is_none_is_refused_and_the_rest_goes_on(
        self, format: Format, path: Path
    ) -> None:
        schema = Schema({"image": Image()})
        writer = format.create(path, ShardSpec(schema))
        assert writer.write({"__key__": "a", "image": make_image(1)})
        with pytest.raises(SampleError, match="not an image") as error:
            writer.write({"__key__": "b", "image": b"hello, I am text"})
        assert error.value.where == {"key": "b", "field": "image"}
        assert writer.write({"__key__": "c", "image": make_image(2)})
        writer.close()
        reader = format.open(path, format.layout(schema))
        assert [reader[n]["__key__"] for n in range(len(reader))] == ["a", "c"]

    def test_json_text_is_stored_as_it_is(self, format: Format, path: Path) -> None:
        text = JsonText('{"b" :1.50,\n "a":[ ] }')
        reader = write_shard(
            format, path, Schema({"about": Json()}), [{"__key__": "a", "about": text}]
        )
        assert reader[0]["about"] == {"b": 1.5, "a": []}
        found = reader.sample(0, json_text=True)["about"]
        assert found == (text if isinstance(found, JsonText) else reader[0]["about"])

    def test_some_fields_can_be_read_alone(
        self, reader: ShardReader, samples: list[Sample]
    ) -> None:
        names = list(self.schema)
        for fields in (set(), {names[0]}, set(names[1::2]), set(names)):
            expected = {n: v for n, v in samples[3].items() if n in {"__key__", *fields}}
            assert_same(reader.sample(3, fields), expected)

    def test_values_of_a_field_are_those_of_the_samples(
        self, reader: ShardReader, samples: list[Sample]
    ) -> None:
        positions = [len(samples) - 1, 0, *range(len(samples))]
        for field in reader.schema:
            values = reader.read_values(field, np.array(positions))
            for position, value in zip(positions, values, strict=True):
                sample = {} if value is None else {field: value}
                assert_same(sample, {n: v for n, v in samples[position].items() if n == field})

    def test_sizes_are_those_of_the_values(
        self, reader: ShardReader, samples: list[Sample]
    ) -> None:
        for name, kind in self.schema.items():
            values = [sample[name] for sample in samples if name in sample]
            sizes = reader.sizes(name)
            if sizes is not None:
                assert len(sizes) == len(values)
                if isinstance(kind, Bytes):
                    assert sizes.tolist() == [len(value) for value in values]

    def test_spans_hold_the_values(self, reader: ShardReader, samples: list[Sample]) -> None:
        spans = reader.spans()
        if spans is None:
            return
        assert (spans.shape, spans.dtype) == ((len(samples), 2), np.dtype(np.int64))
        for position, (start, stop) in enumerate(spans.tolist()):
            assert 0 <= start <= stop <= reader.path.stat().st_size
            for name in samples[position].keys() & self.schema.keys():
                offset = reader.offset(position, name)
                assert offset is None or start <= offset <= stop

    def test_the_bound_holds(self, format: Format, path: Path) -> None:
        (field,) = self.large
        payload = np.arange(40) * 96
        samples = [
            {"__key__": f"{n:03d}", field: self.large_value(size)}
            for n, size in enumerate(payload.tolist())
        ]
        self._check_bound(format, path, self.large, samples, payload)

    def test_the_bound_holds_with_images(self, format: Format, path: Path) -> None:
        schema = Schema({"image": Image(), "blob": Bytes()})
        samples = [
            {"__key__": f"{n:03d}", "image": make_image(n), "blob": bytes(n * 97)}
            for n in range(40)
        ]
        payload = np.array([len(s["image"]) + len(s["blob"]) for s in samples])
        self._check_bound(format, path, schema, samples, payload)

    def _check_bound(
        self, format: Format, path: Path, schema: Schema, samples: list[Sample], payload: Any
    ) -> None:
        write_shard(format, path, schema, samples)
        least = max(4096, self.least_bytes)
        assert format.bound(payload, len(schema)).sum() + least >= path.stat().st_size

    def test_rows_are_the_arrays_of_the_samples(self, format: Format, path: Path) -> None:
        schema = Schema({"x": Array("<u2", (5,))})
        samples: list[Sample] = [
            {"__key__": f"{n}", "x": np.arange(n, n + 5, dtype="<u2") * 13_000} for n in range(40)
        ]
        write_shard(format, path, schema, samples).close()
        reader = format.open(path, format.layout(schema))
        if type(reader).read_rows is ShardReader.read_rows:
            return
        asked: list[list[int]] = [[], [7], [39, 0, 0, 13], list(range(40))[::-1]]
        for positions in asked:
            numbers, out = np.array(positions, np.int64), np.full((len(positions), 5), -1, np.int64)
            assert reader.read_rows("x", numbers, out)
            assert out.tolist() == [samples[n]["x"].tolist() for n in positions]
            assert reader.read_keys(numbers) == [f"{n}" for n in positions]
        out = np.full((2, 4), -1, np.int64)  # a different shape than the values
        assert not reader.read_rows("x", np.array([0, 1]), out)
        assert (out == -1).all()
        reader.close()
        with pytest.raises(ValueError, match="closed"):
            reader.read_rows("x", np.array([0]), np.zeros((1, 5), np.int64))
        with pytest.raises(ValueError, match="closed"):
            reader.read_keys(np.array([0]))

    def test_a_file_that_is_harmed_while_it_is_open_gives_samples_or_errors(
        self, format: Format, tmp_path: Path
    ) -> None:
        """Runs in another process, as it may crash: then the next answer is missing."""
        (field,) = self.large
        samples = [{"__key__": f"{n:02d}", field: self.large_value(19_998)} for n in range(40)]
        paths: dict[str, Path] = {}
        for harm in HARMS:
            (tmp_path / harm).mkdir()
            paths[harm] = tmp_path / harm / self.file_name()
            layout = write_shard(format, paths[harm], self.large, samples).layout
        context: Any = multiprocessing.get_context("spawn")
        answers = context.Queue()
        process = context.Process(target=_read_harmed, args=(self.tested, paths, layout, answers))
        process.start()
        for harm, path in paths.items():
            found = answers.get(timeout=60)
            whole = 0
            for position, (sample, expected) in enumerate(zip(found, samples, strict=True)):
                if "__key__" in sample:
                    assert_same(sample, expected)
                    whole += 1
                else:
                    assert sample["position"] == position
                    assert sample["offset"] >= 0
                    assert path.stem in str(sample["path"])
            assert whole == 40 if harm in ("removed", "replaced") else whole >= 1
        process.join()
        assert process.exitcode == 0

    def test_a_shard_is_closed_when_nobody_refers_to_it(
        self, format: Format, path: Path, samples: list[Sample]
    ) -> None:
        layout = write_shard(format, path, self.schema, samples).layout
        gc.collect()
        gc.disable()  # a shard must be closed at once, not by the garbage collector
        try:
            reader = format.open(path, layout)
            kept = reader[3]
            maps = Path("/proc/self/maps")
            if maps.exists():
                assert str(path.parent) not in maps.read_text()
            assert open_files(path.parent)
            reader.close()
            assert not open_files(path.parent)
            reader = format.open(path, layout)
            assert_same(reader[3], kept)
            del reader
            assert not open_files(path.parent)
        finally:
            gc.enable()

    @_GENERATED
    @given(data=st.data())
    def test_any_samples_come_back_equal(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        some = st.lists(self.any_sample(), max_size=4, unique_by=lambda s: s["__key__"])
        samples = data.draw(some)
        path = tmp_path_factory.mktemp("any") / self.file_name()
        assert_reads(write_shard(self.tested, path, self.schema, samples), samples)


def _keys_of(samples: list[Sample]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def _without(sample: Sample, name: str) -> Sample:
    return {field: value for field, value in sample.items() if field != name}


def write_shard(format: Format, path: Path, schema: Schema, samples: list[Sample]) -> ShardReader:
    """A shard of these samples at `path`, of a schema and a format, opened."""
    writer = format.create(path, ShardSpec(schema))
    for sample in samples:
        assert writer.write(schema.check(sample))
    writer.close()
    return format.open(path, format.layout(schema))
