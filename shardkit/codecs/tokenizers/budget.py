"""The budget of steps of a rendering, and the operations of templates that pay for themselves.

Whatever can take long pays in advance for the values that it reads and makes. What is made of a
value in two places, as [x, x] is, pays for both: nothing that is small in memory has a long text.
Short texts and numbers are free, as the body of a loop, macro or block pays for its operations.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any

from jinja2 import pass_context, pass_eval_context
from jinja2.filters import do_format, do_indent, do_join, do_replace
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Undefined

# A rendering has these steps, and as many as reading the conversation so many times takes.
STEPS = 1_000_000
PASSES = 64
LARGEST = 1 << 21  # conversation, in steps of reading it
CHARACTERS = 8  # that are read or written in one step
_FREE = 64  # characters of a text
_BITS = 1 << 14  # of a number
_WIDTH = 999  # of a formatted value, in characters
_VIEWS: Any = type({}.keys()) | type({}.values()) | type({}.items())
_SIZED: Any = str | list | tuple | range | _VIEWS
_PLAIN = (int, float, bool, type(None), Undefined)


class BudgetError(Exception):
    """A template takes more steps than a rendering may."""


@dataclass
class Rendering:
    """What is left of the budget; and what was written so far, with the marked spans of it."""

    steps: int
    length: int = 0
    marked: list[tuple[int, str]] = field(default_factory=list)

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise BudgetError("it takes too many steps: a loop without end, or a huge text")


CURRENT: ContextVar[Rendering] = ContextVar("rendering")


def spend(steps: int) -> None:
    CURRENT.get().spend(steps)


def weigh(value: Any, limit: int, strict: bool = False) -> int:
    """Return the steps that reading a value takes; stops with BudgetError above the limit.

    `strict`: raise TypeError for other objects than those of JSON.
    """
    if type(value) is str:
        return 1 + len(value) // CHARACTERS
    steps, rest = 0, [value]
    while rest:
        one = rest.pop()
        steps += 1
        if isinstance(one, str):
            steps += len(one) // CHARACTERS
        elif isinstance(one, dict):
            rest += one.keys()
            rest += one.values()
        elif isinstance(one, list | tuple | _VIEWS):
            rest += one
        elif isinstance(one, range):
            steps += len(one)
        elif isinstance(one, int):
            _check_bits(_bits(one))
        elif strict and not isinstance(one, _PLAIN):
            raise TypeError(f"{type(one).__name__} is not a type of JSON")
        if steps > limit:
            raise BudgetError("it makes a huge value")
    return steps


def pay(*values: Any) -> None:
    """Spend the steps of reading these values."""
    for value in values:
        if type(value) is str:
            if len(value) > _FREE:
                spend(1 + len(value) // CHARACTERS)
        elif value is not None and type(value) is not bool:
            rendering = CURRENT.get()
            rendering.spend(weigh(value, rendering.steps))


def paid(value: Any) -> Any:
    """Return a value that was made, or an iterator of such values, after paying for it."""
    if isinstance(value, GeneratorType):
        return map(paid, value)
    pay(value)
    return value


def skimmed(value: Any) -> Any:
    """Return a value, or an iterator of values, after paying only for its items as they are."""
    if isinstance(value, GeneratorType):
        return map(skimmed, value)
    if type(value) is str and len(value) <= _FREE:
        return value
    size = len(value) if isinstance(value, _SIZED) else 0
    spend(1 + (size // CHARACTERS if isinstance(value, str) else size))
    return value


@pass_context  # so jinja2 does not evaluate constant outputs while compiling
def output(_: Context | None, value: Any) -> Any:
    """Pay for the text of a value. Objects have no text that is the same in every run."""
    if type(value) is str and len(value) <= _FREE:  # the usual case, in less time
        return value
    if type(value) is not str:
        weigh(value, CURRENT.get().steps, strict=True)
    pay(value)
    return value


# --- What the compiled template calls ---------------------------------------------------------


def body(steps: int) -> bool:
    """Pay for the body of a loop, macro or block."""
    spend(max(int(steps), 0))
    return True


def added(values: Sequence[Any]) -> Any:
    """The operators `+` of an expression such as a + b + c."""
    if {*map(type, values)} <= {str}:
        return concatenated(values)
    return functools.reduce(_added, values)


def _added(left: Any, right: Any) -> Any:
    pay(left, right)
    return left + right


def concatenated(values: Sequence[Any]) -> str:
    """The operator `~`."""
    for value in values:
        if type(value) is not str or len(value) > _FREE:
            output(None, value)
    return "".join(map(str, values))


def searched(value: Any) -> Any:
    """Pay for `in`, which compares with all items of a list, but not of a dict."""
    return skimmed(value) if isinstance(value, dict) else paid(value)


# --- Operations whose result may be far larger than what they read -----------------------------


def multiplied(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            spend(weigh(one, CURRENT.get().steps) * max(other, 0))
    _check_bits(_bits(left) + _bits(right))
    return left * right


def power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(_bits(left) * max(right, 1))
    return left**right


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise BudgetError("it makes a huge number")


def modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _pay_format(left, right)
    return left % right


def _pay_format(text: str, values: Any) -> None:
    """Pay for the operator `%`; widths are digits in the text, or numbers among the values."""
    steps = weigh(values, CURRENT.get().steps, strict=True)
    given = values if isinstance(values, tuple) and "*" in text else ()
    widths = [abs(value) for value in given if isinstance(value, int)]
    widths += [int(width) for width in re.findall(r"\d{1,9}", text)]
    if max(widths, default=0) > _WIDTH:
        raise BudgetError(f"it formats a text with a number above {_WIDTH}")
    spend(text.count("%") * (1 + max(widths, default=0) + steps))


def pay_replacing(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    pay(text, old, new)
    spend(str(text).count(str(old)) * len(str(new)) // CHARACTERS)


def pay_joining(between: Any, values: list[Any]) -> None:
    weigh(values, CURRENT.get().steps, strict=True)
    pay(values)
    spend(weigh(between, CURRENT.get().steps) * len(values))


@pass_eval_context
def join(context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    values = list(value)
    pay_joining(d, values)
    joined: str = do_join(context, values, d, attribute)
    return joined


@pass_eval_context
def replace(context: EvalContext, s: str, *parts: Any, **count: Any) -> Any:
    pay_replacing(s, *parts)
    return do_replace(context, s, *parts, **count)


def indent(s: str, width: int | str = 4, *options: Any, **others: Any) -> str:
    size = len(width) if isinstance(width, str) else int(width)
    spend(len(s.splitlines()) * max(size, 1))
    return do_indent(s, width, *options, **others)


def format(value: str, *args: Any, **kwargs: Any) -> str:
    _pay_format(str(value), kwargs or args)
    formatted: str = do_format(value, *args, **kwargs)
    return formatted


def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON as transformers does: its text is not escaped for HTML."""
    pay(x)
    if separators:
        spend(weigh(separators, 99) * weigh(x, CURRENT.get().steps))
    if weigh(indent, 99) and isinstance(indent, int) and indent > _WIDTH:
        raise BudgetError(f"it indents JSON by more than {_WIDTH} spaces")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(x)
    return "".join(map(paid, encoder.iterencode(x)))
