"""Conditions on samples, such as `width >= 256 and label in ("cat", "dog")`.

They are written in a subset of Python's syntax, and parsed with `ast`. Nothing is ever evaluated as
Python: unknown syntax is rejected. A comparison with a value that a sample does not have is neither
true nor false, as in SQL.
"""

from __future__ import annotations

import ast
import contextlib
import json
import operator
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardkit.codecs.image import NotAnImageError, probe, unusable
from shardkit.codecs.media import media_info
from shardkit.errors import UsageError, near
from shardkit.sample import JsonText, Sample
from shardkit.schema import (
    Array,
    Audio,
    Bool,
    Bytes,
    FieldType,
    Image,
    Json,
    Scalar,
    Schema,
    Text,
    Video,
    holds_keypoints,
    numbers_of,
)

_Test: TypeAlias = Callable[[Sample], "bool | None"]  # None: neither true nor false

_QUOTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|`([^`]+)`""")
_SYMBOL = re.compile(r"\w+|&&|\|\||<>|.")
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_OF_IMAGES = ("width", "height", "format", "size")
_OF_AUDIO = ("duration", "sampling_rate", "channels", "format", "size")
_OF_VIDEO = (*_OF_AUDIO, "width", "height", "frames")
_PARTS: dict[type, tuple[str, ...]] = {
    FieldType: (),
    Image: _OF_IMAGES,
    Audio: _OF_AUDIO,
    Video: _OF_VIDEO,
    Bytes: ("size",),
    **dict.fromkeys((Text, Array), ("length",)),
}
_CALLED: dict[type, str] = {
    Scalar: "a number", Bool: "true or false", Text: "text", Array: "list", FieldType: "data",
}  # fmt: skip
# The types of fields that a part without field name can belong to, and the preferred field.
_USUAL: dict[str, tuple[tuple[type[FieldType], ...], str]] = {
    **dict.fromkeys(_OF_VIDEO, ((Audio, Video), "audio")),
    **dict.fromkeys(("width", "height"), ((Image, Video), "image")),
    **dict.fromkeys(("format", "size"), ((Image, Audio, Video), "image")),
    "frames": ((Video,), "video"),
    "length": ((Text,), "text"),
}
_WORDS = {"true": True, "false": False}
_EXAMPLE = "such as: width >= 256 and label in (3, 7)"
_HINTS = {"=": "==", "&": "and", "|": "or", "~": "not", "!": "not", "<>": "!="}
_HINTS |= {"&&": "and", "||": "or"} | {word: word for word in ("and", "or", "not", "in", "is")}


class Head(bytes):
    """The first bytes of an encoded image, with its whole header; `size` is the image's size."""

    size: int


@dataclass(frozen=True)
class Condition:
    """A condition on samples. `fields` are the fields that it needs, besides the key.

    Called with a sample that has these fields, it returns True or False, or None if it depends on a
    value that the sample does not have. A `Head` is enough for images. Raises SampleError for a
    damaged image header.
    """

    fields: tuple[str, ...]
    test: _Test
    conjuncts: tuple[Condition, ...] = ()  # the operands, if it is a conjunction (`and`)
    origin: tuple[Any, ...] = ()  # the arguments of `_parsed`, to pickle it

    def __call__(self, sample: Sample) -> bool | None:
        return self.test(sample)

    def __reduce__(self) -> tuple[Any, ...]:
        return _parsed, self.origin


def condition(
    text: str, schema: Schema, class_names: Mapping[str, Sequence[str]] | None = None
) -> Condition:
    """Parse a condition on samples with these fields; `class_names` has class names by field.

    Raises UsageError, with the column, for invalid syntax, for an unknown field or class, and for
    values that cannot be compared.
    """
    return _parsed(text, schema, dict(class_names or {}))


def _parsed(
    text: str, schema: Schema, names: Mapping[str, Sequence[str]], part: int | None = None
) -> Condition:
    """Return the whole condition, or one of its conjuncts."""
    found, whole = _Reader(text, schema, names).condition(), (text, schema, names)
    parts = tuple(replace(one, origin=(*whole, n)) for n, one in enumerate(found.conjuncts))
    return replace(found, conjuncts=parts, origin=whole) if part is None else parts[part]


def value_of(
    text: str, schema: Schema, class_names: Mapping[str, Sequence[str]] | None = None
) -> tuple[tuple[str, ...], Callable[[Sample], Any]]:
    """Parse a field, or a part of one, as in conditions: the fields it needs, and its getter.

    The value is None if a sample does not have it. Raises UsageError like `condition`.
    """
    return _Reader(text, schema, class_names or {}).single()


def names_in(text: str) -> set[str]:
    """Return the names of all fields that a condition may need; empty if it is invalid."""
    reader = _Reader(text, Schema({}), {})
    with contextlib.suppress(UsageError):
        paths = [reader.path(n) or [] for n in ast.walk(reader.tree()) if isinstance(n, ast.expr)]
        return {".".join(map(str, path[:n])) for path in paths for n in range(1, len(path) + 1)}
    return set()


class _Value(NamedTuple):
    """A side of a comparison."""

    words: str  # as written
    at: ast.expr
    kind: str  # see _CALLED; "any" is a value inside JSON
    get: Callable[..., Any]  # gets the value from a sample; None if absent
    field: str | None = None
    names: Sequence[str] | None = None  # class names, if the field has any
    literal: Any = None


class _Reader:
    """Parses a text, and converts each node of its syntax tree to a condition."""

    def __init__(self, text: str, schema: Schema, class_names: Mapping[str, Sequence[str]]) -> None:
        self._text = text.strip().replace("\n", " ")
        self._schema, self._names = schema, class_names
        self._quoted: dict[str, str] = {}  # placeholder -> the name in backquotes it replaces
        # Placeholders begin with a letter that is not in the text, so that they equal no name.
        self._letter = next(c for c in map(chr, range(0x4E00, 0x9FFF)) if c not in text)
        self._source = _QUOTED.sub(self._stand_in, self._text)  # columns stay the same

    def condition(self) -> Condition:
        tree = self.tree()
        try:
            return self._test(tree)
        except RecursionError as error:
            raise self._error("it is nested too deeply", 0, "") from error

    def single(self) -> tuple[tuple[str, ...], Callable[[Sample], Any]]:
        value = self._value(self.tree())
        if value.field is None or value.kind in ("list", "data"):
            raise self._error("expected a field with a single value", value.at)
        return self._made(lambda sample: None, value).fields, value.get

    def tree(self) -> ast.expr:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about invalid escapes in strings
                return ast.parse(self._source, mode="eval").body
        except SyntaxError as error:
            at = min(error.offset or sys.maxsize, len(self._text) + 1) - 1  # 0: the end
            found = _SYMBOL.match(self._text[at:])
            hint = _HINTS.get(found[0].lower() if found else "", _EXAMPLE)
            what = f"{error.msg}; expected {hint}"
            raise self._error(what, at, found[0] if found else "") from error
        except (RecursionError, MemoryError, ValueError) as error:  # ValueError: a null byte
            raise self._error("it cannot be parsed", 0, str(error)) from error

    def _stand_in(self, found: re.Match[str]) -> str:
        if found[2] is None:
            return found[0]
        name = f"{self._letter}{len(self._quoted)}".ljust(len(found[0]), "_")
        self._quoted[name] = found[2]
        return name

    def _test(self, node: ast.expr) -> Condition:
        if isinstance(node, ast.BoolOp):
            return _joined([self._test(one) for one in node.values], isinstance(node.op, ast.Or))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _negated(self._test(node.operand))
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = zip(sides, node.ops, sides[1:], strict=False)
            return _joined([self._pair(*pair) for pair in pairs], False)
        value = self._value(node)
        if value.kind not in ("true or false", "any") or value.field is None:
            what = "expected a comparison: ==, !=, <, <=, >, >=, in, not in, is null, is not null"
            raise self._error(what, node)
        return self._made(lambda s: v if isinstance(v := value.get(s), bool) else None, value)

    def _pair(self, left: ast.expr, symbol: ast.cmpop, right: ast.expr) -> Condition:
        value, negated = self._value(left), isinstance(symbol, ast.NotIn | ast.IsNot)
        if isinstance(symbol, ast.Is | ast.IsNot):
            if not _is_null(right):
                raise self._error("expected null: `is null` asks whether there is a value", right)
            return self._made(lambda sample: (value.get(sample) is None) is not negated, value)
        if not isinstance(symbol, ast.In | ast.NotIn):
            return self._compared(value, symbol, self._value(right))
        if isinstance(right, ast.Tuple | ast.List):
            each = [self._compared(value, ast.Eq(), self._value(one)) for one in right.elts]
            if not each:
                raise self._error("expected values in the list", right)
            found = _joined(each, True)
        else:
            found = self._contained(value, self._value(right))
        return _negated(found) if negated else found

    def _contained(self, item: _Value, whole: _Value) -> Condition:
        """Return the condition that a text or a list contains an item."""
        if whole.field is None or whole.kind not in ("list", "text", "any"):
            raise self._error("expected a list in parentheses, as in (3, 7), or a field", whole.at)
        if whole.kind == "text" and item.kind not in ("text", "any"):
            raise self._unlike(item, whole)
        one = self._of_class(item, whole)

        def test(sample: Sample) -> bool | None:
            value, several = one.get(sample), whole.get(sample)
            if value is None or several is None:
                return None
            if isinstance(several, str):
                return value in several if isinstance(value, str) else None
            if whole.kind == "any" and not isinstance(several, list):
                return None
            if isinstance(several, np.ndarray):
                items = numbers_of(several) if whole.names else several.tolist()
            else:
                items = several
            return any(_alike(value, other) and value == other for other in items)

        return self._made(test, item, whole)

    def _compared(self, left: _Value, symbol: ast.cmpop, right: _Value) -> Condition:
        compare = _COMPARE[type(symbol)]
        ordered = not isinstance(symbol, ast.Eq | ast.NotEq)
        one, other = self._of_class(left, right), self._of_class(right, left)
        for value, compared in ((left, one), (right, other)):
            if ordered and (value.kind == "true or false" or compared is not value):
                raise self._error("it has no order: use ==, != or in", value.at)
            if value.kind in ("list", "data"):
                parts = " or ".join(f"{value.words}.{part}" for part in self._parts(value.field))
                raise self._error(f"it is not a single value: use {parts or 'is null'}", value.at)
        if one.kind != other.kind and "any" not in (one.kind, other.kind):
            raise self._unlike(right, left)
        known = one.kind == other.kind != "any"

        def test(sample: Sample) -> bool | None:
            a, b = one.get(sample), other.get(sample)
            if a is None or b is None or not (known or _alike(a, b)):
                return None
            return bool(compare(a, b))

        return self._made(test, left, right)

    def _of_class(self, value: _Value, other: _Value) -> _Value:
        """A text that is compared with a field that has class names, as the number of a class."""
        if other.names is None or not isinstance(value.literal, str):
            return value
        if value.literal not in other.names:
            what = f"there is no class {value.literal!r}"
            raise self._error(what, value.at, expected=near(value.literal, other.names))
        number = list(other.names).index(value.literal)
        return value._replace(kind="a number", get=lambda sample: number)

    def _value(self, node: ast.expr) -> _Value:
        literal: Any = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number: Any = getattr(node.operand, "value", None)
            literal = -number if type(number) in (int, float) else None
        if isinstance(node, ast.Name) and node.id in _WORDS:
            literal = _WORDS[node.id]
        if _is_null(node):
            raise self._error("expected a value; to find absent values, use `is null`", node)
        words = ast.unparse(node)
        if type(literal) in (bool, int, float, str):
            return _Value(words, node, _kind_of(literal), lambda _: literal, literal=literal)
        path = self.path(node)
        if path is None:
            what = "expected a field, a number, a text in quotes, true or false"
            if isinstance(node, ast.BinOp):
                what = {ast.BitAnd: "expected and", ast.BitOr: "expected or"}.get(
                    type(node.op), what
                )
            raise self._error(what, node)
        return self._of_field(_Value(".".join(map(str, path)), node, "data", path.copy), path)

    def path(self, node: ast.expr) -> list[str | int] | None:
        """Convert `a.b[0]["c d"]` to a list of names and numbers; None for other expressions."""
        if isinstance(node, ast.Name):
            return [self._name(node)]
        part: Any = None
        if isinstance(node, ast.Attribute):
            part = self._name(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            part = node.slice.value
        above = self.path(node.value) if isinstance(node, ast.Attribute | ast.Subscript) else None
        return [*above, part] if above and type(part) in (str, int) else None

    def _name(self, node: ast.Name | ast.Attribute) -> str:
        """The name at the end of a node, as written: Python's parser changes letters such as µ."""
        before = self._source.encode()[: node.end_col_offset].decode()
        found = re.search(r"\w+\Z", before)
        written = found[0] if found else ""
        return self._quoted.get(written, written)

    def _of_field(self, value: _Value, path: list[str | int]) -> _Value:
        """A field, a part of one, or a property of its value, such as the width of an image."""
        for count in range(len(path), 0, -1):
            name = ".".join(map(str, path[:count]))
            if name in self._schema:
                return self._of_part(value._replace(field=name), path[count:])
        if path in (["key"], ["__key__"]):
            return value._replace(kind="text", get=lambda s: s["__key__"], field="__key__")
        if len(path) == 1 and (name := self._usual(str(path[0]))):
            return self._of_part(value._replace(field=name), path)
        known = [*self._schema, "key", *(part for part in _USUAL if self._usual(part))]
        inside = [n for n, kind in self._schema.items() if isinstance(kind, Json)]
        hint = "".join(f"; {n}.{value.words}, if it is a value inside {n!r}" for n in inside[:3])
        what = f"there is no field {value.words!r}"
        raise self._error(what, value.at, expected=near(value.words, known) + hint)

    def _usual(self, part: str) -> str:
        """Return the field that `width`, `length` and the like refer to if no field is named."""
        kinds, usual = _USUAL.get(part, ((), ""))
        found = [name for name, own in self._schema.items() if isinstance(own, kinds)]
        return usual if usual in found else next(iter(found), "")

    def _of_part(self, value: _Value, rest: list[str | int]) -> _Value:
        name = str(value.field)
        kind = self._schema[name]
        if isinstance(kind, Json):
            return value._replace(kind="any", get=lambda s: _inside(s.get(name), rest))
        if not rest:
            names = None if holds_keypoints(kind) else self._names.get(name)
            return value._replace(kind=kind.entry(_CALLED), get=lambda s: s.get(name), names=names)
        part = str(rest[0])
        if len(rest) > 1 or part not in self._parts(name):
            parts = ", ".join(f"{name}.{one}" for one in self._parts(name))
            what = f"{name!r} has no {'.'.join(map(str, rest))!r}"
            raise self._error(what, value.at, expected=parts or f"{name} alone")
        word = "text" if part == "format" else "a number"
        about = probe if isinstance(kind, Image) else media_info
        return value._replace(kind=word, get=lambda s: _part(s, name, part, about))

    def _parts(self, field: str | None) -> tuple[str, ...]:
        kind = self._schema.get(field or "")
        return () if kind is None else kind.entry(_PARTS)

    def _made(self, test: _Test, *values: _Value) -> Condition:
        fields = dict.fromkeys(v.field for v in values if v.field and v.field in self._schema)
        return Condition((*fields,), test)

    def _unlike(self, value: _Value, other: _Value) -> UsageError:
        kinds = f"{other.words} is {other.kind}, and {value.words} is {value.kind}"
        return self._error(f"these cannot be compared: {kinds}", value.at)

    def _error(
        self, what: str, at: ast.expr | int, found: str | None = None, expected: str | None = None
    ) -> UsageError:
        if isinstance(at, ast.expr):
            line = self._source.encode()  # columns in the syntax tree count bytes
            end = len(line[: at.end_col_offset].decode())
            at = len(line[: at.col_offset].decode())
            found = self._text[at:end]
        where = f"at column {at + 1} of {self._text[:200]!r}"
        return UsageError(
            f"invalid condition: {what}",
            expected=expected,
            found=f"{found[:40]!r} {where}" if found else f"the end {where}",
        )


def _is_null(node: ast.expr) -> bool:
    none = isinstance(node, ast.Constant) and node.value is None
    return none or (isinstance(node, ast.Name) and node.id == "null")


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, int | float) else "text"


def _alike(a: Any, b: Any) -> bool:
    """Whether two values can be compared; for values in JSON, this is only known at run time."""
    simple = str | int | float
    return isinstance(a, simple) and isinstance(b, simple) and _kind_of(a) == _kind_of(b)


def _joined(parts: list[Condition], dominant: bool) -> Condition:
    """Return the conjunction of the parts; or, if `dominant` is True, their disjunction."""

    def test(sample: Sample) -> bool | None:
        unknown = False
        for part in parts:
            found = part.test(sample)
            if found is dominant:
                return dominant
            unknown |= found is None
        return None if unknown else not dominant

    fields = tuple(dict.fromkeys(name for part in parts for name in part.fields))
    return parts[0] if len(parts) == 1 else Condition(fields, test, () if dominant else (*parts,))


def _negated(part: Condition) -> Condition:
    def test(sample: Sample) -> bool | None:
        found = part.test(sample)
        return None if found is None else not found

    return Condition(part.fields, test)


def _inside(value: Any, path: Sequence[str | int]) -> Any:
    """The value inside a JSON value at a path of names and list positions; None if absent."""
    if isinstance(value, JsonText):
        value = json.loads(value)
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def _part(sample: Sample, field: str, part: str, about: Callable[[bytes], Any]) -> Any:
    """Return a property of a field's value: its size or length, or an entry of its header."""
    value = sample.get(field)
    if value is None or part in ("size", "length"):
        return value.size if isinstance(value, Head) else None if value is None else len(value)
    try:
        return getattr(about(value), part)
    except NotAnImageError as error:
        raise unusable(error, sample["__key__"], field) from error
