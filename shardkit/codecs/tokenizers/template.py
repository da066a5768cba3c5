"""Chat templates that come from data, rendered by jinja2 as transformers does, but within bounds.

jinja2's sandbox keeps a template from reaching anything but its variables. What it leaves open is
time and memory, so each rendering has a budget of steps, and whatever can take long pays for it in
advance: a loop, macro or block pays for the nodes in its body whenever the body runs, and
operations, functions, filters and outputs pay for the values that they read and make. What is made
of values in two places, as [x, x] is, pays for both: nothing that is small in memory has long text.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from traceback import extract_tb
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import meta, nodes, tests
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, do_format, do_indent, do_join, do_replace
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from shardkit.errors import SampleError, UsageError

STEPS = 1_000_000  # of one rendering, and more for each character of the conversation
STEPS_PER_CHARACTER = 64
_CHARACTERS = 8  # that are read or written in one step
_BITS = 1 << 14  # of a number
MAX_SIZE = 1 << 18  # of a template, in characters
_LARGEST = 1 << 24  # conversation, in steps of reading it
# Today's date would make other tokens of the same data tomorrow. Llama's templates have this one.
DATE = datetime.datetime(2024, 7, 26)

_LEFT_OUT = {  # filters: with another result in each run, or whose result can be far larger
    *("attr", "batch", "center", "filesizeformat", "pprint", "random", "round", "slice"),
    *("striptags", "sum", "urlencode", "urlize", "wordwrap", "xmlattr"),
}
_METHODS: dict[type, set[str]] = {  # that a template may use
    str: {
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
        *("isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle"),
        *("isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
        *("startswith", "strip", "swapcase", "title", "upper"),
    },
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
}
_PLAIN = (int, float, bool, type(None), Undefined)

Span = tuple[int, int]


class BudgetError(Exception):
    """A template takes more steps than a rendering may."""


@dataclass
class _Rendering:
    """What is left of the budget; and what was written so far, with the marked spans of it."""

    steps: int
    length: int = 0
    marked: list[tuple[int, str]] = field(default_factory=list)

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise BudgetError("it takes too many steps: a loop without end, or a huge text")


_CURRENT: ContextVar[_Rendering] = ContextVar("rendering")


def _spend(steps: int) -> None:
    _CURRENT.get().spend(steps)


def weigh(value: Any, limit: int, strict: bool = False) -> int:
    """Return the steps that reading a value takes; stops with BudgetError above the limit.

    `strict`: raise TypeError for other objects than those of JSON.
    """
    if type(value) is str:
        return 1 + len(value) // _CHARACTERS
    steps, rest = 0, [value]
    while rest:
        one = rest.pop()
        steps += 1
        if isinstance(one, str):
            steps += len(one) // _CHARACTERS
        elif isinstance(one, dict):
            rest += one.keys()
            rest += one.values()
        elif isinstance(one, list | tuple):
            rest += one
        elif isinstance(one, range):
            steps += len(one)
        elif strict and not isinstance(one, _PLAIN):
            raise TypeError(f"{type(one).__name__} is not a type of JSON")
        if steps > limit:
            raise BudgetError("it makes a huge value")
    return steps


def _pay(*values: Any) -> None:
    """Spend the steps of reading these values."""
    rendering = _CURRENT.get()
    for value in values:
        rendering.spend(weigh(value, rendering.steps))


def _paid(value: Any) -> Any:
    """Return a value that was made, or an iterator of such values, after paying for it."""
    if isinstance(value, GeneratorType):
        return map(_paid, value)
    _pay(value)
    return value


@jinja2.pass_context  # so jinja2 does not evaluate constant outputs while compiling
def _output(_: Context | None, value: Any) -> Any:
    """Pay for the text of a value. Objects have no text that is the same in every run."""
    if type(value) is not str:
        weigh(value, _CURRENT.get().steps, strict=True)
    _pay(value)
    return value


# --- What the compiled template calls ---------------------------------------------------------


def _body(steps: int) -> bool:
    """Pay for the body of a loop, macro or block."""
    _spend(max(int(steps), 0))
    return True


def _concatenated(values: Iterable[Any]) -> str:
    """The operator `~`."""
    values = tuple(values)
    for value in values:
        _output(None, value)
    return "".join(map(str, values))


def _searched(value: Any) -> Any:
    """Pay for `in`, which looks up keys of a dict without reading all."""
    if not isinstance(value, dict):
        _pay(value)
    return value


_INTERNAL: dict[str, Callable[..., Any]] = {
    "#body": _body,
    "#concatenated": _concatenated,
    "#paid": _paid,
    "#searched": _searched,
}


class _Payments(NodeTransformer):
    """Adds the payments to the syntax tree of a template.

    They are filters, as the compiled template calls these directly.
    """

    def get_visitor(self, node: nodes.Node) -> Any:
        return getattr(self, f"_{type(node).__name__.lower()}", None)

    def _for(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        pay = _filter(nodes.Const(_nodes_in(node.body)), "#body")
        # A loop whose test is false each time does not run its body.
        node.test = pay if node.test is None else nodes.And(pay, node.test)
        return node

    def _with_body(self, node: Any) -> Any:
        self.generic_visit(node)
        pay = nodes.ExprStmt(_filter(nodes.Const(_nodes_in(node.body)), "#body"))
        node.body.insert(0, pay)
        return node

    _macro = _callblock = _block = _with_body

    def _concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load"), "#concatenated")

    def _made(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        stores = getattr(node, "ctx", "load") != "load"
        return node if stores or _is_constant(node) else _filter(node, "#paid")

    _list = _tuple = _dict = _made

    def _getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, "#paid")
        return node

    def _compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        constant = _is_constant(node.expr)
        for other in node.ops:
            if _is_constant(other.expr):
                constant = True
            elif other.op in ("in", "notin"):
                other.expr = _filter(other.expr, "#searched")
            elif not constant:
                other.expr = _filter(other.expr, "#paid")
                node.expr = _filter(node.expr, "#paid")
        return node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Node) -> bool:
    kinds = nodes.Const | nodes.List | nodes.Tuple
    return isinstance(node, kinds) and all(map(_is_constant, node.iter_child_nodes()))


def _nodes_in(body: Iterable[nodes.Node]) -> int:
    """Return the steps of running a body once, without what its operations pay."""
    return sum(
        1 + len(getattr(node, "data", "")) // _CHARACTERS + _nodes_in(node.iter_child_nodes())
        for node in body
    )


# --- Operations whose result may be far larger than what they read -----------------------------


def _multiplied(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            _spend(weigh(one, _CURRENT.get().steps) * max(other, 0))
    _check_bits(_bits(left) + _bits(right))
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(_bits(left) * max(right, 1))
    return left**right


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise BudgetError("it makes a huge number")


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _pay_format(left, right)
    return left % right


def _pay_format(text: str, values: Any) -> None:
    widths = [int(width) for width in re.findall(r"\d{1,9}", text)]
    if "*" in text or max(widths, default=0) > 999:
        raise BudgetError("it formats a value with a width above 999")
    limit = _CURRENT.get().steps
    _spend(text.count("%") * (1 + max(widths, default=0) + weigh(values, limit, strict=True)))


def _added(left: Any, right: Any) -> Any:
    _pay(left, right)
    return left + right


def _pay_replacing(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    _pay(text, old, new)
    _spend(str(text).count(str(old)) * len(str(new)) // _CHARACTERS)


def _pay_joining(between: Any, values: list[Any]) -> None:
    weigh(values, _CURRENT.get().steps, strict=True)
    _pay(values)
    _spend(weigh(between, _CURRENT.get().steps) * len(values))


@jinja2.pass_eval_context
def _join(
    context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None
) -> str:
    values = list(value)
    _pay_joining(d, values)
    joined: str = do_join(context, values, d, attribute)
    return joined


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, s: str, *parts: Any, **count: Any) -> Any:
    _pay_replacing(s, *parts)
    return do_replace(context, s, *parts, **count)


def _indent(s: str, width: int | str = 4, *options: Any, **others: Any) -> str:
    size = len(width) if isinstance(width, str) else int(width)
    _spend(len(s.splitlines()) * max(size, 1))
    return do_indent(s, width, *options, **others)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _pay_format(str(value), kwargs or args)
    formatted: str = do_format(value, *args, **kwargs)
    return formatted


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON as transformers does: its text is not escaped for HTML."""
    _pay(x)
    if weigh((indent, separators), 99) and isinstance(indent, int) and indent > 99:
        raise BudgetError("it indents JSON by more than 99 spaces")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return "".join(map(_paid, encoder.iterencode(x)))


# --- The environment ------------------------------------------------------------------------------


def _metered(function: Any) -> Callable[..., Any]:
    """Return a filter or test that pays for its arguments, and for what it makes."""

    @functools.wraps(function)  # also what jinja2 passes to it
    def call(*args: Any, **kwargs: Any) -> Any:
        _pay(*args, *kwargs.values())
        return _paid(function(*args, **kwargs))

    return call


class _Namespace(Namespace):
    """A namespace without attributes that Python or jinja2 may use themselves."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    made = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        made[name] = value
    return made


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function, as the type has methods that are not bounded."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 99:
        raise BudgetError("it formats the date with more than 99 characters")
    return DATE.strftime(format)


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, around what a model generates."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("marked"), [], [], body)
        return block.set_lineno(line)

    def marked(self, caller: Macro) -> str:
        text: str = caller()
        rendering = _CURRENT.get()
        rendering.marked.append((rendering.length, text))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_output,
            optimized=False,  # constants would be computed without a budget
        )
        own: dict[str, Any] = {
            "tojson": _tojson,
            "join": _join,
            "replace": _replace,
            "indent": _indent,
        }
        own["format"] = _format
        safe = {name: made for name, made in FILTERS.items() if name not in _LEFT_OUT}
        self.filters = {name: _metered(made) for name, made in (safe | own).items()} | _INTERNAL
        self.tests = {name: _metered(made) for name, made in tests.TESTS.items()}
        del self.globals["lipsum"]
        self.globals |= {"dict": _dict, "namespace": _namespace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.binop_table |= {"+": _added, "*": _multiplied, "%": _modulo, "**": _power}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Payments().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        plain = isinstance(obj, int | float | range | GeneratorType)
        return not plain and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"a template may not use {attribute!r} of {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> None:
        """`format` is not among the methods of strings that a template may use."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", None)
        _pay(owner, *args, *kwargs.values())
        if isinstance(owner, str) and name == "join":
            args = (list(*args),)
            _pay_joining(owner, *args)
        elif isinstance(owner, str) and name == "replace":
            _pay_replacing(owner, *args, **kwargs)
        return _paid(super().call(__context, __obj, *args, **kwargs))


@functools.lru_cache(maxsize=16)
def _compiled(text: str, path: str) -> jinja2.Template:
    environment = _Environment()
    code = environment.compile(text, filename=path)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


@dataclass(frozen=True)
class Template:
    """A template's text, and the file that it is from; compiled once per process."""

    text: str
    path: str

    def check(self) -> None:
        """Compile the template. Raises UsageError, with its line, if it cannot be rendered."""
        try:
            if len(self.text) > MAX_SIZE:
                raise TemplateSyntaxError(f"it has more than {MAX_SIZE} characters", 1)
            _compiled(self.text, self.path)
        except TemplateSyntaxError as error:
            raise self._invalid(str(error.message), error.lineno) from error
        except (RecursionError, SyntaxError) as error:  # of Python, which it becomes
            raise self._invalid(f"too deeply nested: {error}") from error

    @property
    def is_marked(self) -> bool:
        """Whether the template marks what is generated."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    @property
    def variables(self) -> set[str]:
        """The variables that it takes from outside."""
        environment = _compiled(self.text, self.path).environment
        return meta.find_undeclared_variables(environment.parse(self.text))

    def render(self, variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Return the text, and the spans that the template marks as generated, in characters.

        Raises SampleError for variables that the template cannot render within its budget.
        """
        template = _compiled(self.text, self.path)
        try:
            size = weigh(variables, _LARGEST, strict=True) * _CHARACTERS
            rendering = _Rendering(STEPS + STEPS_PER_CHARACTER * size)
            return _text_and_spans(template, variables, rendering)
        except RecursionError as error:
            raise self._failure("RecursionError: it is nested too deeply", error) from error
        except (BudgetError, TemplateError) as error:
            raise self._failure(str(error), error) from error
        except MemoryError:
            raise
        except Exception as error:  # whatever Python raises for the template's operations
            raise self._failure(f"{type(error).__name__}: {error}", error) from error

    def _failure(self, found: str, error: BaseException) -> SampleError:
        line = next(
            (
                f.lineno
                for f in reversed(extract_tb(error.__traceback__))
                if f.filename == self.path
            ),
            None,
        )
        return SampleError(
            "the chat template cannot render a conversation",
            found=f"{self._at(line)}{found:.300}",
            fix="change the conversation or the template, or leave the conversation out with "
            "--on-error skip",
        )

    def _invalid(self, why: str, line: int | None = None) -> UsageError:
        return UsageError(
            "a chat template is not valid",
            path=self.path,
            found=f"{self._at(line)}{why:.300}",
            fix="correct the template: jinja2, as transformers renders it",
        )

    def _at(self, line: int | None) -> str:
        """Return the number and text of a line, as the beginning of a message."""
        lines = self.text.splitlines()
        if line is None or not 0 < line <= len(lines):
            return ""
        return f"line {line}, {lines[line - 1].strip():.100}: "


def _text_and_spans(
    template: jinja2.Template, variables: Mapping[str, Any], rendering: _Rendering
) -> tuple[str, list[Span]]:
    token = _CURRENT.set(rendering)
    pieces = []
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            rendering.length += len(piece)
    finally:
        _CURRENT.reset(token)
    text = "".join(pieces)
    if not all(text.startswith(marked, start) for start, marked in rendering.marked):
        raise TemplateError(
            "{% generation %} is in a macro or in a set or filter block: the position of what it "
            "marks is not known"
        )
    return text, [(start, start + len(marked)) for start, marked in rendering.marked]
