"""Chat templates that come from data, rendered by jinja2 as transformers does, but within bounds.

jinja2's sandbox keeps a template from reaching anything but its variables. What it leaves open is
time and memory, so each rendering has a budget of steps (`budget.py`): a loop, macro or block pays
for the nodes in its body whenever the body runs; operations, functions, filters, tests and outputs
pay for the values that they read and make.
"""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from traceback import walk_tb
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes, tests
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from shardkit.codecs.tokenizers import budget
from shardkit.codecs.tokenizers.budget import BudgetError, Rendering
from shardkit.errors import SampleError, UsageError

_CALL = 60  # steps of calling a macro or block, without its body
MAX_SIZE = 1 << 17  # of a template, in characters
# Today's date would make other tokens of the same data tomorrow. Llama's templates have this one.
DATE = datetime.datetime(2024, 7, 26)

_LEFT_OUT = {  # filters: with another result in each run, or whose result can be far larger
    *("attr", "batch", "center", "filesizeformat", "pprint", "random", "round", "slice"),
    *("striptags", "sum", "urlencode", "urlize", "wordwrap", "xmlattr"),
}
_OWN = ("format", "indent", "join", "replace", "tojson")  # filters, in budget.py
_SKIMMING = {  # filters that do not look into the items of their value
    *("count", "d", "default", "first", "items", "last", "length", "list", "map", "reject"),
    *("rejectattr", "reverse", "select", "selectattr"),
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
_OF_DICTS = frozenset(dir(dict))

Span = tuple[int, int]


# Filters, as the compiled template calls these directly. A template can name them only in a string
# for `map`, where they do nothing useful.
_PAYING: dict[str, Callable[..., Any]] = {
    "#added": budget.added,
    "#body": budget.body,
    "#concatenated": budget.concatenated,
    "#paid": budget.paid,
    "#searched": budget.searched,
    "#skimmed": budget.skimmed,
}


class _Payments(NodeTransformer):
    """Adds the payments to the syntax tree of a template."""

    def get_visitor(self, node: nodes.Node) -> Any:
        return getattr(self, f"_{type(node).__name__.lower()}", None)

    def _for(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        steps = 1 + _nodes_in([*node.body, *([node.test] if node.test else [])])
        pay = _filter(nodes.Const(steps + _CALL * node.recursive), "#body")
        # A loop whose test is false each time does not run its body.
        node.test = pay if node.test is None else nodes.And(pay, node.test)
        return node

    def _with_body(self, node: Any) -> Any:
        self.generic_visit(node)
        pay = nodes.ExprStmt(_filter(nodes.Const(_nodes_in(node.body) + _CALL), "#body"))
        node.body.insert(0, pay)
        return node

    _macro = _callblock = _block = _with_body

    def _const(self, node: nodes.Const) -> nodes.Const:
        budget.weigh(node.value, MAX_SIZE)  # no huge number
        return node

    def _add(self, node: nodes.Add) -> nodes.Filter:
        self.generic_visit(node)
        left = node.left
        if not (isinstance(left, nodes.Filter) and left.name == "#added"):
            left = _filter(nodes.Tuple([left], "load"), "#added")
        assert isinstance(left.node, nodes.Tuple)
        left.node.items.append(node.right)
        return left

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
            node.node = _filter(node.node, "#skimmed")
        return node

    def _compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        operands: list[Any] = [node, *node.ops]
        for left, right in itertools.pairwise(operands):
            within, constant = right.op in ("in", "notin"), _is_constant(left.expr)
            if _is_constant(right.expr) or (constant and not within):
                continue
            right.expr = _filter(right.expr, "#searched" if within else "#paid")
            if not constant:
                left.expr = _filter(left.expr, "#paid")
        return node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Node) -> bool:
    kinds = nodes.Const | nodes.List | nodes.Tuple
    return isinstance(node, kinds) and all(map(_is_constant, node.iter_child_nodes()))


def _nodes_in(body: Iterable[nodes.Node]) -> int:
    """Return the steps of running a body once, without what its operations pay."""
    return sum(
        1 + len(getattr(node, "data", "")) // budget.CHARACTERS + _nodes_in(node.iter_child_nodes())
        for node in body
    )


# --- The environment ------------------------------------------------------------------------------


def _metered(function: Any, name: str = "") -> Callable[..., Any]:
    """Return a filter or test that pays for its arguments, and for what it makes."""
    pay = budget.skimmed if name in _SKIMMING else budget.paid

    @functools.wraps(function)  # also what jinja2 passes to it
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            pay(value)
        return pay(function(*args, **kwargs))

    return call


class _Namespace(Namespace):
    """A namespace without attributes that Python or jinja2 may use themselves."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        raise TypeError("a namespace has no text")  # of a bounded size


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
        assert isinstance(self.environment, _Environment)
        self.environment.is_marked = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("marked"), [], [], body)
        return block.set_lineno(line)

    def marked(self, caller: Macro) -> str:
        text: str = caller()
        rendering = budget.CURRENT.get()
        rendering.marked.append((rendering.length, text))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    is_marked = False  # whether the template that was compiled has generation marks
    intercepted_binops = frozenset(("*", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=budget.output,
            optimized=False,  # constants would be computed without a budget
        )
        own = {name: getattr(budget, name) for name in _OWN}
        safe = {name: made for name, made in FILTERS.items() if name not in _LEFT_OUT}
        self.filters = {name: _metered(made, name) for name, made in (safe | own).items()} | _PAYING
        self.tests = {name: _metered(made) for name, made in tests.TESTS.items()}
        del self.globals["lipsum"]
        self.globals |= {"dict": _dict, "namespace": _namespace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.binop_table |= {"*": budget.multiplied, "%": budget.modulo, "**": budget.power}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Payments().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICTS:  # the usual case, in less time
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Pay for a key, which is hashed; and for each part of an `attribute` of filters."""
        budget.spend(1 if isinstance(obj, dict | list) else 9)  # others are tried in several ways
        budget.pay(argument)
        return super().getitem(obj, argument)

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
        budget.searched(owner)
        budget.pay(*args, *kwargs.values())
        if isinstance(owner, str) and name == "join":
            args = (list(*args),)
            budget.pay_joining(owner, *args)
        elif isinstance(owner, str) and name == "replace":
            budget.pay_replacing(owner, *args, **kwargs)
        return budget.paid(super().call(__context, __obj, *args, **kwargs))


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
        except Exception as error:  # of jinja2, or of Python, which it becomes: deep nesting, ...
            raise self._invalid(f"{type(error).__name__}: {error}") from error

    @property
    def is_marked(self) -> bool:
        """Whether the template marks what is generated."""
        environment = _compiled(self.text, self.path).environment
        assert isinstance(environment, _Environment)
        return environment.is_marked

    def steps(self, variables: Mapping[str, Any]) -> int:
        """Return the steps that rendering these variables may take.

        Raises SampleError for variables that are too large, or other than JSON.
        """
        try:
            size = budget.weigh(variables, budget.LARGEST, strict=True)
        except (BudgetError, TypeError) as error:
            raise SampleError(
                "a conversation is too large, or has other values than JSON",
                expected=f"at most {budget.LARGEST * budget.CHARACTERS} characters",
                found=str(error),
            ) from error
        return budget.STEPS + budget.PASSES * size

    def render(self, variables: Mapping[str, Any], steps: int) -> tuple[str, list[Span], int]:
        """Return the text; the spans of it that are marked, in characters; and the steps left.

        Raises SampleError for variables that the template cannot render in so many steps.
        """
        template, rendering = _compiled(self.text, self.path), Rendering(steps)
        try:
            return *_text_and_spans(template, variables, rendering), rendering.steps
        except RecursionError as error:
            raise self._failure("RecursionError: it is nested too deeply", error) from error
        except (BudgetError, TemplateError) as error:
            raise self._failure(str(error), error) from error
        except MemoryError:
            raise
        except Exception as error:  # whatever Python raises for the template's operations
            raise self._failure(f"{type(error).__name__}: {error}", error) from error

    def _failure(self, found: str, error: BaseException) -> SampleError:
        frames = list(walk_tb(error.__traceback__))
        ours = [line for frame, line in frames if frame.f_code.co_filename == self.path]
        return SampleError(
            "the chat template cannot render a conversation",
            found=f"{self._at(*ours[-1:])}{found:.300}",
            fix="change the conversation or the template, or leave the conversation out with "
            "--on-error skip",
        )

    def _invalid(self, why: str, line: int | None = None) -> UsageError:
        return UsageError(
            "a chat template is not valid",
            path=self.path,
            found=f"{self._at(line)}{why:.300}",
            fix="correct the template; it is rendered as by transformers, but without the filters "
            + ", ".join(sorted(_LEFT_OUT)),
        )

    def _at(self, line: int | None = None) -> str:
        """Return the number and text of a line, as the beginning of a message."""
        lines = self.text.splitlines()
        if line is None or not 0 < line <= len(lines):
            return ""
        return f"line {line}, {lines[line - 1].strip():.100}: "


def _text_and_spans(
    template: jinja2.Template, variables: Mapping[str, Any], rendering: Rendering
) -> tuple[str, list[Span]]:
    token = budget.CURRENT.set(rendering)
    pieces = []
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            rendering.length += len(piece)
    finally:
        budget.CURRENT.reset(token)
    text = "".join(pieces)
    if not all(text.startswith(marked, start) for start, marked in rendering.marked):
        raise TemplateError(
            "{% generation %} is in a macro or in a set or filter block: the position of what it "
            "marks is not known"
        )
    return text, [(start, start + len(marked)) for start, marked in rendering.marked]
