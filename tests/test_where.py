"""Conditions on samples: what they mean, and what each mistake is told."""

import contextlib
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.dataset.conditions import Head, condition
from shardkit.errors import SampleError, UsageError
from shardkit.sample import JsonText
from shardkit.schema import Array, Audio, Bool, Bytes, Float, Image, Int, Json, Schema, Text, Video
from shardkit.testing import make_audio, make_image, make_video

SCHEMA = Schema(
    {
        "image": Image(),
        "label": Int(),
        "json": Json(),
        "text": Text(),
        "score": Float(optional=True),
        "good": Bool(),
        "first name": Text(),
        "mask.png": Image(optional=True),
        "tags": Array(),
        "npy": Array(),
        "raw": Bytes(),
    }
)
NAMES = {"label": ("cat", "dog", "toad"), "tags": ("red", "green", "blue")}
SAMPLE = {
    "__key__": "dog/01",
    "image": make_image(size=(40, 30)),
    "label": 1,
    "json": JsonText('{"score": 0.7, "parts": [{"name": "ear"}], "ok": true, "none": null}'),
    "text": "hällo",
    "good": True,
    "first name": "Bob",
    "tags": np.array([0, 2]),
    "npy": np.zeros((3, 2), np.float32),
    "raw": b"1234567",
}


def test_what_headers_of_images_audio_and_video_say():
    schema = Schema({"audio": Audio(), "clip": Video(), "label": Int()})
    media = {"audio": make_audio(samples=16000), "clip": make_video(size=(64, 48), frames=50)}
    sample = {"__key__": "a", **media, "label": 1}
    for text in (
        "duration == 2 and sampling_rate == 8000",
        "audio.channels == 1 and audio.format == 'wav'",
        "clip.duration == 2 and width == 64 and clip.height < 50 and frames == 50",
        "clip.channels is null",
        "size > 16000",
    ):
        assert condition(text, schema)(sample), text
    with pytest.raises(UsageError, match="'audio' has no 'width'"):
        condition("audio.width > 3", schema)
    with pytest.raises(SampleError, match="the file is truncated"):
        condition("duration > 1", schema)({**sample, "audio": make_audio()[:-1]})
    whole = make_image(size=(40, 30))
    head = Head(whole[:700])  # which is enough
    head.size = len(whole)
    holds = condition(f"width == 40 and size == {len(whole)}", Schema({"image": Image()}))
    assert holds({"__key__": "k", "image": head}) is True
    with pytest.raises(SampleError, match="not an image"):
        holds({"__key__": "k", "image": b"x"})
    # Fields go before what follows from images.
    schema = Schema({"image": Image(), "width": Int(), "key": Int(), "a.b": Int()})
    sample = {"__key__": "k", "image": b"no image", "width": 7, "key": 8, "a.b": 9}
    assert condition("width == 7 and key == 8 and a.b == 9 and __key__ == 'k'", schema)(sample)
    found = condition("label == 1 and width > 3 and json.a == 'x' and key != 'y'", SCHEMA, NAMES)
    assert [part.fields for part in found.conjuncts] == [("label",), ("image",), ("json",), ()]
    assert found.fields == ("label", "image", "json")
    assert condition("label == 1 or width > 3", SCHEMA).conjuncts == ()


def holds(text: str, sample: dict[str, Any] = SAMPLE) -> bool | None:
    return condition(text, SCHEMA, NAMES)(sample)


def test_what_holds():
    for text in (
        "label == 1",
        "label == 'dog'",
        'label != "cat"',
        "label in ['cat', 'dog']",
        "label not in ('cat', 2)",
        "-1 < label <= 1.0",
        "width == 40 and height == 30",
        "image.format in ('jpeg', 'png')",
        "size > 100",
        "length == 5 and text.length == 5",
        "npy.length == 3",
        "'ll' in text",
        "key == 'dog/01' and __key__ == key",
        "'dog/' in key",
        "2 in tags and 'blue' in tags and 'green' not in tags",
        "json.score > 0.5",
        "json.parts[0].name == 'ear'",
        "json['parts'][0]['name'] == 'ear'",
        "'ear' in json.parts[0].name",
        "good and not (label == 2 or good == false)",
        "score is null and json.none is null and json.parts is not null",
        "image is not null and mask.png is null",
        "`first name` == 'Bob'",
        "text == 'h\\u00e4llo'",
        "  label\n == 1  ",
    ):
        assert holds(text) is True, text
        assert holds(f"not ({text})") is False


def test_absent_values_are_neither_equal_nor_unequal():
    for text in (
        "score > 0.5",
        "mask.png.width > 3",
        "json.nothing == 3",
        "json.score == '0.7'",  # JSON says only when it is read of which type it is
        "3 in json.score",
        "json.parts[7].name == 'ear'",
        "json.none < 3",
    ):
        assert holds(text) is None
        assert holds(f"not ({text})") is None
        assert holds(f"good and ({text})") is None
        assert holds(f"good or ({text})") is True
        assert holds(f"not good and ({text})") is False


def test_precedence_is_that_of_python_for_all_truth_values():
    schema = Schema({name: Bool() for name in "abc"})
    signs, joins = ("", "not "), ("and", "or")
    every = itertools.product(signs, joins, signs, joins)
    words = [f"{one}a {join} {other}b {more} c" for one, join, other, more in every]
    for text in words:
        for values in itertools.product([True, False], repeat=3):
            sample = dict(zip("abc", values, strict=True))
            assert condition(text, schema)({"__key__": "", **sample}) is bool(eval(text, sample))


NUMBERS = st.one_of(st.integers(-5, 5), st.floats(-5, 5))


@given(NUMBERS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), NUMBERS)
def test_numbers_compare_as_in_python(a, symbol, b):
    schema = Schema({"a": Float()})
    assert condition(f"a {symbol} {b!r}", schema)({"__key__": "", "a": a}) is eval(
        f"{a!r}{symbol}{b!r}"
    )


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_in_quotes_is_itself(value):
    quoted = "'" + value.encode("unicode_escape").decode().replace("'", "\\'") + "'"
    assert condition(f"t == {quoted}", Schema({"t": Text()}))({"__key__": "", "t": value}) is True


@given(st.text(alphabet="ab.'\"`()[]=<>!&|,0123456789 \n\\xé", max_size=40))
def test_any_text_is_a_condition_or_refused(text):
    schema = Schema({"a": Int(), "b": Text()})
    with contextlib.suppress(UsageError):  # whatever else is raised fails the test
        condition(text, schema)({"__key__": "k", "a": 1, "b": "x"})


@pytest.mark.parametrize(
    ("text", "what", "expected", "column"),
    [
        ("widht > 3", "no field 'widht'", "width", 1),
        ("good and labl == 3", "no field 'labl'", "label", 10),
        ("image.depth > 3", "no 'depth'", "image.width, image.height", 1),
        ("label.width > 3", "no 'width'", "label alone", 1),
        ("label == 'dgo'", "no class 'dgo'", "dog", 10),
        ("label in ('cat', 'tod')", "no class 'tod'", "toad", 18),
        ("'pink' in tags", "no class 'pink'", "red, green, blue", 1),
        ("label < 'dog'", "no order", None, 9),
        ("width == 'a'", "width is a number, and 'a' is text", None, 10),
        ("good == 1", "true or false", None, 9),
        ("3 in text", "cannot be compared", None, 1),
        ("image == 3", "use image.width or image.height", None, 1),
        ("npy == 3", "use npy.length", None, 1),
        ("label = 3", "expected ==", None, 7),
        ("good && label == 3", "expected and", None, 7),
        ("label <> 3", "expected !=", None, 7),
        ("label ==", "such as: width >= 256", None, 9),
        ("label in (1, 2", "never closed", None, 10),
        ("label in 3", "expected a list in parentheses", None, 10),
        ("label in ()", "expected values", None, 10),
        ("text", "expected a comparison", None, 1),
        ("label == null", "`is null`", None, 10),
        ("label is 3", "`is null`", None, 10),
        ("(label == 3) & good", "expected and", None, 1),
        ("__import__('os')", "expected a field, a number", None, 1),
        ("label.__class__ == 3", "no '__class__'", None, 1),
        ("[x for x in text]", "expected a field, a number", None, 1),
        ("'äöü' == text and ö", "no field 'ö'", None, 19),
        ("label == 3 or " * 3 + "`x y` == 3", "no field 'x y'", None, 43),
        ("label == 'x\0'", "null b", None, None),
        ("(" * 300 + "good", "parentheses", None, None),
        ("not " * 5000 + "good", "cannot be parsed | nested too deeply", None, 1),
    ],
)  # fmt: skip
def test_mistakes(text, what, expected, column):
    with pytest.raises(UsageError) as caught:
        condition(text, SCHEMA, NAMES)
    error = caught.value
    assert error.what.startswith("invalid condition: ")
    said = error.what + json.dumps(error.found, ensure_ascii=False)
    assert any(words in said for words in what.split(" | "))  # versions of Python differ
    assert expected is None or expected in (error.expected or "")
    assert column is None or f"at column {column} of" in (error.found or "")


@pytest.mark.parametrize("text", ["`b` == 1 and _0_ == 5", "µ == 7", "`µ` == 7", "ﬁ.ﬁ[0].µ == 7"])
def test_names_are_those_that_are_written(text):
    """Python's parser takes µ for μ and ﬁ for fi; names in backquotes get others while parsing."""
    schema = Schema({"b": Int(), "_0_": Int(), "µ": Int(), "ﬁ": Json()})
    sample = {"__key__": "x", "b": 1, "_0_": 5, "µ": 7, "ﬁ": {"ﬁ": [{"µ": 7}]}}
    test = condition(text, schema, {})
    assert test(sample) is True
    assert test({**sample, "b": 5, "µ": 1, "ﬁ": {}}) is not True
