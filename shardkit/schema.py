"""`Schema`: the fields of a sample and their types. It is stored with the data."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias, TypedDict, TypeVar

import numpy as np

from shardkit.errors import FormatError, SampleError, UsageError, near
from shardkit.helpers.checked import Count, MismatchError, Rule, checked
from shardkit.sample import JsonText, Sample, UnsupportedError

_T = TypeVar("_T")


@dataclass(frozen=True, repr=False)
class FieldType:
    """Base class of the eleven field types.

    optional: samples may lack the field. A value is never None.
    """

    optional: bool = dataclasses.field(default=False, kw_only=True)

    python: ClassVar[str]  # the Python type of a value, in words

    def check(self, value: Any) -> Any:
        """Normalize a value for storing. Raises TypeError if it has another type."""
        raise NotImplementedError

    def entry(self, table: Mapping[type, _T]) -> _T:
        """The entry of a table for this type, or for its nearest base class, such as Bytes."""
        return next(table[each] for each in type(self).__mro__ if each in table)

    def to_json(self) -> dict[str, Any]:
        return {"type": type(self).__name__, **self._changed()}

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._changed().items())
        return f"{type(self).__name__}({options})"

    def _changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}


@dataclass(frozen=True, repr=False)
class Scalar(FieldType):
    """Base class of the types of single numbers."""


@dataclass(frozen=True, repr=False)
class Int(Scalar):
    """A signed 64-bit integer."""

    python = "int"

    def check(self, value: Any) -> int:
        if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
            raise TypeError
        number = int(value)
        if not -(2**63) <= number < 2**63:
            raise TypeError
        return number


def int64(stored: bytes | int) -> int:
    """Parse a stored value of an `Int`; raises ValueError if it is invalid or too large."""
    number = int(stored)
    if -(2**63) <= number < 2**63:
        return number
    shown = f"{number}" if abs(number) < 10**30 else f"a number of {number.bit_length():,} bits"
    raise UnsupportedError(f"{shown} is not between -2^63 and 2^63 - 1")


@dataclass(frozen=True, repr=False)
class Float(Scalar):
    """A 64-bit floating point number."""

    python = "float"

    def check(self, value: Any) -> float:
        if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
            raise TypeError
        try:
            found = float(value)
        except OverflowError:
            raise TypeError from None
        # Beyond 2^53, not every integer is a float.
        large = not -(2**53) < found < 2**53
        if large and isinstance(value, numbers.Integral) and int(found) != int(value):
            raise TypeError
        return found


@dataclass(frozen=True, repr=False)
class Bool(Scalar):
    """True or False."""

    python = "bool"

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool | np.bool_):
            raise TypeError
        return bool(value)


@dataclass(frozen=True, repr=False)
class Text(FieldType):
    """Unicode text, a str."""

    python = "str"

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or not is_unicode(value):
            raise TypeError
        return value


@dataclass(frozen=True, repr=False)
class Bytes(FieldType):
    """Arbitrary bytes, stored unchanged."""

    python = "bytes"

    def check(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError
        return bytes(value)


@dataclass(frozen=True, repr=False)
class Encoded(Bytes):
    """Base class of the types of media files: their bytes, which are not decoded."""


@dataclass(frozen=True, repr=False)
class Image(Encoded):
    """An encoded image (JPEG, PNG, WebP, ...), stored as the file's bytes, not as pixels."""

    python = "bytes of an encoded image"


@dataclass(frozen=True, repr=False)
class Audio(Encoded):
    """An encoded audio file (WAV, FLAC, MP3, Ogg, ...), stored as the file's bytes, not decoded."""

    python = "bytes of an encoded audio file"


@dataclass(frozen=True, repr=False)
class Video(Encoded):
    """An encoded video file (MP4, WebM, AVI, ...), stored as the file's bytes, not decoded."""

    python = "bytes of an encoded video file"


@dataclass(frozen=True, repr=False)
class Images(FieldType):
    """A list of encoded images, of any length, stored as the bytes of the files, in order."""

    python = "list of bytes of encoded images"

    def check(self, value: Any) -> list[bytes]:
        if not isinstance(value, list | tuple):
            raise TypeError
        return [Image().check(image) for image in value]


@dataclass(frozen=True, repr=False)
class Json(FieldType):
    """Any JSON value: dict, list, str, int, float, bool or None."""

    python = "JSON value"

    def check(self, value: Any) -> Any:
        if isinstance(value, JsonText):
            return value
        try:
            text = JsonText.of(value)
            same = bool(json.loads(text) == value) and is_unicode(text)
        except (ValueError, RecursionError):
            raise TypeError from None
        if not same:  # such as a tuple or a non-string key: it would be read back differently
            raise TypeError
        return value


_DTYPE = re.compile(r"[<>|=][biufcSUVmM]\d{1,9}(\[\d*\w+\])?")
_DIMENSIONS = 32  # supported by all versions of numpy
_ELEMENTS = 2**40


def _is_dtype(text: str) -> bool:
    """Return whether a text is a dtype in numpy's notation, except objects and structured types."""
    try:
        return _DTYPE.fullmatch(text) is not None and bool(np.dtype(text).str)
    except (TypeError, ValueError):
        return False


def _is_size(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and int(value) >= 0


def _is_shape(shape: tuple[int | None, ...]) -> bool:
    return len(shape) <= _DIMENSIONS and math.prod(n or 1 for n in shape) <= _ELEMENTS


@dataclass(frozen=True, repr=False)
class Array(FieldType):
    """A NumPy array. `dtype`, `shape`, and each entry of `shape` can be None if they vary."""

    dtype: Annotated[str, Rule("a type such as <f4", _is_dtype)] | None = None
    shape: (
        Annotated[
            tuple[Count | None, ...],
            Rule(f"{_DIMENSIONS} dimensions and {_ELEMENTS:,} elements at most", _is_shape),
        ]
        | None
    ) = None

    python = "numpy.ndarray"

    def __post_init__(self) -> None:
        if self.dtype is not None:  # it may be given as a type, such as numpy.float32
            try:
                dtype = np.dtype(self.dtype)
            except TypeError:
                dtype = np.dtype(object)
            if dtype.hasobject or dtype.names:
                raise UsageError(
                    "an array cannot have this dtype",
                    expected="a NumPy type of numbers, text or bytes, such as 'float32'",
                    found=repr(self.dtype),
                )
            object.__setattr__(self, "dtype", dtype.str)
        shape = self.shape
        if shape is not None:
            valid = isinstance(shape, list | tuple) and all(n is None or _is_size(n) for n in shape)
            if not valid:
                raise UsageError(
                    "the shape of an array must be a tuple of whole numbers",
                    expected="such as (3, 224, 224), with None for a size that varies",
                    found=repr(shape),
                )
            object.__setattr__(self, "shape", tuple(n if n is None else int(n) for n in shape))

    def check(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise TypeError
        if self.dtype is not None and value.dtype != np.dtype(self.dtype):
            raise TypeError
        if self.shape is not None and not self._fits(value.shape):
            raise TypeError
        return value

    def _fits(self, shape: tuple[int, ...]) -> bool:
        expected = self.shape or ()
        return len(shape) == len(expected) and all(
            e is None or e == n for e, n in zip(expected, shape, strict=True)
        )


TYPES: dict[str, type[FieldType]] = {
    t.__name__: t for t in (Int, Float, Bool, Text, Bytes, Json, Image, Images, Audio, Video, Array)
}


# Names that WebDataset reserves, which no field may have.
RESERVED = frozenset({"__key__", "__url__", "__local_path__", "__bad__"})


class _Entry(TypedDict):
    """A field in JSON; other entries are the options of its type."""

    type: str


class Schema(Mapping[str, FieldType]):
    """An ordered mapping from field names to field types. `fields` is such a mapping.

    Raises UsageError for anything else.

    >>> schema = Schema({"image": Image(), "label": Int()})
    >>> schema["label"]
    Int()
    """

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        if not isinstance(fields, Mapping):
            raise UsageError(
                "a schema must be a dict of field types",
                expected='such as {"image": shardkit.Image(), "label": shardkit.Int()}',
                found=f"{fields!r:.100}",
            )
        for name, kind in fields.items():
            _check_name(name, kind)
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> FieldType:
        if not isinstance(name, str):  # it may not even be hashable
            raise KeyError(name)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Schema({self._fields})"

    def check(self, sample: Sample) -> Sample:
        """Check a `sample`, and return it with its fields in the order of the schema.

        None in an optional field means that the sample lacks it.
        Raises SampleError if the sample lacks a field, has a field that is not in the schema, or
        has a value of another type than its field.
        """
        checked: Sample = {"__key__": sample["__key__"]}
        missing = 0
        for name, kind in self._fields.items():
            value = sample.get(name)
            if value is None and kind.optional:
                missing += name in sample
            elif name in sample:
                try:
                    checked[name] = kind.check(value)
                except TypeError:
                    raise _wrong_type(sample, name, kind) from None
            elif not kind.optional:
                raise SampleError(
                    f"the sample has no field {name!r}",
                    key=sample["__key__"],
                    expected=", ".join(self._fields),
                    found=", ".join(n for n in sample if n != "__key__") or "no fields",
                    fix="fill the field in, or declare it with optional=True",
                )
        if len(checked) + missing != len(sample):
            extra = sorted(sample.keys() - self._fields.keys() - {"__key__"})
            raise SampleError(
                f"the sample has a field that the schema does not name: {extra[0]!r}",
                key=sample["__key__"],
                expected=", ".join(self._fields),
                fix=f"add {extra[0]!r} to the schema (optional=True if only some samples have it)",
            )
        return checked

    def with_optional(self, names: Collection[str], optional: bool = True) -> Schema:
        """The schema with these fields made optional or required; unknown names are ignored."""
        fields = self._fields.items()
        return Schema(
            {n: dataclasses.replace(k, optional=optional) if n in names else k for n, k in fields}
        )

    def renamed(self, names: Mapping[str, str]) -> Schema:
        """Return the schema with renamed fields. `names` maps old names to new names.

        Raises UsageError for an unknown field, and if two fields would have the same name.
        """
        unknown = names.keys() - self._fields.keys()
        if unknown:
            first = sorted(unknown)[0]
            raise UsageError(
                f"there is no field {first!r} to rename", expected=near(first, self._fields)
            )
        fields = {names.get(name, name): kind for name, kind in self._fields.items()}
        if len(fields) != len(self._fields):
            raise UsageError("two fields would have the same name", found=str(dict(names)))
        return Schema(fields)

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return {name: kind.to_json() for name, kind in self._fields.items()}

    @classmethod
    def from_json(cls, data: Any) -> Schema:
        """Return the schema that `to_json` has converted to `data`.

        Raises MismatchError (a ValueError) for invalid data, and FormatError for a field type of a
        later version.
        """
        entries = checked(dict[str, _Entry], data)
        for name in RESERVED & entries.keys():
            raise MismatchError(f"any name but {', '.join(sorted(RESERVED))}", name)
        return cls({name: _type_from_json(name, entry) for name, entry in entries.items()})


# The class names of the field `label`, or the class names of several fields by field.
ClassNames: TypeAlias = Sequence[str] | Mapping[str, Sequence[str]]


def holds_classes(kind: FieldType | None) -> bool:
    """Return whether a field may have class names: an integer, an array of them, or a vector."""
    return (
        isinstance(kind, Int)
        or is_vector(kind)
        or (
            isinstance(kind, Array) and kind.dtype is not None and np.dtype(kind.dtype).kind in "iu"
        )
    )


def is_vector(kind: FieldType | None) -> bool:
    """Return whether a field has a truth value for each class."""
    return isinstance(kind, Array) and kind.dtype == "|b1" and len(kind.shape or ()) == 1


def numbers_of(label: Any) -> list[int]:
    """Return the class numbers in a label: one, those of an array, or those a vector marks."""
    is_marks = isinstance(label, np.ndarray) and label.dtype == np.bool_
    found: list[int] = np.ravel(np.flatnonzero(label) if is_marks else label).tolist()
    return found


def holds_keypoints(kind: FieldType | None) -> bool:
    """Return whether a field may contain keypoints: floats (n, k, 3)."""
    return (
        isinstance(kind, Array) and kind.dtype in ("<f4", "<f8") and len(kind.shape or ()) == 3
        and (kind.shape or ())[2] == 3
    )  # fmt: skip


def holds_names(kind: FieldType | None) -> bool:
    """Return whether the values of a field may have names: class numbers, or keypoints."""
    return holds_classes(kind) or holds_keypoints(kind)


def named_classes(classes: ClassNames | None, schema: Schema) -> dict[str, tuple[str, ...]]:
    """Return the class names by field.

    Raises UsageError for names that are not strings, and for fields that hold neither integers nor
    keypoints.
    """
    named = classes if isinstance(classes, Mapping) else {"label": classes}
    found = {field: tuple(names) for field, names in named.items() if names is not None}
    for field, names in found.items():
        if not holds_names(schema.get(field)):
            raise UsageError(
                f"there are class names for {field!r}, which is not a field of whole numbers",
                expected=", ".join(n for n, kind in schema.items() if holds_names(kind)),
                fix="give them by field: classes={'NAME': ['cat', 'dog']}",
            )
        if isinstance(named[field], str) or not all(isinstance(name, str) for name in names):
            raise UsageError(
                "class names must be a list of strings",
                field=field,
                found=f"{named[field]!r:.100}",
            )
    return found


def images_in(kind: FieldType, value: Any) -> Sequence[bytes]:
    """The encoded images in a value: itself, all images of a list, or none for other fields."""
    if isinstance(kind, Image):
        return (value,)
    return value if isinstance(kind, Images) else ()


def row_fields(schema: Schema) -> list[str]:
    """The fields whose values are one-dimensional arrays, or may be according to the schema."""
    arrays = ((name, kind) for name, kind in schema.items() if isinstance(kind, Array))
    return [name for name, kind in arrays if kind.shape is None or len(kind.shape) == 1]


def audio_fields(schema: Schema) -> list[str]:
    """Return the fields of encoded audio."""
    return [name for name, kind in schema.items() if isinstance(kind, Audio)]


def length_fields(schema: Schema) -> list[str]:
    """Return the fields whose values vary in length: one-dimensional arrays and audio."""
    return [
        name
        for name, kind in schema.items()
        if isinstance(kind, Audio) or (isinstance(kind, Array) and kind.shape == (None,))
    ]


def lengths_dtype(names: Sequence[str]) -> np.dtype[np.void]:
    """Return the dtype of a row in the table of lengths: the length of each field in one sample."""
    return np.dtype([(name, "<u4") for name in names])


def check_label(sample: Sample, field: str, names: Sequence[str]) -> None:
    """Raises SampleError if the field has a class number without a name."""
    label = sample.get(field)
    if isinstance(label, np.ndarray) and label.dtype.kind in "iu":
        wrong = label[(label < -1) | (label >= len(names))]
        label = int(wrong.flat[0]) if wrong.size else None
    if type(label) is int and not -1 <= label < len(names):
        raise SampleError(
            "the label is not the number of a class",
            key=sample["__key__"],
            field=field,
            expected=f"0 to {len(names) - 1}, or -1 for none",
            found=str(label),
        )


def label_of(class_names: Mapping[str, Any]) -> str:
    """Return the name of the label field, if several fields have class names.

    Those of keypoints are not classes.
    """
    others = (name for name in class_names if name != "keypoints")
    return "label" if "label" in class_names else next(others, "label")


def is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogates, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_name(name: str, kind: FieldType) -> None:
    if not isinstance(name, str):
        raise UsageError("the name of a field must be text", found=repr(name))
    if not isinstance(kind, FieldType):
        raise UsageError(
            f"field {name!r} has no type",
            expected="one of " + ", ".join(f"shardkit.{t}()" for t in TYPES),
            found=repr(kind),
        )
    if name in RESERVED:
        raise UsageError(
            f"{name!r} cannot be the name of a field",
            expected="any name but " + ", ".join(sorted(RESERVED)),
        )


def _wrong_type(sample: Sample, name: str, kind: FieldType) -> SampleError:
    value = sample[name]
    found = f"{type(value).__name__} {value!r:.60}"
    if isinstance(value, str) and isinstance(kind, Text):
        found += ", which is not Unicode: half of a surrogate pair"
    if isinstance(value, np.ndarray):
        found = f"an array of {value.dtype} {value.shape}"
    return SampleError(
        "a value is not of its field's type",
        key=sample["__key__"],
        field=name,
        expected=f"{kind.python} for {kind}",
        found=found,
        fix="declare the field with optional=True in the schema"
        if value is None
        else "correct it or its type in the schema, or drop such samples with --on-error skip",
    )


def _type_from_json(name: str, entry: _Entry) -> FieldType:
    kind = TYPES.get(entry["type"])
    if kind is None:
        raise FormatError(
            f"field {name!r} is of a type that this version does not know",
            found=entry["type"],
            expected="one of " + ", ".join(TYPES),
        )
    return checked(kind, {n: value for n, value in entry.items() if n != "type"}, name)
