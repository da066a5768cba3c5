"""The contract of formats, as tests: `shardkit.testing` has its public names."""

from __future__ import annotations

import contextlib
import gc
import math
import pickle
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import FormatError, SampleError
from shardkit.formats import FORMATS, file_name
from shardkit.formats.base import Format, Joins, ShardReader, ShardSpec
from shardkit.formats.testing_samples import (
    EVERYTHING,
    HARMS,
    assert_reads,
    assert_same,
    compare_at_once,
    everything,
    in_another_process,
    in_fork,
    make_audio,
    make_image,
    make_video,
    open_files,
    read_at_once,
    read_harmed,
    write_shard,
)
from shardkit.sample import JsonText, Sample
from shardkit.schema import (
    Array,
    Audio,
    Bool,
    Bytes,
    FieldType,
    Float,
    Image,
    Images,
    Int,
    Json,
    Schema,
    Text,
    Video,
)

__all__ = [
    "ARRAYS", "EVERYTHING", "OPTIONAL", "FormatContract", "any_keys", "any_samples",
    "assert_reads", "assert_same", "everything", "make_audio", "make_image", "make_video",
    "open_files", "write_shard",
]  # fmt: skip

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
    """Return a sample of the schema EVERYTHING, of any values; images in one of these formats."""
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


# Types of arrays, and a value of each.
ARRAYS: list[tuple[Array, np.ndarray[Any, Any]]] = [
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
]

# The methods that a format, or its reader, need not have.
OPTIONAL = frozenset({"join", "plan", "sizes", "spans"})

# Health checks are off, as fixtures and subclasses are shared on purpose.
_GENERATED = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


class FormatContract:
    """Tests for every format. List tests that a format cannot pass in `gaps`; do not override them.

    A format that supports few field types overrides the class variables and the first methods here,
    which make the samples for tests that are not about a specific type.
    """

    tested: ClassVar[Format]
    # Which of OPTIONAL the format has. If it loses one of these, or has another, a test fails.
    provides: ClassVar[frozenset[str]] = frozenset()
    # The suffix of a shard's file, such as ".lines", for a format that is not installed.
    suffix: ClassVar[str] = ""
    # The schema of `sample` and `any_sample`: as many types as the format supports.
    schema: ClassVar[Schema] = EVERYTHING
    # One field, and two values of it.
    small: ClassVar[Schema] = Schema({"label": Int()})
    small_values: ClassVar[tuple[Any, Any]] = (1, 2)
    # One field, for the values of `large_value`.
    large: ClassVar[Schema] = Schema({"blob": Bytes()})
    # The types of arrays that the format can hold; the others of ARRAYS must be refused.
    arrays: ClassVar[Sequence[Array]] = [kind for kind, _ in ARRAYS]
    # Name of a test -> why this format cannot pass it. If it passes, that is a failure.
    gaps: ClassVar[dict[str, str]] = {}
    # The minimum size of a shard in bytes, if the format has large pages.
    least_bytes: ClassVar[int] = 0

    @pytest.fixture(autouse=True)
    def _declared_gap(self, request: pytest.FixtureRequest) -> None:
        reason = self.gaps.get(request.node.name)
        if reason is not None:
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def sample(self, number: int) -> Sample:
        """Return a sample of `schema`, different for each number. The key contains the number."""
        return everything(number)

    def any_sample(self) -> st.SearchStrategy[Sample]:
        """Return samples of `schema` with arbitrary values."""
        return any_samples()

    def large_value(self, size: int) -> Any:
        """Return an incompressible value of this size in bytes."""
        return np.random.default_rng(size).bytes(size)

    def independent_keys(self, path: Path) -> list[str]:
        """Return the keys of a shard, in order, read with another library."""
        pytest.fail(f"{type(self).__name__} has no method `independent_keys(path)`")

    @classmethod
    def file_name(cls) -> str:
        """Return the name of a shard's file."""
        stem = "shard-000000"
        if not (cls.suffix or cls.tested.name in FORMATS):
            pytest.fail(f"{cls.__name__} has no `suffix`, and its format is not installed")
        return stem + cls.suffix if cls.suffix else file_name(stem, cls.tested.name)

    @classmethod
    def place(cls, folder: Path) -> Path:
        """Return the path of a shard in a new `folder`."""
        folder.mkdir()
        return folder / cls.file_name()

    def _has(self, method: str, found: bool) -> bool:
        """Return whether to test an optional method, which was `found` to be there or not."""
        assert found == (method in self.provides), f"{method}: in `provides`, or in the format?"
        return found

    def written(self, path: Path, schema: Schema, samples: Sequence[Sample]) -> ShardReader:
        """Return a shard of these samples at `path`, opened."""
        return write_shard(self.tested, path, schema, samples)

    def opened(self, path: Path, schema: Schema) -> ShardReader:
        return self.tested.open(path, self.tested.layout(schema))

    def keyed(self, *keys: str) -> list[Sample]:
        """Return samples of the schema `small` with these keys."""
        (field,) = self.small
        return [{"__key__": k, field: v} for k, v in zip(keys, cycle(self.small_values))]

    def sized(self, **sizes: int) -> list[Sample]:
        """Return samples of the schema `large`, by key, with values of these sizes in bytes."""
        (field,) = self.large
        return [{"__key__": key, field: self.large_value(size)} for key, size in sizes.items()]

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / self.file_name()

    @pytest.fixture
    def samples(self) -> list[Sample]:
        """Ten samples with every type of field."""
        return [self.sample(n) for n in range(10)]

    @pytest.fixture
    def reader(self, path: Path, samples: list[Sample]) -> Iterator[ShardReader]:
        """Yield a reader of those samples."""
        reader = self.written(path, self.schema, samples)
        yield reader
        reader.close()

    # --- values ----------------------------------------------------------------------------------

    def test_every_type_comes_back_equal(
        self, reader: ShardReader, path: Path, samples: list[Sample]
    ) -> None:
        """The keys also with another library."""
        assert dict(reader.schema) == dict(self.schema)
        assert_reads(reader, samples)
        for position in (-1, 10, 10**9):
            with pytest.raises(IndexError):
                reader[position]
        keys = [sample["__key__"] for sample in samples]
        assert reader.keys() == self.independent_keys(path) == keys

    def test_a_shard_of_no_samples_or_one(self, tmp_path: Path) -> None:
        for samples in ([], self.keyed("a")):
            path = self.place(tmp_path / f"{len(samples)}")
            reader = self.written(path, self.small, samples)
            assert_reads(reader, samples)
            with pytest.raises(IndexError):
                reader[len(samples)]

    def test_odd_keys_come_back(self, path: Path) -> None:
        keys = ["ключ/キー/🔑", "a" * 99, "a" * 300, "ü" * 80, " a b\\c", "x/y~2", "plain"]
        assert self.written(path, self.small, self.keyed(*keys)).keys() == keys
        assert self.independent_keys(path) == keys

    def test_a_key_that_is_not_unicode_comes_back_or_is_refused(self, path: Path) -> None:
        """Such as the names of files that are not UTF-8 give; the shard goes on without it."""
        stored = []
        writer = self.tested.create(path, ShardSpec(self.small))
        for sample in self.keyed("a", "b\udcff", "\ud800/c", "d"):
            key = sample["__key__"]
            try:
                assert writer.write(sample)
                stored.append(key)
            except SampleError as error:
                assert error.where.get("key") == ascii(key)  # noqa: PT017
        writer.close()
        assert self.opened(path, self.small).keys() == stored
        assert {"a", "d"} <= {*stored}

    def test_empty_values_come_back(self, path: Path) -> None:
        schema = Schema({"text": Text(), "blob": Bytes(), "about": Json(), "points": Array("<i8")})
        empty = {"text": "", "blob": b"", "about": {}, "points": np.zeros((0, 3), "<i8")}
        samples = [{"__key__": key, **empty} for key in "abc"]
        assert_reads(self.written(path, schema, samples), samples)

    def test_floats_that_are_no_numbers_come_back(self, path: Path) -> None:
        values = [math.nan, math.inf, -math.inf, -0.0, 5e-324]
        samples = [{"__key__": f"{n}", "score": value} for n, value in enumerate(values)]
        reader = self.written(path, Schema({"score": Float()}), samples)
        assert_reads(reader, samples)
        found = read_at_once(reader, range(5), ["score"]) or samples
        assert [repr(sample["score"]) for sample in found] == [*map(repr, values)]

    def test_images_come_back_byte_for_byte_or_as_the_format_says(self, path: Path) -> None:
        kinds = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]
        samples = [{"__key__": kind, "image": make_image(1, kind)} for kind in kinds]
        reader = self.written(path, Schema({"image": Image()}), samples)
        carried = [{**s, "image": self.tested.carried(Image(), s["image"])} for s in samples]
        assert_reads(reader, carried)
        kept = [one["__key__"] for one, other in zip(samples, carried, strict=True) if one == other]
        assert kept == (["JPEG", "PPM"] if self.tested.encodes_images else kinds)

    def test_a_list_of_images_comes_back_or_is_refused(self, path: Path) -> None:
        schema = Schema({"images": Images(), "more": Images(optional=True), "n": Int()})
        try:
            self.tested.layout(schema)
        except FormatError as error:
            assert "images" in error.what + (error.found or "")  # noqa: PT017
            assert error.fix  # noqa: PT017
            return
        many, few = [make_image(n) for n in range(40)], [make_image(1), make_image(2, "PNG")]
        samples: list[Sample] = [
            {"__key__": "a", "images": few, "more": [], "n": 1},
            {"__key__": "b", "images": [], "n": 2},
            {"__key__": "c", "images": many, "more": few[:1], "n": 3},
        ]
        reader = self.written(path, schema, samples)
        assert_reads(reader, [schema.check(sample) for sample in samples])
        other = self.tested.create(path.with_name("other"), ShardSpec(schema))
        with pytest.raises(SampleError) as raised:
            other.write({"__key__": "x", "images": [make_image(1), b"no image"], "n": 1})
        other.close()
        assert raised.value.where["field"] == "images"

    def test_audio_and_video_come_back_byte_for_byte(self, path: Path) -> None:
        schema = Schema({"audio": Audio(), "clip": Video(), "other": Audio(optional=True)})
        samples: list[Sample] = [
            {"__key__": "a", "audio": make_audio(1), "clip": make_video(1), "other": make_audio(2)},
            {"__key__": "b", "audio": make_audio(3, 16000), "clip": make_video(2)},
        ]
        reader = self.written(path, schema, samples)
        assert dict(reader.schema) == dict(schema)
        assert_reads(reader, samples)
        writer = self.tested.create(path.with_name("other"), ShardSpec(schema))
        harms = {"audio": make_audio(1)[:-1], "clip": make_video()[:99], "other": make_image()}
        for field, value in harms.items():
            with pytest.raises(SampleError) as raised:
                writer.write({**samples[0], field: value})
            assert raised.value.where == {"key": "a", "field": field}
        assert writer.write(samples[1])
        writer.close()

    def test_an_absent_value_of_any_type_is_absent(self, path: Path) -> None:
        kinds = (Image, Int, Float, Bool, Text, Bytes, Json, Audio, Video)
        schema = Schema({f"f{n}": kind(optional=True) for n, kind in enumerate(kinds)})
        encoded = make_audio(), make_video()
        values = (make_image(3), -5, 0.5, True, "text", b"blob", [1, None], *encoded)
        whole = {f"f{n}": value for n, value in enumerate(values)}
        samples = [{"__key__": "all", **whole}]
        samples += [
            {"__key__": f"no {name}", **{n: v for n, v in whole.items() if n != name}}
            for name in whole
        ]
        samples += [{"__key__": "one", "f1": 0}, {"__key__": "again", **whole}]
        assert_reads(self.written(path, schema, samples), samples)

    def test_arrays_keep_dtype_and_shape(self, tmp_path: Path) -> None:
        for number, (kind, value) in enumerate(ARRAYS):
            print(kind)  # which pytest shows if it fails
            schema = Schema({"x": kind})
            if kind not in self.arrays:
                with pytest.raises(FormatError):
                    self.tested.layout(schema)
                continue
            samples = [{"__key__": key, "x": value} for key in "ab"]
            reader = self.written(self.place(tmp_path / f"{number}"), schema, samples)
            assert_reads(reader, samples)
            assert reader[0]["x"].flags.writeable

    def test_a_value_of_many_megabytes(self, path: Path) -> None:
        samples = self.sized(a=9_000_003, b=5)
        assert_reads(self.written(path, self.large, samples), samples)

    def test_json_text_is_stored_as_it_is(self, path: Path) -> None:
        text = JsonText('{"b" :1.50,\n "a":[ ] }')
        reader = self.written(path, Schema({"about": Json()}), [{"__key__": "a", "about": text}])
        assert reader[0]["about"] == {"b": 1.5, "a": []}
        found = reader.sample(0, json_text=True)["about"]
        assert found == (text if isinstance(found, JsonText) else reader[0]["about"])

    @_GENERATED
    @given(data=st.data())
    def test_any_samples_come_back_equal(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        some = st.lists(self.any_sample(), max_size=4, unique_by=lambda s: s["__key__"])
        samples = data.draw(some)
        path = tmp_path_factory.mktemp("any") / self.file_name()
        assert_reads(write_shard(self.tested, path, self.schema, samples), samples)

    # --- writing ---------------------------------------------------------------------------------

    def test_joined_shards_read_like_one(self, tmp_path: Path) -> None:
        if not self._has("join", isinstance(self.tested, Joins)):
            return
        parts, samples = [], [self.sample(n) for n in range(12)]
        for number, (start, stop) in enumerate([(0, 5), (5, 5), (5, 6), (6, 12)]):
            parts.append(self.place(tmp_path / f"{number}"))
            self.written(parts[-1], self.schema, samples[start:stop]).close()
        path = tmp_path / self.file_name()
        assert isinstance(self.tested, Joins)
        self.tested.join(path, parts, ShardSpec(self.schema))
        assert_reads(self.opened(path, self.schema), samples)
        assert self.independent_keys(path) == [sample["__key__"] for sample in samples]

    def test_a_full_shard_refuses_a_sample_and_stays_as_it_was(self, path: Path) -> None:
        writer = self.tested.create(path, ShardSpec(self.large, max_bytes=100_000))
        many = self.sized(**{f"{n:04d}": 9000 for n in range(12)})
        taken = sum(1 for _ in takewhile(writer.write, many))
        assert all(map(writer.write, self.sized(small=0)))
        writer.close()
        assert 5 <= taken <= 11
        assert path.stat().st_size <= max(100_000, self.least_bytes)
        assert len(self.opened(path, self.large)) == taken + 1

    def test_an_empty_shard_takes_a_sample_of_any_size(self, path: Path) -> None:
        writer = self.tested.create(path, ShardSpec(self.large, max_bytes=5000))
        assert [writer.write(s) for s in self.sized(big=50_000, more=2)] == [True, False]
        writer.close()

    def test_the_same_calls_give_the_same_bytes(self, tmp_path: Path) -> None:
        found = []
        for name in ("one", "two"):
            path = self.place(tmp_path / name)
            self.written(path, self.schema, [self.sample(n) for n in range(20)])
            files = (tmp_path / name).rglob("*")
            found.append({file.name: file.read_bytes() for file in files if file.is_file()})
        assert found[0] == found[1]

    def test_an_image_that_is_none_is_refused_and_the_rest_goes_on(self, path: Path) -> None:
        schema = Schema({"image": Image()})
        writer = self.tested.create(path, ShardSpec(schema))
        assert writer.write({"__key__": "a", "image": make_image(1)})
        with pytest.raises(SampleError, match="not an image") as error:
            writer.write({"__key__": "b", "image": b"hello, I am text"})
        assert error.value.where == {"key": "b", "field": "image"}
        assert writer.write({"__key__": "c", "image": make_image(2)})
        writer.close()
        assert self.opened(path, schema).keys() == ["a", "c"]

    def test_the_bound_holds(self, tmp_path: Path) -> None:
        sizes = {f"{n:03d}": n * 96 for n in range(40)}
        cases = [(self.large, self.sized(**sizes), [*sizes.values()])]
        if Image() in self.schema.values():
            pairs = {key: (make_image(n), bytes(n * 97)) for n, key in enumerate(sizes)}
            images = [{"__key__": key, "image": i, "blob": b} for key, (i, b) in pairs.items()]
            schema = Schema({"image": Image(), "blob": Bytes()})
            cases.append((schema, images, [len(i) + len(b) for i, b in pairs.values()]))
        for number, (schema, samples, payload) in enumerate(cases):
            path = self.place(tmp_path / f"{number}")
            self.written(path, schema, samples)
            bound = self.tested.bound(np.array(payload), len(schema)).sum()
            assert bound + max(4096, self.least_bytes) >= path.stat().st_size

    # --- reading ---------------------------------------------------------------------------------

    def test_without_its_layout_a_shard_still_reads(self, path: Path) -> None:
        schema = Schema({"jpg": Image(), "cls": Int(), "json": Json()})
        samples = [
            {"__key__": f"{n}", "jpg": make_image(n), "cls": n, "json": {"n": n}} for n in range(3)
        ]
        self.written(path, schema, samples).close()
        reader = self.tested.open(path, None)
        assert [reader[n] for n in range(len(reader))] == samples

    def test_some_fields_can_be_read_alone(
        self, reader: ShardReader, samples: list[Sample]
    ) -> None:
        names = list(self.schema)
        for fields in (set(), {names[0]}, set(names[1::2]), set(names)):
            expected = {n: v for n, v in samples[3].items() if n in {"__key__", *fields}}
            assert_same(reader.sample(3, fields), expected)

    def test_sizes_are_those_of_the_values(
        self, reader: ShardReader, samples: list[Sample]
    ) -> None:
        for name, kind in self.schema.items():
            values = [sample[name] for sample in samples if name in sample]
            sizes = reader.sizes(name)
            if self._has("sizes", sizes is not None):
                assert sizes is not None
                assert len(sizes) == len(values)
                if isinstance(kind, Bytes):
                    assert sizes.tolist() == [len(value) for value in values]

    def test_spans_hold_the_values(self, reader: ShardReader, samples: list[Sample]) -> None:
        spans = reader.spans()
        if not self._has("spans", spans is not None):
            return
        assert spans is not None
        assert (spans.shape, spans.dtype) == ((len(samples), 2), np.dtype(np.int64))
        for position, (start, stop) in enumerate(spans.tolist()):
            assert 0 <= start <= stop <= reader.path.stat().st_size
            for name in samples[position].keys() & self.schema.keys():
                offset = reader.offset(position, name)
                assert offset is None or start <= offset <= stop

    def test_samples_read_at_once_are_those_read_alone(self, tmp_path: Path) -> None:
        planned = False
        for number, (schema, samples) in enumerate(self._for_plans()):
            print(schema)  # which pytest shows if it fails
            reader = self.written(self.place(tmp_path / f"{number}"), schema, samples)
            names = list(schema)
            for fields in ([], names[:1], names[1::2], names):
                for positions in ([3], [4, 0, 0, 3, 2], [*range(len(samples))]):
                    try:
                        found = read_at_once(reader, positions, fields)
                    except ValueError:  # null would be taken for a value that is absent
                        assert any("a" in s and s["a"] is None for s in samples)
                        continue
                    planned |= found is not None
                    for sample, position in zip(found or [], positions, strict=found is not None):
                        assert_same(sample, reader.read(position, fields))
        self._has("plan", planned)

    def test_a_damaged_shard_gives_at_once_what_it_gives_alone(
        self, tmp_path: Path, samples: list[Sample]
    ) -> None:
        """Nothing at all is given if one of the samples cannot be read."""
        if "plan" not in self.provides:
            return
        path, numbers = self.place(tmp_path / "whole"), np.random.default_rng(1)
        layout = self.written(path, self.schema, samples).layout
        files = [file for file in path.parent.rglob("*") if file.is_file()]
        for damage in range(80):
            print("damage", damage)  # which pytest shows if it fails
            file = files[damage % len(files)]
            data = bytearray(content := file.read_bytes())
            for at in numbers.integers(0, len(data), 1 << damage % 6).tolist():
                data[at] = numbers.integers(256)
            file.write_bytes(data)
            reader: ShardReader | None = None
            with contextlib.suppress(Exception):  # as any may be raised for a damaged shard
                reader = self.tested.open(path, layout)
            if reader is not None:
                compare_at_once(reader)
            file.write_bytes(content)

    def _for_plans(self) -> Iterator[tuple[Schema, list[Sample]]]:
        """Yield schemas that the format can store, and samples of each."""
        yield self.schema, [self.sample(n) for n in range(10)]
        cases: list[tuple[FieldType, list[Any]]] = [
            (Image(), [make_image(n) for n in range(6)]),
            (Int(), [-(2**63), -1, 0, 1, 300, 2**63 - 1]),
            (Float(), [-0.0, 0.1, 0.5, 1e300, -math.inf, 3.0]),
            (Bool(), [True, False, False, True, True, False]),
            (Text(), ["", "a", "b", "ü", "c" * 40, "漢" * 200]),
            (Bytes(), [b"", b"a", b"b", b"c" * 40, b"d" * 300, b"\xff"]),
            (Json(), [None, 1, [2.5], {}, {"a": "ü" * 40}, "x"]),
            (Images(), [[make_image(n)] * (1 + n % 3) for n in range(6)]),
            (Audio(), [make_audio(n) for n in range(6)]),
            (Video(), [make_video(n) for n in range(6)]),
        ]
        # The first is the same in both orders of its values.
        by_columns = [np.array([[1, 2], [2 + n, 1]], "<i8", order="F") for n in range(6)]
        cases.append((Array("<i8", (2, 2)), by_columns))
        arrays = [(kind, value) for kind, value in ARRAYS if kind in self.arrays]
        # The first is the same in both byte orders.
        cases += [(k, [np.zeros_like(v), v, np.array(np.flip(v))] * 2) for k, v in arrays]
        for kind, values in cases:
            every: list[Sample] = [{"__key__": "k" * n, "a": v} for n, v in enumerate(values, 1)]
            some = [s | {"n": n} for n, s in enumerate(every)]
            del some[2]["a"], some[5]["a"]
            for schema, samples in (
                (Schema({"a": kind}), every),
                (Schema({"a": replace(kind, optional=True), "n": Int()}), some),
            ):
                with contextlib.suppress(FormatError):
                    self.tested.layout(schema)
                    yield schema, samples

    def test_values_belong_to_the_caller(self, reader: ShardReader, samples: list[Sample]) -> None:
        for value in reader[5].values():
            if isinstance(value, np.ndarray):
                value.fill(0)
            elif isinstance(value, dict):
                value.clear()
        assert_same(reader[5], samples[5])
        kept = reader[6]
        reader.close()
        reader.close()
        assert_same(kept, samples[6])
        with pytest.raises(ValueError, match="closed"):
            reader[0]

    def test_threads_read_the_same(self, reader: ShardReader, samples: list[Sample]) -> None:
        numbers = list(range(10)) * 40
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(reader.__getitem__, numbers))
        for number, sample in zip(numbers, found, strict=True):
            assert_same(sample, samples[number])

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # pytest itself has threads
    def test_copies_and_other_processes_read_the_same(
        self, reader: ShardReader, samples: list[Sample]
    ) -> None:
        copy = pickle.loads(pickle.dumps(reader))
        assert_same(copy[7], samples[7])
        copy.close()
        assert_same(in_fork(reader.__getitem__, 3), samples[3])
        assert_same(in_another_process(reader, 4), samples[4])
        assert_same(reader[3], samples[3])

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_file_that_is_harmed_while_it_is_open_gives_samples_or_errors(
        self, tmp_path: Path
    ) -> None:
        samples = self.sized(**{f"{n:02d}": 19_998 for n in range(40)})
        path = self.place(tmp_path / "whole")
        layout = self.written(path, self.large, samples).layout
        readers = {}
        for harm in HARMS:
            shutil.copytree(tmp_path / "whole", tmp_path / harm)
            readers[harm] = self.tested.open(tmp_path / harm / self.file_name(), layout)
        for harm, found in in_fork(read_harmed, readers).items():
            for position, (sample, expected) in enumerate(zip(found, samples, strict=True)):
                if "__key__" in sample:
                    # Without checksums, a value may be another; but never that of another sample.
                    own = {"__key__": sample["__key__"]} if harm == "changed" else sample
                    assert_same(own, {name: expected[name] for name in own})
                    continue
                assert sample["position"] == position
                assert sample["offset"] >= 0
                assert path.stem in str(sample["path"])
            whole = sum("__key__" in sample for sample in found)
            assert whole == 40 if harm in ("removed", "replaced") else whole >= 1

    def test_a_shard_is_closed_when_nobody_refers_to_it(
        self, path: Path, samples: list[Sample]
    ) -> None:
        gc.disable()  # a shard must be closed at once, not by the garbage collector
        try:
            layout = self.written(path, self.schema, samples).layout
            assert not open_files(path.parent)
            reader = self.tested.open(path, layout)
            kept = reader[3]
            maps = Path("/proc/self/maps")
            if maps.exists():
                assert str(path.parent) not in maps.read_text()
            assert open_files(path.parent)
            reader.close()
            assert not open_files(path.parent)
            reader = self.tested.open(path, layout)
            assert_same(reader[3], kept)
            del reader
            assert not open_files(path.parent)
        finally:
            gc.enable()
